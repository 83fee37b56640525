"""Where the circuit was written into the weights, paths and edges find that circuit and nothing else.

A previous_token head writes which token came before; an induction head reads that through its keys (K-composition)
and copies what follows the earlier occurrence of the current token. The corrupted prompt has another token at that
earlier occurrence, so nothing matches.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from tiny_models import build

import headlab as hl
from headlab import planted
from headlab.causal import metrics
from headlab.causal.attribution.eap import eap_ig
from headlab.causal.circuits.acdc import acdc
from headlab.causal.graph import Edge
from headlab.causal.paths.edges import EdgeRuns
from headlab.causal.paths.path_patching import path_patch
from headlab.errors import PlanError

FIRST_WORD = 6  # after four special tokens and two stops
N_PROMPTS, LENGTH, SECOND = (
    6,
    16,
    7,
)  # tokens of the first copy, and of the second one that the prompt holds
PREVIOUS, INDUCTION = "L1H1", "L2H2"
EDGE = Edge(PREVIOUS, INDUCTION, "k")
LAYOUTS = [("llama", None), ("llama", 2), ("gpt2", None)]


@cache
def lab(family: str, n_kv_heads: int | None) -> hl.Model:
    heads = {PREVIOUS: "previous_token", INDUCTION: "induction"}
    made = planted.model(
        family, heads, distractors=6, n_heads=4, n_kv_heads=n_kv_heads, max_context=64
    )
    return hl.load(made.module, tokenizer=made.tokenizer)


@cache
def probe() -> tuple[torch.Tensor, torch.Tensor, metrics.Metric]:
    """Prompts, corrupted prompts, and answer less a word that stands in neither."""
    rng = np.random.default_rng(0)
    clean, answers, foils = [], [], []
    for _ in range(N_PROMPTS):
        words = FIRST_WORD + rng.permutation(128 - FIRST_WORD)[: LENGTH + 2]
        clean.append([0, *words[:LENGTH], *words[:SECOND]])
        answers.append(int(words[SECOND]))
        foils.append((int(words[-1]), int(words[-2])))
    ids = torch.tensor(clean)
    corrupted = ids.clone()
    corrupted[:, SECOND] = torch.tensor([other for _, other in foils])
    return ids, corrupted, metrics.logit_difference(answers, [foil for foil, _ in foils])


@pytest.mark.parametrize(("family", "n_kv_heads"), LAYOUTS)
def test_path_patching_finds_the_planted_edge_and_no_other(family: str, n_kv_heads: int | None):
    model = lab(family, n_kv_heads)
    to_logits = path_patch(model, *probe())
    drop = to_logits.clean - to_logits.corrupted
    assert drop.min() > 1
    share = -to_logits.frame.set_index(["layer", "head"])["effect"] / drop.mean()
    assert share.idxmax() == (2, 2)
    assert share.max() > 0.9
    assert share.drop((2, 2)).abs().max() < 0.05
    for letter in "qkv":
        found = path_patch(model, *probe(), receivers=f"{INDUCTION}:{letter}")
        share = -found.frame.set_index(["layer", "head"])["effect"] / drop.mean()
        if letter == "k":
            assert share.idxmax() == (1, 1)
            assert share.max() > 0.9
            share = share.drop((1, 1))
        assert share.abs().max() < 0.05, letter


@pytest.mark.parametrize(("family", "n_kv_heads"), LAYOUTS)
def test_the_sender_acts_from_the_position_after_the_earlier_occurrence(
    family: str, n_kv_heads: int | None
):
    model = lab(family, n_kv_heads)
    there, elsewhere = (
        path_patch(model, *probe(), PREVIOUS, f"{INDUCTION}:k", positions=places).frame["effect"][0]
        for places in ([SECOND + 1], [SECOND, *range(SECOND + 2, LENGTH + SECOND + 1)])
    )
    assert there < -1
    assert abs(elsewhere) < 0.05 * abs(there)


@pytest.mark.parametrize(("family", "n_kv_heads"), LAYOUTS)
def test_eap_ig_and_exact_edges_agree_with_path_patching(family: str, n_kv_heads: int | None):
    model = lab(family, n_kv_heads)
    clean, corrupted, metric = probe()
    runs = EdgeRuns(model, clean, corrupted, metric)
    drop = (runs.clean - runs.corrupted).mean()
    estimated = eap_ig(model, clean, corrupted, metric, steps=20).between_heads()
    assert estimated.edges[0] == EDGE
    scores = estimated.frame["score"].abs().to_numpy()
    assert scores[1:].max() < 0.05 * scores[0]
    tried = list(estimated.edges[:12])
    exact = (runs.corrupting([[edge] for edge in tried]) - runs.clean).mean(1)
    path = path_patch(model, *probe(), PREVIOUS, f"{INDUCTION}:k", freeze_mlps=True)
    np.testing.assert_allclose(exact[0], path.frame["effect"][0], atol=1e-3 * drop)
    assert -exact[0] > 0.9 * drop
    assert np.abs(exact[1:]).max() < 0.05 * drop


@pytest.mark.parametrize(("family", "n_kv_heads"), LAYOUTS)
def test_the_planted_circuit_alone_does_the_work(family: str, n_kv_heads: int | None):
    """Every other edge carries what it carries in the corrupted run."""
    clean, corrupted, metric = probe()
    runs = EdgeRuns(lab(family, n_kv_heads), clean, corrupted, metric)
    circuit = [
        *(Edge("embed", PREVIOUS, letter) for letter in "qkv"),
        *(Edge("embed", INDUCTION, letter) for letter in "qkv"),
        EDGE,
        Edge(INDUCTION, "logits"),
        Edge("embed", "logits"),
    ]
    whole, without = runs.run([circuit, [edge for edge in circuit if edge != EDGE]]).mean(1)
    none, every = runs.corrupted.mean(), runs.clean.mean()
    assert (whole - none) / (every - none) > 0.9
    assert abs(without - none) / (every - none) < 0.1


def test_acdc_keeps_the_planted_circuit():
    clean, corrupted, metric = probe()
    model = lab("llama", 2)
    runs = EdgeRuns(model, clean, corrupted, metric)
    drop = (runs.clean - runs.corrupted).mean()
    circuit = acdc(model, clean, corrupted, 0.1 * drop, metric)
    # Embeddings differ at the earlier occurrence only: nothing else of the planted circuit changes under corruption.
    assert set(circuit.edges) == {Edge("embed", PREVIOUS, "v"), EDGE, Edge(INDUCTION, "logits")}
    assert all(score > 0.5 * drop for score in circuit.edges.values())
    kept = runs.run([circuit.edges])[0]
    assert (kept - runs.corrupted).mean() > 0.9 * drop


def test_acdc_equals_trying_edges_one_after_the_other():
    """Conmy et al.'s loop, written out on a tiny random model."""
    model = hl.load(build("gpt2").double())
    generator = torch.Generator().manual_seed(0)
    clean, corrupted = torch.randint(4, 97, (2, 3, 8), generator=generator)
    runs = EdgeRuns(model, clean, corrupted, metrics.kl())
    tau, kept = 0.03, set(runs.edges)
    now = runs.run([kept])[0].mean()
    for target in dict.fromkeys(edge[1:] for edge in reversed(runs.edges)):
        for edge in reversed(runs.edges):
            if edge[1:] == target:
                value = runs.run([kept - {edge}])[0].mean()
                if value - now < tau:
                    kept, now = kept - {edge}, value
    assert 3 < len(kept) < len(runs.edges) - 3
    assert set(acdc(model, clean, corrupted, tau).edges) == kept
    with pytest.raises(PlanError, match="tau=-1 must be"):
        acdc(model, clean, corrupted, -1)
