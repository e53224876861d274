"""The engine's own output, kept in a file instead of on the terminal. Its processes inherit it when they start."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class EngineLog:
    """A temporary file that takes what the engine and its workers print. Removed by `discard`, kept after a failure."""

    def __init__(self) -> None:
        self._file, name = tempfile.mkstemp(prefix="logitgate-engine-", suffix=".log")
        self.path = Path(name)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While active, file descriptors 1 and 2 are the log; processes started meanwhile keep them."""
        sys.stdout.flush()
        sys.stderr.flush()
        saved = [(stream, os.dup(stream)) for stream in (1, 2)]
        for stream, _ in saved:
            os.dup2(self._file, stream)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for stream, copy in saved:
                os.dup2(copy, stream)
                os.close(copy)

    def reason(self) -> str:
        """The last error the log names and where the log is, for a message."""
        text = self.path.read_text(errors="replace")
        errors = re.findall(r"\b(\w*(?:Error|Exception): .+)", text)
        told = f"its last error was `{errors[-1].strip()}`; " if errors else ""
        return f"{told}its log is {self.path}"

    def discard(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            os.close(self._file)
            self.path.unlink()
