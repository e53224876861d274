"""What recording costs: ratios from one run on one engine, over the embedded model.

    python scripts/bench_record.py [--repeats 3] [--dtype bfloat16] [--idle]

Prints, from one run: time of a recording over the same requests with nothing captured and nothing forced
(`prompt_logprobs=0` in both), as the median of pairs; what the engine's processes grow by while recording a corpus and
one four times as long; prompt rows a second of the capture over those of `prompt_logprobs=-1` through vLLM's API. The
last is bound by the engine's own prefill, which is timed too: what a row costs beyond it is the capture's share.

With `--idle` only: tokens a second of ordinary requests with the plugin installed and not asked, over those without it.
Two engines stand side by side and take turns, the first to go changing every pair.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from harness.corpus import build_corpus, load_manifest, load_tokenizer, seal
from harness.embedded import embedded_model
from harness.engine.session import EngineSession
from harness.types import Corpus

DEPTH = 512  # of the quick corpus's segments; its deeper ones capture as many rows for four times the work
PROMPT = 512  # tokens of the prompts whose every row is captured
ALL_LOGPROBS_ROWS = 64  # `prompt_logprobs=-1` makes V Python objects a row


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--idle", action="store_true", help="what the plugin costs that is not asked")
    asked = options.parse_args()
    model = str(embedded_model())
    if asked.idle:
        ratios = idle_ratios(model, asked.dtype, asked.repeats)
        print(f"tokens a second, plugin not asked / not there: {statistics.median(ratios):.3f}  (all: {_list(ratios)})")
        return
    small, large = bench_corpus(model, repeats=1), bench_corpus(model, repeats=4)
    arguments = {"dtype": asked.dtype, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 29, "max_logprobs": -1}
    with EngineSession(model, arguments) as session, tempfile.TemporaryDirectory() as folder:
        session.serve_uncaptured(small)
        session.record(small, Path(folder) / "warm-up")  # pays for what is compiled or imported once
        ratios = [timed_ratio(session, small, Path(folder) / f"r{i}") for i in range(asked.repeats)]
        print(f"recording / same requests uncaptured: {statistics.median(ratios):.3f}  (all: {_list(ratios)})")
        growth = [memory_growth(session, corpus, Path(folder) / f"m{i}") for i, corpus in enumerate((small, large))]
        print(f"memory while recording, over the uncaptured peak: {growth[0]:.0f} MB for {small.rows} rows, "
              f"{growth[1]:.0f} MB for {large.rows} rows")  # fmt: skip
        plain, capture, public = prompt_seconds(session, small, Path(folder) / "p")
        print(f"prompt rows a second, capture / prompt_logprobs=-1: {public / capture:.0f}")
        print(f"prompt rows a second, nothing captured / prompt_logprobs=-1: {public / plain:.0f}")
        print(f"time of a prompt row beyond the prefill, -1 / capture: {(public - plain) / (capture - plain):.0f}")


def bench_corpus(model: str, *, repeats: int) -> Corpus:
    """One shallow segment of each kind of the quick corpus, as many times as asked."""
    quick = build_corpus(load_manifest("quick"), load_tokenizer(model), tokenizer_name="smollm2")
    shallow = {s.kind: s for s in quick.segments if s.depth == DEPTH}.values()
    segments = [dataclasses.replace(s, id=f"{s.id}-{i}") for i in range(repeats) for s in shallow]
    return seal(dataclasses.replace(quick, name="bench", segments=tuple(segments)))


def timed_ratio(session: EngineSession, corpus: Corpus, folder: Path) -> float:
    """Wall time of a recording over that of the same requests with nothing captured, one after the other."""
    plain = session.serve_uncaptured(corpus)
    manifest = session.record(corpus, folder)
    assert manifest.seconds is not None
    return manifest.seconds / plain


def idle_ratios(model: str, dtype: str, repeats: int) -> list[float]:
    """Seconds without the plugin over seconds with it not asked, of the same requests, pair by pair."""
    engines = {plugins: start_plain(model, dtype, plugins) for plugins in ("", "logitgate")}
    for engine in engines.values():
        timed_tokens(engine)  # pays for what is imported once
    ratios = []
    for number in range(repeats):
        order = sorted(engines, reverse=bool(number % 2))
        seconds = {plugins: timed_tokens(engines[plugins]) for plugins in order}
        ratios.append(seconds[""] / seconds["logitgate"])
    for engine in engines.values():
        engine.llm_engine.engine_core.shutdown()
    return ratios


def start_plain(model: str, dtype: str, plugins: str) -> Any:
    """An engine in vLLM's own process layout whose processes load the named plugins; nothing is asked of them."""
    from vllm import LLM

    os.environ["VLLM_PLUGINS"] = plugins  # its processes inherit it
    return LLM(model, dtype=dtype, enforce_eager=True, kv_cache_memory_bytes=1 << 28, max_model_len=1024)


def timed_tokens(engine: Any) -> float:
    """Wall seconds of 4 requests at once, 128 tokens in and 64 out."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(100 * i + 100, 100 * i + 228))} for i in range(4)]
    begun = time.monotonic()
    engine.generate(prompts, params, use_tqdm=False)
    return time.monotonic() - begun


def memory_growth(session: EngineSession, corpus: Corpus, folder: Path) -> float:
    """Peak memory of this process and its children while recording, less the peak while serving uncaptured, MB."""
    with peak() as plain:
        session.serve_uncaptured(corpus)
    with peak() as recording:
        session.record(corpus, folder)
    return (recording[0] - plain[0]) / 1e6


def prompt_seconds(session: EngineSession, corpus: Corpus, folder: Path) -> tuple[float, float, float]:
    """Seconds a prompt row: nothing captured, captured whole, and through the API with all log-probs."""
    prompts_only = [
        dataclasses.replace(s, token_ids=s.token_ids[: PROMPT + 1], decode_from=PROMPT, windows=((0, PROMPT),))
        for s in corpus.segments
    ]
    prompt_corpus = seal(dataclasses.replace(corpus, segments=tuple(prompts_only)))
    plain = statistics.median(session.serve_uncaptured(prompt_corpus) for _ in range(3))
    manifests = [session.record(prompt_corpus, folder / str(i)) for i in range(3)]
    capture = statistics.median(m.seconds for m in manifests if m.seconds is not None)
    ids = corpus.segments[0].token_ids[: ALL_LOGPROBS_ROWS + 1].tolist()
    begun = time.monotonic()
    session.all_prompt_logprobs(ids)
    public = time.monotonic() - begun
    return plain / prompt_corpus.rows, capture / prompt_corpus.rows, public / ALL_LOGPROBS_ROWS


@contextmanager
def peak() -> Iterator[list[int]]:
    """The largest resident memory of this process and its children while inside, bytes, as the list's one entry."""
    seen, stop = [0], threading.Event()

    def watch() -> None:
        me = psutil.Process()
        while not stop.wait(0.05):
            family = [me, *me.children(recursive=True)]
            seen[0] = max(seen[0], sum(_resident(p) for p in family))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    main()
