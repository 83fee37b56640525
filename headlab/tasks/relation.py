"""A relation: source words and the target word that belongs to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from headlab.arguments import is_integer
from headlab.tasks.records import RecordError
from headlab.text import is_text, shown

#: The kinds of Elhelo & Geva 2025, and the user's own.
RelationKind: TypeAlias = Literal["knowledge", "language", "translation", "algorithmic", "given"]
#: The largest k that means anything: there is no vocabulary as large.
_MOST = (1 << 31) - 1

#: Sentences that name a source and leave open what comes next, in the manner of MAPS' four templates.
GENERAL_TEMPLATES = (
    "Without {source} there is no",
    "The tale of {source} speaks of",
    "This page is all about {source} and",
    "Whenever people hear {source} they think of",
)


@dataclass(frozen=True)
class Relation:
    """Source words and the target word that belongs to each.

    Attributes:
        name: What it is called.
        kind: ``"knowledge"``, ``"language"``, ``"translation"``, ``"algorithmic"``, or ``"given"`` by the user.
        about: What belongs to what, in one sentence.
        pairs: Source and target; each source once.
        k: How many top tokens may hold the target; None for the default of 10.
        templates: Prompts with ``{source}`` in them: :data:`GENERAL_TEMPLATES` and, last, the relation's own.

    Raises:
        RecordError: There is no pair, a source comes twice, a word is blank or no text, or another field is
            not as above.
    """

    name: str
    kind: RelationKind
    about: str
    pairs: tuple[tuple[str, str], ...]
    k: int | None = None
    templates: tuple[str, ...] = GENERAL_TEMPLATES

    def __post_init__(self) -> None:
        if not is_text(self.name) or not self.name.strip():
            raise RecordError(
                f"a relation's name must be text that is not blank, not {shown(self.name)}"
            )
        fault = _fault(self)
        if fault:
            raise RecordError(f"relation {self.name!r:.60} {fault}")
        object.__setattr__(self, "k", None if self.k is None else int(self.k))
        object.__setattr__(self, "pairs", tuple((pair[0], pair[1]) for pair in self.pairs))
        object.__setattr__(self, "templates", tuple(self.templates))

    def __len__(self) -> int:
        return len(self.pairs)

    def __repr__(self) -> str:
        return f"Relation({self.name!r}, {self.kind}, {len(self.pairs)} pairs)"


def _fault(relation: Relation) -> str:
    """What is wrong with a relation's fields, or nothing."""
    kinds, k = get_args(RelationKind), relation.k
    if relation.kind not in kinds:
        return f"is of kind {shown(relation.kind)}; it can be {', '.join(kinds)}"
    if not is_text(relation.about):
        return f"has {shown(relation.about)} as about, which must be text"
    if k is not None and not (is_integer(k) and 1 <= k <= _MOST):
        return f"has k={shown(k)}, which must be a whole number from 1 to {_MOST}"
    if not isinstance(relation.templates, list | tuple) or not all(
        is_text(each) and "{source}" in each for each in relation.templates
    ):
        return f"has templates {shown(relation.templates)}; give a list of texts with {{source}} in them"
    if not isinstance(relation.pairs, list | tuple):
        return f"has {shown(relation.pairs)} as pairs; give a list of (source, target)"
    return _fault_of_pairs(relation.pairs)


def _fault_of_pairs(pairs: Sequence[Any]) -> str:
    if not pairs:
        return "holds no pair; give at least one"
    targets: dict[str, str] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(map(is_text, pair)):
            return f"holds {shown(pair)}, which is no pair of two words, source and target"
        source, target = pair
        if not source.strip() or not target.strip():
            return f"has no word on one side of {shown((source, target))}; fill it in"
        if source in targets:
            return (
                f"gives source {source!r:.60} twice, with {targets[source]!r:.60} and {target!r:.60}; "
                "keep one"
            )
        targets[source] = target
    return ""


__all__ = ["GENERAL_TEMPLATES", "Relation", "RelationKind"]
