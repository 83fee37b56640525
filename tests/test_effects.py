"""Effects: what goes into the table, is asked of it, and is read back."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest

from headlab.causal.effects import EFFECT_COLUMNS, Effects, effects_of
from headlab.errors import HeadError, OutputError, PlanError

KEYS = [{"layer": layer, "head": head} for layer in range(2) for head in range(2)]
VALUES = np.array([[1.0, 2.0], [0.0, -4.0], [3.0, 3.0], [1.0, 1.0]])
ONES, TWOS = np.ones(2), np.full(2, 2.0)


def made(keys=KEYS, values=VALUES, baseline=ONES, clean=TWOS, corrupted=ONES, seed=0) -> Effects:
    return effects_of(keys, values, baseline, clean, corrupted, {"did": "nothing"}, seed)


def test_heads_are_found_by_any_name_and_columns_make_maps():
    effects = made()
    assert effects.map("value").tolist() == [[1.5, -2.0], [3.0, 1.0]]
    assert effects.map().tolist() == [[0.5, -3.0], [2.0, 0.0]]
    for name in ("L1H0", "l1h0", " 1.0", (1, 0), (np.int64(1), np.int64(0))):
        assert effects.of(name)["effect"].tolist() == [2.0]
    assert effects.top(np.int64(1))[["layer", "head"]].to_numpy().tolist() == [[0, 1]]
    assert len(effects.top(0)) == 0


@pytest.mark.parametrize("head", ["foo", "1.0.0", "1." + "9" * 5000, "", 3, (1,), (1, 0.5), None])
def test_what_names_no_head_is_refused(head):
    with pytest.raises(HeadError, match="does not name a head"):
        made().of(head)


def test_heads_that_were_not_measured_are_refused():
    with pytest.raises(HeadError, match="no effect of head L9H9 among these of 4 places"):
        made().of((9, 9))
    layers = made([{"layer": at} for at in range(4)])
    assert layers.of((3, -1))["value"].tolist() == [1.0]
    with pytest.raises(HeadError, match="no effect of head L3H0"):
        layers.of("L3H0")


def test_maps_and_tops_that_do_not_exist_are_refused():
    for column in ("nope", "site", "layer", None, 3):
        with pytest.raises(OutputError, match="there is no map of"):
            made().map(column)
    with pytest.raises(OutputError, match="no effects here"):
        made([], np.zeros((0, 2))).map()
    for n in ("3", -1, 1.5, True, None):
        with pytest.raises(PlanError, match=r"n=.* must be a whole number of at least 0"):
            made().top(n)


def test_a_table_without_rows_is_one(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        effects = made([], np.zeros((0, 2)))
        again = Effects.load(effects.save(tmp_path / "none.json"))
    assert tuple(again.frame.columns) == EFFECT_COLUMNS
    assert again.values.shape == (0, 2)
    assert "0 interventions on 2 prompts" in repr(again)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": VALUES[:3]}, r"one row for each of 4 keys .* not of shape \[3, 2\]"),
        ({"values": VALUES[0]}, r"not of shape \[2\]"),
        ({"values": VALUES[:, :0]}, "at least one prompt"),
        ({"values": "many"}, "made of arrays of numbers"),
        ({"baseline": np.ones(3)}, r"baseline must be \[prompt\] of 2 prompts"),
        ({"clean": 1.0}, r"clean must be \[prompt\]"),
        ({"corrupted": np.ones((2, 1))}, r"corrupted must be \[prompt\]"),
        ({"clean": [1, math.nan]}, "clean is nan for prompt 1"),
        ({"values": np.where(VALUES == -4, np.nan, VALUES)}, "row 1 .layer 0, head 1. is nan for prompt 1"),
        ({"values": np.where(VALUES == 0, np.inf, VALUES)}, "row 1 .layer 0, head 1. is inf for prompt 0"),
        ({"keys": [*KEYS[:3], {"head": 1}]}, "key 3 must say its layer"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"seed": "x"}, "seed='x' must be a whole number"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        made(**changes)


def test_saved_effects_come_back(tmp_path):
    effects = made(seed=np.int64(3))
    again = Effects.load(effects.save(tmp_path / "effects.json"))
    assert again.frame.equals(effects.frame)
    for name in ("values", "baseline", "clean", "corrupted"):
        assert np.array_equal(getattr(again, name), getattr(effects, name))


def _changed(**changes) -> str:
    return json.dumps(json.loads(made().to_json()) | changes)


def _row(**changes) -> str:
    rows = json.loads(made().to_json())["effects"]
    rows[2] |= changes
    return _changed(effects=rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "JSONDecodeError"),
        ("[]", "holds no readable effects"),
        ("[" * 100_000, "nested too deep"),
        ('{"format": "other"}', "written as 'other'"),
        (_changed(values=VALUES[:3].tolist()), "4 effects, but values of 3"),
        (_changed(values=[[1.0]] * 4), "row 0 of 'values' is no list of 2 prompts"),
        (_changed(values=[[[1.0], 1.0]] * 4), "holds no readable effects"),
        (_changed(values=[["a", 1.0]] * 4), "could not convert"),
        (_changed(values=[[10**400, 1.0]] * 4), "holds no readable effects"),
        (_changed(baseline=[1.0] * 3), "'baseline' has 3 prompts, but 'clean' has 2"),
        (_changed(corrupted=[]), "'corrupted' has 0 prompts"),
        (_changed(clean=1.0), "'clean' is no list"),
        (_changed(about=[]), "'about' is no object"),
        (_changed(effects=[{"layer": 0}] * 4), "effect 0 must have exactly layer, head"),
        (_row(extra=1), "effect 2 must have exactly"),
        (_row(layer="1"), "'layer' of effect 2 is no whole number"),
        (_row(head=10**30), "'head' of effect 2 is no whole number from"),
        (_row(site=None), "'site' of effect 2 is no text"),
        (_row(effect="much"), "could not convert"),
    ],
)
def test_files_that_hold_no_effects_are_refused_in_one_sentence(tmp_path, text, message):
    path = tmp_path / "effects.json"
    path.write_text(text, "utf-8")
    with pytest.raises(OutputError, match=message) as caught:
        Effects.load(path)
    assert len(str(caught.value)) < 500
