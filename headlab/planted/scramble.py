"""Controls: a planted model with one circuit of one head made random."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from headlab.attention.heads import Head, read_head
from headlab.errors import HeadError, PlanError
from headlab.planted.build import Planted
from headlab.planted.plan import READS_PREVIOUS
from headlab.planted.seeds import generator

PARTS = ("qk", "ov")
#: Roles that are about what a head writes, not only about where it looks.
NEEDS_OV = ("induction", "retrieval", "temporal")


@dataclass(frozen=True)
class _Views:
    """One head's slices of a module's weights, ``[d_head, d_model]``; writing writes through."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    owns_kv: bool


def scramble(
    planted: Planted, head: str | tuple[int, int], part: str = "qk", seed: int = 0
) -> Planted:
    """The same model with one head's QK or OV circuit made random, at equal (Frobenius) norm.

    Random queries, keys and values read nothing from the direction that every token shares: through
    it, random weights this large would make a head that stares at one distance, which is a role of
    its own. Keys and values that other query heads share stay as they are; the head's own query or
    output is random all the same.

    Args:
        planted: The model to start from; it is left untouched.
        head: Any head of it, planted or not, written ``"L1H0"`` or ``"1.0"``.
        part: ``"qk"`` (where it attends) or ``"ov"`` (what it moves).
        seed: Decides the random weights.

    Returns:
        The changed copy. Its truth names only what still holds: the head loses a role that needs
        the part (induction, retrieval and temporal need both; the other roles are about attention,
        so they survive a random OV), and induction and retrieval heads left with no previous_token
        head to read from lose theirs.

    Raises:
        HeadError: The head cannot be read, or lies outside the model.
        PlanError: ``part`` is neither.
    """
    if part not in PARTS:
        raise PlanError(f"part {part!r} of a head cannot be scrambled: use 'qk' or 'ov'")
    which = read_head(head)
    module = deepcopy(planted.module)
    with torch.no_grad():
        views = _views(module, which)
        shared = _shared_direction(module)
        qk, ov = [("q", views.q), ("k", views.k)], [("o", views.o), ("v", views.v)]
        targets = qk if part == "qk" else ov
        for name, weight in targets:
            if name in "qo" or views.owns_kv:
                draws = generator(seed, "scramble", which, name).standard_normal(
                    tuple(weight.shape)
                )
                fresh = torch.from_numpy(draws)
                if name != "o":
                    fresh -= torch.outer(fresh @ shared, shared)
                weight.copy_(fresh * (weight.double().norm() / fresh.norm()))
    return replace(planted, module=module, truth=_truth(planted.truth, which, part))


def _truth(truth: dict[str, str], scrambled: Head, part: str) -> dict[str, str]:
    """The roles that still hold once a head's part is random."""
    roles = {read_head(name): role for name, role in truth.items()}
    lost = {scrambled} if part == "qk" or roles.get(scrambled) in NEEDS_OV else set()
    if roles.get(scrambled) == "previous_token":
        feeds = [
            head for head, role in roles.items() if role == "previous_token" and head != scrambled
        ]
        lost |= {
            head
            for head, role in roles.items()
            if role in READS_PREVIOUS and not any(feed.layer < head.layer for feed in feeds)
        }
    return {str(head): role for head, role in roles.items() if head not in lost}


def _views(module: PreTrainedModel, head: Head) -> _Views:
    config = module.config
    n_layers, n_heads = config.num_hidden_layers, config.num_attention_heads
    if not (head.layer < n_layers and head.head < n_heads):
        raise HeadError(
            f"head {head} does not exist: the planted model has layers 0–{n_layers - 1} and heads "
            f"0–{n_heads - 1}"
        )
    if config.model_type == "llama":
        attention = module.model.layers[head.layer].self_attn
        group = n_heads // config.num_key_value_heads
        q, k, v = (
            proj.weight.unflatten(0, (-1, config.head_dim))
            for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        o = attention.o_proj.weight.T.unflatten(0, (-1, config.head_dim))
    else:
        attention = module.transformer.h[head.layer].attn
        group = 1
        q, k, v = attention.c_attn.weight.T.unflatten(0, (3, n_heads, -1))
        o = attention.c_proj.weight.unflatten(0, (n_heads, -1))
    kv = head.head // group
    return _Views(q[head.head], k[kv], v[kv], o[head.head], owns_kv=group == 1)


def _shared_direction(module: PreTrainedModel) -> torch.Tensor:
    """The unit vector every embedding has in common, ``[d_model]``, float64."""
    mean = module.get_input_embeddings().weight.double().mean(dim=0)
    return mean / mean.norm()
