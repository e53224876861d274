"""One self-contained page: a template filled, the figures' data embedded, nothing fetched, nothing executed but ours.

All text goes through `visible` and Jinja's escaping; data stands in script elements that are not run, with `<`, `>` and
`&` as escapes; a content security policy allows the two scripts of the page by their hashes and nothing else.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from harness import __version__
from harness.report.figure import Figure, Series, Values, table
from harness.report.visible import visible
from harness.report.where import times
from harness.types import Check, Columns, Estimate
from harness.worst import PositionDetail, TopId

COMPACT_FROM = 200
"""Values from which an array is embedded as 32-bit floats in base64; shorter ones keep every digit."""

STEP_FACTS = {
    "batch_size": "requests in the step",
    "cached_tokens": "tokens from the prefix cache",
    "chunk_distance": "rows into the chunk",
    "block_distance": "rows into the KV block",
}
"""Columns that tell how the engine came to a position, by what a reader sees; -1 is unknown."""

MOST_DETAIL_BYTES = 2_000_000
"""Of a page below 8 MB, 5 of which are the program that draws: what the positions' text may take."""

CONTEXT_CHARACTERS = 200
TOKEN_CHARACTERS = 32


def render(
    template: str,
    *,
    title: str,
    figures: Sequence[Figure],
    positions: Columns | None = None,
    details: Sequence[PositionDetail] = (),
    **context: Any,
) -> str:
    """The page as text, UTF-8 safe.

    Args:
        template: a file name below `assets`.
        title: of the page.
        figures: drawn in this order wherever the template places them.
        positions: columns that the `rows` of the figures' series point into: what a reader sees of any of them.
        details: text of the most notable positions, for those who hover over or browse them; the first of them, if all
            would make the page too large. The template is told how many as `browsable`.
        context: what the template names.
    """
    app = _asset("report.js")
    plotly = _plotly() if figures else ""
    packed, browsable = _packed(details)
    data = {"figures": [figure_data(figure) for figure in figures], "positions": _places(positions)}
    return (
        _environment()
        .get_template(template)
        .render(
            title=title,
            version=__version__,
            policy=_policy([script for script in (plotly, app) if script]),
            css=Markup(_asset("report.css")),
            app=Markup(app),
            plotly=Markup(plotly),
            data=script_json(data),
            details=packed,
            browsable=browsable,
            figures={figure.id: figure for figure in figures},
            **context,
        )
    )


def figure_data(figure: Figure) -> dict[str, Any]:
    """A figure as JSON values: arrays as lists (NaN is null), or from COMPACT_FROM values on as {"f32": base64}."""
    return {
        "id": figure.id,
        "x": {"label": figure.x.label, "scale": figure.x.scale},
        "y": {"label": figure.y.label, "scale": figure.y.scale},
        "limit": _number(figure.limit),
        "limitName": figure.limit_name,
        "panels": [
            {"title": visible(panel.title), "series": [_series_data(series) for series in panel.series]}
            for panel in figure.panels
        ],
    }


def script_json(value: Any) -> Markup:
    """JSON that can stand in a script element: ASCII, and nothing in it can end the element or begin another."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _series_data(series: Series) -> dict[str, Any]:
    return {
        "name": visible(series.name),
        "role": series.role,
        "x": _array(series.x),
        "y": _array(series.y),
        "low": None if series.low is None else _array(series.low),
        "high": None if series.high is None else _array(series.high),
        "line": series.line,
        "points": series.points,
        "dashed": series.dashed,
        "rows": None if series.rows is None else _bytes(series.rows, "<i4"),
    }


def _array(values: Values) -> Any:
    if isinstance(values, tuple):
        return [visible(value) for value in values]
    if len(values) >= COMPACT_FROM:
        return {"f32": _bytes(values, "<f4")}
    return [_number(float(value)) for value in values]


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _bytes(values: NDArray[Any], dtype: str) -> str:
    with np.errstate(over="ignore"):
        return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")


def _places(columns: Columns | None) -> dict[str, Any] | None:
    """Where each position is, a few bytes for each."""
    if columns is None:
        return None
    segments, code = np.unique(np.asarray(columns["segment"]), return_inverse=True)
    return {
        "segments": [visible(str(name), 80) for name in segments],
        "segment": _bytes(code, "<i4"),
        "index": _bytes(np.asarray(columns["index"]), "<i4"),
        "step": _bytes(np.asarray(columns["step"]), "<i4"),
        "facts": [
            (name, _bytes(np.asarray(columns[column]), "<i4"))
            for column, name in STEP_FACTS.items()
            if column in columns
        ],
    }


def _packed(details: Sequence[PositionDetail]) -> tuple[str, int]:
    """Text of the first positions as far as they fit into MOST_DETAIL_BYTES, and how many these are.

    It is gzip in base64: contexts of neighbours overlap, so that they shrink several times.
    """
    items = [_item(one) for one in details]
    kept = len(items)
    while True:
        text = json.dumps(sorted(items[:kept], key=lambda item: item[0]), allow_nan=False, separators=(",", ":"))
        packed = base64.b64encode(gzip.compress(text.encode("ascii"), 6, mtime=0)).decode("ascii")
        if len(packed) <= MOST_DETAIL_BYTES:
            return packed, kept
        kept = kept * MOST_DETAIL_BYTES // (len(packed) + len(packed) // 16)


def _item(one: PositionDetail) -> list[Any]:
    """In the order that the page's script names them."""
    return [
        one.row,
        str(one.phase),
        _number(one.kl20),
        _number(one.margin),
        int(one.flip),
        visible(one.context, CONTEXT_CHARACTERS),
        visible(one.target_text, TOKEN_CHARACTERS),
        _tops(one.top_reference),
        _tops(one.top_candidate),
        visible(one.segment, 80),
        one.index,
        one.step,
    ]


def _tops(tops: Sequence[TopId]) -> list[list[Any]]:
    return [[visible(top.text, TOKEN_CHARACTERS), percent(math.exp(top.logprob)), top.id] for top in tops]


def _policy(scripts: Sequence[str]) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode('ascii')}'" for script in scripts
    )
    return f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {hashes}"


# --------------------------------------------------------------------------- numbers as text


def number(value: float | None) -> str:
    """Three significant digits, thousands separated; "-" where nothing is known."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value and (abs(value) < 1e-2 or abs(value) >= 1e6):
        return f"{value:.2e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{float(f'{value:.3g}'):,.0f}"


def percent(value: float) -> str:
    """A share, two digits after the point where it is small."""
    return "-" if math.isnan(value) else f"{value:.1%}" if value >= 0.1 else f"{value:.2%}"


def interval(estimate: Estimate | Check | None) -> str:
    """Both ends as text (0.87 to 1.28), or nothing where no interval is known."""
    if estimate is None or math.isnan(estimate.low) or math.isnan(estimate.high):
        return ""
    return f"{number(estimate.low)} to {number(estimate.high)}"


def heat(value: float, limit: float | None) -> int:
    """How far above its limit a ratio is, 0 (not above) to 4 (a hundred times), for the colour of a cell."""
    if limit is None or math.isnan(value) or value <= limit:
        return 0
    return min(4, 1 + int(math.log10(value / limit) * 2)) if math.isfinite(value) else 4


# --------------------------------------------------------------------------- the environment


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("harness.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    made.filters |= {
        "number": number,
        "percent": percent,
        "interval": interval,
        "times": times,
        "heat": heat,
        "visible": visible,
        "table": table,
        "exp": math.exp,
    }
    return made


def _shown(value: Any) -> Any:
    """What a template may print: text made visible; what is markup already has gone through here before."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _asset(name: str) -> str:
    return files("harness.report").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    # It stands in a script element; nothing in it may end that.
    return str(get_plotlyjs()).replace("</script", "<\\/script")
