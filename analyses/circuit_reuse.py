"""How many heads two tasks share: Merullo et al. 2024, Circuit component reuse across tasks in transformers.

The paper compares indirect object identification with Colored Objects in GPT-2 medium. Here the second task is
headlab's repeated tokens: the token that followed an earlier occurrence comes next, and the corrupted prompt has other
tokens at first. A task's circuit is the heads that act on the logits at END along direct paths, and those that act
through queries, keys and values of these; both at q ≤ 0.05 and a share of at least 2 % of the clean run's lead.
Fewer than 15 prompts cannot make one head of hundreds significant.
"""

from __future__ import annotations

import numpy as np
from common import Figure, main

import headlab as hl
from headlab.causal import Circuit, Effects, overlap, path_patch
from headlab.causal.metrics import Metric, logit_difference
from headlab.errors import PromptError
from headlab.roles import Probing
from headlab.tasks import ioi_pairs, plain_tokens, random_tokens

MEDIUM = "GPT-2 medium"
#: Heads that act on the logits whose inputs are traced back, and the least share of the lead that counts.
MOST, LEAST = 4, 0.02
#: Tokens of a list, and of its second copy that the prompt holds.
LIST, SECOND = 9, 5
Task = tuple[list[list[int]], list[list[int]], Metric]


def repeats(model: hl.Model, n_prompts: int, seed: int, bos: int | None) -> Task:
    """[BOS, x, first half of x] with random x, the same with other tokens before, and what follows x there."""
    plain = plain_tokens(model.tokenizer, model.spec.n_vocab)
    drawn = random_tokens(plain, n_prompts, 2 * LIST, seed)
    x, y = drawn[:, :LIST].tolist(), drawn[:, LIST:].tolist()
    begin = [] if bos is None else [bos]
    clean = [[*begin, *ours, *ours[:SECOND]] for ours in x]
    corrupted = [[*begin, *theirs, *ours[:SECOND]] for ours, theirs in zip(x, y, strict=True)]
    metric = logit_difference([ours[SECOND] for ours in x], [theirs[SECOND] for theirs in y])
    return clean, corrupted, metric


def shares(effects: Effects) -> dict[str, float]:
    """Heads that matter, strongest first, with their share of the lead: positive where patching hurts."""
    lead = effects.clean.mean() - effects.corrupted.mean()
    rows = effects.frame[effects.frame["q_value"] <= 0.05]
    found = {f"L{row.layer}H{row.head}": -row.effect / lead for row in rows.itertuples()}
    kept = [name for name, value in found.items() if abs(value) >= LEAST]
    return {name: found[name] for name in sorted(kept, key=lambda name: -abs(found[name]))}


def circuit(model: hl.Model, task: Task, seed: int) -> tuple[Circuit, float]:
    """The heads of a task, and the mean lead of the clean runs."""
    logits = path_patch(model, *task, receivers="logits", seed=seed)
    heads = shares(logits)
    receivers = [f"{name}:qkv" for name in list(heads)[:MOST]]
    if receivers and any(not name.startswith("L0H") for name in heads):
        through = shares(path_patch(model, *task, receivers=receivers, seed=seed))
        heads = through | heads
    return Circuit.of_heads(model, heads, method="path patching"), float(logits.clean.mean())


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    bos = Probing(model).bos
    try:
        ioi = ioi_pairs(model.tokenizer, n_prompts, seed, bos)
    except PromptError as error:
        return [Figure("heads that two tasks share", None, note=f"not measurable: {error}")]
    names = [list(ids) for ids in ioi.clean], [list(ids) for ids in ioi.corrupted]
    first = *names, logit_difference(list(ioi.answers), list(ioi.foils))
    (a, lead_a), (b, lead_b) = (
        circuit(model, task, seed) for task in (first, repeats(model, n_prompts, seed, bos))
    )
    shared = overlap(a, b)
    smaller = min(shared.n_a, shared.n_b)
    note = "the paper's second task is Colored Objects, and its circuits are chosen by hand"
    return [
        Figure(
            "heads shared, of the smaller circuit",
            shared.n_shared / smaller if smaller else np.nan,
            0.78,
            MEDIUM,
            False,
            note,
        ),
        Figure("heads of the IOI circuit that repeats use", shared.recall),
        Figure("by chance", shared.chance_recall),
        Figure("probability that chance shares as many", shared.p_value),
        Figure("heads of IOI", ", ".join(a.scores) or "none", note=f"lead {lead_a:.2f} nats"),
        Figure("heads of repeats", ", ".join(b.scores) or "none", note=f"lead {lead_b:.2f} nats"),
        Figure("heads of both", ", ".join(h for h in a.scores if h in b.scores) or "none"),
    ]


if __name__ == "__main__":
    main(run, __doc__)
