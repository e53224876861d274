"""A thread that writes captured rows, behind a queue bounded in bytes.

A full queue blocks the engine step: rows are never dropped. A write error never reaches the engine either; it is
kept, later rows are refused, and whoever finishes the recording is told.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from harness.errors import StorageError
from harness.storage import PartWriter
from harness.types import Block, LogitsDtype, Part

QUEUE_BYTES = 256 << 20
"""Most bytes of rows in flight between the engine and the disk."""


class WriteQueue:
    """Runs jobs in order on one thread. A job must not raise: what it does with an error is its own matter."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[[], None], int]] = deque()
        self._bytes = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="logitgate-writer", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None], size: int) -> None:
        """Queue a job that holds `size` bytes until it has run; blocks while too much is in flight."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes == 0 or self._bytes + size <= QUEUE_BYTES)
            self._queue.append((job, size))
            self._bytes += size
            self._changed.notify_all()

    def close(self) -> None:
        """Run what is queued, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                job, size = self._queue.popleft()
            job()
            del job  # it holds rows
            with self._changed:
                self._bytes -= size
                self._changed.notify_all()


class BackgroundWriter:
    """Writes blocks in order from one thread.

    Blocks are given as functions, so that a copy from a device that is still under way is waited for here and not in
    the engine's step.
    """

    def __init__(self, folder: Path, *, vocab_size: int, logits_dtype: LogitsDtype, prefix: str) -> None:
        self._parts = PartWriter(folder, vocab_size=vocab_size, logits_dtype=logits_dtype, prefix=prefix)
        self._queue = WriteQueue()
        self._error: str | None = None

    def put(self, make_block: Callable[[], Block], size: int) -> None:
        """Queue a block of `size` bytes; blocks while too much is in flight. After an error it returns at once."""
        if self._error is None:
            self._queue.put(lambda: self._write(make_block), size)

    def close(self) -> tuple[Part, ...]:
        """Write what is queued and close the parts. Raises StorageError with the first write error, if any."""
        self._queue.close()
        if self._error is not None:
            raise StorageError(self._error)
        return self._parts.close()

    def _write(self, make_block: Callable[[], Block]) -> None:
        if self._error is not None:
            return
        try:
            self._parts.append(make_block())
        except Exception as error:
            self._error = str(error) or repr(error)
