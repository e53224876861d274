"""Rounding helpers against ml_dtypes, against exact rational arithmetic, and at the edges."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.rounding import cast_through, keep_bits, parse_format, quantise, through

torch = pytest.importorskip("torch")

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def nearest_even(value: float, bits: int) -> float:
    """Round a normal f32 to `bits` mantissa bits in exact arithmetic."""
    mantissa, exponent = math.frexp(value)  # value = mantissa 2**exponent, 0.5 <= |mantissa| < 1
    scaled = Fraction(mantissa) * 2 ** (bits + 1)
    return float(Fraction(round(scaled)) / 2 ** (bits + 1) * Fraction(2) ** exponent)  # round() ties to even


@given(FINITE.filter(lambda x: 2.0**-126 <= abs(x) < 2.0**127), st.integers(0, 22))
def test_keep_bits_rounds_to_nearest_even(value: float, bits: int) -> None:
    assert keep_bits(torch.tensor([value]), bits).item() == nearest_even(value, bits)


@given(FINITE)
def test_seven_bits_are_bfloat16(value: float) -> None:
    tensor = torch.tensor([value])
    assert torch.equal(keep_bits(tensor, 7), tensor.bfloat16().float())


@given(FINITE, st.integers(0, 23))
def test_keep_bits_is_odd_and_idempotent(value: float, bits: int) -> None:
    tensor = torch.tensor([value])
    once = keep_bits(tensor, bits)
    assert torch.equal(keep_bits(once, bits), once)
    assert torch.equal(keep_bits(-tensor, bits), -once)


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16"])
def test_special_values_are_kept(name: str) -> None:
    tensor = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan], dtype=getattr(torch, name))
    kept = keep_bits(tensor, 2)
    assert kept.dtype == tensor.dtype
    assert torch.equal(kept.signbit()[:4], tensor.signbit()[:4])
    assert torch.equal(kept[:4], tensor[:4])
    assert kept[4].isnan()


@pytest.mark.parametrize(("name", "own"), [("float32", 23), ("float64", 52), ("bfloat16", 7), ("float16", 10)])
def test_each_dtype_has_its_own_width(name: str, own: int) -> None:
    dtype = getattr(torch, name)
    tensor = torch.tensor([1 + 2.0**-own], dtype=dtype)
    assert keep_bits(tensor, own).item() == tensor.item()
    assert keep_bits(tensor, own - 1).item() == 1.0  # a tie: to even
    assert keep_bits(torch.tensor([1 + 3 * 2.0**-own], dtype=dtype), own - 1).item() == 1 + 2.0 ** -(own - 2)


def test_the_largest_values_round_up_to_infinity() -> None:
    assert keep_bits(torch.tensor([torch.finfo(torch.float32).max]), 3).item() == math.inf


def test_shapes_and_inputs_are_left_alone() -> None:
    tensor = torch.randn(2, 3, 4).transpose(0, 2)
    before = tensor.clone()
    assert keep_bits(tensor, 3).shape == tensor.shape
    assert torch.equal(tensor, before)
    assert keep_bits(torch.empty(0, 3), 3).shape == (0, 3)


@given(FINITE)
def test_fp8_saturates_and_agrees_with_ml_dtypes(value: float) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    import numpy as np

    for name, dtype, largest in (("e4m3", ml_dtypes.float8_e4m3fn, 448.0), ("e5m2", ml_dtypes.float8_e5m2, 57344.0)):
        clamped = np.clip(np.float32(value), -largest, largest)
        assert cast_through(torch.tensor([value]), name).item() == float(clamped.astype(dtype))


def test_a_scale_moves_what_underflows() -> None:
    small = torch.tensor([2.0**-11])  # under half of e4m3's smallest step, 2**-9
    assert through(small, "e4m3").item() == 0
    assert through(small, "e4m3x448").item() == pytest.approx(2.0**-11, rel=2.0**-4)
    assert through(small, "f32") is small
    assert through(torch.tensor([1.0]), "e4m3x4096").item() == 448 / 4096


@pytest.mark.parametrize("name", ["e3m4", "e4m3x", "x448", "e4m3x-1", "", "e4m3xa"])
def test_unknown_formats_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="unknown number format"):
        parse_format(name)


def test_negative_bits_are_refused() -> None:
    with pytest.raises(UsageError, match="not -1"):
        keep_bits(torch.ones(1), -1)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantised_weights_are_within_half_a_step(bits: int) -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    groups = quantise(weight, bits=bits, group=32)
    assert groups.codes.shape == (6, 2, 32)
    assert groups.codes.min() == 0
    assert groups.codes.max() == 2**bits - 1
    error = (groups.weight(torch.float32) - weight).unflatten(1, (2, 32)).abs()
    assert bool((error <= groups.scale / 2 * (1 + 1e-4)).all())


def test_a_constant_group_quantises_exactly() -> None:
    weight = torch.full((1, 32), 0.3)
    assert torch.equal(quantise(weight, bits=4, group=32).weight(torch.float32), weight)


def test_groups_must_divide_the_weight() -> None:
    with pytest.raises(UsageError, match="48 input features are not a multiple of the group size 32"):
        quantise(torch.ones(2, 48), bits=4, group=32)
