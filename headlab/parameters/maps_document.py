"""Maps as a JSON document, and back: what a file holds is checked before it becomes a result."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

from headlab.arguments import is_finite, is_integer
from headlab.errors import OutputError
from headlab.parameters.row_ends import DIRECTIONS
from headlab.text import is_text, shown

if TYPE_CHECKING:
    import pandas as pd

#: Columns of the table, in order.
MAPS_COLUMNS = (
    "relation",
    "kind",
    "direction",
    "layer",
    "head",
    "score",
    "ci_low",
    "ci_high",
    "n",
    "k",
    "null_mean",
    "effect",
    "p_value",
    "q_value",
    "claimed",
    "note",
)
#: Columns of numbers, which are missing for heads that cannot be read.
NUMBERS = ("score", "ci_low", "ci_high", "null_mean", "effect", "p_value", "q_value")
FORMAT = "headlab-maps-1"

_TEXTS = ("relation", "kind", "direction", "note")
_WHOLES = ("layer", "head", "n", "k")
_MOST = 1 << 31
#: A null mean is a sum of shares: rounding must not decide what is claimed.
_ROUNDING = 1e-12
_ABOUT_TEXTS = ("model", "family", "fingerprint", "convention", "doubt")
_ABOUT_WHOLES = ("n_vocab", "padding_left_out", "min_pairs", "neighbours")
_ABOUT_CHOICES = {"embedding": ("auto", "raw", "mlp"), "multi_token": ("skip", "ends")}


@dataclass(frozen=True)
class MappedRelation:
    """A relation as it was used, or why it was not.

    Attributes:
        name: Its name.
        kind: knowledge, language, translation, algorithmic or given.
        about: What relates source and target.
        k: A target counts among this many tokens.
        n: Pairs left after tokenisation.
        left_out: Pairs that were not, and why: (source, target, why).
        skipped: Why the relation was not mapped; empty where it was.
    """

    name: str
    kind: str
    about: str
    k: int
    n: int
    left_out: tuple[tuple[str, str, str], ...]
    skipped: str = ""


def is_claimed(q_value: Any, effect: Any, alpha: float, min_effect: float) -> Any:
    """Whether a score is claimed, of numbers or of arrays: q small enough and far enough above chance."""
    return (q_value <= alpha) & (effect >= min_effect - _ROUNDING)


def read_document(text: str) -> tuple[pd.DataFrame, tuple[MappedRelation, ...], dict[str, Any]]:
    """Table, relations and settings from a document as ``Maps.to_json`` writes it.

    Raises:
        OutputError: The text is not such a document, or what it says does not agree with itself.
    """
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except (ValueError, TypeError, RecursionError) as error:
        raise OutputError(f"these are no maps as to_json writes them: {error!r:.200}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        kind = shown(data.get("format")) if isinstance(data, dict) else type(data).__name__
        raise OutputError(f"these are no maps: the document is written as {kind}, not {FORMAT!r}")
    about = _about(data.get("about"))
    relations = _relations(data.get("relations"))
    rows: Any = data.get("rows")
    _require(isinstance(rows, list) and rows, "there are no rows")
    mapped = {each.name: each for each in relations if not each.skipped}
    for at, row in enumerate(rows):
        _check_row(f"row {at}", row, mapped, about)
    _check_heads(rows, mapped, about["directions"])
    return _frame(rows), relations, about


def plain_row(row: Mapping[Any, Any]) -> dict[str, Any]:
    """A row as JSON has it: NaN is None."""
    return {
        str(name): None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _require(holds: Any, fault: str) -> None:
    if not holds:
        raise OutputError(f"these are no maps: {fault}")


def _about(about: Any) -> dict[str, Any]:
    _require(isinstance(about, dict), "'about' is missing")
    held = {*_ABOUT_TEXTS, *_ABOUT_WHOLES, *_ABOUT_CHOICES, "directions", "alpha", "min_effect"}
    missing = sorted(held - set(about))
    _require(not missing, f"'about' lacks {', '.join(missing)}")
    for name, value in about.items():
        said = f"'about' has {shown(value)} as {name!r:.60}"
        if name in _ABOUT_TEXTS:
            _require(is_text(value), said)
        elif name in _ABOUT_WHOLES:
            _require(_is_whole(value), said)
        elif name in _ABOUT_CHOICES:
            _require(value in _ABOUT_CHOICES[name], said)
        elif name in ("alpha", "min_effect"):
            _require(is_finite(value) and 0 <= value < 1, said)
        elif name == "directions":
            some = isinstance(value, list) and value and all(each in DIRECTIONS for each in value)
            _require(some and len(set(value)) == len(value), said)
    _require(about["alpha"] > 0, "alpha is 0")
    return dict(about)


def _relations(given: Any) -> tuple[MappedRelation, ...]:
    _require(isinstance(given, list), "there are no relations")
    found: dict[str, MappedRelation] = {}
    names = {field.name for field in fields(MappedRelation)}
    for at, each in enumerate(given):
        where = f"relation {at}"
        right = isinstance(each, dict) and set(each) == names
        _require(right, f"{where} must have exactly {', '.join(sorted(names))}")
        for name in ("name", "kind", "about", "skipped"):
            _require(is_text(each[name]), f"{where} has {shown(each[name])} as {name}")
        for name in ("k", "n"):
            least = 0 if name == "n" and each["skipped"] else 1
            right = _is_whole(each[name]) and each[name] >= least
            _require(right, f"{where} has {shown(each[name])} as {name}")
        left_out = each["left_out"]
        right = isinstance(left_out, list) and all(map(_is_triple, left_out))
        _require(right, f"{where} has left_out that is no list of source, target and reason")
        _require(each["name"].strip(), f"{where} has no name")
        _require(each["name"] not in found, f"two relations are called {each['name']!r:.60}")
        left_out = tuple((pair[0], pair[1], pair[2]) for pair in left_out)
        found[each["name"]] = MappedRelation(**{**each, "left_out": left_out})
    return tuple(found.values())


def _check_row(
    where: str, row: Any, mapped: Mapping[str, MappedRelation], about: Mapping[str, Any]
) -> None:
    right = isinstance(row, dict) and set(row) == set(MAPS_COLUMNS)
    _require(right, f"{where} must have exactly {', '.join(MAPS_COLUMNS)}")
    wrong = [name for name in _TEXTS if not is_text(row[name])]
    wrong += [name for name in _WHOLES if not _is_whole(row[name])]
    wrong += [name for name in NUMBERS if not _is_share(row[name], -1 if name == "effect" else 0)]
    wrong += [] if isinstance(row["claimed"], bool) else ["claimed"]
    if not wrong:
        wrong += [] if row["relation"] in mapped else ["relation"]
        wrong += [] if row["direction"] in about["directions"] else ["direction"]
    if not wrong:
        relation = mapped[row["relation"]]
        wrong += [name for name in ("kind", "n", "k") if row[name] != getattr(relation, name)]
    _require(
        not wrong, f"{where} has {shown(row[wrong[0]]) if wrong else ''} as {''.join(wrong[:1])}"
    )
    missing = [name for name in NUMBERS if row[name] is None]
    _require(len(missing) in (0, len(NUMBERS)), f"{where} lacks {', '.join(missing)} alone")
    claimed = not missing and is_claimed(
        row["q_value"], row["effect"], about["alpha"], about["min_effect"]
    )
    said = f"{where} has {row['claimed']} as claimed, which does not follow from its q and effect"
    _require(row["claimed"] == claimed, said)


def _check_heads(
    rows: Iterable[Mapping[str, Any]], mapped: Iterable[str], directions: Sequence[str]
) -> None:
    """Every relation and direction has the same heads, each once."""
    heads: dict[tuple[str, str], set[tuple[int, int]]] = {
        (relation, direction): set() for relation in mapped for direction in directions
    }
    for row in rows:
        held, head = heads[row["relation"], row["direction"]], (row["layer"], row["head"])
        name = f"{row['relation']!r:.60} {row['direction']}"
        _require(head not in held, f"{name} has L{head[0]}H{head[1]} twice")
        held.add(head)
    every = set().union(*heads.values())
    for (relation, direction), held in heads.items():
        at = min(every - held, default=(0, 0))
        said = f"{relation!r:.60} {direction} lacks L{at[0]}H{at[1]}, which other rows have"
        _require(held == every, said)


def _is_whole(value: Any) -> bool:
    return is_integer(value) and 0 <= value < _MOST


def _is_share(value: Any, least: float) -> bool:
    return value is None or (is_finite(value) and least <= value <= 1)


def _is_triple(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(is_text, value))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame(rows, columns=list(MAPS_COLUMNS))
    types = dict.fromkeys(NUMBERS, float) | dict.fromkeys(_WHOLES, int) | {"claimed": bool}
    return frame.astype(types)


__all__ = [
    "FORMAT",
    "MAPS_COLUMNS",
    "NUMBERS",
    "MappedRelation",
    "is_claimed",
    "plain_row",
    "read_document",
]
