"""What a corpus can see: the smallest detectable effect, what would decide an open case, and what a plan costs.

Shape legend: S strata.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.stats import Floats, Units, ratios, student_quantile
from harness.types import ITEM_BYTES, Check, Corpus, LogitsDtype, Manifest, Phase, Segment, Status, Stratum

CERTAIN = 0.95
"""Probability with which an effect called detectable would have been a FAIL."""

LIKELY = 0.8
"""Probability with which the rows asked for would decide an open case, if the estimate is right."""

DECODE_STEP_TOKENS = 15.0
"""Prefill tokens that take as long as one forced decode step (on two cores: 33 steps/s, 350 to 640 tokens/s)."""

MOST_FACTOR = 25.0
"""More than this many times the rows is no advice: the value lies at the limit."""

POSITION_NOISE = 0.8
"""Standard error of a log ratio of mean KL times sqrt(positions), between two correct bf16 builds (measured: 0.77)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What recording a corpus once costs, and the smallest ratio to the floor that it would turn red."""

    rows: int
    minutes: float
    bytes: int
    detectable: tuple[tuple[Stratum, float], ...]


def detectable(limit: Floats | float, error: Floats, freedom: Floats, level: float) -> Floats:
    """Smallest true value that would be a FAIL with probability CERTAIN, on the scale of `limit`; inf if unknown."""
    width = (student_quantile(1.0 - level, freedom) + student_quantile(CERTAIN, freedom)) * error
    with np.errstate(over="ignore"):
        return np.where(np.isnan(width), np.inf, limit * np.exp(width))


def plan(
    corpus: Corpus,
    *,
    vocab_size: int,
    limit: float,
    logits_dtype: LogitsDtype = "bfloat16",
    decode_rate: float = 33.0,
    fail_level: float = 0.01,
    noise: float = POSITION_NOISE,
) -> Plan:
    """Minutes, bytes and power of recording a corpus, before anything is run.

    Args:
        corpus: what would be recorded.
        vocab_size: columns of a row.
        limit: of the ratio to the floor, from the gates: a smoke corpus has its own.
        logits_dtype: dtype of a row.
        decode_rate: forced decode steps per second; a step is taken to cost DECODE_STEP_TOKENS prefill tokens.
        fail_level: error probability of a FAIL, shared by all strata.
        noise: standard error times sqrt(positions); from an earlier report, or POSITION_NOISE.
    """
    tokens = sum(_cost(segment) for segment in corpus.segments)
    units = _units(corpus)
    # Only the degrees of freedom are taken from this: equal sums have no spread.
    sums = units.rows.astype(np.float64)
    found = ratios(units, sums, sums)
    found = found.without_cells() if corpus.smoke else found
    error = noise / np.sqrt(found.positions)
    smallest = detectable(limit, error, found.freedom, fail_level / max(len(found.strata), 1))
    return Plan(
        rows=corpus.rows,
        minutes=tokens / (decode_rate * DECODE_STEP_TOKENS) / 60,
        bytes=corpus.rows * vocab_size * ITEM_BYTES[logits_dtype],
        detectable=tuple(zip(found.strata, (float(x) for x in smallest), strict=True)),
    )


def remedy(
    checks: Sequence[Check],
    errors: Sequence[tuple[float, float]],
    influential: Sequence[str],
    manifest: Manifest,
    units: Units,
    *,
    fail_level: float,
    pass_level: float,
) -> str:
    """What to record so that the open checks are decided, in words; empty if none is open.

    Args:
        checks: interval checks.
        errors: of each check, the standard error of its log and the degrees of freedom.
        influential: of each check, the segment that moves it most.
        manifest: of the candidate; its `seconds` give the minutes.
        units: segments and their rows.
        fail_level: error probability of one lower bound.
        pass_level: error probability of one upper bound.
    """
    parts = []
    for check, (error, freedom), segment in zip(checks, errors, influential, strict=True):
        if check.status is not Status.INCONCLUSIVE:
            continue
        where = f"{check.stratum} ({check.value:.3g}, undecided between {check.low:.3g} and {check.high:.3g})"
        factor = _factor(check, error, freedom, fail_level, pass_level)
        if not factor <= MOST_FACTOR:
            parts.append((math.inf, f"{where}: at the limit, more rows will hardly decide it; {segment} moves it most"))
            continue
        more = max(1, math.ceil(check.clusters * (factor - 1)))
        minutes = _minutes(manifest, units, check.stratum, more / check.clusters)
        cost = f"about {minutes:.1f} minutes" if minutes is not None else "minutes unknown"
        parts.append((factor, f"{where}: about {more} more like its {check.clusters}, {cost}; {segment} moves it most"))
    parts.sort(key=lambda part: -part[0])
    rest = f"; and {len(parts) - 3} more strata" if len(parts) > 3 else ""
    return f"to decide, record more texts. {'; '.join(text for _, text in parts[:3])}{rest}" if parts else ""


def _factor(check: Check, error: float, freedom: float, fail_level: float, pass_level: float) -> float:
    """How many times the rows would settle the check with probability LIKELY; inf if nothing would."""
    distance = math.log(check.limit / check.value) if check.value > 0 and math.isfinite(check.value) else math.nan
    level = pass_level if distance > 0 else fail_level
    needed = float(student_quantile(1.0 - level, freedom) + student_quantile(LIKELY, freedom)) * error
    return math.inf if math.isnan(needed) or not distance else (needed / distance) ** 2


def _minutes(manifest: Manifest, units: Units, stratum: Stratum, share: float) -> float | None:
    """Time for `share` times the stratum's segments, as a part of what the whole recording took."""
    if manifest.seconds is None:
        return None
    cost = units.depth / np.maximum(1, [np.sum(units.segment == s) for s in units.segment])
    cost = cost + np.where(units.phase == str(Phase.DECODE), DECODE_STEP_TOKENS * units.rows, 0.0)
    segments = np.isin(units.segment, units.segment[units.mask(stratum)])
    return float(manifest.seconds / 60 * share * cost[segments].sum() / cost.sum())


def _cost(segment: Segment) -> float:
    """Prefill tokens, with decode steps in their terms; a window past `decode_from` is a second prefill."""
    twice = any(stop > segment.decode_from for _, stop in segment.windows)
    prefill = segment.decode_from + (segment.windows[-1][1] if twice else 0)
    return prefill + DECODE_STEP_TOKENS * len(segment.indices(Phase.DECODE))


def _units(corpus: Corpus) -> Units:
    rows = [(s, phase, len(s.indices(phase))) for s in corpus.segments for phase in Phase]
    scored = [(s, phase, count) for s, phase, count in rows if count]
    return Units(
        segment=np.array([s.id for s, _, _ in scored], np.str_),
        document=np.array([s.document for s, _, _ in scored], np.str_),
        kind=np.array([s.kind for s, _, _ in scored], np.str_),
        depth=np.array([s.depth for s, _, _ in scored], np.int64),
        phase=np.array([str(phase) for _, phase, _ in scored], np.str_),
        rows=np.array([count for _, _, count in scored], np.int64),
        of_position=np.empty(0, np.intp),
    )
