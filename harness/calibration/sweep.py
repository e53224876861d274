"""Variants of one thing side by side: KL by depth, flips by margin, distributions, where greedy decoding parts. Pure.

A sweep holds each variant against the f32 reference and against one of the variants, its peer (as published: naive
attention with f32 weights). KL is KL(reference || variant) or KL(peer || variant), KL20, in nats.

Shape legend: P positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.calibration.calibrate import read_plain, write_plain
from harness.manifest_json import from_plain
from harness.summary import MARGIN_EDGES
from harness.types import Columns, Json, Phase

SCATTERED = 600
"""Positions kept for a scatter of margin against KL: half those of highest KL, half spread evenly."""

GREEDY_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """KL of one phase, kind and depth."""

    phase: Phase
    kind: str
    depth: int
    rows: int
    mean: float
    median: float
    p90: float
    p99: float
    flips: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Flips of the positions whose margin lies in [low, high)."""

    low: float
    high: float
    rows: int
    flips: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A variant held against something, in the numbers that figures are drawn from."""

    cells: tuple[Cell, ...]
    bins: tuple[Bin, ...]
    quantiles: Mapping[str, tuple[float, ...]]  # kind -> 101 quantiles of KL over all rows, 0 to 100 %
    margin: tuple[float, ...]  # of the positions kept for a scatter
    kl: tuple[float, ...]
    flip: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One variant's part of a sweep."""

    name: str
    summary: str
    recording: str  # content id
    seconds: float
    setting: Json
    build: Json
    created: str
    reference: Profile  # against the f32 reference
    peer: Profile | None = None  # against the peer; None: it is the peer
    greedy: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # segment -> ids decoded freely
    leads: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # and each id's lead over the next, nats


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Where a variant's greedy text first differs from its peer's."""

    segment: str
    step: int  # tokens in common
    lead: float  # of the peer's token there over its next best, nats: near 0 is a tie


def profile(positions: Columns) -> Profile:
    """The numbers of one comparison. Columns are [P]; NaN in KL is refused by the comparison for what a sweep runs."""
    kl = np.asarray(positions["kl20"], np.float64)
    margin, flip = np.asarray(positions["margin"]), np.asarray(positions["flip"]).astype(np.bool_)
    kind, depth, phase = (np.asarray(positions[name]) for name in ("kind", "depth", "phase"))
    cells = []
    for p, k, d in product(Phase, np.unique(kind).tolist(), np.unique(depth).tolist()):
        inside = (phase == str(p)) & (kind == k) & (depth == d)
        if inside.any():
            median, p90, p99 = np.quantile(kl[inside], (0.5, 0.9, 0.99))
            cells.append(
                Cell(
                    phase=p,
                    kind=str(k),
                    depth=int(d),
                    rows=int(inside.sum()),
                    mean=float(kl[inside].mean()),
                    median=float(median),
                    p90=float(p90),
                    p99=float(p99),
                    flips=int(flip[inside].sum()),
                )
            )
    bins = []
    for low, high in pairwise(MARGIN_EDGES):
        inside = (margin >= low) & (margin < high)
        bins.append(Bin(low=low, high=high, rows=int(inside.sum()), flips=int(flip[inside].sum())))
    kept = _scattered(kl)
    return Profile(
        cells=tuple(cells),
        bins=tuple(bins),
        quantiles={str(k): tuple(np.quantile(kl[kind == k], np.linspace(0, 1, 101)).tolist()) for k in np.unique(kind)},
        margin=tuple(margin[kept].tolist()),
        kl=tuple(kl[kept].tolist()),
        flip=tuple(flip[kept].tolist()),
    )


def partings(variant: Variant, peer: Variant) -> list[Parting]:
    """Where each greedy text of a variant parts from its peer's; texts equal to the end are left out."""
    found = []
    for segment, ours in variant.greedy.items():
        theirs = peer.greedy.get(segment, ())
        step = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if step is not None:
            found.append(Parting(segment=segment, step=step, lead=peer.leads[segment][step]))
    return found


def by_depth(held: Profile, kind: str, phase: Phase, statistic: str) -> list[tuple[int, float]]:
    """(depth, statistic) of the cells of one kind and phase, by depth."""
    return sorted((c.depth, float(getattr(c, statistic))) for c in held.cells if (c.kind, c.phase) == (kind, phase))


def flips_without(held: Profile, share: float = 0.1) -> float:
    """Of the scatter's positions among the highest `share` of KL, the part without a flip; NaN without positions."""
    kl, flip = np.asarray(held.kl), np.asarray(held.flip, np.bool_)
    if not len(kl):
        return float("nan")
    high = np.argsort(-kl, kind="stable")[: max(1, round(share * len(kl)))]
    return float(1.0 - flip[high].mean())


def save_variant(variant: Variant, folder: Path) -> None:
    """Write FOLDER/NAME.json. Raises StorageError."""
    write_plain(variant, folder / f"{variant.name}.json")


def load_variants(folder: Path, names: Sequence[str]) -> dict[str, Variant]:
    """The variants of those names that are there, in that order. Raises StorageError for a damaged file."""
    paths = {name: folder / f"{name}.json" for name in names}
    return {name: from_plain(Variant, read_plain(p), str(p)) for name, p in paths.items() if p.is_file()}


def _scattered(kl: NDArray[np.float64]) -> NDArray[np.int64]:
    order: NDArray[Any] = np.argsort(-kl, kind="stable")
    if len(order) <= SCATTERED:
        return np.sort(order)
    rest = order[SCATTERED // 2 :]
    spread = rest[np.linspace(0, len(rest) - 1, SCATTERED // 2).astype(int)]
    return np.sort(np.concatenate([order[: SCATTERED // 2], spread]))
