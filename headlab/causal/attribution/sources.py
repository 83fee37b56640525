"""Direct logit attribution of heads, split by source token (Chughtai, Cooney and Nanda 2024, *Summing up the facts*).

A head's output at a position is a sum over keys, Σ_k e[k] with e[k] = pattern[k] · v[k] W_O, and its direct logit
attribution (:mod:`headlab.causal.attribution.direct`) is linear in it, so each source token k has a term of its own:

    DLA(head, k) = pattern[k] · ⟨v[k] W_O, u⟩,    Σ_k DLA(head, k) = DLA(head),

where u is the direction that reads out the end of the stream. So mixed heads come apart, which add one thing from the
subject of a fact and another from its relation. The paper's own code was not found; the algebra is its.

As there, only direct paths show: what stands at a source token was put there by earlier layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headlab.arguments import finite_number
from headlab.causal.attribution.direct import ReadOut, agree, attribution, prefixes, read_outs
from headlab.errors import PlanError
from headlab.prompts import Prompt

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

#: Columns of the table besides spans.
_COLUMNS = ("layer", "head", "value", "other")
#: Positions [start, stop): the same for every prompt, or one pair per prompt.
Spans: TypeAlias = "tuple[int, int] | Sequence[tuple[int, int]]"


@dataclass(frozen=True)
class SourceAttribution:
    """Each head's direct logit attribution, split by the token it comes from.

    Attributes:
        values: Terms in logits; NaN beyond the position that predicts, and where a layer has fewer heads.
        heads: What each head adds in all, the terms of :func:`~headlab.causal.direct_logit_attribution`.
            Learned sinks (gpt-oss) carry no value, so the terms sum to it there too.
        total: The logit difference they are part of.
        spans: Labelled positions [start, stop) of each prompt.
        tokens: Tokens of each prompt up to the position that predicts, as text.
    """

    values: Float[np.ndarray, "prompt layer head source"]
    heads: Float[np.ndarray, "prompt layer head"]
    total: Float[np.ndarray, " prompt"]
    spans: Mapping[str, tuple[tuple[int, int], ...]]
    tokens: tuple[tuple[str, ...], ...]

    def span(self, label: str) -> Float[np.ndarray, "prompt layer head"]:
        """What each head adds from the tokens of a span.

        Raises:
            PlanError: There is no such span.
        """
        if label not in self.spans:
            known = ", ".join(self.spans) or "none; name them with spans="
            raise PlanError(f"there is no span {label!r}; there are {known}")
        pairs = zip(self.values, self.spans[label], strict=True)
        return np.stack([values[..., start:stop].sum(-1) for values, (start, stop) in pairs])

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line per head, of means over prompts: layer, head, value, a column per span, and ``other``."""
        import pandas as pd

        layer, head = np.nonzero(~np.isnan(self.heads[0]))
        frame = pd.DataFrame({"layer": layer, "head": head, "value": self._mean(self.heads)})
        for label in self.spans:
            frame[label] = self._mean(self.span(label))
        frame["other"] = frame["value"] - frame[list(self.spans)].sum(axis=1)
        return frame

    def classify(
        self,
        subject: str = "subject",
        relation: str = "relation",
        ratio: float = 10.0,
        least: float = 0.0,
    ) -> pd.DataFrame:
        """Sort heads by where what they add comes from, after Chughtai et al. 2024.

        ``kind`` is ``"subject"`` where what comes from the subject's tokens, a mean over prompts, is positive and at
        least ``ratio`` times the size of what comes from the relation's, ``"relation"`` for the mirror image,
        ``"mixed"`` where both are positive and neither outweighs the other so, and ``"none"`` otherwise.

        Args:
            subject: Name of the subject's span.
            relation: Name of the relation's span.
            ratio: How many times the one must outweigh the other. 10 is unverified: what we recall of the paper.
            least: A head that adds less than this many logits from either span is ``"none"``.

        Returns:
            layer, head, subject, relation, kind.

        Raises:
            PlanError: There is no such span, or ratio is below 1.
        """
        if finite_number(ratio, "ratio") < 1:
            raise PlanError(f"ratio={ratio!r} must be at least 1")
        finite_number(least, "least")
        frame = self.frame[["layer", "head"]].copy()
        ours, theirs = self._mean(self.span(subject)), self._mean(self.span(relation))
        frame["subject"], frame["relation"] = ours, theirs
        larger = np.maximum(ours, theirs)
        frame["kind"] = np.select(
            [
                (larger <= 0) | (larger < least),
                ours >= ratio * np.abs(theirs),
                theirs >= ratio * np.abs(ours),
                (ours > 0) & (theirs > 0),
            ],
            ["none", "subject", "relation", "mixed"],
            "none",
        )
        return frame

    def _mean(self, values: Float[np.ndarray, "prompt layer head"]) -> Float[np.ndarray, " row"]:
        return np.asarray(values.mean(0)[~np.isnan(self.heads[0])])

    def __repr__(self) -> str:
        rows = self.frame.sort_values("value", key=abs, ascending=False, kind="stable").head(5)
        largest = [
            f"L{row['layer']}H{row['head']} {row['value']:.3g}"
            + "".join(f", {label} {row[label]:.3g}" for label in self.spans)
            for row in rows.to_dict("records")
        ]
        return (
            f"SourceAttribution of {len(self.total)} prompt(s): {len(self.frame)} heads, total {self.total.mean():.3g} "
            f"(logits, means over prompts)\n  spans: {', '.join(self.spans) or 'none'}\n"
            f"  largest heads: {'; '.join(largest)}"
        )


def by_source(
    model: Model,
    prompts: Prompt,
    answers: Any,
    foils: Any = None,
    position: int | Sequence[int] = -1,
    *,
    spans: Mapping[str, Spans] | None = None,
    centred: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> SourceAttribution:
    """Split each head's direct logit attribution by source token.

    Args:
        model: A decoder-only model.
        prompts: The prompts.
        answers: As in :func:`~headlab.causal.direct_logit_attribution`, like foils, position and centred.
        foils: See answers.
        position: See answers.
        spans: Labelled positions [start, stop), such as ``{"subject": …, "relation": …}``: each one pair for all
            prompts, or one per prompt. Spans may not overlap, nor be named as other columns of the table are.
        centred: See answers.
        tell: Told how far it is.

    Raises:
        PlanError: As there; or a span reaches beyond the position that predicts, or two spans overlap.
        UnsupportedError: As there; or a head's output is not its pattern times its values (gated attention).
    """
    given = prefixes(model, prompts, position)
    labelled = _checked(spans or {}, [len(ids) for ids in given])
    values: list[np.ndarray] = []
    heads, total = [], []
    width = max(map(len, given))
    for read in read_outs(model, given, answers, foils, centred=centred, sources=True):
        whole = attribution(read)
        layers = [_of_layer(read, layer) for layer in range(model.spec.n_layers)]
        most = max(facts.n_heads for facts in model.spec.layers)
        split = torch.stack([_padded(part, most, width) for part in layers], 1)
        size = torch.as_tensor(np.abs(whole.values).sum(0))[:, None, None]
        agree(
            split.nansum(-1).cpu(),
            torch.as_tensor(whole.heads).nan_to_num(),
            size,
            model,
            "what its heads add from each source token does not add up to what they add, so more than pattern "
            "times values stands between the two",
        )
        values += list(split.cpu().numpy())
        heads.append(whole.heads)
        total.append(whole.total)
        tell(f"attribution by source: {len(values)} prompts done")
    texts = tuple(model.token_texts(torch.tensor([ids]))[0] for ids in given)
    return SourceAttribution(
        np.stack(values), np.concatenate(heads), np.concatenate(total), labelled, texts
    )


@torch.no_grad()
def _of_layer(read: ReadOut, layer: int) -> Float[Tensor, "prompt head source"]:
    """One layer's terms; NaN at positions a shorter prompt does not have.

    Values are projected onto the read-out direction first, so nothing is larger than [prompt, source, head].
    """
    direction, _ = read.into_stream(layer)
    v = read.trace.tensor("v", layer).to(direction)  # [prompt, source, kv_head, d_value]
    w_o = read.model.weights.W_O(layer).to(direction)
    towards = torch.einsum("hdm,bm->bhd", w_o, direction)
    per_value = towards.unflatten(1, (v.shape[2], -1))  # query heads by the key/value head they use
    projected = torch.einsum("bkgd,bgnd->bgnk", v, per_value).flatten(1, 2)
    at = read.trace.layers("rows").index(layer)
    rows = read.trace.rows[:, at, : len(w_o), 0].to(direction)
    return rows * projected


def _padded(part: Float[Tensor, "prompt head source"], heads: int, width: int) -> Tensor:
    room = (0, width - part.shape[2], 0, heads - part.shape[1])
    return torch.nn.functional.pad(part, room, value=torch.nan)


def _checked(
    spans: Mapping[str, Spans], lengths: list[int]
) -> dict[str, tuple[tuple[int, int], ...]]:
    """Spans per prompt."""
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    if not isinstance(spans, Mapping):
        raise PlanError(
            f"spans={spans!r:.60} must name spans of positions, as {{'subject': (1, 3)}}"
        )
    for label, given in spans.items():
        if not isinstance(label, str) or not label or label in _COLUMNS:
            raise PlanError(
                f"a span cannot be named {label!r:.60}; use a text other than {', '.join(_COLUMNS)}, which are columns "
                "of the table"
            )
        if not isinstance(given, Iterable):
            raise PlanError(f"span {label!r} must be (start, stop), not {given!r:.60}")
        pairs: list[Any] = [given] * len(lengths) if _is_pair(given) else list(given)
        if len(pairs) != len(lengths) or not all(_is_pair(pair) for pair in pairs):
            raise PlanError(
                f"span {label!r} must be (start, stop), or one such pair for each of {len(lengths)} prompts, not "
                f"{given!r:.60}"
            )
        found[label] = tuple((int(start), int(stop)) for start, stop in pairs)
        for at, ((start, stop), length) in enumerate(zip(found[label], lengths, strict=True)):
            if not 0 <= start < stop <= length:
                raise PlanError(
                    f"span {label!r} of prompt {at} is [{start}, {stop}), but sources are positions 0–{length - 1}"
                )
    for at in range(len(lengths)):
        rows = sorted((*of_prompt[at], label) for label, of_prompt in found.items())
        for (_, stop, one), (start, _, other) in pairwise(rows):
            if start < stop:
                raise PlanError(f"spans {one!r} and {other!r} of prompt {at} overlap")
    return found


def _is_pair(given: Any) -> bool:
    return (
        isinstance(given, Sequence)
        and len(given) == 2
        and all(hasattr(edge, "__index__") and not isinstance(edge, bool) for edge in given)
    )
