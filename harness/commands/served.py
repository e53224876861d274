"""Recording a running server. Part of `cli`, which runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def record_server(url: str, corpus: Path, out: Path, **options: Any) -> None:
    """`record --server`: record, then say what there is, or where the rows are and what to do with them."""
    from harness.corpus import load_corpus
    from harness.engine.served import Options, record_served
    from harness.report.artefacts import recording_line
    from harness.report.console import progress_bar

    loaded = load_corpus(corpus)
    with progress_bar("server, requests") as progress:
        manifest = record_served(url, loaded, out, Options(**options), progress)
    if manifest.complete:
        print(recording_line(out, manifest), flush=True)
        return
    print(
        f"{out}: the server wrote the rows on its own machine, below its LOGITGATE_RECORDINGS folder. Copy "
        f"{out.resolve().name}/part-*.parquet from there into {out}, then run: logitgate finish {out}",
        flush=True,
    )


def finish(
    folder: Annotated[Path, typer.Argument(help="Folder of `record --server`, with the server's parts copied in.")],
) -> None:
    """Complete a recording whose rows a server wrote on another machine."""
    from harness.engine.served import finish_served
    from harness.report.artefacts import recording_line

    print(recording_line(folder, finish_served(folder)), flush=True)
