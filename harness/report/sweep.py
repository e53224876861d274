"""A sweep as Markdown and figures, from typed variants only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.calibration.sweep import Profile, Variant, by_depth, flips_without, partings
from harness.errors import StorageError
from harness.report.plots import COLOURS, new_figure, save_figure
from harness.types import Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASELINE = "bf16"
"""The variant that ratios are taken to, where a sweep has it; else the peer."""


def write_sweep(variants: Sequence[Variant], corpus: str, title: str, folder: Path) -> list[Path]:
    """Write sweep.md and its figures; the first variant is the peer. Returns their paths. Raises StorageError."""
    path = folder / "sweep.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(to_markdown(variants, corpus, title), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error
    return [path, *(draw(variants, folder) for draw in (_depth, _margins, _scatter, _distribution, _parting))]


def to_markdown(variants: Sequence[Variant], corpus: str, title: str) -> str:
    """Tables of a sweep."""
    peer = variants[0]
    kinds = list(peer.reference.quantiles)
    lines = [
        f"# Sweep: {title}",
        "",
        f"Corpus {corpus}. KL is KL20 in nats, KL(reference || variant) against the f32 reference and "
        f"KL({peer.name} || variant) against the peer. Figures: kl-depth, margin-flips, margin-kl, kl-distribution, "
        "greedy.",
        "",
    ]
    for name, held in _held(variants).items():
        lines += [f"## Against the {name}", "", *_cells(held, kinds), ""]
    lines += ["## Flips by the reference's margin", "", *_bins(variants), ""]
    lines += ["## Of the positions with high KL", "", *_high(variants), ""]
    lines += [f"## Greedy text against {peer.name}", "", *_greedy(variants), ""]
    return "\n".join(lines).rstrip() + "\n"


def _held(variants: Sequence[Variant]) -> dict[str, dict[str, Profile]]:
    peers = {v.name: v.peer for v in variants if v.peer is not None}
    held = {"f32 reference": {v.name: v.reference for v in variants}}
    return held | ({f"peer {variants[0].name}": peers} if peers else {})


def _baseline(held: Mapping[str, Profile]) -> str:
    return BASELINE if BASELINE in held else next(iter(held))


def _cells(held: Mapping[str, Profile], kinds: Sequence[str]) -> list[str]:
    base = _baseline(held)
    lines = [f"| variant | phase | kind | depth | rows | mean | median | p99 | flips | median over {base}'s |"]
    lines.append("|" + "---|" * 10)
    for name, one in held.items():
        for cell in one.cells:
            ours = dict(by_depth(held[base], cell.kind, cell.phase, "median"))[cell.depth]
            ratio = cell.median / ours if ours > 0 else math.nan
            lines.append(
                f"| {name} | {cell.phase} | {cell.kind} | {cell.depth} | {cell.rows} | {cell.mean:.3g} | "
                f"{cell.median:.3g} | {cell.p99:.3g} | {cell.flips} | {ratio:.3g} |"
            )
    return lines


def _bins(variants: Sequence[Variant]) -> list[str]:
    edges = [f"{b.low:g} to {b.high:g}" for b in variants[0].reference.bins]
    lines = ["| variant | " + " | ".join(edges) + " |", "|---|" + "---|" * len(edges)]
    for variant in variants:
        cells = [f"{b.flips} of {b.rows}" for b in variant.reference.bins]
        lines.append(f"| {variant.name} | " + " | ".join(cells) + " |")
    return lines


def _high(variants: Sequence[Variant]) -> list[str]:
    lines = [
        "| variant | share without a flip among the tenth of the plotted positions with the highest KL |",
        "|---|---|",
    ]
    return [*lines, *(f"| {v.name} | {flips_without(v.reference):.0%} |" for v in variants)]


def _greedy(variants: Sequence[Variant]) -> list[str]:
    lines = ["| variant | texts that part | first step, by text | lead there, nats |", "|---|---|---|---|"]
    for variant in variants[1:]:
        found = partings(variant, variants[0])
        steps = ", ".join(f"{p.segment}: {p.step}" for p in found) or "-"
        leads = ", ".join(f"{p.lead:.2g}" for p in found) or "-"
        lines.append(f"| {variant.name} | {len(found)} of {len(variant.greedy)} | {steps} | {leads} |")
    return lines


# --------------------------------------------------------------------------- figures


def _depth(variants: Sequence[Variant], folder: Path) -> Path:
    """Median KL of decode positions against depth, absolute and over the baseline's, by kind."""
    held = _held(variants)["f32 reference"]
    kinds = list(variants[0].reference.quantiles)
    figure, axes = new_figure(len(kinds), 2, width=10, height=3.4 * len(kinds))
    base = _baseline(held)
    for row, kind in enumerate(kinds):
        below = dict(by_depth(held[base], kind, Phase.DECODE, "median"))
        for number, (name, one) in enumerate(held.items()):
            points = by_depth(one, kind, Phase.DECODE, "median")
            ratios = [(d, v / below[d]) for d, v in points if below.get(d, 0.0) > 0]
            for axis, shown in ((axes[2 * row], points), (axes[2 * row + 1], ratios)):
                colour = COLOURS[number % len(COLOURS)]
                axis.plot([d for d, _ in shown], [v for _, v in shown], color=colour, marker="o", label=name)
        for axis, label in ((axes[2 * row], "median KL20, nats"), (axes[2 * row + 1], f"over {base}'s")):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xlabel("depth, tokens")
            axis.set_ylabel(label)
            axis.set_title(f"decode, {kind}", fontsize=9)
    axes[0].legend(fontsize=7)
    return save_figure(figure, folder / "kl-depth.svg")


def _margins(variants: Sequence[Variant], folder: Path) -> Path:
    """Flip rate by bin of the reference's margin."""
    figure, (axis,) = new_figure()
    edges = [f"{b.low:g} to {b.high:g}" for b in variants[0].reference.bins]
    for number, variant in enumerate(variants):
        rates = [b.flips / b.rows if b.rows else math.nan for b in variant.reference.bins]
        axis.plot(edges, rates, marker="o", color=COLOURS[number % len(COLOURS)], label=variant.name)
    axis.set_xlabel("margin of the reference, logits")
    axis.set_ylabel("flips, share of rows")
    axis.legend(fontsize=7)
    return save_figure(figure, folder / "margin-flips.svg")


def _scatter(variants: Sequence[Variant], folder: Path) -> Path:
    """Margin against KL of the positions kept, flips marked."""
    return _per_variant(variants, folder / "margin-kl.svg", "margin, logits", "KL20, nats", _scatter_one)


def _scatter_one(axis: Axes, variant: Variant) -> None:
    margin, kl = np.asarray(variant.reference.margin), np.asarray(variant.reference.kl)
    flip = np.asarray(variant.reference.flip, np.bool_)
    axis.scatter(margin[~flip], kl[~flip], s=5, color=COLOURS[0], label="no flip")
    axis.scatter(margin[flip], kl[flip], s=12, marker="x", color=COLOURS[1], label="flip")
    axis.set_yscale("log")


def _distribution(variants: Sequence[Variant], folder: Path) -> Path:
    """Cumulative distribution of KL by kind."""

    def draw(axis: Axes, variant: Variant) -> None:
        for number, (kind, quantiles) in enumerate(variant.reference.quantiles.items()):
            shown = [max(q, 1e-12) for q in quantiles]
            axis.plot(shown, np.linspace(0, 1, len(shown)), color=COLOURS[number], label=kind)
        axis.set_xscale("log")

    return _per_variant(variants, folder / "kl-distribution.svg", "KL20, nats", "share of rows below", draw)


def _parting(variants: Sequence[Variant], folder: Path) -> Path:
    """Where greedy texts part from the peer's, and how near a tie that was."""
    figure, (axis,) = new_figure()
    parted = False
    for number, variant in enumerate(variants[1:], 1):
        found = partings(variant, variants[0])
        parted = parted or bool(found)
        axis.scatter(
            [p.step for p in found],
            [max(p.lead, 1e-6) for p in found],
            color=COLOURS[number % len(COLOURS)],
            label=f"{variant.name} ({len(found)} of {len(variant.greedy)})",
        )
    if parted:  # a logarithmic axis of nothing cannot be drawn
        axis.set_yscale("log")
    axis.set_xlabel("greedy tokens in common with the peer")
    axis.set_ylabel("lead of the peer's next token, nats")
    if len(variants) > 1:
        axis.legend(fontsize=7)
    return save_figure(figure, folder / "greedy.svg")


def _per_variant(
    variants: Sequence[Variant], path: Path, x: str, y: str, draw: Callable[[Axes, Variant], None]
) -> Path:
    columns = min(3, len(variants))
    rows = -(-len(variants) // columns)
    figure, axes = new_figure(rows, columns, width=3.6 * columns, height=3.0 * rows)
    for axis, variant in zip(axes, variants, strict=False):
        draw(axis, variant)
        axis.set_title(variant.name, fontsize=9)
        axis.set_xlabel(x)
        axis.set_ylabel(y)
    for axis in axes[len(variants) :]:
        axis.set_visible(False)
    axes[0].legend(fontsize=7)
    return save_figure(figure, path)
