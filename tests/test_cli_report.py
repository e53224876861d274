"""Reports of one candidate, of several and of a history: what they show, and how bad input ends."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from harness.cli import main
from harness.report.history import read_past
from tests.reporting import HOSTILE, reported
from tests.synthetic import make_build, make_corpus, make_rows, record, with_noise

SIGMAS = {"close": 0.02, "near": 0.03, "candidate": 0.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference, a floor and candidates that stand apart: `close`, `near` and the far `candidate`."""
    root = tmp_path_factory.mktemp("recordings")
    reported(root, noise=SIGMAS["candidate"])
    corpus = make_corpus(documents=4)
    rows = make_rows(corpus)
    for seed, name in enumerate(("near", "close"), start=7):
        build = make_build(dtype="bfloat16", engine=name)
        record(root / name, corpus, with_noise(rows, SIGMAS[name], seed=seed), dtype="bfloat16", build=build)
    return root


@pytest.fixture(scope="module")
def saved(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for name in SIGMAS:
        floor = ["--floor", str(folder / "floor")]
        main(["compare", str(folder / "reference"), str(folder / name), *floor, "--save", str(root / name)])
    return root


def several(folder: Path, out: Path, *more: str, names: tuple[str, ...] = tuple(SIGMAS)) -> int:
    candidates = [str(folder / name) for name in names]
    return main(
        ["report", str(folder / "reference"), *candidates, "--floor", str(folder / "floor"), "-o", str(out), *more]
    )


def rows_of(page: str) -> list[list[str]]:
    """Rows of the page's first table as texts."""
    table = page[page.index("<table") : page.index("</table>")]
    return [
        [re.sub(r"\s*<[^>]*>\s*", "", cell) for cell in re.findall(r"<t[hd][^>]*>.*?</t[hd]>", row)]
        for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)
    ]


def test_a_saved_comparison_holds_every_output(saved: Path) -> None:
    names = {"positions.parquet", "report.html", "report.md", "junit.xml", "verdict.json"}
    assert {path.name for path in (saved / "candidate").iterdir()} == names
    found = json.loads((saved / "candidate" / "verdict.json").read_text())
    assert found["verdict"]["word"] in (saved / "candidate" / "report.html").read_text(encoding="utf-8")


def test_several_are_sorted_and_the_worst_verdict_is_the_exit_code(
    folder: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert several(folder, tmp_path / "page.html") == 1
    capsys.readouterr()
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    header, *rows = rows_of(page)
    assert [row[0] for row in rows] == ["close", "near", "candidate"]
    ratio = header.index("ratio to floor")
    for row in rows:
        alone = read_past(saved / row[0])
        assert row[header.index("verdict")] == alone.word
        assert float(row[ratio].replace(",", "")) == pytest.approx(alone.ratio.value, rel=6e-3)


def test_one_that_cannot_be_judged_does_not_hide_the_others(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "close", tmp_path / "torn")
    (tmp_path / "torn" / "recording.json").write_text("{")
    out = tmp_path / "page.html"
    arguments = [str(folder / "reference"), str(folder / "close"), str(tmp_path / "torn")]
    assert main(["report", *arguments, "--floor", str(folder / "floor"), "-o", str(out)]) == 4
    page = out.read_text(encoding="utf-8")
    assert [row[0] for row in rows_of(page)[1:]] == ["close"]
    assert "COULD NOT JUDGE" in page


def test_a_saved_comparison_is_reported_again(folder: Path, saved: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    assert (
        main(["report", str(saved / "candidate"), "-o", str(tmp_path / "again.html"), "--figures", str(figures)]) == 1
    )
    again = (tmp_path / "again.html").read_text(encoding="utf-8")
    assert again == (saved / "candidate" / "report.html").read_text(encoding="utf-8")
    drawn = set(re.findall(r'data-figure="([^"]+)"', again))
    assert {path.name for path in figures.iterdir()} == {f"{name}.{kind}" for name in drawn for kind in ("png", "svg")}
    assert all(path.stat().st_size > 2000 for path in figures.iterdir())


def test_a_history_is_in_the_order_of_recording(saved: Path, tmp_path: Path) -> None:
    for day, name in enumerate(("near", "candidate", "close"), start=1):
        file = saved / name / "verdict.json"
        found = json.loads(file.read_text())
        found["candidate"]["created"] = f"2026-01-0{day}T00:00:00+00:00"
        file.write_text(json.dumps(found))
    out = tmp_path / "history.html"
    assert main(["report", "--history", *(str(saved / name) for name in SIGMAS), "-o", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    header, *rows = rows_of(page)
    assert [row[0] for row in rows] == ["near", "candidate", "close"]
    for row in rows:
        past = read_past(saved / row[0])
        assert float(row[header.index("mean KL20")]) == pytest.approx(past.mean.value, rel=6e-3)
    newest, oldest = read_past(saved / "close").mean.value, read_past(saved / "near").mean.value
    assert f"{newest / oldest:.2f} x the oldest" in page


def test_histories_of_two_corpora_are_never_mixed(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "close", tmp_path / "other")
    file = tmp_path / "other" / "verdict.json"
    found = json.loads(file.read_text())
    found["corpus"]["sha256"] = "0" * 64
    file.write_text(json.dumps(found))
    out = tmp_path / "history.html"
    assert main(["report", "--history", str(saved / "near"), str(tmp_path / "other"), "-o", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    assert page.count("<h2>corpus ") == 2
    assert "the oldest&#39;s" not in page


@pytest.mark.parametrize("text", HOSTILE[:2])
def test_hostile_names_are_shown_and_never_run(saved: Path, tmp_path: Path, text: str) -> None:
    shutil.copytree(saved / "close", tmp_path / "hostile")
    file = tmp_path / "hostile" / "verdict.json"
    found = json.loads(file.read_text())
    found["candidate"]["build"]["engine_version"] = text
    found["verdict"]["word"] = text
    file.write_text(json.dumps(found))
    out = tmp_path / "history.html"
    assert main(["report", "--history", str(tmp_path / "hostile"), "-o", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    assert "\x1b" not in page
    assert "<script>alert" not in page
    assert "<img" not in page


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{folder}/reference"], 2, "alone is no comparison"),
        (["{saved}/close", "--floor", "{folder}/floor"], 2, "names its own floor"),
        (["--history", "{folder}/reference"], 4, "holds no verdict.json"),
        (["--history", "{saved}/close", "--floor", "{folder}/floor"], 2, "have no part in it"),
        (["{folder}/reference", "{folder}/absent"], 4, "is not a recording"),
        (["{folder}/reference", "{folder}/close", "-o", "{folder}/close/recording.json"], 2, "lies in the recording"),
        ([], 2, "Missing argument"),
    ],
)
def test_bad_input_ends_in_one_line(
    folder: Path,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    given = [word.format(folder=folder, saved=saved) for word in arguments]
    out = [] if "-o" in given else ["-o", str(tmp_path / "page.html")]
    assert main(["report", *given, *out]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"verdict": {"word": "PASS"}, "schema_version": 1, "candidate": 3}'])
def test_a_damaged_history_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert main(["report", "--history", str(tmp_path / "a.json"), "-o", str(tmp_path / "page.html")]) == 4
    assert "a.json" in capsys.readouterr().err
