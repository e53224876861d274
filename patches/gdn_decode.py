"""The recurrent state in decode: a write lost or done twice, another layout than prefill's, another row's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.engine.gdn import F32_STATE, Change, Core, Run, edit, recurrent_states, wrap_core
from harness.patching import Hooks, Patch
from harness.sites import EAGER

if TYPE_CHECKING:
    import torch

PATCHES = [
    Patch(
        name=f"gdn_decode_{name}",
        kind="fault",
        site="gdn.decode",
        phase="decode",
        source=source,
        summary=summary,
        shows="decode KL growing with step; prefill is green",
        fault_class=fault_class,
        severity=severity,
        engine=F32_STATE if name == "strides" else EAGER,
        requests={"concurrency": 2} if name == "rows_swapped" else {},
        parameters={"rule": name},
    )
    for name, source, summary, fault_class, severity in [
        ("skips_write", "NVIDIA-NeMo/RL#2141", "every fifth step leaves the state as it was", "decode-path", "obvious"),
        ("twice", "vllm-project/vllm#40738", "every eighth token is applied twice", "spec-decode", "obvious"),
        (
            "transposed",
            "synthetic: the CPU engine's [K, V] states under a shape that says [V, K]",
            "the decode kernel reads the state transposed; square heads hide it",
            "gdn-layout",
            "obvious",
        ),
        (
            "strides",
            "sgl-project/sglang#40419",
            "an f32 state is walked with a bf16 stride: even columns are their truncated neighbours",
            "gdn-layout",
            "obvious",
        ),
        (
            "rows_swapped",
            "synthetic: slot indices in another order than the batch, after vllm-project/vllm#20838",
            "the first two rows of a batch use each other's state",
            "gdn-slots",
            "obvious",
        ),
        (
            "frozen",
            "synthetic: a copy of the state is updated, after vllm-project/vllm#40738",
            "no step writes the state: every token sees what prefill left",
            "decode-path",
            "obvious",
        ),
    ]
]


def apply(runner: Any, rule: str) -> Hooks:
    """Change what decode makes of the recurrent state."""
    hooks = Hooks()
    wrap_core(hooks, runner, RULES[rule]())
    return hooks


def _keeping(period: int) -> Change:
    """Put the state back after every `period`-th decode call of a layer."""
    steps: dict[str, int] = {}

    def change(core: Core, run: Run) -> bool:
        states, slots = recurrent_states(core.layer), core.decode_slots
        before = states[slots]
        run(core)
        if core.prefills:  # a new request: what is counted are steps since
            steps[core.layer.prefix] = 0
            return False
        step = steps[core.layer.prefix] = steps.get(core.layer.prefix, 0) + 1
        if step % period == 0:
            states[slots] = before
        return step % period == 0

    return change


def _twice() -> Change:
    """The token passes convolution and recurrence again, after every eighth decode call of a layer."""
    steps: dict[str, int] = {}

    def change(core: Core, run: Run) -> bool:
        run(core)
        if core.prefills:
            steps[core.layer.prefix] = 0
            return False
        step = steps[core.layer.prefix] = steps.get(core.layer.prefix, 0) + 1
        if step % 8 == 0:
            out = core.out.clone()
            run(core)
            core.out.copy_(out)
        return step % 8 == 0

    return change


def _around(before: Any, after: Any) -> Change:
    """Change the decoding requests' states before the core and change them back after it."""

    def change(core: Core, run: Run) -> bool:
        states, slots = recurrent_states(core.layer), core.decode_slots
        if core.decodes:
            edit(states, slots, before)
        run(core)
        if core.decodes and after is not None:
            edit(states, slots, after)
        return bool(core.decodes)

    return change


def _transposed() -> Change:
    def transpose(held: torch.Tensor) -> torch.Tensor:
        return held.transpose(-1, -2)

    return _around(transpose, transpose)


def _strides() -> Change:
    def walk(held: torch.Tensor) -> torch.Tensor:
        import torch

        wrong = held.clone()
        wrong[..., ::2] = held[..., 1::2].to(torch.bfloat16).to(held.dtype)
        return wrong

    return _around(walk, None)


def _rows_swapped() -> Change:
    """The convolution keeps its own rows: only the recurrence takes the wrong slots."""

    def swap(held: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.cat((held[:2].flip(0), held[2:]))

    def change(core: Core, run: Run) -> bool:
        states, slots = recurrent_states(core.layer), core.decode_slots
        if core.decodes > 1:
            edit(states, slots, swap)
        run(core)
        if core.decodes > 1:
            edit(states, slots, swap)
        return core.decodes > 1

    return change


RULES: dict[str, Any] = {
    "skips_write": lambda: _keeping(5),
    "twice": _twice,
    "transposed": _transposed,
    "strides": _strides,
    "rows_swapped": _rows_swapped,
    "frozen": lambda: _keeping(1),
}
