"""Limits from TOML: read, checked, merged, and the one that applies found."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.types import Build, FloorRange, Gate, Gates, Phase, Stratum

STATISTICS: Mapping[str, str] = {
    "ratio_to_floor": "kl20",
    "ratio_to_baseline": "kl20",
    "phase_ratio_to_floor": "kl20",
    "twin_mean": "kl20",
    "floor_mean_at_least": "kl20",
    "count_above_margin": "flip",
}
"""What can be limited, and the metric each is a statistic of."""

BOUNDED = ("ratio_to_floor", "ratio_to_baseline", "phase_ratio_to_floor", "twin_mean")
"""Those held against their limit with bounds, whose width depends on the corpus."""

_Test = Callable[[Any], bool]


def load_gates(path: Path | None) -> Gates:
    """The packaged limits, with those of a TOML file laid over them.

    None gives the packaged ones. Raises UsageError, naming the file and the key, if it cannot be read, has an unknown
    key, or a value of the wrong kind.
    """
    packaged = files("harness").joinpath("gates.toml")
    default = _parse(packaged.read_text(encoding="utf-8"), "gates.toml", None)
    if path is None:
        return default
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the gates file {path} cannot be read: {error}; give a TOML file like the packaged gates.toml"
        ) from error
    return _parse(text, str(path), default)


def gate_for(gates: Gates, statistic: str, build: Build, stratum: Stratum, *, smoke: bool = False) -> Gate:
    """The narrowest gate that fits; of equally narrow ones the strictest. Raises UsageError if there is none.

    `smoke` says that the corpus is a smoke corpus; without it the gates for smoke corpora are left out.
    """
    fitting = [g for g in gates.gates if g.statistic == statistic and _fits(g, build, stratum, smoke)]
    if not fitting:
        raise UsageError(
            f"{gates.source or 'the gates'} has no gate for {statistic} in {stratum}: add one with a limit and a reason"
        )
    return min(fitting, key=lambda gate: (-_narrowness(gate), gate.limit))


def names_model(name: str, build: Build) -> bool:
    """Whether a model named in a gates file is the build's: by its name, its folder's name, or its weights' hash."""
    return name in (build.model, Path(build.model).name, build.weights_sha256)


def _fits(gate: Gate, build: Build, stratum: Stratum, smoke: bool) -> bool:
    wanted = (
        (gate.stratum.phase, stratum.phase),
        (gate.stratum.kind, stratum.kind),
        (gate.stratum.depth, stratum.depth),
    )
    return (
        all(asked is None or asked == here for asked, here in wanted)
        and (gate.model is None or names_model(gate.model, build))
        and gate.dtype in (None, build.dtype)
        and (smoke or not gate.smoke)
    )


def _narrowness(gate: Gate) -> int:
    narrowing = (gate.stratum.phase, gate.stratum.kind, gate.stratum.depth, gate.model, gate.dtype, gate.smoke or None)
    return sum(x is not None for x in narrowing)


def _number(low: float, high: float) -> _Test:
    return lambda v: isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) and low <= v <= high


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


_LEVELS: Mapping[str, tuple[str, _Test]] = {
    "fail": ("a probability from 1e-9 to 0.2", _number(1e-9, 0.2)),
    "pass": ("a probability from 1e-9 to 0.2", _number(1e-9, 0.2)),
}
_GATE: Mapping[str, tuple[str, _Test]] = {
    "metric": ("a column, as " + " or ".join(sorted(set(STATISTICS.values()))), lambda v: v in STATISTICS.values()),
    "statistic": ("one of " + ", ".join(STATISTICS), lambda v: isinstance(v, str) and v in STATISTICS),
    "limit": ("a finite number of at least 0", _number(0.0, math.inf)),
    "reason": ("a sentence that says why", _text),
    "phase": ("prefill or decode", lambda v: v in [str(p) for p in Phase]),
    "kind": ("the name of a kind of text", _text),
    "depth": ("a whole number of tokens", lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0),
    "model": ("a model's name, its folder's name, or the sha256 of its weights", _text),
    "dtype": ("a dtype's name", _text),
    "smoke": ("true or false", lambda v: isinstance(v, bool)),
    "margin": ("a number of logits of at least 0", _number(0.0, math.inf)),
    "provisional": ("true or false", lambda v: isinstance(v, bool)),
}
_RANGE: Mapping[str, tuple[str, _Test]] = {
    "model": _GATE["model"],
    "dtype": _GATE["dtype"],
    "low": ("a number of nats of at least 0", _number(0.0, math.inf)),
    "high": ("a number of nats of at least 0", _number(0.0, math.inf)),
    "reason": _GATE["reason"],
}
_TABLES = {"levels": "a table", "gate": "an array of tables", "floor_range": "an array of tables"}


def _parse(text: str, source: str, default: Gates | None) -> Gates:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is not TOML: {error}") from error
    for key, value in data.items():
        right = isinstance(value, dict) if key == "levels" else isinstance(value, list)
        if key not in _TABLES or not right:
            allowed = ", ".join(f"{name} ({what})" for name, what in _TABLES.items())
            raise UsageError(f"{source}: {key} is not what was expected: {allowed}")
    levels = data.get("levels", {})
    _check(levels, _LEVELS, (), f"{source}: [levels]")
    own = [_gate(table, f"{source}: [[gate]] number {n}") for n, table in enumerate(data.get("gate", []), 1)]
    ranges = [
        _range(table, f"{source}: [[floor_range]] number {n}") for n, table in enumerate(data.get("floor_range", []), 1)
    ]
    _refuse_repeats(map(_identity, own), source)
    if default is None:
        return Gates(
            gates=tuple(own),
            fail_level=levels["fail"],
            pass_level=levels["pass"],
            floor_ranges=tuple(ranges),
            source=source,
        )
    replaced = {_identity(gate) for gate in own}
    ranged = {(r.model, r.dtype) for r in ranges}
    return replace(
        default,
        gates=(*(g for g in default.gates if _identity(g) not in replaced), *own),
        fail_level=levels.get("fail", default.fail_level),
        pass_level=levels.get("pass", default.pass_level),
        floor_ranges=(*(r for r in default.floor_ranges if (r.model, r.dtype) not in ranged), *ranges),
        source=f"{default.source} and {source}",
    )


def _identity(gate: Gate) -> tuple[object, ...]:
    return gate.metric, gate.statistic, gate.stratum, gate.model, gate.dtype, gate.smoke


def _refuse_repeats(identities: Iterable[tuple[object, ...]], source: str) -> None:
    seen: set[tuple[object, ...]] = set()
    for identity in identities:
        if identity in seen:
            raise UsageError(
                f"{source}: two gates limit {identity[1]} in {identity[2]} for the same model, dtype and "
                "corpora: keep one"
            )
        seen.add(identity)


def _check(table: Any, keys: Mapping[str, tuple[str, _Test]], required: tuple[str, ...], where: str) -> None:
    if not isinstance(table, dict):
        raise UsageError(f"{where} is {table!r}: expected a table with the keys {', '.join(keys)}")
    for key, value in table.items():
        if key not in keys:
            raise UsageError(f"{where}: unknown key {key}; the keys are {', '.join(keys)}")
        expected, test = keys[key]
        if not test(value):
            raise UsageError(f"{where}: {key} is {value!r}: expected {expected}")
    for key in required:
        if key not in table:
            raise UsageError(f"{where}: {key} is missing: expected {keys[key][0]}")


def _gate(table: Any, where: str) -> Gate:
    _check(table, _GATE, ("metric", "statistic", "limit", "reason"), where)
    statistic = table["statistic"]
    if table["metric"] != STATISTICS[statistic]:
        raise UsageError(
            f"{where}: metric is {table['metric']!r}: {statistic} is a statistic of {STATISTICS[statistic]}"
        )
    counts = statistic == "count_above_margin"
    if counts != ("margin" in table):
        problem = "margin is missing" if counts else f"{statistic} has no margin"
        raise UsageError(f"{where}: {problem}: count_above_margin takes one, in logits, and nothing else does")
    if not counts and table["limit"] <= 0:
        raise UsageError(f"{where}: limit is {table['limit']!r}: expected a number above 0 for {statistic}")
    if table.get("smoke", False) and statistic not in BOUNDED:
        raise UsageError(
            f"{where}: smoke is true: {statistic} has no bounds that a small corpus widens; only {', '.join(BOUNDED)} "
            "may have a limit for smoke corpora"
        )
    phase = Phase(table["phase"]) if "phase" in table else None
    return Gate(
        metric=table["metric"],
        statistic=statistic,
        limit=float(table["limit"]),
        reason=" ".join(table["reason"].split()),
        stratum=Stratum(phase=phase, kind=table.get("kind"), depth=table.get("depth")),
        model=table.get("model"),
        dtype=table.get("dtype"),
        smoke=table.get("smoke", False),
        margin=None if "margin" not in table else float(table["margin"]),
        provisional=table.get("provisional", False),
    )


def _range(table: Any, where: str) -> FloorRange:
    _check(table, _RANGE, tuple(_RANGE), where)
    if table["low"] >= table["high"]:
        raise UsageError(f"{where}: low is {table['low']}, high {table['high']}: expected low below high")
    return FloorRange(
        model=table["model"],
        dtype=table["dtype"],
        low=float(table["low"]),
        high=float(table["high"]),
        reason=" ".join(table["reason"].split()),
    )
