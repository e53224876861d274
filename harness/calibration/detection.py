"""What other ways of comparing builds would have seen on the same recordings, against this gate. Pure.

Each method's alarm is set so that no correct build raises it: worse than the worst of them (mean KL also at its usual
fixed limit of 0.01 nat). That is the kindest rule there is for them: their limit fits the very builds it is tried on.

Shape legend: P positions, V vocabulary, S segments.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness._data import data_folder
from harness.calibration.calibrate import Result
from harness.types import Columns, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A statistic that others judge by."""

    name: str  # as a table shows it
    statistic: str  # key of `statistics`
    higher_is_worse: bool
    fixed: float | None = None  # an alarm limit in common use; None: worse than the worst correct build


METHODS = (
    Method(name="greedy token match", statistic="greedy_match", higher_is_worse=False),
    Method(name="perplexity", statistic="perplexity_shift", higher_is_worse=True),
    Method(name="mean KL > 0.01 nat", statistic="kl_mean", higher_is_worse=True, fixed=0.01),
    Method(name="flip count", statistic="flips", higher_is_worse=True),
    Method(name="top-1 agreement", statistic="top1_agreement", higher_is_worse=False),
    Method(name="cosine of logits", statistic="cosine", higher_is_worse=False),
)


def statistics(positions: Columns, stock: Columns | None, cosine: NDArray[np.float64]) -> dict[str, float]:
    """What the other methods look at. Columns are [P], as `compare` gives them.

    `greedy_match`: share of decode steps before the top id first differs from the stock build's, mean over segments.
    `top1_agreement`: share of all rows with the stock build's top id. `perplexity_shift`: |ln| of the ratio of
    perplexities, candidate over reference. `kl_mean`: full KL(reference || candidate), nats. `flips`: rows whose top id
    is not the reference's. `cosine`: mean of the given [P] values. Without the stock build's positions (the same, in
    the same order) the reference stands in for it. NaN where a row has NaN: to these methods it is an alarm.
    """
    top = positions["top1_candidate"]
    other = positions["top1_reference"] if stock is None else stock["top1_candidate"]
    same = np.asarray(top == other)
    decode = np.asarray(positions["phase"]) == str(Phase.DECODE)
    return {
        "greedy_match": _greedy_match(same[decode], np.asarray(positions["segment"])[decode]),
        "top1_agreement": float(same.mean()),
        "perplexity_shift": float(abs(np.mean(positions["nll_candidate"] - positions["nll_reference"]))),
        "kl_mean": float(np.mean(positions["kl_full"])),
        "flips": float(np.sum(positions["flip"])),
        "cosine": float(np.mean(cosine)) if len(cosine) else math.nan,
    }


def row_cosine(reference_pv: NDArray[Any], candidate_pv: NDArray[Any]) -> NDArray[np.float64]:
    """Cosine of two rows of finite logits, [P] from [P, V] each, f64; NaN for a row with NaN or infinities."""
    a, b = reference_pv.astype(np.float64), candidate_pv.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        dots = [np.einsum("pv,pv->p", x, y) for x, y in ((a, b), (a, a), (b, b))]
        return np.asarray(dots[0] / np.sqrt(dots[1] * dots[2]), np.float64)


def task_scores() -> dict[str, str]:
    """By a patch's source, whether a public task score showed that bug: "yes", "partly", "no" or "unknown".

    From `patches/task_scores.toml`: what public threads tell, not a measurement. A source that is not there has none.
    """
    text = data_folder("patches").joinpath("task_scores.toml").read_text(encoding="utf-8")
    return {source: str(entry["seen"]) for source, entry in tomllib.loads(text).items()}


def thresholds(benign: Sequence[Result]) -> dict[str, float]:
    """By statistic, the value of the worst correct build; NaN if none has it."""
    limits = {}
    for method in METHODS:
        values = [r.others[method.statistic] for r in benign if r.others and method.statistic in r.others]
        sound = [v for v in values if not math.isnan(v)]
        worst = (max if method.higher_is_worse else min)(sound, default=math.nan)
        limits[method.statistic] = worst if method.fixed is None else method.fixed
    return limits


def alarms(others: Mapping[str, float] | None, limits: Mapping[str, float]) -> dict[str, bool | None]:
    """By method name, whether it would have raised an alarm; None where its limit or its statistic is not known."""
    said: dict[str, bool | None] = {}
    for method in METHODS:
        limit = limits.get(method.statistic, math.nan)
        if others is None or method.statistic not in others or math.isnan(limit):
            said[method.name] = None
        else:
            value = others[method.statistic]
            beyond = value > limit if method.higher_is_worse else value < limit
            said[method.name] = math.isnan(value) or beyond
    return said


def _greedy_match(same: NDArray[np.bool_], segment: NDArray[Any]) -> float:
    if not len(same):
        return math.nan
    shares = []
    for name in np.unique(segment):
        rows = same[segment == name]
        shares.append((len(rows) if rows.all() else int(np.argmin(rows))) / len(rows))
    return float(np.mean(shares))
