"""The verdict: the only file that knows what red means. Pure: a Comparison and limits in, a Verdict out.

A FAIL needs a lower bound above a limit, at an error probability shared by all interval checks; a PASS needs every
upper bound below its limit; what is neither is INCONCLUSIVE. Counts (rows with NaN, flips at a large margin) and
findings of the comparison need no bounds. Without a fit floor nothing passes.

Tiers speak: `precision`, the production dtype against the floor; `logic`, a float32 twin against the reference, which
may fail a build and never pass it; `change`, the candidate against an accepted baseline, which may only hold a PASS
back; `phases`, decode rows against prefill rows of one recording, which says nothing of faults that both share and has
a limit of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.errors import UsageError
from harness.fitness import barred, not_covered, unfit_baseline, unfit_floor, unsaid
from harness.gates import BOUNDED, gate_for, load_gates
from harness.power import detectable, remedy
from harness.stats import Floats, Ratios, Units, group, ratios
from harness.summary import flip_bins, summarise, task_bounds
from harness.types import OVERALL, Build, Check, Columns, Comparison, Gates, Status, Tier, Verdict
from harness.wording import deciding, tiers

__all__ = ["judge", "load_gates"]

_NO_NAN = "a row with NaN or infinite logits is never right"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The rows of a comparison whose KL is finite, and how many are not."""

    units: Units
    positions: Columns
    floor: Columns | None
    baseline: Columns | None
    broken: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """Ratios that wait for the number of questions asked, which decides their share of the error probability."""

    tier: Tier
    statistic: str
    build: Build
    smoke: bool
    units: Units
    above: Floats  # [U] sums of the numerator
    below: Floats  # [U] and of the denominator
    ratios: Ratios


def judge(comparison: Comparison, gates: Gates, *, twins: Sequence[Comparison] = ()) -> Verdict:
    """Hold a comparison against limits.

    Args:
        comparison: candidate, reference, and if given floor and baseline, at the same positions.
        gates: the limits.
        twins: the same code in float32 against the same reference. May fail the build, never pass it.

    Returns a Verdict; its status is None if something bars a judgement (misplaced rows, a reference with NaN, ...).
    Raises UsageError for a twin that is not float32, and for gates that lack a limit.
    """
    for twin in twins:
        _require_float32(twin)
    obstacles = [reason for one in (comparison, *twins) for reason in barred(one)]
    if obstacles:
        return Verdict(status=None, word="COULD NOT JUDGE", reasons=tuple(obstacles[:3]))
    no_floor, notes = unfit_floor(comparison, gates)
    no_baseline = unfit_baseline(comparison)
    rows = _finite(
        comparison,
        floor=None if no_floor else comparison.floor,
        baseline=None if no_baseline else comparison.baseline,
    )
    tier: Tier = "phases" if comparison.of_itself else "precision"
    cases: list[tuple[Comparison, _Rows, Tier]] = [(comparison, rows, tier)]
    cases += [(twin, _finite(twin), "logic") for twin in twins]
    questions = [question for case in cases for question in _questions(*case)]
    share = gates.fail_level / max(1, sum(len(q.ratios.strata) for q in questions if q.tier != "change"))
    answers = [_answers(question, gates, share) for question in questions]
    checks = [check for case in cases for check in _counts(*case, gates)] + [c for answer in answers for c in answer]
    findings = [f.message for f in comparison.findings]
    findings += [f"twin (float32): {f.message}" for twin in twins for f in twin.findings]
    held_back = [reason for reason in (no_floor, no_baseline) if reason]
    status = _status(checks, findings, held_back)
    return Verdict(
        status=status,
        word=_word(status, comparison),
        reasons=deciding(status, checks, findings, held_back, _margin(gates, comparison.candidate.manifest.build)),
        checks=tuple(checks),
        estimates=summarise(rows.units, rows.positions, rows.floor, rows.baseline) if len(rows.units.rows) else (),
        flip_bins=flip_bins(rows.positions, rows.floor),
        task_bounds={} if comparison.of_itself else task_bounds(rows.positions),
        remedy=_remedy(questions, answers, comparison, gates, share) if status is Status.INCONCLUSIVE else "",
        notes=(*notes, *_notes(comparison, twins, checks, gates)),
    )


def _require_float32(twin: Comparison) -> None:
    build = twin.candidate.manifest.build
    if build.dtype != "float32":
        raise UsageError(
            f"the twin {twin.candidate.path} was recorded with dtype {build.dtype}: a twin is the candidate's code "
            "with dtype float32; record it with --dtype float32"
        )


def _finite(comparison: Comparison, *, floor: Columns | None = None, baseline: Columns | None = None) -> _Rows:
    positions = comparison.positions
    kept = np.isfinite(positions["kl20"]) & np.isfinite(positions["kl_full"]) & (positions["nan_candidate"] == 0)

    def sound(columns: Columns) -> Columns:
        return {name: column[kept] for name, column in columns.items()}

    rows = sound(positions)
    return _Rows(
        units=group(rows),
        positions=rows,
        floor=None if floor is None else sound(floor),
        baseline=None if baseline is None else sound(baseline),
        broken=int((~kept).sum()),
        total=len(kept),
    )


def _questions(comparison: Comparison, rows: _Rows, tier: Tier) -> Iterator[_Question]:
    """What the judge asks of one comparison with bounds: against floor, baseline, or for a twin nothing but zero."""
    below: dict[str, tuple[Tier, Floats]] = {}
    if tier == "logic":
        below["twin_mean"] = (tier, rows.units.rows.astype(np.float64))
    if rows.floor is not None:
        below["ratio_to_floor"] = (tier, rows.units.sums(rows.floor["kl20"]))
    if rows.baseline is not None:
        below["ratio_to_baseline"] = ("change", rows.units.sums(rows.baseline["kl20"]))
    above = rows.units.sums(rows.positions["kl20"])
    for statistic, (asked_for, sums) in below.items():
        found = ratios(rows.units, above, sums)
        yield _Question(
            tier=asked_for,
            statistic=statistic,
            build=comparison.candidate.manifest.build,
            smoke=comparison.smoke,
            units=rows.units,
            above=above,
            below=sums,
            ratios=found.without_cells() if comparison.smoke else found,
        )


def _answers(question: _Question, gates: Gates, share: float) -> list[Check]:
    found = question.ratios
    with np.errstate(over="ignore"):
        value, low, high = np.exp(found.log_ratio), np.exp(found.low(share)), np.exp(found.high(gates.pass_level))
    checks = []
    for s, stratum in enumerate(found.strata):
        limited = _limited_as(question.statistic, question.tier)
        gate = gate_for(gates, limited, question.build, stratum, smoke=question.smoke)
        if high[s] < gate.limit:
            status = Status.PASS
        elif low[s] > gate.limit and question.tier != "change":
            status = Status.FAIL
        else:
            status = Status.INCONCLUSIVE
        checks.append(
            Check(
                metric=gate.metric,
                statistic=question.statistic,
                stratum=stratum,
                value=float(value[s]),
                low=float(low[s]),
                high=float(high[s]),
                limit=gate.limit,
                status=status,
                positions=int(found.positions[s]),
                clusters=int(found.clusters[s]),
                reason=gate.reason,
                detectable=float(detectable(gate.limit, found.error[s], found.freedom[s], share)),
                tier=question.tier,
            )
        )
    return checks


def _limited_as(statistic: str, tier: Tier) -> str:
    """What gates call a statistic: the ratio between phases is limited apart from the ratio to the reference."""
    return "phase_ratio_to_floor" if (statistic, tier) == ("ratio_to_floor", "phases") else statistic


def _counts(comparison: Comparison, rows: _Rows, tier: Tier, gates: Gates) -> tuple[Check, Check]:
    build = comparison.candidate.manifest.build
    gate, margin = gate_for(gates, "count_above_margin", build, OVERALL), _margin(gates, build)
    large = int((rows.positions["flip"].astype(np.bool_) & (rows.positions["margin"] > margin)).sum())
    clusters = len(np.unique(np.asarray(comparison.positions["document"])))
    broken = _count("nan_candidate", "count", rows.broken, 0.0, rows.total, clusters, tier, _NO_NAN)
    flips = _count("flip", gate.statistic, large, gate.limit, rows.total - rows.broken, clusters, tier, gate.reason)
    return broken, flips


def _count(
    metric: str, statistic: str, value: int, limit: float, positions: int, clusters: int, tier: Tier, reason: str
) -> Check:
    return Check(
        metric=metric,
        statistic=statistic,
        stratum=OVERALL,
        value=float(value),
        low=float(value),
        high=float(value),
        limit=limit,
        status=Status.FAIL if value > limit else Status.PASS,
        positions=positions,
        clusters=clusters,
        reason=reason,
        detectable=math.floor(limit) + 1.0,
        tier=tier,
    )


def _margin(gates: Gates, build: Build) -> float:
    margin = gate_for(gates, "count_above_margin", build, OVERALL).margin
    if margin is None:
        raise UsageError(
            f"{gates.source or 'the gates'}: the gate for count_above_margin has no margin: set one, in logits"
        )
    return margin


def _status(checks: Iterable[Check], findings: Sequence[str], held_back: Sequence[str]) -> Status:
    states = {check.status for check in checks}
    if findings or Status.FAIL in states:
        return Status.FAIL
    if held_back or Status.INCONCLUSIVE in states:
        return Status.INCONCLUSIVE
    return Status.PASS


def _word(status: Status, comparison: Comparison) -> str:
    """What a PASS is a pass of, if it is no sign-off."""
    short_of = [name for name, so in (("smoke", comparison.smoke), ("phases agree", comparison.of_itself)) if so]
    return f"PASS ({', '.join(short_of)})" if status is Status.PASS and short_of else str(status)


def _remedy(
    questions: Sequence[_Question],
    answers: Sequence[Sequence[Check]],
    comparison: Comparison,
    gates: Gates,
    share: float,
) -> str:
    said = []
    for question, checks in zip(questions, answers, strict=True):
        found = question.ratios
        moves = [_most_influential(question, question.units.mask(stratum)) for stratum in found.strata]
        said.append(
            remedy(
                checks,
                list(zip(found.error.tolist(), found.freedom.tolist(), strict=True)),
                moves,
                comparison.candidate.manifest,
                question.units,
                fail_level=share,
                pass_level=gates.pass_level,
            )
        )
    return "; ".join(text for text in said if text)


def _most_influential(question: _Question, inside: NDArray[np.bool_]) -> str:
    above, below = question.above[inside], question.below[inside]
    with np.errstate(divide="ignore", invalid="ignore"):
        residual = np.abs(above / above.sum() - below / below.sum())
    return str(question.units.segment[inside][np.argmax(np.nan_to_num(residual))])


def _notes(comparison: Comparison, twins: Sequence[Comparison], checks: Sequence[Check], gates: Gates) -> list[str]:
    build = comparison.candidate.manifest.build
    notes = [*tiers(checks), *unsaid(comparison, twins)]
    notes += [f"the twin does not cover {what}" for twin in twins for what in not_covered(build, twin)]
    statistics = {_limited_as(check.statistic, check.tier) for check in checks} - {"count"}
    provisional = [
        s for s in sorted(statistics) if gate_for(gates, s, build, OVERALL, smoke=comparison.smoke).provisional
    ]
    if provisional:
        notes.append(f"provisional limits, not yet generated from benign builds: {', '.join(provisional)}")
    if comparison.smoke:
        notes.append(f"a smoke corpus, never a sign-off: overall and phases only{_smoke_limits(build, checks, gates)}")
    return notes


def _smoke_limits(build: Build, checks: Sequence[Check], gates: Gates) -> str:
    """Which limits are those of smoke corpora, and what a sign-off would use instead; empty if none is."""
    said: dict[str, None] = {}  # in the order of the checks, each once
    for check in checks:
        if check.statistic in BOUNDED and check.tier != "logic":
            usual = gate_for(gates, _limited_as(check.statistic, check.tier), build, check.stratum).limit
            if check.limit != usual:
                said[f", {check.statistic} held to the smoke limit {check.limit:g} (a sign-off uses {usual:g})"] = None
    return "".join(said)
