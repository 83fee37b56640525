"""Typed results as files: ``report.json``, two Parquet tables and ``report.html``.

One folder is one report. :meth:`Report.write` makes it, :meth:`Report.read` rebuilds the result
from it without the model, and :meth:`Report.to_html` renders the page again.
"""

from headlab.report.environment import environment
from headlab.report.files import write_file, write_files
from headlab.report.model import (
    CAUSAL_COLUMNS,
    SCHEMA_VERSION,
    ModelInfo,
    Report,
    schema,
)

__all__ = [
    "CAUSAL_COLUMNS",
    "SCHEMA_VERSION",
    "ModelInfo",
    "Report",
    "environment",
    "schema",
    "write_file",
    "write_files",
]
