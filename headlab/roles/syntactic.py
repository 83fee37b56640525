"""Syntactic heads (Clark et al. 2019): heads whose words attend to their governors.

Attention between words is made of attention between tokens: the sum over the pieces of a key word, the mean over
the pieces of a query word. For every dependent, the word that this gives the largest weight, the dependent itself
and special tokens aside, is the head's guess at its governor; read the other way, the guess is the word that
attends to the dependent most. A sentence scores the share of its dependents guessed right, and a head the mean of
its sentences. The details give the same by relation and direction over all pairs at once, as the paper does.

Null: the best fixed offset, from three words before the dependent to three after it, the best on the whole data
(the paper goes to two after). What stands next to what is most of syntax in short sentences, so this is a strong
control. It is chosen once for all heads, in their disfavour; direction and relation are chosen by the user and not
by the data, so that the score of the best head is not the best of many tries beyond those corrected for.

In a causal model, and under a sliding window, only pairs that can see each other count, and only where there are
two candidates or more. Attention in chunks is taken to hold whole sentences. Clark et al. judge ``poss`` by the row
of the 's that follows; here every relation is judged by the dependent's own row.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headlab.attention import keep
from headlab.errors import PromptError
from headlab.roles.base import Arrays, Detail, Look, Measurement, Probing, Role, RoleError, register
from headlab.roles.scores import RoleInfo
from headlab.tasks import DEPENDENCY_SCHEMA, ParsedSentence, RecordError, parsed_sentences

Direction = Literal["dependent_to_head", "head_to_dependent"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
#: Fixed offsets of the null, in words.
OFFSETS = (-3, -2, -1, 1, 2, 3)
#: A relation gets details from this many pairs on.
MIN_PAIRS = 10
#: Relations that get details, the most frequent ones.
_SHOWN = 12

_INFO = RoleInfo(
    name="syntactic",
    title="Syntactic",
    question="Does each word attend to the word that governs it?",
    statistic="share of dependents whose most attended other word is their governor",
    null="the share that the best fixed offset from −3 to +3 words gets right in the same sentences",
    decision="score ≥ 0.3 and at least 0.05 above the null, at q ≤ the false-discovery rate",
    reference="Clark et al. 2019, section 4; the thresholds are headlab's",
    min_score=0.3,
    min_effect=0.05,
    row_convention="the token's own row",
    reduction="mean over a word's query tokens, sum over its key tokens; mean over dependents, then over sentences",
    sink_convention="special tokens cannot be guessed",
)


@dataclass(frozen=True)
class Pairs:
    """What one sentence says of every pair of a dependent and its governor.

    Attributes:
        right: Whether each head's guess is right, [layer, head, pair].
        counted: Which pairs count in each layer, [layer, pair].
        dependents: The dependent words, [pair].
        offsets: Governor minus dependent, in words, [pair].
        relations: Relation of each pair.
    """

    right: Bool[np.ndarray, "layer head pair"]
    counted: Bool[np.ndarray, "layer pair"]
    dependents: np.ndarray
    offsets: np.ndarray
    relations: tuple[str, ...]

    def of(self, relation: str | None) -> Bool[np.ndarray, " pair"]:
        """Which pairs are of a relation; without one, all but punctuation."""
        names = np.array(self.relations)
        return names != "punct" if relation is None else names == relation


class Syntactic(Role):
    """See the module's docstring.

    Args:
        relation: Judge heads by this relation only, such as ``"det"``; by all but ``punct`` by default.
        direction: ``"dependent_to_head"``: the dependent's row is to find its governor; ``"head_to_dependent"``: the
            governor's row is to be the one that attends to the dependent most.
        name: Name of the role; by default ``syntactic``, with relation and direction where they are given.

    Raises:
        RoleError: The direction does not exist.
    """

    schema = DEPENDENCY_SCHEMA
    needs_records = True

    def __init__(
        self,
        relation: str | None = None,
        direction: Direction = "dependent_to_head",
        name: str | None = None,
    ) -> None:
        if direction not in DIRECTIONS:
            raise RoleError(
                f"there is no direction {direction!r}; there are {', '.join(DIRECTIONS)}"
            )
        self.relation, self.direction = relation, direction
        backwards = direction == DIRECTIONS[1]
        parts = [part for part in (relation, "reverse" if backwards else None) if part]
        statistic = (
            "share of dependents that their governor, of all other words, attends to most"
            if backwards
            else _INFO.statistic
        )
        self.info = replace(
            _INFO,
            name=name or "_".join([_INFO.name, *parts]),
            title=_INFO.title + (f" ({', '.join(parts)})" if parts else ""),
            question="Is each word attended to by the word that governs it?"
            if backwards
            else _INFO.question,
            statistic=statistic + (f", over {relation} only" if relation else ""),
        )

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        if not probing.records:
            return Measurement.not_measurable(probing, "no records of yours were given")
        try:
            sentences = parsed_sentences(
                probing.model.tokenizer,
                probing.records,
                bos=probing.bos,
                max_context=probing.model.spec.max_context,
            )
        except RecordError:
            raise
        except PromptError as error:
            return Measurement.not_measurable(probing, str(error))
        kept, pairs = [], []
        for at, sentence in enumerate(sentences):
            probing.tell(f"sentence {at + 1} of {len(sentences)}")
            part = partial(read_sentence, probing, sentence)
            kept.append(probing.part(f"syntactic-{sentence.digest}", np.array(sentence.ids), part))
            pairs.append([judge_pairs(kept[-1], sentence, probing, way) for way in DIRECTIONS])
        way = DIRECTIONS.index(self.direction)
        own = [both[way] for both in pairs]
        values = np.stack([_share(one.right, one.counted & one.of(self.relation)) for one in own])
        if np.isnan(values).all():
            wanted = f"relation {self.relation!r}" if self.relation else "a governor"
            return Measurement.not_measurable(
                probing, f"no word of the records has {wanted} that a row can see"
            )
        chance, _ = best_offset(own, self.relation)
        heads = values.shape[2]
        null = np.repeat(chance[..., None], heads, 2)
        notes = {
            (int(layer), int(head)): "out of window: no word of this head's rows sees its governor"
            for layer, head in np.argwhere(np.isnan(values).all(0))
        }
        looks = tuple(_look(*found, way) for found in list(zip(sentences, kept, strict=True))[:2])
        return Measurement(values, null, looks, notes, _details(pairs))


def word_attention(
    rows: Float[Tensor, "layer head query key"], words: tuple[tuple[int, int], ...]
) -> Float[Tensor, "layer head word other"]:
    """Attention between words: the sum over a key word's tokens, the mean over a query word's (Clark et al. 2019)."""
    member = torch.zeros(len(words), rows.shape[-1], dtype=rows.dtype, device=rows.device)
    for word, (start, stop) in enumerate(words):
        member[word, start:stop] = 1
    mean = member / member.sum(-1, keepdim=True)
    return mean @ rows @ member.T


def read_sentence(probing: Probing, sentence: ParsedSentence) -> Arrays:
    """Run one sentence.

    Returns:
        ``guess`` [direction, layer, head, word], the word each word is matched with, −1 where no other word can
        be seen; ``weight`` of the same shape, word attention between each word and its governor.
    """
    trace = probing.model.trace([list(sentence.ids)], keep=keep.rows(), logits="none")
    attention = word_attention(trace.rows[0].float(), sentence.words).nan_to_num(0).cpu().numpy()
    seen = visible_words(sentence, probing)
    words = np.arange(len(sentence.words))
    heads = np.where(np.array(sentence.heads) < 0, words, sentence.heads)
    guesses, weights = [], []
    for way in DIRECTIONS:
        flip = way == DIRECTIONS[1]
        between = attention.swapaxes(-1, -2) if flip else attention
        can = (seen.swapaxes(-1, -2) if flip else seen)[:, None]
        guess = np.where(can, between, -1.0).argmax(-1)
        guesses.append(np.where(can.any(-1), guess, -1).astype(np.int32))
        weights.append(between[..., words, heads].astype(np.float32))
    return {"guess": np.stack(guesses), "weight": np.stack(weights)}


def visible_words(sentence: ParsedSentence, probing: Probing) -> Bool[np.ndarray, "layer word key"]:
    """Which other words each word sees with all its tokens, whole."""
    start, stop = np.array(sentence.words).T
    before = start[:, None] >= stop[None]
    reach = np.maximum(stop[:, None] - 1 - start[None], stop[None] - 1 - start[:, None])
    other = ~np.eye(len(start), dtype=bool)
    return np.stack(
        [
            other & (before | (not layer.causal)) & (reach < (layer.window or len(sentence.ids)))
            for layer in probing.model.spec.layers
        ]
    )


def judge_pairs(
    kept: Arrays, sentence: ParsedSentence, probing: Probing, direction: Direction
) -> Pairs:
    """Compare guesses with the tree."""
    way = DIRECTIONS.index(direction)
    seen = visible_words(sentence, probing)
    seen = seen.swapaxes(-1, -2) if way else seen
    heads = np.array(sentence.heads)
    dependents = np.flatnonzero(heads >= 0)
    governors = heads[dependents]
    return Pairs(
        kept["guess"][way][..., dependents] == governors,
        seen[:, dependents, governors] & (seen[:, dependents].sum(-1) > 1),
        dependents,
        governors - dependents,
        tuple(sentence.relations[at] for at in dependents),
    )


def best_offset(
    pairs: list[Pairs], relation: str | None
) -> tuple[Float[np.ndarray, "sentence layer"], Float[np.ndarray, " layer"]]:
    """Share that the best offset gets right, per sentence and over all pairs; the best is each layer's own, since
    what counts depends on its window."""
    used = [one.counted & one.of(relation) for one in pairs]
    hits = [
        [np.broadcast_to(one.offsets == offset, which.shape) for offset in OFFSETS]
        for one, which in zip(pairs, used, strict=True)
    ]
    total = np.sum([which.sum(-1) for which in used], 0)
    right = np.sum(
        [[(hit & which).sum(-1) for hit in row] for row, which in zip(hits, used, strict=True)],
        0,
    )  # [offset, layer]
    best = right.argmax(0)
    per_sentence = np.stack(
        [
            [_share(row[offset][at], which[at]) for at, offset in enumerate(best)]
            for row, which in zip(hits, used, strict=True)
        ]
    )
    return per_sentence, np.divide(
        right.max(0), total, out=np.full(len(total), np.nan), where=total > 0
    )


def _share(right: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Share of the used pairs that are right, over the last axis; NaN where none is used."""
    used = used[:, None] if right.ndim == 3 else used
    count = used.sum(-1)
    shape = np.broadcast_shapes(right.shape, used.shape)[:-1]
    return np.divide((right & used).sum(-1), count, out=np.full(shape, np.nan), where=count > 0)


def _details(pairs: list[list[Pairs]]) -> dict[str, Detail]:
    """Accuracy by relation and direction over all pairs, and of the best offset beside it."""
    found: dict[str, Detail] = {}
    common = Counter(name for one, _ in pairs for name in one.relations if name != "punct")
    frequent = [name for name, count in common.most_common(_SHOWN) if count >= MIN_PAIRS]
    for relation in (None, *frequent):
        for way, direction in enumerate(DIRECTIONS):
            own = [both[way] for both in pairs]
            used = [one.counted & one.of(relation) for one in own]
            count = np.sum([which.sum(-1) for which in used], 0)
            if not count.any():
                continue
            right = np.sum(
                [
                    (one.right & which[:, None]).sum(-1)
                    for one, which in zip(own, used, strict=True)
                ],
                0,
            )
            _, chance = best_offset(own, relation)
            words = (
                "its governor's rows find the word" if way else "the word's rows find its governor"
            )
            found[f"{relation or 'all'} {direction}"] = Detail(
                np.divide(
                    right,
                    count[:, None],
                    out=np.full(right.shape, np.nan),
                    where=count[:, None] > 0,
                ),
                f"share of {relation or 'all'} pairs in which {words}; the best fixed offset gets "
                f"{np.nanmax(chance):.3f} of {count.max()} pairs",
            )
    return found


def _look(sentence: ParsedSentence, kept: Arrays, way: int) -> Look:
    """Word attention between dependent and governor, at the row of the attending word's last token."""
    rows: dict[int, np.ndarray] = {}
    for word, head in enumerate(sentence.heads):
        if head >= 0:
            row = sentence.words[head if way else word][1] - 1
            weight = kept["weight"][way][..., word]
            rows[row] = np.maximum(rows[row], weight) if row in rows else weight
    queries = np.array(sorted(rows))
    return Look(np.array(sentence.ids), queries, np.stack([rows[row] for row in sorted(rows)], -1))


register(Syntactic())
