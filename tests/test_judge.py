"""Every rule of the verdict, on both sides of its threshold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import UsageError
from harness.gates import STATISTICS, gate_for
from harness.judge import judge, load_gates
from harness.types import (
    OVERALL,
    Build,
    Check,
    Comparison,
    Finding,
    FloorRange,
    Gates,
    InstrumentCheck,
    Phase,
    Status,
    Stratum,
    Verdict,
)
from harness.wording import deciding
from tests.judging import BUILD, columns, comparison, side

GATES = load_gates(None)
LIMIT = gate_for(GATES, "ratio_to_floor", BUILD, OVERALL).limit
SMOKE_LIMIT = gate_for(GATES, "ratio_to_floor", BUILD, OVERALL, smoke=True).limit
PHASE_LIMIT = gate_for(GATES, "phase_ratio_to_floor", BUILD, OVERALL).limit
ROWS = 2 * 8 * 2 * 2 * 24
CELL = Stratum(phase=Phase.DECODE, kind="prose", depth=2048)


def scaled(made: Comparison, ratio: float, where: Callable[[dict[str, Any]], Any] | None = None) -> Comparison:
    """KL of some rows of the candidate, or all, times a ratio."""
    positions = dict(made.positions)
    rows = np.ones(len(positions["kl20"]), bool) if where is None else where(positions)
    for name in ("kl20", "kl_full"):
        positions[name] = positions[name] * np.where(rows, ratio, 1.0)
    return replace(made, positions=positions)


def exactly(ratio: float, **changes: Any) -> Comparison:
    """A candidate whose every row is `ratio` times the floor's: no width, so that only the limit decides."""
    made = comparison(**changes)
    assert made.floor is not None
    positions = dict(made.positions) | {name: made.floor[name] * ratio for name in ("kl20", "kl_full")}
    return replace(made, positions=positions)


def with_row(made: Comparison, row: int, **values: Any) -> Comparison:
    """The same with some columns of one row replaced."""
    positions = dict(made.positions)
    for name, value in values.items():
        positions[name] = positions[name].copy()
        positions[name][row] = value
    return replace(made, positions=positions)


def checks(verdict: Verdict, statistic: str, tier: str | None = None) -> list[Check]:
    return [c for c in verdict.checks if c.statistic == statistic and tier in (None, c.tier)]


def in_cell(positions: dict[str, Any]) -> Any:
    return (positions["phase"] == "decode") & (positions["kind"] == "prose") & (positions["depth"] == 2048)


# --------------------------------------------------------------------------- the word and the exit code


def test_a_correct_build_passes() -> None:
    verdict = judge(comparison(), GATES)
    assert (verdict.status, verdict.word, verdict.exit_code) == (Status.PASS, "PASS", 0)
    assert len(verdict.reasons) == 3
    assert "x the floor's" in verdict.reasons[0]
    assert verdict.remedy == ""
    assert len(checks(verdict, "ratio_to_floor")) == 3 + 8
    assert all(c.low < c.value < c.high < c.limit < c.detectable for c in checks(verdict, "ratio_to_floor"))


def test_a_verdict_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match="status"):
        bool(judge(comparison(), GATES))


@pytest.mark.parametrize(
    ("ratio", "status", "code"),
    [(1.0, Status.PASS, 0), (LIMIT * 1.02, Status.INCONCLUSIVE, 3), (2.5, Status.FAIL, 1)],
)
def test_exit_codes_follow_the_status(ratio: float, status: Status, code: int) -> None:
    verdict = judge(scaled(comparison(), ratio), GATES)
    assert (verdict.status, verdict.word, verdict.exit_code) == (status, status.value, code)


def test_at_most_three_reasons_and_the_worst_stratum_first() -> None:
    made = scaled(scaled(comparison(), 2.5), 4.0, in_cell)
    verdict = judge(made, GATES)
    assert len(verdict.reasons) == 3
    assert str(CELL) in verdict.reasons[0]


@pytest.mark.parametrize(("status", "first"), [(Status.FAIL, "decode"), (Status.INCONCLUSIVE, "prefill")])
def test_failures_rank_by_their_lower_bound_and_the_rest_by_their_upper(status: Status, first: str) -> None:
    sample = checks(judge(comparison(), GATES), "ratio_to_floor")[0]
    wide = replace(sample, stratum=Stratum(phase=Phase.PREFILL), low=1.5, high=9.0, status=status)
    narrow = replace(sample, stratum=Stratum(phase=Phase.DECODE), low=2.0, high=2.5, status=status)
    assert f"in {first}" in deciding(status, [wide, narrow], [], [], 1.0)[0]


# --------------------------------------------------------------------------- rule 1: could it be judged?


def broken_instrument(passed: bool) -> InstrumentCheck:
    return InstrumentCheck(rows=5, max_error=1e-3, limit=2e-5, passed=passed)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"findings": (Finding(code="rows-shifted", message="rows are shifted", fatal=True),)}, "rows are shifted"),
        ({"candidate": side("candidate", complete=False, rows_written=7)}, "lacks 3 of 10 rows"),
        ({"reference": side("reference", complete=False, rows_written=9)}, "reference reference lacks 1"),
        ({"candidate": side("candidate", instrument=broken_instrument(False))}, "own log-probs"),
        ({"reference": side("reference", replace(BUILD, dtype="float32", host={"tf32": True}))}, "TF32"),
        ({"positions": {n: c[:0] for n, c in columns().items()}}, "no positions"),
        ({"positions": columns() | {"nonfinite_reference": np.eye(1, ROWS, dtype=int)[0]}}, "NaN or infinite"),
    ],
)
def test_what_cannot_be_judged_ends_in_exit_4_not_in_a_number(changes: dict[str, Any], said: str) -> None:
    verdict = judge(comparison(**changes), GATES)
    assert (verdict.status, verdict.word, verdict.exit_code) == (None, "COULD NOT JUDGE", 4)
    assert said in verdict.reasons[0]
    assert verdict.checks == ()


def test_a_passed_instrument_check_bars_nothing() -> None:
    made = comparison(candidate=side("candidate", instrument=broken_instrument(True)))
    assert judge(made, GATES).status is Status.PASS


def test_a_fatal_finding_outranks_nan_in_the_candidate() -> None:
    made = with_row(comparison(findings=(Finding(code="x", message="x", fatal=True),)), 0, kl20=math.nan)
    assert judge(made, GATES).status is None


def test_a_finding_that_is_not_fatal_is_a_fail_with_its_message_first() -> None:
    made = comparison(findings=(Finding(code="temperature", message="a temperature of 0.9 was applied", fatal=False),))
    verdict = judge(made, GATES)
    assert verdict.status is Status.FAIL
    assert verdict.reasons[0] == "a temperature of 0.9 was applied"


@pytest.mark.parametrize(
    "values",
    [
        {"kl20": math.nan},
        {"kl20": math.inf},
        {"kl_full": math.inf},
        {"nan_candidate": 1},
    ],
)
def test_one_row_of_nan_or_infinity_in_the_candidate_is_a_fail(values: dict[str, float]) -> None:
    verdict = judge(with_row(comparison(), 5, **values), GATES)
    assert verdict.status is Status.FAIL
    assert verdict.reasons[0].startswith("1 of 1536 rows have NaN or infinite logits")
    # The other rows are still shown, with finite figures.
    assert all(np.isfinite(e.value) for e in verdict.estimates)
    assert checks(verdict, "ratio_to_floor")[0].positions == ROWS - 1


def test_a_candidate_of_nan_alone_is_a_fail() -> None:
    made = comparison()
    positions = dict(made.positions) | {"kl20": np.full(ROWS, math.nan)}
    verdict = judge(replace(made, positions=positions), GATES)
    assert verdict.status is Status.FAIL
    assert verdict.estimates == ()


# --------------------------------------------------------------------------- rule 2: flips at a large margin


@pytest.mark.parametrize(
    ("margin", "flip", "status"),
    [(1.0, True, Status.PASS), (math.nextafter(1.0, 2.0), True, Status.FAIL), (5.0, False, Status.PASS)],
)
def test_a_flip_above_margin_1_is_a_fail(margin: float, flip: bool, status: Status) -> None:
    verdict = judge(with_row(comparison(), 3, margin=margin, flip=flip), GATES)
    assert verdict.status is status
    if status is Status.FAIL:
        assert verdict.reasons[0] == "1 of 1536 rows flip at a margin above 1 (allowed: 0)"


def test_flips_and_quantiles_are_shown_and_never_decide() -> None:
    made = comparison()
    positions = dict(made.positions)
    positions["flip"] = positions["margin"] < 0.5
    verdict = judge(replace(made, positions=positions), GATES)
    assert verdict.status is Status.PASS
    assert verdict.flip_bins[0].p_value < 1e-6
    assert {"median", "p99", "max", "trend_depth"} <= {e.statistic for e in verdict.estimates}
    assert len(verdict.task_bounds) == 32


# --------------------------------------------------------------------------- rules 3 and 4: the ratio to the floor


@pytest.mark.parametrize(
    ("ratio", "status"),
    [
        (0.43, Status.PASS),
        (LIMIT * (1 - 1e-9), Status.PASS),
        (LIMIT * (1 + 1e-9), Status.FAIL),
    ],
)
def test_without_width_the_limit_alone_decides(ratio: float, status: Status) -> None:
    assert judge(exactly(ratio), GATES).status is status


def test_at_the_limit_itself_neither_bound_is_beyond_it() -> None:
    # A limit of 1 is hit without rounding: log 1 is 0.
    gates = with_limit(1.0)
    assert judge(exactly(1.0), gates).status is Status.INCONCLUSIVE


def with_limit(limit: float, statistic: str = "ratio_to_floor") -> Gates:
    gates = tuple(replace(g, limit=limit) if g.statistic == statistic else g for g in GATES.gates)
    return replace(GATES, gates=gates)


def test_fail_needs_a_lower_bound_at_a_shared_level_and_pass_an_upper_bound_at_its_own() -> None:
    """The limit is put a hair to each side of the bounds that the judge reports."""
    made = comparison()
    found = checks(judge(made, GATES), "ratio_to_floor")
    highest, lowest = max(c.high for c in found), max(c.low for c in found)
    assert judge(made, with_limit(highest * 1.0001)).status is Status.PASS
    assert judge(made, with_limit(highest * 0.9999)).status is Status.INCONCLUSIVE
    assert judge(made, with_limit(lowest * 1.0001)).status is Status.INCONCLUSIVE
    assert judge(made, with_limit(lowest * 0.9999)).status is Status.FAIL


def test_the_level_of_a_fail_is_shared_by_all_interval_checks() -> None:
    from harness.stats import group, ratios

    made = comparison()
    assert made.floor is not None
    units = group(made.positions)
    found = ratios(units, units.sums(made.positions["kl20"]), units.sums(made.floor["kl20"]))
    alone = checks(judge(made, GATES), "ratio_to_floor")
    assert np.allclose([c.low for c in alone], np.exp(found.low(0.05 / 11)))
    assert np.allclose([c.high for c in alone], np.exp(found.high(0.05)))
    beside_twin = checks(judge(made, GATES, twins=[twin()]), "ratio_to_floor")
    assert np.allclose([c.low for c in beside_twin], np.exp(found.low(0.05 / 22)))
    assert np.allclose([c.high for c in beside_twin], np.exp(found.high(0.05)))


def test_one_bad_cell_is_enough_for_a_fail_and_names_itself() -> None:
    verdict = judge(scaled(comparison(), 2.5, in_cell), GATES)
    assert verdict.status is Status.FAIL
    assert str(CELL) in verdict.reasons[0]
    assert [c.stratum for c in verdict.checks if c.status is Status.FAIL] == [CELL]


def test_one_open_cell_holds_a_pass_back_and_says_what_would_decide() -> None:
    verdict = judge(scaled(comparison(), 1.3, in_cell), GATES)
    assert verdict.status is Status.INCONCLUSIVE
    assert str(CELL) in verdict.remedy
    assert "minutes" in verdict.remedy
    assert "prose" in verdict.remedy.split("more documents like its 8")[1]


def test_a_few_terrible_rows_cannot_pass() -> None:
    made = comparison()
    row = int(np.flatnonzero(in_cell(dict(made.positions)))[0])
    assert judge(with_row(made, row, kl20=0.2, kl_full=0.2), GATES).status is not Status.PASS


def test_a_narrower_gate_decides_in_its_stratum_only() -> None:
    strict = replace(
        gate_for(GATES, "ratio_to_floor", BUILD, OVERALL), limit=0.5, stratum=Stratum(phase=Phase.DECODE, kind="prose")
    )
    verdict = judge(comparison(), replace(GATES, gates=(*GATES.gates, strict)))
    limits = {c.stratum: c.limit for c in checks(verdict, "ratio_to_floor")}
    assert limits[CELL] == limits[replace(CELL, depth=512)] == 0.5
    assert set(limits.values()) == {0.5, LIMIT}
    assert limits[Stratum(phase=Phase.DECODE)] == LIMIT
    assert verdict.status is Status.FAIL


def test_bit_equal_to_a_floor_that_another_build_made_is_a_ratio_of_one() -> None:
    made = exactly(1.0, floor_side=side("floor", replace(BUILD, engine_version="1"), id="candidate"))
    verdict = judge(made, GATES)
    assert verdict.status is Status.PASS
    assert all(c.low == c.high == c.value == 1.0 for c in checks(verdict, "ratio_to_floor"))
    assert any("bit-equal" in note for note in verdict.notes)


def test_bit_equal_to_the_reference_passes_with_a_ratio_of_zero() -> None:
    verdict = judge(exactly(0.0), GATES)
    assert verdict.status is Status.PASS
    assert all(c.value == c.high == 0.0 for c in checks(verdict, "ratio_to_floor"))


def test_a_cell_in_which_the_floor_is_zero_is_open() -> None:
    made = scaled(comparison(), 0.5)  # so that the strata around the cell have room
    assert made.floor is not None
    floor = dict(made.floor)
    floor["kl20"] = np.where(in_cell(dict(made.positions)), 0.0, floor["kl20"])
    verdict = judge(replace(made, floor=floor), GATES)
    assert [c.stratum for c in verdict.checks if c.status is Status.INCONCLUSIVE] == [CELL]
    assert verdict.status is Status.INCONCLUSIVE


# --------------------------------------------------------------------------- rule 5: the baseline


def against_baseline(ratio: float, spread: int = 3, **changes: Any) -> Comparison:
    """A candidate at 0.5 x the floor and `ratio` x its baseline."""
    made = scaled(comparison(baseline_side=side("baseline"), **changes), 0.5)
    baseline = columns(seed=spread)
    return replace(made, baseline={**baseline, "kl20": baseline["kl20"] * 0.5 / ratio})


@pytest.mark.parametrize(
    ("ratio", "status"), [(1.0, Status.PASS), (1.4, Status.INCONCLUSIVE), (3.0, Status.INCONCLUSIVE)]
)
def test_above_the_baseline_nothing_passes_and_nothing_fails(ratio: float, status: Status) -> None:
    verdict = judge(against_baseline(ratio), GATES)
    assert verdict.status is status
    assert all(c.status is Status.PASS for c in checks(verdict, "ratio_to_floor"))
    if ratio == 3.0:
        assert verdict.reasons[0].startswith("changed, explain or re-baseline: mean KL20 is")


def test_the_baseline_takes_no_share_of_the_error_probability_of_a_fail() -> None:
    alone, beside = judge(scaled(comparison(), 0.5), GATES), judge(against_baseline(1.0), GATES)
    lows = [[c.low for c in checks(v, "ratio_to_floor")] for v in (alone, beside)]
    assert lows[0] == lows[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"baseline_side": side("candidate")}, "the candidate itself"),
        ({"baseline_side": side("b", replace(BUILD, patches=({"name": "rope", "kind": "fault"},)))}, "the fault rope"),
        ({"baseline": columns() | {"kl20": np.full(ROWS, math.nan)}}, "not finite"),
        ({"baseline": columns() | {"kl20": np.zeros(ROWS)}}, "bit-equal to the reference"),
    ],
)
def test_an_unfit_baseline_is_refused_and_holds_a_pass_back(changes: dict[str, Any], said: str) -> None:
    made = replace(comparison(baseline_side=side("baseline"), baseline=columns(seed=4)), **changes)
    verdict = judge(made, GATES)
    assert verdict.status is Status.INCONCLUSIVE
    assert said in verdict.reasons[0]
    assert checks(verdict, "ratio_to_baseline") == []


# --------------------------------------------------------------------------- rule 6: the floor


def test_no_floor_no_pass() -> None:
    verdict = judge(comparison(floor=False), GATES)
    assert verdict.status is Status.INCONCLUSIVE
    assert "no floor was given" in verdict.reasons[0]
    assert checks(verdict, "ratio_to_floor") == []
    assert verdict.flip_bins[0].floor is None


@pytest.mark.parametrize(
    "broken",
    [
        {"findings": (Finding(code="x", message="x", fatal=False),)},
        {"positions": columns() | {"kl20": np.full(ROWS, math.nan)}},
        {"positions": columns() | {"flip": np.ones(ROWS, bool)}},
    ],
)
def test_without_a_floor_the_safety_nets_still_fail(broken: dict[str, Any]) -> None:
    assert judge(comparison(floor=False, **broken), GATES).status is Status.FAIL


def a_floor(build: Build = BUILD, recording: str = "floor", **changes: Any) -> Any:
    return side(recording, build, **changes)


HF = replace(BUILD, engine="huggingface")


@pytest.mark.parametrize(
    ("floor", "said"),
    [
        (a_floor(recording="candidate"), "the candidate itself"),
        (a_floor(id="candidate"), "the candidate itself"),
        (a_floor(replace(HF, patches=({"name": "p_fp8", "kind": "fault"},))), "the fault p_fp8"),
        (a_floor(replace(HF, patches=({"name": "mine"},))), "the fault mine"),
        (a_floor(replace(HF, weights_sha256="others")), "another model"),
        (a_floor(replace(HF, weights_sha256="", model="other")), "another model"),
        (a_floor(replace(HF, dtype="float16")), "its dtype is float16"),
        (a_floor(replace(HF, quantization="fp8")), "its quantisation is fp8"),
        (a_floor(replace(HF, kv_cache_dtype="fp8_e4m3")), "its kv-cache dtype is fp8_e4m3"),
    ],
)
def test_an_unfit_floor_is_refused(floor: Any, said: str) -> None:
    verdict = judge(comparison(floor_side=floor), GATES)
    assert verdict.status is Status.INCONCLUSIVE
    assert "is refused" in verdict.reasons[0]
    assert said in verdict.reasons[0]
    assert not checks(verdict, "ratio_to_floor")


@pytest.mark.parametrize(
    "floor",
    [
        a_floor(replace(HF, patches=({"name": "block_size", "kind": "benign"},))),
        a_floor(replace(HF, weights_sha256="")),
        a_floor(replace(BUILD, engine_version="1"), id="candidate"),
        a_floor(replace(HF, kv_cache_dtype="auto")),
    ],
)
def test_a_fit_floor_is_taken(floor: Any) -> None:
    assert judge(comparison(floor_side=floor), GATES).status is Status.PASS


def test_a_floor_may_be_finer_than_the_candidate_and_as_coarse_but_not_coarser() -> None:
    quantised = replace(BUILD, quantization="fp8", kv_cache_dtype="fp8_e4m3")
    for floor, status in (
        (HF, Status.PASS),
        (replace(quantised, engine_version="1"), Status.PASS),
        (replace(quantised, quantization="int4"), Status.INCONCLUSIVE),
    ):
        made = comparison(candidate=side("candidate", quantised), floor_side=a_floor(floor))
        assert judge(made, GATES).status is status


@pytest.mark.parametrize(("factor", "refused"), [(0.99, True), (1.01, False)])
def test_a_floor_below_what_the_reference_resolves_is_refused(factor: float, refused: bool) -> None:
    least = gate_for(GATES, "floor_mean_at_least", BUILD, OVERALL).limit
    made = exactly(1.0)
    assert made.floor is not None
    scale = factor * least / made.floor["kl20"].mean()
    floor = dict(made.floor) | {"kl20": made.floor["kl20"] * scale}
    verdict = judge(replace(scaled(made, scale), floor=floor), GATES)
    assert (verdict.status is Status.INCONCLUSIVE) is refused
    assert ("itself resolves" in verdict.reasons[0]) is refused


def test_a_floor_equal_to_the_reference_is_refused() -> None:
    made = comparison()
    assert made.floor is not None
    verdict = judge(replace(made, floor=dict(made.floor) | {"kl20": np.zeros(ROWS)}), GATES)
    assert verdict.status is Status.INCONCLUSIVE
    assert "is refused" in verdict.reasons[0]


def test_a_floor_with_nan_is_refused() -> None:
    made = comparison()
    assert made.floor is not None
    floor = dict(made.floor) | {"kl20": np.full(ROWS, math.nan)}
    assert "not finite in 1536 rows" in judge(replace(made, floor=floor), GATES).reasons[0]


@pytest.mark.parametrize(("low", "high", "refused"), [(0.5, 2.0, False), (1.01, 2.0, True), (0.5, 0.99, True)])
def test_a_floor_outside_the_recorded_range_is_refused(low: float, high: float, refused: bool) -> None:
    made = comparison()
    assert made.floor is not None
    level = made.floor["kl20"].mean()
    known = FloorRange(model="tiny", dtype="bfloat16", low=low * level, high=high * level, reason="measured")
    verdict = judge(made, replace(GATES, floor_ranges=(known,)))
    assert (verdict.status is Status.INCONCLUSIVE) is refused
    assert ("(measured)" in verdict.reasons[0]) is refused
    assert not any("no range is recorded" in note for note in verdict.notes)


def test_a_floor_without_a_recorded_range_is_taken_with_a_note() -> None:
    other = FloorRange(model="tiny", dtype="float16", low=0.0, high=1e-9, reason="another dtype")
    verdict = judge(comparison(), replace(GATES, floor_ranges=(other,)))
    assert verdict.status is Status.PASS
    assert any("no range is recorded" in note for note in verdict.notes)


# --------------------------------------------------------------------------- rule 7: the twin

TWIN_BUILD = replace(BUILD, dtype="float32")


def twin(level: float = 2e-11, build: Build = TWIN_BUILD, **changes: Any) -> Comparison:
    made = comparison(floor=False, candidate=side("twin", build))
    return replace(scaled(made, level / made.positions["kl20"].mean()), **changes)


def test_a_clean_twin_changes_nothing() -> None:
    verdict = judge(comparison(), GATES, twins=[twin()])
    assert verdict.status is Status.PASS
    assert len(checks(verdict, "twin_mean", "logic")) == 11
    assert len(checks(verdict, "count", "logic")) == len(checks(verdict, "count_above_margin", "logic")) == 1


@pytest.mark.parametrize(("level", "status"), [(1e-7, Status.FAIL), (1e-9, Status.INCONCLUSIVE)])
def test_a_twin_may_fail_or_hold_back_a_build(level: float, status: Status) -> None:
    verdict = judge(comparison(), GATES, twins=[twin(level)])
    assert verdict.status is status
    assert "float32 twin" in verdict.reasons[0]
    assert all(c.status is Status.PASS for c in verdict.checks if c.tier == "precision")


@pytest.mark.parametrize(
    ("made", "status"),
    [
        (comparison(floor=False), Status.INCONCLUSIVE),
        (scaled(comparison(), 1.42), Status.INCONCLUSIVE),
        (scaled(comparison(), 3.0), Status.FAIL),
    ],
)
def test_a_clean_twin_never_passes_a_build(made: Comparison, status: Status) -> None:
    assert judge(made, GATES, twins=[twin()]).status is status


@pytest.mark.parametrize(
    "broken",
    [
        with_row(twin(), 0, kl20=math.nan),
        with_row(twin(), 0, flip=True, margin=2.0),
        twin(findings=(Finding(code="x", message="off by one", fatal=False),)),
    ],
)
def test_the_safety_nets_hold_for_the_twin_and_say_so(broken: Comparison) -> None:
    verdict = judge(comparison(), GATES, twins=[broken])
    assert verdict.status is Status.FAIL
    assert verdict.reasons[0].startswith("twin (float32): ")


def test_a_twin_of_another_dtype_is_wrong_usage_and_one_with_tf32_cannot_be_judged() -> None:
    with pytest.raises(UsageError, match="recorded with dtype bfloat16"):
        judge(comparison(), GATES, twins=[twin(build=BUILD)])
    assert judge(comparison(), GATES, twins=[twin(build=replace(TWIN_BUILD, host={"tf32": True}))]).exit_code == 4
    assert judge(comparison(), GATES, twins=[twin(build=replace(TWIN_BUILD, host={"tf32": False}))]).exit_code == 0


def test_layers_whose_kernels_differ_from_production_are_listed_as_not_covered() -> None:
    layers = {f"layer.{i}": "CPU_ATTN" for i in range(3)}
    made = comparison(candidate=side("candidate", replace(BUILD, attention=layers)))
    same, other = replace(TWIN_BUILD, attention=layers), replace(TWIN_BUILD, attention=layers | {"layer.0": "NAIVE"})
    said = "the twin does not cover attention in 1 layers: CPU_ATTN in production, NAIVE in the twin"
    assert said in judge(made, GATES, twins=[twin(build=other)]).notes
    assert not any("does not cover" in note for note in judge(made, GATES, twins=[twin(build=same)]).notes)
    assert any("does not cover attention" in note for note in judge(made, GATES, twins=[twin()]).notes)


def test_a_twin_of_other_code_says_so() -> None:
    patched = replace(TWIN_BUILD, engine_version="1", patches=({"name": "p", "kind": "benign", "sha256": "a"},))
    notes = judge(comparison(), GATES, twins=[twin(build=patched)]).notes
    assert "the twin does not cover the candidate's engine version (0; the twin ran 1)" in notes
    assert "the twin does not cover the candidate's patches (the twin ran with others)" in notes
    assert not any("engine version" in n or "patches" in n for n in judge(comparison(), GATES, twins=[twin()]).notes)


def test_what_spoke_is_named_with_its_outcome() -> None:
    def said(*twins: Comparison) -> list[str]:
        return [note for note in judge(comparison(), GATES, twins=twins).notes if note.startswith("what spoke")]

    assert said() == []
    (both,) = said(twin())
    assert "precision (production dtype against the floor): none of" in both
    assert "logic (float32 twin against the reference): none of" in both
    (red,) = said(scaled(twin(), 1e6))
    assert re.search(r"precision [^;]*: none of \d+ checks failed; logic [^;]*: \d+ of \d+ checks failed$", red)
    without_floor = judge(comparison(floor=False), GATES, twins=[twin()]).notes
    assert any("precision" in note and "no limit but for counts" in note for note in without_floor)


@pytest.mark.parametrize(
    ("device", "host", "complains"),
    [("cuda:0", {}, True), ("NVIDIA H200", {}, True), ("NVIDIA H200", {"tf32": False}, False), ("cpu", {}, False)],
)
def test_a_float32_recording_of_a_gpu_that_does_not_say_whether_tf32_was_off_is_complained_of(
    device: str, host: dict[str, Any], complains: bool
) -> None:
    as_reference = comparison(reference=side("reference", replace(BUILD, dtype="float32", device=device, host=host)))
    as_twin = twin(build=replace(TWIN_BUILD, device=device, host=host))
    for role, verdict in (
        ("reference", judge(as_reference, GATES)),
        ("twin", judge(comparison(), GATES, twins=[as_twin])),
    ):
        assert any(f"the {role} " in n and "whether TF32 was off" in n for n in verdict.notes) is complains
        assert verdict.status is Status.PASS
    in_bf16 = comparison(reference=side("reference", replace(BUILD, device=device, host=host)))
    assert not any("TF32" in note for note in judge(in_bf16, GATES).notes)


# --------------------------------------------------------------------------- decode against prefill of one recording


def of_itself(ratio: float = 1.0, **changes: Any) -> Comparison:
    """Decode rows alone, `ratio` times the floor's own; one side is both."""
    made = exactly(ratio, **{"documents": 8, **changes})
    rows = made.positions["phase"] == "decode"
    return replace(
        made,
        reference=made.candidate,
        positions={name: column[rows] for name, column in made.positions.items()},
        floor=None if made.floor is None else {name: column[rows] for name, column in made.floor.items()},
        of_itself=True,
    )


@pytest.mark.parametrize(("ratio", "word"), [(0.99 * PHASE_LIMIT, "PASS (phases agree)"), (1.01 * PHASE_LIMIT, "FAIL")])
def test_phases_that_differ_more_than_an_accepted_builds_are_a_fail_and_agreement_is_no_sign_off(
    ratio: float, word: str
) -> None:
    verdict = judge(of_itself(ratio), GATES)
    assert verdict.word == word
    assert {c.tier for c in verdict.checks} == {"phases"}
    assert {c.limit for c in checks(verdict, "ratio_to_floor")} == {PHASE_LIMIT} != {LIMIT}
    assert any("provisional" in note and "phase_ratio_to_floor" in note for note in verdict.notes)
    assert verdict.reasons[0].startswith("decode against prefill: mean KL20 is ")
    assert verdict.task_bounds == {}


def test_a_smoke_corpus_that_agrees_with_itself_says_both() -> None:
    assert judge(of_itself(smoke=True), GATES).word == "PASS (smoke, phases agree)"


def test_without_a_floor_the_phases_are_undecided_unless_something_is_plainly_wrong() -> None:
    alone = replace(of_itself(), floor_side=None, floor=None)
    verdict = judge(alone, GATES)
    assert verdict.status is Status.INCONCLUSIVE
    assert "accepted build of the same engine" in verdict.reasons[0]
    for broken, said in (
        (with_row(alone, 0, nan_candidate=1, kl20=math.nan), "1 of 768 rows have NaN"),
        (with_row(alone, 0, flip=True, margin=2.0), "1 of 768 rows flip at a margin above 1"),
    ):
        verdict = judge(broken, GATES)
        assert verdict.status is Status.FAIL
        assert verdict.reasons[0].startswith(f"decode against prefill: {said}")


def test_a_floor_whose_phases_come_from_one_forward_pass_is_refused_with_the_reason() -> None:
    made = of_itself()
    assert made.floor is not None
    exact = dict(made.floor) | {"kl20": np.zeros(len(made.floor["kl20"]))}
    verdict = judge(replace(made, floor=exact), GATES)
    assert verdict.status is Status.INCONCLUSIVE
    assert "its decode rows are its prefill rows" in verdict.reasons[0]


def test_ranges_for_floors_are_of_kl_to_a_reference_and_not_of_phases() -> None:
    narrow = replace(
        GATES, floor_ranges=(FloorRange(model="tiny", dtype="bfloat16", low=1.0, high=2.0, reason="none fits"),)
    )
    assert judge(comparison(), narrow).status is Status.INCONCLUSIVE
    assert judge(of_itself(), narrow).status is Status.PASS
    assert not any("range" in note for note in judge(of_itself(), GATES).notes)


# --------------------------------------------------------------------------- rule 8: smoke


def test_a_smoke_corpus_is_judged_without_cells_and_says_so() -> None:
    verdict = judge(comparison(smoke=True), GATES)
    assert (verdict.status, verdict.word, verdict.exit_code) == (Status.PASS, "PASS (smoke)", 0)
    assert {c.stratum.kind for c in verdict.checks} == {None}
    assert any("never a sign-off" in note for note in verdict.notes)


def test_a_smoke_corpus_has_a_limit_of_its_own_and_the_note_names_both() -> None:
    between = math.sqrt(LIMIT * SMOKE_LIMIT)
    small, large = (judge(exactly(between, smoke=smoke), GATES) for smoke in (True, False))
    assert (small.word, large.word) == ("PASS (smoke)", "FAIL")
    assert {c.limit for c in checks(small, "ratio_to_floor")} == {SMOKE_LIMIT}
    said = f"ratio_to_floor held to the smoke limit {SMOKE_LIMIT:g} (a sign-off uses {LIMIT:g})"
    assert [said in note for note in small.notes if "smoke" in note] == [True]
    assert not any("smoke" in note for note in large.notes)


def test_the_baseline_too_is_held_to_the_smoke_limit() -> None:
    made = exactly(1.0, smoke=True)
    assert made.floor is not None
    lower = dict(made.floor) | {"kl20": made.floor["kl20"] / math.sqrt(LIMIT * SMOKE_LIMIT)}
    verdict = judge(replace(made, baseline_side=side("accepted"), baseline=lower), GATES)
    assert {c.limit for c in checks(verdict, "ratio_to_baseline")} == {SMOKE_LIMIT}
    assert verdict.word == "PASS (smoke)"
    assert any("ratio_to_baseline held to the smoke limit" in note for note in verdict.notes)


def test_without_gates_of_its_own_a_smoke_corpus_is_held_to_the_usual_limits_and_none_is_named() -> None:
    usual = replace(GATES, gates=tuple(g for g in GATES.gates if not g.smoke))
    verdict = judge(comparison(smoke=True), usual)
    assert {c.limit for c in checks(verdict, "ratio_to_floor")} == {LIMIT}
    assert any("never a sign-off" in note for note in verdict.notes)
    assert not any("smoke limit" in note for note in verdict.notes)


@pytest.mark.parametrize(("ratio", "word"), [(SMOKE_LIMIT * 1.02, "INCONCLUSIVE"), (4.0, "FAIL")])
def test_only_a_pass_is_worded_as_smoke(ratio: float, word: str) -> None:
    assert judge(scaled(comparison(smoke=True), ratio), GATES).word == word


def test_two_documents_of_a_kind_are_enough_to_see_a_strong_fault() -> None:
    small = comparison(smoke=True, documents=2, rows=64)
    assert judge(small, GATES).word == "PASS (smoke)"
    assert judge(scaled(small, 4.0), GATES).status is Status.FAIL


def test_a_single_document_decides_nothing() -> None:
    made = comparison(documents=1)
    positions = {n: c[made.positions["kind"] == "prose"] for n, c in made.positions.items()}
    assert made.floor is not None
    floor = {n: c[made.positions["kind"] == "prose"] for n, c in made.floor.items()}
    verdict = judge(replace(made, positions=positions, floor=floor), GATES)
    assert verdict.status is Status.INCONCLUSIVE
    assert all(c.low == 0 and c.high == math.inf for c in checks(verdict, "ratio_to_floor"))


# --------------------------------------------------------------------------- limits


def test_every_packaged_gate_has_a_reason_and_a_statistic_that_is_known() -> None:
    assert {g.statistic for g in GATES.gates} == set(STATISTICS)
    assert all(len(g.reason) > 40 and "\n" not in g.reason for g in GATES.gates)
    assert (GATES.fail_level, GATES.pass_level) == (0.05, 0.05)


def test_provisional_limits_are_named() -> None:
    assert any("provisional limits" in note and "ratio_to_floor" in note for note in judge(comparison(), GATES).notes)
    final = replace(GATES, gates=tuple(replace(g, provisional=False) for g in GATES.gates))
    assert not any("provisional" in note for note in judge(comparison(), final).notes)


def gates_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


GATE = """
[[gate]]
metric = "kl20"
statistic = "ratio_to_floor"
limit = 1.1
reason = "ours"
"""


def test_a_gates_file_replaces_its_gates_and_keeps_the_others(tmp_path: Path) -> None:
    merged = load_gates(gates_file(tmp_path, "[levels]\nfail = 0.001\n" + GATE))
    assert gate_for(merged, "ratio_to_floor", BUILD, CELL).limit == 1.1
    assert not gate_for(merged, "ratio_to_floor", BUILD, CELL).provisional
    assert gate_for(merged, "ratio_to_baseline", BUILD, CELL).limit == LIMIT
    assert len(merged.gates) == len(GATES.gates)
    assert (merged.fail_level, merged.pass_level) == (0.001, GATES.pass_level)
    assert "mine.toml" in merged.source


@pytest.mark.parametrize(
    ("narrowing", "build", "stratum", "limit"),
    [
        ('model = "tiny"', BUILD, OVERALL, 1.1),
        ('model = "models/tiny"', BUILD, OVERALL, 1.1),
        ('model = "weights"', BUILD, OVERALL, 1.1),
        ('model = "other"', BUILD, OVERALL, LIMIT),
        ('dtype = "bfloat16"', BUILD, OVERALL, 1.1),
        ('dtype = "float16"', BUILD, OVERALL, LIMIT),
        ('phase = "decode"', BUILD, CELL, 1.1),
        ('phase = "decode"', BUILD, OVERALL, LIMIT),
        ('phase = "prefill"', BUILD, CELL, LIMIT),
        ('kind = "prose"\ndepth = 2048', BUILD, CELL, 1.1),
        ('kind = "prose"\ndepth = 512', BUILD, CELL, LIMIT),
    ],
)
def test_a_narrower_gate_is_added_and_decides_where_it_fits(
    tmp_path: Path, narrowing: str, build: Build, stratum: Stratum, limit: float
) -> None:
    merged = load_gates(gates_file(tmp_path, GATE + narrowing))
    assert gate_for(merged, "ratio_to_floor", build, stratum).limit == limit
    assert len(merged.gates) == len(GATES.gates) + 1


def test_a_gate_for_smoke_corpora_decides_there_and_nowhere_else(tmp_path: Path) -> None:
    merged = load_gates(gates_file(tmp_path, GATE + "smoke = true\n"))
    assert len(merged.gates) == len(GATES.gates)  # the packaged one is replaced
    assert gate_for(merged, "ratio_to_floor", BUILD, CELL, smoke=True).limit == 1.1
    assert gate_for(merged, "ratio_to_floor", BUILD, CELL).limit == LIMIT
    usual = load_gates(gates_file(tmp_path, GATE + "smoke = false\n"))
    assert gate_for(usual, "ratio_to_floor", BUILD, CELL).limit == 1.1
    assert gate_for(usual, "ratio_to_floor", BUILD, CELL, smoke=True).limit == SMOKE_LIMIT


def test_what_has_no_smoke_gate_uses_the_usual_one() -> None:
    gate = gate_for(GATES, "twin_mean", BUILD, OVERALL, smoke=True)
    assert gate == gate_for(GATES, "twin_mean", BUILD, OVERALL)


def test_of_equally_narrow_gates_the_strictest_decides(tmp_path: Path) -> None:
    merged = load_gates(gates_file(tmp_path, GATE + 'kind = "prose"\n' + GATE.replace("1.1", "1.2") + "depth = 2048\n"))
    assert gate_for(merged, "ratio_to_floor", BUILD, CELL).limit == 1.1


def test_floor_ranges_are_read(tmp_path: Path) -> None:
    text = '[[floor_range]]\nmodel = "tiny"\ndtype = "bfloat16"\nlow = 1e-4\nhigh = 1e-3\nreason = "measured"\n'
    merged = load_gates(gates_file(tmp_path, text))
    assert merged.floor_ranges == (FloorRange(model="tiny", dtype="bfloat16", low=1e-4, high=1e-3, reason="measured"),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limit = [", "is not TOML"),
        ("gates = []", "gates is not what was expected: levels"),
        ("gate = 3", "gate is not what was expected"),
        ("levels = []", "levels is not what was expected"),
        ("[levels]\nfial = 0.1", "unknown key fial; the keys are fail, pass"),
        ("[levels]\nfail = 0", "fail is 0: expected a probability"),
        ("[levels]\npass = 0.5", "pass is 0.5: expected a probability"),
        ("[levels]\npass = true", "pass is True: expected a probability"),
        (GATE.replace("1.1", "nan"), "limit is nan: expected a finite number"),
        (GATE.replace("1.1", "-1"), "limit is -1: expected a finite number"),
        (GATE.replace("1.1", "0"), "limit is 0: expected a number above 0"),
        (GATE.replace("1.1", '"1.1"'), "limit is '1.1': expected a finite number"),
        (GATE.replace('"ours"', '" "'), "reason is ' ': expected a sentence"),
        (GATE.replace('reason = "ours"', ""), "reason is missing"),
        (GATE.replace("ratio_to_floor", "median"), "statistic is 'median': expected one of ratio_to_floor"),
        (GATE.replace('"kl20"', '"flip"'), "ratio_to_floor is a statistic of kl20"),
        (GATE.replace('"kl20"', '"kl"'), "metric is 'kl': expected a column"),
        (GATE + "margin = 1.0", "ratio_to_floor has no margin"),
        (GATE.replace("ratio_to_floor", "count_above_margin").replace("kl20", "flip"), "margin is missing"),
        (GATE + 'phase = "Decode"', "phase is 'Decode': expected prefill or decode"),
        (GATE + "depth = 1.5", "depth is 1.5: expected a whole number"),
        (GATE + "strata = 1", "[[gate]] number 1: unknown key strata"),
        (GATE + 'smoke = "yes"', "smoke is 'yes': expected true or false"),
        (GATE.replace("ratio_to_floor", "floor_mean_at_least") + "smoke = true", "has no bounds that a small corpus"),
        (GATE + GATE, "two gates limit ratio_to_floor in overall"),
        ("gate = [1]", "[[gate]] number 1 is 1: expected a table"),
        ('[[floor_range]]\nmodel="m"\ndtype="d"\nlow=2\nhigh=1\nreason="r"', "expected low below high"),
        ('[[floor_range]]\nmodel="m"', "dtype is missing"),
    ],
)
def test_a_bad_gates_file_is_wrong_usage_and_says_what_is_expected(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        load_gates(gates_file(tmp_path, text))
    assert said in str(raised.value)
    assert "mine.toml" in str(raised.value)


def test_a_gates_file_that_cannot_be_read_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml cannot be read"):
        load_gates(tmp_path / "nowhere.toml")


def test_gates_without_a_limit_that_is_needed_are_wrong_usage() -> None:
    with pytest.raises(UsageError, match="no gate for ratio_to_floor"):
        judge(comparison(), replace(GATES, gates=tuple(g for g in GATES.gates if g.statistic != "ratio_to_floor")))
    unset = tuple(replace(g, margin=None) for g in GATES.gates)
    with pytest.raises(UsageError, match="has no margin"):
        judge(comparison(), replace(GATES, gates=unset))
