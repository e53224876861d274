"""The short convolution before the delta rule: its window of last inputs read, kept or handed over wrongly."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from harness.engine.gdn import Change, Core, Run, conv_states, edit, gdn_layers, wrap_core
from harness.patching import Hooks, Patch
from harness.sites import EAGER

if TYPE_CHECKING:
    import torch

DECODE = "decode KL at all steps; prefill is green"

PATCHES = [
    Patch(
        name=f"conv_{name}",
        kind="fault",
        site="gdn.conv",
        phase=phase,
        source=source,
        summary=summary,
        shows=shows,
        fault_class="conv",
        severity=severity,
        engine=EAGER,
        requests={"concurrency": 2} if name == "rows_swapped" else {},
        parameters={"rule": name},
    )
    for name, phase, source, summary, shows, severity in [
        (
            "reversed",
            "decode",
            "vllm-project/vllm-ascend#8544",
            "the window is multiplied oldest with newest",
            DECODE,
            "obvious",
        ),
        (
            "frozen",
            "decode",
            "synthetic: a copy of the window is updated, after vllm-project/vllm#40738",
            "no step writes the window: every token sees what prefill left",
            DECODE,
            "obvious",
        ),
        (
            "window_early",
            "both",
            "synthetic: the window's end taken one token too early, after vllm-project/vllm#20838",
            "prefill hands over a window that lacks its last input",
            "KL at the first three decode steps and the first three tokens of a chunk",
            "subtle",
        ),
        (
            "rows_swapped",
            "decode",
            "synthetic: slot indices in another order than the batch",
            "the first two rows of a batch use each other's window",
            DECODE,
            "obvious",
        ),
        (
            "shifted",
            "both",
            "synthetic: causal padding one too long",
            "the convolution of a prompt sees each input one token late",
            "KL and large-margin flips at all depths of prefill",
            "obvious",
        ),
        (
            "activation_dropped",
            "both",
            "synthetic: an activation named otherwise than the kernel expects",
            "no SiLU follows the convolution",
            "KL and large-margin flips",
            "obvious",
        ),
    ]
]


def apply(runner: Any, rule: str) -> Hooks:
    """Change the window, its use or what follows it."""
    hooks = Hooks()
    if rule == "activation_dropped":
        for layer in gdn_layers(runner):
            hooks.set(layer, "activation", None)
    else:
        wrap_core(hooks, runner, RULES[rule])
    return hooks


def _reversed(core: Core, run: Run) -> bool:
    """The window is flipped for the kernel alone; what is kept of it is in order again."""
    windows, slots = conv_states(core.layer), core.decode_slots
    before = windows[slots]
    if core.decodes:
        edit(windows, slots, lambda held: held.flip(-1))
    run(core)
    if core.decodes:
        windows[slots] = _append(before, windows[slots][..., -1:])
    return bool(core.decodes)


def _frozen(core: Core, run: Run) -> bool:
    windows, slots = conv_states(core.layer), core.decode_slots
    before = windows[slots]
    run(core)
    if core.decodes:
        windows[slots] = before
    return bool(core.decodes)


def _window_early(core: Core, run: Run) -> bool:
    """The window is rebuilt from what stood there before the chunk and the chunk's inputs but the last."""
    if not core.prefills:
        run(core)
        return False
    import torch

    windows, slots, starts = conv_states(core.layer), core.prefill_slots, core.starts
    before = torch.where(core.continues.view(-1, 1, 1), windows[slots], 0)
    run(core)
    width = before.shape[-1]
    index = (starts[1:] - 1)[:, None] + torch.arange(-width, 0, device=starts.device)  # [R, W - 1] rows of the window
    ahead = index - starts[:-1, None]  # negative: in the window before
    fresh = core.mixed[index.clamp_min(0)].transpose(1, 2)
    held = before.gather(2, (ahead % width)[:, None].expand(-1, before.shape[1], -1))
    windows[slots] = torch.where((ahead >= 0)[:, None], fresh, held)
    return True


def _rows_swapped(core: Core, run: Run) -> bool:
    windows, slots = conv_states(core.layer), core.decode_slots
    if core.decodes > 1:
        edit(windows, slots, _swap)
    run(core)
    if core.decodes > 1:
        edit(windows, slots, _swap)
    return core.decodes > 1


def _shifted(core: Core, run: Run) -> bool:
    """Inputs of a prompt's chunk move down by one row; its first row keeps its own."""
    if not core.prefills:
        run(core)
        return False
    mixed = core.mixed.roll(1, 0)
    mixed[: core.decodes] = core.mixed[: core.decodes]
    mixed[core.starts[:-1]] = core.mixed[core.starts[:-1]]
    run(dataclasses.replace(core, mixed=mixed))
    return True


def _append(window: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat((window[..., 1:], newest), -1)


def _swap(held: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat((held[:2].flip(0), held[2:]))


RULES: dict[str, Change] = {
    "reversed": _reversed,
    "frozen": _frozen,
    "window_early": _window_early,
    "rows_swapped": _rows_swapped,
    "shifted": _shifted,
}
