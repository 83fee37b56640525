"""At which rows a vector is added: the last token of each prompt, what is generated after it, or every token."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from jaxtyping import Bool
from torch import Tensor

from headlab.attention import Where
from headlab.errors import PlanError
from headlab.text import shown

#: ``"prompt_end"``: the prompt's last token; ``"from_end"``: it and every generated one; ``"all"``: every token.
Rows: TypeAlias = Literal["prompt_end", "from_end", "all"]


def checked_rows(rows: Any) -> Rows:
    """Rows by name.

    Raises:
        PlanError: There are none of this name.
    """
    if rows not in get_args(Rows):
        raise PlanError(f"rows={shown(rows)} must be one of {', '.join(get_args(Rows))}")
    chosen: Rows = rows
    return chosen


def acts(rows: Rows, where: Where) -> Bool[Tensor, "batch position"] | None:
    """Which of the rows being run are meant; None for all of them.

    Raises:
        PlanError: The prompt's end is not known.
    """
    if rows == "all":
        return None
    if where.lengths is None:
        raise PlanError(
            "the prompt's last token is known only where headlab runs the prompt: use the model's trace, logits or "
            "generate"
        )
    end = (where.lengths.to(where.positions.device) - 1)[:, None]
    return where.positions == end if rows == "prompt_end" else where.positions >= end
