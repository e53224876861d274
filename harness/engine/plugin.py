"""The entry point vLLM calls in the API server, the engine core, every worker and its inspection subprocess.

It imports nothing heavy, changes no engine argument, never raises, and does nothing at all unless a recording
was asked for through the environment.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

ASKED = "LOGITGATE_CAPTURE"
"""Environment variable that asks for capture when it is "1"; workers inherit it from whoever starts the engine."""

_MARK = "_logitgate_wrapped"


def register() -> None:
    """Make every worker of this process offer the capture calls once its model is loaded. Idempotent."""
    if os.environ.get(ASKED) != "1":
        return
    try:
        _wrap_worker_start()
    except Exception:
        logging.getLogger("logitgate").exception("logitgate could not attach to this vLLM: nothing will be recorded")


def _wrap_worker_start() -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.init_device
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _attach_after_load(self.worker)
        return result

    setattr(init_device, _MARK, True)
    WorkerWrapperBase.init_device = init_device


def _attach_after_load(worker: Any) -> None:
    load_model = worker.load_model

    @functools.wraps(load_model)
    def load_and_attach(*args: Any, **kwargs: Any) -> Any:
        result = load_model(*args, **kwargs)
        from harness.engine.worker import attach

        attach(worker)
        return result

    worker.load_model = load_and_attach
