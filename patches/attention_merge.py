"""KV parts attended separately and merged by wrong weights: another base, no weights, another head's, an empty part.

Right weights are the softmax of the natural log-sum-exps. Sharded and split-KV decoding need them everywhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from harness.patching import Hooks, Patch

if TYPE_CHECKING:
    import torch

PARTS = 4


def _patch(name: str, source: str, summary: str, severity: Any, shows: str = "KL growing with depth") -> Patch:
    return Patch(
        name=f"attention_merge_{name}",
        kind="fault",
        site="attention.merge",
        phase="both",
        source=source,
        summary=f"KV in {PARTS} parts: {summary}",
        shows=shows,
        fault_class="lse-merge",
        severity=severity,
        twin=severity == "near-noise",
        parameters={"rule": name},
    )


PATCHES = [
    _patch("base_2", "sgl-project/sglang#33064", "natural log-sum-exps are merged as base 2", "subtle"),
    _patch("base_e", "vllm-project/vllm#47079", "base-2 log-sum-exps are merged as natural", "subtle"),
    _patch("mean", "vllm-project/vllm#22103", "parts are averaged", "obvious"),
    _patch("head_shift", "Dao-AILab/flash-attention#87", "log-sum-exps are laid out one head further", "obvious"),
    _patch("no_maximum", "flashinfer-ai/flashinfer#58", "the last part's log-sum-exp lacks its maximum", "obvious"),
    _patch("zero_part", "vllm-project/vllm#49294", "an empty part joins with log-sum-exp 0", "subtle"),
    _patch("bf16_sums", "vllm-project/vllm#47079", "log-sum-exps are kept in bf16", "near-noise"),
    _patch("empty_nan", "vllm-project/vllm#27491", "parts without keys merge to NaN", "obvious", "NaN rows"),
]


def apply(runner: Any, rule: str) -> Hooks:
    """Replace attention by the naive one with a wrong merge."""
    from harness.engine.naive_attention import NaiveAttention, install

    return install(runner, NaiveAttention(parts=PARTS, merge=RULES[rule]))


def _weighted(outputs: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    return (outputs * sums.softmax(0).nan_to_num()).sum(0)


def _zero_part(outputs: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    import torch

    weights = torch.cat((sums, torch.zeros_like(sums[:1]))).softmax(0)[:-1]
    return (outputs * weights).sum(0)


def _no_maximum(outputs: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    wrong = sums.clone()
    wrong[-1] = wrong[-1] - wrong[-1].amax(-2, keepdim=True)
    return _weighted(outputs, wrong)


def _empty_nan(outputs: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Two parts at a time, the newest first, by the running maximum: for two empty parts that is -inf minus -inf."""
    output, total = outputs[-1], sums[-1]
    for other, other_sum in zip(outputs.flip(0)[1:], sums.flip(0)[1:], strict=True):
        highest = total.maximum(other_sum)
        first, second = (total - highest).exp(), (other_sum - highest).exp()
        output = (output * first + other * second) / (first + second)
        total = highest + (first + second).log()
    return output


RULES = {
    "base_2": lambda outputs, sums: _weighted(outputs, sums * math.log(2)),
    "base_e": lambda outputs, sums: _weighted(outputs, sums / math.log(2)),
    "mean": lambda outputs, sums: _weighted(outputs, sums * 0),
    "head_shift": lambda outputs, sums: _weighted(outputs, sums.roll(1, 1)),
    "no_maximum": _no_maximum,
    "zero_part": _zero_part,
    "bf16_sums": lambda outputs, sums: _weighted(outputs, sums.bfloat16().float()),
    "empty_nan": _empty_nan,
}
