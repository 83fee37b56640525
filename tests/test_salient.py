"""Salient operations: gains and targets against dense formulas, and a head whose mappings are set by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from real_model import smollm2
from tiny_models import build, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import headlab as hl
from headlab.errors import HeadError, PlanError, PromptError, UnsupportedError
from headlab.parameters.salience import norm_gain
from headlab.parameters.salient import clusters_of, salient_operations
from headlab.tasks import relations

#: Ten pairs, as many as a head of the tiny model has dimensions; London is the capital of two.
CAPITALS = [pair for pair in relations("country_capital")[0].pairs if pair[1] != "London"][:10]
SOURCE, TARGET = 10, 40


def vocabulary(planted: list[tuple[str, str]]) -> Any:
    """Token SOURCE + i is the i-th source, TARGET + i its target; the rest means nothing."""
    words = [f"zq{at}" for at in range(97)]
    for at, (source, target) in enumerate(planted):
        words[SOURCE + at], words[TARGET + at] = source, target
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "zq0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="zq0")


def planted_ov(sign: float = 1.0, scrambled: bool = False) -> hl.Model:
    """Layer 0, head 2 turns the i-th capital's country into it: e_i → e_{20 + i}, and nothing else into anything."""
    module: Any = build("llama", num_key_value_heads=6)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        embedding, unembedding = module.model.embed_tokens.weight, module.lm_head.weight
        embedding[:, :10] = 0.0
        unembedding[:, 20:30] = 0.0
        for at in range(10):
            embedding[SOURCE + at] = torch.eye(36)[at] * (2.0 - 0.1 * at)
            unembedding[TARGET + at] = torch.eye(36)[20 + at]
        attention = module.model.layers[0].self_attn
        order = torch.randperm(10, generator=generator) if scrambled else torch.arange(10)
        attention.v_proj.weight[20:30] = torch.eye(36)[:10]
        attention.o_proj.weight[:, 20:30] = sign * torch.eye(36)[20:30][order].T
    return hl.load(module, tokenizer=vocabulary(CAPITALS))


# -- a head set by hand --------------------------------------------------------------------------


def test_a_planted_head_shows_its_mappings_and_their_name():
    found = salient_operations(planted_ov(), "L0H2", n=10)
    assert len(found) == 1
    rows = found[0].rows
    assert str(found[0].head) == "L0H2"
    assert {row.source: row.targets[0] for row in rows} == dict(CAPITALS)
    assert [row.gain for row in rows] == pytest.approx([1.0] * 10)
    assert [row.token for row in rows] == list(range(SOURCE, SOURCE + 10))  # equal: in order of ids
    assert all(row.target_ids[0] == row.token - SOURCE + TARGET for row in rows)
    assert found[0].promotes.pattern.startswith("country_capital")
    assert "country_capital" not in found[0].suppresses.pattern
    # Ten directions at right angles are ten clusters, and one source is no pattern.
    assert sorted(row.cluster for row in rows) == list(range(10))
    assert not any(each.clear for each in found[0].clusters)


def test_a_negative_head_suppresses_them():
    (found,) = salient_operations(planted_ov(-1.0), "0.2", n=10)
    assert {row.source: row.suppressed[0] for row in found.rows} == dict(CAPITALS)
    assert found.suppresses.pattern.startswith("country_capital")
    assert "country_capital" not in found.promotes.pattern


def test_other_heads_and_a_scrambled_one_have_no_mapping():
    found = salient_operations(planted_ov(), n=10)
    assert [str(each.head) for each in found] == [f"L{at}H{h}" for at in range(2) for h in range(6)]
    scrambled = salient_operations(planted_ov(scrambled=True), "L0H2", n=10)
    for each in (*found, *scrambled):
        mapping = [p for p in each.promotes.candidates if p.sort == "mapping" and p.claimed]
        planted = str(each.head) == "L0H2" and each is not scrambled[0]
        known = ["country_capital", "city_country, reversed"]
        assert [p.name for p in mapping] == (known if planted else [])


def test_what_every_direction_raises_is_no_pattern_of_a_head():
    """Ten numbers with a large unembedding are the first targets of whatever is written."""
    words = [(f"a{at}b", str(at)) for at in range(10)]
    module: Any = build("llama")
    with torch.no_grad():
        module.lm_head.weight[TARGET : TARGET + 10] *= 50
    model = hl.load(module, tokenizer=vocabulary(words))
    for found in salient_operations(model):
        assert {row.targets[0] for row in found.rows} <= {str(at) for at in range(10)}
        assert "numbers" not in found.promotes.pattern


# -- against dense formulas ----------------------------------------------------------------------


def test_gain_is_the_quotient_of_norms():
    generator = torch.Generator().manual_seed(1)
    x, W_V, W_O = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((20, 12), (3, 12, 5), (3, 5, 12))
    )
    x[4] = 0.0
    dense = torch.stack([(x @ (W_V[h] @ W_O[h])).norm(dim=1) for h in range(3)])
    wanted = dense / x.norm(dim=1)
    wanted[:, 4] = 0.0
    torch.testing.assert_close(norm_gain(x, x @ W_V, W_O), wanted, rtol=1e-12, atol=1e-12)


def dense_rows(x: Any, W_V: Any, W_O: Any, W_U: Any, n: int) -> Any:
    """Sources, gains, the five highest and the five lowest tokens of one head, in float64."""
    x, W_V, W_O, W_U = (each.detach().double() for each in (x, W_V, W_O, W_U))
    written = x @ (W_V @ W_O)
    gain = written.norm(dim=1) / x.norm(dim=1)
    sources = gain.argsort(descending=True)[:n]
    scores = written[sources] @ W_U
    return sources, gain[sources], scores.topk(5).indices, (-scores).topk(5).indices


def check(found: Any, wanted: Any) -> None:
    sources, gains, high, low = wanted
    assert [row.token for row in found.rows] == sources.tolist()
    assert [row.gain for row in found.rows] == pytest.approx(gains.tolist(), rel=1e-5)
    assert [list(row.target_ids) for row in found.rows] == high.tolist()
    assert [list(row.suppressed_ids) for row in found.rows] == low.tolist()


@pytest.mark.parametrize("embedding", ["auto", "raw", "mlp"])
def test_rows_are_those_of_the_dense_matrices_of_llama(lab: Callable[..., Any], embedding: Any):
    """Grouped values: head 4 reads with the second of two."""
    model = lab("llama")
    parts = model.module.model
    W_E = parts.embed_tokens.weight
    enriched = parts.layers[0].mlp(parts.layers[0].post_attention_layernorm(W_E))
    for layer in range(2):
        raw = embedding == "raw" or (embedding == "auto" and layer == 0)
        attention = parts.layers[layer].self_attn
        W_V = attention.v_proj.weight[10:20].T
        W_O = attention.o_proj.weight[:, 40:50].T
        x = W_E if raw else enriched
        wanted = dense_rows(x, W_V, W_O, model.module.lm_head.weight.T, 12)
        (found,) = salient_operations(model, (layer, 4), n=12, embedding=embedding)
        check(found, wanted)


def test_rows_are_those_of_the_dense_matrices_of_gpt2(lab: Callable[..., Any]):
    """Conv1D, biases, tied embeddings and learned positions: MAPS leaves out biases and positions."""
    model = lab("gpt2")
    blocks = model.module.transformer.h
    W_E = model.module.transformer.wte.weight
    x = blocks[0].mlp(blocks[0].ln_2(W_E))
    W_V = blocks[1].attn.c_attn.weight[:, 72 + 12 : 72 + 24]
    W_O = blocks[1].attn.c_proj.weight[12:24]
    check(salient_operations(model, "L1H1", n=9)[0], dense_rows(x, W_V, W_O, W_E.T, 9))


@pytest.mark.parametrize("family", ["gpt_neox", "gemma2", "gemma3_text", "gpt_oss", "qwen3", "phi"])
def test_other_families_give_rows(lab: Callable[..., Any], family: str):
    model = lab(family)
    found = salient_operations(model, n=6)
    assert len(found) == sum(layer.n_heads for layer in model.spec.layers)
    for each in found:
        facts = model.spec.layers[each.head.layer]
        own = each.head.head // (facts.n_heads // facts.n_kv_heads)
        W_V = model.weights.W_V(each.head.layer)[own].double()
        W_O = model.weights.W_O(each.head.layer)[each.head.head].double()
        row = each.rows[0]
        if each.head.layer == 0:
            x = model.weights.W_E.double()
            gains = (x @ W_V @ W_O).norm(dim=1) / x.norm(dim=1)
            assert row.token == int(gains.argmax())
            assert row.gain == pytest.approx(float(gains.max()), rel=1e-5)
            scores = x[row.token] @ W_V @ W_O @ model.weights.W_U.double()
            assert list(row.target_ids) == scores.topk(5).indices.tolist()
        gains = [row.gain for row in each.rows]
        assert gains == sorted(gains, reverse=True)


def test_the_chunks_of_the_vocabulary_change_nothing(
    lab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    whole = salient_operations(lab("llama"), n=20)
    monkeypatch.setattr("headlab.parameters.salience._CHUNK", 7)
    monkeypatch.setattr("headlab.parameters.salient._COLUMNS", 36 * 5)
    for one, other in zip(whole, salient_operations(lab("llama"), n=20), strict=True):
        assert [row.token for row in one.rows] == [row.token for row in other.rows]
        assert [row.target_ids for row in one.rows] == [row.target_ids for row in other.rows]


def test_random_sources_are_held_the_same_way(lab: Callable[..., Any]):
    """With as many sources as there are tokens, random ones are all of them, and so the salient ones."""
    model = lab("llama")
    every, drawn = (
        salient_operations(model, "1.3", n=97, sources=which)[0] for which in ("salient", "random")
    )
    assert [row.token for row in drawn.rows] == [row.token for row in every.rows]
    assert [row.target_ids for row in drawn.rows] == [row.target_ids for row in every.rows]
    some, other, again = (
        salient_operations(model, "1.3", n=9, sources="random", seed=seed)[0] for seed in (0, 1, 0)
    )
    tokens = [{row.token for row in each.rows} for each in (some, other, again)]
    assert tokens[0] == tokens[2] != tokens[1]
    assert len(tokens[0]) == 9
    assert some.rows == again.rows
    gains = {row.token: row.gain for row in every.rows}
    assert all(row.gain == pytest.approx(gains[row.token], rel=1e-5) for row in some.rows)


# -- clusters ------------------------------------------------------------------------------------


def test_outputs_of_one_direction_are_one_cluster():
    rng = np.random.default_rng(2)
    a, b = np.eye(16)[0], np.eye(16)[1]
    bundles = [b, a, a, a, b, a, b, a]
    written = np.stack(
        [(each + 0.05 * rng.normal(size=16)) * rng.uniform(1, 9) for each in bundles]
    )
    assert clusters_of(written).tolist() == [1, 0, 0, 0, 1, 0, 1, 0]
    assert clusters_of(-written).tolist() == [1, 0, 0, 0, 1, 0, 1, 0]
    opposed = clusters_of(np.stack([a, -a, a]))
    assert opposed.tolist() == [0, 1, 0]
    assert clusters_of(np.zeros((3, 16))).tolist() == [0, 1, 2]
    assert clusters_of(written[:1]).tolist() == [0]
    assert clusters_of(np.stack([a + b, a]), similar=0.6).tolist() == [0, 0]
    assert clusters_of(np.stack([a + b, a]), similar=0.8).tolist() == [0, 1]


def test_clusters_are_named_by_themselves():
    model = planted_ov()
    with torch.no_grad():  # all ten countries to Paris: one direction
        output: Any = model.module.model.layers[0].self_attn.o_proj.weight
        output[:, 20:30] = torch.eye(36)[20][:, None]
    (found,) = salient_operations(model, "L0H2", n=10)
    assert {row.cluster for row in found.rows} == {0}
    assert {row.targets[0] for row in found.rows} == {CAPITALS[0][1]}
    assert len(found.clusters) == 1
    assert found.clusters[0] == found.promotes
    assert found.promotes.pattern.startswith("sources: countries")


# -- results, a describer of one's own, and bad input --------------------------------------------


def test_results_go_into_tables_and_json():
    (found,) = salient_operations(planted_ov(), "L0H2", n=10)
    frame = found.frame()
    assert list(frame) == ["source", "token", "gain", "targets", "suppressed", "cluster"]
    assert frame["targets"].iloc[0][0] == "Paris"
    read = json.loads(found.to_json())
    assert read["head"] == "L0H2"
    assert read["promotes"]["candidates"][0]["name"] == "country_capital"
    assert len(read["rows"]) == 10
    assert repr(found).startswith("SalientOperations(L0H2: 'country_capital")


def test_a_describer_of_one_s_own_names_heads():
    asked = []

    def describe(prompt: str) -> str:
        asked.append(prompt)
        pattern = "capitals" if "makes likely" in prompt else "Unclear"
        return json.dumps({"reasoning": "r", "sources": "s", "pattern": pattern})

    (found,) = salient_operations(planted_ov(), "L0H2", n=10, describe=describe)
    assert len(asked) == 2
    assert '"France" -> "Paris", ' in asked[0]
    assert (found.promotes.pattern, found.promotes.by) == ("capitals", "yours")
    assert (found.suppresses.pattern, found.suppresses.clear) == ("unclear", False)
    assert found.suppresses.candidates
    assert found.promotes.candidates[0].name == "country_capital"
    with pytest.raises(PlanError, match="answer for what L0H2 promotes is not a JSON object"):
        salient_operations(planted_ov(), "L0H2", n=10, describe=lambda prompt: "no idea")


def test_wrong_arguments_are_said(lab: Callable[..., Any]):
    model = lab("llama")
    for options, said in (
        ({"n": 0}, "n=0 must be a whole number from 1 to 97"),
        ({"n": 98}, "n=98 must be"),
        ({"n_targets": 1.5}, r"n_targets=1\.5 must be"),
        ({"n": True}, "n=True must be"),
        ({"embedding": "mean"}, "embedding='mean' must be"),
        ({"sources": "rare"}, "sources='rare' must be 'salient' or 'random'"),
        ({"alpha": 0}, "alpha=0 must be"),
    ):
        with pytest.raises(PlanError, match=said):
            salient_operations(model, "0.0", **options)
    with pytest.raises(HeadError, match="L7H0 does not exist"):
        salient_operations(model, "L7H0")
    with pytest.raises(PromptError, match="without a tokenizer"):
        salient_operations(hl.load(build("llama")), "0.0")
    with pytest.raises(UnsupportedError, match="decoder-only"):
        salient_operations(lab("bert"), "0.0")
    with pytest.raises(UnsupportedError, match="latent"):
        salient_operations(lab("deepseek_v3"), "0.0")


def test_weights_that_are_no_numbers_are_said():
    module: Any = build("llama")
    with torch.no_grad():
        module.model.layers[1].self_attn.o_proj.weight[3, 12] = float("nan")
    model = hl.load(module, tokenizer=tiny_tokenizer())
    with pytest.raises(UnsupportedError, match=r"L1H1 of .* hold NaN or infinity"):
        salient_operations(model, "1.1")
    assert len(salient_operations(model, "1.0", n=3)) == 1


@pytest.mark.slow
def test_a_copying_head_of_the_embedded_model_is_named():
    """L23H3 lowers what it attends to; its OV eigenvalues are negative."""
    (found,) = salient_operations(smollm2(), "L23H3")
    assert "copies the token" in found.suppresses.pattern
    assert sum(row.suppressed[0] == row.source for row in found.rows) > 15
