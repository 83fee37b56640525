"""Heads found by weights beside heads found by behaviour: do the two agree?

* copying: Σ Re λ / Σ |λ| of W_OV (:func:`headlab.parameters.copying`) beside the role ``copying``, which raises what
  it attends to;
* previous token: the positional part of W_QK (:func:`headlab.parameters.previous_token`) beside the role
  ``previous_token``;
* induction: K-composition with previous-token heads, as below, beside the role ``induction``, which matches prefixes.

A head can do induction when its keys read what a previous-token head writes (Elhage et al. 2021). From weights alone,

    induction(h) = max over earlier heads g of  previous(g) · (K(g, h) − the mean K of g rotated),

with previous(g) as above, less its null and not below 0, and K the K-composition score. A product of our own: neither
factor alone says that it is this pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from headlab.arguments import rate, seed_number, whole_number
from headlab.errors import PlanError
from headlab.parameters import EmbeddingKind, circuits, composition, copying, previous_token
from headlab.roles import Scores, head_label, score

if TYPE_CHECKING:
    from headlab.model import Model

#: Column of the weights, role on prompts.
COUNTERPARTS = (
    ("copying_weights", "copying"),
    ("previous_token_weights", "previous_token"),
    ("induction_weights", "induction"),
)
_RESAMPLES = 1000
_SHOWN, _LEAST = 5, 3


@dataclass(frozen=True, eq=False, repr=False)
class SideBySide:
    """Weights beside behaviour.

    Attributes:
        model: Name of the model.
        frame: Columns ``layer, head``, the three columns of the weights, the score of each role by its name, and
            whether it is claimed (``copying_claimed`` and so on).
        agreement: One row per pair: ``weights, role, spearman``, ``ci_low, ci_high`` (bootstrap over heads, which are
            no independent sample), ``n`` (heads), ``p_value`` (two-sided, by permutation), ``auc`` (chance that a
            claimed head has more of it in its weights than another), ``claimed``, ``best`` (the heads with most of it
            in their weights, and which of these are claimed).
        notes: What is said of scores from the weights.
    """

    model: str
    frame: pd.DataFrame
    agreement: pd.DataFrame
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        lines = [f"Weights beside behaviour of {self.model}, {len(self.frame)} heads"]
        for row in self.agreement.to_dict("records"):
            lines.append(
                f"  {row['role']}: ρ = {row['spearman']:.2f} [{row['ci_low']:.2f}, {row['ci_high']:.2f}], "
                f"AUC {row['auc']:.2f} for {row['claimed']} claimed; most in the weights: {row['best']}"
            )
        lines += [f"  Note: {note}" for note in self.notes]
        return "\n".join(lines)


def side_by_side(
    model: Model,
    scores: Scores | None = None,
    *,
    embedding: EmbeddingKind = "auto",
    n_prompts: int = 20,
    alpha: float = 0.05,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> SideBySide:
    """Put heads found by weights beside heads found on prompts.

    Args:
        model: A decoder-only model.
        scores: Scores of this model that hold the three roles, such as ``report.scores``; by default they are made.
        embedding: What stands for a token in the positional part of W_QK.
        n_prompts: Prompts per role, where scores are made.
        alpha: False-discovery rate.
        seed: Seed of everything random.
        tell: Told, in a few words, what is being done.

    Raises:
        OutputError: The scores given lack one of the roles.
        UnsupportedError: The weights cannot be read.
    """
    roles = [role for _, role in COUNTERPARTS]
    n_prompts, alpha, seed = whole_number(n_prompts, "n_prompts", 2), rate(alpha), seed_number(seed)
    check_scores(model, scores)
    if scores is None:
        scores = score(model, roles, seed=seed, n_prompts=n_prompts, alpha=alpha, tell=tell)
    tell("copying and positions in the weights")
    copies = copying(model, alpha=alpha, seed=seed)
    before = previous_token(model, embedding=embedding, alpha=alpha, seed=seed)
    composed = composition(circuits(model), seed=seed, tell=tell).frame
    frame = copies[["layer", "head"]].copy()
    frame["copying_weights"] = copies["score"]
    frame["previous_token_weights"] = before["score"]
    frame["induction_weights"] = _induction(before, composed)
    for role in roles:
        rows = scores.ranked(role)[["layer", "head", "score", "claimed"]]
        rows = rows.rename(columns={"score": role, "claimed": f"{role}_claimed"})
        frame = frame.merge(rows, on=["layer", "head"], how="left", validate="one_to_one")
    rng = np.random.default_rng(seed)
    agreement = [_agreement(frame, weights, role, rng) for weights, role in COUNTERPARTS]
    notes = tuple(note for note in pd.unique(before["note"]) if note)
    return SideBySide(model.name, frame, pd.DataFrame(agreement), notes)


def check_scores(model: Model, scores: Scores | None) -> None:
    """Refuse scores whose heads are not the model's. Scores do not hold the weights they are of, so those of a model of
    the same shape pass.

    Raises:
        PlanError: They are not.
    """
    if scores is None:
        return
    if not isinstance(scores, Scores):
        raise PlanError(f"scores={scores!r:.60} must be what hl.score returned")
    theirs = set(zip(scores.frame["layer"], scores.frame["head"], strict=True))
    ours = {
        (layer, head)
        for layer, facts in enumerate(model.spec.layers)
        for head in range(facts.n_heads)
    }
    if theirs != ours:
        raise PlanError(
            f"the scores given are of {len(theirs)} heads, which are not the {len(ours)} of {model.name}; score it anew"
        )


def _induction(before: pd.DataFrame, composed: pd.DataFrame) -> Float[np.ndarray, " head"]:
    names = [
        head_label(layer, head) for layer, head in zip(before["layer"], before["head"], strict=True)
    ]
    previous = dict(zip(names, before["effect"].clip(lower=0), strict=True))
    keys = composed[composed["kind"] == "K"]
    product = keys["early"].map(previous) * keys["effect"]
    best = product.groupby(keys["late"]).max()
    return best.reindex(names).fillna(0.0).to_numpy()  # the first layer has none before it


def _agreement(
    frame: pd.DataFrame, weights: str, role: str, rng: np.random.Generator
) -> dict[str, Any]:
    from scipy.stats import mannwhitneyu, permutation_test, spearmanr

    rows = frame.dropna(subset=[weights, role])
    if len(rows) < _LEAST:  # nothing to rank, as where no role could be measured
        nothing = dict.fromkeys(("spearman", "ci_low", "ci_high", "p_value", "auc"), np.nan)
        counts = {"n": len(rows), "claimed": 0, "best": "–"}
        return {"weights": weights, "role": role, **nothing, **counts}
    x, y = rows[weights].to_numpy(float), rows[role].to_numpy(float)
    claimed = rows[f"{role}_claimed"].to_numpy(bool)

    def rank(a: np.ndarray, b: np.ndarray) -> float:
        return float(spearmanr(a, b).statistic)

    drawn = rng.integers(len(rows), size=(_RESAMPLES, len(rows)))
    low, high = np.nanpercentile([rank(x[at], y[at]) for at in drawn], [2.5, 97.5])
    test = permutation_test(
        (x,), lambda a: rank(a, y), permutation_type="pairings", n_resamples=_RESAMPLES - 1, rng=rng
    )
    auc = np.nan
    if 0 < claimed.sum() < len(claimed):
        above = mannwhitneyu(x[claimed], x[~claimed]).statistic
        auc = above / (claimed.sum() * (~claimed).sum())
    top = rows.nlargest(_SHOWN, weights)
    best = ", ".join(
        f"{head_label(row['layer'], row['head'])}{' (claimed)' if row[f'{role}_claimed'] else ''}"
        for row in top.to_dict("records")
    )
    return {
        "weights": weights,
        "role": role,
        "spearman": rank(x, y),
        "ci_low": low,
        "ci_high": high,
        "n": len(rows),
        "p_value": float(test.pvalue),
        "auc": float(auc),
        "claimed": int(claimed.sum()),
        "best": best,
    }


__all__ = ["COUNTERPARTS", "SideBySide", "side_by_side"]
