"""The gate's verdict as files in the run's folder: gate.md for people, gate.xml for CI, gate.json for programs."""

import json
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from harness import store
from harness.gate.findings import Finding, GateOutcome, TimingVerdict
from harness.report.gate_text import gate_markdown
from harness.text import plain, strict_json

MARKDOWN, JUNIT, JSON = "gate.md", "gate.xml", "gate.json"
WHOLE_RUN, WHOLE_NIGHT = "the whole run", "the whole night"
NUMBERS = ("base_ms", "head_ms", "reference_ms", "change", "lo", "hi", "smallest", "q_value")


def remove_outputs(folder: Path) -> None:
    """Before anything is judged: what an earlier gate said must not outlive an error of this one."""
    for name in (MARKDOWN, JUNIT, JSON):
        (Path(folder) / name).unlink(missing_ok=True)


def write_outputs(folder: Path, outcome: GateOutcome) -> None:
    for name, render in ((MARKDOWN, gate_markdown), (JUNIT, junit_xml), (JSON, gate_json)):
        store.write_atomically(Path(folder) / name, render(outcome).encode())


def gate_json(outcome: GateOutcome) -> str:
    document = {
        "suite": outcome.suite,
        "passed": outcome.passed,
        "verdict": outcome.word,
        "base": outcome.base,
        "head": outcome.head,
        "strict": outcome.strict,
        "cells": len(outcome.cells),
        "timing_counts": dict(sorted(outcome.counts.items())),
        "left_out": list(outcome.left_out),
        "settings": None if outcome.settings is None else asdict(outcome.settings),
        "findings": [asdict(finding) for finding in outcome.findings],
        "timing": [{**asdict(verdict), "fails": outcome.fails(verdict)} for verdict in outcome.timing],
    }
    return json.dumps(strict_json(document), indent=2, allow_nan=False) + "\n"


def junit_xml(outcome: GateOutcome) -> str:
    """JUnit's format, as CI systems read it: one test case per cell, in one suite for each part of the gate."""
    suites = [_exact(outcome)] if outcome.cells or outcome.findings else []
    if outcome.timing:
        suites.append(_timing(outcome))
    root = ET.Element("testsuites", {"name": plain(f"gate {outcome.suite}"), **_totals(suites)})
    root.extend(suites)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _exact(outcome: GateOutcome) -> ET.Element:
    findings: dict[str, list[Finding]] = defaultdict(list)
    for finding in outcome.findings:
        findings[finding.case_id].append(finding)
    cases = []
    # The run itself is a case as well: that it is not empty, and complete.
    for case_id in ("", *dict.fromkeys((*outcome.cells, *sorted(findings.keys() - {""})))):
        case = _case(outcome, "exact", case_id or WHOLE_RUN)
        failing = [one for one in findings[case_id] if one.fails]
        if failing:
            _add(case, "failure", failing[0].kind, [f"{one.kind}: {one.message}" for one in failing])
        if notes := [f"{one.kind}: {one.message}" for one in findings[case_id] if not one.fails]:
            ET.SubElement(case, "system-out").text = _lines(notes)
        cases.append(case)
    return _suite(outcome, "exact", cases)


def _timing(outcome: GateOutcome) -> ET.Element:
    cases = []
    for verdict in outcome.timing:
        case = _case(outcome, "timing", verdict.case_id, seconds=verdict.seconds)
        if outcome.fails(verdict):
            _add(case, "failure", verdict.verdict, [verdict.reason])
        elif verdict.verdict == "inconclusive":  # neither a pass nor a failure, and every reader of JUnit shows it
            ET.SubElement(case, "skipped", message=plain(f"inconclusive: {verdict.reason}"))
        ET.SubElement(case, "system-out").text = _lines([f"{verdict.verdict}: {verdict.reason}", _numbers(verdict)])
        cases.append(case)
    if outcome.timing_word == "INCONCLUSIVE":  # the exit code is 1: a reader of this file must see why
        case = _case(outcome, "timing", WHOLE_NIGHT)
        _add(case, "failure", "inconclusive", ["every cell is inconclusive: nothing was shown"])
        cases.append(case)
    return _suite(outcome, "timing", cases)


def _suite(outcome: GateOutcome, part: str, cases: list[ET.Element]) -> ET.Element:
    seconds = sum(float(case.get("time", "0")) for case in cases)
    numbers = {
        "time": f"{seconds:.3f}",
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": "0",
        "skipped": str(sum(case.find("skipped") is not None for case in cases)),
    }
    suite = ET.Element("testsuite", {"name": plain(f"gate {outcome.suite} {part}"), **numbers})
    if named := {name: value for name, value in (("base", outcome.base), ("head", outcome.head)) if value}:
        properties = ET.SubElement(suite, "properties")
        for name, value in named.items():
            ET.SubElement(properties, "property", name=name, value=plain(value))
    suite.extend(cases)
    return suite


def _totals(suites: list[ET.Element]) -> dict[str, str]:
    names = ("tests", "failures", "errors", "skipped")
    totals = {name: str(sum(int(suite.get(name, "0")) for suite in suites)) for name in names}
    return {**totals, "time": f"{sum(float(suite.get('time', '0')) for suite in suites):.3f}"}


def _case(outcome: GateOutcome, part: str, name: str, *, seconds: float = 0.0) -> ET.Element:
    # A dot in a class name makes a package of what stands before it.
    classname = f"gate.{plain(outcome.suite).replace('.', '_')}.{part}"
    return ET.Element("testcase", name=plain(name), classname=classname, time=f"{seconds:.3f}")


def _add(case: ET.Element, tag: str, kind: str, messages: list[str]) -> None:
    """Many readers show the first of several failures alone, so all are in one."""
    element = ET.SubElement(case, tag, message=plain("; ".join(messages)), type=plain(kind))
    element.text = _lines(messages)


def _lines(messages: Iterable[str]) -> str:
    # `plain` makes control characters visible, which XML 1.0 cannot hold even when escaped.
    return "\n".join(plain(message) for message in messages if message)


def _numbers(verdict: TimingVerdict) -> str:
    named = {name: getattr(verdict, name) for name in NUMBERS}
    return " ".join(f"{name}={value:.4g}" for name, value in named.items() if value is not None)
