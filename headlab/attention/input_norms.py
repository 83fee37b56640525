"""The norm each attention module reads the residual stream through, found by looking rather than by name.

A block's norm is the part of it whose output is the very tensor that enters attention. Where no part gave it, attention
reads the stream as it is: OLMo 2, and models that norm after adding (BERT, BART).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from headlab.model import Model

_TOKENS = 3


def input_norms(model: Model) -> tuple[nn.Module | None, ...]:
    """The norm before each layer's attention, or None; by one forward pass of three tokens."""
    layer_of = {module: at for at, module in enumerate(model.weights.attention_modules)}
    found: list[nn.Module | None] = [None] * len(layer_of)
    given: dict[
        int, tuple[nn.Module, Tensor]
    ] = {}  # by identity; the tensor is held so that no other takes its place

    def gave(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            given[id(output)] = module, output

    def enters(module: nn.Module, args: Any, kwargs: Any) -> None:
        stream = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        norm, _ = given.get(id(stream), (None, None))
        found[layer_of[module]] = norm
        given.clear()

    def begins(module: nn.Module, args: Any) -> None:
        given.clear()  # what an earlier block gave is the stream

    with ExitStack() as stack:
        for block in model.blocks.modules:
            stack.callback(block.register_forward_pre_hook(begins).remove)
            for part in block.modules():
                if part in layer_of:
                    hook = part.register_forward_pre_hook(enters, with_kwargs=True)
                    stack.callback(hook.remove)
                elif next(part.children(), None) is None:
                    stack.callback(part.register_forward_hook(gave).remove)
        ids = torch.arange(1, _TOKENS + 1)[None] % model.spec.n_vocab
        model.trace(ids, logits="none")
    return tuple(found)


__all__ = ["input_norms"]
