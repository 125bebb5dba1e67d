"""gate.md, gate.xml and gate.json: what they say, that it is well formed, and that foreign text stays text."""

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import store
from harness.__main__ import main
from harness.gate.baseline import accept
from harness.gate.findings import Finding, GateOutcome, TimingVerdict
from harness.report.gate_files import WHOLE_NIGHT, WHOLE_RUN, gate_json, junit_xml, write_outputs
from harness.report.gate_text import MOST_ROWS as SHOWN
from harness.report.gate_text import gate_markdown
from tests.support.records import folder, record

GREW = Finding("a", "kv_cache_bytes", "4096 -> 4097", True)
NOTED = Finding("", "environment", "torch 2.13 -> 2.14", False)


def verdict(case_id: str = "a", word: Any = "pass", **values: Any) -> TimingVerdict:
    numbers: dict[str, Any] = {
        "change": 0.01, "lo": -0.01, "hi": 0.02, "smallest": 0.04, "null": 0.0, "null_lo": -0.01, "null_hi": 0.01,
        "p_value": 0.5, "q_value": 0.6, "blocks": 30, "seconds": 1.5, "remeasured": False, "base_ms": 1.0,
        "head_ms": 1.01, "reference_ms": 0.9, "reason": f"because {word}",
    }  # fmt: skip
    return TimingVerdict(case_id=case_id, verdict=word, **(numbers | values))


def outcome(*findings: Finding, timing: tuple[TimingVerdict, ...] = (), **values: Any) -> GateOutcome:
    return GateOutcome(**({"suite": "smoke", "cells": ("a", "b"), "findings": findings, "timing": timing} | values))


# ---- the verdict -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "strict", "passed"),
    [
        ("pass", False, True), ("improvement", False, True), ("inconclusive", False, True),
        ("regression", False, False), ("inconclusive", True, False), ("pass", True, True), ("unheard of", False, False),
    ],
)  # fmt: skip
def test_which_timing_verdicts_pass(word: str, strict: bool, passed: bool) -> None:
    one = outcome(timing=(verdict(word=word), verdict("b")), strict=strict)  # one is decided in any case
    assert one.passed is passed
    assert json.loads(gate_json(one))["passed"] is passed
    assert (junit(one).get("failures") == "0") is passed
    assert f": {'PASS' if passed else 'FAIL'}\n" in gate_markdown(one)


def test_a_night_that_decided_nothing_is_no_pass() -> None:
    one = outcome(timing=(verdict(word="inconclusive"),))
    assert not one.passed
    assert json.loads(gate_json(one))["passed"] is False
    assert gate_markdown(one).startswith("# Gate smoke: INCONCLUSIVE\n")
    failure = cases(junit(one), "timing")[WHOLE_NIGHT].find("failure")
    assert failure is not None and "nothing was shown" in failure.get("message", "")
    decided = outcome(timing=(verdict(word="inconclusive"), verdict("b")))
    assert WHOLE_NIGHT not in cases(junit(decided), "timing")


def test_a_failing_finding_fails_and_a_note_does_not() -> None:
    assert not outcome(GREW).passed
    assert outcome(NOTED).passed


# ---- JUnit -----------------------------------------------------------------------------------------------------------

# The rules of the schema that Jenkins, GitLab and GitHub's test reporters share (jenkins-junit.xsd).
CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"properties", "testcase", "system-out", "system-err"},
    "properties": {"property"},
    "testcase": {"skipped", "failure", "error", "system-out", "system-err"},
}
REQUIRED = {
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time"},
    "testcase": {"name", "classname", "time"},
    "property": {"name", "value"},
    "failure": {"message", "type"},
    "skipped": {"message"},
}


def junit(one: GateOutcome) -> ET.Element:
    root = ET.fromstring(junit_xml(one).encode())
    assert root.tag == "testsuites"
    for element in root.iter():
        assert {child.tag for child in element} <= CHILDREN.get(element.tag, set())
        assert REQUIRED.get(element.tag, set()) <= set(element.keys())
    for suite in root.iter("testsuite"):
        cases = suite.findall("testcase")
        counts = [len(cases), *(len(suite.findall(f"testcase/{tag}")) for tag in ("failure", "error", "skipped"))]
        assert [int(suite.get(name, "")) for name in ("tests", "failures", "errors", "skipped")] == counts
        assert len({case.get("name") for case in cases}) == len(cases)
        assert float(suite.get("time", "")) == pytest.approx(sum(float(case.get("time", "")) for case in cases))
    for name in ("tests", "failures", "errors", "skipped"):
        assert int(root.get(name, "")) == sum(int(suite.get(name, "")) for suite in root)
    return root


def cases(root: ET.Element, part: str) -> dict[str, ET.Element]:
    return {case.get("name", ""): case for case in root.findall(f"testsuite[@name='gate smoke {part}']/testcase")}


def test_every_cell_is_a_test_case_and_the_run_is_one() -> None:
    exact = cases(junit(outcome(GREW, NOTED, Finding("gone", "missing", "not in this run", True))), "exact")
    assert list(exact) == [WHOLE_RUN, "a", "b", "gone"]
    failure = exact["a"].find("failure")
    assert failure is not None
    assert failure.get("message") == "kv_cache_bytes: 4096 -> 4097"
    assert failure.get("type") == "kv_cache_bytes"
    assert len(exact["b"]) == 0
    assert exact["gone"].find("failure") is not None
    assert exact[WHOLE_RUN].find("failure") is None
    assert exact[WHOLE_RUN].findtext("system-out") == "environment: torch 2.13 -> 2.14"


def test_all_that_is_wrong_with_a_cell_is_one_failure() -> None:
    exact = cases(junit(outcome(GREW, Finding("a", "status", "ok -> mismatch", True))), "exact")
    assert exact["a"].findall("failure")[0].text == "kv_cache_bytes: 4096 -> 4097\nstatus: ok -> mismatch"


def test_timing_is_a_suite_of_its_own_and_inconclusive_is_skipped_with_its_reason() -> None:
    timing = (verdict("a", "regression"), verdict("b", "inconclusive"), verdict("c", "improvement"), verdict("d"))
    one = outcome(timing=timing, base="commit 1a2b", head="the working tree")
    timed = cases(junit(one), "timing")
    tags = {name: [child.tag for child in case if child.tag != "system-out"] for name, case in timed.items()}
    assert tags == {"a": ["failure"], "b": ["skipped"], "c": [], "d": []}
    skipped = timed["b"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "inconclusive: because inconclusive"
    assert "smallest=0.04" in (timed["d"].findtext("system-out") or "")
    assert {p.get("name"): p.get("value") for p in junit(one).iter("property")}["base"] == "commit 1a2b"
    strict = cases(junit(replace(one, strict=True)), "timing")
    assert strict["b"].find("failure") is not None


def test_an_empty_run_is_a_failure_and_not_an_empty_file() -> None:
    root = junit(outcome(Finding("", "empty_run", "the run has no cells", True), cells=()))
    assert root.get("failures") == "1"


# ---- foreign text ----------------------------------------------------------------------------------------------------

HOSTILE = "<b>&\"'`|\\ ]]> <!-- \x00\x1b[31m\x07\r\n\ud800\ufffe\u202e <script>alert(1)</script> | x"


def test_hostile_text_is_escaped_everywhere(tmp_path: Path) -> None:
    one = outcome(
        Finding(HOSTILE, "status", HOSTILE, True),
        Finding("", "config", HOSTILE, False),
        timing=(verdict(HOSTILE, "regression", reason=HOSTILE), verdict("x" + HOSTILE, "inconclusive", reason=HOSTILE)),
        suite=HOSTILE,
        base=HOSTILE,
        head=HOSTILE,
    )
    root = junit(one)
    assert sum("<script>" in (failure.get("message") or "") for failure in root.iter("failure")) == 2
    text = gate_markdown(one)
    assert "<script>" not in text
    assert not any(ord(each) < 32 and each != "\n" for each in text)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    widths = {line.replace("\\|", "").count("|") for line in rows}
    assert widths == {4, 9}  # of three columns and of eight: no row was broken
    assert json.loads(gate_json(one))["findings"][0]["message"] == HOSTILE
    write_outputs(tmp_path, one)
    assert ET.parse(tmp_path / "gate.xml").getroot().get("failures") == "2"


@given(st.text(), st.text())
def test_any_text_gives_well_formed_xml(case_id: str, message: str) -> None:
    root = junit(outcome(Finding(case_id, "status", message, True), cells=()))
    assert root.get("failures") == "1"
    assert len(list(root.iter("failure"))) == 1


# ---- Markdown and JSON -----------------------------------------------------------------------------------------------


def test_the_summary_has_the_failures_first_and_never_hides_an_inconclusive_cell() -> None:
    timing = (verdict("p"), verdict("i", "inconclusive"), verdict("f", "improvement"), verdict("r", "regression"))
    text = gate_markdown(outcome(NOTED, GREW, timing=timing, base="commit 1a2b", head="the working tree"))
    order = ["# Gate smoke: FAIL", "1 regression, 1 inconclusive, 1 improvement, 1 pass", "**base**: commit 1a2b",
             "## Got worse", "`a`", "4096 -&gt; 4097", "## Slower", "`r`", "## Inconclusive", "`i`",
             "because inconclusive", "## Faster", "`f`", "## To note", "the whole run",
             "As fast as before: 1 cell", "`p`"]  # fmt: skip
    positions = [text.index(words) for words in order]
    assert positions == sorted(positions)
    assert "**timing**: not judged" in gate_markdown(outcome(GREW))


def test_a_long_summary_is_cut_and_says_so() -> None:
    findings = [Finding(f"cell{number}", "status", "ok -> mismatch", True) for number in range(2000)]
    timing = [verdict(f"cell{number}", "regression") for number in range(2000)]
    text = gate_markdown(outcome(*findings, timing=tuple(timing)))
    assert len(text.encode()) < 2**20  # what GitHub allows a step
    assert text.count(f"+{2000 - SHOWN} more") == 2


def test_json_is_strict() -> None:
    one = outcome(timing=(verdict(smallest=math.inf, change=math.nan, lo=None),))
    found = json.loads(gate_json(one), parse_constant=pytest.fail)["timing"][0]
    assert (found["smallest"], found["change"], found["lo"]) == ("inf", "nan", None)
    gate_markdown(one)
    junit(one)


def test_the_files_are_written_into_the_runs_folder(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", record("a"), record("b"))
    one = outcome(GREW, timing=(verdict("a"),), base="x", head="y")
    write_outputs(run, one)
    assert not one.passed
    assert "# Gate smoke: FAIL" in (run / "gate.md").read_text()
    assert ET.parse(run / "gate.xml").getroot().get("tests") == "4"  # the run, a, b; and a's time
    assert json.loads((run / "gate.json").read_text())["cells"] == 2


def test_a_folder_without_a_run_holds_timing_alone(tmp_path: Path) -> None:
    one = outcome(timing=(verdict("a"),), cells=())
    write_outputs(tmp_path, one)
    assert not (tmp_path / store.RECORDS).exists()
    assert one.passed
    assert [suite.get("name") for suite in ET.parse(tmp_path / "gate.xml").getroot()] == ["gate smoke timing"]


def test_a_gate_that_cannot_judge_leaves_no_older_verdict(tmp_path: Path) -> None:
    run, written = folder(tmp_path / "run", record("a")), ("gate.md", "gate.xml", "gate.json")
    accept(run, tmp_path / "baseline")
    command = ["gate", str(run), "--baseline", str(tmp_path / "baseline"), "--quiet"]
    assert main(command) == 0
    assert all((run / name).exists() for name in written)
    (run / store.RECORDS).write_bytes(b"broken\n" + (run / store.RECORDS).read_bytes())
    assert main(command) == 2
    assert [name for name in written if (run / name).exists()] == []
