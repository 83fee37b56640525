"""Tables of scores: their columns, their checks, and what they say beyond their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from headlab.errors import OutputError

COLUMNS = (
    "role",
    "layer",
    "head",
    "score",
    "ci_low",
    "ci_high",
    "n",
    "null_mean",
    "effect",
    "effect_size",
    "half_1",
    "half_2",
    "p_value",
    "q_value",
    "claimed",
    "note",
)
"""Columns of ``Scores.frame``, in order."""

DETAIL_COLUMNS = ("role", "layer", "head", "detail", "at", "value", "meaning")
"""Columns of ``Scores.details``, in order."""

_INTEGERS = ("layer", "head", "n")
_FLOATS = (
    "score",
    "ci_low",
    "ci_high",
    "null_mean",
    "effect",
    "effect_size",
    "half_1",
    "half_2",
    "p_value",
    "q_value",
)
_TEXTS = ("role", "note")


def head_label(layer: int, head: int) -> str:
    """Name of a head: ``head_label(18, 6) == "L18H6"``."""
    return f"L{layer}H{head}"


def overlap(frame: pd.DataFrame, roles: Sequence[str]) -> pd.DataFrame:
    """How many heads are claimed for both of two roles, [role, role]; the diagonal counts each role's heads."""
    claimed = frame[frame["claimed"]]
    sets = {
        role: set(zip(rows["layer"], rows["head"], strict=True))
        for role in roles
        for rows in [claimed[claimed["role"] == role]]
    }
    counts = [[len(sets[one] & sets[other]) for other in roles] for one in roles]
    return pd.DataFrame(counts, index=list(roles), columns=list(roles), dtype="int64")


def stability(frame: pd.DataFrame, roles: Sequence[str]) -> pd.DataFrame:
    """How far two disjoint halves of the probe agree.

    Returns:
        One row per role: ``heads`` measured in both halves, ``rank_correlation`` (Spearman) of their scores, and
        ``agreement``: of the k best heads of either half, the share that both halves name (Jaccard), with k the
        number of claimed heads; NaN where nothing is claimed.
    """
    rows = []
    for role in roles:
        measured = frame[(frame["role"] == role)].dropna(subset=["half_1", "half_2"])
        first, second = measured["half_1"].to_numpy(), measured["half_2"].to_numpy()
        varied = len(measured) > 2 and np.ptp(first) > 0 and np.ptp(second) > 0
        k = int(measured["claimed"].sum())
        best = [set(np.argsort(-half, kind="stable")[:k]) for half in (first, second)]
        rows.append(
            {
                "role": role,
                "heads": len(measured),
                "rank_correlation": float(spearmanr(first, second)[0]) if varied else np.nan,
                "agreement": len(best[0] & best[1]) / len(best[0] | best[1]) if k else np.nan,
            }
        )
    return pd.DataFrame(rows, columns=["role", "heads", "rank_correlation", "agreement"])


def checked_details(frame: pd.DataFrame, roles: Sequence[str]) -> pd.DataFrame:
    """The details with their types and a fresh index.

    Raises:
        OutputError: A column is missing, or a row belongs to no role.
    """
    texts, integers, floats = ("role", "detail", "meaning"), ("layer", "head"), ("at", "value")
    columns = list(DETAIL_COLUMNS)
    if missing := [name for name in columns if name not in frame.columns]:
        raise OutputError(f"the details frame lacks {', '.join(missing)}: a row needs every column")
    result = frame.loc[:, columns].reset_index(drop=True)
    for name in (*texts, *integers, *floats):
        kind = "str" if name in texts else "int64" if name in integers else "float64"
        try:
            result[name] = result[name].astype(kind)  # type: ignore[call-overload]  # checked kinds
        except (ValueError, TypeError) as error:
            raise OutputError(f"column {name} of the details frame: {error}") from error
    if unknown := sorted(set(result["role"]) - set(roles)):
        raise OutputError(f"the details have roles without a description: {', '.join(unknown)}")
    return result


def checked_scores(frame: pd.DataFrame, alpha: float, roles: Sequence[str]) -> pd.DataFrame:
    """The frame with the contract's types and a fresh index.

    Raises:
        OutputError: The frame is not a table of scores; the message names the fault.
    """
    if not 0 < alpha < 1:
        raise OutputError(f"alpha {alpha!r} is not a level: give a number between 0 and 1")
    if len(set(roles)) < len(roles):
        raise OutputError(f"a role is described twice among {', '.join(roles)}: describe each once")
    if missing := [column for column in COLUMNS if column not in frame.columns]:
        raise OutputError(f"the scores frame lacks {', '.join(missing)}: a row needs every column")
    if extra := [str(column) for column in frame.columns if column not in COLUMNS]:
        raise OutputError(f"the scores frame has unknown columns {', '.join(extra)}: drop them")
    result = frame.loc[:, list(COLUMNS)].reset_index(drop=True)
    for name in (*_FLOATS, *_INTEGERS, "claimed"):
        try:
            values = result[name].to_numpy(dtype="float64", na_value=math.nan)
        except (ValueError, TypeError) as error:
            raise OutputError(f"column {name} of the scores frame: {error}") from error
        if name in _FLOATS:
            result[name] = values
            continue
        fits = (values == 0) | (values == 1) if name == "claimed" else values == values.round()
        if not bool(fits.all()):
            kind = "true or false" if name == "claimed" else "whole numbers"
            raise OutputError(f"column {name} of the scores frame must hold {kind} only")
        result[name] = values.astype("bool" if name == "claimed" else "int64")
    for name in _TEXTS:
        texts = [encodable("" if pd.isna(text) else text) for text in result[name]]
        result[name] = pd.Series(texts, dtype="str", index=result.index)
    if unknown := sorted(set(result["role"]) - set(roles)):
        raise OutputError(f"the scores frame has roles without a description: {', '.join(unknown)}")
    _check_rows(result)
    return result


def _check_rows(frame: pd.DataFrame) -> None:
    def refuse(bad: pd.Series, why: str) -> None:
        if bool(bad.any()):
            row = frame[bad].iloc[0]
            name = f"{row['role']} of {head_label(row['layer'], row['head'])}"
            raise OutputError(f"the scores frame is wrong for {name}: {why}")

    refuse((frame["layer"] < 0) | (frame["head"] < 0), "layers and heads count from 0")
    refuse(frame.duplicated(["role", "layer", "head"]), "there is more than one row")
    for name in ("p_value", "q_value"):
        refuse((frame[name] < 0) | (frame[name] > 1), f"{name} is not between 0 and 1")
    refuse(frame["ci_low"] > frame["ci_high"], "the interval's ends are swapped")
    refuse(frame["claimed"] & frame["score"].isna(), "a head without a score cannot be claimed")


def encodable(text: str) -> str:
    """The text with lone surrogates escaped."""
    # Lone surrogates, which some slow tokenizers produce, cannot be written to any file.
    return str(text).encode("utf-8", "backslashreplace").decode("utf-8")
