"""Are the values raw logits? Log-probs, temperatures, masks, misread bits and other vocabularies are named here.

Rows can be in the right place and still not hold what the engine's head gave. As in `alignment`, columns say where to
look, a few rows are read again, and every claim states how much better it fits than the rows as they are.

Shape legend: P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from harness.evidence import (
    EXPLAINED,
    LEAST_LOGPROB,
    MOST,
    Array,
    Group,
    RowSource,
    kl,
    logprobs,
    split_groups,
    spread,
    suspicious_rows,
)
from harness.metrics import decode
from harness.types import Columns, Finding, LogitsDtype, Phase

LogProbs = NDArray[np.float32]

SAMPLED_ROWS = 32
NORMALISED_LSE = 0.05  # nats: log-probs have a log-sum-exp of zero; 16-bit rounding moves it by less than this
NORMALISED_SUM = 0.01  # of probabilities in 16 bits
LEAST_SLOPE = 0.02  # |slope - 1|, median over a phase: a hundred times what rounding does to thousands of rows
TEMPERED = 0.5  # a temperature is named if undoing it at least halves the KL: other faults keep theirs
CAPPED = 0.5  # a soft cap is named if it leaves at most half the KL that a temperature leaves
SAME_PROFILE_KL = 0.02  # nats between sorted probabilities
UNSURE_ENTROPY = 0.5  # nats: only rows with several likely ids can show that their ids were exchanged
UNRELATED_CORRELATION = 0.1  # of logits over the vocabulary; the id frequencies alone give a broken engine more


def distorted(
    positions: Columns, reference: RowSource, candidate: RowSource, *, misplaced: bool
) -> tuple[Finding, ...]:
    """What was done to a candidate's values, as findings with their evidence; empty if they look like raw logits.

    `misplaced` says that rows were already found to belong elsewhere: the search for other explanations is left
    out then. Columns as `alignment.misplaced` takes them; rows with NaN are left out.
    """
    masked = _masked(positions, candidate)
    findings = [*_normalised(positions), *masked]
    suspicious = suspicious_rows(positions)
    sound = positions["nan_candidate"] == 0
    if not misplaced and suspicious.any() and suspicious.sum() >= 0.5 * sound.sum():
        rows = spread(np.flatnonzero(suspicious), SAMPLED_ROWS)
        logp, raw, own = _sample(positions, rows, reference, candidate)
        strange = _misread(logp, raw, own, candidate.dtype) or _exponentiated(raw, candidate.dtype)
        strange = strange or _renumbered(logp, own, positions["entropy"][rows]) or _unrelated(logp, own)
        if strange:
            return (*findings, *strange)
    if not misplaced and not masked:
        findings += _tempered(positions, sound, reference, candidate)
    return tuple(findings)


def _sample(
    positions: Columns, rows: NDArray[np.int64], reference: RowSource, candidate: RowSource
) -> tuple[LogProbs, Array, LogProbs]:
    """Log-probs of the reference, raw rows of the candidate and their log-probs, each [P, V]."""
    logp, raw = [], []
    for group, index in _by_group(positions, rows):
        logp.append(reference.logprobs(group.segment, group.phase, index))
        raw.append(candidate.read(group.segment, group.phase, index))
    raw_pv = np.concatenate(raw)
    return np.concatenate(logp), raw_pv, logprobs(raw_pv, candidate.dtype)


def _by_group(positions: Columns, rows: NDArray[np.int64]) -> Iterator[tuple[Group, NDArray[np.int64]]]:
    for group in split_groups(positions):
        wanted = rows[(rows >= group.rows[0]) & (rows <= group.rows[-1])]
        if len(wanted):
            yield group, np.asarray(positions["index"][wanted], np.int64)


# --------------------------------------------------------------------------- from the columns


def _normalised(positions: Columns) -> list[Finding]:
    """Log-probs where logits belong: a constant per row, so no KL shows it."""
    lse, reference = positions["lse_candidate"], positions["lse_reference"]
    finite = np.isfinite(lse)
    if not finite.any() or np.abs(lse[finite]).max() > NORMALISED_LSE or np.median(np.abs(reference)) < 0.5:
        return []
    message = (
        f"log-probs are stored where logits belong: the log-sum-exp of all {int(finite.sum())} rows is 0 (largest "
        f"{np.abs(lse[finite]).max():.2g}; the reference's median is {np.median(reference):.2f}): capture the logits "
        "before the log-softmax, or what happens before it goes unseen"
    )
    return [Finding(code="log-probs-stored", message=message, fatal=True)]


def _masked(positions: Columns, candidate: RowSource) -> list[Finding]:
    """Ids at -inf in most rows of a phase: a sampling mask or a processor ran before the capture."""
    findings = []
    for phase, rows in _phases(positions):
        masked = positions["neginf_candidate"][rows]
        # An infinite KL says that the reference has these ids: masking what both lack is no difference.
        share = float(np.mean((masked > 0) & np.isinf(positions["kl_full"][rows])))
        if share < 0.5:
            continue
        least, most = int(masked.min()), int(masked.max())
        what = f"{most} ids" if least == most else f"{least} to {most} ids"
        kept = _top_k(positions, spread(rows, SAMPLED_ROWS), candidate)
        kind = (
            f"all but the {kept} largest and their equals, as a top-k mask leaves" if kept else "as a top-p mask leaves"
        )
        message = f"{phase} rows have {what} at -inf ({share:.0%} of rows; {kind} leaves): "
        message += "a mask or logits processor changed the logits"
        findings.append(Finding(code="logits-masked", message=message, fatal=False))
    return findings


def _top_k(positions: Columns, rows: NDArray[np.int64], candidate: RowSource) -> int:
    """The one k whose top-k mask explains what each row kept; 0 if there is none. A mask keeps what equals the k-th."""
    above, kept = [], []
    for group, index in _by_group(positions, rows):
        logits = decode(candidate.read(group.segment, group.phase, index), candidate.dtype)
        finite = np.isfinite(logits)
        lowest = np.where(finite, logits, np.inf).min(axis=-1, keepdims=True)
        above += (finite & (logits > lowest)).sum(axis=-1).tolist()
        kept += finite.sum(axis=-1).tolist()
    return min(kept) if max(above) < min(kept) else 0


def _tempered(
    positions: Columns, sound: NDArray[np.bool_], reference: RowSource, candidate: RowSource
) -> list[Finding]:
    """A slope far from 1 in a whole phase: a temperature, scale or soft cap that, undone, takes most of the KL away."""
    findings = []
    for phase, rows in _phases(positions):
        rows = rows[sound[rows]]
        slopes = positions["slope"][rows]
        slopes = slopes[np.isfinite(slopes)]
        if not len(slopes) or abs((slope := float(np.median(slopes))) - 1) < LEAST_SLOPE or slope <= 0:
            continue
        some = spread(rows, SAMPLED_ROWS)
        logp, _, own = _sample(positions, some, reference, candidate)
        before = float(np.median(kl(logp, own)))
        scaled = float(np.median(kl(logprobs(np.float32(slope) * logp, "float32"), own)))
        cap, capped = _soft_cap(_logits(positions, some, reference), own, applied=slope < 1)
        if min(scaled, capped) <= TEMPERED * before:
            soft = capped < CAPPED * scaled
            explained = _capped(cap, slope < 1, capped, scaled) if soft else _scaled(slope, scaled)
            message = f"{phase} logits {explained}; as they are, the median KL is {before:.2g})"
            code = "soft-cap-differs" if soft else "temperature-applied"
            findings.append(Finding(code=code, message=message, fatal=False))
    return findings


def _scaled(slope: float, left: float) -> str:
    what = f"as a temperature of {1 / slope:.3f} or a wrong scale would give"
    return f"are the reference's times {slope:.3f}, {what} (undone, a median KL of {left:.2g} is left"


def _capped(cap: float, applied: bool, left: float, scaled: float) -> str:
    what = "went through a soft cap of about" if applied else "lack the reference's soft cap of about"
    return (
        f"{what} {cap:.3g} (undone, a median KL of {left:.2g} is left, where undoing a temperature leaves {scaled:.2g}"
    )


def _soft_cap(logits: Array, own: LogProbs, *, applied: bool) -> tuple[float, float]:
    """The cap c that explains the candidate's log-probs best, and the median KL that it leaves.

    Applied to the reference's logits [P, V] it is c * tanh(x / c); undone, where the reference has it and the candidate
    does not, c * artanh(x / c).
    """
    largest = float(np.abs(logits).max())

    def left(log_cap: float, rows: slice) -> float:
        cap, some = np.float32(np.exp(log_cap)), logits[rows]
        changed = cap * (np.tanh(some / cap) if applied else np.arctanh(some / cap))
        return float(np.median(kl(logprobs(changed, "float32"), own[rows])))

    least = largest / 8 if applied else 1.001 * largest
    bounds, few = (np.log(least), np.log(8 * largest)), slice(None, None, 4)  # a search over all rows would take long
    best = minimize_scalar(left, args=(few,), bounds=bounds, method="bounded", options={"xatol": 0.01})
    return float(np.exp(best.x)), left(best.x, slice(None))


def _logits(positions: Columns, rows: NDArray[np.int64], source: RowSource) -> Array:
    """Rows as f32 logits, [P, V]; masked ids are as the smallest of the row that are not."""
    found = [decode(source.read(g.segment, g.phase, index), source.dtype) for g, index in _by_group(positions, rows)]
    logits = np.concatenate(found).astype(np.float32)
    kept = np.isfinite(logits)
    return np.where(kept, logits, np.where(kept, logits, np.inf).min(axis=-1, keepdims=True))


def _phases(positions: Columns) -> Iterator[tuple[Phase, NDArray[np.int64]]]:
    for phase in Phase:
        rows = np.flatnonzero(positions["phase"] == str(phase))
        if len(rows):
            yield phase, rows


# --------------------------------------------------------------------------- from rows read again


def _misread(logp: LogProbs, raw: Array, own: LogProbs, dtype: LogitsDtype) -> list[Finding]:
    """16-bit rows labelled with the other 16-bit format: read as that, they fit."""
    if dtype not in ("bfloat16", "float16"):
        return []
    other: LogitsDtype = "float16" if dtype == "bfloat16" else "bfloat16"
    bits = raw.view(np.float16 if other == "float16" else np.uint16)
    home, there = kl(logp, own), kl(logp, logprobs(bits, other))
    with np.errstate(invalid="ignore"):
        share = float(np.mean(there < EXPLAINED * home))
    if share < MOST:
        return []
    message = (
        f"rows are labelled {dtype} but their bits are {other} (median KL {np.median(home):.2g} as labelled, "
        f"{np.median(there):.2g} read as {other}): the recorder's logits_dtype is wrong"
    )
    return [Finding(code="wrong-dtype", message=message, fatal=True)]


def _exponentiated(raw: Array, dtype: LogitsDtype) -> list[Finding]:
    """Probabilities where logits belong: nothing below 0, and each row sums up to 1."""
    rows = decode(raw, dtype).astype(np.float64)
    with np.errstate(invalid="ignore"):
        off = np.abs(rows.sum(axis=-1) - 1)
    if (rows < 0).any() or not (off < NORMALISED_SUM).all():
        return []
    message = (
        f"probabilities are stored where logits belong: each of {len(rows)} rows looked at sums up to 1 (off by at "
        f"most {off.max():.2g}) and has nothing below 0: capture the logits before the softmax"
    )
    return [Finding(code="probabilities-stored", message=message, fatal=True)]


def _renumbered(logp: LogProbs, own: LogProbs, entropy: Array) -> list[Finding]:
    """The same probabilities on other ids: healthy rows whose columns mean something else."""
    unsure = entropy > UNSURE_ENTROPY
    if unsure.sum() < 4:
        return []
    home = kl(logp[unsure], own[unsure])
    there = kl(np.sort(logp[unsure], axis=-1), np.sort(own[unsure], axis=-1))
    share = float(np.mean((there < SAME_PROFILE_KL) & (there < EXPLAINED * home)))
    if share < MOST:
        return []
    message = (
        f"the candidate gives the reference's probabilities to other ids (median KL {np.median(home):.2g}, "
        f"{np.median(there):.2g} once both are sorted): its rows are numbered by another tokenizer, or the shards of "
        "its vocabulary were joined in another order"
    )
    return [Finding(code="other-tokenizer", message=message, fatal=True)]


def _unrelated(logp: LogProbs, own: LogProbs) -> list[Finding]:
    """No likeness at all. It cannot be told from outside whether the engine or its input is at fault: a FAIL."""
    correlation = float(np.median([_correlation(p, q) for p, q in zip(logp, own, strict=True)]))
    agreeing = int((logp.argmax(axis=-1) == own.argmax(axis=-1)).sum())
    if correlation > UNRELATED_CORRELATION or agreeing > 0.1 * len(logp):
        return []
    message = (
        f"rows bear no relation to the reference's (median correlation {correlation:.2f}, the top id agrees in "
        f"{agreeing} of {len(logp)} rows looked at): another model, text or tokenizer, or an engine that "
        "computes something else"
    )
    return [Finding(code="rows-unrelated", message=message, fatal=False)]


def _correlation(logp_v: Array, logq_v: Array) -> float:
    """Pearson's, of log-probs over the vocabulary; 0 if one of them is constant."""
    a, b = (np.maximum(row.astype(np.float64), LEAST_LOGPROB) for row in (logp_v, logq_v))
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / max(np.sqrt((a @ a) * (b @ b)), 1e-300))
