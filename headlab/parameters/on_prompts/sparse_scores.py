"""A head's score on a prompt as a sum over singular directions, and each direction's term as a sum over what earlier
parts of the model wrote (Franco & Crovella 2024, Sparse attention decomposition).

With Ω = Σ_k s_k u_k v_kᵀ at the distance of query i and key j (:meth:`Circuits.augmented_qk`), x~ = [x · scale, 1] and
x the stream before the layer, the score before scaling, soft cap and mask is

    q_i · k_j = Σ_k s_k (x~_i · u_k)(v_k · x~_j).

The **selected** terms are the fewest of the largest whose sum exceeds ``threshold`` times the score, or reaches it but
for rounding; at the paper's 1.0 the rest sums to nothing or less. A head **fires** at (i, j) where A ≥ 0.5, the score
is at least 0 and j is not the first token.

x is itself a sum, of the embedding, every earlier head, attention bias and MLP, and with the norm's scale held every
part c adds to the selected terms

    destination:  Σ_k s_k (scale_i c · u_k)(v_k · x~_j)          source:  Σ_k s_k (x~_i · u_k)(v_k · c scale_j),

so that the parts, and the constant 1 as a part of its own, sum to the selected terms. The paper's figure for the
destination is Σ_k sign(x~_i · u_k) √s_k u_k · [c, 1] / ln_scale_i, here ``projection``: it adds the constant to every
head, which would count it many times over; we do not.

**RoPE.** Ω, its singular vectors and so the terms depend on the distance; the paper's model has learned positions.
Where singular values are equal, their directions are any basis of one subspace, and single terms mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.attention import Head, keep
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.models.stream_norm import frozen
from headlab.parameters.circuits import Circuits

if TYPE_CHECKING:
    from headlab.model import Prompt

#: Allowed gap between a sum of parts and the model's own value, as a share of 1 + Σ |parts|.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
#: Bytes that kept singular vectors may take.
_KEPT = 1 << 28
SIDES = ("destination", "source")


@dataclass(frozen=True)
class Firing:
    """A head that attends from one position to another.

    Attributes:
        head: The head.
        destination: Position of the query.
        source: Position of the key.
        attention: A[destination, source].
        score: q · k before scaling, soft cap and mask.
    """

    head: Head
    destination: int
    source: int
    attention: float
    score: float


@dataclass(frozen=True, eq=False, repr=False)
class Terms:
    """A score as a sum over singular directions of Ω.

    Attributes:
        firing: Where.
        terms: Each direction's term, largest singular value first; they sum to the score.
        singular: The singular values.
        u: Query directions, the constant's entry last.
        v: Key directions.
        left: x~_i · u_k.
        right: v_k · x~_j.
    """

    firing: Firing
    terms: Float[Tensor, " rank"]
    singular: Float[Tensor, " rank"]
    u: Float[Tensor, "d_model_1 rank"]
    v: Float[Tensor, "d_model_1 rank"]
    left: Float[Tensor, " rank"]
    right: Float[Tensor, " rank"]

    def selected(self, threshold: float = 1.0) -> Int[np.ndarray, " n"]:
        """The fewest terms, largest first, whose sum reaches *threshold* times the score; all where none do.

        Raises:
            PlanError: The score is negative, or threshold is not above 0.
        """
        return sparse_set(self.terms.double().cpu().numpy(), threshold)

    def basis(self, chosen: Int[np.ndarray, " n"], side: str) -> Float[Tensor, "d_model n"]:
        """Orthonormal basis of the stream's subspace that chosen directions read at a side; it leaves out the constant.

        Raises:
            PlanError: There is no such side.
        """
        directions = self._side(side)[0][:-1, torch.from_numpy(np.ascontiguousarray(chosen))]
        u, s, _ = torch.linalg.svd(directions, full_matrices=False)
        return u[:, s > 1e-5 * s.max().clamp(min=1e-30)]

    def weights(self, side: str) -> Float[Tensor, "d_model_1 rank"]:
        """What a normed stream at one side is multiplied with for each term: s_k (v_k · x~_j) u_k, or the other way."""
        directions, _, other = self._side(side)
        return directions * (self.singular * other)

    def projections(self, side: str) -> Float[Tensor, "d_model_1 rank"]:
        """The paper's: sign(x~_i · u_k) √s_k u_k."""
        directions, own, _ = self._side(side)
        return directions * (self.singular.sqrt() * own.sign())

    def _side(self, side: str) -> tuple[Tensor, Tensor, Tensor]:
        if side not in SIDES:
            raise PlanError(f"side={side!r} must be 'destination' or 'source'")
        if side == "destination":
            return self.u, self.left, self.right
        return self.v, self.right, self.left

    def __repr__(self) -> str:
        at = self.firing
        return (
            f"Terms of {at.head} from {at.destination} to {at.source}: score {at.score:.3g} (A = {at.attention:.2f}) "
            f"over {len(self.terms)} directions, largest {float(self.terms.max()):.3g}"
        )


def sparse_set(terms: Float[np.ndarray, " rank"], threshold: float = 1.0) -> Int[np.ndarray, " n"]:
    """The fewest terms, largest first, whose sum reaches *threshold* times the sum of all; all where none do.

    Raises:
        PlanError: The sum is negative, or threshold is not above 0.
    """
    if not threshold > 0:
        raise PlanError(f"threshold={threshold!r} must be above 0")
    total = float(terms.sum())
    if total < 0:
        raise PlanError(
            f"the score, {total:.3g}, is negative, so no set of terms makes it up; heads that fire have none below 0"
        )
    order = np.argsort(-terms, kind="stable")
    # Reached but for rounding counts as exceeded: directions of a singular value of 0 have terms of rounding alone.
    above = np.cumsum(terms[order]) >= threshold * total - 1e-6 * np.abs(terms).sum()
    return order[: int(above.argmax()) + 1 if above.any() else len(terms)]


class Directions:
    """Singular directions of Ω per head and distance, kept for the next prompt.

    A rotation mixes the columns of a head's query map only, so one basis of what the map reads serves all distances,
    and what is kept per distance is as small as the head.

    Args:
        made: The model's circuits.
    """

    def __init__(self, made: Circuits) -> None:
        rank, d = made.model.spec.d_head, made.model.spec.d_model + 1
        width = torch.finfo(made.dtype).bits // 8
        self._made = made
        self._bases = lru_cache(max(8, _KEPT // (2 * rank * d * width)))(self._find_bases)
        self._within = lru_cache(max(8, _KEPT // (2 * rank**2 * width)))(self._decompose)

    def of(self, head: Head, distance: int) -> tuple[Tensor, Tensor, Tensor]:
        """u [d_model + 1, rank], singular values [rank] and v [d_model + 1, rank]."""
        queries, keys = self._bases(head)
        u, s, v = self._within(head, distance)
        return queries @ u, s, keys @ v

    def _find_bases(self, head: Head) -> tuple[Tensor, Tensor]:
        omega = self._made.augmented_qk(head.layer, 0)[head.head]
        return torch.linalg.qr(omega.left).Q, torch.linalg.qr(omega.right.mT).Q

    def _decompose(self, head: Head, distance: int) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = self._bases(head)
        omega = self._made.augmented_qk(head.layer, distance)[head.head]
        u, s, vh = torch.linalg.svd((queries.mT @ omega.left) @ (omega.right @ keys))
        return u, s, vh.mT


class PromptScores:
    """One prompt's run, ready to be split; holds the patterns of all heads, O(n_heads · n²).

    Args:
        made: The model's circuits, with norms folded.
        prompt: One prompt.
        directions: Singular directions shared with the runs of other prompts.

    Raises:
        PlanError: Circuits are not folded, or edits are in force.
        PromptError: There is more than one prompt.
        UnsupportedError: The model is no decoder-only model.
    """

    def __init__(
        self, made: Circuits, prompt: Prompt, directions: Directions | None = None
    ) -> None:
        model, spec = made.model, made.model.spec
        if not made.fold:
            raise PlanError(
                "scores can only be split with norms folded in: circuits(model, fold=True)"
            )
        if model.edited:
            raise PlanError("edits are in force on the model; leave the model.edit block first")
        if any(facts.stack != "decoder" for facts in spec.layers):
            raise UnsupportedError(
                f"scores are split into what earlier parts wrote in decoder-only models; {model.name} ({spec.family}) "
                "is none"
            )
        ids = model.tokens(prompt)
        if len(ids) != 1:
            raise PromptError(f"{len(ids)} prompts were given where one is split at a time")
        self.made, self.model, self.ids = made, model, ids
        self.n = ids.shape[1]
        plan = keep.tensors("q", "k", "z", "pattern", "resid_pre", "mlp_out")
        self.trace = model.trace(ids, keep=plan, logits="none")
        self.directions = directions or Directions(made)

    def firing(self, head: Head, destination: int, source: int) -> Firing:
        """A head's attention and score at a destination and a source; negative positions count from the end.

        Raises:
            PlanError: A position does not exist, or the source comes after the destination.
        """
        i, j = (at + self.n if at < 0 else at for at in (destination, source))
        if not (0 <= i < self.n and 0 <= j <= i):
            raise PlanError(
                f"no query at {destination} sees a key at {source}: the prompt has {self.n} tokens, and keys come first"
            )
        q, k = (self.trace.of_head(name, head)[0, at].double() for name, at in (("q", i), ("k", j)))
        attention = float(self.trace.of_head("pattern", head)[0, i, j])
        return Firing(head, i, j, attention, float(q @ k))

    def firings(
        self, heads: Sequence[Head], destination: int | None = None, least_attention: float = 0.5
    ) -> list[Firing]:
        """Where heads fire, at one destination or at all."""
        rows = slice(None) if destination is None else [destination % self.n]
        places = np.arange(self.n)[rows]
        found = []
        for head in heads:
            pattern = self.trace.of_head("pattern", head)[0][rows]
            for row, source in (pattern >= least_attention).nonzero().tolist():
                if source == 0:
                    continue
                firing = self.firing(head, int(places[row]), source)
                if firing.score >= 0:
                    found.append(firing)
        return found

    def most_attended(
        self, head: Head, destination: int | None = None
    ) -> tuple[int, int, float, float]:
        """Destination, source, attention and score where a head attends most to a token that is not the first.

        −1 and NaN where there is no such token.
        """
        rows = slice(None) if destination is None else [destination % self.n]
        places = np.arange(self.n)[rows]
        pattern = self.trace.of_head("pattern", head)[0][rows][:, 1:]
        if not pattern.numel() or not bool((pattern > 0).any()):
            return -1, -1, float("nan"), float("nan")
        row, source = divmod(int(pattern.argmax()), pattern.shape[1])
        found = self.firing(head, int(places[row]), source + 1)
        return found.destination, found.source, found.attention, found.score

    @torch.no_grad()
    def terms(self, firing: Firing) -> Terms:
        """A score's terms.

        Raises:
            UnsupportedError: The weights do not give the scores the model has, as under a norm on q and k.
        """
        head, layer = firing.head, firing.head.layer
        if self.made.qk_normed(layer):
            raise UnsupportedError(
                f"layer {layer} of {self.model.name} norms q and k by their own size, so its scores are no sum over "
                "directions of one matrix"
            )
        distance = firing.destination - firing.source if self.made.rotates(layer) else 0
        u, s, v = self.directions.of(head, distance)
        left = self.stream(layer, firing.destination) @ u
        right = self.stream(layer, firing.source) @ v
        terms = s * left * right
        self.agree(
            terms.sum(),
            terms,
            firing.score,
            f"the scores of layer {layer} are not those of its W_QK",
        )
        return Terms(firing, terms, s, u, v, left, right)

    def stream(self, layer: int, position: int) -> Float[Tensor, " d_model_1"]:
        """x~: the stream before a layer times the norm's scale, and a 1."""
        x = self.trace.tensor("resid_pre", layer)[0, position].to(self.made.dtype)
        u = self.made.reads(layer, x[None])[0]
        return torch.cat([u, torch.ones_like(u[:1])])

    def scale(self, layer: int, position: int) -> Float[Tensor, ""]:
        """The scale of the norm a layer reads through."""
        x = self.trace.tensor("resid_pre", layer)[0, position].to(self.made.dtype)
        return self.made.input_norm(layer, x[None]).scale[0, 0]

    @torch.no_grad()
    def written(self, layer: int, position: int) -> tuple[list[tuple[str, int, int]], Tensor]:
        """What the stream before a layer is the sum of at a position: (site, layer, head) of each part, −1 for none,
        and the parts, [part, d_model].

        Raises:
            UnsupportedError: The parts do not add up to the stream.
        """
        names: list[tuple[str, int, int]] = [("embedding", -1, -1)]
        parts = [self._at("resid_pre", 0, position)[None]]
        for earlier in range(layer):
            heads, bias = self.heads(earlier, position)
            names += [("head", earlier, head) for head in range(len(heads))]
            names += [("attention_bias", earlier, -1), ("mlp", earlier, -1)]
            parts += [heads, bias[None], self._at("mlp_out", earlier, position)[None]]
        every = torch.cat(parts)
        gap = every.sum(0) - self._at("resid_pre", layer, position)
        size = 1 + every.norm(dim=1).sum()
        if not float(gap.norm() / size) <= self._tolerance:
            raise UnsupportedError(
                f"what attention and MLPs of {self.model.name} ({self.model.spec.family}) give does not add up to its "
                f"stream (off by {float(gap.norm() / size):.1g} of its size)"
            )
        return names, every

    @torch.no_grad()
    def heads(
        self, layer: int, position: int
    ) -> tuple[Float[Tensor, "n_heads d_model"], Float[Tensor, " d_model"]]:
        """What each head adds to the stream at a position, norm behind attention held still, and what biases add."""
        weights, blocks = self.model.weights, self.model.blocks
        z = self._at("z", layer, position)
        results = torch.einsum("hd,hdm->hm", z, weights.W_O(layer).to(z))
        own = weights.b_O(layer)
        bias = torch.zeros_like(results[0]) if own is None else own.to(results)
        norm = blocks.attention_norm(layer)
        if norm is not None:
            held = frozen(norm, (results.sum(0) + bias)[None], f"the norm behind layer {layer}")
            results, bias = held.linear(results), held.apply(bias[None])[0]
        return results * blocks.residual_multiplier, bias * blocks.residual_multiplier

    @torch.no_grad()
    def elsewhere(
        self, layer: int, towards: Float[Tensor, " d_model"], position: int
    ) -> Float[Tensor, " n_heads"]:
        """Each head's result at the other positions, the first left out, along a direction: the mean; NaN for none.

        A norm behind attention is held at the position itself.
        """
        z = self.trace.tensor("z", layer)[0].to(self.made.dtype)
        others = torch.ones(self.n, dtype=torch.bool, device=z.device)
        others[0] = others[position] = False
        results = torch.einsum("hd,hdm->hm", z[others].mean(0), self.model.weights.W_O(layer).to(z))
        norm = self.model.blocks.attention_norm(layer)
        if norm is not None:
            own, W_O = self.model.weights.b_O(layer), self.model.weights.W_O(layer).to(z)
            here = torch.einsum("hd,hdm->m", z[position], W_O)
            here = here if own is None else here + own.to(here)
            results = frozen(norm, here[None], f"the norm behind layer {layer}").linear(results)
        return results @ towards * self.model.blocks.residual_multiplier

    def agree(self, found: Tensor, parts: Tensor, wanted: float, what: str) -> None:
        """Refuse a sum that differs from the model's own value by more than rounding.

        Raises:
            UnsupportedError: It does.
        """
        gap = abs(float(found) - wanted) / (1 + float(parts.abs().sum()))
        if not gap <= self._tolerance:
            raise UnsupportedError(
                f"{self.model.name} ({self.model.spec.family}) cannot be split so: {what} (off by {gap:.1g} of their "
                "size)"
            )

    def _at(self, name: str, layer: int, position: int) -> Tensor:
        return self.trace.tensor(name, layer)[0, position].to(self.made.dtype)

    @property
    def _tolerance(self) -> float:
        exact = self.made.dtype == torch.float64 and self.model.dtype == torch.float64
        return _TOLERANCE[torch.float64 if exact else torch.float32]


__all__ = ["SIDES", "Firing", "PromptScores", "Terms", "sparse_set"]
