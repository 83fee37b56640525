"""Heads that need the long context: the second-moment estimate, the shares, and the foreign bulk."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from real_model import smollm2
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab import planted
from headlab.roles.base import Probing
from headlab.roles.long_context import ROWS, LongContext, correlation, log_bulk, log_mean_exp
from headlab.roles.prose_rows import text_ids
from headlab.tasks import RecordError

#: Settings that fit a tiny model: a bulk of positions 4 to 167 of 216.
SMALL = LongContext(length=216, recent=16)
BULK = slice(4, 216 - ROWS - 16)


@pytest.fixture(scope="module")
def haystack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("haystack")
    words = np.random.default_rng(4).integers(4, 97, 12000)
    (folder / "words.txt").write_text(" ".join(f"w{word}" for word in words), "utf-8")
    return folder


@cache
def tiny(family: str, **changes: Any) -> hl.Model:
    changes.setdefault("max_position_embeddings", 400)
    return hl.load(build(family, **changes), tokenizer=tiny_tokenizer())


# -- the estimate --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4096, 8192])
def test_gaussian_keys_have_the_predicted_bulk_within_a_few_per_cent(n: int):
    rng = torch.Generator().manual_seed(n)
    d = 64
    mixing = torch.randn(d, d, generator=rng) / d**0.5
    keys = torch.randn(3, n, d, generator=rng) @ mixing + torch.randn(3, 1, d, generator=rng)
    queries = torch.randn(3, 40, d, generator=rng)
    exact = torch.logsumexp(0.125 * queries.double() @ keys.double().transpose(1, 2), -1)
    found = log_bulk(queries, keys, 0.125)
    spread = (0.125 * queries @ keys.transpose(1, 2)).std(-1)
    assert 0.5 < spread.min() < spread.max() < 2.5
    assert (found - exact).abs().max() < 0.05 * exact.abs().min()
    assert (found - exact).abs().mean() < 0.03
    # A first moment alone, or a wrong scale, would not do.
    mean_only = torch.log(torch.tensor(n)) + 0.125 * (queries @ keys.mean(1)[..., None])[..., 0]
    assert (mean_only - exact).abs().mean() > 0.3


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_keys_of_zero_count_as_their_number(softcap: float | None):
    found = log_bulk(torch.randn(2, 5, 8), torch.zeros(2, 300, 8), 0.3, softcap)
    np.testing.assert_allclose(found.exp(), 300, rtol=1e-4)


def test_a_softcap_enters_the_expectation():
    grid = np.linspace(-12, 12, 20001)
    for level, variance, cap in ((0.7, 2.0, 3.0), (-2.0, 9.0, 2.5), (5.0, 0.5, 50.0)):
        scores = level + np.sqrt(variance) * grid
        density = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
        wanted = np.log(np.trapezoid(np.exp(cap * np.tanh(scores / cap)) * density, grid))
        args = torch.tensor([level]).double(), torch.tensor([variance]).double()
        np.testing.assert_allclose(log_mean_exp(*args, cap)[0], wanted, atol=2e-3)
        np.testing.assert_allclose(log_mean_exp(*args, None)[0], level + variance / 2)


def test_correlation_leaves_out_what_is_not_measured():
    a, b = np.random.default_rng(0).normal(size=(2, 4, 5))
    b += a
    a[1, 2] = b[0, 0] = np.nan
    known = ~np.isnan(a + b)
    assert correlation(a, b) == pytest.approx(np.corrcoef(a[known], b[known])[0, 1])
    assert np.isnan(correlation(a, np.ones_like(a)))


# -- the measurement -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_shares_are_those_of_transformers_patterns_with_own_and_foreign_bulk(
    family: str, haystack: Path
):
    changes = {} if family == "llama" else {"sliding_window": 300}
    model = tiny(family, **changes)
    probing = Probing(model, seed=3, n_prompts=3, haystack=haystack)
    found = SMALL.measure(probing)
    own = text_ids(probing, 216)
    foreign = own.clone()
    for prompt in range(3):
        foreign[prompt, BULK] = own[(prompt - 1) % 3, BULK]
    module = build(family, max_position_embeddings=400, **changes)
    module.set_attn_implementation("eager")
    for ids, measured in ((own, found.values), (foreign, found.null)):
        with torch.no_grad():
            a = torch.stack(module(ids, output_attentions=True).attentions, 1).double().numpy()
        rows = a[..., -ROWS:, :]
        share = rows[..., BULK].sum(-1) / rows.sum(-1)
        np.testing.assert_allclose(measured, share.mean(-1), atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "glm4"])
def test_predictions_equal_the_formula_head_by_head(family: str, haystack: Path):
    model = tiny(family, **({"sliding_window": 300} if family == "gpt_oss" else {}))
    probing = Probing(model, n_prompts=2, haystack=haystack)
    found = SMALL.measure(probing)
    trace = model.trace(text_ids(probing, 216), keep=hl.keep.tensors("q", "k"), logits="none")
    local = np.r_[0 : BULK.start, BULK.stop : 216]
    predicted = np.empty((2, 2, 6, ROWS))
    for layer, head in np.ndindex(2, 6):
        scaling = model.spec.layers[layer].scaling
        q = trace.of_head("q", hl.Head(layer, head)).double().numpy()
        k = trace.of_head("k", hl.Head(layer, head)).double().numpy()
        for prompt, row in np.ndindex(2, ROWS):
            query, keys = q[prompt, 216 - ROWS + row], k[prompt]
            seen = local[local <= 216 - ROWS + row]
            a_local = np.exp(scaling * keys[seen] @ query).sum()
            mean, spread = keys[BULK].mean(0), np.cov(keys[BULK].T, bias=True)
            exponent = scaling * query @ mean + scaling**2 * query @ spread @ query / 2
            a_bulk = (BULK.stop - BULK.start) * np.exp(exponent)
            predicted[prompt, layer, head, row] = a_bulk / (a_local + a_bulk)
    np.testing.assert_allclose(
        found.details["predicted_share"].values, predicted.mean((0, 3)), atol=1e-4
    )
    looks = np.stack([look.values for look in found.looks])
    np.testing.assert_allclose(
        found.details["prediction_error"].values, np.abs(predicted - looks).mean((0, 3)), atol=1e-4
    )
    alike = (predicted < 0.4) == (looks < 0.4)
    np.testing.assert_allclose(found.details["agreement"].values, alike.mean((0, 3)), atol=0.02)
    assert found.notes[-1, -1].startswith("predicted and measured bulk share correlate at")


def test_an_even_head_is_predicted_exactly_and_scores_its_null(haystack: Path):
    module = build("llama", max_position_embeddings=400)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "q_proj" in name:
                parameter.zero_()
    model = hl.load(module, tokenizer=tiny_tokenizer())
    found = SMALL.measure(Probing(model, n_prompts=4, haystack=haystack))
    wanted = np.mean([164 / (query + 1) for query in range(216 - ROWS, 216)])
    np.testing.assert_allclose(found.values, wanted, atol=1e-4)
    np.testing.assert_allclose(found.null, found.values, atol=1e-4)
    np.testing.assert_allclose(found.details["prediction_error"].values, 0, atol=1e-4)
    np.testing.assert_array_equal(found.details["agreement"].values, 1)
    np.testing.assert_array_equal(found.details["local_rows"].values, 0)


def far_repeats(n: int) -> list[dict[str, str]]:
    """Texts whose last words all stand once in their own bulk, and in no other text."""
    rng = np.random.default_rng(7)
    texts = []
    for at in range(n):
        pool = rng.permutation(np.arange(4 + at * 60, 64 + at * 60))  # 60 words of this text's own
        filler = rng.integers(4 + 60 * n, 100 + 60 * n, 216 - 60 - 1 - ROWS)
        texts.append([*filler[:20], *pool, *filler[20:], *pool[:ROWS]])
    return [{"text": " ".join(f"w{word}" for word in text)} for text in texts]


def test_a_head_that_fetches_from_the_far_context_is_claimed_and_one_at_a_distance_is_not():
    heads = {
        "L0H1": "duplicate_token",
        "L1H0": "previous_token",
        "L2H1": "induction",
        "L0H2": "sink",
        "L1H1": "positional",
    }
    made = planted.model("llama", heads, distractors=4, vocab=100 + 60 * 8 + 4, max_context=256)
    model = hl.load(made.module, tokenizer=made.tokenizer)
    names = model.tokenizer.convert_ids_to_tokens(list(range(model.spec.n_vocab)))
    texts = [
        {"text": " ".join(names[int(word[1:])] for word in record["text"].split())}
        for record in far_repeats(8)
    ]
    scores = hl.score(model, [SMALL], n_prompts=8, data={"long_context": texts})
    assert set(scores.claimed("long_context")) == {"L0H1", "L2H1"}
    frame = scores.frame.set_index(["layer", "head"])
    assert frame.loc[(0, 1), "score"] > 0.8
    assert frame.loc[[(1, 0), (1, 1), (0, 2)], "score"].max() < 0.1


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_random_heads_do_not_need_the_long_context(scale: float, haystack: Path):
    module = build("llama", max_position_embeddings=400, num_attention_heads=12, head_dim=10)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "q_proj" in name:
                parameter.mul_(scale)
    model = hl.load(module, tokenizer=tiny_tokenizer())
    frame = hl.score(model, [SMALL], n_prompts=10, haystack=haystack).frame
    assert frame["score"].notna().all()
    assert not frame["claimed"].any()


def test_layers_whose_window_hides_the_bulk_are_out_of_window(haystack: Path):
    for family, changes, blind in (
        ("gemma2", {"sliding_window": 80}, True),
        ("gemma2", {"sliding_window": 120}, False),
        ("llama4_text", {"attention_chunk_size": 60}, True),
    ):
        model = tiny(family, **changes)
        scores = hl.score(model, [SMALL], n_prompts=4, haystack=haystack)
        first = scores.frame["layer"] == 0
        assert scores.frame[~first]["score"].notna().all()
        assert scores.frame[first]["score"].isna().all() == blind
        assert scores.frame[first]["note"].str.startswith("out of window").all() == blind
        assert (0 in set(scores.details["layer"])) != blind


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("bert", {}, "left to right"),
        ("llama", {"max_position_embeddings": 100}, "too short"),
    ],
)
def test_what_cannot_be_measured_is_noted(family: str, changes: dict, why: str, haystack: Path):
    frame = hl.score(tiny(family, **changes), "long_context", n_prompts=3, haystack=haystack).frame
    assert frame["score"].isna().all()
    assert frame["note"].str.contains(why).all()
    frame = hl.score(hl.load(build("llama", max_position_embeddings=600)), "long_context").frame
    assert frame["note"].str.contains("without a tokenizer").all()


def test_records_are_checked_against_schema_and_length():
    assert LongContext.schema is not None
    jsonschema.Draft202012Validator.check_schema(LongContext.schema)
    model = tiny("llama")
    good = {"text": " ".join(["w5"] * 216)}
    with pytest.raises(RecordError, match="record 1: its text has 3 tokens, but 215 are needed"):
        hl.score(model, [SMALL], data={"long_context": [good, {"text": "w5 w6 w7"}]})
    frame = hl.score(model, [SMALL], data={"long_context": [good]}).frame
    assert frame["note"].str.contains("bulk of another text").all()


@pytest.mark.slow
def test_late_heads_of_the_real_model_read_a_bulk_of_their_own_more_than_a_foreign_one():
    found = LongContext(length=320).measure(Probing(smollm2(), n_prompts=3))
    effect = (found.values - found.null).mean(0)
    assert effect[15:].mean() > 0.01 > np.abs(effect[:5].mean())
    assert correlation(found.details["predicted_share"].values, found.values.mean(0)) > 0.5
