"""Path patching does what its four passes say, as ordinary edits carry them out one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from real_model import smollm2
from tiny_models import VOCAB_SIZE, build

import headlab as hl
from headlab.causal import metrics
from headlab.causal.paths.path_patching import path_patch
from headlab.errors import HeadError, PlanError, PromptError, UnsupportedError

FAMILIES = [
    "llama",
    "gpt2",
    "gpt_neox",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "granite",
    "llama4_text",
]
#: Experts have no float64 kernels.
SINGLE = ("gpt_oss", "llama4_text")
HEADS = ("z", "q", "k", "v", "mlp_out", "resid_post")


def make(family: str, **changes: Any) -> hl.Model:
    module = build(family, **changes)
    return hl.load(module if family in SINGLE else module.double())


def prompts(n: int = 3, length: int = 10, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(4, VOCAB_SIZE, (2, n, length), generator=generator)
    both[1, :, :2] = both[0, :, :2]
    return both[0], both[1]


def metric(n: int = 3) -> metrics.Metric:
    return metrics.logit_difference(list(range(5, 5 + n)), list(range(50, 50 + n)))


def by_edits(
    model: hl.Model,
    clean: torch.Tensor,
    corrupted: torch.Tensor,
    sender: tuple[int, int],
    receivers: dict[str, str],
    positions: list[int] | None = None,
    freeze_mlps: bool = False,
) -> np.ndarray:
    """The four passes, each a run of the whole model: the logit difference of pass D per prompt."""
    keep = hl.keep.tensors(*HEADS)
    a, b = (model.trace(ids, keep=keep, logits="last") for ids in (corrupted, clean))
    frozen = [
        hl.patch("*.*", "z", source=b),
        hl.patch([sender], "z", source=a, positions=positions),
    ]
    if freeze_mlps:
        layers = [at for at in range(model.spec.n_layers) if f"mlp{at}" not in receivers]
        frozen += [hl.patch(f"{at}.*", "mlp_out", source=b) for at in layers]
    with model.edit(*frozen):
        c = model.trace(clean, keep=keep, logits="last")
    d = c
    if "logits" not in receivers:
        puts = []
        for node, sites in receivers.items():
            if node.startswith("mlp"):
                puts.append(hl.patch(f"{node[3:]}.*", "mlp_out", source=c))
            else:
                puts += [hl.patch(node, site, source=c) for site in sites]
        with model.edit(*puts):
            d = model.trace(clean, logits="last")
    bound = metric(len(clean)).bind(model, clean)
    return bound(d.logits, torch.arange(len(clean))).double().numpy()


CASES: list[tuple[dict[str, str], list[int] | None, bool]] = [
    ({"logits": ""}, None, False),
    ({"logits": ""}, None, True),
    ({"logits": ""}, [4, -1], False),
    ({"L1H0": "q"}, None, False),
    ({"L1H1": "kv", "L1H2": "q"}, [3, -2], False),
    ({"L1H2": "qkv"}, None, True),
    ({"mlp1": ""}, None, False),
    ({"mlp1": ""}, [-1], True),
    ({"L1H0": "v", "mlp1": ""}, None, False),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_path_patching_equals_its_four_passes_done_with_edits(family: str):
    model = make(family)
    clean, corrupted = prompts()
    for receivers, positions, freeze in CASES:
        named = [f"{node}:{sites}" if sites else node for node, sites in receivers.items()]
        senders = [(0, head) for head in range(model.spec.n_heads)]
        found = path_patch(
            model,
            clean,
            corrupted,
            metric(),
            senders,
            named,
            freeze_mlps=freeze,
            positions=positions,
        )
        for at, sender in enumerate(senders):
            exact = by_edits(model, clean, corrupted, sender, receivers, positions, freeze)
            tolerance = 2e-5 if family in SINGLE else 1e-6  # several families norm in float32
            np.testing.assert_allclose(found.values[at], exact, atol=tolerance, err_msg=str(named))
        moved = np.abs(found.values - found.baseline).max()
        assert moved > 1e-4, named  # the claim would be empty otherwise


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_heads_of_the_receivers_layer_do_not_reach_it_and_later_ones_reach_the_logits(family: str):
    model = make(family)
    clean, corrupted = prompts()
    found = path_patch(model, clean, corrupted, metric())
    assert len(found.frame) == sum(layer.n_heads for layer in model.spec.layers)
    last = by_edits(model, clean, corrupted, (1, 1), {"logits": ""})
    at = model.spec.n_heads + 1
    np.testing.assert_allclose(found.values[at], last, atol=1e-6)
    found = path_patch(model, clean, corrupted, metric(), receivers="1.*:q")
    assert set(found.frame["layer"]) == {0}


def test_prompts_of_several_lengths_and_positions_of_their_own():
    model = make("llama")
    one, other = prompts(2, 8), prompts(2, 11, seed=1)
    clean = [*one[0].tolist(), *other[0].tolist()]
    corrupted = [*one[1].tolist(), *other[1].tolist()]
    places = [[3], [5], [6], [-1]]
    found = path_patch(
        model, clean, corrupted, metric(4), "0.*", "L1H3:kv", positions=places, tokens_at_once=20
    )
    for prompt, place in enumerate(places):
        ours, theirs = torch.tensor([clean[prompt]]), torch.tensor([corrupted[prompt]])
        alone = path_patch(
            model,
            ours,
            theirs,
            metrics.logit_difference(5 + prompt, 50 + prompt),
            "0.*",
            "L1H3:kv",
            positions=place,
        )
        np.testing.assert_allclose(found.values[:, prompt], alone.values[:, 0], atol=1e-9)


@pytest.mark.parametrize("given", [metrics.loss(), metrics.kl("all")])
def test_metrics_of_every_position_are_measured_on_every_position(given: metrics.Metric):
    model = make("llama")
    clean, corrupted = prompts()
    found = path_patch(model, clean, corrupted, given, "L0H2", "logits")
    keep = hl.keep.tensors("z")
    a, b = (model.trace(ids, keep=keep) for ids in (corrupted, clean))
    with model.edit(hl.patch("*.*", "z", source=b), hl.patch("L0H2", "z", source=a)):
        logits = model.logits(clean)
    bound = given.bind(model, clean).with_reference(b.logits)
    exact = bound(logits, torch.arange(3)).numpy()
    np.testing.assert_allclose(found.values[0], exact, atol=1e-6)
    assert np.abs(exact - found.clean).max() > 1e-3


def test_denoising_exchanges_the_runs():
    model = make("gpt2")
    clean, corrupted = prompts()
    back = path_patch(model, clean, corrupted, metric(), receivers="1.*:v", direction="denoising")
    forth = path_patch(model, corrupted, clean, metric(), receivers="1.*:v")
    np.testing.assert_allclose(back.values, forth.values, atol=1e-12)
    np.testing.assert_allclose(back.baseline, back.corrupted)
    np.testing.assert_allclose(back.clean, forth.corrupted, atol=1e-12)


def linear(module: Any) -> Any:
    """Llama without norms or MLPs: with patterns fixed, the logits are linear in the embedding."""
    with torch.no_grad():
        for block in module.model.layers:
            block.mlp.down_proj.weight.zero_()
            block.input_layernorm = torch.nn.Identity()
            block.post_attention_layernorm = torch.nn.Identity()
    module.model.norm = torch.nn.Identity()
    return module


def test_path_effects_of_a_linear_model_sum_to_the_total_effect():
    """Uniform attention (queries are 0), no norms, no MLPs. Every path is a chain of heads: what the corrupted
    heads and embedding of the last position do together is the sum over paths to the logits."""
    module = linear(build("llama").double())
    with torch.no_grad():
        for block in module.model.layers:
            block.self_attn.q_proj.weight.zero_()
    model = hl.load(module)
    clean, corrupted = prompts()
    corrupted[:, -1] = clean[
        :, -1
    ]  # so that the embedding itself adds nothing to the last position
    last = path_patch(model, clean, corrupted, metric(), "1.*")
    first = path_patch(model, clean, corrupted, metric(), "0.*")
    total = last.corrupted - last.clean
    direct = (last.values - last.baseline).sum(0) + (first.values - first.baseline).sum(0)
    np.testing.assert_allclose(direct, total, atol=1e-9)
    # Of the second layer's share, the part that comes through the first layer's heads and values: the rest comes
    # straight from the embedding.
    through = path_patch(model, clean, corrupted, metric(), "0.*", "1.*:v")
    weights = model.weights
    with torch.no_grad():
        moved = weights.W_E[corrupted] - weights.W_E[clean]
        mean = moved.cumsum(1)[:, -1] / moved.shape[1]
        value = torch.einsum("bd,hdv->bhv", mean, weights.W_V(1)).repeat_interleave(3, 1)
        written = torch.einsum("bhv,hvd->bd", value, weights.W_O(1)) @ weights.W_U
    each = torch.arange(3)
    embedded = (written[each, 5 + each] - written[each, 50 + each]).numpy()
    share = (last.values - last.baseline).sum(0)
    np.testing.assert_allclose(
        (through.values - through.baseline).sum(0), share - embedded, atol=1e-9
    )
    assert np.abs(embedded).min() > 1e-3


def test_patching_a_run_into_itself_changes_nothing_and_leaves_the_model_alone():
    module = build("llama").double()
    twin = build("llama").double()
    model = hl.load(module)
    clean, other = prompts()
    corrupted = torch.cat([other[:1], clean[1:]])  # all pairs but the first are of one prompt twice
    for receivers in ("logits", "1.*:qkv", "mlp1"):
        found = path_patch(model, clean, corrupted, metric(), receivers=receivers)
        change = np.abs(found.values - found.baseline)
        assert change[:, 0].max() > 1e-3
        assert change[:, 1:].max() < 1e-6
    assert torch.equal(module(clean).logits, twin(clean).logits)
    assert all("forward" not in vars(part) for part in module.modules())


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"senders": "L1H0", "receivers": "L1H2:q"}, PlanError, "no path from L1H0 to L1H2"),
    ({"senders": "L1H0", "receivers": "mlp0"}, PlanError, "no path from L1H0 to mlp0"),
    ({"receivers": "0.*:k"}, PlanError, "no head of .* comes before"),
    ({"receivers": "L1H0"}, PlanError, "'L1H0' cannot be read; write a head with an input"),
    ({"receivers": "L1H0:z"}, PlanError, "cannot be read"),
    ({"receivers": "L9H0:q"}, HeadError, "does not exist"),
    ({"receivers": "mlp7"}, PlanError, "has MLPs mlp0 to mlp1"),
    ({"receivers": "logits, mlp1"}, PlanError, "name logits alone"),
    ({"receivers": ""}, PlanError, "receivers="),
    ({"positions": [10]}, PlanError, "position 10, but prompt 0 has 10 tokens"),
    ({"positions": [9, -1]}, PlanError, "names a position twice"),
    ({"direction": "sideways"}, PlanError, "'noising' or 'denoising'"),
    ({"tokens_at_once": 0}, PlanError, "tokens_at_once=0"),
    ({"senders": []}, HeadError, "no head was named"),
]


@pytest.mark.parametrize(("given", "kind", "said"), MISTAKES)
def test_mistakes_are_told_in_a_sentence(
    given: dict[str, Any], kind: type[Exception], said: str, lab: Callable[..., hl.Model]
):
    clean, corrupted = prompts()
    with pytest.raises(kind, match=said):
        path_patch(lab("llama"), clean, corrupted, metric(), **given)


def test_prompts_that_do_not_match_and_models_without_paths_are_refused(
    lab: Callable[..., hl.Model],
):
    clean, corrupted = prompts()
    with pytest.raises(PromptError, match="10 tokens and its corrupted one 9"):
        path_patch(lab("llama"), clean, corrupted[:, :9], metric())
    with pytest.raises(PromptError, match="3 clean prompts and 2 corrupted"):
        path_patch(lab("llama"), clean, corrupted[:2], metric())
    with pytest.raises(UnsupportedError, match="no decoder-only model"):
        path_patch(lab("bert"), clean, corrupted, metric())
    with lab("llama").edit(hl.ablate("L0H0")), pytest.raises(PlanError, match="edits are in force"):
        path_patch(lab("llama"), clean, corrupted, metric())


def test_a_receiver_in_a_parallel_block_reads_no_head_of_its_block(lab: Callable[..., hl.Model]):
    clean, corrupted = prompts()
    with pytest.raises(PlanError, match="no path from L1H0 to mlp1"):
        path_patch(lab("gpt_neox"), clean, corrupted, metric(), "L1H0", "mlp1")
    path_patch(lab("llama"), clean, corrupted, metric(), "L1H0", "mlp1")


@pytest.mark.slow
def test_on_smollm2_one_head_carries_most_of_indirect_object_identification():
    model = smollm2()
    drawn = hl.tasks.ioi_prompts(model.tokenizer, 40, 0)
    same = [prompt for prompt in drawn if len(prompt.ids) == 18][:6]
    clean, corrupted = (
        torch.tensor([getattr(p, side) for p in same]) for side in ("ids", "corrupted")
    )
    names = metrics.logit_difference([p.io for p in same], [p.subject for p in same])
    found = path_patch(model, clean, corrupted, names, "20.*, 23.*, 24.*")
    assert str(hl.Head(*found.top(1)[["layer", "head"]].iloc[0])) == "L23H3"
    drop = (found.clean - found.corrupted).mean()
    assert found.frame["effect"].min() < -0.4 * drop
    keep = hl.keep.tensors("z")
    a, b = (model.trace(ids, keep, logits="none") for ids in (corrupted, clean))
    with model.edit(
        hl.patch("*.*", "z", source=b), hl.patch("L23H3", "z", source=a, positions=[-1])
    ):
        logits = model.trace(clean, logits="last").logits
    exact = names.bind(model, clean)(logits, torch.arange(6))
    at = int(found.frame.index[(found.frame["layer"] == 23) & (found.frame["head"] == 3)][0])
    np.testing.assert_allclose(found.values[at], exact.numpy(), atol=1e-3)
