"""Where a difference sits, in words.

Everything is read off the typed result: ratios of sums over parts of its columns, and the trends with the intervals
that the judge's summary made. Nothing here decides; it says where to look first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from harness.report import strata
from harness.types import OVERALL, Comparison, Estimate, Status, Verdict

SHARE_OF_LARGEST = 0.5
"""A level belongs to where the difference sits if its excess over the floor is at least this share of the largest."""

OUTLIER = 3.0
"""A text stands out if its ratio is this many times the median text's."""

APART = 2.0
"""Batch sizes differ if one has this many times the least one's KL, over what their cells lead one to expect."""

FEWEST_ROWS = 32
"""Rows from which a batch size is looked at."""

PLAIN = 10.0
"""From this multiple on, a boundary or a step stands out in a phase that as a whole does not."""

SPARED = 30.0
"""A text is spared if its ratio is this many times below the median text's."""

FEW_ROWS = 0.01
"""The share of rows whose part of the whole KL is given."""

Rows = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One answer: what was asked, the answer in a few words, and the numbers behind it."""

    question: str
    answer: str
    evidence: str
    stands_out: bool = False  # whether it narrows down where to look


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One value of a column and how far from normal its rows are."""

    name: str
    ratio: float  # of sums of KL20 to the floor's; without a floor the mean KL20 in nats
    rows: int


def headline(comparison: Comparison, verdict: Verdict) -> str:
    """One sentence: how large, and which phase, kind and depth."""
    if verdict.status is None:
        return "It could not be judged: the numbers below are of rows that may not be what they say."
    ratio = strata.estimate(verdict, OVERALL, "ratio_to_floor")
    if ratio is None:
        return "Without a floor nobody can say what is normal: only absolute KL is shown."
    size = f"The candidate is {times(ratio.value)} as far from the reference as the floor is"
    if not _excess(verdict):
        low, high = _extremes(verdict)
        return f"{size}. Nothing to locate: over all strata the ratio goes from {low} to {high}."
    hot, rows = _hot_phases(comparison, strata.finite(comparison))
    where = " and ".join(hot) if hot else "both phases"
    kinds = _hot(levels(comparison, "kind", rows))
    depths = [int(name) for name in _hot(levels(comparison, "depth", rows))]
    every = strata.depths(comparison.positions)
    parts = [where]
    parts.append(", ".join(kinds) if len(kinds) < len(strata.kinds(comparison.positions)) else "every kind of text")
    if len(every) > 1:
        whole = len(depths) == len(every)
        parts.append("every depth" if whole else f"depth {', '.join(map(str, depths))} more than the others")
    return f"{size}. It sits in: {'; '.join(parts)}."


def places(comparison: Comparison, verdict: Verdict) -> tuple[Place, ...]:
    """The answers, most telling columns first; empty where nothing could be judged."""
    if verdict.status is None or not strata.strata(verdict):
        return ()
    kept = strata.finite(comparison)
    excess = _excess(verdict)
    hot, inside = _hot_phases(comparison, kept) if excess else ([], kept)
    found = [
        _phase(comparison, kept, hot),
        *_kind(comparison, inside, excess),
        *_depth(comparison, verdict, inside),
        *_trend(verdict, hot, "trend_step", "Decode steps", "the last third of the steps", "the first third"),
        *_trend(verdict, hot, "trend_chunk", "Chunk boundary", "the first 4 rows of a prefill chunk", "the other rows"),
        *_trend(verdict, hot, "trend_block", "KV block boundary", "the first 4 rows of a KV block", "the other rows"),
        *_batch(comparison, inside),
        *_cached(comparison, inside, excess),
        _concentration(comparison, inside),
        *_texts(comparison, inside),
    ]
    # What is normal as a whole is normal wherever it sits, and of a dozen looks one is bound to find something.
    return (*_broken_rows(comparison), *(p if excess else replace(p, stands_out=False) for p in found))


def levels(comparison: Comparison, column: str, inside: Rows) -> list[Level]:
    """How far from normal the rows of each value of a column are, in the column's own order."""
    values = np.asarray(comparison.positions[column])
    order: list[object] = sorted({v.item() for v in np.unique(values[inside])})
    result = []
    for value in order:
        rows = inside & (values == value)
        result.append(Level(name=str(value), ratio=_ratio(comparison, rows), rows=int(rows.sum())))
    return result


def times(value: float) -> str:
    """A ratio in words: "1.06 x", "12 x", "1,030 x"."""
    if math.isnan(value):
        return "an unknown multiple"
    if not math.isfinite(value) or value >= 1e6:
        return f"{value:.1e} x"
    return f"{value:.2f} x" if value < 10 else f"{float(f'{value:.3g}'):,.0f} x"


# --------------------------------------------------------------------------- one answer each


def _broken_rows(comparison: Comparison) -> Iterator[Place]:
    broken = ~strata.finite(comparison)
    if broken.any():
        at, count = np.flatnonzero(broken)[0], int(broken.sum())
        columns = comparison.positions
        first = f"{columns['segment'][at]}, {columns['phase'][at]}, index {columns['index'][at]}"
        phases = sorted(set(np.asarray(columns["phase"])[broken].tolist()))
        yield Place(
            question="NaN or infinite logits",
            answer=f"{count:,} {'row' if count == 1 else 'rows'}, in {' and '.join(phases)}",
            evidence=f"first at {first}; these rows are in no other number here",
            stands_out=True,
        )


def _phase(comparison: Comparison, kept: Rows, hot: list[str]) -> Place:
    found = levels(comparison, "phase", kept)
    if len(found) < 2:
        return Place(question="Phase", answer=f"only {found[0].name} was scored", evidence=_numbers(comparison, found))
    one = len(hot) == 1
    if not hot:
        answer = "no phase stands out"
    elif one:
        answer = f"{hot[0]}: look at what only {hot[0]} runs"
    else:
        answer = "both alike: look at what prefill and decode share"
    return Place(question="Phase", answer=answer, evidence=_numbers(comparison, found), stands_out=one)


def _kind(comparison: Comparison, inside: Rows, excess: bool) -> Iterator[Place]:
    found = levels(comparison, "kind", inside)
    if len(found) < 2:
        return
    hot = _hot(found) if excess else []
    some = 0 < len(hot) < len(found)
    answer = f"mostly {', '.join(hot)}" if some else "all kinds of text alike"
    yield Place(question="Kind of text", answer=answer, evidence=_numbers(comparison, found), stands_out=some)


def _depth(comparison: Comparison, verdict: Verdict, inside: Rows) -> Iterator[Place]:
    found = levels(comparison, "depth", inside)
    if len(found) < 2:
        return
    trend = strata.estimate(verdict, OVERALL, "trend_depth")
    says = _direction(trend)
    answer = {
        1: "grows with the context",
        -1: "larger at short contexts",
        0: "no trend with depth is shown",
    }[says]
    ends = f"; deepest over shallowest {_interval(trend)}" if trend else ""
    yield Place(
        question="Context depth", answer=answer, evidence=_numbers(comparison, found) + ends, stands_out=says != 0
    )


def _trend(verdict: Verdict, hot: list[str], statistic: str, question: str, first: str, second: str) -> Iterator[Place]:
    for trend in (e for e in verdict.estimates if e.statistic == statistic):
        elsewhere = bool(hot) and trend.stratum.phase is not None and str(trend.stratum.phase) not in hot
        small = elsewhere and 1 / PLAIN < trend.value < PLAIN  # of a phase that is as it should be: one of many looks
        says = 0 if small else _direction(trend)
        answer = {1: f"worse in {first}", -1: f"worse in {second}", 0: "no difference is shown"}[says]
        yield Place(
            question=question,
            answer=answer,
            evidence=f"{first} over {second}: {_interval(trend)}",
            stands_out=says != 0,
        )


def _batch(comparison: Comparison, inside: Rows) -> Iterator[Place]:
    sizes = np.asarray(comparison.positions.get("batch_size", np.full(len(inside), -1)))
    found = [
        Level(name=str(size), ratio=_beyond_cells(comparison, inside & (sizes == size)), rows=int(rows))
        for size, rows in zip(*np.unique(sizes[inside & (sizes > 0)], return_counts=True), strict=True)
        if rows >= FEWEST_ROWS
    ]
    if len(found) < 2:
        return
    least = min(level.ratio for level in found)
    apart = [level.name for level in found if level.ratio > APART * least]
    yield Place(
        question="Requests in the step",
        answer=f"mostly steps of {', '.join(apart)}" if apart else "all batch sizes alike",
        evidence="over their phase, kind and depth as a whole: "
        + ", ".join(f"{level.name} {times(level.ratio)}" for level in found[:8]),
        stands_out=bool(apart),
    )


def _cached(comparison: Comparison, inside: Rows, excess: bool) -> Iterator[Place]:
    cached = np.asarray(comparison.positions.get("cached_tokens", np.full(len(inside), -1)))
    hit, missed = inside & (cached > 0), inside & (cached == 0)
    if hit.any() and missed.any():
        found = [
            Level(name=name, ratio=_ratio(comparison, rows), rows=int(rows.sum()))
            for name, rows in (("with a cached prefix", hit), ("without", missed))
        ]
        hot = _hot(found) if excess else []
        some = len(hot) == 1
        answer = f"mostly rows {hot[0]}" if some else "no difference between cached and computed prefixes"
        yield Place(question="Prefix cache", answer=answer, evidence=_numbers(comparison, found), stands_out=some)


def _concentration(comparison: Comparison, inside: Rows) -> Place:
    """How much of all KL the worst rows hold, beside the same share for the floor."""
    few = max(1, round(FEW_ROWS * int(inside.sum())))
    shares = [_share(c["kl20"][inside], few) for c in (comparison.positions, comparison.floor) if c is not None]
    normal = f", {shares[1]:.0%} in the floor" if len(shares) > 1 else ""
    sparse = len(shares) > 1 and shares[0] > max(0.5, 2 * shares[1])
    answer = "a few rows: look at the worst positions" if sparse else "spread over the rows, not a few outliers"
    evidence = f"the worst {few:,} rows (1 %) hold {shares[0]:.0%} of all KL{normal}"
    return Place(question="Rows", answer=answer, evidence=evidence, stands_out=sparse)


def _texts(comparison: Comparison, inside: Rows) -> Iterator[Place]:
    found = sorted(levels(comparison, "segment", inside), key=lambda level: -level.ratio)
    if len(found) < 3:
        return
    middle = float(np.median([level.ratio for level in found]))
    far = [level for level in found if level.ratio > OUTLIER * middle]
    spared = [level for level in found if level.ratio < middle / SPARED]
    answer = f"{len(far)} of {len(found)} texts stand out" if far else "no text stands out"
    shown = f"largest: {_numbers(comparison, found[:3])}"
    if spared and not far:
        answer = f"{len(spared)} of {len(found)} texts are spared: what sets them apart? (their row of the batch?)"
        shown = f"spared: {_numbers(comparison, spared[:3])}"
    yield Place(
        question="Texts",
        answer=answer,
        evidence=f"{shown}; median text {_amount(comparison, middle)}",
        stands_out=bool(far or spared),
    )


# --------------------------------------------------------------------------- numbers


def _ratio(comparison: Comparison, rows: Rows) -> float:
    total = float(np.sum(comparison.positions["kl20"][rows]))
    if comparison.floor is None:
        return total / int(rows.sum()) if rows.any() else math.nan
    below = float(np.sum(comparison.floor["kl20"][rows]))
    return total / below if below > 0 else math.nan


def _beyond_cells(comparison: Comparison, rows: Rows) -> float:
    """KL20 of some rows over what their cells lead one to expect: 1 where nothing but the cell matters.

    Batches end with the longest texts, so that their sizes go with depth and kind.
    """
    columns, kept = comparison.positions, strata.finite(comparison)
    normal = np.ones(len(kept)) if comparison.floor is None else np.asarray(comparison.floor["kl20"], np.float64)
    names = [np.unique(np.asarray(columns[name]), return_inverse=True)[1] for name in ("phase", "kind", "depth")]
    cell = np.ravel_multi_index(names, [int(n.max()) + 1 for n in names])
    found, below = (np.bincount(cell[kept], weights=v[kept]) for v in (columns["kl20"], normal))
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = float(np.sum((found / below)[cell[rows]] * normal[rows]))
    return float(np.sum(columns["kl20"][rows])) / expected if expected > 0 else math.nan


def _share(kl20: NDArray[np.float64], few: int) -> float:
    total = float(kl20.sum())
    return float(np.sort(kl20)[-few:].sum()) / total if total > 0 else 0.0


def _hot(found: list[Level]) -> list[str]:
    """Levels whose excess over normal is at least SHARE_OF_LARGEST of the largest one's."""
    excess = {level.name: level.ratio - 1.0 for level in found if math.isfinite(level.ratio)}
    largest = max(excess.values(), default=0.0)
    return [name for name, value in excess.items() if largest > 0 and value >= SHARE_OF_LARGEST * largest]


def _hot_phases(comparison: Comparison, kept: Rows) -> tuple[list[str], Rows]:
    """Phases the difference sits in, and the rows of those (all rows if none stands out)."""
    found = levels(comparison, "phase", kept)
    hot = _hot(found)
    if len(hot) == len(found) or comparison.floor is None:
        return (hot, kept)
    return hot, kept & np.isin(np.asarray(comparison.positions["phase"]), hot) if hot else kept


def _excess(verdict: Verdict) -> bool:
    """Whether there is something to locate: not a pass, or an interval that lies above the limit."""
    limit = strata.ratio_limit(verdict)
    ratios = [e for e in verdict.estimates if e.statistic == "ratio_to_floor"]
    return verdict.status is not Status.PASS and any(limit is not None and e.value > limit for e in ratios)


def _extremes(verdict: Verdict) -> tuple[str, str]:
    ratios = [e.value for e in verdict.estimates if e.statistic == "ratio_to_floor" and math.isfinite(e.value)]
    return times(min(ratios, default=math.nan)), times(max(ratios, default=math.nan))


def _direction(trend: Estimate | None) -> int:
    """1: above one for certain, -1: below, 0: the interval holds one, or is not known."""
    if trend is None or not (math.isfinite(trend.low) and math.isfinite(trend.high)):
        return 0
    return 1 if trend.low > 1 else -1 if trend.high < 1 else 0


def _interval(estimate: Estimate) -> str:
    if not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return f"{times(estimate.value)} (interval unknown)"
    return f"{times(estimate.value)} (95 %: {times(estimate.low)} to {times(estimate.high)})"


def _amount(comparison: Comparison, value: float) -> str:
    return times(value) if comparison.floor is not None else f"{value:.2e} nat"


def _numbers(comparison: Comparison, found: list[Level]) -> str:
    return ", ".join(f"{level.name} {_amount(comparison, level.ratio)}" for level in found)
