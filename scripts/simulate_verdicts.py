"""How often is the verdict right? Synthetic and recorded noise, thousands of comparisons, through harness.stats itself.

    python scripts/simulate_verdicts.py [--recorded CANDIDATE.parquet FLOOR.parquet] [--runs 2000] [-o results]

writes simulation.md and simulation.json. The two Parquet files are positions.parquet of two correct builds compared
with one reference over one corpus; the first is taken as the candidate, the second as the floor.

Shape legend: N runs, D documents, Z depths, P rows of one segment in one phase, U units (segment x phase).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.gates import gate_for, load_gates
from harness.metrics import position_metrics
from harness.stats import Ratios, Units, ratios
from harness.storage import load_positions
from harness.summary import exact_interval, flip_bins
from harness.types import OVERALL, Build, Gates

Floats = NDArray[np.float64]
Draw = Callable[["Shape", int, np.random.Generator], tuple[Floats, Floats]]
"""Sums of KL20 per unit for candidate and floor, [N, U] each, and a true ratio of 1 in every stratum."""

SEED = 20_240_607
CHUNK = 50  # runs drawn at once
BENIGN_TOP = 1.12
"""Largest ratio of a correct build that the study asks about: the top of the benign band."""
KINDS = ("code", "prose")
PHASES = ("decode", "prefill")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """How two correct builds' KL differ, row by row and text by text. Pairs are by phase, in the order of PHASES."""

    row_noise: float = 1.6  # standard error of a log ratio of mean KL20 times sqrt(positions), from rows alone
    row_correlation: float = 0.37  # of candidate's and floor's KL20
    by_document: tuple[float, float] = (0.06, 0.06)  # log sd of the true ratio
    by_segment: tuple[float, float] = (0.0, 0.0)  # beyond its document's


QUICK_RUN = Seen()
"""Measured on the quick corpus: stock vLLM in bf16 and with `gemm_f32`, each against HF bf16, both phases pooled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A corpus: `documents` of each kind, the same tokens of each scored at every depth, in both phases."""

    name: str
    documents: int
    depths: tuple[int, ...]
    rows: int  # of one segment in one phase
    smoke: bool

    def units(self) -> Units:
        """Axes kind, document, depth, phase, flattened in this order."""
        cells = [(k, d, z, p) for k in KINDS for d in range(self.documents) for z in self.depths for p in PHASES]
        return Units(
            segment=np.array([f"{k}-{d}-d{z}" for k, d, z, _ in cells]),
            document=np.array([f"{k}-{d}" for k, d, _, _ in cells]),
            kind=np.array([k for k, _, _, _ in cells]),
            depth=np.array([z for _, _, z, _ in cells]),
            phase=np.array([p for _, _, _, p in cells]),
            rows=np.full(len(cells), self.rows),
            of_position=np.empty(0, np.intp),
        )


EMBEDDED = Shape(name="embedded", documents=8, depths=(512, 2048, 7500), rows=128, smoke=False)
QUICK = Shape(name="quick", documents=2, depths=(512, 2048), rows=64, smoke=True)


def softmax_noise(bank: int = 3000, draws: int = 40, sigma: float = 0.05) -> tuple[Draw, dict[str, Any]]:
    """Rows with realistic margins, and Gaussian noise of known sigma on every logit; KL20 by the product's own code.

    A bank of `bank` rows x `draws` noise realisations is made once. Candidate and floor take different realisations
    of the same row, so a row's sensitivity is shared, across depths too; its noise is not.
    """
    rng = np.random.default_rng(SEED)
    vocabulary = 256
    reference = rng.normal(size=(bank, vocabulary)) * rng.lognormal(math.log(4.0), 0.6, (bank, 1))
    scale = sigma * rng.lognormal(0.0, 0.3, (bank, 1))  # some rows are noisier, for both builds alike
    targets = np.zeros(bank, np.int32)
    columns = [
        position_metrics(reference, "float64", reference + rng.normal(size=reference.shape) * scale, "float64", targets)
        for _ in range(draws)
    ]
    kl = np.stack([c["kl20"] for c in columns], axis=1)
    pairs = [flip_bins(c, columns[(i + 1) % draws]) for i, c in enumerate(columns)]
    bins = [
        {
            "margin": [pair.low, pair.high],
            "rate_observed": sum(p[b].candidate for p in pairs) / max(1, sum(p[b].positions for p in pairs)),
            "rate_predicted": sum(p[b].predicted for p in pairs) / max(1, sum(p[b].positions for p in pairs)),
        }
        for b, pair in enumerate(pairs[0])
    ]

    def draw(shape: Shape, runs: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        row = _shared(rng.integers(bank, size=(runs, 2 * shape.documents, 1, 2, shape.rows)), shape)
        chosen = [rng.integers(draws, size=row.shape) for _ in range(2)]
        chosen[1] = np.where(chosen[1] == chosen[0], (chosen[1] + 1) % draws, chosen[1])
        return _sums(kl[row, chosen[0]]), _sums(kl[row, chosen[1]])

    return draw, {"kl20": _quantiles(kl), "flips": bins}


def heavy_tails(seen: Seen = QUICK_RUN, *, document: float = 0.0, token: float = 0.0) -> Draw:
    """Sensitivity lognormal, shared by both builds; noise gamma, each build's own; matched to rows that were seen.

    With A the mean square of sensitivity over its squared mean and k the gamma's shape, the rows' noise is
    sqrt(2 A / k) and their correlation (A - 1) / (A (1 + 1 / k) - 1): two moments, two parameters. `document` and
    `token` are the log sd of a true ratio that differs by document, or by token at all depths alike.
    """
    square = seen.row_noise**2
    spread = 1 + seen.row_correlation * square / (2 * (1 - seen.row_correlation))
    sd, shape_of_noise = math.sqrt(math.log(spread)), 2 * spread / square

    def draw(shape: Shape, runs: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        places = (runs, 2 * shape.documents, 1, 2, shape.rows)
        sensitivity = _shared(rng.lognormal(0.0, sd, places), shape)
        ratio = rng.lognormal(-(document**2) / 2, document, (runs, 2 * shape.documents, 1, 1, 1))
        if token:
            ratio = ratio * _shared(rng.lognormal(-(token**2) / 2, token, places), shape)
        noise = [rng.gamma(shape_of_noise, 1 / shape_of_noise, sensitivity.shape) for _ in range(2)]
        return _sums(sensitivity * noise[0] * ratio), _sums(sensitivity * noise[1])

    return draw


def varied(seen: Seen) -> Draw:
    """The heavy tails, with a true ratio that differs by document and by segment, in each phase by its own measure."""
    by_document, by_segment = np.array(seen.by_document), np.array(seen.by_segment)  # [phase]
    rows = heavy_tails(seen)

    def draw(shape: Shape, runs: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        candidate, floor = rows(shape, runs, rng)
        documents = (runs, 2 * shape.documents)
        log_ratio = by_document * rng.normal(size=(*documents, 1, 2))
        log_ratio = log_ratio + by_segment * rng.normal(size=(*documents, len(shape.depths), 2))
        mean_one = log_ratio - (by_document**2 + by_segment**2) / 2
        return candidate * np.exp(mean_one).reshape(candidate.shape), floor

    return draw


def heterogeneity(log_ratio: Floats, noise: float) -> tuple[float, float]:
    """Log sd of a ratio by document and by segment, from [kind, document, depth] and the sd that rows alone give.

    Analysis of variance: documents and depths are centred within their kind; what is below zero is zero.
    """
    _, documents, depths = log_ratio.shape
    by_document = log_ratio.mean(axis=2)
    between = by_document.var(axis=1, ddof=1).mean()
    kinds = by_document.mean(axis=1)[:, None, None]
    rest = log_ratio - by_document[..., None] - log_ratio.mean(axis=1, keepdims=True) + kinds
    within = (rest**2).sum() / (len(log_ratio) * (documents - 1) * (depths - 1))
    return math.sqrt(max(0.0, between - within / depths)), math.sqrt(max(0.0, within - noise**2))


def _seen(table: Floats) -> Seen:
    """What rows [build, kind, document, depth, phase, row] show; residuals within segments give the rows' own noise."""
    sums, rows = table.sum(axis=-1), table.shape[-1]
    residual = table[0] / sums[0][..., None] - table[1] / sums[1][..., None]
    noise = np.sqrt((residual**2).sum(axis=-1).mean(axis=(0, 1, 2)) * rows / (rows - 1))  # [phase] of one segment
    spread = [heterogeneity(np.log(sums[0] / sums[1])[..., p], float(noise[p])) for p in range(2)]
    return Seen(
        row_noise=float(np.sqrt((noise**2).mean() * rows)),
        row_correlation=float(np.corrcoef(table.reshape(2, -1))[0, 1]),
        by_document=(spread[0][0], spread[1][0]),
        by_segment=(spread[0][1], spread[1][1]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Two real builds: rows to resample, the shape they came in, and what they show."""

    draw: Draw
    shape: Shape
    seen: Seen
    facts: dict[str, Any]


def recorded(candidate: Path, floor: Path) -> Recorded:
    """Resampled rows of two real builds: documents with replacement, then blocks of 16 tokens, alike at all depths.

    Scaled so that the mean ratio over all rows is 1 in each cell; within a cell ratios keep the differences they have.
    """
    ours, theirs = load_positions(candidate), load_positions(floor)
    if not all(np.array_equal(ours[c], theirs[c]) for c in ("segment", "phase", "index")):
        raise SystemExit(f"{candidate} and {floor} do not have the same rows: compare both over one corpus")
    depths = tuple(int(z) for z in np.unique(ours["depth"]))
    documents = [np.unique(ours["document"][ours["kind"] == kind]) for kind in KINDS]
    count = min(len(names) for names in documents)
    place = [ours["phase"] == phase for phase in PHASES]
    rows = min(
        int(np.sum((ours["document"] == d) & (ours["depth"] == z) & phase))
        for names in documents
        for d in names[:count]
        for z in depths
        for phase in place
    )
    table = np.empty((2, 2, count, len(depths), 2, rows))  # build, kind, document, depth, phase, row
    for k, names in enumerate(documents):
        for d, name in enumerate(names[:count]):
            for z, depth in enumerate(depths):
                for p, phase in enumerate(place):
                    inside = np.flatnonzero((ours["document"] == name) & (ours["depth"] == depth) & phase)[-rows:]
                    table[:, k, d, z, p] = ours["kl20"][inside], theirs["kl20"][inside]
    raw = table.reshape(2, -1).copy()
    seen = _seen(table)
    table[0] *= table[1].mean(axis=(1, 4), keepdims=True) / table[0].mean(axis=(1, 4), keepdims=True)
    block = 16

    def draw(shape: Shape, runs: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        kind = np.repeat(np.arange(2), shape.documents)[None, :, None, None, None]
        document = rng.integers(count, size=(runs, 2 * shape.documents, 1, 1, 1))
        start = rng.integers(rows, size=(runs, 2 * shape.documents, 1, 2, shape.rows // block))
        row = ((start[..., None] + np.arange(block)) % rows).reshape(
            *start.shape[:-1], -1
        )  # round the end: each row alike
        depth = np.arange(len(shape.depths))[None, None, :, None, None]
        phase = np.arange(2)[None, None, None, :, None]
        found = table[:, kind, document, depth, phase, row]
        return _sums(found[0]), _sums(found[1])

    facts = {
        "kl20": _quantiles(raw[0]),
        "kl20_floor": _quantiles(raw[1]),
        "ratio": float(raw[0].mean() / raw[1].mean()),
        "row_noise": seen.row_noise,
        "row_correlation": seen.row_correlation,
        "documents_per_kind": count,
        "depths": list(depths),
        "rows_per_segment_and_phase": rows,
        **{
            f"log_sd_{phase}": {"document": d, "segment": s}
            for phase, d, s in zip(PHASES, seen.by_document, seen.by_segment, strict=True)
        },
    }
    shape = Shape(name="recorded", documents=count, depths=depths, rows=rows, smoke=False)
    return Recorded(draw=draw, shape=shape, seen=seen, facts=facts)


def _shared(values: NDArray[Any], shape: Shape) -> NDArray[Any]:
    """The same tokens at every depth: the depth axis repeated."""
    return np.repeat(values, len(shape.depths), axis=2)


def _sums(kl: Floats) -> Floats:
    return np.asarray(kl.sum(axis=-1).reshape(len(kl), -1), np.float64)


def _quantiles(kl: Floats) -> dict[str, float]:
    return {
        "median": float(np.median(kl)),
        "mean": float(kl.mean()),
        "p90": float(np.quantile(kl, 0.9)),
        "p99": float(np.quantile(kl, 0.99)),
        "max": float(kl.max()),
    }


def coverage(found: Ratios) -> dict[str, list[float]]:
    """How often the two-sided 95 % interval holds the truth, by stratum, grouped by level."""
    inside = ((found.low(0.025) < 0) & (found.high(0.025) > 0)).mean(axis=0)
    level = ["cells" if s.kind else "phases" if s.phase else "overall" for s in found.strata]
    return {
        name: [float(x) for x, at in zip(inside, level, strict=True) if at == name] for name in dict.fromkeys(level)
    }


def verdicts(found: Ratios, limit: float, fail: float, passed: float) -> dict[str, float]:
    """Shares of the three words."""
    failed = (found.low(fail / len(found.strata)) > math.log(limit)).any(axis=-1)
    through = (found.high(passed) < math.log(limit)).all(axis=-1) & ~failed
    return {
        "FAIL": float(failed.mean()),
        "PASS": float(through.mean()),
        "INCONCLUSIVE": float((~failed & ~through).mean()),
    }


def least_limit(found: Ratios, passed: float) -> float:
    """Smallest limit at which 95 % of the comparisons pass."""
    return float(np.exp(np.quantile(found.high(passed).max(axis=-1), 0.95)))


def scenarios(units: Units, shape: Shape) -> Iterator[tuple[str, Floats]]:
    """Name and true ratio per unit, [U]. A smoke corpus has no cells: only what all rows share is its to see."""
    if shape.smoke:
        for ratio in (0.43, 1.0, BENIGN_TOP, 1.8, 2.5, 4.0):
            yield f"global x{ratio}", np.full(len(units.rows), ratio)
        return
    for ratio in (0.43, 0.6, 0.8, 1.0, 1.12):
        yield f"global x{ratio}", np.full(len(units.rows), ratio)
    cell = (units.phase == "decode") & (units.kind == "prose") & (units.depth == shape.depths[-1])
    for ratio in (1.5, 2.0):
        yield f"one cell x{ratio}", np.where(cell, ratio, 1.0)
    for ratio in (1.8, 2.5):
        yield f"global x{ratio}", np.full(len(units.rows), ratio)


def study(shape: Shape, draw: Draw, runs: int) -> dict[str, Any]:
    """Coverage and verdicts of one shape under one noise; every scenario judges the same draws, scaled."""
    gates = load_gates(None)
    build = Build(engine="", engine_version="", model="", model_revision=None, weights_sha256="", dtype="", device="")
    limit = gate_for(gates, "ratio_to_floor", build, OVERALL, smoke=shape.smoke).limit
    units, rng = shape.units(), np.random.default_rng(SEED)
    parts = [draw(shape, min(CHUNK, runs - start), rng) for start in range(0, runs, CHUNK)]
    candidate, floor = (np.concatenate([part[i] for part in parts]) for i in range(2))
    result: dict[str, Any] = {"runs": runs, "limit": limit, "coverage": {}, "verdicts": {}}
    rules = {
        "rule": ratios(units, candidate, floor),
        "segments as clusters": ratios(replace(units, document=units.segment), candidate, floor),
        "documents never borrow": ratios(units, candidate, floor, few_freedom=0),
    }
    result["coverage"] = {name: coverage(found) for name, found in rules.items()}
    result["standard_error_overall"] = float(np.median(rules["rule"].error[:, 0]))
    result["noise_per_position"] = float(np.median(rules["rule"].error[:, 3:] * np.sqrt(rules["rule"].positions[3:])))
    benign = ratios(units, candidate * BENIGN_TOP, floor)
    result["least_limit"] = least_limit(benign.without_cells() if shape.smoke else benign, gates.pass_level)
    for name, truth in scenarios(units, shape):
        for rule, few in (("rule", None), ("documents never borrow", 0)):
            found = (
                ratios(units, candidate * truth, floor)
                if few is None
                else ratios(units, candidate * truth, floor, few_freedom=few)
            )
            found = found.without_cells() if shape.smoke else found
            result["verdicts"].setdefault(name, {})[rule] = verdicts(found, limit, gates.fail_level, gates.pass_level)
    if not shape.smoke:
        result["cell_by_cell"] = cell_by_cell(units, candidate, floor, limit, gates)
    return result


def cell_by_cell(units: Units, candidate: Floats, floor: Floats, limit: float, gates: Gates) -> dict[str, float]:
    """Share of FAILs where one cell alone is twice as bad, for each cell: no text is as noisy as the next."""
    shares = {}
    for s in ratios(units, candidate, floor).strata:
        if s.kind is not None:
            inside = (units.phase == str(s.phase)) & (units.kind == s.kind) & (units.depth == s.depth)
            found = ratios(units, candidate * np.where(inside, 2.0, 1.0), floor)
            shares[str(s)] = verdicts(found, limit, gates.fail_level, gates.pass_level)["FAIL"]
    return shares


BARS: dict[str, tuple[str, Callable[[float], bool], str]] = {
    **{f"global x{r}": ("FAIL", lambda x: x <= 0.01, "FAIL <= 1 %") for r in (0.43, 0.6, 0.8, 1.12)},
    "global x1.0": ("PASS", lambda x: x >= 0.95, "PASS >= 95 %"),
    "one cell x1.5": ("PASS", lambda x: x <= 0.01, "PASS <= 1 %"),
    "one cell x2.0": ("FAIL", lambda x: x >= 0.95, "FAIL >= 95 %"),
    "global x1.8": ("FAIL", lambda x: x >= 0.99, "FAIL >= 99 %"),
}


INTRODUCTION = """\
Each line is the share of simulated comparisons that end in the word given, with its exact 95 % interval; most of the
rest is INCONCLUSIVE. The bars are those of the `embedded` shape (2 kinds x 8 documents x 3 depths x (128 prefill + 128
decode) rows). `quick` (2 kinds x 2 documents x 2 depths x 64 + 64 rows) is judged by overall and phases only, against
a limit of its own: a fault in one cell is not its to see. All scenarios of a noise judge the same draws, scaled.

The noises:

- `softmax`: Gaussian noise of known sigma on logits with realistic margins, KL20 by the product's code.
- `heavy tails`: lognormal sensitivity x gamma noise, with the noise and the correlation of rows measured on the quick
  corpus (below).
- `document 0.05`, `document 0.1`, `token 0.5`: the same, but the true ratio itself differs by document (log sd), or
  by token at all depths alike. Stress, beyond what the bars ask.
- `decode 0.1`: the ratio differs by document in decode alone: phases that know different variances. Stress.
- `as seen`: heavy tails with the noise, correlation and differences by document and segment that the recorded builds
  show in each phase, if they have the `embedded` shape; else those measured on the quick corpus (below), whose four
  documents know little of what documents differ by.
- `recorded`: rows of two real correct builds, documents and blocks of 16 tokens resampled (if they were given, and for
  shapes with no more documents, depths and rows than theirs). Its files come from one corpus and one reference:
  `logitgate compare REFERENCE CANDIDATE --positions CANDIDATE.parquet`, and the same for the floor.

The rules of coverage: `rule` is what the judge uses; `segments as clusters` would treat segments of one document at
several depths as independent; `documents never borrow` would leave the variance of few documents to themselves.
"""


def render(results: dict[str, Any], command: str) -> str:
    """The results as Markdown."""
    lines = ["# How often the verdict is right", "", "Made by", "", f"    {command}", ""]
    lines += [*INTRODUCTION.splitlines(), ""]
    for shape, by_noise in results["shapes"].items():
        lines += [f"## {shape}", "", *(_smoke(by_noise) if shape == QUICK.name else _held_to_bars(by_noise))]
        lines += ["", "### Coverage of the 95 % intervals, in percent", ""]
        lines += ["| clusters of overall and phases | level |" + "".join(f" {noise} |" for noise in by_noise)]
        lines += ["|---|---|" + "---|" * len(by_noise)]
        for rule in ("rule", "segments as clusters", "documents never borrow"):
            for level in ("overall", "phases", "cells"):
                if rule != "rule" and level == "cells":
                    continue
                cells = [_range(one["coverage"][rule][level]) for one in by_noise.values()]
                lines.append(f"| {rule} | {level} | " + " | ".join(cells) + " |")
        lines.append("")
        if shape == "quick":
            lines += ["### What borrowing from the cells buys (FAIL in percent: rule / documents never borrow)", ""]
            lines += ["| scenario |" + "".join(f" {noise} |" for noise in by_noise), "|---|" + "---|" * len(by_noise)]
            for name in ("global x1.12", "global x2.5", "global x4.0"):
                both = [
                    [one["verdicts"][name][r]["FAIL"] for r in ("rule", "documents never borrow")]
                    for one in by_noise.values()
                ]
                lines.append(f"| {name} | " + " | ".join(f"{100 * a:.1f} / {100 * b:.1f}" for a, b in both) + " |")
            lines.append("")
    return "\n".join(lines + _facts(results))


def _held_to_bars(by_noise: dict[str, Any]) -> list[str]:
    lines = ["### Verdicts", "", "| scenario | bar |" + "".join(f" {noise} |" for noise in by_noise)]
    lines.append("|---|---|" + "---|" * len(by_noise))
    for name in next(iter(by_noise.values()))["verdicts"]:
        word, test, bar = BARS.get(name, ("FAIL", lambda _: True, "-"))
        cells = [_cell(one["verdicts"][name]["rule"], word, one["runs"], test) for one in by_noise.values()]
        lines.append(f"| {name} | {bar} | " + " | ".join(cells) + " |")
    lines += ["", "One cell x2.0, whichever it is: FAIL in percent over all cells, from the least to the most", ""]
    lines += ["|" + "".join(f" {noise} |" for noise in by_noise), "|" + "---|" * len(by_noise)]
    lines.append("| " + " | ".join(_range(list(one["cell_by_cell"].values())) for one in by_noise.values()) + " |")
    return lines


def _smoke(by_noise: dict[str, Any]) -> list[str]:
    least = {noise: one["least_limit"] for noise, one in by_noise.items()}
    limit, most = next(iter(by_noise.values()))["limit"], max(least, key=lambda noise: least[noise])
    lines = ["### What holds at the quick shape", ""]
    lines += [
        f"The smallest limit at which a correct build at the top of the benign band ({BENIGN_TOP}) passes in 95 % of",
        f"the runs, by noise. The largest, {least[most]:.3f} (`{most}`), rounded up to one decimal is "
        f"**{math.ceil(10 * least[most]) / 10:.1f}**; the gate for",
        f"smoke corpora in gates.toml is {limit:.1f}.",
        "",
        "| |" + "".join(f" {noise} |" for noise in by_noise),
        "|---|" + "---|" * len(by_noise),
        "| smallest limit | " + " | ".join(f"{value:.3f}" for value in least.values()) + " |",
        "",
        f"PASS / INCONCLUSIVE / FAIL in percent, against the limit {limit:g}:",
        "",
        "| scenario |" + "".join(f" {noise} |" for noise in by_noise),
        "|---|" + "---|" * len(by_noise),
    ]
    for name in next(iter(by_noise.values()))["verdicts"]:
        shares = [one["verdicts"][name]["rule"] for one in by_noise.values()]
        words = ("PASS", "INCONCLUSIVE", "FAIL")
        cells = [" / ".join(f"{100 * share[word]:.1f}" for word in words) for share in shares]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _cell(shares: dict[str, float], word: str, runs: int, test: Callable[[float], bool]) -> str:
    low, high = exact_interval(round(shares[word] * runs), runs)
    mark = "" if test(shares[word]) else " **missed**"
    return f"{word} {100 * shares[word]:.1f} ({100 * low:.1f} to {100 * high:.1f}){mark}"


def _range(shares: list[float]) -> str:
    low, high = 100 * min(shares), 100 * max(shares)
    return f"{low:.1f}" if len(shares) == 1 else f"{low:.1f} to {high:.1f} (mean {100 * sum(shares) / len(shares):.1f})"


def _facts(results: dict[str, Any]) -> list[str]:
    lines = ["## The noise", ""]
    for name, facts in results["noise"].items():
        said = [f"{key} {_number(value)}" for key, value in facts.items() if key != "flips"]
        lines.append(f"- `{name}`: {', '.join(said)}")
    for noise, one in results["shapes"]["embedded"].items():
        lines.append(
            f"- `{noise}`: standard error of the log ratio {one['standard_error_overall']:.4f} overall; "
            f"in a cell, times sqrt(positions), {one['noise_per_position']:.2f}"
        )
    flips = results["noise"]["softmax"]["flips"]
    lines += ["", "Flips of the softmax noise, observed and predicted from the floor's logit error, by margin:", ""]
    lines += ["| margin | observed % | predicted % |", "|---|---|---|"]
    for b in flips:
        low, high = b["margin"]
        lines.append(f"| {low:g} to {high:g} | {100 * b['rate_observed']:.3f} | {100 * b['rate_predicted']:.3f} |")
    return [*lines, ""]


def _number(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "/".join(_number(one) for one in value)
    if isinstance(value, dict):
        return " ".join(f"{key} {_number(one)}" for key, one in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _fits(shape: Shape, real: Shape) -> bool:
    """Whether the real builds have enough documents, depths and rows to be resampled at that shape."""
    return shape.documents <= real.documents and len(shape.depths) <= len(real.depths) and shape.rows <= real.rows


def main() -> None:
    """Run the study and write its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--recorded", nargs=2, type=Path, metavar=("CANDIDATE", "FLOOR"), help="positions.parquet of two correct builds"
    )
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("-o", "--output", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    started = time.monotonic()
    real = recorded(*arguments.recorded) if arguments.recorded else None
    # Two documents of a kind cannot show what documents differ by.
    seen = real.seen if real and _fits(EMBEDDED, real.shape) else QUICK_RUN
    softmax, softmax_facts = softmax_noise()
    sources: dict[str, Draw] = {
        "softmax": softmax,
        "heavy tails": heavy_tails(),
        "document 0.05": heavy_tails(document=0.05),
        "document 0.1": heavy_tails(document=0.1),
        "token 0.5": heavy_tails(token=0.5),
        "decode 0.1": varied(replace(QUICK_RUN, by_document=(0.1, 0.0))),
        "as seen": varied(seen),
    }
    results: dict[str, Any] = {"noise": {"softmax": softmax_facts}, "shapes": {}}
    rows = {"row_noise": QUICK_RUN.row_noise, "row_correlation": QUICK_RUN.row_correlation}
    results["noise"] |= {"heavy tails": rows, "as seen": asdict(seen)}
    if real:
        results["noise"]["recorded"] = real.facts
    for shape in (EMBEDDED, QUICK):
        studies = {name: study(shape, draw, arguments.runs) for name, draw in sources.items()}
        if real and _fits(shape, real.shape):
            studies["recorded"] = study(
                replace(shape, depths=real.shape.depths[: len(shape.depths)]), real.draw, arguments.runs
            )
        results["shapes"][shape.name] = studies
    flags = "--recorded CANDIDATE.parquet FLOOR.parquet " if real else ""
    command = f"python scripts/simulate_verdicts.py {flags}--runs {arguments.runs} -o {arguments.output}"
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "simulation.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (arguments.output / "simulation.md").write_text(render(results, command), encoding="utf-8")
    print(f"{arguments.output / 'simulation.md'} written in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
