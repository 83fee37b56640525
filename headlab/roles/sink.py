"""Attention sinks (Xiao et al. 2023; Gu et al. 2024, eq. 2): attention parked on the first token.

Per prompt α = mean over the rows after the first of A[q, 0]; score = mean of α over prompts. Gu et al. count
the share of samples with α > ε = 0.3 over heads and layers; ε is the threshold of the score here. They use
64 tokens and include the first row, which always has A[0, 0] = 1; it is left out here.
"""

from __future__ import annotations

from headlab.roles.base import Measurement, Probing, Role, register
from headlab.roles.prose_rows import prose_rows
from headlab.roles.scores import RoleInfo

#: Gu et al.'s ε.
EPSILON = 0.3


class Sink(Role):
    """See the module's docstring."""

    info = RoleInfo(
        name="sink",
        title="Attention sink",
        question="Does the head park its attention on the first token?",
        statistic="mean attention from later tokens to the first token, A[q, 0], on natural text",
        null="mean attention per key that the same rows give to every other key",
        decision="score ≥ 0.3 (Gu et al.'s ε) and at least 0.2 above the null, at q ≤ the false-discovery rate",
        reference="Xiao et al. 2023 (StreamingLLM); Gu et al. 2024, When attention sink emerges",
        min_score=EPSILON,
        min_effect=0.2,
        row_convention="the token's own row",
    )

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        rows = prose_rows(probing)
        null = (rows.total - rows.first) / rows.keys.clip(min=1)[:, None]
        return rows.averaged(rows.first, null, rows.seen(rows.queries))


register(Sink())
