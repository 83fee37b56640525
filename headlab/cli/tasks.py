"""``headlab tasks``: what roles are probed with, and whether data of the user's will do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.roles import Role

tasks = typer.Typer(
    help="See what roles are probed with; check data of your own.", no_args_is_help=True
)
Name = Annotated[str, typer.Argument(metavar="ROLE", help="Name of a role.")]


@tasks.command("list")
def list_roles(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """List the roles and the data each takes."""
    from headlab.cli.tables import print_roles
    from headlab.roles.base import ROLES, load_entry_points

    load_entry_points()
    print_roles(list(ROLES.values()), as_json)
    if not as_json:
        print(
            "relations: pairs of words that heads are mapped to by their weights; headlab's, or yours\n"
            "lookback: responses, and what of them the context bears out; yours"
        )


@tasks.command()
def schema(role: Name) -> None:
    """Print the JSON Schema of one record of a role's data, of 'pairs' for patching and circuits, of 'relations' for
    parameter mapping, or of 'lookback' for a Lookback Lens.
    """
    if role == "lookback":
        from headlab.lookback import LOOKBACK_SCHEMA

        print(json.dumps(LOOKBACK_SCHEMA, indent=2, ensure_ascii=False))
        return
    if role == "relations":
        from headlab.tasks import RELATION_SCHEMA

        print(json.dumps(RELATION_SCHEMA, indent=2, ensure_ascii=False))
        return
    if role == "pairs":
        from headlab.tasks import PAIR_SCHEMA

        print(json.dumps(PAIR_SCHEMA, indent=2, ensure_ascii=False))
        return
    print(json.dumps(_taking_data(role).schema, indent=2, ensure_ascii=False))


@tasks.command()
def check(
    role: Name,
    file: Annotated[Path, typer.Argument(help="JSON Lines, one record a line.")],
    model: Annotated[
        Optional[str],  # noqa: UP045  # typer reads the annotation at run time
        typer.Option(help="Also check spans and lengths by this model's tokenizer."),
    ] = None,
) -> None:
    """Check data of your own for a role, 'pairs' for patching and circuits, 'relations' for parameter mapping, or
    'lookback' for a Lookback Lens, without running anything.
    """
    from headlab.tasks import read_records

    if role == "lookback":
        print(_checked_responses(file, model))
        return
    if role == "relations":
        print(_checked_relations(file, model))
        return
    if role == "pairs":
        print(_checked_pairs(file, model))
        return
    found = _taking_data(role)
    assert found.schema is not None
    records = read_records(file, found.schema, role)
    said = f"{len(records)} records fit the schema of {role}"
    if model is not None:
        from headlab.cli.work import loaded

        note = try_out(loaded(model, "auto", "auto", None, False), found, records)
        said += f"; {note}" if note else f" and can be used with {model}"
    print(said)


def _checked_pairs(file: Path, model: str | None) -> str:
    """What is to be said of a file of pairs that can be used.

    Raises:
        HeadlabError: It cannot.
    """
    from headlab.tasks import PAIR_SCHEMA, given_pairs, read_records

    records = read_records(file, PAIR_SCHEMA, "pairs")
    said = f"{len(records)} records fit the schema of pairs"
    if model is None:
        return said
    from headlab.causal import metrics, pairs
    from headlab.cli.work import loaded

    live = loaded(model, "auto", "auto", None, False)
    given = given_pairs(live.tokenizer, records, live.bos, corrupted=False)
    ids = live.tokens(list(given.clean))
    metrics.log_probability(list(given.answers)).bind(live, ids)
    if given.foils:
        metrics.logit_difference(list(given.answers), list(given.foils)).bind(live, ids)
    if given.corrupted:
        pairs(live, given.clean, given.corrupted)
    return f"{said} and can be used with {model}"


def _checked_relations(file: Path, model: str | None) -> str:
    """What is to be said of a file of relations that can be used; with a model, which words are not single tokens.

    Raises:
        HeadlabError: It cannot.
    """
    from headlab.parameters.relation_inputs import MIN_PAIRS
    from headlab.tasks import RecordError, given_relations, token_pairs

    given = given_relations(file)
    said = f"{len(given)} records fit the schema of relations"
    if model is None:
        return said
    from headlab.cli.work import loaded

    tokenizer = loaded(model, "auto", "auto", None, False).tokenizer
    pairs = [token_pairs(relation, tokenizer) for relation in given]
    if not any(len(each) for each in pairs):
        raise RecordError(
            f"no pair of {file} is a single token on both sides for {model}: {pairs[0].said()}"
        )
    lines = [said, *(each.said(len(each.left_out)) for each in pairs)]
    few = [each.relation.name for each in pairs if len(each) < MIN_PAIRS]
    if few:
        lines.append(
            f"maps skips relations of fewer than {MIN_PAIRS} pairs unless --min-pairs says otherwise: {', '.join(few)}"
        )
    return "\n".join(lines)


def _checked_responses(file: Path, model: str | None) -> str:
    """What is to be said of a file of responses that can be used.

    Raises:
        HeadlabError: It cannot.
    """
    from headlab.lookback import check_examples, read_examples

    given = read_examples(file)
    said = f"{len(given)} records fit the schema of lookback"
    if model is None:
        return said
    from headlab.cli.work import loaded

    check_examples(loaded(model, "auto", "auto", None, False), given)
    return f"{said} and can be used with {model}"


class _Reached(Exception):  # not an error
    """A role is about to run the model."""


def try_out(model: Model, role: Role, records: tuple[dict[str, Any], ...]) -> str:
    """Let a role make its prompts of records, and stop it before it runs the model.

    Returns:
        Why the role cannot be measured with them, or nothing.

    Raises:
        RecordError: A record cannot be used with this model.
    """
    from headlab.roles.base import Arrays
    from headlab.roles.scoring import for_role, prepare

    def stop(*_: object) -> Arrays:
        raise _Reached

    probing = prepare(model, 0, max(2, len(records)), None, stop)
    try:
        found = role.measure(for_role(probing, role, {role.info.name: records}))
    except _Reached:
        return ""
    return str(found.notes.get((-1, -1), ""))


def _taking_data(name: str) -> Role:
    from headlab.roles.base import RoleError, role_named

    role = role_named(name)
    if role.schema is None:
        raise RoleError(f"role {name!r} makes its own prompts and takes no data")
    return role
