"""The program's outermost layer: signals end it quietly from its first line on."""

from __future__ import annotations

import subprocess
import sys

INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{signal})

sys.meta_path.insert(0, Interrupt())
import harness.__main__
harness.__main__.run()
"""


def interrupted(module: str, signal: str) -> tuple[int, str, str]:
    program = INTERRUPTED_IMPORT.format(module=module, signal=signal)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def test_an_interrupt_during_the_imports_is_quiet() -> None:
    assert interrupted("typer", "SIGINT") == (130, "", "")
    assert interrupted("harness.cli", "SIGTERM") == (130, "", "")


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run([sys.executable, "-m", "harness", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("logitgate ")
