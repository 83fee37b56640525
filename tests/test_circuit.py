"""Circuits: sets and rankings, JSON and its refusals, overlap, and faithfulness by hand-made runs and real ones."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch

import headlab as hl
from headlab.causal import metrics
from headlab.causal.circuits.circuit import Circuit, count_edges
from headlab.causal.circuits.overlap import overlap
from headlab.causal.graph import Edge, Graph
from headlab.errors import HeadError, OutputError, PlanError

METRIC = metrics.logit_difference(20, 30)
CLEAN = torch.randint(4, 97, (3, 7), generator=torch.Generator().manual_seed(0))
CORRUPTED = torch.randint(4, 97, (3, 7), generator=torch.Generator().manual_seed(1))


def small(scores, n_heads=(2, 2), parallel=False, kind="edges") -> Circuit:
    return Circuit(kind, scores, "toy", "0123", n_heads, parallel, "loss", "by hand")


CHAIN = {
    Edge("embed", "L0H0", "v"): 0.5,
    Edge("L0H0", "L1H1", "k"): -2.0,
    Edge("L1H1", "logits"): 1.0,
    Edge("embed", "L0H1", "q"): 0.1,  # leads nowhere
    Edge("mlp0", "logits"): 0.2,  # comes from nowhere
}


def test_nodes_heads_and_edges_of_a_circuit():
    circuit = small(CHAIN)
    assert circuit.nodes == ("embed", "L0H0", "L0H1", "mlp0", "L1H1", "logits")
    assert circuit.heads == (hl.Head(0, 0), hl.Head(0, 1), hl.Head(1, 1))
    assert circuit.edges == CHAIN
    beside = small(dict.fromkeys([Edge(f"L0H{head}", "mlp1") for head in (10, 2, 9)], 1.0), (11, 1))
    assert beside.nodes == ("L0H2", "L0H9", "L0H10", "mlp1")
    mixed = small({Edge("mlp0", "logits"): 1.0, Edge("L0H1", "logits"): 1.0}, parallel=True)
    assert mixed.nodes == ("L0H1", "mlp0", "logits")
    assert circuit.to_frame()["source"].tolist() == ["L1H1", "embed", "mlp0", "embed", "L0H0"]


def test_top_ranks_by_score_or_by_size_of_score():
    circuit = small(CHAIN)
    assert list(circuit.top(2).scores.values()) == [1.0, 0.5]
    assert list(circuit.top(2, "absolute").scores.values()) == [-2.0, 1.0]
    assert len(circuit.top(0)) == 0
    assert list(small({"L0H1": 1.0, "L0H0": 1.0}, kind="heads").top(1).scores) == ["L0H1"]
    for n, by in [(-1, "score"), (1.5, "score"), (True, "score"), (1, "size")]:
        with pytest.raises(PlanError, match="must be"):
            circuit.top(n, by)


def test_dead_ends_are_edges_on_no_path_from_embedding_to_logits():
    alive = small(CHAIN).without_dead_ends()
    assert list(alive.edges) == list(CHAIN)[:3]
    cut = {edge: score for edge, score in CHAIN.items() if edge.target != "L1H1"}
    assert len(small(cut).without_dead_ends()) == 0


@pytest.mark.parametrize("parallel", [False, True])
def test_edges_are_counted_as_the_graph_has_them(lab, parallel):
    spec = lab("llama").spec
    graph = Graph(spec, parallel)
    assert count_edges((6, 6), parallel, (6, 6)) == len(graph.edges)
    chosen = {"embed", "logits", "mlp0", "mlp1", "L0H1", "L1H0", "L1H5"}
    within = [edge for edge in graph.edges if edge.source in chosen and edge.target in chosen]
    heads = Circuit(
        "heads", dict.fromkeys(("L0H1", "L1H0", "L1H5"), 1.0), "m", "", (6, 6), parallel
    )
    assert heads.weighted_edges == len(within)
    # Every edge of the graph is an edge of a circuit, and no other is.
    names = {Edge(s, *i) for s, i in itertools.product(graph.sources, graph.inputs)}
    for edge in names:
        if edge in set(graph.edges):
            small({edge: 1.0}, (6, 6), parallel)
        else:
            with pytest.raises(PlanError, match="does not come before"):
                small({edge: 1.0}, (6, 6), parallel)


@pytest.mark.parametrize(
    ("kind", "item", "message"),
    [
        ("edges", Edge("L0H2", "logits"), "toy has no node 'L0H2'"),
        ("edges", Edge("L2H0", "logits"), "toy has no node 'L2H0'"),
        ("edges", Edge("mlp01", "logits"), "toy has no node 'mlp01'"),
        ("edges", Edge("L0H0", "mlp0", "q"), "mlp0 has no input 'q'"),
        ("edges", Edge("L0H0", "L1H0"), "L1H0 has no input ''; it has 'q', 'k', 'v'"),
        ("edges", Edge("L1H0", "L0H0", "q"), "L1H0 does not come before L0H0"),
        ("edges", Edge("logits", "logits"), "logits does not come before logits"),
        ("edges", "L0H0", "holds \\(source, target, input\\), not 'L0H0'"),
        ("heads", "mlp0", "holds heads such as 'L3H2', not 'mlp0'"),
        ("heads", "L9H0", "toy has no node 'L9H0'"),
        ("nodes", "L0H0", "of 'edges' or 'heads', not of 'nodes'"),
    ],
)
def test_what_the_model_does_not_have_is_refused(kind, item, message):
    with pytest.raises(PlanError, match=message):
        small({item: 1.0}, kind=kind)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_scores_are_finite(score):
    with pytest.raises(PlanError, match="score of 'L0H0' is"):
        small({"L0H0": score}, kind="heads")


def test_circuits_of_a_model_carry_its_name_and_weights(lab):
    model = lab("llama")
    circuit = Circuit.of_heads(model, {"0.1": 1, (1, 5): -2.5}, metric="loss")
    assert circuit.scores == {"L0H1": 1.0, "L1H5": -2.5}
    assert (circuit.model, circuit.fingerprint) == (model.name, model.fingerprint)
    assert circuit.n_heads == (6, 6)
    edges = Circuit.of_edges(model, {("mlp0", "logits"): 1, ("L0H1", "L1H2", "k"): 2})
    assert list(edges.edges) == [Edge("mlp0", "logits"), Edge("L0H1", "L1H2", "k")]
    with pytest.raises(PlanError, match="head L0H1 has two scores"):
        Circuit.of_heads(model, {"0.1": 1, "L0H1": 2})
    with pytest.raises(HeadError, match="L7H0 does not exist"):
        Circuit.of_heads(model, {"7.0": 1})
    with pytest.raises(PlanError, match="circuit of heads, which has no edges"):
        _ = circuit.edges
    with pytest.raises(
        PlanError, match=r"found in toy with 4 heads in 2 layers, but .* has 12 in 2"
    ):
        small(CHAIN).check(model)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: small({"L0H0": "x"}, kind="heads"), "score of 'L0H0' is 'x'; scores must be finite"),
        (lambda m: small({"L0H0": True}, kind="heads"), "score of 'L0H0' is True"),
        (lambda m: small({"L0H0\n": 1.0}, kind="heads"), "toy has no node"),
        (lambda m: small(["L0H0"], kind="heads"), "must map heads to their scores"),
        (lambda m: Circuit.of_heads(m, {"L0H0": None}), "score of head L0H0 is None"),
        (lambda m: Circuit.of_heads(m, {"L0H0": "1"}), "score of head L0H0 is '1'"),
        (lambda m: Circuit.of_heads(m, ["L0H0"]), "must give each head its score"),
        (lambda m: Circuit.of_heads(m, None), "must give each head its score"),
        (lambda m: Circuit.of_edges(m, {("embed",): 1.0}), r"\('embed',\) is no edge"),
        (lambda m: Circuit.of_edges(m, {("embed", "L0H0", "q", "q"): 1.0}), "is no edge"),
        (lambda m: Circuit.of_edges(m, {"ab": 1.0}), "'ab' is no edge"),
        (lambda m: Circuit.of_edges(m, {(0, 1): 1.0}), r"\(0, 1\) is no edge"),
        (lambda m: Circuit.of_edges(m, {("mlp0", "logits"): None}), "score of edge mlp0 → logits is None"),
        (lambda m: Circuit.of_edges(m, {("mlp0", "logits"): 1, ("mlp0", "logits", ""): 2}), "has two scores"),
        (lambda m: Circuit.of_edges(m, [("mlp0", "logits")]), "must give each edge its score"),
        (lambda m: overlap(small(CHAIN), None), "b=None must be a Circuit"),
        (lambda m: overlap("L0H0", small(CHAIN)), "a='L0H0' must be a Circuit"),
    ],
)  # fmt: skip
def test_what_is_no_circuit_is_refused(lab, call, message):
    with pytest.raises(PlanError, match=message):
        call(lab("llama"))


def test_numbers_of_numpy_are_scores():
    circuit = small({"L0H0": np.float32(0.5), "L1H1": np.int64(2)}, kind="heads")
    assert Circuit.from_json(circuit.to_json()).scores == {"L0H0": 0.5, "L1H1": 2.0}
    assert len(circuit.top(np.int64(1))) == 1


# -- JSON ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "circuit",
    [
        small(CHAIN | {Edge("embed", "mlp1"): 0.1 + 0.2}, parallel=True),
        small({"L1H0": 1e-300, "L0H1": -3.0}, kind="heads"),
        small({}),
    ],
)
def test_json_comes_back_the_same(circuit):
    again = Circuit.from_json(circuit.to_json())
    assert again == circuit
    assert list(again.scores) == list(circuit.scores)
    assert json.loads(circuit.to_json(indent=1))["format"] == "headlab-circuit-1"


def changed(**changes):
    document = json.loads(small(CHAIN).to_json())
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = document
        for name in parents:
            place = place[int(name)] if isinstance(place, list) else place[name]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON text, but it cannot be read"),
        ("[" * 100_000, "must be JSON text, but it cannot be read"),
        ("[]", "must be a JSON object, not a list"),
        (changed(format="headlab-circuit-9"), "has the format 'headlab-circuit-9', but this headlab reads"),
        (changed(format=...), "has the format None"),
        (changed(kind="nodes"), "kind is 'nodes'; it must be 'edges' or 'heads'"),
        (changed(kind=3), "needs 'kind', text, but has a number"),
        (changed(kind="heads"), "needs 'heads', a list, but has nothing"),
        (changed(metric=...), "needs 'metric', text, but has nothing"),
        (changed(model="gpt2"), "needs 'model', an object, but has text"),
        (changed(model__fingerprint=...), "the circuit's model needs 'fingerprint', text"),
        (changed(model__parallel=1), "needs 'parallel', true or false, but has a number"),
        (changed(model__n_heads=[]), "a whole number above 0 for each layer"),
        (changed(model__n_heads=[2, True]), "a whole number above 0 for each layer"),
        (changed(edges={}), "needs 'edges', a list, but has an object"),
        (changed(edges=[3]), "entry 0 of the circuit's edges must be an object, not a number"),
        (changed(edges__1__source=None), "entry 1 of the circuit's edges needs 'source', text"),
        (changed(edges__0__score="1"), "entry 0 of the circuit's edges needs a score, a finite number"),
        (changed(edges__0__score=True), "needs a score, a finite number"),
        (changed(edges__0__score=10**400), "needs a score, a finite number"),
        (changed(edges__0__score=math.nan), "embed → L0H0.v is nan; scores must be finite"),
        (changed(edges__0__target="L8H0"), "cannot be read: toy has no node 'L8H0'"),
        (changed(edges__1__source="L1H1"), "cannot be read: L1H1 does not come before L1H1"),
        (changed(edges__3__target="L0H0", edges__3__input="v"), "entry 3 .* is there twice"),
        (changed(edges__2__target="logits\n"), "toy has no node"),
        (changed(edges__0__target="L0H0\n"), "toy has no node"),
        (changed(edges__0__target="L٠H0"), "toy has no node"),
        (changed(edges__0__target="L" + "1" * 5000 + "H0"), "toy has no node"),
        (changed().replace('"kind"', '"kind": "heads", "kind"'), "the name 'kind' stands twice in one object"),
        (changed().replace('"score"', '"score": 3, "score"', 1), "the name 'score' stands twice"),
        (changed(model__n_heads=[2, 10**30]), "more than 100000 heads"),
        (changed(model__n_heads=[1] * 100_001), "more than 100000 heads"),
    ],
)  # fmt: skip
def test_json_that_is_no_circuit_is_refused_with_the_reason(text, message):
    with pytest.raises(OutputError, match=message) as caught:
        Circuit.from_json(text)
    assert "\n" not in str(caught.value)


# -- overlap -------------------------------------------------------------------------------------------------


def test_overlap_and_its_chance_level_by_enumeration():
    a = small(dict.fromkeys(("L0H0", "L0H1", "L1H0"), 1.0), (3, 2), kind="heads")
    b = small(dict.fromkeys(("L0H0", "L1H0"), 1.0), (3, 2), kind="heads")
    found = overlap(a, b)
    assert (found.n_a, found.n_b, found.n_shared, found.n_possible) == (3, 2, 2, 5)
    assert (found.jaccard, found.recall, found.precision) == pytest.approx((2 / 3, 2 / 3, 1))
    pairs = list(itertools.combinations(range(5), 2))
    shared = [len(set(pair) & {0, 1, 2}) for pair in pairs]
    assert found.chance_jaccard == pytest.approx(np.mean([s / (5 - s) for s in shared]))
    assert found.chance_recall == pytest.approx(np.mean([s / 3 for s in shared]))
    assert found.p_value == pytest.approx(np.mean([s >= 2 for s in shared]))


def test_overlap_of_edges_and_of_what_cannot_be_compared():
    a, b = small(CHAIN), small(CHAIN).top(2)
    found = overlap(a, b, "edges")
    assert (found.n_shared, found.n_possible) == (2, count_edges((2, 2), False, (2, 2)))
    assert found.recall == pytest.approx(2 / 5)
    assert overlap(a, b).n_b == 2  # heads that b's edges touch
    assert math.isnan(overlap(small({}), a).recall)
    with pytest.raises(PlanError, match="models of different shapes"):
        overlap(a, small({}, (2, 3)))
    with pytest.raises(PlanError, match="circuit of heads, which has no edges"):
        overlap(small({}, kind="heads"), a, "edges")
    with pytest.raises(PlanError, match="what='nodes' must be"):
        overlap(a, b, "nodes")
