"""Every way the engine runs, recorded over a tiny random Llama: rows, instrument check, differences, outputs, speed.

    python scripts/engine_matrix.py [--strength 3] [--first N] [--work FOLDER] [--out results/engine_matrix]

Factors: runner x {eager, compile} x {one shot, chunked} x {prefix cache on, off} x {concurrency 1, 8} x
{bf16, f16, f32} x {offline, server}. The cases are a covering array: with strength 3 every combination of three
factors' values occurs. MRV2 runs through Triton's interpreter, in one process: eager and offline only. Each engine is
loaded once for the concurrencies it is needed with, and twice more for its outputs and its speed, without the plugin
and with it installed and not asked. Case by case, written to OUT.json and OUT.md:

    rows        every expected row exactly once, and the instrument check passed
    same        the content's id equals that of the same dtype's plainest case (eager, one shot, no cache, offline)
    KL          mean KL(plainest || case) in nats where it does not, and flips
    outputs     greedy tokens with the plugin asked, installed and not asked, and not loaded are the same
    speed       tokens a second with the plugin installed and not asked over those without it
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.corpus import seal
from harness.metrics import position_metrics
from harness.storage import Recording
from harness.types import Corpus, Manifest, Phase, Segment

FACTORS: Mapping[str, tuple[Any, ...]] = {
    "runner": ("MRV1", "MRV2"),
    "mode": ("eager", "compile"),
    "chunks": ("one shot", "chunked"),
    "prefix": ("off", "on"),
    "concurrency": (1, 8),
    "dtype": ("bfloat16", "float16", "float32"),
    "via": ("offline", "server"),
}
PLAIN = {"runner": "MRV1", "mode": "eager", "chunks": "one shot", "prefix": "off", "concurrency": 1, "via": "offline"}
TOKENS = 64  # decoded for each greedy prompt
VOCABULARY = 320
Case = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strength", type=int, default=3, help="every combination of so many factors")
    parser.add_argument("--first", type=int, help="only so many engine configurations")
    parser.add_argument("--work", type=Path, help="keep models and recordings here")
    parser.add_argument("--out", type=Path, default=Path("results/engine_matrix"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print("RESULT", json.dumps(child(**json.loads(asked.child))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = asked.work or Path(temporary)
        save_model(work / "model")
        groups = list(grouped([*plainest(), *covering(asked.strength)]).items())[: asked.first]
        rows = [row for number, (key, cases) in enumerate(groups) for row in run(work, number, json.loads(key), cases)]
        add_differences(rows)
    write(asked.out, rows, asked.strength)


# --------------------------------------------------------------------------- which cases


def possible(case: Case) -> bool:
    """The interpreted MRV2 compiles nothing and lives in one process."""
    return case["runner"] == "MRV1" or (case["mode"], case["via"]) == ("eager", "offline")


def plainest() -> list[Case]:
    return [PLAIN | {"dtype": dtype} for dtype in FACTORS["dtype"]]


def covering(strength: int) -> list[Case]:
    """Cases with every possible combination of `strength` factors' values: the one that adds most, again and again."""
    every = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    every = [case for case in every if possible(case)]
    missing = {pick for case in every for pick in picks(case, strength)}
    chosen = []
    for case in plainest():
        missing -= set(picks(case, strength))
    while missing:
        best = max(every, key=lambda case: sum(pick in missing for pick in picks(case, strength)))
        chosen.append(best)
        missing -= set(picks(best, strength))
    return chosen


def picks(case: Case, strength: int) -> Iterable[tuple[tuple[str, Any], ...]]:
    return itertools.combinations(sorted(case.items()), strength)


def grouped(cases: list[Case]) -> dict[str, list[Case]]:
    """Cases by what one engine load serves: all but the concurrency."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        key = json.dumps({k: v for k, v in case.items() if k != "concurrency"}, sort_keys=True)
        if case not in groups.setdefault(key, []):
            groups[key].append(case)
    return groups


# --------------------------------------------------------------------------- running them


def run(work: Path, number: int, config: Case, cases: list[Case]) -> list[dict[str, Any]]:
    """Record every case of one engine configuration; a failure is its cases' result."""
    print(f"{number + 1}: {config}", flush=True)
    folder = work / f"engine-{number}"
    numbers = [case["concurrency"] for case in cases]
    told = {
        how: in_child(how=how, config=config, work=str(work), folder=str(folder), concurrencies=numbers)
        for how in ("record", "absent", "idle")
    }
    outputs = {how: answer.get("tokens") for how, answer in told.items()}
    same = outputs["absent"] is not None and outputs["record"] == outputs["absent"] == outputs["idle"]
    speed = told["idle"]["speed"] / told["absent"]["speed"] if same else None
    recorded = told["record"].get("recordings", {})
    return [
        {**case, "folder": str(folder / f"c{case['concurrency']}"), "outputs": same, "speed": speed}
        | recorded.get(str(case["concurrency"]), {"error": told["record"].get("error", "")})
        for case in cases
    ]


def in_child(**asked: Any) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k not in ("VLLM_PLUGINS", "LOGITGATE_CAPTURE")}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if asked["how"] == "absent":
        environment["VLLM_PLUGINS"] = ""
    if asked["config"]["runner"] == "MRV2":
        environment |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, __file__, "--child", json.dumps(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            answer: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return answer
    return {"error": (done.stderr.strip().splitlines() or ["ended without a word"])[-1][:300]}


def child(how: str, config: Case, work: str, folder: str, concurrencies: list[int]) -> dict[str, Any]:
    """In a process of its own: one engine, recorded, or only asked for greedy tokens."""
    if config["runner"] == "MRV2":
        let_triton_interpret_on_cpu()
    arguments = engine_arguments(config)
    model = f"{work}/model"
    if how != "record":
        return greedy_offline(model, arguments)
    record = record_server if config["via"] == "server" else record_offline
    return record(model, arguments, Path(folder), concurrencies)


def engine_arguments(config: Case) -> dict[str, Any]:
    return {
        "skip_tokenizer_init": True,
        "dtype": config["dtype"],
        "enforce_eager": config["mode"] == "eager",
        "kv_cache_memory_bytes": 1 << 27,
        "max_num_batched_tokens": 64 if config["chunks"] == "chunked" else 2048,
        "enable_prefix_caching": config["prefix"] == "on",
    }


def let_triton_interpret_on_cpu() -> None:
    """vLLM asks Triton whether a backend is active before it takes MRV2; the interpreter needs none."""
    from types import SimpleNamespace

    import triton.backends

    active = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=active, compiler=None)


def record_offline(model: str, arguments: dict[str, Any], folder: Path, concurrencies: list[int]) -> dict[str, Any]:
    from harness.engine.session import EngineSession

    with EngineSession(model, arguments) as session:
        leads = session.greedy({str(i): prompt for i, prompt in enumerate(greedy_prompts())}, TOKENS)
        tokens = [[token for token, _ in leads[str(i)]] for i in range(len(leads))]
        made = {c: told(session.record(make_corpus(), folder / f"c{c}", concurrency=c)) for c in concurrencies}
    return {"tokens": tokens, "recordings": made}


def record_server(model: str, arguments: dict[str, Any], folder: Path, concurrencies: list[int]) -> dict[str, Any]:
    import httpx

    from harness.engine.served import Options, record_served

    port = 18000 + os.getpid() % 10_000
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        command += [f"--{flag}", str(value)] if not isinstance(value, bool) else [f"--{'' if value else 'no-'}{flag}"]
    asked = {"VLLM_PLUGINS": "logitgate", "LOGITGATE_RECORDINGS": str(folder)}
    server = subprocess.Popen(command, env=os.environ | asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_up(url, server)
        tokens = []
        for prompt in greedy_prompts():
            body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=600)
            tokens.append(answer.json()["choices"][0]["token_ids"])
        made = {
            c: told(record_served(url, make_corpus(), folder / f"c{c}", Options(concurrency=c))) for c in concurrencies
        }
    finally:
        server.terminate()
        server.wait()
    return {"tokens": tokens, "recordings": made}


def until_up(url: str, server: subprocess.Popen[bytes]) -> None:
    import httpx

    while server.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise RuntimeError("the server ended while it started")


def greedy_offline(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(model, **arguments)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    seconds = []
    for _ in range(4):  # the first pays for what is compiled or imported once
        begun = time.monotonic()
        prompts = [{"prompt_token_ids": prompt} for prompt in greedy_prompts()]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.monotonic() - begun)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return {"tokens": tokens, "speed": TOKENS * len(tokens) / min(seconds[1:])}


def told(manifest: Manifest) -> dict[str, Any]:
    check = manifest.instrument
    return {
        "id": manifest.id,
        "rows": manifest.rows_written,
        "expected": manifest.rows_expected,
        "instrument": bool(check and check.passed),
        "instrument_error": check.max_error if check else None,
    }


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
    random = np.random.default_rng(0)
    segments = tuple(
        Segment(
            id=f"s{i}", document=f"d{i}", kind="prose", depth=100, decode_from=100 + i, windows=((60, 104 + i),),
            token_ids=random.integers(3, VOCABULARY, 117 + i).astype(np.int32),
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
    return [segment.token_ids[:40].tolist() for segment in make_corpus().segments[:4]]


# --------------------------------------------------------------------------- what came out


def add_differences(rows: list[dict[str, Any]]) -> None:
    """Hold each recording against its dtype's plainest one."""
    plain = {row["dtype"]: row for row in rows if {k: row[k] for k in PLAIN} == PLAIN and "id" in row}
    for row in rows:
        base = plain.get(row["dtype"])
        if base is None or "id" not in row:
            continue
        row["same"] = row["id"] == base["id"]
        if not row["same"]:
            row |= difference(Recording(Path(base["folder"])), Recording(Path(row["folder"])))


def difference(base: Recording, other: Recording) -> dict[str, Any]:
    columns = []
    for segment in base.corpus.segments:
        for phase in Phase:
            there = np.intersect1d(base.indices(segment.id, phase), other.indices(segment.id, phase))
            a, b = base.read(segment.id, phase, there), other.read(segment.id, phase, there)
            dtypes = base.manifest.logits_dtype, other.manifest.logits_dtype
            columns.append(position_metrics(a.logits, dtypes[0], b.logits, dtypes[1], a.targets))
    kl = np.concatenate([column["kl_full"] for column in columns])
    flips = np.concatenate([column["flip"] for column in columns])
    return {"kl_mean": float(kl.mean()), "flips": int(flips.sum())}


def write(out: Path, rows: list[dict[str, Any]], strength: int) -> None:
    kept = [{k: v for k, v in row.items() if k != "folder"} for row in rows]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps({"strength": strength, "cases": kept}, indent=1) + "\n")
    head = [*FACTORS, "rows", "instrument", "same as plainest", "mean KL", "flips", "outputs", "speed"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in kept:
        cells = [row[name] for name in FACTORS]
        cells += [f"{row['rows']} of {row['expected']}" if "rows" in row else f"failed: {row['error']}"]
        cells += [row.get("instrument", ""), row.get("same", "")]
        cells += [f"{row['kl_mean']:.1e}" if "kl_mean" in row else "", row.get("flips", "")]
        cells += [row["outputs"], f"{row['speed']:.3f}" if row["speed"] else ""]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    title = f"# Engine matrix\n\n`python scripts/engine_matrix.py --strength {strength}`, {len(rows)} cases.\n\n"
    out.with_suffix(".md").write_text(title + "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
