"""Patches of a hybrid model on the real engine: each fires, changes the rows it says, and is undone.

The model is the small trained one, with its recurrent state in f32. Its prompt of 290 tokens is worked on in three
chunks, the last beside a short prompt, so that states are stored on the way and a batch is mixed. One or two patches
of each place they take hold of are run here, and the one outside the core; every patch of the core is run by itself
in `test_gdn_kernel.py`, on the engine's own kernels, and undone there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.patching import LoadedPatch, list_patches, load_patch
from harness.sites import RECURRENT
from tests.in_process import Rows, engine_in_process, run, runner_of, same

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

HYBRID = Path(__file__).parent / "data" / "hybrid"
PATCHES = [p for p in list_patches() if p.patch.site.startswith(RECURRENT)]
HOOKED = [
    load_patch(name)
    for name in (
        "conv_rows_swapped",
        "conv_window_early",
        "gdn_decode_skips_write",
        "gdn_gate_no_decay",
        "gdn_gate_rate_e4m3",
        "gdn_init_dropped",
        "gdn_init_stale",
        "gdn_norm_after_gate",
        "gdn_qk_norm_dropped_decode",
        "gdn_state_decode_4_bits",
        "gdn_state_pieces_4_bits",
        "gdn_state_pieces_f32",
        "gdn_state_stored_16_bits",
    )
]
PROMPTS = [np.random.default_rng(1).integers(3, 2048, n).tolist() for n in (290, 20)]
DECODED = 16


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with engine_in_process(HYBRID, max_num_batched_tokens=128, mamba_ssm_cache_dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def stock(engine: Any) -> Rows:
    return run(engine, PROMPTS, DECODED)


@pytest.fixture(scope="module")
def seen() -> dict[bytes, str]:
    """Rows already given by a patch, and its name."""
    return {}


def test_the_engine_repeats_itself(engine: Any, stock: Rows) -> None:
    again = run(engine, PROMPTS, DECODED)
    assert same(stock.prefill, again.prefill)
    assert same(stock.decode, again.decode)
    assert len(stock.decode) == len(PROMPTS) * (DECODED - 1)


@pytest.mark.parametrize("patch", HOOKED, ids=lambda p: p.patch.name)
def test_patch_changes_what_it_says(patch: LoadedPatch, engine: Any, stock: Rows, seen: dict[bytes, str]) -> None:
    applied = patch.apply(runner_of(engine))
    try:
        changed = run(engine, PROMPTS, DECODED)
        fired = applied.fired
    finally:
        applied.undo()
    assert fired, "none of its hooks had anything to do"
    if not patch.patch.changes_rows:
        assert same(stock.prefill, changed.prefill)
        assert same(stock.decode, changed.decode)
        return
    if patch.patch.phase == "decode":
        assert same(stock.prefill, changed.prefill), "a decode fault changed prefill rows"
        assert not same(stock.decode, changed.decode), "no decode row changed"
    else:
        assert not same(stock.prefill, changed.prefill), "no prefill row changed"
    rows = changed.prefill.tobytes() + changed.decode.tobytes()
    assert seen.setdefault(rows, patch.patch.name) == patch.patch.name, "two patches give the same rows"
    if patch.patch.kind == "benign":
        assert np.abs(changed.prefill - stock.prefill).max() < 0.5


def test_nothing_is_left(engine: Any, stock: Rows) -> None:
    again = run(engine, PROMPTS, DECODED)
    assert same(stock.prefill, again.prefill)
    assert same(stock.decode, again.decode)


def test_every_site_of_a_hybrid_is_marked_as_one() -> None:
    files = {p.path.name for p in PATCHES}
    assert files == {p.path.name for p in list_patches() if p.path.name.startswith(("gdn_", "conv_"))}


def test_the_state_is_rounded_on_an_engine_that_keeps_f32() -> None:
    """Some models keep it in bf16 unless told otherwise, and rounding to 10 bits would then do nothing."""
    for patch in PATCHES:
        if patch.patch.site == "gdn.state":
            assert patch.patch.engine["mamba_ssm_cache_dtype"] == "float32"
