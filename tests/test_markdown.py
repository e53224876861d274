"""The pull-request comment: short whatever was compared, and no text of anyone's can format, link or notify."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from markdown_it import MarkdownIt

from harness.report.markdown import MOST_LINES, escaped, no_judgement, to_markdown
from harness.report.visible import visible
from harness.types import Estimate, Phase, Stratum
from tests.reporting import HOSTILE, Reported, reported, texts, with_text

OURS = {"h2", "ul", "li", "strong", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "code"}
MOST_CHARACTERS = 65_536  # GitHub's limit for a comment


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    return reported(tmp_path_factory.mktemp("recordings"))


class Page(HTMLParser):
    """What a renderer makes of a comment: its tags, and its text."""

    def __init__(self, comment: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(comment))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [pair for pair in attrs if pair != ("style", "text-align:right")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_verdict_its_facts_and_the_sides_are_there(made: Reported) -> None:
    comparison, verdict, worst = made
    page = Page(to_markdown(comparison, verdict, worst))
    assert page.tags == OURS - {"strong"}
    assert page.text.startswith(f"logitgate: {verdict.word}")
    for reason in verdict.reasons:
        assert reason in page.text
    for side in (comparison.reference, comparison.candidate):
        assert side.path[-40:] in page.text
    assert "KL(reference || candidate) in nats" in page.text
    for one in worst:
        assert f"{one.segment} {one.phase} {one.index}" in page.text


@given(texts)
def test_no_text_can_format_link_or_notify(made: Reported, text: str) -> None:
    comment = to_markdown(*with_text(made, text))
    page = Page(comment)
    assert page.tags <= OURS
    assert page.attributes == []
    assert not re.search(r"://|www\.", comment, re.IGNORECASE)
    assert not re.search(r"[@#](?!\u200b)", page.text)
    assert visible(text)[:200].rstrip() in page.text.replace("\u200b", "")
    assert len(comment.splitlines()) <= MOST_LINES < 60
    assert len(comment.encode("utf-8")) < MOST_CHARACTERS


@pytest.mark.parametrize("text", HOSTILE)
def test_what_could_not_be_judged_is_as_safe(text: str) -> None:
    page = Page(no_judgement("COULD NOT JUDGE", text))
    assert page.tags == {"h2", "ul", "li"}
    assert page.text.startswith("logitgate: COULD NOT JUDGE")
    assert visible(text)[:200].rstrip() in page.text.replace("\u200b", "")


def test_many_strata_are_cut_to_those_farthest_from_the_floor(made: Reported) -> None:
    comparison, verdict, _ = made
    cells = [Stratum(phase=phase, kind=f"k{i}", depth=512) for i in range(30) for phase in Phase]
    estimates = [
        Estimate(
            metric="kl20",
            statistic=statistic,
            stratum=cell,
            value=float(number if statistic == "ratio_to_floor" else 1e-3),
            low=0.0,
            high=99.0,
            positions=10,
            segments=2,
        )
        for number, cell in enumerate(cells)
        for statistic in ("mean", "ratio_to_floor")
    ]
    text = to_markdown(comparison, replace(verdict, estimates=(*verdict.estimates, *estimates)), ())
    assert len(text.splitlines()) <= MOST_LINES
    assert "| decode / k29 / depth 512 | 1.00e-03 | 59.00 (0.00 to 99.00) |" in text
    assert "k1 " not in text
    assert re.search(r"and \d+ more", text)
    assert "| overall |" in text


def test_an_inconclusive_verdict_says_what_would_decide_it(made: Reported) -> None:
    comparison, verdict, _ = made
    page = Page(to_markdown(comparison, replace(verdict, remedy="record 12 more segments"), ()))
    assert "What would decide it: record 12 more segments" in page.text


def test_escaping_keeps_plain_words_as_they_are() -> None:
    assert (
        escaped("mean KL20 is 1.06 x the floor's (limit 2): ok, 5 %")
        == "mean KL20 is 1.06 x the floor's (limit 2): ok, 5 %"
    )
    assert escaped("naïve 日本語") == "naïve 日本語"
    assert escaped("a" * 500, 10) == "a" * 9 + "&#8230;"


def test_the_comment_is_the_same_on_every_run(made: Reported, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(to_markdown(*made), encoding="utf-8")
    assert (tmp_path / "a").read_text(encoding="utf-8") == to_markdown(*made)
