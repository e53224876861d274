"""The offline recorder's sudden ends, on the real engine: a killed worker, Ctrl-C, SIGTERM; and two ranks at once."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest

from harness.metrics import decode
from harness.storage import Recording
from harness.types import Corpus, Phase
from tests.serving import ENGINE, end, family, logitgate, parts, save_corpus_file, save_model, start_logitgate, wait_for

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

SEGMENTS = 20  # three parts of 512 rows and a rest


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("safety")
    save_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def corpus(home: Path) -> Corpus:
    return save_corpus_file(home / "corpus.parquet", SEGMENTS)


def command(home: Path, name: str, *more: str) -> tuple[str | Path, ...]:
    return ("record", home / "model", "-c", home / "corpus.parquet", "-o", home / name, *more, *ENGINE)


def stop_when_under_way(home: Path, name: str, how: str, *more: str) -> tuple[int, str, list[psutil.Process]]:
    """Start a recording; end it or its worker once a new part is there. Exit code, stderr, what is left running."""
    before = len(parts(home / name))
    client = start_logitgate(*command(home, name, *more))
    wait_for(lambda: len(parts(home / name)) > before, seconds=300, what="a part")
    processes = family(client.pid)
    if how == "worker":
        for process in processes:
            if "VLLM::Worker" in " ".join(process.cmdline()):
                process.kill()
    else:
        client.send_signal(getattr(signal, how))
    try:
        _, told = client.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        end(processes)
        pytest.fail(f"after {how} the command did not end")
    _, left = psutil.wait_procs(processes, timeout=15)
    return client.returncode, told, left


@pytest.fixture(scope="module")
def peace(home: Path, corpus: Corpus) -> Recording:
    """The recording nothing disturbed."""
    done = logitgate(*command(home, "peace", "--concurrency", "8"))
    assert done.returncode == 0, done.stderr
    return Recording(home / "peace")


def test_killed_interrupted_and_resumed_it_is_the_recording_nothing_disturbed(
    home: Path, corpus: Corpus, peace: Recording
) -> None:
    for how, code, more in (("SIGINT", 130, ()), ("worker", 4, ("--resume",))):
        returned, told, left = stop_when_under_way(home, "disturbed", how, *more)
        names = [" ".join(process.cmdline()) for process in left]
        end(left)
        assert not names, f"left running after {how}"
        assert returned == code, told
        assert "Traceback" not in told
        assert not Recording(home / "disturbed").manifest.complete
    assert logitgate(*command(home, "disturbed", "--resume")).returncode == 0
    disturbed = Recording(home / "disturbed").manifest
    assert disturbed.id == peace.manifest.id
    assert disturbed.rows_written == corpus.rows
    assert disturbed.instrument is not None
    assert disturbed.instrument.passed


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: two ranks have no place")
def test_two_tensor_parallel_ranks_write_each_row_once_and_the_same(
    home: Path, corpus: Corpus, peace: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}")
    done = logitgate(*command(home, "two-ranks", "--concurrency", "8", "--tensor-parallel-size", "2"))
    assert done.returncode == 0, done.stderr
    two = Recording(home / "two-ranks")
    assert two.manifest.rows_written == corpus.rows
    assert two.manifest.build.tensor_parallel == 2
    assert two.manifest.instrument is not None
    assert two.manifest.instrument.passed
    assert {path.name.rsplit("-", 1)[0] for path in parts(home / "two-ranks")} == {"part-r0"}
    for segment in corpus.segments:
        for phase in Phase:
            rows = [decode(r.read(segment.id, phase).logits, "float32") for r in (peace, two)]
            assert np.abs(rows[0] - rows[1]).max() < 1e-3  # a layer's sum is over two halves, in another order
