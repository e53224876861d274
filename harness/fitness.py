"""What may be judged at all, and which recordings may serve as floor, baseline or twin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from harness.gates import gate_for, names_model
from harness.types import OVERALL, Build, Comparison, Gates, Side


def barred(comparison: Comparison) -> list[str]:
    """Reasons why nothing can be said about a comparison; empty if it can be judged."""
    reasons = [finding.message for finding in comparison.findings if finding.fatal]
    for role, side in (("reference", comparison.reference), ("candidate", comparison.candidate)):
        manifest = side.manifest
        if not manifest.complete:
            missing = manifest.rows_expected - manifest.rows_written
            reasons.append(
                f"the {role} {side.path} lacks {missing} of {manifest.rows_expected} rows: resume the recording"
            )
        if manifest.instrument is not None and not manifest.instrument.passed:
            reasons.append(
                f"the {role} {side.path} is invalid: its rows differ from the engine's own log-probs; record it again"
            )
        if manifest.build.host.get("tf32") is True and manifest.build.dtype == "float32":
            reasons.append(
                f"the {role} {side.path} was computed with TF32: float32 in name only; turn it off and record again"
            )
    if not len(comparison.positions["kl20"]):
        reasons.append("there are no positions to judge: the corpus scores none")
    broken = int((np.asarray(comparison.positions["nonfinite_reference"]) > 0).sum())
    if broken:
        reasons.append(
            f"the reference {comparison.reference.path} has NaN or infinite logits in {broken} rows: record it again"
        )
    return reasons


def unfit_floor(comparison: Comparison, gates: Gates) -> tuple[str | None, list[str]]:
    """Why the floor cannot be the denominator (None if it can), and what a reader should know about it."""
    side, columns = comparison.floor_side, comparison.floor
    if side is None or columns is None:
        of = ", an accepted build of the same engine over the same corpus" if comparison.of_itself else ""
        return f"no floor was given: without the normal difference nothing can pass; add --floor DIR{of}", []
    reason = _not_independent(side, comparison, "floor") or _coarser(
        side.manifest.build, comparison.candidate.manifest.build
    )
    if reason:
        return f"the floor {side.path} is refused: {reason}", []
    divergence = np.asarray(columns["kl20"], np.float64)
    if not np.isfinite(divergence).all():
        return (
            f"the floor {side.path} is refused: its KL is not finite in {int((~np.isfinite(divergence)).sum())} rows",
            [],
        )
    level = float(divergence.mean())
    build = side.manifest.build
    least = gate_for(gates, "floor_mean_at_least", build, OVERALL).limit
    if level < least and comparison.of_itself:
        return (
            f"the floor {side.path} is refused: its decode rows are its prefill rows (mean KL20 {level:.2g} nat), as "
            "where both come from one forward pass; give an accepted build of the engine under judgement",
            [],
        )
    if level < least:
        return (
            f"the floor {side.path} is refused: its mean KL20 of {level:.2g} nat is below {least:.2g}, what the "
            "reference itself resolves; hold a float32 build against the reference as a twin instead",
            [],
        )
    if comparison.of_itself:  # the ranges are of KL to a reference
        return None, []
    ranges = [r for r in gates.floor_ranges if names_model(r.model, build) and r.dtype == build.dtype]
    for known in ranges:
        if not known.low <= level <= known.high:
            return (
                f"the floor {side.path} is refused: its mean KL20 of {level:.2g} nat is outside {known.low:.2g} to "
                f"{known.high:.2g}, recorded for {known.model} in {known.dtype} ({known.reason})",
                [],
            )
    notes = (
        [] if ranges else [f"no range is recorded for floors of {build.model} in {build.dtype}: it was taken as given"]
    )
    if side.manifest.id == comparison.candidate.manifest.id:
        notes.append(
            "the candidate's rows are bit-equal to the floor's, which another build made: the ratio is exactly 1"
        )
    return None, notes


def unfit_baseline(comparison: Comparison) -> str | None:
    """Why the baseline cannot say what changed; None if it can, or if none was given."""
    side, columns = comparison.baseline_side, comparison.baseline
    if side is None or columns is None:
        return None
    reason = _not_independent(side, comparison, "baseline")
    if reason is None and not np.isfinite(columns["kl20"]).all():
        reason = "its KL is not finite in every row"
    if reason is None and not float(np.sum(columns["kl20"])) > 0:
        reason = "it is bit-equal to the reference, so that no ratio to it exists"
    return reason and f"the baseline {side.path} is refused: {reason}"


def not_covered(production: Build, twin: Comparison) -> Iterator[str]:
    """What of the candidate a twin does not speak for: other code, and layers whose attention backend differs."""
    build = twin.candidate.manifest.build
    if build.engine_version != production.engine_version:
        yield f"the candidate's engine version ({production.engine_version}; the twin ran {build.engine_version})"
    if [patch.get("sha256") for patch in build.patches] != [patch.get("sha256") for patch in production.patches]:
        yield "the candidate's patches (the twin ran with others)"
    other = build.attention
    if not production.attention or not other:
        yield "attention (the recordings do not say which backend each layer used)"
        return
    pairs = [(backend, other.get(layer, "nothing")) for layer, backend in production.attention.items()]
    for ours, theirs in sorted({pair for pair in pairs if pair[0] != pair[1]}):
        yield f"attention in {pairs.count((ours, theirs))} layers: {ours} in production, {theirs} in the twin"


def unsaid(comparison: Comparison, twins: Sequence[Comparison]) -> Iterator[str]:
    """Of float32 recordings, whether their products were float32: TF32 cannot be seen in the rows alone."""
    sides = [("reference", comparison.reference), *(("twin", twin.candidate) for twin in twins)]
    for role, side in sides:
        build = side.manifest.build
        silent = not isinstance(build.host.get("tf32"), bool)
        if silent and build.dtype == "float32" and build.device not in ("cpu", "mps"):
            yield (
                f"the {role} {side.path} does not say whether TF32 was off on {build.device}: with it on, float32 is "
                "float32 in name only"
            )


def _not_independent(side: Side, comparison: Comparison, role: str) -> str | None:
    candidate = comparison.candidate
    # Rows alone cannot tell: a new build that changed no bit has the candidate's rows too, and is a fit floor.
    if side.path == candidate.path or (
        side.manifest.id == candidate.manifest.id and side.manifest.build == candidate.manifest.build
    ):
        return "it is the candidate itself; give a recording of an accepted build"
    faults = [
        str(patch.get("name", "unnamed")) for patch in side.manifest.build.patches if patch.get("kind") != "benign"
    ]
    if faults:
        return f"it was recorded with the fault {', '.join(faults)}; a {role} must be a build taken as correct"
    ours, theirs = candidate.manifest.build, side.manifest.build
    same = (
        (ours.weights_sha256 == theirs.weights_sha256)
        if ours.weights_sha256 and theirs.weights_sha256
        else ours.model == theirs.model
    )
    if not same:
        return f"it is of another model ({theirs.model}, not {ours.model}) or weights; record a {role} of the same"
    return None


def _coarser(floor: Build, candidate: Build) -> str | None:
    """A floor of another or coarser precision is not this candidate's normal difference."""
    for what, theirs, ours, plain in (
        ("dtype", floor.dtype, candidate.dtype, ()),
        ("quantisation", floor.quantization, candidate.quantization, (None,)),
        ("kv-cache dtype", floor.kv_cache_dtype, candidate.kv_cache_dtype, (None, "auto", candidate.dtype)),
    ):
        if theirs != ours and theirs not in plain:
            return f"its {what} is {theirs}, the candidate's {ours}; record a floor in the candidate's precision"
    return None
