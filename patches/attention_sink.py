"""An attention sink of logit 0 in every head: each softmax denominator is larger by exp(0 - maximum)."""

from __future__ import annotations

from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import attention_layers

PATCH = Patch(
    name="attention_sink_zero",
    kind="fault",
    site="attention.sink",
    phase="both",
    source="vllm-project/vllm#52156",
    summary="engine and model disagree about a sink: each head's denominator has one more term",
    shows="KL at all depths",
    fault_class="sink",
    severity="subtle",
)


def apply(runner: Any) -> Hooks:
    """Give every layer a sink of zeros."""
    import torch

    hooks = Hooks()
    for layer in attention_layers(runner):
        hooks.set(layer.impl, "sinks", torch.zeros(layer.num_heads, dtype=torch.float32))
    return hooks
