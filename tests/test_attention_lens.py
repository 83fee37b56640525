"""Attention lenses: what they begin as, what training does, and what they are held to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact_models import exact
from safetensors.torch import load_file, save_file
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab.errors import HeadError, OutputError, PlanError, PromptError, UnsupportedError
from headlab.parameters.on_prompts.attention_lens import AttentionLens, untrained_lens
from headlab.parameters.on_prompts.lens_training import (
    captured,
    check,
    divergence,
    fit,
    train_lens,
)

FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "qwen3", "phi")


def prompts(n: int = 12, length: int = 9) -> torch.Tensor:
    return torch.randint(4, 97, (n, length), generator=torch.Generator().manual_seed(1))


def opened(family: str = "llama") -> hl.Model:
    return hl.load(exact(family), tokenizer=tiny_tokenizer())


def ready(model: hl.Model, lens: AttentionLens) -> tuple[torch.Tensor, torch.Tensor]:
    return captured(model, prompts(), lens.heads, lens.vocabulary)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [None, 3])
def test_an_untrained_lens_is_the_unembedding_with_a_bias_per_head(family: str, rank: int | None):
    model = opened(family)
    lens = untrained_lens(model, "1.*", rank=rank)
    results, targets = ready(model, lens)
    trace = model.trace(prompts(), keep=hl.keep.tensors("result"))
    summed = trace.tensor("result", 1)[:, -1].sum(1)
    head = model.module.get_output_embeddings()
    wanted = summed @ head.weight.T
    bias = getattr(head, "bias", None)
    assert (bias is not None) == (family == "phi")
    if bias is not None:
        wanted = wanted + model.spec.n_heads * bias  # H copies, as in the paper's code
    assert torch.allclose(lens.logits(results), wanted, atol=1e-8)
    assert torch.allclose(lens.per_head(results).sum(1), lens.logits(results), atol=1e-8)
    assert torch.allclose(targets, trace.logits[:, -1].log_softmax(-1), atol=1e-8)
    assert lens.rank == rank
    assert "untrained" in repr(lens)


def test_some_heads_and_some_tokens_stand_alone():
    model, tokens = opened(), [5, 90, 17, 33]
    lens = untrained_lens(model, "L1H4, 1.2", vocabulary=tokens)
    results, targets = ready(model, lens)
    trace = model.trace(prompts(), keep=hl.keep.tensors("result"))
    wanted = trace.tensor("result", 1)[:, -1, [2, 4]].sum(1) @ model.module.lm_head.weight[tokens].T
    assert torch.allclose(lens.logits(results), wanted, atol=1e-8)
    assert torch.allclose(targets.exp().sum(-1), torch.ones(12, dtype=targets.dtype))
    logits = trace.logits[:, -1]
    assert torch.allclose(targets[:, 0] - targets[:, 1], logits[:, 5] - logits[:, 90], atol=1e-8)


def test_unequal_prompts_count_at_their_own_ends():
    model, lens = opened(), untrained_lens(opened(), "0.*")
    ids = prompts(3)
    ids[1, 5:] = -1
    results, targets = captured(model, ids, lens.heads, lens.vocabulary)
    alone, other = captured(model, ids[1:2, :5], lens.heads, lens.vocabulary)
    assert torch.allclose(results[1], alone[0])
    assert torch.allclose(targets[1], other[0])


def test_divergence_is_kl_of_model_from_lens():
    rng = np.random.default_rng(0)
    p, logits = rng.dirichlet(np.ones(6), 4), rng.normal(size=(4, 6))
    p[0, :2] = 0, p[0, 0] + p[0, 1]
    q = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.nansum(np.where(p > 0, p * np.log(p / q), 0), 1)
        found = divergence(torch.from_numpy(np.log(p)), torch.from_numpy(logits))
    assert found.numpy() == pytest.approx(wanted)


def test_a_step_is_adams_on_the_mean_loss_whatever_the_batches():
    model = opened()
    lens = untrained_lens(model, "0.*")
    results, targets = ready(model, lens)
    change = torch.zeros_like(lens.change["dense"]).requires_grad_()
    bias = lens.bias.clone().requires_grad_()
    adam = torch.optim.Adam([change, bias], lr=1e-2)
    W_U = model.module.lm_head.weight.T.detach()
    logits = torch.einsum("phd,hdt->pt", results, W_U + change) + bias.sum(0)
    loss = torch.nn.functional.kl_div(logits.log_softmax(-1), targets.exp(), reduction="batchmean")
    loss.backward()
    adam.step()
    for batch, accumulate in ((1, 12), (12, 1), (3, 4), (5, 3)):
        trained = fit(
            lens, results, targets, epochs=1, rate=1e-2, batch=batch, accumulate=accumulate
        )
        assert trained.losses == pytest.approx([float(loss.detach())])
        assert torch.allclose(trained.change["dense"], change, atol=1e-9)
        assert torch.allclose(trained.bias, bias, atol=1e-9)
    assert not lens.change["dense"].any()  # the lens it began as is untouched


@pytest.mark.parametrize("rank", [None, 4])
def test_training_lowers_the_divergence(rank: int | None):
    model = opened()
    lens = untrained_lens(model, "1.*", rank=rank)
    results, targets = ready(model, lens)
    trained = fit(lens, results, targets, epochs=60, rate=1e-2, batch=6, accumulate=1)
    assert len(trained.losses) == 120
    own = results, targets
    found = check(trained, lens, own, own, targets.double().exp().mean(0).log())
    assert found.training == pytest.approx((found.untrained.mean(), found.kl.mean()))
    assert found.kl.mean() < 0.2 * found.untrained.mean()
    assert found.untrained == pytest.approx(divergence(targets, lens.logits(results)).numpy())
    assert found.gain == pytest.approx((found.untrained - found.kl).mean())
    assert found.p_value < 0.01
    # Trained on these very prompts, it knows more than which tokens are common.
    assert found.beyond_prior > 0


def test_a_lens_of_low_rank_learns_how_large_the_unembedding_is():
    """The model predicts by a tenth of what W_U gives, of which no matrix of rank 1 can make a lens of full rank."""
    model = opened()
    lens = untrained_lens(model, "1.*", rank=1)
    results, _ = ready(model, lens)
    results = 20 * results
    targets = (0.1 * lens.logits(results)).log_softmax(-1)
    trained = fit(lens, results, targets, epochs=60, rate=1e-2, batch=12, accumulate=1)
    assert trained.change["scale"].tolist() == pytest.approx([0.1] * model.spec.n_heads, abs=0.1)
    assert trained.losses[-1] < 0.01 * trained.losses[0]
    # What it begins as is the unembedding all the same, and heads still sum to the lens.
    assert torch.allclose(lens.logits(results), results.sum(1) @ lens.unembedding)
    assert torch.allclose(trained.per_head(results).sum(1), trained.logits(results))


@pytest.mark.parametrize("size", [1, 100])
def test_steps_of_low_rank_do_not_grow_with_what_heads_write(size: int):
    model = opened()
    lens = untrained_lens(model, "1.*", rank=4)
    results, targets = ready(model, lens)
    results = size * results
    one = fit(lens, results, targets, epochs=1, rate=1e-2, batch=12, accumulate=1)
    two = fit(one, results, targets, epochs=1, rate=1e-2, batch=12, accumulate=1)
    moved = two.change["left"] - one.change["left"]
    assert moved.any()
    low = torch.einsum("phd,hdr->phr", results, moved)
    assert float(low.abs().max()) < 3e-2  # at a rate of 0.01, whatever the size


def test_training_that_diverges_says_so():
    model = opened()
    lens, found = train_lens(model, prompts(20), "1.*", rank=2, epochs=3, rate=100.0, accumulate=1)
    assert found.diverged
    assert "diverged: lower rate" in repr(found)
    assert "no better than the model's mean distribution" in repr(found)
    assert found.to_dict()["diverged"]
    _, fine = train_lens(model, prompts(20), "1.*", rank=2, epochs=3, rate=1e-3)
    assert not fine.diverged
    assert "diverged" not in repr(fine)
    # What the repr says first is the mean distribution, and how sure that is.
    sure = replace(fine, beyond_prior=1.0, prior_ci=(0.1, 2.0))
    assert "nats, better than the model's mean distribution (" in repr(sure)
    assert "not surely better" in repr(replace(sure, prior_ci=(-0.1, 2.0)))
    assert "no better" in repr(replace(sure, beyond_prior=-1.0, prior_ci=(-3.0, 0.1)))
    # No numbers are no success.
    assert replace(fine, training=(1.0, float("nan"))).diverged
    # The lens the training left is measured on the prompts it was trained on, not on those kept back.
    kept = torch.from_numpy(np.random.default_rng(0).permutation(20)[4:])
    results, targets = captured(model, prompts(20)[kept], lens.heads, lens.vocabulary)
    wanted = divergence(targets, lens.logits(results)).mean()
    assert found.training[1] == pytest.approx(float(wanted))


def test_held_out_prompts_are_not_trained_on():
    model = opened()
    lens, found = train_lens(model, prompts(20), "1.*", epochs=2, rate=1e-2, held_out=0.3, seed=4)
    assert len(found.kl) == 6
    assert len(lens.losses) == 2 * 2  # 14 prompts in steps of 10
    order = np.random.default_rng(4).permutation(20)
    ids = prompts(20)[torch.from_numpy(order[6:])]
    again = untrained_lens(model, "1.*")
    results, targets = captured(model, ids, again.heads, again.vocabulary)
    assert lens.losses[0] == pytest.approx(
        fit(again, results, targets, epochs=2, rate=1e-2, seed=4).losses[0]
    )
    same, _ = train_lens(model, prompts(20), "1.*", epochs=2, rate=1e-2, held_out=0.3, seed=4)
    assert torch.equal(same.change["dense"], lens.change["dense"])
    assert "held-out" in repr(found)
    assert found.to_dict()["n"] == 6


def test_a_lens_is_saved_and_opened_again(tmp_path: Path):
    model = opened()
    for rank in (None, 2):
        lens, _ = train_lens(model, prompts(), "1.*", rank=rank, epochs=1, vocabulary=range(50))
        path = lens.save(tmp_path / "lenses" / "one.safetensors")
        again = AttentionLens.load(path, model)
        results, _ = ready(model, lens)
        assert torch.equal(again.logits(results), lens.logits(results))
        assert again.heads == lens.heads
        assert again.losses == lens.losses
        assert [file.name for file in path.parent.iterdir()] == ["one.safetensors"]


def test_files_that_do_not_fit_are_refused(tmp_path: Path):
    model = opened()
    path = untrained_lens(model, "1.*", rank=2).save(tmp_path / "lens.safetensors")
    other = hl.load(exact("llama", seed=1))
    with pytest.raises(OutputError, match="other weights"):
        AttentionLens.load(path, other)
    tensors: dict[str, Any] = load_file(path)
    save_file(tensors, tmp_path / "bare.safetensors")
    (tmp_path / "text.safetensors").write_text("no lens")
    for name in ("bare", "text", "missing"):
        with pytest.raises(OutputError, match="no readable lens"):
            AttentionLens.load(tmp_path / f"{name}.safetensors", model)
    lens = untrained_lens(model, "1.*", rank=2)
    lens.change["left"] = lens.change["left"][:, :5]
    with pytest.raises(OutputError, match="do not fit"):
        AttentionLens.load(lens.save(tmp_path / "cut.safetensors"), model)
    with pytest.raises(PlanError, match="the path first and then the model"):
        AttentionLens.load(model, path)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="not int and Model"):
        AttentionLens.load(3, model)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="not str and str"):
        AttentionLens.load(str(path), str(path))  # type: ignore[arg-type]


def test_the_tokens_a_head_puts_first():
    model = opened()
    lens, _ = train_lens(model, prompts(), "1.*", epochs=1)
    table = lens.top("L1H3", prompts()[0], k=4, position=5)
    result = model.trace(prompts()[0, :6], keep=hl.keep.tensors("result")).tensor("result", 1)[
        0, -1, 3
    ]
    logits = result @ (model.module.lm_head.weight.T + lens.change["dense"][3]) + lens.bias[3]
    assert table["token"].tolist() == logits.argsort(descending=True)[:4].tolist()
    assert table["logit"].tolist() == pytest.approx(
        logits.sort(descending=True).values[:4].tolist()
    )
    assert table["text"].tolist() == [f"w{token}" if token > 3 else table["text"][at]
                                      for at, token in enumerate(table["token"])]  # fmt: skip
    with pytest.raises(HeadError, match="one head of this lens"):
        lens.top("L0H1", prompts()[0])
    with pytest.raises(PromptError, match="one prompt"):
        lens.top("L1H1", prompts())


def test_bad_input_is_refused():
    model = opened()
    with pytest.raises(HeadError, match="one lens for each layer"):
        untrained_lens(model, "*.0")
    with pytest.raises(PlanError, match="rank=0"):
        untrained_lens(model, "0.*", rank=0)
    for tokens in ([3], [3, 3], [3, 97], ["a", 4]):
        with pytest.raises(PlanError, match="vocabulary="):
            untrained_lens(model, "0.*", vocabulary=tokens)
    with pytest.raises(UnsupportedError, match="decoder-only"):
        untrained_lens(hl.load(build("bert")), "0.*")
    with pytest.raises(PromptError, match="too few"):
        train_lens(model, prompts(4), "0.*")
    for wrong in ({"rate": 0.0}, {"held_out": 1.0}, {"batch": 0}, {"epochs": -1}):
        with pytest.raises(PlanError):
            train_lens(model, prompts(), "0.*", **wrong)  # type: ignore[arg-type]
