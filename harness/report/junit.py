"""A verdict as JUnit XML, which CI systems read: one case for the verdict, one for each check and each finding.

FAIL is a failure, INCONCLUSIVE a failure of type "inconclusive", what could not be judged an error. The case of the
verdict is there because a verdict can be held back (no fit floor, say) although no single check is open.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence

from harness.report import cells
from harness.report.visible import visible
from harness.types import Check, Comparison, Finding, Status, Verdict

SUITE = "logitgate"


def to_junit(comparison: Comparison, verdict: Verdict) -> str:
    """The XML document, as text for a UTF-8 file."""
    facts = [*cells.facts(comparison, verdict), *([verdict.remedy] if verdict.remedy else [])]
    cases = [_case("verdict", "verdict", verdict.status, facts)]
    cases += [_check(check) for check in verdict.checks]
    cases += [_finding(finding) for finding in comparison.findings]
    properties = {role: f"{side.path} {cells.described(side)}" for role, side in cells.sides(comparison)}
    properties |= {"positions": cells.positions(comparison), "numbers": cells.direction(comparison)}
    return _document(cases, {"word": verdict.word, **properties}, comparison.seconds)


def no_judgement(word: str, message: str) -> str:
    """The document where nothing could be compared, and why: one case with an error."""
    return _document([_case("verdict", "verdict", None, [message])], {"word": word}, 0.0)


def _check(check: Check) -> ElementTree.Element:
    number = f"{check.value:.4g} ({check.low:.4g} to {check.high:.4g}), limit {check.limit:.4g}"
    rows = f"{check.positions:,} positions, {check.clusters:,} clusters"
    facts = [number, rows, *([f"limit: {check.reason}"] if check.reason else [])]
    return _case(check.tier, f"{check.metric} {check.statistic}, {check.stratum}", check.status, facts)


def _finding(finding: Finding) -> ElementTree.Element:
    status = None if finding.fatal else Status.FAIL
    return _case("findings", finding.code, status, [finding.message])


def _case(group: str, name: str, status: Status | None, facts: Sequence[str]) -> ElementTree.Element:
    """One test case: the first fact is the message of what went wrong, all of them are its text."""
    case = ElementTree.Element("testcase", classname=f"{SUITE}.{group}", name=visible(name), time="0")
    lines = [visible(fact) for fact in facts]
    text = "\n".join(lines)
    if status is Status.PASS:
        ElementTree.SubElement(case, "system-out").text = text
        return case
    tag = "error" if status is None else "failure"
    kind = "could-not-judge" if status is None else str(status).lower()
    ElementTree.SubElement(case, tag, type=kind, message=lines[0] if lines else kind).text = text
    return case


def _document(cases: Iterable[ElementTree.Element], properties: dict[str, str], seconds: float) -> str:
    suite = ElementTree.Element("testsuite")
    listed = ElementTree.SubElement(suite, "properties")
    for name, value in properties.items():
        ElementTree.SubElement(listed, "property", name=name, value=visible(value))
    suite.extend(cases)
    counts = {
        "tests": len(suite.findall("testcase")),
        "failures": len(suite.findall("testcase/failure")),
        "errors": len(suite.findall("testcase/error")),
    }
    root = ElementTree.Element("testsuites")
    for element in (root, suite):
        shared = {name: str(count) for name, count in counts.items()}
        element.attrib.update({"name": SUITE, **shared, "skipped": "0", "time": f"{seconds:.3f}"})
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"
