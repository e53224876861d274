"""Patch files: loading, applying, undoing, counting. No engine and no torch: the runner is a stand-in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.errors import PatchError
from harness.patching import Hooks, apply_patches, list_patches, load_patch

HEADER = '''
"""Doubles the answer."""
from harness.patching import Hooks, Patch
def patch(name, **more):
    more = {"kind": "fault", "phase": "both", "severity": "subtle"} | more
    return Patch(name=name, site="s", source="x#1", summary="s", shows="s", **more)
'''
SINGLE = (
    HEADER
    + """
PATCH = patch("double")
def apply(runner):
    hooks = Hooks()
    hooks.wrap(runner, "answer", lambda original: lambda x: 2 * original(x))
    return hooks
"""
)
FAMILY = (
    HEADER
    + """
PATCHES = [patch("times_3", parameters={"factor": 3}), patch("times_4", parameters={"factor": 4})]
def apply(runner, factor):
    hooks = Hooks()
    hooks.wrap(runner, "answer", lambda original: lambda x: factor * original(x))
    return hooks
"""
)


class Runner:
    """Something with a method and a value."""

    def __init__(self) -> None:
        self.scale = 1.0

    def answer(self, x: int) -> int:
        return x + 1


class Tensor:
    """The few tensor methods that `Hooks.write` needs, over numpy, so that no torch is loaded."""

    def __init__(self, values: Any) -> None:
        self.values = np.array(values, np.float32)

    @property
    def data(self) -> Tensor:
        return self

    def detach(self) -> Tensor:
        return self

    def clone(self) -> Tensor:
        return Tensor(self.values)

    def copy_(self, other: Tensor) -> None:
        self.values[:] = other.values


def write(folder: Path, text: str, name: str = "bug.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_patch_is_applied_counted_and_undone(tmp_path: Path) -> None:
    runner = Runner()
    loaded = load_patch(write(tmp_path, SINGLE))
    applied = loaded.apply(runner)
    assert (applied.fired, applied.silent) == (0, 1)
    assert runner.answer(1) == 4
    assert (applied.fired, applied.silent) == (1, 0)
    applied.undo()
    assert runner.answer(1) == 2
    assert vars(runner) == {"scale": 1.0}, "the method must be uncovered, not copied onto the instance"


def test_what_the_build_keeps(tmp_path: Path) -> None:
    import hashlib

    path = write(tmp_path, FAMILY)
    loaded = load_patch(f"{path}:times_3")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert loaded.describe() == {"name": "times_3", "kind": "fault", "sha256": digest, "parameters": {"factor": 3}}


def test_a_family_is_loaded_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, FAMILY)
    runner = Runner()
    load_patch(f"{path}:times_4").apply(runner)
    assert runner.answer(1) == 8
    assert load_patch(load_patch(f"{path}:times_4").reference).patch.name == "times_4"
    with pytest.raises(PatchError, match=r"holds 2 patches \(times_3, times_4\): say which, as .*bug\.py:NAME"):
        load_patch(path)
    with pytest.raises(PatchError, match="no patch named 'times_5'"):
        load_patch(f"{path}:times_5")


def test_several_are_undone_in_reverse(tmp_path: Path) -> None:
    path, runner = write(tmp_path, FAMILY), Runner()
    patches = [load_patch(f"{path}:times_3"), load_patch(f"{path}:times_4")]
    applied, undo = apply_patches(patches, runner)
    assert runner.answer(0) == 12
    assert [a.fired for a in applied] == [1, 1]
    undo()
    assert runner.answer(0) == 1
    undo()
    assert runner.answer(0) == 1


def test_a_patch_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = SINGLE.replace("return hooks", "return runner.missing")
    runner = Runner()
    good, bad = load_patch(write(tmp_path, SINGLE)), load_patch(write(tmp_path, broken, "bad.py"))
    with pytest.raises(PatchError, match=r"bad\.py:double could not be applied: AttributeError"):
        apply_patches([good, bad], runner)
    assert runner.answer(1) == 2
    assert vars(runner) == {"scale": 1.0}


def test_values_and_tensors_are_restored() -> None:
    runner, hooks = Runner(), Hooks()
    tensor = Tensor([1.0, -0.0, np.nan])
    before = tensor.values.tobytes()
    hooks.set(runner, "scale", 3.0)
    hooks.write(tensor, Tensor([0.0, 0.0, 0.0]))
    hooks.write(tensor, Tensor([5.0, 5.0, 5.0]))
    assert (runner.scale, tensor.values.tolist(), hooks.fired) == (3.0, [5.0] * 3, 3)
    hooks()
    assert runner.scale == 1.0
    assert tensor.values.tobytes() == before


def test_hooks_that_only_look_do_not_count() -> None:
    runner, hooks = Runner(), Hooks()
    hooks.wrap(runner, "answer", lambda original: original, counts=False)
    assert runner.answer(1) == 2
    assert hooks.fired == 0


def test_an_undo_of_ones_own_cannot_say_whether_it_fired(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + 'PATCH = patch("mine")\ndef apply(runner):\n    return lambda: None\n')
    assert load_patch(path).apply(Runner()).fired is None


def test_a_configuration_needs_no_apply(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + 'PATCH = patch("eager", engine={"enforce_eager": True})\n')
    applied = load_patch(path).apply(Runner())
    assert applied.fired is None
    applied.undo()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("PATCH = 3", "describes itself in PATCH"),
        ("def apply(runner): ...", "describes itself in PATCH"),
        (HEADER + 'PATCH = patch("a")', r"patch a needs a function `apply\(runner, ...\)`"),
        (HEADER + 'PATCH = patch("a")\nPATCHES = [PATCH]\ndef apply(runner): ...', "describes itself in PATCH"),
        (HEADER + "PATCHES = []\ndef apply(runner): ...", "describes itself in PATCH"),
        (HEADER + 'PATCHES = [patch("a"), patch("a")]\ndef apply(runner): ...', "more than once: a"),
        (HEADER + 'PATCH = patch("a", parameters={"k": 1})\ndef apply(runner): ...', r"needs `apply\(runner, k\)`"),
        (HEADER + 'PATCH = patch("a", phase="warm-up")', "phase must be one of both, prefill, decode, not 'warm-up'"),
        ("def apply(runner:", "does not load: SyntaxError"),
        ("import a_module_that_does_not_exist", "does not load: ModuleNotFoundError"),
        ("raise SystemExit(0)", "does not load: SystemExit"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PatchError, match=message) as caught:
        load_patch(write(tmp_path, text))
    assert str(tmp_path / "bug.py") in str(caught.value)


def test_missing_files_and_names() -> None:
    with pytest.raises(PatchError, match=r"nowhere\.py cannot be read: No such file"):
        load_patch("/nowhere.py")
    with pytest.raises(PatchError, match="no patch named 'no_such_patch' in the packaged patches"):
        load_patch("no_such_patch")


def test_an_apply_without_undo_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + 'PATCH = patch("a")\ndef apply(runner): pass\n')
    with pytest.raises(PatchError, match="must return a function that undoes it, not None"):
        load_patch(path).apply(SimpleNamespace())


def test_packaged_patches_are_listed_without_torch_or_vllm() -> None:
    code = (
        "import sys; from harness.patching import list_patches; assert len(list_patches()) > 60; "
        "print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_packaged_patch_is_found_by_name() -> None:
    listed = next(p for p in list_patches() if p.patch.name == "rope_bf16_positions")
    found = load_patch("rope_bf16_positions")
    assert (found.patch, found.sha256, found.path) == (listed.patch, listed.sha256, listed.path)
