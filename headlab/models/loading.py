"""Opening a model: the embedded default, a GGUF, a folder, a hub id or a model in memory."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HTTPError, LocalEntryNotFoundError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from headlab.errors import ModelError
from headlab.models.adapters import unwrap
from headlab.models.embedded import EMBEDDED, open_embedded
from headlab.models.fingerprint import files_fingerprint, module_fingerprint
from headlab.models.gguf import READ_ERRORS, converted, first_line
from headlab.models.quiet import quiet_transformers

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
}

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_HUB_IGNORED = ["original/*", "consolidated*", "onnx/*"]
_UNSAFE_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Opened:
    """A model ready to run.

    Attributes:
        module: The Hugging Face module; in eval mode, unless it came in alive, then as it was.
        tokenizer: Its tokenizer, or None where it has none.
        name: A short name for messages and reports.
        source: Where the weights came from, in words.
        fingerprint: Sixteen hex digits that change with the weights: from headers, sizes and
            sampled bytes of safetensors files, from names, shapes and sampled values of a live
            module, from the sha256 of a GGUF.
    """

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    source: str
    fingerprint: str


@dataclass(frozen=True)
class _Located:
    """A folder of safetensors, and what its model is called."""

    folder: Path
    name: str
    source: str
    fingerprint: str


@dataclass(frozen=True)
class _Placement:
    """The dtype weights are loaded in (None: the checkpoint's own) and where they go."""

    dtype: torch.dtype | None
    device: torch.device | None
    device_map: str | Mapping[str, Any] | None


def open_model(
    what: object = EMBEDDED,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: str | Mapping[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Opened:
    """Open a model by name, path or object.

    *what* is, in this order: a live module (``PreTrainedModel``, or an nnsight or TransformerLens
    model around one), the embedded default ``"smollm2-135m"``, the path of a ``.gguf`` file, a
    local folder, or a Hugging Face hub id. A hub id already in the local cache is used as it lies
    there, without asking the hub. Weights load from safetensors or GGUF only.

    Args:
        what: The model.
        tokenizer: Used instead of the model's own; the only tokenizer a bare live module has.
        dtype: A torch dtype, its name (``"float32"``/``"fp32"``, ``"bfloat16"``/``"bf16"``,
            ``"float16"``/``"fp16"``, ``"float64"``), or ``"auto"``: float32 on the CPU, the
            checkpoint's own on an accelerator.
        device: A device, or ``"auto"``: CUDA if there is one, else MPS, else the CPU.
        device_map: Spread the model over devices as transformers does (``"auto"``, or a mapping).
        revision: Branch, tag or commit of a hub id.
        trust_remote_code: Run Python code that comes with the checkpoint.

    Raises:
        ModelError: The model cannot be found, read or placed as asked; a live module is never
            moved or converted.
        OutputError: A GGUF cannot be converted because the cache folder cannot be written.
    """
    if isinstance(what, torch.nn.Module) or not isinstance(what, (str, os.PathLike)):
        return _open_live(what, tokenizer, dtype, device, device_map)
    placement = _place(dtype, device, device_map)
    found = _locate(os.fspath(what), revision, trust_remote_code)
    module = _load_weights(found, placement, trust_remote_code)
    if tokenizer is None:
        tokenizer = _load_tokenizer(found, trust_remote_code)
    return Opened(module, tokenizer, found.name, found.source, found.fingerprint)


def _open_live(
    what: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: str | torch.dtype,
    device: str | torch.device,
    device_map: str | Mapping[str, Any] | None,
) -> Opened:
    """Take a model that is already in memory, as it is."""
    kind = type(what).__name__
    source = f"a live {kind}"
    if (inner := unwrap(what)) is not None:
        what, source = inner.module, inner.source
        tokenizer = tokenizer or inner.tokenizer
    if not isinstance(what, PreTrainedModel):
        raise ModelError(
            f"a {kind} object is not a model headlab can open; pass a transformers "
            "PreTrainedModel, a TransformerLens or nnsight model, or the name of a model"
        )
    if dtype != "auto" and _dtype(dtype) != what.dtype:
        raise ModelError(
            f"this {kind} is loaded in {_short(what.dtype)} and headlab does not change live "
            f"models; convert it with .to({_dtype(dtype)}) before passing it"
        )
    if device_map is not None or (device != "auto" and not _same(_device(device), what.device)):
        raise ModelError(
            f"this {kind} is on {what.device} and headlab does not move live models; move it with "
            ".to(device) before passing it"
        )
    name = str(getattr(what.config, "name_or_path", "") or what.config.model_type)
    return Opened(what, tokenizer, name, source, module_fingerprint(what))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _same(asked: torch.device, actual: torch.device) -> bool:
    """Whether *actual* is what was asked for; ``cuda`` means any CUDA device."""
    return asked.type == actual.type and asked.index in (None, actual.index)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if str(dtype) in DTYPES:
        return DTYPES[str(dtype)]
    raise ModelError(f"dtype {str(dtype)!r} is not one of auto, {', '.join(DTYPES)}")


def _usable_devices() -> list[str]:
    """Names of the devices of this machine."""
    names = ["cpu"]
    if torch.cuda.is_available():
        names += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps:0")
    return names


def _device(device: str | torch.device) -> torch.device:
    """The device asked for, if this machine has it."""
    usable = _usable_devices()
    if str(device) == "auto":
        chosen = usable[1] if len(usable) > 1 else "cpu"
        return torch.device(chosen.removesuffix(":0"))
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"{device!r} is not the name of a device; this machine has {', '.join(usable)}"
        ) from error
    if not any(_same(asked, torch.device(name)) for name in usable):
        raise ModelError(f"there is no device {str(asked)!r}; this machine has {', '.join(usable)}")
    return asked


def _place(
    dtype: str | torch.dtype,
    device: str | torch.device,
    device_map: str | Mapping[str, Any] | None,
) -> _Placement:
    """Settle dtype and device before anything is read."""
    chosen = None if dtype == "auto" else _dtype(dtype)
    if device_map is not None:
        if str(device) != "auto":
            raise ModelError(
                f"device={str(device)!r} and device_map={device_map!r} contradict each other; give "
                "only one of them"
            )
        return _Placement(chosen, None, device_map)
    target = _device(device)
    if target.type == "cpu":
        return _Placement(chosen or torch.float32, target, None)
    return _Placement(chosen, target, {"": str(target)})


def _locate(name: str, revision: str | None, trust_remote_code: bool) -> _Located:
    """Find the folder of safetensors a name or path stands for, converting or downloading it."""
    if not name.strip():
        raise ModelError(
            f"the model's name is empty; give {EMBEDDED!r}, a .gguf file, a folder or a hub id"
        )
    if name.lower() == EMBEDDED:
        gguf = open_embedded()
        return _Located(gguf.folder, EMBEDDED, f"embedded GGUF {gguf.sha256}", gguf.sha256[:16])
    path = Path(name).expanduser()
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise ModelError(
            f"{name!r} is a file but no GGUF; a model is {EMBEDDED!r}, a .gguf file, a folder or a hub id"
        )
    if name.lower().endswith(".gguf"):
        gguf = converted(path.absolute())
        return _Located(gguf.folder, path.stem, str(path.absolute()), gguf.sha256[:16])
    if path.is_dir():
        if (lack := _lack(path)) is not None:
            raise ModelError(f"the folder {name} {lack}")
        label, source = path.absolute().name, str(path.absolute())
    else:
        path = _hub_folder(name, revision, trust_remote_code)
        label, source = name, f"Hugging Face hub, {name}, snapshot {path.name}"
    return _Located(path, label, source, files_fingerprint(path.glob("*.safetensors")))


def _lack(folder: Path) -> str | None:
    """What keeps a folder from being a model, continuing "the folder …", or None."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            return "holds an adapter, not a model; merge it into its base model and save that"
        if ggufs := sorted(folder.glob("*.gguf")):
            return f"has no config.json; name its GGUF file {ggufs[0]} instead"
        return "has no config.json; give a folder written by save_pretrained"
    if (folder / _INDEX).is_file():
        try:
            files = set(json.loads((folder / _INDEX).read_text("utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            return f"has a damaged {_INDEX} ({error}); save or download the model again"
        absent = sorted(file for file in files if not (folder / file).is_file())
        return f"lacks {absent[0]}; save or download the model again" if absent else None
    if (folder / _WEIGHTS).is_file():
        return None
    for pattern in _UNSAFE_WEIGHTS:
        if unsafe := sorted(folder.glob(pattern)):
            return (
                f"has its weights only as {unsafe[0].name}, which headlab does not unpickle; "
                f"convert them to {_WEIGHTS} with save_pretrained in an environment you trust"
            )
    return f"has no {_WEIGHTS}; give a folder written by save_pretrained"


def _hub_folder(name: str, revision: str | None, trust_remote_code: bool) -> Path:
    """The local snapshot of a hub id, downloaded unless it is complete already."""
    looks_like_path = name.startswith((".", "~", os.sep)) or name.count("/") > 1 or "\\" in name
    if looks_like_path:
        raise ModelError(
            f"there is no folder {name!r}; give an existing folder, a .gguf file, a hub id or "
            f"{EMBEDDED!r}"
        )
    wanted = [*_HUB_FILES, "*.py"] if trust_remote_code else _HUB_FILES
    at = "" if revision is None else f" at revision {revision!r}"
    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            local = Path(snapshot_download(name, revision=revision, local_files_only=True))
            if _lack(local) is None:
                return local
        folder = Path(
            snapshot_download(
                name, revision=revision, allow_patterns=wanted, ignore_patterns=_HUB_IGNORED
            )
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{name!r} is gated on the Hugging Face hub; accept its terms there and run "
            "`hf auth login`"
        ) from error
    except (OSError, ValueError, HTTPError) as error:
        raise ModelError(
            f"{name!r}{at} is neither a folder nor in the local Hugging Face cache, and the hub "
            f"did not give it ({type(error).__name__}); check the name and the network, or give a "
            f"folder, a .gguf file or {EMBEDDED!r}"
        ) from error
    if (lack := _lack(folder)) is not None:
        raise ModelError(f"the hub repository {name}{at} {lack}")
    return folder


def _load_weights(
    found: _Located, placement: _Placement, trust_remote_code: bool
) -> PreTrainedModel:
    """Load a folder with the class its configuration asks for, and check that it is complete."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    with quiet_transformers():
        try:
            config = transformers.AutoConfig.from_pretrained(str(found.folder), **options)
            quantised = getattr(config, "quantization_config", None) is not None
            dtype = "auto" if placement.dtype is None or quantised else placement.dtype
            missing: list[str] = []
            for auto in _auto_classes(config):
                module, info = auto.from_pretrained(
                    str(found.folder),
                    config=config,
                    dtype=dtype,
                    device_map=placement.device_map,
                    use_safetensors=True,
                    output_loading_info=True,
                    **options,
                )
                # A pooler feeds classifiers only, and encoders are often saved without one.
                absent = sorted(key for key in info["missing_keys"] if "pooler" not in key)
                if not absent:
                    return module.eval()
                missing = missing or absent
        except READ_ERRORS as error:
            raise ModelError(_why_not(found, error, trust_remote_code)) from error
    raise ModelError(
        f"the weights of {found.name!r} are incomplete: there is no {missing[0]}, which would be "
        "left random; save or download the model again"
    )


def _auto_classes(config: PreTrainedConfig) -> list[Any]:
    """The classes to load a configuration with, the first that finds all its weights wins.

    Encoder-only families are registered for causal language modelling too, where they would run
    with a causal mask; the class the checkpoint names, then the kind of model, decides.
    """
    masked, causal = transformers.AutoModelForMaskedLM, transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        return [transformers.AutoModelForSeq2SeqLM, transformers.AutoModel]
    named = (config.architectures or [""])[0]
    is_masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if is_masked and is_causal:
        decodes = getattr(config, "is_decoder", False) or "CausalLM" in named or "LMHead" in named
        return [causal if decodes else masked, transformers.AutoModel]
    return [masked if is_masked else causal, transformers.AutoModel]


def _why_not(found: _Located, error: BaseException, trust_remote_code: bool) -> str:
    """One sentence for whatever transformers raised."""
    text = first_line(error)
    if "trust_remote_code" in str(error) and not trust_remote_code:
        return (
            f"{found.name!r} needs Python code that comes with it; pass trust_remote_code=True if "
            "you trust its author"
        )
    return (
        f"{found.name!r} cannot be loaded from {found.folder}: {text}; check the files, or name "
        "another model"
    )


def _load_tokenizer(found: _Located, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a model's folder, or None where there is none."""
    if not any((found.folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    with quiet_transformers():
        try:
            return transformers.AutoTokenizer.from_pretrained(
                str(found.folder), local_files_only=True, trust_remote_code=trust_remote_code
            )
        except READ_ERRORS as error:
            raise ModelError(
                f"the tokenizer of {found.name!r} cannot be loaded: {first_line(error)}; "
                "pass one with tokenizer="
            ) from error
