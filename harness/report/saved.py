"""What saved results say, as facts: positions, verdicts, and single rows of a recording."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import StorageError
from harness.report.json_report import JSON_SCHEMA_VERSION
from harness.report.visible import visible
from harness.rows import Row
from harness.types import Columns, Phase

Facts = dict[str, Any]

CONTEXT, TOKEN = 70, 24  # characters shown of one
WORST_SHOWN = 5


def positions_facts(path: Path, columns: Columns) -> Facts:
    """What a file of positions holds. Statistics of KL20 are over the rows where it is finite.

    Raises StorageError for columns that no comparison has.
    """
    if columns["kl20"].dtype.kind != "f" or columns["flip"].dtype.kind not in "biuf":
        raise StorageError(f"the columns of {path} are not positions of a comparison: kl20 or flip is not a number")
    kl20 = np.asarray(columns["kl20"], np.float64)
    finite = np.isfinite(kl20)
    worst = np.argsort(-np.where(finite, kl20, np.inf), kind="stable")[:WORST_SHOWN]
    places = {
        f"{columns['segment'][i]} {columns['phase'][i]} {columns['index'][i]}": f"{kl20[i]:.3g}" for i in worst.tolist()
    }
    return {
        "artefact": "positions",
        "path": str(path),
        "rows": {"all": len(kl20), **{str(p): int((columns["phase"] == str(p)).sum()) for p in Phase}},
        "kinds": sorted(set(columns["kind"].tolist())),
        "depths": sorted(set(columns["depth"].tolist())),
        "kl20": {name: f"{value:.3g} nat" for name, value in _statistics(kl20[finite])},
        "not_finite": int((~finite).sum()) or None,
        "flips": int(np.asarray(columns["flip"], np.bool_).sum()),
        "worst_kl20": places,
        "columns": " ".join(columns),
    }


def _statistics(kl20: NDArray[np.float64]) -> list[tuple[str, float]]:
    if not len(kl20):
        return []
    median, p99, largest = np.quantile(kl20, (0.5, 0.99, 1.0)).tolist()
    return [("mean", float(kl20.mean())), ("median", median), ("p99", p99), ("largest", largest)]


def load_verdict(path: Path) -> dict[str, Any]:
    """The object that `compare --json` printed or `compare --save` wrote. Raises StorageError for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not readable JSON: {error}; write it again with `compare --json`") from error
    verdict = found.get("verdict") if isinstance(found, dict) else None
    if not isinstance(verdict, dict) or not isinstance(verdict.get("word"), str):
        raise StorageError(f"{path} is JSON, but not what `compare --json` writes")
    if found.get("schema_version") != JSON_SCHEMA_VERSION:
        raise StorageError(
            f"{path} has schema version {found.get('schema_version')!r}, expected {JSON_SCHEMA_VERSION}: another "
            "logitgate wrote it"
        )
    whole: dict[str, Any] = found
    return whole


def verdict_facts(path: Path) -> Facts:
    """What a JSON file of `compare --json` says. Raises StorageError for any other file."""
    found = load_verdict(path)
    verdict = found["verdict"]
    try:
        return {"artefact": "verdict", "path": str(path), **_verdict(found, verdict)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path} is a damaged verdict: {error!r}; write it again with `compare --json`") from error


def _verdict(found: Mapping[str, Any], verdict: Mapping[str, Any]) -> Facts:
    estimates = verdict.get("estimates", ())
    return {
        "word": verdict["word"],
        "exit_code": verdict["exit_code"],
        "reasons": list(verdict["reasons"]),
        "remedy": verdict.get("remedy"),
        "kl": found.get("kl"),
        **{role: _recording(found.get(role)) for role in ("reference", "candidate", "floor", "baseline")},
        "corpus": " ".join(found["corpus"].values()) if "corpus" in found else None,
        "positions": found.get("positions"),
        "findings": [f"{one['code']}: {one['message']}" for one in found.get("findings", ())],
        "ratio_to_floor": {
            _stratum(one["stratum"]): _interval(one) for one in estimates if one["statistic"] == "ratio_to_floor"
        },
        "open_checks": [
            f"{one['metric']} {one['statistic']}, {_stratum(one['stratum'])}: {one['status']}"
            for one in verdict.get("checks", ())
            if one["status"] != "PASS"
        ],
        "notes": [*found.get("notes", ()), *verdict.get("notes", ())],
    }


def _recording(side: Mapping[str, Any] | None) -> str | None:
    if side is None:
        return None
    build = side["build"]
    return f"{side['path']}  {build['engine']} {build['engine_version']}, {build['model']}, {build['dtype']}"


def _stratum(stratum: Mapping[str, Any]) -> str:
    return " ".join(str(part) for part in stratum.values() if part is not None) or "overall"


def _interval(estimate: Mapping[str, Any]) -> str:
    low, high = estimate["low"], estimate["high"]
    known = isinstance(low, float | int) and isinstance(high, float | int)
    return f"{estimate['value']:.3g}" + (f" ({low:.3g} to {high:.3g})" if known else "")


# --------------------------------------------------------------------------- rows


def rows_text(rows: Sequence[Row]) -> str:
    """Rows as text: where, the words before, the id that came next, and the likeliest ids."""
    return "\n\n".join(map(_row, rows))


def _row(row: Row) -> str:
    step = f", step {row.step}" if row.step >= 0 else ""
    lines = [
        visible(f"{row.segment} {row.phase} index {row.index}{step} ({row.kind}, depth {row.depth})"),
        f"  {visible(row.context, CONTEXT)} → “{visible(row.target_text, TOKEN)}” (id {row.target})",
        f"  target: log-prob {row.target_logprob:.4f} nat, rank {row.target_rank}; margin {row.margin:.4f}, "
        f"log-sum-exp {row.lse:.4f}",
        f"  {'id':>8}  {'log-prob':>9}  {'share':>7}  text",
    ]
    for top in row.top:
        share = math.exp(top.logprob) if top.logprob < 1 else math.nan
        lines.append(f"  {top.id:>8}  {top.logprob:>9.4f}  {share:>7.2%}  “{visible(top.text, TOKEN)}”")
    return "\n".join(lines)
