"""Two recordings in, columns out; whatever cannot be compared is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import harness.compare as compare_module
from harness.compare import BASELINE_COLUMNS, PLACE_COLUMNS, REFERENCE_PHASE, compare, compare_self
from harness.errors import LogitgateError, MismatchError, StorageError
from harness.metrics import COLUMNS, position_metrics
from harness.pairing import open_held
from harness.storage import PartWriter, Recording, begin_recording, finish_recording
from harness.types import Block, Phase
from harness.worst import describe_positions, worst_positions, worst_rows
from tests.synthetic import (
    VOCABULARY,
    Rows,
    columns_of,
    encode,
    make_build,
    make_corpus,
    make_rows,
    record,
    with_noise,
)

CORPUS = make_corpus(overlap=6)
REFERENCE = make_rows(CORPUS)
NOISE = 0.04


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    record(tmp_path / "reference", CORPUS, REFERENCE)
    return tmp_path / "reference"


def recorded(folder: Path, rows: Rows, **options: Any) -> Path:
    record(folder, options.pop("corpus", CORPUS), rows, **options)
    return folder


def copy_of(rows: Rows) -> Rows:
    return {key: row.copy() for key, row in rows.items()}


# --------------------------------------------------------------------------- columns


def test_columns_are_those_of_the_metrics_in_the_corpus_order(reference: Path, tmp_path: Path) -> None:
    noisy = with_noise(REFERENCE, NOISE)
    result = compare(reference, recorded(tmp_path / "c", noisy, dtype="bfloat16"))
    expected = columns_of(CORPUS, REFERENCE, noisy, dtype="bfloat16")
    assert set(result.positions) == {*COLUMNS, *PLACE_COLUMNS}
    for name, column in expected.items():
        np.testing.assert_array_equal(result.positions[name], column, err_msg=name)
    assert all(len(column) == CORPUS.rows for column in result.positions.values())
    assert (result.findings, result.notes, result.smoke) == ((), (), False)


def test_rows_may_be_streamed_one_at_a_time(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = recorded(tmp_path / "c", with_noise(REFERENCE, NOISE))
    whole = compare(reference, candidate)
    monkeypatch.setattr(compare_module, "BLOCK_BYTES", 1)
    seen: list[tuple[int, int]] = []
    single = compare(reference, candidate, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, CORPUS.rows) for i in range(CORPUS.rows)]
    for name in whole.positions:
        np.testing.assert_array_equal(single.positions[name], whole.positions[name], err_msg=name)


def test_places_say_where_a_row_was_made(reference: Path, tmp_path: Path) -> None:
    build = make_build(resolved={"cache_config": {"block_size": 10}})
    places = compare(reference, recorded(tmp_path / "c", REFERENCE, build=build, chunk=7)).positions
    segment = CORPUS.segments[0]
    first = len(segment.indices(Phase.PREFILL))
    assert places["phase"][:first].tolist() == ["prefill"] * first
    assert places["step"][:first].tolist() == [-1] * first
    assert places["step"][first : first + 12].tolist() == list(range(12))
    index = places["index"][:first]
    assert places["chunk_distance"][:first].tolist() == (index % 7).tolist()
    assert places["block_distance"].tolist() == (places["index"] % 10).tolist()
    assert set(places["batch_size"].tolist()) == {1}
    assert set(places["segment"].tolist()) == {s.id for s in CORPUS.segments}


def test_floor_spread_and_baseline_are_columns_at_the_same_positions(reference: Path, tmp_path: Path) -> None:
    rows = {name: with_noise(REFERENCE, NOISE, seed=i) for i, name in enumerate(("c", "f", "s", "b"))}
    c, f, s, b = (recorded(tmp_path / name, row) for name, row in rows.items())
    result = compare(reference, c, floor=f, spread=[s], baseline=b)
    assert result.floor is not None
    assert result.baseline is not None
    for columns, name in ((result.floor, "f"), (result.spread[str(s)], "s"), (result.baseline, "b")):
        np.testing.assert_array_equal(columns["kl20"], columns_of(CORPUS, REFERENCE, rows[name])["kl20"])
    own = columns_of(CORPUS, rows["b"], rows["c"])
    for name in BASELINE_COLUMNS:
        np.testing.assert_array_equal(result.positions[name], own[name.removeprefix("baseline_")], err_msg=name)
    assert (result.floor_side, result.baseline_side) != (None, None)


def test_a_candidate_equal_to_its_reference_has_no_divergence_and_is_noted(reference: Path, tmp_path: Path) -> None:
    result = compare(reference, recorded(tmp_path / "c", REFERENCE))
    assert result.positions["kl20"].max() == 0
    assert any("bit-identical" in note for note in result.notes)


def test_nan_in_the_candidate_is_kept_for_the_judge(reference: Path, tmp_path: Path) -> None:
    rows = copy_of(REFERENCE)
    rows["code-00-d32", Phase.DECODE][3, 5] = np.nan
    result = compare(reference, recorded(tmp_path / "c", rows))
    assert np.flatnonzero(result.positions["nan_candidate"]).tolist() == [
        len(CORPUS.segments[0].indices(Phase.PREFILL)) + 3
    ]
    assert result.findings == ()


def test_a_bfloat16_reference_and_other_weights_are_noted(tmp_path: Path) -> None:
    reference = recorded(tmp_path / "r", REFERENCE, dtype="bfloat16")
    build = make_build(weights_sha256="v" * 64)
    notes = compare(reference, recorded(tmp_path / "c", with_noise(REFERENCE, NOISE), build=build)).notes
    assert [note.split(":")[0] for note in notes] == ["the reference was computed in bfloat16", "other weights"]


# --------------------------------------------------------------------------- findings


def test_a_shifted_row_is_a_fatal_finding(reference: Path, tmp_path: Path) -> None:
    rows = with_noise(REFERENCE, NOISE)
    rows["prose-00-d48", Phase.DECODE][4] = with_noise(REFERENCE, NOISE, seed=5)["prose-00-d48", Phase.DECODE][5]
    (finding,) = compare(reference, recorded(tmp_path / "c", rows)).findings
    assert (finding.code, finding.fatal) == ("rows-shifted", True)


def widened(rows: Rows, value: float) -> Rows:
    return {key: np.pad(row, ((0, 0), (0, 8)), constant_values=value) for key, row in rows.items()}


def test_padding_that_holds_no_probability_is_cut_and_noted(reference: Path, tmp_path: Path) -> None:
    noisy = with_noise(REFERENCE, NOISE)
    result = compare(reference, recorded(tmp_path / "c", widened(noisy, -np.inf)))
    np.testing.assert_array_equal(result.positions["kl_full"], columns_of(CORPUS, REFERENCE, noisy)["kl_full"])
    assert result.findings == ()
    assert any("8 columns beyond the reference's 64" in note for note in result.notes)


def test_padding_that_joins_the_softmax_is_a_failure_of_the_build(reference: Path, tmp_path: Path) -> None:
    (finding,) = compare(reference, recorded(tmp_path / "c", widened(with_noise(REFERENCE, NOISE), 8.0))).findings
    assert (finding.code, finding.fatal) == ("vocabulary-padding", False)


# --------------------------------------------------------------------------- refusals


def other_corpus(folder: Path) -> Path:
    corpus = make_corpus(overlap=6, seed=5)
    return recorded(folder, make_rows(corpus), corpus=corpus)


def other_tokenizer(folder: Path) -> Path:
    path = recorded(folder, REFERENCE)
    return edited(path, tokenizer_sha256="u" * 64)


def failed_check(folder: Path) -> Path:
    check = {"rows": 9, "max_error": 0.5, "limit": 2e-5, "passed": False, "detail": "code-00-d32 decode index 33"}
    return edited(recorded(folder, REFERENCE), instrument=check)


def edited(folder: Path, **facts: object) -> Path:
    path = folder / "recording.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    return folder


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda folder: folder, StorageError, ["c"]),
        (other_corpus, MismatchError, ["other corpus", "candidate"]),
        (other_tokenizer, MismatchError, ["other tokenizer", "candidate"]),
        (failed_check, StorageError, ["invalid", "0.5", "code-00-d32 decode index 33"]),
    ],
)
def test_what_cannot_be_compared_is_refused(
    make: Callable[[Path], Path], error: type[LogitgateError], words: list[str], reference: Path, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        compare(reference, make(tmp_path / "c"))
    assert caught.value.exit_code == 4
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_candidate_with_fewer_columns_is_refused_naming_both(tmp_path: Path) -> None:
    wide = recorded(tmp_path / "r", widened(REFERENCE, 0.0))
    with pytest.raises(MismatchError, match=r"have 72 columns.* only 64"):
        compare(wide, recorded(tmp_path / "c", REFERENCE))


def test_an_incomplete_recording_says_what_is_missing(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    begin_recording(folder, CORPUS, make_build(), vocab_size=VOCABULARY, logits_dtype="float32")
    segment = CORPUS.segments[0]
    indices = segment.indices(Phase.PREFILL)
    writer = PartWriter(folder, vocab_size=VOCABULARY, logits_dtype="float32")
    writer.append(
        Block(
            segment=segment.id,
            phase=Phase.PREFILL,
            indices=indices,
            targets=segment.targets(indices),
            logits=REFERENCE[segment.id, Phase.PREFILL],
        )
    )
    writer.close()
    finish_recording(folder, make_build(), gaps_reason="killed")
    with pytest.raises(StorageError, match=rf"{len(indices)} of {CORPUS.rows} expected rows.*code-00-d32.*killed"):
        compare(reference, folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda block: replace(block, targets=block.targets + 1), "other tokens: the candidate"),
        (
            lambda block: replace(block, indices=block.indices + 1),
            "lacks 1 rows it should have, first code-00-d32",
        ),
    ],
)
def test_rows_other_than_the_corpus_asks_for_are_refused(
    change: Callable[[Block], Block], words: str, reference: Path
) -> None:
    class Wrong(Recording):
        def read(self, segment: str, phase: Phase, indices: NDArray[np.int64] | None = None) -> Block:
            return change(super().read(segment, phase, indices))

    held = open_held(reference, "candidate")
    segment = CORPUS.segment("code-00-d32")
    held.read(segment, Phase.DECODE, segment.indices(Phase.DECODE))
    held.recording = Wrong(reference)
    with pytest.raises(MismatchError, match=words):
        held.read(segment, Phase.DECODE, segment.indices(Phase.DECODE))


@pytest.mark.parametrize("role", ["reference", "floor", "baseline"])
def test_nan_in_anything_but_the_candidate_is_refused_by_place(role: str, reference: Path, tmp_path: Path) -> None:
    broken = copy_of(REFERENCE)
    broken["prose-00-d32", Phase.PREFILL][2, 1] = np.nan
    bad, good = recorded(tmp_path / "bad", broken), recorded(tmp_path / "good", with_noise(REFERENCE, NOISE))
    index = CORPUS.segment("prose-00-d32").indices(Phase.PREFILL)[2]
    given: dict[str, Any] = {} if role == "reference" else {role: bad}
    with pytest.raises(MismatchError, match=rf"the {role} .*bad.* first at prose-00-d32 prefill index {index}"):
        compare(reference if given else bad, good, **given)


def test_a_floor_with_misplaced_rows_is_refused(reference: Path, tmp_path: Path) -> None:
    rows = with_noise(REFERENCE, NOISE)
    a, b = ("code-00-d32", Phase.DECODE), ("prose-00-d32", Phase.DECODE)
    rows[a], rows[b] = rows[b], rows[a]
    floor, candidate = recorded(tmp_path / "f", rows), recorded(tmp_path / "c", with_noise(REFERENCE, NOISE))
    with pytest.raises(MismatchError, match=r"the floor .* cannot be used: rows match the .* another request"):
        compare(reference, candidate, floor=floor)


# --------------------------------------------------------------------------- self


def test_self_comparison_holds_decode_against_prefill_of_the_same_index(tmp_path: Path) -> None:
    rows = copy_of(REFERENCE)
    segment = CORPUS.segment("prose-00-d48")
    rows[segment.id, Phase.DECODE][2] += np.linspace(0, 1, VOCABULARY, dtype=np.float32)
    result = compare_self(recorded(tmp_path / "c", rows))
    assert len(result.positions["kl20"]) == 6 * len(CORPUS.segments)
    assert set(result.positions["phase"]) == {"decode"}
    assert set(result.positions[REFERENCE_PHASE]) == {"prefill"}
    (changed,) = np.flatnonzero(result.positions["kl_full"])
    assert (result.positions["segment"][changed], result.positions["index"][changed]) == (
        segment.id,
        segment.decode_from + 2,
    )
    at = [2]
    expected = position_metrics(
        REFERENCE[segment.id, Phase.PREFILL][12:][at],
        "float32",
        rows[segment.id, Phase.DECODE][at],
        "float32",
        segment.targets(np.asarray([segment.decode_from + 2])),
    )
    assert result.positions["kl_full"][changed] == expected["kl_full"][0]
    (worst,) = worst_positions(result, 1)
    assert worst.top_reference != worst.top_candidate


def test_self_comparison_needs_positions_scored_in_both_phases(tmp_path: Path) -> None:
    corpus = make_corpus()
    with pytest.raises(MismatchError, match="corpus synthetic scores no position in both phases"):
        compare_self(recorded(tmp_path / "c", make_rows(corpus), corpus=corpus))


def test_a_floor_of_a_self_comparison_is_its_own_decode_against_its_own_prefill(tmp_path: Path) -> None:
    noisy, worse = with_noise(REFERENCE, NOISE, seed=5), with_noise(REFERENCE, 2 * NOISE, seed=6)
    floor = recorded(tmp_path / "f", noisy, build=make_build(engine="accepted"))
    result = compare_self(recorded(tmp_path / "c", worse), floor=floor)
    assert result.of_itself
    assert result.floor is not None
    alone = compare_self(floor)
    assert np.array_equal(result.floor["kl20"], alone.positions["kl20"])
    assert result.positions["kl20"].mean() > 2 * result.floor["kl20"].mean()
    assert result.floor_side is not None
    assert result.floor_side.path == str(floor)


@pytest.mark.parametrize("phase", Phase)
def test_nan_in_either_phase_of_a_self_comparison_is_the_candidates(tmp_path: Path, phase: Phase) -> None:
    rows = copy_of(REFERENCE)
    segment = CORPUS.segment("code-00-d32")
    at = 1 if phase is Phase.DECODE else 12 + 1  # the second index that is scored in both phases
    rows[segment.id, phase][at, 3] = np.nan
    result = compare_self(recorded(tmp_path / "c", rows))
    (broken,) = np.flatnonzero(result.positions["nan_candidate"])
    assert result.positions["index"][broken] == segment.decode_from + 1
    assert not result.positions["nonfinite_reference"].any()
    with pytest.raises(MismatchError, match=r"the floor .* NaN or infinite"):
        compare_self(recorded(tmp_path / "d", REFERENCE), floor=tmp_path / "c")


def test_a_floor_of_another_corpus_or_with_misplaced_rows_is_refused_for_a_self_comparison(tmp_path: Path) -> None:
    candidate = recorded(tmp_path / "c", REFERENCE)
    other = make_corpus(overlap=6, seed=7)
    with pytest.raises(MismatchError, match="other corpus"):
        compare_self(candidate, floor=recorded(tmp_path / "o", make_rows(other), corpus=other))
    rows = with_noise(REFERENCE, NOISE)
    a, b = ("code-00-d32", Phase.DECODE), ("prose-00-d32", Phase.DECODE)
    rows[a], rows[b] = rows[b], rows[a]
    with pytest.raises(MismatchError, match=r"the floor .* cannot be used"):
        compare_self(candidate, floor=recorded(tmp_path / "f", rows))


# --------------------------------------------------------------------------- worst positions


def test_one_corrupted_row_of_two_thousand_is_the_worst_position(tmp_path: Path) -> None:
    corpus = make_corpus(documents=5, depths=(128, 160), prefill=50, decode=50)
    rows = make_rows(corpus)
    assert corpus.rows == 2_000
    noisy = with_noise(rows, NOISE)
    noisy["prose-03-d160", Phase.DECODE][17] = noisy["prose-03-d160", Phase.DECODE][17][::-1]
    reference = recorded(tmp_path / "r", rows, corpus=corpus)
    result = compare(reference, recorded(tmp_path / "c", noisy, corpus=corpus, dtype="bfloat16"))
    worst = worst_positions(result, 5)
    assert (worst[0].segment, worst[0].phase, worst[0].step) == ("prose-03-d160", Phase.DECODE, 17)
    assert [w.kl20 for w in worst] == sorted((w.kl20 for w in worst), reverse=True)


def test_details_show_the_text_and_both_top_lists(reference: Path, tmp_path: Path) -> None:
    rows = with_noise(REFERENCE, NOISE)
    result = compare(reference, recorded(tmp_path / "c", rows, dtype="bfloat16"))
    for detail in describe_positions(result, np.asarray([30, 3, 3])):
        segment = CORPUS.segment(detail.segment)
        at = int(np.flatnonzero(segment.indices(detail.phase) == detail.index)[0])
        assert detail.context == "".join(f" w{i}" for i in segment.token_ids[: detail.index + 1][-48:])
        assert detail.target_text == f" w{segment.token_ids[detail.index + 1]}"
        truth = REFERENCE[detail.segment, detail.phase][at].astype(np.float64)
        assert [top.id for top in detail.top_reference] == np.argsort(-truth)[:5].tolist()
        assert detail.top_reference[0].logprob == pytest.approx(truth.max() - np.logaddexp.reduce(truth), rel=1e-12)
        given = encode(rows[detail.segment, detail.phase][at : at + 1], "bfloat16").astype(np.uint32) << 16
        assert detail.top_candidate[0].id == int(np.argmax(given.view(np.float32)[0]))
    assert [d.row for d in describe_positions(result, np.asarray([30, 3, 3]))] == [30, 3, 3]


def test_rows_with_nan_are_the_worst_of_all(reference: Path, tmp_path: Path) -> None:
    rows = with_noise(REFERENCE, NOISE)
    rows["code-00-d32", Phase.DECODE][0, 0] = np.nan
    result = compare(reference, recorded(tmp_path / "c", rows))
    (worst,) = worst_positions(result, 1)
    assert (worst.segment, worst.phase, worst.step) == ("code-00-d32", Phase.DECODE, 0)
    assert len(worst_rows(result, 10**6)) == CORPUS.rows


def test_ids_without_text_are_shown_by_number(tmp_path: Path) -> None:
    corpus = make_corpus(pieces=())
    rows = make_rows(corpus)
    reference = recorded(tmp_path / "r", rows, corpus=corpus)
    (worst,) = worst_positions(compare(reference, reference), 1)
    assert worst.target_text == f"<{worst.target}>"
