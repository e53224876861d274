"""What a figure is, before anything draws it: a browser and matplotlib draw the same one.

Shape legend: N points of a series.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Values = Floats | tuple[str, ...]
"""Numbers, or the names of categories."""

Scale = Literal["linear", "log", "category"]

Role = Literal["candidate", "floor", "flip", "predicted", "detectable", "rest", "one", "two", "three", "four", "five"]
"""What a series stands for; the drawer gives it a colour that stays apart from the others for every reader."""

SEVERAL: tuple[Role, ...] = ("one", "two", "three", "four", "five")
"""Roles of series that are of equal rank, in order."""

LEAST_SHOWN = 1e-12
"""Nats: what a logarithmic axis shows zero and smaller values as. The f32 reference itself resolves about 1e-11."""

MOST_TABLE_ROWS = 24
"""Rows a series has at most in the table beside a figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of one thing. NaN is no point; an interval of NaN is not drawn."""

    name: str
    role: Role
    x: Values  # [N]
    y: Values  # [N]
    low: Floats | None = None  # [N] interval along the axis of values
    high: Floats | None = None  # [N]
    line: bool = False  # joined by a line
    points: bool = True
    dashed: bool = False
    rows: NDArray[np.int64] | None = None  # [N] places in the comparison's columns, where points are positions

    def __post_init__(self) -> None:
        """Refuse columns of unequal length: they would draw points that nobody measured."""
        lengths = {len(c) for c in (self.x, self.y, self.low, self.high, self.rows) if c is not None}
        if len(lengths) > 1:
            raise ValueError(f"series {self.name!r} has columns of unequal lengths {sorted(lengths)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot; the panels of a figure share their axes."""

    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What runs along one side, and how."""

    label: str
    scale: Scale = "linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Panels side by side, and a sentence that says how to read them. `limit` is a line across the axis of values."""

    id: str  # a file name, an HTML id
    title: str
    reading: str
    x: Axis
    y: Axis
    panels: tuple[Panel, ...]
    limit: float | None = None
    limit_name: str = "limit"

    @property
    def values_along_x(self) -> bool:
        """Whether the numbers run along x, since y holds categories."""
        return self.y.scale == "category"

    @property
    def points(self) -> int:
        """Points in all panels."""
        return sum(len(series.x) for panel in self.panels for series in panel.series)


def shown_log(values: Floats) -> Floats:
    """Values for a logarithmic axis: what is below LEAST_SHOWN is drawn there, NaN and infinities stay out."""
    wide = np.asarray(values, np.float64)
    return np.where(np.isfinite(wide), np.maximum(wide, LEAST_SHOWN), np.nan)


def table(figure: Figure) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The figure as a table for readers who do not see it: column names and rows.

    Of a long series an even choice is given, its first and last points among it; of positions the largest values.
    """
    panelled = len(figure.panels) > 1
    columns = (*(("panel",) if panelled else ()), "series", figure.x.label, figure.y.label, "interval")
    rows = []
    for panel in figure.panels:
        for series in panel.series:
            for at in _chosen(series):
                low, high = (None if c is None else float(c[at]) for c in (series.low, series.high))
                interval = "" if low is None or high is None or np.isnan(low) else f"{low:.4g} to {high:.4g}"
                cells = (series.name, _cell(series.x, at), _cell(series.y, at), interval)
                rows.append((*((panel.title,) if panelled else ()), *cells))
    return columns, rows


def _chosen(series: Series) -> list[int]:
    count = len(series.x)
    if series.rows is not None and not isinstance(series.y, tuple):
        largest = np.argsort(-np.nan_to_num(series.y, nan=np.inf), kind="stable")
        return [int(i) for i in largest[:MOST_TABLE_ROWS]]
    return [int(i) for i in np.unique(np.linspace(0, count - 1, min(count, MOST_TABLE_ROWS)).round())] if count else []


def _cell(values: Values, at: int) -> str:
    return values[at] if isinstance(values, tuple) else f"{float(values[at]):.4g}"
