"""ACT, attention calibration (Yu et al. 2024): take weight off attention sinks in the midst of a text.

For each head, the sinks of a prompt of T tokens are the keys whose attention from the rows that see them is, on
average, above a threshold (0.1 in the code):

    C = {j > 0 : Σ_q A[q, j] / (number of rows that see j) > threshold}.

In every row, A[:, C] is multiplied by β (0.4), and what that frees goes to the row's other keys in proportion to
their weights. The first token is a sink that the model needs: it is left alone, and gets its part of what is freed.

Read in the authors' code (GATECH-EIC/ACT), which drops the first sink *found*, so another token where the first is
none or lies behind padding; works on square patterns only, so not on generation with a cache; and lacks the step
that chooses heads. Here the first token is each prompt's own, and the sinks are found in the prompt before it is run,
in a pass without steering, and kept for what is generated after it (generated keys are never sinks). There, layers 2 to
30 of 32 are calibrated; here, without ``heads``, all but the first two and the last. :meth:`ACT.fit` keeps the heads
whose calibration alone improves a behaviour, as the paper says it does.

The freed weight differs from row to row, so that no bias can do it: it is an edit of the pattern, row by row in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headlab.arguments import is_finite
from headlab.attention import Edit, Head, HeadsLike, Where, apply, keep, parse_heads
from headlab.errors import PlanError
from headlab.prompts import lengths_of
from headlab.steering.base import Method
from headlab.steering.beforehand import Beforehand
from headlab.steering.rewriting import move
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.steering.evaluation import Behaviour
    from headlab.steering.profiling import Profile


@dataclass(frozen=True)
class ACT(Method):
    """Take weight off the attention sinks of a prompt, but for its first token.

    Attributes:
        heads: The heads to calibrate; None for those of all layers but the first two and the last, where there are more
            than three.
        beta: What a sink's weight is multiplied by, from 0 to 1; 1 changes nothing.
        threshold: Mean attention received above which a key is a sink, above 0 and below 1.

    Raises:
        PlanError: A number is out of its range.
    """

    heads: HeadsLike | None = None
    beta: float = 0.4
    threshold: float = 0.1

    name: ClassVar[str] = "act"
    strength_field: ClassVar[str] = "beta"
    strengths: ClassVar[tuple[float, ...]] = (0.8, 0.4, 0.0)

    def __post_init__(self) -> None:
        if not is_finite(self.beta) or not 0 <= self.beta <= 1:
            raise PlanError(f"beta={shown(self.beta)} must be a number from 0 to 1")
        if not is_finite(self.threshold) or not 0 < self.threshold < 1:
            raise PlanError(
                f"threshold={shown(self.threshold)} must be a number above 0 and below 1"
            )

    def edits(self, model: Model) -> Sequence[Edit]:
        """Refused: it is more than edits.

        Raises:
            PlanError: Always.
        """
        raise PlanError("ACT looks at a prompt before it is run, which edits cannot; use hl.steer")

    @contextmanager
    def apply(self, model: Model) -> Iterator[Model]:
        """Put it in force until the block ends.

        Raises:
            HeadError: A head does not exist.
            UnsupportedError: The model is no decoder.
        """
        heads = self.chosen(model)
        layers = sorted({head.layer for head in heads})

        def look(ids: Tensor) -> dict[int, Tensor]:
            return _sinks(model, ids, layers, self.threshold)

        found = Beforehand(model, "ACT", look)

        def calibrate(pattern: Tensor, where: Where) -> Tensor:
            assert where.keys is not None
            keys = where.keys
            marked = found.of(where)[where.layer][:, list(where.heads)].to(pattern.device)
            n = marked.shape[-1]
            at = keys.clamp(0, n - 1)[:, None].expand(-1, marked.shape[1], -1)
            sinks = marked.gather(2, at) & ((keys >= 0) & (keys < n))[:, None]
            sinks = sinks[:, :, None]
            return move(pattern, sinks, ~sinks, self.beta)

        with model.edit(apply(heads, calibrate, "pattern")), found.watching():
            yield model

    def chosen(self, model: Model) -> tuple[Head, ...]:
        """The heads it calibrates.

        Raises:
            HeadError: A head does not exist.
        """
        if self.heads is not None:
            return parse_heads(self.heads, model.spec)
        n = model.spec.n_layers
        layers = range(2, n - 1) if n > 3 else range(n)
        return tuple(
            Head(at, head) for at in layers for head in range(model.spec.layers[at].n_heads)
        )

    def sinks(
        self, model: Model, prompt: str | Sequence[str] | Tensor
    ) -> Bool[Tensor, "batch layer head key"]:
        """Which keys are sinks of which head; the first token never is.

        Raises:
            PromptError: A prompt cannot be used.
        """
        ids = model.tokens(prompt)
        every = list(range(model.spec.n_layers))
        with model.plain():
            found = _sinks(model, ids, every, self.threshold)
        return torch.stack([found[layer] for layer in every], 1)

    @classmethod
    def fit(
        cls,
        model: Model,
        behaviour: Behaviour,
        *,
        heads: HeadsLike | None = None,
        beta: float = 0.4,
        threshold: float = 0.1,
        seed: int = 0,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Self:
        """Keep the heads whose calibration alone improves a behaviour on average.

        Args:
            model: The model.
            behaviour: What is to improve; it is measured once for each head.
            heads: The heads to try; by default those that are calibrated by default.
            beta: What a sink's weight is multiplied by.
            threshold: Mean attention received above which a key is a sink.
            seed: Seed of the statistics.
            tell: Told, in a few words, how far it is.

        Raises:
            HeadError: A head does not exist.
            PlanError: No head improves the behaviour, or it has fewer than two cases.
        """
        from headlab.steering.profiling import profile

        method = cls(heads, beta, threshold)
        tried = method.chosen(model)
        found = profile(model, method, behaviour, heads=tried, seed=seed, tell=tell)
        return method.on(improving(found))


def improving(profile: Profile) -> tuple[Head, ...]:
    """The heads of a profile whose mean effect is above 0.

    Raises:
        PlanError: There is none.
    """
    better = profile.frame[profile.frame["effect"] > 0]
    if better.empty:
        raise PlanError(
            f"steering none of {len(profile.frame)} heads alone improves {profile.about.get('behaviour', 'this')}"
        )
    return tuple(Head(int(at), int(head)) for at, head in better[["layer", "head"]].to_numpy())


def _sinks(
    model: Model, ids: Int[Tensor, "batch position"], layers: Sequence[int], threshold: float
) -> dict[int, Bool[Tensor, "batch head key"]]:
    """Sinks per layer; beyond a prompt's end there are none."""
    trace = model.trace(ids, keep.statistics("received", layers=layers), logits="none")
    lengths = lengths_of(ids)[:, None]
    at = torch.arange(ids.shape[1], device=ids.device)
    found: dict[int, Tensor] = {}
    for layer in layers:
        seen = lengths - at  # rows from the key's own on
        window = model.spec.layers[layer].window
        seen = seen if window is None else seen.clamp(max=window)
        received = trace.statistic("received", layer=layer).to(ids.device)
        mean = received.nan_to_num(0.0) / seen.clamp(min=1)[:, None]
        found[layer] = (mean > threshold) & ((at > 0) & (at < lengths))[:, None]
    return found
