"""The seam: the one function through which a model's attention passes while headlab looks on.

Hugging Face models choose their attention function by name from ``transformers.AttentionInterface``. headlab
registers its own there and, while a seam is open, points the model's configuration at it. Closing the seam puts
every configuration value and hook back, whatever happened in between. With no seam open, nothing of headlab is
in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from headlab.errors import UnsupportedError
from headlab.kernels import AttentionInputs, Request, attend
from headlab.models.spec import ModelSpec

_NAME = "headlab"


@dataclass
class _Forward:
    """Where the current forward pass stands in its sequences.

    Its layers share each tensor of positions: they are the same, and what is worked out of them can be kept.
    """

    past: int = 0
    left: Tensor | None = None
    batch: int = 1
    _known: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def positions(
        self, batch: int, start: int, n: int, left: Tensor | None, device: torch.device
    ) -> Tensor:
        """Positions of ``n`` rows or columns from place ``start`` on, [batch, n]; negative in left padding."""
        key = (batch, start, n, left is None, device)
        if key not in self._known:
            index = torch.arange(start, start + n, device=device)
            shift = torch.zeros(batch, dtype=torch.long, device=device)
            self._known[key] = index - (shift if left is None else left.to(device))[:, None]
        return self._known[key]


@dataclass(frozen=True)
class Call:
    """One attention call of one layer.

    Attributes:
        layer: Which layer of the model called.
        inputs: What the engines take.
        native: z by the model's own SDPA path, [batch, query, head, d_value], for given q, k, v and mask; None
            where that path does not serve this call (soft cap, sink logits).
        forward: The forward pass it belongs to.
    """

    layer: int
    inputs: AttentionInputs
    native: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None
    forward: _Forward

    def z(self, inputs: AttentionInputs) -> Tensor:
        """z [batch, query, head, d_value] the fastest way that is exact."""
        if self.native is not None and inputs.k.shape[1] == self.inputs.k.shape[1]:
            own = self.inputs.position_bias
            if inputs.position_bias is own:
                return self.native(inputs.q, inputs.k, inputs.v, inputs.mask)
            # A mask that differs by head is as large as a pattern, but for a single query.
            if inputs.n_queries == 1 and own is None and inputs.position_bias is not None:
                mask = _masked(inputs.position_bias, inputs.mask).to(inputs.q.dtype)
                return self.native(inputs.q, inputs.k, inputs.v, mask)
        z = attend(inputs, Request()).z
        assert z is not None
        return z.transpose(1, 2)

    @property
    def query_positions(self) -> Tensor:
        """Position of every query row in its own sequence, [batch, query]; negative in left padding."""
        return self._positions(self.inputs.q, self.inputs.query_start)

    @property
    def key_positions(self) -> Tensor:
        """Position of every key column in its own sequence, [batch, key]; negative in left padding."""
        return self._positions(self.inputs.k, self.inputs.key_start)

    def _positions(self, x: Tensor, start: int) -> Tensor:
        return self.forward.positions(len(x), start, x.shape[2], self.inputs.left, x.device)


def _masked(bias: Tensor, mask: Tensor | None) -> Tensor:
    """A bias and a mask as one additive mask."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
    return bias + mask


#: Returns z [batch, query, head, d_value].
Handler = Callable[[Call], Tensor]


@dataclass(frozen=True)
class RawCall:
    """What reaches the seam before anything is known about the model: for measuring it."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    keywords: dict[str, Any]


class Seam:
    """Opens and closes the seam of one model.

    Args:
        module: The model.
        layers: Its attention modules in forward order, as measured by :func:`headlab.attention.probe.measure`.
        spec: What is known about them.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module], spec: ModelSpec) -> None:
        self._module = module
        self._layers = layers
        self._spec = spec
        self._depth = 0
        self._forward = _Forward()

    @contextmanager
    def open(
        self, handler: Handler, needs: Callable[[int], bool] = lambda layer: True
    ) -> Iterator[None]:
        """Send attention calls to ``handler``; an inner ``open`` shares the handler of the outer one.

        Args:
            handler: Returns z.
            needs: Whether a layer's calls need the handler, asked at each call; the model serves the others itself.
        """
        if self._depth:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            return
        self._depth = 1
        before = {layer: _ROUTES[layer] for layer in self._layers if layer in _ROUTES}
        hook = self._module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        try:
            with _implementation(self._module) as own:
                for index, layer in enumerate(self._layers):
                    _ROUTES[layer] = partial(self._call, handler, needs, own, index)
                yield
        finally:
            hook.remove()
            for layer in self._layers:
                _ROUTES.pop(layer, None)
            _ROUTES.update(
                before
            )  # of another wrapper of the same model, still open around this one
            self._depth = 0
            self._forward = _Forward()

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # The cache's keyword was renamed in transformers 5.24; the object is the same.
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        past = int(cache.get_seq_length()) if cache is not None else 0
        mask = kwargs.get("decoder_attention_mask" if self._has_cross else "attention_mask")
        left = None
        if isinstance(mask, Tensor) and mask.dim() == 2:
            left = (mask.cumsum(-1) == 0).sum(-1)
            left = left if bool(left.any()) else None
        given = [*args, *(kwargs.get(name) for name in ("input_ids", "inputs_embeds"))]
        batch = next((len(x) for x in given if isinstance(x, Tensor)), 1)
        self._forward = _Forward(past, left, batch)

    def rows(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream at a layer as [batch, position, d_model], and the position of each row in its sequence,
        [batch, position]; of the encoder's where the layer is one of its."""
        x = x.reshape(self._forward.batch, -1, x.shape[-1])
        forward, (batch, n) = self._forward, x.shape[:2]
        if self._spec.layers[layer].stack == "encoder":
            return x, forward.positions(batch, 0, n, None, x.device)
        return x, forward.positions(batch, forward.past, n, forward.left, x.device)

    @property
    def _has_cross(self) -> bool:
        return any(layer.stack == "cross" for layer in self._spec.layers)

    def _call(
        self,
        handler: Handler,
        needs: Callable[[int], bool],
        own: str,
        layer: int,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        is_causal: bool | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        if dropout:
            raise UnsupportedError(
                "the model is in training mode, and attention dropout cannot be captured; call .eval() on it"
            )
        fast = own != "eager" and softcap is None and s_aux is None
        extra = {} if position_bias is None else {"position_bias": position_bias}

        def native(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return _SDPA(
                module, q, k, v, mask, scaling=scaling, is_causal=is_causal, **extra, **rest
            )[0]

        if fast and not needs(layer):
            return native(query, key, value, mask), None
        stack = self._spec.layers[layer].stack
        n_query, n_key = query.shape[2], key.shape[2]
        past = 0 if stack == "encoder" else self._forward.past
        if stack == "decoder" and n_key > past + n_query:
            raise UnsupportedError(
                "a cache of fixed size holds keys that do not exist yet; "
                "generate without cache_implementation='static'"
            )
        causal = _is_causal(module, is_causal, mask, n_query)
        inputs = AttentionInputs(
            query,
            key,
            value,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            mask=mask,
            causal=causal,
            # A mask already holds the window; without a mask it hides what `causal` leaves of it.
            window=sliding_window if causal else None,
            softcap=softcap,
            sinks=s_aux,
            position_bias=position_bias,
            query_start=past,
            key_start=past + n_query - n_key if stack == "decoder" else 0,
            left=self._forward.left if stack == "decoder" else None,
        )
        z = handler(Call(layer, inputs, native if fast else None, self._forward))
        return z.contiguous(), None


_SDPA: Callable[..., tuple[Tensor, None]] = AttentionInterface()["sdpa"]
_ROUTES: WeakKeyDictionary[nn.Module, Callable[..., tuple[Tensor, None]]] = WeakKeyDictionary()
_RECORD: list[RawCall] | None = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """What transformers calls. A module without a route belongs to a model that shares a configuration."""
    if _RECORD is not None:
        causal = _is_causal(module, keywords.get("is_causal"), attention_mask, query.shape[2])
        causal = causal or _hides_future(attention_mask)
        _RECORD.append(RawCall(module, query, key, value, causal, keywords))
        z = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        return z, None
    route = _ROUTES.get(module, _SDPA)
    return route(module, query, key, value, attention_mask, **keywords)


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


def _is_causal(
    module: nn.Module, is_causal: bool | None, mask: Tensor | None, n_query: int
) -> bool:
    """transformers' rule: without a mask the module decides, and a single query sees every key."""
    own = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return bool(own) and mask is None and n_query > 1


def _hides_future(mask: Tensor | None) -> bool:
    if mask is None or mask.shape[-1] != mask.shape[-2]:
        return False
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return not bool(visible.triu(1).any())


@contextmanager
def record() -> Iterator[list[RawCall]]:
    """Note every attention call instead of computing it; used to measure a model."""
    global _RECORD
    _RECORD = []
    try:
        yield _RECORD
    finally:
        _RECORD = None


@contextmanager
def _implementation(module: nn.Module) -> Iterator[str]:
    """Point the model and its parts at headlab's attention function; yields the implementation it had."""
    configs: dict[int, Any] = {
        id(part.config): part.config for part in module.modules() if hasattr(part, "config")
    }
    kept = [
        (config, config._attn_implementation)
        for config in configs.values()
        if hasattr(config, "_attn_implementation")
    ]
    if not kept:
        raise UnsupportedError(
            f"{type(module).__name__} has no Hugging Face configuration, so its attention cannot be routed"
        )
    try:
        for config, _ in kept:
            config._attn_implementation_internal = _NAME
        yield kept[0][1] or "sdpa"
    finally:
        for config, name in kept:
            config._attn_implementation_internal = name


@contextmanager
def routed(module: nn.Module) -> Iterator[None]:
    """The model pointed at headlab's attention function, without routes."""
    with _implementation(module):
        yield


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Dropout off for a while; every part gets its own mode back."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def expand_groups(inputs: AttentionInputs) -> AttentionInputs:
    """The same call with one key/value head per query head, so that query heads can be edited apart."""
    if inputs.group == 1:
        return inputs
    return replace(
        inputs,
        k=inputs.k.repeat_interleave(inputs.group, 1),
        v=inputs.v.repeat_interleave(inputs.group, 1),
    )
