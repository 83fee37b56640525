"""A model as a graph: what writes to the residual stream, what reads it, and the edges in between.

*Sources* write: ``embed``, every query head (its result z·W_O) and every MLP. *Inputs* read: the q, k and v input of
every query head (keys and values of a group are read once per query head), every MLP and the logits. An edge says
that an input reads a source; there is one wherever the source comes first. An attention layer's output bias is
constant and belongs to no node.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from headlab.attention.heads import Head
from headlab.errors import PlanError
from headlab.models.spec import ModelSpec

EMBED, LOGITS = "embed", "logits"
HEAD_INPUTS = ("q", "k", "v")


class Edge(NamedTuple):
    """``source`` writes what ``input`` of ``target`` reads; nodes are ``embed``, ``L3H5``, ``mlp3``, ``logits``.

    ``input`` is q, k or v where the target is a head, and empty elsewhere.
    """

    source: str
    target: str
    input: str = ""

    def __str__(self) -> str:
        return f"{self.source} → {self.target}{f'.{self.input}' if self.input else ''}"


EdgeLike: TypeAlias = "Edge | tuple[str, str] | tuple[str, str, str]"


class Graph:
    """The graph of a decoder-only model.

    Args:
        spec: The model.
        parallel: Whether a block's MLP reads the stream before its attention, and so none of its heads.

    Attributes:
        sources: What writes to the stream, in the order it is computed.
        inputs: (node, input) of everything that reads it, in the same order.
        n_upstream: Sources that come before each input; they are the first of ``sources``.
    """

    def __init__(self, spec: ModelSpec, parallel: bool) -> None:
        self.spec = spec
        self.sources: list[str] = [EMBED]
        self.inputs: list[tuple[str, str]] = []
        self.n_upstream: list[int] = []
        for layer, facts in enumerate(spec.layers):
            heads = [str(Head(layer, head)) for head in range(facts.n_heads)]
            before = len(self.sources)
            for letter in HEAD_INPUTS:
                self._reads([(head, letter) for head in heads], before)
            self._reads([(f"mlp{layer}", "")], before if parallel else before + len(heads))
            self.sources += [*heads, f"mlp{layer}"]
        self._reads([(LOGITS, "")], len(self.sources))
        self._source_at = {name: at for at, name in enumerate(self.sources)}
        self._input_at = {name: at for at, name in enumerate(self.inputs)}

    def _reads(self, inputs: list[tuple[str, str]], n_upstream: int) -> None:
        self.inputs += inputs
        self.n_upstream += [n_upstream] * len(inputs)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Every edge, by input in the order inputs are computed, then by source."""
        return tuple(
            Edge(source, *target)
            for target, n in zip(self.inputs, self.n_upstream, strict=True)
            for source in self.sources[:n]
        )

    @property
    def full(self) -> Bool[Tensor, "input source"]:
        """Which edges exist."""
        return torch.arange(len(self.sources)) < torch.tensor(self.n_upstream)[:, None]

    def mask(self, edges: Iterable[EdgeLike]) -> Bool[Tensor, "input source"]:
        """A set of edges.

        Raises:
            PlanError: A node does not exist, or the target does not come after the source.
        """
        mask = torch.zeros(len(self.inputs), len(self.sources), dtype=torch.bool)
        for edge in edges:
            mask[self.place(edge)] = True
        return mask

    def place(self, edge: EdgeLike) -> tuple[int, int]:
        """Row and column of an edge in :meth:`mask`.

        Raises:
            PlanError: A node does not exist, or the target does not come after the source.
        """
        if not (isinstance(edge, tuple) and len(edge) in (2, 3)):
            raise PlanError(
                f"{edge!r:.80} is no edge; write ('L0H1', 'L2H3', 'k'), ('embed', 'mlp2') or ('mlp2', 'logits')"
            )
        source, target, letter = Edge(*(str(part) for part in edge))
        column, row = self._source_at.get(source), self._input_at.get((target, letter))
        if column is None:
            raise PlanError(
                f"nothing named {source!r} writes to the stream of {self.spec.name}; what writes is embed, heads "
                f"such as {self.sources[1]} and MLPs such as mlp0"
            )
        if row is None:
            raise PlanError(
                f"{self.spec.name} has no input {letter!r} of {target!r}; heads have q, k and v, MLPs and logits ''"
            )
        if column >= self.n_upstream[row]:
            raise PlanError(
                f"{source} does not come before {target} in {self.spec.name}, so there is no edge between them"
            )
        return row, column

    def rows(self, layer: int) -> slice:
        """Rows of a layer's head inputs in a mask: q of every head, then k, then v."""
        start = self._input_at[str(Head(layer, 0)), "q"]
        return slice(start, start + len(HEAD_INPUTS) * self.spec.layers[layer].n_heads)

    def row(self, node: str) -> int:
        """Row of an MLP's, or the logits', input in a mask."""
        return self._input_at[node, ""]

    def column(self, node: str) -> int:
        """Column of a source in a mask."""
        return self._source_at[node]
