"""An LM head that is not the model's: noise on a tied head, another tensor in its place, narrow weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.patching import Hooks, Patch
from harness.rounding import cast_through
from harness.sites import EAGER, head, norms, replace_weight

if TYPE_CHECKING:
    import torch


def _patch(name: str, source: str, summary: str, severity: Any) -> Patch:
    return Patch(
        name=f"head_{name}",
        kind="fault",
        site="head.weight",
        phase="both",
        source=source,
        summary=summary,
        shows="KL at all depths",
        fault_class="tied-head",
        severity=severity,
        engine=EAGER,
        parameters={"rule": name},
    )


PATCHES = [
    _patch(
        "noise_1",
        "vllm-project/vllm#5621",
        "a tied head was not loaded: it differs from the embedding by 1 %",
        "subtle",
    ),
    _patch("noise_10", "vllm-project/vllm#5621", "a tied head differs from the embedding by 10 %", "obvious"),
    _patch("random", "vllm-project/vllm#5621", "a tied head was never loaded: it is random", "obvious"),
    _patch(
        "norm_folded",
        "vllm-project/vllm#51063",
        "the head is the embedding scaled by the final norm's weight",
        "obvious",
    ),
    _patch("e4m3", "oobabooga/textgen#4310", "the head's weight is e4m3 with a scale per id", "subtle"),
]


def apply(runner: Any, rule: str) -> Hooks:
    """Replace the head's weight; an embedding tied to it keeps its own."""
    lm_head = head(runner)
    weight, norm = lm_head.weight.detach(), norms(runner)[-1].weight.detach()
    hooks = Hooks()
    replace_weight(hooks, lm_head, _changed(weight.float(), norm.float(), rule).to(weight.dtype))
    return hooks


def _changed(weight: torch.Tensor, norm: torch.Tensor, rule: str) -> torch.Tensor:
    import torch

    if rule == "norm_folded":
        return weight * (norm / norm.mean() if float(norm.std()) else torch.linspace(0.5, 1.5, weight.shape[1]))
    if rule == "e4m3":
        scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 448
        return cast_through(weight / scale, "e4m3") * scale
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(21)) * weight.std()
    return noise if rule == "random" else weight + noise * int(rule.rpartition("_")[2]) / 100
