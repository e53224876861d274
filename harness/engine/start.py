"""Starting vLLM: which versions, with the plugin asked, and with what would trip it out of the way."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.engine.layout import TESTED_VERSIONS
from harness.engine.logs import EngineLog
from harness.engine.plugin import ASKED, register
from harness.errors import EngineError, LogitgateError


def start_engine(config: Any, log: EngineLog) -> Any:
    """A running LLMEngine whose workers carry the plugin. EngineError, with what its log says, if it does not start."""
    from vllm.v1.engine.llm_engine import LLMEngine

    before = os.environ.get(ASKED)
    os.environ[ASKED] = "1"
    register()  # of this process, for an engine that lives in it: vLLM loaded its plugins with the configuration
    try:
        with numba_out_of_sight():
            return LLMEngine.from_vllm_config(config, disable_log_stats=True)
    except LogitgateError:
        raise
    except Exception as error:
        raise EngineError(f"vLLM did not start: {error or type(error).__name__}; {log.reason()}") from error
    finally:
        os.environ.pop(ASKED) if before is None else os.environ.__setitem__(ASKED, before)


def refuse_untested(untested: bool) -> None:
    """Raise EngineError for a vLLM release the capture was not run on, unless `untested` is true."""
    import vllm

    require_tested(vllm.__version__, untested)


def require_tested(version: str, untested: bool) -> None:
    """Raise EngineError for a release other than the tested ones, unless `untested` is true."""
    if version not in TESTED_VERSIONS and not untested:
        raise EngineError(
            f"vLLM {version} was not tested with logitgate (tested: {', '.join(TESTED_VERSIONS)}); "
            "use --untested-engine to go on: the instrument check still decides"
        )


@contextmanager
def numba_out_of_sight() -> Iterator[None]:
    """Hide llvmlite's library module while vLLM starts in this very process.

    vLLM 0.32 looks through the attributes of every loaded module for kernels to replace, and fails on the lazy wrapper
    object there. numba goes on using the module it holds.
    """
    name = "llvmlite.binding.ffi"
    hidden = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules[name] = hidden
