"""Are the rows where they claim to be? Shifted, swapped and repeated rows are found and named here.

Statistics of misplaced rows are numbers about nothing, so every comparison asks this first. Columns of per-position
metrics say where to look; a few rows are then read again and held against the places they might belong to.

Shape legend: P positions, S shifts, V vocabulary, W reference rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.evidence import EXPLAINED, MOST, Group, RowSource, explains, kl, split_groups, spread, suspicious_rows
from harness.types import Columns, Finding

SHIFTS = (-3, -2, -1, 1, 2, 3)
SAMPLED_ROWS = 8  # per group: enough for seven of eight to agree, and cheap at 250,000 ids
SAMPLED_GROUPS = 32  # most suspicious first, which bounds the time a wholly broken candidate takes
SAMPLED_PAIRS = 64
SAME_LSE = 1e-9  # nats: equal rows sum up in another order where the reference's top ids differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Rows of a group that fit the reference at another place."""

    group: Group
    place: int  # shift in rows, or the number of the other group
    rows: NDArray[np.int64]  # places in the columns of the rows that fit there
    looked_at: int  # rows that could be held against that place
    kl_home: float  # median nats over `rows`
    kl_there: float


def misplaced(positions: Columns, reference: RowSource, candidate: RowSource) -> tuple[Finding, ...]:
    """Shifted, swapped and repeated rows of a candidate, as findings with their evidence.

    `positions` has the metric and place columns, rows of one segment and phase together and ascending. Rows with
    NaN are left out: they have a verdict of their own. Empty if every row is where it says.
    """
    groups = split_groups(positions)
    repeated, findings = _repeated(positions, groups, candidate)
    suspicious = suspicious_rows(positions)
    suspicious[repeated] = False
    ranked = sorted((g for g in groups if suspicious[g.rows].any()), key=lambda g: -int(suspicious[g.rows].sum()))
    shifted: list[Match] = []
    swapped: list[Match] = []
    for group in ranked[:SAMPLED_GROUPS]:
        rows = spread(group.rows[suspicious[group.rows]], SAMPLED_ROWS)
        shift = _find_shift(positions, group, rows, reference, candidate)
        if shift is not None:
            shifted.append(shift)
            continue
        swap = _find_swap(positions, groups, group, rows, reference, candidate)
        if swap is not None:
            swapped.append(swap)
    if shifted:
        findings += _shift_findings(groups, shifted)
    if swapped:
        findings += _swap_findings(groups, swapped)
    return tuple(findings)


# --------------------------------------------------------------------------- shifted


def _find_shift(
    positions: Columns, group: Group, rows: NDArray[np.int64], reference: RowSource, candidate: RowSource
) -> Match | None:
    index = np.asarray(positions["index"][rows], np.int64)
    wanted = np.unique(np.concatenate([index + k for k in (0, *SHIFTS)]))
    available = wanted[np.isin(wanted, group.index)]
    kl_ps = kl_at_shifts(
        reference.logprobs(group.segment, group.phase, available),
        available,
        candidate.logprobs(group.segment, group.phase, index),
        index,
    )
    matches = [(explains(kl_ps[:, 0], kl_ps[:, s]), s) for s in range(1, kl_ps.shape[1])]
    fits, best = max(matches, key=lambda m: int(m[0].sum()))
    if not fits.any():
        return None
    return Match(
        group=group,
        place=SHIFTS[best - 1],
        rows=rows[fits],
        looked_at=int(np.isfinite(kl_ps[:, best]).sum()),
        kl_home=float(np.median(kl_ps[fits, 0])),
        kl_there=float(np.median(kl_ps[fits, best])),
    )


def kl_at_shifts(
    reference_logp_wv: NDArray[np.floating],
    reference_index_w: NDArray[np.int64],
    candidate_logp_pv: NDArray[np.floating],
    candidate_index_p: NDArray[np.int64],
) -> NDArray[np.float64]:
    """KL of each candidate row against the reference at its own index and at index + each of SHIFTS.

    W reference rows, ascending in index. Returns [P, 1 + S] nats, the first column the row's own index; NaN where
    the reference has no such row.
    """
    result = np.full((len(candidate_index_p), 1 + len(SHIFTS)), np.nan)
    for s, k in enumerate((0, *SHIFTS)):
        wanted = candidate_index_p + k
        found = np.isin(wanted, reference_index_w)
        if found.any():
            at = np.searchsorted(reference_index_w, wanted[found])
            result[found, s] = kl(reference_logp_wv[at], candidate_logp_pv[found])
    return result


def _shift_findings(groups: Sequence[Group], matches: Sequence[Match]) -> list[Finding]:
    findings = []
    for k in sorted({m.place for m in matches}):
        same = [m for m in matches if m.place == k]
        everywhere = len(same) == min(len(groups), SAMPLED_GROUPS) and all(_from_the_start(m) for m in same)
        where = "everywhere, from the first scored row on" if everywhere else _where(same)
        cause = "the capture is off by one" if abs(k) == 1 else "rows were dropped or added"
        if everywhere and k == 1:
            cause += ", or the engine was fed the ids without their first (a missing BOS)"
        if everywhere and k == -1:
            cause += ", or the engine was fed one id more at the start (a double BOS)"
        message = f"rows match the reference at index {'+' if k > 0 else '-'} {abs(k)} {where} ({_evidence(same)}): "
        findings.append(Finding(code="rows-shifted", message=message + cause + "; record it again", fatal=True))
    return findings


def _from_the_start(match: Match) -> bool:
    """Whether the shift holds from the group's first rows on (the very first ones may look alike in both places)."""
    return len(match.rows) >= MOST * match.looked_at and match.rows[0] - match.group.rows[0] < 8


# --------------------------------------------------------------------------- swapped


def _find_swap(
    positions: Columns,
    groups: Sequence[Group],
    group: Group,
    rows: NDArray[np.int64],
    reference: RowSource,
    candidate: RowSource,
) -> Match | None:
    """The other request whose rows these are, at the same place in the phase: batch rows are mixed up by step."""
    ordinal = rows - group.rows[0]
    top1 = positions["top1_candidate"][rows]
    likely: list[tuple[float, int]] = []
    for number, other in enumerate(groups):
        if other.segment == group.segment or other.phase is not group.phase or ordinal[-1] >= len(other.rows):
            continue
        agreement = float(np.mean(top1 == positions["top1_reference"][other.rows[ordinal]]))
        if agreement >= 0.5:
            likely.append((agreement, number))
    if not likely:
        return None
    own = candidate.logprobs(group.segment, group.phase, np.asarray(positions["index"][rows], np.int64))
    home = kl(reference.logprobs(group.segment, group.phase, np.asarray(positions["index"][rows], np.int64)), own)
    best: Match | None = None
    for _, number in sorted(likely, reverse=True)[:3]:
        other = groups[number]
        there = kl(reference.logprobs(other.segment, other.phase, other.index[ordinal]), own)
        fits = explains(home, there)
        if not fits.any():
            continue
        match = Match(
            group=group,
            place=number,
            rows=rows[fits],
            looked_at=len(rows),
            kl_home=float(np.median(home[fits])),
            kl_there=float(np.median(there[fits])),
        )
        # The same text at another depth fits nearly as well: of equally many rows the nearest decide.
        if best is None or (len(match.rows), -match.kl_there) > (len(best.rows), -best.kl_there):
            best = match
    return best


def _swap_findings(groups: Sequence[Group], matches: Sequence[Match]) -> list[Finding]:
    pairs = {(str(m.group), str(groups[m.place])) for m in matches}

    def lost_context(match: Match) -> bool:
        # The same text with less context before it, and nothing swapped in return: an engine that forgets, a fault.
        other = groups[match.place]
        shallower = other.document == match.group.document and other.depth < match.group.depth
        return shallower and (str(other), str(match.group)) not in pairs

    findings = []
    swapped = [m for m in matches if not lost_context(m)]
    if swapped:
        named = ", ".join(f"{m.group} holds {groups[m.place]}" for m in swapped[:3])
        findings.append(
            Finding(
                code="requests-swapped",
                message=f"rows match the reference of another request: {named}{_more(swapped)} ({_evidence(swapped)}): "
                "the rows of a batch were assigned to the wrong requests; record it again",
                fatal=True,
            )
        )
    lost = [m for m in matches if lost_context(m)]
    if lost:
        named = ", ".join(f"{m.group} answers like depth {groups[m.place].depth}" for m in lost[:3])
        findings.append(
            Finding(
                code="context-lost",
                message=f"rows match the reference of the same text with less context: {named}{_more(lost)} "
                f"({_evidence(lost)}): the engine does not see the earlier tokens",
                fatal=False,
            )
        )
    return findings


# --------------------------------------------------------------------------- repeated


def _repeated(
    positions: Columns, groups: Sequence[Group], candidate: RowSource
) -> tuple[NDArray[np.int64], list[Finding]]:
    """Rows bit-equal to the row before them although the reference moved on."""
    equal = np.zeros(len(positions["index"]), np.bool_)
    equal[1:] = (
        (_steps(positions["lse_candidate"]) < SAME_LSE)
        & (positions["top1_candidate"][1:] == positions["top1_candidate"][:-1])
        & ~(_steps(positions["lse_reference"]) < SAME_LSE)
    )
    equal[[g.rows[0] for g in groups]] = False
    group_of = np.repeat(np.arange(len(groups)), [len(g.rows) for g in groups])
    confirmed = []
    for row in spread(np.flatnonzero(equal), SAMPLED_PAIRS):
        group = groups[group_of[row]]
        pair = candidate.read(group.segment, group.phase, np.asarray(positions["index"][row - 1 : row + 1], np.int64))
        equal[row] = pair[0].tobytes() == pair[1].tobytes()
        if equal[row]:
            confirmed.append(int(row))
    if not confirmed:
        return np.empty(0, np.int64), []
    rows, kl20 = np.asarray(confirmed, np.int64), positions["kl20"]
    with np.errstate(invalid="ignore"):
        stuck = rows[kl20[rows - 1] < EXPLAINED * kl20[rows]]
    first = int(stuck[0]) if len(stuck) else confirmed[0]
    where = f"{groups[group_of[first]]} index {int(positions['index'][first])}"
    count = f"{int(equal.sum())} row{'s' if equal.sum() != 1 else ''}"
    message = f"{count} bit-equal to the row before although the reference moves on (first at {where}: KL20 "
    message += f"{kl20[first]:.2g}, the row before {kl20[first - 1]:.2g}): "
    message += "a captured row was written again" if len(stuck) else "the engine gives the same row at every step"
    return np.flatnonzero(equal), [Finding(code="rows-repeated", message=message, fatal=len(stuck) > 0)]


def _steps(lse_p: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far each row's log-sum-exp lies from the row's before it, [P - 1]; NaN beside a row without one."""
    with np.errstate(invalid="ignore"):
        return np.abs(np.diff(lse_p))


# --------------------------------------------------------------------------- wording


def _evidence(matches: Sequence[Match]) -> str:
    strongest = max(matches, key=lambda m: len(m.rows))
    return (
        f"{len(strongest.rows)} of {strongest.looked_at} rows looked at in {strongest.group}: "
        f"median KL {strongest.kl_there:.2g} there, {strongest.kl_home:.2g} at their own place"
    )


def _where(matches: Sequence[Match]) -> str:
    return "in " + ", ".join(str(m.group) for m in matches[:3]) + _more(matches)


def _more(items: Sequence[Match]) -> str:
    return f" and {len(items) - 3} more" if len(items) > 3 else ""
