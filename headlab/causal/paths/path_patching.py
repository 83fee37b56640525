"""Path patching: what a head does to the logits, to other heads and to MLPs along direct paths only.

Wang et al. 2023 (Interpretability in the wild, §3.1), Goldowsky-Dill et al. 2023. With direction ``"noising"``:

* A: run the corrupted prompt, B: run the clean one;
* C: run the clean prompt with the z of **every** head frozen to B, but the sender's from A; MLPs and norms
  recompute, unless MLPs are frozen too. Keep what the receivers read in this run: q, k or v of heads, the input of
  MLPs, or the final stream;
* D: run the clean prompt with only the receivers' inputs put in. The effect is D's metric less B's.

So an effect counts paths from sender to receiver through MLPs but through no other head, then whatever the receiver
makes of it. ``"denoising"`` exchanges the two runs. Heads stay frozen before the sum over heads is normed, so models
with norms behind attention are served too.

C costs little: with every head frozen, the stream differs from the base run's at the sender's positions only, and no
position looks at another, so only MLPs run, at those positions. D runs the positions from the first one that changes,
in the layers from the first receiver on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.arguments import seed_number
from headlab.attention.heads import Head, HeadsLike
from headlab.attention.positions import resolve_positions
from headlab.causal.effects import Effects, effects_of
from headlab.causal.graph import LOGITS
from headlab.causal.metrics import BoundMetric, Metric, as_metric
from headlab.causal.paths.agreement import check_decoder
from headlab.causal.paths.parts import Parts, Run
from headlab.causal.paths.receivers import Receivers, read_receivers, read_senders
from headlab.causal.prompt_groups import Group, groups
from headlab.causal.prompt_pairs import pairs as prompt_pairs
from headlab.errors import PlanError
from headlab.kernels import AttentionInputs
from headlab.prompts import lengths_of

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.prompts import Prompt

Direction: TypeAlias = Literal["noising", "denoising"]
_TOKENS = 2048
#: Bytes of logits measured together.
_LOGITS_BYTES = 1 << 27


def path_patch(
    model: Model,
    clean: Prompt,
    corrupted: Prompt,
    metric: Metric | Callable[[Tensor, Tensor], Tensor],
    senders: HeadsLike = "all",
    receivers: str | Sequence[str] = LOGITS,
    *,
    freeze_mlps: bool = False,
    positions: Sequence[int] | Sequence[Sequence[int]] | Tensor | None = None,
    direction: Direction = "noising",
    seed: int = 0,
    tokens_at_once: int = _TOKENS,
    tell: Callable[[str], None] = lambda text: None,
) -> Effects:
    """Patch the paths from each sender, one at a time, to the receivers, all of them together.

    Args:
        model: A decoder-only model.
        clean: The prompts.
        corrupted: As many prompts, each as long as its partner.
        metric: What to measure.
        senders: Heads; ``"all"`` takes every head that comes before at least one receiver.
        receivers: ``"logits"``, or any of heads with an input, such as ``"L9H6:q"``, ``"L9H6:kv"`` or ``"9.*:q"``, and
            MLPs, such as ``"mlp5"``; several are separated by commas or in a list.
        freeze_mlps: Whether MLPs keep what they gave in the base run, which leaves the one direct path.
        positions: Positions of the sender's output to patch, negative ones from each prompt's end: [n], the same for
            every prompt, or [prompt, n]; all by default.
        direction: ``"noising"``: the run is clean and the sender's output corrupted; ``"denoising"``: the reverse.
        seed: Seed of the intervals and p-values.
        tokens_at_once: Tokens (senders × prompts × positions) run together.
        tell: Called with a line of progress now and then.

    Returns:
        One row per sender; ``baseline`` is the run that was patched.

    Raises:
        PlanError: A receiver cannot be read, or does not come after a sender that was named; or a position does not
            exist.
        PromptError: Clean and corrupted prompts differ in number or length.
        UnsupportedError: The model is no decoder-only model, or its parts do not add up to it.
    """
    if direction not in ("noising", "denoising"):
        raise PlanError(f"direction={direction!r} must be 'noising' or 'denoising'")
    if tokens_at_once < 1:
        raise PlanError(f"tokens_at_once={tokens_at_once!r} must be a whole number of at least 1")
    seed = seed_number(seed)
    check_decoder(model)
    both = prompt_pairs(model, clean, corrupted)
    ids = both.clean
    measure = as_metric(metric).bind(model, ids)
    to = read_receivers(receivers, model)
    if positions is None and to.logits and measure.needs != "all":
        positions = [-1]  # nothing else reaches the logits that are read
    where = None
    if positions is not None:
        where = resolve_positions(positions, lengths_of(ids).cpu(), "positions")
        if any(len(set(row)) < len(row) for row in where.tolist()):
            raise PlanError(f"positions={positions!r} names a position twice")
    noising = direction == "noising"
    pairs: list[_Pairs] = []
    for group in groups(ids, both.corrupted, tokens_at_once):
        ours, theirs = (group.clean, group.corrupted)[:: 1 if noising else -1]
        at = None if where is None else where[group.rows].to(ids.device)
        start = group.start if at is None else int(at.min())
        parts = Parts(model, ours, start, measure.needs == "all")
        if at is None:
            length = group.clean.shape[1]
            at = torch.arange(parts.start, length, device=ids.device).expand(len(ours), -1)
        with parts.open():
            pairs.append(_Pairs(group, parts, parts.capture(theirs), at - parts.start))
    chosen = read_senders(senders, to, model, pairs[0].parallel)
    base, source = ([run(one) for one in pairs] for run in (_Pairs.of_base, _Pairs.of_source))
    runs = (base, source)[:: 1 if noising else -1]
    logits = [(group.rows, logits) for group, logits in runs[0]]
    measure = measure.with_reference(measure.gathered(logits))
    metrics = [_measured(measure, run) for run in runs]
    values = np.empty((len(chosen), len(ids)))
    for one in pairs:
        size = max(1, tokens_at_once // one.at.numel())
        for begin in range(0, len(chosen), size):
            some = chosen[begin : begin + size]
            with one.parts.open():
                found = _Patching(one, some, to, freeze_mlps, measure).values()
            values[begin : begin + size, one.group.rows.numpy()] = found
            done = min(begin + size, len(chosen))
            tell(f"{done} of {len(chosen)} senders on {len(one.group.rows)} prompts")
    about = {
        "did": "path patching",
        "model": model.name,
        "metric": measure.name,
        "receivers": to.text,
        "freeze_mlps": freeze_mlps,
        "positions": None if where is None else where.tolist(),
        "direction": direction,
        "seed": seed,
    }
    keys = [{"layer": head.layer, "head": head.head, "site": "z"} for head in chosen]
    baseline = metrics[0] if noising else metrics[1]
    return effects_of(keys, values, baseline, metrics[0], metrics[1], about, seed)


@dataclass(frozen=True)
class _Pairs:
    """Prompts of one length: the run that is patched, in parts, and the run outputs come from."""

    group: Group
    parts: Parts
    source: Run
    at: Int[Tensor, "prompt n"]  # positions to patch, counted from parts.start

    @property
    def parallel(self) -> bool:
        with self.parts.open():
            return self.parts.parallel

    def of_base(self) -> tuple[Group, Tensor]:
        return self.group, self.parts.base.logits

    def of_source(self) -> tuple[Group, Tensor]:
        return self.group, self.source.logits


def _measured(
    measure: BoundMetric, runs: Sequence[tuple[Group, Tensor]]
) -> Float[np.ndarray, " prompt"]:
    values = np.empty(len(measure.prompts))
    for group, logits in runs:
        values[group.rows.numpy()] = measure.measure(logits, group.rows)
    return values


class _Patching:
    """Passes C and D for some senders on some prompts; rows are sender × prompt."""

    def __init__(
        self,
        pairs: _Pairs,
        senders: Sequence[Head],
        to: Receivers,
        freeze_mlps: bool,
        measure: BoundMetric,
    ) -> None:
        self.pairs, self.parts, self.to, self.measure = pairs, pairs.parts, to, measure
        self.senders, self.freeze = senders, freeze_mlps
        self.base, device = pairs.parts.base, pairs.at.device
        self.n_prompts = len(pairs.at)
        self.prompts = torch.arange(self.n_prompts, device=device)
        width = self.base.pre[0].shape[-1]
        wide = torch.promote_types(self.base.pre[0].dtype, torch.float32)
        self.change = torch.zeros(
            len(senders), *pairs.at.shape, width, dtype=wide, device=device
        )  # of the stream, [sender, prompt, n, d_model]
        self.inputs: dict[tuple[int, str], Tensor] = {}  # [row, receiving head, position, width]
        self.mlps: dict[int, Tensor] = {}  # [row, position, d_model]

    def values(self) -> Float[np.ndarray, "sender prompt"]:
        """The metric of the patched runs."""
        n_layers = self.parts.n_layers
        stop = n_layers if self.to.logits else self.to.last + 1
        for layer in range(min(head.layer for head in self.senders), stop):
            self._receive(layer)
            if layer < stop - 1 or self.to.logits or layer in self.to.mlps:
                self._send(layer)
        if self.to.logits:
            return self._measure(lambda rows: self._streams(n_layers, self.change[rows]))
        return self._measure(self._patched)

    # -- pass C ------------------------------------------------------------------------------------------------------

    def _picked(self, x: Float[Tensor, "prompt position *rest"]) -> Float[Tensor, "prompt n *rest"]:
        return x[self.prompts[:, None], self.pairs.at]

    def _placed(
        self, base: Float[Tensor, "prompt position d"], change: Float[Tensor, "sender prompt n d"]
    ) -> Float[Tensor, "row position d"]:
        """What a base run gave with a change at the patched positions."""
        whole = base.to(change.dtype).repeat(len(change), 1, 1, 1)
        whole[:, self.prompts[:, None], self.pairs.at] += change
        return whole.flatten(0, 1).to(base.dtype)

    def _streams(self, layer: int, change: Tensor) -> Float[Tensor, "row position d_model"]:
        return self._placed(self.base.pre[layer], change)

    def _receive(self, layer: int) -> None:
        """Keep what receiving heads of a layer read."""
        if layer not in self.to.heads:
            return
        x = self._streams(layer, self.change)
        inputs = self.parts.inputs(layer, x, self.prompts.repeat(len(self.senders)))
        group = inputs.q.shape[1] // inputs.k.shape[1]
        for letter, heads in self.to.heads[layer].items():
            own = heads if letter == "q" else [head // group for head in heads]
            self.inputs[layer, letter] = getattr(inputs, letter)[:, own].clone()

    def _send(self, layer: int) -> None:
        """Carry the change of the stream over a block whose heads, but the senders, are frozen."""
        here = [at for at, head in enumerate(self.senders) if head.layer == layer]
        begun = [at for at, head in enumerate(self.senders) if head.layer <= layer]
        recompute = not self.freeze or layer in self.to.mlps
        rows = begun if recompute else here
        if not rows:
            return
        attention = self._picked(self.base.attention[layer]).repeat(len(rows), 1, 1, 1)
        if here:
            moved = self._picked(self.pairs.source.z[layer]) - self._picked(self.base.z[layer])
            results = self.parts.results(layer, moved)
            for at in here:
                attention[rows.index(at)] += results[:, :, self.senders[at].head]
        base = self._picked(self.base.pre[layer]).to(self.change.dtype)
        x = (base + self.change[rows]).to(attention.dtype)
        attn, mlp = self.parts.added(layer, x.flatten(0, 1), attention.flatten(0, 1))
        shape = self.change[rows].shape
        by_mlp = mlp.reshape(shape) - self._picked(self.base.mlp_out[layer])
        if layer in self.to.mlps:
            moved_mlp = torch.zeros_like(self.change)
            moved_mlp[rows] = by_mlp.to(moved_mlp.dtype)
            self.mlps[layer] = self._placed(self.base.mlp_out[layer], moved_mlp)
        change = attn.reshape(shape) - self._picked(self.base.attn_out[layer])
        if not self.freeze:
            change = change + by_mlp
        self.change[rows] += change.to(self.change.dtype)

    # -- pass D ------------------------------------------------------------------------------------------------------

    def _patched(self, senders: slice) -> Float[Tensor, "row position d_model"]:
        """The final stream of base runs in which only the receivers read something else."""
        n = len(self.senders[senders])
        rows = slice(senders.start * self.n_prompts, (senders.start + n) * self.n_prompts)
        prompts = self.prompts.repeat(n)
        x = self.base.pre[self.to.first].repeat(n, 1, 1)
        for layer in range(self.to.first, self.parts.n_layers):
            mlp = self.mlps[layer][rows] if layer in self.mlps else None

            def edit(inputs: AttentionInputs, layer: int = layer) -> AttentionInputs:
                changed: dict[str, Any] = {}
                for letter, heads in self.to.heads.get(layer, {}).items():
                    value = getattr(inputs, letter).clone()
                    if (layer, letter) in self.inputs:
                        value[:, heads] = self.inputs[layer, letter][rows]
                    changed[letter] = value
                return replace(inputs, **changed)

            x = self.parts.block(layer, x, prompts, edit if layer in self.to.heads else None, mlp)
        return x

    def _measure(self, streams: Callable[[slice], Tensor]) -> Float[np.ndarray, "sender prompt"]:
        """The metric of final streams, some senders at a time: logits are wide."""
        positions = self.pairs.parts.ids.shape[1] if self.measure.needs == "all" else 1
        vocab = self.base.logits.shape[-1]
        each = self.n_prompts * positions * vocab * self.change.dtype.itemsize
        size = max(1, _LOGITS_BYTES // each)
        found = []
        for begin in range(0, len(self.senders), size):
            some = slice(begin, min(begin + size, len(self.senders)))
            n = some.stop - some.start
            logits = self.parts.logits(streams(some), self.prompts.repeat(n))
            values = self.measure.measure(logits, self.pairs.group.rows.repeat(n))
            found.append(values.reshape(n, self.n_prompts))
        return np.concatenate(found)
