"""The terminal and JSON reports: the same typed numbers in both, and no text that can break them."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from harness.compare import compare
from harness.report.json_report import JSON_SCHEMA_VERSION, to_json
from harness.report.terminal import render
from harness.report.visible import visible
from harness.types import (
    OVERALL,
    Check,
    Comparison,
    Estimate,
    Finding,
    FlipBin,
    Phase,
    Status,
    Stratum,
    Verdict,
)
from harness.worst import PositionDetail, worst_positions
from tests.synthetic import make_build, make_corpus, make_rows, record, with_noise

HOSTILE = "\x1b[31m[bold red]</script>\x1b]0;owned\x07\r\n\u202eevil\ud800\x00" + "x" * 5_000
CELL = Stratum(phase=Phase.DECODE, kind="prose", depth=48)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("recordings")
    corpus = make_corpus(pieces=tuple(HOSTILE if i % 2 else f" w{i}" for i in range(64)))
    rows = make_rows(corpus)
    record(folder / "r", corpus, rows)
    build = make_build(dtype="bfloat16", model="[red]evil[/red]", patches=({"name": "rope[/bold]"},))
    record(folder / "c", corpus, with_noise(rows, 0.04), dtype="bfloat16", build=build)
    record(folder / "f", corpus, with_noise(rows, 0.04, seed=3), dtype="bfloat16")
    return compare(folder / "r", folder / "c", floor=folder / "f")


@pytest.fixture(scope="module")
def worst(comparison: Comparison) -> tuple[PositionDetail, ...]:
    return worst_positions(comparison, 4)


def estimate(
    metric: str, statistic: str, value: float, stratum: Stratum = OVERALL, spread: float = math.nan
) -> Estimate:
    return Estimate(
        metric=metric,
        statistic=statistic,
        stratum=stratum,
        value=value,
        low=value - spread,
        high=value + spread,
        positions=96,
        segments=4,
    )


def verdict(status: Status | None = Status.FAIL) -> Verdict:
    check = Check(
        metric="kl20",
        statistic="ratio_to_floor",
        stratum=CELL,
        value=2.5,
        low=1.75,
        high=math.inf,
        limit=1.4,
        status=Status.INCONCLUSIVE if status is None else status,
        positions=12,
        clusters=1,
        detectable=1.62,
    )
    estimates = [
        estimate(metric, statistic, value, stratum, spread)
        for stratum in (OVERALL, CELL)
        for metric, statistic, value, spread in (
            ("kl20", "mean", 8.125e-4, 1e-5),
            ("kl20", "median", 6.25e-4, math.nan),
            ("kl20", "p99", 5.5e-3, math.nan),
            ("kl20", "ratio_to_floor", 1.0625, 0.25),
            ("flip", "rate", 0.03125, 0.01),
        )
    ]
    estimates += [
        estimate("perplexity", "reference", 12.5),
        estimate("perplexity", "candidate", 12.75),
        estimate("perplexity", "reference_error", 0.375),
        estimate("perplexity", "candidate_error", 0.625),
        estimate("perplexity", "candidate_over_reference", 1.02, spread=0.001),
        estimate("kl20", "trend_step", 1.875, spread=0.5),
    ]
    return Verdict(
        status=status,
        word=status.value if status is not None else "COULD NOT JUDGE",
        reasons=("the mean ratio is 2.5 in decode / prose / depth 48 " + HOSTILE[:30], "second", "third"),
        checks=(check,),
        estimates=tuple(estimates),
        flip_bins=(
            FlipBin(
                low=1.0,
                high=math.inf,
                positions=48,
                candidate=3,
                floor=0,
                only_candidate=3,
                only_floor=0,
                p_value=0.125,
                rate_low=0.01,
                rate_high=0.2,
                predicted=0.5,
            ),
        ),
        notes=("a note of the judge",),
    )


def shown(comparison: Comparison, judged: Verdict, worst: tuple[PositionDetail, ...] = (), width: int = 160) -> str:
    stream = io.StringIO()
    render(comparison, judged, Console(file=stream, width=width), worst=worst)
    return stream.getvalue()


@pytest.mark.parametrize("status", [*Status, None])
def test_the_last_line_begins_with_the_verdict(comparison: Comparison, status: Status | None) -> None:
    judged = verdict(status)
    assert shown(comparison, judged).splitlines()[-1].startswith(f"{judged.word}: the mean ratio")


def test_numbers_of_the_verdict_are_all_there(comparison: Comparison, worst: tuple[PositionDetail, ...]) -> None:
    text = shown(comparison, verdict(), worst)
    numbers = ("8.12e-04", "6.25e-04", "5.50e-03", "1.06 (0.81 to 1.31)", "3.12%", "≥ 1.62", "12.5000", "12.7500")
    for number in (*numbers, "1.88 (1.38 to 2.38)", "1.75 to inf", "1 and up"):
        assert number in text, number
    for position in worst:
        assert f"KL20 {position.kl20:.3g}, margin {position.margin:.3g}" in text
    assert "KL(reference || candidate)" in text


def test_what_is_never_judged_is_shown_for_scale(comparison: Comparison) -> None:
    text = shown(comparison, replace(verdict(), task_bounds={"prose-00-d48": 0.25, "code-00-d48": 0.125}), width=400)
    assert "perplexity 12.5000 ± 0.3750 (reference), 12.7500 ± 0.6250 (candidate) ± one standard error" in text
    assert "mean KL others report for builds taken as correct: 7.0e-04 (median 2.5e-04)" in text
    assert "task-score bound sqrt(KL sum / 2): 0.25 at most, in prose-00-d48" in text
    assert "task-score" not in shown(comparison, replace(verdict(), task_bounds={}))


def test_other_floors_show_the_spread(comparison: Comparison) -> None:
    rows = len(comparison.positions["kl20"])
    other = replace(
        comparison, floor={"kl20": np.full(rows, 2e-4)}, spread={"elsewhere": {"kl20": np.full(rows, 5e-4)}}
    )
    assert "elsewhere  mean KL20 5.00e-04, 2.50 x the floor's" in shown(other, verdict(), width=400)
    assert "5.00e-04, " not in shown(replace(other, floor=None), verdict(), width=400)
    assert to_json(other, verdict())["spread_mean_kl20"] == {"elsewhere": pytest.approx(5e-4)}


def test_a_self_comparison_names_its_phases(comparison: Comparison) -> None:
    text = shown(replace(comparison, of_itself=True), verdict(), width=400)
    assert "KL(prefill || decode) in nats" in text
    assert "12.5000 ± 0.3750 (prefill), 12.7500 ± 0.6250 (decode)" in text


def test_the_largest_flip_margin_is_the_one_of_the_columns(comparison: Comparison) -> None:
    columns = dict(comparison.positions)
    chosen = (columns["segment"] == "prose-00-d48") & (columns["phase"] == "decode")
    columns["flip"] = chosen | (columns["kind"] == "code")
    columns["margin"] = columns["index"] / 16
    text = shown(replace(comparison, positions=columns), verdict())
    overall, cell = (
        next(line for line in text.splitlines() if line.startswith(name)) for name in ("overall", str(CELL))
    )
    assert overall.rstrip().endswith(f"{(columns['index'] / 16)[columns['flip']].max():.3f}")
    assert cell.rstrip().endswith(f"{(columns['index'] / 16)[chosen].max():.3f}")


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_hostile_text_is_shown_and_not_obeyed(
    comparison: Comparison, worst: tuple[PositionDetail, ...], width: int
) -> None:
    finding = Finding(code="rows-shifted", message=HOSTILE, fatal=True)
    text = shown(replace(comparison, findings=(finding,), notes=(HOSTILE,)), verdict(), worst, width)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text)
    assert "\\x1b[31m[bold red]" in text.replace("\n", "").replace("│", "") or width == 40
    text.encode("utf-8")


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_lines_fit_the_terminal(comparison: Comparison, worst: tuple[PositionDetail, ...], width: int) -> None:
    lines = shown(comparison, verdict(), worst, width).splitlines()
    assert max(map(len, lines[:-1])) <= width


def test_wide_terminals_show_more_columns(comparison: Comparison) -> None:
    assert "detects" in shown(comparison, verdict(), width=140)
    narrow = shown(comparison, verdict(), width=80)
    assert "detects" not in narrow
    assert "ratio to floor" in narrow


def test_colours_are_for_terminals_alone(comparison: Comparison) -> None:
    stream = io.StringIO()
    render(comparison, verdict(), Console(file=stream, width=100, force_terminal=True, color_system="standard"))
    assert "\x1b[" in stream.getvalue()
    assert "\x1b[" not in shown(comparison, verdict())


def test_a_comparison_that_could_not_be_judged_shows_why(comparison: Comparison) -> None:
    finding = Finding(code="rows-shifted", message="rows match the reference at index + 1", fatal=True)
    judged = Verdict(status=None, word="COULD NOT JUDGE", reasons=(finding.message,))
    text = shown(replace(comparison, findings=(finding,)), judged)
    assert text.count("rows match the reference at index + 1") == 2  # in the panel and in the last line


# --------------------------------------------------------------------------- JSON


def test_json_holds_the_same_values_and_is_strict(comparison: Comparison, worst: tuple[PositionDetail, ...]) -> None:
    judged = verdict()
    found = json.loads(json.dumps(to_json(comparison, judged, worst), allow_nan=False))
    assert found["schema_version"] == JSON_SCHEMA_VERSION
    assert (found["verdict"]["status"], found["verdict"]["exit_code"]) == ("FAIL", 1)
    assert found["positions"] == {"all": 96, "prefill": 48, "decode": 48}
    assert found["verdict"]["checks"][0]["high"] == "Infinity"
    assert found["verdict"]["checks"][0]["stratum"] == {"phase": "decode", "kind": "prose", "depth": 48}
    for read, made in zip(found["verdict"]["estimates"], judged.estimates, strict=True):
        assert read["value"] == made.value
        assert (read["low"] is None) == math.isnan(made.low)
    assert [w["kl20"] for w in found["worst"]] == [w.kl20 for w in worst]
    assert found["candidate"]["build"]["model"] == "[red]evil[/red]"
    assert found["baseline"] is None
    assert found["floor"]["path"].endswith("f")


def test_json_of_what_could_not_be_judged_has_no_status(comparison: Comparison) -> None:
    judged = Verdict(status=None, word="COULD NOT JUDGE", reasons=("why",))
    found = to_json(comparison, judged)["verdict"]
    assert (found["status"], found["exit_code"], found["word"]) == (None, 4, "COULD NOT JUDGE")


# --------------------------------------------------------------------------- visible


@given(st.text(st.characters(codec=None)), st.none() | st.integers(2, 40))
def test_visible_text_is_one_printable_line(text: str, most: int | None) -> None:
    result = visible(text, most)
    result.encode("utf-8")
    assert result.isprintable() or set(filter(lambda c: not c.isprintable(), result)) <= set("\u00a0\u3000") | {
        c for c in text if c.isspace()
    }
    assert "\n" not in result
    assert most is None or len(result) <= most


def test_visible_keeps_words_and_the_end() -> None:
    assert visible("naïve — 日本語 ok\n\x1b") == "naïve — 日本語 ok⏎\\x1b"
    assert visible("one two three", 6) == "…three"
    assert visible("\u202e\ud800\U000e0001") == "\\u202e\\ud800\\U000e0001"


def test_paths_are_shown_as_given(comparison: Comparison) -> None:
    assert Path(comparison.reference.path).name in shown(comparison, verdict())
