"""`scripts/train_hybrid.py` on a tiny model: resumable to the bit, and its checkpoint is what engines need."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.gdn_oracle import core

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

TINY = ("--tiny", "--threads", "1", "--tokens", "400")


@pytest.fixture(scope="module")
def script() -> Any:
    from scripts import train_hybrid

    return train_hybrid


@pytest.fixture(scope="module")
def threads() -> Any:
    """The script sets torch's threads for its process; other tests want theirs back."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(script: Any, threads: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    script.main([str(folder), *TINY])
    return folder


def test_a_stopped_run_goes_on_to_the_same_bits(script: Any, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((trained / "tokenizer.json").read_bytes())
    script.main([str(tmp_path), *TINY, "--minutes", "0"])
    assert (tmp_path / "state.pt").exists()
    assert not (tmp_path / "model.safetensors").exists()
    script.main([str(tmp_path), *TINY])
    weights = "model.safetensors"
    assert (tmp_path / weights).read_bytes() == (trained / weights).read_bytes()
    assert not (tmp_path / "state.pt").exists()


def test_training_can_start_from_other_weights(script: Any, trained: Path, tmp_path: Path) -> None:
    script.main([str(tmp_path), *TINY, "--start", str(trained)])
    reached = [
        json.loads((folder / "training.json").read_text())["held_out_loss"]["64"] for folder in (trained, tmp_path)
    ]
    assert reached[1] < reached[0]


def test_the_checkpoint_is_untied_and_says_what_it_reached(trained: Path) -> None:
    from safetensors.torch import load_file

    config = json.loads((trained / "config.json").read_text())
    weights = load_file(trained / "model.safetensors")
    assert config["tie_word_embeddings"] is False
    assert config["architectures"] == ["Qwen3NextForCausalLM"]
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    facts = json.loads((trained / "training.json").read_text())
    assert 0 < facts["bigram"] < facts["unigram"] < math.log(2048)
    assert facts["tokens"] == 2 * 3 * 64  # half of 400 tokens each, in whole steps of 64


def test_heads_remember(trained: Path) -> None:
    """The architecture's own start would give half-lives around a tenth of a token."""
    lives = json.loads((trained / "training.json").read_text())["half_lives"]
    assert len(lives) == 3
    assert all(0.3 < life < 1000 for layer in lives for life in layer)


def test_half_lives_are_those_of_the_recurrence(script: Any) -> None:
    layer = SimpleNamespace(A_log=torch.tensor([0.5]), dt_bias=torch.tensor([-2.0]))
    model = SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(linear_attn=layer), SimpleNamespace()]))
    ((life,),) = script.half_lives(model)
    weights = {"conv1d": np.ones((3, 4)), "A_log": np.array([0.5]), "dt_bias": np.array([-2.0])}
    tokens, state = 10, np.ones((1, 1, 1))
    nothing = np.zeros((tokens, 3)), np.zeros((tokens, 1)), np.full((tokens, 1), -500.0)  # beta 0: nothing is written
    faded = core(*nothing, weights, state, np.zeros((3, 3))).state
    assert faded.item() == pytest.approx(0.5 ** (tokens / life), rel=1e-3)


def test_losses_by_counting(script: Any) -> None:
    train, held = torch.tensor([0, 1, 0, 1, 1, 2]), torch.tensor([0, 1, 2, 1])
    p = np.array([3, 4, 2]) / 9  # counts 2, 3, 1, one added
    pairs = np.array([[0, 2, 0], [1, 1, 1], [0, 0, 0]])
    rows = (pairs + 20 * p) / (pairs.sum(1, keepdims=True) + 20)
    unigram, bigram = script.count_losses(train, held, 3)
    assert unigram == pytest.approx(-np.log(p[[0, 1, 2, 1]]).mean())
    assert bigram == pytest.approx(-np.log([rows[0, 1], rows[1, 2], rows[2, 1]]).mean())


def test_the_schedule_counts_tokens(script: Any) -> None:
    stages = (script.Stage(share=0.75, length=10, rows=2), script.Stage(share=0.25, length=50, rows=1))
    steps = script.steps_of(stages, 1000)
    assert [steps.count(stage) for stage in stages] == [37, 5]
    assert script.rate(0, 1000) < script.rate(99, 1000) > script.rate(999, 1000) > 0
