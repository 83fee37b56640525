"""What stands for a token, against the model's own parts called by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import build
from torch import Tensor

import headlab as hl
from headlab import planted
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.parameters.embeddings import doubt, embed

IDS = torch.tensor([5, 11, 40])


def by_hand(family: str, module: Any) -> Tensor:
    """MLP_0 of the normed embedding, through the family's own modules."""
    x = module.get_input_embeddings().weight[IDS].detach()
    match family:
        case "gpt2":
            block = module.transformer.h[0]
            return block.mlp(block.ln_2(x))
        case "gpt_neox":
            block = module.gpt_neox.layers[0]
            return block.mlp(block.post_attention_layernorm(x))
        case "gptj":
            block = module.transformer.h[0]  # parallel, with one norm
            return block.mlp(block.ln_1(x))
        case "opt":
            block = module.model.decoder.layers[0]
            return block.fc2(block.activation_fn(block.fc1(block.final_layer_norm(x))))
        case "gemma2":
            block = module.model.layers[0]
            inside = block.mlp(block.pre_feedforward_layernorm(x * 36**0.5))
            return block.post_feedforward_layernorm(inside)
        case "mixtral":
            block = module.model.layers[0]
            return block.mlp(block.post_attention_layernorm(x)[:, None])[:, 0]
        case _:
            block = module.model.layers[0]
            return block.mlp(block.post_attention_layernorm(x))


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gpt_neox", "gptj", "opt", "gemma2", "mixtral", "qwen3", "phi3"]
)
def test_later_layers_are_read_with_what_the_first_mlp_makes_of_a_token(family: str) -> None:
    module = build(family)
    model = hl.load(module)
    ours = embed(model, 1, IDS)
    with torch.no_grad():
        theirs = by_hand(family, module)
    assert theirs.std() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_kinds() -> None:
    model = hl.load(build("llama"))
    raw = model.weights.W_E[IDS]
    assert torch.equal(embed(model, 0, IDS), raw)
    assert torch.equal(embed(model, 1, IDS, "raw"), raw)
    torch.testing.assert_close(embed(model, 0, IDS, "mlp"), embed(model, 1, IDS))
    assert embed(model, 1).shape == (97, 36)
    torch.testing.assert_close(embed(model, 1)[IDS], embed(model, 1, IDS))
    assert embed(model, 1, IDS[:0]).shape == (0, 36)


def test_the_model_is_as_it_was_also_after_a_failure() -> None:
    module = build("gpt2")
    model = hl.load(module)
    before = model.logits([[5, 6, 7]])
    embed(model, 1, IDS)
    with pytest.raises(PromptError, match="token 97 does not exist"):
        embed(model, 1, torch.tensor([97]))
    with pytest.raises(PlanError, match="must be 'auto', 'raw' or 'mlp'"):
        embed(model, 1, IDS, "first")  # type: ignore[arg-type]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert torch.equal(model.logits([[5, 6, 7]]), before)


def test_doubt_is_said_where_the_first_mlp_writes_next_to_nothing() -> None:
    for family in ("llama", "gpt2"):
        model = hl.load(planted.model(family=family))
        assert "embedding='raw'" in doubt(model)
        assert doubt(model, "raw") == ""
        assert doubt(hl.load(build(family))) == ""
    assert doubt(hl.load(build("bert"))) == ""


def test_models_without_an_mlp_to_read_say_so() -> None:
    with pytest.raises(UnsupportedError, match="only in decoder-only models"):
        embed(hl.load(build("bert")), 1, IDS)
