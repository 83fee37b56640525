"""One head on one card: what its weights can do, what it does on prompts, and what is lost without it.

    hl.head_card(model, "L18H6")

Every line says where it comes from. Weights, behaviour and effects need not agree: a head may hold an operation that no
prompt calls on, and what a head does may be done by others once it is gone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from headlab.arguments import rate, seed_number, whole_number
from headlab.attention import Head, HeadsLike, parse_heads
from headlab.errors import HeadError, HeadlabError, PlanError, PromptError, UnsupportedError
from headlab.parameters import Maps, circuits, salient_operations
from headlab.parameters.relation_inputs import vocabulary_size
from headlab.report.figures_page import PageTable
from headlab.report.head_facts import (
    Tell,
    as_text,
    copying_score,
    directions_of,
    losses_without,
    mapped_operations,
    partners_of,
    previous_token_score,
    rows_of,
)
from headlab.report.side_by_side import check_scores
from headlab.roles import Role, Scores, score
from headlab.roles.scoring import select
from headlab.tasks.relations import Relation
from headlab.text import printable

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.parameters import RelationsLike

#: Roles that take seconds, and have a counterpart in the weights or say how a head looks at text.
QUICK_ROLES = ("induction", "previous_token", "duplicate_token", "copying", "sink")
_OPERATIONS, _SALIENT = 8, 30


@dataclass(frozen=True, eq=False, repr=False)
class HeadCard:
    """What is known of a head, as tables; a part that cannot be had is empty, and :attr:`notes` says why.

    Attributes:
        model: Name of the model.
        head: The head.
        operations: MAPS: every relation and direction, with the columns of
            :data:`headlab.parameters.MAPS_COLUMNS`; p-values are corrected over these, since the card is of one head.
        scores: From the weights: columns ``what, score, ci_low, ci_high, n, null_mean, p_value, q_value, note,
            verdict``; corrected over all heads of the model.
        salient: Tokens the head turns most: columns ``source, gain, targets, suppressed, cluster``.
        pattern: What these have in common, in words.
        directions: Leading singular directions of W_OV: columns ``share, reads, writes``.
        composition: Strongest partners: columns ``side`` (``"reads by Q"``, ``"writes to K of"`` and so on), ``partner,
            score, null_mean, z, q_value``.
        behaviour: On prompts: the head's rows of :class:`~headlab.roles.Scores`.
        causal: Without the head: columns ``what, effect`` (nats per token, rise of the loss), ``ci_low, ci_high, n,
            p_value, rank`` (place among the heads of its layer), ``others`` (mean effect of those).
        notes: What is missing, and why.
    """

    model: str
    head: Head
    operations: pd.DataFrame
    scores: pd.DataFrame
    salient: pd.DataFrame
    pattern: str
    directions: pd.DataFrame
    composition: pd.DataFrame
    behaviour: pd.DataFrame
    causal: pd.DataFrame
    notes: tuple[str, ...]

    def tables(self) -> tuple[PageTable, ...]:
        """The parts that there are, as people read them."""
        chance = "chance"
        operations = self.operations.assign(claimed=_words(self.operations, "claimed"))
        tested = len(operations)
        shown = max(_OPERATIONS, int((operations["claimed"] != "").sum())) if tested else 0
        behaviour = self.behaviour.assign(claimed=_words(self.behaviour, "claimed"))
        captions = (
            (
                operations.head(shown).rename(columns={"null_mean": chance}),
                ["relation", "direction", "score", chance, "n", "k", "q_value", "claimed"],
                f"Operations in the weights (MAPS): the best of {tested}, q corrected over these",
            ),
            (
                self.scores.rename(columns={"null_mean": chance}),
                ["what", "score", chance, "q_value", "verdict", "note"],
                "Scores from the weights",
            ),
            (
                self.salient.head(_OPERATIONS),
                ["source", "gain", "targets", "suppressed"],
                f"Tokens it turns most: {self.pattern}",
            ),
            (
                self.directions,
                ["share", "reads", "writes"],
                "Leading singular directions of W_OV, as tokens",
            ),
            (
                self.composition.rename(columns={"null_mean": chance}),
                ["side", "partner", "score", chance, "z", "q_value"],
                "Composition with other heads",
            ),
            (
                behaviour.rename(columns={"null_mean": "null"}),
                ["role", "score", "ci_low", "ci_high", "null", "n", "q_value", "claimed"],
                "Behaviour on prompts",
            ),
            (
                self.causal,
                ["what", "effect", "ci_low", "ci_high", "n", "p_value", "rank", "others"],
                "Rise of the loss without the head, nats per token",
            ),
        )
        return tuple(
            PageTable.of(frame[columns], caption)
            for frame, columns, caption in captions
            if len(frame)
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; NaN is None."""
        parts = (
            "operations",
            "scores",
            "salient",
            "directions",
            "composition",
            "behaviour",
            "causal",
        )
        return {
            "model": self.model,
            "head": str(self.head),
            "pattern": self.pattern,
            **{
                name: [_plain(row) for row in getattr(self, name).to_dict("records")]
                for name in parts
            },
            "notes": list(self.notes),
        }

    def to_json(self, indent: int | None = None) -> str:
        """One strictly valid JSON document."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    def __repr__(self) -> str:
        lines = [f"{self.head} of {self.model}"]
        for table in self.tables():
            widths = [
                max(len(printable(cell)) for cell in column)
                for column in zip(table.columns, *table.rows, strict=True)
            ]
            lines += ["", table.caption]
            for row in (table.columns, *table.rows):
                cells = (
                    printable(cell).rjust(width) for cell, width in zip(row, widths, strict=True)
                )
                lines.append("  " + "  ".join(cells))
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        from headlab.report.html import environment

        template = environment().get_template("head_card.html.j2")
        return template.render(
            title=f"{self.head} of {self.model}", tables=self.tables(), notes=self.notes
        )


def head_card(
    model: Model,
    head: HeadsLike,
    *,
    relations: RelationsLike = "all",
    mapped: Maps | None = None,
    roles: str | Iterable[str | Role] = QUICK_ROLES,
    scores: Scores | None = None,
    causal: bool = True,
    n_prompts: int = 20,
    alpha: float = 0.05,
    seed: int = 0,
    tell: Tell = lambda text: None,
) -> HeadCard:
    """Join weights, behaviour and causal facts of one head.

    Args:
        model: A decoder-only model.
        head: The head, such as ``"L18H6"``.
        relations: Relations to map, see :func:`headlab.parameters.maps`; an empty list for none.
        mapped: Maps of this model already at hand, in place of mapping again.
        roles: Roles to score on prompts; an empty list for none.
        scores: Scores of this model already at hand, such as ``report.scores``, in place of scoring again.
        causal: Whether to ablate the head, and the others of its layer to compare, on plain and on repeated text.
        n_prompts: Prompts for behaviour and ablation.
        alpha: False-discovery rate.
        seed: Seed of everything random.
        tell: Told, in a few words, what is being done.

    Raises:
        HeadError: There is no such head, or several are named.
        PromptError: There is no such relation, or no tokenizer where prompts are needed.
        RoleError: There is no such role.
        PlanError: An argument cannot be used.
    """
    named = parse_heads(head, model.spec)
    if len(named) > 1:
        raise HeadError(
            f"{head!r} names {len(named)} heads, and a card is of one; name one, like 'L18H6'"
        )
    (chosen,) = named
    check_scores(model, scores)
    if mapped is not None and mapped.about.get("fingerprint") != model.fingerprint:
        raise PlanError(
            f"the maps given are of {mapped.about['model']} with other weights, not of {model.name}; map it anew"
        )
    n_prompts, alpha, seed = whole_number(n_prompts, "n_prompts", 2), rate(alpha), seed_number(seed)
    asked = select(roles, None) if isinstance(roles, str) or (roles := list(roles)) else ()
    notes: list[str] = []
    made = {
        name: pd.DataFrame()
        for name in ("operations", "scores", "salient", "directions", "composition")
    }
    pattern = ""
    shipped = isinstance(relations, str) and relations == "all"
    if not shipped and not isinstance(relations, str | Path | Relation | Mapping):
        relations = list(relations)
    if mapped is not None or relations:
        with _noting(notes, "operations", PromptError if shipped else UnsupportedError):
            made["operations"] = mapped_operations(model, chosen, relations, mapped, alpha, tell)
        with _noting(notes, "salient tokens"):
            tell("salient tokens")
            n = min(_SALIENT, vocabulary_size(model))
            (found,) = salient_operations(model, chosen, n=n, n_targets=min(5, n), tell=tell)
            made["salient"] = as_text(found.frame())
            pattern = found.promotes.pattern
    tell("copying and positions in the weights")
    from_weights: list[dict[str, Any]] = []
    with _noting(notes, "copying from the weights"):
        from_weights.append(copying_score(model, chosen, alpha, seed))
    with _noting(notes, "positions from the weights"):
        from_weights.append(previous_token_score(model, chosen, alpha, seed))
    made["scores"] = pd.DataFrame(from_weights)
    tell("singular directions and composition")
    of_model = circuits(model)
    with _noting(notes, "singular directions"):
        made["directions"] = directions_of(of_model, chosen, seed)
    with _noting(notes, "composition"):
        made["composition"] = partners_of(of_model, chosen, seed, tell)
    behaviour, ablated = pd.DataFrame(), pd.DataFrame()
    if scores is None and asked:
        scores = score(model, asked, seed=seed, n_prompts=n_prompts, alpha=alpha, tell=tell)
    if scores is not None:
        rows = scores.frame[rows_of(scores.frame, chosen)]
        behaviour = rows.sort_values(["claimed", "score"], ascending=False, ignore_index=True)
    if causal:
        with _noting(notes, "ablation"):
            ablated = losses_without(model, chosen, n_prompts, seed, tell)
    return HeadCard(
        model.name,
        chosen,
        made["operations"],
        made["scores"],
        made["salient"],
        pattern,
        made["directions"],
        made["composition"],
        behaviour,
        ablated,
        tuple(notes),
    )


@contextmanager
def _noting(
    notes: list[str], part: str, also: type[HeadlabError] = UnsupportedError
) -> Iterator[None]:
    """Turn a part that this model cannot give into a note that says so."""
    try:
        yield
    except (UnsupportedError, also) as error:
        notes.append(f"No {part}: {error}")


def _words(frame: pd.DataFrame, column: str) -> pd.Series | str:
    return frame[column].map({True: column, False: ""}) if len(frame) else ""


def _plain(row: dict[Any, Any]) -> dict[str, Any]:
    def value(cell: Any) -> Any:
        cell = cell.item() if hasattr(cell, "item") else cell
        return None if isinstance(cell, float) and not math.isfinite(cell) else cell

    return {str(name): value(cell) for name, cell in row.items()}


__all__ = ["QUICK_ROLES", "HeadCard", "head_card"]
