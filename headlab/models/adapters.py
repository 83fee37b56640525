"""Models that other toolkits hold, recognised without importing those toolkits.

* nnsight wraps a Hugging Face module and leaves it as it is: the module inside is used directly.
* TransformerLens 4 rewrites the Hugging Face module in place: attention is re-implemented, outside
  ``transformers.AttentionInterface``. A plain model is built beside it, which shares its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headlab.errors import ModelError
from headlab.models.quiet import quiet_transformers

#: What TransformerLens inserts into the path of every parameter it wraps.
_WRAPPED = "._original_component"


@dataclass(frozen=True)
class Unwrapped:
    """The Hugging Face module inside another toolkit's model.

    Attributes:
        module: The plain module.
        tokenizer: The toolkit's tokenizer, or None.
        source: Where it came from, in words.
    """

    module: PreTrainedModel
    tokenizer: Any
    source: str


def unwrap(model: Any) -> Unwrapped | None:
    """The plain Hugging Face module of a TransformerLens or nnsight model; None for anything else.

    Raises:
        ModelError: The toolkit's model holds no usable Hugging Face module.
    """
    if _defined_in(model, "nnsight"):
        return _from_nnsight(model)
    if _defined_in(model, "transformer_lens"):
        return _from_transformer_lens(model)
    if isinstance(model, PreTrainedModel) and is_rewritten(model):
        return Unwrapped(_rebuild(model), None, "a model rewritten by TransformerLens")
    return None


def is_rewritten(module: nn.Module) -> bool:
    """Whether TransformerLens has replaced parts of this module."""
    return any(_defined_in(part, "transformer_lens") for part in module.modules())


def _defined_in(thing: Any, package: str) -> bool:
    return any(base.__module__.partition(".")[0] == package for base in type(thing).__mro__)


def _from_nnsight(model: Any) -> Unwrapped:
    module = getattr(model, "_module", None)
    if not isinstance(module, PreTrainedModel):
        raise ModelError(
            f"the nnsight {type(model).__name__} does not wrap a transformers model but a "
            f"{type(module).__name__}; pass the model itself"
        )
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ModelError(
            f"the nnsight {type(model).__name__} has not loaded its weights yet; call its "
            "dispatch() first, or create it with dispatch=True"
        )
    return Unwrapped(module, getattr(model, "tokenizer", None), "an nnsight model")


def _from_transformer_lens(model: Any) -> Unwrapped:
    kind = type(model).__name__
    module = getattr(model, "original_model", None)
    if not isinstance(module, PreTrainedModel):
        raise ModelError(
            f"the TransformerLens {kind} holds no transformers model; pass the name or the "
            "transformers model it was made from"
        )
    # Folding norms or centring changes the weights, so what is inside is no longer the model.
    if getattr(model, "compatibility_mode", False) or getattr(model, "_weights_processed", False):
        raise ModelError(
            f"the TransformerLens {kind} has processed its weights (compatibility mode), so the "
            "original model is gone; pass the name or the transformers model it was made from"
        )
    tokenizer = getattr(model, "tokenizer", None)
    return Unwrapped(_rebuild(module), tokenizer, "a TransformerLens model")


def _rebuild(rewritten: PreTrainedModel) -> PreTrainedModel:
    """A plain model of the same class and configuration that shares the rewritten one's tensors."""
    kind = type(rewritten).__name__
    if len({parameter.device for parameter in rewritten.parameters()}) > 1:
        raise ModelError(
            f"this {kind}, rewritten by TransformerLens, is spread over several devices; "
            "pass its name and device_map='auto' instead"
        )
    # A configuration read back from its own dictionary forgets the attention implementation that
    # TransformerLens set, so that the class chooses its default again.
    config = type(rewritten.config).from_dict(rewritten.config.to_dict())
    held = {
        name.replace(_WRAPPED, ""): tensor
        for name, tensor in rewritten.state_dict(keep_vars=True).items()
    }
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        plain = type(rewritten)(config)
    wanted = plain.state_dict()
    if missing := [name for name in wanted if name not in held]:
        raise ModelError(
            f"TransformerLens has rewritten this {kind} so that {missing[0]} cannot be found; "
            "pass the name or an untouched transformers model"
        )
    plain.load_state_dict({name: held[name] for name in wanted}, assign=True)
    plain.tie_weights()
    return plain.to(rewritten.device).eval()
