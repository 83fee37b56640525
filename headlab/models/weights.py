"""Per-head views of W_Q, W_K, W_V and W_O, and the embedding and unembedding around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headlab.errors import HeadError, UnsupportedError
from headlab.models import families
from headlab.models.families import InputLayout, Slot
from headlab.models.spec import LayerSpec, ModelSpec


class HeadWeights:
    """A model's weights, split by head.

    Every matrix acts from the right: ``x @ W_Q(layer)[head] + b_Q(layer)[head]`` is the head's
    query before QK-norm and rotation. Matrices are views of the module's parameters, detached from
    autograd, so reading one costs nothing and an edit of the module shows; only CodeGen's q, k and
    v, whose heads are scattered over shards, and queries a family scales are copies. Keys and
    values are per key/value head: head *h* uses row ``h // (n_heads // n_kv_heads)``.

    Reading a matrix raises :class:`~headlab.errors.UnsupportedError` with the reason where there is
    none to read: multi-head latent attention, quantised or offloaded weights, an unmerged adapter,
    an unfamiliar layout.

    Args:
        module: The model.
        attention_modules: Its attention modules, one per layer of *spec*.
        spec: Its measured shapes.
    """

    def __init__(
        self, module: PreTrainedModel, attention_modules: Sequence[nn.Module], spec: ModelSpec
    ) -> None:
        self.module = module
        self.attention_modules = tuple(attention_modules)
        self.spec = spec
        self._paths = {part: path for path, part in module.named_modules()}

    def W_Q(self, layer: int) -> Float[Tensor, "n_heads d_model d_head"]:
        """Query matrices. Families that scale q before the seam (OPT) have the scale in here."""
        facts = self._facts(layer)
        matrix = self._heads(layer, self._layout(layer).query, "W_Q", facts.n_heads, facts.d_head)
        return self._scaled_query(layer, matrix)

    def W_K(self, layer: int) -> Float[Tensor, "n_kv_heads d_model d_head"]:
        """Key matrices, one per key/value head."""
        facts = self._facts(layer)
        return self._heads(layer, self._layout(layer).key, "W_K", facts.n_kv_heads, facts.d_head)

    def W_V(self, layer: int) -> Float[Tensor, "n_kv_heads d_model d_value"]:
        """Value matrices, one per key/value head."""
        facts = self._facts(layer)
        return self._heads(layer, self._layout(layer).value, "W_V", facts.n_kv_heads, facts.d_value)

    def W_O(self, layer: int) -> Float[Tensor, "n_heads d_value d_model"]:
        """Output matrices: the layer writes ``sum over h of z[h] @ W_O(layer)[h]``, plus b_O.

        z is what enters the output projection. In a few families (Qwen3-Next, BitNet) that is the
        seam's z after a gate or norm.
        """
        facts = self._facts(layer)
        matrix = self._matrix(layer, self.output_projection(layer), "W_O")
        if matrix.shape[0] != facts.n_heads * facts.d_value:
            raise self._unreadable(
                layer,
                "W_O",
                f"its projection takes {matrix.shape[0]} numbers where {facts.n_heads} heads of "
                f"{facts.d_value} give {facts.n_heads * facts.d_value}",
            )
        return matrix.unflatten(0, (facts.n_heads, facts.d_value))

    def b_Q(self, layer: int) -> Float[Tensor, "n_heads d_head"] | None:
        """Query biases, or None."""
        facts = self._facts(layer)
        bias = self._biases(layer, self._layout(layer).query, "b_Q", facts.n_heads, facts.d_head)
        return None if bias is None else self._scaled_query(layer, bias)

    def b_K(self, layer: int) -> Float[Tensor, "n_kv_heads d_head"] | None:
        """Key biases, or None."""
        facts = self._facts(layer)
        return self._biases(layer, self._layout(layer).key, "b_K", facts.n_kv_heads, facts.d_head)

    def b_V(self, layer: int) -> Float[Tensor, "n_kv_heads d_value"] | None:
        """Value biases, or None."""
        facts = self._facts(layer)
        slot = self._layout(layer).value
        return self._biases(layer, slot, "b_V", facts.n_kv_heads, facts.d_value)

    def b_O(self, layer: int) -> Float[Tensor, " d_model"] | None:
        """The output bias, which belongs to the layer and to no head, or None."""
        bias = getattr(self.output_projection(layer), "bias", None)
        return bias.detach() if isinstance(bias, Tensor) else None

    def output_projection(self, layer: int) -> nn.Module:
        """The linear map whose input is every head's z side by side, [..., n_heads · d_value].

        Raises:
            HeadError: The layer does not exist.
            UnsupportedError: The layer's attention has no output projection under a known name.
        """
        self._facts(layer)
        for path in families.OUTPUT_PROJECTIONS:
            if (found := self._find(layer, path)) is not None:
                return found
        raise self._unreadable(
            layer, "W_O", "its attention has no output projection under a name headlab knows"
        )

    def qk_norm(self, layer: int) -> tuple[nn.Module | None, nn.Module | None]:
        """The norms of q and k between projection and seam; None where there are none.

        Where there are, scores are not the bilinear form ``x W_Q W_Kᵀ x`` but that of normed q, k.
        """
        self._facts(layer)
        for query, key in families.QK_NORMS:
            found = self._find(layer, query), self._find(layer, key)
            if found != (None, None):
                return found
        return None, None

    @property
    def W_E(self) -> Float[Tensor, "n_vocab d_model"]:
        """The embedding's rows, before :attr:`embed_scale`."""
        return self._vocabulary(self.module.get_input_embeddings(), "W_E")

    @property
    def W_U(self) -> Float[Tensor, "d_model n_vocab"]:
        """The unembedding: logits are ``softcap(logit_scale · (final_norm(x) @ W_U + b_U))``.

        Masked language models put a small head of their own between the stream and W_U.
        """
        return self._vocabulary(self.module.get_output_embeddings(), "W_U").T

    @property
    def b_U(self) -> Float[Tensor, " n_vocab"] | None:
        """The bias of the logits, or None."""
        bias = getattr(self.module.get_output_embeddings(), "bias", None)
        if not isinstance(bias, Tensor):
            bias = getattr(self.module, "final_logits_bias", None)
        return bias.detach().reshape(-1) if isinstance(bias, Tensor) else None

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm before the unembedding, or None where the stream reaches it as it is."""
        for path in families.FINAL_NORMS:
            if (found := _part(self.module, path)) is not None:
                return found
        return None

    @property
    def logit_scale(self) -> float:
        """Factor on the logits (Cohere, Granite, T5), else 1."""
        factor = 1.0
        config = self._text_config()
        for field, rule in families.LOGIT_SCALES.items():
            if (value := getattr(config, field, None)) is not None:
                factor *= rule(value, config)
        return factor

    @property
    def logit_softcap(self) -> float | None:
        """Soft cap c on the logits, ``c·tanh(x/c)``, or None."""
        return getattr(self._text_config(), families.LOGIT_SOFTCAP, None)

    @property
    def embed_scale(self) -> float:
        """Factor between rows of :attr:`W_E` and the residual stream (Gemma, Granite), else 1."""
        embedding, factor = self.module.get_input_embeddings(), 1.0
        for name in families.EMBED_SCALES:
            if (value := getattr(embedding, name, None)) is not None:
                factor = float(value)
                break
        for field in families.EMBED_MULTIPLIERS:
            factor *= float(getattr(self._text_config(), field, None) or 1.0)
        return factor

    def _text_config(self) -> Any:
        return self.module.config.get_text_config(decoder=True)

    def _facts(self, layer: int) -> LayerSpec:
        if not 0 <= layer < len(self.spec.layers):
            raise HeadError(
                f"layer {layer} does not exist: {self.spec.name} has layers "
                f"0–{len(self.spec.layers) - 1}"
            )
        return self.spec.layers[layer]

    def _find(self, layer: int, path: str) -> nn.Module | None:
        """A part of the layer's attention module; ``../`` starts at the module's parent."""
        start = self.attention_modules[layer]
        if path.startswith("../"):
            above, _, _ = self._paths[start].rpartition(".")
            start, path = self.module.get_submodule(above), path.removeprefix("../")
        return _part(start, path)

    def _layout(self, layer: int) -> InputLayout:
        """The row of the table that describes the layer's q, k and v."""
        for marker, reason in families.NOT_LINEAR.items():
            if self._find(layer, marker) is not None:
                raise self._unreadable(layer, "W_Q, W_K and W_V", reason)
        types = {self.spec.family, self._text_config().model_type}
        for layout in families.INPUT_LAYOUTS:
            allowed = not layout.families or layout.families & types
            if allowed and all(self._find(layer, path) for path in layout.projections):
                return layout
        parts = ", ".join(name for name, _ in self.attention_modules[layer].named_children())
        raise self._unreadable(
            layer, "W_Q, W_K and W_V", f"headlab does not know how its parts ({parts}) are laid out"
        )

    def _heads(
        self, layer: int, slot: Slot, what: str, n: int, width: int
    ) -> Float[Tensor, "n d_model width"]:
        """One of q, k and v of a layer, split into *n* heads of *width*."""
        linear = self._find(layer, slot.projection)
        assert linear is not None  # _layout checked it
        matrix = self._matrix(layer, linear, what)
        return self._split(layer, slot, what, matrix, n, width).permute(1, 0, 2)

    def _biases(
        self, layer: int, slot: Slot, what: str, n: int, width: int
    ) -> Float[Tensor, "n width"] | None:
        bias = getattr(self._find(layer, slot.projection), "bias", None)
        if not isinstance(bias, Tensor):
            return None
        return self._split(layer, slot, what, bias.detach()[None], n, width)[0]

    def _split(
        self, layer: int, slot: Slot, what: str, matrix: Float[Tensor, "d out"], n: int, width: int
    ) -> Float[Tensor, "d n width"]:
        """Pick one share of a projection's outputs and split it into heads."""
        facts = self._facts(layer)
        keys = facts.n_kv_heads * facts.d_head, facts.n_kv_heads * facts.d_value
        queries = facts.n_heads * facts.d_head
        order = slot.order
        # Heads can only be interleaved with keys of their own: GPT-BigCode lays out multi-query
        # attention one after the other, and multi-head attention head by head.
        if order == "per_head" and facts.n_heads != facts.n_kv_heads:
            order = "qkv"
        shares = (n * width,) if order == "whole" else (queries, *keys)
        if matrix.shape[1] != sum(shares):
            raise self._unreadable(
                layer,
                what,
                f"{slot.projection} gives {matrix.shape[1]} numbers instead of {sum(shares)}",
            )
        if order == "per_head":
            return matrix.unflatten(1, (n, 3, width))[:, :, slot.part]
        if order == "codegen":
            return matrix.unflatten(1, (4, 3, n // 4, width))[:, :, slot.part].flatten(1, 2)
        start = sum(shares[: slot.part])
        return matrix.narrow(1, start, n * width).unflatten(1, (n, width))

    def _scaled_query(self, layer: int, values: Tensor) -> Tensor:
        name = families.SCALED_QUERY.get(self.spec.family)
        if name is None:
            return values
        return values * float(getattr(self.attention_modules[layer], name))

    def _matrix(self, layer: int, linear: nn.Module, what: str) -> Float[Tensor, "d_in d_out"]:
        """A linear map's weight, acting from the right."""
        if (reason := _why_unreadable(linear)) is not None:
            raise self._unreadable(layer, what, reason)
        weight = cast(Tensor, linear.weight).detach()
        return weight if isinstance(linear, Conv1D) else weight.T

    def _vocabulary(self, part: nn.Module | None, what: str) -> Float[Tensor, "n_vocab d_model"]:
        name = self.spec.name
        if part is None:
            raise UnsupportedError(f"{what} of {name} cannot be read because the model has none")
        if (reason := _why_unreadable(part)) is not None:
            raise UnsupportedError(f"{what} of {name} cannot be read because {reason}")
        weight = cast(Tensor, part.weight).detach()
        width = getattr(self._text_config(), "hidden_size", weight.shape[1])
        if weight.shape[1] != width:
            raise UnsupportedError(
                f"{what} of {name} cannot be read because its rows have {weight.shape[1]} numbers "
                f"and pass another projection to the residual stream's {width}"
            )
        return weight

    def _unreadable(self, layer: int, what: str, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"{what} of layer {layer} of {self.spec.name} cannot be read because {reason}"
        )


def _part(start: nn.Module, path: str) -> nn.Module | None:
    """A submodule by its dotted path, or None where there is no such module."""
    part: object = start
    for name in path.split("."):
        part = getattr(part, name, None)
    return part if isinstance(part, nn.Module) else None


def _why_unreadable(part: nn.Module) -> str | None:
    """Why a module's ``weight`` is not the matrix it applies, or None where it is."""
    kind = type(part).__name__
    if hasattr(part, "base_layer"):
        return f"its {kind} carries an adapter; merge it into the weights first (merge_and_unload)"
    weight = getattr(part, "weight", None)
    if not isinstance(part, (nn.Linear, nn.Embedding, Conv1D)) or not isinstance(weight, Tensor):
        return f"its projection is a {kind}, not a plain matrix; load the model unquantised"
    plain = type(weight) in (Tensor, nn.Parameter) and weight.dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
    )
    if not plain or weight.dim() != 2:
        return f"its {kind} is quantised ({weight.dtype}); load the model unquantised"
    if weight.is_meta:
        return "its weights are offloaded; load the model without offloading"
    return None
