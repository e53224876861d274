"""The recurrent state kept in fewer bits than f32: after every decode update, between pieces of a prompt, or as stored.

`decode` rounds after every one-token update. `pieces` rounds at every 64 tokens of a prompt, where the prefill kernel
itself would keep f32. `stored` rounds where an engine stores the state, as a cache of that format does: after every
decode update and where a scheduled chunk of the prompt ends, so a prompt of one chunk sees nothing until it decodes.
Bits are explicit mantissa bits with f32's range, so 7 bits are bf16. vLLM's Qwen3-Next stores bf16 unless told
otherwise: bf16 and finer must stay green, coarser is a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.engine.gdn import F32_STATE, Core, Run, edit, recurrent_states, wrap_core
from harness.engine.gdn_kernels import prefill_in_pieces
from harness.patching import Hooks, Patch
from harness.rounding import keep_bits, through

if TYPE_CHECKING:
    import torch

WHERE = {
    "decode": ("decode", "after every decode update"),
    "pieces": ("both", "at every 64 tokens of a prompt"),
    "stored": ("both", "where it is stored: after a chunk of the prompt and every decode update"),
}
BITS = range(4, 17)
FORMATS = {"bf16": "none", "f16": "none", "e4m3": "obvious", "e5m2": "obvious"}
SEVERITY = {4: "subtle", 5: "near-noise", 6: "near-noise"}


def _patch(where: str, name: str, severity: str, summary: str, **parameters: Any) -> Patch:
    benign = severity == "none"
    phase, place = WHERE[where]
    return Patch(
        name=f"gdn_state_{where}_{name}",
        kind="benign" if benign else "fault",
        site="gdn.state",
        phase=phase,
        source="vllm-project/vllm#13466",
        summary=f"the recurrent state is rounded to {summary} {place}",
        shows="nothing beyond the floor" if benign else "decode KL growing with step; prefill KL from the second chunk",
        fault_class="" if benign else "state-dtype",
        severity=severity,
        engine=F32_STATE,
        parameters={"where": where, "bits": None, "form": "f32"} | parameters,
    )


PATCHES = [
    patch
    for where in WHERE
    for patch in (
        *(_patch(where, f"{n}_bits", SEVERITY.get(n, "none"), f"{n} mantissa bits", bits=n) for n in BITS),
        *(_patch(where, form, severity, form, form=form) for form, severity in FORMATS.items()),
    )
] + [
    Patch(
        name="gdn_state_pieces_f32",
        kind="benign",
        site="gdn.state",
        phase="both",
        source="the prefill kernel's own pieces",
        summary="the prefill kernel is called for 64 tokens at a time; the state stays f32",
        shows="nothing: rows are bit-equal on the CPU engine",
        changes_rows=False,
        engine=F32_STATE,
        parameters={"where": "pieces", "bits": None, "form": "f32"},
    )
]


def apply(runner: Any, where: str, bits: int | None, form: str) -> Hooks:
    """Round to `bits` mantissa bits, or through a number format where that is None."""
    hooks = Hooks()

    def round_state(state: torch.Tensor) -> torch.Tensor:
        return through(state, form) if bits is None else keep_bits(state, bits)

    if where == "pieces":
        prefill_in_pieces(hooks, runner, round_state)
    else:
        wrap_core(hooks, runner, _rounding(round_state, prompts=where == "stored"))
    return hooks


def _rounding(round_state: Callable[[torch.Tensor], torch.Tensor], *, prompts: bool) -> Callable[[Core, Run], bool]:
    def change(core: Core, run: Run) -> bool:
        run(core)
        states = recurrent_states(core.layer)
        if core.decodes:
            edit(states, core.decode_slots, round_state)
        if prompts and core.prefills:
            edit(states, core.prefill_slots, round_state)
        return bool(core.decodes or (prompts and core.prefills))

    return change
