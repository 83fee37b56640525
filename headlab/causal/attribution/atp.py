"""Attribution patching: an estimate of what patching every head would do, from two runs and one backward pass.

**AtP** (Nanda 2023; Kramár et al. 2024): patching node n moves the metric, to first order, by

    I(n) = ⟨a_n(other run) − a_n(patched run), ∂metric / ∂a_n in the patched run⟩.

**AtP\\*** (Kramár et al. 2024) mends its two blind spots:

* *QK fix*: a saturated softmax hides what a query or key does. For q and k the step through the softmax is taken
  exactly and only what follows is linear: I(n) = Σ ⟨A(patched) − A, ∂metric / ∂A⟩ with A the head's pattern. Since
  z = A·v this is ⟨z(patched) − z, ∂metric / ∂z⟩, and one run in which all heads are patched at once, each z put back
  before it is passed on, gives z(patched) of every head, whatever soft caps, sinks or windows there are. For keys by
  position, each k_t by itself, the new pattern follows from the patched scores in closed form.
* *GradDrop*: a direct and an indirect effect that cancel hide a node. The gradient is taken once per layer ℓ with what
  block ℓ adds to the stream held fixed, I_ℓ(n), and c(n) = 1/(L − 1) Σ_ℓ |I_ℓ(n)|: a magnitude without sign. L − 1
  because a node's own layer, once dropped, gives 0.

The paper's nodes are single positions, and it adds up |·| over them; here a node is what would be patched together,
one position (``by="head_position"``) or all of them (``by="head"``: for k all keys change at once).

Figures of the paper (top of the ranking against exact patching) were not checked against a run of its models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from headlab.arguments import seed_number
from headlab.attention import edits as editing
from headlab.attention.edits import Site, Where
from headlab.causal.attribution import gradients
from headlab.causal.attribution.gradients import BySite, record, wide
from headlab.causal.attribution.qk_fix import key_terms
from headlab.causal.effects import Effects, effects_of
from headlab.causal.metrics import BoundMetric, Metric, as_metric
from headlab.causal.prompt_pairs import Align, Pairs, pairs
from headlab.errors import PlanError, UnsupportedError

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.prompts import Prompt

By: TypeAlias = Literal["head", "head_position"]
Direction: TypeAlias = Literal["denoising", "noising"]
AtpSite: TypeAlias = Literal["z", "q", "k", "v"]
AnyMetric: TypeAlias = "Metric | Callable[[Tensor, Tensor], Tensor]"
#: Estimates by layer, [prompt, position, head].
ByLayer: TypeAlias = "dict[int, Tensor]"


@gradients.enabled()
def atp(
    model: Model,
    clean: Prompt,
    corrupted: Prompt,
    metric: AnyMetric,
    *,
    site: AtpSite = "z",
    by: By = "head",
    direction: Direction = "denoising",
    align: Align | None = None,
    seed: int = 0,
    tokens_at_once: int = gradients.TOKENS_AT_ONCE,
    tell: Callable[[str], None] = lambda text: None,
) -> Effects:
    """Estimate by attribution patching what patching each head does.

    A metric that is at its best in the patched run, such as KL divergence from it, has no slope there: all effects
    are 0 then.

    Args:
        model: The model; any that is not an encoder-decoder.
        clean: Prompts that show the behaviour.
        corrupted: As many that do not.
        metric: What is attributed.
        site: Where heads are patched; at q and k after position encoding, keys and values of a group per query head.
        by: ``"head"``, each head at all positions, or ``"head_position"``, each head at each position that every prompt
            of the patched run has, from the first at which the two runs can differ.
        direction: ``"denoising"`` patches the corrupted run with clean values, ``"noising"`` the clean run with
            corrupted ones.
        align: From which end positions count where a pair differs in length.
        seed: Seed of the intervals.
        tokens_at_once: Tokens run at once with gradients; lower it where memory runs out.
        tell: Called with progress.

    Returns:
        ``value`` is the metric as estimated, ``effect`` the estimate of its change.

    Raises:
        PromptError: Clean and corrupted prompts do not match.
        PlanError: The metric has no gradient or is not finite, or an option does not exist.
        UnsupportedError: The model is an encoder-decoder, or has no language-model head.
    """
    seed_number(seed)
    run = _Run(model, pairs(model, clean, corrupted, align), metric, direction, tokens_at_once)
    return run.effects(_Method(site, by, False, False), seed, tell)


@gradients.enabled()
def atp_star(
    model: Model,
    clean: Prompt,
    corrupted: Prompt,
    metric: AnyMetric,
    *,
    site: AtpSite = "q",
    by: By = "head",
    direction: Direction = "denoising",
    qk_fix: bool = True,
    grad_drop: bool = True,
    align: Align | None = None,
    seed: int = 0,
    tokens_at_once: int = gradients.TOKENS_AT_ONCE,
    tell: Callable[[str], None] = lambda text: None,
) -> Effects:
    """Estimate by AtP* how much patching each head matters.

    Args:
        model: A model with more than one layer; with ``grad_drop``, a decoder-only one.
        clean: Prompts that show the behaviour.
        corrupted: As many that do not.
        metric: What is attributed.
        site: Where heads are patched; the QK fix concerns q and k only.
        by: As in :func:`atp`.
        direction: As in :func:`atp`.
        qk_fix: Whether to take the step through the softmax exactly.
        grad_drop: Whether to use GradDrop. With it ``effect`` is the magnitude c(n), which has no sign, so there is
            no test of it being 0: ``p_value`` and ``q_value`` are NaN, and ``value`` is the baseline plus c(n).
            Without it effects have their sign.
        align: From which end positions count where a pair differs in length.
        seed: Seed of the intervals.
        tokens_at_once: Tokens run at once with gradients; lower it where memory runs out.
        tell: Called with progress.

    Raises:
        PromptError: Clean and corrupted prompts do not match.
        PlanError: The metric has no gradient or is not finite, or an option does not exist.
        UnsupportedError: GradDrop on a model with an encoder or of one layer.
    """
    seed_number(seed)
    run = _Run(model, pairs(model, clean, corrupted, align), metric, direction, tokens_at_once)
    return run.effects(_Method(site, by, qk_fix and site in ("q", "k"), grad_drop), seed, tell)


@dataclass(frozen=True)
class _Method:
    """What to estimate, and how."""

    site: AtpSite
    by: By
    qk_fix: bool
    grad_drop: bool

    def __post_init__(self) -> None:
        if self.site not in ("z", "q", "k", "v"):
            raise PlanError(f"site={self.site!r} must be 'z', 'q', 'k' or 'v'")
        if self.by not in ("head", "head_position"):
            raise PlanError(f"by={self.by!r} must be 'head' or 'head_position'")

    @property
    def name(self) -> str:
        parts = [part for part, on in (("QK fix", self.qk_fix), ("GradDrop", self.grad_drop)) if on]
        return f"AtP* ({', '.join(parts)})" if parts else "AtP"

    @property
    def by_key(self) -> bool:
        """Whether each key is patched by itself through the exact softmax."""
        return self.qk_fix and self.site == "k" and self.by == "head_position"


class _Run:
    """Pairs of prompts, the metric on them, and which run is patched."""

    def __init__(
        self, model: Model, both: Pairs, metric: AnyMetric, direction: Direction, tokens: int
    ) -> None:
        if direction not in ("denoising", "noising"):
            raise PlanError(f"direction={direction!r} must be 'denoising' or 'noising'")
        if any(layer.stack == "cross" for layer in model.spec.layers):
            raise UnsupportedError(
                f"{model.name} ({model.spec.family}) is an encoder-decoder model; attribution patching takes prompts "
                "of one stack"
            )
        self.model, self.direction, self.tokens_at_once = model, direction, tokens
        self.pairs = both if direction == "noising" else both.reversed
        bound = gradients.differentiable(as_metric(metric).bind(model, both.clean))
        self.metric, ends = gradients.referred(model, bound, both.clean, both.corrupted, tokens)
        self.clean, self.corrupted = (values.numpy() for values in ends)

    def effects(self, method: _Method, seed: int, tell: Callable[[str], None]) -> Effects:
        """The table of all heads."""
        n_layers, n_prompts = self.model.spec.n_layers, len(self.pairs)
        if method.grad_drop and n_layers == 1:
            raise UnsupportedError("GradDrop drops one layer of several, but the model has one")
        places = [-1] if method.by == "head" else self._positions()
        index = [max(place, 0) for place in places]
        found: dict[int, list[Tensor]] = {layer: [] for layer in range(n_layers)}
        width = self.pairs.clean.shape[1]
        for prompts in gradients.chunks(n_prompts, width, self.tokens_at_once):
            tell(f"{method.name}: prompt {int(prompts[0]) + 1} of {n_prompts}")
            for layer, value in _Batch(self, prompts, method).estimates().items():
                found[layer].append(value[:, index].cpu().double())
        keys: list[dict[str, Any]] = []
        rows: list[np.ndarray] = []
        for layer, parts in found.items():
            value = torch.cat(parts)
            for head in range(value.shape[2]):
                place = {"layer": layer, "head": head, "site": method.site}
                keys += [{**place, "position": position} for position in places]
                rows += list(value[:, :, head].T.numpy())
        baseline = self.clean if self.direction == "noising" else self.corrupted
        about = {
            "did": method.name,
            "metric": self.metric.name,
            "model": self.model.name,
            "direction": self.direction,
            "by": method.by,
            "seed": seed,
        }
        values = baseline + np.stack(rows)
        made = effects_of(keys, values, baseline, self.clean, self.corrupted, about, seed)
        if not method.grad_drop:
            return made
        return replace(made, frame=made.frame.assign(p_value=np.nan, q_value=np.nan))

    def _positions(self) -> list[int]:
        """Positions that every prompt has, from the first at which the two runs can differ."""
        causal = all(layer.causal for layer in self.model.spec.layers)
        first = self.pairs.first_difference if causal else 0
        shortest = int((self.pairs.clean >= 0).sum(1).min())
        if first >= shortest:
            raise PlanError(
                f"the pairs first differ at position {first}, but the shortest prompt has {shortest} tokens, so no "
                'position can be patched in all of them; use by="head"'
            )
        return list(range(first, shortest))


class _Batch:
    """Some pairs that run together; "ours" is the run that is patched, "theirs" the one values come from."""

    def __init__(self, run: _Run, prompts: Tensor, method: _Method) -> None:
        self.run, self.prompts, self.method, self.model = run, prompts, method, run.model
        self.ids = gradients.chosen(run.pairs.clean, prompts)
        self.others = gradients.chosen(run.pairs.corrupted, prompts)
        site = method.site
        with torch.no_grad():
            theirs = record(self.model, self.others, [site]).values[site]
        self.theirs = {layer: self._aligned(value) for layer, value in theirs.items()}
        self.real = (self.ids >= 0)[:, :, None]

    def _aligned(self, value: Tensor) -> Tensor:
        """Values of the other run where the same place lies in ours; anything where it has none: not ``known``."""
        width, shift = self.ids.shape[1], self.run.pairs.shift[self.prompts]
        at = torch.arange(width, device=shift.device) + shift[:, None]
        ends = (self.others >= 0).sum(1, keepdim=True)
        self.known = ((at >= 0) & (at < ends))[:, :, None, None].to(value.device)
        index = at.clamp(0, value.shape[1] - 1).to(value.device)[:, :, None, None]
        return value.gather(1, index.expand(-1, -1, *value.shape[2:]))

    def estimates(self) -> ByLayer:
        """Estimates of every node, [prompt, position or 1, head]."""
        site, method = self.method.site, self.method
        sites: list[Site] = [site]
        sites += ["z"] if method.qk_fix else []
        sites += ["attn_out", "mlp_out"] if method.grad_drop else []
        metric: BoundMetric = self.run.metric
        run = record(self.model, self.ids, sites, metric.needs, grad=True)
        total = run.metric(metric, self.prompts).sum()
        self.ours = {
            name: {layer: value.detach() for layer, value in layers.items()}
            for name, layers in run.values.items()
        }
        if method.by_key:
            self.ours |= record(self.model, self.ids, ["v", "scores", "pattern"]).values
        terms = self._exact_terms() if method.qk_fix else self._linear_terms()
        if not method.grad_drop:
            return self._nodes(terms(run.slopes(total)))
        sums: ByLayer = {}
        dropping: list[int] = []
        for name in ("attn_out", "mlp_out"):
            for layer, value in run.values[name].items():
                value.register_hook(
                    lambda slope, layer=layer: (
                        torch.zeros_like(slope) if layer in dropping else None
                    )
                )
        n_layers = self.model.spec.n_layers
        for layer in range(n_layers):
            dropping[:] = [layer]
            found = self._nodes(terms(run.slopes(total, keep_graph=True)))
            for at, value in found.items():
                sums[at] = sums.get(at, 0) + value.abs() / (n_layers - 1)
        return sums

    def _nodes(self, terms: ByLayer) -> ByLayer:
        """Terms by position, summed over what is patched together."""
        kept = {
            layer: torch.where(self.real.to(value.device), value, 0.0)
            for layer, value in terms.items()
        }
        if self.method.by == "head":
            return {layer: value.sum(1, keepdim=True) for layer, value in kept.items()}
        return kept

    def _linear_terms(self) -> Callable[[BySite], ByLayer]:
        site = self.method.site
        change = {
            layer: torch.where(
                self.known.to(value.device), wide(value) - wide(self.ours[site][layer]), 0.0
            )
            for layer, value in self.theirs.items()
        }
        return lambda slopes: {
            layer: (value * wide(slopes[site][layer])).sum(-1) for layer, value in change.items()
        }

    def _exact_terms(self) -> Callable[[BySite], ByLayer]:
        """Terms with the step through the softmax exact."""
        patched = self._patched()
        if self.method.by_key:
            keys = {layer: self._key_terms(layer, x) for layer, x in patched["scores"].items()}
            return lambda slopes: {layer: of(slopes["z"][layer]) for layer, of in keys.items()}
        change = {
            layer: wide(value) - wide(self.ours["z"][layer])
            for layer, value in patched["z"].items()
        }
        return lambda slopes: {
            layer: (value * wide(slopes["z"][layer])).sum(-1) for layer, value in change.items()
        }

    def _patched(self) -> BySite:
        """A run in which every head has its q (or k) from the other run, and no head passes anything of it on."""
        site = self.method.site
        found: BySite = {"z": {}}

        def put(x: Tensor, where: Where) -> Tensor:
            return torch.where(self.known.to(x.device), self.theirs[where.layer].to(x), x)

        def keep(x: Tensor, where: Where) -> Tensor:
            found["z"][where.layer] = x.clone()
            return self.ours["z"][where.layer]

        edits = [editing.apply("*.*", put, site), editing.apply("*.*", keep, "z")]
        sites: list[Site] = ["scores"] if self.method.by_key else []
        return found | record(self.model, self.ids, sites, edits=edits).values

    def _key_terms(self, layer: int, scores: Tensor) -> Callable[[Tensor], Tensor]:
        ours = {name: self.ours[name][layer] for name in ("scores", "v", "pattern")}
        sinks = ours["pattern"] if self.model.spec.layers[layer].sinks else None
        return key_terms(ours["scores"], scores, ours["v"], self.real, sinks)
