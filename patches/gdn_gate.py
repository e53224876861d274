"""Gates of the delta rule: decay or write strength missing, mixed up, of another head or token; the output gate too.

The decay of a step is exp(-exp(A_log) softplus(a + dt_bias)), the write strength beta is sigmoid(b).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from harness.engine.gdn import Change, Core, Run, gdn_layers, wrap_core
from harness.engine.gdn_kernels import without_qk_norm
from harness.patching import Hooks, Patch
from harness.rounding import cast_through
from harness.sites import EAGER

OFF, FULL = -1e4, 1e4  # through softplus and sigmoid: 0 and 1 exactly

PATCHES = [
    Patch(
        name=f"gdn_{name}",
        kind="fault",
        site=site,
        phase=phase,
        source=source,
        summary=summary,
        shows="decode KL; prefill is green" if phase == "decode" else "KL growing with depth",
        fault_class=fault_class,
        severity=severity,
        engine=EAGER,
        parameters={"rule": name},
    )
    for name, site, phase, source, summary, fault_class, severity in [
        (
            "gate_no_decay",
            "gdn.gate",
            "both",
            "synthetic: the decay left out",
            "the state never fades",
            "gdn-gate",
            "obvious",
        ),
        (
            "gate_no_decay_decode",
            "gdn.gate",
            "decode",
            "synthetic: the decay left out of one of two kernels",
            "the state does not fade in decode",
            "gdn-gate",
            "obvious",
        ),
        (
            "gate_beta_one",
            "gdn.gate",
            "both",
            "synthetic: beta left out",
            "every token is written at full strength",
            "gdn-gate",
            "obvious",
        ),
        (
            "gate_mixed_up",
            "gdn.gate",
            "both",
            "synthetic: the projection of b and a split in the other order",
            "beta and decay use each other's projection",
            "gdn-gate",
            "obvious",
        ),
        (
            "gate_heads_rolled",
            "gdn.gate",
            "both",
            "ggml-org/llama.cpp#25315",
            "each head uses the gates of its neighbour",
            "heads",
            "obvious",
        ),
        (
            "gate_tokens_late",
            "gdn.gate",
            "both",
            "synthetic: gates read one row off",
            "each token of a prompt uses the gates of the one before it",
            "gdn-gate",
            "obvious",
        ),
        (
            "gate_bias_dropped",
            "gdn.gate",
            "both",
            "sgl-project/sglang#20741",
            "the decay's bias dt_bias is left out",
            "gdn-gate",
            "obvious",
        ),
        (
            "gate_rate_e4m3",
            "gdn.gate",
            "both",
            "sgl-project/sglang#20741",
            "the decay rate A_log is kept in e4m3 (the original's bf16 is what this checkpoint has)",
            "state-dtype",
            "near-noise",
        ),
        (
            "norm_after_gate",
            "gdn.norm",
            "both",
            "synthetic: the order of Mamba-2's gated norm",
            "the output is gated before it is normalised",
            "gdn-gate",
            "obvious",
        ),
        (
            "qk_norm_dropped",
            "gdn.norm",
            "both",
            "synthetic: a kernel's option that is off by default",
            "queries and keys are not normalised",
            "gdn-gate",
            "obvious",
        ),
        (
            "qk_norm_dropped_decode",
            "gdn.norm",
            "decode",
            "synthetic: the option set in one of two kernels",
            "queries and keys are not normalised in decode",
            "gdn-gate",
            "obvious",
        ),
    ]
]


def apply(runner: Any, rule: str) -> Hooks:
    """Change gates, their parameters, or the norms."""
    hooks = Hooks()
    if rule in RULES:
        wrap_core(hooks, runner, RULES[rule])
        return hooks
    if rule.startswith("qk_norm"):
        without_qk_norm(hooks, runner, prefill=rule == "qk_norm_dropped")
        return hooks
    for layer in gdn_layers(runner):
        if rule == "gate_bias_dropped":
            hooks.write(layer.dt_bias, 0)
        elif rule == "gate_rate_e4m3":
            hooks.write(layer.A_log, cast_through(layer.A_log.detach(), "e4m3"))
        else:
            hooks.set(layer.norm, "norm_before_gate", False)
    return hooks


def _no_decay(core: Core, run: Run) -> bool:
    run(dataclasses.replace(core, a=core.a * 0 + OFF))
    return True


def _no_decay_decode(core: Core, run: Run) -> bool:
    a = core.a.clone()
    a[: core.decodes] = OFF
    run(dataclasses.replace(core, a=a))
    return bool(core.decodes)


def _beta_one(core: Core, run: Run) -> bool:
    run(dataclasses.replace(core, b=core.b * 0 + FULL))
    return True


def _mixed_up(core: Core, run: Run) -> bool:
    run(dataclasses.replace(core, a=core.b, b=core.a))
    return True


def _heads_rolled(core: Core, run: Run) -> bool:
    run(dataclasses.replace(core, a=core.a.roll(1, -1), b=core.b.roll(1, -1)))
    return True


def _tokens_late(core: Core, run: Run) -> bool:
    """Rows of a prompt's chunk move down by one; its first row, and rows that decode, keep their own."""
    if not core.prefills:
        run(core)
        return False
    late = {}
    for name in ("a", "b"):
        own = getattr(core, name)
        moved = own.roll(1, 0)
        moved[: core.decodes] = own[: core.decodes]
        moved[core.starts[:-1]] = own[core.starts[:-1]]
        late[name] = moved
    run(dataclasses.replace(core, **late))
    return True


RULES: dict[str, Change] = {
    "gate_no_decay": _no_decay,
    "gate_no_decay_decode": _no_decay_decode,
    "gate_beta_one": _beta_one,
    "gate_mixed_up": _mixed_up,
    "gate_heads_rolled": _heads_rolled,
    "gate_tokens_late": _tokens_late,
}
