"""Recording a running server: the client asks, the server's workers write, and whoever sees the folder finishes it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness._stock import load_manifest
from harness.corpus import check_fits
from harness.engine.client import Server
from harness.engine.describe import build_from
from harness.engine.instrument import LogprobLog
from harness.engine.recordings import MARK
from harness.engine.requests import ScoredRequest, plan
from harness.engine.start import require_tested
from harness.engine.wire import Ask, require_name
from harness.errors import EngineError, StorageError, UsageError
from harness.storage import begin_recording, finish_recording
from harness.types import Corpus, Manifest

Progress = Callable[[int, int], None]
"""Called with (requests done, requests in all)."""

LOGPROBS = "logprobs.json"
"""File in a recording's folder: the engine's log-probs, until the rows have come to it."""

_WATCH_SECONDS = 2.0  # between two looks at whether the server still writes
_PATIENCE_SECONDS = 120.0  # without any progress before a wait is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to record."""

    model: str | None = None  # a name the server serves its model under; None: the first it lists
    concurrency: int = 1
    prompt_rows: str = "engine"  # as `EngineSession.record` has it
    resume: bool = False
    untested: bool = False


def record_served(
    url: str, corpus: Corpus, folder: Path, options: Options, progress: Progress | None = None
) -> Manifest:
    """Have the server at `url` record every scored row of the corpus, under the name of `folder`.

    If `folder` lies in the server's root, as this machine sees it, the recording is finished there. If not, `folder`
    gets all but the rows: the manifest comes back incomplete, and once the server's parts have been copied into the
    folder, `finish_served` completes it. Raises UsageError and EngineError; what was written until then can be resumed.
    """
    return asyncio.run(_record(url, corpus, folder, options, progress))


def finish_served(folder: Path) -> Manifest:
    """Finish a recording whose parts were copied into `folder`. Raises StorageError if it is not one."""
    manifest = load_manifest(folder)
    if manifest.complete:
        return manifest
    if not (folder / LOGPROBS).exists():
        raise StorageError(f"{folder} has no {LOGPROBS}: it was not recorded from a server; go on with --resume")
    check = LogprobLog.load(folder / LOGPROBS).check(folder)
    finished = finish_recording(folder, manifest.build, instrument=check, seconds=manifest.seconds)
    if finished.complete:
        (folder / LOGPROBS).unlink()
    return finished


async def _record(url: str, corpus: Corpus, folder: Path, options: Options, progress: Progress | None) -> Manifest:
    name = require_name(folder.resolve().name)
    if options.concurrency < 1:
        raise UsageError(f"--concurrency is {options.concurrency}: expected at least 1")
    begun = time.monotonic()
    async with Server(url) as server:
        facts = await server.facts()
        require_tested(facts["facts"]["engine_version"], options.untested)
        check_fits(corpus, max_positions=facts["max_positions"], vocab_size=facts["vocab_size"], tokenizer_sha256=None)
        model = options.model or (await server.models())[0]
        seen = _sees(folder, facts["mark"])
        await _until_quiet(server, name)
        requested = {**facts["arguments"], "concurrency": options.concurrency, "prompt_rows": options.prompt_rows}
        requested["served"] = True
        build = build_from(requested.pop("model", model), requested, facts["facts"], ())
        present = begin_recording(
            folder,
            corpus,
            build,
            vocab_size=facts["vocab_size"],
            logits_dtype=facts["logits_dtype"],
            resume=options.resume,
        )
        if (there := load_manifest(folder)).complete:
            return there
        log = LogprobLog.load(folder / LOGPROBS)
        requests = plan(corpus, present.by_segment()) or plan(corpus)[:1]  # one, for the instrument check
        run = _Run(server=server, model=model, name=name, corpus=corpus.sha256, options=options, log=log)
        try:
            await run.serve(requests, progress)
        finally:
            if not seen:
                log.save(folder / LOGPROBS)
    if not seen:
        return load_manifest(folder)
    check = log.check(folder)
    return finish_recording(folder, build, instrument=check, seconds=time.monotonic() - begun)


class _Run:
    """One client's run over one recording."""

    def __init__(
        self, *, server: Server, model: str, name: str, corpus: str, options: Options, log: LogprobLog
    ) -> None:
        self._server, self._model, self._name, self._corpus = server, model, name, corpus
        self._options, self._log = options, log
        self._id = secrets.token_hex(16)
        self._done = 0

    async def serve(self, requests: Sequence[ScoredRequest], progress: Progress | None) -> None:
        """Have all requests served, and wait until the server has written their rows."""
        waiting = iter(requests)
        lanes = [
            asyncio.create_task(self._lane(waiting, len(requests), progress))
            for _ in range(min(self._options.concurrency, len(requests)))
        ]
        watch = asyncio.create_task(self._watch())
        try:
            pending: set[asyncio.Task[None]] = set(lanes)
            while pending:
                done, _ = await asyncio.wait({*pending, watch}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what it raised
                pending -= done
        finally:
            for task in (*lanes, watch):
                task.cancel()
                with suppress(asyncio.CancelledError, EngineError, UsageError):
                    await task
        await self._until_written()

    async def _lane(self, waiting: Iterator[ScoredRequest], total: int, progress: Progress | None) -> None:
        for request in waiting:
            ask = Ask(
                recording=self._name,
                run=self._id,
                corpus=self._corpus,
                segment=request.segment,
                forced=request.forced,
                keep=request.keep,
            )
            by_engine = request.scores_prompt and self._options.prompt_rows == "engine"
            self._log.add(request, await self._server.complete(self._model, request, ask, prompt_logprobs=by_engine))
            self._done += 1
            if progress:
                progress(self._done, total)

    async def _watch(self) -> None:
        """End the run early if the server cannot write."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self._require_sound(await self._server.state(self._name))

    async def _until_written(self) -> None:
        def settled(state: dict[str, Any]) -> bool:
            self._require_sound(state)
            if state["run"] != self._id:
                raise EngineError(
                    f"the server did not write {self._name}: another client records under that name; choose another"
                )
            return not state["requests"] and not state["pending"]

        if not await _wait(self._server, self._name, settled):
            raise EngineError(
                f"the server stopped writing {self._name} before its last row; see its log, then --resume"
            )

    def _require_sound(self, state: dict[str, Any]) -> None:
        if state["error"] and state["run"] == self._id:
            raise EngineError(f"the server could not write {self._name}: {state['error']}; then go on with --resume")


async def _until_quiet(server: Server, name: str) -> None:
    """Wait for what a client that was killed left in flight under that name."""
    if not await _wait(server, name, lambda state: not state["requests"] and not state["pending"]):
        raise UsageError(f"another client is recording {name} on {server.url}: choose another name, or wait for it")


async def _wait(server: Server, name: str, good: Callable[[dict[str, Any]], bool]) -> bool:
    """Ask after a recording until its state is good; False after a long time without any change."""
    last, since, pause = None, time.monotonic(), 0.05
    while True:
        state = await server.state(name)
        if good(state):
            return True
        if state != last:
            last, since = state, time.monotonic()
        if time.monotonic() - since > _PATIENCE_SECONDS:
            return False
        await asyncio.sleep(pause)
        pause = min(1.0, pause * 1.5)


def _sees(folder: Path, mark: str) -> bool:
    """Whether the folder lies in the server's root: the same directory, whatever path each side has for it."""
    try:
        return (folder.resolve().parent / MARK).read_text() == mark
    except OSError:
        return False
