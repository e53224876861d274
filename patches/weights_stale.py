"""Weights that are not the checkpoint's: an old version kept after an update, a permuted group, an adapter too weak."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from harness.patching import Hooks, Patch
from harness.sites import EAGER, linears, replace_weight, weight_of

if TYPE_CHECKING:
    import torch


def _patch(name: str, source: str, summary: str, fault_class: str, severity: Any, **parameters: Any) -> Patch:
    return Patch(
        name=f"weights_{name}",
        kind="fault",
        site="weights",
        phase="both",
        source=source,
        summary=summary,
        shows="KL at all depths",
        fault_class=fault_class,
        severity=severity,
        engine=EAGER,
        parameters={"rule": "noise", "strength": 0.0, "layers": None} | parameters,
    )


PATCHES = [
    _patch("stale_all", "huggingface/trl#5312", "all matrices differ by 1 %", "stale-weights", "subtle", strength=0.01),
    _patch(
        "stale_all_0.3",
        "huggingface/trl#5312",
        "all matrices differ by 0.3 %",
        "stale-weights",
        "near-noise",
        strength=0.003,
    ),
    _patch(
        "stale_layer",
        "vllm-project/vllm#32718",
        "one decoder layer differs by 3 %",
        "stale-weights",
        "subtle",
        strength=0.03,
        layers=4,
    ),
    _patch(
        "permuted",
        "vllm-project/compressed-tensors#203",
        "64 input channels of one matrix are in reverse order",
        "quant-edge",
        "obvious",
        rule="permute",
        layers=1,
    ),
    _patch(
        "adapter_weak",
        "NVIDIA/TensorRT-LLM#1668",
        "a rank-16 adapter is applied at a quarter of its strength",
        "lora",
        "subtle",
        rule="adapter",
        strength=0.03,
    ),
]


def apply(runner: Any, rule: str, strength: float, layers: int | None) -> Hooks:
    """Replace the weight of every linear layer of the decoder, or of the first `layers` (one decoder layer has 4)."""
    import torch

    generator = torch.Generator().manual_seed(20)
    hooks = Hooks()
    for layer in linears(runner)[:layers]:
        weight = weight_of(layer)
        replace_weight(hooks, layer, (_changed(weight.float(), rule, strength, generator)).to(weight.dtype))
    return hooks


def _changed(weight: torch.Tensor, rule: str, strength: float, generator: torch.Generator) -> torch.Tensor:
    import torch

    if rule == "permute":
        return torch.cat((weight[:, :64].flip(1), weight[:, 64:]), 1)
    if rule == "noise":
        return weight + strength * weight.std() * torch.randn(weight.shape, generator=generator)
    rows, columns = weight.shape  # the three quarters of B A that a scale of alpha / r, not alpha / sqrt(r), leaves out
    delta = torch.randn(rows, 16, generator=generator) @ torch.randn(16, columns, generator=generator) / math.sqrt(16)
    return weight - 0.75 * strength * weight.std() * delta
