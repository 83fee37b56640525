"""Making a report: score, pick examples, check the instrument, write it all down."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

import headlab
from headlab.attention import keep
from headlab.models import weights_sha256
from headlab.report.environment import environment
from headlab.report.model import ModelInfo, Report
from headlab.roles import ALPHA, N_PROMPTS, Role, Scores
from headlab.roles.base import forget
from headlab.roles.confirmation import confirm_roles
from headlab.roles.examples import examples
from headlab.roles.scoring import judge, measure, prepare, read_data, select
from headlab.shards import Shards
from headlab.tasks import RecordsLike, prose

if TYPE_CHECKING:
    from headlab.model import Model

_CHECK_TOKENS = 64
#: Largest logit difference that rounding explains, relative to the largest logit.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def report(
    model: Model,
    roles: str | Iterable[str | Role] = "all",
    *,
    out: str | Path | None = None,
    seed: int = 0,
    n_prompts: int = N_PROMPTS,
    alpha: float = ALPHA,
    haystack: str | Path | None = None,
    data: Mapping[str, RecordsLike] | None = None,
    causal: bool = False,
    fresh: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Report:
    """Score a model's heads for roles and report on them.

    Args:
        model: The model.
        roles: Roles by name, or ``"all"``.
        out: Folder to write ``report.json``, ``scores.parquet``, ``examples.parquet`` and ``report.html`` to. Finished
            parts are kept in ``out/shards`` as they come, and a later run with the same settings goes on from them.
        seed: Seed of everything random.
        n_prompts: Prompts per probe.
        alpha: False-discovery rate per role.
        haystack: Folder of ``.txt`` files to use in place of headlab's essays.
        data: Probe data of yours by role; see :func:`headlab.score`.
        causal: Whether to confirm the claimed heads of every role by ablation; see :func:`headlab.roles.confirm`.
        fresh: Whether to drop finished parts of an earlier run with the same settings.
        tell: Told, in a few words, what is being done.

    Raises:
        RoleError: A role does not exist.
        UnsupportedError: The model is an encoder-decoder.
        OutputError: The folder cannot be written; what is finished is kept.
    """
    started = time.monotonic()
    chosen = select(roles, data)
    records = read_data(chosen, data)
    text = prose(None if haystack is None else Path(haystack))
    configuration: dict[str, Any] = {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "weights_sha256": weights_sha256(
            model.module
        ),  # as they are now: they may have been changed
        "dtype": str(model.dtype),
        "tokenizer_sha256": tokenizer_hash(model.tokenizer),
        "n_prompts": n_prompts,
        "seed": seed,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "data_sha256": {
            name: hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
            for name, rows in records.items()
        },
        "headlab": headlab.__version__,
    }
    if model.edited:
        # Edits are functions, which no file can tell apart: what is measured under them is not gone back to.
        configuration["edited"] = uuid4().hex
    shards = None if out is None else Shards(Path(out) / "shards", configuration, fresh)
    remember = forget if shards is None else shards.remember
    probing = prepare(model, seed, n_prompts, haystack, remember, tell)
    found = measure(probing, chosen, records)
    scores = judge(chosen, found, alpha, seed)
    confirmed = confirm_roles(probing, chosen, scores, records) if causal else None
    tell("picking examples")
    shown = examples(model, scores, found, seed)
    tell("checking the instrument")
    checks = self_checks(model, text)
    roles_settings = {"roles": [role.info.name for role in chosen], "alpha": alpha}
    digest = hashlib.sha256(
        b"".join(look.ids.tobytes() for one in found.values() for look in one.looks)
    )
    made = Report(
        model=ModelInfo.from_spec(
            model.spec,
            fingerprint=model.fingerprint,
            n_parameters=sum(parameter.numel() for parameter in model.module.parameters()),
            dtype=str(model.dtype),
            device=str(model.device),
        ),
        scores=scores,
        examples=shown,
        checks=checks,
        warnings=_warnings(scores, checks),
        reproducibility={
            **environment(),
            "configuration": configuration | roles_settings,
            "seeds": {"probes, resampling and sign flips": seed},
            "fingerprint": model.fingerprint,
            "fingerprint_method": "sha256 over the weight files, or over names, shapes and sampled values",
            "tokenizer_sha256": configuration["tokenizer_sha256"],
            "token_ids_sha256": digest.hexdigest(),
            "resumed_parts": 0 if shards is None else shards.resumed,
            "wall_seconds": round(time.monotonic() - started, 1),
        },
        causal=confirmed,
    )
    if out is not None:
        tell("writing")
        made.write(out)
    return made


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 of a tokenizer's vocabulary and of what it makes of a line of text."""
    if tokenizer is None:
        return ""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    sample = tokenizer("The year 1999, naïvely: 3.14 —\n\tx += y")["input_ids"]
    return hashlib.sha256(repr((vocabulary, list(sample))).encode()).hexdigest()


def self_checks(model: Model, text: str) -> dict[str, float | str | bool]:
    """Whether the instrument disturbs what it measures, on a stretch of text.

    Returns:
        Largest logit difference between the model as it came and the model under capture, whether rounding
        explains it, largest deviation of a row's sum from 1 (sink logits aside), and whether the model is as it
        was afterwards.
    """
    length = min(_CHECK_TOKENS, model.spec.max_context or _CHECK_TOKENS)
    if model.tokenizer is None:
        ids = torch.arange(length)[None] % model.spec.n_vocab
    else:
        ids = model.tokens(text[: 40 * length], limit=length)
    plan: list[keep.Keep] = [keep.rows(), keep.statistics("entropy", "argmax")]
    before = model.logits(ids)
    seen = model.trace(ids, keep=plan)
    after = model.logits(ids)
    assert seen.logits is not None
    difference = float((seen.logits - before).abs().max())
    relative = difference / float(before.abs().max())
    checks: dict[str, float | str | bool] = {
        "largest logit difference under capture": difference,
        "difference within rounding": relative <= _ROUNDING.get(model.dtype, 5e-2),
        "outputs bit-equal once capture has ended": bool(torch.equal(before, after)),
    }
    if not any(layer.sinks for layer in model.spec.layers):
        checks["largest deviation of a row's sum from 1"] = float(
            (seen.rows.sum(-1) - 1).abs().max()
        )
    return checks


def _warnings(scores: Scores, checks: dict[str, float | str | bool]) -> tuple[str, ...]:
    warnings = [f"Self-check failed: {name}." for name, value in checks.items() if value is False]
    for name in scores.names:
        rows = scores.frame[scores.frame["role"] == name]
        lost = rows[rows["score"].isna()]
        for note in rows["note"][rows["note"].str.contains("pass correction")].unique()[:1]:
            warnings.append(f"{name}: {note}.")
        if len(lost) == len(rows):
            warnings.append(f"{name}: {lost['note'].iloc[0]}.")
        elif len(lost):
            reasons = lost["note"].value_counts()
            why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            warnings.append(f"{name}: {len(lost)} of {len(rows)} heads without a score ({why}).")
    return tuple(warnings)
