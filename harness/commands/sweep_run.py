"""Sweeps at work: several variants from as few engine loads as they allow, each kept as a small result.

The peer's rows stay in the work folder until every variant was held against them; a run that was killed goes on with
the variants that are left, and records the peer's rows again if they are gone.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.calibration.jobs import Job, Setting, job_of
from harness.calibration.sweep import GREEDY_TOKENS, Variant, load_variants, profile, save_variant
from harness.commands.calibration_run import Bench
from harness.commands.result_keeper import now
from harness.errors import UsageError
from harness.manifest_json import to_plain
from harness.patching import load_patch
from harness.types import Manifest

if TYPE_CHECKING:
    from harness.engine.session import EngineSession

P_FORMS = ("f32", "bf16", "f16", "e4m3", "e4m3x448", "e4m3x256")
CPU_BACKENDS = ("vec", "naive")
"""No vec16: it is for head sizes that 32 does not divide; vLLM 0.32 refuses the blocks of 16 that selected it too."""

CUDA_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")

GREEDY_SEGMENTS = 8


@dataclass(slots=True)
class Sweep:
    """Variants on one bench. The first is the peer of the others; their results go to `out`."""

    bench: Bench
    jobs: list[Job]
    out: Path
    failures: list[str] = field(default_factory=list)
    _greedy: dict[str, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The variants, the peer first."""
        return [job.name for job in self.jobs]

    def run(self) -> dict[str, Variant]:
        """Make what is not there yet; returns every variant there is, in order."""
        from harness.engine.campaign import Campaign
        from harness.report.console import progress_bar

        there = load_variants(self.out, self.names)
        left = [job for job in self.jobs if not self._is_done(job, there)]
        peer = self.jobs[0]
        if left and peer not in left and not (self._rows / peer.name / "recording.json").is_file():
            left = [peer, *left]
        if left:
            self.bench.say(f"{len(left)} of {len(self.jobs)} variants to record")
            campaign = Campaign(
                model=self.bench.model, corpus=self.bench.corpus, folder=self._rows, common=self.bench.common
            )
            with progress_bar("sweep, requests") as advance:
                campaign.run(
                    left, recorded=self._recorded, failed=self._failed, extra=self._decode_freely, advance=advance
                )
        there = load_variants(self.out, self.names)
        if len(there) == len(self.jobs):
            shutil.rmtree(self._rows, ignore_errors=True)
        return there

    @property
    def _rows(self) -> Path:
        return self.bench.folder / "rows" / self.out.name

    def _is_done(self, job: Job, there: dict[str, Variant]) -> bool:
        variant = there.get(job.name)
        return variant is not None and variant.setting == to_plain(job.setting, job.name)

    def _decode_freely(self, session: EngineSession, job: Job) -> None:
        """Greedy text after the first segments of each kind, as deep as the engine's context allows."""
        fit = [s for s in self.bench.corpus.segments if s.decode_from + GREEDY_TOKENS <= session.max_positions]
        kinds = sorted({segment.kind for segment in fit})
        kept = []
        for kind in kinds:
            shallow_first = sorted((s for s in fit if s.kind == kind), key=lambda s: s.depth)
            kept += shallow_first[: GREEDY_SEGMENTS // len(kinds)]
        prompts = {s.id: s.token_ids[: s.decode_from].tolist() for s in kept}
        self._greedy[job.name] = session.greedy(prompts, GREEDY_TOKENS) if prompts else {}

    def _recorded(self, job: Job, folder: Path, manifest: Manifest) -> None:
        from harness.compare import compare

        peer = self._rows / self.jobs[0].name
        apart = job is not self.jobs[0] and (peer / "recording.json").is_file()
        texts = self._greedy.pop(job.name, {})
        variant = Variant(
            name=job.name,
            summary="" if job.patch is None else job.patch.patch.summary,
            recording=manifest.id,
            seconds=math.nan if manifest.seconds is None else manifest.seconds,
            setting=to_plain(job.setting, job.name),
            build=_kept(manifest),
            created=now(),
            reference=profile(compare(self.bench.reference, folder).positions),
            peer=profile(compare(peer, folder).positions) if apart else None,
            greedy={name: tuple(token for token, _ in text) for name, text in texts.items()},
            leads={name: tuple(lead for _, lead in text) for name, text in texts.items()},
        )
        save_variant(variant, self.out)
        if job is not self.jobs[0]:
            shutil.rmtree(folder)
        mean = sum(c.mean * c.rows for c in variant.reference.cells) / sum(c.rows for c in variant.reference.cells)
        self.bench.say(f"{job.name}: mean KL20 {mean:.3g} nat against the reference, {variant.seconds:.0f} s")

    def _failed(self, job: Job, reason: str) -> None:
        self.failures.append(f"{job.name}: {reason}")
        self.bench.say(f"{job.name}: ERROR: {reason}")


def attention_p_jobs(bench: Bench, forms: Sequence[str]) -> list[Job]:
    """Naive attention with each rounding of P, f32 first. Raises UsageError for a form without a patch."""
    unknown = [form for form in forms if form not in P_FORMS]
    if unknown or not forms:
        raise UsageError(f"--variants {','.join(forms)}: expected some of {', '.join(P_FORMS)}")
    ordered = sorted(dict.fromkeys(("f32", *forms)), key=P_FORMS.index)
    return [_renamed(job_of(load_patch(f"attention_p_{form}"), bench.base, bench.corpus), form) for form in ordered]


def backend_jobs(bench: Bench, names: Sequence[str], *, cuda: bool) -> list[Job]:
    """The attention kernels there are here; each is an engine load of its own, but for the naive one."""
    known = CUDA_BACKENDS if cuda else CPU_BACKENDS
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(f"--variants {','.join(names)}: on this machine expected some of {', '.join(known)}")
    jobs = []
    for name in dict.fromkeys(names):
        if name == "naive":
            jobs.append(_renamed(job_of(load_patch("attention_p_f32"), bench.base, bench.corpus), name))
            continue
        extra: dict[str, Any] = {"attention_backend": name} if cuda else {}
        setting = Setting(
            engine={**bench.base.engine, **extra},
            environment=bench.base.environment,
            pattern=bench.base.pattern,
            prompt_rows=bench.base.prompt_rows,
        )
        jobs.append(Job(name=name, setting=setting))
    return jobs


def _renamed(job: Job, name: str) -> Job:
    return Job(name=name, setting=job.setting, patch=job.patch)


def _kept(manifest: Manifest) -> dict[str, Any]:
    build = to_plain(manifest.build, "build")
    kept = ("engine_version", "model", "dtype", "attention", "packages", "host", "patches")
    return {name: build[name] for name in kept}
