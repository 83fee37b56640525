"""``headlab ablate``, ``patch`` and ``circuit``: causal experiments on the user's prompts or a built-in task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional, cast

import typer

from headlab.cli.experiment import Prompts
from headlab.cli.options import spread

Text = Optional[str]  # noqa: UP045  # typer reads annotations at run time
Folder = Optional[Path]  # noqa: UP045
Heads = Annotated[Text, typer.Option(help="Heads, like '18.6, 17.*'; all by default.")]
Site_ = Annotated[
    str,
    typer.Option(
        help="z, q, k, v, result, pattern; of whole layers: resid_pre, attn_out, mlp_out, resid_post."
    ),
]
Positions = Annotated[Text, typer.Option(help="Numbers like '3,-1'; all by default.")]
By_ = Annotated[Text, typer.Option(help="head, kv_group or layer.")]
Top = Annotated[int, typer.Option(min=1, help="Rows to print.")]


@spread
def ablate(
    prompts: Prompts,
    heads: Heads = None,
    kind: Annotated[str, typer.Option(help="zero, mean, resample or first.")] = "zero",
    site: Site_ = "z",
    by: By_ = None,
    positions: Positions = None,
    reference: Annotated[
        Folder,
        typer.Option(help="Text file with one reference prompt a line, for mean and resample."),
    ] = None,
    top: Top = 15,
) -> None:
    """Ablate heads one at a time, and all of them together where some are named."""
    from headlab.causal import Sweep, ablate_each
    from headlab.cli.causal_output import show_effects
    from headlab.cli.work import lines_of, position_list, progress
    from headlab.errors import PlanError

    prompts.checked(corrupted=False)
    places = position_list(positions)
    if places == "each":
        raise PlanError("heads are ablated at positions together; --positions each is for patch")
    check_site(site)
    check_kind(kind, site, reference is not None)
    texts = None if reference is None else lines_of(reference)
    model = prompts.load()
    given = prompts.pairs(model, corrupted=False)
    metric = prompts.measured(given)
    with progress() as tell:
        effects = ablate_each(
            model,
            given.clean,
            metric,
            heads=heads,
            kind=cast(Any, kind),
            site=cast(Any, site),
            by=cast(Any, by),
            reference=texts,
            positions=places,
            seed=prompts.seed,
            out=_parts(prompts.out),
            tell=tell,
        )
        together = None
        if heads is not None and len(effects.frame) > 1:
            from headlab.attention import ablate as edit

            every = edit(
                heads,
                cast(Any, kind),
                site=cast(Any, site),
                reference=texts,
                positions=places,
                seed=prompts.seed,
            )
            together = float(Sweep(model, given.clean, metric).run([[every]]).mean())
    notes = []
    if together is not None:
        before = float(effects.baseline.mean())
        notes.append(
            f"All {len(effects.frame)} together: {effects.about['metric']} {before:.4g} → {together:.4g}."
        )
    show_effects(prompts, model, given, effects, top, notes)


@spread
def patch(
    prompts: Prompts,
    heads: Heads = None,
    site: Site_ = "z",
    by: By_ = None,
    positions: Annotated[Text, typer.Option(help="'each', or numbers like '3,-1'.")] = None,
    direction: Annotated[str, typer.Option(help="denoising or noising.")] = "denoising",
    align: Annotated[
        Text, typer.Option(help="start or end, for prompts of different lengths.")
    ] = None,
    top: Top = 15,
) -> None:
    """Patch heads one at a time from the clean run into the corrupted one, or the other way round."""
    from headlab.causal import patch_each
    from headlab.cli.causal_output import show_effects
    from headlab.cli.work import position_list, progress

    prompts.checked(corrupted=True)
    places = position_list(positions)
    check_site(site)
    model = prompts.load()
    given = prompts.pairs(model, corrupted=True)
    metric = prompts.measured(given)
    with progress() as tell:
        effects = patch_each(
            model,
            given.clean,
            given.corrupted,
            metric,
            heads=heads,
            site=cast(Any, site),
            by=cast(Any, by),
            positions=places,
            direction=cast(Any, direction),
            align=cast(Any, align),
            seed=prompts.seed,
            out=_parts(prompts.out),
            tell=tell,
        )
    show_effects(prompts, model, given, effects, top, [])


def check_site(site: str) -> None:
    """Refuse a site that does not exist before a model is loaded."""
    from headlab.attention.edits import ROW_SITES, VECTOR_SITES
    from headlab.errors import PlanError

    if site not in VECTOR_SITES + ROW_SITES:
        raise PlanError(
            f"there is no site {site!r}; there are {', '.join(VECTOR_SITES + ROW_SITES)}"
        )


def check_kind(kind: str, site: str, reference: bool) -> None:
    """Refuse a kind of ablation that cannot be carried out before a model is loaded."""
    from headlab.attention.ablations import KINDS
    from headlab.attention.edits import ROW_SITES
    from headlab.errors import PlanError

    if kind not in KINDS:
        raise PlanError(f"there is no ablation {kind!r}; there are {', '.join(KINDS)}")
    if kind == "first" and site not in ROW_SITES:
        raise PlanError("--kind first is one of attention: add --site pattern")
    if not reference and (kind == "resample" or (kind == "mean" and site not in ROW_SITES)):
        raise PlanError(f"--kind {kind} needs --reference FILE, prompts to take values from")


def _parts(out: Path | None) -> Path | None:
    return None if out is None else out / "parts"


@spread
def circuit(
    prompts: Prompts,
    method: Annotated[str, typer.Option(help="eap-ig or eap.")] = "eap-ig",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the integrated gradients.")] = 5,
    edges: Annotated[
        int, typer.Option(min=1, help="Edges to keep; dead ends among them go.")
    ] = 200,
    ranking: Annotated[
        str, typer.Option(help="score: what raises the metric most; absolute: what moves it most.")
    ] = "score",
    faithfulness: Annotated[
        bool,
        typer.Option("--faithfulness/--no-faithfulness", help="Run circuits of several sizes too."),
    ] = True,
    top: Top = 15,
) -> None:
    """Score every edge between heads, MLPs, embedding and logits, and keep the largest as a circuit."""
    from headlab.causal import Circuit, EdgeRuns, eap, eap_ig, faithfulness_curve
    from headlab.causal import faithfulness as measured
    from headlab.cli.causal_output import show_circuit
    from headlab.cli.work import progress
    from headlab.errors import PlanError

    prompts.checked(corrupted=True)
    if ranking not in ("score", "absolute"):
        raise PlanError(f"there is no ranking {ranking!r}; there are score and absolute")
    if method not in ("eap-ig", "eap"):
        raise PlanError(f"there is no method {method!r}; there are eap-ig and eap")
    model = prompts.load()
    given = prompts.pairs(model, corrupted=True)
    metric = prompts.measured(given)
    if method == "eap" and metric.needs_reference:
        raise PlanError(
            "KL divergence from the clean run has no slope there, so eap scores every edge 0; use --method eap-ig, or "
            "give --answer"
        )
    with progress() as tell:
        if method == "eap":
            scored = eap(model, given.clean, given.corrupted, metric, tell=tell)
        else:
            scored = eap_ig(model, given.clean, given.corrupted, metric, steps=steps, tell=tell)
        every = Circuit.of_edges(model, scored)
        # Of a metric that the clean run has lower, such as KL divergence, what lowers it comes first.
        falls = scored.about["clean"] < scored.about["corrupted"]
        ranked = every.negated() if falls and ranking == "score" else every
        found = ranked.top(edges, cast(Any, ranking)).without_dead_ends()
        found = found.negated() if falls and ranking == "score" else found
        own = curve = None
        if faithfulness:
            runs = EdgeRuns(model, given.clean, given.corrupted, metric, tell=tell)
            own = measured(runs, found, seed=prompts.seed) if len(found) else None
            curve = faithfulness_curve(runs, every, seed=prompts.seed)
    show_circuit(prompts, model, given, scored, found, own, curve, top)
