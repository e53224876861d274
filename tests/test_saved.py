"""What `show` says of positions and verdicts, held against the columns and the object they were saved from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from harness.cli import main
from harness.errors import StorageError
from harness.report.artefacts import as_text, facts
from harness.report.json_report import no_judgement, to_json
from harness.report.saved import positions_facts
from harness.storage import save_positions
from tests.reporting import Reported, reported, texts, with_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def made(folder: Path) -> Reported:
    return reported(folder)


def test_positions_are_summed_up(made: Reported, tmp_path: Path) -> None:
    columns = made[0].positions
    save_positions(columns, tmp_path / "p.parquet")
    found = facts(tmp_path / "p.parquet")
    kl20 = np.sort(columns["kl20"])
    assert found["artefact"] == "positions"
    assert found["rows"] == {"all": len(kl20), "prefill": len(kl20) // 2, "decode": len(kl20) // 2}
    assert found["kl20"] == {
        "mean": f"{kl20.mean():.3g} nat",
        "median": f"{np.median(kl20):.3g} nat",
        "p99": f"{np.percentile(kl20, 99):.3g} nat",
        "largest": f"{kl20[-1]:.3g} nat",
    }
    assert found["flips"] == int(columns["flip"].sum())
    assert next(iter(found["worst_kl20"].values())) == f"{kl20[-1]:.3g}"
    assert found["columns"].split() == list(columns)


def test_rows_that_are_not_finite_are_counted_apart(made: Reported) -> None:
    columns = dict(made[0].positions)
    kl20 = columns["kl20"].copy()
    kl20[:3] = np.nan, np.inf, np.nan
    found = positions_facts(Path("p"), columns | {"kl20": kl20})
    assert found["not_finite"] == 3
    assert found["kl20"]["mean"] == f"{kl20[3:].mean():.3g} nat"
    nothing = positions_facts(Path("p"), {name: column[:0] for name, column in columns.items()})
    assert (nothing["rows"]["all"], nothing["kl20"]) == (0, {})


def test_a_verdict_is_shown_as_it_was_printed(made: Reported, tmp_path: Path) -> None:
    comparison, verdict, worst = made
    (tmp_path / "v.json").write_text(json.dumps(to_json(comparison, verdict, worst)))
    found = facts(tmp_path / "v.json")
    assert (found["artefact"], found["word"], found["exit_code"]) == ("verdict", verdict.word, verdict.exit_code)
    assert found["reasons"] == list(verdict.reasons)
    overall = next(e for e in verdict.estimates if e.statistic == "ratio_to_floor")
    assert found["ratio_to_floor"]["overall"] == f"{overall.value:.3g} ({overall.low:.3g} to {overall.high:.3g})"
    assert len(found["open_checks"]) == sum(check.status != "PASS" for check in verdict.checks) > 0
    assert comparison.candidate.path in found["candidate"]
    assert verdict.word in as_text(found)


def test_so_is_one_that_could_not_be_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "v.json").write_text(json.dumps(no_judgement("COULD NOT JUDGE", "no floor", 4)))
    assert main(["show", str(tmp_path / "v.json")]) == 0
    text = capsys.readouterr().out
    assert "COULD NOT JUDGE" in text
    assert "no floor" in text


@given(texts)
def test_any_text_stays_on_its_line(made: Reported, folder: Path, text: str) -> None:
    path = folder / "hostile.json"
    path.write_text(json.dumps(to_json(*with_text(made, text))))
    found = facts(path)
    shown = as_text(found)
    shown.encode("utf-8")
    entries = [value for value in found.values() if value not in (None, "", [], {})]
    assert len(shown.splitlines()) <= sum(len(value) if isinstance(value, list | dict) else 1 for value in entries)
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "not readable JSON"),
        (b"{" + b'"a":[' * 200_000, "not readable JSON"),
        (b'{"verdict": "\xff"}', "not readable JSON"),
        (b"{}", "not what `compare --json` writes"),
        (b'{"verdict": {"word": 3}}', "not what `compare --json` writes"),
        (b'{"verdict": {"word": "PASS"}}', "schema version None, expected 1"),
        (b'{"schema_version": 2, "verdict": {"word": "PASS"}}', "schema version 2, expected 1"),
        (b'{"schema_version": 1, "verdict": {"word": "PASS"}}', "damaged verdict"),
        (
            b'{"schema_version": 1, "verdict": {"word": "P", "exit_code": 0, "reasons": [], "estimates": [3]}}',
            "damaged",
        ),
        (b"PAR1 and no more", "not a readable Parquet file"),
        (b"hello", "none of logitgate's"),
        (b"", "none of logitgate's"),
    ],
)
def test_what_is_none_of_ours_is_named(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(StorageError, match=named):
        facts(tmp_path / "file")


def test_parts_and_pipes_are_told_apart(made: Reported, folder: Path, tmp_path: Path) -> None:
    part = next((folder / "candidate").glob("part-*.parquet"))
    with pytest.raises(StorageError, match="one part of a recording: show its folder"):
        facts(part)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="no ordinary file"):
        facts(tmp_path / "pipe")


def damaged(found: dict[str, Any], path: tuple[Any, ...], value: object) -> dict[str, Any]:
    place: Any = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return found


@pytest.mark.parametrize("value", [None, 3, "text", [], {}, [None]])
@pytest.mark.parametrize(
    "path",
    [("verdict", "reasons"), ("verdict", "estimates"), ("verdict", "checks"), ("candidate",), ("corpus",), ("notes",)],
)
def test_a_verdict_with_anything_in_its_place_is_shown_or_refused(
    made: Reported, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: tuple[Any, ...], value: object
) -> None:
    (tmp_path / "v.json").write_text(json.dumps(damaged(to_json(*made), path, value)))
    for options in ([], ["--json"]):
        assert main(["show", str(tmp_path / "v.json"), *options]) in (0, 4)
        assert "unexpected" not in capsys.readouterr().err


def test_columns_of_other_kinds_are_named(made: Reported, tmp_path: Path) -> None:
    save_positions({**made[0].positions, "kl20": ["text"] * len(made[0].positions["kl20"])}, tmp_path / "p.parquet")
    with pytest.raises(StorageError, match="are not positions of a comparison"):
        facts(tmp_path / "p.parquet")
