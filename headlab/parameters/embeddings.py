"""What stands for a token in a layer's matrices: its embedding, or what the first MLP makes of it.

The first MLP enriches token embeddings, and later layers rarely see bare ones. So MAPS (Elhelo and Geva 2025) reads
layer 0 with rows of W_E and later layers with ``MLP_0(norm(W_E))``: the output of the first MLP alone, without the
residual stream, without attention, without positions. By their own account the authors' published runs used it for
layer 0 too, by accident (``"mlp"``).
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.model import Model
from headlab.models.blocks import stream_of

#: ``"auto"``: raw in layer 0, the first MLP's output above; ``"raw"``: rows of W_E everywhere; ``"mlp"``: the first
#: MLP's output everywhere.
EmbeddingKind = Literal["auto", "raw", "mlp"]

_BATCH = 1024
#: A first MLP whose output is shorter than this share of the embedding says nothing of tokens. Real ones write more
#: than they read.
_FAINT, _SAMPLED = 0.01, 256


class _Done(Exception):
    """The first MLP has given its output; the rest of the model need not run."""


def is_raw(kind: EmbeddingKind, layer: int) -> bool:
    """Whether a layer is read with rows of W_E.

    Raises:
        PlanError: There is no such kind.
    """
    if kind not in ("auto", "raw", "mlp"):
        raise PlanError(f"embedding={kind!r} must be 'auto', 'raw' or 'mlp'")
    return kind == "raw" or (kind == "auto" and layer == 0)


def embed(
    model: Model, layer: int, ids: Int[Tensor, " token"] | None = None, kind: EmbeddingKind = "auto"
) -> Float[Tensor, "token d_model"]:
    """Rows that stand for tokens in a layer, in float32 or the model's type where that is wider.

    Args:
        model: The model.
        layer: The layer whose matrices they meet.
        ids: Tokens; all of the vocabulary by default.
        kind: Which rows; see :data:`EmbeddingKind`.

    Raises:
        PlanError: There is no such kind.
        PromptError: A token does not exist.
        UnsupportedError: W_E, or the first MLP, cannot be read.
    """
    raw = is_raw(kind, layer)
    table = model.weights.W_E
    if ids is None:
        ids = torch.arange(len(table), device=table.device)
    ids = ids.to(table.device)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(table):
        wrong = int(ids.min() if int(ids.min()) < 0 else ids.max())
        raise PromptError(
            f"token {wrong} does not exist: {model.name} has tokens 0–{len(table) - 1}"
        )
    wide = torch.promote_types(table.dtype, torch.float32)
    if raw or not len(ids):
        return table[ids].to(wide)
    return torch.cat([_first_mlp(model, part).to(wide) for part in ids.split(_BATCH)])


def doubt(model: Model, kind: EmbeddingKind = "auto") -> str:
    """Why what stands for tokens above layer 0 may hold nothing of them; empty where it is fine.

    A first MLP that writes next to nothing, as in a model that was built or trained without need of it, still gives
    rows, and through a norm they look like any others.
    """
    if is_raw(kind, 1):
        return ""
    n = len(model.weights.W_E)
    ids = torch.arange(0, n, max(1, n // _SAMPLED))
    try:
        size = embed(model, 1, ids, kind).norm(dim=-1).mean()
    except UnsupportedError:
        return ""  # who reads above layer 0 is told
    own = embed(model, 0, ids, "raw").norm(dim=-1).mean() * model.weights.embed_scale
    share = float(size / own.clamp(min=1e-30))
    if share >= _FAINT:
        return ""
    return (
        f"the first MLP of {model.name} writes {100 * share:.2g} % of the length of what it reads, so above layer 0 "
        "its output hardly stands for a token; embedding='raw' reads with rows of W_E instead"
    )


@torch.no_grad()
def _first_mlp(model: Model, ids: Int[Tensor, " token"]) -> Float[Tensor, "token d_model"]:
    """``MLP_0(norm(W_E))`` of some tokens, each by itself: block 0 runs on W_E with its attention giving nothing.

    Whatever lies between stream and MLP in the family at hand (a norm, experts) is thereby its own.
    """
    output = model.blocks.mlp_output(0)
    attention, block = model.weights.attention_modules[0], model.blocks.modules[0]
    x = (model.weights.W_E[ids] * model.weights.embed_scale)[:, None]
    kept: list[Tensor] = []

    def enters(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (x.to(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": x.to(kwargs["hidden_states"])}

    def silent(module: nn.Module, args: Any, given: Any) -> Any:
        nothing = torch.zeros_like(stream_of(given))
        return (nothing, *given[1:]) if isinstance(given, tuple) else nothing

    def leaves(module: nn.Module, args: Any, given: Any) -> None:
        kept.append(stream_of(given).reshape(len(ids), -1))
        raise _Done

    with ExitStack() as stack:
        # Attention runs and is thrown away, one token at a time: its modules expect to be called.
        for handle in (
            block.register_forward_pre_hook(enters, with_kwargs=True),
            attention.register_forward_hook(silent),
            output.register_forward_hook(leaves),
        ):
            stack.callback(handle.remove)
        stack.enter_context(model.plain())
        with suppress(_Done):
            model.trace(ids[:, None], logits="none")
    return kept[0]


__all__ = ["EmbeddingKind", "doubt", "embed", "is_raw"]
