"""What stands on a head's card, part by part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from headlab.attention import Head
from headlab.causal import ablate_each, metrics
from headlab.errors import PromptError
from headlab.parameters import (
    Circuits,
    Maps,
    composition,
    copying,
    maps,
    previous_token,
    singular_vectors,
)
from headlab.statistics import corrected
from headlab.tasks import plain_tokens, prose, prose_windows, repeated_tokens

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.parameters import RelationsLike

Tell = Callable[[str], None]

_PARTNERS, _DIRECTIONS, _WORDS = 4, 3, 6
_TEXT_LENGTH, _REPEATED = 64, 25


def mapped_operations(
    model: Model,
    head: Head,
    relations: RelationsLike,
    mapped: Maps | None,
    alpha: float,
    tell: Tell,
) -> pd.DataFrame:
    """The head's rows of maps, corrected over themselves, the best first."""
    if mapped is None:
        mapped = maps(model, relations, heads=head, alpha=alpha, tell=tell)
    rows = mapped.of(head)
    q = corrected(rows["p_value"].to_numpy(float))
    claimed = (q <= alpha) & (rows["effect"] >= mapped.about["min_effect"] - 1e-12)
    rows = rows.assign(q_value=q, claimed=claimed)
    return rows.sort_values(
        ["claimed", "score", "effect"], ascending=False, kind="stable", ignore_index=True
    )


def copying_score(model: Model, head: Head, alpha: float, seed: int) -> dict[str, Any]:
    """Eigenvalue copying of the head, corrected over all heads."""
    frame = copying(model, alpha=alpha, seed=seed).assign(ci_low=np.nan, ci_high=np.nan)
    row = frame[rows_of(frame, head)].iloc[0].to_dict()
    return _score("copying (eigenvalues of W_OV)", row, row["kind"])


def previous_token_score(model: Model, head: Head, alpha: float, seed: int) -> dict[str, Any]:
    """The head's positional weight on the token before, corrected over all heads."""
    frame = previous_token(model, alpha=alpha, seed=seed)
    row = frame[rows_of(frame, head)].iloc[0].to_dict()
    verdict = "looks one back" if row["claimed"] else ""
    return _score("previous token (positions in W_QK)", row, verdict)


def _score(what: str, row: dict[Any, Any], verdict: str) -> dict[str, Any]:
    kept = ("score", "ci_low", "ci_high", "n", "null_mean", "p_value", "q_value", "note")
    return {"what": what, **{name: row[name] for name in kept}, "verdict": verdict}


def directions_of(made: Circuits, head: Head, seed: int) -> pd.DataFrame:
    """Leading singular directions of the head's W_OV, as tokens."""
    frame = singular_vectors(made, head, n=_DIRECTIONS, k=_WORDS, seed=seed).frame
    sides = {side: rows.set_index("direction") for side, rows in frame.groupby("side")}
    joined = pd.DataFrame(
        {
            "share": sides["reads"]["share"],
            "reads": sides["reads"]["top"],
            "writes": sides["writes"]["top"],
        }
    )
    return as_text(joined.reset_index(drop=True))


def partners_of(made: Circuits, head: Head, seed: int, tell: Tell) -> pd.DataFrame:
    """The heads it reads from and writes to most, by effect over the null."""
    if made.n_layers < 2:
        return pd.DataFrame()
    frame = composition(made, seed=seed, tell=tell).frame
    reads = frame[frame["late"] == str(head)]
    writes = frame[frame["early"] == str(head)]
    reads = reads.assign(side="reads by " + reads["kind"], partner=reads["early"])
    writes = writes.assign(side="writes to " + writes["kind"] + " of", partner=writes["late"])
    best = [rows.nlargest(_PARTNERS, "effect") for rows in (reads, writes)]
    columns = ["side", "partner", "score", "null_mean", "z", "p_value", "q_value"]
    return pd.concat(best)[columns].reset_index(drop=True)


def losses_without(model: Model, head: Head, n: int, seed: int, tell: Tell) -> pd.DataFrame:
    """Rise of the loss on plain and on repeated text without the head, beside the other heads of its layer."""
    if model.tokenizer is None:
        raise PromptError(
            f"{model.name} came without a tokenizer, which text for ablation needs; load it with tokenizer=, or pass "
            "causal=False"
        )
    longest = model.spec.max_context or _TEXT_LENGTH
    plain = prose_windows(model.tokenizer, prose(), n, min(_TEXT_LENGTH, longest), seed, model.bos)
    tokens = plain_tokens(model.tokenizer, model.spec.n_vocab)
    size = min(_REPEATED, len(tokens) // 2, (longest - 1) // 2)
    repeated = repeated_tokens(tokens, n, size, seed, model.bos).repeated
    rows = []
    for what, ids in (("plain text", plain), ("repeated random tokens", repeated)):
        effects = ablate_each(
            model, ids, metrics.loss(), heads=f"{head.layer}.*", seed=seed, tell=tell
        ).frame
        own = effects[effects["head"] == head.head].iloc[0]
        others = effects[effects["head"] != head.head]["effect"]
        rows.append(
            {
                "what": what,
                **{name: own[name] for name in ("effect", "ci_low", "ci_high", "n", "p_value")},
                "rank": f"{1 + int((others > own['effect']).sum())} of {len(effects)}",
                "others": float(others.mean()) if len(others) else math.nan,
            }
        )
    return pd.DataFrame(rows)


def rows_of(frame: pd.DataFrame, head: Head) -> pd.Series:
    """Which rows of a table are of a head."""
    return (frame["layer"] == head.layer) & (frame["head"] == head.head)


def as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """Lists of tokens as one text each; repr shows the space at the beginning of a word."""
    return frame.map(
        lambda cell: " ".join(map(repr, cell)) if isinstance(cell, list | tuple) else cell
    )


__all__ = [
    "as_text",
    "copying_score",
    "directions_of",
    "losses_without",
    "mapped_operations",
    "partners_of",
    "previous_token_score",
    "rows_of",
]
