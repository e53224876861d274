"""What a calibration showed, as Markdown and plots: from typed results only, with exact bounds on every claim.

`findings` says what was concluded; tables and plots only show it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.calibration.calibrate import Result, first_red
from harness.calibration.detection import METHODS, alarms, task_scores, thresholds
from harness.calibration.limits import at_most, benign, gates_digest, leave_one_out, status_at
from harness.errors import StorageError
from harness.patching import Patch
from harness.report.plots import plot_detection, plot_ratios
from harness.types import OVERALL, Gates, Status

SEVERITIES = ("obvious", "subtle", "near-noise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault and all its results, the deciding one first."""

    name: str
    patch: Patch | None  # None: the file is gone
    results: tuple[Result, ...]  # smoke before sign-off, production dtype before float32

    @property
    def deciding(self) -> Result:
        """The first that turned red; without one, the last and largest corpus in production dtype."""
        red = [r for r in self.results if r.red]
        return (
            red[0] if red else next(r for r in reversed(self.results) if r.dtype != "float32" or len(self.results) == 1)
        )

    @property
    def severity(self) -> str:
        """How plainly it was expected to show."""
        return self.deciding.severity


def faults_of(results: Iterable[Result], patches: Sequence[Patch]) -> list[Fault]:
    """Faults that have a result which is evidence, by name."""
    by_name = {patch.name: patch for patch in patches}
    grouped: dict[str, list[Result]] = {}
    for result in results:
        if result.kind == "fault" and not result.error:
            grouped.setdefault(result.name, []).append(result)
    return [
        Fault(
            name=name,
            patch=by_name.get(name),
            results=tuple(sorted(found, key=lambda r: (not r.smoke, r.dtype == "float32"))),
        )
        for name, found in sorted(grouped.items())
    ]


def write_report(results: Sequence[Result], patches: Sequence[Patch], gates: Gates, folder: Path) -> list[Path]:
    """Write calibration.md and its plots into a folder; returns their paths. Raises StorageError."""
    faults = faults_of(results, patches)
    written = [folder / "calibration.md"]
    try:
        written[0].write_text(to_markdown(results, faults, gates), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"could not write {written[0]}: {error.strerror or error}") from error
    for corpus in sorted({r.corpus for r in results}):
        here = [r for r in results if r.corpus == corpus]
        written.append(plot_ratios(here, folder / f"ratios-{corpus}.svg"))
        caught = caught_by(here)
        if caught:
            written.append(plot_detection(caught, folder / f"detection-{corpus}.svg"))
    return written


def to_markdown(results: Sequence[Result], faults: Sequence[Fault], gates: Gates) -> str:
    """The whole report."""
    sections = [
        ["# What the gate catches, and what it lets pass", ""],
        _made_by(results, gates),
        *([_summary(results, faults, gates)] if results else []),
        _benign_section(results, gates),
        _fault_section(faults),
        *(_matrix_section(corpus, results, faults) for corpus in sorted({r.corpus for r in results})),
        _failures(results),
    ]
    return "\n".join(line for section in sections for line in section).rstrip() + "\n"


def caught_by(results: Sequence[Result]) -> dict[str, dict[str, tuple[int, int]]]:
    """By method and severity, how many faults of one corpus it catches, of how many. Empty without benign builds.

    "this gate" is its verdict in production dtype on that corpus.
    """
    correct = [r for r in results if r.kind != "fault" and not r.error and r.dtype != "float32" and r.others]
    limits = thresholds(correct)
    table: dict[str, dict[str, tuple[int, int]]] = {}
    for severity in SEVERITIES:
        tried = [r for r in results if r.kind == "fault" and r.severity == severity and not r.error]
        tried = [r for r in tried if r.dtype != "float32"]
        if not tried or not correct:
            continue
        table.setdefault("this gate", {})[severity] = (sum(r.red for r in tried), len(tried))
        for method in METHODS:
            said = [alarms(r.others, limits)[method.name] for r in tried]
            # Rows that could not be judged at all have no statistics: to be kind, others are taken to notice too.
            table.setdefault(method.name, {})[severity] = (sum(s is not False for s in said), len(tried))
    return table


# --------------------------------------------------------------------------- sections


def _made_by(results: Sequence[Result], gates: Gates) -> list[str]:
    machines = sorted({r.machine for r in results})
    spent = sum(r.seconds for r in results if math.isfinite(r.seconds))
    return [
        "Made by, in this order:",
        "",
        "    logitgate calibrate benign MODEL --corpus embedded",
        "    logitgate calibrate gates -o harness/gates.toml",
        "    logitgate calibrate faults MODEL --corpus quick",
        "    logitgate calibrate faults MODEL --corpus embedded",
        "    logitgate calibrate report",
        "",
        f"Model: {', '.join(sorted({r.model for r in results}))}. Machines: {'; '.join(machines)}.",
        f"{len(results)} recordings, {spent / 3600:.1f} hours. Limits `{gates_digest(gates)}` ({gates.source}).",
        "KL is KL(reference || candidate), in nats; ratios are of mean KL20, candidate over floor.",
        "",
    ]


def _summary(results: Sequence[Result], faults: Sequence[Fault], gates: Gates) -> list[str]:
    def not_green(result: Result) -> bool:
        return _today(result, gates)[0] is not Status.PASS

    lines = ["## What was shown", "", "| what | in so many | rate at most (95 %, exact) |", "|---|---|---|"]
    plain = [f for f in faults if f.severity in ("obvious", "subtle")]
    lines.append(_bound("obvious or subtle faults that no result turned red", plain, lambda f: not f.deciding.red))
    lines.append(_bound("of them, faults that ended in a PASS", plain, lambda f: f.deciding.status is Status.PASS))
    for severity in SEVERITIES:
        some = [f for f in faults if f.severity == severity]
        lines.append(_bound(f"{severity} faults not red", some, lambda f: not f.deciding.red))
    correct = [r for r in results if r.kind != "fault" and not r.error and r.dtype != "float32" and not r.smoke]
    lines.append(_bound("correct builds on a corpus for sign-off that do not pass", correct, not_green))
    smoke = [r for r in results if r.kind != "fault" and not r.error and r.dtype != "float32" and r.smoke]
    lines.append(_bound("correct builds on a smoke corpus that do not pass", smoke, not_green))
    return [
        *lines,
        "",
        "A rate is what chance alone leaves open, had these cases been drawn at random; they were not.",
        "",
    ]


def _benign_section(results: Sequence[Result], gates: Gates) -> list[str]:
    correct = benign(results)
    if not correct:
        return []
    left_out = {(r.name, r.dtype): (limit, status) for r, limit, status in leave_one_out(correct)}
    lines = [
        "## Correct builds",
        "",
        "`largest` is over all strata; `without it` is the limit that the other builds of its dtype give, and its "
        "verdict there.",
        "",
        "| build | dtype | bits change | mean KL20 | ratio overall | largest | verdict | without it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in correct:
        held = {c.stratum: c for c in result.checks if c.statistic == "ratio_to_floor"}
        top = max(held.values(), key=lambda check: check.value)
        limit, status = left_out.get((result.name, result.dtype), (math.nan, None))
        status_today, limit_today = _today(result, gates)
        lines.append(
            f"| {result.name} | {result.dtype} | {_yes(result.changed)} | {result.mean_kl:.3g} | "
            f"{held[OVERALL].value:.3g} | {top.value:.3g} in {top.stratum} | {status_today} at {limit_today:g} | "
            f"{'-' if status is None else f'{status} at {limit:g}'} |"
        )
    return [*lines, ""]


def _fault_section(faults: Sequence[Fault]) -> list[str]:
    if not faults:
        return []
    lines = [
        "## Faults",
        "",
        "`ratio` is over all rows; `first red` is the first check to turn red, coarse to fine, with how far its bound "
        "lies beyond the limit (times, or rows above what is allowed). What is not red says the smallest ratio over "
        "all rows that would have been.",
        "",
        "| fault | class | severity | verdicts | ratio | first red | replays |",
        "|---|---|---|---|---|---|---|",
    ]
    order = {name: rank for rank, name in enumerate(SEVERITIES)}
    for fault in sorted(faults, key=lambda f: (order.get(f.severity, 9), f.name)):
        said = ", ".join(f"{r.corpus} {r.dtype}: {r.word}" for r in fault.results)
        source = "" if fault.patch is None else fault.patch.source
        one = fault.deciding
        lines.append(
            f"| {fault.name} | {one.fault_class} | {fault.severity} | {said} | {_ratio(one)} | {_why(one)} | {source} |"
        )
    return [*lines, ""]


def _matrix_section(corpus: str, results: Sequence[Result], faults: Sequence[Fault]) -> list[str]:
    here = [r for r in results if r.corpus == corpus]
    caught = caught_by(here)
    if not caught:
        return []
    limits = thresholds([r for r in here if r.kind != "fault" and not r.error and r.dtype != "float32" and r.others])
    scores = task_scores()
    names = ["this gate", *(m.name for m in METHODS)]
    lines = [
        f"## What others would have seen on {corpus}",
        "",
        "Alarms of other methods on the same rows. Each is set to stay silent for every correct build here, the "
        "kindest rule there is; mean KL has its usual fixed limit. Compared with the stock build: greedy token match "
        "and top-1 agreement; with the f32 reference: the rest. The last column is what public threads say of task "
        "scores; nothing was measured for it.",
        "",
        "| method | alarm | " + " | ".join(SEVERITIES) + " |",
        "|---|---|" + "---|" * len(SEVERITIES),
    ]
    rules = {m.name: f"{'above' if m.higher_is_worse else 'below'} {limits[m.statistic]:.6g}" for m in METHODS}
    for name in names:
        cells = [f"{a} of {b}" if b else "-" for a, b in (caught[name].get(s, (0, 0)) for s in SEVERITIES)]
        lines.append(f"| {name} | {rules.get(name, 'verdict')} | " + " | ".join(cells) + " |")
    lines += ["", "| fault | " + " | ".join(names) + " | task score, as told |", "|---|" + "---|" * (len(names) + 1)]
    sources = {f.name: "" if f.patch is None else f.patch.source for f in faults}
    for result in sorted((r for r in here if r.kind == "fault" and not r.error), key=lambda r: r.name):
        if result.dtype == "float32":
            continue
        said: Mapping[str, bool | None] = {"this gate": result.red, **alarms(result.others, limits)}
        marks = [{True: "●", False: "·", None: "-"}[said[name]] for name in names]
        told = scores.get(sources.get(result.name, ""), "-")
        lines.append(f"| {result.name} | " + " | ".join(marks) + f" | {told} |")
    return [*lines, ""]


def _failures(results: Sequence[Result]) -> list[str]:
    failed = [r for r in results if r.error]
    if not failed:
        return []
    return ["## No evidence", "", *(f"- {r.name} on {r.corpus} in {r.dtype}: {r.error}" for r in failed), ""]


# --------------------------------------------------------------------------- cells


def _bound(what: str, items: Sequence[Any], hit: Any) -> str:
    hits = sum(bool(hit(item)) for item in items)
    return f"| {what} | {hits} of {len(items)} | {f'{at_most(hits, len(items)):.1%}' if items else '-'} |"


def _today(result: Result, gates: Gates) -> tuple[Status, float]:
    """A correct build's verdict by today's limit, and that limit: it was first judged before there was one."""
    limits = [
        g.limit
        for g in gates.gates
        if (g.statistic, g.dtype, g.smoke) == ("ratio_to_floor", result.dtype, result.smoke)
        and g.model in (result.weights_sha256, result.model)
    ]
    judged = [c.limit for c in result.checks if c.statistic == "ratio_to_floor"]
    limit = (limits or judged or [math.inf])[0]
    return status_at(result, limit), limit


def _ratio(result: Result) -> str:
    overall = next((c for c in result.checks if c.stratum == OVERALL and c.statistic == "ratio_to_floor"), None)
    if overall is not None:
        return f"{overall.value:.3g}"
    twin = next((c for c in result.checks if c.stratum == OVERALL and c.statistic == "twin_mean"), None)
    return "-" if twin is None else f"{twin.value:.2g} nat (f32)"


def _why(result: Result) -> str:
    red = first_red(result)
    if red is not None:
        check, distance = red
        beyond = f"{distance:.0f} more" if check.statistic.startswith("count") else f"{distance:.3g} x"
        return f"{check.statistic} in {check.stratum}, {beyond}"
    if result.status is None:
        return f"could not be judged: {result.reasons[0] if result.reasons else ''}"
    if result.findings:
        return result.findings[0]
    overall = next((c for c in result.checks if c.stratum == OVERALL and c.statistic == "ratio_to_floor"), None)
    return "not red" if overall is None else f"not red; {overall.detectable:.3g} would have been"


def _yes(changed: bool | None) -> str:
    return {True: "yes", False: "no", None: "-"}[changed]
