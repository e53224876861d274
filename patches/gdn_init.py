"""The states a prompt starts from: another request's, counted twice, lost between two chunks, or of the wrong chunk.

A fresh request must start from zero, whatever its slot held; a later chunk must start where the one before it ended.
"""

from __future__ import annotations

from typing import Any

from harness.engine.gdn import Change, Core, Run, conv_states, edit_where, recurrent_states, wrap_core
from harness.patching import Hooks, Patch
from harness.sites import EAGER

FRESH = "KL at the first tokens of a prompt, decaying with depth; by the number of requests served"
LATER = "KL from the second chunk on; prompts of one chunk are green"

PATCHES = [
    Patch(
        name=f"gdn_init_{name}",
        kind="fault",
        site="gdn.init",
        phase="both",
        source=source,
        summary=summary,
        shows=shows,
        fault_class=fault_class,
        severity=severity,
        engine=EAGER,
        parameters={"rule": name},
    )
    for name, source, summary, shows, fault_class, severity in [
        (
            "stale",
            "vllm-project/tpu-inference#2431",
            "a fresh request inherits the recurrent state its slot held",
            FRESH,
            "gdn-init",
            "obvious",
        ),
        (
            "conv_stale",
            "synthetic: as vllm-project/tpu-inference#2431, of the convolution",
            "a fresh request inherits the convolution's inputs its slot held",
            FRESH,
            "gdn-init",
            "near-noise",
        ),
        (
            "twice",
            "vllm-project/vllm-ascend#11508",
            "the initial state is counted twice from the second chunk on",
            LATER,
            "gdn-chunk",
            "subtle",
        ),
        (
            "dropped",
            "syv-ai/qwen38-27b-rtx3090#43",
            "every chunk of a prompt starts from a recurrent state of zero",
            LATER,
            "gdn-chunk",
            "obvious",
        ),
        (
            "conv_dropped",
            "vllm-project/vllm#20838",
            "every chunk of a prompt starts with no inputs in the convolution",
            "KL at the first three tokens of a chunk, and what the state keeps of them",
            "conv",
            "subtle",
        ),
        (
            "late",
            "vllm-project/vllm#47861",
            "every chunk starts from the state before the chunk ahead of it",
            LATER,
            "gdn-chunk",
            "obvious",
        ),
    ]
]


def apply(runner: Any, rule: str) -> Hooks:
    """Change the states of prefilling requests before their layer's core runs."""
    hooks = Hooks()
    wrap_core(hooks, runner, _late() if rule == "late" else RULES[rule])
    return hooks


def _stale(core: Core, run: Run) -> bool:
    """Everything goes on from its slot; what the convolution holds there is cleared, and so as good as fresh."""
    if not core.prefills:
        run(core)
        return False
    edit_where(conv_states(core.layer), core.prefill_slots, ~core.continues, lambda held: held * 0)
    run(core.resuming_all())
    return bool((~core.continues).any())


def _conv_stale(core: Core, run: Run) -> bool:
    if not core.prefills:
        run(core)
        return False
    edit_where(recurrent_states(core.layer), core.prefill_slots, ~core.continues, lambda held: held * 0)
    run(core.resuming_all())
    return bool((~core.continues).any())


def _at_later_chunks(states_of: Any, factor: float) -> Change:
    def change(core: Core, run: Run) -> bool:
        later = bool(core.prefills) and bool(core.continues.any())
        if later:
            edit_where(states_of(core.layer), core.prefill_slots, core.continues, lambda held: held * factor)
        run(core)
        return later

    return change


def _late() -> Change:
    """What each slot held when its last chunk began is kept, by layer."""
    kept: dict[tuple[str, int], Any] = {}

    def change(core: Core, run: Run) -> bool:
        if not core.prefills:
            run(core)
            return False
        states, later = recurrent_states(core.layer), False
        for slot, continues in zip(core.prefill_slots.tolist(), core.continues.tolist(), strict=True):
            place = (core.layer.prefix, slot)
            before = states[slot].clone() if continues else states[slot] * 0
            if continues and place in kept:
                states[slot] = kept[place]
                later = True
            kept[place] = before
        run(core)
        return later

    return change


RULES: dict[str, Change] = {
    "stale": _stale,
    "conv_stale": _conv_stale,
    "twice": _at_later_chunks(recurrent_states, 2.0),
    "dropped": _at_later_chunks(recurrent_states, 0.0),
    "conv_dropped": _at_later_chunks(conv_states, 0.0),
}
