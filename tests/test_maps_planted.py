"""MAPS on models whose heads were made to implement a relation: these are claimed, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from relation_models import implementing, token_map, words

from headlab.parameters.maps import maps
from headlab.parameters.maps_result import Maps
from headlab.tasks.relations import Relation

FAMILIES = ("llama", "gpt2")


def claimed(found: Maps, direction: str = "promotes") -> list[str]:
    return found.claimed("made up", direction)


#: In llama heads 3 to 5 share keys and values.
@pytest.mark.parametrize(
    ("family", "place"),
    [("llama", (0, 1)), ("llama", (0, 4)), ("llama", (1, 2)), ("gpt2", (0, 1)), ("gpt2", (1, 2))],
)
def test_the_head_that_implements_a_relation_is_claimed_and_no_other(family, place):
    relation = words()
    found = maps(implementing(family, {place: token_map(relation)}), relation)
    name = f"L{place[0]}H{place[1]}"
    row = found.of(name).query("direction == 'promotes'").iloc[0]
    assert row["score"] == 1.0
    assert row["p_value"] < 0.001
    assert row["ci_low"] > 0.9
    assert claimed(found) == [name]
    assert claimed(found, "suppresses") == []
    assert row["effect"] < 0.95  # some of ten tokens of 97 are targets by chance
    model = implementing(family, {place: token_map(relation)})
    assert claimed(maps(model, relation, min_effect=0.95)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_lowers_the_targets_is_claimed_as_suppressing(family):
    relation = words()
    found = maps(implementing(family, {(1, 2): -token_map(relation)}), relation)
    assert claimed(found) == []
    assert claimed(found, "suppresses") == ["L1H2"]
    assert found.top("made up", 1, "suppresses")["score"].iloc[0] == 1.0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", [(0, 1), (1, 2)])
def test_nothing_is_claimed_when_the_head_is_scrambled(family, place):
    relation = words()
    found = maps(implementing(family, {place: token_map(relation)}, scrambled=True), relation)
    assert claimed(found) == claimed(found, "suppresses") == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_above_layer_0_reads_what_the_first_mlp_writes_and_not_bare_embeddings(family):
    relation = words()
    model = implementing(family, {(1, 2): token_map(relation)})
    assert claimed(maps(model, relation, embedding="raw")) == []
    assert claimed(maps(model, relation, embedding="mlp")) == ["L1H2"]
    layer_0 = implementing(family, {(0, 2): token_map(relation)})
    assert claimed(maps(layer_0, relation, embedding="mlp")) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_raises_all_targets_for_every_source_knows_nothing(family):
    relation = words(8)
    every = torch.zeros_like(token_map(relation))
    every[:, token_map(relation).sum(0) > 0] = 1.0
    found = maps(implementing(family, {(0, 1): every}), relation, min_pairs=8)
    row = found.of("L0H1").iloc[0]
    assert row["score"] == 1.0  # eight targets fit into the first ten
    assert row["null_mean"] == pytest.approx(1.0)
    assert row["p_value"] == pytest.approx(1.0)
    assert claimed(found) == []


def test_heads_of_two_relations_are_told_apart():
    one, other = words(seed=1, name="one"), words(seed=2, name="other")
    model = implementing("llama", {(0, 1): token_map(one), (1, 4): token_map(other)})
    found = maps(model, [one, other])
    assert found.claimed("one") == ["L0H1"]
    assert found.claimed("other") == ["L1H4"]


def test_copying_counts_the_first_token_only():
    pairs = tuple((f"w{at}", f"w{at}") for at in range(4, 44))
    copying = Relation("copying", "algorithmic", "itself", pairs)
    found = maps(implementing("llama", {(0, 1): token_map(copying)}), copying)
    assert found.relation("copying").k == 1
    assert found.claimed("copying") == ["L0H1"]


def test_a_random_model_gets_no_more_claims_than_the_false_discovery_rate_allows():
    relations = [words(seed=at, name=f"relation {at}") for at in range(10)]
    families = with_claims = 0
    for seed in range(5):
        frame = maps(implementing("llama", {}, seed=seed), relations).frame
        claims = frame.groupby(["relation", "direction"])["claimed"].any()
        families, with_claims = families + len(claims), with_claims + int(claims.sum())
    # Where nothing is there, a correction at 5 % lets 5 of 100 tables have a claim.
    assert families == 100
    assert with_claims <= 11  # more happens by chance in 1 of 200 draws
