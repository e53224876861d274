"""One running offline engine that can record many times: the stock build, then patches applied and undone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.corpus import check_fits
from harness.engine.arguments import make_config, with_comparable_defaults
from harness.engine.describe import build_from
from harness.engine.instrument import LogprobLog
from harness.engine.layout import head_dtype
from harness.engine.logs import EngineLog
from harness.engine.requests import ARGUMENT, ScoredRequest, plan
from harness.engine.start import refuse_untested, start_engine
from harness.errors import EngineError, PatchError, UsageError
from harness.patching import LoadedPatch
from harness.patterns import Pattern
from harness.storage import begin_recording, finish_recording
from harness.types import Build, Corpus, Json, Manifest

Progress = Callable[[int, int], None]
"""Called with (requests done, requests in all)."""


class EngineSession:
    """A loaded vLLM engine, in vLLM's own process layout. Use as a context manager.

    Raises UsageError for arguments vLLM refuses, EngineError if it does not start, is an untested version (unless
    `untested` is true; the instrument check still decides), or runs without the plugin.
    """

    def __init__(self, model: str, arguments: Mapping[str, Any], *, untested: bool = False) -> None:
        self.model = model
        self.requested = with_comparable_defaults(arguments)
        self._log = EngineLog()
        with self._log.attached():
            refuse_untested(untested)
            self._config = make_config(model, self.requested)
            self._engine = start_engine(self._config, self._log)
        self.facts: Mapping[str, Any] = self._call("describe")[0]
        self.resumed_requests = 0  # of the last recording, after the engine preempted them

    @property
    def vocab_size(self) -> int:
        """Columns of a row of logits."""
        return int(self._config.model_config.get_vocab_size())

    @property
    def max_positions(self) -> int:
        """The longest sequence the engine serves, tokens."""
        return int(self._config.model_config.max_model_len)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Shut the engine down."""
        with self._log.attached():
            self._engine.engine_core.shutdown()
        self._log.discard()

    @contextmanager
    def patched(self, patches: Sequence[LoadedPatch]) -> Iterator[tuple[Json, ...]]:
        """Apply patches in every worker, undo them on leaving, and raise PatchError if one never fired."""
        try:
            for patch in patches:
                self._call("patch", patch.reference)
            yield tuple(patch.describe() for patch in patches)
        except Exception:  # not an interrupt: that reaches the engine too, which then answers no one
            with suppress(EngineError):
                self._call("undo")
            raise
        require_reached(patches, self._call("undo"))

    def record(
        self,
        corpus: Corpus,
        folder: Path,
        *,
        patches: Sequence[Json] = (),
        concurrency: int = 1,
        pattern: Pattern | None = None,
        prompt_rows: str = "engine",
        resume: bool = False,
        progress: Progress | None = None,
    ) -> Manifest:
        """Record every scored row of the corpus into `folder`.

        `pattern` says how requests meet the engine, concurrency included; None: in the corpus's order, so many at once.

        `prompt_rows` is "engine" (the prompt-logprob pass, with the engine's log-probs as a check on each row) or
        "window" (the head applied to the wanted rows only). Raises EngineError if the engine samples an id that was
        not forced, dies, or cannot write; what was written until then stays and can be resumed.
        """
        if concurrency < 1:
            raise UsageError(f"--concurrency is {concurrency}: expected at least 1")
        pattern = pattern or Pattern(concurrency=concurrency)
        check_fits(corpus, max_positions=self.max_positions, vocab_size=self.vocab_size, tokenizer_sha256=None)
        begun = time.monotonic()
        build = self._build(patches, pattern, prompt_rows)
        logits_dtype = head_dtype(self._config)
        present = begin_recording(
            folder, corpus, build, vocab_size=self.vocab_size, logits_dtype=logits_dtype, resume=resume
        )
        self._call("begin", str(folder.resolve()), self.vocab_size, prompt_rows)
        log = LogprobLog()
        try:
            requests = plan(corpus, present.by_segment(), pattern) or plan(corpus)[:1]  # one, for the instrument check
            self._run(requests, pattern.concurrency, prompt_rows, log, progress)
        except Exception:  # as above
            with suppress(EngineError):
                self._call("finish")
            raise
        self.resumed_requests = sum(answer.get("resumed", 0) for answer in self._call("finish"))
        check = log.check(folder)
        return finish_recording(folder, build, instrument=check, seconds=time.monotonic() - begun)

    def serve_uncaptured(self, corpus: Corpus, *, concurrency: int = 1) -> float:
        """Serve the same requests with nothing captured and nothing forced; wall seconds. For benchmarks."""
        begun = time.monotonic()
        self._run(plan(corpus), concurrency, "engine", log=None, progress=None)
        return time.monotonic() - begun

    def forget_prefixes(self) -> None:
        """Empty the prefix cache: what one build wrote there is not for another to read."""
        self._engine.reset_prefix_cache()

    def answers(self) -> bool:
        """Whether the engine's workers still answer."""
        try:
            self._call("describe")
        except EngineError:
            return False
        return True

    def greedy(self, prompts: Mapping[str, Sequence[int]], tokens: int) -> dict[str, list[tuple[int, float]]]:
        """Free greedy decoding, nothing forced or captured: by name, each id with its lead over the next best, nats.

        All prompts are served at once. The lead is infinite where the vocabulary has one id.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=2,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for name, ids in prompts.items():
            self._add(f"greedy:{name}", ids, params)
        found = {}
        while self._engine.has_unfinished_requests():
            for output in self._step():
                if output.finished:
                    found[output.request_id.removeprefix("greedy:")] = _with_leads(output.outputs[0])
        return found

    def all_prompt_logprobs(self, ids: Sequence[int]) -> None:
        """Ask vLLM's own API for every log-prob of every prompt row (needs `max_logprobs=-1`). For benchmarks."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
        self._add("all-logprobs", ids, params)
        while self._engine.has_unfinished_requests():
            self._step()

    def _build(self, patches: Sequence[Json], pattern: Pattern, prompt_rows: str) -> Build:
        requested = {**self.requested, "concurrency": pattern.concurrency, "prompt_rows": prompt_rows}
        plain = Pattern(concurrency=pattern.concurrency)
        requested |= {k: v for k, v in asdict(pattern).items() if v != getattr(plain, k)}
        return build_from(self.model, requested, self.facts, patches)

    def _run(
        self,
        requests: Sequence[ScoredRequest],
        concurrency: int,
        prompt_rows: str,
        log: LogprobLog | None,
        progress: Progress | None,
    ) -> None:
        waiting = list(reversed(requests))
        running: dict[str, ScoredRequest] = {}
        done = 0
        while waiting or running:
            while waiting and len(running) < concurrency:
                request = waiting.pop()
                running[request.id] = request
                self._submit(request, prompt_rows, ours=log is not None)
            for output in self._step():
                if output.finished:
                    request = running.pop(output.request_id)
                    if log is not None:
                        log.add(request, output)
                    done += 1
                    if progress:
                        progress(done, len(requests))

    def _submit(self, request: ScoredRequest, prompt_rows: str, *, ours: bool) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=len(request.forced),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            prompt_logprobs=0 if request.scores_prompt and prompt_rows == "engine" else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={ARGUMENT: request.to_argument()} if ours else None,
        )
        params.skip_reading_prefix_cache = True if request.scores_prompt else None
        self._add(request.id, request.prompt, params)

    def _add(self, request_id: str, ids: Sequence[int], params: Any) -> None:
        (prompt,) = self._engine.renderer.render_cmpl([{"prompt_token_ids": list(ids)}])
        self._engine.add_request(request_id, prompt, params)

    def _step(self) -> list[Any]:
        try:
            return list(self._engine.step())
        except Exception as error:
            raise EngineError(
                f"the engine stopped: {error or type(error).__name__}; {self._log.reason()}. "
                "What was recorded is kept; go on with --resume."
            ) from error

    def _call(self, name: str, *args: Any) -> list[Any]:
        try:
            answers = self._engine.collective_rpc(f"logitgate_{name}", args=args)
        except Exception as error:
            raise EngineError(
                f"the engine's workers did not answer `{name}`: {error or type(error).__name__}"
            ) from error
        for answer in answers:
            if "error" in answer:
                raise EngineError(answer["error"])
        return [answer["ok"] for answer in answers]


def _with_leads(completion: Any) -> list[tuple[int, float]]:
    """Each sampled id with the log-prob it leads the best other one by."""
    leads = []
    for chosen, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
        others = [entry.logprob for token, entry in candidates.items() if token != chosen]
        leads.append((int(chosen), candidates[chosen].logprob - max(others) if others else math.inf))
    return leads


def require_reached(patches: Sequence[LoadedPatch], workers: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """PatchError for a patch that no worker's engine came to, or a compiled engine came to in part only."""
    for patch in patches:
        hooks = [worker[patch.patch.name] for worker in workers]
        if all(hook["fired"] == 0 for hook in hooks):
            raise PatchError(
                f"patch {patch.reference} never fired: its hooks were not called by any worker, so this recording "
                "is of the unpatched engine; check the site it wraps against this engine's configuration"
            )
        if unseen := max(hook["unseen"] for hook in hooks):
            raise PatchError(
                f"patch {patch.reference}: {unseen} of its hooks were never called, since this engine runs compiled "
                "code that does not see them, so this recording is of a half-patched engine; record with "
                "--enforce-eager, or give the patch engine={'enforce_eager': True}"
            )
