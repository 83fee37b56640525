"""Fitting a lens: ratios of labelled responses, a regression on their spans, and what each head tells by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, get_args

import numpy as np
from jaxtyping import Float

from headlab.arguments import count, seed_number
from headlab.errors import PlanError
from headlab.lookback.detector import Calibration, Calibrator, Scaling, Split, fit_linear, validate
from headlab.lookback.examples import Example, all_tokenised
from headlab.lookback.lens import HEAD_COLUMNS, Lens
from headlab.lookback.ratios import heads_of, ratios_of
from headlab.lookback.spans import WINDOW, Kind, Spans, spans_of
from headlab.lookback.statistics import (
    auroc_interval,
    auroc_of_ranks,
    ranks_of,
    shuffled_labels,
)
from headlab.statistics import corrected
from headlab.text import shown

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

#: So many that one head of hundreds can pass correction by itself.
_HEAD_SHUFFLES = 9999
_HEAD_DRAWS = 400


def fit(
    model: Model,
    examples: Sequence[Example],
    *,
    ratios: Sequence[Float[np.ndarray, "token layer head"]] | None = None,
    spans: Kind = "window",
    window: int = WINDOW,
    split: Split = "grouped",
    calibration: Calibration = "platt",
    scaling: Scaling = "none",
    n_permutations: int = 99,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Lens:
    """Fit a Lookback Lens (Chuang et al. 2024) to labelled responses.

    Args:
        model: The model whose attention is read; it need not have written the responses.
        examples: Prompts and responses with labels; see :class:`Example`.
        ratios: Those of the examples, from :func:`headlab.lookback.ratios`, where they are at hand already.
        spans: What is classified: ``"window"`` or ``"given"``; see :mod:`headlab.lookback.spans`.
        window: Tokens of a window.
        split: ``"grouped"``: documents stay together; ``"paper"``: random halves of spans, which leak.
        calibration: ``"platt"``, ``"isotonic"`` or ``"none"``, learned on held-out log-odds.
        scaling: ``"none"``, as in the paper, or ``"standard"``: each ratio by its mean and standard deviation.
        n_permutations: Shuffles behind the p-value, each with everything refitted.
        seed: Seed of splits, shuffles and intervals.
        tell: Told, in a few words, what is being done.

    Raises:
        PlanError: Examples have no labels or one kind only, or too few documents, or an argument is none of its kind.
        PromptError: An example cannot be used.
    """
    check_settings(spans, split, calibration, scaling)
    seed_number(seed)
    window = count(window, "window")
    n_permutations = count(n_permutations, "n_permutations", least=0)
    shape = (model.spec.n_layers, heads_of(model))
    tokens = all_tokenised(model, examples)
    for at, example in enumerate(tokens):
        if example.labels is None:
            raise PlanError(f"example {at} has no labels; give bad=, or use Example.labelled")
    read = ratios_of(model, tokens, tell=tell) if ratios is None else list(ratios)
    expected = [(len(one.ids) - one.start, *shape) for one in tokens]
    if [np.shape(one) for one in read] != expected:
        raise PlanError(
            f"ratios= are not those of the {len(tokens)} examples: they must be [token, {shape[0]}, {shape[1]}] each"
        )
    if not all(np.isfinite(one).all() for one in read):
        raise PlanError(
            "some ratios are no numbers: a head attends neither to context nor to what is new"
        )
    found = spans_of(read, tokens, spans, window)
    checked = validate(found, split, calibration, n_permutations, seed, scaling, tell)
    line = fit_linear(found, scaling)
    good = [int(one.labels.min()) for one in tokens if one.labels is not None]
    counts = {"responses": len(tokens), "responses_positive": sum(good)}
    tell("reading each head by itself")
    return Lens(
        line,
        Calibrator.fit(calibration, checked.logit, found.labels),
        shape,
        window,
        head_table(found, line.weights, shape, seed),
        checked.figures | counts,
        {
            "model": model.name,
            "fingerprint": model.fingerprint,
            "spans": spans,
            "split": split,
            "calibration": calibration,
            "scaling": scaling,
            "examples": len(tokens),
            "seed": seed,
        },
    )


def check_settings(spans: str, split: str, calibration: str, scaling: str) -> None:
    """Refuse a setting that there is none of.

    Raises:
        PlanError: There is none.
    """
    for name, value, known in (
        ("spans", spans, Kind),
        ("split", split, Split),
        ("calibration", calibration, Calibration),
        ("scaling", scaling, Scaling),
    ):
        if value not in get_args(known):
            raise PlanError(f"{name}={shown(value)} must be one of {', '.join(get_args(known))}")


def head_table(
    spans: Spans,
    weights: Float[np.ndarray, " feature"],
    shape: tuple[int, int],
    seed: int,
    draws: int = _HEAD_DRAWS,
    shuffles: int = _HEAD_SHUFFLES,
) -> pd.DataFrame:
    """Each head's weight, and how well its ratio alone tells spans apart; see :class:`Lens`."""
    import pandas as pd

    ranks = ranks_of(spans.features)
    score = auroc_of_ranks(ranks, spans.labels)
    low, high = auroc_interval(spans.features, spans.labels, spans.documents, seed, draws=draws)
    at_least = np.zeros(len(score))
    for dealt in shuffled_labels(spans.labels, spans.documents, shuffles, seed):
        # A draw of one class has no AUROC and counts against the head.
        at_least += ~(np.abs(auroc_of_ranks(ranks, dealt) - 0.5) < np.abs(score - 0.5) - 1e-12)
    p = (1 + at_least) / (1 + shuffles)
    layer, head = np.divmod(np.arange(len(score)), shape[1])
    columns = {
        "layer": layer,
        "head": head,
        "weight": weights,
        "standardised": weights * spans.features.std(0),
        "auroc": score,
        "auroc_low": low,
        "auroc_high": high,
        "p_value": p,
        "q_value": corrected(p),
    }
    return pd.DataFrame(columns)[list(HEAD_COLUMNS)]
