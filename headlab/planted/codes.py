"""Token codes: nearly orthogonal unit vectors, more of them than dimensions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headlab.planted.seeds import generator

Array = NDArray[np.float64]

_ROUNDS = 80
_TOO_MANY_TO_SPREAD = 400


def token_codes(n: int, dim: int, seed: int) -> Array:
    """Unit vectors that point as far apart as can be had cheaply, ``[n, dim]``.

    Up to ``dim`` vectors are orthonormal. Beyond that, random vectors are spread by alternating
    projection (Tropp et al. 2005, "Designing structured tight frames"): clip the off-diagonal inner
    products, then return to the nearest matrix of rank ``dim``. Very large sets stay random:
    spreading them would take many seconds.
    """
    draws = generator(seed, "codes").standard_normal((max(n, dim), dim))
    if n <= dim:
        return np.linalg.qr(draws)[0][:n]
    codes = _unit(draws)
    if n > _TOO_MANY_TO_SPREAD:
        return codes
    # The Welch bound: no n vectors in dim dimensions can all be closer to orthogonal than this.
    bound = np.sqrt((n - dim) / (dim * (n - 1)))
    for _ in range(_ROUNDS):
        gram = np.clip(codes @ codes.T, -1.2 * bound, 1.2 * bound)
        np.fill_diagonal(gram, 1.0)
        values, vectors = np.linalg.eigh(gram)
        codes = _unit(vectors[:, -dim:] * np.sqrt(np.maximum(values[-dim:], 0.0)))
    return codes


def match_gain(codes: Array, n_keys: int, spread: float = 0.0, leak: float = 0.05) -> float:
    """The score, in nats, at which a matching token wins against ``n_keys`` others.

    The smallest gain β for which the others, taken together, hold at most ``leak`` times the weight
    of a match: ``n_keys · mean exp(β·⟨code, other⟩ + spread) ≤ leak · exp(β)``. ``spread`` is what
    position may add to a key that does not match.
    """
    inner = codes @ codes.T
    others = inner[~np.eye(len(codes), dtype=bool)]
    others = others[:: max(1, len(others) // 100_000)]

    def enough(gain: float) -> bool:
        return np.log(n_keys * np.exp(gain * (others - 1.0)).mean()) + spread <= np.log(leak)

    gain = 1.0
    while not enough(gain):
        gain += 0.25
    return gain


def _unit(vectors: Array) -> Array:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
