"""Induction heads (Olsson et al. 2022, prefix matching): attention to what followed the token last time.

On [BOS, x, x], score = mean over the second copy of A[q, j+1], where j is the earlier occurrence of x_q.
Olsson et al. repeat 25 tokens four times and do not say whether several targets are summed; with one repeat
there is a single target per row. Copying, the other half of their definition, is scored by
:mod:`headlab.roles.copying`.
"""

from __future__ import annotations

from headlab.roles.base import Measurement, Probing, Role, register
from headlab.roles.repeats import measure_repeats
from headlab.roles.scores import RoleInfo


class Induction(Role):
    """See the module's docstring."""

    info = RoleInfo(
        name="induction",
        title="Induction (prefix matching)",
        question="When a token repeats, does the head look at what followed it last time?",
        statistic="mean attention in the second copy of random tokens to the token after the earlier occurrence",
        null="the same positions in sequences whose second half does not repeat the first",
        decision="score ≥ 0.3 and at least 0.2 above the null, at q ≤ the false-discovery rate",
        reference="Olsson et al. 2022, In-context learning and induction heads, p. 60",
        min_score=0.3,
        min_effect=0.2,
        row_convention="the token's own row, which is also the row that predicts its follower",
    )

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        return measure_repeats(probing, "induction")


register(Induction())
