"""The files a comparison leaves beside its answer. Part of `cli`, which asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import StorageError, UsageError

if TYPE_CHECKING:
    from harness.types import Comparison, Verdict

NO_JUDGEMENT = "COULD NOT JUDGE"
WORST_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where to write what; None: nowhere. Each is named as its option is."""

    positions: Path | None = None
    markdown: Path | None = None
    junit: Path | None = None

    @contextmanager
    def prepared(self, recordings: Iterable[Path]) -> Iterator[None]:
        """Check the places before a long comparison; if the block raises, leave its error there as the answer.

        Files of an earlier run are removed, so that none can be taken for this one's if it is killed. Raises UsageError
        for a place that cannot be written, is named twice, or lies in one of the recordings.
        """
        from harness._files import clear_place

        places = [(f.name, path) for f in fields(self) if (path := getattr(self, f.name)) is not None]
        _require_apart(places, recordings)
        for option, path in places:
            try:
                clear_place(path)
            except OSError as error:
                raise UsageError(f"--{option} {path} cannot be written: {error.strerror}; name another file") from error
        try:
            yield
        except Exception as error:
            with suppress(StorageError):  # what went wrong first is the one to report
                self._explain(str(error))
            raise

    def write(self, comparison: Comparison, verdict: Verdict) -> None:
        """Write what was asked for. Raises StorageError if the disk refuses, or a recording is gone meanwhile."""
        if self.positions is not None:
            from harness.storage import save_positions

            save_positions(comparison.positions, self.positions)
        if self.markdown is not None:
            from harness.report.markdown import to_markdown
            from harness.worst import worst_positions

            _save(to_markdown(comparison, verdict, worst_positions(comparison, WORST_SHOWN)), self.markdown)
        if self.junit is not None:
            from harness.report.junit import to_junit

            _save(to_junit(comparison, verdict), self.junit)

    def _explain(self, message: str) -> None:
        from harness.report import junit, markdown

        if self.markdown is not None:
            _save(markdown.no_judgement(NO_JUDGEMENT, message), self.markdown)
        if self.junit is not None:
            _save(junit.no_judgement(NO_JUDGEMENT, message), self.junit)


def _require_apart(places: Iterable[tuple[str, Path]], recordings: Iterable[Path]) -> None:
    taken: dict[Path, str] = {}
    folders = {folder.resolve(): folder for folder in recordings}
    for option, path in places:
        place = path.resolve()
        if place in taken:
            raise UsageError(f"--{taken[place]} and --{option} both name {path}: give each its own file")
        taken[place] = option
        for folder, given in folders.items():
            if place.is_relative_to(folder):
                raise UsageError(f"--{option} {path} lies in the recording {given}, which stays as it is: name another")


def _save(text: str, path: Path) -> None:
    from harness._files import atomic_file

    try:
        with atomic_file(path) as file:
            file.write(text.encode("utf-8"))
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror}; free some room, or name another file") from error
