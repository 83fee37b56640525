"""One model's edits and capture, joined into the handler that the seam calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headlab.attention.collector import Collector
from headlab.attention.edits import BoundEdit
from headlab.attention.seam import Call, Seam, evaluating, expand_groups
from headlab.kernels import ENGINES, AttentionInputs, Request, RowEdit
from headlab.models import HeadWeights
from headlab.models.spec import ModelSpec


class Session:
    """Runs a model with the edits that are in force and the capture that is under way."""

    def __init__(
        self, module: nn.Module, layers: Sequence[nn.Module], spec: ModelSpec, weights: HeadWeights
    ) -> None:
        self._module = module
        self._seam = Seam(module, layers, spec)
        self._spec = spec
        self._weights = weights
        self._edits: tuple[BoundEdit, ...] = ()
        self._collector: Collector | None = None
        self._lengths: Tensor | None = None
        self._encoder_lengths: Tensor | None = None
        self._results: dict[int, Any] = {}
        self._positions: dict[int, Tensor] = {}

    @property
    def edited(self) -> bool:
        """Whether any edit is in force."""
        return bool(self._edits)

    @contextmanager
    def editing(self, edits: Sequence[BoundEdit]) -> Iterator[None]:
        """Put edits in force; they come after those already in force."""
        with self._changed(edits=(*self._edits, *edits)), self._seam.open(self._attend):
            yield

    @contextmanager
    def running(
        self,
        lengths: Tensor,
        collector: Collector | None = None,
        encoder_lengths: Tensor | None = None,
    ) -> Iterator[None]:
        """Run prompts of these lengths, capturing what the collector's plan names.

        Without edits and capture the seam stays closed, and the model runs exactly as it came, dropout off.
        """
        changes = {"lengths": lengths, "collector": collector, "encoder_lengths": encoder_lengths}
        with self._changed(**changes), evaluating(self._module):
            if collector is None:
                yield
            else:
                with self._seam.open(self._attend):
                    yield

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Lift all edits for a while, as when the values of an ablation are gathered."""
        with self._changed(edits=()):
            yield

    @contextmanager
    def _changed(self, **changes: Any) -> Iterator[None]:
        before = {name: getattr(self, f"_{name}") for name in changes}
        try:
            for name, value in changes.items():
                setattr(self, f"_{name}", value)
            self._hook_results()
            yield
        finally:
            for name, value in before.items():
                setattr(self, f"_{name}", value)
            self._hook_results()

    def _hook_results(self) -> None:
        """``result`` lies behind W_O, outside the seam: hook the projections of the layers that need it, only."""
        needed = {
            layer
            for layer in range(self._spec.n_layers)
            if self._at(layer, "result")
            or (self._collector is not None and self._collector.wants("result", layer))
        }
        for layer in self._results.keys() - needed:
            self._results.pop(layer).remove()
        for layer in needed - self._results.keys():
            projection = self._weights.output_projection(layer)
            self._results[layer] = projection.register_forward_hook(self._on_projection(layer))

    def _at(self, layer: int, site: str) -> list[BoundEdit]:
        return [edit for edit in self._edits if edit.site == site and layer in edit.heads]

    def _prompt_lengths(self, layer: int, site: str) -> Tensor | None:
        """Lengths that positions of a site count in: keys of cross-attention are the encoder's."""
        stack = self._spec.layers[layer].stack
        if stack == "encoder" or (stack == "cross" and site in ("k", "v")):
            return self._lengths if self._encoder_lengths is None else self._encoder_lengths
        return self._lengths

    # -- inside the model ------------------------------------------------------------------------------------

    def _attend(self, call: Call) -> Tensor:
        layer, collector = call.layer, self._collector
        inputs = self._edited_inputs(call)
        edit_scores = self._row_edit(call, "scores")
        edit_pattern = self._row_edit(call, "pattern")
        if collector is not None:
            for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
                collector.take(name, layer, x.transpose(1, 2), inputs)
        z = None
        if collector is not None:
            z = collector.attend(call, inputs, edit_scores, edit_pattern)
        if z is None and (edit_scores or edit_pattern):
            request = Request(edit_scores=edit_scores, edit_pattern=edit_pattern)
            mixed = ENGINES["blockwise"](inputs, request).z
            assert mixed is not None
            z = mixed.transpose(1, 2)
        if z is None:
            z = call.z(inputs)
        for edit in self._at(layer, "z"):
            lengths = self._prompt_lengths(layer, "z")
            z = edit.on_vectors(z, layer, call.query_positions, lengths)
        if collector is not None:
            collector.take("z", layer, z)
        if layer in self._results:
            self._positions[layer] = call.query_positions
        return z

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
                    x = edit.on_vectors(x, layer, positions, self._prompt_lengths(layer, site))
                changed[site] = x.transpose(1, 2)
        return replace(inputs, **changed) if changed else inputs

    def _row_edit(self, call: Call, site: str) -> RowEdit | None:
        edits = self._at(call.layer, site)
        if not edits:
            return None

        def edit_rows(rows: Tensor, query_index: Tensor) -> Tensor:
            positions = call.query_positions.gather(1, query_index)
            for edit in edits:
                lengths = self._prompt_lengths(call.layer, site)
                rows = edit.on_rows(rows, call.layer, positions, lengths)
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
                for edit in edits:
                    lengths = self._prompt_lengths(layer, "result")
                    result = edit.on_vectors(result, layer, self._positions[layer], lengths)
                # Only the difference is added, so that heads left alone keep their bits.
                output = output + (result - before).sum(2)
            if self._collector is not None:
                self._collector.take("result", layer, result)
            return output

        return hook
