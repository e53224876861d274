"""`recording.json`: a Manifest as JSON and back, checked field by field against the dataclasses of `types`."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from harness.errors import StorageError
from harness.types import SCHEMA_VERSION, Manifest

T = TypeVar("T")

_NOT_FINITE = {"NaN", "Infinity", "-Infinity"}
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest as plain JSON values. JSON has no NaN or infinity: they become "NaN", "Infinity", "-Infinity".

    Raises StorageError, naming the field, for a value that JSON cannot hold.
    """
    plain: dict[str, Any] = to_plain(manifest, "manifest")
    return plain


def manifest_from_json(value: Any, where: str) -> Manifest:
    """The manifest that `manifest_to_json` made; fields it does not know are ignored.

    Raises StorageError beginning with `where` for a newer schema, a missing field or a wrong type.
    """
    if not isinstance(value, dict):
        raise StorageError(f"{where}: expected a JSON object, found {_shown(value)}")
    version = value.get("schema_version")
    if type(version) is not int or version < 1:
        raise StorageError(
            f"{where}: schema_version is {_shown(version)}, expected {SCHEMA_VERSION}: this is not a recording"
        )
    if version > SCHEMA_VERSION:
        raise StorageError(
            f"{where}: written by a newer logitgate (schema {version}; this one reads up to {SCHEMA_VERSION}): upgrade"
        )
    manifest: Manifest = _from_plain(Manifest, value, f"{where}: manifest")
    return manifest


def to_plain(value: Any, where: str) -> Any:
    """A dataclass, mapping, sequence or scalar as plain JSON values. Raises StorageError beginning with `where`."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name), f"{where}.{f.name}") for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, np.generic):
        return to_plain(value.item(), where)
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise StorageError(f"{where} is a {type(value).__name__}, which JSON cannot hold: give text, numbers or lists")


def from_plain(kind: type[T], value: Any, where: str) -> T:
    """A dataclass made of what `to_plain` gave. Raises StorageError beginning with `where`, naming the field."""
    made: T = _from_plain(kind, value, where)
    return made


def _from_plain(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type; only the annotations that a Manifest uses are understood."""
    if hint is Any:
        return value
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _from_plain(next(a for a in arguments if a is not type(None)), value, where)
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, StrEnum)):
        allowed = arguments if origin is Literal else [str(member) for member in hint]
        _require(isinstance(value, str) and value in allowed, value, where, f"one of {', '.join(allowed)}")
        return value if origin is Literal else hint(value)
    if origin is tuple:
        _require(isinstance(value, list), value, where, "a list")
        return tuple(_from_plain(arguments[0], item, f"{where}[{n}]") for n, item in enumerate(value))
    if origin is not None:
        _require(isinstance(value, dict), value, where, "an object")
        return {key: _from_plain(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return _dataclass_from_plain(hint, value, where)
    return _scalar_from_plain(hint, value, where)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """A dataclass's annotations, evaluated once: that is slow, and files of results hold hundreds of them."""
    return get_type_hints(kind)


def _dataclass_from_plain(kind: Any, value: Any, where: str) -> Any:
    _require(isinstance(value, dict), value, where, "an object")
    hints = _hints(kind)
    fields = {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            fields[field.name] = _from_plain(hints[field.name], value[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise StorageError(f"{where}.{field.name} is missing: the file is damaged or not a recording's")
    return kind(**fields)


def _scalar_from_plain(kind: type, value: Any, where: str) -> Any:
    if kind is float and (type(value) in (int, float) or (isinstance(value, str) and value in _NOT_FINITE)):
        return float(value)
    _require(type(value) is kind, value, where, _WORDS[kind])
    return value


def _require(condition: bool, value: Any, where: str, expected: str) -> None:
    if not condition:
        raise StorageError(f"{where} is {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
