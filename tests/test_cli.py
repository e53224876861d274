"""The command line: exit codes, one-line errors, and what goes to stdout. Engines are tested elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness import cli
from harness.cli import main
from harness.corpus import save_corpus
from harness.errors import PatchError
from harness.types import Corpus, Phase
from tests.synthetic import Rows, make_build, make_corpus, make_rows, record, with_noise


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return make_corpus(documents=12, prefill=24, decode=24)  # enough segments for every cell to be decided


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> dict[str, Path]:
    """A reference, two builds as far from it as each other, and a worse one."""
    root = tmp_path_factory.mktemp("recordings")
    truth = make_rows(corpus)
    made: dict[str, Rows] = {
        "reference": truth,
        "floor": with_noise(truth, 0.02, seed=3),
        "good": with_noise(truth, 0.02, seed=4),
        "bad": with_noise(truth, 0.2, seed=5),
    }
    for name, rows in made.items():
        dtype = "float32" if name == "reference" else "bfloat16"
        record(root / name, corpus, rows, build=make_build(dtype=dtype, engine=name))
    return {name: root / name for name in made}


def run_judge(folders: dict[str, Path], candidate: str, *more: str) -> int:
    return main(["compare", str(folders["reference"]), str(folders[candidate]), *more])


# --------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(("candidate", "code", "word"), [("good", 0, "PASS"), ("bad", 1, "FAIL")])
def test_the_exit_code_is_the_verdict(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], candidate: str, code: int, word: str
) -> None:
    assert run_judge(folders, candidate, "--floor", str(folders["floor"])) == code
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith(word)


def test_without_a_floor_nothing_passes(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_judge(folders, "good") == 3
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("INCONCLUSIVE")


def test_nan_in_the_candidate_is_a_fail(tmp_path: Path, folders: dict[str, Path], corpus: Corpus) -> None:
    rows = with_noise(make_rows(corpus), 0.02, seed=4)
    rows[corpus.segments[0].id, Phase.DECODE][3, 5] = np.nan
    record(tmp_path / "nan", corpus, rows, build=make_build(dtype="bfloat16"))
    code = main(["compare", str(folders["reference"]), str(tmp_path / "nan"), "--floor", str(folders["floor"])])
    assert code == 1


def test_nan_in_the_reference_cannot_be_judged(tmp_path: Path, folders: dict[str, Path], corpus: Corpus) -> None:
    rows = make_rows(corpus)
    rows[corpus.segments[0].id, Phase.DECODE][3, 5] = np.nan
    record(tmp_path / "nan", corpus, rows)
    assert main(["compare", str(tmp_path / "nan"), str(folders["good"]), "--floor", str(folders["floor"])]) == 4


def test_json_is_one_object_that_says_the_same(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code = run_judge(folders, "bad", "--floor", str(folders["floor"]), "--json")
    found = json.loads(capsys.readouterr().out)
    assert (code, found["verdict"]["exit_code"], found["verdict"]["status"]) == (1, 1, "FAIL")


def test_positions_are_saved_when_asked(tmp_path: Path, folders: dict[str, Path], corpus: Corpus) -> None:
    from harness.storage import load_positions

    file = tmp_path / "positions.parquet"
    assert run_judge(folders, "good", "--floor", str(folders["floor"]), "--positions", str(file)) == 0
    columns = load_positions(file)
    assert len(columns["kl20"]) == corpus.rows


# --------------------------------------------------------------------------- decode against prefill; planning


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Builds whose phases round independently: an accepted one, one like it, and one whose decode has a fault."""
    root = tmp_path_factory.mktemp("phases")
    corpus = make_corpus(documents=12, prefill=24, decode=24, overlap=24)
    truth = make_rows(corpus)
    made = {"accepted": with_noise(truth, 0.02, seed=3), "good": with_noise(truth, 0.02, seed=4)}
    made["fault"] = {
        key: rows if key[1] is Phase.PREFILL else with_noise({key: rows}, 0.1, seed=5)[key]
        for key, rows in made["good"].items()
    }
    made["one pass"] = truth
    for name, rows in made.items():
        record(root / name, corpus, rows, build=make_build(dtype="bfloat16", engine=name))
    return {name: root / name for name in made}


@pytest.mark.parametrize(
    ("recording", "floor", "code", "last"),
    [
        ("good", "accepted", 0, "PASS (phases agree): "),
        ("fault", "accepted", 1, "FAIL: decode against prefill: "),
        ("fault", None, 3, "INCONCLUSIVE: no floor was given"),
        ("good", "one pass", 3, "INCONCLUSIVE: the floor "),
    ],
)
def test_a_recording_is_held_against_itself(
    phases: dict[str, Path], capsys: pytest.CaptureFixture[str], recording: str, floor: str | None, code: int, last: str
) -> None:
    command = ["compare", "--self", str(phases[recording]), *(["--floor", str(phases[floor])] if floor else [])]
    assert main(command) == code
    out = capsys.readouterr().out
    assert out.rstrip().splitlines()[-1].startswith(last)
    assert "KL(prefill || decode) in nats" in out
    assert main([*command, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["of_itself"], found["kl"]) == (True, "KL(prefill || decode), nats")
    assert {check["tier"] for check in found["verdict"]["checks"]} == {"phases"}


def test_a_corpus_that_scores_nothing_twice_cannot_be_held_against_itself(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--self", str(folders["good"])]) == 4
    assert "corpus synthetic scores no position in both phases" in capsys.readouterr().err


def test_a_plan_says_what_it_costs_and_sees(
    tmp_path: Path, folders: dict[str, Path], corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    save_corpus(corpus, tmp_path / "c.parquet")
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 100}}')
    command = ["plan", str(tmp_path / "c.parquet"), "--model", str(tmp_path)]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["bytes"], found["minutes"]) == (corpus.rows, corpus.rows * 100 * 2, None)
    assert "--like DIR" in found["minutes_from"]
    assert len(found["detects"]) == 3 + 8
    assert main([*command, "--like", str(folders["good"]), "--dtype", "float32"]) == 0
    assert "limit 1.4" in capsys.readouterr().out


def test_a_plan_without_a_config_takes_the_tokenizers_vocabulary(
    tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    save_corpus(corpus, tmp_path / "c.parquet")
    assert main(["plan", str(tmp_path / "c.parquet"), "--model", "nobody/nothing", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == corpus.rows * corpus.vocab_size * 2


# --------------------------------------------------------------------------- what cannot be judged


def missing_folder(root: Path, _: Corpus) -> None:
    (root / "candidate").rename(root / "elsewhere")


def empty_folder(root: Path, _: Corpus) -> None:
    missing_folder(root, _)
    (root / "candidate").mkdir()


def truncated_part(root: Path, _: Corpus) -> None:
    part = next((root / "candidate").glob("part-*.parquet"))
    part.write_bytes(part.read_bytes()[:-100])


def other_corpus(root: Path, corpus: Corpus) -> None:
    missing_folder(root, corpus)
    other = make_corpus(documents=12, prefill=24, decode=24, seed=99)
    record(root / "candidate", other, make_rows(other))


def other_vocabulary(root: Path, corpus: Corpus) -> None:
    missing_folder(root, corpus)
    record(root / "candidate", corpus, make_rows(corpus, vocabulary=48))


@pytest.mark.parametrize("spoil", [missing_folder, empty_folder, truncated_part, other_corpus, other_vocabulary])
@pytest.mark.parametrize("as_json", [False, True])
def test_what_cannot_be_judged_is_one_line_and_exit_4(
    tmp_path: Path,
    folders: dict[str, Path],
    corpus: Corpus,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path, Corpus], None],
    as_json: bool,
) -> None:
    record(tmp_path / "candidate", corpus, make_rows(corpus))
    spoil(tmp_path, corpus)
    command = ["compare", str(folders["reference"]), str(tmp_path / "candidate"), *(["--json"] if as_json else [])]
    assert main(command) == 4
    out, err = capsys.readouterr()
    assert err.startswith("logitgate: ")
    assert len(err.splitlines()) == 1
    assert len(out.splitlines()) == 1
    assert (json.loads(out)["verdict"]["word"] if as_json else out.strip()) == "COULD NOT JUDGE"


# --------------------------------------------------------------------------- wrong usage


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ([], None),
        (["no-such-command"], "no-such-command"),
        (["patches"], "patches --help"),
        (["compare", "only-one"], "CANDIDATE"),
        (["compare", "a", "b", "--flor", "c"], "--flor"),
        (["compare", "a", "b", "--self", "c"], "--self"),
        (["compare", "--self", "c", "--twin", "d"], "--twin"),
        (["compare", "--self", "c", "--floor", "d", "--floor", "e"], "further floors"),
        (["plan", "c", "--model", "m", "--dtype", "int8"], "int8"),
        (["plan", "no-such-corpus", "--model", "m"], "no-such-corpus"),
        (["record", "model", "--corpus", "c.parquet"], "--out"),
        (["record", "--dtype", "float32", "model", "--corpus", "c.parquet", "-o", "x"], "--dtype"),
        (["record", "model", "--corpus", "c", "-o", "x", "--prompt-rows", "some"], "--prompt-rows"),
        (["record", "model", "--corpus", "c", "-o", "x", "--concurrency", "0"], "--concurrency"),
        (["reference", "model", "--corpus", "c", "-o", "x", "--dtype", "float8"], "float8"),
        (["reference", "model", "--corpus", "c", "-o", "x", "--weights", "some"], "--weights"),
        (["model", "gpt-9"], "gpt-9"),
        (["corpus", "build", "no-such-manifest", "--model", "m", "-o", "x"], "no-such-manifest"),
    ],
)
def test_wrong_usage_is_exit_2_and_names_what_is_wrong(
    capsys: pytest.CaptureFixture[str], command: list[str], named: str | None
) -> None:
    assert main(command) == 2
    out, err = capsys.readouterr()
    if named is None:
        assert "Commands:" in out
    else:
        assert len(err.splitlines()) == 1
        assert named in err


@pytest.mark.slow  # imports vllm, though it starts no engine
def test_an_unknown_engine_argument_is_exit_2_and_named(
    tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    save_corpus(corpus, tmp_path / "c.parquet")
    command = ["record", "model", "--corpus", str(tmp_path / "c.parquet"), "-o", str(tmp_path / "x")]
    assert main([*command, "--max-num-batched-tokns", "512"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("logitgate: ")
    assert "--max-num-batched-tokns" in error
    assert not (tmp_path / "x").exists()


# --------------------------------------------------------------------------- crashes never read as a verdict


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (PatchError("it did\nnot fire"), 4, "logitgate: it did not fire"),
        (ZeroDivisionError("a bug"), 4, "logitgate: unexpected ZeroDivisionError: a bug; this is a bug: "),
        (OSError(28, "No space left on device"), 4, "logitgate: could not write the output: no space left"),
        (MemoryError(), 4, "logitgate: unexpected MemoryError"),
        (SystemExit(1), 4, ""),
        (SystemExit(2), 2, ""),
        (SystemExit("text"), 4, ""),
        (KeyboardInterrupt(), 130, ""),
        (BaseException("a panic"), 4, "logitgate: unexpected BaseException: a panic"),
        (PatchError("\x1b[31mred\x1b[0m\u202e\udcff"), 4, "logitgate: \\x1b[31mred\\x1b[0m\\u202e\\udcff"),
    ],
)
def test_whatever_is_raised_becomes_a_code_and_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: BaseException, code: int, line: str
) -> None:
    def fail() -> None:
        raise raised

    monkeypatch.setattr("harness.patching.list_patches", fail)
    monkeypatch.delenv(cli.DEBUG, raising=False)
    assert main(["patches", "list"]) == code
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert len(err.splitlines()) == (1 if line else 0)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("harness.patching.list_patches", fail)
    monkeypatch.setenv(cli.DEBUG, "0")
    assert main(["--debug", "patches", "list"]) == 4
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_verdict() -> None:
    code = "import sys; from harness.cli import main; sys.exit(main(['patches', 'list', '--json']))"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=pipe, stderr=subprocess.PIPE, timeout=120, check=False
        )
    assert (done.returncode, done.stderr) == (4, b"")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream_changes_no_exit_code(folders: dict[str, Path], stream: str) -> None:
    command = f"import sys; from harness.cli import main; sys.{stream} = None; sys.exit(main(sys.argv[1:]))"
    compare = ["compare", *(str(folders[name]) for name in ("reference", "bad"))]
    done = subprocess.run(
        [sys.executable, "-c", command, *compare, "--floor", str(folders["floor"])],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == "" if stream == "stdout" else done.stdout.splitlines()[-1].startswith("FAIL")


# --------------------------------------------------------------------------- looking at things


def test_show_describes_a_recording(
    folders: dict[str, Path], corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(folders["good"]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["artefact"] == "recording"
    assert found["rows"] == f"{corpus.rows} of {corpus.rows}"
    assert main(["show", str(folders["good"])]) == 0
    assert found["id"] in capsys.readouterr().out


def test_show_describes_a_corpus(tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.parquet"
    save_corpus(corpus, file)
    assert main(["corpus", "show", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sha256"] == corpus.sha256
    assert sum(found["rows"].values()) == found["rows_in_all"] == corpus.rows
    assert main(["show", str(file)]) == 0
    assert corpus.sha256 in capsys.readouterr().out


@pytest.mark.parametrize("name", ["nothing-here", "words.txt", "a" * 5000])
def test_show_refuses_what_is_no_artefact(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "words.txt").write_text("hello")
    assert main(["show", str(tmp_path / name)]) == 4
    assert name in capsys.readouterr().err


def test_show_describes_a_recording_whose_patches_have_no_names(
    tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "r", corpus, make_rows(corpus), build=make_build(patches=({},)))
    assert main(["show", str(tmp_path / "r")]) == 0
    assert "unnamed" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--positions", "--markdown", "--junit"])
def test_an_output_never_replaces_a_device_or_a_pipe(
    tmp_path: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str], option: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert run_judge(folders, "good", option, str(tmp_path / "pipe")) == 2
    assert "not an ordinary file" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


def test_patches_list_and_show_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patches", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    for patch in listed[:: max(1, len(listed) // 3)]:
        assert main(["patches", "show", patch["name"], "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == patch
    assert main(["patches", "list"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:]] == [patch["name"] for patch in listed]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from harness import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"logitgate {__version__}\n"


def test_sigterm_unwinds_like_ctrl_c_so_that_engines_are_closed() -> None:
    code = (
        "import os, signal, time, harness.cli as cli, harness.__main__ as program\n"
        "def app(**_):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(30)\n"
        "    finally:\n"
        "        print('closed')\n"
        "cli.app = app\n"
        "program.run()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "closed\n"
    assert done.returncode == 130
