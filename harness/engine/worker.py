"""What a worker offers over vLLM's `collective_rpc`: begin, finish, patch, undo, describe, and three for servers.

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
from harness.engine.recordings import Recordings, prepare_root
from harness.engine.writer import BackgroundWriter
from harness.errors import EngineError, LogitgateError
from harness.patching import Applied, load_patch


def attach(worker: Any) -> None:
    """Give a loaded worker the calls `logitgate_*`."""
    service = WorkerService(worker)
    for name in ("begin", "finish", "patch", "undo", "describe", "serve", "served", "state"):
        setattr(worker, f"logitgate_{name}", _answered(getattr(service, name)))


class WorkerService:
    """One worker's capture, its writer and its applied patches."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._capture: Capture | None = None
        self._writer: BackgroundWriter | None = None
        self._applied: list[Applied] = []
        self._recordings: Recordings | None = None
        self._serves: dict[str, Any] = {}

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
            self._writer = BackgroundWriter(
                Path(folder), vocab_size=vocab_size, logits_dtype=dtype, prefix=self._prefix()
            )
        self._capture.start(self._writer, "window" if prompt_rows == "window" else "engine")

    def finish(self) -> dict[str, int]:
        """Close the parts and say what was made more than once.

        Returns {"repeated": rows made again, "resumed": requests preempted and resumed} from the writing rank, else {}.
        """
        if self._capture is not None:
            self._capture.stop()
        writer, self._writer = self._writer, None
        if writer is None:
            return {}
        writer.close()
        capture = self._capture
        return {} if capture is None else {"repeated": capture.repeated_rows, "resumed": capture.resumed_requests}

    def serve(self, root: str) -> None:
        """Record for any client that asks, below `root`. An engine that cannot be recorded serves on and says why."""
        if self._serves:  # warmed up again
            return
        runner = self._worker.model_runner
        config = runner.vllm_config
        try:
            runner_kind(runner)
            refuse_unsupported(config)
            if config.parallel_config.data_parallel_size > 1:
                raise EngineError("a server of several data-parallel engines: record a replica that has one")
            shape: dict[str, Any] = {
                "vocab_size": config.model_config.get_vocab_size(),
                "logits_dtype": head_dtype(config),
            }
            if self._writes():
                self._serves = {
                    **shape,
                    "mark": prepare_root(Path(root)),
                    "max_positions": config.model_config.max_model_len,
                }
                self._recordings = Recordings(Path(root), **shape, prefix=self._prefix())
        except LogitgateError as error:
            self._serves = {"refusal": error.message}
            raise
        recordings = self._recordings
        self._capture = Capture(runner)
        self._capture.serve(recordings.seat if recordings is not None else lambda ask: None)

    def served(self) -> dict[str, Any]:
        """What a client must know before it asks, from the writing rank; {} elsewhere."""
        return {**self._serves, "facts": describe_worker(self._worker)} if self._serves else {}

    def state(self, name: str) -> dict[str, Any]:
        """What became of a recording, from the writing rank; {} elsewhere."""
        return {} if self._recordings is None else self._recordings.state(name)

    def patch(self, reference: str) -> None:
        """Apply a patch ("FILE.py:NAME") to the loaded runner; patches stack until `undo`."""
        self._applied.append(load_patch(reference).apply(self._worker.model_runner))

    def undo(self) -> dict[str, dict[str, int | None]]:
        """Undo every patch, last first; the answer says by name what each reached.

        "fired" counts calls (None for a patch that cannot say), "unseen" the hooks that a compiled engine never called.
        """
        compiled = not self._worker.model_runner.model_config.enforce_eager
        answer = {}
        while self._applied:
            applied = self._applied.pop()
            answer[applied.patch.name] = {"fired": applied.fired, "unseen": applied.silent if compiled else 0}
            applied.undo()
        return answer

    def describe(self) -> dict[str, Any]:
        """What this worker runs, as JSON."""
        return describe_worker(self._worker)

    def _prefix(self) -> str:
        """Of this worker's part files: no two workers that write one recording share it."""
        return f"part-r{int(getattr(self._worker, 'rank', 0))}"

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
