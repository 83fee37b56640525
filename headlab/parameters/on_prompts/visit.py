"""What heads write at a position of a prompt, and what they read there, as tokens (VISIT, Katz and Belinkov 2023).

A head's vector at query i is r = z·W_O, as it enters the residual stream: behind the norm after attention, held still,
where there is one, and times the residual multiplier. Every vector x is shown as the model's own read-out of it alone,

    p = softmax(softcap(logit scale · (ln_f(x) · W_U + b_U))),

its likeliest and least likely tokens, and its norm, the width of the paper's edges. Of the keys j a head attends to
most: the value v_j·W_O, and key and query through the other side of W_Q and W_K. With streams u scaled as the layer
reads them and Ω the head's W_QK at the distance i − j, biases included (:meth:`Circuits.augmented_qk`),

    key:    d with u_i · d + constant = q_i · k_j,    d = Ω·[u_j; 1]     what a query must hold to match this key
    query:  e with e · u_j + constant = q_i · k_j,    e = [u_i; 1]ᵀ·Ω    what the query looks for in this key

up to the positive factors that a norm of q and k brings in. The paper projects keys as they are; a rotation by position
has no projection of its own, which is why it is undone here at the distance at hand.

ln_f of a lone vector drops its size, and probabilities do not add up over heads. ``logit`` does: the vector's share of
the model's own logit with the scale of ln_f held where it was in the run, as in
:func:`headlab.causal.direct_logit_attribution`; of a value it is that of A·v_j·W_O, so that a head's is the sum over j.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from headlab.arguments import is_integer, whole_number
from headlab.attention import Head, HeadsLike, Trace, keep, parse_heads
from headlab.attention.positions import resolve_positions
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.models.stream_norm import FrozenNorm, frozen
from headlab.parameters.circuits import Circuits, circuits
from headlab.prompts import Prompt, lengths_of

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

What = Literal["head", "value", "key", "query"]
#: Columns of :attr:`Visit.vectors` and of :attr:`Visit.tokens`.
VECTOR_COLUMNS = ("vector", "what", "layer", "head", "source", "weight", "norm")
TOKEN_COLUMNS = (
    *VECTOR_COLUMNS[:5],
    *("side", "rank", "token", "text", "probability", "logit"),
)
#: Logits that are held at once.
_BUDGET = 1 << 26
_COLUMNS = 1 << 14
_SHOWN = 40


@dataclass(frozen=True)
class Visit:
    """Heads at one position of a prompt as tokens.

    Attributes:
        vectors: One row per projected vector: its number; ``what`` it is (head, value, key or query); ``layer``,
            ``head``; ``source``, the position attended to (−1 for heads); ``weight``, the attention on it (NaN for
            heads); ``norm``.
        tokens: One row per vector and token: ``side`` (top or bottom), ``rank`` from 0, token id and text,
            ``probability`` in the read-out of the vector alone, and ``logit``, the additive one (NaN for keys and
            queries, which are not written to the stream).
        prompt: Tokens of the prompt up to the position, as text.
        position: The position, counted from the start.
        model: Name of the model.
    """

    vectors: pd.DataFrame
    tokens: pd.DataFrame
    prompt: tuple[str, ...]
    position: int
    model: str

    @property
    def heads(self) -> tuple[Head, ...]:
        """The heads shown, longest vector first."""
        rows = self.vectors[self.vectors["what"] == "head"]
        return tuple(map(Head, rows["layer"].tolist(), rows["head"].tolist()))

    def of(self, layer: int, head: int, what: What = "head") -> pd.DataFrame:
        """The tokens of one head's vector, or of its values, keys or queries.

        Raises:
            PlanError: They are not among those shown.
        """
        rows = self.tokens
        rows = rows[(rows["layer"] == layer) & (rows["head"] == head) & (rows["what"] == what)]
        if not len(rows):
            named = ", ".join(map(str, self.heads))
            raise PlanError(f"there is no {what} of {Head(layer, head)} here; heads shown: {named}")
        return rows.reset_index(drop=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; NaN becomes None."""
        tables = {name: _records(getattr(self, name)) for name in ("vectors", "tokens")}
        about = {"model": self.model, "position": self.position, "prompt": list(self.prompt)}
        return about | tables

    def to_json(self) -> str:
        """:meth:`to_dict` as one JSON document."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    def __repr__(self) -> str:
        lines = [f"Visit of {self.model} at position {self.position}: {len(self.heads)} heads"]
        for row in self._head_rows(3):
            lines.append(f"  {row[0]:<8} |x| {row[1]:.3g}  {' '.join(row[2])}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """A table of heads for notebooks; token texts are escaped."""
        rows = "".join(
            f"<tr><td>{name}</td><td>{norm:.3g}</td><td>{html.escape(', '.join(top))}</td>"
            f"<td>{html.escape(', '.join(bottom))}</td></tr>"
            for name, norm, top, bottom in self._head_rows(5)
        )
        where = html.escape(f"{self.model}, position {self.position}")
        return (
            f"<div><p><b>Visit</b> · {where}</p><table><thead><tr><th>head</th><th>norm</th><th>top</th>"
            f"<th>bottom</th></tr></thead><tbody>{rows}</tbody></table></div>"
        )

    def _head_rows(self, n: int) -> Iterator[tuple[str, float, list[str], list[str]]]:
        rows = self.vectors[self.vectors["what"] == "head"]
        for head, vector, norm in zip(self.heads, rows["vector"], rows["norm"], strict=True):
            mine = self.tokens[(self.tokens["vector"] == vector) & (self.tokens["rank"] < n)]
            sides = [
                [repr(text)[:_SHOWN] for text in mine.loc[mine["side"] == side, "text"]]
                for side in ("top", "bottom")
            ]
            yield str(head), float(norm), sides[0], sides[1]


@torch.no_grad()
def visit(
    model: Model,
    prompt: Prompt,
    position: int = -1,
    *,
    heads: HeadsLike | None = None,
    n_heads: int = 10,
    by: Literal["z", "result"] = "z",
    sources: int = 2,
    k: int = 10,
    keys: bool = True,
    using: Circuits | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Visit:
    """Project heads, and what they attend to, to the vocabulary.

    Args:
        model: A decoder-only model.
        prompt: One prompt.
        position: The query; negative ones count from the end.
        heads: Heads to choose from; all by default.
        n_heads: The heads with the longest vectors, over all layers. Ten is the paper's default; whether per layer or
            in all is unverified.
        by: Whose length: that of ``"z"``, as the paper has it, or of ``"result"``, what enters the stream.
        sources: Keys per head, those attended to most.
        k: Tokens at either end.
        keys: Whether to project keys and queries as well as values.
        using: The model's circuits with norms folded, where they are at hand: making them takes a few passes.
        tell: Told how far it is.

    Raises:
        PlanError: An argument does not fit.
        PromptError: There is more than one prompt.
        UnsupportedError: The model is no decoder, or weights cannot be read; without ``keys=True``, those of W_Q and
            W_K need not be.
    """
    n_heads, sources = whole_number(n_heads, "n_heads", 1), whole_number(sources, "sources")
    k = whole_number(k, "k", 1)
    if by not in ("z", "result"):
        raise PlanError(f"by={by!r} must be 'z' or 'result'")
    ids = _ids(model, prompt, position)
    chosen = parse_heads("*.*" if heads is None else heads, model.spec)
    layers = sorted({head.layer for head in chosen})
    plan: list[keep.Keep] = [
        keep.rows(queries=[-1], layers=layers),
        keep.tensors("z", layers=layers, positions=[-1]),
        keep.tensors("resid_post", layers=[model.spec.n_layers - 1], positions=[-1]),
    ]
    trace = model.trace(ids, keep=plan, logits="none")
    tell("visit: heads captured")
    kind = torch.promote_types(model.dtype, torch.float32)
    written = {
        layer: _Written(model, layer, trace.tensor("z", layer)[0, 0].to(kind)) for layer in layers
    }
    sizes = {
        head: float(
            (written[head.layer].z if by == "z" else written[head.layer].results)[head.head].norm()
        )
        for head in chosen
    }
    longest = sorted(chosen, key=lambda head: -sizes[head])[:n_heads]
    attended = {head: _attended(trace, layers, head, sources) for head in longest}
    vectors = [_Vector("head", head, -1, float("nan"), written[head.layer].results[head.head], 1.0)
               for head in longest]  # fmt: skip
    if sources:
        made = (using or circuits(model)) if keys else None
        vectors += _of_sources(model, ids, attended, written, made)
    tell(f"visit: {len(vectors)} vectors to project")
    end = trace.tensor("resid_post", model.spec.n_layers - 1)[0].to(kind)
    final = frozen(model.weights.final_norm, end, "the final norm")
    return _shown(model, ids, vectors, final, k)


# -- parts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Vector:
    what: What
    head: Head
    source: int
    weight: float
    x: Float[Tensor, " d_model"]
    #: Factor between x and what is added to the stream; None where nothing is.
    share: float | None


class _Written:
    """How a layer's heads write to the stream at the query."""

    def __init__(self, model: Model, layer: int, z: Float[Tensor, "head d_value"]) -> None:
        self.z = z
        self.W_O = model.weights.W_O(layer).to(z)
        self._factor = model.blocks.residual_multiplier
        self._held: FrozenNorm | None = None
        norm = model.blocks.attention_norm(layer)
        if norm is not None:
            out, bias = torch.einsum("hd,hdm->m", z, self.W_O), model.weights.b_O(layer)
            out = out if bias is None else out + bias.to(out)
            self._held = frozen(norm, out[None], f"the norm after attention of layer {layer}")
        self.results = self.stream(torch.einsum("hd,hdm->hm", z, self.W_O))

    def stream(self, x: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_model"]:
        """What attention's output adds to the stream, biases aside."""
        return self._factor * (x if self._held is None else self._held.linear(x))


def _ids(model: Model, prompt: Prompt, position: int) -> Tensor:
    if any(facts.stack != "decoder" for facts in model.spec.layers):
        raise UnsupportedError(
            f"projections to the vocabulary need a decoder-only model, whose stream ends in its logits; {model.name} "
            f"({model.spec.family}) is none"
        )
    ids = model.tokens(prompt)
    if len(ids) != 1:
        raise PromptError(f"visit shows one prompt, not {len(ids)}; call it once for each")
    if not is_integer(position):
        raise PlanError(f"position={position!r:.60} must be a whole number")
    end = int(resolve_positions([int(position)], lengths_of(ids), "position")[0, 0])
    return ids[0, : end + 1]


def _attended(
    trace: Trace, layers: Sequence[int], head: Head, sources: int
) -> list[tuple[int, float]]:
    """The positions a head attends to most, with their weights; hidden ones never."""
    row = trace.rows[0, layers.index(head.layer), head.head, 0]
    best = row.sort(descending=True, stable=True)
    pairs = zip(best.indices[:sources].tolist(), best.values[:sources].tolist(), strict=True)
    return [(at, weight) for at, weight in pairs if weight > 0]


def _of_sources(
    model: Model,
    ids: Tensor,
    attended: dict[Head, list[tuple[int, float]]],
    written: dict[int, _Written],
    made: Circuits | None,
) -> list[_Vector]:
    query = len(ids) - 1
    positions = sorted({query} | {at for pairs in attended.values() for at, _ in pairs})
    layers = sorted({head.layer for head in attended})
    names = ("v",) if made is None else ("v", "resid_pre")
    plan = keep.tensors(*names, layers=layers, positions=positions)
    trace = model.trace(ids, keep=plan, logits="none")
    found = []
    for head, pairs in attended.items():
        facts, at_layer = model.spec.layers[head.layer], written[head.layer]
        v = trace.tensor("v", head.layer)[0].to(at_layer.z)
        v = v[:, head.head // (facts.n_heads // v.shape[1])]
        for at, weight in pairs:
            value = at_layer.stream(v[positions.index(at)][None] @ at_layer.W_O[head.head])[0]
            found.append(_Vector("value", head, at, weight, value, weight))
            if made is None:
                continue
            x = trace.tensor("resid_pre", head.layer)[0].to(made.dtype)
            u = made.reads(head.layer, x)
            u = torch.cat([u, torch.ones_like(u[:, :1])], 1)
            omega = made.augmented_qk(head.layer, query - at)[head.head]
            key = omega.left @ (omega.right @ u[positions.index(at)])
            asked = (u[positions.index(query)] @ omega.left) @ omega.right
            for what, x in _named(key, asked):
                found.append(_Vector(what, head, at, weight, x[:-1].to(value), None))
    return found


def _named(key: Tensor, query: Tensor) -> tuple[tuple[What, Tensor], tuple[What, Tensor]]:
    return ("key", key), ("query", query)


def _shown(
    model: Model, ids: Tensor, vectors: Sequence[_Vector], final: FrozenNorm, k: int
) -> Visit:
    import pandas as pd

    W_U = model.weights.W_U
    k = min(k, W_U.shape[1])
    table, lines = [], []
    step = max(1, _BUDGET // W_U.shape[1])
    for start in range(0, len(vectors), step):
        part = vectors[start : start + step]
        x = torch.stack([vector.x for vector in part])
        logits = read_out(model, x)
        chance = logits.softmax(-1)
        for at, vector in enumerate(part):
            place = (start + at, vector.what, *vector.head, vector.source)
            table.append((*place, vector.weight, float(vector.x.norm())))
            for side in ("top", "bottom"):
                best = logits[at].topk(k, largest=side == "top").indices
                added = (
                    final.linear(vector.x[None])[0] @ W_U[:, best].to(x) * model.weights.logit_scale
                )
                added = added * (torch.nan if vector.share is None else vector.share)
                for rank, (token, p, logit) in enumerate(
                    zip(best.tolist(), chance[at, best].tolist(), added.tolist(), strict=True)
                ):
                    text = model.token_texts(torch.tensor([[token]]))[0][0]
                    lines.append((*place, side, rank, token, text, p, logit))
    return Visit(
        pd.DataFrame(table, columns=list(VECTOR_COLUMNS)),
        pd.DataFrame(lines, columns=list(TOKEN_COLUMNS)),
        model.token_texts(ids[None])[0],
        len(ids) - 1,
        model.name,
    )


def read_out(model: Model, x: Float[Tensor, "row d_model"]) -> Float[Tensor, "row n_vocab"]:
    """The model's logits for a final stream x: norm, unembedding, scale and soft cap, in the type of x."""
    weights = model.weights
    normed = frozen(weights.final_norm, x, "the final norm").apply(x)
    # By columns: the whole vocabulary in a higher precision could be larger than all else.
    logits = torch.cat([normed @ part.to(x) for part in weights.W_U.split(_COLUMNS, 1)], 1)
    if weights.b_U is not None:
        logits = logits + weights.b_U.to(x)
    logits = logits * weights.logit_scale
    cap = weights.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    plain = frame.astype(object)
    return [
        {str(name): value for name, value in row.items()}
        for row in plain.where(frame.notna(), None).to_dict("records")
    ]


__all__ = ["Visit", "visit"]
