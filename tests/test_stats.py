"""Statistics against scipy, brute force and hand cases; a small version of the simulation study runs here too."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.gates import load_gates
from harness.power import CERTAIN, Plan, detectable, plan, remedy
from harness.stats import FEW_FREEDOM, Ratios, Units, contrast, group, mean, ratios, student_quantile
from harness.summary import MARGIN_EDGES, exact_interval, flip_bins, summarise, task_bounds
from harness.types import OVERALL, Check, Corpus, Estimate, FlipBin, Manifest, Phase, Status, Stratum
from tests.judging import BUILD, columns, manifest
from tests.synthetic import make_corpus

DECODE_PROSE = Stratum(phase=Phase.DECODE, kind="prose", depth=512)


def units(
    documents: int = 3,
    kinds: tuple[str, ...] = ("code", "prose"),
    depths: tuple[int, ...] = (512, 2048),
    rows: int = 10,
) -> Units:
    """One segment per kind, document and depth, in both phases."""
    cells = list(itertools.product(kinds, range(documents), depths, ("decode", "prefill")))
    return Units(
        segment=np.array([f"{k}{d}-d{z}" for k, d, z, _ in cells]),
        document=np.array([f"{k}{d}" for k, d, _, _ in cells]),
        kind=np.array([k for k, _, _, _ in cells]),
        depth=np.array([z for _, _, z, _ in cells]),
        phase=np.array([p for _, _, _, p in cells]),
        rows=np.full(len(cells), rows),
        of_position=np.empty(0, np.intp),
    )


FIELDS = ("segment", "document", "kind", "depth", "phase", "rows")


def some(of: Units, which: np.ndarray) -> Units:
    """Those units alone, or in that order."""
    return replace(of, **{field: getattr(of, field)[which] for field in FIELDS})


def sums(of: Units, seed: int = 0, spread: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.lognormal(0, spread, len(of.rows)), rng.lognormal(0, spread, len(of.rows))


def at(found: Ratios, stratum: Stratum) -> int:
    return found.strata.index(stratum)


# --------------------------------------------------------------------------- grouping


def test_positions_are_grouped_by_segment_and_phase() -> None:
    positions = {
        "segment": np.array(["b", "a", "b", "a", "b"]),
        "document": np.array(["B", "A", "B", "A", "B"]),
        "kind": np.array(["prose", "code", "prose", "code", "prose"]),
        "depth": np.array([8, 4, 8, 4, 8]),
        "phase": np.array(["decode", "decode", "prefill", "decode", "decode"]),
    }
    found = group(positions)
    assert list(zip(found.segment, found.phase, found.document, found.kind, found.depth, found.rows, strict=True)) == [
        ("a", "decode", "A", "code", 4, 2),
        ("b", "decode", "B", "prose", 8, 2),
        ("b", "prefill", "B", "prose", 8, 1),
    ]
    assert found.sums(np.array([1.0, 2.0, 4.0, 8.0, 16.0])).tolist() == [10.0, 17.0, 4.0]
    assert found.positions(Stratum(phase=Phase.DECODE, kind="prose")).tolist() == [True, False, False, False, True]


def test_no_positions_give_no_strata() -> None:
    empty = {name: np.empty(0, "U1") for name in ("segment", "document", "kind", "phase")} | {"depth": np.empty(0, int)}
    found = ratios(group(empty), np.empty(0), np.empty(0))
    assert found.strata == ()
    assert found.low(0.05).shape == (0,)


def test_strata_are_overall_phases_and_cells_and_a_smoke_corpus_leaves_the_cells_out() -> None:
    of = units(2)
    found = ratios(of, *sums(of))
    assert found.strata[:3] == (OVERALL, Stratum(phase=Phase.PREFILL), Stratum(phase=Phase.DECODE))
    assert len(found.strata) == 3 + 2 * 2 * 2
    wide = found.without_cells()
    assert wide.strata == found.strata[:3]
    assert wide.error.tolist() == found.error[:3].tolist()


# --------------------------------------------------------------------------- the ratio and its error


def test_ratio_is_the_ratio_of_sums_not_the_mean_of_ratios() -> None:
    of = units(2, kinds=("prose",), depths=(512,))
    found = ratios(of, np.array([1.0, 8.0, 3.0, 8.0]), np.array([2.0, 1.0, 2.0, 1.0]))
    assert math.exp(found.log_ratio[at(found, DECODE_PROSE)]) == pytest.approx(4.0 / 4.0)
    assert math.exp(found.log_ratio[0]) == pytest.approx(20.0 / 6.0)


def test_error_of_one_cell_by_hand() -> None:
    # C = 6, F = 4: residuals 2/6 - 1/4, 4/6 - 3/4 = +-1/12; variance 2/1 * 2 * (1/12)^2.
    of = units(2, kinds=("prose",), depths=(512,))
    keep = of.phase == "decode"
    single = some(of, keep)
    found = ratios(single, np.array([2.0, 4.0]), np.array([1.0, 3.0]))
    assert found.error[at(found, DECODE_PROSE)] == pytest.approx(math.sqrt(4) / 12)
    assert found.freedom[at(found, DECODE_PROSE)] == 1


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_scaling_either_side_moves_the_ratio_and_not_its_error(seed: int, up: float, down: float) -> None:
    of = units(4)
    candidate, floor = sums(of, seed)
    before, after = ratios(of, candidate, floor), ratios(of, candidate * up, floor * down)
    assert np.allclose(after.log_ratio, before.log_ratio + math.log(up / down), atol=1e-9)
    assert np.allclose(after.error, before.error, rtol=1e-6, atol=1e-12)


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_order_of_units_does_not_matter(seed: int) -> None:
    of = units(3)
    candidate, floor = sums(of, seed)
    order = np.random.default_rng(seed).permutation(len(of.rows))
    mixed = some(of, order)
    one, two = ratios(of, candidate, floor), ratios(mixed, candidate[order], floor[order])
    assert one.strata == two.strata
    assert np.allclose(one.log_ratio, two.log_ratio)
    assert np.allclose(one.error, two.error)


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_swapping_candidate_and_floor_mirrors_the_ratio(seed: int) -> None:
    of = units(9)
    candidate, floor = sums(of, seed)
    there, back = ratios(of, candidate, floor), ratios(of, floor, candidate)
    assert np.allclose(there.log_ratio, -back.log_ratio)
    wide = slice(0, 3)
    assert np.allclose(there.error[wide], back.error[wide])


def test_error_agrees_with_the_delta_method_on_the_covariance_matrix() -> None:
    """A second route: Var(log C - log F) from the sample covariance of document sums, stratified by kind."""
    of = units(10)
    candidate, floor = sums(of, 3, 0.4)
    documents = np.unique(of.document)
    c = np.array([candidate[of.document == d].sum() for d in documents])
    f = np.array([floor[of.document == d].sum() for d in documents])
    kinds = np.array([d[:-1].rstrip("0123456789") for d in documents])
    gradient = np.array([1 / c.sum(), -1 / f.sum()])
    variance = sum((kinds == k).sum() * gradient @ np.cov(c[kinds == k], f[kinds == k]) @ gradient for k in set(kinds))
    found = ratios(of, candidate, floor)
    assert found.error[0] == pytest.approx(math.sqrt(variance), rel=1e-12)
    assert found.freedom[0] == 18
    assert found.clusters[0] == 20


def test_a_difference_between_kinds_is_not_an_error() -> None:
    of = units(9)
    candidate, floor = sums(of, 1, 0.01)
    apart = ratios(of, candidate * np.where(of.kind == "code", 4.0, 1.0), floor)
    assert apart.error[0] < 2 * ratios(of, candidate, floor).error[0]


def test_a_kind_of_one_document_is_not_centred_on_its_own() -> None:
    of = units(1)
    found = ratios(of, *sums(of))
    assert found.clusters[0] == 2
    assert found.freedom[0] == 1


def test_documents_shared_by_depths_are_one_cluster() -> None:
    """The same residual at every depth: more depths add no information, and the error must not shrink."""
    rng = np.random.default_rng(5)
    few, many = units(10, depths=(512,)), units(10, depths=(512, 1024, 2048, 4096))
    factor = dict(zip(np.unique(few.document), rng.lognormal(0, 0.2, 20), strict=True))
    errors = [
        ratios(of, np.array([factor[d] for d in of.document]), np.ones(len(of.rows))).error[0] for of in (few, many)
    ]
    assert errors[1] == pytest.approx(errors[0], rel=1e-9)


# --------------------------------------------------------------------------- pooling and borrowing


def own_cell_variance(of: Units, candidate: np.ndarray, floor: np.ndarray, stratum: Stratum) -> float:
    inside = of.mask(stratum)
    c, f = candidate[inside], floor[inside]
    residual = c / c.sum() - f / f.sum()
    return float(len(c) * residual.var(ddof=1))


def test_cells_share_a_variance_per_position_within_their_phase() -> None:
    of = units(5)
    candidate, floor = sums(of, 2)
    found = ratios(of, candidate, floor)
    for phase in Phase:
        inside = [s for s, stratum in enumerate(found.strata) if stratum.kind and stratum.phase is phase]
        own = [own_cell_variance(of, candidate, floor, found.strata[s]) for s in inside]
        assert np.allclose(found.error[inside], math.sqrt(np.mean(own)))
        assert (found.freedom[inside] == 4 * 4).all()


def test_phases_of_few_segments_share_one_variance_between_them() -> None:
    of = units(2)  # four cells of one degree of freedom in each phase
    candidate, floor = sums(of, 2)
    found = ratios(of, candidate, floor)
    own = [own_cell_variance(of, candidate, floor, s) for s in found.strata[3:]]
    assert np.allclose(found.error[3:], math.sqrt(np.mean(own)))
    assert (found.freedom[3:] == 8).all()
    apart = ratios(of, candidate, floor, few_freedom=0)
    assert (apart.freedom[3:] == 4).all()


@pytest.mark.parametrize("documents", [4, 2])
@pytest.mark.parametrize("beyond_chance", [False, True])
def test_a_cell_noisier_than_the_others_beyond_chance_keeps_its_own_variance(
    documents: int, beyond_chance: bool
) -> None:
    of = units(documents)
    single = documents - 1
    others = (7 if documents == 2 else 3) * single  # few documents share across phases
    critical = scipy.stats.f.isf(0.001, single, others)
    signs = np.resize([1.0, -1.0], documents)
    candidate = np.empty(len(of.rows))
    for kind, depth, phase in itertools.product(("code", "prose"), (512, 2048), Phase):
        cell = Stratum(phase=phase, kind=kind, depth=depth)
        noisy = math.sqrt(critical * (1.05 if beyond_chance else 0.95)) if cell == DECODE_PROSE else 1.0
        candidate[of.mask(cell)] = 1 + 1e-3 * noisy * signs
    found = ratios(of, candidate, np.ones(len(of.rows)))
    place = at(found, DECODE_PROSE)
    assert found.freedom[place] == (single if beyond_chance else single + others)
    own = own_cell_variance(of, candidate, np.ones(len(of.rows)), DECODE_PROSE)
    assert bool(found.error[place] == pytest.approx(math.sqrt(own), rel=1e-6)) is beyond_chance


def test_a_cell_of_one_segment_borrows_and_alone_it_knows_nothing() -> None:
    of = units(3, kinds=("prose",))
    keep = ~((of.depth == 512) & (of.document != "prose0"))
    found = ratios(some(of, keep), *(x[keep] for x in sums(of)))
    place = at(found, DECODE_PROSE)
    assert found.clusters[place] == 1
    assert np.isfinite(found.error[place])
    lone = (of.depth == 512) & (of.document == "prose0") & (of.phase == "decode")
    single = some(of, lone)
    nothing = ratios(single, np.array([2.0]), np.array([1.0]))
    assert np.isnan(nothing.error).all()
    assert (nothing.low(0.05) == -np.inf).all()
    assert (nothing.high(0.05) == np.inf).all()


def test_few_documents_take_the_larger_of_their_own_variance_and_the_cells() -> None:
    of = units(2)
    rng = np.random.default_rng(0)
    seen = {True: 0, False: 0}
    for _ in range(40):
        candidate, floor = rng.lognormal(0, 0.1, (2, len(of.rows)))
        alone, found = ratios(of, candidate, floor, few_freedom=0), ratios(of, candidate, floor)
        share = [candidate[of.mask(s)].sum() / candidate.sum() for s in found.strata[3:]]
        implied = math.sqrt(sum((w * e) ** 2 for w, e in zip(share, found.error[3:], strict=True)))
        assert alone.freedom[0] == 2
        assert found.error[0] == pytest.approx(max(alone.error[0], implied))
        if alone.error[0] > implied:
            assert found.freedom[0] == alone.freedom[0]
        else:
            expected = satterthwaite((np.array(share) * found.error[3:]) ** 2, found.freedom[3:], np.zeros(8))
            assert found.freedom[0] == pytest.approx(max(2.0, expected))
        seen[alone.error[0] > implied] += 1
    assert all(seen.values())


def satterthwaite(terms: np.ndarray, freedom: np.ndarray, pools: np.ndarray) -> float:
    """By the textbook: in each pool the cells that share a variance (its largest freedom) are one component."""
    parts = []
    for pool in np.unique(pools):
        v, f = terms[pools == pool], freedom[pools == pool]
        shared = f == f.max()
        parts += [(v[shared].sum(), f.max()), *zip(v[~shared], f[~shared], strict=True)]
    return float(terms.sum() ** 2 / sum(v**2 / f for v, f in parts))


@pytest.mark.parametrize("spread", [0.5, 8.0])
def test_one_noisy_cell_costs_the_cells_only_its_part_of_their_freedom(spread: float) -> None:
    # Two documents that differ with opposite signs at the two depths: the documents themselves hardly differ.
    of = units(2)
    first = np.array([str(d).endswith("0") for d in of.document])
    sign = np.where(first, 1.0, -1.0) * np.where(of.depth == 512, 1.0, -1.0)
    noisy = of.mask(DECODE_PROSE)
    size = np.where(noisy, 0.01 * spread, 0.01)
    found = ratios(of, np.exp(size * sign), np.ones(len(of.rows)))
    keeps = found.freedom[at(found, DECODE_PROSE)] == 1
    assert keeps == (spread > 2)
    weights = np.full(8, 1 / 8)
    expected = satterthwaite((weights * found.error[3:]) ** 2, found.freedom[3:], np.zeros(8))
    assert found.freedom[0] == pytest.approx(max(2.0, expected), rel=0.02)
    assert bool(found.freedom[0] == pytest.approx(8.0)) is (spread < 2)


def test_phases_that_share_apart_are_two_components_of_what_they_lend() -> None:
    of = units(3, depths=(512, 1024, 2048))  # cells of 12 degrees of freedom a phase, documents of 4
    candidate, floor = sums(of, 5, 0.1)
    # Documents that hardly differ: what their depths differ by cancels, so the cells' variance is the larger.
    depth = np.unique(of.depth, return_inverse=True)[1]
    number = np.array([int(d[-1]) for d in of.document])
    candidate = floor * np.exp(0.1 * np.sin(2 * np.pi * (depth + number) / 3) * np.where(of.phase == "decode", 3, 1))
    found = ratios(of, candidate, floor)
    share = np.array([candidate[of.mask(s)].sum() / candidate.sum() for s in found.strata[3:]])
    pools = np.array([str(s.phase) for s in found.strata[3:]])
    assert (found.freedom[3:] == 12).all()
    assert found.error[0] == pytest.approx(math.sqrt(((share * found.error[3:]) ** 2).sum()))
    assert found.freedom[0] == pytest.approx(satterthwaite((share * found.error[3:]) ** 2, found.freedom[3:], pools))
    assert 12 < found.freedom[0] < 24


def test_enough_documents_do_not_borrow() -> None:
    of = units(FEW_FREEDOM // 2 + 1)
    candidate, floor = sums(of)
    assert ratios(of, candidate, floor).freedom[0] == FEW_FREEDOM
    assert ratios(of, candidate, floor).error[0] == ratios(of, candidate, floor, few_freedom=0).error[0]


# --------------------------------------------------------------------------- bounds and edges


@given(st.floats(1, 200), st.floats(0.5, 0.9999))
def test_student_quantile_is_scipys(freedom: float, probability: float) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(
        scipy.stats.t.ppf(probability, freedom), rel=1e-8, abs=1e-9
    )


def test_student_quantile_without_freedom_is_unknown() -> None:
    assert np.isnan(student_quantile(0.95, [0.0, -1.0])).all()


def test_bounds_are_log_ratio_plus_and_minus_quantile_times_error() -> None:
    of = units(6)
    found = ratios(of, *sums(of))
    width = scipy.stats.t.ppf(0.99, found.freedom) * found.error
    assert np.allclose(found.low(0.01), found.log_ratio - width)
    assert np.allclose(found.high(0.01), found.log_ratio + width)


def test_equal_recordings_have_ratio_one_and_no_width() -> None:
    of = units(3)
    candidate, _ = sums(of)
    found = ratios(of, candidate, candidate)
    assert np.exp(found.low(0.001)).tolist() == np.exp(found.high(0.05)).tolist() == [1.0] * len(found.strata)


def test_a_candidate_of_zero_is_zero_and_a_floor_of_zero_is_unknown() -> None:
    of = units(3)
    ones, none = np.ones(len(of.rows)), np.zeros(len(of.rows))
    exact = ratios(of, none, ones)
    assert (exact.log_ratio == -np.inf).all()
    assert (exact.high(0.05) == -np.inf).all()
    for numerator in (ones, none):
        unknown = ratios(of, numerator, none)
        assert np.isnan(unknown.log_ratio).all()
        assert (unknown.low(0.05) == -np.inf).all()
        assert (unknown.high(0.05) == np.inf).all()


def test_one_exact_cell_does_not_spoil_the_others() -> None:
    of = units(3)
    candidate, floor = sums(of)
    candidate[of.mask(DECODE_PROSE)] = 0.0
    found = ratios(of, candidate, floor)
    others = [s for s in range(len(found.strata)) if found.strata[s] != DECODE_PROSE]
    assert np.isfinite(found.error[others]).all()
    assert found.high(0.05)[at(found, DECODE_PROSE)] == -np.inf


def test_leading_axes_are_independent_runs() -> None:
    of = units(3)
    pairs = [sums(of, seed) for seed in range(5)]
    together = ratios(of, np.stack([c for c, _ in pairs]), np.stack([f for _, f in pairs]))
    for run, (candidate, floor) in enumerate(pairs):
        alone = ratios(of, candidate, floor)
        assert np.allclose(together.error[run], alone.error)
        assert np.allclose(together.high(0.05)[run], alone.high(0.05))


# Four standard errors of 2,000 runs are 1.9 percentage points: a rule that covers 95 % stays inside.
@pytest.mark.parametrize(("documents", "rule_covers"), [(8, (0.93, 0.97)), (2, (0.93, 0.995))])
def test_intervals_cover_what_they_claim_under_heavy_tails(documents: int, rule_covers: tuple[float, float]) -> None:
    of, runs, rows = units(documents), 2000, 16
    rng = np.random.default_rng(11)
    sensitivity = rng.lognormal(0, 0.6, (runs, len(of.rows), rows))
    noise = rng.gamma(6.6, size=(2, *sensitivity.shape))
    found = ratios(of, (sensitivity * noise[0]).sum(-1), (sensitivity * noise[1]).sum(-1))
    covered = ((found.low(0.025) < 0) & (found.high(0.025) > 0)).mean(axis=0)
    low, high = rule_covers
    assert ((low < covered[:3]) & (covered[:3] < high)).all(), covered
    assert 0.93 < covered[3:].mean() < 0.97


def test_cells_are_covered_when_one_phase_varies_more_than_the_other() -> None:
    of, runs = units(8, depths=(512, 1024, 2048)), 2000
    rng = np.random.default_rng(13)
    size = np.where(of.phase == "decode", 0.2, 0.08)
    found = ratios(of, np.exp(size * rng.normal(size=(runs, len(size))) - size**2 / 2), np.ones((runs, len(size))))
    covered = ((found.low(0.025) < 0) & (found.high(0.025) > 0)).mean(axis=0)
    assert ((covered > 0.93) & (covered < 0.97)).all(), covered


def test_only_documents_cover_a_ratio_that_differs_by_document() -> None:
    of, runs = units(8, depths=(512, 1024, 2048)), 1000
    rng = np.random.default_rng(12)
    codes = np.unique(of.document, return_inverse=True)[1]
    by_document = rng.lognormal(0, 0.1, (runs, codes.max() + 1))[:, codes]
    candidate = by_document * rng.normal(1, 0.02, (runs, len(of.rows)))
    floor = np.full(candidate.shape, math.exp(0.1**2 / 2))

    def covered(of: Units) -> float:
        found = ratios(of, candidate, floor)
        return float(((found.low(0.025) < 0) & (found.high(0.025) > 0)).mean(axis=0)[0])

    by_segment = replace(of, document=of.segment)
    assert 0.92 < covered(of) < 0.98
    assert covered(by_segment) < 0.85


# --------------------------------------------------------------------------- contrast and mean


def test_contrast_of_two_parts_by_hand() -> None:
    of = units(3, kinds=("prose",), depths=(512,))
    first = of.phase == "decode"
    candidate, floor = np.where(first, 3.0, 1.0), np.ones(len(of.rows))
    parts = [first, ~first]
    value, error, freedom = contrast(of, [candidate * p for p in parts], [floor * p for p in parts])
    assert math.exp(value) == pytest.approx(3.0)
    assert error == pytest.approx(0.0, abs=1e-15)
    assert freedom == 2


def test_error_of_a_contrast_agrees_with_a_jackknife_over_documents() -> None:
    of = units(30, kinds=("prose",), depths=(512,))
    rng = np.random.default_rng(8)
    shared = rng.lognormal(0, 0.5, len(of.rows))
    candidate, floor = (shared * rng.lognormal(0, 0.05, (2, len(of.rows)))).copy()
    parts = [of.phase == "decode", of.phase == "prefill"]

    def log_contrast(kept: np.ndarray) -> float:
        logs = [math.log(candidate[p & kept].sum() / floor[p & kept].sum()) for p in parts]
        return logs[0] - logs[1]

    documents = np.unique(of.document)
    left_out = np.array([log_contrast(of.document != d) for d in documents])
    count = len(documents)
    jackknife = math.sqrt((count - 1) / count * ((left_out - left_out.mean()) ** 2).sum())
    value, error, freedom = contrast(of, [candidate * p for p in parts], [floor * p for p in parts])
    assert value == pytest.approx(log_contrast(np.ones(len(of.rows), bool)))
    assert error == pytest.approx(jackknife, rel=0.05)
    assert freedom == count - 1


def test_contrast_without_rows_is_unknown() -> None:
    of = units(2)
    zero, ones = np.zeros(len(of.rows)), np.ones(len(of.rows))
    value, error, freedom = contrast(of, [zero, ones], [zero, ones])
    assert math.isnan(value)
    assert math.isnan(error)
    assert freedom == 0


def test_mean_of_equal_documents_is_the_textbook_standard_error() -> None:
    of = units(6, kinds=("prose",), depths=(512,), rows=10)
    rng = np.random.default_rng(4)
    total = rng.normal(size=len(of.rows))
    value, error, freedom = mean(of, total)
    per_document = np.array([total[of.document == d].sum() / 20 for d in np.unique(of.document)])
    assert value == pytest.approx(per_document.mean())
    assert error == pytest.approx(scipy.stats.sem(per_document))
    assert freedom == 5


def test_mean_of_nothing_is_unknown() -> None:
    of = units(2)
    empty = some(of, np.empty(0, int))
    assert math.isnan(mean(empty, np.empty(0))[0])


# --------------------------------------------------------------------------- what is shown


@given(st.integers(0, 60), st.integers(0, 60))
def test_exact_interval_is_scipys(hits: int, misses: int) -> None:
    trials = hits + misses
    low, high = exact_interval(hits, trials)
    if not trials:
        assert (low, high) == (0.0, 1.0)
        return
    oracle = scipy.stats.binomtest(hits, trials).proportion_ci(0.95, "exact")
    assert low == pytest.approx(oracle.low, abs=1e-9)
    assert high == pytest.approx(oracle.high, abs=1e-9)


def flip_columns(margin: list[float], flip: list[bool], error: float = 0.1) -> dict[str, np.ndarray]:
    return {"margin": np.array(margin), "flip": np.array(flip), "error_plain": np.full(len(margin), error)}


def bin_of(bins: tuple[FlipBin, ...], margin: float) -> FlipBin:
    return next(b for b in bins if b.low <= margin < b.high)


def test_margin_bins_are_half_open_and_hold_every_position() -> None:
    edges = [*MARGIN_EDGES[:-1], 50.0]
    bins = flip_bins(flip_columns(edges, [False] * len(edges)), None)
    assert [b.positions for b in bins] == [1, 1, 1, 1, 2]
    assert all(b.floor is None and b.only_candidate is None and math.isnan(b.p_value) for b in bins)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 5), st.integers(0, 5))
def test_discordant_pairs_are_a_one_sided_mcnemar_test(more: int, less: int, both: int, neither: int) -> None:
    ours = [True] * more + [False] * less + [True] * both + [False] * neither
    theirs = [False] * more + [True] * less + [True] * both + [False] * neither
    margin = [0.05] * len(ours)
    found = bin_of(flip_bins(flip_columns(margin, ours), flip_columns(margin, theirs)), 0.05)
    assert (found.candidate, found.floor, found.only_candidate, found.only_floor) == (
        more + both,
        less + both,
        more,
        less,
    )
    oracle = scipy.stats.binomtest(more, more + less, alternative="greater").pvalue if more + less else 1.0
    assert found.p_value == pytest.approx(oracle)


def test_predicted_flips_come_from_the_floors_error_alone() -> None:
    ours, theirs = (
        flip_columns([0.05, 0.3], [True, True], error=9.0),
        flip_columns([0.05, 0.3], [False, False], error=0.1),
    )
    bins = flip_bins(ours, theirs)
    for margin in (0.05, 0.3):
        assert bin_of(bins, margin).predicted == pytest.approx(scipy.stats.norm.cdf(-margin / (math.sqrt(2) * 0.1)))


def test_no_noise_predicts_no_flip() -> None:
    columns = flip_columns([0.0, 0.05], [False, False], error=0.0)
    assert bin_of(flip_bins(columns, columns), 0.0).predicted == 0.0


def test_prediction_agrees_with_simulated_noise() -> None:
    rng = np.random.default_rng(6)
    margin, sigma = rng.uniform(0, 0.1, 20_000), 0.05
    noise = rng.normal(0, sigma, (2, len(margin)))
    flips = noise[1] - noise[0] > margin
    columns = {"margin": margin, "flip": flips, "error_plain": np.full(len(margin), sigma)}
    found = bin_of(flip_bins(columns, columns), 0.05)
    assert found.predicted == pytest.approx(flips.sum(), abs=4 * math.sqrt(flips.sum()))


def test_task_bound_is_pinsker_over_decode_rows_and_at_most_one() -> None:
    columns = {
        "phase": np.array(["decode", "decode", "prefill", "decode"]),
        "segment": np.array(["a", "a", "a", "b"]),
        "kl_full": np.array([0.01, 0.03, 5.0, 9.0]),
    }
    assert task_bounds(columns) == {"a": pytest.approx(math.sqrt(0.02)), "b": 1.0}


def shown(estimates: tuple[Estimate, ...], metric: str, statistic: str, stratum: Stratum = OVERALL) -> Estimate:
    return next(e for e in estimates if (e.metric, e.statistic, e.stratum) == (metric, statistic, stratum))


def example(seed: int = 0) -> dict[str, np.ndarray]:
    return columns(documents=4, rows=24, seed=seed)


def test_estimates_agree_with_numpy_on_each_stratum() -> None:
    ours, theirs = example(), example(seed=1)
    found = summarise(group(ours), ours, theirs, None)
    for stratum, inside in (
        (OVERALL, np.ones(len(ours["kl20"]), bool)),
        (Stratum(phase=Phase.DECODE), ours["phase"] == "decode"),
        (DECODE_PROSE, (ours["phase"] == "decode") & (ours["kind"] == "prose") & (ours["depth"] == 512)),
    ):
        kl = ours["kl20"][inside]
        expected = {"median": np.median(kl), "p90": np.quantile(kl, 0.9), "p99": np.quantile(kl, 0.99)}
        expected |= {"max": kl.max(), "mean": kl.mean()}
        for statistic, value in expected.items():
            assert shown(found, "kl20", statistic, stratum).value == pytest.approx(value, rel=1e-12)
        assert shown(found, "kl20", "ratio_to_floor", stratum).value == pytest.approx(
            kl.mean() / theirs["kl20"][inside].mean()
        )
        assert shown(found, "flip", "rate", stratum).value == ours["flip"][inside].mean()
        assert shown(found, "kl20", "mean", stratum).positions == inside.sum()
        assert shown(found, "kl20", "mean", stratum).low < kl.mean() < shown(found, "kl20", "mean", stratum).high


def test_perplexity_of_both_and_of_their_ratio() -> None:
    ours = example()
    found = summarise(group(ours), ours, None, None)
    reference, candidate = (np.exp(ours[c].mean()) for c in ("nll_reference", "nll_candidate"))
    assert shown(found, "perplexity", "reference").value == pytest.approx(reference)
    both = shown(found, "perplexity", "candidate_over_reference")
    assert both.value == pytest.approx(candidate / reference)
    assert both.low < both.value < both.high


def test_the_standard_error_of_a_perplexity_is_a_jackknife_over_documents() -> None:
    ours = example()
    kinds = {kind: np.unique(ours["document"][ours["kind"] == kind]) for kind in ("code", "prose")}
    for side in ("reference", "candidate"):
        nll = ours[f"nll_{side}"]
        means = {kind: nll[ours["kind"] == kind].mean() for kind in kinds}
        variance = 0.0
        for kind, documents in kinds.items():  # kinds are fixed and keep their weights; documents are left out
            inside = ours["kind"] == kind
            others = sum(mean for other, mean in means.items() if other != kind)
            without = np.array([(nll[inside & (ours["document"] != d)].mean() + others) / 2 for d in documents])
            variance += (len(without) - 1) / len(without) * np.var(np.exp(without)) * len(without)
        found = shown(summarise(group(ours), ours, None, None), "perplexity", f"{side}_error")
        assert found.value == pytest.approx(math.sqrt(variance), rel=0.02)
        assert math.isnan(found.low)


@pytest.mark.parametrize(
    ("statistic", "part"),
    [
        ("trend_depth", lambda c: c["depth"] == 2048),
        ("trend_step", lambda c: c["step"] >= 16),
        ("trend_chunk", lambda c: (c["chunk_distance"] >= 0) & (c["chunk_distance"] < 4)),
        ("trend_block", lambda c: c["block_distance"] < 4),
    ],
)
def test_a_trend_shows_in_its_own_contrast(statistic: str, part: object) -> None:
    ours, theirs = example(), example()
    ours["kl20"] = ours["kl20"] * np.where(part(ours), 3.0, 1.0)  # type: ignore[operator]
    found = summarise(group(ours), ours, theirs, None)
    stratum = {
        "trend_step": Stratum(phase=Phase.DECODE),
        "trend_chunk": Stratum(phase=Phase.PREFILL),  # a decode step is a chunk of its own: always at its start
    }.get(statistic, OVERALL)
    assert shown(found, "kl20", statistic, stratum).value == pytest.approx(3.0, rel=1e-9)
    flat = summarise(group(theirs), theirs, theirs, None)
    assert shown(flat, "kl20", statistic, stratum).value == pytest.approx(1.0)


def test_trends_without_data_are_left_out() -> None:
    ours = example()
    ours |= {"step": np.full_like(ours["step"], -1), "chunk_distance": np.full_like(ours["step"], -1)}
    statistics = {e.statistic for e in summarise(group(ours), ours, None, None)}
    assert not statistics & {"trend_step", "trend_chunk"}
    assert "trend_block" in statistics


# --------------------------------------------------------------------------- power


def test_a_detectable_effect_fails_as_often_as_promised() -> None:
    limit, error, freedom, level = 1.4, 0.05, 30.0, 0.001
    effect = float(detectable(limit, np.array(error), np.array(freedom), level))
    rng = np.random.default_rng(7)
    estimate = math.log(effect) + error * rng.normal(size=40_000)
    estimated = error * np.sqrt(rng.chisquare(freedom, 40_000) / freedom)
    failed = estimate - scipy.stats.t.ppf(1 - level, freedom) * estimated > math.log(limit)
    assert failed.mean() == pytest.approx(CERTAIN, abs=0.015)


def test_an_unknown_error_detects_nothing() -> None:
    assert detectable(1.4, np.array([np.nan]), np.array([0.0]), 0.01).tolist() == [np.inf]


def planned(corpus: Corpus, **more: Any) -> Plan:
    return plan(corpus, load_gates(None), BUILD, columns=1000, logits_dtype="bfloat16", **more)


def test_a_plan_counts_rows_bytes_tokens_and_minutes() -> None:
    corpus = make_corpus(documents=9, depths=(32, 48), prefill=12, decode=12)
    found = planned(corpus)
    assert found.rows == corpus.rows == 2 * 9 * 2 * 24
    assert found.bytes == found.rows * 2000
    assert (found.prefill_tokens, found.decode_steps) == (2 * 9 * (32 + 48), 2 * 9 * 2 * 12)
    assert found.minutes is None
    assert len(found.detectable) == 3 + 8


def test_minutes_of_a_plan_are_those_of_an_earlier_recording_by_tokens() -> None:
    corpus = make_corpus(documents=2, depths=(32, 48), prefill=12, decode=12)
    twice = make_corpus(documents=4, depths=(32, 48), prefill=12, decode=12)
    assert planned(corpus, like=(corpus, manifest(seconds=90.0))).minutes == pytest.approx(1.5)
    assert planned(twice, like=(corpus, manifest(seconds=90.0))).minutes == pytest.approx(3.0)
    shallow = make_corpus(documents=2, depths=(32,), prefill=12, decode=12)
    share = (32 + 12 * 15) / (32 + 48 + 2 * 12 * 15)
    assert planned(shallow, like=(corpus, manifest(seconds=90.0))).minutes == pytest.approx(1.5 * share)
    assert planned(corpus, like=(corpus, manifest(seconds=None))).minutes is None


def test_a_window_past_the_first_decoded_index_is_a_second_prefill_of_a_plan() -> None:
    corpus = make_corpus(documents=1, depths=(32,), prefill=12, decode=12, overlap=6)
    assert planned(corpus).prefill_tokens == 2 * (32 + 32 + 6)


def test_the_power_of_a_plan_is_what_the_judge_would_find() -> None:
    """Independent draws of the same noise, judged by the same rule: a FAIL in 95 % at the ratio the plan gives."""
    corpus = make_corpus(documents=8, depths=(600, 700), prefill=512, decode=512)
    found = planned(corpus)
    of, rng, runs = units(8, depths=(600, 700), rows=512), np.random.default_rng(77), 4000
    assert len(of.rows) == 2 * 8 * 2 * 2
    by_document = 0.06 * rng.normal(size=(runs, 16))[:, np.unique(of.document, return_inverse=True)[1]]
    by_row = 1.6 / math.sqrt(512) * rng.normal(size=(runs, len(of.rows)))
    drawn = ratios(of, np.exp(by_document + by_row - (0.06**2 + 1.6**2 / 512) / 2), np.ones((runs, len(of.rows))))
    lower = drawn.low(load_gates(None).fail_level / len(drawn.strata))
    for stratum, limit, ratio in found.detectable:
        failed = math.log(ratio) + lower[:, at(drawn, stratum)] > math.log(limit)
        assert failed.mean() == pytest.approx(CERTAIN, abs=0.02)
    anywhere = (math.log(found.everywhere) + lower > math.log(1.4)).any(axis=1)
    assert anywhere.mean() == pytest.approx(CERTAIN, abs=0.02)
    assert found.everywhere <= min(ratio for _, _, ratio in found.detectable)


def test_a_plan_for_a_smoke_corpus_has_no_cells_and_more_documents_see_more() -> None:
    small, large = (planned(make_corpus(documents=d, smoke=True)) for d in (2, 8))
    assert all(stratum.kind is None for stratum, _, _ in small.detectable)
    assert {limit for _, limit, _ in small.detectable} == {2.0}
    assert large.everywhere < small.everywhere


def test_a_plan_for_a_single_document_detects_nothing() -> None:
    found = planned(make_corpus(documents=1, kinds=("prose",), depths=(32,)))
    assert found.everywhere == math.inf
    assert all(ratio == math.inf for _, _, ratio in found.detectable)


def open_check(value: float, status: Status = Status.INCONCLUSIVE) -> Check:
    return Check(
        metric="kl20",
        statistic="ratio_to_floor",
        stratum=DECODE_PROSE,
        value=value,
        low=value / 1.5,
        high=value * 1.5,
        limit=1.4,
        status=status,
        positions=30,
        clusters=3,
    )


def advice(check: Check, error: float = 0.2, of: Manifest | None = None) -> str:
    levels = {"fail_level": 0.001, "pass_level": 0.05}
    return remedy([check], [(error, 30.0)], ["prose0-d512"], of or manifest(seconds=600.0), units(), **levels)


def test_a_remedy_says_how_many_segments_and_minutes() -> None:
    # (t_.95 + t_.8) error / log(1.4 / 1.1) squared times the three segments there are.
    factor = ((scipy.stats.t.ppf(0.95, 30) + scipy.stats.t.ppf(0.8, 30)) * 0.2 / math.log(1.4 / 1.1)) ** 2
    more = math.ceil(3 * (factor - 1))
    assert f"about {more} more documents like its 3" in advice(open_check(1.1))
    assert "prose0-d512 moves it most" in advice(open_check(1.1))
    of = units()
    cost = of.depth / 2 + np.where(of.phase == "decode", 150.0, 0.0)
    inside = (of.kind == "prose") & (of.depth == 512)
    minutes = 10 * cost[inside].sum() / cost.sum() * more / 3
    assert f"about {minutes:.1f} minutes" in advice(open_check(1.1))


def test_a_value_above_the_limit_needs_enough_rows_for_a_fail() -> None:
    factor = ((scipy.stats.t.ppf(0.999, 30) + scipy.stats.t.ppf(0.8, 30)) * 0.2 / math.log(1.8 / 1.4)) ** 2
    assert f"about {math.ceil(3 * (factor - 1))} more documents like its 3" in advice(open_check(1.8))


@pytest.mark.parametrize(
    ("value", "error"), [(1.4, 0.2), (1.39, 0.2), (1.1, math.nan), (math.nan, 0.2), (math.inf, 0.2)]
)
def test_more_rows_are_not_advised_where_they_would_not_help(value: float, error: float) -> None:
    assert "more rows will hardly decide it" in advice(open_check(value), error)


def test_a_decided_check_needs_no_remedy_and_unknown_minutes_are_said() -> None:
    assert advice(open_check(1.1, Status.PASS)) == ""
    assert "minutes unknown" in advice(open_check(1.1), of=manifest(seconds=None))
