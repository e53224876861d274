"""Results on disk, what is left to do, and what counts as evidence."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.calibration.calibrate import (
    first_red,
    headroom,
    load_results,
    same_build,
    save_result,
    stock_of,
    undecided,
    unfinished,
)
from harness.calibration.jobs import Job, Setting
from harness.errors import StorageError
from harness.types import OVERALL, Check, Status
from tests.calibrating import check, judged, patch, result, stock_job

FAULT = Job(name="fault", setting=Setting(), patch=patch("fault", severity="subtle", fault_class="rope"), stock="stock")


def test_a_result_comes_back_from_disk_as_it_was(tmp_path: Path) -> None:
    made = judged(FAULT, rows="other", stock=judged(stock_job(), rows="stock"))
    save_result(made, tmp_path)
    (back,) = load_results(tmp_path)
    assert (tmp_path / "synthetic" / "bfloat16" / "fault.json").is_file()
    assert back.setting == made.setting
    assert (back.name, back.kind, back.changed, back.status, back.reasons) == (
        made.name, "fault", True, made.status, made.reasons,
    )  # fmt: skip
    assert len(back.checks) == len(made.checks) > 10
    assert len(back.estimates) == len(made.estimates) > 50
    for ours, theirs in zip(back.checks, made.checks, strict=True):
        assert (ours.stratum, ours.statistic, ours.status) == (theirs.stratum, theirs.statistic, theirs.status)
        assert ours.value == pytest.approx(theirs.value, rel=1e-5)
    save_result(back, tmp_path / "again")
    assert (tmp_path / "again" / back.place).read_bytes() == (tmp_path / back.place).read_bytes()


def test_a_result_is_small_enough_to_commit_and_strict_json(tmp_path: Path) -> None:
    save_result(judged(FAULT), tmp_path)
    text = next(tmp_path.rglob("*.json")).read_text()
    assert len(text) < 60_000
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.mark.parametrize("damage", ["", "[]", '{"schema": 99}', '{"schema": 1}'])
def test_a_damaged_result_is_named(damage: str, tmp_path: Path) -> None:
    save_result(result("x", [1.0]), tmp_path)
    path = next(tmp_path.rglob("*.json"))
    path.write_text(damage)
    with pytest.raises(StorageError, match=r"x\.json"):
        load_results(tmp_path)


def test_a_folder_that_is_not_there_has_no_results(tmp_path: Path) -> None:
    assert load_results(tmp_path / "none") == []


# --------------------------------------------------------------------------- bits


def test_a_fault_that_changed_no_bit_is_an_error_whatever_its_verdict() -> None:
    stock = judged(stock_job(), rows="same")
    made = judged(FAULT, rows="same", stock=stock, scale=50.0)
    assert made.changed is False
    assert "no bit differs" in made.error
    assert not made.red


def test_a_variation_that_says_it_changes_nothing_and_does_is_an_error() -> None:
    quiet = Job(name="quiet", setting=Setting(), patch=patch("quiet", "benign", changes_rows=False), stock="stock")
    stock = judged(stock_job(), rows="stock")
    assert "bit-equal" in judged(quiet, rows="other", stock=stock).error
    assert judged(quiet, rows="stock", stock=stock).error == ""


@pytest.mark.parametrize(("says", "rows"), [(True, "stock"), (False, "other")])
def test_whether_a_setting_of_the_engine_changes_bits_is_a_fact_of_the_machine(says: bool, rows: str) -> None:
    setting = patch("setting", "benign", hooked=False, changes_rows=says)
    job = Job(name="setting", setting=Setting(), patch=setting, stock="stock")
    made = judged(job, rows=rows, stock=judged(stock_job(), rows="stock"))
    assert made.changed is (rows == "other")
    assert made.error == ""


def test_without_a_stock_build_nothing_is_said_about_bits() -> None:
    made = judged(FAULT, rows="other")
    assert made.changed is None
    assert made.error == ""


def test_the_stock_build_is_looked_up_by_name_corpus_dtype_and_machine() -> None:
    stock = result("stock", [1.0], "stock")
    where: dict[str, Any] = {"corpus": "embedded", "dtype": "bfloat16", "machine": "one"}
    assert stock_of(FAULT, [stock], **where) is stock
    for other in ({"corpus": "quick"}, {"dtype": "float32"}, {"machine": "two"}):
        assert stock_of(FAULT, [stock], **(where | other)) is None
    assert stock_of(FAULT, [replace(stock, error="died")], **where) is None


# --------------------------------------------------------------------------- what is left


def jobs(*names: str) -> list[Job]:
    return [Job(name=n, setting=Setting(), patch=patch(n), stock="stock") for n in names]


def done(name: str, **changes: Any) -> Any:
    return result(name, [1.0], "fault", sha256=f"sha-{name}", **changes)


def test_a_run_that_was_killed_goes_on_with_what_has_no_result() -> None:
    left = unfinished(jobs("a", "b", "c"), [done("a")], corpus="embedded")
    assert [job.name for job in left] == ["b", "c"]


@pytest.mark.parametrize(
    "change",
    [
        {"corpus": "quick"},
        {"sha256": "an older file"},
        {"setting": Setting(engine={"dtype": "float32"})},
        {"error": "the engine stopped", "recording": ""},
    ],
)
def test_a_result_of_something_else_does_not_count(change: dict[str, Any]) -> None:
    assert len(unfinished(jobs("a"), [replace(done("a"), **change)], corpus="embedded")) == 1


def test_an_error_found_in_rows_is_not_tried_again() -> None:
    assert unfinished(jobs("a"), [done("a", error="no bit differs")], corpus="embedded") == []


def test_what_any_tier_turned_red_is_decided() -> None:
    red = done("a", dtype="float32", status=Status.FAIL)
    refused = done("b", status=None)
    open_ = done("c", status=Status.INCONCLUSIVE)
    broken = done("d", status=Status.FAIL, error="no bit differs")
    assert undecided([red, refused, open_, broken], ["a", "b", "c", "d", "e"]) == ["c", "d", "e"]


def test_a_variation_that_is_the_stock_build_has_its_result() -> None:
    job = Job(name="batch_8", setting=Setting(), patch=patch("batch_8", "benign", hooked=False), stock="stock")
    made = same_build(job, result("stock", [1.02], "stock"))
    assert (made.name, made.kind, made.changed, made.checks[0].value) == ("batch_8", "benign", False, 1.02)


# --------------------------------------------------------------------------- how red


def test_the_first_red_check_and_its_distance() -> None:
    green, red = check(1.0, low=0.9, high=1.1), check(3.0, low=2.8, high=3.2)
    worse = check(30.0, low=28.0, high=32.0)
    made = replace(result("x", [1.0]), checks=(green, red, worse))
    found = first_red(made)
    assert found is not None
    assert found[0] is red
    assert found[1] == pytest.approx(2.8 / 1.4)
    flips = Check(
        metric="flip", statistic="count_above_margin", stratum=OVERALL, value=7.0, low=7.0, high=7.0, limit=0.0,
        status=Status.FAIL, positions=10, clusters=1,
    )  # fmt: skip
    counted = first_red(replace(made, checks=(flips,)))
    assert counted is not None
    assert counted[1] == 7.0
    assert first_red(replace(made, checks=(green,))) is None


def test_headroom_is_of_the_nearest_check() -> None:
    made = result("x", [1.0, 1.2, 1.1])
    found = headroom(made)
    assert found is not None
    assert found[0].value == 1.2
    assert found[1] == pytest.approx(1.4 / (1.2 * 1.05))
    assert headroom(replace(made, checks=())) is None
    assert math.isfinite(found[1])
