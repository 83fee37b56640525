"""IOI prompts are what they claim to be: who stands where, and what the corruption changes."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from real_model import eager_smollm2, planted_model, smollm2
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab.errors import PromptError
from headlab.roles import Probing
from headlab.roles.duplicate_token import IOI
from headlab.tasks.ioi import IOIPrompt, ioi_prompts, single_token_names
from headlab.tasks.prose import data_folder

NAMES = ("IO", "S1", "S2")


@cache
def prompts() -> tuple[IOIPrompt, ...]:
    return ioi_prompts(smollm2().tokenizer, 300, 0, 1)


def words(prompt: IOIPrompt, who: str, ids: tuple[int, ...] | None = None) -> str:
    return smollm2().tokenizer.decode((ids or prompt.ids)[slice(*prompt.spans[who])]).strip()


def test_hundreds_of_distinct_prompts_can_be_made_over_all_templates_and_both_orders():
    assert len({prompt.text for prompt in prompts()}) == 300
    kinds = Counter((prompt.template, prompt.order) for prompt in prompts())
    assert len(kinds) == 24
    assert max(kinds.values()) - min(kinds.values()) <= 1


def test_spans_hold_the_names_they_are_called_after():
    for prompt in prompts():
        io, subject = words(prompt, "IO"), words(prompt, "S1")
        assert words(prompt, "S2") == subject != io
        assert Counter(smollm2().tokenizer.decode([token]).strip() for token in prompt.ids)[io] == 1
        assert prompt.ids[prompt.spans["IO"][0]] == prompt.io
        assert prompt.ids[prompt.spans["S1"][0]] == prompt.subject
        assert all(stop - start == 1 for start, stop in prompt.spans.values())
        assert prompt.spans["END"] == (len(prompt.ids) - 1, len(prompt.ids))
        assert prompt.spans["S1+1"][0] == prompt.spans["S1"][1]
        assert (prompt.spans["IO"] < prompt.spans["S1"]) == (prompt.order == "ABBA")
        assert prompt.spans["S1"] < prompt.spans["S2"]


def test_the_corruption_changes_the_three_names_and_nothing_else():
    for prompt in prompts():
        places = {prompt.spans[who][0] for who in NAMES}
        differing = {
            at for at, (a, b) in enumerate(zip(prompt.ids, prompt.corrupted, strict=True)) if a != b
        }
        assert differing == places
        others = {words(prompt, who, prompt.corrupted) for who in NAMES}
        assert len(others) == 3
        assert not others & {words(prompt, "IO"), words(prompt, "S1")}
        assert smollm2().tokenizer.decode(prompt.corrupted[1:]) == prompt.corrupted_text


def test_prompts_are_told_by_the_seed_and_shifted_by_the_first_token():
    tokenizer = smollm2().tokenizer
    assert ioi_prompts(tokenizer, 10, 3, 1) == ioi_prompts(tokenizer, 10, 3, 1)
    assert ioi_prompts(tokenizer, 10, 3) != ioi_prompts(tokenizer, 10, 4)
    with_bos, without = ioi_prompts(tokenizer, 5, 3, 1), ioi_prompts(tokenizer, 5, 3)
    for a, b in zip(with_bos, without, strict=True):
        assert a.ids == (1, *b.ids)
        assert all(a.spans[who] == tuple(at + 1 for at in b.spans[who]) for who in a.spans)


def test_names_are_single_tokens_of_the_tokenizer():
    names = single_token_names(smollm2().tokenizer)
    assert len(names) >= 20
    for name, token in names.items():
        assert smollm2().tokenizer.decode([token]) == f" {name}"


@pytest.mark.parametrize("tokenizer", [None, tiny_tokenizer(), planted_model().tokenizer])
def test_tokenizers_without_the_names_are_refused_in_a_sentence(tokenizer: object):
    with pytest.raises(PromptError) as caught:
        ioi_prompts(tokenizer, 4, 0)
    assert "\n" not in str(caught.value)


def test_templates_name_two_people_and_one_of_them_again():
    data = json.loads((data_folder() / "ioi.json").read_text("utf-8"))
    assert len(set(data["names"])) == len(data["names"])
    for template in data["templates"]:
        for part in ("{A}", "{B}", "{S}", "{place}", "{object}"):
            assert template.count(part) == 1, template
        assert template.index("{A}") < template.index("{B}") < template.index("{S}")
        assert template.split()[-1] in ("to", "for")
        assert not template.startswith("{")  # a name in front would lack its leading space


def test_models_that_do_not_do_the_task_have_no_logit_difference():
    assert np.isnan(IOI.measure(Probing(planted_model()))).all()
    bert = hl.load(build("bert"), tokenizer=tiny_tokenizer())
    assert np.isnan(IOI.measure(Probing(bert))).all()


@pytest.mark.slow
def test_the_logit_difference_is_transformers_own_and_positive():
    found = IOI.measure(Probing(smollm2(), seed=2))
    made = ioi_prompts(smollm2().tokenizer, 16, 2, 1)
    with torch.no_grad():
        for at in (0, 7, 15):
            logits = eager_smollm2()(torch.tensor([made[at].ids])).logits[0, -1]
            wanted = float(logits[made[at].io] - logits[made[at].subject])
            assert found[at] == pytest.approx(wanted, abs=1e-3)
    assert found.mean() > 2
