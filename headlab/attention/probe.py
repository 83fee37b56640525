"""Measuring a model's attention by one tiny forward pass through the seam.

Nothing here reads a per-architecture table: what the layers are, in which order they run and with what shapes
is what arrives at the seam. An architecture that never arrives there cannot be served, and is told so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headlab.attention.seam import RawCall, evaluating, record, routed
from headlab.errors import UnsupportedError
from headlab.models.spec import LayerSpec, ModelSpec, Positions, Stack

_ENCODER_TOKENS = 5
_DECODER_TOKENS = 3


def measure(module: Any, name: str) -> tuple[ModelSpec, tuple[nn.Module, ...]]:
    """The model's :class:`ModelSpec` and its attention modules in forward order.

    Raises:
        UnsupportedError: The model's attention does not pass through ``transformers.AttentionInterface``.
    """
    calls = _record_calls(module, name)
    config = module.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    family = config.model_type
    names = {part: path for path, part in module.named_modules()}
    embedding = module.get_input_embeddings().weight
    spec = ModelSpec(
        name=name,
        family=family,
        layers=tuple(_layer(call, names.get(call.module, "")) for call in calls),
        d_model=int(text.hidden_size),
        n_vocab=embedding.shape[0],
        max_context=_max_context(module, text),
        positions=_positions(text, calls),
    )
    return spec, tuple(call.module for call in calls)


def _record_calls(module: Any, name: str) -> list[RawCall]:
    device = module.get_input_embeddings().weight.device
    vocab = module.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, _ENCODER_TOKENS + 1, device=device)[None] % vocab
    arguments: dict[str, Any] = {"input_ids": ids}
    if module.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids[:, :_DECODER_TOKENS]
    if getattr(module.config, "use_cache", False):
        arguments["use_cache"] = False
    failure: Exception | None = None
    calls: list[RawCall] = []
    with evaluating(module), torch.no_grad():
        try:
            with routed(module), record() as calls:
                module(**arguments)
        except (
            Exception
        ) as error:  # an architecture with its own attention may trip over the seam's mask
            if calls:
                raise
            failure = error
        if failure is not None:
            _check_runs(module, arguments, name)
    if not calls:
        raise UnsupportedError(
            f"{name} ({module.config.model_type}) computes attention without transformers' "
            "AttentionInterface, so headlab cannot see its heads; models of the llama, gpt2, gpt_neox, opt, "
            "mistral, qwen, gemma, phi, bert and t5 families, among many others, work"
        ) from failure
    return calls


def _check_runs(module: Any, arguments: dict[str, Any], name: str) -> None:
    """Tell a model that fails by itself from one that only fails at the seam."""
    try:
        module(**arguments)
    except Exception as error:
        raise UnsupportedError(
            f"{name} ({module.config.model_type}) fails on a forward pass of its own: {error}"
        ) from error


def _max_context(module: nn.Module, config: Any) -> int | None:
    stated = getattr(config, "max_position_embeddings", None) or getattr(
        config, "n_positions", None
    )
    if not stated or stated <= 0:
        return None
    for name, part in module.named_modules():
        # RoBERTa and its kin count positions from behind the padding token's own.
        reserved = getattr(part, "padding_idx", None)
        if name.endswith("position_embeddings") and reserved is not None:
            return int(stated) - reserved - 1
    return int(stated)


def _layer(call: RawCall, name: str) -> LayerSpec:
    keywords = call.keywords
    scaling = keywords.get("scaling")
    return LayerSpec(
        name=name,
        stack=_stack(call),
        n_heads=call.q.shape[1],
        n_kv_heads=call.k.shape[1],
        d_head=call.q.shape[3],
        d_value=call.v.shape[3],
        window=keywords.get("sliding_window"),
        softcap=keywords.get("softcap"),
        sinks=keywords.get("s_aux") is not None,
        scaling=float(call.q.shape[3] ** -0.5 if scaling is None else scaling),
    )


def _stack(call: RawCall) -> Stack:
    n_query, n_key = call.q.shape[2], call.k.shape[2]
    if n_query != n_key:
        return "cross"
    return "decoder" if call.causal else "encoder"


def _positions(config: object, calls: list[RawCall]) -> Positions:
    if any(call.keywords.get("position_bias") is not None for call in calls):
        return "relative_bias"
    if getattr(config, "rope_parameters", None) or getattr(config, "rotary_dim", None):
        return "rope"
    if getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None):
        return "learned"
    return "none"
