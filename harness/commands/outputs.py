"""The files a comparison leaves beside its answer. Part of `cli`, which asks for them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Self

from harness.errors import StorageError, UsageError

if TYPE_CHECKING:
    from harness.types import Comparison, Verdict

NO_JUDGEMENT = "COULD NOT JUDGE"
EXIT_NO_JUDGEMENT = 4
WORST_SHOWN = 5

SAVED = {
    "positions": "positions.parquet",
    "report": "report.html",
    "markdown": "report.md",
    "junit": "junit.xml",
    "verdict": "verdict.json",
}
"""Files of a saved comparison, by output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where to write what; None: nowhere. Each is named as its option is."""

    positions: Path | None = None
    report: Path | None = None
    markdown: Path | None = None
    junit: Path | None = None
    verdict: Path | None = None

    @classmethod
    def given(cls, save: Path | None, **single: Path | None) -> Self:
        """Each file where its own option says, else in the folder `save`, under its usual name."""
        usual = {} if save is None else {name: save / file for name, file in SAVED.items()}
        return cls(**{name: single.get(name) or usual.get(name) for name in SAVED})

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
                self._explain(str(error), getattr(error, "exit_code", EXIT_NO_JUDGEMENT))
            raise

    def write(self, comparison: Comparison, verdict: Verdict) -> None:
        """Write what was asked for. Raises StorageError if the disk refuses, or a recording is gone meanwhile."""
        if self.positions is not None:
            from harness.storage import save_positions

            save_positions(comparison.positions, self.positions)
        if self.report is not None:
            from harness.report.html import BROWSED, report_html
            from harness.worst import describe_positions, notable_rows

            details = describe_positions(comparison, notable_rows(comparison, BROWSED))
            save_text(report_html(comparison, verdict, details), self.report)
        if self.junit is not None:
            from harness.report.junit import to_junit

            save_text(to_junit(comparison, verdict), self.junit)
        if self.markdown is None and self.verdict is None:
            return
        from harness.worst import worst_positions

        worst = worst_positions(comparison, WORST_SHOWN)
        if self.markdown is not None:
            from harness.report.markdown import to_markdown

            save_text(to_markdown(comparison, verdict, worst), self.markdown)
        if self.verdict is not None:
            from harness.report.json_report import to_json

            save_text(json.dumps(to_json(comparison, verdict, worst), allow_nan=False), self.verdict)

    def _explain(self, message: str, code: int) -> None:
        from harness.report import json_report, junit, markdown

        if self.report is not None:
            from harness.report import html

            save_text(html.no_judgement(NO_JUDGEMENT, message), self.report)
        if self.markdown is not None:
            save_text(markdown.no_judgement(NO_JUDGEMENT, message), self.markdown)
        if self.junit is not None:
            save_text(junit.no_judgement(NO_JUDGEMENT, message), self.junit)
        if self.verdict is not None:
            save_text(json.dumps(json_report.no_judgement(NO_JUDGEMENT, message, code)), self.verdict)


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


def save_text(text: str, path: Path) -> None:
    """Write a whole file or nothing. Raises StorageError if the disk refuses."""
    from harness._files import atomic_file

    try:
        with atomic_file(path) as file:
            file.write(text.encode("utf-8"))
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror}; free some room, or name another file") from error
