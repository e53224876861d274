"""One comparison as an HTML page: a minute for the verdict, ten to find which phase, depth and kind a fault sits in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from harness.report import builds_diff, coverage, strata, where
from harness.report.figures import bin_name, figures
from harness.report.page import render
from harness.types import Check, Comparison, Estimate, Manifest, Phase, Status, Stratum, Verdict
from harness.worst import PositionDetail

BROWSED = 500
"""Worst positions, beside every flip, whose text a report holds."""

CARDS = 10
"""Of those, how many are shown in full; the others can be browsed."""

STATE = {Status.PASS: "pass", Status.FAIL: "fail", Status.INCONCLUSIVE: "inconclusive", None: "none"}
"""How the page's style calls a status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One stratum as the tables show it. NaN is unknown."""

    stratum: Stratum
    ratio: float
    low: float
    high: float
    mean: float
    median: float
    p99: float
    flips: float  # share of positions
    flip_margin: float  # logits
    detectable: float
    limit: float | None
    positions: int
    segments: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatRow:
    """Cells of one phase and kind, by depth."""

    name: str
    cells: tuple[Cell, ...]


def report_html(comparison: Comparison, verdict: Verdict, details: Sequence[PositionDetail] = ()) -> str:
    """The page. `details` come from `worst.describe_positions`, of `worst.notable_rows`; the first are shown in full.

    It is one file that needs no network. Text of the recordings cannot break it or run in it.
    """
    cells = {stratum: cell(comparison, verdict, stratum) for stratum in strata.strata(verdict)}
    worst, ran = worst_first(details)[:CARDS], coverage.exercised(comparison)
    return render(
        "report.html.j2",
        title=f"{verdict.word}: {name_of(comparison)}",
        figures=figures(comparison, verdict),
        positions=comparison.positions,
        details=details,
        comparison=comparison,
        verdict=verdict,
        state=STATE[verdict.status],
        headline=where.headline(comparison, verdict),
        places=where.places(comparison, verdict),
        cells=tuple(cells.values()),
        depths=strata.depths(comparison.positions),
        heat_rows=heat_rows(comparison, cells),
        changes=builds_diff.changes(comparison),
        builds=builds_diff.everything(comparison),
        sections=builds_diff.SECTIONS,
        sides=sides(comparison),
        facts=facts(comparison),
        exercised=ran,
        not_exercised=tuple(one.what for one in ran if one.answer == "no"),
        detectable=coverage.smallest_seen(verdict),
        coverage_rows=coverage.rows_by_cell(comparison),
        open_checks=tuple(c for c in verdict.checks if c.status is not Status.PASS),
        passed_checks=tuple(c for c in verdict.checks if c.status is Status.PASS),
        worst=worst,
        notable=len(details),
        perplexity=perplexity(verdict),
        bin_name=bin_name,
        check_name=check_name,
    )


def no_judgement(word: str, message: str) -> str:
    """The page where nothing could be compared, and why."""
    return render("no_judgement.html.j2", title=word, figures=(), word=word, message=message)


def cell(comparison: Comparison, verdict: Verdict, stratum: Stratum) -> Cell:
    """Everything known about one stratum."""
    ratio = strata.estimate(verdict, stratum, "ratio_to_floor")
    mean = strata.estimate(verdict, stratum, "mean")
    check = strata.check(verdict, stratum, "ratio_to_floor")
    unknown = float("nan")
    return Cell(
        stratum=stratum,
        ratio=ratio.value if ratio else unknown,
        low=ratio.low if ratio else unknown,
        high=ratio.high if ratio else unknown,
        mean=mean.value if mean else unknown,
        median=strata.value(verdict, stratum, "median"),
        p99=strata.value(verdict, stratum, "p99"),
        flips=strata.value(verdict, stratum, "rate", "flip"),
        flip_margin=strata.largest_flip_margin(comparison, stratum),
        detectable=check.detectable if check else unknown,
        limit=check.limit if check else strata.ratio_limit(verdict),
        positions=mean.positions if mean else 0,
        segments=mean.segments if mean else 0,
    )


def heat_rows(comparison: Comparison, cells: dict[Stratum, Cell]) -> tuple[HeatRow, ...]:
    """Phase and kind down, depth across; a combination that was not scored is left out of its row's cells."""
    columns = comparison.positions
    rows = []
    for phase in strata.phases(columns):
        for kind in strata.kinds(columns):
            wanted = [Stratum(phase=phase, kind=kind, depth=depth) for depth in strata.depths(columns)]
            if any(stratum in cells for stratum in wanted):
                missing = {s: _nothing(s) for s in wanted if s not in cells}
                rows.append(HeatRow(name=f"{phase}, {kind}", cells=tuple((cells | missing)[s] for s in wanted)))
    return tuple(rows)


def _nothing(stratum: Stratum) -> Cell:
    unknown = float("nan")
    return Cell(
        stratum=stratum,
        ratio=unknown,
        low=unknown,
        high=unknown,
        mean=unknown,
        median=unknown,
        p99=unknown,
        flips=unknown,
        flip_margin=unknown,
        detectable=unknown,
        limit=None,
        positions=0,
        segments=0,
    )


def sides(comparison: Comparison) -> tuple[tuple[str, str, str], ...]:
    """What was compared with what: role, build in a line, path."""
    named = (
        ("candidate", comparison.candidate),
        ("reference", comparison.reference),
        ("floor", comparison.floor_side),
        ("baseline", comparison.baseline_side),
    )
    lines = []
    for role, side in named:
        if side is not None:
            build, manifest = side.manifest.build, side.manifest
            line = f"{build.engine} {build.engine_version}, {build.dtype} on {build.device}"
            line += f", logits kept in {manifest.logits_dtype}" if manifest.logits_dtype != build.dtype else ""
            patches = ", ".join(f"{p.get('name', 'unnamed')} ({p.get('kind', 'of no kind')})" for p in build.patches)
            lines.append((role, line + (f"; patched: {patches}" if patches else ""), side.path))
    lines += [("spread", "another floor, shown and never judged by", path) for path in comparison.spread]
    return tuple(lines)


def facts(comparison: Comparison) -> tuple[tuple[str, str], ...]:
    """The five facts without which no number here means anything."""
    reference, manifest = comparison.reference.manifest.build, comparison.reference.manifest
    phases = comparison.positions["phase"]
    counts = ", ".join(f"{int((phases == str(p)).sum()):,} {p}" for p in Phase)
    return (
        ("Reference", f"{reference.engine} {reference.engine_version} in {reference.dtype}{_own_error(manifest)}"),
        ("Direction", "KL(reference || candidate), in nats, computed in f64"),
        (
            "Identical ids",
            f"every row predicts the same token id on all sides, checked row by row; corpus {manifest.corpus_name} "
            f"{manifest.corpus_sha256[:12]}, tokenizer {manifest.tokenizer_sha256[:12]}",
        ),
        (
            "Logits",
            f"whole rows of {manifest.vocab_size:,} raw logits, not probabilities; KL20 takes the reference's top 20 "
            "ids one by one and merges the rest",
        ),
        ("Positions", f"{len(phases):,}: {counts}; " + _texts(comparison)),
    )


def _own_error(manifest: Manifest) -> str:
    """What a reference says of its own precision, held against f64 on a sample."""
    error = manifest.own_error or {}
    if not {"metric", "median", "max", "positions"} <= error.keys():
        return ""
    return (
        f"; its own error on {error['positions']} positions: {error['metric']}, "
        f"median {error['median']:.1e}, largest {error['max']:.1e}"
    )


def _texts(comparison: Comparison) -> str:
    columns = comparison.positions
    segments, documents = (len(set(columns[name].tolist())) for name in ("segment", "document"))
    return f"{segments} texts cut from {documents} documents"


def perplexity(verdict: Verdict) -> dict[str, Estimate]:
    """What is known of perplexity, by statistic."""
    return {e.statistic: e for e in verdict.estimates if e.metric == "perplexity"}


def check_name(check: Check) -> str:
    """A check in words a reader knows."""
    words = {
        "ratio_to_floor": "mean KL20 over the floor's",
        "ratio_to_baseline": "mean KL20 over the baseline's",
        "twin_mean": "mean KL20 of the float32 twin",
        "count_above_margin": "flips at a large margin",
        "count": "rows with NaN or infinite logits",
    }
    return words.get(check.statistic, f"{check.metric} {check.statistic}")


def worst_first(details: Sequence[PositionDetail]) -> list[PositionDetail]:
    """By KL20, largest first; NaN before any number."""
    return sorted(details, key=lambda d: (d.kl20 == d.kl20, -d.kl20 if d.kl20 == d.kl20 else 0.0, d.row))


def name_of(comparison: Comparison) -> str:
    """What a comparison's candidate is called: the name of its folder."""
    path = PurePath(comparison.candidate.path)
    return path.name or str(path)
