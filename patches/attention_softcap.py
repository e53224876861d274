"""A soft cap on attention scores that engine and model disagree about.

The model here has none, so the fault is a cap wrongly on; a cap wrongly off differs from the model by the same amount.
"""

from __future__ import annotations

from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import attention_layers

STRENGTHS: list[tuple[str, float, int, str, Any]] = [
    ("50", 50.0, 1, "vllm-project/vllm#7425", "near-noise"),
    ("30", 30.0, 1, "sgl-project/sglang#33915", "subtle"),
    ("15", 15.0, 1, "vllm-project/vllm#7425", "subtle"),
    ("30_odd_layers", 30.0, 2, "vllm-project/vllm-metal#665", "subtle"),
]

PATCHES = [
    Patch(
        name=f"attention_softcap_{name}",
        kind="fault",
        site="attention.scores",
        phase="both",
        source=source,
        summary=f"scores are capped at {cap:g} in {'every layer' if step == 1 else 'odd layers'}",
        shows="KL at all depths",
        fault_class="softcap",
        severity=severity,
        twin=severity == "near-noise",
        parameters={"cap": cap, "step": step},
    )
    for name, cap, step, source, severity in STRENGTHS
]


def apply(runner: Any, cap: float, step: int) -> Hooks:
    """Cap every layer (step 1) or every second one from the second on (step 2)."""
    hooks = Hooks()
    for layer in attention_layers(runner)[step - 1 :: step]:
        hooks.set(layer.impl, "logits_soft_cap", cap)
    return hooks
