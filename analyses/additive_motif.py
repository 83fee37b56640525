"""Additive motif (Chughtai, Cooney and Nanda 2024): heads that add the answer from subject, relation or both.

Facts are headlab's plain ones, "The capital of France was", with the relation's and the subject's words as spans. Each
head's direct logit attribution of the answer (its first token, less the mean logit over the vocabulary) is split by
source token. The paper's claims could be checked in its abstract alone; the ratio that sorts heads is unverified.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from common import Figure, is_model, main

import headlab as hl
from headlab.attention import Head
from headlab.causal.attribution.direct import direct_logit_attribution
from headlab.causal.attribution.sources import by_source
from headlab.errors import PromptError
from headlab.roles.base import Probing
from headlab.tasks import temporal_facts
from headlab.tasks.needles import token_span

PYTHIA = "pythia-2.8b"
CLAIM = "four mechanisms, each raising the answer: subject, relation and mixed heads, MLPs"
FACT = re.compile(r"In \{time\}, (?P<text>(?:an?|the) (?P<relation>.+?) of (?P<subject>.+) was)")
RATIO, LEAST, FEWEST = 10.0, 0.1, 3


@dataclass(frozen=True)
class Fact:
    """A prompt in tokens with its spans, and the first token of the answer."""

    ids: list[int]
    answer: int
    relation: tuple[int, int]
    subject: tuple[int, int]


def facts(model: hl.Model) -> Iterator[Fact]:
    """Those whose every word the tokenizer knows."""
    tokenizer, bos = model.tokenizer, Probing(model).bos
    for fact in temporal_facts().invariant:
        found = FACT.fullmatch(fact.template)
        if found is None:
            continue
        start = found.start("text")
        text = found["text"][0].upper() + found["text"][1:]
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoded["input_ids"]
        whole = tokenizer(f"{text} {fact.answer}", add_special_tokens=False)["input_ids"]
        if whole[: len(ids)] != ids or len(whole) == len(ids) or tokenizer.unk_token_id in ids:
            continue
        shift = int(bos is not None)
        spans = []
        try:
            for name in ("relation", "subject"):
                low, high = (at - start for at in found.span(name))
                first, stop = token_span(encoded["offset_mapping"], low, high, text)
                spans.append((first + shift, stop + shift))
        except PromptError:  # a token straddles two words
            continue
        yield Fact([bos] * shift + ids, whole[len(ids)], *spans)


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model; the facts are the same whatever the seed, which picks among them."""
    known = list(facts(model)) if model.tokenizer is not None else []
    if len(known) < FEWEST:
        note = f"not measurable: the tokenizer knows the words of {len(known)} facts"
        return [Figure("facts", len(known), note=note)]
    order = np.random.default_rng(seed).permutation(len(known))[: max(n_prompts, FEWEST)]
    chosen = [known[at] for at in order]
    prompts, answers = [fact.ids for fact in chosen], [fact.answer for fact in chosen]
    whole = direct_logit_attribution(model, prompts, answers, centred=True)
    spans = {name: [getattr(fact, name) for fact in chosen] for name in ("relation", "subject")}
    split = by_source(model, prompts, answers, spans=spans, centred=True)
    table = split.classify(ratio=RATIO, least=LEAST)
    same = is_model(model, "EleutherAI/pythia-2.8b", "EleutherAI/pythia-2.8b-deduped")
    figures = [
        Figure(
            "facts",
            len(chosen),
            note=f"mean centred logit of the answer {whole.total.mean():.3g}; heads count that add "
            f"{LEAST} logits or more from either span",
        )
    ]
    raised = []
    for kind in ("subject", "relation", "mixed"):
        rows = table[table["kind"] == kind]
        rows = rows.loc[
            rows[["subject", "relation"]].max(axis=1).sort_values(ascending=False).index
        ]
        named = [str(Head(int(row.layer), int(row.head))) for row in rows.itertuples()]
        shown = ", ".join(named[:6]) + (" …" if len(named) > 6 else "")
        note = f"ratio {RATIO:g} (unverified): {shown or 'none'}"
        figures.append(Figure(f"{kind} heads", len(named), note=note))
        place = (slice(None), rows["layer"].to_numpy(int), rows["head"].to_numpy(int))
        raised.append(split.heads[place].sum(1))
    raised.append(whole.of("mlp").sum(0))
    named = ("subject heads", "relation heads", "mixed heads", "MLPs")
    for name, values in zip(named, raised, strict=True):
        figures.append(Figure(f"{name}, logits added to the answer", float(values.mean())))
    positive = np.stack(raised) > 0
    figures.append(Figure("mechanisms that raise the answer on average",
                          int((np.stack(raised).mean(1) > 0).sum()), CLAIM, PYTHIA, same))  # fmt: skip
    share = float(positive.all(0).mean())
    figures.append(Figure("facts whose answer all four raise, share", share))
    return figures


if __name__ == "__main__":
    main(run, __doc__)
