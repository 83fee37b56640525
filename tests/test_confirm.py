"""Ablating what was claimed, and as many others: planted heads are confirmed, wrong ones are not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import headlab as hl
from headlab import planted
from headlab.attention import Head, matched_sets
from headlab.roles import RoleError
from headlab.roles.confirmation import (
    CAUSAL_COLUMNS,
    confirm,
    general_log_probability,
)
from headlab.roles.scoring import prepare
from headlab.shards import Shards

# Two previous-token heads: with one of them gone, the induction head still has the other to read from.
HEADS = {"L0H1": "previous_token", "L1H0": "previous_token", "L2H1": "induction"}


@cache
def model() -> hl.Model:
    made = planted.model("llama", HEADS, n_heads=8, distractors=8, max_context=160)
    return hl.load(made.module, tokenizer=made.tokenizer)


@cache
def scores() -> hl.Scores:
    found = hl.score(model(), "induction", n_prompts=12)
    assert found.claimed("induction") == ["L2H1"]
    return found


def claiming(*heads: str) -> hl.Scores:
    frame = scores().frame.copy()
    frame["claimed"] = [f"L{la}H{he}" in heads for la, he in zip(frame["layer"], frame["head"])]  # noqa: B905
    return replace(scores(), frame=frame)


def own(table):
    """The row about the role's own behaviour."""
    return next(row for row in table.to_dict("records") if "second copy" in row["metric"])


def test_the_planted_head_is_confirmed_with_the_effect_an_ablation_by_hand_has():
    table = confirm(model(), scores())
    assert tuple(table.columns) == CAUSAL_COLUMNS
    assert len(table) == 2
    row = own(table)
    assert row["heads"] == "L2H1"
    assert row["confirmed"]
    assert row["effect"] < -3
    assert row["ci_low"] <= row["effect"] <= row["ci_high"] < 0
    assert row["control_low"] <= row["control_effect"] <= row["control_high"]
    assert row["control_low"] > -1
    # A copy without the head predicts the second copy no better than the first: log(1/vocabulary), about.
    assert row["baseline"] > -1
    assert row["baseline"] + row["effect"] == pytest.approx(-np.log(128), abs=1.5)


def test_heads_that_do_something_else_are_not_confirmed():
    row = own(confirm(model(), claiming("L2H5")))
    assert not row["confirmed"]
    assert abs(row["effect"]) < 0.5


def test_nothing_claimed_gives_no_rows_but_the_columns():
    table = confirm(model(), claiming())
    assert table.empty
    assert tuple(table.columns) == CAUSAL_COLUMNS


def test_too_few_random_sets_are_refused():
    with pytest.raises(RoleError, match="draws=19 is too few to tell: use at least 20"):
        confirm(model(), scores(), draws=19)


def test_a_second_run_reads_what_the_first_one_finished(tmp_path):
    first, second = (Shards(tmp_path, {"same": 1}) for _ in range(2))
    table = confirm(model(), scores(), remember=first.remember)
    again = confirm(model(), scores(), remember=second.remember)
    assert second.resumed == 2 * (1 + 1 + 20)  # two behaviours: intact, claimed, twenty random sets
    assert table.equals(again)


def test_random_sets_match_layer_by_layer_and_leave_the_claimed_heads_alone():
    probing = prepare(model(), 0, 4, None)
    heads = (Head(1, 2), Head(1, 5), Head(2, 1))
    sets, note = matched_sets(probing.model.spec, heads, 30, probing.seed)
    assert note == ""
    assert len(set(sets)) == 30
    for drawn in sets:
        assert Counter(head.layer for head in drawn) == {1: 2, 2: 1}
        assert not set(drawn) & set(heads)
    assert matched_sets(probing.model.spec, heads, 30, probing.seed) == (sets, note)
    assert matched_sets(model().spec, heads, 30, 1)[0] != sets


def test_a_layer_with_too_few_other_heads_borrows_from_its_neighbours_and_says_so():
    sets, note = matched_sets(model().spec, (Head(3, 0),), 20, 0)
    assert "up to 2 layers away" in note
    assert {head.layer for drawn in sets for head in drawn} == {1, 2, 3}
    assert len(set(sets)) == 20


def test_where_most_heads_are_claimed_sets_are_drawn_from_all():
    heads = tuple(Head(layer, head) for layer in range(4) for head in range(5))
    sets, note = matched_sets(model().spec, heads, 20, 0)
    assert "chosen ones included" in note
    assert heads not in sets
    assert all(
        Counter(head.layer for head in drawn) == dict.fromkeys(range(4), 5) for drawn in sets
    )


def test_a_model_with_too_few_heads_confirms_nothing_and_says_so():
    made = planted.model("llama", {"L0H1": "previous_token", "L2H1": "induction"}, distractors=2)
    small = hl.load(made.module, tokenizer=made.tokenizer)
    found = hl.score(small, "induction", n_prompts=12)
    row = own(confirm(small, found))
    assert not row["confirmed"]
    assert "only 15 other sets" in row["note"]


def test_general_behaviour_is_the_models_log_probability_of_text():
    probing = prepare(model(), 0, 4, None)
    found = general_log_probability(probing)
    assert found.shape == (4,)
    with model().edit(hl.ablate("2.1")):
        assert not np.array_equal(general_log_probability(probing), found)
    assert np.array_equal(general_log_probability(probing), found)


def test_log_probabilities_are_those_of_the_next_token():
    from headlab.roles.confirmation import next_token_log_probability

    ids = model().tokens("river stone house garden")
    found = next_token_log_probability(model(), ids)
    with torch.no_grad():
        logits = model().module(ids).logits[0].double()
    for at in range(ids.shape[1] - 1):
        expected = logits[at, ids[0, at + 1]] - logits[at].logsumexp(0)
        assert float(found[0, at]) == pytest.approx(float(expected), abs=1e-5)
