"""Results of the causal part show their largest items in a few lines, and no arrays."""

from __future__ import annotations

import numpy as np
import pandas as pd

from headlab.attention import Head
from headlab.causal.attribution.direct import DirectAttribution
from headlab.causal.attribution.flow import InformationFlow
from headlab.causal.attribution.rollout import Flow, Rollout
from headlab.causal.attribution.sources import SourceAttribution
from headlab.causal.circuits.circuit import Circuit
from headlab.causal.graph import Edge
from headlab.causal.head_sets.pruning import PruningCurve


def lines(result: object) -> list[str]:
    text = repr(result)
    assert text.count("\n") < 4
    assert "array" not in text
    assert max(map(len, text.splitlines())) < 300
    return text.splitlines()


def test_circuits_name_their_largest_edges_or_heads() -> None:
    edges = {Edge("embed", f"L1H{head}", "q"): 0.01 * head for head in range(8)}
    edges[Edge("L0H3", "mlp1")] = -2.5
    first, second = lines(Circuit("edges", edges, "toy", "", (8, 8), metric="loss", method="eap"))
    assert first == "Circuit of 9 of 310 edges: toy, loss, eap"  # 24 + 9 + 240 + 18 + 19
    assert second.startswith(
        "  largest: L0H3 → mlp1 -2.5, embed → L1H7.q 0.07, embed → L1H6.q 0.06"
    )
    assert second.count("→") == 5
    heads = Circuit("heads", {"L0H1": 0.5, "L1H0": -3.0}, "toy", "", (2, 2))
    assert lines(heads) == ["Circuit of 2 of 4 heads: toy", "  largest: L1H0 -3, L0H1 0.5"]
    assert lines(heads.top(0))[1] == "  largest: none"


def test_direct_attributions_name_their_largest_terms() -> None:
    terms = (("embedding", -1, -1), ("head", 0, 1), ("mlp", 0, -1))
    values = np.array([[0.5, 1.5], [-3.0, -1.0], [0.25, 0.25]])
    first, second = lines(DirectAttribution(terms, values, values.sum(0)))
    assert first.startswith("DirectAttribution of 2 prompt(s): total -0.75 = sum of 3 terms")
    assert second == "  largest: L0H1 -2, embedding 1, L0 mlp 0.25"


def test_attributions_by_source_name_their_largest_heads_and_spans() -> None:
    values = np.array([[[[1.0, 2.0], [0.5, -1.0]]]])
    found = SourceAttribution(
        values, values.sum(-1), values.sum((1, 2, 3)), {"subject": ((0, 1),)}, (("a", "b"),)
    )
    first, second, third = lines(found)
    assert first.startswith("SourceAttribution of 1 prompt(s): 2 heads, total 2.5")
    assert second == "  spans: subject"
    assert third == "  largest heads: L0H0 3, subject 1; L0H1 -0.5, subject 0.5"


def flow() -> InformationFlow:
    attention = np.zeros((2, 2, 3, 3), np.float32)
    attention[1, 0, 2, 0] = 0.6
    attention[0, 1, 0, 0] = 0.3
    stays = (1 - attention.sum((1, 3))).astype(np.float32)
    return InformationFlow(("Paul", " ran", "\n"), attention, stays, np.zeros((2, 3)), False)


def test_information_flow_and_routes_name_what_matters_most() -> None:
    first, second = lines(flow())
    assert first == "InformationFlow of 3 tokens through 2 layers of 2 heads"
    assert "mean over queries: L1H0 0.2, L0H1 0.1, " in second
    first, second = lines(flow().routes())
    # Down from the last token: residual and attention of layer 1 to two tokens, and each of these on.
    assert first.startswith("Routes from '\\n' at 2: ")
    assert first.endswith("edges above 0.01")
    assert second == "  largest between positions: layer 1: 'Paul' at 0 → '\\n' at 2 0.6"
    assert lines(flow().routes(1))[1] == "  largest between positions: none"


def test_rollout_and_flow_name_the_tokens_most_reached() -> None:
    values = np.array([[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.25, 0.75]]])
    first, second = lines(Rollout(("a", " b"), values, {Head(0, 1): values[0]}))
    assert first == "Rollout of 2 tokens through 2 layers, and of 1 heads by themselves"
    assert second == "  from the last token in the last layer: ' b' at 1 0.75, 'a' at 0 0.25"
    first, second = lines(Flow(("a", " b"), (3, 7), (0, 1), values, values))
    assert first == "Flow of 2 tokens from 2 layers and 2 positions"
    assert second == "  from position 1 in layer 7: ' b' at 1 0.75, 'a' at 0 0.25"


def test_pruning_curves_name_the_metric_on_the_way_and_who_goes_first() -> None:
    frame = pd.DataFrame(
        {"removed": [0, 5, 10], "share": [0, 0.25, 0.5], "metric": [4.0, 3.0, 1.5], "heads": ""}
    )
    order = tuple(Head(0, head) for head in range(10))
    first, second, third = lines(PruningCurve(frame, order, np.zeros((3, 2)), {"order": "greedy"}))
    assert first == "PruningCurve of 10 heads in 3 steps (order greedy)"
    assert second == "  metric: 4 with 0 (0%) out, 3 with 5 (25%) out, 1.5 with 10 (50%) out"
    assert third.startswith("  first to go: L0H0, L0H1, ")
    assert third.endswith("L0H7, …")
