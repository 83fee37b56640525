"""Duplicate-token heads (Wang et al. 2023, IOI): attention to an earlier occurrence of the same token.

On [BOS, x, x], score = mean over the second copy of A[q, j] with x_j = x_q and j < q. The behaviour is the logit
difference of indirect object identification, for which Wang et al. found these heads to matter in GPT-2 small.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from headlab.errors import PromptError
from headlab.roles.base import Behaviour, Measurement, Probing, Role, register
from headlab.roles.repeats import measure_repeats
from headlab.roles.scores import RoleInfo
from headlab.tasks import TOKENS_SCHEMA, ioi_prompts

#: Prompts of the behaviour.
_PROMPTS = 16


def logit_differences(probing: Probing, n_prompts: int = _PROMPTS) -> Float[np.ndarray, " prompt"]:
    """Logit of the indirect object's name minus the subject's, in nats, per IOI prompt.

    NaN where the model predicts no next token or its tokenizer splits the names.
    """
    model = probing.model
    blank = np.full(n_prompts, np.nan)
    if not model.spec.layers[0].causal:
        return blank
    try:
        prompts = ioi_prompts(model.tokenizer, n_prompts, probing.seed, probing.bos)
    except PromptError:
        return blank
    trace = model.trace([list(prompt.ids) for prompt in prompts], logits="last")
    assert trace.logits is not None
    last = trace.logits[:, 0].double().cpu().numpy()
    each = np.arange(n_prompts)
    io, subject = (
        np.array([getattr(prompt, who) for prompt in prompts]) for who in ("io", "subject")
    )
    return last[each, io] - last[each, subject]


IOI = Behaviour("logit of the indirect object over the subject (nats)", logit_differences)


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
        reduction="mean over the rows of the second copy but its first, then over prompts",
    )
    schema = TOKENS_SCHEMA
    behaviour = IOI

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        return measure_repeats(probing, "duplicate")


register(DuplicateToken())
