"""What MAPS gives: a table of heads × relations × directions, and views of it."""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headlab.arguments import whole_number
from headlab.attention import Head, read_head
from headlab.errors import HeadError, PlanError
from headlab.parameters.maps_document import (
    FORMAT,
    MAPS_COLUMNS,
    NUMBERS,
    MappedRelation,
    plain_row,
    read_document,
)
from headlab.parameters.row_ends import DIRECTIONS, Direction
from headlab.text import shown, visible

if TYPE_CHECKING:
    import pandas as pd

_LONGEST = 2000


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
                why = _line(relation.skipped)
                raise PlanError(f"relation {name!r:.60} was not mapped: {why}")
        raise PlanError(
            f"there is no relation {shown(name)}; mapped were {', '.join(map(visible, self.names)) or 'none'}"
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

    def top(
        self, relation: str | None = None, n: int = 10, direction: Direction = "promotes"
    ) -> pd.DataFrame:
        """The n heads with the highest scores for a relation, or without one the n rows farthest above chance.

        Raises:
            PlanError: It was not mapped, or not in that direction; or n is no number of rows.
        """
        n = min(whole_number(n, "n", 1), len(self.frame))
        if relation is not None:
            return self.ranked(relation, direction).head(n)
        self._check(direction)
        rows = self.frame[self.frame["direction"] == direction]
        return rows.nlargest(n, "effect").reset_index(drop=True)

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
        if column not in (*NUMBERS, "claimed"):
            raise PlanError(
                f"there is no map of {column!r:.60}; there are {', '.join((*NUMBERS, 'claimed'))}"
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
        layer, which = read_head(head)
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
            "format": FORMAT,
            "about": self.about,
            "relations": [asdict(relation) for relation in self.relations],
            "claimed": {
                direction: {name: self.claimed(name, direction) for name in self.names}
                for direction in self.about["directions"]
            },
            "rows": [plain_row(row) for row in self.frame.to_dict("records")],
        }

    def to_json(self, indent: int | None = None) -> str:
        """One strictly valid JSON document with every row; NaN becomes null."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Maps:
        """Rebuild maps from :meth:`to_json`.

        Raises:
            OutputError: The text is not such a document, or does not agree with itself.
        """
        return cls(*read_document(text))

    def __repr__(self) -> str:
        heads = len(self.frame[["layer", "head"]].drop_duplicates())
        lines = [
            f"Maps of {_line(self.about['model'])}: {heads} heads × {len(self.names)} relations, claimed at "
            f"q ≤ {self.about['alpha']:g} and {self.about['min_effect']:g} above chance"
        ]
        for name, best, score, promotes, suppresses in self._summary():
            lines.append(
                f"  {_line(name)}: best {best} φ = {score}; {promotes} promote it, {suppresses} suppress it"
            )
        lines += [f"  {_said(relation)}" for relation in self.skipped]
        lines += [f"  Doubt: {_line(self.about['doubt'])}"] if self.about.get("doubt") else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Static table for notebooks: the best head and the number of claimed ones per relation."""
        head = "".join(
            f"<th>{title}</th>" for title in ("relation", "best head", "φ", "promote", "suppress")
        )
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_line(cell))}</td>" for cell in row) + "</tr>"
            for row in self._summary()
        )
        skipped = "".join(f"<p>{html.escape(_said(relation))}</p>" for relation in self.skipped)
        if self.about.get("doubt"):
            skipped += f"<p>Doubt: {html.escape(_line(self.about['doubt']))}</p>"
        title = html.escape(f"Maps of {_line(self.about['model'])}")
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


def _line(text: str) -> str:
    """Names and reasons hold words of the user's: nothing of them may act on a terminal or hide."""
    return visible(text, _LONGEST)


def _said(relation: MappedRelation) -> str:
    return f"{_line(relation.name)}: skipped, {_line(relation.skipped)}"


def _labels(rows: pd.DataFrame) -> list[str]:
    return [
        str(Head(int(at), int(head))) for at, head in zip(rows["layer"], rows["head"], strict=True)
    ]


__all__ = ["MAPS_COLUMNS", "MappedRelation", "Maps"]
