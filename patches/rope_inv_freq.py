"""Wrong inverse frequencies: rounded to bf16, from another theta, or scaled by a factor that grows over dimensions.

A theta that is a little off is hidden by bf16 noise at small depths and plain in a float32 twin.
"""

from __future__ import annotations

from typing import Any

from harness.patching import Hooks, Patch
from harness.rounding import cast_through
from harness.sites import rewrite_rope, rope_table


def _patch(
    name: str, source: str, summary: str, severity: Any, parameters: dict[str, Any], twin: bool = False
) -> Patch:
    return Patch(
        name=name,
        kind="fault",
        site="rope.table",
        phase="both",
        source=source,
        summary=summary,
        shows="KL growing with depth",
        fault_class="rope",
        severity=severity,
        twin=twin,
        parameters={"theta_factor": 1.0, "stretch": 1.0, "bf16": False} | parameters,
    )


PATCHES = [
    _patch(
        "rope_inv_freq_bf16",
        "huggingface/transformers#29496",
        "inverse frequencies are rounded to bf16 before the table is built",
        "near-noise",
        {"bf16": True},
        twin=True,
    ),
    _patch(
        "rope_theta_tenth",
        "vllm-project/vllm#42624",
        "theta is the library default, a tenth of the model's",
        "obvious",
        {"theta_factor": 0.1},
    ),
    _patch(
        "rope_theta_1.5",
        "vllm-project/vllm#56066",
        "theta is 1.5 times the model's",
        "subtle",
        {"theta_factor": 1.5},
    ),
    _patch(
        "rope_theta_1.1",
        "vllm-project/vllm#56066",
        "theta is 10 % too large",
        "near-noise",
        {"theta_factor": 1.1},
        twin=True,
    ),
    _patch(
        "rope_theta_1.01",
        "vllm-project/vllm#56066",
        "theta is 1 % too large",
        "near-noise",
        {"theta_factor": 1.01},
        twin=True,
    ),
    _patch(
        "rope_long_factors",
        "ggml-org/llama.cpp#24823",
        "the long-context factors, 1 to 1.3 over the dimensions, are used for every sequence",
        "subtle",
        {"stretch": 1.3},
    ),
]


def apply(runner: Any, theta_factor: float, stretch: float, bf16: bool) -> Hooks:
    """Rewrite every cos/sin table in place."""
    import torch

    def table(rope: Any, inv_freq: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        changed = rope._compute_inv_freq(rope.base * theta_factor).to(inv_freq)
        changed = changed / torch.linspace(1.0, stretch, len(inv_freq), device=inv_freq.device)
        return rope_table(cast_through(changed, "bf16") if bf16 else changed, positions)

    hooks = Hooks()
    rewrite_rope(hooks, runner, table)
    return hooks
