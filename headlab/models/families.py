"""Where each architecture keeps what lies outside the attention seam: the one table of names.

Attention itself needs no table, because it arrives at ``transformers.AttentionInterface`` under the
same names everywhere. What does not arrive there is the matrices around it. They are found by the
names of an attention module's parts, so a new architecture that names its projections like llama,
BERT or T5 works without a release of headlab. A fused projection says nothing about the order of
its rows, so each order is listed with the families it was verified for.

To add a family: find its row below, or add one; then add a tiny model to ``tests/tiny_models.py``,
which ``tests/test_weights.py`` checks against what the model really computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

#: How the rows of a projection are split between q, k and v and their heads:
#: ``whole``, it holds one of them; ``qkv``, one after the other; ``per_head``, each head's q, k
#: and v together; ``codegen``, four shards, each with its heads' q, then v, then k.
Order = Literal["whole", "qkv", "per_head", "codegen"]


@dataclass(frozen=True)
class Slot:
    """Where one of q, k and v comes from.

    Attributes:
        projection: Path of the linear map, relative to the attention module.
        order: How its rows are shared.
        part: Which share this is.
    """

    projection: str
    order: Order = "whole"
    part: int = 0


@dataclass(frozen=True)
class InputLayout:
    """The maps from the residual stream to q, k and v.

    Attributes:
        query, key, value: Where each comes from.
        families: Hugging Face model types this holds for; empty where the names alone decide.
    """

    query: Slot
    key: Slot
    value: Slot
    families: frozenset[str] = frozenset()

    @property
    def projections(self) -> set[str]:
        """Every path that must exist."""
        return {self.query.projection, self.key.projection, self.value.projection}


def _separate(query: str, key: str, value: str) -> InputLayout:
    return InputLayout(Slot(query), Slot(key), Slot(value))


def _fused(
    projection: str, order: Order, parts: tuple[int, int, int], *families: str
) -> InputLayout:
    query, key, value = (Slot(projection, order, part) for part in parts)
    return InputLayout(query, key, value, frozenset(families))


#: The first row whose projections all exist, and whose families allow it, is used.
INPUT_LAYOUTS: tuple[InputLayout, ...] = (
    _separate("q_proj", "k_proj", "v_proj"),
    _separate("query", "key", "value"),
    _separate("q", "k", "v"),
    _separate("q_lin", "k_lin", "v_lin"),
    _fused("c_attn", "qkv", (0, 1, 2), "gpt2"),
    _fused("c_attn", "per_head", (0, 1, 2), "gpt_bigcode"),
    _fused("query_key_value", "per_head", (0, 1, 2), "gpt_neox", "persimmon"),
    _fused("qkv_proj", "qkv", (0, 1, 2), "phi3"),
    _fused("qkv_proj", "codegen", (0, 2, 1), "codegen"),
    _fused("Wqkv", "qkv", (0, 1, 2), "modernbert"),
)

#: The output projection, which takes every head's z side by side; ``../`` is the module's parent.
OUTPUT_PROJECTIONS = (
    "o_proj",
    "out_proj",
    "c_proj",
    "dense",
    "o",
    "Wo",
    "out_lin",
    "../output.dense",
)

#: Parts that show q, k or v to be more than a matrix away from the residual stream, and why.
NOT_LINEAR: dict[str, str] = {
    "kv_a_proj_with_mqa": (
        "its k and v pass a low-rank bottleneck with a norm inside (multi-head latent attention), "
        "so no matrix maps the residual stream to them"
    ),
    "groupnorm": (
        "its heads are normed differences of pairs of softmaxes (differential attention), so the "
        "seam's heads are not rows of the projections"
    ),
}

#: Normalisation of q and k between projection and seam.
QK_NORMS = (
    ("q_norm", "k_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
    ("qk_norm", "qk_norm"),
)

#: Families that multiply q by this attribute before the seam and pass a scaling of 1 there.
SCALED_QUERY = {"opt": "scaling", "whisper": "scaling"}

#: The norm before the unembedding. Post-norm models (bart, and opt-350m, which has the name but no
#: module) and the heads of masked language models (bert, roberta) have none.
FINAL_NORMS = (
    "model.norm",
    "model.final_layernorm",
    "model.final_layer_norm",
    "model.final_norm",
    "model.embedding_norm",
    "model.decoder.final_layer_norm",
    "model.decoder.layer_norm",
    "model.decoder.norm",
    "model.language_model.norm",
    "language_model.model.norm",
    "transformer.ln_f",
    "transformer.norm_f",
    "gpt_neox.final_layer_norm",
    "decoder.final_layer_norm",
    "norm",
    "ln_f",
    "final_layernorm",
    "final_layer_norm",
    "final_norm",
)

#: Norms of a block between attention, or MLP, and the stream. Where both of a pair exist, that is what they are:
#: elsewhere ``post_attention_layernorm`` is the norm before the MLP.
POST_NORMS = (
    ("post_self_attn_layernorm", "post_mlp_layernorm"),
    ("post_attention_layernorm", "post_feedforward_layernorm"),
)

#: The part of a block whose output the MLP gives.
MLP_OUTPUTS = ("mlp", "feed_forward", "block_sparse_moe", "ffn", "fc2")

#: The configuration field that scales what attention and MLP add to the stream (Granite).
RESIDUAL_MULTIPLIER = "residual_multiplier"

#: Configuration fields that scale logits; each gives the factor on ``norm(x)·W_U``.
LOGIT_SCALES: dict[str, Callable[[Any, Any], float]] = {
    "logit_scale": lambda value, config: float(value),
    "lm_head_multiplier": lambda value, config: float(value),
    "logits_scaling": lambda value, config: 1.0 / float(value),
    "scale_decoder_outputs": lambda value, config: config.d_model**-0.5 if value else 1.0,
}

#: The configuration field of the soft cap on logits.
LOGIT_SOFTCAP = "final_logit_softcapping"

#: Attributes of the embedding, and fields of the configuration, that scale its rows.
EMBED_SCALES = ("scalar_embed_scale", "embed_scale")
EMBED_MULTIPLIERS = ("embedding_multiplier",)
