"""Compiled row kernels behind `harness.metrics`. Imported on first use: importing numba costs half a second.

Legend: P positions, V vocabulary, K kept ids; r, c the reference's and the candidate's logits of one row as f64.

A row is split into its *head* (the reference's top ids) and its *tail* (all others), so that the tail's mass is a sum
over the complement, never one minus the head. With

    u = r - max r,   b = ln sum e^(r - max r) - ln sum e^(c - max c),   d = (r - c) - (max r - max c) - b = ln p - ln q

d keeps its relative precision however close the two sides are: differences of near numbers are exact, and an error of
b is common to all ids, so that it enters KL in second order only.

Kernels release the GIL and start no threads: numba's own pools must not be entered from two threads at once, and
these run beside an engine's. NaN and +inf never reach the arithmetic, so that reductions may be reassociated. They
share one file because numba's disk cache watches only the file of the outermost function.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness._widen import Floats, Ints, compiled

SUMMING = {"reassoc", "contract", "nsz"}  # lets sums vectorise; infinities and NaN keep their meaning
FUSING = {"contract"}  # multiply-add only

FAR = 1e100  # stands for an infinite distance below the maximum: its probability is 0 and its square finite
SMALL = 0.25  # |d| below which e^-d - 1 + d is summed as a series
BLOCK = 256  # ids looked at together when searching the top

LOG2_E = 1.4426950408889634
LN2_HIGH = 2977044472 / 2**32  # 32 bits of ln 2: exact when multiplied by an exponent
LN2_LOW = -4.2009150726810846e-11  # ln 2 - LN2_HIGH
TO_INTEGER = 1.5 * 2.0**52  # adding it leaves the rounded value in the low bits
EXP_FLOOR = -708.0  # below, e^x is almost subnormal


class Sums(NamedTuple):
    """Sums over some ids; u and e = d - d of the reference's top-1 are weighted by p."""

    forward: float  # KL(p || q) terms
    reverse: float  # KL(q || p) terms
    moved: float  # q - p
    u: float
    uu: float
    e: float
    ee: float
    ue: float
    plain: float  # squared logit difference after the best common offset, unweighted


# --------------------------------------------------------------------------- arithmetic


@compiled(FUSING)
def exp(x: float) -> float:
    """e^x for x <= 0 (-inf included) to about 1 ulp, in a form that vectorises; 0 below -708.

    x = n ln 2 + f with |f| <= ln 2 / 2, where the Taylor series to f^13 / 13! is exact to 4e-18.
    """
    y = x if x > EXP_FLOOR else EXP_FLOOR
    shifted = y * LOG2_E + TO_INTEGER
    n = shifted - TO_INTEGER
    f = (y - n * LN2_HIGH) - n * LN2_LOW
    s = 1 / 39916800 + f * (1 / 479001600 + f * (1 / 6227020800))
    s = 1 / 40320 + f * (1 / 362880 + f * (1 / 3628800 + f * s))
    s = 1 / 120 + f * (1 / 720 + f * (1 / 5040 + f * s))
    s = 1 + f * (1 + f * (1 / 2 + f * (1 / 6 + f * (1 / 24 + f * s))))
    bits = np.float64(s).view(np.int64) + (np.float64(shifted).view(np.int64) << 52)  # adds n to the exponent
    return np.int64(bits).view(np.float64) if x > EXP_FLOOR else 0.0


@compiled(FUSING)
def divergence(p: float, q: float, d: float) -> tuple[float, float, float]:
    """Returns p g(d), q g(-d) and q - p, where g(d) = e^-d - 1 + d >= 0 and d = ln p - ln q, all finite.

    Over ids of mass 1 on both sides, the first sums to KL(p || q) and the second to KL(q || p). For small d, where
    q - p + p d would cancel, g(d) = d^2 (even - odd) with the series cut after d^12 / 12!, exact to 1e-16.
    """
    s = d * d
    even = 1 / 2 + s * (1 / 24 + s * (1 / 720 + s * (1 / 40320 + s * (1 / 3628800 + s * (1 / 479001600)))))
    odd = d * (1 / 6 + s * (1 / 120 + s * (1 / 5040 + s * (1 / 362880 + s * (1 / 39916800)))))
    small = abs(d) < SMALL
    forward = p * (s * (even - odd)) if small else q - p + p * d
    reverse = q * (s * (even + odd)) if small else p - q - q * d
    moved = p * (s * (even - odd) - d) if small else q - p
    return forward, reverse, moved


@compiled()
def top(row: Floats, values: Floats, ids: Ints) -> None:
    """Fills in the largest len(values) <= V of a row without NaN, descending, lower id first among equals."""
    k = values.size
    filled = 0
    for start in range(0, row.size, BLOCK):
        stop = min(start + BLOCK, row.size)
        if filled == k:
            hits = 0
            for j in range(start, stop):
                hits += row[j] > values[k - 1]
            if hits == 0:
                continue
        for j in range(start, stop):
            if filled == k and not row[j] > values[k - 1]:
                continue
            filled = min(filled + 1, k)
            place = filled - 1
            while place > 0 and values[place - 1] < row[j]:
                values[place] = values[place - 1]
                ids[place] = ids[place - 1]
                place -= 1
            values[place] = row[j]
            ids[place] = j


@compiled(SUMMING)
def _exp_sum(row: Floats, shift: float, out: Floats) -> float:
    """Writes e^(row - shift) to out and returns its sum."""
    total = 0.0
    for j in range(row.size):
        value = exp(row[j] - shift)
        out[j] = value
        total += value
    return total


@compiled()
def _log_sum_exp(row: Floats, scratch: Floats) -> float:
    value, which = np.empty(1), np.empty(1, np.int64)
    top(row, value, which)
    return float(value[0] + math.log(_exp_sum(row, value[0], scratch)))


@compiled()
def summarise(rows: Floats, bad: Ints, scratch: Floats, lse: Floats, values: Floats, ids: Ints) -> None:
    """Log-sum-exp [P] and top K [P, K] of screened rows [P, V]; lse is NaN where a row is bad."""
    for i in range(rows.shape[0]):
        top(rows[i], values[i], ids[i])
        lse[i] = np.nan if bad[i] else values[i, 0] + math.log(_exp_sum(rows[i], values[i, 0], scratch))


# --------------------------------------------------------------------------- comparing


@compiled()
def _rank(row: Floats, which: int) -> int:
    """How many ids come before `which` in descending order, lower id first among equals."""
    before = 0
    for j in range(row.size):
        before += row[j] > row[which]
    for j in range(which):
        before += row[j] == row[which]
    return before


@compiled()
def _take_out(r: Floats, c: Floats, ids: Ints) -> int:
    """Takes the ids out of both rows, filling the holes from the end; returns the length that is left."""
    n = r.size
    last = n
    for _ in range(ids.size):  # highest id first: what fills a hole is then never one of the ids
        highest = -1
        for j in range(ids.size):
            if highest < ids[j] < last:
                highest = ids[j]
        n -= 1
        r[highest] = r[n]
        c[highest] = c[n]
        last = highest
    return n


@compiled()
def _unmask(r: Floats, c: Floats, r_max: float, c_max: float) -> tuple[int, int, int]:
    """Drops ids that are -inf on both sides and writes finite stand-ins for the others.

    Returns the length that is left, and how many ids are -inf in the reference only and in the candidate only.
    """
    n = r.size
    r_only = 0
    c_only = 0
    j = 0
    while j < n:
        if r[j] == -np.inf and c[j] == -np.inf:
            n -= 1
            r[j] = r[n]
            c[j] = c[n]
            continue
        if r[j] == -np.inf:
            r[j] = r_max - FAR
            r_only += 1
        elif c[j] == -np.inf:
            c[j] = c_max - FAR
            c_only += 1
        j += 1
    return n, r_only, c_only


@compiled(SUMMING)
def _gap_sum(r: Floats, c: Floats, shift: float) -> float:
    total = 0.0
    for j in range(r.size):
        total += (r[j] - c[j]) - shift
    return total


@compiled(SUMMING)
def _sums(r: Floats, c: Floats, exp_r: Floats, exp_c: Floats, shifts: tuple[float, ...]) -> Sums:
    """One pass over the head or the tail; see `Sums`."""
    r_max, shift, r_mass, c_mass, b, a_top, gap = shifts
    r_scale = 1 / r_mass
    c_scale = 1 / c_mass
    forward = reverse = moved = pu = puu = pe = pee = pue = plain = 0.0
    for j in range(r.size):
        p = exp_r[j] * r_scale
        q = exp_c[j] * c_scale
        u = r[j] - r_max
        a = (r[j] - c[j]) - shift
        e = a - a_top
        f, g, m = divergence(p, q, a - b)
        forward += f
        reverse += g
        moved += m
        pu += p * u
        puu += p * u * u
        pe += p * e
        pee += p * e * e
        pue += p * u * e
        plain += (a - gap) * (a - gap)
    return Sums(forward, reverse, moved, pu, puu, pe, pee, pue, plain)


@compiled()
def _mass_beyond_top(exp_head: Floats, ids: Ints, which: int) -> float:
    """Sum of e^(logit - max) over the head without its largest, id `which`, whose term is 1."""
    total = 0.0
    found = False
    for j in range(ids.size):
        if ids[j] == which:
            found = True
        else:
            total += exp_head[j]
    return total if found else total - 1.0


@compiled()
def _bucket(
    r: Floats, c: Floats, c_only: int, p: float, q: float, moved: float, lse_gap: float, scratch: Floats
) -> float:
    """The merged tail's term of KL(p || q), of mass p and q; `lse_gap` is the rows' log-sum-exp, r's less c's."""
    if c_only > 0 and c_only == c.size:
        return np.inf
    if p == 0.0:
        return q
    growth = moved / p  # q / p - 1, summed from small terms
    if abs(growth) < 0.5:
        return divergence(p, q, -math.log1p(growth))[0]
    return divergence(p, q, (_log_sum_exp(r, scratch) - _log_sum_exp(c, scratch)) - lse_gap)[0]


@compiled()
def _compare_row(
    r: Floats, c: Floats, target: int, exp_r: Floats, exp_c: Floats, floats: Floats, ints: Ints, kept: int
) -> None:
    """Every column of one position, in the order of `metrics.FLOAT_COLUMNS` and `INT_COLUMNS`. Overwrites r and c."""
    head_r, ids = np.empty(kept), np.empty(kept, np.int64)
    c_first, c_id = np.empty(1), np.empty(1, np.int64)
    top(r, head_r, ids)
    top(c, c_first, c_id)
    k = kept
    while head_r[k - 1] == -np.inf:
        k -= 1
    head_r, ids, head_c = head_r[:k], ids[:k], np.empty(k)
    for j in range(k):
        head_c[j] = c[ids[j]]
    r_max, c_max = head_r[0], c_first[0]
    ints[0], ints[1], ints[2] = _rank(c, ids[0]), ids[0], c_id[0]
    r_target, c_target = r[target] - r_max, c[target] - c_max

    n = _take_out(r, c, ids)
    n, r_only, tail_c_only = _unmask(r[:n], c[:n], r_max, c_max)
    r, c, exp_r, exp_c = r[:n], c[:n], exp_r[:n], exp_c[:n]
    head_c_only = _unmask(head_r, head_c, r_max, c_max)[2]
    exp_head_r, exp_head_c = np.empty(k), np.empty(k)
    _exp_sum(head_r, r_max, exp_head_r)
    _exp_sum(head_c, c_max, exp_head_c)
    r_tail, c_tail = _exp_sum(r, r_max, exp_r), _exp_sum(c, c_max, exp_c)
    r_rest = r_tail + _mass_beyond_top(exp_head_r, ids, ids[0])
    c_rest = c_tail + _mass_beyond_top(exp_head_c, ids, c_id[0])
    r_ln, c_ln, r_mass, c_mass = math.log1p(r_rest), math.log1p(c_rest), 1 + r_rest, 1 + c_rest

    shift, b = r_max - c_max, r_ln - c_ln
    a_top = (head_r[0] - head_c[0]) - shift
    gap = (_gap_sum(head_r, head_c, shift) + _gap_sum(r, c, shift)) / (k + n)
    shifts = (r_max, shift, r_mass, c_mass, b, a_top, gap)
    head = _sums(head_r, head_c, exp_head_r, exp_head_c, shifts)
    tail = _sums(r, c, exp_r, exp_c, shifts)
    bucket = _bucket(r, c, tail_c_only, r_tail / r_mass, c_tail / c_mass, tail.moved, shift + b, exp_r)

    u, e = head.u + tail.u, head.e + tail.e
    u_variance = head.uu + tail.uu - u * u
    slope = 1 - (head.ue + tail.ue - u * e) / u_variance if u_variance > 0 else np.nan
    worst = 0.0
    mass = 0.0
    for j in range(k):
        worst = max(worst, abs(((head_r[j] - head_c[j]) - shift) - b))
        mass += exp_head_c[j] / c_mass
    floats[0] = head.forward + bucket
    floats[1] = head.forward + tail.forward
    floats[2] = head.reverse + tail.reverse
    floats[3] = r_max - head_r[1] if k > 1 else np.inf
    floats[4] = r_ln - u
    floats[5] = r_ln - r_target
    floats[6] = c_ln - c_target
    floats[7] = math.sqrt(max(head.ee + tail.ee - e * e, 0.0))
    floats[8] = math.sqrt((head.plain + tail.plain) / (k + n))
    floats[9] = slope
    floats[10] = c_max + (u - a_top - e) - slope * (r_max + u)
    floats[11] = worst
    floats[12] = mass
    floats[13] = r_max + r_ln
    floats[14] = c_max + c_ln
    if head_c_only + tail_c_only > 0:  # the candidate rules out what the reference does not
        floats[1] = floats[7] = floats[8] = np.inf
        floats[9] = floats[10] = np.nan
    if head_c_only > 0:
        floats[0] = floats[11] = np.inf
    if r_only > 0:
        floats[2] = floats[8] = np.inf


@compiled()
def compare_rows(
    r: Floats,
    c: Floats,
    bad: NDArray[np.bool_],
    targets: NDArray[np.int32],
    exp_r: Floats,
    exp_c: Floats,
    floats: Floats,
    ints: Ints,
    kept: int,
) -> None:
    """Columns of screened rows [P, V] into floats [P, 15] and ints [P, 3], left alone where a row is bad."""
    for i in range(r.shape[0]):
        if not bad[i]:
            _compare_row(r[i], c[i], targets[i], exp_r, exp_c, floats[i], ints[i], kept)
