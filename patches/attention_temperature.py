"""Queries scaled up with the logarithm of their position: long-context temperature tuning switched on by mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import EAGER, rope_modules

PATCH = Patch(
    name="attention_temperature",
    kind="fault",
    site="attention.scale",
    phase="both",
    source="vllm-project/vllm#16439",
    summary="queries past position 256 are scaled by 1 + 0.1 ln(floor(position / 256) + 1)",
    shows="KL by depth, from position 256 on",
    fault_class="attn-scale",
    severity="subtle",
    engine=EAGER,
    parameters={"every": 256},
)


def apply(runner: Any, every: int) -> Hooks:
    """Scale queries as they leave the rotary embedding."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(positions: Any, query: Any, key: Any = None) -> Any:
            query, key = original(positions, query, key)
            factor = 1 + 0.1 * ((positions // every) + 1).float().log()
            return (query * factor[:, None].to(query.dtype)), key

        return forward

    hooks = Hooks()
    for rope in rope_modules(runner):
        hooks.wrap(rope, "forward", make)
    return hooks
