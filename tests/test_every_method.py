"""What holds for every method of steering: a cache and a batch change nothing, and nothing is left afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from steering_methods import HEADS, MADE
from test_capture import ids_of, ragged

import headlab as hl
from headlab.errors import HeadlabError
from headlab.steering import Learned, Method

Lab = Callable[..., Any]
FAMILIES = ["llama", "gpt2"]
LENGTHS = (9, 6, 7)
every_method = pytest.mark.parametrize("name", sorted(MADE))
every_family = pytest.mark.parametrize("family", FAMILIES)


def test_no_method_is_left_out() -> None:
    assert set(MADE) == {name for name in Method.all if not name.startswith("test_")}


@every_family
@every_method
def test_generation_with_a_cache_equals_whole_passes_token_for_token(
    lab: Lab, name: str, family: str
) -> None:
    model, ids = lab(family), ids_of(9, batch=1)
    method = MADE[name](model)
    plain = model.generate(ids, max_new_tokens=6, eos_token_id=None).ids
    with hl.steer(model, method):
        new = model.generate(ids, max_new_tokens=6, eos_token_id=None).ids
        tokens = ids
        for _ in range(6):
            # The prompt ends where it did, whatever has been generated since.
            output = whole_pass(model, tokens, ids.shape[1])
            tokens = torch.cat([tokens, output[:, -1:].argmax(-1)], 1)
    assert new.tolist() == tokens[:, ids.shape[1] :].tolist()
    assert new.tolist() != plain.tolist(), "the method changed nothing"


def whole_pass(model: hl.Model, tokens: torch.Tensor, n_prompt: int) -> torch.Tensor:
    """Logits of one pass without a cache in which only the first tokens are the prompt."""
    logits: torch.Tensor = model.forward(tokens, prompt=n_prompt, use_cache=False).logits
    return logits


@every_family
@every_method
def test_a_batch_equals_single_runs(lab: Lab, name: str, family: str) -> None:
    model, ids = lab(family), ragged(LENGTHS)
    method = MADE[name](model)
    with hl.steer(model, method):
        together = model.generate(ids, max_new_tokens=5, eos_token_id=None).ids
        logits = model.logits(ids)
        for row, n in enumerate(LENGTHS):
            alone = ids[row : row + 1, :n]
            expected = model.generate(alone, max_new_tokens=5, eos_token_id=None).ids
            assert together[row].tolist() == expected[0].tolist()
            torch.testing.assert_close(logits[row, :n], model.logits(alone)[0], atol=5e-5, rtol=0)


@every_method
def test_the_model_is_bit_equal_afterwards(lab: Lab, name: str) -> None:
    model, ids = lab("llama"), ids_of(9)
    before = model.logits(ids)
    hooks = [
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in model.module.modules()
    ]
    with hl.steer(model, MADE[name](model)):
        assert not torch.equal(model.logits(ids), before)
    with pytest.raises(IndexError), hl.steer(model, MADE[name](model)):
        model.logits(ids)[5, 5, 5]
    assert torch.equal(model.logits(ids), before)
    after = [
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in model.module.modules()
    ]
    assert after == hooks
    assert not model.edited


@every_method
def test_capture_under_steering_keeps_the_steered_run_once(lab: Lab, name: str) -> None:
    model, ids = lab("llama"), ids_of(9)
    keep = [hl.keep.tensors("z"), hl.keep.statistics("entropy")]
    with hl.steer(model, MADE[name](model)):
        trace = model.trace(ids, keep=keep)
        logits = model.logits(ids)
    torch.testing.assert_close(trace.logits, logits, atol=5e-5, rtol=0)
    assert trace.tensor("z", 0).shape[:2] == ids.shape
    assert trace.statistic("entropy").shape[-1] == ids.shape[1]


@every_method
def test_gradients_pass_through(lab: Lab, name: str) -> None:
    model, ids = lab("llama"), ids_of(9, batch=1)
    with hl.steer(model, MADE[name](model)):
        logits = model.logits(ids, grad=True)
        plain = model.logits(ids)
    torch.testing.assert_close(logits.detach(), plain, atol=5e-5, rtol=0)
    (slope,) = torch.autograd.grad(logits[0, -1, 7], model.module.get_input_embeddings().weight)
    assert bool(slope.isfinite().all())
    assert float(slope.abs().max()) > 0


@every_method
def test_two_methods_compose(lab: Lab, name: str) -> None:
    model, ids = lab("llama"), ids_of(9)
    other = hl.steering.Pasta([(1, 3)], "1.*", alpha=0.2)
    with hl.steer(model, MADE[name](model)):
        one = model.logits(ids)
        with hl.steer(model, other):
            nested = model.logits(ids)
        assert torch.equal(model.logits(ids), one)
    with hl.steer(model, MADE[name](model), other):
        torch.testing.assert_close(model.logits(ids), nested, atol=1e-6, rtol=0)
    assert float((nested - one).abs().max()) > 1e-4


@every_method
def test_what_does_not_fit_the_model_is_refused_before_it_runs(lab: Lab, name: str) -> None:
    model = lab("llama")
    method = MADE[name](model)
    if isinstance(method, Learned):
        wrong: Any = method._with(shape=(9, 9, 9, 9))
    elif hasattr(method, "enhance"):
        wrong = method._with(enhance="9.9")
    else:
        wrong = method.on("9.9")
    with pytest.raises(HeadlabError) as raised, hl.steer(model, wrong):
        pass
    assert "\n" not in str(raised.value)
    assert not model.edited
    assert HEADS
