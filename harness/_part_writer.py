"""Rows in, complete part files out: buffered by row group, fsynced and renamed part by part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from harness._files import sha256_file, sync_folder
from harness._parts import FACTS, STORED, Layout, PartFile, Rows, locate, part_files, write_errors
from harness.errors import StorageError
from harness.types import Block, LogitsDtype, Part

NUMBERS = ("index", "target", *FACTS)


class PartWriter:
    """Writes the parts of a recording; every recorder uses it. Not thread-safe.

    A part is on disk, whole, once it has `part_rows` rows or the writer is closed; a kill loses the rows after the
    last whole part, and only those. Rows that the folder's parts already have when the writer is made are skipped: a
    resumed recorder may make an interrupted request again as a whole. Memory: one row group (8 MB of logits, or one
    row), whatever is written.

    `hidden_size` adds hidden states, in `hidden_dtype` (default: the logits' dtype). Writers of one folder at the same
    time need different prefixes ("part", "part-...").
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        logits_dtype: LogitsDtype,
        hidden_size: int | None = None,
        hidden_dtype: LogitsDtype | None = None,
        prefix: str = "part",
        part_rows: int = 512,
    ) -> None:
        if logits_dtype not in STORED:
            raise StorageError(f"logits dtype {logits_dtype!r} cannot be recorded: expected one of {', '.join(STORED)}")
        if vocab_size < 1 or part_rows < 1:
            raise StorageError(f"vocab_size {vocab_size} and part_rows {part_rows}: both must be at least 1")
        if prefix != "part" and not prefix.startswith("part-"):
            raise StorageError(f"prefix {prefix!r}: expected 'part' or 'part-...', or no reader would find the files")
        self._folder = folder
        self._prefix = prefix
        self._part_rows = part_rows
        self._layout = Layout(
            vocab_size=vocab_size,
            logits_dtype=logits_dtype,
            hidden_size=hidden_size or 0,
            hidden_dtype=(hidden_dtype or logits_dtype) if hidden_size else "",
        )
        there, _ = locate([PartFile(path) for path in part_files(folder)])
        self._there = {key: places["index"] for key, places in there.items()}
        self._parts: list[Part] = []
        self._open: _OpenPart | None = None
        self._failed = ""
        self._buffer = _Buffer(self._layout, min(self._layout.group_rows, part_rows))

    def append(self, block: Block) -> None:
        """Take the rows of a block, in order; they are copied, and written whenever a row group is full.

        Raises StorageError if the block does not fit the recording, or if the disk refuses: the open part is then
        removed, and so is every later append refused.
        """
        if self._failed:
            raise StorageError(self._failed)
        self._require_fit(block)
        there = self._there.get((block.segment, block.phase))
        rows = np.arange(len(block.indices)) if there is None else np.flatnonzero(~np.isin(block.indices, there))
        while len(rows):
            space = min(self._buffer.space, self._part_rows - self._pending)
            self._buffer.take(block, rows[:space])
            rows = rows[space:]
            if not self._buffer.space or self._pending == self._part_rows:
                self._flush()
            if self._pending == self._part_rows:
                self._close_part()

    def close(self) -> tuple[Part, ...]:
        """Write what is buffered, close the open part and return all parts of this writer. May be called again.

        Raises StorageError if the disk refuses. After a failed `append` it only returns the parts that are whole.
        """
        if not self._failed and self._pending:
            self._flush()
            self._close_part()
        return tuple(self._parts)

    @property
    def _pending(self) -> int:
        """Rows taken since the last whole part."""
        return self._buffer.rows + (self._open.rows if self._open else 0)

    def _flush(self) -> None:
        if not self._buffer.rows:
            return
        table = self._buffer.contents().table(self._layout)
        path = self._open.path if self._open else self._next_path()
        with self._failing(path):
            if self._open is None:
                self._open = _OpenPart(path, self._layout)
            self._open.write(table)
        self._buffer.rows = 0

    def _close_part(self) -> None:
        part = self._open
        assert part is not None  # only called after a flush
        with self._failing(part.path):
            part.finish()
            self._parts.append(Part(file=part.path.name, rows=part.rows, sha256=sha256_file(part.path)))
        self._open = None

    def _next_path(self) -> Path:
        numbers = [p.stem.removeprefix(f"{self._prefix}-") for p in self._folder.glob(f"{self._prefix}-*.parquet")]
        number = max((int(n) for n in numbers if n.isdecimal()), default=-1) + 1
        return self._folder / f"{self._prefix}-{number:05d}.parquet"

    @contextmanager
    def _failing(self, path: Path) -> Iterator[None]:
        """An error of the body ends this writer: the open part is removed, the whole ones stay."""
        pending = self._pending
        try:
            with write_errors(path):
                yield
        except BaseException as error:
            if self._open is not None:
                self._open.abandon()
                self._open = None
            lost = f"{pending} rows since the last whole part are lost; the parts before it are kept: resume"
            self._failed = f"{error}; {lost}"
            if isinstance(error, StorageError):
                raise StorageError(self._failed) from error
            raise

    def _require_fit(self, block: Block) -> None:
        layout, count = self._layout, len(block.indices)
        where = f"block of {block.segment!r}, {block.phase}"
        expected: dict[str, tuple[NDArray[Any] | None, tuple[int, int], str]] = {
            "logits": (block.logits, (count, layout.vocab_size), layout.logits_dtype)
        }
        if layout.hidden_size or block.hidden is not None:
            expected["hidden"] = (block.hidden, (count, layout.hidden_size), layout.hidden_dtype)
        for name, (array, shape, dtype) in expected.items():
            if array is None or array.shape != shape or array.dtype != STORED.get(dtype):
                found = "nothing" if array is None else f"{array.shape} {array.dtype}"
                wanted = f"{shape} {np.dtype(STORED[dtype])} ({dtype})" if dtype else "none, as none were announced"
                raise StorageError(f"{where}: {name} are {found}, expected {wanted}")
        if len(block.targets) != count or (count and (block.indices.min() < 0 or (np.diff(block.indices) <= 0).any())):
            raise StorageError(f"{where}: expected ascending indices from 0 on, and one target for each of {count}")


class _OpenPart:
    """A part under its temporary name."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self.rows = 0
        self._temporary = path.with_name(f".{path.name}.tmp")
        # Exclusive: a second writer with the same prefix fails here instead of mixing its rows in.
        self._file = self._temporary.open("xb")
        self._writer = pq.ParquetWriter(
            self._file,
            layout.schema(),
            compression="NONE",  # logits do not compress, and the rest is under 1 %
            use_dictionary=["segment", "phase"],
            write_statistics=["segment", "phase", "index", "target"],
        )

    def write(self, table: Any) -> None:
        self._writer.write_table(table, row_group_size=table.num_rows)
        self.rows += table.num_rows

    def finish(self) -> None:
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.rename(self.path)
        sync_folder(self.path.parent)

    def abandon(self) -> None:
        with suppress(Exception):  # it writes a footer for a file that is lost anyway
            self._writer.close()
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._temporary.unlink()


class _Buffer:
    """Rows of the next row group, copied from blocks."""

    def __init__(self, layout: Layout, capacity: int) -> None:
        self.rows = 0
        self._segment = [""] * capacity
        self._phase = [""] * capacity
        self._numbers = {name: np.empty(capacity, np.int32) for name in NUMBERS}
        self._logits = np.empty((capacity, layout.vocab_size), STORED[layout.logits_dtype])
        self._hidden = (
            np.empty((capacity, layout.hidden_size), STORED[layout.hidden_dtype]) if layout.hidden_size else None
        )

    @property
    def space(self) -> int:
        return len(self._segment) - self.rows

    def take(self, block: Block, rows: NDArray[np.int64]) -> None:
        here = slice(self.rows, self.rows + len(rows))
        self._segment[here] = [block.segment] * len(rows)
        self._phase[here] = [str(block.phase)] * len(rows)
        self._numbers["index"][here] = block.indices[rows]
        self._numbers["target"][here] = block.targets[rows]
        for name in FACTS:
            self._numbers[name][here] = -1 if block.facts is None else getattr(block.facts, name)[rows]
        self._logits[here] = block.logits[rows]
        if self._hidden is not None and block.hidden is not None:
            self._hidden[here] = block.hidden[rows]
        self.rows += len(rows)

    def contents(self) -> Rows:
        n = self.rows
        return Rows(
            segment=self._segment[:n],
            phase=self._phase[:n],
            numbers={name: values[:n] for name, values in self._numbers.items()},
            logits=self._logits[:n],
            hidden=None if self._hidden is None else self._hidden[:n],
        )
