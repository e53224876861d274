"""A comparison and its verdict as one JSON object, for machines.

Schema, version 1. Keys are added without a new version; one that changes its meaning or goes raises it.

- `schema_version`: 1. `kl`: the direction, in words; all KL are in nats.
- `verdict`: `status` ("PASS", "FAIL", "INCONCLUSIVE" or null: could not be judged), `word`, `exit_code`, `reasons`,
  `remedy`, `notes`, and the fields of `types.Verdict`: `checks`, `estimates`, `flip_bins`, `task_bounds`. A stratum is
  an object of `phase`, `kind` and `depth`; null means all.
- `reference`, `candidate`, `floor`, `baseline`: `path` and the recording's manifest but for its list of files; null if
  not given. `spread`: paths of the other floors.
- `findings`: `code`, `message`, `fatal` of everything noticed about the rows before any statistic.
- `positions`: how many, in all and by phase. `corpus`: name and sha256. `smoke`, `notes`, `seconds`.
- `worst`: the positions with the largest KL, with context and both top lists (`types` of `worst.PositionDetail`).

NaN is null: unknown or not estimated. Infinities are the strings "Infinity" and "-Infinity".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

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
        "kl": "KL(reference || candidate), nats",
        "verdict": {**_plain(verdict), "exit_code": verdict.exit_code},
        "reference": _side(comparison.reference),
        "candidate": _side(comparison.candidate),
        "floor": _side(comparison.floor_side),
        "baseline": _side(comparison.baseline_side),
        "spread": list(comparison.spread),
        "corpus": {"name": corpus.corpus_name, "sha256": corpus.corpus_sha256},
        "findings": _plain(comparison.findings),
        "positions": {"all": len(phases), **{str(p): int((phases == str(p)).sum()) for p in Phase}},
        "worst": _plain(worst),
        "smoke": comparison.smoke,
        "notes": list(comparison.notes),
        "seconds": _plain(comparison.seconds),
    }


def _side(side: Side | None) -> dict[str, Any] | None:
    if side is None:
        return None
    manifest = {field.name: getattr(side.manifest, field.name) for field in dataclasses.fields(side.manifest)}
    return {"path": side.path, **{name: _plain(value) for name, value in manifest.items() if name != "parts"}}


def _plain(value: Any) -> Any:
    """JSON's own types, recursively; numpy scalars become Python's."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise TypeError(f"no JSON form for {type(value).__name__}")
