"""What a corpus can see: the smallest detectable effect, what would decide an open case, and what a plan costs.

Shape legend: S strata.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.gates import gate_for
from harness.stats import Floats, Ratios, Units, ratios, student_quantile
from harness.types import (
    ITEM_BYTES,
    Build,
    Check,
    Corpus,
    Gates,
    LogitsDtype,
    Manifest,
    Phase,
    Segment,
    Status,
    Stratum,
)

CERTAIN = 0.95
"""Probability with which an effect called detectable would have been a FAIL."""

LIKELY = 0.8
"""Probability with which the rows asked for would decide an open case, if the estimate is right."""

DECODE_STEP_TOKENS = 15.0
"""Prefill tokens that take as long as one forced decode step (on two cores: 33 steps/s, 350 to 640 tokens/s)."""

MOST_FACTOR = 25.0
"""More than this many times the rows is no advice: the value lies at the limit."""

ROW_NOISE = 1.6
"""Standard error of a log ratio of mean KL20 times sqrt(positions), from rows alone: two correct bf16 builds of
SmolLM2-135M (measured: 1.45 to 1.75)."""

DOCUMENT_SPREAD = 0.06
"""Standard deviation of a correct build's log ratio between documents, in the same recordings."""

RUNS = 2000
"""Comparisons simulated for a plan: the ratio found with probability 95 % is good to about one percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What recording a corpus once costs, and the smallest ratio to the floor that it would turn red."""

    rows: int
    bytes: int  # of logits
    prefill_tokens: int
    decode_steps: int
    minutes: float | None  # None: there was no recording to go by
    detectable: tuple[tuple[Stratum, float, float], ...]  # stratum, its limit, smallest ratio that it would turn red
    everywhere: float  # smallest ratio shared by all rows that some stratum would turn red


def detectable(limit: Floats | float, error: Floats, freedom: Floats, level: float) -> Floats:
    """Smallest true value that would be a FAIL with probability CERTAIN, on the scale of `limit`; inf if unknown."""
    width = (student_quantile(1.0 - level, freedom) + student_quantile(CERTAIN, freedom)) * error
    with np.errstate(over="ignore"):
        return np.where(np.isnan(width), np.inf, limit * np.exp(width))


def plan(
    corpus: Corpus,
    gates: Gates,
    build: Build,
    *,
    columns: int,
    logits_dtype: LogitsDtype,
    like: tuple[Corpus, Manifest] | None = None,
) -> Plan:
    """Minutes, bytes and power of recording a corpus, before anything is run.

    Args:
        corpus: what would be recorded.
        gates: the limits.
        build: what would be judged, as far as gates name it: its model and dtype.
        columns: of a row: the model's vocabulary.
        logits_dtype: dtype of a row.
        like: corpus and manifest of an earlier recording by the same engine on the same machine: minutes are its own,
            in proportion to tokens, a decode step counted as DECODE_STEP_TOKENS.

    Power is what RUNS simulated comparisons show, whose rows and documents differ as ROW_NOISE and DOCUMENT_SPREAD say.
    """
    minutes = None
    if like is not None and like[1].seconds is not None:
        minutes = like[1].seconds / 60 * _cost(corpus) / _cost(like[0])
    found = _simulated(_units(corpus))
    found = found.without_cells() if corpus.smoke else found
    limits = [gate_for(gates, "ratio_to_floor", build, s, smoke=corpus.smoke).limit for s in found.strata]
    # A FAIL needs a lower bound above its limit, and a ratio moves estimate and bound alike: what it must make up for.
    short = np.log(limits) - found.low(gates.fail_level / max(len(limits), 1))  # [RUNS, S]
    smallest = np.exp(np.quantile(short, CERTAIN, axis=0, method="higher"))
    anywhere = np.exp(np.quantile(short.min(axis=1, initial=np.inf), CERTAIN, method="higher"))
    return Plan(
        rows=corpus.rows,
        bytes=corpus.rows * columns * ITEM_BYTES[logits_dtype],
        prefill_tokens=sum(_prefill_tokens(segment) for segment in corpus.segments),
        decode_steps=_decode_steps(corpus),
        minutes=minutes,
        detectable=tuple(zip(found.strata, limits, smallest.tolist(), strict=True)),
        everywhere=float(anywhere),
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
        asked = f"about {more} more documents like its {check.clusters}, {cost}"
        parts.append((factor, f"{where}: {asked}; {segment} moves it most"))
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


def _simulated(units: Units) -> Ratios:
    """Comparisons of a build as good as its floor, through the statistics of the judge: [RUNS] of each stratum."""
    rng = np.random.default_rng(0)
    documents, of_unit = np.unique(units.document, return_inverse=True)
    by_row = ROW_NOISE / np.sqrt(units.rows)
    log_ratio = by_row * rng.normal(size=(RUNS, len(units.rows)))
    log_ratio += DOCUMENT_SPREAD * rng.normal(size=(RUNS, len(documents)))[:, of_unit]
    mean_one = log_ratio - (by_row**2 + DOCUMENT_SPREAD**2) / 2
    return ratios(units, units.rows * np.exp(mean_one), np.broadcast_to(units.rows.astype(np.float64), log_ratio.shape))


def _cost(corpus: Corpus) -> float:
    """Prefill tokens, with decode steps in their terms."""
    return sum(map(_prefill_tokens, corpus.segments)) + DECODE_STEP_TOKENS * _decode_steps(corpus)


def _prefill_tokens(segment: Segment) -> int:
    """Of its requests: a window past `decode_from` is a second one."""
    twice = any(stop > segment.decode_from for _, stop in segment.windows)
    return segment.decode_from + (segment.windows[-1][1] if twice else 0)


def _decode_steps(corpus: Corpus) -> int:
    return sum(len(segment.indices(Phase.DECODE)) for segment in corpus.segments)


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
