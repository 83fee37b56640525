"""The model a user holds: it joins loading and weights with capture and interventions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headlab.attention.assembly import assemble
from headlab.attention.collector import Collector
from headlab.attention.edits import BoundEdit, Edit, bind
from headlab.attention.keep import Keep, is_whole
from headlab.attention.probe import measure
from headlab.attention.session import Session
from headlab.attention.streaming import CHUNK, stream
from headlab.attention.trace import Trace
from headlab.errors import PlanError, PromptError, UnsupportedError
from headlab.models import Blocks, HeadWeights, ModelSpec, open_model
from headlab.prompts import Prompt, Prompts, aligned, lengths_of


def load(
    what: Any,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: Any = None,
) -> Model:
    """Load a model.

    Args:
        what: ``"smollm2-135m"`` (the embedded default), a hub id, a local folder, a GGUF file, a live Hugging Face
            model, an nnsight model, or anything with ``module`` and ``tokenizer`` attributes, such as a planted model.
        dtype: ``"auto"`` computes in float32 on the CPU and in the checkpoint's own type elsewhere.
        device: ``"auto"`` takes an accelerator where there is one.
        device_map: Spreads a large model over devices, as in transformers.
        revision: Hub revision.
        trust_remote_code: Whether code from the hub may run.
        tokenizer: Tokenizer of a live model.

    Raises:
        ModelError: The model cannot be found or loaded.
        UnsupportedError: Its attention does not pass through the seam.
    """
    if not isinstance(what, nn.Module) and hasattr(what, "module") and hasattr(what, "tokenizer"):
        what, tokenizer = what.module, tokenizer or what.tokenizer
    opened = open_model(
        what,
        dtype=dtype,
        device=device,
        device_map=device_map,
        revision=revision,
        trust_remote_code=trust_remote_code,
        tokenizer=tokenizer,
    )
    return Model(opened.module, opened.tokenizer, opened.name, opened.fingerprint)


@dataclass(frozen=True)
class Generation:
    """Generated continuations.

    Attributes:
        ids: New token ids, [batch, position]; −1 after a prompt's end-of-sequence token.
        texts: The continuations as text.
        trace: What was captured, with generated tokens among its positions, or None.
    """

    ids: Int[Tensor, "batch position"]
    texts: tuple[str, ...]
    trace: Trace | None

    def __str__(self) -> str:
        return "\n".join(self.texts)


class Model:
    """A model whose heads can be captured and edited.

    Attributes:
        module: The Hugging Face model, unchanged.
        tokenizer: Its tokenizer, or None.
        name: What it was loaded by.
        fingerprint: Identifies the weights.
        spec: Its attention layers.
        weights: Per-head views of W_Q, W_K, W_V, W_O, and W_E and W_U.
        blocks: Where the residual stream passes.
    """

    def __init__(
        self, module: Any, tokenizer: Any = None, name: str = "model", fingerprint: str = ""
    ) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self.name = name
        self.fingerprint = fingerprint
        self.spec: ModelSpec
        self.spec, self._layers = measure(module, name)
        self.weights = HeadWeights(module, self._layers, self.spec)
        self._prompts = Prompts(tokenizer, self.spec)
        self.blocks = Blocks(module, self._layers, self.spec)
        self._session = Session(module, self._layers, self.spec, self.weights, self.blocks)

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.module.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.module.dtype

    @property
    def bos(self) -> int | None:
        """Token that begins a sequence, where the model has one."""
        for token in (
            getattr(self.tokenizer, "bos_token_id", None),
            getattr(self.tokenizer, "cls_token_id", None),
            getattr(self.module.config, "bos_token_id", None),
        ):
            if token is not None:
                return int(token)
        return None

    def __repr__(self) -> str:
        spec = self.spec
        groups = "" if spec.n_kv_heads == spec.n_heads else f" ({spec.n_kv_heads} key/value heads)"
        return (
            f"Model {self.name}: {spec.family}, {spec.n_layers} layers × {spec.n_heads} heads{groups}, "
            f"d_head {spec.d_head}, {str(self.dtype).removeprefix('torch.')} on {self.device}"
        )

    # -- tokens ----------------------------------------------------------------------------------------------

    def tokens(self, prompt: Prompt, limit: int | None = None) -> Int[Tensor, "batch position"]:
        """Token ids of one or more prompts; −1 beyond the end of shorter ones.

        Args:
            prompt: The prompts.
            limit: Keep only this many tokens of each.

        Raises:
            PromptError: A prompt is empty, is longer than the model's context, or holds ids that do not exist.
        """
        return self._prompts.encode(prompt, limit).to(self.device)

    def text(self, ids: Tensor | Sequence[int], *, special: bool = True) -> str:
        """Text of token ids, with or without special tokens; −1 is left out."""
        return self._prompts.decode(ids, special=special)

    def token_texts(self, ids: Tensor) -> tuple[tuple[str, ...], ...]:
        """Each token as text, per prompt; the ids themselves where there is no tokenizer."""
        return self._prompts.token_texts(ids)

    # -- running ---------------------------------------------------------------------------------------------

    def trace(
        self,
        prompt: Prompt,
        keep: Sequence[Keep] | Keep = (),
        *,
        decoder: Prompt | None = None,
        logits: Literal["all", "last", "none"] = "all",
        grad: bool = False,
    ) -> Trace:
        """Run the model on prompts and capture what the plan names.

        Args:
            prompt: One or more prompts.
            keep: What to capture; see :mod:`headlab.attention.keep`.
            decoder: The decoder's side of the prompts, for encoder-decoder models; by default its start token.
            logits: Which logits to compute and keep.
            grad: Whether to record gradients. Of what is kept, q, k, v and z of a layer (``tensor(name, layer)``) lie
                on the way to the logits, so there is a gradient with respect to them; everything kept has one with
                respect to what comes before it.

        Raises:
            PromptError: A prompt cannot be used.
            PlanError: The plan names what does not exist.
        """
        if logits not in ("all", "last", "none"):
            raise PlanError(f"logits={logits!r} must be 'all', 'last' or 'none'")
        plan = keep if isinstance(keep, Sequence) else [keep]
        ids = self.tokens(prompt)
        arguments = self._arguments(ids)
        lengths, shown, encoder_lengths = lengths_of(ids), ids, None
        if self.module.config.is_encoder_decoder:
            encoder_lengths, shown = lengths, self._decoder_ids(decoder, len(ids))
            if len(shown) != len(ids):
                raise PromptError(
                    f"decoder= has {len(shown)} prompts, the encoder's side {len(ids)}"
                )
            lengths = lengths_of(shown)
            arguments |= self._decoder_arguments(shown)
        elif decoder is not None:
            raise PromptError(
                f"{self.name} has no encoder, so decoder= has no use; pass one prompt"
            )
        collector = Collector(plan, self.spec, lengths, encoder_lengths)
        narrows = "logits_to_keep" in signature(self.module.forward).parameters
        if logits != "all" and narrows and bool((lengths == lengths.max()).all()):
            arguments["logits_to_keep"] = 1
        if hasattr(self.module.config, "use_cache"):
            arguments["use_cache"] = False  # one pass needs no cache, and its memory counts
        recording = nullcontext() if grad else torch.no_grad()
        capturing = collector if plan else None
        prompts = {"ids": shown}
        if encoder_lengths is not None:
            prompts["encoder_ids"] = ids
        with self._session.running(lengths, capturing, encoder_lengths, **prompts), recording:
            output = self.module(**arguments)
        kept = getattr(output, "logits", None) if logits != "none" else None
        if kept is not None:
            kept = _by_position(kept, lengths, last=logits == "last")
        return self._trace(collector, shown, lengths, kept)

    def stream(
        self,
        prompt: Prompt,
        keep: Sequence[Keep] | Keep,
        out: str | Path,
        *,
        chunk: int = CHUNK,
        logits: Literal["all", "last", "none"] = "last",
        fresh: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Trace:
        """Trace a prompt of any length chunk by chunk into a folder, from which it is read as it is used.

        A killed run goes on where it stopped when it is called again with the same arguments. Edits in force act on
        each chunk as they do on each step of generation; a run under edits is not gone on with, since nothing can tell
        whether they are the same.

        Args:
            prompt: One prompt, for a decoder-only model.
            keep: What to capture, as in :meth:`trace`, but for what grows with the square of the prompt.
            out: Folder for ``trace.safetensors`` and ``trace.json``, which :meth:`Trace.load` opens; until they are
                whole, work is kept in ``trace.partial`` there, the cache's keys and values included.
            chunk: Tokens run at a time; memory grows with chunk times prompt.
            logits: Which logits to keep.
            fresh: Whether to start over where an unfinished or finished run has left something.
            tell: Told, in a few words, what is being done.

        Raises:
            PromptError: The prompt cannot be used, or is more than one.
            PlanError: The plan names what does not exist or cannot be streamed.
            UnsupportedError: The model is no decoder.
            OutputError: The folder cannot be written, is in use, or holds a trace, finished or not, of other settings.
        """
        plan = keep if isinstance(keep, Sequence) else [keep]
        return stream(
            self,
            self._session,
            self.tokens(prompt),
            plan,
            Path(out),
            chunk=chunk,
            logits=logits,
            fresh=fresh,
            tell=tell,
        )

    def forward(
        self,
        ids: Int[Tensor, "row position"],
        edits: Sequence[BoundEdit] = (),
        *,
        length: int | None = None,
        prompt: int | Sequence[int] | None = None,
        last: bool = False,
        **arguments: Any,
    ) -> Any:
        """One forward pass of rows of equal length, as transformers returns it; for the other parts of headlab.

        Args:
            ids: Token ids, without padding.
            edits: Bound edits, on top of those in force.
            length: Length of each row's whole prompt, where a cache in ``arguments`` holds its beginning.
            prompt: Tokens of each row that are its prompt, where the others are to count as generated; one number, or
                one per row.
            last: Whether the logits of the last position suffice.
            arguments: Further arguments of the module.
        """
        n_prompt = torch.as_tensor(length or prompt or ids.shape[1], device=ids.device)
        lengths = n_prompt.expand(len(ids))
        if last and "logits_to_keep" in signature(self.module.forward).parameters:
            arguments["logits_to_keep"] = 1
        if not hasattr(self.module.config, "use_cache"):
            arguments.pop("use_cache", None)
        editing = self._session.editing(edits) if edits else nullcontext()
        whole = None
        if length is None:
            whole = ids[:, : int(lengths.max())]
            beyond = torch.arange(whole.shape[1], device=ids.device) >= lengths[:, None]
            whole = whole.masked_fill(beyond, -1)
        with torch.no_grad(), editing, self._session.running(lengths, ids=whole):
            return self.module(input_ids=ids, **arguments)

    def logits(
        self, prompt: Prompt, *, decoder: Prompt | None = None, grad: bool = False
    ) -> Float[Tensor, "batch position vocab"]:
        """Logits by position; NaN beyond the end of shorter prompts."""
        kept = self.trace(prompt, decoder=decoder, grad=grad).logits
        if kept is None:
            raise PlanError(f"{self.name} has no language-model head, so it gives no logits")
        return kept

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 50,
        *,
        keep: Sequence[Keep] | Keep = (),
        stop: Sequence[int] | None = None,
        do_sample: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> Generation:
        """Continue prompts, greedily by default, with a KV cache; edits in force apply at every step.

        Args:
            prompt: One or more prompts.
            max_new_tokens: Tokens to add at most.
            keep: What to capture along the way. Positions count the prompt's tokens first, then the new ones.
            stop: Token ids that end a continuation, besides the model's own.
            do_sample: Whether to sample.
            seed: Seed of the sampling; the global generator is left as it was.
            options: Further arguments of ``transformers``' ``generate``; beams are not supported.

        Raises:
            PromptError: A prompt cannot be used, or the continuation would not fit the context.
        """
        if options.get("num_beams", 1) != 1:
            raise PlanError("generation with beams cannot be captured or edited; use num_beams=1")
        if not self.module.can_generate():
            raise UnsupportedError(f"{self.name} ({self.spec.family}) cannot generate text")
        if not is_whole(max_new_tokens) or max_new_tokens < 1:
            raise PromptError(
                f"max_new_tokens={max_new_tokens!r} must be a whole number of at least 1"
            )
        ids = self.tokens(prompt)
        copies = options.pop("num_return_sequences", 1)
        if not is_whole(copies) or copies < 1:
            raise PlanError(f"num_return_sequences={copies!r} must be a whole number of at least 1")
        ids = ids.repeat_interleave(
            copies, 0
        )  # each copy is a prompt: capture and edits know of it
        self._check_room(ids, max_new_tokens)
        plan = keep if isinstance(keep, Sequence) else [keep]
        encoder_lengths, lengths, prompts = None, lengths_of(ids), {"ids": ids}
        if self.module.config.is_encoder_decoder:
            encoder_lengths, lengths = lengths, torch.ones_like(lengths)  # the start token
            prompts = {"ids": self._decoder_ids(None, len(ids)), "encoder_ids": ids}
        arguments = self._arguments(ids if encoder_lengths is not None else aligned(ids, "left"))
        # Without a mask, generate takes tokens of the prompt that equal its padding token for padding.
        arguments.setdefault("attention_mask", torch.ones_like(arguments["input_ids"]))
        collector = Collector(plan, self.spec, lengths, encoder_lengths)
        if stop is not None:
            own = self.module.generation_config.eos_token_id
            own = own if isinstance(own, list) else [] if own is None else [own]
            options["eos_token_id"] = [*own, *stop]
        options.setdefault("pad_token_id", self._pad_id())
        devices = [self.device] if self.device.type == "cuda" else []
        capturing = collector if plan else None
        with (
            self._session.running(lengths, capturing, encoder_lengths, **prompts),
            torch.no_grad(),
            torch.random.fork_rng(devices=devices, enabled=do_sample),
        ):
            if do_sample:
                torch.manual_seed(seed)
            whole = self.module.generate(
                **arguments, max_new_tokens=max_new_tokens, do_sample=do_sample, **options
            )
        begun = whole[:, :1] if encoder_lengths is not None else ids
        new = self._ended(
            whole[:, begun.shape[1] :],
            options.get("eos_token_id", self.module.generation_config.eos_token_id),
        )
        trace = None
        if plan:
            joined = aligned(torch.cat([begun, new], 1), "right")
            run = lengths_of(joined) - 1  # the last new token of each was never run
            places = torch.arange(joined.shape[1] - 1, device=ids.device)
            shown = joined[:, :-1].masked_fill(places >= run[:, None], -1)
            trace = self._trace(collector, shown, run, None)
        texts: tuple[str, ...] = ()
        if self.tokenizer is not None:
            texts = tuple(self.text(row, special=False) for row in new)
        return Generation(new, texts, trace)

    @contextmanager
    def edit(self, *edits: Edit) -> Iterator[Model]:
        """Put interventions in force until the block ends; blocks nest.

        Raises:
            HeadError: An edit names a head that does not exist.
            PlanError: An edit cannot be carried out.
        """
        with self._session.editing(self.bind(edits)):
            yield self

    def bind(self, edits: Sequence[Edit]) -> tuple[BoundEdit, ...]:
        """Check edits against this model and make them ready; what they need of it is gathered without edits in force.

        Raises:
            HeadError: An edit names a head that does not exist.
            PlanError: An edit cannot be carried out.
        """
        with self.plain():
            return tuple(bind(edit, self) for edit in edits)

    @property
    def edited(self) -> bool:
        """Whether any edit is in force."""
        return bool(self._session.edits)

    @property
    def edits(self) -> tuple[BoundEdit, ...]:
        """The edits in force."""
        return self._session.edits

    @property
    def running(self) -> Int[Tensor, "batch position"] | None:
        """Token ids of the prompts being run, −1 beyond their ends; None between runs, and where only part of a
        prompt is at hand."""
        return self._session.ids

    def plain(self) -> AbstractContextManager[None]:
        """Lift edits, and capture that is under way, until the block ends, to look at the model as it is."""
        return self._session.plain()

    def alone(self) -> AbstractContextManager[None]:
        """Keep other threads off the model until the block ends; they get a PlanError."""
        return self._session.alone()

    # -- parts -----------------------------------------------------------------------------------------------

    def _arguments(self, ids: Tensor) -> dict[str, Any]:
        arguments: dict[str, Any] = {"input_ids": ids.clamp(min=0)}
        real = ids >= 0
        if not bool(real.all()):
            arguments["attention_mask"] = real.long()
        return arguments

    def _decoder_ids(self, decoder: Prompt | None, batch: int) -> Tensor:
        if decoder is not None:
            return self.tokens(decoder)
        start = self.module.config.decoder_start_token_id
        if start is None:
            raise PromptError(f"{self.name} names no start token for its decoder; pass decoder=")
        return torch.full((batch, 1), start, device=self.device)

    def _decoder_arguments(self, ids: Tensor) -> dict[str, Any]:
        return {f"decoder_{name}": value for name, value in self._arguments(ids).items()}

    def _check_room(self, ids: Tensor, new: int) -> None:
        limit = self.spec.max_context
        if (
            limit is not None
            and ids.shape[1] + new > limit
            and not self.module.config.is_encoder_decoder
        ):
            raise PromptError(
                f"{ids.shape[1]} tokens and {new} new ones do not fit the context of {limit} of {self.name}"
            )

    def _pad_id(self) -> int:
        config = self.module.generation_config
        for value in (config.pad_token_id, config.eos_token_id, 0):
            if value is not None:
                return int(value[0] if isinstance(value, list) else value)
        return 0

    @staticmethod
    def _ended(new: Tensor, ends: Any) -> Tensor:
        ends = torch.tensor(ends if isinstance(ends, list) else [] if ends is None else [ends])
        ended = torch.isin(new, ends.to(new))
        return new.masked_fill(ended.cumsum(1) - ended.long() > 0, -1)

    def _trace(
        self, collector: Collector, ids: Tensor, lengths: Tensor, logits: Tensor | None
    ) -> Trace:
        captured = assemble(collector, lengths)
        return Trace(
            model=self.name,
            ids=ids,
            lengths=lengths,
            tokens=self.token_texts(ids),
            logits=logits,
            query_positions=captured.query_positions,
            heads=collector.head_axes,
            labels=collector.labels,
            _rows=captured.rows,
            _statistics=captured.statistics,
            _tensors=captured.tensors,
            _groups=collector.groups,
        )


def _by_position(logits: Tensor, lengths: Tensor, last: bool) -> Tensor:
    if last:
        if logits.shape[1] == 1:
            return logits
        at = (lengths.to(logits.device) - 1)[:, None, None].expand(-1, 1, logits.shape[2])
        return logits.gather(1, at)
    if bool((lengths == logits.shape[1]).all()):
        return logits
    beyond = (
        torch.arange(logits.shape[1], device=logits.device) >= lengths.to(logits.device)[:, None]
    )
    return logits.masked_fill(beyond[..., None], torch.nan)


__all__ = ["Generation", "Model", "Prompt", "load"]
