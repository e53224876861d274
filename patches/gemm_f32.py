"""bf16 matrix products computed in f32 and rounded once at the end.

That is what a processor with bf16 matrix units does inside. One without them runs bf16 products several times slower
than f32 ones; the demo and the tests apply this there, and every recording made with it says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.errors import PatchError
from harness.patching import Hooks, Patch
from harness.sites import EAGER, head, linears, weight_of

if TYPE_CHECKING:
    import torch

PATCH = Patch(
    name="gemm_f32",
    kind="benign",
    site="gemm.product",
    phase="both",
    source="normal: f32 accumulation with one rounding, as bf16 matrix units do",
    summary="linear layers and LM head multiply in f32 and round their output to bf16 once",
    shows="nothing: another order of summation",
    engine=EAGER,
)


def apply(runner: Any) -> Hooks:
    """Give each linear layer and the head an f32 copy of its weight to multiply with."""
    hooks = Hooks()
    for layer in (*linears(runner), head(runner)):
        if not hasattr(layer, "cpu_linear"):
            raise PatchError("gemm_f32 is for vLLM's CPU engine: this engine's linear layers have no CPU product")
        hooks.wrap(layer, "cpu_linear", _wide_product(weight_of(layer).float()))
    return hooks


def _wide_product(weight: torch.Tensor) -> Callable[[Any], Callable[..., torch.Tensor]]:
    """What makes a product [T, K] -> [T, N] with an f32 weight [N, K] in place of the layer's own."""
    import torch

    def product(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)

    return lambda _: product
