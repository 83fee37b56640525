"""Typed results as files: ``report.json``, two Parquet tables and ``report.html``.

:func:`report` makes a report of a model. One folder is one report: :meth:`Report.write` makes it,
:meth:`Report.read` rebuilds the result from it without the model, and :meth:`Report.to_html` renders the page again.

``hl.report`` is both this package and the function: the package can be called.
"""

import sys
from types import ModuleType
from typing import Any

from headlab.report.environment import environment
from headlab.report.files import write_file, write_files
from headlab.report.head_card import HeadCard, head_card
from headlab.report.model import (
    CAUSAL_COLUMNS,
    SCHEMA_VERSION,
    ModelInfo,
    Report,
    schema,
)
from headlab.report.run import report
from headlab.report.side_by_side import SideBySide, side_by_side


class _Callable(ModuleType):
    """A package that runs its function of the same name when called.

    Importing any part of ``headlab.report`` binds the package to ``headlab.report``, over the function; so
    ``hl.report(model)`` must work on the package.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return report(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

__all__ = [
    "CAUSAL_COLUMNS",
    "SCHEMA_VERSION",
    "HeadCard",
    "ModelInfo",
    "Report",
    "SideBySide",
    "environment",
    "head_card",
    "report",
    "schema",
    "side_by_side",
    "write_file",
    "write_files",
]
