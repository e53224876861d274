"""Logits changed after the head: narrow output, a soft cap, a temperature, another id's, -inf, misread bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.patching import Hooks, Patch
from harness.rounding import keep_bits
from harness.sites import map_logits

if TYPE_CHECKING:
    import torch


def _patch(name: str, source: str, summary: str, shows: str, fault_class: str, severity: Any) -> Patch:
    return Patch(
        name=f"head_{name}",
        kind="fault",
        site="head.output",
        phase="both",
        source=source,
        summary=summary,
        shows=shows,
        fault_class=fault_class,
        severity=severity,
        parameters={"rule": name},
    )


SLOPE = "the fitted slope of logits against logits; flips stay what they were"
PATCHES = [
    _patch(
        "6_bits",
        "oobabooga/textgen#4310",
        "logits keep 6 mantissa bits",
        "KL, on sharp positions most",
        "head-dtype",
        "near-noise",
    ),
    _patch(
        "4_bits",
        "oobabooga/textgen#4310",
        "logits keep 4 mantissa bits",
        "KL and flips at small margins",
        "head-dtype",
        "obvious",
    ),
    _patch("softcap_30", "vllm-project/vllm-metal#665", "a final soft cap of 30", SLOPE, "softcap", "obvious"),
    _patch("temperature_0.95", "vllm-project/vllm#9453", "logits are divided by 0.95", SLOPE, "report", "subtle"),
    _patch("temperature_0.99", "vllm-project/vllm#9453", "logits are divided by 0.99", SLOPE, "report", "near-noise"),
    _patch(
        "half_infinite",
        "vllm-project/vllm#51789",
        "every second id is -inf except the largest logit",
        "counts of -inf",
        "report",
        "obvious",
    ),
    _patch(
        "tail_cut", "vllm-project/vllm#9453", "ids outside the top 40 are -inf", "counts of -inf", "report", "obvious"
    ),
    _patch(
        "ids_shifted",
        "triton-inference-server/tensorrtllm_backend#598",
        "logits belong to the next id",
        "KL and flips everywhere",
        "head-dtype",
        "obvious",
    ),
    _patch(
        "wrong_bits",
        "triton-inference-server/tensorrtllm_backend#598",
        "the bits are read as another 16-bit format",
        "KL and flips everywhere",
        "head-dtype",
        "obvious",
    ),
]


def apply(runner: Any, rule: str) -> Hooks:
    """Change the logits the model gives out."""
    hooks = Hooks()
    map_logits(hooks, runner, lambda logits: _changed(logits, rule))
    return hooks


def _changed(logits: torch.Tensor, rule: str) -> torch.Tensor:
    """[rows, V] in and out, same dtype."""
    import torch

    name, _, number = rule.rpartition("_")
    match name:
        case "temperature":
            return (logits.float() / float(number)).to(logits.dtype)
        case "softcap":
            return (torch.tanh(logits.float() / float(number)) * float(number)).to(logits.dtype)
        case "6" | "4":
            return keep_bits(logits, int(name))
        case "half":
            top = logits.argmax(-1, keepdim=True)
            hidden = logits.clone()
            hidden[:, ::2] = -torch.inf
            return hidden.scatter(-1, top, logits.gather(-1, top))
        case "tail":
            least = logits.topk(40, -1).values[:, -1:]
            return logits.masked_fill(logits < least, -torch.inf)
        case "ids":
            return logits.roll(1, -1)
        case _:
            other = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16, torch.float32: torch.int32}
            return logits.view(other[logits.dtype]).nan_to_num().to(logits.dtype)
