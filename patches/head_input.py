"""The final hidden states rounded before the head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.patching import Hooks, Patch
from harness.rounding import keep_bits

PATCHES = [
    Patch(
        name=f"head_input_{bits}_bits",
        kind="fault",
        site="head.input",
        phase="both",
        source="synthetic: limit of detection",
        summary=f"final hidden states keep {bits} mantissa bits",
        shows="KL at all depths",
        fault_class="head-dtype",
        severity=severity,
        parameters={"bits": bits},
    )
    for bits, severity in [(6, "near-noise"), (4, "subtle"), (3, "subtle"), (2, "obvious")]
]


def apply(runner: Any, bits: int) -> Hooks:
    """Round what goes into the logits processor."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda lm_head, hidden, *rest, **named: original(lm_head, keep_bits(hidden, bits), *rest, **named)

    hooks = Hooks()
    hooks.wrap(runner.get_model().logits_processor, "forward", make)
    return hooks
