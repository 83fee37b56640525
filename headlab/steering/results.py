"""What evaluating a method of steering found: a tidy table, and the numbers behind it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from headlab.errors import OutputError, PlanError
from headlab.shards import reading, write_text

if TYPE_CHECKING:
    import pandas as pd

#: Columns of the table, in order.
COLUMNS = (
    "kind",
    "strength",
    "value",
    "value_low",
    "value_high",
    "n",
    "effect",
    "effect_low",
    "effect_high",
    "p_value",
    "q_value",
    "excess",
    "excess_low",
    "excess_high",
    "excess_p",
    "excess_q",
    "loss",
    "loss_change",
    "loss_low",
    "loss_high",
)
#: Rows that are no controls.
UNSTEERED, METHOD = "unsteered", "method"
_FORMAT = "headlab-evaluation-1"


@dataclass(frozen=True)
class Evaluation:
    """What :func:`evaluate` found.

    Attributes:
        frame: One row per kind and strength, with the columns of :data:`COLUMNS`. ``kind`` is ``unsteered``,
            ``method``, ``random_heads`` or ``random_direction`` (means over draws); ``value`` is the behaviour's mean
            over ``n`` cases, ``effect`` its change from the unsteered model, ``excess`` the method's effect less the
            mean of all controls at that strength; ``loss`` is the mean loss on plain text in nats per token,
            ``loss_change`` its change. Intervals are 95 %.
        values: The behaviour, [row, case].
        losses: The loss on plain text, [row, text].
        about: Model, method, behaviour, seed and so on.
    """

    frame: pd.DataFrame
    values: Float[np.ndarray, "row case"]
    losses: Float[np.ndarray, "row text"]
    about: dict[str, Any]

    @property
    def best(self) -> pd.Series:
        """The method's row with the largest mean behaviour.

        It is the best of a sweep on these very cases: measure it on others before quoting it.
        """
        rows = self.frame[self.frame["kind"] == METHOD]
        best: pd.Series = rows.iloc[int(rows["value"].to_numpy().argmax())]
        return best

    def row(self, kind: str, strength: float | None = None) -> pd.Series:
        """The row of a kind and strength.

        Raises:
            PlanError: There is none.
        """
        rows = self.frame[self.frame["kind"] == kind]
        if strength is not None:
            rows = rows[np.isclose(rows["strength"], strength)]
        if len(rows) != 1:
            raise PlanError(f"there are {len(rows)} rows of {kind!r} at strength {strength}")
        found: pd.Series = rows.iloc[0]
        return found

    def to_json(self) -> str:
        """Everything as one JSON document; NaN becomes null."""
        document = {
            "format": _FORMAT,
            "about": self.about,
            "rows": [
                {str(key): _plain(value) for key, value in row.items()}
                for row in self.frame.to_dict("records")
            ],
            "values": [[_plain(x) for x in row] for row in self.values],
            "losses": [[_plain(x) for x in row] for row in self.losses],
        }
        return json.dumps(document, ensure_ascii=False, allow_nan=False)

    def save(self, path: str | Path) -> Path:
        """Write :meth:`to_json` to a file, whole or not at all.

        Raises:
            OutputError: It cannot be written.
        """
        return write_text(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Evaluation:
        """Read what :meth:`save` wrote.

        Raises:
            OutputError: The file holds no readable evaluation.
        """
        import pandas as pd

        with reading(path, "evaluation"):
            document = json.loads(Path(path).read_text("utf-8"))
            if document["format"] != _FORMAT:
                raise OutputError(f"{path} was written as {document['format']!r:.60}")
            frame = pd.DataFrame(document["rows"], columns=list(COLUMNS))
            numbers = [name for name in COLUMNS if name not in ("kind", "n")]
            frame[numbers] = frame[numbers].astype(float)
            frame["n"] = frame["n"].astype(int)
            values, losses = (
                np.array(document[name], float).reshape(len(frame), -1)
                for name in ("values", "losses")
            )
            return Evaluation(frame, values, losses, dict(document["about"]))

    def __repr__(self) -> str:
        about = ", ".join(f"{key} {value}" for key, value in self.about.items() if value != "")
        columns = ["kind", "strength", "value", "effect", "q_value", "excess", "excess_q"]
        shown = self.frame[[*columns, "loss_change"]]
        return f"Evaluation ({about})\n{shown.to_string(index=False, float_format='{:.4g}'.format)}"


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
