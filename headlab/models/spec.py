"""What headlab knows about a model's attention: the facts every other part reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stack = Literal["decoder", "encoder", "cross"]
Positions = Literal["rope", "learned", "relative_bias", "none"]


@dataclass(frozen=True)
class LayerSpec:
    """One attention module, as measured at the seam.

    Attributes:
        name: Dotted path of the attention module inside the model.
        stack: ``"decoder"`` (causal self-attention), ``"encoder"`` (bidirectional) or ``"cross"``.
        n_heads: Query heads.
        n_kv_heads: Key/value heads; ``n_heads // n_kv_heads`` query heads share one.
        d_head: Width of q and k.
        d_value: Width of v and z; differs from ``d_head`` under multi-head latent attention.
        window: Sliding window in tokens, the query's own position included, or None.
        softcap: Soft cap c of the scores, ``c·tanh(s/c)``, or None.
        sinks: Whether the layer has a learned sink logit per head.
        scaling: Factor applied to q·k.
    """

    name: str
    stack: Stack
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_value: int
    window: int | None
    softcap: float | None
    sinks: bool
    scaling: float

    @property
    def causal(self) -> bool:
        """Whether a query sees only keys up to its own position."""
        return self.stack == "decoder"


@dataclass(frozen=True, repr=False)
class ModelSpec:
    """A model's attention layers in the order of the forward pass.

    A *layer* is one attention module. In a decoder-only or encoder-only model layer *i* is block *i*; in an
    encoder-decoder model the encoder's layers come first, then each decoder block's self-attention and
    cross-attention; ``layers[i].stack`` tells them apart.

    Attributes:
        name: The name the model was loaded by.
        family: The Hugging Face model type, such as ``"llama"``.
        layers: One :class:`LayerSpec` per attention module.
        d_model: Width of the residual stream.
        n_vocab: Rows of the embedding.
        max_context: Longest context the configuration states, or None when it states none.
        positions: How positions enter: ``"rope"``, ``"learned"``, ``"relative_bias"`` or ``"none"``.
    """

    name: str
    family: str
    layers: tuple[LayerSpec, ...]
    d_model: int
    n_vocab: int
    max_context: int | None
    positions: Positions

    def __repr__(self) -> str:
        groups = "" if self.n_kv_heads == self.n_heads else f" ({self.n_kv_heads} key/value heads)"
        return (
            f"ModelSpec({self.name}: {self.family}, {self.n_layers} layers × {self.n_heads} heads{groups}, "
            f"d_head {self.d_head}, d_model {self.d_model}, context {self.max_context}, {self.positions} positions)"
        )

    @property
    def n_layers(self) -> int:
        """Attention layers."""
        return len(self.layers)

    @property
    def n_heads(self) -> int:
        """Query heads per layer; the largest where layers differ."""
        return max(layer.n_heads for layer in self.layers)

    @property
    def n_kv_heads(self) -> int:
        """Key/value heads per layer; the largest where layers differ."""
        return max(layer.n_kv_heads for layer in self.layers)

    @property
    def d_head(self) -> int:
        """Width of q and k; the largest where layers differ."""
        return max(layer.d_head for layer in self.layers)

    @property
    def d_value(self) -> int:
        """Width of v and z; the largest where layers differ."""
        return max(layer.d_value for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer."""
        return tuple(layer.window for layer in self.layers)
