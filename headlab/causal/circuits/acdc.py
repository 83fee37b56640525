"""ACDC, automatic circuit discovery (Conmy et al. 2023, algorithm 1): edges are cut one by one unless that is noticed.

Inputs are visited from the logits backward, and at each one its edges from the latest source to the earliest. An edge
is corrupted for good when that raises the divergence from the clean run by less than τ. Edges into a node from which
nothing leads to the logits any more go with it, since nothing they carry arrives.

The order is the paper's; within it, many edges are tried at once on the guess that all of them go, and the guess is
given up at the first one that stays, so that the result is that of trying them one after the other. Edges of a large
model still take very many runs: rank them with :func:`headlab.causal.eap_ig` there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headlab.arguments import finite_number
from headlab.causal.circuits.circuit import Circuit
from headlab.causal.graph import LOGITS, Edge, EdgeLike
from headlab.causal.metrics import Metric, as_metric, kl
from headlab.causal.paths.edges import EdgeRuns
from headlab.errors import PlanError

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.prompts import Prompt

#: Most edges tried on one guess.
_GUESS = 64


def acdc(
    model: Model,
    clean: Prompt,
    corrupted: Prompt,
    tau: float,
    metric: Metric | Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    tokens_at_once: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Circuit:
    """The edges whose corruption raises the divergence by at least τ.

    Args:
        model: A decoder-only model whose attention adds the sum of its heads to the stream.
        clean: The prompts.
        corrupted: As many prompts, each as long as its partner.
        tau: The least rise of the mean over prompts that keeps an edge, in units of the metric.
        metric: A divergence, lower where the run is closer to the clean one; KL at the last position by default. Of
            a metric that is higher there, such as a logit difference, the fall counts.
        tokens_at_once: Tokens (circuits × prompts × positions) run together; by default what 1 GiB holds.
        tell: Called with a line of progress now and then.

    Returns:
        The edges that stay; an edge's score is how much the divergence rose when it was tried.

    Raises:
        PlanError: tau is not a number of at least 0.
        UnsupportedError: The model has no edges from single heads; see :class:`~headlab.causal.EdgeRuns`.
        PromptError: Clean and corrupted prompts differ in number or length.
    """
    if finite_number(tau, "tau") < 0:
        raise PlanError(f"tau={tau!r} must be a number of at least 0")
    measured = as_metric(kl() if metric is None else metric)
    runs = EdgeRuns(model, clean, corrupted, measured, tokens_at_once=tokens_at_once)
    sign = -1.0 if measured.higher_is_better else 1.0
    graph = runs.graph
    kept = graph.full.clone()
    scores: dict[EdgeLike, float] = {}
    now = sign * float(runs.run_masks(kept[None])[0].mean())
    for row in reversed(range(len(graph.inputs))):
        node, letter = graph.inputs[row]
        if node != LOGITS and not bool(kept[:, graph.column(node)].any()):
            kept[row] = False  # nothing reads this node any more
            continue
        left = [int(column) for column in kept[row].nonzero()[:, 0].flip(0)]
        guess = _GUESS
        while left:
            tried = left[:guess]
            masks = kept.repeat(len(tried), 1, 1)
            for at, column in enumerate(tried):
                masks[at:, row, column] = False
            values = sign * torch.from_numpy(runs.run_masks(masks)).mean(1)
            gone = 0
            for column, value in zip(tried, values.tolist(), strict=True):
                left.pop(0)
                if value - now >= tau:
                    scores[Edge(graph.sources[column], node, letter)] = value - now
                    break
                kept[row, column], now, gone = False, value, gone + 1
            guess = _GUESS if gone == len(tried) else max(1, 2 * gone)
        tell(f"{node}{f'.{letter}' if letter else ''}: {len(scores)} edges kept so far")
    name = f"{measured.name}, tau {tau:g}"
    parallel = graph.n_upstream[graph.row("mlp0")] == graph.n_upstream[0]
    return Circuit.of_edges(model, scores, parallel=parallel, metric=name, method="ACDC")
