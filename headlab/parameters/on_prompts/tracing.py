"""Tracing attention back through a model on prompts (Franco & Crovella 2024, Sparse attention decomposition).

From a head that fires, every earlier part's share of the selected terms of its score
(:mod:`headlab.parameters.on_prompts.sparse_scores`), at its destination and at its source, gives edges; an earlier head
that fires at that position is followed in turn. The paper keeps an edge by a rule we could not read; here one is kept
whose contribution is at least ``min_share`` of the selected terms' sum.

Every earlier head's contribution has a null: the same head's result at the prompt's other positions (the first left
out), in place of its own, through the same directions. Over the prompts on which the later head was traced, whether or
not there was an edge, shares minus nulls get sign-flip p-values, corrected over all pairs of heads and sides.

How sparse scores are is set against a random orthonormal basis of the head's query space in place of Ω's singular
vectors: the same scores, as many terms, no special basis. The paper's count of selected terms is small wherever large
terms cancel, which they do in any basis; so the participation ratio (Σ |t|)² / Σ t² of the terms stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headlab.attention import Head, HeadsLike, parse_heads
from headlab.errors import PlanError
from headlab.parameters.circuits import Circuits, circuits
from headlab.parameters.on_prompts.sparse_scores import (
    SIDES,
    Directions,
    Firing,
    PromptScores,
    Terms,
    sparse_set,
)
from headlab.parameters.on_prompts.trace_graph import (
    EDGE_COLUMNS,
    SHARE_COLUMNS,
    START_COLUMNS,
    TraceGraph,
)

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model, Prompt


def trace_heads(
    model: Model | Circuits,
    prompts: Prompt,
    heads: HeadsLike,
    *,
    destination: int | Sequence[int] | None = None,
    threshold: float = 1.0,
    least_attention: float = 0.5,
    min_share: float = 0.1,
    depth: int = 3,
    tell: Callable[[str], None] = lambda text: None,
) -> TraceGraph:
    """Trace heads back from where they fire.

    Args:
        model: A decoder-only model without norms on q and k, or its circuits.
        prompts: The prompts.
        heads: The heads to start from.
        destination: Where they fire: one position for all prompts, one per prompt, or None for anywhere.
        threshold: Of the selected terms; see :mod:`headlab.parameters.on_prompts.sparse_scores`.
        least_attention: Attention at which a head fires.
        min_share: Least share of the selected terms' sum that makes an edge.
        depth: How many firings in a row are traced.
        tell: Told how far it is.

    Raises:
        HeadError: A head does not exist.
        PlanError: An argument is out of range.
        UnsupportedError: Scores of this model are no sum over directions, or its stream no sum of parts.
    """
    import pandas as pd

    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise PlanError(f"depth={depth!r} must be a whole number of at least 1")
    if not min_share > 0:
        raise PlanError(f"min_share={min_share!r} must be above 0")
    made = _circuits(model)
    start = parse_heads(heads, made.model.spec)
    rows = _prompts(made, prompts)
    at: list[Any] = [destination] * len(rows)
    if destination is not None and not isinstance(destination, int):
        at = list(destination)
        if len(at) != len(rows):
            raise PlanError(f"destination= has {len(at)} positions for {len(rows)} prompts")
    directions = Directions(made)
    lines: list[dict[str, Any]] = []
    shares: list[pd.DataFrame] = []
    starts: list[tuple[Any, ...]] = []
    for prompt, (ids, row) in enumerate(zip(rows, at, strict=True)):
        tell(f"tracing prompt {prompt + 1} of {len(rows)}")
        scores = PromptScores(made, ids, directions)
        if row is not None and not -scores.n <= row < scores.n:
            raise PlanError(
                f"destination={row} does not exist: prompt {prompt} has {scores.n} tokens"
            )
        waiting = scores.firings(start, row, least_attention)
        for head in start:
            firings = sum(firing.head == head for firing in waiting)
            most = scores.most_attended(head, row)
            starts.append((prompt, str(head), firings, *most))
        seen = {(firing.head, firing.destination, firing.source) for firing in waiting}
        for level in range(depth):
            following = []
            for firing in waiting:
                edges, every = _edges(scores, firing, threshold, min_share, least_attention)
                shares.append(every.assign(prompt=prompt))
                for edge, nexts in edges:
                    lines.append({"prompt": prompt} | edge | {"depth": level})
                    for one in nexts:
                        key = (one.head, one.destination, one.source)
                        if key not in seen:
                            seen.add(key)
                            following.append(one)
            waiting = following
    return TraceGraph(
        made.model.name,
        len(rows),
        pd.DataFrame(lines, columns=EDGE_COLUMNS),
        pd.concat(shares or [pd.DataFrame(columns=SHARE_COLUMNS)], ignore_index=True),
        pd.DataFrame(starts, columns=START_COLUMNS),
        least_attention,
        min_share,
    )


def upstream(scores: PromptScores, terms: Terms, side: str, threshold: float = 1.0) -> pd.DataFrame:
    """What every earlier part adds to the selected terms of a score at one side.

    Columns site (embedding, head, attention_bias, mlp or constant), layer, head, contribution, share (of the selected
    terms' sum, which contributions sum to), projection (the paper's figure) and null (the same head elsewhere).

    Raises:
        PlanError: The score is negative, or there is no such side.
        UnsupportedError: The stream of this model is no sum of parts.
    """
    import pandas as pd

    chosen = torch.from_numpy(terms.selected(threshold).copy())
    layer, position = terms.firing.head.layer, _position(terms.firing, side)
    scale = scores.scale(layer, position)
    towards = terms.weights(side)[:, chosen].sum(1)
    signed = terms.projections(side)[:, chosen].sum(1)
    names, parts = scores.written(layer, position)
    total = terms.terms[chosen].sum()
    contribution = torch.cat([scale * parts @ towards[:-1], towards[-1:]])
    scores.agree(
        contribution.sum(),
        contribution,
        float(total),
        "what parts of the stream add is not the score",
    )
    frame = pd.DataFrame([*names, ("constant", -1, -1)], columns=["site", "layer", "head"])
    frame["contribution"] = contribution.double().cpu().numpy()
    frame["share"] = frame["contribution"] / float(total)
    projection = torch.cat([scale * parts @ signed[:-1], signed[-1:]])
    frame["projection"] = projection.double().cpu().numpy()
    frame["null"] = np.nan
    if layer:
        null = [
            scores.elsewhere(earlier, scale * towards[:-1], position) for earlier in range(layer)
        ]
        frame.loc[frame["site"] == "head", "null"] = torch.cat(null).double().cpu().numpy()
    return frame


def sparsity(
    model: Model | Circuits,
    prompts: Prompt,
    heads: HeadsLike = "*.*",
    *,
    threshold: float = 1.0,
    least_attention: float = 0.5,
    draws: int = 20,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> pd.DataFrame:
    """How few terms make up the score of each firing, beside a random basis.

    Args:
        model: A decoder-only model, or its circuits.
        prompts: The prompts.
        heads: The heads; those of layers that norm q and k are left out.
        threshold: Of the selected terms.
        least_attention: Attention at which a head fires.
        draws: Random bases per firing.
        seed: Their seed.
        tell: Told how far it is.

    Returns:
        One line per firing: prompt, layer, head, destination, source, attention, score, rank, n_terms (selected),
        null_terms (mean over random bases), effective (participation ratio of all terms), null_effective.

    Raises:
        HeadError: A head does not exist.
        UnsupportedError: No head's scores are sums over directions.
    """
    import pandas as pd

    made = _circuits(model)
    given = parse_heads(heads, made.model.spec)
    plain = [head for head in given if not made.qk_normed(head.layer)] or list(given)
    generator = torch.Generator().manual_seed(seed)
    widths = {made.model.spec.layers[head.layer].d_head for head in plain}
    bases = {
        width: torch.linalg.qr(torch.randn(draws, width, width, generator=generator).double()).Q
        for width in sorted(widths)
    }
    directions = Directions(made)
    lines: list[dict[str, Any]] = []
    for prompt, ids in enumerate(rows := _prompts(made, prompts)):
        tell(f"terms of scores: prompt {prompt + 1} of {len(rows)}")
        scores = PromptScores(made, ids, directions)
        for firing in scores.firings(plain, None, least_attention):
            terms = scores.terms(firing)
            q, k = (
                scores.trace.of_head(name, firing.head)[0, at].double().cpu()
                for name, at in (("q", firing.destination), ("k", firing.source))
            )
            basis = bases[len(q)]
            drawn = ((q @ basis) * (k @ basis)).numpy()
            lines.append(
                {
                    "prompt": prompt,
                    "layer": firing.head.layer,
                    "head": firing.head.head,
                    "destination": firing.destination,
                    "source": firing.source,
                    "attention": firing.attention,
                    "score": firing.score,
                    "rank": len(terms.terms),
                    "n_terms": len(terms.selected(threshold)),
                    "null_terms": np.mean([len(sparse_set(row, threshold)) for row in drawn]),
                    "effective": _participation(terms.terms.double().cpu().numpy()[None])[0],
                    "null_effective": _participation(drawn).mean(),
                }
            )
    return pd.DataFrame(lines, columns=_SPARSITY_COLUMNS)


_SPARSITY_COLUMNS = [
    "prompt", "layer", "head", "destination", "source", "attention", "score", "rank", "n_terms", "null_terms",
    "effective", "null_effective",
]  # fmt: skip


def _edges(
    scores: PromptScores, firing: Firing, threshold: float, min_share: float, least_attention: float
) -> tuple[list[tuple[dict[str, Any], list[Firing]]], pd.DataFrame]:
    """Edges into a firing, each with where its upstream head fires; and every earlier head's share."""
    import pandas as pd

    terms = scores.terms(firing)
    chosen = terms.selected(threshold)
    shared = {
        "head": str(firing.head),
        "destination": firing.destination,
        "source": firing.source,
        "attention": firing.attention,
        "score": firing.score,
        "n_terms": len(chosen),
    }
    found, every = [], []
    for side in SIDES:
        position = _position(firing, side)
        parts = upstream(scores, terms, side, threshold)
        heads = parts[parts["site"] == "head"]
        named = [
            str(Head(int(at), int(head)))
            for at, head in zip(heads["layer"], heads["head"], strict=True)
        ]
        total = float(terms.terms[torch.from_numpy(chosen.copy())].sum())
        columns = {
            "head": str(firing.head),
            "side": side,
            "upstream": named,
            "share": heads["share"].to_numpy(),
            "null_share": heads["null"].to_numpy() / total,
        }
        every.append(pd.DataFrame(columns))
        for row in parts[parts["share"] >= min_share].to_dict("records"):
            nexts = []
            name = f"{row['site']}{row['layer']}" if row["layer"] >= 0 else row["site"]
            if row["site"] == "head":
                head = Head(row["layer"], row["head"])
                name, nexts = str(head), scores.firings([head], position, least_attention)
            edge = {
                column: row[column] for column in ("contribution", "share", "projection", "null")
            }
            place = {"side": side, "position": position, "upstream": name}
            fires = {"fires": nexts[0].source if nexts else -1}
            found.append((shared | place | edge | fires, nexts))
    return found, pd.concat(every)


def _participation(terms: np.ndarray) -> np.ndarray:
    """(Σ |t|)² / Σ t² of each row: how many terms carry it."""
    size: np.ndarray = (terms**2).sum(1)
    return np.abs(terms).sum(1) ** 2 / np.maximum(size, 1e-300)


def _position(firing: Firing, side: str) -> int:
    if side not in SIDES:
        raise PlanError(f"side={side!r} must be 'destination' or 'source'")
    return firing.destination if side == "destination" else firing.source


def _prompts(made: Circuits, prompts: Prompt) -> list[list[int]]:
    ids = made.model.tokens(prompts)
    return [[token for token in row if token >= 0] for row in ids.tolist()]


def _circuits(model: Model | Circuits) -> Circuits:
    return model if isinstance(model, Circuits) else circuits(model)


__all__ = ["TraceGraph", "sparsity", "trace_heads", "upstream"]
