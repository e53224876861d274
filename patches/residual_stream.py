"""The residual stream damaged between layers: fewer bits, or now and then what another call left in the buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.patching import Hooks, Patch
from harness.rounding import keep_bits
from harness.sites import EAGER, attention_layers, linears

PATCHES = [
    Patch(
        name=f"residual_{name}",
        kind="fault",
        site="residual",
        phase="both",
        source=source,
        summary=summary,
        shows=shows,
        fault_class=fault_class,
        severity=severity,
        engine=engine,
        parameters={"rule": name},
    )
    for name, source, summary, shows, fault_class, severity, engine in [
        (
            "6_bits",
            "synthetic: limit of detection",
            "what each MLP adds keeps 6 mantissa bits",
            "KL at all depths",
            "fusion",
            "near-noise",
            EAGER,
        ),
        (
            "4_bits",
            "synthetic: limit of detection",
            "what each MLP adds keeps 4 mantissa bits",
            "KL at all depths",
            "fusion",
            "subtle",
            EAGER,
        ),
        (
            "garbage",
            "vllm-project/vllm#26599",
            "one attention layer's every 7th call starts from what the call before left",
            "single rows",
            "uninit",
            "subtle",
            {},
        ),
    ]
]


def apply(runner: Any, rule: str) -> Hooks:
    """Change the output of every down projection, or of the second attention layer."""
    hooks = Hooks()
    if rule == "garbage":
        hooks.wrap(attention_layers(runner)[1].impl, "forward", _garbage)
        return hooks
    for layer in linears(runner, "down_proj"):
        hooks.wrap(layer.quant_method, "apply", lambda original: _rounded(original, int(rule[0])))
    return hooks


def _rounded(original: Callable[..., Any], bits: int) -> Callable[..., Any]:
    return lambda layer, x, bias=None: keep_bits(original(layer, x, bias), bits)


def _garbage(original: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0
    before: Any = None

    def forward(
        layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any, *rest: Any
    ) -> Any:
        nonlocal calls, before
        result = original(layer, query, key, value, cache, metadata, output, *rest)
        calls += 1
        kept = output.clone()
        if before is not None and calls % 7 == 1:
            rows = min(len(output), len(before))
            output[:rows] += before[:rows]
        before = kept
        return result

    return forward
