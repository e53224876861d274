"""A comparison and its verdict as one JSON object, for machines.

`verdict.schema.json` beside this module is the schema (JSON Schema 2020-12), version 1: what each key means is written
there. Keys are added without a new version; one that changes its meaning or goes raises it. NaN is null: unknown or not
estimated. Infinities are the strings "Infinity" and "-Infinity". Where nothing could be compared there are only
`schema_version` and `verdict`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, cast

import numpy as np

from harness.types import Comparison, Phase, Side, Verdict
from harness.worst import PositionDetail

JSON_SCHEMA_VERSION = 1


def to_json(comparison: Comparison, verdict: Verdict, worst: Sequence[PositionDetail] = ()) -> dict[str, Any]:
    """The object described above; `json.dumps(..., allow_nan=False)` takes it as it is."""
    phases = comparison.positions["phase"]
    corpus = comparison.reference.manifest
    return {
        "schema_version": JSON_SCHEMA_VERSION,
        "kl": f"KL({' || '.join(comparison.names)}), nats",
        "of_itself": comparison.of_itself,
        "verdict": {**plain(verdict), "exit_code": verdict.exit_code},
        "reference": _side(comparison.reference),
        "candidate": _side(comparison.candidate),
        "floor": _side(comparison.floor_side),
        "baseline": _side(comparison.baseline_side),
        "spread": list(comparison.spread),
        "spread_mean_kl20": {path: plain(float(c["kl20"].mean())) for path, c in comparison.spread.items()},
        "corpus": {"name": corpus.corpus_name, "sha256": corpus.corpus_sha256},
        "findings": plain(comparison.findings),
        "positions": {"all": len(phases), **{str(p): int((phases == str(p)).sum()) for p in Phase}},
        "worst": plain(worst),
        "smoke": comparison.smoke,
        "notes": list(comparison.notes),
        "seconds": plain(comparison.seconds),
    }


def no_judgement(word: str, message: str, exit_code: int) -> dict[str, Any]:
    """The object where nothing could be compared, and why."""
    verdict = {"status": None, "word": word, "exit_code": exit_code, "reasons": [message]}
    return {"schema_version": JSON_SCHEMA_VERSION, "verdict": verdict}


def schema() -> dict[str, Any]:
    """The JSON Schema that both objects keep to."""
    text = Path(__file__).with_name("verdict.schema.json").read_text(encoding="utf-8")
    return cast("dict[str, Any]", json.loads(text))


def _side(side: Side | None) -> dict[str, Any] | None:
    if side is None:
        return None
    manifest = {field.name: getattr(side.manifest, field.name) for field in dataclasses.fields(side.manifest)}
    return {"path": side.path, **{name: plain(value) for name, value in manifest.items() if name != "parts"}}


def plain(value: Any) -> Any:
    """JSON's own types, recursively; numpy scalars become Python's."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    raise TypeError(f"no JSON form for {type(value).__name__}")
