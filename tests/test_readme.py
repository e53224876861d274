"""What the README tells a reader to type: snippets run and give the right numbers, commands and options exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

from harness.cli import app
from harness.metrics import decode
from harness.storage import Recording, save_positions
from harness.types import Comparison, Phase
from tests.reporting import reported

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
OF_THE_ENGINE = {"record"}  # its other options are vLLM's


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def comparison(folder: Path) -> Comparison:
    made, _, _ = reported(folder)
    save_positions(made.positions, folder / "positions.parquet")
    (folder / "candidate").rename(folder / "build")
    return made


@pytest.fixture
def names(folder: Path, comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the snippets leave behind, run in a folder that has what they read."""
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {}
    for snippet in blocks("python"):
        exec(snippet, found)
    return found


def test_duckdb_and_polars_read_the_positions(names: dict[str, Any], comparison: Comparison) -> None:
    columns = comparison.positions
    order = np.argsort(-columns["kl20"])[:5]
    expected = [tuple(columns[name][i].item() for name in ("segment", "phase", "index", "kl20")) for i in order]
    assert names["worst"] == expected
    table = names["by_depth"].to_dicts()
    assert len(table) == 4
    for row in table:
        inside = (columns["phase"] == row["phase"]) & (columns["depth"] == row["depth"])
        assert row["kl20"] == pytest.approx(columns["kl20"][inside].mean(), rel=1e-12)
        assert row["flip"] == pytest.approx(columns["flip"][inside].mean(), rel=1e-12)


def test_the_recipe_decodes_a_recordings_rows(names: dict[str, Any], folder: Path) -> None:
    recording = Recording(folder / "build")
    table, logits = names["table"], names["logits"]
    assert logits.shape == (recording.manifest.rows_written, recording.manifest.vocab_size)
    segment = recording.corpus.segments[1].id
    for phase in Phase:
        inside = ((table["segment"] == segment) & (table["phase"] == str(phase))).to_numpy()
        block = recording.read(segment, phase)
        at = np.argsort(table["index"].to_numpy()[inside])
        np.testing.assert_array_equal(logits[inside][at], decode(block.logits, "bfloat16"))


def commands() -> list[list[str]]:
    lines = [
        line.split("#")[0]
        for block in re.findall(r"```[a-z]*\n(.*?)```", README, re.DOTALL)
        for line in block.splitlines()
    ]
    found = [
        line[line.index("logitgate ") :] for line in lines if re.search(r"(^|run: |--rm .* )logitgate [a-z]", line)
    ]
    return [shlex.split(line)[1:] for line in found]


def test_every_command_of_the_readme_exists_with_its_options() -> None:
    every = commands()
    assert len(every) >= 8
    for words in every:
        command: Any = get_command(app)
        while hasattr(command, "commands"):
            command = command.commands[words[0]]
            words = words[1:]
        known = {option for parameter in command.params for option in parameter.opts}
        unknown = {word for word in words if word.startswith("-")} - known
        assert not unknown or command.name in OF_THE_ENGINE, (command.name, unknown)


def test_every_command_is_in_the_readmes_table() -> None:
    table = README[README.index("## Commands") :]
    for name in get_command(app).commands:  # type: ignore[attr-defined]
        assert f"| `{name}" in table, name
