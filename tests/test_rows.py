"""Single rows against a second computation from the rows as they were written, and what is asked wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from scipy.special import log_softmax, logsumexp

from harness.cli import main
from harness.corpus import save_corpus
from harness.errors import StorageError, UsageError
from harness.report.saved import rows_text
from harness.rows import Row, read_rows
from harness.storage import Recording, begin_recording
from harness.types import Corpus, Phase
from harness.worst import TopId
from tests.reporting import texts
from tests.synthetic import Rows, make_build, make_corpus, make_rows, record

SEGMENT = "prose-00-d48"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return make_corpus(overlap=4)


@pytest.fixture(scope="module")
def written(corpus: Corpus) -> Rows:
    return make_rows(corpus)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus, written: Rows) -> Path:
    path = tmp_path_factory.mktemp("rows") / "recording"
    record(path, corpus, written)
    return path


def test_a_row_holds_what_was_written(folder: Path, corpus: Corpus, written: Rows) -> None:
    segment = corpus.segment(SEGMENT)
    wanted = [segment.decode_from + 5, segment.decode_from + 9]
    rows = read_rows(Recording(folder), SEGMENT, wanted[::-1], Phase.DECODE, top=7)
    assert [row.index for row in rows] == wanted
    for row in rows:
        logits = written[SEGMENT, Phase.DECODE][row.step].astype(np.float64)
        order = np.lexsort((np.arange(len(logits)), -logits))[:7]
        assert [top.id for top in row.top] == order.tolist()
        np.testing.assert_allclose([top.logprob for top in row.top], log_softmax(logits)[order], rtol=1e-12)
        assert row.lse == pytest.approx(logsumexp(logits), rel=1e-12)
        assert row.margin == logits[order[0]] - logits[order[1]]
        assert row.target == segment.token_ids[row.index + 1]
        assert row.target_rank == 1 + int((logits > logits[row.target]).sum())
        assert row.target_logprob == pytest.approx(log_softmax(logits)[row.target], rel=1e-12)
        assert row.context.endswith(f" w{segment.token_ids[row.index]}")
        assert (row.step, row.target_text) == (row.index - segment.decode_from, f" w{row.target}")


def test_an_index_of_both_phases_gives_both_rows(folder: Path, corpus: Corpus) -> None:
    index = corpus.segment(SEGMENT).decode_from + 1
    recording = Recording(folder)
    assert [row.phase for row in read_rows(recording, SEGMENT, [index], top=1)] == [Phase.PREFILL, Phase.DECODE]
    assert [row.phase for row in read_rows(recording, SEGMENT, [index], Phase.PREFILL, top=1)] == [Phase.PREFILL]


def test_a_row_with_nan_is_shown_and_not_ranked(tmp_path: Path, corpus: Corpus, written: Rows) -> None:
    rows = dict(written)
    broken = rows[SEGMENT, Phase.DECODE].copy()
    broken[0, 3] = np.nan
    rows[SEGMENT, Phase.DECODE] = broken
    record(tmp_path / "r", corpus, rows)
    (row,) = read_rows(Recording(tmp_path / "r"), SEGMENT, [corpus.segment(SEGMENT).decode_from], Phase.DECODE, top=64)
    assert np.isnan(row.lse)
    assert row.top[-1].id == 3
    assert "nan" in rows_text([row])


def test_what_is_not_there_is_named(folder: Path, tmp_path: Path, corpus: Corpus) -> None:
    with pytest.raises(UsageError, match=r"no segment 'prose': expected one of code-00-d32, .*prose-00-d48"):
        read_rows(Recording(folder), "prose", [1], top=1)
    with pytest.raises(
        UsageError, match=r"row 5 of prose-00-d48 is not scored: expected prefill 36 to 51; decode 48 to 59"
    ):
        read_rows(Recording(folder), SEGMENT, [40, 5], top=1)
    with pytest.raises(UsageError, match="row 40 of prose-00-d48 is not scored: expected decode 48 to 59"):
        read_rows(Recording(folder), SEGMENT, [40], Phase.DECODE, top=1)
    begin_recording(tmp_path / "cut", corpus, make_build(), vocab_size=64, logits_dtype="float32")
    with pytest.raises(StorageError, match="row 40 of prose-00-d48 is scored and not there; resume it"):
        read_rows(Recording(tmp_path / "cut"), SEGMENT, [40], top=1)


def test_show_prints_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(folder), "--rows", f"{SEGMENT}:40,41", "--rows", "code-00-d32:25", "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert [text.count(place) for place in ("prefill index 40", "prefill index 41", "code-00-d32 prefill")] == [1, 1, 1]
    assert main(["show", str(folder), "--rows", f"{SEGMENT}:40", "--top", "3", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    (typed,) = read_rows(Recording(folder), SEGMENT, [40], top=3)
    assert [top["logprob"] for top in row["top"]] == [top.logprob for top in typed.top]
    for top in typed.top:
        assert f"{top.id:>8}  {top.logprob:>9.4f}" in text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rows", "prose"], "expected SEGMENT:INDEX"),
        (["--rows", ":3"], "expected SEGMENT:INDEX"),
        (["--rows", f"{SEGMENT}:"], "expected SEGMENT:INDEX"),
        (["--rows", f"{SEGMENT}:-1"], "expected SEGMENT:INDEX"),
        (["--rows", f"{SEGMENT}:4²"], "expected SEGMENT:INDEX"),
        (["--rows", f"{SEGMENT}:99999999999999999999"], "expected SEGMENT:INDEX"),
        (["--rows", f"{SEGMENT}:40", "--phase", "both"], "expected prefill or decode"),
        (["--rows", f"{SEGMENT}:40", "--top", "0"], "--top"),
        (["--phase", "decode"], "--rows"),
    ],
)
def test_wrong_rows_are_wrong_usage(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    assert main(["show", str(folder), *options]) == 2
    assert named in capsys.readouterr().err


def test_rows_are_of_recordings_alone(tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    save_corpus(corpus, tmp_path / "c.parquet")
    assert main(["show", str(tmp_path / "c.parquet"), "--rows", f"{SEGMENT}:40"]) == 4
    assert "c.parquet" in capsys.readouterr().err


@given(texts)
def test_any_text_stays_on_its_line(text: str) -> None:
    row = Row(
        segment=text,
        kind=text,
        depth=1,
        phase=Phase.DECODE,
        index=1,
        step=0,
        lse=1.0,
        margin=1.0,
        context=text,
        target=1,
        target_text=text,
        target_logprob=-1.0,
        target_rank=1,
        top=(TopId(id=1, text=text, logprob=-1.0),) * 3,
    )
    shown = rows_text([row, row])
    shown.encode("utf-8")
    assert len(shown.splitlines()) == 2 * 7 + 1
    assert "\x1b" not in shown
