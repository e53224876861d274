"""Keys that decode alone does not see: those beyond a window, the one just before, the first of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.patching import Hooks, Patch

if TYPE_CHECKING:
    import torch

PATCHES = [
    Patch(
        name=f"attention_decode_{rule}",
        kind="fault",
        site="attention.mask",
        phase="decode",
        source=source,
        summary=summary,
        shows="decode KL; prefill is green",
        fault_class=fault_class,
        severity=severity,
        parameters={"rule": rule},
    )
    for rule, source, summary, fault_class, severity in [
        ("window_256", "vllm-project/vllm#23969", "decode sees 256 keys back only, prefill all", "window", "obvious"),
        (
            "previous_key",
            "vllm-project/vllm#9730",
            "decode does not see the token just before",
            "spec-decode",
            "obvious",
        ),
        (
            "first_key",
            "synthetic: an off-by-one at the first key",
            "decode does not see the first token",
            "chunk",
            "obvious",
        ),
    ]
]


def apply(runner: Any, rule: str) -> Hooks:
    """Replace attention by the naive one (equal to the engine's up to f32 rounding) with keys hidden in decode."""
    from harness.engine.naive_attention import NaiveAttention, install

    return install(runner, NaiveAttention(hide=RULES[rule]))


def _window(queries: torch.Tensor, keys: torch.Tensor, tokens: int) -> torch.Tensor:
    return (keys <= queries - 256) & (tokens == 1)


def _previous(queries: torch.Tensor, keys: torch.Tensor, tokens: int) -> torch.Tensor:
    return (keys == queries - 1) & (tokens == 1)


def _first(queries: torch.Tensor, keys: torch.Tensor, tokens: int) -> torch.Tensor:
    return (keys == 0) & (queries > 0) & (tokens == 1)


RULES = {"window_256": _window, "previous_key": _previous, "first_key": _first}
