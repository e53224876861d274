"""RMS norms computed in other precisions: narrow internals (faults), or other correct roundings (benign)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.patching import Hooks, Patch
from harness.rounding import cast_through
from harness.sites import EAGER, norms

if TYPE_CHECKING:
    import torch


def _patch(name: str, kind: Any, source: str, summary: str, shows: str, severity: Any = "none") -> Patch:
    return Patch(
        name=f"norm_{name}",
        kind=kind,
        site="norm.forward",
        phase="both",
        source=source,
        summary=summary,
        shows=shows,
        fault_class="norm" if kind == "fault" else "",
        severity=severity,
        twin=severity == "near-noise",
        engine=EAGER,
        parameters={"rule": name},
    )


PATCHES = [
    _patch(
        "variance_bf16",
        "fault",
        "meta-llama/llama#1048",
        "the sum of squares is rounded to bf16",
        "KL at all depths",
        "near-noise",
    ),
    _patch(
        "variance_e4m3",
        "fault",
        "synthetic: limit of detection",
        "the mean square keeps 3 mantissa bits",
        "KL at all depths",
        "obvious",
    ),
    _patch(
        "weight_plus_one",
        "fault",
        "vllm-project/vllm#53203",
        "1 + w of a Gemma-style norm is added in bf16",
        "KL at all depths",
        "near-noise",
    ),
    _patch(
        "weight_f32",
        "benign",
        "vllm-project/vllm-xpu-kernels#536",
        "the weight multiplies before the one rounding to bf16",
        "nothing: 0.93 of the stock mean KL",
    ),
    _patch(
        "two_steps",
        "benign",
        "ROCm/aiter#2586",
        "the residual sum is rounded before it is normalised",
        "nothing: 1.03 of the stock mean KL",
    ),
]


def apply(runner: Any, rule: str) -> Hooks:
    """Compute every norm in torch, by the rule."""
    hooks = Hooks()
    for norm in norms(runner):

        def make(_: Callable[..., Any], norm: Any = norm) -> Callable[..., Any]:
            def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
                total = x.float() if residual is None else x.float() + residual.float()
                rounded = total.to(x.dtype)
                normalised = _normalise(total, rounded, norm.weight, norm.variance_epsilon, rule)
                return normalised if residual is None else (normalised, rounded)

            return forward

        hooks.wrap(norm, "forward", make)
    return hooks


def _normalise(total: torch.Tensor, rounded: torch.Tensor, weight: torch.Tensor, eps: float, rule: str) -> torch.Tensor:
    """[T, H] in the dtype of `rounded`; `total` is the same sum in f32."""
    values = rounded.float() if rule == "two_steps" else total
    mean_square = values.pow(2).mean(-1, keepdim=True)
    if rule in ("variance_bf16", "variance_e4m3"):
        mean_square = cast_through(mean_square, rule.rpartition("_")[2])
    values = values * (mean_square + eps).rsqrt()
    if rule == "weight_f32":
        return (values * weight.float()).to(rounded.dtype)
    if rule == "weight_plus_one":
        weight = (weight.float() - 1).bfloat16() + 1
    return values.to(rounded.dtype) * weight.to(rounded.dtype)
