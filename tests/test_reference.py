"""The HF recorder against an independent float64 Llama in numpy, and against the models' own forward passes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402  (after the skip)

from harness import reference, reference_model  # noqa: E402
from harness.corpus import seal  # noqa: E402
from harness.errors import LogitgateError, UsageError  # noqa: E402
from harness.reference_f64 import true_float64  # noqa: E402
from harness.storage import Recording  # noqa: E402
from harness.types import Corpus, Phase, Segment  # noqa: E402

VOCAB = 300
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_model(config: Any, folder: Path, *, seed: int = 0) -> Path:
    """A random model with activations of ordinary size, so that rounding and causality have something to show on."""
    torch.manual_seed(seed)
    network = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in network.parameters():
            if tensor.dim() > 1:
                tensor.mul_(5)
            else:
                tensor.add_(0.1 * torch.randn_like(tensor))
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(**SHAPE, rope_theta=10000.0, rms_norm_eps=1e-5)
    return save_model(config, tmp_path_factory.mktemp("llama"))


def make_segment(name: str, length: int, decode_from: int, *windows: tuple[int, int], seed: int = 1) -> Segment:
    ids = np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)
    return Segment(
        id=name, document=name, kind="code", depth=decode_from, token_ids=ids, decode_from=decode_from, windows=windows
    )


def make_corpus(*segments: Segment, vocab_size: int = VOCAB) -> Corpus:
    return seal(
        Corpus(
            name="tiny", version="1", tokenizer="none", tokenizer_sha256="0" * 64, vocab_size=vocab_size, bos="none",
            smoke=True, segments=segments, sources=(),
        )
    )  # fmt: skip


@pytest.fixture
def corpus() -> Corpus:
    return make_corpus(
        make_segment("first", 90, 60, (10, 40), (50, 70), seed=1), make_segment("second", 130, 100, (100, 129), seed=2)
    )


def rows_of(model: Path, segment: Segment, dtype: str = "float32") -> dict[Phase, np.ndarray]:
    """Raw rows of a segment by phase, straight from the recorder's core."""
    loaded = reference_model.load_model(str(model), dtype=dtype, device_map=None, weights="original")  # type: ignore[arg-type]
    with loaded.arithmetic():
        loaded.self_check(segment.token_ids, longest=len(segment.token_ids))
        missing = {phase: segment.indices(phase) for phase in Phase}
        blocks = list(reference.segment_blocks(loaded, segment, missing))
    assert all(np.array_equal(b.targets, segment.token_ids[b.indices + 1]) for b in blocks)
    found = {phase: [b for b in blocks if b.phase is phase] for phase in Phase}
    for phase, some in found.items():
        assert np.array_equal(np.concatenate([b.indices for b in some]), segment.indices(phase))
    return {phase: np.concatenate([b.logits for b in some]) for phase, some in found.items()}


def numpy_llama(folder: Path, token_ids: np.ndarray) -> np.ndarray:
    """Llama in float64 from its published equations, [L, V]: an implementation of its own, loops over heads."""
    weights = {name: tensor.double().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    heads, kv_heads, width = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["hidden_size"]
    size, length = width // heads, len(token_ids)
    angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(0, size, 2) / size))
    turn = np.exp(1j * angles)  # RoPE pairs dimension i with i + size / 2: a complex number, turned

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        normed: np.ndarray = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weights[name]
        return normed

    def rotate(x: np.ndarray) -> np.ndarray:
        turned = (x[:, : size // 2] + 1j * x[:, size // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], axis=1)

    x = weights["model.embed_tokens.weight"][token_ids]
    for layer in range(SHAPE["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        normed = norm(x, at + "input_layernorm.weight")
        q, k, v = (normed @ weights[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
        mixed = np.empty((length, width))
        for head in range(heads):
            mine = slice(head * size, (head + 1) * size)
            shared = slice(head * kv_heads // heads * size, (head * kv_heads // heads + 1) * size)
            scores = rotate(q[:, mine]) @ rotate(k[:, shared]).T / np.sqrt(size)
            scores[np.triu_indices(length, 1)] = -np.inf
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, mine] = p / p.sum(axis=1, keepdims=True) @ v[:, shared]
        x = x + mixed @ weights[at + "self_attn.o_proj.weight"].T
        normed = norm(x, at + "post_attention_layernorm.weight")
        gate = normed @ weights[at + "mlp.gate_proj.weight"].T
        up = normed @ weights[at + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[at + "mlp.down_proj.weight"].T
    logits: np.ndarray = norm(x, "model.norm.weight") @ weights["lm_head.weight"].T
    return logits


def relative(value: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(value - expected) / np.linalg.norm(expected))


# ------------------------------------------------------------------ numerics


def test_float64_rows_equal_an_independent_float64_llama(llama: Path) -> None:
    segment = make_segment("s", 90, 60, (10, 40))
    exact = numpy_llama(llama, segment.token_ids)
    for phase, rows in rows_of(llama, segment, "float64").items():
        assert rows.dtype == np.float64
        assert relative(rows, exact[segment.indices(phase)]) < 1e-12


def test_eager_softmax_is_float64_too_and_plain_float64_is_not(llama: Path) -> None:
    ids = make_segment("s", 60, 59, (0, 50)).token_ids
    network = transformers.AutoModelForCausalLM.from_pretrained(
        llama, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    batch, exact = torch.from_numpy(ids.astype(np.int64))[None], numpy_llama(llama, ids)
    with torch.no_grad():
        plain = network(batch).logits[0].numpy()
    assert plain.dtype == np.float64
    assert relative(plain, exact) > 1e-9  # what the context is for
    with true_float64(network):
        assert relative(network(batch).logits[0].numpy(), exact) < 1e-12
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(("dtype", "stored", "low", "high"), [
    ("float32", "float32", 1e-8, 1e-5), ("float16", "float16", 1e-5, 3e-2), ("bfloat16", "uint16", 1e-3, 0.2),
])  # fmt: skip
def test_each_dtype_is_computed_and_stored_as_itself(
    llama: Path, dtype: str, stored: str, low: float, high: float
) -> None:
    segment = make_segment("s", 90, 60, (10, 40))
    rows = rows_of(llama, segment, dtype)[Phase.PREFILL]
    assert rows.dtype == stored
    values = torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16).double().numpy() if stored == "uint16" else rows
    assert low < relative(values.astype(np.float64), numpy_llama(llama, segment.token_ids)[10:40]) < high


def test_rope_scaling_tables_are_rebuilt_in_float64(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    save_model(transformers.LlamaConfig(**SHAPE, rope_parameters=scaling), tmp_path)
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    with true_float64(network):
        pass
    table = network.model.rotary_emb.inv_freq.numpy()
    assert table.dtype == np.float64
    assert table[0] == 1.0  # the fastest frequency is not scaled
    assert table[-1] == pytest.approx(10000.0 ** (-14 / 16) / 8, rel=1e-15)  # the slowest is divided by the factor


ARCHITECTURES = {
    "bias and learned positions": transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    ),
    "soft caps": transformers.Gemma2Config(
        **SHAPE, head_dim=16, final_logit_softcapping=2.0, attn_logit_softcapping=3.0, sliding_window=16
    ),
    "logit divisor": transformers.GraniteConfig(**SHAPE, logits_scaling=7.0),
    "logit factor": transformers.CohereConfig(**SHAPE, logit_scale=0.3),
    "tied head": transformers.Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_are_the_models_own_forward_whatever_its_head_does(name: str, tmp_path: Path) -> None:
    save_model(ARCHITECTURES[name], tmp_path)
    segment = make_segment("s", 90, 60, (10, 40))
    caps = name == "soft caps"
    network = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager" if caps else "sdpa"
    ).eval()
    with torch.no_grad():
        own = network(torch.from_numpy(segment.token_ids.astype(np.int64))[None]).logits[0].numpy()
    for phase, rows in rows_of(tmp_path, segment).items():
        np.testing.assert_allclose(rows, own[segment.indices(phase)], rtol=1e-4, atol=1e-5)
    if caps:
        assert np.abs(own).max() <= 2.0


def test_a_layer_of_recurrent_state_runs_in_true_float64(tmp_path: Path) -> None:
    config = transformers.Qwen3NextConfig(
        **SHAPE, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    save_model(config, tmp_path)
    segment = make_segment("s", 90, 60, (10, 40))
    double, single = rows_of(tmp_path, segment, "float64"), rows_of(tmp_path, segment)
    assert 1e-9 < relative(single[Phase.DECODE], double[Phase.DECODE]) < 1e-4


# ------------------------------------------------------------------ memory and pieces


def test_rows_do_not_depend_on_how_many_the_head_takes_at_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = make_segment("s", 90, 60, (10, 40))
    many = rows_of(llama, segment)
    monkeypatch.setattr(reference, "HEAD_ROWS", 7)
    few = rows_of(llama, segment)
    for phase in Phase:
        np.testing.assert_allclose(few[phase], many[phase], rtol=1e-5, atol=1e-5)


def test_the_head_sees_scored_rows_only_and_few_at_a_time(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "HEAD_ROWS", 8)
    segment = make_segment("s", 200, 150, (20, 60), (140, 160))
    loaded = reference_model.load_model(str(llama), dtype="float32", device_map=None, weights="original")
    seen: list[int] = []
    with loaded.arithmetic():
        loaded.self_check(segment.token_ids, longest=200)
        loaded.network.lm_head.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].shape[1]))
        missing = {phase: segment.indices(phase) for phase in Phase}
        blocks = list(reference.segment_blocks(loaded, segment, missing))
    assert max(seen) == 8
    assert sum(seen) == 40 + 10 + 49  # the ten rows scored in both phases are computed once
    by_row = {(b.phase, i): row.tobytes() for b in blocks for i, row in zip(b.indices, b.logits, strict=True)}
    assert all(by_row[Phase.PREFILL, i] == by_row[Phase.DECODE, i] for i in range(150, 160))


def test_long_segments_run_in_pieces_over_the_cache(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = make_segment("s", 200, 150, (20, 60))
    whole = rows_of(llama, segment)
    monkeypatch.setattr(reference_model, "WHOLE_TOKENS", 64)
    monkeypatch.setattr(reference_model, "PIECE_TOKENS", 24)
    loaded = reference_model.load_model(str(llama), dtype="float32", device_map=None, weights="original")
    lengths: list[int] = []
    with loaded.arithmetic():
        loaded.self_check(segment.token_ids, longest=200)
        assert loaded.in_pieces
        loaded.network.model.layers[0].mlp.register_forward_hook(lambda _m, x, _o: lengths.append(x[0].shape[1]))
        blocks = list(reference.segment_blocks(loaded, segment, {Phase.DECODE: segment.indices(Phase.DECODE)}))
    assert max(lengths) == 24
    np.testing.assert_allclose(np.concatenate([b.logits for b in blocks]), whole[Phase.DECODE], rtol=1e-4, atol=1e-5)


def test_a_cache_that_forgets_is_noticed_and_not_used(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_model, "WHOLE_TOKENS", 64)
    loaded = reference_model.load_model(str(llama), dtype="float32", device_map=None, weights="original")
    remembering = loaded.network.model.forward
    loaded.network.model.forward = lambda past_key_values=None, **kwargs: remembering(**kwargs)
    segment = make_segment("s", 200, 150)
    with loaded.arithmetic():
        loaded.self_check(segment.token_ids, longest=200)
    assert not loaded.in_pieces


# ------------------------------------------------------------------ recordings


def test_a_recording_holds_every_row_and_its_own_error(llama: Path, corpus: Corpus, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    manifest = reference.record_reference(
        str(llama), corpus, tmp_path / "ref", progress=lambda done, total: steps.append((done, total))
    )
    assert manifest.complete
    assert manifest.rows_written == corpus.rows == steps[-1][0] == steps[-1][1]
    assert manifest.vocab_size == VOCAB
    assert manifest.logits_dtype == "float32"
    assert manifest.own_error is not None
    assert 0 < manifest.own_error["median"] <= manifest.own_error["max"] < 1e-9
    assert manifest.build.engine == "huggingface"
    assert manifest.build.dtype == "float32"
    assert manifest.build.resolved["float32_matmul_precision"] == "highest"
    assert manifest.build.host["tf32"] is False
    recording = Recording(tmp_path / "ref")
    for segment in corpus.segments:
        exact = numpy_llama(llama, segment.token_ids)
        for phase in Phase:
            block = recording.read(segment.id, phase)
            assert relative(block.logits, exact[segment.indices(phase)]) < 1e-5


def test_only_a_float32_recording_reports_its_own_error(llama: Path, corpus: Corpus, tmp_path: Path) -> None:
    manifest = reference.record_reference(str(llama), corpus, tmp_path / "floor", dtype="bfloat16")
    assert manifest.own_error is None
    assert manifest.logits_dtype == "bfloat16"
    assert manifest.build.requested["dtype"] == "bfloat16"


@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_recording_is_resumed_to_the_same_bits(
    llama: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(reference, "HEAD_ROWS", 16)
    whole = reference.record_reference(str(llama), corpus, tmp_path / "whole")
    calls = iter(range(after))

    def interrupt(done: int, total: int) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reference.record_reference(str(llama), corpus, tmp_path / "cut", progress=interrupt)
    started: list[int] = []
    resumed = reference.record_reference(
        str(llama), corpus, tmp_path / "cut", resume=True, progress=lambda done, total: started.append(done)
    )
    assert resumed.complete
    assert resumed.id == whole.id
    assert resumed.seconds is None
    assert started[0] > 16  # it did not begin again
    again: list[int] = []
    same = reference.record_reference(
        str(llama), corpus, tmp_path / "cut", resume=True, progress=lambda done, total: again.append(done)
    )
    assert same.id == whole.id
    assert again == []


# ------------------------------------------------------------------ what cannot serve


def test_a_missing_model_is_named(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere is not a model.*config\.json"):
        reference.record_reference(str(tmp_path / "nowhere"), corpus, tmp_path / "ref")
    assert not (tmp_path / "ref").exists()


def test_a_segment_beyond_the_models_context_is_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="toolong"):
        reference.record_reference(str(llama), make_corpus(make_segment("toolong", 300, 280)), tmp_path / "ref")


def test_an_id_beyond_the_vocabulary_is_named(llama: Path, tmp_path: Path) -> None:
    segment = make_segment("foreign", 90, 60)
    foreign = dataclasses.replace(segment, token_ids=np.where(np.arange(90) == 7, VOCAB, segment.token_ids))
    with pytest.raises(UsageError, match="token id 300"):
        reference.record_reference(str(llama), make_corpus(foreign, vocab_size=VOCAB + 1), tmp_path / "ref")


def test_a_model_that_looks_ahead_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    shape = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    save_model(transformers.BertConfig(**shape, is_decoder=False), tmp_path)
    with pytest.raises(UsageError, match="not a causal model"):
        reference.record_reference(str(tmp_path), corpus, tmp_path / "ref")


def test_an_encoder_decoder_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    transformers.T5Config(vocab_size=VOCAB, d_model=16, d_ff=16, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(UsageError):
        reference.record_reference(str(tmp_path), corpus, tmp_path / "ref")


def test_a_checkpoint_with_a_tensor_missing_is_refused(llama: Path, corpus: Corpus, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    copy_checkpoint(llama, tmp_path, tensors)
    with pytest.raises(UsageError, match=r"missing.*up_proj"):
        reference.record_reference(str(tmp_path), corpus, tmp_path / "ref")


def test_nan_in_the_reference_says_where(llama: Path, corpus: Corpus, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["lm_head.weight"][7] = float("nan")
    copy_checkpoint(llama, tmp_path, tensors)
    with pytest.raises(LogitgateError, match=r"segment first, index 10, 1 of 300 ids, 64 of 64 rows"):
        reference.record_reference(str(tmp_path), corpus, tmp_path / "ref")


def copy_checkpoint(source: Path, target: Path, tensors: dict[str, Any]) -> None:
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((source / "config.json").read_text())


def test_an_unknown_dtype_is_refused(llama: Path, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown dtype 'int8'"):
        reference.record_reference(str(llama), corpus, tmp_path / "ref", dtype="int8")  # type: ignore[arg-type]


def test_tables_that_cannot_be_rebuilt_are_refused_in_float64_and_reported_in_float32(
    corpus: Corpus, tmp_path: Path
) -> None:
    config = transformers.GPTJConfig(
        vocab_size=VOCAB, n_embd=64, n_layer=1, n_head=4, rotary_dim=8, n_positions=256, bos_token_id=1, eos_token_id=2
    )
    save_model(config, tmp_path / "gptj")
    with pytest.raises(UsageError, match="embed_positions"):
        reference.record_reference(str(tmp_path / "gptj"), corpus, tmp_path / "f64", dtype="float64")
    manifest = reference.record_reference(str(tmp_path / "gptj"), corpus, tmp_path / "f32")
    assert manifest.own_error is not None
    assert "embed_positions" in manifest.own_error["unavailable"]


def test_a_float32_step_inside_a_float64_model_is_found(llama: Path) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64).eval()
    network.model.norm.weight.data = network.model.norm.weight.data.float()
    with pytest.raises(UsageError, match=r"float32, shape \(64,\)"), true_float64(network):
        network(torch.zeros((1, 4), dtype=torch.int64))


# ------------------------------------------------------------------ quantised checkpoints


@pytest.fixture
def fp8(llama: Path, tmp_path: Path) -> Path:
    """The tiny Llama with its linear layers in block-scaled fp8, as DeepSeek and Qwen publish theirs."""
    tensors = load_file(llama / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        blocks = tensors[name].unflatten(0, (-1, 32)).unflatten(2, (-1, 32))  # [rows, 32, columns, 32]
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        quantised = (blocks / scale[:, None, :, None]).reshape(tensors[name].shape).to(torch.float8_e4m3fn)
        tensors |= {name: quantised, name + "_scale_inv": scale}
    folder = tmp_path / "fp8"
    folder.mkdir()
    copy_checkpoint(llama, folder, tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_quantised_checkpoint_is_recorded_as_the_values_it_stands_for(llama: Path, fp8: Path) -> None:
    loaded = reference_model.load_model(str(fp8), dtype="float32", device_map=None, weights="dequantised")
    assert loaded.quantization == "fp8"
    stored = load_file(fp8 / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    scale = stored[name + "_scale_inv"].repeat_interleave(32, 0).repeat_interleave(32, 1)
    weight = loaded.network.get_parameter(name)
    assert weight.dtype is torch.float32
    assert torch.equal(weight, stored[name].float() * scale)


def test_weights_must_fit_the_checkpoint(llama: Path, fp8: Path, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"quantised \(fp8\).*dequantised"):
        reference.record_reference(str(fp8), corpus, tmp_path / "ref")
    with pytest.raises(UsageError, match="nothing to dequantise"):
        reference.record_reference(str(llama), corpus, tmp_path / "ref", weights="dequantised")
