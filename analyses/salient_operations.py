"""Salient operations: Elhelo and Geva 2025, Inferring functionality of attention heads from their parameters (MAPS).

For every head, the 30 tokens it turns most and what it turns them into; the share of heads whose mappings have a
pattern. The paper asks GPT-4o and finds one in 60 to 96 % of the heads of its models (from memory, unverified). Ours
asks rules over letters and word lists, which see spelling and listed facts but no meaning: another measure. The same
rules on the same heads' mappings of random tokens say how much of it is chance; since salient tokens resemble each
other, a class of sources is soon found, and patterns from source to target are the telling ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from common import Figure, main

import headlab as hl
from headlab.parameters.describe import Description
from headlab.parameters.salient import SalientOperations, salient_operations

PUBLISHED, MODELS = "0.60–0.96", "the paper's models"
#: Names of patterns that are listed, the most frequent first.
SHOWN = 6


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model; no prompt is run, so ``n_prompts`` is not used."""
    salient = salient_operations(model, seed=seed)
    random = salient_operations(model, sources="random", seed=seed)
    raised = [each.promotes for each in salient]
    return [
        Figure(
            "share of heads with a pattern in what they raise",
            _share(raised),
            PUBLISHED,
            MODELS,
            note="published: GPT-4o, from memory; ours: rules that see no meaning",
        ),
        Figure("the same of random tokens in place of salient ones", _share_of(random)),
        Figure(
            "share of heads with a pattern from source to target",
            _share(raised, "mapping"),
            note="other patterns are of sources or of targets alone",
        ),
        Figure("the same of random tokens", _share_of(random, "mapping")),
        Figure(
            "share of heads with a pattern in what they raise or lower",
            _share_either(salient),
        ),
        Figure("the same of random tokens", _share_either(random)),
        Figure("most frequent patterns", _frequent(raised)),
        Figure(
            "clusters of a head's 30 salient tokens, mean over heads",
            float(np.mean([len(each.clusters) for each in salient])),
        ),
        *_clear_examples(salient),
    ]


def _has(found: Description, sort: str) -> bool:
    return any(each.claimed and sort in ("", each.sort) for each in found.candidates)


def _share(found: Sequence[Description], sort: str = "") -> float:
    return float(np.mean([_has(each, sort) for each in found]))


def _share_of(found: Sequence[SalientOperations], sort: str = "") -> float:
    return _share([each.promotes for each in found], sort)


def _share_either(found: Sequence[SalientOperations]) -> float:
    return float(np.mean([each.promotes.clear or each.suppresses.clear for each in found]))


def _frequent(found: Sequence[Description]) -> str:
    named = Counter(
        str(pattern) for each in found for pattern in each.candidates if pattern.claimed
    )
    return "; ".join(f"{name} ({count})" for name, count in named.most_common(SHOWN)) or "none"


def _clear_examples(found: Sequence[SalientOperations], n: int = 3) -> list[Figure]:
    """The heads whose mapping from source to target is plainest."""
    ranked = []
    for each in found:
        for direction, what in (("raises", each.promotes), ("lowers", each.suppresses)):
            best = next((p for p in what.candidates if p.claimed and p.sort == "mapping"), None)
            if best is not None:
                ranked.append((best.null - best.share, str(each.head), direction, best))
    ranked.sort(key=lambda row: row[:3])
    return [
        Figure(
            f"{head} {direction}: {best}", best.share, note=f"share of rows; null {best.null:.2f}"
        )
        for _, head, direction, best in ranked[:n]
    ]


if __name__ == "__main__":
    main(run, __doc__)
