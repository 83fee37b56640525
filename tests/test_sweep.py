"""The sweep engine against single whole runs, in every family; what it reuses changes no number."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import ENCODER_DECODER, FAMILIES, VOCAB_SIZE, build

import headlab as hl
from headlab.attention import Edit
from headlab.causal import Metric, Sweep
from headlab.errors import HeadError, PlanError, PromptError, UnsupportedError

STACKS = tuple(family for family in FAMILIES if family not in ENCODER_DECODER)
METRICS = {
    "logit difference": hl.metrics.logit_difference(5, 7),
    "loss": hl.metrics.loss(),
    "kl": hl.metrics.kl(),
    "kl of all": hl.metrics.kl("all"),
}


def prompts(lengths: Sequence[int] = (12, 9, 12, 5), seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def variants(model: hl.Model, given: list[list[int]]) -> list[list[Edit]]:
    other = model.trace(
        prompts([len(prompt) for prompt in given], 1), keep=hl.keep.tensors("z", "v", "resid_pre")
    )
    return [
        *[[hl.ablate((layer, head))] for layer in range(2) for head in range(3)],
        *[[hl.patch((layer, 1), source=other, positions=[-1])] for layer in range(2)],
        [hl.ablate("1.*", site="resid_pre", positions=[4])],
        [hl.patch("0.*", site="resid_pre", source=other, positions=[3, -1])],
        [hl.ablate("0.0", kind="resample", reference=given, seed=3)],
        [hl.ablate("1.0", kind="first", site="pattern", positions=[-1])],
        [hl.ablate("1.0", kind="mean", site="pattern")],
        [hl.patch("1.1", site="v", source=other, positions=[3, 4])],
        [hl.scale("0.2", by=2.0), hl.ablate("1.0")],
        [hl.add("0.1", 0.3, site="q", positions=[-2])],
        [],
    ]


def one_by_one(
    model: hl.Model, given: list[list[int]], metric: Metric, sets: Sequence[Sequence[Edit]]
) -> np.ndarray:
    """Every prompt by itself under every set of edits, whole."""
    bound = metric.bind(model, model.tokens(given))
    width = max(map(len, given))

    def logits(prompt: list[int]) -> torch.Tensor:
        found = model.trace(prompt, logits="last" if bound.needs == "last" else "all").logits
        assert found is not None
        pad = 0 if bound.needs == "last" else width - len(prompt)
        return torch.nn.functional.pad(found, (0, 0, 0, pad))

    bound = bound.with_reference(torch.cat([logits(prompt) for prompt in given]))
    values = np.empty((len(sets), len(given)))
    for at, edits in enumerate(sets):
        with model.edit(*edits):
            run = torch.cat([logits(prompt) for prompt in given])
        values[at] = bound(run, torch.arange(len(given))).numpy()
    return values


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("family", STACKS)
def test_a_sweep_equals_whole_runs(family: str, metric: str):
    model = hl.load(build(family))
    given = prompts()
    sets = variants(model, given)
    found = Sweep(model, given, METRICS[metric]).run(sets)
    bound = METRICS[metric].bind(model, model.tokens(given))
    logits = {"last": "last", "all": "all"}[bound.needs]
    clean = torch.nan_to_num(model.trace(given, logits=logits).logits)
    bound = bound.with_reference(clean)
    for at, edits in enumerate(sets):
        with model.edit(*edits):
            run = torch.nan_to_num(model.trace(given, logits=logits).logits)
        whole = bound(run, torch.arange(len(given))).numpy()
        np.testing.assert_allclose(found[at], whole, rtol=1e-4, atol=1e-5, err_msg=str(at))
    assert np.abs(found[:6] - found[-1]).max() > 1e-3


def test_a_sweep_equals_prompts_run_by_themselves():
    model = hl.load(build("llama"))
    given = prompts()
    sets = [edits for edits in variants(model, given)[:6]] + [[hl.ablate("1.0", site="pattern")]]
    found = Sweep(model, given, METRICS["logit difference"]).run(sets)
    whole = one_by_one(model, given, METRICS["logit difference"], sets)
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 13, 100, 10_000])
def test_how_much_runs_at_once_changes_nothing(tokens: int):
    model = hl.load(build("gemma3_text"))
    given = prompts((40, 40, 33))  # longer than its window
    sets = variants(model, given)
    whole = Sweep(model, given, METRICS["logit difference"]).run(sets)
    parts = Sweep(model, given, METRICS["logit difference"], tokens_at_once=tokens).run(sets)
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-5)


def test_blocks_and_positions_before_the_edit_are_not_run():
    model = hl.load(build("llama"))
    seen: list[tuple[int, int]] = []
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, output, at=at: seen.append((at, output[0].shape[1])),
            with_kwargs=True,
        )
        for at, layer in enumerate(model.module.model.layers)
    ]
    sweep = Sweep(model, prompts((12, 12)), METRICS["logit difference"])
    sweep.run([[hl.ablate("1.0", positions=[-1])]])
    assert seen[-1] == (1, 1)  # layer 1 only, the last position only
    sweep.run([[hl.ablate("1.0")]])
    assert seen[-1] == (1, 12)
    for hook in hooks:
        hook.remove()


def test_the_model_comes_back_unchanged_also_after_an_error():
    module = build("llama")
    model = hl.load(module)
    before = model.logits(prompts()[0])

    def broken(x: torch.Tensor, where: object) -> torch.Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        Sweep(model, prompts(), METRICS["loss"]).run([[hl.apply("1.0", broken)]])
    assert torch.equal(model.logits(prompts()[0]), before)
    assert not any("forward" in block.__dict__ for block in model.blocks.modules)
    assert not model.edited


def test_edits_in_force_are_part_of_the_clean_run():
    model = hl.load(build("llama"))
    given = prompts()
    both = Sweep(model, given, METRICS["logit difference"]).run(
        [[hl.ablate("0.0"), hl.ablate("1.1")]]
    )
    with model.edit(hl.ablate("0.0")):
        inside = Sweep(model, given, METRICS["logit difference"])
        np.testing.assert_allclose(inside.run([[hl.ablate("1.1")]]), both, rtol=1e-4, atol=1e-5)
        assert np.abs(inside.clean - both[0]).max() > 1e-4


def test_a_killed_sweep_goes_on_where_it_stopped(tmp_path: Path):
    model = hl.load(build("llama"))
    given, sets = prompts(), variants(hl.load(build("llama")), prompts())
    labels = [f"set {at}" for at in range(len(sets))]
    whole = Sweep(model, given, METRICS["loss"]).run(sets)
    runs = []

    def killed(text: str) -> None:
        runs.append(text)
        if len(runs) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Sweep(model, given, METRICS["loss"], out=tmp_path, tell=killed, tokens_at_once=24).run(
            sets, labels
        )
    parts = len(list(tmp_path.glob("*/*.npz")))
    assert parts >= 4
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.npz")}
    again = Sweep(model, given, METRICS["loss"], out=tmp_path, tokens_at_once=24).run(sets, labels)
    np.testing.assert_allclose(again, whole, rtol=1e-4, atol=1e-5)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    other = Sweep(model, prompts(seed=5), METRICS["loss"], out=tmp_path, tokens_at_once=24)
    assert np.abs(other.run(sets, labels) - whole).max() > 1e-3


def test_a_model_changed_since_does_not_read_the_parts_of_before(tmp_path: Path):
    module = build("llama")
    model, given = hl.load(module), prompts()
    metric, sets = METRICS["logit difference"], [[hl.ablate("1.0")]]
    before = Sweep(model, given, metric, out=tmp_path).run(sets)
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight.mul_(0.5)
    after = Sweep(model, given, metric, out=tmp_path).run(sets)
    np.testing.assert_allclose(after, Sweep(model, given, metric).run(sets), rtol=1e-5)
    assert np.abs(after - before).max() > 1e-3


def test_bad_input_is_told_in_one_sentence(tmp_path: Path):
    model = hl.load(build("llama"))
    with pytest.raises(PlanError, match="name of its own"):
        Sweep(model, prompts(), METRICS["loss"]).run([[], []], ["a", "a"])
    with pytest.raises(HeadError, match="L9H0 does not exist"):
        Sweep(model, prompts(), METRICS["loss"]).run([[hl.ablate("9.0")]])
    with pytest.raises(PlanError, match=r"is nan for prompt \d"):
        Sweep(model, prompts(), lambda logits, rows: logits[:, 0] * torch.nan).run([[]])
    with pytest.raises(PromptError, match="list of either, not"):
        Sweep(model, [], METRICS["loss"])
    with model.edit(hl.ablate("0.0")), pytest.raises(PlanError, match="without edits in force"):
        Sweep(model, prompts(), METRICS["loss"], out=tmp_path)
    with pytest.raises(PlanError, match=r"is not headlab.s, so it cannot be told from another"):
        Sweep(model, prompts(), lambda logits, rows: logits[:, 0], out=tmp_path)
    with pytest.raises(UnsupportedError, match="one stack"):
        Sweep(hl.load(build("bart")), prompts(), METRICS["loss"])


# -- what a tester found -------------------------------------------------------------------------------------


def test_edits_in_force_count_from_the_prompts_end_also_in_cached_positions():
    model, given = hl.load(build("llama")), prompts((40, 40))
    metric = METRICS["logit difference"]
    bound = metric.bind(model, model.tokens(given))
    for at in (-1, -3):
        inner = hl.ablate("1.2", positions=[-1])
        with model.edit(hl.ablate("0.*", positions=[at])):
            found = Sweep(model, given, metric).run([inner])[0]
            with model.edit(inner):
                last = model.trace(given, logits="last").logits
        whole = bound.measure(last, torch.arange(2))
        np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)


def test_a_sweep_runs_under_the_edits_it_was_made_under(tmp_path: Path):
    model, metric = hl.load(build("llama")), METRICS["logit difference"]
    made = Sweep(model, prompts(), metric)
    stored = Sweep(model, prompts(), metric, out=tmp_path)
    with model.edit(hl.scale("0.*", by=0.0)):
        for sweep in (made, stored):
            with pytest.raises(PlanError, match="not those that were when this sweep was made"):
                sweep.run([hl.ablate("1.2")])
    assert not list(tmp_path.glob("*/*.npz"))
    np.testing.assert_allclose(made.run([hl.ablate("1.2")]), stored.run([hl.ablate("1.2")]))


def test_finished_heads_are_read_whatever_runs_beside_them(tmp_path: Path):
    model, metric = hl.load(build("llama")), METRICS["logit difference"]
    some = Sweep(model, prompts(), metric, out=tmp_path).run([hl.ablate("0.1")], ["L0H1"])
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.npz")}
    labels = ["L0H0", "L0H1", "L1H0"]
    every = [hl.ablate("0.0"), hl.ablate("0.1"), hl.ablate("1.0")]
    more = Sweep(model, prompts(), metric, out=tmp_path).run(every, labels)
    np.testing.assert_array_equal(more[1], some[0])
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())


def test_another_thread_is_told_to_wait_its_turn():
    model, said = hl.load(build("llama")), []

    def other() -> None:
        try:
            model.logits(prompts()[0])
            Sweep(model, prompts(), METRICS["loss"]).run([hl.ablate("0.1")])
        except PlanError as error:
            said.append(str(error))

    with model.edit(hl.ablate("0.0")):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(said) == 1
    assert "another thread is running or editing" in said[0]
    other()
    assert len(said) == 1
    assert not model.edited


def test_patterns_of_prompts_of_two_lengths():
    model, given = hl.load(build("llama")), prompts((12, 9))
    other = model.trace(prompts((12, 9), seed=3), keep=hl.keep.tensors("pattern"))
    edit = hl.patch("1.1", "pattern", source=other)
    found = Sweep(model, given, METRICS["logit difference"]).run([edit])[0]
    with model.edit(edit):
        last = model.trace(given, logits="last").logits
    expected = last[:, 0, 5] - last[:, 0, 7]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
