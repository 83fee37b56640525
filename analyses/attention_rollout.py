"""Attention rollout and flow (Abnar and Zuidema 2020): do they rank tokens as blanking them out does?

The paper's table: Spearman correlation between each score of the input tokens and how much the output changes when a
token is blanked out, for an encoder of six layers trained on verb number. Here the model is a decoder, the output the
probability of its own next token after each of headlab's sentences, the blank the tokenizer's unknown token. In a
decoder rollout and flow drift to the earliest tokens, while its output rests on the latest, so the sign may turn: the
paper's figures are no target. The first token takes most of a decoder's attention, so rollout and flow stand with it
left out as well.
"""

from __future__ import annotations

import numpy as np
import torch
from common import Figure, main
from scipy.stats import spearmanr

import headlab as hl
from headlab.attention import keep
from headlab.causal.attribution.rollout import (
    attention_flow,
    attention_rollout,
)
from headlab.roles.base import Probing
from headlab.tasks import data_folder, read_records
from headlab.tasks.dependencies import DEPENDENCY_SCHEMA

VERB_NUMBER = "a 6-layer encoder trained on verb number"
#: Correlation by score: at the third layer of the paper's six, and at the last.
PUBLISHED = {"raw": (-0.11, 0.29), "rollout": (0.51, 0.71), "flow": (0.70, 0.70)}
FEWEST = 3


def sentences(model: hl.Model) -> list[list[int]]:
    """Sentences without their last word and full stop, whose every word the tokenizer knows."""
    tokenizer, bos = model.tokenizer, Probing(model).bos
    records = read_records(data_folder() / "dependencies.jsonl", DEPENDENCY_SCHEMA, "syntactic")
    texts = [" ".join(record["words"][:-2]) for record in records if len(record["words"]) > 6]
    found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    begin = [] if bos is None else [bos]
    return [begin + ids for ids in found if tokenizer.unk_token_id not in ids]


def blank_outs(model: hl.Model, ids: list[int], blank: int) -> np.ndarray:
    """By how much the probability of the likeliest next token changes when each token is blanked out."""
    rows = torch.tensor([ids] * (len(ids) + 1))
    places = torch.arange(len(ids))
    rows[places + 1, places] = blank
    logits = model.trace(rows, logits="last").logits
    assert logits is not None
    probability = logits[:, -1].float().softmax(-1)
    likeliest = int(probability[0].argmax())
    return (probability[1:, likeliest] - probability[0, likeliest]).abs().cpu().numpy()


def scores(
    model: hl.Model, ids: list[int], layers: list[int], without: bool
) -> dict[str, np.ndarray]:
    """Scores of the input tokens from the last position, [layer, token]."""
    kept = model.trace([ids], keep=keep.rows(queries=[-1], layers=layers), logits="none")
    rows = kept.rows[0].double().nanmean(1)[:, 0].cpu().numpy()
    rolled = attention_rollout(model, [ids], without_first=without).values[layers, -1]
    flow = attention_flow(model, [ids], layers=layers, queries=[-1], without_first=without)
    traced = {"rollout": rolled, "flow": flow.values[:, 0]}
    return traced if without else {"raw": rows} | traced


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    spec, tokenizer = model.spec, model.tokenizer
    if any(facts.stack != "decoder" for facts in spec.layers):
        return [Figure("sentences", 0, note="not measurable: the model is no decoder")]
    known = sentences(model) if tokenizer is not None else []
    blank = None if tokenizer is None else tokenizer.unk_token_id
    blank = getattr(tokenizer, "eos_token_id", None) if blank is None else blank
    if len(known) < FEWEST or blank is None:
        note = f"not measurable: the tokenizer knows the words of {len(known)} sentences"
        return [Figure("sentences", len(known), note=note)]
    order = np.random.default_rng(seed).permutation(len(known))[: max(n_prompts, FEWEST)]
    layers = [(spec.n_layers - 1) // 2, spec.n_layers - 1]
    first = int(
        Probing(model).bos is not None
    )  # what begins every sequence is no word to blank out
    found: dict[tuple[str, bool], list[list[float]]] = {}
    for at in order:
        ids = known[at]
        wanted = blank_outs(model, ids, blank)[first:]
        for without in (False, True):
            for name, values in scores(model, ids, layers, without).items():
                pairs = [spearmanr(row[first:], wanted).statistic for row in values]
                found.setdefault((name, without), []).append(pairs)
    figures = [Figure("sentences", len(order), note="correlations are means over sentences")]
    for (name, without), pairs in found.items():
        means = np.nanmean(np.array(pairs), 0)
        for where, mean, published in zip(("middle", "last"), means, PUBLISHED[name], strict=True):
            what = f"{name}, {where} layer, Spearman against blank-out"
            if without:
                figures.append(Figure(f"{what}, first token left out", float(mean)))
            else:
                figures.append(Figure(what, float(mean), published, VERB_NUMBER))
    return figures


if __name__ == "__main__":
    main(run, __doc__)
