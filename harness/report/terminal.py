"""A verdict for people at a terminal: the answer, what decided it, and where to look.

All text from recordings and corpora goes through `visible` and is never read as markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from harness.report import cells, strata
from harness.report.visible import visible
from harness.summary import PUBLISHED, TASK_BOUND
from harness.types import OVERALL, Check, Columns, Comparison, Estimate, FlipBin, Status, Verdict
from harness.worst import PositionDetail, TopId

NARROW, WIDE = 80, 110  # columns below which the table of strata is cut to the least, and from which it has all
COLUMNS = {
    "narrow": ("mean", "ratio", "flips"),
    "middle": ("mean", "ratio to floor (95 %)", "flips", "flip margin"),
    "wide": ("median", "mean", "p99", "ratio to floor (95 %)", "detects", "flips", "flip margin"),
}
MOST_CHECKS = 8  # the table above them has every stratum anyway
COLOURS = {Status.PASS: "green", Status.FAIL: "red", Status.INCONCLUSIVE: "yellow", None: "magenta"}


def render(comparison: Comparison, verdict: Verdict, console: Console, *, worst: Sequence[PositionDetail] = ()) -> None:
    """Print the verdict; the last line begins with its word. `worst` comes from `worst.worst_positions`."""
    parts: list[RenderableType] = [_verdict_panel(comparison, verdict), _sides(comparison)]
    if verdict.estimates:
        parts.append(_cells(comparison, verdict, console.width))
    undecided = [check for check in verdict.checks if check.status is not Status.PASS]
    if undecided:
        parts.append(_checks(undecided, wide=console.width >= WIDE))
    if verdict.flip_bins:
        parts.append(_flips(verdict.flip_bins))
    parts += [*_trends(verdict.estimates), *_perplexity(comparison, verdict.estimates), *_scale(verdict)]
    if worst:
        parts.append(Text("\nWorst positions", style="bold"))
        parts += [_worst(number, position, console.width) for number, position in enumerate(worst, 1)]
    parts += [_line("note: " + note, style="dim") for note in (*comparison.notes, *verdict.notes)]
    for part in parts:
        if isinstance(part, Table):
            console.print()
        console.print(part, highlight=False)
    console.print(Text(visible(cells.last_line(verdict))), highlight=False, soft_wrap=True)


def _verdict_panel(comparison: Comparison, verdict: Verdict) -> Panel:
    lines = [_line("• " + fact) for fact in cells.facts(comparison, verdict)]
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
    for name, side in cells.sides(comparison):
        grid.add_row(name, _line(f"{side.path}  {cells.described(side)}"))
    for path, columns in comparison.spread.items():
        grid.add_row("spread", _line(f"{path}  mean KL20 {columns['kl20'].mean():.2e}{_of_floor(comparison, columns)}"))
    grid.add_row("positions", _line(cells.positions(comparison)))
    grid.add_row("numbers", _line(cells.direction(comparison)))
    return grid


def _of_floor(comparison: Comparison, columns: Columns) -> str:
    """Another floor beside the one that is the denominator."""
    base = float(comparison.floor["kl20"].mean()) if comparison.floor is not None else 0.0
    return f", {columns['kl20'].mean() / base:.2f} x the floor's" if base > 0 else ""


# --------------------------------------------------------------------------- tables


def _cells(comparison: Comparison, verdict: Verdict, width: int) -> Table:
    """One line a stratum, with as many columns as the terminal has room for."""
    table = _table("KL20 by phase, kind and depth")
    table.add_column("where", no_wrap=True)
    kept = COLUMNS["wide" if width >= WIDE else "middle" if width >= NARROW else "narrow"]
    for name in kept:
        table.add_column(name, justify="right", no_wrap=name != "flip margin")
    for stratum in strata.strata(verdict):
        values = cells.cells(comparison, verdict, stratum)
        name = cells.short(stratum) if width < NARROW else str(stratum)
        table.add_row(name, *(values[column] for column in kept), style="bold" if stratum == OVERALL else "")
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
        "trend_chunk": "first rows of a prefill chunk against the others",
        "trend_block": "first rows of a KV block against the others",
    }
    shown = [f"{names[e.statistic]}: {cells.interval(e)}" for e in estimates if e.statistic in names]
    if shown:
        yield Text("\nKL20 in one part over another (1 = no trend)", style="bold")
        yield from map(_line, shown)


def _perplexity(comparison: Comparison, estimates: Sequence[Estimate]) -> Iterator[Text]:
    found = {e.statistic: e for e in estimates if e.metric == "perplexity"}
    if "reference" in found and "candidate" in found:
        both = found["candidate_over_reference"]
        of_each = [
            f"{found[side].value:.4f} ± {found[f'{side}_error'].value:.4f} ({name})"
            for side, name in zip(("reference", "candidate"), comparison.names, strict=True)
        ]
        yield _line(
            f"\nperplexity {', '.join(of_each)} ± one standard error, ratio {both.value:.5f} ({both.low:.5f} to "
            f"{both.high:.5f}): it cannot see this level and is never judged"
        )


def _scale(verdict: Verdict) -> Iterator[Text]:
    """What the numbers can be held against, and never are by the judge."""
    published = [
        f"{mean:.1e}" + ("" if math.isnan(median) else f" (median {median:.1e})") + f": {what}"
        for what, mean, median in PUBLISHED
    ]
    yield _line(f"for scale, mean KL others report for builds taken as correct: {'; '.join(published)}")
    if verdict.task_bounds:
        segment, bound = max(verdict.task_bounds.items(), key=lambda pair: pair[1])
        yield _line(f"task-score bound sqrt(KL sum / 2): {bound:.2g} at most, in {segment}: {TASK_BOUND}")


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
