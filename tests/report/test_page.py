"""report.html without a browser: what is in it, that it is one offline file, and that foreign text stays text."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import store
from harness.__main__ import main
from harness.errors import BadInput
from harness.gate.findings import Finding, GateOutcome, TimingVerdict
from harness.record import COLUMNS
from harness.report import figure
from harness.report.gate_files import write_outputs
from harness.report.page import StoredRun, build_page, read_run, write_own_page
from harness.report.page import rows as page_rows
from harness.report.page.build import _json
from harness.report.page.run import Sensitivity, read_sensitivity
from harness.store.reading import labels
from harness.store.records import dumps
from tests.support.page_runs import HOSTILE, hostile_run, record, run, small_run
from tests.support.records import folder

VOID = {"meta", "input", "br", "img", "link"}


class Page(HTMLParser):
    """Text by element, attributes, and whether all elements close."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())

    @property
    def data(self) -> dict[str, Any]:
        # A script's text arrives in pieces; the data is the first script.
        text = "".join(self.scripts)
        value, _ = json.JSONDecoder().raw_decode(text)
        return dict(value)


def parsed(*runs: StoredRun) -> Page:
    page = Page(build_page(runs))
    assert page.open == []
    return page


def column(data: dict[str, Any], name: str) -> list[Any]:
    found = next(each for each in data["columns"] if each["name"] == name)
    if "constant" in found:
        return [found["constant"]] * data["length"]
    return [found["words"][index] for index in found["values"]] if "words" in found else list(found["values"])


@pytest.fixture(scope="module")
def page() -> Page:
    return parsed(small_run())


def test_the_verdict_counts_and_names_the_worst(page: Page) -> None:
    assert "NOT EQUAL" in page.words
    assert "18 of 22 cells equal their reference; 1 cell is the same function, rounded worse" in page.words
    assert "than the reference; 3 differ, or were not compared." in page.words
    for chip in ("18 ok", "1 degraded", "2 mismatch", "1 error"):
        assert chip in page.words
    assert (
        "worst error inf N, ok up to 2 N (1 failed without an error to compare) in mqa-e256-l128-b1-alibi" in page.words
    )
    assert "ValueError: no such mask" in page.words
    assert "harness run config.yaml" in page.words


def test_every_row_and_column_is_embedded(page: Page) -> None:
    frame = small_run().frame
    for name in COLUMNS:
        values = column(page.data, name)
        assert len(values) == len(frame)
        for found, value in zip(values, frame[name], strict=True):
            if pd.isna(value):
                assert found is None
            elif name == "bias":
                assert found is bool(value)
            elif isinstance(value, float):
                assert float(found) == pytest.approx(value, rel=1e-4)
            else:
                assert found == value, name
    assert "inf" in column(page.data, "err_ratio")


def test_every_picture_has_a_place_a_description_and_a_table(page: Page) -> None:
    places = [attributes["data-picture"] for _, attributes in page.tags if "data-picture" in attributes]
    assert sorted(places, key=str) == sorted(page.data["charts"])
    described = [attributes["data-description"] for _, attributes in page.tags if "data-description" in attributes]
    assert len(set(described)) == len(places)
    assert page.words.count("Table of this picture") == len(places)


def test_the_page_loads_nothing(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "base"), tag
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    policy = next(a["content"] or "" for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_the_charts_name_their_data_instead_of_holding_it(page: Page) -> None:
    for name, chart in page.data["charts"].items():
        assert '"rows"' in json.dumps(chart), name
        assert len(json.dumps(chart)) < 10_000, name


def test_hostile_text_is_text() -> None:
    plain = parsed(small_run())
    page = parsed(hostile_run())
    # Not one element more than any page has: each hostile tag would be one.
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in plain.tags}
    assert sum(tag == "script" for tag, _ in page.tags) == 3
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert set(HOSTILE) <= set(column(page.data, "error"))
    for text in HOSTILE[:4]:
        assert text in page.words
    assert "{{ 7 * 7 }}" in page.words
    assert "\u2028" not in "".join(page.scripts)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=5))
@settings(max_examples=40)
def test_embedded_json_comes_back_and_cannot_end_its_element(value: Any) -> None:
    text = _json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value


def test_a_lone_surrogate_can_be_written() -> None:
    assert json.loads(_json(["\udcff"]).encode()) == ["\udcff"]


def test_runs_side_by_side() -> None:
    page = parsed(small_run("one"), small_run("two"))
    assert column(page.data, "run") == ["one"] * 22 + ["two"] * 22
    assert {"mha · one", "mha · two"} <= set(column(page.data, "series"))
    assert page.words.count("NOT EQUAL") == 3  # the title and a card each
    with pytest.raises(BadInput, match="given twice: same"):
        build_page([small_run("same"), small_run("same")])
    with pytest.raises(BadInput, match="at least one run"):
        build_page([])


def test_a_run_without_rows_and_one_without_anything_known() -> None:
    page = parsed(run(environment=None, config=None, command=None))
    assert "NOTHING COMPARED" in page.words
    assert "The run has no cells." in page.words
    assert "Not recorded." in page.words


def test_incomplete_runs_and_differing_environments_are_said() -> None:
    other = run(record(), label="b", environment=None, notes=("incomplete: 1 of 9 cells",))
    html = build_page([run(record(), label="a"), other])
    assert "incomplete: 1 of 9 cells" in html
    assert '<tr class="warn"><td>torch</td><td>2.13</td><td>-</td></tr>' in html


def test_an_incomplete_run_says_so_in_title_and_verdict() -> None:
    """Not EQUAL in green: 22 of its cells are not there."""
    part = run(*(record(seq_len=length) for length in range(1, 11)))
    part.frame.attrs["missing"] = [f"cell-{number}" for number in range(22)]
    html = build_page([part])
    assert "<title>run: INCOMPLETE</title>" in html
    assert '<article class="verdict warn">' in html
    assert "10 of 32 cells; 22 missing. All 10 cells equal" in Page(html).words
    assert "<title>run, b: INCOMPLETE</title>" in build_page([part, run(record(), label="b")])
    assert "<title>run, b: NOT EQUAL</title>" in build_page([part, run(record(status="mismatch"), label="b")])


def test_one_cell_is_one_cell() -> None:
    assert "The one cell equals its reference" in parsed(run(record())).words


def test_the_status_stands_first_in_the_list_of_cells_that_are_not_ok() -> None:
    row = '<tr class="bad"><td>mismatch</td>'
    bad = record(status="mismatch", err_ratio=99.0)
    assert row + f"<td>{bad.case_id}</td>" in build_page([run(bad)])
    assert row + f"<td>a</td><td>{bad.case_id}</td>" in build_page([run(bad, label="a"), run(record(), label="b")])


def test_a_kernel_is_named_only_where_a_run_has_several() -> None:
    one = [run(record(kernel=kernel), label=kernel) for kernel in ("eager", "sdpa")]
    assert page_rows.combine(one)["series"].tolist() == ["mha · eager", "mha · sdpa"]
    two = [run(record(kernel="eager"), record(kernel="sdpa"), label="a"), run(record(), label="b")]
    assert page_rows.combine(two)["series"].tolist() == ["mha · eager · a", "mha · sdpa · a", "mha · eager · b"]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.0, float("inf")], (0.05, 100.0)),
        ([0.02, 1e3], (0.01, 2e3)),
        ([1.0, 1e40], (0.05, 1e6)),
        ([float("inf"), 0.0], (0.05, 100.0)),
    ],
)
def test_the_picture_of_errors_spans_what_can_be_read(ratios: list[float], expected: tuple[float, float]) -> None:
    page = parsed(run(*(record(mask=f"m{number}", err_ratio=value) for number, value in enumerate(ratios))))
    assert page.data["errorRange"] == pytest.approx(expected)


@pytest.mark.parametrize(("latency", "drawn"), [(1.01, [b">mha, gqa<"]), (2.0, [b">mha<", b">gqa<"])])
def test_points_at_one_place_share_a_label(tmp_path: Path, latency: float, drawn: list[bytes]) -> None:
    rows = [record(variant, phase="decode", kv_bytes_per_token=64.0, latency_ms=time)
            for variant, time in (("mha", 1.0), ("gqa", latency))]  # fmt: skip
    figure.save([run(*rows)], tmp_path / "x.svg")
    svg = (tmp_path / "x.svg").read_bytes()
    for label in (b">mha<", b">gqa<", b">mha, gqa<", b">gqa, mha<"):
        assert (label in svg) == (label in drawn)


def test_points_of_one_variant_at_one_place_share_its_name(tmp_path: Path) -> None:
    """Two names with all their options would be wider than the panel."""
    rows = [record("gqa", phase="decode", kv_bytes_per_token=64.0, latency_ms=time, kv_heads=heads)
            for heads, time in ((1, 1.0), (2, 1.01), (4, 9.0))]  # fmt: skip
    figure.save([run(*rows)], tmp_path / "x.svg")
    svg = (tmp_path / "x.svg").read_text()
    assert ">gqa<" in svg and ">gqa · kv 4<" in svg
    assert ">gqa · kv 1" not in svg


def test_cells_of_one_variant_in_one_picture_have_names_of_their_own() -> None:
    frame = page_rows.combine(
        [run(record("gqa", phase="decode", kv_heads=2), record("gqa", phase="decode", kv_heads=4), record("mha"))]
    )
    assert frame["series"].tolist() == ["gqa · kv 2", "gqa · kv 4", "mha"]
    assert frame["setting"].tolist() == ["E 256 · H 8 · S 128 · B 1 · float32 · causal"] * 3
    odd = page_rows.combine([run(record(head_dim=128, bias=False), record())])["family"].tolist()
    assert odd == [
        "E 256 · H 8 · D 128 · B 1 · float32 · causal · no bias",
        "E 256 · H 8 · B 1 · float32 · causal · bias",
    ]


def test_gate_and_sensitivity_are_shown_when_given(tmp_path: Path) -> None:
    findings = (Finding("cell<1>", "params", "params 1 -> 2", True), Finding("", "config", "differs", False))
    saboteurs = pd.DataFrame(
        {"saboteur": ["loud", "loud", "quiet"], "outcome": ["mismatch", "degraded", "survived"],
         "by": ["plain", "plain", None], "dtype": ["float32"] * 3}
    )  # fmt: skip
    cells = pd.DataFrame(
        {"case_id": ["a", "b"], "dtype": ["float32"] * 2, "phase": ["prefill"] * 2, "problem": [None, None],
         "mismatch_from": [1e-4, None], "seen_from": [1e-6, 1e-5]}
    )  # fmt: skip
    page = parsed(run(record(), findings=findings, sensitivity=Sensitivity(saboteurs, cells)))
    assert "run: FAIL, 1 failing, 1 to note" in page.words
    assert "cell<1>" in page.words
    assert "2 of 3 wrong runs were seen" in page.words
    assert page.words.index("quiet") < page.words.index("loud")
    assert "float32prefill2infinf5.5e-061.0e-05" in page.words.replace(" ", "")
    assert "PASS, nothing changed" in parsed(run(record(), findings=())).words
    without = parsed(run(record())).words
    assert "accepted baseline" not in without
    assert "wrong kernel" not in without
    with pytest.raises(BadInput, match=r"no sensitivity.csv, cells.csv"):
        read_sensitivity(tmp_path)


# ---- harness report --------------------------------------------------------------------------------------------------


def stored(path: Path, *records: Any) -> Path:
    return folder(path, *(records or small_run_records()), config=None, environment=None)


def small_run_records() -> list[Any]:
    return [record(v, seq_len=n, phase=p) for v in ("mha", "gqa") for n in (128, 256) for p in ("prefill", "decode")]


@pytest.mark.parametrize("kind", ["md", "csv", "png", "svg"])
def test_one_format_goes_to_its_file(tmp_path: Path, kind: str) -> None:
    folder, out = stored(tmp_path / "a"), tmp_path / "deep" / f"x.{kind}"
    out.parent.mkdir()
    out.write_text("old")
    assert main(["report", str(folder), "--format", kind, "--out", str(out), "--quiet"]) == 0
    head = {"md": b"# a: EQUAL", "csv": b"case_id,", "png": b"\x89PNG", "svg": b"<svg"}[kind]
    assert out.read_bytes().startswith(head)
    assert not (folder / "report.html").exists()
    if kind == "svg":  # drawn by the page's own spec: the names and the front are in it
        assert b">gqa<" in out.read_bytes()
        assert b"stroke-dasharray" in out.read_bytes()


def test_the_default_is_the_page_beside_tables_and_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored(tmp_path / "a")
    assert main(["report", str(folder)]) == 0
    assert {"report.html", "summary.md", "results.csv", "results.parquet"} <= {path.name for path in folder.iterdir()}
    assert str(folder / "report.html") in capsys.readouterr().out.replace("\n", "")


def test_several_runs_in_one_page_and_one_table(tmp_path: Path) -> None:
    a, b, out = stored(tmp_path / "a"), stored(tmp_path / "b", record("mqa", phase="decode")), tmp_path / "both"
    out.mkdir()
    given = [str(a), str(b), "--format", "html", "--format", "csv", "--format", "md", "--out", str(out), "--quiet"]
    assert main(["report", *given]) == 0
    assert set(column(Page((out / "report.html").read_text()).data, "run")) == {"a", "b"}
    assert pd.read_csv(out / "results.csv")["run"].value_counts().to_dict() == {"a": 8, "b": 1}
    assert "# b: EQUAL" in (out / "summary.md").read_text()


def test_bad_input_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored(tmp_path / "a", record())
    assert main(["report", str(folder), "--format", "png", "--out", str(tmp_path / "x.jpg")]) == 2
    assert "must end in .png" in capsys.readouterr().err
    assert main(["report", str(folder), "--format", "png"]) == 2
    assert "no equal float32 causal decode cell" in capsys.readouterr().err
    assert main(["report", str(folder), str(folder)]) == 2
    assert "given twice" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(folder)
    assert main(["report", str(folder), str(tmp_path / "link")]) == 2
    assert f"as {folder} and as {tmp_path / 'link'}" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "c").mkdir()
    assert labels([tmp_path / "a", tmp_path / "c" / ".." / "a"]) == [f"{tmp_path}/a", f"{tmp_path}/c/../a"]


def test_the_picture_keeps_the_fullest_panels() -> None:
    rows = [record(v, seq_len=n, phase="decode") for n in range(1, 12) for v in ("mha", "gqa")[: 1 + (n > 3)]]
    panels = {row["setting"] for data in figure.tradeoffs([run(*rows)]).to_dict()["datasets"].values() for row in data}
    assert {setting.split(" · ")[2] for setting in panels} == {f"S {n}" for n in range(4, 12)}


# ---- approximate cells -----------------------------------------------------------------------------------------------


def approximate_run(label: str = "run") -> StoredRun:
    """Two kernels over two lengths on two kinds of input; one error is not a number."""

    def entry(regime: str, rel_l1: float, ratio: float | None) -> dict[str, Any]:
        names = ("cosine", "rmse", "max_abs", "kept_blocks", "visible_blocks", "all_blocks", "skipped_blocks")
        timed = {"dense_ratio": ratio, "dense_ratio_lo": ratio, "dense_ratio_hi": ratio, "latency_ms": 1.0}
        found = {"regime": regime, "sparsity": 0.5, "rel_l1": rel_l1, "pv_skipped_blocks": 0} | timed
        return dict.fromkeys(names, 0.5) | found

    records = [
        record(seq_len=length, kernel=kernel, sparsity=0.5,
               approximation=[entry("plain", error, 0.75), entry("locally_smooth", 0.0625, None)])
        for length, kernel, error in ((128, "sparse?topk=0.5", 0.375), (256, "sparse?topk=0.5", 0.25),
                                      (256, "sparse_window?window=64", float("nan")))
    ]  # fmt: skip
    exact = record("gqa", seq_len=64)
    return run(exact, *records, label=label, approximate=tuple(records))


def test_what_was_left_out_has_its_section() -> None:
    page = parsed(approximate_run())
    ids = [attributes.get("id") for _, attributes in page.tags]
    assert ("section", "left-out-title") in [(tag, at.get("aria-labelledby")) for tag, at in page.tags]
    assert "left-out-title" in ids
    assert ("a", "#left-out") in [(tag, at.get("href")) for tag, at in page.tags]
    assert {"sparsity", "gain"} <= {at.get("data-picture") for _, at in page.tags}
    assert "mha L=256 causal prefill float32 B=1 E=256sparse_window?window=64plain50 %nan0.5000.75" in page.words
    rows = page.data["leftOut"]
    assert [(row["seq_len"], row["kernel"], row["inputs"], row["rel_l1"], row["dense_ratio"]) for row in rows] == [
        (128, "sparse?topk=0.5", "plain", 0.375, 0.75), (128, "sparse?topk=0.5", "locally_smooth", 0.0625, None),
        (256, "sparse?topk=0.5", "plain", 0.25, 0.75), (256, "sparse?topk=0.5", "locally_smooth", 0.0625, None),
        (256, "sparse_window?window=64", "plain", None, 0.75),
        (256, "sparse_window?window=64", "locally_smooth", 0.0625, None),
    ]  # fmt: skip
    cells = column(page.data, "case_id")
    assert [cells[row["row"]] for row in rows] == [one.case_id for one in approximate_run().approximate for _ in "ab"]


def test_cells_of_several_runs_keep_their_own_rows() -> None:
    page = parsed(small_run("first"), approximate_run("second"), approximate_run("third"))
    cells, runs = column(page.data, "case_id"), column(page.data, "run")
    found = {(runs[row["row"]], cells[row["row"]]) for row in page.data["leftOut"]}
    assert found == {(name, one.case_id) for name in ("second", "third") for one in approximate_run().approximate}


def test_a_run_of_exact_kernels_has_no_such_section(page: Page) -> None:
    assert "left-out" not in [attributes.get("id") for _, attributes in page.tags]
    assert "sparsity" not in page.data["charts"]
    assert page.data["leftOut"] == []


def test_the_table_of_what_was_left_out_reads_at_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from harness.report.sparsity import print_sparsity

    (tmp_path / store.RECORDS).write_bytes(b"".join(dumps(one) for one in approximate_run().approximate))
    print_sparsity(tmp_path, Console(width=80))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["L=256", "sparse_window?window=64", "plain", "50", "%", "nan", "0.75"]
               for line in lines)  # fmt: skip
    print_sparsity(tmp_path, Console(width=120))
    assert "interval" in capsys.readouterr().out


def test_what_a_gate_wrote_beside_the_run_is_shown(tmp_path: Path):
    (tmp_path / store.RECORDS).write_bytes(b"".join(dumps(one) for one in approximate_run().approximate))
    folder, case_id = tmp_path, approximate_run().approximate[0].case_id
    slower = TimingVerdict(
        case_id, "regression", 0.08, 0.06, 0.1, 0.04, 0.0, -0.01, 0.01, 1e-6, 1e-5, 96, 2.0, True, 1.0, 1.08, 1.0,
        "8.0% slower <script>alert(1)</script>",
    )  # fmt: skip
    finding = Finding(case_id, "params", "1 -> 2", True)
    write_outputs(folder, GateOutcome("small", (case_id,), (finding,), (slower,)))
    page = build_page([read_run(folder)])
    assert "FAIL, 1 failing" in page and "0 of 1 cell pass" in page
    assert "8.0% slower &lt;script&gt;" in page and "<script>alert(1)" not in page
    (folder / "gate.json").write_text('{"timing": 3}')
    with pytest.raises(BadInput, match=r"gate\.json was not written by this gate"):
        read_run(folder)


def test_a_page_that_fails_does_not_cost_a_run_its_verdict(tmp_path, monkeypatch, caplog):
    (tmp_path / store.RECORDS).write_bytes(b"".join(dumps(one) for one in approximate_run().approximate))
    monkeypatch.setattr("harness.report.page.build.build_page", lambda runs: 1 / 0)
    write_own_page(tmp_path, store.table(store.read_records(tmp_path)))
    assert "ZeroDivisionError" in caplog.text and not (tmp_path / "report.html").exists()


def test_the_verdict_does_not_call_approximate_cells_equal():
    page = parsed(run(record("gqa", seq_len=64), record(seq_len=128, rel_l1=0.01)))
    assert "1 cell is within the error metrics that the suite declares; 1 equal their reference." in page.words
    assert "equal their reference within what rounding" not in page.words
