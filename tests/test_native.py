"""The C++ engine against plain float64 formulas (oracle.py), and how it is built."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_close
from test_kernels import CALLS, HEADS, NAMES, ask, blind, check, coin, draw, normal
from torch import Tensor

from headlab.errors import UnsupportedError
from headlab.kernels import LINEAR, AttentionInputs, Request, native
from headlab.kernels.native import build

MISSING = build.unavailable()
needs_compiler = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def equal(a: Any, b: Any) -> None:
    """Bit for bit, NaN included."""
    torch.testing.assert_close(a.z, b.z, rtol=0, atol=0, equal_nan=True)
    for name, value in a.statistics.items():
        torch.testing.assert_close(value, b.statistics[name], rtol=0, atol=0, equal_nan=True)


# -- results ---------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("call", CALLS)
def test_every_statistic_of_every_call_equals_the_plain_formula(call: str) -> None:
    inputs = CALLS[call]()
    for heads in HEADS.values():
        request = ask(inputs, heads=heads(inputs.q.shape[1]))
        check(native.attend(inputs, request), inputs, request)


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_each_statistic_comes_alone_with_and_without_z(name: str) -> None:
    inputs = CALLS["everything"]()
    for z in (True, False):
        request = ask(inputs, (name,), z=z, heads=(5, 0, 2))
        check(native.attend(inputs, request), inputs, request)


@st.composite
def odd_calls(draw_: Any) -> AttentionInputs:
    """Shapes that are no multiple of any register, panel, tile, unit or block."""
    group, kv = draw_(st.integers(1, 3)), draw_(st.integers(1, 2))
    keys = draw_(st.integers(1, 400))
    queries = draw_(st.integers(1, 200))
    n = group * kv
    causal = draw_(st.booleans())
    fields: dict[str, Any] = {"causal": causal, "window": draw_(st.none() | st.integers(1, 300))}
    if draw_(st.booleans()):
        fields["mask"] = coin(1, draw_(st.sampled_from((1, n))), queries, keys, p=0.8)
    if draw_(st.booleans()):
        fields |= {"sinks": normal(n), "softcap": 2.0}
    if causal:
        fields["query_start"] = draw_(st.integers(0, 300))
    width, d_value = draw_(st.integers(1, 70)), draw_(st.integers(1, 70))
    shape = {"queries": queries, "keys": keys, "batch": 1, "d": width, "d_value": d_value}
    return draw(n, kv, seed=draw_(st.integers(0, 99)), sharp=2.0, **shape, **fields)


@needs_compiler
@settings(max_examples=25)
@given(odd_calls(), st.integers(1, 150), st.integers(1, 40))
def test_any_shape_equals_the_plain_formula(inputs: AttentionInputs, block: int, k: int) -> None:
    request = ask(inputs, block=block, k=k, lag_edges=(-90, 0, 1, 3, 64, 500))
    check(native.attend(inputs, request), inputs, request, atol=3e-5, ties=True)


@needs_compiler
def test_many_largest_come_in_order() -> None:
    inputs = draw(1, 1, 3, 900, batch=1, d=8, sharp=3.0)
    for k in (1, 65, 300, 1000):
        request = ask(inputs, ("topk", "topk_index", "argmax"), k=k)
        check(native.attend(inputs, request), inputs, request, ties=True)


@needs_compiler
def test_of_equal_weights_the_first_key_comes_first() -> None:
    flat = draw(2, 1, 300, batch=1, causal=True)
    flat = replace(flat, k=torch.zeros_like(flat.k))
    result = native.attend(flat, ask(flat, ("argmax", "topk_index", "entropy"), k=3))
    assert bool((result.statistics["argmax"] == 0).all())
    first = torch.where(torch.arange(3) <= torch.arange(300)[:, None], torch.arange(3), -1)
    assert bool((result.statistics["topk_index"] == first).all())
    assert_close(result.statistics["entropy"][0, 0], np.log(np.arange(1, 301)))

    # Two values, dealt so that later keys are larger: ties within and across the classes of a row.
    k = torch.zeros(1, 1, 300, 5)
    k[..., 150::7, 0] = 1.0
    stepped = replace(flat, q=torch.ones_like(flat.q), k=k, causal=False)
    index = native.attend(stepped, ask(stepped, ("topk_index",), k=30)).statistics["topk_index"]
    best = list(range(150, 300, 7))
    assert index[0, 1, 7].tolist() == best + list(range(30 - len(best)))


@needs_compiler
@pytest.mark.parametrize("size", [1e4, 1e18])
def test_huge_scores_leave_one_key(size: float) -> None:
    inputs = draw(2, 1, 40, batch=1, causal=True, scaling=1.0)
    inputs = replace(inputs, q=inputs.q * size)
    result = native.attend(inputs, ask(inputs, ("max", "argmax", "entropy", "lse"), k=2))
    s = oracle.scores(replace(inputs, q=inputs.q.double()))
    assert_close(result.statistics["argmax"], s.argmax(-1))
    assert_close(result.statistics["max"], np.ones(s.shape[:3]))
    assert_close(result.statistics["entropy"], np.zeros(s.shape[:3]))
    assert_close(result.statistics["lse"], s.max(-1), atol=0, rtol=1e-5)


@needs_compiler
def test_a_sink_far_above_every_score_takes_all_mass() -> None:
    inputs = draw(causal=True, sinks=torch.full((6,), 500.0))
    request = ask(inputs)
    result = native.attend(inputs, request)
    assert_close(result.z, torch.zeros(2, 6, 13, 4))
    for name in ("entropy", "max", "received", "feature"):
        assert_close(result.statistics[name], torch.zeros_like(result.statistics[name]), what=name)
    assert_close(result.statistics["lse"], torch.full((2, 6, 13), 500.0))
    assert bool((result.statistics["argmax"] == -1).all())
    without = native.attend(replace(inputs, sinks=None), request).statistics["mean_distance"]
    assert_close(result.statistics["mean_distance"], without)


@needs_compiler
def test_infinite_bias_hides_and_what_is_not_a_number_shows() -> None:
    bias = normal(1, 1, 13, 13).masked_fill(~blind(coin(1, 1, 13, 13), 4), -torch.inf)
    inputs = draw(batch=1, mask=bias)
    request = ask(inputs)
    check(native.attend(inputs, request), inputs, request)
    for head in range(6):
        q = inputs.q.clone()
        q[0, head, 6, 0] = torch.nan
        spoiled = native.attend(replace(inputs, q=q), request)
        wrong = torch.zeros(1, 6, 13, dtype=torch.bool)
        wrong[0, head, 6] = True
        assert torch.equal(spoiled.z.isnan().any(-1), wrong)
        assert torch.equal(spoiled.statistics["entropy"].isnan(), wrong)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inputs_of_16_bits_are_computed_in_float32(dtype: torch.dtype) -> None:
    inputs = draw(causal=True, window=9, dtype=dtype)
    request = ask(inputs)
    check(native.attend(inputs, request), inputs, request, z_tolerance=(1e-6, 2**-8))


@needs_compiler
@pytest.mark.parametrize("call", ["grouped-causal", "everything", "blind-rows", "long-odd"])
def test_weights_times_their_gradients(call: str) -> None:
    inputs = CALLS[call]()
    n = (inputs.q.shape[0], inputs.q.shape[1], inputs.n_queries, inputs.v.shape[3])
    gradient = normal(*n, seed=3)
    for heads in (None, (1, 0)):
        request = ask(inputs, tuple(sorted(LINEAR)), heads=heads, z=False, z_gradient=gradient)
        check(native.attend(inputs, request), inputs, request)


@needs_compiler
def test_views_of_any_stride_are_read_as_they_are() -> None:
    inputs = CALLS["everything"]()
    plain = native.attend(inputs, ask(inputs))

    def turned(x: Tensor, at: int) -> Tensor:  # the same values in another order of memory
        return x.movedim(at, 0).contiguous().movedim(0, at)

    for at in (1, 2, 3):
        names = ("q", "k", "v", "mask", "position_bias")
        moved = replace(inputs, **{name: turned(getattr(inputs, name), at) for name in names})
        equal(native.attend(moved, ask(inputs)), plain)


@needs_compiler
def test_results_do_not_depend_on_the_number_of_threads(two_threads: None) -> None:
    inputs = draw(4, 2, 300, batch=2, d=24, causal=True)
    request = ask(inputs, block=32)
    both = native.attend(inputs, request)
    equal(native.attend(inputs, request), both)
    torch.set_num_threads(1)
    equal(native.attend(inputs, request), both)


@needs_compiler
def test_rows_and_a_head_named_twice() -> None:
    inputs = CALLS["grouped-causal"]()
    index = torch.tensor([[12, 0], [3, 11]])
    result = native.attend(inputs, Request(statistics=("lse",), rows=index, heads=(4, 1, 4)))
    assert_close(result.rows[0], oracle.pattern(inputs)[0][[4, 1, 4]][:, [12, 0]])
    assert torch.equal(result.statistics["lse"][:, 0], result.statistics["lse"][:, 2])


# -- what it cannot do -----------------------------------------------------------------------------


def test_calls_beyond_it_are_named_and_refused() -> None:
    inputs = draw(causal=True)
    double = draw(causal=True, dtype=torch.float64)
    edited = Request(edit_pattern=lambda rows, index: rows)
    assert native.why_not(double, Request()) == "float64 inputs"
    assert "edits" in str(native.why_not(inputs, edited))
    with pytest.raises(UnsupportedError, match="float64 inputs"):
        native.attend(double, Request())
    assert native.why_not(inputs, Request()) == MISSING


@needs_compiler
def test_gradients_are_never_dropped_in_silence() -> None:
    inputs = draw(causal=True)
    inputs = replace(inputs, k=inputs.k.requires_grad_())
    with pytest.raises(UnsupportedError, match="gradients"):
        native.attend(inputs, Request())
    with torch.no_grad():
        native.attend(inputs, Request())


# -- building --------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("HEADLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def fake(path: Path, script: str) -> str:
    path.write_text("#!/bin/sh\n" + script, "utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_a_compiler_the_reason_says_so(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(elsewhere))
    inputs = draw()
    assert "no C++ compiler" in str(native.why_not(inputs, Request()))
    with pytest.raises(UnsupportedError, match=r"no C\+\+ compiler"):
        native.attend(inputs, Request())
    monkeypatch.setenv("CXX", "headlab-has-no-such-compiler")
    assert "headlab-has-no-such-compiler" in str(native.why_not(inputs, Request()))


def test_a_failed_build_gives_the_compilers_first_error(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = 'echo "In file included"; echo "attention.cpp:1: error: no such luck" >&2; exit 1\n'
    script = 'for word in "$@"; do [ "$word" = -dM ] && exit 0; done\n' + says
    monkeypatch.setenv("CXX", fake(elsewhere / "broken", script))
    assert str(native.why_not(draw(), Request())).endswith("error: no such luck")
    assert list((elsewhere / "cache" / "kernels").iterdir()) == []


def test_a_result_that_is_no_library_is_a_reason(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", fake(elsewhere / "empty", "exit 0\n"))
    assert "could not be built or loaded" in str(native.why_not(draw(), Request()))


def test_a_cache_that_cannot_be_written_is_a_reason(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "cache").write_text("a file where the folder should be", "utf-8")
    monkeypatch.setenv("CXX", fake(elsewhere / "idle", "exit 0\n"))
    assert "could not be built or loaded" in str(native.why_not(draw(), Request()))


def test_an_unknown_flag_for_the_instruction_set_is_done_without(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compilers for ARM that do not know -march=native."""
    log = elsewhere / "log"
    script = (
        f'echo "$@" >> {log}\nfor w in "$@"; do [ "$w" = -march=native ] && exit 1; done\nexit 0\n'
    )
    monkeypatch.setenv("CXX", fake(elsewhere / "arm", script))
    native.why_not(draw(), Request())
    assert "-mcpu=native" in log.read_text("utf-8").splitlines()[-1]


def test_the_name_tells_sources_compilers_and_machines_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "attention.cpp").write_text("one", "utf-8")
    monkeypatch.setattr(build, "_SOURCE", tmp_path)
    base = (("g++",), ("-march=native",), "#define __AVX2__ 1")
    names = {build.compiled_name(*base)}
    names.add(build.compiled_name(("clang++",), *base[1:]))
    names.add(build.compiled_name(base[0], (), base[2]))
    names.add(build.compiled_name(*base[:2], "#define __AVX512F__ 1"))
    assert build.compiled_name(*base) in names
    (tmp_path / "attention.cpp").write_text("two", "utf-8")
    names.add(build.compiled_name(*base))
    assert len(names) == 5


@needs_compiler
def test_the_library_is_built_once_and_found_again(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = " ".join(build.compiler())
    log = elsewhere / "log"
    script = f'echo "$@" >> {log}\nexec {real} "$@"\n'
    monkeypatch.setenv("CXX", fake(elsewhere / "counting", script))
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-O0"))  # the last level counts
    inputs = CALLS["everything"]()
    request = ask(inputs)
    check(native.attend(inputs, request), inputs, request)
    build._load.cache_clear()  # as a new process would
    check(native.attend(inputs, request), inputs, request)
    builds = [line for line in log.read_text("utf-8").splitlines() if "attention.cpp" in line]
    assert len(builds) == 1
    library, digest = sorted((elsewhere / "cache" / "kernels").iterdir(), reverse=True)
    assert (library.suffix, digest.suffix) == (".so", ".sha256")
    assert os.path.getsize(library) > 0
    damaged = library.with_name(
        "damaged"
    )  # a loaded file must not be cut: write another in its place
    damaged.write_bytes(library.read_bytes()[:3000])
    damaged.replace(library)
    build._load.cache_clear()
    check(native.attend(inputs, request), inputs, request)
    builds = [line for line in log.read_text("utf-8").splitlines() if "attention.cpp" in line]
    assert len(builds) == 2, "a damaged file is built again, never loaded"


def test_an_open_quotation_in_cxx_is_a_reason(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", '"')
    assert "could not be built or loaded" in str(native.why_not(draw(), Request()))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_torchs_defaults_change_nothing(dtype: torch.dtype) -> None:
    inputs = CALLS["everything"]()
    request = ask(inputs)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            found = native.attend(inputs, request)
    finally:
        torch.set_default_dtype(torch.float32)
    equal(found, native.attend(inputs, request))


@needs_compiler
def test_numbers_beyond_any_text_are_as_good_as_the_text_is_long() -> None:
    inputs = draw(causal=True)
    names = ("local_mass", "lag_mass", "block_map")
    near = ask(inputs, names, local_window=99, lag_edges=(-99, 0, 99), block=99)
    huge = 2**70
    far = ask(inputs, names, local_window=huge, lag_edges=(-huge, 0, huge), block=huge)
    check(native.attend(inputs, near), inputs, near)
    equal(native.attend(inputs, far), native.attend(inputs, near))


def test_shapes_that_do_not_fit_are_left_to_others() -> None:
    inputs = draw()
    for wrong, request in (
        (replace(inputs, k=inputs.k[:1]), Request()),
        (replace(inputs, q=inputs.q[:, :5]), Request()),
        (replace(inputs, mask=torch.ones(1, 1, 1, 13, dtype=torch.bool)), Request()),
        (inputs, Request(heads=(-1,), statistics=("lse",))),
        (inputs, Request(statistics=("block_map",), block=0)),
    ):
        assert native.why_not(wrong, request) is not None


def test_a_call_without_rows_gives_results_without_rows() -> None:
    inputs = draw(causal=True)
    for empty in (
        replace(inputs, q=inputs.q[:, :, :0]),
        replace(inputs, q=inputs.q[:0], k=inputs.k[:0], v=inputs.v[:0]),
    ):
        result = native.attend(empty, Request(statistics=("lse", "received")))
        assert result.z.shape == (*empty.q.shape[:3], 4)
        assert result.statistics["lse"].shape == empty.q.shape[:3]
        assert result.statistics["received"].abs().sum() == 0
