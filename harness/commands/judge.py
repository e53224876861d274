"""The command that ends in a verdict, and the one that plans for it. Part of `cli`, which runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.commands.artefacts import AsJson
from harness.commands.outputs import EXIT_NO_JUDGEMENT, NO_JUDGEMENT, WORST_SHOWN, Outputs
from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.types import Comparison, Corpus, Verdict


def compare(
    reference: Annotated[
        Path | None, typer.Argument(metavar="REFERENCE", help="What the model should compute.", show_default=False)
    ] = None,
    candidate: Annotated[
        Path | None, typer.Argument(metavar="CANDIDATE", help="The build under judgement.", show_default=False)
    ] = None,
    itself: Annotated[
        Path | None,
        typer.Option(
            "--self",
            metavar="DIR",
            help="Instead of the two: hold a recording's decode rows against its own prefill rows.",
        ),
    ] = None,
    floor: Annotated[
        list[Path] | None,
        typer.Option(help="Recording of a build taken as correct; the first is the denominator, more show the spread."),
    ] = None,
    baseline: Annotated[Path | None, typer.Option(help="Recording of the build before the change.")] = None,
    twin: Annotated[list[Path] | None, typer.Option(help="Recording of the same code with dtype float32.")] = None,
    gates: Annotated[Path | None, typer.Option(help="Limits to use instead of the packaged ones.")] = None,
    positions: Annotated[Path | None, typer.Option(help="Also save every column per position, as Parquet.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the report, one HTML file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write a comment for a pull request.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Also write JUnit XML, a test case for each check.")] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="All of these in one folder, with the verdict as JSON: to keep.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Hold a candidate against a reference and judge it.

    The exit code is the verdict, and the last line on stdout begins with it.
    """
    from harness.compare import compare as compare_recordings
    from harness.compare import compare_self
    from harness.judge import judge, load_gates
    from harness.report.console import progress_bar

    outputs = Outputs.given(save, positions=positions, report=report, markdown=markdown, junit=junit)
    denominator, spread = (floor[0], floor[1:]) if floor else (None, [])
    given = [path for path in (reference, candidate, itself, *(floor or ()), baseline, *(twin or ())) if path]
    try:
        with outputs.prepared(given), progress_bar("comparing, rows") as progress:
            limits = load_gates(gates)
            if itself is not None:
                _refuse_with_self(reference, spread, baseline, twin)
                comparison = compare_self(itself, floor=denominator, progress=progress)
            else:
                comparison = compare_recordings(
                    _given(reference, "REFERENCE"),
                    _given(candidate, "CANDIDATE"),
                    floor=denominator,
                    spread=spread,
                    baseline=baseline,
                    progress=progress,
                )
            twins = [compare_recordings(_given(reference, "REFERENCE"), path) for path in twin or []]
            verdict = judge(comparison, limits, twins=twins)
            outputs.write(comparison, verdict)
        (_print_json if as_json else show_verdict)(comparison, verdict)
    except Exception as error:
        say_no_judgement(str(error), getattr(error, "exit_code", EXIT_NO_JUDGEMENT), as_json)
        raise
    return verdict.exit_code


def plan(
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help="A corpus file, or a packaged manifest's name.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A folder, a hub id, or smollm2.")],
    like: Annotated[
        Path | None, typer.Option(metavar="DIR", help="An earlier recording by the same engine: minutes go by it.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the build to be judged, and of its logits.")] = "bfloat16",
    gates: Annotated[Path | None, typer.Option(help="Limits to use instead of the packaged ones.")] = None,
    as_json: AsJson = False,
) -> None:
    """What recording a corpus would cost, and what it could see.

    Rows, bytes, tokens, minutes, and the smallest ratio to the floor that each stratum would turn red.
    """
    from harness.embedded import resolve_model
    from harness.gates import load_gates
    from harness.power import plan as plan_recording
    from harness.report.artefacts import as_text
    from harness.report.plan import plan_facts
    from harness.storage import Recording
    from harness.types import ITEM_BYTES, Build

    if dtype not in ITEM_BYTES:
        raise UsageError(f"--dtype is {dtype!r}: expected one of {', '.join(ITEM_BYTES)}")
    limits = load_gates(gates)
    folder = resolve_model(model)
    planned = _corpus(corpus, model, folder)
    before = Recording(like) if like is not None else None
    found = plan_recording(
        planned,
        limits,
        Build(
            engine="", engine_version="", model=folder, model_revision=None, weights_sha256="", dtype=dtype, device=""
        ),
        columns=_columns(folder, planned),
        logits_dtype=dtype,  # type: ignore[arg-type]  # narrowed at run time just above
        like=(before.corpus, before.manifest) if before is not None else None,
    )
    facts = plan_facts(planned, found, before.manifest if before is not None else None)
    print(json.dumps(facts) if as_json else as_text(facts), flush=True)


def _corpus(name: str, model: str, folder: str) -> Corpus:
    """The corpus of a file, or that of a packaged manifest cut with the model's tokenizer."""
    from harness.corpus import build_corpus, load_corpus, load_manifest, load_tokenizer

    if Path(name).is_file() and not name.endswith(".toml"):
        return load_corpus(Path(name))
    return build_corpus(load_manifest(name), load_tokenizer(folder), tokenizer_name=model)


def _columns(folder: str, corpus: Corpus) -> int:
    """Columns of a row: the vocabulary of the model's config, which may be padded; else the tokenizer's."""
    try:
        config = json.loads((Path(folder).expanduser() / "config.json").read_text(encoding="utf-8"))
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        size = None
    return size if isinstance(size, int) and size >= corpus.vocab_size else corpus.vocab_size


def show_verdict(comparison: Comparison, verdict: Verdict) -> None:
    """Render a verdict to stdout, with its worst positions read again from the recordings."""
    from harness.report.console import result_console
    from harness.report.terminal import render
    from harness.worst import worst_positions

    render(comparison, verdict, result_console(), worst=worst_positions(comparison, WORST_SHOWN))


def _print_json(comparison: Comparison, verdict: Verdict) -> None:
    from harness.report.json_report import to_json
    from harness.worst import worst_positions

    found = to_json(comparison, verdict, worst_positions(comparison, WORST_SHOWN))
    print(json.dumps(found, allow_nan=False), flush=True)


def _given(path: Path | None, argument: str) -> Path:
    if path is None:
        raise UsageError(f"{argument} is missing: compare takes REFERENCE and CANDIDATE, or --self DIR alone")
    return path


def _refuse_with_self(reference: Path | None, *others: object) -> None:
    if reference is not None or any(others):
        raise UsageError(
            "--self takes one recording and at most one --floor: REFERENCE, CANDIDATE, --baseline, --twin and further "
            "floors have no part in holding its decode rows against its prefill rows"
        )


def say_no_judgement(message: str, code: int, as_json: bool) -> None:
    """Readers of stdout get an answer there too; the message itself goes to stderr."""
    if not as_json:
        print(NO_JUDGEMENT, flush=True)
        return
    from harness.report.json_report import no_judgement

    print(json.dumps(no_judgement(NO_JUDGEMENT, message, code)), flush=True)
