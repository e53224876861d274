"""Keys near the end of each earlier chunk of a prompt are invisible to later chunks.

Only the rows after a boundary suffer much: medians hardly move; bins by distance to a boundary do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.patching import Hooks, Patch

if TYPE_CHECKING:
    import torch

PATCHES = [
    Patch(
        name=f"attention_chunks_{name}",
        kind="fault",
        site="attention.mask",
        phase="both",
        source=source,
        summary=f"the last {lost} keys of every {chunk}-token chunk are hidden from later chunks",
        shows="KL by distance to the last chunk boundary",
        fault_class="chunk",
        severity=severity,
        parameters={"chunk": chunk, "lost": lost},
    )
    for name, chunk, lost, source, severity in [
        ("last_key", 256, 1, "NVIDIA/TensorRT-LLM#1216", "subtle"),
        ("last_16", 256, 16, "vllm-project/vllm#26042", "obvious"),
    ]
]


def apply(runner: Any, chunk: int, lost: int) -> Hooks:
    """Replace attention by the naive one with those keys hidden."""
    from harness.engine.naive_attention import NaiveAttention, install

    def hide(queries: torch.Tensor, keys: torch.Tensor, _: int) -> torch.Tensor:
        return (keys % chunk >= chunk - lost) & (keys // chunk < queries // chunk)

    return install(runner, NaiveAttention(hide=hide))
