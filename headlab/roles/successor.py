"""Successor heads (Gould et al. 2023): reading "Monday", the head writes "Tuesday".

For an item of an ordered list in the prompt [BOS, item], the head's direct contribution if it attended to the item
alone: v at the item's position, through W_O, the final norm and W_U. The item counts 1 if its successor has the
highest logit of the list's members, the item itself left out, and else 0; the score is the mean over items. That each
head's v is read in its own layer, with all that earlier layers made of the item, is headlab's; Gould et al., as far
as remembered (unverified), put the output of the first MLP in its place and rank the successor in the same way.

The null is chance in closed form: 1 / (members − 1). A head that raises both neighbours of an item, or whatever is
like it, scores up to a half; the detail ``predecessor`` shows how often the item before comes out on top.

Items are single tokens. They are dealt to groups, at most one of a list to a group, and the group is the unit of the
statistics. MLPs and norms between head and unembedding are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headlab.attention import keep
from headlab.errors import UnsupportedError
from headlab.roles.base import (
    Arrays,
    Behaviour,
    Detail,
    Look,
    Measurement,
    Probing,
    Role,
    register,
)
from headlab.roles.confirmation import next_token_log_probability
from headlab.roles.copying import normed
from headlab.roles.scores import RoleInfo
from headlab.tasks import SEQUENCE_SCHEMA, OrderedTokens, dealt, ordered_tokens

_BATCH = 64
_SHOWN = 3
_BEHAVIOUR_PROMPTS = 40


def next_item_log_probability(probing: Probing) -> Float[np.ndarray, " prompt"]:
    """Log-probability, in nats, of the item that continues three of a list, as in "Monday, Tuesday, Wednesday,"."""
    model = probing.model
    if not model.spec.layers[0].causal or model.tokenizer is None:
        return np.full(1, np.nan)
    runs = [
        run
        for found in ordered_tokens(model.tokenizer, probing.records)
        for run in found.runs(_SHOWN + 1)
    ]
    if not runs:
        return np.full(1, np.nan)
    rng = np.random.default_rng(probing.seed)
    chosen = rng.permutation(len(runs))[:_BEHAVIOUR_PROMPTS]
    first = [] if probing.bos is None else [probing.bos]
    comma = model.tokenizer(",", add_special_tokens=False)["input_ids"]
    if model.tokenizer.decode(comma).strip() != ",":
        comma = []  # the tokenizer knows no comma
    ids = torch.tensor(
        [
            [*first, *(token for item in runs[at][:-1] for token in (item, *comma)), runs[at][-1]]
            for at in chosen
        ]
    )
    return next_token_log_probability(model, ids)[:, -1].double().numpy()


NEXT_ITEM = Behaviour("log-probability of a list's next item (nats)", next_item_log_probability)


class Successor(Role):
    """See the module's docstring."""

    info = RoleInfo(
        name="successor",
        title="Successor",
        question="Reading an item of an ordered list, does the head raise the next one most?",
        statistic="share of items whose successor gets its list's highest logit from the head attending to the item",
        null="chance: one in the other members of the list",
        decision="score ≥ 0.5 and at least 0.3 above chance, at q ≤ the false-discovery rate",
        reference="Gould et al. 2023, Successor heads; details unverified, see the module",
        min_score=0.5,
        min_effect=0.3,
        row_convention="the row that reads the item, whatever its position",
        reduction="mean over the items of a group, one of each list at most, then over groups",
        sink_convention="attention is not used: the head is taken to attend to the item alone",
    )
    schema = SEQUENCE_SCHEMA
    behaviour = NEXT_ITEM

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        model, spec = probing.model, probing.model.spec
        if model.tokenizer is None:
            return Measurement.not_measurable(probing, "ordered lists need a tokenizer")
        lists = ordered_tokens(model.tokenizer, probing.records)
        if not spec.layers[0].causal:
            return Measurement.not_measurable(probing, "the model predicts no next token")
        if not lists:
            return Measurement.not_measurable(
                probing, "the tokenizer splits the items of all lists"
            )
        groups = dealt(lists, probing.n_prompts, probing.seed)
        items = sorted({item for group in groups for item in group})
        try:
            outcomes = _outcomes(probing, lists, items)
        except UnsupportedError as error:
            return Measurement.not_measurable(probing, str(error))
        values = np.stack([np.mean([outcomes[item][0] for item in group], 0) for group in groups])
        chance = [
            np.mean([1 / (len(lists[at].members) - 1) for at, _ in group]) for group in groups
        ]
        null = np.broadcast_to(np.array(chance)[:, None, None], values.shape).copy()
        looks = tuple(_look(probing, lists, group[0], outcomes[group[0]]) for group in groups[:2])
        return Measurement(values, null, looks, details=_details(lists, items, outcomes))


def _outcomes(
    probing: Probing, lists: Sequence[OrderedTokens], items: list[tuple[int, int]]
) -> dict[tuple[int, int], Float[np.ndarray, "2 layer head"]]:
    """Whether the successor, and whether the predecessor, has the highest logit, per item."""
    first = [] if probing.bos is None else [probing.bos]
    found = {}
    for start in range(0, len(items), _BATCH):
        batch = items[start : start + _BATCH]
        probing.tell(f"items {start + 1}–{start + len(batch)} of {len(items)}")
        tokens = [lists[at].members[lists[at].pairs[pair][0]] for at, pair in batch]
        ids = torch.tensor([[*first, token] for token in tokens])

        def compute(ids: Tensor = ids, batch: list[tuple[int, int]] = batch) -> Arrays:
            return {"tops": _tops(probing, ids, lists, batch)}

        key = np.concatenate([ids.numpy(), np.array(batch)], 1)
        tops = probing.part(f"successor-{start:03d}", key, compute)["tops"]
        for item, top in zip(batch, tops, strict=True):
            at, pair = item
            one, successor = lists[at].pairs[pair]
            predecessor = next((a for a, b in lists[at].pairs if b == one), -1)
            before = np.where(predecessor < 0, np.nan, top == predecessor)
            found[item] = np.stack([top == successor, before]).astype(np.float64)
    return found


@torch.no_grad()
def _tops(
    probing: Probing,
    ids: Tensor,
    lists: Sequence[OrderedTokens],
    batch: list[tuple[int, int]],
) -> np.ndarray:
    """The member of the item's list that each head raises most, the item left out, [item, layer, head]."""
    model = probing.model
    trace = model.trace(ids, keep=keep.tensors("v", positions=[-1]), logits="none")
    tops = np.full((len(batch), model.spec.n_layers, model.spec.n_heads), -1)
    for layer, facts in enumerate(model.spec.layers):
        w_o = model.weights.W_O(layer)
        v = trace.tensor("v", layer)[:, 0].to(w_o)
        v = v.repeat_interleave(facts.n_heads // v.shape[1], 1)
        result = torch.einsum("bhd,hdm->bhm", v, w_o).float()
        written = normed(result, model.weights.final_norm)
        for at, (which, pair) in enumerate(batch):
            members = torch.tensor(lists[which].members, device=written.device)
            logits = written[at] @ model.weights.W_U[:, members].to(written)
            logits[:, lists[which].pairs[pair][0]] = -torch.inf
            tops[at, layer, : facts.n_heads] = logits.argmax(-1).cpu().numpy()
    return tops


def _details(
    lists: Sequence[OrderedTokens],
    items: list[tuple[int, int]],
    outcomes: dict[tuple[int, int], np.ndarray],
) -> dict[str, Detail]:
    """The score by list, and how often the predecessor comes out on top."""
    details = {}
    for at, found in enumerate(lists):
        mine = [outcomes[item][0] for item in items if item[0] == at]
        chance = 1 / (len(found.members) - 1)
        details[f"successor of {found.name}"] = Detail(
            np.mean(mine, 0),
            f"share of {len(mine)} {found.name} whose successor is on top; chance {chance:.2g}",
        )
    before = np.stack([outcomes[item][1] for item in items])
    known = ~np.isnan(before).all((1, 2))
    if known.any():
        details["predecessor"] = Detail(
            before[known].mean(0), "share of items whose predecessor is on top"
        )
    return details


def _look(
    probing: Probing,
    lists: Sequence[OrderedTokens],
    item: tuple[int, int],
    outcome: Float[np.ndarray, "2 layer head"],
) -> Look:
    which, pair = item
    first = [] if probing.bos is None else [probing.bos]
    ids = np.array([*first, lists[which].members[lists[which].pairs[pair][0]]])
    return Look(ids, np.array([len(first)]), outcome[0][..., None])


register(Successor())
