"""Contextual heads (Zhu et al. 2025): heads whose answer rows attend to the document that holds the answer.

A prompt holds several documents and a question that one of them, the gold document, answers. The model answers
greedily; one further pass over prompt and response reads how much attention each response token's row gives to each
document. The score of a prompt is the mass on the gold document, averaged over the rows:

s[l, h] = mean_q Σ_{k ∈ gold} A[l, h, q, k], with q the response tokens' own positions,

as in the authors' code (billzyx/focus_direction), whose rows thus come one later than those that predict. The
statistic was read there; the paper's text was not. The code filters nothing on success, nor do we unless asked.

Null: the mean mass on one irrelevant document of the same prompt. In headlab's data all documents of a prompt have
one wording, so the null keeps length, make and, over prompts, place.

The paper ranks heads and takes 20; it has no threshold. Ours are :data:`MIN_SCORE` and :data:`MIN_EFFECT`: with an
even hand a document of a tenth of the prompt gets 0.1. The prompts are ours, too: the authors use 20 passages from
Natural Questions and up to 100 new tokens. Records of yours can hold theirs.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float

from headlab.attention import keep
from headlab.errors import PromptError
from headlab.roles.base import Arrays, Behaviour, Detail, Look, Measurement, Probing, Role, register
from headlab.roles.confirmation import next_token_log_probability
from headlab.roles.scores import RoleInfo
from headlab.tasks import (
    DocumentPrompt,
    DocumentQuestion,
    RecordError,
    document_prompt,
    document_questions,
)

#: Least mass on the gold document (ours: the paper has no threshold).
MIN_SCORE = 0.1
#: Least mass beyond that on an irrelevant document (ours).
MIN_EFFECT = 0.05
N_DOCUMENTS = 7
NEW_TOKENS = 16
#: Keys that the paper's sink mass counts, from the first on.
N_SINK = 2
_ROWS = {
    "token": "the response tokens' own positions, as in Zhu et al.'s code",
    "predicting": "the rows that predict the response's tokens, one earlier than in Zhu et al.'s code",
}
_BEHAVIOUR_PROMPTS, _BEHAVIOUR_DOCUMENTS, _BEHAVIOUR_TOKENS = 6, 3, 1500

SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Contextual heads: documents and a question",
    "type": "object",
    "properties": {
        "documents": {
            "description": "Texts of the documents, in the order of the prompt; they are numbered for you.",
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 2,
        },
        "gold": {
            "description": "Which document answers the question, counted from 0.",
            "type": "integer",
            "minimum": 0,
        },
        "question": {"description": "What is asked.", "type": "string", "minLength": 1},
        "answer": {
            "description": "The right answer, best in the words of the gold document.",
            "type": "string",
            "minLength": 1,
        },
        "template": {
            "description": "Prompt with {documents} and {question} in it, once each; headlab's by default.",
            "type": "string",
        },
        "response": {
            "description": "What the model is made to have answered; by default it answers itself.",
            "type": "string",
            "minLength": 1,
        },
    },
    "required": ["documents", "gold", "question", "answer"],
    "additionalProperties": False,
    "examples": [
        {
            "documents": [
                "The mill at Arnbrook grinds barley. Its wheel has nine spokes.",
                "The mill at Osford grinds mustard seed. Its wheel has twelve spokes.",
            ],
            "gold": 1,
            "question": "What does the mill at Osford grind?",
            "answer": "mustard seed",
        }
    ],
}


def answer_log_probability(probing: Probing) -> Float[np.ndarray, " prompt"]:
    """Mean log-probability of the right answer's tokens after a prompt of three documents, in nats.

    The user's records keep their gold document and its neighbours; as many are read as make up 1500 tokens.
    """
    model = probing.model
    questions: Sequence[DocumentQuestion]
    if probing.records is None:
        questions = document_questions(_BEHAVIOUR_PROMPTS, _BEHAVIOUR_DOCUMENTS, probing.seed + 5)
    else:
        questions = [_asked(record) for record in probing.records[:_BEHAVIOUR_PROMPTS]]
    values: list[float] = []
    tokens = 0
    for asked in questions:
        prompt = document_prompt(model.tokenizer, asked.fewer(_BEHAVIOUR_DOCUMENTS), asked.answer)
        tokens += len(prompt.ids)
        if len(values) >= 2 and tokens > _BEHAVIOUR_TOKENS:
            break
        ids = torch.tensor([prompt.ids])
        log_probability = next_token_log_probability(model, ids)[0, prompt.start - 1 :]
        values.append(float(log_probability.mean()))
    return np.array(values)


class Contextual(Role):
    """See the module's docstring.

    Args:
        n_documents: Documents of each prompt of headlab's own.
        rows: ``"token"`` reads the response tokens' own positions (the paper's code), ``"predicting"`` those that
            predict them.
        response: ``"own"`` reads the model's greedy answer, or a record's ``response``; ``"given"`` makes the model
            read the record's ``response``, or else the right answer, so that nothing need be generated.
        require_answer: Whether only responses that hold the right answer count (not in the paper).
        scrambled: Call a document drawn at random the gold one: a control, in which no head plays the role.
    """

    info = RoleInfo(
        name="contextual",
        title="Contextual",
        question="While the model answers, does this head attend to the document that holds the answer?",
        statistic="attention mass on the gold document",
        null="the same mass on an irrelevant document of the same prompt, averaged over them",
        decision="score ≥ 0.1 and at least 0.05 above the null (thresholds are ours: the paper ranks heads), "
        "at q ≤ the false-discovery rate",
        reference="Zhu et al. 2025, focus directions make your language models pay more attention to relevant contexts",
        min_score=MIN_SCORE,
        min_effect=MIN_EFFECT,
        row_convention=_ROWS["token"],
        reduction="mean over the response's rows, then over prompts",
    )
    schema: ClassVar[Mapping[str, Any] | None] = SCHEMA
    behaviour: ClassVar[Behaviour | None] = Behaviour(
        "log-probability of the answer given its document (nats per token)", answer_log_probability
    )

    def __init__(
        self,
        n_documents: int = N_DOCUMENTS,
        rows: Literal["token", "predicting"] = "token",
        response: Literal["own", "given"] = "own",
        require_answer: bool = False,
        scrambled: bool = False,
    ) -> None:
        self.n_documents = n_documents
        self.rows = rows
        self.response = response
        self.require_answer = require_answer
        self.scrambled = scrambled
        self.info = replace(type(self).info, row_convention=_ROWS[rows])

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe.

        Raises:
            RecordError: A record cannot be used.
        """
        model = probing.model
        if any(layer.stack != "decoder" for layer in model.spec.layers):
            return Measurement.not_measurable(probing, "the role needs a model that generates")
        if model.tokenizer is None:
            return Measurement.not_measurable(probing, f"{model.name} came without a tokenizer")
        try:
            prompts = self._prompts(probing)
        except RecordError:
            raise
        except PromptError as error:  # no reason to give up the other roles of a run
            return Measurement.not_measurable(probing, str(error))
        if not model.module.can_generate() and not all(prompt.response for prompt in prompts):
            return Measurement.not_measurable(probing, "the role needs a model that generates")
        found, answered = [], 0
        for at, prompt in enumerate(prompts):
            probing.tell(f"documents {at + 1} of {len(prompts)}")
            # The same tokens may be cut into documents in more than one way.
            key = np.concatenate([prompt.ids, np.ravel(prompt.documents), [prompt.start]])
            name = f"documents-{at:03d}"
            arrays = probing.part(name, key, partial(read_documents, probing, prompt))
            text = model.text(arrays["new"].tolist(), special=False)
            right = prompt.answer.lower() in text.lower()
            answered += right
            if len(arrays["new"]) and (right or not self.require_answer):
                found.append((prompt, arrays))
        if not found:
            what = (
                "answered none of the questions rightly" if self.require_answer else "said nothing"
            )
            return Measurement.not_measurable(probing, f"the model {what}")
        said = f"{answered} of {len(prompts)} questions answered rightly"
        if given := sum(bool(prompt.response) for prompt in prompts):
            said += f", {given} of the responses given and not the model's own"
        if odd := sum(_asked(record).contradicted for record in probing.records or ()):
            said += f"; in {odd} the answer stands in another document and not in the gold one"
        return self._measurement(probing, found, said)

    def _prompts(self, probing: Probing) -> list[DocumentPrompt]:
        model = probing.model
        if probing.records is None:
            prompts = []
            for asked in document_questions(probing.n_prompts, self.n_documents, probing.seed):
                forced = asked.answer if self.response == "given" else ""
                prompt = document_prompt(model.tokenizer, asked, forced)
                _check_room(probing, prompt)
                start, stop = prompt.documents[prompt.gold]
                if model.tokenizer.unk_token_id in prompt.ids[start:stop]:
                    raise PromptError("the tokenizer does not know the words of the documents")
                prompts.append(prompt)
            return prompts
        prompts = []
        for number, record in enumerate(probing.records):
            try:
                default = str(record["answer"]) if self.response == "given" else ""
                forced = str(record.get("response", default))
                prompts.append(document_prompt(model.tokenizer, _asked(record), forced))
                _check_room(probing, prompts[-1])
            except PromptError as error:
                raise RecordError(f"record {number}: {error}") from error
        return prompts

    def _measurement(
        self, probing: Probing, found: Sequence[tuple[DocumentPrompt, Arrays]], said: str
    ) -> Measurement:
        rng = np.random.default_rng(probing.seed)
        per_prompt: dict[str, list[np.ndarray]] = {}
        golds, looks = [], []
        for prompt, arrays in found:
            n = len(prompt.documents)
            gold = int(rng.integers(n)) if self.scrambled else prompt.gold
            mass = arrays["mass"][:, :, 1:] if self.rows == "token" else arrays["mass"][:, :, :-1]
            mean = mass.mean(2, dtype=np.float64)
            queries = prompt.start + np.arange(mass.shape[2]) - (self.rows == "predicting")
            seen = _seen(probing, prompt, mass, int(queries[-1]))
            documents = np.where(seen[:, None], mean[..., :n], np.nan)
            for name, value in _statistics(documents, gold).items():
                per_prompt.setdefault(name, []).append(value)
            per_prompt.setdefault("sink_mass", []).append(mean[..., n])
            known = seen[:, None, gold] & (prompt.answer_span is not None)
            per_prompt.setdefault("answer_mass", []).append(
                np.where(known, mean[..., n + 1], np.nan)
            )
            golds.append(gold)
            looks.append(
                Look(
                    np.concatenate([prompt.ids[: prompt.start], arrays["new"]]),
                    queries,
                    mass[..., gold],
                )
            )
        stacked = {name: np.stack(values) for name, values in per_prompt.items()}
        values, null = stacked.pop("value"), stacked.pop("null")
        unseen = np.argwhere(np.isnan(values - null).all(0))
        notes = {
            (int(layer), int(head)): "out of window: the documents lie beyond this head's window"
            for layer, head in unseen
        }
        looks.sort(key=lambda look: len(look.ids))  # short prompts make readable examples
        details = _details(stacked, values, np.array(golds))
        return Measurement(values, null, tuple(looks[:2]), {(-1, -1): said} | notes, details)


def read_documents(probing: Probing, prompt: DocumentPrompt) -> Arrays:
    """Answer a question, and read the attention of the answer's rows.

    Returns:
        ``new`` [step], the response's tokens without what ends it, and ``mass`` [layer, head, 1 + step, segment]: the
        rows from the prompt's last token to the response's last; segments are the documents, the first
        :data:`N_SINK` keys, and the answer in the gold document (the sink again where it is not there).
    """
    model, ids = probing.model, list(prompt.ids[: prompt.start])
    new = list(prompt.response) or _answer(probing, ids)
    segments = {f"document {at}": span for at, span in enumerate(prompt.documents)}
    segments["sink"] = (0, N_SINK)
    segments["answer"] = prompt.answer_span or (0, N_SINK)
    rows = list(range(len(ids) - 1, len(ids) + len(new)))
    plan = keep.statistics("segment_mass", segments=segments, queries=rows)
    trace = model.trace([ids + new], keep=plan, logits="none")
    mass = trace.statistic("segment_mass")[0].float().cpu().numpy()
    return {"new": np.array(new, np.int64), "mass": mass}


def _answer(probing: Probing, ids: list[int]) -> list[int]:
    """The model's greedy answer: its first line that is not blank, without the tokens that end it."""
    model = probing.model
    stop = model.tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]
    new: list[int] = []
    # A line break ends the answer, unless the answer begins with one.
    for ends in (stop if model.text(stop) == "\n" else [], []):
        if not model.text(new, special=False).strip():
            found = model.generate(ids, NEW_TOKENS, stop=ends or None).ids[0]
            new = [int(token) for token in found if token >= 0]
    special = {int(token) for token in model.tokenizer.all_special_ids}
    kept: list[int] = []
    for token in new:
        text = model.text([*kept, token])
        if token in special or (text.strip() and "\n" in text.lstrip()):
            break
        kept.append(token)
    return kept if model.text(kept).strip() else []


def _asked(record: Mapping[str, Any]) -> DocumentQuestion:
    parts = {name: record[name] for name in ("question", "answer", "template") if name in record}
    return DocumentQuestion(tuple(record["documents"]), int(record["gold"]), **parts)


def _check_room(probing: Probing, prompt: DocumentPrompt) -> None:
    tokens = len(prompt.ids) + (0 if prompt.response else NEW_TOKENS)
    if probing.length(tokens) < tokens:
        raise PromptError(
            f"prompt and response take {tokens} tokens, but {probing.model.name} has a context of "
            f"{probing.model.spec.max_context}; use fewer or shorter documents"
        )


def _seen(
    probing: Probing, prompt: DocumentPrompt, mass: np.ndarray, last: int
) -> Bool[np.ndarray, "layer document"]:
    """Which documents every row of a layer sees: the sliding window must reach the start of the document.

    A visible document never gets exactly nothing from every head: with attention in chunks, which the model's
    description does not tell, that is how one beyond the chunk shows.
    """
    starts = np.array([start for start, _ in prompt.documents])
    windows = [layer.window or last + 1 for layer in probing.model.spec.layers]
    reached = np.array(windows)[:, None] > last - starts
    dark = (mass[..., : len(starts)] == 0).all(1).any(1)
    return reached & ~dark


def _statistics(
    documents: Float[np.ndarray, "layer head document"], gold: int
) -> dict[str, Float[np.ndarray, "layer head"]]:
    value, others = documents[..., gold], np.delete(documents, gold, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # documents that no row sees have no mean
        null, most = np.nanmean(others, -1), np.nanmax(others, -1)
    total = np.where(np.isnan(value), np.nan, np.nansum(documents, -1))
    return {
        "value": value,
        "null": null,
        "irrelevant_mass": np.where(np.isnan(null), np.nan, np.nansum(others, -1)),
        "irrelevant_max": most,
        "gold_share": np.divide(value, total, out=np.full_like(value, np.nan), where=total > 0),
    }


_MEANINGS = {
    "irrelevant_mass": "attention mass on all irrelevant documents together",
    "irrelevant_max": "attention mass on the irrelevant document that gets most",
    "gold_share": "mass on the gold document as a share of that on all documents",
    "sink_mass": f"attention mass on the first {N_SINK} tokens",
    "answer_mass": "attention mass on the answer's tokens in the gold document",
}


def _details(
    stacked: Mapping[str, np.ndarray],
    values: Float[np.ndarray, "prompt layer head"],
    golds: np.ndarray,
) -> dict[str, Detail]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing known has no mean, as meant
        details = {
            name: Detail(np.nanmean(stacked[name], 0), meaning)
            for name, meaning in _MEANINGS.items()
        }
        places = np.unique(golds)
        by_place = np.stack([np.nanmean(values[golds == place], 0) for place in places], -1)
    details["mass_by_place"] = Detail(
        by_place, "attention mass on the gold document by its place among the documents", places
    )
    return details


register(Contextual())
