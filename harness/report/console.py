"""Where output goes: the result to stdout, progress bars to stderr and to terminals only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Advance = Callable[[int, int], None]
"""Called with (done, all), in whatever unit the work counts."""


def result_console() -> Console:
    """Where a verdict is rendered: stdout, with no colour in a pipe."""
    from rich.console import Console

    return Console(highlight=False)


@contextmanager
def progress_bar(label: str) -> Iterator[Advance | None]:
    """Show a bar while the block runs; yields what moves it, or None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance
