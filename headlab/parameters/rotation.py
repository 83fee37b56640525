"""RoPE between a query and a key some tokens before it, as a map of the query alone.

Turning q by its position and k by its own gives the same product as turning q by the distance between them. The mean of
such products over several distances is that of q under the mean of the turns, which is again linear in q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

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

    def distances(self, distance: Distance) -> Int[np.ndarray, " distance"]:
        """The distances that an argument names.

        Raises:
            PlanError: It names none.
        """
        if isinstance(distance, str) and distance == "mean":
            return np.arange(self.reach)
        at = np.atleast_1d(np.asarray(distance))
        if at.size == 0 or at.dtype.kind not in "iu" or at.ndim != 1:
            raise PlanError(f"distance={distance!r} must be a number of tokens, several, or 'mean'")
        return at

    @property
    def rotated(self) -> Tensor:
        """Which dimensions are turned, [d_head]."""
        found = torch.zeros_like(self.factor, dtype=torch.bool)
        for at in (self.pairs.first, self.pairs.second):
            found[torch.from_numpy(at).to(found.device)] = True
        return found


__all__ = ["Distance", "Rotation"]
