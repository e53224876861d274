"""One stratum, side or verdict as the text outputs write it: the same digits in the terminal and in Markdown."""

from __future__ import annotations

import math

from harness.report import strata
from harness.types import OVERALL, Comparison, Estimate, Phase, Side, Stratum, Verdict

NOTHING = "-"


def cells(comparison: Comparison, verdict: Verdict, stratum: Stratum) -> dict[str, str]:
    """The columns of a table of strata, by heading, most often wanted ones included; "-" for what is not known."""
    check = strata.check(verdict, stratum, "ratio_to_floor")
    detects = math.nan if check is None else check.detectable
    flips, margin = strata.value(verdict, stratum, "rate", "flip"), strata.largest_flip_margin(comparison, stratum)
    return {
        "median": small(strata.value(verdict, stratum, "median")),
        "mean": small(strata.value(verdict, stratum, "mean")),
        "p99": small(strata.value(verdict, stratum, "p99")),
        "ratio": ratio(strata.value(verdict, stratum, "ratio_to_floor")),
        "ratio to floor (95 %)": interval(strata.estimate(verdict, stratum, "ratio_to_floor")),
        "detects": f"≥ {ratio(detects)}" if math.isfinite(detects) else NOTHING,
        "flips": NOTHING if math.isnan(flips) else f"{flips:.2%}",
        "flip margin": NOTHING if math.isnan(margin) else f"{margin:.3f}",
    }


def small(value: float) -> str:
    """A KL in nats."""
    return NOTHING if math.isnan(value) else f"{value:.2e}"


def ratio(value: float) -> str:
    """A ratio, with two decimals or three digits."""
    if math.isnan(value):
        return NOTHING
    if abs(value) < 100:
        return f"{value:.2f}"
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) < 1e6 else f"{value:.3g}"


def interval(estimate: Estimate | None) -> str:
    """A ratio and its interval, where one is known."""
    if estimate is None:
        return NOTHING
    if math.isnan(estimate.low) or math.isnan(estimate.high):
        return ratio(estimate.value)
    return f"{ratio(estimate.value)} ({ratio(estimate.low)} to {ratio(estimate.high)})"


def short(stratum: Stratum) -> str:
    """A stratum's name where there is little room."""
    parts = [str(part) for part in (stratum.phase, stratum.kind, stratum.depth) if part is not None]
    return " ".join(parts) or str(OVERALL)


def last_line(verdict: Verdict) -> str:
    """What a log shows of a verdict: its word and the weightiest fact."""
    return f"{verdict.word}: {verdict.reasons[0]}" if verdict.reasons else verdict.word


def sides(comparison: Comparison) -> list[tuple[str, Side]]:
    """What was compared with what, as (role, recording)."""
    named = [*zip(comparison.names, (comparison.reference, comparison.candidate), strict=True)]
    others = (("floor", comparison.floor_side), ("baseline", comparison.baseline_side))
    return named + [(role, side) for role, side in others if side is not None]


def described(side: Side) -> str:
    """The build behind a recording, in a line, without its path."""
    build, manifest = side.manifest.build, side.manifest
    facts = f"{build.engine} {build.engine_version}, {build.model}, {build.dtype} on {build.device}"
    facts += f", logits {manifest.logits_dtype}" if manifest.logits_dtype != build.dtype else ""
    patches = ", ".join(str(patch.get("name", "unnamed")) for patch in build.patches)
    return facts + (f", patched: {patches}" if patches else "")


def positions(comparison: Comparison) -> str:
    """How many positions of which corpus."""
    phases = comparison.positions["phase"]
    counts = ", ".join(f"{int((phases == str(p)).sum()):,} {p}" for p in Phase)
    corpus = comparison.reference.manifest
    return f"{counts}; corpus {corpus.corpus_name} {corpus.corpus_sha256[:12]}, same ids on all"


def direction(comparison: Comparison) -> str:
    """What KL means here, and what it was computed from."""
    first, second = comparison.names
    return f"KL({first} || {second}) in nats, f64, from raw logits; KL20 merges ids past the top 20"


def facts(comparison: Comparison, verdict: Verdict) -> list[str]:
    """The deciding facts, then findings that are not among them."""
    said = set(verdict.reasons)
    return [*verdict.reasons, *(f"{f.code}: {f.message}" for f in comparison.findings if f.message not in said)]
