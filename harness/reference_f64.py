"""Float64 that is float64 all the way through a transformers model.

Loading a model in float64 is not enough: norms, RoPE tables and softmax ask for float32 by name, whatever the
model's dtype. Two things mend that for any architecture whose operations reach PyTorch's dispatcher:

- while the model runs, every request for float32 is answered with float64, and a float tensor of less precision
  that still turns up is an error naming the operation, never a quietly worse result;
- the tables a model computes for itself when it is built (RoPE frequencies) were computed in float32, so they are
  built again under the same rule. A model with other tables of its own is refused.

What is left is the checkpoint's own rounding, which is part of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from harness.errors import UsageError

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_TABLE_AGREEMENT = 1e-4  # a rebuilt RoPE table may differ from the float32 one by rounding only, relative


class _Float64Everywhere(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Answers requests for float32 with float64; raises UsageError on a float tensor of less precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_widen, args), tree_map(_widen, kwargs or {})
        result = func(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and _is_narrow(leaf):
                raise UsageError(
                    f"this model cannot be run in true float64: {func} works on {leaf.dtype}, shape "
                    f"{tuple(leaf.shape)}; expected float64 throughout; record it with dtype float32 instead"
                )
        return result


def _widen(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def _is_narrow(tensor: torch.Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype not in _WIDER.values()


@contextmanager
def true_float64(network: torch.nn.Module) -> Iterator[None]:
    """Run `network`, whose parameters are float64 already, with nothing in less than float64.

    RoPE tables are rebuilt in float64 on entry and stay so. Raises UsageError, on entry or from the first forward
    that shows it, for a model with a part that would stay in less precision.
    """
    if hasattr(network, "set_experts_implementation"):
        network.set_experts_implementation("eager")  # the grouped products of a mixture of experts have no float64
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        _rebuild_tables(network)
        with torch.no_grad(), _Float64Everywhere():
            yield
    finally:
        torch.set_default_dtype(default)


def _rebuild_tables(network: torch.nn.Module) -> None:
    """Compute the float tables that are not in the checkpoint again, in float64, from each module's config."""
    saved = network.state_dict().keys()
    for path, module in network.named_modules():
        own = {name: table for name, table in module.named_buffers(recurse=False) if table.is_floating_point()}
        computed = [name for name in own if (f"{path}.{name}" if path else name) not in saved]
        if not computed:
            continue
        if not all(name.endswith("inv_freq") for name in computed) or not hasattr(module, "config"):
            raise UsageError(
                f"this model cannot be run in true float64: {path} ({type(module).__name__}) keeps tables computed in "
                f"float32 ({', '.join(computed)}); only RoPE frequencies can be rebuilt; record it in float32 instead"
            )
        with _Float64Everywhere():
            fresh = dict(type(module)(config=module.config).named_buffers(recurse=False))
        for name in computed:
            table, used = fresh[name].to(own[name].device), own[name].double()
            if table.shape != used.shape or not torch.allclose(table, used, rtol=_TABLE_AGREEMENT, atol=0):
                raise UsageError(
                    f"this model cannot be run in true float64: {path}.{name}, built again from the model's config, "
                    f"is not the table the model uses; record it with dtype float32 instead"
                )
            setattr(module, name, table)
