"""Other configurations of the same engine, all of them correct: nothing is patched, only engine arguments differ."""

from __future__ import annotations

from typing import Any

from harness.patching import Patch


def _variation(
    name: str, source: str, summary: str, changes_rows: bool = True, requests: Any = None, **engine: Any
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
    _variation(
        "block_16", "stock option", "KV cache blocks of 16 tokens, which select the vec16 kernel", block_size=16
    ),
    _variation("batch_8", "vllm-project/vllm#32480", "8 requests at a time", requests={"concurrency": 8}),
    _variation("float16", "ggml-org/llama.cpp#7150", "a float16 engine, declared as such", dtype="float16"),
    _variation(
        "head_f32", "ServiceNow/Fast-LLM#525", "the LM head computed in float32", hf_overrides={"head_dtype": "float32"}
    ),
]
