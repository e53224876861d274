"""A page's figures as PNG and SVG, by matplotlib, without a browser: the same `Figure`, drawn once more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.report.figure import Axis, Figure, Role, Series
from harness.report.plots import COLOURS, new_figure, save_figure
from harness.report.visible import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg")

_BLUE, _RED, _GREEN, _PINK, _ORANGE = COLOURS[:5]
_LOOKS: dict[Role, tuple[str, str]] = {
    "candidate": (_BLUE, "o"),
    "floor": ("#767676", "s"),
    "flip": (_RED, "x"),
    "predicted": (_GREEN, "D"),
    "detectable": (_PINK, "d"),
    "rest": ("#8aa4b8", "."),
    "one": (_BLUE, "o"),
    "two": (_RED, "s"),
    "three": (_GREEN, "D"),
    "four": (_PINK, "^"),
    "five": (_ORANGE, "x"),
}
_MANY = 400  # points from which markers are small
_MOST_COLUMNS = 4


def export_figures(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Write every figure as FOLDER/ID.png and FOLDER/ID.svg. Raises StorageError; UsageError without matplotlib."""
    return [path for figure in figures for path in _export(figure, folder)]


def _export(figure: Figure, folder: Path) -> list[Path]:
    columns = min(len(figure.panels), _MOST_COLUMNS)
    rows = math.ceil(len(figure.panels) / columns)
    categories = max(len(series.y) for panel in figure.panels for series in panel.series)
    inner = 0.9 + 0.22 * categories if figure.values_along_x else 3.6
    drawing, axes = new_figure(rows, columns, width=max(7.0, 3.4 * columns), height=0.9 + inner * rows)
    for place, (axis, panel) in enumerate(zip(axes, figure.panels, strict=False)):
        if place:
            axis.sharex(axes[0])
            axis.sharey(axes[0])
        _dress(axis, figure, leftmost=place % columns == 0)
        for series in panel.series:
            _draw(axis, series, across=figure.values_along_x)
        _ticks(axis, figure)
        axis.set_title(visible(panel.title, 60), fontsize=9, loc="left")
    for axis in axes[len(figure.panels) :]:
        axis.set_axis_off()
    axes[0].legend(fontsize=7)
    drawing.suptitle(figure.title, fontsize=11)
    return [save_figure(drawing, folder / f"{figure.id}.{kind}") for kind in FORMATS]


def _draw(axis: Axes, series: Series, *, across: bool) -> None:
    colour, marker = _LOOKS[series.role]
    x, y = (_shown(values) for values in (series.x, series.y))
    look: dict[str, Any] = {
        "color": colour,
        "marker": marker if series.points else "",
        "markersize": 2 if len(x) > _MANY else 4,
        "linestyle": "" if not series.line else "--" if series.dashed else "-",
        "linewidth": 1.2,
        "label": visible(series.name, 40),
    }
    if series.low is None or series.high is None:
        axis.plot(x, y, **look)
        return
    values = np.asarray(x if across else y, np.float64)
    reach = np.nan_to_num(np.abs([values - series.low, series.high - values]), nan=0.0, posinf=0.0)
    axis.errorbar(x, y, **{"xerr" if across else "yerr": reach}, capsize=2, **look)


def _shown(values: Any) -> Any:
    return [visible(value, 40) for value in values] if isinstance(values, tuple) else values


def _dress(axis: Axes, figure: Figure, *, leftmost: bool) -> None:
    for which, described in (("x", figure.x), ("y", figure.y)):
        _scale(axis, which, described)
    if figure.limit is not None:
        line = axis.axvline if figure.values_along_x else axis.axhline
        line(1.0, color="black", linewidth=0.8, linestyle=":")
        line(
            figure.limit, color="black", linewidth=1.0, linestyle="--", label=f"{figure.limit_name} {figure.limit:.3g}"
        )
    axis.grid(alpha=0.25)
    if not leftmost:
        axis.set_ylabel("")
        axis.tick_params(axis="y", labelleft=False)


def _scale(axis: Axes, which: str, described: Axis) -> None:
    getattr(axis, f"set_{which}label")("" if described.scale == "category" else described.label, fontsize=8)
    axis.tick_params(axis="both", labelsize=7)
    if described.scale == "log":
        getattr(axis, f"set_{which}scale")("log")  # before the data: matplotlib then masks what cannot be shown
    elif described.scale == "category" and which == "y":
        if not axis.yaxis_inverted():
            axis.invert_yaxis()
    elif described.scale == "category":
        axis.tick_params(axis="x", labelrotation=30)


def _ticks(axis: Axes, figure: Figure) -> None:
    """Decades as plain numbers, with 2 and 5 between them where few decades are shown."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for which, described in (("x", figure.x), ("y", figure.y)):
        if described.scale == "log":
            low, high = getattr(axis, f"get_{which}lim")()
            ticks = getattr(axis, f"{which}axis")
            ticks.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,), numticks=9))
            ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ticks.set_minor_formatter(NullFormatter())
