"""Corpora: fixed texts as token ids, pinned and hashed. One Parquet file each, a segment a row.

The file's columns are `id`, `document`, `kind`, `depth`, `token_ids`, `decode_from` and `windows`; the rest is JSON in
the schema's metadata. A corpus is known by the sha256 of what decides its rows, not by the bytes of its file.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from harness._files import atomic_file
from harness.corpus_sources import PLAIN_NAME, Bos, CorpusManifest, Cut, SourceSpec, load_manifest, read_text
from harness.errors import StorageError, UsageError
from harness.types import SCHEMA_VERSION, Corpus, Segment, Source

__all__ = [
    "CorpusManifest",
    "build_corpus",
    "check_fits",
    "cut_document",
    "load_corpus",
    "load_manifest",
    "load_tokenizer",
    "save_corpus",
    "seal",
    "tokenizer_facts",
]

Progress = Callable[[int, int], None]
"""Called with (documents done, documents in all)."""

_METADATA = b"logitgate.corpus"
_PIECES = b"logitgate.pieces"  # apart from the rest and compressed: as large as the vocabulary
_WINDOW = pa.struct([("start", pa.int32()), ("stop", pa.int32())])
_COLUMNS = {
    "id": pa.string(),
    "document": pa.string(),
    "kind": pa.string(),
    "depth": pa.int32(),
    "token_ids": pa.list_(pa.int32()),
    "decode_from": pa.int32(),
    "windows": pa.list_(_WINDOW),
}
_CHARACTERS_PER_TOKEN = 8  # a first guess of how much of a long text has to be encoded


# --------------------------------------------------------------------------- building


def build_corpus(
    manifest: CorpusManifest,
    tokenizer: Any,
    *,
    tokenizer_name: str,
    texts: Path | None = None,
    fetch: bool = False,
    progress: Progress | None = None,
) -> Corpus:
    """Tokenise and cut the manifest's documents.

    `tokenizer` is a transformers tokenizer; `tokenizer_name` is kept as a label (a folder is known by its last part).
    `texts` and `fetch`: see `corpus_sources.read_text`. Raises UsageError for a text that is missing, altered or too
    short (with the tokens it has and needs), and for a BOS that the tokenizer does not have.
    """
    bos_id, bos = _settle_bos(manifest.bos, tokenizer)
    chosen = list(_chosen(manifest))
    segments: list[Segment] = []
    sources: list[Source] = []
    for done, (document, spec) in enumerate(chosen, start=1):
        text = read_text(spec, folder=manifest.folder, texts=texts, fetch=fetch)
        sources.append(_source(document, spec, text))
        ids = _encode_start(tokenizer, text, manifest.cut.depths[-1] + manifest.cut.decode_rows + 1)
        try:
            segments += cut_document(ids, document, spec.kind, manifest.cut, bos_id)
        except UsageError as error:
            raise UsageError(f"{sources[-1].origin}: {error}") from error
        if progress is not None:
            progress(done, len(chosen))
    tokenizer_sha256, vocab_size, pieces = tokenizer_facts(tokenizer)
    return seal(
        Corpus(
            name=manifest.name,
            version=manifest.version,
            tokenizer=Path(tokenizer_name).name if Path(tokenizer_name).is_dir() else tokenizer_name,
            tokenizer_sha256=tokenizer_sha256,
            vocab_size=vocab_size,
            bos=bos,
            smoke=manifest.smoke,
            segments=tuple(segments),
            sources=tuple(sources),
            pieces=pieces,
        )
    )


def cut_document(
    token_ids: NDArray[np.int32], document: str, kind: str, cut: Cut, bos_id: int | None = None
) -> tuple[Segment, ...]:
    """One segment per depth with the same decode tokens: the context is cut from the left, so depth is not text.

    A segment has depth + decode_rows + 1 ids, a BOS included. Raises UsageError if the document is too short.
    """
    deepest, first = cut.depths[-1], bos_id is not None
    end = deepest + cut.decode_rows + 1 - first
    if len(token_ids) < end:
        raise UsageError(
            f"the text has {len(token_ids):,} tokens and needs {end:,} for depth {deepest:,} and {cut.decode_rows} "
            "decode positions; give a longer one or lower the depths"
        )
    begin = np.array([bos_id] if first else [], np.int32)
    segments = []
    for depth in cut.depths:
        ids = np.concatenate([begin, token_ids[deepest - depth : end]]).astype(np.int32)
        ids.setflags(write=False)
        stop = depth + (cut.decode_rows if depth in cut.both_phases_at else 0)
        start = depth - cut.prefill_rows
        segments.append(
            Segment(
                id=f"{document}-d{depth}", document=document, kind=kind, depth=depth, token_ids=ids, decode_from=depth,
                windows=((start, stop),) if stop > start else (),
            )
        )  # fmt: skip
    return tuple(segments)


def check_fits(corpus: Corpus, *, max_positions: int, vocab_size: int, tokenizer_sha256: str | None) -> None:
    """Raise UsageError unless a model can be fed this corpus.

    `max_positions` is the model's context, `vocab_size` the rows of its embedding; `tokenizer_sha256` is the model's
    own, None where it is not known (then only the range of ids is checked).
    """
    if tokenizer_sha256 is not None and tokenizer_sha256 != corpus.tokenizer_sha256:
        raise UsageError(
            f"corpus {corpus.name!r} was tokenised by {corpus.tokenizer} ({corpus.tokenizer_sha256[:12]}), the model's "
            f"tokenizer is another one ({tokenizer_sha256[:12]}): build the corpus with --model set to this model"
        )
    longest = max(corpus.segments, key=lambda segment: len(segment.token_ids))
    if len(longest.token_ids) > max_positions:
        count = sum(len(segment.token_ids) > max_positions for segment in corpus.segments)
        raise UsageError(
            f"the model's context is {max_positions:,} tokens; {count} of {len(corpus.segments)} segments of corpus "
            f"{corpus.name!r} are longer, {longest.id} has {len(longest.token_ids):,}: use a smaller corpus"
        )
    highest = max(int(segment.token_ids.max()) for segment in corpus.segments)
    if highest >= vocab_size:
        raise UsageError(
            f"corpus {corpus.name!r} has token id {highest:,}, the model only knows ids below {vocab_size:,}: it was "
            f"tokenised for another model ({corpus.tokenizer})"
        )


def seal(corpus: Corpus) -> Corpus:
    """The corpus with its sha256. Raises UsageError for segments that no recording could hold."""
    _check_segments(corpus)
    return dataclasses.replace(corpus, sha256=_identity(corpus))


# --------------------------------------------------------------------------- tokenizers


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model folder or hub id. A folder never touches the network. Raises UsageError without one."""
    from transformers import AutoTokenizer

    folder = Path(model).expanduser()
    local = {"local_files_only": True} if folder.is_dir() else {}
    try:
        return AutoTokenizer.from_pretrained(str(folder) if local else model, **local)
    except Exception as error:  # transformers raises whatever the parser of the day does
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"cannot load a tokenizer for {model!r}: {reason}; expected a model folder with tokenizer files or a hub id"
        ) from error


def tokenizer_facts(tokenizer: Any) -> tuple[str, int, tuple[str, ...]]:
    """Its sha256, the number of ids it knows (highest + 1), and the text of every id with its leading space kept.

    The hash covers the serialised form without truncation and padding, which are state, not tokenizer; for one without
    a serialised form, its class and vocabulary. A piece is "" for an id that has no text.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        form: Any = {"class": type(tokenizer).__name__, "vocabulary": vocabulary}
    else:
        form = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
    size = max(vocabulary.values()) + 1
    # decoders drop a leading space at the start of a text: decode each id behind an anchor, then take that off
    anchor = tokenizer.encode("a", add_special_tokens=False)
    prefix = len(tokenizer.decode(anchor, clean_up_tokenization_spaces=False))
    known = sorted(vocabulary.values())
    decoded = tokenizer.batch_decode([[*anchor, i] for i in known], clean_up_tokenization_spaces=False)
    text = dict(zip(known, (piece[prefix:] for piece in decoded), strict=True))
    return _sha256_json(form), size, tuple(text.get(i, "") for i in range(size))


# --------------------------------------------------------------------------- the file


def save_corpus(corpus: Corpus, path: Path) -> None:
    """Write the corpus as one Parquet file, atomically. Raises StorageError if it cannot be written."""
    keep = {field.name for field in dataclasses.fields(Corpus)} - {"segments", "pieces", "sources"}
    facts = {name: getattr(corpus, name) for name in keep}
    facts |= {"schema_version": SCHEMA_VERSION, "sources": [dataclasses.asdict(source) for source in corpus.sources]}
    metadata = {_METADATA: _json(facts), _PIECES: base64.b64encode(zlib.compress(_json(corpus.pieces), 6))}
    columns = {
        "windows": [[{"start": a, "stop": b} for a, b in segment.windows] for segment in corpus.segments],
        **{name: [getattr(s, name) for s in corpus.segments] for name in _COLUMNS if name != "windows"},
    }
    schema = pa.schema(list(_COLUMNS.items()), metadata=metadata)
    try:
        with atomic_file(path) as file:
            pq.write_table(pa.table(columns, schema=schema), file, compression="zstd")
    except OSError as error:
        raise StorageError(f"cannot write the corpus {path}: {error}") from error


def load_corpus(path: Path) -> Corpus:
    """Read a corpus file. Raises StorageError if it is missing, truncated, altered, newer, or not a corpus."""
    if not os.path.isfile(path):  # unlike Path.is_file, false for a name that is too long
        raise StorageError(f"there is no corpus file {path}: build one with `logitgate corpus build`")
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{path} is not a readable Parquet file: {error}; build the corpus again") from error
    metadata = table.schema.metadata or {}
    if _METADATA not in metadata:
        raise StorageError(f"{path} is a Parquet file, but not a corpus: build one with `logitgate corpus build`")
    try:
        facts = json.loads(metadata[_METADATA])
        if facts.pop("schema_version") > SCHEMA_VERSION:
            raise StorageError(f"{path} was written by a newer logitgate: update this one")
        facts["sources"] = tuple(Source(**source) for source in facts["sources"])
        pieces = tuple(json.loads(zlib.decompress(base64.b64decode(metadata.get(_PIECES, b"")))))
        corpus = Corpus(**facts, segments=tuple(_segments(table)), pieces=pieces)
        _check_segments(corpus)
        identity = _identity(corpus)
    except (KeyError, TypeError, ValueError, zlib.error, UsageError) as error:
        raise StorageError(f"{path} is a damaged corpus: {error}; build it again") from error
    if identity != corpus.sha256:
        raise StorageError(
            f"{path} was altered: its content hashes to {identity[:12]}, it says {corpus.sha256[:12]}; build it again"
        )
    return corpus


def _segments(table: Any) -> Iterator[Segment]:
    plain = table.select([name for name in _COLUMNS if name != "token_ids"]).to_pylist()
    for row, ids in zip(plain, table["token_ids"], strict=True):
        token_ids = np.array(ids.values, dtype=np.int32)
        token_ids.setflags(write=False)
        windows = tuple((w["start"], w["stop"]) for w in row.pop("windows"))
        yield Segment(**row, token_ids=token_ids, windows=windows)


def _identity(corpus: Corpus) -> str:
    """Sha256 over all that decides the rows and how a verdict on them is worded."""
    facts = ("name", "version", "tokenizer_sha256", "vocab_size", "bos", "smoke", "sampling")
    fields = ("id", "document", "kind", "depth", "decode_from", "windows")
    content = {
        **{name: getattr(corpus, name) for name in facts},
        "segments": [
            {**{name: getattr(s, name) for name in fields}, "token_ids": s.token_ids.tolist()} for s in corpus.segments
        ],
    }
    return _sha256_json(content)


def _json(value: object) -> bytes:
    """Canonical JSON: keys sorted, ASCII only (lone surrogates survive as escapes), no NaN."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def _sha256_json(value: object) -> str:
    return hashlib.sha256(_json(value)).hexdigest()


# --------------------------------------------------------------------------- details


def _check_segments(corpus: Corpus) -> None:
    ids = [segment.id for segment in corpus.segments]
    if not ids or len(set(ids)) != len(ids):
        raise UsageError(f"corpus {corpus.name!r} has no segments, or two of one id")
    for s in corpus.segments:
        for name in (s.id, s.document, s.kind):
            if not PLAIN_NAME.fullmatch(name):
                raise UsageError(f"{name!r} cannot name a segment, document or kind: letters, digits and . _ + - only")
        length = len(s.token_ids)
        if length < 2 or not 1 <= s.decode_from < length:
            raise UsageError(f"segment {s.id}: decode_from {s.decode_from} does not lie within 1 .. {length - 1}")
        edges = [edge for window in s.windows for edge in window]
        increasing = all(a < b for a, b in s.windows) and edges == sorted(edges)
        if edges and not (increasing and edges[0] >= 0 and edges[-1] < length):
            raise UsageError(f"segment {s.id}: windows {s.windows} are not disjoint, ascending and below {length - 1}")
        if int(s.token_ids.min()) < 0 or int(s.token_ids.max()) >= corpus.vocab_size:
            raise UsageError(f"segment {s.id} has a token id outside 0 .. {corpus.vocab_size - 1}")


def _chosen(manifest: CorpusManifest) -> Iterator[tuple[str, SourceSpec]]:
    """The first `documents` sources of each kind, in the manifest's order, with their names."""
    seen: dict[str, int] = {}
    for source in manifest.sources:
        number = seen[source.kind] = seen.get(source.kind, 0) + 1
        if number <= manifest.cut.documents:
            yield f"{source.kind}-{number:02d}", source


def _source(document: str, spec: SourceSpec, text: str) -> Source:
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return Source(document=document, origin=" + ".join(spec.origins), licence=spec.licence, sha256=digest)


def _encode_start(tokenizer: Any, text: str, tokens: int) -> NDArray[np.int32]:
    """At least the first `tokens` ids of the text, without special ids; all of them if there are fewer.

    Long texts are encoded only as far as needed: the ids before the cut do not depend on what follows it, but for the
    last few, of which enough are to spare.
    """
    spare, characters = 64, tokens * _CHARACTERS_PER_TOKEN
    while True:
        ids: Sequence[int] = tokenizer.encode(text[:characters], add_special_tokens=False, verbose=False)
        if len(ids) >= tokens + spare or characters >= len(text):
            return np.array(ids, dtype=np.int32)
        characters *= 2


def _settle_bos(bos: Bos, tokenizer: Any) -> tuple[int | None, str]:
    """The id to put before each segment, if any, and the statement that goes into the corpus."""
    own = tokenizer.bos_token_id
    plain = tokenizer.encode("a", add_special_tokens=True)
    adds = own is not None and plain[:1] == [own] and tokenizer.encode("a", add_special_tokens=False)[:1] != [own]
    if bos == "none" or (bos == "tokenizer" and not adds):
        habit = f"the tokenizer by itself adds id {own}" if adds else "nor does the tokenizer by itself"
        return None, f"none: no id is put before a segment; {habit}"
    if own is None:
        raise UsageError('the manifest says bos = "first", and the tokenizer has no BOS id: say bos = "none"')
    habit = "as the tokenizer does by itself" if adds else "which the tokenizer by itself does not"
    return int(own), f"first: id {own} is put before each segment, {habit}"
