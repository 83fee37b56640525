"""What is read from the weights runs nothing above the first MLP, and touches neither model nor random state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from relation_models import words
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab import parameters
from headlab.parameters import Circuits

READS: dict[str, Callable[[hl.Model, Circuits], Any]] = {
    "maps": lambda model, made: parameters.maps(model, [words()]),
    "salient_operations": lambda model, made: parameters.salient_operations(model, "0.1, 1.2"),
    "copying": lambda model, made: parameters.copying(model, n_null=20),
    "eigenvalue_copying": lambda model, made: parameters.eigenvalue_copying(model),
    "composition": lambda model, made: parameters.composition(made, draws=20),
    "singular_vectors": lambda model, made: parameters.singular_vectors(made, "1.2", draws=20),
    "virtual_ov": lambda model, made: parameters.virtual_ov(made, "0.1", "1.2"),
    "virtual_qk": lambda model, made: parameters.virtual_qk(made, "1.2", k_from="0.1"),
    "channel": lambda model, made: parameters.channel(made, "0.1", "1.2", "K"),
    "circuits": lambda model, made: (made.ov(1), made.qk(1, 0), made.ov_bias(1)),
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", READS)
def test_no_later_block_runs(name: str, family: str) -> None:
    model = hl.load(build(family), tokenizer=tiny_tokenizer())
    made = parameters.circuits(model)

    def refuse(module: Any, args: Any) -> None:
        raise AssertionError("a block above the first ran")

    handle = model.blocks.modules[1].register_forward_pre_hook(refuse)
    weights = {key: value.clone() for key, value in model.module.state_dict().items()}
    state = torch.random.get_rng_state()
    READS[name](model, made)
    assert torch.equal(torch.random.get_rng_state(), state)
    for key, value in model.module.state_dict().items():
        assert torch.equal(value, weights[key])
    with pytest.raises(AssertionError, match="above the first ran"):
        model.logits([[5, 6]])  # the guard does guard
    handle.remove()
    model.logits([[5, 6]])


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_embeddings(tied: bool) -> None:
    """A tied unembedding is read as the embedding's transpose, an untied one as itself."""
    module = build("llama", tie_word_embeddings=tied)
    model = hl.load(module, tokenizer=tiny_tokenizer())
    W_E, W_U = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    assert torch.equal(W_E, W_U) == tied
    relation = words()
    ids = [int(source[1:]) for source, _ in relation.pairs]
    targets = [int(target[1:]) for _, target in relation.pairs]
    found = parameters.maps(model, [relation], suppression=False)
    weights = model.weights
    with torch.no_grad():
        for head in range(6):
            written = (
                W_E[ids].double()
                @ weights.W_V(0)[head // 3].double()
                @ weights.W_O(0)[head].double()
            )
            logits = written @ W_U.double().T
            ranks = (logits > logits[range(len(ids)), targets][:, None]).sum(1)
            expected = float((ranks < 10).double().mean())
            row = found.of((0, head)).iloc[0]
            assert row["score"] == pytest.approx(expected)
