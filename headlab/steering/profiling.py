"""Profiling of heads (Zhang et al. 2023, PASTA): steer every head alone, rank, and keep those that serve every task.

PASTA's authors steer each head alone on about 1000 training examples of a task, score the task, and rank the heads;
for several tasks they take the intersection of the tasks' best k. The shipped configurations were read (four tasks;
LLaMA-7B's best 300, 400, 500 and 600 have 25, 53, 86 and 168 heads in common); the ranking itself is not among the
released code. Here a head's score is the change of the behaviour it makes, case by case, so that it has an interval.

Choose heads on some cases and measure them on others: of hundreds of heads,
the best of a sample looks better than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from headlab.arguments import count, seed_number
from headlab.attention import Head, HeadsLike, parse_heads
from headlab.errors import PlanError
from headlab.statistics import bootstrap_interval, corrected, sign_flip_p
from headlab.steering.base import Method

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model
    from headlab.steering.evaluation import Behaviour


@dataclass(frozen=True)
class Profile:
    """What steering each head alone does to a behaviour.

    Attributes:
        frame: One row per head: ``layer``, ``head``, ``effect`` (mean change of the behaviour over ``n`` cases), its
            95 % interval ``low`` and ``high``, the two-sided ``p_value`` (signs of cases flipped), and ``q_value``
            corrected over the heads (Benjamini and Hochberg 1995).
        effects: Change of every case, [head, case], in the frame's order.
        about: Model, method, strength, behaviour and seed.
    """

    frame: pd.DataFrame
    effects: Float[np.ndarray, "head case"]
    about: dict[str, Any]

    def top(self, k: int) -> tuple[Head, ...]:
        """The k heads of largest effect, best first; of equal ones the lowest.

        Raises:
            PlanError: Fewer heads were profiled.
        """
        k = count(k, "k")
        if k > len(self.frame):
            raise PlanError(f"k={k}, but only {len(self.frame)} heads were profiled")
        order = np.argsort(-self.frame["effect"].to_numpy(), kind="stable")[:k]
        rows = self.frame[["layer", "head"]].to_numpy()[order]
        return tuple(Head(int(layer), int(head)) for layer, head in rows)

    def __repr__(self) -> str:
        about = ", ".join(f"{key} {value}" for key, value in self.about.items())
        best = self.frame.sort_values("effect", ascending=False, kind="stable").head(10)
        return (
            f"Profile ({about})\n{best.to_string(index=False, float_format='{:.4g}'.format)}\n"
            f"… the best 10 of {len(self.frame)} heads"
        )


def profile(
    model: Model,
    method: Method,
    behaviour: Behaviour,
    *,
    heads: HeadsLike = "*.*",
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Steer every head alone and measure the behaviour.

    It measures the behaviour once for each head: few short cases make it affordable, and ``heads="10.*, 11.*"`` leaves
    layers out.

    Args:
        model: The model.
        method: A method that can be put at any heads, such as :class:`headlab.steering.Pasta`; its spans are replaced
            by each case's.
        behaviour: What it is to bring about.
        heads: The heads to try.
        seed: Seed of the statistics.
        tell: Told, in a few words, how far it is.

    Raises:
        HeadError: A head does not exist.
        PlanError: There are fewer than two cases, or the method is bound to its heads.
        PromptError: A span is not in its prompt.
    """
    import pandas as pd

    seed_number(seed)
    tried = parse_heads(heads, model.spec)
    n = len(behaviour.cases)
    if n < 2:
        raise PlanError(
            f"behaviour {behaviour.name!r} has too few cases to profile heads; give 2 or more"
        )
    before = behaviour.values(model, None)
    effects = np.empty((len(tried), n))
    for at, head in enumerate(tried):
        tell(f"head {head}, {at + 1} of {len(tried)}")
        effects[at] = behaviour.values(model, method.on([head])) - before
    low, high = bootstrap_interval(effects.T, seed)
    p = np.minimum(1, 2 * np.minimum(sign_flip_p(effects.T, seed), sign_flip_p(-effects.T, seed)))
    columns = {
        "layer": [head.layer for head in tried],
        "head": [head.head for head in tried],
        "effect": effects.mean(1),
        "low": low,
        "high": high,
        "n": n,
        "p_value": p,
        "q_value": corrected(p),
    }
    about = {
        "model": model.name,
        "method": method.name,
        "strength": method.strength,
        "behaviour": behaviour.name,
        "seed": seed,
    }
    return Profile(pd.DataFrame(columns), effects, about)


def shared_heads(profiles: Sequence[Profile], k: int) -> tuple[Head, ...]:
    """Heads among the best k of every profile, the multi-task set of PASTA; sorted.

    Raises:
        PlanError: There are no profiles, or fewer than k heads in one; or no head is among the best of all.
    """
    if not profiles:
        raise PlanError("there are no profiles to take heads from")
    common = set.intersection(*(set(each.top(k)) for each in profiles))
    if not common:
        raise PlanError(
            f"no head is among the best {k} of all {len(profiles)} profiles; take a larger k"
        )
    return tuple(sorted(common))
