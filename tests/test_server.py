"""Recording a running vLLM server through HTTP, among other clients, hostile ones, full disks and sudden ends."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from harness.engine.served import Options, finish_served, record_served
from harness.engine.wire import Ask
from harness.errors import EngineError, UsageError
from harness.storage import Recording
from harness.types import Corpus, Manifest, Phase
from tests.serving import (
    NAME,
    LiveServer,
    logitgate,
    make_corpus,
    parts,
    save_corpus_file,
    start_logitgate,
    wait_for,
)

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

SEGMENTS = 4
KILLS = int(os.environ.get("LOGITGATE_KILLS", "1"))  # clients to kill and workers to kill, each at another moment
ASK = Ask(recording="stranger", run="0" * 32, corpus="c" * 64, segment="s", forced=(1, 2, 3), keep=((0, 4),))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clients")
    save_corpus_file(folder / "corpus.parquet", SEGMENTS)
    return folder


@pytest.fixture(scope="module")
def server(live_server: LiveServer) -> LiveServer:
    return live_server


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return make_corpus(SEGMENTS)


@pytest.fixture(scope="module")
def alone(server: LiveServer, corpus: Corpus) -> Manifest:
    """The recording made with nobody else there, one request at a time."""
    return record_served(server.url, corpus, server.root / "alone", Options())


def ask(server: LiveServer, **changes: Any) -> httpx.Response:
    text = json.dumps(dataclasses.asdict(ASK) | changes)
    return server.complete(vllm_xargs={"logitgate": text})


def test_the_server_s_recording_is_whole_and_says_what_it_is_of(
    server: LiveServer, corpus: Corpus, alone: Manifest
) -> None:
    assert alone.complete
    assert alone.rows_written == corpus.rows
    assert alone.instrument is not None
    assert alone.instrument.passed, alone.instrument
    assert alone.instrument.rows == corpus.rows
    assert alone.build.requested["served"] is True
    assert alone.build.requested["max_num_batched_tokens"] == 64
    assert alone.build.weights_sha256
    recording = Recording(server.root / "alone")
    for segment in corpus.segments:
        for phase in Phase:
            assert np.array_equal(recording.indices(segment.id, phase), segment.indices(phase))


def test_the_command_records_and_a_recording_may_be_finished_where_the_rows_are_not(
    server: LiveServer, home: Path, alone: Manifest
) -> None:
    away = home / "away"
    done = logitgate(
        "record", "--server", server.url, "-c", home / "corpus.parquet", "-o", away, "--prompt-rows", "window"
    )
    assert done.returncode == 0, done.stderr
    assert "logitgate finish" in done.stdout
    assert not parts(away)
    for part in parts(server.root / "away"):
        shutil.copy(part, away)
    finished = finish_served(away)
    assert finished.id == alone.id
    assert finished.instrument is not None
    assert finished.instrument.passed


def test_ordinary_clients_are_served_as_ever_and_do_not_show_in_the_rows(
    server: LiveServer, corpus: Corpus, alone: Manifest
) -> None:
    before = {path.name for path in server.root.iterdir()}
    stop = threading.Event()

    def ordinary(number: int) -> list[list[int]]:
        """Stream until told to stop; the ids of each answer."""
        answers = []
        while not stop.is_set():
            body = {"model": NAME, "prompt": [number + 3] * 20, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            body |= {"stream": True, "return_token_ids": True}
            ids: list[int] = []
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
            assert len(ids) == 24
            answers.append(ids)
        return answers

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(ordinary, number) for number in range(8)]
        try:
            mixed = record_served(server.url, corpus, server.root / "mixed", Options())
        finally:
            stop.set()
        for number, client in enumerate(clients):
            answers = client.result()
            assert answers
            alone_ids = server.complete(prompt=[number + 3] * 20, max_tokens=24).json()["choices"][0]["token_ids"]
            assert all(ids == alone_ids for ids in answers)
    facts = Recording(server.root / "mixed").read("s0", Phase.DECODE).facts
    assert facts is not None
    assert facts.batch_size.max() > 1
    assert mixed.id == alone.id  # this engine's rows do not depend on the batch
    assert {path.name for path in server.root.iterdir()} - before == {"mixed"}


@pytest.mark.parametrize(
    "changes",
    [
        {"recording": "../outside"},
        {"recording": "/tmp/outside"},
        {"recording": "a/b"},
        {"recording": ".."},
        {"run": "../" * 10},
        {"corpus": "../" * 21},
        {"segment": "s" * 10_000},
        {"forced": [1, 2, VOCABULARY := 320]},
        {"forced": [1, 2, -1]},
        {"forced": list(range(300)) * 1000},
        {"keep": [[0, 1 << 30]]},
        {"keep": [[4, 0]]},
        {"root": "/tmp"},
    ],
)
def test_a_hostile_argument_is_a_400_and_the_server_lives(server: LiveServer, changes: dict[str, Any]) -> None:
    before = sorted(server.root.parent.rglob("*"))
    assert ask(server, **changes).status_code == 400
    assert sorted(server.root.parent.rglob("*")) == before
    assert server.complete().status_code == 200


@pytest.mark.parametrize("value", [7, 0.5, [1, 2], "", "{", "[" * 50_000, "x" * (2 << 20)])
def test_no_argument_at_all_is_a_400_too(server: LiveServer, value: object) -> None:
    assert server.complete(vllm_xargs={"logitgate": value}).status_code == 400
    assert server.complete().status_code == 200


def test_a_foreign_request_id_or_a_segment_that_looks_like_a_path_leads_nowhere(
    server: LiveServer, corpus: Corpus, alone: Manifest
) -> None:
    """Two requests under one id are two requests; ids are values, not paths; a complete recording takes nothing."""
    before = Recording(server.root / "alone").manifest
    text = json.dumps(dataclasses.asdict(ASK) | {"segment": "../../etc/passwd"})
    with ThreadPoolExecutor(2) as pool:
        same = [
            pool.submit(server.complete, request_id="../../mine", vllm_xargs={"logitgate": text} if ours else None)
            for ours in (True, False)
        ]
        ours, theirs = (future.result() for future in same)
    assert ours.json()["choices"][0]["token_ids"] == [1, 2, 3]
    assert theirs.json()["choices"][0]["token_ids"] == server.complete().json()["choices"][0]["token_ids"] != [1, 2, 3]
    assert {path.name.split("-")[0] for path in (server.root / "stranger").iterdir()} == {"part"}
    assert ask(server, recording="alone", corpus=corpus.sha256).status_code == 200
    wait_for(lambda: "complete" in state(server, "alone")["error"], seconds=30, what="a refusal")
    assert Recording(server.root / "alone").manifest == before


def state(server: LiveServer, name: str) -> dict[str, Any]:
    told: dict[str, Any] = httpx.get(f"{server.url}/v1/logitgate/recordings/{name}").json()
    return told


@pytest.mark.parametrize("name", ["..%2f..%2fetc", "%2e%2e", "UPPER", "a" * 65, "a%00b"])
def test_a_name_that_is_none_is_not_looked_up(server: LiveServer, name: str) -> None:
    assert httpx.get(f"{server.url}/v1/logitgate/recordings/{name}").status_code in (400, 404)


def test_wrong_addresses_models_and_names_are_told_in_words(server: LiveServer, corpus: Corpus, home: Path) -> None:
    with pytest.raises(EngineError, match="does not answer"):
        record_served("http://127.0.0.1:1", corpus, home / "x", Options())
    with pytest.raises(UsageError, match="http://"):
        record_served("localhost:8000", corpus, home / "x", Options())
    with pytest.raises(UsageError, match="other-model"):
        record_served(server.url, corpus, server.root / "wrong-model", Options(model="other-model"))
    with pytest.raises(UsageError, match="recording is"):
        record_served(server.url, corpus, server.root / "Not A Name", Options())
    assert not (home / "x").exists()


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_client_killed_at_any_moment_loses_nothing_that_resume_does_not_bring(
    server: LiveServer, home: Path, corpus: Corpus, alone: Manifest, seed: int
) -> None:
    folder = server.root / f"killed-{seed}"
    client = start_logitgate("record", "--server", server.url, "-c", home / "corpus.parquet", "-o", folder)
    chance = random.Random(seed)
    count = chance.randrange(2 * SEGMENTS - 1)
    wait_for(lambda: folder.exists() and len(parts(folder)) >= count, seconds=120, what=f"{count} parts")
    time.sleep(chance.uniform(0, 0.3))
    client.kill()
    client.communicate()
    assert server.complete().status_code == 200
    assert record_served(server.url, corpus, folder, Options(resume=True)).id == alone.id


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A tmpfs of its own at the folder. Skips where mounting is not permitted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def test_a_full_disk_is_told_the_server_serves_on_and_resume_completes(
    server: LiveServer, corpus: Corpus, alone: Manifest
) -> None:
    folder = server.root / "full"
    with small_disk(folder, "300k"):
        with pytest.raises(EngineError, match="space"):
            record_served(server.url, corpus, folder, Options())
        assert server.complete().status_code == 200
        assert Recording(folder).manifest.complete is False
        remount(folder, "size=8m")
        assert record_served(server.url, corpus, folder, Options(resume=True)).id == alone.id


def test_a_disk_that_turns_read_only_is_told_and_resume_completes(
    server: LiveServer, corpus: Corpus, alone: Manifest
) -> None:
    folder = server.root / "read-only"
    with small_disk(folder, "8m"):
        turned = threading.Event()

        def turn(done: int, total: int) -> None:
            if not turned.is_set() and parts(folder):
                remount(folder, "ro")
                turned.set()

        with pytest.raises(EngineError, match=r"(?i)read-only"):
            record_served(server.url, corpus, folder, Options(), turn)
        assert turned.is_set()
        assert server.complete().status_code == 200
        remount(folder, "rw")
        assert record_served(server.url, corpus, folder, Options(resume=True)).id == alone.id


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_worker_killed_ends_the_client_in_words_and_a_server_started_anew_completes(
    server: LiveServer, home: Path, corpus: Corpus, alone: Manifest, seed: int
) -> None:
    folder = server.root / f"worker-killed-{seed}"
    client = start_logitgate("record", "--server", server.url, "-c", home / "corpus.parquet", "-o", folder)
    count = random.Random(seed).randrange(1, 2 * SEGMENTS - 3)
    wait_for(lambda: len(parts(folder)) >= count, seconds=120, what=f"{count} parts")
    for worker in server.workers():
        worker.kill()
    _, told = client.communicate(timeout=120)
    assert client.returncode == 4
    assert "--resume" in told
    assert not Recording(folder).manifest.complete
    server.stop()
    server.start()
    assert record_served(server.url, corpus, folder, Options(resume=True)).id == alone.id
