"""Small corpora and recordings for tests, written through `harness.storage` like real ones.

Rows of a segment exist at every index and both phases take theirs from them, so prefill and decode agree exactly
until a test makes them differ. `Rows` maps (segment id, phase) to [P, V] f32 logits in the order of the indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.corpus import seal
from harness.metrics import position_metrics
from harness.storage import write_recording
from harness.types import Block, Build, Corpus, LogitsDtype, Manifest, Phase, Segment, Source, StepFacts

Rows = dict[tuple[str, Phase], NDArray[np.float32]]

VOCABULARY = 64


def make_corpus(
    *,
    vocabulary: int = VOCABULARY,
    kinds: tuple[str, ...] = ("code", "prose"),
    documents: int = 1,
    depths: tuple[int, ...] = (32, 48),
    prefill: int = 12,
    decode: int = 12,
    overlap: int = 0,
    smoke: bool = False,
    seed: int = 0,
    pieces: tuple[str, ...] | None = None,
    name: str = "synthetic",
) -> Corpus:
    """A corpus of kinds x documents x depths segments.

    Each scores the `prefill` indices before `decode_from` (and `overlap` after it, in both phases) and `decode` rows.
    """
    rng = np.random.default_rng(seed)
    segments = []
    for kind in kinds:
        for document in range(documents):
            for depth in depths:
                segments.append(
                    Segment(
                        id=f"{kind}-{document:02d}-d{depth}",
                        document=f"{kind}-{document:02d}",
                        kind=kind,
                        depth=depth,
                        token_ids=rng.integers(0, vocabulary, depth + decode + 1).astype(np.int32),
                        decode_from=depth,
                        windows=((depth - prefill, depth + overlap),),
                    )
                )
    sources = tuple(
        Source(document=d, origin="synthetic", licence="none", sha256="0" * 64)
        for d in sorted({s.document for s in segments})
    )
    unsigned = Corpus(
        name=name,
        version="1",
        tokenizer="synthetic",
        tokenizer_sha256="t" * 64,
        vocab_size=vocabulary,
        bos="none",
        smoke=smoke,
        segments=tuple(segments),
        sources=sources,
        pieces=pieces if pieces is not None else tuple(f" w{i}" for i in range(vocabulary)),
    )
    return seal(unsigned)


def make_rows(corpus: Corpus, *, vocabulary: int | None = None, seed: int = 1) -> Rows:
    """Logits like a model's: an id prior shared by all rows, a few likely ids in each, sharp and unsure rows mixed."""
    rng = np.random.default_rng(seed)
    width = vocabulary or corpus.vocab_size
    prior = rng.normal(8.0, 1.5, width)
    rows: Rows = {}
    for segment in corpus.segments:
        length = len(segment.token_ids)
        every = prior + rng.normal(0.0, 1.0, (length, width))
        likely = rng.integers(0, width, (length, 3))
        np.put_along_axis(every, likely, 11.0 + rng.exponential(2.5, (length, 3)), axis=1)
        for phase in Phase:
            rows[segment.id, phase] = every[segment.indices(phase)].astype(np.float32)
    return rows


def with_noise(rows: Rows, sigma: float, *, seed: int = 2) -> Rows:
    """The same rows with independent Gaussian noise on every logit: what another rounding does to them."""
    rng = np.random.default_rng(seed)
    return {key: (row + rng.normal(0.0, sigma, row.shape)).astype(np.float32) for key, row in rows.items()}


def make_build(**changes: Any) -> Build:
    """A plausible description of a build."""
    given: dict[str, Any] = {
        "engine": "synthetic",
        "engine_version": "1",
        "model": "synthetic",
        "model_revision": None,
        "weights_sha256": "w" * 64,
        "dtype": "float32",
        "device": "cpu",
    }
    return Build(**(given | changes))


def record(
    folder: Path,
    corpus: Corpus,
    rows: Mapping[tuple[str, Phase], NDArray[np.float32]],
    *,
    dtype: LogitsDtype = "float32",
    build: Build | None = None,
    chunk: int = 16,
) -> Manifest:
    """Write the rows as a complete recording of that dtype; prefill was scheduled in chunks of `chunk` tokens."""
    width = next(iter(rows.values())).shape[1]
    return write_recording(
        folder,
        corpus,
        build or make_build(dtype=dtype),
        _blocks(corpus, rows, dtype, chunk),
        vocab_size=width,
        logits_dtype=dtype,
    )


def columns_of(
    corpus: Corpus, reference: Rows, candidate: Rows, *, dtype: LogitsDtype = "float32"
) -> dict[str, NDArray[Any]]:
    """What a comparison of the two would hold, made in memory: metric columns and the main place columns."""
    blocks = []
    for segment in corpus.segments:
        for phase in Phase:
            indices = segment.indices(phase)
            count, targets = len(indices), segment.targets(indices)
            given = encode(candidate[segment.id, phase], dtype)
            blocks.append(
                position_metrics(reference[segment.id, phase], "float32", given, dtype, targets)
                | {
                    "segment": np.full(count, segment.id),
                    "document": np.full(count, segment.document),
                    "kind": np.full(count, segment.kind),
                    "depth": np.full(count, segment.depth),
                    "phase": np.full(count, str(phase)),
                    "index": indices,
                    "target": targets,
                    "step": indices - segment.decode_from if phase is Phase.DECODE else np.full(count, -1),
                }
            )
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def encode(logits: NDArray[np.float32], dtype: LogitsDtype) -> NDArray[Any]:
    """f32 logits in a recording's storage form; bf16 rounds to nearest even."""
    if dtype != "bfloat16":
        return logits.astype(np.dtype(dtype))
    bits = np.ascontiguousarray(logits, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(logits), np.uint16(0x7FC0), rounded)


def _blocks(
    corpus: Corpus, rows: Mapping[tuple[str, Phase], NDArray[np.float32]], dtype: LogitsDtype, chunk: int
) -> Iterator[Block]:
    for segment in corpus.segments:
        for phase in Phase:
            indices = segment.indices(phase)
            if not len(indices):
                continue
            start = indices // chunk * chunk if phase is Phase.PREFILL else indices
            yield Block(
                segment=segment.id,
                phase=phase,
                indices=indices,
                targets=segment.targets(indices),
                logits=encode(rows[segment.id, phase], dtype),
                facts=StepFacts(
                    step=np.arange(len(indices), dtype=np.int32),
                    batch_size=np.ones(len(indices), np.int32),
                    scheduled_tokens=np.full(len(indices), chunk if phase is Phase.PREFILL else 1, np.int32),
                    chunk_start=start.astype(np.int32),
                    cached_tokens=np.zeros(len(indices), np.int32),
                ),
            )
