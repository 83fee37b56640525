"""Circuits: the edges, or the heads, of a model that matter for a metric, with a score each.

A circuit of edges holds edges of :class:`~headlab.causal.graph.Graph`; its nodes are their ends. A circuit of heads
holds heads only; every MLP, the embedding and the logits count as part of it. A circuit is a ranking as much as a set:
what :meth:`Circuit.top` leaves is what :mod:`headlab.causal.circuits.faithfulness` tests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from headlab.arguments import is_finite, whole_number
from headlab.attention import Head
from headlab.causal.circuits.given_scores import (
    scores_of_edges,
    scores_of_effects,
    scores_of_heads,
)
from headlab.causal.graph import EMBED, HEAD_INPUTS, LOGITS, Edge, EdgeLike
from headlab.errors import OutputError, PlanError
from headlab.shards import write_text

if TYPE_CHECKING:
    import pandas as pd

    from headlab.causal.attribution.eap import Edges
    from headlab.causal.effects import Effects
    from headlab.model import Model

Kind: TypeAlias = Literal["edges", "heads"]
Ranking: TypeAlias = Literal["score", "absolute"]
_NODE = re.compile(
    r"(?:embed|logits|mlp(?P<mlp>0|[1-9][0-9]{0,8})|L(?P<layer>0|[1-9][0-9]{0,8})H(?P<head>0|[1-9][0-9]{0,8}))\Z"
)


@dataclass(frozen=True)
class Circuit:
    """Edges or heads with scores; make one with :meth:`of_edges`, :meth:`of_heads` or :meth:`from_json`.

    Attributes:
        kind: ``"edges"`` or ``"heads"``.
        scores: Score of each :class:`~headlab.causal.graph.Edge`, or of each head (``"L3H2"``); what raises the metric
            has a positive one.
        model: Name of the model it was found in.
        fingerprint: That model's weights.
        n_heads: Query heads of each layer.
        parallel: Whether a block's MLP reads the stream before its attention, and so none of its heads.
        metric: What was measured.
        method: How the scores were found.

    Raises:
        PlanError: A node does not exist, an edge runs backward, or a score is not finite.
    """

    kind: Kind
    scores: Mapping[Any, float] = field(repr=False)
    model: str
    fingerprint: str
    n_heads: tuple[int, ...]
    parallel: bool = False
    metric: str = ""
    method: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("edges", "heads"):
            raise PlanError(f"a circuit is of 'edges' or 'heads', not of {self.kind!r}")
        if not isinstance(self.scores, Mapping):
            raise PlanError(f"scores={self.scores!r:.60} must map {self.kind} to their scores")
        for item, score in self.scores.items():
            self._check(item)
            if not is_finite(score):
                raise PlanError(
                    f"the score of {_shown(item)} is {score!r:.60}; scores must be finite numbers"
                )

    @classmethod
    def of_edges(
        cls,
        model: Model,
        scores: Mapping[EdgeLike, float] | Edges,
        *,
        parallel: bool | None = None,
        metric: str = "",
        method: str = "",
    ) -> Circuit:
        """A circuit of a model's edges.

        Args:
            model: The model.
            scores: As ``{("L0H1", "L2H3", "k"): 0.2, ("mlp2", "logits"): 0.1}``, positive where the edge raises the
                metric; or what ``hl.causal.eap_ig`` gives, whose scores, changes made by *corrupting* an edge, change
                their sign.
            parallel: Whether a block's MLP reads none of its heads; by default as a complete list of edges shows, and
                not where the list is not complete.
            metric: What was measured.
            method: How the scores were found.

        Raises:
            PlanError: A node does not exist, an edge runs backward, or a score is not finite.
        """
        from headlab.causal.attribution.eap import Edges

        if isinstance(scores, Edges):
            method = method or str(scores.about.get("method", ""))
            metric = metric or str(scores.about.get("metric", ""))
            values = -scores.frame["score"].to_numpy()
            scores = dict(zip(scores.edges, values.tolist(), strict=True))
        named = scores_of_edges(scores)
        n_heads = tuple(each.n_heads for each in model.spec.layers)
        if parallel is None:
            within = any(
                e.target[:3] == "mlp" and e.source.startswith(f"L{e.target[3:]}H") for e in named
            )
            parallel = not within and len(named) == count_edges(n_heads, True, n_heads)
        facts = model.name, model.fingerprint, n_heads
        return cls("edges", named, *facts, parallel, metric, method)

    @classmethod
    def of_heads(
        cls,
        model: Model,
        scores: Mapping[Any, float] | Effects,
        *,
        metric: str = "",
        method: str = "",
    ) -> Circuit:
        """A circuit of a model's heads.

        Args:
            model: The model.
            scores: As ``{"L3H2": 0.4, (5, 0): -0.1}``, positive where the head raises the metric; or the effects of
                ablating or patching heads, whose sign changes unless they restored a clean value (denoising). An effect
                of a key/value group is the score of each of its heads.
            metric: What was measured.
            method: How the scores were found.

        Raises:
            HeadError: A head does not exist.
            PlanError: Two names are one head, effects are of whole layers, or a score is not finite.
        """
        from headlab.causal.effects import Effects

        if isinstance(scores, Effects):
            method = method or str(scores.about.get("did", ""))
            metric = metric or str(scores.about.get("metric", ""))
            scores = dict(scores_of_effects(model, scores))
        named = scores_of_heads(model, scores)
        facts = model.name, model.fingerprint, tuple(each.n_heads for each in model.spec.layers)
        return cls("heads", named, *facts, metric=metric, method=method)

    # -- what is in it -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.scores)

    def __repr__(self) -> str:
        about = ", ".join(filter(None, (self.model, self.metric, self.method)))
        largest = self.top(5, "absolute")
        shown = (largest.edges if self.kind == "edges" else largest.scores).items()
        most = ", ".join(f"{item} {score:.3g}" for item, score in shown)
        return f"Circuit of {len(self)} of {self.n_possible} {self.kind}: {about}\n  largest: {most or 'none'}"

    @property
    def edges(self) -> dict[Edge, float]:
        """Edges with their scores.

        Raises:
            PlanError: It is a circuit of heads.
        """
        if self.kind != "edges":
            raise PlanError(
                "this is a circuit of heads, which has no edges; find one with hl.causal.eap_ig"
            )
        return {Edge(*edge): score for edge, score in self.scores.items()}

    @property
    def nodes(self) -> tuple[str, ...]:
        """Its nodes in the order they are computed: the ends of its edges, or its heads."""
        names = (
            {end for edge in self.edges for end in edge[:2]}
            if self.kind == "edges"
            else self.scores
        )

        def place(name: str) -> tuple[float, bool, int]:
            """Of one rank, heads by number and then the MLP that runs beside them."""
            match = _NODE.match(name)
            head = int(match["head"] or 0) if match else 0
            return self._order(name), name.startswith("mlp"), head

        return tuple(sorted(map(str, names), key=place))

    @property
    def heads(self) -> tuple[Head, ...]:
        """Its heads, sorted."""
        found = [match for match in map(_NODE.match, self.nodes) if match and match["layer"]]
        return tuple(Head(int(match["layer"]), int(match["head"])) for match in found)

    @property
    def n_possible(self) -> int:
        """How many edges, or heads, the model has."""
        if self.kind == "heads":
            return sum(self.n_heads)
        return count_edges(self.n_heads, self.parallel, self.n_heads)

    @property
    def weighted_edges(self) -> float:
        """Edges of the model that lie wholly within the circuit (MIB's weighted edge count at head level).

        In an edge circuit all its edges; in a head circuit all edges between its heads, MLPs, embedding and logits.
        """
        if self.kind == "edges":
            return float(len(self.scores))
        own = [0] * len(self.n_heads)
        for head in self.heads:
            own[head.layer] += 1
        return float(count_edges(own, self.parallel, self.n_heads))

    def to_frame(self) -> pd.DataFrame:
        """One row per edge (source, target, input, score) or head (layer, head, score), best first."""
        import pandas as pd

        if self.kind == "heads":
            columns = ["layer", "head", "score"]
            rows: list[tuple[Any, ...]] = [(*head, self.scores[str(head)]) for head in self.heads]
        else:
            columns = ["source", "target", "input", "score"]
            rows = [(*edge, score) for edge, score in self.edges.items()]
        frame = pd.DataFrame(rows, columns=columns)
        return frame.sort_values("score", ascending=False, kind="stable", ignore_index=True)

    # -- smaller circuits --------------------------------------------------------------------------------------------

    def top(self, n: int, by: Ranking = "score") -> Circuit:
        """The ``n`` of the highest score, or of the highest absolute score; of equals, the one named first.

        Raises:
            PlanError: n is not a whole number of at least 0, or there is no such ranking.
        """
        n = whole_number(n, "n")
        if by not in ("score", "absolute"):
            raise PlanError(f"by={by!r} must be 'score' or 'absolute'")
        scores = self.scores.items()
        ranked = sorted(scores, key=lambda item: -(abs(item[1]) if by == "absolute" else item[1]))
        return replace(self, scores=dict(ranked[:n]))

    def negated(self) -> Circuit:
        """The same with every score's sign turned."""
        return replace(self, scores={item: -score for item, score in self.scores.items()})

    def without_dead_ends(self) -> Circuit:
        """Only the edges that lie on a path from the embedding to the logits; a circuit of heads stays as it is.

        An edge without such a path carries nothing, or nothing that reaches the logits.
        """
        if self.kind == "heads":
            return self
        from_embed = _reached(EMBED, [(edge.source, edge.target) for edge in self.edges])
        to_logits = _reached(LOGITS, [(edge.target, edge.source) for edge in self.edges])
        kept = {
            edge: score
            for edge, score in self.edges.items()
            if edge.source in from_embed and edge.target in to_logits
        }
        return replace(self, scores=kept)

    # -- checks ------------------------------------------------------------------------------------------------------

    def check(self, model: Model) -> None:
        """Make sure the circuit fits a model: the same layers and heads, whatever the weights.

        Raises:
            PlanError: It does not.
        """
        own = tuple(layer.n_heads for layer in model.spec.layers)
        if own != self.n_heads:
            raise PlanError(
                f"the circuit was found in {self.model} with {sum(self.n_heads)} heads in {len(self.n_heads)} layers, "
                f"but {model.name} has {sum(own)} in {len(own)}; find one in this model"
            )

    def to_json(self, indent: int | None = None) -> str:
        """The circuit as JSON text; see :mod:`headlab.causal.circuits.circuit_json`."""
        from headlab.causal.circuits.circuit_json import to_json

        return to_json(self, indent)

    @staticmethod
    def from_json(text: str) -> Circuit:
        """The circuit that :meth:`to_json` wrote.

        Raises:
            OutputError: It is not a circuit; the message says what is wrong and where.
        """
        from headlab.causal.circuits.circuit_json import from_json

        return from_json(text)

    def save(self, path: str | Path) -> Path:
        """Write :meth:`to_json` to a file, whole or not at all.

        Raises:
            OutputError: It cannot be written.
        """
        return write_text(path, self.to_json(indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Circuit:
        """Read what :meth:`save` wrote.

        Raises:
            OutputError: The file cannot be read, or holds no circuit.
        """
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OutputError(f"{path} cannot be read as a circuit: {error}") from error
        return Circuit.from_json(text)

    def _check(self, item: Edge | str) -> None:
        if self.kind == "heads":
            if not isinstance(item, str) or not item.startswith("L"):
                raise PlanError(
                    f"a circuit of heads holds heads such as 'L3H2', not {_shown(item)}"
                )
            self._order(item)
            return
        if not isinstance(item, tuple) or len(item) != 3:
            raise PlanError(f"a circuit of edges holds (source, target, input), not {_shown(item)}")
        edge = Edge(*item)
        start, stop = self._order(edge.source), self._order(edge.target)
        inputs = HEAD_INPUTS if edge.target.startswith("L") else ("",)
        if edge.input not in inputs:
            named = ", ".join(map(repr, inputs))
            raise PlanError(f"{edge.target} has no input {edge.input!r}; it has {named}")
        if start >= stop:
            raise PlanError(
                f"{edge.source} does not come before {edge.target}, so {_shown(edge)} is no edge"
            )

    def _order(self, node: str) -> float:
        """Where a node stands: nodes of one rank cannot read each other."""
        match = _NODE.match(node) if isinstance(node, str) else None
        layer = int(match["layer"] or match["mlp"] or 0) if match else 0
        head = int(match["head"] or 0) if match else 0
        if match is None or layer >= len(self.n_heads) or head >= self.n_heads[layer]:
            last = len(self.n_heads) - 1
            raise PlanError(
                f"{self.model} has no node {_shown(node)}; nodes are embed, L0H0–L{last}H{self.n_heads[last] - 1}, "
                f"mlp0–mlp{last} and logits"
            )
        if node == EMBED:
            return -1
        if node == LOGITS:
            return math.inf
        return 2 * layer + (match["mlp"] is not None and not self.parallel)


def count_edges(heads: Iterable[int], parallel: bool, whole: Iterable[int]) -> int:
    """Edges between so many heads of each layer, all MLPs, embedding and logits.

    Args:
        heads: Heads of each layer that count.
        parallel: Whether a block's MLP reads none of its heads.
        whole: Heads that the layers have in all; one MLP each.
    """
    sources, edges = 1, 0  # the embedding
    for own, _ in zip(heads, whole, strict=True):
        edges += len(HEAD_INPUTS) * own * sources
        edges += sources if parallel else sources + own
        sources += own + 1
    return edges + sources


def _reached(start: str, steps: Iterable[tuple[str, str]]) -> set[str]:
    """Nodes that steps lead to from a node, itself among them."""
    onward: dict[str, list[str]] = {}
    for source, target in steps:
        onward.setdefault(source, []).append(target)
    found, open_ = {start}, [start]
    while open_:
        for node in onward.get(open_.pop(), ()):
            if node not in found:
                found.add(node)
                open_.append(node)
    return found


def _shown(item: object) -> str:
    return str(item) if isinstance(item, Edge) else f"{item!r:.60}"


__all__ = ["Circuit", "Kind", "Ranking", "count_edges"]
