"""Where patches take hold of a loaded vLLM model: modules by role, weights, tables. Needs no vllm import.

Shape legend: T tokens, N output features, K input features, D rotated head dimensions, P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from harness.errors import PatchError

if TYPE_CHECKING:
    import torch

    from harness.patching import Hooks

EAGER = {"enforce_eager": True}
"""Engine arguments of patches that hook into decoder layers: compiled code would not see them."""

RECURRENT = "gdn."
"""How the site of every patch begins that needs a hybrid model."""

PROJECTIONS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""The linear layers of a dense decoder layer, by the last part of their names."""


def attention_layers(runner: Any) -> list[Any]:
    """Attention layers in order; each has `impl` (the backend's code) and `kv_cache`."""
    return _modules(runner, lambda m: hasattr(m, "impl") and hasattr(m, "kv_cache"), "attention layers")


def rope_modules(runner: Any) -> list[Any]:
    """Rotary embeddings, each once: layers of one configuration share theirs."""
    return _modules(runner, lambda m: hasattr(m, "cos_sin_cache"), "rotary embeddings")


def norms(runner: Any) -> list[Any]:
    """RMS norms in order; the last is the final norm."""
    return _modules(runner, lambda m: type(m).__name__ == "RMSNorm", "RMS norms")


def activations(runner: Any) -> list[Any]:
    """Gated activations: `forward(gate and up [T, 2 F]) -> [T, F]`."""
    return _modules(runner, lambda m: type(m).__name__ == "SiluAndMul", "SiluAndMul activations")


def linears(runner: Any, *names: str) -> list[Any]:
    """Linear layers whose name ends in one of `names` (all of `PROJECTIONS` when none is given), in order."""
    wanted = names or PROJECTIONS
    found = [m for name, m in runner.get_model().named_modules() if name.rpartition(".")[2] in wanted]
    if not found:
        raise PatchError(f"the model has no linear layers named {', '.join(wanted)}")
    return found


def head(runner: Any) -> Any:
    """The LM head."""
    return runner.get_model().lm_head


@dataclass(slots=True)
class Step:
    """What the engine is doing now."""

    decode: bool = False  # one token of each request


def watch_steps(hooks: Hooks, runner: Any) -> Step:
    """The step in progress, kept up to date while the hooks are in place."""
    step = Step()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            step.decode = max(scheduler_output.num_scheduled_tokens.values(), default=0) == 1
            return original(scheduler_output, *args, **kwargs)

        return execute_model

    hooks.wrap(runner, "execute_model", make, counts=False)
    return step


def map_logits(hooks: Hooks, runner: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Pass each [rows, V] the model gives out through `change`, before any recorder or sampler sees it."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            logits = original(*args, **kwargs)
            return logits if logits is None else change(logits)

        return forward

    hooks.wrap(runner.get_model().logits_processor, "forward", make)


def weight_of(layer: Any) -> torch.Tensor:
    """A linear layer's weight, [N, K], its own dtype.

    The CPU engine keeps only a packed form; the rows are then read back through the layer itself, which is exact: each
    product is a weight times one, plus zeros.
    """
    import torch

    if layer.weight.numel():
        return layer.weight.detach()[: getattr(layer, "output_size_per_partition", None)]
    size = layer.input_size_per_partition
    identity = torch.eye(size, dtype=layer.params_dtype)
    return layer.quant_method.apply(layer, identity, None).t().contiguous()


def linear_like(layer: Any, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function [T, K] -> [T, N] for another weight, run by the same kernels as `layer`, without bias."""
    import torch

    method = layer.quant_method
    apply = method.apply  # before any hook of ours
    other = SimpleNamespace(weight=torch.nn.Parameter(weight.contiguous(), requires_grad=False), bias=None)
    method.process_weights_after_loading(other)
    return lambda x: apply(other, x, None)


def replace_weight(hooks: Hooks, layer: Any, weight: torch.Tensor) -> None:
    """Let a linear layer or LM head compute with another weight [N, K]; embeddings tied to it keep theirs."""
    if not hasattr(layer, "cpu_linear"):  # elsewhere the weight itself is used, also by captured graphs
        hooks.write(layer.weight, weight)
        return
    compute = linear_like(layer, weight)

    def with_bias(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return compute(x) if bias is None else compute(x) + bias

    hooks.wrap(layer, "cpu_linear", lambda _: with_bias)


def replace_product(hooks: Hooks, layer: Any, make: Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]) -> None:
    """Let a linear layer compute `make(layer)(x)`, [T, K] -> [T, N], in place of its matrix product; bias is kept."""
    product = make(layer)

    def apply(_: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return product(x) if bias is None else product(x) + bias

    hooks.wrap(layer.quant_method, "apply", lambda _: apply)


def rope_table(inv_freq: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Cosines beside sines of positions [P] times inverse frequencies [D/2]: [P, D], the dtype of the product."""
    import torch

    angles = positions[:, None] * inv_freq[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rewrite_rope(hooks: Hooks, runner: Any, make: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Write another table into every rotary embedding, in place.

    Args:
        hooks: undoes it.
        runner: the model runner.
        make: (rotary embedding, its inverse frequencies [D/2] f32, positions [P] f32) -> table [P, D].
    """
    import torch

    for rope in rope_modules(runner):
        table = rope.cos_sin_cache
        inv_freq = rope._compute_inv_freq(rope.base).to(table.device)
        positions = torch.arange(table.shape[0], dtype=torch.float32, device=table.device)
        hooks.write(table, make(rope, inv_freq, positions))


def _modules(runner: Any, wanted: Callable[[Any], bool], what: str) -> list[Any]:
    found = [module for module in runner.get_model().modules() if wanted(module)]
    if not found:
        raise PatchError(f"the model has no {what} that this patch could change")
    return found
