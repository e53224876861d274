"""Request patterns: how a recording's requests meet the engine, as a patch or a variation asks for it. Pure.

A pattern is made by the runner and proved afterwards from the rows' own step facts (`engine.campaign`): one that was
asked for and did not happen would be a green run of something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from harness.errors import UsageError
from harness.types import Corpus, Json

Order = Literal["corpus", "reversed", "longest first"]

PREEMPTION_BLOCK = 32
"""Tokens of a KV block under preemption: few, so that some decode steps do not fit, but not so few as to select another
kernel on the CPU engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """What `Patch.requests` may ask for."""

    concurrency: int = 1  # requests in flight at once
    order: Order = "corpus"
    prefix_hit: bool = False  # each segment twice: its prompt rows, then its decode after a prefix-cache hit
    preemption: bool = False  # a KV cache that holds the two longest prompts but not their decode

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise UsageError(f"a request pattern with concurrency {self.concurrency}: expected at least 1")


def pattern_of(requests: Json, *, concurrency: int, at_least: bool) -> Pattern:
    """The pattern that `Patch.requests` asks for, over the run's own concurrency.

    `at_least` says that a concurrency in it is what the patch needs (a fault between two requests), not what it is (a
    variation of the batch). Raises UsageError for a key or value that no runner produces.
    """
    tests = {
        "concurrency": lambda v: type(v) is int and v >= 1,
        "order": lambda v: v in get_args(Order),
        "prefix_hit": lambda v: type(v) is bool,
        "preemption": lambda v: type(v) is bool,
    }
    for key, value in requests.items():
        if key not in tests or not tests[key](value):
            raise UsageError(
                f"request pattern {key}={value!r}: expected concurrency (a whole number), order "
                f"({', '.join(get_args(Order))}), prefix_hit or preemption (true or false)"
            )
    given: dict[str, Any] = {"concurrency": concurrency, **requests}
    if given.get("preemption"):
        given = {"order": "longest first", **given, "concurrency": max(2, given["concurrency"])}
    if given.get("prefix_hit"):  # a segment's two requests must not overlap
        given["concurrency"] = 1
    if at_least:
        given["concurrency"] = max(concurrency, given["concurrency"]) if not given.get("prefix_hit") else 1
    return Pattern(**given)


def engine_needs(pattern: Pattern, corpus: Corpus) -> Mapping[str, Any]:
    """Engine arguments without which the pattern cannot happen on this corpus."""
    needs: dict[str, Any] = {}
    if pattern.prefix_hit:
        needs["enable_prefix_caching"] = True
    if pattern.preemption:
        needs |= _too_small_a_cache(corpus)
    return needs


def _too_small_a_cache(corpus: Corpus) -> dict[str, Any]:
    """KV blocks for the two longest prompts and half of what their decode adds."""
    longest = sorted(corpus.segments, key=lambda s: len(s.token_ids), reverse=True)[:2]
    prompts = sum(_blocks(segment.decode_from) for segment in longest)
    totals = sum(_blocks(len(segment.token_ids)) for segment in longest)
    if len(longest) < 2 or totals - prompts < 2:
        raise UsageError(
            f"preemption cannot be brought about on corpus {corpus.name}: it needs two segments that decode more than "
            f"{2 * PREEMPTION_BLOCK} tokens"
        )
    alone = _blocks(len(longest[0].token_ids))
    return {
        "block_size": PREEMPTION_BLOCK,
        "max_model_len": len(longest[0].token_ids),
        # One more than there is room for: one block is never handed out.
        "num_gpu_blocks_override": 1 + max(alone, prompts + (totals - prompts) // 2),
    }


def _blocks(tokens: int) -> int:
    return -(-tokens // PREEMPTION_BLOCK)
