"""``headlab steer``: continue a prompt with a method of steering in force, or measure what it does and costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from headlab.cli.options import EMBEDDED, Device, Dtype, Json, Model_, Revision, Trust, spread

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.steering import Behaviour, Method

Text = Optional[str]  # noqa: UP045  # typer reads annotations at run time
Number = Optional[float]  # noqa: UP045
Folder = Optional[Path]  # noqa: UP045
Texts = Optional[list[str]]  # noqa: UP045


@dataclass(frozen=True)
class Steering:
    """Options that say which method, on which model; see :func:`~headlab.cli.options.spread`."""

    model: Model_ = EMBEDDED
    method: Annotated[
        Text, typer.Option(help="Such as pasta or function_vector; `--method list` lists them.")
    ] = None
    load: Annotated[Folder, typer.Option(help="A learned method that --save has written.")] = None
    heads: Annotated[
        Text, typer.Option(help="Heads, like '18.6, 17.*'; the method's own choice by default.")
    ] = None
    span: Annotated[Texts, typer.Option(help="Text of the prompt to mark; repeat it for more.")] = (
        None
    )
    task: Annotated[
        Text,
        typer.Option(
            help="Relation between words, for methods that learn a task; antonym by default."
        ),
    ] = None
    strength: Annotated[Number, typer.Option(help="How strongly, in the method's own units.")] = (
        None
    )
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0
    device: Device = "auto"
    dtype: Dtype = "auto"
    revision: Revision = None
    trust_remote_code: Trust = False


@spread
def steer(
    steering: Steering,
    text: Annotated[Text, typer.Option(help="A prompt to continue.")] = None,
    file: Annotated[Folder, typer.Option(help="File with the prompt.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to add to the prompt.")] = 40,
    evaluate: Annotated[
        Text,
        typer.Option("--eval", help="Measure a behaviour: 'auto' for the method's own, or a name."),
    ] = None,
    strengths: Annotated[Text, typer.Option(help="Strengths to sweep, like '1,2,4'.")] = None,
    cases: Annotated[int, typer.Option("--cases", "-n", min=2, help="Cases to measure.")] = 24,
    controls: Annotated[
        int, typer.Option(min=0, help="Draws of each control: random heads and directions.")
    ] = 3,
    save: Annotated[Folder, typer.Option(help="File for a learned method, .safetensors.")] = None,
    out: Annotated[
        Folder, typer.Option("--out", "-o", help="Folder for the page and the numbers.")
    ] = None,
    json: Json = False,
) -> None:
    """Steer a model: continue a prompt with and without a method, or measure what the method does and costs.

    Methods that learn do so on headlab's own data; what they are measured on is kept apart.
    """
    from headlab.cli.steer_output import show_continuations, show_evaluation
    from headlab.cli.work import check_out, loaded, progress, prompt_text
    from headlab.errors import PlanError
    from headlab.steering.recipes import BEHAVIOURS

    if steering.method == "list":
        from headlab.cli.steer_output import show_methods

        show_methods(json)
        return
    given = _checked(steering, text is not None or file is not None, evaluate, strengths, out)
    prompt = None if evaluate is not None else prompt_text(text, file)
    if out is not None:
        check_out(out)
    if evaluate not in (None, "auto", *BEHAVIOURS):
        raise PlanError(f"there is no behaviour {evaluate!r}; there are {', '.join(BEHAVIOURS)}")
    model = loaded(
        steering.model,
        steering.device,
        steering.dtype,
        steering.revision,
        steering.trust_remote_code,
    )
    with progress() as tell:
        method, behaviour = _made(steering, model, evaluate, cases, tell)
        if steering.strength is not None:
            method = method.at(steering.strength)
        if save is not None:
            _save(method, save)
        if prompt is None:
            from headlab.steering import evaluate as measured

            assert behaviour is not None
            found = measured(
                model,
                method,
                behaviour,
                strengths=given,
                n_controls=controls,
                seed=steering.seed,
                tell=tell,
            )
    if prompt is None:
        show_evaluation(found, out, json)
    else:
        show_continuations(model, method, prompt, tokens, json)


def _checked(
    steering: Steering,
    prompted: bool,
    evaluate: str | None,
    strengths: str | None,
    out: Path | None,
) -> list[float] | None:
    """Strengths, once the options are known to fit each other."""
    from headlab.errors import PlanError
    from headlab.steering.recipes import recipe

    if (steering.method is None) == (steering.load is None):
        raise PlanError(
            "name the method with either --method or --load; `--method list` lists them"
        )
    if prompted == (evaluate is not None):
        raise PlanError(
            "give a prompt with --text or --file, or a behaviour to measure with --eval"
        )
    if evaluate is None and (strengths is not None or out is not None):
        raise PlanError("--strengths and --out go with --eval; for one prompt, use --strength")
    if evaluate is not None and strengths is not None and steering.strength is not None:
        raise PlanError("give --strengths or --strength, not both")
    if steering.method is not None:
        chosen = recipe(steering.method)
        if chosen.marks and evaluate is None and not steering.span:
            raise PlanError(f"{steering.method} marks text of the prompt; name it with --span")
    if steering.strength is not None and strengths is None:
        return [steering.strength]
    if strengths is None:
        return None
    try:
        return [float(part) for part in strengths.split(",")]
    except ValueError as error:
        raise PlanError(f"--strengths {strengths!r} must be numbers like '1,2,4'") from error


def _made(
    steering: Steering, model: Model, evaluate: str | None, cases: int, tell: Callable[[str], None]
) -> tuple[Method, Behaviour | None]:
    """The method, and the behaviour it is to be measured on."""
    from headlab.errors import PlanError
    from headlab.steering import load
    from headlab.steering.recipes import RECIPES, Setting, behaviour, recipe

    spans = tuple(steering.span or ())
    if evaluate is not None and not spans:
        spans = ("each case has its own",)
    setting = Setting(
        model,
        steering.heads,
        spans,
        steering.task or "antonym",
        cases,
        steering.seed,
        tell,
    )
    if steering.load is not None:
        if steering.heads is not None:
            raise PlanError("a learned method has its own heads; leave --heads out")
        method: Method = load(steering.load)
        if steering.span:
            method = method.marking(list(spans))
    else:
        assert steering.method is not None
        method = recipe(steering.method).make(setting)
    if evaluate is None:
        return method, None
    name = evaluate
    if evaluate == "auto":
        if method.name not in RECIPES:
            raise PlanError(f"{method.name} has no behaviour of its own; name one with --eval")
        name = RECIPES[method.name].behaviour
    if steering.load is not None and name == "zero_shot" and steering.task is None:
        raise PlanError("the file does not say which task it was learned from; name it with --task")
    measured = behaviour(name, setting)
    marks = steering.method is not None and recipe(steering.method).marks
    if marks and not steering.span and not all(case.spans for case in measured.cases):
        raise PlanError(f"{name} marks no text of its own; name the text with --span")
    return method, measured


def _save(method: Method, path: Path) -> None:
    from headlab.errors import PlanError
    from headlab.steering import Learned

    if not isinstance(method, Learned):
        raise PlanError(f"{method.name} learns nothing, so there is nothing to --save")
    method.save(path)
