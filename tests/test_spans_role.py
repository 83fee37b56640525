"""Span heads: against plain loops over another implementation's attention, and heads whose rows were imposed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from real_model import smollm2
from tiny_models import tiny_tokenizer

import headlab as hl
from headlab.errors import PromptError
from headlab.roles.base import Probing
from headlab.roles.spans import Spans
from headlab.tasks import RecordError
from headlab.tasks.spans import span_trials

WORDS = "w5 w9 w12 w7 w20 w31 w8 w40 w11 w6 w22 w13"


def at(text: str, *words: int) -> list[int]:
    """Characters [start, stop) of words by number, first to last."""
    parts = text.split(" ")
    start = sum(len(part) + 1 for part in parts[: words[0]])
    stop = sum(len(part) + 1 for part in parts[: words[-1] + 1]) - 1
    return [start, stop]


def record(text: str = WORDS, **fields: Any) -> dict[str, Any]:
    return {"text": text, "from": at(text, 9, 10), "to": at(text, 3, 4)} | fields


def records(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Other words every time, the spans at the same places."""
    rng = np.random.default_rng(seed)
    texts = [" ".join(f"w{i}" for i in rng.choice(range(10, 90), 12, False)) for _ in range(n)]
    return [record(text) for text in texts]


def measured(model: hl.Model, *found: dict[str, Any]) -> Any:
    return Spans().measure(Probing(model, records=found))


# -- the statistic -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "gpt_oss"])
@pytest.mark.parametrize(
    "to", [(3, 4), (5, 6)], ids=str
)  # a window of 5 cuts the second for row 10
def test_masses_are_those_of_a_plain_loop(
    family: str, to: tuple[int, int], lab: Callable[..., Any], eager: Callable[..., Any]
):
    got = measured(lab(family), record(to=at(WORDS, *to)))
    ids = tiny_tokenizer()(WORDS, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        attentions = eager(family)(ids, output_attentions=True).attentions
    rows = (9, 10)
    for layer, pattern in enumerate(attentions):
        window = 5 if family == "gpt_oss" and layer == 0 else 99
        for head in range(pattern.shape[1]):
            mass, chance, beside = [], [], []
            for row in rows:
                keys = [k for k in range(12) if abs(row - k) < window]
                keys = [k for k in keys if family == "bert" or k <= row]
                if not set(to) <= set(keys):
                    continue
                weights = pattern[0, head, row].double()
                others = [k for k in keys if k != 0 and k not in to]
                # Every cyclic placement of two tokens among the others.
                placed = [
                    float(weights[others[i]] + weights[others[(i + 1) % len(others)]])
                    for i in range(len(others))
                ]
                mass.append(float(weights[list(to)].sum()))
                chance.append(np.mean(placed))
                near = [k for k in keys if k in (to[0] - 2, to[0] - 1, to[1] + 1, to[1] + 2)]
                beside.append(2 * float(weights[near].mean()))
            if not mass:
                assert np.isnan(got.values[0, layer, head])
                assert "out of window" in got.notes[layer, head]
                continue
            assert got.values[0, layer, head] == pytest.approx(np.mean(mass), abs=1e-5)
            assert got.null[0, layer, head] == pytest.approx(np.mean(chance), abs=1e-5)
            detail = got.details["beside"].values[layer, head]
            assert detail == pytest.approx(np.mean(beside), abs=1e-5)


def test_attention_in_chunks_hides_spans_of_earlier_chunks(lab: Callable[..., Any]):
    model = lab("llama4_text")  # chunks of six tokens in its first layer, none in its second
    got = measured(model, record())
    assert np.isnan(got.values[0, 0]).all()
    assert not np.isnan(got.values[0, 1]).any()
    inside = measured(model, record(to=at(WORDS, 7)))
    assert not np.isnan(inside.values).any()
    rows = model.trace(WORDS, keep=hl.keep.rows(queries=[9, 10])).rows[0, 0].double()
    # Row 9 sees three others of its chunk, row 10 four.
    means = (rows[:, 0, [6, 8, 9]].mean(-1) + rows[:, 1, [6, 8, 9, 10]].mean(-1)) / 2
    np.testing.assert_allclose(inside.null[0, 0], means.numpy(), atol=1e-5)


def test_several_spans_predicting_rows_and_rows_that_do_not_see_all(lab: Callable[..., Any]):
    model = lab("llama")
    found = record(
        **{
            "from": [at(WORDS, 2), at(WORDS, 4, 5), at(WORDS, 10)],
            "to": [at(WORDS, 2), at(WORDS, 5, 6)],
        },
        rows="predicting",
    )
    (trial,) = span_trials(model.tokenizer, [found])
    assert trial.rows == (9,)  # rows 1, 3 and 4 do not see all of the target
    assert trial.keys == (2, 5, 6)
    assert trial.beside == (1, 3, 4, 7, 8)
    rows = model.trace(WORDS, keep=hl.keep.rows(queries=[9])).rows[0, :, :, 0]
    mass = rows[..., [2, 5, 6]].sum(-1)
    np.testing.assert_allclose(measured(model, found).values[0], mass.numpy(), atol=1e-6)


def test_special_tokens_and_the_first_token_are_left_out_of_chance():
    from transformers import PreTrainedTokenizerFast

    inner = tiny_tokenizer().backend_tokenizer
    from tokenizers.processors import TemplateProcessing

    inner.post_processor = TemplateProcessing("<bos> $A <eos>", None, [("<bos>", 1), ("<eos>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>")
    (trial,) = span_trials(tokenizer, [record()], causal=False)
    assert trial.ids[0] == 1
    assert trial.ids[-1] == 2
    assert trial.keys == (4, 5)
    assert set(trial.others) == set(range(1, 13)) - {4, 5}
    marked = "<bos> " + WORDS
    own = record(marked)  # a text that brings its own first token does not get a second
    assert span_trials(tokenizer, [own])[0].ids[:2] == (1, 5)


# -- decisions -----------------------------------------------------------------------------------


def looking(heads: str, key: slice) -> Any:
    """Make heads put 0.8 of rows 9 and 10 on these keys."""

    def operation(pattern: torch.Tensor, where: Any) -> torch.Tensor:
        new = pattern * 0.2
        new[..., key] += 0.8 / (key.stop - key.start)
        chosen = (where.positions == 9) | (where.positions == 10)
        return torch.where(chosen[:, None, :, None], new, pattern)

    return hl.apply(heads, operation, site="pattern")


def test_heads_made_to_look_at_a_span_are_claimed_and_no_others(lab: Callable[..., Any]):
    model = lab("llama")
    kinds = [Spans("answers"), Spans("questions", title="To the question")]
    data = {
        "answers": records(12),
        "questions": [r | {"to": at(r["text"], 1)} for r in records(12)],
    }
    with model.edit(looking("L0H2, L1H4", slice(3, 5)), looking("L1H1", slice(1, 2))):
        scores = hl.score(model, kinds, data=data)
    assert set(scores.claimed("answers")) == {"L0H2", "L1H4"}
    assert scores.claimed("questions") == ["L1H1"]
    assert scores.role("questions").title == "To the question"
    row = scores.ranked("answers").iloc[0]
    assert row["score"] > 0.8
    assert row["null_mean"] < 0.1
    assert (scores.frame["n"] == 12).all()
    few = hl.score(model, kinds[:1], data={"answers": records(3)})
    assert "with 3 prompts no head can pass correction" in few.frame["note"][0]


def test_a_head_that_looks_nearby_shows_in_the_detail(lab: Callable[..., Any]):
    model = lab("llama")
    with model.edit(looking("L0H2", slice(1, 7))):
        scores = hl.score(model, [Spans()], data={"spans": records(8)})
    beside = scores.detail("spans", "beside").set_index(["layer", "head"])["value"]
    score = scores.frame.set_index(["layer", "head"]).loc[(0, 2), "score"]
    assert beside[0, 2] == pytest.approx(score, abs=0.1)
    assert beside[0, 2] > 0.2


def test_a_random_model_gets_no_claims(lab: Callable[..., Any]):
    for family in ("llama", "gpt2", "bert"):
        scores = hl.score(lab(family), [Spans()], data={"spans": records(20, seed=1)})
        assert scores.claimed("spans") == []


def test_the_behaviour_is_the_answer_s_log_probability(
    lab: Callable[..., Any], twin: Callable[..., Any]
):
    found = (record(answer=" w50 w51"), record())
    behaviour = Spans.behaviour
    assert behaviour is not None
    got = behaviour.measure(Probing(lab("llama"), records=found))
    ids = tiny_tokenizer()(WORDS + " w50 w51", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        chance = twin("llama")(ids).logits[0].double().log_softmax(-1)
    assert got[0] == pytest.approx(float(chance[11, 50] + chance[12, 51]) / 2, abs=1e-4)
    assert np.isnan(got[1])
    assert np.isnan(behaviour.measure(Probing(lab("bert"), records=found))).all()


# -- what cannot be done -------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "before": (
        {"from": at(WORDS, 2), "to": at(WORDS, 5)},
        "comes after",
    ),
    "predicting its own start": (
        {"from": at(WORDS, 0), "to": at(WORDS, 0), "rows": "predicting"},
        "comes after",
    ),
    "empty": ({"to": [4, 4]}, r"`to` \[4, 4\] is empty"),
    "backwards": ({"from": [40, 34]}, r"`from` \[40, 34\] is empty"),
    "outside": ({"from": [30, 400]}, r"`from` \[30, 400\] lies outside the text, which has 42"),
    "straddling": ({"to": [3, 4]}, "straddles the edge of 'w'"),
    "blank": ({"to": [2, 3]}, "no token covers ' '"),
    "too long a target": ({"from": at(WORDS, 9), "to": at(WORDS, 1, 8)}, "shorter `to`"),
    "too long": ({"text": WORDS + " w5" * 120}, "132 tokens, but the model's context holds 128"),
    "answer too long": ({"answer": " w5" * 120}, "text with its answer has 132 tokens"),
    "answer glued on": ({"answer": "w5"}, "straddles the edge of 'w5'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_record_that_cannot_be_used_is_named(case: str, lab: Callable[..., Any]):
    fields, message = WRONG[case]
    with pytest.raises(RecordError, match=f"^record 1 .'odd'.: .*{message}"):
        measured(lab("llama"), record(), record(name="odd", **fields))


def test_an_encoder_sees_what_comes_later(lab: Callable[..., Any]):
    found = record(**{"from": at(WORDS, 2), "to": at(WORDS, 5)})
    assert not np.isnan(measured(lab("bert"), found).values).any()


def test_without_tokenizer_or_records_nothing_is_measured(
    lab: Callable[..., Any], twin: Callable[..., Any]
):
    with pytest.raises(PromptError, match="fast tokenizer"):
        span_trials(None, [record()])
    mute = hl.load(twin("llama"))
    for got in (measured(mute, record()), measured(lab("llama"))):
        assert np.isnan(got.values).all()
        assert got.notes[-1, -1].startswith("not measurable: ")


@pytest.mark.parametrize("family", ["gemma2", "llama4_text", "gpt_oss", "deepseek_v3", "roberta"])
def test_every_family_can_be_measured(family: str, lab: Callable[..., Any]):
    got = measured(lab(family), *records(3))
    assert got.values.shape == got.null.shape == (3, 2, lab(family).spec.n_heads)
    assert np.array_equal(np.isnan(got.values), np.isnan(got.null))
    assert not np.isnan(got.values[:, 1]).any()


# -- the real model ------------------------------------------------------------------------------

PEOPLE = [
    "Marta",
    "Oskar",
    "Ingrid",
    "Pavel",
    "Bianca",
    "Dmitri",
    "Elena",
    "Farid",
    "Gustav",
    "Helena",
    "Igor",
    "Jasmine",
]
GOODS = [
    "bees",
    "goats",
    "clocks",
    "violins",
    "boats",
    "candles",
    "horses",
    "roses",
    "maps",
    "bells",
    "kites",
    "pigeons",
]


def sellers() -> list[dict[str, Any]]:
    """Who sells what: the last row of a question is to look at the seller's name."""
    made = []
    for i, (person, goods) in enumerate(zip(PEOPLE, GOODS, strict=True)):
        other, more = PEOPLE[(i + 5) % 12], GOODS[(i + 3) % 12]
        text = (
            f"{other} lives by the sea and sells {more}. {person} lives in the hills and sells {goods}. "
            f"The road between them is long.\nQuestion: who sells {goods}?\nAnswer:"
        )
        start = text.index(f"{person} lives in")
        made.append(
            {
                "text": text,
                "from": [len(text) - 1, len(text)],
                "to": [start, start + len(person)],
                "answer": f" {person}",
            }
        )
    return made


@pytest.mark.slow
def test_the_real_model_has_heads_that_look_an_answer_up():
    scores = hl.score(smollm2(), [Spans("lookup")], data={"lookup": sellers()})
    claimed = scores.claimed("lookup")
    assert {"L24H4", "L22H7"} <= set(claimed[:4])
    assert len(claimed) < 40
    top = scores.ranked("lookup").iloc[0]
    assert top["score"] > 0.5
    assert top["null_mean"] < 0.05
