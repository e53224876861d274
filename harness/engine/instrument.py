"""The instrument check: the engine's own log-prob of each forced id against what the captured row gives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness._files import atomic_file
from harness._parts import write_errors
from harness.engine.requests import ScoredRequest
from harness.errors import EngineError, StorageError
from harness.metrics import decode, row_summary
from harness.storage import Recording
from harness.types import InstrumentCheck, Phase

LIMIT = 2e-5
"""Nats, beyond the engine's own rounding: its log-softmax adds a whole vocabulary up in f32, and what that costs
depends on the vector width (3e-5 was seen at V = 49,152 on AVX2). So a row also agrees if torch's f32 log-softmax of
the captured row gives what the engine said."""

SAMPLE_ROWS = 512
"""Rows held against the engine's numbers, spread evenly over what it reported."""


class LogprobLog:
    """Collects the log-probs the engine returns, and the proof that the forced ids were taken."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, Phase], dict[int, float]] = {}

    def add(self, request: ScoredRequest, output: Any) -> None:
        """Take a finished request's output. Raises EngineError if its ids are not the forced ones."""
        completion = output.outputs[0]
        if tuple(completion.token_ids) != request.forced:
            raise EngineError(
                f"segment {request.segment}: the engine took the ids {list(completion.token_ids)[:8]} ... where "
                f"{list(request.forced)[:8]} ... were forced; the plugin does not reach its sampler"
            )
        first_sampled = len(request.prompt) - 1
        for index in request.indices():
            if index >= first_sampled:
                step = index - first_sampled
                told = completion.logprobs[step][request.forced[step]]
            elif output.prompt_logprobs is not None:
                told = output.prompt_logprobs[index + 1][request.prompt[index + 1]]
            else:
                continue
            self._rows.setdefault((request.segment, request.phase(index)), {})[index] = float(told.logprob)

    def save(self, path: Path) -> None:
        """Keep the log-probs in a file, for a check where the rows are. Raises StorageError."""
        told = [(s, p, i, v) for (s, p), rows in sorted(self._rows.items()) for i, v in sorted(rows.items())]
        with write_errors(path), atomic_file(path) as file:
            file.write(json.dumps(told).encode())

    @classmethod
    def load(cls, path: Path) -> LogprobLog:
        """The log-probs of an earlier `save`; none if there is no such file. Raises StorageError for anything else."""
        log = cls()
        if not path.exists():
            return log
        try:
            for segment, phase, index, value in json.loads(path.read_bytes()):
                log._rows.setdefault((segment, Phase(phase)), {})[int(index)] = float(value)
        except (OSError, ValueError, TypeError) as error:
            raise StorageError(f"{path} does not hold an engine's log-probs ({error}): record again") from error
        return log

    def check(self, folder: Path) -> InstrumentCheck:
        """Hold a spread sample of the reported log-probs against the recorded rows."""
        keys = [(s, p, i) for (s, p), rows in sorted(self._rows.items()) for i in sorted(rows)]
        chosen = keys[:: max(1, math.ceil(len(keys) / SAMPLE_ROWS))]
        wanted: dict[tuple[str, Phase], list[int]] = {}
        for segment, phase, index in chosen:
            wanted.setdefault((segment, phase), []).append(index)
        recording = Recording(folder, verify=False)
        for (segment, phase), indices in wanted.items():
            there = set(recording.indices(segment, phase).tolist())
            wanted[segment, phase] = [i for i in indices if i in there]
        worst, detail, rows = -1.0, "no row could be checked", 0
        for (segment, phase), indices in wanted.items():
            if not indices:
                continue
            block = recording.read(segment, phase, np.array(indices, np.int64))
            logits = decode(block.logits, recording.manifest.logits_dtype)
            lse, _, _ = row_summary(block.logits, recording.manifest.logits_dtype, 1)
            own = logits[np.arange(len(indices)), block.targets].astype(np.float64) - lse
            told = np.array([self._rows[segment, phase][i] for i in indices])
            error = np.minimum(np.abs(own - told), np.abs(_in_float32(logits, block.targets) - told))
            error[np.isnan(error)] = np.inf
            error[own == told] = 0.0  # -inf on both sides
            rows += len(indices)
            if error.max() > worst:
                at = int(error.argmax())
                worst = float(error[at])
                detail = f"largest at {segment} {phase} {indices[at]}: engine {told[at]:.7f}, row {own[at]:.7f}"
        return InstrumentCheck(
            rows=rows, max_error=worst if rows else math.nan, limit=LIMIT, passed=0 <= worst <= LIMIT, detail=detail
        )


def _in_float32(logits: NDArray[Any], targets: NDArray[np.int32]) -> NDArray[np.float64]:
    """Log-probs of the targets as an engine computes them: torch's log-softmax in f32."""
    import torch

    logprobs = torch.log_softmax(torch.from_numpy(logits.astype(np.float32)), dim=-1).numpy()
    chosen: NDArray[np.float64] = logprobs[np.arange(len(targets)), targets].astype(np.float64)
    return chosen
