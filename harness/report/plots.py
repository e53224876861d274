"""Plots as files, by matplotlib, without a display. The functions draw the numbers they are given and compute none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.calibration.calibrate import Result
from harness.errors import StorageError, UsageError
from harness.types import OVERALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Apart for every kind of colour vision (Okabe and Ito)."""

KINDS = ("stock", "benign", "near-noise", "subtle", "obvious", "fault")


def new_figure(
    rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 4.5
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row. Raises UsageError without matplotlib."""
    try:
        from matplotlib.figure import Figure as Drawing
    except ImportError as error:
        raise UsageError("plots need matplotlib: pip install matplotlib") from error
    figure = Drawing(figsize=(width, height), layout="constrained")
    axes: Any = figure.subplots(rows, columns, squeeze=False)
    return figure, [axis for row in axes for axis in row]


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure as SVG or PNG, by its name; the same numbers give the same bytes. Raises StorageError."""
    import matplotlib

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": "logitgate", "svg.fonttype": "none"}):
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error
    return path


def plot_ratios(results: Sequence[Result], path: Path) -> Path:
    """Every build's ratio to the floor with the bounds that decided, by what it is, and the limit as a line."""
    held = []
    for result in results:
        check = next((c for c in result.checks if c.statistic == "ratio_to_floor" and c.stratum == OVERALL), None)
        if check is not None and not result.error and result.dtype != "float32":
            held.append((_kind(result), check, result.name))
    held.sort(key=lambda item: (KINDS.index(item[0]), item[1].value))
    figure, (axis,) = new_figure(height=2.0 + 0.16 * len(held))
    for place, (kind, check, _) in enumerate(held):
        colour = COLOURS[KINDS.index(kind)]
        axis.plot([max(check.low, 1e-3), min(check.high, 1e6)], [place, place], color=colour, linewidth=1)
        axis.plot([check.value], [place], marker="o", markersize=4, color=colour)
    axis.set_yticks(range(len(held)), [name for _, _, name in held], fontsize=6)
    for limit in sorted({check.limit for _, check, _ in held}):
        axis.axvline(limit, color="black", linestyle="--", linewidth=1)
    axis.set_xscale("log")
    axis.set_xlabel("mean KL20 over the floor's, all rows; lines: the bounds that decide; dashed: the limit")
    for kind in dict.fromkeys(kind for kind, _, _ in held):
        axis.plot([], [], marker="o", linestyle="", color=COLOURS[KINDS.index(kind)], label=kind)
    if held:
        axis.legend(loc="lower right", fontsize=8)
    return save_figure(figure, path)


def plot_detection(caught: Mapping[str, Mapping[str, tuple[int, int]]], path: Path) -> Path:
    """Share of faults caught, by method and severity: `caught[method][severity]` is (so many, of so many)."""
    severities = list(dict.fromkeys(s for row in caught.values() for s in row))
    figure, (axis,) = new_figure(height=4.0)
    for number, severity in enumerate(severities):
        shares = [row.get(severity, (0, 0)) for row in caught.values()]
        places = [place + 0.25 * (number - (len(severities) - 1) / 2) for place in range(len(caught))]
        axis.barh(places, [a / b if b else 0.0 for a, b in shares], height=0.22, color=COLOURS[number], label=severity)
        for place, (a, b) in zip(places, shares, strict=True):
            axis.text(0.01, place, f"{a}/{b}", va="center", fontsize=6, color="white" if a else "black")
    axis.set_yticks(range(len(caught)), list(caught))
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of faults caught, no correct build raising an alarm")
    axis.legend(loc="lower right", fontsize=8)
    return save_figure(figure, path)


def _kind(result: Result) -> str:
    if result.kind != "fault":
        return result.kind
    return result.severity if result.severity in KINDS else "fault"  # a user's own patch need not say
