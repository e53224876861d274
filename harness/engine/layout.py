"""The few facts that differ between vLLM's two model runners, and the refusal of anything else.

MRV1 is `v1/worker/gpu_model_runner.py` (the CPU engine's runner derives from it); MRV2 is
`v1/worker/gpu/model_runner.py`, the GPU default. Row order is the runner's own batch order, which is not the order
of the scheduler's dictionaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import EngineError
from harness.types import ITEM_BYTES, LogitsDtype

TESTED_VERSIONS = ("0.32.0",)
"""vLLM releases the capture was run on."""

_RUNNERS = {
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"): "MRV1",
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"): "MRV2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Where each request's tokens lie in the flat batch of one engine step."""

    request_ids: list[str]  # batch order; sampled row i belongs to request i
    starts: NDArray[np.int64]  # [R + 1] first flat row of each request
    first_index: NDArray[np.int64]  # [R] position of each request's first scheduled token
    count: NDArray[np.int64]  # [R] tokens scheduled for each request
    sampled_logits: Any  # [R, V] raw logits of the sampled rows, or None if the runner makes them later (MRV2)

    @property
    def last_index(self) -> NDArray[np.int64]:
        """Position of the row each request's sampled logits belong to, [R]."""
        return self.first_index + self.count - 1


def runner_kind(runner: Any) -> str:
    """The kind of model runner, "MRV1" or "MRV2". Raises EngineError for any other model runner."""
    for cls in type(runner).__mro__:
        kind = _RUNNERS.get((cls.__module__, cls.__name__))
        if kind:
            return kind
    name = f"{type(runner).__module__}.{type(runner).__qualname__}"
    raise EngineError(
        f"model runner {name} is unknown: logitgate captures from vLLM's GPUModelRunner, versions 1 and 2"
    )


def step_layout(runner: Any, state: Any, scheduled: Mapping[str, tuple[int, int]]) -> StepLayout:
    """The layout of the step whose `execute_model_state` is given.

    `scheduled` maps a request's id to (tokens computed before the step, tokens scheduled in it), as the scheduler
    said it. Raises EngineError if the runner's batch and the scheduler disagree.
    """
    batch = getattr(state, "input_batch", None)
    if batch is not None:
        request_ids, starts, logits = list(batch.req_ids), batch.query_start_loc_np, None
    else:
        request_ids = list(runner.input_batch.req_ids[: runner.input_batch.num_reqs])
        starts, logits = runner.query_start_loc.np, state.logits
    starts = np.asarray(starts[: len(request_ids) + 1], np.int64).copy()
    facts = [scheduled.get(r, (-1, -1)) for r in request_ids]
    first_index = np.array([f[0] for f in facts], np.int64)
    count = np.array([f[1] for f in facts], np.int64)
    if not np.array_equal(np.diff(starts), count):
        raise EngineError(
            f"the runner's batch holds {np.diff(starts).tolist()} tokens per request where the scheduler asked for "
            f"{count.tolist()}: rows cannot be told apart; please report this engine configuration"
        )
    return StepLayout(
        request_ids=request_ids, starts=starts, first_index=first_index, count=count, sampled_logits=logits
    )


def refuse_unsupported(vllm_config: Any) -> None:
    """Raise EngineError, by name, for engine features under which a row per position does not exist."""
    problems = []
    if getattr(vllm_config, "speculative_config", None) is not None:
        problems.append("speculative decoding (several positions are verified per step)")
    if getattr(vllm_config.model_config, "runner_type", "generate") == "pooling":
        problems.append("a pooling model (it has no logits)")
    if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
        problems.append("kv_sharing_fast_prefill (prompt rows are skipped)")
    if getattr(vllm_config.parallel_config, "enable_batch_sharded_sampling", False):
        problems.append("batch-sharded sampling (no rank holds all rows)")
    if problems:
        raise EngineError("this engine cannot be recorded: " + "; ".join(problems) + ". Start it without.")


def head_dtype(vllm_config: Any) -> LogitsDtype:
    """The dtype of the engine's logits. Raises EngineError for one that a recording cannot hold."""
    dtype: LogitsDtype = str(vllm_config.model_config.head_dtype).removeprefix("torch.")  # type: ignore[assignment]
    if dtype not in ITEM_BYTES:
        raise EngineError(f"the engine's logits are {dtype}: expected one of {', '.join(ITEM_BYTES)}")
    return dtype
