"""Questions whose values are written into others, what counts as written, and a planted head that carries the time."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from real_model import smollm2
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab import planted
from headlab.attention import Where
from headlab.errors import PlanError
from headlab.planted.meanings import OBJECT_OF
from headlab.planted.words import vocabulary
from headlab.steering import ValueEdit
from headlab.steering.behaviours.temporal import Transfer, transfers, written
from headlab.tasks import temporal_facts

HEAD, FACTOR = "1.1", 36.0  # three times the tokens of the longest source


@pytest.mark.parametrize("other", ["subject", "time"])
def test_sources_differ_in_one_thing_and_answers_are_right(other: str) -> None:
    model = smollm2()
    facts = {fact.template: fact.objects for fact in temporal_facts().temporal}
    asked = {
        template.replace("{time}", time): (template, time)
        for template, objects in facts.items()
        for time in objects
    }
    found = transfers(model, 30, other=other, seed=3)  # type: ignore[arg-type]
    assert len(found) == 30
    for one in found:
        (mine, now), (its, then) = (asked[model.text(list(x))] for x in (one.prompt, one.source))
        assert one.own == f" {facts[mine][now]}"
        assert one.answer == f" {facts[its][then]}" != one.own
        assert (mine == its, now == then) == (other == "time", other == "subject")
        assert model.text(list(one.prompt[slice(*one.span)])).strip() == now
        assert one.prompt[0] != model.bos
        case = one.case
        assert (case.prompt, case.answer, case.foil) == (one.prompt, one.answer, one.own)
        assert case.spans == (one.span,)
    assert transfers(model, 5, other=other, seed=3) == found[:5]  # type: ignore[arg-type]
    assert transfers(model, 5, other=other, seed=4) != found[:5]  # type: ignore[arg-type]


def test_it_is_written_where_the_first_token_changes_and_the_answer_comes() -> None:
    model = hl.load(build("llama"), tokenizer=tiny_tokenizer())
    prompts = ((5, 9, 30, 31), (7, 44, 12, 60, 61))

    def words(**force: int) -> list[list[str]]:
        return [text.split() for text in generated(model, prompts, **force)]

    plain = words()
    (said, steered) = plain[0][2], words(forced=77)

    def cases(*answers: str) -> tuple[Transfer, ...]:
        rows = zip(prompts, answers, strict=True)
        return tuple(Transfer(ids, (1, 2), ids, f" {answer}", " w4") for ids, answer in rows)

    # The answer comes anyway, and the first token stays.
    assert written(cases(said, said), 3).values(model, None).tolist() == [0, 0]
    with model.edit(forcing(77)):
        assert steered[0][0] == steered[1][0] == "w77"
        assert written(cases("w77", "w96"), 3).values(model, None).tolist() == [1, 0]
        assert written(cases("w7", "w77"), 3).values(model, None).tolist() == [0, 1]
    # The first token is forced to what it was.
    first = int(plain[0][0][1:])
    with model.edit(forcing(first)):
        assert written(cases(f"w{first}", "w96"), 3).values(model, None).tolist() == [0, 0]
    assert written(cases(said, said)).batch == 2


def forcing(token: int) -> hl.Edit:
    """Whatever has been read, the stream is driven to one token."""

    def push(stream, where: Where):
        return stream * 0 + 50 * direction.to(stream)

    module = build("llama")
    direction = module.get_output_embeddings().weight[token].detach()
    direction = direction / module.model.norm.weight.detach()
    return hl.apply("1.*", push, "resid_post")


def generated(model: hl.Model, prompts, forced: int | None = None) -> list[str]:
    rows = [list(prompt) for prompt in prompts]
    if forced is None:
        return model.generate(rows, max_new_tokens=3).texts
    with model.edit(forcing(forced)):
        return model.generate(rows, max_new_tokens=3).texts


# -- a planted head --------------------------------------------------------------------------------


@cache
def carrying() -> planted.Planted:
    return planted.model("llama", {"L1H1": "temporal"}, distractors=4, max_context=48)


def questions(n: int = 12, seed: int = 0) -> tuple[Transfer, ...]:
    """Words with one time among them; the source has another."""
    tokenizer = carrying().tokenizer
    special = {*OBJECT_OF, *OBJECT_OF.values(), "<pad>", "<bos>", "<eos>", "<unk>"}
    plain = [word for word in vocabulary(128) if word not in special and word.isalpha()]
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        mine, its = rng.choice(list(OBJECT_OF), 2, replace=False)
        texts = []
        for time in (mine, its):
            before, after = rng.integers(2, 6), rng.integers(2, 6)
            words = rng.choice(plain, before + after, replace=False).tolist()
            texts.append(([*words[:before], str(time), *words[before:]], int(before)))
        (prompt, at), (source, _) = (
            (tuple(tokenizer(" ".join(words))["input_ids"]), place) for words, place in texts
        )
        span = (at + 1, at + 2)  # behind BOS
        made.append(
            Transfer(prompt, span, source, f" {OBJECT_OF[str(its)]}", f" {OBJECT_OF[str(mine)]}")
        )
    return tuple(made)


def share(module: object, heads: str, factor: float = FACTOR) -> float:
    """Share of questions answered as the source's, with the heads' values written."""
    model = hl.load(module, tokenizer=carrying().tokenizer)
    cases = questions()
    edit = ValueEdit.fit(
        model, [list(c.source) for c in cases], heads, [[c.span] for c in cases], factor=factor
    )
    return float(written(cases, 1).values(model, edit).mean())


def test_what_a_planted_head_carries_is_written_into_another_prompt() -> None:
    made = carrying()
    model = hl.load(made.module, tokenizer=made.tokenizer)
    own = [model.generate(list(c.prompt), max_new_tokens=1).texts[0].strip() for c in questions()]
    assert own == [c.own.strip() for c in questions()]
    # The mean holds all words of the source, so a question may be lost to noise.
    assert share(made.module, HEAD) >= 0.9
    assert share(made.module, "1.0") == share(made.module, "2.1") == 0.0
    assert share(made.module, HEAD, 0.0) == 0.0
    assert share(planted.scramble(made, "L1H1", "ov").module, HEAD) <= 0.25


def test_random_directions_do_not_write() -> None:
    model = hl.load(carrying().module, tokenizer=carrying().tokenizer)
    cases = questions()
    edit = ValueEdit.fit(
        model, [list(c.source) for c in cases], HEAD, [[c.span] for c in cases], factor=FACTOR
    )
    turned = [written(cases, 1).values(model, edit.randomised(seed)).mean() for seed in range(4)]
    assert float(np.mean(turned)) < 0.3


def test_bad_input_is_refused_in_one_sentence() -> None:
    model = smollm2()
    with pytest.raises(PlanError, match="other='place'"):
        transfers(model, 2, other="place")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="n=0"):
        transfers(model, 0)
    with pytest.raises(PlanError, match="not 9999"):
        transfers(model, 9999)
    with pytest.raises(PlanError, match="n_tokens=0"):
        written(questions(2), 0)
