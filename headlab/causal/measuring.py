"""A metric and how it is bound to a model and prompts: what every causal experiment measures with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.errors import PlanError

if TYPE_CHECKING:
    from headlab.model import Model

Needs: TypeAlias = Literal["last", "all"]
#: ``compute(logits [row, position, vocab], rows [row], reference) -> [row]``.
Compute: TypeAlias = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


@dataclass(frozen=True)
class Metric:
    """What to measure; made by ``hl.metrics.logit_difference(…)`` and the like.

    Attributes:
        name: Its name in tables and on axes.
        needs: ``"last"`` where the logits of each prompt's last position suffice, ``"all"`` where not.
        binder: Makes the computation for one model and its prompts.
        higher_is_better: False for loss and KL divergence.
        differentiable: False for recall.
        needs_reference: Whether it compares with the logits of a clean run.
    """

    name: str
    needs: Needs
    binder: Callable[[Model, Tensor], tuple[Compute, dict[str, Any]]] = field(repr=False)
    higher_is_better: bool = True
    differentiable: bool = True
    needs_reference: bool = False

    def bind(self, model: Model, prompts: Int[Tensor, "prompt position"]) -> BoundMetric:
        """Make the metric ready for these prompts, padded with −1 on the right.

        Raises:
            PlanError: A token it names is not one token of this model, or there is not one entry per prompt.
            PromptError: A prompt is too short for it.
        """
        compute, about = self.binder(model, prompts)
        return BoundMetric(
            self.name,
            self.needs,
            prompts,
            compute,
            {"metric": self.name, **about},
            self.higher_is_better,
            self.differentiable,
            self.needs_reference,
        )


@dataclass(frozen=True)
class BoundMetric:
    """A metric made ready for one model and its prompts.

    Attributes:
        name: Its name in tables and on axes.
        needs: ``"last"``: it takes logits [row, 1, vocab] of the last position of each prompt; ``"all"``: it takes
            logits [row, position, vocab] of every position of the prompts that run, anything beyond a prompt's end.
        prompts: Token ids, [prompt, position], −1 beyond the end.
        compute: The computation.
        about: What its numbers depend on besides the prompts, fit for JSON.
        higher_is_better: False for loss and KL divergence.
        differentiable: Whether gradients pass through it.
        needs_reference: Whether :meth:`with_reference` must be called first.
        reference: Log-probabilities of the clean run, [prompt, position, vocab], for KL divergence.
    """

    name: str
    needs: Needs
    prompts: Int[Tensor, "prompt position"] = field(repr=False)
    compute: Compute = field(repr=False)
    about: dict[str, Any] = field(repr=False)
    higher_is_better: bool = True
    differentiable: bool = True
    needs_reference: bool = False
    reference: Float[Tensor, "prompt position vocab"] | None = field(default=None, repr=False)

    def __call__(
        self, logits: Float[Tensor, "row position vocab"], rows: Int[Tensor, " row"]
    ) -> Float[Tensor, " row"]:
        """The metric of each row, float32 or the logits' own higher precision.

        Raises:
            PlanError: Logits and rows do not fit each other or the prompts, or a reference is missing.
        """
        wanted = self._width
        fits = logits.dim() == 3 and (
            logits.shape[1] == wanted if self.needs == "last" else logits.shape[1] <= wanted
        )
        if not fits or rows.shape != logits.shape[:1]:
            raise PlanError(
                f"metric {self.name} takes logits [row, {wanted}, vocab] and rows [row], not "
                f"{list(logits.shape)} and {list(rows.shape)}"
            )
        if logits.shape[1] < wanted:  # none of the longest prompts is among the rows
            logits = torch.nn.functional.pad(logits, (0, 0, 0, wanted - logits.shape[1]))
        if self.needs_reference and self.reference is None:
            raise PlanError(
                f"metric {self.name} compares with a clean run; call with_reference(its logits) first"
            )
        return self.compute(logits, rows.to(logits.device), self.reference)

    def checked(
        self, logits: Float[Tensor, "row position vocab"], rows: Int[Tensor, " row"]
    ) -> Float[Tensor, " row"]:
        """The metric of each row.

        Raises:
            PlanError: One is not finite.
        """
        rows = rows.to(logits.device)
        return checked(self(logits, rows), rows, self)

    def measure(
        self, logits: Float[Tensor, "row position vocab"], rows: Int[Tensor, " row"]
    ) -> Float[np.ndarray, " row"]:
        """The metric of each row as plain numbers.

        Raises:
            PlanError: One is not finite.
        """
        with torch.no_grad():
            values = self.checked(logits, rows)
        found: np.ndarray = values.double().cpu().numpy()
        return found

    @property
    def _width(self) -> int:
        return 1 if self.needs == "last" else self.prompts.shape[1]

    def gathered(
        self, runs: Iterable[tuple[Tensor, Tensor]]
    ) -> Float[Tensor, "prompt position vocab"]:
        """Logits of all prompts, 0 beyond their ends, from runs of some: (which prompts, their logits)."""
        whole: Tensor | None = None
        for rows, logits in runs:
            if whole is None:
                whole = logits.new_zeros(len(self.prompts), self._width, logits.shape[-1])
            whole[rows.to(whole.device), : logits.shape[1]] = logits
        assert whole is not None
        return whole

    def with_reference(self, logits: Float[Tensor, "prompt position vocab"]) -> BoundMetric:
        """The metric against the clean run that gave these logits; itself where it needs no reference.

        Raises:
            PlanError: The logits are not [prompt, position, vocab] of the positions that the metric needs.
        """
        if not self.needs_reference:
            return self
        wanted = (len(self.prompts), self._width)
        if logits.dim() != 3 or tuple(logits.shape[:2]) != wanted:
            raise PlanError(
                f"the reference of metric {self.name} must be logits {[*wanted, 'vocab']}, not "
                f"of shape {list(logits.shape)}"
            )
        return replace(self, reference=wide(logits.detach()).log_softmax(-1))


def checked(
    values: Float[Tensor, " row"], rows: Int[Tensor, " row"], metric: Metric | BoundMetric
) -> Float[Tensor, " row"]:
    """The values themselves, unless one is NaN or infinite.

    Raises:
        PlanError: Naming the first prompt whose value is.
    """
    wrong = ~values.detach().isfinite()
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0, 0])
        raise PlanError(
            f"metric {metric.name} is {float(values[at])} for prompt {int(rows[at])}; leave that prompt out, or "
            "use a metric that is finite there"
        )
    return values


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
