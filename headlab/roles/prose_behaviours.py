"""What ablating heads that read by distance should spoil: the use of near context, of far context and of word order.

Each behaviour runs the model on fewer than 1500 tokens of text that the probes did not read (or of the user's own
records). Masked language models do not predict the next token, and models whose context is too short cannot show
the use of far context: their numbers are NaN.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.roles.base import Behaviour, Probing
from headlab.roles.confirmation import next_token_log_probability
from headlab.roles.prose_rows import LENGTH, readable, text_ids

_SEED = 11
#: Windows of near context, and their tokens.
_NEAR_PROMPTS, _NEAR_LENGTH = 32, 32
#: Texts of far context: their tokens, the first and the number of tokens quoted at the end, and the tokens before
#: the quotation that are left without the far context.
_FAR_PROMPTS, _FAR_LENGTH, _QUOTED_FROM, _QUOTED, _FAR_LEFT = 5, 192, 32, 32, 24
#: Windows of word order: tokens of context and tokens predicted.
_ORDER_PROMPTS, _ORDER_CONTEXT, _ORDER_PREDICTED = 20, 24, 6


def near_context(probing: Probing) -> Float[np.ndarray, " prompt"]:
    """Mean log-probability of the tokens of windows so short that all context is near, in nats."""
    ids = _stretches(probing, _NEAR_PROMPTS, _NEAR_LENGTH)
    if ids is None:
        return np.full(1, np.nan)
    return next_token_log_probability(probing.model, ids).mean(1).numpy()


def far_context(probing: Probing) -> Float[np.ndarray, " prompt"]:
    """What far context adds to the log-probability of a passage quoted from it, in nats per token.

    The passage stands 160 tokens before its quotation, which ends the prompt; its first token is not counted. The
    control has the quotation and the 24 tokens before it. In plain text far context adds so little per token that
    a behaviour cheap enough to be run under many edits would show nothing but noise.
    """
    ids = _stretches(probing, _FAR_PROMPTS, _FAR_LENGTH)
    if ids is None or probing.length(_FAR_LENGTH + _QUOTED) < _FAR_LENGTH + _QUOTED:
        return np.full(1, np.nan)
    quotation = ids[:, _QUOTED_FROM : _QUOTED_FROM + _QUOTED]
    first = ids[:, : int(probing.bos is not None)]
    whole, short = (
        next_token_log_probability(probing.model, torch.cat([*part, quotation], 1))[
            :, 1 - _QUOTED :
        ].mean(1)
        for part in ((ids,), (first, ids[:, -_FAR_LEFT:]))
    )
    return (whole - short).numpy()


def word_order(probing: Probing) -> Float[np.ndarray, " prompt"]:
    """What the order of the context adds to the log-probability of the tokens after it, in nats per token.

    The control shuffles all of the context but its last token, so that only the order is lost.
    """
    ids = _stretches(probing, _ORDER_PROMPTS, _ORDER_CONTEXT + _ORDER_PREDICTED)
    if ids is None:
        return np.full(1, np.nan)
    rng = np.random.default_rng(probing.seed)
    start, stop = int(probing.bos is not None), ids.shape[1] - _ORDER_PREDICTED - 1
    shuffled = ids.clone()
    for row in shuffled:
        row[start:stop] = row[start:stop][torch.from_numpy(rng.permutation(stop - start))]
    ordered, lost = (
        next_token_log_probability(probing.model, part)[:, -_ORDER_PREDICTED:].mean(1)
        for part in (ids, shuffled)
    )
    return (ordered - lost).numpy()


NEAR_CONTEXT = Behaviour(
    f"log-probability of text in windows of {_NEAR_LENGTH} tokens (nats per token)", near_context
)
FAR_CONTEXT = Behaviour(
    f"gain in log-probability of a quotation from the passage {_FAR_LENGTH - _QUOTED_FROM} tokens back "
    "(nats per token)",
    far_context,
)
WORD_ORDER = Behaviour(
    f"gain in log-probability from the order of {_ORDER_CONTEXT} tokens of context (nats per token)",
    word_order,
)


def _stretches(probing: Probing, n: int, length: int) -> Int[Tensor, "prompt position"] | None:
    """Up to ``n`` stretches of text; None where the model cannot show the behaviour."""
    causal = all(layer.causal for layer in probing.model.spec.layers)
    if readable(probing) or not causal or probing.length(length) < length:
        return None
    if probing.records is None:
        return text_ids(replace(probing, seed=probing.seed + _SEED, n_prompts=n), length)
    whole = text_ids(probing, probing.length(LENGTH))
    first = int(probing.bos is not None)
    pieces = whole[:, first:].unfold(1, length - first, length - first).flatten(0, 1)[:n]
    return torch.cat([whole[:1, :first].expand(len(pieces), -1), pieces], 1)
