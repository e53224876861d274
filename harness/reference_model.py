"""A transformers causal LM as the reference needs it: trunk and head apart, each proven to be the model's own.

The head of a large vocabulary is applied to scored rows only, a few at a time. To stay exact for any architecture
(bias, soft caps, logit scales), the model's own `forward` does it: its trunk is made to answer with hidden states
computed before. `self_check` proves on a short prefix that this equals the plain forward bit for bit.

Shape legend: L tokens, R rows, V vocabulary, H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from harness._environment import has_bf16_units
from harness.errors import UsageError
from harness.reference_f64 import true_float64
from harness.reference_products import widen_products
from harness.types import Json, LogitsDtype

Weights = Literal["original", "dequantised"]

DTYPES: dict[LogitsDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
WHOLE_TOKENS = 8192  # segments up to here run in one forward; longer ones in pieces, over the KV cache
PIECE_TOKENS = 1024
_CHECK_TOKENS = 64


@dataclass(slots=True, kw_only=True)
class ReferenceModel:
    """A loaded model. Rows and hidden states are tensors on the model's device, in its dtype."""

    network: Any  # transformers.PreTrainedModel
    dtype: LogitsDtype
    quantization: str | None  # the checkpoint's method, when its weights were dequantised
    unused_weights: int  # tensors of the checkpoint that the architecture has no place for
    wide_products: bool = False  # half-precision products run in f32 and are rounded once
    in_pieces: bool = False  # whether segments longer than WHOLE_TOKENS run over the KV cache
    answer_type: Any = field(default=None, repr=False)  # type of the trunk's output

    @property
    def attention(self) -> str:
        """The attention implementation transformers runs: "sdpa" or "eager"."""
        return str(self.network.config._attn_implementation)

    @property
    def device(self) -> torch.device:
        """Where inputs go; weights that accelerate has offloaded are on "meta" and take inputs from the CPU."""
        device = torch.device(self.network.device)
        return torch.device("cpu") if device.type == "meta" else device

    @property
    def vocabulary(self) -> int:
        """Ids the model has an embedding for."""
        return int(self.network.get_input_embeddings().num_embeddings)

    def arithmetic(self) -> AbstractContextManager[None]:
        """The context to compute in: no gradients, no TF32, and for float64 nothing in less precision."""
        return _true_float64_exact(self.network) if self.dtype == "float64" else _exact_float32()

    def hidden(self, token_ids: NDArray[np.int32], indices: NDArray[np.int64]) -> torch.Tensor:
        """Pre-head states of one forward over `token_ids[:indices[-1] + 1]` at ascending `indices`: [R, H]."""
        ids = torch.from_numpy(token_ids[: indices[-1] + 1].astype(np.int64))[None].to(self.device)
        if len(ids[0]) <= WHOLE_TOKENS or not self.in_pieces:
            return self._trunk(ids).last_hidden_state[0, indices]
        return self._hidden_in_pieces(ids, indices, PIECE_TOKENS)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's own head on [R, H] states: [R, V]. Rows are independent of each other."""
        answer = self.answer_type(last_hidden_state=hidden[None])
        stand_in = torch.zeros((1, len(hidden)), dtype=torch.int64, device=self.device)
        with _answering(self.network.base_model, answer):
            return self.network(input_ids=stand_in, use_cache=False).logits[0]

    def self_check(self, token_ids: NDArray[np.int32], *, longest: int) -> torch.Tensor:
        """Prove trunk and head on a short prefix; decide whether long segments may run in pieces.

        Returns the logits of one row, [1, V], to learn width and dtype from. Raises UsageError for a model that looks
        ahead or whose head cannot be told apart from its trunk.
        """
        prefix = token_ids[:_CHECK_TOKENS]
        rows = np.arange(len(prefix), dtype=np.int64)
        ids = torch.from_numpy(prefix.astype(np.int64))[None].to(self.device)
        trunk = self._trunk(ids)
        self.answer_type = type(trunk)
        own = self.network(input_ids=ids, use_cache=False).logits[0]
        ours = self.logits(trunk.last_hidden_state[0])
        if raw_rows(own).tobytes() != raw_rows(ours).tobytes():
            raise UsageError(
                f"{self._name}: its head applied to its last hidden states is not its own forward pass, so rows cannot "
                f"be computed apart from the trunk; this architecture is not supported as a reference"
            )
        self._check_causal(prefix, rows)
        self.in_pieces = longest > WHOLE_TOKENS and self._continues(ids, rows)
        return ours[-1:]

    def _check_causal(self, prefix: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
        changed = prefix.copy()
        changed[-1] = prefix[0] if prefix[0] != prefix[-1] else (prefix[-1] + 1) % self.vocabulary
        difference = _relative_error(self.hidden(changed, rows)[:-1], self.hidden(prefix, rows)[:-1])
        if difference > 4 * torch.finfo(DTYPES[self.dtype]).eps:
            raise UsageError(
                f"{self._name} is not a causal model: changing the last token changed the rows before it (relative "
                f"{difference:.1e}); a reference must predict each token from those before it alone"
            )

    def _continues(self, ids: torch.Tensor, rows: NDArray[np.int64]) -> bool:
        """Whether the model's cached forward in two pieces gives the states of one forward, to rounding."""
        try:
            halves = self._hidden_in_pieces(ids, rows, (len(rows) + 1) // 2)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return False
        limit = max(1e-3, 16 * torch.finfo(DTYPES[self.dtype]).eps)
        return bool(_relative_error(halves, self._trunk(ids).last_hidden_state[0]) < limit)

    def _hidden_in_pieces(self, ids: torch.Tensor, indices: NDArray[np.int64], piece: int) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        cache: dict[str, Any] = {}
        for start in range(0, ids.shape[1], piece):
            output = self.network.base_model(input_ids=ids[:, start : start + piece], use_cache=True, **cache)
            cache = {"past_key_values": output.past_key_values}
            inside = indices[(indices >= start) & (indices < start + piece)] - start
            kept.append(output.last_hidden_state[0, inside])
        return torch.cat(kept)

    def _trunk(self, ids: torch.Tensor) -> Any:
        return self.network.base_model(input_ids=ids, use_cache=False)

    @property
    def _name(self) -> str:
        return type(self.network).__name__


def read_config(model: str) -> Any:
    """The transformers config of a folder or hub id. Raises UsageError if there is none."""
    looks_local = model.startswith((".", "/", "~")) or Path(model).is_dir()
    folder = Path(model).expanduser()
    if looks_local and not (folder / "config.json").is_file():
        raise UsageError(f"{model} is not a model: expected a folder with a config.json; check the path")
    try:
        return transformers.AutoConfig.from_pretrained(str(folder) if looks_local else model, **_local(looks_local))
    except (OSError, ValueError) as error:
        reason = _first_line(error)
        raise UsageError(f"cannot read the model {model}: {reason}; expected a folder or a hub id") from error


def load_model(model: str, *, dtype: LogitsDtype, device_map: str | None, weights: Weights) -> ReferenceModel:
    """Load a causal LM in `dtype`, on the CPU unless `device_map` is given (passed to accelerate as it is).

    Raises UsageError for a missing or non-causal model, an incomplete checkpoint, an unknown dtype, and for `weights`
    that do not fit the checkpoint: "dequantised" needs a quantised one, and a quantised one needs "dequantised".
    """
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r} for a reference: expected one of {', '.join(DTYPES)}")
    config = read_config(model)
    quantization = _plan_dequantising(model, config, weights)
    # sdpa leaves out soft caps on attention scores without a word; the eager code applies them
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    options: dict[str, Any] = {"attn_implementation": "eager"} if softcap else {}
    options |= {} if device_map is None else {"device_map": device_map}
    try:
        with _no_progress_bars():
            network, loading = transformers.AutoModelForCausalLM.from_pretrained(
                str(Path(model).expanduser()), config=config, dtype=DTYPES[dtype], output_loading_info=True,
                **_local(Path(model).expanduser().is_dir()), **options,
            )  # fmt: skip
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise UsageError(f"cannot load {model} as a causal language model: {_first_line(error)}") from error
    absent = sorted([*loading["missing_keys"], *(str(key) for key in loading["mismatched_keys"])])
    if absent:
        raise UsageError(
            f"the checkpoint {model} does not fill {type(network).__name__}: {len(absent)} tensors are missing or of "
            f"another shape, first {absent[0]}; a reference must not run on random weights"
        )
    if network.base_model is network:
        raise UsageError(f"{type(network).__name__} has no trunk apart from its head; it cannot serve as a reference")
    network.eval()
    if quantization is not None:
        _require_plain_weights(model, network)
    wide = dtype in ("bfloat16", "float16") and device_map is None and not has_bf16_units()
    if wide:
        widen_products(network)
    return ReferenceModel(
        network=network,
        dtype=dtype,
        quantization=quantization,
        unused_weights=len(loading["unexpected_keys"]),
        wide_products=wide,
    )


def raw_rows(tensor: torch.Tensor) -> NDArray[Any]:
    """A float tensor as numpy in the recording's convention: bf16 as its bits in uint16, else the dtype itself."""
    tensor = tensor.detach().cpu().contiguous()
    is_bf16 = tensor.dtype is torch.bfloat16
    rows: NDArray[Any] = tensor.view(torch.int16).numpy().view(np.uint16) if is_bf16 else tensor.numpy()
    return rows


def precision_settings() -> Json:
    """The process-wide settings that decide how a float32 product is computed."""
    return {
        "torch_threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
    }


@contextmanager
def _exact_float32() -> Iterator[None]:
    """TF32 and bf16 shortcuts for float32 products off, gradients off; the settings before are restored."""
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn


@contextmanager
def _true_float64_exact(network: torch.nn.Module) -> Iterator[None]:
    with _exact_float32(), true_float64(network):
        yield


@contextmanager
def _answering(trunk: Any, answer: Any) -> Iterator[None]:
    """Make a module's forward return `answer`, whatever it is called with."""
    hooked = trunk.__dict__.get("forward")  # accelerate keeps its wrapper there
    trunk.forward = lambda *_args, **_kwargs: answer
    try:
        yield
    finally:
        if hooked is None:
            del trunk.forward
        else:
            trunk.forward = hooked


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def _plan_dequantising(model: str, config: Any, weights: Weights) -> str | None:
    """Mark a quantised checkpoint's config for dequantising; returns the method, None for an ordinary checkpoint."""
    if weights not in ("original", "dequantised"):
        raise UsageError(f"unknown weights {weights!r}: expected 'original' or 'dequantised'")
    settings = getattr(config, "quantization_config", None)
    if settings is None and weights == "dequantised":
        raise UsageError(f"{model} has no quantization_config: there is nothing to dequantise; use weights 'original'")
    if settings is None:
        return None
    method = str(settings.get("quant_method", "unknown method"))
    if weights == "original":
        raise UsageError(
            f"{model} is quantised ({method}): its original weights are not in it; give the checkpoint it was made "
            f"from, or choose weights 'dequantised' to take the quantised values as the truth"
        )
    config.quantization_config = {**settings, "dequantize": True}
    return method


def _require_plain_weights(model: str, network: Any) -> None:
    left = [name for name, tensor in network.named_parameters() if tensor.dtype not in DTYPES.values()]
    if left or any("Linear" in type(m).__name__ and type(m) is not torch.nn.Linear for m in network.modules()):
        raise UsageError(
            f"transformers did not dequantise {model} ({left[0] if left else 'quantised layers remain'}); dequantise "
            f"it into an ordinary checkpoint first and give that"
        )


def _relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over norm of the expected; computed in float64."""
    wide = expected.double()
    return float((value.double() - wide).norm() / wide.norm().clamp_min(1e-300))


def _local(is_folder: bool) -> dict[str, bool]:
    return {"local_files_only": is_folder or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
