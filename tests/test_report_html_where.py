"""Where a planted difference sits is what the page says, and nothing is made of a normal one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.judge import judge, load_gates
from harness.report.coverage import exercised, smallest_seen
from harness.report.where import headline, places
from harness.types import OVERALL, Comparison, Verdict
from tests.judging import comparison

GROWN = ("kl20", "kl_full")


def worse(made: Comparison, rows: NDArray[np.bool_], times: float) -> Comparison:
    """The same comparison with the KL of some rows multiplied."""
    grown: dict[str, Any] = {name: np.where(rows, made.positions[name] * times, made.positions[name]) for name in GROWN}
    return replace(made, positions={**made.positions, **grown})


def told(made: Comparison) -> tuple[str, dict[str, tuple[str, bool]], Verdict]:
    verdict = judge(made, load_gates(None))
    answers = {one.question: (one.answer, one.stands_out) for one in places(made, verdict)}
    return headline(made, verdict), answers, verdict


def test_of_a_normal_difference_nothing_stands_out() -> None:
    line, answers, verdict = told(comparison())
    assert verdict.exit_code == 0
    assert "Nothing to locate" in line
    assert len(answers) >= 6
    assert not any(stands_out for _, stands_out in answers.values())
    assert answers["Phase"][0] == "no phase stands out"


@pytest.mark.parametrize(
    ("column", "value", "question"), [("phase", "decode", "Phase"), ("kind", "code", "Kind of text")]
)
def test_the_level_that_is_worse_is_named(column: str, value: str, question: str) -> None:
    made = comparison()
    rows = np.asarray(made.positions[column] == value)
    assert 0 < rows.sum() < len(rows)
    line, answers, _ = told(worse(made, rows, 30.0))
    others = set(np.unique(made.positions[column])) - {value}
    assert answers[question][1]
    assert value in answers[question][0]
    assert value in line
    assert not any(other in line for other in others)
    assert not answers["Kind of text" if question == "Phase" else "Phase"][1]


def test_what_grows_with_the_context_is_said_to() -> None:
    made = comparison()
    deepest = np.asarray(made.positions["depth"] == made.positions["depth"].max())
    line, answers, _ = told(worse(worse(made, ~deepest, 10.0), deepest, 100.0))
    assert answers["Context depth"] == ("grows with the context", True)
    assert f"depth {made.positions['depth'].max()} more than the others" in line


def test_rows_without_a_number_are_named_first() -> None:
    made = comparison()
    broken = made.positions["nan_candidate"].copy()
    broken[3] = 1
    changed = replace(made, positions={**made.positions, "nan_candidate": broken})
    found = places(changed, judge(changed, load_gates(None)))
    assert found[0].question == "NaN or infinite logits"
    assert found[0].stands_out
    assert found[0].answer.startswith("1 row, in ")
    assert str(made.positions["segment"][3]) in found[0].evidence


def test_without_a_floor_nobody_says_what_is_normal() -> None:
    line, answers, verdict = told(comparison(floor=False))
    assert line.startswith("Without a floor")
    assert not any(stands_out for _, stands_out in answers.values())
    assert smallest_seen(verdict) == ""


def test_the_smallest_effect_is_that_of_the_checks() -> None:
    verdict = judge(comparison(), load_gates(None))
    sizes = [c.detectable for c in verdict.checks if c.statistic == "ratio_to_floor"]
    overall = next(c for c in verdict.checks if c.statistic == "ratio_to_floor" and c.stratum == OVERALL)
    said = smallest_seen(verdict)
    assert said.startswith(f"faults below {overall.detectable:.2f} x the floor overall")
    assert f"{max(sizes):.2f} x in " in said


def test_what_never_ran_is_not_counted_as_exercised() -> None:
    made = comparison()
    prefill = np.asarray(made.positions["phase"] == "prefill")
    only = replace(made, positions={name: values[prefill] for name, values in made.positions.items()})
    answers = {one.what: one.answer for one in exercised(only)}
    assert (answers["prefill"], answers["decode"]) == ("yes", "no")
    assert answers["several ranks"] == "no"
    assert answers["prefix cache"] == "unknown"
