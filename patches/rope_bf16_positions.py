"""RoPE angles from positions and inverse frequencies in bf16.

bf16 has 8 significant bits: positions above 256 collapse onto each other, so distant tokens get the same rotation.
vLLM keeps the finished table in bf16 by design; only the product before cosine and sine is wrong here.
"""

from __future__ import annotations

from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import rewrite_rope, rope_table

PATCH = Patch(
    name="rope_bf16_positions",
    kind="fault",
    site="rope.table",
    phase="both",
    source="vllm-project/vllm#1004",
    summary="the cos/sin table is built from positions and inverse frequencies in bf16",
    shows="KL and large-margin flips, growing with depth from position 256 on",
    fault_class="rope",
    severity="obvious",
)


def apply(runner: Any) -> Hooks:
    """Rewrite every cos/sin table in place."""
    hooks = Hooks()
    rewrite_rope(hooks, runner, lambda _, inv_freq, positions: rope_table(inv_freq.bfloat16(), positions.bfloat16()))
    return hooks
