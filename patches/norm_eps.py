"""RMS norms with another epsilon than the model's: a library default, or one a hundred times too large."""

from __future__ import annotations

from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import EAGER, norms

PATCHES = [
    Patch(
        name=f"norm_eps_{eps:g}",
        kind="fault",
        site="norm.eps",
        phase="both",
        source="Wenyueh/MinivLLM#82",
        summary=f"epsilon is {eps:g}",
        shows="KL, in the first positions most",
        fault_class="norm",
        severity=severity,
        twin=eps < 1e-4,
        engine=EAGER,
        parameters={"eps": eps},
    )
    for eps, severity in [(1e-6, "near-noise"), (1e-4, "near-noise"), (1e-3, "obvious")]
]


def apply(runner: Any, eps: float) -> Hooks:
    """Set epsilon of every norm."""
    hooks = Hooks()
    for norm in norms(runner):
        hooks.set(norm, "variance_epsilon", eps)
    return hooks
