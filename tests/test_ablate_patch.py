"""Ablating and patching every head: identities, TransformerLens' own patching, and what is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_model import planted_model, smollm2
from tiny_models import VOCAB_SIZE, build, tiny_tokenizer

import headlab as hl
from headlab.causal import Effects, ablate_each, effects_of, pairs, patch_each
from headlab.errors import HeadError, OutputError, PlanError, PromptError
from headlab.models import open_model
from headlab.tasks import ioi_prompts

METRIC = hl.metrics.logit_difference(5, 7)
FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma3_text", "gpt_oss", "bert")


def prompts(seed: int, n: int = 3, length: int = 10) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB_SIZE, (n, length), generator=generator).tolist()


@cache
def tiny(family: str) -> hl.Model:
    return hl.load(build(family))


# -- identities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_patching_everything_gives_the_other_run_and_nothing_gives_this_one(family: str):
    model, clean, corrupted = tiny(family), prompts(0), prompts(1)
    every = patch_each(model, clean, corrupted, METRIC, site="resid_pre", heads="0.*")
    np.testing.assert_allclose(every.values[0], every.clean, rtol=1e-4, atol=1e-5)
    assert every.frame["normalised"][0] == pytest.approx(1, abs=1e-4)
    back = patch_each(
        model, clean, corrupted, METRIC, site="resid_pre", heads="0.*", direction="noising"
    )
    assert back.corrupted is not None
    np.testing.assert_allclose(back.values[0], back.corrupted, rtol=1e-4, atol=1e-5)
    assert back.frame["normalised"][0] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("site", ["q", "k", "v", "z", "result", "pattern"])
@pytest.mark.parametrize("family", FAMILIES)
def test_patching_a_run_into_itself_changes_nothing(family: str, site: Any):
    model, clean = tiny(family), prompts(0)
    corrupted = [[*prompt[:4], 9, *prompt[5:]] for prompt in clean]
    source = model.trace(clean, keep=hl.keep.tensors(site))
    sweep = hl.causal.Sweep(model, clean, METRIC)
    same = sweep.run([[hl.patch("*.*", site, source=source)]])
    np.testing.assert_allclose(same[0], sweep.clean, rtol=1e-4, atol=1e-5)
    effects = patch_each(model, clean, corrupted, METRIC, site=site)
    assert effects.frame["effect"].abs().max() > 1e-4
    assert len(effects.frame) == model.spec.n_layers * model.spec.n_heads


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_a_patch_is_the_edit_made_by_hand(direction: Any):
    model, clean, corrupted = tiny("llama"), prompts(0), prompts(1)
    found = patch_each(model, clean, corrupted, METRIC, site="v", direction=direction)
    run, other = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
    source = model.trace(other, keep=hl.keep.tensors("v"))
    for row in found.frame.itertuples():
        with model.edit(hl.patch((row.layer, row.head), "v", source=source)):
            last = model.logits(run)[:, -1]
        expected = float((last[:, 5] - last[:, 7]).mean())
        assert row.value == pytest.approx(expected, rel=1e-4, abs=1e-5)
    base = model.logits(run)[:, -1]
    np.testing.assert_allclose(found.baseline, base[:, 5] - base[:, 7], rtol=1e-4, atol=1e-5)


def test_position_by_position_and_by_layers_and_groups():
    model, clean = tiny("llama"), prompts(0)
    corrupted = [[*prompt[:6], 9, *prompt[7:]] for prompt in clean]
    each = patch_each(model, clean, corrupted, METRIC, site="resid_pre", positions="each")
    assert sorted(set(each.frame["position"])) == [6, 7, 8, 9]  # before, the runs are the same
    source = model.trace(clean, keep=hl.keep.tensors("resid_pre"))
    with model.edit(hl.patch("1.*", "resid_pre", source=source, positions=[8])):
        last = model.logits(corrupted)[:, -1]
    here = each.frame.query("layer == 1 and position == 8")
    assert float(here["value"].iloc[0]) == pytest.approx(
        float((last[:, 5] - last[:, 7]).mean()), rel=1e-4
    )
    assert each.map().shape == (2, 4)
    groups = patch_each(model, clean, corrupted, METRIC, by="kv_group")
    assert list(groups.frame["head"]) == [0, 3, 0, 3]
    with model.edit(
        hl.patch("1.3, 1.4, 1.5", "z", source=model.trace(clean, keep=hl.keep.tensors("z")))
    ):
        last = model.logits(corrupted)[:, -1]
    assert groups.frame["value"][3] == pytest.approx(
        float((last[:, 5] - last[:, 7]).mean()), rel=1e-4
    )


@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
def test_an_ablation_is_the_edit_made_by_hand(kind: Any):
    model, given, reference = tiny("gpt2"), prompts(0), prompts(4, n=5)
    found = ablate_each(model, given, METRIC, kind=kind, reference=reference, seed=2)
    for row in found.frame.itertuples():
        head = (row.layer, row.head)
        with model.edit(hl.ablate(head, kind, reference=reference, seed=2)):
            last = model.logits(given)[:, -1]
        assert row.value == pytest.approx(float((last[:, 5] - last[:, 7]).mean()), rel=1e-4)
    assert found.map().shape == (2, 3)
    assert (found.frame["ci_low"] <= found.frame["effect"]).all()


def test_means_by_position_are_those_of_each_position():
    model, given = tiny("llama"), prompts(0)
    reference = prompts(4, n=6)
    z = model.trace(reference, keep=hl.keep.tensors("z")).tensor("z", 1)
    with model.edit(hl.replace("1.2", z.mean(0, keepdim=True)[:, :, 2:3])):
        expected = model.logits(given)
    with model.edit(hl.ablate("1.2", "mean", reference=reference, by_position=True)):
        torch.testing.assert_close(model.logits(given), expected)
        with pytest.raises(PromptError, match="10 positions, the ablated run goes up to 12"):
            model.logits(prompts(0, length=12))


def test_attention_on_the_first_key_only():
    for family in ("llama", "mistral"):
        model = tiny(family)
        kept = [hl.keep.tensors("pattern")]
        with model.edit(hl.ablate("1.1", "first", site="pattern")):
            pattern = model.trace(prompts(0, length=20), keep=kept).tensor("pattern", 1)
        window = model.spec.layers[1].window or 99
        for query in range(20):
            first = max(0, query - window + 1)
            assert pattern[0, 1, query, first] == 1
            assert pattern[0, 1, query].sum() == 1
            assert pattern[0, 0, query].max() < 1 or query == 0


def test_patterns_are_patched_where_a_sliding_cache_has_dropped_keys():
    model, clean = tiny("gemma3_text"), prompts(0, length=40)
    assert model.spec.layers[0].window is not None
    assert model.spec.layers[0].window < 30
    corrupted = [[*prompt[:36], 9, *prompt[37:]] for prompt in clean]
    source = model.trace(clean, keep=hl.keep.tensors("pattern"))
    found = patch_each(model, clean, corrupted, METRIC, site="pattern")
    for row in found.frame.itertuples():
        with model.edit(hl.patch((row.layer, row.head), "pattern", source=source)):
            last = model.logits(corrupted)[:, -1]
        expected = float((last[:, 5] - last[:, 7]).mean())
        assert row.value == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert found.frame["effect"].abs().min() > 0


# -- TransformerLens -----------------------------------------------------------------------------------------


def lens(module: Any, tokenizer: Any) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    module.config.architectures = [type(module).__name__]
    return TransformerBridge.boot_transformers(
        "tiny", hf_model=module, tokenizer=tokenizer, device="cpu"
    )


def saved_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    tiny_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_head_patching_agrees_with_transformer_lens(family: str, tmp_path: Path):
    from transformer_lens import patching

    module = build(family)
    model = hl.load(module)
    clean, corrupted = torch.tensor(prompts(0)), torch.tensor(prompts(1))
    bridge = lens(build(family), saved_tokenizer(tmp_path))
    _, cache = bridge.run_with_cache(clean)

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return (logits[:, -1, 5] - logits[:, -1, 7]).mean()

    for site, theirs in (
        ("z", patching.get_act_patch_attn_head_out_all_pos),
        ("v", patching.get_act_patch_attn_head_v_all_pos),
        ("pattern", patching.get_act_patch_attn_head_pattern_all_pos),
    ):
        if site == "v" and family == "llama":
            continue  # there its v has one entry per key/value head
        with torch.no_grad():
            expected = theirs(bridge, corrupted, cache, metric)
        found = patch_each(model, clean, corrupted, METRIC, site=site).map("value")
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
    with torch.no_grad():
        expected = patching.get_act_patch_attn_head_out_by_pos(bridge, corrupted, cache, metric)
    found = patch_each(model, clean, corrupted, METRIC, positions="each").frame
    for row in found.itertuples():
        assert row.value == pytest.approx(
            float(expected[row.layer, row.position, row.head]), abs=1e-4
        )


@pytest.mark.slow
def test_ioi_head_patching_of_the_real_model_agrees_with_transformer_lens():
    import pandas as pd
    from transformer_lens import patching

    model = smollm2()
    some = [p for p in ioi_prompts(model.tokenizer, 40, seed=0) if len(p.ids) == 15][:4]
    assert len(some) == 4
    clean = torch.tensor([p.ids for p in some])
    corrupted = torch.tensor([p.corrupted for p in some])
    answers, foils = [p.io for p in some], [p.subject for p in some]
    opened = open_model("smollm2-135m", device="cpu", dtype="float32")
    bridge = lens(opened.module, opened.tokenizer)
    heads = [(3, 4), (14, 2), (20, 8), (25, 0), (29, 5)]

    def metric(logits: torch.Tensor) -> torch.Tensor:
        last = logits[torch.arange(4), -1]
        return (last[torch.arange(4), answers] - last[torch.arange(4), foils]).mean()

    with torch.no_grad():
        _, cache = bridge.run_with_cache(clean, names_filter=lambda name: name.endswith("hook_z"))
        expected = patching.generic_activation_patch(
            bridge, corrupted, cache, metric,
            patching.layer_head_vector_patch_setter, "z",
            index_df=pd.DataFrame(heads, columns=["layer", "head"]),
        )  # fmt: skip
    effects = patch_each(
        model, clean, corrupted, hl.metrics.logit_difference(answers, foils), heads=heads
    )
    np.testing.assert_allclose(effects.frame["value"], expected.numpy(), atol=1e-4)


# -- what the table says -------------------------------------------------------------------------------------


def test_the_table_against_a_plain_reckoning(tmp_path: Path):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4, 12)) + np.array([0, 0, 3, -2])[:, None]
    clean, corrupted = np.full(12, 2.0), np.zeros(12)
    keys = [{"layer": at // 2, "head": at % 2} for at in range(4)]
    found = effects_of(keys, values, corrupted, clean, corrupted, {"did": "nothing"}, seed=1)
    np.testing.assert_allclose(found.frame["effect"], values.mean(1))
    np.testing.assert_allclose(found.frame["normalised"], values.mean(1) / 2)
    assert (found.frame["q_value"] < 0.01).tolist() == [False, False, True, True]
    assert found.frame["p_value"][2] == pytest.approx(2 / 2**12)  # two-sided, all signs alike
    assert found.top(2)[["layer", "head"]].to_numpy().tolist() == [[1, 0], [1, 1]]
    again = Effects.load(found.save(tmp_path / "effects.json"))
    assert again.frame.equals(found.frame)
    np.testing.assert_array_equal(again.values, values)
    assert again.about == {"did": "nothing"}
    document = json.loads((tmp_path / "effects.json").read_text())
    document["format"] = "other"
    (tmp_path / "effects.json").write_text(json.dumps(document))
    with pytest.raises(OutputError, match="written as 'other'"):
        Effects.load(tmp_path / "effects.json")


def test_the_planted_induction_head_is_what_ablation_finds():
    model = planted_model()
    body = torch.arange(10, 30)
    generator = torch.Generator().manual_seed(0)
    given = torch.stack([body[torch.randperm(20, generator=generator)] for _ in range(8)])
    given = torch.cat([torch.ones(8, 1, dtype=torch.long), given, given[:, :10]], 1)
    answers = given[:, 11].tolist()
    effects = ablate_each(model, given, hl.metrics.log_probability(answers))
    top = effects.top(2)
    assert {(row.layer, row.head) for row in top.itertuples()} == {(1, 0), (2, 1)}
    assert (top["effect"] < -1).all()
    assert (top["q_value"] < 0.1).all()


# -- bad input -----------------------------------------------------------------------------------------------


def test_prompts_of_different_lengths_are_explained_and_can_be_aligned():
    model = tiny("llama")
    clean = prompts(0, length=10)
    corrupted = [prompts(1, length=10)[0], prompts(1, length=8)[1], prompts(1, length=10)[2]]
    with pytest.raises(
        PromptError, match=r"clean prompt 1 has 10 tokens and its corrupted one 8;.*align='end'"
    ):
        patch_each(model, clean, corrupted, METRIC)
    found = patch_each(
        model, clean, corrupted, METRIC, align="end", heads="1.2", direction="noising"
    )
    z = model.trace(corrupted, keep=hl.keep.tensors("z")).tensor("z", 1)
    mine = model.trace(clean, keep=hl.keep.tensors("z")).tensor("z", 1).clone()
    mine[1, 2:, 2] = z[1, :8, 2]
    mine[[0, 2], :, 2] = z[[0, 2], :, 2]
    with model.edit(hl.replace("1.2", mine[:, :, 2:3])):
        last = model.logits(clean)[:, -1]
    np.testing.assert_allclose(found.values[0], last[:, 5] - last[:, 7], rtol=1e-4, atol=1e-5)
    assert pairs(model, clean, corrupted, "end").shift.tolist() == [0, -2, 0]


def test_bad_input_is_told_in_one_sentence():
    model, clean, corrupted = tiny("llama"), prompts(0), prompts(1)
    with pytest.raises(HeadError, match="no head was named"):
        ablate_each(model, clean, METRIC, heads="")
    with pytest.raises(HeadError, match="no head was named"):
        patch_each(model, clean, corrupted, METRIC, heads=[])
    with pytest.raises(PlanError, match="is nan for prompt"):
        ablate_each(model, clean, lambda logits, rows: logits[:, 0].log())
    with pytest.raises(PromptError, match="3 clean prompts and 2 corrupted"):
        patch_each(model, clean, corrupted[:2], METRIC)
    with pytest.raises(PromptError, match="the same, so patching changes nothing"):
        patch_each(model, clean, clean, METRIC)
    with pytest.raises(PlanError, match="'denoising' or 'noising'"):
        patch_each(model, clean, corrupted, METRIC, direction="back")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="by='neuron' must be"):
        ablate_each(model, clean, METRIC, by="neuron")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="use by='layer'"):
        ablate_each(model, clean, METRIC, site="mlp_out", by="head")
    with pytest.raises(HeadError, match=r"of the 3 heads of L1G0 only L1H0, L1H2 are named"):
        ablate_each(model, clean, METRIC, heads="1.0, 1.2", by="kv_group")
    with pytest.raises(PlanError, match="names position 10, but prompt 0 has 10"):
        ablate_each(model, clean, METRIC, positions=[10])
    with pytest.raises(PlanError, match="names position -11"):
        patch_each(model, clean, corrupted, METRIC, positions=[-11])
    with pytest.raises(PlanError, match="positions=-1 must be a list"):
        patch_each(model, clean, corrupted, METRIC, positions=-1)  # type: ignore[arg-type]
    other = [prompts(1, length=10)[0], prompts(1, length=8)[0]]
    with pytest.raises(PromptError, match="positions='each' needs prompts of one length"):
        patch_each(model, [clean[0], other[1]], [other[0], clean[1][:8]], METRIC, positions="each")
    with pytest.raises(PlanError, match="needs reference="):
        ablate_each(model, clean, METRIC, kind="mean")
    with pytest.raises(PlanError, match="scores are kept by no trace"):
        patch_each(model, clean, corrupted, METRIC, site="scores")


def test_metrics_of_every_position_ask_for_the_clean_prompts_tokens_in_both_runs():
    model, clean, corrupted = tiny("llama"), prompts(0), prompts(1)
    effects = patch_each(model, clean, corrupted, hl.metrics.loss(), heads="1.0")
    logits = model.logits(corrupted)[:, :-1].log_softmax(-1)
    wanted = torch.tensor(clean)[:, 1:, None]
    np.testing.assert_allclose(
        effects.corrupted, -logits.gather(2, wanted)[..., 0].mean(1), rtol=1e-5
    )
    runs = hl.causal.EdgeRuns(model, clean, corrupted, hl.metrics.loss())
    np.testing.assert_allclose(runs.corrupted, effects.corrupted, rtol=1e-5)
    shorter = [prompt[:8] for prompt in corrupted]
    for metric in (hl.metrics.loss(), hl.metrics.kl("all")):
        with pytest.raises(PlanError, match="must be equally long for it"):
            patch_each(model, clean, shorter, metric, align="end")


def test_positions_and_seeds_of_numpy_are_numbers_too(tmp_path: Path):
    model, clean, corrupted = tiny("llama"), prompts(0), prompts(1)
    at = np.array([3, -1])
    one = ablate_each(model, clean, METRIC, heads="1.0", positions=at, seed=np.int64(1))
    two = patch_each(model, clean, corrupted, METRIC, heads="1.0", positions=at)
    for effects in (one, two):
        assert Effects.load(effects.save(tmp_path / "effects.json")).about["positions"] == [3, -1]
    for wrong in (-1, 1.5, "x", True):
        with pytest.raises(PlanError, match="seed="):
            ablate_each(model, clean, METRIC, seed=wrong)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="seed="):
            patch_each(model, clean, corrupted, METRIC, seed=wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="positions=5 must be a list"):
        ablate_each(model, clean, METRIC, positions=5)  # type: ignore[arg-type]


def test_a_trace_as_reference_cannot_be_resumed_from(tmp_path: Path):
    model, clean = tiny("llama"), prompts(0)
    trace = model.trace(prompts(4), keep=hl.keep.tensors("z"))
    with pytest.raises(PlanError, match="needs reference prompts"):
        ablate_each(model, clean, METRIC, kind="mean", reference=trace, out=tmp_path)
    given = ablate_each(model, clean, METRIC, kind="mean", reference=trace)
    again = ablate_each(model, clean, METRIC, kind="mean", reference=prompts(4), out=tmp_path)
    np.testing.assert_allclose(given.values, again.values)
