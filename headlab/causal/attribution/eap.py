"""Edge attribution patching: what each edge between heads, MLPs, embedding and logits carries, in few passes.

**EAP** (Syed et al. 2023): corrupting the edge from source u to input v moves the metric, to first order, by

    score(u → v) = mean over prompts Σ over positions ⟨a_u(corrupted) − a_u(clean), ∂metric / ∂in_v⟩,

with a_u what u adds to the residual stream and in_v the stream as v alone reads it, before its norm, the gradient
taken in the clean run. A head reads through q, k and v apart. **The sign is that of the change that corruption makes**:
an edge that raises the metric has a negative score where corruption takes its work away. (Official code that negates a
loss has the opposite sign.)

**EAP-IG** (Hanna et al. 2024) takes the mean of the gradient along a path instead, so that a gradient that happens
to vanish in the clean run does not hide an edge:

* ``"inputs"``: the embeddings move in m steps from the corrupted prompt's to the clean prompt's. Over all edges that
  leave ``embed`` the scores sum to metric(corrupted) − metric(clean), up to the error of m steps;
* ``"clean_corrupted"``: the mean of the gradients at both ends;
* ``"activations"``: what the source's own group adds (the embedding, the heads of one layer together, one MLP) moves,
  in an otherwise clean run. The official code adds up, for every edge, gradients met while *any* group moves and
  divides by their number; here an edge takes those of its own source's path only.

Official code takes the m points of a path at k/m for k = 0 … m − 1 for edges and k = 1 … m for nodes. The default here
is midpoints (k − ½)/m, whose error falls as 1/m²; ``points="left"`` and ``"right"`` are theirs.

Grouped-query attention: k and v of a group serve several query heads; each query head has its own k and v input, so
that an edge ends at one head. Families that norm attention's output before it enters the stream (Gemma 2 and 3,
OLMo 2, GLM-4) and models with an encoder have no edges from single heads; :func:`eap_ig_heads` works there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from headlab.arguments import whole_number
from headlab.attention import edits as editing
from headlab.attention.edits import Edit, Site
from headlab.causal.attribution import gradients, readers
from headlab.causal.attribution.gradients import BySite, Points, Recording, record, wide
from headlab.causal.graph import Edge, Graph
from headlab.causal.metrics import Metric, as_metric
from headlab.causal.prompt_pairs import pairs
from headlab.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model
    from headlab.prompts import Prompt

Kind: TypeAlias = Literal["inputs", "activations", "clean_corrupted"]
AnyMetric: TypeAlias = "Metric | Callable[[Tensor, Tensor], Tensor]"
#: Sources that stand side by side, by the site of what they write, and its layer.
Group: TypeAlias = "tuple[Site, int]"
#: What sources add to the stream is kept ready for a batch of prompts up to so many bytes, and made anew beyond.
_READY_BYTES = 1 << 29


@dataclass(frozen=True)
class Edges:
    """Edges with scores, the largest in absolute value first.

    Attributes:
        frame: One row per edge: source, target, input (``"q"``, ``"k"`` or ``"v"`` of a head, else ``""``), score in
            units of the metric. Nodes are ``embed``, ``L3H2``, ``mlp3`` and ``logits``.
        about: How the scores were made, and the mean of the metric in the clean and in the corrupted runs;
            ``completeness`` is what the edges out of the embedding sum to as a share of the change of the metric: 1
            where the steps of :func:`eap_ig` were enough.
    """

    frame: pd.DataFrame
    about: dict[str, Any]

    def top(self, n: int) -> Edges:
        """The n edges of the largest absolute score.

        Raises:
            PlanError: n is not a whole number of at least 1.
        """
        return replace(self, frame=self.frame.head(whole_number(n, "n", 1)))

    def between_heads(self) -> Edges:
        """Only edges from a head to a head."""
        heads = self.frame["source"].str.startswith("L") & self.frame["target"].str.startswith("L")
        return replace(self, frame=self.frame[heads].reset_index(drop=True))

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges without their scores, in the order of the table."""
        columns = (self.frame[name] for name in ("source", "target", "input"))
        return tuple(Edge(*names) for names in zip(*columns, strict=True))

    def nodes(self) -> tuple[str, ...]:
        """The nodes that these edges join, each once, as they are met going down the table."""
        return tuple(dict.fromkeys(node for edge in self.edges for node in edge[:2]))

    def __len__(self) -> int:
        return len(self.frame)

    def __repr__(self) -> str:
        complete = self.about.get("completeness")
        said = "" if complete is None else f"; completeness {complete:.3f}"
        return (
            f"{len(self)} edges by {self.about['method']}{said}; negative: corrupting it lowers the metric\n"
            f"{self.frame.head(10).to_string()}"
        )


@gradients.enabled()
def eap(
    model: Model,
    clean: Prompt,
    corrupted: Prompt,
    metric: AnyMetric,
    *,
    tokens_at_once: int = gradients.TOKENS_AT_ONCE,
    tell: Callable[[str], None] = lambda text: None,
) -> Edges:
    """Score every edge by attribution patching.

    A metric that is at its best in the clean run, such as KL divergence from it, has no slope there: every score is 0
    then, and :func:`eap_ig` or another metric is what is wanted.

    Args:
        model: A decoder-only model.
        clean: Prompts on which the metric is to be explained.
        corrupted: As many prompts, token by token as long as the clean ones.
        metric: What is attributed.
        tokens_at_once: Tokens run at once with gradients; lower it where memory runs out.
        tell: Called with progress.

    Raises:
        PromptError: Clean and corrupted prompts do not match.
        PlanError: The metric has no gradient or is not finite.
        UnsupportedError: The architecture has no edges from single heads, or the model no language-model head.
    """
    paths = Paths("EAP", None, (1.0,))
    return _Scoring(model, clean, corrupted, metric, tokens_at_once, tell).edges(paths)


@gradients.enabled()
def eap_ig(
    model: Model,
    clean: Prompt,
    corrupted: Prompt,
    metric: AnyMetric,
    *,
    steps: int = 5,
    kind: Kind = "inputs",
    points: Points = "midpoint",
    tokens_at_once: int = gradients.TOKENS_AT_ONCE,
    tell: Callable[[str], None] = lambda text: None,
) -> Edges:
    """Score every edge by attribution patching with integrated gradients.

    Args:
        model: A decoder-only model.
        clean: Prompts on which the metric is to be explained.
        corrupted: As many prompts, token by token as long as the clean ones.
        metric: What is attributed.
        steps: Points of a path, m; not used by ``"clean_corrupted"``.
        kind: What moves along the path: ``"inputs"``, ``"activations"`` or ``"clean_corrupted"``; see the module.
        points: Where the m points lie: ``"midpoint"``, or ``"left"`` and ``"right"`` as in official code.
        tokens_at_once: Tokens run at once with gradients; lower it where memory runs out.
        tell: Called with progress.

    Returns:
        Scores that estimate what corrupting an edge does: negative where the edge raises the metric. (A
        :class:`~headlab.causal.Circuit` made of them turns the sign.)

    Raises:
        PromptError: Clean and corrupted prompts do not match.
        PlanError: The metric has no gradient or is not finite, or there is no such kind of path.
        UnsupportedError: The architecture has no edges from single heads, or the model no language-model head.
    """
    paths = paths_of(kind, steps, points)
    return _Scoring(model, clean, corrupted, metric, tokens_at_once, tell).edges(paths)


@dataclass(frozen=True)
class Paths:
    """Where gradients are taken.

    Attributes:
        name: The method.
        kind: What moves; None: nothing does.
        at: Shares of the way from corrupted to clean, weighed alike.
    """

    name: str
    kind: Kind | None
    at: tuple[float, ...]


def paths_of(kind: Kind, steps: int, points: Points) -> Paths:
    """The points of a path.

    Raises:
        PlanError: There is no such path.
    """
    at = gradients.shares(steps, points)
    if kind == "clean_corrupted":
        return Paths("EAP-IG (clean and corrupted)", kind, (0.0, 1.0))
    if kind not in ("inputs", "activations"):
        raise PlanError(f"kind={kind!r} must be 'inputs', 'activations' or 'clean_corrupted'")
    return Paths(f"EAP-IG ({kind}), {steps} {points} steps", kind, at)


class _Scoring:
    """Scores of all edges of one model on some pairs of prompts."""

    def __init__(
        self,
        model: Model,
        clean: Prompt,
        corrupted: Prompt,
        metric: AnyMetric,
        tokens_at_once: int,
        tell: Callable[[str], None],
    ) -> None:
        self.model, self.tokens_at_once, self.tell = model, tokens_at_once, tell
        checked = pairs(model, clean, corrupted)
        self.clean, self.corrupted = checked.clean, checked.corrupted
        bound = gradients.differentiable(as_metric(metric).bind(model, self.clean))
        self.metric, values = gradients.referred(
            model, bound, self.clean, self.corrupted, tokens_at_once
        )
        self.stream = readers.stream_of(model, self.clean, self.metric)
        self.graph = Graph(model.spec, self.stream.parallel)
        #: What corruption makes of the metric, a mean over prompts.
        self.change = float(values[1].mean() - values[0].mean())
        self.about = {
            "metric": bound.name,
            "model": model.name,
            "n_prompts": len(self.clean),
            "clean": float(values[0].mean()),
            "corrupted": float(values[1].mean()),
        }

    def edges(self, paths: Paths) -> Edges:
        """The scores along some paths."""
        import pandas as pd

        n_inputs, n_sources = self.graph.full.shape
        scores = torch.zeros(n_inputs, n_sources, dtype=torch.float64)
        tokens = self.clean.shape[1] * len(paths.at)
        for prompts in gradients.chunks(len(self.clean), tokens, self.tokens_at_once):
            self.tell(f"{paths.name}: prompt {int(prompts[0]) + 1} of {len(self.clean)}")
            batch = _Batch(self, prompts, paths)
            for moved in batch.runs():
                scores += batch.scores(*moved)
        scores /= len(self.clean)
        rows, columns = self.graph.full.nonzero(as_tuple=True)
        frame = pd.DataFrame(self.graph.edges, columns=["source", "target", "input"])
        frame["score"] = scores[rows, columns].numpy()
        order = frame["score"].abs().sort_values(ascending=False, kind="stable").index
        about = {"method": paths.name, **self.about}
        change = self.change
        if paths.kind == "inputs" and change:
            total = frame.loc[frame["source"] == "embed", "score"].sum()
            about["completeness"] = float(total) / change
        return Edges(frame.loc[order].reset_index(drop=True), about)


class _Batch:
    """Some prompts that run together."""

    def __init__(self, scoring: _Scoring, prompts: Tensor, paths: Paths) -> None:
        self.scoring, self.prompts, self.paths = scoring, prompts, paths
        self.model, self.graph = scoring.model, scoring.graph
        self.ends = tuple(
            gradients.chosen(ids, prompts) for ids in (scoring.corrupted, scoring.clean)
        )
        layers = range(self.model.spec.n_layers)
        sites: dict[Site, Sequence[int]] = {"z": layers, "mlp_out": layers, "resid_pre": [0]}
        with torch.no_grad():
            self.written = [record(self.model, ids, sites).values for ids in self.ends]
        self.real = (self.ends[1] >= 0)[:, :, None]
        self._ready: dict[str, Tensor] = {}
        each = len(self.graph.sources) * self.ends[1].numel() * self.model.spec.d_model
        self._keeps = each * 4 <= _READY_BYTES

    # -- what sources change -----------------------------------------------------------------------------------------

    def sources(self) -> list[Group]:
        """Groups of sources: the embedding, and by layer its heads and its MLP."""
        layers = range(self.model.spec.n_layers)
        written: tuple[Site, ...] = ("z", "mlp_out")
        return [("resid_pre", 0), *((site, layer) for layer in layers for site in written)]

    def columns(self, site: str, layer: int) -> slice:
        """Columns of a group of sources."""
        if site == "resid_pre":
            return slice(0, 1)
        mlp = self.graph.column(f"mlp{layer}")
        return (
            slice(mlp - self.model.spec.layers[layer].n_heads, mlp)
            if site == "z"
            else slice(mlp, mlp + 1)
        )

    def change(self, site: str, layer: int) -> Float[Tensor, "source rest"]:
        """What corruption changes in what each source of a group adds to the stream, over all prompts and positions."""
        key = f"{site}{layer}"
        if key not in self._ready:
            corrupted, clean = (wide(values[site][layer]) for values in self.written)
            moved = corrupted - clean
            by_head = site == "z"
            moved = (
                readers.head_results(self.model, layer, moved) if by_head else moved[:, :, 0][None]
            )
            flat = torch.where(self.real.to(moved.device), moved, 0.0).flatten(1)
            if not self._keeps:
                return flat
            self._ready[key] = flat
        return self._ready[key]

    # -- gradients at what reads -------------------------------------------------------------------------------------

    def runs(self) -> Iterator[tuple[Recording, BySite, list[Group]]]:
        """Runs with gradients, and the groups of sources whose edges each one scores."""
        ids = self.ends[1].repeat(len(self.paths.at), 1)
        if self.paths.kind != "activations":
            embeddings = None
            if self.paths.kind is not None:
                first, last = (gradients.embeddings_of(self.model, end) for end in self.ends)
                embeddings = gradients.between(first, last, self.paths.at)
            yield (*self._run(ids, 0, (), embeddings), self.sources())
            return
        for site, layer in self.sources():
            first, last = (values[site][layer] for values in self.written)
            edit = _moved(site, layer, gradients.between(first, last, self.paths.at))
            start = 0 if site == "resid_pre" else layer + (site == "mlp_out")
            yield (*self._run(ids, start, (edit,), None), [(site, layer)])

    def _run(
        self, ids: Tensor, start: int, edits: Sequence[Edit], embeddings: Tensor | None
    ) -> tuple[Recording, BySite]:
        metric, layers = self.scoring.metric, range(start, self.model.spec.n_layers)
        sites = readers.reading_sites(self.model, layers)
        run = record(
            self.model, ids, sites, metric.needs, edits=edits, embeddings=embeddings, grad=True
        )
        rows = self.prompts.repeat(len(self.paths.at))
        total = run.metric(metric, rows).sum()
        return run, run.slopes(total, keep_graph=True)

    def scores(
        self, run: Recording, slopes: BySite, groups: list[Group]
    ) -> Float[Tensor, "input source"]:
        """Scores of the edges that leave some groups of sources, summed over prompts."""
        found = torch.zeros(self.graph.full.shape, dtype=torch.float64)
        for row, gradient in self._readers(run, slopes, groups):
            flat = self._mean(gradient)
            for site, layer in groups:
                columns = self.columns(site, layer)
                if columns.stop <= self.graph.n_upstream[row.start]:
                    change = self.change(site, layer).to(flat.device)
                    found[row, columns] = (flat @ change.T).cpu().double()
        return found

    def _readers(
        self, run: Recording, slopes: BySite, groups: list[Group]
    ) -> Iterator[tuple[slice, Float[Tensor, "input row position d_model"]]]:
        """Rows of the graph's inputs, and the gradients at them, where any of these sources reaches them."""
        first = self.columns(*groups[0]).stop
        for layer in sorted(run.values["q"]):
            rows = self.graph.rows(layer)
            if self.graph.n_upstream[rows.start] >= first:
                n = (rows.stop - rows.start) // 3
                for at, site in enumerate(readers.HEAD_SITES):
                    parts = readers.head_input_gradients(run, slopes, layer, site)
                    start = rows.start + at * n
                    yield slice(start, start + n), torch.stack(list(parts))
            row = self.graph.row(f"mlp{layer}")
            if self.graph.n_upstream[row] >= first:
                part = readers.mlp_input_gradient(run, slopes, layer, self.scoring.stream)
                yield slice(row, row + 1), part[None]
        row = self.graph.row("logits")
        (last,) = slopes["resid_post"].values()
        yield slice(row, row + 1), last[:, :, 0][None]

    def _mean(self, gradient: Float[Tensor, "input row position d"]) -> Float[Tensor, "input rest"]:
        """The mean over the points of the path."""
        points = gradient.unflatten(1, (len(self.paths.at), -1))
        return torch.where(self.real.to(points.device), wide(points).mean(1), 0.0).flatten(1)


def _moved(site: Site, layer: int, value: Float[Tensor, "row position head width"]) -> Edit:
    """An edit that puts values in place of a layer's own."""
    return editing.apply(f"{layer}.*", lambda x, where: value, site)
