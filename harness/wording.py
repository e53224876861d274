"""The facts that decided a verdict, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from harness.types import OVERALL, Check, Status, Tier

MOST = 3
"""Facts a verdict gives as its reasons."""

_COUNTS = ("count", "count_above_margin")

_WORDS = {
    "ratio_to_floor": "mean KL20 is {shown} x the floor's {where}",
    "ratio_to_baseline": "mean KL20 is {shown} x the baseline's {where}",
    "twin_mean": "mean KL20 of the float32 twin is {value:.3g} nat {where}",
    "count_above_margin": "{value:.0f} of {positions} rows flip at a margin above {margin:g}",
    "count": "{value:.0f} of {positions} rows have NaN or infinite logits",
}


_TIERS: dict[Tier, str] = {
    "precision": "precision (production dtype against the floor)",
    "logic": "logic (float32 twin against the reference)",
    "change": "change (against the baseline)",
    "phases": "phases (decode against prefill)",
}


def deciding(
    status: Status, checks: Sequence[Check], findings: Sequence[str], held_back: Sequence[str], margin: float
) -> tuple[str, ...]:
    """At most three facts: for a FAIL what failed most, for the others what came nearest to its limit.

    Args:
        status: the verdict's.
        checks: all of them; those with the verdict's own status decided.
        findings: what the comparison found wrong: before any check in a FAIL.
        held_back: why nothing could pass: before any check if INCONCLUSIVE.
        margin: of the check that counts flips, in logits.
    """
    own = sorted((check for check in checks if check.status is status), key=_severity, reverse=True)
    if status is Status.PASS:  # that nothing was counted is the least surprising of its facts
        own.sort(key=lambda check: check.statistic in _COUNTS)
    first = {Status.FAIL: findings, Status.INCONCLUSIVE: held_back, Status.PASS: ()}[status]
    return (*first, *(_fact(check, margin) for check in own))[:MOST]


def tiers(checks: Sequence[Check]) -> Iterator[str]:
    """One sentence that says what each tier found, if more than one spoke."""
    found: dict[Tier, list[Check]] = {}
    for check in checks:
        found.setdefault(check.tier, []).append(check)
    if len(found) > 1:
        yield "what spoke: " + "; ".join(f"{_TIERS[tier]}: {_found(own)}" for tier, own in found.items())


def _found(checks: Sequence[Check]) -> str:
    failed = sum(check.status is Status.FAIL for check in checks)
    undecided = sum(check.status is Status.INCONCLUSIVE for check in checks)
    bounded = sum(check.statistic not in _COUNTS for check in checks)
    counts = [f"{failed} of {len(checks)} checks failed" if failed else f"none of {len(checks)} checks failed"]
    counts += [f"{undecided} undecided"] if undecided else []
    counts += [] if bounded else ["no limit but for counts"]
    return ", ".join(counts)


def _severity(check: Check) -> float:
    """How far the bound that decided lies beyond the limit; a count has no such scale and comes first."""
    if check.statistic in _COUNTS:
        return math.inf
    bound = check.low if check.status is Status.FAIL else check.high
    return math.log(bound / check.limit) if bound > 0 else -math.inf


def _fact(check: Check, margin: float) -> str:
    where = str(check.stratum) if check.stratum == OVERALL else f"in {check.stratum}"
    said = _WORDS[check.statistic].format(
        value=check.value, shown=_plain(check.value), where=where, positions=check.positions, margin=margin
    )
    if check.tier == "logic" and check.statistic in _COUNTS:
        said = f"twin (float32): {said}"
    if check.tier == "phases":
        said = f"decode against prefill: {said}"
    if check.statistic in _COUNTS:
        return f"{said} (allowed: {check.limit:g})"
    if check.status is Status.FAIL:
        return f"{said} (limit {_plain(check.limit)}, lower bound {_plain(check.low)})"
    if check.status is Status.PASS:
        return f"{said} (limit {_plain(check.limit)}, upper bound {_plain(check.high)})"
    changed = "changed, explain or re-baseline: " if check.tier == "change" and check.low > check.limit else ""
    return f"{changed}{said} (limit {_plain(check.limit)}, bounds {_plain(check.low)} to {_plain(check.high)})"


def _plain(value: float) -> str:
    """Three significant digits: 0.00123, 1.06, 1,030; powers of ten only beyond a million."""
    if math.isfinite(value) and 1000 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"
