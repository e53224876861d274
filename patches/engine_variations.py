"""Other configurations of the same engine, all of them correct.

Nothing is patched: engine arguments, environment or the pattern of requests differ.
"""

from __future__ import annotations

from typing import Any

from harness.patching import Patch


def _variation(
    name: str,
    source: str,
    summary: str,
    changes_rows: bool = True,
    requests: Any = None,
    environment: Any = None,
    **engine: Any,
) -> Patch:
    return Patch(
        name=f"engine_{name}",
        kind="benign",
        site="engine",
        phase="both",
        source=source,
        summary=summary,
        shows="nothing beyond the floor" if changes_rows else "nothing: rows are bit-equal on the CPU engine",
        changes_rows=changes_rows,
        engine=engine,
        environment=environment or {},
        requests=requests or {},
    )


PATCHES = [
    _variation("compiled", "pytorch/pytorch#158699", "torch.compile in place of eager mode", enforce_eager=False),
    _variation(
        "chunks_256", "sgl-project/sglang#22688", "prefill in chunks of 256 tokens", False, max_num_batched_tokens=256
    ),
    _variation(
        "chunks_64", "sgl-project/sglang#22688", "prefill in chunks of 64 tokens", False, max_num_batched_tokens=64
    ),
    _variation("block_32", "stock option", "KV cache blocks of 32 tokens", block_size=32),
    _variation("block_64", "stock option", "KV cache blocks of 64 tokens", block_size=64),
    _variation("batch_8", "vllm-project/vllm#32480", "8 requests at a time", requests={"concurrency": 8}),
    _variation("batch_1", "vllm-project/vllm#32480", "one request at a time", requests={"concurrency": 1}),
    _variation(
        "order_reversed",
        "vllm-project/vllm#32480",
        "the same requests in reverse order, so that other ones share a batch",
        requests={"order": "reversed"},
    ),
    _variation(
        "prefix_hit",
        "vllm-project/vllm#42699",
        "decode after a hit of the prefix cache, not after a prefill of one's own",
        requests={"prefix_hit": True},
    ),
    _variation(
        "preemption",
        "stock scheduler",
        "a KV cache too small for its requests: they are preempted, and computed again later",
        requests={"preemption": True},
    ),
    _variation(
        "threads_1",
        "stock option",
        "one thread in place of all",
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0"},
    ),
    _variation(
        "kv_split_off",
        "sgl-project/sglang#35045",
        "attention never splits the KV cache between threads",
        environment={"VLLM_CPU_ATTN_SPLIT_KV": "0"},
    ),
    _variation("float16", "ggml-org/llama.cpp#7150", "a float16 engine, declared as such", dtype="float16"),
    _variation(
        "head_f32", "ServiceNow/Fast-LLM#525", "the LM head computed in float32", hf_overrides={"head_dtype": "float32"}
    ),
]
