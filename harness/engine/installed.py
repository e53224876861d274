"""What vLLM says of itself, as one line of JSON: `python -m harness.engine.installed`.

A process of its own, because importing a broken installation may take long, print, or end the process.
"""

from __future__ import annotations

import json
from typing import Any


def probe() -> dict[str, Any]:
    """Version, platform, device and Triton as vLLM sees them, without starting an engine. Raises what imports raise."""
    import torch
    import transformers
    import vllm
    import vllm.envs as environment
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    _ = transformers.LlamaForCausalLM  # loaded only now: a torchvision built for another torch fails here
    return {
        "version": vllm.__version__,
        "platform": current_platform.device_type,
        "device": current_platform.get_device_name(),
        "devices": torch.cuda.device_count() if current_platform.device_type == "cuda" else 0,
        "runner": runner(environment.VLLM_USE_V2_MODEL_RUNNER, bool(HAS_TRITON)),
    }


def runner(asked: bool | None, triton: bool) -> str:
    """Which model runner vLLM would choose, and why, in words.

    MRV2 needs Triton; the environment overrides both; a model or an argument that MRV2 lacks turns it back to MRV1.
    """
    if asked is not None:
        return f"{'MRV2' if asked else 'MRV1'}, as VLLM_USE_V2_MODEL_RUNNER says"
    if not triton:
        return "MRV1, since vLLM finds no Triton that runs on this device"
    return "MRV2, unless the model or an argument needs what only MRV1 has"


if __name__ == "__main__":
    print(json.dumps(probe()), flush=True)
