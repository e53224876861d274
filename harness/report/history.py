"""Past comparisons in the order of their candidates: drift by small steps, each of which passed, is seen here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import StorageError
from harness.report.figure import SEVERAL, Axis, Figure, Floats, Panel, Series, shown_log
from harness.report.page import render
from harness.report.saved import load_verdict

VERDICT_FILE = "verdict.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A statistic with its 95 % interval. NaN is unknown."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """One past comparison. Texts are as recorded, hostile or not: escape them."""

    name: str
    created: str  # when the candidate was recorded, ISO 8601
    build: str
    state: str
    word: str
    corpus: str
    reference: str  # id of its rows
    mean: Value  # KL20, nats
    ratio: Value  # to the floor
    flips: float  # share of positions


def read_past(path: Path) -> Past:
    """One comparison of `compare --save DIR` (its folder) or `compare --json` (the file). Raises StorageError."""
    file = path / VERDICT_FILE if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise StorageError(f"{path} holds no {VERDICT_FILE}: name a folder that `compare --save` wrote, or a JSON file")
    found = load_verdict(file)
    if "candidate" not in found:
        raise StorageError(f"{file} holds no comparison ({found['verdict']['word']}): it has no place in a history")
    try:
        return _past(path, found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{file} is a damaged verdict: {error!r}; compare again") from error


def history_html(past: Sequence[Past]) -> str:
    """The page, oldest candidate first."""
    ordered = _ordered(past)
    groups = _groups(ordered)
    return render(
        "history.html.j2",
        title=f"History of {len(ordered)} comparisons",
        figures=history_figures(ordered),
        groups=tuple((name, tuple(group), _since(group)) for name, group in groups.items()),
    )


def history_figures(past: Sequence[Past]) -> tuple[Figure, ...]:
    """KL, ratio and flips along the candidates, a panel for each corpus and reference."""
    groups = _groups(_ordered(past))
    made = (
        _figure("history-kl", "KL against the ground truth", "mean KL20, nats", groups, lambda one: one.mean),
        _figure("history-ratio", "Ratio to the floor", "ratio to the floor", groups, lambda one: one.ratio),
        _figure(
            "history-flips",
            "Flips",
            "share of positions whose top id differs",
            groups,
            lambda one: Value(value=one.flips, low=math.nan, high=math.nan),
            scale="linear",
        ),
    )
    return tuple(figure for figure in made if figure.points)


def _figure(
    name: str, title: str, label: str, groups: Mapping[str, Sequence[Past]], of: Any, scale: Any = "log"
) -> Figure:
    def series(group: Sequence[Past]) -> Series:
        values = [of(one) for one in group]
        shown = (lambda v: shown_log(v)) if scale == "log" else (lambda v: v)
        return Series(
            name="candidates",
            role=SEVERAL[0],
            x=tuple(one.name for one in group),
            y=shown(_floats(v.value for v in values)),
            low=_floats(v.low for v in values),
            high=_floats(v.high for v in values),
            line=True,
        )

    known = {n: g for n, g in groups.items() if any(not math.isnan(of(one).value) for one in g)}
    return Figure(
        id=name,
        title=title,
        reading="Release by release against the same reference on the same corpus, with 95 % intervals where known. "
        "Steps too small for any one comparison add up here.",
        x=Axis(label="candidate, oldest first", scale="category"),
        y=Axis(label=label, scale=scale),
        panels=tuple(Panel(title=n if len(known) > 1 else "", series=(series(g),)) for n, g in known.items()),
    )


def _floats(values: Any) -> Floats:
    return np.array(list(values), np.float64)


def _ordered(past: Sequence[Past]) -> list[Past]:
    return sorted(past, key=lambda one: (one.created, one.name))


def _groups(ordered: Sequence[Past]) -> dict[str, list[Past]]:
    """By corpus and reference: numbers of two of them have no common scale."""
    groups: dict[str, list[Past]] = {}
    for one in ordered:
        groups.setdefault(f"corpus {one.corpus}, reference {one.reference}", []).append(one)
    return groups


def _since(group: Sequence[Past]) -> float:
    """Mean KL20 of the newest over that of the oldest; NaN where either is unknown or zero."""
    first, last = group[0].mean.value, group[-1].mean.value
    return last / first if first > 0 and len(group) > 1 else math.nan


def _past(path: Path, found: Mapping[str, Any]) -> Past:
    verdict, candidate, corpus = found["verdict"], found["candidate"], found["corpus"]
    build = candidate["build"]
    overall = {
        (e["metric"], e["statistic"]): e
        for e in verdict["estimates"]
        if not any(v is not None for v in e["stratum"].values())
    }
    return Past(
        name=path.name if path.is_dir() else path.stem,
        created=str(candidate["created"]),
        build=f"{build['engine']} {build['engine_version']}, {build['dtype']}",
        state=str(verdict["status"] or "none").lower(),
        word=str(verdict["word"]),
        corpus=f"{corpus['name']} {str(corpus['sha256'])[:12]}",
        reference=str(found["reference"]["id"])[:12],
        mean=_value(overall.get(("kl20", "mean"))),
        ratio=_value(overall.get(("kl20", "ratio_to_floor"))),
        flips=_value(overall.get(("flip", "rate"))).value,
    )


def _value(estimate: Mapping[str, Any] | None) -> Value:
    found = estimate or {}
    return Value(**{name: _number(found.get(name)) for name in ("value", "low", "high")})


def _number(value: Any) -> float:
    """JSON's null is NaN, and infinities are words."""
    return math.nan if value is None else float(value)
