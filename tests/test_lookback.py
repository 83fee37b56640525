"""Lookback ratios equal the formula on whole patterns, however prompts are run; examples are read as labelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from exact_models import exact
from tiny_models import BOS, build, tiny_tokenizer

import headlab as hl
from headlab.errors import PlanError, PromptError
from headlab.lookback import Example, check_examples, ratios, read_examples
from headlab.lookback.examples import tokenised
from headlab.lookback.ratios import masses, of_trace
from headlab.tasks import RecordError

FAMILIES = ["llama", "gpt2", "mistral", "gemma2", "gpt_oss"]


def ids(n: int, seed: int) -> tuple[int, ...]:
    drawn = torch.randint(4, 97, (n,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


def by_formula(
    module: Any, prompt: tuple[int, ...], response: tuple[int, ...], context: int
) -> Any:
    """LR [token, layer, head] from transformers' own whole patterns, a row and a head at a time."""
    with torch.no_grad():
        given = torch.tensor([prompt + response])
        patterns = module(input_ids=given, output_attentions=True).attentions
    found = np.zeros((len(response), len(patterns), patterns[0].shape[1]))
    for layer, pattern in enumerate(patterns):
        for t in range(len(response)):
            row = pattern[0, :, len(prompt) + t - 1, : len(prompt) + t].double().numpy()
            back, new = row[:, :context].mean(1), row[:, context:].mean(1)
            found[t, layer] = back / (back + new)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_ratios_are_the_formula_on_whole_patterns(
    family: str, lab: Callable[..., Any], eager: Callable[..., Any]
):
    prompt, response = (BOS, *ids(9, 0)), ids(7, 1)
    (found,) = ratios(lab(family), Example(prompt, response))
    assert found.shape == (7, 2, lab(family).spec.layers[0].n_heads)
    expected = by_formula(eager(family), prompt, response, context=len(prompt) - 1)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_ratios_are_the_formula_in_float64():
    plain = exact("llama")
    plain.set_attn_implementation("eager")
    prompt, response = ids(11, 2), ids(5, 3)
    (found,) = ratios(hl.load(exact("llama")), Example(prompt, response))
    np.testing.assert_allclose(found, by_formula(plain, prompt, response, 10), atol=1e-7)


def test_a_window_that_no_longer_reaches_the_context_gives_0(lab: Callable[..., Any]):
    model = lab("mistral")  # windows of 5 tokens in every layer
    (found,) = ratios(model, Example(ids(4, 4), ids(9, 5)))
    assert (found[:3] > 0).all()  # rows 3 to 5 still see key 2
    assert (found[4:] == 0).all()


def test_the_cue_counts_as_new(lab: Callable[..., Any], eager: Callable[..., Any]):
    model = lab("llama")
    words = " ".join(f"w{i}" for i in range(10, 22))
    example = Example(f"{words} w30 w31 w32", "w11 w12 w13 w14", cue="w30 w31 w32")
    tokens = tokenised(model, example)
    assert (tokens.start, tokens.context) == (15, 12)
    prompt, response = tuple(tokens.ids[:15].tolist()), tuple(tokens.ids[15:].tolist())
    expected = by_formula(eager("llama"), prompt, response, 12)
    np.testing.assert_allclose(ratios(model, example)[0], expected, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_batches_of_unlike_lengths_equal_single_runs(family: str, lab: Callable[..., Any]):
    model = lab(family)
    examples = [
        Example(ids(n, n), ids(m, m)) for n, m in ((5, 9), (14, 2), (8, 4), (3, 12), (9, 1))
    ]
    together, apart = ratios(model, examples, batch=3), ratios(model, examples, batch=1)
    for one, other, example in zip(together, apart, examples, strict=True):
        assert len(one) == len(example.response)
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_ratios_while_generating_a_padded_batch_equal_those_of_one_pass(
    family: str, lab: Callable[..., Any]
):
    model, prompts = lab(family), [list(ids(6, 6)), list(ids(11, 7))]
    contexts = torch.tensor([4, 10])
    made = model.generate(
        prompts,
        max_new_tokens=5,
        eos_token_id=[],
        keep=[masses(contexts, 16, queries="generated")],
    )
    rows = torch.tensor([len(p) - 1 for p in prompts])[:, None] + torch.arange(5)
    found = of_trace(made.trace, contexts, rows)
    for at, prompt in enumerate(prompts):
        whole = torch.tensor(prompt + made.ids[at].tolist())[None]
        context = contexts[at : at + 1]
        trace = model.trace(
            whole, keep=[masses(context, whole.shape[1], queries=rows[at : at + 1])]
        )
        expected = of_trace(trace, context, rows[at : at + 1])[0]
        np.testing.assert_allclose(found[at], expected, atol=2e-6)


def test_a_row_without_new_keys_has_no_ratio(lab: Callable[..., Any]):
    model, rows = lab("llama"), torch.tensor([[3, 4]])
    contexts = torch.tensor([5])
    trace = model.trace(list(ids(8, 8)), keep=[masses(contexts, 8, queries=rows)])
    assert np.isnan(of_trace(trace, contexts, rows)[0]).all()


def test_labels_follow_characters(lab: Callable[..., Any]):
    response = "w11 w12 w13 w14"
    example = Example("w5 w6 w7", response, bad=((5, 9),))  # the end of w12 and the start of w13
    assert tokenised(lab("llama"), example).labels.tolist() == [1, 0, 0, 1]
    assert tokenised(lab("llama"), Example("w5 w6", response)).labels is None
    assert tokenised(lab("llama"), Example((5, 6), (7, 8, 9), ((1, 2),))).labels.tolist() == [
        1,
        0,
        1,
    ]


def test_records_become_examples():
    records = [
        {"prompt": "a b", "response": "c d", "label": 0, "document": "x"},
        {"prompt": "a b", "response": "e f", "label": 1},
        {"prompt": "a b Answer:", "response": "g h", "bad": [[2, 3]], "cue": " Answer:"},
        {"prompt": "a b", "response": "i j"},
    ]
    found = read_examples(records)
    assert [one.bad for one in found] == [((0, 3),), (), ((2, 3),), None]
    assert [one.document for one in found] == ["x", "a b", "a b Answer:", "a b"]
    assert found[2].cue == " Answer:"
    assert found[0] == Example.labelled("a b", "c d", 0, document="x")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "a b", "response": " "}, "response"),
        ({"prompt": "a b"}, "'response' is a required property"),
        ({"prompt": "a b", "response": "c", "label": 2}, "2 is not one of"),
        ({"prompt": "a b", "response": "c", "label": 1, "bad": []}, "either label or bad"),
        ({"prompt": "a b", "response": "c", "bad": [[0, 4]]}, "does not lie in the response"),
        ({"prompt": "a b", "response": "c", "bad": [[1, 1]]}, "does not lie in the response"),
    ],
)
def test_a_record_that_cannot_be_used_is_refused(record: dict[str, Any], said: str):
    with pytest.raises(RecordError, match=said):
        read_examples([record])


@pytest.mark.parametrize(
    ("example", "error", "said"),
    [
        (Example("w5 w6", " "), PromptError, "the response is empty"),
        (Example((5, 6), ()), PromptError, "the response is empty"),
        (Example("  ", "w5"), PromptError, "the text is empty"),
        (Example("w5 w6", "w7", cue="w9"), PromptError, "is not the end of the prompt"),
        (Example("w5 w6", "w7", cue="w5 w6"), PromptError, "all cue"),
        (Example("w5", "w7"), PromptError, "all cue"),
        (Example((5, 6), (7,) * 200), PromptError, "a context of 128"),
        (Example("w5 w6", "w7", bad=((0, 9),)), PlanError, "does not lie in the response"),
        (Example("w5 w6", "w7", bad=((True, 2),)), PlanError, "does not lie in the response"),
        (Example((5, 6), "w7", cue="w6"), PromptError, "give the prompt as text"),
        (Example("w5 w6", 7), PromptError, "a response is text or token ids"),
        (Example((5, 6), (7, 400)), PromptError, "must lie in 0–96"),
        (Example((5, 6), (-1,)), PromptError, "empty"),
        ("w5 w6", PlanError, "hl.lookback.Example"),
    ],
)
def test_an_example_that_cannot_be_used_is_refused(
    example: Any, error: type[Exception], said: str, lab: Callable[..., Any]
):
    with pytest.raises(error, match=said):
        check_examples(lab("llama"), [example])


def test_nothing_to_read_is_refused(lab: Callable[..., Any]):
    with pytest.raises(PromptError, match="there are no examples"):
        ratios(lab("llama"), [])
    with pytest.raises(PromptError, match="no tokenizer that gives character offsets"):
        ratios(hl.load(build("gpt2")), Example("w5 w6", "w7"))
    with pytest.raises(PlanError, match="batch=0"):
        ratios(lab("llama"), Example((5, 6), (7,)), batch=0)


def test_text_and_its_ids_give_the_same_ratios(lab: Callable[..., Any]):
    model, tokenizer = lab("llama"), tiny_tokenizer()
    prompt, response = "w5 w6 w7 w8", "w9 w10"
    text = ratios(model, Example(prompt, response))[0]
    given = [tuple(tokenizer(part)["input_ids"]) for part in (prompt, response)]
    np.testing.assert_array_equal(text, ratios(model, Example(given[0], given[1]))[0])
    as_tensors = Example(model.tokens(prompt), torch.tensor(given[1]))
    np.testing.assert_array_equal(text, ratios(model, as_tensors)[0])
    assert tokenised(model, as_tensors).document == tokenised(model, Example(*given)).document
