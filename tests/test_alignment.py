"""Every misplacement and distortion is planted and must be named; engines that are merely bad must not be."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.alignment import kl_at_shifts, misplaced
from harness.distortion import distorted
from harness.evidence import RowSource, explains, kl, log_softmax, spread
from harness.metrics import decode
from harness.types import Corpus, Finding, LogitsDtype, Phase
from tests.synthetic import Rows, columns_of, encode, make_corpus, make_rows, with_noise

NOISE = 0.04  # of each logit: the normal difference of bf16
CORPUS = make_corpus(documents=2)
REFERENCE = make_rows(CORPUS)


def source(corpus: Corpus, rows: Rows, dtype: LogitsDtype = "float32") -> RowSource:
    def read(segment: str, phase: Phase, indices: NDArray[np.int64]) -> NDArray[np.float32]:
        at = np.searchsorted(corpus.segment(segment).indices(phase), indices)
        assert np.array_equal(corpus.segment(segment).indices(phase)[at], indices), "asked for a row that is not there"
        return encode(rows[segment, phase], dtype)[at]

    return RowSource(dtype=dtype, read=read)


def diagnose(
    candidate: Rows,
    *,
    reference: Rows = REFERENCE,
    corpus: Corpus = CORPUS,
    dtype: LogitsDtype = "float32",
    labelled: LogitsDtype | None = None,
) -> tuple[Finding, ...]:
    truth, given_rows = source(corpus, reference), source(corpus, candidate, dtype)
    positions = columns_of(corpus, reference, candidate, dtype=dtype)
    if labelled is not None:
        positions, given_rows = relabelled(corpus, reference, given_rows, labelled)
    elsewhere = misplaced(positions, truth, given_rows)
    return (*elsewhere, *distorted(positions, truth, given_rows, misplaced=bool(elsewhere)))


def relabelled(
    corpus: Corpus, reference: Rows, rows: RowSource, label: LogitsDtype
) -> tuple[dict[str, NDArray[np.generic]], RowSource]:
    """The same bits under another dtype's name."""
    stored = np.uint16 if label == "bfloat16" else np.float16

    def read(segment: str, phase: Phase, indices: NDArray[np.int64]) -> NDArray[np.generic]:
        return rows.read(segment, phase, indices).view(stored)

    wrong = RowSource(dtype=label, read=read)
    seen = {
        (s.id, p): decode(wrong.read(s.id, p, s.indices(p)), label).astype(np.float32)
        for s in corpus.segments
        for p in Phase
    }
    return columns_of(corpus, reference, seen), wrong


def changed(rows: Rows, change: Callable[[str, Phase, NDArray[np.float32]], NDArray[np.float32]]) -> Rows:
    return {(segment, phase): change(segment, phase, row) for (segment, phase), row in rows.items()}


def rolled(rows: Rows, k: int) -> Rows:
    """Row i is the row of i + k; at one end, rows of places that are not scored."""

    def shift(_: str, __: Phase, row: NDArray[np.float32]) -> NDArray[np.float32]:
        unscored = np.random.default_rng(9).normal(8, 2, (abs(k), row.shape[1])).astype(np.float32)
        return np.concatenate([row[k:], unscored] if k > 0 else [unscored, row[:k]])

    return changed(rows, shift)


def only(findings: tuple[Finding, ...]) -> Finding:
    assert len(findings) == 1, [f.message for f in findings]
    return findings[0]


# --------------------------------------------------------------------------- nothing to find


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_normal_difference_has_no_finding(dtype: LogitsDtype) -> None:
    assert diagnose(with_noise(REFERENCE, NOISE), dtype=dtype) == ()


@pytest.mark.parametrize("sigma", [0.5, 2.0, 5.0])
def test_a_very_noisy_engine_is_bad_and_not_misplaced(sigma: float) -> None:
    assert not any(f.fatal for f in diagnose(with_noise(REFERENCE, sigma)))


def test_an_engine_that_always_answers_its_prior_is_bad_and_not_misplaced() -> None:
    mean = np.mean(np.concatenate(list(REFERENCE.values())), axis=0)
    candidate = with_noise(changed(REFERENCE, lambda s, p, row: np.broadcast_to(mean, row.shape)), NOISE)
    assert not any(f.fatal for f in diagnose(candidate))


def test_an_engine_whose_rows_are_all_one_row_is_a_failure_of_the_build() -> None:
    candidate = changed(REFERENCE, lambda s, p, row: np.full_like(row, 3.0) + np.arange(row.shape[1], dtype=np.float32))
    finding = only(diagnose(candidate))
    assert (finding.code, finding.fatal) == ("rows-repeated", False)


def test_rows_of_another_model_are_named_unrelated_without_refusing_them() -> None:
    finding = only(diagnose(make_rows(CORPUS, seed=77)))
    assert (finding.code, finding.fatal) == ("rows-unrelated", False)


# --------------------------------------------------------------------------- misplaced


@pytest.mark.parametrize("k", [-3, -2, -1, 1, 2, 3])
def test_a_shift_of_every_row_is_named_with_its_direction(k: int) -> None:
    finding = only(diagnose(with_noise(rolled(REFERENCE, k), NOISE)))
    assert (finding.code, finding.fatal) == ("rows-shifted", True)
    assert f"index {'+' if k > 0 else '-'} {abs(k)} everywhere" in finding.message


@pytest.mark.parametrize(("k", "cause"), [(1, "missing BOS"), (-1, "double BOS")])
def test_a_shift_from_the_first_row_on_names_the_first_token(k: int, cause: str) -> None:
    assert cause in only(diagnose(with_noise(rolled(REFERENCE, k), NOISE))).message


def test_a_shift_in_one_segment_is_found_and_placed() -> None:
    candidate = with_noise(REFERENCE, NOISE)
    where = ("prose-01-d48", Phase.DECODE)
    candidate[where] = with_noise(rolled(REFERENCE, 1), NOISE)[where]
    finding = only(diagnose(candidate))
    assert finding.code == "rows-shifted"
    assert "in prose-01-d48 (decode)" in finding.message
    assert "BOS" not in finding.message


def test_one_shifted_row_is_found() -> None:
    candidate = with_noise(REFERENCE, NOISE)
    candidate["code-00-d32", Phase.PREFILL][5] = with_noise(REFERENCE, NOISE, seed=8)["code-00-d32", Phase.PREFILL][6]
    finding = only(diagnose(candidate))
    assert (finding.code, finding.fatal) == ("rows-shifted", True)
    assert "index + 1" in finding.message


def test_two_swapped_requests_are_named() -> None:
    candidate = with_noise(REFERENCE, NOISE)
    a, b = ("code-00-d32", Phase.DECODE), ("prose-00-d32", Phase.DECODE)
    candidate[a], candidate[b] = candidate[b], candidate[a]
    finding = only(diagnose(candidate))
    assert (finding.code, finding.fatal) == ("requests-swapped", True)
    assert "code-00-d32 (decode) holds prose-00-d32 (decode)" in finding.message
    assert "prose-00-d32 (decode) holds code-00-d32 (decode)" in finding.message


def test_requests_swapped_for_a_few_steps_are_named() -> None:
    candidate = with_noise(REFERENCE, NOISE)
    a, b = ("code-00-d32", Phase.DECODE), ("prose-01-d48", Phase.DECODE)
    candidate[a][4:7], candidate[b][4:7] = candidate[b][4:7].copy(), candidate[a][4:7].copy()
    assert only(diagnose(candidate)).code == "requests-swapped"


def test_an_engine_that_forgets_the_context_is_a_fault_and_not_a_swap() -> None:
    candidate = with_noise(REFERENCE, NOISE)
    candidate["code-00-d48", Phase.DECODE] = candidate["code-00-d32", Phase.DECODE]
    finding = only(diagnose(candidate))
    assert (finding.code, finding.fatal) == ("context-lost", False)


def test_a_row_written_twice_is_named() -> None:
    candidate = with_noise(REFERENCE, NOISE)
    candidate["prose-00-d32", Phase.DECODE][7] = candidate["prose-00-d32", Phase.DECODE][6]
    finding = only(diagnose(candidate))
    assert (finding.code, finding.fatal) == ("rows-repeated", True)
    index = CORPUS.segment("prose-00-d32").indices(Phase.DECODE)[7]
    assert f"prose-00-d32 (decode) index {index}" in finding.message


def test_repeated_rows_are_named_although_their_sums_differ_in_the_last_bits() -> None:
    candidate = with_noise(REFERENCE, NOISE)
    rows = candidate["prose-00-d32", Phase.DECODE]
    rows[1::2] = rows[0::2]
    positions = columns_of(CORPUS, REFERENCE, candidate)
    lse = positions["lse_candidate"]
    positions["lse_candidate"] = lse + np.spacing(lse) * (np.arange(len(lse)) % 3)
    finding = only(misplaced(positions, source(CORPUS, REFERENCE), source(CORPUS, candidate)))
    assert (finding.code, finding.fatal) == ("rows-repeated", True)
    assert finding.message.startswith(f"{len(rows) // 2} rows")


def test_swapped_with_a_text_that_is_there_at_two_depths_names_the_right_one() -> None:
    candidate, reference = with_noise(REFERENCE, NOISE), dict(REFERENCE)
    a, b, deeper = ("code-00-d32", Phase.DECODE), ("prose-00-d32", Phase.DECODE), ("prose-00-d48", Phase.DECODE)
    reference[deeper] = with_noise(reference, 3 * NOISE, seed=5)[b]
    candidate[deeper] = with_noise(reference, NOISE, seed=6)[deeper]
    candidate[a], candidate[b] = candidate[b], candidate[a]
    finding = only(diagnose(candidate, reference=reference))
    assert finding.code == "requests-swapped"
    assert "code-00-d32 (decode) holds prose-00-d32 (decode)" in finding.message


def test_equal_rows_are_no_finding_where_the_reference_repeats_itself_too() -> None:
    reference = {key: row.copy() for key, row in REFERENCE.items()}
    reference["prose-00-d32", Phase.DECODE][7] = reference["prose-00-d32", Phase.DECODE][6]
    assert diagnose(reference, reference=reference) == ()


# --------------------------------------------------------------------------- distorted


def test_log_probs_where_logits_belong_are_named() -> None:
    candidate = changed(with_noise(REFERENCE, NOISE), lambda s, p, row: log_softmax(row).astype(np.float32))
    for dtype in ("float32", "bfloat16"):
        finding = only(diagnose(candidate, dtype=dtype))
        assert (finding.code, finding.fatal) == ("log-probs-stored", True)


@pytest.mark.parametrize("temperature", [0.6, 0.9, 1.1, 1.5])
def test_a_temperature_is_named_with_its_value(temperature: float) -> None:
    candidate = changed(with_noise(REFERENCE, NOISE), lambda s, p, row: row / np.float32(temperature))
    findings = diagnose(candidate)
    assert {(f.code, f.fatal) for f in findings} == {("temperature-applied", False)}
    for finding, phase in zip(findings, Phase, strict=True):
        named = re.search(r"temperature of ([\d.]+)", finding.message)
        assert named is not None
        assert float(named[1]) == pytest.approx(temperature, rel=0.03)
        assert finding.message.startswith(phase)


@pytest.mark.parametrize("cap", [10.0, 20.0, 30.0])
@pytest.mark.parametrize("applied", [True, False])
def test_a_soft_cap_is_told_from_a_temperature(cap: float, applied: bool) -> None:
    capped = changed(REFERENCE, lambda s, p, row: np.float32(cap) * np.tanh(row / np.float32(cap)))
    reference, built = (REFERENCE, capped) if applied else (capped, REFERENCE)
    findings = diagnose(with_noise(built, NOISE / 10), reference=reference)
    assert {(f.code, f.fatal) for f in findings} == {("soft-cap-differs", False)}
    for finding in findings:
        words = "went through a soft cap" if applied else "lack the reference's soft cap"
        named = re.search(rf"{words} of about ([\d.]+)", finding.message)
        assert named is not None
        assert float(named[1]) == pytest.approx(cap, rel=0.05)


def test_a_temperature_in_decode_alone_is_placed_there() -> None:
    candidate = changed(
        with_noise(REFERENCE, NOISE), lambda s, p, row: row / np.float32(0.7 if p is Phase.DECODE else 1)
    )
    assert only(diagnose(candidate)).message.startswith("decode")


def test_a_top_k_mask_is_named() -> None:
    def mask(_: str, __: Phase, row: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.where(row >= np.sort(row, axis=1)[:, -10:-9], row, -np.inf).astype(np.float32)

    findings = diagnose(changed(with_noise(REFERENCE, NOISE), mask))
    assert {(f.code, f.fatal) for f in findings} == {("logits-masked", False)}
    assert all(f"{CORPUS.vocab_size - 10} ids" in f.message and "top-k" in f.message for f in findings)


@pytest.mark.parametrize(("true", "label"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_bits_of_the_other_sixteen_bit_format_are_named(true: LogitsDtype, label: LogitsDtype) -> None:
    finding = only(diagnose(REFERENCE, dtype=true, labelled=label))
    assert (finding.code, finding.fatal) == ("wrong-dtype", True)
    assert f"labelled {label} but their bits are {true}" in finding.message


def test_rows_numbered_by_another_tokenizer_are_named() -> None:
    order = np.random.default_rng(3).permutation(CORPUS.vocab_size)
    finding = only(diagnose(changed(with_noise(REFERENCE, NOISE), lambda s, p, row: row[:, order])))
    assert (finding.code, finding.fatal) == ("other-tokenizer", True)


# --------------------------------------------------------------------------- the pieces


def test_kl_agrees_with_a_plain_sum_and_survives_masks() -> None:
    rng = np.random.default_rng(0)
    p, q = log_softmax(rng.normal(0, 2, (5, 11))), log_softmax(rng.normal(0, 2, (5, 11)))
    expected = [sum(np.exp(a) * (a - b) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)]
    assert kl(p, q) == pytest.approx(expected, rel=1e-12)
    assert np.isfinite(kl(p, log_softmax(np.where(rng.random((5, 11)) < 0.5, -np.inf, p)))).all()


def test_kl_at_shifts_is_nan_where_the_reference_has_no_row() -> None:
    rows = log_softmax(np.random.default_rng(0).normal(0, 2, (4, 7)))
    result = kl_at_shifts(rows, np.arange(10, 14), rows[1:3], np.asarray([10, 13]))
    assert np.isnan(result).tolist() == [
        [False, True, True, True, False, False, False],
        [False, False, False, False, True, True, True],
    ]
    assert result[0, 4] == pytest.approx(0, abs=1e-12)  # row 10 of the candidate is row 11 of the reference
    assert result[1, 3] == pytest.approx(0, abs=1e-12)  # row 13 is row 12


def test_few_rows_must_fit_about_exactly_and_many_only_far_better() -> None:
    home = np.full(8, 4.0)
    assert explains(home, np.full(8, 0.3)).all()
    assert not explains(home[:3], np.full(3, 0.3)).any()
    assert explains(home[:1], np.asarray([0.001])).all()
    assert not explains(home, np.r_[np.full(6, 0.3), 4.0, 4.0]).any()
    assert not explains(home[:2], np.full(2, np.nan)).any()


@given(st.integers(1, 200), st.integers(2, 50))
def test_spread_keeps_the_ends_and_the_bound(rows: int, most: int) -> None:
    chosen = spread(np.arange(rows), most)
    assert len(chosen) == min(rows, most)
    assert chosen[0] == 0
    assert chosen[-1] == rows - 1
    assert (np.diff(chosen) > 0).all()
