"""Positional heads: how much of a head's attention on natural text distance alone explains.

Hong et al. 2024 (On the token distance modeling ability of higher RoPE attention dimension) name "positional heads"
by a correlation between RoPE dimensions and attention whose exact form we could not verify. **The score here is
headlab's own and makes no claim to be theirs.**

Let m[q, b] be the mass that row q puts on the keys of lag bin b, the first token left out (one bin per lag up to 15,
coarser beyond), and c[q, b] how many keys of the bin the row sees. A head that reads nothing but distance has
m[q, b] = r[q] · w[b]·c[q, b] / Σ_b w[b]·c[q, b] with one profile w for all texts. For each prompt, w is fitted to the
*other* prompts by maximum likelihood, and

    score = Σ_q Σ_b min(m[q, b], predicted m[q, b]) / Σ_q r[q],    r[q] = Σ_b m[q, b]

so each row counts by what it does not leave on the first token. The null is the same overlap with even attention over
the keys the row sees: a head that attends evenly is explained by distance no better than by nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from headlab.roles.base import Detail, Measurement, Probing, Role, register
from headlab.roles.prose_behaviours import WORD_ORDER
from headlab.roles.prose_rows import (
    AWAKE,
    EARLY,
    LOCAL,
    TEXT_SCHEMA,
    ProseRows,
    prose_rows,
    readable,
)
from headlab.roles.rope import rope_details
from headlab.roles.scores import RoleInfo

_ITERATIONS = 30
#: Attention per key below this counts as none in slopes of logarithms.
_FLOOR = 1e-6


class Positional(Role):
    """See the module's docstring."""

    info = RoleInfo(
        name="positional",
        title="Positional",
        question="Does the head attend by distance alone, whatever the text says?",
        statistic="overlap of each row with the head's profile by lag, fitted on the other prompts, on natural text",
        null="overlap of the same rows with even attention over the keys they see",
        decision="score ≥ 0.7 and at least 0.3 above the null, at q ≤ the false-discovery rate",
        reference="headlab's own definition; Hong et al. 2024 define positional heads in a way we could not verify",
        min_score=0.7,
        min_effect=0.3,
        row_convention="the token's own row",
        reduction="mean over rows weighted by their non-sink attention, then over prompts; lags of 16 and more in bins",
        sink_convention=f"the first token is left out; rows with less than {AWAKE:.0%} beyond it do not count",
    )
    schema = TEXT_SCHEMA
    behaviour = WORD_ORDER

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        if why := readable(probing):
            return Measurement.not_measurable(probing, why)
        rows = prose_rows(probing)
        if len(rows.ids) < 2:
            return Measurement.not_measurable(
                probing, "a profile needs another text to be fitted on"
            )
        if rows.ids.shape[1] <= 3 * LOCAL:
            why = f"a text of {rows.ids.shape[1]} tokens, all the context holds, is too short"
            return Measurement.not_measurable(probing, why)
        mass = rows.lags.sum(-1)
        value, null = (np.full(mass.shape, np.nan, np.float32) for _ in range(2))
        for layer, keys in enumerate(rows.lag_keys):
            value[:, layer], null[:, layer] = overlaps(rows.lags[:, layer], keys)
        # Two keys can be told apart by distance; a row that sees fewer has no profile.
        chosen = (rows.lag_keys > 0).sum(-1) > 1
        found = rows.averaged(value, null, chosen, mass, rows.lag_queries)
        return replace(found, details={**_details(rows), **rope_details(probing, rows)})


def overlaps(
    lags: Float[np.ndarray, "prompt head row bin"], keys: Int[np.ndarray, "row bin"]
) -> tuple[Float[np.ndarray, "prompt head row"], Float[np.ndarray, "prompt head row"]]:
    """Overlap (1 − total variation) of each row with the profile of the other prompts, and with even attention.

    Args:
        lags: Mass by lag bin of the rows of one layer.
        keys: Keys by bin that a row sees.

    Returns:
        Both overlaps, NaN in rows at rest, or where the other prompts have nothing but such rows.
    """
    rest = lags.sum(-1)
    awake = rest >= AWAKE
    mass = np.where(awake[..., None], lags, 0).astype(np.float64)
    weight = np.where(awake, rest, 0).astype(np.float64)
    others = mass.sum(2).sum(0) - mass.sum(2)
    profile = fit_profile(others, weight.sum(0) - weight, keys)
    share = np.divide(mass, rest[..., None], where=awake[..., None], out=np.zeros_like(mass))
    predicted = profile[:, :, None] * keys
    over = predicted.sum(-1)
    known = awake & (over > 0)
    predicted /= np.where(over > 0, over, 1)[..., None]
    even = keys / keys.sum(-1, keepdims=True).clip(min=1)
    return (
        np.where(known, np.minimum(share, predicted).sum(-1), np.nan),
        np.where(known, np.minimum(share, even).sum(-1), np.nan),
    )


def fit_profile(
    mass: Float[np.ndarray, "*heads bin"],
    rows: Float[np.ndarray, "*heads row"],
    keys: Int[np.ndarray, "row bin"],
) -> Float[np.ndarray, "*heads bin"]:
    """Attention per key by lag, up to a factor, that best explains masses by distance alone (maximum likelihood).

    With m[q, b] = r[q]·w[b]·c[q, b]/Σ_b w[b]·c[q, b], the masses M[b] = Σ_q m[q, b] and r[q] suffice, and the
    likelihood is largest where w[b] = M[b] / Σ_q c[q, b]·r[q]/Z[q], Z[q] = Σ_b w[b]·c[q, b]; iterated from M / Σ_q c.

    Args:
        mass: M.
        rows: r.
        keys: c.
    """
    counts = keys.astype(np.float64)
    profile = mass / counts.sum(0).clip(min=1)
    for _ in range(_ITERATIONS):
        total = profile @ counts.T
        share = np.divide(rows, total, out=np.zeros_like(total), where=total > 0)
        expected = share @ counts
        profile = np.divide(mass, expected, out=np.zeros_like(mass), where=expected > 0)
    return profile


def _details(rows: ProseRows) -> dict[str, Detail]:
    seen = rows.lag_keys.sum(1)
    mass = rows.lags.sum(3, dtype=np.float64).mean(0)
    profile = np.divide(
        mass, seen[:, None], out=np.full_like(mass, np.nan), where=seen[:, None] > 0
    )
    low, high = np.array(rows.lag_edges[:-1]), np.array(rows.lag_edges[1:])
    behind = low > 0
    middle = np.sqrt(low[behind] * (high[behind] - 1.0))
    early = rows.early.mean(0, dtype=np.float64)
    early[rows.windows < rows.ids.shape[1]] = np.nan  # the start lies out of window
    at = np.sqrt(np.array(EARLY) * (np.array((*EARLY[1:], 64)) - 1.0))
    return {
        "offset_profile": Detail(
            profile,
            "mean attention per key by lag (at = first lag of the bin, tokens)",
            low.astype(float),
        ),
        "recency_slope": Detail(
            -_slope(profile[..., behind], middle),
            "how fast attention falls with distance: minus the slope of ln attention per key on ln lag; headlab's own",
        ),
        "primacy_slope": Detail(
            -_slope(early, at),
            "how fast attention falls from the start of the text: minus the slope of ln attention per key on "
            "ln position, positions 1 to 63 seen from 256 on; headlab's own",
        ),
    }


def _slope(
    profile: Float[np.ndarray, "layer head at"], at: Float[np.ndarray, " at"]
) -> Float[np.ndarray, "layer head"]:
    """Least-squares slope of ln profile on ln at, over what is not NaN; NaN with fewer than three points."""
    x = np.where(np.isnan(profile), np.nan, np.log(at))
    y = np.log(np.maximum(profile, _FLOOR))
    known = (~np.isnan(x)).sum(-1)
    enough = known >= 3
    out = np.full(known.shape, np.nan)
    x, y = x[enough], y[enough]
    x = x - np.nanmean(x, -1, keepdims=True)
    out[enough] = np.nansum(x * y, -1) / np.nansum(x * x, -1)
    return out


register(Positional())
