"""What to ask of the engine for each segment. Pure: no vLLM in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.patterns import Pattern
from harness.types import Corpus, Phase, Segment

ARGUMENT = "logitgate"
"""Key of `SamplingParams.extra_args` (`vllm_xargs` over HTTP) that carries a request's part of the work."""


Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of row indices, ascending and disjoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRequest:
    """One request: a prompt, the ids forced after it, and which rows to keep.

    Row `len(prompt) - 1` is made by the prefill kernel although the sampler sees it; the rows after it are decode rows.
    """

    id: str
    segment: str
    prompt: tuple[int, ...]
    forced: tuple[int, ...]  # at least one id: the engine always samples once
    keep: Ranges

    def to_argument(self) -> dict[str, Any]:
        """The JSON value a worker gets under `ARGUMENT`."""
        return {"segment": self.segment, "forced": list(self.forced), "keep": [list(r) for r in self.keep]}

    def phase(self, index: int) -> Phase:
        """Which path of the engine makes the row."""
        return Phase.PREFILL if index < len(self.prompt) else Phase.DECODE

    def indices(self) -> list[int]:
        """The row indices to keep, ascending."""
        return [i for start, stop in self.keep for i in range(start, stop)]

    @property
    def scores_prompt(self) -> bool:
        """Whether any row to keep lies in the prompt."""
        return bool(self.keep) and self.keep[0][0] < len(self.prompt)


def plan_segment(segment: Segment) -> list[ScoredRequest]:
    """Requests that make every scored row of a segment once.

    First the prompt and its forced decode; then, if a window reaches past the decode start, a prefill-only request over
    the same ids.
    """
    ids = tuple(int(i) for i in segment.token_ids)
    start, last = segment.decode_from, len(segment.token_ids) - 1
    decode = ((start, last),) if start < last else ()
    requests = [
        ScoredRequest(
            id=segment.id,
            segment=segment.id,
            prompt=ids[:start],
            forced=ids[start:],
            keep=_clip(segment.windows, 0, start) + decode,
        )
    ]
    late = _clip(segment.windows, start, len(ids))
    if late:
        stop = late[-1][1]
        requests.append(
            ScoredRequest(
                id=f"{segment.id}:prefill",
                segment=segment.id,
                prompt=ids[:stop],
                forced=ids[stop : stop + 1],
                keep=late,
            )
        )
    return requests


def plan_twice(segment: Segment) -> list[ScoredRequest]:
    """Requests that make every scored row of a segment once, its decode rows after a hit of the prefix cache.

    Requests that score prompt rows do not read the cache, so they come first and fill it; the one that decodes scores
    no prompt row.
    """
    first, *late = plan_segment(segment)
    start = segment.decode_from
    prompt = replace(first, id=f"{segment.id}:prompt", forced=first.forced[:1], keep=_clip(first.keep, 0, start))
    decode = replace(first, keep=_clip(first.keep, start, len(segment.token_ids)))
    return [prompt, *late, decode]


def plan(
    corpus: Corpus,
    present: Mapping[tuple[str, Phase], set[int]] | None = None,
    pattern: Pattern | None = None,
) -> list[ScoredRequest]:
    """All requests of a corpus in the pattern's order (default: the corpus's, each row by the plainest request).

    Rows that are `present` already are left out, and so are requests left with none, unless they fill the cache.
    """
    pattern = pattern or Pattern()
    segments = list(corpus.segments)
    if pattern.order == "reversed":
        segments.reverse()
    elif pattern.order == "longest first":
        segments.sort(key=lambda segment: -len(segment.token_ids))
    made = plan_twice if pattern.prefix_hit else plan_segment
    requests = [request for segment in segments for request in made(segment)]
    if pattern.prefix_hit:  # a resumed recording fills the cache again
        return _with_their_fillers(requests, present or {})
    if present:
        requests = [_without(request, present) for request in requests]
    return [request for request in requests if request.keep]


def _with_their_fillers(
    requests: list[ScoredRequest], present: Mapping[tuple[str, Phase], set[int]]
) -> list[ScoredRequest]:
    """The requests without what is present; of a segment that still has to decode, all: they fill the cache."""
    left = [_without(request, present) for request in requests]
    decoding = {r.segment for r in left if r.keep and r.phase(r.indices()[-1]) is Phase.DECODE}
    return [request for request in left if request.keep or request.segment in decoding]


def _without(request: ScoredRequest, present: Mapping[tuple[str, Phase], set[int]]) -> ScoredRequest:
    missing = [i for i in request.indices() if i not in present.get((request.segment, request.phase(i)), ())]
    return replace(request, keep=_ranges(missing))


def _ranges(indices: list[int]) -> Ranges:
    """Ascending indices as half-open ranges."""
    ranges: list[tuple[int, int]] = []
    for i in indices:
        if ranges and ranges[-1][1] == i:
            ranges[-1] = (ranges[-1][0], i + 1)
        else:
            ranges.append((i, i + 1))
    return tuple(ranges)


def _clip(windows: Ranges, low: int, high: int) -> Ranges:
    clipped = ((max(a, low), min(b, high)) for a, b in windows)
    return tuple((a, b) for a, b in clipped if a < b)
