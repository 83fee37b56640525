"""A model handed to headlab comes back as it was, whatever happened in between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from oracle import assert_close
from test_capture import ids_of, ragged
from tiny_models import ENCODER_DECODER, FAMILIES, build, config, inputs
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import headlab as hl
from headlab.errors import HeadlabError, PlanError, UnsupportedError

Lab = Callable[..., Any]
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def picture(module: nn.Module) -> dict[str, Any]:
    """Everything about a model that headlab could leave changed."""
    parts = dict(module.named_modules())
    return {
        "classes": {name: type(part) for name, part in parts.items()},
        "modes": {name: part.training for name, part in parts.items()},
        "hooks": {name: [len(getattr(part, hooks)) for hooks in HOOKS] for name, part in parts.items()},
        "attributes": {name: sorted(vars(part)) for name, part in parts.items()},
        "forward": {name: getattr(part.forward, "__func__", part.forward) for name, part in parts.items()},
        "configurations": {
            name: (
                part.config._attn_implementation,
                part.config._attn_implementation_internal,
                part.config.to_json_string(),
            )
            for name, part in parts.items()
            if hasattr(part, "config")
        },
        "generation": str(getattr(module, "generation_config", None)),
        "gradients": {name: p.requires_grad for name, p in module.named_parameters()},
        "grads": {name: p.grad is None for name, p in module.named_parameters()},
    }  # fmt: skip


class Unchanged:
    """Takes a picture of a model and its outputs, and compares later."""

    def __init__(self, module: Any, family: str) -> None:
        self.module = module
        self.arguments = inputs(family)
        self.picture = picture(module)
        self.state = {name: value.clone() for name, value in module.state_dict().items()}
        self.output = self._run()

    def _run(self) -> Tensor:
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        with torch.no_grad():
            output = self.module(**self.arguments).logits
        for part, mode in modes:
            part.training = mode
        return output

    def check(self) -> None:
        now = picture(self.module)
        for name, before in self.picture.items():
            assert now[name] == before, name
        state = self.module.state_dict()
        assert list(state) == list(self.state)
        for name, value in state.items():
            assert torch.equal(value, self.state[name]), name
        assert torch.equal(self._run(), self.output)


class Mishap(Exception):
    """What goes wrong in a test."""


def fail(x: Tensor, where: Any) -> Tensor:
    raise Mishap("an operation failed")


PLAN = [
    hl.keep.rows(queries=[-1], layers=[0]),
    hl.keep.statistics("entropy", "received", layers=[0]),
    hl.keep.tensors("q", "k", "v", "z", "result", layers=[0]),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_capturing_and_editing_leave_a_model_as_it_was(family: str) -> None:
    module = FAMILIES[family]()
    before = Unchanged(module, family)
    model = hl.load(module)
    before.check()
    ids = before.arguments["input_ids"]
    decoder = before.arguments.get("decoder_input_ids")
    model.trace(ids, decoder=decoder, keep=PLAN)
    before.check()
    with model.edit(hl.ablate("0.0"), hl.scale("1.1", "result", by=0.5)):
        model.trace(ids, decoder=decoder, keep=PLAN)
    before.check()
    with model.edit(hl.scale("*.0", "k", by=0.5), hl.scale("*.1", "scores", by=0.5)):
        model.logits(ids, decoder=decoder)
    before.check()
    if family not in ("bert", "roberta"):
        with model.edit(hl.ablate("0.0", site="pattern")):
            model.generate(ids, max_new_tokens=3)
        before.check()
        model.generate(ids, max_new_tokens=3, keep=hl.keep.statistics("entropy", layers=[0]))
        before.check()


@pytest.mark.parametrize("site", ["q", "k", "v", "scores", "pattern", "z", "result"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_an_operation_that_fails_propagates_and_leaves_a_model_as_it_was(
    family: str, site: str
) -> None:
    module = build(family)
    before = Unchanged(module, family)
    model = hl.load(module)
    ids = before.arguments["input_ids"]
    decoder = before.arguments.get("decoder_input_ids")
    for keep in ((), PLAN):
        with pytest.raises(Mishap), model.edit(hl.apply("1.1", fail, site)):
            model.trace(ids, decoder=decoder, keep=keep)
        before.check()
    with model.edit(hl.scale("0.0", by=1.0)):
        with pytest.raises(Mishap), model.edit(hl.apply("1.1", fail, site)):
            model.logits(ids, decoder=decoder)
        assert torch.equal(model.logits(ids, decoder=decoder), before.output)
    before.check()


def test_an_error_inside_the_block_propagates_and_ends_every_edit() -> None:
    module = build("llama")
    before = Unchanged(module, "llama")
    model = hl.load(module)

    def stumble() -> None:
        with model.edit(hl.ablate("0.*")), model.edit(hl.ablate("1.*", site="result")):
            model.logits(ids_of(5))
            raise Mishap("not headlab's fault")

    with pytest.raises(Mishap):
        stumble()
    before.check()
    wrong_width = hl.add("0.0", torch.zeros(3))
    with model.edit(wrong_width), pytest.raises(PlanError, match="does not fit"):
        model.logits(ids_of(5))
    before.check()


def test_a_reference_that_cannot_be_run_puts_no_edit_in_force() -> None:
    module = build("llama")
    before = Unchanged(module, "llama")
    model = hl.load(module)
    edits = [hl.scale("0.0", by=0.1), hl.ablate("1.0", "mean", reference=[[5, 9999]])]
    with pytest.raises(HeadlabError), model.edit(*edits):
        pass
    before.check()


def test_a_projection_that_cannot_be_found_puts_no_edit_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unfamiliar architecture serves every site but result."""
    module = build("llama")
    before = Unchanged(module, "llama")
    model = hl.load(module)

    def unknown(layer: int) -> nn.Module:
        raise UnsupportedError("W_O is not where headlab looks for it")

    monkeypatch.setattr(model.weights, "output_projection", unknown)
    ids = ids_of(6)
    plain = model.logits(ids)
    with pytest.raises(UnsupportedError), model.edit(hl.scale("0.0", "result", by=0.1)):
        pass
    assert torch.equal(model.logits(ids), plain)
    with pytest.raises(UnsupportedError):
        model.trace(ids, keep=hl.keep.tensors("result"))
    model.trace(ids, keep=hl.keep.tensors("z"))
    with model.edit(hl.scale("0.0", by=1.0)):
        assert torch.equal(model.logits(ids), plain)
    before.check()


def test_edits_nest_and_end_one_by_one() -> None:
    model = hl.load(build("llama"))
    ids = ids_of(9)
    plain = model.logits(ids)
    with model.edit(hl.ablate("0.0")):
        one = model.logits(ids)
        with model.edit(hl.ablate("1.1", site="result")):
            two = model.logits(ids)
            with model.edit(hl.ablate("1.2", site="k")):
                three = model.logits(ids)
                kept = model.trace(ids, keep=hl.keep.rows()).logits
            assert torch.equal(model.logits(ids), two)
        assert torch.equal(model.logits(ids), one)
    assert torch.equal(model.logits(ids), plain)
    assert_close(kept, three, 2e-5)
    distinct = [plain, one, two, three]
    assert all(not torch.allclose(a, b) for i, a in enumerate(distinct) for b in distinct[i + 1 :])


def test_edits_reach_the_bare_module_while_the_block_lasts() -> None:
    module = build("llama")
    model = hl.load(module)
    ids = ids_of(9)
    with model.edit(hl.ablate("0.*")):
        inside = model.logits(ids)
        with torch.no_grad():
            assert torch.equal(module(input_ids=ids).logits, inside)
    with torch.no_grad():
        assert not torch.allclose(module(input_ids=ids).logits, inside)


def test_two_models_with_one_configuration_do_not_disturb_each_other() -> None:
    shared = config("llama")
    torch.manual_seed(0)
    first, second = (AutoModelForCausalLM.from_config(shared).eval() for _ in range(2))
    assert first.config is second.config or first.config == second.config
    second.config = first.config
    for part in second.modules():
        if hasattr(part, "config"):
            part.config = first.config
    ids = ids_of(9)
    with torch.no_grad():
        own = second(input_ids=ids).logits
    one, two = hl.load(first), hl.load(second)
    plain = one.logits(ids)
    with one.edit(hl.ablate("0.*")):
        edited = one.logits(ids)
        with torch.no_grad():
            assert torch.equal(second(input_ids=ids).logits, own)
        assert torch.equal(two.logits(ids), own)
        assert_close(two.trace(ids, keep=hl.keep.rows()).logits, own, 2e-5)
        with two.edit(hl.ablate("1.*")):
            assert not torch.allclose(two.logits(ids), own)
            assert torch.equal(one.logits(ids), edited)
        assert torch.equal(one.logits(ids), edited)
        assert torch.equal(two.logits(ids), own)
    assert torch.equal(one.logits(ids), plain)
    assert first.config._attn_implementation == "sdpa"


def test_loading_a_model_twice_keeps_the_first_ones_edits_in_force() -> None:
    module = build("llama")
    first, second = hl.load(module), hl.load(module)
    ids = ids_of(9)
    plain = first.logits(ids)
    with first.edit(hl.ablate("0.*")):
        edited = first.logits(ids)
        second.trace(ids, keep=hl.keep.rows())
        assert torch.equal(first.logits(ids), edited)
        hl.load(module)
        assert torch.equal(first.logits(ids), edited)
    assert torch.equal(first.logits(ids), plain)
    assert torch.equal(second.logits(ids), plain)


def test_a_model_loaded_while_it_is_edited_is_measured_all_the_same() -> None:
    module = build("gemma2")
    first = hl.load(module)
    with first.edit(hl.ablate("0.*")):
        assert hl.load(module).spec == first.spec


def test_exceptions_while_measuring_leave_the_model_as_it_was() -> None:
    module = build("llama")
    before = Unchanged(module, "llama")

    def break_down(*_: Any) -> None:
        raise Mishap("a hook of the user's own")

    handle = module.model.layers[1].register_forward_pre_hook(break_down)
    with pytest.raises((Mishap, HeadlabError)):
        hl.load(module)
    handle.remove()
    before.check()


# -- modes -----------------------------------------------------------------------------------------


def test_parts_keep_their_own_modes() -> None:
    """A model partly in training mode, as when only some layers are tuned, comes back like that."""
    module = build("llama")
    module.model.layers[1].train()
    before = Unchanged(module, "llama")
    model = hl.load(module)
    before.check()
    model.trace(ids_of(5), keep=PLAN)
    before.check()
    with model.edit(hl.ablate("0.0")):
        model.generate(ids_of(5), max_new_tokens=2)
    before.check()


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
def test_a_model_in_training_mode_is_run_without_dropout_and_stays_in_it(family: str) -> None:
    module = build(family).train()
    before = Unchanged(module, family)
    model = hl.load(module)
    before.check()
    ids = before.arguments["input_ids"]
    for _ in range(2):
        assert_close(model.logits(ids), before.output, 1e-6)
        assert_close(model.trace(ids, keep=PLAN).logits, before.output, 2e-5)
    with model.edit(hl.scale("0.0", by=1.0)):
        assert_close(model.logits(ids), before.output, 1e-6)
    before.check()


def test_a_forward_pass_with_dropout_under_an_edit_is_refused_in_one_sentence() -> None:
    module = build("gpt2").train()
    model = hl.load(module)
    with model.edit(hl.ablate("0.0")), pytest.raises(UnsupportedError) as caught:
        module(input_ids=ids_of(5))
    assert "\n" not in str(caught.value)
    assert "eval()" in str(caught.value)


def test_training_through_an_edit_without_dropout_works() -> None:
    module = build("llama")
    model = hl.load(module)
    with model.edit(hl.scale("0.0", by=0.5)):
        module(input_ids=ids_of(5)).logits.sum().backward()
    gradient = module.model.layers[0].self_attn.q_proj.weight.grad
    assert gradient is not None
    assert bool(gradient.isfinite().all())


# -- memory ----------------------------------------------------------------------------------------


def tensors_alive() -> int:
    gc.collect()
    return sum(isinstance(x, Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_repeated_captures_keep_no_memory(lab: Lab, family: str) -> None:
    model, ids = lab(family), ids_of(64)
    plan = [
        hl.keep.rows(),
        hl.keep.statistics("entropy", "received"),
        hl.keep.tensors("z", "result"),
    ]

    def once() -> None:
        with model.edit(hl.scale("0.0", by=0.5), hl.scale("1.1", "result", by=0.5)):
            model.trace(ids, keep=plan)

    for _ in range(20):
        once()
    alive, resident = tensors_alive(), psutil.Process().memory_info().rss
    for _ in range(200):
        once()
    assert tensors_alive() <= alive + 2
    # One trace of this plan holds about 1 MB, so 200 that were kept would show.
    assert psutil.Process().memory_info().rss - resident < 40 << 20


def test_a_model_that_is_let_go_is_freed() -> None:
    module = build("llama")
    model = hl.load(module)
    with model.edit(hl.ablate("0.0", "mean", reference=ids_of(4))):
        model.trace(ids_of(5), keep=PLAN)
    gone = weakref.ref(module.model.layers[0].self_attn)
    del module, model
    gc.collect()
    assert gone() is None


# -- ways of calling -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_bare_forward_pass_with_a_cache_is_edited_like_a_whole_one(family: str) -> None:
    """The user's own loop over the module, under an edit: positions go on where the cache ends."""
    module = build(family)
    model = hl.load(module)
    ids = ids_of(12)
    edits = [hl.scale("0.0", by=0.3, positions=[3, 8, 11]), hl.scale("1.1", "k", by=0.5)]
    with model.edit(*edits), torch.no_grad():
        whole = model.logits(ids)
        first = module(input_ids=ids[:, :7], use_cache=True)
        second = module(
            input_ids=ids[:, 7:11], past_key_values=first.past_key_values, use_cache=True
        )
        third = module(input_ids=ids[:, 11:], past_key_values=second.past_key_values)
    parts = torch.cat([first.logits, second.logits, third.logits], 1)
    assert_close(parts, whole, 5e-5)


def test_an_edit_made_for_positions_does_nothing_to_padding(lab: Lab) -> None:
    model, ids = lab("llama"), ragged((9, 5))
    with model.edit(hl.ablate("0.*", positions=[6])):
        got = model.logits(ids)
    assert torch.equal(got[1, :5], model.logits(ids)[1, :5])


@pytest.mark.parametrize("family", ENCODER_DECODER)
def test_decoders_that_do_not_match_their_prompts_are_refused(lab: Lab, family: str) -> None:
    with pytest.raises(HeadlabError):
        lab(family).trace(ids_of(5, batch=2), decoder=ids_of(4, batch=3))


def test_a_decoder_given_to_a_model_without_one_is_refused(lab: Lab) -> None:
    with pytest.raises(HeadlabError):
        lab("llama").trace(ids_of(5), decoder=ids_of(4))


def test_edits_that_are_no_edits_are_refused(lab: Lab) -> None:
    with pytest.raises(PlanError), lab("llama").edit("0.0"):
        pass


def test_headlab_is_imported_without_torch() -> None:
    import subprocess
    import sys

    script = "import sys, headlab; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
