"""Which recordings may be held against each other, and their rows under checks: everything that is refused.

Shape legend: P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import MismatchError, StorageError
from harness.evidence import RowSource, log_softmax
from harness.metrics import decode
from harness.storage import Recording
from harness.types import Block, Finding, Level, Manifest, Phase, Segment, Side

PADDING_MASS = 1e-6
"""Probability from which columns beyond the reference's vocabulary take part in the softmax."""


@dataclass(slots=True, kw_only=True)
class Held:
    """One recording in a comparison: its rows are read through here, checked, and cut to the reference's columns."""

    role: str  # "reference", "candidate", ...: names it in messages
    side: Side
    recording: Recording
    width: int  # columns of the reference
    padding_mass: float = field(default=0.0)  # the most probability any row read so far has beyond them

    def read(self, segment: Segment, phase: Phase, indices: NDArray[np.int64]) -> Block:
        """The rows as recorded. Raises MismatchError if they are not exactly the corpus's, index and target."""
        block = self.recording.read(segment.id, phase, indices)
        if not np.array_equal(block.indices, indices):
            absent = np.setdiff1d(indices, block.indices)
            where = place(segment.id, phase, int(absent[0]) if len(absent) else int(block.indices[0]))
            raise MismatchError(
                f"the {self.role} {self.side.path} lacks {len(absent)} rows it should have, "
                f"first {where}: record it again"
            )
        expected = segment.targets(indices)
        wrong = np.flatnonzero(block.targets != expected)
        if len(wrong):
            at = int(wrong[0])
            raise MismatchError(
                f"other tokens: the {self.role} {self.side.path} was forced to {int(block.targets[at])} at "
                f"{place(segment.id, phase, int(indices[at]))}, the corpus has {int(expected[at])} "
                f"({len(wrong)} of {len(indices)} rows differ there): record it again from the corpus's ids"
            )
        return block

    def cut(self, logits_pv: NDArray[Any]) -> NDArray[Any]:
        """Raw rows without the columns that the reference does not have; their probability is kept in mind."""
        if logits_pv.shape[1] == self.width:
            return logits_pv
        mass = np.exp(log_softmax(decode(logits_pv, self.side.manifest.logits_dtype))[:, self.width :]).sum(axis=1)
        self.padding_mass = max(self.padding_mass, float(np.max(mass[np.isfinite(mass)], initial=0.0)))
        return np.ascontiguousarray(logits_pv[:, : self.width])

    def rows(self, phase: Phase | None = None) -> RowSource:
        """Rows on demand for diagnosis, always of `phase` if given (for a recording held against itself)."""

        def read(segment: str, asked: Phase, indices: NDArray[np.int64]) -> NDArray[Any]:
            return self.cut(self.recording.read(segment, phase or asked, indices).logits)

        return RowSource(dtype=self.side.manifest.logits_dtype, read=read)

    def padding(self) -> tuple[list[Finding], list[str]]:
        """What became of columns beyond the reference's vocabulary: findings and notes."""
        extra = self.side.manifest.vocab_size - self.width
        if extra == 0:
            return [], []
        columns = f"the {self.role}'s rows have {extra} columns beyond the reference's {self.width}"
        if self.padding_mass <= PADDING_MASS:
            return [], [f"{columns}; they hold at most {self.padding_mass:.1g} of the probability and were cut"]
        message = (
            f"vocabulary padding joins the softmax: {columns} and up to {self.padding_mass:.2g} of a row's probability "
            "is on them: the engine must mask or drop ids that no token has"
        )
        return [Finding(code="vocabulary-padding", message=message, fatal=False)], []


def open_held(path: Path, role: str, reference: Held | None = None) -> Held:
    """Open a recording and refuse what cannot be compared, before any row is read.

    Raises StorageError if it cannot be read, is incomplete, or its instrument check failed; MismatchError if it does
    not hold whole rows or does not go with the reference.
    """
    recording = Recording(path)
    side = Side(path=str(path), manifest=recording.manifest)
    _refuse_unusable(side, role)
    if reference is not None:
        _refuse_mismatch(reference.side, side, role)
    width = reference.width if reference else side.manifest.vocab_size
    return Held(role=role, side=side, recording=recording, width=width)


def pair_notes(reference: Side, candidate: Side, others: Sequence[Held]) -> list[str]:
    """What a reader should know about the pair although it can be compared."""
    notes = []
    a, b = reference.manifest.build, candidate.manifest.build
    if reference.manifest.logits_dtype not in ("float32", "float64"):
        notes.append(
            f"the reference was computed in {reference.manifest.logits_dtype}: its own rounding is counted as the "
            "candidate's; use an f32 reference for a yardstick"
        )
    if a.weights_sha256 and b.weights_sha256 and a.weights_sha256 != b.weights_sha256:
        notes.append(
            f"other weights: the reference's are {a.weights_sha256[:12]} ({a.model}), the candidate's "
            f"{b.weights_sha256[:12]} ({b.model}): what the weights differ by is part of every number"
        )
    for role, side in (("reference", reference), *((h.role, h.side) for h in others)):
        if side.manifest.id == candidate.manifest.id:
            notes.append(f"the candidate's rows are bit-identical to those of the {role} {side.path}")
    return notes


def place(segment: str, phase: Phase, index: int) -> str:
    """How messages name a row."""
    return f"{segment} {phase} index {index}"


def _refuse_unusable(side: Side, role: str) -> None:
    manifest = side.manifest
    if not manifest.complete:
        raise StorageError(_incomplete(side.path, role, manifest))
    check = manifest.instrument
    if check is not None and not check.passed:
        raise StorageError(
            f"the {role} {side.path} is invalid: its captured rows differ from the engine's own log-probs by "
            f"{check.max_error:.3g} nat (allowed {check.limit:.0e}; {check.rows} rows checked"
            f"{'; ' + check.detail if check.detail else ''}): record it again"
        )
    if manifest.level is not Level.FULL:
        raise MismatchError(
            f"the {role} {side.path} was recorded at level {manifest.level}: comparing needs whole rows; "
            f"record it at level {Level.FULL}"
        )


def _refuse_mismatch(reference: Side, other: Side, role: str) -> None:
    a, b = reference.manifest, other.manifest
    if a.tokenizer_sha256 != b.tokenizer_sha256:
        raise MismatchError(
            f"other tokenizer: the reference {reference.path} has {a.tokenizer_sha256[:12]}, the {role} {other.path} "
            f"has {b.tokenizer_sha256[:12]}: the same ids would mean other text; record both with one tokenizer"
        )
    if a.corpus_sha256 != b.corpus_sha256:
        raise MismatchError(
            f"other corpus: the reference {reference.path} was recorded on {a.corpus_name} {a.corpus_sha256[:12]}, the "
            f"{role} {other.path} on {b.corpus_name} {b.corpus_sha256[:12]}: record both from the same corpus file"
        )
    if b.vocab_size < a.vocab_size:
        raise MismatchError(
            f"other vocabulary: rows of the reference {reference.path} have {a.vocab_size} columns, those of the "
            f"{role} {other.path} only {b.vocab_size}: a part of the vocabulary was not captured, "
            "or the model is another one"
        )


def _incomplete(path: str, role: str, manifest: Manifest) -> str:
    missing = manifest.rows_expected - manifest.rows_written
    gaps = [f"{g.rows} {g.phase} rows of {g.segment} ({g.reason})" for g in manifest.gaps]
    more = f" and {len(gaps) - 3} more gaps" if len(gaps) > 3 else ""
    named = f": {'; '.join(gaps[:3])}{more}" if gaps else ""
    return (
        f"the {role} {path} is incomplete: {manifest.rows_written} of {manifest.rows_expected} expected rows are "
        f"there, {missing} are missing{named}: resume the recording, or make it again"
    )
