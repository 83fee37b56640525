"""Fuzzy (n-gram) induction heads: induction that survives a token that does not match. The definition is headlab's.

On [BOS, x, x′], x′ being x with every fourth token replaced by one that stands nowhere else, the rows of the replaced
tokens decide. Such a row's own token has no earlier occurrence, so plain prefix matching, which looks for the
current token, finds nothing; but the tokens before it match, and the next token will be the one that followed at the
aligned place. With x of n tokens the aligned place lies n tokens back and its follower n − 1:

    score = mean over rows q of replaced tokens of A[q, q − (n − 1)].

The follower, not the aligned token itself, is what a head must read to predict what comes next, and it is where an
induction head looks in the rows around; a head that looks at the aligned token (n back, what came after the last
match) shows in the detail ``attention_around_aligned``. The null is the same attention where the second half, the
replaced tokens included, repeats nothing: [BOS, x, y].
"""

from __future__ import annotations

from functools import partial

import numpy as np
from jaxtyping import Int
from torch import Tensor

from headlab.attention import keep
from headlab.roles.base import Arrays, Detail, Look, Measurement, Probing, Role, register
from headlab.roles.repeats import AROUND, LEAST, SECOND_COPY, N, blind, prompt_means
from headlab.roles.scores import RoleInfo
from headlab.tasks import (
    TOKENS_SCHEMA,
    FuzzyTokens,
    RecordError,
    fuzzy_tokens,
    given_tokens,
    plain_tokens,
    random_tokens,
    shuffled_apart,
)

#: One token in so many is replaced.
EVERY = 4
_BATCH = 10
#: A record's control may keep at most this share of its tokens in their places.
_MOST_ALIKE = 0.25


class FuzzyInduction(Role):
    """See the module's docstring."""

    info = RoleInfo(
        name="fuzzy_induction",
        title="Fuzzy induction (n-gram)",
        question="When a passage repeats but for a token, does the head still look at what came next last time?",
        statistic="mean attention of replaced tokens in a repeated passage to the follower of the aligned token",
        null="the same positions where the second half repeats nothing",
        decision="score ≥ 0.05 and at least 0.04 above the null, at q ≤ the false-discovery rate",
        reference="headlab's; after Olsson et al. 2022, who call matching by more than a token fuzzy",
        min_score=0.05,
        min_effect=0.04,
        row_convention="the row of the replaced token, which is also the row that predicts its follower",
        reduction="mean over the rows of replaced tokens, then over prompts",
    )
    schema = TOKENS_SCHEMA
    behaviour = SECOND_COPY

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        groups = _groups(probing)
        if groups is None:
            why = f"context or vocabulary cannot hold {LEAST} distinct tokens twice"
            return Measurement.not_measurable(probing, why)
        profiles: dict[str, list[np.ndarray]] = {"repeated": [], "control": []}
        for which, parts in profiles.items():
            for at, prompts in enumerate(groups):
                ids = getattr(prompts, which)
                probing.tell(f"{which} prompts, {at + 1} of {len(groups)}")
                part = probing.part(
                    f"fuzzy-{which}-{at:03d}", ids.numpy(), partial(_run, probing, ids, prompts)
                )
                parts.append(part["masses"])
        follower = AROUND.index(1)
        rows = [part[..., follower] for part in profiles["repeated"]]
        control = [part[..., follower] for part in profiles["control"]]
        means, null = prompt_means(rows), prompt_means(control)
        notes = {}
        for layer in np.flatnonzero(blind(rows + control)):
            means[:, layer] = null[:, layer] = np.nan
            for head in range(means.shape[2]):
                notes[int(layer), head] = "out of window: the aligned place lies beyond it"
        around = np.concatenate(
            [part.mean(3, dtype=np.float64) for part in profiles["repeated"]]
        ).mean(0)
        around[np.isnan(means).all(0)] = np.nan
        detail = Detail(
            around,
            "mean attention of replaced tokens by key position, in tokens after the aligned place",
            np.array(AROUND, np.float64),
        )
        looks = [
            Look(ids.numpy(), prompts.replaced.numpy(), mass)
            for prompts, part in zip(groups, rows, strict=True)
            for ids, mass in zip(prompts.repeated, part, strict=True)
        ]
        return Measurement(
            means, null, tuple(looks[:2]), notes, {"attention_around_aligned": detail}
        )


def _groups(probing: Probing) -> list[FuzzyTokens] | None:
    """Prompts that are run together: tens of random tokens, or one per record; None where nothing fits."""
    model = probing.model
    start = int(probing.bos is not None)
    plain = plain_tokens(model.tokenizer, model.spec.n_vocab)
    if probing.records is None:
        n = min(N, (probing.length(2 * N + start) - start) // 2, len(plain) // 2)
        if n < LEAST:
            return None
        drawn = random_tokens(plain, probing.n_prompts, 2 * n, probing.seed + 3)
        return [
            fuzzy_tokens(rows[:, :n], rows[:, n:], rows[:, n:], EVERY, probing.bos)
            for rows in np.split(drawn, range(_BATCH, len(drawn), _BATCH))
        ]
    limit = model.spec.max_context
    most = None if limit is None else (limit - start) // 2
    groups = []
    for at, x in enumerate(given_tokens(model.tokenizer, probing.records, LEAST, most)):
        unseen = plain[~np.isin(plain, x)]
        if len(unseen) < len(x):
            raise RecordError(f"record {at}: the vocabulary has too few tokens that it lacks")
        fresh = random_tokens(unseen, 1, len(x), probing.seed + at)
        y = shuffled_apart(x, probing.seed + at)
        if (x == y).mean() > _MOST_ALIKE:
            raise RecordError(
                f"record {at}: so few of its tokens differ that no other order breaks the repeat; "
                "give a text of more different words"
            )
        groups.append(fuzzy_tokens(x[None], y[None], fresh, EVERY, probing.bos))
    return groups


def _run(probing: Probing, ids: Int[Tensor, "prompt position"], prompts: FuzzyTokens) -> Arrays:
    """``masses`` [prompt, layer, head, query, key]: attention to the keys of ``AROUND`` the aligned place."""
    n = prompts.n
    plan = keep.statistics(
        "lag_mass",
        bins=range(n - AROUND[-1], n - AROUND[0] + 2),
        queries=prompts.replaced.tolist(),
    )
    trace = probing.model.trace(ids, keep=plan, logits="none")
    return {"masses": trace.statistic("lag_mass").flip(-1).float().cpu().numpy()}


register(FuzzyInduction())
