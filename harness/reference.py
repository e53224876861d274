"""Record what a model should compute: a HuggingFace run over a corpus, full-vocabulary logits at every scored row.

One forward per segment gives the hidden states; the head is applied to scored rows only, a few at a time, so memory
grows with neither the corpus nor positions x vocabulary. A reference has one way of computing a row: an index scored
in both phases is the same row of the same forward, written under both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness import _environment
from harness.corpus import check_fits
from harness.errors import LogitgateError, UsageError
from harness.reference_model import (
    PIECE_TOKENS,
    ReferenceModel,
    Weights,
    load_model,
    precision_settings,
    raw_rows,
    read_config,
)
from harness.storage import PartWriter, RowsPresent, begin_recording, finish_recording
from harness.types import Block, Build, Corpus, Json, LogitsDtype, Manifest, Phase, Segment

HEAD_ROWS = 64  # rows the head is applied to at once
OWN_ERROR_TOKENS = 384  # of the shallowest segment, run again in float64
OWN_ERROR_ROWS = 64  # evenly spread over them

_PACKAGES = ("accelerate", "compressed-tensors", "huggingface-hub", "logitgate", "numpy", "pyarrow", "safetensors",
             "tokenizers", "torch", "transformers")  # fmt: skip
_ENVIRONMENT = ("ATEN_", "CUBLAS_", "CUDA_", "DNNL_", "HF_", "KMP_", "MKL_", "NVIDIA_TF32", "OMP_", "ONEDNN_",
                "PYTORCH_", "TORCH_", "TRANSFORMERS_")  # fmt: skip

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all), counting rows of both phases."""


def record_reference(
    model: str,
    corpus: Corpus,
    folder: Path,
    *,
    dtype: LogitsDtype = "float32",
    device_map: str | None = None,
    weights: Weights = "original",
    resume: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Record `model` (a folder or hub id) over `corpus` into `folder`.

    A float32 recording reports its own error against true float64, on a sample, in `Manifest.own_error`; where that
    cannot be had, the entry is {"unavailable": reason}. `device_map` goes to accelerate as it is; without it the model
    runs on the CPU. `weights` says what a quantised checkpoint stands for: see `load_model`. With `resume`, rows
    already there are kept and the rest is added; bits do not depend on where the run was interrupted.

    Raises UsageError for a model that cannot serve or a corpus that does not fit it, StorageError for the folder, and
    LogitgateError when the model itself computes NaN or infinite logits.
    """
    started = time.monotonic()
    _require_fit(model, corpus)
    reference = load_model(model, dtype=dtype, device_map=device_map, weights=weights)
    shallowest = min(corpus.segments, key=lambda segment: len(segment.token_ids))
    longest = max(len(segment.token_ids) for segment in corpus.segments)
    with reference.arithmetic():
        row = raw_rows(reference.self_check(shallowest.token_ids, longest=longest))
        sample = _own_error_sample(reference, shallowest) if dtype == "float32" else None
        build = _describe(model, reference, device_map=device_map, weights=weights)
        form: dict[str, Any] = {"vocab_size": row.shape[1], "logits_dtype": _dtype_name(row)}
        present = begin_recording(folder, corpus, build, resume=resume, **form)
        # closing keeps what was computed before an error or an interrupt, for a resume
        with closing(PartWriter(folder, **form)) as writer:
            _record_rows(reference, corpus, present, writer, progress)
    own_error = None if sample is None else _own_error(reference, shallowest, sample, offloaded=device_map is not None)
    seconds = None if len(present) else time.monotonic() - started
    return finish_recording(folder, build, own_error=own_error, seconds=seconds)


def segment_blocks(
    reference: ReferenceModel, segment: Segment, missing: Mapping[Phase, NDArray[np.int64]]
) -> Iterator[Block]:
    """The missing rows of one segment, at most HEAD_ROWS of them at a time. Call in `reference.arithmetic()`.

    Rows are grouped by what the segment scores, not by what is missing: a resumed recording has the same bits.
    """
    scored = np.unique(np.concatenate([segment.indices(phase) for phase in Phase]))
    hidden = reference.hidden(segment.token_ids, scored)
    for start in range(0, len(scored), HEAD_ROWS):
        rows = scored[start : start + HEAD_ROWS]
        wanted = {phase: np.isin(rows, indices) for phase, indices in missing.items()}
        if not any(inside.any() for inside in wanted.values()):
            continue
        logits = reference.logits(hidden[start : start + HEAD_ROWS])
        _require_numbers(logits, segment.id, rows)
        raw = raw_rows(logits)
        for phase, inside in wanted.items():
            if inside.any():
                indices = rows[inside]
                targets = segment.targets(indices)
                yield Block(segment=segment.id, phase=phase, indices=indices, targets=targets, logits=raw[inside])


def _record_rows(
    reference: ReferenceModel, corpus: Corpus, present: RowsPresent, writer: PartWriter, progress: Progress | None
) -> None:
    """Write every row that is not there yet."""
    done = len(present)
    for segment in corpus.segments:
        missing = {phase: present.missing(segment, phase) for phase in Phase}
        if not any(len(indices) for indices in missing.values()):
            continue
        for block in segment_blocks(reference, segment, missing):
            writer.append(block)
            done += len(block.indices)
            if progress is not None:
                progress(done, corpus.rows)


def _require_fit(model: str, corpus: Corpus) -> None:
    """Check the corpus against the model's config, before any weight is loaded."""
    config = read_config(model).get_text_config()
    longest = getattr(config, "max_position_embeddings", None)  # absent: the architecture has no such limit
    check_fits(
        corpus,
        max_positions=longest if longest is not None else max(len(s.token_ids) for s in corpus.segments),
        vocab_size=config.vocab_size,
        tokenizer_sha256=None,
    )


def _require_numbers(logits: torch.Tensor, segment: str, rows: NDArray[np.int64]) -> None:
    """Raise where a row has NaN or +inf, or no finite logit at all; -inf marks an id as impossible and is allowed."""
    if bool(torch.isfinite(logits).all()):
        return
    bad = torch.isnan(logits) | torch.isposinf(logits) | torch.isneginf(logits).all(dim=-1, keepdim=True)
    where = bad.any(dim=-1).cpu().numpy()
    if where.any():
        first = int(np.argmax(where))
        raise LogitgateError(
            f"the reference model computed NaN or infinite logits: segment {segment}, index {rows[first]}, "
            f"{int(bad[first].sum())} of {logits.shape[-1]} ids, {int(where.sum())} of {len(rows)} rows around it; a "
            f"reference must be finite: check the checkpoint, or use a wider dtype"
        )


def _own_error_sample(reference: ReferenceModel, segment: Segment) -> NDArray[np.float32]:
    rows = _own_error_rows(segment)
    return raw_rows(reference.logits(reference.hidden(segment.token_ids, rows)))


def _own_error_rows(segment: Segment) -> NDArray[np.int64]:
    last = min(len(segment.token_ids) - 2, OWN_ERROR_TOKENS - 1)
    return np.unique(np.linspace(0, last, OWN_ERROR_ROWS).astype(np.int64))


def _own_error(reference: ReferenceModel, segment: Segment, sample: NDArray[np.float32], *, offloaded: bool) -> Json:
    """KL20(true f64 || f32) on the sample's rows, in nats. Widens the loaded model: it is of no use afterwards."""
    from harness.metrics import position_metrics

    rows = _own_error_rows(segment)
    weights_bytes = sum(tensor.nbytes for tensor in reference.network.parameters())
    memory = _environment.available_memory()
    if offloaded:
        return {"unavailable": "the model was placed by a device map; float64 needs all of it in one memory"}
    if memory is not None and memory < 1.5 * weights_bytes:
        return {"unavailable": f"float64 weights need {2 * weights_bytes / 1e9:.1f} GB, {memory / 1e9:.1f} GB are free"}
    try:
        reference.network.double()
        reference.dtype = "float64"
        with reference.arithmetic():
            exact = raw_rows(reference.logits(reference.hidden(segment.token_ids, rows)))
    except (UsageError, RuntimeError, TypeError, MemoryError) as error:
        return {"unavailable": str(error)}
    columns = position_metrics(exact, "float64", sample, "float32", segment.targets(rows))
    return {
        "metric": "KL20(float64 || float32), nats",
        "median": float(np.median(columns["kl20"])),
        "max": float(np.max(columns["kl20"])),
        "largest_logit_error": float(np.max(np.abs(exact - sample))),
        "positions": len(rows),
        "segment": segment.id,
        "tokens": int(rows[-1]) + 1,
    }


def _describe(model: str, reference: ReferenceModel, *, device_map: str | None, weights: Weights) -> Build:
    from harness.embedded import weights_sha256

    config = reference.network.config
    cuda = reference.device.type == "cuda"
    return Build(
        engine="huggingface",
        engine_version=_environment.package_versions(["transformers"])["transformers"],
        model=model,
        model_revision=getattr(config, "_commit_hash", None),
        weights_sha256=weights_sha256(model),
        dtype=reference.dtype,
        device=torch.cuda.get_device_name(reference.device) if cuda else str(reference.device),
        quantization=reference.quantization,
        attention={"all layers": reference.attention},
        requested={"dtype": reference.dtype, "device_map": device_map, "weights": weights},
        resolved={
            "architecture": type(reference.network).__name__,
            "attn_implementation": reference.attention,
            "true_float64": reference.dtype == "float64",
            "wide_products": reference.wide_products,
            "head_rows": HEAD_ROWS,
            "piece_tokens": PIECE_TOKENS if reference.in_pieces else None,
            "unused_weights": reference.unused_weights,
            **precision_settings(),
        },
        packages=_environment.package_versions(_PACKAGES),
        environment=_environment.relevant_environment(_ENVIRONMENT),
        host={**_environment.host_facts(), "tf32": _environment.tf32_on(str(reference.device))},
        git=_environment.git_state(),
    )


def _dtype_name(raw: NDArray[Any]) -> LogitsDtype:
    names: dict[str, LogitsDtype] = {
        "uint16": "bfloat16", "float16": "float16", "float32": "float32", "float64": "float64",
    }  # fmt: skip
    return names[raw.dtype.name]
