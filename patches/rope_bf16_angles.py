"""RoPE angles rounded to bf16: positions and inverse frequencies are exact, their product is not (autocast)."""

from __future__ import annotations

from typing import Any

from harness.patching import Hooks, Patch
from harness.rounding import cast_through
from harness.sites import rewrite_rope

PATCH = Patch(
    name="rope_bf16_angles",
    kind="fault",
    site="rope.table",
    phase="both",
    source="huggingface/transformers#29285",
    summary="position times inverse frequency is rounded to bf16 before cosine and sine",
    shows="KL growing with position",
    fault_class="rope",
    severity="obvious",
)


def apply(runner: Any) -> Hooks:
    """Rewrite every cos/sin table in place."""
    import torch

    def table(_: Any, inv_freq: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = cast_through(positions[:, None] * inv_freq, "bf16")
        return torch.cat((angles.cos(), angles.sin()), -1)

    hooks = Hooks()
    rewrite_rope(hooks, runner, table)
    return hooks
