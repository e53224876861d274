"""The reference's own answers: what is drawn from, what is kept, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from harness.embedded import embedded_model  # noqa: E402  (after the skip)
from harness.errors import UsageError  # noqa: E402
from harness.reference_sample import draw, read_prompts, sample_corpus  # noqa: E402
from harness.types import Phase  # noqa: E402


def test_draws_follow_the_nucleus_of_the_tempered_softmax() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])
    temperature, top_p, draws = 0.7, 0.9, 20_000
    scaled = np.exp(logits.numpy().astype(float) / temperature)
    chances = scaled / scaled.sum()
    kept = [1, 4, 2]  # 0.56 and 0.27 fall short of 0.9, so the third likeliest, 0.13, belongs too
    expected = np.array([chances[i] if i in kept else 0.0 for i in range(5)])
    expected /= expected.sum()
    generator = torch.Generator().manual_seed(0)
    counts = Counter(draw(logits, temperature, top_p, generator) for _ in range(draws))
    assert set(counts) == set(kept)
    error = np.sqrt(expected * (1 - expected) / draws)
    for i in kept:
        assert abs(counts[i] / draws - expected[i]) < 4.5 * error[i]


def test_a_tiny_top_p_is_greedy() -> None:
    generator = torch.Generator().manual_seed(0)
    assert {draw(torch.tensor([0.0, 0.2, 0.1]), 1.0, 1e-9, generator) for _ in range(50)} == {1}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "no prompts"),
        ("{}", "either"),
        ('{"prompt": "a", "messages": []}', "either"),
        ('{"messages": []}', "role"),
        ('{"prompt": 3}', "content"),
        ("not json", "not JSON"),
        ('{"prompt": "good"}\n[1]', ":2"),
    ],
)
def test_bad_prompts_are_refused_by_line(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match=named):
        read_prompts(file)


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"max_tokens": 0}])
def test_settings_out_of_range_are_refused(tmp_path: Path, setting: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="expected"):
        sample_corpus("no-model", tmp_path / "prompts.jsonl", **setting)  # type: ignore[arg-type]


@pytest.mark.slow
def test_answers_are_kept_exactly_and_depend_on_their_seed_alone(tmp_path: Path) -> None:
    from harness.corpus import load_tokenizer

    model = str(embedded_model())
    both, second = tmp_path / "both.jsonl", tmp_path / "second.jsonl"
    first_line = '{"prompt": "Name a colour.", "kind": "chat"}\n'
    both.write_text(first_line + '{"messages": [{"role": "user", "content": "Count to three."}]}\n')
    second.write_text(first_line)
    corpus = sample_corpus(model, both, temperature=0.8, top_p=0.95, max_tokens=8, seed=5)
    alone = sample_corpus(model, second, temperature=0.8, top_p=0.95, max_tokens=8, seed=5)
    other = sample_corpus(model, second, temperature=0.8, top_p=0.95, max_tokens=8, seed=6)
    segment = corpus.segments[0]
    assert segment.token_ids.tolist() == alone.segments[0].token_ids.tolist()
    assert segment.token_ids.tolist() != other.segments[0].token_ids.tolist()
    prompt = load_tokenizer(model).apply_chat_template(
        [{"role": "user", "content": "Name a colour."}], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    assert segment.token_ids[: segment.decode_from].tolist() == prompt
    assert 1 <= len(segment.token_ids) - segment.decode_from <= 8
    assert len(segment.indices(Phase.PREFILL)) == min(64, segment.decode_from)
    assert [s.kind for s in corpus.segments] == ["chat", "answer"]
    assert corpus.sampling == {"temperature": 0.8, "top_p": 0.95, "max_tokens": 8, "seed": 5}
    assert corpus.smoke
