"""bf16 and f16 matrix products for processors without units for them: in f32, rounded once.

That is what matrix units do inside (f32 accumulation, one rounding); torch's own loop for such processors is several
times slower than its f32 product.
"""

from __future__ import annotations

from typing import Any

import torch


def widen_products(network: Any) -> int:
    """Let every plain linear layer of the network multiply in f32 and round its output once; returns how many.

    Keeps an f32 copy of each weight: 4 bytes more per parameter.
    """
    layers = [module for module in network.modules() if type(module) is torch.nn.Linear]
    for layer in layers:
        layer.forward = _wide(layer)
    return len(layers)


def _wide(layer: torch.nn.Linear) -> Any:
    weight = layer.weight.detach().float()
    bias = None if layer.bias is None else layer.bias.detach().float()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.float(), weight, bias).to(x.dtype)

    return forward
