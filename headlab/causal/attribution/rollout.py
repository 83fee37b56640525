"""Attention rollout and attention flow (Abnar and Zuidema 2020, *Quantifying attention flow in transformers*).

Both follow attention down to the input tokens and take each layer for edges between positions. With W_l the mean of a
layer's patterns over heads and r the share of the residual connection,

    A_l = r·I + (1 − r)·W_l,  rows then made to sum to 1,

which for r = ½ is the paper's row-normalised W + I. The rollout is R_0 = A_0, R_l = A_l R_{l−1}, and that of a single
head R(l, h) = W(l, h) R_{l−1}. The flow of layer l from position i to token j is the largest flow from node (l, i) to
input j where the edge from (m, a) to (m − 1, b) can carry A_m[a, b]: one maximum-flow problem per pair, for a library
to solve, divided by its sum over j.

Values, W_O and MLPs play no part. The paper's models are bidirectional and small. In decoders the first token gathers
what heads do not spend elsewhere, and a rollout compounds it: ``without_first`` leaves it out. Even so the rollout of a
deep decoder drifts to the earliest tokens, since no layer can lead later than it came; flow does so less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from headlab.arguments import finite_number, is_integer
from headlab.attention import Head, HeadsLike, keep, parse_heads
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.prompts import Prompt

if TYPE_CHECKING:
    from torch import Tensor

    from headlab.model import Model

#: The library's capacities are whole numbers, of this many units per 1: each edge is right to half a unit, a flow to
#: half a unit per edge of the smallest cut. What leaves a node, about 1, stays well below 2³¹.
FLOW_UNITS = 10**8
#: Longest prompt of :func:`attention_flow`, whose time grows with layers² · tokens⁴.
FLOW_TOKENS = 64
#: Bytes of patterns that one pass may capture.
_BUDGET = 1 << 28


@dataclass(frozen=True)
class Rollout:
    """Attention of each layer, rolled out to the input tokens of one prompt.

    Attributes:
        tokens: The prompt's tokens as text.
        values: The rollout; rows sum to 1.
        heads: The rollout of chosen heads; rows sum to 1, or to less where learned sinks take a part (gpt-oss).
    """

    tokens: tuple[str, ...]
    values: Float[np.ndarray, "layer query token"]
    heads: Mapping[Head, Float[np.ndarray, "query token"]]

    def __repr__(self) -> str:
        heads = f", and of {len(self.heads)} heads by themselves" if self.heads else ""
        return (
            f"Rollout of {len(self.tokens)} tokens through {len(self.values)} layers{heads}\n"
            f"  from the last token in the last layer: {_largest(self.tokens, self.values[-1, -1])}"
        )


@dataclass(frozen=True)
class Flow:
    """Attention flow of chosen layers and positions of one prompt.

    Attributes:
        tokens: The prompt's tokens as text.
        layers: Layers along the first axis.
        queries: Positions along the second.
        values: Flows, divided by their sum over tokens.
        raw: Flows, of at most 1.
    """

    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    queries: tuple[int, ...]
    values: Float[np.ndarray, "layer query token"]
    raw: Float[np.ndarray, "layer query token"]

    def __repr__(self) -> str:
        return (
            f"Flow of {len(self.tokens)} tokens from {len(self.layers)} layers and {len(self.queries)} positions\n"
            f"  from position {self.queries[-1]} in layer {self.layers[-1]}: "
            f"{_largest(self.tokens, self.values[-1, -1])}"
        )


def _largest(tokens: Sequence[str], shares: Float[np.ndarray, " token"]) -> str:
    order = np.argsort(-shares, kind="stable")[:5]
    return ", ".join(f"{tokens[at]!r} at {at} {shares[at]:.3g}" for at in order)


# -- the definitions ---------------------------------------------------------------------------------------------------


def with_residual(
    pattern: Float[np.ndarray, "*layer query key"], share: float = 0.5
) -> Float[np.ndarray, "*layer query key"]:
    """A_l of mean patterns: the residual connection in, rows made to sum to 1.

    Where learned sinks leave rows that sum to less, the residual connection gains.
    """
    _check_share(share)
    joined = share * np.eye(pattern.shape[-1]) + (1 - share) * pattern
    return np.asarray(joined / joined.sum(-1, keepdims=True))


def _check_share(share: float) -> None:
    if not 0 <= finite_number(share, "residual_share") <= 1:
        raise PlanError(f"residual_share={share!r} must lie in [0, 1]")


def without_first_token(
    pattern: Float[np.ndarray, "*head query key"],
) -> Float[np.ndarray, "*head query key"]:
    """Rows over the other keys, made to sum to what they did; a row that sees no other looks at its own position."""
    own = np.eye(pattern.shape[-1])
    rest = pattern.copy()
    rest[..., 0] = 0
    left = rest.sum(-1, keepdims=True)
    spread = rest / np.where(left > 0, left, 1)
    return np.where(left > 0, spread, own) * pattern.sum(-1, keepdims=True)


def rolled_out(
    steps: Float[np.ndarray, "layer query key"],
) -> Float[np.ndarray, "layer query token"]:
    """R_l of the A_l."""
    found = [steps[0]]
    for step in steps[1:]:
        found.append(step @ found[-1])
    return np.stack(found)


def largest_flows(
    steps: Float[np.ndarray, "layer query key"], layer: int, query: int
) -> Float[np.ndarray, " token"]:
    """Maximum flow from one position of a layer to each input token, to :data:`FLOW_UNITS`."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    n = steps.shape[-1]
    capacity = np.rint(steps[: layer + 1] * FLOW_UNITS).astype(np.int32)
    at, a, b = np.nonzero(capacity)
    # Node (m, i) is number (m + 1)·n + i; inputs are layer −1.
    edges = (capacity[at, a, b], ((at + 1) * n + a, at * n + b))
    graph = csr_array(edges, shape=((layer + 2) * n,) * 2, dtype=np.int32)
    source = (layer + 1) * n + query
    reached = rolled_out(steps[: layer + 1] > 0)[-1][query]  # no path, no problem to solve
    flows = [
        maximum_flow(graph, source, token).flow_value if reached[token] else 0 for token in range(n)
    ]
    return np.array(flows) / FLOW_UNITS


# -- of a model --------------------------------------------------------------------------------------------------------


def attention_rollout(
    model: Model,
    prompt: Prompt,
    *,
    residual_share: float = 0.5,
    without_first: bool = False,
    heads: HeadsLike | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Rollout:
    """Roll attention out to the input tokens.

    Args:
        model: A decoder-only or encoder-only model.
        prompt: One prompt.
        residual_share: Weight r of the residual connection.
        without_first: Leave the first token out of every pattern. In decoders it is wanted: with the first token, the
            attention sink, nearly everything rolls out to it.
        heads: Heads to roll out one by one as well.
        tell: Told how far it is.

    Raises:
        PromptError: There are several prompts.
        PlanError: The residual share is not in [0, 1].
        HeadError: A head does not exist.
        UnsupportedError: The model has an encoder and a decoder.
    """
    _check_share(residual_share)
    chosen = parse_heads(heads, model.spec) if heads is not None else ()
    ids = _one_prompt(model, prompt)
    steps: list[np.ndarray] = []
    alone: dict[Head, np.ndarray] = {}
    for layer, pattern in _patterns(model, ids, without_first, tell):
        steps.append(with_residual(pattern.mean(0), residual_share))
        alone |= {head: pattern[head.head] for head in chosen if head.layer == layer}
    values = rolled_out(np.stack(steps))
    traced = {
        head: pattern @ values[head.layer - 1] if head.layer else pattern
        for head, pattern in alone.items()
    }
    return Rollout(model.token_texts(ids)[0], values, traced)


def attention_flow(
    model: Model,
    prompt: Prompt,
    *,
    layers: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
    residual_share: float = 0.5,
    without_first: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Flow:
    """The largest flow of attention from positions to the input tokens.

    Args:
        model: A decoder-only or encoder-only model.
        prompt: One prompt of at most :data:`FLOW_TOKENS` tokens.
        layers: Layers to start from; all by default.
        queries: Positions to start from, negative ones from the end; all by default. Each layer and position takes a
            maximum-flow problem per token.
        residual_share: Weight r of the residual connection.
        without_first: Leave the first token out of every pattern.
        tell: Told how far it is.

    Raises:
        PromptError: There are several prompts, or the prompt is too long.
        PlanError: A layer or position does not exist, or the residual share is not in [0, 1].
        UnsupportedError: The model has an encoder and a decoder.
    """
    _check_share(residual_share)
    ids = _one_prompt(model, prompt)
    n = ids.shape[1]
    if n > FLOW_TOKENS:
        raise PromptError(
            f"attention flow over {n} tokens would take too long, since its time grows with their fourth power; "
            f"shorten the prompt to {FLOW_TOKENS} tokens, or use attention_rollout"
        )
    depth = model.spec.n_layers
    at_layers = _resolved("layers", layers, depth)
    at_queries = _resolved("queries", queries, n)
    patterns = _patterns(model, ids, without_first, tell)
    steps = np.stack([with_residual(pattern.mean(0), residual_share) for _, pattern in patterns])
    raw = np.zeros((len(at_layers), len(at_queries), n))
    for row, layer in enumerate(at_layers):
        tell(f"attention flow: layer {layer}, {row} of {len(at_layers)} layers done")
        raw[row] = [largest_flows(steps, layer, query) for query in at_queries]
    values = raw / raw.sum(-1, keepdims=True)
    return Flow(model.token_texts(ids)[0], at_layers, at_queries, values, raw)


def _patterns(
    model: Model, ids: Tensor, without_first: bool, tell: Callable[[str], None]
) -> Iterator[tuple[int, Float[np.ndarray, "head query key"]]]:
    """Each layer's patterns in float64, from passes that capture a few layers each."""
    spec, n = model.spec, ids.shape[1]
    at_once = max(1, _BUDGET // (4 * spec.n_heads * n * n))
    for start in range(0, spec.n_layers, at_once):
        layers = range(start, min(start + at_once, spec.n_layers))
        trace = model.trace(ids, keep=keep.tensors("pattern", layers=layers), logits="none")
        for layer in layers:
            pattern = trace.tensor("pattern", layer)[0].double().cpu().numpy()
            yield layer, without_first_token(pattern) if without_first else pattern
        tell(f"patterns of {layers.stop} of {spec.n_layers} layers")


def _one_prompt(model: Model, prompt: Prompt) -> Tensor:
    if len({facts.stack for facts in model.spec.layers}) > 1:
        raise UnsupportedError(
            f"{model.name} ({model.spec.family}) has an encoder and a decoder, whose attention forms no single "
            "stack of layers to roll out"
        )
    ids = model.tokens(prompt)
    if len(ids) != 1:
        raise PromptError(f"this takes one prompt, not {len(ids)}; go through them one by one")
    return ids


def _resolved(label: str, given: Sequence[int] | None, n: int) -> tuple[int, ...]:
    wanted: Any = range(n) if given is None else given
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise PlanError(f"{label}={given!r:.60} must be a list of whole numbers")
    wanted = list(wanted)
    if not wanted:
        raise PlanError(f"{label}=[] names none; leave it out for all {n}")
    for at in wanted:
        if not is_integer(at):
            raise PlanError(f"{label} names {at!r:.60}, which is no whole number")
        if not -n <= at < n:
            raise PlanError(f"{label} names {at}, but there are {n}, 0–{n - 1}")
    return tuple(index(at) % n for at in wanted)
