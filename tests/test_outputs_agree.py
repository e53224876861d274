"""The numbers of every output are those of the typed result, so that no two of them can disagree."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from harness.report import strata
from harness.report.html import report_html
from harness.report.json_report import to_json
from harness.report.junit import to_junit
from harness.report.markdown import to_markdown
from harness.report.terminal import render
from harness.types import Stratum
from tests.reporting import Reported, reported

Numbers = tuple[float, float, float]
"""Of one stratum: mean KL20, its ratio to the floor, share of flips; as far as an output shows them."""


@pytest.fixture(scope="module", params=[0.02, 0.2])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reported:
    return reported(tmp_path_factory.mktemp("recordings"), noise=request.param)


def typed(made: Reported) -> dict[str, Numbers]:
    verdict = made[1]
    return {
        str(s): (
            strata.value(verdict, s, "mean"),
            strata.value(verdict, s, "ratio_to_floor"),
            strata.value(verdict, s, "rate", "flip"),
        )
        for s in strata.strata(verdict)
    }


def numbers(mean: str, ratio: str, flips: str) -> Numbers:
    return float(mean), float(ratio.split()[0].replace(",", "")), float(flips.rstrip("%")) / 100


def in_json(made: Reported) -> dict[str, Numbers]:
    found = json.loads(json.dumps(to_json(*made)))
    values = {
        (str(Stratum(**e["stratum"])), e["metric"], e["statistic"]): e["value"] for e in found["verdict"]["estimates"]
    }
    wanted = (("kl20", "mean"), ("kl20", "ratio_to_floor"), ("flip", "rate"))
    names = dict.fromkeys(name for name, *what in values if tuple(what) == wanted[0])
    return {name: tuple(values[name, metric, statistic] for metric, statistic in wanted) for name in names}


def in_markdown(made: Reported) -> dict[str, Numbers]:
    rows = [line.strip("| ").split(" | ") for line in to_markdown(*made).splitlines() if line.startswith("|")]
    return {row[0]: numbers(row[1], row[2], row[3]) for row in rows if len(row) == 5 and row[0] in typed(made)}


def in_terminal(made: Reported) -> dict[str, Numbers]:
    stream = io.StringIO()
    render(made[0], made[1], Console(file=stream, width=100), worst=made[2])
    rows = [re.split(r"\s{2,}", line.strip()) for line in stream.getvalue().splitlines()]
    return {row[0]: numbers(row[1], row[2], row[3]) for row in rows if len(row) == 5 and row[0] in typed(made)}


def in_html(made: Reported) -> dict[str, Numbers]:
    page = report_html(*made)
    rows = [
        re.split(r"\s*\|+\s*", re.sub(r"\s*<[^>]*>\s*", "|", row).strip("|"))
        for row in re.findall(r"<tr[^>]*>\s*<th scope=\"row\">.*?</tr>", page, re.DOTALL)
    ]
    return {r[0]: numbers(r[3], r[5], r[-2]) for r in rows if len(r) > 8 and r[0] in typed(made) and r[1].isdigit()}


@pytest.mark.parametrize("shown", [in_json, in_markdown, in_terminal, in_html])
def test_strata_agree_with_the_typed_result(made: Reported, shown: object) -> None:
    expected, found = typed(made), shown(made)  # type: ignore[operator]
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=6e-3, abs=6e-5), name
    assert len(expected) > 8


def test_verdict_and_checks_agree(made: Reported) -> None:
    comparison, verdict, worst = made
    found = to_json(comparison, verdict, worst)
    xml = ElementTree.fromstring(to_junit(comparison, verdict).encode())
    words = {p.get("name"): p.get("value") for p in xml.iter("property")}
    assert words["word"] == found["verdict"]["word"] == verdict.word
    failed = sum(check["status"] != "PASS" for check in found["verdict"]["checks"])
    assert xml.get("failures") == str(failed + (verdict.status != "PASS"))
    assert to_markdown(comparison, verdict, worst).startswith(f"## logitgate: {verdict.word}\n")
    assert verdict.word in report_html(comparison, verdict, worst)


def test_the_figure_of_ratios_agrees(made: Reported) -> None:
    page = report_html(*made)
    data = json.loads(page[page.index('id="data">') + len('id="data">') :].split("</script>", 1)[0])
    drawn = next(one for one in data["figures"] if one["id"] == "ratio-by-stratum")["panels"][0]["series"][0]
    expected = {name: values[1] for name, values in in_json(made).items()}
    assert dict(zip(drawn["y"], drawn["x"], strict=True)) == pytest.approx(expected, rel=1e-12)
