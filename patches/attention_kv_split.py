"""Keys split in four parts, attended separately and merged by their log-sum-exps in f32, as flash decoding does."""

from __future__ import annotations

from typing import Any

from harness.patching import Hooks, Patch

PATCH = Patch(
    name="attention_kv_split",
    kind="benign",
    site="attention.merge",
    phase="both",
    source="sgl-project/sglang#35045",
    summary="keys in 4 parts, merged rightly",
    shows="nothing: 1.03 of the stock mean KL",
    parameters={"parts": 4},
)


def apply(runner: Any, parts: int) -> Hooks:
    """Replace attention by the naive one, in parts."""
    from harness.engine.naive_attention import NaiveAttention, install

    return install(runner, NaiveAttention(parts=parts))
