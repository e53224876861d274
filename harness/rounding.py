"""Rounding to fewer bits, at any site of an engine. Torch is imported when a function is called.

Shape legend: N output features, K input features, G input features of one quantisation group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from harness.errors import UsageError

if TYPE_CHECKING:
    import torch

FORMATS = ("f32", "bf16", "f16", "e4m3", "e5m2")
"""Number formats by name; "e4m3x448" and the like are cast after scaling by that number, and scaled back."""


def keep_bits(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Keep `bits` explicit mantissa bits, rounding to nearest even; the exponent range stays that of the dtype.

    Any shape; float32, float64, bfloat16 or float16 in, the same dtype out. Signed zeros, NaN and infinities are kept;
    the largest finite values may round up to infinity, as IEEE has it. Subnormals are rounded at the same bit of
    their stored mantissa. `bits` at or above the dtype's own (23, 52, 7, 10) changes nothing.

    Raises:
        UsageError: `bits` is negative.
    """
    import torch

    if bits < 0:
        raise UsageError(f"keep_bits: mantissa bits must be 0 or more, not {bits}")
    integer, own = {
        torch.float32: (torch.int32, 23),
        torch.float64: (torch.int64, 52),
        torch.bfloat16: (torch.int16, 7),
        torch.float16: (torch.int16, 10),
    }[tensor.dtype]
    drop = own - bits
    if drop <= 0:
        return tensor.clone()
    raw = tensor.contiguous().view(integer)
    # Adding just under half, plus the last kept bit, carries exactly when rounding to even goes up. In two's
    # complement the sign bit rides along untouched: the magnitude of a finite value never carries into it.
    rounded = (raw + ((1 << (drop - 1)) - 1) + ((raw >> drop) & 1)) & -(1 << drop)
    return torch.where(tensor.isfinite(), rounded.view(tensor.dtype), tensor)


def through(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Round through another format and back to the tensor's dtype; fp8 saturates, as engines' casts do.

    Args:
        tensor: any shape, floating point.
        name: one of `FORMATS`, or one followed by "x" and a scale. "f32" returns the tensor itself.

    Raises:
        UsageError: an unknown format.
    """
    base, scale = parse_format(name)
    if base == "f32":
        return tensor
    return cast_through(tensor, base) if scale == 1 else cast_through(tensor * scale, base) / scale


def parse_format(name: str) -> tuple[str, float]:
    """A format's name as (one of `FORMATS`, scale): "e4m3x448" is ("e4m3", 448.0), "bf16" is ("bf16", 1.0).

    Raises:
        UsageError: an unknown format, or a scale that is not a positive number.
    """
    base, _, scale = name.partition("x")
    if base not in FORMATS or not (not scale or scale.replace(".", "", 1).isdigit()) or name.endswith("x"):
        raise UsageError(
            f"unknown number format {name!r}: use one of {', '.join(FORMATS)}, or one with a scale (e4m3x448)"
        )
    return base, float(scale or 1)


def cast_through(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Cast to "bf16", "f16", "e4m3" or "e5m2" and back; fp8 saturates at its largest finite value, NaN stays NaN."""
    import torch

    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    if name in ("e4m3", "e5m2"):
        largest = torch.finfo(dtype).max
        tensor = tensor.clamp(-largest, largest)
    return tensor.to(dtype).to(tensor.dtype)


class Quantised(NamedTuple):
    """Integer codes of a weight in groups along its input features; `codes * scale + zero` gives it back."""

    codes: torch.Tensor  # [N, K/G, G] f32, whole numbers in 0 .. 2**bits - 1
    scale: torch.Tensor  # [N, K/G, 1] f32, above 0
    zero: torch.Tensor  # [N, K/G, 1] f32, the value of code 0

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight these codes stand for, [N, K]."""
        return (self.codes * self.scale + self.zero).flatten(1).to(dtype)


def quantise(weight: torch.Tensor, *, bits: int, group: int) -> Quantised:
    """Round a weight [N, K] to `bits`-bit codes with a scale and zero point per `group` input features.

    Round to nearest between each group's least and greatest value. A group of equal values gets scale 1, code 0.

    Raises:
        UsageError: K is not a multiple of `group`.
    """
    import torch

    if weight.shape[1] % group:
        raise UsageError(f"quantise: {weight.shape[1]} input features are not a multiple of the group size {group}")
    grouped = weight.float().unflatten(1, (-1, group))
    zero, top = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    scale = (top - zero) / (2**bits - 1)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return Quantised(((grouped - zero) / scale).round(), scale, zero)
