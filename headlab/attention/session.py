"""One model's edits and capture, joined into the handler that the seam calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headlab.attention.collector import Collector
from headlab.attention.edits import BoundEdit, Where
from headlab.attention.keep import STREAM
from headlab.attention.seam import Call, Seam, evaluating, expand_groups
from headlab.errors import PlanError
from headlab.kernels import AttentionInputs, Request, RowEdit, attend
from headlab.models import Blocks, HeadWeights
from headlab.models.blocks import stream_of
from headlab.models.spec import ModelSpec

_GUARD = threading.Lock()


class Session:
    """Runs a model with the edits that are in force and the capture that is under way."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        spec: ModelSpec,
        weights: HeadWeights,
        blocks: Blocks,
    ) -> None:
        self._module = module
        self._seam = Seam(module, layers, spec)
        self._spec = spec
        self._weights = weights
        self._blocks = blocks
        self._edits: tuple[BoundEdit, ...] = ()
        self._collector: Collector | None = None
        self._lengths: Tensor | None = None
        self._encoder_lengths: Tensor | None = None
        self._ids: Tensor | None = None
        self._encoder_ids: Tensor | None = None
        self._hooks: dict[tuple[int, str], Any] = {}
        self._owner, self._depth = 0, 0
        self._positions: dict[int, Tensor] = {}

    @property
    def edits(self) -> tuple[BoundEdit, ...]:
        """The edits in force."""
        return self._edits

    @property
    def ids(self) -> Tensor | None:
        """Token ids of the prompts being run, −1 beyond their ends; None between runs or where a part is run."""
        return self._ids

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads off the model: what one thread edits and captures would reach into the other's run.

        Raises:
            PlanError: Another thread is at it.
        """
        me = threading.get_ident()
        with _GUARD:
            if self._depth and self._owner != me:
                raise PlanError(
                    f"another thread is running or editing {self._spec.name}; use one thread at a time, or load the "
                    "model once for each"
                )
            self._owner, self._depth = me, self._depth + 1
        try:
            yield
        finally:
            with _GUARD:
                self._depth -= 1

    @contextmanager
    def editing(self, edits: Sequence[BoundEdit]) -> Iterator[None]:
        """Put edits in force; they come after those already in force."""
        with (
            self._changed(edits=(*self._edits, *edits)),
            self._seam.open(self._attend, self._needs),
        ):
            yield

    @contextmanager
    def running(
        self,
        lengths: Tensor,
        collector: Collector | None = None,
        encoder_lengths: Tensor | None = None,
        ids: Tensor | None = None,
        encoder_ids: Tensor | None = None,
    ) -> Iterator[None]:
        """Run prompts of these lengths (and ids, where at hand), capturing what the collector's plan names.

        Without edits and capture the seam stays closed, and the model runs exactly as it came, dropout off.
        """
        changes = {
            "lengths": lengths,
            "collector": collector,
            "encoder_lengths": encoder_lengths,
            "ids": ids,
            "encoder_ids": encoder_ids,
        }
        with self._changed(**changes), evaluating(self._module):
            if collector is None:
                yield
            else:
                with self._seam.open(self._attend, self._needs):
                    yield

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Lift all edits and capture for a while, as when the values of an ablation are gathered."""
        with self._changed(edits=(), collector=None):
            yield

    @contextmanager
    def _changed(self, **changes: Any) -> Iterator[None]:
        with self.alone():
            before = {name: getattr(self, f"_{name}") for name in changes}
            try:
                for name, value in changes.items():
                    setattr(self, f"_{name}", value)
                self._hook_outside()
                yield
            finally:
                for name, value in before.items():
                    setattr(self, f"_{name}", value)
                self._hook_outside()

    def _hook_outside(self) -> None:
        """``result`` and the residual stream lie outside the seam: hook the modules of the layers that need it."""
        needed = {
            (layer, site)
            for layer in range(self._spec.n_layers)
            for site in ("result", *STREAM)
            if self._at(layer, site)
            or (self._collector is not None and self._collector.wants(site, layer))
        }
        for place in self._hooks.keys() - needed:
            self._hooks.pop(place).remove()
        for place in needed - self._hooks.keys():
            self._hooks[place] = self._hook(*place)

    def _hook(self, layer: int, site: str) -> Any:
        block = self._blocks.modules[self._blocks.of_layer(layer)]
        if site == "result":
            projection = self._weights.output_projection(layer)
            return projection.register_forward_hook(self._on_projection(layer))
        if site == "resid_pre":
            return block.register_forward_pre_hook(self._on_block(layer), with_kwargs=True)
        if site == "resid_post":
            return block.register_forward_hook(self._on_stream(layer, site))
        outputs = {"attn_out": self._blocks.attention_output, "mlp_out": self._blocks.mlp_output}
        return outputs[site](layer).register_forward_hook(self._on_stream(layer, site))

    def _needs(self, layer: int) -> bool:
        """Whether anything happens inside a layer's attention; positions of ``result`` are noted there."""
        return self._collector is not None or any(
            layer in edit.heads and edit.site not in STREAM for edit in self._edits
        )

    def _at(self, layer: int, site: str) -> list[BoundEdit]:
        return [edit for edit in self._edits if edit.site == site and layer in edit.heads]

    def _where(
        self,
        layer: int,
        site: str,
        positions: Tensor,
        keys: Tensor | None = None,
        first_key: int = 0,
    ) -> Where:
        """What edits at a site are told, but for their heads. Keys of cross-attention are the encoder's."""
        stack = self._spec.layers[layer].stack
        lengths, ids = self._lengths, self._ids
        if stack == "encoder" or (stack == "cross" and site in ("k", "v")):
            lengths = self._lengths if self._encoder_lengths is None else self._encoder_lengths
        if stack in ("encoder", "cross") and self._encoder_ids is not None:
            ids = self._encoder_ids
        return Where(
            layer, (), positions, first_key=first_key, lengths=lengths, keys=keys, prompt=ids
        )

    # -- inside the model ------------------------------------------------------------------------------------

    def _attend(self, call: Call) -> Tensor:
        layer, collector = call.layer, self._collector
        inputs = self._edited_inputs(call)
        edit_scores = self._row_edit(call, "scores")
        edit_pattern = self._row_edit(call, "pattern")
        if collector is not None:
            inputs = self._taken(collector, layer, inputs)
        z = None
        if collector is not None:
            z = collector.attend(call, inputs, edit_scores, edit_pattern)
        if z is None and (edit_scores or edit_pattern):
            request = Request(edit_scores=edit_scores, edit_pattern=edit_pattern)
            mixed = attend(inputs, request).z
            assert mixed is not None
            z = mixed.transpose(1, 2)
        if z is None:
            z = call.z(inputs)
        for edit in self._at(layer, "z"):
            z = edit.on_vectors(z, self._where(layer, "z", call.query_positions))
        if collector is not None:
            collector.take("z", layer, z)
        if (layer, "result") in self._hooks:
            self._positions[layer] = call.query_positions
        return z

    @staticmethod
    def _taken(collector: Collector, layer: int, inputs: AttentionInputs) -> AttentionInputs:
        """The inputs, kept where wanted; what is kept is what is used, so that gradients reach it."""
        kept: dict[str, Any] = {}
        for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
            if collector.wants(name, layer):
                by_position = x.transpose(1, 2)
                collector.take(name, layer, by_position, inputs)
                kept[name] = by_position.transpose(1, 2)
        return replace(inputs, **kept) if kept else inputs

    def _edited_inputs(self, call: Call) -> AttentionInputs:
        inputs, layer = call.inputs, call.layer
        if self._at(layer, "k") or self._at(layer, "v"):
            inputs = expand_groups(inputs)
        changed = {}
        for site, positions in (
            ("q", call.query_positions),
            ("k", call.key_positions),
            ("v", call.key_positions),
        ):
            edits = self._at(layer, site)
            if edits:
                x = getattr(inputs, site).transpose(1, 2)
                for edit in edits:
                    x = edit.on_vectors(x, self._where(layer, site, positions))
                changed[site] = x.transpose(1, 2)
        if self._at(layer, "bias"):
            changed["position_bias"] = self._bias(call)
        return replace(inputs, **changed) if changed else inputs

    def _bias(self, call: Call) -> Tensor:
        """What is added to the scores, [batch, head, query, key]: the model's own bias and that of the edits."""
        q, own = call.inputs.q, call.inputs.position_bias
        exact = q.dtype if q.dtype == torch.float64 else torch.float32
        bias = torch.zeros(len(q), q.shape[1], 1, call.inputs.n_keys, dtype=exact, device=q.device)
        where = self._where(
            call.layer, "bias", call.query_positions, call.key_positions, call.inputs.key_start
        )
        for edit in self._at(call.layer, "bias"):
            bias = edit.on_bias(bias, where)
        bias = bias if own is None else bias + own
        return bias.expand(-1, -1, call.inputs.n_queries, -1)

    def _row_edit(self, call: Call, site: str) -> RowEdit | None:
        edits = self._at(call.layer, site)
        if not edits:
            return None

        def edit_rows(rows: Tensor, query_index: Tensor) -> Tensor:
            positions = call.query_positions.gather(1, query_index)
            where = self._where(
                call.layer, site, positions, call.key_positions, call.inputs.key_start
            )
            for edit in edits:
                rows = edit.on_rows(rows, where)
            return rows

        return edit_rows

    def _on_projection(self, layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            spec = self._spec.layers[layer]
            z = args[0].reshape(*output.shape[:-1], spec.n_heads, spec.d_value)
            edits = self._at(layer, "result")
            wanted = self._collector is not None and self._collector.wants("result", layer)
            if not edits and not wanted:
                return output
            result = torch.einsum("bphd,hdm->bphm", z, self._weights.W_O(layer).to(z))
            if edits:
                before = result
                where = self._where(layer, "result", self._positions[layer])
                for edit in edits:
                    result = edit.on_vectors(result, where)
                # Only the difference is added, so that heads left alone keep their bits.
                output = output + (result - before).sum(2)
            if self._collector is not None:
                self._collector.take("result", layer, result)
            return output

        return hook

    def _on_block(self, layer: int) -> Any:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if args:
                return (self._stream(layer, "resid_pre", args[0]), *args[1:]), kwargs
            stream = self._stream(layer, "resid_pre", kwargs["hidden_states"])
            return args, kwargs | {"hidden_states": stream}

        return hook

    def _on_stream(self, layer: int, site: str) -> Any:
        factor = self._blocks.residual_multiplier if site in ("attn_out", "mlp_out") else 1.0

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            x = stream_of(output)
            new = self._stream(layer, site, x if factor == 1 else x * factor)
            new = new if factor == 1 else new / factor
            return (new, *output[1:]) if isinstance(output, tuple) else new

        return hook

    def _stream(self, layer: int, site: str, x: Tensor) -> Tensor:
        """The residual stream at a site, edited and kept."""
        rows, positions = self._seam.rows(layer, x)
        values = rows.unsqueeze(2)
        where = self._where(layer, site, positions)
        for edit in self._at(layer, site):
            values = edit.on_vectors(values, where)
        if self._collector is not None:
            self._collector.take(site, layer, values)
        return values.reshape(x.shape)
