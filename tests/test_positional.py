"""Positional heads: the profile by lag, RoPE pairs, and what the roles that read text share."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from real_model import PLANTED_HEADS, smollm2
from scipy.optimize import minimize
from scipy.stats import spearmanr
from tiny_models import build, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import headlab as hl
from headlab import planted
from headlab.attention import contributions, keep, rope_pairs
from headlab.roles import prose_behaviours
from headlab.roles.base import ROLES, Probing
from headlab.roles.positional import Positional, _slope, fit_profile, overlaps
from headlab.roles.prose_rows import AWAKE, TEXT_SCHEMA, prose_rows, text_ids
from headlab.roles.rope import rank_correlation, variance_shares
from headlab.tasks import RecordError

ON_TEXT = ("positional", "local", "long_range")


@pytest.fixture(scope="module")
def haystack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text in the words of the tiny tokenizer."""
    folder = tmp_path_factory.mktemp("haystack")
    words = np.random.default_rng(4).integers(4, 97, 20000)
    (folder / "words.txt").write_text(" ".join(f"w{word}" for word in words), "utf-8")
    return folder


@cache
def tiny(family: str, **changes: Any) -> hl.Model:
    return hl.load(build(family, **changes), tokenizer=tiny_tokenizer())


def words(n: int, seed: int = 0) -> str:
    return " ".join(f"w{word}" for word in np.random.default_rng(seed).integers(4, 97, n))


# -- the profile by lag --------------------------------------------------------------------------

#: Keys by bin in rows of 12, 20 and 40 keys, lags 0, 1, 2–7, 8–31, 32 and more.
KEYS = np.array([[1, 1, 6, 4, 0], [1, 1, 6, 12, 0], [1, 1, 6, 24, 8]])
WEIGHTS = np.array([1.0, 5.0, 0.5, 0.1, 0.02])


def by_distance(weights: np.ndarray, keys: np.ndarray = KEYS) -> np.ndarray:
    mass = weights * keys
    return mass / mass.sum(-1, keepdims=True)


def test_a_head_that_reads_distance_alone_is_explained_wholly_whatever_the_rows_leave_at_rest():
    rest = np.random.default_rng(0).uniform(0.05, 1, (6, 1, 3, 1))
    value, null = overlaps((by_distance(WEIGHTS) * rest).astype(np.float32), KEYS)
    np.testing.assert_allclose(value, 1, atol=1e-5)
    even = KEYS / KEYS.sum(1, keepdims=True)
    by_hand = 1 - np.abs(by_distance(WEIGHTS) - even).sum(1) / 2
    np.testing.assert_allclose(null, np.broadcast_to(by_hand, null.shape), atol=1e-5)


def test_an_even_head_is_explained_no_better_than_by_even_attention():
    even = np.broadcast_to(KEYS / KEYS.sum(1, keepdims=True), (5, 2, 3, 5))
    value, null = overlaps(even.astype(np.float32), KEYS)
    np.testing.assert_allclose(value, null, atol=1e-5)
    np.testing.assert_allclose(value, 1, atol=1e-5)


def test_a_head_that_looks_elsewhere_in_every_text_is_not_explained():
    lags = np.zeros((5, 1, 3, 5), np.float32)
    for prompt in range(
        5
    ):  # all mass in one bin, another in each text; a row without such keys rests
        lags[prompt, 0, KEYS[:, prompt] > 0, prompt] = 1
    value, _ = overlaps(lags, KEYS)
    assert np.nanmax(value) == 0
    assert np.isnan(value[4, 0]).tolist() == [True, True, False]


def test_rows_at_rest_have_no_overlap_and_do_not_shape_the_profile():
    lags = np.broadcast_to(by_distance(WEIGHTS), (4, 1, 3, 5)).astype(np.float32).copy()
    lags[0, 0, 1] = np.array([0, 0, 0, 1, 0]) * AWAKE * 0.9
    value, _ = overlaps(lags, KEYS)
    assert np.isnan(value[0, 0, 1])
    np.testing.assert_allclose(value[~np.isnan(value)], 1, atol=1e-5)


def test_the_profile_is_the_most_likely_one():
    rng = np.random.default_rng(1)
    rest = np.array([0.9, 0.4, 0.7])
    mass = np.stack(
        [r * rng.dirichlet(np.ones(5) * (c > 0) + 1e-9) for r, c in zip(rest, KEYS, strict=True)]
    )
    mass[KEYS == 0] = 0
    rest = mass.sum(1)

    def unlikelihood(log_weights: np.ndarray) -> float:
        return -float((mass * np.log(by_distance(np.exp(log_weights)) + 1e-300)).sum())

    best = np.exp(minimize(unlikelihood, np.zeros(5), tol=1e-10).x)
    found = fit_profile(mass.sum(0)[None], rest[None], KEYS)[0]
    np.testing.assert_allclose(by_distance(found), by_distance(best), atol=1e-3)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"max_position_embeddings": 400}),
        ("mistral", {"max_position_embeddings": 400, "sliding_window": 70}),
        ("bert", {"max_position_embeddings": 400}),
        ("llama4_text", {"max_position_embeddings": 400, "attention_chunk_size": 60}),
    ],
)
def test_masses_by_lag_and_visible_keys_equal_transformers_patterns(
    family, changes, haystack: Path
):
    rows = prose_rows(Probing(tiny(family, **changes), seed=5, n_prompts=2, haystack=haystack))
    module = build(family, **changes)
    module.set_attn_implementation("eager")
    with torch.no_grad():
        a = (
            torch.stack(module(torch.from_numpy(rows.ids), output_attentions=True).attentions, 1)
            .double()
            .numpy()
        )
    n = rows.ids.shape[1]
    lag = np.arange(n)[:, None] - np.arange(n)
    reach = np.where(a[0, :, 0] > 0, lag, 0).max(-1)
    np.testing.assert_array_equal(rows.reach, reach[:, 1:])
    a[..., 0] = 0  # the first token is left out of the rest
    for at, query in enumerate(rows.lag_queries):
        for b, (low, high) in enumerate(pairwise(rows.lag_edges)):
            inside = (lag[query] >= low) & (lag[query] < high)
            np.testing.assert_allclose(
                rows.lags[..., at, b], a[..., query, inside].sum(-1), atol=1e-3
            )
            np.testing.assert_array_equal(
                rows.lag_keys[:, at, b], (a[0, :, 0, query, inside] > 0).sum(0)
            )
    if n > 256:
        early = a[..., 256:, 2:4].mean((-1, -2))
        np.testing.assert_allclose(rows.early[..., 1], early, atol=1e-5)


def test_slopes_are_those_of_power_laws_and_leave_out_what_is_unseen():
    at = np.array([1, 2, 4, 8, 16.0])
    profile = np.stack(
        [3 / at, at**0.5 / 9, np.where(at < 8, 1 / at, np.nan), np.where(at < 4, 1, np.nan)]
    )[None]
    np.testing.assert_allclose(_slope(profile, at)[0], [-1, 0.5, -1, np.nan], atol=1e-9)


# -- claims --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "n_kv_heads"), [("llama", None), ("llama", 2), ("gpt2", None)])
def test_heads_at_a_fixed_distance_are_claimed_and_no_others(family: str, n_kv_heads: int | None):
    heads = {**PLANTED_HEADS, "L1H1": "positional", "L3H2": "positional"}
    made = planted.model(family, heads, distractors=4, n_kv_heads=n_kv_heads, max_context=160)
    model = hl.load(made.module, tokenizer=made.tokenizer)
    scores = hl.score(model, "positional", n_prompts=10)
    assert set(scores.claimed("positional")) == {"L1H0", "L1H1", "L3H2"}
    profile = scores.details.query("detail == 'offset_profile'")
    peak = profile.loc[profile.groupby(["layer", "head"])["value"].idxmax()].set_index(
        ["layer", "head"]
    )["at"]
    assert peak[(1, 0)] == 1
    assert peak[(1, 1)] == peak[(3, 2)] == 4
    assert ("rope_contribution" in set(scores.details["detail"])) == (family == "llama")


@pytest.mark.parametrize("scale", [1 / 12, 0.12])
def test_randomly_initialised_heads_are_not_positional(scale: float):
    config = LlamaConfig(
        hidden_size=144, intermediate_size=288, num_hidden_layers=3, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=smollm2().spec.n_vocab, max_position_embeddings=512, initializer_range=scale,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = LlamaForCausalLM(config).eval()
    scores = hl.score(hl.load(module, tokenizer=smollm2().tokenizer), "positional", n_prompts=10)
    assert scores.frame["score"].notna().all()
    assert not scores.frame["claimed"].any()


@pytest.mark.slow
def test_the_previous_token_head_of_the_real_model_is_the_most_positional():
    frame = hl.score(smollm2(), "positional", n_prompts=3).frame
    best = frame.loc[frame["effect"].idxmax()]
    assert (best["layer"], best["head"]) == (16, 0)
    assert best["score"] > 0.8
    assert frame.set_index(["layer", "head"]).loc[(18, 6), "effect"] < 0.3  # an induction head


# -- RoPE pairs ----------------------------------------------------------------------------------

HALF, INTERLEAVED = "half", "interleaved"
#: Family: layout, first dimension, pairs, base; as the model's own code has them.
LAYOUTS = {
    "llama": (HALF, 0, 5, 10000),
    "gpt_neox": (HALF, 0, 2, 10000),
    "gptj": (INTERLEAVED, 0, 2, 10000),
    "codegen": (INTERLEAVED, 0, 2, 10000),
    "cohere2": (INTERLEAVED, 0, 5, 10000),
    "glm4": (INTERLEAVED, 0, 3, 10000),
    "deepseek_v3": (HALF, 8, 2, 10000),
    "gpt_oss": (HALF, 0, 5, 10000),
}


@pytest.mark.parametrize("family", LAYOUTS)
def test_pairs_turn_by_their_frequency_and_sum_to_the_score(family: str):
    layout, start, n, base = LAYOUTS[family]
    model = tiny(family)
    pairs = rope_pairs(model)[0]
    at = np.arange(n)
    wanted = (
        (start + at, start + at + n) if layout == HALF else (start + 2 * at, start + 2 * at + 1)
    )
    np.testing.assert_array_equal([pairs.first, pairs.second], wanted)
    frequency = base ** (-at / n)
    np.testing.assert_allclose(pairs.frequency, frequency, rtol=1e-5)
    ids = torch.full((1, 30), 9)
    trace = model.trace(ids, keep=[keep.tensors("q", "k")], logits="none")
    q, k = (trace.tensor(name, 0)[0].double().transpose(0, 1) for name in ("q", "k"))
    q = q.unflatten(0, (k.shape[0], -1))  # [kv, member, query, d]
    parts = contributions(q, k[:, None], pairs, 0.3)
    np.testing.assert_allclose(
        parts.sum(-1), 0.3 * (q @ k[:, None].transpose(-1, -2)), rtol=1e-12, atol=1e-12
    )
    # With one token repeated, a pair's part is R·cos(ω·lag + φ), whose second difference is known.
    row = parts[0, 0, -1].numpy()
    middle = 2 * np.cos(frequency) * row[1:-1, :-1]
    np.testing.assert_allclose(row[2:, :-1] + row[:-2, :-1], middle, atol=1e-4)
    np.testing.assert_allclose(row[:, -1], row[0, -1], atol=1e-5)  # what does not turn


def test_layers_without_positions_and_models_without_rope_have_no_pairs():
    assert set(rope_pairs(tiny("smollm3"))) == {0}
    assert set(rope_pairs(tiny("llama4_text"))) == {0}
    assert set(rope_pairs(tiny("cohere2"))) == {0}
    assert rope_pairs(tiny("gpt2")) == rope_pairs(tiny("bert")) == {}
    base = {at: pairs.frequency[1] for at, pairs in rope_pairs(tiny("gemma3_text")).items()}
    np.testing.assert_allclose([base[0], base[1]], [1e4**-0.2, 1e6**-0.2], rtol=1e-4)


def test_shares_of_the_score_are_covariances_over_the_keys_a_row_sees():
    rng = np.random.default_rng(2)
    parts = rng.normal(size=(2, 3, 9, 4)) + rng.normal(size=4)
    seen = np.tril(np.ones((3, 9), bool), 6)
    found = variance_shares(torch.from_numpy(parts), torch.from_numpy(seen)).numpy()
    np.testing.assert_allclose(found.sum(-1), 1)
    for head, row in np.ndindex(2, 3):
        own = parts[head, row, seen[row]]
        wanted = [np.cov(own[:, i], own.sum(1))[0, 1] / own.sum(1).var(ddof=1) for i in range(4)]
        np.testing.assert_allclose(found[head, row], wanted)


def test_long_range_allocation_is_spearmans_over_pairs():
    values = np.random.default_rng(3).normal(size=(2, 3, 8))
    wanted = [[spearmanr(np.arange(8), head).statistic for head in layer] for layer in values]
    np.testing.assert_allclose(rank_correlation(values), wanted)
    values[0, 0, 3] = np.nan
    assert np.isnan(rank_correlation(values)[0, 0])


# -- texts of the user's, and what cannot be measured --------------------------------------------


def test_records_replace_the_essays_for_every_role_on_text():
    for role in ON_TEXT:
        assert ROLES[role].schema == TEXT_SCHEMA
    jsonschema.Draft202012Validator.check_schema(TEXT_SCHEMA)
    model = tiny("llama", max_position_embeddings=400)
    texts = [{"text": words(400, seed)} for seed in range(4)]
    ids = text_ids(Probing(model, records=tuple(texts)), 384)
    assert ids[2].tolist() == [1] + [int(word[1:]) for word in texts[2]["text"].split()[:383]]
    scores = hl.score(model, ON_TEXT, n_prompts=9, data=dict.fromkeys(ON_TEXT, texts))
    assert (scores.frame["n"] == 4).all()


def test_a_record_too_short_is_named_and_one_text_alone_has_no_profile():
    model = tiny("llama", max_position_embeddings=400)
    texts = [{"text": words(400)}, {"text": words(50)}]
    for role in ON_TEXT:
        with pytest.raises(
            RecordError, match="record 1: its text has 50 tokens, but 383 are needed"
        ):
            hl.score(model, role, data={role: texts})
    frame = hl.score(model, "positional", data={"positional": texts[:1]}).frame
    assert frame["score"].isna().all()
    assert frame["note"].str.startswith("not measurable: a profile needs another text").all()


def test_what_cannot_be_read_is_noted_not_raised(haystack: Path):
    frame = hl.score(hl.load(build("llama")), ON_TEXT, n_prompts=2).frame
    assert frame["score"].isna().all()
    assert frame["note"].str.contains("without a tokenizer").all()
    short = tiny("llama", max_position_embeddings=40)
    frame = hl.score(short, "positional", n_prompts=4, haystack=haystack).frame
    assert frame["note"].str.contains("too short").all()


def test_chunks_and_windows_hide_far_keys_rather_than_score_them_0(haystack: Path):
    model = tiny("llama4_text", max_position_embeddings=400, attention_chunk_size=60)
    scores = hl.score(model, ["long_range", Positional()], n_prompts=4, haystack=haystack)
    far = scores.frame.query("role == 'long_range'")
    assert far[far["layer"] == 0]["note"].str.startswith("out of window").all()
    assert far[far["layer"] == 1]["score"].notna().all()
    profile = scores.details.query("detail == 'offset_profile'")
    assert profile[profile["layer"] == 0]["at"].max() == 48
    assert profile[profile["layer"] == 1]["at"].max() == 256
    assert scores.frame.query("role == 'positional'")["score"].notna().all()


# -- behaviours ----------------------------------------------------------------------------------


def test_behaviours_compare_texts_that_differ_only_in_what_they_take_away(
    monkeypatch, haystack: Path
):
    ran: list[torch.Tensor] = []

    def record(model: hl.Model, ids: torch.Tensor) -> torch.Tensor:
        ran.append(ids)
        return ids[:, 1:].double() * len(ran)

    monkeypatch.setattr(prose_behaviours, "next_token_log_probability", record)
    model = tiny("llama", max_position_embeddings=400)
    own = tuple({"text": words(400, seed)} for seed in range(5))
    for records in (None, own):
        probing = Probing(model, n_prompts=3, haystack=haystack, records=records)
        ran.clear()
        near = prose_behaviours.near_context(probing)
        assert len(near) == len(ran[0]) == 32
        assert ran[0].shape[1] == 32
        ran.clear()
        gain = prose_behaviours.far_context(probing)
        whole, short = ran
        assert (whole.shape[1], short.shape[1]) == (224, 57)
        assert torch.equal(whole[:, -56:], short[:, 1:])
        assert torch.equal(whole[:, 192:], whole[:, 32:64])
        assert whole.numel() + short.numel() < 1500
        np.testing.assert_allclose(gain, -whole[:, -31:].double().mean(1))
        ran.clear()
        prose_behaviours.word_order(probing)
        ordered, lost = ran
        assert torch.equal(ordered[:, -7:], lost[:, -7:])
        assert torch.equal(ordered.sort(1).values, lost.sort(1).values)
        assert (ordered[:, 1:-7] != lost[:, 1:-7]).float().mean() > 0.8
        assert ordered.numel() + lost.numel() < 1500


def test_behaviours_that_a_model_cannot_show_are_nan(haystack: Path):
    for model in (tiny("bert"), hl.load(build("llama"))):
        for measure in (prose_behaviours.near_context, prose_behaviours.word_order):
            assert np.isnan(measure(Probing(model, haystack=haystack))).all()
    assert np.isnan(prose_behaviours.far_context(Probing(tiny("llama"), haystack=haystack))).all()
