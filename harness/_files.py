"""Files that are complete or absent, and their hashes."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file to write that becomes `path` when the block ends without an error; else `path` is as it was.

    Missing folders are made. Written under a hidden temporary name (".NAME.*.tmp"), fsynced, renamed. Raises OSError,
    for a device, pipe or socket before anything is written: the rename would put an ordinary file in its place.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "not an ordinary file but a device, pipe or socket", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # mkstemp makes files only their owner can read
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def clear_place(path: Path) -> None:
    """Make sure that `atomic_file(path)` can begin, and remove what an earlier run left there.

    Missing folders are made. Raises OSError where nothing can be written, or what is there is no ordinary file.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not an ordinary file but a folder, device, pipe or socket", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"):
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable: without this a power cut can lose a name whose bytes are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file, read in small pieces. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
