"""The parts of a decoder-only model, each run on a residual stream of one's own making.

Exact edge-level runs and path patching need what no forward pass gives: one head's query from one stream and its
value from another, an MLP on a stream its block never saw. Here a block is called by itself, with the arguments its
model gave it, and is stopped, or has its attention replaced, at the seam; so norms, rotations, biases, experts and
parallel blocks are the model's own code in every architecture.

Everything runs on the positions from ``start`` on: before the first position where two runs differ, causal attention
leaves them the same, and keys and values of that prefix come from the run of ``ids``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from headlab.attention.seam import Call, Seam, evaluating, expand_groups
from headlab.causal.paths.agreement import agree, check_decoder, close
from headlab.errors import PlanError, UnsupportedError
from headlab.kernels import AttentionInputs, Request, attend
from headlab.models.blocks import stream_of

if TYPE_CHECKING:
    from headlab.model import Model

#: Rewrites q, k and v of one layer; k and v have one head per query head.
InputsEdit = Callable[[AttentionInputs], AttentionInputs]


class _Reached(Exception):
    """Stops a block at the seam."""


@dataclass
class Run:
    """What one run left behind, per layer, at the positions from ``start`` on.

    Attributes:
        pre: Residual stream before each block, and last, after the last one, [prompt, position, d_model].
        attention: What each attention module gave, before any norm or multiplier, [prompt, position, d_model].
        attn_out: What attention added to the stream.
        mlp_out: What the MLP added to the stream.
        k, v: Keys and values of **every** position, [prompt, kv_head, position, width].
        z: [prompt, position, head, d_value].
        logits: As asked for: [prompt, 1, vocab], or [prompt, position, vocab] of every position.
    """

    pre: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)
    attn_out: dict[int, Tensor] = field(default_factory=dict)
    mlp_out: dict[int, Tensor] = field(default_factory=dict)
    k: dict[int, Tensor] = field(default_factory=dict)
    v: dict[int, Tensor] = field(default_factory=dict)
    z: dict[int, Tensor] = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


class Parts:
    """A model cut into parts, for prompts of one length.

    Use it inside ``with parts.open():``. A *row* is one stream; ``prompts`` names the prompt of each.

    Args:
        model: The model.
        ids: Token ids of the run that gives keys and values before ``start``, [prompt, position].
        start: First position to run; all are run where the model cannot run some of them by themselves (Llama 4).
        all_logits: Whether logits of every position are wanted, not only of the last.

    Raises:
        UnsupportedError: The model is no decoder-only model, or its parts do not add up to it.
        PlanError: Edits are in force on the model.
    """

    def __init__(
        self,
        model: Model,
        ids: Int[Tensor, "prompt position"],
        start: int = 0,
        all_logits: bool = False,
    ) -> None:
        check_decoder(model)
        self.model = model
        self.ids = ids
        self.start = start
        self.all_logits = all_logits
        self.n_layers = model.spec.n_layers
        self.factor = model.blocks.residual_multiplier
        self._blocks = [
            model.blocks.modules[model.blocks.of_layer(layer)] for layer in range(self.n_layers)
        ]
        self._attention = model.weights.attention_modules
        self._seam = Seam(model.module, self._attention, model.spec)
        self._handler: Callable[[Call], Tensor] = _plain
        self._arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._given: list[int] = []  # entries of each attention module's output tuple; 0: a tensor
        with self.open():
            self._record()
            self.base = self.capture(ids)
            if start and not self._suffix_holds():
                # Llama 4 asks its cache which positions it stands at, and the blocks run without one.
                self.start = 0
                self._record()
                self.base = self.capture(ids)
            self._check()

    @contextmanager
    def open(self) -> Iterator[Parts]:
        """Route the model's attention through here until the block ends.

        Raises:
            PlanError: Edits are in force on the model, or another thread runs it.
        """
        if self.model.edited:
            raise PlanError(
                "edits are in force on the model; leave the model.edit block before patching paths or edges"
            )
        with (
            self.model.alone(),
            torch.no_grad(),
            evaluating(self.model.module),
            self._seam.open(lambda call: self._handler(call)),
        ):
            yield self

    # -- whole runs --------------------------------------------------------------------------------------------------

    def capture(self, ids: Int[Tensor, "prompt position"]) -> Run:
        """Run the model as it is, and keep what its parts gave."""
        run, start = Run(), self.start

        def keep(call: Call) -> Tensor:
            run.k[call.layer], run.v[call.layer] = call.inputs.k, call.inputs.v
            z = call.z(call.inputs)
            run.z[call.layer] = z[:, start:]
            return z

        with ExitStack() as stack:
            stack.callback(setattr, self, "_handler", self._handler)
            self._handler = keep
            for layer, block in enumerate(self._blocks):

                def before(module: nn.Module, args: Any, kwargs: Any, layer: int = layer) -> None:
                    run.pre[layer] = _stream(args, kwargs)[:, start:]

                def after(module: nn.Module, args: Any, output: Any, layer: int = layer) -> None:
                    run.pre[layer + 1] = stream_of(output)[:, start:]

                handles = [
                    block.register_forward_pre_hook(before, with_kwargs=True),
                    block.register_forward_hook(after),
                    *self._hooks(layer, run, ids.shape, start),
                ]
                for handle in handles:
                    stack.callback(handle.remove)
            run.logits = self._run_model(ids)
        return run

    def _run_model(self, ids: Tensor) -> Tensor:
        """Logits of the last position, or of all."""
        arguments: dict[str, Any] = {"input_ids": ids}
        if hasattr(self.model.module.config, "use_cache"):
            arguments["use_cache"] = False
        logits: Tensor = self.model.module(**arguments).logits
        return logits if self.all_logits else logits[:, -1:]

    def _hooks(self, layer: int, run: Run, shape: Any, start: int = 0) -> list[Any]:
        """Hooks that keep what attention and MLP of a layer give."""
        blocks = self.model.blocks

        def into(kept: dict[int, Tensor], factor: float) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                x = stream_of(output)
                x = x.reshape(*shape[:2], x.shape[-1])[:, start:]
                kept[layer] = x if factor == 1 else x * factor

            return hook

        return [
            self._attention[layer].register_forward_hook(into(run.attention, 1.0)),
            blocks.attention_output(layer).register_forward_hook(into(run.attn_out, self.factor)),
            blocks.mlp_output(layer).register_forward_hook(into(run.mlp_out, self.factor)),
        ]

    def _record(self) -> None:
        """Note the arguments each block gets for positions from ``start`` on.

        One prompt is enough: what depends on the position alone is broadcast over rows. A cache is what makes the
        model name positions and masks of a suffix; the blocks are called without it.
        """
        cache = DynamicCache() if self.start else None
        first = self.ids[:1]
        self._arguments, self._given = [], []
        with ExitStack() as stack:
            if cache is not None:
                self._with_cache(first[:, : self.start], cache)
            for block, attention in zip(self._blocks, self._attention, strict=True):

                def before(module: nn.Module, args: Any, kwargs: Any) -> None:
                    rest = tuple(_without(cache, value) for value in args[1:])
                    named = {name: _without(cache, value) for name, value in kwargs.items()}
                    self._arguments.append((rest, named))

                def after(module: nn.Module, args: Any, output: Any) -> None:
                    self._given.append(len(output) if isinstance(output, tuple) else 0)

                stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(attention.register_forward_hook(after).remove)
            if cache is None:
                self._run_model(first)
            else:
                self._with_cache(first[:, self.start :], cache)

    def _with_cache(self, ids: Tensor, cache: DynamicCache) -> None:
        # What the module calls its cache was renamed in transformers 5.24.
        named = "cache" in signature(self.model.module.forward).parameters
        cached = {"cache" if named else "past_key_values": cache, "use_cache": True}
        self.model.module(input_ids=ids, **cached)

    def _suffix_holds(self) -> bool:
        """Whether attention at the positions from ``start`` on gives what it gives in a whole run."""
        base, one = self.base, torch.zeros(1, dtype=torch.long, device=self.ids.device)
        return all(
            agree(mixed(self.inputs(layer, base.pre[layer][:1], one)), base.z[layer][:1])
            for layer in range(self.n_layers)
        )

    def _check(self) -> None:
        """Hold the parts to the model itself."""
        base, name = self.base, self.model.name
        every = torch.arange(len(self.ids), device=self.ids.device)
        ours = self.logits(base.pre[self.n_layers], every)
        close(ours, base.logits, name, "final norm and unembedding")
        for layer in range(self.n_layers):
            heads = self.results(layer, base.z[layer]).sum(2)
            bias = self.model.weights.b_O(layer)
            heads = heads if bias is None else heads + bias.to(heads)
            close(heads, base.attention[layer], name, f"results of the heads of layer {layer}")
            added = base.pre[layer] + base.attn_out[layer] + base.mlp_out[layer]
            close(added, base.pre[layer + 1], name, f"attention and MLP of layer {layer}")

    def results(
        self, layer: int, z: Float[Tensor, "*row head d_value"]
    ) -> Float[Tensor, "*row head d_model"]:
        """What each head gives to its attention module's output."""
        output = self.model.weights.W_O(layer).to(z)
        parts = [z[..., head, :] @ output[head] for head in range(len(output))]
        return torch.stack(parts, -2)

    # -- parts -------------------------------------------------------------------------------------------------------

    def call(self, layer: int, x: Tensor) -> Any:
        """One block on a stream [row, position, d_model]."""
        rest, named = self._arguments[layer]
        if "hidden_states" in named:
            return self._blocks[layer](*rest, **(named | {"hidden_states": x}))
        return self._blocks[layer](x, *rest, **named)

    def inputs(
        self, layer: int, x: Float[Tensor, "row position d_model"], prompts: Int[Tensor, " row"]
    ) -> AttentionInputs:
        """The attention call that a stream before a block leads to, prefix included."""
        found: list[AttentionInputs] = []

        def stop(call: Call) -> Tensor:
            found.append(self._with_prefix(call, prompts))
            raise _Reached

        try:
            with self._handled(stop):
                self.call(layer, x)
        except _Reached:
            return found[0]
        raise UnsupportedError(
            f"layer {layer} of {self.model.name} ran without passing the seam, so its heads cannot be reached"
        )

    def block(
        self,
        layer: int,
        x: Float[Tensor, "row position d_model"],
        prompts: Int[Tensor, " row"],
        edit: InputsEdit | None = None,
        mlp_out: Float[Tensor, "row position d_model"] | None = None,
    ) -> Float[Tensor, "row position d_model"]:
        """The stream after a block, with q, k and v edited on the way, or with what its MLP adds replaced."""

        def attend(call: Call) -> Tensor:
            inputs = self._with_prefix(call, prompts)
            return mixed(inputs if edit is None else edit(expand_groups(inputs)))

        def replaced(module: nn.Module, args: Any, output: Any) -> Any:
            assert mlp_out is not None
            old = stream_of(output)
            new = (mlp_out / self.factor).to(old).reshape(old.shape)
            return (new, *output[1:]) if isinstance(output, tuple) else new

        with ExitStack() as stack:
            stack.enter_context(self._handled(attend))
            if mlp_out is not None:
                module = self.model.blocks.mlp_output(layer)
                stack.callback(module.register_forward_hook(replaced).remove)
            return stream_of(self.call(layer, x)).reshape(x.shape)

    def added(
        self,
        layer: int,
        x: Float[Tensor, "row position d_model"],
        attention: Float[Tensor, "row position d_model"] | None = None,
    ) -> tuple[Float[Tensor, "row position d_model"], Float[Tensor, "row position d_model"]]:
        """What attention and MLP add to a stream x before a block whose attention module gives ``attention``.

        No position looks at another, so x may hold any positions. Without ``attention`` the module gives 0, and a
        block without norms behind attention runs its MLP on x itself.
        """
        module, width = self._attention[layer], self._given[layer]
        given = torch.zeros_like(x) if attention is None else attention.to(x)
        output = (given, *[None] * (width - 1)) if width else given
        own = module.__dict__.get("forward")  # accelerate's hooks put one there
        run = Run()
        handles = self._hooks(layer, run, x.shape)
        try:
            module.forward = lambda *args, **kwargs: output  # put back below
            self.call(layer, x)
        finally:
            for handle in handles:
                handle.remove()
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own
        return run.attn_out[layer], run.mlp_out[layer]

    def logits(
        self, x: Float[Tensor, "row position d_model"], prompts: Int[Tensor, " row"]
    ) -> Float[Tensor, "row position vocab"]:
        """Logits of a stream after the last block: of its last position, or of every position of the prompt."""
        weights = self.model.weights
        x = x if self.all_logits else x[:, -1:]
        if weights.final_norm is not None:
            x = weights.final_norm(x)
        logits: Tensor = self.model.module.get_output_embeddings()(x)
        if weights.logit_scale != 1:
            logits = logits * weights.logit_scale
        if weights.logit_softcap is not None:
            logits = weights.logit_softcap * torch.tanh(logits / weights.logit_softcap)
        if self.all_logits and self.start:
            logits = torch.cat([self.base.logits[prompts, : self.start], logits], 1)
        return logits

    @cached_property
    def parallel(self) -> bool:
        """Whether a block's MLP reads the stream before its attention (GPT-NeoX, GPT-J, Phi) and not after it."""
        base = self.base

        def error(x: Tensor) -> float:
            return float((self.added(0, x)[1] - base.mlp_out[0]).abs().max())

        return error(base.pre[0]) < error(base.pre[0] + base.attn_out[0])

    @contextmanager
    def _handled(self, handler: Callable[[Call], Tensor]) -> Iterator[None]:
        before, self._handler = self._handler, handler
        try:
            yield
        finally:
            self._handler = before

    def _with_prefix(self, call: Call, prompts: Tensor) -> AttentionInputs:
        inputs, layer, start = call.inputs, call.layer, self.start
        k, v = inputs.k, inputs.v
        if start:
            k = torch.cat([self.base.k[layer][prompts, :, :start].to(k), k], 2)
            v = torch.cat([self.base.v[layer][prompts, :, :start].to(v), v], 2)
        return replace(inputs, k=k, v=v, causal=True, query_start=start, key_start=0)


def mixed(inputs: AttentionInputs) -> Float[Tensor, "row position head d_value"]:
    """z of an attention call."""
    z = attend(inputs, Request()).z
    assert z is not None
    return z.transpose(1, 2)


def _plain(call: Call) -> Tensor:
    return call.z(call.inputs)


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    stream: Tensor = args[0] if args else kwargs["hidden_states"]
    return stream


def _without(cache: object | None, value: Any) -> Any:
    return None if cache is not None and value is cache else value
