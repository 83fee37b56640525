"""Found in the middle: documents get attention by relevance, each in proportion, and keep what they had together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import exp

import pytest
import torch
from exact_pair import Pair, pair
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_by_hand import FAMILIES, Change, holds_everywhere, pattern_under
from test_capture import ids_of, ragged
from torch import Tensor

import headlab as hl
from headlab import planted
from headlab.errors import HeadError, PlanError, PromptError
from headlab.planted.meanings import TOPICS
from headlab.steering import FoundInTheMiddle
from headlab.steering.document_attention import document_attention, document_places, relevance
from headlab.steering.rewriting import set_shares

DUMMY = (40, 41)
#: Of prompts of 11, 7 and 9 tokens: three documents, two, and two with a gap.
PLACES = [[(1, 3), (3, 6), (7, 9)], [(1, 3), (3, 5)], [(2, 4), (5, 7)]]
T = 0.05


def last_row(both: Pair, ids: Tensor, place: tuple[int, int]) -> float:
    """Attention of the last token to a token of a document: mean over tokens, heads and layers."""
    seen: list[Tensor] = []

    def look(x: Tensor, layer: int) -> Tensor:
        seen.append(x[0, :, -1, place[0] : place[1]].mean())
        return x

    both.logits(ids, pattern=look)
    return float(torch.stack(seen).mean())


def relevances(both: Pair, ids: Tensor, places: list[tuple[int, int]]) -> list[float]:
    found = []
    for start, stop in places:
        dummy = ids.clone()
        dummy[start:stop] = torch.tensor([DUMMY[at % 2] for at in range(stop - start)])
        found.append(last_row(both, ids, (start, stop)) - last_row(both, dummy, (start, stop)))
    return found


def shared_out(heads: dict[int, tuple[int, ...]], both: Pair, ids: Tensor, row: int) -> Change:
    places = PLACES[row]
    found = relevances(both, ids, places)
    total = sum(exp(x / T) for x in found)
    alpha = [exp(x / T) / total for x in found]

    def change(a: Tensor, layer: int, head: int, query: int) -> Tensor:
        if head not in heads.get(layer, ()) or query < places[-1][1]:
            return a
        new = a.clone()
        for weight, (start, stop) in zip(alpha, places, strict=True):
            new[start:stop] = a[start:stop] * weight / a[start:stop].mean()
        before, after = (sum(x[start:stop].sum() for start, stop in places) for x in (a, new))
        for start, stop in places:
            new[start:stop] *= before / after
        return new

    return change


@pytest.mark.parametrize("family", FAMILIES)
def test_it_equals_the_formula_in_one_pass_in_batches_and_in_generation(family: str) -> None:
    method = FoundInTheMiddle(PLACES, temperature=T, dummy=DUMMY)  # the last half of two layers
    both = pair(family)
    heads = {1: tuple(range(both.model.spec.layers[1].n_heads))}
    holds_everywhere(family, method, partial(shared_out, heads))
    named = FoundInTheMiddle(PLACES, "0.1, 1.0", temperature=T, dummy=DUMMY)
    holds_everywhere(family, named, partial(shared_out, {0: (1,), 1: (0,)}))


def test_relevance_is_attention_less_that_of_a_dummy_in_its_place() -> None:
    both, ids = pair("llama"), ragged((11, 7, 9))
    found = relevance(both.model, ids, PLACES, DUMMY)
    for row, places in enumerate(PLACES):
        prompt = ids[row][ids[row] >= 0]
        expected = relevances(both, prompt, places)
        assert found[row, : len(places)] == pytest.approx(expected, abs=1e-6)
        mean = document_attention(both.model, ids, PLACES)[row]
        assert mean[: len(places)] == pytest.approx(
            [last_row(both, prompt, place) for place in places], abs=1e-6
        )
    assert bool(torch.tensor(found[1:, 2]).isnan().all())


def test_relevances_that_are_known_are_taken_as_they_are() -> None:
    model, ids = pair("llama").model, ragged((11, 7, 9))
    method = FoundInTheMiddle(PLACES, "*.*", T, DUMMY)
    found = relevance(model, ids, PLACES, DUMMY)
    known = [row[: len(places)].tolist() for row, places in zip(found, PLACES, strict=True)]
    with hl.steer(model, method):
        expected = model.logits(ids)
    with hl.steer(model, replace(method, relevances=known)):
        assert torch.equal(model.logits(ids)[ids >= 0], expected[ids >= 0])
    with (
        pytest.raises(PlanError, match=r"relevances= are of \[3\]"),
        hl.steer(model, replace(method, relevances=known[:1])),
    ):
        model.logits(ids)


@settings(max_examples=12)
@given(seed=st.integers(0, 99), groups=st.integers(1, 3), n=st.integers(6, 10))
def test_documents_keep_their_mass_together_and_other_keys_their_own(
    seed: int, groups: int, n: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    pattern = torch.rand(1, 2, 3, n, generator=g, dtype=torch.float64)
    pattern = pattern / pattern.sum(-1, keepdim=True)
    masks = torch.zeros(1, groups, n, dtype=torch.bool)
    for at in range(groups):
        masks[0, at, 2 * at : 2 * at + 1 + (seed + at) % 2] = True
    weights = torch.rand(1, groups, generator=g, dtype=torch.float64)
    new = set_shares(pattern, masks, weights)
    inside = masks.any(1)[0]
    torch.testing.assert_close(new[..., ~inside], pattern[..., ~inside])
    torch.testing.assert_close(new.sum(-1), pattern.sum(-1))
    means = torch.stack([new[..., masks[0, at]].mean(-1) for at in range(groups)], -1)
    wanted = weights[0] / weights.sum()
    torch.testing.assert_close(means / means.sum(-1, keepdim=True), wanted.expand_as(means))


def test_one_document_changes_nothing_and_a_low_temperature_leaves_one() -> None:
    both, ids = pair("llama"), ids_of(9, 1)
    plain = both.model.trace(ids, keep=hl.keep.tensors("pattern")).tensor("pattern")
    one = pattern_under(both.model, FoundInTheMiddle([(2, 6)], "*.*", dummy=DUMMY), ids)
    torch.testing.assert_close(one, plain, atol=1e-7, rtol=0)
    places = [(1, 3), (3, 5), (5, 7)]
    cold = FoundInTheMiddle(places, "0.*", temperature=1e-9, dummy=DUMMY)
    rows = pattern_under(both.model, cold, ids)[0, 0, :, 7:]
    best = max(range(3), key=relevances(both, ids[0], places).__getitem__)
    for at, (start, stop) in enumerate(places):
        given_mass = rows[..., start:stop].sum(-1)
        expected = plain[0, 0, :, 7:, 1:7].sum(-1) if at == best else torch.zeros_like(given_mass)
        torch.testing.assert_close(given_mass, expected, atol=1e-6, rtol=0)


def test_a_planted_contextual_head_is_moved_to_the_gold_document() -> None:
    made = planted.model("llama", {"L1H2": "contextual"}, n_heads=8, n_layers=2, max_context=128)
    model = hl.load(made.module, tokenizer=made.tokenizer)
    record = made.records("contextual", 1)[0]
    topic = next(words for words in TOPICS.values() if record["answer"] in words)
    documents = list(record["documents"])
    prompt = " . ".join(documents) + " . " + topic[0]
    places = document_places(model, model.tokens(prompt), documents)[0]
    plain = model.trace(prompt, keep=hl.keep.rows(queries=[-1])).rows[0, 1, :, 0]
    with hl.steer(model, FoundInTheMiddle(documents, "1.*", 1e-4, dummy=documents[0].split()[1])):
        rows = model.trace(prompt, keep=hl.keep.rows(queries=[-1])).rows[0, 1, :, 0]
    start, stop = places[record["gold"]]
    other = [head for head in range(8) if head != 2]
    for (
        head
    ) in other:  # heads that look everywhere alike now look at what the contextual head found
        inside = sum(float(rows[head, a:b].sum()) for a, b in places)
        assert float(rows[head, start:stop].sum()) > 0.9 * inside
        assert float(plain[head, start:stop].sum()) < 0.6 * inside


def test_what_cannot_be_documents_is_refused() -> None:
    model, ids = pair("llama").model, ids_of(9, 1)
    for wrong, said in (
        (partial(FoundInTheMiddle, []), "spans="),
        (partial(FoundInTheMiddle, ["a"], temperature=0), "temperature="),
        (partial(FoundInTheMiddle, ["a"], dummy=""), "dummy="),
    ):
        with pytest.raises(PlanError, match=said):
            wrong()
    for spans, error, said in (
        ([(1, 4), (3, 5)], PromptError, "position 3"),
        ([(1, 40)], PromptError, "not in the prompt"),
        ([[(1, 2)], [(2, 3)]], PlanError, "marks 2 prompts"),
    ):
        with pytest.raises(error, match=said), hl.steer(model, FoundInTheMiddle(spans)):
            model.logits(ids)
    text = model.text([7, 8, 9, 7, 8, 9])
    with (
        pytest.raises(PromptError, match="2 times"),
        hl.steer(model, FoundInTheMiddle([model.text([7, 8, 9]).strip()])),
    ):
        model.logits(text)
    with pytest.raises(HeadError), hl.steer(model, FoundInTheMiddle(["a"], "9.9")):
        pass
    with pytest.raises(PlanError, match=r"hl\.steer"):
        FoundInTheMiddle(["a"]).edits(model)
    assert FoundInTheMiddle(["a"]).marking([["b"]]).documents == [["b"]]
    assert FoundInTheMiddle(["a"]).at(0.1).temperature == 0.1
    assert not model.edited
