"""Sinks, what explains them and what takes them away, against dense formulas and transformers' own tensors."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_model import eager_smollm2, planted_model, smollm2
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab.errors import PlanError
from headlab.roles import Probing
from headlab.roles.blocking import block_first, hide
from headlab.roles.prose_rows import text_ids
from headlab.roles.sink import Sink, text_log_probability
from headlab.roles.sink_details import (
    EPSILON,
    LEAST_ROWS,
    block_of,
    massive_details,
    short_texts,
    sink_details,
    wrapping,
)


@pytest.fixture(scope="module")
def haystack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text in the words of the tiny tokenizer."""
    folder = tmp_path_factory.mktemp("haystack")
    words = np.random.default_rng(0).integers(4, 97, 4000)
    (folder / "words.txt").write_text(" ".join(f"w{word}" for word in words), "utf-8")
    return folder


@cache
def tiny(family: str, **changes: Any) -> hl.Model:
    return hl.load(build(family, **changes), tokenizer=tiny_tokenizer())


def sharp_gpt2() -> Any:
    """Attention on few keys, wherever they stand."""
    module = build("gpt2")
    with torch.no_grad():
        for block in module.transformer.h:
            block.attn.c_attn.weight.mul_(4)
    return module


@torch.no_grad()
def eager(family: Any, ids: torch.Tensor) -> Any:
    """transformers' own attentions and hidden states, from a model that headlab never touched."""
    module = build(family) if isinstance(family, str) else family
    module.set_attn_implementation("eager")
    return module(input_ids=ids, output_attentions=True, output_hidden_states=True)


# -- α, and what is told of it -------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "bert"])
def test_alpha_is_the_papers_formula(family: str, haystack: Path):
    probing = Probing(tiny(family), n_prompts=3, haystack=haystack)
    ids = text_ids(probing, 40)
    found = short_texts(probing, ids)
    attentions = [layer.double().numpy() for layer in eager(family, ids).attentions]
    for layer, pattern in enumerate(attentions):
        window = probing.model.spec.layers[layer].window or 40
        for key in range(40):
            rows = range(40) if family == "bert" else range(key, min(40, key + window))
            alpha = sum(pattern[:, :, row, key] for row in rows) / len(rows)
            assert np.abs(found.alpha[:, layer, :, key] - alpha).max() < 1e-5
    sinks = sink_details(probing)["sink_rate"]
    assert sinks.values.shape[-1] == len(sinks.at) == 64 - LEAST_ROWS + 1


def test_details_tell_of_every_position_and_of_the_last_ones_nothing(haystack: Path):
    model = hl.load(sharp_gpt2(), tokenizer=tiny_tokenizer())
    probing = Probing(model, n_prompts=4, haystack=haystack)
    ids = text_ids(probing, 64)
    details = sink_details(probing)
    found = short_texts(probing, ids)
    over = found.alpha > EPSILON
    assert over[..., -1].any()  # the last key has one row: its α is no mean
    assert np.allclose(details["sink_rate"].values, over[..., :49].mean(0))
    assert np.allclose(details["other_sinks"].values, over[..., 1:49].any(-1).mean(0))


def test_norms_are_those_of_values_and_of_mixed_values(haystack: Path):
    probing = Probing(tiny("llama"), n_prompts=2, haystack=haystack)
    ids = text_ids(probing, 40)
    found = short_texts(probing, ids)
    module = build("llama")
    block = module.model.layers[0]
    with torch.no_grad():
        x = block.input_layernorm(module.model.embed_tokens(ids))
        v = block.self_attn.v_proj(x).unflatten(-1, (2, 10)).repeat_interleave(3, 2)
    pattern = eager("llama", ids).attentions[0]
    z = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
    median = np.median(v.norm(dim=-1)[:, 1:].numpy(), axis=1)
    # Of an even number of norms torch's median is the lower one; 39 of them are odd.
    assert np.allclose(found.value_ratio[:, 0], v[:, 0].norm(dim=-1).numpy() / median, rtol=1e-4)
    written = z[:, 1:].norm(dim=-1).mean(1).numpy()
    assert np.allclose(found.output_ratio[:, 0], written / median, rtol=1e-4)


def test_bos_is_left_out_and_moved(haystack: Path):
    probing = Probing(tiny("llama"), n_prompts=2, haystack=haystack)
    details = sink_details(probing)
    ids = text_ids(probing, 64)
    bare = eager("llama", ids[:, 1:]).attentions
    moved = eager("llama", torch.cat([ids[:, 1:17], ids[:, :1], ids[:, 17:]], 1)).attentions
    for layer in range(2):
        expected = bare[layer][:, :, 1:, 0].mean((0, 2)).numpy()
        assert np.allclose(details["first_token_removed"].values[layer], expected, atol=1e-5)
        expected = moved[layer][:, :, 17:, 16].mean((0, 2)).numpy()
        assert np.allclose(details["bos_moved"].values[layer], expected, atol=1e-5)


# -- massive activations -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_the_residual_stream_is_that_of_transformers(family: str, haystack: Path):
    probing = Probing(tiny(family), n_prompts=2, haystack=haystack)
    ids = text_ids(probing, 40)
    found = short_texts(probing, ids)
    x = eager(family, ids).hidden_states[1].abs().flatten(1).double().numpy()  # after block 0
    assert np.allclose(found.peak[:, 0], x.max(1), rtol=1e-5)
    assert np.allclose(found.median[:, 0], np.sort(x, 1)[:, (x.shape[1] - 1) // 2], rtol=1e-5)
    assert (found.position[:, 0] * 36 + found.dimension[:, 0] == x.argmax(1)).all()


@pytest.mark.parametrize(("size", "massive"), [(5000.0, 1.0), (-5000.0, 1.0), (90.0, 0.0)])
def test_a_massive_activation_put_in_by_hand_is_found(size: float, massive: float, haystack: Path):
    module = build("llama")

    def put(block: Any, args: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        x = x / 100  # the median stays far below a thousandth of 5000
        x[:, 3, 5] = size
        return (x, *output[1:]) if isinstance(output, tuple) else x

    module.model.layers[0].register_forward_hook(put)
    probing = Probing(hl.load(module, tokenizer=tiny_tokenizer()), n_prompts=3, haystack=haystack)
    details = sink_details(probing)
    first = {name: d.values[0, 0] for name, d in details.items() if name.startswith("massive")}
    assert first["massive_size"] == abs(size)
    assert (first["massive_position"], first["massive_dimension"]) == (3, 5)
    assert first["massive_rate"] == massive
    assert first["massive_activation"] > 1000
    assert all(
        detail.values.shape == (2, 1) for name, detail in details.items() if detail.per_layer
    )


def test_size_without_ratio_is_not_massive(haystack: Path):
    found = short_texts(
        Probing(tiny("llama"), n_prompts=2, haystack=haystack),
        text_ids(Probing(tiny("llama"), n_prompts=2, haystack=haystack), 32),
    )
    for peak, median, rate in ((5000, 6, 0), (5000, 4, 1), (90, 0.01, 0)):
        given = {"peak": np.full((2, 2), peak), "median": np.full((2, 2), median)}
        changed = type(found)(**{**vars(found), **given})
        assert (massive_details(changed)["massive_rate"].values == rate).all()


def test_the_block_of_an_attention_module():
    module = build("bert")
    assert block_of(module, "bert.encoder.layer.1.attention.self") is module.bert.encoder.layer[1]
    assert block_of(module, "bert.encoder") is None


# -- the first token hidden ----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bert"])
def test_hiding_the_first_token_is_a_softmax_over_the_others(family: str):
    model = tiny(family)
    ids = torch.randint(4, 97, (2, 14), generator=torch.Generator().manual_seed(1))
    before = model.trace(ids, keep=hl.keep.rows()).rows[:, 0].double()
    with model.edit(block_first("L0H1")):
        after = model.trace(ids, keep=hl.keep.rows()).rows[:, 0].double()
    expected = before.clone()
    sees_more = before[:, 1, :, 1:].sum(-1) > 0
    sink = 1 - before[:, 1].sum(-1)  # what a learned sink logit takes
    for prompt in range(2):
        for row in range(14):
            if sees_more[prompt, row]:
                weights = before[prompt, 1, row, 1:]
                left = weights.sum() + sink[prompt, row]
                expected[prompt, 1, row] = torch.cat([torch.zeros(1), weights / left])
    assert (after - expected).abs().max() < 1e-5
    assert (after[:, 1, 1:, 0] == 0).all()
    if family != "bert":
        assert torch.equal(after[:, 1, 0], before[:, 1, 0])


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gpt_oss"])
def test_padding_and_a_cache_make_no_difference(family: str):
    model = tiny(family)
    prompts = [list(range(5, 16)), list(range(40, 44))]
    heads = "L0H0, L1H2"
    keep = hl.keep.rows(queries="generated")
    with model.edit(block_first(heads)):
        together = model.generate(prompts, 6, keep=keep)
        for at, prompt in enumerate(prompts):
            new = together.ids[at][together.ids[at] >= 0].tolist()
            whole = model.trace([prompt + new[:-1]], keep=hl.keep.rows())
            steps = slice(len(prompt) - 1, len(prompt) - 1 + len(new))
            assert torch.equal(whole.logits[0, steps].argmax(-1), torch.tensor(new))
            rows = together.trace.rows[at, :, :, : len(new), : len(prompt) + len(new) - 1]
            assert torch.allclose(rows, whole.rows[0, :, :, steps], atol=1e-5)
            assert (rows[0, 0, :, 0] == 0).all()
            assert (rows[1, 2, :, 0] == 0).all()
    plain = model.generate(prompts, 6, keep=keep)
    assert plain.trace.rows[1, 1, 2, 0, 0] > 0  # within every window: nothing but the edit hid it


def test_hiding_by_distance_keeps_a_window_and_the_first_token():
    model = tiny("llama")
    ids = torch.arange(20, 34)[None]
    rule = hide("*.*", lambda query, key: (query - key >= 3) & (key > 0))
    with model.edit(rule):
        rows = model.trace(ids, keep=hl.keep.rows()).rows[0]
    q, k = torch.arange(14)[:, None], torch.arange(14)
    seen = (k <= q) & ((q - k < 3) | (k == 0))
    assert ((rows > 0) == seen).all()


def test_the_role_is_taken_away_by_hiding_the_first_token():
    edit = Sink().ablation(hl.parse_heads("L0H2", planted_model().spec))
    assert edit.site == "scores"
    with planted_model().edit(edit):
        frame = hl.score(planted_model(), "sink", n_prompts=3).frame
    assert frame.set_index(["layer", "head"]).loc[(0, 2), "score"] == 0


# -- the role ------------------------------------------------------------------------------------


def test_both_conventions_claim_the_planted_sink():
    scores = {
        name: hl.score(planted_model(), [Sink(name)], n_prompts=12) for name in ("headlab", "gu")
    }
    for found in scores.values():
        assert found.claimed("sink") == ["L0H2"]
    rate = scores["headlab"].detail("sink", "sink_rate")
    rate = rate[(rate["layer"] == 0) & (rate["head"] == 2)].set_index("at")["value"]
    assert rate.loc[0] == 1
    assert (rate.loc[1:] == 0).all()
    assert scores["gu"].frame.set_index(["layer", "head"]).loc[(0, 2), "score"] == 1
    with pytest.raises(PlanError, match="convention"):
        Sink("xiao")  # type: ignore[arg-type]


def test_the_papers_convention_counts_texts_without_a_bos_the_tokenizer_does_not_add(
    haystack: Path,
):
    """α of one prompt at a time, with the first row, on 64 tokens of bare text, some of it over ε."""
    model = tiny("gpt2")
    probing = Probing(model, n_prompts=12, haystack=haystack)
    lift = torch.tensor([2.5] + [0.0] * 63)
    with model.edit(
        hl.apply("L0H0, L0H1, L0H2", lambda x, where: x + lift[: x.shape[-1]], "scores")
    ):
        found = Sink("gu").measure(probing)
    ids = text_ids(probing, 65)[:, 1:]
    pattern = eager("gpt2", ids).attentions[0].double() * lift.exp()
    alpha = (pattern / pattern.sum(-1, keepdim=True))[..., 0].mean(-1)
    assert (found.values[:, 0] == (alpha > 0.3).numpy()).all()
    assert 0 < found.values[:, 0].mean() < 1


def test_wrapping_is_what_the_tokenizer_adds():
    assert wrapping(planted_model().tokenizer) == ([planted_model().tokenizer.bos_token_id], [])
    assert wrapping(tiny_tokenizer()) == ([], [])


@pytest.mark.parametrize("family", ["bert", "gpt_oss", "gemma3_text", "llama4_text", "deepseek_v3"])
@pytest.mark.parametrize("convention", ["headlab", "gu"])
def test_every_kind_of_model_can_be_asked(family: str, convention: Any, haystack: Path):
    scores = hl.score(tiny(family), [Sink(convention)], n_prompts=2, haystack=haystack)
    assert not scores.details.empty
    unmeasured = scores.frame[scores.frame["score"].isna()]
    assert (unmeasured["note"].str.len() > 0).all()


def test_records_are_read_in_place_of_headlabs_text():
    words = " ".join(f"w{4 + at % 93}" for at in range(400))
    records = [{"text": words}, {"text": words[30:]}]
    scores = hl.score(tiny("llama"), "sink", data={"sink": records})
    assert (scores.frame["n"] == 2).all()
    with pytest.raises(hl.tasks.RecordError, match="record 1"):
        hl.score(tiny("llama"), "sink", data={"sink": [{"text": words}, {"text": "w5 w6"}]})


# -- the behaviour -------------------------------------------------------------------------------


def test_the_behaviour_is_the_log_probability_of_the_next_token(haystack: Path):
    found = text_log_probability(Probing(tiny("llama"), haystack=haystack))
    ids = text_ids(Probing(tiny("llama"), haystack=haystack, seed=3, n_prompts=3), 96)
    logits = eager("llama", ids).logits.double().log_softmax(-1)
    for at in range(3):
        steps = [logits[at, step, ids[at, step + 1]].item() for step in range(95)]
        assert found[at] == pytest.approx(np.mean(steps), rel=1e-5)


def test_the_behaviour_of_an_encoder_is_that_of_masked_tokens(haystack: Path):
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "w96"
    model = hl.load(build("bert"), tokenizer=tokenizer)
    found = text_log_probability(Probing(model, haystack=haystack))
    ids = text_ids(Probing(model, haystack=haystack, seed=3, n_prompts=3), 96)
    masked, places = ids.clone(), range(4, 96, 8)
    masked[:, list(places)] = 96
    logits = eager("bert", masked).logits.double().log_softmax(-1)
    for at in range(3):
        known = [logits[at, place, ids[at, place]].item() for place in places]
        assert found[at] == pytest.approx(np.mean(known), rel=1e-5)
    assert np.isnan(text_log_probability(Probing(tiny("bert"), haystack=haystack))).all()


# -- the real model ------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_holds_its_massive_activation_on_the_first_token():
    probing = Probing(smollm2(), n_prompts=2)
    ids = text_ids(probing, 64)
    found = short_texts(probing, ids)
    with torch.no_grad():
        states = eager_smollm2()(input_ids=ids, output_hidden_states=True).hidden_states
    for layer in (5, 11, 20):
        x = states[layer + 1].abs()
        assert np.allclose(found.peak[:, layer], x.flatten(1).amax(1).numpy(), rtol=1e-3)
        assert (found.dimension[:, layer] == x.flatten(1).argmax(1).numpy() % 576).all()
    rate = massive_details(found)["massive_rate"].values[:, 0]
    assert (rate[12:26] == 1).all()
    assert (rate[:10] == 0).all()
    assert (found.position[:, 12:26] == 0).all()
    assert (found.dimension[:, 12:26] == 507).all()


@pytest.mark.slow
def test_smollm2_cannot_do_without_the_first_token_in_its_sink_heads():
    probing = Probing(smollm2(), n_prompts=2)
    alpha = short_texts(probing, text_ids(probing, 64)).alpha[..., 0].mean(0)
    order = np.argsort(alpha, axis=None)
    plain = text_log_probability(probing).mean()
    loss = []
    for chosen in (order[-60:], order[:60]):
        heads = [f"L{at // 9}H{at % 9}" for at in chosen]
        with smollm2().edit(block_first(heads)):
            loss.append(plain - text_log_probability(probing).mean())
    assert loss[0] > 5 * abs(loss[1])
    assert loss[0] > 0.1
