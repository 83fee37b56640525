"""The typed result of a report: what was measured on which model, and how it was made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from headlab.errors import OutputError
from headlab.models.spec import ModelSpec
from headlab.report import files
from headlab.roles.confirmation import CAUSAL_COLUMNS
from headlab.roles.scores import Example, Scores, role_infos

SCHEMA_VERSION = "2.0"
TOP = 10

_EXAMPLE = pa.schema(
    [
        ("role", pa.string()),
        ("layer", pa.int64()),
        ("head", pa.int64()),
        ("kind", pa.string()),
        ("tokens", pa.list_(pa.string())),
        ("query", pa.int64()),
        ("weights", pa.list_(pa.float64())),
        ("value", pa.float64()),
    ]
)


@dataclass(frozen=True)
class ModelInfo:
    """The facts of a model a report needs once the model itself is gone.

    Attributes:
        name: Name it was loaded by.
        family: Hugging Face model type.
        fingerprint: Identifies the weights; ``reproducibility`` says how it was made.
        n_layers: Attention modules.
        n_heads: Query heads per layer.
        n_kv_heads: Key/value heads per layer.
        d_head: Width of q and k.
        n_parameters: Parameters of the model.
        dtype: Such as ``"float32"``.
        device: Such as ``"cpu"``.
        windows: Sliding window in tokens per layer, or None.
        stacks: ``"decoder"``, ``"encoder"`` or ``"cross"`` per layer; empty reads as all decoder.
    """

    name: str
    family: str
    fingerprint: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    n_parameters: int
    dtype: str
    device: str
    windows: tuple[int | None, ...]
    stacks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", tuple(self.windows))
        object.__setattr__(self, "stacks", tuple(self.stacks))

    @classmethod
    def from_spec(
        cls, spec: ModelSpec, *, fingerprint: str, n_parameters: int, dtype: str, device: str
    ) -> ModelInfo:
        """Facts of a measured model; ``dtype`` may be written as torch does (``torch.float32``)."""
        return cls(
            name=spec.name,
            family=spec.family,
            fingerprint=fingerprint,
            n_layers=spec.n_layers,
            n_heads=spec.n_heads,
            n_kv_heads=spec.n_kv_heads,
            d_head=spec.d_head,
            n_parameters=n_parameters,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            windows=spec.windows,
            stacks=tuple(layer.stack for layer in spec.layers),
        )


@dataclass(frozen=True, eq=False)
class Report:
    """Everything one run found out, independent of the model that produced it.

    Attributes:
        model: Facts of the model.
        scores: All scores, with their evidence.
        examples: Attention rows to look at.
        checks: Self-checks by name, such as the largest logit difference with and without the seam.
            A bool says passed or failed.
        warnings: Sentences a reader must see first.
        reproducibility: What it takes to run this again: ``headlab``, ``torch``, ``transformers``
            and ``numpy`` versions, ``python``, ``platform``, ``command`` and ``date`` (all from
            :func:`headlab.report.environment`), ``configuration``, ``seeds``, ``fingerprint``,
            ``fingerprint_method``, ``tokenizer_sha256``, ``token_ids_sha256``, ``wall_seconds``.
        causal: Ablations with the columns of :data:`CAUSAL_COLUMNS`, or None where none were run.
        schema_version: Version of the files' layout.
    """

    model: ModelInfo
    scores: Scores
    examples: tuple[Example, ...] = ()
    checks: Mapping[str, float | str | bool] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    reproducibility: Mapping[str, Any] = field(default_factory=dict)
    causal: pd.DataFrame | None = None
    schema_version: str = SCHEMA_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "examples", tuple(self.examples))
        object.__setattr__(self, "warnings", tuple(self.warnings))
        if self.causal is not None:
            object.__setattr__(self, "causal", _checked_causal(self.causal))

    @property
    def claims(self) -> dict[str, list[str]]:
        """Heads claimed for each role, highest score first."""
        return {name: self.scores.claimed(name) for name in self.scores.names}

    def to_dict(self) -> dict[str, Any]:
        """The content of ``report.json``: all but the full tables and the examples."""
        data = {
            "schema_version": self.schema_version,
            "model": self.model,
            "alpha": self.scores.alpha,
            "roles": [self._role_summary(name) for name in self.scores.names],
            "overlap": self.scores.overlap().to_dict("index"),
            "stability": self.scores.stability().to_dict("records"),
            "causal": None if self.causal is None else self.causal.to_dict("records"),
            "checks": self.checks,
            "warnings": self.warnings,
            "reproducibility": self.reproducibility,
        }
        return files.plain(data)

    def to_html(self) -> str:
        """The report as one page that needs nothing but itself."""
        from headlab.report.html import render  # html reads this module's types

        return render(self)

    def write(self, folder: str | Path) -> dict[str, Path]:
        """Write ``scores.parquet``, ``details.parquet``, ``examples.parquet``, ``report.html`` and ``report.json``.

        Every file is complete before any takes its name, and ``report.json`` comes last and holds
        the digests of the tables, so that a folder is either one whole report or recognisably not.

        Returns:
            Path of each file by its name.

        Raises:
            OutputError: The folder cannot be written to; an earlier report in it is then untouched.
        """
        metadata = {
            "headlab.schema_version": self.schema_version,
            "headlab.model_name": self.model.name,
            "headlab.model_fingerprint": self.model.fingerprint,
        }
        scores = pa.Table.from_pandas(self.scores.frame, preserve_index=False)
        details = pa.Table.from_pandas(self.scores.details, preserve_index=False)
        tables = {
            "scores.parquet": files.dump_parquet(scores, metadata),
            "details.parquet": files.dump_parquet(details, metadata),
            "examples.parquet": files.dump_parquet(_example_table(self.examples), metadata),
        }
        data = self.to_dict()
        data["files"] = {name: files.sha256(content) for name, content in tables.items()}
        contents: dict[str, str | bytes] = {
            **tables,
            "report.html": self.to_html(),
            "report.json": files.dump_json(data) + "\n",
        }
        return files.write_files(folder, contents)

    @classmethod
    def read(cls, folder: str | Path) -> Report:
        """Rebuild a report from its folder; neither the model nor a network is needed.

        Raises:
            OutputError: Files are missing, damaged, of different runs, or of a newer headlab.
        """
        folder = Path(folder)
        path = folder / "report.json"
        try:
            data = json.loads(files.read_bytes(path))
            _check_version(data["schema_version"], path)
            tables = {name: _table(folder / name, data["files"]) for name in _TABLES}
            roles = role_infos(summary["info"] for summary in data["roles"])
            causal = data["causal"]
            return cls(
                model=ModelInfo(**data["model"]),
                scores=Scores(
                    tables["scores.parquet"], data["alpha"], roles, tables["details.parquet"]
                ),
                examples=_examples(tables["examples.parquet"]),
                checks=data["checks"],
                warnings=tuple(data["warnings"]),
                reproducibility=data["reproducibility"],
                causal=None
                if causal is None
                else pd.DataFrame(causal, columns=list(CAUSAL_COLUMNS)),
                schema_version=data["schema_version"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise OutputError(f"{path} is not a report headlab can read: {error!r}") from error

    def __repr__(self) -> str:
        wall = self.reproducibility.get("wall_seconds")
        lines = [
            f"Report on {self.model.name} ({self.model.family}, {self.model.n_layers} layers × "
            f"{self.model.n_heads} heads)"
            + (f", {wall:.0f} s" if isinstance(wall, int | float) else ""),
            repr(self.scores),
            *(f"  warning: {warning}" for warning in self.warnings),
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from headlab.report.html import summary

        return summary(self)

    def _role_summary(self, name: str) -> dict[str, Any]:
        rows = self.scores.ranked(name)
        return {
            "info": self.scores.role(name),
            "n_heads": len(rows),
            "n_measured": int(rows["score"].notna().sum()),
            "claimed": self.scores.claimed(name),
            "top": rows.head(TOP).drop(columns="role").to_dict("records"),
        }


_TABLES = ("scores.parquet", "details.parquet", "examples.parquet")


def schema() -> dict[str, Any]:
    """The published JSON Schema (draft 2020-12) of ``report.json``."""
    return json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))


def _check_version(version: str, path: Path) -> None:
    major, supported = version.split(".")[0], SCHEMA_VERSION.split(".")[0]
    if major != supported:
        raise OutputError(
            f"{path} has schema version {version}, but this headlab reads {supported}.x: "
            "read it with the headlab that wrote it"
        )


def _table(path: Path, digests: Mapping[str, str]) -> pd.DataFrame:
    content = files.read_bytes(path)
    if files.sha256(content) != digests[path.name]:
        raise OutputError(
            f"{path} is not the file its report.json describes: "
            "copy the whole folder again or rerun"
        )
    return files.load_parquet(content, path)


def _example_table(examples: tuple[Example, ...]) -> pa.Table:
    columns = {name: [getattr(example, name) for example in examples] for name in _EXAMPLE.names}
    return pa.Table.from_pydict(columns, schema=_EXAMPLE)


def _examples(frame: pd.DataFrame) -> tuple[Example, ...]:
    rows = frame.loc[:, _EXAMPLE.names].to_dict("records")
    return tuple(Example(**{str(key): value for key, value in row.items()}) for row in rows)


def _checked_causal(frame: pd.DataFrame) -> pd.DataFrame:
    if missing := [name for name in CAUSAL_COLUMNS if name not in frame.columns]:
        raise OutputError(f"the causal frame lacks {', '.join(missing)}: a row needs every column")
    result = frame.loc[:, list(CAUSAL_COLUMNS)].reset_index(drop=True)
    for name in (
        "baseline",
        "effect",
        "ci_low",
        "ci_high",
        "control_effect",
        "control_low",
        "control_high",
    ):
        result[name] = result[name].astype("float64")
    result["n"] = result["n"].astype("int64")
    result["confirmed"] = result["confirmed"].astype("bool")
    return result
