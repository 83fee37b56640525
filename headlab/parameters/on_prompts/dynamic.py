"""Whether heads do on prompts what their weights say (Elhelo and Geva 2025, the check of MAPS by inference).

Prompts name a source s of a relation: "The tale of Spain speaks of". For every head the hit rate of φ is taken again,
from what the head writes at the last position, z · W_O · W_U with the same k:

* **with context**: z as it is, a mixture of what the head attends to;
* **without context**: attention of the last position is forced onto the source token alone, with the stream as in the
  unchanged run: the paper puts the clean z of every head and layer in for what the forced ones give, so that no layer
  sees what an earlier one would have done. Then z is the head's value at the source's position in the clean run, bias
  included, and nothing needs to be forced: this is what is read here. A test does it the long way.

The correlation is Pearson's, over heads × templates, between the static φ and the dynamic rate. Templates of one head
are no independent points, so its interval comes from a bootstrap over heads; no p-value is given. Edits in force
apply to the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headlab.attention import Head, HeadsLike, keep, parse_heads
from headlab.errors import PlanError, UnsupportedError
from headlab.parameters.maps_result import Maps
from headlab.parameters.on_prompts.relation_prompts import (
    SourcePrompts,
    Tell,
    check_templates,
    chunks,
    source_prompts,
)
from headlab.parameters.relation_significance import hits_of
from headlab.parameters.row_ends import Direction, matrices_to_vocabulary, row_ends
from headlab.statistics import RESAMPLES
from headlab.tasks.relations import GENERAL_TEMPLATES, Relation, TokenPairs, token_pairs
from headlab.tasks.relations import relations as shipped_relations

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

CONTEXTS = ("without_context", "with_context")
_DOING: dict[Direction, str] = {"promotes": "promote", "suppresses": "suppress"}


@dataclass(frozen=True, repr=False)
class DynamicScores:
    """Static scores of a relation beside those of prompts; made by :func:`dynamic_scores`.

    Attributes:
        frame: One row per head and template: ``relation``, ``layer``, ``head``, ``template``, ``static`` φ,
            ``with_context`` and ``without_context`` hit rates, and ``n``, the pairs whose source came out as one token.
        correlations: One row per context: ``context``, ``r`` (Pearson), its bootstrap interval over heads, ``ci_low``
            to ``ci_high``, ``heads``, ``points`` (heads × templates), ``pairs``; r is NaN where a side does not vary.
        about: Model, relation, direction, k, templates, seed.
    """

    frame: pd.DataFrame
    correlations: pd.DataFrame
    about: dict[str, Any]

    def r(self, context: str) -> float:
        """Pearson's correlation in one context.

        Raises:
            PlanError: There is no such context.
        """
        if context not in CONTEXTS:
            raise PlanError(f"context={context!r:.60} must be {' or '.join(CONTEXTS)}")
        of_context = self.correlations.set_index("context")["r"]
        return float(of_context.loc[context])

    def __repr__(self) -> str:
        lines = [
            f"DynamicScores of {self.about['relation']} in {self.about['model']}: which heads "
            f"{_DOING[self.about['direction']]} the target"
        ]
        lines += [
            f"  {row.context}: r = {row.r:.2f} [{row.ci_low:.2f}, {row.ci_high:.2f}] over {row.points} "
            f"heads × templates, {row.pairs} pairs"
            for row in self.correlations.itertuples()
        ]
        return "\n".join(lines)


@torch.no_grad()
def dynamic_scores(
    model: Model,
    maps: Maps,
    relation: str | Relation,
    *,
    direction: Direction = "promotes",
    templates: Sequence[str] = GENERAL_TEMPLATES,
    heads: HeadsLike | None = None,
    seed: int = 0,
    tell: Tell = lambda text: None,
) -> DynamicScores:
    """Score heads for a relation on prompts and hold that against their static scores.

    Args:
        model: The model the maps are of.
        maps: Its maps, in which the relation and the heads were mapped.
        relation: The relation: one of headlab's by name, or the relation itself.
        direction: ``"promotes"`` counts targets among the k tokens a head raises most, ``"suppresses"`` among the k it
            lowers most; the static score is of the same direction.
        templates: Prompts with ``{source}`` in them.
        heads: The heads to score; by default all that were mapped and can be read.
        seed: Seed of the bootstrap.
        tell: Told how far it is.

    Raises:
        PlanError: The relation or the direction was not mapped, or the maps are of another model.
        HeadError: A head does not exist.
        PromptError: No source comes out as one token in a template.
        UnsupportedError: A head was not mapped.
    """
    import pandas as pd

    given, pairs = mapped_pairs(model, maps, relation)
    used = maps.relation(given.name)
    static = _static(maps, given.name, direction)
    wanted = tuple(static) if heads is None else parse_heads(heads, model.spec)
    missing = [str(head) for head in wanted if head not in static]
    if missing:
        raise UnsupportedError(
            f"there is no static score of {', '.join(missing[:5])}; map these heads first"
        )
    asked = [source_prompts(model, pairs, template) for template in check_templates(templates)]
    n_vocab = int(maps.about["n_vocab"])
    rates = _rates(model, pairs, asked, wanted, direction, used.k, n_vocab, tell)
    frame = pd.concat(
        [
            pd.DataFrame(
                {
                    "relation": given.name,
                    "layer": [head.layer for head in wanted],
                    "head": [head.head for head in wanted],
                    "template": prompts.template,
                    "static": [static[head] for head in wanted],
                    **{context: rates[context][at] for context in CONTEXTS[::-1]},
                    "n": len(prompts.rows),
                }
            )
            for at, prompts in enumerate(asked)
        ],
        ignore_index=True,
    )
    about = {
        "model": model.name,
        "relation": given.name,
        "direction": direction,
        "k": used.k,
        "templates": [prompts.template for prompts in asked],
        "seed": seed,
    }
    return DynamicScores(frame, _correlations(frame, len(wanted), len(pairs.words), seed), about)


def mapped_pairs(model: Model, maps: Maps, relation: str | Relation) -> tuple[Relation, TokenPairs]:
    """A mapped relation and its pairs as the maps took them.

    Raises:
        PlanError: It was not mapped, or the maps are of another model.
    """
    if maps.about["fingerprint"] != model.fingerprint:
        raise PlanError(f"these maps are of {maps.about['model']}, not of {model.name}")
    given = shipped_relations([relation])[0] if isinstance(relation, str) else relation
    pairs = token_pairs(
        given,
        model.tokenizer,
        multi_token=maps.about["multi_token"],
        n_vocab=maps.about["n_vocab"],
    )
    n = maps.relation(given.name).n
    if len(pairs.words) != n:
        raise PlanError(
            f"relation {given.name!r} has {len(pairs.words)} pairs, but the maps have {n} of it; pass the "
            "relation that was mapped"
        )
    return given, pairs


def _static(maps: Maps, relation: str, direction: Direction) -> dict[Head, float]:
    rows = maps.ranked(relation, direction).sort_values(["layer", "head"])
    return {
        Head(int(layer), int(head)): float(score)
        for layer, head, score in zip(rows["layer"], rows["head"], rows["score"], strict=True)
    }


def _rates(
    model: Model,
    pairs: TokenPairs,
    asked: Sequence[SourcePrompts],
    heads: Sequence[Head],
    direction: Direction,
    k: int,
    n_vocab: int,
    tell: Tell,
) -> dict[str, Float[np.ndarray, "template head"]]:
    """Hit rates by context."""
    layers = sorted({head.layer for head in heads})
    seen = []
    for prompts in asked:
        tell(f"dynamic scores of {pairs.relation.name}: {prompts.template}")
        seen.append(last_z_and_source_v(model, prompts, layers))
    z, v = (
        {layer: torch.cat([one[at][layer] for one in seen]) for layer in layers} for at in (0, 1)
    )
    targets = np.concatenate([pairs.targets[list(prompts.rows)].numpy() for prompts in asked])
    ends = np.cumsum([len(prompts.rows) for prompts in asked])[:-1]
    rates = {context: np.empty((len(asked), len(heads))) for context in CONTEXTS}
    for layer in layers:
        tell(f"dynamic scores of {pairs.relation.name}: layer {layer}")
        here = [head for head in heads if head.layer == layer]
        group = model.spec.layers[layer].n_heads // v[layer].shape[1]
        W_O = model.weights.W_O(layer)[[head.head for head in here]]
        W_U = model.weights.W_U[:, :n_vocab]
        matrices = matrices_to_vocabulary(W_O, W_U, z[layer])
        for head, matrix in zip(here, matrices, strict=True):
            rows = {
                "with_context": z[layer][:, head.head],
                "without_context": v[layer][:, head.head // group],
            }
            for context, values in rows.items():
                end = row_ends(values, matrix, k, (direction,))[direction].cpu().numpy()
                hits = np.split(hits_of(end, targets), ends)
                rates[context][:, heads.index(head)] = [part.mean() for part in hits]
    return rates


def last_z_and_source_v(
    model: Model, prompts: SourcePrompts, layers: Sequence[int]
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """By layer, z at the last position [prompt, head, d_value] and v at the source's [prompt, kv_head, d_value]."""
    plan = [
        keep.tensors("z", layers=layers, positions=[-1]),
        keep.tensors("v", layers=layers, positions=[prompts.source_position]),
    ]
    found: dict[str, dict[int, list[Tensor]]] = {"z": {}, "v": {}}
    for _, ids in chunks(prompts.ids):
        trace = model.trace(ids, keep=plan, logits="none")
        for name, by_layer in found.items():
            for layer in layers:
                value = trace.tensor(name, layer)[:, 0]
                wide = torch.promote_types(value.dtype, torch.float32)
                by_layer.setdefault(layer, []).append(value.to(wide))
    z, v = (
        {layer: torch.cat(parts) for layer, parts in found[name].items()} for name in ("z", "v")
    )
    return z, v


def _correlations(frame: pd.DataFrame, n_heads: int, n_pairs: int, seed: int) -> pd.DataFrame:
    import pandas as pd

    draws = np.random.default_rng(seed).integers(n_heads, size=(RESAMPLES, n_heads))
    static = frame["static"].to_numpy().reshape(-1, n_heads)  # [template, head]
    rows = []
    for context in CONTEXTS:
        rate = frame[context].to_numpy().reshape(-1, n_heads)
        drawn = np.array([_pearson(static[:, draw], rate[:, draw]) for draw in draws])
        known = drawn[~np.isnan(drawn)]
        low, high = np.percentile(known, [2.5, 97.5]) if len(known) else (np.nan, np.nan)
        rows.append(
            {
                "context": context,
                "r": _pearson(static, rate),
                "ci_low": low,
                "ci_high": high,
                "heads": n_heads,
                "points": static.size,
                "pairs": n_pairs,
            }
        )
    return pd.DataFrame(rows)


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x.ravel() - x.mean(), y.ravel() - y.mean()
    spread = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y / spread) if spread > 1e-12 else float("nan")


__all__ = ["CONTEXTS", "DynamicScores", "dynamic_scores"]
