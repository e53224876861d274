"""The kernels inside a Gated DeltaNet layer's core, where patches change how they are called. See `gdn`.

Shape legend: T tokens of a step, R requests, H value heads, V size of a head's values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.engine.gdn import gdn_layers
from harness.errors import PatchError

if TYPE_CHECKING:
    import torch

    from harness.patching import Hooks

PIECE = 64
"""Tokens that the prefill kernels work on at once."""

_PER_TOKEN = ("query", "key", "value", "q", "k", "v", "g", "beta")


def prefill_in_pieces(hooks: Hooks, runner: Any, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Call the prefill kernel for `PIECE` tokens of one request at a time; `after` changes the state in between.

    It is given f32 states [1, H, ., .] in the device's own orientation, also after a chunk's last piece.

    Raises:
        PatchError: a prefill kernel that takes more than the requests' boundaries.
    """
    layers = gdn_layers(runner)
    if runner.device.type == "cpu":
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        hooks.wrap(gdn_attention.ops, "chunk_gated_delta_rule_cpu", lambda o: _cpu_pieces(o, after))
        return
    for layer in layers:
        if layer.gdn_prefill_backend not in ("triton", "flashinfer"):
            raise PatchError(
                f"the GDN prefill kernel is {layer.gdn_prefill_backend!r}, which needs more than the requests' "
                "boundaries: choose --gdn-prefill-backend triton or flashinfer"
            )
        hooks.wrap(layer.chunk_gated_delta_rule, "_forward_method", lambda o: _cuda_pieces(o, after))


def without_qk_norm(hooks: Hooks, runner: Any, *, prefill: bool) -> None:
    """Let the decode kernels, and with `prefill` the prefill kernels too, take queries and keys unnormalised."""
    gdn_layers(runner)
    in_kernel = "use_qk_l2norm_in_kernel"
    if runner.device.type == "cpu":
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        owner: Any = gdn_attention.ops
        options = {"fused_sigmoid_gating_delta_rule_update_cpu": in_kernel}
        options |= {"chunk_gated_delta_rule_cpu": in_kernel} if prefill else {}
    else:
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

        owner = qwen_gdn_linear_attn

        options = {"fused_recurrent_gated_delta_rule_packed_decode": in_kernel}
        options |= {"fused_sigmoid_gating_delta_rule_update": in_kernel}
        options |= {"fused_post_conv_prep": "apply_l2norm"} if prefill else {}
    for name, option in options.items():
        hooks.wrap(owner, name, functools.partial(_with_option_off, option))


def _with_option_off(option: str, original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: original(*args, **{**kwargs, option: False})


def _cpu_pieces(
    original: Callable[..., Any], after: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The CPU kernel gathers its states from the pool and updates them there."""
    import torch

    def chunk(
        *, initial_state: Any, initial_state_indices: Any, cu_seqlens: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots = initial_state_indices.long()

        def kernel(first: int, stop: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, _ = original(
                **{n: v[:, first:stop] if n in _PER_TOKEN else v for n, v in kwargs.items()},
                initial_state=state,
                initial_state_indices=torch.zeros_like(initial_state_indices[:1]),
                cu_seqlens=cu_seqlens.new_tensor([0, stop - first]),
            )
            return out, state

        out, states = _pieces(kernel, cu_seqlens.tolist(), initial_state[slots], after)
        initial_state[slots] = states
        return out, initial_state

    return chunk


def _cuda_pieces(
    original: Callable[..., Any], after: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The CUDA kernels take gathered states and return new ones. A piece is one chunk of theirs."""

    def chunk(*, initial_state: Any, cu_seqlens: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        def kernel(first: int, stop: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, new = original(
                **{n: v[:, first:stop] if n in _PER_TOKEN else v for n, v in kwargs.items()},
                initial_state=state,
                cu_seqlens=cu_seqlens.new_tensor([0, stop - first]),
            )
            return out, new

        for name, one in (("chunk_indices", [[0, 0]]), ("chunk_offsets", [0, 1])):
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name].new_tensor(one)
        return _pieces(kernel, cu_seqlens.tolist(), initial_state, after)

    return chunk


def _pieces(
    kernel: Callable[[int, int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    starts: list[int],
    states: torch.Tensor,
    after: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [1, T, H, V] and final states [R, H, ., .] of requests that begin at `starts` [R + 1]."""
    import torch

    outputs, finals = [], []
    for row, (start, stop) in enumerate(itertools.pairwise(starts)):
        state = states[row : row + 1].clone()
        for first in range(start, stop, PIECE):
            out, state = kernel(first, min(first + PIECE, stop), state)
            state = after(state)
            outputs.append(out)
        finals.append(state)
    return torch.cat(outputs, 1), torch.cat(finals)
