"""What explains a sink: where sinks sit, whether they are a no-op, what moves them, and massive activations.

Measured on texts of 64 tokens (Gu et al. 2024, arXiv 2410.10781):

    α[l, h, k] = 1 / (T − k) · Σ_{q≥k} A[q, k]        (k from 0; the first row, A[0, 0] = 1, included)

The divisor is the number of rows that can see the key: T − k under causal attention without a window. Keys near
the end of the text are left out, since their mean is over fewer than :data:`LEAST_ROWS` rows.

The same texts without their BOS token, and with it moved behind the 16th token, tell whether a head rests on BOS
or on whatever comes first. Massive activations follow Sun et al. 2024 (arXiv 2402.17762): at each block's output,
the largest |x| of a sequence beside the median of |x| over its tokens and dimensions, massive where |x| > 100 and at
least 1000 times the median. They use 10 sequences; the numbers here are of the short texts above.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headlab.attention import attention_chunks, keep
from headlab.roles.base import Arrays, Detail, Probing
from headlab.roles.prose_rows import text_ids, visible

if TYPE_CHECKING:
    from headlab.model import Model

#: Gu et al.'s ε and T.
EPSILON = 0.3
LENGTH = 64
#: α of a key is told when at least this many rows see it.
LEAST_ROWS = 16
#: Where BOS goes when it is moved: behind this many tokens.
MOVED = 16
#: Sun et al.'s criterion: size, and size over the median.
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0
_BATCH = 4


@dataclass(frozen=True)
class ShortTexts:
    """What texts of :data:`LENGTH` tokens showed.

    Attributes:
        ids: The texts.
        first: Mass on the first token of the rows after it.
        alpha: Mean mass per key, over the rows that see it.
        value_ratio: Norm of the first token's value over the median norm of the others'.
        output_ratio: Mean norm of z, the first row left out, over the median norm of values but the first.
        peak: Largest |x| at each block's output; NaN where it could not be read.
        median: Median of |x| there.
        position: Position of the largest.
        dimension: Dimension of the residual stream of the largest.
    """

    ids: Int[np.ndarray, "prompt position"]
    first: Float[np.ndarray, "prompt layer head query"]
    alpha: Float[np.ndarray, "prompt layer head key"]
    value_ratio: Float[np.ndarray, "prompt layer head"]
    output_ratio: Float[np.ndarray, "prompt layer head"]
    peak: Float[np.ndarray, "prompt layer"]
    median: Float[np.ndarray, "prompt layer"]
    position: Int[np.ndarray, "prompt layer"]
    dimension: Int[np.ndarray, "prompt layer"]

    @property
    def told(self) -> int:
        """Keys, from the first, whose α is told."""
        return max(1, self.alpha.shape[-1] - LEAST_ROWS + 1)

    @property
    def sinks(self) -> Bool[np.ndarray, "prompt layer head key"]:
        """Whether α > ε, for the keys that are told."""
        return self.alpha[..., : self.told] > EPSILON


def short_texts(probing: Probing, ids: Int[Tensor, "prompt position"]) -> ShortTexts:
    """Run short texts; parts are remembered batch by batch."""
    parts = []
    for start in range(0, len(ids), _BATCH):
        batch = ids[start : start + _BATCH]
        probing.tell(f"sinks in text {start + 1}–{start + len(batch)} of {len(ids)}")
        run = partial(_run, probing, batch)
        parts.append(probing.part(f"sinks-{start:03d}", batch.numpy(), run))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return ShortTexts(ids.numpy(), **joined)


def wrapping(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer itself puts before and after a text, such as [CLS] and [SEP]."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for before in range(len(whole) - len(bare) + 1):
        if whole[before : before + len(bare)] == bare:
            return list(whole[:before]), list(whole[before + len(bare) :])
    return [], []


def sink_details(probing: Probing) -> dict[str, Detail]:
    """Everything this module tells, by name."""
    length = probing.length(LENGTH)
    bos = probing.bos
    texts = text_ids(probing, length)
    found = short_texts(probing, texts)
    sinks = found.sinks
    details = {
        "sink_rate": Detail(
            sinks.mean(0),
            f"share of {length}-token texts in which the key at this position receives more than {EPSILON} of the "
            "attention of the rows that see it",
            np.arange(found.told, dtype=np.float64),
        ),
        "other_sinks": Detail(
            sinks[..., 1:].any(-1).mean(0),
            f"share of {length}-token texts with a sink (α > {EPSILON}) at another position than the first, the last "
            f"{length - found.told} left out",
        ),
        "value_norm_ratio": Detail(
            np.median(found.value_ratio, 0),
            "norm of the first token's value over the median norm of the others' (small: resting there adds nothing)",
        ),
        "output_norm_ratio": Detail(
            np.median(found.output_ratio, 0),
            "mean norm of the head's output z over the median norm of values but the first (small: a no-op)",
        ),
        **massive_details(found),
    }
    if bos is not None:
        details |= _moved(probing, texts, min(MOVED, length // 2))
    return details


def _moved(probing: Probing, texts: Tensor, behind: int) -> dict[str, Detail]:
    """BOS left out, and BOS moved into the middle."""
    bare = texts[:, 1:]
    moved = torch.cat([bare[:, :behind], texts[:, :1], bare[:, behind:]], 1)
    return {
        "first_token_removed": Detail(
            _mean_mass(probing, "sinks-bare", bare, 0),
            "mean attention of later rows to the first token of a text without BOS",
        ),
        "bos_moved": Detail(
            _mean_mass(probing, "sinks-moved", moved, behind),
            f"mean attention of later rows to BOS when it stands behind {behind} tokens of text",
        ),
    }


def _mean_mass(probing: Probing, name: str, ids: Tensor, key: int) -> np.ndarray:
    """Mean mass on one key of the rows after it that can see it, over rows and prompts; [layer, head]."""
    probing.tell(
        "the text without BOS" if name == "sinks-bare" else "BOS in the middle of the text"
    )

    def run() -> Arrays:
        on = torch.zeros(ids.shape[1])
        on[key] = 1
        plan = keep.statistics("feature", x=on)
        parts = []
        for start in range(0, len(ids), _BATCH):
            trace = probing.model.trace(ids[start : start + _BATCH], keep=plan, logits="none")
            parts.append(trace.statistic("feature")[..., key + 1 :].float().cpu().numpy())
        return {"mass": np.concatenate(parts)}

    mass = probing.part(name, ids.numpy(), run)["mass"]
    chosen = seen_keys(probing, ids.shape[1])[:, None, key + 1 :, key]
    total, rows = np.where(chosen, mass, 0).sum((0, -1)), chosen.sum(-1) * len(mass)
    return np.divide(total, rows, out=np.full(total.shape, np.nan), where=rows > 0)


def massive_details(found: ShortTexts) -> dict[str, Detail]:
    """Massive activations, layer by layer; blocks whose output cannot be read are left out."""
    known = ~np.isnan(found.peak).any(0)
    ratio = found.peak / found.median
    massive = (found.peak > MASSIVE) & (ratio >= MASSIVE_RATIO)

    def per_layer(values: np.ndarray, meaning: str) -> Detail:
        return Detail(np.where(known, values, np.nan)[:, None], meaning, per_layer=True)

    return {
        "massive_activation": per_layer(
            ratio.mean(0), "largest |x| of the block's output over the median |x|, mean over texts"
        ),
        "massive_size": per_layer(
            found.peak.mean(0), "largest |x| of the block's output, mean over texts"
        ),
        "massive_rate": per_layer(
            massive.mean(0),
            "share of texts whose largest |x| is above 100 and at least 1000 times the median |x| (Sun et al. 2024)",
        ),
        "massive_position": per_layer(
            _commonest(found.position), "position at which the largest |x| sits most often"
        ),
        "massive_dimension": per_layer(
            _commonest(found.dimension),
            "dimension of the residual stream in which the largest |x| sits most often",
        ),
    }


def _commonest(values: Int[np.ndarray, "prompt layer"]) -> Float[np.ndarray, " layer"]:
    return np.array([np.bincount(column).argmax() for column in values.T], np.float64)


@torch.no_grad()
def _run(probing: Probing, ids: Int[Tensor, "prompt position"]) -> Arrays:
    model = probing.model
    plan: list[keep.Keep] = [
        keep.statistics("received", "first_mass"),
        keep.tensors("v", "z", offload="cpu"),
    ]
    n_layers, n_heads = model.spec.n_layers, model.spec.n_heads
    peaks = np.full((4, len(ids), n_layers), np.nan)
    with block_outputs(model) as outputs:
        trace = model.trace(ids, keep=plan, logits="none")
        for layer, x in outputs.items():
            if x.shape[:2] == ids.shape and x.dim() == 3:
                peaks[:, :, layer] = _peak(x)
    value, output = np.full((2, len(ids), n_layers, n_heads), np.nan)
    for layer in range(n_layers):
        v, z = (trace.tensor(name, layer).float() for name in ("v", "z"))
        norms = v.norm(dim=-1)  # [prompt, position, kv head]
        typical = norms[:, 1:].median(1).values
        group = z.shape[2] // v.shape[2]
        heads = slice(0, z.shape[2])
        value[:, layer, heads] = (norms[:, 0] / typical).repeat_interleave(group, 1).numpy()
        written = z[:, 1:].norm(dim=-1).mean(1)
        output[:, layer, heads] = (written / typical.repeat_interleave(group, 1)).numpy()
    received = trace.statistic("received").float().cpu().numpy()
    return {
        "first": trace.statistic("first_mass")[..., 1:].float().cpu().numpy(),
        "alpha": received / seen_keys(probing, ids.shape[1]).sum(1)[:, None],
        "value_ratio": value,
        "output_ratio": output,
        "peak": peaks[0],
        "median": peaks[1],
        "position": np.nan_to_num(peaks[2]).astype(np.int64),
        "dimension": np.nan_to_num(peaks[3]).astype(np.int64),
    }


def seen_keys(probing: Probing, length: int) -> Bool[np.ndarray, "layer query key"]:
    """Which keys the rows of each layer see."""
    layers = zip(probing.model.spec.layers, attention_chunks(probing.model), strict=True)
    return np.stack([visible(layer.causal, layer.window, chunk, length) for layer, chunk in layers])


def _peak(x: Float[Tensor, "prompt position d_model"]) -> Float[np.ndarray, "4 prompt"]:
    """Largest |x|, median |x|, and position and dimension of the largest, per sequence."""
    size = x.float().abs().flatten(1)
    top, at = size.max(1)
    found = torch.stack(
        [
            top.double(),
            size.median(1).values.double(),
            (at // x.shape[-1]).double(),
            (at % x.shape[-1]).double(),
        ]
    )
    return found.cpu().numpy()


@contextmanager
def block_outputs(model: Model) -> Iterator[dict[int, Tensor]]:
    """The residual stream after each block of the runs in this block, by layer, [batch, position, d_model].

    A layer's block is the list element its attention module lies in, such as ``model.layers.3``. Layers outside any
    list, and blocks that give no tensor, are left out.
    """
    outputs: dict[int, Tensor] = {}

    def note(layer: int, module: nn.Module, args: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        if isinstance(x, Tensor):
            outputs[layer] = x.detach()

    hooks = []
    try:
        for at, layer in enumerate(model.spec.layers):
            block = block_of(model.module, layer.name)
            if block is not None:
                hooks.append(block.register_forward_hook(partial(note, at)))
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def block_of(module: nn.Module, name: str) -> nn.Module | None:
    """The block a layer's attention module lies in; None where it lies in no list of blocks."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit():
            return module.get_submodule(".".join(parts[: at + 1]))
    return None
