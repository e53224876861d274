"""Builds held beside each other, entry by entry: what was asked for, what the engine made of it, versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from harness.types import Build, Comparison

ABSENT = "not recorded"

SECTIONS = (
    "engine",
    "patches",
    "requested arguments",
    "resolved arguments",
    "attention",
    "packages",
    "environment",
    "host",
    "git",
)
"""Sections of a build's description, in the order they are shown."""

PER_RUN = ("VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME")
"""Environment variables that vLLM sets to a fresh random value in every run."""

_NAMES = {"requested": "requested arguments", "resolved": "resolved arguments"}
_LONGEST = 400  # characters of one value


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One named value in every build. `values` are as recorded, hostile or not: escape them."""

    section: str
    name: str  # dotted: "scheduler_config.max_num_seqs"
    values: tuple[str, ...]  # one for each build
    differs: bool  # between the builds whose engines have it


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """All entries of some builds."""

    names: tuple[str, ...]  # what the builds are called
    differing: tuple[Entry, ...]
    one_sided: tuple[Entry, ...]  # that only one build's engine has: nothing to hold against it
    equal: tuple[Entry, ...]
    per_run: tuple[Entry, ...]  # differ by their nature

    @property
    def changed(self) -> tuple[Entry, ...]:
        """What a reader looks at first: patches, engine, requested arguments, versions and environment."""
        first = [entry for entry in self.differing if entry.section not in ("resolved arguments", "host", "git")]
        return tuple(first)


def diff(builds: Mapping[str, Build]) -> Diff:
    """Hold builds against each other.

    An engine that never records an entry does not differ in it: HuggingFace has no block size.
    """
    flat = {name: _flatten(build) for name, build in builds.items()}
    found: dict[str, list[Entry]] = {"differing": [], "one_sided": [], "equal": [], "per_run": []}
    for section in SECTIONS:
        keys = dict.fromkeys(key for sections in flat.values() for key in sections[section])
        for key in keys:
            values = {name: sections[section].get(key, ABSENT) for name, sections in flat.items()}
            having = {builds[name].engine for name, value in values.items() if value != ABSENT}
            compared = [v for name, v in values.items() if section == "patches" or builds[name].engine in having]
            differs = len(set(compared)) > 1
            entry = Entry(section=section, name=key, values=tuple(values.values()), differs=differs)
            if key in PER_RUN:
                found["per_run"].append(entry)
            elif len(compared) < 2 < 1 + len(builds):
                found["one_sided"].append(entry)
            else:
                found["differing" if differs else "equal"].append(entry)
    return Diff(names=tuple(builds), **{name: tuple(entries) for name, entries in found.items()})


def changes(comparison: Comparison) -> Diff:
    """The candidate against the build before the change: the baseline, or else the floor."""
    before = ("baseline", comparison.baseline_side) if comparison.baseline_side else ("floor", comparison.floor_side)
    sides = [("candidate", comparison.candidate), before]
    return diff({name: side.manifest.build for name, side in sides if side is not None})


def everything(comparison: Comparison) -> Diff:
    """All builds of a comparison."""
    sides = (
        ("candidate", comparison.candidate),
        ("baseline", comparison.baseline_side),
        ("floor", comparison.floor_side),
        ("reference", comparison.reference),
    )
    return diff({name: side.manifest.build for name, side in sides if side is not None})


def _flatten(build: Build) -> dict[str, dict[str, str]]:
    """Section -> dotted name -> value as text."""
    result: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for field in fields(build):
        value = getattr(build, field.name)
        section = _NAMES.get(field.name, field.name)
        if field.name == "patches":
            result["patches"] = {_patch_name(patch): _patch_facts(patch) for patch in value}
        elif section in result and section != "engine":
            result[section] = dict(_leaves(value)) if value else {}
        else:
            result["engine"][field.name] = _text(value)
    result["attention"] = _grouped(result["attention"])
    return result


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, _text(value)


def _grouped(attention: Mapping[str, str]) -> dict[str, str]:
    """Layers that share a backend as one entry: thirty equal lines say no more than one."""
    if len(set(attention.values())) == 1:
        return {"every layer": next(iter(attention.values()))}
    return dict(attention)


def _patch_name(patch: Mapping[str, Any]) -> str:
    return str(patch.get("name", "unnamed"))


def _patch_facts(patch: Mapping[str, Any]) -> str:
    parameters = patch.get("parameters")
    given = [f"{name}={value!r}" for name, value in parameters.items()] if isinstance(parameters, Mapping) else []
    return ", ".join([f"{patch.get('kind', 'of no kind')}, sha256 {str(patch.get('sha256', '?'))[:12]}", *given])


def _text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = "[" + ", ".join(map(_text, value)) + "]"
    text = "none" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"
