"""JuICE against two whole passes per token written here, in float64 and without caches, and JuNE against one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact_pair import Pair, pair, singles
from oracle import assert_close
from test_capture import ids_of, ragged
from test_generate import padded
from torch import Tensor

import headlab as hl
from headlab.errors import HeadError, PlanError
from headlab.steering import JuICE, JuNE
from headlab.steering.juice import best_heads, conflict_heads

FAMILIES = ["llama", "gpt2"]
UP, DOWN = "0.1, 1.2", "1.0"
A_L, A_S = 2.5, 1.5
FACTORS = {(0, 1): A_L, (1, 2): A_L, (1, 0): -A_S}
CLOSE = 1e-9


def juice(**changes: Any) -> JuICE:
    return JuICE(**({"enhance": UP, "suppress": DOWN, "a_l": A_L, "a_s": A_S} | changes))


def by_hand(this: Pair, ids: Tensor, factors: dict[tuple[int, int], float] = FACTORS) -> Any:
    """z of a whole first run, times its factor, added to z of a second."""
    first = this.values("z", ids)

    def change(z: Tensor, layer: int) -> Tensor:
        z = z.clone()
        for (where, head), factor in factors.items():
            if where == layer:
                z[:, :, head] += factor * first[layer][None, :, head]
        return z

    return change


def twice(this: Pair, ids: Tensor, **more: Any) -> Tensor:
    return this.logits(ids, z=by_hand(this, ids, **more))


def generated(this: Pair, ids: Tensor, new: int) -> list[int]:
    """Greedy tokens, two whole passes each."""
    start = len(ids)
    for _ in range(new):
        ids = torch.cat([ids, twice(this, ids)[-1:].argmax(-1)])
    return ids[start:].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_a_second_pass(family: str) -> None:
    this, ids = pair(family), ragged((9, 4, 6))
    model = this.model
    with hl.steer(model, juice()):
        logits = model.logits(ids)
        trace = model.trace(ids, keep=[hl.keep.statistics("entropy")])
        left = model.trace(ragged((9, 4, 6), padding="left"), logits="last").logits[:, 0]
    for at, row in enumerate(singles(ids)):
        expected = twice(this, row)
        assert_close(logits[at, : len(row)], expected, CLOSE)
        assert_close(trace.logits[at, : len(row)], expected, CLOSE)
        assert_close(left[at], expected[-1], CLOSE)
        assert float((expected - this.logits(row)).abs().max()) > 1e-2
        # Not what scaling in one run gives: an enhanced head of layer 0 changes those of layer 1.
        once = this.logits(row, z=scaled(FACTORS))
        assert float((expected - once).abs().max()) > 1e-3


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_is_two_whole_passes_token_for_token(family: str, padding: str) -> None:
    this, ids = pair(family), ragged((9, 4, 6), padding=padding)
    with hl.steer(this.model, juice()):
        batch = this.model.generate(ids, max_new_tokens=8, eos_token_id=None).ids.tolist()
        alone = [
            this.model.generate(row[None], max_new_tokens=8, eos_token_id=None).ids[0].tolist()
            for row in singles(ids)
        ]
    expected = [generated(this, row, 8) for row in singles(ids)]
    assert batch == alone == padded(expected, 8)
    plain = this.model.generate(ids, max_new_tokens=8, eos_token_id=None).ids.tolist()
    assert all(steered != before for steered, before in zip(batch, plain, strict=True))


def scaled(factors: dict[tuple[int, int], float]) -> Any:
    def change(z: Tensor, layer: int) -> Tensor:
        z = z.clone()
        for (where, head), factor in factors.items():
            if where == layer:
                z[:, :, head] *= 1 + factor
        return z

    return change


@pytest.mark.parametrize("family", FAMILIES)
def test_june_scales_heads_in_one_run(family: str) -> None:
    this, ids = pair(family), ragged((9, 4))
    with hl.steer(this.model, JuNE(UP, DOWN, A_L, A_S)):
        logits = this.model.logits(ids)
        new = this.model.generate(ids, max_new_tokens=5, eos_token_id=None).ids
    for at, row in enumerate(singles(ids)):
        assert_close(logits[at, : len(row)], this.logits(row, z=scaled(FACTORS)), CLOSE)
        assert new[at].tolist() == this.greedy(row, 5, lambda start: {"z": scaled(FACTORS)})


@pytest.mark.parametrize("lists", [{"enhance": "1.2"}, {"suppress": "0.1"}])
def test_for_one_head_the_two_are_the_same(lists: dict[str, str]) -> None:
    model, ids = pair("llama").model, ids_of()
    with hl.steer(model, JuNE(**lists, a_l=3.0, a_s=3.0)):
        one = model.logits(ids)
    with hl.steer(model, JuICE(**lists, a_l=3.0, a_s=3.0)):
        two = model.logits(ids)
    assert_close(one, two, CLOSE)
    assert float((one - model.logits(ids)).abs().max()) > 1e-2


def test_suppressing_once_takes_a_head_away() -> None:
    model, ids = pair("llama").model, ids_of()
    with hl.steer(model, JuICE(suppress="0.1", a_s=1.0)):
        suppressed = model.logits(ids)
    with model.edit(hl.ablate("0.1")):
        assert_close(suppressed, model.logits(ids), CLOSE)


def test_strength_sets_both_factors() -> None:
    assert juice().at(4.0) == juice(a_l=4.0, a_s=4.0)
    this, row = pair("llama"), ids_of(batch=1)[0]
    with hl.steer(this.model, juice().at(0.0)):
        assert_close(this.model.logits(row[None])[0], this.logits(row), CLOSE)


def test_the_first_run_is_of_the_model_without_other_steering() -> None:
    this, row = pair("llama"), ids_of(batch=1)[0]
    with this.model.edit(hl.scale("0.3, 0.1", "z", by=3.0)), hl.steer(this.model, juice()):
        got = this.model.logits(row[None])[0]
    add = by_hand(this, row)  # from a plain run

    def both(z: Tensor, layer: int) -> Tensor:
        z = z.clone()
        if layer == 0:
            z[:, :, [3, 1]] *= 3
        return add(z, layer)

    assert_close(got, this.logits(row, z=both), CLOSE)


def test_capture_inside_is_of_the_steered_run_and_once() -> None:
    this, row = pair("llama"), ids_of(batch=1)[0]
    runs = []
    handle = this.model.module.register_forward_hook(lambda *_: runs.append(1))
    try:
        with hl.steer(this.model, juice()):
            trace = this.model.trace(row[None], keep=[hl.keep.tensors("z")])
    finally:
        handle.remove()
    change, seen = by_hand(this, row), {}

    def look(z: Tensor, layer: int) -> Tensor:
        seen[layer] = change(z, layer)
        return seen[layer]

    this.logits(row, z=look)
    for layer in range(2):
        z = trace.tensor("z", layer)
        assert z.shape[:2] == (1, len(row))
        assert_close(z, seen[layer], CLOSE)
    assert len(runs) == 2


def test_nothing_is_left_of_it() -> None:
    model, ids = pair("llama").model, ids_of()
    module = model.module
    plain, hooks = model.logits(ids), (len(module._forward_hooks), len(module._forward_pre_hooks))

    def fail(z: Tensor, where: Any) -> Tensor:
        raise KeyError("in the second run")

    # In the second run only, since the first is without other edits.
    failing = hl.apply("1.0", fail, "z")
    with hl.steer(model, juice()):
        assert not torch.equal(model.logits(ids), plain)
        with model.edit(failing), pytest.raises(KeyError):
            model.logits(ids)
        steered = model.logits(ids)  # works again
        assert_close(steered[0], twice(pair("llama"), ids[0]), CLOSE)
        with pytest.raises(HeadError), hl.steer(model, juice(enhance="7.0")):
            pass
    with pytest.raises(KeyError), hl.steer(model, juice()), model.edit(failing):
        model.logits(ids)
    assert (len(module._forward_hooks), len(module._forward_pre_hooks)) == hooks
    assert torch.equal(model.logits(ids), plain)


def test_a_prompt_after_another_starts_anew() -> None:
    this, (one, other) = pair("llama"), (ids_of(batch=1), ids_of(6, 1, seed=5))
    with hl.steer(this.model, juice()):
        for ids in (one, other, one):
            new = this.model.generate(ids, max_new_tokens=4, eos_token_id=None).ids
            assert new[0].tolist() == generated(this, ids[0], 4)


def test_a_prompt_streamed_in_chunks_has_two_passes_of_each(tmp_path: Path) -> None:
    this, row = pair("llama"), ids_of(11, 1)[0]
    with hl.steer(this.model, juice()):
        trace = this.model.stream(row[None], hl.keep.statistics("entropy"), tmp_path, chunk=4)
    # What a stream keeps is float32.
    assert_close(trace.logits[0, -1], twice(this, row)[-1], 1e-6)


def test_a_cache_filled_before_is_refused() -> None:
    model, ids = pair("llama").model, ids_of()
    cache = model.module(ids, use_cache=True).past_key_values
    with hl.steer(model, juice()), pytest.raises(PlanError, match="from its beginning"):
        model.module(ids[:, :1], past_key_values=cache)


def test_what_it_cannot_do_is_refused_in_one_sentence() -> None:
    model = pair("llama").model
    with pytest.raises(PlanError, match="enhance"):
        JuICE()
    with pytest.raises(PlanError, match="a_l=nan"):
        juice(a_l=float("nan"))
    with pytest.raises(HeadError, match="L0H1 is to be enhanced and suppressed"):
        juice(suppress="0.1").factors(model)
    with pytest.raises(PlanError, match=r"hl\.steer"):
        juice().edits(model)
    with pytest.raises(PlanError, match="two lists"):
        juice().on("0.0")


def test_scores_of_heads_are_mean_rises_over_coefficients_and_items() -> None:
    this, targets, heads = pair("llama"), [11, 12], ((0, 4), (1, 3))
    prompts = {"clean": ids_of(5), "coherent": ragged((9, 7), seed=3)}
    coefficients = (1.0, 3.0, 30.0)
    frame = conflict_heads(
        this.model, prompts, targets, heads="0.4, 1.3", coefficients=coefficients
    )
    totals = {}
    for head in heads:
        row = frame[(frame["layer"] == head[0]) & (frame["head"] == head[1])].iloc[0]
        rises = {}
        for kind, ids in prompts.items():
            found = []
            for target, prompt in zip(targets, singles(ids), strict=True):
                before = this.logits(prompt)[-1].softmax(-1)[target]
                for c in coefficients:
                    steered = twice(this, prompt, factors={head: c})[-1].softmax(-1)
                    found.append(float(steered[target] - before))
            rises[kind] = np.mean(found)
            assert row[kind] == pytest.approx(rises[kind], abs=1e-6)
        assert row["total"] == pytest.approx(sum(rises.values()), abs=1e-6)
        assert bool(row["kept"]) == all(rise > 0 for rise in rises.values())
        totals[head] = (bool(row["kept"]), sum(rises.values()))
    order = [(int(a), int(b)) for a, b in zip(frame["layer"], frame["head"], strict=True)]
    assert order == sorted(heads, key=lambda head: totals[head], reverse=True)


def test_kept_heads_come_first_and_are_the_best() -> None:
    import pandas as pd

    rows = {"layer": [3, 1, 2], "head": [0, 5, 4], "total": [0.2, 0.1, 0.9]}
    frame = pd.DataFrame(rows | {"kept": [True, True, False]})
    assert best_heads(frame, 5) == ((3, 0), (1, 5))
    assert best_heads(frame, 1) == ((3, 0),)
    with pytest.raises(HeadError, match="every kind"):
        best_heads(frame.assign(kept=False))
    with pytest.raises(PlanError, match="coefficients"):
        conflict_heads(pair("llama").model, {"clean": ids_of()}, [5, 6], coefficients=[])
    with pytest.raises(PlanError, match="prompts"):
        conflict_heads(pair("llama").model, {}, [5, 6])
