"""Retrieval heads: trials of every kind, records of the user's, profiles, masking, and transformers' own decoding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from real_model import eager_smollm2, smollm2
from scipy.stats import spearmanr
from tiny_models import build

import headlab as hl
from headlab.attention import matched_sets
from headlab.roles import Measurement, Probing
from headlab.roles.retrieval import Retrieval, answered, copied_share, profiles, uniform_decode
from headlab.roles.retrieval_trials import (
    SCHEMA,
    SHORT_TRIALS,
    needle_recall,
    recall,
    recalled,
    short_trials,
    trials_of,
)
from headlab.tasks import Needle, NeedleTrial, RecordError, needle_trials, prose, read_records

FACT = {
    "fact": "The ferry to Perrow is pulled by two white oxen every morning.",
    "question": "What pulls the ferry to Perrow?",
    "answer": "two white oxen",
}
PROMPT = {
    "prompt": "The password for the archive is plum harvest for now. The password is",
    "answer": "plum harvest",
}


@cache
def tiny(family: str, **changes: Any) -> hl.Model:
    module = build(family, vocab_size=49152, **changes)
    return hl.load(module, tokenizer=smollm2().tokenizer)


def llama() -> hl.Model:
    return tiny("llama", max_position_embeddings=400)


def needles(n: int, length: int = 160, seed: int = 1) -> tuple[NeedleTrial, ...]:
    return needle_trials(smollm2().tokenizer, prose(), (length,), (0.1, 0.5, 0.9), n, seed)


pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")

# -- the run: transformers alone says the same ---------------------------------------------------


def decoded(
    module: Any, ids: tuple[int, ...], steps: int, ends: set[int]
) -> tuple[list[int], np.ndarray]:
    """Greedy decoding by transformers' eager attention: new tokens, and each predicting row's lowest argmax."""
    new: list[int] = []
    attended, given, kept = [], torch.tensor([ids]), None
    with torch.no_grad():
        while len(new) < steps and not (new and new[-1] in ends):
            output = module(given, past_key_values=kept, use_cache=True, output_attentions=True)
            kept = output.past_key_values
            rows = [layer[0, :, -1].numpy() for layer in output.attentions]
            attended.append([np.argmax(row, -1) for row in rows])  # numpy takes the first of equals
            new.append(int(output.logits[0, -1].argmax()))
            given = torch.tensor([new[-1:]])
    return new, np.array(attended).transpose(1, 2, 0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_trial_reads_the_rows_that_greedy_decoding_by_transformers_has(family: str):
    context = "n_positions" if family == "gpt2" else "max_position_embeddings"
    changes = {"vocab_size": 49152, context: 400}
    module = build(family, **changes)
    module.generation_config.repetition_penalty = 5.0  # of the model's own; an answer is a repeat
    model = hl.load(module, tokenizer=smollm2().tokenizer)
    twin = build(family, **changes)
    twin.set_attn_implementation("eager")
    for trial in needles(2):
        found = answered(Probing(model), [trial])[0]
        new, attended = decoded(twin, trial.ids, len(found["new"]), set())
        assert found["new"].tolist() == new
        assert np.array_equal(found["attended"], attended)
        assert found["seen"].all()


def test_a_layer_that_cannot_reach_the_answer_says_so():
    """Sliding windows, and attention in chunks, which no window describes."""
    trials = needles(6)
    last = [len(trial.ids) - 1 for trial in trials]
    sliding = tiny("gemma2", max_position_embeddings=400, sliding_window=60)
    for trial, row in zip(trials, last, strict=True):
        reach = row - trial.span[0] < 60
        assert answered(Probing(sliding), [trial])[0]["seen"].tolist() == [reach, True]
    chunked = tiny("llama4_text", max_position_embeddings=400, attention_chunk_size=128)
    kinds = chunked.module.config.layer_types
    assert set(kinds) == {"chunked_attention", "full_attention"}
    reached = [trial.span[0] // 128 == row // 128 for trial, row in zip(trials, last, strict=True)]
    assert any(reached)
    assert not all(reached)
    for trial, same in zip(trials, reached, strict=True):
        seen = answered(Probing(chunked), [trial])[0]["seen"].tolist()
        assert seen == [same if kind == "chunked_attention" else True for kind in kinds]


@cache
def real_trials() -> tuple[NeedleTrial, ...]:
    """Four needles that SmolLM2 recalls."""
    return tuple(needles(4, 256, seed)[at] for seed in (1, 2) for at in (0, 3))


@cache
def real_scores() -> np.ndarray:
    """Scores of SmolLM2's heads, [trial, layer, head]."""
    probing = Probing(smollm2())
    found = [answered(probing, [trial])[0] for trial in real_trials()]
    return np.stack(
        [
            copied_share(one["attended"], one["new"], trial)
            for one, trial in zip(found, real_trials(), strict=True)
        ]
    )


@pytest.mark.long
def test_scores_equal_those_of_step_by_step_decoding_in_transformers():
    """Own argmax, own matching of the span by its text, own count of copied tokens."""
    tokenizer = smollm2().tokenizer
    ends = {2, *tokenizer("\n", add_special_tokens=False)["input_ids"]}
    expected = np.zeros((4, 30, 9))
    for at, trial in enumerate(real_trials()):
        new, attended = decoded(eager_smollm2(), trial.ids, 24, ends)
        answer = tokenizer(" " + trial.answer, add_special_tokens=False)["input_ids"]
        places = [
            i for i in range(len(trial.ids)) if list(trial.ids[i : i + len(answer)]) == answer
        ]
        (start,) = places
        if trial.answer.isdigit():  # the space before a number is a token of its own
            start, answer = start + 1, answer[1:]
        for layer in range(30):
            for head in range(9):
                copied = {
                    int(key)
                    for key, token in zip(attended[layer, head], new, strict=True)
                    if start <= key < start + len(answer) and trial.ids[key] == token
                }
                expected[at, layer, head] = len(copied) / len(answer)
    ours = real_scores().mean(0)
    assert ours.max() > 0.5
    assert np.abs(ours - expected.mean(0)).max() < 1e-6
    assert spearmanr(ours.ravel(), expected.mean(0).ravel()).statistic >= 0.99


@pytest.mark.long
def test_ablating_the_top_heads_destroys_recall_and_random_heads_of_their_layers_do_not():
    model = smollm2()
    order = np.argsort(-real_scores().mean(0), axis=None, kind="stable")
    top = tuple(sorted(hl.Head(*divmod(int(at), 9)) for at in order[:8]))
    probing = Probing(model, n_prompts=8)
    before = needle_recall(probing)
    with model.edit(Retrieval().ablation(top)):
        without = needle_recall(probing)
    (random,) = matched_sets(probing.model.spec, top, 1, probing.seed)[0]
    with model.edit(Retrieval().ablation(random)):
        control = needle_recall(probing)
    assert before.mean() >= 50
    assert before.mean() - without.mean() >= 40
    assert before.mean() - without.mean() > 2 * (before.mean() - control.mean())


# -- masking -------------------------------------------------------------------------------------


def test_uniform_decode_makes_the_predicting_rows_even_and_leaves_the_prompt_alone():
    model = llama()
    prompts = [list(trial.ids[:n]) for trial, n in zip(needles(2), (90, 60), strict=True)]
    edit = uniform_decode([hl.Head(1, 2), hl.Head(0, 3)])
    with model.edit(edit):
        kept = model.generate(prompts, 5, keep=hl.keep.rows(queries="generated")).trace
        whole = model.generate(prompts[0], 1, keep=hl.keep.rows()).trace
    plain = model.generate(prompts[0], 1, keep=hl.keep.rows()).trace
    for at, prompt in enumerate(prompts):
        for step in range(5):
            keys = len(prompt) + step
            for layer, head in ((1, 2), (0, 3)):
                row = kept.rows[at, layer, head, step, :keys]
                assert torch.allclose(row, torch.full((keys,), 1 / keys), atol=1e-6)
            other = kept.rows[at, 1, 1, step, :keys]
            assert not torch.allclose(other, torch.full((keys,), 1 / keys), atol=1e-3)
    assert torch.equal(whole.rows[0, 0, :, :-1], plain.rows[0, 0, :, :-1])


def test_uniform_decode_is_a_query_of_zero_from_the_first_predicting_row_on():
    model = llama()
    ids = list(needles(1)[0].ids)
    with model.edit(uniform_decode([(1, 2), (0, 3)])):
        ours = model.generate(ids, 8)
    rows = range(len(ids) - 1, len(ids) + 8)
    with model.edit(hl.scale("1.2, 0.3", site="q", by=0, positions=rows)):
        assert torch.equal(ours.ids, model.generate(ids, 8).ids)
    with model.edit(hl.ablate("1.2, 0.3")):
        assert not torch.equal(ours.ids, model.generate(ids, 8).ids)


def test_the_ablation_is_named_in_what_the_role_says_of_itself():
    heads = [hl.Head(0, 1)]
    assert Retrieval().ablation(heads).site == "z"
    paper = Retrieval(ablation="uniform_decode")
    assert paper.ablation(heads).site == "q"
    assert "query" in paper.info.ablation
    assert "query" not in Retrieval.info.ablation


# -- the behaviour -------------------------------------------------------------------------------


def test_recall_of_a_batch_is_that_of_its_prompts_one_by_one():
    model, trials = llama(), needles(3, 140)
    words = model.text(model.generate(list(trials[1].ids), 24).ids[0], special=False).split()
    told = [word for word in words if word.isalpha()][:1]
    assert told
    known = NeedleTrial(trials[1].ids, (0, 1), f"{told[0]} zzzz", 140, 0.5)
    batch = recalled(model, (trials[0], known, trials[2]))
    alone = [recalled(model, (trial,))[0] for trial in (trials[0], known, trials[2])]
    assert batch.tolist() == alone
    assert batch[1] == 50


def test_the_behaviours_prompts_are_short_few_and_set_by_the_seed_alone():
    trials = short_trials(Probing(llama(), n_prompts=20))
    assert len(trials) == SHORT_TRIALS == 8
    assert sum(len(trial.ids) for trial in trials) < 1500
    again = short_trials(Probing(tiny("gpt2", n_positions=400), n_prompts=20))
    assert [trial.ids for trial in again] == [trial.ids for trial in trials]
    other = short_trials(Probing(llama(), n_prompts=20, seed=1))
    assert not {trial.ids for trial in other} & {trial.ids for trial in trials}
    values = needle_recall(Probing(llama(), n_prompts=3))
    assert values.shape == (3,)
    assert ((values >= 0) & (values <= 100)).all()


def test_the_behaviour_of_records_takes_the_shortest_of_them():
    long = {"prompt": "Walls and towers stood. " * 20 + PROMPT["prompt"], "answer": "plum harvest"}
    records = (long, *[PROMPT] * 7, {**PROMPT, "answer": "archive"})
    trials = short_trials(Probing(llama(), n_prompts=20, records=records))
    assert len(trials) == 8
    assert {trial.answer for trial in trials} == {"plum harvest", "archive"}
    assert max(len(trial.ids) for trial in trials) < 20
    wordy = {**FACT, "fact": "It is said, and said often, " * 20 + FACT["fact"]}
    (trial,) = short_trials(Probing(llama(), n_prompts=1, records=(wordy,)))
    assert len(trial.ids) > 160


def test_trials_run_together_answer_as_they_do_alone():
    model, trials = llama(), (*needles(3, 140), *needles(2, 200))
    keys: list[str] = []

    def remember(key: str, compute: Any) -> Any:
        keys.append(key)
        return compute()

    together = answered(Probing(model, remember=remember), trials)
    assert len(keys) < len(trials)  # prompts of about one length run together
    for trial, found in zip(trials, together, strict=True):
        alone = answered(Probing(model), [trial])[0]
        assert found["new"].tolist() == alone["new"].tolist()
        np.testing.assert_array_equal(found["attended"], alone["attended"])
        np.testing.assert_array_equal(found["seen"], alone["seen"])


# -- records of the user's -----------------------------------------------------------------------


def test_the_schemas_examples_fit_it_and_can_be_run():
    for example in SCHEMA["examples"]:
        records = read_records([example], SCHEMA, "retrieval")
        (trial,) = trials_of(Probing(llama(), records=records), (256,), (0.5,), 1)
        assert trial.answer == example["answer"]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"answer": "x"}, "'fact' is a required property"),
        ({"fact": "a b", "answer": "a"}, "'question' is a required property"),
        ({**FACT, "prompt": "a"}, "'fact' is not one of"),
        ({**FACT, "answer_start": 3}, "'answer_start' is not one of"),
        ({"prompt": "a"}, "'answer' is a required property"),
        ({**PROMPT, "answer_start": -1}, "answer_start"),
        ({**PROMPT, "answer": ""}, "answer"),
    ],
)
def test_records_of_another_shape_do_not_fit(record: Mapping[str, Any], said: str):
    with pytest.raises(RecordError, match=said):
        read_records([record], SCHEMA, "retrieval")


def test_facts_are_hidden_at_every_length_and_depth_and_prompts_taken_once():
    other = {**FACT, "fact": FACT["fact"].replace("Perrow", "Orlen")}
    probing = Probing(llama(), n_prompts=7, records=(FACT, PROMPT, other))
    trials = trials_of(probing, (200, 256), (0.2, 0.8), 7)
    whole, hidden = trials[0], trials[1:]
    assert whole.needle is None
    assert list(whole.ids) == smollm2().tokenizer(PROMPT["prompt"])["input_ids"]
    assert len(hidden) == 7
    assert {trial.needle for trial in hidden} == {Needle(**FACT), Needle(**other)}
    assert {(trial.length, trial.depth) for trial in hidden} == {
        (length, depth) for length in (200, 256) for depth in (0.2, 0.8)
    }
    many = tuple({**FACT, "fact": FACT["fact"].replace("Perrow", f"Perrow {i}")} for i in range(9))
    assert len(trials_of(Probing(llama(), records=many), (200,), (0.5,), 4)) == 9


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({**FACT, "answer": "three black oxen"}, "must contain its answer .* exactly once"),
        ({**FACT, "answer": "er"}, "must contain its answer .* exactly once"),
        ({**FACT, "answer": "wo white oxen"}, "straddles the edge"),
        ({**FACT, "fact": "On and on. " * 200 + FACT["fact"]}, "cannot hold the needle"),
        ({**PROMPT, "answer": "fig"}, "does not stand in the prompt"),
        ({**PROMPT, "answer": "password"}, "2 times; say which with answer_start"),
        ({**PROMPT, "answer": "plum harves"}, "straddles the edge"),
        ({**PROMPT, "answer": "."}, "holds no word"),
        ({**PROMPT, "prompt": "On and on. " * 200 + PROMPT["prompt"]}, "has a context of 400"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(bad: Mapping[str, Any], said: str):
    probing = Probing(llama(), n_prompts=2, records=(PROMPT, FACT, bad), remember=pytest.fail)
    with pytest.raises(RecordError, match=f"^record 2: .*{said}") as caught:
        Retrieval(lengths=(256,)).measure(probing)
    assert "\n" not in str(caught.value)


def test_an_answer_over_two_lines_is_not_cut_at_the_line_break():
    model = llama()
    line = torch.tensor(model.tokenizer("\n", add_special_tokens=False)["input_ids"][-1:])
    # The model is made to say nothing but line breaks.
    hook = model.module.lm_head.register_forward_hook(lambda *io: io[-1].index_fill(-1, line, 1e4))
    try:
        for answer, steps in (("red fox\nblue owl", 24), ("red fox blue owl", 1)):
            record = {"prompt": f"Say {answer} again: Say", "answer": answer}
            (trial,) = trials_of(Probing(model, records=(record,)), (), (), 1)
            assert len(answered(Probing(model), [trial])[0]["new"]) == steps
    finally:
        hook.remove()


# -- profiles ------------------------------------------------------------------------------------


def test_profiles_by_hand():
    def trial(length: int, depth: float) -> NeedleTrial:
        return NeedleTrial((1, 2), (0, 1), "a", length, depth, Needle("an a1 .", "q", "a1"))

    trials = [trial(256, 0.1), trial(256, 0.9), trial(512, 0.1), trial(512, 0.9)]
    nan = math.nan
    values = np.array([[1, 0.5, 0, nan], [1, 0, 0, nan], [0.5, 0.25, 0, 0], [1, 0, 0, 1]])
    found = profiles(values[:, None], trials)
    fired = found["activation_frequency"].values
    assert fired.tolist() == [[1, 0.5, 0, 0.5]]
    by_length, by_depth = found["score_by_length"], found["score_by_depth"]
    assert by_length.at.tolist() == [256, 512]
    np.testing.assert_array_equal(by_length.values[0].T, [[1, 0.25, 0, nan], [0.75, 0.125, 0, 0.5]])
    assert by_depth.at.tolist() == [0.1, 0.9]
    np.testing.assert_array_equal(by_depth.values[0].T, [[0.75, 0.375, 0, 0], [1, 0, 0, 1]])


def staged(records: tuple[Mapping[str, Any], ...], say: Any) -> tuple[Measurement, int]:
    """Retrieval measured from responses that are made up, and of how many; head 0.0 follows the answer."""
    asked: list[NeedleTrial] = []

    def answered(probing: Probing, trials: Any) -> list[dict[str, np.ndarray]]:
        asked.extend(trials)
        return [one(trial) for trial in trials]

    def one(trial: NeedleTrial) -> dict[str, np.ndarray]:
        start, stop = trial.span
        new = say(trial)
        attended = np.zeros((2, 6, len(new)), np.int32)
        steps = min(len(new), stop - start)
        attended[0, 0, :steps] = start + np.arange(steps)
        return {"new": np.array(new), "attended": attended, "seen": np.ones(2, bool)}

    with patch("headlab.roles.retrieval.answered", answered):
        role = Retrieval(lengths=(256,), depths=(0.5,))
        return role.measure(Probing(llama(), n_prompts=2, records=records)), len(asked)


def test_prompts_of_the_users_are_scored_like_needles_and_have_no_place_on_the_grid():
    found, asked = staged((PROMPT,) * 3, lambda trial: [*trial.ids[slice(*trial.span)], 30])
    assert asked == 3
    assert found.values.shape == (3, 2, 6)
    assert found.notes[-1, -1] == "3 of 3 needles recalled"
    assert set(found.details) == {"activation_frequency"}
    assert found.details["activation_frequency"].values.tolist() == [[1, 0, 0, 0, 0, 0], [0] * 6]
    assert found.looks[0].values[0, 0].tolist() == [1] * (len(found.looks[0].queries) - 1) + [0]


def test_a_probe_without_a_recalled_answer_is_not_measurable_for_records_too():
    found, _ = staged((FACT, PROMPT), lambda trial: [30, 30])
    assert np.isnan(found.values).all()
    assert found.notes[-1, -1].startswith("not measurable: the model recalled the needle in none")
    assert recall("", FACT["answer"]) == 0
