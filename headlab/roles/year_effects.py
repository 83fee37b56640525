"""What a change of the time does to a model's answers: logit differences, attributions, patches and ablations.

D is the logit of a pair's first object less that of its second, at the last position. Pairs are those of
:mod:`headlab.tasks.temporal`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import binomtest
from torch import Tensor

from headlab.attention import ablate, keep, patch
from headlab.attention.heads import Head
from headlab.roles.base import Arrays, Probing
from headlab.roles.integrated_gradients import Attributions, head_attributions
from headlab.tasks import TimePair

if TYPE_CHECKING:
    from headlab.model import Model

#: Interpolation steps.
STEPS = 5
#: Least total effect of the time on a pair that counts, in nats.
MIN_TOTAL = 1.0
#: Prompts looked at, at most, per pair asked for, to find pairs that the model follows.
LOOKED_AT = 24
_BATCH = 24
#: Level of the test that a model follows years at all. Pairs share facts and objects, so that at 3 % about 4 % of
#: random models pass, by simulation.
_CHANCE = 0.03


@dataclass(frozen=True)
class Followed:
    """Pairs whose time the model follows: D(clean) > 0 > D(corrupted), at least :data:`MIN_TOTAL` apart.

    Attributes:
        pairs: No two share a prompt; none where the model goes against the time about as often.
        ends: D of the clean and of the corrupted prompt.
        said: How many were looked at and followed.
    """

    pairs: tuple[TimePair, ...]
    ends: Float[np.ndarray, "pair 2"]
    said: str


def followed(probing: Probing, groups: Iterable[tuple[TimePair, ...]]) -> Followed:
    """The first pairs of groups that the model follows, as many as prompts are asked for, where there are so many.

    Pairs that the model follows the wrong way round are counted as well: unless significantly fewer than those it
    follows (one-sided sign test, 3 %), the model follows none.
    """
    pairs: list[TimePair] = []
    ends: list[np.ndarray] = []
    taken: set[tuple[int, ...]] = set()
    looked = against = prompts = 0
    for part, group in enumerate(_gathered(groups)):
        probing.tell(f"looking for facts that the model dates: {len(pairs)} found")
        found = ends_of(probing, f"{part:03d}", group)
        looked += len(group)
        prompts += len({ids for pair in group for ids in (pair.clean, pair.corrupted)})
        for pair, (clean, corrupted) in zip(group, found, strict=True):
            apart = abs(clean - corrupted) >= MIN_TOTAL and clean * corrupted < 0
            if not apart or {pair.clean, pair.corrupted} & taken:
                continue
            taken |= {pair.clean, pair.corrupted}
            if clean > 0:
                pairs.append(pair)
                ends.append(np.array([clean, corrupted]))
            else:
                against += 1
        if len(pairs) >= probing.n_prompts or prompts >= LOOKED_AT * probing.n_prompts:
            break
    if not looked:
        return Followed((), np.empty((0, 2)), "the tokenizer cannot put the facts into words")
    if len(pairs) < 2:
        said = f"the model follows the year in {len(pairs) or 'none'} of {looked} pairs"
        return Followed((), np.empty((0, 2)), said)
    said = f"of {looked} pairs the model follows {len(pairs)} that share no prompt and goes against {against}"
    if binomtest(len(pairs), len(pairs) + against, alternative="greater").pvalue > _CHANCE:
        return Followed((), np.empty((0, 2)), f"{said}: no more than chance")
    n = min(len(pairs), probing.n_prompts)
    return Followed(tuple(pairs[:n]), np.stack(ends[:n]), said)


def _gathered(groups: Iterable[tuple[TimePair, ...]]) -> Iterator[tuple[TimePair, ...]]:
    """Groups joined into batches of few prompts."""
    held: list[TimePair] = []
    size = 0
    for group in groups:
        held += group
        size += len({ids for pair in group for ids in (pair.clean, pair.corrupted)})
        if size >= 2 * _BATCH:
            yield tuple(held)
            held, size = [], 0
    if held:
        yield tuple(held)


def ends_of(probing: Probing, name: str, pairs: Sequence[TimePair]) -> Float[np.ndarray, "pair 2"]:
    """D of the clean and the corrupted prompt of each pair, remembered."""

    def run() -> Arrays:
        return {"ends": differences(probing.model, pairs)}

    return probing.part(f"temporal-ends-{name}", key(pairs), run)["ends"]


def key(pairs: Sequence[TimePair]) -> np.ndarray:
    """Every token of pairs, for the key of a part."""
    rows = [(*pair.clean, -1, *pair.corrupted, -1, *pair.objects, -1) for pair in pairs]
    return np.array([token for row in rows for token in row], dtype=np.int64)


def differences(model: Model, pairs: Sequence[TimePair]) -> Float[np.ndarray, "pair 2"]:
    """D of the clean and of the corrupted prompt of each pair, in nats; a prompt of several pairs is run once."""
    wanted = [(ids, pair.objects) for pair in pairs for ids in (pair.clean, pair.corrupted)]
    return _asked(model, wanted).reshape(-1, 2)


def clean_differences(model: Model, pairs: Sequence[TimePair]) -> Float[np.ndarray, " pair"]:
    """D of the clean prompt of each pair, in nats."""
    return _asked(model, [(pair.clean, pair.objects) for pair in pairs])


def _asked(
    model: Model, wanted: Sequence[tuple[tuple[int, ...], tuple[int, int]]]
) -> Float[np.ndarray, " question"]:
    objects: dict[tuple[int, ...], set[tuple[int, int]]] = {}
    for ids, two in wanted:
        objects.setdefault(ids, set()).add(two)
    found: dict[tuple[tuple[int, ...], tuple[int, int]], float] = {}
    prompts = sorted(objects, key=len)  # little padding
    for start in range(0, len(prompts), _BATCH):
        batch = prompts[start : start + _BATCH]
        for ids, row in zip(batch, last_logits(model, batch), strict=True):
            for two in objects[ids]:
                found[ids, two] = float(row[two[0]] - row[two[1]])
    return np.array([found[entry] for entry in wanted], dtype=np.float64)


def last_logits(model: Model, prompts: Sequence[tuple[int, ...]]) -> Float[Tensor, "prompt vocab"]:
    """Logits behind each prompt."""
    with _last_of_each(model, prompts):
        logits = model.trace([list(ids) for ids in prompts], logits="last").logits
    assert logits is not None
    return logits[:, -1].float().cpu()


@contextmanager
def _last_of_each(model: Model, prompts: Sequence[tuple[int, ...]]) -> Iterator[None]:
    """While the block lasts, only the last position of each of these prompts reaches the unembedding.

    ``logits="last"`` sees to that where prompts are equally long. Where they are not, every position would get its
    logits, which for a vocabulary of 262 144 costs more than the rest of the model.
    """
    last = torch.tensor([len(ids) for ids in prompts]) - 1
    unembedding = model.module.get_output_embeddings()
    if unembedding is None or bool((last == last[0]).all()):
        yield
        return

    def hook(module: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (hidden,) = arguments
        return (hidden[torch.arange(len(last)), last, None],)

    handle = unembedding.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def attribution(model: Model, pair: TimePair) -> Attributions:
    """Each head's attribution of D(clean) − D(corrupted), in nats, by position."""
    first, second = pair.objects

    def difference(logits: Tensor) -> Tensor:
        return logits[:, first] - logits[:, second]

    return head_attributions(model, pair.clean, pair.corrupted, difference, STEPS)


def patched_effects(
    model: Model, pairs: Sequence[TimePair], heads: Sequence[Head]
) -> Float[np.ndarray, "head pair"]:
    """What D(clean) loses, in nats, when z of one head is patched in from the corrupted run."""
    plan = keep.tensors("z", heads=list(heads))
    source = model.trace([list(pair.corrupted) for pair in pairs], keep=plan, logits="none")
    before, after = clean_differences(model, pairs), []
    clean = [pair.clean for pair in pairs]
    objects = torch.tensor([pair.objects for pair in pairs])
    for head in heads:
        with model.edit(patch([head], source=source)):
            two = last_logits(model, clean).gather(1, objects)
        after.append((two[:, 0] - two[:, 1]).double().numpy())
    return before - np.stack(after)


def ablation_effects(
    model: Model, pairs: Sequence[TimePair], heads: Sequence[Head]
) -> Float[np.ndarray, " head"]:
    """What zeroing z of one head adds to the probability of the right object of the two, in points, mean over pairs.

    As in the paper's table of ablations, with the pair's two objects as candidates, asked under the clean time.
    """

    def points() -> float:
        return float((100 / (1 + np.exp(-clean_differences(model, pairs)))).mean())

    before, after = points(), []
    for head in heads:
        with model.edit(ablate([head], kind="zero")):
            after.append(points())
    return np.array(after) - before
