"""Direct logit attribution: terms add up to the model's own logits, and split further by source token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from real_model import smollm2
from tiny_models import build, tiny_tokenizer
from torch import nn

import headlab as hl
from headlab import planted
from headlab.causal.attribution.direct import direct_logit_attribution
from headlab.causal.attribution.sources import SourceAttribution, by_source
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.models.stream_norm import frozen

PLAIN = ("gpt2", "gpt_neox", "gptj", "opt", "starcoder2", "codegen")  # float64 throughout
NORMED = ("llama", "mistral", "gemma2", "gemma3_text", "olmo2", "glm4", "granite", "cohere2")
SINGLE = ("gpt_oss", "mixtral", "deepseek_v3")  # their experts take no float64
LENGTHS = (11, 7, 9)


def made(family: str, **changes) -> hl.Model:
    module = build(family, **changes)
    return hl.load(module if family in SINGLE else module.double(), tokenizer=tiny_tokenizer())


def drawn(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 97, (n,), generator=generator).tolist() for n in lengths]


def raw_logits(model: hl.Model, ids: list[int]) -> torch.Tensor:
    """The model's logits at the last position before any soft cap, by plain transformers."""
    config = model.module.config
    cap = getattr(config, "final_logit_softcapping", None)
    config.final_logit_softcapping = None
    try:
        with torch.no_grad():
            return model.module(torch.tensor([ids])).logits[0, -1].double()
    finally:
        if cap is not None:
            config.final_logit_softcapping = cap


@pytest.mark.parametrize("family", PLAIN + NORMED + SINGLE)
def test_terms_sum_to_the_logit_difference_of_the_model_itself(family: str):
    model, prompts = made(family), drawn(*LENGTHS)
    found = direct_logit_attribution(model, prompts, [5, 6, [7, 8, 9]], [10, [11, 12], 13])
    tolerance = {"rtol": 0, "atol": 1e-11 if family in PLAIN else 2e-6}
    logits = [raw_logits(model, ids) for ids in prompts]
    wanted = [
        logits[0][5] - logits[0][10],
        logits[1][6] - logits[1][[11, 12]].mean(),
        logits[2][[7, 8, 9]].mean() - logits[2][13],
    ]
    np.testing.assert_allclose(found.total, torch.stack(wanted).numpy(), **tolerance)
    np.testing.assert_allclose(found.values.sum(0), found.total, **tolerance)
    assert np.abs(found.of("head")).min() > 0


@pytest.mark.parametrize("family", PLAIN[:3] + NORMED[:4] + SINGLE[:1])
def test_source_terms_sum_to_each_heads_term(family: str):
    model, prompts = made(family), drawn(*LENGTHS)
    split = by_source(model, prompts, 5, 6)
    whole = direct_logit_attribution(model, prompts, 5, 6)
    tolerance = 1e-11 if family not in SINGLE else 1e-5
    np.testing.assert_allclose(np.nansum(split.values, -1), whole.heads, rtol=0, atol=tolerance)
    for values, length in zip(split.values, LENGTHS, strict=True):
        assert np.isnan(values[..., length:]).all()
        assert not np.isnan(values[..., :length]).any()


def test_a_head_of_llama_by_the_formula():
    """⟨z W_O · γ / σ, W_U[answer] − W_U[foil]⟩ from plain transformers, and its split by key."""
    model, (ids,) = made("llama"), drawn(9)
    module = build("llama").double()
    module.set_attn_implementation("eager")
    kept: dict[str, torch.Tensor] = {}
    attention = module.model.layers[0].self_attn
    attention.o_proj.register_forward_pre_hook(lambda _, args: kept.update(z=args[0]))
    attention.v_proj.register_forward_hook(lambda _, args, out: kept.update(v=out))
    module.model.norm.register_forward_pre_hook(lambda _, args: kept.update(end=args[0]))
    with torch.no_grad():
        pattern = module(torch.tensor([ids]), output_attentions=True).attentions[0][0]
    w = module.lm_head.weight[5] - module.lm_head.weight[6]
    end = kept["end"][0, -1]
    w = w * module.model.norm.weight / (end.square().mean() + module.config.rms_norm_eps).sqrt()
    found = direct_logit_attribution(model, [ids], 5, 6)
    split = by_source(model, [ids], 5, 6)
    for head in range(6):
        columns = slice(10 * head, 10 * head + 10)
        written = attention.o_proj.weight[:, columns] @ kept["z"][0, -1, columns]
        assert found.heads[0, 0, head] == pytest.approx((written @ w).item(), abs=1e-6)
        group = slice(10 * (head // 3), 10 * (head // 3) + 10)
        for key in range(9):
            part = attention.o_proj.weight[:, columns] @ kept["v"][0, key, group]
            wanted = (pattern[head, -1, key] * (part @ w)).item()
            assert split.values[0, 0, head, key] == pytest.approx(wanted, abs=1e-6)


def test_a_last_head_of_parallel_blocks_is_what_silencing_it_takes_off_under_a_held_norm():
    """Nothing reads the last layer's heads of GPT-NeoX but the final norm, so their direct path is all."""
    model, (ids,) = made("gpt_neox"), drawn(9)
    found = direct_logit_attribution(model, [ids], 5, 6)
    norm = model.module.gpt_neox.final_layer_norm
    kept: list[torch.Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    clean = raw_logits(model, ids)
    handle.remove()
    deviation = (kept[0].var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()

    def held(_, args, out):
        x = args[0]
        return (x - x.mean(-1, keepdim=True)) / deviation * norm.weight + norm.bias

    handle = norm.register_forward_hook(held)
    for head in range(3):
        with model.edit(hl.ablate((1, head))):
            change = clean - raw_logits(model, ids)
        assert float(change[5] - change[6]) == pytest.approx(found.heads[0, 1, head], abs=1e-11)
    handle.remove()


def test_biases_are_terms_of_their_own():
    model, prompts = made("gpt2"), drawn(6)
    sites = direct_logit_attribution(model, prompts, 5, 6).frame["site"].value_counts()
    assert sites.to_dict() == {"head": 6, "mlp": 2, "attention_bias": 2, "embedding": 1,
                               "final_norm_bias": 1, "unembedding_bias": 1}  # fmt: skip
    model = made("llama")
    assert not len(direct_logit_attribution(model, prompts, 5).of("attention_bias"))


def test_centred_takes_off_the_mean_logit():
    model, (ids,) = made("opt"), drawn(8)
    logits = raw_logits(model, ids)
    found = direct_logit_attribution(model, [ids], 5, centred=True)
    assert found.total[0] == pytest.approx(float(logits[5] - logits.mean()), abs=1e-11)
    assert direct_logit_attribution(model, [ids], 5).total[0] == pytest.approx(float(logits[5]))
    with pytest.raises(PlanError, match="leave it out"):
        direct_logit_attribution(model, [ids], 5, 6, centred=True)


def test_a_position_is_read_as_if_the_prompt_ended_there():
    model, (long, short) = made("gpt_neox"), drawn(9, 5)
    inside = direct_logit_attribution(model, [long, short], 5, 6, position=[3, -2])
    cut = direct_logit_attribution(model, [long[:4], short[:4]], 5, 6)
    np.testing.assert_allclose(inside.values, cut.values, atol=1e-12)
    with pytest.raises(PlanError, match="position 5"):
        direct_logit_attribution(model, [long, short], 5, 6, position=[0, 5])


def test_an_induction_head_gets_its_term_from_the_token_it_copies():
    made_up = planted.model("llama", {"L1H0": "previous_token", "L2H1": "induction"})
    model = hl.load(made_up)
    words = [10, 20, 30, 40, 50, 60]
    found = by_source(model, [[1, *words, *words[:3]]], words[3], words[5])
    values = np.nan_to_num(found.values[0])
    assert np.unravel_index(values.argmax(), values.shape) == (2, 1, 4)
    assert values[2, 1, 4] > 0.9 * values[2, 1].sum() > 0


def test_heads_are_sorted_by_where_their_terms_come_from():
    #                 BOS  relation  subject  end
    rows = np.array([[0.1, 0.02, 1.0, 0.3], [0.0, 2.0, -0.1, 0.0], [0.0, 1.0, 0.5, 0.0],
                     [5.0, -1.0, 0.5, 0.0], [0.0, -1.0, -0.5, 0.0]])  # fmt: skip
    values = np.stack([rows, rows])[:, None]
    spans = {"relation": ((1, 2),) * 2, "subject": ((2, 3),) * 2}
    found = SourceAttribution(values, values.sum(-1), np.ones(2), spans, (("a",) * 4,) * 2)
    table = found.classify()
    assert list(table["kind"]) == ["subject", "relation", "mixed", "none", "none"]
    assert list(found.classify(least=1.5)["kind"]) == ["none", "relation", *["none"] * 3]
    assert list(found.classify(ratio=2)["kind"])[2] == "relation"
    np.testing.assert_allclose(found.frame["other"], [0.4, 0, 0, 5, 0], atol=1e-12)
    with pytest.raises(PlanError, match="there are relation, subject"):
        found.span("time")
    with pytest.raises(PlanError, match="at least 1"):
        found.classify(ratio=0.5)


@pytest.mark.parametrize(
    ("spans", "fault"),
    [
        ({"subject": (2, 9)}, r"\[2, 9\), but sources are positions 0–5"),
        ({"subject": (2, 2)}, "prompt 0"),
        ({"subject": [(0, 1), (1, 2)]}, "for each of 1 prompts"),
        ({"subject": (1, 3), "relation": (2, 4)}, "'subject' and 'relation' of prompt 0 overlap"),
    ],
)
def test_bad_spans_are_named(spans, fault: str):
    with pytest.raises(PlanError, match=fault):
        by_source(made("gpt2"), drawn(6), 5, spans=spans)


@pytest.mark.parametrize("family", ["bert", "bart", "t5"])
def test_models_without_one_summed_stream_are_refused(family: str):
    with pytest.raises(UnsupportedError, match="decoder-only"):
        direct_logit_attribution(hl.load(build(family)), drawn(6), 5)


def test_a_stream_that_is_no_sum_is_refused():
    """A block that scales its output makes no sum of its parts; better no number than a wrong one."""
    model = made("gpt2")
    model.module.transformer.h[0].register_forward_hook(lambda _, args, out: 1.5 * out)
    with pytest.raises(UnsupportedError, match="do not add up"):
        direct_logit_attribution(model, drawn(6), 5)


def test_logits_made_otherwise_are_refused():
    model = made("gpt2")
    model.module.lm_head.register_forward_hook(lambda _, args, out: out * 2)
    with pytest.raises(UnsupportedError, match="unembedding"):
        direct_logit_attribution(model, drawn(6), 5)


def test_tokens_and_prompts_are_checked():
    model = made("gpt2")
    with pytest.raises(PlanError, match="token 97"):
        direct_logit_attribution(model, drawn(6), 97)
    with pytest.raises(PromptError):
        direct_logit_attribution(model, [[]], 5)


@pytest.mark.slow
def test_terms_of_the_real_model_sum_to_its_logit_difference():
    texts = ["The capital of France is", "In the far north of Italy, the largest city is"]
    found = direct_logit_attribution(smollm2(), texts, [" Paris", " Milan"], [" Rome", " Naples"])
    with torch.no_grad():
        logits = [smollm2().module(smollm2().tokens(text)).logits[0, -1] for text in texts]
    one = smollm2().tokenizer.convert_tokens_to_ids
    pairs = [("ĠParis", "ĠRome"), ("ĠMilan", "ĠNaples")]
    wanted = [float(row[one(a)] - row[one(b)]) for row, (a, b) in zip(logits, pairs, strict=True)]
    np.testing.assert_allclose(found.values.sum(0), wanted, atol=1e-4)


@pytest.mark.parametrize("width", [7, 8])
def test_a_frozen_layer_norm_is_the_norm_there_and_linear_elsewhere(width: int):
    torch.manual_seed(0)
    norm = nn.LayerNorm(width).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x, y, u = torch.randn(3, 5, width, dtype=torch.float64)
    found = frozen(norm, x)
    torch.testing.assert_close(found.apply(x), norm(x))
    torch.testing.assert_close(found.linear(x + y), found.linear(x) + found.linear(y))
    scale = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).rsqrt()
    wanted = scale * (y - y.mean(-1, keepdim=True)) * norm.weight
    torch.testing.assert_close(found.linear(y), wanted)
    torch.testing.assert_close((found.linear(y) * u).sum(-1), (y * found.pull(u)).sum(-1))


def test_what_is_no_norm_is_not_frozen():
    with pytest.raises(UnsupportedError, match="Tanh, is neither"):
        frozen(nn.Tanh(), torch.randn(3, 8))
