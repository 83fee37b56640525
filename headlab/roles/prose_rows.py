"""How the rows of natural text distribute: one measurement that several roles read.

For every row: mass on the first token, on the previous token, within a local window and far away. Rows whose
key of interest lies outside a sliding window are left out of that mass, so a head that cannot see a key is not
scored 0 on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from jaxtyping import Float, Int

from headlab.attention import keep
from headlab.errors import PromptError
from headlab.roles.base import Arrays, Look, Measurement, Probing
from headlab.tasks import prose, prose_windows

#: Tokens of a window of text.
LENGTH = 384
#: Keys fewer than this many tokens away are local.
LOCAL = 16
#: Keys at least this many tokens away are far.
FAR = 128
#: A prompt counts for a head when the statistic exists on at least this share of its rows.
SHARE = 0.1
_BATCH = 4


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
        keys: Keys a row of the layer can see, the first token left out.
        near: Those of them fewer than :data:`LOCAL` tokens away.
        distant: Those of them at least :data:`FAR` tokens back.
        queries: Query positions.
        windows: Sliding window of each layer, or the length of the text.
    """

    ids: Int[np.ndarray, "prompt position"]
    first: Float[np.ndarray, "prompt layer head query"]
    previous: Float[np.ndarray, "prompt layer head query"]
    local: Float[np.ndarray, "prompt layer head query"]
    far: Float[np.ndarray, "prompt layer head query"]
    total: Float[np.ndarray, "prompt layer head query"]
    keys: Int[np.ndarray, "layer query"]
    near: Int[np.ndarray, "layer query"]
    distant: Int[np.ndarray, "layer query"]
    queries: Int[np.ndarray, " query"]
    windows: Int[np.ndarray, " layer"]

    def seen(self, distance: Int[np.ndarray, " query"] | int) -> np.ndarray:
        """Which rows of each layer reach this many tokens back, [layer, query]."""
        return np.broadcast_to(self.windows[:, None] > distance, self.keys.shape)

    def averaged(
        self,
        value: Float[np.ndarray, "prompt layer head query"],
        null: Float[np.ndarray, "prompt layer head query"],
        rows: Float[np.ndarray, "layer query"],
    ) -> Measurement:
        """Prompt means of a statistic and its null over the chosen rows that have them (are not NaN).

        A layer without chosen rows is out of window, or the context is too short for the role.
        """
        chosen = np.broadcast_to(rows[:, None], value.shape[1:])
        notes: dict[tuple[int, int], str] = {}
        for layer in np.flatnonzero(~rows.any(1)):
            note = "out of window: no row of this head sees the key in question"
            if self.windows[layer] >= self.ids.shape[1]:
                note = f"not measurable: a text of {self.ids.shape[1]} tokens, all the context holds, is too short"
            notes |= {(int(layer), head): note for head in range(value.shape[2])}
        looks = [
            Look(self.ids[at], self.queries, np.where(chosen, value[at], np.nan)) for at in range(2)
        ]
        used = chosen & ~np.isnan(value)
        least = SHARE * chosen.sum(
            -1
        )  # fewer rows would speak for the exceptions, not for the head
        return Measurement(_mean(value, used, least), _mean(null, used, least), tuple(looks), notes)


def prose_rows(probing: Probing) -> ProseRows:
    """Measure them; parts are remembered batch by batch."""
    model, spec = probing.model, probing.model.spec
    if model.tokenizer is None:
        raise PromptError(f"{model.name} came without a tokenizer, so it cannot read text")
    length = probing.length(LENGTH)
    ids = prose_windows(
        model.tokenizer,
        prose(probing.haystack),
        probing.n_prompts,
        length,
        probing.seed,
        probing.bos,
    )
    parts = []
    for start in range(0, len(ids), _BATCH):
        batch = ids[start : start + _BATCH]
        probing.tell(f"reading text {start + 1}–{start + len(batch)} of {len(ids)}")
        parts.append(
            probing.part(f"prose-{start:03d}", batch.numpy(), partial(_run, probing, batch))
        )
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    queries = np.arange(1, length)
    windows = np.array([layer.window or length for layer in spec.layers])
    counts = np.stack([_visible(layer.causal, layer.window, length) for layer in spec.layers], 1)
    keys, near, distant = counts
    return ProseRows(
        ids.numpy(),
        **joined,
        keys=keys,
        near=near,
        distant=distant,
        queries=queries,
        windows=windows,
    )


@cache
def _visible(causal: bool, window: int | None, length: int) -> Int[np.ndarray, "3 query"]:
    """How many keys but the first each row sees: in all, nearby and far back."""
    lag = np.arange(1, length)[:, None] - np.arange(1, length)
    seen = np.abs(lag) < (window or length)
    if causal:
        seen &= lag >= 0
    return np.stack(
        [seen.sum(1), (seen & (np.abs(lag) < LOCAL)).sum(1), (seen & (lag >= FAR)).sum(1)]
    )


def _run(probing: Probing, ids: torch.Tensor) -> Arrays:
    length = ids.shape[1]
    trace = probing.model.trace(
        ids,
        keep=keep.statistics(
            "first_mass", "local_mass", "lag_mass", "feature",
            window=LOCAL, bins=(1, 2, min(FAR, length), length + 1), x=torch.ones(length),
        ),
        logits="none",
    )  # fmt: skip
    lags = trace.statistic("lag_mass")[..., 1:, :]
    first = trace.statistic("first_mass")[..., 1:]
    far = lags[..., 2] - first * (torch.arange(1, length) >= FAR).to(first)
    return {
        "first": _numpy(first),
        "previous": _numpy(lags[..., 0]),
        "local": _numpy(trace.statistic("local_mass")[..., 1:]),
        "far": _numpy(far),
        "total": _numpy(trace.statistic("feature")[..., 1:]),
    }


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.float().cpu().numpy()


def _mean(value: np.ndarray, used: np.ndarray, least: np.ndarray) -> np.ndarray:
    count = used.sum(-1)
    summed = np.where(used, value, 0).sum(-1, dtype=np.float64)
    enough = (count > 0) & (count >= least)
    return np.divide(summed, count, out=np.full(summed.shape, np.nan), where=enough)
