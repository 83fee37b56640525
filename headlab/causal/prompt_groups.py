"""Pairs of prompts sorted into groups of one length, and the metric measured group by group.

Prompts of one length need no padding, so parts of a model can be run on them without masks of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.causal.metrics import BoundMetric, Metric, as_metric, checked
from headlab.errors import PromptError
from headlab.prompts import lengths_of

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.prompts import Prompt


@dataclass(frozen=True)
class Group:
    """Some pairs of one length.

    Attributes:
        rows: Which of the prompts, [prompt].
        clean: Their token ids, [prompt, position].
        corrupted: Those of their partners.
        start: First position at which any pair differs; the last one where none does. Before it, a clean and a
            corrupted run of a causal model are the same.
    """

    rows: Int[Tensor, " prompt"]
    clean: Int[Tensor, "prompt position"]
    corrupted: Int[Tensor, "prompt position"]
    start: int

    @property
    def tokens(self) -> int:
        """Tokens from ``start`` on, of all prompts."""
        return len(self.rows) * (self.clean.shape[1] - self.start)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows.tolist())


def groups(clean: Tensor, corrupted: Tensor, tokens_at_once: int) -> list[Group]:
    """Pairs by length, no group with more tokens than this unless one pair has.

    Args:
        clean: Token ids, [prompt, position], −1 beyond a prompt's end.
        corrupted: Those of the partners, of the same lengths.
        tokens_at_once: Tokens of a group at most.
    """
    lengths, found = lengths_of(clean), []
    for length in sorted(set(lengths.tolist())):
        members = (lengths == length).nonzero()[:, 0]
        for rows in members.split(max(1, tokens_at_once // length)):
            ours, theirs = clean[rows, :length], corrupted[rows, :length]
            differs = (ours != theirs).any(0).nonzero()[:, 0]
            start = int(differs[0]) if len(differs) else length - 1
            found.append(Group(rows.cpu(), ours, theirs, start))
    return found


def equal_lengths(model: Model, clean: Prompt, corrupted: Prompt) -> tuple[Tensor, Tensor]:
    """Token ids of both sides.

    Raises:
        PromptError: They differ in number, or a pair in length.
    """
    ours, theirs = model.tokens(clean), model.tokens(corrupted)
    if len(ours) != len(theirs):
        raise PromptError(
            f"there are {len(ours)} clean and {len(theirs)} corrupted prompts; give each clean prompt one partner"
        )
    n, m = lengths_of(ours), lengths_of(theirs)
    if bool((n != m).any()):
        at = int((n != m).nonzero()[0, 0])
        raise PromptError(
            f"clean prompt {at} has {int(n[at])} tokens and its corrupted partner {int(m[at])}; paths need pairs "
            "that match token by token, so reword one of the two"
        )
    return ours, theirs


class Measure:
    """A metric, measured on rows that belong to prompts of one group at a time.

    Args:
        metric: What to measure.
        model: The model.
        clean: Token ids of the prompts, [prompt, position], −1 beyond a prompt's end.
    """

    def __init__(
        self, metric: Metric | Callable[[Tensor, Tensor], Tensor], model: Model, clean: Tensor
    ) -> None:
        self.metric: BoundMetric = as_metric(metric).bind(model, clean)
        self.n_prompts, self._width = clean.shape

    @property
    def every_position(self) -> bool:
        """Whether the metric takes logits of every position, not only of the last."""
        return self.metric.needs == "all"

    def refer_to(
        self, runs: Sequence[tuple[Group, Float[Tensor, "prompt position vocab"]]]
    ) -> None:
        """Give a metric that compares with the clean run the logits of that run, group by group."""
        if not self.metric.needs_reference:
            return
        logits = runs[0][1]
        width = self._width if self.every_position else 1
        whole = logits.new_zeros(self.n_prompts, width, logits.shape[-1])
        for group, values in runs:
            whole[group.rows.to(whole.device), : values.shape[1]] = values
        self.metric = self.metric.with_reference(whole)

    def __call__(
        self, logits: Float[Tensor, "row position vocab"], rows: Int[Tensor, " row"]
    ) -> Float[np.ndarray, " row"]:
        """The metric of each row; ``rows`` names its prompt among all prompts.

        Raises:
            PlanError: It is not finite for a prompt.
        """
        missing = self._width - logits.shape[1] if self.every_position else 0
        if missing:
            logits = torch.nn.functional.pad(logits, (0, 0, 0, missing))
        rows = rows.to(logits.device)
        found: np.ndarray = (
            checked(self.metric(logits, rows), rows, self.metric).double().cpu().numpy()
        )
        return found
