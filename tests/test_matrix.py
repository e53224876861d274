"""The script of the engine matrix: which engines it takes, and what it says of them; running them is its own work."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from scripts import engine_matrix as matrix


@pytest.mark.parametrize("strength", [2, 3])
def test_every_combination_that_can_be_occurs_and_no_engine_twice(strength: int) -> None:
    engines = list(matrix.covering(strength))
    assert len({matrix.name(engine) for engine in engines}) == len(engines) < 96
    assert all(engine["runner"] == "MRV1" or engine["mode"] == "eager" for engine in engines)
    for factors in itertools.combinations(matrix.FACTORS, strength):
        for values in itertools.product(*(matrix.FACTORS[factor] for factor in factors)):
            wanted = dict(zip(factors, values, strict=True))
            if wanted.get("runner") == "MRV2" and (wanted.get("mode") == "compile" or wanted.get("via") == "server"):
                continue
            assert any(wanted.items() <= engine.items() for engine in engines), wanted


def test_the_table_tells_what_was_not_run_and_what_went_wrong(tmp_path: Path) -> None:
    good, odd, failed, left = itertools.islice(matrix.covering(3), 4)
    case: dict[str, Any] = {
        "once": True,
        "rows": 7,
        "instrument": True,
        "instrument_rows": 7,
        "instrument_error": 1e-7,
        "differ": 0,
    }
    case |= {"kl_mean": 0.0, "flips": 0, "cached": 0, "folder": "good"}
    results: dict[str, Any] = {
        matrix.name(good): {"outputs": True, "c1": case, "c8": case},
        matrix.name(odd): {"outputs": False, "c1": case | {"once": False, "instrument": False}, "c8": case},
        matrix.name(failed): {"error": "no such kernel"},
    }
    matrix.write(tmp_path / "matrix", [good, odd, failed, left], results, 3)
    lines = (tmp_path / "matrix.md").read_text().splitlines()[-6:]
    assert "3 of 4 engines run" in (tmp_path / "matrix.md").read_text()
    assert "7 once | equal at 7" in lines[0]
    assert "**NOT ONCE** | **NOT** at 7" in lines[2]
    assert "**differ**" in lines[2]
    assert "failed: no such kernel" in lines[4]
    assert lines[5].endswith("|  | not run |")
    (tmp_path / "good").mkdir()
    assert matrix.done(results[matrix.name(good)], tmp_path)
    assert not matrix.done(results[matrix.name(failed)], tmp_path)
    assert not matrix.done(None, tmp_path)
    assert matrix.kept_results(tmp_path / "matrix.json") == results
