"""Disrupting massive values: which numbers change, when, and what it does to behaviours."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from exact_models import exact
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab import planted
from headlab.errors import PlanError, PromptError
from headlab.parameters.on_prompts.disruption import disrupt
from headlab.parameters.on_prompts.disruption_effects import (
    Behaviour,
    behaviours,
    disruption,
)
from headlab.tasks import prose

LENGTHS = (14, 9)


def ids(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(4, 97, (2, LENGTHS[0]), generator=generator)
    found[1, LENGTHS[1] :] = -1
    return found


def mean_put(x: np.ndarray, dimensions: list[int], skip: int) -> np.ndarray:
    new = x.copy()
    for at in dimensions:
        new[skip:, at] = x[skip:, at].mean()
    return new


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2", "qwen3"])
@pytest.mark.parametrize("which", ["largest", "smallest"])
def test_the_dimension_of_each_head_is_set_to_its_mean(family: str, which: Any):
    model, skip = hl.load(exact(family)), 1
    plan = hl.keep.tensors("q", "k", layers=[0])
    plain = model.trace(ids(), keep=plan)
    with model.edit(*disrupt(which, skip=skip)):
        changed = model.trace(ids(), keep=plan)
    for row, length in enumerate(LENGTHS):
        for site in ("q", "k"):
            before = plain.tensor(site, 0)[row, :length].numpy()
            after = changed.tensor(site, 0)[row, :length].numpy()  # k: one per query head
            for head in range(after.shape[1]):
                x = before[:, head // (after.shape[1] // before.shape[1])]
                size = np.linalg.norm(x[skip:], axis=0)
                at = int(size.argmax() if which == "largest" else size.argmin())
                assert after[:, head] == pytest.approx(mean_put(x, [at], skip), abs=1e-6)


def test_as_many_dimensions_as_are_massive_change_for_controls_too():
    module = build("llama").double()
    with torch.no_grad():
        module.model.layers[0].self_attn.q_proj.weight[[14, 19]] *= (
            60  # dimensions 4 and 9 of head 1
        )
    model = hl.load(module)
    plan = hl.keep.tensors("q", layers=[0])
    before = model.trace(ids(), keep=plan).tensor("q", 0)[0]
    for which in ("largest", "smallest", "random"):
        edits = disrupt(which, sites=("q",), count="massive", factor=3, seed=5)  # type: ignore[arg-type]
        with model.edit(*edits):
            after = model.trace(ids(), keep=plan).tensor("q", 0)[0]
        differs = ((after - before).abs() > 1e-9).any(0)
        assert differs.sum(-1).tolist() == [0, 2, 0, 0, 0, 0]
        assert (set(differs[1].nonzero()[:, 0].tolist()) == {4, 9}) == (which == "largest")


def test_random_dimensions_are_drawn_by_seed_and_never_the_largest():
    model = hl.load(build("llama").double())
    plan = hl.keep.tensors("q", "k", layers=[0])
    plain = model.trace(ids(), keep=plan)
    seen = set()
    for seed in range(12):
        with model.edit(*disrupt("random", seed=seed)):
            changed = model.trace(ids(), keep=plan)
        q, k = (changed.tensor(site, 0)[0] for site in ("q", "k"))
        before = plain.tensor("k", 0)[0].repeat_interleave(3, 1)
        places = ((k - before).abs() > 1e-9).any(0)
        assert places.sum(-1).eq(1).all()
        assert torch.equal(places[0], places[2])  # the three query heads of a group share their key
        hit = ((q - plain.tensor("q", 0)[0]).abs() > 1e-9).any(0).int().argmax(-1)
        assert (hit != plain.tensor("q", 0)[0, 1:].norm(dim=0).argmax(-1)).all()
        seen.add(tuple(hit.tolist()))
    assert len(seen) == 12


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_decoding_steps_are_untouched(family: str):
    """The prompt is read under the edits by one call, and the rest decoded without them by another."""
    model = hl.load(build(family))
    prompt, edits = ids()[:1], disrupt("largest", count=3)
    with model.edit(*edits):
        found = model.generate(prompt, max_new_tokens=6).ids[0].tolist()
        output = model.forward(prompt, use_cache=True)
    ours, lasts = [], [output.logits[0, -1]]
    for _ in range(6):
        ours.append(int(lasts[-1].argmax()))
        cache = getattr(output, "cache", None) or output.past_key_values
        name = "cache" if getattr(output, "cache", None) is not None else "past_key_values"
        with torch.no_grad():
            output = model.module(torch.tensor([[ours[-1]]]), use_cache=True, **{name: cache})
        lasts.append(output.logits[0, -1])
    assert found == ours
    assert not torch.allclose(lasts[0], model.logits(prompt)[0, -1], atol=1e-3)
    if family == "gpt2":  # whose continuation the edits change
        assert model.generate(prompt, max_new_tokens=6).ids[0].tolist() != found


def test_generated_tokens_can_read_changed_keys():
    """Then a generation is what whole runs under the edits give, with the prompt's length held."""
    model = hl.load(build("llama"))
    prompt = ids()[:1]
    edits = disrupt("largest", count=3, cached=True)
    with model.edit(*edits):
        found = model.generate(prompt, max_new_tokens=6).ids[0].tolist()
    tokens: list[int] = []
    for _ in range(6):
        whole = torch.cat([prompt, torch.tensor([tokens], dtype=torch.long)], 1)
        output = model.forward(whole, model.bind(edits), length=prompt.shape[1], use_cache=False)
        tokens.append(int(output.logits[0, -1].argmax()))
    assert found == tokens
    with model.edit(*disrupt("largest", count=3)):
        assert model.generate(prompt, max_new_tokens=6).ids[0].tolist() != found


def test_prompts_of_a_batch_do_not_touch_each_other():
    model = hl.load(build("llama").double())
    with model.edit(*disrupt("largest", count=2)):
        together = model.logits(ids())
        left = model.generate(ids(), max_new_tokens=4).ids
        for row, length in enumerate(LENGTHS):
            alone = ids()[row : row + 1, :length]
            assert torch.allclose(together[row, :length], model.logits(alone)[0], atol=1e-5)
            assert torch.equal(left[row], model.generate(alone, max_new_tokens=4).ids[0])


def test_effects_are_those_of_single_runs():
    model = hl.load(build("llama"), tokenizer=tiny_tokenizer())
    prompts = ids().tolist()
    prompts[1] = prompts[1][: LENGTHS[1]]
    metric = hl.metrics.log_probability([7, 9])
    asked = [Behaviour("mine", "contextual", prompts, metric)]
    found = disruption(model, asked, kinds=("largest", "smallest"), count=2)
    for at, edits in enumerate([(), disrupt("largest", count=2), disrupt("smallest", count=2)]):
        with model.edit(*edits):
            for row, (prompt, answer) in enumerate(zip(prompts, (7, 9), strict=True)):
                wanted = float(model.logits(prompt)[0, -1].log_softmax(-1)[answer])
                assert found.values["mine"][at, row] == pytest.approx(wanted, abs=1e-5)
    frame = found.frame.set_index("which")
    effects = found.values["mine"][1:] - found.values["mine"][0]
    assert frame.loc["largest", "effect"] == pytest.approx(effects[0].mean())
    assert frame.loc["largest", "beyond_control"] == pytest.approx((effects[0] - effects[1]).mean())
    assert np.isnan(frame.loc["smallest", "beyond_control"])
    assert (frame["q_value"] >= frame["p_value"] - 1e-12).all()
    json.loads(found.to_json())
    row = frame.loc["largest"]
    assert f"effect {row['effect']:.3g} [{row['ci_low']:.3g}, {row['ci_high']:.3g}], q " in repr(
        found
    )
    # A random model knows none of the answers, which the log-probabilities show and other metrics need not.
    clean = found.values["mine"][0].mean()
    assert clean < -3
    logits = model.logits(ids())[[0, 1], [LENGTHS[0] - 1, LENGTHS[1] - 1]].mean(0)
    least, most = int(logits.argmin()), int(logits.argmax())
    assert f"the unedited model hardly does this (mean log-probability {clean:.3g} nats" in repr(
        found
    )
    other = Behaviour(
        "mine", "contextual", prompts, hl.metrics.logit_difference([least, least], [most, most])
    )
    unlike = disruption(model, [other], kinds=("largest",))
    assert unlike.values["mine"][0].mean() < -3
    assert not unlike.about["note"]
    own = replace(other, metric=lambda logits, rows: logits[:, least])  # a user's function
    assert not disruption(model, [own], kinds=("largest",)).about["note"]
    with pytest.raises(PlanError, match="no behaviour 'yours'"):
        found.contrast("mine", "yours")


def test_losing_a_planted_key_costs_what_needs_the_context_alone():
    """A planted induction head reads the token code from q and k; the behaviour that uses it falls."""
    made = planted.model("llama", {"L1H0": "previous_token", "L2H1": "induction"}, max_context=96)
    model = hl.load(made.module, tokenizer=made.tokenizer)
    context = behaviours(model, 12, seed=0)[0]
    assert (context.name, context.kind) == ("repeated tokens", "contextual")
    weights = Behaviour("first tokens", "parametric", [row[:2] for row in context.prompts],
                        hl.metrics.log_probability([row[2] for row in context.prompts]))  # fmt: skip
    found = disruption(model, [context, weights], count=40)
    frame = found.frame.set_index(["behaviour", "which"])
    assert frame.loc[("repeated tokens", "largest"), "clean"] > -1
    assert "repeated tokens" not in found.about["note"]
    assert frame.loc[("repeated tokens", "largest"), "effect"] < -1
    assert frame.loc[("repeated tokens", "largest"), "q_value"] < 0.05
    contrast = found.contrast("repeated tokens", "first tokens")
    assert contrast["ci_low"] <= contrast["difference"] <= contrast["ci_high"] < 0


class Letters:
    """A tokenizer of the words in headlab's prose and facts: every word a token, its space with it."""

    def __init__(self) -> None:
        self.words: list[str] = ["<unk>"]
        self.unk_token_id, self.bos_token_id, self.cls_token_id = 0, None, None
        self.all_special_ids: list[int] = [0]
        self.added_tokens_decoder: dict[int, Any] = {}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        import re

        found = []
        for word in re.findall(r" ?[^\s.,]+|[.,]|\s+?(?=\s|$)|\s", text):
            if word not in self.words:
                self.words.append(word)
            found.append(self.words.index(word))
        return {"input_ids": found}

    def __len__(self) -> int:
        return len(self.words)

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[at] for at in ids)


def test_the_behaviours_ask_for_what_stands_in_the_prompt_and_for_what_does_not():
    tokenizer = Letters()
    tokenizer(prose()[:40000])
    module = build("llama", vocab_size=20000, max_position_embeddings=256)
    model = hl.load(module, tokenizer=tokenizer)
    behaviours(model, 5, seed=3)  # so that the tokenizer has seen every word
    found = {one.name: one for one in behaviours(model, 5, seed=3)}
    assert set(found) == {"repeated tokens", "secret word", "facts"}
    for name, one in found.items():
        assert one.kind == ("parametric" if name == "facts" else "contextual")
        bound = one.metric.bind(model, model.tokens(one.prompts))
        for prompt, (answer,) in zip(one.prompts, bound.about["answers"], strict=True):
            assert (answer in prompt) == (one.kind == "contextual")
            if name == "secret word":
                text = tokenizer.decode(list(prompt))
                assert text.count("The secret word is") == 2
                assert text.endswith("The secret word is")
                assert tokenizer.words[answer] in text
            if name == "repeated tokens":  # what followed the last token before
                last = len(prompt) - 1
                earlier = max(at for at in range(last) if prompt[at] == prompt[last])
                assert prompt[earlier + 1] == answer
    again = {one.name: one for one in behaviours(model, 5, seed=3)}
    assert [one.prompts for one in again.values()] == [one.prompts for one in found.values()]
    # A tokenizer that does not know the words gives none of theirs.
    tiny = hl.load(build("llama"), tokenizer=tiny_tokenizer())
    assert [one.name for one in behaviours(tiny, 5)] == ["repeated tokens"]


def test_bad_input_is_refused():
    model = hl.load(build("llama"))
    for wrong in ({"which": "huge"}, {"sites": "q"}, {"sites": ("v",)}, {"count": 0}, {"skip": -1}):
        with pytest.raises(PlanError):
            disrupt(**wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="measured="):
        disruption(model, [])
    with pytest.raises(PlanError, match="kinds="):
        disruption(model, kinds=("largest", "largest"))
    with pytest.raises(PromptError, match="too few to repeat"):
        behaviours(hl.load(build("llama", vocab_size=7, eos_token_id=2)))
    with model.edit(*disrupt()), pytest.raises(PlanError, match="length must be known"):
        model.module(ids()[:1])
