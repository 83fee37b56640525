"""Attention calls whose keys begin where a square of ``block_map`` does, whatever a sliding cache has dropped."""

from __future__ import annotations

from dataclasses import replace

import torch

from headlab.attention.seam import Call
from headlab.kernels import AttentionInputs, Request, RowEdit


def whole_blocks(
    call: Call, inputs: AttentionInputs, base: Request, block: int
) -> tuple[Call, AttentionInputs, Request]:
    """The same call with keys from the start of a block on, where a sliding cache has dropped some of the block."""
    dropped = inputs.key_start % block
    if not dropped:
        return call, inputs, base
    edits = (base.edit_scores, base.edit_pattern)
    scores, pattern = (edit and _behind(edit, dropped) for edit in edits)
    return (
        replace(call, inputs=_with_hidden_keys(call.inputs, dropped)),
        _with_hidden_keys(inputs, dropped),
        replace(base, edit_scores=scores, edit_pattern=pattern),
    )


def _behind(edit: RowEdit, n: int) -> RowEdit:
    """The edit of rows without their first n keys."""
    return lambda rows, index: torch.cat([rows[..., :n], edit(rows[..., n:], index)], -1)


def _with_hidden_keys(inputs: AttentionInputs, n: int) -> AttentionInputs:
    """The same call with n more key columns before the first, which no query sees."""
    pad = torch.nn.functional.pad
    batch, queries, keys = inputs.q.shape[0], inputs.n_queries, inputs.n_keys
    mask = inputs.mask
    if mask is None:
        mask = torch.ones(batch, 1, queries, keys, dtype=torch.bool, device=inputs.q.device)
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    bias = inputs.position_bias
    return replace(
        inputs,
        k=pad(inputs.k, (0, 0, n, 0)),
        v=pad(inputs.v, (0, 0, n, 0)),
        mask=pad(mask, (n, 0), value=hidden),
        position_bias=None if bias is None else pad(bias, (n, 0)),
        key_start=inputs.key_start - n,
    )
