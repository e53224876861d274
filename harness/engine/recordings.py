"""The recordings a server's worker writes: any number of names, folders below the operator's root, one writing thread.

A client's word decides a folder's name and nothing else of a path. Nothing here raises into the engine's step: what
goes wrong with a recording is kept for whoever asks after it, and its later rows are refused.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness._files import atomic_file
from harness._parts import write_errors
from harness._stock import MANIFEST, load_manifest
from harness.engine.wire import Ask
from harness.engine.writer import WriteQueue
from harness.errors import StorageError
from harness.storage import PartWriter
from harness.types import Block, LogitsDtype, Phase, StepFacts

MARK = ".logitgate"
"""File in the root whose random content tells a client whether a folder it sees is the server's."""

MOST_OPEN = 8
"""Recordings open at once. Each buffers one row group (8 MB, or one row); the queue before them is shared."""

_log = logging.getLogger("logitgate")


def prepare_root(root: Path) -> str:
    """Make the root if it is not there, and return its mark. Raises StorageError if it cannot be written."""
    mark = root / MARK
    with write_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        if not mark.exists():
            with atomic_file(mark) as file:
                file.write(secrets.token_hex(16).encode())
        return mark.read_text()


class Recordings:
    """Hands out seats and keeps the count. All calls come from the engine's thread; files are touched by the writer's.

    A client sees a run to its end by asking for `state` until nothing of it is in flight. Parts are closed whenever no
    request of the recording is left, so that what was announced as written is on the disk, whole.
    """

    def __init__(self, root: Path, *, vocab_size: int, logits_dtype: LogitsDtype, prefix: str) -> None:
        self._root = root
        self._shape: dict[str, Any] = {"vocab_size": vocab_size, "logits_dtype": logits_dtype, "prefix": prefix}
        self._queue = WriteQueue()
        self._open: dict[str, _Run] = {}  # oldest first

    def seat(self, ask: Ask) -> _Seat | None:
        """Where a request's rows go; None if they are refused: another run has the name, or all places are taken."""
        run = self._open.get(ask.recording)
        if run is None or run.id != ask.run:
            idle = run is None or run.idle
            if not idle or not self._make_room(ask.recording):
                _log.warning("recording %s: a request is served and not recorded: the name or all places are taken",
                             ask.recording)  # fmt: skip
                return None
            run = self._open[ask.recording] = _Run(id=ask.run, corpus=ask.corpus, folder=self._root / ask.recording)
        run.requests += 1
        return _Seat(self, run)

    def state(self, name: str) -> dict[str, Any]:
        """What became of a recording's latest run: its id, requests and jobs in flight, rows taken, the first error."""
        run = self._open.get(name)
        if run is None:
            return {"run": "", "requests": 0, "pending": 0, "rows": 0, "error": ""}
        return {
            "run": run.id,
            "requests": run.requests,
            "pending": run.given - run.done,
            "rows": run.rows,
            "error": run.error,
        }

    def give(self, run: _Run, job: Callable[[], None], size: int) -> None:
        """Have the writer do something for a run; blocks while too much is in flight."""

        def counted() -> None:
            try:
                if not run.error:
                    job()
            except Exception as error:
                run.error = str(error) or repr(error)
                run.parts = None
                _log.error("recording %s stopped: %s", run.folder.name, run.error)
            finally:
                run.done += 1

        run.given += 1
        self._queue.put(counted, size)

    def write(self, run: _Run, block: Block) -> None:
        """Append the rows that this run has not written yet: a client may send a request again."""
        if run.parts is None:
            self._start(run)
        assert run.parts is not None
        seen = run.seen.setdefault((block.segment, block.phase), set())
        fresh = np.array([int(i) not in seen for i in block.indices], np.bool_)
        run.parts.append(block if fresh.all() else _only(block, fresh))
        seen.update(block.indices.tolist())
        run.rows += int(fresh.sum())

    def _start(self, run: _Run) -> None:
        """Make or take up the folder. Raises StorageError if it is not a recording this run may add to."""
        folder = run.folder
        with write_errors(folder):
            folder.mkdir(exist_ok=True)
            if folder.is_symlink() or not folder.is_dir():
                raise StorageError(
                    f"{folder} is not a folder of its own below the root: remove it, or take another name"
                )
            if (folder / MANIFEST).exists():
                manifest = load_manifest(folder)
                if manifest.complete or manifest.corpus_sha256 != run.corpus:
                    what = "complete" if manifest.complete else "of another corpus"
                    raise StorageError(f"the recording {folder.name} is {what}: take another name")
            for stale in folder.glob(f".{self._shape['prefix']}-*.tmp"):  # a worker that was killed left it
                stale.unlink()
        run.parts = PartWriter(folder, **self._shape)

    def _make_room(self, name: str) -> bool:
        """Forget the idle run of that name, or the oldest idle one if all places are taken."""
        self._open.pop(name, None)
        if len(self._open) < MOST_OPEN:
            return True
        for other, run in self._open.items():
            if run.idle:
                del self._open[other]
                return True
        return False


@dataclass(slots=True)
class _Run:
    """One client's run over one recording."""

    id: str
    corpus: str
    folder: Path
    requests: int = 0  # in flight; engine's thread
    given: int = 0  # jobs; engine's thread
    done: int = 0  # jobs; writer's thread, as all that follows
    rows: int = 0
    error: str = ""
    parts: PartWriter | None = None
    seen: dict[tuple[str, Phase], set[int]] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        return not self.requests and self.given == self.done


class _Seat:
    """Where one request's rows go."""

    def __init__(self, recordings: Recordings, run: _Run) -> None:
        self._recordings, self._run, self._left = recordings, run, False

    def put(self, make_block: Callable[[], Block], size: int) -> None:
        """Queue a block of `size` bytes; blocks while too much is in flight."""
        run = self._run
        if not run.error:
            self._recordings.give(run, lambda: self._recordings.write(run, make_block()), size)

    def leave(self) -> None:
        """No row of this request follows; the last request to leave closes the parts."""
        if self._left:
            return
        self._left = True
        run = self._run
        run.requests -= 1
        if not run.requests:
            self._recordings.give(run, lambda: _close(run), 0)


def _close(run: _Run) -> None:
    if run.parts is not None:
        run.parts.close()


def _only(block: Block, rows: NDArray[np.bool_]) -> Block:
    facts = block.facts
    return replace(
        block,
        indices=block.indices[rows],
        targets=block.targets[rows],
        logits=block.logits[rows],
        hidden=None if block.hidden is None else block.hidden[rows],
        facts=None if facts is None else StepFacts(**{f.name: getattr(facts, f.name)[rows] for f in fields(facts)}),
    )
