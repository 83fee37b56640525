"""Function vectors and task vectors against formulas in float64 on a twin steered by hand, and on a planted task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact_pair import Pair, pair, singles
from oracle import assert_close
from test_capture import ids_of, ragged
from tiny_models import tiny_tokenizer
from torch import Tensor

import headlab as hl
from headlab import planted
from headlab.errors import HeadError, PlanError
from headlab.steering import FunctionVector, TaskVectors, indirect_effects, top_heads
from headlab.tasks import ICLPrompt

FAMILIES = ["llama", "gpt2"]  # grouped heads; an output projection with a bias
HEADS = ((0, 1), (1, 0), (1, 2))
TEXT = "0.1, 1.0, 1.2"
CLOSE = 1e-5  # what is learned is kept in float32


def prompts(lengths: Sequence[int], seed: int) -> list[ICLPrompt]:
    """Prompts of words of the tiny tokenizer."""
    tokenizer, made = tiny_tokenizer(), []
    for row in singles(ragged(tuple(lengths), seed)):
        *words, answer = tokenizer.convert_ids_to_tokens(row.tolist())
        made.append(ICLPrompt(" ".join(words), words[-1], f" {answer}", 1, False))
    return made


GIVEN, SHUFFLED = prompts((9, 6, 8), 1), prompts((7, 9), 2)


def ids_in(this: Pair, prompt: ICLPrompt) -> Tensor:
    return this.model.tokens(prompt.text)[0]


def means(this: Pair, given: Sequence[ICLPrompt] = GIVEN) -> list[Tensor]:
    """ā of every head at last tokens, per layer [head, d_value]."""
    z = [[x[-1] for x in this.values("z", ids_in(this, prompt))] for prompt in given]
    return [torch.stack(layer).mean(0) for layer in zip(*z, strict=True)]


def written(this: Pair, heads: Sequence[tuple[int, int]]) -> list[Tensor]:
    """W_O^h ā_h by the bare weight."""
    mean = means(this)
    return [mean[layer][head] @ this.W_O(layer, head) for layer, head in heads]


def pushed(sums: dict[int, Tensor], rows: str = "prompt_end") -> Any:
    """Adds a vector after each layer's block at the prompt's end, for a prompt of ``start`` tokens."""

    def rewrites(start: int) -> dict[str, Any]:
        def at(vector: Tensor) -> Any:
            def change(x: Tensor) -> Tensor:
                x = x.clone()
                x[:, start - 1 : start if rows == "prompt_end" else None] += vector
                return x

            return change

        return {"stream": {layer: at(vector) for layer, vector in sums.items()}}

    return rewrites


def check_steered(this: Pair, method: Any, rewrites: Any) -> None:
    """Logits and generation of padded batches are those of the twin, prompt by prompt."""
    ids = ragged((9, 4, 6))
    with hl.steer(this.model, method):
        logits = this.model.logits(ids)
        left = this.model.generate(
            ragged((9, 4, 6), padding="left"), max_new_tokens=5, eos_token_id=None
        )
        new = this.model.generate(ids, max_new_tokens=5, eos_token_id=None).ids
    assert torch.equal(left.ids, new)
    for at, row in enumerate(singles(ids)):
        expected = this.logits(row, **rewrites(len(row)))
        assert_close(logits[at, : len(row)], expected, CLOSE)
        change = (expected - this.logits(row)).abs().amax(-1)
        assert float(change[:-1].max()) < CLOSE < 1e-3 < float(change[-1])
        assert new[at].tolist() == this.greedy(row, 5, rewrites)


# -- function vectors ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_function_vector_is_the_sum_of_mean_head_outputs(family: str) -> None:
    this = pair(family)
    method = FunctionVector.fit(this.model, GIVEN, TEXT, layer=1)
    assert_close(method.vector, torch.stack(written(this, HEADS)).sum(0), CLOSE)
    assert (method.heads, method.layer, method.rows) == ("L0H1, L1H0, L1H2", 1, "prompt_end")
    # The bias of the projection is not part of a head, and here there is one.
    bias = this.hand.projections[0].bias
    assert (bias is not None) == (family == "gpt2")
    assert bias is None or float(bias.detach().abs().max()) > 1e-2


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_added_after_the_layer_at_the_prompts_end_only(family: str, layer: int) -> None:
    this = pair(family)
    method = FunctionVector.fit(this.model, GIVEN, TEXT, layer=layer, factor=-2.0)
    check_steered(this, method, pushed({layer: -2.0 * method.vector.double()}))


def test_it_can_go_on_into_what_is_generated() -> None:
    this, row = pair("llama"), ids_of(6, 1)[0]
    method = FunctionVector.fit(this.model, GIVEN, TEXT, layer=0, factor=4.0)
    rewrites = pushed({0: 4.0 * method.vector.double()}, "from_end")
    with hl.steer(this.model, method._with(rows="from_end")):
        new = this.model.generate(row[None], max_new_tokens=8, eos_token_id=None).ids[0].tolist()
    assert new == this.greedy(row, 8, rewrites)
    assert new != this.greedy(row, 8, pushed({0: 4.0 * method.vector.double()}))


@pytest.mark.parametrize("family", FAMILIES)
def test_indirect_effects_are_rises_of_the_answer_under_mean_z(family: str) -> None:
    this, heads = pair(family), ((0, 2), (1, 1))
    frame = indirect_effects(this.model, GIVEN, SHUFFLED, "0.2, 1.1").frame
    mean = means(this)
    for layer, head in heads:
        rises = []
        for prompt in SHUFFLED:
            ids = ids_in(this, prompt)
            (answer,) = this.model.tokens(prompt.answer.strip())[0].tolist()[-1:]

            def change(z: Tensor, at: int, layer: int = layer, head: int = head) -> Tensor:
                z = z.clone()
                if at == layer:
                    z[:, -1, head] = mean[layer][head]
                return z

            before = this.logits(ids)[-1].softmax(-1)[answer]
            rises.append(float(this.logits(ids, z=change)[-1].softmax(-1)[answer] - before))
        row = frame[(frame["layer"] == layer) & (frame["head"] == head)].iloc[0]
        assert row["effect"] == pytest.approx(np.mean(rises), abs=1e-6)
        assert abs(row["effect"]) > 1e-5


def test_heads_are_those_of_largest_average_effect_over_tasks() -> None:
    model = pair("llama").model
    tables = [
        indirect_effects(model, GIVEN, SHUFFLED),
        indirect_effects(model, prompts((8, 5), 6), prompts((7, 6), 7)),
    ]
    mean = np.mean([table.frame["effect"] for table in tables], 0)
    keys = list(zip(tables[0].frame["layer"], tables[0].frame["head"], strict=True))
    expected = [keys[at] for at in sorted(range(12), key=lambda at: -mean[at])][:4]
    assert [tuple(head) for head in top_heads(tables, 4)] == expected
    chosen = FunctionVector.fit(model, GIVEN, shuffled=SHUFFLED, n_heads=3)
    by_name = FunctionVector.fit(model, GIVEN, list(top_heads(tables[:1], 3)))
    assert torch.equal(chosen.vector, by_name.vector)
    assert chosen.heads == by_name.heads
    assert chosen.layer == model.spec.n_layers // 3
    with pytest.raises(PlanError, match="n_heads=13"):
        top_heads(tables, 13)
    with pytest.raises(PlanError, match="same heads"):
        top_heads([tables[0], indirect_effects(model, GIVEN, SHUFFLED, "0.*")], 2)


# -- task vectors ----------------------------------------------------------------------------------


def untrained(this: Pair, seed: int = 0) -> TaskVectors:
    """Task vectors with random weights."""
    learned = TaskVectors.fit(this.model, GIVEN, SHUFFLED, steps=1)
    drawn = torch.randn(learned.weights.shape, generator=torch.Generator().manual_seed(seed))
    return learned._with(weights=drawn)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_task_vector_is_a_weighted_sum_of_its_layers_head_outputs(family: str) -> None:
    this = pair(family)
    method = untrained(this).at(0.5)
    sums = {}
    for layer in range(2):
        heads = [(layer, head) for head in range(this.model.spec.layers[layer].n_heads)]
        outputs = torch.stack(written(this, heads))
        assert_close(method.outputs[layer], outputs, CLOSE)
        sums[layer] = 0.5 * (method.weights[layer].double()[:, None] * outputs).sum(0)
    check_steered(this, method, pushed(sums))


def test_weights_of_0_change_nothing() -> None:
    this, ids = pair("llama"), ids_of()
    method = untrained(this)
    with hl.steer(this.model, method._with(weights=torch.zeros_like(method.weights))):
        steered = this.model.logits(ids)
    assert_close(steered, torch.stack([this.logits(row) for row in ids]), 1e-12)


def loss(this: Pair, outputs: Tensor, weights: Tensor, train: Sequence[ICLPrompt]) -> float:
    """Mean loss of the first token of each answer, by hand."""
    sums = {layer: weights[layer] @ outputs[layer].double() for layer in range(2)}
    found = []
    for prompt in train:
        ids = ids_in(this, prompt)
        answer = int(this.model.tokens(prompt.answer.strip())[0, -1])
        logits = this.logits(ids, **pushed(sums)(len(ids)))[-1]
        found.append(-float(logits.log_softmax(-1)[answer]))
    return float(np.mean(found))


def test_the_first_step_is_adams_on_the_gradient() -> None:
    # Adam's first step is the learning rate against the gradient's sign; the loss before it is that of weights of 0.
    this = pair("llama")
    method = TaskVectors.fit(this.model, GIVEN, SHUFFLED, steps=1, lr=0.25)
    zeros = torch.zeros(2, 6, dtype=torch.float64)
    assert method.losses[0] == pytest.approx(loss(this, method.outputs, zeros, SHUFFLED), abs=1e-5)
    for layer, head in ((0, 3), (1, 5)):
        ends = []
        for step in (1e-4, -1e-4):
            weights = zeros.clone()
            weights[layer, head] = step
            ends.append(loss(this, method.outputs, weights, SHUFFLED))
        slope = (ends[0] - ends[1]) / 2e-4
        assert abs(slope) > 1e-4
        assert float(method.weights[layer, head]) == pytest.approx(-0.25 * np.sign(slope), rel=1e-3)


def test_the_second_step_follows_the_gradients_size() -> None:
    # β = (0.9, 0.999): after g₁ and g₂ the weight has moved by m̂/√v̂ of both.
    this, at, lr = pair("llama"), (1, 5), 0.05
    one, two = (
        TaskVectors.fit(this.model, GIVEN, SHUFFLED, steps=steps, lr=lr) for steps in (1, 2)
    )
    slopes = []
    for weights in (torch.zeros_like(one.weights), one.weights):
        ends = []
        for step in (1e-4, -1e-4):
            moved = weights.double().clone()
            moved[at] += step
            ends.append(loss(this, one.outputs, moved, SHUFFLED))
        slopes.append((ends[0] - ends[1]) / 2e-4)
    mean = (0.09 * slopes[0] + 0.1 * slopes[1]) / (1 - 0.9**2)
    square = (0.000999 * slopes[0] ** 2 + 0.001 * slopes[1] ** 2) / (1 - 0.999**2)
    moved = float(two.weights[at] - one.weights[at])
    assert moved == pytest.approx(-lr * mean / np.sqrt(square), rel=2e-3)


def test_training_lowers_the_loss_and_leaves_the_model_alone() -> None:
    this, said = pair("llama"), []
    before = {name: x.clone() for name, x in this.model.module.state_dict().items()}
    method = TaskVectors.fit(
        this.model, GIVEN, SHUFFLED, steps=15, lr=0.1, seed=3, tell=said.append
    )
    first = loss(this, method.outputs, torch.zeros(2, 6, dtype=torch.float64), SHUFFLED)
    last = loss(this, method.outputs, method.weights.double(), SHUFFLED)
    assert len(method.losses) == len(said) == 15
    assert last < method.losses[-1] + 0.05 < first - 0.3
    after = this.model.module.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert all(x.grad is None for x in this.model.module.parameters())
    again = TaskVectors.fit(this.model, GIVEN, SHUFFLED, steps=15, lr=0.1, seed=3)
    assert torch.equal(again.weights, method.weights)
    (top, weight), *_ = method.top(3)
    assert abs(weight) == float(method.weights.abs().max()) == abs(float(method.weights[top]))


def test_the_model_is_bit_equal_afterwards() -> None:
    this, ids = pair("llama"), ids_of()
    plain = this.model.logits(ids)
    for method in (untrained(this), FunctionVector.fit(this.model, GIVEN, TEXT, factor=5.0)):
        with hl.steer(this.model, method):
            assert not torch.equal(this.model.logits(ids), plain)
            with pytest.raises(PlanError, match="headlab runs the prompt"):
                this.model.module(ids)
        assert torch.equal(this.model.logits(ids), plain)


def test_both_are_the_same_after_a_round_trip(tmp_path: Path) -> None:
    this, ids = pair("llama"), ids_of()
    for method in (
        untrained(this)._with(losses=(1.5, 0.5)),
        FunctionVector.fit(this.model, GIVEN, TEXT, layer=1, factor=3.0),
    ):
        found = hl.steering.load(method.save(tmp_path / "it.safetensors"))
        assert type(found) is type(method)
        for name, value in vars(method).items():
            same = getattr(found, name)
            assert torch.equal(same, value) if isinstance(value, Tensor) else same == value, name
        with hl.steer(this.model, method):
            expected = this.model.logits(ids)
        with hl.steer(this.model, found):
            assert torch.equal(this.model.logits(ids), expected)


@pytest.mark.parametrize("answer", ["for", "river"])
def test_a_planted_task_is_carried_to_prompts_without_examples(answer: str) -> None:
    # The task is to say the same word after every full stop, which an induction head does with
    # examples, and nothing does without.
    made = planted.model(
        "llama", {"L0H2": "previous_token", "L1H1": "induction"}, n_heads=6, distractors=4
    )
    model = hl.load(made.module, tokenizer=made.tokenizer)
    words = sorted(word for word in made.tokenizer.get_vocab() if word.isalpha() and word != answer)
    rng = np.random.default_rng(0)

    def task(n: int, n_shots: int, shuffled: bool = False) -> list[ICLPrompt]:
        found = []
        for _ in range(n):
            drawn = rng.permutation(words)[: 2 * n_shots + 1].tolist()
            source, sources, others = drawn[0], drawn[1 : n_shots + 1], drawn[n_shots + 1 :]
            said = others if shuffled else [answer] * n_shots
            shots = "".join(f"{one} . {two} " for one, two in zip(sources, said, strict=True))
            text = f"{shots}{source} ."
            found.append(ICLPrompt(text, source, f" {answer}", n_shots, shuffled))
        return found

    def accuracy(asked: list[ICLPrompt]) -> float:
        logits = model.trace([prompt.text for prompt in asked], logits="last").logits
        right = made.tokenizer.convert_tokens_to_ids(answer)
        return float((logits[:, 0].argmax(-1) == right).double().mean())

    given, asked = task(8, 5), task(12, 0)
    (head,) = top_heads([indirect_effects(model, given, task(6, 5, shuffled=True))], 1)
    assert str(head) == "L1H1"
    assert (accuracy(given), accuracy(asked)) == (1.0, 0.0)
    vector = FunctionVector.fit(model, given, [head], layer=1)
    with hl.steer(model, vector):
        assert accuracy(asked) == 1.0
    controls = [FunctionVector.fit(model, given, one, layer=1) for one in ("1.0", "1.3", "0.2")]
    for control in (*controls, vector.randomised(0), vector.randomised(1)):
        with hl.steer(model, control):
            assert accuracy(asked) == 0.0


def test_controls_have_the_same_norm() -> None:
    this = pair("llama")
    for method, name in (
        (untrained(this), "weights"),
        (FunctionVector.fit(this.model, GIVEN, TEXT), "vector"),
    ):
        own, turned = (getattr(one, name) for one in (method, method.randomised(2)))
        assert own.shape == turned.shape
        assert_close(turned.norm(), own.norm(), 1e-5)
        assert float(torch.cosine_similarity(own.flatten(), turned.flatten(), dim=0)) < 0.9
        assert torch.equal(turned, getattr(method.randomised(2), name))


def test_bad_input_is_refused_in_one_sentence() -> None:
    model = pair("llama").model
    with pytest.raises(PlanError, match=r"heads=.*shuffled="):
        FunctionVector.fit(model, GIVEN)
    with pytest.raises(PlanError, match=r"layer=2 does not exist.*0–1"):
        FunctionVector.fit(model, GIVEN, TEXT, layer=2)
    with pytest.raises(HeadError, match="9"):
        FunctionVector.fit(model, GIVEN, "9.0")
    with pytest.raises(PlanError, match="shuffled"):
        indirect_effects(model, GIVEN, [])
    vector = FunctionVector.fit(model, GIVEN, TEXT)
    with pytest.raises(PlanError, match="rows='ends'"):
        vector._with(rows="ends")
    with pytest.raises(PlanError, match="NaN"):
        vector._with(vector=vector.vector * torch.nan)
    for bad in ({"steps": 0}, {"lr": float("inf")}, {"seed": -1}):
        with pytest.raises(PlanError, match=next(iter(bad))):
            TaskVectors.fit(model, GIVEN, SHUFFLED, **bad)
    for given, train in (([], SHUFFLED), (GIVEN, [])):
        with pytest.raises(PlanError, match="prompts"):
            TaskVectors.fit(model, given, train)
    with pytest.raises(PlanError, match="fit it on"), hl.steer(pair("gpt2").model, vector):
        pass
    with pytest.raises(PlanError, match="NaN"):
        untrained(pair("llama"))._with(weights=torch.full((2, 6), torch.nan))
