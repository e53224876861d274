"""Recordings on disk: begun, written, finished, resumed, verified, read.

A recording is a folder. `recording.json` is the manifest, written last: until then `complete` is false.
`corpus.parquet` is the recording's own copy of the corpus. `part-*.parquet` hold the rows; a part is there whole or not
at all. Columns, none with nulls:

    segment, phase          text
    index, target           int32; the row is the logits after token_ids[:index + 1], target is token_ids[index + 1]
    step, batch_size, scheduled_tokens, chunk_start, cached_tokens    int32, -1 where unknown
    lse                     f64, log-sum-exp of the row in nats; NaN for a row with NaN or +inf
    top_ids, top_logits     the 64 largest (int32, f32), lower id first among equals
    digest                  16 bytes: blake2b of key, target and bits
    logits                  V values as little-endian bytes in the engine's own dtype; bf16 is its 2 bytes
    hidden                  optional, H values likewise

The ordinary columns read in DuckDB, Polars and pandas: `SELECT segment, avg(lse) FROM 'DIR/part-*.parquet' GROUP BY 1`.
`logits` decodes in two lines of numpy, here for bf16 (else the first line, with the dtype, is all):

    bits = np.stack([np.frombuffer(row, np.uint16) for row in table["logits"]])
    logits = (bits.astype(np.uint32) << 16).view(np.float32)

A recorder calls `begin_recording`, appends to a `PartWriter` (in any process) and calls `finish_recording`; a script
that has its rows at hand calls `write_recording`. Readers open a `Recording`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from harness._files import atomic_file
from harness._part_writer import PartWriter
from harness._parts import PartFile, locate, part_files, write_errors
from harness._recording import Recording
from harness._stock import (
    CORPUS,
    MANIFEST,
    content_id,
    hash_files,
    load_manifest,
    load_own_corpus,
    require_intact,
    save_manifest,
    take_stock,
)
from harness.corpus import save_corpus
from harness.errors import StorageError
from harness.manifest_json import manifest_from_json, manifest_to_json, to_plain
from harness.types import (
    Block,
    Build,
    Corpus,
    InstrumentCheck,
    Json,
    Level,
    LogitsDtype,
    Manifest,
    Part,
    Phase,
    Segment,
)

__all__ = [
    "PartWriter",
    "Recording",
    "RowsPresent",
    "begin_recording",
    "column_names",
    "finish_recording",
    "load_positions",
    "manifest_from_json",
    "manifest_to_json",
    "save_positions",
    "write_recording",
]

_FREE_TO_CHANGE = ("model", "resolved", "host", "git")
"""Parts of a Build that may differ on resume: the folder's name (where a weight hash decides), and facts that move
without moving a bit of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPresent:
    """Which rows a recording already has."""

    rows: Mapping[tuple[str, Phase], NDArray[np.int64]]  # indices by segment and phase, ascending

    def __len__(self) -> int:
        return sum(len(indices) for indices in self.rows.values())

    def by_segment(self) -> dict[tuple[str, Phase], set[int]]:
        """Indices by segment and phase, as sets."""
        return {key: set(indices.tolist()) for key, indices in self.rows.items()}

    def missing(self, segment: Segment, phase: Phase) -> NDArray[np.int64]:
        """Scored indices of the segment that are not there, ascending."""
        present = self.rows.get((segment.id, phase), np.empty(0, np.int64))
        return np.setdiff1d(segment.indices(phase), present)


# --------------------------------------------------------------------------- writing


def begin_recording(
    folder: Path,
    corpus: Corpus,
    build: Build,
    *,
    vocab_size: int,
    logits_dtype: LogitsDtype,
    level: Level = Level.FULL,
    resume: bool = False,
) -> RowsPresent:
    """Make `folder` an incomplete recording and return the rows it has (none, if it is new).

    With `resume` an existing recording of the same corpus and build is continued: its parts are verified, temporary
    files of the interrupted run are removed. Raises StorageError if the folder holds anything else, if what must agree
    does not, if a part is damaged, or if the folder cannot be written.
    """
    fresh = Manifest(
        id="",
        build=build,
        corpus_name=corpus.name,
        corpus_sha256=corpus.sha256,
        tokenizer_sha256=corpus.tokenizer_sha256,
        vocab_size=vocab_size,
        logits_dtype=logits_dtype,
        level=level,
        rows_expected=corpus.rows,
        rows_written=0,
        complete=False,
        parts=(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        others = sorted(path.name for path in folder.iterdir())
    if MANIFEST in others:
        if not resume:
            raise StorageError(f"{folder} already holds a recording: resume it, or choose another folder")
        return _resume(folder, corpus, fresh)
    if others:
        raise StorageError(f"{folder} holds something else ({', '.join(others[:3])}): choose an empty or a new folder")
    save_manifest(folder, fresh)
    save_corpus(corpus, folder / CORPUS)
    return RowsPresent(rows={})


def finish_recording(
    folder: Path,
    build: Build,
    *,
    instrument: InstrumentCheck | None = None,
    own_error: Json | None = None,
    seconds: float | None = None,
    gaps_reason: str = "the recorder did not write them",
) -> Manifest:
    """Take stock of the parts, write the manifest and return it. Missing rows are gaps and make it incomplete.

    A recording that is complete already is left as it is. Raises StorageError for rows that are there twice, that the
    corpus does not score, or whose target is not the corpus's.
    """
    manifest = load_manifest(folder)
    parts = [PartFile(path) for path in part_files(folder)]
    if manifest.complete and {part.path.name for part in parts} == {part.file for part in manifest.parts}:
        return manifest
    corpus = load_own_corpus(folder, manifest)
    places, digests = locate(parts)
    stock = take_stock(folder, manifest, corpus, parts, places, gaps_reason)
    hashes = hash_files([part.path for part in parts])
    manifest = replace(
        stock,
        id=content_id(manifest, digests),
        build=build,
        complete=not stock.gaps,
        parts=tuple(Part(file=p.path.name, rows=p.rows, sha256=h) for p, h in zip(parts, hashes, strict=True)),
        instrument=instrument,
        own_error=own_error,
        seconds=seconds,
    )
    save_manifest(folder, manifest)
    return manifest


def write_recording(
    folder: Path,
    corpus: Corpus,
    build: Build,
    blocks: Iterable[Block],
    *,
    vocab_size: int,
    logits_dtype: LogitsDtype,
) -> Manifest:
    """Record rows that come from anywhere: the door for a vendor's own reference script or another engine.

    Blocks may come in any order and size, every scored row once. Raises StorageError as `begin_recording`,
    `PartWriter.append` and `finish_recording` do; if `blocks` itself raises, what came before it is kept.
    """
    begin_recording(folder, corpus, build, vocab_size=vocab_size, logits_dtype=logits_dtype)
    writer = PartWriter(folder, vocab_size=vocab_size, logits_dtype=logits_dtype)
    try:
        for block in blocks:
            writer.append(block)
    finally:
        writer.close()
    return finish_recording(folder, build)


def _resume(folder: Path, corpus: Corpus, fresh: Manifest) -> RowsPresent:
    manifest = load_manifest(folder)
    _require_same(folder, manifest, fresh)
    if not (folder / CORPUS).exists():  # killed between the manifest and the corpus
        save_corpus(corpus, folder / CORPUS)
    paths = part_files(folder)
    listed = {part.file: part for part in manifest.parts if folder / part.file in paths}
    require_intact(folder, tuple(listed.values()))
    parts = [PartFile(path) for path in paths]
    for part in parts:
        if part.path.name not in listed:
            part.require_digests()
    unfinished = replace(manifest, id="", complete=False, rows_written=0, gaps=(), parts=tuple(listed.values()))
    if not (manifest.complete and len(listed) == len(manifest.parts) == len(parts)):
        save_manifest(folder, unfinished)
    places, _ = locate(parts)
    return RowsPresent(rows={key: place["index"] for key, place in places.items()})


def _require_same(folder: Path, there: Manifest, now: Manifest) -> None:
    """A recording is of one build over one corpus; mixing two would be a third that never ran."""
    pairs = {
        name: (getattr(there, name), getattr(now, name))
        for name in ("corpus_sha256", "vocab_size", "logits_dtype", "level")
    }
    old, new = to_plain(there.build, "build"), to_plain(now.build, "build")
    free = set(_FREE_TO_CHANGE) - (set() if new["weights_sha256"] else {"model"})
    for name in old.keys() - free:
        if isinstance(old[name], dict) and isinstance(new[name], dict):
            keys = old[name].keys() | new[name].keys()
            pairs |= {f"build.{name}.{key}": (old[name].get(key), new[name].get(key)) for key in keys}
        else:
            pairs[f"build.{name}"] = (old[name], new[name])
    differing = [f"{name} was {a!r:.80}, is {b!r:.80}" for name, (a, b) in sorted(pairs.items()) if a != b]
    if differing:
        raise StorageError(
            f"{folder} cannot be resumed, it is of something else: {'; '.join(differing[:4])}; "
            "set these as they were, or record into another folder"
        )


# --------------------------------------------------------------------------- positions


def save_positions(columns: Mapping[str, NDArray[Any] | list[str]], path: Path) -> None:
    """Write per-position columns, each [P], as one plain Parquet file (zstd) for DuckDB, Polars and pandas.

    NaN stays NaN; there are no nulls. Raises StorageError for columns of unequal length or more than one dimension, for
    values that Parquet has no type for, and for what the disk refuses.
    """
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise StorageError(f"columns for {path} have unequal lengths ({lengths}): expected one value for each position")
    try:
        table = pa.table({name: _plain_column(values) for name, values in columns.items()})
    except (pa.ArrowException, UnicodeError) as error:
        raise StorageError(f"a column cannot be written to {path}: {error}; give numbers, bool or text") from error
    with write_errors(path), atomic_file(path) as file:
        pq.write_table(table, file, compression="zstd")


def load_positions(path: Path) -> dict[str, NDArray[Any]]:
    """The columns that `save_positions` wrote, each [P]; text as numpy strings. Raises StorageError."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0] if path.exists() else "there is no such file"
        raise StorageError(f"could not read {path}: {reason}; compare again to write it") from error
    columns = {}
    for name in table.column_names:
        column = table.column(name)
        columns[name] = np.array(column.to_pylist(), np.str_) if pa.types.is_string(column.type) else column.to_numpy()
    return columns


def column_names(path: Path) -> tuple[str, ...]:
    """The columns of any Parquet file, of which only the end is read. Raises StorageError if it is none."""
    try:
        return tuple(pq.read_schema(path).names)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from error


def _plain_column(values: NDArray[Any] | list[str]) -> Any:
    if isinstance(values, np.ndarray) and values.dtype.kind not in "OU":
        return pa.array(values)
    return pa.array([str(value) for value in values], pa.string())
