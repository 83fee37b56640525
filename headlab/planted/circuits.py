"""Query, key, value and output matrices of every head, the same for both families.

A head's dimensions are named alike everywhere: position pairs, the first-token flag, the token code
(see ``stream.py``). Keys and values belong to a key/value head and are made so that every query
head sharing it can do its own job: which job is decided by the query and output matrices alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headlab.attention.heads import Head
from headlab.planted.codes import match_gain
from headlab.planted.kernels import Kernel, not_self_kernel, offset_kernel
from headlab.planted.meanings import Meanings
from headlab.planted.plan import READS_PREVIOUS, Plan
from headlab.planted.seeds import generator
from headlab.planted.stream import (
    CONSTANT_NORM,
    CONTENT,
    D_HEAD,
    FLAG,
    POSITION_PAIRS,
    Stream,
)

Array = NDArray[np.float64]

#: How many tokens back a positional head looks.
OFFSET = 4

# Norms of the parts of a planted key; queries carry the rest of each score.
_KEY_POSITION, _KEY_FLAG, _KEY_CODE = 4.0, 6.0, 6.0
_PLANTED_KEY_NORM = float(np.sqrt(POSITION_PAIRS * _KEY_POSITION**2 + _KEY_CODE**2))
_RANDOM_KEY_NORM = 8.0

# Of the heads without a role: the spread of their scores in nats, and the norm of what they write.
# A planted head writes about 1 to a stream of norm 8.
_DISTRACTOR_SPREAD, _DISTRACTOR_WRITE = 0.4, 0.1
_BACKGROUND_SPREAD, _BACKGROUND_WRITE = 0.1, 0.02


@dataclass(frozen=True)
class Layer:
    """Attention weights of one layer.

    Attributes:
        q: ``[head, d_head, d_model]``.
        k: ``[kv_head, d_head, d_model]``.
        v: ``[kv_head, d_head, d_model]``.
        o: ``[head, d_model, d_head]``.
    """

    q: Array
    k: Array
    v: Array
    o: Array


class Circuits:
    """Makes each head's weights from the plan and the stream."""

    def __init__(self, plan: Plan, stream: Stream):
        self.plan, self.stream = plan, stream
        self._slots = _slots(plan.family)

    def layer(self, layer: int) -> Layer:
        """All heads of one layer."""
        groups = range(self.plan.n_kv_heads)
        heads = [Head(layer, head) for head in range(self.plan.n_heads)]
        return Layer(
            q=np.stack([self._query(head) for head in heads]),
            k=np.stack([self._key(layer, group) for group in groups]),
            v=np.stack([self._value(layer, group) for group in groups]),
            o=np.stack([self._output(head) for head in heads]),
        )

    def unembedding(self) -> Array:
        """Logits from the output subspace alone, ``[vocab, d_model]``."""
        gain = match_gain(self.stream.codes, self.plan.vocab, leak=0.02)
        return gain / self.stream.gain * self.stream.codes @ self.stream.output.T

    # Keys and values, by key/value head.

    def _key(self, layer: int, group: int) -> Array:
        roles = self.plan.group_roles(layer, group)
        if not roles:
            return self._random("key", layer, group, norm=_RANDOM_KEY_NORM)
        stream = self.stream
        rows = np.zeros((D_HEAD, stream.d_model))
        if self.plan.family == "llama":
            rows[0:FLAG:2] = _KEY_POSITION * self._one
        else:
            rows[:FLAG] = _KEY_POSITION * self._position
        rows[FLAG] = _KEY_FLAG / stream.gain * stream.flag
        code = stream.previous if roles.intersection(READS_PREVIOUS) else stream.token
        rows[CONTENT:] = _KEY_CODE / stream.gain * code.T
        return self._placed(rows)

    def _value(self, layer: int, group: int) -> Array:
        if not self.plan.group_roles(layer, group):
            return self._random("value", layer, group, norm=1.0)
        rows = np.zeros((D_HEAD, self.stream.d_model))
        rows[CONTENT:] = self.stream.token.T / self.stream.gain
        return self._placed(rows)

    # Queries and outputs, by query head.

    def _query(self, head: Head) -> Array:
        match self.plan.roles.get(head):
            case "previous_token":
                return self._placed(self._by_distance(self._previous))
            case "duplicate_token":
                kernel, spread = self._not_self
                match = match_gain(self.stream.codes, self.plan.max_context, spread)
                return self._placed(self._by_distance(kernel) + self._by_code(match))
            case "induction":
                match = match_gain(self.stream.codes, self.plan.max_context)
                return self._placed(self._by_code(match * self._previous_boost(head)))
            case "positional":
                return self._placed(self._by_distance(self._offset))
            case "retrieval":
                boost = self._previous_boost(head)
                return self._placed(self._by_meaning(boost * self._meanings.marked_match()))
            case "contextual":
                return self._placed(self._by_meaning(self._meanings.same_topic()))
            case "temporal":
                rows = np.zeros((D_HEAD, self.stream.d_model))
                weights = self._root / _KEY_CODE * self._meanings.time_query()
                rows[CONTENT:] = np.outer(weights, self._one)
                return self._placed(rows)
            case "sink":
                rows = np.zeros((D_HEAD, self.stream.d_model))
                score = np.log(self.plan.max_context) + 4.0
                rows[FLAG] = score * self._root / _KEY_FLAG * self._one
                return self._placed(rows)
        planted_key = bool(self.plan.group_roles(head.layer, head.head // self.plan.group_size))
        key_norm = _PLANTED_KEY_NORM if planted_key else _RANDOM_KEY_NORM
        spread = _DISTRACTOR_SPREAD if head in self.plan.distractors else _BACKGROUND_SPREAD
        # Two random vectors of norms a, b in d dimensions have an inner product of spread a·b/√d.
        norm = spread * self.stream.d_head / key_norm
        return self._random("query", *head, norm=norm)

    def _output(self, head: Head) -> Array:
        stream, plan = self.stream, self.plan
        match plan.roles.get(head):
            case "previous_token":
                return self._writer(stream.previous, self._previous_write)
            case "induction":
                return self._writer(stream.output, min(1.0, 2.0 / len(plan.of_role("induction"))))
            case "retrieval":
                return self._writer(stream.output, min(1.0, 2.0 / len(plan.of_role("retrieval"))))
            case "temporal":
                share = min(1.0, 2.0 / len(plan.of_role("temporal")))
                return self._writer(stream.output @ self._meanings.object_of_time(), share)
            case "duplicate_token" | "positional" | "contextual" as role:
                return self._writer(stream.scratch, 1.0 / len(plan.of_role(role)))
        write = _DISTRACTOR_WRITE if head in plan.distractors else _BACKGROUND_WRITE
        draws = generator(plan.seed, "output", *head).standard_normal(
            (stream.d_model, stream.d_head)
        )
        return write / np.sqrt(stream.d_model) * draws

    @property
    def _previous_write(self) -> float:
        return 1.0 / len(self.plan.of_role("previous_token"))

    def _previous_boost(self, head: Head) -> float:
        """What makes up for previous_token heads sharing one unit of writing.

        With n > 1 of them to read from there is slack, so that losing one leaves the role intact.
        """
        n = len(self.plan.of_role("previous_token", before=head.layer))
        return (1.0 if n == 1 else 1.0 + 1.0 / n) / (n * self._previous_write)

    # Parts of a head.

    @property
    def _root(self) -> float:
        # Undoes the 1/√d_head of attention.
        return float(np.sqrt(self.stream.d_head))

    @cached_property
    def _one(self) -> Array:
        """Reads 1 from any (normalised) position of the stream, ``[d_model]``."""
        return self.stream.constant / (CONSTANT_NORM * self.stream.gain)

    @cached_property
    def _position(self) -> Array:
        """Reads ``cos(ω_i·p), sin(ω_i·p)`` in turn, ``[2·pairs, d_model]`` (GPT-2)."""
        return np.sqrt(POSITION_PAIRS) / self.stream.gain * self.stream.position.T

    @cached_property
    def _previous(self) -> Kernel:
        return offset_kernel(self.stream.frequencies, self.plan.max_context)

    @cached_property
    def _offset(self) -> Kernel:
        return offset_kernel(self.stream.frequencies, self.plan.max_context, OFFSET)

    @cached_property
    def _meanings(self) -> Meanings:
        return Meanings(self.stream.codes, self.plan.max_context)

    @cached_property
    def _not_self(self) -> tuple[Kernel, float]:
        return not_self_kernel(self.stream.frequencies, self.plan.max_context)

    def _by_code(self, match: float) -> Array:
        rows = np.zeros((D_HEAD, self.stream.d_model))
        scale = match * self._root / (_KEY_CODE * self.stream.gain)
        rows[CONTENT:] = scale * self.stream.token.T
        return rows

    def _by_meaning(self, matrix: Array) -> Array:
        """Query rows whose score with a planted key is code of key · ``matrix`` · code of query, in nats."""
        rows = np.zeros((D_HEAD, self.stream.d_model))
        rows[CONTENT:] = self._root / (_KEY_CODE * self.stream.gain) * matrix @ self.stream.token.T
        return rows

    def _by_distance(self, kernel: Kernel) -> Array:
        """Query rows that meet a planted key with ``kernel(distance)``."""
        rows = np.zeros((D_HEAD, self.stream.d_model))
        cos, sin = kernel.cos[:, None], kernel.sin[:, None]
        if self.plan.family == "llama":
            # To the query, RoPE makes the constant key (1, 0) at distance δ (cos ωδ, −sin ωδ).
            rows[0:FLAG:2], rows[1:FLAG:2] = cos * self._one, -sin * self._one
        else:
            cosines, sines = self._position[0::2], self._position[1::2]
            rows[0:FLAG:2] = cos * cosines + sin * sines
            rows[1:FLAG:2] = cos * sines - sin * cosines
        return rows * self._root / _KEY_POSITION

    def _writer(self, subspace: Array, norm: float) -> Array:
        columns = np.zeros((D_HEAD, self.stream.d_model))
        columns[CONTENT:] = norm * subspace.T
        return self._placed(columns).T

    def _placed(self, rows: Array) -> Array:
        """Rows moved from named slots to where this family keeps them, ``[d_head, d_model]``."""
        head = np.zeros((self.stream.d_head, self.stream.d_model))
        head[self._slots] = rows
        return head

    def _random(self, *purpose: object, norm: float) -> Array:
        """A random map from a normalised stream (norm √d_model) to vectors of about ``norm``."""
        shape = (self.stream.d_head, self.stream.d_model)
        draws = generator(self.plan.seed, *purpose).standard_normal(shape)
        return norm / np.sqrt(draws.size) * draws


def _slots(family: str) -> NDArray[np.int64]:
    """Head dimension of each named slot; Llama's RoPE pairs dimension i with i + d_head/2."""
    slots = np.arange(D_HEAD)
    return slots if family == "gpt2" else slots // 2 + slots % 2 * (D_HEAD // 2)
