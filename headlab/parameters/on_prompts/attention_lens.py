"""A linear map per head from what the head writes to the vocabulary, tuned to the model's predictions (Attention Lens,
Sakarvadia et al. 2023).

For one layer, each head h has an affine map L_h from d_model to the vocabulary, which begins as the unembedding:

    lens(r) = Σ_h (r_h · L_h + c_h),    L_h = W_U and c_h = b_U before training,

with r_h = z_h·W_O, without b_O, at a prompt's last position. Training (:func:`train_lens`) lowers the Kullback–Leibler
divergence KL(model ‖ lens). So an untrained lens is W_U applied to Σ_h r_h plus *H copies* of b_U, as in the authors'
code. Neither the final norm nor a norm behind attention stands between.

A full lens has H·d_model·n_vocab weights, 463 million for a layer of GPT-2. ``rank=`` learns L_h = s_h·W_U + A_h·B_h
instead, with A_h·B_h of low rank and a number s_h that begins at 1: without the final norm W_U·r_h is many times too
large, and no matrix of low rank makes W_U smaller. ``heads=`` takes some of the heads and ``vocabulary=`` some of the
tokens. These three are headlab's own, not the paper's: with some heads alone, the lens predicts the model from them;
with some tokens, both distributions are renormalised over them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headlab.arguments import is_integer, whole_number
from headlab.attention import Head, HeadsLike, Trace, keep, parse_heads
from headlab.attention.positions import resolve_positions
from headlab.errors import HeadError, OutputError, PlanError, PromptError, UnsupportedError
from headlab.prompts import Prompt, lengths_of

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

_FORMAT = "headlab-attention-lens-2"


@dataclass(frozen=True, eq=False)
class AttentionLens:
    """A lens of some heads of one layer.

    Attributes:
        model: The model it reads.
        heads: The heads, all of one layer.
        vocabulary: Token ids along its last axis.
        change: ``{"dense": [head, d_model, token]}``, what was learned on top of W_U, or its factors ``{"left": [head,
            d_model, rank], "right": [head, rank, token], "scale": [head]}``, A, B and s.
        bias: c of each head, [head, token].
        losses: KL of each training step before it was taken, in nats; empty for an untrained lens.
    """

    model: Model
    heads: tuple[Head, ...]
    vocabulary: Int[Tensor, " token"]
    change: dict[str, Tensor]
    bias: Float[Tensor, "head token"]
    losses: tuple[float, ...] = ()

    @property
    def layer(self) -> int:
        """The layer."""
        return self.heads[0].layer

    @property
    def rank(self) -> int | None:
        """Rank of what was learned; None for a full lens."""
        return self.change["left"].shape[-1] if "left" in self.change else None

    @property
    def unembedding(self) -> Float[Tensor, "d_model token"]:
        """W_U of the lens's tokens."""
        W_U = self.model.weights.W_U
        whole = len(self.vocabulary) == W_U.shape[1]
        return (W_U if whole else W_U[:, self.vocabulary.to(W_U.device)]).to(self.bias)

    def per_head(
        self, results: Float[Tensor, "prompt head d_model"]
    ) -> Float[Tensor, "prompt head token"]:
        """What each head's map gives for what the head wrote, in logits.

        Args:
            results: r of the lens's heads, in their order.
        """
        shared = self._scaled(results) @ self.unembedding
        return shared + self._learned(results, summed=False) + self.bias

    def logits(
        self, results: Float[Tensor, "prompt head d_model"]
    ) -> Float[Tensor, "prompt token"]:
        """The lens: :meth:`per_head` summed over heads, without a row per head in memory."""
        # The part that all heads share is taken once.
        shared = self._scaled(results).sum(1) @ self.unembedding
        return shared + self._learned(results, summed=True) + self.bias.sum(0)

    def top(
        self, head: Head | tuple[int, int] | str, prompt: Prompt, k: int = 10, position: int = -1
    ) -> pd.DataFrame:
        """The tokens a head's map puts first, for what the head writes at a position.

        Returns:
            One row per token: ``rank``, ``token``, ``text``, ``logit``, and ``probability`` among the lens's tokens.

        Raises:
            HeadError: The lens has no such head.
            PlanError: k or position does not fit.
            PromptError: There is more than one prompt.
        """
        import pandas as pd

        k = whole_number(k, "k", 1)
        wanted = parse_heads(head, self.model.spec)
        if len(wanted) != 1 or wanted[0] not in self.heads:
            named = ", ".join(map(str, self.heads))
            raise HeadError(f"{head!r} is not one head of this lens, which has {named}")
        ids = self.model.tokens(prompt)
        if len(ids) != 1 or not is_integer(position):
            raise PromptError(
                f"a head's tokens are shown for one prompt and position, not {len(ids)}"
            )
        end = int(resolve_positions([int(position)], lengths_of(ids), "position")[0, 0])
        plan = keep.tensors("z", layers=[self.layer], positions=[-1])
        trace = self.model.trace(ids[:, : end + 1], keep=plan, logits="none")
        results = head_results(self.model, trace, self.heads).to(self.bias)
        with torch.no_grad():
            logits = self.per_head(results)[0, self.heads.index(wanted[0])]
        best = logits.topk(min(k, len(logits)))
        tokens = self.vocabulary[best.indices.to(self.vocabulary.device)]
        return pd.DataFrame(
            {
                "rank": range(len(tokens)),
                "token": tokens.tolist(),
                "text": self.model.token_texts(tokens[None])[0],
                "logit": best.values.tolist(),
                "probability": logits.softmax(0)[best.indices].tolist(),
            }
        )

    def save(self, path: str | Path) -> Path:
        """Write what was learned to a safetensors file, whole or not at all.

        Raises:
            OutputError: It cannot be written.
        """
        path = Path(path)
        about = {
            "format": _FORMAT,
            "model": self.model.name,
            "fingerprint": self.model.fingerprint,
            "layer": self.layer,
            "heads": [head.head for head in self.heads],
            "losses": list(self.losses),
        }
        tensors = {"bias": self.bias, "vocabulary": self.vocabulary, **self.change}
        ready = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        partial = path.with_name(f".{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(ready, partial, metadata={"about": json.dumps(about)})
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            raise OutputError(f"cannot write the lens to {path}: {error}") from error
        return path

    @staticmethod
    def load(path: str | Path, model: Model) -> AttentionLens:
        """Read what :meth:`save` wrote, for the model it was trained on.

        Raises:
            OutputError: The file holds no readable lens, or one of other weights.
            PlanError: The arguments are no path and model, in this order.
        """
        if not isinstance(path, str | Path) or not hasattr(model, "fingerprint"):
            raise PlanError(
                "AttentionLens.load takes the path first and then the model, as in load('lens.safetensors', model), "
                f"not {type(path).__name__} and {type(model).__name__}"
            )
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["about"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about["format"] != _FORMAT:
                raise OutputError(f"{path} was written as {about['format']!r:.60}, not {_FORMAT!r}")
            if about["fingerprint"] != model.fingerprint:
                raise OutputError(
                    f"{path} holds a lens of {about['model']!r:.60} with other weights than those of {model.name}; "
                    "open it with the model it was trained on"
                )
            heads = tuple(Head(int(about["layer"]), int(head)) for head in about["heads"])
            losses = tuple(float(loss) for loss in about["losses"])
            vocabulary, bias = tensors.pop("vocabulary"), tensors.pop("bias").to(model.device)
            change = {name: value.to(model.device) for name, value in tensors.items()}
            lens = AttentionLens(model, heads, vocabulary.to(model.device), change, bias, losses)
            _fits(lens)
        except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
            raise OutputError(f"{path} holds no readable lens: {error!r:.200}") from error
        return lens

    def __repr__(self) -> str:
        learned = sum(value.numel() for value in self.change.values()) + self.bias.numel()
        how = f"rank {self.rank}" if self.rank is not None else "full"
        state = f"{len(self.losses)} steps" if self.losses else "untrained"
        return (
            f"AttentionLens of layer {self.layer} of {self.model.name}: {len(self.heads)} heads, "
            f"{len(self.vocabulary)} tokens, {how}, {learned} numbers learned, {state}"
        )

    def _scaled(self, results: Tensor) -> Tensor:
        scale = self.change.get("scale")
        return results if scale is None else results * scale[:, None]

    def _learned(self, results: Tensor, summed: bool) -> Tensor:
        after = "pt" if summed else "pht"
        if "dense" in self.change:
            return torch.einsum(f"phd,hdt->{after}", results, self.change["dense"])
        low = torch.einsum("phd,hdr->phr", results, self.change["left"])
        return torch.einsum(f"phr,hrt->{after}", low, self.change["right"])


def untrained_lens(
    model: Model,
    heads: HeadsLike,
    *,
    rank: int | None = None,
    vocabulary: Any = None,
    seed: int = 0,
) -> AttentionLens:
    """The lens before training: every head's map is the unembedding.

    Args:
        model: A decoder-only model.
        heads: Heads of one layer, ``"5.*"`` for all of it.
        rank: Rank of what may be learned beside W_U times a number per head; None for full maps.
        vocabulary: Token ids to predict among; all by default.
        seed: Seed of A, of variance 1 / d_model; B is 0 and s is 1, so that the lens begins as W_U.

    Raises:
        HeadError: Heads do not exist or lie in several layers.
        PlanError: Rank or vocabulary does not fit.
        UnsupportedError: The model is no decoder, or weights cannot be read.
    """
    chosen = parse_heads(heads, model.spec)
    if len({head.layer for head in chosen}) > 1:
        raise HeadError(
            f"a lens is of one layer, but heads= names {chosen[0]} and {chosen[-1]}; make one lens for each layer"
        )
    if any(facts.stack != "decoder" for facts in model.spec.layers):
        raise UnsupportedError(
            f"a lens needs a decoder-only model, whose last position predicts; {model.name} ({model.spec.family}) is "
            "none"
        )
    W_U, kind = model.weights.W_U, torch.promote_types(model.dtype, torch.float32)
    n_vocab, d_model = W_U.shape[1], W_U.shape[0]
    tokens = torch.arange(n_vocab) if vocabulary is None else _tokens(vocabulary, n_vocab)
    tokens = tokens.to(W_U.device)
    b_U = model.weights.b_U
    bias = W_U.new_zeros(len(tokens), dtype=kind) if b_U is None else b_U[tokens].to(kind)
    shape, change = (len(chosen), d_model, len(tokens)), {}
    if rank is None:
        change["dense"] = bias.new_zeros(shape)
    else:
        rank = whole_number(rank, "rank", 1)
        generator = torch.Generator().manual_seed(seed)
        left = torch.randn(len(chosen), d_model, rank, generator=generator) / d_model**0.5
        change = {
            "left": left.to(bias),
            "right": bias.new_zeros(len(chosen), rank, len(tokens)),
            "scale": bias.new_ones(len(chosen)),
        }
    return AttentionLens(model, chosen, tokens, change, bias.repeat(len(chosen), 1))


@torch.no_grad()
def head_results(
    model: Model, trace: Trace, heads: tuple[Head, ...]
) -> Float[Tensor, "prompt head d_model"]:
    """r = z·W_O of heads of one layer, without b_O, from a trace that kept z of the last position alone."""
    layer, which = heads[0].layer, [head.head for head in heads]
    z = trace.tensor("z", layer)[:, 0, which]
    kind = torch.promote_types(model.dtype, torch.float32)
    W_O = model.weights.W_O(layer)[which]
    return torch.einsum("phd,hdm->phm", z.to(kind), W_O.to(z.device, kind))


def _tokens(given: Any, n_vocab: int) -> Int[Tensor, " token"]:
    listed = given.tolist() if hasattr(given, "tolist") else list(given)
    fine = all(is_integer(token) and 0 <= token < n_vocab for token in listed)
    if not fine or len(set(listed)) < len(listed) or len(listed) < 2:
        raise PlanError(
            f"vocabulary= must be at least two different token ids of 0–{n_vocab - 1}, not {listed!r:.60}"
        )
    return torch.tensor([int(token) for token in listed])


def _fits(lens: AttentionLens) -> None:
    """Raise ValueError unless a lens's parts fit each other and its model."""
    n, tokens, d_model = len(lens.heads), len(lens.vocabulary), lens.model.spec.d_model
    for head in lens.heads:
        parse_heads(head, lens.model.spec)
    shapes = {name: tuple(value.shape) for name, value in lens.change.items()}
    rank = lens.change["left"].shape[-1] if "left" in shapes else 0
    wanted: dict[str, tuple[int, ...]] = {"dense": (n, d_model, tokens)}
    if rank:
        wanted = {"left": (n, d_model, rank), "right": (n, rank, tokens), "scale": (n,)}
    inside = (
        int(lens.vocabulary.min()) >= 0 and int(lens.vocabulary.max()) < lens.model.spec.n_vocab
    )
    if n == 0 or shapes != wanted or tuple(lens.bias.shape) != (n, tokens) or not inside:
        raise ValueError(f"its parts {shapes} do not fit {n} heads and {tokens} tokens")


__all__ = ["AttentionLens", "untrained_lens"]
