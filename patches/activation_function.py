"""The gated activation: another function, gate and up exchanged, or one rounding less (benign)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.patching import Hooks, Patch
from harness.sites import EAGER, activations

if TYPE_CHECKING:
    import torch


def _patch(name: str, kind: Any, source: str, summary: str, severity: Any, shows: str = "KL at all depths") -> Patch:
    return Patch(
        name=f"activation_{name}",
        kind=kind,
        site="mlp.activation",
        phase="both",
        source=source,
        summary=summary,
        shows=shows,
        fault_class="activation" if kind == "fault" else "",
        severity=severity,
        engine=EAGER,
        parameters={"rule": name},
    )


PATCHES = [
    _patch("gelu", "fault", "huggingface/transformers#29402", "exact GELU in place of SiLU", "obvious"),
    _patch("gelu_tanh", "fault", "huggingface/transformers#29402", "tanh GELU in place of SiLU", "obvious"),
    _patch("swapped", "fault", "synthetic: fused shards in the wrong order", "gate and up are exchanged", "obvious"),
    _patch(
        "clamped",
        "fault",
        "synthetic: another model family's clamp",
        "gate and up are clamped to 3, as another model family has it",
        "subtle",
    ),
    _patch(
        "f32",
        "benign",
        "pytorch/pytorch#158699",
        "computed in float32, rounded once",
        "none",
        "nothing beyond the floor",
    ),
]


def apply(runner: Any, rule: str) -> Hooks:
    """Replace every gated activation."""
    hooks = Hooks()
    for activation in activations(runner):

        def make(_: Callable[..., Any]) -> Callable[..., Any]:
            def forward(x: torch.Tensor) -> torch.Tensor:
                gate, up = x.chunk(2, dim=-1)
                return _gated(gate, up, rule)

            return forward

        hooks.wrap(activation, "forward", make)
    return hooks


def _gated(gate: torch.Tensor, up: torch.Tensor, rule: str) -> torch.Tensor:
    from torch.nn import functional

    match rule:
        case "gelu":
            return functional.gelu(gate) * up
        case "gelu_tanh":
            return functional.gelu(gate, approximate="tanh") * up
        case "swapped":
            return functional.silu(up) * gate
        case "clamped":
            return functional.silu(gate.clamp(max=3)) * up.clamp(-3, 3)
        case _:
            return (functional.silu(gate.float()) * up.float()).to(gate.dtype)
