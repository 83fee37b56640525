"""Natural text: headlab's own essays, or a folder of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from headlab.errors import PromptError


def data_folder() -> Path:
    """The folder of headlab's data: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "data"
    return installed if installed.is_dir() else package.parent / "data"


def prose(folder: Path | None = None) -> str:
    """All text files of a folder, in the order of their names, joined by blank lines.

    Args:
        folder: Folder of ``.txt`` files; headlab's own essays by default.

    Raises:
        PromptError: The folder holds no text.
    """
    folder = folder or data_folder() / "haystack"
    try:
        texts = [path.read_text("utf-8").strip() for path in sorted(folder.glob("*.txt"))]
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the text in {folder} cannot be read: {error}") from error
    texts = [text for text in texts if text]
    if not texts:
        raise PromptError(f"{folder} holds no .txt file with text in it")
    return "\n\n".join(texts)


def prose_windows(
    tokenizer: Any, text: str, n_windows: int, length: int, seed: int, bos: int | None
) -> Int[Tensor, "window position"]:
    """Stretches of text that do not overlap, each behind the beginning-of-sequence token.

    Raises:
        PromptError: The text is too short.
    """
    ids = np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    body = length - (bos is not None)
    slots = len(ids) // body
    if slots < n_windows:
        raise PromptError(
            f"the text has {len(ids)} tokens, but {n_windows} windows of {body} are needed; give a longer one"
        )
    chosen = np.random.default_rng(seed).choice(slots, n_windows, replace=False)
    windows = np.stack([ids[slot * body : (slot + 1) * body] for slot in chosen])
    if bos is not None:
        windows = np.concatenate([np.full((n_windows, 1), bos), windows], 1)
    return torch.from_numpy(windows)
