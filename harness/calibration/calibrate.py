"""What a calibration found: one result a patch and corpus, and what may be concluded from them. Pure, but for files.

A result is a small file to commit, RESULTS/CORPUS/DTYPE/NAME.json: verdict, every statistic by stratum, bounds of every
check, what other methods would have seen, and the build. Since bounds do not depend on the limit, a result can be
judged again against any other limit without its rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from harness._files import atomic_file
from harness.calibration.jobs import STOCK, Job, Setting
from harness.errors import StorageError
from harness.manifest_json import from_plain, to_plain
from harness.types import Check, Comparison, Estimate, FlipBin, Json, Manifest, Status, Verdict

SCHEMA = 1
DIGITS = 6  # significant, of every number kept

_TABLES = ("checks", "estimates", "flip_bins")

_NOT_KEPT = ("requested", "resolved", "environment", "git")  # of a Build: long, or in the setting already


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One build on one corpus."""

    name: str  # the patch's, or "stock"
    kind: Literal["stock", "benign", "fault"]
    severity: str  # the patch's: "obvious", "subtle", "near-noise"; "none" if it is no fault
    fault_class: str
    sha256: str  # of the patch file; "" without one
    corpus: str
    corpus_sha256: str
    smoke: bool
    model: str  # its folder's name or hub id
    weights_sha256: str
    dtype: str
    setting: Setting
    machine: str  # processor and versions that decide bits: rows of two machines are not compared bit by bit
    error: str = ""  # why this is no evidence of anything; "" if it is
    recording: str = ""  # content id of the rows
    changed: bool | None = None  # whether any bit differs from the stock build's; None: nothing to compare with
    status: Status | None = None  # None: could not be judged, or an error
    word: str = ""
    reasons: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()  # what the comparison found wrong before any statistic
    checks: tuple[Check, ...] = ()
    estimates: tuple[Estimate, ...] = ()
    flip_bins: tuple[FlipBin, ...] = ()
    mean_kl: float = math.nan  # KL20, nats, all rows
    floor_kl: float = math.nan  # the same of the floor
    others: Mapping[str, float] | None = None  # `detection.statistics`: what other methods would see
    build: Json | None = None
    seconds: float = math.nan  # of the recording
    created: str = ""  # ISO 8601 UTC
    gates: str = ""  # `gates_digest` of the limits it was judged by
    schema: int = SCHEMA

    @property
    def red(self) -> bool:
        """A FAIL, or rows that no judgement accepts: either keeps the build from shipping."""
        return not self.error and (self.status is Status.FAIL or self.status is None)

    @property
    def place(self) -> Path:
        """Its file below the folder of results."""
        return Path(self.corpus) / self.dtype / f"{self.name}.json"


def result_of(
    job: Job,
    comparison: Comparison,
    verdict: Verdict,
    *,
    gates: str,
    created: str,
    machine: str,
    stock: Result | None,
    others: Mapping[str, float] | None,
) -> Result:
    """A job's result. One that should have changed rows and changed no bit is an error, whatever its verdict."""
    manifest = comparison.candidate.manifest
    changed = None if stock is None else manifest.id != stock.recording
    base = about(job, manifest, created=created, machine=machine, smoke=comparison.smoke)
    kl = comparison.positions["kl20"]
    floor = None if comparison.floor is None else comparison.floor["kl20"]
    return replace(
        base,
        error=_bits_error(job, changed),
        recording=manifest.id,
        changed=changed,
        status=verdict.status,
        word=verdict.word,
        reasons=verdict.reasons,
        findings=tuple(finding.message for finding in comparison.findings),
        checks=verdict.checks,
        estimates=verdict.estimates,
        flip_bins=verdict.flip_bins,
        mean_kl=float(kl.mean()),
        floor_kl=math.nan if floor is None else float(floor.mean()),
        others=others,
        gates=gates,
        seconds=math.nan if manifest.seconds is None else manifest.seconds,
    )


def about(job: Job, manifest: Manifest, *, created: str, machine: str, smoke: bool) -> Result:
    """What is known of a recorded job before its rows are looked at; all there is to say if nothing may be judged."""
    build = manifest.build
    patch = None if job.patch is None else job.patch.patch
    plain: dict[str, Any] = to_plain(build, "build")
    return Result(
        name=job.name,
        kind="stock" if patch is None else patch.kind,  # type: ignore[arg-type]  # checked by Patch
        severity="none" if patch is None else patch.severity,
        fault_class="" if patch is None else patch.fault_class,
        sha256="" if job.patch is None else job.patch.sha256,
        corpus=manifest.corpus_name,
        corpus_sha256=manifest.corpus_sha256,
        smoke=smoke,
        model=Path(build.model).name if build.weights_sha256 else build.model,
        weights_sha256=build.weights_sha256,
        dtype=build.dtype,
        setting=job.setting,
        machine=machine,
        build={name: value for name, value in plain.items() if name not in _NOT_KEPT},
        created=created,
    )


def same_build(job: Job, stock: Result) -> Result:
    """The result of a variation that is the stock build itself in the run's setting: the stock's, under its name."""
    patch = job.patch
    return replace(
        stock,
        name=job.name,
        kind="benign",
        sha256="" if patch is None else patch.sha256,
        setting=job.setting,
        changed=False,
        seconds=0.0,
    )


def _bits_error(job: Job, changed: bool | None) -> str:
    if job.patch is None or changed is None or changed is job.patch.patch.changes_rows:
        return ""
    if job.patch.patch.kind == "benign" and not job.hooked:  # a setting of the engine: machines differ in what it does
        return ""
    if changed:
        return f"{job.name} says that rows stay bit-equal, but they differ from the stock build's in this setting"
    return (
        f"{job.name} should change rows, but no bit differs from the stock build's in this setting: it is not the "
        "change it claims to be; look at the site it changes, or at the request pattern and engine arguments it needs"
    )


# --------------------------------------------------------------------------- files


def save_result(result: Result, folder: Path) -> None:
    """Write a result to its place below the folder, atomically. Raises StorageError."""
    write_plain(result, folder / result.place, tables=_TABLES)


def load_results(folder: Path, name: str = "*") -> list[Result]:
    """All results below a folder, or those of one name, by path; none without the folder. Raises StorageError."""
    return [_load(path) for path in sorted(folder.glob(f"*/*/{name}.json"))]


def _load(path: Path) -> Result:
    plain = read_plain(path)
    if plain.get("schema") != SCHEMA:
        raise StorageError(f"{path} is not a calibration result of schema {SCHEMA}: move it out of the folder")
    try:
        for name in _TABLES:
            plain[name] = _from_table(plain[name])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path} is damaged ({error}): delete it, and it will be made again") from error
    return from_plain(Result, plain, str(path))


def write_plain(value: Any, path: Path, *, tables: Sequence[str] = ()) -> None:
    """Write a dataclass as JSON to commit: six digits, one line a field, the fields in `tables` one line an entry."""
    plain: dict[str, Any] = to_plain(value, path.name)
    for name in tables:
        plain[name] = _to_table(plain[name])
    try:
        with atomic_file(path) as file:
            file.write(_readable(_shortened(plain)).encode())
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error


def read_plain(path: Path) -> dict[str, Any]:
    """The JSON object in a file that `write_plain` wrote. Raises StorageError."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} is not a readable result: {error}; delete it, and it will be made again") from error
    if not isinstance(plain, dict):
        raise StorageError(f"{path} holds no JSON object: delete it, and it will be made again")
    return plain


def _to_table(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns = list(items[0]) if items else []
    return {"columns": columns, "rows": [[_cell(item[name]) for name in columns] for item in items]}


def _cell(value: Any) -> Any:
    return [value["phase"], value["kind"], value["depth"]] if isinstance(value, Mapping) else value


def _from_table(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    items = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    for item in items:
        if "stratum" in item:
            item["stratum"] = dict(zip(("phase", "kind", "depth"), item["stratum"], strict=True))
    return items


def _shortened(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    return [_shortened(item) for item in value] if isinstance(value, list) else value


def _readable(plain: Mapping[str, Any]) -> str:
    """JSON with one line a field and one a table row, so that a change of it can be read."""
    lines = []
    for name, value in plain.items():
        if isinstance(value, dict) and value.keys() == {"columns", "rows"}:
            rows = ",\n  ".join(_dense(row) for row in value["rows"])
            lines.append(f'"{name}": {{"columns": {_dense(value["columns"])}, "rows": [\n  {rows}]}}')
        else:
            lines.append(f"{json.dumps(name)}: {_dense(value)}")
    return "{" + ",\n".join(lines) + "}\n"


def _dense(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


# --------------------------------------------------------------------------- what is left to do


def stock_of(job: Job, results: Iterable[Result], *, corpus: str, dtype: str, machine: str) -> Result | None:
    """The unchanged build a job is held against, if it was recorded in that dtype on this corpus and machine."""
    wanted = (job.stock, corpus, dtype, machine)
    found = (r for r in results if (r.name, r.corpus, r.dtype, r.machine) == wanted and not r.error)
    return next(found, None)


def unfinished(jobs: Iterable[Job], results: Iterable[Result], *, corpus: str) -> list[Job]:
    """The jobs without a result on that corpus; one of another patch file or setting, or that made no rows, is none."""
    done = {(r.name, r.sha256, r.setting.key) for r in results if r.corpus == corpus and (r.recording or not r.error)}
    return [j for j in jobs if (j.name, "" if j.patch is None else j.patch.sha256, j.setting.key) not in done]


def undecided(results: Iterable[Result], names: Iterable[str]) -> list[str]:
    """Of the faults, those that no result so far has turned red: what a larger corpus has to decide."""
    red = {result.name for result in results if result.red}
    return [name for name in names if name not in red]


def first_red(result: Result) -> tuple[Check, float] | None:
    """The first check that turned red, in the order coarse to fine, and how far its bound lies beyond the limit.

    The distance is a ratio for what has bounds, and the excess for a count. None if no check is red.
    """
    for check in result.checks:
        if check.status is Status.FAIL:
            counts = check.statistic.startswith("count")
            return check, check.value - check.limit if counts else check.low / check.limit
    return None


def headroom(result: Result) -> tuple[Check, float] | None:
    """The ratio check that came nearest to its limit, and limit over upper bound: below 1 it could not pass."""
    held = [c for c in result.checks if c.statistic == "ratio_to_floor"]
    nearest = max(held, key=lambda check: check.high, default=None)
    return None if nearest is None else (nearest, nearest.limit / nearest.high if nearest.high else math.inf)


def is_base_stock(result: Result) -> bool:
    """Whether it is the unchanged build in the base setting."""
    return result.name == STOCK
