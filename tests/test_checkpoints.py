"""The same heads at several checkpoints: tidy, resumable, masked and not."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab.causal.circuits.checkpoints import over_checkpoints
from headlab.causal.circuits.circuit import Circuit
from headlab.errors import HeadError, PlanError, PromptError

PROMPTS = torch.randint(4, 97, (2, 5), generator=torch.Generator().manual_seed(0))
REVISIONS = ["step0", "step512", "main"]


@cache
def load(revision: str) -> hl.Model:
    return hl.load(build("gpt2", seed=REVISIONS.index(revision)), tokenizer=tiny_tokenizer())


def norms(model, ids):
    """Mean norm of each head's z: easy to compute elsewhere."""
    z = model.trace(ids, keep=hl.keep.tensors("z")).tensor("z")  # [batch, layer, position, head, d]
    return {"norm": z.norm(dim=-1).mean((0, 2)), "first": z[0, :, 0].norm(dim=-1).numpy()}


def test_every_checkpoint_gives_every_head_a_row_with_its_score():
    told: list[str] = []
    table = over_checkpoints(load, REVISIONS, norms, PROMPTS, tell=told.append)
    assert len(table) == 3 * 2 * 6
    assert table["step"].tolist()[::12] == pytest.approx([0, 512, np.nan], nan_ok=True)
    for row in table.sample(10, random_state=0).to_dict("records"):
        hand = norms(load(row["revision"]), PROMPTS)[row["measure"]][row["layer"], row["head"]]
        assert row["score"] == pytest.approx(float(hand), rel=1e-6)
    assert table["score"].nunique() == 36  # the checkpoints do differ
    assert told[1] == "2 of 3 checkpoints: step512"
    assert "masked" not in table


def test_masked_scores_stand_beside_unmasked_ones():
    def circuit(model, ids):
        scores = {
            (at, head): float(s)
            for at, row in enumerate(norms(model, ids)["norm"])
            for head, s in enumerate(row)
        }
        return Circuit.of_heads(model, scores).top(2)

    table = over_checkpoints(load, REVISIONS, norms, PROMPTS, circuit=circuit)
    for _, part in table[table["measure"] == "norm"].groupby("revision"):
        best = part.sort_values("score").tail(2).index
        assert set(part[part["in_circuit"]].index) == set(best)
        assert part.loc[best, "masked"].tolist() == part.loc[best, "score"].tolist()
        assert part.drop(index=best)["masked"].isna().all()
        assert part["score"].notna().all()
    named = over_checkpoints(load, ["main"], norms, PROMPTS, circuit=lambda *_: [hl.Head(1, 2)])
    assert named[named["in_circuit"]][["layer", "head"]].drop_duplicates().values.tolist() == [
        [1, 2]
    ]


@pytest.mark.parametrize("given", ["1.2", ["L1H2"], {(1, np.int64(2))}, ((1, 2),), (1, 2)])
def test_heads_of_the_circuit_go_by_any_name(given):
    table = over_checkpoints(load, ["main"], norms, PROMPTS, circuit=lambda *_: given)
    inside = table[table["in_circuit"]][["layer", "head"]].drop_duplicates()
    assert inside.to_numpy().tolist() == [[1, 2]]


def test_heads_that_do_not_exist_are_in_no_circuit():
    for given in ([(0, -1)], [(9, 9)], ["L0H9"]):
        with pytest.raises(HeadError, match="does not exist"):
            over_checkpoints(load, ["main"], norms, PROMPTS, circuit=lambda *_, g=given: g)
    for given in (None, 5, ["first"], [(0,)]):
        with pytest.raises(HeadError):
            over_checkpoints(load, ["main"], norms, PROMPTS, circuit=lambda *_, g=given: g)
    other = Circuit("heads", {"L0H0": 1.0}, "other", "", (1, 1))
    with pytest.raises(PlanError, match="found in other with 2 heads in 2 layers"):
        over_checkpoints(load, ["main"], norms, PROMPTS, circuit=lambda *_: other)
    none = over_checkpoints(load, ["main"], norms, PROMPTS, circuit=lambda *_: ())
    assert not none["in_circuit"].any()


def test_finished_checkpoints_are_not_loaded_again(tmp_path):
    loaded: list[str] = []

    def counting(revision):
        loaded.append(revision)
        if revision == "main" and len(loaded) == 3:
            raise KeyboardInterrupt
        return load(revision)

    with pytest.raises(KeyboardInterrupt):
        over_checkpoints(counting, REVISIONS, norms, PROMPTS, name="norms", out=tmp_path)
    table = over_checkpoints(counting, REVISIONS, norms, PROMPTS, name="norms", out=tmp_path)
    assert loaded == [*REVISIONS, "main"]
    assert table.equals(over_checkpoints(load, REVISIONS, norms, PROMPTS))
    over_checkpoints(counting, ["step0"], norms, PROMPTS[:1], name="norms", out=tmp_path)
    assert loaded[-1] == "step0"  # other prompts, other numbers


def test_checkpoints_must_agree_on_the_tokens():
    def other(revision):
        size = 50 if revision == "main" else 97
        return hl.load(build("gpt2"), tokenizer=tiny_tokenizer(size))

    with pytest.raises(
        PromptError, match="'main' turns the prompts into other tokens than 'step0'"
    ):
        over_checkpoints(other, ["step0", "main"], norms, "w5 w6 w60")


def test_bad_input_is_named(tmp_path):
    for arguments, options, message in [
        ((load, [], norms, PROMPTS), {}, "at least one checkpoint"),
        ((load, ["main", "main"], norms, PROMPTS), {}, "each named once"),
        ((load, REVISIONS, norms, PROMPTS), {"out": tmp_path}, "out= needs name="),
        (
            (load, REVISIONS, lambda *_: np.ones((2, 3)), PROMPTS),
            {},
            "scores \\[layer, head\\] by name",
        ),
        (
            (load, REVISIONS, lambda *_: {"a": np.ones(3)}, PROMPTS),
            {},
            "'a' of shape \\[3\\] at 'step0'",
        ),
    ]:
        with pytest.raises(PlanError, match=message):
            over_checkpoints(*arguments, **options)
