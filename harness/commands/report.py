"""The command that makes reports of one candidate, of several, or of past comparisons. Part of `cli`, which runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.commands.outputs import EXIT_NO_JUDGEMENT, Outputs, save_text
from harness.errors import LogitgateError, StorageError, UsageError

if TYPE_CHECKING:
    from harness.report.figure import Figure
    from harness.report.several import Judged, Unjudged
    from harness.types import Comparison, Verdict

SEVERITY = (0, 3, 1, EXIT_NO_JUDGEMENT)
"""Exit codes from harmless to worst: of several candidates the worst one is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What to compare with what."""

    reference: Path
    candidates: tuple[Path, ...]
    floors: tuple[Path, ...]
    baseline: Path | None = None


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="REFERENCE CANDIDATE...; or one folder of `compare --save`; with --history any number of those.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path("report.html"),
    floor: Annotated[
        list[Path] | None, typer.Option(help="Recording of a build taken as correct; the first is the denominator.")
    ] = None,
    gates: Annotated[Path | None, typer.Option(help="Limits to use instead of the packaged ones.")] = None,
    history: Annotated[bool, typer.Option("--history", help="Show past comparisons, candidate by candidate.")] = False,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write every figure as PNG and SVG, by matplotlib.")
    ] = None,
) -> int:
    """Write a report: of one candidate, of several side by side, or of past comparisons.

    The exit code is the verdict, of several candidates the worst; 0 for a history.
    """
    from harness.report.export import export_figures

    if history and (floor or gates):
        raise UsageError("--history shows comparisons as they were judged: --floor and --gates have no part in it")
    asked = None if history else _asked(paths, floor)
    recordings = [] if asked is None else [asked.reference, *asked.candidates, *asked.floors]
    with Outputs(report=out).prepared(recordings):
        if asked is None:
            page, drawn, code = _history(paths)
        elif len(asked.candidates) == 1:
            page, drawn, code = _one(asked, gates)
        else:
            page, drawn, code = _several(asked, gates)
        save_text(page, out)
    if figures is not None:
        export_figures(drawn, figures)
    print(f"report written: {out}" + (f"; figures: {figures}" if figures is not None else ""), flush=True)
    return code


def _asked(paths: Sequence[Path], floor: Sequence[Path] | None) -> _Asked:
    if len(paths) > 1:
        return _Asked(reference=paths[0], candidates=tuple(paths[1:]), floors=tuple(floor or ()))
    from harness.report.history import VERDICT_FILE
    from harness.report.saved import load_verdict

    file = paths[0] / VERDICT_FILE
    if not file.is_file():
        raise UsageError(
            f"{paths[0]} alone is no comparison (it holds no {VERDICT_FILE}): name REFERENCE and CANDIDATE, or a "
            "folder that `compare --save` wrote"
        )
    if floor:
        raise UsageError("a saved comparison names its own floor: drop --floor, or name the recordings themselves")
    return _saved(file, load_verdict(file))


def _saved(file: Path, found: dict[str, Any]) -> _Asked:
    """The recordings of a saved comparison, to be read again."""
    try:
        if found["of_itself"]:
            raise UsageError(f"{file} is a self-comparison: make its report with `compare --self DIR --report FILE`")
        floors = [found["floor"]["path"], *found["spread"]] if found["floor"] else []
        return _Asked(
            reference=Path(found["reference"]["path"]),
            candidates=(Path(found["candidate"]["path"]),),
            floors=tuple(map(Path, floors)),
            baseline=Path(found["baseline"]["path"]) if found["baseline"] else None,
        )
    except (KeyError, TypeError) as error:
        raise StorageError(f"{file} does not say what was compared ({error!r}): compare again") from error


def _compared(asked: _Asked, candidate: Path, gates: Path | None) -> tuple[Comparison, Verdict]:
    from harness.compare import compare
    from harness.judge import judge, load_gates
    from harness.report.console import progress_bar

    with progress_bar(f"comparing {candidate.name}, rows") as progress:
        comparison = compare(
            asked.reference,
            candidate,
            floor=asked.floors[0] if asked.floors else None,
            spread=asked.floors[1:],
            baseline=asked.baseline,
            progress=progress,
        )
    return comparison, judge(comparison, load_gates(gates))


def _one(asked: _Asked, gates: Path | None) -> tuple[str, Sequence[Figure], int]:
    from harness.report.figures import figures
    from harness.report.html import BROWSED, report_html
    from harness.worst import describe_positions, notable_rows

    comparison, verdict = _compared(asked, asked.candidates[0], gates)
    details = describe_positions(comparison, notable_rows(comparison, BROWSED))
    return report_html(comparison, verdict, details), figures(comparison, verdict), verdict.exit_code


def _several(asked: _Asked, gates: Path | None) -> tuple[str, Sequence[Figure], int]:
    from harness.report.several import Judged, Unjudged, ranked, several_figures, several_html

    judged: list[Judged] = []
    unjudged: list[Unjudged] = []
    for candidate in asked.candidates:
        try:
            comparison, verdict = _compared(asked, candidate, gates)
            judged.append(Judged(comparison=comparison, verdict=verdict))
        except UsageError:
            raise
        except LogitgateError as error:
            unjudged.append(Unjudged(path=str(candidate), message=str(error)))
    codes = [one.verdict.exit_code for one in judged] + [EXIT_NO_JUDGEMENT] * len(unjudged)
    return several_html(judged, unjudged), several_figures(ranked(judged)), max(codes, key=SEVERITY.index)


def _history(paths: Sequence[Path]) -> tuple[str, Sequence[Figure], int]:
    from harness.report.history import history_figures, history_html, read_past

    past = [read_past(path) for path in paths]
    return history_html(past), history_figures(past), 0
