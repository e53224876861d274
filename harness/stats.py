"""Ratios of mean KL with clustered intervals: the primary statistic and everything the judge decides on.

The statistic is log(sum of candidate / sum of floor) over the same positions. Its error comes from the linearised
residual of each cluster, e_g = C_g / C - F_g / F (delta method for a ratio of sums; Cochran, "Sampling Techniques",
ch. 6), so whatever makes a position sensitive for both builds cancels.

Clusters. Inside one cell (phase x kind x depth) they are segments. Segments of one document at several depths score
the same tokens, so in every stratum that spans depths the clusters are documents. Kinds are fixed by the corpus, not
drawn: where a stratum spans kinds, residuals are centred by kind, so that a difference between kinds is no error.

Cells share variances, and few documents borrow them: `_variance` says when.

Shape legend: P positions, U units (one segment in one phase), G clusters, S strata, ... any leading axes. The leading
axes exist for the simulation study, which runs thousands of synthetic comparisons through this very code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harness._variance import FEW_FREEDOM, Floats, Part, clustered, lend, share
from harness.types import OVERALL, Columns, Phase, Stratum

__all__ = [
    "FEW_FREEDOM",
    "Floats",
    "Ratios",
    "Units",
    "cells",
    "contrast",
    "group",
    "mean",
    "ratios",
    "student_quantile",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Which positions share a segment and a phase, and what each such unit is."""

    segment: NDArray[np.str_]  # [U]
    document: NDArray[np.str_]  # [U]
    kind: NDArray[np.str_]  # [U]
    depth: NDArray[np.int64]  # [U]
    phase: NDArray[np.str_]  # [U] values of Phase
    rows: NDArray[np.int64]  # [U] positions of the unit
    of_position: NDArray[np.intp]  # [P] unit of each position; empty if made without positions

    def sums(self, column: NDArray[np.float64]) -> Floats:
        """Sum of a [P] column over each unit, [U] f64. NaN and Inf travel into the sum of their unit."""
        return np.asarray(np.bincount(self.of_position, weights=column, minlength=len(self.rows)), np.float64)

    def mask(self, stratum: Stratum) -> NDArray[np.bool_]:
        """Units that belong to the stratum, [U]."""
        inside = np.ones(len(self.rows), np.bool_)
        if stratum.phase is not None:
            inside &= self.phase == str(stratum.phase)
        if stratum.kind is not None:
            inside &= self.kind == stratum.kind
        if stratum.depth is not None:
            inside &= self.depth == stratum.depth
        return inside

    def positions(self, stratum: Stratum) -> NDArray[np.bool_]:
        """Positions that belong to the stratum, [P]."""
        return self.mask(stratum)[self.of_position]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Log ratio of sums for each stratum, with its standard error.

    `log_ratio` is -inf where the candidate's sum is zero, NaN where the floor's is zero. `error` is NaN where nothing
    is known about it (one cluster and no other cell to borrow from): unknown, not zero. `freedom` is then zero.
    """

    strata: tuple[Stratum, ...]  # [S]
    log_ratio: Floats  # [..., S]
    error: Floats  # [..., S] standard error of log_ratio
    freedom: Floats  # [..., S] degrees of freedom of error
    positions: NDArray[np.int64]  # [S]
    clusters: NDArray[np.int64]  # [S]

    def without_cells(self) -> Ratios:
        """Overall and phases only: what a smoke corpus is judged by, whose cells have two segments."""
        kept = [s for s, stratum in enumerate(self.strata) if stratum.kind is None]
        return Ratios(
            strata=tuple(self.strata[s] for s in kept),
            log_ratio=self.log_ratio[..., kept],
            error=self.error[..., kept],
            freedom=self.freedom[..., kept],
            positions=self.positions[kept],
            clusters=self.clusters[kept],
        )

    def low(self, level: float) -> Floats:
        """One-sided lower bound of log_ratio at error probability `level`, [..., S]; -inf where unknown."""
        return self._bound(level, -1.0)

    def high(self, level: float) -> Floats:
        """One-sided upper bound of log_ratio at error probability `level`, [..., S]; +inf where unknown."""
        return self._bound(level, 1.0)

    def _bound(self, level: float, side: float) -> Floats:
        width = student_quantile(1.0 - level, self.freedom) * self.error
        bound = self.log_ratio + side * width
        # A sum of zero is exactly zero, whatever its error; NaN means that nothing is known.
        bound = np.where(np.isneginf(self.log_ratio), -np.inf, bound)
        return np.where(np.isnan(bound), side * np.inf, bound)


def student_quantile(probability: float, freedom: ArrayLike) -> Floats:
    """Quantile of Student's t; NaN where freedom is not positive."""
    from scipy.special import stdtrit  # here, because scipy costs a tenth of a second to import

    degrees = np.asarray(freedom, np.float64)
    known = degrees > 0
    return np.where(known, stdtrit(np.where(known, degrees, 1.0), probability), np.nan)


def group(positions: Columns) -> Units:
    """Groups positions into units by their `segment` and `phase` columns, in order of first appearance in sort order.

    Takes the place columns `segment`, `phase`, `document`, `kind`, `depth`, each [P]. Zero positions give zero units.
    """
    segment, segment_code = np.unique(np.asarray(positions["segment"]), return_inverse=True)
    phase, phase_code = np.unique(np.asarray(positions["phase"]), return_inverse=True)
    key = segment_code.astype(np.int64) * max(len(phase), 1) + phase_code
    _, first, of_position, rows = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    return Units(
        segment=segment[segment_code[first]].astype(np.str_),
        document=np.asarray(positions["document"])[first].astype(np.str_),
        kind=np.asarray(positions["kind"])[first].astype(np.str_),
        depth=np.asarray(positions["depth"])[first].astype(np.int64),
        phase=phase[phase_code[first]].astype(np.str_),
        rows=rows.astype(np.int64),
        of_position=of_position,
    )


def wide_strata(units: Units) -> tuple[Stratum, ...]:
    """Overall, then each phase that has rows. Empty if there are no units."""
    if not len(units.rows):
        return ()
    present = [phase for phase in Phase if (units.phase == str(phase)).any()]
    return (OVERALL, *(Stratum(phase=phase) for phase in present))


def cells(units: Units) -> tuple[Stratum, ...]:
    """Every phase x kind x depth that has rows, sorted."""
    keys = sorted(set(zip(units.phase.tolist(), units.kind.tolist(), units.depth.tolist(), strict=True)))
    return tuple(Stratum(phase=Phase(phase), kind=kind, depth=depth) for phase, kind, depth in keys)


def ratios(units: Units, candidate: Floats, floor: Floats, *, few_freedom: float = FEW_FREEDOM) -> Ratios:
    """Log ratio of sums for overall, each phase and each cell, in that order.

    Args:
        units: what the sums are over.
        candidate: sums per unit, [..., U].
        floor: sums per unit at the same positions, [..., U]; `units.rows` makes the ratio a mean.
        few_freedom: below it variances are borrowed; an argument only so that a study can show what 0 would do.

    Variances are kept per position (error**2 x positions), so that cells of different size can share them.
    """
    narrow = share([_part(units, s, units.segment, candidate, floor) for s in cells(units)], few_freedom)
    wide = [_part(units, s, units.document, candidate, floor) for s in wide_strata(units)]
    parts = [lend(narrow, part) if part.freedom.max(initial=0.0) < few_freedom else part for part in wide] + narrow
    if not parts:
        nothing, none = np.empty((*np.shape(candidate)[:-1], 0)), np.empty(0, np.int64)
        return Ratios(strata=(), log_ratio=nothing, error=nothing, freedom=nothing, positions=none, clusters=none)
    positions = np.array([p.positions for p in parts])
    return Ratios(
        strata=tuple(p.stratum for p in parts),
        log_ratio=np.stack([p.log_ratio for p in parts], axis=-1),
        error=np.sqrt(np.stack([p.variance for p in parts], axis=-1) / positions),
        freedom=np.stack([p.freedom for p in parts], axis=-1),
        positions=positions,
        clusters=np.array([p.clusters for p in parts]),
    )


def contrast(units: Units, candidate: Sequence[Floats], floor: Sequence[Floats]) -> tuple[float, float, float]:
    """Log of (ratio in the first part / ratio in the second) with its standard error and degrees of freedom.

    Each argument is a pair of [U] sums: the positions of the first part, and of the second. Clusters are documents,
    centred by kind. NaN where a part has no positions or a sum of zero.
    """
    residual = np.zeros(len(units.rows))
    value = 0.0
    for sign, above, below in zip((1.0, -1.0), candidate, floor, strict=True):
        total, base = above.sum(), below.sum()
        if not (total > 0 and base > 0):
            return np.nan, np.nan, 0.0
        value += sign * float(np.log(total / base))
        residual += sign * (above / total - below / base)
    variance, freedom, _ = clustered(residual, units.document, units.kind)
    return value, float(np.sqrt(variance)), freedom


def mean(units: Units, sums: Floats) -> tuple[float, float, float]:
    """Mean per position of a column of any sign from its [U] sums, its standard error, and degrees of freedom.

    Clusters are documents, centred by kind. NaN if there are no positions; the error is NaN for a single document.
    """
    positions = units.rows.sum()
    if not positions:
        return np.nan, np.nan, 0.0
    value = float(sums.sum() / positions)
    variance, freedom, _ = clustered((sums - value * units.rows) / positions, units.document, units.kind)
    return value, float(np.sqrt(variance)), freedom


def _part(units: Units, stratum: Stratum, cluster: NDArray[np.str_], candidate: Floats, floor: Floats) -> Part:
    inside = units.mask(stratum)
    above, below = candidate[..., inside], floor[..., inside]
    total, base = above.sum(-1, keepdims=True), below.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratio = np.where(base > 0, np.log(total / base), np.nan)[..., 0]
        residual = above / total - below / base
    variance, freedom, clusters = clustered(residual, cluster[inside], units.kind[inside])
    positions = int(units.rows[inside].sum())
    return Part(
        stratum=stratum,
        total=total[..., 0],
        log_ratio=log_ratio,
        variance=variance * positions,
        freedom=np.full(variance.shape, freedom),
        own=np.ones(variance.shape, np.bool_),
        pool=None,
        positions=positions,
        clusters=clusters,
    )
