"""The QK and OV circuit of every head (Elhage et al. 2021), from its weights, as factored matrices.

A layer reads the stream x through a norm, y = s · gain ∘ (x − c·mean x) + bias, whose scale s > 0 depends on x and
whose rest does not. With u = s·x (:meth:`Circuits.reads`), all but s is linear and is folded into the matrices:

    q_i · k_j  =  [u_i, 1] · Ω(i − j) · [u_j, 1]ᵀ                             (:meth:`Circuits.augmented_qk`)
    what head h adds to the stream at i  =  Σ_j A_ij (u_j · W_OV + bias)      (:meth:`Circuits.ov`, ``ov_bias``)

These are identities, held against real forward passes by the tests, where nothing but s depends on x. What else does is
again a positive number per token, and is left out of the matrices as s is: the scale of a norm on q and k (Qwen 3,
Gemma 3, OLMo 2; its gain is folded), that of a norm between attention and stream (Gemma 2 and 3, OLMo 2, GLM-4; its
gain is folded into W_O), and Llama 4's temperature of queries. So directions are right everywhere, and sizes but for
these.

RoPE turns queries against keys, so that Ω depends on the distance i − j and a W_QK without a distance has no meaning:
name one, several to average over, or ``"mean"``. Learned positions and relative biases are no part of Ω: learned
positions are part of x, and a relative bias is added to the scores.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headlab.attention import keep, plain_token, rope_pairs
from headlab.attention.input_norms import input_norms
from headlab.errors import HeadError, PlanError, UnsupportedError
from headlab.model import Model
from headlab.models.stream_norm import FrozenNorm, frozen
from headlab.parameters.factored import FactoredMatrix
from headlab.parameters.qk_norms import HeadNorm, head_norm, normed_heads
from headlab.parameters.rotation import Distance, Rotation

#: The least cosine between a query as weights give it and as the seam sees it.
_COSINE = 1 - 1e-3
#: A factor on rotated dimensions counts where it is further from 1 than rounding takes it.
_SIZE = 1e-2
_LENGTH = 8


class Circuits:
    """Factored W_QK and W_OV of a model's heads; made by :func:`circuits`.

    Attributes:
        model: The model.
        dtype: Type of the factors.
        fold: Whether norms are folded in; without, matrices are the bare weights.
    """

    def __init__(self, model: Model, dtype: torch.dtype, fold: bool) -> None:
        self.model = model
        self.dtype = dtype
        self.fold = fold
        with model.plain():  # weights are what they are under any edit
            self._norms = input_norms(model)
        #: How layers rotate; None where one does in a way that cannot be made out.
        self._rotations: dict[int, Rotation | None] = {}
        self._faults: dict[int, str] = {}
        with model.plain():
            self._look()

    @property
    def n_layers(self) -> int:
        """Attention layers."""
        return self.model.spec.n_layers

    # -- the matrices ------------------------------------------------------------------------------------------------

    def ov(self, layer: int) -> FactoredMatrix:
        """W_OV = W_V · W_O of a layer's heads, [n_heads, d_model, d_model], acting from the right.

        ``u @ W_OV[h]`` is what the head adds to the stream at a query that attends to this token alone, biases aside.

        Raises:
            HeadError: There is no such layer.
            UnsupportedError: The weights cannot be read.
        """
        self._check(layer)
        weights = self.model.weights
        value = self._expand(layer, self._through_norm(layer, weights.W_V(layer), self.fold))
        return FactoredMatrix(value, self._written(layer, weights.W_O(layer).to(value)))

    def ov_bias(self, layer: int) -> Float[Tensor, "n_heads d_model"]:
        """What each head adds whatever it attends to: the biases of the norm and of the values; b_O is the layer's.

        Raises:
            HeadError: There is no such layer.
            UnsupportedError: The weights cannot be read.
        """
        self._check(layer)
        weights = self.model.weights
        W_V = weights.W_V(layer).to(self.dtype)
        value = self._expand(layer, self._bias(layer, W_V, weights.b_V(layer), self.fold))
        return self._written(layer, value[:, None] @ weights.W_O(layer).to(value))[:, 0]

    def qk(self, layer: int, distance: Distance = None) -> FactoredMatrix:
        """W_QK = W_Q · W_Kᵀ of a layer's heads, [n_heads, d_model, d_model]: ``u_i @ W_QK[h] @ u_jᵀ`` is q_i · k_j
        without biases, before scaling, soft cap and mask.

        Args:
            layer: The layer.
            distance: How many tokens the key lies before the query. Layers that do not rotate ignore it.

        Raises:
            HeadError: There is no such layer.
            PlanError: The layer rotates q and k, and no distance is given.
            UnsupportedError: The weights, or how they are rotated, cannot be read.
        """
        query, key = self._query_and_key(layer, distance)
        return FactoredMatrix(query[:, :-1], key[:, :-1].mT)

    def augmented_qk(self, layer: int, distance: Distance = None) -> FactoredMatrix:
        """Ω = W_QK with biases, [n_heads, d_model + 1, d_model + 1], for streams with a 1 put last (Franco and
        Crovella 2024); arguments and errors as :meth:`qk`.
        """
        query, key = self._query_and_key(layer, distance)
        return FactoredMatrix(query, key.mT)

    # -- how streams enter -------------------------------------------------------------------------------------------

    def reads(self, layer: int, x: Float[Tensor, "*row d_model"]) -> Float[Tensor, "*row d_model"]:
        """u = s·x: the stream before a layer times the scale of the norm the layer reads it through.

        Raises:
            HeadError: There is no such layer.
            UnsupportedError: That norm is neither a LayerNorm nor an RMSNorm.
        """
        return x * self.input_norm(layer, x).scale

    def input_norm(self, layer: int, x: Float[Tensor, "*row d_model"]) -> FrozenNorm:
        """The norm a layer reads the stream through, its scale frozen at streams x; the identity where there is none.

        Raises:
            HeadError: There is no such layer.
            UnsupportedError: It is neither a LayerNorm nor an RMSNorm.
        """
        self._check(layer)
        return frozen(self._norms[layer], x, f"the norm before layer {layer}")

    @torch.no_grad()
    def queries_and_keys(
        self, layer: int, x: Float[Tensor, "*row d_model"]
    ) -> tuple[Float[Tensor, "*row n_heads d_head"], Float[Tensor, "*row n_heads d_head"]]:
        """q and k that streams x give, sizes included, before rotation, both per query head.

        Raises:
            HeadError: There is no such layer.
            UnsupportedError: The weights cannot be read.
        """
        maps = self._maps(layer, fold=True, qk_norm=False)
        u = self.reads(layer, x.to(self.dtype))
        u = torch.cat([u, torch.ones_like(u[..., :1])], -1)
        made = []
        for full, norm in zip(maps, self.model.weights.qk_norm(layer), strict=True):
            heads = torch.einsum("...m,hmd->...hd", u, full)
            made.append(heads if norm is None else normed_heads(norm, heads))
        return self._expand(layer, made[0], -2), self._expand(layer, made[1], -2)

    def turned(
        self, layer: int, q: Float[Tensor, "*any d_head"], distance: Distance
    ) -> Float[Tensor, "*any d_head"]:
        """Queries turned by a distance, so that their products with unrotated keys are those at that distance.

        Raises:
            HeadError: There is no such layer.
            PlanError: The layer rotates, and the distance is none.
            UnsupportedError: How the layer rotates cannot be made out.
        """
        if not self.rotates(layer):
            return q
        rotation = self._rotations[layer]
        if rotation is None:
            raise UnsupportedError(
                f"how layer {layer} of {self.model.name} rotates its queries and keys cannot be made out"
            )
        if distance is None:
            raise PlanError(
                f"layer {layer} of {self.model.name} turns queries and keys by position, so its W_QK has no meaning "
                "without a distance: give distance=0, another number of tokens, several, or 'mean'"
            )
        if self.model.spec.layers[layer].causal and rotation.distances(distance).min() < 0:
            raise PlanError(
                f"distance={distance!r} has the key behind the query, which a causal layer never sees; count from 0"
            )
        return rotation.turn(q, distance)

    def products(
        self, layer: int, q: Float[Tensor, "*any d_head"], k: Float[Tensor, "*any d_head"], n: int
    ) -> Float[Tensor, "*any n"]:
        """q · k at distances 0 … n − 1, of queries and keys before rotation; errors as :meth:`turned`."""
        self.turned(layer, q, 0)
        rotation = self._rotations.get(layer)
        if rotation is None:
            return (q * k).sum(-1, keepdim=True).expand(*q.shape[:-1], n)
        return rotation.by_distance(q, k, n)

    def rotates(self, layer: int) -> bool:
        """Whether the layer turns q and k by position (RoPE)."""
        self._check(layer)
        return layer in self._rotations

    def qk_normed(self, layer: int) -> bool:
        """Whether a norm sits between the layer's projections and the seam, so that sizes of scores are not Ω's."""
        self._check(layer)
        return self.model.weights.qk_norm(layer) != (None, None)

    def scaling(self, layer: int) -> float:
        """The factor on q · k."""
        self._check(layer)
        return self.model.spec.layers[layer].scaling

    # -- parts -------------------------------------------------------------------------------------------------------

    def _query_and_key(
        self, layer: int, distance: Distance
    ) -> tuple[Float[Tensor, "n_heads d_in d_head"], Float[Tensor, "n_heads d_in d_head"]]:
        """Maps from [u, 1] to q, rotated by the distance, and to k, both per query head."""
        self._check(layer)
        if self.model.spec.layers[layer].stack == "cross":
            raise UnsupportedError(
                f"layer {layer} of {self.model.name} attends from one stack to another, so its queries and keys read "
                "different streams and no one matrix scores them"
            )
        query, key = self._maps(layer, self.fold, qk_norm=self.fold)
        if layer in self._faults:
            raise UnsupportedError(self._faults[layer])
        return self.turned(layer, query, distance), self._expand(layer, key)

    def _maps(
        self, layer: int, fold: bool, qk_norm: bool
    ) -> tuple[Float[Tensor, "n_heads d_in d_head"], Float[Tensor, "n_kv_heads d_in d_head"]]:
        """Maps from [u, 1] to q and k before any rotation; of the norms, those asked for are folded in."""
        self._check(layer)
        weights, facts = self.model.weights, self.model.spec.layers[layer]
        norms = weights.qk_norm(layer) if qk_norm else (None, None)
        made = []
        for matrix, bias, norm, n in (
            (weights.W_Q(layer), weights.b_Q(layer), norms[0], facts.n_heads),
            (weights.W_K(layer), weights.b_K(layer), norms[1], facts.n_kv_heads),
        ):
            full = torch.cat(
                [
                    self._through_norm(layer, matrix, fold),
                    self._bias(layer, matrix.to(self.dtype), bias, fold)[:, None],
                ],
                1,
            )
            if norm is not None:
                full = self._head_norm(layer, norm, n).fold(full)
            made.append(full)
        return made[0], made[1]

    def _head_norm(self, layer: int, norm: nn.Module, n: int) -> HeadNorm:
        width = self.model.spec.layers[layer].d_head
        return head_norm(norm, n, width, self.dtype, f"layer {layer} of {self.model.name}")

    def _through_norm(
        self, layer: int, matrix: Float[Tensor, "head d_model width"], fold: bool
    ) -> Float[Tensor, "head d_model width"]:
        """The norm's linear part, but for its scale, before a matrix."""
        matrix = matrix.to(self.dtype)
        if not fold:
            return matrix
        norm = self._unit(layer)
        matrix = norm.gain[:, None] * matrix
        return matrix - matrix.mean(1, keepdim=True) if norm.centred else matrix

    def _bias(
        self,
        layer: int,
        matrix: Float[Tensor, "head d_model width"],
        own: Tensor | None,
        fold: bool,
    ) -> Float[Tensor, "head width"]:
        """What a projection gives for a stream of zeros."""
        bias = torch.zeros_like(matrix[:, 0]) if own is None else own.to(matrix)
        return bias + self._unit(layer).bias @ matrix if fold else bias

    def _written(
        self, layer: int, output: Float[Tensor, "n_heads width d_model"]
    ) -> Float[Tensor, "n_heads width d_model"]:
        """Rows as they reach the stream: a norm behind attention, but for its scale, and the residual multiplier."""
        blocks, facts = self.model.blocks, self.model.spec.layers[layer]
        if self.fold and facts.stack == "decoder" and self._decoder_only:
            norm = blocks.attention_norm(layer)
            output = frozen(norm, output[0, :1], f"the norm behind layer {layer}").unscaled(output)
        return output * blocks.residual_multiplier

    def _unit(self, layer: int) -> FrozenNorm:
        like = torch.ones(1, self.model.spec.d_model, dtype=self.dtype, device=self.model.device)
        like[0, 0] = 2.0  # a LayerNorm has no scale at equal entries
        return self.input_norm(layer, like)

    def _expand(self, layer: int, groups: Tensor, dim: int = 0) -> Tensor:
        """Per query head what is per key/value head."""
        times = self.model.spec.layers[layer].n_heads // groups.shape[dim]
        return groups if times == 1 else groups.repeat_interleave(times, dim)

    @property
    def _decoder_only(self) -> bool:
        return all(facts.stack == "decoder" for facts in self.model.spec.layers)

    def __repr__(self) -> str:
        spec = self.model.spec
        turning = f", {len(self._rotations)} of them rotating" if self._rotations else ""
        folded = "norms folded in" if self.fold else "bare weights"
        return f"Circuits of {spec.name}: {spec.n_layers} layers{turning}, {folded}"

    def _check(self, layer: int) -> None:
        if isinstance(layer, bool) or not hasattr(layer, "__index__"):
            raise HeadError(
                f"{layer!r:.60} is no layer; give its number, and pick the head from the result, as in ov(18)[6]"
            )
        if not 0 <= layer < self.n_layers:
            raise HeadError(
                f"layer {layer} does not exist: {self.model.name} has layers 0–{self.n_layers - 1}"
            )

    # -- what is measured once ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Find out in one run which layers rotate and by what factor, and hold the maps to what the seam sees.

        The run repeats one token, so that only rotation makes keys differ; at its first position rotation does nothing.
        """
        spec = self.model.spec
        length = min(_LENGTH, spec.max_context or _LENGTH)
        plan = [keep.tensors("q", "k")]
        if self._decoder_only:
            plan.append(keep.tensors("resid_pre"))
        ids = torch.full((1, length), plain_token(self.model))
        encoder_decoder = self.model.module.config.is_encoder_decoder
        trace = self.model.trace(
            ids, keep=plan, logits="none", decoder=ids if encoder_decoder else None
        )
        pairs = rope_pairs(self.model)
        for layer, facts in enumerate(spec.layers):
            k = trace.tensor("k", layer)[0].to(self.dtype)
            if layer in pairs:
                reach = min((n for n in (facts.window, spec.max_context) if n), default=length)
                self._rotations[layer] = Rotation(pairs[layer], torch.ones_like(k[0, 0]), reach)
            elif spec.positions == "rope" and not _still(k):
                self._rotations[layer] = None
            if not self._decoder_only or facts.stack == "cross":
                continue
            x = trace.tensor("resid_pre", layer)[0, :1].to(self.dtype)
            self._hold(layer, x, trace.tensor("q", layer)[0, 0].to(x), k[0])

    def _hold(
        self,
        layer: int,
        x: Float[Tensor, "1 d_model"],
        q: Float[Tensor, "n_heads d_head"],
        k: Float[Tensor, "n_kv_heads d_head"],
    ) -> None:
        """Compare q and k of a first position with what weights make of its stream."""
        try:
            ours_q, ours_k = (part[0] for part in self.queries_and_keys(layer, x))
        except UnsupportedError:
            return  # whoever asks for this layer's matrices is told
        k = self._expand(layer, k)
        if (rotation := self._rotations.get(layer)) is not None:
            factor = _ratio(k[:, rotation.rotated], ours_k[:, rotation.rotated])
            if abs(factor - 1) > _SIZE:  # YaRN
                scaled = torch.where(rotation.rotated, factor, 1.0).to(k)
                self._rotations[layer] = replace(rotation, factor=scaled)
                ours_q, ours_k = ours_q * scaled, ours_k * scaled
        for name, ours, seen in (("queries", ours_q, q), ("keys", ours_k, k)):
            # Of a pruned head both are zero; NaN is told by whoever computes with it.
            alike = torch.cosine_similarity(ours, seen, dim=-1) >= _COSINE
            nothing = (ours.norm(dim=-1) == 0) & (seen.norm(dim=-1) == 0)
            unknown = ours.isnan().any(-1) | seen.isnan().any(-1)
            if not bool((alike | nothing | unknown).all()):
                self._faults[layer] = (
                    f"{name} of layer {layer} of {self.model.name} are not what its projections and norms make of the "
                    "stream, so its QK circuit cannot be read from them"
                )


def _ratio(seen: Tensor, ours: Tensor) -> float:
    """The factor between two sets of vectors that point the same way."""
    return float((seen * ours).sum() / (ours * ours).sum().clamp(min=1e-30))


def _still(k: Float[Tensor, "position head d_head"]) -> bool:
    return bool((k - k[:1]).norm() < 0.05 * k.norm())


def circuits(model: Model, *, dtype: torch.dtype = torch.float32, fold: bool = True) -> Circuits:
    """The QK and OV circuits of a model's heads.

    Forward passes of a few tokens find the norms and the rotation; everything else is weights.

    Args:
        model: The model.
        dtype: Type to compute in.
        fold: Whether to fold norms into the matrices; without, they are the bare weights, as MAPS wants them.
    """
    return Circuits(model, dtype, fold)


__all__ = ["Circuits", "Distance", "circuits"]
