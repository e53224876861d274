"""Part files: the rows of a recording as Parquet. Written row group by row group, read back one at a time.

Legend: P positions, V vocabulary, H hidden size, K kept top ids, R rows of a row group.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from harness.errors import StorageError
from harness.types import ITEM_BYTES, LogitsDtype, Phase, StepFacts

GROUP_BYTES = 8 << 20
"""Bytes of logits in a row group: what a reader holds at once, and what a writer buffers."""

TOP = 64
"""Top ids kept beside each row (fewer if the vocabulary is smaller)."""

FACTS = tuple(field.name for field in fields(StepFacts))
KEYS = ("segment", "phase", "index", "target", "digest")
STORED = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32, "float64": np.float64}

_METADATA = b"logitgate"
_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space or raise the quota",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "check the folder's permissions",
    errno.EPERM: "check the folder's permissions",
    errno.ENOENT: "the folder was removed, or another process cleared it",
}


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn the file system's refusals into StorageErrors with the file, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check the disk")
        raise StorageError(f"could not write {path}: {error.strerror or error}; {advice}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The shape of every row of a part."""

    vocab_size: int
    logits_dtype: LogitsDtype
    hidden_size: int = 0  # 0: no hidden states
    hidden_dtype: str = ""  # "" without hidden states

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's logits."""
        return self.vocab_size * ITEM_BYTES[self.logits_dtype]

    @property
    def group_rows(self) -> int:
        """Rows of a full row group, at least 1."""
        return max(1, GROUP_BYTES // self.row_bytes)

    def schema(self) -> Any:
        """The Parquet schema: no column has nulls."""
        top = min(TOP, self.vocab_size)
        columns = [
            ("segment", pa.string()),
            ("phase", pa.string()),
            ("index", pa.int32()),
            ("target", pa.int32()),
            *((name, pa.int32()) for name in FACTS),
            ("lse", pa.float64()),
            ("top_ids", pa.list_(pa.int32(), top)),
            ("top_logits", pa.list_(pa.float32(), top)),
            ("digest", pa.binary(16)),
            ("logits", pa.binary(self.row_bytes)),
        ]
        if self.hidden_size:
            columns.append(("hidden", pa.binary(self.hidden_size * ITEM_BYTES[self.hidden_dtype])))
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])
        return schema.with_metadata({_METADATA: json.dumps(facts, sort_keys=True)})

    @classmethod
    def of(cls, schema: Any, path: Path) -> Self:
        """The layout of an opened file. Raises StorageError if it is not a part of a recording."""
        try:
            layout = cls(**json.loads((schema.metadata or {})[_METADATA]))
            known = schema.equals(layout.schema())
        except (KeyError, TypeError, ValueError):
            known = False
        if not known:
            raise StorageError(
                f"{path} is not a part of a recording: its columns are not a recorder's; move it out of the folder"
            )
        return layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one row group, or waiting to become one."""

    segment: Sequence[str]
    phase: Sequence[str]
    numbers: dict[str, NDArray[np.int32]]  # index, target and the step facts, each [R]
    logits: NDArray[Any]  # [R, V] as stored
    hidden: NDArray[Any] | None  # [R, H] as stored

    def digests(self) -> list[bytes]:
        """blake2b-128 of each row's key, target and bits: what a row is, apart from when and where it was made."""
        keys = zip(self.segment, self.phase, self.numbers["index"], self.numbers["target"], strict=True)
        result = []
        for row, (segment, phase, index, target) in enumerate(keys):
            head = json.dumps([segment, phase, int(index), int(target)]).encode()
            digest = hashlib.blake2b(head, digest_size=16)
            digest.update(self.logits[row].view(np.uint8))
            if self.hidden is not None:
                digest.update(self.hidden[row].view(np.uint8))
            result.append(digest.digest())
        return result

    def table(self, layout: Layout) -> Any:
        """The rows as an Arrow table; the big columns are not copied."""
        from harness.metrics import row_summary

        # One thread: this runs beside an engine that uses all processors.
        lse, top_ids, top_logits = row_summary(self.logits, layout.logits_dtype, TOP, threads=1)
        schema = layout.schema()
        columns = {
            "segment": pa.array(self.segment, pa.string()),
            "phase": pa.array(self.phase, pa.string()),
            **{name: pa.array(values) for name, values in self.numbers.items()},
            "lse": pa.array(lse),
            "top_ids": pa.FixedSizeListArray.from_arrays(pa.array(top_ids.ravel()), top_ids.shape[1]),
            "top_logits": pa.FixedSizeListArray.from_arrays(pa.array(top_logits.ravel()), top_logits.shape[1]),
            "digest": pa.array(self.digests(), pa.binary(16)),
            "logits": _to_binary(self.logits),
        }
        if self.hidden is not None:
            columns["hidden"] = _to_binary(self.hidden)
        return pa.table([columns[name] for name in schema.names], schema=schema)


class PartFile:
    """One complete part, opened for reading. Raises StorageError if it is truncated or not a part of a recording."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._readable():
            file = pq.ParquetFile(path)
            self._metadata = file.metadata
            schema = file.schema_arrow
            file.close()
        self.layout = Layout.of(schema, path)
        self.groups = [self._metadata.row_group(g).num_rows for g in range(self._metadata.num_row_groups)]

    @property
    def rows(self) -> int:
        """Rows of the part."""
        return sum(self.groups)

    def keys(self) -> dict[str, list[Any]]:
        """The columns that say which row is which, without any logits."""
        with self._readable(), pq.ParquetFile(self.path, metadata=self._metadata) as file:
            table = file.read(columns=list(KEYS))
            return {name: table.column(name).to_pylist() for name in KEYS}

    def group(self, number: int) -> Rows:
        """The rows of one row group. Opens the file anew, so any number of threads may read at once."""
        columns = [
            "segment",
            "phase",
            "index",
            "target",
            *FACTS,
            "logits",
            *(["hidden"] if self.layout.hidden_size else []),
        ]
        with self._readable(), pq.ParquetFile(self.path, metadata=self._metadata) as file:
            table = file.read_row_group(number, columns=columns, use_threads=False).combine_chunks()
        return Rows(
            segment=table.column("segment").to_pylist(),
            phase=table.column("phase").to_pylist(),
            numbers={name: table.column(name).to_numpy() for name in ("index", "target", *FACTS)},
            logits=_from_binary(table, "logits", self.layout.logits_dtype),
            hidden=_from_binary(table, "hidden", self.layout.hidden_dtype) if self.layout.hidden_size else None,
        )

    def tops(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The kept top ids of a row group and their logits, each [R, K], without reading any row."""
        names = ["top_ids", "top_logits"]
        with self._readable(), pq.ParquetFile(self.path, metadata=self._metadata) as file:
            table = file.read_row_group(number, columns=names, use_threads=False).combine_chunks()
        ids, logits = (table.column(name).chunk(0).flatten().to_numpy().reshape(len(table), -1) for name in names)
        return ids, logits

    def require_digests(self) -> None:
        """Hold each row against its digest. Raises StorageError naming the first row that differs."""
        stored = iter(self.keys()["digest"])
        for number in range(len(self.groups)):
            rows = self.group(number)
            for row, digest in enumerate(rows.digests()):
                if digest != next(stored):
                    raise StorageError(
                        f"{self.path} is damaged or altered: the row of {rows.segment[row]}, {rows.phase[row]}, index "
                        f"{rows.numbers['index'][row]} does not match its digest; delete that file and resume"
                    )

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            if not self.path.exists():
                raise StorageError(f"{self.path} is missing: record again, or resume") from error
            raise StorageError(
                f"{self.path} is not readable ({str(error).splitlines()[0][:160]}): it is truncated, damaged or not "
                "Parquet; delete that file and resume"
            ) from error


def part_files(folder: Path) -> list[Path]:
    """The complete parts of a folder, by name."""
    return sorted(folder.glob("part-*.parquet"))


LOCATION = np.dtype([("index", "i8"), ("target", "i4"), ("part", "i4"), ("group", "i4"), ("row", "i4")])

Places = dict[tuple[str, Phase], NDArray[Any]]
"""Where the rows of a segment and phase are: LOCATION records, ascending in index. A duplicate is there twice."""


def locate(parts: Sequence[PartFile]) -> tuple[Places, list[bytes]]:
    """Where each row of the parts is, and the digests of all rows."""
    found: dict[tuple[str, Phase], list[tuple[int, int, int, int, int]]] = {}
    digests: list[bytes] = []
    for number, part in enumerate(parts):
        keys = part.keys()
        digests += keys["digest"]
        within = [(group, row) for group, rows in enumerate(part.groups) for row in range(rows)]
        columns = (keys["segment"], keys["phase"], keys["index"], keys["target"], within)
        for segment, phase, index, target, (group, row) in zip(*columns, strict=True):
            found.setdefault((segment, _phase(phase, part.path)), []).append((index, target, number, group, row))
    return {key: np.sort(np.array(rows, LOCATION), order=["index", "part"]) for key, rows in found.items()}, digests


def _phase(name: str, path: Path) -> Phase:
    if name not in list(Phase):
        raise StorageError(f"{path}: a row has the phase {name!r}, expected {' or '.join(Phase)}")
    return Phase(name)


def _to_binary(rows: NDArray[Any]) -> Any:
    width = rows.shape[1] * rows.itemsize
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(rows), [None, pa.py_buffer(rows)])


def _from_binary(table: Any, name: str, dtype: str) -> NDArray[Any]:
    array = table.column(name).chunk(0)
    width = array.type.byte_width
    raw = np.frombuffer(array.buffers()[1], np.uint8, len(array) * width, array.offset * width)
    return raw.view(STORED[dtype]).reshape(len(array), -1)
