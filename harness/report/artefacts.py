"""What an artefact is, as facts (JSON-ready) and as plain text: corpora, recordings, positions, verdicts, patches."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import StorageError
from harness.report.visible import visible
from harness.types import Corpus, Manifest, Phase

if TYPE_CHECKING:
    from harness.patching import LoadedPatch

Facts = dict[str, Any]

_OURS = "a recording's folder, a corpus or positions (Parquet), or a verdict (JSON of `compare --json`)"


def facts(path: Path) -> Facts:
    """Describe a recording's folder, a corpus, saved positions or a saved verdict. Raises StorageError for others."""
    if not os.path.exists(path):  # unlike Path.exists, false for a name that is too long
        raise StorageError(f"{path} does not exist: expected {_OURS}")
    if path.is_dir():
        from harness.storage import Recording

        return recording_facts(path, Recording(path).manifest)
    if not path.is_file():
        raise StorageError(f"{path} is no ordinary file: expected {_OURS}")
    with path.open("rb") as file:
        start = file.read(64).lstrip()
    if start.startswith(b"PAR1"):
        return _parquet_facts(path)
    if start.startswith(b"{"):
        from harness.report.saved import verdict_facts

        return verdict_facts(path)
    raise StorageError(f"{path} is none of logitgate's: expected {_OURS}")


def _parquet_facts(path: Path) -> Facts:
    from harness.corpus import load_corpus
    from harness.report.saved import positions_facts
    from harness.storage import column_names, load_positions

    names = set(column_names(path))
    if names >= {"digest", "logits"}:
        raise StorageError(f"{path} is one part of a recording: show its folder, {path.parent}")
    if names >= {"segment", "phase", "index", "kind", "depth", "kl20", "flip"}:
        return positions_facts(path, load_positions(path))
    return corpus_facts(path, load_corpus(path))


def corpus_facts(path: Path, corpus: Corpus) -> Facts:
    """What a corpus holds. Rows are scored positions; the sum over cells is `rows`."""
    rows: Counter[str] = Counter()
    segments: Counter[str] = Counter()
    for segment in corpus.segments:
        segments[f"{segment.kind}, depth {segment.depth}"] += 1
        for phase in Phase:
            rows[f"{segment.kind}, depth {segment.depth}, {phase}"] += len(segment.indices(phase))
    return {
        "artefact": "corpus",
        "path": str(path),
        "name": corpus.name,
        "version": corpus.version,
        "sha256": corpus.sha256,
        "tokenizer": corpus.tokenizer,
        "vocab_size": corpus.vocab_size,
        "bos": corpus.bos,
        "smoke": corpus.smoke,
        "segments": dict(segments),
        "rows": dict(rows),
        "rows_in_all": corpus.rows,
        "documents": {source.document: f"{source.origin} ({source.licence})" for source in corpus.sources},
        "sampling": dict(corpus.sampling) if corpus.sampling is not None else None,
    }


def recording_facts(path: Path, manifest: Manifest) -> Facts:
    """What a recording is, from its manifest alone."""
    build, check = manifest.build, manifest.instrument
    return {
        "artefact": "recording",
        "path": str(path),
        "id": manifest.id,
        "complete": manifest.complete,
        "rows": f"{manifest.rows_written} of {manifest.rows_expected}",
        "gaps": [f"{g.segment} {g.phase}: {g.rows} rows, {g.reason}" for g in manifest.gaps],
        "corpus": f"{manifest.corpus_name} {manifest.corpus_sha256}",
        "logits": f"{manifest.logits_dtype} x {manifest.vocab_size}, level {manifest.level}",
        "engine": f"{build.engine} {build.engine_version}",
        "model": build.model,
        "dtype": build.dtype,
        "device": build.device,
        "patches": [f"{p.get('name', 'unnamed')} ({p.get('kind', 'of no kind')})" for p in build.patches],
        "requested": dict(build.requested),
        "instrument": None if check is None else _check_line(check.passed, check.rows, check.max_error, check.limit),
        "own_error": dict(manifest.own_error) if manifest.own_error is not None else None,
        "seconds": manifest.seconds,
        "created": manifest.created,
    }


def patch_facts(loaded: LoadedPatch) -> Facts:
    """What a patch says of itself, and the hash of its file."""
    patch = loaded.patch
    return {
        "name": patch.name,
        "kind": patch.kind,
        "site": patch.site,
        "phase": patch.phase,
        "severity": patch.severity,
        "summary": patch.summary,
        "shows": patch.shows,
        "source": patch.source,
        "parameters": dict(patch.parameters),
        "engine": dict(patch.engine),
        "environment": dict(patch.environment),
        "requests": dict(patch.requests),
        "file": str(loaded.path),
        "sha256": loaded.sha256,
    }


def corpus_line(path: Path, corpus: Corpus) -> str:
    """One line about a corpus that was just written."""
    return f"{path}: corpus {corpus.name}, {len(corpus.segments)} segments, {corpus.rows} rows, {corpus.sha256[:12]}"


def recording_line(path: Path, manifest: Manifest) -> str:
    """One line about a recording that was just made."""
    state = "complete" if manifest.complete else f"INCOMPLETE, {len(manifest.gaps)} gaps"
    check = manifest.instrument
    checked = f", instrument check {'passed' if check.passed else 'FAILED'}" if check else ""
    seconds = f" in {manifest.seconds:.0f} s" if manifest.seconds is not None else ""
    rows = f"{manifest.rows_written} of {manifest.rows_expected} rows"
    return f"{path}: {rows}{seconds}, {state}{checked}, {manifest.id[:12]}"


def as_text(found: Mapping[str, Any]) -> str:
    """Facts as aligned lines; what is empty is left out, lists and objects go below their name."""
    width = max(len(name) for name in found)
    lines: list[str] = []
    for name, value in found.items():
        if value is None or value == "" or (isinstance(value, (list, dict)) and not value):
            continue
        entries = [f"{k}: {v}" for k, v in value.items()] if isinstance(value, dict) else value
        shown = entries if isinstance(entries, list) else [str(entries)]
        label = name.replace("_", " ")
        lines += [f"{label if i == 0 else '':<{width}}  {visible(str(entry))}" for i, entry in enumerate(shown)]
    return "\n".join(lines)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text columns, as wide as their widest entry; the last one is not padded."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    return "\n".join(
        "  ".join(visible(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    )


def _check_line(passed: bool, rows: int, max_error: float, limit: float) -> str:
    return f"{'passed' if passed else 'FAILED'} on {rows} rows: largest error {max_error:.1e} nat, limit {limit:.0e}"
