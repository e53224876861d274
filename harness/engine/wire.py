"""What a client of a running server may ask for with a request, as text, and what is refused. Pure: no vLLM in here.

The text is the value of `vllm_xargs.logitgate`. A client names a recording; where it lies is the server's to decide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.engine.requests import Ranges
from harness.errors import UsageError

LONGEST_TEXT = 1 << 20
"""Characters of one request's argument: some 100,000 forced ids."""

LONGEST_SEGMENT = 256
"""Characters of a segment's id. It is written as a value and never becomes part of a path."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_RUN = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_INT32 = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request's part of a recording."""

    recording: str  # the folder's name below the server's root
    run: str  # 32 hex digits of the client's choice: two clients never write one recording at once
    corpus: str  # sha256 of the corpus
    segment: str
    forced: tuple[int, ...]  # ids to take after the prompt, at least one
    keep: Ranges  # rows to write

    def to_text(self) -> str:
        """The form that travels."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def to_argument(self) -> dict[str, Any]:
        """The part that decides what the engine does, as an offline request has it."""
        return {"segment": self.segment, "forced": list(self.forced), "keep": [list(r) for r in self.keep]}

    def require_fit(self, *, prompt: Sequence[int] | None, max_tokens: int | None, n: int, vocab_size: int) -> None:
        """Raise UsageError if the request around the argument would not make these rows, or not once."""
        if prompt is None:
            raise UsageError("logitgate: a prompt of embeddings has no ids to record: send token ids")
        if n != 1:
            raise UsageError(f"logitgate: n is {n}: each row is recorded once, so expected 1")
        if max_tokens != len(self.forced):
            raise UsageError(f"logitgate: max_tokens is {max_tokens}: expected {len(self.forced)}, as many as forced")
        worst = max(max(self.forced), max(prompt, default=0))
        if worst >= vocab_size:
            raise UsageError(f"logitgate: token id {worst} is not below the model's vocabulary of {vocab_size}")
        rows = len(prompt) + len(self.forced) - 1
        if self.keep and self.keep[-1][1] > rows:
            raise UsageError(f"logitgate: keep reaches to row {self.keep[-1][1]}, the request makes {rows}")


def parse_ask(value: Any) -> Ask:
    """The argument of a request. Raises UsageError naming the field for anything but what `Ask.to_text` writes."""
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise UsageError(f"logitgate: the argument must be text of at most {LONGEST_TEXT} characters")
    try:
        given = json.loads(value)
    except (ValueError, RecursionError):
        raise UsageError("logitgate: the argument is not JSON: write it with the `logitgate` client") from None
    fields = tuple(Ask.__dataclass_fields__)
    if not isinstance(given, dict) or set(given) != set(fields):
        raise UsageError(f"logitgate: the argument must be an object of {', '.join(fields)}")
    return Ask(
        recording=require_name(given["recording"]),
        run=_require_text("run", given["run"], _RUN, "32 hex digits"),
        corpus=_require_text("corpus", given["corpus"], _SHA256, "a sha256 as 64 hex digits"),
        segment=_require_segment(given["segment"]),
        forced=_require_ids(given["forced"]),
        keep=_require_ranges(given["keep"]),
    )


def require_name(value: Any) -> str:
    """A recording's name: it becomes a folder's name below the root and can be nothing else. Raises UsageError."""
    return _require_text(
        "recording", value, _NAME, "1 to 64 of a-z, 0-9, '.', '_', '-', the first one a letter or a digit"
    )


def _require_text(field: str, value: Any, pattern: re.Pattern[str], expected: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise UsageError(f"logitgate: {field} is {value!r:.80}: expected {expected}")
    return value


def _require_segment(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_SEGMENT or not value.isprintable():
        raise UsageError(f"logitgate: segment is {value!r:.80}: expected 1 to {LONGEST_SEGMENT} printable characters")
    return value


def _require_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(_is_count(i) for i in value):
        raise UsageError(f"logitgate: forced is {value!r:.80}: expected a list of at least one token id")
    return tuple(value)


def _require_ranges(value: Any) -> Ranges:
    expected = "expected ascending, disjoint pairs [start, stop] of row indices"
    if not isinstance(value, list):
        raise UsageError(f"logitgate: keep is {value!r:.80}: {expected}")
    ranges, end = [], 0
    for pair in value:
        if not (isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair)) and end <= pair[0] < pair[1]):
            raise UsageError(f"logitgate: keep has {pair!r:.80}: {expected}")
        ranges.append((pair[0], pair[1]))
        end = pair[1]
    return tuple(ranges)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _INT32
