"""Per-position columns against textbook formulas at 60 digits, scipy, and what must hold for any rows."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, cast, get_args

import mpmath as mp
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness import metrics
from harness.errors import MismatchError
from harness.metrics import COLUMNS, FLOAT_COLUMNS, decode, position_metrics, row_summary
from harness.types import LogitsDtype

GOLDEN = Path(__file__).parent / "golden" / "metrics.json"
DTYPES: tuple[LogitsDtype, ...] = get_args(LogitsDtype)

# KL's error is relative, down to the square of a rounding error. The other floats carry the rounding of their parts.
RELATIVE = 1e-12
ROUNDING = 2e-15
ABSOLUTE = {"kl20": 1e-28, "kl_full": 1e-28, "kl_reverse": 1e-28, "mass20": 0.0, "margin": 0.0}


def stored(logits: NDArray[Any], dtype: LogitsDtype) -> NDArray[Any]:
    """Logits cut to a dtype as a recording keeps them."""
    if dtype == "bfloat16":
        return (np.asarray(logits, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(logits).astype(dtype)


def columns_of(reference: Any, candidate: Any, targets: Any = None, **keywords: Any) -> dict[str, NDArray[Any]]:
    r, c = np.atleast_2d(np.asarray(reference, np.float64)), np.atleast_2d(np.asarray(candidate, np.float64))
    ids = np.zeros(len(r), np.int32) if targets is None else np.asarray(targets, np.int32)
    return position_metrics(r, "float64", c, "float64", ids, **keywords)


def order(row: NDArray[Any]) -> list[int]:
    """Ids by descending logit, lower id first among equals."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def log_sum(values: list[Any]) -> Any:
    total = mp.fsum(mp.exp(v) for v in values)
    return mp.log(total) if total else -mp.inf


def kl(p: list[Any], q: list[Any]) -> Any:
    """Textbook KL of two lists of log-probabilities."""
    if any(a > -mp.inf and b == -mp.inf for a, b in zip(p, q, strict=True)):
        return mp.inf
    return mp.fsum(mp.exp(a) * (a - b) for a, b in zip(p, q, strict=True) if a > -mp.inf)


def spread(weights: list[Any], x: list[Any], y: list[Any]) -> Any:
    """Weighted covariance."""
    total = mp.fsum(weights)
    x_mean, y_mean = (mp.fsum(w * v for w, v in zip(weights, z, strict=True)) / total for z in (x, y))
    return mp.fsum(w * (a - x_mean) * (b - y_mean) for w, a, b in zip(weights, x, y, strict=True)) / total


def oracle(reference: NDArray[Any], candidate: NDArray[Any], target: int) -> dict[str, Any]:
    """Every column of one finite-or-minus-infinity row pair by its definition, at 60 digits."""
    r, c = ([mp.mpf(float(v)) for v in row] for row in (reference, candidate))
    r_lse, c_lse = log_sum(r), log_sum(c)
    p, q = [v - r_lse for v in r], [v - c_lse for v in c]
    r_order, c_order = order(reference), order(candidate)
    head = [i for i in r_order[:20] if r[i] > -mp.inf]
    rest = [i for i in range(len(r)) if i not in head]
    merged = [[z[i] for i in head] + [log_sum([z[i] for i in rest])] for z in (p, q)]
    live = [i for i in range(len(r)) if r[i] > -mp.inf and c[i] > -mp.inf]
    candidate_only = any(r[i] > -mp.inf and c[i] == -mp.inf for i in range(len(r)))
    one_sided = candidate_only or any(c[i] > -mp.inf and r[i] == -mp.inf for i in range(len(r)))
    weights = [mp.exp(p[i]) for i in live]
    live_r, live_c = [r[i] for i in live], [c[i] for i in live]
    delta = [b - a for a, b in zip(live_r, live_c, strict=True)]
    slope = offset = mp.nan
    if not candidate_only and len(set(live_r)) > 1:
        variance = spread(weights, live_r, live_r)
        slope = spread(weights, live_r, live_c) / variance
        offset = mp.fsum(w * (b - slope * a) for w, a, b in zip(weights, live_r, live_c, strict=True))
        if variance < mp.mpf("1e-90"):  # too small for 60 digits
            slope = offset = None
    return {
        "flip": r_order[0] != c_order[0],
        "rank": c_order.index(r_order[0]),
        "top1_reference": r_order[0],
        "top1_candidate": c_order[0],
        "kl20": kl(*merged),
        "kl_full": kl(p, q),
        "kl_reverse": kl(q, p),
        "margin": r[r_order[0]] - r[r_order[1]] if len(r) > 1 else mp.inf,
        "entropy": -mp.fsum(mp.exp(v) * v for v in p if v > -mp.inf),
        "nll_reference": -p[target],
        "nll_candidate": -q[target],
        "error_weighted": mp.inf if candidate_only else mp.sqrt(spread(weights, delta, delta)),
        "error_plain": mp.inf if one_sided else mp.sqrt(spread([mp.mpf(1)] * len(live), delta, delta)),
        "slope": slope,
        "offset": offset,
        "max_logprob_error20": max(abs(p[i] - q[i]) for i in head),
        "mass20": mp.fsum(mp.exp(q[i]) for i in head),
        "lse_reference": r_lse,
        "lse_candidate": c_lse,
        "nonfinite_reference": 0,
        "neginf_candidate": int(np.sum(np.isneginf(candidate))),
        "nan_candidate": 0,
    }


def assert_agrees(reference: NDArray[Any], candidate: NDArray[Any], targets: Any, got: dict[str, Any]) -> None:
    for row, target in enumerate(targets):
        with mp.workdps(60):
            expected = oracle(reference[row], candidate[row], int(target))
        assert set(expected) == set(got)
        logits = np.concatenate([reference[row], candidate[row]])
        scale = np.abs(logits[np.isfinite(logits)]).max(initial=1)
        for name, exact in expected.items():
            if exact is None:
                continue
            have, want = got[name][row], float(exact)
            limit = RELATIVE * abs(want) + ABSOLUTE.get(name, ROUNDING) * scale
            if name in ("slope", "offset"):  # ratios of moments
                limit = 1e-12 * (1 + scale) * (1 + abs(want))
            same = have == want or (math.isnan(have) and math.isnan(want))
            assert same or abs(have - want) <= limit, (name, row, have, want)


def noisy(rows: int, vocabulary: int, noise: float, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Rows with a language model's shape: a few likely ids, a broad tail."""
    rng = np.random.default_rng(seed)
    reference = rng.standard_normal((rows, vocabulary)) * 2 + rng.exponential(1.5, (rows, vocabulary))
    candidate = reference + rng.standard_normal(reference.shape) * noise
    return reference, candidate, rng.integers(0, vocabulary, rows).astype(np.int32)


# --------------------------------------------------------------------------- against oracles


@pytest.mark.parametrize("noise", [0.0, 5e-6, 0.04, 1.0, 5.0])
@pytest.mark.parametrize("vocabulary", [1, 2, 20, 21, 300])
def test_columns_agree_with_the_textbook(vocabulary: int, noise: float) -> None:
    reference, candidate, targets = noisy(3, vocabulary, noise)
    assert_agrees(reference, candidate, targets, columns_of(reference, candidate, targets))


@pytest.mark.parametrize("candidate_dtype", DTYPES)
@pytest.mark.parametrize("reference_dtype", DTYPES)
def test_every_dtype_pair_is_read_exactly(reference_dtype: LogitsDtype, candidate_dtype: LogitsDtype) -> None:
    reference, candidate, targets = noisy(2, 90, 0.04)
    r, c = stored(reference, reference_dtype), stored(candidate, candidate_dtype)
    r_values, c_values = decode(r, reference_dtype).astype(float), decode(c, candidate_dtype).astype(float)
    got = position_metrics(r, reference_dtype, c, candidate_dtype, targets)
    assert_agrees(r_values, c_values, targets, got)


LOGIT = st.one_of(
    st.floats(-30, 30),
    st.sampled_from([0.0, 1.0, 1.0, 2.5]),  # ties
    st.sampled_from([-math.inf, -400.0, -1000.0, 700.0, 60.0]),  # masks, vanishing tails, one-hot rows
)


@st.composite
def row_pairs(draw: st.DrawFn) -> tuple[NDArray[Any], NDArray[Any], int]:
    size = draw(st.integers(1, 45))
    reference = np.array(draw(st.lists(LOGIT, min_size=size, max_size=size)))
    other = np.array(draw(st.lists(LOGIT, min_size=size, max_size=size)))
    scale = draw(st.sampled_from([0.0, 1e-7, 1e-2, 1.0]))
    near = reference + scale * np.where(np.isfinite(other), other, 0.0)
    candidate = draw(st.sampled_from([near, other, np.where(np.isneginf(other), other, near)]))
    for row in (reference, candidate):  # a row of -inf alone is another test's
        if np.isneginf(row).all():
            row[draw(st.integers(0, size - 1))] = 0.0
    return reference, candidate, draw(st.integers(0, size - 1))


@given(row_pairs())
@settings(max_examples=100, deadline=None)
def test_any_row_agrees_with_the_textbook(rows: tuple[NDArray[Any], NDArray[Any], int]) -> None:
    reference, candidate, target = rows
    got = columns_of(reference, candidate, [target])
    assert_agrees(reference[None], candidate[None], [target], got)
    for name in ("kl20", "kl_full", "kl_reverse"):
        assert got[name][0] >= 0
    assert got["kl20"][0] <= got["kl_full"][0] * (1 + 1e-12) + 1e-28


@pytest.mark.parametrize("vocabulary", [49_152, 100_003])
def test_large_vocabularies_agree_with_scipy(vocabulary: int) -> None:
    reference, candidate, targets = noisy(3, vocabulary, 0.6)
    got = columns_of(reference, candidate, targets)
    p, q = (scipy.special.log_softmax(z, axis=1) for z in (reference, candidate))
    np.testing.assert_allclose(got["kl_full"], scipy.special.rel_entr(np.exp(p), np.exp(q)).sum(1), rtol=1e-12)
    np.testing.assert_allclose(got["kl_reverse"], scipy.special.rel_entr(np.exp(q), np.exp(p)).sum(1), rtol=1e-12)
    np.testing.assert_allclose(got["entropy"], scipy.special.entr(np.exp(p)).sum(1), rtol=1e-12)
    np.testing.assert_allclose(got["lse_candidate"], scipy.special.logsumexp(candidate, axis=1), rtol=1e-14)
    np.testing.assert_allclose(got["error_plain"], (candidate - reference).std(axis=1), rtol=1e-12)
    top = np.argsort(-reference, axis=1, kind="stable")
    p, q = (np.take_along_axis(z, top, axis=1) for z in (p, q))
    merged = [np.c_[np.exp(z[:, :20]), np.exp(scipy.special.logsumexp(z[:, 20:], axis=1))] for z in (p, q)]
    np.testing.assert_allclose(got["kl20"], scipy.special.rel_entr(*merged).sum(1), rtol=1e-12)


def test_golden_values() -> None:
    """Exact rows, values at full precision. If one moves, rule out a regression before replacing it."""
    golden = json.loads(GOLDEN.read_text())
    got = columns_of(golden["reference"], golden["candidate"], golden["targets"])
    for name, want in golden["columns"].items():
        slack = ABSOLUTE.get(name, ROUNDING)
        np.testing.assert_allclose(got[name], want, rtol=4e-15, atol=slack, err_msg=f"now {got[name].tolist()!r}")
    assert set(golden["columns"]) == set(COLUMNS)


# --------------------------------------------------------------------------- what must hold


@pytest.mark.parametrize("noise", [5e-6, 0.04, 1.0])
def test_a_constant_changes_nothing(noise: float) -> None:
    reference, candidate, targets = noisy(4, 500, noise)
    reference, candidate = (np.round(z * 2**30) / 2**30 for z in (reference, candidate))  # so that adding is exact
    plain, moved = columns_of(reference, candidate, targets), columns_of(reference + 8, candidate - 16, targets)
    for name in set(COLUMNS) - {"offset", "lse_reference", "lse_candidate"}:
        np.testing.assert_allclose(moved[name], plain[name], rtol=1e-14, err_msg=name)
    np.testing.assert_allclose(moved["lse_candidate"], plain["lse_candidate"] - 16, rtol=1e-14)
    np.testing.assert_allclose(moved["offset"], plain["offset"] - 16 - 8 * plain["slope"], rtol=1e-12)


def test_permuting_ids_changes_nothing() -> None:
    reference, candidate, targets = noisy(4, 500, 0.3)
    shuffle = np.random.default_rng(1).permutation(500)
    plain = columns_of(reference, candidate, targets)
    moved = columns_of(reference[:, shuffle], candidate[:, shuffle], np.argsort(shuffle)[targets])
    for name in set(COLUMNS) - {"top1_reference", "top1_candidate"}:
        np.testing.assert_allclose(moved[name], plain[name], rtol=1e-13, err_msg=name)
    np.testing.assert_array_equal(shuffle[moved["top1_candidate"]], plain["top1_candidate"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_rows_differ_by_exactly_nothing(dtype: LogitsDtype) -> None:
    rows = stored(noisy(5, 3000, 0.0)[0], dtype)
    got = position_metrics(rows, dtype, rows, dtype, np.zeros(5, np.int32))
    for name in ("kl20", "kl_full", "kl_reverse", "error_weighted", "error_plain", "max_logprob_error20", "rank"):
        assert not got[name].any(), name
    assert not got["flip"].any()
    np.testing.assert_array_equal(got["slope"], 1.0)


def test_direction_is_reference_to_candidate() -> None:
    reference, candidate = np.log([0.5, 0.5]), np.log([0.9, 0.1])
    got = columns_of(reference, candidate)
    assert got["kl20"][0] == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), rel=1e-14)
    assert got["kl_reverse"][0] == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5), rel=1e-14)


def test_moves_inside_the_bucket_do_not_count_but_its_total_does() -> None:
    p = np.r_[np.full(20, 0.045), np.full(10, 0.01)]
    inside = np.r_[p[:20], p[20:] + np.tile([0.005, -0.005], 5)]
    total = np.r_[p[:20], p[20:] * 1.5]
    assert columns_of(np.log(p), np.log(inside))["kl20"][0] == pytest.approx(0, abs=1e-28)
    assert columns_of(np.log(p), np.log(inside))["kl_full"][0] > 0.01
    assert columns_of(np.log(p), np.log(total))["kl20"][0] > 0.005


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.3])
def test_a_temperature_shows_as_the_slope(temperature: float) -> None:
    reference = noisy(3, 400, 0.0)[0]
    got = columns_of(reference, reference / temperature + 0.25)
    np.testing.assert_allclose(got["slope"], 1 / temperature, rtol=1e-12)
    np.testing.assert_allclose(got["offset"], 0.25, atol=1e-11)


def test_ties_go_to_the_lower_id_on_both_sides() -> None:
    got = columns_of([[1, 3, 3, 0], [3, 3, 0, 0], [0, 0, 5, 5]], [[1, 3, 3, 3], [0, 3, 3, 3], [1, 1, 1, 1]])
    assert got["margin"].tolist() == [0, 0, 0]
    assert got["top1_reference"].tolist() == [1, 0, 2]
    assert got["top1_candidate"].tolist() == [1, 1, 0]
    assert got["rank"].tolist() == [0, 3, 2]
    assert got["flip"].tolist() == [False, True, True]


def test_tied_ids_at_the_edge_of_the_top_20_enter_lower_first() -> None:
    candidate = np.r_[np.zeros(30)]
    candidate[20] = 5.0  # id 20 ties with 0..19 in the reference and is the twenty-first
    got = columns_of(np.zeros(30), candidate)
    assert got["mass20"][0] == pytest.approx(20 / (29 + math.exp(5)), rel=1e-14)


def test_a_bucket_that_all_but_vanishes_is_still_measured() -> None:
    reference = noisy(1, 60, 0.0)[0]
    candidate = np.where(reference >= np.sort(reference)[:, -20:-19], reference, reference - 33.3)
    assert_agrees(reference, candidate, [0], columns_of(reference, candidate))


def test_sharp_rows_keep_the_relative_precision_of_their_tails() -> None:
    reference, candidate = np.array([40.0, 0, -1]), np.array([40.0, 1, -1])
    assert_agrees(reference[None], candidate[None], [0], columns_of(reference, candidate, [0]))
    assert columns_of(reference, candidate)["nll_reference"][0] == pytest.approx(
        math.exp(-40) + math.exp(-41), rel=1e-14
    )


# --------------------------------------------------------------------------- infinities and NaN


def test_a_candidate_that_rules_out_what_the_reference_allows_is_infinitely_far() -> None:
    reference, candidate = np.zeros((2, 30)), np.zeros((2, 30))
    candidate[0, 3] = -np.inf  # in the top 20
    candidate[1, 25] = -np.inf  # in the bucket, which the others keep alive
    got = columns_of(reference, candidate)
    assert got["kl_full"].tolist() == [np.inf, np.inf]
    assert got["kl20"][0] == np.inf
    assert np.isfinite(got["kl20"][1])
    assert np.isfinite(got["kl_reverse"]).all()
    assert got["neginf_candidate"].tolist() == [1, 1]
    assert got["error_weighted"].tolist() == [np.inf, np.inf]
    assert np.isnan(got["slope"]).all()
    swapped = columns_of(candidate, reference)  # the reference rules out what the candidate allows
    assert swapped["kl_reverse"].tolist() == swapped["error_plain"].tolist() == [np.inf, np.inf]
    assert np.isfinite(swapped["kl_full"]).all()
    assert np.isfinite(swapped["error_weighted"]).all()


def test_an_emptied_bucket_is_infinitely_far() -> None:
    assert columns_of(np.zeros(30), np.r_[np.zeros(20), np.full(10, -np.inf)])["kl20"][0] == np.inf


def test_ids_masked_on_both_sides_count_for_nothing() -> None:
    reference, candidate, targets = noisy(3, 60, 0.3)
    mask = np.full((3, 40), -np.inf)
    plain = columns_of(reference, candidate, targets)
    masked = columns_of(np.hstack([reference, mask]), np.hstack([candidate, mask]), targets)
    for name in set(COLUMNS) - {"neginf_candidate"}:
        np.testing.assert_allclose(masked[name], plain[name], rtol=1e-13, err_msg=name)
    assert masked["neginf_candidate"].tolist() == [40, 40, 40]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_a_bad_entry_blanks_its_row_and_is_counted(value: float, dtype: LogitsDtype, side: str) -> None:
    reference, candidate, targets = noisy(3, 50, 0.1)
    rows = {"reference": reference.copy(), "candidate": candidate.copy()}
    rows[side][1, [7, 30]] = value
    got = position_metrics(stored(rows["reference"], dtype), dtype, stored(rows["candidate"], dtype), dtype, targets)
    assert got["nonfinite_reference"].tolist() == [0, 2 * (side == "reference"), 0]
    assert got["nan_candidate"].tolist() == [0, 2 * (side == "candidate"), 0]
    for name in FLOAT_COLUMNS:
        assert np.isnan(got[name]).tolist() == [False, True, False], name
    assert [got[name][1] for name in ("rank", "top1_reference", "top1_candidate")] == [-1, -1, -1]
    assert got["flip"][1]


def test_a_row_of_minus_infinity_is_no_distribution() -> None:
    empty, fine = np.full(6, -np.inf), np.zeros(6)
    got = columns_of([empty, fine], [fine, empty])
    assert got["nonfinite_reference"].tolist() == [6, 0]
    assert got["nan_candidate"].tolist() == [0, 6]
    assert np.isnan(got["kl20"]).all()


# --------------------------------------------------------------------------- summaries, decoding, exp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocabulary", "k"), [(1, 64), (40, 64), (64, 64), (5000, 64), (5000, 1), (70_000, 20)])
def test_row_summary_agrees_with_numpy(dtype: LogitsDtype, vocabulary: int, k: int) -> None:
    raw = stored(np.round(noisy(4, vocabulary, 0)[0], 1), dtype)  # rounded: many ties
    lse, ids, logits = row_summary(raw, dtype, k)
    values = decode(raw, dtype).astype(np.float64)
    expected = np.argsort(-values, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(logits, np.take_along_axis(values, expected, axis=1).astype(np.float32))
    np.testing.assert_allclose(lse, scipy.special.logsumexp(values, axis=1), rtol=1e-13)
    assert [a.dtype.name for a in (lse, ids, logits)] == ["float64", "int32", "float32"]


@pytest.mark.parametrize("row", [np.arange(3000.0), np.arange(3000) * 1e-7, -np.arange(3000.0), np.zeros(3000)])
def test_top_ids_of_ordered_rows(row: NDArray[Any]) -> None:
    np.testing.assert_array_equal(row_summary(row[None], "float64")[1][0], order(row)[:64])


def test_row_summary_says_nan_for_rows_that_are_no_distribution() -> None:
    rows = np.array([[1, np.nan, 2], [np.inf, 0, 1], [-np.inf] * 3, [-np.inf, 0, -np.inf]])
    lse, ids, logits = row_summary(rows, "float64")
    assert np.isnan(lse).tolist() == [True, True, True, False]
    assert lse[3] == 0
    assert ids[0].tolist() == [2, 0, 1]
    assert logits[0].tolist() == [2, 1, -np.inf]
    assert ids[3].tolist() == [1, 0, 2]


def test_bfloat16_bits_mean_what_the_format_says() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaN among the codes
        got = decode(bits, "bfloat16").astype(np.float64)
    sign, exponent, fraction = (bits >> 15).astype(int), ((bits >> 7) & 0xFF).astype(int), (bits & 0x7F) / 128
    normal = np.ldexp(1 + fraction, exponent - 127)
    want = np.where(exponent == 0, np.ldexp(fraction, -126), normal) * np.where(sign == 1, -1.0, 1.0)
    special = exponent == 255
    np.testing.assert_array_equal(got[~special], want[~special])
    assert np.isnan(got[special]).sum() == 2 * 127
    assert np.isinf(got[special]).sum() == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_read_all_16_bit_codes_as_decode_does(dtype: LogitsDtype) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)[:, None]
    raw = bits if dtype == "bfloat16" else bits.view(np.float16)
    want = decode(raw, dtype)[:, 0]
    lse, _, logits = row_summary(raw, dtype)  # of one id: its own logit
    np.testing.assert_array_equal(np.isnan(lse), ~np.isfinite(want))
    finite = np.isfinite(want)
    np.testing.assert_array_equal(lse[finite], want[finite].astype(np.float64))
    np.testing.assert_array_equal(logits[finite, 0], want[finite])
    beside_zero = np.hstack([raw, np.zeros_like(raw)])
    got = position_metrics(np.zeros((1 << 16, 2)), "float64", beside_zero, dtype, np.zeros(1 << 16, np.int32))
    np.testing.assert_array_equal(got["nan_candidate"], np.isnan(want) | np.isposinf(want))
    np.testing.assert_array_equal(got["neginf_candidate"], np.isneginf(want))


def test_exp_is_right_to_one_unit_in_the_last_place() -> None:
    from harness._kernels import exp

    rng = np.random.default_rng(0)
    points = np.r_[-rng.exponential(0.5, 3000), -rng.uniform(0, 708, 3000), -np.arange(0, 1020) * math.log(2) / 2]
    for x in points.tolist():
        want = mp.exp(mp.mpf(x))
        assert abs(exp(x) - want) <= 1.01 * math.ulp(float(want)), x
    assert [exp(0.0), exp(-709.0), exp(-1e300), exp(-math.inf)] == [1.0, 0.0, 0.0, 0.0]


@given(st.floats(-20, 20), st.floats(1e-300, 1))
def test_divergence_terms_are_never_negative_and_exact(d: float, p: float) -> None:
    from harness._kernels import divergence

    d = d if abs(d) > 1e-60 else 0.0
    with mp.workdps(200):
        q = p * mp.exp(-mp.mpf(d))
        forward, reverse, moved = divergence(p, float(q), d)
        want = q - p + p * mp.mpf(d), p - q - q * mp.mpf(d), q - p
        assert forward >= 0
        assert reverse >= 0
        for have, exact in zip((forward, reverse, moved), want, strict=True):
            assert abs(have - exact) <= 2e-14 * abs(exact) + 1e-300


# --------------------------------------------------------------------------- running it


def test_threads_and_tiles_change_no_bit() -> None:
    reference, candidate, targets = noisy(301, 800, 0.1)
    one, three = (columns_of(reference, candidate, targets, threads=n) for n in (1, 3))
    alone = columns_of(reference[150:151], candidate[150:151], targets[150:151])
    for name in COLUMNS:
        np.testing.assert_array_equal(one[name], three[name], err_msg=name)
        np.testing.assert_array_equal(one[name][150:151], alone[name], err_msg=name)


def test_inputs_may_be_read_only_and_strided_and_are_left_alone() -> None:
    reference, candidate, targets = noisy(4, 300, 0.1)
    plain = columns_of(reference[::2], candidate[::2], targets[::2])
    before = reference.copy()
    for array in (reference, candidate, targets):
        array.flags.writeable = False
    got = columns_of(reference[::2], candidate[::2], targets[::2])
    np.testing.assert_array_equal(got["kl20"], plain["kl20"])
    np.testing.assert_array_equal(reference, before)


def test_no_rows_give_empty_columns() -> None:
    got = columns_of(np.empty((0, 9)), np.empty((0, 9)), np.empty(0, np.int32))
    assert tuple(got) == COLUMNS
    assert all(column.shape == (0,) for column in got.values())
    assert row_summary(np.empty((0, 9)), "float64")[1].shape == (0, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidate": np.zeros((2, 5))}, r"\(2, 4\).*\(2, 5\)"),
        ({"targets": np.array([0], np.int32)}, "one id for each of 2 rows"),
        ({"targets": np.array([0, 4], np.int32)}, "outside the vocabulary of 4, first 4 at row 1"),
        ({"targets": np.array([-1, 0], np.int32)}, "first -1 at row 0"),
        ({"reference": np.zeros((2, 4), np.float32)}, "float64 logits are kept as float64, got float32"),
        ({"reference": np.zeros(4)}, r"expected rows of shape \[positions, vocabulary\]"),
        ({"candidate": np.zeros((2, 0))}, r"expected rows of shape \[positions, vocabulary\]"),
        ({"candidate_dtype": "float8"}, "unknown dtype 'float8'; expected one of bfloat16"),
    ],
)
def test_input_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    fitting: dict[str, Any] = {
        "reference": np.zeros((2, 4)),
        "reference_dtype": "float64",
        "candidate": np.zeros((2, 4)),
        "candidate_dtype": "float64",
        "targets": np.array([0, 3], np.int32),
    }
    position_metrics(**fitting)
    with pytest.raises(MismatchError, match=message):
        position_metrics(**(fitting | changes))


@pytest.mark.parametrize(("setting", "expected"), [("1", 1), ("1000000", None), ("", None), ("4,2", None), ("0", 1)])
def test_threads_follow_the_environment(monkeypatch: pytest.MonkeyPatch, setting: str, expected: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    everything = metrics.default_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert metrics.default_threads() == (expected or everything)


def test_importing_does_not_load_numba() -> None:
    code = "import sys, harness.metrics; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_kernels_compile_where_nothing_can_be_cached() -> None:
    from harness._widen import compiled

    scope: dict[str, Any] = {}
    exec("def double(x):\n    return 2 * x", scope)  # no source file: numba finds no folder for its cache
    double = compiled()(scope["double"])
    assert cast(int, double(21)) == 42
