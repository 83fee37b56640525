"""The second pass of the Triton engine, in the interpreter, against plain float64 formulas (oracle.py)."""

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
from test_kernels import CALLS, ask, blind, coin, draw, normal
from torch import Tensor

from headlab.kernels import AttentionInputs, Request

pytest.importorskip("triton")
from headlab.kernels.fused.call import prepared
from headlab.kernels.fused.columns import column_statistics
from headlab.kernels.fused.rows import row_statistics
from headlab.kernels.fused.schedule import plain, schedule, seen, seen_by, squares

NAMES = ("received", "block_map", "lag_mass", "target_mass", "segment_z")
WEIGHTED = ("received", "block_map", "lag_mass", "target_mass", "local_mass", "feature")


def lse(inputs: AttentionInputs, heads: tuple[int, ...] | None = None) -> Tensor:
    sinks = None if inputs.sinks is None else oracle.array(inputs.sinks)
    every = torch.as_tensor(oracle.lse(oracle.scores(inputs), sinks)).float()
    return every if heads is None else every[:, list(heads)]


def compute(inputs: AttentionInputs, request: Request) -> dict[str, Tensor]:
    call = prepared(inputs, request.heads)
    known = lse(inputs, request.heads)
    return column_statistics(call, known, request) | row_statistics(call, known, request)


def check(inputs: AttentionInputs, request: Request, atol: float = 1e-5) -> None:
    found = compute(inputs, request)
    assert set(found) == set(request.statistics)
    for name, value in oracle.statistics(inputs, request).items():
        size = max(1.0, float(np.abs(value).max(initial=0)))
        assert found[name].dtype == torch.float32, name
        assert_close(found[name], value, atol * size, what=name)


#: Calls of few tiles; the interpreter takes milliseconds for each.
SHORT = [call for call in CALLS if not call.startswith("long")]


@pytest.mark.parametrize("call", SHORT)
def test_statistics_equal_plain_formula(call: str) -> None:
    inputs = CALLS[call]()
    heads = (inputs.q.shape[1] - 1, 0) if inputs.q.shape[1] > 1 else None
    check(inputs, ask(inputs, NAMES, heads=heads, lag_edges=(-4, 1, 40)))


@pytest.mark.parametrize("call", ["grouped-causal", "everything", "blind-rows-with-sinks"])
def test_statistics_weighted_by_gradients_equal_plain_formula(call: str) -> None:
    inputs = CALLS[call]()
    dz = normal(*inputs.q.shape[:3], inputs.v.shape[-1])
    turned = dz.transpose(2, 3).contiguous().transpose(2, 3)  # no unit stride along the width
    request = ask(inputs, WEIGHTED, z=False, z_gradient=turned, lag_edges=(0, 2, 40), heads=(4, 1))
    check(inputs, request)


def test_features_by_the_hundred_are_summed_in_blocks() -> None:
    inputs = draw(2, 1, 9, batch=1, causal=True)
    dz = normal(1, 2, 9, 4)
    features = normal(1, 9, 70)
    request = ask(inputs, ("feature",), z=False, z_gradient=dz, features=features)
    check(inputs, request)


# The interpreter cuts weights off where the hardware rounds them: 2⁻⁸ of bfloat16 each.
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float16, 2**-10), (torch.bfloat16, 2**-7)])
def test_half_precision_loses_nothing_but_the_rounding_of_weights_that_mix_values(
    dtype: torch.dtype, rounding: float
) -> None:
    inputs = draw(2, 1, 37, batch=1, causal=True, d=8, softcap=3.0, sinks=normal(2))
    low = replace(inputs, **{name: getattr(inputs, name).to(dtype) for name in "qkv"})
    check(low, ask(low, NAMES[:-1]))
    check(low, ask(low, ("segment_z",)), atol=rounding)
    dz = normal(1, 2, 37, 4)
    for upstream in (dz, dz.to(dtype)):
        request = ask(low, ("received", "feature"), z=False, z_gradient=upstream)
        check(low, request)


def packed(*lengths: int) -> Tensor:
    """Documents that do not see each other."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    same = document[:, None] == document
    return (same & torch.ones_like(same).tril())[None, None]


def padded(*left: int) -> Tensor:
    """Sequences of 69 that begin after some padding each: they see different tiles."""
    begun = torch.arange(69) >= torch.tensor(left)[:, None]
    return torch.ones(69, 69, dtype=torch.bool).tril() & begun[:, None, None, :]


def test_packed_documents_padding_and_a_window_over_many_tiles() -> None:
    for inputs in (
        draw(1, 1, 69, batch=2, mask=padded(40, 0)),
        draw(1, 1, 69, batch=1, mask=packed(20, 1, 48)),
        draw(1, 1, 101, batch=1, causal=True, window=35),
    ):
        check(inputs, ask(inputs, NAMES, lag_edges=(0, 3, 64), block=64))


def test_only_the_last_queries_count() -> None:
    inputs = draw(1, 1, 70, 90, batch=2, causal=True, query_start=20)
    counted = torch.zeros(1, 70, dtype=torch.bool)
    counted[:, -6:] = True
    check(inputs, ask(inputs, ("received", "block_map"), counted=counted, block=16))
    none = torch.zeros(1, 70, dtype=torch.bool)
    check(inputs, ask(inputs, ("received",), counted=none))


@pytest.mark.parametrize("block", [1, 5, 32, 33, 48, 200])
def test_block_map_holds_for_any_side(block: int) -> None:
    inputs = draw(1, 1, 69, 83, batch=1, causal=True, query_start=14)
    check(inputs, ask(inputs, ("block_map",), block=block))


def test_segments_may_overlap_be_empty_or_hold_every_key() -> None:
    inputs = draw(1, 1, 70, batch=2, causal=True)
    segments = torch.zeros(1, 70, 4, dtype=torch.bool)
    segments[:, ::2, 0] = True  # interleaved with the others
    segments[:, 10:55, 1] = True
    segments[:, :, 2] = True
    check(inputs, ask(inputs, ("segment_z",), segments=segments))


def test_lag_bins_may_leave_gaps_or_reach_past_both_ends() -> None:
    for call in ("bidirectional", "sliding-cache-several"):
        inputs = CALLS[call]()
        for edges in ((3, 5), (-100, 100), (20, 30), (2, 0, 3)):
            check(inputs, ask(inputs, ("lag_mass",), lag_edges=edges, heads=(0,)))


@st.composite
def calls(draw_: Any) -> AttentionInputs:
    n_queries, n_keys = draw_(st.integers(1, 70)), draw_(st.integers(1, 70))
    fields: dict[str, Any] = {"causal": draw_(st.booleans())}
    fields["query_start"] = draw_(st.integers(0, 20))
    fields["window"] = draw_(st.none() | st.integers(1, 50))
    fields["softcap"] = draw_(st.none() | st.just(2.0))
    fields["sinks"] = draw_(st.sampled_from([None, normal(2)]))
    if draw_(st.booleans()):
        row = draw_(st.integers(0, n_queries - 1))
        fields["mask"] = blind(coin(1, 1, n_queries, n_keys), row)
    group, d = draw_(st.integers(1, 2)), draw_(st.integers(1, 20))
    d_value, seed = draw_(st.integers(1, 20)), draw_(st.integers(0, 99))
    return draw(
        2, 2 // group, n_queries, n_keys, batch=1, d=d, d_value=d_value, seed=seed, **fields
    )


@settings(max_examples=8)
@given(calls(), st.integers(1, 40))
def test_any_call_equals_plain_formula(inputs: AttentionInputs, block: int) -> None:
    check(inputs, ask(inputs, NAMES, heads=(1,), block=block, lag_edges=(-9, 0, 30)))


# -- which tiles are visited -----------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_lists_name_every_tile_some_row_sees_and_no_test_is_left_out(
    n_rows: int, n_keys: int, data: Any
) -> None:
    one = st.integers(0, n_keys)
    pairs = data.draw(st.lists(st.tuples(one, one), min_size=n_rows, max_size=n_rows))
    low, high = torch.tensor(pairs, dtype=torch.int32).T[:, None]
    cut = squares(data.draw(st.integers(1, 40)), 16)
    sees = (torch.arange(n_keys) >= low[0, :, None]) & (torch.arange(n_keys) < high[0, :, None])
    lists = seen_by(low, high, cut, plain(16), n_keys)
    starts, stops = (x.tolist() for x in cut.ends(n_rows, low.device))
    assert sum(stop - start for start, stop in zip(starts, stops, strict=True)) == n_rows
    for column in range(-(-n_keys // 16)):
        edge, whole = lists.counts[0, column].tolist()
        visited = lists.tiles[0, column, : edge + whole].tolist()
        assert len(set(visited)) == len(visited)
        for tile in range(len(starts)):
            part = sees[starts[tile] : stops[tile], column * 16 : (column + 1) * 16]
            assert tile in visited or not part.any()
            blind_rows = (low >= high)[0, starts[tile] : stops[tile]]
            assert tile not in visited or not blind_rows.all()
            if tile in visited[edge:]:
                assert part.shape == (16, 16)
                assert bool((part.all(1) | blind_rows).all())


def test_causal_rows_are_tested_on_the_diagonal_only() -> None:
    n = 8 * 32
    high = torch.arange(1, n + 1, dtype=torch.int32)[None]
    overlap, whole = seen(torch.zeros_like(high), high, plain(32), plain(32), n)
    assert torch.equal(overlap[0], torch.ones(8, 8, dtype=torch.bool).tril())
    assert torch.equal(whole[0], torch.ones(8, 8, dtype=torch.bool).tril(-1))
    assert schedule(overlap, whole).counts[0].tolist() == [[1, tile] for tile in range(8)]


@pytest.mark.parametrize("side", [1, 7, 16, 50, 64, 100, 128, 130, 1000])
def test_no_tile_straddles_two_squares(side: int) -> None:
    cut = squares(side, 128)
    start, stop = cut.ends(3 * side + 1, torch.device("cpu"))
    assert bool((stop - start <= cut.size).all())
    if cut.squares == 1:
        some = stop > start
        assert torch.equal((start // side)[some], ((stop - 1) // side)[some])
    else:
        assert cut.width == cut.squares * side
        assert bool((start % side == 0).all())
