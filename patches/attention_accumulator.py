"""The running output of attention rounded after every block of keys: an accumulator too narrow."""

from __future__ import annotations

from typing import Any

from harness.patching import Hooks, Patch

PATCHES = [
    Patch(
        name=f"attention_accumulator_{form}",
        kind="fault",
        site="attention.accumulator",
        phase="both",
        source="NVIDIA/TensorRT-LLM#1006",
        summary=f"P V is accumulated in {form}, rounded every 128 keys",
        shows="KL growing with depth; bf16 is below the floor of a bf16 engine",
        fault_class="precision-switch",
        severity=severity,
        twin=form == "bf16",
        parameters={"form": form},
    )
    for form, severity in [("bf16", "near-noise"), ("e4m3", "obvious")]
]


def apply(runner: Any, form: str) -> Hooks:
    """Replace attention by the naive one with a narrow accumulator."""
    from harness.engine.naive_attention import NaiveAttention, install

    return install(runner, NaiveAttention(round_sum=form, block=128))
