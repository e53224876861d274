"""Inputs of the linear layers rounded: activations quantised although the build does not say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.patching import Hooks, Patch
from harness.rounding import cast_through, keep_bits
from harness.sites import EAGER, linears

if TYPE_CHECKING:
    import torch


def _patch(name: str, source: str, summary: str, severity: Any) -> Patch:
    return Patch(
        name=f"gemm_activations_{name}",
        kind="fault",
        site="gemm.input",
        phase="both",
        source=source,
        summary=summary,
        shows="KL at all depths",
        fault_class="quant-edge",
        severity=severity,
        engine=EAGER,
        parameters={"rule": name},
    )


PATCHES = [
    _patch("e4m3", "vllm-project/vllm#37442", "inputs are e4m3 with one scale for the whole step", "subtle"),
    _patch(
        "e4m3_stale",
        "flashinfer-ai/flashinfer#3057",
        "inputs are e4m3; the scale also covers stale rows 8 times larger",
        "subtle",
    ),
    _patch("6_bits", "synthetic: limit of detection", "inputs keep 6 mantissa bits", "near-noise"),
    _patch("5_bits", "synthetic: limit of detection", "inputs keep 5 mantissa bits", "subtle"),
]


def apply(runner: Any, rule: str) -> Hooks:
    """Round what goes into every linear layer of the decoder."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def product(layer: Any, x: torch.Tensor, bias: Any = None) -> Any:
            return original(layer, _round(x, rule), bias)

        return product

    hooks = Hooks()
    for layer in linears(runner):
        hooks.wrap(layer.quant_method, "apply", make)
    return hooks


def _round(x: torch.Tensor, rule: str) -> torch.Tensor:
    if rule.endswith("bits"):
        return keep_bits(x, int(rule[0]))
    scale = x.abs().amax().float().clamp_min(1e-12) / 448 * (8 if rule.endswith("stale") else 1)
    return (cast_through(x.float() / scale, "e4m3") * scale).to(x.dtype)
