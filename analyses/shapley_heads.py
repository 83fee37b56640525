"""Heads that interfere, by Shapley values: Held & Yang 2022, Shapley Head Pruning.

The paper gives every head of XLM-R the Shapley value of its language's accuracy, takes out the heads of negative value
and so gains on that language. Here the task is to go on with a list of random tokens at its second showing, and the
metric the probability of the right token. Layers play first, whole; then the heads of the layers that are worth least,
by the paper's way: orders from the full model down, cut when half the heads are gone. The paper draws 3000 orders and
settles heads by a Bernstein bound, which cannot settle one in fewer than about 2000; here a few orders give wide
intervals in minutes. Half of the prompts give the values, the other half judge the pruning.
"""

from __future__ import annotations

import numpy as np
import torch
from common import Figure, main

import headlab as hl
from headlab.causal.head_sets.shapley import Shapley, shapley_heads
from headlab.causal.removal import Removal
from headlab.causal.sweep import Sweep
from headlab.tasks import plain_tokens, repeated_tokens

PAPER = "XLM-R, XNLI and UD"
#: Tokens of the list, layers whose heads play, orders of layers and of heads, random heads to compare with.
LIST, LAYERS, ORDERS, HEAD_ORDERS, DRAWS = 8, 3, 6, 10, 10


def lists(model: hl.Model, seed: int, n_prompts: int) -> tuple[torch.Tensor, list[int]]:
    """Lists that stop one token before the end of their second showing, and that token."""
    plain = plain_tokens(model.tokenizer, model.spec.n_vocab)
    shown = repeated_tokens(plain, n_prompts, LIST, seed, bos=None).repeated
    return shown[:, :-1], shown[:, -1].tolist()


def best(values: Shapley) -> str:
    """The players of highest value, with their intervals."""
    rows = values.frame.sort_values("value", ascending=False).head(3)
    return ", ".join(
        f"{r.player} {r.value:.3f} [{r.ci_low:.3f}, {r.ci_high:.3f}]" for r in rows.itertuples()
    )


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    prompts, answers = lists(model, seed, 2 * max(n_prompts, 4))
    half = len(prompts) // 2
    metric = hl.metrics.probability(answers[:half])
    layers = shapley_heads(
        model,
        prompts[:half],
        metric,
        groups="layers",
        n_permutations=ORDERS,
        antithetic=True,
        seed=seed,
    )
    least = layers.frame.sort_values("value").head(LAYERS)["player"]
    members = ", ".join(f"{int(name[1:])}.*" for name in least)
    heads = shapley_heads(
        model, prompts[:half], metric, heads=members, truncation=0.5, n_permutations=HEAD_ORDERS, seed=seed,
    )  # fmt: skip
    table = heads.frame
    harmful = table[table["value"] < 0].sort_values("value")
    players = table["player"].tolist()
    # The judges: prompts that gave no value, and as many heads drawn from the same layers.
    rng = np.random.default_rng(seed)
    draws = [
        rng.choice(players, max(1, len(harmful)), replace=False).tolist() for _ in range(DRAWS)
    ]
    held_out = Sweep(model, prompts[half:], hl.metrics.probability(answers[half:]))
    removal = Removal(model, "zero")
    sets = [harmful["player"].tolist(), *draws]
    edits = [removal.edits(hl.parse_heads(names, model.spec) if names else ()) for names in sets]
    after = held_out.run(edits).mean(1)
    before = float(held_out.clean.mean())
    return [
        Figure(
            "probability of the right token, whole model", before, note=f"{half} held-out prompts"
        ),
        Figure(
            "layers of highest value",
            best(layers),
            note=f"{layers.about['n_permutations']} orders; 95 % from sampling orders",
        ),
        Figure(
            "values of all layers, summed, less v(all) − v(none)",
            float(layers.values.sum(0).mean()) - (layers.total or 0.0),
            0.0,
            "any game",
            note="the efficiency axiom; exact but for rounding",
        ),
        Figure(
            f"heads of negative value, of {len(players)} in {', '.join(sorted(least, key=lambda n: int(n[1:])))}",
            f"{len(harmful)}: {', '.join(harmful['player'].head(8)) or 'none'}",
            note=f"{int((harmful['ci_high'] < 0).sum())} with an interval below 0, of {HEAD_ORDERS} orders",
        ),
        Figure(
            "change on held-out prompts without them",
            float(after[0]) - before,
            "gains as large as 0.247",
            PAPER,
            note="the paper's largest gain, a share of structural prediction accuracy; it fine-tunes per task",
        ),
        Figure(
            "change without as many random heads of these layers",
            f"{after[1:].mean() - before:.3g} ± {after[1:].std(ddof=1):.2g}",
            note=f"mean and standard deviation of {DRAWS} draws",
        ),
    ]


if __name__ == "__main__":
    main(run, __doc__)
