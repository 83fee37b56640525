"""Sparse attention decomposition and tracing on IOI prompts: Franco & Crovella 2024.

How few singular directions make up the scores of heads that fire, beside random bases; the heads that look from the
prompt's end to the indirect object, traced back; and what taking the strongest signal off does. The paper: GPT-2 small,
256 IOI prompts without BOS. The circuit beside ours is Wang et al.'s, whose name movers the paper traces too.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd
from common import Figure, is_model, main

import headlab as hl
from headlab.attention import Head, keep, parse_heads
from headlab.errors import HeadlabError
from headlab.parameters.circuits import Circuits, circuits
from headlab.parameters.on_prompts.signals import edit_signal
from headlab.parameters.on_prompts.sparse_scores import PromptScores
from headlab.parameters.on_prompts.tracing import sparsity, trace_heads
from headlab.statistics import sign_flip_p
from headlab.tasks import IOIPrompt, ioi_prompts

GPT2 = "GPT-2 small"
MOVERS = ("L9H9", "L10H0", "L9H6")
S_INHIBITION = ("L7H3", "L7H9", "L8H6", "L8H10")
_CUT = 8


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    same = is_model(model, "gpt2", "openai-community/gpt2")
    try:
        drawn = ioi_prompts(model.tokenizer, n_prompts, seed, None if same else model.bos)
        made = circuits(model)
        ids = [list(prompt.ids) for prompt in drawn]
        movers = name_movers(model, drawn)
        terms = sparsity(made, ids, seed=seed)
        graph = trace_heads(made, ids, movers, destination=-1, depth=2)
    except HeadlabError as error:
        return [Figure("sparse decomposition of scores", None, note=f"not measurable: {error}")]
    figures = [of_terms(terms, seed)] if len(terms) else []
    named = [str(head) for head in movers]
    pairs = graph.frame
    into = pairs[pairs["head"].isin(named) & (pairs["side"] == "destination")]
    best = into.groupby("upstream")["n_edges"].sum().nlargest(6)
    published = ", ".join(MOVERS), GPT2, same, "published: name movers"
    what = "heads that look most from the end to the indirect object"
    figures.append(Figure(what, ", ".join(named), *published))
    shown = ", ".join(f"{name} ({n})" for name, n in best.items()) or "none"
    published = ", ".join(S_INHIBITION), GPT2, same, "published: S-inhibition heads"
    figures.append(Figure("upstream of these at the end (edges)", shown, *published))
    for row in pairs.head(5).to_dict("records"):
        note = (
            f"{row['n_edges']} of {row['n']} prompts, 95 % {row['ci_low']:.2f} … {row['ci_high']:.2f}; the same head "
            f"at other positions {row['null_mean']:.2f}, q {row['q_value']:.2g}"
        )
        what = f"{row['upstream']} → {row['head']} ({row['side']}), share of the score"
        figures.append(Figure(what, row["share"], note=note))
    return figures + of_cuts(made, graph.edges, ids, seed)


def name_movers(model: hl.Model, drawn: tuple[IOIPrompt, ...], n: int = 3) -> list[Head]:
    """The heads that attend most from the last token to the indirect object."""
    mass = []
    for prompt in drawn:
        trace = model.trace([list(prompt.ids)], keep=keep.rows(queries=[-1]), logits="none")
        mass.append(trace.rows[0, :, :, 0, prompt.spans["IO"][0]].float().cpu().numpy())
    mean = np.nan_to_num(np.mean(mass, 0))
    places = np.argsort(-mean, axis=None)[:n]
    return [Head(*map(int, np.unravel_index(at, mean.shape))) for at in places]


def of_terms(terms: pd.DataFrame, seed: int) -> Figure:
    """How few terms make up scores."""
    per_prompt = terms.groupby("prompt")[["effective", "null_effective"]].mean()
    fewer = (per_prompt["null_effective"] - per_prompt["effective"]).to_numpy()
    heads = len(terms[["layer", "head"]].drop_duplicates())
    middle = terms.median(numeric_only=True)
    note = (
        f"median; {len(terms)} firings of {heads} heads; random bases {middle['null_terms']:.1f} of "
        f"{terms['rank'].max()}; participation ratio {middle['effective']:.1f}, random "
        f"{middle['null_effective']:.1f}, p {sign_flip_p(fewer[:, None], seed)[0]:.2g}"
    )
    return Figure("selected terms of a score", float(terms["n_terms"].median()), note=note)


def of_cuts(made: Circuits, edges: pd.DataFrame, ids: list[list[int]], seed: int) -> list[Figure]:
    """Take the most frequent edge's signal off, prompt by prompt."""
    between = edges[edges["null"].notna()]
    if not len(between):
        return [Figure("cutting a signal", None, note="no edge between heads was found")]
    counted = Counter(zip(between["upstream"], between["head"], between["side"], strict=True))
    (early, late, side), _ = counted.most_common(1)[0]
    rows = between.query("upstream == @early and head == @late and side == @side")
    rows = rows.drop_duplicates("prompt").head(_CUT).to_dict("records")
    head = parse_heads(late, made.model.spec)[0]
    figures = []
    for how in ("stream", "input"):
        found = []
        for row in rows:
            scores = PromptScores(made, ids[row["prompt"]])
            firing = scores.firing(head, row["destination"], row["source"])
            found.append(edit_signal(scores, firing, early, side, how=how, controls=5, seed=seed))  # type: ignore[arg-type]
        effect = np.array([one.effect for one in found])
        note = (
            f"{np.mean([one.firing.attention for one in found]):.2f} before, "
            f"{np.mean([one.controls.mean() for one in found]):.2f} under random directions; {len(found)} prompts, "
            f"p {sign_flip_p(-effect[:, None], seed)[0]:.2g}"
        )
        what = f"attention of {late} with the signal of {early} ({side}) taken off, {how}"
        figures.append(Figure(what, float(np.mean([one.attention for one in found])), note=note))
    return figures


if __name__ == "__main__":
    main(run, __doc__)
