"""Information flow routes (Ferrando and Voita 2024, *Information flow routes*): what each token's stream is made of.

Where a vector is a sum, y = Σ_j x_j, a part counts by how much nearer it brings y to nothing, in the L1 norm,

    importance(x_j) = max(‖y‖₁ − ‖y − x_j‖₁, 10⁻⁵),  divided by the sum over j.

In an attention block y is the stream after attention at a query, and its parts are what each head brings from each
key, e[k, h] = pattern[h, k] · v[k] W_O^h, and the stream before, all weighed together; in an MLP block, what the MLP
gives and the stream before. Edges above a threshold, followed down from a position of the last layer, are the routes.

The bias b_O is no part, so parts need not sum to y. Keys that a query cannot see are no parts either (the paper's code
gives each of them the floor of 10⁻⁵). Two faults of that code are not here: it adds b_V to values that hold it already,
harmless only where biases were folded away before, and reads the wrong prompt of a batch. Where a norm stands between
attention and stream it is held at the scale it had (:mod:`headlab.models.stream_norm`). In parallel blocks, where the
MLP does not read attention's output, which the paper does not treat, heads, MLP and the stream before are weighed
together as the parts of the stream after the block.

The importances look at one prompt without an alternative: what is needed to tell two answers apart is no question to
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headlab.arguments import finite_number, is_integer
from headlab.attention import ablate, keep
from headlab.attention.trace import Trace
from headlab.causal.attribution.direct import agree
from headlab.errors import PlanError, PromptError
from headlab.models.stream_norm import frozen
from headlab.prompts import Prompt

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

FLOOR = 1e-5
#: Bytes the importances of one prompt may take, and those one pass may capture.
_LIMIT, _BUDGET = 1 << 31, 1 << 28
#: Numbers of one [query, key, d_model] block.
_BLOCK = 1 << 22


class Node(NamedTuple):
    """A place in the graph: ``"stream"`` after a block (layer −1: the embeddings), ``"mid"`` between attention and
    MLP, or ``"mlp"``."""

    kind: Literal["stream", "mid", "mlp"]
    layer: int
    position: int


@dataclass(frozen=True)
class InformationFlow:
    """Importances of one prompt; each token's parts sum to 1.

    Attributes:
        tokens: The prompt's tokens as text.
        attention: Of what each head brings from each key; 0 where there is nothing.
        residual: Of the stream before.
        mlp: Of what the MLP gives; in parallel blocks, among the heads' parts.
        parallel: Whether blocks are parallel. If so, attention, residual and mlp sum to 1 together; if not,
            attention and residual do, and the stream before the MLP counts for 1 − mlp.
    """

    tokens: tuple[str, ...]
    attention: Float[np.ndarray, "layer head query key"]
    residual: Float[np.ndarray, "layer query"]
    mlp: Float[np.ndarray, "layer query"]
    parallel: bool

    @cached_property
    def edges(self) -> Float[np.ndarray, "layer query key"]:
        """From each key's stream to each query's: heads summed, and the stream before on the diagonal."""
        summed = self.attention.sum(1)
        own = np.arange(summed.shape[-1])
        summed[:, own, own] += self.residual
        return summed

    @cached_property
    def heads(self) -> Float[np.ndarray, "layer head query"]:
        """Of each head: summed over keys."""
        return self.attention.sum(-1)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line per head: layer, head, value (mean over queries)."""
        import pandas as pd

        layer, head = np.indices(self.heads.shape[:2]).reshape(2, -1)
        return pd.DataFrame({"layer": layer, "head": head, "value": self.heads.mean(-1).ravel()})

    def __repr__(self) -> str:
        layers, heads = self.attention.shape[:2]
        rows = self.frame.nlargest(5, "value").itertuples(index=False, name=None)
        largest = ", ".join(f"L{layer}H{head} {value:.3g}" for layer, head, value in rows)
        return (
            f"InformationFlow of {len(self.tokens)} tokens through {layers} layers of {heads} heads\n"
            f"  most important heads, mean over queries: {largest}"
        )

    def routes(self, position: int = -1, threshold: float = 0.01) -> Routes:
        """The part of the graph reached from a position of the last layer over edges above a threshold.

        Args:
            position: Where to start; negative ones count from the end.
            threshold: Importance an edge must exceed.

        Raises:
            PlanError: There is no such position, or the threshold is no finite number.
        """
        n = len(self.tokens)
        finite_number(threshold, "threshold")
        if not is_integer(position):
            raise PlanError(f"position={position!r:.60} must be a whole number")
        if not -n <= position < n:
            raise PlanError(f"there is no position {position} in a prompt of {n} tokens")
        start = Node("stream", len(self.edges) - 1, position % n)
        seen, stack = {start}, [start]
        found: list[tuple[Node, Node, str, float]] = []
        while stack:
            target = stack.pop()
            for source, kind, importance in self._into(target):
                if importance > threshold:
                    found.append((source, target, kind, importance))
                    if source not in seen:
                        seen.add(source)
                        stack.append(source)
        return Routes(self, start, threshold, tuple(sorted(seen)), tuple(found))

    def _into(self, node: Node) -> Iterator[tuple[Node, str, float]]:
        """The edges into a node."""
        kind, layer, q = node
        if layer < 0:
            return
        mid = Node("stream", layer - 1, q) if self.parallel else Node("mid", layer, q)
        mlp = float(self.mlp[layer, q])
        if kind == "mlp":
            yield mid, "mlp", mlp
            return
        if kind == "stream":
            yield Node("mlp", layer, q), "mlp", mlp
            if not self.parallel:
                yield mid, "residual", 1 - mlp
                return
        for k in np.flatnonzero(self.edges[layer, q]).tolist():
            yield Node("stream", layer - 1, k), "attention", float(self.edges[layer, q, k])


@dataclass(frozen=True)
class Routes:
    """A subgraph of an :class:`InformationFlow`.

    Attributes:
        flow: What it is part of.
        start: The node it was followed down from.
        threshold: Importance its edges exceed.
        nodes: Its nodes.
        links: Its edges ``(source, target, kind, importance)``; kind is ``"attention"`` (heads summed, with the stream
            before where source and target are one position), ``"mlp"`` or ``"residual"`` (past the MLP).
    """

    flow: InformationFlow
    start: Node
    threshold: float
    nodes: tuple[Node, ...]
    links: tuple[tuple[Node, Node, str, float], ...]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line per edge: kind, layer, source, source_position, target, target_position, importance, and of
        attention edges head and head_importance of the head that brings most."""
        import pandas as pd

        rows = []
        for source, target, kind, importance in self.links:
            head, most = -1, np.nan
            if kind == "attention":
                brought = self.flow.attention[target.layer, :, target.position, source.position]
                head, most = int(brought.argmax()), float(brought.max())
            rows.append((kind, target.layer, source.kind, source.position, target.kind, target.position,
                         importance, head, most))  # fmt: skip
        columns = ["kind", "layer", "source", "source_position", "target", "target_position",
                   "importance", "head", "head_importance"]  # fmt: skip
        return pd.DataFrame(rows, columns=columns)

    @cached_property
    def heads(self) -> pd.DataFrame:
        """One line per head and attention edge on which it exceeds the threshold by itself: layer, head, query, key,
        importance."""
        import pandas as pd

        places = [(target.layer, target.position, source.position)
                  for source, target, kind, _ in self.links if kind == "attention"]  # fmt: skip
        rows = [
            (layer, int(head), q, k, float(self.flow.attention[layer, head, q, k]))
            for layer, q, k in places
            for head in np.flatnonzero(self.flow.attention[layer, :, q, k] > self.threshold)
        ]
        return pd.DataFrame(rows, columns=["layer", "head", "query", "key", "importance"])

    def __repr__(self) -> str:
        tokens = self.flow.tokens
        moved = [link for link in self.links if link[0].position != link[1].position]
        largest = "; ".join(
            f"layer {to.layer}: {tokens[source.position]!r} at {source.position} → "
            f"{tokens[to.position]!r} at {to.position} {importance:.3g}"
            for source, to, _, importance in sorted(moved, key=lambda link: -link[3])[:4]
        )
        return (
            f"Routes from {tokens[self.start.position]!r} at {self.start.position}: {len(self.nodes)} nodes, "
            f"{len(self.links)} edges above {self.threshold:g}\n"
            f"  largest between positions: {largest or 'none'}"
        )


def proximity(
    parts: Float[Tensor, "*row part d"], whole: Float[Tensor, "*row d"]
) -> Float[Tensor, "*row part"]:
    """Importance of the parts of a vector (the paper's equation for L1 proximity), summing to 1."""
    raw = _nearer(parts, whole[..., None, :])
    return raw / raw.sum(-1, keepdim=True)


@torch.no_grad()
def information_flow(
    model: Model,
    prompt: Prompt,
    *,
    tau: float = 0.0,
    tell: Callable[[str], None] = lambda text: None,
) -> InformationFlow:
    """Importances of every head, MLP and residual connection at every token of one prompt.

    Memory grows with layers · heads · tokens², as that of every pattern does; what heads write, [query, key, d_model],
    is made a block at a time. Time grows with that times d_model.

    Args:
        model: A decoder-only model.
        prompt: One prompt.
        tau: Importances that do not exceed this are set to 0 and the others made to sum to 1 again.
        tell: Told how far it is.

    Raises:
        PromptError: There are several prompts.
        PlanError: tau is not in [0, 1), or the prompt is too long.
        UnsupportedError: The stream of this model is no sum of what heads and MLPs give.
    """
    if not 0 <= finite_number(tau, "tau") < 1:
        raise PlanError(f"tau={tau!r} must lie in [0, 1)")
    ids = model.tokens(prompt)
    if len(ids) != 1:
        raise PromptError(f"information flow takes one prompt, not {len(ids)}; go through them")
    spec, n = model.spec, ids.shape[1]
    needed = 4 * spec.n_layers * spec.n_heads * n * n
    if needed > _LIMIT:
        raise PlanError(
            f"the importances of {n} tokens would take {needed / 2**30:.1f} GiB; shorten the prompt to "
            f"{int(n * (_LIMIT / needed) ** 0.5)} tokens"
        )
    parallel = not _mlp_reads_attention(model, ids)
    attention = np.zeros((spec.n_layers, spec.n_heads, n, n), np.float32)
    residual, mlp = (np.zeros((spec.n_layers, n), np.float32) for _ in range(2))
    per_layer = 4 * n * (spec.n_heads * n + 5 * spec.d_model + 2 * spec.n_heads * spec.d_value)
    at_once = max(1, _BUDGET // per_layer)
    for start in range(0, spec.n_layers, at_once):
        layers = list(range(start, min(start + at_once, spec.n_layers)))
        names = ("pattern", "v", "z", "resid_pre", "attn_out", "mlp_out", "resid_post")
        trace = model.trace(ids, keep=keep.tensors(*names, layers=layers), logits="none")
        for layer in layers:
            tell(f"information flow: layer {layer} of {spec.n_layers}")
            heads, rest, given = _block(model, trace, layer, parallel, tau)
            attention[layer, : len(heads)] = heads.cpu().numpy()
            residual[layer], mlp[layer] = rest.cpu().numpy(), given.cpu().numpy()
    return InformationFlow(model.token_texts(ids)[0], attention, residual, mlp, parallel)


def _block(
    model: Model, trace: Trace, layer: int, parallel: bool, tau: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Importances of one block: of heads [head, query, key], of the stream before [query] and of the MLP [query]."""
    kind = torch.promote_types(model.dtype, torch.float32)
    names = ("resid_pre", "attn_out", "mlp_out", "resid_post")
    pre, attn, mlp, post = (trace.tensor(name, layer)[0].to(kind) for name in names)
    agree(
        pre + attn + mlp,
        post,
        pre.abs() + attn.abs() + mlp.abs(),
        model,
        f"the stream after layer {layer} is not the sum of what enters it and what attention and MLP give",
    )
    whole = post if parallel else pre + attn
    parts = _brought(model, trace, layer, attn)
    brought = torch.stack([_of_head(rows, vectors, whole) for rows, vectors in parts])
    if parallel:
        heads, (before, given) = _joint(brought, [_lone(pre, post), _lone(mlp, post)], tau)
    else:
        heads, (before,) = _joint(brought, [_lone(pre, whole)], tau)
        _, (given, _) = _joint(brought[:0], [_lone(mlp, post), _lone(whole, post)], tau)
    return heads, before, given


def _brought(
    model: Model, trace: Trace, layer: int, attn: Float[Tensor, "query d_model"]
) -> Iterator[tuple[Float[Tensor, "query key"], Float[Tensor, "key d_model"]]]:
    """What each head adds to the stream, as ``rows[q, k] · vectors[k]``."""
    weights = model.weights
    v, z = (trace.tensor(name, layer)[0].to(attn) for name in ("v", "z"))
    pattern = trace.tensor("pattern", layer)[0].to(attn)
    w_o, b_o = weights.W_O(layer).to(attn), weights.b_O(layer)
    group = len(pattern) // v.shape[1]
    mixed = pattern @ v.transpose(0, 1).repeat_interleave(group, 0)
    agree(
        mixed.transpose(0, 1),
        z,
        z.abs(),
        model,
        f"z of layer {layer} is not the pattern times the values",
    )
    out = torch.einsum("qhd,hdm->qm", z, w_o)
    out = out if b_o is None else out + b_o.to(out)
    norm = model.blocks.attention_norm(layer)
    held = frozen(norm, out, f"the norm after attention of layer {layer}")
    factor = model.blocks.residual_multiplier
    agree(
        factor * held.apply(out),
        attn,
        factor * held.scale * held.gain.abs() * torch.einsum("qhd,hdm->qm", z.abs(), w_o.abs()),
        model,
        f"what heads of layer {layer} write is not what attention adds to its stream",
    )
    for head, rows in enumerate(pattern):
        yield rows * held.scale, factor * held.unscaled(v[:, head // group] @ w_o[head])


def _of_head(
    rows: Float[Tensor, "query key"],
    vectors: Float[Tensor, "key d_model"],
    whole: Float[Tensor, "query d_model"],
) -> Float[Tensor, "query key"]:
    """How much nearer each key's part brings the stream, in blocks of queries; 0 for keys that are not seen."""
    found = torch.zeros_like(rows)
    at_once = max(1, _BLOCK // vectors.numel())
    for start in range(0, len(rows), at_once):
        part = rows[start : start + at_once]
        raw = _nearer(part[..., None] * vectors, whole[start : start + at_once, None])
        found[start : start + at_once] = torch.where(part != 0, raw, 0)
    return found


def _nearer(
    parts: Float[Tensor, "*row part d"], whole: Float[Tensor, "*row #part d"]
) -> Float[Tensor, "*row part"]:
    """max(‖y‖₁ − ‖y − x‖₁, floor)."""
    return (whole.abs().sum(-1) - (whole - parts).abs().sum(-1)).clamp(min=FLOOR)


def _lone(part: Float[Tensor, "query d"], whole: Float[Tensor, "query d"]) -> Tensor:
    return _nearer(part[:, None], whole[:, None])[:, 0]


def _joint(
    heads: Float[Tensor, "head query key"], others: list[Float[Tensor, " query"]], tau: float
) -> tuple[Float[Tensor, "head query key"], Float[Tensor, "other query"]]:
    """Both as shares of their sum per query; those up to tau count nothing."""
    heads, rest = _shares(heads, torch.stack(others))
    if tau:
        heads, rest = _shares(heads.where(heads > tau, 0), rest.where(rest > tau, 0))
    return heads, rest


def _shares(heads: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    total = (heads.sum((0, 2)) + rest.sum(0)).clamp(min=1e-30)  # nothing may exceed tau
    return heads / total[:, None], rest / total


def _mlp_reads_attention(model: Model, ids: Tensor) -> bool:
    """Whether the first MLP gives something else when the heads of its block are silent."""
    plan = keep.tensors("mlp_out", layers=[0])
    with_heads = model.trace(ids[:, :2], keep=plan, logits="none").tensor("mlp_out", 0)
    with model.edit(ablate("0.*")):
        without = model.trace(ids[:, :2], keep=plan, logits="none").tensor("mlp_out", 0)
    return not torch.equal(with_heads, without)
