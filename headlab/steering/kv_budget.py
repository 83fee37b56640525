"""KV budgets by head role: whole caches only for heads that need them, sink and recent tokens for the others.

Heads that retrieve from far away keep every key; the others, as in StreamingLLM (Xiao et al. 2023), the first few,
which hold attention sinks, and the most recent ones. Caches belong to key/value heads, so that a group of query heads
keeps everything where one of them is named.

It simulates what dropping loses: hidden keys get −∞, the cache itself stays whole. :meth:`KVBudget.cache_bytes` counts
what a real one would hold. Keys keep their original positions; StreamingLLM instead counts positions within the cache
(read in the authors' code: keys cached before rotation), so that beyond the trained context the two differ.

While decoding, the edit is one row per head. Over a prompt it needs a row per query: heads × tokens² × 4 bytes, one
layer at a time. For long prompts take ``prefill=False``, which needs no such rows, or run them by ``model.stream``,
chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headlab.arguments import count, finite_number, is_finite, seed_number
from headlab.attention import Edit, Head, HeadsLike, Where, apply, parse_heads
from headlab.errors import PlanError
from headlab.models import LayerSpec
from headlab.steering.base import Method

if TYPE_CHECKING:
    from headlab.model import Model


@dataclass(frozen=True)
class KVBudget(Method):
    """Let key/value heads see the first and the last keys only, but for those of the heads named.

    Attributes:
        heads: Query heads whose groups keep every key, such as retrieval heads; None: no group does.
        sink: First tokens that the others keep.
        recent: Last tokens that the others keep, the query's own included; at least 1.
        prefill: Whether rows of the prompt are limited too, as where a prompt is run in chunks under the budget; else
            keys are dropped once the whole prompt has been read, and its last row still sees all of them.

    Raises:
        PlanError: A number is no whole number, or too small.
    """

    heads: HeadsLike | None = None
    sink: int = 4
    recent: int = 256
    prefill: bool = True

    name: ClassVar[str] = "kv_budget"
    strength_field: ClassVar[str] = "recent"
    strengths: ClassVar[tuple[float, ...]] = (256, 64, 16)

    def __post_init__(self) -> None:
        count(self.sink, "sink", least=0, most=2**31)
        count(self.recent, "recent", most=2**31)

    def at(self, strength: float) -> Self:
        """The same with so many recent tokens.

        Raises:
            PlanError: It is no whole number of at least 1.
        """
        whole = is_finite(strength) and float(strength).is_integer()
        return self._with(recent=int(strength) if whole else finite_number(strength, "recent"))

    def edits(self, model: Model) -> Sequence[Edit]:
        """One bias on the scores of the groups that do not keep everything.

        Raises:
            HeadError: A head does not exist.
            PlanError: The model is no decoder, and so has no cache of its own past.
        """
        whole = self.whole_groups(model)
        limited = [
            Head(at, head)
            for at, layer in enumerate(model.spec.layers)
            for head in range(layer.n_heads)
            if (at, head // _group(layer)) not in whole
        ]
        last: tuple[Tensor | None, Tensor, Tensor | None] | None = None

        def limit(bias: Tensor, where: Where) -> Tensor:
            nonlocal last
            # The layers of a pass share their tensors of positions.
            if last is None or last[0] is not where.keys or last[1] is not where.positions:
                last = (where.keys, where.positions, self._hidden(where))
            return bias if last[2] is None else bias + last[2].to(bias)[:, None]

        return (apply(limited, limit, "bias"),) if limited else ()

    def whole_groups(self, model: Model) -> frozenset[tuple[int, int]]:
        """Layer and key/value head of every group that keeps all keys.

        Raises:
            HeadError: A head does not exist.
            PlanError: The model is no decoder.
        """
        layers = model.spec.layers
        if any(layer.stack != "decoder" for layer in layers):
            raise PlanError(
                f"{model.name} is no decoder-only model, so that a KV budget means nothing to it"
            )
        named = () if self.heads is None else parse_heads(self.heads, model.spec)
        return frozenset((at, head // _group(layers[at])) for at, head in named)

    def cache_bytes(self, model: Model, n_tokens: int) -> int:
        """Bytes of keys and values that one sequence's cache holds after so many tokens, in the model's own type.

        The full cache is that of ``KVBudget(heads="*.*")``. A layer with a sliding window holds no more than it.

        Raises:
            HeadError: A head does not exist.
            PlanError: The model is no decoder, or ``n_tokens`` is no whole number.
        """
        count(n_tokens, "n_tokens", least=0, most=2**31)
        whole = self.whole_groups(model)
        return sum(
            self._kept(layer, (at, group) in whole, n_tokens)
            * (layer.d_head + layer.d_value)
            * model.dtype.itemsize
            for at, layer in enumerate(model.spec.layers)
            for group in range(layer.n_kv_heads)
        )

    def redrawn(self, model: Model, seed: int) -> Self:
        """As large a budget at random: as many key/value heads keep everything, drawn from all the others.

        This is the control that costs the same cache. Random query heads, which
        :func:`~headlab.steering.evaluate` takes, may fall into more groups or fewer.

        Raises:
            PlanError: No group keeps everything, or there are not so many others.
        """
        whole = self.whole_groups(model)
        layers = model.spec.layers
        others = [
            (at, group)
            for at, layer in enumerate(layers)
            for group in range(layer.n_kv_heads)
            if (at, group) not in whole
        ]
        if not whole or len(others) < len(whole):
            raise PlanError(
                f"{len(whole)} key/value heads keep everything and {len(others)} do not, so no other budget of this "
                "size can be drawn"
            )
        drawn = np.random.default_rng(seed_number(seed)).choice(others, len(whole), replace=False)
        heads = [
            Head(int(at), int(group) * size + member)
            for at, group in sorted(drawn.tolist())
            for size in [_group(layers[at])]
            for member in range(size)
        ]
        return self.on(heads)

    def _kept(self, layer: LayerSpec, whole: bool, n: int) -> int:
        """Keys that a key/value head holds after n tokens."""
        oldest = 0 if layer.window is None else max(0, n - layer.window)
        if whole:
            return n - oldest
        first = range(oldest, min(self.sink, n))
        return len(first) + len(range(max(oldest, self.sink, n - self.recent), n))

    def _hidden(self, where: Where) -> Float[Tensor, "batch query key"] | None:
        """−∞ at keys that are dropped, 0 at others; None where no row is limited."""
        assert where.keys is not None
        queries, keys = where.positions[:, :, None], where.keys[:, None, :]
        hidden = (keys >= self.sink) & (keys <= queries - self.recent)
        if not self.prefill:
            if where.lengths is None:
                raise PlanError(
                    "prefill=False needs the prompt's length: run the model through its trace, logits or generate"
                )
            generated = where.positions >= where.lengths.to(where.positions.device)[:, None]
            if where.positions.shape[1] > 1 and not bool(generated.any()):
                return None
            hidden &= generated[:, :, None]
        none = torch.zeros(hidden.shape, device=hidden.device)
        return none.masked_fill(hidden, -torch.inf)


def _group(layer: LayerSpec) -> int:
    return layer.n_heads // layer.n_kv_heads
