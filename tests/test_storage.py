"""Recordings on disk: what is written is read back bit for bit, and nothing that was damaged is ever believed."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness import _parts
from harness.corpus import save_corpus, seal
from harness.errors import StorageError
from harness.metrics import decode, row_summary
from harness.storage import (
    PartWriter,
    Recording,
    begin_recording,
    finish_recording,
    load_positions,
    manifest_from_json,
    manifest_to_json,
    save_positions,
    write_recording,
)
from harness.types import (
    ITEM_BYTES,
    SCHEMA_VERSION,
    Block,
    Build,
    Corpus,
    Gap,
    InstrumentCheck,
    Level,
    LogitsDtype,
    Manifest,
    Part,
    Phase,
    Segment,
    Source,
    StepFacts,
)

V = 70  # above 64, so that the kept top is a part of the row
DTYPES: tuple[LogitsDtype, ...] = ("bfloat16", "float16", "float32", "float64")
BUILD = Build(
    engine="test",
    engine_version="1",
    model="/models/a",
    model_revision=None,
    weights_sha256="ab",
    dtype="bfloat16",
    device="cpu",
    requested={"max_len": 64, "ratio": 0.5, "list": [1, 2]},
    environment={"OMP_NUM_THREADS": "2"},
    patches=({"name": "p", "sha256": "00"},),
)


def make_corpus(*, seed: int = 0) -> Corpus:
    rng = np.random.default_rng(seed)
    segments = tuple(
        Segment(
            id=f"{kind}-d{depth}",
            document=kind,
            kind=kind,
            depth=depth,
            token_ids=rng.integers(0, V, depth + 9).astype(np.int32),
            decode_from=depth,
            windows=((depth - 6, depth - 3), (depth - 2, depth + 2)),
        )
        for kind in ("code", "prose")
        for depth in (12, 20)
    )
    return seal(
        Corpus(
            name="tiny",
            version="1",
            tokenizer="t",
            tokenizer_sha256="00",
            vocab_size=V,
            bos="none",
            smoke=True,
            segments=segments,
            sources=tuple(
                Source(document=kind, origin="made", licence="none", sha256="00") for kind in ("code", "prose")
            ),
        )
    )


CORPUS = make_corpus()


def random_bits(dtype: LogitsDtype, rows: int, columns: int, seed: int = 0) -> NDArray[Any]:
    """Any bits at all: NaN with payloads, infinities and subnormals among them."""
    raw = np.random.default_rng(seed).integers(0, 256, (rows, columns * ITEM_BYTES[dtype]), np.uint8)
    return raw.view(_parts.STORED[dtype])


def make_blocks(corpus: Corpus = CORPUS, dtype: LogitsDtype = "bfloat16", *, facts: bool = True) -> list[Block]:
    blocks = []
    for number, segment in enumerate(corpus.segments):
        for phase in Phase:
            indices = segment.indices(phase)
            numbers = {name: (indices * 7 + place).astype(np.int32) for place, name in enumerate(_parts.FACTS)}
            blocks.append(
                Block(
                    segment=segment.id,
                    phase=phase,
                    indices=indices,
                    targets=segment.targets(indices),
                    logits=random_bits(dtype, len(indices), V, seed=2 * number + (phase is Phase.DECODE)),
                    facts=StepFacts(**numbers) if facts else None,
                )
            )
    return blocks


def cut(block: Block, start: int, stop: int) -> Block:
    facts = block.facts and StepFacts(**{n: getattr(block.facts, n)[start:stop] for n in _parts.FACTS})
    return dataclasses.replace(
        block,
        indices=block.indices[start:stop],
        targets=block.targets[start:stop],
        logits=block.logits[start:stop],
        facts=facts,
        hidden=None if block.hidden is None else block.hidden[start:stop],
    )


def record(folder: Path, blocks: list[Block] | None = None, *, part_rows: int = 10, prefix: str = "part") -> Manifest:
    begin(folder)
    append(folder, make_blocks() if blocks is None else blocks, part_rows=part_rows, prefix=prefix)
    return finish_recording(folder, BUILD)


def begin(folder: Path, *, resume: bool = False, build: Build = BUILD, corpus: Corpus = CORPUS) -> Any:
    return begin_recording(folder, corpus, build, vocab_size=V, logits_dtype="bfloat16", resume=resume)


def append(folder: Path, blocks: list[Block], *, part_rows: int = 10, prefix: str = "part") -> tuple[Part, ...]:
    writer = PartWriter(folder, vocab_size=V, logits_dtype="bfloat16", part_rows=part_rows, prefix=prefix)
    append_all(writer, blocks)
    return writer.close()


def append_all(writer: PartWriter, blocks: list[Block]) -> None:
    for block in blocks:
        writer.append(block)


def assert_same_rows(recording: Recording, blocks: list[Block]) -> None:
    for block in blocks:
        read = recording.read(block.segment, block.phase)
        np.testing.assert_array_equal(read.indices, block.indices)
        np.testing.assert_array_equal(read.targets, block.targets)
        assert read.logits.dtype == block.logits.dtype
        assert read.logits.tobytes() == np.ascontiguousarray(block.logits).tobytes()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_keeps_every_bit(tmp_path: Path, dtype: LogitsDtype) -> None:
    blocks = make_blocks(dtype=dtype)
    manifest = write_recording(tmp_path / "r", CORPUS, BUILD, blocks, vocab_size=V, logits_dtype=dtype)
    recording = Recording(tmp_path / "r")
    assert manifest.complete
    assert recording.manifest == manifest
    assert (manifest.rows_written, manifest.rows_expected) == (CORPUS.rows, CORPUS.rows)
    assert recording.corpus.sha256 == CORPUS.sha256
    assert_same_rows(recording, blocks)
    for block in blocks:
        read = recording.read(block.segment, block.phase)
        assert read.facts is not None
        assert block.facts is not None
        for name in _parts.FACTS:
            np.testing.assert_array_equal(getattr(read.facts, name), getattr(block.facts, name))


def test_unknown_step_facts_read_as_minus_one(tmp_path: Path) -> None:
    record(tmp_path, make_blocks(facts=False))
    facts = Recording(tmp_path).read("code-d12", Phase.DECODE).facts
    assert facts is not None
    assert all((getattr(facts, name) == -1).all() for name in _parts.FACTS)


def test_hidden_states_have_a_dtype_of_their_own(tmp_path: Path) -> None:
    hidden = random_bits("bfloat16", 8, 5)
    blocks = [dataclasses.replace(block, hidden=hidden[: len(block.indices)]) for block in make_blocks(dtype="float32")]
    begin_recording(tmp_path, CORPUS, BUILD, vocab_size=V, logits_dtype="float32")
    writer = PartWriter(tmp_path, vocab_size=V, logits_dtype="float32", hidden_size=5, hidden_dtype="bfloat16")
    for block in blocks:
        writer.append(block)
    writer.close()
    assert finish_recording(tmp_path, BUILD).complete
    for block in blocks:
        read = Recording(tmp_path).read(block.segment, block.phase)
        assert read.hidden is not None
        np.testing.assert_array_equal(read.hidden, hidden[: len(block.indices)])


@settings(max_examples=15)
@given(st.data())
def test_any_split_and_order_reads_the_same(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Blocks cut and shuffled, any part size and row group size: same rows, same id, any subset can be read."""
    folder = tmp_path_factory.mktemp("split")
    pieces = []
    for block in make_blocks():
        ends = sorted({0, len(block.indices), *data.draw(st.lists(st.integers(0, len(block.indices)), max_size=3))})
        pieces += [cut(block, a, b) for a, b in itertools.pairwise(ends)]
    pieces = data.draw(st.permutations(pieces))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_parts, "GROUP_BYTES", data.draw(st.integers(1, 6 * V * 2)))
        patch.setattr(os, "fsync", lambda _: None)  # hundreds of files; durability is not what this shows
        manifest = record(folder, pieces, part_rows=data.draw(st.integers(1, 60)))
    assert manifest.complete
    assert manifest.id == expected_id(CORPUS, make_blocks())
    recording = Recording(folder)
    assert_same_rows(recording, make_blocks())
    block = data.draw(st.sampled_from(make_blocks()))
    chosen = sorted(data.draw(st.sets(st.sampled_from(range(len(block.indices))))))
    read = recording.read(block.segment, block.phase, block.indices[np.array(chosen, np.int64)])
    np.testing.assert_array_equal(read.indices, block.indices[chosen])
    assert read.logits.tobytes() == block.logits[chosen].tobytes()


def expected_id(corpus: Corpus, blocks: list[Block]) -> str:
    """The content id by its definition, without any of the package's storage."""
    digests = []
    for block in blocks:
        for row, (index, target) in enumerate(zip(block.indices.tolist(), block.targets.tolist(), strict=True)):
            key = json.dumps([block.segment, str(block.phase), index, target]).encode()
            digests.append(hashlib.blake2b(key + block.logits[row].tobytes(), digest_size=16).digest())
    head = json.dumps([corpus.sha256, V, "bfloat16", "full"]).encode()
    return hashlib.sha256(head + b"".join(sorted(digests))).hexdigest()


def test_the_id_changes_with_one_bit_and_with_swapped_rows(tmp_path: Path) -> None:
    original = record(tmp_path / "a").id
    blocks = make_blocks()
    blocks[0].logits[0, 0] ^= 1
    assert record(tmp_path / "b", blocks).id != original
    blocks = make_blocks()
    blocks[0].logits[[0, 1]] = blocks[0].logits[[1, 0]]
    assert record(tmp_path / "c", blocks).id != original


def test_writers_with_prefixes_share_a_folder(tmp_path: Path) -> None:
    begin(tmp_path)
    blocks = make_blocks()
    append(tmp_path, blocks[:3], prefix="part-r0")
    append(tmp_path, blocks[3:], prefix="part-r1")
    assert finish_recording(tmp_path, BUILD).complete
    assert_same_rows(Recording(tmp_path), blocks)


def test_appended_rows_are_copied_at_once(tmp_path: Path) -> None:
    """An engine reuses its buffers: what it writes there after `append` is another row."""
    begin(tmp_path)
    blocks = make_blocks()
    writer = PartWriter(tmp_path, vocab_size=V, logits_dtype="bfloat16")
    shared = np.empty((1, V), np.uint16)
    for block in blocks:
        for row in range(len(block.indices)):
            shared[:] = block.logits[row]
            writer.append(dataclasses.replace(cut(block, row, row + 1), logits=shared))
    shared[:] = 0
    writer.close()
    assert finish_recording(tmp_path, BUILD).complete
    assert_same_rows(Recording(tmp_path), blocks)


def test_reading_rows_that_are_not_there(tmp_path: Path) -> None:
    record(tmp_path)
    recording = Recording(tmp_path)
    assert len(recording.indices("no such segment", Phase.DECODE)) == 0
    assert recording.read("no such segment", Phase.DECODE).logits.shape == (0, V)
    with pytest.raises(StorageError, match=r"no row 5 of segment 'code-d12', decode \(1 of the 2 rows"):
        recording.read("code-d12", Phase.DECODE, np.array([12, 5]))


# --------------------------------------------------------------------------- other tools


def test_two_lines_of_numpy_decode_the_logits(tmp_path: Path) -> None:
    blocks = make_blocks()
    record(tmp_path, blocks, part_rows=1000)
    table = pq.read_table(tmp_path / "part-00000.parquet").to_pydict()
    bits = np.stack([np.frombuffer(row, np.uint16) for row in table["logits"]])
    logits = (bits.astype(np.uint32) << 16).view(np.float32)
    expected = np.concatenate([decode(block.logits, "bfloat16") for block in blocks])
    np.testing.assert_array_equal(logits.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_one_line_of_numpy_decodes_other_dtypes(tmp_path: Path, dtype: LogitsDtype) -> None:
    blocks = make_blocks(dtype=dtype)
    write_recording(tmp_path / "r", CORPUS, BUILD, blocks, vocab_size=V, logits_dtype=dtype)
    table = pq.read_table(tmp_path / "r" / "part-00000.parquet").to_pydict()
    logits = np.stack([np.frombuffer(row, dtype) for row in table["logits"]])
    assert logits.tobytes() == b"".join(block.logits.tobytes() for block in blocks)


def gaussian_blocks() -> list[Block]:
    rng = np.random.default_rng(1)
    return [
        dataclasses.replace(
            b, logits=(rng.normal(0, 4, b.logits.shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        )
        for b in make_blocks()
    ]


def test_summaries_are_those_of_the_rows(tmp_path: Path) -> None:
    blocks = gaussian_blocks()
    record(tmp_path, blocks, part_rows=1000)
    table = pq.read_table(tmp_path / "part-00000.parquet")
    logits = np.concatenate([b.logits for b in blocks])
    lse, ids, tops = row_summary(logits, "bfloat16", 64)
    wide = decode(logits, "bfloat16").astype(np.float64)
    np.testing.assert_allclose(table["lse"].to_numpy(), np.log(np.exp(wide).sum(axis=1)), rtol=1e-13)
    np.testing.assert_array_equal(table["lse"].to_numpy(), lse)
    np.testing.assert_array_equal(np.array(table["top_ids"].to_pylist()), ids)
    np.testing.assert_array_equal(np.array(table["top_logits"].to_pylist(), np.float32), tops)


def test_duckdb_reads_the_parts(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    blocks = gaussian_blocks()
    record(tmp_path, blocks)
    rows = duckdb.sql(
        f"SELECT segment, phase, count(*), avg(lse), max(batch_size), max(top_ids[1]) "
        f"FROM '{tmp_path}/part-*.parquet' WHERE \"index\" >= 12 GROUP BY 1, 2 ORDER BY 1, 2"
    ).fetchall()
    assert len(rows) == 8
    for segment, phase, count, lse, batch, top in rows:
        block = next(b for b in blocks if (b.segment, b.phase) == (segment, phase))
        kept = block.indices >= 12
        values, ids, _ = row_summary(block.logits[kept], "bfloat16", 1)
        assert block.facts is not None
        assert (count, batch, top) == (kept.sum(), block.facts.batch_size[kept].max(), ids.max())
        assert lse == pytest.approx(values.mean(), rel=1e-12)
    first = duckdb.sql(f"SELECT logits FROM '{tmp_path}/part-00000.parquet' LIMIT 1").fetchall()
    assert first[0][0] == blocks[0].logits[0].tobytes()


def test_polars_reads_the_parts(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    blocks = gaussian_blocks()
    record(tmp_path, blocks)
    frame = polars.read_parquet(f"{tmp_path}/part-*.parquet")
    assert len(frame) == CORPUS.rows
    one = frame.filter((polars.col("segment") == "prose-d20") & (polars.col("phase") == "decode")).sort("index")
    block = next(b for b in blocks if (b.segment, b.phase) == ("prose-d20", Phase.DECODE))
    lse, ids, _ = row_summary(block.logits, "bfloat16", 64)
    np.testing.assert_array_equal(one["index"].to_numpy(), block.indices)
    np.testing.assert_array_equal(one["lse"].to_numpy(), lse)
    np.testing.assert_array_equal(np.array(one["top_ids"].to_list()), ids)
    assert b"".join(one["logits"].to_list()) == block.logits.tobytes()


def test_pandas_reads_the_ordinary_columns(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    record(tmp_path, part_rows=1000)
    frame = pandas.read_parquet(tmp_path / "part-00000.parquet", columns=["segment", "index", "lse"])
    assert frame.groupby("segment").size().sum() == CORPUS.rows


# --------------------------------------------------------------------------- damage


def test_a_flipped_byte_is_found_and_the_file_named(tmp_path: Path) -> None:
    record(tmp_path)
    path = tmp_path / "part-00001.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"part-00001\.parquet is truncated or altered"):
        Recording(tmp_path)


@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_part_is_found(tmp_path: Path, verify: bool) -> None:
    record(tmp_path)
    path = tmp_path / "part-00001.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StorageError, match=r"part-00001\.parquet is (truncated|not readable)"):
        Recording(tmp_path, verify=verify)


@pytest.mark.parametrize("verify", [True, False])
def test_a_missing_and_an_added_part_are_found(tmp_path: Path, verify: bool) -> None:
    record(tmp_path)
    path = tmp_path / "part-00002.parquet"
    data = path.read_bytes()
    path.rename(tmp_path / "part-00099.parquet")
    with pytest.raises(StorageError, match=r"part-00002\.parquet is missing"):
        Recording(tmp_path, verify=verify)
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"part-00099\.parquet is not one of the recording's parts"):
        Recording(tmp_path, verify=verify)


def rewritten(path: Path, change: Any) -> None:
    """Replace a part by one with other rows and make the manifest's hash and row count agree with it."""
    table = change(pq.read_table(path))
    pq.write_table(table, path, compression="none")
    file = path.parent / "recording.json"
    manifest = json.loads(file.read_text())
    for part in manifest["parts"]:
        if part["file"] == path.name:
            part |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "rows": table.num_rows}
    file.write_text(json.dumps(manifest))


def shifted(table: Any) -> Any:
    moved = pa.array(np.asarray(table["index"].to_numpy()) + 1, pa.int32())
    return table.set_column(table.schema.get_field_index("index"), table.schema.field("index"), moved)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: pa.concat_tables([table, table.slice(0, 1)]),  # a row twice
        lambda table: table.slice(1),  # a row less
        shifted,  # every row at the next index
    ],
    ids=["duplicated", "dropped", "shifted"],
)
def test_rows_altered_together_with_their_hash_are_found(tmp_path: Path, change: Any) -> None:
    record(tmp_path)
    rewritten(tmp_path / "part-00000.parquet", change)
    with pytest.raises(StorageError, match=r"altered|there twice|not scored|not the ids that come next"):
        Recording(tmp_path)


def test_rows_altered_in_an_interrupted_recording_are_found(tmp_path: Path) -> None:
    """Its parts have no hash in any manifest yet: the digests of the rows tell."""
    begin(tmp_path)
    append(tmp_path, make_blocks())
    path = tmp_path / "part-00000.parquet"
    table = pq.read_table(path)
    bits = table["logits"].to_pylist()
    bits[3] = bytes([bits[3][0] ^ 1]) + bits[3][1:]
    field = table.schema.get_field_index("logits")
    pq.write_table(table.set_column(field, table.schema.field(field), pa.array(bits, pa.binary(2 * V))), path)
    for open_it in (lambda: Recording(tmp_path), lambda: begin(tmp_path, resume=True)):
        with pytest.raises(
            StorageError, match=r"part-00000\.parquet is damaged or altered: the row of code-d12, prefill"
        ):
            open_it()


def test_foreign_files_among_the_parts_are_named(tmp_path: Path) -> None:
    begin(tmp_path)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "part-x.parquet")
    with pytest.raises(StorageError, match=r"part-x\.parquet is not a part of a recording"):
        finish_recording(tmp_path, BUILD)


def test_a_part_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    begin(tmp_path)
    writer = PartWriter(tmp_path, vocab_size=V + 2, logits_dtype="bfloat16")
    block = make_blocks()[0]
    writer.append(dataclasses.replace(block, logits=random_bits("bfloat16", len(block.indices), V + 2)))
    writer.close()
    with pytest.raises(StorageError, match=r"rows of 72 bfloat16, the recording of 70 bfloat16"):
        finish_recording(tmp_path, BUILD)


def test_an_exchanged_corpus_is_refused(tmp_path: Path) -> None:
    record(tmp_path)
    save_corpus(make_corpus(seed=5), tmp_path / "corpus.parquet")
    with pytest.raises(StorageError, match=r"the file was exchanged"):
        Recording(tmp_path)


def test_an_altered_manifest_is_refused(tmp_path: Path) -> None:
    begin(tmp_path)
    append(tmp_path, make_blocks()[:-1])
    finish_recording(tmp_path, BUILD)
    file = tmp_path / "recording.json"
    text = file.read_text()
    file.write_text(text.replace('"complete": false', '"complete": true'))
    with pytest.raises(StorageError, match="the manifest was altered"):
        Recording(tmp_path)
    identity = json.loads(text)["id"]
    file.write_text(text.replace('"complete": false', '"complete": true').replace(identity, ""))
    with pytest.raises(StorageError, match="complete but has no id"):
        Recording(tmp_path)
    file.write_text(text.replace(identity, "0" * 64))
    with pytest.raises(StorageError, match="says that the rows hash to 000000000000"):
        Recording(tmp_path, verify=False)


# --------------------------------------------------------------------------- taking stock


def test_missing_rows_are_gaps(tmp_path: Path) -> None:
    begin(tmp_path)
    blocks = make_blocks()
    append(tmp_path, [cut(blocks[0], 1, 99), *blocks[2:]])
    manifest = finish_recording(tmp_path, BUILD, gaps_reason="prefix cache")
    decoded = len(CORPUS.segments[0].indices(Phase.DECODE))
    assert not manifest.complete
    assert manifest.gaps == (
        Gap(segment="code-d12", phase=Phase.PREFILL, rows=1, reason="prefix cache"),
        Gap(segment="code-d12", phase=Phase.DECODE, rows=decoded, reason="prefix cache"),
    )
    assert manifest.rows_written == CORPUS.rows - 1 - decoded
    assert Recording(tmp_path).manifest == manifest


def test_an_empty_recording_is_all_gaps(tmp_path: Path) -> None:
    begin(tmp_path)
    manifest = finish_recording(tmp_path, BUILD)
    assert (manifest.complete, manifest.rows_written, manifest.parts) == (False, 0, ())
    assert sum(gap.rows for gap in manifest.gaps) == CORPUS.rows == Recording(tmp_path).manifest.rows_expected


def test_duplicates_of_two_writers_are_named(tmp_path: Path) -> None:
    begin(tmp_path)
    writers = [PartWriter(tmp_path, vocab_size=V, logits_dtype="bfloat16", prefix=f"part-r{rank}") for rank in (0, 1)]
    for writer in writers:
        writer.append(cut(make_blocks()[1], 0, 2))
        writer.close()
    with pytest.raises(
        StorageError,
        match=r"'code-d12', decode: indices 12, 13 are there twice \(in part-r0-00000\.parquet, part-r1-00000\.parquet",
    ):
        finish_recording(tmp_path, BUILD)
    with pytest.raises(StorageError, match="are there twice"):
        Recording(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment": "other"}, r"no segment 'other' \(prefill rows\)"),
        ({"indices": np.array([0])}, r"index 0 is not scored"),
        ({"targets": np.array([999], np.int32)}, r"targets of index 6 is not the ids that come next"),
    ],
)
def test_rows_that_the_corpus_does_not_know_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    begin(tmp_path)
    append(tmp_path, [dataclasses.replace(cut(make_blocks()[0], 0, 1), **change)])
    with pytest.raises(StorageError, match=message):
        finish_recording(tmp_path, BUILD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": np.zeros((7, V + 1), np.uint16)}, r"logits are \(7, 71\) uint16, expected \(7, 70\) uint16"),
        ({"logits": np.zeros((7, V), np.float32)}, r"logits are \(7, 70\) float32, expected .* \(bfloat16\)"),
        ({"targets": np.zeros(6, np.int32)}, "one target for each of 7"),
        ({"indices": np.arange(7)[::-1]}, "expected ascending indices"),
        ({"indices": np.arange(-1, 6)}, "indices from 0 on"),
        ({"hidden": np.zeros((7, 3), np.uint16)}, "none were announced"),
    ],
)
def test_a_block_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    writer = PartWriter(tmp_path, vocab_size=V, logits_dtype="bfloat16")
    with pytest.raises(StorageError, match=message):
        writer.append(dataclasses.replace(make_blocks()[0], **change))
    assert writer.close() == ()


# --------------------------------------------------------------------------- interruption and resume


def test_a_killed_recording_can_be_read_and_resumed(tmp_path: Path) -> None:
    """SIGKILL in the middle of a part: whole parts stay, the rest is missing and said to be."""
    folder = tmp_path / "r"
    script = """
        import os, signal, sys
        from pathlib import Path
        sys.path[:0] = {paths!r}
        import test_storage as t
        folder = Path({folder!r})
        t.begin(folder)
        t._parts.GROUP_BYTES = 1
        writer = t.PartWriter(folder, vocab_size=t.V, logits_dtype="bfloat16", part_rows=10)
        for block in t.make_blocks()[:5]:
            writer.append(block)
        assert list(folder.glob(".part-*.tmp"))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    here = Path(__file__).resolve().parent
    program = textwrap.dedent(script).format(paths=[str(here), str(here.parent)], folder=str(folder))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    killed = Recording(folder).manifest
    made = sum(len(block.indices) for block in make_blocks()[:5])
    assert not killed.complete
    assert killed.rows_written == made // 10 * 10
    assert killed.rows_written + sum(gap.rows for gap in killed.gaps) == CORPUS.rows
    present = begin(folder, resume=True)
    assert len(present) == killed.rows_written
    append(folder, make_blocks())  # requests are made again as a whole: what is there already is skipped
    manifest = finish_recording(folder, BUILD)
    assert manifest.complete
    assert manifest.id == expected_id(CORPUS, make_blocks())
    assert_same_rows(Recording(folder), make_blocks())


def test_resume_says_which_rows_are_there(tmp_path: Path) -> None:
    begin(tmp_path)
    blocks = make_blocks()
    append(tmp_path, [blocks[0], cut(blocks[1], 0, 3)])
    present = begin(tmp_path, resume=True)
    segment = CORPUS.segments[0]
    assert present.by_segment() == {
        ("code-d12", Phase.PREFILL): set(blocks[0].indices.tolist()),
        ("code-d12", Phase.DECODE): set(blocks[1].indices[:3].tolist()),
    }
    assert len(present.missing(segment, Phase.PREFILL)) == 0
    np.testing.assert_array_equal(present.missing(segment, Phase.DECODE), blocks[1].indices[3:])
    np.testing.assert_array_equal(
        present.missing(CORPUS.segments[1], Phase.DECODE), CORPUS.segments[1].indices(Phase.DECODE)
    )


def test_resume_of_nothing_begins(tmp_path: Path) -> None:
    assert len(begin(tmp_path / "new", resume=True)) == 0
    assert Recording(tmp_path / "new").manifest.rows_written == 0


def test_resume_of_a_complete_recording_changes_nothing(tmp_path: Path) -> None:
    record(tmp_path)
    before = files_of(tmp_path)
    assert len(begin(tmp_path, resume=True)) == CORPUS.rows
    finish_recording(tmp_path, dataclasses.replace(BUILD, host={"other": 1}), seconds=1.0)
    assert files_of(tmp_path) == before


def test_a_damaged_part_can_be_deleted_and_resumed(tmp_path: Path) -> None:
    identity = record(tmp_path).id
    path = tmp_path / "part-00001.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError, match="delete that file and resume"):
        begin(tmp_path, resume=True)
    path.unlink()
    assert len(begin(tmp_path, resume=True)) == CORPUS.rows - 10
    assert not Recording(tmp_path).manifest.complete
    append(tmp_path, make_blocks())
    assert finish_recording(tmp_path, BUILD).id == identity


def test_resume_removes_temporary_files_and_restores_the_corpus(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / ".part-00000.parquet.tmp").write_bytes(b"half a part")
    (tmp_path / "corpus.parquet").unlink()
    begin(tmp_path, resume=True)
    assert sorted(files_of(tmp_path)) == ["corpus.parquet", "recording.json"]


@pytest.mark.parametrize(
    ("build", "corpus", "message"),
    [
        (BUILD, make_corpus(seed=1), "corpus_sha256 was"),
        (dataclasses.replace(BUILD, weights_sha256="cd"), CORPUS, "build.weights_sha256 was 'ab', is 'cd'"),
        (dataclasses.replace(BUILD, requested={"max_len": 32}), CORPUS, "build.requested.max_len was 64, is 32"),
        (dataclasses.replace(BUILD, environment={}), CORPUS, "OMP_NUM_THREADS was '2', is None"),
        (dataclasses.replace(BUILD, patches=()), CORPUS, "build.patches was"),
    ],
)
def test_resume_of_something_else_is_refused(tmp_path: Path, build: Build, corpus: Corpus, message: str) -> None:
    begin(tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(StorageError, match=message):
        begin(tmp_path, resume=True, build=build, corpus=corpus)
    assert files_of(tmp_path) == before


def test_resume_allows_what_moves_no_bit(tmp_path: Path) -> None:
    begin(tmp_path)
    begin(tmp_path, resume=True, build=dataclasses.replace(BUILD, model="/elsewhere/a", host={"load": 1.0}))
    unhashed = dataclasses.replace(BUILD, weights_sha256="")
    other = tmp_path / "other"
    begin(other, build=unhashed)
    with pytest.raises(StorageError, match=r"build\.model was"):  # then its name is all there is
        begin(other, resume=True, build=dataclasses.replace(unhashed, model="/elsewhere/a"))


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "a")
    with pytest.raises(StorageError, match="already holds a recording: resume it"):
        begin(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"holds something else \(notes\.txt\)"):
        begin(tmp_path / "b")
    (tmp_path / "c").write_text("a file")
    with pytest.raises(StorageError, match="could not write"):
        begin(tmp_path / "c")


# --------------------------------------------------------------------------- disk errors


@pytest.fixture
def small_files() -> Iterator[None]:
    """Real write errors without a full disk: no file of this process may grow beyond 20 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, before)


def test_a_disk_that_refuses_leaves_whole_parts_only(
    tmp_path: Path, small_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path)
    block = make_blocks()[0]
    append(tmp_path, [block])
    monkeypatch.setattr(_parts, "GROUP_BYTES", 1)
    writer = PartWriter(tmp_path, vocab_size=V, logits_dtype="bfloat16", prefix="part-big")
    with pytest.raises(StorageError, match=r"could not write .*part-big-00000\.parquet: File too large.* are lost"):
        append_all(writer, make_blocks()[1:])
    with pytest.raises(StorageError, match="File too large"):
        writer.append(block)
    assert writer.close() == ()
    assert sorted(files_of(tmp_path)) == ["corpus.parquet", "part-00000.parquet", "recording.json"]
    assert_same_rows(Recording(tmp_path), [block])


def test_an_error_at_any_step_of_closing_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for target, name in ((os, "fsync"), (Path, "rename"), (pq.ParquetWriter, "write_table")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, full)
            with pytest.raises(StorageError, match="No space left on device; free some space"):
                append(tmp_path, make_blocks())
        assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp")) + list(tmp_path.glob("part-*"))
    append(tmp_path, make_blocks())
    assert finish_recording(tmp_path, BUILD).complete


def test_a_manifest_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path)
    append(tmp_path, make_blocks())
    before = files_of(tmp_path)

    def denied(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", denied)
        with pytest.raises(StorageError, match=r"recording\.json: Permission denied; check the folder's permissions"):
            finish_recording(tmp_path, BUILD)
    assert files_of(tmp_path) == before
    assert not Recording(tmp_path).manifest.complete


def test_a_second_writer_of_the_same_prefix_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_parts, "GROUP_BYTES", 1)
    first, second = (PartWriter(tmp_path, vocab_size=V, logits_dtype="bfloat16") for _ in range(2))
    first.append(make_blocks()[0])
    with pytest.raises(StorageError, match=r"part-00000\.parquet: File exists"):
        second.append(make_blocks()[1])
    assert [part.rows for part in first.close()] == [7]
    assert _parts.PartFile(tmp_path / "part-00000.parquet").rows == 7


def test_a_folder_that_vanishes_is_named(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path / "gone", vocab_size=V, logits_dtype="bfloat16")
    writer.append(make_blocks()[0])
    with pytest.raises(StorageError, match="the folder was removed"):
        writer.close()


# --------------------------------------------------------------------------- memory


COUNTING_POOL = pa.proxy_memory_pool(pa.default_memory_pool())
"""Lives as long as the process: Arrow frees its buffers into it whenever they are collected."""


def test_reading_and_writing_hold_one_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's own pool, over a recording thirty times as large as what it may hold."""
    group = 64 * V * 2
    monkeypatch.setattr(_parts, "GROUP_BYTES", group)
    length = 4000
    segment = dataclasses.replace(
        CORPUS.segments[0], token_ids=np.zeros(length + 2, np.int32), decode_from=1, windows=()
    )
    corpus = seal(dataclasses.replace(CORPUS, segments=(segment,)))
    indices = segment.indices(Phase.DECODE)
    block = Block(
        segment=segment.id,
        phase=Phase.DECODE,
        indices=indices,
        targets=segment.targets(indices),
        logits=random_bits("bfloat16", length, V),
    )
    size = block.logits.nbytes
    default = pa.default_memory_pool()
    pool = COUNTING_POOL
    pa.set_memory_pool(pool)
    try:
        write_recording(tmp_path / "r", corpus, BUILD, [block], vocab_size=V, logits_dtype="bfloat16")
        recording = Recording(tmp_path / "r", verify=False)
        opened = pool.max_memory()
        for index in indices[::50]:
            recording.read(segment.id, Phase.DECODE, np.array([index]))
    finally:
        pa.set_memory_pool(default)
    assert 0 < opened < size
    assert pool.max_memory() - opened < 8 * group < size / 5


# --------------------------------------------------------------------------- manifest


def full_manifest() -> Manifest:
    return Manifest(
        id="aa",
        build=dataclasses.replace(BUILD, git={"dirty": True}, host={"gpus": [None, 1.5]}),
        corpus_name="c",
        corpus_sha256="cc",
        tokenizer_sha256="tt",
        vocab_size=5,
        logits_dtype="float16",
        level=Level.TOPK,
        rows_expected=3,
        rows_written=2,
        complete=False,
        parts=(Part(file="part-00000.parquet", rows=2, sha256="pp"),),
        gaps=(Gap(segment="s", phase=Phase.DECODE, rows=1, reason="r"),),
        instrument=InstrumentCheck(rows=1, max_error=math.inf, limit=2e-5, passed=False),
        own_error={"kl20": 1e-11},
        seconds=3.5,
        created="2026-01-01T00:00:00+00:00",
    )


def test_manifest_round_trip_through_strict_json() -> None:
    manifest = full_manifest()
    text = json.dumps(manifest_to_json(manifest), allow_nan=False)
    assert manifest_from_json(json.loads(text), "x") == manifest
    unchecked = dataclasses.replace(
        manifest, instrument=InstrumentCheck(rows=0, max_error=math.nan, limit=2e-5, passed=False)
    )
    read = manifest_from_json(json.loads(json.dumps(manifest_to_json(unchecked), allow_nan=False)), "x")
    assert read.instrument is not None
    assert math.isnan(read.instrument.max_error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": SCHEMA_VERSION + 1}, r"written by a newer logitgate \(schema 2"),
        ({"schema_version": "1"}, "schema_version is '1'"),
        ({"vocab_size": "5"}, "manifest.vocab_size is '5', expected a whole number"),
        ({"vocab_size": True}, "manifest.vocab_size is True"),
        ({"complete": 1}, "manifest.complete is 1, expected true or false"),
        ({"logits_dtype": "int8"}, "manifest.logits_dtype is 'int8', expected one of bfloat16, float16"),
        ({"level": "half"}, "manifest.level is 'half', expected one of full, hidden, topk"),
        ({"parts": {}}, "manifest.parts is {}, expected a list"),
        ({"parts": [{"file": 3}]}, r"manifest\.parts\[0\]\.file is 3, expected text"),
        ({"build": []}, "manifest.build is \\[\\], expected an object"),
        ({"seconds": "fast"}, "manifest.seconds is 'fast', expected a number"),
        ({"build": {"engine": "e"}}, "manifest.build.engine_version is missing"),
    ],
)
def test_a_wrong_manifest_is_a_storage_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    record(tmp_path)
    file = tmp_path / "recording.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(StorageError, match=message) as caught:
        Recording(tmp_path)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("name", ["../part-0.parquet", "part-/../../x.parquet", "/part-0.parquet", "recording.json"])
def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    record(tmp_path)
    file = tmp_path / "recording.json"
    manifest = json.loads(file.read_text())
    manifest["parts"][0]["file"] = name
    file.write_text(json.dumps(manifest))
    with pytest.raises(StorageError, match="is not a part's file name"):
        Recording(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b"[]", b"3", b"{}"])
def test_what_is_no_manifest_is_a_storage_error(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "recording.json").write_bytes(text)
    with pytest.raises(StorageError, match=r"recording\.json"):
        Recording(tmp_path)


def test_what_is_no_recording_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"it has no recording\.json"):
        Recording(tmp_path)
    with pytest.raises(StorageError, match="it does not exist"):
        Recording(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="it is not a folder"):
        Recording(tmp_path / "file")


def test_fields_of_a_later_minor_version_are_ignored(tmp_path: Path) -> None:
    manifest = record(tmp_path)
    file = tmp_path / "recording.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mood": "good"}))
    assert Recording(tmp_path).manifest == manifest


def test_a_build_that_is_not_json_is_refused_before_anything_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"manifest\.build\.requested\.path is a PosixPath"):
        begin(tmp_path, build=dataclasses.replace(BUILD, requested={"path": Path("x")}))
    assert files_of(tmp_path) == {}


# --------------------------------------------------------------------------- positions


def test_positions_round_trip(tmp_path: Path) -> None:
    columns: dict[str, NDArray[Any] | list[str]] = {
        "segment": ["a", "b", "ü"],
        "phase": np.array(["prefill", "decode", "decode"]),
        "kl20": np.array([0.5, math.nan, 5e-324]),
        "flip": np.array([True, False, True]),
        "index": np.array([1, 2, 2**40], np.int64),
        "rank": np.array([0, 1, 2], np.int32),
    }
    save_positions(columns, tmp_path / "positions.parquet")
    loaded = load_positions(tmp_path / "positions.parquet")
    assert list(loaded) == list(columns)
    for name, values in columns.items():
        np.testing.assert_array_equal(loaded[name], values)
        assert loaded[name].dtype.kind == np.asarray(values).dtype.kind


def test_empty_positions_round_trip(tmp_path: Path) -> None:
    empty: list[str] = []
    save_positions({"segment": empty, "kl20": np.empty(0)}, tmp_path / "p.parquet")
    loaded = load_positions(tmp_path / "p.parquet")
    assert {name: (len(v), v.dtype.kind) for name, v in loaded.items()} == {"segment": (0, "U"), "kl20": (0, "f")}


def test_positions_errors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    with pytest.raises(StorageError, match="unequal lengths"):
        save_positions({"a": np.zeros(2), "b": np.zeros(3)}, path)
    with pytest.raises(StorageError, match="cannot be written"):
        save_positions({"a": np.zeros((2, 2))}, path)
    with pytest.raises(StorageError, match="cannot be written"):
        save_positions({"a": ["\ud800"]}, path)
    assert not path.exists()
    with pytest.raises(StorageError, match="there is no such file"):
        load_positions(path)
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(StorageError, match="could not read"):
        load_positions(path)
