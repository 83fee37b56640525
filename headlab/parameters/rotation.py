"""RoPE between a query and a key some tokens before it, as a map of the query alone.

Turning q by its position and k by its own gives the same product as turning q by the distance between them. The mean of
such products over several distances is that of q under the mean of the turns, which is again linear in q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.attention import RopePairs
from headlab.errors import PlanError

#: A distance between query and key in tokens, several to average over, or ``"mean"``: all that the layer can see.
Distance: TypeAlias = "int | Sequence[int] | Literal['mean'] | None"


@dataclass(frozen=True, eq=False)
class Rotation:
    """How a layer rotates its queries and keys.

    Attributes:
        pairs: The dimensions turned together, and how fast.
        factor: What rotation multiplies each dimension by besides turning it, [d_head]: 1, but for YaRN.
        reach: How far the layer can see, in tokens.
    """

    pairs: RopePairs
    factor: Float[Tensor, " d_head"]
    reach: int

    def turn(
        self, q: Float[Tensor, "*any d_head"], distance: Distance
    ) -> Float[Tensor, "*any d_head"]:
        """Vectors whose product with an unrotated key is that of the rotated query and key at a distance.

        Raises:
            PlanError: The distance is none.
        """
        angle = self.distances(distance)[:, None] * self.pairs.frequency
        cos, sin = (torch.from_numpy(of(angle).mean(0)).to(q) for of in (np.cos, np.sin))
        a, b = (torch.from_numpy(at).to(q.device) for at in (self.pairs.first, self.pairs.second))
        turned = q.clone()
        turned[..., a] = q[..., a] * cos - q[..., b] * sin
        turned[..., b] = q[..., b] * cos + q[..., a] * sin
        return turned * self.factor.to(q) ** 2

    def by_distance(
        self, q: Float[Tensor, "*any d_head"], k: Float[Tensor, "*any d_head"], n: int
    ) -> Float[Tensor, "*any n"]:
        """Products of queries with keys 0 … n − 1 tokens before them."""
        angle = torch.from_numpy(np.arange(n) * self.pairs.frequency[:, None])
        a, b = (torch.from_numpy(at).to(q.device) for at in (self.pairs.first, self.pairs.second))
        k = k * self.factor.to(k) ** 2
        along = q[..., a] * k[..., a] + q[..., b] * k[..., b]
        across = q[..., a] * k[..., b] - q[..., b] * k[..., a]
        rest = (q * k)[..., ~self.rotated].sum(-1, keepdim=True)
        return along @ angle.cos().to(q) + across @ angle.sin().to(q) + rest

    def distances(self, distance: Distance) -> Int[np.ndarray, " distance"]:
        """The distances that an argument names.

        Raises:
            PlanError: It names none.
        """
        if isinstance(distance, str) and distance == "mean":
            return np.arange(self.reach)
        return _whole(distance)

    @property
    def rotated(self) -> Tensor:
        """Which dimensions are turned, [d_head]."""
        found = torch.zeros_like(self.factor, dtype=torch.bool)
        for at in (self.pairs.first, self.pairs.second):
            found[torch.from_numpy(at).to(found.device)] = True
        return found


def check_distance(distance: Distance, causal: bool) -> None:
    """Refuse what names no distance, also where no layer rotates and so none would look.

    Args:
        distance: The distance; None, where it may be left out, and ``"mean"`` pass.
        causal: Whether keys only ever lie before their queries.

    Raises:
        PlanError: It is no distance, or negative though keys lie before.
    """
    if distance is None or (isinstance(distance, str) and distance == "mean"):
        return
    if _whole(distance).min() < 0 and causal:
        raise PlanError(
            f"distance={distance!r:.60} has the key behind the query, which a causal layer never sees; count from 0"
        )


def _whole(distance: Any) -> Int[np.ndarray, " distance"]:
    try:
        at = np.atleast_1d(np.asarray(distance))
    except ValueError:  # lists of several lengths
        at = np.empty(0)
    if at.size == 0 or at.dtype.kind not in "iu" or at.ndim != 1:
        raise PlanError(f"distance={distance!r:.60} must be a number of tokens, several, or 'mean'")
    return at


__all__ = ["Distance", "Rotation", "check_distance"]
