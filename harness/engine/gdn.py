"""Where patches take hold of Gated DeltaNet layers (hybrid models), on vLLM's CPU path and on its CUDA path alike.

A GDN layer keeps two states per request, in the slot the engine gave it: the last W - 1 inputs of a short convolution,
and the recurrent state. Its core reads and writes both: decoding requests by a one-token kernel, prompts by a kernel
that works in pieces of 64 tokens and leaves the state where the scheduled chunk ends. Both paths put decoding requests
first in the batch. Changes of states and gates use operations of the device alone where requests decode.

The CPU path is one function of a module, `_cpu_gdn_attention_nonspec`; on CUDA it is each layer's `_forward_core`.
Both run inside an opaque operator, so they are seen under compilation, but not when a captured graph is replayed:
patches ask for eager mode. Speculative decoding has paths of its own and is not covered.

Shape legend: T tokens of a step, R requests, D channels of the convolution, W its width, H value heads, K and V sizes
of a head's keys and values.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.errors import PatchError

if TYPE_CHECKING:
    import torch

    from harness.patching import Hooks

F32_STATE = {"enforce_eager": True, "mamba_ssm_cache_dtype": "float32"}
"""Engine arguments of patches that round the state: some models keep it in bf16 unless told otherwise."""

Run = Callable[["Core"], None]
"""Runs a layer's core as it is."""

Change = Callable[["Core", Run], object]
"""Runs a layer's core changed, and says by its truth value whether there was anything to change."""


def is_gdn(module: Any) -> bool:
    """Whether a module is a GDN layer that vLLM serves."""
    return all(hasattr(module, part) for part in ("A_log", "dt_bias", "conv1d", "kv_cache"))


def gdn_layers(runner: Any) -> list[Any]:
    """GDN layers in order. Raises PatchError if the model has none."""
    found = [module for module in runner.get_model().modules() if is_gdn(module)]
    if not found:
        raise PatchError("the model has no GDN layers: this patch needs a hybrid model, such as Qwen3-Next")
    return found


def describe_layer(layer: Any) -> str:
    """A GDN layer's class, kernels and the dtype it stores its recurrent state in, for a Build."""
    state = layer.kv_cache[1]
    decode = getattr(layer, "gdn_decode_kernel", "unknown")
    prefill = decode if state.device.type == "cpu" else getattr(layer, "gdn_prefill_backend", "unknown")
    kernels = decode if prefill == decode else f"prefill {prefill}, decode {decode}"
    return f"{type(layer).__name__} ({kernels}, state {str(state.dtype).removeprefix('torch.')})"


def recurrent_states(layer: Any) -> torch.Tensor:
    """The recurrent states of all slots, [slots, H, K, V]: a view, whatever the device's own orientation."""
    stored = layer.kv_cache[1]
    if stored.device.type != "cpu":
        return stored.transpose(-1, -2)
    slots, heads, rows, columns = stored.shape  # says V, K, but the CPU kernels keep K, V there
    return stored.view(slots, heads, columns, rows)


def conv_states(layer: Any) -> torch.Tensor:
    """The last inputs of the convolution of all slots, [slots, D, W - 1], oldest first: a view."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    stored = layer.kv_cache[0]
    return stored if is_conv_state_dim_first() else stored.transpose(-1, -2)


@dataclass(slots=True, kw_only=True)
class Core:
    """One call of one layer's core. Rows of decoding requests come first, one each."""

    layer: Any
    metadata: Any  # vLLM's GDNAttentionMetadata
    mixed: torch.Tensor  # [T, D] queries, keys and values before the convolution
    b: torch.Tensor  # [T, H] beta before its sigmoid
    a: torch.Tensor  # [T, H] the gate before bias, softplus and decay rate
    out: torch.Tensor  # [T, H, V] written

    @property
    def decodes(self) -> int:
        """Requests that decode, and their rows."""
        return int(self.metadata.num_decodes)

    @property
    def prefills(self) -> int:
        """Requests whose prompts are worked on."""
        return int(self.metadata.num_prefills)

    @property
    def decode_slots(self) -> torch.Tensor:
        """Where the decoding requests' states lie, [R]."""
        return self.metadata.non_spec_state_indices_tensor[: self.decodes].long()

    @property
    def prefill_slots(self) -> torch.Tensor:
        """Where the prefilling requests' states lie, [R]."""
        return self.metadata.non_spec_state_indices_tensor[self.decodes : self.decodes + self.prefills].long()

    @property
    def continues(self) -> torch.Tensor:
        """Which prefilling requests go on with an earlier chunk, [R] bool."""
        return self.metadata.has_initial_state[self.decodes : self.decodes + self.prefills]

    @property
    def starts(self) -> torch.Tensor:
        """First row of each prefilling request, and the end of the last, [R + 1]."""
        return self.metadata.non_spec_query_start_loc[self.decodes : self.decodes + self.prefills + 1].long()

    def resuming_all(self) -> Core:
        """The same call with every prefilling request said to go on from what lies in its slot."""
        metadata = copy.copy(self.metadata)
        for name in ("has_initial_state", "prefill_has_initial_state"):
            if (flags := getattr(metadata, name)) is not None:
                setattr(metadata, name, flags | True)
        return dataclasses.replace(self, metadata=metadata)


def edit(states: torch.Tensor, slots: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace what some slots hold, in place."""
    states[slots] = change(states[slots]).to(states.dtype)


def edit_where(
    states: torch.Tensor,
    slots: torch.Tensor,
    where: torch.Tensor,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """The same for those slots [R] whose flag [R] is set."""
    import torch

    flags = where.view(-1, *[1] * (states.dim() - 1))
    edit(states, slots, lambda held: torch.where(flags, change(held).to(held.dtype), held))


def wrap_core(hooks: Hooks, runner: Any, change: Change) -> None:
    """Let `change(core, run)` stand for every GDN layer's core. It fires when it says that it changed something."""
    layers = gdn_layers(runner)
    if runner.device.type == "cpu":
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        make = functools.partial(_cpu_core, hooks, change)
        hooks.wrap(gdn_attention, "_cpu_gdn_attention_nonspec", make, counts=False)
        return
    for layer in layers:
        hooks.wrap(layer, "_forward_core", functools.partial(_cuda_core, hooks, change, layer), counts=False)


def _cpu_core(hooks: Hooks, change: Change, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(core: Core) -> None:
        original(core.layer, core.metadata, core.mixed, core.b, core.a, core.out)

    def nonspec(layer: Any, metadata: Any, mixed: Any, b: Any, a: Any, out: Any) -> None:
        core = Core(layer=layer, metadata=metadata, mixed=mixed, b=b, a=a, out=out)
        hooks.fired += bool(change(core, run))

    return nonspec


def _cuda_core(hooks: Hooks, change: Change, layer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.forward_context import get_forward_context

    def run(core: Core) -> None:
        with _metadata(get_forward_context(), layer.prefix, core.metadata):
            original(mixed_qkv=core.mixed, b=core.b, a=core.a, core_attn_out=core.out)

    def forward_core(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or metadata.get(layer.prefix) is None:  # a profiling run
            original(mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)
            return
        core = Core(layer=layer, metadata=metadata[layer.prefix], mixed=mixed_qkv, b=b, a=a, out=core_attn_out)
        hooks.fired += bool(change(core, run))

    return forward_core


@contextmanager
def _metadata(context: Any, name: str, metadata: Any) -> Iterator[None]:
    """Show the layer of that name other metadata: it looks its own up."""
    before = context.attn_metadata[name]
    context.attn_metadata[name] = metadata
    try:
        yield
    finally:
        context.attn_metadata[name] = before
