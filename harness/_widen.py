"""Stored logits to f64 rows, compiled, and how this package compiles. Imported on first use: numba loads slowly.

Legend: P positions, V vocabulary. NaN and +inf are counted and taken out here, so that no arithmetic meets them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])
Raw = NDArray[Any]  # [P, V] logits as stored; both 16-bit floats as uint16
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def compiled(fastmath: set[str] | bool = False) -> Callable[[F], F]:
    """`numba.njit` without the GIL, cached on disk where a cache folder can be written, else in memory only."""

    def wrap(function: F) -> F:
        try:
            result: F = numba.njit(nogil=True, cache=True, fastmath=fastmath)(function)
        except RuntimeError:  # neither the package's folder nor the user's cache is writable
            result = numba.njit(nogil=True, fastmath=fastmath)(function)
        return result

    return wrap


@compiled()
def widen_bfloat16(raw: Raw, out: Floats, bad: Ints, masked: Ints) -> None:
    """Decodes bf16 bits [P, V] to f64 and screens each row (see `_screen`)."""
    for i in range(raw.shape[0]):
        for j in range(raw.shape[1]):
            out[i, j] = np.uint32(raw[i, j] << 16).view(np.float32)
        bad[i], masked[i] = _screen(out[i])


@compiled()
def widen_float16(raw: Raw, out: Floats, bad: Ints, masked: Ints) -> None:
    """Decodes f16 bits [P, V] to f64 and screens each row."""
    for i in range(raw.shape[0]):
        for j in range(raw.shape[1]):
            size = raw[i, j] & 0x7FFF
            # The product moves the exponent's bias from 15 to 127, and makes subnormals right as well.
            value: float = np.float64(np.uint32(size << 13).view(np.float32)) * 2.0**112
            value = value if size < 0x7C00 else np.inf
            value = value if size <= 0x7C00 else np.nan
            out[i, j] = value if raw[i, j] < 0x8000 else -value
        bad[i], masked[i] = _screen(out[i])


@compiled()
def widen_float(raw: Raw, out: Floats, bad: Ints, masked: Ints) -> None:
    """Copies f32 or f64 [P, V] to f64 and screens each row."""
    for i in range(raw.shape[0]):
        for j in range(raw.shape[1]):
            out[i, j] = raw[i, j]
        bad[i], masked[i] = _screen(out[i])


@compiled()
def _screen(row: Floats) -> tuple[int, int]:
    """Counts NaN or +inf, writing -inf for them, and -inf. A row of -inf alone is no distribution: all bad."""
    bad = 0
    masked = 0
    for j in range(row.size):
        value = row[j]
        usable = value < np.inf
        bad += not usable
        masked += value == -np.inf
        row[j] = value if usable else -np.inf
    return (row.size if masked == row.size else bad), masked
