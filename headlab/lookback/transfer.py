"""A lens for another model: its ratios mapped to those of the model the lens was fitted on.

As Chuang et al. 2024 carry a 13B model's ratios into a 7B model's feature space, a linear map M from the new model's
ratios to the old one's is fitted on responses that both have read; no labels are needed. The lens of the new model is
then linear too, with weights M w, so that nothing but weights changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headlab.errors import PlanError
from headlab.lookback.detector import FOLDS, Linear
from headlab.lookback.examples import Example, all_tokenised
from headlab.lookback.lens import Lens
from headlab.lookback.ratios import heads_of, ratios_of
from headlab.lookback.spans import windows
from headlab.lookback.statistics import auroc_interval, held_out_auroc

if TYPE_CHECKING:
    from headlab.model import Model

#: Ridge penalty on standardised ratios, per response window.
_PENALTY = 1.0


def transfer(
    lens: Lens,
    model: Model,
    source: Model,
    examples: Sequence[Example],
    *,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Lens:
    """The lens for another model.

    Its ``figures`` hold ``map_r2``, how much of the lens's log-odds on responses held out (by document) the mapped ones
    explain, and, where the examples have labels, the AUROC of the carried lens on windows of documents that the map was
    not fitted on.

    Args:
        lens: The lens.
        model: The model to carry it to.
        source: The model it was fitted on.
        examples: Responses for both to read.
        seed: Seed of the interval.
        tell: Told, in a few words, what is being done.

    Raises:
        PlanError: ``source`` has another shape than the lens, or there are too few documents.
    """
    lens.check_model(source)
    ours, theirs = all_tokenised(model, examples), all_tokenised(source, examples)
    shape = (model.spec.n_layers, heads_of(model))
    x, y, documents, labels = [], [], [], []
    read = zip(
        ratios_of(model, ours, tell=tell),
        ratios_of(source, theirs, tell=tell),
        ours,
        theirs,
        strict=True,
    )
    for mine, other, tokens, same in read:
        # Two tokenizers cut a response differently: windows are matched by their share of it.
        for part in windows(len(mine), lens.window):
            low, high = (round(at * len(other) / len(mine)) for at in (part.start, part.stop))
            x.append(mine[part].reshape(part.stop - part.start, -1).mean(0))
            y.append(other[low : max(high, low + 1)].reshape(-1, lens.linear.weights.size).mean(0))
            documents.append(same.document)
            labels.append(-1 if tokens.labels is None else int(tokens.labels[part].min()))
    inputs, targets = np.stack(x).astype(np.float64), np.stack(y).astype(np.float64)
    names = np.unique(documents, return_inverse=True)[1]
    if len(np.unique(names)) < FOLDS:
        raise PlanError(
            f"{len(np.unique(names))} documents are too few to fit a map on some and check it on others; give "
            f"{FOLDS} or more"
        )
    wanted = lens.linear.logit(targets)
    carried, folds = np.empty(len(inputs)), names % FOLDS
    for fold in range(FOLDS):
        outside = folds == fold
        line = _mapped(lens.linear, inputs[~outside], targets[~outside])
        carried[outside] = line.logit(inputs[outside])
    figures = {
        "map_r2": 1
        - float(((carried - wanted) ** 2).sum() / ((wanted - wanted.mean()) ** 2).sum()),
        "spans": float(len(inputs)),
        "documents": float(len(np.unique(names))),
    }
    known = np.array(labels)
    if (known >= 0).all() and len(np.unique(known)) == 2:
        low, high = auroc_interval(carried, known, names, seed, folds=folds)
        figures |= {
            "auroc": held_out_auroc(carried, known, folds),
            "auroc_low": float(low),
            "auroc_high": float(high),
        }
    line = _mapped(lens.linear, inputs, targets)
    return replace(
        lens,
        linear=line,
        shape=shape,
        heads=lens.heads.iloc[:0],
        figures=figures,
        about=lens.about
        | {
            "model": model.name,
            "fingerprint": model.fingerprint,
            "transferred_from": lens.about.get("model", ""),
        },
    )


def _mapped(linear: Linear, inputs: np.ndarray, targets: np.ndarray) -> Linear:
    """The regression on targets as one on inputs, through a ridge regression of targets on inputs."""
    from sklearn.linear_model import Ridge

    spread = inputs.std(0) + 1e-12
    ridge = Ridge(alpha=_PENALTY).fit(inputs / spread, targets)
    matrix = np.atleast_2d(ridge.coef_) / spread  # [target, input]
    return Linear(
        linear.weights @ matrix, float(linear.weights @ ridge.intercept_) + linear.intercept
    )
