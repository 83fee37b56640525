"""``headlab maps``: what heads can do, from their weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, cast

import typer

from headlab.cli.options import EMBEDDED, Device, Dtype, Json, Model_, Revision, Trust

if TYPE_CHECKING:
    import pandas as pd

    from headlab.parameters import Maps
    from headlab.report import HeadCard

Text = Optional[str]  # noqa: UP045  # typer reads annotations at run time
Folder = Optional[Path]  # noqa: UP045


_STAND_INS = {
    "auto": "its embedding in layer 0, the first MLP's output above",
    "raw": "its embedding",
    "mlp": "the first MLP's output",
}


def maps(
    model: Model_ = EMBEDDED,
    relations: Annotated[
        list[str],
        typer.Option(
            "--relations",
            "-r",
            help="'all', kinds or names like translation,antonym, or a file of yours; repeat it for more.",
        ),
    ] = ["all"],  # noqa: B006  # typer copies it
    heads: Annotated[
        Text,
        typer.Option("--head", "--heads", help="Heads like '18.6, 17.*'; one alone gets a card."),
    ] = None,
    k: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "-k", min=1, help="A target counts among this many tokens; by default as in the paper."
        ),
    ] = None,
    embedding: Annotated[
        str, typer.Option(help="auto (as in the paper), raw or mlp: what stands for a token.")
    ] = "auto",
    multi_token: Annotated[
        str, typer.Option(help="skip pairs of several tokens, or use their ends.")
    ] = "skip",
    min_pairs: Annotated[int, typer.Option(min=1, help="Pairs a relation must keep.")] = 30,
    alpha: Annotated[
        float, typer.Option(min=1e-6, max=0.5, help="False-discovery rate per relation.")
    ] = 0.05,
    top: Annotated[int, typer.Option(min=1, help="Rows to print.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the card's nulls; maps have none.")] = 0,
    out: Annotated[
        Folder, typer.Option("--out", "-o", help="Folder to write maps.html and maps.json to.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Which relations between words heads implement, from their weights alone (MAPS)."""
    from headlab.cli.work import check_out, loaded, progress
    from headlab.parameters import maps as make
    from headlab.parameters.embeddings import is_raw
    from headlab.parameters.relation_inputs import named_relations

    chosen = named_relations(relations)
    is_raw(cast(Any, embedding), 0)
    _check_multi_token(multi_token)
    if out is not None:
        check_out(out)
    found = loaded(model, device, dtype, revision, trust_remote_code)
    card: HeadCard | None = None
    with progress() as tell:
        made = make(
            found,
            chosen,
            heads=heads,
            k=k,
            embedding=cast(Any, embedding),
            multi_token=cast(Any, multi_token),
            min_pairs=min_pairs,
            alpha=alpha,
            tell=tell,
        )
        if out is not None:
            _write(out, made, None)  # the card may yet fail
        if heads is not None and len(made.frame[["layer", "head"]].drop_duplicates()) == 1:
            from headlab.report import head_card

            card = head_card(
                found, heads, mapped=made, roles=[], causal=False, alpha=alpha, seed=seed, tell=tell
            )
    if out is not None and card is not None:
        _write(out, made, card)
    if json:
        print(made.to_json() if card is None else card.to_json())
    elif card is not None:
        _print_card(card)
    else:
        _print_maps(made, top)
    if out is not None and not json:
        print((out / "maps.html").resolve())


def _check_multi_token(multi_token: str) -> None:
    from headlab.errors import PlanError

    if multi_token not in ("skip", "ends"):
        raise PlanError(f"--multi-token {multi_token!r} must be skip or ends")


def _print_maps(made: Maps, top: int) -> None:
    from headlab.cli.tables import counted, print_frame

    frame = _claims(made)
    if frame.empty:
        frame = _shown(made.top(None, 5))
        print("No head is claimed for any relation; the highest above chance:")
    n = counted(len(made.names), "relation")
    facts = f"{made.about['model']} · {n} · {counted(int(made.frame['claimed'].sum()), 'claim')}"
    print_frame(frame.head(top), facts, len(frame))
    for note in _notes(made):
        print(note)


def _print_card(card: HeadCard) -> None:
    from headlab.cli.tables import print_table

    print(f"{card.head} of {card.model}")
    for table in card.tables():
        print_table(table)
    for note in card.notes:
        print(note)


def _claims(made: Maps) -> pd.DataFrame:
    """Claimed heads, those farthest above chance first."""
    return _shown(
        made.frame[made.frame["claimed"]].sort_values("effect", ascending=False, kind="stable")
    )


def _shown(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of maps as people read them."""
    named = [f"L{layer}H{head}" for layer, head in zip(rows["layer"], rows["head"], strict=True)]
    interval = [
        f"{low:.2f}–{high:.2f}" for low, high in zip(rows["ci_low"], rows["ci_high"], strict=True)
    ]
    chance = [f"{value:.3f}" for value in rows["null_mean"]]
    score = [f"{value:.2f}" for value in rows["score"]]
    rows = rows.assign(head=named, score=score, interval=interval, null_mean=chance)
    columns = [
        "head",
        "relation",
        "direction",
        "score",
        "interval",
        "n",
        "null_mean",
        "q_value",
    ]
    return rows[columns].rename(columns={"null_mean": "chance", "q_value": "q"})


def _notes(made: Maps) -> list[str]:
    notes = [
        f"score: share of a relation's pairs whose target is among the k tokens the head raises (lowers) most for the "
        f"source; claimed at q ≤ {made.about['alpha']:g}, corrected over the heads mapped, and "
        f"{made.about['min_effect']:g} above chance. interval: 95 %, over pairs. Sorted by score above chance.",
        f"What stands for a source: {_STAND_INS[made.about['embedding']]}.",
    ]
    notes += [f"Doubt: {made.about['doubt']}."] if made.about["doubt"] else []
    notes += [f"{relation.name} was skipped: {relation.skipped}." for relation in made.skipped]
    unread = made.frame.loc[made.frame["note"] != "", "note"].unique()
    return notes + [str(note) for note in unread[:5]]


def _write(out: Path, made: Maps, card: HeadCard | None) -> None:
    from headlab import plots
    from headlab.report.figures_page import PageTable, figures_page
    from headlab.report.files import write_files

    figures = [plots.operation_map(made, direction) for direction in made.about["directions"]]
    facts = [
        made.about["model"],
        f"{len(made.names)} relations",
    ]
    tables = [PageTable.of(_claims(made), "Claimed operations, farthest above chance first", 400)]
    notes = _notes(made)
    if card is not None:  # which corrects over its own rows, and says so
        tables, notes = list(card.tables()), [*notes[1:], *card.notes]
    title = f"Operations in the weights of {made.about['model'] if card is None else f'{card.head} of {card.model}'}"
    files = {"maps.json": made.to_json() + "\n"}
    if card is not None:
        files["card.json"] = card.to_json() + "\n"
    write_files(out, {**files, "maps.html": figures_page(title, facts, figures, tables, notes)})
