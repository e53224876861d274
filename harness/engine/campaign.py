"""Many recordings on few engine loads: patches are applied and undone in the running workers.

One job's failure is that job's alone. An engine that no longer answers is started again for the jobs that are left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.calibration.jobs import Job, by_load
from harness.engine.session import EngineSession
from harness.errors import EngineError, LogitgateError, PatchError, StorageError
from harness.patching import LoadedPatch
from harness.storage import Recording
from harness.types import Corpus, Manifest, Phase

Recorded = Callable[[Job, Path, Manifest], None]
"""Called when a job's rows are on disk. It owns the folder from then on: keeps it, or removes it."""

Failed = Callable[[Job, str], None]
"""Called with the reason when a job could not be recorded; nothing of it is left on disk."""

Extra = Callable[[EngineSession, Job], None]
"""Called while a job's patches are in force, after its recording."""

Advance = Callable[[int, int], None]
"""Called with (requests done, requests in all) of the job under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Jobs over one corpus with one model. `common` patches are applied in every one of them, before its own."""

    model: str
    corpus: Corpus
    folder: Path  # recordings are made in FOLDER/JOB
    common: tuple[LoadedPatch, ...] = ()
    untested: bool = False

    def run(
        self,
        jobs: Sequence[Job],
        *,
        recorded: Recorded,
        failed: Failed,
        begun: Callable[[Job], None] = lambda job: None,
        extra: Extra | None = None,
        advance: Advance | None = None,
    ) -> None:
        """Record every job. A recording that an earlier run left unfinished in its folder is completed."""
        for load in by_load(jobs):
            waiting = list(load)
            while waiting:
                waiting = self._serve(waiting, recorded, failed, begun, extra, advance)

    def _serve(
        self,
        jobs: list[Job],
        recorded: Recorded,
        failed: Failed,
        begun: Callable[[Job], None],
        extra: Extra | None,
        advance: Advance | None,
    ) -> list[Job]:
        """Serve jobs of one setting from one engine; returns those left when it no longer answers."""
        setting = jobs[0].setting
        with environment(setting.environment):
            try:
                session = EngineSession(self.model, setting.engine, untested=self.untested)
            except LogitgateError as error:
                for job in jobs:
                    failed(job, f"the engine did not start in this setting: {error}")
                return []
            with session:
                for done, job in enumerate(jobs, 1):
                    begun(job)
                    try:
                        manifest = self._record(session, job, extra, advance)
                    except (EngineError, PatchError, StorageError) as error:
                        shutil.rmtree(self.folder / job.name, ignore_errors=True)
                        failed(job, str(error))
                        if not session.answers():
                            return jobs[done:]
                    else:
                        recorded(job, self.folder / job.name, manifest)
        return []

    def _record(self, session: EngineSession, job: Job, extra: Extra | None, advance: Advance | None) -> Manifest:
        folder = self.folder / job.name
        if job.setting.engine.get("enable_prefix_caching"):
            session.forget_prefixes()
        with session.patched((*self.common, *job.hooked)) as described:
            record: Mapping[str, Any] = {
                "patches": described,
                "pattern": job.setting.pattern,
                "prompt_rows": job.setting.prompt_rows,
                "progress": advance,
            }
            if job.setting.pattern.preemption:  # it would go unseen if it lay in the part that is there already
                shutil.rmtree(folder, ignore_errors=True)
            try:
                manifest = session.record(self.corpus, folder, resume=folder.exists(), **record)
            except StorageError:  # what is there is of something else, or damaged: make it anew
                shutil.rmtree(folder, ignore_errors=True)
                manifest = session.record(self.corpus, folder, **record)
            if extra is not None:
                extra(session, job)
        _require_pattern(job, folder, manifest, session.resumed_requests)
        return manifest


@contextmanager
def environment(variables: Mapping[str, Any]) -> Iterator[None]:
    """Variables set while an engine starts and runs, put back afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def _require_pattern(job: Job, folder: Path, manifest: Manifest, resumed: int) -> None:
    """Raise EngineError unless the rows' own step facts show the request pattern that was asked for."""
    pattern = job.setting.pattern
    together = job.patch is not None and job.patch.patch.requests.get("concurrency", 1) > 1
    if not (pattern.prefix_hit or pattern.preemption or together) or not manifest.rows_written:
        return
    facts = _decode_facts(Recording(folder, verify=False))
    wanted = {
        "a prefix-cache hit before every decode": pattern.prefix_hit and int(facts["cached_tokens"].min()) <= 0,
        "preemption": pattern.preemption and resumed == 0,
        "several requests in a step": together and int(facts["batch_size"].max()) < 2,
    }
    missing = [what for what, absent in wanted.items() if absent]
    if missing:
        raise EngineError(
            f"{job.name} asks for a request pattern that did not happen: {', '.join(missing)}; its rows are not what "
            "they claim to be. Use a corpus with more or longer segments, or leave it out"
        )


def _decode_facts(recording: Recording) -> dict[str, np.ndarray[Any, Any]]:
    """Step facts of the first decode row of each segment, [S]; -1 alone if nothing decodes."""
    found: dict[str, list[int]] = {"cached_tokens": [-1], "batch_size": [-1]}
    for segment in recording.corpus.segments:
        first = segment.indices(Phase.DECODE)[:1]
        if len(first):
            facts = recording.read(segment.id, Phase.DECODE, first).facts
            if facts is not None:
                found["cached_tokens"].append(int(facts.cached_tokens[0]))
                found["batch_size"].append(int(facts.batch_size[0]))
    return {name: np.array(values[1:] or values) for name, values in found.items()}
