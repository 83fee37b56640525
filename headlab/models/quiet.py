"""Silence around transformers' loading code."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars and warnings inside the block, then restore them.

    What matters about a load headlab checks and reports itself. Standard error is swallowed too:
    the GGUF reader of transformers 5.24 draws a progress bar past the library's own switch.
    """
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
