"""Calibration and sweeps on the command line. Part of `cli`, which runs them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.commands.calibration_run import Bench
    from harness.commands.sweep_run import Sweep
    from harness.patching import LoadedPatch

EXIT_FAILURES = 4

calibrate_app = typer.Typer(
    help="Limits from benign builds, then faults as test data: benign, gates, faults, report.", rich_markup_mode=None
)
sweep_app = typer.Typer(help="Variants of one thing side by side: attention-p, backends.", rich_markup_mode=None)

ENGINE_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}
WITHOUT_BF16_UNITS = "gemm_f32"

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or `smollm2` for the embedded model.")]
CorpusName = Annotated[
    str, typer.Option("--corpus", "-c", help="A packaged corpus (embedded, quick) or a corpus file.")
]
Work = Annotated[Path, typer.Option(help="Corpora, reference, floors, and the rows of the recording under way.")]
ResultFolder = Annotated[Path, typer.Option("--results", help="Where small results go, to be committed.")]
GatesFile = Annotated[Path | None, typer.Option("--gates", help="Limits to use instead of the packaged ones.")]
Only = Annotated[list[str] | None, typer.Option("--only", help="Only this patch; may be repeated.")]
With = Annotated[
    list[str] | None,
    typer.Option("--with", help=f"Patch every build has; by default {WITHOUT_BF16_UNITS} on a CPU without bf16 units."),
]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests in flight at once, unless a patch asks otherwise.")]
PromptRows = Annotated[str, typer.Option(help="engine (its prompt-logprob pass) or window (quicker on long prompts).")]

WORK = Path("logitgate-work")
RESULTS = Path("results/calibration")


@calibrate_app.command("benign", context_settings=ENGINE_ARGUMENTS)
def benign(
    context: typer.Context,
    model: Model,
    corpus: CorpusName = "embedded",
    work: Work = WORK,
    results: ResultFolder = RESULTS,
    gates: GatesFile = None,
    only: Only = None,
    common: With = None,
    concurrency: Concurrency = 8,
    prompt_rows: PromptRows = "engine",
) -> int:
    """Record correct variations of the engine, one by one. Goes on where it stopped.

    Every other option is an engine argument as vLLM names it.
    """
    from harness.commands.calibration_run import run_benign
    from harness.judge import load_gates

    bench = _bench(context.args, model, corpus, work, results, common, concurrency, prompt_rows)
    made, failed = run_benign(bench, _chosen("benign", only, bench.model), load_gates(gates))
    return _done(made, failed, results)


@calibrate_app.command("gates")
def gates(
    out: Annotated[Path, typer.Option("--out", "-o", help="Gates file; its generated section is replaced.")],
    results: ResultFolder = RESULTS,
) -> None:
    """Limits from the benign results alone: 1.25 x the largest ratio, by model and dtype.

    Refused where fault results are there already. What is missing is said, and keeps the limits provisional.
    """
    from harness.calibration.calibrate import load_results
    from harness.calibration.limits import generate, to_toml, with_section
    from harness.commands.result_keeper import now
    from harness.judge import load_gates
    from harness.patching import list_patches
    from harness.sites import RECURRENT

    found = load_results(results)
    recurrent = {p.patch.name for p in list_patches() if p.patch.site.startswith(RECURRENT)}
    has_state = any(result.name in recurrent for result in found)
    expected = [p.patch.name for p in list_patches() if p.patch.kind == "benign"]
    generated = generate(found, [n for n in expected if has_state or n not in recurrent], load_gates(None))
    try:
        text = out.read_text(encoding="utf-8") if out.exists() else ""
        out.write_text(with_section(text, to_toml(generated, now())), encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the gates file {out} cannot be written: {error}") from error
    for gate in generated.gates:
        if not gate.smoke:
            print(f"{gate.statistic} {gate.dtype}: {gate.limit:g}{' (provisional)' if gate.provisional else ''}")
    for sentence in generated.missing:
        print(f"missing: {sentence}")


@calibrate_app.command("faults", context_settings=ENGINE_ARGUMENTS)
def faults(
    context: typer.Context,
    model: Model,
    corpus: CorpusName = "quick",
    work: Work = WORK,
    results: ResultFolder = RESULTS,
    gates: GatesFile = None,
    only: Only = None,
    common: With = None,
    concurrency: Concurrency = 8,
    prompt_rows: PromptRows = "engine",
) -> int:
    """Record faults as test data: all on `quick`, and on `embedded` what `quick` leaves undecided.

    Needs final limits for this model. Those that bf16 noise hides also run in float32. Goes on where it stopped.
    """
    from harness.commands.calibration_run import run_faults
    from harness.judge import load_gates

    bench = _bench(context.args, model, corpus, work, results, common, concurrency, prompt_rows)
    made, failed = run_faults(bench, _chosen("fault", only, bench.model), load_gates(gates))
    return _done(made, failed, results)


@calibrate_app.command("report")
def report(results: ResultFolder = RESULTS, gates: GatesFile = None) -> None:
    """Tables and plots of what was shown, with exact bounds, into the folder of results."""
    from harness.calibration.calibrate import load_results
    from harness.calibration.limits import require_in_order
    from harness.judge import load_gates
    from harness.patching import list_patches
    from harness.report.calibration import write_report

    found = load_results(results)
    if not found:
        raise UsageError(f"{results} holds no calibration results: run `logitgate calibrate benign` first")
    limits = load_gates(gates)
    require_in_order(found, limits)
    for path in write_report(found, [p.patch for p in list_patches()], limits, results):
        print(path)


@sweep_app.command("attention-p", context_settings=ENGINE_ARGUMENTS)
def attention_p(
    context: typer.Context,
    model: Model,
    corpus: CorpusName = "embedded",
    variants: Annotated[str, typer.Option(help="Comma-separated.")] = "f32,bf16,f16,e4m3,e4m3x448,e4m3x256",
    work: Work = WORK,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where results and figures go.")] = Path(
        "results/sweep-attention-p"
    ),
    common: With = None,
    concurrency: Concurrency = 8,
    prompt_rows: PromptRows = "engine",
) -> int:
    """Attention weights P rounded before they multiply V, in naive attention: one engine load for all variants."""
    from harness.commands.sweep_run import Sweep, attention_p_jobs

    bench = _bench(context.args, model, corpus, work, out, common, concurrency, prompt_rows)
    return _sweep(Sweep(bench, attention_p_jobs(bench, variants.split(",")), out), "attention weights P")


@sweep_app.command("backends", context_settings=ENGINE_ARGUMENTS)
def backends(
    context: typer.Context,
    model: Model,
    corpus: CorpusName = "embedded",
    variants: Annotated[str | None, typer.Option(help="Comma-separated; by default all that this machine has.")] = None,
    work: Work = WORK,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where results and figures go.")] = Path(
        "results/sweep-backends"
    ),
    common: With = None,
    concurrency: Concurrency = 8,
    prompt_rows: PromptRows = "engine",
) -> int:
    """Attention kernels: vec and naive on a CPU; FLASH_ATTN, FLASHINFER, TRITON_ATTN, FLEX_ATTENTION on CUDA."""
    from harness.commands.sweep_run import CPU_BACKENDS, CUDA_BACKENDS, Sweep, backend_jobs

    cuda = Path("/dev/nvidia0").exists()
    names = variants.split(",") if variants else CUDA_BACKENDS if cuda else CPU_BACKENDS
    bench = _bench(context.args, model, corpus, work, out, common, concurrency, prompt_rows)
    return _sweep(Sweep(bench, backend_jobs(bench, names, cuda=cuda), out), "attention kernels")


# --------------------------------------------------------------------------- helpers


def _bench(
    engine: Sequence[str],
    model: str,
    corpus: str,
    work: Path,
    results: Path,
    common: Sequence[str] | None,
    concurrency: int,
    prompt_rows: str,
) -> Bench:
    from harness._environment import has_bf16_units
    from harness.calibration.jobs import Setting
    from harness.commands.calibration_run import Bench, find_corpus
    from harness.embedded import resolve_model
    from harness.engine.arguments import parse_engine_args
    from harness.patching import load_patch
    from harness.patterns import Pattern

    if model.startswith("-"):
        raise UsageError(f"{model} stands where the model is expected: name the model first, then the engine arguments")
    if prompt_rows not in ("engine", "window"):
        raise UsageError(f"--prompt-rows is {prompt_rows!r}: expected engine or window")
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")  # vLLM leaves one of two cores idle otherwise
    given: Mapping[str, Any] = parse_engine_args(engine)
    names = common if common is not None else () if has_bf16_units() else (WITHOUT_BF16_UNITS,)
    folder = resolve_model(model)
    loaded = find_corpus(corpus, folder, work, print)
    return Bench(
        model=folder,
        corpus=loaded,
        folder=work / loaded.name,
        results=results,
        base=Setting(
            engine={"dtype": "bfloat16", "enforce_eager": True, **given},
            pattern=Pattern(concurrency=concurrency),
            prompt_rows=prompt_rows,
        ),
        common=tuple(load_patch(name) for name in names),
        say=lambda line: print(line, flush=True),
    )


def _chosen(kind: str, only: Sequence[str] | None, model: str) -> list[LoadedPatch]:
    from harness.commands.calibration_run import applicable
    from harness.patching import list_patches, load_patch

    if not only:
        return [p for p in applicable(list_patches(), model) if p.patch.kind == kind]
    chosen = [load_patch(name) for name in only]
    for patch in chosen:
        if patch.patch.kind != kind:
            raise UsageError(f"--only {patch.patch.name}: it is a {patch.patch.kind} patch, not a {kind} one")
    return chosen


def _done(made: int, failed: int, results: Path) -> int:
    print(f"{made} recorded, {failed} failed; results in {results}")
    return EXIT_FAILURES if failed else 0


def _sweep(sweep: Sweep, title: str) -> int:
    from harness.commands.calibration_run import require_references
    from harness.report.sweep import write_sweep

    require_references(sweep.bench, [])
    variants = sweep.run()
    if variants:
        for path in write_sweep(list(variants.values()), sweep.bench.corpus.name, title, sweep.out):
            print(path)
    return EXIT_FAILURES if sweep.failures else 0
