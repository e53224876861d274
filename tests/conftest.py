"""What all tests share: no network, deterministic hypothesis, and which marks run where."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.serving import LiveServer

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# No deadlines, since cores are shared with engines; the same examples on every run, so that a red test can be repeated.
settings.register_profile("logitgate", deadline=None, derandomize=True)
settings.load_profile("logitgate")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run. In CI a missing engine is a failure, never a skip."""
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    no_engine = pytest.mark.skip(reason="vllm is not installed")
    engine_missing = importlib.util.find_spec("vllm") is None and os.environ.get("CI") != "true"
    for item in items:
        if item.get_closest_marker("gpu") and not Path("/dev/nvidia0").exists():
            item.add_marker(no_gpu)
        if item.get_closest_marker("engine") and engine_missing:
            item.add_marker(no_engine)


@pytest.fixture(scope="session")
def live_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One vLLM server over a tiny model that all tests share; a test that kills it starts it again."""
    from tests.serving import LiveServer, save_model

    folder = tmp_path_factory.mktemp("server")
    save_model(folder / "model")
    running = LiveServer(folder / "model", folder / "root", folder / "server.log")
    try:
        running.start()
        yield running
    finally:
        running.stop()
