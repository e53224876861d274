"""The residual stream damaged between layers: fewer bits, or now and then what another call left in the buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from harness.patching import Hooks, Patch
from harness.rounding import keep_bits
from harness.sites import EAGER, Step, attention_layers, linears, watch_steps


def _patch(
    name: str, phase: str, source: str, summary: str, shows: str, fault_class: str, engine: Mapping[str, Any]
) -> Patch:
    return Patch(
        name=f"residual_{name}",
        kind="fault",
        site="residual",
        phase=phase,
        source=source,
        summary=summary,
        shows=shows,
        fault_class=fault_class,
        severity="near-noise" if name == "6_bits" else "subtle",
        engine=engine,
        parameters={"rule": name},
    )


SYNTHETIC = "synthetic: limit of detection"
DEPTHS = "KL at all depths"
PATCHES = [
    _patch("6_bits", "both", SYNTHETIC, "what each MLP adds keeps 6 mantissa bits", DEPTHS, "fusion", EAGER),
    _patch("4_bits", "both", SYNTHETIC, "what each MLP adds keeps 4 mantissa bits", DEPTHS, "fusion", EAGER),
    _patch(
        "garbage",
        "decode",
        "vllm-project/vllm#26599",
        "every third decode step, one attention layer adds to what the step before left",
        "single decode rows",
        "uninit",
        {},
    ),
]


def apply(runner: Any, rule: str) -> Hooks:
    """Change the output of every down projection, or of the second attention layer."""
    hooks = Hooks()
    if rule == "garbage":
        step = watch_steps(hooks, runner)
        hooks.wrap(attention_layers(runner)[1].impl, "forward", lambda original: _garbage(original, step))
        return hooks
    for layer in linears(runner, "down_proj"):
        hooks.wrap(layer.quant_method, "apply", lambda original: _rounded(original, int(rule[0])))
    return hooks


def _rounded(original: Callable[..., Any], bits: int) -> Callable[..., Any]:
    return lambda layer, x, bias=None: keep_bits(original(layer, x, bias), bits)


def _garbage(original: Callable[..., Any], step: Step) -> Callable[..., Any]:
    steps = 0
    before: Any = None

    def forward(
        layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any, **rest: Any
    ) -> Any:
        nonlocal steps, before
        result = original(layer, query, key, value, cache, metadata, output, **rest)
        if not step.decode:
            return result
        steps += 1
        kept = output.clone()
        if before is not None and steps % 3 == 0:
            rows = min(len(output), len(before))
            output[:rows] += before[:rows]
        before = kept
        return result

    return forward
