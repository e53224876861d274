"""The cos/sin table kept in float32, and the rotation done in it: closer to the reference than vLLM's bf16 table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import EAGER, rope_modules

PATCH = Patch(
    name="rope_table_f32",
    kind="benign",
    site="rope.table",
    phase="both",
    source="huggingface/transformers#38131",
    summary="cos and sin are float32, and so is the rotation",
    shows="nothing: 0.95 of the stock mean KL",
    engine=EAGER,
)


def apply(runner: Any) -> Hooks:
    """Rotate in float32 with the table as computed, before it is rounded to the model's dtype."""
    hooks = Hooks()
    for rope in rope_modules(runner):
        table = rope._compute_cos_sin_cache()

        def make(_: Callable[..., Any], rope: Any = rope, table: Any = table) -> Callable[..., Any]:
            def forward(positions: Any, query: Any, key: Any = None) -> Any:
                rotated = rope.forward_static(
                    positions, query.float(), key.float(), rope.head_size, rope.rotary_dim, table, rope.is_neox_style
                )
                return tuple(part.to(query.dtype) for part in rotated)

            return forward

        hooks.wrap(rope, "forward", make)
    return hooks
