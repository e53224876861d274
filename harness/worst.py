"""The positions to look at, with their text and both top lists: a few rows are read again from the recordings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.compare import REFERENCE_PHASE
from harness.evidence import Array, log_softmax, split_groups
from harness.metrics import decode
from harness.storage import Recording
from harness.types import Comparison, Corpus, LogitsDtype, Phase

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


def worst_positions(comparison: Comparison, n: int) -> tuple[PositionDetail, ...]:
    """Details of the `n` positions with the largest KL20, worst first. Raises as `describe_positions`."""
    return describe_positions(comparison, worst_rows(comparison, n))


def describe_positions(comparison: Comparison, rows: NDArray[np.int64]) -> tuple[PositionDetail, ...]:
    """Details of the given places in the columns, in the given order.

    Reads those rows again from the two recordings: StorageError if they are gone since the comparison. An id without
    text (the corpus came without pieces, or the vocabulary is padded) is shown as <id>.
    """
    columns = comparison.positions
    reference, candidate = (Recording(Path(s.path), verify=False) for s in (comparison.reference, comparison.candidate))
    corpus = reference.corpus
    tops: dict[int, tuple[tuple[TopId, ...], tuple[TopId, ...]]] = {}
    for group in split_groups(columns):
        wanted = np.unique(rows[(rows >= group.rows[0]) & (rows <= group.rows[-1])])
        if not len(wanted):
            continue
        at = np.asarray(columns["index"][wanted], np.int64)
        reference_phase = Phase(str(columns.get(REFERENCE_PHASE, columns["phase"])[group.rows[0]]))
        truth = reference.read(group.segment, reference_phase, at).logits
        given = candidate.read(group.segment, group.phase, at).logits[:, : truth.shape[1]]
        tops |= {
            int(row): (
                _top(corpus, truth[i], comparison.reference.manifest.logits_dtype),
                _top(corpus, given[i], comparison.candidate.manifest.logits_dtype),
            )
            for i, row in enumerate(wanted)
        }
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
        context="".join(_text(corpus, int(i)) for i in segment.token_ids[: index + 1][-CONTEXT_TOKENS:]),
        target=target,
        target_text=_text(corpus, target),
        top_reference=top_reference,
        top_candidate=top_candidate,
    )


def _top(corpus: Corpus, raw_v: Array, dtype: LogitsDtype) -> tuple[TopId, ...]:
    logits = decode(np.ascontiguousarray(raw_v[np.newaxis]), dtype).astype(np.float64)
    logprobs = log_softmax(logits)[0]
    ids = np.argsort(-logits[0], kind="stable")[:TOP]  # ties by lower id, NaN last
    return tuple(TopId(id=int(i), text=_text(corpus, int(i)), logprob=float(logprobs[i])) for i in ids)


def _text(corpus: Corpus, token: int) -> str:
    return corpus.pieces[token] if token < len(corpus.pieces) else f"<{token}>"
