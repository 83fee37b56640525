"""A single query under edits, as each step of generation has: the plain formula in as few operations as there can be.

It is :mod:`~headlab.kernels.dense` for one row: at this size, what a block's bookkeeping costs is most of the time.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from headlab.kernels.dense import softmax
from headlab.kernels.inputs import AttentionInputs, Request


def serves(inputs: AttentionInputs, request: Request) -> bool:
    """Whether a call is z of one query that sees every key its mask leaves it."""
    return (
        inputs.n_queries == 1
        and not inputs.causal
        and inputs.window is None
        and request.z
        and not request.statistics
    )


def z(inputs: AttentionInputs, request: Request) -> Float[Tensor, "batch head 1 d_value"]:
    """Mixed values with the request's edits."""
    dtype = torch.promote_types(inputs.q.dtype, torch.float32)
    group = inputs.group
    k, v = inputs.k.to(dtype), inputs.v.to(dtype)
    q = (inputs.q.to(dtype) * inputs.scaling).unflatten(1, (-1, group)).squeeze(3)
    scores = (q @ k.transpose(-1, -2)).flatten(1, 2)[:, :, None]
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    if inputs.position_bias is not None:
        scores = scores + inputs.position_bias.to(dtype)
    mask = inputs.mask
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        lowest = torch.finfo(mask.dtype).min / 2  # additive masks hide a key with it, or nearly
        scores = (scores + mask.to(dtype)).masked_fill(mask <= lowest, -torch.inf)
    row = torch.zeros(len(scores), 1, dtype=torch.long, device=scores.device)
    if request.edit_scores is not None:
        scores = request.edit_scores(scores, row)
    pattern = softmax(scores, inputs.sinks)
    if request.edit_pattern is not None:
        pattern = request.edit_pattern(pattern, row)
    mixed = pattern.squeeze(2).unflatten(1, (-1, group)) @ v
    return mixed.flatten(1, 2)[:, :, None]
