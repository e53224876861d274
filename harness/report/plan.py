"""What a plan says, as facts (JSON-ready)."""

from __future__ import annotations

import math
from typing import Any

from harness.power import CERTAIN, Plan
from harness.types import Corpus, Manifest


def plan_facts(corpus: Corpus, found: Plan, like: Manifest | None) -> dict[str, Any]:
    """A plan for readers: what it would cost, on whose word, and the smallest ratio to the floor it would turn red."""
    return {
        "corpus": f"{corpus.name} {corpus.version}, {len(corpus.segments)} segments{', smoke' if corpus.smoke else ''}",
        "rows": found.rows,
        "bytes": found.bytes,
        "prefill_tokens": found.prefill_tokens,
        "decode_steps": found.decode_steps,
        "minutes": None if found.minutes is None else round(found.minutes, 1),
        "minutes_from": _minutes_from(found, like),
        "power": f"the smallest ratio to the floor that would be a FAIL with probability {CERTAIN:.0%}, if rows differ "
        "as between two correct bf16 builds of SmolLM2-135M; another model may be noisier",
        "everywhere_alike": _ratio(found.everywhere),
        "detects": {str(stratum): f"{_ratio(ratio)} (limit {limit:g})" for stratum, limit, ratio in found.detectable},
    }


def _minutes_from(found: Plan, like: Manifest | None) -> str:
    if found.minutes is None or like is None or like.seconds is None:
        return "nothing to go by: record a small corpus with the engine and give it with --like DIR"
    return (
        f"{like.build.engine} on {like.build.device} took {like.seconds / 60:.1f} minutes for {like.rows_written} rows "
        f"of {like.corpus_name}; scaled by tokens, so longer contexts than its own will take more"
    )


def _ratio(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "nothing"
