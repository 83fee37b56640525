"""Tiny models, built once per session, and helpers every test file may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import cpu_triton  # noqa: F401 - before anything imports triton
import pytest
import torch
from hypothesis import settings
from tiny_models import build, tiny_tokenizer

torch.set_num_threads(1)

# The same examples in every run: a failure can be looked at, and nothing is written to disk.
settings.register_profile("headlab", derandomize=True, database=None, deadline=None)
settings.load_profile("headlab")


@pytest.fixture(scope="session")
def lab() -> Callable[..., Any]:
    """``lab(family, **changes)``: a headlab model around a tiny one, the same object every time."""
    import headlab as hl

    tokenizer = tiny_tokenizer()

    @cache
    def make(family: str, **changes: Any) -> Any:
        return hl.load(build(family, **changes), tokenizer=tokenizer)

    return make


@pytest.fixture(scope="session")
def twin() -> Callable[..., Any]:
    """``twin(family, **changes)``: a second module with the same weights that headlab never saw."""

    @cache
    def make(family: str, **changes: Any) -> Any:
        return build(family, **changes)

    return make


@pytest.fixture(scope="session")
def eager() -> Callable[..., Any]:
    """``eager(family, **changes)``: the same weights under Hugging Face's eager attention."""

    @cache
    def make(family: str, **changes: Any) -> Any:
        module = build(family, **changes)
        module.set_attn_implementation("eager")
        return module

    return make


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., Done]:
    """``run("tasks", "list")`` runs a command in this process."""
    from headlab.cli import main

    def command(*words: Any) -> Done:
        monkeypatch.setattr("sys.argv", ["headlab", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return Done(int(ended.value.code or 0), said.out, said.err)

    return command


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
