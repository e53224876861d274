"""The cos/sin table goes wrong past an original context length: a cliff in depth, nothing before it."""

from __future__ import annotations

from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import rewrite_rope, rope_table

LIMIT = 256  # positions before the cliff: shallow enough for every corpus


def _patch(name: str, source: str, summary: str, parameters: dict[str, Any]) -> Patch:
    return Patch(
        name=name,
        kind="fault",
        site="rope.table",
        phase="both",
        source=source,
        summary=summary,
        shows=f"KL by position: a cliff at {LIMIT}",
        fault_class="rope",
        severity="obvious",
        parameters={"limit": LIMIT, "clamp": False, "theta_factor": 1.0, "divide": 1.0} | parameters,
    )


PATCHES = [
    _patch("rope_table_clamped", "vllm-project/vllm#2088", "positions are clamped to the table's end", {"clamp": True}),
    _patch(
        "rope_theta_switch",
        "vllm-project/vllm#9502",
        "theta falls back to a tenth past a hard-coded length",
        {"theta_factor": 0.1},
    ),
    _patch(
        "rope_long_factors_by_token",
        "vllm-project/vllm#27431",
        "long-context factors are chosen token by token, so keys before the limit keep the short ones",
        {"divide": 1.5},
    ),
]


def apply(runner: Any, limit: int, clamp: bool, theta_factor: float, divide: float) -> Hooks:
    """Rewrite the rows of every cos/sin table from `limit` on."""
    import torch

    def table(rope: Any, inv_freq: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        far = rope._compute_inv_freq(rope.base * theta_factor).to(inv_freq) / divide
        beyond = positions.clamp(max=limit - 1) if clamp else positions
        return torch.where((positions >= limit)[:, None], rope_table(far, beyond), rope_table(inv_freq, positions))

    hooks = Hooks()
    rewrite_rope(hooks, runner, table)
    return hooks
