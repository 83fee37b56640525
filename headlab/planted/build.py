"""From plan to model: weights written into the real transformers class, tokenizer, truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from headlab.planted.circuits import Circuits, Layer
from headlab.planted.plan import DEFAULT_HEADS, Plan, make_plan
from headlab.planted.records import records
from headlab.planted.seeds import generator
from headlab.planted.stream import Stream, make_stream, position_embedding, token_embedding
from headlab.planted.words import BOS, EOS, PAD, SPECIAL, tokenizer

Array = NDArray[np.float64]

_MLP_STD = 1e-3


@dataclass(frozen=True)
class Planted:
    """A model whose weights were made so that certain heads do known jobs.

    Attributes:
        module: A ``LlamaForCausalLM`` or ``GPT2LMHeadModel`` in eval mode, float32, on the CPU.
        tokenizer: Fast tokenizer over whole words; puts BOS in front of every text.
        truth: Role by head, for example ``{"L1H0": "previous_token"}``. Heads not named here have
            no role.
        distractors: Heads with random, diffuse weights larger than those of the remaining heads.
    """

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    truth: dict[str, str]
    distractors: tuple[str, ...] = ()

    def records(self, role: str, n: int = 20, seed: int = 0) -> list[dict[str, Any]]:
        """Probe data in this model's words, for ``hl.score(..., data={role: planted.records(role)})``.

        Args:
            role: ``"retrieval"``, ``"temporal"`` (which gives an invariant record beside each) or ``"contextual"``.
            n: Records.
            seed: Seed of the words.

        Raises:
            PlanError: The role takes no records of its own.
        """
        return records(role, self.module.config.vocab_size, n, seed)


def model(
    family: str = "llama",
    heads: Mapping[str, str] | Mapping[tuple[int, int], str] = DEFAULT_HEADS,
    distractors: int = 6,
    n_layers: int | None = None,
    n_heads: int | None = None,
    n_kv_heads: int | None = None,
    vocab: int = 128,
    max_context: int = 512,
    seed: int = 0,
) -> Planted:
    """Build a language model in which the named heads do the named jobs; nothing is trained.

    Args:
        family: ``"llama"`` (RMSNorm, RoPE, SwiGLU) or ``"gpt2"`` (LayerNorm, learned positions).
        heads: Role by head, heads written ``"L1H0"``, ``"1.0"`` or ``(1, 0)``. Roles:
            ``previous_token``, ``duplicate_token``, ``induction``, ``sink``, ``positional``,
            ``retrieval``, ``contextual``, ``temporal``. May be empty: a model without any role.
        distractors: How many further heads get random, diffuse weights of a size worth noticing.
        n_layers: Layers; by default one more than the heads need, at least 4.
        n_heads: Query heads per layer; by default as many as needed, at least 4.
        n_kv_heads: Key/value heads per layer (llama only); by default one per query head.
        vocab: Tokens in the vocabulary: 4 special ones, two stops, the rest plain words (122 by
            default).
        max_context: Longest sequence, in tokens, for which the roles hold.
        seed: Decides every random choice; the global random generators are neither read nor moved.

    Returns:
        The model, its tokenizer and the truth about its heads.

    Raises:
        HeadError: A head cannot be read, or lies outside the model.
        PlanError: The layout cannot be built, for example an induction head without a
            previous_token head in an earlier layer, or roles that cannot share a key/value head.
    """
    plan = make_plan(
        family, heads, distractors, n_layers, n_heads, n_kv_heads, vocab, max_context, seed
    )
    stream = make_stream(plan)
    # transformers draws initial weights from the global generator: put its state back.
    with torch.random.fork_rng(devices=[]):
        module = _llama(plan, stream) if plan.family == "llama" else _gpt2(plan, stream)
    module.eval()
    return Planted(
        module=module,
        tokenizer=tokenizer(plan.vocab, plan.max_context),
        truth={str(head): role for head, role in plan.roles.items()},
        distractors=tuple(map(str, plan.distractors)),
    )


def _llama(plan: Plan, stream: Stream) -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=stream.d_model,
        head_dim=stream.d_head,
        num_hidden_layers=plan.n_layers,
        num_attention_heads=plan.n_heads,
        num_key_value_heads=plan.n_kv_heads,
        intermediate_size=stream.d_model,
        max_position_embeddings=plan.max_context,
        rope_parameters={"rope_type": "default", "rope_theta": stream.rope_theta},
        **_common(plan),
    )
    module = LlamaForCausalLM(config)
    circuits = Circuits(plan, stream)
    _fill(module.model.embed_tokens.weight, token_embedding(stream, plan))
    _fill(module.lm_head.weight, circuits.unembedding())
    for index, block in enumerate(module.model.layers):
        layer = circuits.layer(index)
        _fill(block.self_attn.q_proj.weight, _rows(layer.q))
        _fill(block.self_attn.k_proj.weight, _rows(layer.k))
        _fill(block.self_attn.v_proj.weight, _rows(layer.v))
        _fill(block.self_attn.o_proj.weight, _columns(layer.o))
        _fill_mlp(block.mlp, plan.seed, index)
    return module


def _gpt2(plan: Plan, stream: Stream) -> PreTrainedModel:
    config = GPT2Config(
        n_embd=stream.d_model,
        n_layer=plan.n_layers,
        n_head=plan.n_heads,
        n_inner=stream.d_model,
        n_positions=plan.max_context,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        **_common(plan),
    )
    module = GPT2LMHeadModel(config)
    circuits = Circuits(plan, stream)
    _fill(module.transformer.wte.weight, token_embedding(stream, plan))
    _fill(module.transformer.wpe.weight, position_embedding(stream, plan))
    _fill(module.lm_head.weight, circuits.unembedding())
    for index, block in enumerate(module.transformer.h):
        layer = circuits.layer(index)
        # Conv1D holds its weight as [in, out], the transpose of a Linear.
        _fill(block.attn.c_attn.weight, _fused(layer).T)
        _fill(block.attn.c_proj.weight, _columns(layer.o).T)
        nn.init.zeros_(block.attn.c_attn.bias)
        nn.init.zeros_(block.attn.c_proj.bias)
        _fill_mlp(block.mlp, plan.seed, index)
    return module


def _common(plan: Plan) -> dict[str, object]:
    return {
        "name_or_path": f"planted-{plan.family}",
        "vocab_size": plan.vocab,
        # The unembedding reads another subspace than the embedding writes.
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL.index(BOS),
        "eos_token_id": SPECIAL.index(EOS),
        "pad_token_id": SPECIAL.index(PAD),
    }


def _rows(weights: Array) -> Array:
    return weights.reshape(-1, weights.shape[-1])


def _columns(weights: Array) -> Array:
    return np.concatenate(list(weights), axis=1)


def _fused(layer: Layer) -> Array:
    return np.concatenate([_rows(layer.q), _rows(layer.k), _rows(layer.v)])


def _fill(parameter: torch.Tensor, values: Array) -> None:
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(values)))


def _fill_mlp(mlp: nn.Module, seed: int, layer: int) -> None:
    """Weights so small that the MLP's output is invisible, biases zero."""
    for name, parameter in mlp.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            draws = generator(seed, "mlp", layer, name).standard_normal(tuple(parameter.shape))
            _fill(parameter, _MLP_STD * draws)
