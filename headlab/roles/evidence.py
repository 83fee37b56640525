"""From measurements to decisions: interval, p-value, false-discovery correction.

The prompt is the unit: tokens of one prompt are not independent. Intervals are bootstrap percentiles over
prompts. p-values are one-sided sign-flip tests of value − null, exact for up to 17 prompts and by Monte Carlo
above, so they are never below 1 / (flips + 1). Corrected p-values are Benjamini and Hochberg's (1995) over the
heads of one role. The effect size is the mean of value − null over prompts in units of its standard deviation
(Cohen's d for pairs). The two halves are the prompts of even and of odd number.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd

from headlab.roles.base import Measurement
from headlab.roles.scores import COLUMNS, DETAIL_COLUMNS, RoleInfo
from headlab.statistics import bootstrap_interval, corrected, sign_flip_p


def decide(info: RoleInfo, found: Measurement, alpha: float, seed: int) -> pd.DataFrame:
    """Scores of every head for one role, with the columns of :data:`headlab.roles.scores.COLUMNS`.

    Args:
        info: The role, with its thresholds.
        found: What its probe measured.
        alpha: False-discovery rate.
        seed: Seed of resampling and sign flips.
    """
    prompts, n_layers, n_heads = found.values.shape
    values = found.values.reshape(prompts, -1).astype(np.float64)
    null = found.null.reshape(prompts, -1).astype(np.float64)
    measured = ~np.isnan(values) & ~np.isnan(null)
    values, null = np.where(measured, values, np.nan), np.where(measured, null, np.nan)
    n = measured.sum(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of no prompts is NaN, as meant
        score, null_mean = np.nanmean(values, 0), np.nanmean(null, 0)
        low, high = bootstrap_interval(values, seed)
        halves = np.nanmean(values[0::2], 0), np.nanmean(values[1::2], 0)
        spread = np.nanstd(values - null, 0, ddof=1)
    p = sign_flip_p(values - null, seed)
    q = corrected(p)
    effect = score - null_mean
    with np.errstate(invalid="ignore"):
        claimed = (q <= alpha) & (score >= info.min_score) & (effect >= info.min_effect)
    layer, head = np.divmod(np.arange(n_layers * n_heads), n_heads)
    general = "; ".join(
        part
        for part in (
            found.notes.get((-1, -1), ""),
            _too_few(prompts, int((~np.isnan(p)).sum()), alpha),
        )
        if part
    )
    frame = pd.DataFrame(
        {
            "role": info.name,
            "layer": layer,
            "head": head,
            "score": score,
            "ci_low": low,
            "ci_high": high,
            "n": n,
            "null_mean": null_mean,
            "effect": effect,
            "effect_size": np.divide(
                effect, spread, out=np.full_like(effect, np.nan), where=spread > 0
            ),
            "half_1": halves[0],
            "half_2": halves[1],
            "p_value": p,
            "q_value": q,
            "claimed": claimed,
            "note": [
                found.notes.get((int(at), int(which)), general)
                for at, which in zip(layer, head, strict=True)
            ],
        }
    )
    return frame[list(COLUMNS)]


def details_frame(info: RoleInfo, found: Measurement) -> pd.DataFrame:
    """A role's further numbers, with the columns of :data:`headlab.roles.scores.DETAIL_COLUMNS`; NaN is left out."""
    frames = []
    for name, detail in found.details.items():
        values = np.asarray(detail.values, np.float64)
        if detail.at is None:
            values = values[..., None]
        layer, head, at = (axis.ravel() for axis in np.indices(values.shape))
        frame = pd.DataFrame(
            {
                "role": info.name,
                "layer": layer,
                "head": -1 if detail.per_layer else head,
                "detail": name,
                "at": np.nan if detail.at is None else np.asarray(detail.at, np.float64)[at],
                "value": values.ravel(),
                "meaning": detail.meaning,
            }
        )
        frames.append(frame[frame["value"].notna()])
    if not frames:
        return pd.DataFrame(columns=list(DETAIL_COLUMNS))
    return pd.concat(frames, ignore_index=True)[list(DETAIL_COLUMNS)]


def _too_few(prompts: int, heads: int, alpha: float) -> str:
    """A warning when the smallest p-value these prompts can give would not pass correction by itself."""
    if heads == 0 or 0.5**prompts * heads <= alpha:
        return ""
    needed = math.ceil(math.log2(heads / alpha))
    return f"with {prompts} prompts no head can pass correction by itself; {needed} would do"
