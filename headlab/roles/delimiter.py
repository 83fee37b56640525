"""Delimiter heads (Clark et al. 2019, §3.2): attention parked on separators rather than on the first token.

Clark et al. found heads of BERT that put most of their attention on [SEP], or on full stops and commas, and took it
for a no-op. Delimiters here are, the first position left out: special tokens ([SEP], </s>, chat marks; not those for
unknown and masked words), sentence ends (. ! ? …), commas with semicolons and colons, and line breaks. A token belongs
by its text: nothing but punctuation and blanks, with at least one of the marks; quotes, brackets, dashes and
apostrophes alone are none. Texts are wrapped as the tokenizer does it, so an encoder's end in [SEP].

Score: mean over rows of the mass on the delimiters that the row sees. Null, in closed form: the mass that as many
other tokens of the same row would get, drawn at random from those that are neither delimiters nor first,

    null[q] = (visible delimiters / visible others) · mass on the others,

so that a head that rests on the first token, or attends evenly or by distance alone, scores about as its null.
Rows that see no delimiter, or nothing else, are left out. Thresholds are headlab's: Gu et al.'s ε for sinks,
which even attention does not reach, about one token of prose in ten being a delimiter.
"""

from __future__ import annotations

import unicodedata
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int

from headlab.attention import keep
from headlab.roles.base import Arrays, Detail, Look, Measurement, Probing, Role, register
from headlab.roles.prose_rows import readable, text_ids, text_schema
from headlab.roles.scores import RoleInfo
from headlab.roles.sink_details import seen_keys, wrapping

if TYPE_CHECKING:
    from headlab.model import Model

#: Tokens of a text; Clark et al.'s have at most as many.
LENGTH = 128
KINDS = ("special", "sentence_end", "comma", "line_break")
_NAMES = (
    "special tokens",
    "sentence ends (. ! ? …)",
    "commas, semicolons and colons",
    "line breaks",
)
_ENDS, _COMMAS = frozenset(".!?…。！？｡"), frozenset(",;:，、；：")
_BATCH = 8


class Delimiter(Role):
    """See the module's docstring."""

    info = RoleInfo(
        name="delimiter",
        title="Delimiter",
        question="Does the head park its attention on punctuation, line breaks or separator tokens?",
        statistic="mean attention to the delimiters a row sees, the first position left out, on natural text",
        null="attention of the same rows to as many other tokens, neither delimiters nor first",
        decision="score ≥ 0.3 and at least 0.15 above the null, at q ≤ the false-discovery rate; headlab's thresholds",
        reference="Clark et al. 2019, What does BERT look at?, §3.2",
        min_score=0.3,
        min_effect=0.15,
        row_convention="the token's own row; rows that see no delimiter are left out",
        sink_convention="the first token is no delimiter, and not among the tokens of the null",
    )
    schema = text_schema(LENGTH)

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        model = probing.model
        if why := readable(probing):
            return Measurement.not_measurable(probing, why)
        texts = delimited_texts(probing)
        kinds = token_kinds(model, texts)
        if not (kinds[:, 1:] >= 0).any():
            return Measurement.not_measurable(probing, "the text holds no delimiter")
        found: dict[str, list[np.ndarray]] = {"mass": [], "null": []}
        for start in range(0, len(texts), _BATCH):
            part = slice(start, start + _BATCH)
            probing.tell(f"reading text {start + 1}–{start + len(texts[part])} of {len(texts)}")
            run = partial(_run, probing, texts[part], kinds[part])
            arrays = probing.part(f"delimiters-{start:03d}", texts[part], run)
            for name, parts in found.items():
                parts.append(arrays[name])
        mass, null = (np.concatenate(parts) for parts in found.values())
        total = mass.sum(-1)
        values, queries = _mean(total), np.arange(1, texts.shape[1])
        looks = tuple(
            Look(ids, queries, rows) for ids, rows in zip(texts[:2], total[:2], strict=True)
        )
        return Measurement(values, _mean(null), looks, _notes(values), _details(mass, kinds))


def delimited_texts(probing: Probing) -> Int[np.ndarray, "prompt position"]:
    """The probe's texts, wrapped as the tokenizer does it.

    Raises:
        RecordError: A record's text is too short.
        PromptError: There is too little text.
    """
    _, after = wrapping(probing.model.tokenizer)
    ids = text_ids(probing, probing.length(LENGTH) - len(after)).numpy()
    return np.concatenate([ids, np.tile(np.array(after, ids.dtype), (len(ids), 1))], 1)


def token_kinds(
    model: Model, ids: Int[np.ndarray, "prompt position"]
) -> Int[np.ndarray, "prompt position"]:
    """Kind of each token, an index into :data:`KINDS`; −1 for other tokens."""
    special = separators(model.tokenizer)
    unique, at = np.unique(ids, return_inverse=True)
    kinds = [0 if token in special else text_kind(model.text([token])) for token in unique.tolist()]
    return np.array(kinds)[at].reshape(ids.shape)


def separators(tokenizer: Any) -> set[int]:
    """Special tokens that separate: all but those that stand for a word, unknown or masked."""
    words = {tokenizer.unk_token_id, tokenizer.mask_token_id}
    marks = {getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "sep", "cls", "pad")}
    return set(tokenizer.all_special_ids) - (words - marks)


def text_kind(text: str) -> int:
    """Kind of an ordinary token by its text, an index into :data:`KINDS`; −1 for none.

    A token of several marks is what its strongest one makes it: a sentence end before a comma, either before a line
    break.
    """
    marks = set(text.strip())
    if not all(unicodedata.category(mark).startswith("P") for mark in marks):
        return -1
    if marks & _ENDS:
        return KINDS.index("sentence_end")
    if marks & _COMMAS:
        return KINDS.index("comma")
    return KINDS.index("line_break") if not marks and "\n" in text else -1


def _run(
    probing: Probing,
    ids: Int[np.ndarray, "prompt position"],
    kinds: Int[np.ndarray, "prompt position"],
) -> Arrays:
    """Mass per kind and the null's, of every row but the first; NaN in rows that do not count."""
    member = np.stack([kinds == kind for kind in range(-1, len(KINDS))], -1)
    member[:, 0] = False  # the first position is the sinks'
    plan = keep.statistics("feature", x=torch.from_numpy(member).float())
    trace = probing.model.trace(torch.from_numpy(ids), keep=plan, logits="none")
    mass = trace.statistic("feature")[..., 1:, :].float().cpu().numpy()
    seen = seen_keys(probing, ids.shape[1])[:, 1:].astype(np.int64)
    counts = (seen @ member[:, None])[:, :, None]  # [prompt, layer, 1, query, kind]
    others, delimiters = counts[..., 0], counts[..., 1:].sum(-1)
    counted = (others > 0) & (delimiters > 0)
    ratio = np.divide(delimiters, others, out=np.zeros(others.shape), where=counted)
    return {
        "mass": np.where(counted[..., None], mass[..., 1:], np.nan).astype(np.float32),
        "null": np.where(counted, ratio * mass[..., 0], np.nan).astype(np.float32),
    }


def _mean(
    rows: Float[np.ndarray, "prompt layer head query"],
) -> Float[np.ndarray, "prompt layer head"]:
    known = ~np.isnan(rows)
    count = known.sum(-1)
    total = np.where(known, rows, 0).sum(-1, dtype=np.float64)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def _notes(values: Float[np.ndarray, "prompt layer head"]) -> dict[tuple[int, int], str]:
    notes = {}
    for layer, head in np.argwhere(np.isnan(values).all(0)).tolist():
        notes[layer, head] = "out of window: no row of this head sees a delimiter and another token"
    if bare := int(np.isnan(values).all((1, 2)).sum()):
        notes[-1, -1] = f"{bare} of {len(values)} texts hold no delimiter and do not count"
    return notes


def _details(
    mass: Float[np.ndarray, "prompt layer head query kind"],
    kinds: Int[np.ndarray, "prompt position"],
) -> dict[str, Detail]:
    """Mean mass per kind that occurs."""
    details = {}
    for at, kind in enumerate(KINDS):
        if (kinds[:, 1:] == at).any():
            known = ~np.isnan(mass[..., at])
            total = np.where(known, mass[..., at], 0).sum((0, -1), dtype=np.float64)
            count = known.sum((0, -1))
            share = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
            details[f"to_{kind}"] = Detail(share, f"mean attention to {_NAMES[at]}, over rows")
    return details


register(Delimiter())
