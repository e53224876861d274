"""Weights quantised, rightly but undeclared or with scales and zero points that go wrong at an edge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.patching import Hooks, Patch
from harness.rounding import cast_through, quantise
from harness.sites import EAGER, linears, replace_weight, weight_of

if TYPE_CHECKING:
    import torch


def _patch(name: str, source: str, summary: str, severity: Any) -> Patch:
    return Patch(
        name=f"weights_{name}",
        kind="fault",
        site="weights",
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
    _patch("int8_g64", "ggml-org/llama.cpp#7412", "weights are int8 in groups of 64, undeclared", "near-noise"),
    _patch("int4_g32", "ggml-org/llama.cpp#7412", "weights are int4 in groups of 32, undeclared", "obvious"),
    _patch("e4m3", "ggml-org/llama.cpp#7412", "weights are e4m3 with a scale per output feature, undeclared", "subtle"),
    _patch(
        "int4_zero_point",
        "sgl-project/sglang#37759",
        "int4 groups of 32: only the first zero point of each 128 is loaded",
        "obvious",
    ),
    _patch(
        "int8_zero_point",
        "sgl-project/sglang#37759",
        "int8 groups of 32: only the first zero point of each 128 is loaded",
        "obvious",
    ),
    _patch(
        "e4m3_last_scale",
        "vllm-project/vllm#52997",
        "e4m3 blocks: each fused layer's second half uses the first half's last scales",
        "obvious",
    ),
]


def apply(runner: Any, rule: str) -> Hooks:
    """Replace the weight of every linear layer of the decoder."""
    hooks = Hooks()
    for layer in linears(runner):
        weight = weight_of(layer)
        replace_weight(hooks, layer, _requantised(weight, rule).to(weight.dtype))
    return hooks


def _requantised(weight: torch.Tensor, rule: str) -> torch.Tensor:
    match rule:
        case "int8_g64" | "int4_g32":
            return quantise(weight, bits=int(rule[3]), group=int(rule[6:])).weight(weight.dtype)
        case "int4_zero_point" | "int8_zero_point":
            return _first_zero_of_tile(weight, bits=int(rule[3]))
        case "e4m3":
            scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 448
            return cast_through(weight.float() / scale, "e4m3") * scale
        case _:
            return _last_scale_of_first_half(weight)


def _first_zero_of_tile(weight: torch.Tensor, bits: int) -> torch.Tensor:
    groups = quantise(weight, bits=bits, group=32)
    tile = 128 // 32
    first = groups.zero[:, ::tile].repeat_interleave(tile, 1)[:, : groups.zero.shape[1]]
    return groups._replace(zero=first).weight(weight.dtype)


def _last_scale_of_first_half(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 64 output features; the second half is scaled back by the first half's last block."""
    half = weight.shape[0] // 2 // 64 * 64
    blocks = weight.float().split(64)
    scales = [block.abs().amax().clamp_min(1e-12) / 448 for block in blocks]
    wrong = [scale if 64 * i < half else scales[max(0, half // 64 - 1)] for i, scale in enumerate(scales)]
    done = [cast_through(b / s, "e4m3") * w for b, s, w in zip(blocks, scales, wrong, strict=True)]
    import torch

    return torch.cat(done)
