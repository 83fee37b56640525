"""The contextual role: against a dense formula, a planted head, hand-made masses, and its controls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from real_model import smollm2
from tiny_models import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import headlab as hl
from headlab import planted
from headlab.roles.base import Arrays, Measurement, Probing
from headlab.roles.contextual import Contextual
from headlab.roles.evidence import decide
from headlab.tasks import RecordError

GIVEN = Contextual(response="given")

# -- the statistic -------------------------------------------------------------------------------


def words(rng: np.random.Generator, n: int) -> str:
    return " ".join(f"w{i}" for i in rng.integers(4, 97, n))


def tiny_record(seed: int, gold: int, **more: Any) -> dict[str, Any]:
    """Three documents of 6, 9 and 4 words; the answer is the gold one's second and third."""
    rng = np.random.default_rng(seed)
    documents = [words(rng, n) for n in (6, 9, 4)]
    answer = " ".join(documents[gold].split()[1:3])
    return {
        "documents": documents,
        "gold": gold,
        "question": words(rng, 5),
        "answer": answer,
    } | more


#: Where those documents stand under ``TEMPLATE``: "Document [1] " is two words, and so on.
TEMPLATE = "Read {documents} Asked: {question}"
SPANS = ((3, 9), (11, 20), (22, 26))


def dense(module: Any, ids: list[int], rows: list[int]) -> np.ndarray:
    """Rows of the pattern in float64, [layer, head, row, key]."""
    with torch.no_grad():
        output = module(torch.tensor([ids]), output_attentions=True)
    return np.stack([layer[0].double().numpy()[:, rows] for layer in output.attentions])


@pytest.mark.parametrize("rows", ["token", "predicting"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_masses_are_those_of_the_dense_pattern(
    lab: Callable[..., hl.Model], eager: Callable[..., Any], family: str, rows: Any
):
    changes = {} if family == "llama" else {"sliding_window": 64}
    model, module = lab(family, **changes), eager(family, **changes)
    records = tuple(tiny_record(at, at % 3, template=TEMPLATE) for at in range(4))
    found = Contextual(rows=rows, response="given").measure(Probing(model, records=records))
    gold, other, sums, shares, sink, answers = [], [], [], [], [], []
    for record in records:
        text = TEMPLATE.replace("{question}", record["question"]).replace(
            "{documents}",
            " ".join(f"Document [{i + 1}] {text}" for i, text in enumerate(record["documents"])),
        )
        prompt = tiny_tokenizer()(text)["input_ids"]
        ids = tiny_tokenizer()(f"{text} {record['answer']}")["input_ids"]
        first = len(prompt) - (rows == "predicting")
        pattern = dense(module, ids, [first, first + 1])
        mass = [pattern[..., start:stop].sum(-1).mean(-1) for start, stop in SPANS]
        right = mass.pop(record["gold"])
        gold.append(right)
        other.append(np.mean(mass, 0))
        sums.append(np.sum(mass, 0))
        shares.append(right / (right + np.sum(mass, 0)))
        sink.append(pattern[..., :2].sum(-1).mean(-1))
        start = SPANS[record["gold"]][0]
        answers.append(pattern[..., start + 1 : start + 3].sum(-1).mean(-1))
    near = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(found.values, gold, **near)
    np.testing.assert_allclose(found.null, other, **near)
    for name, wanted in {
        "irrelevant_mass": sums,
        "gold_share": shares,
        "sink_mass": sink,
        "answer_mass": answers,
    }.items():
        np.testing.assert_allclose(found.details[name].values, np.mean(wanted, 0), **near)
    by_place = found.details["mass_by_place"]
    assert by_place.at is not None
    assert by_place.at.tolist() == [0, 1, 2]
    np.testing.assert_allclose(by_place.values[..., 0], np.mean([gold[0], gold[3]], 0), **near)
    assert found.notes[-1, -1].startswith("4 of 4 questions answered rightly, 4 of the responses")


def test_the_models_own_answer_is_its_greedy_one(
    lab: Callable[..., hl.Model], twin: Callable[..., Any]
):
    record = tiny_record(0, 1)
    kept: dict[str, Arrays] = {}

    def remember(key: str, compute: Callable[[], Arrays]) -> Arrays:
        return kept.setdefault(key, compute())

    found = Contextual().measure(Probing(lab("llama"), records=(record,), remember=remember))
    (arrays,) = kept.values()
    ids = found.looks[0].ids.tolist()
    new = arrays["new"].tolist()
    assert 1 <= len(new) <= 16
    assert ids[-len(new) :] == new
    for token in new:
        with torch.no_grad():
            logits = twin("llama")(torch.tensor([ids[: len(ids) - len(new)]])).logits
        assert int(logits[0, -1].argmax()) == token
        new = new[1:]
    assert found.looks[0].queries.tolist() == list(range(len(ids) - len(arrays["new"]), len(ids)))
    np.testing.assert_allclose(found.looks[0].values.mean(-1), found.values[0], rtol=1e-5)


def test_a_records_response_is_read_in_place_of_the_models(lab: Callable[..., hl.Model]):
    record = tiny_record(0, 1, response="w9 w8 w7")
    ids = tiny_tokenizer()("w9 w8 w7")["input_ids"]
    for role in (Contextual(), GIVEN):
        found = role.measure(Probing(lab("llama"), records=(record,)))
        assert found.looks[0].ids[-3:].tolist() == ids


def test_only_right_answers_count_when_asked(lab: Callable[..., hl.Model]):
    right = tiny_record(0, 1)
    right["response"] = right["answer"].upper().lower()
    records = (tiny_record(1, 0, response="w5"), right)
    probing = Probing(lab("llama"), records=records)
    assert len(Contextual().measure(probing).values) == 2
    found = Contextual(require_answer=True).measure(probing)
    assert len(found.values) == 1
    assert found.notes[-1, -1].startswith("1 of 2 questions answered rightly")
    none = Contextual(require_answer=True).measure(Probing(lab("llama"), records=records[:1]))
    assert "answered none of the questions" in none.notes[-1, -1]


# -- claims --------------------------------------------------------------------------------------

#: A duplicate-token head finds the words of a given response in the gold document, so it plays the role here.
HEADS = {"L0H1": "previous_token", "L1H2": "duplicate_token", "L2H0": "sink"}


def planted_records(made: planted.Planted, n: int) -> list[dict[str, Any]]:
    """Five documents of ten words each, none used twice; the response is six words of the gold one."""
    vocabulary = sorted(made.tokenizer.get_vocab())
    plain = [word for word in vocabulary if word.isalpha()]
    rng = np.random.default_rng(0)
    records = []
    for at in range(n):
        drawn = [plain[i] for i in rng.permutation(len(plain))]
        documents = [drawn[10 * i : 10 * i + 10] for i in range(5)]
        gold = documents[at % 5]
        records.append(
            {
                "documents": [" ".join(document) for document in documents],
                "gold": at % 5,
                "question": " ".join(drawn[50:56]),
                "answer": gold[3],
                "response": " ".join(gold[i] for i in rng.permutation(10)[:6]),
                "template": "{documents} {question}",
            }
        )
    return records


def planted_claims(role: Contextual, qk: bool = True) -> list[str]:
    made = planted.model("llama", HEADS, distractors=6, max_context=160)
    if not qk:
        made = planted.scramble(made, "L1H2", part="qk")
    model = hl.load(made.module, tokenizer=made.tokenizer)
    data = {"contextual": planted_records(made, 15)}
    return hl.score(model, roles=[role], data=data).claimed("contextual")


def test_a_head_that_looks_for_the_responses_words_is_claimed_and_no_other():
    assert planted_claims(GIVEN) == ["L1H2"]


def test_nothing_is_claimed_when_its_qk_circuit_is_scrambled():
    assert planted_claims(GIVEN, qk=False) == []


def test_nothing_is_claimed_when_the_gold_label_is_scrambled():
    assert planted_claims(Contextual(response="given", scrambled=True)) == []


def made_up(model: hl.Model, mass: Callable[[int, int], np.ndarray], n: int = 20) -> Measurement:
    """What the role makes of masses [head, document] per prompt and gold place, without a run."""
    records = tuple(tiny_record(at, at % 3) for at in range(n))
    heads = model.spec.n_heads

    def remember(key: str, compute: Callable[[], Arrays]) -> Arrays:
        at = int(key.split("-")[1])
        rows = np.zeros((model.spec.n_layers, heads, 4, 5))
        rows[..., :3] = mass(at, at % 3)[:, None]
        return {"new": np.array([9, 8, 7]), "mass": rows.astype(np.float32)}

    return Contextual().measure(Probing(model, records=records, remember=remember))


def test_of_hand_made_heads_only_the_one_that_follows_the_gold_document_is_claimed(
    lab: Callable[..., hl.Model],
):
    rng = np.random.default_rng(0)

    def mass(at: int, gold: int) -> np.ndarray:
        heads = rng.uniform(0.1, 0.2, (6, 3))
        heads[0, gold] += 0.3  # follows the gold document
        heads[1, -1] += 0.5  # the last one, whichever it is
        heads[2, 0] += 0.5  # the first one
        heads[3, rng.integers(3)] += 0.5  # any
        heads[4] = [0.01, 0.01, 0.01]  # the gold one much more than others, but little
        heads[4, gold] = 0.08
        return heads  # and one that prefers none

    found = made_up(lab("llama"), mass)
    frame = decide(GIVEN.info, found, 0.05, 0)
    assert set(frame.query("claimed")["head"]) == {0}
    assert (frame.query("head == 4")["q_value"] < 0.01).all()  # its score alone forbids it


def random_llama(seed: int, scale: float) -> hl.Model:
    """SmolLM2's shape made small."""
    config = LlamaConfig(
        hidden_size=144, intermediate_size=384, num_hidden_layers=5, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=smollm2().spec.n_vocab, max_position_embeddings=512,
        initializer_range=scale, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return hl.load(LlamaForCausalLM(config).eval(), tokenizer=smollm2().tokenizer)


@pytest.mark.parametrize(("scale", "role"), [(1 / 24, GIVEN), (0.12, GIVEN), (0.12, Contextual())])
def test_a_random_model_gets_no_claims(scale: float, role: Contextual):
    scores = hl.score(random_llama(0, scale), roles=[role], n_prompts=11)
    assert scores.frame["score"].notna().all()
    assert scores.claimed("contextual") == []


@pytest.mark.slow
def test_a_known_retrieval_head_of_the_real_model_looks_at_the_relevant_document():
    found = GIVEN.measure(Probing(smollm2(), n_prompts=4))
    assert found.values[:, 17, 3].mean() > 3 * found.null[:, 17, 3].mean()


# -- what cannot be measured ---------------------------------------------------------------------


def test_a_document_beyond_the_window_is_not_scored(lab: Callable[..., hl.Model]):
    """Layer 0 sees 20 tokens, layer 1 all: of 25 words and 2 of an answer, the first document is out of sight."""
    model = lab("gemma2", sliding_window=20)
    records = tuple(tiny_record(at, at % 3, template="{question} {documents}") for at in range(6))
    found = GIVEN.measure(Probing(model, records=records))
    out = np.isnan(found.values).all(2)
    assert out[:, 0].tolist() == [True, False, False] * 2
    assert not out[:, 1].any()
    # In layer 0 the null is of the one other document in sight, so nothing more is irrelevant.
    seen = GIVEN.measure(Probing(model, records=records[1:2]))
    np.testing.assert_allclose(seen.null[0, 0], seen.details["irrelevant_mass"].values[0])
    np.testing.assert_allclose(
        2 * seen.null[0, 1], seen.details["irrelevant_mass"].values[1], rtol=1e-6
    )
    gone = GIVEN.measure(Probing(lab("gemma2"), records=records))
    assert np.isnan(gone.values[:, 0]).all()
    assert gone.notes[0, 3].startswith("out of window")
    assert (1, 3) not in gone.notes


def test_a_document_beyond_the_chunk_is_not_scored(lab: Callable[..., hl.Model]):
    records = tuple(tiny_record(at, at % 3, template="{question} {documents}") for at in range(3))
    found = GIVEN.measure(Probing(lab("llama4_text"), records=records))
    chunked = [layer for layer in range(2) if np.isnan(found.values[:, layer]).all()]
    assert chunked == [0]


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_an_encoder_is_not_measurable(lab: Callable[..., hl.Model], family: str):
    found = Contextual().measure(Probing(lab(family)))
    assert np.isnan(found.values).all()
    assert "not measurable: the role needs a model that generates" in found.notes[-1, -1]


def test_without_a_tokenizer_or_room_or_words_the_role_is_not_measurable(
    lab: Callable[..., hl.Model], twin: Callable[..., Any]
):
    for model, why in (
        (hl.load(twin("llama")), "came without a tokenizer"),
        (lab("llama"), "has a context of 128; use fewer or shorter documents"),
        (lab("llama", max_position_embeddings=512), "does not know the words"),
    ):
        found = Contextual().measure(Probing(model, n_prompts=2))
        assert np.isnan(found.values).all()
        assert why in found.notes[-1, -1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gold": 3}, "record 1: gold is 3, but there are 3 documents"),
        ({"documents": ["w5", " "], "gold": 0}, "record 1: document 1 is empty"),
        ({"template": "Only {question}"}, "record 1: the template must hold"),
        ({"question": "w5 " * 200}, "record 1: prompt and response take"),
        ({"template": "{documents}x {question}"}, "record 1: a token straddles the edge"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(
    lab: Callable[..., hl.Model], change: dict[str, Any], why: str
):
    def never(key: str, compute: Callable[[], Arrays]) -> Arrays:
        raise AssertionError("nothing may run before all records are checked")

    records = (tiny_record(0, 0), tiny_record(1, 0) | change)
    with pytest.raises(RecordError, match=why):
        Contextual().measure(Probing(lab("llama"), records=records, remember=never))


def test_records_are_checked_against_the_schema(lab: Callable[..., hl.Model]):
    for change, why in (
        ({"gold": "1"}, "gold"),
        ({"documents": ["one"]}, "documents"),
        ({"colour": "red"}, "colour"),
    ):
        records = [tiny_record(0, 0) | change]
        with pytest.raises(RecordError, match=why):
            hl.score(lab("llama"), roles=[GIVEN], data={"contextual": records})
    example = dict(Contextual.schema or {})["examples"][0]
    records = [example, example | {"question": example["question"] + " Say it."}]
    scores = hl.score(lab("llama"), roles=[GIVEN], data={"contextual": records})
    assert scores.frame["score"].notna().all()


def test_the_behaviour_is_the_answers_mean_log_probability(
    lab: Callable[..., hl.Model], twin: Callable[..., Any]
):
    assert Contextual.behaviour is not None
    records = tuple(tiny_record(at, 1, template=TEMPLATE) for at in range(3))
    found = Contextual.behaviour.measure(Probing(lab("llama"), records=records))
    for value, record in zip(found, records, strict=True):
        text = " ".join(f"d [{i}] {document}" for i, document in enumerate(record["documents"]))
        whole = f"Read {text} Asked: {record['question']} {record['answer']}"
        ids = torch.tensor([tiny_tokenizer()(whole)["input_ids"]])
        with torch.no_grad():
            logs = twin("llama")(ids).logits[0, -3:-1].double().log_softmax(-1)
        wanted = logs.gather(-1, ids[0, -2:, None]).mean()
        assert value == pytest.approx(float(wanted), rel=1e-5)
