"""β of heads and sparse distributed memory, against brute force and dense regressions."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
import torch
from exact_models import exact
from scipy.stats import linregress
from tiny_models import build

import headlab as hl
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.parameters.on_prompts.memory import (
    best_radius,
    circle_intersection,
    distributed_memory,
    nearest_radius,
    radius_beta,
    row_regression,
)

FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "gpt_oss", "qwen3", "deepseek_v3")

#: Mixtures of experts do not run in float64.
MIXTURES = ("gpt_oss", "deepseek_v3")


def prompts(lengths: list[int], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 97, (len(lengths), max(lengths)), generator=generator)
    for row, length in enumerate(lengths):
        ids[row, length:] = -1
    return ids


@pytest.mark.parametrize("radius", [0, 1, 3, 5, 9])
def test_circles_are_counted_as_by_going_through_every_address(radius: int):
    n = 9
    every = np.array(list(product([0, 1], repeat=n)))
    for distance in range(n + 1):
        other = np.zeros(n, int)
        other[:distance] = 1
        both = (every.sum(1) <= radius) & ((every != other).sum(1) <= radius)
        found = circle_intersection(n, radius)[distance]
        assert found == pytest.approx(np.log(both.sum()) if both.any() else -np.inf)


def test_beta_of_a_radius_is_the_slope_of_log_intersection_on_cosine():
    n, radius = 64, 11
    log_size = circle_intersection(n, radius)[:radius]
    fitted = linregress(1 - 2 * np.arange(radius) / n, log_size)
    assert radius_beta(n, radius) == pytest.approx(fitted.slope)
    assert fitted.rvalue**2 > 0.95  # nearly exponential, which is the paper's point


def test_smaller_radii_have_larger_betas_and_are_found_again():
    betas = {radius: radius_beta(64, radius) for radius in (5, 11, 15, 25)}
    assert sorted(betas.values(), reverse=True) == list(betas.values())
    for radius, beta in betas.items():
        assert nearest_radius(64, beta * 1.001) == (radius, beta)
    assert nearest_radius(64, -1.0)[0] == -1
    assert nearest_radius(64, float("nan"))[0] == -1


def test_the_best_radius_holds_the_share_of_addresses_its_formula_asks_for():
    share = (2 * 1024 * 2.0**64) ** (-1 / 3)
    radius = best_radius(64, 1024, 2.0**64)
    rng = [np.exp(circle_intersection(64, at)[0] - 64 * np.log(2)) for at in (radius - 1, radius)]
    assert rng[0] < share <= rng[1]
    with pytest.raises(PlanError, match="patterns=0"):
        best_radius(64, 0, 10)


def test_numbers_that_do_not_fit_are_refused():
    for wrong in (lambda: circle_intersection(8, 9), lambda: circle_intersection(513, 2),
                  lambda: radius_beta(8, 1), lambda: radius_beta(8, 9)):  # fmt: skip
        with pytest.raises(PlanError):
            wrong()


def test_regressions_of_rows_leave_out_hidden_keys():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 3, 12))
    y[:, 5] = -np.inf
    seen = np.ones((3, 12), bool)
    seen[:, 5], seen[1, 8:] = False, False
    slope, r2, keys = row_regression(*map(torch.from_numpy, (x, y, seen)))
    for row in range(3):
        fitted = linregress(x[row, seen[row]], y[row, seen[row]])
        assert float(slope[row]) == pytest.approx(fitted.slope)
        assert float(r2[row]) == pytest.approx(fitted.rvalue**2)
    assert keys.tolist() == [11, 7, 11]
    assert bool(row_regression(torch.ones(1, 4), torch.rand(1, 4), torch.ones(1, 4) > 0)[0].isnan())


@pytest.mark.parametrize("family", FAMILIES)
def test_betas_equal_regressions_on_dense_patterns(family: str):
    wider = {"sliding_window": 14} if family in ("gemma2", "gpt_oss") else {}
    model = hl.load((build if family in MIXTURES else exact)(family, **wider))
    ids, skip = prompts([30, 22]), 1
    found = distributed_memory(model, ids, rows=4, skip=skip)
    for at, length in enumerate((30, 22)):
        trace = model.trace(ids[at, :length], keep=hl.keep.tensors("q", "k", "pattern"))
        queries = np.unique(np.linspace(length // 2, length - 1, 4).round().astype(int))
        for layer, facts in enumerate(model.spec.layers):
            names = ("q", "k", "pattern")
            q, k, pattern = (trace.tensor(name, layer)[0].double().numpy() for name in names)
            for head in range(facts.n_heads):
                group = head // (facts.n_heads // k.shape[1])
                slopes = []
                for query in queries:
                    keys = [j for j in range(skip, length) if pattern[head, query, j] > 0]
                    if len(keys) < 8:
                        continue
                    a, b = q[query, head], k[keys, group]
                    cosine = b @ a / np.linalg.norm(a) / np.linalg.norm(b, axis=1)
                    slopes.append(linregress(cosine, np.log(pattern[head, query, keys])).slope)
                assert slopes
                assert found.betas[at, layer, head] == pytest.approx(np.mean(slopes), rel=1e-4)
    frame = found.frame
    assert frame["n"].eq(2).all()
    assert frame["beta"].to_numpy() == pytest.approx(found.betas.mean(0).reshape(-1))
    assert (frame["ci_low"] <= frame["beta"]).all()
    assert frame["r2"].between(0, 1).all()
    json.loads(found.to_json())
    assert "12 heads" in repr(found) or f"{len(frame)} heads" in repr(found)


def test_keys_of_one_length_make_a_head_exactly_such_a_memory():
    module = build("qwen3").double()
    width = module.config.head_dim
    for layer in module.model.layers:
        layer.self_attn.q_norm.weight.data.fill_(2.0)
        layer.self_attn.k_norm.weight.data.fill_(1.5)
    model = hl.load(module)
    found = distributed_memory(model, prompts([40]))
    beta = model.spec.layers[0].scaling * 2.0 * 1.5 * width
    assert found.frame["beta"].to_numpy() == pytest.approx(beta, rel=1e-3)
    assert found.frame["product"].to_numpy() == pytest.approx(beta, rel=1e-3)
    assert found.frame["r2"].to_numpy() == pytest.approx(1.0, abs=1e-5)
    assert (found.frame["radius"] == nearest_radius(width, beta)[0]).all()
    assert found.frame["ci_low"].isna().all()  # one prompt says nothing of others


def test_a_head_without_a_usable_row_is_nan():
    found = distributed_memory(hl.load(build("gemma2")), prompts([30, 30]))
    sliding = found.frame[found.frame["layer"] == 0]  # a window of 5 tokens
    assert sliding["beta"].isna().all()
    assert sliding["n"].eq(0).all()
    assert (sliding["radius"] == -1).all()
    whole = found.frame[found.frame["layer"] == 1]
    assert whole["beta"].notna().all()
    assert whole["q_value"].notna().all()
    assert (found.top(3)["layer"] == 1).all()


def test_bad_input_is_refused():
    model = hl.load(build("llama"))
    with pytest.raises(PromptError, match="longest prompt has 5 tokens"):
        distributed_memory(model, prompts([5]))
    with pytest.raises(PlanError, match="rows=0"):
        distributed_memory(model, prompts([20]), rows=0)
    with pytest.raises(UnsupportedError, match="encoder"):
        distributed_memory(hl.load(build("bart")), prompts([20]))
