"""A tiny random Llama, a corpus for it, and a real vLLM server and command line to record it with, in processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import psutil

from harness.corpus import save_corpus, seal
from harness.types import Corpus, Segment

VOCABULARY = 320
ENGINE = ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 27),
          "--max-num-batched-tokens", "64"]  # fmt: skip
NAME = "tiny"


def save_model(folder: Path) -> None:
    """The model, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_corpus(segments: int) -> Corpus:
    """Segments with both phases, their windows reaching past the decode start."""
    random = np.random.default_rng(0)
    made = tuple(
        Segment(
            id=f"s{i}",
            document=f"d{i}",
            kind="prose",
            depth=100,
            token_ids=random.integers(3, VOCABULARY, 133 + i).astype(np.int32),
            decode_from=100 + i,
            windows=((60, 120 + i),),
        )
        for i in range(segments)
    )
    unsigned = Corpus(
        name="tiny", version="1", tokenizer="none", tokenizer_sha256="", vocab_size=VOCABULARY, bos="none", smoke=True,
        segments=made, sources=(),
    )  # fmt: skip
    return seal(unsigned)


def save_corpus_file(path: Path, segments: int) -> Corpus:
    """The corpus, also as a file for the command line."""
    corpus = make_corpus(segments)
    save_corpus(corpus, path)
    return corpus


class LiveServer:
    """A vLLM server in processes of its own, which can be killed and started again at the same address."""

    def __init__(self, model: Path, root: Path, log: Path, *, arguments: list[str] | None = None, asked: bool = True):
        self.model, self.root, self.log = model, root, log
        self._arguments = ENGINE if arguments is None else arguments
        self._asked = asked
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it serves."""
        asked = {"VLLM_PLUGINS": "logitgate", "LOGITGATE_RECORDINGS": str(self.root)} if self._asked else {}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self.port), *self._arguments]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, env=os.environ | asked, stdout=log, stderr=subprocess.STDOUT)
        wait_for(self.answers, seconds=300, what=f"server up; see {self.log}", alive=self._process)

    def answers(self) -> bool:
        """Whether it serves."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def complete(self, **body: object) -> httpx.Response:
        """A completion of three ids, or whatever the body says."""
        given = {"model": NAME, "prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "ignore_eos": True} | {
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        return httpx.post(f"{self.url}/v1/completions", json=given | body, timeout=120)

    def workers(self) -> list[psutil.Process]:
        """Its `VLLM::Worker` processes."""
        assert self._process is not None
        return [p for p in family(self._process.pid) if "Worker" in " ".join(p.cmdline())]

    def stop(self) -> None:
        """End it and all its processes."""
        if self._process is None:
            return
        processes = family(self._process.pid)
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end(processes)
        self._process = None


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants; none if it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end(processes: list[psutil.Process]) -> None:
    """Kill those of the processes that still run."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def logitgate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [str(Path(sys.executable).with_name("logitgate")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def start_logitgate(*arguments: str | Path) -> subprocess.Popen[str]:
    """Start the command, its output kept. It hears Ctrl-C, even where a shell runs the tests in the background."""
    command = [str(Path(sys.executable).with_name("logitgate")), *map(str, arguments)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is ignored stays so in a new process
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)


def parts(folder: Path) -> list[Path]:
    """The parts a recording has so far."""
    return sorted(folder.glob("part-*.parquet"))


def wait_for(
    good: Callable[[], bool], *, seconds: float, what: str, alive: subprocess.Popen[bytes] | None = None
) -> None:
    """Wait until something is so. Fails if it takes too long, or the process it depends on ends."""
    limit = time.monotonic() + seconds
    while not good():
        assert time.monotonic() < limit, f"waited {seconds} s for: {what}"
        assert alive is None or alive.poll() is None, f"the process ended while waiting for: {what}"
        time.sleep(0.05)
