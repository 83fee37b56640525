"""The tokens a metric asks about: strings and ids, one or several per prompt, checked against the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from headlab.errors import PlanError

if TYPE_CHECKING:
    from headlab.model import Model

#: One token id or string for all prompts, or one per prompt, or several per prompt.
Tokens: TypeAlias = "int | str | Sequence[int | str] | Sequence[Sequence[int | str]] | Tensor"


def token_ids(
    model: Model, given: Tokens, n_prompts: int, what: str = "answers"
) -> list[list[int]]:
    """Token ids of each prompt.

    Args:
        model: Its tokenizer reads strings.
        given: One id or string for all prompts, or one per prompt, or several per prompt, in a list or in a tensor
            [prompt] or [prompt, n] in which −1 fills up. A string must be exactly one token as written: mind the
            space of ``" Paris"``.
        n_prompts: How many prompts there are.
        what: What to call them in an error.

    Raises:
        PlanError: A string is not one token, an id does not exist, or there is not one entry per prompt.
    """
    if isinstance(given, Tensor) or hasattr(given, "tolist"):
        given = _listed(given, what)
    if isinstance(given, str) or _is_id(given):
        return [[_token_id(model, given, what)] for _ in range(n_prompts)]
    if not isinstance(given, Sequence):
        raise PlanError(
            f"{what}={given!r:.60} must be a token id, a string, or a list of them, one per prompt"
        )
    if len(given) != n_prompts:
        raise PlanError(
            f"{what} has {len(given)} entries for {n_prompts} prompts; give one for all of them, or one entry per "
            "prompt (several tokens of a prompt go in a list of their own)"
        )
    found = []
    for at, entry in enumerate(given):
        several = [entry] if isinstance(entry, str) or not isinstance(entry, Sequence) else entry
        if len(several) == 0:
            raise PlanError(f"{what} of prompt {at} is empty; give at least one token")
        found.append([_token_id(model, token, what) for token in several])
    return found


def _listed(given: Any, what: str) -> Any:
    values = torch.as_tensor(given)
    if values.is_floating_point() or values.dtype == torch.bool or values.dim() > 2:
        raise PlanError(
            f"{what} must be whole numbers [prompt] or [prompt, n], not {values.dtype} of shape "
            f"{list(values.shape)}"
        )
    listed = values.tolist()
    if values.dim() == 2:
        listed = [[token for token in row if token != -1] for row in listed]
    return listed


def _is_id(given: object) -> bool:
    return hasattr(given, "__index__") and not isinstance(given, bool)


def _token_id(model: Model, given: Any, what: str) -> int:
    if isinstance(given, str):
        return _one_token(model, given, what)
    if not _is_id(given):
        raise PlanError(f"{what} holds {given!r:.60}, which is neither a token id nor a string")
    token = int(given.__index__())
    if not 0 <= token < model.spec.n_vocab:
        raise PlanError(
            f"{what} holds token {token}, but {model.name} has tokens 0–{model.spec.n_vocab - 1}"
        )
    return token


def _one_token(model: Model, text: str, what: str) -> int:
    if model.tokenizer is None:
        raise PlanError(f"{model.name} came without a tokenizer, so {what} must be token ids")
    found = list(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    if len(found) != 1:
        parts = ", ".join(repr(model.tokenizer.decode([token])) for token in found) or "nothing"
        raise PlanError(
            f"{what} holds {text!r}, which splits into {len(found)} tokens ({parts}); give a string that is one "
            "token as written, spaces included, or a token id"
        )
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    if found[0] == unknown and text != model.tokenizer.unk_token:
        raise PlanError(
            f"{what} holds {text!r}, which the tokenizer of {model.name} does not know; give another token"
        )
    return int(found[0])
