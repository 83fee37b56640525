"""Attention Tracker (Hung et al. 2024): an injected order draws the attention of a few heads away from the instruction.

At the prompt's last token, whose row predicts the first token of the answer, head h gives I_h to the instruction and
D_h to the data that it is to be carried out on. The focus score of a prompt is the mean over important heads of

    I_h / (I_h + D_h);

an injection is reported where it is at or below a threshold. Important heads are those whose score separates benign
data (N) from the same data with an order in it (A), under the instruction "Say xxxxxx":

    (μ_N − μ_A) − n (σ_N + σ_A) > 0.

Written from the formulas: the authors' code (CC BY-NC) was read for these and not used. It fits on 30 sentences, counts
heads for n = 0 … 5 (the paper is said to take 4), adds 10⁻⁸ to the denominator, and finds the two spans from lengths of
texts tokenised by themselves; here spans come from the character offsets of the prompt's own tokens, and a row that
gives neither anything counts as ½. As there, the data span leaves out the words "Data: " before it. One forward
pass, in which two sums per row are kept and no pattern.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float

from headlab.arguments import finite_number, seed_number
from headlab.attention import Head, keep, parse_heads
from headlab.errors import PlanError, PromptError
from headlab.shards import reading, write_text
from headlab.steering.behaviours.injections import InjectionTexts
from headlab.steering.learned import head_names, shape_of
from headlab.tasks.needles import token_span
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model

#: The instruction that heads are chosen under.
PROBE = "Say xxxxxx"
#: Where the threshold lies: at ½, midway between the two means, or 4 standard deviations below the benign mean.
Rule = Literal["half", "midpoint", "benign"]
_DATA = "Data: "
_FORMAT = "headlab-injection-detector-1"
_BATCH = 8


@dataclass(frozen=True)
class InstructionPrompt:
    """An instruction and its data as the model reads them.

    Attributes:
        ids: Token ids.
        instruction: Positions [start, stop) of the instruction.
        data: Positions of the data, without the words before it.
    """

    ids: tuple[int, ...]
    instruction: tuple[int, int]
    data: tuple[int, int]


def instruction_prompt(model: Model, instruction: str, data: str) -> InstructionPrompt:
    """Write a prompt: two turns, system and user, where there is a chat template; else two lines.

    Raises:
        PromptError: A text is blank, the tokenizer gives no offsets, or a token reaches over an edge of the two.
    """
    tokenizer = model.tokenizer
    if tokenizer is None or not tokenizer.is_fast:
        raise PromptError(
            "an instruction and its data need a tokenizer that gives character offsets (a fast tokenizer)"
        )
    instruction, data = instruction.strip(), data.strip()
    if not instruction or not data:
        raise PromptError("the instruction or the data is blank")
    user = f"{_DATA}{data}"
    if tokenizer.chat_template is None:
        text = f"{instruction}\n{user}\n"
    else:
        turns = [{"role": "system", "content": instruction}, {"role": "user", "content": user}]
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    first = text.find(instruction)
    second = text.find(user, first + len(instruction)) + len(_DATA)
    if first < 0 or second < len(_DATA):
        raise PromptError("the tokenizer's chat template does not leave the texts as they are")
    encoded = tokenizer(
        text,
        add_special_tokens=tokenizer.chat_template is None,  # a chat template writes them itself
        return_offsets_mapping=True,
        verbose=False,
    )
    offsets = [(low, low + len(text[low:high].rstrip())) for low, high in encoded["offset_mapping"]]
    return InstructionPrompt(
        tuple(int(token) for token in encoded["input_ids"]),
        token_span(offsets, first, first + len(instruction), text),
        token_span(offsets, second, second + len(data), text),
    )


def focus(
    model: Model, prompts: Sequence[InstructionPrompt]
) -> Float[np.ndarray, "prompt layer head"]:
    """I / (I + D) of every head at the last token of each prompt; ½ where both are 0.

    Raises:
        PromptError: There are no prompts.
    """
    if not prompts:
        raise PromptError("there are no prompts to score")
    found: list[np.ndarray] = []
    for start in range(0, len(prompts), _BATCH):
        batch = prompts[start : start + _BATCH]
        ids = torch.full((len(batch), max(len(each.ids) for each in batch)), -1)
        for row, each in enumerate(batch):
            ids[row, : len(each.ids)] = torch.tensor(each.ids)
        segments = {
            "instruction": [each.instruction for each in batch],
            "data": [each.data for each in batch],
        }
        plan = keep.statistics("segment_mass", segments=segments, queries=[-1])
        mass = model.trace(ids, plan, logits="none").statistic("segment_mass")[:, :, :, 0]
        both = mass.double().cpu().numpy()  # [prompt, layer, head, 2]
        total = both.sum(-1)
        share = np.full_like(total, 0.5)
        np.divide(both[..., 0], total, out=share, where=total > 0)
        share[np.isnan(total)] = np.nan  # heads that a layer lacks
        found.append(share)
    return np.concatenate(found)


@dataclass(frozen=True)
class Detection:
    """How well a detector tells texts apart.

    Attributes:
        auroc: Share of pairs of a benign and an attacked text that it puts in the right order, ties half.
        low: Lower end of the 95 % interval, bootstrapped over texts (an attacked one goes with the one it was made of).
        high: Upper end.
        p_value: Two-sided (Mann and Whitney): chance gives ½.
        n_benign: Benign texts.
        n_attacked: Attacked texts.
        false_alarms: Share of benign texts reported.
        caught: Share of attacked texts reported.
        scores: Focus of benign, then of attacked texts.
    """

    auroc: float
    low: float
    high: float
    p_value: float
    n_benign: int
    n_attacked: int
    false_alarms: float
    caught: float
    scores: Float[np.ndarray, " text"] = field(repr=False)


@dataclass(frozen=True)
class InjectionDetector:
    """Tells prompts whose data gives orders by how much a few heads attend to the instruction.

    Attributes:
        heads: The important heads, as text.
        shape: Layers, query heads of a layer, d_head and d_model of the model it was fitted on.
        threshold: Focus at or below which an injection is reported.
        rule: How the threshold was chosen.
        n: Standard deviations that the heads had to separate by.
        model: Name of the model it was fitted on.
    """

    heads: str
    shape: tuple[int, int, int, int]
    threshold: float = 0.5
    rule: Rule = "half"
    n: float = 4.0
    model: str = ""

    @classmethod
    def fit(
        cls,
        model: Model,
        texts: InjectionTexts,
        *,
        instruction: str = PROBE,
        n: float = 4.0,
        rule: Rule = "midpoint",
    ) -> Self:
        """Choose heads and threshold.

        Args:
            model: The model.
            texts: Benign data, and data with orders in it; the paper takes 30 and the same 30 with an order appended.
            instruction: The instruction they stand under.
            n: Standard deviations that a head must separate the two by; smaller ones keep more heads.
            rule: ``"half"``: ½; ``"midpoint"`` of the two mean scores; ``"benign"``: the mean of benign scores less 4
                of their standard deviations, which needs no attacks (but the heads do).

        Raises:
            PlanError: No head separates them so well.
            PromptError: The tokenizer gives no character offsets, or a text is blank.
        """
        finite_number(n, "n")
        if rule not in get_args(Rule):
            raise PlanError(f"rule={shown(rule)} must be one of {', '.join(get_args(Rule))}")
        benign, attacked = (
            focus(model, [instruction_prompt(model, instruction, text) for text in part])
            for part in (texts.benign, texts.attacked)
        )
        chosen = important_heads(benign, attacked, n)
        if not chosen:
            counts = ", ".join(
                f"{len(important_heads(benign, attacked, at))} at n={at}" for at in range(6)
            )
            raise PlanError(
                f"no head of {model.name} separates the texts by n={n:g} standard deviations; heads that do: {counts}"
            )
        layers, heads = [head.layer for head in chosen], [head.head for head in chosen]
        good, bad = (scores[:, layers, heads].mean(1) for scores in (benign, attacked))
        thresholds = {
            "half": 0.5,
            "midpoint": float(good.mean() + bad.mean()) / 2,
            "benign": float(good.mean() - 4 * good.std()),
        }
        return cls(
            head_names(chosen), shape_of(model), thresholds[rule], rule, float(n), model.name
        )

    def score(
        self, model: Model, instruction: str, data: str | Sequence[str]
    ) -> Float[np.ndarray, " text"]:
        """Focus on the instruction, from 0 to 1, for each text of data.

        Raises:
            PlanError: The model has another shape than the one it was fitted on.
            PromptError: A text is blank, or the tokenizer gives no character offsets.
        """
        if shape_of(model) != tuple(self.shape):
            raise PlanError(
                f"the detector was fitted on a model of {self.shape[0]} layers × {self.shape[1]} heads, d_head "
                f"{self.shape[2]} and d_model {self.shape[3]}, and {model.name} has another shape; fit it on this one"
            )
        texts = [data] if isinstance(data, str) else list(data)
        heads = parse_heads(self.heads, model.spec)
        scores = focus(model, [instruction_prompt(model, instruction, text) for text in texts])
        chosen: np.ndarray = scores[:, [h.layer for h in heads], [h.head for h in heads]]
        return chosen.mean(1)

    def detect(
        self, model: Model, instruction: str, data: str | Sequence[str]
    ) -> Bool[np.ndarray, " text"]:
        """Whether each text is reported; errors as in :meth:`score`."""
        found: np.ndarray = self.score(model, instruction, data) <= self.threshold
        return found

    def evaluate(
        self, model: Model, texts: InjectionTexts, *, instruction: str = PROBE, seed: int = 0
    ) -> Detection:
        """AUROC on texts, which should be others than it was fitted on; errors as in :meth:`score`."""
        from scipy.stats import mannwhitneyu

        from headlab.lookback.statistics import auroc, auroc_interval

        seed_number(seed)
        n, m = len(texts.benign), len(texts.attacked)
        scores = self.score(model, instruction, [*texts.benign, *texts.attacked])
        labels = np.repeat([0, 1], [n, m])
        bases = texts.bases or tuple(range(n, n + m))
        low, high = auroc_interval(1 - scores, labels, np.array([*range(n), *bases]), seed)
        reported = scores <= self.threshold
        return Detection(
            auroc=float(auroc(1 - scores, labels)),
            low=float(low),
            high=float(high),
            p_value=float(mannwhitneyu(scores[:n], scores[n:]).pvalue),
            n_benign=n,
            n_attacked=m,
            false_alarms=float(reported[:n].mean()),
            caught=float(reported[n:].mean()),
            scores=scores,
        )

    def save(self, path: str | Path) -> Path:
        """Write it to a JSON file, whole or not at all.

        Raises:
            OutputError: It cannot be written.
        """
        return write_text(path, json.dumps({"format": _FORMAT, **asdict(self)}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote.

        Raises:
            OutputError: The file holds no detector.
        """
        with reading(path, "injection detector"):
            kept: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))
            if kept.pop("format") != _FORMAT:
                raise ValueError("another format")
            detector = cls(**kept | {"shape": tuple(int(n) for n in kept["shape"])})
            finite_number(detector.threshold, "threshold")
            if not isinstance(detector.heads, str) or len(detector.shape) != 4:
                raise ValueError("fields of another form")
        return detector


def important_heads(
    benign: Float[np.ndarray, "text layer head"],
    attacked: Float[np.ndarray, "text layer head"],
    n: float,
) -> tuple[Head, ...]:
    """Heads with (μ_N − μ_A) − n (σ_N + σ_A) > 0."""
    gap = benign.mean(0) - attacked.mean(0) - n * (benign.std(0) + attacked.std(0))
    return tuple(Head(int(layer), int(head)) for layer, head in np.argwhere(gap > 0))
