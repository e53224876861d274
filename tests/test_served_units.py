"""Serving without an engine: what a client may ask, who gets a seat, what reaches the disk."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import __version__
from harness.engine.client import Server
from harness.engine.instrument import LogprobLog
from harness.engine.recordings import MOST_OPEN, Recordings, prepare_root
from harness.engine.wire import LONGEST_TEXT, Ask, parse_ask
from harness.errors import EngineError, StorageError, UsageError
from harness.storage import Recording, begin_recording, finish_recording
from harness.types import Block, Phase
from tests.synthetic import make_build, make_corpus, make_rows, record

ASK = Ask(recording="build-7", run="0" * 32, corpus="c" * 64, segment="s", forced=(1, 2), keep=((0, 2), (3, 4)))

BAD_NAMES = [
    "", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "A", "ä", "-x", ".x", "_x", "a b", "a\n", "a\0b", "a" * 65,
    "%2e%2e", "..%2fx", None, 3, ["a"], {"a": 1},
]  # fmt: skip


def text(**changes: Any) -> str:
    return json.dumps(dataclasses.asdict(ASK) | changes)


def test_what_is_asked_travels_unchanged() -> None:
    assert parse_ask(ASK.to_text()) == ASK


@pytest.mark.parametrize("name", BAD_NAMES)
def test_no_name_leads_anywhere_but_below_the_root(name: Any) -> None:
    with pytest.raises(UsageError, match="recording"):
        parse_ask(text(recording=name))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"run": "../" + "0" * 29}, "run"),
        ({"corpus": "/" * 64}, "corpus"),
        ({"segment": ""}, "segment"),
        ({"segment": "s" * 257}, "segment"),
        ({"segment": "a\nb"}, "segment"),
        ({"forced": []}, "forced"),
        ({"forced": [-1]}, "forced"),
        ({"forced": [True]}, "forced"),
        ({"forced": [1.0]}, "forced"),
        ({"forced": [2**31]}, "forced"),
        ({"forced": {"0": 1}}, "forced"),
        ({"keep": [[2, 1]]}, "keep"),
        ({"keep": [[0, 2], [1, 3]]}, "keep"),
        ({"keep": [[0, 1, 2]]}, "keep"),
        ({"keep": "all"}, "keep"),
        ({"folder": "/tmp"}, "object of"),
    ],
)
def test_a_malformed_field_is_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_ask(text(**changes))


@pytest.mark.parametrize("value", [None, 3, [], "{", "[]", "[" * 100_000, "x" * (LONGEST_TEXT + 1), "1" * 9000])
def test_what_is_no_argument_at_all_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="argument"):
        parse_ask(value)


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_text_is_an_ask_or_a_usage_error(value: str) -> None:
    try:
        parse_ask(value)
    except UsageError:
        return
    raise AssertionError(f"{value!r} was accepted")


@pytest.mark.parametrize(
    ("around", "told"),
    [
        ({"prompt": None}, "embeddings"),
        ({"n": 2}, "n is 2"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"prompt": (1, 99)}, "vocabulary"),
        ({"vocab_size": 2}, "vocabulary"),
        ({"prompt": (1, 1)}, "keep reaches"),
    ],
)
def test_an_argument_must_fit_the_request_around_it(around: dict[str, Any], told: str) -> None:
    fitting: dict[str, Any] = {"prompt": (1, 1, 1), "max_tokens": 2, "n": 1, "vocab_size": 64}
    ASK.require_fit(**fitting)
    with pytest.raises(UsageError, match=told):
        ASK.require_fit(**(fitting | around))


# --------------------------------------------------------------------------- the worker's side


def block(index: int, segment: str = "s") -> Block:
    return Block(
        segment=segment, phase=Phase.DECODE, indices=np.array([index]), targets=np.array([1], np.int32),
        logits=np.full((1, 8), index, np.float32),
    )  # fmt: skip


def opened(root: Path) -> Recordings:
    prepare_root(root)
    return Recordings(root, vocab_size=8, logits_dtype="float32", prefix="part-r0")


def settled(recordings: Recordings, name: str = "build-7") -> dict[str, Any]:
    for _ in range(1000):
        state = recordings.state(name)
        if not state["requests"] and not state["pending"]:
            return state
        time.sleep(0.01)
    raise AssertionError(state)


def test_rows_are_whole_on_the_disk_once_the_last_request_left(tmp_path: Path) -> None:
    recordings = opened(tmp_path)
    seats = [recordings.seat(ASK), recordings.seat(ASK)]
    for i, seat in enumerate(seats):
        assert seat is not None
        seat.put(lambda i=i: block(i), 32)  # type: ignore[misc]  # bound now
        seat.put(lambda: block(7), 32)  # a request that was sent twice
        seat.leave()
        seat.leave()
    assert settled(recordings) == {"run": ASK.run, "requests": 0, "pending": 0, "rows": 3, "error": ""}
    (part,) = (tmp_path / "build-7").glob("part-r0-*.parquet")
    assert not list((tmp_path / "build-7").glob(".*"))
    assert part.stat().st_size > 0


def test_a_name_in_use_is_refused_to_another_run_and_free_afterwards(tmp_path: Path) -> None:
    recordings = opened(tmp_path)
    other = dataclasses.replace(ASK, run="1" * 32)
    first = recordings.seat(ASK)
    assert first is not None
    assert recordings.seat(other) is None
    first.leave()
    settled(recordings)
    assert recordings.seat(other) is not None


def test_so_many_names_at_once_and_no_more(tmp_path: Path) -> None:
    recordings = opened(tmp_path)
    seats = [recordings.seat(dataclasses.replace(ASK, recording=f"r{i}")) for i in range(MOST_OPEN)]
    assert recordings.seat(ASK) is None
    assert seats[3] is not None
    seats[3].leave()
    settled(recordings, "r3")
    assert recordings.seat(ASK) is not None
    assert recordings.state("r3")["run"] == ""


@pytest.mark.parametrize("obstacle", ["file", "link", "complete", "other corpus", "no root"])
def test_a_folder_that_may_not_be_written_is_told_and_stays_as_it_is(tmp_path: Path, obstacle: str) -> None:
    root, corpus = tmp_path / "root", make_corpus(vocabulary=8)
    folder = root / "build-7"
    recordings = opened(root)
    ask = dataclasses.replace(ASK, corpus=corpus.sha256)
    if obstacle == "file":
        folder.write_text("mine")
    elif obstacle == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif obstacle == "complete":
        record(folder, corpus, make_rows(corpus))
    elif obstacle == "other corpus":
        begin_recording(folder, corpus, make_build(), vocab_size=8, logits_dtype="float32")
        ask = ASK
    else:
        (root / ".logitgate").unlink()
        root.rmdir()
    before = sorted(tmp_path.rglob("*"))
    seat = recordings.seat(ask)
    assert seat is not None
    seat.put(lambda: block(0), 32)
    seat.leave()
    assert settled(recordings, "build-7")["error"]
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_killed_worker_left_is_cleared_and_its_rows_are_not_written_again(tmp_path: Path) -> None:
    corpus = make_corpus(vocabulary=8)
    segment = corpus.segments[0]
    rows = make_rows(corpus)
    folder = tmp_path / "build-7"
    ask = dataclasses.replace(ASK, corpus=corpus.sha256)
    begin_recording(folder, corpus, make_build(), vocab_size=8, logits_dtype="float32")

    def write(run: str) -> None:
        recordings = opened(tmp_path)  # a worker started anew
        seat = recordings.seat(dataclasses.replace(ask, run=run * 32))
        assert seat is not None
        for phase in Phase:
            for place, index in enumerate(segment.indices(phase)):
                seat.put(
                    lambda phase=phase, place=place, index=index: Block(  # type: ignore[misc]  # bound now
                        segment=segment.id, phase=phase, indices=np.array([index]),
                        targets=segment.targets(np.array([index])), logits=rows[segment.id, phase][place : place + 1],
                    ),
                    32,
                )  # fmt: skip
        seat.leave()
        assert not settled(recordings)["error"]

    write("a")
    (folder / ".part-r0-00001.parquet.tmp").write_bytes(b"half a part")
    write("b")
    assert not list(folder.glob(".*"))
    manifest = finish_recording(folder, make_build())
    assert manifest.rows_written == sum(len(segment.indices(phase)) for phase in Phase)
    assert np.array_equal(Recording(folder).read(segment.id, Phase.DECODE).logits, rows[segment.id, Phase.DECODE])


def test_a_full_queue_blocks_and_an_error_ends_one_recording_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.engine.writer.QUEUE_BYTES", 100)
    recordings = opened(tmp_path)
    broken, sound = recordings.seat(ASK), recordings.seat(dataclasses.replace(ASK, recording="sound"))
    assert broken is not None
    assert sound is not None
    gate = threading.Event()

    def fail() -> Block:
        gate.wait()
        raise OSError("the disk is gone")

    broken.put(fail, 80)
    second = threading.Thread(target=sound.put, args=(lambda: block(0), 80))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    gate.set()
    second.join()
    broken.leave()
    sound.leave()
    assert "the disk is gone" in settled(recordings)["error"]
    assert settled(recordings, "sound") == {"run": ASK.run, "requests": 0, "pending": 0, "rows": 1, "error": ""}


def test_a_root_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file")
    with pytest.raises(StorageError, match="root"):
        prepare_root(tmp_path / "root")


# --------------------------------------------------------------------------- the client's side


class Answers:
    """A server that is none: answers from a list for each path, the last one again and again."""

    def __init__(self, answers: dict[str, list[httpx.Response]]) -> None:
        self.answers, self.asked = answers, dict.fromkeys(answers, 0)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        number = self.asked[path]
        self.asked[path] += 1
        return self.answers[path][min(number, len(self.answers[path]) - 1)]


def talk(monkeypatch: pytest.MonkeyPatch, answers: Answers, method: str) -> Any:
    """Call a method of a client of that server, after one look at its models."""
    made = functools.partial(httpx.AsyncClient, transport=httpx.MockTransport(answers))
    monkeypatch.setattr("harness.engine.client.httpx.AsyncClient", made)
    monkeypatch.setattr("harness.engine.client._WAITS", (0.0, 0.0))

    async def ask() -> Any:
        async with Server("http://server/v1/") as server:
            await server.models()
            return await getattr(server, method)()

    return asyncio.run(ask())


MODELS = httpx.Response(200, json={"data": [{"id": "m"}]})


@pytest.mark.parametrize(
    ("response", "error", "told"),
    [
        (httpx.Response(404, json={"detail": "Not Found"}), EngineError, "VLLM_PLUGINS=logitgate"),
        (httpx.Response(200, json={"version": "0.0.0", "mark": "x"}), EngineError, "install the same"),
        (httpx.Response(200, json={"version": __version__, "refusal": "speculative"}), EngineError, "speculative"),
        (httpx.Response(200, json={"version": __version__}), EngineError, "LOGITGATE_RECORDINGS"),
        (httpx.Response(401, json={"error": "Unauthorized"}), UsageError, "LOGITGATE_API_KEY"),
        (httpx.Response(400, json={"error": {"message": "too long"}}), EngineError, "too long"),
        (httpx.Response(500, json={"error": {"message": "died"}}), EngineError, "--resume"),
        (httpx.Response(200, text="<html>"), EngineError, "not JSON"),
    ],
)
def test_what_a_server_says_reaches_the_user_in_words(
    monkeypatch: pytest.MonkeyPatch, response: httpx.Response, error: type[Exception], told: str
) -> None:
    answers = Answers({"/v1/models": [MODELS], "/v1/logitgate": [response]})
    with pytest.raises(error, match=told):
        talk(monkeypatch, answers, "facts")
    assert answers.asked["/v1/logitgate"] == 1


def test_a_busy_server_is_asked_again_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    good = httpx.Response(200, json={"version": __version__, "mark": "x"})
    busy = httpx.Response(503, json={"error": {"message": "busy"}})
    assert talk(monkeypatch, Answers({"/v1/models": [MODELS], "/v1/logitgate": [busy, busy, good]}), "facts")["mark"]
    always = Answers({"/v1/models": [MODELS], "/v1/logitgate": [busy]})
    with pytest.raises(EngineError, match="busy"):
        talk(monkeypatch, always, "facts")
    assert always.asked["/v1/logitgate"] == 3


def test_log_probs_travel_to_where_the_rows_are(tmp_path: Path) -> None:
    log = LogprobLog()
    log._rows[("s", Phase.DECODE)] = {3: -0.5, 4: float("-inf")}
    log.save(tmp_path / "kept.json")
    assert LogprobLog.load(tmp_path / "kept.json")._rows == log._rows
    assert LogprobLog.load(tmp_path / "none.json")._rows == {}
    (tmp_path / "kept.json").write_text("[[1]]")
    with pytest.raises(StorageError, match="log-probs"):
        LogprobLog.load(tmp_path / "kept.json")
