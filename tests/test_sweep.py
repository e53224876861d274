"""Numbers and figures of sweeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.calibration.sweep import (
    SCATTERED,
    Parting,
    Profile,
    Variant,
    by_depth,
    flips_without,
    load_variants,
    partings,
    profile,
    save_variant,
)
from harness.report.sweep import to_markdown, write_sweep
from harness.types import Phase
from tests import judging


def variant(name: str, scale: float = 1.0, **changes: Any) -> Variant:
    made = judging.columns(documents=3, rows=20, seed=4)
    flip = made["kl20"] > np.quantile(made["kl20"], 0.97)
    held = profile(made | {"kl20": made["kl20"] * scale, "flip": flip})
    fields: dict[str, Any] = {
        "name": name, "summary": "", "recording": name, "seconds": 1.0, "setting": {}, "build": {}, "created": "",
        "reference": held, "peer": held, "greedy": {"s": (1, 2, 3)}, "leads": {"s": (0.5, 0.25, 0.125)},
    }  # fmt: skip
    return Variant(**(fields | changes))


def test_cells_are_the_statistics_of_their_rows() -> None:
    columns = judging.columns(documents=2, rows=10)
    held = profile(columns)
    assert len(held.cells) == 2 * 2 * 2
    for cell in held.cells:
        inside = (
            (columns["phase"] == str(cell.phase)) & (columns["kind"] == cell.kind) & (columns["depth"] == cell.depth)
        )
        kl = np.sort(columns["kl20"][inside])
        assert cell.rows == len(kl) == 20
        assert cell.mean == pytest.approx(kl.sum() / 20)
        assert cell.median == pytest.approx((kl[9] + kl[10]) / 2)
    assert sum(b.rows for b in held.bins) == len(columns["kl20"])


def test_by_depth_is_in_order_of_depth() -> None:
    points = by_depth(variant("x").reference, "prose", Phase.DECODE, "median")
    assert [depth for depth, _ in points] == [512, 2048]


@given(st.integers(0, 3 * SCATTERED))
def test_a_scatter_keeps_the_highest_and_never_too_many(rows: int) -> None:
    columns = judging.columns(documents=1, rows=1)
    kl = np.random.default_rng(rows).exponential(1e-3, rows)
    filled = {name: np.resize(values, rows) for name, values in columns.items()} | {"kl20": kl}
    if rows == 0:
        return
    held = profile(filled)
    assert len(held.kl) == len(held.margin) == len(held.flip) == min(rows, SCATTERED)
    assert max(held.kl) == kl.max()
    if rows > SCATTERED:
        assert min(held.kl) <= np.median(kl)


def test_the_share_without_a_flip_among_high_kl() -> None:
    held = replace(variant("x").reference, kl=(5.0, 4.0, 0.1, 0.2), flip=(True, False, True, True), margin=(0,) * 4)
    assert flips_without(held, 0.5) == 0.5
    assert flips_without(held, 0.25) == 0.0
    assert np.isnan(flips_without(replace(held, kl=(), flip=())))


def test_texts_part_at_the_first_token_that_differs() -> None:
    peer = variant("f32")
    assert partings(variant("same"), peer) == []
    assert partings(variant("other", greedy={"s": (1, 9, 3)}), peer) == [Parting(segment="s", step=1, lead=0.25)]


def test_a_variant_comes_back_from_disk(tmp_path: Path) -> None:
    save_variant(variant("f32", peer=None), tmp_path)
    save_variant(variant("bf16"), tmp_path)
    back = load_variants(tmp_path, ["f32", "missing", "bf16"])
    assert list(back) == ["f32", "bf16"]
    assert back["f32"].peer is None
    assert back["bf16"].greedy == {"s": (1, 2, 3)}
    assert isinstance(back["bf16"].reference, Profile)
    assert back["bf16"].reference.cells[0].mean == pytest.approx(variant("bf16").reference.cells[0].mean, rel=1e-5)


def test_tables_show_the_numbers_of_the_variants() -> None:
    variants = [variant("f32", peer=None), variant("bf16"), variant("e4m3", 8.0, greedy={"s": (1, 2, 4)})]
    text = to_markdown(variants, "embedded", "attention weights P")
    cell = variants[2].reference.cells[-1]
    (line,) = (
        x for x in text.split("## Against the peer")[0].splitlines() if x.startswith("| e4m3 | decode | prose | 2048")
    )
    assert f"{cell.mean:.3g}" in line
    assert line.endswith("| 8 |")  # eight times the median of bf16
    assert "| e4m3 | 1 of 1 | s: 2 | 0.12 |" in text
    assert "## Against the peer f32" in text


def test_figures_are_written_and_hold_something(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    variants = [variant("f32", peer=None), variant("bf16"), variant("e4m3", 8.0)]
    paths = write_sweep(variants, "embedded", "attention weights P", tmp_path)
    assert sorted(p.name for p in paths) == [
        "greedy.svg", "kl-depth.svg", "kl-distribution.svg", "margin-flips.svg", "margin-kl.svg", "sweep.md",
    ]  # fmt: skip
    assert "e4m3" in (tmp_path / "kl-depth.svg").read_text()
    first = (tmp_path / "kl-depth.svg").read_bytes()
    write_sweep(variants, "embedded", "attention weights P", tmp_path)
    assert (tmp_path / "kl-depth.svg").read_bytes() == first
