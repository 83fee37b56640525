"""Split-softmax: the share of the marked keys becomes π^k, row by row, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from exact_pair import pair
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_by_hand import FAMILIES, Change, holds_everywhere, pattern_under
from test_capture import ragged
from torch import Tensor

import headlab as hl
from headlab.errors import PlanError, PromptError
from headlab.steering import SplitSoftmax
from headlab.steering.rewriting import raise_share

SPANS = [[(1, 4)], [(0, 3)], [(2, 4), (5, 6)]]


def by_formula(spans: list[tuple[int, int]], k: float, heads: dict[int, tuple[int, ...]]) -> Change:
    def change(a: Tensor, layer: int, head: int, query: int) -> Tensor:
        if head not in heads.get(layer, ()):
            return a
        inside = torch.zeros(len(a), dtype=torch.bool)
        for start, stop in spans:
            inside[start:stop] = True
        share = a[inside].sum()
        if share == 0 or inside.all():
            return a
        new = a.clone()
        new[inside] = a[inside] * share**k / share
        new[~inside] = a[~inside] * (1 - share**k) / (1 - share)
        return new

    return change


@pytest.mark.parametrize("family", FAMILIES)
def test_it_equals_the_formula_in_one_pass_in_batches_and_in_generation(family: str) -> None:
    heads = {0: (0, 2), 1: (1,)}
    method = SplitSoftmax(spans=SPANS, heads="0.0, 0.2, 1.1", k=0.4)
    holds_everywhere(family, method, lambda both, ids, row: by_formula(SPANS[row], 0.4, heads))


@settings(max_examples=12)
@given(seed=st.integers(0, 99), n=st.integers(2, 7), k=st.floats(0.05, 1), total=st.floats(0.2, 1))
def test_rows_keep_their_mass_and_the_share_is_raised(
    seed: int, n: int, k: float, total: float
) -> None:
    g = torch.Generator().manual_seed(seed)
    pattern = torch.rand(1, 2, 3, n, generator=g, dtype=torch.float64).softmax(-1) * total
    inside = torch.arange(n) < 1 + seed % (n - 1)
    new = raise_share(pattern, inside[None, None, None], k)
    torch.testing.assert_close(new.sum(-1), pattern.sum(-1))
    before, after = (x[..., inside].sum(-1) / total for x in (pattern, new))
    torch.testing.assert_close(after, before**k)
    for part in (inside, ~inside):  # in proportion
        ratio = new[..., part] / pattern[..., part]
        torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))


def test_rows_before_the_marked_text_and_k_of_1_change_nothing() -> None:
    both, ids = pair("llama"), ragged((9,))
    plain = both.model.trace(ids, keep=hl.keep.tensors("pattern")).tensor("pattern")
    same = pattern_under(both.model, SplitSoftmax(spans=[(3, 5)], k=1.0), ids)
    torch.testing.assert_close(same, plain, atol=1e-7, rtol=0)
    steered = pattern_under(both.model, SplitSoftmax(spans=[(3, 5)], k=0.3), ids)[:, 0]
    torch.testing.assert_close(steered[:, :, :3], plain[:, 0, :, :3], atol=1e-7, rtol=0)
    share = plain[:, 0, :, 5:, 3:5].sum(-1)
    torch.testing.assert_close(steered[:, :, 5:, 3:5].sum(-1), share**0.3, atol=1e-6, rtol=0)


def test_strength_and_spans_are_changed_on_a_copy() -> None:
    method = SplitSoftmax(spans=["a"], heads="0.1")
    assert method.at(0.3) == SplitSoftmax(spans=["a"], heads="0.1", k=0.3)
    assert method.marking([["b"]]).spans == [["b"]]


@pytest.mark.parametrize("k", [0, -1, 1.5, float("nan"), True, "a"])
def test_other_exponents_are_refused(k: object) -> None:
    with pytest.raises(PlanError, match="k="):
        SplitSoftmax(spans=["a"], k=k)  # type: ignore[arg-type]


def test_a_span_that_is_not_there_is_refused() -> None:
    model = pair("llama").model
    with (
        pytest.raises(PromptError, match="not in the prompt"),
        hl.steer(model, SplitSoftmax(spans=[(3, 50)])),
    ):
        model.logits(ragged((9,)))
    with pytest.raises(PlanError, match="spans="):
        SplitSoftmax(spans=[])
