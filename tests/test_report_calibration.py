"""The calibration's report shows the numbers of its results, each with an exact bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.calibration.limits import at_most
from harness.report.calibration import caught_by, faults_of, to_markdown, write_report
from harness.types import Status
from tests.calibrating import GATES, patch, result

BENIGN = [result("stock", [1.0, 1.0, 1.0], "stock"), *(result(f"v{i}", [1.0 + i / 50, 1.0, 1.0]) for i in range(5))]
QUICK: dict[str, Any] = {"corpus": "quick", "smoke": True}
RED = result("plain", [9.0], "fault", severity="obvious", **QUICK)
LATE = [
    result("late", [1.4], "fault", severity="subtle", **QUICK),
    result("late", [2.0], "fault", severity="subtle"),
]
HIDDEN = [
    result("hidden", [1.1], "fault", severity="near-noise", status=Status.PASS, **QUICK),
    result("hidden", [1.0], "fault", severity="near-noise", status=Status.FAIL, dtype="float32", **QUICK),
]
MISSED = result("missed", [1.0], "fault", severity="subtle", status=Status.PASS)
PATCHES = [patch("plain", source="vllm-project/vllm#1004").patch]


def test_a_fault_is_decided_by_the_first_result_that_is_red() -> None:
    found = {f.name: f.deciding for f in faults_of([RED, *LATE, *HIDDEN, MISSED], PATCHES)}
    assert found["plain"] is RED
    assert found["late"] is LATE[1]
    assert found["hidden"] is HIDDEN[1]
    assert found["missed"] is MISSED


def test_a_fault_that_nothing_turned_red_is_told_by_the_largest_corpus() -> None:
    results = [
        result("open", [1.1], "fault", status=Status.INCONCLUSIVE),
        result("open", [1.2], "fault", status=Status.INCONCLUSIVE, **QUICK),
        result("open", [1.0], "fault", status=Status.INCONCLUSIVE, dtype="float32", **QUICK),
    ]
    (fault,) = faults_of(results, [])
    assert fault.deciding is results[0]


def test_the_report_counts_what_was_shown_with_exact_bounds() -> None:
    results = [*BENIGN, RED, *LATE, *HIDDEN, MISSED]
    text = to_markdown(results, faults_of(results, PATCHES), GATES)
    assert f"| obvious or subtle faults that no result turned red | 1 of 3 | {at_most(1, 3):.1%} |" in text
    assert f"| of them, faults that ended in a PASS | 1 of 3 | {at_most(1, 3):.1%} |" in text
    assert f"| near-noise faults not red | 0 of 1 | {at_most(0, 1):.1%} |" in text
    assert f"| correct builds on a corpus for sign-off that do not pass | 0 of 6 | {at_most(0, 6):.1%} |" in text
    assert "| v4 | bfloat16 | yes | 0.00108 | 1.08 | 1.08 in overall | PASS at 1.4 | PASS at 1.33 |" in text
    assert "1.6 would have been" in text  # the smallest ratio that would have been red
    assert "quick bfloat16: INCONCLUSIVE, embedded bfloat16: FAIL" in text


def test_errors_are_no_evidence_and_are_listed() -> None:
    broken = replace(RED, name="idle", error="no bit differs")
    results = [*BENIGN, broken]
    text = to_markdown(results, faults_of(results, PATCHES), GATES)
    assert "obvious faults not red | 0 of 0 | -" in text
    assert "- idle on quick in bfloat16: no bit differs" in text


def test_the_matrix_holds_this_gate_against_the_others() -> None:
    here = [*(replace(r, **QUICK) for r in BENIGN), RED, LATE[0]]
    caught = caught_by(here)
    assert caught["this gate"] == {"obvious": (1, 1), "subtle": (0, 1)}
    assert caught["flip count"] == {"obvious": (1, 1), "subtle": (1, 1)}
    assert caught["perplexity"] == {"obvious": (0, 1), "subtle": (0, 1)}
    assert caught["mean KL > 0.01 nat"] == {"obvious": (0, 1), "subtle": (0, 1)}
    assert caught_by([RED]) == {}
    text = to_markdown(here, faults_of(here, PATCHES), GATES)
    assert "| plain | ● | ● | · | · | ● | ● | ● | partly |" in text


def test_rows_that_could_not_be_judged_are_caught_by_all() -> None:
    refused = replace(RED, status=None, word="COULD NOT JUDGE", others=None, checks=())
    caught = caught_by([*(replace(r, **QUICK) for r in BENIGN), refused])
    assert {row["obvious"] for row in caught.values()} == {(1, 1)}


def test_the_report_and_its_plots_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [*BENIGN, *(replace(r, **QUICK) for r in BENIGN), RED, *LATE, *HIDDEN, MISSED]
    paths = write_report(results, PATCHES, GATES, tmp_path)
    assert {p.name for p in paths} == {
        "calibration.md", "ratios-embedded.svg", "ratios-quick.svg", "detection-embedded.svg", "detection-quick.svg",
    }  # fmt: skip
    assert "missed" in (tmp_path / "ratios-embedded.svg").read_text()
    assert "3/3" not in (tmp_path / "detection-quick.svg").read_text()
