"""A sliding window that the model does not have: keys further back are lost. Nothing differs before its length."""

from __future__ import annotations

from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import attention_layers

PATCHES = [
    Patch(
        name=f"attention_window_{name}",
        kind="fault",
        site="attention.window",
        phase="both",
        source=source,
        summary=f"{where} sees {window} keys back only",
        shows=f"KL by depth: a step at {window}",
        fault_class="window",
        severity=severity,
        parameters={"window": window, "step": step},
    )
    for name, window, step, where, source, severity in [
        (
            "256",
            256,
            1,
            "every layer",
            "synthetic: a window on that the model lacks, after vllm-project/vllm#3385",
            "obvious",
        ),
        (
            "128",
            128,
            1,
            "every layer",
            "synthetic: a window on that the model lacks, after vllm-project/vllm#3385",
            "obvious",
        ),
        ("256_odd_layers", 256, 2, "every odd layer", "vllm-project/vllm#23969", "subtle"),
    ]
]


def apply(runner: Any, window: int, step: int) -> Hooks:
    """Set the window of every layer (step 1), or of every second one (step 2)."""
    hooks = Hooks()
    for layer in attention_layers(runner)[step - 1 :: step]:
        hooks.set(layer.impl, "sliding_window", window)
    return hooks
