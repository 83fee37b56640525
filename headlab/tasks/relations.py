"""Relations: source words and the target words that belong to them, as single tokens of a tokenizer.

The shipped ones are headlab's own facts and word lists, one file each in ``data/operations``, in the four kinds of
Elhelo & Geva 2025 (MAPS): knowledge, language, translation, algorithmic. As there, words get a space in front, both
sides must be single tokens, and k is 1 for copying relations and 10 otherwise.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from headlab.errors import PromptError
from headlab.tasks.prose import data_folder
from headlab.tasks.records import RecordError, RecordsLike, read_records
from headlab.tasks.relation import GENERAL_TEMPLATES, Relation, RelationKind
from headlab.text import is_text, shown, visible

#: What to do with words that are several tokens.
MultiToken: TypeAlias = Literal["skip", "ends"]

#: What is said of records that may be single pairs: wrong fields, or lists.
_SIGNS_OF_PAIRS = (
    "is a required property",
    "unexpected)",
    "is not a mapping",
    "is not a JSON object",
)

#: One relation of the user's.
RELATION_SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A relation",
    "description": "Source words and the target word that belongs to each.",
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": r"\S", "description": "What the relation is called."},
        "pairs": {
            "type": "array",
            "items": {
                "type": "array",
                "items": {"type": "string", "pattern": r"\S"},
                "minItems": 2,
                "maxItems": 2,
            },
            "minItems": 1,
            "description": "Source and target of each pair, each source once; spaces around words do not count.",
        },
        "kind": {
            "enum": list(get_args(RelationKind)),
            "description": "What sort of relation it is; 'given' by default.",
        },
        "about": {"type": "string", "description": "One sentence on what belongs to what."},
        "k": {
            "type": "integer",
            "minimum": 1,
            "description": "How many top tokens may hold the target; 10 by default, 1 for copying.",
        },
        "templates": {
            "type": "array",
            "items": {"type": "string", "pattern": r"\{source\}"},
            "minItems": 1,
            "description": "Prompts with {source} in them that end where the target would follow.",
        },
    },
    "required": ["name", "pairs"],
    "additionalProperties": False,
    "examples": [
        {
            "name": "dish_country",
            "about": "A dish and the country it comes from.",
            "pairs": [["pizza", "Italy"], ["sushi", "Japan"], ["tacos", "Mexico"]],
            "templates": ["The dish called {source} comes from"],
        }
    ],
}


@dataclass(frozen=True)
class TokenPairs:
    """A relation as tokens.

    Attributes:
        relation: The relation.
        sources: Token of each source [n].
        targets: Token of each target [n].
        words: The pairs that are kept, in the same order.
        left_out: The pairs that are not, each with the reason.
    """

    relation: Relation
    sources: Int[Tensor, " n"]
    targets: Int[Tensor, " n"]
    words: tuple[tuple[str, str], ...]
    left_out: tuple[tuple[tuple[str, str], str], ...]

    def __len__(self) -> int:
        return len(self.words)

    def __repr__(self) -> str:
        return f"TokenPairs({self.relation.name!r}, {len(self)} of {len(self.relation)} pairs)"

    def said(self, shown: int = 3) -> str:
        """How many pairs remain, and why the first of the others do not."""
        name = visible(self.relation.name)
        kept = f"{name}: {len(self)} of {len(self.relation)} pairs remain"
        if not self.left_out:
            return kept
        some = "; ".join(f"{s!r} → {t!r}: {why}" for (s, t), why in self.left_out[:shown])
        more = len(self.left_out) - shown
        return f"{kept}; left out: {some}" + (f"; and {more} more" if more > 0 else "")


def relations(which: str | Iterable[str] = "all") -> tuple[Relation, ...]:
    """headlab's relations.

    Args:
        which: ``"all"``, a kind, a name, several of these joined by commas, or a list of them.

    Raises:
        PromptError: There is no such relation, or the data cannot be read.
    """
    shipped = _shipped()
    given = which.split(",") if isinstance(which, str) else which
    asked = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(name, str) for name in asked):
        raise PromptError(f"relations are asked for by name, not by {shown(which)}")
    chosen: dict[str, Relation] = {}
    for name in (name.strip() for name in asked):
        found = [each for each in shipped.values() if name in ("all", each.kind, each.name)]
        if not found:
            raise PromptError(
                f"there is no relation {name!r}; there are {', '.join(shipped)}, and the kinds "
                "knowledge, language, translation and algorithmic"
            )
        chosen |= {each.name: each for each in found}
    if not chosen:
        raise PromptError(f"no relation was asked for; choose among {', '.join(shipped)}")
    return tuple(chosen.values())


def given_relations(source: RecordsLike | Mapping[str, Any]) -> tuple[Relation, ...]:
    """Relations of the user's own, by :data:`RELATION_SCHEMA`.

    Args:
        source: A JSON Lines file, a JSON file that holds one relation or a list of them, or records.

    Raises:
        RecordError: A record does not fit the schema, is empty, gives a source twice, or has another's name.
            Each record is one whole relation, not one pair.
    """
    if isinstance(source, Mapping):
        source = [source]
    if isinstance(source, str | Path):
        whole = _whole_file(Path(source))
        source = source if whole is None else whole
    found: dict[str, Relation] = {}
    try:
        records = read_records(source, RELATION_SCHEMA, "relations")
    except RecordError as error:
        if not any(sign in str(error) for sign in _SIGNS_OF_PAIRS):
            raise
        raise RecordError(
            f"{error}; one record (a line of a JSON Lines file) is one whole relation, with its name and all its pairs"
        ) from error
    for record in records:
        relation = _relation(record)
        if relation.name in found:
            raise RecordError(f"two relations are called {relation.name!r:.60}; rename one")
        found[relation.name] = relation
    return tuple(found.values())


def token_pairs(
    relation: Relation,
    tokenizer: Any,
    *,
    multi_token: MultiToken = "skip",
    n_vocab: int | None = None,
) -> TokenPairs:
    """The pairs of a relation as single tokens.

    Args:
        relation: The relation.
        tokenizer: Of the model.
        multi_token: ``"skip"`` leaves out pairs with a word of several tokens, as MAPS does. ``"ends"`` takes the
            source's last token and the target's first, still with a space in front: our reading of the multi-token
            variant of MAPS, unverified (the paper's code is said to leave the space out there).
        n_vocab: Tokens the model has; pairs with others, of a tokenizer with more, are left out. All by default.

    Raises:
        PromptError: There is no tokenizer, or no such policy.
    """
    if tokenizer is None:
        raise PromptError("relations of words need a model with a tokenizer")
    if multi_token not in get_args(MultiToken):
        raise PromptError(f"multi_token is {multi_token!r}; it can be 'skip' or 'ends'")
    kept: dict[int, tuple[int, tuple[str, str]]] = {}
    left_out = []
    for pair in relation.pairs:
        sides = [word_tokens(tokenizer, word) for word in pair]
        source, target = (sides[0] or [-1])[-1], (sides[1] or [-1])[0]
        if why := _why_not(pair, sides, multi_token):
            left_out.append((pair, why))
        elif n_vocab is not None and max(source, target) >= n_vocab:
            word, token = max(zip(pair, (source, target), strict=True), key=lambda each: each[1])
            left_out.append((pair, f"{word!r} is token {token}, which the model does not have"))
        elif source in kept:
            left_out.append((pair, f"its source is the same token as {kept[source][1][0]!r}"))
        elif pair[0] != pair[1] and source == target:
            left_out.append((pair, "both words are the same token"))
        else:
            kept[source] = target, pair
    return TokenPairs(
        relation,
        torch.tensor(list(kept), dtype=torch.long),
        torch.tensor([target for target, _ in kept.values()], dtype=torch.long),
        tuple(pair for _, pair in kept.values()),
        tuple(left_out),
    )


def word_tokens(tokenizer: Any, word: str) -> list[int]:
    """Tokens of a word in the middle of a sentence; none for a word the tokenizer does not know.

    A space goes in front. Tokenizers that put one in front of every text by themselves (SentencePiece's dummy prefix)
    would read two, so they are given the bare word. Half a character (a lone surrogate) is no word to any tokenizer.
    """
    if not is_text(word):
        return []
    ids = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
    bare = tokenizer(word, add_special_tokens=False)["input_ids"]
    if (
        bare
        and len(bare) < len(ids)
        and tokenizer.convert_ids_to_tokens(bare[0]).startswith("\u2581")
    ):
        ids = bare
    known = _plain(tokenizer.decode(ids)) == _plain(word)
    return [int(token) for token in ids] if known else []


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).strip().casefold()


def _why_not(pair: Sequence[str], sides: Sequence[list[int]], multi_token: MultiToken) -> str:
    for what, word, tokens in zip(("source", "target"), pair, sides, strict=True):
        if not tokens:
            return f"the tokenizer does not know the {what} {word!r}"
        if multi_token == "skip" and len(tokens) > 1:
            return f"the {what} {word!r} is {len(tokens)} tokens behind a space"
    return ""


def _relation(record: Mapping[str, Any]) -> Relation:
    own = tuple(record.get("templates", ()))
    return Relation(
        name=record["name"],
        kind=record.get("kind", "given"),
        about=record.get("about", ""),
        pairs=tuple((source.strip(), target.strip()) for source, target in record["pairs"]),
        k=record.get("k"),
        templates=(*GENERAL_TEMPLATES, *own),
    )


def _whole_file(path: Path) -> list[Any] | None:
    """The records of a file that is one JSON list, or one object over several lines; None for JSON Lines."""
    try:
        text = path.read_text("utf-8-sig").strip()
    except (OSError, ValueError):
        return None  # reading it as JSON Lines says what is wrong
    try:
        whole = json.loads(text, object_pairs_hook=lambda fields: _each_once(fields, path))
    except (ValueError, RecursionError):
        return None
    if isinstance(whole, list):
        return whole
    return [whole] if isinstance(whole, dict) and "\n" in text else None


def _each_once(fields: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    found = dict(fields)
    if len(found) < len(fields):
        names = [name for name, _ in fields]
        twice = next(name for name in names if names.count(name) > 1)
        raise RecordError(f"{path} gives {twice!r} twice in one record; keep one")
    return found


@cache
def _shipped() -> dict[str, Relation]:
    folder = data_folder() / "operations"
    try:
        records = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
        found = [_relation(record) for record in records]
    except (OSError, ValueError, KeyError) as error:
        raise PromptError(f"the relations in {folder} cannot be read: {error}") from error
    if not found:
        raise PromptError(f"{folder} holds no relation")
    kinds = get_args(RelationKind)
    found.sort(key=lambda each: (kinds.index(each.kind), each.name))
    return {each.name: each for each in found}


__all__ = [
    "GENERAL_TEMPLATES",
    "RELATION_SCHEMA",
    "MultiToken",
    "Relation",
    "RelationKind",
    "TokenPairs",
    "given_relations",
    "relations",
    "token_pairs",
    "word_tokens",
]
