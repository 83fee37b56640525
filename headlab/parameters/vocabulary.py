"""Directions of the residual stream as tokens: what raises them in the logits, and which embeddings lie along them.

A direction w has for token t the value

    unembedding:  N(w) · W_U[:, t] · logit scale        what adding w to the final stream adds to the token's logit,
    embedding:    w · W_E[t]                            how far the token's embedding lies along w,

where N is the final norm but for its scale, which depends on the stream: gain and, in a LayerNorm, centring. So logits
are right up to one positive factor per direction. Values are computed for some tokens at a time and only the best kept.
Rows of W_E and columns of W_U beyond the tokenizer's ids are padding and stand for no token; they are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.arguments import whole_number
from headlab.errors import PlanError, UnsupportedError
from headlab.models.stream_norm import frozen

if TYPE_CHECKING:
    from headlab.model import Model

Space: TypeAlias = Literal["unembedding", "embedding"]
#: Values of one chunk of the vocabulary, at most.
_BUDGET = 1 << 24


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The tokens with the largest values along each direction.

    Attributes:
        ids: Token ids, best first.
        values: Their values.
    """

    ids: Int[Tensor, "direction k"]
    values: Float[Tensor, "direction k"]

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.ids, self.values))

    def __repr__(self) -> str:
        return f"TopTokens: the {self.ids.shape[1]} best tokens of {self.ids.shape[0]} directions"


@torch.no_grad()
def top_tokens(
    model: Model,
    directions: Float[Tensor, "direction d_model"],
    k: int = 10,
    space: Space = "unembedding",
    *,
    fold_norm: bool = True,
    least: bool = False,
) -> TopTokens:
    """The k tokens with the largest values along each direction, or the smallest.

    Args:
        model: The model.
        directions: Directions of the residual stream, a tensor or what makes one.
        k: How many tokens.
        space: ``"unembedding"`` for what a direction written does to the logits, ``"embedding"`` for what reads it.
        fold_norm: Whether to pass the final norm, but for its scale, in front of W_U.
        least: Whether the smallest values are wanted, smallest first.

    Raises:
        PlanError: k is not between 1 and the vocabulary's size, directions have the wrong width or are not finite, or
            there is no such space.
        UnsupportedError: W_E or W_U cannot be read, or holds NaN or infinity.
    """
    table, towards = vocabulary_table(model, directions, space, fold_norm=fold_norm)
    n = table.shape[1]
    k = whole_number(k, "k", 1)
    if k > n:
        raise PlanError(f"k={k:.6g} is more than the {n} tokens of {model.name}")
    sign = -1.0 if least else 1.0
    best = towards.new_full((len(towards), 0), 0.0)
    ids = torch.zeros(len(towards), 0, dtype=torch.long, device=towards.device)
    at_once = max(k, _BUDGET // max(1, len(towards)))
    for start in range(0, n, at_once):
        columns = table[:, start : start + at_once].to(towards)
        values = sign * (towards @ columns)
        check_values(model, values, space)
        places = torch.arange(start, start + columns.shape[1], device=ids.device)
        values = torch.cat([best, values], 1)
        places = torch.cat([ids, places.expand(len(towards), -1)], 1)
        best, order = values.topk(min(k, values.shape[1]), 1)
        ids = places.gather(1, order)
    return TopTokens(ids, sign * best)


@torch.no_grad()
def vocabulary_table(
    model: Model,
    directions: Float[Tensor, "direction d_model"],
    space: Space = "unembedding",
    *,
    fold_norm: bool = True,
) -> tuple[Float[Tensor, "d_model n_vocab"], Float[Tensor, "direction d_model"]]:
    """A view of W_U or W_Eᵀ without padding, and the directions to multiply it with for the values of
    :func:`top_tokens`.

    Raises:
        PlanError: Directions have the wrong width or are not finite, or there is no such space.
        UnsupportedError: The matrix cannot be read.
    """
    weights, d = model.weights, model.spec.d_model
    if space not in ("unembedding", "embedding"):
        raise PlanError(f"space={space!r:.60} must be 'unembedding' or 'embedding'")
    try:
        directions = torch.as_tensor(directions)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(
            f"directions={directions!r:.60} must be a tensor [direction, {d}]"
        ) from error
    if directions.dim() != 2 or directions.shape[1] != d or not directions.is_floating_point():
        raise PlanError(
            f"directions of shape {tuple(directions.shape)} must be [direction, {d}], numbers of the residual stream"
        )
    if not bool(directions.isfinite().all()):
        raise PlanError("directions hold NaN or infinity")
    if space == "embedding":
        table = weights.W_E[: n_tokens(model, len(weights.W_E))].T
        return table, directions.to(table.device)
    table = weights.W_U[:, : n_tokens(model, weights.W_U.shape[1])]
    towards = directions.to(table.device) * weights.logit_scale
    if fold_norm and weights.final_norm is not None:
        like = torch.ones(1, d, dtype=towards.dtype, device=towards.device)
        like[0, 0] = 2.0  # a LayerNorm has no scale at equal entries
        towards = frozen(weights.final_norm, like, "the final norm").unscaled(towards)
    return table, towards


def n_tokens(model: Model, rows: int) -> int:
    """How many of a matrix's rows stand for a token: those up to the tokenizer's last id, all without a tokenizer."""
    if model.tokenizer is None:
        return rows
    return min(rows, 1 + max(model.tokenizer.get_vocab().values()))


def check_values(model: Model, values: Float[Tensor, "*any"], space: Space) -> None:
    """Refuse to sort values that are no numbers.

    Raises:
        UnsupportedError: Some are NaN or infinite.
    """
    if not bool(values.isfinite().all()):
        matrix = "W_E" if space == "embedding" else "W_U"
        raise UnsupportedError(
            f"{matrix} of {model.name} gives tokens values of NaN or infinity, so none is the largest"
        )


def token_names(model: Model, ids: Int[Tensor, "*row k"]) -> list[list[str]]:
    """Tokens as text, one list per row."""
    return [list(row) for row in model.token_texts(ids.reshape(-1, ids.shape[-1]))]


__all__ = [
    "Space",
    "TopTokens",
    "check_values",
    "n_tokens",
    "token_names",
    "top_tokens",
    "vocabulary_table",
]
