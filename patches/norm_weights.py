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
            "one norm adds a hundredth of what the norm before it read",
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
        buffer: list[Any] = []
        hooks.wrap(norms(runner)[0], "forward", lambda original: _keep(original, buffer))
        hooks.wrap(norm, "forward", lambda original: _add_kept(original, buffer))
        return hooks
    weight = norm.weight.detach().clone()
    if rule == "channels_zeroed":
        weight[:8] = 0
    else:
        weight = weight.float().view(weight.dtype)[: len(weight)].nan_to_num()
    hooks.write(norm.weight, weight)
    return hooks


def _keep(original: Callable[..., Any], buffer: list[Any]) -> Callable[..., Any]:
    def forward(x: Any, residual: Any = None) -> Any:
        buffer[:] = [x.clone()]
        return original(x) if residual is None else original(x, residual)

    return forward


def _add_kept(original: Callable[..., Any], buffer: list[Any]) -> Callable[..., Any]:
    return lambda x, residual: original(x + buffer[0] / 100, residual)
