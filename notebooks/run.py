"""Run notebooks from the first cell to the last, each in a fresh kernel of this very Python.

    python notebooks/run.py                          every notebook beside this file
    python notebooks/run.py notebooks/01_first_look.ipynb
    python notebooks/run.py --write                  and store what the cells put out

No kernel has to be installed, and kernels that are installed are not used. Cells run in an empty temporary
folder. Exit codes: 0, every cell ran; 1, one did not, and its traceback is on stderr; 2, a notebook cannot be read.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from traitlets import default

HERE = Path(__file__).resolve().parent
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class OwnKernel(AsyncKernelManager):
    """A kernel of the Python that runs this script.

    Where no kernel is installed under its name, ``python3`` means ``sys.executable``; so none is looked for.
    """

    @default("kernel_spec_manager")
    def _no_installed_kernels(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def execute(notebook: NotebookNode, timeout: int) -> None:
    """Run every cell, in order; outputs replace those in ``notebook``."""
    with tempfile.TemporaryDirectory(prefix="headlab-notebook-") as folder:
        profile, work = Path(folder, "ipython"), Path(folder, "work")
        profile.mkdir()
        work.mkdir()
        client = NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            kernel_manager_class=OwnKernel,
            # Times of the day would make every stored run differ from the last.
            record_timing=False,
            # ipykernel warns that local traffic is not encrypted; only errors belong in this output.
            extra_arguments=["--IPKernelApp.log_level=40"],
        )
        client.execute(cwd=str(work), env=_environment(profile))
    # Only what a reader's Jupyter needs: not the machine's Python release.
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
    )


def _environment(profile: Path) -> dict[str, str]:
    env = dict(os.environ)
    # A user's IPython profile must not decide whether a notebook runs.
    env["IPYTHONDIR"] = str(profile)
    # Threads that wait by spinning make a run several times slower where other work shares the cores.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # tqdm, which transformers imports, tells every notebook of an environment without widgets to install them.
    filters = [env.get("PYTHONWARNINGS"), "ignore:IProgress not found"]
    env["PYTHONWARNINGS"] = ",".join(filter(None, filters))
    return env


def write(notebook: NotebookNode, path: Path) -> None:
    """Store a notebook; a killed run leaves the old file."""
    partial = path.with_suffix(".partial")
    partial.write_text(nbformat.writes(notebook) + "\n", "utf-8")
    partial.replace(path)


def run(path: Path, *, timeout: int, store: bool) -> bool:
    """Run one notebook and say how it went."""
    notebook = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    try:
        execute(notebook, timeout)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        text = str(error) if sys.stderr.isatty() else _ANSI.sub("", str(error))
        print(text.rstrip(), file=sys.stderr)
        print(f"{path.name}  failed after {time.perf_counter() - start:.0f} s", flush=True)
        return False
    print(f"{path.name}  {time.perf_counter() - start:.0f} s", flush=True)
    if store:
        write(notebook, path)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", type=Path, help="all beside this file by default")
    parser.add_argument("--write", action="store_true", help="store the outputs in the notebooks")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a cell may take (600)")
    options = parser.parse_args()
    paths = options.notebooks or sorted(HERE.glob("*.ipynb"))
    for path in paths:
        try:
            nbformat.validate(nbformat.read(path, as_version=4))
        except (OSError, nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
            print(f"{path} is not a notebook that can be read: {error}", file=sys.stderr)
            return 2
    # Every notebook runs, so that one look at the output shows all that is broken.
    good = [run(path, timeout=options.timeout, store=options.write) for path in paths]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
