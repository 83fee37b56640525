"""What to plant where: reading and checking the request before any weight is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from headlab.attention.heads import Head, read_head
from headlab.errors import HeadError, PlanError
from headlab.planted.meanings import check_words
from headlab.planted.seeds import generator

FAMILIES = ("llama", "gpt2")
ROLES = (
    "previous_token",
    "duplicate_token",
    "induction",
    "sink",
    "positional",
    "retrieval",
    "contextual",
    "temporal",
)
#: Roles whose keys hold the code of the token before; they read what a previous_token head writes.
READS_PREVIOUS = ("induction", "retrieval")
#: Roles whose keys hold the code of the token itself.
READS_TOKEN = ("duplicate_token", "contextual", "temporal")
DEFAULT_HEADS = {"L1H0": "previous_token", "L2H1": "induction"}

MIN_VOCAB, MIN_CONTEXT, MAX_CONTEXT = 16, 8, 16384


@dataclass(frozen=True)
class Plan:
    """A checked request: ``roles`` and ``distractors`` name disjoint heads inside the model."""

    family: str
    roles: dict[Head, str]
    distractors: tuple[Head, ...]
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab: int
    max_context: int
    seed: int

    @property
    def heads(self) -> Iterator[Head]:
        """Every query head of the model, in order."""
        return (Head(layer, head) for layer in range(self.n_layers) for head in range(self.n_heads))

    @property
    def group_size(self) -> int:
        """How many query heads share one key/value head."""
        return self.n_heads // self.n_kv_heads

    def of_role(self, role: str, before: int | None = None) -> list[Head]:
        """Heads planted with ``role``, or only those in layers earlier than ``before``."""
        return [
            head
            for head, planted in self.roles.items()
            if planted == role and (before is None or head.layer < before)
        ]

    def group_roles(self, layer: int, kv_head: int) -> set[str]:
        """The roles planted in the query heads that share one key/value head."""
        return {
            role
            for head, role in self.roles.items()
            if head.layer == layer and head.head // self.group_size == kv_head
        }


def make_plan(
    family: str,
    heads: Mapping[str, str] | Mapping[tuple[int, int], str],
    distractors: int,
    n_layers: int | None,
    n_heads: int | None,
    n_kv_heads: int | None,
    vocab: int,
    max_context: int,
    seed: int,
) -> Plan:
    """Check a request and fill in what it leaves open.

    The layers and heads not given are made just large enough: at least four of each, one layer more
    than the last planted head needs, and room for the distractors.

    Raises:
        HeadError: A head cannot be read, or lies outside the model.
        PlanError: Anything else about the request cannot be built.
    """
    if family not in FAMILIES:
        raise PlanError(
            f"family {family!r} cannot be planted: use one of {', '.join(map(repr, FAMILIES))}"
        )
    _check_at_least("vocab", vocab, MIN_VOCAB)
    _check_at_least("max_context", max_context, MIN_CONTEXT)
    _check_at_least("distractors", distractors, 0)
    if max_context > MAX_CONTEXT:
        raise PlanError(
            f"max_context {max_context} is too long to plant: use at most {MAX_CONTEXT}"
        )
    for name, value in (("n_layers", n_layers), ("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
        if value is not None:
            _check_at_least(name, value, 1)
    if family == "gpt2" and n_kv_heads not in (None, n_heads):
        raise PlanError(
            f"n_kv_heads {n_kv_heads} cannot be had with gpt2, whose heads have their own keys and "
            "values: leave it out, or use family='llama'"
        )

    roles = _read(heads)
    n_layers = n_layers or max([3, *(head.layer + 1 for head in roles)]) + 1
    n_heads = n_heads or _enough_heads(roles, distractors, n_layers, n_kv_heads or 1)
    n_kv_heads = n_kv_heads or n_heads
    if n_heads % n_kv_heads:
        raise PlanError(
            f"n_kv_heads {n_kv_heads} does not divide n_heads {n_heads}: every key/value head must "
            "serve equally many heads"
        )
    for head in roles:
        if head.layer >= n_layers or head.head >= n_heads:
            raise HeadError(
                f"head {head} does not exist: the planted model has layers 0–{n_layers - 1} and "
                f"heads 0–{n_heads - 1}"
            )
    free = n_layers * n_heads - len(roles)
    if distractors > free:
        raise PlanError(
            f"distractors {distractors} do not fit: {n_layers} layers of {n_heads} heads leave "
            f"{free} free beside the planted ones"
        )
    plan = Plan(family, roles, (), n_layers, n_heads, n_kv_heads, vocab, max_context, seed)
    _check_roles(plan)
    return replace(plan, distractors=_choose_distractors(plan, distractors))


def _read(heads: Mapping[str, str] | Mapping[tuple[int, int], str]) -> dict[Head, str]:
    roles: dict[Head, str] = {}
    for name, role in heads.items():
        head = read_head(name)
        if role not in ROLES:
            raise PlanError(
                f"role {role!r} of head {head} is unknown: plant one of {', '.join(ROLES)}"
            )
        if head in roles:
            raise PlanError(f"head {head} is given two roles: a planted head has one")
        roles[head] = role
    return dict(sorted(roles.items()))


def _enough_heads(roles: dict[Head, str], distractors: int, n_layers: int, multiple: int) -> int:
    needed = max([4, *(head.head + 1 for head in roles)])
    needed = max(needed, -(-(len(roles) + distractors) // n_layers))
    return -(-needed // multiple) * multiple


def _check_roles(plan: Plan) -> None:
    for head, role in plan.roles.items():
        check_words(role, plan.vocab)
        if role in READS_PREVIOUS and not plan.of_role("previous_token", before=head.layer):
            where = (
                f"in layers 0–{head.layer - 1}"
                if head.layer
                else f"in layer 0 and move the {role} head to a later layer"
            )
            raise PlanError(
                f"{role} head {head} needs a previous_token head in an earlier layer to read "
                f"from: add one {where}"
            )
    for layer in range(plan.n_layers):
        for kv_head in range(plan.n_kv_heads):
            planted = plan.group_roles(layer, kv_head)
            before, itself = planted.intersection(READS_PREVIOUS), planted.intersection(READS_TOKEN)
            if before and itself:
                first = kv_head * plan.group_size
                last = first + plan.group_size - 1
                raise PlanError(
                    f"heads {Head(layer, first)} to {Head(layer, last)} share one key head, which "
                    f"cannot serve both {min(before)} and {min(itself)}: move one to another group"
                )


def _choose_distractors(plan: Plan, n: int) -> tuple[Head, ...]:
    free = [head for head in plan.heads if head not in plan.roles]
    order = generator(plan.seed, "distractors").permutation(len(free))
    return tuple(sorted(free[index] for index in order[:n]))


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise PlanError(f"{name} {value} is too small: use at least {least}")
