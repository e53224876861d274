"""The variance of a log ratio in each stratum: from clusters, shared between cells, lent to strata of few documents.

Clusters. A stratum's own variance comes from the spread of its clusters' residuals around the mean of their kind.

Sharing. A cell's few segments know their own variance badly, so cells share one. Phases are other kernels, and how
much their ratio varies between texts differs: one variance for both makes the intervals of one too narrow and of the
other too wide. So cells share within their phase; where a phase has fewer than FEW_FREEDOM degrees of freedom, all
share one. A cell that is noisier than the others beyond chance keeps its own.

Lending. Under FEW_FREEDOM degrees of freedom a sample of documents cannot show its own variance (two documents of two
kinds: one-sided 1 % bounds are 7 to 14 standard errors wide). Then the larger of two variances stands: the documents'
own, and the one that the cells imply. It has the degrees of freedom of the data it comes from, counted for the cells
after Satterthwaite ("An approximate distribution of estimates of variance components", Biometrics Bulletin 2, 1946).

Shape legend: U units (one segment in one phase), G clusters, S cells, ... any leading axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from harness.types import Phase, Stratum

Floats = NDArray[np.float64]

OWN_VARIANCE_CHANCE = 0.001
"""Probability with which a cell as noisy as the others would keep its own variance (F test): with twelve cells, about
one recording in a hundred."""

FEW_FREEDOM = 8
"""Below this many degrees of freedom variances are borrowed (see the module's text)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stratum's log ratio of sums and what is known of its variance."""

    stratum: Stratum
    total: Floats  # [...] the candidate's sum
    log_ratio: Floats  # [...]
    variance: Floats  # [...] of log_ratio, times positions; NaN if unknown
    freedom: Floats  # [...]
    own: NDArray[np.bool_]  # [...] True: the variance is this part's own estimate, not one shared with other cells
    pool: Phase | None  # of a cell: the phase whose cells share a variance; None: all do
    positions: int
    clusters: int


def clustered(residual: Floats, cluster: NDArray[np.str_], kind: NDArray[np.str_]) -> tuple[Floats, float, int]:
    """Variance of the sum of residuals [..., U], its degrees of freedom, and how many clusters there are.

    Centred within each kind; kinds are merged where one has a single cluster, which has no spread of its own.
    """
    names, first, code = np.unique(cluster, return_index=True, return_inverse=True)
    by_cluster = residual @ np.eye(len(names))[code]  # [..., G]
    kinds = kind[first]
    groups = [np.flatnonzero(kinds == k) for k in np.unique(kinds)]
    if min(len(g) for g in groups) < 2:
        groups = [np.arange(len(names))]
    freedom = len(names) - len(groups)
    variance = np.full(residual.shape[:-1], 0.0 if freedom else np.nan)
    for g in groups if freedom else []:
        spread = by_cluster[..., g] - by_cluster[..., g].mean(-1, keepdims=True)
        variance = variance + len(g) / (len(g) - 1) * (spread**2).sum(-1)
    return variance, float(freedom), len(names)


def share(cells: Sequence[Part], few_freedom: float) -> list[Part]:
    """The same cells, in their order, with the variance that each shares with others."""
    by_phase: dict[Phase | None, list[int]] = {}
    for place, cell in enumerate(cells):
        by_phase.setdefault(cell.stratum.phase, []).append(place)
    known = [sum(float(cells[s].freedom.max(initial=0.0)) for s in places) for places in by_phase.values()]
    pools = by_phase if min(known, default=0.0) >= few_freedom else {None: list(range(len(cells)))}
    shared = list(cells)
    for pool, places in pools.items():
        for place, cell in zip(places, _pooled([cells[s] for s in places]), strict=True):
            shared[place] = replace(cell, pool=pool)
    return shared


def lend(cells: Sequence[Part], part: Part) -> Part:
    """A wide stratum of few documents with the larger of its own variance and the one its cells imply.

    Where the cells' stands it is the wider one, so the documents' freedom, valid for a narrower interval, is valid for
    it too: the greater of both counts. Where the documents' stands they show a spread that no cell has seen, and the
    cells' freedom says nothing about it.
    """
    inside = [c for c in cells if part.stratum.phase in (None, c.stratum.phase)]
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.stack([(c.total / part.total) ** 2 * c.variance / c.positions for c in inside])
    implied = terms.sum(axis=0) * part.positions
    lent = _satterthwaite(inside, terms)
    theirs = ~(implied < part.variance)  # also where either is unknown
    return replace(
        part,
        variance=np.fmax(part.variance, implied),
        freedom=np.where(theirs, np.fmax(part.freedom, lent), part.freedom),
    )


def _pooled(cells: Sequence[Part]) -> list[Part]:
    """The cells with one variance, weighted by degrees of freedom; those noisier than the rest keep their own."""
    from scipy.special import fdtri  # here, because scipy costs a tenth of a second to import

    if not cells:
        return []
    own = np.stack([cell.variance for cell in cells], axis=-1)  # [..., S]
    freedom = np.stack([cell.freedom for cell in cells], axis=-1)
    weight = np.where(np.isfinite(own), freedom, 0.0)
    weighted = np.where(weight > 0, own, 0.0) * weight
    total, total_weight = weighted.sum(-1, keepdims=True), weight.sum(-1, keepdims=True)
    rest_weight = total_weight - weight
    testable = (weight > 0) & (rest_weight > 0)
    threshold = np.full(own.shape, np.inf)
    threshold[testable] = fdtri(weight[testable], rest_weight[testable], 1.0 - OWN_VARIANCE_CHANCE)
    with np.errstate(divide="ignore", invalid="ignore"):
        # The others alone: against a mean that includes itself, one of four equal cells could hardly stand out.
        keeps_own = testable & (own > threshold * (total - weighted) / rest_weight)
        variance = np.where(keeps_own, own, total / total_weight)
    degrees = np.where(keeps_own, freedom, total_weight)
    return [
        replace(cell, variance=variance[..., s], freedom=degrees[..., s], own=keeps_own[..., s])
        for s, cell in enumerate(cells)
    ]


def _satterthwaite(cells: Sequence[Part], terms: Floats) -> Floats:
    """Degrees of freedom of the sum of the cells' terms [S, ...]; NaN if the sum is zero or unknown.

    Cells that share one estimate are one component; each that keeps its own is another.
    """
    own, freedom = np.stack([c.own for c in cells]), np.stack([c.freedom for c in cells])
    with np.errstate(divide="ignore", invalid="ignore"):
        # Shares, not squares of variances: those underflow for builds that are nearly equal.
        shares = terms / terms.sum(axis=0)
        inverse = np.where(own, shares**2 / freedom, 0.0).sum(axis=0)
        for pool in {c.pool for c in cells}:
            members = np.array([c.pool is pool for c in cells])
            common = np.where(own, 0.0, shares)[members].sum(axis=0)
            known = np.where(own, 0.0, freedom)[members].max(axis=0)
            inverse = inverse + np.where(common > 0, common**2 / known, 0.0)
        return np.asarray(np.where(np.isfinite(inverse) & (inverse > 0), 1.0 / inverse, np.nan))
