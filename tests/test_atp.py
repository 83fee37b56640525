"""Attribution patching against exact patching where it must be exact, and AtP* where plain AtP is blind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exact_models import exact, linear_after_attention, token_pairs
from real_model import smollm2
from scipy.stats import spearmanr
from test_eap import planted_induction
from tiny_models import build
from torch import Tensor

import headlab as hl
from headlab.causal import metrics
from headlab.causal.attribution.atp import atp, atp_star
from headlab.causal.patching import patch_each
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.tasks import ioi_prompts

METRIC = metrics.logit_difference(5, 7)
ONE_LAYER = {"num_hidden_layers": 1}


def metric_of(logits: Tensor) -> Tensor:
    """METRIC by hand."""
    return logits[:, -1, 5] - logits[:, -1, 7]


def patched(
    model: hl.Model, ids: Tensor, other: Tensor, site: Any, positions: Any = None
) -> np.ndarray:
    """What patching each head does to the metric, [head, prompt], one run per head."""
    found = []
    with torch.no_grad():
        source = model.trace(other, hl.keep.tensors(site))
        start = metric_of(model.logits(ids))
        for layer, facts in enumerate(model.spec.layers):
            for head in range(facts.n_heads):
                with model.edit(hl.patch((layer, head), site, source=source, positions=positions)):
                    found.append((metric_of(model.logits(ids)) - start).double().numpy())
    return np.stack(found)


def estimated(effects: Any) -> np.ndarray:
    return effects.values - effects.baseline


@pytest.mark.parametrize("direction", ["denoising", "noising"])
@pytest.mark.parametrize("site", ["z", "v"])
def test_where_attention_is_frozen_and_the_rest_linear_it_is_exact(
    site: Any, direction: Any
) -> None:
    module = linear_after_attention("llama")
    with torch.no_grad():  # even attention in the second layer, whatever the first one writes
        module.model.layers[1].self_attn.q_proj.weight.zero_()
    model = hl.load(module)
    clean, corrupted = token_pairs(3, 8, changed=(4, 7))
    effects = atp(model, clean, corrupted, METRIC, site=site, direction=direction)
    ends = (clean, corrupted) if direction == "noising" else (corrupted, clean)
    exactly = patched(model, *ends, site)
    assert np.abs(exactly).min() > 1e-6
    np.testing.assert_allclose(estimated(effects), exactly, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(effects.baseline, metric_of(model.logits(ends[0]).detach()).numpy())
    assert list(effects.frame["position"].unique()) == [-1]


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("gpt_oss", {"layer_types": ["sliding_attention"]}), ("mistral", {})],
)
@pytest.mark.parametrize("site", ["q", "k"])
def test_the_qk_fix_is_exact_where_everything_after_attention_is_linear(
    family: str, changes: dict[str, Any], site: Any
) -> None:
    model = hl.load(linear_one_layer(family, changes))
    clean, corrupted = token_pairs(3, 9, changed=(3, 5, 8))
    exactly = patched(model, clean, corrupted, site)
    options = {"site": site, "direction": "noising"}
    fixed = atp_star(model, clean, corrupted, METRIC, grad_drop=False, **options)
    plain = atp(model, clean, corrupted, METRIC, **options)
    assert np.abs(exactly).max() > 1e-3
    np.testing.assert_allclose(estimated(fixed), exactly, rtol=1e-5, atol=1e-9)
    assert np.abs(estimated(plain) - exactly).max() > 0.05 * np.abs(exactly).max()


@pytest.mark.parametrize(
    ("family", "sharp"), [("llama", 8), ("llama", 2000), ("gpt_oss", 8), ("gpt_oss", 100)]
)
@pytest.mark.parametrize("site", ["q", "k"])
def test_the_qk_fix_is_exact_for_each_position_by_itself(
    family: str, sharp: int, site: Any
) -> None:
    changes = {"layer_types": ["sliding_attention"]} if family == "gpt_oss" else {}
    model = hl.load(linear_one_layer(family, changes, sharp))
    clean, corrupted = token_pairs(2, 8, changed=(2, 5, 7))
    effects = atp_star(
        model,
        clean,
        corrupted,
        METRIC,
        site=site,
        by="head_position",
        direction="noising",
        grad_drop=False,
    )
    assert sorted(effects.frame["position"].unique()) == list(range(2, 8))
    for position in range(2, 8):
        rows = (effects.frame["position"] == position).to_numpy()
        exactly = patched(model, clean, corrupted, site, [position])
        np.testing.assert_allclose(estimated(effects)[rows], exactly, rtol=1e-5, atol=1e-9)


def linear_one_layer(family: str, changes: dict[str, Any], sharp: int = 8) -> Any:
    """One layer of sharp attention whose logits are linear in z."""
    if family != "gpt_oss":
        module = linear_after_attention(family, **ONE_LAYER, **changes)
    else:  # its experts cannot run in float64
        module = build(family, **ONE_LAYER, **changes)
        module.model.layers[0].mlp = Nothing()
        module.model.norm = torch.nn.Identity()
        module.double()
    with torch.no_grad():
        module.model.layers[0].self_attn.q_proj.weight.mul_(sharp)
    return module


class Nothing(torch.nn.Module):
    """An MLP that adds nothing."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.zeros_like(x), None


EXACT = ("llama", "gpt2", "gpt_neox")


@pytest.mark.parametrize("family", [*EXACT, "gemma2", "gpt_oss", "deepseek_v3", "bert"])
@pytest.mark.parametrize("site", ["z", "q", "k", "v"])
def test_it_is_the_slope_of_mixing_in_the_other_run(family: str, site: Any) -> None:
    model = hl.load(exact(family) if family in EXACT else build(family))
    clean, corrupted = token_pairs(2, 8, changed=(4, 7))
    head = "L1H1"
    step, relative, absolute = (1e-4, 1e-5, 1e-9) if family in EXACT else (1e-2, 2e-2, 5e-4)
    with (
        torch.no_grad(),
        model.edit(hl.apply("*.*", lambda x, where: x, "k")),
    ):  # keys per query head
        ends = [model.trace(ids, hl.keep.tensors(site)) for ids in (clean, corrupted)]

    def mixed(by: float) -> Tensor:
        values = [end.of_head(site, hl.parse_heads(head, model.spec)[0]) for end in ends]
        added = by * (values[1] - values[0])[:, :, None]
        with torch.no_grad(), model.edit(hl.add(head, added, site)):
            return metric_of(model.logits(clean))

    slope = (mixed(step) - mixed(-step)).numpy() / (2 * step)
    effects = atp(model, clean, corrupted, METRIC, site=site, direction="noising")
    row = (effects.frame["layer"] == 1) & (effects.frame["head"] == 1)
    np.testing.assert_allclose(
        estimated(effects)[row.to_numpy()][0], slope, rtol=relative, atol=absolute
    )


def test_positions_sum_to_the_head() -> None:
    model = hl.load(exact("llama"))
    clean, corrupted = token_pairs(2, 8)
    whole = atp(model, clean, corrupted, METRIC)
    parts = atp(model, clean, corrupted, METRIC, by="head_position")
    assert list(parts.frame["position"].unique()) == [4, 5, 6, 7]  # before, the runs are the same
    summed = estimated(parts).reshape(12, 4, 2).sum(1)
    np.testing.assert_allclose(summed, estimated(whole), atol=1e-12)


def test_graddrop_is_the_mean_of_absolute_values_with_each_block_held() -> None:
    changes = {"num_hidden_layers": 3}
    module = exact("llama", **changes)
    clean, corrupted = token_pairs(2, 8)
    layers = module.model.layers
    sums = np.zeros((18, 2))
    for dropped in (None, 0, 1, 2):
        runs: list[list[Tensor]] = [[], [], []]
        hooks = [
            layer.self_attn.o_proj.register_forward_pre_hook(
                lambda m, args, at=at, runs=runs: runs[at].append(args[0])
            )
            for at, layer in enumerate(layers)
        ]
        if dropped is not None:
            hooks += [
                part.register_forward_hook(lambda m, args, output: output.detach())
                for part in (layers[dropped].self_attn.o_proj, layers[dropped].mlp)
            ]
        with torch.no_grad():
            module(corrupted)
        total = metric_of(module(clean).logits).sum()
        inner = [run[1] for run in runs]
        slopes = torch.autograd.grad(total, inner, allow_unused=True, materialize_grads=True)
        terms = [
            ((other - own) * slope).unflatten(-1, (6, -1)).sum((1, 3)).detach().T.numpy()
            for (other, own), slope in zip(runs, slopes, strict=True)
        ]
        for hook in hooks:
            hook.remove()
        if dropped is not None:
            sums += np.abs(np.concatenate(terms)) / 2
    model = hl.load(exact("llama", **changes))
    effects = atp_star(model, clean, corrupted, METRIC, site="z", direction="noising")
    np.testing.assert_allclose(estimated(effects), sums, rtol=1e-7, atol=1e-12)
    assert effects.frame["p_value"].isna().all()
    assert effects.frame["q_value"].isna().all()


def test_a_saturated_key_is_seen_only_with_the_fix() -> None:
    model, clean, corrupted, metric = planted_induction("llama")
    options: dict[str, Any] = {"site": "k", "direction": "noising"}
    exactly = patch_each(model, clean, corrupted, metric, **options).map()[2, 1]
    plain = atp(model, clean, corrupted, metric, **options).map()[2, 1]
    fixed = atp_star(model, clean, corrupted, metric, grad_drop=False, **options).map()
    assert exactly < -5
    assert abs(plain) < 0.1 * abs(exactly)
    assert fixed[2, 1] == pytest.approx(exactly, rel=0.1)
    others = np.delete(np.abs(fixed).ravel(), 2 * 4 + 1)
    assert others.max() < 0.02 * abs(exactly)


def test_batches_and_lengths_change_nothing() -> None:
    model = hl.load(exact("llama"))
    clean, corrupted = token_pairs(3, 9)
    clean[2, 7:] = corrupted[2, 7:] = -1
    for run in (atp, atp_star):
        for by in ("head", "head_position"):
            options: dict[str, Any] = {"site": "k", "by": by}
            whole = run(model, clean, corrupted, metrics.loss(), **options)
            parts = run(model, clean, corrupted, metrics.loss(), tokens_at_once=1, **options)
            np.testing.assert_allclose(whole.values, parts.values, atol=1e-9)
        alone = run(model, clean[2:, :7], corrupted[2:, :7], metrics.loss(), site="k")
        whole = run(model, clean, corrupted, metrics.loss(), site="k")
        np.testing.assert_allclose(whole.values[:, 2], alone.values[:, 0], atol=1e-9)


def test_pairs_of_unequal_length_align_at_the_end() -> None:
    module = linear_after_attention("llama", **ONE_LAYER)
    model = hl.load(module)
    clean, corrupted = token_pairs(2, 8)
    corrupted = corrupted[:, 1:]
    options: dict[str, Any] = {"align": "end", "direction": "noising"}
    exactly = patch_each(model, clean, corrupted, METRIC, **options)
    effects = atp(model, clean, corrupted, METRIC, **options)
    np.testing.assert_allclose(estimated(effects), estimated(exactly), rtol=1e-6, atol=1e-9)
    with pytest.raises(PromptError, match="align='end'"):
        atp(model, clean, corrupted, METRIC)


@pytest.mark.slow
def test_a_real_model_ranks_heads_as_exact_patching_does() -> None:
    model = smollm2()
    drawn = ioi_prompts(model.tokenizer, 3, 0, model.bos)
    sides = [list(p.ids) for p in drawn], [list(p.corrupted) for p in drawn]
    metric = metrics.logit_difference([p.io for p in drawn], [p.subject for p in drawn])
    layers = (17, 20, 23, 29)
    options: dict[str, Any] = {"direction": "noising"}
    effects = atp(model, *sides, metric, **options).map()[layers, :]
    heads = ", ".join(f"{layer}.*" for layer in layers)
    exactly = patch_each(model, *sides, metric, heads=heads, **options).map()[layers, :]
    assert spearmanr(effects.ravel(), exactly.ravel())[0] > 0.8


def test_what_cannot_be_done_is_explained() -> None:
    clean, corrupted = token_pairs(1, 6)
    with pytest.raises(UnsupportedError, match="the model has one"):
        atp_star(hl.load(build("llama", **ONE_LAYER)), clean, corrupted, METRIC)
    with pytest.raises(UnsupportedError, match="only in decoder-only models"):
        atp_star(hl.load(build("bert")), clean, corrupted, METRIC)
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        atp(hl.load(build("t5")), clean, corrupted, METRIC)
    model = hl.load(build("gpt2"))
    with pytest.raises(PlanError, match="site='result'"):
        atp(model, clean, corrupted, METRIC, site="result")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="by='layer'"):
        atp(model, clean, corrupted, METRIC, by="layer")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="direction='both'"):
        atp(model, clean, corrupted, METRIC, direction="both")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no gradient"):
        atp(model, clean, corrupted, metrics.recall(5))
