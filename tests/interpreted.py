"""vLLM's second model runner without a GPU, in a process of its own: Triton's interpreter on the CPU engine.

    python -m tests.interpreted MODEL CORPUS FOLDER

Triton reads its environment when kernels are defined, so no process that has vLLM loaded can do this. Records the
corpus twice, request by request and then two at once with the rows of windows only, and has vLLM replay the corpus's
ids by itself (`trace_decode_token_ids`), whose log-probs of the whole vocabulary are kept.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.corpus import load_corpus
from harness.engine.session import EngineSession
from harness.types import Segment
from scripts.engine_matrix import let_triton_interpret_on_cpu

ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 27,
    "max_num_batched_tokens": 64,  # prompts of 100 ids run in chunks
    "max_logprobs": -1,
}
ENVIRONMENT = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def main(model: str, corpus_file: str, folder: Path) -> None:
    let_triton_interpret_on_cpu()
    corpus = load_corpus(Path(corpus_file))
    with EngineSession(model, ENGINE | {"enable_trace_replay": True}) as session:
        (folder / "facts.json").write_text(json.dumps(session.facts))
        session.record(corpus, folder / "mrv2")
        session.record(corpus, folder / "mrv2-batched", concurrency=2, prompt_rows="window")
        for segment in corpus.segments:
            ids, logprobs = replayed(session, segment)
            np.savez(folder / f"replayed-{segment.id}.npz", ids=ids, logprobs=logprobs)


def replayed(session: EngineSession, segment: Segment) -> tuple[Sequence[int], np.ndarray]:
    """The ids and the log-probs [D, V] that vLLM gives when it is the one that forces the segment's decode ids."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ids = segment.token_ids.tolist()
    prompt, forced = ids[: segment.decode_from], ids[segment.decode_from :]
    params = SamplingParams(
        temperature=0.0, max_tokens=len(forced), ignore_eos=True, detokenize=False, logprobs=-1,
        trace_decode_token_ids=forced, output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    session._add("replay", prompt, params)
    outputs: list[Any] = []
    while not outputs:
        outputs = [output for output in session._step() if output.finished]
    answer = outputs[0].outputs[0]
    return list(answer.token_ids), np.array([by_id(candidates) for candidates in answer.logprobs])


def by_id(candidates: Mapping[int, Any]) -> list[float]:
    return [candidates[token].logprob for token in range(len(candidates))]


if __name__ == "__main__":
    os.environ |= ENVIRONMENT
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
