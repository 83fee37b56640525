"""Reports about models that do not exist, for the tests of everything that shows results."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from headlab.report import CAUSAL_COLUMNS, ModelInfo, Report, environment
from headlab.roles.scores import COLUMNS, DETAIL_COLUMNS, Example, RoleInfo, Scores

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<!--",
    "<img src=x onerror=\"document.title='owned'\">",
    "\u2028",
    "\u2029",
    "\u202eevil\u202c",
    "\x00\x1b[31m",
    "\ufffd",
    "\ud800",
    "{{ 7*7 }}",
    "]]>",
    "&amp;",
    "'\"`",
    "",
    " ",
    "\n",
    "\u0301\u0301\u0301\u0301",
    "\u200b\ufeff",
    "مرحبا",
)

WORDS = (
    " The| capital| of| France| is| Paris|,| and| the| capital| of| Italy| is| Rome|.| When| Mary|"
    " and| John| went| to| the| store|,| John| gave| a| drink| to| Mary|.| The| quick| brown| fox|"
    " jumps| over| the| lazy| dog|;| a| needle| was| hidden| in| this| hay|stack| long| ago|.\n"
)

ROLES = (
    (
        "previous_token",
        "Previous token",
        "Does the head attend to the token just before the query?",
    ),
    (
        "induction",
        "Induction",
        "Does it attend to what followed the last time this token appeared?",
    ),
    ("duplicate", "Duplicate token", "Does it attend to earlier copies of the query's token?"),
    ("sink", "Attention sink", "Does it rest on the first position when it has nothing to do?"),
    ("retrieval", "Retrieval", "Does it fetch the needle's tokens as the model copies them out?"),
    ("successor", "Successor", "Does it promote the next item of an ordered list?"),
    ("lookback", "Lookback", "Does it separate grounded from invented answers?"),
    ("temporal", "Temporal", "Does it carry the year a fact is asked about?"),
    ("name_mover", "Name mover", "Does it copy the name that completes the sentence?"),
    ("local", "Local window", "Does it stay within eight tokens of the query?"),
)


def role_info(name: str, title: str, question: str, **changes: object) -> RoleInfo:
    values: dict[str, object] = {
        "name": name,
        "title": title,
        "question": question,
        "statistic": "mean attention from each query to its target key, over queries that have one",
        "null": "the same targets shuffled within each sequence, 1,000 permutations",
        "decision": "q < 0.05 over all heads and roles, score and effect at least as below",
        "reference": "Olsson et al. 2022, In-context learning and induction heads",
        "min_score": 0.2,
        "min_effect": 0.1,
        "row_convention": "the row of the position that predicts the token",
    }
    return RoleInfo(**{**values, **changes})  # type: ignore[arg-type]  # test convenience


def make_scores(
    layers: int, heads: int, roles: int, *, seed: int = 0, claims: bool = True
) -> Scores:
    """A few strong heads per role among many weak ones; the last role has no claim, and the last
    head of every fifth layer could not be measured for every other role."""
    rng = np.random.default_rng(seed)
    rows = []
    infos = tuple(role_info(*ROLES[index]) for index in range(roles))
    strong: dict[tuple[int, int], int] = {}
    for index, info in enumerate(infos):
        chosen = set()
        if claims and index < max(1, roles - 1):
            centre = (index + 1) * layers / (roles + 1)
            for _ in range(rng.integers(2, 9)):
                layer = int(np.clip(rng.normal(centre, layers / 8), 0, layers - 1))
                chosen.add((layer, int(rng.integers(heads))))
            if strong and index % 3 == 1:
                chosen.add(next(iter(strong)))
        strong.update(dict.fromkeys(sorted(chosen), index))
        for layer in range(layers):
            for head in range(heads):
                null = float(rng.uniform(0.02, 0.06))
                score = null + float(rng.normal(0, 0.012)) + 0.25 * float(rng.exponential(0.08))
                note, p = "", float(rng.uniform(0.02, 1))
                if (layer, head) in chosen:
                    score, p = float(rng.uniform(0.25, 0.95)), 1 / 1001
                elif layer % 5 == 4 and head == heads - 1 and index % 2 == 0:
                    score = null = p = float("nan")
                    note = "not measurable: the layer's window of 128 tokens never reaches a target"
                width = float(rng.uniform(0.01, 0.06))
                q = min(1.0, p * 12)
                claimed = (layer, head) in chosen
                row = (info.name, layer, head, score, score - width, score + width)
                halves = score - width / 3, score + width / 3
                effect = score - null
                rows.append((*row, 480, null, effect, 9 * effect, *halves, p, q, claimed, note))
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return Scores(frame, 0.05, infos, make_details(frame))


def make_details(frame: pd.DataFrame) -> pd.DataFrame:
    """A number and a profile of every head for the first role, and a number of every layer."""
    rows = []
    name = frame["role"].iloc[0] if len(frame) else ""
    for row in frame[frame["role"] == name].to_dict("records"):
        at = (name, row["layer"], row["head"])
        rows.append((*at, "activation_frequency", math.nan, 0.4, "share of trials with a hit"))
        rows += [
            (*at, "lag_profile", float(lag), 1 / lag, "attention by lag, per key")
            for lag in (1, 2, 4)
        ]
        if row["head"] == 0:
            layer = (name, row["layer"], -1, "massive_activation", math.nan, 900.0)
            rows.append((*layer, "largest activation over the median"))
    return pd.DataFrame(rows, columns=list(DETAIL_COLUMNS))


def make_examples(scores: Scores, *, top: int = 8, each: int = 3, length: int = 64, seed: int = 0):
    rng = np.random.default_rng(seed)
    words = WORDS.split("|")
    examples = []
    for info in scores.roles:
        for row in scores.ranked(info.name).head(top).to_dict("records"):
            if not np.isfinite(row["score"]):
                continue
            for kind, strength in (("high", 0.8), ("median", 0.4), ("random", 0.1)):
                for _ in range(each):
                    start = int(rng.integers(len(words)))
                    tokens = [words[(start + index) % len(words)] for index in range(length)]
                    query = int(rng.integers(length // 2, length))
                    weights = rng.exponential(0.02, query + 1)
                    weights[0] += 0.3
                    weights[query - 8] += 3 * strength
                    weights /= weights.sum()
                    examples.append(
                        Example(
                            role=info.name,
                            layer=row["layer"],
                            head=row["head"],
                            kind=kind,  # type: ignore[arg-type]  # the loop names the three kinds
                            tokens=tuple(tokens),
                            query=query,
                            weights=tuple(weights),
                            value=float(weights[query - 8]),
                        )
                    )
    return tuple(examples)


def hostile_example(role: str, layer: int, head: int) -> Example:
    count = len(HOSTILE)
    return Example(role, layer, head, "high", HOSTILE, count - 1, (1 / count,) * count, 0.5)


def make_causal(scores: Scores) -> pd.DataFrame:
    rows = []
    for info in scores.roles[:3]:
        for index, name in enumerate(scores.claimed(info.name)[:3]):
            effect = 0.9 / (index + 1)
            row = (
                info.name,
                name,
                "mean",
                "second-repeat loss",
                1.31,
                effect,
                effect - 0.1,
                effect + 0.1,
            )
            rows.append((*row, 0.02, -0.03, 0.09, 64, effect > 0.4, ""))
    return pd.DataFrame(rows, columns=list(CAUSAL_COLUMNS))


def make_report(
    layers: int = 30,
    heads: int = 9,
    roles: int = 10,
    *,
    kv: int = 3,
    causal: bool = True,
    **options,
) -> Report:
    scores = make_scores(layers, heads, roles, claims=options.pop("claims", True))
    examples = make_examples(scores, **options)
    first = scores.ranked(scores.names[0]).iloc[0]
    examples = (
        hostile_example(scores.names[0], int(first["layer"]), int(first["head"])),
        *examples,
    )
    return Report(
        model=ModelInfo(
            name="smollm2-135m",
            family="llama",
            fingerprint="sha256:5f0c2a9d1b7e",
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=kv,
            d_head=64,
            n_parameters=134_515_008,
            dtype="float32",
            device="cpu",
            windows=(None,) * layers,
        ),
        scores=scores,
        examples=examples,
        checks={
            "max_logit_difference_with_and_without_the_seam": 0.0,
            "rows_sum_to_one_max_error": 2.4e-7,
            "ablating_nothing_changes_nothing": True,
        },
        warnings=(
            "Temporal: 31 of 64 prompts were dropped because the model does not know the fact.",
        ),
        reproducibility={
            **environment(["headlab", "report", "smollm2-135m", "--causal", "--seed", "0"]),
            "configuration": {"roles": list(scores.names), "alpha": 0.05, "resamples": 2000},
            "seeds": {"seed": 0},
            "fingerprint": "sha256:5f0c2a9d1b7e",
            "fingerprint_method": "sha256 over the safetensors headers and sizes",
            "tokenizer_sha256": "0b3f" * 16,
            "token_ids_sha256": "c1d2" * 16,
            "wall_seconds": 192.4,
        },
        causal=make_causal(scores) if causal else None,
    )
