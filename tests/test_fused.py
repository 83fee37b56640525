"""The Triton engine's first pass, in the interpreter, against plain float64 formulas (oracle.py).

Shapes are small, as the interpreter is slow, and tiles are 32 × 32, so that a few dozen tokens have every kind of tile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_close
from test_kernels import CALLS, NAMES, ask, check, draw, exact, normal
from torch import Tensor

from headlab.errors import UnsupportedError
from headlab.kernels import AttentionInputs, Request

pytest.importorskip("triton")

from headlab.kernels.fused import attend, configs, engine, launch, second, why_not

FIRST = tuple(name for name in NAMES if name not in engine.SECOND)
#: Without the top-k, from which largest weight and argmax would be read.
PLAIN = tuple(name for name in FIRST if not name.startswith("topk"))

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


def tiled(monkeypatch: pytest.MonkeyPatch, rows: int, keys: int) -> None:
    monkeypatch.setattr(launch, "tiles_for", lambda *_: configs.Tiles(rows, keys, 4, 1))


def split(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    monkeypatch.setattr(launch, "splits_for", lambda *_: splits)


@pytest.mark.parametrize("call", CALLS)
def test_first_pass_equals_plain_formula(call: str) -> None:
    inputs = CALLS[call]()
    request = ask(inputs, PLAIN if call.startswith("long") else FIRST)
    check(attend(inputs, request), inputs, request)


@pytest.mark.parametrize("call", ["grouped-causal", "everything", "left-padding"])
@pytest.mark.parametrize("z", [True, False])
def test_statistics_of_some_heads_and_z_of_all(call: str, z: bool) -> None:
    inputs = CALLS[call]()
    request = ask(inputs, PLAIN, heads=(5, 0, 2), z=z)
    check(attend(inputs, request), inputs, request)


def test_z_without_statistics_is_z_of_every_head_whatever_heads_are_named() -> None:
    inputs = CALLS["grouped-causal"]()
    for heads in (None, (3,)):
        request = Request(heads=heads)
        check(attend(inputs, request), inputs, request)


@pytest.mark.parametrize("name", FIRST)
def test_each_statistic_can_be_asked_for_alone(name: str) -> None:
    inputs = CALLS["blind-rows"]()
    request = ask(inputs, (name,), z=False)
    check(attend(inputs, request), inputs, request)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", ["grouped-causal", "sinks", "everything"])
def test_half_precision_loses_nothing_but_the_rounding_of_z(call: str, dtype: torch.dtype) -> None:
    inputs = CALLS[call]()
    inputs = replace(inputs, **{name: getattr(inputs, name).to(dtype) for name in "qkv"})
    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-11
    request = ask(inputs, FIRST)
    # Weights are rounded to the type before they mix the values, as in every flash attention.
    check(attend(inputs, request), inputs, request, z_tolerance=(4 * rounding, rounding))


@st.composite
def calls(draw_: st.DrawFn) -> AttentionInputs:
    """Calls of several tiles: windows, sinks, caps, packed documents and padding, in all combinations."""
    queries = draw_(st.integers(1, 75))
    before = draw_(st.sampled_from([0, 0, 1, 40]))
    keys, batch = queries + before, draw_(st.integers(1, 2))
    kv, group = draw_(st.integers(1, 2)), draw_(st.integers(1, 2))
    fields: dict[str, Any] = {"causal": draw_(st.booleans()), "query_start": before}
    if draw_(st.booleans()):
        fields["window"] = draw_(st.integers(1, keys + 2))
    if draw_(st.booleans()):
        fields["softcap"] = 1.5
    if draw_(st.booleans()):
        fields["sinks"] = normal(kv * group)
    form = draw_(st.sampled_from(["none", "documents", "left", "right", "any"]))
    at = torch.arange(keys)
    shift = draw_(st.integers(0, keys - 1))
    if form == "documents":
        document = (at >= shift).int() + (at >= (shift + keys) // 2).int()
        fields["mask"] = (document[before:, None] == document)[None, None]
    elif form in ("left", "right"):
        padded = at < shift if form == "left" else at > shift
        fields["mask"] = torch.stack([~padded, padded | ~padded][:batch])[:, None, None]
        fields["mask"] = fields["mask"].expand(batch, 1, queries, keys)
    elif form == "any":
        seed = draw_(st.integers(0, 99))
        fields["mask"] = (
            torch.rand(batch, 1, queries, keys, generator=torch.Generator().manual_seed(seed)) < 0.8
        )
    widths = st.sampled_from([1, 5, 16, 24])
    return draw(
        kv * group, kv, queries, keys, batch=batch, d=draw_(widths), d_value=draw_(widths),
        seed=draw_(st.integers(0, 99)), **fields,
    )  # fmt: skip


@settings(max_examples=8)
@given(calls())
def test_any_call_equals_plain_formula(inputs: AttentionInputs) -> None:
    request = ask(inputs, PLAIN, local_window=11)
    check(attend(inputs, request), inputs, request, ties=True)


@settings(max_examples=3)
@given(calls(), st.integers(2, 5))
def test_splitting_the_keys_changes_nothing(inputs: AttentionInputs, splits: int) -> None:
    request = ask(inputs, PLAIN)
    with pytest.MonkeyPatch.context() as patch:
        split(patch, splits)
        check(attend(inputs, request), inputs, request, ties=True)


@pytest.mark.parametrize("queries", [1, 5])
def test_split_decode_is_merged_exactly(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few queries over a long cache, heads of a group in one tile; equal keys in different splits."""
    tiled(monkeypatch, 32, 16)
    inputs = draw(
        4, 2, queries, 25, batch=1, query_start=100 - queries, sinks=normal(4), causal=True
    )
    inputs = replace(inputs, k=torch.cat([inputs.k] * 4, 2), v=torch.cat([inputs.v] * 4, 2))
    request = ask(inputs, FIRST, k=5)
    whole = attend(inputs, request)
    split(monkeypatch, 3)
    parts = attend(inputs, request)
    check(parts, inputs, request)
    for name in ("argmax", "topk_index"):
        assert torch.equal(parts.statistics[name], whole.statistics[name])
    plain = ask(inputs, PLAIN)
    check(attend(inputs, plain), inputs, plain)


def test_blind_rows_amid_rows_that_see_whole_tiles_stay_blind() -> None:
    mask = torch.ones(1, 1, 40, 70, dtype=torch.bool)
    mask[..., 3:9, :] = False
    for sinks in (None, normal(1)):
        inputs = draw(1, 1, 40, 70, batch=1, mask=mask, sinks=sinks)
        for names in (PLAIN, ("topk", "topk_index")):
            request = ask(inputs, names)
            check(attend(inputs, request), inputs, request)


def test_ties_go_to_the_lowest_key_in_every_kind_of_tile() -> None:
    """With a window, tiles at the window's edge come after those that every row sees whole."""
    for queries, window in ((40, None), (100, 90)):
        inputs = draw(1, 1, queries, batch=1, causal=True, window=window, sharp=0.0)
        request = ask(inputs, ("argmax", "topk", "topk_index"), k=5, z=False)
        check(attend(inputs, request), inputs, request)
        request = ask(inputs, ("max", "argmax", "entropy"), z=False)
        check(attend(inputs, request), inputs, request)


@pytest.mark.parametrize("keys", [1, 31, 33, 100])
def test_few_different_scores_give_the_first_of_each(keys: int) -> None:
    scores = torch.randint(0, 4, (3, keys), generator=torch.Generator().manual_seed(keys)).float()
    inputs = exact(scores)
    request = Request(statistics=("topk", "topk_index"), k=9)
    check(attend(inputs, request), inputs, request)


def test_huge_scores_stay_exact() -> None:
    g = torch.Generator().manual_seed(3)
    scores = torch.randint(-(10**6), 10**6, (4, 90), generator=g).float()
    scores[1] += 1e7
    scores[2] = scores[2] / 1e5 - 1e6
    scores[3, 40] = scores[3, 70] = 3e7
    inputs = exact(scores)
    request = ask(inputs, PLAIN, features=torch.randn(1, 90, 3, generator=g))
    got = attend(inputs, request)
    expected = oracle.statistics(inputs, request)
    assert_close(got.statistics["lse"], expected["lse"], rtol=2e-7, what="lse")
    for name in ("entropy", "max", "argmax", "feature", "mean_distance"):
        # A float32 near 10⁶ is good to 0.03, and so are differences of scores in log2 units.
        assert_close(got.statistics[name], expected[name], atol=0.07, rtol=0.07, what=name)
    assert_close(got.z, oracle.z(inputs), atol=0.07)


def test_infinite_and_huge_biases_hide_and_choose() -> None:
    bias = normal(1, 2, 40, 40)
    bias[..., 5, :] = -torch.inf
    bias[..., 6, 3:] = -torch.inf
    bias[..., 7, 20] = 1e30
    bias[..., 8, :] = -1e30
    inputs = draw(2, 2, 40, batch=1, position_bias=bias)
    request = ask(inputs, FIRST)
    result, expected = attend(inputs, request), oracle.statistics(inputs, request)
    assert_close(result.statistics.pop("lse"), expected.pop("lse"), atol=1e-5, rtol=1e-6)
    for name, value in expected.items():
        if name in ("topk", "topk_index", "argmax"):  # row 8 has lost its own scores to rounding
            keep = np.arange(40) != 8
            assert_close(result.statistics[name][:, :, keep], value[:, :, keep], what=name)
        else:
            assert_close(result.statistics[name], value, atol=2e-5, what=name)


def test_masses_of_segments_are_good_to_a_millionth() -> None:
    inputs = draw(2, 1, 5, 1500, batch=1, query_start=1495, sharp=3.0)
    member = torch.arange(1500)[:, None] % 70 == torch.arange(70)  # more columns than a launch has
    request = ask(inputs, ("feature",), features=member[None].float(), z=False)
    with pytest.MonkeyPatch.context() as patch:
        tiled(patch, 32, 256)
        got = attend(inputs, request)
    assert_close(got.statistics["feature"], oracle.statistics(inputs, request)["feature"], 1e-6)


def test_long_rows_lose_no_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    tiled(monkeypatch, 64, 1024)
    inputs = draw(
        1, 1, 64, 16384, batch=1, d=16, query_start=16320, causal=True, dtype=torch.bfloat16
    )
    request = ask(inputs, PLAIN, z=False, local_window=100)
    check(attend(inputs, request), inputs, request, ties=True)


def test_near_distances_are_exact_far_from_the_first_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that looks only at its neighbours, at column 10⁶ of a cache, whose window keeps the last keys."""
    tiled(monkeypatch, 32, 32)
    inputs = draw(
        1, 1, 40, 60, batch=1, causal=True, query_start=10**6, key_start=10**6 - 20, window=9
    )
    request = ask(inputs, ("mean_distance", "local_mass"))
    check(attend(inputs, request), inputs, request, atol=2e-6)


def test_chunks_of_queries_are_rows_of_the_whole() -> None:
    inputs = draw(2, 1, 70, batch=1, causal=True, window=45)
    names = ("lse", "entropy", "max", "argmax", "mean_distance")
    whole = attend(inputs, ask(inputs, names))
    for start, stop in ((0, 1), (1, 34), (34, 70)):
        rows = slice(start, stop)
        part = replace(inputs, q=inputs.q[:, :, rows], query_start=start)
        got = attend(part, ask(part, names))
        assert_close(got.z, whole.z[:, :, rows], atol=1e-6)
        for name in names:
            assert_close(got.statistics[name], whole.statistics[name][:, :, rows], 2e-6, 1e-6, name)


def test_layouts_of_the_inputs_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads behind tokens, keys by columns, one sequence broadcast; and tensor descriptors where aligned."""
    inputs = draw(2, 1, 36, d=8, d_value=20, causal=True, batch=2)
    inputs = replace(inputs, v=inputs.v[:1].expand(2, -1, -1, -1))
    request = ask(inputs, PLAIN)
    laid = replace(
        inputs,
        q=inputs.q.transpose(1, 2).contiguous().transpose(1, 2),
        k=inputs.k.mT.contiguous().mT,
        v=inputs.v[:1].expand(2, -1, -1, -1),
    )
    check(attend(laid, request), laid, request)
    used: list[bool] = []
    described = second.described
    monkeypatch.setattr(second, "has_tma", lambda _: True)

    def note(x: Tensor, rows: int) -> Any:
        found = described(x, rows)
        used.append(found is not None)
        return found

    monkeypatch.setattr(launch, "described", note)
    check(attend(laid, request), laid, request)
    assert not all(used), "a broadcast sequence cannot be described"
    used.clear()
    whole = replace(inputs, v=inputs.v.contiguous())
    check(attend(whole, request), whole, request)
    assert used
    assert all(used)


def without(**fields: Any) -> str:
    inputs = draw(2, 1, 3, causal=True)
    changes = {name: x for name, x in fields.items() if isinstance(x, Tensor)}
    fields = {name: x for name, x in fields.items() if name not in changes}
    reason = why_not(replace(inputs, **changes), Request(**fields))
    assert reason is not None
    with pytest.raises(UnsupportedError, match="Triton"):
        attend(replace(inputs, **changes), Request(**fields))
    return reason


def test_calls_beyond_the_engine_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = torch.zeros(2, 1, 3, 300)
    double = {name: normal(2, 2 if name == "q" else 1, 3, 4).double() for name in "qkv"}

    def edit(rows: Tensor, query_index: Tensor) -> Tensor:
        return rows

    assert "float64" in without(**double)
    assert "300" in without(v=wide)
    assert "top-65" in without(statistics=("topk",), k=65)
    assert "edits" in without(edit_scores=edit)
    assert why_not(draw(2, 1, 3), Request(statistics=("entropy",), k=65)) is None
    monkeypatch.setattr("triton.__version__", "3.5.1")
    assert "pip install" in without()
    monkeypatch.undo()
    monkeypatch.setattr(engine, "INTERPRET", False)
    assert "GPU" in without()


@pytest.mark.parametrize("columns", [(0, 1, 2), (1,), (1, 0, 2)])
def test_features_that_are_rarely_set_come_from_the_second_pass(columns: tuple[int, ...]) -> None:
    """Column 1 marks a few keys among thousands; whatever is asked beside it, each column is the formula's."""
    inputs = draw(2, 1, 3, 2400, batch=1, query_start=2397, causal=True)
    features = normal(1, 2400, 3)
    features[..., 1] = 0.0
    features[0, [0, 1, 90], 1] = torch.tensor([1.0, -2.0, 3.0])
    request = Request(statistics=("feature",), features=features[..., list(columns)])
    check(attend(inputs, request), inputs, request)
