"""A campaign on the real engine: one load serves every patch and every request pattern, and each pattern happens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from harness.calibration.jobs import Job, Setting, by_load, job_of, with_stock
from harness.corpus import seal
from harness.engine.campaign import Campaign
from harness.engine.session import EngineSession
from harness.patching import load_patch
from harness.patterns import Pattern, engine_needs
from harness.storage import Recording
from harness.types import Corpus, Manifest, Phase, Segment

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=192, intermediate_size=384, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.15, tie_word_embeddings=True,
    )  # fmt: skip
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
            depth=96,
            token_ids=random.integers(3, 320, 96 + 65).astype(np.int32),
            decode_from=96,
            windows=((60, 96),),
        )
        for i in range(4)
    )
    return seal(
        Corpus(
            name="tiny", version="1", tokenizer="none", tokenizer_sha256="", vocab_size=320, bos="none", smoke=True,
            segments=segments, sources=(),
        )
    )  # fmt: skip


@dataclasses.dataclass
class Run:
    """What a campaign gave."""

    jobs: list[Job]
    manifests: dict[str, Manifest]
    folders: dict[str, Path]
    failures: dict[str, str]


@pytest.fixture(scope="module")
def done(model: str, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two patches and three patterns over one engine whose cache is too small for two of its requests."""
    base = Setting(
        engine={
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 27,
            "enable_prefix_caching": True,
            **engine_needs(Pattern(preemption=True, concurrency=2), corpus),
        },
        pattern=Pattern(concurrency=1),
    )
    names = (
        "attention_p_bf16",
        "rope_bf16_positions",
        "engine_prefix_hit",
        "engine_preemption",
        "engine_order_reversed",
    )
    jobs = with_stock([job_of(load_patch(name), base, corpus) for name in names], base)
    run = Run(jobs, {}, {}, {})

    def recorded(job: Job, folder: Path, manifest: Manifest) -> None:
        run.manifests[job.name], run.folders[job.name] = manifest, folder

    def failed(job: Job, reason: str) -> None:
        run.failures[job.name] = reason

    texts: dict[str, dict[str, list[tuple[int, float]]]] = {}

    def extra(session: EngineSession, job: Job) -> None:
        if job.name == "stock":
            texts["stock"] = session.greedy({"s0": corpus.segments[0].token_ids[:96].tolist()}, 8)

    folder = tmp_path_factory.mktemp("campaign")
    Campaign(model=model, corpus=corpus, folder=folder).run(jobs, recorded=recorded, failed=failed, extra=extra)
    (text,) = texts["stock"].values()
    assert len(text) == 8
    assert all(lead >= 0 for _, lead in text)
    return run


def test_one_load_serves_them_all_and_none_fails(done: Run) -> None:
    assert len(by_load(done.jobs)) == 1
    assert done.failures == {}
    assert all(m.complete and m.instrument is not None and m.instrument.passed for m in done.manifests.values())


def test_patches_change_bits_and_the_order_of_requests_does_not(done: Run) -> None:
    ids = {name: manifest.id for name, manifest in done.manifests.items()}
    assert len({ids["stock"], ids["attention_p_bf16"], ids["rope_bf16_positions"]}) == 3
    assert ids["engine_order_reversed"] == ids["stock"]


def test_decode_rows_follow_a_prefix_hit_where_that_was_asked_for(done: Run, corpus: Corpus) -> None:
    hit, cold = Recording(done.folders["engine_prefix_hit"]), Recording(done.folders["stock"])
    for segment in corpus.segments:
        facts, without = (r.read(segment.id, Phase.DECODE).facts for r in (hit, cold))
        assert facts is not None
        assert without is not None
        assert facts.cached_tokens.min() >= 64
        assert without.cached_tokens.max() == 0
    assert done.manifests["engine_prefix_hit"].build.requested["prefix_hit"] is True


def test_a_preempted_recording_has_every_row_once(done: Run, corpus: Corpus) -> None:
    manifest = done.manifests["engine_preemption"]
    assert manifest.rows_written == corpus.rows
    assert manifest.build.requested["preemption"] is True


def test_a_setting_that_does_not_start_fails_alone(model: str, corpus: Corpus, tmp_path: Path) -> None:
    failures: dict[str, str] = {}
    job = Job(name="odd", setting=Setting(engine={"no_such_argument": 1}))
    Campaign(model=model, corpus=corpus, folder=tmp_path).run(
        [job],
        recorded=lambda job, folder, manifest: pytest.fail("nothing can be recorded"),
        failed=lambda job, reason: failures.update({job.name: reason}),
    )
    assert "no_such_argument" in failures["odd"]
