"""P scaled against a stale maximum: it exceeds what e4m3 can hold and saturates."""

from __future__ import annotations

from typing import Any

from harness.patching import Hooks, Patch

PATCH = Patch(
    name="attention_p_saturated",
    kind="fault",
    site="attention.p",
    phase="both",
    source="Dao-AILab/flash-attention#2717",
    summary="P times 4096 is clamped to 448, e4m3's largest value",
    shows="KL and large-margin flips, growing with depth",
    fault_class="fp8-P",
    severity="obvious",
    parameters={"scale": 4096.0},
)


def apply(runner: Any, scale: float) -> Hooks:
    """Replace attention by the naive one, with this scale in its cast."""
    from harness.engine.naive_attention import NaiveAttention, install

    return install(runner, NaiveAttention(round_p=f"e4m3x{scale:g}"))
