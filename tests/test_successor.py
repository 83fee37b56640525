"""Successor heads: lists as tokens, a head built to name the next item, and the score in float64."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from real_model import smollm2
from tiny_models import build, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import headlab as hl
from headlab.roles import Probing
from headlab.roles.successor import NEXT_ITEM, Successor
from headlab.tasks import RecordError
from headlab.tasks.prose import data_folder
from headlab.tasks.sequences import dealt, ordered_tokens, single_token

OWN = json.loads((data_folder() / "sequences.json").read_text("utf-8"))["sequences"]
LISTS = {record["name"]: record for record in OWN}
NUMBERED = {"name": "numbered", "items": [f"w{i}" for i in range(10, 30)]}

# -- lists -----------------------------------------------------------------------------------------


def test_lists_are_what_their_names_say():
    for record in OWN:
        assert len(set(record["items"])) == len(record["items"]), record["name"]
    assert LISTS["numerals"]["items"] == [str(i) for i in range(1, 101)]
    assert [int(year) for year in LISTS["decades"]["items"]] == list(range(1900, 2030, 10))
    assert "".join(LISTS["capitals"]["items"]).lower() == "".join(LISTS["small letters"]["items"])
    for long, short in (("days", "short days"), ("months", "short months")):
        pairs = zip(LISTS[long]["items"], LISTS[short]["items"], strict=True)
        assert all(a.startswith(b) for a, b in pairs)
        assert LISTS[long]["cyclic"]


def test_members_are_the_items_that_are_one_token_and_pairs_are_neighbours_in_the_list():
    tokenizer = smollm2().tokenizer
    found = {each.name: each for each in ordered_tokens(tokenizer)}
    assert {"days", "months", "number words"} <= set(found)
    for name, each in found.items():
        items = LISTS[name]["items"]
        texts = [tokenizer.decode([token]).strip() for token in each.members]
        assert texts == [item for item in items if single_token(tokenizer, item) is not None]
        for a, b in each.pairs:
            after = (items.index(texts[a]) + 1) % len(items)
            assert items[after] == texts[b]
            assert after or LISTS[name]["cyclic"]
    assert len(found["days"].pairs) == 7  # Sunday is followed by Monday
    assert len(found["days"].runs(4)) == 7
    # SmolLM2 splits numbers into digits, so its numerals end at 9.
    assert len(found["numerals"].members) == 9
    assert len(found["numerals"].runs(4)) == 6


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", unk_token="<unk>")


def test_a_gap_in_a_list_makes_no_pair():
    months = [month for month in LISTS["months"]["items"] if month != "April"]
    (found,) = ordered_tokens(word_tokenizer(["<bos>", "<unk>", *months]))
    assert found.name == "months"
    texts = [months[token - 2] for token in found.members]
    assert texts == months
    named = [(texts[a], texts[b]) for a, b in found.pairs]
    assert len(named) == 10
    assert not any(a == "March" or b == "May" for a, b in named)
    assert ("December", "January") in named


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["w10", "w11", "w12", "w200", "w13"], "record 1: 'w200' is not a single token"),
        (["w10", "w11", "w12", "two words", "w13"], "record 1: 'two words' is not a single token"),
        (["w10", "w11", "w12", "w13", " w10"], "record 1: 'w10' and ' w10' are the same token"),
    ],
)
def test_lists_the_tokenizer_cannot_use_are_refused_by_number(items: list[str], message: str):
    model = hl.load(build("llama"), tokenizer=tiny_tokenizer())
    records = (NUMBERED, {"name": "bad", "items": items})
    with pytest.raises(RecordError, match=message):
        Successor().measure(Probing(model, records=records))


def test_items_are_dealt_once_and_at_most_one_of_a_list_to_a_group():
    lists = ordered_tokens(smollm2().tokenizer)
    groups = dealt(lists, 20, 0)
    assert len(groups) == 20
    every = [item for group in groups for item in group]
    assert len(set(every)) == len(every)
    for group in groups:
        assert len({which for which, _ in group}) == len(group)
    for which, found in enumerate(lists):
        assert sum(at == which for at, _ in every) == min(20, len(found.pairs))


def test_the_schema_accepts_its_example_and_no_short_list():
    validator = Draft202012Validator(Successor.schema)
    validator.check_schema(Successor.schema)
    assert all(validator.is_valid(example) for example in Successor.schema["examples"])
    assert not validator.is_valid({"name": "few", "items": ["a", "b"]})
    assert not validator.is_valid({"items": ["a", "b", "c", "d", "e"]})


# -- a head built for it ---------------------------------------------------------------------------


@cache
def calendar_model() -> hl.Model:
    """One layer: head 0 writes the token it reads, head 1 its successor, head 2 its predecessor, head 3 noise."""
    lists = [LISTS["days"]["items"], LISTS["months"]["items"]]
    words = ["<bos>", "<unk>", *lists[0], *lists[1]]
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, head_dim=32, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    module = LlamaForCausalLM(config).eval()
    codes = torch.linalg.qr(torch.randn(32, 32))[0][: len(words)]
    steps = {0: 0, 1: 1, 2: -1}
    with torch.no_grad():
        module.model.embed_tokens.weight.copy_(codes)
        block = module.model.layers[0]
        block.self_attn.v_proj.weight.copy_(torch.eye(32).repeat(2, 1))
        for head in range(4):
            write = torch.randn(32, 32) if head == 3 else torch.zeros(32, 32)
            for start, items in ((2, lists[0]), (9, lists[1])):
                for at in range(len(items)):
                    if head < 3:
                        to = start + (at + steps[head]) % len(items)
                        write += torch.outer(codes[to], codes[start + at])
            block.self_attn.o_proj.weight[:, 32 * head : 32 * head + 32] = write
        for parameter in block.mlp.parameters():
            parameter.zero_()
    return hl.load(module, tokenizer=word_tokenizer(words))


def test_a_head_built_to_name_the_next_item_is_claimed_and_its_neighbours_are_not():
    scores = hl.score(calendar_model(), [Successor()], n_prompts=12)
    assert scores.claimed("successor") == ["L0H1"]
    rows = scores.frame.set_index("head")
    assert rows.loc[1, "score"] == 1
    assert rows.loc[2, "score"] == 0
    assert rows.loc[0, "score"] < 0.5  # it raises no other member
    for name in ("days", "months"):
        detail = scores.detail("successor", f"successor of {name}").set_index("head")["value"]
        assert detail[1] == 1
        assert detail[2] == 0
    assert scores.detail("successor", "predecessor").set_index("head")["value"][2] == 1


def test_chance_is_one_in_the_other_members():
    frame = hl.score(calendar_model(), [Successor()], n_prompts=12).frame
    found = dealt(ordered_tokens(calendar_model().tokenizer), 12, 0)
    assert all(len(group) in (1, 2) for group in found)
    names = [each.name for each in ordered_tokens(calendar_model().tokenizer)]
    chance = {at: 1 / (len(LISTS[name]["items"]) - 1) for at, name in enumerate(names)}
    assert chance == {0: 1 / 6, 1: 1 / 11}
    wanted = np.mean([np.mean([chance[at] for at, _ in group]) for group in found])
    np.testing.assert_allclose(frame["null_mean"], wanted)


def test_the_score_of_a_tiny_model_equals_the_formula_on_transformers_values():
    module = build("gpt2")
    model = hl.load(build("gpt2"), tokenizer=tiny_tokenizer())
    found = Successor().measure(Probing(model, seed=1, n_prompts=20, records=(NUMBERED,)))
    assert found.values.shape == (19, 2, 3)
    values = []
    with torch.no_grad():
        for token in range(10, 29):
            states = module(torch.tensor([[1, token]]), output_hidden_states=True).hidden_states
            hits = np.zeros((2, 3))
            for layer, block in enumerate(module.transformer.h):
                v = block.attn.c_attn(block.ln_1(states[layer]))[0, -1, 72:].double()
                for head in range(3):
                    part = slice(12 * head, 12 * head + 12)
                    result = v[part] @ block.attn.c_proj.weight[part].double()
                    spread = (result - result.mean()) * module.transformer.ln_f.weight.double()
                    logits = module.lm_head.weight[10:30].double() @ spread
                    logits[token - 10] = -torch.inf
                    hits[layer, head] = int(logits.argmax()) + 10 == token + 1
            values.append(hits)
    np.testing.assert_allclose(found.values.mean(0), np.mean(values, 0))


@pytest.mark.parametrize("family", ["bert", "gemma2", "deepseek_v3", "gpt_oss"])
def test_successor_can_be_asked_of_every_kind_of_model(family: str):
    model = hl.load(build(family), tokenizer=tiny_tokenizer())
    frame = hl.score(model, [Successor()], n_prompts=3, data={"successor": [NUMBERED]}).frame
    assert frame["score"].isna().all() == (family == "bert")
    assert (frame["note"].str.len() > 0).all()


def test_a_tokenizer_that_splits_every_list_and_none_at_all_are_said_so():
    for tokenizer in (tiny_tokenizer(), None):
        model = hl.load(build("llama"), tokenizer=tokenizer)
        frame = hl.score(model, [Successor()], n_prompts=3).frame
        assert frame["note"].str.startswith("not measurable").all()


# -- the behaviour ---------------------------------------------------------------------------------


def test_the_next_items_log_probability_is_transformers_own():
    module, model = build("llama"), hl.load(build("llama"), tokenizer=tiny_tokenizer())
    records: tuple[dict[str, Any], ...] = ({"name": "five", "items": [f"w{i}" for i in range(20, 25)]},)  # fmt: skip
    found = NEXT_ITEM.measure(Probing(model, records=records))
    wanted = []
    with torch.no_grad():
        for start in (20, 21):
            logits = module(torch.tensor([[1, start, start + 1, start + 2]])).logits[0, -1]
            wanted.append(float(torch.log_softmax(logits.double(), -1)[start + 3]))
    np.testing.assert_allclose(sorted(found), sorted(wanted), atol=1e-4)
    assert np.isnan(NEXT_ITEM.measure(Probing(hl.load(build("llama"))))).all()


@pytest.mark.slow
def test_the_real_model_continues_lists():
    """With commas between the items; without them it would be far less sure."""
    found = NEXT_ITEM.measure(Probing(smollm2()))
    assert found.shape == (40,)
    assert found.mean() > -3
