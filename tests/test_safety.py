"""The offline recorder's sudden ends, on the real engine: a killed worker, Ctrl-C, SIGTERM; and two ranks at once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from harness.engine.served import Options, record_served
from harness.metrics import decode
from harness.storage import Recording
from harness.types import Corpus, Phase
from tests.serving import (
    ENGINE,
    LiveServer,
    end,
    family,
    logitgate,
    parts,
    save_corpus_file,
    start_logitgate,
    wait_for,
)

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

SEGMENTS = 40  # eight parts of 512 rows and a rest: the engine is still at work when the first is on the disk
TWO_RANKS = 6  # segments that two ranks record
KILLS = int(os.environ.get("LOGITGATE_KILLS", "1"))  # workers and clients to kill in turn, each at another moment


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("safety")


@pytest.fixture(scope="module")
def corpus(home: Path) -> Corpus:
    return save_corpus_file(home / "corpus.parquet", SEGMENTS)


Command = tuple[str | Path, ...]


@pytest.fixture(scope="module")
def command(home: Path, corpus: Corpus, live_server: LiveServer) -> Command:
    """Records the corpus; the folder is still to be named."""
    return ("record", live_server.model, "-c", home / "corpus.parquet", *ENGINE, "-o")


def stop_when_under_way(command: Command, folder: Path, how: str) -> tuple[int, str, list[psutil.Process]]:
    """Start a recording; end it or its worker once a new part is there. Exit code, stderr, what is left running."""
    before = len(parts(folder))
    client = start_logitgate(*command, folder, *(["--resume"] if before else []))
    wait_for(lambda: len(parts(folder)) > before, seconds=300, what="a part")
    processes = family(client.pid)
    if how == "worker":
        kill_workers(processes)
    else:
        client.send_signal(getattr(signal, how))
    try:
        _, told = client.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        end(processes)
        pytest.fail(f"after {how} the command did not end")
    _, left = psutil.wait_procs(processes, timeout=15)
    return client.returncode, told, left


def kill_workers(processes: list[psutil.Process]) -> None:
    end([process for process in processes if "VLLM::Worker" in " ".join(process.cmdline())])


@pytest.fixture(scope="module")
def peace(live_server: LiveServer, corpus: Corpus) -> Recording:
    """The recording nothing disturbed, of the same model in a server that runs anyway."""
    folder = live_server.root / "peace"
    record_served(live_server.url, corpus, folder, Options(concurrency=8))
    return Recording(folder)


def test_killed_interrupted_and_resumed_it_is_the_recording_nothing_disturbed(
    home: Path, corpus: Corpus, command: Command, peace: Recording
) -> None:
    folder = home / "disturbed"
    for how, code in (("SIGINT", 130), ("worker", 4)):
        returned, told, left = stop_when_under_way(command, folder, how)
        names = [" ".join(process.cmdline()) for process in left]
        end(left)
        assert not names, f"left running after {how}"
        assert returned == code, told
        assert "Traceback" not in told
        assert not Recording(folder).manifest.complete
    assert logitgate(*command, folder, "--resume").returncode == 0
    disturbed = Recording(folder).manifest
    assert disturbed.id == peace.manifest.id
    assert disturbed.rows_written == corpus.rows
    assert disturbed.instrument is not None
    assert disturbed.instrument.passed


@pytest.mark.skipif(KILLS == 1, reason="LOGITGATE_KILLS says how many moments to try")
@pytest.mark.parametrize("seed", range(1, max(KILLS, 2)))
def test_killed_at_any_moment_it_is_resumed_to_the_same_content(
    home: Path, command: Command, peace: Recording, seed: int
) -> None:
    """Odd seeds kill the client, even ones its worker: while it loads, between parts, within one, at the end."""
    folder, chance = home / f"killed-{seed}", random.Random(seed)
    client = start_logitgate(*command, folder)
    count = chance.randrange(8)
    wait_for(lambda: folder.exists() and len(parts(folder)) >= count, seconds=300, what=f"{count} parts")
    time.sleep(chance.uniform(0, 0.5))
    processes = family(client.pid)
    client.kill() if seed % 2 else kill_workers(processes)
    client.communicate(timeout=120)
    end(processes)  # a client that was killed cannot end its engine
    resumed = logitgate(*command, folder, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert Recording(folder).manifest.id == peace.manifest.id


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: two ranks have no place")
def test_two_tensor_parallel_ranks_write_each_row_once_and_the_same(
    home: Path, live_server: LiveServer, peace: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = save_corpus_file(home / "first.parquet", TWO_RANKS)
    cores = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}")
    ranks = ("--concurrency", "8", "--tensor-parallel-size", "2")
    done = logitgate(
        "record", live_server.model, "-c", home / "first.parquet", "-o", home / "two-ranks", *ENGINE, *ranks
    )
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
