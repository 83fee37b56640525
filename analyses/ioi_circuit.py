"""The circuit of indirect object identification by path patching: Wang et al. 2023, Interpretability in the wild.

Heads whose direct path to the logits matters at END come first: name movers (negative ones where patching helps). Heads
that act through name movers' queries are S-inhibition heads; those that act through S-inhibition heads' values at S2
are duplicate-token and induction heads, told apart by where S2 looks. Runs are clean, senders corrupted by three other
names (ABC); effects are shares of the clean run's lead over the corrupted one, negative where patching hurts.
Fewer than 15 prompts cannot make one head of hundreds significant.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from common import Figure, is_model, main

import headlab as hl
from headlab.causal import Effects, path_patch
from headlab.causal.metrics import logit_difference
from headlab.errors import PromptError
from headlab.roles import Probing
from headlab.tasks import IOIPrompt, ioi_prompts

GPT2 = "GPT-2 small"
#: The paper's 26 heads.
ROLES = {
    "name mover": "L9H6, L9H9, L10H0",
    "backup name mover": "L9H0, L9H7, L10H1, L10H2, L10H6, L10H10, L11H2, L11H9",
    "negative name mover": "L10H7, L11H10",
    "S-inhibition": "L7H3, L7H9, L8H6, L8H10",
    "induction": "L5H5, L5H8, L5H9, L6H9",
    "duplicate token": "L0H1, L0H10, L3H0",
    "previous token": "L2H2, L4H11",
}
LISTED = {name for names in ROLES.values() for name in names.split(", ")}
#: Heads of a stage that the next one takes as receivers, and the least share of the lead that counts.
MOST, LEAST = 4, 0.02


def attention(model: hl.Model, prompts: list[IOIPrompt], name: str, who: str, to: str) -> float:
    """A head's mean attention from one place to another."""
    queries = torch.tensor([[prompt.spans[who][0]] for prompt in prompts])
    keep = hl.keep.rows(queries=queries, heads=name)
    rows = model.trace([list(p.ids) for p in prompts], keep, logits="none").rows[:, 0, 0, 0]
    return float(np.mean([row[p.spans[to][0]] for row, p in zip(rows, prompts, strict=True)]))


def copies(model: hl.Model, prompts: list[IOIPrompt], name: str, sign: int) -> float:
    """How often ±OV, reading the stream after block 0 at a name, puts that name among its top 5 tokens.

    The paper reads through block 1's norm; here each head reads through its own.
    """
    ids, (head,) = [list(prompt.ids) for prompt in prompts], hl.parse_heads(name, model.spec)
    after = model.trace(ids, hl.keep.tensors("resid_post", layers=[0]), logits="none")
    stream = after.tensor("resid_post", 0).nan_to_num()[:, :, None]
    with model.edit(hl.apply(f"{head.layer}.*", lambda x, where: stream, "resid_pre")):
        trace = model.trace(ids, hl.keep.tensors("v", heads=name), logits="none")
    weights, hits = model.weights, []
    x = sign * trace.of_head("v", head) @ weights.W_O(head.layer)[head.head]
    with torch.no_grad():
        x = x if weights.final_norm is None else weights.final_norm(x)
    for row, p in zip(x, prompts, strict=True):
        for who, token in (("IO", p.io), ("S1", p.subject), ("S2", p.subject)):
            hits.append(token in (row[p.spans[who][0]] @ weights.W_U).topk(5).indices.tolist())
    return float(np.mean(hits))


def report(role: str, effects: Effects, sign: int, same: bool) -> tuple[list[str], list[Figure]]:
    """The strongest heads with an effect of this sign at q ≤ 0.05, and what to print of them."""
    lead = effects.clean.mean() - effects.corrupted.mean()
    rows = effects.frame.sort_values("effect", ascending=sign < 0)
    rows = rows[(rows["q_value"] <= 0.05) & (sign * rows["effect"] / lead >= LEAST)]
    shown = {
        f"L{row.layer}H{row.head}": f"{row.effect / lead:+.0%} [{row.ci_low / lead:+.0%}, {row.ci_high / lead:+.0%}]"
        for row in rows.head(MOST).itertuples()
    }
    rng, others = np.random.default_rng(0), effects.frame.drop(rows.index)["effect"] / lead
    draws = [rng.choice(others, max(1, len(shown)), replace=False).mean() for _ in range(1000)]
    random = f"{np.mean(draws):+.1%}, 95% of draws within ±{np.quantile(np.abs(draws), 0.95):.1%}"
    published = ", ".join(ROLES[part] for part in role.split(" and "))
    hits = len(set(shown) & set(published.split(", ")))
    text = ", ".join(f"{name} {value}" for name, value in shown.items()) or "none"
    note = f"{len(rows)} at q ≤ 0.05; {hits} of those shown are in the paper's list" * same
    return list(shown), [
        Figure(f"{role} heads", text, published, GPT2, same, note or f"{len(rows)} at q ≤ 0.05"),
        Figure(f"{role}: as many random other heads", random),
    ]


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    same = is_model(model, "gpt2", "openai-community/gpt2")
    try:
        drawn = ioi_prompts(model.tokenizer, 4 * n_prompts, seed, Probing(model).bos)
    except PromptError as error:
        return [Figure("the IOI circuit", None, note=f"not measurable: {error}")]
    lengths = Counter(len(prompt.ids) for prompt in drawn)  # few lengths: fewer, larger batches
    drawn = sorted(drawn, key=lambda prompt: (-lengths[len(prompt.ids)], len(prompt.ids)))
    prompts, figures, found = drawn[:n_prompts], list[Figure](), set[str]()
    pairs = [list(p.ids) for p in prompts], [list(p.corrupted) for p in prompts]
    metric = logit_difference([p.io for p in prompts], [p.subject for p in prompts])

    def paths(receivers: str, who: str) -> Effects:
        places = [[p.spans[who][0]] for p in prompts]
        return path_patch(model, *pairs, metric, receivers=receivers, positions=places, seed=seed)

    def stage(role: str, effects: Effects, sign: int, looks: list[tuple[str, str]]) -> list[str]:
        names, rows = report(role, effects, sign, same)
        found.update(names)
        measures = {
            f"attention {a} → {b}": [attention(model, prompts, h, a, b) for h in names]
            for a, b in looks
        }
        if role.endswith("mover"):
            for way in (1, -1):
                what = f"copy score of {'OV' if way > 0 else '−OV'}"
                measures[what] = [copies(model, prompts, h, way) for h in names]
        for what, values in measures.items():
            text = ", ".join(f"{h} {value:.2f}" for h, value in zip(names, values, strict=True))
            theirs = "> 0.95" if role == "name mover" and what.endswith(" OV") else None
            rows.append(
                Figure(f"{role}: {what}", text or "none", theirs, GPT2 if theirs else "", same)
            )
        figures.extend(rows)
        return names

    logits = paths("logits", "END")
    lead, wins = float(logits.clean.mean()), float((logits.clean > 0).mean())
    figures.append(Figure("logit difference (nats)", lead, 3.56, GPT2, same, "headlab's prompts"))
    figures.append(Figure("prompts whose IO beats S", wins, 0.993, GPT2, same, "headlab's prompts"))
    movers = stage("name mover", logits, -1, [("END", "IO"), ("END", "S2")])
    stage("negative name mover", logits, +1, [("END", "IO"), ("END", "S2")])
    inhibition: list[str] = []
    if movers:
        through = paths(", ".join(f"{name}:q" for name in movers), "END")
        inhibition = stage("S-inhibition", through, -1, [("END", "S2")])
    if inhibition:
        through = paths(", ".join(f"{name}:v" for name in inhibition), "S2")
        stage("duplicate token and induction", through, -1, [("S2", "S1"), ("S2", "S1+1")])
    if same:
        both = len(found & LISTED)
        text = f"{both}/{len(found)}, {both}/{len(LISTED)}"
        figures.append(Figure("heads shown: precision, recall of the 26", text, "1, 1", GPT2, True))
    return figures


if __name__ == "__main__":
    main(run, __doc__)
