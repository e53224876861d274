"""Facts about the machine and the process that a recording's Build keeps: standard library, and torch where asked."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness.types import Json

_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Installed version of each distribution, sorted by name; packages that are not installed are left out."""
    found = {}
    for name in sorted(names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def host_facts() -> dict[str, str | int | None]:
    """Platform, processor, usable CPUs, bytes of memory and Python version. No host name and no user name."""
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _meminfo("MemTotal"),
        "python": platform.python_version(),
    }


def tf32_on(device: str) -> bool:
    """Whether torch's float32 matrix products run in TF32, 10 mantissa bits of 23, on a device ("cpu", "cuda:0").

    Says nothing of kernels that choose for themselves, as Triton's products do.
    """
    import torch

    if not device.startswith("cuda"):
        return False
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")  # cuBLAS and cuDNN obey it whatever torch says
    return override == "1" if override in ("0", "1") else torch.backends.cuda.matmul.fp32_precision == "tf32"


def has_bf16_units() -> bool:
    """Whether bf16 matrix products run at speed on this processor: AVX-512 or AMX on x86, the bf16 extension on Arm.

    True where the system does not tell.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return True
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), None)
    return flags is None or not {"avx512f", "amx_bf16", "bf16"}.isdisjoint(flags)


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping; None where the system does not tell."""
    return _meminfo("MemAvailable")


def git_state(folder: Path | None = None) -> Json | None:
    """Commit and dirty flag of the repository around `folder` (default: the working folder).

    None outside a repository or without git; `commit` is None in a repository without commits.
    """
    status = _git(folder, "status", "--porcelain")
    if status is None:
        return None
    return {"commit": _git(folder, "rev-parse", "--verify", "--quiet", "HEAD"), "dirty": bool(status)}


def relevant_environment(prefixes: Iterable[str]) -> dict[str, str]:
    """Environment variables whose name starts with a prefix, sorted; values that look like secrets are withheld."""
    starts = tuple(prefixes)
    return {
        name: "(set)" if any(word in name.upper() for word in _SECRET_WORDS) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(starts)
    }


def _git(folder: Path | None, *arguments: str) -> str | None:
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _meminfo(field: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    return next(sizes, None)
