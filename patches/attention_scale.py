"""A wrong softmax scale: from another head size, from the head count, in a few layers only."""

from __future__ import annotations

from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import attention_layers

STRENGTHS: list[tuple[str, float, int | None, str, str, Any]] = [
    ("1.069", 1.069, None, "ggml-org/llama.cpp#8444", "the scale is 6.9 % too large", "subtle"),
    ("1.03", 1.03, None, "ggml-org/llama.cpp#8444", "the scale is 3 % too large", "near-noise"),
    ("1.01", 1.01, None, "ggml-org/llama.cpp#8444", "the scale is 1 % too large", "near-noise"),
    ("0.943", 0.943, None, "vllm-project/vllm#31380", "the scale is that of a head of 72, not 64", "subtle"),
    (
        "head_count",
        8 / 3,
        None,
        "vllm-project/vllm#31380",
        "the scale comes from 9 heads, not from the head size",
        "obvious",
    ),
    ("first_layers", 8.0, 2, "mlc-ai/mlc-llm#3426", "the first two layers run a fallback path with scale 1", "obvious"),
]

PATCHES = [
    Patch(
        name=f"attention_scale_{name}",
        kind="fault",
        site="attention.scale",
        phase="both",
        source=source,
        summary=summary,
        shows="KL at all depths",
        fault_class="attn-scale",
        severity=severity,
        twin=severity == "near-noise",
        parameters={"factor": factor, "layers": layers},
    )
    for name, factor, layers, source, summary, severity in STRENGTHS
]


def apply(runner: Any, factor: float, layers: int | None) -> Hooks:
    """Multiply the scale in the first `layers` layers (None: in all)."""
    hooks = Hooks()
    for layer in attention_layers(runner)[:layers]:
        hooks.set(layer.impl, "scale", layer.impl.scale * factor)
    return hooks
