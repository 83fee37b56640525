"""Scores on prompts beside static ones, and what ablating a relation's heads does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from real_model import smollm2
from relation_models import implementing, token_map, words

import headlab as hl
from headlab.attention import Head
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.parameters.maps import maps
from headlab.parameters.on_prompts.causal_check import causal_check, random_sets, relation_prompts
from headlab.parameters.on_prompts.dynamic import dynamic_scores, last_z_and_source_v
from headlab.parameters.on_prompts.relation_prompts import source_prompts
from headlab.tasks.relations import token_pairs

TEMPLATES = ("w4 w9 {source} w5 w6", "w7 {source}")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2", "qwen3", "gpt_oss"])
def test_z_of_attention_forced_onto_the_source_is_its_value(lab, family):
    model, relation = lab(family), words()
    pairs = token_pairs(relation, model.tokenizer)
    prompts = source_prompts(model, pairs, TEMPLATES[0])
    assert prompts.source_position == 2
    assert len(prompts.rows) == 40
    z, v = last_z_and_source_v(model, prompts, [0, 1])
    clean = model.trace(prompts.ids, keep=hl.keep.tensors("z"), logits="none")
    forced_row = torch.zeros(prompts.ids.shape[1])
    forced_row[2] = 1.0
    for layer, facts in enumerate(model.spec.layers):
        torch.testing.assert_close(z[layer], clean.tensor("z", layer)[:, -1])
        # Only this layer is forced, so that its stream is that of the clean run.
        force = hl.replace(f"{layer}.*", forced_row, "pattern", positions=[-1])
        with model.edit(force):
            forced = model.trace(
                prompts.ids, keep=hl.keep.tensors("z", layers=[layer]), logits="none"
            )
        expected = forced.tensor("z", layer)[:, -1]
        assert not torch.allclose(expected, z[layer], atol=1e-2)
        group = facts.n_heads // facts.n_kv_heads
        torch.testing.assert_close(
            v[layer].repeat_interleave(group, 1), expected, atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dynamic_scores_are_shares_of_targets_among_the_first_tokens_of_what_heads_write(
    lab, family
):
    model, relation = lab(family), words()
    found = dynamic_scores(model, maps(model, relation), relation, templates=TEMPLATES)
    pairs = token_pairs(relation, model.tokenizer)
    statics, rates = [], {"with_context": [], "without_context": []}
    for template in TEMPLATES:
        ids = model.tokens([template.format(source=source) for source, _ in relation.pairs])
        trace = model.trace(ids, keep=hl.keep.tensors("z", "v"), logits="none")
        at = template.split().index("{source}")
        rows = found.frame[found.frame["template"] == template].set_index(["layer", "head"])
        for (layer, head), row in rows.iterrows():
            facts = model.spec.layers[layer]
            kv = head // (facts.n_heads // facts.n_kv_heads)
            values = {
                "with_context": trace.tensor("z", layer)[:, -1, head],
                "without_context": trace.tensor("v", layer)[:, at, kv],
            }
            statics.append(row["static"])
            for context, value in values.items():
                logits = value @ model.weights.W_O(layer)[head] @ model.weights.W_U
                top = np.argsort(-logits.detach().numpy(), axis=1, kind="stable")[:, :10]
                hit = (top == pairs.targets.numpy()[:, None]).any(1).mean()
                assert row[context] == pytest.approx(hit)
                rates[context].append(hit)
    for context, rate in rates.items():
        assert found.r(context) == pytest.approx(np.corrcoef(statics, rate)[0, 1])
        interval = found.correlations.set_index("context").loc[context]
        assert interval["ci_low"] < found.r(context) < interval["ci_high"]
        assert interval["points"] == len(statics)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_planted_head_does_on_prompts_what_its_weights_say(family):
    relation = words()
    model = implementing(family, {(0, 1): token_map(relation)})
    found = dynamic_scores(model, maps(model, relation), relation, templates=TEMPLATES)
    ours = found.frame.query("layer == 0 and head == 1")
    assert (ours["without_context"] == 1).all()
    others = found.frame.query("layer != 0 or head != 1")
    assert others["without_context"].max() < 0.5
    assert found.r("without_context") > 0.9
    assert f"r = {found.r('without_context'):.2f}" in repr(found)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_planted_suppressing_head_lowers_targets_on_prompts(family):
    relation = words()
    model = implementing(family, {(0, 1): -token_map(relation)})
    found = maps(model, relation, k=1)
    down = dynamic_scores(model, found, relation, direction="suppresses", templates=TEMPLATES)
    up = dynamic_scores(model, found, relation, templates=TEMPLATES)
    ours = "layer == 0 and head == 1"
    assert (down.frame.query(ours)["static"] == 1).all()
    assert (down.frame.query(ours)["without_context"] == 1).all()
    assert (up.frame.query(ours)[["static", "without_context"]] == 0).all(axis=None)
    assert down.r("without_context") > 0.9
    assert down.about["direction"] == "suppresses"
    assert "which heads suppress the target" in repr(down)
    assert "which heads promote the target" in repr(up)
    half = replace(found, about=found.about | {"directions": ["promotes"]})
    with pytest.raises(PlanError, match="'suppresses' was not mapped"):
        dynamic_scores(model, half, relation, direction="suppresses")


def test_correlation_with_what_never_happens_is_nan(lab):
    relation = words(31)
    found = maps(lab("llama"), relation, k=1)
    nothing = replace(found, frame=found.frame.assign(score=0.0))
    dynamic = dynamic_scores(lab("llama"), nothing, relation, templates=TEMPLATES)
    assert dynamic.correlations["r"].isna().all()


def test_prompts_that_change_the_source_are_left_out(lab):
    model, relation = lab("llama"), words()
    pairs = token_pairs(relation, model.tokenizer)
    assert source_prompts(model, pairs, "{source} w5").source_position == 0
    for template in ("w4 {source}s", "w4 w5", "{source} {source}", 7):
        with pytest.raises(PromptError):
            source_prompts(model, pairs, template)
    with pytest.raises(PromptError):
        dynamic_scores(model, maps(model, relation), relation, templates=())


def test_maps_of_another_model_or_relation_are_refused(lab):
    model, relation = lab("llama"), words()
    found = maps(model, relation, heads="0.*")
    with pytest.raises(PlanError, match="not of"):
        dynamic_scores(lab("gpt2"), found, relation)
    with pytest.raises(PlanError, match="there is no relation"):
        dynamic_scores(model, found, words(name="other"))
    with pytest.raises(PlanError, match="pass the relation that"):
        dynamic_scores(model, found, words(30))
    with pytest.raises(UnsupportedError, match="L1H2"):
        dynamic_scores(model, found, relation, heads="1.2")


# -- ablation ----------------------------------------------------------------------------------------------------------


def test_random_sets_match_the_heads_layer_by_layer(lab):
    spec = lab("llama").spec  # two layers of six heads
    heads = [Head(0, 1), Head(1, 0), Head(1, 3), Head(1, 5)]
    sets = random_sets(spec, heads, 20, seed=0)
    assert len(set(sets)) == 5  # layer 1 has three others, all of them needed
    for drawn in sets:
        assert not set(drawn) & set(heads)
        assert [head.layer for head in drawn] == [0, 1, 1, 1]
    assert sets == random_sets(spec, heads, 20, seed=0)
    crowded = [Head(1, head) for head in range(5)]  # one other in the layer
    for drawn in random_sets(spec, crowded, 5, seed=0):
        assert len(set(drawn)) == 5
        assert sum(head.layer == 1 for head in drawn) == 1
    with pytest.raises(PlanError, match="too few heads"):
        random_sets(spec, [Head(0, head) for head in range(6)] + [Head(1, 0)], 1, seed=0)


def predicting() -> tuple[hl.Model, list]:
    """A model that predicts one word's target by one head of layer 0 and another relation's by one of layer 1."""
    one, other = (
        words(seed=seed, name=name, templates=("{source}",))
        for seed, name in ((1, "one"), (2, "other"))
    )
    model = implementing("llama", {(0, 1): 30 * token_map(one), (1, 4): token_map(other)})
    with torch.no_grad():  # what else is written into the stream is small beside it
        for layer in model.module.model.layers:
            layer.self_attn.o_proj.weight.mul_(30)
    return model, [one, other]


def test_accuracy_goes_with_the_heads_of_a_relation_and_not_with_random_ones():
    model, (one, other) = predicting()
    found = maps(model, [one, other], k=1)
    check = causal_check(
        model, found, one, controls=[other], sizes=[1], n_random=3, prompts="template", seed=1
    )
    assert check.heads[0] == Head(0, 1)
    assert check.baseline["one"] > 0.9
    assert check.accuracy("top")["accuracy"].iloc[0] < 0.1
    assert check.accuracy("random")["accuracy"].iloc[0] > 0.8
    rows = check.frame.set_index("set")
    assert rows.loc["top", "p_value"] < 0.001
    assert rows.loc["control", "relation"] == "other"
    assert rows.loc["control", "effect"] == pytest.approx(
        rows.loc["control", "accuracy"] - check.baseline["other"]
    )
    assert rows.loc["random", "draw"].tolist() == [0, 1, 2]
    # The same by hand: single words, of which the ablated head gives nothing.
    ids = model.tokens([source for source, _ in one.pairs])
    with model.edit(hl.ablate("L0H1", positions=[-1])):
        guessed = model.logits(ids)[:, -1].argmax(-1)
    targets = token_pairs(one, model.tokenizer).targets
    assert rows.loc["top", "accuracy"] == pytest.approx((guessed == targets).float().mean().item())
    assert "CausalCheck of one" in repr(check)
    assert (check.about["controls"], check.about["note"]) == (["other"], "")
    alone = causal_check(model, found, one, sizes=[1], n_random=1, prompts="template")
    assert alone.about["controls"] == []
    assert "no control relation: of those mapped none" in repr(alone)


def test_examples_are_other_pairs_of_the_relation():
    relation = words(12, templates=("of {source} comes",))
    prompts = relation_prompts(relation, relation.pairs, "examples", seed=0)
    for (source, _), prompt in zip(relation.pairs, prompts, strict=True):
        *shown, asked = prompt.split("\n")
        assert asked == f"of {source} comes"
        assert len(set(shown)) == 5
        for line in shown:
            _, other, _, target = line.removesuffix(".").split()
            assert other != source
            assert (other, target) in relation.pairs
    with pytest.raises(PromptError, match="5 examples"):
        relation_prompts(relation, relation.pairs[:5], "examples", seed=0)


@pytest.mark.parametrize(
    "options", [{"sizes": [0]}, {"sizes": []}, {"sizes": [13]}, {"prompts": "long"}]
)
def test_options_that_mean_nothing_are_refused(lab, options):
    relation = words()
    found = maps(lab("llama"), relation)
    with pytest.raises(PlanError):
        causal_check(lab("llama"), found, relation, controls=[], **options)


@pytest.mark.slow
def test_smollm2_needs_the_heads_that_map_countries_to_capitals():
    model = smollm2()
    found = maps(model, ["country_capital", "antonym", "comparative"], heads="22.*, 23.*")
    assert "L23H4" in found.claimed("country_capital")
    dynamic = dynamic_scores(model, found, "country_capital")
    assert dynamic.r("without_context") > 0.7
    prompts = source_prompts(
        model,
        token_pairs(hl.tasks.relations("country_capital")[0], model.tokenizer),
        "In {source} it is",
    )
    assert " France" in {
        model.text(row[prompts.source_position : prompts.source_position + 1])
        for row in prompts.ids
    }
    check = causal_check(model, found, "country_capital", sizes=[4], n_random=2, prompts="template")
    assert (
        check.accuracy("top")["accuracy"].iloc[0]
        < check.accuracy("random")["accuracy"].iloc[0] - 0.3
    )
