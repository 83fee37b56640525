"""Tiny random models, one per architecture headlab supports, and a tokenizer for all of them.

Two layers, a width of 36 to 48, 97 tokens. Heads are grouped wherever the architecture allows it,
windows are shorter than a dozen tokens, and every parameter is random: no bias is zero, no norm
weight is one and the projections are large enough that attention patterns are far from uniform, so
that a bug which a default initialisation would hide (a dropped bias, a swapped head, a forgotten
sink) changes numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 97
PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIAL_IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
MAX_CONTEXT = 128

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT,
    **SPECIAL_IDS,
}
GPT_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_positions": MAX_CONTEXT,
    "n_embd": 36,
    "n_layer": 2,
    "n_head": 3,
    **SPECIAL_IDS,
}
BERT_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": MAX_CONTEXT,
    **SPECIAL_IDS,
}
SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]

#: Keyword arguments of each architecture's configuration; the key is the Hugging Face model type.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA_LIKE, "attention_bias": False, "head_dim": 10},
    "gpt2": GPT_LIKE,
    "gpt_neox": {
        **BERT_LIKE,
        "hidden_size": 48,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "gptj": {**GPT_LIKE, "rotary_dim": 4},
    "opt": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 36,
        "word_embed_proj_dim": 36,
        "ffn_dim": 52,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": MAX_CONTEXT,
        **SPECIAL_IDS,
    },
    "mistral": {**LLAMA_LIKE, "head_dim": 10, "sliding_window": 5},
    "mixtral": {
        **LLAMA_LIKE,
        "sliding_window": 7,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    },
    "qwen2": {
        **LLAMA_LIKE,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen3": {**LLAMA_LIKE, "head_dim": 10},
    "qwen3_moe": {
        **LLAMA_LIKE,
        "head_dim": 10,
        "moe_intermediate_size": 20,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    },
    "gemma2": {
        **LLAMA_LIKE,
        "head_dim": 10,
        "sliding_window": 5,
        "layer_types": SLIDING_THEN_FULL,
        "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 2.5,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        **LLAMA_LIKE,
        "head_dim": 10,
        "sliding_window": 6,
        "layer_types": SLIDING_THEN_FULL,
        "query_pre_attn_scalar": 7,
    },
    "phi": {**LLAMA_LIKE, "num_attention_heads": 3, "num_key_value_heads": 3},
    "phi3": {**LLAMA_LIKE, "sliding_window": 8},
    "olmo2": LLAMA_LIKE,
    "gpt_oss": {
        **LLAMA_LIKE,
        "head_dim": 10,
        "sliding_window": 5,
        "layer_types": SLIDING_THEN_FULL,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        **LLAMA_LIKE,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 14,
        "kv_lora_rank": 11,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
        "moe_intermediate_size": 20,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
    "stablelm": {
        **LLAMA_LIKE,
        "hidden_size": 48,
        "use_qkv_bias": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "starcoder2": {**LLAMA_LIKE, "sliding_window": 9},
    "cohere2": {
        **LLAMA_LIKE,
        "head_dim": 10,
        "sliding_window": 5,
        "layer_types": SLIDING_THEN_FULL,
        "logit_scale": 0.3,
    },
    "granite": {
        **LLAMA_LIKE,
        "embedding_multiplier": 1.7,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.4,
    },
    "smollm3": {**LLAMA_LIKE, "no_rope_layers": [1, 0]},
    "llama4_text": {
        **LLAMA_LIKE,
        "head_dim": 10,
        "intermediate_size_mlp": 44,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 6,
        "floor_scale": 4,
    },
    "glm4": {**LLAMA_LIKE, "head_dim": 12},
    "gpt_bigcode": {**GPT_LIKE, "multi_query": True},
    # CodeGen splits its projection over four accelerators, so its heads come in fours.
    "codegen": {**GPT_LIKE, "n_embd": 48, "n_head": 4, "rotary_dim": 4, "n_ctx": MAX_CONTEXT},
    "bert": BERT_LIKE,
    "roberta": BERT_LIKE,
    "bart": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 36,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 52,
        "decoder_ffn_dim": 44,
        "max_position_embeddings": MAX_CONTEXT,
        "decoder_start_token_id": EOS,
        "forced_eos_token_id": EOS,
        **SPECIAL_IDS,
    },
    "t5": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 36,
        "d_kv": 10,
        "d_ff": 52,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 3,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "decoder_start_token_id": PAD,
        **SPECIAL_IDS,
    },
}

#: Architectures which do not route attention through ``transformers.AttentionInterface``.
UNSUPPORTED_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_neo": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 36,
        "num_layers": 2,
        "num_heads": 3,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 5,
        "max_position_embeddings": MAX_CONTEXT,
        **SPECIAL_IDS,
    },
    "bloom": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 36,
        "n_layer": 2,
        "n_head": 3,
        **SPECIAL_IDS,
    },
    "falcon": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        **SPECIAL_IDS,
    },
    "mpt": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": MAX_CONTEXT,
        **SPECIAL_IDS,
    },
}

MASKED = ("bert", "roberta")
ENCODER_DECODER = ("bart", "t5")


def config(family: str, **changes: Any) -> PreTrainedConfig:
    """The tiny configuration of *family*, with fields replaced by *changes*."""
    fields = {**CONFIGS, **UNSUPPORTED_CONFIGS}[family]
    return AutoConfig.for_model(family, **{**fields, **changes})


def randomise(model: PreTrainedModel) -> None:
    """Give every parameter a random value: matrices N(0, 0.2²), vectors moved by N(0, 0.2²).

    Where a norm sits between a projection and q·k, the next factor is enlarged: otherwise the
    scores would be so small that attention is all but uniform.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0.0, 1.0)
            elif parameter.dim() >= 2:
                parameter.normal_(0.0, 0.4 if "q_b_proj" in name or "kv_b_proj" in name else 0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
                if ".q_norm" in name or ".k_norm" in name:
                    parameter.add_(0.5)


def build(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny random float32 model in eval mode; the same call gives the same weights.

    Args:
        family: A key of :data:`FAMILIES` or :data:`UNSUPPORTED`.
        seed: Draws other weights. The caller's random state is left alone.
        changes: Fields of the configuration to replace, such as ``num_key_value_heads=6``.
    """
    auto = AutoModelForCausalLM
    if family in MASKED:
        auto = AutoModelForMaskedLM
    elif family in ENCODER_DECODER:
        auto = AutoModelForSeq2SeqLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(family.encode()) + seed)
        model = auto.from_config(config(family, **changes), dtype=torch.float32)
        randomise(model)
    return model.eval()


def _builder(family: str) -> Callable[[], PreTrainedModel]:
    return lambda: build(family)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {name: _builder(name) for name in CONFIGS}
UNSUPPORTED: dict[str, Callable[[], PreTrainedModel]] = {
    name: _builder(name) for name in UNSUPPORTED_CONFIGS
}


def inputs(family: str, n: int = 11, *, batch: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random token ids [batch, n] without special tokens, as keyword arguments of ``forward``."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(UNK + 1, VOCAB_SIZE, (batch, n), generator=generator)
    if family not in ENCODER_DECODER:
        return {"input_ids": ids}
    decoder_ids = torch.randint(UNK + 1, VOCAB_SIZE, (batch, n - 2), generator=generator)
    return {"input_ids": ids, "decoder_input_ids": decoder_ids}


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Words separated by spaces: token id *i* is ``"w{i}"``, except the four special ids.

    Ids 0 to 3 are ``<pad>``, ``<bos>``, ``<eos>`` and ``<unk>``. Nothing is added to a text.
    """
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = special + [f"w{i}" for i in range(len(special), vocab_size)]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=MAX_CONTEXT,
    )
