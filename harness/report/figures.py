"""The figures of one comparison: pure functions from the typed result to what is drawn.

KL is KL(reference || candidate) in nats. Shape legend: P positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from harness.report import strata
from harness.report.figure import SEVERAL, Axis, Figure, Floats, Panel, Role, Series, shown_log
from harness.types import Columns, Comparison, FlipBin, Phase, Stratum, Verdict

CURVE_POINTS = 256
"""Quantiles that a cumulative curve is drawn with."""

STEP_BINS = 24
"""Stretches that the decode steps are cut into."""

LARGEST_MARGIN = 20.0  # logits; larger ones are drawn here

_Lines = Callable[[tuple[Stratum, ...]], tuple[Series, ...]]

_KL = "KL20, nats"
_RATIO = "ratio to the floor"


def figures(comparison: Comparison, verdict: Verdict) -> tuple[Figure, ...]:
    """Every figure that has something to show, in the order a reader wants them."""
    made = (
        ratio_by_stratum(verdict),
        kl_against_depth(comparison, verdict),
        ratio_against_depth(comparison, verdict),
        kl_distribution(comparison),
        along_decode(comparison),
        boundary_distance(comparison),
        margin_against_kl(comparison),
        flip_rate_by_margin(verdict),
        predicted_flips(verdict),
        detection_power(verdict),
    )
    return tuple(figure for figure in made if figure.points)


def ratio_by_stratum(verdict: Verdict) -> Figure:
    """Mean KL over the floor's in every stratum, with its interval and the limit."""
    return Figure(
        id="ratio-by-stratum",
        title="How far from normal, and where",
        reading="Mean KL20 over the floor's at the same positions, with two-sided 95 % intervals. 1 is the normal "
        "difference; what lies right of the limit is worse than any correct build is allowed to be.",
        x=Axis(label="ratio of mean KL20 to the floor", scale="log"),
        y=Axis(label="stratum", scale="category"),
        panels=(Panel(title="", series=(_ratios(verdict),)),),
        limit=strata.ratio_limit(verdict),
    )


def _ratios(verdict: Verdict) -> Series:
    found = [e for s in strata.strata(verdict) if (e := strata.estimate(verdict, s, "ratio_to_floor"))]
    return Series(
        name="candidate",
        role="candidate",
        x=shown_log(_floats(e.value for e in found)),
        y=tuple(str(e.stratum) for e in found),
        low=_floats(e.low for e in found),
        high=_floats(e.high for e in found),
    )


def kl_distribution(comparison: Comparison) -> Figure:
    """Cumulative distribution of KL20 over positions, by kind of text."""
    kept = strata.finite(comparison)
    return Figure(
        id="kl-distribution",
        title="KL distribution by kind of text",
        reading="Share of positions whose KL20 is at most x. A curve shifted right as a whole: every position is a "
        "little worse. Equal curves that part at the top: a few positions are much worse.",
        x=Axis(label=_KL, scale="log"),
        y=Axis(label="share of positions"),
        panels=tuple(
            Panel(title=kind, series=tuple(_cumulative(comparison, kept & (comparison.positions["kind"] == kind))))
            for kind in strata.kinds(comparison.positions)
        ),
    )


def _cumulative(comparison: Comparison, chosen: NDArray[np.bool_]) -> Iterator[Series]:
    named: tuple[tuple[str, Role, Columns | None], ...] = (
        ("floor", "floor", comparison.floor),
        ("candidate", "candidate", comparison.positions),
    )
    if not chosen.any():
        return
    share = np.linspace(0.0, 1.0, min(CURVE_POINTS, int(chosen.sum())))
    for name, role, columns in named:
        if columns is not None:
            at = shown_log(np.asarray(np.quantile(columns["kl20"][chosen], share), np.float64))
            yield Series(name=name, role=role, x=at, y=share, line=True, points=False, dashed=role == "floor")


def kl_against_depth(comparison: Comparison, verdict: Verdict) -> Figure:
    """Median and p99 of KL20 against context depth, of the candidate and of the floor."""
    lines: tuple[tuple[str, Role, str, bool], ...] = (
        ("candidate p99", "candidate", "p99", True),
        ("candidate median", "candidate", "median", False),
        ("floor p99", "floor", "floor_p99", True),
        ("floor median", "floor", "floor_median", False),
    )
    return Figure(
        id="kl-against-depth",
        title="KL against context depth",
        reading="Median and 99th percentile of KL20 per phase, kind and depth. Errors that add up with context "
        "(attention weights rounded towards zero, positions in low precision) climb to the right.",
        x=Axis(label="context depth, tokens", scale="log"),
        y=Axis(label=_KL, scale="log"),
        panels=_depth_panels(
            comparison,
            lambda row: tuple(
                _line(name, role, row, shown_log(_floats(strata.value(verdict, s, statistic) for s in row)), dashed)
                for name, role, statistic, dashed in lines
                if role == "candidate" or comparison.floor is not None
            ),
        ),
    )


def ratio_against_depth(comparison: Comparison, verdict: Verdict) -> Figure:
    """Mean, median and p99 of KL20 over the floor's, against context depth."""

    def over(row: tuple[Stratum, ...], above: str, below: str) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            return _floats(strata.value(verdict, s, above) for s in row) / _floats(
                strata.value(verdict, s, below) for s in row
            )

    def lines(row: tuple[Stratum, ...]) -> tuple[Series, ...]:
        means = [strata.estimate(verdict, s, "ratio_to_floor") for s in row]
        mean = Series(
            name="mean (95 %)",
            role="candidate",
            x=_floats(s.depth or 0 for s in row),
            y=shown_log(_floats(e.value if e else math.nan for e in means)),
            low=_floats(e.low if e else math.nan for e in means),
            high=_floats(e.high if e else math.nan for e in means),
            line=True,
        )
        return (
            mean,
            _line("median", "predicted", row, shown_log(over(row, "median", "floor_median")), True),
            _line("p99", "detectable", row, shown_log(over(row, "p99", "floor_p99")), True),
        )

    return Figure(
        id="ratio-against-depth",
        title="Ratio to the floor against context depth",
        reading="The same as a multiple of the floor's. A flat line: the fault does not depend on the context. "
        "A rising one: it grows with it, so test deeper than you deploy.",
        x=Axis(label="context depth, tokens", scale="log"),
        y=Axis(label=_RATIO, scale="log"),
        panels=_depth_panels(comparison, lines) if comparison.floor is not None else (),
        limit=strata.ratio_limit(verdict),
    )


def along_decode(comparison: Comparison) -> Figure:
    """Mean KL20 along the decode steps, of the candidate and of the floor, by kind."""
    columns, kept = comparison.positions, strata.finite(comparison)
    step = np.asarray(columns["step"])
    edges = np.unique(np.linspace(0, step.max(initial=-1) + 1, STEP_BINS + 1).round())
    panels = []
    for kind in strata.kinds(columns):
        chosen = kept & (step >= 0) & (columns["kind"] == kind)
        if chosen.any():
            panels.append(Panel(title=kind, series=_binned(comparison, chosen, step, edges)))
    return Figure(
        id="along-decode",
        title="KL along the decode steps",
        reading="Mean KL20 of stretches of decode steps. What rounds a state or a cache at every step grows "
        "to the right; the first dozen steps may look healthy.",
        x=Axis(label="decode step"),
        y=Axis(label=f"mean {_KL}", scale="log"),
        panels=tuple(panels),
    )


def boundary_distance(comparison: Comparison) -> Figure:
    """Mean KL20 against the distance from the last prefill chunk and KV block boundary."""
    columns, kept = comparison.positions, strata.finite(comparison)
    panels = []
    for title, name in (("from the chunk's start", "chunk_distance"), ("from the KV block's start", "block_distance")):
        distance = np.asarray(columns.get(name, np.full(len(kept), -1)))
        chosen = kept & (distance >= 0)
        if title.startswith("from the chunk") and Phase.DECODE in strata.phases(columns):
            chosen &= columns["phase"] == str(Phase.PREFILL)  # a decode step is a chunk of its own: always at its start
        if chosen.any() and distance[chosen].max() > 0:
            edges = np.r_[0, 2.0 ** np.arange(1, 20)]
            edges = edges[: int(np.searchsorted(edges, distance[chosen].max(), side="right")) + 1]
            panels.append(Panel(title=title, series=_binned(comparison, chosen, distance, edges, lowest=1.0)))
    return Figure(
        id="boundary-distance",
        title="KL against the distance from a boundary",
        reading="Mean KL20 of rows by their distance from the first row of their prefill chunk, and of their KV cache "
        "block, in stretches that double (the first: 0 and 1). A fault at a boundary stands out at the left.",
        x=Axis(label="rows from the boundary", scale="log"),
        y=Axis(label=f"mean {_KL}", scale="log"),
        panels=tuple(panels),
    )


def _binned(
    comparison: Comparison, chosen: NDArray[np.bool_], along: NDArray[np.int64], edges: Floats, lowest: float = -1.0
) -> tuple[Series, ...]:
    """Means of KL20 over [edge, next edge) of a column; empty stretches are left out."""
    bin_of = np.searchsorted(edges, along[chosen], side="right") - 1
    count = np.bincount(bin_of, minlength=len(edges))
    used = count > 0
    middle = np.bincount(bin_of, weights=along[chosen], minlength=len(edges))[used] / count[used]
    named: tuple[tuple[str, Role, Columns | None], ...] = (
        ("floor", "floor", comparison.floor),
        ("candidate", "candidate", comparison.positions),
    )
    return tuple(
        Series(
            name=name,
            role=role,
            x=np.maximum(middle, lowest),
            y=shown_log(np.bincount(bin_of, weights=held["kl20"][chosen], minlength=len(edges))[used] / count[used]),
            line=True,
            dashed=role == "floor",
        )
        for name, role, held in named
        if held is not None
    )


def margin_against_kl(comparison: Comparison) -> Figure:
    """Every position: the reference's margin against KL20, flips marked."""
    columns, kept = comparison.positions, strata.finite(comparison)
    flip = np.asarray(columns["flip"], np.bool_)
    margin = np.clip(np.asarray(columns["margin"], np.float64), 1e-3, LARGEST_MARGIN)
    groups: list[tuple[str, Role, NDArray[np.bool_]]] = [
        ("no flip", "rest", kept & ~flip),
        ("flip", "flip", kept & flip),
    ]
    series = []
    for name, role, chosen in groups:
        rows = np.flatnonzero(chosen)
        series.append(Series(name=name, role=role, x=margin[rows], y=shown_log(columns["kl20"][rows]), rows=rows))
    return Figure(
        id="margin-against-kl",
        title="Margin against KL, every position",
        reading="The reference's top-1 minus top-2 logit against KL20. Flips at small margins are near-ties and say "
        "nothing about precision; a flip at a margin above 1 is a reason to stop. High KL without a flip is usual: "
        f"flips alone miss it. (Margins outside 0.001 to {LARGEST_MARGIN:g} are drawn at that edge.)",
        x=Axis(label="margin, logits", scale="log"),
        y=Axis(label=_KL, scale="log"),
        panels=(Panel(title="", series=tuple(series)),) if kept.any() else (),
    )


def flip_rate_by_margin(verdict: Verdict) -> Figure:
    """Flip rate by margin bin with its interval, beside the floor's."""
    bins = tuple(b for b in verdict.flip_bins if b.positions)
    names = tuple(map(bin_name, bins))
    series = [
        Series(
            name="candidate (95 %)",
            role="candidate",
            x=names,
            y=_floats(b.candidate / b.positions for b in bins),
            low=_floats(b.rate_low for b in bins),
            high=_floats(b.rate_high for b in bins),
        )
    ]
    if bins and bins[0].floor is not None:
        rates = _floats((b.floor or 0) / b.positions for b in bins)
        series.append(Series(name="floor", role="floor", x=names, y=rates))
    return Figure(
        id="flip-rate",
        title="Flip rate by margin",
        reading="Share of positions whose top id differs, by the reference's margin, with exact 95 % intervals. Noise "
        "flips near-ties; it cannot flip a margin of 1.",
        x=Axis(label="margin, logits", scale="category"),
        y=Axis(label="flip rate"),
        panels=(Panel(title="", series=tuple(series)),) if bins else (),
    )


def predicted_flips(verdict: Verdict) -> Figure:
    """Flips counted against flips expected from the floor's own logit error."""
    bins = tuple(b for b in verdict.flip_bins if b.positions and not math.isnan(b.predicted))
    names = tuple(map(bin_name, bins))
    counts: tuple[tuple[str, Role, Floats], ...] = (
        ("predicted from the floor's noise", "predicted", _floats(b.predicted for b in bins)),
        ("floor", "floor", _floats(b.floor or 0 for b in bins)),
        ("candidate", "candidate", _floats(b.candidate for b in bins)),
    )
    return Figure(
        id="predicted-flips",
        title="Predicted and observed flips",
        reading="Flips expected if the candidate were only as noisy as the floor (Gaussian noise of the floor's logit "
        "error), beside what was counted. Far more than predicted is not rounding noise.",
        x=Axis(label="margin, logits", scale="category"),
        y=Axis(label="flips"),
        panels=(Panel(title="", series=tuple(Series(name=n, role=r, x=names, y=y) for n, r, y in counts)),)
        if bins
        else (),
    )


def detection_power(verdict: Verdict) -> Figure:
    """The smallest true ratio that would have been a FAIL, beside the ratio found."""
    checks = [
        c
        for c in verdict.checks
        if c.statistic == "ratio_to_floor" and c.tier == "precision" and math.isfinite(c.detectable)
    ]
    names = tuple(str(c.stratum) for c in checks)
    named: tuple[tuple[str, Role, Floats], ...] = (
        ("smallest ratio seen as a FAIL in 95 % of runs", "detectable", _floats(c.detectable for c in checks)),
        ("ratio found", "candidate", _floats(c.value for c in checks)),
    )
    return Figure(
        id="detection-power",
        title="What this comparison could have seen",
        reading="A fault smaller than the diamond's ratio may have gone unseen in that stratum: a PASS says nothing "
        "about it. More texts move it towards the limit.",
        x=Axis(label=_RATIO, scale="log"),
        y=Axis(label="stratum", scale="category"),
        panels=(Panel(title="", series=tuple(Series(name=n, role=r, x=shown_log(x), y=names) for n, r, x in named)),)
        if checks
        else (),
        limit=strata.ratio_limit(verdict),
    )


def bin_name(one: FlipBin) -> str:
    """How a margin bin is called: "0.1 to 0.25", "1 and up"."""
    return f"{one.low:g} to {one.high:g}" if math.isfinite(one.high) else f"{one.low:g} and up"


def several_ratios(named: dict[str, Verdict]) -> Figure:
    """The ratio in every stratum of several candidates, a panel each."""
    held = {name: verdict for name, verdict in named.items() if len(_ratios(verdict).x)}
    one = ratio_by_stratum(next(iter((held or named).values())))
    return Figure(
        id="several-ratios",
        title="How far from normal, and where, candidate by candidate",
        reading=one.reading,
        x=one.x,
        y=one.y,
        panels=tuple(Panel(title=name, series=(_ratios(verdict),)) for name, verdict in held.items()),
        limit=one.limit,
    )


def several_distributions(named: dict[str, Comparison]) -> Figure:
    """The KL distribution of several candidates, a panel each, all positions together."""
    some = kl_distribution(next(iter(named.values())))
    return Figure(
        id="several-distributions",
        title="KL distribution, candidate by candidate",
        reading=some.reading,
        x=some.x,
        y=some.y,
        panels=tuple(
            Panel(title=name, series=tuple(_cumulative(one, strata.finite(one)))) for name, one in named.items()
        ),
    )


def several_depths(named: dict[str, tuple[Comparison, Verdict]]) -> Figure:
    """Mean ratio to the floor against depth, a panel for each candidate, a line for each phase and kind."""
    panels = []
    held = {name: one for name, one in named.items() if len(_ratios(one[1]).x)}
    for name, (comparison, verdict) in held.items():
        columns = comparison.positions
        pairs = [(p, k) for p in strata.phases(columns) for k in strata.kinds(columns)]
        series = []
        for number, (phase, kind) in enumerate(pairs[: len(SEVERAL)]):
            row = tuple(Stratum(phase=phase, kind=kind, depth=d) for d in strata.depths(columns))
            values = _floats(strata.value(verdict, s, "ratio_to_floor") for s in row)
            series.append(_line(f"{phase}, {kind}", SEVERAL[number], row, shown_log(values), False))
        panels.append(Panel(title=name, series=tuple(series)))
    limit = next((strata.ratio_limit(v) for _, v in held.values()), None)
    return Figure(
        id="several-depths",
        title="Ratio to the floor against context depth, candidate by candidate",
        reading="Mean KL20 over the floor's. A line that rises: the error grows with the context.",
        x=Axis(label="context depth, tokens", scale="log"),
        y=Axis(label=_RATIO, scale="log"),
        panels=tuple(panels),
        limit=limit,
    )


def _depth_panels(comparison: Comparison, lines: _Lines) -> tuple[Panel, ...]:
    columns = comparison.positions
    panels = []
    for phase in strata.phases(columns):
        for kind in strata.kinds(columns):
            row = tuple(Stratum(phase=phase, kind=kind, depth=depth) for depth in strata.depths(columns))
            panels.append(Panel(title=f"{phase}, {kind}", series=lines(row)))
    return tuple(panels)


def _line(name: str, role: Role, row: tuple[Stratum, ...], y: Floats, dashed: bool) -> Series:
    return Series(name=name, role=role, x=_floats(s.depth or 0 for s in row), y=y, line=True, dashed=dashed)


def _floats(values: Iterable[float]) -> Floats:
    return np.array(list(values), np.float64)
