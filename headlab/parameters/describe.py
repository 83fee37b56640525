"""Naming what a set of source → target mappings has in common, offline: rules over relations, strings and word lists.

Elhelo & Geva 2025 (MAPS) give a head's salient mappings to a language model and ask for a pattern. Here rules do it:

* mapping rules: a target among a source's first ones is the source itself, the same word in another form, the target
  that one of headlab's relations gives (or, reversed, its source), the next number, and so on. Null: the rule's hits
  if each source had the targets of another row, in closed form; so a head that writes the same for every source has no
  mapping, only a class of targets.
* classes: sources, or first targets, are names, countries, numbers, code and so on. Null of sources: the class's share
  of the vocabulary. Null of targets: its share of what random directions raise, where that is more; for most of what
  an arbitrary direction raises in the logits are rare pieces of words and code.

Each candidate has its share, its null, an exact p-value (a sum of independent coins) and, over all candidates, a
Benjamini–Hochberg q-value. The pattern names the best of each sort that passes, and is "unclear" where none does. Rules
see letters and lists, not meaning: "unclear" says that no rule fits, not that there is no pattern. Rows are taken as
independent, which salient sources of one head are not quite, so that a least share counts beside the q-value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from headlab.arguments import rate
from headlab.errors import PlanError
from headlab.parameters.relation_significance import poisson_binomial_tail
from headlab.parameters.token_classes import class_shares, classes_of, is_listed, word_of
from headlab.statistics import corrected
from headlab.tasks.relations import Relation, relations

UNCLEAR = "unclear"
#: A source's text, and its targets' best first.
Mapped: TypeAlias = tuple[str, Sequence[str]]
Sort: TypeAlias = Literal["mapping", "sources", "targets"]
_SORTS: tuple[Sort, ...] = ("mapping", "sources", "targets")

#: Fewer rows than this have no pattern.
LEAST_ROWS = 5
#: Shares of rows a rule must hold for: lists hold only some of their kind's words, rules on characters all.
MIN_SHARE_LISTED, MIN_SHARE = 0.2, 0.5
#: What a share must be above its null.
MIN_EFFECT = 0.15

_STEM = 3
_ENDING = 4
#: Relations that rules on strings cover for all words, not only the listed ones.
_AS_STRINGS = frozenset(
    {"copying", "name_copying", "capitalised", "upper_case", "first_letter", "last_letter"}
)


@dataclass(frozen=True)
class Pattern:
    """One candidate name of what mappings have in common.

    Attributes:
        name: The rule.
        sort: Whether it is about source → target, the sources, or the first targets.
        share: Share of the rows it holds for.
        null: The same by chance.
        n: Rows; of targets, different ones.
        p_value: One-sided, exact given independent rows.
        q_value: Benjamini–Hochberg over all candidates.
        claimed: Whether it holds for enough rows, clearly more than by chance.
    """

    name: str
    sort: Sort
    share: float
    null: float
    n: int
    p_value: float
    q_value: float
    claimed: bool

    def __str__(self) -> str:
        return self.name if self.sort == "mapping" else f"{self.sort}: {self.name}"


@dataclass(frozen=True)
class Description:
    """What mappings have in common.

    Attributes:
        pattern: In words; ``"unclear"`` where nothing passes.
        candidates: Rules that hold for any row: claimed ones first, then mappings, sources, targets, best first.
        by: ``"rules"``, or ``"yours"`` for a describer of the user's.
        reasoning: Of the user's describer.
        sources: What the user's describer says of the sources.
    """

    pattern: str
    candidates: tuple[Pattern, ...]
    by: Literal["rules", "yours"] = "rules"
    reasoning: str = ""
    sources: str = ""

    @property
    def clear(self) -> bool:
        """Whether there is a pattern."""
        return self.pattern.casefold() != UNCLEAR

    def __repr__(self) -> str:
        return f"Description({self.pattern!r}, {len(self.candidates)} candidates, by {self.by})"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def describe_mappings(
    mappings: Sequence[Mapped],
    shares: Mapping[str, float],
    target_shares: Mapping[str, float] | None = None,
    *,
    alpha: float = 0.05,
) -> Description:
    """Name what mappings have in common, by rules.

    Args:
        mappings: Text of each source and of its targets, best first.
        shares: Each class's share of the vocabulary: :func:`class_shares`.
        target_shares: Each class's share of first targets by chance; by default that of the vocabulary.
        alpha: False-discovery rate over the candidates.

    Raises:
        PlanError: alpha is no number between 0 and 1, or a mapping has no target.
    """
    alpha = rate(alpha)
    for source, targets in mappings:
        if not targets:
            raise PlanError(f"mapping of {source!r} has no target; give at least one")
    if len(mappings) < LEAST_ROWS:
        return Description(UNCLEAR, ())
    tried = [*_mapping_rules(mappings), *_class_rules(mappings, shares, target_shares or shares)]
    found = _judged(tried, alpha)
    return Description(_named(found), tuple(each for each in found if each.share > 0))


@dataclass(frozen=True)
class _Tried:
    """A rule's hits and chances, before it is judged."""

    name: str
    sort: Sort
    hits: np.ndarray
    chances: np.ndarray
    least: float


def _judged(tried: Sequence[_Tried], alpha: float) -> list[Pattern]:
    p = np.array(
        [
            poisson_binomial_tail(each.chances[None], np.array([each.hits.sum()]))[0]
            for each in tried
        ]
    )
    found = []
    for each, p_value, q in zip(tried, p, corrected(p), strict=True):
        share, null = float(each.hits.mean()), float(each.chances.mean())
        passes = share >= each.least and share - null >= MIN_EFFECT and q <= alpha
        n = len(each.hits)
        found.append(Pattern(each.name, each.sort, share, null, n, p_value, float(q), bool(passes)))
    # Rules stand from narrow to wide: of equal ones the narrower comes first.
    return sorted(
        found,
        key=lambda each: (
            not each.claimed,
            _SORTS.index(each.sort),
            round(each.null - each.share, 9),
        ),
    )


def _named(found: Sequence[Pattern]) -> str:
    best: dict[Sort, Pattern] = {}
    for each in found:
        if each.claimed:
            best.setdefault(each.sort, each)
    return "; ".join(str(best[sort]) for sort in _SORTS if sort in best) or UNCLEAR


# -- source → target ---------------------------------------------------------------------------------------------------


class _Token(NamedTuple):
    text: str
    word: str


def _mapping_rules(mappings: Sequence[Mapped]) -> Iterator[_Tried]:
    sources = [_Token(source, word_of(source)) for source, _ in mappings]
    rows = [[_Token(target, word_of(target)) for target in targets] for _, targets in mappings]
    for name, rule in _STRING_RULES.items():
        holds = [
            [any(rule(source, target) for target in row) for row in rows] for source in sources
        ]
        yield _mapping(name, holds, MIN_SHARE)
    words = [frozenset(target.word for target in row) for row in rows]
    nothing: frozenset[str] = frozenset()
    for name, table in _tables().items():
        right = [table.get(source.word, nothing) for source in sources]
        yield _mapping(
            name, [[not each.isdisjoint(row) for row in words] for each in right], MIN_SHARE_LISTED
        )


def _mapping(name: str, holds: Sequence[Sequence[bool]], least: float) -> _Tried:
    """A row is a hit where the rule holds for any of its targets; its chance is that for a row's drawn at random.

    The draw may give the row's own targets, as a permutation test counts the observed order: so no p-value is 0.
    """
    table = np.array(holds)
    return _Tried(name, "mapping", table.diagonal(), table.mean(1), least)


def _same(source: _Token, target: _Token) -> bool:
    return source.text == target.text


def _same_word(source: _Token, target: _Token) -> bool:
    return source.text != target.text and source.word == target.word != ""


def _longer(source: _Token, target: _Token) -> bool:
    """The target is the source with an ending."""
    s, t = source.word, target.word
    return len(s) >= _STEM and t.startswith(s) and 0 < len(t) - len(s) <= _ENDING and t.isalpha()


def _shorter(source: _Token, target: _Token) -> bool:
    return _longer(target, source)


def _same_stem(source: _Token, target: _Token) -> bool:
    """Two words of one stem that end differently."""
    s, t = source.word, target.word
    alike = [a == b for a, b in zip(s, t, strict=False)]
    common = alike.index(False) if False in alike else len(alike)
    return _STEM < common < min(len(s), len(t)) and max(len(s), len(t)) - common <= _ENDING


def _inside(source: _Token, target: _Token) -> bool:
    s, t = source.word, target.word
    return s != t and min(len(s), len(t)) >= _STEM and (s in t or t in s)


def _first_letter(source: _Token, target: _Token) -> bool:
    s, t = source.word, target.word
    return len(t) == 1 and len(s) > 1 and t.isalpha() and s[0] == t


def _last_letter(source: _Token, target: _Token) -> bool:
    s, t = source.word, target.word
    return len(t) == 1 and len(s) > 1 and t.isalpha() and s[-1] == t


def _next_number(source: _Token, target: _Token) -> bool:
    s, t = source.word, target.word
    return s.isdecimal() and t.isdecimal() and int(t) == int(s) + 1


def _same_first(source: _Token, target: _Token) -> bool:
    s, t = source.word, target.word
    return s != t and s[:1].isalpha() and s[:1] == t[:1]


#: From narrow to wide.
_STRING_RULES: Mapping[str, Callable[[_Token, _Token], bool]] = {
    "copies the token": _same,
    "the same word in other case or spacing": _same_word,
    "next number": _next_number,
    "first letter": _first_letter,
    "last letter": _last_letter,
    "the word with an ending": _longer,
    "the word without its ending": _shorter,
    "the same stem with another ending": _same_stem,
    "one holds the other": _inside,
    "the same first letter": _same_first,
}


@cache
def _tables() -> dict[str, dict[str, frozenset[str]]]:
    """headlab's relations and their reverse, as tables from word to words."""
    used = [relation for relation in relations() if relation.name not in _AS_STRINGS]
    forward = {relation.name: _table(relation, False) for relation in used}
    return forward | {f"{relation.name}, reversed": _table(relation, True) for relation in used}


def _table(relation: Relation, reverse: bool) -> dict[str, frozenset[str]]:
    held: dict[str, set[str]] = {}
    for source, target in relation.pairs:
        s, t = word_of(source), word_of(target)
        if reverse:
            s, t = t, s
        if s != t:
            held.setdefault(s, set()).add(t)
    return {word: frozenset(words) for word, words in held.items()}


# -- classes -----------------------------------------------------------------------------------------------------------


def _class_rules(
    mappings: Sequence[Mapped], shares: Mapping[str, float], target_shares: Mapping[str, float]
) -> Iterator[_Tried]:
    sources = [classes_of(source) for source, _ in mappings]
    # First targets, each once: a head may write the same for every source, which is one fact and not thirty.
    targets = [classes_of(text) for text in dict.fromkeys(targets[0] for _, targets in mappings)]
    for name, share in shares.items():
        least = MIN_SHARE_LISTED if is_listed(name) else MIN_SHARE
        yield _in_class(name, "sources", sources, share, least)
        if len(targets) >= LEAST_ROWS:
            yield _in_class(name, "targets", targets, target_shares[name], least)


def _in_class(
    name: str, sort: Sort, held: Sequence[frozenset[str]], share: float, least: float
) -> _Tried:
    hits = np.array([name in each for each in held])
    return _Tried(name, sort, hits, np.full(len(hits), share), least)


__all__ = ["UNCLEAR", "Description", "Pattern", "class_shares", "describe_mappings"]
