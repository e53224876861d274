"""A recycled cache block is not cleaned: slots past the last token hold NaN, and 0 times NaN leaks out of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import attention_layers

PATCH = Patch(
    name="kv_unused_nan",
    kind="fault",
    site="kv.blocks",
    phase="both",
    source="vllm-project/vllm#43961",
    summary="each block is NaN until its tokens are written",
    shows="NaN rows",
    fault_class="kv-reuse",
    severity="obvious",
)


def apply(runner: Any) -> Hooks:
    """Fill a block with NaN just before its first token is written; clean every such block when undone."""
    hooks = Hooks()
    for layer in attention_layers(runner):
        filled: set[int] = set()
        hooks.wrap(layer.impl, "do_kv_cache_update", partial(_fill, filled))
        hooks.at_undo(partial(_clean, layer, filled))
    return hooks


def _fill(filled: set[int], original: Callable[..., Any]) -> Callable[..., Any]:
    def update(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> Any:
        size = cache.shape[2]
        fresh = {slot // size for slot in slots.tolist() if slot >= 0 and slot % size == 0}
        for block in fresh:
            cache[block].fill_(float("nan"))
        filled.update(fresh)
        return original(layer, key, value, cache, slots)

    return update


def _clean(layer: Any, filled: set[int]) -> None:
    for block in filled:
        layer.kv_cache[block].zero_()
