"""Prompts that name the source of a relation, with the source's position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from headlab.errors import PromptError
from headlab.prompts import lengths_of
from headlab.tasks.relations import TokenPairs

if TYPE_CHECKING:
    from headlab.model import Model

_SOURCE = "{source}"


@dataclass(frozen=True)
class SourcePrompts:
    """One template filled with sources, where they come out as the single tokens they are.

    Attributes:
        template: The template.
        ids: Token ids; all prompts of a template are equally long.
        source_position: Position of the source, the same in all.
        rows: Which pairs of the relation the prompts are of.
    """

    template: str
    ids: Int[Tensor, "prompt position"]
    source_position: int
    rows: tuple[int, ...]


def source_prompts(model: Model, pairs: TokenPairs, template: str) -> SourcePrompts:
    """Fill a template.

    A tokenizer may join the source with its surroundings. Such prompts are left out: their source is another token than
    the one a static score is of.

    Raises:
        PromptError: The template does not name the source once, or no source comes out as its token.
    """
    if not isinstance(template, str) or template.count(_SOURCE) != 1:
        raise PromptError(f"template {template!r:.80} must hold {_SOURCE} once")
    before, after = template.split(_SOURCE)
    lead = model.tokens(before.rstrip()) if before.strip() else None
    at = 0 if lead is None else lead.shape[1]
    if lead is None:  # what the tokenizer puts in front of every text
        at = model.tokens(f" {pairs.words[0][0]}{after}")[0].tolist().index(int(pairs.sources[0]))
    texts = [f"{before.rstrip()} {source}{after}" for source, _ in pairs.words]
    ids = model.tokens(texts)
    lengths = lengths_of(ids)
    # The first prompts set the length: one whose source is more tokens would be longer.
    fits = (
        (ids[:, at].cpu() == pairs.sources) if ids.shape[1] > at else torch.zeros(len(ids)).bool()
    )
    if bool(fits.any()):
        fits &= lengths.cpu() == lengths.cpu()[fits].mode().values
    rows = tuple(fits.nonzero()[:, 0].tolist())
    if not rows:
        raise PromptError(
            f"in {template!r:.80} no source of {pairs.relation.name!r} comes out as the token it is behind a space"
        )
    chosen = ids[list(rows), : int(lengths[rows[0]])]
    return SourcePrompts(template, chosen, at, rows)


def chunks(
    ids: Int[Tensor, "prompt position"], tokens: int = 4096
) -> Iterator[tuple[slice, Tensor]]:
    """Prompts of equal length in batches of about so many tokens."""
    size = max(1, tokens // ids.shape[1])
    for start in range(0, len(ids), size):
        yield slice(start, start + size), ids[start : start + size]


def filled(template: str, source: str) -> str:
    """A template with a source in it."""
    return template.replace(_SOURCE, source)


Tell = Callable[[str], None]


def check_templates(templates: Sequence[str]) -> tuple[str, ...]:
    """Templates, each once.

    Raises:
        PromptError: There is none.
    """
    found = tuple(dict.fromkeys([templates] if isinstance(templates, str) else templates))
    if not found:
        raise PromptError("no template was given; each must hold {source} once")
    return found


__all__ = ["SourcePrompts", "Tell", "check_templates", "chunks", "filled", "source_prompts"]
