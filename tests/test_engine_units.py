"""The engine package's logic that needs no engine: refusals, arguments, the instrument check, the writer."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.engine.instrument import LIMIT, LogprobLog
from harness.engine.layout import refuse_unsupported, runner_kind, step_layout
from harness.engine.requests import plan
from harness.engine.session import require_reached
from harness.engine.writer import BackgroundWriter
from harness.errors import EngineError, PatchError, StorageError, UsageError
from harness.metrics import decode, row_summary
from harness.patching import load_patch
from harness.storage import Recording
from harness.types import Block, Phase
from tests.synthetic import make_corpus, make_rows, record


def outputs(recording: Recording, shift: float = 0.0) -> list[tuple[Any, Any]]:
    """What an engine that agrees with the recording, up to `shift`, would return for each of its requests."""
    told: dict[tuple[str, Phase, int], float] = {}
    for segment in recording.corpus.segments:
        for phase in Phase:
            block = recording.read(segment.id, phase)
            logits = decode(block.logits, recording.manifest.logits_dtype).astype(np.float64)
            lse, _, _ = row_summary(block.logits, recording.manifest.logits_dtype, 1)
            values = logits[np.arange(len(logits)), block.targets] - lse
            told |= {(segment.id, phase, int(i)): float(v) for i, v in zip(block.indices, values, strict=True)}
    pairs = []
    for request in plan(recording.corpus):
        ids = request.prompt + request.forced

        def entry(index: int, request: Any = request, ids: tuple[int, ...] = ids) -> dict[int, SimpleNamespace]:
            value = told.get((request.segment, request.phase(index), index), 0.0)
            return {ids[index + 1]: SimpleNamespace(logprob=value + shift)}

        last = len(request.prompt) - 1
        completion = SimpleNamespace(
            token_ids=list(request.forced), logprobs=[entry(last + i) for i in range(len(request.forced))]
        )
        prompt = [None, *(entry(i) for i in range(last))]
        pairs.append((request, SimpleNamespace(outputs=[completion], prompt_logprobs=prompt)))
    return pairs


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    corpus = make_corpus()
    record(tmp_path / "recording", corpus, make_rows(corpus))
    return Recording(tmp_path / "recording")


@pytest.mark.parametrize(("shift", "passed"), [(0.0, True), (0.5 * LIMIT, True), (2 * LIMIT, False), (math.nan, False)])
def test_the_instrument_check_accepts_rounding_and_nothing_more(
    recording: Recording, tmp_path: Path, shift: float, passed: bool
) -> None:
    log = LogprobLog()
    for request, output in outputs(recording, shift):
        log.add(request, output)
    check = log.check(tmp_path / "recording")
    assert check.passed is passed
    assert check.rows > 0


def test_no_engine_log_prob_means_not_passed(recording: Recording, tmp_path: Path) -> None:
    check = LogprobLog().check(tmp_path / "recording")
    assert not check.passed
    assert check.rows == 0


def test_an_id_that_was_not_forced_is_an_error(recording: Recording) -> None:
    request, output = outputs(recording)[0]
    output.outputs[0].token_ids[1] += 1
    with pytest.raises(EngineError, match="does not reach its sampler"):
        LogprobLog().add(request, output)


def test_an_unknown_runner_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match="test_engine_units"):
        runner_kind(LogprobLog.__new__(type("OtherRunner", (), {"__module__": "test_engine_units"})))


def test_every_unsupported_feature_is_named() -> None:
    config = SimpleNamespace(
        speculative_config=object(),
        model_config=SimpleNamespace(runner_type="pooling"),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=True),
        parallel_config=SimpleNamespace(enable_batch_sharded_sampling=True),
    )
    with pytest.raises(EngineError) as refusal:
        refuse_unsupported(config)
    for word in ("speculative", "pooling", "kv_sharing_fast_prefill", "batch-sharded"):
        assert word in refusal.value.message


def test_a_batch_that_contradicts_the_scheduler_is_refused() -> None:
    batch = SimpleNamespace(req_ids=["a", "b"], query_start_loc_np=np.array([0, 3, 5]))
    state = SimpleNamespace(input_batch=batch)
    assert step_layout(None, state, {"a": (10, 3), "b": (0, 2)}).last_index.tolist() == [12, 1]
    with pytest.raises(EngineError, match="cannot be told apart"):
        step_layout(None, state, {"a": (10, 2), "b": (0, 2)})


def block(index: int) -> Block:
    return Block(
        segment="s", phase=Phase.DECODE, indices=np.array([index]), targets=np.array([1], np.int32),
        logits=np.ones((1, 8), np.float32),
    )  # fmt: skip


def test_the_writer_keeps_order_and_blocks_instead_of_dropping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.engine.writer.QUEUE_BYTES", 100)
    writer = BackgroundWriter(tmp_path, vocab_size=8, logits_dtype="float32", prefix="part")
    gate = threading.Event()

    def slow() -> Block:
        gate.wait()
        return block(0)

    writer.put(slow, 80)
    second = threading.Thread(target=writer.put, args=(lambda: block(1), 80))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    gate.set()
    second.join()
    (part,) = writer.close()
    assert part.rows == 2


def test_a_write_error_is_kept_for_whoever_finishes(tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path, vocab_size=8, logits_dtype="float32", prefix="part")

    def broken() -> Block:
        raise OSError("no space left")

    writer.put(broken, 8)
    with pytest.raises(StorageError, match="no space left"):
        writer.close()


def test_engine_arguments_are_vllm_s_own() -> None:
    arguments = pytest.importorskip("harness.engine.arguments", exc_type=ImportError)
    pytest.importorskip("vllm")
    given = arguments.parse_engine_args(["--dtype", "float32", "--max-num-batched-tokens", "512", "--enforce-eager"])
    assert given == {"dtype": "float32", "max_num_batched_tokens": 512, "enforce_eager": True}
    with pytest.raises(UsageError, match="bogus"):
        arguments.parse_engine_args(["--bogus", "3"])
    with pytest.raises(UsageError, match="float99"):
        arguments.parse_engine_args(["--dtype", "float99"])
    with pytest.raises(UsageError, match="does not exist"):
        arguments.make_config("./nowhere", {})


def test_a_patch_must_be_reached_by_an_engine_and_seen_whole_by_compiled_code() -> None:
    patch = load_patch("gemm_f32")

    def workers(*hooks: tuple[int | None, int]) -> list[dict[str, dict[str, int | None]]]:
        return [{"gemm_f32": {"fired": fired, "unseen": unseen}} for fired, unseen in hooks]

    require_reached([patch], workers((3, 0)))
    require_reached([patch], workers((0, 0), (3, 0)))  # of two ranks only one may hold the site
    require_reached([patch], workers((None, 0)))  # an undo of its own: it cannot say
    with pytest.raises(PatchError, match="never fired"):
        require_reached([patch], workers((0, 0), (0, 0)))
    with pytest.raises(PatchError, match=r"120 of its hooks were never called.*enforce-eager"):
        require_reached([patch], workers((512, 120)))
