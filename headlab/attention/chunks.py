"""Layers that attend within chunks of the text (Llama 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headlab.model import Model


def attention_chunks(model: Model) -> list[int | None]:
    """Chunk of each layer that attends within chunks of the text, in tokens, or None."""
    config = model.module.config
    kinds = getattr(config, "layer_types", None) or []
    size = getattr(config, "attention_chunk_size", None)
    layers = range(model.spec.n_layers)
    return [size if at < len(kinds) and kinds[at] == "chunked_attention" else None for at in layers]


__all__ = ["attention_chunks"]
