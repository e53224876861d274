"""A recording as its readers see it: verified on opening, then rows on demand, one row group in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness._parts import FACTS, LOCATION, STORED, TOP, PartFile, Rows, locate, part_files
from harness._stock import MANIFEST, content_id, load_manifest, load_own_corpus, require_intact, take_stock
from harness.errors import StorageError
from harness.types import Block, Corpus, Manifest, Phase, StepFacts


class Recording:
    """Reads a recording; memory is flat in its size. Threads may share one.

    An interrupted recording can be read too: `manifest.complete` is false and `manifest.gaps` says what is missing.
    With `verify`, every part is hashed (an interrupted recording's against the digests of its rows) and the rows are
    held against the corpus. Without, only row counts and the content id are checked.

    Raises StorageError, naming the file, for a folder that is missing or not a recording, a newer schema, a part that
    is missing, truncated, altered or foreign, and rows that are there twice or unknown to the corpus.
    """

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self.folder = folder
        manifest = load_manifest(folder)
        listed = {part.file: part for part in manifest.parts}
        paths = {path.name: path for path in part_files(folder)}
        _require_same_files(folder, manifest, set(paths))
        if verify:
            require_intact(folder, manifest.parts)
        self._parts = [PartFile(path) for path in paths.values()]
        for part in self._parts:
            if part.path.name in listed and part.rows != listed[part.path.name].rows:
                raise StorageError(
                    f"{part.path} has {part.rows} rows, the manifest says {listed[part.path.name].rows}: it was altered"
                )
            if verify and part.path.name not in listed:
                part.require_digests()
        self._places, digests = locate(self._parts)
        self._group: tuple[tuple[int, int], Rows] | None = None
        self.manifest = manifest  # `corpus` is checked against it
        self.manifest = self._settled(manifest, content_id(manifest, digests), verify=verify)

    @cached_property
    def corpus(self) -> Corpus:
        """The recording's own copy of its corpus. Raises StorageError if it is missing, damaged or another one."""
        return load_own_corpus(self.folder, self.manifest)

    def indices(self, segment: str, phase: Phase) -> NDArray[np.int64]:
        """Indices of the rows that are there, ascending [P]; empty for an unknown segment."""
        return np.array(self._where(segment, phase)["index"], np.int64)

    def read(self, segment: str, phase: Phase, indices: NDArray[np.int64] | None = None) -> Block:
        """The given rows, or all rows of the segment and phase, in ascending order of index.

        Step facts are always there, -1 where unknown. Raises StorageError for rows that the recording does not have.
        """
        place = self._where(segment, phase) if indices is None else self._placed(segment, phase, indices)
        return self._gather(segment, phase, place)

    def tops(
        self, segment: str, phase: Phase, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The top ids kept beside the given rows and their logits, [P, K] each, in ascending order of index.

        Far cheaper than the rows. Equal logits have the lower id first; NaN and infinities rank last and read -inf.
        Raises StorageError for rows that the recording does not have.
        """
        place = self._placed(segment, phase, indices)
        width = min(TOP, self.manifest.vocab_size)
        ids, logits = np.empty((len(place), width), np.int32), np.empty((len(place), width), np.float32)
        for part, group in np.unique(place[["part", "group"]]).tolist():
            here = np.flatnonzero((place["part"] == part) & (place["group"] == group))
            group_ids, group_logits = self._parts[part].tops(group)
            ids[here], logits[here] = group_ids[place["row"][here]], group_logits[place["row"][here]]
        return ids, logits

    def _placed(self, segment: str, phase: Phase, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Where the given rows are, ascending in index. Raises StorageError if any is missing."""
        place = self._where(segment, phase)
        wanted = np.unique(np.asarray(indices, np.int64))
        missing = wanted[~np.isin(wanted, place["index"])]
        if len(missing):
            raise StorageError(
                f"{self.folder} has no row {missing[0]} of segment {segment!r}, {phase} ({len(missing)} of the "
                f"{len(wanted)} rows asked for are missing): record or resume it"
            )
        return np.asarray(place[np.searchsorted(place["index"], wanted)])

    def _where(self, segment: str, phase: Phase) -> NDArray[Any]:
        return self._places.get((segment, phase), np.empty(0, LOCATION))

    def _gather(self, segment: str, phase: Phase, place: NDArray[Any]) -> Block:
        manifest = self.manifest
        logits = np.empty((len(place), manifest.vocab_size), STORED[manifest.logits_dtype])
        facts = {name: np.empty(len(place), np.int32) for name in FACTS}
        hidden = None
        for part, group in np.unique(place[["part", "group"]]).tolist():
            here = np.flatnonzero((place["part"] == part) & (place["group"] == group))
            rows, take = self._rows(part, group), place["row"][here]
            logits[here] = rows.logits[take]
            for name in FACTS:
                facts[name][here] = rows.numbers[name][take]
            if rows.hidden is not None:
                if hidden is None:
                    hidden = np.empty((len(place), rows.hidden.shape[1]), rows.hidden.dtype)
                hidden[here] = rows.hidden[take]
        return Block(
            segment=segment,
            phase=phase,
            indices=np.array(place["index"], np.int64),
            targets=np.array(place["target"], np.int32),
            logits=logits,
            facts=StepFacts(**facts),
            hidden=hidden,
        )

    def _rows(self, part: int, group: int) -> Rows:
        """One row group. The last one is kept: readers that go block by block meet each group several times."""
        kept = self._group
        if kept is None or kept[0] != (part, group):
            kept = self._group = ((part, group), self._parts[part].group(group))
        return kept[1]

    def _settled(self, manifest: Manifest, identity: str, *, verify: bool) -> Manifest:
        """The manifest, true to the rows: an interrupted recording's is completed from what is there."""
        if not manifest.id:
            if manifest.complete:
                raise StorageError(
                    f"{self.folder / MANIFEST} says complete but has no id: it was altered; resume, or record again"
                )
            reason = "the recording was interrupted: resume it"
            stock = take_stock(self.folder, manifest, self.corpus, self._parts, self._places, reason)
            return replace(stock, id=identity)
        if manifest.id != identity:
            raise StorageError(
                f"{self.folder / MANIFEST} says that the rows hash to {manifest.id[:12]}, they hash to "
                f"{identity[:12]}: the recording was altered; record again"
            )
        if verify:
            stock = take_stock(self.folder, manifest, self.corpus, self._parts, self._places, "")
            expected = self.corpus.rows
            said = (manifest.rows_written, manifest.rows_expected, manifest.complete)
            if said != (stock.rows_written, expected, stock.rows_written == expected):
                raise StorageError(
                    f"{self.folder / MANIFEST} says {said[0]} of {said[1]} rows, complete {said[2]}; there are "
                    f"{stock.rows_written} of {expected}: the manifest was altered; record again"
                )
        return manifest


def _require_same_files(folder: Path, manifest: Manifest, there: set[str]) -> None:
    listed = {part.file for part in manifest.parts}
    if listed - there:
        raise StorageError(
            f"{folder / min(listed - there)} is missing, and the manifest lists it: resume, or record again"
        )
    if manifest.id and there - listed:
        raise StorageError(
            f"{folder / min(there - listed)} is not one of the recording's parts: move it out of the folder"
        )
