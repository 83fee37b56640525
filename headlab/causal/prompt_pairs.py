"""Pairs of clean and corrupted prompts, checked, and aligned where they differ in length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from headlab.attention import Trace
from headlab.errors import PlanError, PromptError
from headlab.prompts import Prompt, lengths_of

if TYPE_CHECKING:
    from headlab.model import Model

Align: TypeAlias = Literal["start", "end"]


@dataclass(frozen=True)
class Pairs:
    """Prompts of two runs, position for position.

    Attributes:
        clean: Token ids, [prompt, position]; −1 beyond a prompt's end.
        corrupted: Token ids, [prompt, position].
        shift: How many positions later than in the clean prompt the same place lies in the corrupted one, [prompt]; 0
            unless they differ in length and are aligned at their ends.
    """

    clean: Int[Tensor, "prompt position"]
    corrupted: Int[Tensor, "prompt position"]
    shift: Int[Tensor, " prompt"]

    def __len__(self) -> int:
        return len(self.clean)

    @property
    def reversed(self) -> Pairs:
        """The same pairs with the two runs exchanged."""
        return Pairs(self.corrupted, self.clean, -self.shift)

    @property
    def first_difference(self) -> int:
        """The first position at which a pair differs: what a causal model computes before it is the same in both."""
        if bool((self.shift != 0).any()):
            return 0
        width = min(self.clean.shape[1], self.corrupted.shape[1])
        differ = (self.clean[:, :width] != self.corrupted[:, :width]).any(0)
        return int(differ.float().argmax()) if bool(differ.any()) else width - 1

    def in_clean(self, source: Trace) -> Trace:
        """A trace of the corrupted prompts with every position where it lies in the clean ones.

        Positions that the corrupted prompts do not have hold NaN, and a patch leaves them as they are.
        """
        if bool((self.shift == 0).all()):
            return source
        width = self.clean.shape[1]
        index = torch.arange(width, device=self.shift.device) + self.shift[:, None]

        def moved(value: Tensor) -> Tensor:
            at = index.to(value.device)
            known = (at >= 0) & (at < value.shape[1])
            shape = (*at.shape, *[1] * (value.dim() - 2))
            picked = value.gather(
                1, at.clamp(0, value.shape[1] - 1).view(shape).expand(*at.shape, *value.shape[2:])
            )
            return picked.masked_fill(~known.view(shape), torch.nan)

        if "pattern" in source.tensors:
            raise PlanError(
                "patterns of prompts of different lengths have no common shape; patch another site"
            )
        tensors = {
            name: {layer: moved(value) for layer, value in layers.items()}
            for name, layers in source._tensors.items()
        }
        return replace(source, _tensors=tensors)


def pairs(model: Model, clean: Prompt, corrupted: Prompt, align: Align | None = None) -> Pairs:
    """Check that two sets of prompts can be patched into each other.

    Args:
        model: The model.
        clean: Prompts that show the behaviour.
        corrupted: As many that do not, one for each.
        align: ``"start"`` or ``"end"``: from which end positions count where the two of a pair differ in length. At the
            end lie the last tokens, from which the answer is read.

    Raises:
        PromptError: They differ in number, or in length and ``align`` is not given; or nothing differs.
    """
    if align not in (None, "start", "end"):
        raise PromptError(f"align={align!r} must be 'start' or 'end'")
    ours, theirs = model.tokens(clean), model.tokens(corrupted)
    if len(ours) != len(theirs):
        raise PromptError(
            f"there are {len(ours)} clean prompts and {len(theirs)} corrupted ones; give one corrupted prompt for each"
        )
    lengths, others = lengths_of(ours), lengths_of(theirs)
    unequal = (lengths != others).nonzero()[:, 0].tolist()
    if unequal and align is None:
        at = unequal[0]
        raise PromptError(
            f"clean prompt {at} has {int(lengths[at])} tokens and its corrupted one {int(others[at])}"
            f"{f' ({len(unequal) - 1} more pairs differ too)' if len(unequal) > 1 else ''}; values of one run go to "
            "the same positions of the other, so make them equally long, or, in patch_each, pass align='end' to count "
            "positions from the last token (or align='start')"
        )
    if not unequal and torch.equal(ours, theirs):
        raise PromptError("clean and corrupted prompts are the same, so patching changes nothing")
    shift = others - lengths if align == "end" else torch.zeros_like(lengths)
    return Pairs(ours, theirs, shift)
