"""Attention sinks (Xiao et al. 2023; Gu et al. 2024, eq. 2): attention parked on the first token.

Per prompt α = mean over the rows after the first of A[q, 0]; score = mean of α over prompts. Gu et al. count
the share of samples with α > ε = 0.3 over heads and layers; ε is the threshold of the score here. They use
64 tokens and include the first row, which always has A[0, 0] = 1; it is left out here.

``Sink(convention="gu")`` is the paper's: texts of 64 tokens, with a BOS token only where the tokenizer puts one by
itself, α over all rows, the first included, and the share of texts with α > ε for a score. Its mean over heads and
layers is Sink_1^ε. That a head is claimed when most texts have a sink is headlab's.

What is beside the score is in :mod:`headlab.roles.sink_details`. The knock-out hides the first token from the heads
(:func:`headlab.roles.blocking.block_first`): a head that rests there must go elsewhere, and others lose little. What
it should spoil is the prediction of plain text, as when StreamingLLM's window loses the first token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float

from headlab.attention.edits import Edit
from headlab.attention.heads import Head
from headlab.errors import PlanError
from headlab.roles.base import Behaviour, Look, Measurement, Probing, Role, register
from headlab.roles.blocking import block_first
from headlab.roles.confirmation import next_token_log_probability
from headlab.roles.prose_rows import TEXT_SCHEMA, prose_rows, readable, text_ids
from headlab.roles.scores import RoleInfo
from headlab.roles.sink_details import (
    EPSILON,
    LEAST_ROWS,
    LENGTH,
    short_texts,
    sink_details,
    wrapping,
)

_WINDOWS, _WINDOW, _SEED = 3, 96, 3
_MASK_EVERY = 8


def text_log_probability(probing: Probing) -> Float[np.ndarray, " prompt"]:
    """Mean log-probability of the tokens of plain text, in nats: the next token, or for an encoder a masked one.

    An encoder has every eighth token masked. Texts where there is nothing to predict are NaN.
    """
    model, tokenizer = probing.model, probing.model.tokenizer
    causal = all(layer.causal for layer in model.spec.layers)
    mask = -1 if causal else getattr(tokenizer, "mask_token_id", None)
    if readable(probing) or mask is None:
        return np.full(_WINDOWS, np.nan)
    length = probing.length(_WINDOW)
    apart = replace(probing, seed=probing.seed + _SEED, n_prompts=_WINDOWS)
    ids = text_ids(apart, length)[:_WINDOWS]
    if causal:
        return next_token_log_probability(model, ids).double().mean(1).numpy()
    hidden = torch.arange(length) % _MASK_EVERY == _MASK_EVERY // 2
    found = torch.log_softmax(model.logits(ids.masked_fill(hidden, mask)).float(), -1).cpu()
    return found.gather(-1, ids[..., None])[:, hidden, 0].double().mean(1).numpy()


class Sink(Role):
    """See the module's docstring.

    Args:
        convention: ``"headlab"`` or ``"gu"``.

    Raises:
        PlanError: There is no such convention.
    """

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
        row_convention="the token's own row; the first row is left out",
        sink_convention="the first token's mass is the score",
        ablation="the first token hidden from the heads (score −∞), in every row that sees another key",
    )
    schema = TEXT_SCHEMA
    behaviour = Behaviour(
        f"log-probability of plain text in windows of {_WINDOW} tokens (nats per token)",
        text_log_probability,
    )

    def __init__(self, convention: Literal["headlab", "gu"] = "headlab") -> None:
        if convention not in ("headlab", "gu"):
            raise PlanError(f"convention={convention!r} must be 'headlab' or 'gu'")
        self.convention = convention
        if convention == "gu":
            self.info = replace(
                Sink.info,
                statistic="share of texts of 64 tokens with α > 0.3, α the mean of A[q, 0] over all rows",
                null="the same share for every other key, averaged; keys that fewer than 16 rows see left out",
                decision="score ≥ 0.5 and at least 0.25 above the null, at q ≤ the false-discovery rate",
                min_score=0.5,
                min_effect=0.25,
                row_convention="the token's own row; the first row is included",
                reduction="α > 0.3 per text, then the share of texts (Gu et al. 2024)",
            )

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        if why := readable(probing):
            return Measurement.not_measurable(probing, why)
        if self.convention == "gu":
            found = _gu(probing)
        else:
            rows = prose_rows(probing)
            null = (rows.total - rows.first) / rows.keys.clip(min=1)[:, None]
            found = rows.averaged(rows.first, null, rows.seen(rows.queries))
        return replace(found, details=sink_details(probing))

    def ablation(self, heads: Iterable[Head]) -> Edit:
        """The first token hidden from the heads."""
        return block_first(list(heads))


def _gu(probing: Probing) -> Measurement:
    length = probing.length(LENGTH)
    if wrapping(probing.model.tokenizer)[0] or probing.bos is None:
        ids = text_ids(probing, length)
    else:
        ids = text_ids(probing, length + 1)[:, 1:]
    texts = short_texts(probing, ids)
    if texts.told < 2:
        why = f"the context holds {length} tokens, too few for means over {LEAST_ROWS} rows"
        return Measurement.not_measurable(probing, why)
    sinks = texts.sinks.astype(np.float64)
    queries = np.arange(1, length)
    looks = tuple(Look(texts.ids[at], queries, texts.first[at]) for at in range(min(2, len(sinks))))
    return Measurement(sinks[..., 0], sinks[..., 1:].mean(-1), looks)


register(Sink())
