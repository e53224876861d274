"""Which texts a corpus is cut from, and how: manifests (TOML) and the texts they name.

An origin is one of
    cpython:json/decoder.py         a file of the running interpreter's standard library
    pydoc_data.topics:compound      a topic of Python's own reference, prose that every CPython has
    path:notes/*.txt                files beside the manifest (or an absolute path); a pattern joins its matches, sorted
    texts:gutenberg/pg84.txt        the same below the folder of texts that the user gives
    https://host/path/name.txt      `name.txt` in the folder of texts; fetched into it only when asked; needs a sha256
Texts are taken as they are: no newline, header or byte order mark is touched.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
import tomllib
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

from harness._data import data_folder
from harness._files import atomic_file
from harness.errors import UsageError

Bos = Literal["tokenizer", "none", "first"]

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
"""What a corpus, a kind, a document and a segment may be called: safe in paths, tables and terminals."""

_FETCH_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """One document: the texts of its origins, one after the other."""

    kind: str
    origins: tuple[str, ...]
    licence: str
    sha256: str | None  # of the text's UTF-8 bytes; None accepts whatever is there


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How segments are cut from each document."""

    depths: tuple[int, ...]  # tokens of context before the first decode row, ascending
    documents: int  # per kind: the first so many sources of it are used
    decode_rows: int  # scored decode positions per segment
    prefill_rows: int  # scored prefill positions per segment, those just before the decode rows
    both_phases_at: tuple[int, ...]  # depths whose decode positions are scored by prefill as well


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusManifest:
    """A corpus before it meets a tokenizer."""

    name: str
    version: str
    description: str
    smoke: bool  # too small for a sign-off
    bos: Bos  # "tokenizer": whatever plain encoding does
    cut: Cut
    sources: tuple[SourceSpec, ...]
    folder: Path  # what `path:` origins are relative to


def load_manifest(name_or_path: str) -> CorpusManifest:
    """Read a packaged manifest by its name ("quick"), or a TOML file by its path.

    Raises UsageError, naming the key, for an unknown name, a file that is not there or not TOML, an unknown or missing
    key, a value of the wrong type or out of range.
    """
    path = _manifest_path(name_or_path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the corpus manifest {path}: {error}") from error
    return parse_manifest(table, folder=path.parent, where=str(path))


def parse_manifest(table: Mapping[str, Any], *, folder: Path, where: str) -> CorpusManifest:
    """The manifest that a TOML table says; `where` names it in messages. Raises UsageError as `load_manifest`."""
    top = _Table(table, where)
    manifest = CorpusManifest(
        name=top.name("name"),
        version=top.take("version", str),
        description=top.take("description", str, default=""),
        smoke=top.take("smoke", bool, default=False),
        bos=cast("Bos", top.take("bos", str, default="tokenizer")),
        cut=_parse_cut(_Table(top.take("cut", dict), f"{where}: [cut]")),
        sources=tuple(
            _parse_source(_Table(entry, f"{where}: [[source]] number {number}"))
            for number, entry in enumerate(top.take("source", list), start=1)
        ),
        folder=folder,
    )
    top.finish()
    if manifest.bos not in ("tokenizer", "none", "first"):
        raise UsageError(f'{where}: bos is {manifest.bos!r}; expected "tokenizer", "none" or "first"')
    for kind in dict.fromkeys(source.kind for source in manifest.sources):
        count = sum(source.kind == kind for source in manifest.sources)
        if count < manifest.cut.documents:
            raise UsageError(
                f"{where}: kind {kind!r} has {count} [[source]] entries and [cut] documents asks for "
                f"{manifest.cut.documents} per kind; add sources or lower it"
            )
    if not manifest.sources:
        raise UsageError(f"{where}: there is no [[source]]; a corpus needs at least one")
    return manifest


def read_text(source: SourceSpec, *, folder: Path, texts: Path | None = None, fetch: bool = False) -> str:
    """The whole text of a document.

    `texts` is the user's folder for `texts:` and URL origins; `fetch` allows a URL that is not in it to be downloaded
    into it. Raises UsageError for a text that is not there, not UTF-8 or not the one that the sha256 names.
    """
    parts = [_read_origin(origin, source, folder=folder, texts=texts, fetch=fetch) for origin in source.origins]
    data = b"".join(parts)
    digest = hashlib.sha256(data).hexdigest()
    if source.sha256 is not None and digest != source.sha256:
        raise UsageError(f"{_origin(source)} has sha256 {digest}, and the manifest names {source.sha256}: other text")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{_origin(source)} is not UTF-8: byte {error.start} of the text; convert it first") from error


# --------------------------------------------------------------------------- origins


def _read_origin(origin: str, source: SourceSpec, *, folder: Path, texts: Path | None, fetch: bool) -> bytes:
    scheme, _, name = origin.partition(":")
    if scheme == "cpython":
        return _read_files(Path(sysconfig.get_path("stdlib")), name, origin, "in this Python's standard library")
    if scheme == "pydoc_data.topics":
        return _topic(name)
    if scheme == "path":
        return _read_files(folder, name, origin, f"in {folder}", anywhere=True)
    if texts is None and not (scheme == "https" and fetch):
        raise UsageError(f"the corpus needs the text {origin}: give the folder that holds it with --texts DIR")
    if scheme == "texts":
        return _read_files(cast(Path, texts), name, origin, f"in the folder of texts {texts}")
    if texts is None:
        raise UsageError(f"{origin} is fetched into the folder of texts: give one with --texts DIR")
    return _read_url(origin, source.sha256, texts, fetch=fetch)


def _topic(name: str) -> bytes:
    from pydoc_data.topics import topics

    if name not in topics:
        raise UsageError(f"pydoc_data.topics of this Python has no topic {name!r}; it has {len(topics)} others")
    return topics[name].encode("utf-8")


def _read_files(root: Path, pattern: str, origin: str, place: str, *, anywhere: bool = False) -> bytes:
    """The files below `root` that match, joined in the order of their names."""
    wanted = PurePosixPath(pattern)
    if not anywhere and (wanted.is_absolute() or ".." in wanted.parts):
        raise UsageError(f"{origin} leads out of its folder; expected a path below it")
    try:
        if any(mark in pattern for mark in "*?["):
            base = Path(wanted.anchor) if wanted.is_absolute() else root
            found = sorted((p for p in base.glob(str(wanted.relative_to(wanted.anchor))) if p.is_file()), key=str)
        else:
            found = [root / pattern] if (root / pattern).is_file() else []
        data = b"".join(path.read_bytes() for path in found)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {origin} {place}: {error}") from error
    if not found:
        raise UsageError(f"{origin} is not {place}; put it there or change the manifest")
    return data


def _read_url(url: str, sha256: str | None, texts: Path, *, fetch: bool) -> bytes:
    name = PurePosixPath(url.partition("?")[0]).name
    path = texts / name
    if path.is_file():
        return path.read_bytes()
    if not fetch:
        raise UsageError(f"{url} is not in {texts} as {name!r}: put it there, or allow the download with --fetch")
    try:
        with urllib.request.urlopen(url, timeout=_FETCH_SECONDS) as answer:
            data = cast(bytes, answer.read())
    except OSError as error:
        raise UsageError(f"cannot fetch {url}: {error}; put the file into {texts} by hand") from error
    if hashlib.sha256(data).hexdigest() == sha256:
        with atomic_file(path) as file:
            file.write(data)
    return data  # a text other than the pinned one is refused by the caller, and never kept


def _origin(source: SourceSpec) -> str:
    return " + ".join(source.origins)


# --------------------------------------------------------------------------- TOML


class _Table:
    """A TOML table whose keys must all be taken, each with its type."""

    def __init__(self, table: object, where: str) -> None:
        if not isinstance(table, Mapping):
            raise UsageError(f"{where} is {table!r}; expected a table")
        self._left: dict[str, Any] = dict(table)
        self.where = where

    def take(self, key: str, kind: type, *, default: Any = ...) -> Any:
        if key not in self._left:
            if default is ...:
                raise UsageError(f"{self.where}: the key {key!r} is missing")
            return default
        value = self._left.pop(key)
        if type(value) is not kind:  # exact: True is an int otherwise
            raise UsageError(f"{self.where}: {key} is {value!r}; expected a {kind.__name__}")
        return value

    def name(self, key: str) -> str:
        value: str = self.take(key, str)
        if not PLAIN_NAME.fullmatch(value):
            raise UsageError(f"{self.where}: {key} is {value!r}; expected letters, digits and . _ + - only")
        return value

    def count(self, key: str, *, least: int, default: Any = ...) -> int:
        value: int = self.take(key, int, default=default)
        if value < least:
            raise UsageError(f"{self.where}: {key} is {value}; expected at least {least}")
        return value

    def items(self, key: str, kind: type, *, default: Any = ...) -> Sequence[Any]:
        values: list[Any] = self.take(key, list, default=default)
        for value in values:
            if type(value) is not kind:
                raise UsageError(f"{self.where}: {key} holds {value!r}; expected only {kind.__name__}")
        return values

    def finish(self) -> None:
        if self._left:
            raise UsageError(f"{self.where}: unknown key {min(self._left)!r}; remove it or check its spelling")


def _parse_cut(table: _Table) -> Cut:
    cut = Cut(
        depths=tuple(table.items("depths", int)),
        documents=table.count("documents", least=1),
        decode_rows=table.count("decode_rows", least=0),
        prefill_rows=table.count("prefill_rows", least=0),
        both_phases_at=tuple(table.items("both_phases_at", int, default=[])),
    )
    table.finish()
    if not cut.depths or list(cut.depths) != sorted(set(cut.depths)) or cut.depths[0] < 1:
        raise UsageError(f"{table.where}: depths is {list(cut.depths)}; expected ascending numbers, each at least 1")
    if cut.prefill_rows > cut.depths[0]:
        raise UsageError(f"{table.where}: prefill_rows {cut.prefill_rows} do not fit the least depth, {cut.depths[0]}")
    if not cut.prefill_rows and not cut.decode_rows:
        raise UsageError(f"{table.where}: decode_rows and prefill_rows are both 0: nothing would be scored")
    if unknown := sorted(set(cut.both_phases_at) - set(cut.depths)):
        raise UsageError(f"{table.where}: both_phases_at has {unknown[0]}, which is not one of the depths")
    return cut


def _parse_source(table: _Table) -> SourceSpec:
    kind, licence = table.name("kind"), table.take("licence", str)
    origins = tuple(table.items("origins", str))
    sha256 = table.take("sha256", str, default=None)
    table.finish()
    if not origins:
        raise UsageError(f"{table.where}: origins is empty")
    for origin in origins:
        scheme, colon, rest = origin.partition(":")
        if not (colon and rest and scheme in ("cpython", "pydoc_data.topics", "path", "texts", "https")):
            raise UsageError(
                f"{table.where}: unknown origin {origin!r}; expected cpython:FILE, pydoc_data.topics:TOPIC, path:FILE, "
                "texts:FILE or https://..."
            )
        if scheme == "https" and (sha256 is None or len(origins) > 1):
            raise UsageError(f"{table.where}: {origin} must stand alone with its sha256, so that the text is known")
    if sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise UsageError(f"{table.where}: sha256 is {sha256!r}; expected 64 lower-case hexadecimal digits")
    return SourceSpec(kind=kind, origins=origins, licence=licence, sha256=sha256)


def _manifest_path(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.suffix == ".toml" or len(path.parts) != 1:
        return path
    packaged = data_folder("corpora")
    names = sorted(entry.stem for entry in packaged.glob("*.toml"))
    if name_or_path not in names:
        raise UsageError(
            f"there is no corpus {name_or_path!r}; packaged are {', '.join(names)}; your own is given by its .toml path"
        )
    return packaged / f"{name_or_path}.toml"
