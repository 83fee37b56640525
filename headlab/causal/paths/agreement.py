"""Whether a model taken apart still adds up to itself, to what its number type rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headlab.errors import UnsupportedError

if TYPE_CHECKING:
    from headlab.model import Model


def check_decoder(model: Model) -> None:
    """Raise UnsupportedError unless the model is a decoder-only language model."""
    if any(layer.stack != "decoder" for layer in model.spec.layers):
        raise UnsupportedError(
            f"{model.name} ({model.spec.family}) is no decoder-only model: paths and edges need a residual "
            "stream to which causal attention and MLPs add, as in the llama, gpt2 and gpt_neox families"
        )
    if model.module.get_output_embeddings() is None:
        raise UnsupportedError(f"{model.name} has no language-model head, so it gives no logits")


def close(ours: Tensor, theirs: Tensor, name: str, what: str) -> None:
    """Raise UnsupportedError unless two tensors agree to what their type rounds."""
    if not agree(ours, theirs):
        worst = float((ours.double() - theirs.double()).abs().max())
        raise UnsupportedError(
            f"{what} of {name}, run by themselves, differ from the model's own by up to {worst:.2g}, so its "
            "edges and paths cannot be run exactly"
        )


def agree(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors agree to what their type rounds over a whole forward pass."""
    scale = theirs.abs().max().clamp(min=1e-30)
    return bool((ours - theirs).abs().max() <= tolerance(theirs.dtype) * scale)


def tolerance(dtype: torch.dtype) -> float:
    """How far two ways of computing the same may differ, as a share of the largest value.

    Several families' norms round to float32 whatever the model's type, hence the room in float64.
    """
    return {torch.float64: 1e-5, torch.float32: 1e-3}.get(dtype, 8e-2)
