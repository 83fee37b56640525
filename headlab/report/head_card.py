"""One head on one card: what its weights can do, what it does on prompts, and what is lost without it.

    hl.head_card(model, "L18H6")

Every line says where it comes from. Weights, behaviour and effects need not agree: a head may hold an operation that no
prompt calls on, and what a head does may be done by others once it is gone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from headlab.attention import Head, HeadsLike, parse_heads
from headlab.causal import ablate_each, metrics
from headlab.errors import HeadError, PlanError, PromptError, UnsupportedError
from headlab.parameters import (
    Circuits,
    Maps,
    circuits,
    composition,
    copying,
    maps,
    previous_token,
    salient_operations,
    singular_vectors,
)
from headlab.report.figures_page import PageTable
from headlab.roles import Role, Scores, score
from headlab.roles.scoring import select
from headlab.statistics import corrected
from headlab.tasks import plain_tokens, prose, prose_windows, repeated_tokens

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.parameters.relation_inputs import RelationsLike

Tell = Callable[[str], None]

#: Roles that take seconds, and have a counterpart in the weights or say how a head looks at text.
QUICK_ROLES = ("induction", "previous_token", "duplicate_token", "copying", "sink")
_PARTNERS, _OPERATIONS, _SALIENT, _DIRECTIONS, _WORDS = 4, 8, 10, 3, 6
_TEXT_LENGTH, _REPEATED = 64, 25


@dataclass(frozen=True, eq=False, repr=False)
class HeadCard:
    """What is known of a head, as tables; a part that cannot be had is empty, and :attr:`notes` says why.

    Attributes:
        model: Name of the model.
        head: The head.
        operations: MAPS: relations of which the head's OV circuit implements any pair, with the columns of
            :data:`headlab.parameters.MAPS_COLUMNS`; p-values are corrected over this head's relations and directions.
        scores: From the weights: columns ``what, score, ci_low, ci_high, n, null_mean, p_value, q_value, verdict``;
            corrected over all heads of the model.
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
        behaviour = self.behaviour.assign(claimed=_words(self.behaviour, "claimed"))
        captions = (
            (
                operations.rename(columns={"null_mean": chance}),
                ["relation", "direction", "score", chance, "n", "k", "q_value", "claimed"],
                "Operations in the weights (MAPS)",
            ),
            (
                self.scores.rename(columns={"null_mean": chance}),
                ["what", "score", chance, "q_value", "verdict"],
                "Scores from the weights",
            ),
            (
                self.salient,
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
                max(len(cell) for cell in column)
                for column in zip(table.columns, *table.rows, strict=True)
            ]
            lines += ["", table.caption]
            for row in (table.columns, *table.rows):
                cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
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
    if scores is not None and not (_of(scores.frame, chosen)).any():
        raise PlanError(
            f"the scores given have no row of {chosen}, so they are not of {model.name}"
        )
    asked = select(roles, None) if isinstance(roles, str) or (roles := list(roles)) else ()
    notes: list[str] = []
    made = {
        name: pd.DataFrame()
        for name in ("operations", "scores", "salient", "directions", "composition")
    }
    pattern = ""
    wanted = mapped is not None or not (isinstance(relations, Sequence) and not len(relations))
    if wanted:
        with _noting(notes, "operations"):
            made["operations"] = _operations(model, chosen, relations, mapped, alpha, tell)
        with _noting(notes, "salient tokens"):
            tell("salient tokens")
            (found,) = salient_operations(model, chosen, tell=tell)
            made["salient"] = _listed(found.frame().head(_SALIENT))
            pattern = found.promotes.pattern
    with _noting(notes, "scores from the weights"):
        tell("copying and positions in the weights")
        made["scores"] = _weight_scores(model, chosen, alpha, seed)
    with _noting(notes, "circuits"):
        tell("singular directions and composition")
        of_model = circuits(model)
        made["directions"] = _directions(of_model, chosen, seed)
        made["composition"] = _composition(of_model, chosen, seed, tell)
    behaviour, ablated = pd.DataFrame(), pd.DataFrame()
    if scores is None and asked:
        scores = score(model, asked, seed=seed, n_prompts=n_prompts, alpha=alpha, tell=tell)
    if scores is not None:
        rows = scores.frame[_of(scores.frame, chosen)]
        behaviour = rows.sort_values(["claimed", "score"], ascending=False, ignore_index=True)
    if causal:
        with _noting(notes, "ablation"):
            ablated = _ablated(model, chosen, n_prompts, seed, tell)
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
def _noting(notes: list[str], part: str) -> Iterator[None]:
    """Turn a part that this model cannot give into a note that says so."""
    try:
        yield
    except UnsupportedError as error:
        notes.append(f"No {part}: {error}")


def _operations(
    model: Model,
    head: Head,
    relations: RelationsLike,
    mapped: Maps | None,
    alpha: float,
    tell: Tell,
) -> pd.DataFrame:
    if mapped is None:
        mapped = maps(model, relations, heads=head, alpha=alpha, tell=tell)
    rows = mapped.of(head)
    q = corrected(rows["p_value"].to_numpy(float))
    claimed = (q <= alpha) & (rows["effect"] >= mapped.about["min_effect"])
    rows = rows.assign(q_value=q, claimed=claimed)
    rows = rows[rows["score"] > 0]
    return rows.sort_values(
        ["claimed", "effect"], ascending=False, kind="stable", ignore_index=True
    ).head(max(_OPERATIONS, int(claimed.sum())))


def _weight_scores(model: Model, head: Head, alpha: float, seed: int) -> pd.DataFrame:
    copies = copying(model, alpha=alpha, seed=seed)
    before = previous_token(model, alpha=alpha, seed=seed)
    rows = []
    for what, frame in (
        ("copying (eigenvalues of W_OV)", copies.assign(ci_low=np.nan, ci_high=np.nan)),
        ("previous token (positions in W_QK)", before),
    ):
        row = frame[_of(frame, head)].iloc[0].to_dict()
        verdict = row.get("kind", "") or ("looks one back" if row.get("claimed") else "")
        kept = ("score", "ci_low", "ci_high", "n", "null_mean", "p_value", "q_value")
        rows.append({"what": what, **{name: row[name] for name in kept}, "verdict": verdict})
    return pd.DataFrame(rows)


def _directions(made: Circuits, head: Head, seed: int) -> pd.DataFrame:
    frame = singular_vectors(made, head, n=_DIRECTIONS, k=_WORDS, seed=seed).frame
    sides = {side: rows.set_index("direction") for side, rows in frame.groupby("side")}
    joined = pd.DataFrame(
        {
            "share": sides["reads"]["share"],
            "reads": sides["reads"]["top"],
            "writes": sides["writes"]["top"],
        }
    )
    return _listed(joined.reset_index(drop=True))


def _composition(made: Circuits, head: Head, seed: int, tell: Tell) -> pd.DataFrame:
    if made.n_layers < 2:
        return pd.DataFrame()
    frame = composition(made, seed=seed, tell=tell).frame
    reads = frame[frame["late"] == str(head)]
    writes = frame[frame["early"] == str(head)]
    reads = reads.assign(side="reads by " + reads["kind"], partner=reads["early"])
    writes = writes.assign(side="writes to " + writes["kind"] + " of", partner=writes["late"])
    best = [rows.nlargest(_PARTNERS, "effect") for rows in (reads, writes)]
    columns = ["side", "partner", "score", "null_mean", "z", "p_value", "q_value"]
    return pd.concat(best)[columns].reset_index(drop=True)


def _ablated(model: Model, head: Head, n: int, seed: int, tell: Tell) -> pd.DataFrame:
    if model.tokenizer is None:
        raise PromptError(
            f"{model.name} came without a tokenizer, which text for ablation needs; load it with tokenizer=, or pass "
            "causal=False"
        )
    longest = model.spec.max_context or _TEXT_LENGTH
    plain = prose_windows(model.tokenizer, prose(), n, min(_TEXT_LENGTH, longest), seed, model.bos)
    tokens = plain_tokens(model.tokenizer, model.spec.n_vocab)
    size = min(_REPEATED, len(tokens) // 2, (longest - 1) // 2)
    repeated = repeated_tokens(tokens, n, size, seed, model.bos).repeated
    rows = []
    for what, ids in (("plain text", plain), ("repeated random tokens", repeated)):
        effects = ablate_each(
            model, ids, metrics.loss(), heads=f"{head.layer}.*", seed=seed, tell=tell
        ).frame
        own = effects[effects["head"] == head.head].iloc[0]
        others = effects[effects["head"] != head.head]["effect"]
        rows.append(
            {
                "what": what,
                **{name: own[name] for name in ("effect", "ci_low", "ci_high", "n", "p_value")},
                "rank": f"{1 + int((others > own['effect']).sum())} of {len(effects)}",
                "others": float(others.mean()) if len(others) else math.nan,
            }
        )
    return pd.DataFrame(rows)


def _of(frame: pd.DataFrame, head: Head) -> pd.Series:
    return (frame["layer"] == head.layer) & (frame["head"] == head.head)


def _listed(frame: pd.DataFrame) -> pd.DataFrame:
    """Lists of tokens as one text each; repr shows the space at the beginning of a word."""
    return frame.map(
        lambda cell: " ".join(map(repr, cell)) if isinstance(cell, list | tuple) else cell
    )


def _words(frame: pd.DataFrame, column: str) -> pd.Series | str:
    return frame[column].map({True: column, False: ""}) if len(frame) else ""


def _plain(row: dict[Any, Any]) -> dict[str, Any]:
    def value(cell: Any) -> Any:
        cell = cell.item() if hasattr(cell, "item") else cell
        return None if isinstance(cell, float) and not math.isfinite(cell) else cell

    return {str(name): value(cell) for name, cell in row.items()}


__all__ = ["QUICK_ROLES", "HeadCard", "head_card"]
