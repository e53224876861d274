"""Query heads read the wrong KV head: tiled instead of repeated, or a grouping rule that is off at the edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import attention_layers

PATCHES = [
    Patch(
        name=f"attention_heads_{name}",
        kind="fault",
        site="attention.heads",
        phase="both",
        source=source,
        summary=summary,
        shows="KL and large-margin flips",
        fault_class="heads",
        severity=severity,
        parameters={"layers": layers, "rule": rule},
    )
    for name, layers, rule, source, summary, severity in [
        ("rolled", None, "roll", "ekzhang/jax-js#180", "KV heads are off by one in every layer", "obvious"),
        ("rolled_layer_1", 1, "roll", "ekzhang/jax-js#180", "KV heads are off by one in one layer", "obvious"),
        (
            "last_group",
            None,
            "last",
            "ikawrakow/ik_llama.cpp#1521",
            "the last query group reads the KV head before its own",
            "obvious",
        ),
    ]
]


def apply(runner: Any, layers: int | None, rule: str) -> Hooks:
    """Permute or repeat KV heads on their way into the cache of layer index 1 (`layers=1`) or of all."""
    import torch

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def update(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> Any:
            heads = torch.arange(key.shape[1])
            heads = heads.roll(1) if rule == "roll" else heads.where(heads < len(heads) - 1, heads - 1)
            return original(layer, key[:, heads].contiguous(), value[:, heads].contiguous(), cache, slots)

        return update

    hooks = Hooks()
    found = attention_layers(runner)
    for layer in found if layers is None else found[1:2]:
        hooks.wrap(layer.impl, "do_kv_cache_update", make)
    return hooks
