"""Episodic heads: profiles against dense scores, planted heads, and what must not pass."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from real_model import PLANTED_HEADS, planted_model, smollm2
from test_planted_roles import MORE, opened, random_gpt2, random_llama
from tiny_models import ENCODER_DECODER, FAMILIES, VOCAB_SIZE, build, tiny_tokenizer

import headlab as hl
from headlab import planted
from headlab.roles import cmr
from headlab.roles.base import Probing
from headlab.roles.episodic import Episodic, closeness, forward_peak, profiles_of
from headlab.tasks import RecordError
from headlab.tasks.repeated_lists import LIST_SCHEMA, given_lists, random_lists

ROLE = Episodic()


def tiny(family: str, **changes):
    return hl.load(build(family, **changes), tokenizer=tiny_tokenizer())


def some_lists(n=24, bos=1):
    return random_lists(np.arange(4, VOCAB_SIZE), 3, n, 0, bos)


# -- the profile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_oss", "bert"])
def test_profiles_are_mean_scores_by_lag(family: str):
    """From q and k in float64: scaling, soft cap and grouped keys by the plain formula."""
    model, lists = tiny(family), some_lists()
    ids = torch.from_numpy(np.stack([item.repeated for item in lists]))
    counting = np.zeros((3, 24), bool)
    counting[:, 6:17] = counting[1, 20] = True
    found = profiles_of(model, ids, 24, 1, counting)
    layer = 1  # of gemma2 and gpt_oss, the one without a window
    spec = model.spec.layers[layer]
    trace = model.trace(ids, keep=hl.keep.tensors("q", "k", "pattern"), logits="none")
    q = trace.tensor("q", layer).double().numpy()
    k = trace.tensor("k", layer).double().numpy().repeat(spec.n_heads // spec.n_kv_heads, 2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * spec.scaling
    if spec.softcap is not None:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    for prompt, head, lag in [(0, 0, -8), (1, 1, 1), (1, 2, 5), (2, 2, 0), (0, 1, 8)]:
        rows = [i for i in np.flatnonzero(counting[prompt]) if 0 <= i + lag < 24]
        wanted = np.mean([scores[prompt, head, 25 + i, 1 + i + lag] for i in rows])
        assert found["profile"][prompt, layer, head, lag + 8] == pytest.approx(wanted, abs=1e-5)
    far = [scores[0, 1, 25 + 9, 1 + 9 + lag] for lag in (-8, -7, -6, 6, 7, 8)]
    ahead = scores[0, 1, 25 + 9, 1 + 10] - np.mean(far)
    assert found["rows"][0, layer, 1, 9] == pytest.approx(ahead, abs=1e-5)
    weights = trace.tensor("pattern", layer).numpy()[:, :, 25:].mean(2)  # [prompt, head, key]
    first, middle, last = (weights[..., a:b].mean(-1) for a, b in ((1, 3), (3, 23), (23, 25)))
    np.testing.assert_allclose(found["primacy"][:, layer], first - middle, atol=1e-6)
    np.testing.assert_allclose(found["recency"][:, layer], last - middle, atol=1e-6)


def test_reading_scores_changes_nothing():
    model, lists = tiny("gemma2"), some_lists()
    ids = torch.from_numpy(np.stack([item.repeated for item in lists]))
    before = model.logits(ids)
    profiles_of(model, ids, 24, 1, np.ones((3, 24), bool))
    assert not model.edited
    torch.testing.assert_close(model.logits(ids), before, rtol=0, atol=0)


# -- the statistic -------------------------------------------------------------------------------------


def test_closeness_is_one_on_a_curve_of_the_model_and_scale_and_offset_do_not_matter():
    curve = cmr.grid()[11, 14, 3]  # β_enc .6, β_rec .75, γ .3
    assert closeness(curve) == pytest.approx(1, abs=1e-9)
    assert closeness(17 * curve - 80) == pytest.approx(1, abs=1e-9)


def test_a_profile_that_peaks_at_the_token_itself_does_not_count_however_near_cmr_it_lies():
    itself = cmr.grid()[18, 0, 0]  # β_enc .95, β_rec 0: what GPT-2's L3H0 and L0H1 look like
    assert cmr.fit(itself[3:-3]).distance < 0.01
    assert forward_peak(itself) < 0
    assert closeness(itself) == 0


def test_a_profile_that_rises_all_the_way_does_not_count():
    assert closeness(np.arange(17.0)) == 0
    assert closeness(np.arange(17.0)[::-1]) == 0


def test_a_profile_with_a_hidden_lag_is_unknown():
    curve = cmr.grid()[11, 14, 3].copy()
    curve[0] = np.nan
    assert np.isnan(closeness(curve))


# -- models --------------------------------------------------------------------------------------------


def test_planted_induction_heads_are_episodic_and_no_other_head_is():
    scores = hl.score(planted_model(), roles=[ROLE], n_prompts=12)
    assert scores.claimed("episodic") == ["L2H1"]
    row = scores.frame.set_index(["layer", "head"]).loc[(2, 1)]
    assert row["score"] > 0.85
    assert row["null_mean"] < 0.25
    details = scores.details.set_index(["detail", "layer", "head"])["value"]
    assert details["cmr_distance", 2, 1] < 0.1
    assert details["asymmetry", 2, 1] > 3
    assert details["forward_peak", 2, 1] > 3
    assert details["forward_peak", 1, 3] < 0  # the duplicate-token head
    profile = scores.details.query("detail == 'lag_profile' and layer == 2 and head == 1")
    assert profile["at"].tolist() == list(range(-8, 9))
    assert profile["at"].iloc[profile["value"].argmax()] == 1
    assert PLANTED_HEADS["L2H1"] == "induction"


@pytest.mark.parametrize(("family", "groups"), [("llama", 2), ("gpt2", None)])
def test_planted_heads_of_both_families(family: str, groups: int | None):
    made = planted.model(family, MORE, distractors=6, n_kv_heads=groups, max_context=160, seed=1)
    scores = hl.score(opened(made), roles=[ROLE], n_prompts=12, seed=1)
    assert set(scores.claimed("episodic")) == {"L2H0", "L3H1"}


@pytest.mark.parametrize("scale", [1 / 24, 0.12])
@pytest.mark.parametrize("make", [random_llama, random_gpt2])
def test_random_heads_are_not_episodic(make, scale: float):
    model = hl.load(make(0, scale), tokenizer=smollm2().tokenizer)
    scores = hl.score(model, roles=[ROLE], n_prompts=12)
    assert scores.claimed("episodic") == []
    assert scores.frame["score"].notna().all()
    assert scores.frame["null_mean"].mean() < 0.2


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ENCODER_DECODER])
def test_every_family_is_measured_or_says_why_not(family: str):
    model = tiny(family)
    frame = hl.score(model, roles=[ROLE], n_prompts=2).frame
    for at, layer in enumerate(model.spec.layers):  # noqa: B007  (query reads it)
        rows = frame.query("layer == @at")
        chunked = family == "llama4_text" and rows["score"].isna().all()
        if layer.window is not None or chunked:
            assert rows["score"].isna().all()
            assert rows["note"].str.startswith("out of window").all()
        else:
            assert rows["score"].notna().all()


def test_a_short_context_and_a_small_vocabulary_are_said():
    short = hl.score(tiny("gpt2", n_positions=24), roles=[ROLE], n_prompts=2).frame
    assert short["score"].isna().all()
    assert short["note"].str.startswith("not measurable: ").all()


# -- data of the user's --------------------------------------------------------------------------------

WORDS = [f"w{number}" for number in range(4, 30)]


def test_lists_of_the_user_are_read_and_lengths_may_differ():
    records = [{"words": WORDS}, {"text": " ".join(WORDS[:16])}, {"words": WORDS[::-1]}]
    scores = hl.score(tiny("llama"), roles=[ROLE], data={"episodic": records}, n_prompts=2)
    assert (scores.frame["n"] == 3).all()
    item = given_lists(tiny_tokenizer(), records, 0, 1, 128)[1]
    assert item.repeated.tolist() == [1, *range(4, 20), *range(4, 20)]
    assert sorted(item.control[17:]) == list(range(4, 20))
    assert not (item.control == item.repeated)[17:].any()


def test_a_planted_head_is_found_with_lists_of_the_user():
    model = planted_model()
    words = model.token_texts(torch.arange(10, 110)[None])[0]
    rng = np.random.default_rng(0)
    records = [{"words": [w.strip() for w in rng.choice(words, 30, False)]} for _ in range(12)]
    assert hl.score(model, roles=[ROLE], data={"episodic": records}).claimed("episodic") == ["L2H1"]


def test_tokens_that_stand_twice_in_a_list_do_not_count():
    record = {"words": [*WORDS[:10], WORDS[8], *WORDS[10:]]}
    (item,) = given_lists(tiny_tokenizer(), [record], 0, None, None)
    assert np.flatnonzero(~item.once).tolist() == [8, 10]


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"words": WORDS[:15]}, "record 1: .*15 tokens.* 16"),
        ({"words": WORDS * 3}, "record 1: .*78 tokens.* 63"),
        ({"words": ["w5", "w6"] * 10}, "record 1: every token"),
        ({"words": WORDS, "text": "w4"}, "valid under"),
        ({"items": WORDS}, "does not fit the schema"),
    ],
)
def test_a_list_that_cannot_be_used_is_named(record, what: str):
    with pytest.raises(RecordError, match=what):
        hl.score(tiny("llama"), roles=[ROLE], data={"episodic": [{"words": WORDS}, record]})


def test_the_schema_s_examples_fit_it_and_are_long_enough():
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(LIST_SCHEMA)
    for example in LIST_SCHEMA["examples"]:
        Draft202012Validator(LIST_SCHEMA).validate(example)
    assert len(given_lists(smollm2().tokenizer, LIST_SCHEMA["examples"], 0, 1, 2048)) == 2


def test_lists_without_a_tokenizer_are_not_measurable():
    model = hl.load(build("llama"))
    frame = hl.score(model, roles=[ROLE], data={"episodic": [{"words": WORDS}]}).frame
    assert frame["note"].str.startswith("not measurable: the model came without a tokenizer").all()


def test_the_behaviour_falls_when_the_planted_head_is_ablated():
    probing = Probing(planted_model())
    before = ROLE.behaviour.measure(probing)
    with probing.model.edit(ROLE.ablation([hl.Head(2, 1)])):
        after = ROLE.behaviour.measure(probing)
    assert (after < before - 0.5).all()


@pytest.mark.slow
def test_the_strongest_induction_heads_of_the_real_model_are_episodic():
    """The strongest by transformers' eager patterns, as stored."""
    path = Path(__file__).parent / "data" / "smollm2_repeated_tokens.json"
    matching = np.array(json.loads(path.read_text("utf-8"))["scores"]["induction_prefix_matching"])
    strongest = np.argsort(matching, axis=None)[-5:]
    scores = hl.score(smollm2(), roles=[ROLE], n_prompts=13)
    claimed = scores.claimed("episodic")
    for layer, head in zip(*np.unravel_index(strongest, matching.shape), strict=True):
        assert f"L{layer}H{head}" in claimed
    assert len(claimed) < 0.4 * matching.size
