"""Attention weights P rounded before they multiply V, while the row sum keeps them unrounded.

e4m3's smallest step is about 0.002: smaller weights vanish from the numerator alone, and the more keys there are, the
more is lost. Scaled by 448 first, the threshold moves to a few parts per million and the result is as good as bf16.
"""

from __future__ import annotations

from typing import Any

from harness.patching import Hooks, Patch

FAULTS: list[tuple[str, str, str, Any]] = [
    ("e4m3", "flashinfer-ai/flashinfer#5020", "P is cast to e4m3 without a scale", "subtle"),
    ("e5m2", "ROCm/FlyDSL#1020", "P is cast to e5m2", "subtle"),
]
BENIGN = [
    ("bf16", "stock on GPU kernels", "P is bf16"),
    ("f16", "FlashInfer's f16 kernels", "P is f16"),
    ("e4m3x448", "FlashAttention-3 style scaled fp8 P", "P is e4m3, scaled by 448"),
    ("e4m3x256", "FlashAttention-3 style scaled fp8 P", "P is e4m3, scaled by 256"),
    ("f32", "a second implementation of attention", "P stays f32; keys are visited in blocks of 64"),
]

PATCHES = [
    Patch(
        name=f"attention_p_{form}",
        kind="fault",
        site="attention.p",
        phase="both",
        source=source,
        summary=summary,
        shows="KL relative to bf16 P, growing with depth",
        fault_class="fp8-P",
        severity=severity,
        parameters={"round_p": form},
    )
    for form, source, summary, severity in FAULTS
] + [
    Patch(
        name=f"attention_p_{form}",
        kind="benign",
        site="attention.p",
        phase="both",
        source=source,
        summary=summary,
        shows="nothing beyond the floor",
        parameters={"round_p": form},
    )
    for form, source, summary in BENIGN
]


def apply(runner: Any, round_p: str) -> Hooks:
    """Replace attention by the naive one with this rounding."""
    from harness.engine.naive_attention import NaiveAttention, install

    return install(runner, NaiveAttention(round_p=round_p))
