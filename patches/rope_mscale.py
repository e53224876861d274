"""Cosines and sines multiplied by a YaRN attention factor that the model does not want.

The factor enters scores squared: attention is too sharp at every depth.
"""

from __future__ import annotations

from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import rope_modules

STRENGTHS = [
    (1.416, "vllm-project/vllm#48351", "obvious"),
    (1.2773, "vllm-project/vllm#48621", "obvious"),
    (1.05, "turboderp-org/exllamav3#259", "subtle"),
    (1.02, "vllm-project/vllm#48351", "near-noise"),
]

PATCHES = [
    Patch(
        name=f"rope_mscale_{factor}",
        kind="fault",
        site="rope.table",
        phase="both",
        source=source,
        summary=f"cos and sin are multiplied by {factor} instead of 1",
        shows="KL at all depths",
        fault_class="rope",
        severity=severity,
        twin=factor < 1.03,
        parameters={"factor": factor},
    )
    for factor, source, severity in STRENGTHS
]


def apply(runner: Any, factor: float) -> Hooks:
    """Scale every cos/sin table in place."""
    hooks = Hooks()
    for rope in rope_modules(runner):
        hooks.write(rope.cos_sin_cache, rope.cos_sin_cache.float() * factor)
    return hooks
