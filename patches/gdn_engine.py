"""vLLM's own settings of the recurrent state: nothing is patched, only engine arguments differ; all are correct."""

from __future__ import annotations

from harness.patching import Patch

PATCHES = [
    Patch(
        name=f"gdn_engine_state_{name}",
        kind="benign",
        site="gdn.engine",
        phase="both",
        source="vLLM's option --mamba-ssm-cache-dtype",
        summary=f"the recurrent state is stored in {dtype}",
        shows="nothing beyond the floor",
        engine={"mamba_ssm_cache_dtype": dtype},
    )
    for name, dtype in [("f32", "float32"), ("bf16", "bfloat16"), ("f16", "float16")]
]
