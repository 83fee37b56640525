"""Does a method of steering do what it is for, what does it cost, and would anything of its size do as much?

A :class:`Behaviour` gives one number per case, higher where the model does more of what the method is to bring about.
:func:`evaluate` measures it unsteered, steered at every strength of a sweep, and under controls at the same strengths:
the method at random heads (as many, of the same layers) and with random directions of the same norms, where it has
either. The side effect is the loss on plain text under the same steering.

The case is the unit: intervals are bootstrapped over cases, p-values flip the signs of cases' differences (two-sided),
and are corrected over the table (Benjamini and Hochberg 1995). What a method does beyond chance is its ``excess``
over the controls' mean at that strength, case by case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from headlab.arguments import count, finite_number, seed_number
from headlab.attention import matched_sets, parse_heads
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.statistics import bootstrap_interval, corrected, sign_flip_p
from headlab.steering.base import Method, steer
from headlab.steering.marks import Span
from headlab.steering.results import COLUMNS, METHOD, UNSTEERED, Evaluation
from headlab.tasks import prose, prose_windows
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model

#: Controls: the method at random heads, and with random directions.
CONTROLS = ("random_heads", "random_direction")
_N_TEXTS, _TEXT_TOKENS = 8, 192


@dataclass(frozen=True)
class Case:
    """One thing to measure a behaviour on.

    Attributes:
        prompt: What the model reads: text or token ids.
        answer: The continuation that shows the behaviour, as it stands after the prompt (with its leading space).
        foil: A continuation that shows its absence; empty where there is none.
        spans: What a method that marks text is to mark in the prompt.
    """

    prompt: str | tuple[int, ...]
    answer: str = ""
    foil: str = ""
    spans: tuple[Span, ...] = ()


#: One number per case, higher for more of the behaviour: ``measure(model, cases) -> [case]``.
Measure = Callable[["Model", Sequence[Case]], Float[np.ndarray, " case"]]


@dataclass(frozen=True)
class Behaviour:
    """What a method is to bring about.

    Attributes:
        name: Identifier, such as ``"marked_context"``.
        about: What the number is, in a few words with its unit.
        cases: What it is measured on.
        measure: One number per case; it is called with the steering in force, on ``batch`` cases at most.
        batch: Cases measured together.
    """

    name: str
    about: str
    cases: tuple[Case, ...]
    measure: Measure
    batch: int = 8

    def values(self, model: Model, method: Method | None) -> Float[np.ndarray, " case"]:
        """The number of every case under a method, or unsteered.

        Raises:
            PlanError: The measure gave something else than one number per case.
        """
        found: list[np.ndarray] = []
        for start in range(0, len(self.cases), self.batch):
            cases = self.cases[start : start + self.batch]
            with _steered(model, method, [list(case.spans) for case in cases]):
                values = np.asarray(self.measure(model, cases), np.float64)
            if values.shape == (len(cases),) and np.isnan(values).any():
                at = start + int(np.isnan(values).argmax())
                raise PlanError(
                    f"behaviour {self.name!r} gave NaN for case {at}; leave that case out"
                )
            if values.shape != (len(cases),):
                raise PlanError(
                    f"behaviour {self.name!r} gave an array of shape {list(values.shape)} for {len(cases)} cases"
                )
            found.append(values)
        return np.concatenate(found)


def evaluate(
    model: Model,
    method: Method,
    behaviour: Behaviour,
    *,
    strengths: Sequence[float] | None = None,
    n_controls: int = 3,
    n_texts: int = _N_TEXTS,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Measure a method against the unsteered model and against controls.

    Args:
        model: The model.
        method: The method; its marked spans are replaced by each case's.
        behaviour: What it is to bring about.
        strengths: Strengths to sweep; by default the method's own.
        n_controls: Draws of each control; 0 leaves controls out.
        n_texts: Plain texts for the side effect, of 192 tokens at most; the first half of each is the
            prompt, the loss is taken over the second as over generated text, and a method that marks text marks the
            second quarter.
        seed: Seed of the controls, the texts and the statistics.
        tell: Told, in a few words, what is being done.

    Raises:
        PlanError: There are no cases or strengths, or the method does not fit the model.
        PromptError: A span is not in its prompt.
    """
    if not isinstance(method, Method) or not isinstance(behaviour, Behaviour):
        raise PlanError(
            f"evaluate takes a method and a behaviour, not {shown(method)} and {shown(behaviour)}"
        )
    if model.module.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{model.name} has an encoder and a decoder; evaluation is for models of one stack"
        )
    seed_number(seed)
    n_controls = count(n_controls, "n_controls", least=0)
    n_texts = count(n_texts, "n_texts", least=2)
    if len(behaviour.cases) < 2:
        raise PlanError(
            f"behaviour {behaviour.name!r} has too few cases to compare; give 2 or more"
        )
    given = method.strengths if strengths is None else strengths
    if not np.iterable(given) or not len(given):
        raise PlanError(f"strengths={shown(strengths)} must be numbers, one or more")
    sweep = [finite_number(x, "strengths") for x in given]
    measured = _Measured(model, behaviour, _texts(model, n_texts, seed))
    measured.add(UNSTEERED, math.nan, [None], tell)
    note = ""
    for strength in sweep:
        steered = method.at(strength)
        measured.add(METHOD, strength, [steered], tell)
        if n_controls:
            drawn, note = _controls(model, steered, n_controls, seed)
            for kind, controls in drawn.items():
                measured.add(kind, strength, controls, tell)
    about = {
        "model": model.name,
        "method": method.name,
        "heads": _few(str(getattr(method, "heads", ""))),
        "behaviour": behaviour.name,
        "measures": behaviour.about,
        "controls": n_controls,
        "seed": seed,
        "note": note,
    }
    return measured.table(about, seed)


class _Measured:
    """Behaviour and loss of each row as they are measured."""

    def __init__(self, model: Model, behaviour: Behaviour, texts: torch.Tensor) -> None:
        self._model, self._behaviour, self._texts = model, behaviour, texts
        self._keys: list[tuple[str, float]] = []
        self._values: list[np.ndarray] = []
        self._losses: list[np.ndarray] = []

    def add(
        self,
        kind: str,
        strength: float,
        methods: Sequence[Method | None],
        tell: Callable[[str], None],
    ) -> None:
        """Measure a row; several methods are the draws of a control, and are averaged case by case."""
        tell(kind if math.isnan(strength) else f"{kind} at strength {strength:g}")
        values = [self._behaviour.values(self._model, method) for method in methods]
        losses = [_losses(self._model, method, self._texts) for method in methods]
        self._keys.append((kind, strength))
        self._values.append(np.mean(values, 0))
        self._losses.append(np.mean(losses, 0))

    def table(self, about: Mapping[str, Any], seed: int) -> Evaluation:
        import pandas as pd

        values, losses = np.stack(self._values), np.stack(self._losses)
        effects, excess = values - values[0], np.full_like(values, np.nan)
        for at, (kind, strength) in enumerate(self._keys):
            controls = [
                effects[other]
                for other, (name, same) in enumerate(self._keys)
                if name in CONTROLS and same == strength
            ]
            if kind == METHOD and controls:
                excess[at] = effects[at] - np.mean(controls, 0)
        effects[0] = np.nan
        change = losses - losses[0]
        change[0] = np.nan
        columns: dict[str, Any] = {
            "kind": [kind for kind, _ in self._keys],
            "strength": [strength for _, strength in self._keys],
            "value": values.mean(1),
            "n": values.shape[1],
            "effect": effects.mean(1),
            "excess": excess.mean(1),
            "loss": losses.mean(1),
            "loss_change": change.mean(1),
            "p_value": _two_sided(effects, seed),
            "excess_p": _two_sided(excess, seed),
        }
        for name, table in (
            ("value", values),
            ("effect", effects),
            ("excess", excess),
            ("loss", change),
        ):
            columns[f"{name}_low"], columns[f"{name}_high"] = _interval(table, seed)
        columns["q_value"] = corrected(columns["p_value"])
        columns["excess_q"] = corrected(columns["excess_p"])
        frame = pd.DataFrame(columns)[list(COLUMNS)]
        return Evaluation(frame, values, losses, dict(about))


def _steered(model: Model, method: Method | None, spans: list[list[Span]]) -> Any:
    if method is None:
        return nullcontext()
    if any(spans) and not all(spans):
        raise PlanError("some cases mark text and others do not; give every case spans, or none")
    return steer(model, method.marking(spans) if any(spans) else method)


def _controls(
    model: Model, method: Method, draws: int, seed: int
) -> tuple[dict[str, list[Method]], str]:
    """Draws of each control that a method has, and what is to be said of them."""
    found: dict[str, list[Method]] = {}
    turned = [method.randomised(seed + draw) for draw in range(draws)]
    directions = [one for one in turned if one is not None]
    if directions:
        found["random_direction"] = directions
    heads = getattr(method, "heads", None)
    if heads is None:
        return found, "the method has no heads, so it is not compared with random ones"
    chosen = parse_heads(heads, model.spec)
    if len(chosen) == sum(layer.n_heads for layer in model.spec.layers):
        return found, "the method acts on every head, so there are no random ones to compare with"
    sets, note = matched_sets(model.spec, chosen, draws, seed)
    try:
        found["random_heads"] = [method.on(heads) for heads in sets]
    except PlanError as error:
        return found, str(error)
    return found, note


def _texts(model: Model, n: int, seed: int) -> torch.Tensor:
    if model.tokenizer is None:
        raise PromptError(f"{model.name} came without a tokenizer, so no plain text can be run")
    length = min(_TEXT_TOKENS, model.spec.max_context or _TEXT_TOKENS)
    return prose_windows(model.tokenizer, prose(), n, length, seed, model.bos)


def _losses(model: Model, method: Method | None, texts: torch.Tensor) -> Float[np.ndarray, " text"]:
    """Mean loss over the second half of each text, nats per token; the first half is the prompt."""
    n = texts.shape[1]
    marked: list[Span] = [(n // 4, n // 2)]
    found: list[float] = []
    for start in range(0, len(texts), 4):
        batch = texts[start : start + 4]
        with _steered(model, method, [marked] * len(batch)):
            output = model.forward(batch.to(model.device), prompt=n // 2, use_cache=False)
        logits = output.logits[:, n // 2 - 1 : -1].float()
        right = batch[:, n // 2 :, None].to(logits.device)
        found += (-logits.log_softmax(-1).gather(-1, right)[..., 0].mean(1)).tolist()
    return np.array(found)


def _interval(table: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap interval of each row's mean; NaN where the row is not there."""
    low, high = np.full(len(table), np.nan), np.full(len(table), np.nan)
    known = ~np.isnan(table).any(1)
    if known.any():
        low[known], high[known] = bootstrap_interval(table[known].T, seed)
    return low, high


def _two_sided(table: np.ndarray, seed: int) -> np.ndarray:
    p = np.full(len(table), np.nan)
    known = ~np.isnan(table).any(1)
    if known.any():
        rows = table[known].T
        p[known] = np.minimum(1, 2 * np.minimum(sign_flip_p(rows, seed), sign_flip_p(-rows, seed)))
    return p


def _few(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}…"
