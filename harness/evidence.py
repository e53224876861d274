"""What the diagnoses stand on: rows on demand, groups of positions, and when a row counts as explained.

A claim about rows needs positive evidence, rows that fit one explanation far better than they fit as they are,
because a badly broken engine must read as a failure of the build and not of the instrument.

Shape legend: P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.metrics import decode
from harness.types import Columns, LogitsDtype, Phase

SUSPICIOUS_KL = 0.1
"""Nats of KL20 from which a row is looked into: a hundred times the normal difference of bf16."""

EXPLAINED = 0.1
"""An explanation holds for a row if the KL under it is below this share of the row's KL as it is."""

MOST = 0.8
"""Share of the rows looked at that one explanation must hold for."""

FEW_ROWS_KL = 0.02  # nats: fewer than four rows count as evidence only if they fit about exactly
LEAST_LOGPROB = -60.0  # nats: masked ids count as this, so that every KL here is finite

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Raw rows on demand: `read(segment, phase, indices)` gives [P, V] in the recording's own dtype."""

    dtype: LogitsDtype
    read: Callable[[str, Phase, NDArray[np.int64]], Array]

    def logprobs(self, segment: str, phase: Phase, indices: NDArray[np.int64]) -> NDArray[np.float32]:
        """Log-probabilities of the rows, [P, V]; f32, since several dozen rows of 250,000 ids are held at once."""
        return logprobs(self.read(segment, phase, indices), self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rows of one segment and phase: a contiguous range of the columns."""

    segment: str
    document: str
    phase: Phase
    depth: int
    rows: NDArray[np.int64]  # places in the columns, ascending
    index: NDArray[np.int64]  # index of each row in its segment

    def __str__(self) -> str:
        return f"{self.segment} ({self.phase})"


def split_groups(positions: Columns) -> list[Group]:
    """The groups of the columns, in order. Empty columns give no group."""
    segment, phase = positions["segment"], positions["phase"]
    if not len(segment):
        return []
    starts = np.flatnonzero(np.r_[True, (segment[1:] != segment[:-1]) | (phase[1:] != phase[:-1])])
    stops = np.r_[starts[1:], len(segment)]
    return [
        Group(
            segment=str(segment[a]),
            document=str(positions["document"][a]),
            phase=Phase(str(phase[a])),
            depth=int(positions["depth"][a]),
            rows=np.arange(a, b, dtype=np.int64),
            index=np.asarray(positions["index"][a:b], np.int64),
        )
        for a, b in zip(starts, stops, strict=True)
    ]


def suspicious_rows(positions: Columns) -> NDArray[np.bool_]:
    """Rows far beyond any normal difference and free of NaN, [P]."""
    with np.errstate(invalid="ignore"):
        return np.asarray((positions["kl20"] >= SUSPICIOUS_KL) & (positions["nan_candidate"] == 0), np.bool_)


def spread(rows: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """At most `most` of the rows, evenly spread, the first and last among them."""
    if len(rows) <= most:
        return rows
    return rows[np.linspace(0, len(rows) - 1, most).round().astype(np.int64)]


def log_softmax(logits: Array) -> NDArray[np.float64]:
    """Log-probabilities along the last axis, f64; -inf stays -inf, a row with NaN or +inf becomes NaN."""
    wide = np.asarray(logits, np.float64)
    with np.errstate(invalid="ignore"):
        lowered = wide - wide.max(axis=-1, keepdims=True)
        return np.asarray(lowered - np.log(np.exp(lowered).sum(axis=-1, keepdims=True)), np.float64)


def logprobs(raw_pv: Array, dtype: LogitsDtype) -> NDArray[np.float32]:
    """Log-probabilities of raw rows, [P, V] f32, with f64 inside and one row widened at a time."""
    rows = np.empty(raw_pv.shape, np.float32)
    for row, raw in zip(rows, raw_pv, strict=True):
        row[:] = log_softmax(decode(raw, dtype))
    return rows


def kl(logp_pv: Array, logq_pv: Array) -> NDArray[np.float64]:
    """KL(p || q) row by row over the whole vocabulary, nats, [P]; no log-probability counts below -60."""
    return np.array([_kl(p.astype(np.float64), q.astype(np.float64)) for p, q in zip(logp_pv, logq_pv, strict=True)])


def _kl(logp_v: NDArray[np.float64], logq_v: NDArray[np.float64]) -> float:
    p, q = np.exp(logp_v), np.exp(logq_v)
    d = np.maximum(logp_v, LEAST_LOGPROB) - np.maximum(logq_v, LEAST_LOGPROB)
    return float((p * d).sum() + q.sum() - p.sum())


def explains(kl_home: Array, kl_there: Array) -> NDArray[np.bool_]:
    """Which rows fit there and not at home, [P]; NaN says that there is no such row, and explains nothing.

    Most of four or more rows have to fit far better. One, two or three rows have to fit about exactly: by chance a
    neighbour is often nearer than a broken row's own reference, but not the same.
    """
    comparable = int(np.isfinite(kl_there).sum())
    with np.errstate(invalid="ignore"):
        better = kl_there < EXPLAINED * kl_home
        exact = better & (kl_there < FEW_ROWS_KL) & (kl_there < kl_home / 30)
    enough = comparable >= 4 and better.sum() >= MOST * comparable
    return np.asarray(better if enough else exact, np.bool_)
