from __future__ import annotations

from typing import get_args

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.engine.requests import ScoredRequest, plan, plan_segment
from harness.patterns import Order, Pattern
from harness.types import Corpus, Phase, Segment


def segment(length: int, decode_from: int, windows: tuple[tuple[int, int], ...], name: str = "s") -> Segment:
    return Segment(
        id=name,
        document="d",
        kind="prose",
        depth=decode_from,
        token_ids=np.arange(100, 100 + length, dtype=np.int32),
        decode_from=decode_from,
        windows=windows,
    )


def test_prompt_and_forced_ids_are_the_segment_in_two_pieces() -> None:
    (request,) = plan_segment(segment(12, 8, ((6, 8),)))
    assert request.prompt == tuple(range(100, 108))
    assert request.forced == tuple(range(108, 112))
    assert rows(request) == [(Phase.PREFILL, 6), (Phase.PREFILL, 7)] + [(Phase.DECODE, i) for i in (8, 9, 10)]


def test_a_window_past_the_decode_start_gets_its_own_prefill_request() -> None:
    first, second = plan_segment(segment(12, 8, ((6, 11),)))
    assert first.keep == ((6, 8), (8, 11))
    assert second.prompt == tuple(range(100, 111))
    assert second.forced == (111,)
    assert rows(second) == [(Phase.PREFILL, i) for i in (8, 9, 10)]


def test_a_segment_without_decode_forces_its_last_id_only() -> None:
    (request,) = plan_segment(segment(6, 5, ((0, 5),)))
    assert request.forced == (105,)
    assert rows(request) == [(Phase.PREFILL, i) for i in range(5)]


def rows(request: ScoredRequest) -> list[tuple[Phase, int]]:
    return [(request.phase(i), i) for i in request.indices()]


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    length = draw(st.integers(2, 40))
    decode_from = draw(st.integers(1, length - 1))
    cuts = sorted(draw(st.sets(st.integers(0, length - 1), max_size=6)))
    windows = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    return segment(length, decode_from, windows)


@given(segments())
def test_every_scored_row_is_asked_for_exactly_once(given_segment: Segment) -> None:
    asked = [row for request in plan_segment(given_segment) for row in rows(request)]
    expected = [(phase, int(i)) for phase in Phase for i in given_segment.indices(phase)]
    assert sorted(asked) == sorted(expected)


@given(segments())
def test_every_request_predicts_the_segment_s_own_ids(given_segment: Segment) -> None:
    for request in plan_segment(given_segment):
        ids = request.prompt + request.forced
        assert ids == tuple(given_segment.token_ids[: len(ids)])
        assert len(request.forced) >= 1
        assert all(index + 1 < len(ids) for index in request.indices())


def test_requests_whose_rows_are_there_are_left_out() -> None:
    corpus = Corpus(
        name="c", version="1", tokenizer="t", tokenizer_sha256="", vocab_size=320, bos="none", smoke=True, sources=(),
        segments=(segment(12, 8, ((6, 8),), "a"), segment(12, 8, ((6, 8),), "b")),
    )  # fmt: skip
    present = {("a", Phase.PREFILL): {6, 7}, ("a", Phase.DECODE): {8, 9, 10}, ("b", Phase.PREFILL): {6, 7}}
    assert [(r.id, r.keep) for r in plan(corpus, present)] == [("b", ((8, 11),))]


@given(segments(), st.data())
def test_what_is_left_to_ask_and_what_is_there_make_the_whole(given_segment: Segment, data: st.DataObject) -> None:
    whole = [(phase, int(i)) for phase in Phase for i in given_segment.indices(phase)]
    there = data.draw(st.sets(st.sampled_from(whole))) if whole else set()
    present = {("s", phase): {i for p, i in there if p is phase} for phase in Phase}
    corpus = Corpus(
        name="c", version="1", tokenizer="t", tokenizer_sha256="", vocab_size=320, bos="none", smoke=True, sources=(),
        segments=(given_segment,),
    )  # fmt: skip
    asked = [row for request in plan(corpus, present) for row in rows(request)]
    assert sorted(asked + list(there)) == sorted(whole)


# --------------------------------------------------------------------------- patterns


def corpus_of(*given_segments: Segment) -> Corpus:
    return Corpus(
        name="c", version="1", tokenizer="t", tokenizer_sha256="", vocab_size=320, bos="none", smoke=True, sources=(),
        segments=given_segments,
    )  # fmt: skip


@given(segments())
def test_serving_twice_makes_every_row_once_and_decodes_without_a_prompt_row(given_segment: Segment) -> None:
    twice = plan(corpus_of(given_segment), pattern=Pattern(prefix_hit=True))
    once = plan(corpus_of(given_segment))
    assert sorted(row for r in twice for row in rows(r)) == sorted(row for r in once for row in rows(r))
    assert all(not r.scores_prompt for r in twice if any(phase is Phase.DECODE for phase, _ in rows(r)))
    assert len({r.id for r in twice}) == len(twice)


def test_the_request_that_decodes_comes_after_one_with_the_same_prompt() -> None:
    first, second = plan(corpus_of(segment(12, 8, ((6, 8),))), pattern=Pattern(prefix_hit=True))
    assert first.prompt == second.prompt
    assert len(first.forced) == 1
    assert rows(first) == [(Phase.PREFILL, 6), (Phase.PREFILL, 7)]
    assert rows(second) == [(Phase.DECODE, i) for i in (8, 9, 10)]


def test_a_resumed_recording_fills_the_cache_again_where_it_still_decodes() -> None:
    made = corpus_of(segment(12, 8, ((6, 8),)))
    prompt = {("s", Phase.PREFILL): {6, 7}}
    fill, decode = plan(made, prompt, Pattern(prefix_hit=True))
    assert fill.keep == ()
    assert not fill.scores_prompt
    assert len(rows(decode)) == 3
    assert plan(made, prompt | {("s", Phase.DECODE): {8, 9, 10}}, Pattern(prefix_hit=True)) == []


def test_requests_come_in_the_order_of_the_pattern() -> None:
    made = corpus_of(segment(6, 4, (), "short"), segment(12, 8, (), "long"), segment(9, 5, (), "middle"))
    orders = {order: [r.id for r in plan(made, pattern=Pattern(order=order))] for order in get_args(Order)}
    assert orders["corpus"] == ["short", "long", "middle"]
    assert orders["reversed"] == ["middle", "long", "short"]
    assert orders["longest first"] == ["long", "middle", "short"]
