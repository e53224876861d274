"""The commands around the main job: corpora, patches, and what an artefact is. Part of `cli`, which runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.errors import UsageError

corpus_app = typer.Typer(help="Fixed texts as token ids: build, sample, look at them.", rich_markup_mode=None)
patches_app = typer.Typer(help="Named changes of an engine: faults and benign variations.", rich_markup_mode=None)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


@corpus_app.command("build")
def corpus_build(
    name: Annotated[str, typer.Argument(help="A packaged manifest (quick, embedded, hybrid, ...) or a TOML file.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Whose tokenizer: a folder, a hub id, or smollm2.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")],
    texts: Annotated[Path | None, typer.Option(help="Folder with the texts that the manifest does not ship.")] = None,
    fetch: Annotated[bool, typer.Option("--fetch", help="Download texts with a URL into that folder.")] = False,
) -> None:
    """Turn a manifest's texts into token ids, pinned and hashed."""
    from harness.corpus import build_corpus, load_manifest, load_tokenizer, save_corpus
    from harness.embedded import resolve_model
    from harness.report.artefacts import corpus_line
    from harness.report.console import progress_bar

    manifest = load_manifest(name)
    tokenizer = load_tokenizer(resolve_model(model))
    with progress_bar("tokenising, documents") as progress:
        corpus = build_corpus(manifest, tokenizer, tokenizer_name=model, texts=texts, fetch=fetch, progress=progress)
    save_corpus(corpus, out)
    print(corpus_line(out, corpus))


@corpus_app.command("sample")
def corpus_sample(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or smollm2.")],
    prompts: Annotated[Path, typer.Option(help='JSONL: {"prompt": "..."} or {"messages": [...]}, optionally "kind".')],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")],
    temperature: Annotated[float, typer.Option(help="As the target task samples.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="As the target task samples.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    name: Annotated[str, typer.Option(help="The corpus's name.")] = "sampled",
    device_map: Annotated[str | None, typer.Option(help="Handed to accelerate, for models beyond memory.")] = None,
) -> None:
    """The reference's own answers to prompts, ids kept."""
    from harness.corpus import save_corpus
    from harness.embedded import resolve_model
    from harness.report.artefacts import corpus_line
    from harness.report.console import progress_bar
    from harness.sampling import sample_corpus

    with progress_bar("sampling, answers") as progress:
        corpus = sample_corpus(
            resolve_model(model),
            prompts,
            name=name,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            device_map=device_map,
            progress=progress,
        )
    save_corpus(corpus, out)
    print(corpus_line(out, corpus))


@corpus_app.command("show")
def corpus_show(file: Annotated[Path, typer.Argument(help="A corpus file.")], as_json: AsJson = False) -> None:
    """What a corpus holds: segments, kinds, depths, scored rows, sources and licences."""
    show(file, as_json=as_json)


@patches_app.command("list")
def patches_list(as_json: AsJson = False) -> None:
    """Every packaged patch: name, kind, site, phase and what it changes."""
    from harness.patching import list_patches
    from harness.report.artefacts import patch_facts, table

    facts = [patch_facts(patch) for patch in list_patches()]
    if as_json:
        print(json.dumps(facts))
        return
    columns = ("name", "kind", "site", "phase", "summary")
    print(table(columns, [[str(f[column]) for column in columns] for f in facts]))


@patches_app.command("show")
def patches_show(
    name: Annotated[str, typer.Argument(help="NAME of a packaged patch, FILE.py or FILE.py:NAME.")],
    as_json: AsJson = False,
) -> None:
    """One patch: the public bug it replays, what it changes, what should show it, what it needs."""
    from harness.patching import load_patch
    from harness.report.artefacts import as_text, patch_facts

    patch = load_patch(name)
    facts = patch_facts(patch)
    print(json.dumps(facts) if as_json else f"{as_text(facts)}\n\n{patch.doc}")


def doctor(as_json: AsJson = False) -> int:
    """What is installed, what would be used, and whether recording works here.

    Each line is ok, a warning or a problem, with its fix. The exit code is 0 if recording works and 4 if not.
    """
    from dataclasses import asdict

    from harness.commands.doctor import as_text, diagnose, examine, would_record

    lines = diagnose(examine())
    works = would_record(lines)
    print(json.dumps({"records": works, "lines": [asdict(line) for line in lines]}) if as_json else as_text(lines))
    return 0 if works else 4


def show(
    path: Annotated[
        Path,
        typer.Argument(help="A recording's folder, a corpus, or what `compare` saved: positions, a verdict's JSON."),
    ],
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="SEGMENT:INDEX[,INDEX..]", help="Rows of a recording, with their likeliest ids."),
    ] = None,
    phase: Annotated[str | None, typer.Option(help="Of the rows: prefill or decode; without it, both.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Likeliest ids of each row.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Describe an artefact in a screen, or show rows of a recording."""
    if rows:
        _show_rows(path, rows, phase, top, as_json)
        return
    if phase is not None:
        raise UsageError("--phase says which rows to show: give --rows SEGMENT:INDEX too")
    from harness.report.artefacts import as_text, facts

    found = facts(path)
    print(json.dumps(found) if as_json else as_text(found))


def _show_rows(path: Path, wanted: list[str], phase: str | None, top: int, as_json: bool) -> None:
    from harness.report.json_report import plain
    from harness.report.saved import rows_text
    from harness.rows import read_rows
    from harness.storage import Recording
    from harness.types import Phase

    if phase is not None and phase not in list(Phase):
        raise UsageError(f"--phase is {phase!r}: expected prefill or decode")
    places = [_place(one) for one in wanted]
    recording = Recording(path)
    one = None if phase is None else Phase(phase)
    found = [row for segment, indices in places for row in read_rows(recording, segment, indices, one, top=top)]
    print(json.dumps(plain(found), allow_nan=False) if as_json else rows_text(found))


def _place(text: str) -> tuple[str, list[int]]:
    """Segment and indices of "SEGMENT:INDEX[,INDEX..]". UsageError for anything else."""
    segment, _, listed = text.rpartition(":")
    indices = listed.split(",")
    if not segment or not all(index.isascii() and index.isdigit() and len(index) < 10 for index in indices):
        raise UsageError(f"--rows is {text!r}: expected SEGMENT:INDEX[,INDEX..], for instance prose-00-d512:511,512")
    return segment, [int(index) for index in indices]
