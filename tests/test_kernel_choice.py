"""Which engine runs, what rows see as intervals, and gradients that no engine has to know of."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_close
from test_kernels import CALLS, ask, coin, draw, normal
from torch import Tensor

from headlab.errors import PlanError, UnsupportedError
from headlab.kernels import ENGINES, LINEAR, AttentionInputs, Request, attend, blockwise
from headlab.kernels.choice import choose
from headlab.kernels.visibility import visibility

# -- the choice ------------------------------------------------------------------------------------


def test_the_environment_forces_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(causal=True)
    for name in ("blockwise", "dense", " Dense "):
        monkeypatch.setenv("HEADLAB_KERNEL", name)
        assert choose(inputs, Request()).name == name.strip().lower()
    monkeypatch.setenv("HEADLAB_KERNEL", "fast")
    with pytest.raises(PlanError, match="'fast' names no engine; it can be auto, triton, cpp"):
        attend(inputs, Request())


def test_a_forced_engine_never_gives_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    edited = Request(edit_pattern=lambda rows, index: rows)
    for name in ("triton", "cpp"):
        monkeypatch.setenv("HEADLAB_KERNEL", name)
        with pytest.raises(UnsupportedError, match=f"{name} cannot serve this attention call"):
            attend(draw(causal=True), edited)
    monkeypatch.setenv("HEADLAB_KERNEL", "auto")
    assert choose(draw(causal=True), edited).name == "blockwise"


def test_without_force_float64_falls_back_to_blocks() -> None:
    inputs = draw(causal=True, dtype=torch.float64)
    assert choose(inputs, Request()).name == "blockwise"


def test_an_engine_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, headlab.kernels as k; assert 'headlab.kernels.fused' not in sys.modules; "
        "assert 'headlab.kernels.native' not in sys.modules; assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- intervals -------------------------------------------------------------------------------------


def seen_by(inputs: AttentionInputs) -> tuple[np.ndarray, bool]:
    """What rows see by their intervals, and whether intervals say it all."""
    found = visibility(inputs)
    batch, heads = inputs.q.shape[:2]
    columns = torch.arange(inputs.n_keys)
    seen = (columns >= found.low[..., None]) & (columns < found.high[..., None])
    seen = seen[:, None].expand(batch, heads, inputs.n_queries, -1)
    for hides in (found.mask, None if found.bias is None else found.bias > -torch.inf):
        seen = seen if hides is None else seen & hides
    return seen.numpy(), found.mask is None and found.bias is None


@pytest.mark.parametrize("call", CALLS)
def test_intervals_masks_and_biases_hide_what_the_formula_hides(call: str) -> None:
    inputs = CALLS[call]()
    np.testing.assert_array_equal(seen_by(inputs)[0], oracle.visible(inputs))


def packed(*lengths: int) -> Tensor:
    """Documents side by side, each causal in itself, [1, 1, n, n]."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    same = document[:, None] == document[None]
    return (same & torch.ones_like(same).tril())[None, None]


STRUCTURED: dict[str, Callable[[], AttentionInputs]] = {
    "packed": lambda: draw(mask=packed(4, 1, 8)),
    "packed-additive": lambda: draw(
        mask=torch.where(packed(6, 7), 0.0, torch.finfo(torch.float32).min)
    ),
    "padded": CALLS["left-padding"],
    "right-padded": CALLS["right-padding"],
    "all-blind": CALLS["all-blind"],
    "chunk": lambda: draw(queries=4, keys=13, mask=packed(13)[:, :, 9:]),
    "window-mask": lambda: draw(mask=packed(13) & ~packed(13).tril(-4)),
}


@pytest.mark.parametrize("call", STRUCTURED)
def test_real_masks_are_read_as_intervals(call: str) -> None:
    inputs = STRUCTURED[call]()
    seen, exact = seen_by(inputs)
    np.testing.assert_array_equal(seen, oracle.visible(inputs))
    assert exact


def test_a_mask_that_was_changed_is_read_again() -> None:
    mask = packed(13).clone()
    inputs = draw(mask=mask)
    before = seen_by(inputs)[0]
    mask[..., 5:, 2] = False
    after, exact = seen_by(inputs)
    assert not exact
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(after, oracle.visible(inputs))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_mask_is_read_right(data: Any) -> None:
    queries, keys = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    fields: dict[str, Any] = {"causal": data.draw(st.booleans())}
    fields["window"] = data.draw(st.sampled_from([None, 1, 3]))
    fields["query_start"] = data.draw(st.integers(0, 12))
    fields["key_start"] = data.draw(st.integers(0, 4))
    seed, p = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0.1, 0.5, 0.95]))
    fields["mask"] = data.draw(
        st.sampled_from(
            [None, coin(2, 1, queries, keys, p=p, seed=seed), coin(1, 6, queries, keys)]
        )
    )
    inputs = draw(queries=queries, keys=keys, **fields)
    np.testing.assert_array_equal(seen_by(inputs)[0], oracle.visible(inputs))


# -- weights times their gradients -----------------------------------------------------------------


@pytest.mark.parametrize("engine", ["dense", "blockwise"])
@pytest.mark.parametrize("call", ["grouped-causal", "everything", "blind-rows", "wide-values"])
def test_linear_statistics_of_weights_times_gradients(engine: str, call: str) -> None:
    inputs = CALLS[call]()
    shape = (*inputs.q.shape[:3], inputs.v.shape[3])
    for heads in (None, (5, 0, 2)):
        request = ask(
            inputs, tuple(sorted(LINEAR)), heads=heads, z=False, z_gradient=normal(*shape)
        )
        found = ENGINES[engine](inputs, request).statistics
        for name, value in oracle.statistics(inputs, request).items():
            assert_close(found[name], value, 1e-5 * max(1, np.abs(value).max()), what=name)


def test_what_is_no_sum_of_weights_has_no_gradient_weighted_form() -> None:
    for fields in ({"z": True}, {"z": False, "statistics": ("entropy",)}):
        with pytest.raises(PlanError, match="cannot be weighted by gradients"):
            Request(z_gradient=normal(1, 1, 2, 3), **fields)


# -- gradients -------------------------------------------------------------------------------------


def leaves_of(inputs: AttentionInputs, request: Request) -> dict[str, Tensor]:
    found = {name: getattr(inputs, name) for name in ("q", "k", "v", "sinks", "position_bias")}
    found["features"] = request.features
    return {n: x.double().requires_grad_() for n, x in found.items() if x is not None}


def slopes(
    run: Callable[[AttentionInputs, Request], Any], call: str, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Gradients of a random sum of everything a run returns."""
    inputs = CALLS[call]()
    request = ask(inputs, names, heads=(1, 0) if inputs.q.shape[1] > 1 else None)
    leaves = leaves_of(inputs, request)
    features = leaves["features"]
    result = run(
        replace(inputs, **{n: x for n, x in leaves.items() if n != "features"}),
        replace(request, features=features),
    )
    loss = torch.zeros((), dtype=torch.float64)
    for at, (name, value) in enumerate({"z": result.z, **result.statistics}.items()):
        if name not in ("argmax", "topk_index"):
            finite = torch.where(value.isfinite(), value, 0.0)
            loss = loss + (finite * normal(*value.shape, seed=at).double()).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {n: x for n, x in zip(leaves, found, strict=True) if x is not None}


#: Of a row without keys the mean distance is NaN, and so is autograd's gradient through it.
EVERY = tuple(name for name in (*sorted(LINEAR), "lse", "entropy", "max", "topk", "segment_z"))


@pytest.mark.parametrize("call", [name for name in CALLS if not name.startswith("additive")])
def test_recomputed_gradients_equal_those_of_whole_patterns(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", 1500)  # several blocks, of a few rows each
    names = EVERY if "blind" in call or call == "everything" else (*EVERY, "mean_distance")
    got, expected = slopes(attend, call, names), slopes(ENGINES["dense"], call, names)
    assert set(got) >= {"q", "k", "v", "features"}
    for name, value in expected.items():
        assert_close(got[name], value, 1e-9 * max(1, float(value.abs().max())), what=name)


def test_gradients_keep_nothing_as_large_as_a_pattern() -> None:
    inputs = draw(2, 1, 300, batch=1, causal=True)
    leaves = {name: getattr(inputs, name).requires_grad_() for name in "qkv"}
    saved: list[int] = []

    def note(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        result = attend(replace(inputs, **leaves), Request(statistics=("lse", "entropy")))
    assert saved
    assert max(saved) < 300 * 300
    result.statistics["entropy"].sum().backward()
    assert all(bool(x.grad.abs().sum() > 0) for n, x in leaves.items() if n != "v")


def test_half_precision_gradients_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", 1)  # as many sums as there are rows
    inputs = draw(2, 1, 400, batch=1, causal=True, dtype=torch.bfloat16)
    exact = replace(inputs, **{name: getattr(inputs, name).double() for name in "qkv"})
    found = []
    for call in (inputs, exact):
        leaves = [getattr(call, name).detach().requires_grad_() for name in "qkv"]
        result = attend(replace(call, **dict(zip("qkv", leaves, strict=True))), Request())
        found.append(torch.autograd.grad(result.z.float().sum(), leaves))
    for half, full in zip(*found, strict=True):
        assert half.dtype == torch.bfloat16
        assert_close(half, full, atol=2**-7 * float(full.abs().max()))


def test_changing_a_mask_or_targets_before_the_backward_pass_is_noticed() -> None:
    for name in ("mask", "targets"):
        inputs = draw(mask=coin(2, 1, 13, 13))
        request = ask(inputs, ("target_mass",))
        q = inputs.q.clone().requires_grad_()
        result = attend(replace(inputs, q=q), request)
        changed = inputs.mask if name == "mask" else request.targets
        assert changed is not None
        changed.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.statistics["target_mass"].sum().backward()


def test_autocast_changes_nothing() -> None:
    inputs = draw(2, 1, 60, batch=1, causal=True)
    found = []
    for enabled in (False, True):
        q = inputs.q.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            result = attend(replace(inputs, q=q), Request(statistics=("entropy",)))
            total = result.z.float().sum() + result.statistics["entropy"].sum()
            found.append((result.statistics["entropy"].detach(), *torch.autograd.grad(total, q)))
    for plain, cast in zip(*found, strict=True):
        assert_close(cast, plain, 1e-6)


def test_masks_made_in_inference_mode_are_read() -> None:
    with torch.inference_mode():
        inputs = draw(mask=packed(5, 8).clone())
        np.testing.assert_array_equal(seen_by(inputs)[0], oracle.visible(inputs))


def test_rows_have_gradients_too() -> None:
    inputs = draw(causal=True, dtype=torch.float64)
    index = torch.tensor([[12, 3], [5, 0]])

    def rows(q: Tensor) -> Tensor:
        found = attend(replace(inputs, q=q), Request(z=False, rows=index)).rows
        assert found is not None
        return found

    assert torch.autograd.gradcheck(rows, (inputs.q[:, :, :].requires_grad_(),))
