"""Single rows of a recording, for people to look at: the likeliest ids with their text, and the id that came next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.errors import StorageError, UsageError
from harness.evidence import log_softmax
from harness.metrics import decode
from harness.storage import Recording
from harness.types import Phase, Segment
from harness.worst import CONTEXT_TOKENS, TopId, token_text

SEGMENTS_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One recorded row. NaN where the row has NaN or +inf. Texts are as in the corpus, hostile or not: escape them."""

    segment: str
    kind: str
    depth: int
    phase: Phase
    index: int
    step: int  # decode step; -1 in prefill
    lse: float  # nats, log-sum-exp of the logits
    margin: float  # top logit minus the second
    context: str  # the tokens up to and including `index`, at most 48
    target: int  # the id that comes next in the text
    target_text: str
    target_logprob: float  # nats
    target_rank: int  # 1 for the likeliest; ids that are equally likely share the best rank
    top: tuple[TopId, ...]  # most likely first, the lower id first among equals


def read_rows(
    recording: Recording, segment_id: str, indices: Sequence[int], phase: Phase | None = None, *, top: int
) -> tuple[Row, ...]:
    """The given rows of one segment; of both phases where both scored an index and none was named.

    Raises UsageError for a segment the corpus does not have and for an index it does not score, StorageError for a row
    that an incomplete recording lacks.
    """
    segment = _segment(recording, segment_id)
    wanted = np.unique(np.asarray(indices, np.int64))
    phases = [phase] if phase is not None else list(Phase)
    found: list[Row] = []
    there = np.empty(0, np.int64)
    for one in phases:
        here = np.intersect1d(wanted, recording.indices(segment.id, one))
        there = np.union1d(there, here)
        if len(here):
            found += _rows(recording, segment, one, here, top)
    _require_all(recording, segment, phases, np.setdiff1d(wanted, there))
    return tuple(found)


def _segment(recording: Recording, segment_id: str) -> Segment:
    try:
        return recording.corpus.segment(segment_id)
    except KeyError:
        names = [segment.id for segment in recording.corpus.segments]
        known = ", ".join(names[:SEGMENTS_NAMED])
        known += f" and {len(names) - SEGMENTS_NAMED} more" if len(names) > SEGMENTS_NAMED else ""
        raise UsageError(f"{recording.folder} has no segment {segment_id!r}: expected one of {known}") from None


def _require_all(recording: Recording, segment: Segment, phases: Sequence[Phase], missing: NDArray[np.int64]) -> None:
    for index in missing.tolist():
        if any(index in segment.indices(phase) for phase in phases):
            raise StorageError(
                f"{recording.folder} is incomplete: row {index} of {segment.id} is scored and not there; resume it"
            )
        scored = "; ".join(f"{phase} {_ranges(segment.indices(phase))}" for phase in phases)
        raise UsageError(f"row {index} of {segment.id} is not scored: expected {scored}")


def _ranges(indices: NDArray[np.int64]) -> str:
    if not len(indices):
        return "nothing"
    runs = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
    return ", ".join(f"{run[0]} to {run[-1]}" for run in runs)


def _rows(recording: Recording, segment: Segment, phase: Phase, indices: NDArray[np.int64], top: int) -> Iterator[Row]:
    corpus, dtype = recording.corpus, recording.manifest.logits_dtype
    block = recording.read(segment.id, phase, indices)
    for index, target, raw_v in zip(block.indices.tolist(), block.targets.tolist(), block.logits, strict=True):
        logits_v = np.asarray(decode(raw_v, dtype), np.float64)
        logprobs_v = log_softmax(logits_v)
        order = np.argsort(-logits_v, kind="stable")[: max(top, 2)]  # NaN sorts last
        best = logits_v[order]
        yield Row(
            segment=segment.id,
            kind=segment.kind,
            depth=segment.depth,
            phase=phase,
            index=index,
            step=index - segment.decode_from if phase is Phase.DECODE else -1,
            lse=float(best[0] - logprobs_v[order[0]]),
            margin=float(best[0] - best[1]) if len(best) > 1 else float("nan"),
            context="".join(token_text(corpus, int(i)) for i in segment.token_ids[: index + 1][-CONTEXT_TOKENS:]),
            target=target,
            target_text=token_text(corpus, target),
            target_logprob=float(logprobs_v[target]),
            target_rank=int((logits_v > logits_v[target]).sum()) + 1,
            top=tuple(
                TopId(id=int(i), text=token_text(corpus, int(i)), logprob=float(logprobs_v[i])) for i in order[:top]
            ),
        )
