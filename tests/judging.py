"""Comparisons made of columns alone, for tests of the judge and of what it shows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.types import Build, Comparison, Level, Manifest, Side

BUILD = Build(
    engine="vllm",
    engine_version="0",
    model="models/tiny",
    model_revision=None,
    weights_sha256="weights",
    dtype="bfloat16",
    device="cpu",
)


def manifest(recording: str = "candidate", build: Build = BUILD, **changes: Any) -> Manifest:
    """A complete recording of some rows."""
    made = Manifest(
        id=recording,
        build=build,
        corpus_name="synthetic",
        corpus_sha256="corpus",
        tokenizer_sha256="tokenizer",
        vocab_size=64,
        logits_dtype="bfloat16",
        level=Level.FULL,
        rows_expected=10,
        rows_written=10,
        complete=True,
        parts=(),
        seconds=600.0,
    )
    return replace(made, **changes)


def side(recording: str, build: Build = BUILD, **changes: Any) -> Side:
    """A recording at a path of its own."""
    return Side(path=recording, manifest=manifest(recording, build, **changes))


def columns(*, documents: int = 8, rows: int = 24, seed: int = 0, noise: float = 6.6) -> dict[str, NDArray[Any]]:
    """Two kinds x documents x depths 512 and 2048, both phases; KL noise from `seed`, sensitivity always the same."""
    cells = list(itertools.product(("code", "prose"), range(documents), (512, 2048), ("prefill", "decode")))
    total = len(cells) * rows
    index = np.tile(np.arange(rows), len(cells))
    decode = np.repeat([p == "decode" for _, _, _, p in cells], rows)
    fixed, rng = np.random.default_rng(99), np.random.default_rng(seed)
    kl = 6e-4 * fixed.lognormal(0, 0.8, total) * rng.gamma(noise, 1 / noise, total)
    nll = fixed.exponential(2.0, total)
    return {
        "segment": np.repeat([f"{k}{d}-d{z}" for k, d, z, _ in cells], rows),
        "document": np.repeat([f"{k}{d}" for k, d, _, _ in cells], rows),
        "kind": np.repeat([k for k, _, _, _ in cells], rows),
        "depth": np.repeat([z for _, _, z, _ in cells], rows),
        "phase": np.where(decode, "decode", "prefill"),
        "index": index,
        "step": np.where(decode, index, -1),
        "chunk_distance": np.where(decode, -1, index),
        "block_distance": index % 16,
        "kl20": kl,
        "kl_full": kl * 1.05,
        "flip": np.zeros(total, np.bool_),
        "margin": fixed.exponential(1.5, total),
        "error_plain": np.full(total, 0.05),
        "nll_reference": nll,
        "nll_candidate": nll + rng.normal(0, 0.01, total),
        "nan_candidate": np.zeros(total, np.int64),
        "nonfinite_reference": np.zeros(total, np.int64),
    }


def comparison(
    *, smoke: bool = False, floor: bool = True, documents: int = 8, rows: int = 24, **changes: Any
) -> Comparison:
    """A correct candidate held against a reference with a floor: a PASS until a test changes something."""
    made = Comparison(
        reference=side("reference", replace(BUILD, engine="huggingface", dtype="float32")),
        candidate=side("candidate"),
        positions=columns(documents=documents, rows=rows, seed=1),
        floor_side=side("floor", replace(BUILD, engine="huggingface")) if floor else None,
        floor=columns(documents=documents, rows=rows, seed=2) if floor else None,
        smoke=smoke,
    )
    return replace(made, **changes)
