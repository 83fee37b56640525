"""Metrics against sums done by hand, and every refusal."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import VOCAB_SIZE

from headlab.causal import metrics
from headlab.causal.metrics import as_metric, checked, token_ids
from headlab.errors import PlanError, PromptError

PROMPTS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, -1], [12, 13, 14, 15]])
NAN = math.nan


@pytest.fixture
def model(lab):
    return lab("llama")


def last_logits(*rows: dict[int, float]) -> torch.Tensor:
    """Logits [row, 1, vocab] that are 0 but where named."""
    logits = torch.zeros(len(rows), 1, VOCAB_SIZE, dtype=torch.float64)
    for at, row in enumerate(rows):
        for token, value in row.items():
            logits[at, 0, token] = value
    return logits


def test_logit_difference_takes_means_over_several_tokens_of_a_prompt(model):
    metric = metrics.logit_difference([20, [21, 22], 23], ["w30", ["w31", 32, 33], "w34"])
    bound = metric.bind(model, PROMPTS)
    logits = last_logits({20: 3.0, 30: 1.0}, {21: 1.0, 22: 4.0, 31: 6.0}, {23: -1.0, 34: 2.0})
    values = bound(logits, torch.tensor([0, 1, 2]))
    assert bound.needs == "last"
    assert values.tolist() == pytest.approx([3 - 1, 2.5 - 2.0, -1 - 2])
    # The same prompt twice in one batch, in another order.
    again = bound(logits[[2, 0, 0]], torch.tensor([2, 0, 0]))
    assert again.tolist() == pytest.approx([-3, 2, 2])
    assert bound.about["answers"] == [[20], [21, 22], [23]]


def test_probability_and_its_logarithm(model):
    logits = last_logits({20: 2.0}, {20: 1.0, 21: 1.0}, {})
    rows = torch.tensor([0, 1, 2])
    denominators = [VOCAB_SIZE - 1 + math.exp(2), VOCAB_SIZE - 2 + 2 * math.e, VOCAB_SIZE]
    hand = [math.exp(2) / denominators[0], math.e / denominators[1], 1 / denominators[2]]
    probability = metrics.probability(20).bind(model, PROMPTS)(logits, rows)
    assert probability.tolist() == pytest.approx(hand, rel=1e-12)
    logarithm = metrics.log_probability("w20").bind(model, PROMPTS)(logits, rows)
    assert logarithm.tolist() == pytest.approx([math.log(value) for value in hand], rel=1e-12)
    both = metrics.probability([[20, 40]] * 3).bind(model, PROMPTS)(logits, rows)
    assert both[0].item() == pytest.approx((hand[0] + 1 / denominators[0]) / 2)


def test_recall_is_one_where_an_answer_is_likeliest_and_does_not_hide_nan(model):
    bound = metrics.recall([[20, 21], 22, 23]).bind(model, PROMPTS)
    logits = last_logits({21: 1.0, 20: -5.0}, {30: 2.0, 22: 1.9}, {23: 1.0, 40: NAN})
    values = bound(logits, torch.tensor([0, 1, 2]))
    assert values[:2].tolist() == [1.0, 0.0]
    assert values[2].isnan()
    assert not bound.differentiable
    with pytest.raises(PlanError, match="recall is nan for prompt 2"):
        checked(values, torch.tensor([0, 1, 2]), bound)


def test_loss_is_the_mean_over_each_prompts_own_next_tokens(model):
    bound = metrics.loss().bind(model, PROMPTS)
    logits = torch.zeros(2, 4, VOCAB_SIZE, dtype=torch.float64)
    logits[0, 0, 10] = 1.0  # prompt 1 is 9 10 11: position 0 predicts 10, position 1 predicts 11
    logits[0, 1, 11] = 3.0
    logits[0, 3] = NAN  # beyond its end
    logits.requires_grad_()
    values = bound(logits, torch.tensor([1, 0]))
    hand = (math.log(VOCAB_SIZE - 1 + math.e) - 1 + math.log(VOCAB_SIZE - 1 + math.exp(3)) - 3) / 2
    assert values.tolist() == pytest.approx([hand, math.log(VOCAB_SIZE)], rel=1e-12)
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    assert bool(gradient.isfinite().all())
    probability = math.e / (VOCAB_SIZE - 1 + math.e)
    assert gradient[0, 0, 10].item() == pytest.approx((probability - 1) / 2)
    assert (bound.needs, bound.higher_is_better) == ("all", False)


@pytest.mark.parametrize("positions", ["last", "all"])
def test_kl_is_of_the_edited_run_from_the_clean_one(model, positions):
    width = 1 if positions == "last" else 4
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(3, width, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    edited = torch.randn(2, width, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    if positions == "all":
        clean[1, 3] = edited[0, 3] = NAN  # beyond the end of prompt 1
    metric = metrics.kl(positions).bind(model, PROMPTS)
    with pytest.raises(PlanError, match=r"call with_reference"):
        metric(edited, torch.tensor([1, 2]))
    bound = metric.with_reference(clean)
    values = bound(edited, torch.tensor([1, 2]))
    for row, (prompt, length) in enumerate([(1, 3), (2, 4)]):
        at = range(1) if positions == "last" else range(length)
        hand = []
        for position in at:
            p = torch.softmax(clean[prompt, position], 0)
            q = torch.softmax(edited[row, position], 0)
            hand.append(float((p * (p / q).log()).sum()))
        assert values[row].item() == pytest.approx(sum(hand) / len(hand), rel=1e-10)
    same = bound(clean.nan_to_num(), torch.tensor([0, 1, 2]))
    assert same.tolist() == pytest.approx([0, 0, 0], abs=1e-12)
    with pytest.raises(PlanError, match="must be logits"):
        metric.with_reference(clean[:2])


def test_kl_counts_ruled_out_tokens_as_nothing(model):
    clean = last_logits({}, {}, {})
    clean[:, :, 50:] = -math.inf
    bound = metrics.kl().bind(model, PROMPTS).with_reference(clean)
    values = bound(last_logits({}), torch.tensor([0]))
    assert values.item() == pytest.approx(math.log(VOCAB_SIZE / 50))


@pytest.mark.parametrize(
    ("metric", "width"),
    [
        (metrics.logit_difference(20, 21), 1),
        (metrics.probability(20), 1),
        (metrics.log_probability(20), 1),
        (metrics.loss(), 4),
        (metrics.kl(), 1),
        (metrics.kl("all"), 4),
    ],
)
def test_gradients_agree_with_finite_differences(model, metric, width):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, width, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    bound = metric.bind(model, PROMPTS).with_reference(logits + 0.1 * logits.sin())
    rows = torch.tensor([0, 1, 2])
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(bound(logits, rows).sum(), logits)
    direction = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        up, down = (bound(logits + step * direction, rows).sum() for step in (1e-5, -1e-5))
    slope = float((gradient * direction).sum())
    assert slope == pytest.approx(float((up - down) / 2e-5), rel=1e-6)
    assert metric.differentiable


def test_half_precision_logits_are_computed_with_in_float32(model):
    logits = last_logits({20: 2.0}).bfloat16()
    values = metrics.probability(20).bind(model, PROMPTS)(logits, torch.tensor([0]))
    assert values.dtype == torch.float32
    assert values.item() == pytest.approx(math.exp(2) / (VOCAB_SIZE - 1 + math.exp(2)), rel=1e-6)


def test_a_function_of_the_users_own_gets_last_logits_and_prompts(model):
    seen = []

    def margin(logits, prompts):
        seen.append((logits.shape, prompts.tolist()))
        return logits[:, 20] * (prompts + 1)

    metric = as_metric(margin)
    values = metric.bind(model, PROMPTS)(last_logits({20: 2.0}, {20: 3.0}), torch.tensor([2, 0]))
    assert values.tolist() == [6.0, 3.0]
    assert seen == [((2, VOCAB_SIZE), [2, 0])]
    assert (metric.name, metric.needs) == ("margin", "last")
    assert as_metric(metric) is metric
    with pytest.raises(PlanError, match=r"one number per row, a tensor \[1\], not \[\]"):
        as_metric(lambda logits, prompts: logits.sum()).bind(model, PROMPTS)(
            last_logits({}), torch.tensor([0])
        )
    with pytest.raises(PlanError, match="a function of \\(logits, prompts\\), not 'loss'"):
        as_metric("loss")


def test_checked_names_the_prompt_of_the_first_bad_value(model):
    bound = metrics.loss().bind(model, PROMPTS)
    fine = torch.tensor([1.0, 2.0])
    assert checked(fine, torch.tensor([0, 1]), bound) is fine
    with pytest.raises(PlanError, match="metric loss is inf for prompt 7"):
        checked(torch.tensor([1.0, math.inf, NAN]), torch.tensor([3, 7, 8]), bound)


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (20, [[20]] * 3),
        ("w20", [[20]] * 3),
        ([20, "w21", [22, "w23"]], [[20], [21], [22, 23]]),
        (torch.tensor(20), [[20]] * 3),
        (torch.tensor([20, 21, 22]), [[20], [21], [22]]),
        (torch.tensor([[20, -1], [21, 22], [23, -1]]), [[20], [21, 22], [23]]),
    ],
)
def test_tokens_can_be_given_in_every_way(model, given, ids):
    assert token_ids(model, given, 3) == ids


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("w20 w21", r"'w20 w21', which splits into 2 tokens \('w20', 'w21'\)"),
        ("", r"splits into 0 tokens \(nothing\)"),
        ("Paris", "'Paris', which the tokenizer of .* does not know"),
        (97, "token 97, but .* has tokens 0–96"),
        (-1, "token -1"),
        (True, "must be a token id, a string, or a list"),
        (2.0, "must be a token id, a string, or a list"),
        ([20, 21], "2 entries for 3 prompts; give one for all"),
        ([20, 21, []], "answers of prompt 2 is empty"),
        ([20, 21, 2.5], "2.5, which is neither a token id nor a string"),
        (torch.tensor([0.5, 1, 2]), "must be whole numbers"),
        (torch.tensor([[-1], [1], [2]]), "answers of prompt 0 is empty"),
    ],
)
def test_tokens_that_cannot_be_used_are_named(model, given, message):
    with pytest.raises(PlanError, match=message):
        metrics.probability(given).bind(model, PROMPTS)


def test_strings_need_a_tokenizer():
    from tiny_models import build

    import headlab as hl

    bare = hl.load(build("gpt2"))
    with pytest.raises(PlanError, match="without a tokenizer, so foils must be token ids"):
        metrics.logit_difference(4, "w5").bind(bare, PROMPTS)


def test_what_would_measure_nothing_is_refused(model):
    with pytest.raises(PlanError, match=r"prompt 1 has the same tokens as answers and as foils"):
        metrics.logit_difference([20, 21, 22], [30, "w21", 23]).bind(model, PROMPTS)
    with pytest.raises(PromptError, match="prompt 1 has one token"):
        metrics.loss().bind(model, torch.tensor([[5, 6], [7, -1]]))
    with pytest.raises(PlanError, match="must be 'last' or 'all'"):
        metrics.kl("first")


def test_logits_of_the_wrong_shape_are_refused(model):
    bound = metrics.probability(20).bind(model, PROMPTS)
    with pytest.raises(PlanError, match=r"takes logits \[row, 1, vocab\]"):
        bound(torch.zeros(2, 4, VOCAB_SIZE), torch.tensor([0, 1]))
    with pytest.raises(PlanError, match=r"takes logits \[row, 1, vocab\]"):
        bound(torch.zeros(2, 1, VOCAB_SIZE), torch.tensor([0]))
