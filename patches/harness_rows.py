"""Rows in the wrong place: shifted by one, exchanged between requests, repeated. The engine computes rightly.

These are faults of scoring paths and of capture hooks; they are replayed where logits leave the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.patching import Hooks, Patch
from harness.sites import Step, map_logits, watch_steps

if TYPE_CHECKING:
    import torch


def _patch(
    name: str, source: str, summary: str, shows: str, phase: Any, requests: dict[str, Any] | None = None
) -> Patch:
    return Patch(
        name=f"harness_rows_{name}",
        kind="fault",
        site="harness.rows",
        phase=phase,
        source=source,
        summary=summary,
        shows=shows,
        fault_class="report",
        severity="obvious",
        requests=requests or {},
        parameters={"rule": name},
    )


PATCHES = [
    _patch(
        "shifted",
        "sgl-project/sglang#193",
        "each row of a prompt is the one before it",
        "the shift detector",
        "prefill",
    ),
    _patch(
        "repeated",
        "vllm-project/vllm#42019",
        "each second row of a prompt repeats the first of its pair",
        "repeated rows",
        "prefill",
    ),
    _patch(
        "late",
        "vllm-project/vllm#29216",
        "each decode step gives the rows of the step before",
        "the shift detector",
        "decode",
    ),
    _patch(
        "swapped",
        "ProjectDMX/DMI#67",
        "the rows of a decode batch are in another order",
        "KL by batch row",
        "decode",
        {"concurrency": 2},
    ),
]


def apply(runner: Any, rule: str) -> Hooks:
    """Reorder rows of prompts (more rows than requests) or of decode steps."""
    hooks = Hooks()
    map_logits(hooks, runner, RULES[rule](runner, watch_steps(hooks, runner)))
    return hooks


def _is_prompt(runner: Any, logits: torch.Tensor) -> bool:
    return len(logits) > len(runner.input_batch.req_ids)


def _shifted(runner: Any, _: Step) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda logits: logits.roll(1, 0) if _is_prompt(runner, logits) else logits


def _repeated(runner: Any, _: Step) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(logits: torch.Tensor) -> torch.Tensor:
        pairs = len(logits) // 2 * 2
        if _is_prompt(runner, logits):
            logits = logits.clone()
            logits[1:pairs:2] = logits[0:pairs:2]
        return logits

    return change


def _late(_: Any, step: Step) -> Callable[[torch.Tensor], torch.Tensor]:
    before: Any = None

    def change(logits: torch.Tensor) -> torch.Tensor:
        nonlocal before
        if not step.decode:
            return logits
        late, before = before, logits.clone()
        return late if late is not None and late.shape == logits.shape else logits

    return change


def _swapped(_: Any, step: Step) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda logits: logits.flip(0) if step.decode else logits


RULES = {"shifted": _shifted, "repeated": _repeated, "late": _late, "swapped": _swapped}
