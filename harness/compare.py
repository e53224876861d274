"""Hold a recording against the reference, position by position, and return columns.

Rows are streamed in the corpus's order, a bounded number of bytes at a time, so memory does not grow with the corpus.
KL is KL(reference || candidate) throughout; with a baseline there are also columns of KL(baseline || candidate).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.alignment import misplaced
from harness.distortion import distorted
from harness.errors import MismatchError
from harness.metrics import position_metrics
from harness.pairing import Held, open_held, pair_notes, place
from harness.types import ITEM_BYTES, Block, Build, Columns, Comparison, Finding, Phase, Segment

PLACE_COLUMNS = (
    "segment",
    "document",
    "kind",
    "depth",
    "phase",
    "index",
    "target",
    "step",
    "chunk_distance",
    "block_distance",
    "batch_size",
    "cached_tokens",
)
"""Where a position is. Strings are numpy `str` arrays. `step`: decode step from 0, -1 in prefill. `chunk_distance`:
index minus the first index of its scheduled chunk, -1 if unknown. `block_distance`: index modulo the candidate's KV
block size (16 if unknown). `batch_size`: requests in the engine's step, `cached_tokens`: tokens of
the request taken from the prefix cache, both -1 if unknown."""

BASELINE_COLUMNS = ("baseline_kl20", "baseline_kl_full", "baseline_flip")
"""KL(baseline || candidate) and whether their top ids differ: among the positions when a baseline was given."""

REFERENCE_PHASE = "reference_phase"
"""Among the positions of `compare_self`: the phase whose rows stand for the reference."""

BLOCK_BYTES = 64_000_000  # raw rows of reference and candidate held at once
DEFAULT_KV_BLOCK = 16

Progress = Callable[[int, int], None]
"""Called with the positions done and the positions in all."""

_Gathered = list[dict[str, NDArray[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Positions of one segment, and the phases whose rows are held against each other there."""

    segment: Segment
    phase: Phase
    reference_phase: Phase
    indices: NDArray[np.int64]


def compare(
    reference: Path,
    candidate: Path,
    *,
    floor: Path | None = None,
    spread: Sequence[Path] = (),
    baseline: Path | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare a candidate, and what else is given, with the reference at every position of their corpus.

    Raises StorageError for a recording that is unreadable, incomplete or invalid, and MismatchError for another
    corpus, tokenizer or vocabulary, for rows that are not the corpus's, for NaN in any recording but the candidate,
    and for a floor, spread recording or baseline whose rows are misplaced or distorted. Such findings about the
    candidate, and NaN in it, are kept in the result for the judge.
    """
    started = time.monotonic()
    ground = open_held(reference, "reference")
    judged = open_held(candidate, "candidate", ground)
    normal = open_held(floor, "floor", ground) if floor else None
    before = open_held(baseline, "baseline", ground) if baseline else None
    others = [open_held(path, "spread recording", ground) for path in spread]
    helps = [held for held in (normal, before, *others) if held]
    corpus = ground.recording.corpus
    stretches = [
        _Stretch(segment=segment, phase=phase, reference_phase=phase, indices=segment.indices(phase))
        for segment in corpus.segments
        for phase in Phase
    ]
    places, metrics = _stream(stretches, ground, [judged, *helps], before, progress)
    positions = places | metrics[0]
    findings, notes = judged.padding()
    findings = _diagnose(positions, ground, judged) + findings
    by_held = dict(zip(map(id, helps), metrics[1:], strict=True))
    for held in helps:
        _refuse_unfit(places | by_held[id(held)], ground, held)
    return Comparison(
        reference=ground.side,
        candidate=judged.side,
        positions=positions,
        floor_side=normal.side if normal else None,
        floor=by_held[id(normal)] if normal else None,
        spread={held.side.path: by_held[id(held)] for held in others},
        baseline_side=before.side if before else None,
        baseline=by_held[id(before)] if before else None,
        findings=tuple(findings),
        notes=(*notes, *pair_notes(ground.side, judged.side, helps)),
        smoke=corpus.smoke,
        seconds=time.monotonic() - started,
    )


def compare_self(recording: Path, *, floor: Path | None = None, progress: Progress | None = None) -> Comparison:
    """Hold a recording's decode rows against its own prefill rows, at every index that is scored in both phases.

    The prefill rows stand for the reference: KL(prefill || decode). State and cache faults show without any other
    recording. `floor` is the recording of an accepted build over the same corpus; its own decode rows against its own
    prefill rows are what is normal. Both rows are the candidate's: NaN in either is counted by `nan_candidate`. Raises
    as `compare`, and MismatchError if no index is scored in both phases.
    """
    started = time.monotonic()
    judged = open_held(recording, "candidate")
    normal = open_held(floor, "floor", judged) if floor else None
    corpus = judged.recording.corpus
    stretches = [
        _Stretch(
            segment=segment,
            phase=Phase.DECODE,
            reference_phase=Phase.PREFILL,
            indices=np.intersect1d(segment.indices(Phase.PREFILL), segment.indices(Phase.DECODE)),
        )
        for segment in corpus.segments
    ]
    if not any(len(s.indices) for s in stretches):
        raise MismatchError(
            f"{recording}: its corpus {corpus.name} scores no position in both phases, so decode cannot be held "
            f"against prefill: record one whose prefill windows reach past the first decoded index, as `embedded` does"
        )
    places, (metrics,) = _stream(stretches, judged, [judged], None, progress)
    places[REFERENCE_PHASE] = np.full(len(places["index"]), str(Phase.PREFILL))
    metrics["nan_candidate"] = np.maximum(metrics["nan_candidate"], metrics["nonfinite_reference"])
    metrics["nonfinite_reference"] = np.zeros_like(metrics["nonfinite_reference"])
    positions = places | metrics
    floor_metrics = None
    if normal:
        _, (floor_metrics,) = _stream(stretches, normal, [normal], None, None)
        _refuse_unfit(places | floor_metrics, normal, normal, Phase.PREFILL)
    return Comparison(
        reference=judged.side,
        candidate=judged.side,
        positions=positions,
        floor_side=normal.side if normal else None,
        floor=floor_metrics,
        findings=tuple(_diagnose(positions, judged, judged, Phase.PREFILL)),
        notes=("decode rows held against prefill rows of the same recording: KL(prefill || decode)",),
        smoke=corpus.smoke,
        of_itself=True,
        seconds=time.monotonic() - started,
    )


def _stream(
    stretches: Sequence[_Stretch],
    ground: Held,
    held: Sequence[Held],
    baseline: Held | None,
    progress: Progress | None,
) -> tuple[dict[str, NDArray[Any]], list[dict[str, NDArray[Any]]]]:
    """Place columns, and the metric columns of each recording held against the reference; the first is judged."""
    sizes = ITEM_BYTES[ground.side.manifest.logits_dtype] + ITEM_BYTES[held[0].side.manifest.logits_dtype]
    most = max(1, BLOCK_BYTES // (held[0].side.manifest.vocab_size * sizes))
    total, done = sum(len(s.indices) for s in stretches), 0
    places: _Gathered = []
    metrics: list[_Gathered] = [[] for _ in held]
    for stretch in stretches:
        for start in range(0, len(stretch.indices), most):
            indices = stretch.indices[start : start + most]
            truth = ground.read(stretch.segment, stretch.reference_phase, indices)
            judged = held[0].read(stretch.segment, stretch.phase, indices)
            judged_rows = held[0].cut(judged.logits)
            places.append(_places(stretch.segment, judged, held[0].side.manifest.build))
            for one, gathered in zip(held, metrics, strict=True):
                rows = (
                    judged_rows if one is held[0] else one.cut(one.read(stretch.segment, stretch.phase, indices).logits)
                )
                gathered.append(_measure(truth, rows, ground, one))
                if one is baseline:
                    metrics[0][-1] |= _from_baseline(rows, judged_rows, judged, one, held[0])
            done += len(indices)
            if progress is not None:
                progress(done, total)
    return _joined(places), [_joined(gathered) for gathered in metrics]


def _measure(truth: Block, rows: NDArray[Any], ground: Held, held: Held) -> dict[str, NDArray[Any]]:
    """Metric columns of some rows. Raises MismatchError for non-finite values in any recording but the candidate."""
    columns = position_metrics(
        truth.logits, ground.side.manifest.logits_dtype, rows, held.side.manifest.logits_dtype, truth.targets
    )
    if ground.role != "candidate":  # a candidate's own prefill rows: NaN there is for the judge too
        _refuse_nonfinite(columns["nonfinite_reference"], truth, ground)
    if held.role != "candidate":
        _refuse_nonfinite(columns["nan_candidate"], truth, held)
    return dict(columns)


def _refuse_nonfinite(count: NDArray[Any], block: Block, held: Held) -> None:
    bad = np.flatnonzero(count)
    if len(bad):
        first = place(block.segment, block.phase, int(block.indices[bad[0]]))
        raise MismatchError(
            f"the {held.role} {held.side.path} has NaN or infinite logits in {len(bad)} of {len(count)} rows, first at "
            f"{first}: nothing can be judged by it; find out why, and record it again"
        )


def _from_baseline(
    rows: NDArray[Any], judged_rows: NDArray[Any], judged: Block, baseline: Held, candidate: Held
) -> dict[str, NDArray[Any]]:
    columns = position_metrics(
        rows, baseline.side.manifest.logits_dtype, judged_rows, candidate.side.manifest.logits_dtype, judged.targets
    )
    return {name: columns[name.removeprefix("baseline_")] for name in BASELINE_COLUMNS}


def _places(segment: Segment, block: Block, build: Build) -> dict[str, NDArray[Any]]:
    count, index, facts = len(block.indices), block.indices, block.facts
    unknown = np.full(count, -1, np.int32)
    chunk_start = facts.chunk_start if facts else unknown
    return {
        "segment": np.full(count, segment.id),
        "document": np.full(count, segment.document),
        "kind": np.full(count, segment.kind),
        "depth": np.full(count, segment.depth, np.int64),
        "phase": np.full(count, str(block.phase)),
        "index": index,
        "target": block.targets,
        "step": index - segment.decode_from if block.phase is Phase.DECODE else np.full(count, -1, np.int64),
        "chunk_distance": np.where(chunk_start >= 0, index - chunk_start, -1),
        "block_distance": index % _kv_block(build),
        "batch_size": facts.batch_size if facts else unknown,
        "cached_tokens": facts.cached_tokens if facts else unknown,
    }


def _kv_block(build: Build) -> int:
    cache = build.resolved.get("cache_config")
    size = cache.get("block_size") if isinstance(cache, Mapping) else None
    return size if isinstance(size, int) and size > 0 else DEFAULT_KV_BLOCK


def _joined(blocks: _Gathered) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _diagnose(positions: Columns, ground: Held, held: Held, reference_phase: Phase | None = None) -> list[Finding]:
    reference, candidate = ground.rows(reference_phase), held.rows()
    elsewhere = misplaced(positions, reference, candidate)
    changed = distorted(positions, reference, candidate, misplaced=bool(elsewhere))
    return [*elsewhere, *changed]


def _refuse_unfit(positions: Columns, ground: Held, held: Held, reference_phase: Phase | None = None) -> None:
    findings = _diagnose(positions, ground, held, reference_phase) + held.padding()[0]
    if findings:
        raise MismatchError(f"the {held.role} {held.side.path} cannot be used: {findings[0].message}")
