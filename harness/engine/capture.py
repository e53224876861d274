"""Capture of full logits inside a worker, and forcing of the sampled ids.

Four methods are wrapped on the loaded runner's own instances, so nothing else in the process is touched:

- `runner.execute_model`: learns from the scheduler's output which of our requests run and at which positions;
- `runner.sample_tokens`: opens the step and closes it again;
- `model.compute_logits`: sees prompt rows (its argument is a view into the step's hidden states) and, on MRV2, the
  sampled rows (its argument is a gathered copy). It lies outside torch.compile and CUDA graphs;
- `runner.sampler.sample`: overwrites the sampled ids with the forced ones before log-probs are gathered, so the
  engine reports the forced id's log-prob and the logits stay untouched.

Rows are copied before control returns: later operations work in place on the same memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from harness.engine.layout import StepLayout, step_layout
from harness.engine.requests import ARGUMENT
from harness.engine.wire import Ask, parse_ask
from harness.errors import UsageError
from harness.types import Block, Phase, StepFacts

_log = logging.getLogger("logitgate")

PromptRows = Literal["engine", "window"]
"""Where prompt rows come from: the engine's own prompt-logprob pass, or the head applied to the wanted rows only."""


class RowSink(Protocol):
    """Takes captured rows; `size` is in bytes."""

    def put(self, make_block: Callable[[], Block], size: int) -> None:
        """Queue a block; may block."""


class Seat(RowSink, Protocol):
    """Where the rows of one request of a served recording go."""

    def leave(self) -> None:
        """Say that no row of this request follows. May be said twice."""


@dataclass(slots=True)
class _Tracked:
    """A request of ours while the engine serves it."""

    segment: str
    ids: NDArray[np.int32]  # prompt and forced ids
    prompt_length: int
    keep: NDArray[np.bool_]  # [len(ids) - 1] which rows to hand on
    cached_tokens: int  # taken from the prefix cache when the request was first scheduled
    window: bool  # prompt rows come from the head applied to the wanted rows
    sink: RowSink | None  # None: ids are forced, rows are not written (here)
    leave: Callable[[], None] = lambda: None
    kept: set[int] = field(default_factory=set)  # row indices handed on


@dataclass(slots=True)
class _Step:
    layout: StepLayout
    hidden: torch.Tensor  # [T, H] final states of every scheduled token
    number: int


class Capture:
    """Hooks on one loaded model runner. Idle until `start`; transparent to requests that are not ours."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sink: RowSink | None = None
        self._seat: Callable[[Ask], Seat | None] | None = None
        self._prompt_rows: PromptRows = "engine"
        self._requests: dict[str, _Tracked] = {}
        self._scheduled: dict[str, tuple[int, int]] = {}
        self._step: _Step | None = None
        self._steps = 0
        self.repeated_rows = 0
        self.resumed_requests = 0  # of ours, after they were preempted
        model = runner.get_model()
        self._compute_logits = model.compute_logits
        self._execute_model = runner.execute_model
        self._sample_tokens = runner.sample_tokens
        model.compute_logits = self._on_compute_logits
        runner.execute_model = self._on_execute_model
        runner.sample_tokens = self._on_sample_tokens
        if runner.sampler is not None:
            self._sample = runner.sampler.sample
            runner.sampler.sample = self._on_sample

    def start(self, sink: RowSink | None, prompt_rows: PromptRows) -> None:
        """Begin to hand rows to `sink`; None on ranks that force ids but do not write."""
        self._sink, self._prompt_rows = sink, prompt_rows
        self._requests.clear()
        self._steps = self.repeated_rows = self.resumed_requests = 0

    def stop(self) -> None:
        """Stop handing rows on. Requests still tracked go on being forced."""
        self._sink = None
        for request in self._requests.values():
            request.sink = None

    def serve(self, seat: Callable[[Ask], Seat | None]) -> None:
        """Take part in any recording that a request asks for; `seat` says where its rows go, None: not written here.

        From now on nothing that goes wrong in here reaches the engine: it serves others too.
        """
        self._seat = seat

    # ------------------------------------------------------------------ hooks

    def _on_execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._guard(lambda: self._follow(scheduler_output))
        return self._execute_model(scheduler_output, *args, **kwargs)

    def _follow(self, scheduler_output: Any) -> None:
        for request_id in scheduler_output.finished_req_ids:
            if finished := self._requests.pop(request_id, None):
                finished.leave()
        cached = scheduler_output.scheduled_cached_reqs
        again = {*cached.resumed_req_ids, *(new.req_id for new in scheduler_output.scheduled_new_reqs)}  # MRV2: as new
        self.resumed_requests += len(again & self._requests.keys())
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._track(new)
        tokens = scheduler_output.num_scheduled_tokens
        self._scheduled = {r: (computed[r], n) for r, n in tokens.items()} if self._requests else {}

    def _on_sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        state = self._runner.execute_model_state
        if state is None or self._requests.keys().isdisjoint(self._scheduled):
            return self._sample_tokens(*args, **kwargs)
        self._guard(lambda: self._open_step(state))
        try:
            return self._sample_tokens(*args, **kwargs)
        finally:
            self._step = None

    def _open_step(self, state: Any) -> None:
        layout = step_layout(self._runner, state, self._scheduled)
        self._steps += 1
        step = _Step(layout=layout, hidden=state.hidden_states, number=self._steps)
        self._compute_windows(step)
        if layout.sampled_logits is not None:
            self._keep_sampled(step, layout.sampled_logits)
        self._step = step

    def _on_compute_logits(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = self._compute_logits(hidden, *args, **kwargs)
        step = self._step
        if step is not None and logits is not None:
            self._guard(lambda: self._keep_computed(step, hidden, logits))
        return logits

    def _keep_computed(self, step: _Step, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        if hidden.untyped_storage().data_ptr() != step.hidden.untyped_storage().data_ptr():
            self._keep_sampled(step, logits)
        else:
            offset = hidden.storage_offset() - step.hidden.storage_offset()
            self._keep_prompt(step, offset // step.hidden.stride(0), logits)

    def _on_sample(self, *args: Any, **kwargs: Any) -> Any:
        sampled, processed = self._sample(*args, **kwargs)
        step = self._step
        if step is not None:
            self._guard(lambda: self._force(step.layout, sampled))
        return sampled, processed

    def _guard(self, work: Callable[[], None]) -> None:
        """Do a hook's work; while serving, an error ends the recordings in flight and not the engine's step."""
        try:
            work()
        except Exception:
            if self._seat is None:
                raise
            _log.exception("capture failed: the requests in flight are served on and no longer recorded")
            for request in self._requests.values():
                request.leave()
            self._requests.clear()
            self._scheduled, self._step = {}, None

    # ------------------------------------------------------------------ our requests

    def _track(self, new: Any) -> None:
        argument = (getattr(new.sampling_params, "extra_args", None) or {}).get(ARGUMENT)
        if argument is None or new.req_id in self._requests:
            return
        if self._seat is None:
            self._requests[new.req_id] = _tracked(new, argument, window=self._prompt_rows == "window", sink=self._sink)
            return
        try:
            ask = parse_ask(argument)
            vocab_size = self._runner.vllm_config.model_config.get_vocab_size()
            params = new.sampling_params
            ask.require_fit(prompt=new.prompt_token_ids, max_tokens=params.max_tokens, n=1, vocab_size=vocab_size)
        except UsageError as error:  # the front end refuses these: this came past it
            _log.warning("request %s is served and not recorded: %s", new.req_id, error)
            return
        seat = self._seat(ask)
        window = new.sampling_params.prompt_logprobs is None
        request = _tracked(new, ask.to_argument(), window=window, sink=seat)
        if seat is not None:
            request.leave = seat.leave
        self._requests[new.req_id] = request

    def _force(self, layout: StepLayout, sampled: torch.Tensor) -> None:
        rows, ids = [], []
        for row, (request_id, index) in enumerate(zip(layout.request_ids, layout.last_index, strict=True)):
            request = self._requests.get(request_id)
            if request is not None and request.prompt_length <= index + 1 < len(request.ids):
                rows.append(row)
                ids.append(int(request.ids[index + 1]))
        if rows:
            sampled[torch.tensor(rows, device=sampled.device)] = torch.tensor(
                ids, dtype=sampled.dtype, device=sampled.device
            )

    # ------------------------------------------------------------------ rows

    def _keep_sampled(self, step: _Step, logits: torch.Tensor) -> None:
        """Rows the sampler sees: the last prompt row and decode rows; the row of an unfinished chunk is discarded."""
        layout = step.layout
        for row, (request_id, index) in enumerate(zip(layout.request_ids, layout.last_index, strict=True)):
            request = self._requests.get(request_id)
            if request is not None and request.prompt_length <= index + 1 < len(request.ids):
                self._keep(step, request, row, np.array([index]), logits[row : row + 1])

    def _keep_prompt(self, step: _Step, first: int, logits: torch.Tensor) -> None:
        """Rows of the engine's prompt pass: flat rows `first ..`, the last prompt row of a request excluded."""
        for position, request_id in enumerate(step.layout.request_ids):
            request = self._requests.get(request_id)
            if request is None or request.window:
                continue
            flat, index = self._prompt_slice(step.layout, position, request)
            inside = (flat >= first) & (flat < first + len(logits))
            if inside.any():
                self._keep(step, request, position, index[inside], logits[torch.from_numpy(flat[inside] - first)])

    def _compute_windows(self, step: _Step) -> None:
        """Apply the head to the wanted prompt rows only. Every tensor-parallel rank does so, in the same order."""
        for position, request_id in enumerate(step.layout.request_ids):
            request = self._requests.get(request_id)
            if request is None or not request.window:
                continue
            flat, index = self._prompt_slice(step.layout, position, request)
            if len(flat):
                rows = step.hidden[torch.from_numpy(flat).to(step.hidden.device)]
                logits = self._compute_logits(rows)
                if logits is not None:
                    self._keep(step, request, position, index, logits)

    @staticmethod
    def _prompt_slice(
        layout: StepLayout, position: int, request: _Tracked
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Flat rows and indices of the wanted prompt rows of this step, the last prompt row excluded."""
        first = int(layout.first_index[position])
        stop = min(first + int(layout.count[position]), request.prompt_length - 1)
        index = first + np.flatnonzero(request.keep[first:stop])
        return layout.starts[position] + index - first, index

    def _keep(
        self, step: _Step, request: _Tracked, position: int, index: NDArray[np.int64], logits: torch.Tensor
    ) -> None:
        again = np.array([int(i) in request.kept for i in index], np.bool_)
        self.repeated_rows += int(again.sum())
        fresh = request.keep[index] & ~again
        index = index[fresh]
        if not len(index) or request.sink is None:
            return
        request.kept.update(index.tolist())
        rows = _to_host(logits[torch.from_numpy(np.flatnonzero(fresh)).to(logits.device)])
        phase = Phase.DECODE if index[0] >= request.prompt_length else Phase.PREFILL
        facts = _facts(step, position, len(index), request)
        targets = request.ids[index + 1]

        def make_block() -> Block:
            return Block(
                segment=request.segment, phase=phase, indices=index, targets=targets, logits=rows(), facts=facts
            )

        request.sink.put(make_block, logits.element_size() * logits.shape[1] * len(index))
        if len(request.kept) == int(request.keep.sum()):
            request.leave()


def _tracked(new: Any, argument: Mapping[str, Any], *, window: bool, sink: RowSink | None) -> _Tracked:
    """A newly scheduled request with what it asks of us."""
    prompt = new.prompt_token_ids
    ids = np.array([*prompt, *argument["forced"]], np.int32)
    keep = np.zeros(len(ids) - 1, np.bool_)
    for start, stop in argument["keep"]:
        keep[start:stop] = True
    return _Tracked(
        segment=argument["segment"],
        ids=ids,
        prompt_length=len(prompt),
        keep=keep,
        cached_tokens=new.num_computed_tokens,
        window=window,
        sink=sink,
    )


def _facts(step: _Step, position: int, rows: int, request: _Tracked) -> StepFacts:
    layout = step.layout

    def column(value: int) -> NDArray[np.int32]:
        return np.full(rows, value, np.int32)

    return StepFacts(
        step=column(step.number),
        batch_size=column(len(layout.request_ids)),
        scheduled_tokens=column(int(layout.count.sum())),
        chunk_start=column(int(layout.first_index[position])),
        cached_tokens=column(request.cached_tokens),
    )


def _to_host(rows: torch.Tensor) -> Callable[[], NDArray[Any]]:
    """Start the copy of freshly gathered rows to the host; the returned function waits for it and gives their bits."""
    if rows.device.type == "cpu":
        return lambda: _bits(rows)
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    host.copy_(rows, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> NDArray[Any]:
        done.synchronize()
        return _bits(host)

    return wait


def _bits(rows: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = (rows.view(torch.uint16) if rows.dtype is torch.bfloat16 else rows).numpy()
    return array
