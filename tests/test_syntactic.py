"""Syntactic heads: word attention against plain loops, imposed heads, and what counts where."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, build, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import headlab as hl
from headlab.errors import PromptError
from headlab.roles import RoleError
from headlab.roles.base import Probing
from headlab.roles.syntactic import OFFSETS, Syntactic, read_sentence, word_attention
from headlab.tasks import RecordError, read_records
from headlab.tasks.dependencies import DEPENDENCY_SCHEMA, ParsedSentence, parsed_sentences
from headlab.tasks.prose import data_folder

DET, SUBJECT, OBJECT = "det", "nsubj", "dobj"
NOUNS = ["dog", "cat", "bird", "gardener", "painting", "kitchen"]


def wordpieces() -> PreTrainedTokenizerFast:
    """A BERT-like tokenizer in which some words have several pieces."""
    known = [
        "[PAD]",
        "[CLS]",
        "[SEP]",
        "[UNK]",
        "the",
        "a",
        "dog",
        "cat",
        "bird",
        "garden",
        "paint",
    ]
    known += ["kit", "##en", "##er", "##ing", "##ch", "sees", "old", "young", "well", "."]
    vocabulary = {word: i for i, word in enumerate(known)}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    )


@pytest.fixture(scope="module")
def encoder() -> hl.Model:
    return hl.load(build("bert", num_hidden_layers=3), tokenizer=wordpieces())


def sentence(rng: np.random.Generator) -> dict[str, Any]:
    """``the (old) NOUN sees a (old) (young) NOUN .`` with adjectives here and there."""
    words, heads, relations = [], [], []

    def phrase(article: str) -> int:
        adjectives = ["old"] * int(rng.integers(3))
        noun = len(words) + 1 + len(adjectives)
        words.extend([article, *adjectives, str(rng.choice(NOUNS))])
        heads.extend([noun] * (1 + len(adjectives)) + [-2])
        relations.extend([DET, *["amod"] * len(adjectives), ""])
        return noun

    subject = phrase("the")
    verb = len(words)
    words.append("sees")
    heads.append(-1)
    relations.append("root")
    noun = phrase("a")
    for at, relation in ((subject, SUBJECT), (noun, OBJECT)):
        heads[at], relations[at] = verb, relation
    return {
        "words": [*words, "."],
        "heads": [*heads, verb],
        "relations": [*relations, "punct"],
    }


def sentences(n: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [sentence(rng) for _ in range(n)]


def following(heads: str, one: ParsedSentence, relation: str) -> hl.Edit:
    """Make heads look from every piece of a dependent of a relation to the last piece of its governor."""

    def operation(pattern: torch.Tensor, where: Any) -> torch.Tensor:
        new = pattern.clone()
        for (start, stop), head, name in zip(one.words, one.heads, one.relations, strict=True):
            if name == relation:
                new[:, :, start:stop] = 0
                new[:, :, start:stop, one.words[head][1] - 1] = 1
        return new

    return hl.apply(heads, operation, site="pattern")


def scored(
    model: hl.Model, role: Syntactic, records: list[dict[str, Any]], imposed: dict[str, str]
) -> hl.Scores:
    """Scores while heads, by name, are made to follow a relation in every sentence."""
    parsed = {one.digest: one for one in parsed_sentences(model.tokenizer, records)}

    def remember(key: str, compute: Callable[[], Any]) -> Any:
        one = parsed[key.split("-")[1]]
        with model.edit(*(following(heads, one, name) for heads, name in imposed.items())):
            return compute()

    return hl.score(model, [role], data={role.info.name: records}, remember=remember)


# -- words ---------------------------------------------------------------------------------------


def test_word_attention_sums_over_key_pieces_and_averages_over_query_pieces():
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.random((2, 3, 6, 6)))
    words = ((1, 3), (3, 4), (4, 6))
    got = word_attention(rows, words)
    for i, (a, b) in enumerate(words):
        for j, (c, d) in enumerate(words):
            wanted = sum(rows[1, 2, q, c:d].sum() for q in range(a, b)) / (b - a)
            assert float(got[1, 2, i, j]) == pytest.approx(float(wanted), abs=1e-12)


def test_words_are_found_among_pieces():
    record = {
        "words": ["the", "gardener", "sees", "kitchen", "."],
        "heads": [1, 2, -1, 2, 2],
        "relations": [DET, SUBJECT, "root", OBJECT, "punct"],
    }
    (found,) = parsed_sentences(wordpieces(), [record])
    assert found.ids[0] == 1
    assert found.ids[-1] == 2
    assert found.words == ((1, 2), (2, 4), (4, 5), (5, 8), (8, 9))
    (found,) = parsed_sentences(tiny_tokenizer(), [record | {"words": ["w5"] * 5}], bos=1)
    assert found.ids == (1, 5, 5, 5, 5, 5)
    assert found.words[0] == (1, 2)


# -- the statistic -------------------------------------------------------------------------------


def by_hand(
    pattern: np.ndarray,
    record: dict[str, Any],
    words: Any,
    backwards: bool,
    causal: bool,
    window: int,
) -> tuple[list[bool], list[int], list[str]]:
    """Which pairs one head gets right, with their offsets and relations, by plain loops in float64."""
    n = len(words)
    between = np.zeros((n, n))
    for i, (a, b) in enumerate(words):
        for j, (c, d) in enumerate(words):
            between[i, j] = pattern[a:b, c:d].sum() / (b - a)

    def sees(i: int, j: int) -> bool:
        reach = max(words[i][1] - 1 - words[j][0], words[j][1] - 1 - words[i][0])
        return i != j and reach < window and (not causal or j < i)

    right, offsets, relations = [], [], []
    for i, head in enumerate(record["heads"]):
        if head < 0:
            continue
        others = [j for j in range(n) if (sees(j, i) if backwards else sees(i, j))]
        if head not in others or len(others) < 2:
            continue
        weights = [between[j, i] if backwards else between[i, j] for j in others]
        right.append(others[int(np.argmax(weights))] == head)
        offsets.append(head - i)
        relations.append(record["relations"][i])
    return right, offsets, relations


@pytest.mark.parametrize("family", ["bert", "gpt2", "mistral"])
@pytest.mark.parametrize("relation", [None, DET, SUBJECT])
@pytest.mark.parametrize("direction", ["dependent_to_head", "head_to_dependent"])
def test_scores_and_null_are_those_of_plain_loops(
    family: str, relation: str | None, direction: Any, eager: Callable[..., Any], lab: Any
):
    alone = {
        "words": ["sees", "dog", "."],
        "heads": [-1, 0, 0],
        "relations": ["root", SUBJECT, "x"],
    }
    records = [*sentences(6), alone]
    model = hl.load(lab(family).module, tokenizer=wordpieces())
    role = Syntactic(relation, direction)
    got = role.measure(Probing(model, records=tuple(records)))
    parsed = parsed_sentences(wordpieces(), records, bos=1)
    heads, layer = model.spec.n_heads, 1
    window = 5 if family == "mistral" else 99
    found: list[list[Any]] = []
    for record, one in zip(records, parsed, strict=True):
        with torch.no_grad():
            out = eager(family)(torch.tensor([one.ids]), output_attentions=True)
        pattern = out.attentions[layer][0].double().numpy()
        found.append(
            [
                by_hand(
                    pattern[head], record, one.words,
                    direction == "head_to_dependent", family != "bert", window,
                )
                for head in range(heads)
            ]
        )  # fmt: skip

    def wanted(name: str) -> bool:
        return name != "punct" if relation is None else name == relation

    every = [pair for s in found for pair in zip(*s[0], strict=True) if wanted(pair[2])]
    if not every:
        assert np.isnan(got.values[:, layer]).all()
        return
    pooled = {o: np.mean([o == offset for _, offset, _ in every]) for o in OFFSETS}
    best = max(OFFSETS, key=lambda o: pooled[o])
    for at, sentence_found in enumerate(found):
        for head, (right, offsets, relations) in enumerate(sentence_found):
            hits = [hit for hit, name in zip(right, relations, strict=True) if wanted(name)]
            by_offset = [
                off == best for off, name in zip(offsets, relations, strict=True) if wanted(name)
            ]
            if not hits:
                assert np.isnan(got.values[at, layer, head])
                continue
            assert got.values[at, layer, head] == pytest.approx(np.mean(hits))
            assert got.null[at, layer, head] == pytest.approx(np.mean(by_offset))
    detail = got.details.get(f"{relation or 'all'} {direction}")
    if detail is not None:
        assert detail.values[layer, 0] == pytest.approx(np.mean([hit for hit, *_ in every]))


# -- decisions -----------------------------------------------------------------------------------


def test_heads_made_to_follow_a_relation_are_claimed_and_no_others(encoder: hl.Model):
    records = sentences(16)
    imposed = {"L0H2": DET, "L1H1": OBJECT}
    scores = scored(encoder, Syntactic(DET), records, imposed)
    assert scores.claimed("syntactic_det") == ["L0H2"]
    row = scores.ranked("syntactic_det").iloc[0]
    assert row["score"] == 1
    assert 0.2 < row["null_mean"] < 0.8
    dobj = scores.detail("syntactic_det", "dobj dependent_to_head").set_index(["layer", "head"])
    assert dobj.loc[(1, 1), "value"] == 1
    assert scored(encoder, Syntactic(OBJECT), records, imposed).claimed("syntactic_dobj") == [
        "L1H1"
    ]
    backwards = Syntactic(DET, "head_to_dependent")
    assert backwards.info.name == "syntactic_det_reverse"
    assert scored(encoder, backwards, records, imposed).claimed(backwards.info.name) == []


def test_a_head_that_looks_to_the_next_word_is_no_better_than_the_fixed_offset(encoder: hl.Model):
    record = next(one for one in sentences(20) if one["words"].count("old") == 1)
    (one,) = parsed_sentences(encoder.tokenizer, [record])
    pattern = torch.zeros(len(one.ids), len(one.ids))
    pattern[:, 0] = 1
    for (start, stop), (_, end) in pairwise(one.words):
        pattern[start:stop, 0], pattern[start:stop, end - 1] = 0, 1
    with encoder.edit(hl.replace("L0H2", pattern, site="pattern")):
        got = Syntactic(DET).measure(Probing(encoder, records=(record,)))
    # One of the two determiners stands right before its noun, and chance knows it.
    assert got.values[0, 0, 2] == got.null[0, 0, 2] == 0.5


def each_once(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({json.dumps(record): record for record in records}.values())[:20]


def test_a_random_encoder_gets_no_claims(encoder: hl.Model):
    for role in (Syntactic(), Syntactic(DET), Syntactic(OBJECT, "head_to_dependent")):
        scores = hl.score(encoder, [role], data={role.info.name: each_once(sentences(40, 1))})
        assert scores.claimed(role.info.name) == []


def test_looks_show_the_weight_between_dependent_and_governor(encoder: hl.Model):
    records = tuple(sentences(2))
    for direction in ("dependent_to_head", "head_to_dependent"):
        got = Syntactic(None, direction).measure(Probing(encoder, records=records))
        one = parsed_sentences(encoder.tokenizer, records)[0]
        look = got.looks[0]
        assert list(look.ids) == list(one.ids)
        assert len(set(look.queries)) == len(look.queries)
        rows = encoder.trace([list(one.ids)], keep=hl.keep.rows()).rows[0].double()
        words = word_attention(rows, one.words)
        word, head = 0, one.heads[0]
        if direction == "dependent_to_head":
            row, weight = one.words[word][1] - 1, words[:, :, word, head]
        else:
            row = one.words[head][1] - 1
            mine = [at for at, other in enumerate(one.heads) if other == head]
            weight = words[:, :, head, mine].amax(-1)
        shown = look.values[:, :, list(look.queries).index(row)]
        np.testing.assert_allclose(shown, weight.numpy(), atol=1e-6)


# -- what cannot be done -------------------------------------------------------------------------

GOOD = {"words": ["the", "dog", "sees"], "heads": [1, 2, -1], "relations": [DET, SUBJECT, "root"]}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few heads": ({"heads": [1, 2]}, "3 words, 2 heads and 3 relations"),
    "too few relations": ({"relations": [DET]}, "3 words, 3 heads and 1 relations"),
    "no such head": ({"heads": [1, 3, -1]}, "head of word 1, 'dog', is 3"),
    "itself": ({"heads": [1, 1, -1]}, "head of word 1, 'dog', is 1"),
    "blank word": ({"words": ["the", " ", "sees"]}, "no token covers ' '"),
    "too long": (
        {"words": ["dog"] * 200, "heads": [*range(1, 200), -1], "relations": ["x"] * 200},
        "202 tokens, but the model's context holds 128",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_sentence_that_cannot_be_used_is_named(case: str, encoder: hl.Model):
    fields, message = WRONG[case]
    with pytest.raises(RecordError, match=f"^record 1: .*{message}"):
        Syntactic().measure(Probing(encoder, records=(GOOD, GOOD | fields)))


def test_what_cannot_be_measured_is_said(encoder: hl.Model, twin: Callable[..., Any]):
    with pytest.raises(PromptError, match="fast tokenizer"):
        parsed_sentences(None, [GOOD])
    with pytest.raises(RoleError, match="'sideways'"):
        Syntactic(None, "sideways")  # type: ignore[arg-type]
    mute = hl.load(twin("bert"))
    gpt2 = hl.load(build("gpt2"), tokenizer=wordpieces())
    cases = [
        (Syntactic(), mute, (GOOD,), "fast tokenizer"),
        (Syntactic(), encoder, None, "no records"),
        (Syntactic("xcomp"), encoder, (GOOD,), "'xcomp'"),
        (Syntactic(DET), gpt2, (GOOD,), "'det'"),  # a determiner does not see the noun after it
    ]
    for role, model, records, why in cases:
        got = role.measure(Probing(model, records=records))
        assert np.isnan(got.values).all()
        assert got.notes[-1, -1].startswith("not measurable: ")
        assert why in got.notes[-1, -1]


@pytest.mark.parametrize("family", ["gemma2", "llama4_text", "gpt_oss", "roberta", "deepseek_v3"])
def test_every_family_can_be_measured(family: str, lab: Callable[..., Any]):
    model = hl.load(lab(family).module, tokenizer=wordpieces())
    got = Syntactic().measure(Probing(model, records=tuple(sentences(4))))
    assert got.values.shape == got.null.shape == (4, 2, model.spec.n_heads)
    assert np.array_equal(np.isnan(got.values), np.isnan(got.null))
    assert not np.isnan(got.values[:, 1]).any()
    kept = read_sentence(Probing(model), parsed_sentences(wordpieces(), sentences(1), bos=1)[0])
    assert kept["guess"].max() < VOCAB_SIZE


def test_the_example_sentences_are_trees():
    records = read_records(data_folder() / "dependencies.jsonl", DEPENDENCY_SCHEMA, "syntactic")
    assert len(records) >= 40
    for record in records:
        heads = record["heads"]
        assert heads.count(-1) == 1
        for word in range(len(heads)):
            steps, at = 0, word
            while at != -1:
                at, steps = heads[at], steps + 1
                assert steps <= len(heads)
        named = {name for name, head in zip(record["relations"], heads, strict=True) if head == -1}
        assert named == {"root"}
    assert len({" ".join(record["words"]) for record in records}) == len(records)
