"""The node form of EAP-IG: heads at z in families with and without edges."""

from __future__ import annotations

import pytest
import torch
from exact_models import exact, token_pairs
from tiny_models import build
from torch import Tensor

import headlab as hl
from headlab.causal import metrics
from headlab.causal.attribution.eap_heads import eap_ig_heads
from headlab.errors import UnsupportedError

METRIC = metrics.logit_difference(5, 7)


def metric_of(logits: Tensor) -> Tensor:
    """METRIC by hand."""
    return logits[:, -1, 5] - logits[:, -1, 7]


@pytest.mark.parametrize("family", ["llama", "gemma2", "bert"])
def test_heads_are_scored_in_every_family_by_the_formula(family: str) -> None:
    clean, corrupted = token_pairs(2, 8)
    model = hl.load(build(family).double())
    scores = eap_ig_heads(model, clean, corrupted, METRIC, steps=3, points="right")
    embed = model.module.get_input_embeddings()
    head, width = (1, 2), model.spec.layers[1].d_value
    output = model.weights.output_projection(1)
    runs: list[Tensor] = []
    hook = output.register_forward_pre_hook(lambda module, args: runs.append(args[0]))
    with torch.no_grad():
        first, last = embed(corrupted), embed(clean)
        model.module(corrupted), model.module(clean)
    slopes = 0
    for share in (1 / 3, 2 / 3, 1):
        logits = model.module(inputs_embeds=first + share * (last - first)).logits
        (gradient,) = torch.autograd.grad(metric_of(logits).sum(), runs[-1])
        slopes = slopes + gradient / 3
    hook.remove()
    terms = ((runs[0] - runs[1]) * slopes).unflatten(-1, (-1, width)).sum((1, 3))[:, head[1]]
    found = scores.of(head)["effect"].iloc[0]
    assert found == pytest.approx(float(terms.mean()), rel=1e-4, abs=1e-6)


def test_activation_paths_of_a_last_layer_sum_to_patching_it() -> None:
    clean, corrupted = token_pairs(2, 7)
    model = hl.load(exact("gpt2"))
    scores = eap_ig_heads(model, clean, corrupted, METRIC, kind="activations", steps=40)
    source = model.trace(corrupted, hl.keep.tensors("z"))
    with model.edit(hl.patch("1.*", source=source)):
        patched = metric_of(model.logits(clean).detach())
    change = float((patched - metric_of(model.logits(clean).detach())).mean())
    frame = scores.frame
    assert frame.loc[frame["layer"] == 1, "effect"].sum() == pytest.approx(change, rel=1e-2)


def test_batches_lengths_and_metrics_of_all_positions() -> None:
    model = hl.load(exact("llama"))
    clean, corrupted = token_pairs(3, 9)
    clean[2, 7:] = corrupted[2, 7:] = -1
    for metric in (METRIC, metrics.loss()):
        whole = eap_ig_heads(model, clean, corrupted, metric, steps=2)
        parts = eap_ig_heads(model, clean, corrupted, metric, steps=2, tokens_at_once=1)
        alone = eap_ig_heads(model, clean[2:, :7], corrupted[2:, :7], metric, steps=2)
        torch.testing.assert_close(torch.tensor(whole.values), torch.tensor(parts.values))
        torch.testing.assert_close(
            torch.tensor(whole.values[:, 2]), torch.tensor(alone.values[:, 0])
        )


def test_divergence_from_the_clean_run_has_a_slope_along_the_path_only() -> None:
    clean, corrupted = token_pairs(2, 8)
    model = hl.load(exact("gpt2"))
    at_clean = eap_ig_heads(model, clean, corrupted, metrics.kl(), steps=1, points="right")
    along = eap_ig_heads(model, clean, corrupted, metrics.kl(), steps=5)
    assert at_clean.frame["effect"].abs().max() < 1e-9
    assert along.frame["effect"].abs().max() > 1e-3


def test_an_encoder_decoder_is_refused() -> None:
    clean, corrupted = token_pairs(1, 6)
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        eap_ig_heads(hl.load(build("t5")), clean, corrupted, METRIC)
