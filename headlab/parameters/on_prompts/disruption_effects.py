"""What disrupting massive values does to behaviours that need the context, and to those that need the weights.

The test of Jin et al. 2025 with behaviours cheap enough for many prompts: the log-probability of the one token that is
right, where the paper has accuracies on benchmarks. See :mod:`.disruption` for the edits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Float

from headlab.arguments import seed_number, whole_number
from headlab.causal import Metric, Sweep, metrics
from headlab.causal.metrics import as_metric
from headlab.errors import PlanError, PromptError
from headlab.parameters.on_prompts.disruption import KINDS, Which, disrupt
from headlab.prompts import Prompt
from headlab.statistics import RESAMPLES, bootstrap_interval, corrected, sign_flip_p
from headlab.tasks import plain_tokens, prose, prose_windows, repeated_tokens, temporal_facts

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

#: A prompt's token ids, and the token that continues it.
Asked: TypeAlias = tuple[list[int], int]
#: Fewest prompts of a behaviour; tokens that are repeated; tokens of prose between a secret word and its question.
_FEWEST, _COPY, _PROSE = 3, 24, 48
_LOG_PROBABILITY = "log-probability"
_SECRET = ("The secret word is", ".\n\n", "\n\nThe secret word is")
#: Mean log-probability of the right token below which the unedited model hardly does the task: e^−3 is 5 %.
_UNABLE = -3.0
_WORD = re.compile(r" [a-z]{4,8}")
#: Columns of :attr:`Disruption.frame`.
DISRUPTION_COLUMNS = (
    "behaviour",
    "kind",
    "which",
    "clean",
    "value",
    "effect",
    "ci_low",
    "ci_high",
    "n",
    "p_value",
    "beyond_control",
    "control_p",
    "q_value",
)


@dataclass(frozen=True)
class Behaviour:
    """Something a model does, to be measured with and without massive values.

    Attributes:
        name: Its name.
        kind: ``"contextual"`` where what is needed stands in the prompt, ``"parametric"`` where it is in the weights.
        prompts: The prompts.
        metric: What to measure on them.
    """

    name: str
    kind: Literal["contextual", "parametric"]
    prompts: Prompt
    metric: Metric


def behaviours(model: Model, n_prompts: int = 20, *, seed: int = 0) -> tuple[Behaviour, ...]:
    """Behaviours that headlab has data for: log-probabilities, in nats, of the token that continues the prompt.

    ``"repeated tokens"`` (contextual): random tokens twice, the second copy cut off. ``"secret word"`` (contextual): a
    word that is given before some prose and asked for behind it. ``"facts"`` (parametric): "The capital of France was".
    The last two need a tokenizer that knows the words; they are left out for others.

    Args:
        model: The model.
        n_prompts: Prompts of each at most.
        seed: Seed of tokens, words, prose, of where copies are cut off, and of which facts.

    Raises:
        PromptError: The vocabulary or the context is too small.
    """
    n_prompts, seed = whole_number(n_prompts, "n_prompts", 1), seed_number(seed)
    made = {"repeated tokens": _repeated(model, n_prompts, seed)}
    if model.tokenizer is not None:
        made["secret word"] = _secrets(model, n_prompts, seed)
        made["facts"] = _facts(model, n_prompts, seed)
    return tuple(
        Behaviour(
            name,
            "parametric" if name == "facts" else "contextual",
            [ids for ids, _ in asked],
            metrics.log_probability([answer for _, answer in asked]),
        )
        for name, asked in made.items()
        if len(asked) >= min(_FEWEST, n_prompts)
    )


@dataclass(frozen=True)
class Disruption:
    """What setting dimensions of q and k to their mean does to behaviours.

    Attributes:
        frame: One row per behaviour and kind of dimension: ``clean`` and ``value``, the metric's mean without and with
            the edit; ``effect`` = value − clean with its 95 % bootstrap interval over ``n`` prompts and a two-sided
            sign-flip ``p_value``; ``beyond_control``: mean over prompts of the effect less that of the control that
            does more (smallest or random, by their means), with its own paired p (``control_p``; both NaN for the
            controls); ``q_value``: ``p_value`` corrected over the table (Benjamini and Hochberg).
        values: The metric per behaviour, [1 + kind, prompt]: clean first.
        about: Model and edits; ``metrics``, each behaviour's by name; ``note``: by behaviour, that the unedited model
            hardly does it (mean log-probability of the right token below −3 nats), so that there is little to lose.
    """

    frame: pd.DataFrame
    values: dict[str, Float[np.ndarray, "run prompt"]]
    about: dict[str, Any]

    def contrast(self, contextual: str, parametric: str, seed: int = 0) -> dict[str, float]:
        """How much more the largest dimensions matter to one behaviour than to another.

        Returns:
            ``difference``: mean effect on the first less that on the second, in the metrics' unit, with a bootstrap
            interval ``ci_low`` to ``ci_high`` that draws the prompts of each anew.

        Raises:
            PlanError: There is no such behaviour, or the largest dimensions were not disrupted.
        """
        rng = np.random.default_rng(seed_number(seed))
        if "largest" not in self.about["kinds"]:
            raise PlanError("the largest dimensions were not disrupted; give kinds= with 'largest'")
        at = 1 + self.about["kinds"].index("largest")
        effects, drawn = [], []
        for name in (contextual, parametric):
            if name not in self.values:
                raise PlanError(
                    f"there is no behaviour {name!r:.60}; there are {', '.join(self.values)}"
                )
            effect = self.values[name][at] - self.values[name][0]
            effects.append(float(effect.mean()))
            drawn.append(effect[rng.integers(len(effect), size=(RESAMPLES, len(effect)))].mean(1))
        low, high = np.percentile(drawn[0] - drawn[1], [2.5, 97.5])
        return {"difference": effects[0] - effects[1], "ci_low": float(low), "ci_high": float(high)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data; NaN becomes None."""
        plain = self.frame.astype(object).where(self.frame.notna(), None)
        return {"about": self.about, "effects": plain.to_dict("records")}

    def to_json(self) -> str:
        """:meth:`to_dict` as one JSON document."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    def __repr__(self) -> str:
        lines = [
            f"Disruption of {', '.join(self.about['sites'])}: means, effect with its 95 % interval"
        ]
        for row in self.frame.itertuples():
            lines.append(
                f"  {row.behaviour}, {row.which}: {row.clean:.3g} → {row.value:.3g}, effect {row.effect:.3g} "
                f"[{row.ci_low:.3g}, {row.ci_high:.3g}], q {row.q_value:.2g}, n {row.n}"
            )
        lines += [f"  {name}: {note}" for name, note in self.about["note"].items()]
        return "\n".join(lines)


def disruption(
    model: Model,
    measured: Sequence[Behaviour] | None = None,
    *,
    kinds: Sequence[Which] = KINDS,
    sites: Sequence[Literal["q", "k"]] = ("q", "k"),
    count: int | Literal["massive"] = 1,
    factor: float = 5.0,
    skip: int = 1,
    n_prompts: int = 20,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Disruption:
    """Measure behaviours with massive dimensions set to their mean, and with controls; prompts are read, not continued.

    Args:
        model: A model of one stack.
        measured: The behaviours; those of :func:`behaviours` by default.
        kinds: Which dimensions, each in turn.
        sites: See :func:`disrupt`, as for ``count``, ``factor`` and ``skip``.
        count: See there.
        factor: See there.
        skip: See there.
        n_prompts: Prompts of the behaviours by default.
        seed: Seed of everything random.
        tell: Told how far it is.

    Raises:
        PlanError: An argument does not fit, or behaviours are none or share a name.
        UnsupportedError: The model has an encoder and a decoder.
    """
    import pandas as pd

    seed = seed_number(seed)
    chosen = behaviours(model, n_prompts, seed=seed) if measured is None else tuple(measured)
    names = [one.name for one in chosen]
    if not chosen or len(set(names)) < len(names):
        raise PlanError("measured= must hold behaviours, each with a name of its own")
    if not kinds or len(set(kinds)) < len(kinds):
        raise PlanError(f"kinds={kinds!r} must name some of {', '.join(KINDS)}, each once")
    edits = [
        disrupt(kind, sites=sites, count=count, factor=factor, skip=skip, seed=seed)
        for kind in kinds
    ]
    values: dict[str, np.ndarray] = {}
    rows: list[dict[str, Any]] = []
    for one in chosen:
        sweep = Sweep(model, one.prompts, one.metric)
        values[one.name] = np.vstack([sweep.clean, sweep.run(edits)])
        rows += _rows(one, kinds, values[one.name], seed)
        tell(f"disruption: {one.name} measured")
    frame = pd.DataFrame(rows)
    frame["q_value"] = corrected(frame["p_value"].to_numpy(float))
    about = {
        "model": model.name,
        "kinds": list(kinds),
        "sites": list(sites),
        "count": count,
        "seed": seed,
        "metrics": {one.name: as_metric(one.metric).name for one in chosen},
        "note": {one.name: note for one in chosen if (note := _unable(one, values[one.name][0]))},
    }
    return Disruption(frame[list(DISRUPTION_COLUMNS)], values, about)


def _rows(
    one: Behaviour, kinds: Sequence[Which], values: Float[np.ndarray, "run prompt"], seed: int
) -> list[dict[str, Any]]:
    effects = (values[1:] - values[0]).T  # [prompt, kind]
    low = high = np.full(len(kinds), np.nan)
    if len(effects) > 1:
        low, high = bootstrap_interval(effects, seed)
    controls = [at for at, kind in enumerate(kinds) if kind != "largest"]
    rows = []
    for at, kind in enumerate(kinds):
        beyond = p_beyond = np.nan
        if kind == "largest" and controls:
            strongest = max(controls, key=lambda other: abs(effects[:, other].mean()))
            difference = effects[:, at] - effects[:, strongest]
            beyond, p_beyond = float(difference.mean()), _two_sided(difference, seed)
        rows.append(
            {
                "behaviour": one.name,
                "kind": one.kind,
                "which": kind,
                "clean": values[0].mean(),
                "value": values[at + 1].mean(),
                "effect": effects[:, at].mean(),
                "ci_low": low[at],
                "ci_high": high[at],
                "n": len(effects),
                "p_value": _two_sided(effects[:, at], seed),
                "beyond_control": beyond,
                "control_p": p_beyond,
            }
        )
    return rows


def _unable(one: Behaviour, clean: Float[np.ndarray, " prompt"]) -> str:
    """That there is little to lose, where the unedited model gives the right token little chance."""
    mean = float(clean.mean())
    if as_metric(one.metric).name != _LOG_PROBABILITY or not mean < _UNABLE:
        return ""
    return (
        f"the unedited model hardly does this (mean log-probability {mean:.3g} nats, a chance of {np.exp(mean):.1g}), "
        "so a small effect does not mean that it survives"
    )


def _two_sided(values: Float[np.ndarray, " prompt"], seed: int) -> float:
    column = values[:, None]
    return float(min(1.0, 2 * min(sign_flip_p(column, seed)[0], sign_flip_p(-column, seed)[0])))


def _repeated(model: Model, n_prompts: int, seed: int) -> list[Asked]:
    plain = plain_tokens(model.tokenizer, model.spec.n_vocab)
    limit = (model.spec.max_context or 128) - 1
    n = min(_COPY, len(plain) // 2, limit // 2)
    if n < 4:
        raise PromptError(
            f"{model.name} has {len(plain)} plain tokens and a context of {limit + 1}, too few to repeat 4 of them"
        )
    whole = repeated_tokens(plain, n_prompts, n, seed, model.bos)
    cuts = whole.start + n + np.random.default_rng(seed).integers(n // 2, n, n_prompts)
    return [(row[:cut], row[cut]) for row, cut in zip(whole.repeated.tolist(), cuts, strict=True)]


def _secrets(model: Model, n_prompts: int, seed: int) -> list[Asked]:
    tokenizer, bos = model.tokenizer, model.bos
    words = [token for token in plain_tokens(tokenizer, model.spec.n_vocab).tolist()
             if _WORD.fullmatch(tokenizer.decode([token]))]  # fmt: skip
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in _SECRET]
    unknown = tokenizer.unk_token_id
    length = sum(map(len, parts)) + 1 + _PROSE + (bos is not None)
    if (
        len(words) < n_prompts
        or length > (model.spec.max_context or length)
        or (unknown is not None and any(unknown in part for part in parts))
    ):
        return []
    drawn = np.random.default_rng(seed).choice(words, n_prompts, replace=False).tolist()
    texts = prose_windows(tokenizer, prose(), n_prompts, _PROSE, seed, None).tolist()
    front = [] if bos is None else [bos]
    return [
        (front + parts[0] + [word] + parts[1] + text + parts[2], word)
        for word, text in zip(drawn, texts, strict=True)
    ]


def _facts(model: Model, n_prompts: int, seed: int) -> list[Asked]:
    """Facts that hold whatever the time, without the time."""
    tokenizer = model.tokenizer
    front = [] if model.bos is None else [model.bos]
    found = []
    for fact in temporal_facts().invariant:
        opening, _, rest = fact.template.partition("{time}, ")
        if opening != "In " or not rest:
            continue
        text = rest[0].upper() + rest[1:]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer(f"{text} {fact.answer}", add_special_tokens=False)["input_ids"]
        known = tokenizer.unk_token_id is None or tokenizer.unk_token_id not in whole
        if known and whole[: len(ids)] == ids and len(whole) > len(ids):
            found.append((front + ids, whole[len(ids)]))
    order = np.random.default_rng(seed).permutation(len(found))[:n_prompts]
    return [found[at] for at in order]


__all__ = ["Behaviour", "Disruption", "behaviours", "disruption"]
