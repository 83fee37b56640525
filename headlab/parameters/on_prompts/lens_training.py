"""Training an Attention Lens on captured outputs of heads, and holding it to the untrained projection.

One capture pass runs the model over the prompts and keeps, in main memory, what the heads wrote at each prompt's last
position and the model's own log-probabilities there; training then reads these alone. The paper's defaults are Adam at
1e-3, batches of 1 with gradients of 10 added up, and 3 epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headlab.arguments import finite_number, seed_number, whole_number
from headlab.attention import Head, HeadsLike, keep
from headlab.errors import PlanError, PromptError
from headlab.parameters.on_prompts.attention_lens import AttentionLens, head_results, untrained_lens
from headlab.prompts import Prompt, lengths_of
from headlab.statistics import bootstrap_interval, sign_flip_p

if TYPE_CHECKING:
    from headlab.model import Model

Tell = Callable[[str], None]
#: Tokens of one capture pass.
_TOKENS = 1 << 12
#: Prompts trained on that show whether training diverged.
_SEEN = 64
#: How much faster the scales move: they begin several times too large, where the rest begins near its place.
_SCALE_RATE = 5


@dataclass(frozen=True)
class LensCheck:
    """How well a lens predicts the model on prompts it was not trained on; nats, means over prompts.

    Attributes:
        kl: KL(model ‖ lens) of each prompt.
        untrained: The same for the lens before training: every map the unembedding.
        prior: KL(model ‖ mean), where mean is the model's mean distribution over the training prompts. A lens whose
            biases alone learned which tokens are common gets this far without reading any head.
        training: Mean KL before and after, of up to 64 of the prompts it was trained on.
        gain: Mean of ``untrained`` − ``kl``, with its 95 % bootstrap interval over prompts in ``ci`` (NaN for one
            prompt) and a one-sided sign-flip ``p_value``.
        beyond_prior: Mean of ``prior`` − ``kl``, likewise, with ``prior_ci`` and ``prior_p``.
        ci: See ``gain``.
        p_value: See ``gain``.
        prior_ci: See ``beyond_prior``.
        prior_p: See ``beyond_prior``.
    """

    kl: Float[np.ndarray, " prompt"]
    untrained: Float[np.ndarray, " prompt"]
    prior: Float[np.ndarray, " prompt"]
    gain: float
    ci: tuple[float, float]
    p_value: float
    beyond_prior: float
    prior_ci: tuple[float, float]
    prior_p: float
    training: tuple[float, float]

    @property
    def diverged(self) -> bool:
        """Whether training made the lens worse on what it was trained on, or gave no numbers."""
        before, after = self.training
        return not after <= before

    def to_dict(self) -> dict[str, Any]:
        """Plain data; NaN becomes None."""
        found: dict[str, Any] = {"n": len(self.kl)}
        found |= {name: float(getattr(self, name).mean()) for name in ("kl", "untrained", "prior")}
        for name in ("gain", "p_value", "beyond_prior", "prior_p"):
            found[name] = getattr(self, name)
        found = {name: None if np.isnan(value) else value for name, value in found.items()}
        for name in ("ci", "prior_ci", "training"):
            found[name] = [None if np.isnan(end) else end for end in getattr(self, name)]
        return found | {"diverged": self.diverged}

    def __repr__(self) -> str:
        before, after = self.training
        (low, high), kl, prior = self.prior_ci, self.kl.mean(), self.prior.mean()
        if low > 0:
            verdict = f"better than the model's mean distribution ({prior:.3g}"
        elif self.beyond_prior > 0:
            verdict = f"not surely better than the model's mean distribution ({prior:.3g}"
        else:
            verdict = (
                f"no better than the model's mean distribution, which reads no head ({prior:.3g}"
            )
        lines = [
            f"LensCheck on {len(self.kl)} held-out prompt(s): KL {kl:.3g} nats, {verdict}; difference "
            f"{self.beyond_prior:.3g}, 95 % {low:.3g} to {high:.3g}, p {self.prior_p:.2g})",
            f"  untrained: {self.untrained.mean():.3g} (p {self.p_value:.2g}); on prompts trained on: {before:.3g} → "
            f"{after:.3g}",
        ]
        lines += ["  diverged: lower rate="] if self.diverged else []
        return "\n".join(lines)


def train_lens(
    model: Model,
    prompts: Prompt,
    heads: HeadsLike,
    *,
    rank: int | None = None,
    vocabulary: Any = None,
    epochs: int = 3,
    rate: float = 1e-3,
    batch: int = 1,
    accumulate: int = 10,
    held_out: float = 0.2,
    seed: int = 0,
    tell: Tell = lambda text: None,
) -> tuple[AttentionLens, LensCheck]:
    """Train a lens on prompts, and check it on some that are kept back.

    Full maps take 16 bytes for each of heads · d_model · tokens numbers (weight, gradient and two moments in float32);
    ``rank=``, ``heads`` or ``vocabulary=`` make that less. Log-probabilities take 4 bytes per prompt and token.

    The defaults are the paper's, for full maps and a corpus; on a few dozen prompts they hardly move a lens. There
    ``rank=8, rate=1e-2, epochs=20`` works. One layer of SmolLM2-135M then takes half a minute on one core, and on
    prompts kept back KL falls: in layer 29, after about 40 of "The capital of … is the city of", from 30.7 to 3.7 nats
    (the mean distribution: 5.5); in layer 22, after 48 of 24 tokens of prose, from 12.4 to 3.9 (4.6). In layer 15 it
    gets no further than the mean distribution.

    Args:
        model: A decoder-only model.
        prompts: Five or more; the last position of each counts.
        heads: Heads of one layer.
        rank: See :func:`~.attention_lens.untrained_lens`.
        vocabulary: See there.
        epochs: Passes over the training prompts, shuffled anew each time; there is no early stop.
        rate: Adam's learning rate. Of a lens of low rank, it is that of B and c; a step moves r·A by about as much in
            all, and s by five times it. (The same rate for every number of A would move r·A by √d_model·‖r‖ times as
            much, several hundred times in late layers, and diverge.)
        batch: Prompts of one forward and backward pass of the lens.
        accumulate: Passes whose gradients make one step; what counts for the result is ``batch · accumulate``, the
            prompts of a step, over which the loss is a mean.
        held_out: Share of the prompts kept back, at least one.
        seed: Seed of the split, of the order, of a low-rank start, of the bootstrap and the sign flips.
        tell: Told how far it is.

    Returns:
        The lens, and how it does on the prompts kept back.

    Raises:
        HeadError: Heads do not exist or lie in several layers.
        PlanError: A number does not fit.
        PromptError: There are too few prompts.
        UnsupportedError: The model is no decoder, or weights cannot be read.
    """
    epochs, batch = whole_number(epochs, "epochs"), whole_number(batch, "batch", 1)
    accumulate, seed = whole_number(accumulate, "accumulate", 1), seed_number(seed)
    rate, held_out = finite_number(rate, "rate"), finite_number(held_out, "held_out")
    if rate <= 0 or not 0 < held_out < 1:
        raise PlanError(f"rate={rate} must be above 0, and held_out={held_out} between 0 and 1")
    start = untrained_lens(model, heads, rank=rank, vocabulary=vocabulary, seed=seed)
    ids = model.tokens(prompts)
    if len(ids) < 5:
        raise PromptError(
            f"{len(ids)} prompts are too few to train on some and check on others; give 5 or more"
        )
    results, targets = captured(model, ids, start.heads, start.vocabulary, tell)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(ids)))
    kept_back = max(1, round(held_out * len(ids)))
    test, training = order[:kept_back], order[kept_back:]
    lens = fit(start, results[training], targets[training], epochs=epochs, rate=rate, batch=batch,
               accumulate=accumulate, seed=seed, tell=tell)  # fmt: skip
    prior = targets[training].double().exp().mean(0).log()
    seen = results[training[:_SEEN]], targets[training[:_SEEN]]
    return lens, check(lens, start, (results[test], targets[test]), seen, prior, seed)


@torch.no_grad()
def captured(
    model: Model,
    ids: Tensor,
    heads: tuple[Head, ...],
    vocabulary: Tensor,
    tell: Tell = lambda text: None,
) -> tuple[Float[Tensor, "prompt head d_model"], Float[Tensor, "prompt token"]]:
    """What heads wrote at each prompt's last position, and the model's log-probabilities there, in main memory."""
    kind = torch.promote_types(model.dtype, torch.float32)
    lengths = lengths_of(ids)
    results: list[Tensor] = []
    targets: list[Tensor] = []
    # In the order given, with neighbours of unequal length padded: nothing has to be sorted back.
    for part, length in zip(
        ids.split(step := max(1, _TOKENS // ids.shape[1])), lengths.split(step), strict=True
    ):
        plan = keep.tensors("z", layers=[heads[0].layer], positions=[-1])
        trace = model.trace(part[:, : int(length.max())], keep=plan, logits="last")
        if trace.logits is None:
            raise PlanError(
                f"{model.name} has no language-model head, so there is nothing to predict"
            )
        results.append(head_results(model, trace, heads).cpu())
        chosen = trace.logits[:, 0].index_select(1, vocabulary.to(trace.logits.device))
        targets.append(chosen.to(kind).log_softmax(-1).cpu())
        tell(f"attention lens: {sum(map(len, results))} of {len(ids)} prompts captured")
    return torch.cat(results), torch.cat(targets)


def fit(
    start: AttentionLens,
    results: Float[Tensor, "prompt head d_model"],
    targets: Float[Tensor, "prompt token"],
    *,
    epochs: int = 3,
    rate: float = 1e-3,
    batch: int = 1,
    accumulate: int = 10,
    seed: int = 0,
    tell: Tell = lambda text: None,
) -> AttentionLens:
    """A lens trained from where ``start`` is; arguments as in :func:`train_lens`."""
    change = {name: value.clone().requires_grad_() for name, value in start.change.items()}
    bias = start.bias.clone().requires_grad_()
    lens = replace(start, change=change, bias=bias)
    # Adam moves every number by about its rate, whatever it is multiplied by.
    size = results.shape[-1] ** 0.5 * float(results.norm(dim=-1).mean())
    slower = {"left": 1 / max(size, 1.0), "scale": _SCALE_RATE}
    adam = torch.optim.Adam(
        [{"params": value, "lr": rate * slower.get(name, 1)} for name, value in change.items()]
        + [{"params": bias, "lr": rate}]
    )
    rng, losses = np.random.default_rng([seed, 1]), []
    for epoch in range(epochs):
        order = torch.from_numpy(rng.permutation(len(results)))
        for step in order.split(batch * accumulate):
            adam.zero_grad()
            total = 0.0
            for part in step.split(batch):
                wanted = targets[part].to(bias)
                loss = divergence(wanted, lens.logits(results[part].to(bias))).sum() / len(step)
                loss.backward()
                total += float(loss.detach())
            adam.step()
            losses.append(total)
        tell(f"attention lens: epoch {epoch + 1} of {epochs}, KL {losses[-1]:.3g} nats")
    learned = {name: value.detach() for name, value in change.items()}
    return replace(start, change=learned, bias=bias.detach(), losses=(*start.losses, *losses))


def divergence(
    targets: Float[Tensor, "prompt token"], logits: Float[Tensor, "prompt token"]
) -> Float[Tensor, " prompt"]:
    """KL(model ‖ lens) in nats, from log-probabilities and logits; 0 · log 0 = 0."""
    terms = targets.exp() * (targets - logits.log_softmax(-1))
    return terms.masked_fill(targets.exp() == 0, 0.0).sum(-1)


@torch.no_grad()
def check(
    lens: AttentionLens,
    start: AttentionLens,
    held_out: tuple[Float[Tensor, "prompt head d_model"], Float[Tensor, "prompt token"]],
    seen: tuple[Float[Tensor, "prompt head d_model"], Float[Tensor, "prompt token"]],
    prior: Float[Tensor, " token"],
    seed: int = 0,
) -> LensCheck:
    """Hold a lens to the one it began as, and to a distribution that reads nothing, on prompts it has not seen.

    Args:
        lens: The lens.
        start: What it was before training.
        held_out: What :func:`captured` gives of the prompts kept back.
        seen: The same of some it was trained on.
        prior: Log-probabilities that read no head.
        seed: Seed of the bootstrap and the sign flips.
    """

    def of(given: AttentionLens, results: Tensor, targets: Tensor) -> np.ndarray:
        parts = [
            divergence(wanted.to(given.bias), given.logits(wrote.to(given.bias)))
            for wrote, wanted in zip(results.split(16), targets.split(16), strict=True)
        ]
        return torch.cat(parts).double().cpu().numpy()

    kl, untrained = of(lens, *held_out), of(start, *held_out)
    training = float(of(start, *seen).mean()), float(of(lens, *seen).mean())
    targets = held_out[1]
    mean = divergence(targets.double(), prior.expand_as(targets)).numpy()
    gains = np.stack([untrained - kl, mean - kl], 1)
    low = high = np.full(2, np.nan)
    if len(gains) > 1:
        low, high = bootstrap_interval(gains, seed)
    p = sign_flip_p(gains, seed)
    intervals: Sequence[tuple[float, float]] = [
        (float(a), float(b)) for a, b in zip(low, high, strict=True)
    ]
    means = gains.mean(0)
    return LensCheck(
        kl, untrained, mean, float(means[0]), intervals[0], float(p[0]), float(means[1]), intervals[1], float(p[1]),
        training,
    )  # fmt: skip


__all__ = ["LensCheck", "train_lens"]
