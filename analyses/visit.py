"""VISIT (Katz and Belinkov 2023): what the longest heads write at the end of a prompt, as tokens.

Prompts are headlab's plain facts, "The capital of France was", or repeated random tokens where the tokenizer does not
know the words. The paper shows GPT-2 medium by example and in its abstract gives no figure, so its claims stand beside
ours in words. Chance is the same count for tokens of another prompt.
"""

from __future__ import annotations

import numpy as np
from common import Figure, is_model, main

import headlab as hl
from headlab.parameters.circuits import circuits
from headlab.parameters.on_prompts.disruption_effects import behaviours
from headlab.parameters.on_prompts.visit import Visit, visit

GPT2_MEDIUM = "gpt2-medium"
CLAIM = "heads and memory values project to tokens that show the flow of information (abstract)"
HEADS, TOKENS = 10, 10


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    asked = {one.name: one for one in behaviours(model, max(n_prompts, 2), seed=seed)}
    about = asked.get("facts") or asked["repeated tokens"]
    made = circuits(model)
    shown = [visit(model, ids, n_heads=HEADS, k=TOKENS, using=made) for ids in about.prompts]
    pairs = zip(shown, about.prompts, strict=True)
    attended = [main_source(one, model.tokens(ids)[0].tolist()) for one, ids in pairs]
    predicted = [int(model.logits(ids)[0, -1].argmax()) for ids in about.prompts]
    others = np.roll(np.arange(len(shown)), 1)
    same = is_model(model, GPT2_MEDIUM)
    figures = []

    def add(what: str, mine: float, chance: float, published: str | None = None) -> None:
        note = f"in the top {TOKENS} of {HEADS} heads, {len(shown)} prompts ({about.name}); chance {chance:.3g}"
        whose = GPT2_MEDIUM if published else ""
        figures.append(Figure(what, mine, published, whose, same and bool(published), note))

    for what, kind in (("head", "head"), ("value of its main source", "value")):
        mine, chance = (
            np.mean([
                holds(shown[at], head, kind, attended[source].get(head, -1))
                for at, source in enumerate(sources) for head in shown[at].heads
            ])
            for sources in (range(len(shown)), others)
        )  # fmt: skip
        published = CLAIM if kind == "head" else None
        add(
            f"{what} shows the token attended to most, share", float(mine), float(chance), published
        )
    mine, chance = (
        np.mean([holds(shown[at], head, "head", predicted[source])
                 for at, source in enumerate(sources) for head in shown[at].heads])
        for sources in (range(len(shown)), others)
    )  # fmt: skip
    add("head shows the model's prediction, share", float(mine), float(chance))
    logits = [one.vectors.query("what == 'head'")["norm"] for one in shown]
    figures.append(Figure("norm of the longest head over the tenth, median",
                          float(np.median([norms.max() / norms.min() for norms in logits]))))  # fmt: skip
    return figures


def main_source(one: Visit, ids: list[int]) -> dict[tuple[int, int], int]:
    """The token each head attends to most."""
    rows = one.vectors.query("what == 'value'").sort_values("weight", kind="stable")
    return {(row.layer, row.head): ids[row.source] for row in rows.itertuples()}


def holds(one: Visit, head: tuple[int, int], kind: str, token: int) -> bool:
    """Whether a token is among the top ones of a head's vector, or of the value it attends to most."""
    rows = one.tokens.query("what == @kind and side == 'top'")
    rows = rows[(rows["layer"] == head[0]) & (rows["head"] == head[1])]
    first = rows["vector"].min()
    return token in set(rows.loc[rows["vector"] == first, "token"])


if __name__ == "__main__":
    main(run, __doc__)
