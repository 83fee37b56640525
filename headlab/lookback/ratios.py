"""Lookback ratios (Chuang et al. 2024, Lookback Lens): how much of a head's attention goes back to the context.

For the row that predicts response token t, with N context keys and n_t new keys (cue and response so far),

LR[t, l, h] = c / (c + n),  c = (1/N) Σ_{k < N} A[k],  n = (1/n_t) Σ_{k ≥ N} A[k],

as in the authors' code (voidism/Lookback-Lens; its description was read, not its lines): means over keys, not sums, so
a ratio depends on both lengths. The first token belongs to the context, so a head that rests on it saturates c. Every
key before the row counts in N and n_t, also one that a sliding window hides, whose weight is 0: a window that no longer
reaches the context gives ratio 0. Where a head has a learned sink (gpt-oss) the weights are what is left beside it, and
the ratio, being one of weights, does not see the sink. Padding is no key. The masses are statistics of single rows,
captured in one pass: nothing is ever as large as a pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.arguments import count
from headlab.attention import keep
from headlab.attention.keep import KeepStatistics, Queries, SpanLike
from headlab.errors import PlanError, UnsupportedError
from headlab.lookback.examples import Example, Tokens, all_tokenised

if TYPE_CHECKING:
    from headlab.attention import Trace
    from headlab.model import Model

#: Examples run at a time.
BATCH = 8


def ratios(
    model: Model,
    examples: Example | Sequence[Example],
    *,
    batch: int = BATCH,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Float[np.ndarray, "token layer head"]]:
    """Lookback ratios of every response token, layer and head, from one pass over prompt and response.

    Row t is that of the query which predicts response token t, one position before it, as in the authors' code.

    Args:
        model: The model.
        examples: Prompts and responses; labels are not needed.
        batch: Examples run at a time.
        tell: Told, in a few words, what is being done.

    Returns:
        One array per example, float32, from 0 to 1.

    Raises:
        PromptError: An example cannot be used, or there is none.
        PlanError: The layers have different numbers of heads.
    """
    listed = [examples] if isinstance(examples, Example) else examples
    return ratios_of(model, all_tokenised(model, listed), batch=batch, tell=tell)


def ratios_of(
    model: Model,
    examples: Sequence[Tokens],
    *,
    batch: int = BATCH,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Float[np.ndarray, "token layer head"]]:
    """:func:`ratios` of tokenised examples; those of like length run together, padded on the right."""
    heads_of(model)
    count(batch, "batch")
    order = sorted(range(len(examples)), key=lambda at: len(examples[at].ids))
    found: dict[int, Float[np.ndarray, "token layer head"]] = {}
    for start in range(0, len(order), batch):
        tell(f"reading example {start + 1} of {len(order)}")
        chosen = order[start : start + batch]
        for at, one in zip(chosen, _batch(model, [examples[at] for at in chosen]), strict=True):
            found[at] = one
    return [found[at] for at in range(len(examples))]


def heads_of(model: Model) -> int:
    """Heads of each layer.

    Raises:
        PlanError: The layers have different numbers of them.
        UnsupportedError: The model is no decoder.
    """
    if not all(layer.stack == "decoder" and layer.causal for layer in model.spec.layers):
        raise UnsupportedError(
            f"{model.name} ({model.spec.family}) is no decoder, and a lookback ratio is of rows that see only "
            "what comes before them"
        )
    heads = {layer.n_heads for layer in model.spec.layers}
    if len(heads) > 1:
        raise PlanError(
            f"the layers of {model.name} have {sorted(heads)} heads; ratios need one number"
        )
    return heads.pop()


def _batch(model: Model, examples: Sequence[Tokens]) -> list[Float[np.ndarray, "token layer head"]]:
    lengths = [len(example.ids) for example in examples]
    ids = torch.full((len(examples), max(lengths)), -1)
    for row, example in enumerate(examples):
        ids[row, : lengths[row]] = example.ids
    sizes = [n - example.start for n, example in zip(lengths, examples, strict=True)]
    # Row t is the query that predicts token t; shorter responses have their last row repeated.
    rows = torch.stack(
        [
            torch.arange(max(sizes)).clamp(max=size - 1) + example.start - 1
            for size, example in zip(sizes, examples, strict=True)
        ]
    )
    contexts = torch.tensor([example.context for example in examples])
    plan = masses(contexts, max(lengths), queries=rows)
    every = of_trace(model.trace(ids, keep=[plan], logits="none"), contexts, rows)
    return [one[:size] for one, size in zip(every, sizes, strict=True)]


def masses(contexts: Int[Tensor, " batch"], n: int, queries: Queries) -> KeepStatistics:
    """The statistic that ratios are made of: mass on the context and on what is new.

    Args:
        contexts: Context keys of each prompt.
        n: Keys in all, of the longest; generated ones included.
        queries: Rows to keep, as in :func:`headlab.keep.statistics`.
    """
    segments: dict[str, SpanLike] = {
        "context": [(0, int(context)) for context in contexts],
        "new": [(int(context), n) for context in contexts],
    }
    return keep.statistics("segment_mass", segments=segments, queries=queries)


def of_trace(
    trace: Trace, contexts: Int[Tensor, " batch"], rows: Int[Tensor, "batch row"]
) -> list[Float[np.ndarray, "row layer head"]]:
    """Ratios of the rows of a trace that kept :func:`masses`; NaN where a row sees no new key.

    Args:
        trace: The trace.
        contexts: Context keys of each prompt.
        rows: Position of each row.
    """
    mass = trace.statistic("segment_mass").double().cpu()  # [batch, layer, head, row, segment]
    old_keys = contexts.double()[:, None, None, None]
    new_keys = (rows + 1 - contexts[:, None]).double()[:, None, None]  # [batch, 1, 1, row]
    back, new = mass[..., 0] / old_keys, mass[..., 1] / new_keys
    found = torch.where(new_keys > 0, back / (back + new), torch.nan)
    return [part.permute(2, 0, 1).float().numpy() for part in found]
