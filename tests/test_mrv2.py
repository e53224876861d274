"""The second model runner, the default on GPUs, run for real through Triton's interpreter and recorded by the plugin.

Held against the first runner, against HF in float32, and against vLLM's own forcing of ids, which only MRV2 has. What
this cannot show: CUDA graphs, the copy of rows from a device, kernels that a compiler made.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.engine.session import EngineSession
from harness.metrics import position_metrics
from harness.reference import record_reference
from harness.storage import Recording
from harness.types import Corpus, Phase
from tests.interpreted import ENGINE
from tests.serving import VOCABULARY, make_corpus, save_corpus_file, save_model

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

SEGMENTS = 2


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, the corpus, and the recordings of both runners, which are made at the same time."""
    folder = tmp_path_factory.mktemp("mrv2")
    save_model(folder / "model")
    corpus = save_corpus_file(folder / "corpus.parquet", SEGMENTS)
    places = [str(folder / "model"), str(folder / "corpus.parquet"), str(folder)]
    command = [sys.executable, "-m", "tests.interpreted", *places]
    with (folder / "log").open("w") as log:
        interpreted = subprocess.Popen(command, cwd=Path(__file__).parent.parent, stdout=log, stderr=subprocess.STDOUT)
        try:
            with EngineSession(str(folder / "model"), ENGINE) as session:
                session.record(corpus, folder / "mrv1")
            assert interpreted.wait(timeout=300) == 0, (folder / "log").read_text()[-2000:]
        finally:
            interpreted.kill()
    return folder


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return make_corpus(SEGMENTS)


@pytest.mark.parametrize("name", ["mrv2", "mrv2-batched"])
def test_it_is_the_second_runner_and_every_row_is_there_once_as_the_engine_says_it(
    home: Path, corpus: Corpus, name: str
) -> None:
    assert json.loads((home / "facts.json").read_text())["runner"] == "MRV2"
    recording = Recording(home / name)
    assert recording.manifest.complete
    assert sum(part.rows for part in recording.manifest.parts) == corpus.rows
    for segment in corpus.segments:
        for phase in Phase:
            assert np.array_equal(recording.indices(segment.id, phase), segment.indices(phase))
    check = recording.manifest.instrument
    assert check is not None
    assert check.passed, check
    # windows are made without prompt log-probs: there the engine says nothing of prompt rows but the last
    assert check.rows == (
        corpus.rows if name == "mrv2" else sum(len(s.token_ids) - s.decode_from + 1 for s in corpus.segments)
    )


def test_both_runners_give_the_same_bits(home: Path) -> None:
    one, two = (Recording(home / name).manifest for name in ("mrv1", "mrv2"))
    assert one.build.resolved["runner"] == "MRV1"
    assert two.build.resolved["runner"] == "MRV2"
    assert two.id == one.id


def test_batched_rows_and_windows_agree_with_rows_made_one_by_one(home: Path, corpus: Corpus) -> None:
    alone, batched = Recording(home / "mrv2"), Recording(home / "mrv2-batched")
    facts = batched.read("s0", Phase.DECODE).facts
    assert facts is not None
    assert facts.batch_size.max() == 2
    assert (facts.scheduled_tokens > facts.batch_size).any()  # a decode row in a step that also prefills
    for segment in corpus.segments:
        for phase in Phase:
            rows = [recording.read(segment.id, phase).logits for recording in (alone, batched)]
            assert np.abs(rows[0] - rows[1]).max() < 1e-4


def test_rows_agree_with_transformers_in_float32(home: Path, corpus: Corpus) -> None:
    record_reference(str(home / "model"), corpus, home / "reference")
    reference, engine = Recording(home / "reference"), Recording(home / "mrv2")
    for segment in corpus.segments:
        for phase in Phase:
            ours, theirs = reference.read(segment.id, phase), engine.read(segment.id, phase)
            columns = position_metrics(ours.logits, "float32", theirs.logits, "float32", ours.targets)
            assert np.abs(ours.logits - theirs.logits).max() < 1e-4
            assert columns["kl_full"].max() < 1e-9
            assert not columns["flip"].any()


def test_vllm_s_own_replay_of_the_ids_gives_the_rows_that_our_forcing_gives(home: Path, corpus: Corpus) -> None:
    recording = Recording(home / "mrv2")
    for segment in corpus.segments:
        replayed = np.load(home / f"replayed-{segment.id}.npz")
        assert replayed["ids"].tolist() == segment.token_ids[segment.decode_from :].tolist()
        assert replayed["logprobs"].shape == (len(replayed["ids"]), VOCABULARY)
        logits = recording.read(segment.id, Phase.DECODE).logits.astype(np.float64)
        ours = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert np.abs(replayed["logprobs"][1:] - ours).max() < 2e-5  # its first row is the last of the prompt
