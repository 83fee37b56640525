"""Random sets of heads to compare chosen heads with: as many, of the same layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from headlab.attention.heads import Head
from headlab.models.spec import ModelSpec


def matched_sets(
    spec: ModelSpec, heads: Sequence[Head], draws: int, seed: int
) -> tuple[list[tuple[Head, ...]], str]:
    """Different random sets of as many heads, layer by layer, and what is to be said of how they were drawn.

    Args:
        spec: The model.
        heads: The heads that the sets are controls for; the sets leave them out where enough others are left.
        draws: How many sets.
        seed: Seed of the draws.
    """
    every = [
        Head(at, head) for at, layer in enumerate(spec.layers) for head in range(layer.n_heads)
    ]
    others = [head for head in every if head not in set(heads)]
    note = ""
    if len(others) < 1.5 * len(heads):
        others = every
        note = "so many heads are chosen that the random sets are drawn from all heads, chosen ones included"
    wanted = Counter(head.layer for head in heads)
    sets: list[tuple[Head, ...]] = []
    said = note
    for radius in range(spec.n_layers):
        pools = {
            layer: [head for head in others if abs(head.layer - layer) <= radius]
            for layer in wanted
        }
        sets = _draw(pools, wanted, draws, seed, heads)
        if radius:
            near = f"the random sets take heads from up to {radius} layers away, for want of others"
            said = "; ".join(part for part in (note, near) if part)
        if len(sets) == draws:
            return sets, said
    few = f"the model has only {len(sets)} other sets of as many heads, too few to compare with"
    return sets, "; ".join(part for part in (note, few) if part)


def _draw(
    pools: Mapping[int, list[Head]],
    wanted: Mapping[int, int],
    draws: int,
    seed: int,
    chosen: Sequence[Head],
) -> list[tuple[Head, ...]]:
    """Up to ``draws`` different sets; fewer where the pools do not hold as many."""
    rng = np.random.default_rng(seed)
    found: dict[tuple[Head, ...], None] = {}
    for _ in range(20 * draws):
        taken: list[Head] = []
        for layer, count in sorted(wanted.items()):
            left = [head for head in pools[layer] if head not in taken]
            if len(left) < count:
                break
            taken += [left[at] for at in rng.choice(len(left), count, replace=False)]
        else:
            if set(taken) != set(chosen):
                found[tuple(sorted(taken))] = None
        if len(found) == draws:
            break
    return list(found)
