"""What a method must know of a prompt before the prompt is run: it is looked up in the unsteered model, once.

Sinks of a prompt, or how much its documents are attended to, are read from whole rows, while edits see a block of rows
or, in generation, one. So before a forward pass of new prompts the model is run on them as it is, every method lifted,
and what was found holds for the prompt and for all that is generated after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from headlab.attention import Where
from headlab.errors import PlanError, UnsupportedError

if TYPE_CHECKING:
    from headlab.model import Model

T = TypeVar("T")


class Beforehand(Generic[T]):
    """Looks something up before each new batch of prompts.

    Args:
        model: The model.
        name: The method, for messages.
        look: Finds it, given token ids [batch, position], −1 beyond the prompts' ends; no method is in force.

    Raises:
        UnsupportedError: The model is no decoder.
    """

    def __init__(
        self, model: Model, name: str, look: Callable[[Int[Tensor, "batch position"]], T]
    ) -> None:
        if not all(layer.stack == "decoder" and layer.causal for layer in model.spec.layers):
            raise UnsupportedError(
                f"{name} looks at a prompt before it is run, which is for decoder-only models; {model.name} is none"
            )
        self._model, self._name, self._look = model, name, look
        self._known: tuple[Tensor, T] | None = None
        self._looking = False

    def of(self, where: Where) -> T:
        """What was found of the prompts being run.

        Raises:
            PlanError: They were not run whole, so nothing was looked up.
        """
        if self._known is None or not _same(self._known[0], where.prompt):
            raise PlanError(
                f"{self._name} holds only where whole prompts are run under hl.steer: use the model's trace, logits, "
                "generate or stream"
            )
        return self._known[1]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look before each forward pass of new prompts, until the block ends."""
        # Before the seam's own hook, which notes what pass it is in.
        handle = self._model.module.register_forward_pre_hook(self._before, prepend=True)
        try:
            yield
        finally:
            handle.remove()
            self._known = None

    def _before(self, module: Any, args: Any) -> None:
        ids = self._model.running
        if self._looking or ids is None:
            return
        if self._known is not None and _same(self._known[0], ids):
            return
        self._looking = True
        try:
            with self._model.plain(), torch.no_grad():
                self._known = (ids, self._look(ids))
        finally:
            self._looking = False


def _same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and (a is b or (a.shape == b.shape and torch.equal(a, b)))
