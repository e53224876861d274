"""Every way the engine runs, recorded over a tiny random Llama: rows, instrument check, differences, outputs.

    python scripts/engine_matrix.py [--strength 3] [--minutes M] [--work FOLDER] [--out results/engine_matrix]

An engine is one value of each of: runner (MRV1, MRV2) x mode (eager, compile) x prompts (one shot, in chunks of 64) x
prefix cache (off, on) x dtype (bf16, f16, f32) x way (offline, server); each records at concurrency 1 and at 8. The
engines are a covering array: with strength 3 every possible combination of three factors' values occurs. MRV2 runs
without a GPU, through Triton's interpreter in one process, so eager and offline only.

OUT.json and OUT.md are written after every engine; started again, what they hold with its recording is not made again.

    rows        every expected row is there exactly once
    instrument  rows whose log-prob the engine's own equals, of those it reported (all of them), and the largest error
    differ      rows not bit-equal to those of the same dtype's plainest case: MRV1, eager, one shot, no cache,
                offline, concurrency 1; then their mean KL(plainest || case) in nats, and flips. The instrument check
                holds every row to the engine that made it, so what differs here differs in the engine.
    cached      decode rows after a prefix-cache hit
    outputs     free greedy tokens equal those of an offline engine without the plugin
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from harness.corpus import seal
from harness.metrics import position_metrics
from harness.storage import Recording
from harness.types import Corpus, Phase, Segment

FACTORS: Mapping[str, tuple[str, ...]] = {
    "runner": ("MRV1", "MRV2"),
    "mode": ("eager", "compile"),
    "chunks": ("one shot", "chunked"),
    "prefix": ("off", "on"),
    "dtype": ("bfloat16", "float16", "float32"),
    "via": ("offline", "server"),
}
PLAIN = {"runner": "MRV1", "mode": "eager", "chunks": "one shot", "prefix": "off", "via": "offline"}
CONCURRENCIES = (1, 8)
TOKENS = 16  # decoded for each greedy prompt
VOCABULARY = 320
BLOCK = 32  # tokens of a cache block: hits within a prompt of 100
Engine = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strength", type=int, default=3, help="every combination of so many factors")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no engine after so many")
    parser.add_argument("--work", type=Path, default=Path("build/engine_matrix"), help="models and recordings")
    parser.add_argument("--out", type=Path, default=Path("results/engine_matrix"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print("RESULT", json.dumps(child(**json.loads(asked.child))))
        return
    until = time.monotonic() + 60 * asked.minutes
    engines = list(covering(asked.strength))
    if not (asked.work / "model").exists():
        save_model(asked.work / "model")
    known = kept_results(asked.out.with_suffix(".json"))
    for engine in engines:
        if not done(known.get(name(engine)), asked.work) and time.monotonic() < until:
            known[name(engine)] = run(asked.work, engine)
        write(asked.out, engines, known, asked.strength)


# --------------------------------------------------------------------------- which engines


def possible(engine: Engine) -> bool:
    """The interpreted MRV2 compiles nothing and lives in one process."""
    return engine["runner"] == "MRV1" or (engine["mode"], engine["via"]) == ("eager", "offline")


def covering(strength: int) -> Iterable[Engine]:
    """Engines with every possible combination of `strength` factors' values, the plainest first.

    Greedy: the one that adds most, again and again. Concurrency is no factor here, since every engine has both.
    """
    every = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    every = [engine for engine in every if possible(engine)]
    missing = {pick for engine in every for pick in picks(engine, strength)}
    for engine in (PLAIN | {"dtype": dtype} for dtype in FACTORS["dtype"]):
        missing -= set(picks(engine, strength))
        yield {factor: engine[factor] for factor in FACTORS}
    while missing:
        best = max(every, key=lambda engine: sum(pick in missing for pick in picks(engine, strength)))
        missing -= set(picks(best, strength))
        yield best


def picks(engine: Engine, strength: int) -> Iterable[tuple[tuple[str, str], ...]]:
    return itertools.combinations(sorted(engine.items()), strength)


def name(engine: Engine) -> str:
    return "-".join(engine[factor].replace(" ", "") for factor in FACTORS)


# --------------------------------------------------------------------------- running them


def run(work: Path, engine: Engine) -> dict[str, Any]:
    """Record with one engine at every concurrency; a failure is its result."""
    begun = time.monotonic()
    print(f"{time.strftime('%H:%M:%S')} {name(engine)}", flush=True)
    folder = work / name(engine) / str(int(time.time()))
    told = in_child(how="record", engine=engine, work=str(work), folder=str(folder))
    plain = without_plugin(work, engine)
    result: dict[str, Any] = {"seconds": round(time.monotonic() - begun)}
    if "error" in told:
        return result | {"error": told["error"]}
    result["outputs"] = plain.get("error", told["tokens"] == plain.get("tokens"))
    base = work / name(PLAIN | {"dtype": engine["dtype"]})
    for case in CONCURRENCIES:
        path = folder / f"c{case}"
        (base_path,) = sorted(base.glob("*/c1"))[-1:] or (path,)
        result[f"c{case}"] = {"folder": str(path.relative_to(work))} | facts(Recording(path), Recording(base_path))
    return result


def without_plugin(work: Path, engine: Engine) -> dict[str, Any]:
    """Greedy tokens of the engine, offline and with no plugin loaded; asked for once."""
    kept = work / f"outputs-{name(engine | {'via': 'offline'})}.json"
    if not kept.exists():
        told = in_child(how="absent", engine=engine, work=str(work), folder="")
        if "error" in told:
            return told
        kept.write_text(json.dumps(told))
    answer: dict[str, Any] = json.loads(kept.read_text())
    return answer


def in_child(**asked: Any) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k not in ("VLLM_PLUGINS", "LOGITGATE_CAPTURE")}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if asked["how"] == "absent":  # one process starts faster than three
        environment |= {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if asked["engine"]["runner"] == "MRV2":
        environment |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, __file__, "--child", json.dumps(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            answer: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return answer
    return {"error": (done.stderr.strip().splitlines() or ["ended without a word"])[-1][:300]}


def child(how: str, engine: Engine, work: str, folder: str) -> dict[str, Any]:
    """In a process of its own: one engine, recorded, or only asked for greedy tokens."""
    if engine["runner"] == "MRV2":
        let_triton_interpret_on_cpu()
    arguments = {
        "skip_tokenizer_init": True,
        "dtype": engine["dtype"],
        "enforce_eager": engine["mode"] == "eager",
        "kv_cache_memory_bytes": 1 << 27,
        "max_num_batched_tokens": 64 if engine["chunks"] == "chunked" else 2048,
        "enable_prefix_caching": engine["prefix"] == "on",
        "block_size": BLOCK,
    }
    model = f"{work}/model"
    if how == "absent":
        return {"tokens": greedy_without_plugin(model, arguments)}
    record = record_server if engine["via"] == "server" else record_offline
    return {"tokens": record(model, arguments, Path(folder), engine["runner"])}


def let_triton_interpret_on_cpu() -> None:
    """vLLM asks Triton whether a backend is active before it takes MRV2; the interpreter needs none."""
    from types import SimpleNamespace

    import triton.backends

    active = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=active, compiler=None)


def greedy_without_plugin(model: str, arguments: dict[str, Any]) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    from harness.engine.start import numba_out_of_sight

    with numba_out_of_sight():
        llm = LLM(model, **arguments)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    answers = [llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0] for ids in greedy_prompts()]
    return [list(answer.outputs[0].token_ids) for answer in answers]


def record_offline(model: str, arguments: dict[str, Any], folder: Path, runner: str) -> list[list[int]]:
    from harness.engine.session import EngineSession

    with EngineSession(model, arguments) as session:
        if session.facts["runner"] != runner:
            raise RuntimeError(f"the engine runs {session.facts['runner']}")
        answers = [session.greedy({"it": ids}, TOKENS)["it"] for ids in greedy_prompts()]
        for number in CONCURRENCIES:
            session.record(make_corpus(), folder / f"c{number}", concurrency=number)
    return [[token for token, _ in answer] for answer in answers]


def record_server(model: str, arguments: dict[str, Any], folder: Path, runner: str) -> list[list[int]]:
    import httpx

    from harness.engine.served import Options, record_served

    port = 18000 + os.getpid() % 10_000
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    for argument, value in arguments.items():
        flag = argument.replace("_", "-")
        command += [f"--{flag}", str(value)] if not isinstance(value, bool) else [f"--{'' if value else 'no-'}{flag}"]
    asked = {"VLLM_PLUGINS": "logitgate", "LOGITGATE_RECORDINGS": str(folder)}
    server = subprocess.Popen(command, env=os.environ | asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_up(url, server)
        answers = []
        for prompt in greedy_prompts():
            body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=600)
            answers.append(answer.json()["choices"][0]["token_ids"])
        for number in CONCURRENCIES:
            record_served(url, make_corpus(), folder / f"c{number}", Options(concurrency=number))
    finally:
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        server.terminate()
        for process in psutil.wait_procs(processes, timeout=30)[1]:
            process.kill()
    return answers


def until_up(url: str, server: subprocess.Popen[bytes]) -> None:
    import httpx

    while server.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise RuntimeError("the server ended while it started")


# --------------------------------------------------------------------------- what is recorded


def save_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=384, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.15, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def make_corpus() -> Corpus:
    """Six segments scored in both phases; two of decode alone that begin as the first does, for the prefix cache."""
    random = np.random.default_rng(0)
    ids = [random.integers(3, VOCABULARY, 117 + i).astype(np.int32) for i in range(8)]
    for later in ids[6:]:
        later[: 3 * BLOCK] = ids[0][: 3 * BLOCK]
    segments = tuple(
        Segment(
            id=f"s{i}", document=f"d{i}", kind="prose", depth=100, decode_from=100 + i,
            windows=((60, 104 + i),) if i < 6 else (), token_ids=ids[i],
        )
        for i in range(8)
    )  # fmt: skip
    return seal(
        Corpus(
            name="matrix", version="1", tokenizer="none", tokenizer_sha256="", vocab_size=VOCABULARY, bos="none",
            smoke=True, segments=segments, sources=(),
        )
    )  # fmt: skip


def greedy_prompts() -> list[list[int]]:
    return [segment.token_ids[:40].tolist() for segment in make_corpus().segments[:3]]


# --------------------------------------------------------------------------- what came out


def facts(recording: Recording, base: Recording) -> dict[str, Any]:
    """What the columns show of one recording."""
    corpus, manifest = recording.corpus, recording.manifest
    there = [
        np.array_equal(recording.indices(segment.id, phase), segment.indices(phase))
        for segment in corpus.segments
        for phase in Phase
    ]
    check = manifest.instrument
    assert check is not None
    return {
        "once": all(there) and sum(part.rows for part in manifest.parts) == corpus.rows,
        "rows": manifest.rows_written,
        "instrument": check.passed,
        "instrument_rows": check.rows,
        "instrument_error": check.max_error,
        **difference(base, recording),
    }


def difference(base: Recording, other: Recording) -> dict[str, Any]:
    differ, cached, columns = 0, 0, []
    for segment in base.corpus.segments:
        for phase in Phase:
            there = np.intersect1d(base.indices(segment.id, phase), other.indices(segment.id, phase))
            if not len(there):
                continue
            a, b = base.read(segment.id, phase, there), other.read(segment.id, phase, there)
            differ += int((a.logits.view(np.uint8) != b.logits.view(np.uint8)).any(axis=1).sum())
            cached += int((b.facts.cached_tokens > 0).sum()) if b.facts is not None and phase is Phase.DECODE else 0
            dtypes = base.manifest.logits_dtype, other.manifest.logits_dtype
            columns.append(position_metrics(a.logits, dtypes[0], b.logits, dtypes[1], a.targets))
    kl, flips = (np.concatenate([c[column] for c in columns]) for column in ("kl_full", "flip"))
    return {"differ": differ, "cached": cached, "kl_mean": float(kl.mean()), "flips": int(flips.sum())}


def kept_results(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text())["engines"] if path.exists() else {}
    return results


def done(result: dict[str, Any] | None, work: Path) -> bool:
    """Whether a result stands: it failed in no way and its recordings are still there."""
    cases = [] if result is None else [result.get(f"c{number}") for number in CONCURRENCIES]
    return bool(cases) and all(case is not None and (work / case["folder"]).is_dir() for case in cases)


def write(out: Path, engines: list[Engine], results: dict[str, Any], strength: int) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps({"strength": strength, "engines": results}, indent=1) + "\n")
    head = [*FACTORS, "concurrency", "rows", "instrument", "differ", "mean KL", "flips", "cached", "outputs"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for engine in engines:
        result = results.get(name(engine))
        if result is None or "error" in result:
            why = "not run" if result is None else f"failed: {result['error']}"
            lines.append("| " + " | ".join([*engine.values(), "", why]) + " |")
            continue
        for number in CONCURRENCIES:
            case = result[f"c{number}"]
            cells = [*engine.values(), number, f"{case['rows']} once" if case["once"] else "**NOT ONCE**"]
            cells += [f"{'equal' if case['instrument'] else '**NOT**'} at {case['instrument_rows']} "
                      f"({case['instrument_error']:.0e})"]  # fmt: skip
            cells += [case["differ"], f"{case['kl_mean']:.1e}" if case["differ"] else "", case["flips"]]
            cells += [case["cached"], {True: "same", False: "**differ**"}.get(result["outputs"], result["outputs"])]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    run_so_far = sum(name(engine) in results for engine in engines)
    title = (
        f"# Engine matrix\n\n`python scripts/engine_matrix.py --strength {strength}`: {run_so_far} of {len(engines)} "
        "engines run, each at concurrency 1 and 8. The script's first lines say what the columns are.\n\n"
    )
    out.with_suffix(".md").write_text(title + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
