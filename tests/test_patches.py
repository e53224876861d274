"""Every packaged patch on the real engine: it fires, changes the rows it says, and its undo leaves no bit behind."""

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

PATCHES = list_patches()
HOOKED = [p for p in PATCHES if p.function is not None and not p.patch.site.startswith(RECURRENT)]  # of a dense model
LENGTHS = (290, 20)  # one prompt past the first 256 positions, one short
DECODED = 5
GENERATOR = np.random.default_rng(1)
PROMPTS = [GENERATOR.integers(0, 320, n).tolist() for n in LENGTHS]
ENGINE = {"enforce_eager": True, "dtype": "bfloat16"}  # what the engine below was started with


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One in-process engine over a tiny random Llama: heads of 64, three query heads per KV head."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=384,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.06,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ones would hide what happens to norm weights
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    model.to(torch.bfloat16).save_pretrained(folder)
    with engine_in_process(folder, block_size=32) as engine:
        yield engine


@pytest.fixture(scope="module")
def runner(engine: Any) -> Any:
    return runner_of(engine)


@pytest.fixture(scope="module")
def stock(engine: Any, runner: Any) -> Rows:
    return run(engine, PROMPTS, DECODED)


def test_the_engine_repeats_itself(engine: Any, runner: Any, stock: Rows) -> None:
    again = run(engine, PROMPTS, DECODED)
    assert same(stock.prefill, again.prefill)
    assert same(stock.decode, again.decode)
    assert np.isfinite(stock.prefill).all()
    assert len(stock.decode) == len(LENGTHS) * (DECODED - 1)


@pytest.fixture(scope="module")
def seen() -> dict[bytes, str]:
    """Rows already given by a patch, and its name."""
    return {}


@pytest.mark.parametrize("patch", HOOKED, ids=lambda p: p.patch.name)
def test_patch_changes_what_it_says_and_is_undone(
    patch: LoadedPatch, engine: Any, runner: Any, stock: Rows, seen: dict[bytes, str]
) -> None:
    if patch.patch.engine.get("dtype", ENGINE["dtype"]) != ENGINE["dtype"]:
        pytest.skip(f"needs an engine of dtype {patch.patch.engine['dtype']}")
    applied = patch.apply(runner)
    try:
        changed = run(engine, PROMPTS, DECODED)
        fired = applied.fired
    finally:
        applied.undo()
    restored = run(engine, PROMPTS, DECODED)
    assert same(stock.prefill, restored.prefill), "the undo left something behind in prefill"
    assert same(stock.decode, restored.decode), "the undo left something behind in decode"
    assert fired, "none of its hooks was called"
    if not patch.patch.changes_rows:
        assert same(stock.prefill, changed.prefill)
        assert same(stock.decode, changed.decode)
        return
    if patch.patch.phase != "decode":
        assert not same(stock.prefill, changed.prefill), "no prefill row changed"
    else:
        if patch.patch.site == "attention.mask":  # by the naive attention, which rounds otherwise than the engine's
            assert np.abs(changed.prefill - stock.prefill).max() < 0.5
        else:
            assert same(stock.prefill, changed.prefill), "a decode fault changed prefill rows"
        assert not same(stock.decode, changed.decode), "no decode row changed"
    rows = changed.prefill.tobytes() + changed.decode.tobytes()
    assert seen.setdefault(rows, patch.patch.name) == patch.patch.name, "two patches give the same rows"
    if patch.patch.kind == "benign":
        assert np.isfinite(changed.prefill).all()
        assert np.abs(changed.prefill - stock.prefill).max() < 0.5


def test_references_load_in_another_process() -> None:
    """What travels to a worker is a string; it must find exactly the same patch there."""
    for patch in PATCHES:
        again = load_patch(patch.reference)
        assert (again.patch, again.sha256) == (patch.patch, patch.sha256)


def test_every_patch_is_documented() -> None:
    for patch in PATCHES:
        assert len(patch.doc) > 40, patch.patch.name
        assert patch.patch.source, patch.patch.name
        assert patch.patch.shows, patch.patch.name
        assert (patch.patch.severity == "none") == (patch.patch.kind == "benign"), patch.patch.name
        assert Path(patch.path).stem in patch.path.name


def test_the_coverage_table_names_every_class() -> None:
    text = (Path(PATCHES[0].path).parent / "COVERAGE.md").read_text()
    covered = text.split("## Not covered")[0]
    listed = {line.split("|")[1].strip() for line in covered.splitlines() if line.startswith("| ")} - {"class"}
    assert listed == {p.patch.fault_class for p in PATCHES if p.patch.kind == "fault"}
