"""Grouping of jobs, and the request patterns they ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.calibration.jobs import STOCK, Setting, by_load, job_of, same_as_stock, with_stock
from harness.corpus import seal
from harness.errors import UsageError
from harness.patching import list_patches
from harness.patterns import PREEMPTION_BLOCK, Pattern, engine_needs, pattern_of
from harness.types import Corpus, Segment
from tests.calibrating import patch

BASE = Setting(engine={"dtype": "bfloat16", "enforce_eager": True}, pattern=Pattern(concurrency=8))


def corpus(*lengths: tuple[int, int]) -> Corpus:
    """Segments of (prompt, decoded) tokens."""
    segments = tuple(
        Segment(
            id=f"s{i}",
            document=f"d{i}",
            kind="prose",
            depth=prompt,
            token_ids=np.arange(prompt + decoded, dtype=np.int32),
            decode_from=prompt,
            windows=((0, prompt),),
        )
        for i, (prompt, decoded) in enumerate(lengths)
    )
    return seal(
        Corpus(
            name="c", version="1", tokenizer="t", tokenizer_sha256="", vocab_size=9999, bos="none", smoke=True,
            segments=segments, sources=(),
        )
    )  # fmt: skip


CORPUS = corpus((512, 65), (2048, 65), (512, 65), (2048, 65))


def test_one_load_serves_all_patches_of_the_same_engine_arguments() -> None:
    patches = [
        patch("a"),
        patch("b", engine={"enforce_eager": True}),
        patch("c", engine={"dtype": "float32"}),
        patch("d", requests={"concurrency": 2}),
        patch("e", environment={"X": "1"}),
    ]
    loads = by_load(with_stock([job_of(p, BASE, CORPUS) for p in patches], BASE))
    named = [[job.name for job in load if job.patch] for load in loads]
    assert named == [["a", "b", "d"], ["c"], ["e"]]


def test_a_stock_build_comes_before_what_is_held_against_it_once_in_each_setting() -> None:
    patches = [patch("a"), patch("f32", engine={"dtype": "float32"}), patch("g32", engine={"dtype": "float32"})]
    jobs = with_stock([job_of(p, BASE, CORPUS) for p in patches], BASE)
    stocks = [job for job in jobs if job.patch is None]
    assert stocks[0].name == STOCK
    assert len(stocks) == 2
    assert jobs[3].stock == jobs[4].stock == stocks[1].name
    assert stocks[1].setting.engine["dtype"] == "float32"
    assert [j.name for j in with_stock(jobs[2:], BASE, present=[s.name for s in stocks])] == ["a", "f32", "g32"]


def test_a_configuration_is_held_against_the_base_build() -> None:
    job = job_of(patch("blocks", "benign", hooked=False, engine={"block_size": 16}), BASE, CORPUS)
    assert job.stock == STOCK
    assert job.hooked == ()
    assert not same_as_stock(job, BASE)


def test_a_variation_that_is_the_base_setting_is_the_stock_build() -> None:
    eight = job_of(patch("eight", "benign", hooked=False, requests={"concurrency": 8}), BASE, CORPUS)
    one = job_of(patch("one", "benign", hooked=False, requests={"concurrency": 1}), BASE, CORPUS)
    assert same_as_stock(eight, BASE)
    assert not same_as_stock(one, BASE)
    assert one.setting.pattern.concurrency == 1
    assert not same_as_stock(job_of(patch("hooked"), BASE, CORPUS), BASE)


def test_a_fault_between_requests_needs_at_least_so_many() -> None:
    two = patch("swap", requests={"concurrency": 2})
    assert job_of(two, BASE, CORPUS).setting.pattern.concurrency == 8
    assert job_of(two, replace(BASE, pattern=Pattern()), CORPUS).setting.pattern.concurrency == 2


def test_settings_are_told_apart_by_everything_in_them() -> None:
    others = [
        replace(BASE, engine={**BASE.engine, "block_size": 16}),
        replace(BASE, environment={"A": "1"}),
        replace(BASE, pattern=Pattern(concurrency=7)),
        replace(BASE, prompt_rows="window"),
    ]
    assert len({s.key for s in [BASE, *others]}) == 5
    assert len({s.load for s in [BASE, *others]}) == 3
    reordered = Setting(engine=dict(reversed(list(BASE.engine.items()))), pattern=BASE.pattern)
    assert reordered.key == BASE.key


def test_preemption_needs_a_cache_that_holds_the_prompts_and_not_their_decode() -> None:
    pattern = pattern_of({"preemption": True}, concurrency=8, at_least=False)
    needs = engine_needs(pattern, CORPUS)
    blocks = needs["num_gpu_blocks_override"] - 1  # one is never handed out
    prompts, totals = 2 * -(-2048 // PREEMPTION_BLOCK), 2 * -(-2113 // PREEMPTION_BLOCK)
    assert prompts <= blocks < totals
    assert blocks * PREEMPTION_BLOCK >= needs["max_model_len"] == 2113
    assert pattern.order == "longest first"
    with pytest.raises(UsageError, match="two segments"):
        engine_needs(pattern, corpus((512, 65)))


@given(st.lists(st.tuples(st.integers(40, 3000), st.integers(49, 200)), min_size=2, max_size=6))
def test_the_cache_of_preemption_always_serves_one_request_and_never_two(lengths: list[tuple[int, int]]) -> None:
    made = corpus(*lengths)
    needs = engine_needs(Pattern(concurrency=2, preemption=True), made)
    tokens = (needs["num_gpu_blocks_override"] - 1) * PREEMPTION_BLOCK
    longest = sorted((len(s.token_ids) for s in made.segments), reverse=True)[:2]
    assert longest[0] <= needs["max_model_len"] <= tokens < sum(longest) + 2 * PREEMPTION_BLOCK


def test_a_prefix_hit_needs_caching_and_one_request_at_a_time() -> None:
    pattern = pattern_of({"prefix_hit": True}, concurrency=8, at_least=True)
    assert pattern.concurrency == 1
    assert engine_needs(pattern, CORPUS) == {"enable_prefix_caching": True}
    assert engine_needs(Pattern(concurrency=8), CORPUS) == {}


@pytest.mark.parametrize(
    "requests", [{"padding": True}, {"concurrency": 0}, {"concurrency": "2"}, {"order": "random"}, {"prefix_hit": 1}]
)
def test_a_pattern_nobody_can_make_is_refused(requests: Any) -> None:
    with pytest.raises(UsageError, match="request pattern"):
        pattern_of(requests, concurrency=1, at_least=False)


def test_every_packaged_patch_asks_for_patterns_that_exist() -> None:
    jobs = [job_of(p, BASE, CORPUS) for p in list_patches()]
    assert len({job.name for job in jobs}) == len(jobs)
