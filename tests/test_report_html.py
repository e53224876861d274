"""The page as a file: one piece, nothing fetched, its data the typed result's, and no text of anyone's can break it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from harness.report.figures import figures
from harness.report.html import no_judgement, report_html
from harness.report.page import MOST_DETAIL_BYTES, script_json
from harness.report.visible import visible
from harness.types import Comparison
from harness.worst import describe_positions, notable_rows
from tests.reporting import HOSTILE, Reported, reported, texts, with_text

MOST_BYTES = 8_000_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    return reported(tmp_path_factory.mktemp("recordings"))


class Page(HTMLParser):
    """What a browser makes of a page: its elements with the names of their attributes, what scripts hold, its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: dict[str, str] = {}
        self.text = ""
        self._script: str | None = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.attributes += attrs
        self._script = dict(attrs).get("id") or "app" if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
        else:
            self.text += data


def numbers(packed: Any) -> NDArray[np.float64]:
    """What the page's own script makes of an array."""
    if isinstance(packed, dict):
        return np.frombuffer(base64.b64decode(packed["f32"]), "<f4").astype(np.float64)
    return np.array([np.nan if v is None else v for v in packed], np.float64)


def test_figures_hold_the_numbers_they_are_made_of(made: Reported) -> None:
    embedded = {one["id"]: one for one in json.loads(Page(report_html(*made)).scripts["data"])["figures"]}
    expected = figures(made[0], made[1])
    assert list(embedded) == [figure.id for figure in expected]
    assert len(expected) == 10
    for figure in expected:
        for panel, shown in zip(figure.panels, embedded[figure.id]["panels"], strict=True):
            for series, drawn in zip(panel.series, shown["series"], strict=True):
                assert drawn["name"] == series.name
                for name in ("x", "y", "low", "high"):
                    values = getattr(series, name)
                    if values is None or isinstance(values, tuple):
                        assert drawn[name] == (values if values is None else list(values))
                    else:
                        finite = np.where(np.isfinite(values), values, np.nan)
                        np.testing.assert_allclose(numbers(drawn[name]), finite, rtol=1e-7)


def test_text_of_positions_is_there_for_whoever_hovers(made: Reported) -> None:
    comparison, verdict, _ = made
    details = describe_positions(comparison, notable_rows(comparison, 50))
    page = Page(report_html(comparison, verdict, details))
    packed = json.loads(gzip.decompress(base64.b64decode(page.scripts["details"])))
    expected = sorted(details, key=lambda one: one.row)
    assert [item[0] for item in packed] == [one.row for one in expected]
    assert [item[2] for item in packed] == [one.kl20 for one in expected]
    assert [item[7][0][2] for item in packed] == [one.top_reference[0].id for one in expected]
    places = json.loads(page.scripts["data"])["positions"]
    facts = {name: np.frombuffer(base64.b64decode(values), "<i4") for name, values in places["facts"]}
    np.testing.assert_array_equal(facts["rows into the chunk"], comparison.positions["chunk_distance"])
    np.testing.assert_array_equal(facts["requests in the step"], comparison.positions["batch_size"])


def test_nothing_is_fetched_and_only_our_scripts_may_run(made: Reported) -> None:
    page = Page(report_html(*made))
    contents = [value or "" for name, value in page.attributes if name == "content"]
    policy = next(value for value in contents if value.startswith("default-src 'none'"))
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    ours = {
        base64.b64encode(hashlib.sha256(page.scripts[name].encode()).digest()).decode() for name in ("app", "plotly")
    }
    assert allowed == ours
    assert "'unsafe-inline'" not in policy[policy.index("script-src") :]
    assert all((value or "").startswith("#") for name, value in page.attributes if name in ("href", "src", "action"))
    assert not [name for name, _ in page.attributes if name.startswith("on")]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_changes_no_element_and_is_shown(made: Reported, text: str) -> None:
    harmless, hostile = (Page(report_html(*with_text(made, one))) for one in ("plain", text))
    assert hostile.elements == harmless.elements
    assert visible(text)[:300].strip() in hostile.text
    assert hostile.scripts["app"] == harmless.scripts["app"]
    assert hostile.scripts["plotly"] == harmless.scripts["plotly"]


@given(texts)
def test_what_could_not_be_judged_is_as_safe(text: str) -> None:
    page = no_judgement("COULD NOT JUDGE", text)
    page.encode("utf-8")
    assert Page(page).elements == Page(no_judgement("COULD NOT JUDGE", "plain")).elements


@given(texts)
def test_data_cannot_leave_its_element(text: str) -> None:
    page = f"<script>{script_json({text: [text]})}</script><p></p>"
    parsed = Page(page)
    assert [tag for tag, _ in parsed.elements] == ["script", "p"]
    assert json.loads(parsed.scripts["app"]) == {text: [text]}


def repeated(comparison: Comparison, count: int) -> Comparison:
    """The same rows over and over, until there are `count`."""

    def columns(held: Any) -> Any:
        return {name: np.resize(values, count) for name, values in held.items()}

    return replace(comparison, positions=columns(comparison.positions), floor=columns(comparison.floor))


def test_a_large_recording_in_which_every_row_flips_stays_below_8_mb(made: Reported) -> None:
    comparison, verdict, worst = made
    large = repeated(comparison, 12_288)
    rng = np.random.default_rng(0)
    noise = ["".join(map(chr, rng.integers(0x3041, 0x9FA5, 200))) for _ in range(500)]
    details = [replace(worst[0], row=row, context=noise[row % 500][row // 500 :] + str(row)) for row in range(12_288)]
    page = report_html(large, verdict, details)
    assert len(page.encode("utf-8")) < MOST_BYTES
    parsed = Page(page)
    assert len(parsed.scripts["details"]) <= MOST_DETAIL_BYTES
    kept = json.loads(gzip.decompress(base64.b64decode(parsed.scripts["details"])))
    assert 2_000 < len(kept) < len(details)
    assert f"Of 12,288 such positions the {len(kept):,} worst" in parsed.text


def test_a_verdict_without_any_estimate_has_its_page(tmp_path: Path) -> None:
    made, verdict, _ = reported(tmp_path)
    bare = replace(verdict, estimates=(), flip_bins=(), checks=())
    assert verdict.word in report_html(made, bare)
