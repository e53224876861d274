"""The real vLLM engine, in its own processes, over a tiny random Llama: capture, forcing, patches, resumption."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.corpus import save_corpus, seal
from harness.engine.session import EngineSession
from harness.errors import EngineError, PatchError, UsageError
from harness.metrics import position_metrics
from harness.patching import load_patch
from harness.reference import record_reference
from harness.storage import Recording
from harness.types import Corpus, Phase, Segment

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 27,
    "max_num_batched_tokens": 64,  # prompts of 100 ids and more run in chunks
}
GREEDY = """
import json, os, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, kv_cache_memory_bytes=1 << 27)
params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
outputs = llm.generate([{"prompt_token_ids": p} for p in json.loads(sys.argv[2])], params, use_tqdm=False)
print("TOKENS", json.dumps([list(o.outputs[0].token_ids) for o in outputs]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    random = np.random.default_rng(0)
    segments = tuple(
        Segment(
            id=f"s{i}",
            document=f"d{i}",
            kind="prose",
            depth=100,
            token_ids=random.integers(3, 320, 133 + i).astype(np.int32),
            decode_from=100 + i,
            windows=((60, 120 + i),),  # reaches past the decode start: scored in both phases there
        )
        for i in range(3)
    )
    return seal(
        Corpus(
            name="tiny", version="1", tokenizer="none", tokenizer_sha256="", vocab_size=320, bos="none", smoke=True,
            segments=segments, sources=(),
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def session(model: str) -> Iterator[EngineSession]:
    with EngineSession(model, ENGINE) as running:
        yield running


@pytest.fixture(scope="module")
def stock(session: EngineSession, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("stock") / "recording"
    session.record(corpus, folder)
    return Recording(folder)


def test_every_scored_row_is_there_once_and_agrees_with_the_engine_s_own_numbers(
    stock: Recording, corpus: Corpus
) -> None:
    manifest = stock.manifest
    assert manifest.complete
    assert manifest.rows_written == manifest.rows_expected == corpus.rows
    for segment in corpus.segments:
        for phase in Phase:
            assert np.array_equal(stock.indices(segment.id, phase), segment.indices(phase))
    assert manifest.instrument is not None
    assert manifest.instrument.passed, manifest.instrument
    assert manifest.instrument.rows == corpus.rows


def test_the_same_build_twice_is_bit_identical_whatever_the_batch_and_the_row_path(
    session: EngineSession, corpus: Corpus, stock: Recording, tmp_path: Path
) -> None:
    again = session.record(corpus, tmp_path / "again")
    assert again.id == stock.manifest.id
    batched = session.record(corpus, tmp_path / "batched", concurrency=3, prompt_rows="window")
    assert batched.id == stock.manifest.id
    facts = Recording(tmp_path / "batched").read("s0", Phase.DECODE).facts
    assert facts is not None
    assert facts.batch_size.max() > 1


def test_decode_equals_prefill_on_the_rows_scored_in_both(stock: Recording, corpus: Corpus) -> None:
    for segment in corpus.segments:
        indices = np.intersect1d(segment.indices(Phase.PREFILL), segment.indices(Phase.DECODE))
        decode, prefill = (stock.read(segment.id, phase, indices) for phase in (Phase.DECODE, Phase.PREFILL))
        columns = position_metrics(prefill.logits, "bfloat16", decode.logits, "bfloat16", prefill.targets)
        assert len(indices) == 20
        assert np.median(columns["kl_full"]) < 1e-3


def test_a_float32_engine_agrees_with_the_float32_reference(model: str, corpus: Corpus, tmp_path: Path) -> None:
    record_reference(model, corpus, tmp_path / "reference")
    with EngineSession(model, {**ENGINE, "dtype": "float32"}) as session:
        session.record(corpus, tmp_path / "engine")
    reference, engine = Recording(tmp_path / "reference"), Recording(tmp_path / "engine")
    for segment in corpus.segments:
        for phase in Phase:
            ours, theirs = reference.read(segment.id, phase), engine.read(segment.id, phase)
            columns = position_metrics(ours.logits, "float32", theirs.logits, "float32", ours.targets)
            assert columns["kl20"].max() < 1e-9
            assert not columns["flip"].any()


def test_an_interrupted_recording_is_resumed_to_the_same_content(
    session: EngineSession, corpus: Corpus, stock: Recording, tmp_path: Path
) -> None:
    folder = tmp_path / "recording"
    first = seal(dataclasses.replace(corpus, segments=corpus.segments[:1]))
    session.record(first, tmp_path / "first")
    folder.mkdir()
    for file in (tmp_path / "first").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_corpus(corpus, folder / "corpus.parquet")
    manifest = json.loads((folder / "recording.json").read_text())
    manifest |= {"corpus_sha256": corpus.sha256, "complete": False, "parts": [], "rows_expected": corpus.rows}
    (folder / "recording.json").write_text(json.dumps(manifest))
    resumed = session.record(corpus, folder, resume=True)
    assert resumed.complete
    assert resumed.id == stock.manifest.id


def test_a_fault_changes_the_rows_and_its_undo_leaves_no_bit_behind(
    session: EngineSession, corpus: Corpus, stock: Recording, tmp_path: Path
) -> None:
    fault = load_patch("rope_bf16_positions")
    with session.patched([fault]) as patches:
        faulty = session.record(corpus, tmp_path / "faulty", patches=patches)
    assert faulty.id != stock.manifest.id
    assert faulty.build.patches[0]["sha256"] == fault.sha256
    assert session.record(corpus, tmp_path / "after").id == stock.manifest.id


def test_a_patch_that_never_fires_is_an_error(session: EngineSession, corpus: Corpus, tmp_path: Path) -> None:
    file = tmp_path / "idle.py"
    file.write_text(
        '"""Wraps a function the engine never calls."""\n'
        "from harness.patching import Hooks, Patch\n"
        'PATCH = Patch(name="idle", kind="fault", site="none", phase="both", source="none", summary="", shows="")\n'
        "def apply(runner):\n"
        "    hooks = Hooks()\n"
        '    hooks.wrap(runner, "get_supported_tasks", lambda original: original)\n'
        "    return hooks\n"
    )
    with pytest.raises(PatchError, match="never fired"), session.patched([load_patch(file)]):
        session.record(corpus, tmp_path / "recording")


def test_a_patch_that_fails_to_apply_says_so_and_leaves_the_engine_usable(
    session: EngineSession, corpus: Corpus, stock: Recording, tmp_path: Path
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(
        "from harness.patching import Patch\n"
        'PATCH = Patch(name="broken", kind="fault", site="none", phase="both", source="none", summary="", shows="")\n'
        "def apply(runner):\n    raise ValueError('no such layer')\n"
    )
    with pytest.raises(EngineError, match="no such layer"), session.patched([load_patch(file)]):
        pass
    assert session.record(corpus, tmp_path / "after").id == stock.manifest.id


def test_a_segment_longer_than_the_context_is_refused_before_anything_is_written(
    session: EngineSession, corpus: Corpus, tmp_path: Path
) -> None:
    ids = np.resize(corpus.segments[0].token_ids, 600)
    long = Segment(
        id="long", document="d", kind="prose", depth=590, token_ids=ids, decode_from=590, windows=((580, 590),)
    )
    with pytest.raises(UsageError, match="512"):
        session.record(seal(dataclasses.replace(corpus, segments=(long,))), tmp_path / "recording")
    assert not (tmp_path / "recording").exists()


def test_the_plugin_changes_no_token(model: str, session: EngineSession, corpus: Corpus) -> None:
    """Greedy tokens without the plugin, with it not asked, and from the engine that carries its hooks."""
    prompts = [s.token_ids[:40].tolist() for s in corpus.segments]
    absent = greedy(model, prompts, VLLM_PLUGINS="")
    idle = greedy(model, prompts)
    asked = greedy(model, prompts, LOGITGATE_CAPTURE="1")
    assert absent == idle == asked


def greedy(model: str, prompts: list[list[int]], **environment: str) -> list[list[int]]:
    """Tokens from an engine of its own, in a process of its own."""
    base = {k: v for k, v in os.environ.items() if k != "LOGITGATE_CAPTURE"}
    base |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", **environment}
    command = [sys.executable, "-c", GREEDY, model, json.dumps(prompts)]
    done = subprocess.run(command, env=base, capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("TOKENS "))
    tokens: list[list[int]] = json.loads(line.removeprefix("TOKENS "))
    return tokens
