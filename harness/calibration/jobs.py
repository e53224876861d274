"""What a campaign of recordings has to run: one job a build, and as few engine loads as their settings allow. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from harness.patching import LoadedPatch
from harness.patterns import Pattern, engine_needs, pattern_of
from harness.types import Corpus, Json

STOCK = "stock"
"""Name of the job that records the unchanged build; in any setting but the base one it is "stock-KEY"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that two builds must share for their rows to be compared bit by bit."""

    engine: Json = field(default_factory=dict)  # engine arguments, as vLLM names them
    environment: Json = field(default_factory=dict)  # variables the engine starts with
    pattern: Pattern = field(default_factory=Pattern)  # how requests meet the engine
    prompt_rows: str = "engine"  # or "window": the head on the scored rows only

    @property
    def load(self) -> str:
        """Equal for settings that one engine load serves."""
        return _canonical([self.engine, self.environment])

    @property
    def key(self) -> str:
        """Eight hexadecimal digits that stand for the setting in file names."""
        return hashlib.sha256(_canonical([self.load, asdict(self.pattern), self.prompt_rows]).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One recording to make."""

    name: str
    setting: Setting
    patch: LoadedPatch | None = None  # None: the unchanged build
    stock: str = ""  # name of the job whose rows it must differ from; "" for that job itself

    @property
    def hooked(self) -> tuple[LoadedPatch, ...]:
        """What to apply in the workers."""
        return () if self.patch is None or self.patch.function is None else (self.patch,)


def job_of(patch: LoadedPatch, base: Setting, corpus: Corpus) -> Job:
    """The job that records a patch over a base setting.

    A patch that changes code is held against the unchanged build in the very setting it needs; one that is a
    configuration of its own, against the base. Raises UsageError for a request pattern no runner produces.
    """
    asked = patch.patch
    hooked = patch.function is not None
    pattern = pattern_of(asked.requests, concurrency=base.pattern.concurrency, at_least=hooked)
    setting = Setting(
        engine={**base.engine, **asked.engine, **engine_needs(pattern, corpus)},
        environment={**base.environment, **asked.environment},
        pattern=pattern,
        prompt_rows=base.prompt_rows,
    )
    return Job(name=asked.name, setting=setting, patch=patch, stock=stock_name(setting if hooked else base, base))


def stock_name(setting: Setting, base: Setting) -> str:
    """Name of the unchanged build's job in a setting."""
    return STOCK if setting == base else f"{STOCK}-{setting.key}"


def with_stock(jobs: Sequence[Job], base: Setting, *, present: Iterable[str] = ()) -> list[Job]:
    """The jobs, and before them the unchanged builds they are held against, but for those `present` already."""
    settings = {STOCK: base} | {job.stock: job.setting for job in jobs if job.hooked}
    wanted = {job.stock for job in jobs} - set(present)
    stocks = [Job(name=name, setting=setting) for name, setting in settings.items() if name in wanted]
    return [*stocks, *jobs]


def same_as_stock(job: Job, base: Setting) -> bool:
    """Whether a variation is nothing but the base setting itself: there is nothing to run."""
    return not job.hooked and job.patch is not None and job.setting == base


def by_load(jobs: Sequence[Job]) -> list[list[Job]]:
    """The jobs, grouped by the engine load that serves them, in the order in which each load is first needed."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.setting.load, []).append(job)
    return list(groups.values())


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
