"""Exact runs of a circuit's edges: every other edge carries what it carries in the corrupted run.

With u(run) what source u writes to the residual stream, input v of a run of circuit C reads

    x_v = x_v(corrupted) + Σ over edges u → v in C of (u(this run) − u(corrupted)),

in topological order: what edges of the circuit carry is what their sources compute *in this run*. With every edge
in the circuit that is the clean run, with none the corrupted one. This is the run that edge attribution (EAP, EAP-IG)
estimates and that ACDC (Conmy et al. 2023) and MIB evaluate circuits by; one run costs several forward passes, since
each head has inputs of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headlab.causal.graph import Edge, EdgeLike, Graph
from headlab.causal.metrics import Metric, as_metric
from headlab.causal.paths.agreement import check_decoder, tolerance
from headlab.causal.paths.parts import Parts, Run, mixed
from headlab.causal.prompt_groups import Group, groups
from headlab.causal.prompt_pairs import pairs
from headlab.errors import PlanError, UnsupportedError

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.prompts import Prompt

#: Bytes that the sources' values of one batch may take.
_BYTES = 1 << 30


@dataclass(frozen=True)
class _Prepared:
    """Some prompts of one length, cut into parts, and their corrupted run."""

    group: Group
    parts: Parts
    corrupted: Run


class EdgeRuns:
    """Runs of circuits, given as sets of edges, over pairs of prompts.

    Args:
        model: A decoder-only model whose attention adds the sum of its heads to the stream.
        clean: The prompts.
        corrupted: As many prompts, each as long as its partner.
        metric: What to measure, on the clean prompts' terms; see :mod:`headlab.causal.metrics`.
        tokens_at_once: Tokens (circuits × prompts × positions) run together; by default what 1 GiB holds.
        tell: Called with a line of progress now and then.

    Attributes:
        graph: Nodes and edges of the model.
        clean: The metric of the clean run, [prompt].
        corrupted: The metric of the corrupted run, [prompt].

    Raises:
        UnsupportedError: The model has norms between attention and stream (Gemma 2 and 3, OLMo 2, GLM-4), so its
            heads do not add up; or the run of every edge does not reproduce the model.
        PromptError: Clean and corrupted prompts differ in number or length.
    """

    def __init__(
        self,
        model: Model,
        clean: Prompt,
        corrupted: Prompt,
        metric: Metric | Callable[[Tensor, Tensor], Tensor],
        *,
        tokens_at_once: int | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        check_decoder(model)
        for layer in range(model.spec.n_layers):
            if model.blocks.attention_norm(layer) is not None:
                raise UnsupportedError(
                    f"{model.name} ({model.spec.family}) norms the sum of a layer's heads before adding it to the "
                    "stream, so heads write no separate terms and edges from heads do not exist; patch paths with "
                    "hl.causal.path_patch, which needs no such sum"
                )
        self.model, self._tell = model, tell
        both = pairs(model, clean, corrupted)
        self._metric = as_metric(metric).bind(model, both.clean)
        n_sources = 1 + sum(facts.n_heads + 1 for facts in model.spec.layers)
        self._wide = torch.promote_types(model.dtype, torch.float32)
        per_token = n_sources * model.spec.d_model * self._wide.itemsize
        self._tokens = max(1, _BYTES // per_token) if tokens_at_once is None else tokens_at_once
        if self._tokens < 1:
            raise PlanError(
                f"tokens_at_once={tokens_at_once!r} must be a whole number of at least 1"
            )
        self._prepared: list[_Prepared] = []
        for group in groups(both.clean, both.corrupted, self._tokens):
            parts = Parts(model, group.clean, group.start, self._metric.needs == "all")
            with parts.open():
                self._prepared.append(_Prepared(group, parts, parts.capture(group.corrupted)))
        runs = [(one.group.rows, one.parts.base.logits) for one in self._prepared]
        self._metric = self._metric.with_reference(self._metric.gathered(runs))
        first = self._prepared[0]
        with first.parts.open():
            self.graph = Graph(model.spec, first.parts.parallel)
        self.clean = self._of(lambda one: one.parts.base.logits)
        self.corrupted = self._of(lambda one: one.corrupted.logits)
        self._check()

    # -- what is measured --------------------------------------------------------------------------------------------

    def run(self, kept: Sequence[Iterable[EdgeLike]]) -> Float[np.ndarray, "circuit prompt"]:
        """The metric of runs in which only these edges carry what they carry in the run itself.

        Args:
            kept: Circuits, or sets of edges, each edge ``(source, target, input)``.

        Raises:
            PlanError: An edge does not exist.
        """
        return self.run_masks(torch.stack([self.graph.mask(edges) for edges in _sets(kept)]))

    def corrupting(self, sets: Sequence[Iterable[EdgeLike]]) -> Float[np.ndarray, "circuit prompt"]:
        """The metric of clean runs in which these edges carry what they carry in the corrupted run.

        Args:
            sets: Sets of edges, each edge ``(source, target, input)``.

        Raises:
            PlanError: An edge does not exist.
        """
        masks = torch.stack([self.graph.mask(edges) for edges in _sets(sets)])
        return self.run_masks(self.graph.full & ~masks)

    def run_masks(
        self, masks: Bool[Tensor, "circuit input source"]
    ) -> Float[np.ndarray, "circuit prompt"]:
        """As :meth:`run`, for circuits given as masks over ``graph.inputs`` and ``graph.sources``."""
        if masks.shape[1:] != self.graph.full.shape or masks.dtype != torch.bool:
            raise PlanError(
                f"masks must be bool [circuit, {', '.join(map(str, self.graph.full.shape))}], not {masks.dtype} "
                f"of shape {list(masks.shape)}"
            )
        values = np.empty((len(masks), len(self.clean)))
        for one in self._prepared:
            size = max(1, self._tokens // one.group.tokens)
            for start in range(0, len(masks), size):
                chosen = masks[start : start + size]
                with one.parts.open():
                    found = self._run(one, chosen)
                values[start : start + size, one.group.rows.numpy()] = found
                done = min(start + size, len(masks))
                self._tell(f"{done} of {len(masks)} circuits on {len(one.group.rows)} prompts")
        return values

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Every edge of the model."""
        return self.graph.edges

    # -- the run -----------------------------------------------------------------------------------------------------

    def _run(self, one: _Prepared, masks: Tensor) -> Float[np.ndarray, "circuit prompt"]:
        parts, corrupted, clean = one.parts, one.corrupted, one.parts.base
        graph, wide = self.graph, self._wide
        first = corrupted.pre[0]
        n_circuits, shape = len(masks), tuple(first.shape)
        weights = masks.to(first.device, wide)
        # What each source writes in this run less what it writes in the corrupted one.
        change = torch.zeros(
            n_circuits, len(graph.sources), *shape, dtype=wide, device=first.device
        )
        change[:, 0] = clean.pre[0].to(wide) - first.to(wide)

        def stream(base: Tensor, chosen: Tensor, circuit: int) -> Tensor:
            """Streams of one circuit's inputs, [input, prompt, position, d_model]."""
            n = chosen.shape[-1]
            moved = chosen @ change[circuit, :n].flatten(1)
            return base.to(wide) + moved.unflatten(1, shape)

        for layer, facts in enumerate(self.model.spec.layers):
            at = graph.column(f"L{layer}H0")
            rows = weights[:, graph.rows(layer), :at]
            z = self._attend(one, layer, rows, lambda c, m: stream(corrupted.pre[layer], m, c))  # noqa: B023
            moved = parts.results(layer, (z - corrupted.z[layer]).to(wide)) * parts.factor
            change[:, at : at + facts.n_heads] = moved.permute(0, 3, 1, 2, 4)
            row = graph.row(f"mlp{layer}")
            n = graph.n_upstream[row]
            base = corrupted.pre[layer].to(wide)
            if not parts.parallel:
                base = base + corrupted.attn_out[layer].to(wide)
            x = torch.cat(
                [stream(base, weights[c, row : row + 1, :n], c) for c in range(n_circuits)]
            )
            mlp = parts.added(layer, x.flatten(0, 1).to(first.dtype))[1].unflatten(0, x.shape[:2])
            change[:, at + facts.n_heads] = mlp.to(wide) - corrupted.mlp_out[layer].to(wide)
        row, final = graph.row("logits"), corrupted.pre[parts.n_layers]
        every = torch.arange(shape[0], device=first.device)
        values = np.empty((n_circuits, shape[0]))
        for circuit in range(n_circuits):
            x = stream(final, weights[circuit, row : row + 1], circuit)[0]
            logits = parts.logits(x.to(first.dtype), every)
            values[circuit] = self._metric.measure(logits, one.group.rows)
        return values

    def _attend(
        self,
        one: _Prepared,
        layer: int,
        masks: Float[Tensor, "circuit input source"],
        stream: Callable[[int, Tensor], Tensor],
    ) -> Float[Tensor, "circuit prompt position head d_value"]:
        """z of every head, each with q, k and v read from streams of their own."""
        n_heads, n_prompts = masks.shape[1] // 3, len(one.group.rows)
        streams, places, total = [], [], 0
        for circuit, chosen in enumerate(masks):
            # Inputs that read the same edges share a stream.
            unique, place = torch.unique(chosen, dim=0, return_inverse=True)
            streams.append(stream(circuit, unique))
            places.append(place + total)
            total += len(unique)
        x = torch.cat(streams).flatten(0, 1)  # [stream · prompt, position, d_model]
        prompts = torch.arange(n_prompts, device=x.device)
        inputs = one.parts.inputs(layer, x.to(self.model.dtype), prompts.repeat(total))
        place = torch.stack(places)  # [circuit, input]
        heads = torch.arange(n_heads, device=x.device)

        def own(values: Tensor, which: int, of_head: Tensor) -> Tensor:
            """Each head's row of q, k or v, [circuit · prompt, head, position, width]."""
            split = values.unflatten(0, (total, n_prompts))
            rows = place[:, which * n_heads : (which + 1) * n_heads]
            return split[rows, :, of_head].transpose(1, 2).flatten(0, 1)

        group = n_heads // inputs.k.shape[1]
        q = own(inputs.q, 0, heads)
        k, v = own(inputs.k, 1, heads // group), own(inputs.v, 2, heads // group)
        return mixed(replace(inputs, q=q, k=k, v=v)).unflatten(0, (len(masks), n_prompts))

    # -- checks ------------------------------------------------------------------------------------------------------

    def _of(self, logits: Callable[[_Prepared], Tensor]) -> Float[np.ndarray, " prompt"]:
        values = np.empty(len(self._metric.prompts))
        for one in self._prepared:
            values[one.group.rows.numpy()] = self._metric.measure(logits(one), one.group.rows)
        return values

    def _check(self) -> None:
        """Every edge must give the clean run."""
        whole = torch.from_numpy(self.run_masks(self.graph.full[None])[0])
        clean = torch.from_numpy(self.clean)
        spread = torch.from_numpy(self.clean - self.corrupted)
        scale = torch.maximum(clean.abs(), spread.abs())
        limit = tolerance(self.model.dtype) * scale.max().clamp(min=1.0)
        if bool(((whole - clean).abs() > limit).any()):
            worst = float((whole - clean).abs().max())
            raise UnsupportedError(
                f"the run of every edge of {self.model.name} differs from its clean run by {worst:.2g} in the "
                "metric, so its edges cannot be run exactly"
            )


def _sets(sets: Sequence[Iterable[EdgeLike]]) -> list[list[EdgeLike]]:
    listed = [list(getattr(edges, "edges", edges)) for edges in sets]  # a Circuit has its edges
    if not listed:
        raise PlanError(
            "no circuit was given; pass a list of sets of edges, which may be empty sets"
        )
    return listed
