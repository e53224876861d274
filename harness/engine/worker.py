"""What a worker offers over vLLM's `collective_rpc`: begin, finish, patch, undo, describe.

Answers are plain values: `{"ok": value}` or `{"error": message}`, so that an error reaches the other process as a
sentence, not as a remote traceback.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.engine.capture import Capture
from harness.engine.describe import describe_worker
from harness.engine.layout import head_dtype, refuse_unsupported, runner_kind
from harness.engine.writer import BackgroundWriter
from harness.errors import EngineError, LogitgateError
from harness.patching import Applied, load_patch


def attach(worker: Any) -> None:
    """Give a loaded worker the calls `logitgate_*`."""
    service = WorkerService(worker)
    for name in ("begin", "finish", "patch", "undo", "describe"):
        setattr(worker, f"logitgate_{name}", _answered(getattr(service, name)))


class WorkerService:
    """One worker's capture, its writer and its applied patches."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._capture: Capture | None = None
        self._writer: BackgroundWriter | None = None
        self._applied: list[Applied] = []

    def begin(self, folder: str, vocab_size: int, prompt_rows: str) -> None:
        """Start to capture the rows of our requests into `folder`."""
        runner = self._worker.model_runner
        runner_kind(runner)
        refuse_unsupported(runner.vllm_config)
        if self._writer is not None:
            raise EngineError("a recording is already under way in this engine; finish it first")
        if self._capture is None:
            self._capture = Capture(runner)
        if self._writes():
            dtype = head_dtype(runner.vllm_config)
            rank = int(getattr(self._worker, "rank", 0))
            self._writer = BackgroundWriter(
                Path(folder), vocab_size=vocab_size, logits_dtype=dtype, prefix=f"part-r{rank}"
            )
        self._capture.start(self._writer, "window" if prompt_rows == "window" else "engine")

    def finish(self) -> dict[str, int]:
        """Close the parts. Returns {"repeated": rows the engine made again} from the writing rank, {} elsewhere."""
        if self._capture is not None:
            self._capture.stop()
        writer, self._writer = self._writer, None
        if writer is None:
            return {}
        writer.close()
        return {"repeated": self._capture.repeated_rows if self._capture else 0}

    def patch(self, reference: str) -> None:
        """Apply a patch ("FILE.py:NAME") to the loaded runner; patches stack until `undo`."""
        self._applied.append(load_patch(reference).apply(self._worker.model_runner))

    def undo(self) -> dict[str, int | None]:
        """Undo every patch, last first. Returns how often each fired, by name; None for one that cannot say."""
        fired = {}
        while self._applied:
            applied = self._applied.pop()
            fired[applied.patch.name] = applied.fired
            applied.undo()
        return fired

    def describe(self) -> dict[str, Any]:
        """What this worker runs, as JSON."""
        return describe_worker(self._worker)

    def _writes(self) -> bool:
        """All tensor-parallel ranks of the last pipeline stage hold the logits; the first of them writes."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        return bool(get_pp_group().is_last_rank) and get_tp_group().rank_in_group == 0


def _answered(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(method)
    def call(*args: Any) -> dict[str, Any]:
        try:
            return {"ok": method(*args)}
        except LogitgateError as error:
            return {"error": error.message}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    return call
