"""Learned weighted sums of head outputs (after "Learning Task Representations from In-Context Learning", 2025).

v_l = Σ_h Φ[l, h] r_h, with r_h = W_O^h ā_h the head's mean output at the last token of n-shot prompts, is added to the
output of every layer l at the prompt's last token; Φ [layer, head] is all that is learned, on the loss of the answers
to prompts without examples, the model frozen. Read in the authors' code, which takes r_h with the output projection's
bias (not part of a head, and left out here) and starts from random Φ; ours starts from 0, where nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from headlab.arguments import count, finite_number, seed_number
from headlab.attention import Edit, Head, Where, apply, parse_heads
from headlab.errors import PlanError
from headlab.steering.function_vectors import first_token, outputs
from headlab.steering.head_vectors import mean_z, random_like
from headlab.steering.learned import Learned, shape_of
from headlab.steering.rows import Rows, acts, checked_rows

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.tasks import ICLPrompt

_BATCH = 16


@dataclass(frozen=True, eq=False)
class TaskVectors(Learned):
    """A learned weighting of mean head outputs, added after every layer.

    Attributes:
        weights: Φ [layer, head].
        outputs: Mean head outputs r, [layer, head, d_model].
        losses: Mean training loss of each step, nats.
        factor: What the sums are multiplied by.
        rows: Where they are added; ``"prompt_end"`` as in the paper.
    """

    weights: Float[Tensor, "layer head"]
    outputs: Float[Tensor, "layer head d_model"]
    losses: tuple[float, ...] = ()
    factor: float = 1.0
    rows: Rows = "prompt_end"

    name: ClassVar[str] = "task_vectors"
    sizes: ClassVar[dict[str, tuple[str, ...]]] = {
        "weights": ("layers", "n_heads"),
        "outputs": ("layers", "n_heads", "d_model"),
    }
    strength_field: ClassVar[str] = "factor"
    strengths: ClassVar[tuple[float, ...]] = (0.5, 1.0)

    def __post_init__(self) -> None:
        checked_rows(self.rows)
        if not all(bool(torch.isfinite(x).all()) for x in (self.weights, self.outputs)):
            raise PlanError("the task vectors hold NaN or infinity")

    @classmethod
    def fit(
        cls,
        model: Model,
        prompts: Sequence[ICLPrompt],
        train: Sequence[ICLPrompt],
        *,
        steps: int = 40,
        lr: float = 0.02,
        seed: int = 0,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Self:
        """Learn Φ by Adam.

        Args:
            model: The model, which stays as it is.
            prompts: n-shot prompts to take the heads' mean outputs from.
            train: Prompts without examples, whose answers the loss is of (their first tokens).
            steps: Steps, each on up to 16 prompts drawn anew.
            lr: Learning rate. The authors' is 5e-5, with many more steps.
            seed: Seed of the draws.
            tell: Told the loss as it falls.

        Raises:
            PlanError: There are no prompts, or the layers have different numbers of heads.
        """
        if not prompts or not train:
            raise PlanError(
                "task vectors need prompts to take outputs from and prompts to train on"
            )
        if len({layer.n_heads for layer in model.spec.layers}) > 1:
            raise PlanError(f"the layers of {model.name} have different numbers of heads")
        steps, lr = count(steps, "steps"), finite_number(lr, "lr")
        heads = parse_heads("*.*", model.spec)
        means = mean_z(model, [prompt.text for prompt in prompts], heads)
        kept = torch.stack(outputs(model, heads, means)).float()
        kept = kept.unflatten(0, (model.spec.n_layers, -1))
        weights = torch.zeros(kept.shape[:2], requires_grad=True)
        adam = torch.optim.Adam([weights], lr=lr)
        draw = torch.Generator().manual_seed(seed_number(seed))
        answers = [first_token(model, prompt.answer) for prompt in train]
        losses: list[float] = []
        for step in range(steps):
            at = torch.randperm(len(train), generator=draw)[:_BATCH].tolist()
            sums = torch.einsum("lh,lhd->ld", weights, kept)
            with model.edit(_addition(sums, "prompt_end")):
                logits = model.trace([train[i].text for i in at], logits="last", grad=True).logits
            assert logits is not None
            right = torch.tensor([answers[i] for i in at], device=logits.device)
            loss = cross_entropy(logits[:, 0].float(), right)
            (weights.grad,) = torch.autograd.grad(loss, weights)
            adam.step()
            losses.append(float(loss.detach()))
            tell(f"step {step + 1} of {steps}: loss {losses[-1]:.3f}")
        return cls("*.*", shape_of(model), weights.detach(), kept, tuple(losses))

    def edits(self, model: Model) -> Sequence[Edit]:
        """One addition to the residual stream after every layer."""
        self.check_model(model)
        sums = torch.einsum("lh,lhd->ld", self.weights, self.outputs)
        return (_addition(self.factor * sums, self.rows),)

    def randomised(self, seed: int) -> Self:
        """Random weights of the same norm."""
        drawn = random_like(self.weights.flatten(), seed).view_as(self.weights)
        return self._with(weights=drawn)

    def top(self, n: int = 10) -> list[tuple[Head, float]]:
        """The heads of largest weight, whichever sign."""
        flat = self.weights.flatten()
        order = flat.abs().argsort(descending=True, stable=True)[: count(n, "n", least=0)]
        width = self.weights.shape[1]
        return [(Head(int(at) // width, int(at) % width), float(flat[at])) for at in order]


def _addition(sums: Float[Tensor, "layer d_model"], rows: Rows) -> Edit:
    def push(stream: Tensor, where: Where) -> Tensor:
        moved = stream + sums[where.layer].to(stream)
        at = acts(rows, where)
        return moved if at is None else torch.where(at[:, :, None, None], moved, stream)

    return apply("*.*", push, "resid_post")
