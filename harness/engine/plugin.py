"""The entry points that vLLM calls.

`register` is called in the API server, the engine core, every worker and its inspection subprocess; `endpoint` in the
API server alone, and only where VLLM_PLUGINS names this plugin. They import nothing heavy, change no engine argument,
never raise, and do nothing at all unless a recording was asked for through the environment.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

ASKED = "LOGITGATE_CAPTURE"
"""Environment variable that asks for capture when it is "1"; workers inherit it from whoever starts the engine."""

ROOT = "LOGITGATE_RECORDINGS"
"""Environment variable of a server: the folder below which clients may have recordings written."""

NAME = "logitgate"
"""The plugin's name; a server must list it in VLLM_PLUGINS, as vLLM demands of plugins that add routes."""

_MARK = "_logitgate_wrapped"


def register() -> None:
    """Make every worker of this process offer the capture calls once its model is loaded. Idempotent."""
    if os.environ.get(ASKED) != "1" and not served_root():
        return
    try:
        _wrap_worker_start()
    except Exception:
        logging.getLogger("logitgate").exception("logitgate could not attach to this vLLM: nothing will be recorded")


def endpoint() -> Any:
    """The routes of a server that records; see `harness.engine.endpoint`."""
    from harness.engine.endpoint import Endpoint

    return Endpoint()


def served_root() -> str:
    """The folder a server's clients may record below; "" if this is no server that records."""
    named = [name.strip() for name in os.environ.get("VLLM_PLUGINS", "").split(",")]
    return os.environ.get(ROOT, "") if NAME in named else ""


def _wrap_worker_start() -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.init_device
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _call_after(self.worker, "load_model", _attach)
        if served_root():
            _call_after(self.worker, "compile_or_warm_up_model", _serve)
        return result

    setattr(init_device, _MARK, True)
    WorkerWrapperBase.init_device = init_device


def _call_after(worker: Any, name: str, then: Any) -> None:
    """Have `then(worker)` called whenever the worker's method of that name has run."""
    original = getattr(worker, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then(worker)
        return result

    setattr(worker, name, call)


def _attach(worker: Any) -> None:
    from harness.engine.worker import attach

    attach(worker)


def _serve(worker: Any) -> None:
    """After warm-up: its dummy runs are no one's requests."""
    answer = worker.logitgate_serve(served_root())
    if "error" in answer:
        logging.getLogger("logitgate").error("nothing will be recorded: %s", answer["error"])
