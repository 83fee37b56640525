"""Guided decoding (Chuang et al. 2024): of several sampled continuations, keep the one the lens finds best borne out.

A chunk at a time, ``n_candidates`` continuations are sampled, each is scored by the mean of its lookback ratios, and
the one of highest probability is kept; the paper's defaults are chunks of 8 tokens, 8 candidates, top-p 0.95 and
temperature 0.9. Decoding ends with an end-of-sequence token in the chosen chunk.

The prompt is run once: every chunk is sampled from the key/value cache of what was chosen before, repeated for the
candidates, and ratios are captured while it is sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headlab.arguments import count, finite_number, seed_number
from headlab.attention import cache_argument
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.lookback.examples import Example, tokenised
from headlab.lookback.lens import Lens, ends_of
from headlab.lookback.ratios import masses, of_trace

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

CHUNK, CANDIDATES, TOP_P, TEMPERATURE = 8, 8, 0.95, 0.9


@dataclass(frozen=True)
class Guided:
    """A guided continuation.

    Attributes:
        text: The continuation.
        ids: Its token ids.
        chunks: One row per candidate of every chunk: ``chunk``, ``candidate``, ``text``, ``probability``, ``chosen``.
    """

    text: str
    ids: tuple[int, ...]
    chunks: pd.DataFrame

    def __str__(self) -> str:
        return self.text


def generate(
    model: Model,
    lens: Lens,
    prompt: str | tuple[int, ...],
    max_new_tokens: int = 64,
    *,
    cue: str = "",
    chunk: int = CHUNK,
    n_candidates: int = CANDIDATES,
    top_p: float = TOP_P,
    temperature: float = TEMPERATURE,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Guided:
    """Continue a prompt, chunk by chunk, by what the lens finds best borne out.

    Args:
        model: The model.
        lens: A lens of this model.
        prompt: One prompt.
        max_new_tokens: Tokens to add at most.
        cue: The prompt's end that counts as new; see :class:`Example`.
        chunk: Tokens of a chunk.
        n_candidates: Continuations to choose from.
        top_p: Nucleus of the sampling.
        temperature: Temperature of the sampling.
        seed: Seed of the sampling: the same seed gives the same text.
        tell: Told each chosen chunk.

    Raises:
        PlanError: The model has another shape than the lens, edits are in force, or an argument is out of range.
        PromptError: The prompt cannot be used, or the continuation would not fit the context.
    """
    import pandas as pd

    lens.check_model(model)
    if model.edited:
        raise PlanError(
            "guided decoding runs every chunk as a new prompt, so edits and methods of steering would act at other "
            "tokens than in generation; end their block first"
        )
    chunk, n_candidates = count(chunk, "chunk"), count(n_candidates, "n_candidates")
    most = count(max_new_tokens, "max_new_tokens")
    if not 0 < finite_number(top_p, "top_p") <= 1:
        raise PlanError(f"top_p={top_p} must be above 0 and at most 1")
    if finite_number(temperature, "temperature") <= 0:
        raise PlanError(f"temperature={temperature} must be above 0")
    start = tokenised(model, Example(prompt, (0,), cue=cue))
    ids = start.ids[None, : start.start].to(model.device)
    n_prompt = ids.shape[1]
    if model.spec.max_context is not None and n_prompt + most > model.spec.max_context:
        raise PromptError(
            f"{n_prompt} tokens and {most} new ones do not fit the context of {model.spec.max_context} of {model.name}"
        )
    seeds = np.random.SeedSequence(seed_number(seed)).generate_state(-(-most // chunk))
    chosen, rows = ids, []
    options, cache = _filled(model, ids)
    contexts = torch.full((n_candidates,), start.context)
    for at, own in enumerate(seeds):
        wanted = min(chunk, most - (chosen.shape[1] - n_prompt))
        cache.batch_repeat_interleave(n_candidates)
        made = model.generate(
            chosen.repeat(n_candidates, 1),
            max_new_tokens=wanted,
            keep=[masses(contexts, chosen.shape[1] + wanted, queries="generated")],
            do_sample=True,
            seed=int(own),
            top_p=top_p,
            top_k=0,
            temperature=temperature,
            **options,
        )
        new = made.ids
        positions = chosen.shape[1] - 1 + torch.arange(new.shape[1])
        assert made.trace is not None
        ratios = of_trace(made.trace, contexts, positions.expand(n_candidates, -1))
        lengths = (new >= 0).sum(1).tolist()
        means = [
            found[:length].reshape(length, -1).mean(0)
            for found, length in zip(ratios, lengths, strict=True)
        ]
        probability = lens.probability(np.stack(means).astype(np.float64))
        best = int(probability.argmax())
        for candidate, (tokens, p) in enumerate(zip(new, probability, strict=True)):
            rows.append(
                {
                    "chunk": at,
                    "candidate": candidate,
                    "text": model.text(tokens, special=False),
                    "probability": float(p),
                    "chosen": candidate == best,
                }
            )
        tell(str(rows[at * n_candidates + best]["text"]))
        kept = new[best][new[best] >= 0]
        chosen = torch.cat([chosen, kept[None]], 1)
        if len(kept) < wanted or int(kept[-1]) in ends_of(model):
            break
        cache.batch_select_indices(torch.tensor([best], device=model.device))
    answer = chosen[0, n_prompt:]
    return Guided(model.text(answer, special=False), tuple(map(int, answer)), pd.DataFrame(rows))


def _filled(model: Model, ids: Tensor) -> tuple[dict[str, Any], Any]:
    """A cache of all but the prompt's last token, which generation runs itself, and the option that hands it over.

    Raises:
        UnsupportedError: The model keeps no cache that can be repeated.
    """
    from transformers import DynamicCache

    name = cache_argument(model.module)
    if name is None or ids.shape[1] < 2:
        raise UnsupportedError(
            f"{model.name} keeps no key/value cache, or the prompt is a single token; guided decoding needs both"
        )
    cache = DynamicCache(config=model.module.config)
    model.forward(ids[:, :-1], last=True, use_cache=True, **{name: cache})
    return {name: cache}, cache
