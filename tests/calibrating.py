"""Calibration results made of numbers alone, for tests of limits and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.calibration.calibrate import Result, result_of
from harness.calibration.jobs import STOCK, Job, Setting
from harness.judge import judge, load_gates
from harness.patching import LoadedPatch, Patch
from harness.types import OVERALL, Check, Phase, Status, Stratum
from tests import judging

GATES = load_gates(None)
STRATA = (OVERALL, Stratum(phase=Phase.PREFILL), Stratum(phase=Phase.DECODE))


def patch(name: str, kind: Any = "fault", *, hooked: bool = True, **changes: Any) -> LoadedPatch:
    """A patch that does nothing."""
    fields: dict[str, Any] = {"site": "none", "phase": "both", "source": "none", "summary": "", "shows": ""}
    described = Patch(name=name, kind=kind, **(fields | changes))
    return LoadedPatch(
        patch=described,
        path=Path(f"/patches/{name}.py"),
        sha256=f"sha-{name}",
        function=(lambda runner: lambda: None) if hooked else None,
        doc="",
    )


def check(value: float, *, low: float, high: float, stratum: Stratum = OVERALL, limit: float = 1.4) -> Check:
    """A ratio to the floor, held against a limit."""
    status = Status.PASS if high < limit else Status.FAIL if low > limit else Status.INCONCLUSIVE
    return Check(
        metric="kl20",
        statistic="ratio_to_floor",
        stratum=stratum,
        value=value,
        low=low,
        high=high,
        limit=limit,
        status=status,
        positions=1000,
        clusters=16,
        detectable=1.6,
    )


def result(name: str, ratios: Sequence[float], kind: Any = "benign", **changes: Any) -> Result:
    """A result with a ratio for each of `STRATA`, each known to 5 % on both sides."""
    checks = tuple(check(v, low=v / 1.05, high=v * 1.05, stratum=s) for v, s in zip(ratios, STRATA, strict=False))
    states = [c.status for c in checks]
    worst = next((s for s in (Status.FAIL, Status.INCONCLUSIVE) if s in states), Status.PASS)
    fields: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "severity": "none",
        "fault_class": "",
        "sha256": "",
        "corpus": "embedded",
        "corpus_sha256": "c" * 64,
        "smoke": False,
        "model": "tiny",
        "weights_sha256": "w" * 64,
        "dtype": "bfloat16",
        "setting": Setting(),
        "machine": "one",
        "recording": f"rows of {name}",
        "changed": kind != "stock",
        "status": worst,
        "word": str(worst),
        "checks": checks,
        "mean_kl": 1e-3 * ratios[0],
        "floor_kl": 1e-3,
        "others": {
            "greedy_match": 1.0 / max(1.0, ratios[0]),
            "top1_agreement": 1.0 - 0.02 * ratios[0],
            "perplexity_shift": 0.001,
            "kl_mean": 1e-3 * ratios[0],
            "flips": 20.0 * ratios[0],
            "cosine": 1.0 - 1e-4 * ratios[0],
        },
        "seconds": 60.0,
        "created": "2030-01-01T00:00:00+00:00",
    }
    return Result(**(fields | changes))


def judged(job: Job, *, rows: str = "candidate", stock: Result | None = None, scale: float = 1.0) -> Result:
    """What a job's recording comes to, by the real judge, its KL scaled."""
    made = judging.comparison(candidate=judging.side(rows))
    columns = dict(made.positions) | {"kl20": made.positions["kl20"] * scale}
    made = replace(made, positions=columns | {"cached_tokens": np.full(len(columns["kl20"]), -1)})
    verdict = judge(made, GATES)
    return result_of(job, made, verdict, gates="g", created="now", machine="one", stock=stock, others={"flips": 1.0})


def stock_job(setting: Setting | None = None) -> Job:
    """The unchanged build's job."""
    return Job(name=STOCK, setting=setting or Setting())
