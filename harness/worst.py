"""The positions to look at, with their text and both top lists, which are read again from the recordings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.compare import REFERENCE_PHASE
from harness.evidence import split_groups
from harness.storage import Recording
from harness.types import Comparison, Corpus, Phase

CONTEXT_TOKENS = 48
TOP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TopId:
    """One of a row's most likely ids."""

    id: int
    text: str
    logprob: float  # nats


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionDetail:
    """What a reader needs to see of one position. Texts are as in the corpus, hostile or not: escape them."""

    row: int  # its place in the comparison's columns
    segment: str
    document: str
    kind: str
    depth: int
    phase: Phase
    index: int
    step: int  # decode step; -1 in prefill
    kl20: float
    kl_full: float
    margin: float
    flip: bool
    context: str  # the tokens up to and including `index`, at most 48
    target: int
    target_text: str
    top_reference: tuple[TopId, ...]  # most likely first; ids with NaN last
    top_candidate: tuple[TopId, ...]


def worst_rows(comparison: Comparison, n: int) -> NDArray[np.int64]:
    """Places in the columns of the `n` largest KL20, worst first; NaN is worse than anything. [at most n] int64."""
    kl20 = comparison.positions["kl20"]
    severity = np.where(np.isnan(kl20) | (comparison.positions["nan_candidate"] > 0), np.inf, kl20)
    nan_first = np.lexsort((np.arange(len(kl20)), -severity, ~np.isnan(kl20)))
    return np.asarray(nan_first[:n], np.int64)


def notable_rows(comparison: Comparison, n: int) -> NDArray[np.int64]:
    """Places in the columns of all flips and of the `n` largest KL20, worst first. [at most n + flips] int64."""
    ranked = worst_rows(comparison, len(comparison.positions["kl20"]))
    flipped = np.asarray(comparison.positions["flip"], np.bool_)[ranked]
    return np.asarray(ranked[flipped | (np.arange(len(ranked)) < n)], np.int64)


def worst_positions(comparison: Comparison, n: int) -> tuple[PositionDetail, ...]:
    """Details of the `n` positions with the largest KL20, worst first. Raises as `describe_positions`."""
    return describe_positions(comparison, worst_rows(comparison, n))


def describe_positions(comparison: Comparison, rows: NDArray[np.int64]) -> tuple[PositionDetail, ...]:
    """Details of the given places in the columns, in the given order.

    Their top ids are read again from the two recordings: StorageError if they are gone since the comparison. An id
    without text (the corpus came without pieces, or the vocabulary is padded) is shown as <id>.
    """
    columns = comparison.positions
    reference, candidate = (Recording(Path(s.path), verify=False) for s in (comparison.reference, comparison.candidate))
    corpus, width = reference.corpus, comparison.reference.manifest.vocab_size
    tops: dict[int, tuple[tuple[TopId, ...], tuple[TopId, ...]]] = {}
    for group in split_groups(columns):
        wanted = np.unique(rows[(rows >= group.rows[0]) & (rows <= group.rows[-1])])
        if not len(wanted):
            continue
        at = np.asarray(columns["index"][wanted], np.int64)
        reference_phase = Phase(str(columns.get(REFERENCE_PHASE, columns["phase"])[group.rows[0]]))
        truth = _top(reference, group.segment, reference_phase, at, columns["lse_reference"][wanted], width)
        given = _top(candidate, group.segment, group.phase, at, columns["lse_candidate"][wanted], width)
        tops |= {int(row): pair for row, pair in zip(wanted, zip(truth, given, strict=True), strict=True)}
    return tuple(_detail(comparison, corpus, int(row), *tops[int(row)]) for row in rows)


def _detail(
    comparison: Comparison, corpus: Corpus, row: int, top_reference: tuple[TopId, ...], top_candidate: tuple[TopId, ...]
) -> PositionDetail:
    columns = comparison.positions
    segment = corpus.segment(str(columns["segment"][row]))
    index, target = int(columns["index"][row]), int(columns["target"][row])
    return PositionDetail(
        row=row,
        segment=segment.id,
        document=segment.document,
        kind=segment.kind,
        depth=segment.depth,
        phase=Phase(str(columns["phase"][row])),
        index=index,
        step=int(columns["step"][row]),
        kl20=float(columns["kl20"][row]),
        kl_full=float(columns["kl_full"][row]),
        margin=float(columns["margin"][row]),
        flip=bool(columns["flip"][row]),
        context="".join(token_text(corpus, int(i)) for i in segment.token_ids[: index + 1][-CONTEXT_TOKENS:]),
        target=target,
        target_text=token_text(corpus, target),
        top_reference=top_reference,
        top_candidate=top_candidate,
    )


def _top(
    recording: Recording, segment: str, phase: Phase, at: NDArray[np.int64], lse_p: NDArray[np.float64], width: int
) -> list[tuple[TopId, ...]]:
    """The most likely ids of each row, of those below `width`: what the reference does not have was not compared."""
    corpus = recording.corpus
    ids_pk, logits_pk = recording.tops(segment, phase, at)
    logprobs_pk = logits_pk.astype(np.float64) - lse_p[:, np.newaxis]
    return [
        tuple(
            TopId(id=int(ids[k]), text=token_text(corpus, int(ids[k])), logprob=float(logprobs[k]))
            for k in np.flatnonzero(ids < width)[:TOP]
        )
        for ids, logprobs in zip(ids_pk, logprobs_pk, strict=True)
    ]


def token_text(corpus: Corpus, token: int) -> str:
    """Text of an id; <id> if the corpus came without pieces, or the vocabulary is padded."""
    return corpus.pieces[token] if token < len(corpus.pieces) else f"<{token}>"
