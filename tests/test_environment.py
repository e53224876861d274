"""What a Build says about the machine and the process that made it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness import _environment


def test_environment_keeps_what_matters_and_withholds_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ONE", "1")
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.setenv("OTHER", "2")
    assert _environment.relevant_environment(["VLLM_"]).items() >= {"VLLM_ONE": "1", "VLLM_API_KEY": "(set)"}.items()
    assert "OTHER" not in _environment.relevant_environment(["VLLM_"])
    assert list(_environment.package_versions(["numpy", "no-such-package"])) == ["numpy"]


def test_git_state_tells_a_changed_repository_from_none(tmp_path: Path) -> None:
    assert _environment.git_state(tmp_path) is None
    assert _environment._git(tmp_path, "init", "--quiet") is not None
    assert _environment.git_state(tmp_path) == {"commit": None, "dirty": False}
    (tmp_path / "new").write_text("")
    assert _environment.git_state(tmp_path) == {"commit": None, "dirty": True}


@pytest.mark.parametrize(
    ("device", "setting", "override", "on"),
    [
        ("cuda:0", "highest", None, False),
        ("cuda:0", "high", None, True),
        ("cuda:1", "high", "0", False),
        ("cuda:0", "highest", "1", True),
        ("cuda:0", "high", "yes", True),
        ("cpu", "high", "1", False),
    ],
)
def test_tf32_is_on_where_torch_or_the_driver_says_so(
    monkeypatch: pytest.MonkeyPatch, device: str, setting: str, override: str | None, on: bool
) -> None:
    before = torch.get_float32_matmul_precision()
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    if override is not None:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    try:
        torch.set_float32_matmul_precision(setting)
        assert _environment.tf32_on(device) is on
    finally:
        torch.set_float32_matmul_precision(before)
