"""What is shown beside the verdict and never decides it: quantiles, flips by margin, trends, perplexity, task bound.

Medians and flips alone miss faults, quantiles of a few hundred rows are noise, and perplexity cannot see this level
at all; but they tell where to look.

Shape legend: P positions, U units (one segment in one phase).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from harness.stats import Units, contrast, mean, ratios, student_quantile
from harness.types import OVERALL, Columns, Estimate, FlipBin, Phase, Stratum

MARGIN_EDGES = (0.0, 0.1, 0.25, 0.5, 1.0, math.inf)
"""Logits. At a noise of 0.1 a margin of 0.1 flips in 24 % of cases, one of 0.5 in 2e-4, one of 1 in 1e-12."""

TAIL = 0.025
"""Error probability on each side of the intervals shown."""

PUBLISHED = (
    ("27B hybrid, bf16, prose, two kernels", 7e-4, 2.5e-4),
    ("27B hybrid, two implementations", 7.8e-4, 4.4e-4),
    ("32B dense, mean over samples", 6.7e-4, math.nan),
    ("two f32 engines", 4.5e-5, math.nan),
)
"""Mean and median KL in nats that others report between implementations they take as correct, for scale: what it was
measured on, and no limit. With mixtures of experts single tokens reach 0.1."""

TASK_BOUND = (
    "a task score cannot move by more than this if the texts are the reference's own samples; loose, because it lets "
    "every nat go into the one event that is scored: 500 steps of the normal difference already allow 0.4"
)
"""What the largest of `task_bounds` means, for every report that shows it."""

NEAR_BOUNDARY = 4
"""Rows after a chunk or block boundary that count as near it: faults there touch the first few."""


def summarise(
    units: Units, positions: Columns, floor: Columns | None, baseline: Columns | None
) -> tuple[Estimate, ...]:
    """Estimates over all strata. Columns are [P], finite, and in the order `units` was grouped from.

    Ratios have two-sided 95 % Student intervals, flip rates Clopper-Pearson ones (as if positions were independent,
    which flatters them by about a tenth), quantiles none.
    """
    shown = [*_perplexity(units, positions), *_trends(units, positions, floor)]
    for statistic, base in (("ratio_to_floor", floor), ("ratio_to_baseline", baseline)):
        shown += [] if base is None else _ratio_estimates(units, positions, base, statistic)
    shown += _ratio_estimates(units, positions, None, "mean")
    for estimate in [e for e in shown if e.statistic == "mean"]:
        inside = units.positions(estimate.stratum)
        shown += _plain(positions, floor, inside, estimate.stratum, estimate.segments)
    return tuple(shown)


def flip_bins(positions: Columns, floor: Columns | None) -> tuple[FlipBin, ...]:
    """Flips by the reference's margin, pooled over the recording; discordant pairs against the floor.

    The prediction is the sum of Phi(-margin / (sqrt(2) sigma)) with sigma the floor's own logit error at that position
    (`error_plain`: rms after the best common offset). It never comes from the candidate: a candidate's flips are not
    excused by its own deviation. Bins are [low, high); all are returned, empty ones too.
    """
    from scipy.special import bdtrc, ndtr

    margin, flip = positions["margin"], positions["flip"].astype(np.bool_)
    normal = None if floor is None else floor["flip"].astype(np.bool_)
    chance = None
    if floor is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            # No noise at a tie is 0 / 0: no flip.
            chance = np.nan_to_num(ndtr(-margin / (math.sqrt(2.0) * floor["error_plain"])))
    bins = []
    for low, high in pairwise(MARGIN_EDGES):
        inside = (margin >= low) & (margin < high)
        flips, count = int((flip & inside).sum()), int(inside.sum())
        more = None if normal is None else int((flip & ~normal & inside).sum())
        less = None if normal is None else int((normal & ~flip & inside).sum())
        p_value = math.nan
        if more is not None and less is not None:
            p_value = float(bdtrc(more - 1, more + less, 0.5)) if more else 1.0
        rate_low, rate_high = exact_interval(flips, count)
        bins.append(
            FlipBin(
                low=low,
                high=high,
                positions=count,
                candidate=flips,
                floor=None if normal is None else int((normal & inside).sum()),
                only_candidate=more,
                only_floor=less,
                p_value=p_value,
                rate_low=rate_low,
                rate_high=rate_high,
                predicted=math.nan if chance is None else float(chance[inside].sum()),
            )
        )
    return tuple(bins)


def exact_interval(hits: int, trials: int, tail: float = TAIL) -> tuple[float, float]:
    """Clopper-Pearson interval of a rate with error probability `tail` on each side; (0, 1) for no trials."""
    from scipy.special import betaincinv

    low = float(betaincinv(hits, trials - hits + 1, tail)) if hits else 0.0
    high = float(betaincinv(hits + 1, trials - hits, 1.0 - tail)) if hits < trials else 1.0
    return low, high


def task_bounds(positions: Columns) -> dict[str, float]:
    """sqrt(1/2 sum KL) over each segment's decode rows: how far a score in [0, 1] could move (chain rule, Pinsker).

    Loose: it allows every nat to go into the one event that is scored, and at the normal difference it already says
    0.4 for 500 steps. It holds for text that the reference itself sampled; for other text it is only a scale. Bounds
    above 1 say nothing and are given as 1.
    """
    decoded = np.asarray(positions["phase"]) == str(Phase.DECODE)
    names, code = np.unique(np.asarray(positions["segment"])[decoded], return_inverse=True)
    sums = np.bincount(code, weights=positions["kl_full"][decoded], minlength=len(names))
    return {str(name): min(1.0, math.sqrt(0.5 * total)) for name, total in zip(names, sums, strict=True)}


def _plain(
    positions: Columns, floor: Columns | None, inside: NDArray[np.bool_], stratum: Stratum, segments: int
) -> Iterator[Estimate]:
    """Median, p90, p99, max, flip rate, and the floor's mean and median beside them."""

    def shown(metric: str, statistic: str, value: float, low: float = math.nan, high: float = math.nan) -> Estimate:
        return Estimate(
            metric=metric,
            statistic=statistic,
            stratum=stratum,
            value=value,
            low=low,
            high=high,
            positions=int(inside.sum()),
            segments=segments,
        )

    divergence = positions["kl20"][inside]
    for statistic, quantile in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
        yield shown("kl20", statistic, float(np.quantile(divergence, quantile)))
    yield shown("kl_full", "mean", float(positions["kl_full"][inside].mean()))
    flips = positions["flip"][inside]
    yield shown("flip", "rate", float(flips.mean()), *exact_interval(int(flips.sum()), len(flips)))
    if "baseline_kl20" in positions:
        yield shown("baseline_kl20", "mean", float(positions["baseline_kl20"][inside].mean()))
    if floor is not None:
        yield shown("kl20", "floor_mean", float(floor["kl20"][inside].mean()))
        yield shown("kl20", "floor_median", float(np.median(floor["kl20"][inside])))
        yield shown("kl20", "floor_p99", float(np.quantile(floor["kl20"][inside], 0.99)))
        yield shown("flip", "floor_rate", float(floor["flip"][inside].mean()))


def _ratio_estimates(units: Units, positions: Columns, base: Columns | None, statistic: str) -> list[Estimate]:
    """Mean KL20 over that of another recording, or over nothing: the mean itself."""
    below = units.rows.astype(np.float64) if base is None else units.sums(base["kl20"])
    found = ratios(units, units.sums(positions["kl20"]), below)
    return [
        Estimate(
            metric="kl20",
            statistic=statistic,
            stratum=stratum,
            value=float(np.exp(found.log_ratio[s])),
            low=float(np.exp(found.low(TAIL)[s])),
            high=float(np.exp(found.high(TAIL)[s])),
            positions=int(found.positions[s]),
            segments=int(found.clusters[s]),
        )
        for s, stratum in enumerate(found.strata)
    ]


def _perplexity(units: Units, positions: Columns) -> Iterator[Estimate]:
    """Exponential of mean negative log-likelihood, of both and of their ratio: beside the KL how little it sees.

    The standard errors are those of the perplexities themselves (delta method: perplexity x error of its log).
    """
    columns = {
        "reference": positions["nll_reference"],
        "candidate": positions["nll_candidate"],
        "candidate_over_reference": positions["nll_candidate"] - positions["nll_reference"],
    }
    for statistic, column in columns.items():
        value, error, freedom = mean(units, units.sums(column))
        yield (one := _exponential("perplexity", statistic, OVERALL, units, value, error, freedom))
        yield replace(one, statistic=f"{statistic}_error", value=one.value * error, low=math.nan, high=math.nan)


def _trends(units: Units, positions: Columns, floor: Columns | None) -> Iterator[Estimate]:
    """The ratio to the floor in one part of the positions over that in another: 1 is no trend.

    Without a floor it is the ratio of mean KL itself, which also carries the text's own differences.
    """
    divergence = positions["kl20"]
    base = floor["kl20"] if floor is not None else np.ones(len(divergence))
    for statistic, stratum, first, second in _parts(positions):
        if not (first.any() and second.any()):
            continue
        value, error, freedom = contrast(
            units,
            [units.sums(np.where(part, divergence, 0.0)) for part in (first, second)],
            [units.sums(np.where(part, base, 0.0)) for part in (first, second)],
        )
        yield _exponential("kl20", statistic, stratum, units, value, error, freedom)


def _parts(positions: Columns) -> Iterator[tuple[str, Stratum, NDArray[np.bool_], NDArray[np.bool_]]]:
    depth, step = np.asarray(positions["depth"]), np.asarray(positions["step"])
    if len(depth) and depth.min() < depth.max():
        yield "trend_depth", OVERALL, depth == depth.max(), depth == depth.min()
    steps = step.max(initial=-1) + 1
    if steps >= 3:
        yield "trend_step", Stratum(phase=Phase.DECODE), step >= 2 * steps // 3, (step >= 0) & (step < steps // 3)
    prefill = np.asarray(positions["phase"]) == str(Phase.PREFILL)  # each decode step is a chunk of its own
    for name, column, stratum, rows in (
        ("trend_chunk", "chunk_distance", Stratum(phase=Phase.PREFILL), prefill),
        ("trend_block", "block_distance", OVERALL, np.ones(len(prefill), np.bool_)),
    ):
        distance = np.asarray(positions[column])
        yield name, stratum, rows & (distance >= 0) & (distance < NEAR_BOUNDARY), rows & (distance >= NEAR_BOUNDARY)


def _exponential(
    metric: str, statistic: str, stratum: Stratum, units: Units, value: float, error: float, freedom: float
) -> Estimate:
    width = student_quantile(1.0 - TAIL, freedom) * error
    with np.errstate(over="ignore"):
        value, low, high = (float(np.exp(x)) for x in (value, value - width, value + width))
    return Estimate(
        metric=metric,
        statistic=statistic,
        stratum=stratum,
        value=value,
        low=low,
        high=high,
        positions=int(units.rows[units.mask(stratum)].sum()),
        segments=len(np.unique(units.document[units.mask(stratum)])),
    )
