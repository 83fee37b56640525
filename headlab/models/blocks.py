"""Where the residual stream passes: a model's blocks, and what attention and MLP add to the stream in each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from headlab.errors import UnsupportedError
from headlab.models import families
from headlab.models.spec import ModelSpec


class Blocks:
    """The blocks of a model, in the order they run.

    Args:
        module: The model.
        attention_modules: Its attention modules, one per layer of *spec*.
        spec: Its measured shapes.

    Attributes:
        paths: Dotted path of each block.
        modules: The blocks.
    """

    def __init__(
        self, module: PreTrainedModel, attention_modules: Sequence[nn.Module], spec: ModelSpec
    ) -> None:
        self._spec = spec
        self._config = module.config.get_text_config(decoder=True)
        self._attention = tuple(attention_modules)
        per_layer = [_block_path(layer.name) for layer in spec.layers]
        self.paths = tuple(dict.fromkeys(per_layer))
        self.modules = tuple(module.get_submodule(path) for path in self.paths)
        self._of_layer = tuple(self.paths.index(path) for path in per_layer)

    def of_layer(self, layer: int) -> int:
        """The block that holds a layer; in a decoder with cross-attention, two layers share one."""
        return self._of_layer[layer]

    @property
    def residual_multiplier(self) -> float:
        """Factor on what attention and MLP give before it is added to the stream (Granite), else 1."""
        return float(getattr(self._config, families.RESIDUAL_MULTIPLIER, None) or 1.0)

    def attention_norm(self, layer: int) -> nn.Module | None:
        """The norm between attention and stream (Gemma 2 and 3, OLMo 2, GLM-4), or None."""
        self._checked(layer, "attn_out")
        return self._post_norms(layer)[0]

    def mlp_norm(self, layer: int) -> nn.Module | None:
        """The norm between MLP and stream, or None."""
        self._checked(layer, "mlp_out")
        return self._post_norms(layer)[1]

    def attention_output(self, layer: int) -> nn.Module:
        """The module whose output, times :attr:`residual_multiplier`, attention adds to the stream.

        Raises:
            UnsupportedError: Attention's output is not simply added to the stream of this model.
        """
        return self.attention_norm(layer) or self._attention[layer]

    def mlp_output(self, layer: int) -> nn.Module:
        """The module whose output, times :attr:`residual_multiplier`, the MLP adds to the stream.

        Raises:
            UnsupportedError: The model has no such module under a known name.
        """
        norm = self.mlp_norm(layer)
        block = self.modules[self.of_layer(layer)]
        for name in families.MLP_OUTPUTS:
            part = getattr(block, name, None)
            if isinstance(part, nn.Module):
                return norm or part
        parts = ", ".join(name for name, _ in block.named_children())
        raise UnsupportedError(
            f"headlab does not know which part of a block of {self._spec.name} ({parts}) is its MLP"
        )

    def _post_norms(self, layer: int) -> tuple[nn.Module | None, nn.Module | None]:
        block = self.modules[self.of_layer(layer)]
        for attention, mlp in families.POST_NORMS:
            found = getattr(block, attention, None), getattr(block, mlp, None)
            if all(isinstance(part, nn.Module) for part in found):
                return found
        return None, None

    def _checked(self, layer: int, site: str) -> None:
        if self._spec.layers[layer].stack != "decoder" or any(
            facts.stack == "cross" for facts in self._spec.layers
        ):
            raise UnsupportedError(
                f"there is no {site} in {self._spec.name} ({self._spec.family}): only in decoder-only models does "
                "the stream take what attention and MLP give as it is"
            )


def stream_of(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The residual stream in what a block, or a part of one, gives."""
    return output[0] if isinstance(output, tuple) else output


def _block_path(path: str) -> str:
    """Path of the block an attention module lies in: up to the first number, its place in the stack."""
    parts = path.split(".")
    numbered = [at for at, part in enumerate(parts) if part.isdigit()]
    if not numbered:
        raise UnsupportedError(f"{path} lies in no numbered block")
    return ".".join(parts[: numbered[0] + 1])
