"""What other methods see: their statistics against independent sums, and alarms that stay silent for correct builds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.distance import cosine as cosine_distance

from harness.calibration.detection import METHODS, alarms, row_cosine, statistics, task_scores, thresholds
from harness.patching import list_patches
from tests import judging
from tests.calibrating import result


def columns() -> dict[str, NDArray[Any]]:
    made = judging.columns(documents=2, rows=6, seed=3)
    count = len(made["kl20"])
    return made | {"top1_reference": np.zeros(count, np.int64), "top1_candidate": np.zeros(count, np.int64)}


def test_greedy_match_is_the_share_of_decode_steps_before_the_first_difference() -> None:
    stock, made = columns(), columns()
    decode = np.flatnonzero(made["phase"] == "decode")
    segment = made["segment"][decode]
    first = decode[segment == segment[0]]
    made["top1_candidate"][first[2]] = 5  # two of six steps in common
    found = statistics(made, stock, np.ones(1))
    segments = len(np.unique(segment))
    assert found["greedy_match"] == pytest.approx((segments - 1 + 2 / 6) / segments)
    assert found["top1_agreement"] == pytest.approx(1 - 1 / len(made["kl20"]))


def test_prefill_rows_have_no_part_in_greedy_match() -> None:
    made = columns()
    made["top1_candidate"][made["phase"] == "prefill"] = 9
    assert statistics(made, columns(), np.ones(1))["greedy_match"] == 1.0


def test_without_the_stock_build_the_reference_stands_in() -> None:
    made = columns()
    made["top1_reference"] += 1
    assert statistics(made, columns(), np.ones(1))["top1_agreement"] == 1.0
    assert statistics(made, None, np.ones(1))["top1_agreement"] == 0.0


def test_the_other_statistics_are_plain_means_and_counts() -> None:
    made = columns()
    made["flip"][:3] = True
    found = statistics(made, None, np.array([0.5, 1.0]))
    assert found["flips"] == 3
    assert found["cosine"] == 0.75
    assert found["kl_mean"] == pytest.approx(math.fsum(made["kl_full"]) / len(made["kl_full"]))
    ratio = math.exp(math.fsum(made["nll_candidate"] - made["nll_reference"]) / len(made["kl_full"]))
    assert found["perplexity_shift"] == pytest.approx(abs(math.log(ratio)))


@given(st.integers(1, 4), st.integers(2, 9), st.integers(0, 10**6))
def test_cosine_against_scipy(rows: int, width: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    a, b = random.normal(3, 5, (rows, width)).astype(np.float32), random.normal(0, 5, (rows, width)).astype(np.float32)
    expected = [1 - cosine_distance(x.astype(float), y.astype(float)) for x, y in zip(a, b, strict=True)]
    assert row_cosine(a, b) == pytest.approx(expected, abs=1e-12)
    assert row_cosine(a, 7 * a) == pytest.approx(np.ones(rows))


def test_cosine_of_a_row_with_nan_or_infinity_is_nan_and_an_alarm() -> None:
    rows = np.array([[1.0, np.nan], [1.0, -np.inf], [1.0, 2.0]], np.float32)
    assert np.isnan(row_cosine(np.ones((3, 2), np.float32), rows)).tolist() == [True, True, False]
    assert alarms({"cosine": math.nan}, {"cosine": 0.9})["cosine of logits"] is True


def test_no_correct_build_raises_an_alarm_but_for_a_fixed_limit() -> None:
    correct = [result("a", [1.0]), result("b", [1.2])]
    limits = thresholds(correct)
    for build in correct:
        assert set(alarms(build.others, limits).values()) == {False}
    assert limits["kl_mean"] == 0.01
    loud = alarms(result("bad", [20.0], "fault").others, limits)
    assert loud["flip count"] is True
    assert loud["mean KL > 0.01 nat"] is True
    assert loud["perplexity"] is False


def test_without_correct_builds_or_statistics_nothing_is_said() -> None:
    limits = thresholds([])
    said = alarms(result("bad", [20.0]).others, limits)
    assert said.pop("mean KL > 0.01 nat") is True
    assert set(said.values()) == {None}
    assert set(alarms(None, thresholds([result("a", [1.0])])).values()) == {None}


def test_every_method_has_a_statistic() -> None:
    assert {m.statistic for m in METHODS} == set(statistics(columns(), None, np.ones(1)))


def test_task_scores_are_of_bugs_that_patches_replay_and_cover_most_of_them() -> None:
    scores = task_scores()
    sources = {p.patch.source for p in list_patches() if p.patch.kind == "fault"}
    assert set(scores) <= sources
    assert set(scores.values()) <= {"yes", "partly", "no", "unknown"}
    public = {source for source in sources if "#" in source and not source.startswith("synthetic")}
    assert len(set(scores) & public) > 0.9 * len(public)
