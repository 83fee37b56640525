"""Local and long-range heads: how far back a head looks on natural text, the sink left out.

A head's first-token mass says whether it rests, not how far it reads, so it is taken off and the rest
renormalised: local = Σ_{q−k<16, k>0} A / Σ_{k>0} A, and long-range = Σ_{q−k≥128, k>0} A / Σ_{k>0} A. Rows in
which nearly everything lies on the first token are left out: what remains is rounding. Definitions of our own.
"""

from __future__ import annotations

import numpy as np

from headlab.roles.base import Measurement, Probing, Role, register
from headlab.roles.prose_behaviours import FAR_CONTEXT, NEAR_CONTEXT
from headlab.roles.prose_rows import (
    AWAKE,
    FAR,
    LOCAL,
    TEXT_SCHEMA,
    ProseRows,
    prose_rows,
    readable,
)
from headlab.roles.scores import RoleInfo

_SINK = f"the first token is left out and the rest renormalised; rows with less than {AWAKE:.0%} left do not count"


class Local(Role):
    """Attention to the last 16 tokens."""

    info = RoleInfo(
        name="local",
        title="Local",
        question="Does the head read the last few tokens?",
        statistic="share of non-sink attention that stays fewer than 16 tokens away, on natural text",
        null="the share under even attention over the same keys",
        decision="score ≥ 0.7 and at least 0.3 above the null, at q ≤ the false-discovery rate",
        reference="headlab's own definition",
        min_score=0.7,
        min_effect=0.3,
        row_convention="the token's own row",
        sink_convention=_SINK,
    )
    schema = TEXT_SCHEMA
    behaviour = NEAR_CONTEXT

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        if why := readable(probing):
            return Measurement.not_measurable(probing, why)
        rows = prose_rows(probing)
        near_first = (rows.queries < LOCAL) * rows.first
        even = rows.near / rows.keys.clip(min=1)
        far_enough = np.broadcast_to(rows.queries >= 2 * LOCAL, even.shape)
        return _shares(rows, rows.local - near_first, even, far_enough)


class LongRange(Role):
    """Attention at least 128 tokens back."""

    info = RoleInfo(
        name="long_range",
        title="Long range",
        question="Does the head read far back, beyond what even attention would?",
        statistic="share of non-sink attention that lies at least 128 tokens back, on natural text",
        null="the share under even attention over the same keys",
        decision="score ≥ 0.5 and at least 0.1 above the null, at q ≤ the false-discovery rate",
        reference="headlab's own definition",
        min_score=0.5,
        min_effect=0.1,
        row_convention="the token's own row",
        sink_convention=_SINK,
    )
    schema = TEXT_SCHEMA
    behaviour = FAR_CONTEXT

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        if why := readable(probing):
            return Measurement.not_measurable(probing, why)
        rows = prose_rows(probing)
        even = rows.distant / rows.keys.clip(min=1)
        return _shares(rows, rows.far, even, rows.seen(FAR) & (rows.queries >= 2 * FAR))


def _shares(rows: ProseRows, mass: np.ndarray, even: np.ndarray, chosen: np.ndarray) -> Measurement:
    rest = rows.total - rows.first
    share = np.divide(mass, rest, out=np.full_like(mass, np.nan), where=rest >= AWAKE)
    return rows.averaged(share, np.broadcast_to(even[:, None], share.shape), chosen)


register(Local())
register(LongRange())
