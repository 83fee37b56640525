"""What fitting gives: a lens that scores responses, says which heads it goes by, and is kept as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from headlab.arguments import count, finite_number, is_integer
from headlab.errors import OutputError, PlanError, PromptError
from headlab.lookback.detector import Calibrator, Linear
from headlab.lookback.examples import Example, Tokens, tokenised
from headlab.lookback.ratios import heads_of, ratios_of
from headlab.lookback.spans import windows
from headlab.shards import reading, write_text
from headlab.text import shown

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

_FORMAT = "headlab-lookback-1"
HEAD_COLUMNS = (
    "layer",
    "head",
    "weight",
    "standardised",
    "auroc",
    "auroc_low",
    "auroc_high",
    "p_value",
    "q_value",
)


@dataclass(frozen=True)
class Scored:
    """A response as a lens sees it.

    Attributes:
        response: Its text.
        tokens: Its tokens as text.
        ratios: Lookback ratios [token, layer, head].
        token_probability: Probability that each token is borne out by the context, by its own ratios, [token].
        windows: One row per window: ``start``, ``stop`` (tokens), ``probability``.
        probability: Of the whole response, by its mean ratios.
    """

    response: str
    tokens: tuple[str, ...]
    ratios: Float[np.ndarray, "token layer head"]
    token_probability: Float[np.ndarray, " token"]
    windows: pd.DataFrame
    probability: float

    def __repr__(self) -> str:
        lowest = self.windows["probability"].min()
        return (
            f"Scored({shown(self.response)}, probability {self.probability:.3f}, "
            f"lowest window {lowest:.3f})"
        )


@dataclass(frozen=True, eq=False)
class Lens:
    """A detector of what the context does not bear out; :func:`~headlab.lookback.fit` makes it.

    Attributes:
        linear: The regression on ratios [layer · head].
        calibrator: From its log-odds to probabilities.
        shape: Layers and heads of the model it belongs to.
        window: Tokens of a window.
        heads: One row per head with the columns of :data:`HEAD_COLUMNS`: its weight, the weight times the feature's
            standard deviation, and how well its ratio alone tells spans apart: AUROC, a 95 % interval over documents,
            a two-sided p-value by labels dealt out anew by document, and that corrected over heads.
        figures: What it does on held-out spans; see :class:`~headlab.lookback.detector.Validation`.
        about: Model, settings and seed.
    """

    linear: Linear
    calibrator: Calibrator
    shape: tuple[int, int]
    window: int
    heads: pd.DataFrame
    figures: dict[str, float]
    about: dict[str, Any]

    def probability(
        self, features: Float[np.ndarray, "span feature"]
    ) -> Float[np.ndarray, " span"]:
        """Probability that spans with these mean ratios are borne out."""
        return self.calibrator(self.linear.logit(features))

    def check_model(self, model: Model) -> None:
        """Refuse a model of another shape.

        Raises:
            PlanError: It has other layers or heads.
        """
        theirs = (model.spec.n_layers, heads_of(model))
        if theirs != tuple(self.shape):
            raise PlanError(
                f"the lens was fitted on a model of {self.shape[0]} layers × {self.shape[1]} heads, and {model.name} "
                f"has {theirs[0]} × {theirs[1]}; fit it on this model, or use transfer"
            )

    def score(
        self,
        model: Model,
        text: str | Example,
        response: str | None = None,
        *,
        cue: str = "",
        max_new_tokens: int = 64,
    ) -> Scored:
        """Score a response against its prompt.

        Args:
            model: The model that the lens was fitted on, or one it was transferred to.
            text: The prompt, or an example.
            response: What was answered; by default what the model itself answers, greedily.
            cue: The prompt's end that counts as new; see :class:`Example`.
            max_new_tokens: Length of the model's own answer at most.

        Raises:
            PlanError: The model has another shape.
            PromptError: The prompt or the response cannot be used.
        """
        self.check_model(model)
        if isinstance(text, Example):
            if response is not None or cue:
                raise PlanError("an example has its own response and cue; give them there")
            example = text
        elif response is not None:
            example = Example(text, response, cue=cue)
        else:
            example = Example(text, _own_answer(model, text, max_new_tokens), cue=cue)
        tokens = tokenised(model, example)
        return self.scored(model, tokens)

    def scored(self, model: Model, tokens: Tokens) -> Scored:
        """Score a tokenised response."""
        import pandas as pd

        found = ratios_of(model, [tokens])[0]
        flat = found.reshape(len(found), -1).astype(np.float64)
        parts = windows(len(flat), self.window)
        means = np.stack([flat[part].mean(0) for part in parts])
        frame = pd.DataFrame(
            {
                "start": [part.start for part in parts],
                "stop": [part.stop for part in parts],
                "probability": self.probability(means),
            }
        )
        ids = tokens.ids[tokens.start :]
        return Scored(
            model.text(ids, special=False),
            model.token_texts(ids[None])[0],
            found,
            self.probability(flat),
            frame,
            float(self.probability(flat.mean(0)[None])[0]),
        )

    def transfer(self, model: Model, source: Model, examples: Sequence[Example]) -> Lens:
        """The lens for another model; see :func:`headlab.lookback.transfer.transfer`."""
        from headlab.lookback.transfer import transfer

        return transfer(self, model, source, examples)

    def to_json(self) -> str:
        """Everything as one JSON document; NaN becomes null."""
        document = {
            "format": _FORMAT,
            "about": self.about,
            "shape": list(self.shape),
            "window": self.window,
            "weights": self.linear.weights.tolist(),
            "intercept": self.linear.intercept,
            "calibrator": {
                "kind": self.calibrator.kind,
                "x": list(self.calibrator.x),
                "y": list(self.calibrator.y),
            },
            "figures": {key: _plain(value) for key, value in self.figures.items()},
            "heads": [
                {str(key): _plain(value) for key, value in row.items()}
                for row in self.heads.to_dict("records")
            ],
        }
        return json.dumps(document, ensure_ascii=False, allow_nan=False)

    def save(self, path: str | Path) -> Path:
        """Write :meth:`to_json` to a file, whole or not at all.

        Raises:
            OutputError: It cannot be written.
        """
        return write_text(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Lens:
        """Read what :meth:`save` wrote; nothing is unpickled.

        Raises:
            OutputError: The file holds no readable lens.
        """
        import pandas as pd

        with reading(path, "lens"):
            document = json.loads(Path(path).read_text("utf-8"))
            if document["format"] != _FORMAT:
                raise OutputError(
                    f"{path} was written as {document['format']!r:.60}, not {_FORMAT}"
                )
            layers, heads = (count(n, "shape") for n in document["shape"])
            weights = np.array(document["weights"], float)
            if weights.shape != (layers * heads,) or not np.isfinite(weights).all():
                raise OutputError(
                    f"{path} needs {layers * heads} finite weights for {layers} layers × {heads} heads"
                )
            rows = document["heads"]
            if len(rows) not in (0, layers * heads):
                raise OutputError(f"{path} tells of {len(rows)} heads of {layers * heads}")
            given = document["calibrator"]
            return Lens(
                Linear(weights, finite_number(document["intercept"], "intercept")),
                Calibrator.read(given["kind"], given["x"], given["y"]),
                (layers, heads),
                count(document["window"], "window"),
                pd.DataFrame(rows, columns=list(HEAD_COLUMNS)),
                {
                    key: math.nan if value is None else _figure(value, key)
                    for key, value in document["figures"].items()
                },
                dict(document["about"]),
            )

    def __repr__(self) -> str:
        figures = self.figures
        return (
            f"Lens of {self.about.get('model', '?')}: AUROC {figures.get('auroc', math.nan):.3f} "
            f"[{figures.get('auroc_low', math.nan):.3f}, {figures.get('auroc_high', math.nan):.3f}] on held-out spans, "
            f"{figures.get('spans', math.nan):.6g} spans of {figures.get('documents', math.nan):.6g} documents"
        )


def _own_answer(model: Model, prompt: str, most: int) -> tuple[int, ...]:
    """Tokens of the model's greedy answer, without the token that ends it.

    Raises:
        PromptError: It ends at once.
    """
    new = [int(token) for token in model.generate(prompt, max_new_tokens=most).ids[0] if token >= 0]
    if new and new[-1] in ends_of(model):
        new.pop()
    if not new:
        raise PromptError(f"{model.name} answers this prompt with nothing; give a response")
    return tuple(new)


def ends_of(model: Model) -> list[int]:
    """Tokens that end the model's sequences."""
    own = model.module.generation_config.eos_token_id
    return own if isinstance(own, list) else [] if own is None else [own]


def _figure(value: Any, name: str) -> float:
    """A figure that was kept; counts stay whole."""
    return value if is_integer(value) else finite_number(value, name)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
