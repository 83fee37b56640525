"""Tiny models in which chosen heads map the codes of words to the outputs of other words, and no others do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tiny_models import VOCAB_SIZE, build, tiny_tokenizer
from torch import Tensor

import headlab as hl
from headlab.tasks.relations import Relation

#: Room for one dimension per token.
_CODE = 100
_WIDTH = 3 * _CODE
_FIRST = 4


def words(n: int = 40, seed: int = 0, name: str = "made up", **fields: Any) -> Relation:
    """A relation of n words to as many others, in any order."""
    order = np.random.default_rng(seed).permutation(np.arange(_FIRST, VOCAB_SIZE))
    pairs = tuple((f"w{s}", f"w{t}") for s, t in zip(order[:n], order[n : 2 * n], strict=True))
    return Relation(name=name, kind="given", about="one word to another", pairs=pairs, **fields)


def token_map(relation: Relation) -> Tensor:
    """[code, code]: 1 where a source's code is to become a target's."""
    made = torch.zeros(_CODE, _CODE)
    for source, target in relation.pairs:
        made[int(source[1:]), int(target[1:])] = 1.0
    return made


def implementing(
    family: str, heads: dict[tuple[int, int], Tensor], *, seed: int = 0, scrambled: bool = False
) -> hl.Model:
    """A model whose heads at (layer, head) implement token maps; every other weight is random.

    The stream has three parts in random directions: codes of tokens, which the embedding writes; codes of tokens as the
    first MLP writes them, which heads of later layers read; and outputs, which the unembedding reads.

    Args:
        family: ``"llama"``, three heads to a key/value head, or ``"gpt2"``.
        heads: What each implements.
        seed: Of the directions and the other weights.
        scrambled: Whether W_O of the heads is turned at random, so that they map codes to nothing in particular.
    """
    generator = torch.Generator().manual_seed(seed)
    changes: dict[str, Any] = {"n_embd": _WIDTH, "n_head": 3, "n_inner": _CODE}
    if family == "llama":
        changes = {"hidden_size": _WIDTH, "intermediate_size": _CODE, "head_dim": _CODE}
    module = build(family, seed=seed, tie_word_embeddings=False, **changes)
    basis = torch.linalg.qr(torch.randn(_WIDTH, _WIDTH, generator=generator)).Q
    # A LayerNorm takes the mean off: directions that have one would not come through.
    basis[:, -1] = 1 / _WIDTH**0.5
    basis = torch.linalg.qr(basis.flip(1)).Q.flip(1)
    code, carried, output = (basis[:, at * _CODE : (at + 1) * _CODE] for at in range(3))
    tokens = torch.arange(VOCAB_SIZE)
    with torch.no_grad():
        module.get_input_embeddings().weight.copy_(code.T[tokens])
        module.get_output_embeddings().weight.copy_(output.T[tokens])
        _carry(family, module, code, carried)
        turn = torch.linalg.qr(torch.randn(_CODE, _CODE, generator=generator)).Q
        for (layer, head), made in heads.items():
            reads = code if layer == 0 else carried
            _write(
                family, module, layer, head, reads, (made @ turn if scrambled else made) @ output.T
            )
    return hl.load(module, tokenizer=tiny_tokenizer())


def _carry(family: str, module: Any, code: Tensor, carried: Tensor) -> None:
    """Make the first MLP turn a token's code into its carried code."""
    if family == "llama":
        block = module.model.layers[0]
        block.post_attention_layernorm.weight.fill_(1.0)
        # silu(x)·x of a positive number alone: 0 for tokens that are not there.
        block.mlp.gate_proj.weight.copy_(code.T)
        block.mlp.up_proj.weight.copy_(code.T)
        block.mlp.down_proj.weight.copy_(carried)
    else:
        block = module.transformer.h[0]
        block.ln_2.weight.fill_(1.0)
        block.ln_2.bias.zero_()
        block.mlp.c_fc.weight.copy_(code)
        block.mlp.c_fc.bias.zero_()
        block.mlp.c_proj.weight.copy_(carried.T)
        block.mlp.c_proj.bias.zero_()


def _write(family: str, module: Any, layer: int, head: int, reads: Tensor, writes: Tensor) -> None:
    at = slice(head * _CODE, (head + 1) * _CODE)
    if family == "llama":
        attention = module.model.layers[layer].self_attn
        group = module.config.num_attention_heads // module.config.num_key_value_heads
        kv = slice(head // group * _CODE, (head // group + 1) * _CODE)
        attention.v_proj.weight[kv] = reads.T
        attention.o_proj.weight[:, at] = writes.T
    else:
        attention = module.transformer.h[layer].attn
        start = 2 * _WIDTH + head * _CODE
        attention.c_attn.weight[:, start : start + _CODE] = reads
        attention.c_proj.weight[at] = writes
