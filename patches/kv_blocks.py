"""Attention reads the wrong cache block: another of the same request, another request's, or the null block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import attention_layers

PATCHES = [
    Patch(
        name=f"kv_blocks_{rule}",
        kind="fault",
        site="kv.read",
        phase=phase,
        source=source,
        summary=summary,
        shows=shows,
        fault_class=fault_class,
        severity="obvious",
        parameters={"rule": rule},
    )
    for rule, phase, source, summary, shows, fault_class in [
        (
            "stale_second",
            "decode",
            "LMCache/LMCache#2069",
            "after prefill the second block of a request is read as its first",
            "decode KL; prefill is green",
            "preempt",
        ),
        (
            "wrapped",
            "both",
            "vllm-project/vllm#47671",
            "a request's block numbers overflow: the third and later blocks are read as if counted from 0",
            "KL by depth: a cliff at two blocks",
            "int-overflow",
        ),
        (
            "null",
            "both",
            "ROCm/aiter#2517",
            "loads past two blocks give the null block's content",
            "KL by depth: a cliff at two blocks",
            "int-overflow",
        ),
        (
            "swapped_rows",
            "decode",
            "vllm-project/vllm#12621",
            "in decode each request of a batch reads its neighbour's first block",
            "decode KL by batch row; batch 1 is green",
            "prefix-cache",
        ),
    ]
]


def apply(runner: Any, rule: str) -> Hooks:
    """Change the block table each layer reads by."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, *rest: Any, **named: Any
        ) -> Any:
            if metadata is not None:
                table = RULES[rule](metadata.block_table.clone(), metadata.max_query_len == 1)
                metadata = dataclasses.replace(metadata, block_table=table)
            return original(layer, query, key, value, cache, metadata, *rest, **named)

        return forward

    hooks = Hooks()
    for layer in attention_layers(runner):
        hooks.wrap(layer.impl, "forward", make)
    return hooks


def _stale_second(table: Any, decode: bool) -> Any:
    if decode:
        table[:, 1] = table[:, 0].where(table[:, 1] != 0, table[:, 1])
    return table


def _wrapped(table: Any, _: bool) -> Any:
    width = table.shape[1] - 2
    table[:, 2:] = table[:, : min(2, width)].repeat(1, -(-width // 2))[:, :width]
    return table


def _null(table: Any, _: bool) -> Any:
    table[:, 2:] = 0
    return table


def _swapped_rows(table: Any, decode: bool) -> Any:
    if decode:
        table[:, 0] = table[:, 0].roll(1)
    return table


RULES = {"stale_second": _stale_second, "wrapped": _wrapped, "null": _null, "swapped_rows": _swapped_rows}
