"""Every engine against plain float64 formulas (oracle.py), for every statistic and kind of call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_close
from torch import Tensor

from headlab.kernels import COLUMN_STATISTICS, ENGINES, STATISTICS, AttentionInputs, Request

INDEX = ("argmax", "topk_index")
TOPK = ("topk", "topk_index")
NAMES = tuple(STATISTICS)
HIDDEN = torch.finfo(torch.float32).min


def blockwise(block_bytes: int) -> Callable[..., Any]:
    return partial(ENGINES["blockwise"], block_bytes=block_bytes)


#: Both engines, and the blockwise one with blocks of one row, of a few rows, and as it comes.
RUNS: dict[str, Callable[..., Any]] = {
    "dense": ENGINES["dense"],
    "blockwise": ENGINES["blockwise"],
    "blockwise-one-row": blockwise(1),
    "blockwise-few-rows": blockwise(2500),
}


@pytest.fixture(params=RUNS)
def engine(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return RUNS[request.param]


# -- calls -----------------------------------------------------------------------------------------


def draw(
    heads: int = 6,
    kv: int = 2,
    queries: int = 13,
    keys: int | None = None,
    *,
    batch: int = 2,
    d: int = 5,
    d_value: int = 4,
    seed: int = 0,
    sharp: float = 1.5,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> AttentionInputs:
    g = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    return AttentionInputs(
        q=normal(batch, heads, queries, d) * sharp,
        k=normal(batch, kv, keys, d),
        v=normal(batch, kv, keys, d_value),
        **{"scaling": d**-0.5, **fields},
    )


def coin(*shape: int, p: float = 0.6, seed: int = 7) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < p


def normal(*shape: int, seed: int = 8) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blind(mask: Tensor, *rows: int) -> Tensor:
    mask = mask.clone()
    mask[0, :, list(rows)] = False
    return mask


def additive(mask: Tensor, hidden: float = HIDDEN) -> Tensor:
    return torch.where(mask, torch.zeros(()), torch.full((), hidden))


LOWER = torch.ones(13, 13, dtype=torch.bool).tril()

CALLS: dict[str, Callable[[], AttentionInputs]] = {
    "multi-head-causal": lambda: draw(4, 4, causal=True),
    "grouped-causal": lambda: draw(causal=True),
    "multi-query-causal": lambda: draw(5, 1, causal=True),
    "one-head": lambda: draw(1, 1, causal=True),
    "bidirectional": lambda: draw(),
    "one-token": lambda: draw(queries=1, causal=True),
    "one-batch": lambda: draw(batch=1, causal=True, seed=3),
    "cross-more-keys": lambda: draw(queries=7, keys=17),
    "cross-fewer-keys": lambda: draw(queries=17, keys=7),
    "window": lambda: draw(causal=True, window=4),
    "window-of-one": lambda: draw(causal=True, window=1),
    "window-wider-than-sequence": lambda: draw(causal=True, window=50),
    "window-bidirectional": lambda: draw(window=3),
    "window-bidirectional-mask": lambda: draw(window=3, mask=coin(2, 1, 13, 13)),
    "softcap": lambda: draw(causal=True, softcap=0.7),
    "sinks": lambda: draw(causal=True, sinks=normal(6)),
    "large-sinks": lambda: draw(causal=True, sinks=6 + normal(6)),
    "position-bias": lambda: draw(3, 3, position_bias=normal(1, 3, 13, 13), scaling=1.0),
    "position-bias-batched": lambda: draw(3, 3, position_bias=normal(2, 3, 13, 13), causal=True),
    "bool-mask": lambda: draw(mask=coin(2, 1, 13, 13)),
    "bool-mask-shared": lambda: draw(mask=coin(1, 1, 13, 13)),
    "bool-mask-per-head": lambda: draw(mask=coin(2, 6, 13, 13)),
    "bool-mask-and-causal": lambda: draw(mask=coin(2, 1, 13, 13), causal=True),
    "sparse-mask": lambda: draw(mask=coin(2, 1, 13, 13, p=0.1)),
    "blind-rows": lambda: draw(mask=blind(coin(2, 1, 13, 13), 0, 4, 5, 12)),
    "blind-rows-with-sinks": lambda: draw(
        mask=blind(coin(2, 1, 13, 13), 0, 4, 5, 12), sinks=normal(6)
    ),
    "all-blind": lambda: draw(mask=torch.zeros(2, 1, 13, 13, dtype=torch.bool)),
    "left-padding": lambda: draw(
        mask=LOWER & (torch.arange(13) >= torch.tensor([[4], [0]]))[:, None, None, :]
    ),
    "right-padding": lambda: draw(
        mask=LOWER & (torch.arange(13) < torch.tensor([[4], [13]]))[:, None, None, :]
    ),
    "additive-mask": lambda: draw(mask=additive(coin(2, 1, 13, 13))),
    "additive-infinite": lambda: draw(mask=additive(coin(2, 1, 13, 13), -torch.inf)),
    "additive-bias": lambda: draw(mask=additive(coin(2, 1, 13, 13)) + normal(2, 1, 13, 13)),
    "additive-blind": lambda: draw(mask=additive(blind(coin(2, 1, 13, 13), 3, 4))),
    "additive-per-head": lambda: draw(mask=additive(coin(1, 6, 13, 13)) + normal(1, 6, 13, 13)),
    "additive-half": lambda: draw(
        mask=additive(coin(2, 1, 13, 13), torch.finfo(torch.float16).min).half()
    ),
    "wide-values": lambda: draw(causal=True, d=3, d_value=11),
    "narrow-values": lambda: draw(causal=True, d=9, d_value=1),
    "large-scores": lambda: draw(causal=True, sharp=12.0),
    "decode-one": lambda: draw(queries=1, keys=14, query_start=13),
    "decode-several": lambda: draw(queries=3, keys=14, query_start=11, causal=True),
    "decode-several-window": lambda: draw(
        queries=3, keys=14, query_start=11, causal=True, window=4
    ),
    "sliding-cache-one": lambda: draw(queries=1, keys=5, query_start=30, key_start=26),
    "sliding-cache-several": lambda: draw(
        queries=3, keys=7, query_start=30, key_start=26, causal=True, window=5
    ),
    "sliding-cache-mask": lambda: draw(
        queries=3, keys=7, query_start=30, key_start=26, mask=coin(2, 1, 3, 7)
    ),
    "everything": lambda: draw(
        causal=True,
        window=6,
        softcap=1.3,
        sinks=normal(6),
        position_bias=normal(1, 6, 13, 13),
        mask=blind(coin(2, 6, 13, 13), 2),
        scaling=0.9,
    ),
    "long-odd": lambda: draw(2, 1, 301, batch=1, causal=True),
    "long-window": lambda: draw(2, 1, 301, batch=1, causal=True, window=129),
    "long-decode": lambda: draw(2, 1, 2, 1030, batch=1, query_start=1028, causal=True),
}

HEADS: dict[str, Callable[[int], tuple[int, ...] | None]] = {
    "every-head": lambda n: None,
    "uneven-groups": lambda n: tuple(h for h in (0, 3, 4) if h < n),
    "last-head": lambda n: (n - 1,),
}


def ask(inputs: AttentionInputs, statistics: tuple[str, ...] = NAMES, **fields: Any) -> Request:
    """A request with parameters that are different from each other, and from any default."""
    n, n_keys, batch = inputs.n_queries, inputs.n_keys, inputs.q.shape[0]
    g = torch.Generator().manual_seed(5)
    return Request(
        **{
            "statistics": statistics,
            "features": torch.randn(batch, n_keys, 3, generator=g),
            "local_window": 3,
            "lag_edges": (-4, -1, 0, 1, 2, 6, 40),
            "k": 4,
            "targets": torch.randint(-1, n_keys, (batch, n), generator=g),
            "counted": coin(batch, n, p=0.7, seed=1),
            "block": 4,
            "segments": coin(batch, n_keys, 2, p=0.4, seed=2),
            **fields,
        }
    )


def same_keys(got: Any, expected: Any, p: np.ndarray, what: str) -> None:
    """The same keys, or others whose weights differ by less than float32 can tell."""
    got, expected = oracle.array(got), oracle.array(expected)
    if what == "argmax":
        got, expected = got[..., None], expected[..., None]
    np.testing.assert_array_equal(got < 0, expected < 0, err_msg=what)
    picked = [np.take_along_axis(p, np.maximum(index, 0), -1) for index in (got, expected)]
    np.testing.assert_allclose(*picked, atol=1e-5, err_msg=what)


def check(
    result: Any,
    inputs: AttentionInputs,
    request: Request,
    atol: float = 1e-5,
    z_tolerance: tuple[float, float] | None = None,
    *,
    ties: bool = False,
) -> None:
    """Compare with the oracle; *ties* says that random weights may come too close to tell apart."""
    expected = oracle.statistics(inputs, request)
    assert set(result.statistics) == set(request.statistics)
    for name, value in expected.items():
        got = result.statistics[name]
        if name in INDEX:
            assert got.dtype == torch.long, name
            if ties:
                same_keys(got, value, _pattern_of(inputs, request), name)
                continue
            np.testing.assert_array_equal(got.numpy(), value, err_msg=name)
        elif name == "mean_distance":
            assert_close(got, value, atol=atol, rtol=atol, what=name)
        else:
            size = max(1.0, float(np.abs(value[np.isfinite(value)]).max(initial=0)))
            assert_close(got, value, atol=atol * size, what=name)
    if request.z:
        z_atol, z_rtol = z_tolerance or (atol, 0.0)
        assert result.z.dtype == inputs.q.dtype
        assert_close(result.z, oracle.z(inputs), atol=z_atol, rtol=z_rtol, what="z")
    else:
        assert result.z is None


def _pattern_of(inputs: AttentionInputs, request: Request) -> np.ndarray:
    p = oracle.pattern(inputs)
    return p if request.heads is None else p[:, list(request.heads)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("call", CALLS)
def test_engines_equal_plain_formula(engine: Callable[..., Any], call: str, heads: str) -> None:
    inputs = CALLS[call]()
    request = ask(inputs, heads=HEADS[heads](inputs.q.shape[1]))
    check(engine(inputs, request), inputs, request)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("z", [True, False])
def test_each_statistic_can_be_asked_for_alone(
    engine: Callable[..., Any], name: str, z: bool
) -> None:
    for call in ("grouped-causal", "everything", "blind-rows"):
        inputs = CALLS[call]()
        for heads in (None, (5, 0, 2)):
            request = ask(inputs, (name,), z=z, heads=heads)
            check(engine(inputs, request), inputs, request)


@pytest.mark.parametrize("call", ["grouped-causal", "everything", "left-padding", "sinks"])
def test_rows_are_rows_of_the_pattern(engine: Callable[..., Any], call: str) -> None:
    inputs = CALLS[call]()
    index = torch.tensor([[12, 0, 5], [3, 3, 11]])
    result = engine(inputs, Request(z=False, rows=index, heads=(4, 1)))
    p = oracle.pattern(inputs)[:, [4, 1]]
    assert_close(result.rows[0], p[0][:, [12, 0, 5]])
    assert_close(result.rows[1], p[1][:, [3, 3, 11]])
    assert result.z is None
    assert result.statistics == {}


def test_broadcast_parameters_mean_the_same_as_repeated_ones(engine: Callable[..., Any]) -> None:
    inputs = CALLS["grouped-causal"]()
    few = ask(inputs)
    one = {name: getattr(few, name)[:1] for name in ("features", "targets", "counted", "segments")}
    request = replace(few, **one)
    check(engine(inputs, request), inputs, request)


def test_every_query_counts_when_none_are_named(engine: Callable[..., Any]) -> None:
    inputs = CALLS["grouped-causal"]()
    request = ask(inputs, ("received", "block_map"), counted=None)
    check(engine(inputs, request), inputs, request)


@pytest.mark.parametrize("block", [1, 2, 5, 13, 64])
def test_block_map_holds_for_any_side(engine: Callable[..., Any], block: int) -> None:
    for call in ("grouped-causal", "window", "cross-more-keys", "decode-several"):
        inputs = CALLS[call]()
        request = ask(inputs, ("block_map",), block=block)
        check(engine(inputs, request), inputs, request)


def test_lag_bins_may_leave_gaps_or_reach_past_both_ends(engine: Callable[..., Any]) -> None:
    for call in ("bidirectional", "window", "sliding-cache-several", "cross-fewer-keys"):
        inputs = CALLS[call]()
        for edges in ((3, 5), (-100, 100), (20, 30), (0, 1, 2, 3)):
            request = ask(inputs, ("lag_mass",), lag_edges=edges)
            check(engine(inputs, request), inputs, request)


# -- other types -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["grouped-causal", "everything", "blind-rows", "decode-several"])
def test_float64_inputs_are_computed_in_float64(engine: Callable[..., Any], call: str) -> None:
    inputs = CALLS[call]()
    double = {n: getattr(inputs, n).double() for n in ("q", "k", "v")}
    for name in ("sinks", "position_bias"):
        if getattr(inputs, name) is not None:
            double[name] = getattr(inputs, name).double()
    inputs = replace(inputs, **double)
    request = ask(inputs)
    result = engine(inputs, replace(request, features=request.features.double()))
    check(result, inputs, request, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str
)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("run", ["dense", "blockwise-few-rows"])
def test_half_precision_inputs_lose_nothing_but_the_rounding_of_z(
    run: str, dtype: torch.dtype, rounding: float, call: str
) -> None:
    """Statistics are of the rounded inputs, to float32 accuracy; only z is rounded to the type."""
    inputs = CALLS[call]()
    fields = ("q", "k", "v", "sinks", "position_bias")
    low = {n: getattr(inputs, n).to(dtype) for n in fields if getattr(inputs, n) is not None}
    mask = inputs.mask
    if mask is not None and mask.is_floating_point():
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        low["mask"] = mask.to(dtype).masked_fill(hidden, torch.finfo(dtype).min)
    inputs = replace(inputs, **low)
    request = ask(inputs)
    check(RUNS[run](inputs, request), inputs, request, z_tolerance=(1e-5, rounding))


# -- ties and the largest --------------------------------------------------------------------------


def exact(scores: Tensor) -> AttentionInputs:
    """A call with these scores [query, key], to the bit, in every engine."""
    queries, keys = scores.shape
    q, k = torch.eye(queries)[None, None], scores.T[None, None].contiguous()
    return AttentionInputs(q, k, normal(1, 1, keys, 3), 1.0)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 255, 256, 257, 300, 319, 320, 1000, 3000])
def test_argmax_takes_the_first_of_equal_keys(engine: Callable[..., Any], n: int) -> None:
    g = torch.Generator().manual_seed(n)
    scores = torch.randint(0, 4, (4, n), generator=g).float()
    scores[3] = 1.0  # all equal: the very first
    inputs = exact(scores)
    result = engine(inputs, Request(statistics=("argmax",)))
    np.testing.assert_array_equal(result.statistics["argmax"][0, 0], scores.numpy().argmax(-1))


def test_argmax_takes_the_first_of_equal_keys_it_sees(engine: Callable[..., Any]) -> None:
    n = 700
    inputs = AttentionInputs(
        torch.ones(1, 2, n, 1), torch.ones(1, 1, n, 1), torch.ones(1, 1, n, 1), 1.0, causal=True,
        window=270,
    )  # fmt: skip
    found = engine(inputs, Request(statistics=("argmax",))).statistics["argmax"]
    expected = (torch.arange(n) - 269).clamp(min=0)
    assert torch.equal(found[0, 0], expected)
    assert torch.equal(found[0, 1], expected)


def _sizes() -> list[tuple[int, int]]:
    """Keys and k: far below, right at and above the size from which keys are dealt into classes."""
    sizes = [(5, 1), (5, 5), (5, 9), (100, 7), (1000, 3), (3000, 8), (3000, 50), (2999, 1)]
    for k in (1, 2, 5, 8):
        edge = 16 * (2 * k + 1)
        sizes += [(edge + step, k) for step in (-1, 0, 1, 15, 16)]
    return sizes


def _ranks(layout: str, n: int, k: int) -> Tensor:
    """Three rows of distinct scores, with the largest where an engine may overlook them."""
    g = torch.Generator().manual_seed(n + k)
    ranks = torch.stack([torch.randperm(n, generator=g) for _ in range(3)]).double()
    if layout == "one class":  # they stand one class width apart
        ranks[:, :: max(1, n // 16)] += n
    elif layout == "tail":
        ranks[:, -min(n, k) :] += n
    elif layout == "falling":
        ranks = ranks.sort(descending=True).values
    elif layout == "rising":
        ranks = ranks.sort().values
    return (ranks * 8 / n).float()


@pytest.mark.parametrize(("n", "k"), _sizes())
@pytest.mark.parametrize("run", ["dense", "blockwise"])
def test_topk_is_exact(run: str, n: int, k: int) -> None:
    for layout in ("random", "one class", "tail", "falling", "rising"):
        inputs = exact(_ranks(layout, n, k))
        request = Request(statistics=TOPK, k=k)
        check(RUNS[run](inputs, request), inputs, request)


def test_topk_of_a_causal_row_stops_at_the_keys_it_sees(engine: Callable[..., Any]) -> None:
    inputs = draw(2, 1, 120, batch=1, causal=True)
    request = ask(inputs, TOPK, k=3)
    result = engine(inputs, request)
    check(result, inputs, request)
    assert result.statistics["topk_index"][0, 0, 0].tolist() == [0, -1, -1]


def test_topk_of_equal_keys_names_keys_that_have_these_weights(
    engine: Callable[..., Any],
) -> None:
    g = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 3, (4, 400), generator=g).float()
    inputs = exact(scores)
    found = engine(inputs, Request(statistics=TOPK, k=6)).statistics
    p = torch.as_tensor(oracle.pattern(inputs))
    assert_close(found["topk"], oracle.topk(p.numpy(), 6)[0])
    assert_close(found["topk"], p.gather(-1, found["topk_index"]))
    for row in found["topk_index"].flatten(0, 2):
        assert len(set(row.tolist())) == 6


# -- numerical hazards -----------------------------------------------------------------------------


def test_huge_scores_neither_overflow_nor_lose_the_row(engine: Callable[..., Any]) -> None:
    g = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (5, 40), generator=g).float() + 2.0**14
    inputs = exact(scores)
    for changed in (inputs, replace(inputs, k=-inputs.k)):
        request = ask(changed)
        request = replace(request, statistics=tuple(n for n in NAMES if n not in INDEX + TOPK))
        check(engine(changed, request), changed, request)


def test_mean_distance_of_rows_that_look_at_themselves_keeps_its_precision(
    engine: Callable[..., Any],
) -> None:
    """A distance of a thousandth of a token, in rows hundreds of tokens into a block."""
    n = 900
    eye = torch.eye(n)[None, None]
    inputs = AttentionInputs(eye * 20, eye, torch.ones(1, 1, n, 1), 1.0, causal=True)
    request = Request(statistics=("mean_distance",))
    got = engine(inputs, request).statistics["mean_distance"][0, 0]
    row = np.arange(n)
    # Every key before the query itself weighs e^-20 of it.
    expected = np.exp(-20.0) * row * (row + 1) / 2 / (1 + row * np.exp(-20.0))
    assert 8e-4 < expected[-1] < 9e-4
    assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_mean_distance_of_long_rows_is_relatively_exact(engine: Callable[..., Any]) -> None:
    inputs = draw(2, 1, 600, batch=1, causal=True, sharp=3.0)
    request = Request(statistics=("mean_distance",))
    expected = oracle.statistics(inputs, request)["mean_distance"]
    assert_close(engine(inputs, request).statistics["mean_distance"], expected, rtol=1e-5, atol=0)


def test_masses_of_long_rows_stay_exact(engine: Callable[..., Any]) -> None:
    inputs = draw(2, 1, 2, 3000, batch=1, query_start=2998, causal=True, sharp=0.2)
    request = ask(inputs, lag_edges=(0, 1, 10, 100, 1000, 3000), local_window=50)
    request = replace(request, statistics=tuple(n for n in NAMES if n not in INDEX))
    check(engine(inputs, replace(request, k=5)), inputs, replace(request, k=5))


def test_hidden_keys_get_exactly_nothing(engine: Callable[..., Any]) -> None:
    for call in ("window", "blind-rows", "additive-mask", "everything", "sliding-cache-several"):
        inputs = CALLS[call]()
        n = inputs.n_queries
        every = torch.arange(n).expand(2, -1)
        rows = engine(inputs, Request(z=False, rows=every)).rows
        hidden = torch.as_tensor(~oracle.visible(inputs))
        assert bool((rows[hidden] == 0).all())
        lone = replace(inputs, v=torch.full_like(inputs.v, torch.nan))
        seen_by_any = torch.as_tensor(oracle.visible(inputs)).any(1).any(1)  # [batch, key]
        clean = inputs.v.masked_fill(~seen_by_any[:, None, :, None], 1e30)
        assert_close(engine(replace(lone, v=clean), Request()).z, oracle.z(inputs))


def test_inputs_are_left_as_they_were(engine: Callable[..., Any]) -> None:
    for call in CALLS:
        inputs = CALLS[call]()
        request = ask(inputs)
        tensors = {
            **{name: x for name, x in vars(inputs).items() if isinstance(x, Tensor)},
            **{name: x for name, x in vars(request).items() if isinstance(x, Tensor)},
        }
        before = {name: x.clone() for name, x in tensors.items()}
        engine(inputs, request)
        for name, x in tensors.items():
            assert torch.equal(x, before[name]), f"{call}: {name}"


def test_non_contiguous_inputs_give_the_same(engine: Callable[..., Any]) -> None:
    inputs = CALLS["grouped-causal"]()
    turned = {n: getattr(inputs, n).transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    request = ask(inputs)
    check(engine(replace(inputs, **turned), request), inputs, request)


# -- properties ------------------------------------------------------------------------------------


@st.composite
def calls(draw_: Any) -> AttentionInputs:
    kv, group = draw_(st.integers(1, 3)), draw_(st.integers(1, 3))
    n_queries, n_keys = draw_(st.integers(1, 9)), draw_(st.integers(1, 9))
    batch, seed = draw_(st.integers(1, 2)), draw_(st.integers(0, 1000))
    heads = kv * group
    fields: dict[str, Any] = {"causal": draw_(st.booleans())}
    fields["query_start"] = draw_(st.integers(0, 6))
    fields["key_start"] = draw_(st.integers(0, fields["query_start"]))
    fields["window"] = draw_(st.none() | st.integers(1, 5))
    fields["softcap"] = draw_(st.none() | st.sampled_from([0.5, 3.0]))
    fields["sinks"] = draw_(st.sampled_from([None, normal(heads, seed=seed)]))
    mask_heads = draw_(st.sampled_from([1, heads]))
    mask = coin(batch, mask_heads, n_queries, n_keys, p=draw_(st.sampled_from([0.2, 0.8])))
    kind = draw_(st.sampled_from(["none", "bool", "additive"]))
    if kind != "none":
        fields["mask"] = mask if kind == "bool" else additive(mask)
    return draw(
        heads, kv, n_queries, n_keys, batch=batch, d=draw_(st.integers(1, 5)),
        d_value=draw_(st.integers(1, 5)), seed=seed, **fields,
    )  # fmt: skip


@settings(max_examples=120)
@given(calls(), st.sampled_from([1, 700, 4 << 20]))
def test_any_call_equals_plain_formula(inputs: AttentionInputs, block_bytes: int) -> None:
    request = ask(inputs)
    check(blockwise(block_bytes)(inputs, request), inputs, request, ties=True)
    check(ENGINES["dense"](inputs, request), inputs, request, ties=True)


@settings(max_examples=60)
@given(calls())
def test_rows_sum_to_one_or_leave_the_rest_to_the_sink(inputs: AttentionInputs) -> None:
    every = torch.arange(inputs.n_queries).expand(inputs.q.shape[0], -1)
    result = ENGINES["blockwise"](inputs, Request(rows=every, statistics=("lse", "entropy", "max")))
    mass = result.rows.sum(-1).numpy()
    sighted = oracle.visible(inputs).any(-1)
    if inputs.sinks is None:
        np.testing.assert_allclose(mass, sighted.astype(float), atol=1e-5)
    else:
        sink = np.exp(oracle.array(inputs.sinks)[:, None] - oracle.array(result.statistics["lse"]))
        np.testing.assert_allclose(mass, 1 - sink, atol=1e-5)
    largest = result.statistics["max"].numpy()
    assert np.all(largest <= mass + 1e-6)
    if inputs.sinks is None:
        limit = np.log(np.maximum(oracle.visible(inputs).sum(-1), 1))
        assert np.all(result.statistics["entropy"].numpy() <= limit + 1e-5)
    assert np.all(result.statistics["entropy"].numpy() >= -1e-5)


@settings(max_examples=40)
@given(calls(), st.integers(1, 6000))
def test_block_size_changes_nothing(inputs: AttentionInputs, block_bytes: int) -> None:
    request = ask(inputs)
    whole = ENGINES["blockwise"](inputs, request)
    parts = blockwise(block_bytes)(inputs, request)
    assert_close(parts.z, whole.z, atol=2e-6)
    for name in NAMES:
        got, expected = parts.statistics[name], whole.statistics[name]
        if name in INDEX:
            same_keys(got, expected, oracle.pattern(inputs), name)
        else:
            assert_close(got, expected, atol=5e-6, what=name)


@settings(max_examples=40)
@given(calls(), st.randoms(use_true_random=False))
def test_permuting_groups_of_heads_permutes_the_results(inputs: AttentionInputs, rng: Any) -> None:
    kv, group = inputs.k.shape[1], inputs.group
    order = list(range(kv))
    rng.shuffle(order)
    heads = [g * group + member for g in order for member in range(group)]
    changes: dict[str, Any] = {
        "q": inputs.q[:, heads],
        "k": inputs.k[:, order],
        "v": inputs.v[:, order],
    }
    if inputs.sinks is not None:
        changes["sinks"] = inputs.sinks[heads]
    if inputs.mask is not None and inputs.mask.shape[1] > 1:
        changes["mask"] = inputs.mask[:, heads]
    request = ask(inputs)
    for engine in (ENGINES["dense"], blockwise(800)):
        plain, turned = engine(inputs, request), engine(replace(inputs, **changes), request)
        assert_close(turned.z, plain.z[:, heads], atol=1e-6)
        for name in NAMES:
            got, expected = turned.statistics[name], plain.statistics[name][:, heads]
            if name in INDEX:
                same_keys(got, expected, oracle.pattern(inputs)[:, heads], name)
            else:
                assert_close(got, expected, 1e-5, what=name)


@settings(max_examples=40)
@given(calls(), st.data())
def test_asking_for_some_heads_gives_what_asking_for_all_gives(
    inputs: AttentionInputs, data: Any
) -> None:
    n = inputs.q.shape[1]
    chosen = tuple(data.draw(st.permutations(range(n)))[: data.draw(st.integers(1, n))])
    z = data.draw(st.booleans())
    for engine in (ENGINES["dense"], ENGINES["blockwise"], blockwise(800)):
        some = engine(inputs, ask(inputs, heads=chosen, z=z))
        every = engine(inputs, ask(inputs))
        for name in NAMES:
            got, whole = some.statistics[name], every.statistics[name][:, list(chosen)]
            if name in INDEX:
                same_keys(got, whole, oracle.pattern(inputs)[:, list(chosen)], name)
            else:
                assert_close(got, whole, 1e-5, what=name)


# -- gradients -------------------------------------------------------------------------------------

SMOOTH = (
    "lse",
    "entropy",
    "target_mass",
    "max",
    "topk",
    "feature",
    "local_mass",
    "lag_mass",
    "mean_distance",
    "segment_z",
    "received",
    "block_map",
)
GRADIENT_CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 2},
    "softcap": {"softcap": 0.8},
    "mask": {"mask": coin(1, 1, 4, 4) | torch.eye(4, dtype=torch.bool)},
    "sinks": {"causal": True, "sinks": normal(4).double()},
    "blind": {"mask": blind(coin(1, 1, 4, 4), 1), "sinks": normal(4).double()},
}


@pytest.mark.parametrize("call", GRADIENT_CALLS)
@pytest.mark.parametrize("run", ["dense", "blockwise-few-rows"])
def test_gradients_equal_finite_differences(run: str, call: str) -> None:
    inputs = draw(4, 2, 4, batch=1, d=2, d_value=2, dtype=torch.float64, **GRADIENT_CALLS[call])
    names = SMOOTH
    if call == "blind":  # the mean distance of a row without keys is not a number
        names = tuple(name for name in SMOOTH if name != "mean_distance")
    request = ask(inputs, names, k=2, block=2)
    assert request.features is not None
    request = replace(request, features=request.features.double())

    def compute(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """A weighted sum of each statistic, so that every entry of its gradient counts."""
        result = RUNS[run](replace(inputs, q=q, k=k, v=v), request)
        values = [result.z, *(result.statistics[name] for name in names)]
        finite = [value.masked_fill(value.isinf(), 0.0) for value in values]
        return tuple(
            (value * normal(*value.shape, seed=at).double()).sum()
            for at, value in enumerate(finite)
        )

    leaves = tuple(getattr(inputs, n).clone().requires_grad_() for n in "qkv")
    assert torch.autograd.gradcheck(compute, leaves, atol=1e-6), ("z", *names)


def test_entropy_of_a_row_with_hidden_keys_has_a_finite_gradient(
    engine: Callable[..., Any],
) -> None:
    inputs = draw(causal=True)
    inputs = replace(inputs, q=inputs.q.clone().requires_grad_())
    engine(inputs, Request(statistics=("entropy",))).statistics["entropy"].sum().backward()
    assert bool(inputs.q.grad.isfinite().all())


def plain_loss(inputs: AttentionInputs, weights: dict[str, Tensor], targets: Tensor) -> Tensor:
    """The plain formula in torch, for its gradients."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
    s = inputs.q.double() @ k.transpose(-1, -2) * inputs.scaling
    s = s.masked_fill(torch.as_tensor(~oracle.visible(inputs)), -torch.inf)
    p = s.softmax(-1)
    picked = p.gather(-1, targets.clamp(min=0)[:, None, :, None].expand(-1, p.shape[1], -1, 1))
    values = {
        "z": p @ v,
        "lse": s.logsumexp(-1),
        "entropy": -torch.special.xlogy(p, p.clamp(min=1e-300)).sum(-1),
        "target_mass": picked[..., 0] * (targets >= 0)[:, None],
    }
    return sum((values[name] * weights[name]).sum() for name in values)  # type: ignore[return-value]


def test_gradients_equal_those_of_the_plain_formula(engine: Callable[..., Any]) -> None:
    inputs = draw(causal=True, window=7)
    leaves = {n: getattr(inputs, n).clone().requires_grad_() for n in "qkv"}
    inputs = replace(inputs, **leaves)
    request = ask(inputs, ("lse", "entropy", "target_mass"))
    weights = {
        "z": normal(2, 6, 13, 4, seed=1),
        **{name: normal(2, 6, 13, seed=2) for name in request.statistics},
    }
    assert request.targets is not None
    expected = torch.autograd.grad(plain_loss(inputs, weights, request.targets), leaves.values())
    result = engine(inputs, request)
    loss = (result.z * weights["z"]).sum()
    for name in request.statistics:
        loss = loss + (result.statistics[name] * weights[name]).sum()
    got = torch.autograd.grad(loss, leaves.values())
    for name, mine, theirs in zip("qkv", got, expected, strict=True):
        assert_close(mine, theirs, atol=2e-5, what=name)


@pytest.mark.parametrize("run", ["dense", "blockwise"])
@pytest.mark.parametrize("leaf", ["sinks", "position_bias"])
def test_gradients_reach_sinks_and_biases_that_alone_ask_for_them(run: str, leaf: str) -> None:
    fields = {"sinks": normal(4).double(), "position_bias": normal(1, 4, 4, 4).double()}
    inputs = draw(4, 2, 4, batch=1, d=2, causal=True, dtype=torch.float64, **fields)

    def compute(x: Tensor) -> tuple[Tensor, ...]:
        result = RUNS[run](replace(inputs, **{leaf: x}), Request(statistics=("lse", "entropy")))
        values = (result.z, result.statistics["lse"], result.statistics["entropy"])
        return tuple((value * normal(*value.shape).double()).sum() for value in values)

    assert torch.autograd.gradcheck(compute, (fields[leaf].clone().requires_grad_(),))


# -- edits -----------------------------------------------------------------------------------------


def _edit(seen: list[Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Depends on head, query row and key, so that any mix-up of them shows."""

    def edit(rows: Tensor, query_index: Tensor) -> Tensor:
        seen.append(rows)
        head = torch.arange(rows.shape[1])[:, None, None]
        key = torch.arange(rows.shape[3])
        return rows * (1 + 0.1 * head) + 0.01 * query_index[:, None, :, None] - 0.02 * key

    return edit


@pytest.mark.parametrize("heads", [None, (4, 1)])
@pytest.mark.parametrize("call", ["grouped-causal", "everything", "bool-mask", "decode-several"])
def test_edits_rewrite_scores_and_pattern(
    engine: Callable[..., Any], call: str, heads: tuple[int, ...] | None
) -> None:
    inputs = CALLS[call]()
    sinks = None if inputs.sinks is None else oracle.array(inputs.sinks)
    n = inputs.n_queries
    index = torch.arange(n).expand(2, -1)
    base = oracle.scores(inputs)
    seen: list[Tensor] = []
    edit = _edit(seen)
    edited = oracle.array(edit(torch.as_tensor(base), index))
    for sites in (("scores",), ("pattern",), ("scores", "pattern")):
        seen.clear()
        s = edited if "scores" in sites else base
        p = oracle.softmax(s, sinks)
        if "pattern" in sites:
            p = oracle.array(edit(torch.as_tensor(p), index))
        request = ask(inputs, heads=heads, **{f"edit_{site}": edit for site in sites})
        request = replace(request, rows=index)
        result = engine(inputs, request)
        kept = list(range(6)) if heads is None else list(heads)
        assert_close(result.z, oracle.z(inputs, p))
        assert_close(result.rows, p[:, kept])
        names = NAMES
        if "pattern" in sites:  # entropy and the rest are of weights below 0 too: no plain meaning
            names = tuple(n for n in NAMES if n not in ("entropy", *INDEX, *TOPK, "mean_distance"))
        expected = oracle.statistics(inputs, request, s, p)
        for name in names:
            assert_close(result.statistics[name], expected[name], 5e-5, 1e-5, what=name)


def test_edits_see_complete_rows_of_every_head_with_hidden_keys_at_minus_infinity(
    engine: Callable[..., Any],
) -> None:
    inputs = CALLS["everything"]()
    hidden = torch.as_tensor(~oracle.visible(inputs))
    rows_seen = torch.zeros(2, 13, dtype=torch.long)

    def look(rows: Tensor, query_index: Tensor) -> Tensor:
        assert rows.shape[:2] == (2, 6)
        assert rows.shape[3] == 13
        rows_seen.scatter_add_(1, query_index, torch.ones_like(query_index))
        index = query_index[:, None, :, None].expand_as(rows)
        assert torch.equal(rows == -torch.inf, hidden.gather(2, index))
        return rows

    plain = engine(inputs, Request())
    same = engine(inputs, Request(edit_scores=look, heads=(0,), statistics=("lse",)))
    assert bool((rows_seen == 1).all())
    assert_close(same.z, plain.z, atol=1e-6)


def test_column_statistics_are_those_without_a_query_axis() -> None:
    inputs = draw(queries=5, keys=9, causal=False)
    result = ENGINES["dense"](inputs, ask(inputs))
    without = {name for name, x in result.statistics.items() if x.shape[2] != 5}
    assert without == set(COLUMN_STATISTICS)
