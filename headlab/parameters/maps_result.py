"""What MAPS gives: a table of heads × relations × directions, and views of it."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headlab.attention import Head
from headlab.errors import HeadError, OutputError, PlanError
from headlab.parameters.row_ends import DIRECTIONS, Direction

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
_FORMAT = "headlab-maps-1"
_TEXTS = ("relation", "kind", "direction", "note")
_WHOLES = ("layer", "head", "n", "k")
_FLOATS = ("score", "ci_low", "ci_high", "null_mean", "effect", "p_value", "q_value")
_HEAD = re.compile(r"L(\d{1,9})H(\d{1,9})|(\d{1,9})\.(\d{1,9})", re.IGNORECASE)


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


@dataclass(frozen=True, repr=False)
class Maps:
    """Which relations each head's weights implement; made by :func:`~headlab.parameters.maps.maps`.

    Attributes:
        frame: One row per relation, direction and head, with the columns of :data:`MAPS_COLUMNS`. ``direction`` is
            ``"promotes"`` (the target is among the ``k`` tokens raised most) or ``"suppresses"`` (lowered most);
            ``score`` is the share φ of ``n`` pairs, ``ci_low`` and ``ci_high`` its Wilson 95 % interval over pairs;
            ``null_mean`` is the larger of the scores expected under the two nulls, ``effect`` score − null_mean;
            ``p_value`` is the larger of the two nulls', one-sided, ``q_value`` corrected over heads within relation and
            direction (Benjamini and Hochberg 1995); ``claimed`` says whether q and effect suffice. A head whose weights
            cannot be read has NaN in all of these, and ``note`` says why.
        relations: How each relation was used; :attr:`skipped` has those that were not.
        about: Model and settings.
    """

    frame: pd.DataFrame
    relations: tuple[MappedRelation, ...]
    about: dict[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the relations that were mapped."""
        return tuple(relation.name for relation in self.relations if not relation.skipped)

    @property
    def skipped(self) -> tuple[MappedRelation, ...]:
        """Relations with too few pairs left, each with the reason and with what was left out."""
        return tuple(relation for relation in self.relations if relation.skipped)

    def relation(self, name: str) -> MappedRelation:
        """How one relation was used.

        Raises:
            PlanError: It was not mapped.
        """
        for relation in self.relations:
            if relation.name == name and not relation.skipped:
                return relation
            if relation.name == name:
                raise PlanError(f"relation {name!r} was not mapped: {relation.skipped}")
        raise PlanError(
            f"there is no relation {name!r:.60}; mapped were {', '.join(self.names) or 'none'}"
        )

    def ranked(self, relation: str, direction: Direction = "promotes") -> pd.DataFrame:
        """The heads of a relation, highest score first; heads without a score are left out.

        Raises:
            PlanError: It was not mapped, or not in that direction.
        """
        self.relation(relation)
        self._check(direction)
        frame = self.frame
        rows = frame[(frame["relation"] == relation) & (frame["direction"] == direction)]
        rows = rows[rows["score"].notna()]
        order = ["score", "effect", "layer", "head"]
        return rows.sort_values(
            order, ascending=[False, False, True, True], kind="stable"
        ).reset_index(drop=True)

    def top(self, relation: str, n: int = 10, direction: Direction = "promotes") -> pd.DataFrame:
        """The n heads with the highest scores."""
        return self.ranked(relation, direction).head(n)

    def claimed(self, relation: str, direction: Direction = "promotes") -> list[str]:
        """Heads that implement a relation beyond chance, such as ``["L18H6"]``, highest score first."""
        rows = self.ranked(relation, direction)
        return _labels(rows[rows["claimed"]])

    def matrix(self, direction: Direction = "promotes", column: str = "score") -> pd.DataFrame:
        """A column of the table as heads (``"L0H0"``, …) × relations.

        Raises:
            PlanError: There is no such direction or column of numbers.
        """
        self._check(direction)
        if column not in (*_FLOATS, "claimed"):
            raise PlanError(
                f"there is no map of {column!r:.60}; there are {', '.join((*_FLOATS, 'claimed'))}"
            )
        rows = self.frame[self.frame["direction"] == direction]
        table = rows.pivot(index=["layer", "head"], columns="relation", values=column)
        table = table[list(self.names)]
        table.index = [str(Head(layer, head)) for layer, head in table.index]
        table.columns.name = None
        return table

    def of(self, head: Head | tuple[int, int] | str) -> pd.DataFrame:
        """The rows of one head, claimed ones first, then by effect.

        Raises:
            HeadError: That names no head, or one that was not mapped.
        """
        layer, which = _place(head)
        rows = self.frame[(self.frame["layer"] == layer) & (self.frame["head"] == which)]
        if rows.empty:
            raise HeadError(
                f"head {Head(layer, which)} was not mapped; see .frame for those that were"
            )
        return rows.sort_values(
            ["claimed", "effect"], ascending=[False, False], kind="stable"
        ).reset_index(drop=True)

    def _check(self, direction: str) -> None:
        done = self.about.get("directions", DIRECTIONS)
        if direction not in done:
            raise PlanError(
                f"direction={direction!r:.60} was not mapped; there are {', '.join(done)}"
            )

    # -- as text -----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data: ``format``, ``about``, ``relations``, ``claimed`` heads by relation, ``rows``; NaN is None."""
        return {
            "format": _FORMAT,
            "about": self.about,
            "relations": [asdict(relation) for relation in self.relations],
            "claimed": {
                direction: {name: self.claimed(name, direction) for name in self.names}
                for direction in self.about["directions"]
            },
            "rows": [_plain(row) for row in self.frame.to_dict("records")],
        }

    def to_json(self, indent: int | None = None) -> str:
        """One strictly valid JSON document with every row; NaN becomes null."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Maps:
        """Rebuild maps from :meth:`to_json`.

        Raises:
            OutputError: The text is not such a document.
        """
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise OutputError(f"this was written as {data['format']!r:.60}, not {_FORMAT!r}")
            relations = tuple(
                MappedRelation(
                    **{**fields, "left_out": tuple(tuple(part) for part in fields["left_out"])}
                )
                for fields in data["relations"]
            )
            missing = {"model", "directions", "alpha", "min_effect"} - set(data["about"])
            if missing:
                raise OutputError(f"these are no maps: 'about' lacks {', '.join(sorted(missing))}")
            for direction in data["about"]["directions"]:
                if direction not in DIRECTIONS:
                    raise OutputError(f"these are no maps: there is no direction {direction!r:.60}")
            return cls(_frame(data["rows"]), relations, data["about"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise OutputError(
                f"these are no maps as to_json writes them: {error!r:.200}"
            ) from error

    def __repr__(self) -> str:
        heads = len(self.frame[["layer", "head"]].drop_duplicates())
        lines = [
            f"Maps of {self.about['model']}: {heads} heads × {len(self.names)} relations, claimed at "
            f"q ≤ {self.about['alpha']:g} and {self.about['min_effect']:g} above chance"
        ]
        for name, best, score, promotes, suppresses in self._summary():
            lines.append(
                f"  {name}: best {best} φ = {score}; {promotes} promote it, {suppresses} suppress it"
            )
        lines += [f"  {relation.name}: skipped, {relation.skipped}" for relation in self.skipped]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Static table for notebooks: the best head and the number of claimed ones per relation."""
        head = "".join(
            f"<th>{title}</th>" for title in ("relation", "best head", "φ", "promote", "suppress")
        )
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
            for row in self._summary()
        )
        skipped = "".join(
            f"<p>{html.escape(f'{relation.name}: skipped, {relation.skipped}')}</p>"
            for relation in self.skipped
        )
        title = html.escape(f"Maps of {self.about['model']}")
        return f"<div><b>{title}</b><table><tr>{head}</tr>{body}</table>{skipped}</div>"

    def _summary(self) -> list[tuple[str, str, str, str, str]]:
        rows = []
        for name in self.names:
            best = self.top(name, 1)
            counts = [
                str(len(self.claimed(name, each))) if each in self.about["directions"] else "–"
                for each in DIRECTIONS
            ]
            shown = (_labels(best)[0], f"{best['score'].iloc[0]:.2f}") if len(best) else ("–", "–")
            rows.append((name, *shown, *counts))
        return rows  # type: ignore[return-value]  # two shown and two counts


def _labels(rows: pd.DataFrame) -> list[str]:
    return [
        str(Head(int(at), int(head))) for at, head in zip(rows["layer"], rows["head"], strict=True)
    ]


def _place(head: Any) -> tuple[int, int]:
    if isinstance(head, str):
        match = _HEAD.fullmatch(head.strip())
        if match:
            layer, which = (int(group) for group in match.groups() if group is not None)
            return layer, which
    elif (
        isinstance(head, tuple) and len(head) == 2 and all(hasattr(at, "__index__") for at in head)
    ):
        return int(head[0]), int(head[1])
    raise HeadError(f"{head!r:.60} does not name a head; write 'L18H6', '18.6' or (18, 6)")


def _frame(rows: Any) -> pd.DataFrame:
    import pandas as pd

    for at, row in enumerate(rows):
        if not isinstance(row, dict) or set(row) != set(MAPS_COLUMNS):
            raise OutputError(f"row {at} must have exactly {', '.join(MAPS_COLUMNS)}")
        wrong = [name for name in _TEXTS if not isinstance(row[name], str)]
        wrong += [name for name in _WHOLES if type(row[name]) is not int]
        wrong += [name for name in _FLOATS if type(row[name]) not in (int, float, type(None))]
        wrong += ["claimed"] if not isinstance(row["claimed"], bool) else []
        if wrong:
            raise OutputError(f"row {at} has {row[wrong[0]]!r:.60} as {wrong[0]}")
    frame = pd.DataFrame(rows, columns=list(MAPS_COLUMNS))
    types = dict.fromkeys(_FLOATS, float) | dict.fromkeys(_WHOLES, int) | {"claimed": bool}
    return frame.astype(types)


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        str(name): None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


__all__ = ["MAPS_COLUMNS", "MappedRelation", "Maps"]
