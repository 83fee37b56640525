"""Previous-token heads (Elhage et al. 2021; Olsson et al. 2022, p. 60): attention to the token before.

score = mean over rows of A[q, q−1], on natural text. Induction heads read what these heads write (K-composition), so
the behaviour is that of induction.
"""

from __future__ import annotations

from headlab.roles.base import Measurement, Probing, Role, register
from headlab.roles.prose_rows import TEXT_SCHEMA, prose_rows, readable
from headlab.roles.repeats import SECOND_COPY
from headlab.roles.scores import RoleInfo


class PreviousToken(Role):
    """See the module's docstring."""

    info = RoleInfo(
        name="previous_token",
        title="Previous token",
        question="Does the head look at the token before the current one?",
        statistic="mean attention from each token to the one before it, A[q, q−1], on natural text",
        null="mean attention per key in the same rows, the first and the previous token left out",
        decision="score ≥ 0.3 and at least 0.2 above the null, at q ≤ the false-discovery rate",
        reference="Olsson et al. 2022, In-context learning and induction heads",
        min_score=0.3,
        min_effect=0.2,
        row_convention="the token's own row",
        reduction="mean over rows from the third token on, then over prompts",
    )
    schema = TEXT_SCHEMA
    behaviour = SECOND_COPY

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        if why := readable(probing):
            return Measurement.not_measurable(probing, why)
        rows = prose_rows(probing)
        rest = rows.total - rows.previous - rows.first * (rows.queries > 1)
        null = rest / (rows.keys - 1).clip(min=1)[:, None]
        # The row of position 1 has no previous token but the first, which a sink would take for it.
        return rows.averaged(rows.previous, null, rows.seen(1) & (rows.queries > 1))


register(PreviousToken())
