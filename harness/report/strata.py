"""Looking things up in a verdict: the strata it has, and their estimates and checks. Computes nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.types import Check, Columns, Comparison, Estimate, Phase, Stratum, Verdict


def strata(verdict: Verdict) -> tuple[Stratum, ...]:
    """Every stratum with a mean KL20, overall first, in the verdict's order."""
    return tuple(dict.fromkeys(e.stratum for e in verdict.estimates if (e.metric, e.statistic) == ("kl20", "mean")))


def cells(verdict: Verdict) -> tuple[Stratum, ...]:
    """The strata that name a phase, a kind and a depth."""
    return tuple(s for s in strata(verdict) if s.phase is not None and s.kind is not None and s.depth is not None)


def estimate(verdict: Verdict, stratum: Stratum, statistic: str, metric: str = "kl20") -> Estimate | None:
    """The estimate of that stratum, or None if the verdict has none."""
    for found in verdict.estimates:
        if found.stratum == stratum and found.statistic == statistic and found.metric == metric:
            return found
    return None


def value(verdict: Verdict, stratum: Stratum, statistic: str, metric: str = "kl20") -> float:
    """The estimate's value; NaN if there is none."""
    found = estimate(verdict, stratum, statistic, metric)
    return float("nan") if found is None else found.value


def check(verdict: Verdict, stratum: Stratum, statistic: str) -> Check | None:
    """The check of that stratum on the candidate itself (not on a twin), or None."""
    for found in verdict.checks:
        if found.stratum == stratum and found.statistic == statistic and found.tier != "logic":
            return found
    return None


def ratio_limit(verdict: Verdict) -> float | None:
    """The limit of the overall ratio to the floor; None if it was not checked."""
    found = check(verdict, Stratum(), "ratio_to_floor")
    return None if found is None else found.limit


def inside(columns: Columns, stratum: Stratum) -> NDArray[np.bool_]:
    """Positions of a stratum, [P]."""
    chosen = np.ones(len(columns["phase"]), np.bool_)
    for name in ("phase", "kind", "depth"):
        wanted = getattr(stratum, name)
        if wanted is not None:
            chosen &= np.asarray(columns[name] == (str(wanted) if name == "phase" else wanted))
    return chosen


def finite(comparison: Comparison) -> NDArray[np.bool_]:
    """Positions that the verdict's statistics rest on: those without NaN or infinities, [P]."""
    columns = comparison.positions
    kept = np.isfinite(columns["kl20"]) & np.isfinite(columns["kl_full"]) & (columns["nan_candidate"] == 0)
    return np.asarray(kept, np.bool_)


def kinds(columns: Columns) -> list[str]:
    """Kinds of text among the positions, sorted."""
    return [str(kind) for kind in np.unique(np.asarray(columns["kind"]))]


def depths(columns: Columns) -> list[int]:
    """Depths among the positions, ascending."""
    return [int(depth) for depth in np.unique(np.asarray(columns["depth"]))]


def phases(columns: Columns) -> list[Phase]:
    """Phases among the positions, prefill first."""
    present = set(np.unique(np.asarray(columns["phase"])).tolist())
    return [phase for phase in Phase if str(phase) in present]


def largest_flip_margin(comparison: Comparison, stratum: Stratum) -> float:
    """The largest reference margin at which the candidate's top id differs, in logits; NaN without a flip."""
    columns = comparison.positions
    flipped = np.asarray(columns["flip"], np.bool_) & np.isfinite(columns["margin"]) & inside(columns, stratum)
    return float(np.max(columns["margin"][flipped])) if flipped.any() else float("nan")
