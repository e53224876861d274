"""Cache writes that go missing or astray: a token not written, written twice, swapped with its neighbour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import Step, attention_layers, watch_steps

PATCHES = [
    Patch(
        name=f"kv_slots_{name}",
        kind="fault",
        site="kv.write",
        phase=phase,
        source=source,
        summary=summary,
        shows=shows,
        fault_class=fault_class,
        severity=severity,
        parameters={"rule": name},
    )
    for name, phase, source, summary, shows, fault_class, severity in [
        (
            "decode_repeats",
            "decode",
            "vllm-project/vllm#9730",
            "every third decode step writes the previous token's key and value",
            "decode KL growing with step; prefill is green",
            "spec-decode",
            "obvious",
        ),
        (
            "value_swapped",
            "both",
            "synthetic: a wrong stride, after sgl-project/sglang#40419",
            "values of each two neighbouring tokens of a prompt are swapped",
            "KL and large-margin flips",
            "kv-slots",
            "obvious",
        ),
        (
            "late_layer_skipped",
            "decode",
            "synthetic: a layer left out of a copy list",
            "the last layer does not write decoded tokens",
            "decode KL growing with step; prefill is green",
            "kv-slots",
            "subtle",
        ),
    ]
]


def apply(runner: Any, rule: str) -> Hooks:
    """Change what each layer (the last, for a skipped one) writes."""
    hooks = Hooks()
    step = watch_steps(hooks, runner)
    layers = attention_layers(runner)
    for layer in layers[-1:] if rule == "late_layer_skipped" else layers:
        hooks.wrap(layer.impl, "do_kv_cache_update", lambda original: RULES[rule](original, step))
    return hooks


def _decode_repeats(original: Callable[..., Any], step: Step) -> Callable[..., Any]:
    steps = 0
    last: Any = None

    def update(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> Any:
        nonlocal steps, last
        if not step.decode:
            steps, last = 0, None
            return original(layer, key, value, cache, slots)
        steps += 1
        if steps % 3 == 0 and last is not None and last[0].shape == key.shape:
            key, value = last
        last = (key.clone(), value.clone())
        return original(layer, key, value, cache, slots)

    return update


def _value_swapped(original: Callable[..., Any], step: Step) -> Callable[..., Any]:
    import torch

    def update(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> Any:
        if not step.decode:
            pairs = len(value) // 2 * 2
            value = torch.cat((value[:pairs].unflatten(0, (-1, 2)).flip(1).flatten(0, 1), value[pairs:]))
        return original(layer, key, value, cache, slots)

    return update


def _late_layer_skipped(original: Callable[..., Any], step: Step) -> Callable[..., Any]:
    def update(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> Any:
        return None if step.decode else original(layer, key, value, cache, slots)

    return update


RULES = {
    "decode_repeats": _decode_repeats,
    "value_swapped": _value_swapped,
    "late_layer_skipped": _late_layer_skipped,
}
