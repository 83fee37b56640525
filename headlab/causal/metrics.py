"""What a causal experiment measures: one number per prompt from the model's logits.

    hl.metrics.logit_difference(answers=" Paris", foils=" Rome")

A :class:`Metric` is unbound: it knows what to measure, not yet on which model and prompts. ``metric.bind(model,
prompts)`` turns strings into token ids, checks them and gives a :class:`BoundMetric`, which maps logits
[row, position, vocab] to [row]; ``rows`` names the prompt of each row, since a sweep runs every prompt many times in
one batch. Every metric but ``recall`` is differentiable. Half-precision logits are computed with in float32; nothing
is ever lowered in precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headlab.arguments import is_integer
from headlab.causal.answers import Tokens, token_ids
from headlab.causal.measuring import BoundMetric, Compute, Metric, Needs, checked, wide
from headlab.errors import PlanError, PromptError
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model


def as_metric(given: Metric | Callable[[Tensor, Tensor], Tensor]) -> Metric:
    """A metric from a metric, or from the user's function.

    Args:
        given: A :class:`Metric`, or ``f(logits [row, vocab], prompts LongTensor [row]) -> [row]``, given the logits
            of each prompt's last position and which prompt each row belongs to.

    Raises:
        PlanError: It is neither; or, when computed, the function does not return a tensor [row].
    """
    if isinstance(given, Metric):
        return given
    if not callable(given) or isinstance(given, type):
        raise PlanError(
            f"a metric is hl.metrics.logit_difference(…) and the like, or a function of (logits, prompts), not "
            f"{given!r:.60}"
        )
    function, name = given, str(getattr(given, "__name__", type(given).__name__))

    def compute(logits: Tensor, rows: Tensor, reference: Tensor | None) -> Tensor:
        values = function(wide(logits[:, 0]), rows)
        if not isinstance(values, Tensor) or values.shape != rows.shape:
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise PlanError(
                f"metric {name} must return one number per row, a tensor {list(rows.shape)}, not {shape}"
            )
        return wide(values)

    home = f"{getattr(given, '__module__', '')}.{getattr(given, '__qualname__', name)}"
    return Metric(name, "last", lambda model, prompts: (compute, {"function": home}))


# -- the metrics -------------------------------------------------------------------------------------------------------


def logit_difference(answers: Tokens, foils: Tokens) -> Metric:
    """Logit of the answer less that of the foil at the last position; means where there are several of either.

    Args:
        answers: The right tokens.
        foils: The wrong ones.
    """

    def binder(model: Model, prompts: Tensor) -> tuple[Compute, dict[str, Any]]:
        right = token_ids(model, answers, len(prompts), "answers")
        wrong = token_ids(model, foils, len(prompts), "foils")
        for at, (ours, theirs) in enumerate(zip(right, wrong, strict=True)):
            if set(ours) == set(theirs):
                raise PlanError(
                    f"prompt {at} has the same tokens as answers and as foils, {ours}, so its logit difference "
                    "is always 0; give it another foil"
                )
        plus, minus = _Chosen(right), _Chosen(wrong)

        def compute(logits: Tensor, rows: Tensor, reference: Tensor | None) -> Tensor:
            last = logits[:, 0]
            return plus.mean(last, rows) - minus.mean(last, rows)

        return compute, {"answers": right, "foils": wrong}

    return Metric("logit difference", "last", binder)


def probability(answers: Tokens) -> Metric:
    """Probability of the answer at the last position; the mean where there are several."""

    def of_last(chosen: _Chosen, last: Tensor, rows: Tensor) -> Tensor:
        return chosen.mean(last, rows, lambda picked, whole: (picked - whole).exp())

    return _of_answers("probability", answers, of_last)


def log_probability(answers: Tokens) -> Metric:
    """Log-probability of the answer at the last position, in nats; the mean where there are several."""

    def of_last(chosen: _Chosen, last: Tensor, rows: Tensor) -> Tensor:
        return chosen.mean(last, rows, lambda picked, whole: picked - whole)

    return _of_answers("log-probability", answers, of_last)


def recall(answers: Tokens) -> Metric:
    """1 where the likeliest token at the last position is the answer, or one of several; 0 elsewhere.

    Two tokens that share the highest logit count both. It has no gradient.
    """

    def of_last(chosen: _Chosen, last: Tensor, rows: Tensor) -> Tensor:
        best = wide(last.detach()).amax(-1)
        hit = (chosen.best(last.detach(), rows) >= best).to(best.dtype)
        return hit.masked_fill(best.isnan(), torch.nan)  # NaN compares as a miss

    return replace(_of_answers("recall", answers, of_last), differentiable=False)


def loss(start: int | Sequence[int] = 0) -> Metric:
    """Mean next-token negative log-likelihood over each prompt's own tokens, in nats.

    Args:
        start: Position of the first token that counts, one number or one per prompt; the first token of a prompt, which
            nothing predicts, never does.

    Raises:
        PlanError: When bound: there is no such position, or not one per prompt.
    """

    def binder(model: Model, prompts: Tensor) -> tuple[Compute, dict[str, Any]]:
        short = ((prompts >= 0).sum(1) < 2).nonzero()
        if len(short):
            raise PromptError(
                f"prompt {int(short[0, 0])} has one token, so it has no next token to take a loss of; use a "
                "longer prompt"
            )
        targets = prompts[:, 1:].clone()
        for row, first in enumerate(_starts(start, prompts)):
            targets[row, : max(0, first - 1)] = -1

        def compute(logits: Tensor, rows: Tensor, reference: Tensor | None) -> Tensor:
            wanted = targets.to(logits.device)[rows]
            scored = _known(logits[:, :-1], wanted >= 0)
            picked = scored.gather(2, wanted.clamp(min=0)[..., None])[..., 0]
            return _mean(scored.logsumexp(-1) - picked, wanted >= 0)

        return compute, {} if start == 0 else {"start": start}

    return Metric("loss", "all", binder, higher_is_better=False)


def _starts(start: int | Sequence[int], prompts: Tensor) -> list[int]:
    """First token that counts, of each prompt."""
    lengths = (prompts >= 0).sum(1).tolist()
    given: Sequence[Any] = [start] * len(lengths) if not isinstance(start, Sequence) else start
    if len(given) != len(lengths):
        raise PlanError(
            f"start={shown(start)} must be a position, or one for each of {len(lengths)} prompts"
        )
    for row, (first, length) in enumerate(zip(given, lengths, strict=True)):
        if not is_integer(first) or not 0 <= first < length:
            raise PlanError(
                f"start of prompt {row} is {shown(first)}, but the prompt has tokens 0–{length - 1}"
            )
    return [int(first) for first in given]


def kl(positions: Needs = "last") -> Metric:
    """Kullback–Leibler divergence of the edited run from the clean one, D(clean ‖ edited), in nats.

    The direction is ACDC's (Conmy et al. 2023): 0 where nothing changed.

    Args:
        positions: ``"last"`` for each prompt's last position, ``"all"`` for the mean over all its positions.

    Raises:
        PlanError: There are no such positions.
    """
    if positions not in ("last", "all"):
        raise PlanError(f"positions={positions!r} must be 'last' or 'all'")

    def binder(model: Model, prompts: Tensor) -> tuple[Compute, dict[str, Any]]:
        real = (prompts >= 0)[:, :1] if positions == "last" else prompts >= 0

        def compute(logits: Tensor, rows: Tensor, reference: Tensor | None) -> Tensor:
            assert reference is not None  # BoundMetric checks
            at = real.to(logits.device)[rows]
            clean = _known(reference.to(logits.device)[rows], at)
            log_ratio = clean - _known(logits, at).log_softmax(-1)
            # 0·log 0 = 0: a token the clean run rules out weighs nothing.
            terms = (clean.exp() * log_ratio).masked_fill(clean == -torch.inf, 0.0)
            return _mean(terms.sum(-1), at)

        return compute, {"positions": positions}

    return Metric("KL divergence", positions, binder, higher_is_better=False, needs_reference=True)


# -- parts -------------------------------------------------------------------------------------------------------------


class _Chosen:
    """Some tokens of each prompt, as a padded table."""

    def __init__(self, ids: list[list[int]]) -> None:
        width = max(len(row) for row in ids)
        self._index = torch.tensor([row + [-1] * (width - len(row)) for row in ids])

    def mean(
        self,
        last: Tensor,
        rows: Tensor,
        after: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Mean over each row's tokens of their logit, or of ``after(logit, log-sum-exp of all logits)``."""
        picked, real = self._pick(last, rows)
        if after is not None:
            picked = after(picked, wide(last).logsumexp(-1, keepdim=True))
        return _mean(picked, real)

    def best(self, last: Tensor, rows: Tensor) -> Tensor:
        """The highest logit among each row's tokens."""
        picked, real = self._pick(last, rows)
        return picked.masked_fill(~real, -torch.inf).amax(-1)

    def _pick(self, last: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        index = self._index.to(last.device)[rows]
        return wide(last.gather(1, index.clamp(min=0))), index >= 0


def _of_answers(
    name: str, answers: Tokens, of_last: Callable[[_Chosen, Tensor, Tensor], Tensor]
) -> Metric:
    def binder(model: Model, prompts: Tensor) -> tuple[Compute, dict[str, Any]]:
        ids = token_ids(model, answers, len(prompts))
        chosen = _Chosen(ids)

        def compute(logits: Tensor, rows: Tensor, reference: Tensor | None) -> Tensor:
            return of_last(chosen, logits[:, 0], rows)

        return compute, {"answers": ids}

    return Metric(name, "last", binder)


def _known(x: Tensor, real: Tensor) -> Tensor:
    """Logits with 0 where there is no token: NaN there would reach gradients even through a mask."""
    return wide(x) if bool(real.all()) else wide(x).masked_fill(~real[..., None], 0.0)


def _mean(values: Tensor, real: Tensor) -> Tensor:
    """Mean over the last axis of the entries that are real."""
    return values.masked_fill(~real, 0.0).sum(-1) / real.sum(-1)


__all__ = [
    "BoundMetric",
    "Metric",
    "Needs",
    "Tokens",
    "as_metric",
    "checked",
    "kl",
    "log_probability",
    "logit_difference",
    "loss",
    "probability",
    "recall",
    "token_ids",
]
