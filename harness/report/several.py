"""Several candidates against one reference as an HTML page: backends or builds side by side, nearest to it first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.report import builds_diff, strata
from harness.report.figure import Figure
from harness.report.figures import several_depths, several_distributions, several_ratios
from harness.report.html import STATE, facts, name_of, perplexity, sides
from harness.report.page import render
from harness.types import OVERALL, Comparison, Estimate, Stratum, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A candidate with its verdict."""

    comparison: Comparison
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Unjudged:
    """A candidate that could not be compared, and why. Both as given, hostile or not: escape them."""

    path: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One candidate as the table shows it. NaN is unknown."""

    name: str
    state: str
    word: str
    ratio: Estimate | None
    mean: float
    p99: float
    flips: float  # share of positions
    flip_margin: float  # logits
    perplexity: float  # candidate's over the reference's
    worst: str  # the stratum with the largest ratio
    worst_ratio: float
    reason: str


def several_html(judged: Sequence[Judged], unjudged: Sequence[Unjudged] = ()) -> str:
    """The page. Candidates are sorted by their ratio to the floor (without one by mean KL20), smallest first."""
    named = ranked(judged)
    first = next((one.comparison for one in named.values()), None)
    return render(
        "several.html.j2",
        title=f"{len(judged) + len(unjudged)} candidates",
        figures=several_figures(named),
        lines=tuple(_line(name, one) for name, one in named.items()),
        unjudged=tuple(unjudged),
        with_floor=first is not None and first.floor is not None,
        facts=facts(first) if first is not None else (),
        sides=sides(first)[1:] if first is not None else (),
        builds=builds_diff.diff({name: one.comparison.candidate.manifest.build for name, one in named.items()}),
    )


def ranked(judged: Sequence[Judged]) -> dict[str, Judged]:
    """By the name each goes by, smallest ratio to the floor first; those without one last, by mean KL20."""
    inside = sorted(judged, key=lambda one: _rank(one.verdict))
    return dict(zip(_names(inside), inside, strict=True))


def several_figures(named: dict[str, Judged]) -> tuple[Figure, ...]:
    """Small multiples, a panel for each candidate; empty without any."""
    if not named:
        return ()
    made = (
        several_ratios({name: one.verdict for name, one in named.items()}),
        several_depths({name: (one.comparison, one.verdict) for name, one in named.items()}),
        several_distributions({name: one.comparison for name, one in named.items()}),
    )
    return tuple(figure for figure in made if figure.points)


def _rank(verdict: Verdict) -> tuple[bool, float, bool, float]:
    """Unknown last: those without a ratio after those with one, by mean KL20."""
    ratio, mean = (strata.value(verdict, OVERALL, name) for name in ("ratio_to_floor", "mean"))
    return math.isnan(ratio), 0.0 if math.isnan(ratio) else ratio, math.isnan(mean), mean


def _names(ranked: Sequence[Judged]) -> list[str]:
    """The folders' names; whole paths where two would be called alike."""
    short = [name_of(one.comparison) for one in ranked]
    return [
        name if short.count(name) == 1 else one.comparison.candidate.path
        for name, one in zip(short, ranked, strict=True)
    ]


def _line(name: str, one: Judged) -> Line:
    verdict = one.verdict
    ratios = {s: v for s in strata.strata(verdict) if not math.isnan(v := strata.value(verdict, s, "ratio_to_floor"))}
    worst: Stratum | None = max(ratios, key=lambda s: ratios[s], default=None)
    scale = perplexity(verdict).get("candidate_over_reference")
    return Line(
        name=name,
        state=STATE[verdict.status],
        word=verdict.word,
        ratio=strata.estimate(verdict, OVERALL, "ratio_to_floor"),
        mean=strata.value(verdict, OVERALL, "mean"),
        p99=strata.value(verdict, OVERALL, "p99"),
        flips=strata.value(verdict, OVERALL, "rate", "flip"),
        flip_margin=strata.largest_flip_margin(one.comparison, OVERALL),
        perplexity=scale.value if scale else math.nan,
        worst="" if worst is None else str(worst),
        worst_ratio=math.nan if worst is None else ratios[worst],
        reason=verdict.reasons[0] if verdict.reasons else "",
    )
