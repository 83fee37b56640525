"""A head's card: planted facts stand on it, each part equals what its own function gives, and gaps are said."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from relation_models import implementing, token_map, words
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab import planted
from headlab.attention import Head
from headlab.errors import HeadError, PlanError, PromptError
from headlab.parameters import maps
from headlab.report.head_facts import mapped_operations
from headlab.roles.base import RoleError
from headlab.tasks.relations import Relation


def words_of(n: int) -> Relation:
    pairs = tuple((f"w{at}", f"w{at + 1}") for at in range(4, n - 1))
    return Relation("next", "given", "the next", pairs)


PARTS = ("operations", "scores", "salient", "directions", "composition", "behaviour", "causal")


@pytest.fixture(scope="module")
def planted_card() -> Any:
    model = hl.load(planted.model())
    return hl.head_card(
        model, "L2H1", relations=[], roles=["induction", "previous_token"], n_prompts=12
    )


def test_the_planted_induction_head_shows_in_weights_behaviour_and_effect(planted_card) -> None:
    card = planted_card
    copies = card.scores.iloc[0]
    assert copies["verdict"] == "copies"
    assert copies["score"] > 0.99
    reads = card.composition[card.composition["side"] == "reads by K"].iloc[0]
    assert reads["partner"] == "L1H0"  # its previous-token head
    assert reads["q_value"] < 1e-3
    behaviour = card.behaviour.set_index("role")
    assert behaviour.loc["induction", "claimed"]
    assert not behaviour.loc["previous_token", "claimed"]
    causal = card.causal.set_index("what")
    repeated = causal.loc["repeated random tokens"]
    assert repeated["ci_low"] > 1  # without it nothing says what comes again
    assert repeated["rank"] == "1 of 4"
    assert abs(repeated["others"]) < 0.1 * repeated["effect"]
    assert list(causal.index) == ["plain text", "repeated random tokens"]


@pytest.mark.long
def test_operations_are_the_heads_rows_of_the_maps_corrected_over_themselves() -> None:
    relation, other = words(name="first"), words(seed=5, name="second")
    model = implementing("llama", {(1, 2): token_map(relation)})
    mapped = maps(model, [relation, other])
    card = hl.head_card(model, "1.2", mapped=mapped, roles=[], causal=False)
    best = card.operations.iloc[0]
    assert (best["relation"], best["direction"], best["score"]) == ("first", "promotes", 1.0)
    assert best["claimed"]
    rows = mapped.of("L1H2")
    by_hand = [best["p_value"] * len(rows)]  # the smallest of m p-values
    np.testing.assert_allclose(best["q_value"], by_hand, rtol=1e-9)
    again = mapped_operations(model, Head(1, 2), [relation, other], None, 0.05, lambda text: None)
    pd.testing.assert_frame_equal(again, card.operations)
    assert set(card.salient.iloc[0].index) == {
        "source",
        "token",
        "gain",
        "targets",
        "suppressed",
        "cluster",
    }
    sources = {source for source, _ in relation.pairs}
    assert card.salient["source"].iloc[0] in sources


def test_scores_at_hand_are_used_and_foreign_ones_refused() -> None:
    model = hl.load(planted.model())
    scores = hl.score(model, ["previous_token"], n_prompts=4)
    card = hl.head_card(model, "L1H0", relations=[], scores=scores, causal=False)
    own = scores.frame.query("layer == 1 and head == 0")
    pd.testing.assert_frame_equal(card.behaviour, own.reset_index(drop=True))
    assert card.scores.iloc[1]["what"].startswith("previous token")
    big = hl.load(planted.model(n_heads=8))
    with pytest.raises(PlanError, match="score it anew"):
        hl.head_card(big, "L1H7", relations=[], scores=scores, causal=False)


def test_maps_of_other_weights_are_refused() -> None:
    relation = words()
    mapped = maps(implementing("llama", {(1, 2): token_map(relation)}), relation)
    other = implementing("llama", {(1, 1): token_map(relation)})
    with pytest.raises(PlanError, match="other weights"):
        hl.head_card(other, "1.2", mapped=mapped, roles=[], causal=False)


def test_a_short_context_and_a_small_vocabulary_have_cards_too() -> None:
    model = hl.load(build("gpt2", n_positions=20, vocab_size=24), tokenizer=tiny_tokenizer(24))
    relation = words_of(24)
    card = hl.head_card(model, "0.1", relations=[], roles=[], causal=False)
    assert len(card.scores) == 2
    mapped = maps(model, relation, min_pairs=5, k=2)
    assert len(hl.head_card(model, "0.1", mapped=mapped, roles=[], causal=False).salient) == 24


def test_hostile_text_is_made_visible() -> None:
    relation = words(name="red\x1b[31m")
    model = hl.load(build("llama"), tokenizer=tiny_tokenizer())
    card = hl.head_card(model, "0.1", relations=[relation], roles=[], causal=False)
    assert "\x1b" not in repr(card)
    assert "\x1b" not in card._repr_html_()


def test_as_json_text_and_html(planted_card) -> None:
    card = planted_card
    document = json.loads(card.to_json())
    assert document["head"] == "L2H1"
    for part in PARTS:
        assert len(document[part]) == len(getattr(card, part))
    assert "L2H1 of planted-llama" in repr(card)
    page = card._repr_html_()
    for table in card.tables():
        assert table.caption in page


def test_token_texts_are_escaped() -> None:
    tokenizer = tiny_tokenizer()
    bad = "<script>alert(1)</script>"
    text = tokenizer.backend_tokenizer.to_str().replace('"w50"', json.dumps(bad))
    tokenizer._tokenizer = tokenizer.backend_tokenizer.from_str(text)
    card = hl.head_card(
        hl.load(build("llama"), tokenizer=tokenizer),
        "0.1",
        relations=[words(name=bad)],
        roles=[],
        causal=False,
    )
    everything = "".join(card.salient["targets"]) + "".join(card.directions["reads"])
    assert bad in everything or bad in "".join(card.salient["source"])
    assert "<script>" not in card._repr_html_()


def test_what_a_model_cannot_give_is_said() -> None:
    card = hl.head_card(
        hl.load(build("deepseek_v3"), tokenizer=tiny_tokenizer()),
        "1.0",
        relations=[words()],
        roles=[],
        causal=False,
    )
    assert all(getattr(card, part).empty for part in PARTS)
    assert len(card.notes) == 6
    assert all("latent attention" in note for note in card.notes)
    assert "No operations" in repr(card)


@pytest.mark.parametrize(
    ("head", "options", "error", "says"),
    [
        ("L9H0", {}, HeadError, "L9H0"),
        ("0.*", {}, HeadError, "a card is of one"),
        ("0.1", {"relations": ["no such"]}, PromptError, "no such"),
        ("0.1", {"relations": [], "roles": ["nonsense"]}, RoleError, "nonsense"),
    ],
)
def test_wrong_arguments(head, options, error, says) -> None:
    model = hl.load(build("llama"), tokenizer=tiny_tokenizer())
    with pytest.raises(error, match=says):
        hl.head_card(model, head, **options)


def test_ablation_needs_text_and_so_a_tokenizer() -> None:
    with pytest.raises(PromptError, match="causal=False"):
        hl.head_card(hl.load(build("llama")), "0.1", relations=[], roles=[])


@pytest.mark.long
def test_smollm2s_induction_head_reads_the_previous_token_head_by_its_keys() -> None:
    from real_model import smollm2

    card = hl.head_card(smollm2(), "L18H6", relations=[], roles=[], causal=False)
    reads = card.composition[card.composition["side"] == "reads by K"]
    assert "L16H0" in list(reads["partner"])
