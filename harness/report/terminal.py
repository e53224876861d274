"""A verdict for people at a terminal: the answer, what decided it, and where to look.

All text from recordings and corpora goes through `visible` and is never read as markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from harness.report.visible import visible
from harness.types import OVERALL, Check, Comparison, Estimate, FlipBin, Side, Status, Stratum, Verdict
from harness.worst import PositionDetail, TopId

WIDE = 110  # columns from which the tables have everything
MOST_CHECKS = 8  # the table above them has every stratum anyway
COLOURS = {Status.PASS: "green", Status.FAIL: "red", Status.INCONCLUSIVE: "yellow", None: "magenta"}


def render(comparison: Comparison, verdict: Verdict, console: Console, *, worst: Sequence[PositionDetail] = ()) -> None:
    """Print the verdict; the last line begins with its word. `worst` comes from `worst.worst_positions`."""
    parts: list[RenderableType] = [_verdict_panel(comparison, verdict), _sides(comparison)]
    if verdict.estimates:
        parts.append(_cells(comparison, verdict, wide=console.width >= WIDE))
    undecided = [check for check in verdict.checks if check.status is not Status.PASS]
    if undecided:
        parts.append(_checks(undecided, wide=console.width >= WIDE))
    if verdict.flip_bins:
        parts.append(_flips(verdict.flip_bins))
    parts += [*_trends(verdict.estimates), *_perplexity(verdict.estimates)]
    if worst:
        parts.append(Text("\nWorst positions", style="bold"))
        parts += [_worst(number, position, console.width) for number, position in enumerate(worst, 1)]
    parts += [_line("note: " + note, style="dim") for note in (*comparison.notes, *verdict.notes)]
    for part in parts:
        if isinstance(part, Table):
            console.print()
        console.print(part, highlight=False)
    console.print(Text(visible(_last_line(verdict))), highlight=False, soft_wrap=True)


def _last_line(verdict: Verdict) -> str:
    return f"{verdict.word}: {verdict.reasons[0]}" if verdict.reasons else verdict.word


def _verdict_panel(comparison: Comparison, verdict: Verdict) -> Panel:
    lines = [_line("• " + reason) for reason in verdict.reasons]
    reasons = set(verdict.reasons)
    lines += [_line(f"• {f.code}: {f.message}") for f in comparison.findings if f.message not in reasons]
    if verdict.remedy:
        lines.append(_line("→ " + verdict.remedy))
    colour = COLOURS[verdict.status]
    return Panel(
        Group(*lines), title=Text(verdict.word, style=f"bold {colour}"), title_align="left", border_style=colour
    )


def _sides(comparison: Comparison) -> Table:
    """The facts without which no number means anything: precision, direction, ids, logits, positions."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    named = [("reference", comparison.reference), ("candidate", comparison.candidate)]
    named += [(n, s) for n, s in (("floor", comparison.floor_side), ("baseline", comparison.baseline_side)) if s]
    for name, side in named:
        grid.add_row(name, _line(_described(side)))
    for path in comparison.spread:
        grid.add_row("spread", _line(path))
    phases, counts = np.unique(comparison.positions["phase"], return_counts=True)
    shares = ", ".join(f"{count:,} {phase}" for phase, count in zip(phases, counts, strict=True))
    corpus = comparison.reference.manifest
    grid.add_row(
        "positions", _line(f"{shares}; corpus {corpus.corpus_name} {corpus.corpus_sha256[:12]}, same ids on all")
    )
    grid.add_row(
        "numbers", _line("KL(reference || candidate) in nats, f64, from raw logits; KL20 merges ids past the top 20")
    )
    return grid


def _described(side: Side) -> str:
    build, manifest = side.manifest.build, side.manifest
    patches = ", ".join(str(patch.get("name", "?")) for patch in build.patches)
    facts = f"{side.path}  {build.engine} {build.engine_version}, {build.model}, {build.dtype} on {build.device}"
    facts += f", logits {manifest.logits_dtype}" if manifest.logits_dtype != build.dtype else ""
    return facts + (f", patched: {patches}" if patches else "")


# --------------------------------------------------------------------------- tables


def _cells(comparison: Comparison, verdict: Verdict, *, wide: bool) -> Table:
    """One line a stratum. Narrow terminals get the mean, the ratio and the flips."""
    table = _table("KL20 by phase, kind and depth")
    table.add_column("where", no_wrap=True)
    names = ["median", "mean", "p99", "ratio to floor (95 %)", "detects", "flips", "flip margin"]
    kept = names if wide else [name for name in names if name not in ("median", "p99", "detects")]
    for name in kept:
        table.add_column(name, justify="right", no_wrap=name != "flip margin")
    for stratum in dict.fromkeys(e.stratum for e in verdict.estimates if e.statistic == "mean" and e.metric == "kl20"):
        found = {(e.metric, e.statistic): e for e in verdict.estimates if e.stratum == stratum}
        ratio, flips = found.get(("kl20", "ratio_to_floor")), found.get(("flip", "rate"))
        values = {
            "median": _small(found.get(("kl20", "median"))),
            "mean": _small(found.get(("kl20", "mean"))),
            "p99": _small(found.get(("kl20", "p99"))),
            "ratio to floor (95 %)": _interval(ratio),
            "detects": _detectable(verdict.checks, stratum),
            "flips": f"{flips.value:.2%}" if flips else "-",
            "flip margin": _flip_margin(comparison, stratum),
        }
        table.add_row(str(stratum), *(values[name] for name in kept), style="bold" if stratum == OVERALL else "")
    return table


def _checks(checks: Sequence[Check], *, wide: bool) -> Table:
    """Failures first; the bounds that decided only where there is room."""
    ranked = sorted(checks, key=lambda check: check.status is not Status.FAIL)
    table = _table("Checks that are not passed")
    table.add_column("check")
    for name in ("value", *(("bounds",) if wide else ()), "limit", "status"):
        table.add_column(name, justify="right", no_wrap=True)
    for check in ranked[:MOST_CHECKS]:
        table.add_row(
            _line(f"{check.metric} {check.statistic.replace('_', ' ')}, {check.stratum}"),
            f"{check.value:.3g}",
            *((f"{check.low:.3g} to {check.high:.3g}",) if wide else ()),
            f"{check.limit:.3g}",
            Text(str(check.status), style=COLOURS[check.status]),
        )
    if len(ranked) > MOST_CHECKS:
        table.add_row(_line(f"and {len(ranked) - MOST_CHECKS} more"))
    return table


def _flips(bins: Sequence[FlipBin]) -> Table:
    table = _table("Flips by the reference's margin")
    for name in ("margin", "positions", "candidate", "floor", "predicted", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in bins:
        table.add_row(
            f"{one.low:g} to {one.high:g}" if math.isfinite(one.high) else f"{one.low:g} and up",
            f"{one.positions:,}",
            str(one.candidate),
            "-" if one.floor is None else str(one.floor),
            "-" if math.isnan(one.predicted) else f"{one.predicted:.1f}",
            "-" if math.isnan(one.p_value) else f"{one.p_value:.2g}",
        )
    return table


def _trends(estimates: Sequence[Estimate]) -> Iterator[Text]:
    names = {
        "trend_depth": "deepest against shallowest context",
        "trend_step": "last third of the decode steps against the first",
        "trend_chunk": "first rows of a chunk against the others",
        "trend_block": "first rows of a KV block against the others",
    }
    shown = [f"{names[e.statistic]}: {_interval(e)}" for e in estimates if e.statistic in names]
    if shown:
        yield Text("\nKL20 in one part over another (1 = no trend)", style="bold")
        yield from map(_line, shown)


def _perplexity(estimates: Sequence[Estimate]) -> Iterator[Text]:
    found = {e.statistic: e for e in estimates if e.metric == "perplexity"}
    if "reference" in found and "candidate" in found:
        both = found["candidate_over_reference"]
        yield _line(
            f"\nperplexity {found['reference'].value:.4f} (reference), {found['candidate'].value:.4f} (candidate), "
            f"ratio {both.value:.5f} ({both.low:.5f} to {both.high:.5f}): it cannot see this level and is never judged"
        )


def _worst(number: int, position: PositionDetail, width: int) -> Text:
    step = f", step {position.step}" if position.step >= 0 else ""
    text = Text(f"{number}. ", style="bold")
    text.append(visible(f"{position.segment} {position.phase} index {position.index}{step}"), style="bold")
    text.append(f"  KL20 {position.kl20:.3g}, margin {position.margin:.3g}")
    text.append("  FLIP\n" if position.flip else "\n", style="red")
    room = max(20, width - 8 - len(visible(position.target_text, 24)))
    text.append("   " + visible(position.context, room), style="dim")
    text.append(f" → {visible(position.target_text, 24)}\n")
    text.append(f"   reference  {_tops(position.top_reference, width - 16)}\n")
    text.append(f"   candidate  {_tops(position.top_candidate, width - 16)}")
    return text


def _tops(tops: Sequence[TopId], room: int) -> str:
    """As many of the ids as fit into `room` columns, at least one."""
    shown = ""
    for top in tops:
        more = f"“{visible(top.text, 16)}” {math.exp(top.logprob):.1%}"
        if shown and cell_len(shown) + cell_len(more) + 2 > room:
            break
        shown += ("  " if shown else "") + more
    return shown


# --------------------------------------------------------------------------- words


def _line(text: str, style: str = "") -> Text:
    return Text(visible(text.strip("\n")), style=style)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1))


def _small(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.2e}"


def _interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    if math.isnan(estimate.low) or math.isnan(estimate.high):
        return _ratio(estimate.value)
    return f"{_ratio(estimate.value)} ({_ratio(estimate.low)} to {_ratio(estimate.high)})"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.3g}"


def _detectable(checks: Sequence[Check], stratum: Stratum) -> str:
    for check in checks:
        if check.stratum == stratum and check.statistic == "ratio_to_floor" and math.isfinite(check.detectable):
            return f"≥ {_ratio(check.detectable)}"
    return "-"


def _flip_margin(comparison: Comparison, stratum: Stratum) -> str:
    columns = comparison.positions
    flipped = columns["flip"].astype(bool) & np.isfinite(columns["margin"])
    for name in ("phase", "kind", "depth"):
        wanted = getattr(stratum, name)
        if wanted is not None:
            flipped &= columns[name] == (str(wanted) if name == "phase" else wanted)
    return f"{columns['margin'][flipped].max():.3f}" if flipped.any() else "-"
