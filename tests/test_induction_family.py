"""Induction in all its conventions, copying and their kin, against definitions worked out by hand or in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from real_model import planted_model
from test_roles import eager_patterns
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab.roles import Probing
from headlab.roles.copying import Copying
from headlab.roles.fuzzy_induction import FuzzyInduction
from headlab.roles.induction import Induction
from headlab.roles.natural_induction import (
    COMPLETED_PAIRS,
    NaturalInduction,
    completing,
    find_targets,
    row_masses,
)
from headlab.roles.repeats import SECOND_COPY
from headlab.tasks import RecordError, plain_tokens, repeated_tokens
from headlab.tasks.random_tokens import fuzzy_tokens, shuffled_apart

WORDS = [f"w{i}" for i in (5, 9, 7, 30, 12, 9, 44, 51, 23, 8, 60, 61)]  # w9 stands twice


@cache
def tiny(family: str, **changes: Any) -> hl.Model:
    return hl.load(build(family, **changes), tokenizer=tiny_tokenizer())


# -- conventions of induction ----------------------------------------------------------------------


def detection(ids: np.ndarray) -> np.ndarray:
    """[query, key]: the token before the key is the query's and stands before the query."""
    return np.array(
        [[0 < k <= q and ids[k - 1] == ids[q] for k in range(len(ids))] for q in range(len(ids))]
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("reduce", ["sum_over_targets", "mean_entries"])
def test_olssons_convention_equals_its_definition(family: str, reduce: Any):
    n = 23  # 93 plain words hold no more than 23 distinct ones four times
    found = Induction("olsson", reduce).measure(Probing(tiny(family), seed=4, n_prompts=3))
    prompts = repeated_tokens(plain_tokens(tiny_tokenizer(), 97), 3, n, 4, 1, 4)
    assert prompts.repeated.shape == (3, 1 + 4 * n)
    for which, measured in (("repeated", found.values), ("control", found.null)):
        a = eager_patterns(family, getattr(prompts, which))
        for at in range(3):
            targets = detection(
                prompts.repeated[at].numpy()
            )  # the control is read at the same places
            rows = range(1 + n, 1 + 4 * n)
            assert [int(targets[q].sum()) for q in rows] == [1] * n + [2] * n + [3] * n
            entries = (a[at] * targets)[..., 1 + n :, :].sum((-1, -2))
            wanted = entries / (3 * n if reduce == "sum_over_targets" else 6 * n)
            np.testing.assert_allclose(measured[at], wanted, atol=2e-5)


def test_targets_beyond_a_window_are_left_out_of_olssons_entries():
    """With 23 tokens, the last occurrence's follower lies 22 back, the next 45 back."""
    n, model = 23, tiny("mistral", sliding_window=30)
    found = Induction("olsson", "mean_entries").measure(Probing(model, n_prompts=2))
    prompts = repeated_tokens(plain_tokens(tiny_tokenizer(), 97), 2, n, 0, 1, 4)
    a = eager_patterns("mistral", prompts.repeated, sliding_window=30)
    rows = np.arange(1 + n, 1 + 4 * n)
    np.testing.assert_allclose(found.values, a[..., rows, rows - 22].mean(-1), atol=2e-5)
    blind = Induction("olsson").measure(Probing(tiny("mistral", sliding_window=22), n_prompts=2))
    assert np.isnan(blind.values).all()
    assert all(note.startswith("out of window") for note in blind.notes.values())


def test_transformer_lens_convention_equals_its_ratio_over_the_whole_pattern():
    found = Induction("transformer_lens").measure(Probing(tiny("llama"), seed=4, n_prompts=3))
    prompts = repeated_tokens(plain_tokens(tiny_tokenizer(), 97), 3, 46, 4, 1)
    a = eager_patterns("llama", prompts.repeated)
    for at in range(3):
        wanted = (a[at] * detection(prompts.repeated[at].numpy())).sum((-1, -2)) / 93
        np.testing.assert_allclose(found.values[at], wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("role", "low", "high"),
    [
        (Induction(), 0.95, 1),
        (Induction("olsson"), 0.95, 1),
        (Induction("olsson", "mean_entries"), 0.45, 0.5),  # 150 entries share the mass of 75 rows
        (Induction("transformer_lens"), 0.45, 0.5),
    ],
)
def test_every_convention_finds_the_planted_head(role: Induction, low: float, high: float):
    scores = hl.score(planted_model(), [role])
    assert scores.claimed("induction") == ["L2H1"]
    assert low < scores.ranked("induction").iloc[0]["score"] <= high


def test_a_planted_heads_attention_lies_on_the_follower_and_a_duplicate_heads_on_the_token():
    scores = hl.score(planted_model(), "induction,duplicate_token", n_prompts=6)
    for role, layer, head, peak in (("induction", 2, 1, 1), ("duplicate_token", 1, 3, 0)):
        detail = scores.detail(role, "attention_around_repeat")
        profile = detail[(detail["layer"] == layer) & (detail["head"] == head)]
        assert profile.loc[profile["value"].idxmax(), "at"] == peak
        assert profile["value"].max() > 0.9


# -- the user's own tokens -------------------------------------------------------------------------


def test_a_records_rows_are_those_of_tokens_that_stand_once():
    model = tiny("llama")
    records = ({"words": WORDS}, {"text": " ".join(WORDS[::-1])})
    found = Induction().measure(Probing(model, seed=2, records=records))
    assert found.values.shape[0] == 2
    x = np.array([int(word[1:]) for word in WORDS])
    ids = torch.tensor([[1, *x, *x]])
    assert found.looks[0].ids.tolist() == ids[0].tolist()
    a = eager_patterns("llama", ids)[0]
    rows = found.looks[0].queries
    own = [1 + 12 + i for i in range(1, 12) if x[i] != 9]
    assert set(rows) <= set(own)
    assert len(rows) >= 4
    wanted = np.mean([a[..., q, q - 11] for q in rows], 0)
    np.testing.assert_allclose(found.values[0], wanted, atol=2e-5)


@pytest.mark.parametrize("role", [Induction(), Induction("olsson"), FuzzyInduction(), Copying()])
@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "w5 w6 w7"}, "record 1: it has 3 tokens, but at least 8"),
        ({"words": ["w5"] * 200}, "record 1: it has 200 tokens, but the context has room for"),
    ],
)
def test_records_that_cannot_be_probed_are_refused_by_number(role: Any, record: Any, message: str):
    records = ({"words": WORDS}, record)
    with pytest.raises(RecordError, match=message) as caught:
        role.measure(Probing(tiny("llama"), records=records))
    assert "\n" not in str(caught.value)


def test_records_that_only_repeat_themselves_are_refused():
    records = ({"words": ["w5", "w6"] * 6},)
    with pytest.raises(RecordError, match="record 0: fewer than 4 of its tokens stand there once"):
        Induction().measure(Probing(tiny("llama"), records=records))
    with pytest.raises(RecordError, match="record 0: it has 2 different tokens"):
        Copying().measure(Probing(tiny("llama"), records=records))


def test_the_users_words_find_the_planted_head():
    rng = np.random.default_rng(0)
    words = planted_model().tokenizer.convert_ids_to_tokens(list(range(6, 120)))
    records = [{"words": rng.choice(words, 20, replace=False).tolist()} for _ in range(12)]
    heads = {"induction": "L2H1", "duplicate_token": "L1H3", "copying": "L2H1"}
    scores = hl.score(planted_model(), list(heads), data=dict.fromkeys(heads, records))
    assert (scores.frame["n"] == 12).all()
    assert {role: scores.claimed(role) for role in heads} == {r: [h] for r, h in heads.items()}


@pytest.mark.parametrize("role", [Induction, FuzzyInduction, Copying, NaturalInduction])
def test_schemas_accept_their_examples_and_nothing_else(role: Any):
    validator = Draft202012Validator(role.schema)
    validator.check_schema(role.schema)
    assert all(validator.is_valid(example) for example in role.schema["examples"])
    for wrong in ({}, {"text": ""}, {"text": "a", "words": ["a"]}, {"texts": "a"}, {"text": 3}):
        assert not validator.is_valid(wrong)


def test_shuffling_moves_every_token_that_can_move():
    x = np.array([3, 4, 5, 6, 3, 7, 8, 9])
    moved = shuffled_apart(x, 0)
    assert sorted(moved) == sorted(x)
    assert (moved != x).all()


# -- natural text ----------------------------------------------------------------------------------


def test_targets_are_followers_of_earlier_occurrences_of_rare_tokens():
    #               0  1  2  3  4  5  6  7  8  9 10 11 12 13
    ids = np.array([1, 5, 6, 7, 8, 5, 9, 4, 4, 5, 4, 4, 4, 7])
    found = find_targets(ids)
    # 5 comes again at 5 and 9, 7 at 13; 4 stands five times and is too common.
    assert found.rows.tolist() == [5, 9, 13]
    assert found.pairs.tolist() == [[0, 2], [1, 2], [1, 6], [2, 4]]
    assert found.last.tolist() == [1, 5, 3]
    near = find_targets(np.array([1, 5, 6, 5, 7, 8, 9, 10]))  # its follower is the token before
    assert len(near.rows) == 0


@pytest.mark.parametrize("window", [None, 9])
def test_masses_and_their_null_equal_loops_over_rows(window: int | None):
    rng = np.random.default_rng(0)
    ids = rng.integers(4, 30, 60)
    scores = torch.from_numpy(rng.normal(size=(3, 60, 60)))
    lag = np.arange(60)[:, None] - np.arange(60)
    hidden = (lag < 0) | (lag >= (window or 60))
    a = torch.softmax(scores.masked_fill(torch.from_numpy(hidden), -torch.inf), -1)
    found = find_targets(ids)
    own, null = row_masses(a, found)
    pattern = a.numpy()

    def follows(q: int, k: int) -> bool:
        return 1 < k <= q and ids[k - 1] == ids[q]

    for at, q in enumerate(found.rows):
        wanted = stand_in = 0.0
        used = 0
        for k in range(2, q - 2):
            places = [
                (r, r - (q - k))
                for r in range(max(1, q - 16), min(60, q + 17))
                if r != q and r - (q - k) >= 1 and not follows(r, r - (q - k))
            ]
            if follows(q, k) and not hidden[q, k] and places:
                wanted, used = wanted + pattern[:, q, k], used + 1
                stand_in = stand_in + np.mean([pattern[:, r, s] for r, s in places], 0)
        if not used:
            assert torch.isnan(own[:, at]).all()
            assert torch.isnan(null[:, at]).all()
        else:
            np.testing.assert_allclose(own[:, at], wanted, atol=1e-12)
            np.testing.assert_allclose(null[:, at], stand_in, atol=1e-12)
    assert bool(torch.isnan(own).any()) == (window is not None)


@pytest.fixture(scope="module")
def planted_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random words of the planted vocabulary, in which many come again."""
    folder = tmp_path_factory.mktemp("text")
    words = planted_model().tokenizer.convert_ids_to_tokens(list(range(6, 120)))
    drawn = np.random.default_rng(1).choice(words, 6000)
    (folder / "words.txt").write_text(" ".join(drawn), "utf-8")
    return folder


def test_the_planted_induction_head_and_no_other_does_induction_on_text(planted_text: Path):
    scores = hl.score(planted_model(), [NaturalInduction()], haystack=planted_text)
    assert scores.claimed("natural_induction") == ["L2H1"]
    row = scores.ranked("natural_induction").iloc[0]
    assert row["score"] > 0.9
    assert row["null_mean"] < 0.1


def test_an_evenly_attending_head_scores_its_null_on_text(planted_text: Path):
    module = build("gpt2", n_positions=300, vocab_size=128)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "c_attn" in name:
                parameter[..., :36] = 0  # queries come first
    model = hl.load(module, tokenizer=planted_model().tokenizer)
    frame = hl.score(model, [NaturalInduction()], n_prompts=6, haystack=planted_text).frame
    assert frame["score"].notna().all()
    assert frame["effect"].abs().max() < 2e-3


LONG, PLAIN = "w5 w6 " * 600, " ".join(f"w{i}" for i in range(4, 60))


@pytest.mark.parametrize(
    ("text", "message"), [(LONG, "its 1201 tokens are more than 128"), (PLAIN, "fewer than 4")]
)
def test_texts_without_repetition_and_too_long_ones_are_refused(text: str, message: str):
    with pytest.raises(RecordError, match=f"record 0: {message}"):
        NaturalInduction().measure(Probing(tiny("llama"), records=({"text": text},)))


def test_completed_pairs_are_found():
    assert completing(np.array([1, 5, 6, 7, 5, 6, 6, 5, 6])).tolist() == [5, 8]


# -- fuzzy -----------------------------------------------------------------------------------------


def test_fuzzy_prompts_repeat_but_for_every_kth_token():
    x, y, fresh = (np.arange(at, at + 10)[None] for at in (10, 30, 50))
    made = fuzzy_tokens(x, y, fresh, 4, 1)
    assert made.repeated[0].tolist() == [1, *range(10, 20), 10, 11, 12, 53, 14, 15, 16, 57, 18, 19]
    assert made.control[0].tolist() == [1, *range(10, 20), 30, 31, 32, 53, 34, 35, 36, 57, 38, 39]
    assert made.replaced.tolist() == [14, 18]
    assert fuzzy_tokens(x[:, :8], y[:, :8], fresh[:, :8], 4, 1).replaced.tolist() == [12]


def test_fuzzy_induction_equals_its_definition_on_transformers_patterns():
    found = FuzzyInduction().measure(Probing(tiny("llama"), seed=2, n_prompts=3))
    look = found.looks[0]
    n = 46
    a = eager_patterns("llama", torch.from_numpy(look.ids)[None])[0]
    rows = [1 + n + i for i in range(3, n - 1, 4)]
    assert look.queries.tolist() == rows
    seen = look.ids[: 1 + n].tolist()
    for q in rows:
        assert look.ids[q] not in seen
        assert look.ids[q + 1] == look.ids[q - (n - 1)]  # what the target predicts comes
    wanted = np.mean([a[..., q, q - (n - 1)] for q in rows], 0)
    np.testing.assert_allclose(found.values[0], wanted, atol=2e-5)


def test_a_strict_induction_head_is_not_a_fuzzy_one():
    assert hl.score(planted_model(), [FuzzyInduction()]).claimed("fuzzy_induction") == []


# -- behaviours ------------------------------------------------------------------------------------


def test_the_second_copy_is_predicted_by_the_planted_head_and_lost_with_it():
    probing = Probing(planted_model())
    whole = SECOND_COPY.measure(probing)
    assert whole.shape == (6,)
    with planted_model().edit(hl.ablate("L2H1", kind="zero")):
        without = SECOND_COPY.measure(probing)
    with planted_model().edit(hl.ablate("L2H0", kind="zero")):
        other = SECOND_COPY.measure(probing)
    assert (without < whole - 1).all()
    assert np.abs(other - whole).max() < 0.1


def test_behaviours_equal_transformers_own_log_probabilities():
    model, module = tiny("llama"), build("llama")
    records = ({"words": WORDS},)
    x = [int(word[1:]) for word in WORDS]
    with torch.no_grad():
        log_p = torch.log_softmax(module(torch.tensor([[1, *x, *x]])).logits[0].double(), -1)
    wanted = np.mean([float(log_p[12 + i, x[i]]) for i in range(1, 12)])
    found = SECOND_COPY.measure(Probing(model, records=records))
    np.testing.assert_allclose(found, [wanted], atol=1e-4)
    text = "w5 w6 w7 w8 w9 w5 w6 w30 w31 w7 w8 w32 w33 w34 w9 w5"
    ids = torch.tensor([[1, *(int(word[1:]) for word in text.split())]])
    with torch.no_grad():
        log_p = torch.log_softmax(module(ids).logits[0].double(), -1)
    wanted = np.mean([float(log_p[at - 1, ids[0, at]]) for at in (7, 11, 16)])
    found = COMPLETED_PAIRS.measure(Probing(model, records=({"text": text},)))
    np.testing.assert_allclose(found, [wanted], atol=1e-4)


@pytest.mark.parametrize("behaviour", [SECOND_COPY, COMPLETED_PAIRS])
def test_encoders_have_no_such_behaviour(behaviour: Any):
    assert np.isnan(behaviour.measure(Probing(tiny("bert")))).all()
