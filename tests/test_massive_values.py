"""Massive values of q, k and v: planted outliers are found, and placed by frequency."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from exact_models import exact
from real_model import smollm2
from tiny_models import build

import headlab as hl
from headlab.attention import rope_pairs
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.parameters.on_prompts.massive_values import _ratio_intervals, massive_values
from headlab.tasks import prose, prose_windows

FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "gpt_oss", "qwen3", "deepseek_v3")

#: Mixtures of experts do not run in float64.
MIXTURES = ("gpt_oss", "deepseek_v3")


def prompts(lengths: list[int], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 97, (len(lengths), max(lengths)), generator=generator)
    for row, length in enumerate(lengths):
        ids[row, length:] = -1
    return ids


def with_outlier(
    family: str, dimension: int, q_head: int = 2, kv_head: int = 0, k_dimension: int | None = None
) -> Any:
    """A tiny model in whose second layer one dimension of one query head and one key head is 60 times as large."""
    k_dimension = dimension if k_dimension is None else k_dimension
    module = build(family)
    attention = module.model.layers[1].self_attn
    width = attention.head_dim
    with torch.no_grad():
        attention.q_proj.weight[q_head * width + dimension] *= 60
        attention.k_proj.weight[kv_head * width + k_dimension] *= 60
    return hl.load(module)


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_equal_dense_ones_over_each_prompts_own_positions(family: str):
    model, lengths, skip = hl.load((build if family in MIXTURES else exact)(family)), [19, 12], 2
    found = massive_values(model, prompts(lengths), skip=skip)
    whole: dict[Any, Any] = {}
    for at, length in enumerate(lengths):
        trace = model.trace(prompts(lengths)[at, :length], keep=hl.keep.tensors("q", "k", "v"))
        for site in ("q", "k", "v"):
            for layer in range(model.spec.n_layers):
                x = trace.tensor(site, layer)[0, skip:].double().numpy()
                ours = found.prompt_norms[site, layer][at]
                assert ours == pytest.approx(np.linalg.norm(x, axis=0), rel=1e-5)
                whole.setdefault((site, layer), []).append(x)
    for key, parts in whole.items():
        assert found.norms[key] == pytest.approx(
            np.linalg.norm(np.concatenate(parts), axis=0), rel=1e-5
        )
    facts = model.spec.layers[0]
    assert len(found.norms["q", 0]) == facts.n_heads
    assert len(found.norms["k", 0]) == facts.n_kv_heads


# The slow pair of a half-split head of 10 is (4, 9); the layout of GLM puts neighbours together.
@pytest.mark.parametrize(
    ("family", "dimension", "pair"),
    [("llama", 4, 4), ("llama", 9, 4), ("glm4", 5, 2), ("glm4", 4, 2)],
)
def test_a_planted_outlier_is_the_only_hit_and_stands_in_its_pair(
    family: str, dimension: int, pair: int
):
    model = with_outlier(family, dimension)
    found = massive_values(model, prompts([30, 30]))
    places = found.frame[["site", "layer", "head", "dimension"]].to_records(index=False).tolist()
    assert places == [("q", 1, 2, dimension), ("k", 1, 0, dimension)]
    assert found.frame["pair"].tolist() == [pair, pair]
    assert found.frame["depth"].tolist() == [1.0, 1.0]
    layout = rope_pairs(model)[1]
    assert found.frame["wavelength"].tolist() == pytest.approx(
        [2 * np.pi / layout.frequency[pair]] * 2
    )
    assert found.frame["matched"].all()  # query head 2 shares key head 0
    assert (found.frame["ratio"] > 5).all()
    assert (found.frame["ci_low"] <= found.frame["ratio"]).all()
    assert (found.frame["ci_high"] >= found.frame["ratio"]).all()
    assert found.massive("q", 1).sum() == 1


def test_the_interval_holds_a_ratio_that_is_below_every_prompts_own():
    """Two prompts whose small dimensions are other ones: over both there are more of these, and the ratio is less."""
    each = np.array([[[10.0, 1, 0]], [[10.0, 0, 1]]])
    own = 10 / (11 / 3)
    both = np.sqrt(200) / ((np.sqrt(200) + 2) / 3)
    assert both < own - 0.09
    low, high = _ratio_intervals(each, np.array([0]), seed=0)
    assert (low[0, 0], high[0, 0]) == pytest.approx((both, own))


@pytest.mark.parametrize("n", [2, 5])
def test_the_interval_is_of_the_ratio_shown(n: int):
    """Prompts of unequal length: M over all of them is not the mean of theirs."""
    model = with_outlier("llama", 4)
    found = massive_values(model, prompts([40, 6, 9, 25, 12][:n]), sites=("q",))
    (row,) = found.frame.to_dict("records")
    each = found.prompt_norms["q", 1][:, 2]
    draws = itertools.product(range(n), repeat=n)
    sizes = [np.sqrt((each[list(draw)] ** 2).sum(0)) for draw in draws]
    ratios = [size[4] / size.mean() for size in sizes]
    low, high = np.percentile(ratios, [2.5, 97.5])
    assert (row["ci_low"], row["ci_high"]) == pytest.approx((low, high), abs=0.15 * (high - low))
    assert row["ci_low"] <= row["ratio"] <= row["ci_high"]
    assert row["n"] == n


def test_heads_of_other_groups_do_not_match():
    found = massive_values(with_outlier("llama", 4, q_head=2, kv_head=1), prompts([30, 30]))
    assert len(found.frame) == 2
    assert not found.frame["matched"].any()
    table = found.summary().set_index(["what", "site"])
    assert table.loc[("matched", "q"), "value"] == 0
    assert table.loc[("matched pair", "q"), "value"] == 0


def test_heads_match_the_keys_of_their_own_group():
    found = massive_values(with_outlier("llama", 4, q_head=4, kv_head=1), prompts([30, 30]))
    assert found.frame["matched"].tolist() == [True, True]
    assert found.summary().set_index(["what", "site"]).loc[("matched", "q"), "value"] == 1


def test_the_two_dimensions_of_a_pair_match_as_a_pair_alone():
    found = massive_values(with_outlier("llama", 4, k_dimension=9), prompts([30, 30]))
    assert found.frame["dimension"].tolist() == [4, 9]
    assert not found.frame["matched"].any()
    table = found.summary().set_index(["what", "site"])
    assert table.loc[("matched", "q"), "value"] == 0
    assert table.loc[("matched pair", "q"), "value"] == 1
    assert table.loc[("low frequency", "k"), "value"] == 1


def test_the_summary_sets_shares_beside_chance():
    found = massive_values(with_outlier("llama", 4), prompts([30, 30]))
    table = found.summary(seed=1).set_index(["what", "site"])
    assert table.loc[("massive", "q"), "value"] == pytest.approx(1 / 120)
    assert table.loc[("massive", "k"), "value"] == pytest.approx(1 / 40)
    assert table.loc[("massive", "v"), "value"] == 0
    chances = {"low frequency": 2 / 5, "matched": 1 / 10, "matched pair": 1 / 5}
    for what, chance in chances.items():
        row = table.loc[(what, "q")]
        assert row["value"] == 1
        assert row["n"] == 1
        assert row["null"] == pytest.approx(chance, abs=0.04)
        assert row["p_value"] == pytest.approx(chance, abs=0.04)


def test_fast_outliers_are_not_low_frequency():
    module = build("llama")
    with torch.no_grad():  # both dimensions of the fastest pair, so that turning keeps it large
        for row in (0, 5):
            module.model.layers[0].self_attn.q_proj.weight[row] *= 60
    found = massive_values(hl.load(module), prompts([30]), factor=3)
    assert set(found.frame["dimension"]) == {0, 5}
    assert (found.frame["depth"] == 0).all()
    row = found.summary().set_index(["what", "site"]).loc[("low frequency", "q")]
    assert (row["value"], row["n"]) == (0, 1)  # one pair, not two dimensions
    assert row["p_value"] == 1


def test_models_without_rope_have_the_measure_without_frequencies():
    module = build("gpt2")
    with torch.no_grad():
        module.transformer.h[0].attn.c_attn.weight[:, 7] *= 60  # dimension 7 of query head 0
    found = massive_values(hl.load(module), prompts([30]))
    columns = ["site", "layer", "head", "dimension", "pair"]
    assert found.frame[columns].to_numpy().tolist() == [["q", 0, 0, 7, -1]]
    assert found.frame["depth"].isna().all()
    assert not found.pairs
    assert "low frequency" not in set(found.summary()["what"])
    json.loads(found.to_json())
    assert "1 in q" in repr(found)


def test_the_first_position_counts_only_when_asked():
    module = build("gpt2")
    with torch.no_grad():
        module.transformer.wpe.weight[0] *= 0
        module.transformer.wpe.weight[0, 3] = (
            500.0  # one direction, so that a norm leaves one large entry
        )
    model = hl.load(module)
    first = model.trace(prompts([30]), keep=hl.keep.tensors("q")).tensor("q", 0)[0, 0].double()
    without, whole = (massive_values(model, prompts([30]), skip=skip) for skip in (1, 0))
    gap = whole.norms["q", 0] ** 2 - without.norms["q", 0] ** 2
    assert gap == pytest.approx((first**2).numpy(), rel=1e-4)


def test_keys_that_slow_pairs_dominate_still_show_their_layout():
    """Such keys hardly turn, so that a layer with RoPE could be taken for one without."""
    module = build("llama")
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.k_proj.weight.view(2, 10, -1)[:, [4, 9]] *= 100
    found = rope_pairs(hl.load(module))
    assert sorted(found) == [0, 1]
    assert found[0].second.tolist() == [5, 6, 7, 8, 9]


def test_layers_without_positions_have_no_pairs():
    found = massive_values(hl.load(build("smollm3")), prompts([20]), factor=1.2)
    assert sorted(found.pairs) == [0]
    outside = found.frame[found.frame["layer"] == 1]
    assert len(outside)
    assert (outside["pair"] == -1).all()


def test_bad_input_is_refused():
    model = hl.load(build("llama"))
    with pytest.raises(PlanError, match="factor"):
        massive_values(model, prompts([9]), factor=0)
    with pytest.raises(PlanError, match="sites"):
        massive_values(model, prompts([9]), sites=("z",))  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="prompt 1 has no token"):
        massive_values(model, prompts([9, 3]), skip=3)
    with pytest.raises(UnsupportedError, match="encoder"):
        massive_values(hl.load(build("t5")), prompts([9]))
    with pytest.raises(PlanError, match="not measured"):
        massive_values(model, prompts([9]), sites=("q",)).massive("v", 0)


@pytest.mark.slow
def test_smollm2_has_them_in_slow_pairs_of_q_and_k_alone():
    model = smollm2()
    assert sorted(rope_pairs(model)) == list(range(30))
    ids = prose_windows(model.tokenizer, prose(), 3, 64, 0, model.bos)
    found = massive_values(model, ids).summary().set_index(["what", "site"])
    for site in ("q", "k"):
        assert found.loc[("low frequency", site), "value"] > 0.95
        assert found.loc[("low frequency", site), "p_value"] < 0.001
        assert found.loc[("massive", site), "value"] > 10 * found.loc[("massive", "v"), "value"]
    assert found.loc[("matched pair", "q"), "p_value"] < 0.001
