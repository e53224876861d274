"""Comparisons and verdicts to report on: small real ones, and the same with any text wherever text can come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st

from harness.compare import compare
from harness.judge import judge, load_gates
from harness.types import Comparison, Finding, Side, Verdict
from harness.worst import PositionDetail, TopId, worst_positions
from tests.synthetic import make_build, make_corpus, make_rows, record, with_noise

Reported = tuple[Comparison, Verdict, tuple[PositionDetail, ...]]

HOSTILE = (
    "\x1b[31mred\x1b[0m\x1b]0;owned\x07",
    "</code></details><script>alert(1)</script><img src=x onerror=alert(1)>",
    "| a | b |\n| --- | --- |\r\n# heading\n```\n- item",
    "@everyone #1 www.evil.example https://evil.example [click](javascript:alert(1)) ![x](y)",
    "\u202eevil\u202c \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "\ud800 \udfff \x00 \ufffe \uffff ]]> &amp; \\ * _ ~ `",
    "x" * 20_000,
)

texts = st.text(st.characters(codec=None), max_size=60) | st.sampled_from(HOSTILE)
"""Any text, lone surrogates included, and the kinds that outputs are broken with."""


def reported(folder: Path, *, noise: float = 0.2) -> Reported:
    """A reference, a floor and a candidate in bf16; noise of 0.02 is the floor's own."""
    corpus = make_corpus(documents=4)
    rows = make_rows(corpus)
    record(folder / "reference", corpus, rows)
    for name, sigma, seed in (("floor", 0.02, 3), ("candidate", noise, 4)):
        build = make_build(dtype="bfloat16", engine=name)
        record(folder / name, corpus, with_noise(rows, sigma, seed=seed), dtype="bfloat16", build=build)
    comparison = compare(folder / "reference", folder / "candidate", floor=folder / "floor")
    return comparison, judge(comparison, load_gates(None)), worst_positions(comparison, 5)


def with_text(made: Reported, text: str) -> Reported:
    """The same numbers with `text` in every place that a recording, a corpus or an argument fills."""
    comparison, verdict, worst = made
    finding = Finding(code="rows-shifted", message=text, fatal=False)
    changed = replace(
        comparison,
        reference=_side(comparison.reference, text),
        candidate=_side(comparison.candidate, text),
        spread={text: comparison.positions},
        findings=(finding,) * 12,
        notes=(text,) * 12,
    )
    top = TopId(id=1, text=text, logprob=-1.0)
    positions = tuple(
        replace(one, segment=text, context=text, target_text=text, top_reference=(top,) * 5, top_candidate=(top,) * 5)
        for one in worst
    )
    return changed, replace(verdict, reasons=(text,) * 3, remedy=text, notes=(text,) * 12), positions


def _side(side: Side, text: str) -> Side:
    build = replace(side.manifest.build, model=text, engine_version=text, patches=({"name": text, "kind": text},))
    return Side(path=text, manifest=replace(side.manifest, corpus_name=text, build=build))
