"""Runs -> one HTML string: no network, no foreign text that could become markup or script."""

import base64
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from harness import store
from harness.errors import BadInput
from harness.report import sparsity, story
from harness.report.page import words
from harness.report.page.rows import AXES, DERIVED, DIGITS, KEY_COLUMNS, combine, embedded, left_out_rows, tradeoff_rows
from harness.report.page.run import StoredRun, read_run
from harness.text import plain

log = logging.getLogger(__name__)
PAGE = "report.html"
NEEDED = {"altair": "altair", "jinja2": "jinja2", "vl_convert": "vl-convert-python"}
STATIC = Path(__file__).parent / "static"
# One concept a file; they share one scope, in this order.
SCRIPTS = ("rows.js", "table.js", "pictures.js", "filters.js", "main.js")
SNIPPET = "window.vegaEmbed = vegaEmbed;"  # all that the page calls of Vega


def missing_packages() -> list[str]:
    """What the page needs and this installation has not: the `report` extra brings it."""
    return [name for module, name in NEEDED.items() if find_spec(module) is None]


def write_own_page(folder: Path, frame: pd.DataFrame) -> None:
    """At the end of a run: the page is part of its folder, but no run fails for want of it."""
    if lost := missing_packages():
        log.warning("no %s: it needs %s (the `report` extra)", PAGE, ", ".join(lost))
        return
    try:
        write_page([replace(read_run(folder), frame=frame)], folder / PAGE)
    except Exception as error:  # whatever it is, the verdict stands: it is told, and `harness report` shows it again
        log.warning("no %s: %s: %s", PAGE, type(error).__name__, error)


def refuse_without_packages(path: Path) -> None:
    if lost := missing_packages():
        raise BadInput(
            f"{path.name} needs {', '.join(lost)}; install them with: pip install 'attention-harness[report]'"
        )


def write_page(runs: Sequence[StoredRun], path: Path) -> None:
    refuse_without_packages(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A label may hold half of a surrogate pair, from a folder name that is no UTF-8.
    store.write_atomically(path, build_page(runs).encode(errors="backslashreplace"))


def build_page(runs: Sequence[StoredRun]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    if not runs:
        raise BadInput("a report needs at least one run")
    if len(labels := {run.label for run in runs}) != len(runs):
        raise BadInput(f"runs of one report need labels of their own, these are given twice: {', '.join(labels)}")
    cards = [words.card(run) for run in runs]
    css, script = (STATIC / "page.css").read_text(encoding="utf-8"), _script()
    vega = vega_bundle()
    for code in (css, script, vega):
        if "</script" in code.lower() or "</style" in code.lower() or "<!--" in code:
            raise AssertionError("a script or style of the page would end its own element")
    jinja = Environment(loader=FileSystemLoader(STATIC), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return jinja.get_template("page.html.j2").render(
        # Ours, or made harmless by `_json`; everything else is escaped.
        css=Markup(css),
        script=Markup(script),
        vega=Markup(vega),
        data=Markup(_json(_payload(runs))),
        policy=_policy([vega, script], css),
        title=", ".join(plain(run.label) for run in runs),
        headline=min((card.headline for card in cards), key=list(words.TONES).index),
        runs=cards,
        not_ok=words.not_ok_table(runs),
        variant_tables=words.variant_tables(runs),
        legend=story.LEGEND,
        digits=DIGITS,
        sensitivity=[table for run in runs if run.sensitivity for table in words.sensitivity_tables(run.sensitivity)],
        gates=[table for run in runs for table in words.gate_tables(run)],
        left_out=words.left_out_tables(runs),
        left_out_legend=sparsity.LEGEND,
        environment=words.environment_table(runs),
    )


def _payload(runs: Sequence[StoredRun]) -> dict[str, Any]:
    from harness.report.page.charts import DRAWN, STATUS_COLOURS, error_range, page_charts

    frame = combine(runs)
    left_out = left_out_rows(runs, frame)
    return {
        "columns": embedded(frame),
        "length": len(frame),
        "axes": AXES,
        "keyColumns": KEY_COLUMNS,
        "derived": DERIVED,
        "drawn": DRAWN,
        "statusColours": STATUS_COLOURS,
        "errorRange": error_range(frame),
        "charts": page_charts(frame, left_out),
        "leftOut": left_out,
        "tradeoffs": tradeoff_rows(frame),
    }


def _script() -> str:
    parts = [(STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "\n})();\n"


def _json(value: Any) -> str:
    """JSON inside a script element: `<`, `>` and `&` cannot end it, U+2028 and U+2029 cannot end a line."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A lone surrogate, as an undecodable byte of a message becomes, cannot be written as UTF-8.
    return text.encode(errors="backslashreplace").decode()


def _policy(scripts: Sequence[str], css: str) -> str:
    """Nothing is loaded from anywhere, and only these very scripts run: an injected one has another hash."""
    allowed = " ".join(_hash(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(css)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def vega_bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script that needs no network.

    Bundling takes seconds and depends on versions alone, so it is kept in the user's cache folder."""
    import altair
    import vl_convert

    vega_lite = ".".join(altair.VEGALITE_VERSION.split(".")[:2])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attention-harness"
    path = folder / f"vega-{version('vl-convert-python')}-{vega_lite}.js"
    if path.exists():
        return path.read_text(encoding="utf-8")
    text: str = vl_convert.javascript_bundle(SNIPPET, vl_version=vega_lite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        store.write_atomically(path, text.encode())
    except OSError as error:
        log.warning("%s cannot be written, so each report bundles its charts anew: %s", path, error)
    return text
