"""``headlab``: thin commands over the Python API.

Data goes to stdout, progress and messages to stderr. Exit codes: 0 done, 1 a failure nobody foresaw, 2 wrong input
or something missing, said in one sentence, 130 interrupted.
"""

from __future__ import annotations

import errno
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from headlab.cli import causal, parameters, steer
from headlab.cli.lookback import lookback
from headlab.cli.options import EMBEDDED, Device, Dtype, Json, Model_, Revision, Trust, spread
from headlab.cli.tasks import tasks
from headlab.errors import HeadlabError, PlanError

if TYPE_CHECKING:
    from headlab.model import Model

app = typer.Typer(
    name="headlab",
    help="Find out what each attention head of an open language model does, and how we know.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(tasks, name="tasks")
app.add_typer(lookback, name="lookback")
for command in (causal.ablate, causal.patch, causal.circuit, parameters.maps, steer.steer):
    app.command()(command)

_INTERRUPTED = 130
Roles = Annotated[str, typer.Option("--roles", "-r", help="'all', or names like induction,sink.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Prompts = Annotated[int, typer.Option("--prompts", "-n", min=2, help="Prompts per probe.")]
Alpha = Annotated[float, typer.Option(min=1e-6, max=0.5, help="False-discovery rate per role.")]
Haystack = Annotated[
    Optional[Path],  # noqa: UP045  # typer reads the annotation at run time
    typer.Option(help="Folder of .txt files to use in place of headlab's essays."),
]
Data = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--data",
        metavar="ROLE=FILE",
        help="Your own probe data for a role, JSON Lines; repeat it for more roles.",
    ),
]


@dataclass(frozen=True)
class Scoring:
    """Options that ``report`` and ``score`` share; see :func:`spread`."""

    model: Model_ = EMBEDDED
    roles: Roles = "all"
    seed: Seed = 0
    prompts: Prompts = 20
    alpha: Alpha = 0.05
    haystack: Haystack = None
    data: Data = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    revision: Revision = None
    trust_remote_code: Trust = False

    def checked(self) -> dict[str, str]:
        """Files of probe data by role, once roles and data are known to be fine."""
        from headlab.cli.work import named_files
        from headlab.roles.scoring import read_data, select

        files = named_files(self.data or [])
        read_data(select(self.roles, files), files)
        return files

    def load(self) -> Model:
        """The model."""
        from headlab.cli.work import loaded

        return loaded(self.model, self.device, self.dtype, self.revision, self.trust_remote_code)


@app.command()
@spread
def report(
    scoring: Scoring,
    out: Out = Path("report"),
    causal: Annotated[
        bool, typer.Option("--causal", help="Ablate claimed heads, and as many others, too.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Go on from an earlier run, or start over.")
    ] = True,
    json: Json = False,
) -> None:
    """Score every head for every role and write report.html, report.json and scores.parquet."""
    from headlab.cli.work import check_out, progress
    from headlab.report import report as make

    data = scoring.checked()
    check_out(out)
    found = scoring.load()
    with progress() as tell:
        made = make(
            found,
            scoring.roles,
            out=out,
            seed=scoring.seed,
            n_prompts=scoring.prompts,
            alpha=scoring.alpha,
            haystack=scoring.haystack,
            data=data,
            causal=causal,
            fresh=not resume,
            tell=tell,
        )
    if json:
        print((out / "report.json").read_text("utf-8"), end="")
    else:
        print(made)
        print((out / "report.html").resolve())


@app.command()
@spread
def score(
    scoring: Scoring,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", "-o", help="Folder to write scores.parquet to."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Heads to show per role.")] = 10,
    json: Json = False,
) -> None:
    """Score every head for chosen roles and print the table."""
    from headlab.cli.work import check_out, progress, write_scores
    from headlab.roles import score as make

    data = scoring.checked()
    if out is not None:
        check_out(out)
    found = scoring.load()
    with progress() as tell:
        scores = make(
            found,
            scoring.roles,
            seed=scoring.seed,
            n_prompts=scoring.prompts,
            alpha=scoring.alpha,
            haystack=scoring.haystack,
            data=data,
            tell=tell,
        )
    if out is not None:
        write_scores(scores, out)
    if json:
        print(scores.to_json())
    else:
        from headlab.cli.tables import print_scores

        print_scores(scores, top)


@app.command()
def trace(
    model: Model_ = EMBEDDED,
    text: Annotated[Optional[str], typer.Option(help="The prompt.")] = None,  # noqa: UP045
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="File with the prompt."),
    ] = None,
    context: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Keep this many tokens of the prompt."),
    ] = None,
    keep: Annotated[
        str,
        typer.Option(
            help="Statistics, 'rows' (of the last token) and tensors, like entropy,max,rows,z."
        ),
    ] = "entropy,max,argmax,first_mass,mean_distance",
    heads: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Heads to keep, like '18.6, 17.*'."),
    ] = None,
    block: Annotated[
        int, typer.Option(min=1, help="Side of the squares of block_map, in tokens.")
    ] = 64,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", "-o", help="Folder to write the trace to."),
    ] = None,
    chunk: Annotated[
        int,
        typer.Option(
            min=1, help="With --out, run a longer prompt this many tokens at a time, resumably."
        ),
    ] = 2048,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Go on from a killed run, or start over.")
    ] = True,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Run a prompt and capture what its heads do.

    With --out, a prompt longer than --chunk is streamed: run in chunks and written as it comes, in memory that grows
    with the prompt and not with its square. The same command goes on after a kill.
    """
    from headlab.attention.keep import KeepTensors
    from headlab.attention.trace import check_free
    from headlab.cli.work import check_out, loaded, plan, progress, prompt_text

    prompt = prompt_text(text, file)
    kept = plan(keep, heads, block)
    if json and all(isinstance(item, KeepTensors) for item in kept):
        raise PlanError("--json prints statistics and rows; write tensors with --out")
    if out is not None:
        check_out(out)
    found = loaded(model, device, dtype, revision, trust_remote_code)
    ids = found.tokens(prompt, limit=context)
    if out is not None and ids.shape[1] <= chunk and resume:
        check_free(out)  # a stream knows which trace it would write over
    if out is not None and ids.shape[1] > chunk:
        with progress() as tell:
            result = found.stream(ids, kept, out, chunk=chunk, fresh=not resume, tell=tell)
    else:
        result = found.trace(ids, keep=kept, logits="last")
        if out is not None:
            result.save(out)
    if json:
        print(result.to_frame().to_json(orient="records"))
    else:
        print(result)
        if out is not None:
            print(out.resolve())


@app.command()
def models(json: Json = False) -> None:
    """List the models at hand: the embedded one, converted ones, the local hub cache."""
    from headlab.cli.tables import print_models
    from headlab.models import list_models

    print_models(list_models(), json)


@app.command()
def doctor(json: Json = False) -> None:
    """Say what this machine can do, what is missing, and the command that mends it."""
    from headlab.cli.doctor import examine
    from headlab.cli.tables import print_findings

    print_findings(examine(), json)


def main() -> None:
    """Run the command line; every foreseen error is one sentence and exit code 2."""
    try:
        app()
    except HeadlabError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        _fail(f"cannot write {error.filename or 'a file'}: {error.strerror}")
    except SystemExit as done:
        if done.code == _INTERRUPTED:  # typer has turned the interrupt into an exit
            print("interrupted; run the same command again to go on from here", file=sys.stderr)
        raise


def _fail(sentence: str) -> None:
    from headlab.text import printable

    print(f"headlab: {printable(sentence)}", file=sys.stderr)
    raise SystemExit(2)
