"""What a comparison did exercise and what it did not: a PASS says nothing about what never ran."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from harness.report import strata
from harness.report.where import times
from harness.types import Build, Comparison, Phase, Stratum, Verdict

Answer = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """A path of the engine, whether it ran, and the numbers behind the answer."""

    what: str
    answer: Answer
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRows:
    """Positions of one phase and kind, by depth."""

    phase: Phase
    kind: str
    rows: tuple[int, ...]  # one for each depth


def rows_by_cell(comparison: Comparison) -> tuple[list[int], list[CellRows]]:
    """Depths, and the scored positions of every phase and kind at each of them."""
    columns = comparison.positions
    depths = strata.depths(columns)
    cells = [
        CellRows(
            phase=phase,
            kind=kind,
            rows=tuple(
                int(strata.inside(columns, Stratum(phase=phase, kind=kind, depth=depth)).sum()) for depth in depths
            ),
        )
        for phase in strata.phases(columns)
        for kind in strata.kinds(columns)
    ]
    return depths, cells


def exercised(comparison: Comparison) -> tuple[Exercise, ...]:
    """Which paths of the candidate's engine made rows of this comparison."""
    build = comparison.candidate.manifest.build
    return (
        _prefill(comparison),
        _decode(comparison),
        _chunked(comparison),
        _cached(comparison, build),
        _batch(comparison),
        _ranks(build),
        *_graphs(build),
        _context(comparison, build),
        _attention(build),
    )


def smallest_seen(verdict: Verdict) -> str:
    """The smallest faults that would have been a FAIL, in words; empty where nothing was held against a floor."""
    checks = [c for c in verdict.checks if c.statistic == "ratio_to_floor" and c.tier == "precision"]
    known = [c for c in checks if math.isfinite(c.detectable)]
    if not known:
        return "faults of any size: there are too few texts to say" if checks else ""
    first, worst = known[0], max(known, key=lambda c: c.detectable)
    least = "" if worst is first else f", {times(worst.detectable)} in {worst.stratum}"
    return f"faults below {times(first.detectable)} the floor {first.stratum}{least}; larger ones FAIL in 95 % of runs"


def _column(comparison: Comparison, name: str) -> Any:
    missing = np.full(len(comparison.positions["phase"]), -1)
    return np.asarray(comparison.positions.get(name, missing))


def _prefill(comparison: Comparison) -> Exercise:
    rows = int((comparison.positions["phase"] == str(Phase.PREFILL)).sum())
    return Exercise(what="prefill", answer="yes" if rows else "no", detail=f"{rows:,} rows scored")


def _decode(comparison: Comparison) -> Exercise:
    steps = int(_column(comparison, "step").max(initial=-1)) + 1
    rows = int((comparison.positions["phase"] == str(Phase.DECODE)).sum())
    return Exercise(
        what="decode", answer="yes" if rows else "no", detail=f"{rows:,} rows scored, up to {steps:,} steps of a text"
    )


def _chunked(comparison: Comparison) -> Exercise:
    distance, index = _column(comparison, "chunk_distance"), _column(comparison, "index")
    prefill = (comparison.positions["phase"] == str(Phase.PREFILL)) & (distance >= 0)
    if not prefill.any():
        return Exercise(
            what="chunked prefill", answer="unknown", detail="the recording does not say where chunks began"
        )
    later = int((prefill & (index > distance)).sum())
    if not later:
        return Exercise(what="chunked prefill", answer="no", detail="every scored prefill row lies in the first chunk")
    return Exercise(what="chunked prefill", answer="yes", detail=f"{later:,} rows lie in a second or later chunk")


def _cached(comparison: Comparison, build: Build) -> Exercise:
    cached = _column(comparison, "cached_tokens")
    if not (cached >= 0).any():
        off = _setting(build, "cache_config", "enable_prefix_caching") is False
        detail = "prefix caching was off" if off else "the recording does not say"
        return Exercise(what="prefix cache", answer="no" if off else "unknown", detail=detail)
    hits = int((cached > 0).sum())
    return Exercise(
        what="prefix cache",
        answer="yes" if hits else "no",
        detail=f"{hits:,} rows had a cached prefix" if hits else "no row had a cached prefix",
    )


def _batch(comparison: Comparison) -> Exercise:
    sizes = _column(comparison, "batch_size")
    sizes = sizes[sizes > 0]
    if not len(sizes):
        return Exercise(what="batching", answer="unknown", detail="the recording does not say what shared a step")
    largest = int(sizes.max())
    if largest == 1:
        return Exercise(what="batching", answer="no", detail="one request at a time")
    shared = int((sizes > 1).sum())
    return Exercise(
        what="batching",
        answer="yes",
        detail=f"{shared:,} of {len(sizes):,} rows shared their step, up to {largest} requests",
    )


def _ranks(build: Build) -> Exercise:
    ranks = f"tensor parallel {build.tensor_parallel}, pipeline parallel {build.pipeline_parallel}"
    several = build.tensor_parallel * build.pipeline_parallel > 1
    return Exercise(what="several ranks", answer="yes" if several else "no", detail=ranks)


def _graphs(build: Build) -> Iterator[Exercise]:
    eager = _setting(build, "model_config", "enforce_eager")
    if isinstance(eager, bool):
        detail = "the engine ran eagerly" if eager else "the engine compiled or captured the model"
        yield Exercise(what="compiled model", answer="no" if eager else "yes", detail=detail)


def _context(comparison: Comparison, build: Build) -> Exercise:
    deepest = int(_column(comparison, "index").max(initial=-1)) + 1
    longest = _setting(build, "model_config", "max_model_len")
    if not isinstance(longest, int):
        return Exercise(what="whole context", answer="unknown", detail=f"rows up to {deepest:,} tokens of context")
    return Exercise(
        what="whole context",
        answer="yes" if deepest >= longest - 1 else "no",
        detail=f"rows up to {deepest:,} of the {longest:,} tokens that the engine accepts",
    )


def _attention(build: Build) -> Exercise:
    layers: dict[str, int] = {}
    for backend in build.attention.values():
        layers[backend] = layers.get(backend, 0) + 1
    named = ", ".join(f"{backend} in {count} layer{'s'[: count != 1]}" for backend, count in layers.items())
    return Exercise(
        what="attention backend", answer="yes" if layers else "unknown", detail=named or "the recording does not say"
    )


def _setting(build: Build, section: str, name: str) -> Any:
    """A resolved engine argument, or None where the build does not have it."""
    found = build.resolved.get(section)
    return found.get(name) if isinstance(found, Mapping) else None
