"""Limits from benign builds alone, the order of evidence, and the bounds of what was shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom

from harness.calibration.calibrate import Result
from harness.calibration.limits import (
    at_most,
    gates_digest,
    generate,
    largest,
    leave_one_out,
    require_final,
    require_in_order,
    round_up,
    status_at,
    to_toml,
    with_section,
)
from harness.errors import UsageError
from harness.gates import gate_for, load_gates
from harness.types import OVERALL, Build, Status
from tests.calibrating import GATES, result

STOCK = result("stock", [1.0, 0.95, 1.05], "stock")
TEN = [result(f"v{i}", [1.0 + i / 100, 1.0, 1.1]) for i in range(10)]
BENIGN = [STOCK, *TEN, result("compiled", [0.43, 0.4, 0.5])]
NAMES = [r.name for r in BENIGN if r.name != "stock"]


def build(**changes: str) -> Build:
    fields: dict[str, Any] = {"model": "/models/tiny", "weights_sha256": "w" * 64, "dtype": "bfloat16"} | changes
    return Build(engine="vllm", engine_version="0", model_revision=None, device="cpu", **fields)


def test_the_limit_is_a_quarter_above_the_largest_ratio_in_any_stratum() -> None:
    generated = generate(BENIGN, NAMES, GATES)
    assert generated.missing == ()
    top = largest(BENIGN)
    assert (top.value, top.name, str(top.stratum)) == (1.1, "v0", "decode")
    assert (top.builds, top.changing) == (12, 11)
    floor = next(g for g in generated.gates if g.statistic == "ratio_to_floor" and not g.smoke)
    assert floor.limit == round_up(1.25 * 1.1) == 1.38
    assert not floor.provisional
    assert (floor.model, floor.dtype) == ("w" * 64, "bfloat16")
    assert "v0 in decode" in floor.reason
    assert "12 correct builds" in floor.reason


def test_the_limit_against_a_baseline_comes_from_ratios_to_the_stock_build() -> None:
    generated = generate(BENIGN, NAMES, GATES)
    baseline = next(g for g in generated.gates if g.statistic == "ratio_to_baseline" and not g.smoke)
    assert baseline.limit == round_up(1.25 * max(1.09 / 1.0, 1.0 / 0.95, 1.1 / 1.05))


def test_a_smoke_corpus_keeps_the_limit_it_can_resolve() -> None:
    generated = generate(BENIGN, NAMES, GATES)
    smoke = next(g for g in generated.gates if g.statistic == "ratio_to_floor" and g.smoke)
    packaged = gate_for(GATES, "ratio_to_floor", build(weights_sha256="-", model="-"), OVERALL, smoke=True)
    assert smoke.limit == packaged.limit


def test_each_dtype_has_limits_of_its_own() -> None:
    half = [result("f16", [0.02, 0.02, 0.02], dtype="float16"), result("f16b", [0.03, 0.02, 0.02], dtype="float16")]
    generated = generate([*BENIGN, *half], NAMES, GATES)
    limits = {g.dtype: g.limit for g in generated.gates if g.statistic == "ratio_to_floor" and not g.smoke}
    assert limits == {"bfloat16": 1.38, "float16": round_up(1.25 * 0.03)}
    assert {r.dtype for r in generated.ranges} == {"bfloat16", "float16"}


def test_a_floor_may_lie_where_correct_builds_and_their_floor_lay() -> None:
    (known,) = generate(BENIGN, NAMES, GATES).ranges
    assert known.low == pytest.approx(0.43e-3 / 1.25, rel=0.01)
    assert known.high == pytest.approx(1.09e-3 * 1.25, rel=0.01)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (BENIGN[:-1], "compiled: was not run"),
        ([*BENIGN[:-1], replace(BENIGN[-1], error="the engine did not start")], "compiled: the engine did not start"),
        ([*BENIGN[:-1], replace(BENIGN[-1], checks=())], "compiled: has no ratio"),
        ([replace(r, changed=False) for r in BENIGN], "only 0 benign builds change bits"),
    ],
)
def test_what_is_missing_is_said_and_keeps_limits_provisional(broken: list[Result], said: str) -> None:
    generated = generate(broken, NAMES, GATES)
    assert any(said in sentence for sentence in generated.missing)
    assert all(gate.provisional for gate in generated.gates)


def test_limits_after_fault_results_are_refused() -> None:
    with pytest.raises(UsageError, match="no test of them"):
        generate([*BENIGN, result("bad", [9.0], "fault")], NAMES, GATES)


def test_limits_from_a_smoke_corpus_from_nothing_or_from_two_models_are_refused() -> None:
    with pytest.raises(UsageError, match="calibrate benign"):
        generate([replace(r, smoke=True) for r in BENIGN], NAMES, GATES)
    with pytest.raises(UsageError, match="calibrate benign"):
        generate([], NAMES, GATES)
    with pytest.raises(UsageError, match="2 models"):
        generate([*BENIGN, result("alien", [1.0], weights_sha256="x" * 64)], NAMES, GATES)


def test_generated_limits_are_read_back_and_decide(tmp_path: Path) -> None:
    generated = generate(BENIGN, NAMES, GATES)
    path = tmp_path / "gates.toml"
    path.write_text(with_section("", to_toml(generated, "2030-01-01")))
    gates = load_gates(path)
    assert gate_for(gates, "ratio_to_floor", build(), OVERALL).limit == 1.38
    assert gate_for(gates, "ratio_to_floor", build(), OVERALL, smoke=True).limit == 2.0
    assert gate_for(gates, "ratio_to_floor", build(weights_sha256="other"), OVERALL).limit == 1.4
    require_final(gates, build())
    for other in (build(dtype="float16"), build(weights_sha256="other")):
        with pytest.raises(UsageError, match="limits come first"):
            require_final(gates, other)


def test_provisional_limits_are_not_enough_for_faults(tmp_path: Path) -> None:
    path = tmp_path / "gates.toml"
    path.write_text(to_toml(generate(BENIGN[:-1], NAMES, GATES), "2030"))
    with pytest.raises(UsageError, match="limits come first"):
        require_final(load_gates(path), build())


def test_a_section_is_replaced_and_the_rest_of_the_file_is_kept() -> None:
    first, second = to_toml(generate(BENIGN, NAMES, GATES), "one"), to_toml(generate(BENIGN[:-1], NAMES, GATES), "two")
    text = with_section("# mine\n[levels]\nfail = 0.01\n", first)
    again = with_section(text, second)
    assert again == with_section("# mine\n[levels]\nfail = 0.01\n", second)
    assert again.startswith("# mine\n[levels]\nfail = 0.01\n")
    after = with_section(text + "# after\n", second)
    assert after.endswith("# after\n")
    assert after.count("generated by") == 1


def test_faults_judged_by_other_limits_are_no_evidence() -> None:
    good = result("bad", [9.0], "fault", gates=gates_digest(GATES))
    require_in_order([good, *BENIGN], GATES)
    with pytest.raises(UsageError, match="other limits"):
        require_in_order([good, replace(good, gates="older")], GATES)


def test_the_digest_is_of_the_limits_and_not_of_their_reasons() -> None:
    first = GATES.gates[0]
    reworded = replace(GATES, gates=(*GATES.gates[1:], replace(first, reason="other words")))
    stricter = replace(GATES, gates=(replace(first, limit=first.limit * 0.9), *GATES.gates[1:]))
    assert gates_digest(reworded) == gates_digest(GATES) != gates_digest(stricter)


def test_leaving_one_out_judges_it_by_the_others() -> None:
    three = [result("a", [1.0]), result("b", [1.0]), result("high", [1.3])]
    found = {one.name: (limit, status) for one, limit, status in leave_one_out(three)}
    assert found["a"] == (round_up(1.25 * 1.3), Status.PASS)
    assert found["high"] == (1.25, Status.INCONCLUSIVE)  # 1.3 / 1.05 = 1.238 is below 1.25
    assert leave_one_out([result("alone", [1.0])]) == []


@given(st.floats(0.3, 3.0), st.floats(0.5, 3.0))
def test_a_result_at_another_limit_is_what_its_bounds_say(ratio: float, limit: float) -> None:
    status = status_at(result("x", [ratio]), limit)
    assert (status is Status.PASS) == (ratio * 1.05 < limit)
    assert (status is Status.FAIL) == (ratio / 1.05 > limit)


def test_findings_and_counts_stay_red_at_any_limit() -> None:
    made = result("x", [1.0])
    assert status_at(replace(made, findings=("rows are shifted",)), 100.0) is Status.FAIL
    assert status_at(replace(made, checks=()), 100.0) is Status.INCONCLUSIVE


def test_no_misses_of_sixty_rule_out_five_percent() -> None:
    assert at_most(0, 60) == pytest.approx(1 - 0.05 ** (1 / 60))
    assert at_most(0, 60) < 0.049
    assert at_most(0, 0) == 1.0


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))))
def test_the_bound_is_the_rate_at_which_so_few_hits_have_a_chance_of_5_percent(case: tuple[int, int]) -> None:
    hits, trials = case
    bound = at_most(hits, trials)
    assert binom.cdf(hits, trials, bound) == pytest.approx(0.05, rel=1e-6)
    assert bound == pytest.approx(beta.ppf(0.95, hits + 1, trials - hits))
