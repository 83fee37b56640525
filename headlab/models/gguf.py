"""GGUF files: read the header, convert once to a folder of safetensors, reuse that folder.

transformers spends some twenty seconds unpacking even a small GGUF. The result is kept in headlab's
cache, keyed by the file's sha256 and the converter's version, so that the next load takes a second.
Values are kept exactly: in bfloat16 or float16 when every value survives the rounding, which block
formats such as Q4_1 do not, and in float32 otherwise.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import struct
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headlab.errors import ModelError, OutputError
from headlab.models.fingerprint import files_fingerprint, sha256
from headlab.models.quiet import quiet_transformers

#: Raise when what a conversion writes changes, so that older folders are not reused.
CONVERTER_VERSION = 1

MANIFEST = "headlab.json"

#: What reading a damaged or unfamiliar file makes transformers and gguf raise.
READ_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    ImportError,
    struct.error,
    SafetensorError,
    StrictDataclassError,
)

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_FULL_CHECK_BYTES = 1 << 30
_STALE_SECONDS = 24 * 3600

#: Pre-tokenizers which split numbers into digits before anything else; transformers 5.24 reads
#: every GPT-2-style vocabulary from a GGUF as if it did not.
_SPLIT_DIGITS = {"smollm", "starcoder", "refact", "command-r"}


@dataclass(frozen=True)
class Header:
    """What a GGUF file says about itself.

    Attributes:
        metadata: Its scalars and strings; arrays are left out.
        n_values: Numbers in all its tensors.
    """

    metadata: dict[str, Any]
    n_values: int


@dataclass(frozen=True)
class Converted:
    """A converted GGUF.

    Attributes:
        folder: Holds config, safetensors and, where the file has one, the tokenizer.
        sha256: Of the GGUF file.
    """

    folder: Path
    sha256: str


def cache_root() -> Path:
    """The folder headlab keeps converted models in.

    ``$HEADLAB_CACHE``, else ``$XDG_CACHE_HOME/headlab``, else ``~/.cache/headlab``.
    """
    if chosen := os.environ.get("HEADLAB_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "headlab"
    return Path.home() / ".cache" / "headlab"


def _take(file: BinaryIO, form: str) -> Any:
    """Read one little-endian number."""
    return struct.unpack("<" + form, file.read(struct.calcsize(form)))[0]


def _take_string(file: BinaryIO, *, keep: bool = True) -> str:
    length = _take(file, "Q")
    if not keep:
        file.seek(length, os.SEEK_CUR)
        return ""
    if length > 1 << 24:
        raise ValueError(f"a string of {length} bytes")
    return file.read(length).decode("utf-8", "replace")


def _take_value(file: BinaryIO, kind: int) -> Any:
    """Read a metadata value; arrays are skipped and read as None."""
    if kind == _STRING:
        return _take_string(file)
    if kind != _ARRAY:
        return _take(file, _SCALARS[kind])
    element, length = _take(file, "I"), _take(file, "Q")
    if element in _SCALARS:
        file.seek(length * struct.calcsize(_SCALARS[element]), os.SEEK_CUR)
        return None
    for _ in range(length):
        if element == _STRING:
            _take_string(file, keep=False)
        else:
            _take_value(file, element)
    return None


def _parse(file: BinaryIO) -> tuple[Header, int]:
    """The header, and how many bytes a complete file has at least."""
    if _take(file, "I") not in (2, 3):
        raise ValueError("a version other than 2 and 3")
    n_tensors, n_fields = _take(file, "Q"), _take(file, "Q")
    metadata = {}
    for _ in range(n_fields):
        name, kind = _take_string(file), _take(file, "I")
        value = _take_value(file, kind)
        if value is not None:
            metadata[name] = value
    n_values = end = 0
    for _ in range(n_tensors):
        _take_string(file)
        shape = [_take(file, "Q") for _ in range(_take(file, "I"))]
        per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(_take(file, "I"))]
        offset = _take(file, "Q")
        n_values += math.prod(shape)
        end = max(end, offset + math.prod(shape) // per_block * block_bytes)
    alignment = metadata.get("general.alignment", 32)
    start = -(-file.tell() // alignment) * alignment
    return Header(metadata, n_values), start + end


def read_header(path: Path) -> Header:
    """Read and check the header of a GGUF file.

    Raises:
        ModelError: It is not a GGUF file, or shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it does not start with the bytes 'GGUF'")
        try:
            header, needed = _parse(file)
        except READ_ERRORS as error:
            raise ModelError(
                f"the header of {path} is damaged or cut short ({error}); download the file again"
            ) from error
    if size < needed:
        raise ModelError(
            f"{path} is cut short: it has {size:,} bytes where its header promises {needed:,}; "
            "download the file again"
        )
    return header


def converted(path: Path, *, expected_sha256: str | None = None) -> Converted:
    """The converted form of a GGUF file, made now if the cache lacks it or holds it damaged.

    Every file of a cached conversion is checked against the sha256 its manifest records before it
    is used (0.4 s for 540 MB); safetensors files over 1 GiB by size and samples only.

    Args:
        path: The GGUF file.
        expected_sha256: What the file must hash to, where that is known.

    Raises:
        ModelError: The file is missing, damaged, or of an architecture transformers cannot read.
        OutputError: The cache folder cannot be written or has too little room.
    """
    if not path.is_file():
        raise ModelError(f"there is no file {path}; give the path of an existing .gguf file")
    header = read_header(path)
    digest = sha256(path)
    if expected_sha256 is not None and digest != expected_sha256:
        raise ModelError(
            f"{path} is damaged: its sha256 is not the one it was published with; install it again"
        )
    parent = cache_root() / "gguf"
    folder = parent / f"{path.stem}-{digest[:16]}-v{CONVERTER_VERSION}"
    if not _intact(folder):
        _convert_into(folder, path, header, digest)
    return Converted(folder, digest)


def _intact(folder: Path) -> bool:
    """Whether a cached conversion is complete and unchanged."""
    try:
        files = json.loads((folder / MANIFEST).read_text("utf-8"))["files"]
        return all(_describe(folder / name) == facts for name, facts in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _describe(path: Path) -> dict[str, Any]:
    """What the manifest records of a file."""
    size = path.stat().st_size
    if size > _FULL_CHECK_BYTES:
        return {"bytes": size, "samples": files_fingerprint([path])}
    return {"bytes": size, "sha256": sha256(path)}


def _convert_into(folder: Path, path: Path, header: Header, digest: str) -> None:
    """Convert beside *folder* and move into place, so that nobody sees half a conversion."""
    parent = folder.parent
    work = parent / f".converting-{uuid.uuid4().hex}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent)
        work.mkdir()
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise OutputError(
            f"the cache folder {parent} cannot be written ({error.strerror}); "
            "set HEADLAB_CACHE to a folder that can"
        ) from error
    try:
        needed = 4 * header.n_values
        if free < needed:
            raise OutputError(
                f"converting {path.name} needs {needed / 1e9:.1f} GB in {parent}, which "
                f"has {free / 1e9:.1f} GB left; make room or set HEADLAB_CACHE to another folder"
            )
        model, tokenizer = _read(path, header)
        _write(work, path, model, tokenizer, digest)
        _move_into_place(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove what a converter that was killed left behind."""
    for work in parent.glob(".converting-*"):
        with contextlib.suppress(FileNotFoundError):  # its converter has just finished
            if time.time() - work.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(work, ignore_errors=True)


def _read(path: Path, header: Header) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Unpack a GGUF with transformers, exactly, on the CPU."""
    architecture = str(header.metadata.get("general.architecture", "unknown"))
    auto: Any = transformers.AutoModelForCausalLM
    if architecture.startswith("t5"):
        auto = transformers.AutoModelForSeq2SeqLM
    options: dict[str, Any] = {"gguf_file": path.name, "dtype": torch.float32}
    # From 5.2x on transformers may keep the blocks packed, where a kernel for them is installed.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = None
    with quiet_transformers():
        try:
            model, info = auto.from_pretrained(
                str(path.parent), output_loading_info=True, local_files_only=True, **options
            )
            if header.metadata.get("tokenizer.ggml.model"):
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    str(path.parent), gguf_file=path.name, local_files_only=True
                )
        except READ_ERRORS as error:
            raise ModelError(
                f"{path} ({architecture}) cannot be read: {first_line(error)}; "
                "give a file whose architecture transformers can load from GGUF, or its original "
                "safetensors"
            ) from error
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{path} is incomplete: it has no tensor for {missing[0]}; download the file again"
        )
    if not all(bool(torch.isfinite(values).all()) for values in model.parameters()):
        raise ModelError(
            f"{path} is damaged: some of its weights are not finite numbers; download it again"
        )
    if tokenizer is not None and header.metadata.get("tokenizer.ggml.pre") in _SPLIT_DIGITS:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
        )
    return model, tokenizer


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without its full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".: ") if lines else type(error).__name__


def _exact_dtype(model: PreTrainedModel) -> torch.dtype:
    """The narrowest dtype that holds every weight without rounding."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(w.to(dtype).to(w.dtype), w) for w in model.parameters()):
            return dtype
    return torch.float32


def _write(
    work: Path,
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    digest: str,
) -> None:
    """Write model, tokenizer and manifest into *work*."""
    try:
        with quiet_transformers():
            model.to(_exact_dtype(model)).save_pretrained(work)
            if tokenizer is not None:
                tokenizer.save_pretrained(work)
        files = {file.name: _describe(file) for file in sorted(work.iterdir()) if file.is_file()}
        manifest = {
            "gguf": path.name,
            "gguf_sha256": digest,
            "transformers": transformers.__version__,
            "files": files,
        }
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"the converted {path.name} cannot be written to {work.parent} ({first_line(error)}); "
            "make room or set HEADLAB_CACHE to another folder"
        ) from error


def _move_into_place(work: Path, folder: Path) -> None:
    """Rename *work* to *folder*, past a damaged folder or another process's finished one."""
    damaged = folder.with_name(f".converting-{uuid.uuid4().hex}")
    try:
        if folder.exists() and not _intact(folder):
            folder.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        work.rename(folder)
    except OSError as error:
        # Another process finished first: its conversion is as good as this one.
        if not _intact(folder):
            raise OutputError(
                f"the converted model cannot be moved to {folder} ({error.strerror}); remove that "
                "folder and load again"
            ) from error
