"""What MAPS is asked: relations from names, paths or the user, how the paper scores a model family, and which pairs
stay."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from headlab.arguments import is_finite, rate, whole_number
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.models.spec import ModelSpec
from headlab.parameters.embeddings import EmbeddingKind
from headlab.parameters.maps_document import MappedRelation
from headlab.tasks.relations import Relation, TokenPairs, given_relations, token_pairs
from headlab.tasks.relations import relations as shipped_relations
from headlab.text import shown, visible

if TYPE_CHECKING:
    from headlab.model import Model

#: ``"all"`` shipped relations; names of them, joined by commas or in a list; relations, or records of the user's own; a
#: path to these; or a mixture in a list.
RelationsLike: TypeAlias = "OneOf | Iterable[OneOf]"
OneOf: TypeAlias = "str | Path | Relation | Mapping[str, Any]"

#: Pairs that a relation must keep; with fewer, a share of them says little.
MIN_PAIRS = 30

_SHOWN = 5


@dataclass(frozen=True)
class Convention:
    """How the paper scores a model family.

    Attributes:
        k: A target counts among this many tokens.
        k_copying: The same for relations named copying.
        embedding: What stands for a source.
        holds_for: Whether a model is of that family.
    """

    k: int
    k_copying: int
    embedding: EmbeddingKind
    holds_for: Callable[[ModelSpec], bool]

    def k_of(self, relation: str) -> int:
        """k by the relation's name."""
        return self.k_copying if "copying" in relation.lower() else self.k


def _llama_3(spec: ModelSpec) -> bool:
    return spec.family == "llama" and spec.n_vocab == 128256


#: The paper's settings; of those that hold for a model, ``"auto"`` takes the first. Llama 3 has three times the
#: vocabulary of the other models; for its 70B version the authors use bare embeddings in every layer.
CONVENTIONS: dict[str, Convention] = {
    "llama-3-70b": Convention(25, 3, "raw", lambda spec: _llama_3(spec) and spec.n_layers == 80),
    "llama-3": Convention(25, 3, "auto", _llama_3),
    "default": Convention(10, 1, "auto", lambda spec: True),
}


def vocabulary_size(model: Model) -> int:
    """Token ids that stand for a token: rows beyond the tokenizer's are padding."""
    rows = min(len(model.weights.W_E), model.weights.W_U.shape[1])
    if model.tokenizer is None:
        return rows
    return min(rows, max(model.tokenizer.get_vocab().values()) + 1)


def check_options(
    min_pairs: Any, alpha: Any, min_effect: Any, k: Any
) -> tuple[int, float, float, int | None]:
    """The numbers as Python's own; those that mean nothing are refused.

    Raises:
        PlanError: One means nothing.
    """
    if not is_finite(min_effect) or not 0 <= min_effect < 1:
        raise PlanError(f"min_effect={shown(min_effect)} must be a number at least 0 and below 1")
    return (
        whole_number(min_pairs, "min_pairs", 1),
        rate(alpha),
        float(min_effect),
        None if k is None else whole_number(k, "k", 1),
    )


def check_model(model: Model) -> None:
    """Refuse models that have no rows over the vocabulary to speak of.

    Raises:
        PlanError: Edits are in force.
        PromptError: There is no tokenizer.
        UnsupportedError: A layer is no decoder's, or the unembedding cannot be read.
    """
    if model.tokenizer is None:
        raise PromptError(
            f"{model.name} came without a tokenizer, which relations between words need; load it with tokenizer="
        )
    others = {layer.stack for layer in model.spec.layers} - {"decoder"}
    if others:
        raise UnsupportedError(
            f"MAPS needs a decoder-only model, whose heads write into the stream that the unembedding reads; "
            f"{model.name} ({model.spec.family}) has {' and '.join(sorted(others))} layers"
        )
    if not bool(model.weights.W_U[:, : vocabulary_size(model)].isfinite().all()):
        raise UnsupportedError(
            f"W_U of {model.name} holds NaN or infinity, so no token is among the first"
        )


def convention_of(spec: ModelSpec, name: str) -> tuple[str, Convention]:
    """A convention and its name, by name or for a model.

    Raises:
        PlanError: There is none of that name.
    """
    if name == "auto":
        return next((key, each) for key, each in CONVENTIONS.items() if each.holds_for(spec))
    if not isinstance(name, str) or name not in CONVENTIONS:
        raise PlanError(
            f"there is no convention {shown(name)}; there are auto, {', '.join(CONVENTIONS)}"
        )
    return name, CONVENTIONS[name]


def named_relations(given: RelationsLike) -> tuple[Relation, ...]:
    """The relations that names, paths and relations stand for, each once.

    Raises:
        PromptError: One is not known, cannot be read, or two share a name.
    """
    if isinstance(given, str | Path | Relation | Mapping):
        given = [given]
    if not isinstance(given, Iterable):
        raise PromptError(
            f"relations={shown(given)} must be 'all', names, relations, a path or a list of these"
        )
    asked: list[Any] = list(given)
    if asked and all(isinstance(each, Mapping) for each in asked):
        asked = list(given_relations(asked))
    found: dict[str, Relation] = {}
    for each in asked:
        for relation in _relations_of(each):
            if found.setdefault(relation.name, relation) != relation:
                raise PromptError(
                    f"two different relations are named {relation.name!r:.60}; give each a name of its own"
                )
    if not found:
        raise PromptError("no relation was named; use 'all', or see headlab.tasks.relations")
    return tuple(found.values())


def _relations_of(given: Any) -> Sequence[Relation]:
    if isinstance(given, Relation):
        return (given,)
    if isinstance(given, Path | Mapping):
        return given_relations(given)
    if not isinstance(given, str):
        raise PromptError(f"relations hold {shown(given)}, which is no name, path or relation")
    parts = [given] if os.path.isfile(given) else [part.strip() for part in given.split(",")]
    return [
        relation
        for part in parts
        for relation in (given_relations(part) if _is_path(part) else shipped_relations(part))
    ]


def _is_path(text: str) -> bool:
    """A path has a suffix of JSON's, or separators; a file at hand any suffix."""
    suffix = Path(text).suffix
    return suffix in (".json", ".jsonl") or "/" in text or bool(suffix and os.path.isfile(text))


def usable_relations(
    model: Model,
    relations: Sequence[Relation],
    convention: Convention,
    k: int | None,
    multi_token: Literal["skip", "ends"],
    min_pairs: int,
    n_vocab: int,
) -> tuple[list[tuple[TokenPairs, MappedRelation]], list[MappedRelation]]:
    """Relations with enough pairs, as tokens; and how each relation fared.

    Raises:
        PromptError: None has enough.
        PlanError: k is more than there are tokens.
    """
    used, mapped = [], []
    for relation in relations:
        pairs = token_pairs(relation, model.tokenizer, multi_token=multi_token, n_vocab=n_vocab)
        n, own = len(pairs.sources), k or relation.k or convention.k_of(relation.name)
        if own > n_vocab:
            raise PlanError(
                f"k={shown(own, 20)} for {relation.name!r:.60} is more than the {n_vocab} tokens of {model.name}"
            )
        left_out = tuple((*pair, why) for pair, why in pairs.left_out)
        reason = "" if n >= min_pairs else _too_few(relation, n, min_pairs, left_out)
        each = MappedRelation(
            relation.name, relation.kind, relation.about, own, n, left_out, reason
        )
        mapped.append(each)
        if not reason:
            used.append((pairs, each))
    if not used:
        best = max(mapped, key=lambda each: each.n)
        most = f"{visible(best.name, 60)} has the most: {visible(best.skipped, 1000)}"
        raise PromptError(
            f"no relation has {min_pairs} pairs of words that {model.name} has as single tokens; {most}; give other "
            "words, lower min_pairs, or use multi_token='ends'"
        )
    return used, mapped


def _too_few(
    relation: Relation, n: int, least: int, left_out: Sequence[tuple[str, str, str]]
) -> str:
    shown = ", ".join(
        f"{visible(source)} → {visible(target)} ({why})"
        for source, target, why in left_out[:_SHOWN]
    )
    more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
    lost = f"; left out: {shown}{more}" if left_out else ""
    return f"{n} of {len(relation.pairs)} pairs remain, {least} are needed{lost}"


__all__ = [
    "CONVENTIONS",
    "Convention",
    "RelationsLike",
    "check_model",
    "check_options",
    "convention_of",
    "named_relations",
    "usable_relations",
    "vocabulary_size",
]
