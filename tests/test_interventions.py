"""Interventions against hand-edited forward passes.

Expected logits come from a second copy of the model that runs through the plain attention function
of oracle.py, with the values rewritten by a few lines written here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from oracle import assert_close
from test_capture import ids_of, ragged
from test_generate import padded
from tiny_models import ENCODER_DECODER, EOS
from torch import Tensor

import headlab as hl
from headlab.errors import HeadError, HeadlabError, PlanError

Lab = Callable[..., Any]
N = 13
TOLERANCE = 5e-5
HEADS = "0.1, 1.0, 1.2"
HEADS_OF = {0: (1,), 1: (0, 2)}
FAMILIES = ["llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "gpt_bigcode"]
VECTORS = ("q", "k", "v", "z", "result")
ROWS = ("scores", "pattern")


class Hand:
    """Runs a copy of a model by hand; see :func:`oracle.by_hand`."""

    def __init__(self, model: Any, module: Any) -> None:
        self.module = module
        self.layers = [module.get_submodule(layer.name) for layer in model.spec.layers]
        paths = {part: name for name, part in model.module.named_modules()}
        self.projections = [
            module.get_submodule(paths[model.weights.output_projection(at)])
            for at in range(model.spec.n_layers)
        ]

    @contextmanager
    def edited(self, **rewrites: Any) -> Any:
        with oracle.by_hand(self.module, self.layers, self.projections, **rewrites):
            yield

    def logits(self, ids: Tensor, decoder: Tensor | None = None, **rewrites: Any) -> Tensor:
        arguments = {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long()}
        if decoder is not None:
            arguments["decoder_input_ids"] = decoder.clamp(min=0)
            arguments["decoder_attention_mask"] = (decoder >= 0).long()
        with self.edited(**rewrites), torch.no_grad():
            return self.module(**arguments).logits

    def values(self, site: str, ids: Tensor) -> list[Tensor]:
        """What a run holds at a site, per layer."""
        seen: dict[int, Tensor] = {}

        def look(x: Tensor, layer: int) -> Tensor:
            seen[layer] = x.clone()
            return x

        self.logits(ids, **{site: look})
        return [seen[at] for at in sorted(seen)]


@pytest.fixture(scope="session")
def hand(lab: Lab, twin: Lab) -> Lab:
    return lambda family: Hand(lab(family), twin(family))


def rewrite(
    change: Callable[[Tensor, int, int], Tensor],
    heads: dict[int, tuple[int, ...]] = HEADS_OF,
    rows: bool = False,
    at: list[list[int]] | None = None,
) -> Callable[[Tensor, int], Tensor]:
    """Applies ``change(values of one head, layer, head)`` to these heads at these positions."""

    def apply(x: Tensor, layer: int) -> Tensor:
        x = x.clone()
        for head in heads.get(layer, ()):
            old = x[:, head] if rows else x[:, :, head]  # [batch, position, width]
            new = change(old, layer, head)
            if at is not None:
                mask = torch.zeros(old.shape[:2], dtype=torch.bool)
                for row, positions in enumerate(at):
                    mask[row, positions] = True
                new = torch.where(mask[..., None], new, old)
            if rows:
                x[:, head] = new
            else:
                x[:, :, head] = new
        return x

    return apply


def check(got: Tensor, expected: Tensor, ids: Tensor, plain: Tensor | None = None) -> None:
    """Equal where there are tokens; and different from *plain*, so that the edit did something."""
    real = ids >= 0
    assert_close(got[real], expected[real], TOLERANCE)
    if plain is not None:
        assert float((got - plain)[real].abs().max()) > 1e-3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- each edit at each site ------------------------------------------------------------------------


@dataclass
class Case:
    """An edit and its hand-written counterpart."""

    edit: Callable[..., Any]
    change: Callable[[Tensor, int, int], Tensor]


def vector_cases(width: int) -> dict[str, Case]:
    value = torch.randn(width, generator=generator(1))
    per_position = torch.randn(N, 1, width, generator=generator(2))
    steps = torch.arange(N)[:, None].float()

    def by_position(x: Tensor, where: Any) -> Tensor:
        return x * 0.7 + 0.1 * where.positions[:, :, None, None] - where.layer

    return {
        "zero": Case(lambda **o: hl.ablate(HEADS, **o), lambda x, *_: x * 0),
        "scale": Case(lambda **o: hl.scale(HEADS, by=-1.7, **o), lambda x, *_: x * -1.7),
        "add": Case(lambda **o: hl.add(HEADS, value, **o), lambda x, *_: x + value),
        "replace": Case(
            lambda **o: hl.replace(HEADS, value, **o), lambda x, *_: value.expand_as(x)
        ),
        "replace by position": Case(
            lambda **o: hl.replace(HEADS, per_position, **o),
            lambda x, *_: per_position[:, 0].expand_as(x),
        ),
        "apply": Case(
            lambda **o: hl.apply(HEADS, by_position, **o),
            lambda x, layer, head: x * 0.7 + 0.1 * steps - layer,
        ),
    }


def width_of(model: Any, site: str) -> int:
    if site == "result":
        return int(model.spec.d_model)
    return int(model.spec.d_value if site in ("v", "z") else model.spec.d_head)


PLACES = {"everywhere": None, "some positions": (0, 4, -1, -3)}


def resolved(places: tuple[int, ...] | None, lengths: tuple[int, ...]) -> list[list[int]] | None:
    if places is None:
        return None
    return [[p if p >= 0 else n + p for p in places] for n in lengths]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("site", VECTORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_vector_edits_equal_a_hand_edited_forward_pass(
    lab: Lab, hand: Lab, family: str, site: str, places: str
) -> None:
    model, lengths = lab(family), (N, N - 4)
    ids, positions = ragged(lengths), PLACES[places]
    plain = model.logits(ids)
    for name, case in vector_cases(width_of(model, site)).items():
        by_hand = rewrite(case.change, at=resolved(positions, lengths))
        expected = hand(family).logits(ids, **{site: by_hand})
        with model.edit(case.edit(site=site, positions=positions)):
            # The same vector added to every key shifts whole rows of scores, which changes nothing.
            shift = (name, site, positions) == ("add", "k", None)
            check(model.logits(ids), expected, ids, None if shift else plain)
            kept = model.trace(ids, keep=hl.keep.statistics("entropy")).logits
        check(kept, expected, ids)
    assert torch.equal(model.logits(ids)[ids >= 0], plain[ids >= 0])


def row_cases(site: str) -> dict[str, Case]:
    key = torch.randn(N, generator=generator(3))
    weights = torch.rand(N, N, generator=generator(4)) / 5
    rows = torch.arange(N)[:, None].float()

    def by_position(x: Tensor, where: Any) -> Tensor:
        return x * 0.5 + 0.05 * where.positions[:, None, :, None] * key.abs()

    cases = {
        "scale": Case(lambda **o: hl.scale(HEADS, by=0.4, **o), lambda x, *_: x * 0.4),
        "add": Case(lambda **o: hl.add(HEADS, key, **o), lambda x, *_: x + key),
        "apply": Case(
            lambda **o: hl.apply(HEADS, by_position, **o),
            lambda x, *_: x * 0.5 + 0.05 * rows * key.abs(),
        ),
    }
    if site == "pattern":
        cases["zero"] = Case(lambda **o: hl.ablate(HEADS, **o), lambda x, *_: x * 0)
        cases["replace"] = Case(
            lambda **o: hl.replace(HEADS, weights, **o), lambda x, *_: weights.expand_as(x)
        )
        cases["mean"] = Case(
            lambda **o: hl.ablate(HEADS, "mean", **o),
            lambda x, *_: (x > 0) / (x > 0).sum(-1, keepdim=True).clamp(min=1),
        )
    else:
        for kind in ("zero", "mean"):
            cases[kind] = Case(
                lambda kind=kind, **o: hl.ablate(HEADS, kind, **o),
                lambda x, *_: x.masked_fill(x > -torch.inf, 0.0),
            )
        causal = torch.zeros(N, N).masked_fill(torch.ones(N, N).triu(1) > 0, -torch.inf)
        ramp = causal + key
        cases["replace"] = Case(
            lambda **o: hl.replace(HEADS, ramp, **o),
            lambda x, *_: ramp.expand_as(x).masked_fill(x == -torch.inf, -torch.inf),
        )
    return cases


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("site", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_row_edits_equal_a_hand_edited_forward_pass(
    lab: Lab, hand: Lab, family: str, site: str, places: str
) -> None:
    model, lengths = lab(family), (N, N - 4)
    ids, positions = ragged(lengths), PLACES[places]
    plain = model.logits(ids)
    for name, case in row_cases(site).items():
        if name == "mean" and site == "pattern" and family == "gpt_oss":
            continue  # what a sink takes has its own test
        by_hand = rewrite(case.change, rows=True, at=resolved(positions, lengths))
        expected = hand(family).logits(ids, **{site: by_hand})
        with model.edit(case.edit(site=site, positions=positions)):
            check(model.logits(ids), expected, ids, plain)
            kept = model.trace(ids, keep=hl.keep.statistics("entropy", heads="*.0")).logits
            check(kept, expected, ids)


@pytest.mark.parametrize("by", [0.0, -1.0, -0.5])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_hidden_keys_stay_hidden_however_scores_are_scaled(
    lab: Lab, hand: Lab, family: str, by: float
) -> None:
    model, ids = lab(family), ragged((N, N - 4))
    change = rewrite(lambda x, *_: torch.where(x == -torch.inf, x, x * by), rows=True)
    expected = hand(family).logits(ids, scores=change)
    with model.edit(hl.scale(HEADS, site="scores", by=by)):
        check(model.logits(ids), expected, ids)


def test_mean_ablated_rows_are_even_even_with_a_sink(lab: Lab) -> None:
    model, ids = lab("gpt_oss"), ids_of(N)
    with model.edit(hl.ablate("1.*", "mean", site="pattern")):
        rows = model.trace(ids, keep=hl.keep.rows(layers=[1])).rows[0, 0]
    for query in range(N):
        seen = rows[:, query, : query + 1]
        assert_close(seen, seen[:, :1].expand_as(seen).clone(), 1e-6)
        assert bool((seen > 0).all())
        assert bool((rows[:, query, query + 1 :] == 0).all())


@pytest.mark.parametrize("site", VECTORS)
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_mean_ablation_puts_in_the_mean_over_every_position_of_the_reference(
    lab: Lab, hand: Lab, family: str, site: str
) -> None:
    model, ids = lab(family), ragged((N, N - 4))
    reference = ragged((9, 5, 7), seed=4)
    values = hand(family).values(site, reference)
    real = reference >= 0
    means = [value[real].mean(0) for value in values]  # [head, width]
    for positions in (None, (2, -1)):
        change = rewrite(
            lambda x, layer, head: means[layer][head].expand_as(x),
            at=resolved(positions, (N, N - 4)),
        )
        expected = hand(family).logits(ids, **{site: change})
        edit = hl.ablate(HEADS, "mean", site=site, reference=reference, positions=positions)
        with model.edit(edit):
            check(model.logits(ids), expected, ids, hand(family).logits(ids))


def test_a_reference_may_be_text(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of(N)
    texts = ["w5 w6 w7", "w8 w9"]
    with model.edit(hl.ablate(HEADS, "mean", reference=texts)):
        by_text = model.logits(ids)
    with model.edit(hl.ablate(HEADS, "mean", reference=[[5, 6, 7], [8, 9]])):
        assert torch.equal(model.logits(ids), by_text)


@pytest.mark.parametrize("site", VECTORS)
def test_resampling_puts_in_values_of_one_reference_position_for_every_head_and_layer(
    lab: Lab, hand: Lab, site: str
) -> None:
    model, ids = lab("llama"), ids_of(N)
    # Distinct tokens: values of the first layer's v depend on the token alone.
    reference = torch.arange(5, 23).view(2, 9).clone()
    reference[1, 6:] = -1
    values = hand("llama").values(site, reference)
    pool = [value[reference >= 0] for value in values]  # [position, head, width]
    edit = hl.ablate(HEADS, "resample", site=site, reference=reference, seed=5)
    with model.edit(edit):
        kept = model.trace(ids, keep=hl.keep.tensors(site))
    drawn: list[Tensor] = []
    for layer, heads in HEADS_OF.items():
        for head in heads:
            mine = kept.of_head(site, hl.Head(layer, head))  # [batch, position, width]
            theirs = pool[layer][:, head]
            distance = (mine.flatten(0, 1)[:, None] - theirs).abs().amax(-1)
            assert float(distance.amin(-1).max()) < 1e-4
            drawn.append(distance.argmin(-1))
    assert all(torch.equal(drawn[0], other) for other in drawn)
    assert len(set(drawn[0].tolist())) > 5  # positions get draws of their own


def test_resampling_is_reproducible_by_its_seed(lab: Lab) -> None:
    model, ids, reference = lab("llama"), ids_of(N), ids_of(9, 3, seed=4)

    def resampled(seed: int, heads: str = HEADS) -> Tensor:
        with model.edit(hl.ablate(heads, "resample", reference=reference, seed=seed)):
            return model.logits(ids)

    assert torch.equal(resampled(1), resampled(1))
    assert not torch.allclose(resampled(1), resampled(2))


def test_resampling_draws_the_same_for_a_longer_run_as_for_its_beginning(lab: Lab) -> None:
    model, ids, reference = lab("llama"), ids_of(N, 3), ids_of(9, 3, seed=4)
    with model.edit(hl.ablate("0.*", "resample", reference=reference)):
        long = model.logits(ids)
        for n in (1, 2, 5, 12):
            assert_close(model.logits(ids[:, :n]), long[:, :n], 1e-5)


def test_resampled_patterns_are_rows_of_the_reference(lab: Lab, hand: Lab) -> None:
    model, ids, other = lab("llama"), ids_of(N), ids_of(N, seed=4)
    values = hand("llama").values("pattern", other)
    change = rewrite(lambda x, layer, head: values[layer][:, head], rows=True)
    expected = hand("llama").logits(ids, pattern=change)
    with model.edit(hl.ablate(HEADS, "resample", site="pattern", reference=other)):
        check(model.logits(ids), expected, ids, model.trace(ids).logits * 0)
        with pytest.raises(HeadlabError):
            model.logits(ids[:, :5])


@pytest.mark.parametrize("positions", [None, (-1, 3)])
@pytest.mark.parametrize("site", [*VECTORS, "pattern"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3", "gpt_bigcode"])
def test_patching_puts_in_what_another_run_computed(
    lab: Lab, hand: Lab, family: str, site: str, positions: tuple[int, ...] | None
) -> None:
    model, lengths = lab(family), (N, N - 4)
    ids, other = ragged(lengths), ragged(lengths, seed=4)
    source = model.trace(other, keep=hl.keep.tensors(site))
    values = hand(family).values(site, other)
    rows = site == "pattern"
    change = rewrite(
        lambda x, layer, head: values[layer][:, head] if rows else values[layer][:, :, head],
        rows=rows,
        at=resolved(positions, lengths),
    )
    expected = hand(family).logits(ids, **{site: change})
    plain = model.logits(ids)
    with model.edit(hl.patch(HEADS, site, source=source, positions=positions)):
        check(model.logits(ids), expected, ids, plain)


def test_patching_a_ragged_batch_from_itself_changes_nothing(lab: Lab) -> None:
    model, ids = lab("llama"), ragged((N, N - 4))
    plain = model.logits(ids)
    for site in (*VECTORS, "pattern"):
        source = model.trace(ids, keep=hl.keep.tensors(site))
        with model.edit(hl.patch("*.*", site, source=source)):
            check(model.logits(ids), plain, ids)


def test_one_source_serves_every_prompt_of_a_batch(lab: Lab) -> None:
    model, ids, other = lab("llama"), ids_of(N, 3), ids_of(N, 1, seed=4)
    source = model.trace(other, keep=hl.keep.tensors("z"))
    repeated = model.trace(other.expand(3, -1), keep=hl.keep.tensors("z"))
    with model.edit(hl.patch(HEADS, source=source)):
        one = model.logits(ids)
    with model.edit(hl.patch(HEADS, source=repeated)):
        assert_close(model.logits(ids), one, TOLERANCE)
    two = model.trace(ids_of(N, 2, seed=4), keep=hl.keep.tensors("z"))
    with model.edit(hl.patch(HEADS, source=two)), pytest.raises(PlanError):
        model.logits(ids)


def test_positions_the_source_does_not_have_keep_their_values(lab: Lab, hand: Lab) -> None:
    model, ids, other = lab("llama"), ids_of(N), ids_of(6, seed=4)
    source = model.trace(other, keep=hl.keep.tensors("z"))
    values = hand("llama").values("z", other)

    def change(x: Tensor, layer: int, head: int) -> Tensor:
        return torch.cat([values[layer][:, :, head], x[:, 6:]], 1)

    expected = hand("llama").logits(ids, z=rewrite(change))
    with model.edit(hl.patch(HEADS, source=source)):
        check(model.logits(ids), expected, ids)


@pytest.mark.parametrize("site", ["z", "q", "pattern"])
def test_a_source_that_kept_some_positions_is_patched_at_these_or_refused(
    lab: Lab, hand: Lab, site: str
) -> None:
    """The values of positions 4 and 9 must not land on positions 0 and 1."""
    model, ids, other = lab("llama"), ids_of(N), ids_of(N, seed=4)
    source = model.trace(other, keep=hl.keep.tensors(site, positions=[4, 9]))
    values = hand("llama").values(site, other)
    rows = site == "pattern"
    change = rewrite(
        lambda x, layer, head: values[layer][:, head] if rows else values[layer][:, :, head],
        rows=rows,
        at=[[4, 9], [4, 9]],
    )
    expected = hand("llama").logits(ids, **{site: change})
    try:
        with model.edit(hl.patch(HEADS, site, source=source)):
            got = model.logits(ids)
    except HeadlabError:
        return
    check(got, expected, ids)


# -- identities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3_text", "opt"])
def test_patching_z_everywhere_gives_the_other_runs_logits_where_tokens_agree(
    lab: Lab, family: str
) -> None:
    model, other = lab(family), ids_of(N, seed=4)
    ids = other.clone()
    ids[:, :6] = ids_of(6, seed=9)
    source = model.trace(other, keep=hl.keep.tensors("z"))
    plain = model.logits(ids)
    assert float((plain - source.logits)[:, 6:].abs().max()) > 1e-2
    with model.edit(hl.patch("*.*", source=source)):
        assert_close(model.logits(ids)[:, 6:], source.logits[:, 6:], TOLERANCE)
    with model.edit(
        hl.patch("*.*", "result", source=model.trace(other, keep=hl.keep.tensors("result")))
    ):
        assert_close(model.logits(ids)[:, 6:], source.logits[:, 6:], TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "deepseek_v3"])
def test_edits_that_change_nothing_leave_the_bits_alone(lab: Lab, twin: Lab, family: str) -> None:
    model, ids = lab(family), ids_of(N)
    with torch.no_grad():
        plain = twin(family)(input_ids=ids).logits
    source = model.trace(ids, keep=hl.keep.tensors("z", "q", "result"))
    edits = [
        hl.patch("*.*", source=source),
        hl.patch("*.*", "q", source=source),
        hl.scale("*.*", by=1.0),
        hl.add("*.*", torch.zeros(())),
        hl.apply("*.*", lambda x, where: x),
        hl.ablate("*.*", positions=[]),
        hl.scale("*.*", "result", by=1.0),
        hl.ablate("*.*", site="result", positions=[99]),
    ]
    with model.edit():
        assert torch.equal(model.logits(ids), plain)
    for edit in edits:
        with model.edit(edit):
            assert torch.equal(model.logits(ids), plain)
    with model.edit(*edits):
        assert torch.equal(model.logits(ids), plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_ablating_all_heads_but_one_leaves_that_heads_result(
    lab: Lab, hand: Lab, family: str
) -> None:
    model, ids = lab(family), ids_of(N)
    n_heads, survivor = model.spec.n_heads, 2
    others = ", ".join(f"1.{head}" for head in range(n_heads) if head != survivor)
    plain = model.trace(ids, keep=hl.keep.tensors("result"))
    result = plain.of_head("result", hl.Head(1, survivor))
    bias = model.weights.output_projection(1).bias
    written: list[Tensor] = []
    projection = model.weights.output_projection(1)
    handle = projection.register_forward_hook(lambda m, a, output: written.append(output.clone()))
    for site in ("z", "result", "v", "pattern"):
        written.clear()
        with model.edit(hl.ablate(others, site=site)):
            kept = model.trace(ids, keep=hl.keep.tensors("result"))
        assert_close(kept.of_head("result", hl.Head(1, survivor)), result, 1e-5)
        for head in range(n_heads):
            if head != survivor:
                assert float(kept.of_head("result", hl.Head(1, head)).abs().max()) < 1e-5
        if site != "result":  # an edit of results comes after the projection
            assert_close(written[-1], result if bias is None else result + bias, 2e-5)
    handle.remove()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_heads_left_alone_keep_their_bits(lab: Lab, family: str) -> None:
    model, ids = lab(family), ids_of(N)
    plain = model.trace(ids, keep=hl.keep.tensors("z"))
    for site in ("z", "q", "result"):
        with model.edit(hl.scale("1.1", site, by=0.3)):
            kept = model.trace(ids, keep=hl.keep.tensors("z"))
        for head in range(model.spec.n_heads):
            mine = kept.of_head("z", hl.Head(1, head))
            before = plain.of_head("z", hl.Head(1, head))
            if head != 1:
                assert torch.equal(mine, before), f"{site}, head {head}"


@pytest.mark.parametrize("site", ["k", "v"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gpt_bigcode", "gpt2"])
def test_editing_a_query_heads_keys_leaves_the_rest_of_its_group_alone(
    lab: Lab, family: str, site: str
) -> None:
    model, ids = lab(family), ids_of(N)
    plain = model.trace(ids, keep=hl.keep.tensors("z"))

    def z_under(edit: Any) -> Any:
        with model.edit(edit):
            return model.trace(ids, keep=hl.keep.tensors("z"))

    same = z_under(hl.apply("1.1", lambda x, where: x, site))
    edited = z_under(hl.scale("1.1", site, by=0.3))
    for head in range(model.spec.n_heads):
        mine = edited.of_head("z", hl.Head(1, head))
        if head == 1:
            assert float((mine - plain.of_head("z", hl.Head(1, head))).abs().max()) > 1e-3
        else:
            assert torch.equal(mine, same.of_head("z", hl.Head(1, head))), f"head {head}"
            assert_close(mine, plain.of_head("z", hl.Head(1, head)), 1e-5)


@pytest.mark.parametrize("site", ["k", "v"])
def test_what_is_captured_of_edited_keys_is_each_query_heads_own(lab: Lab, site: str) -> None:
    """Under grouped queries an edit gives heads of one group different keys."""
    model, ids = lab("llama"), ids_of(N)
    plain = model.trace(ids, keep=hl.keep.tensors(site))
    with model.edit(hl.scale("1.1, 1.4", site, by=0.3)):
        kept = model.trace(ids, keep=hl.keep.tensors(site))
        some = model.trace(ids, keep=hl.keep.tensors(site, heads="1.4, 1.5"))
    for head in range(6):
        factor = 0.3 if head in (1, 4) else 1.0
        expected = plain.of_head(site, hl.Head(1, head)) * factor
        assert_close(kept.of_head(site, hl.Head(1, head)), expected, 1e-5, what=f"head {head}")
        if head in (4, 5):
            assert_close(some.of_head(site, hl.Head(1, head)), expected, 1e-5, what=f"{head}")
    again = model.trace(ids, keep=hl.keep.tensors(site))
    assert torch.equal(again.tensor(site), plain.tensor(site))


def test_what_is_captured_under_edits_is_what_the_edits_made(lab: Lab, hand: Lab) -> None:
    model, ids = lab("llama"), ids_of(N)
    with model.edit(hl.scale("1.*", by=2.0)):
        twice = model.trace(ids, keep=hl.keep.tensors("z", "result"))
    plain = model.trace(ids, keep=hl.keep.tensors("z", "result"))
    for name in ("z", "result"):
        assert_close(twice.tensor(name, layer=1), 2 * plain.tensor(name, layer=1), 1e-5)
    with model.edit(hl.ablate("1.*", site="scores")):
        kept = model.trace(ids, keep=[hl.keep.rows(), hl.keep.statistics("entropy", "argmax")])
        some = model.trace(
            ids, keep=[hl.keep.rows(queries=[5]), hl.keep.statistics("entropy", queries=[5])]
        )
    even = torch.ones(N, N).tril() / torch.arange(1, N + 1)[:, None]
    assert_close(kept.rows[:, 1], even.expand(2, 6, -1, -1), 1e-6)
    entropy = torch.log(torch.arange(1.0, N + 1))
    assert_close(kept.statistic("entropy")[:, 1], entropy.expand(2, 6, -1), 1e-5)
    assert bool((kept.statistic("argmax")[:, 1] == 0).all())
    assert_close(some.rows[:, 1, :, 0], even[5].expand(2, 6, -1), 1e-6)
    assert_close(some.statistic("entropy")[:, 1, :, 0], entropy[5].expand(2, 6), 1e-5)
    assert_close(kept.rows[:, 0], hand("llama").values("pattern", ids)[0], 1e-5)
    with model.edit(hl.scale("1.2", "result", by=3.0)):
        thrice = model.trace(ids, keep=hl.keep.tensors("result"))
    assert_close(
        thrice.of_head("result", hl.Head(1, 2)), 3 * plain.of_head("result", hl.Head(1, 2)), 1e-5
    )


# -- composition -----------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["z", "k", "result", "scores"])
def test_edits_apply_in_the_order_given(lab: Lab, hand: Lab, site: str) -> None:
    model, ids = lab("llama"), ids_of(N)
    first, second = hl.scale(HEADS, site, by=0.5), hl.add(HEADS, torch.tensor(0.4), site)
    third = hl.scale("1.0", site, by=1.5)
    rows = site == "scores"

    def change(x: Tensor, layer: int, head: int) -> Tensor:
        return x * 0.5 + 0.4

    def reverse(x: Tensor, layer: int, head: int) -> Tensor:
        return (x + 0.4) * 0.5

    forth = hand("llama").logits(ids, **{site: rewrite(change, rows=rows)})
    back = hand("llama").logits(ids, **{site: rewrite(reverse, rows=rows)})
    with model.edit(first, second):
        check(model.logits(ids), forth, ids)
    with model.edit(second, first):
        check(model.logits(ids), back, ids)
    with model.edit(first), model.edit(second):
        check(model.logits(ids), forth, ids)
    with model.edit(second):
        with model.edit(first):
            check(model.logits(ids), back, ids)
        with model.edit(third):
            nested = model.logits(ids)
    with model.edit(second, third):
        assert torch.equal(model.logits(ids), nested)


def test_edits_at_every_site_compose(lab: Lab, hand: Lab) -> None:
    model, ids = lab("gpt_oss"), ragged((N, N - 4))
    factors = {
        "q": 0.5,
        "k": 1.5,
        "v": -0.7,
        "scores": 0.6,
        "pattern": 0.8,
        "z": 1.3,
        "result": 0.9,
    }
    heads = {"q": "0.0", "k": "0.4", "v": "*.1", "scores": "1.*", "pattern": "*.2", "z": "1.3",
             "result": "*.5"}  # fmt: skip
    of = {
        "q": {0: (0,)}, "k": {0: (4,)}, "v": {0: (1,), 1: (1,)}, "scores": {1: tuple(range(6))},
        "pattern": {0: (2,), 1: (2,)}, "z": {1: (3,)}, "result": {0: (5,), 1: (5,)},
    }  # fmt: skip
    edits = [hl.scale(heads[site], site, by=by) for site, by in factors.items()]
    rewrites = {
        site: rewrite(lambda x, *_, by=by: x * by, of[site], rows=site in ROWS)
        for site, by in factors.items()
    }
    expected = hand("gpt_oss").logits(ids, **rewrites)
    with model.edit(*edits):
        check(model.logits(ids), expected, ids)


def test_an_ablations_reference_is_taken_from_the_unedited_model(lab: Lab) -> None:
    model, ids, reference = lab("llama"), ids_of(N), ids_of(7, seed=4)
    edit = hl.ablate("1.0", "mean", reference=reference)
    with model.edit(hl.scale("0.*", by=0.1)), model.edit(edit):
        nested = model.logits(ids)
    with model.edit(hl.scale("0.*", by=0.1), edit):
        assert torch.equal(model.logits(ids), nested)
    kept = model.trace(reference, keep=hl.keep.tensors("z"))
    mean = kept.of_head("z", hl.Head(1, 0)).flatten(0, 1).mean(0)
    with model.edit(hl.scale("0.*", by=0.1), hl.replace("1.0", mean)):
        assert_close(model.logits(ids), nested, 1e-6)


def test_edits_carry_gradients(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of(N)
    value = torch.zeros(10, requires_grad=True)
    with model.edit(hl.add("1.2", value, positions=[-1])):
        loss = model.logits(ids, grad=True)[:, -1, 5].sum()
        (slope,) = torch.autograd.grad(loss, value)
    for at in (0, 7):
        step = torch.zeros(10)
        step[at] = 1e-2
        with model.edit(hl.add("1.2", step, positions=[-1])):
            up = model.logits(ids)[:, -1, 5].sum()
        with model.edit(hl.add("1.2", -step, positions=[-1])):
            down = model.logits(ids)[:, -1, 5].sum()
        assert float(slope[at]) == pytest.approx(float(up - down) / 2e-2, rel=2e-2, abs=1e-3)


# -- generation ------------------------------------------------------------------------------------


def greedy_by_hand(
    runner: Hand, ids: Tensor, new: int, rewrites: Callable[[int], dict[str, Any]]
) -> list[int]:
    """Edited greedy decoding of one prompt, one whole forward pass per token."""
    ids = ids[ids >= 0][None]
    start = ids.shape[1]
    for _ in range(new):
        logits = runner.logits(ids, **rewrites(start))[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        if int(ids[0, -1]) == EOS:
            break
    return ids[0, start:].tolist()


@pytest.mark.parametrize("site", [*VECTORS, *ROWS])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2"])
def test_edits_hold_at_every_step_of_a_generation(
    lab: Lab, hand: Lab, family: str, site: str
) -> None:
    model, runner, rows = lab(family), hand(family), site in ROWS
    ids = ragged((4, 8))
    plain = model.generate(ids, max_new_tokens=10).ids.tolist()
    changed = 0
    for by, positions in ((-1.5 if site != "scores" else 8.0, None), (3.0, (-1, 1, 9))):

        def rewrites(start: int, by: float = by, positions: Any = positions) -> dict[str, Any]:
            def change(x: Tensor, layer: int, head: int) -> Tensor:
                at = range(x.shape[1])
                if positions is not None:
                    wanted = {p if p >= 0 else start + p for p in positions}
                    at = [p for p in at if p in wanted]
                mask = torch.zeros(x.shape[1], 1, dtype=torch.bool)
                mask[list(at)] = True
                return torch.where(mask, x * by, x)

            return {site: rewrite(change, rows=rows)}

        expected = [greedy_by_hand(runner, row, 10, rewrites) for row in ids]
        expected = padded(expected, max(len(row) for row in expected))
        with model.edit(hl.scale(HEADS, site, by=by, positions=positions)):
            got = model.generate(ids, max_new_tokens=10).ids.tolist()
            kept = model.generate(ids, max_new_tokens=10, keep=hl.keep.statistics("entropy"))
        assert got == expected
        assert kept.ids.tolist() == expected
        changed += got != plain
    assert changed


def test_values_captured_from_an_edited_generation_equal_an_edited_forward_pass(lab: Lab) -> None:
    model, ids = lab("mistral"), ids_of(6)
    reference = ids_of(9, seed=4)
    edits = [
        hl.ablate("0.1", "mean", reference=reference),
        hl.scale("0.3", "k", by=0.5),
        hl.add("1.2", torch.tensor(0.3), "scores", positions=[-1, 7]),
        hl.scale("1.4", "pattern", by=0.5),
    ]
    plan = [hl.keep.rows(), hl.keep.tensors("z"), hl.keep.statistics("entropy", "received")]
    with model.edit(*edits):
        generated = model.generate(ids, max_new_tokens=8, keep=plan, eos_token_id=None)
    edits[2] = hl.add("1.2", torch.tensor(0.3), "scores", positions=[5, 7])
    with model.edit(*edits):
        whole = model.trace(torch.cat([ids, generated.ids], 1)[:, :-1], keep=plan)
    assert_close(generated.trace.rows, whole.rows, TOLERANCE)
    assert_close(generated.trace.tensor("z"), whole.tensor("z"), TOLERANCE)
    for name in whole.statistics:
        assert_close(generated.trace.statistic(name), whole.statistic(name), TOLERANCE)


# -- encoder-decoder models ------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [None, (-1, 2)])
@pytest.mark.parametrize("site", [*VECTORS, "scores", "pattern"])
@pytest.mark.parametrize("family", ENCODER_DECODER)
def test_edits_of_each_stack_equal_a_hand_edited_forward_pass(
    lab: Lab, hand: Lab, family: str, site: str, positions: tuple[int, ...] | None
) -> None:
    """Positions are of the edited side: keys and values of cross-attention are the encoder's."""
    model, lengths, decoder_lengths = lab(family), (N, N - 4), (5, 8)
    ids, decoder = ragged(lengths), ragged(decoder_lengths, 1)
    plain = model.logits(ids, decoder=decoder)
    for at, layer in enumerate(model.spec.layers):
        encoder_side = layer.stack == "encoder" or (layer.stack == "cross" and site in ("k", "v"))
        where = resolved(positions, lengths if encoder_side else decoder_lengths)
        change = rewrite(lambda x, *_: x * 0.3, {at: (1,)}, rows=site in ROWS, at=where)
        expected = hand(family).logits(ids, decoder, **{site: change})
        with model.edit(hl.scale(f"{at}.1", site, by=0.3, positions=positions)):
            got = model.logits(ids, decoder=decoder)
        real = decoder >= 0
        assert_close(got[real], expected[real], TOLERANCE, what=f"layer {at}, {layer.stack}")
        assert float((got - plain)[real].abs().max()) > 1e-5


@pytest.mark.parametrize("family", ENCODER_DECODER)
def test_mean_ablation_of_each_stack_takes_the_references_own_positions(
    lab: Lab, hand: Lab, family: str
) -> None:
    model, ids, decoder = lab(family), ids_of(N), ids_of(6, seed=1)
    reference = ragged((9, 5), seed=4)
    start = model.module.config.decoder_start_token_id
    values: dict[int, Tensor] = {}

    def look(x: Tensor, layer: int) -> Tensor:
        values[layer] = x.clone()
        return x

    hand(family).logits(reference, torch.full((2, 1), start), z=look)
    for at, layer in enumerate(model.spec.layers):
        value = values[at][:, :, 1]
        mean = (value[reference >= 0] if layer.stack == "encoder" else value.flatten(0, 1)).mean(0)
        change = rewrite(lambda x, *_, mean=mean: mean.expand_as(x), {at: (1,)})
        expected = hand(family).logits(ids, decoder, z=change)
        with model.edit(hl.ablate(f"{at}.1", "mean", reference=reference)):
            got = model.logits(ids, decoder=decoder)
        assert_close(got, expected, TOLERANCE, what=f"layer {at}, {layer.stack}")


@pytest.mark.parametrize("positions", [None, (0, 2)])
@pytest.mark.parametrize("site", ["z", "k", "scores"])
@pytest.mark.parametrize("family", ENCODER_DECODER)
def test_edits_hold_while_an_encoder_decoder_model_generates(
    lab: Lab, hand: Lab, family: str, site: str, positions: tuple[int, ...] | None
) -> None:
    """Positions of the decoder's layers count its start token and the new tokens."""
    model, ids, rows = lab(family), ids_of(N), site in ROWS
    decoder = torch.full((2, 1), model.module.config.decoder_start_token_id)
    by = -1.5 if site != "scores" else 0.2
    every = {at: (1,) for at in range(model.spec.n_layers)}

    def change(x: Tensor, layer: int) -> Tensor:
        n = x.shape[2 if rows else 1]
        at = None if positions is None else [[p for p in positions if p < n]] * 2
        return rewrite(lambda x, *_: x * by, every, rows=rows, at=at)(x, layer)

    for _ in range(5):
        logits = hand(family).logits(ids, decoder, **{site: change})[:, -1]
        decoder = torch.cat([decoder, logits.argmax(-1, keepdim=True)], 1)
    with model.edit(hl.scale("*.1", site, by=by, positions=positions)):
        got = model.generate(ids, max_new_tokens=5, eos_token_id=None, forced_eos_token_id=None).ids
    assert got.tolist() == decoder[:, 1:].tolist()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: hl.scale("0.0", site="zz"),
        lambda: hl.ablate("0.0", "median"),
        lambda: hl.ablate("0.0", "mean"),
        lambda: hl.ablate("0.0", "resample"),
        lambda: hl.ablate("0.0", "resample", site="pattern"),
        lambda: hl.patch("0.0", "scores", source=None),
    ],
)
def test_edits_that_make_no_sense_are_refused_when_written(make: Callable[[], Any]) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_edits_that_do_not_fit_the_model_are_refused_at_the_door(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of(N)
    before = model.logits(ids)
    source = model.trace(ids, keep=hl.keep.tensors("z", heads="0.0"))
    bad = [
        hl.ablate("7.0"),
        hl.patch("0.0", "q", source=source),
        hl.patch("0.1", source=source),
        hl.patch("1.0", source=source),
        hl.ablate("0.0", "resample", site="scores", reference=ids),
        hl.ablate("0.0", "mean", reference=""),
    ]
    for edit in bad:
        with pytest.raises(HeadlabError) as caught, model.edit(edit):
            pass
        assert "\n" not in str(caught.value)
    with pytest.raises(HeadError, match="L7H0"), model.edit(hl.scale("0.0", by=2.0), bad[0]):
        pass
    assert torch.equal(model.logits(ids), before)


def test_negative_positions_of_a_bare_forward_pass_are_refused(lab: Lab) -> None:
    """The model itself may be called under an edit, but it does not tell where prompts end."""
    model, ids = lab("llama"), ids_of(N)
    with model.edit(hl.ablate("0.*", positions=[-1])), pytest.raises(PlanError), torch.no_grad():
        model.module(input_ids=ids)
    with model.edit(hl.ablate("0.*", positions=[2])), torch.no_grad():
        bare = model.module(input_ids=ids).logits
    with model.edit(hl.ablate("0.*", positions=[2])):
        assert torch.equal(model.logits(ids), bare)
