"""How the rows of natural text distribute: one measurement that several roles read.

For every row: mass on the first token, on the previous token, within a local window and far away; for every
fourth row, mass by lag. Rows whose key of interest lies outside a sliding window or an attention chunk are left out
of that mass, so a head that cannot see a key is not scored 0 on it.

The text is headlab's essays, a folder of the user's, or the user's own records, one stretch of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headlab.attention import attention_chunks, keep
from headlab.errors import PromptError
from headlab.roles.base import Arrays, Look, Measurement, Probing
from headlab.tasks import RecordError, prose, prose_windows

#: Tokens of a window of text.
LENGTH = 384
#: Keys fewer than this many tokens away are local.
LOCAL = 16
#: Keys at least this many tokens away are far.
FAR = 128
#: A prompt counts for a head when the statistic exists on at least this share of its rows.
SHARE = 0.1
#: A row says something beyond its sink when at least this much of its mass lies beyond the first token.
AWAKE = 0.01
#: Where lag bins begin: one token each at first, then 2 or 3 to an octave.
LAGS = (*range(16), 16, 24, 32, 48, 64, 96, 128, 192, 256)
#: Where bins of key positions near the start begin; the last ends at position 64.
EARLY = (1, 2, 4, 8, 16, 32)
_EARLY_END = 64
_STRIDE = 4
_BATCH = 4


def text_schema(length: int) -> dict[str, Any]:
    """JSON Schema of a record that is one text of at least so many tokens."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A text",
        "description": "One stretch of natural text: its first tokens are read, each record being one prompt.",
        "type": "object",
        "properties": {
            "text": {
                "type": "string",
                "minLength": 1,
                "description": f"The text, at least {length} of the model's tokens long.",
            }
        },
        "required": ["text"],
        "additionalProperties": False,
        "examples": [
            {"text": "The river rose in the night, and by morning the lower field was gone. …"}
        ],
    }


#: The user's own texts, for every role that reads :func:`prose_rows`.
TEXT_SCHEMA: Mapping[str, Any] = text_schema(LENGTH)


@dataclass(frozen=True)
class ProseRows:
    """Masses of every row but the first.

    Attributes:
        ids: The text.
        first: Mass on the first token.
        previous: Mass on the token before the query.
        local: Mass fewer than :data:`LOCAL` tokens away.
        far: Mass at least :data:`FAR` tokens away, the first token left out.
        total: Mass on all keys: less than 1 under a sink logit.
        lags: Mass by lag bin on every fourth row, the first token left out.
        early: Mass per key by bin of key position (:data:`EARLY`), mean over the rows from 2·:data:`FAR` on.
        keys: Keys a row of the layer can see, the first token left out.
        near: Those of them fewer than :data:`LOCAL` tokens away.
        distant: Those of them at least :data:`FAR` tokens back.
        reach: How many tokens back a row of the layer sees.
        lag_keys: Keys by lag bin that the rows of ``lags`` see, the first token left out.
        queries: Query positions.
        lag_queries: Query positions of ``lags``.
        lag_edges: Bin i of ``lags`` holds ``lag_edges[i] <= query − key < lag_edges[i+1]``.
        windows: Sliding window or chunk of each layer, or the length of the text.
    """

    ids: Int[np.ndarray, "prompt position"]
    first: Float[np.ndarray, "prompt layer head query"]
    previous: Float[np.ndarray, "prompt layer head query"]
    local: Float[np.ndarray, "prompt layer head query"]
    far: Float[np.ndarray, "prompt layer head query"]
    total: Float[np.ndarray, "prompt layer head query"]
    lags: Float[np.ndarray, "prompt layer head row bin"]
    early: Float[np.ndarray, "prompt layer head early"]
    keys: Int[np.ndarray, "layer query"]
    near: Int[np.ndarray, "layer query"]
    distant: Int[np.ndarray, "layer query"]
    reach: Int[np.ndarray, "layer query"]
    lag_keys: Int[np.ndarray, "layer row bin"]
    queries: Int[np.ndarray, " query"]
    lag_queries: Int[np.ndarray, " row"]
    lag_edges: tuple[int, ...]
    windows: Int[np.ndarray, " layer"]

    def seen(self, distance: Int[np.ndarray, " query"] | int) -> Bool[np.ndarray, "layer query"]:
        """Which rows of each layer reach this many tokens back."""
        return self.reach >= distance

    def averaged(
        self,
        value: Float[np.ndarray, "prompt layer head query"],
        null: Float[np.ndarray, "prompt layer head query"],
        rows: Bool[np.ndarray, "layer query"],
        weight: Float[np.ndarray, "prompt layer head query"] | None = None,
        queries: Int[np.ndarray, " query"] | None = None,
    ) -> Measurement:
        """Prompt means of a statistic and its null over the chosen rows that have them (are not NaN).

        A layer without chosen rows is out of window, or the context is too short for the role. A head without a
        row that has the statistic rests on the first token.

        Args:
            value: The statistic.
            null: The same under the control.
            rows: Chosen rows.
            weight: Weights of the means; even by default.
            queries: Positions of the rows, where they are not :attr:`queries`.
        """
        chosen = np.broadcast_to(rows[:, None], value.shape[1:])
        notes: dict[tuple[int, int], str] = {}
        for layer in np.flatnonzero(~rows.any(1)):
            note = "out of window: no row of this head sees the key in question"
            if self.windows[layer] >= self.ids.shape[1]:
                note = f"not measurable: a text of {self.ids.shape[1]} tokens, all the context holds, is too short"
            notes |= {(int(layer), head): note for head in range(value.shape[2])}
        at = self.queries if queries is None else queries
        looks = [
            Look(ids, at, np.where(chosen, shown, np.nan))
            for ids, shown in zip(self.ids[:2], value[:2], strict=True)
        ]
        used = chosen & ~np.isnan(value)
        # Fewer rows would speak for the exceptions, not for the head.
        least = SHARE * chosen.sum(-1)
        found = _mean(value, used, least, weight), _mean(null, used, least, weight)
        resting = np.isnan(found[0]).all(axis=0) & rows.any(1, keepdims=True)
        for layer, head in np.argwhere(resting):
            notes[int(layer), int(head)] = "not measurable: the head rests on the first token"
        return Measurement(*found, tuple(looks), notes)


def text_ids(probing: Probing, length: int) -> Int[Tensor, "prompt position"]:
    """Stretches of text of a length: the user's records, or else of essays or the user's folder.

    Raises:
        RecordError: A record's text is too short.
        PromptError: There is no tokenizer, or too little text.
    """
    tokenizer, bos = probing.model.tokenizer, probing.bos
    if tokenizer is None:
        raise PromptError(f"{probing.model.name} came without a tokenizer, so it cannot read text")
    if probing.records is None:
        text = prose(probing.haystack)
        return prose_windows(tokenizer, text, probing.n_prompts, length, probing.seed, bos)
    first = [] if bos is None else [bos]
    body, rows = length - len(first), []
    for number, record in enumerate(probing.records):
        ids = tokenizer(record["text"], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < body:
            raise RecordError(
                f"record {number}: its text has {len(ids)} tokens, but {body} are needed; give a longer one"
            )
        rows.append([*first, *ids[:body]])
    return torch.tensor(rows)


def readable(probing: Probing) -> str:
    """Why the model cannot read text, or nothing."""
    if probing.model.tokenizer is None:
        return f"{probing.model.name} came without a tokenizer, so it cannot read text"
    return ""


def prose_rows(probing: Probing) -> ProseRows:
    """Measure them; parts are remembered batch by batch.

    Raises:
        RecordError: A record's text is too short.
        PromptError: There is no tokenizer, or too little text.
    """
    model = probing.model
    length = probing.length(LENGTH)
    ids = text_ids(probing, length)
    parts = []
    for start in range(0, len(ids), _BATCH):
        batch = ids[start : start + _BATCH]
        probing.tell(f"reading text {start + 1}–{start + len(batch)} of {len(ids)}")
        parts.append(
            probing.part(f"prose-{start:03d}", batch.numpy(), partial(_run, probing, batch))
        )
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    chunks = attention_chunks(probing.model)
    seen = [
        visible(layer.causal, layer.window, chunk, length)
        for layer, chunk in zip(model.spec.layers, chunks, strict=True)
    ]
    counts = np.stack([_counts(layer) for layer in seen], 1)
    keys, near, distant, reach = counts
    edges, rows = lag_edges(probing, length), lag_rows(length)
    lags = joined.pop("lags").astype(np.float32)
    windows = [layer.window or length for layer in model.spec.layers]
    return ProseRows(
        ids.numpy(),
        **joined,
        lags=lags,
        keys=keys,
        near=near,
        distant=distant,
        reach=reach,
        lag_keys=np.stack([_by_lag(layer, rows, edges) for layer in seen]),
        queries=np.arange(1, length),
        lag_queries=rows,
        lag_edges=edges,
        windows=np.minimum(windows, [chunk or length for chunk in chunks]),
    )


def lag_edges(probing: Probing, length: int) -> tuple[int, ...]:
    """Edges of the lag bins that a text of this length fills; on both sides where a layer sees what comes later."""
    back = {lag for lag in LAGS if lag < length} | {length}
    if all(layer.causal for layer in probing.model.spec.layers):
        return tuple(sorted(back))
    return tuple(sorted(back | {1 - edge for edge in back}))


def lag_rows(length: int) -> Int[np.ndarray, " row"]:
    """Rows whose mass is kept by lag: shorter ones have too few keys to tell lags apart."""
    return np.arange(2 * LOCAL, length, _STRIDE)


@cache
def visible(
    causal: bool, window: int | None, chunk: int | None, length: int
) -> Bool[np.ndarray, "position position"]:
    """Which keys each row of a layer sees."""
    at = np.arange(length)
    lag = at[:, None] - at
    seen: np.ndarray = np.abs(lag) < (window or length)
    if causal:
        seen &= lag >= 0
    if chunk is not None:
        seen &= at[:, None] // chunk == at // chunk
    return seen


def _counts(seen: Bool[np.ndarray, "position position"]) -> Int[np.ndarray, "4 query"]:
    """Keys but the first that each row sees, in all, nearby and far back, and how far back the furthest lies."""
    length = len(seen)
    lag = np.arange(1, length)[:, None] - np.arange(length)
    reach = np.where(seen[1:], lag, 0).max(1)
    seen, lag = seen[1:, 1:], lag[:, 1:]
    near, distant = seen & (np.abs(lag) < LOCAL), seen & (lag >= FAR)
    return np.stack([seen.sum(1), near.sum(1), distant.sum(1), reach])


def _by_lag(
    seen: Bool[np.ndarray, "position position"], rows: np.ndarray, edges: tuple[int, ...]
) -> Int[np.ndarray, "row bin"]:
    lag = rows[:, None] - np.arange(1, len(seen))
    seen = seen[rows, 1:]
    bins = [(seen & (lag >= low) & (lag < high)).sum(1) for low, high in pairwise(edges)]
    return np.stack(bins, 1)


def _run(probing: Probing, ids: Tensor) -> Arrays:
    length = ids.shape[1]
    edges, rows = lag_edges(probing, length), lag_rows(length)
    position = torch.arange(length)
    ends = (*EARLY, _EARLY_END)
    early = [((position >= a) & (position < b)).float() / (b - a) for a, b in pairwise(ends)]
    trace = probing.model.trace(
        ids,
        keep=keep.statistics(
            "first_mass", "local_mass", "lag_mass", "feature",
            window=LOCAL, bins=edges, x=torch.stack([torch.ones(length), *early], 1),
        ),
        logits="none",
    )  # fmt: skip
    lags = trace.statistic("lag_mass")
    first = trace.statistic("first_mass")
    feature = trace.statistic("feature")
    lows = torch.tensor(edges[:-1], device=lags.device)
    far = lags[..., lows >= FAR].sum(-1) - first * (position >= FAR).to(first)
    # The first token lies in the bin of the row's own position.
    own = np.searchsorted(edges, rows, side="right") - 1
    kept = lags[..., rows, :].float()
    kept[..., np.arange(len(rows)), own] -= first[..., rows].float()
    return {
        "first": _numpy(first[..., 1:]),
        "previous": _numpy(lags[..., 1:, edges.index(1)]),
        "local": _numpy(trace.statistic("local_mass")[..., 1:]),
        "far": _numpy(far[..., 1:]),
        "total": _numpy(feature[..., 1:, 0]),
        # Half precision is finer than any difference between rows, and these are by far the most numbers.
        "lags": _numpy(kept.clamp(min=0)).astype(np.float16),
        "early": _numpy(feature[..., 2 * FAR :, 1:].mean(-2)),
    }


def _numpy(x: Tensor) -> np.ndarray:
    return x.float().cpu().numpy()


def _mean(
    value: np.ndarray, used: np.ndarray, least: np.ndarray, weight: np.ndarray | None
) -> np.ndarray:
    count = used.sum(-1)
    weights = np.broadcast_to(1.0 if weight is None else weight, value.shape)
    over = np.where(used, weights, 0).sum(-1, dtype=np.float64)
    summed = np.where(used, value * weights, 0).sum(-1, dtype=np.float64)
    enough = (count > 0) & (count >= least) & (over > 0)
    return np.divide(summed, over, out=np.full(summed.shape, np.nan), where=enough)
