"""The gate's verdict as files in the run's folder: gate.md for people, gate.xml for CI, gate.json for programs."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import store
from harness.gate.finding import Finding
from harness.gate.junit import junit_xml
from harness.gate.markdown import gate_markdown
from harness.gate.outcome import Outcome
from harness.gate.verdicts import TimingSettings, TimingVerdict

MARKDOWN, JUNIT, JSON = "gate.md", "gate.xml", "gate.json"


def remove_outputs(folder: Path) -> None:
    """Before anything is judged: what an earlier gate said must not outlive an error of this one."""
    for name in (MARKDOWN, JUNIT, JSON):
        (Path(folder) / name).unlink(missing_ok=True)


def write_outputs(
    folder: Path,
    *,
    suite: str,
    findings: Sequence[Finding] = (),
    timing: Sequence[TimingVerdict] = (),
    base: str | None = None,
    head: str | None = None,
    strict: bool = False,
    settings: TimingSettings | None = None,
    left_out: Sequence[str] = (),
) -> Outcome:
    """`base` and `head` say in words what was compared ("commit 1a2b3c4", "the working tree"). A folder without records
    was timed alone: then the cells are those of `timing`."""
    folder = Path(folder)
    cells = [record.case_id for record in store.read_records(folder)] if (folder / store.RECORDS).exists() else []
    outcome = Outcome(
        suite,
        tuple(cells),
        tuple(findings),
        tuple(timing),
        base=base,
        head=head,
        strict=strict,
        settings=settings,
        left_out=tuple(left_out),
    )
    for name, text in (
        (MARKDOWN, gate_markdown(outcome)),
        (JUNIT, junit_xml(outcome)),
        (JSON, gate_json(outcome)),
    ):
        store.write_atomically(folder / name, text.encode())
    return outcome


def gate_json(outcome: Outcome) -> str:
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
    return json.dumps(_finite(document), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Strict JSON knows no non-finite number: they are written as text, as in records.jsonl."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
