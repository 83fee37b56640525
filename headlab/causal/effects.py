"""What interventions did to a metric: a tidy table with an interval and a p-value for every head."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from headlab.arguments import seed_number, whole_number
from headlab.attention.heads import Head, read_head
from headlab.errors import HeadError, OutputError, PlanError
from headlab.shards import reading, write_text
from headlab.statistics import bootstrap_interval, sign_flip_p

if TYPE_CHECKING:
    import pandas as pd

#: Columns of the table, in order.
EFFECT_COLUMNS = (
    "layer",
    "head",
    "position",
    "site",
    "value",
    "effect",
    "normalised",
    "ci_low",
    "ci_high",
    "n",
    "p_value",
    "q_value",
)
_FORMAT = "headlab-effects-1"
#: More layers, heads, positions and prompts than there are: a file cannot make maps without end.
_MOST = 10**6
_NUMBERS = tuple(name for name in EFFECT_COLUMNS if name not in ("layer", "head", "site"))


@dataclass(frozen=True)
class Effects:
    """Effects of one intervention per row on a metric, over prompts.

    Attributes:
        frame: One row per intervention, with the columns of :data:`EFFECT_COLUMNS`: ``layer``, ``head`` (−1: the whole
            layer), ``position`` (−1: all) and ``site`` say where; ``value`` is the metric's mean under it, ``effect``
            the mean of value − baseline with its 95 % bootstrap interval over ``n`` prompts (NaN for one prompt);
            ``normalised`` puts the clean run at 1 and the corrupted one at 0 (means over prompts; NaN where there is
            no corrupted run);
            ``p_value`` tests an effect of 0 by flipping signs, two-sided, and ``q_value`` is corrected over the
            table (Benjamini and Hochberg 1995).
        values: The metric under each intervention, [row, prompt].
        baseline: The metric without it, [prompt]: of the run that was intervened in.
        clean: The metric of the clean run, [prompt].
        corrupted: The metric of the corrupted run, [prompt], or None.
        about: What was done: metric, kind, direction, seed and so on.
    """

    frame: pd.DataFrame
    values: Float[np.ndarray, "row prompt"]
    baseline: Float[np.ndarray, " prompt"]
    clean: Float[np.ndarray, " prompt"]
    corrupted: Float[np.ndarray, " prompt"] | None
    about: dict[str, Any]

    def top(self, n: int = 10) -> pd.DataFrame:
        """The rows of the largest effects, whichever sign.

        Raises:
            PlanError: n is not a whole number of at least 0.
        """
        n = whole_number(n, "n")
        order = self.frame["effect"].abs().sort_values(ascending=False, kind="stable").index
        return self.frame.loc[order[:n]].reset_index(drop=True)

    def map(self, column: str = "effect") -> Float[np.ndarray, "layer head"]:
        """A column as layers × heads, or × positions where effects are of whole layers by position.

        Raises:
            OutputError: There is no such column of numbers, or rows are not one per cell: say which head or position
                with ``frame``.
        """
        frame = self.frame
        if column not in _NUMBERS:
            raise OutputError(f"there is no map of {column!r:.60}; there are {', '.join(_NUMBERS)}")
        if not len(frame):
            raise OutputError("there are no effects here, and so no map")
        across = "head" if (frame["head"] >= 0).any() else "position"
        cells = frame.set_index(["layer", across])[column]
        if not cells.index.is_unique:
            raise OutputError(
                f"these effects have several rows for one layer and {across}, so they are no map; select in .frame"
            )
        table = cells.unstack()
        whole = table.reindex(index=range(int(frame["layer"].max()) + 1))
        if across == "head":
            whole = whole.reindex(columns=range(int(frame["head"].max()) + 1))
        return whole.to_numpy(dtype=float)

    def of(self, head: Head | tuple[int, int] | str) -> pd.DataFrame:
        """The rows of one head; of key/value groups, by the group's first head.

        Raises:
            HeadError: That names no head, or there is no effect of it.
        """
        layer, which = read_head(head)
        chosen = (self.frame["layer"] == layer) & (self.frame["head"] == which)
        if not chosen.any():
            raise HeadError(
                f"there is no effect of head {Head(layer, which)} among these of "
                f"{len(self.frame)} places; see .frame for what there is"
            )
        return self.frame[chosen].reset_index(drop=True)

    def to_json(self) -> str:
        """Everything as one JSON document; NaN becomes null."""
        document = {
            "format": _FORMAT,
            "about": self.about,
            "effects": _records(self.frame),
            "baseline": _plain(self.baseline),
            "clean": _plain(self.clean),
            "corrupted": None if self.corrupted is None else _plain(self.corrupted),
            "values": [_plain(row) for row in self.values],
        }
        return json.dumps(document, ensure_ascii=False, allow_nan=False)

    def save(self, path: str | Path) -> Path:
        """Write :meth:`to_json` to a file, whole or not at all.

        Raises:
            OutputError: It cannot be written.
        """
        return write_text(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Effects:
        """Read what :meth:`save` wrote.

        Raises:
            OutputError: The file holds no readable effects, or its parts do not fit each other.
        """
        import pandas as pd

        with reading(path, "effects"):
            document = json.loads(Path(path).read_text("utf-8"))
            if document["format"] != _FORMAT:
                raise OutputError(
                    f"{path} was written as {document['format']!r:.60}, not {_FORMAT!r}"
                )
            fault = _misfit(document)
            if fault:
                raise OutputError(f"{path} holds no readable effects: {fault}")
            frame = pd.DataFrame(document["effects"], columns=list(EFFECT_COLUMNS))
            floats = [
                name
                for name in EFFECT_COLUMNS
                if name not in ("layer", "head", "position", "site", "n")
            ]
            frame[floats] = frame[floats].astype(float)
            corrupted = document["corrupted"]
            return Effects(
                frame,
                np.array(document["values"], float).reshape(len(frame), len(document["clean"])),
                np.array(document["baseline"], float),
                np.array(document["clean"], float),
                None if corrupted is None else np.array(corrupted, float),
                document["about"],
            )

    def __repr__(self) -> str:
        about = ", ".join(
            f"{key} {value}" for key, value in self.about.items() if value is not None
        )
        return (
            f"Effects of {len(self.frame)} interventions on {self.values.shape[1]} prompts ({about})\n"
            f"{self.top(5).to_string(index=False, float_format=lambda value: f'{value:.4g}')}"
        )


def effects_of(
    keys: Sequence[Mapping[str, Any]],
    values: Float[np.ndarray, "row prompt"],
    baseline: Float[np.ndarray, " prompt"],
    clean: Float[np.ndarray, " prompt"],
    corrupted: Float[np.ndarray, " prompt"] | None,
    about: Mapping[str, Any],
    seed: int = 0,
) -> Effects:
    """The table of any procedure that gives one number per intervention and prompt.

    Args:
        keys: Where each row intervened: ``layer``, and ``head``, ``position`` and ``site`` where they apply.
        values: The metric under each intervention.
        baseline: The metric of the run that was intervened in.
        clean: The metric of the clean run.
        corrupted: The metric of the corrupted run, or None.
        about: What was done.
        seed: Seed of the bootstrap and the sign flips.

    Raises:
        PlanError: Arrays do not fit the keys or each other, a number is not finite, a key has no layer, or the seed is
            none.
    """
    import pandas as pd
    from scipy.stats import false_discovery_control

    seed_number(seed)
    values, baseline, clean = (_numbers(x) for x in (values, baseline, clean))
    corrupted = None if corrupted is None else _numbers(corrupted)
    _check(keys, values, baseline, clean, corrupted)
    change = (values - baseline).T  # [prompt, row]
    low = high = np.full(len(keys), np.nan)
    if len(keys) and values.shape[1] > 1:  # one prompt says nothing of others
        low, high = bootstrap_interval(change, seed)
    p = np.minimum(1.0, 2 * np.minimum(sign_flip_p(change, seed), sign_flip_p(-change, seed)))
    span = math.nan if corrupted is None else float(clean.mean() - corrupted.mean())
    frame = pd.DataFrame(
        {
            "layer": [int(key["layer"]) for key in keys],
            "head": [int(key.get("head", -1)) for key in keys],
            "position": [int(key.get("position", -1)) for key in keys],
            "site": [str(key.get("site", "z")) for key in keys],
            "value": values.mean(1),
            "effect": change.mean(0),
            "normalised": math.nan
            if corrupted is None or span == 0
            else (values.mean(1) - corrupted.mean()) / span,
            "ci_low": low,
            "ci_high": high,
            "n": values.shape[1],
            "p_value": p,
            "q_value": false_discovery_control(p) if len(p) else p,
        }
    )
    return Effects(frame[list(EFFECT_COLUMNS)], values, baseline, clean, corrupted, dict(about))


def _numbers(given: Any) -> np.ndarray:
    try:
        return np.asarray(given, np.float64)
    except (ValueError, TypeError) as error:
        raise PlanError(f"effects are made of arrays of numbers, not {given!r:.60}") from error


def _check(
    keys: Sequence[Mapping[str, Any]],
    values: np.ndarray,
    baseline: np.ndarray,
    clean: np.ndarray,
    corrupted: np.ndarray | None,
) -> None:
    if values.ndim != 2 or len(values) != len(keys) or values.shape[1] == 0:
        raise PlanError(
            f"values must be [row, prompt] with one row for each of {len(keys)} keys and at least one prompt, not of "
            f"shape {list(values.shape)}"
        )
    ends = {"baseline": baseline, "clean": clean}
    ends |= {} if corrupted is None else {"corrupted": corrupted}
    for name, end in ends.items():
        if end.shape != values.shape[1:]:
            raise PlanError(
                f"{name} must be [prompt] of {values.shape[1]} prompts, not of shape {list(end.shape)}"
            )
        if not np.isfinite(end).all():
            at = int(np.flatnonzero(~np.isfinite(end))[0])
            raise PlanError(f"{name} is {end[at]} for prompt {at}; leave that prompt out")
    for at, key in enumerate(keys):
        if not isinstance(key, Mapping) or "layer" not in key:
            raise PlanError(
                f"key {at} must say its layer, as {{'layer': 0, 'head': 1}}, not {key!r:.60}"
            )
        wrong = np.flatnonzero(~np.isfinite(values[at]))
        if len(wrong):
            raise PlanError(
                f"row {at} ({', '.join(f'{name} {part}' for name, part in key.items())}) is {values[at, wrong[0]]} for "
                f"prompt {wrong[0]}; leave that prompt out, or use a metric that is finite there"
            )


def _misfit(document: Mapping[str, Any]) -> str:
    """What does not fit in saved effects; nothing where all does."""
    parts = ["effects", "values", "baseline", "clean"]
    for name in parts + (["corrupted"] if document["corrupted"] is not None else []):
        if not isinstance(document[name], list):
            return f"{name!r} is no list"
    if not isinstance(document["about"], dict):
        return "'about' is no object"
    effects, n = document["effects"], len(document["clean"])
    for at, row in enumerate(effects):
        if not isinstance(row, dict) or set(row) != set(EFFECT_COLUMNS):
            return f"effect {at} must have exactly {', '.join(EFFECT_COLUMNS)}"
        for name in ("layer", "head", "position", "n"):
            if type(row[name]) is not int or not -1 <= row[name] <= _MOST:
                return f"{name!r} of effect {at} is no whole number from −1 to {_MOST}"
        if not isinstance(row["site"], str):
            return f"'site' of effect {at} is no text"
    for name in ("baseline", "corrupted"):
        if document[name] is not None and len(document[name]) != n:
            return f"{name!r} has {len(document[name])} prompts, but 'clean' has {n}"
    if len(document["values"]) != len(effects):
        return f"there are {len(effects)} effects, but values of {len(document['values'])}"
    for at, row in enumerate(document["values"]):
        if not isinstance(row, list) or len(row) != n:
            return f"row {at} of 'values' is no list of {n} prompts"
    return ""


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    plain = frame.astype(object)
    found = plain.where(frame.notna(), None).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in found]


def _plain(values: np.ndarray) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in values]
