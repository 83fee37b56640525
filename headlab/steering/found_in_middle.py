"""Found in the middle (Hsieh et al. 2024): share attention among documents by relevance, and not by their places.

What the last token of a prompt attends to a document is taken to be its relevance plus a bias of its place, which a
dummy document shows:

    rel_k = Attn(document k, k) − Attn(dummy, k),

Attn the mean over a document's tokens of the last row's attention, averaged over layers and heads. In the last half of
the layers (16 of 32), with α = softmax(rel / t), t = 5·10⁻⁵, the weights of each document's tokens become

    a' = a · α_k / Attn_k · C,

C such that the documents together keep what they had. The formulas and figures are from notes on the paper; neither its
text nor code was read. Not told there, and settled here: Attn_k and C are those of the row and head being changed; the
dummy has as many tokens as the document it stands for, the others staying in place; and rows are changed from the end
of the last document on, where all are seen. With one document nothing changes. As t falls, one document gets it all; as
t grows, all get the same mean weight, which is not what the model does by itself.

Documents are marked spans, one each. They are compared before the prompt is run, with no method in force: a pass for
the prompt and one for each document. A row's own Attn_k comes in, so that no bias can do it: it is an edit of the
pattern, row by row in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from headlab.arguments import is_finite
from headlab.attention import Edit, Head, HeadsLike, Where, apply, parse_heads
from headlab.errors import PlanError
from headlab.steering.base import Method
from headlab.steering.beforehand import Beforehand
from headlab.steering.document_attention import (
    DUMMY,
    document_masks,
    document_places,
    relevance,
)
from headlab.steering.marks import SpansLike, read_spans
from headlab.steering.rewriting import set_shares
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model


@dataclass(frozen=True)
class FoundInTheMiddle(Method):
    """Share attention among documents by their relevance.

    Attributes:
        documents: The documents, one span each: text that stands once in the prompt, or positions (start, stop); or a
            list of them for each prompt of a batch.
        heads: The heads to steer; None for all those of the last half of the layers.
        temperature: t, above 0; relevances are attention per token, so what is small depends on the documents' length.
        dummy: Text, or token ids, repeated to the length of the document it stands for.
        relevances: rel of each document of each prompt, in the order of the prompt, where it is known
            (:func:`~headlab.steering.document_attention.relevance` finds it); None has it found before a prompt is run.

    Raises:
        PlanError: A field is of another form, or relevances fit no documents when the model is run.
        PromptError: When the model is run: a document is not in the prompt, or is there twice.
    """

    documents: SpansLike
    heads: HeadsLike | None = None
    temperature: float = 5e-5
    dummy: str | tuple[int, ...] = DUMMY
    relevances: Sequence[Sequence[float]] | None = None

    name: ClassVar[str] = "found_in_the_middle"
    strength_field: ClassVar[str] = "temperature"
    strengths: ClassVar[tuple[float, ...]] = (5e-3, 5e-4, 5e-5)

    def __post_init__(self) -> None:
        read_spans(self.documents)
        if not is_finite(self.temperature) or self.temperature <= 0:
            raise PlanError(f"temperature={shown(self.temperature)} must be a number above 0")
        if not self.dummy:
            raise PlanError("dummy= is empty; give a sentence, or token ids")
        try:
            known = [np.asarray(row, float) for row in self.relevances or ()]
        except (TypeError, ValueError) as error:
            raise PlanError(
                f"relevances={shown(self.relevances)} must be a list of numbers for each prompt"
            ) from error
        if not all(row.ndim == 1 and np.isfinite(row).all() for row in known):
            raise PlanError("relevances= must be finite numbers, a list of them for each prompt")

    def edits(self, model: Model) -> Sequence[Edit]:
        """Refused: it is more than edits.

        Raises:
            PlanError: Always.
        """
        raise PlanError(
            "FoundInTheMiddle looks at a prompt before it is run, which edits cannot; use hl.steer"
        )

    @contextmanager
    def apply(self, model: Model) -> Iterator[Model]:
        """Put it in force until the block ends.

        Raises:
            HeadError: A head does not exist.
            UnsupportedError: The model is no decoder.
        """
        found = Beforehand(model, "FoundInTheMiddle", lambda ids: self._look(model, ids))
        last: tuple[Tensor | None, Tensor | None, Tensor] | None = None

        def calibrate(pattern: Tensor, where: Where) -> Tensor:
            nonlocal last
            masks, weights, ends = (part.to(pattern.device) for part in found.of(where))
            keys = where.keys
            assert keys is not None
            # The layers of a pass share one tensor of keys.
            if last is None or last[0] is not keys or last[1] is not where.prompt:
                n = masks.shape[-1]
                at = keys.clamp(0, n - 1)[:, None].expand(-1, masks.shape[1], -1)
                last = (
                    keys,
                    where.prompt,
                    masks.gather(2, at) & ((keys >= 0) & (keys < n))[:, None],
                )
            after = (where.positions >= ends[:, None])[:, None, :, None]
            return torch.where(after, set_shares(pattern, last[2], weights), pattern)

        with model.edit(apply(self._chosen(model), calibrate, "pattern")), found.watching():
            yield model

    def marking(self, spans: SpansLike) -> Self:
        """The same for other documents."""
        return self._with(documents=spans)

    def _chosen(self, model: Model) -> tuple[Head, ...]:
        if self.heads is not None:
            return parse_heads(self.heads, model.spec)
        n = model.spec.n_layers
        last_half = range(n // 2, n)
        return tuple(
            Head(at, head) for at in last_half for head in range(model.spec.layers[at].n_heads)
        )

    def _look(self, model: Model, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Documents [batch, document, position], their α [batch, document], and where the last ends [batch]."""
        places = document_places(model, ids, self.documents)
        masks = document_masks(places, ids.shape[1])
        if self.relevances is None:
            found = relevance(model, ids, places, self.dummy)
        else:
            found = _given(self.relevances, [len(spans) for spans in places])
        scaled = np.where(np.isnan(found), -np.inf, found) / self.temperature
        weights = torch.from_numpy(scaled).softmax(-1)
        return masks, weights, torch.tensor([spans[-1][1] for spans in places])


def _given(relevances: Sequence[Sequence[float]], sizes: Sequence[int]) -> np.ndarray:
    """Relevances [prompt, document], NaN where a prompt has no such document."""
    if [len(row) for row in relevances] != list(sizes):
        raise PlanError(
            f"relevances= are of {[len(row) for row in relevances]} documents, and the prompts have {list(sizes)}"
        )
    found = np.full((len(sizes), max(sizes)), np.nan)
    for row, own in enumerate(relevances):
        found[row, : len(own)] = own
    return found
