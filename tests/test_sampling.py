from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.corpus import load_corpus, save_corpus
from harness.errors import UsageError
from harness.types import Phase

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from harness.sampling import read_prompts, sample_corpus  # noqa: E402  needs torch

TEMPLATE = "{% for m in messages %}<u>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
END = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama over single characters, with generation settings of its own that must not be used."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    letters = ["<u>", "<a>", "<end>", "?", *"abcdefghijklmnopqrstuvwxyz "]
    core = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<u>", "<a>", "<end>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", unk_token="?", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=END, bos_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    network = transformers.LlamaForCausalLM(config)
    network.generation_config = transformers.GenerationConfig(
        do_sample=True, top_k=1, repetition_penalty=9.0, min_new_tokens=5, eos_token_id=END
    )
    network.save_pretrained(folder)
    return folder


def prompts(folder: Path, *entries: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries))
    return path


def draw(network: Any, ids: list[int], *, seed: int, count: int, temperature: float, top_p: float) -> list[int]:
    """The independent oracle: sampling written out, without a cache; nucleus = least set reaching top_p."""
    torch.manual_seed(seed)
    out = list(ids)
    for _ in range(count):
        with torch.no_grad():
            logits = network(torch.tensor([out])).logits[0, -1] / temperature
        probabilities = torch.softmax(logits, 0)
        order = torch.argsort(probabilities, descending=True, stable=True)
        before = torch.cumsum(probabilities[order], 0) - probabilities[order]
        probabilities[order[before >= top_p]] = 0
        out.append(int(torch.multinomial(probabilities / probabilities.sum(), 1)))
        if out[-1] == END:
            break
    return out


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.7), (1.7, 0.9)])
def test_answers_are_drawn_as_stated_and_by_nothing_else(
    model: Path, tmp_path: Path, temperature: float, top_p: float
) -> None:
    file = prompts(tmp_path, {"prompt": "why not"}, {"prompt": "what is this thing"}, {"prompt": "go"})
    made = sample_corpus(
        str(model), file, name="s", max_new_tokens=20, temperature=temperature, top_p=top_p, seed=11
    )  # fmt: skip
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for number, segment in enumerate(made.segments):
        prompt = segment.token_ids[: segment.decode_from].tolist()
        expected = draw(network, prompt, seed=11 + number, count=20, temperature=temperature, top_p=top_p)
        assert segment.token_ids.tolist() == expected


def test_temperature_zero_is_greedy(model: Path, tmp_path: Path) -> None:
    made = sample_corpus(str(model), prompts(tmp_path, {"prompt": "abc"}), name="s", max_new_tokens=8, temperature=0)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = made.segments[0].token_ids
    with torch.no_grad():
        best = network(torch.tensor(ids[None].astype(np.int64))).logits[0].argmax(-1).numpy()
    first = made.segments[0].decode_from - 1
    np.testing.assert_array_equal(best[first:-1], ids[first + 1 :])


def test_the_answer_is_scored_and_the_corpus_says_how_it_was_made(model: Path, tmp_path: Path) -> None:
    file = prompts(
        tmp_path,
        {"prompt": "abcdefg", "kind": "maths"},
        "",
        {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}]},
    )
    state = torch.random.get_rng_state()
    seen: list[tuple[int, int]] = []
    made = sample_corpus(
        str(model), file, name="s", max_new_tokens=9, temperature=0.8, top_p=0.95, seed=3, prefill_rows=4,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert torch.equal(torch.random.get_rng_state(), state)
    assert seen == [(1, 2), (2, 2)]
    first, second = made.segments
    assert (first.id, first.kind, first.depth, first.decode_from) == ("maths-0001", "maths", 16, 9)
    assert first.token_ids[:9].tolist() == [0, 4, 5, 6, 7, 8, 9, 10, 1]
    assert (second.id, second.depth, second.token_ids[:7].tolist()) == ("task-0002", 8, [0, 11, 12, 0, 11, 18, 1])
    for segment in made.segments:
        rows = np.union1d(segment.indices(Phase.PREFILL), segment.indices(Phase.DECODE))
        assert segment.windows == ((segment.decode_from - 4, segment.decode_from),)
        assert set(range(segment.decode_from - 1, len(segment.token_ids) - 1)) <= set(rows.tolist())
    assert made.sampling is not None
    stated = {key: made.sampling[key] for key in ("temperature", "top_p", "seed", "dtype", "max_new_tokens")}
    assert stated == {"temperature": 0.8, "top_p": 0.95, "seed": 3, "dtype": "float32", "max_new_tokens": 9}
    assert len(made.sampling["weights_sha256"]) == 64
    assert [s.origin for s in made.sources] == ["prompts.jsonl:1", "prompts.jsonl:3"]
    save_corpus(made, tmp_path / "s.parquet")
    assert load_corpus(tmp_path / "s.parquet").sha256 == made.sha256


def test_an_answer_keeps_its_end_and_may_be_that_alone(model: Path, tmp_path: Path) -> None:
    """A very high temperature draws ids uniformly, so that among many short answers some are the end at once."""
    entries = [{"prompt": "a"}] * 80
    made = sample_corpus(str(model), prompts(tmp_path, *entries), name="s", max_new_tokens=4, temperature=1e6)
    answers = [s.token_ids[s.decode_from :].tolist() for s in made.segments]
    assert all(END not in answer[:-1] for answer in answers)
    assert all(len(answer) == 4 or answer[-1] == END for answer in answers)
    alone = next(s for s, answer in zip(made.segments, answers, strict=True) if answer == [END])
    assert len(alone.indices(Phase.DECODE)) == 0
    assert alone.targets(alone.indices(Phase.PREFILL))[-1] == END


def test_settings_and_contexts_out_of_range(model: Path, tmp_path: Path) -> None:
    file = prompts(tmp_path, {"prompt": "a" * 50})
    with pytest.raises(UsageError, match=r"prompts\.jsonl:1: 52 tokens of prompt and 13 new .* context of 64"):
        sample_corpus(str(model), file, name="s", max_new_tokens=13)
    for wrong in (
        {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1},
        {"max_new_tokens": 0}, {"prefill_rows": 0}, {"name": "a/b"},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            sample_corpus(str(model), file, **({"name": "s"} | wrong))


def test_a_tokenizer_without_chat_template_is_refused(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    with pytest.raises(UsageError, match="no chat template"):
        sample_corpus(str(bare), prompts(tmp_path, {"prompt": "a"}), name="s")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "either"),
        ({"prompt": "a", "messages": []}, "either"),
        ({"kind": "x"}, "either"),
        ({"prompt": 3}, "two strings"),
        ({"messages": []}, "list of objects"),
        ({"messages": [{"role": "user"}]}, "two strings"),
        ({"prompt": "a", "temperature": 1}, "unknown key 'temperature'"),
        ({"prompt": "a\ud800"}, "lone surrogate"),
        ({"prompt": ""}, "user's text is empty"),
        ({"prompt": " \n"}, "user's text is empty"),
        ({"messages": [{"role": "system", "content": ""}]}, "system's text is empty"),
        ({"prompt": "a", "kind": "a b"}, "kind is 'a b'"),
    ],
)
def test_bad_prompts_are_named_by_line(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(UsageError, match=rf"prompts\.jsonl:2: .*{message}"):
        read_prompts(prompts(tmp_path, {"prompt": "fine\u2028\U0001f389"}, line))


def test_files_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no prompts"):
        read_prompts(prompts(tmp_path, ""))
    with pytest.raises(UsageError, match="cannot read"):
        read_prompts(tmp_path / "absent.jsonl")
