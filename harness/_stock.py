"""What a folder of parts amounts to: manifest and corpus files, expected and written rows, hashes, the content id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness._files import atomic_file, sha256_file
from harness._parts import LOCATION, PartFile, Places, write_errors
from harness.errors import StorageError
from harness.manifest_json import manifest_from_json, manifest_to_json
from harness.types import Corpus, Gap, Manifest, Part, Phase, Segment

MANIFEST = "recording.json"
CORPUS = "corpus.parquet"


def load_manifest(folder: Path) -> Manifest:
    """The manifest of a recording. Raises StorageError if the folder is missing, not a recording, or it is damaged."""
    path = folder / MANIFEST
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        found = f"has no {MANIFEST}" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
        raise StorageError(f"{folder} is not a recording: it {found}; give the folder that a recorder wrote") from error
    except OSError as error:
        raise StorageError(f"could not read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not JSON ({error}): it is damaged; record again") from error
    manifest = manifest_from_json(value, str(path))
    names = [part.file for part in manifest.parts]
    for name in names:
        # A manifest is data from anywhere: it may not lead a reader out of its folder.
        if "/" in name or "\\" in name or not (name.startswith("part-") and name.endswith(".parquet")):
            raise StorageError(f"{path}: part {name!r} is not a part's file name (part-*.parquet)")
    if len(set(names)) < len(names):
        raise StorageError(f"{path} lists a part twice: it is damaged; record again")
    return manifest


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest atomically. Raises StorageError."""
    text = json.dumps(manifest_to_json(manifest), indent=2, ensure_ascii=False, allow_nan=False)
    path = folder / MANIFEST
    with write_errors(path), atomic_file(path) as file:
        file.write(text.encode("utf-8", "backslashreplace") + b"\n")


def load_own_corpus(folder: Path, manifest: Manifest) -> Corpus:
    """The recording's own copy of the corpus. Raises StorageError if it is missing, damaged or another one."""
    from harness.corpus import load_corpus

    if not (folder / CORPUS).exists():
        raise StorageError(
            f"{folder / CORPUS} is missing, the recording's own copy of its corpus: put the corpus file "
            f"{manifest.corpus_name} {manifest.corpus_sha256[:12]} there, or record again"
        )
    corpus = load_corpus(folder / CORPUS)
    if corpus.sha256 != manifest.corpus_sha256:
        raise StorageError(
            f"{folder / CORPUS} is corpus {corpus.sha256[:12]}, the manifest says {manifest.corpus_sha256[:12]}: "
            "the file was exchanged; record again"
        )
    return corpus


def take_stock(
    folder: Path, manifest: Manifest, corpus: Corpus, parts: Sequence[PartFile], places: Places, reason: str
) -> Manifest:
    """The manifest with the rows that are there and, as gaps, those that are not.

    Raises StorageError for rows that cannot be right: of another shape, unknown to the corpus, there twice, or with a
    target that is not the corpus's.
    """
    for part in parts:
        shape = (part.layout.vocab_size, part.layout.logits_dtype)
        if shape != (manifest.vocab_size, manifest.logits_dtype):
            raise StorageError(
                f"{part.path} has rows of {shape[0]} {shape[1]}, the recording of {manifest.vocab_size} "
                f"{manifest.logits_dtype}: the file is another recording's; move it out of the folder"
            )
    segments = {segment.id for segment in corpus.segments}
    for segment_id, phase in places:
        if segment_id not in segments:
            raise StorageError(f"{folder}: the corpus has no segment {segment_id!r} ({phase} rows); record again")
    gaps = []
    for segment in corpus.segments:
        for phase in Phase:
            place = places.get((segment.id, phase), np.empty(0, LOCATION))
            _require_right(place, segment, phase, folder, parts)
            missing = len(segment.indices(phase)) - len(place)
            if missing:
                gaps.append(Gap(segment=segment.id, phase=phase, rows=missing, reason=reason))
    return replace(manifest, rows_written=sum(len(place) for place in places.values()), gaps=tuple(gaps))


def _require_right(
    place: NDArray[Any], segment: Segment, phase: Phase, folder: Path, parts: Sequence[PartFile]
) -> None:
    index, where = place["index"], f"{folder}: segment {segment.id!r}, {phase}"
    unknown = index[~np.isin(index, segment.indices(phase))]
    if len(unknown):
        raise StorageError(f"{where}: {_some(unknown)} not scored by the corpus; record again")
    again = np.flatnonzero(index[1:] == index[:-1])
    if len(again):
        files = sorted({parts[number].path.name for number in place["part"][np.append(again, again + 1)]})
        raise StorageError(f"{where}: {_some(index[again])} there twice (in {', '.join(files[:3])}); record again")
    wrong = index[place["target"] != segment.targets(index)]
    if len(wrong):
        raise StorageError(f"{where}: targets of {_some(wrong)} not the ids that come next in the corpus; record again")


def _some(indices: NDArray[np.int64]) -> str:
    shown = ", ".join(str(i) for i in indices[:3])
    if len(indices) == 1:
        return f"index {shown} is"
    return f"indices {shown}{f' and {len(indices) - 3} more' if len(indices) > 3 else ''} are"


def content_id(manifest: Manifest, digests: Sequence[bytes]) -> str:
    """Hex sha256 over what was recorded and every row: independent of parts, order and time."""
    head = [manifest.corpus_sha256, manifest.vocab_size, manifest.logits_dtype, str(manifest.level)]
    return hashlib.sha256(json.dumps(head).encode() + b"".join(sorted(digests))).hexdigest()


def hash_files(paths: Sequence[Path]) -> list[str]:
    """Hex sha256 of each file. Raises StorageError for one that is missing or cannot be read."""

    def hash_one(path: Path) -> str:
        try:
            return sha256_file(path)
        except OSError as error:
            raise StorageError(f"could not read {path}: {error.strerror or error}; resume, or record again") from error

    with ThreadPoolExecutor(4) as pool:  # hashing releases the interpreter
        return list(pool.map(hash_one, paths))


def require_intact(folder: Path, parts: Sequence[Part]) -> None:
    """Hold listed parts against their hashes. Raises StorageError naming the first file that differs."""
    for part, found in zip(parts, hash_files([folder / part.file for part in parts]), strict=True):
        if found != part.sha256:
            raise StorageError(
                f"{folder / part.file} is truncated or altered: its sha256 is {found[:12]}, the manifest says "
                f"{part.sha256[:12]}; delete that file and resume, or record again"
            )
