"""The files beside a verdict: there whatever the answer is, checked before any work, never in a recording."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from harness.cli import main
from tests.reporting import reported


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recordings")
    reported(root)
    return root


def judge(folder: Path, *more: str, candidate: str = "candidate") -> int:
    floor = ["--floor", str(folder / "floor")]
    return main(["compare", str(folder / "reference"), str(folder / candidate), *floor, *more])


def test_markdown_and_junit_say_what_the_exit_code_says(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    markdown, junit = tmp_path / "new" / "comment.md", tmp_path / "new" / "junit.xml"
    assert judge(folder, "--markdown", str(markdown), "--junit", str(junit), "--json") == 1
    found = json.loads(capsys.readouterr().out)["verdict"]
    text = markdown.read_text(encoding="utf-8")
    assert text.startswith(f"## logitgate: {found['word']}")
    assert "<details><summary>Worst positions</summary>" in text
    cases = ElementTree.parse(junit).getroot().findall("testsuite/testcase")
    assert len(cases) == 1 + len(found["checks"])


@pytest.mark.parametrize("stale", [True, False])
def test_what_cannot_be_judged_is_written_too(folder: Path, tmp_path: Path, stale: bool) -> None:
    markdown, junit, positions = (tmp_path / name for name in ("a.md", "b.xml", "c.parquet"))
    for path in (markdown, junit, positions) if stale else ():
        path.write_text("PASS")
    outputs = ["--markdown", str(markdown), "--junit", str(junit), "--positions", str(positions)]
    assert judge(folder, *outputs, candidate="absent") == 4
    text = markdown.read_text(encoding="utf-8")
    assert text.startswith("## logitgate: COULD NOT JUDGE")
    assert "absent is not a recording" in text
    assert ElementTree.parse(junit).getroot().get("errors") == "1"
    assert not positions.exists()  # a file of an earlier run would be taken for this one's


def in_a_file(root: Path, _: Path) -> Path:
    (root / "file").write_text("")
    return root / "file" / "out"


def a_folder(root: Path, _: Path) -> Path:
    return root


def too_long(root: Path, _: Path) -> Path:
    return root / ("x" * 300)


def in_a_recording(_: Path, folder: Path) -> Path:
    return folder / "candidate" / "recording.json"


@pytest.mark.parametrize("place", [in_a_file, a_folder, too_long, in_a_recording])
@pytest.mark.parametrize("option", ["--markdown", "--junit", "--positions"])
def test_a_place_that_cannot_be_written_is_refused_before_the_comparison(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: object,
    option: str,
) -> None:
    monkeypatch.setattr("harness.compare.compare", lambda *_, **__: pytest.fail("it compared"))
    path = place(tmp_path, folder)  # type: ignore[operator]
    manifest = (folder / "candidate" / "recording.json").read_bytes()
    assert judge(folder, option, str(path)) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("COULD NOT JUDGE\n", 1)
    assert option in err
    assert (folder / "candidate" / "recording.json").read_bytes() == manifest


def test_two_outputs_never_share_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    paths = str(tmp_path / "out"), str(tmp_path / "folder" / ".." / "out")
    assert judge(folder, "--markdown", paths[0], "--junit", paths[1]) == 2
    assert "--markdown and --junit both name" in capsys.readouterr().err


def test_a_disk_that_fills_up_meanwhile_is_no_verdict(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("os.fsync", full)
    assert judge(folder, "--markdown", str(tmp_path / "a.md")) == 4
    out, err = capsys.readouterr()
    assert out == "COULD NOT JUDGE\n"
    assert "could not write" in err
    assert "No space left" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("refused", [["--flor", "x"], ["--floor"], ["--unknown=1"], ["a", "b", "c", "d"]])
def test_options_that_are_refused_leave_an_answer_on_stdout(
    folder: Path, capsys: pytest.CaptureFixture[str], refused: list[str]
) -> None:
    assert main(["compare", "--json", "a", "b", *refused]) == 2
    out, err = capsys.readouterr()
    verdict = json.loads(out)["verdict"]
    assert (verdict["status"], verdict["word"], verdict["exit_code"]) == (None, "COULD NOT JUDGE", 2)
    assert verdict["reasons"][0][:30] in err
    assert main(["compare", "a", "b", *refused]) == 2
    assert capsys.readouterr().out == "COULD NOT JUDGE\n"
    assert main(["show", "--json", "a", "--refused"]) == 2
    assert capsys.readouterr().out == ""
