"""All the nouns. Verbs live in the other modules.

Shape legend: P positions, V vocabulary, H hidden size, K kept top ids, L tokens of a segment.
Positions are columns of arrays, never Python objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 1
"""Version of the recording and corpus formats; raised when a reader of the old one would go wrong."""

LogitsDtype = Literal["bfloat16", "float16", "float32", "float64"]

ITEM_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of one logit, by dtype name; its keys are the dtypes a recording may have."""

Json = Mapping[str, Any]
"""A JSON object: string keys; values are str, int, float, bool, None, lists or objects of these."""

Columns = Mapping[str, NDArray[Any]]
"""Per-position columns by name, each [P]."""


class Phase(StrEnum):
    """Which path of the engine made a row."""

    PREFILL = "prefill"
    DECODE = "decode"


class Level(StrEnum):
    """How much of each row a recording keeps."""

    FULL = "full"  # the logits
    HIDDEN = "hidden"  # pre-head states; logits are recomputed offline
    TOPK = "topk"  # the reference's top ids, own top 64, log-sum-exp


class Status(StrEnum):
    """The answer. It has no truth value on purpose: compare it by name."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    def __bool__(self) -> bool:
        raise TypeError(f"a Status has no truth value: write `status is Status.{self.name}`")

    @property
    def exit_code(self) -> int:
        """0 PASS, 1 FAIL, 3 INCONCLUSIVE (2 is wrong usage, 4 could not judge)."""
        return {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}[self.value]


# --------------------------------------------------------------------------- corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Fixed token ids and which of their positions are scored.

    Row `index` is the logits after `token_ids[:index + 1]`; it predicts `token_ids[index + 1]`. The prompt is
    `token_ids[:decode_from]`; the rest is forced. Row `decode_from - 1` comes from the prefill kernel, so decode
    rows are `decode_from .. L - 2`. A window may reach past `decode_from`: those rows are made by a second,
    prefill-only request over the same ids, so that the two phases can be held against each other.
    """

    id: str  # unique in its corpus: "prose-03-d2048"
    document: str  # the text it was cut from; segments of one document share text and are correlated
    kind: str  # "code", "prose", ...
    depth: int  # nominal tokens of context before the first decode row
    token_ids: NDArray[np.int32]  # [L]
    decode_from: int  # first index scored by decode; L - 1 when nothing is decoded
    windows: tuple[tuple[int, int], ...]  # half-open, sorted, disjoint ranges of prefill indices to score

    def indices(self, phase: Phase) -> NDArray[np.int64]:
        """Scored indices of one phase, ascending, [P] int64 (empty if the phase is not scored)."""
        if phase is Phase.DECODE:
            return np.arange(self.decode_from, len(self.token_ids) - 1, dtype=np.int64)
        parts = [np.arange(a, b, dtype=np.int64) for a, b in self.windows]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def targets(self, indices: NDArray[np.int64]) -> NDArray[np.int32]:
        """The ids the given rows predict, [P] int32."""
        return self.token_ids[indices + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a document came from."""

    document: str
    origin: str  # "cpython:json/decoder.py", "pydoc_data.topics:...", a path or a URL
    licence: str
    sha256: str  # of the UTF-8 text


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Fixed texts as token ids. `sha256` is its identity and covers everything that decides the rows."""

    name: str
    version: str
    tokenizer: str  # model folder's name or hub id
    tokenizer_sha256: str  # of the tokenizer's serialised form
    vocab_size: int  # ids the tokenizer knows; a model's logits may be padded beyond it
    bos: str  # how a beginning-of-sequence id was handled, in words
    smoke: bool  # too small for a sign-off: a pass is worded "PASS (smoke)"
    segments: tuple[Segment, ...]
    sources: tuple[Source, ...]
    sampling: Json | None = None  # temperature, top_p, seed of a corpus sampled from the reference
    pieces: tuple[str, ...] = ()  # text of each id, for display only; not part of the identity
    sha256: str = ""

    def segment(self, segment_id: str) -> Segment:
        """The segment of that id. Raises KeyError if there is none."""
        for segment in self.segments:
            if segment.id == segment_id:
                return segment
        raise KeyError(segment_id)

    @property
    def rows(self) -> int:
        """Scored positions over all segments and phases."""
        return sum(len(s.indices(phase)) for s in self.segments for phase in Phase)


# --------------------------------------------------------------------------- recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What made a recording, well enough to make it again."""

    engine: str  # "vllm", "huggingface", or a vendor's name
    engine_version: str
    model: str
    model_revision: str | None
    weights_sha256: str
    dtype: str
    device: str
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    attention: Mapping[str, str] = field(default_factory=dict)  # layer -> backend and its variant
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    requested: Json = field(default_factory=dict)  # engine arguments as given
    resolved: Json = field(default_factory=dict)  # as the engine settled them
    packages: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)  # VLLM_*, thread settings
    host: Json = field(default_factory=dict)  # CPU or GPU, threads, platform
    git: Json | None = None  # commit and dirty flag of the working folder
    patches: tuple[Json, ...] = ()  # name, kind, sha256, parameters of each


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What the engine was doing when it made each row; -1 where unknown."""

    step: NDArray[np.int32]  # [P] engine step since the recording began
    batch_size: NDArray[np.int32]  # [P] requests in that step
    scheduled_tokens: NDArray[np.int32]  # [P] tokens in that step, all requests
    chunk_start: NDArray[np.int32]  # [P] first index of the scheduled chunk the row belongs to
    cached_tokens: NDArray[np.int32]  # [P] tokens of the request taken from the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows of one segment and phase. bf16 has no numpy dtype: its bits are kept as uint16, never converted."""

    segment: str
    phase: Phase
    indices: NDArray[np.int64]  # [P] ascending
    targets: NDArray[np.int32]  # [P]
    logits: NDArray[Any]  # [P, V]: uint16 for bfloat16, else the numpy dtype of that name
    facts: StepFacts | None = None
    hidden: NDArray[Any] | None = None  # [P, H] final-norm states, same convention


@dataclass(frozen=True, slots=True, kw_only=True)
class InstrumentCheck:
    """The engine's own log-prob of the forced token against the captured row's, on a sample of rows."""

    rows: int
    max_error: float  # nat; NaN if no row could be checked
    limit: float  # nat
    passed: bool
    detail: str = ""  # where the largest error was


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of rows."""

    file: str
    rows: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Expected rows that are not there, and why."""

    segment: str
    phase: Phase
    rows: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`recording.json`: everything about a recording but its rows."""

    id: str  # hash of the rows' content alone: independent of parts, order and time
    build: Build
    corpus_name: str
    corpus_sha256: str
    tokenizer_sha256: str
    vocab_size: int  # columns of a row
    logits_dtype: LogitsDtype
    level: Level
    rows_expected: int
    rows_written: int
    complete: bool
    parts: tuple[Part, ...]
    gaps: tuple[Gap, ...] = ()
    instrument: InstrumentCheck | None = None  # None: made by a recorder that has no second opinion
    own_error: Json | None = None  # a reference's error against true f64, on a sample
    seconds: float | None = None  # wall time of the recording, for planning
    created: str = ""  # ISO 8601 UTC
    schema_version: int = SCHEMA_VERSION


# --------------------------------------------------------------------------- comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Stratum:
    """A part of the positions; None means all."""

    phase: Phase | None = None
    kind: str | None = None
    depth: int | None = None

    def __str__(self) -> str:
        parts = [p for p in (self.phase and str(self.phase), self.kind) if p]
        parts += [f"depth {self.depth}"] if self.depth is not None else []
        return " / ".join(parts) or "overall"


OVERALL = Stratum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One statistic of one metric over one stratum."""

    metric: str  # a column: "kl20"
    statistic: str  # "mean", "median", "p99", "max", "rate", "ratio"
    stratum: Stratum
    value: float
    low: float  # two-sided 95 % interval; NaN if not estimated
    high: float
    positions: int
    segments: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something noticed about the rows before any statistic: shifted, swapped, padded, scaled ..."""

    code: str  # stable, kebab-case: "rows-shifted"
    message: str  # one sentence with its evidence
    fatal: bool  # True: could not be judged (exit 4); False: a FAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One recording as a comparison refers to it."""

    path: str
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A candidate held against a reference, position by position. KL is KL(reference || candidate), nats, f64.

    `positions` has the columns of `metrics.COLUMNS` and of `compare.PLACE_COLUMNS`; `floor` has the same metric
    columns for the floor recording at the same positions, in the same order; `baseline` likewise.
    """

    reference: Side
    candidate: Side
    positions: Columns
    floor_side: Side | None = None
    floor: Columns | None = None
    spread: Mapping[str, Columns] = field(default_factory=dict)  # other floors, by path: shown, never gating
    baseline_side: Side | None = None
    baseline: Columns | None = None
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()  # what a reader should know; decides nothing
    smoke: bool = False
    of_itself: bool = False  # decode rows held against prefill rows of one recording, which stand for the reference
    seconds: float = 0.0  # wall time of the comparison

    @property
    def names(self) -> tuple[str, str]:
        """What the two sides are called where the direction is said: KL(first || second)."""
        return ("prefill", "decode") if self.of_itself else ("reference", "candidate")


# --------------------------------------------------------------------------- judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A limit on a statistic, and why it is there.

    `stratum`, `model`, `dtype` and `smoke` narrow it; of the gates that fit, the one with most of them set decides.
    """

    metric: str  # a column: "kl20"
    statistic: str  # one of judge.STATISTICS: "ratio_to_floor", "count_above_margin", ...
    limit: float
    reason: str
    stratum: Stratum = OVERALL  # each None applies to all
    model: str | None = None  # the model's name, its folder's name, or the hash of its weights
    dtype: str | None = None  # the candidate's dtype
    smoke: bool = False  # True: for smoke corpora alone; False: for all
    margin: float | None = None  # logits; for statistics that count above a margin
    provisional: bool = False  # not yet generated from benign builds


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorRange:
    """Mean KL20 a floor may have, for a model and dtype; outside it something is wrong with the floor."""

    model: str
    dtype: str
    low: float  # nats
    high: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """All limits of a judgement."""

    gates: tuple[Gate, ...]
    fail_level: float  # error probability of a FAIL, shared by all its interval checks (Bonferroni)
    pass_level: float  # error probability of each one-sided upper bound that a PASS needs
    floor_ranges: tuple[FloorRange, ...] = ()
    source: str = ""  # the file or files they came from


Tier = Literal["precision", "logic", "change", "phases"]
"""Who speaks: the production dtype against the floor, the float32 twin against the reference, the candidate against an
accepted baseline, or decode rows against prefill rows of one recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One statistic held against its limit in one stratum.

    `low` and `high` are the bounds that decided, not a two-sided interval: one-sided lower at `fail_level` shared by
    all checks, one-sided upper at `pass_level`. Both equal `value` for a count; -inf and inf where nothing is known.
    """

    metric: str
    statistic: str
    stratum: Stratum
    value: float
    low: float
    high: float
    limit: float
    status: Status
    positions: int
    clusters: int
    reason: str = ""  # the gate's
    detectable: float = float("nan")  # smallest true value that would have been a FAIL with probability 95 %
    tier: Tier = "precision"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipBin:
    """Flips of the positions whose reference margin lies in [low, high), over the whole recording."""

    low: float  # logits
    high: float
    positions: int
    candidate: int  # flips of the candidate
    floor: int | None  # flips of the floor; None without one
    only_candidate: int | None  # discordant pairs
    only_floor: int | None
    p_value: float  # one-sided exact McNemar: is the candidate's rate above the floor's? NaN without a floor
    rate_low: float  # two-sided 95 % interval of the candidate's rate (Clopper-Pearson)
    rate_high: float
    predicted: float  # flips expected from the floor's own logit error; NaN without a floor


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer, and what it rests on. Like a Status it has no truth value."""

    status: Status | None  # None: could not be judged
    word: str  # "PASS (smoke)", "FAIL", "COULD NOT JUDGE"
    reasons: tuple[str, ...]  # the deciding facts, at most three, weightiest first
    checks: tuple[Check, ...] = ()
    estimates: tuple[Estimate, ...] = ()  # shown, never gating
    flip_bins: tuple[FlipBin, ...] = ()
    task_bounds: Mapping[str, float] = field(default_factory=dict)  # segment -> sqrt(1/2 sum KL) over its decode rows
    remedy: str = ""  # INCONCLUSIVE: what to record, and the minutes it would take
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        raise TypeError("a Verdict has no truth value: look at its status")

    @property
    def exit_code(self) -> int:
        """0 PASS, 1 FAIL, 3 INCONCLUSIVE, 4 could not be judged."""
        return 4 if self.status is None else self.status.exit_code
