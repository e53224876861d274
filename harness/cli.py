"""The command line: the only place that prints or sets an exit code.

Exit codes: 0 PASS (or done), 1 FAIL, 2 wrong usage, 3 INCONCLUSIVE, 4 could not judge, 130 interrupted. Any exception
nobody expected ends in 4 too, so that a crash never reads as a regression. Every command imports what it needs when
it runs, so that `--help` stays quick and comparing needs neither torch nor vllm.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import TyperException

from harness.commands.artefacts import corpus_app, doctor, patches_app, show
from harness.commands.calibrate import calibrate_app, sweep_app
from harness.commands.judge import compare, plan, say_no_judgement, show_verdict
from harness.commands.outputs import EXIT_NO_JUDGEMENT, NO_JUDGEMENT
from harness.commands.report import report
from harness.commands.served import finish, record_server
from harness.errors import LogitgateError, UsageError

if TYPE_CHECKING:
    from harness.patching import LoadedPatch

DEBUG = "LOGITGATE_DEBUG"
"""Environment variable; "1" shows the traceback of any error, as `--debug` does."""

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130

app = typer.Typer(
    name="logitgate",
    help="Judge an engine build by its logits, held position by position against a HuggingFace f32 reference.",
    epilog="Exit codes: 0 PASS, 1 FAIL, 2 wrong usage, 3 INCONCLUSIVE, 4 could not judge.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich for help would cost more than the rest of it
    add_completion=False,
)
app.add_typer(corpus_app, name="corpus")
app.add_typer(patches_app, name="patches")
app.add_typer(calibrate_app, name="calibrate")
app.add_typer(sweep_app, name="sweep")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or `smollm2` for the embedded model.")]
CorpusFile = Annotated[Path, typer.Option("--corpus", "-c", help="A corpus file made by `corpus build`.")]
OutFolder = Annotated[Path, typer.Option("--out", "-o", help="Folder for the recording.")]
Resume = Annotated[bool, typer.Option("--resume", help="Complete an interrupted recording.")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help=f"Show tracebacks; also {DEBUG}=1.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"
    if version:
        from harness import __version__

        print(f"logitgate {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_USAGE)


# --------------------------------------------------------------------------- the main job, in order


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--folder", help="Where the demo keeps its files.")] = Path("logitgate-demo"),
) -> int:
    """Judge a healthy build, and one with a planted fault.

    Records a reference, a floor, the stock engine and the same engine with a fault, on the embedded model.
    """
    from harness.commands.demo import next_steps, run_demo

    outcome = run_demo(folder, say=_say, show=show_verdict)
    _say(f"\n{next_steps(folder)}\n")
    verdicts = f"stock engine {outcome.healthy.word}, planted fault {outcome.faulty.word}"
    if outcome.as_promised:
        _say(f"PASS: the demo came out as promised: {verdicts}")
        return 0
    _say(f"{NO_JUDGEMENT}: the demo promised PASS and FAIL, but came to: {verdicts}. The tables above say why.")
    return EXIT_NO_JUDGEMENT


@app.command()
def model(name: Annotated[str, typer.Argument(help="`smollm2`, the model that comes with the set-up.")]) -> None:
    """Make the embedded model ready, once, and print its folder."""
    from harness.embedded import embedded_model

    if name != "smollm2":
        raise UsageError(
            f"no embedded model is called {name!r}: expected smollm2; any folder or hub id works elsewhere"
        )
    _say(str(embedded_model(progress=lambda sentence: print(sentence, file=sys.stderr, flush=True))))


@app.command()
def reference(
    model: Model,
    corpus: CorpusFile,
    out: OutFolder,
    dtype: Annotated[str, typer.Option(help="float32 (the reference), bfloat16 (a floor) or float64.")] = "float32",
    device_map: Annotated[str | None, typer.Option(help="Handed to accelerate, for models beyond memory.")] = None,
    weights: Annotated[str, typer.Option(help="For quantised checkpoints: original or dequantised.")] = "original",
    resume: Resume = False,
) -> None:
    """Record what the model should compute, with HuggingFace.

    Full-vocabulary logits at every scored position, in f32 unless `--dtype` says otherwise.
    """
    _require_one_of("--dtype", dtype, ("float32", "bfloat16", "float64"))
    _require_one_of("--weights", weights, ("original", "dequantised"))

    from harness.corpus import load_corpus
    from harness.embedded import resolve_model
    from harness.reference import record_reference
    from harness.report.artefacts import recording_line
    from harness.report.console import progress_bar

    loaded = load_corpus(corpus)
    with progress_bar(f"reference {dtype}, rows") as progress:
        manifest = record_reference(
            resolve_model(model),
            loaded,
            out,
            dtype=dtype,  # type: ignore[arg-type]  # narrowed at run time just above
            device_map=device_map,
            weights=weights,  # type: ignore[arg-type]  # likewise
            resume=resume,
            progress=progress,
        )
    _say(recording_line(out, manifest))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def record(
    context: typer.Context,
    corpus: CorpusFile,
    out: OutFolder,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A folder, a hub id, or `smollm2`; with --server, a name it serves."),
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Record a running server; its key: LOGITGATE_API_KEY.")
    ] = None,
    patch: Annotated[list[str] | None, typer.Option(help="NAME, FILE.py or FILE.py:NAME; may be repeated.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight at once.")] = 1,
    prompt_rows: Annotated[
        str, typer.Option(help="engine (its prompt-logprob pass) or window (the head on the scored rows only).")
    ] = "engine",
    untested_engine: Annotated[
        bool, typer.Option("--untested-engine", help="Go on with a vLLM version nobody tested.")
    ] = False,
    resume: Resume = False,
) -> None:
    """Record what a build computes, on the real vLLM engine.

    The offline engine runs over the corpus with its ids forced, prefill and decode. With `--server` a running one does
    so among its other work; MODEL is then the name it serves.

    Every other option is an engine argument as vLLM names it, for instance
    `--dtype float32 --max-num-batched-tokens 512 --enforce-eager`.
    """
    _require_one_of("--prompt-rows", prompt_rows, ("engine", "window"))
    if server is not None:
        if given := [word for word in (model or "", *context.args) if word.startswith("-")] + (patch or []):
            raise UsageError(f"{given[0]}: a running server keeps the engine arguments and patches it was started with")
        record_server(
            server,
            corpus,
            out,
            model=model,
            concurrency=concurrency,
            prompt_rows=prompt_rows,
            resume=resume,
            untested=untested_engine,
        )
        return
    if model is None:
        raise UsageError("record needs the model first (a folder, a hub id, or smollm2), or --server URL")
    _refuse_option_as_model(model)

    from harness.corpus import load_corpus
    from harness.embedded import resolve_model
    from harness.engine.arguments import parse_engine_args
    from harness.engine.campaign import environment
    from harness.engine.session import EngineSession
    from harness.patching import load_patch
    from harness.patterns import engine_needs, pattern_of
    from harness.report.artefacts import recording_line
    from harness.report.console import progress_bar

    loaded = load_corpus(corpus)
    patches = [load_patch(name) for name in patch or ()]
    asked = {key: value for loaded_patch in patches for key, value in loaded_patch.patch.requests.items()}
    pattern = pattern_of(asked, concurrency=concurrency, at_least=True)
    arguments = {**engine_needs(pattern, loaded), **_with_needs(parse_engine_args(context.args), patches)}
    with (
        environment({name: value for p in patches for name, value in p.patch.environment.items()}),
        EngineSession(resolve_model(model), arguments, untested=untested_engine) as session,
        session.patched(patches) as described,
        progress_bar("engine, requests") as progress,
    ):
        manifest = session.record(
            loaded,
            out,
            patches=described,
            pattern=pattern,
            prompt_rows=prompt_rows,
            resume=resume,
            progress=progress,
        )
    _say(recording_line(out, manifest))


app.command()(finish)
app.command()(compare)
app.command()(report)
app.command()(plan)
app.command()(show)
app.command()(doctor)


# --------------------------------------------------------------------------- helpers


def _say(text: str) -> None:
    print(text, flush=True)


def _require_one_of(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UsageError(f"{option} is {value!r}: expected one of {', '.join(choices)}")


def _refuse_option_as_model(model: str) -> None:
    """Engine options are not known to our parser: `record --dtype float32 MODEL` would take `--dtype` for the model."""
    if model.startswith("-"):
        raise UsageError(f"{model} stands where the model is expected: name the model first, then the engine arguments")


def _with_needs(given: Mapping[str, Any], patches: Sequence[LoadedPatch]) -> dict[str, Any]:
    """The engine arguments given, with those that the patches need. UsageError where the two contradict."""
    arguments = dict(given)
    for loaded in patches:
        for name, value in loaded.patch.engine.items():
            if arguments.setdefault(name, value) != value:
                raise UsageError(
                    f"patch {loaded.patch.name} needs the engine argument {name}={value!r}, "
                    f"but {arguments[name]!r} was asked for: drop one of them"
                )
    return arguments


# --------------------------------------------------------------------------- errors and exit codes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code. Raises nothing."""
    _open_closed_streams()
    try:
        code = app(args=arguments, standalone_mode=False, prog_name="logitgate")
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except TyperException as error:  # an option or argument typer refused
        given = sys.argv[1:] if arguments is None else arguments
        message = f"{error.format_message().rstrip('.')}. See `{_command_path(error)} --help`."
        if next((word for word in given if not word.startswith("-")), "") == "compare":
            say_no_judgement(message, EXIT_USAGE, "--json" in given)
        return _complain(error, EXIT_USAGE, message)
    except LogitgateError as error:
        return _complain(error, error.exit_code, str(error))
    except BrokenPipeError:
        # Whoever read our output has gone; without this, Python's own flush at exit would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NO_JUDGEMENT
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except SystemExit as stop:  # a library's own exit: its 1 must not read as a FAIL
        return stop.code if stop.code in (0, EXIT_USAGE) and isinstance(stop.code, int) else EXIT_NO_JUDGEMENT
    except BaseException as error:  # panics of compiled libraries derive from BaseException
        return _complain(error, EXIT_NO_JUDGEMENT, _unexpected(error))


def _open_closed_streams() -> None:
    """Python has None for a stream its parent closed (`>&-`), and `print` then falls back on the other one."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # for the whole process


def _unexpected(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"could not write {error.filename or 'the output'}: no space left on the device; free some and run again"
    return f"unexpected {type(error).__name__}: {error}; this is a bug: run again with --debug for the traceback"


def _command_path(error: TyperException) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "logitgate"


def _complain(error: BaseException, code: int, message: str) -> int:
    if os.environ.get(DEBUG) == "1":
        import traceback

        traceback.print_exception(error)
    from harness.report.visible import visible

    line = visible(" ".join(message.split()))
    print(f"logitgate: {line}", file=sys.stderr, flush=True)
    return code
