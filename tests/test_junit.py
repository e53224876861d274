"""JUnit XML: a case for each check and finding, and a document that any parser takes, whatever the text."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from hypothesis import given

from harness.report.junit import no_judgement, to_junit
from harness.report.visible import visible
from harness.types import Finding, Status, Verdict
from tests.reporting import HOSTILE, Reported, reported, texts, with_text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    return reported(tmp_path_factory.mktemp("recordings"))


def parsed(document: str) -> ElementTree.Element:
    return ElementTree.fromstring(document.encode("utf-8"))


def outcome(case: ElementTree.Element) -> tuple[str, str | None]:
    """What a CI system sees: (passed, failure or error; its type)."""
    for tag in ("failure", "error"):
        found = case.find(tag)
        if found is not None:
            return tag, found.get("type")
    return "passed", None


def test_every_check_is_a_case_with_its_status(made: Reported) -> None:
    comparison, verdict, _ = made
    cases = parsed(to_junit(comparison, verdict)).findall("testsuite/testcase")
    assert len(cases) == 1 + len(verdict.checks)
    named = {case.get("name"): case for case in cases}
    assert len(named) == len(cases)
    expected = {
        Status.PASS: ("passed", None),
        Status.FAIL: ("failure", "fail"),
        Status.INCONCLUSIVE: ("failure", "inconclusive"),
    }
    for check in verdict.checks:
        case = named[f"{check.metric} {check.statistic}, {check.stratum}"]
        assert outcome(case) == expected[check.status]
        assert f"{check.value:.4g} ({check.low:.4g} to {check.high:.4g}), limit {check.limit:.4g}" in "".join(
            case.itertext()
        )
    assert {check.status for check in verdict.checks} >= {Status.PASS, Status.FAIL}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (Status.PASS, ("passed", None)),
        (Status.FAIL, ("failure", "fail")),
        (Status.INCONCLUSIVE, ("failure", "inconclusive")),
        (None, ("error", "could-not-judge")),
    ],
)
def test_the_verdict_is_a_case_even_where_no_check_is_open(
    made: Reported, status: Status | None, expected: tuple[str, str | None]
) -> None:
    verdict = Verdict(status=status, word="WORD", reasons=("no floor",))
    (case,) = parsed(to_junit(made[0], verdict)).findall("testsuite/testcase")
    assert (case.get("name"), outcome(case)) == ("verdict", expected)
    assert "no floor" in "".join(case.itertext())


def test_findings_are_failures_and_fatal_ones_errors(made: Reported) -> None:
    findings = tuple(Finding(code=f"code-{fatal}", message="why", fatal=fatal) for fatal in (True, False))
    cases = parsed(to_junit(replace(made[0], findings=findings), made[1])).findall("testsuite/testcase")
    found = {case.get("name"): outcome(case) for case in cases if case.get("classname") == "logitgate.findings"}
    assert found == {"code-True": ("error", "could-not-judge"), "code-False": ("failure", "fail")}


@given(texts)
def test_the_document_is_valid_and_its_counts_are_right_with_any_text(made: Reported, text: str) -> None:
    comparison, verdict, _ = with_text(made, text)
    root = parsed(to_junit(comparison, verdict))
    (suite,) = root
    cases = suite.findall("testcase")
    for element in (root, suite):
        assert element.get("tests") == str(len(cases))
        assert element.get("failures") == str(sum(outcome(case)[0] == "failure" for case in cases))
        assert element.get("errors") == "0"
    assert {element.tag for element in root.iter()} <= {
        "testsuites", "testsuite", "properties", "property", "testcase", "failure", "error", "system-out"
    }  # fmt: skip
    (first, *_) = cases
    message = first.find("failure")
    assert message is not None
    assert message.get("message") == visible(text)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_could_not_be_judged_is_one_error(text: str) -> None:
    (case,) = parsed(no_judgement("COULD NOT JUDGE", text)).findall("testsuite/testcase")
    assert outcome(case) == ("error", "could-not-judge")
    assert "".join(case.itertext()).strip() == visible(text).strip()
