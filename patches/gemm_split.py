"""Matrix products split along their input features, each partial sum rounded to the model's dtype before adding.

Two parts in the row-parallel layers are what tensor parallelism does (benign); many parts everywhere are a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from harness.patching import Hooks, Patch
from harness.sites import EAGER, linear_like, linears, replace_product, weight_of

if TYPE_CHECKING:
    import torch


def _patch(name: str, kind: Any, parts: int, layers: list[str], source: str, severity: Any, shows: str) -> Patch:
    return Patch(
        name=f"gemm_split_{name}",
        kind=kind,
        site="gemm.accumulator",
        phase="both",
        source=source,
        summary=f"{', '.join(layers) or 'all linear layers'}: {parts} partial sums, each rounded before adding",
        shows=shows,
        fault_class="gemm-acc" if kind == "fault" else "",
        severity=severity,
        engine=EAGER,
        parameters={"parts": parts, "layers": layers},
    )


PATCHES = [
    _patch(
        "tp2",
        "benign",
        2,
        ["o_proj", "down_proj"],
        "RL-Align/RL-Kernel#313",
        "none",
        "nothing: 1.1 of the stock mean KL",
    ),
    _patch("4", "fault", 4, [], "vllm-project/vllm#6795", "near-noise", "KL: 1.2 of the stock mean"),
    _patch("16", "fault", 16, [], "flagos-ai/FlagGems#5876", "subtle", "KL: 1.8 of the stock mean"),
]


def apply(runner: Any, parts: int, layers: list[str]) -> Hooks:
    """Replace the products of those linear layers (all when none is named)."""
    hooks = Hooks()
    for layer in linears(runner, *layers):
        replace_product(hooks, layer, lambda layer: _split(layer, parts))
    return hooks


def _split(layer: Any, parts: int) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = weight_of(layer)
    edges = [weight.shape[1] * part // parts for part in range(parts + 1)]
    spans = [slice(a, b) for a, b in pairwise(edges)]
    products = [linear_like(layer, weight[:, span]) for span in spans]

    def product(x: torch.Tensor) -> torch.Tensor:
        total = products[0](x[..., spans[0]].contiguous())
        for compute, span in zip(products[1:], spans[1:], strict=True):
            total = total + compute(x[..., span].contiguous())
        return total

    return product
