"""Only half of each head's dimensions are rotated: a partial rotary factor applied twice, or shared and halved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import EAGER, attention_layers, rope_modules, rope_table

PATCHES = [
    Patch(
        name=f"rope_partial_{where}",
        kind="fault",
        site="rope.forward",
        phase="both",
        source=source,
        summary=summary,
        shows="KL and large-margin flips at all depths",
        fault_class="rope",
        severity="obvious",
        engine=EAGER,
        parameters={"first_layer": fraction},
    )
    for where, fraction, source, summary in [
        ("all", 0.0, "vllm-project/vllm#30384", "the partial rotary factor is applied twice"),
        (
            "late",
            0.5,
            "vllm-project/vllm#16904",
            "a shared rotary object was halved: later layers rotate fewer dimensions",
        ),
    ]
]


def apply(runner: Any, first_layer: float) -> Hooks:
    """Rotate the first half of each head, from layer `first_layer` (a fraction of the depth) on.

    Layers share one rotary object and call it in order, so counting its calls tells them apart.
    """
    import torch

    layers = len(attention_layers(runner))
    hooks = Hooks()
    for rope in rope_modules(runner):
        half = rope.rotary_dim // 2
        inv_freq = 1.0 / rope.base ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
        table = rope_table(inv_freq, torch.arange(len(rope.cos_sin_cache), dtype=torch.float32)).to(rope.cos_sin_cache)

        def make(
            original: Callable[..., Any], rope: Any = rope, half: int = half, table: Any = table
        ) -> Callable[..., Any]:
            calls = 0

            def forward(positions: Any, query: Any, key: Any = None) -> Any:
                nonlocal calls
                layer, calls = calls % layers, calls + 1
                if layer < first_layer * layers:
                    return original(positions, query, key)
                return rope.forward_static(positions, query, key, rope.head_size, half, table, rope.is_neox_style)

            return forward

        hooks.wrap(rope, "forward", make)
    return hooks
