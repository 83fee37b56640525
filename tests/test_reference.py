"""The real model agrees with numbers recorded elsewhere and with TransformerLens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from real_model import smollm2
from torch import Tensor

import headlab as hl

REFERENCE = json.loads(
    (Path(__file__).parent / "data" / "smollm2_repeated_tokens.json").read_text("utf-8")
)
N = REFERENCE["n"]
#: Query positions: of the second copy after its first token, and all but BOS.
SECOND = torch.arange(N + 2, 2 * N + 1)
EVERY = torch.arange(1, 2 * N + 1)


@cache
def reference_trace() -> hl.Trace:
    """One pass over the reference prompts, [BOS, x, x], with every statistic the tables need."""
    ids = torch.tensor(REFERENCE["ids"])
    induction = torch.full((2 * N + 1,), -1)
    induction[SECOND] = SECOND - N + 1
    plan = hl.keep.statistics(
        "target_mass",
        "lag_mass",
        "first_mass",
        "entropy",
        "mean_distance",
        targets=induction,
        bins=(1, 2, N - 1, N, N + 1),
    )
    return smollm2().trace(ids, keep=plan)


def per_head(name: str, queries: Tensor, lag_bin: int | None = None) -> Tensor:
    """[layer, head]: a statistic's mean over prompts and query positions."""
    values = reference_trace().statistic(name).double()
    if lag_bin is not None:
        values = values[..., lag_bin]
    return values[..., queries].mean((0, 3))


TABLES: dict[str, list[tuple[Any, ...]]] = {
    "induction_prefix_matching": [("target_mass", SECOND), ("lag_mass", SECOND, 2)],
    "duplicate_token": [("lag_mass", SECOND, 3)],
    "previous_token": [("lag_mass", EVERY, 0)],
    "sink_bos_mass": [("first_mass", EVERY)],
    "entropy_nats": [("entropy", EVERY)],
    "mean_distance_tokens": [("mean_distance", EVERY)],
}


def test_the_reference_holds_bos_and_a_repeat_of_distinct_tokens():
    ids = torch.tensor(REFERENCE["ids"])
    assert ids.shape == (REFERENCE["batch"], 2 * N + 1)
    assert (ids[:, 0] == smollm2().tokenizer.bos_token_id).all()
    assert torch.equal(ids[:, 1 : N + 1], ids[:, N + 1 :])
    assert all(len(set(row[1 : N + 1].tolist())) == N for row in ids)


@pytest.mark.parametrize("table", list(TABLES))
def test_head_statistics_equal_the_reference_table(table: str):
    wanted = torch.tensor(REFERENCE["scores"][table], dtype=torch.float64)
    assert wanted.shape == (30, 9)
    for statistic in TABLES[table]:
        torch.testing.assert_close(per_head(*statistic), wanted, atol=2e-4, rtol=0)


def test_loss_on_both_copies_equals_the_reference():
    ids = torch.tensor(REFERENCE["ids"])
    logits = reference_trace().logits
    assert logits is not None
    log_p = logits.double().log_softmax(-1)[:, :-1]
    loss = -log_p.gather(-1, ids[:, 1:, None])[..., 0].mean(0)  # at i, of the token at i + 1
    # Either copy without its first token, which nothing before it foretells. The recorded value of
    # the first copy leaves out its last token too.
    assert float(loss[1 : N - 1].mean()) == pytest.approx(REFERENCE["nll_first_copy"], abs=1e-4)
    assert float(loss[N + 1 :].mean()) == pytest.approx(REFERENCE["nll_second_copy"], abs=1e-4)


PROMPT = (
    "The rivers of the north carry more silt in spring than in autumn, because the snow that melts "
    "on the hills washes loose soil from the fields, and nothing yet grows there to hold it in place."
)


@cache
def lens_cache() -> tuple[Tensor, Any]:
    """Logits and activations of a copy of the model that TransformerLens took over."""
    from transformer_lens.model_bridge import TransformerBridge

    from headlab.models import open_model

    # Booting rebuilds the attention modules of what it is given, so it gets a copy of its own.
    opened = open_model("smollm2-135m", device="cpu", dtype="float32")
    bridge = TransformerBridge.boot_transformers(
        "tiny", hf_model=opened.module, tokenizer=opened.tokenizer, device="cpu"
    )
    with torch.no_grad():
        logits, activations = bridge.run_with_cache(
            smollm2().tokens(PROMPT),
            names_filter=lambda name: name.endswith(("attn.hook_pattern", "attn.hook_z")),
        )
    return logits, activations


@pytest.mark.slow
def test_pattern_z_and_logits_agree_with_transformer_lens_in_every_layer():
    model = smollm2()
    ids = model.tokens(PROMPT)
    assert 35 <= ids.shape[1] <= 45
    trace = model.trace(ids, keep=hl.keep.tensors("pattern", "z"))
    logits, theirs = lens_cache()
    for layer in range(model.spec.n_layers):
        for name in ("pattern", "z"):
            torch.testing.assert_close(
                trace.tensor(name, layer),
                theirs[f"blocks.{layer}.attn.hook_{name}"],
                atol=1e-4,
                rtol=0,
                msg=lambda text, at=f"{name} of layer {layer}": f"{at}: {text}",
            )
    torch.testing.assert_close(trace.logits, logits, atol=1e-3, rtol=0)
