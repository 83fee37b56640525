"""The residual stream of a planted model: which direction means what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headlab.planted.codes import token_codes
from headlab.planted.plan import Plan
from headlab.planted.seeds import generator
from headlab.planted.words import BOS_ID

Array = NDArray[np.float64]

# GPT-2 ties head width to model width, so its models of fewer than four heads have wider heads.
D_HEAD, MIN_WIDTH = 64, 256

# Slots of a head: position pairs (cosine, sine), a pair for the first-token flag, the token code.
POSITION_PAIRS = 8
FLAG = 2 * POSITION_PAIRS
CONTENT = FLAG + 2
CODE = D_HEAD - CONTENT

CONSTANT_NORM = 8.0


@dataclass(frozen=True)
class Stream:
    """Orthonormal directions of the residual stream, all orthogonal to the vector of ones.

    Attributes:
        constant: ``[d_model]``, present with norm 8 in every position: keeps the norm of the stream
            steady and serves as the "1" from which heads make constant queries and keys.
        flag: ``[d_model]``, 1 on the first position (GPT-2) or on the beginning-of-sequence token
            (Llama).
        token: ``[d_model, code]``, the code of the token itself. No planted head writes here.
        previous: ``[d_model, code]``, the code of the token before, written by previous_token
            heads.
        output: ``[d_model, code]``, the code of the token predicted, written by induction heads,
            read by the unembedding.
        scratch: ``[d_model, code]``, where duplicate_token heads write; nothing reads it.
        position: ``[d_model, 2·pairs]``, sines and cosines of the position (GPT-2 only).
        codes: ``[vocab, code]``, unit vectors, one per token.
        frequencies: ``[pairs]``, radians per token, of the position pairs a head sees.
        gain: What a norm layer multiplies the stream by when it holds the constant, one code and,
            in GPT-2, the position.
    """

    d_model: int
    d_head: int
    rope_theta: float
    constant: Array
    flag: Array
    token: Array
    previous: Array
    output: Array
    scratch: Array
    position: Array
    codes: Array
    frequencies: Array
    gain: float


def make_stream(plan: Plan) -> Stream:
    """Choose widths, frequencies, directions and codes; all chance comes from the plan's seed."""
    if plan.family == "gpt2":
        d_head = max(D_HEAD, -(-MIN_WIDTH // plan.n_heads))
        d_model = d_head * plan.n_heads
        frequencies, theta = np.multiply(2.5, 0.4 ** np.arange(POSITION_PAIRS)), 0.0
    else:
        d_head = D_HEAD
        d_model = -(-MIN_WIDTH // plan.n_heads) * plan.n_heads
        frequencies, theta = _rotary(plan.max_context)
    parts = 2 + 4 * CODE + 2 * POSITION_PAIRS
    draws = generator(plan.seed, "directions").standard_normal((d_model, parts))
    # Orthogonal to the ones, so that GPT-2's LayerNorm finds nothing to centre.
    basis = np.linalg.qr(np.hstack([np.ones((d_model, 1)), draws]))[0][:, 1:]
    constant, flag, *rest = np.split(basis, np.cumsum([1, 1, CODE, CODE, CODE, CODE]), axis=1)
    token, previous, output, scratch, position = rest
    held = CONSTANT_NORM**2 + 1.0 + (plan.family == "gpt2")
    return Stream(
        d_model=d_model,
        d_head=d_head,
        rope_theta=theta,
        constant=constant[:, 0],
        flag=flag[:, 0],
        token=token,
        previous=previous,
        output=output,
        scratch=scratch,
        position=position,
        codes=token_codes(plan.vocab, CODE, plan.seed),
        frequencies=frequencies,
        gain=float(np.sqrt(d_model / held)),
    )


def token_embedding(stream: Stream, plan: Plan) -> Array:
    """The constant plus each token's code, ``[vocab, d_model]``; Llama's flag comes with BOS."""
    table = CONSTANT_NORM * stream.constant + stream.codes @ stream.token.T
    if plan.family == "llama":
        table[BOS_ID] += stream.flag
    return table


def position_embedding(stream: Stream, plan: Plan) -> Array:
    """Cosines and sines of the position, total norm 1, ``[max_context, d_model]`` (GPT-2)."""
    angle = np.outer(np.arange(plan.max_context), stream.frequencies)
    pairs = np.stack([np.cos(angle), np.sin(angle)], axis=-1).reshape(plan.max_context, -1)
    table = pairs / np.sqrt(POSITION_PAIRS) @ stream.position.T
    table[0] += stream.flag
    return table


def _rotary(max_context: int) -> tuple[Array, float]:
    """RoPE frequencies of the position pairs and the base θ that gives them.

    RoPE's frequencies are geometric and start at 1. θ is so large that the pairs after the position
    pairs turn by at most 0.05 rad over the whole context: to a token code held there, distance
    makes no difference.
    """
    ratio = (0.05 / max_context) ** (1.0 / POSITION_PAIRS)
    return ratio ** np.arange(POSITION_PAIRS), float(ratio ** (-D_HEAD / 2))
