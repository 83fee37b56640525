"""ACT and sink removal: sinks found in the prompt, their weight taken and given away row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from exact_pair import Pair, pair
from rows_by_hand import FAMILIES, Change, holds_everywhere, pattern_under
from test_capture import ragged
from torch import Tensor

import headlab as hl
from headlab import planted
from headlab.errors import HeadError, PlanError, UnsupportedError
from headlab.steering import ACT, Behaviour, Case, SinkRemoval

BETA, THRESHOLD = 0.4, 0.2


def calibrated(both: Pair, ids: Tensor, row: int) -> Change:
    """The paper's steps: sinks by column means of the prompt's own pattern, unsteered; freed mass in proportion."""
    n = len(ids)
    patterns: dict[int, Tensor] = {}

    def look(x: Tensor, layer: int) -> Tensor:
        patterns[layer] = x[0].clone()
        return x

    both.logits(ids, pattern=look)
    sinks = {
        (layer, head): [
            key for key in range(1, n) if float(x[head, key:, key].sum()) / (n - key) > THRESHOLD
        ]
        for layer, x in patterns.items()
        for head in range(len(x))
    }
    assert any(sinks.values())

    def change(a: Tensor, layer: int, head: int, query: int) -> Tensor:
        inside = torch.zeros(len(a), dtype=torch.bool)
        inside[[key for key in sinks[layer, head] if key < len(a)]] = True
        freed = (1 - BETA) * a[inside].sum()
        new = a.clone()
        new[inside] = BETA * a[inside]
        new[~inside] = a[~inside] + freed * a[~inside] / a[~inside].sum()
        return new

    return change


@pytest.mark.parametrize("family", FAMILIES)
def test_it_equals_the_formula_in_one_pass_in_batches_and_in_generation(family: str) -> None:
    holds_everywhere(family, ACT("*.*", BETA, THRESHOLD), calibrated)


def test_sinks_are_what_they_are_called_and_never_the_first_token() -> None:
    both, ids = pair("llama"), ragged((9, 6))
    found = ACT(threshold=THRESHOLD).sinks(both.model, ids)
    patterns = both.model.trace(ids, keep=hl.keep.tensors("pattern")).tensor("pattern")
    for row, n in enumerate((9, 6)):
        for key in range(n):
            mean = patterns[row, :, :, key:n, key].sum(-1) / (n - key)
            assert torch.equal(found[row, :, :, key], (mean > THRESHOLD) & (key > 0))
    assert not found[1, :, :, 6:].any()
    assert found.any()


def test_sinks_are_those_of_the_unsteered_model_even_beneath_other_steering() -> None:
    model, ids = pair("llama").model, ragged((9, 7))
    method = ACT("1.*", BETA, THRESHOLD)
    sinks = method.sinks(model, ids)[:, 1]
    with model.edit(hl.scale("0.*", by=3.0)):
        moved = model.trace(ids, keep=hl.keep.tensors("pattern")).tensor("pattern", 1)
        pattern = pattern_under(model, method, ids)[:, 1]
    received = moved[0].sum(1) / (9 - torch.arange(9))
    assert not torch.equal(
        received[:, 1:] > THRESHOLD, sinks[0, :, 1:]
    )  # others, had it looked then
    for head, row in ((h, r) for h in range(6) for r in range(9)):
        inside = sinks[0, head, : row + 1]
        a = moved[0, head, row, : row + 1]
        expected = torch.where(
            inside, BETA * a, a * (1 - BETA * a[inside].sum()) / a[~inside].sum()
        )
        torch.testing.assert_close(pattern[0, head, row, : row + 1], expected, atol=1e-6, rtol=0)


def test_beta_of_1_changes_nothing_and_rows_keep_their_mass() -> None:
    model, ids = pair("llama").model, ragged((9,))
    plain = model.trace(ids, keep=hl.keep.tensors("pattern")).tensor("pattern")
    same = pattern_under(model, ACT("*.*", 1.0, THRESHOLD), ids)
    torch.testing.assert_close(same, plain, atol=1e-7, rtol=0)
    steered = pattern_under(model, ACT("*.*", 0.0, THRESHOLD), ids)
    torch.testing.assert_close(steered.sum(-1), plain.sum(-1), atol=1e-6, rtol=0)
    sinks = ACT(threshold=THRESHOLD).sinks(model, ids)
    assert float(steered[sinks[:, :, :, None].expand_as(steered)].abs().max()) == 0


def test_a_planted_sink_elsewhere_than_at_the_first_token_is_calibrated() -> None:
    made = planted.model("llama", {"L0H2": "sink"}, n_layers=2, n_heads=4, max_context=64)
    model = hl.load(made.module, tokenizer=made.tokenizer)
    bos = model.bos
    assert bos is not None
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 60, (1, 20), generator=g)
    ids[0, 0], ids[0, 6] = bos, bos  # the planted head follows a second one too
    found = ACT().sinks(model, ids)[0]
    assert found[0, 2].nonzero().flatten().tolist() == [6]
    alone = ids.clone()
    alone[0, 6] = 11
    assert not ACT().sinks(model, alone)[0, 0, 2].any()
    steered = pattern_under(model, ACT("L0H2", beta=0.0), ids)[0, 0, 2]
    assert float(steered[8:, 6].max()) == 0
    assert float(steered[8:, 0].min()) > 0.9


def test_fit_keeps_the_heads_that_help() -> None:
    both, ids = pair("llama"), ragged((9, 9, 9, 9))
    cases = tuple(Case(tuple(row.tolist())) for row in ids)

    def measure(model: hl.Model, given: Any) -> Any:
        rows = [list(case.prompt) for case in given]
        return model.logits(rows)[:, -1, 7].numpy()

    behaviour = Behaviour("token 7", "its logit", cases, measure)
    tried = [(1, head) for head in range(6)]
    before = measure(both.model, cases)
    better = []
    for layer, head in tried:
        with hl.steer(both.model, ACT([(layer, head)], BETA, THRESHOLD)):
            if float((measure(both.model, cases) - before).mean()) > 0:
                better.append((layer, head))
    assert 0 < len(better) < len(tried)
    fitted = ACT.fit(both.model, behaviour, heads="1.*", beta=BETA, threshold=THRESHOLD)
    assert [tuple(head) for head in fitted.heads] == better
    nothing = Behaviour("nothing", "0", cases, lambda model, given: [0.0] * len(given))
    with pytest.raises(PlanError, match="none of 6 heads"):
        ACT.fit(both.model, nothing, heads="1.*")


def test_what_is_no_calibration_is_refused(lab: Callable[..., Any]) -> None:
    model = pair("llama").model
    for wrong in ({"beta": 1.5}, {"beta": -0.1}, {"threshold": 0}, {"threshold": float("nan")}):
        with pytest.raises(PlanError, match=next(iter(wrong))):
            ACT(**wrong)
    with pytest.raises(HeadError), hl.steer(model, ACT("9.0")):
        pass
    with pytest.raises(PlanError, match=r"hl\.steer"):
        ACT().edits(model)
    with pytest.raises(PlanError, match="whole prompts"), hl.steer(model, ACT("*.*")):
        model.module(torch.randint(4, 90, (1, 5)))
    with pytest.raises(UnsupportedError, match="decoder-only"), hl.steer(lab("t5"), ACT("0.0")):
        pass
    assert not model.edited


# -- sink removal ------------------------------------------------------------------------------------------------------

GIVEN = [[(3, 5)], [(1, 3)], [(2, 4)]]


def removed(to: str, positions: tuple[int, ...], p: float, row: int) -> Change:
    def change(a: Tensor, layer: int, head: int, query: int) -> Tensor:
        at = torch.arange(len(a))
        sinks = torch.isin(at, torch.tensor(positions))
        if to == "row":
            a = torch.where(sinks, p * a, a)
            return a / a.sum()
        target = ~sinks
        if to == "marked":
            start, stop = GIVEN[row][0]
            target = target & (at >= start) & (at < stop)
        if a[target].sum() == 0:
            return a
        freed = (1 - p) * a[sinks].sum()
        new = torch.where(sinks, p * a, a)
        new[target] += freed * a[target] / a[target].sum()
        return new

    return change


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("to", ["row", "others", "marked"])
def test_sink_removal_equals_the_formula(family: str, to: str) -> None:
    method = SinkRemoval("*.*", 0.3, (0, 2), GIVEN if to == "marked" else to)
    holds_everywhere(family, method, lambda both, ids, row: removed(to, (0, 2), 0.3, row))


def test_a_number_of_sinks_means_so_many_first_tokens_wherever_padding_is() -> None:
    model, ids = pair("llama").model, ragged((9, 6))
    with hl.steer(model, SinkRemoval(sinks=2, p=0.2)):
        several = model.logits(ids)
    with hl.steer(model, SinkRemoval(sinks=(0, 1), p=0.2)):
        named = model.logits(ids)
    assert torch.equal(several[ids >= 0], named[ids >= 0])
    with hl.steer(model, SinkRemoval(p=1.0)):
        same = model.logits(ids)
    torch.testing.assert_close(same[ids >= 0], model.logits(ids)[ids >= 0], atol=1e-6, rtol=0)
    added = torch.zeros(9)
    added[0] = math.log(0.2)
    with model.edit(hl.add("*.*", added, "bias")):
        one = model.logits(ids[:1])
    with hl.steer(model, SinkRemoval(p=0.2)):
        torch.testing.assert_close(model.logits(ids[:1]), one, atol=1e-6, rtol=0)


def test_what_is_no_removal_is_refused() -> None:
    wrong = [
        (partial(SinkRemoval, p=0), "p=0"),
        (partial(SinkRemoval, p=2), "p=2"),
        (partial(SinkRemoval, to="nowhere"), "to="),
        (partial(SinkRemoval, to=[]), "spans="),
        (partial(SinkRemoval, sinks=0), "sinks="),
        (partial(SinkRemoval, sinks=(-1,)), "sinks="),
        (partial(SinkRemoval, sinks=()), "sinks="),
    ]
    for make, said in wrong:
        with pytest.raises(PlanError, match=said):
            make()
    assert SinkRemoval(to=["a"]).marking(["b"]).to == ["b"]
    assert SinkRemoval().marking(["b"]) == SinkRemoval()
