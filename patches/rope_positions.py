"""Wrong positions reach the rotation: of decoded tokens, queries alone, chunks, or all but a batch's first row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import EAGER, Step, rope_modules, watch_steps

CHUNK = 256


def _patch(
    name: str, phase: Any, source: str, summary: str, shows: str, requests: dict[str, Any] | None = None
) -> Patch:
    return Patch(
        name=f"rope_positions_{name}",
        kind="fault",
        site="rope.positions",
        phase=phase,
        source=source,
        summary=summary,
        shows=shows,
        fault_class="position",
        severity="obvious",
        engine=EAGER,
        requests=requests or {},
        parameters={"rule": name},
    )


PATCHES = [
    _patch(
        "decode_zero",
        "decode",
        "Blaizzy/mlx-vlm#1983",
        "every decoded token gets position 0",
        "decode KL; prefill is green",
    ),
    _patch(
        "query_plus_one",
        "decode",
        "flashinfer-ai/flashinfer#847",
        "decode queries are rotated one position too far, keys rightly",
        "decode KL at all depths; prefill is green",
    ),
    _patch(
        "chunk_relative",
        "both",
        "huggingface/transformers#43082",
        f"positions restart at every {CHUNK} tokens of a prompt",
        f"KL from position {CHUNK} on",
    ),
    _patch(
        "batch_first_row",
        "decode",
        "ml-explore/mlx#3494",
        "in decode, only the first row of a batch is rotated by its position",
        "decode KL by batch row; batch 1 is green",
        requests={"concurrency": 2},
    ),
]


def apply(runner: Any, rule: str) -> Hooks:
    """Change positions on their way into every rotary embedding."""
    hooks = Hooks()
    step = watch_steps(hooks, runner)
    for rope in rope_modules(runner):
        hooks.wrap(rope, "forward", lambda original: RULES[rule](original, step))
    return hooks


def _decode_zero(original: Callable[..., Any], step: Step) -> Callable[..., Any]:
    return lambda positions, query, key=None: original(positions * 0 if step.decode else positions, query, key)


def _query_plus_one(original: Callable[..., Any], step: Step) -> Callable[..., Any]:
    def forward(positions: Any, query: Any, key: Any = None) -> Any:
        if not step.decode:
            return original(positions, query, key)
        late_query, _ = original(positions + 1, query.clone(), key.clone())  # the rotation works in place
        return late_query, original(positions, query, key)[1]

    return forward


def _chunk_relative(original: Callable[..., Any], step: Step) -> Callable[..., Any]:
    return lambda positions, query, key=None: original(positions if step.decode else positions % CHUNK, query, key)


def _batch_first_row(original: Callable[..., Any], step: Step) -> Callable[..., Any]:
    def forward(positions: Any, query: Any, key: Any = None) -> Any:
        if step.decode:
            positions = positions.clone()
            positions[1:] = 0
        return original(positions, query, key)

    return forward


RULES = {
    "decode_zero": _decode_zero,
    "query_plus_one": _query_plus_one,
    "chunk_relative": _chunk_relative,
    "batch_first_row": _batch_first_row,
}
