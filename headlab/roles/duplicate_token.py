"""Duplicate-token heads (Wang et al. 2023, IOI): attention to an earlier occurrence of the same token.

On [BOS, x, x], score = mean over the second copy of A[q, j] with x_j = x_q and j < q.
"""

from __future__ import annotations

from headlab.roles.base import Measurement, Probing, Role, register
from headlab.roles.repeats import measure_repeats
from headlab.roles.scores import RoleInfo


class DuplicateToken(Role):
    """See the module's docstring."""

    info = RoleInfo(
        name="duplicate_token",
        title="Duplicate token",
        question="When a token repeats, does the head look at its earlier occurrence?",
        statistic="mean attention in the second copy of repeated random tokens to the same token's earlier occurrence",
        null="the same positions in sequences whose second half does not repeat the first",
        decision="score ≥ 0.2 and at least 0.15 above the null, at q ≤ the false-discovery rate",
        reference="Wang et al. 2023, Interpretability in the wild",
        min_score=0.2,
        min_effect=0.15,
        row_convention="the token's own row",
    )

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        return measure_repeats(probing, "duplicate")


register(DuplicateToken())
