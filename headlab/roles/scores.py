"""What scoring heads returns: a table with the evidence in it, the roles it is about, and examples.

The three dataclasses here are what roles produce and what reports, plots and the command line read.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, get_args

import pandas as pd

from headlab.errors import OutputError
from headlab.roles.tables import (
    COLUMNS,
    DETAIL_COLUMNS,
    checked_details,
    checked_scores,
    encodable,
    head_label,
    overlap,
    stability,
)
from headlab.text import visible as visible

Kind = Literal["high", "median", "random"]

# The static table of a notebook shows this much; the frame always holds everything.
_REPR_ROLES = 40
_REPR_ROWS = 10
_REPR_NOTE = 160


@dataclass(frozen=True)
class RoleInfo:
    """What a role is and how it was decided, in words a methods section can quote.

    Attributes:
        name: Identifier, such as ``"induction"``.
        title: Name for people, such as ``"Induction"``.
        question: The question the role answers, one sentence.
        statistic: The formula of the score, in words.
        null: The control under which the same statistic is recomputed.
        decision: When a head is claimed.
        reference: Where the definition comes from.
        min_score: Least score of a claimed head, in units of the statistic.
        min_effect: Least score minus null of a claimed head, in units of the statistic.
        row_convention: Whether a row belongs to the position that predicts a token or to the
            token's own position.
        reduction: How rows and prompts become one number per head.
        sink_convention: What is done with attention on the first token.
        ablation: How the causal check takes the role away: kind and phase.
    """

    name: str
    title: str
    question: str
    statistic: str
    null: str
    decision: str
    reference: str
    min_score: float
    min_effect: float
    row_convention: str
    reduction: str = "mean over rows, then over prompts"
    sink_convention: str = "kept"
    ablation: str = "z set to zero at every position, of prompt and answer"


@dataclass(frozen=True)
class Example:
    """One attention row of one head, kept so that a reader can look at what the score summarises.

    Attributes:
        role: Role the example illustrates.
        layer: Layer of the head.
        head: Query head.
        kind: How the row was chosen: among the ``"high"`` ones, around the ``"median"`` or at
            ``"random"``.
        tokens: Text of each token. Hostile input: pass it through :func:`visible` and escape it
            before showing it.
        query: Index into ``tokens`` of the row's query.
        weights: Attention weight per key, for keys 0 … ``query`` or for every token.
        value: The role's statistic on this row.

    Raises:
        OutputError: Lengths, the query or the kind do not fit together.
    """

    role: str
    layer: int
    head: int
    kind: Kind
    tokens: tuple[str, ...]
    query: int
    weights: tuple[float, ...]
    value: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", int(self.layer))
        object.__setattr__(self, "head", int(self.head))
        object.__setattr__(self, "query", int(self.query))
        object.__setattr__(self, "value", float(self.value))
        object.__setattr__(self, "tokens", tuple(encodable(token) for token in self.tokens))
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))
        name = f"{self.kind} example of {self.role} for {self.label}"
        if self.kind not in get_args(Kind):
            raise OutputError(f"{name}: the kind must be one of {', '.join(get_args(Kind))}")
        if not 0 <= self.query < len(self.tokens):
            raise OutputError(
                f"{name}: query {self.query} is not among its {len(self.tokens)} tokens"
            )
        if len(self.weights) not in (self.query + 1, len(self.tokens)):
            raise OutputError(
                f"{name}: {len(self.weights)} weights fit neither keys 0–{self.query} "
                f"nor all {len(self.tokens)} tokens"
            )
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.weights):
            raise OutputError(f"{name}: attention weights must be finite and not negative")

    @property
    def label(self) -> str:
        """The head's name, such as ``"L18H6"``."""
        return head_label(self.layer, self.head)


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of heads for roles, one row per (role, layer, head), with the evidence in the row.

    Attributes:
        frame: Columns ``role, layer, head, score, ci_low, ci_high, n, null_mean, effect, effect_size,
            half_1, half_2, p_value, q_value, claimed, note``; ``effect_size`` is Cohen's d over
            prompts, ``half_1`` and ``half_2`` the scores on two disjoint halves of the prompts. A
            head that could not be measured has a NaN score and says why in ``note``. The frame is
            a copy of what was passed, with a fresh index.
        alpha: Level the corrected p-values were compared with.
        roles: One :class:`RoleInfo` per role, in the order they were asked for.
        details: What explains the scores but decides nothing, such as a head's lag profile: columns
            ``role, layer, head, detail, at, value, meaning``; head −1 stands for the whole layer,
            ``at`` is NaN for single numbers and the place of an entry in a profile.

    Raises:
        OutputError: The frame is not such a table.
    """

    frame: pd.DataFrame
    alpha: float
    roles: tuple[RoleInfo, ...]
    details: pd.DataFrame = field(
        default_factory=lambda: pd.DataFrame(columns=list(DETAIL_COLUMNS))
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", tuple(self.roles))
        object.__setattr__(self, "alpha", float(self.alpha))
        object.__setattr__(self, "frame", checked_scores(self.frame, self.alpha, self.names))
        object.__setattr__(self, "details", checked_details(self.details, self.names))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the roles, in order."""
        return tuple(info.name for info in self.roles)

    def role(self, name: str) -> RoleInfo:
        """Description of one role.

        Raises:
            OutputError: No such role was scored.
        """
        for info in self.roles:
            if info.name == name:
                return info
        known = ", ".join(self.names) or "none"
        raise OutputError(f"role {name!r} was not scored: these scores are of {known}")

    def ranked(self, role: str) -> pd.DataFrame:
        """Rows of one role: claimed heads first, then by falling score; unmeasured heads last."""
        self.role(role)
        rows = self.frame[self.frame["role"] == role]
        order = ["claimed", "score", "layer", "head"]
        return rows.sort_values(order, ascending=[False, False, True, True], kind="stable")

    def claimed(self, role: str) -> list[str]:
        """Heads claimed for a role, such as ``["L18H6", "L17H3"]``, highest score first."""
        rows = self.ranked(role)
        return _labels(rows[rows["claimed"]])

    def detail(self, role: str, name: str) -> pd.DataFrame:
        """One detail of a role: columns ``layer``, ``head``, ``at`` and ``value``.

        Raises:
            OutputError: There is no such detail.
        """
        self.role(role)
        of_role = self.details[self.details["role"] == role]
        rows = of_role[of_role["detail"] == name]
        if rows.empty:
            known = ", ".join(sorted(of_role["detail"].unique())) or "none"
            raise OutputError(f"{role} has no detail {name!r}; it has {known}")
        return rows[["layer", "head", "at", "value"]].reset_index(drop=True)

    def overlap(self) -> pd.DataFrame:
        """How many heads are claimed for both of two roles; the diagonal counts each role's heads."""
        return overlap(self.frame, self.names)

    def stability(self) -> pd.DataFrame:
        """How far two disjoint halves of the probe agree on the heads of each role; see :func:`tables.stability`."""
        return stability(self.frame, self.names)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: ``alpha``, ``roles``, ``claimed`` heads per role, ``rows``, ``details``; NaN is None."""
        return {
            "alpha": self.alpha,
            "roles": [asdict(info) for info in self.roles],
            "claimed": {name: self.claimed(name) for name in self.names},
            "rows": [_plain(row) for row in self.frame.to_dict("records")],
            "details": [_plain(row) for row in self.details.to_dict("records")],
        }

    def to_json(self, indent: int | None = None) -> str:
        """One strictly valid JSON document with every row; NaN and infinities become null."""
        return json.dumps(_plain(self.to_dict()), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Scores:
        """Rebuild scores from :meth:`to_json`.

        Raises:
            OutputError: The text is not such a document.
        """
        try:
            data = json.loads(text)
            roles = role_infos(data["roles"])
            frame = pd.DataFrame(data["rows"], columns=list(COLUMNS))
            details = pd.DataFrame(data["details"], columns=list(DETAIL_COLUMNS))
            return cls(frame, data["alpha"], roles, details)
        except (ValueError, KeyError, TypeError) as error:
            raise OutputError(f"the text is not scores written by headlab: {error!r}") from error

    def __repr__(self) -> str:
        width = max((len(name) for name in self.names), default=0)
        heads = len(self.frame[["layer", "head"]].drop_duplicates())
        lines = [f"Scores: {len(self.roles)} roles, {heads} heads, claimed at q ≤ {self.alpha:g}"]
        for name in self.names:
            claimed = self.claimed(name)
            top = " ".join(claimed[:8]) + (f" … +{len(claimed) - 8}" if len(claimed) > 8 else "")
            lines.append(f"  {name:<{width}}  {len(claimed):>4} claimed  {top}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Static table for notebooks: claimed heads per role, the ten best rows folded away."""
        heads = len(self.frame[["layer", "head"]].drop_duplicates())
        shown = self.names[:_REPR_ROLES]
        hidden = len(self.names) - len(shown)
        more = f"; showing {len(shown)} of {len(self.names)} roles" if hidden else ""
        parts = [
            "<div style='font-size:13px;line-height:1.5'>",
            f"<p><b>Scores</b> · {len(self.names)} roles · {heads} heads · "
            f"claimed at q ≤ {self.alpha:g}{more}</p>",
            *(self._role_html(name) for name in shown),
            "</div>",
        ]
        return "".join(parts)

    def _role_html(self, name: str) -> str:
        rows = self.ranked(name)
        claimed = self.claimed(name)
        top = ", ".join(claimed[:8]) + (" …" if len(claimed) > 8 else "")
        title = html.escape(visible(self.role(name).title, 60))
        columns = ("head", "score", "95% interval", "null", "effect", "p", "q", "n", "", "note")
        cell = "style='padding:1px 10px;text-align:right;font-variant-numeric:tabular-nums'"
        header = "".join(f"<th {cell}>{column}</th>" for column in columns)
        body = "".join(
            "<tr>" + "".join(f"<td {cell}>{html.escape(text)}</td>" for text in _row(row)) + "</tr>"
            for row in rows.head(_REPR_ROWS).to_dict("records")
        )
        return (
            f"<details><summary><b>{title}</b> · {len(claimed)} claimed"
            f"{': ' + html.escape(top) if top else ''}</summary>"
            f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"
            f"<p style='opacity:.7'>Showing {min(_REPR_ROWS, len(rows))} of {len(rows)} heads.</p>"
            "</details>"
        )


def role_infos(data: Iterable[Mapping[str, Any]]) -> tuple[RoleInfo, ...]:
    """Role descriptions from plain data; unknown keys are ignored so that newer files open."""
    # A field with a default may be missing: an older headlab did not write it.
    return tuple(
        RoleInfo(
            **{
                known.name: item[known.name]
                for known in fields(RoleInfo)
                if known.default is MISSING or known.name in item
            }
        )
        for item in data
    )


def _labels(rows: pd.DataFrame) -> list[str]:
    pairs = zip(rows["layer"], rows["head"], strict=True)
    return [head_label(layer, head) for layer, head in pairs]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _row(row: Mapping[Any, Any]) -> Sequence[str]:
    def number(name: str) -> str:
        return "–" if math.isnan(row[name]) else f"{row[name]:.3g}"

    return (
        head_label(row["layer"], row["head"]),
        number("score"),
        f"{number('ci_low')} – {number('ci_high')}",
        number("null_mean"),
        number("effect"),
        number("p_value"),
        number("q_value"),
        str(row["n"]),
        "claimed" if row["claimed"] else "",
        visible(row["note"], _REPR_NOTE) if row["note"] else "",
    )
