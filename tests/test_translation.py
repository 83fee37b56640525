"""Translation and language heads by hand in float64; sentences, prompts and what counts as translating."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from exact_pair import Pair, pair
from oracle import assert_close
from torch import Tensor

import headlab as hl
from headlab.errors import HeadError, PlanError, PromptError
from headlab.steering import subtask_effects, subtask_vectors
from headlab.steering.behaviours.translation import translation
from headlab.tasks import Translation, translations
from headlab.tasks.translations import LANGUAGES, SENTENCES

FAMILIES = ["llama", "gpt2"]
CHANGED = {"meaning": "other_sentence", "language": "other_language"}


def words(*ids: int) -> str:
    return " ".join(f"w{i}" for i in ids)


#: Prompts, answers and their like in words of the tiny tokenizer, of all sorts of lengths.
ITEMS = (
    Translation(
        words(5, 9, 30, 31, 12), words(5, 9, 30, 31, 44), words(5, 9, 70, 12), words(30, 31),
        " " + words(50, 51, 52), " " + words(60), " " + words(53, 54), "French",
    ),
    Translation(
        words(6, 22, 12), words(6, 22, 45), words(6, 80, 81, 82, 12), words(22),
        " " + words(55), " " + words(61, 62), " " + words(56, 57, 58), "German",
    ),
)  # fmt: skip


def ids_of(this: Pair, text: str) -> Tensor:
    return this.model.tokens(text)[0]


def told(this: Pair, prompt: str, answer: str, **rewrites: object) -> float:
    """Mean log-probability of an answer's tokens behind a prompt, in one pass of the twin."""
    start, whole = len(ids_of(this, prompt)), ids_of(this, prompt + answer)
    logs = this.logits(whole, **rewrites).log_softmax(-1)
    return float(np.mean([logs[at - 1, whole[at]] for at in range(start, len(whole))]))


# -- finding heads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("subtask", CHANGED)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_effect_is_what_z_of_the_whole_prompt_restores(family: str, subtask: str) -> None:
    this, heads = pair(family), ((0, 1), (1, 2))
    found = subtask_effects(this.model, ITEMS, subtask, "0.1, 1.2")  # type: ignore[arg-type]
    for at, (layer, head) in enumerate(heads):
        for number, item in enumerate(ITEMS):
            changed = getattr(item, CHANGED[subtask])
            n = len(ids_of(this, item.answer))
            z = this.values("z", ids_of(this, item.prompt + item.answer))[layer][-n - 1 : -1, head]

            def put(x: Tensor, where: int, z: Tensor = z, n: int = n) -> Tensor:
                x = x.clone()
                if where == layer:  # noqa: B023
                    x[:, -n - 1 : -1, head] = z  # noqa: B023
                return x

            plain = told(this, changed, item.answer)
            restored = told(this, changed, item.answer, z=put)
            assert found.values[at, number] == pytest.approx(restored, abs=1e-6)
            assert found.baseline[number] == pytest.approx(plain, abs=1e-6)
            assert found.clean[number] == pytest.approx(
                told(this, item.prompt, item.answer), abs=1e-6
            )
            assert abs(restored - plain) > 1e-4
    effects = (found.values - found.baseline).mean(1)
    assert found.frame["effect"].to_numpy() == pytest.approx(effects)
    assert list(zip(found.frame["layer"], found.frame["head"], strict=True)) == list(heads)


def test_nothing_is_restored_where_nothing_was_changed() -> None:
    model = pair("llama").model
    same = [replace(item, other_language=item.prompt) for item in ITEMS]
    found = subtask_effects(model, same, "language")
    assert np.abs(found.values - found.baseline).max() < 1e-6
    assert found.baseline == pytest.approx(found.clean)


def test_heads_are_scored_from_the_plain_model_where_it_is_steered() -> None:
    model = pair("llama").model
    found = subtask_effects(model, ITEMS, "meaning", "1.2")
    with model.edit(hl.scale("1.2", "z", by=0.0)):  # put in after it, the plain z stands
        steered = subtask_effects(model, ITEMS, "meaning", "1.2")
    assert steered.values == pytest.approx(found.values, abs=1e-6)
    assert np.abs(steered.baseline - found.baseline).max() > 1e-4


@pytest.mark.parametrize("subtask", CHANGED)
def test_vectors_are_differences_of_mean_z_at_last_tokens(subtask: str) -> None:
    this = pair("llama")
    method = subtask_vectors(this.model, ITEMS, subtask, "0.1, 1.2", factor=2.0)  # type: ignore[arg-type]
    expected = []
    for layer, head in ((0, 1), (1, 2)):
        right, wrong = (
            torch.stack(
                [this.values("z", ids_of(this, getattr(i, name)))[layer][-1, head] for i in ITEMS]
            )
            for name in ("prompt", CHANGED[subtask])
        )
        expected.append(right.mean(0) - wrong.mean(0))
    assert_close(method.vectors, torch.stack(expected), 1e-5)
    assert (method.factor, method.rows) == (2.0, "from_end")


def test_bad_input_is_refused_in_one_sentence() -> None:
    model = pair("llama").model
    for call in (subtask_effects, lambda *args: subtask_vectors(*args, "0.0")):
        with pytest.raises(PlanError, match="'meaning' or 'language'"):
            call(model, ITEMS, "style")
        with pytest.raises(PlanError, match="needs translations"):
            call(model, [], "meaning")
    with pytest.raises(HeadError, match="9"):
        subtask_effects(model, ITEMS, "meaning", "9.9")
    with pytest.raises(PlanError, match="what='style'"):
        translation(ITEMS, "style")  # type: ignore[arg-type]


# -- what counts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bare", [False, True])
def test_translating_is_measured_whole_and_in_halves(bare: bool) -> None:
    this = pair("gpt2")
    for what, foil in (("whole", None), ("meaning", "same_language"), ("language", "same_meaning")):
        values = translation(ITEMS, what, bare=bare).values(this.model, None)  # type: ignore[arg-type]
        for value, item in zip(values, ITEMS, strict=True):
            prompt = item.bare if bare else item.prompt
            expected = told(this, prompt, f" {item.answer.strip()}")
            if foil is not None:
                expected -= told(this, prompt, f" {getattr(item, foil).strip()}")
            assert value == pytest.approx(expected, abs=1e-5)


def test_steering_acts_where_the_answer_is_predicted_and_not_before() -> None:
    this = pair("llama")
    method = subtask_vectors(this.model, ITEMS, "language", "0.1, 1.2", factor=3.0)
    values = translation(ITEMS).values(this.model, method)
    for value, item in zip(values, ITEMS, strict=True):
        start = len(ids_of(this, item.prompt))

        def push(z: Tensor, layer: int, start: int = start) -> Tensor:
            z = z.clone()
            z[:, start - 1 :, (1, 2)[layer]] += 3 * method.vectors[layer].double()
            return z

        steered = told(this, item.prompt, item.answer, z=push)
        assert value == pytest.approx(steered, abs=1e-5)
        assert abs(steered - told(this, item.prompt, item.answer)) > 1e-3


def test_a_bare_sentence_is_followed_by_a_line_break_and_no_space() -> None:
    (item,) = translations(1, language="French")
    (case,) = translation([item], "meaning", bare=True).cases
    english = next(english for english, french, *_ in SENTENCES if french == item.answer.strip())
    assert case.prompt == f"{english}\n"
    assert case.answer == item.answer.strip()
    assert case.foil == item.same_language.strip()
    (case,) = translation([item]).cases
    assert (case.prompt, case.answer, case.foil) == (item.prompt, item.answer, "")


# -- sentences and prompts -------------------------------------------------------------------------


def spelled(text: str) -> tuple[list[list[str]], list[str]]:
    """Blocks of a prompt as lines, and its tags."""
    blocks = [block.split("\n") for block in text.split("\n\n")]
    return blocks, [block[1].partition(":")[0] for block in blocks]


def test_sentences_are_all_different_in_every_language() -> None:
    for column in zip(*SENTENCES, strict=True):
        assert len(set(column)) == len(SENTENCES)
    assert all(len({*sentence}) == 4 for sentence in SENTENCES)
    assert all(text == text.strip() for sentence in SENTENCES for text in sentence)


def test_prompts_are_right_and_their_like_differ_in_one_thing() -> None:
    known = {sentence[0]: sentence for sentence in SENTENCES}
    for item in translations(40, seed=2):
        blocks, tags = spelled(item.prompt)
        assert len(blocks) == 4
        english = [block[0].removeprefix("English: ") for block in blocks]
        assert len(set(english)) == 4
        for block, tag, source in zip(blocks[:-1], tags, english, strict=False):
            right = known[source][1 + LANGUAGES.index(tag)]  # type: ignore[arg-type]
            assert block[1] == f"{tag}: {right}"
        assert sorted(tags[:3]) == sorted(LANGUAGES)
        asked, language = known[english[-1]], tags[-1]
        assert item.language == language
        assert item.answer == f" {asked[1 + LANGUAGES.index(language)]}"  # type: ignore[arg-type]
        assert item.bare == f"{asked[0]}\n"
        others, wrong = spelled(item.other_language)
        assert wrong[:-1] == tags[:-1]
        assert wrong[-1] != language
        assert [block[0] for block in others] == [block[0] for block in blocks]
        assert item.same_meaning == f" {asked[1 + LANGUAGES.index(wrong[-1])]}"  # type: ignore[arg-type]
        others, same = spelled(item.other_sentence)
        assert same == tags
        assert others[:-1] == blocks[:-1]
        other = known[others[-1][0].removeprefix("English: ")]
        assert other[0] not in english
        assert item.same_language == f" {other[1 + LANGUAGES.index(language)]}"  # type: ignore[arg-type]


def test_halves_share_no_sentence() -> None:
    found = []
    for half in ("first", "second"):
        items = translations(30, half=half, seed=1)  # type: ignore[arg-type]
        texts = [text for i in items for text in (i.prompt, i.other_sentence)]
        lines = [line for text in texts for line in text.split("\n")]
        found.append({line for line in lines if line.startswith("English: ")})
    assert not found[0] & found[1]
    assert len(found[0] | found[1]) == len(SENTENCES)


def test_languages_come_in_turn_or_one_is_asked_for_and_seeds_decide() -> None:
    assert [item.language for item in translations(7)] == [*LANGUAGES, *LANGUAGES, LANGUAGES[0]]
    assert {item.language for item in translations(7, language="German")} == {"German"}
    once = [item.bare for item in translations(len(SENTENCES), n_shots=0)]
    assert len(set(once)) == len(once)
    assert translations(5, seed=1) == translations(5, seed=1) != translations(5, seed=2)


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(PromptError, match="'Latin' must be one of French"):
        translations(2, language="Latin")  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="half='third'"):
        translations(2, half="third")  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="15 examples cannot be drawn from 16"):
        translations(2, half="first", n_shots=15)
    for bad in ({"n": 0}, {"n_shots": -1}, {"seed": -1}):
        with pytest.raises(PlanError, match=next(iter(bad))):
            translations(**{"n": 2} | bad)  # type: ignore[arg-type]
