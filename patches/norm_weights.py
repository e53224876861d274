"""Norm weights that are not the model's: read as another dtype, a channel dropped, a stale residual added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import EAGER, norms

PATCHES = [
    Patch(
        name=f"norm_{name}",
        kind="fault",
        site=site,
        phase="both",
        source=source,
        summary=summary,
        shows="KL and large-margin flips",
        fault_class=fault_class,
        severity="obvious",
        engine=EAGER,
        parameters={"rule": name},
    )
    for name, site, source, summary, fault_class in [
        (
            "weight_bits",
            "norm.weight",
            "vllm-project/vllm#48330",
            "one layer reads float32 norm weights as 16-bit ones",
            "fusion",
        ),
        (
            "stale_residual",
            "norm.forward",
            "vllm-project/vllm#41972",
            "one layer adds a hundredth of the call before",
            "fusion",
        ),
        (
            "channels_zeroed",
            "norm.weight",
            "vllm-project/vllm#39663",
            "the first 8 channels of one norm weight are lost",
            "weights",
        ),
    ]
]


def apply(runner: Any, rule: str) -> Hooks:
    """Change the second norm of the first decoder layer."""
    hooks = Hooks()
    norm = norms(runner)[1]
    if rule == "stale_residual":
        hooks.wrap(norm, "forward", _stale_residual)
        return hooks
    weight = norm.weight.detach().clone()
    if rule == "channels_zeroed":
        weight[:8] = 0
    else:
        weight = weight.float().view(weight.dtype)[: len(weight)].nan_to_num()
    hooks.write(norm.weight, weight)
    return hooks


def _stale_residual(original: Callable[..., Any]) -> Callable[..., Any]:
    before: Any = None

    def forward(x: Any, residual: Any = None) -> Any:
        nonlocal before
        kept = x.clone()
        if before is not None:
            rows = min(len(x), len(before))
            x = x.clone()
            x[:rows] += before[:rows] / 100
        before = kept
        return original(x, residual)

    return forward
