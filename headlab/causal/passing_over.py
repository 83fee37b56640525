"""Passing over blocks: running a model from the middle of its residual stream on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from headlab.models.blocks import stream_of

if TYPE_CHECKING:
    from headlab.model import Model


@contextmanager
def outputs_of_blocks(model: Model) -> Iterator[dict[int, Any]]:
    """What each block gives while it lasts, by its number, filled as the model runs."""
    outputs: dict[int, Any] = {}
    hooks = [
        block.register_forward_hook(partial(_kept, outputs, at))
        for at, block in enumerate(model.blocks.modules)
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _kept(outputs: dict[int, Any], at: int, module: Any, args: Any, output: Any) -> None:
    outputs[at] = output


@contextmanager
def passed_over(
    model: Model, first: int, outputs: Sequence[Any], times: int, position: int
) -> Iterator[None]:
    """While it lasts, blocks before ``first`` are not run: the last of them gives what it gave in the clean run,
    ``times`` times side by side and from ``position`` on."""
    blocks = model.blocks.modules[:first]
    before = [block.__dict__.get("forward") for block in blocks]

    def forward(at: int, *args: Any, **kwargs: Any) -> Any:
        output = outputs[at]
        if at < first - 1:  # nobody looks at it
            stream = args[0] if args else kwargs["hidden_states"]
        else:
            stream = stream_of(output)[:, position:]
            stream = stream.repeat(times, *[1] * (stream.dim() - 1))
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    try:
        for at, block in enumerate(blocks):
            block.forward = partial(forward, at)
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            del block.forward
            if own is not None:  # as accelerate leaves one there
                block.forward = own
