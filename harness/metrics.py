"""Pure numerics: logits [P, V] in, per-position columns [P] out, f64. KL is KL(reference || candidate), in nats.

Legend: P positions, V vocabulary, K kept ids. Logits come as a recording stores them: uint16 bits for bfloat16, else
the numpy dtype of that name. The arithmetic is in `harness._widen` and `harness._kernels`, compiled on the first call
(some seconds once per machine, then cached on disk); importing this module costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import MismatchError
from harness.types import LogitsDtype

K = 20
"""The reference's ids that KL takes one by one; all others are merged into one bucket."""

FLOAT_COLUMNS = (
    "kl20",
    "kl_full",
    "kl_reverse",
    "margin",
    "entropy",
    "nll_reference",
    "nll_candidate",
    "error_weighted",
    "error_plain",
    "slope",
    "offset",
    "max_logprob_error20",
    "mass20",
    "lse_reference",
    "lse_candidate",
)
INT_COLUMNS = ("rank", "top1_reference", "top1_candidate")
COUNT_COLUMNS = ("nonfinite_reference", "neginf_candidate", "nan_candidate")

COLUMNS = ("flip", *INT_COLUMNS, *FLOAT_COLUMNS, *COUNT_COLUMNS)
"""Names of the columns `position_metrics` returns, in order."""

TILE = 1 << 16  # logits widened at a time: rows stay in the processor's cache, calls stay few at a small vocabulary

STORED: dict[str, type[Any]] = {
    "bfloat16": np.uint16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
}


def decode(raw: NDArray[Any], dtype: LogitsDtype) -> NDArray[Any]:
    """Stored logits as numpy floats: bfloat16 bits (uint16) and float16 become float32, float32 and float64 stay.

    Any shape, empty included; exact; NaN and infinities are kept. Raises MismatchError if `raw` is not what a
    recording of that dtype stores.
    """
    _check_dtype(raw, dtype, "logits")
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(np.float32) if dtype == "float16" else raw


def position_metrics(
    reference: NDArray[Any],
    reference_dtype: LogitsDtype,
    candidate: NDArray[Any],
    candidate_dtype: LogitsDtype,
    targets: NDArray[np.int32],
    *,
    threads: int | None = None,
) -> dict[str, NDArray[Any]]:
    """Every column of `COLUMNS` for rows of the same positions.

    `reference` and `candidate` are [P, V] as stored, `targets` [P] the ids the rows predict. With p and q the two
    distributions, delta = candidate - reference logit, d = ln p - ln q, and top 20 by reference logit (lower id first
    among equals, finite logits only, fewer if V is smaller):

    - `kl20`: sum p (e^-d - 1 + d) over the top 20 and over one bucket holding all other ids. >= 0 by its form, and
      at most `kl_full` up to rounding; no bucket if the top 20 are all. `kl_full`: the same over every id.
      `kl_reverse`: KL(q || p) over every id. [nats]
    - `top1_reference`, `top1_candidate`: ids, the lower of equals; `flip`: they differ. `rank`: of the reference's
      top-1 in the candidate, 0 at the top, lower id first among equals.
    - `margin`: reference's top-1 minus top-2 logit; 0 is a tie, +inf if there is no second finite logit.
    - `entropy`: of p. `nll_reference`, `nll_candidate`: -ln of the target's probability. `lse_reference`,
      `lse_candidate`: log-sum-exp of the logits. [nats]
    - `error_weighted`: standard deviation of delta under p; `error_plain`: the same with all ids weighted alike. Both
      are the root-mean-square logit error after the offset that serves it best.
    - `slope`, `offset`: least squares of candidate ~ slope * reference + offset, weighted by p (a temperature T left
      in the candidate reads as 1 / T). NaN if the reference has no spread under p, or one too small for f64.
    - `max_logprob_error20`: largest |d| over the top 20. `mass20`: the candidate's mass on the top 20.
    - `nonfinite_reference`, `nan_candidate`: entries that are NaN or +inf, V if every logit is -inf;
      `neginf_candidate`: entries that are -inf.

    An id at -inf on both sides counts for nothing. -inf in the candidate where p > 0 makes `kl_full` and the errors
    +inf, `slope` and `offset` NaN, and `kl20` +inf if it is in the top 20 or leaves the bucket empty; -inf in the
    reference where q > 0 makes `kl_reverse` and `error_plain` +inf. A row with a non-finite entry on either side has
    NaN in every float column, -1 in rank and ids, and counts as a flip: it cannot be skipped by accident.

    `threads` defaults to `default_threads()`. Adding a constant to a side changes nothing but its `lse` and `offset`.
    P = 0 gives empty columns. Sums depend on the processor's vector width, in the last bits only. |logits| up to
    1e100. Raises MismatchError on shapes, dtypes or targets that do not fit.
    """
    reference = _rows(reference, reference_dtype, "reference")
    candidate = _rows(candidate, candidate_dtype, "candidate")
    positions, vocabulary = reference.shape
    if candidate.shape != reference.shape:
        raise MismatchError(
            f"the reference's rows are {reference.shape}, the candidate's {candidate.shape}: align positions and "
            "vocabulary before comparing"
        )
    _check_targets(targets, positions, vocabulary)
    floats = np.full((positions, len(FLOAT_COLUMNS)), np.nan)
    ints = np.full((positions, len(INT_COLUMNS)), -1, np.int64)
    counts = np.empty((4, positions), np.int64)
    targets = np.ascontiguousarray(targets, np.int32)

    def work(tiles: list[slice]) -> None:
        from harness import _kernels  # here: importing numba is slow

        widen_r, widen_c = _widener(reference_dtype), _widener(candidate_dtype)
        wide_r, wide_c = _scratch(vocabulary), _scratch(vocabulary)
        exp_r, exp_c = np.empty(vocabulary), np.empty(vocabulary)
        for tile in tiles:
            r, c = wide_r[: tile.stop - tile.start], wide_c[: tile.stop - tile.start]
            bad_r, masked_r, bad_c, masked_c = counts[:, tile]
            widen_r(reference[tile], r, bad_r, masked_r)
            widen_c(candidate[tile], c, bad_c, masked_c)
            bad = (bad_r > 0) | (bad_c > 0)
            kept = min(K, vocabulary)
            _kernels.compare_rows(r, c, bad, targets[tile], exp_r, exp_c, floats[tile], ints[tile], kept)

    _share(work, positions, vocabulary, threads)
    columns: dict[str, NDArray[Any]] = {
        **dict(zip(INT_COLUMNS, ints.T.copy(), strict=True)),
        **dict(zip(FLOAT_COLUMNS, floats.T.copy(), strict=True)),
        **dict(zip(COUNT_COLUMNS, (counts[0], counts[3], counts[2]), strict=True)),
    }
    top1, other = columns["top1_reference"], columns["top1_candidate"]
    columns["flip"] = (top1 != other) | (top1 < 0)
    return {name: columns[name] for name in COLUMNS}


def row_summary(
    raw: NDArray[Any], dtype: LogitsDtype, k: int = 64, *, threads: int | None = None
) -> tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.float32]]:
    """Log-sum-exp [P] f64 in nats, and the top ids [P, k'] int32 with their logits [P, k'] f32, k' = min(k, V).

    `raw` is [P, V] as stored. Descending, lower id first among equals. A row with NaN or +inf, or with -inf alone,
    has lse NaN; its non-finite entries rank last and read -inf. P = 0 gives empty arrays. Raises MismatchError on a
    shape or dtype that does not fit.
    """
    raw = _rows(raw, dtype, "logits")
    positions, vocabulary = raw.shape
    k = min(k, vocabulary)
    lse, values, ids = np.empty(positions), np.empty((positions, k)), np.empty((positions, k), np.int64)

    def work(tiles: list[slice]) -> None:
        from harness import _kernels

        widen = _widener(dtype)
        wide, scratch = _scratch(vocabulary), np.empty(vocabulary)
        for tile in tiles:
            rows = wide[: tile.stop - tile.start]
            bad, masked = np.empty((2, len(rows)), np.int64)
            widen(raw[tile], rows, bad, masked)
            _kernels.summarise(rows, bad, scratch, lse[tile], values[tile], ids[tile])

    _share(work, positions, vocabulary, threads)
    return lse, ids.astype(np.int32), values.astype(np.float32)


def default_threads() -> int:
    """OMP_NUM_THREADS if it is set to a number, but no more than the processors this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(allowed, int(wanted))) if wanted.isdigit() else allowed


def _share(work: Callable[[list[slice]], None], positions: int, vocabulary: int, threads: int | None) -> None:
    """Runs `work` over tiles of rows, interleaved between threads; an exception in any of them is raised here."""
    rows = _tile_rows(vocabulary)
    tiles = [slice(i, min(i + rows, positions)) for i in range(0, positions, rows)]
    threads = min(threads or default_threads(), len(tiles))
    if threads <= 1:
        work(tiles)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, [tiles[i::threads] for i in range(threads)]))


def _tile_rows(vocabulary: int) -> int:
    return max(1, TILE // vocabulary)


def _scratch(vocabulary: int) -> NDArray[np.float64]:
    return np.empty((_tile_rows(vocabulary), vocabulary))


def _widener(dtype: LogitsDtype) -> Callable[..., None]:
    from harness import _widen

    return {"bfloat16": _widen.widen_bfloat16, "float16": _widen.widen_float16}.get(dtype, _widen.widen_float)


def _rows(raw: NDArray[Any], dtype: LogitsDtype, name: str) -> NDArray[Any]:
    """The rows as the kernels take them: contiguous [P, V >= 1], float16 as its bits."""
    _check_dtype(raw, dtype, name)
    if raw.ndim != 2 or raw.shape[1] == 0:
        raise MismatchError(f"{name}: expected rows of shape [positions, vocabulary], got {raw.shape}")
    raw = np.ascontiguousarray(raw)
    return raw.view(np.uint16) if dtype == "float16" else raw


def _check_dtype(raw: NDArray[Any], dtype: LogitsDtype, name: str) -> None:
    if dtype not in STORED:
        raise MismatchError(f"{name}: unknown dtype {dtype!r}; expected one of {', '.join(STORED)}")
    if raw.dtype != STORED[dtype]:
        raise MismatchError(f"{name}: {dtype} logits are kept as {np.dtype(STORED[dtype])}, got {raw.dtype}")


def _check_targets(targets: NDArray[Any], positions: int, vocabulary: int) -> None:
    if targets.shape != (positions,):
        raise MismatchError(f"targets: expected one id for each of {positions} rows, got shape {targets.shape}")
    outside = np.flatnonzero((targets < 0) | (targets >= vocabulary))
    if len(outside):
        row = int(outside[0])
        raise MismatchError(
            f"targets: {len(outside)} ids lie outside the vocabulary of {vocabulary}, first {int(targets[row])} at "
            f"row {row}; were the rows made for another tokenizer?"
        )
