"""A position bias that only one phase has: ALiBi slopes reach decode and not prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.patching import Hooks, Patch
from harness.sites import attention_layers

PATCH = Patch(
    name="attention_alibi_decode",
    kind="fault",
    site="attention.scores",
    phase="decode",
    source="HabanaAI/vllm-fork#437",
    summary="decode adds an ALiBi bias that prefill does not",
    shows="decode KL growing with depth; prefill is green",
    fault_class="alibi",
    severity="obvious",
)


def apply(runner: Any) -> Hooks:
    """Give each head its ALiBi slope for steps of one token a request."""
    import torch

    hooks = Hooks()
    for layer in attention_layers(runner):
        impl = layer.impl
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / layer.num_heads) for head in range(layer.num_heads)])

        def make(original: Callable[..., Any], impl: Any = impl, slopes: Any = slopes) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                metadata = args[5] if len(args) > 5 else kwargs["attn_metadata"]
                if metadata is None or metadata.max_query_len > 1:
                    return original(*args, **kwargs)
                impl.alibi_slopes = slopes
                try:
                    return original(*args, **kwargs)
                finally:
                    impl.alibi_slopes = None

            return forward

        hooks.wrap(impl, "forward", make)
    return hooks
