"""A hybrid model end to end: its corpora, the HuggingFace reference, vLLM's recording, the judgement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness._stock import load_manifest as load_recording
from harness.compare import compare
from harness.corpus import build_corpus, load_manifest, load_tokenizer, seal
from harness.judge import judge, load_gates
from harness.types import Columns, Corpus, Phase, Status

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

HYBRID = Path(__file__).parent / "data" / "hybrid"
CHUNK = 256  # tokens of a prompt that the engine works on at once


def corpus_named(name: str) -> Corpus:
    return build_corpus(load_manifest(name), load_tokenizer(str(HYBRID)), tokenizer_name=str(HYBRID))


def test_the_corpora_reach_past_a_chunk_and_decode_for_long() -> None:
    whole, decode = corpus_named("hybrid"), corpus_named("hybrid-decode")
    assert {(s.kind, s.depth) for s in whole.segments} == {
        (kind, depth) for kind in ("code", "prose") for depth in (512, 2048, 4096, 8192, 16384)
    }
    assert {len(s.indices(Phase.DECODE)) for s in whole.segments} == {512}
    assert {(len(s.indices(Phase.DECODE)), len(s.indices(Phase.PREFILL))) for s in decode.segments} == {(4096, 0)}
    assert not {s.sha256 for s in whole.sources} & {s.sha256 for s in decode.sources}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """One document of each kind, at both depths."""
    quick = corpus_named("hybrid-quick")
    return seal(replace(quick, segments=tuple(s for s in quick.segments if s.document.endswith("-01"))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """Reference and floor by HuggingFace, vLLM with an f32 and with its own bf16 state, and one planted fault."""
    from harness.engine.session import EngineSession
    from harness.patching import load_patch
    from harness.reference import record_reference

    folder = tmp_path_factory.mktemp("hybrid")
    manifest = record_reference(str(HYBRID), corpus, folder / "reference")
    assert manifest.own_error is not None
    assert manifest.own_error["max"] < 1e-9  # true float64 runs through a GDN layer too
    record_reference(str(HYBRID), corpus, folder / "floor", dtype="bfloat16")
    arguments = {"enforce_eager": True, "kv_cache_memory_bytes": 2**28, "max_num_batched_tokens": CHUNK}
    with EngineSession(str(HYBRID), arguments | {"mamba_ssm_cache_dtype": "float32"}) as session:
        session.record(corpus, folder / "f32-state")
        with session.patched([load_patch("gdn_init_dropped")]) as described:
            session.record(corpus, folder / "fault", patches=described)
    return folder


@pytest.fixture(scope="module")
def kl(folder: Path) -> dict[str, Columns]:
    """Position columns of each recording against the reference."""
    return {name: compare(folder / "reference", folder / name).positions for name in ("floor", "f32-state", "fault")}


@pytest.mark.parametrize("phase", list(Phase))
def test_vllm_with_an_f32_state_is_as_near_the_reference_as_huggingface_in_bf16(
    kl: dict[str, Columns], phase: Phase
) -> None:
    """Measured: medians of 2.8e-5 to 3.9e-5 nat on both sides, means up to 9e-5, largest 2.8e-3."""
    floor, engine = (kl[name]["kl20"][kl[name]["phase"] == phase] for name in ("floor", "f32-state"))
    assert 0.5 < np.median(engine) / np.median(floor) < 2
    assert engine.mean() < 2e-4
    assert engine.max() < 1e-2


def test_a_state_lost_between_chunks_is_seen_in_the_second_chunk_alone(kl: dict[str, Columns]) -> None:
    stock, fault = kl["f32-state"], kl["fault"]
    second = (stock["index"] >= CHUNK) & (stock["phase"] == Phase.PREFILL)
    first = (stock["index"] < CHUNK) & (stock["phase"] == Phase.PREFILL)
    assert second.sum() == 2 * 32
    np.testing.assert_array_equal(fault["kl20"][first], stock["kl20"][first])
    assert fault["kl20"][second].mean() > 3 * stock["kl20"][second].mean()


def test_the_healthy_build_does_not_fail(folder: Path) -> None:
    comparison = compare(folder / "reference", folder / "f32-state", floor=folder / "floor")
    assert judge(comparison, load_gates(None)).status is not Status.FAIL


def test_the_recording_is_checked_and_says_what_the_state_is_kept_in(folder: Path) -> None:
    manifest = load_recording(folder / "f32-state")
    assert manifest.complete
    assert manifest.instrument is not None
    assert manifest.instrument.passed
    layers = [name for name in manifest.build.attention.values() if "GatedDeltaNet" in name]
    assert layers == ["QwenGatedDeltaNetAttention (CPU, state float32)"] * 6
