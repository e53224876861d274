"""Reports as a reader's browser shows them. Skipped where there is no Chromium (Debian: `apt-get install chromium`)."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from tests.reporting import reported
from tests.synthetic import make_build, make_corpus, make_rows, record, with_noise

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
sync_api = pytest.importorskip("playwright.sync_api")

WIDTHS = (800, 1024, 1440, 1920)
PAGES = ("pass", "fail", "inconclusive", "several")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PAGES as files: a verdict of each word, and four candidates side by side."""
    root = tmp_path_factory.mktemp("pages")
    reported(root)
    corpus = make_corpus(documents=4)
    rows = make_rows(corpus)
    for seed, (name, sigma) in enumerate({"good": 0.014, "near": 0.024, "far": 0.05}.items(), start=7):
        build = make_build(dtype="bfloat16", engine=name)
        record(root / name, corpus, with_noise(rows, sigma, seed=seed), dtype="bfloat16", build=build)
    reference, floor = str(root / "reference"), ["--floor", str(root / "floor")]
    codes = {
        "pass": main(["report", reference, str(root / "good"), *floor, "-o", str(root / "pass.html")]),
        "fail": main(["report", reference, str(root / "candidate"), *floor, "-o", str(root / "fail.html")]),
        "inconclusive": main(["report", reference, str(root / "good"), "-o", str(root / "inconclusive.html")]),
    }
    candidates = [str(root / name) for name in ("far", "good", "candidate", "near")]
    main(["report", reference, *candidates, *floor, "-o", str(root / "several.html")])
    assert codes == {"pass": 0, "fail": 1, "inconclusive": 3}
    return root


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module", params=PAGES)
def opened(browser: Any, pages: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """One of PAGES, all figures drawn; anything it logs as wrong or asks of a network fails its last test."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request", lambda r: complaints.append(r.url) if not r.url.startswith(("file:", "data:", "blob:")) else None
    )
    page.goto((pages / f"{request.param}.html").as_uri())
    page.wait_for_selector("html[data-drawn=yes]", timeout=60_000)
    yield page
    page.close()
    assert complaints == []


def test_every_figure_is_drawn_with_its_data(opened: Any) -> None:
    drawn = opened.evaluate(
        "[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('.point, .js-line').length)"
    )
    assert len(drawn) >= 3
    assert min(drawn) > 0


def test_no_width_overflows(opened: Any) -> None:
    for width in WIDTHS:
        opened.set_viewport_size({"width": width, "height": 900})
        opened.wait_for_timeout(400)  # figures are drawn anew once a resize has settled
        wide = opened.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        plots = opened.evaluate(
            "[...document.querySelectorAll('.plot')].filter(p => p.scrollWidth > p.clientWidth + 1)"
            ".map(p => p.dataset.figure)"
        )
        assert (wide, plots) == (0, []), width
    opened.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(opened: Any, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    opened.emulate_media(color_scheme=scheme)
    opened.wait_for_timeout(400)
    # The figures' tables are all alike, and long: one of them is looked at.
    opened.evaluate(
        "document.querySelectorAll('details').forEach(d => { d.open = !d.matches('.numbers'); });"
        "document.querySelector('.numbers').open = true"
    )
    # The report's own policy forbids code from outside; the inspector is put in beside it.
    found = axe.run(opened).response["violations"]
    serious = [(v["id"], v["nodes"][0]["html"][:200]) for v in found if v["impact"] in ("serious", "critical")]
    opened.evaluate("document.querySelectorAll('details.numbers').forEach(d => { d.open = false; })")
    opened.emulate_media(color_scheme="light")
    assert serious == []


def test_the_keyboard_reaches_everything(opened: Any) -> None:
    opened.evaluate(
        "[...document.querySelectorAll('a[href], button:not(:disabled), select, summary, [tabindex=\"0\"]')]"
        ".filter(e => e.checkVisibility()).forEach((e, i) => { e.dataset.stop = i; })"
    )
    opened.evaluate("document.activeElement.blur()")
    stops = opened.evaluate("document.querySelectorAll('[data-stop]').length")
    reached = set()
    for _ in range(stops + 5):
        opened.keyboard.press("Tab")
        reached.add(opened.evaluate("document.activeElement.dataset.stop ?? null"))
    assert len(reached - {None}) == stops
    before = opened.evaluate("document.querySelector('.numbers').open")
    opened.evaluate("document.querySelector('.numbers summary').focus()")
    opened.keyboard.press("Enter")
    assert opened.evaluate("document.querySelector('.numbers').open") is not before


@pytest.mark.parametrize("opened", ["fail"], indirect=True)
def test_hovering_shows_the_text_of_a_position(opened: Any) -> None:
    plot = opened.locator("[data-figure=margin-against-kl]")
    plot.scroll_into_view_if_needed()
    dot = plot.locator(".point").nth(3).bounding_box()
    opened.mouse.move(dot["x"] + dot["width"] / 2, dot["y"] + dot["height"] / 2)
    shown = opened.locator("[data-figure=margin-against-kl] .hovertext").first
    shown.wait_for(timeout=5_000)
    assert re.search(
        r"index \d+.*requests in the step 1,.*→.*reference.*\(\d+\).*candidate.*KL20", shown.text_content(), re.DOTALL
    )


@pytest.mark.parametrize("opened", ["fail"], indirect=True)
def test_positions_can_be_browsed(opened: Any) -> None:
    rows, status = opened.locator("#browse tbody tr"), opened.locator("#browse [role=status]")
    total = int(status.text_content().split()[0])
    assert rows.count() == min(20, total)
    first = rows.first.text_content()
    opened.get_by_role("button", name="Next").click()
    assert "page 2 of" in status.text_content()
    assert rows.first.text_content() != first
    opened.locator("#browse select").select_option("in the order of the texts")
    assert "page 1 of" in status.text_content()


@pytest.mark.parametrize("opened", ["fail"], indirect=True)
def test_paper_is_light_whatever_the_screen_is(opened: Any) -> None:
    colours = """['.verdict', '.word', '.tag', '.h4', '[data-figure=kl-against-depth] .xtick text'].map(name => {
        const style = getComputedStyle(document.querySelector(name));
        return [style.backgroundColor, style.color, style.fill];
    })"""
    opened.emulate_media(color_scheme="light")
    opened.wait_for_timeout(400)
    light = opened.evaluate(colours)
    opened.emulate_media(color_scheme="dark")
    opened.wait_for_timeout(400)
    assert opened.evaluate(colours) != light
    opened.emulate_media(color_scheme="dark", media="print")
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    opened.wait_for_timeout(400)
    assert opened.evaluate(colours) == light
    opened.evaluate("dispatchEvent(new Event('afterprint'))")
    opened.emulate_media(color_scheme="light", media="screen")
