"""Keys and values rounded on their way into the cache: an fp8 or int8 cache nobody declared, or one with wrong scales.

The engine's own fp8 cache needs AVX-512; here K and V are rounded just before the write, which gives the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.patching import Hooks, Patch
from harness.rounding import cast_through
from harness.sites import attention_layers, watch_steps

if TYPE_CHECKING:
    import torch


def _patch(name: str, source: str, summary: str, severity: Any, rule: str, **parameters: Any) -> Patch:
    defaults = {"rule": rule, "key_scale": 1.0, "value_scale": 1.0, "prefill_only": False}
    return Patch(
        name=f"kv_{name}",
        kind="fault",
        site="kv.write",
        phase="both",
        source=source,
        summary=summary,
        shows="KL in decode and after the first chunk",
        fault_class="kv-scale",
        severity=severity,
        parameters=defaults | parameters,
    )


PATCHES = [
    _patch("e4m3", "vllm-project/vllm#11688", "the cache is e4m3 with unit scales", "subtle", "e4m3"),
    _patch("e5m2", "vllm-project/vllm#11688", "the cache is e5m2", "subtle", "e5m2"),
    _patch("int8", "ggml-org/llama.cpp#7412", "the cache is int8 with a scale per token and head", "subtle", "int8"),
    _patch("int4", "ggml-org/llama.cpp#7412", "the cache is int4 with a scale per token and head", "obvious", "int4"),
    _patch(
        "scale_clips",
        "vllm-project/vllm#37565",
        "e4m3 with scales calibrated on nothing: 0.01 clips most values",
        "obvious",
        "e4m3",
        key_scale=0.01,
        value_scale=0.01,
    ),
    _patch(
        "scale_underflows",
        "vllm-project/vllm#37565",
        "e4m3 with scales of 64: small values underflow",
        "obvious",
        "e4m3",
        key_scale=64.0,
        value_scale=64.0,
    ),
    _patch(
        "key_clips",
        "vllm-project/vllm#11906",
        "keys lie outside what e4m3 holds at their scale and are clipped",
        "obvious",
        "e4m3",
        key_scale=1 / 64,
    ),
    _patch(
        "e4m3_prefill",
        "sgl-project/sglang#25790",
        "prompt blocks are e4m3, decoded tokens are not: the two phases differ from one index on",
        "subtle",
        "e4m3",
        prefill_only=True,
    ),
]


def apply(runner: Any, rule: str, key_scale: float, value_scale: float, prefill_only: bool) -> Hooks:
    """Round K and V before each layer's cache write."""
    hooks = Hooks()
    step = watch_steps(hooks, runner)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def update(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> Any:
            if prefill_only and step.decode:
                return original(layer, key, value, cache, slots)
            return original(layer, _round(key, rule, key_scale), _round(value, rule, value_scale), cache, slots)

        return update

    for layer in attention_layers(runner):
        hooks.wrap(layer.impl, "do_kv_cache_update", make)
    return hooks


def _round(tensor: torch.Tensor, rule: str, scale: float) -> torch.Tensor:
    """[T, J, D] as a cache of that kind would give it back."""
    values = tensor.float()
    if rule in ("int8", "int4"):
        largest = 2 ** (int(rule[3:]) - 1) - 1
        step = values.abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest
        return ((values / step).round() * step).to(tensor.dtype)
    return (cast_through(values / scale, rule) * scale).to(tensor.dtype)
