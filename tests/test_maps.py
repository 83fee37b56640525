"""MAPS against dense float64 formulas, its nulls against enumeration and simulation, and its results as data."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from relation_models import words
from tiny_models import VOCAB_SIZE, build, tiny_tokenizer

import headlab as hl
from headlab.errors import HeadError, OutputError, PlanError, PromptError, UnsupportedError
from headlab.parameters.maps import maps
from headlab.parameters.maps_result import MAPS_COLUMNS, Maps
from headlab.parameters.relation_inputs import CONVENTIONS
from headlab.tasks.relations import Relation, token_pairs

# -- families ----------------------------------------------------------------------------------------------------------


def first_mlp(family: str, module: torch.nn.Module, table: torch.Tensor) -> torch.Tensor:
    """The first MLP of the normed embedding, by the block's own parts."""
    if family == "gpt2":
        block = module.transformer.h[0]
        return block.mlp(block.ln_2(table))
    if family == "gpt_neox":
        block = module.gpt_neox.layers[0]
        return block.mlp(block.post_attention_layernorm(table))
    block = module.model.layers[0]
    if family in ("gemma2", "gemma3_text"):
        scaled = table * block.self_attn.config.hidden_size**0.5
        inner = block.mlp(block.pre_feedforward_layernorm(scaled))
        return block.post_feedforward_layernorm(inner)
    return block.mlp(block.post_attention_layernorm(table))


def value_and_output(family: str, module: torch.nn.Module, layer: int, head: int):
    """W_V [d_model, d_value] and W_O [d_value, d_model] of one head, cut by hand from the parameters."""
    config = module.config
    if family == "gpt2":
        attention, width = module.transformer.h[layer].attn, config.n_embd // config.n_head
        at = slice(head * width, (head + 1) * width)
        value = attention.c_attn.weight[:, 2 * config.n_embd :][:, at]
        return value, attention.c_proj.weight[at]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    at = slice(head * width, (head + 1) * width)
    if family == "gpt_neox":
        attention = module.gpt_neox.layers[layer].attention
        start = (3 * head + 2) * width
        return attention.query_key_value.weight[start : start + width].T, attention.dense.weight.T[
            at
        ]
    attention = module.model.layers[layer].self_attn
    group = config.num_attention_heads // config.num_key_value_heads
    kv = slice(head // group * width, (head // group + 1) * width)
    return attention.v_proj.weight[kv].T, attention.o_proj.weight.T[at]


@pytest.mark.parametrize(
    "family",
    ["llama", "gpt2", "gpt_neox", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"],
)
def test_scores_are_those_of_dense_vocabulary_matrices(family):
    module = build(family).double()
    model = hl.load(module, tokenizer=tiny_tokenizer())
    relation = words()
    found = maps(model, relation, k=7)
    pairs = token_pairs(relation, model.tokenizer)
    with torch.no_grad():
        table = module.get_input_embeddings().weight
        unembedding = module.get_output_embeddings().weight.T
        for layer, facts in enumerate(model.spec.layers):
            rows = table if layer == 0 else first_mlp(family, module, table).double()
            for head in range(facts.n_heads):
                value, out = value_and_output(family, module, layer, head)
                matrix = (rows[pairs.sources] @ value @ out @ unembedding).numpy()
                scores = found.of((layer, head)).set_index("direction")["score"]
                for direction, sign in (("promotes", -1), ("suppresses", 1)):
                    top = np.argsort(sign * matrix, axis=1, kind="stable")[:, :7]
                    expected = (top == pairs.targets.numpy()[:, None]).any(1).mean()
                    assert scores[direction] == pytest.approx(expected, abs=1e-12)
    assert found.frame["score"].nunique() > 3  # else the comparison would mean little


def test_a_negated_output_swaps_promotion_and_suppression():
    relation, module = words(), build("llama")
    before = maps(hl.load(module, tokenizer=tiny_tokenizer()), relation).frame
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.o_proj.weight.neg_()
    after = maps(hl.load(module, tokenizer=tiny_tokenizer()), relation).frame
    for one, other in (("promotes", "suppresses"), ("suppresses", "promotes")):
        ours, theirs = before[before["direction"] == one], after[after["direction"] == other]
        np.testing.assert_array_equal(ours["score"], theirs["score"])
        np.testing.assert_array_equal(ours["q_value"], theirs["q_value"])


@pytest.mark.parametrize("family", ["bert", "bart", "t5"])
def test_models_that_are_no_decoders_are_refused(lab, family):
    with pytest.raises(UnsupportedError, match="decoder-only"):
        maps(lab(family), words())


def test_latent_attention_is_refused_with_the_reason(lab):
    with pytest.raises(UnsupportedError, match="low-rank bottleneck"):
        maps(lab("deepseek_v3"), words())


def test_rows_of_a_padded_vocabulary_take_no_place():
    relation, module = words(), build("llama", tie_word_embeddings=False, vocab_size=VOCAB_SIZE)
    found = maps(hl.load(module, tokenizer=tiny_tokenizer()), relation)
    padded = build("llama", tie_word_embeddings=False, vocab_size=VOCAB_SIZE + 15)
    own = {name: value for name, value in module.state_dict().items() if "embed" not in name}
    own.pop("lm_head.weight")
    padded.load_state_dict(own, strict=False)
    with torch.no_grad():
        padded.lm_head.weight.mul_(100)[:VOCAB_SIZE] = module.lm_head.weight
        padded.model.embed_tokens.weight[:VOCAB_SIZE] = module.model.embed_tokens.weight
    again = maps(hl.load(padded, tokenizer=tiny_tokenizer()), relation)
    np.testing.assert_array_equal(found.frame["score"], again.frame["score"])
    assert again.about["padding_left_out"] == 15


def test_q_values_are_corrected_over_the_heads_of_a_relation_and_direction(lab):
    found = maps(lab("llama"), [words(), words(seed=1, name="other")]).frame
    assert len(found) == 2 * 2 * 12
    for _, part in found.groupby(["relation", "direction"]):
        p = part["p_value"].to_numpy()
        order = np.argsort(p)[::-1]
        q = np.minimum.accumulate((p * len(p))[order] / np.arange(len(p), 0, -1))
        np.testing.assert_allclose(part["q_value"].to_numpy()[order], q.clip(max=1))
    claims = (found["q_value"] <= 0.05) & (found["effect"] >= 0.1)
    np.testing.assert_array_equal(found["claimed"], claims)
    np.testing.assert_allclose(found["effect"], found["score"] - found["null_mean"])


# -- results and bad input ---------------------------------------------------------------------------------------------


def test_maps_survive_json(lab):
    module = build("llama")
    with torch.no_grad():
        module.model.layers[1].self_attn.o_proj.weight[0, 3] = torch.nan  # of L1H0
    found = maps(hl.load(module, tokenizer=tiny_tokenizer()), words(name="<b>& 'mine'"))
    bad = found.of("L1H0")
    assert bad["score"].isna().all()
    assert bad["q_value"].isna().all()
    assert not bad["claimed"].any()
    assert bad["note"].str.contains("NaN").all()
    assert found.of("L1H1")["score"].notna().all()
    text = found.to_json()
    assert "NaN" not in text.replace("hold NaN", "")
    again = Maps.from_json(text)
    assert tuple(again.frame.columns) == MAPS_COLUMNS
    assert again.frame.equals(found.frame)
    assert again.relations == found.relations
    assert again.to_json() == text
    assert repr(again) == repr(found)
    assert "<b>&" not in found._repr_html_()
    for wrong in (
        "{}",
        "[]",
        text.replace("headlab-maps-1", "x"),
        text.replace('"claimed": false', '"claimed": 0'),
    ):
        with pytest.raises(OutputError):
            Maps.from_json(wrong)
    assert json.loads(text)["claimed"]["promotes"] == {"<b>& 'mine'": found.claimed("<b>& 'mine'")}


def test_views_of_the_table(lab):
    found = maps(lab("llama"), [words(), words(seed=1, name="other")], suppression=False)
    matrix = found.matrix()
    assert list(matrix.columns) == ["made up", "other"]
    assert len(matrix) == 12
    for head in ("L0H0", "1.5"):
        row = found.of(head)
        assert matrix.loc[str(hl.parse_heads(head, lab("llama").spec)[0])].to_dict() == dict(
            zip(row["relation"], row["score"], strict=True)
        )
    top = found.top("other", 3)
    assert len(top) == 3
    assert top["score"].is_monotonic_decreasing
    assert top["score"].iloc[0] == matrix["other"].max()
    for call in (
        lambda: found.matrix("suppresses"),
        lambda: found.matrix(column="note"),
        lambda: found.top("nothing"),
    ):
        with pytest.raises(PlanError):
            call()
    with pytest.raises(HeadError, match="L7H0"):
        found.of("L7H0")


def test_some_heads_are_scored_as_among_all(lab):
    every, some = maps(lab("llama"), words()), maps(lab("llama"), words(), heads="1.4, 0.2")
    assert some.matrix().equals(every.matrix().loc[["L0H2", "L1H4"]])


def test_relations_that_lose_too_many_pairs_are_skipped_and_said_so(lab):
    good = words()
    poor = Relation("poor", "given", "", (("w5", "w6"), ("w7 w8", "w9"), ("unheard", "w9")))
    found = maps(lab("llama"), [good, poor])
    assert found.names == ("made up",)
    (skipped,) = found.skipped
    assert skipped.n == 1
    assert "1 of 3 pairs remain, 30 are needed" in skipped.skipped
    assert "w7 w8" in skipped.skipped
    assert [part[:2] for part in skipped.left_out] == [("w7 w8", "w9"), ("unheard", "w9")]
    assert "poor: skipped" in repr(found)
    with pytest.raises(PlanError, match="not mapped"):
        found.top("poor")
    assert maps(lab("llama"), poor, min_pairs=1).relation("poor").n == 1
    with pytest.raises(PromptError, match="1 of 3 pairs remain"):
        maps(lab("llama"), poor)


@pytest.mark.parametrize(
    ("given", "options", "error"),
    [
        ([], {}, PromptError),
        ("no such relation", {}, PromptError),
        ("no/such/file.json", {}, PromptError),
        ([3], {}, PromptError),
        (3, {}, PromptError),
        ([words(), words(seed=1)], {}, PromptError),
        (words(), {"k": 0}, PlanError),
        (words(), {"k": VOCAB_SIZE + 1}, PlanError),
        (words(), {"min_pairs": True}, PlanError),
        (words(), {"alpha": 0}, PlanError),
        (words(), {"min_effect": 1.5}, PlanError),
        (words(), {"embedding": "positional"}, PlanError),
        (words(), {"convention": "llama"}, PlanError),
        (words(), {"multi_token": "drop"}, PromptError),
        (words(), {"heads": "7.0"}, HeadError),
    ],
)
def test_bad_input_is_one_sentence(lab, given, options, error):
    with pytest.raises(error) as caught:
        maps(lab("llama"), given, **options)
    assert "\n" not in str(caught.value)


def test_a_model_without_tokenizer_is_refused():
    with pytest.raises(PromptError, match="tokenizer"):
        maps(hl.load(build("llama")), words())


def test_relations_are_read_from_a_file(lab, tmp_path):
    path = tmp_path / "mine.json"
    record = {"name": "mine", "pairs": [list(pair) for pair in words().pairs], "k": 4}
    path.write_text(json.dumps([record]))
    for given in (path, str(path)):
        found = maps(lab("llama"), given)
        assert found.relation("mine").k == 4
    ours = maps(lab("llama"), words(), k=4)
    np.testing.assert_array_equal(found.frame["score"], ours.frame["score"])


def test_k_follows_the_family_and_the_name():
    spec = hl.load(build("llama")).spec
    llama_3 = replace(spec, n_vocab=128256)
    large = replace(llama_3, layers=spec.layers * 40)
    chosen = [
        next(each for each in CONVENTIONS.values() if each.holds_for(one))
        for one in (spec, llama_3, large, replace(llama_3, family="qwen2"))
    ]
    assert [(one.k, one.k_of("name_copying"), one.embedding) for one in chosen] == [
        (10, 1, "auto"),
        (25, 3, "auto"),
        (25, 3, "raw"),
        (10, 1, "auto"),
    ]
