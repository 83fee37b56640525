"""What each RoPE pair of dimensions contributes to a head's scores.

RoPE turns pairs of dimensions of q and k, pair i by an angle that grows with position as p·ω_i, and leaves the other
dimensions alone. So a score is a sum over pairs, s = scaling · (Σ_i (q_a k_a + q_b k_b) + Σ_rest q k), with q and k as
they arrive at the seam, after the rotation. Pair 0 has the highest frequency: it tells near positions apart and is
blind to far ones; the last pairs are the other way round.

Which dimensions form pair i differs between architectures: dimension i and i + n (half-split: Llama, NeoX), or 2i and
2i + 1 (interleaved: GPT-J, Cohere, GLM), among the first 2n dimensions (partial rotary) or the last (multi-head latent
attention). No table is kept. A text of one token repeated has the same key at every position before the rotation, so
the layout is the one under which turning the keys back by the model's own frequencies makes them equal again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.attention import keep
from headlab.errors import UnsupportedError

if TYPE_CHECKING:
    from headlab.model import Model

_REPEATS = 16
#: Keys turned back may differ by this share of their norm: half-precision models round.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class RopePairs:
    """Dimensions of a head that RoPE turns together, pair 0 first.

    Attributes:
        first: First dimension of each pair.
        second: Second dimension of each pair.
        frequency: Angle per token of each pair, in radians.
    """

    first: Int[np.ndarray, " pair"]
    second: Int[np.ndarray, " pair"]
    frequency: Float[np.ndarray, " pair"]


def frequencies(model: Model) -> tuple[Float[np.ndarray, " pair"], ...]:
    """The model's RoPE frequencies, in radians per token, scaling included: one array per kind of layer."""
    found = {}
    for name, buffer in model.module.named_buffers():
        last = name.rsplit(".", 1)[-1]
        if last.endswith("inv_freq") and "original" not in last and buffer.dim() == 1:
            values = buffer.detach().double().cpu().numpy()
            found[values.tobytes()] = values
    width = getattr(model.module.config, "rotary_dim", None)
    if not found and width:  # GPT-J and CodeGen keep a table of sines instead, of base 10000
        return (10000.0 ** (-np.arange(0, width, 2) / width),)
    return tuple(found.values())


def rope_pairs(model: Model) -> dict[int, RopePairs]:
    """The pairs of every layer that rotates its keys; layers whose layout cannot be made out are left out."""
    known = frequencies(model)
    if model.spec.positions != "rope" or not known:
        return {}
    length = min(_REPEATS, model.spec.max_context or _REPEATS)
    ids = torch.full((1, length), plain_token(model))
    trace = model.trace(ids, keep=keep.tensors("k"), logits="none")
    found: dict[int, RopePairs] = {}
    for layer, about in enumerate(model.spec.layers):
        k = trace.tensor("k", layer)[0].double().cpu().numpy()
        fits = [(_spread(_unturned(k, pairs)), pairs) for pairs in _layouts(about.d_head, known)]
        best = min(fits, key=lambda fit: fit[0], default=None)
        # Keys of which slow pairs are nearly all turn little, and keys without positions would be turned apart.
        if best is not None and best[0] < min(_TOLERANCE, _spread(k) / 2):
            found[layer] = best[1]
        elif _spread(k) < _TOLERANCE:
            continue  # a layer without positions
        elif (near := _alike(model, found, about.d_head)) is not None:
            # Under a sink logit later layers see more of the token as it is repeated more often.
            found[layer] = near
    return found


def plain_token(model: Model) -> int:
    """A token to repeat: the first from the middle of the vocabulary on that the embedding gives a direction."""
    middle = model.spec.n_vocab // 2
    try:
        rows = model.weights.W_E[middle:]
    except UnsupportedError:
        return middle
    usable = (rows.isfinite().all(1) & (rows != 0).any(1)).nonzero()
    return middle + int(usable[0]) if len(usable) else middle


def contributions(
    q: Float[Tensor, "*heads query d_head"],
    k: Float[Tensor, "*heads key d_head"],
    pairs: RopePairs,
    scaling: float = 1.0,
) -> Float[Tensor, "*heads query key pair_and_rest"]:
    """What each pair adds to scaling·q·k, and last what the dimensions outside all pairs add."""
    a, b = (torch.from_numpy(index).to(q.device) for index in (pairs.first, pairs.second))
    rest = torch.ones(q.shape[-1], dtype=torch.bool, device=q.device)
    rest[a] = rest[b] = False
    turned = q[..., None, a] * k[..., None, :, a] + q[..., None, b] * k[..., None, :, b]
    others = q[..., rest] @ k[..., rest].transpose(-1, -2)
    return torch.cat([turned, others[..., None]], -1) * scaling


def _layouts(d_head: int, known: tuple[np.ndarray, ...]) -> list[RopePairs]:
    """Every layout that a head of this width could have."""
    made = []
    for frequency in known:
        n = len(frequency)
        at = np.arange(n)
        for start in sorted({0, d_head - 2 * n}) if 2 * n <= d_head else ():
            made.append(RopePairs(start + at, start + at + n, frequency))
            made.append(RopePairs(start + 2 * at, start + 2 * at + 1, frequency))
    return made


def _unturned(k: np.ndarray, pairs: RopePairs) -> np.ndarray:
    """Keys [position, head, d_head] with the rotation of their positions taken back."""
    angle = np.arange(len(k))[:, None, None] * pairs.frequency
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = k[..., pairs.first], k[..., pairs.second]
    out = k.copy()
    out[..., pairs.first], out[..., pairs.second] = a * cos + b * sin, b * cos - a * sin
    return out


def _spread(k: np.ndarray) -> float:
    """Root-mean-square distance of keys [position, ...] from their mean, as a share of their size."""
    return float(np.sqrt(((k - k.mean(0)) ** 2).mean() / (k**2).mean()))


def _alike(model: Model, found: Mapping[int, RopePairs], d_head: int) -> RopePairs | None:
    same = [pairs for at, pairs in found.items() if model.spec.layers[at].d_head == d_head]
    return same[-1] if same else None
