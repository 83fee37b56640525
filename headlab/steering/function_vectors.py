"""Function vectors (Todd et al. 2024): the sum of a few heads' mean outputs carries a task to prompts without examples.

ā_h is head h's mean z at the last token of n-shot prompts of a task. A head's causal indirect effect is the rise in the
probability of the right answer when its z at the last token of a prompt with shuffled labels becomes ā_h; its average
over prompts (and tasks) is its AIE. The function vector is v = Σ_h W_O^h ā_h over the heads of largest AIE, added to
the residual stream after a layer, at the prompt's last token.

Read in the authors' code; three of its faults are not repeated: the output projection's bias is not part of a head, the
width of a head is the model's own, and answers are what stands after the prompt, a leading space included. As there,
an answer counts by its first token.

A learned weighting (Saglam et al. 2025, "Learning Task Representations from In-Context Learning", whose code was read)
is :class:`~headlab.steering.task_vectors.TaskVectors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headlab.arguments import count, seed_number
from headlab.attention import Edit, Head, HeadsLike, Where, apply, parse_heads, replace
from headlab.causal import Effects, Sweep, metrics
from headlab.causal.effects import effects_of
from headlab.errors import PlanError
from headlab.steering.head_vectors import mean_z, random_like
from headlab.steering.learned import Learned, head_names, shape_of
from headlab.steering.rows import Rows, acts, checked_rows

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.tasks import ICLPrompt

#: Heads that a function vector sums by default (the paper's for GPT-J).
N_HEADS = 10


@dataclass(frozen=True, eq=False)
class FunctionVector(Learned):
    """A vector added to the residual stream after a layer.

    Attributes:
        vector: The vector [d_model].
        layer: Layer after whose block it is added.
        factor: What it is multiplied by.
        rows: Where it is added; ``"prompt_end"`` as in the paper.
    """

    vector: Float[Tensor, " d_model"]
    layer: int
    factor: float = 1.0
    rows: Rows = "prompt_end"

    name: ClassVar[str] = "function_vector"
    sizes: ClassVar[dict[str, tuple[str, ...]]] = {"vector": ("d_model",)}
    strength_field: ClassVar[str] = "factor"
    strengths: ClassVar[tuple[float, ...]] = (1.0, 2.0, 4.0)

    def __post_init__(self) -> None:
        checked_rows(self.rows)
        if not bool(torch.isfinite(self.vector).all()):
            raise PlanError("the function vector holds NaN or infinity")

    @classmethod
    def fit(
        cls,
        model: Model,
        prompts: Sequence[ICLPrompt],
        heads: HeadsLike | None = None,
        *,
        shuffled: Sequence[ICLPrompt] = (),
        n_heads: int = N_HEADS,
        layer: int | None = None,
        factor: float = 1.0,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Self:
        """Learn a task's function vector.

        Args:
            model: The model.
            prompts: n-shot prompts of the task, from :func:`headlab.tasks.icl_prompts`.
            heads: Heads to sum; by default those of largest AIE on ``shuffled``.
            shuffled: Prompts with shuffled labels, where heads are to be chosen.
            n_heads: How many to choose.
            layer: Layer after which it is added; by default a third of the way up, as in the paper.
            factor: Strength.
            tell: Told, in a few words, what is being done.

        Raises:
            HeadError: A head does not exist.
            PlanError: Neither heads nor shuffled prompts are given, or there is no such layer.
        """
        if heads is None:
            if not shuffled:
                raise PlanError("name heads=, or give shuffled= prompts to choose them by")
            effects = indirect_effects(model, prompts, shuffled, tell=tell)
            heads = top_heads([effects], n_heads)
        chosen = parse_heads(heads, model.spec)
        at = model.spec.n_layers // 3 if layer is None else count(layer, "layer", least=0)
        if at >= model.spec.n_layers:
            raise PlanError(
                f"layer={layer} does not exist: {model.name} has layers 0–{model.spec.n_layers - 1}"
            )
        means = mean_z(model, [prompt.text for prompt in prompts], chosen)
        vector = torch.stack(list(outputs(model, chosen, means))).sum(0)
        return cls(head_names(chosen), shape_of(model), vector, at, factor)

    def edits(self, model: Model) -> Sequence[Edit]:
        """One addition to the residual stream."""
        self.check_model(model)

        def push(stream: Tensor, where: Where) -> Tensor:
            moved = stream + (self.factor * self.vector).to(stream)
            at = acts(self.rows, where)
            return moved if at is None else torch.where(at[:, :, None, None], moved, stream)

        return (apply(f"{self.layer}.*", push, "resid_post"),)

    def randomised(self, seed: int) -> Self:
        """A random direction of the same norm."""
        return self._with(vector=random_like(self.vector, seed))


def outputs(
    model: Model, heads: Sequence[Head], z: Float[Tensor, "head d_value"]
) -> list[Float[Tensor, " d_model"]]:
    """What each head writes into the residual stream for its z, W_O^h z_h, without the projection's bias."""
    return [
        z[at].double() @ model.weights.W_O(head.layer)[head.head].detach().double().cpu()
        for at, head in enumerate(heads)
    ]


def indirect_effects(
    model: Model,
    prompts: Sequence[ICLPrompt],
    shuffled: Sequence[ICLPrompt],
    heads: HeadsLike = "*.*",
    *,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Effects:
    """The causal indirect effect of every head (Todd et al. 2024).

    That is the probability of the right answer's first token when z at the last token of a shuffled prompt becomes the
    head's mean over ``prompts``, less what it was.

    Args:
        model: The model.
        prompts: n-shot prompts to take means over.
        shuffled: Prompts with shuffled labels to put the means into.
        heads: Heads to try.
        seed: Seed of the intervals.
        tell: Told, in a few words, what is being done.

    Raises:
        HeadError: A head does not exist.
        PlanError: There are no prompts.
    """
    seed_number(seed)
    if not prompts or not shuffled:
        raise PlanError(
            "indirect effects need prompts to take means over and shuffled ones to put them into"
        )
    chosen = parse_heads(heads, model.spec)
    means = mean_z(model, [prompt.text for prompt in prompts], chosen)
    answers = [first_token(model, prompt.answer) for prompt in shuffled]
    sweep = Sweep(
        model, [prompt.text for prompt in shuffled], metrics.probability(answers), tell=tell
    )
    variants = [
        [replace((head,), means[at], "z", positions=[-1])] for at, head in enumerate(chosen)
    ]
    values = np.asarray(sweep.run(variants))
    keys = [{"layer": head.layer, "head": head.head, "site": "z"} for head in chosen]
    about = {
        "measure": "causal indirect effect (Todd et al. 2024)",
        "metric": "probability",
        "n_means": len(prompts),
        "seed": seed,
    }
    return effects_of(keys, values, sweep.clean, sweep.clean, None, about, seed)


def top_heads(effects: Sequence[Effects], n: int = N_HEADS) -> tuple[Head, ...]:
    """The heads of largest average indirect effect over tasks.

    Raises:
        PlanError: The tables are of different heads, or there are fewer than ``n``.
    """
    count(n, "n_heads")
    places = [
        list(zip(table.frame["layer"], table.frame["head"], strict=True)) for table in effects
    ]
    if not places or any(place != places[0] for place in places):
        raise PlanError("average effects need one or more tables of the same heads")
    if n > len(places[0]):
        raise PlanError(f"n_heads={n} is more than the {len(places[0])} heads there are effects of")
    mean = np.mean([table.frame["effect"].to_numpy() for table in effects], 0)
    return tuple(
        Head(int(places[0][at][0]), int(places[0][at][1]))
        for at in np.argsort(-mean, kind="stable")[:n]
    )


def first_token(model: Model, answer: str) -> int:
    """The first token of an answer as it stands after a prompt."""
    return int(model.tokenizer(answer, add_special_tokens=False)["input_ids"][0])
