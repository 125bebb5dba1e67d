"""The command line from end to end: what it prints, what it writes, and the exit code."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import harness
from harness import store
from harness.case import DTYPES, PHASES
from harness.kernels.names import kernel_names
from harness.record import COLUMNS
from harness.suite.schema import REGIMES
from harness.variants.masks import MASKS
from harness.variants.specs import VARIANTS
from tests.support import ROOT, Command, Result, called, python

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

WRONG = Path(ROOT / "tests" / "wrong_kernels.py")
FILES = (
    "records.jsonl",
    "results.csv",
    "results.parquet",
    "summary.md",
    "environment.json",
    "config.yaml",
    "run.json",
    "report.html",
)
HEAD = "name: tiny\nthreads: 1\nregimes: [plain, poison]\n"
BRIEF = "timing: {budget_s: 0.001, min_blocks: 3, max_blocks: 3}\nbattery: {enabled: false}\n"
UNTIMED = "timing: {enabled: false}\nbattery: {enabled: false}\n"  # direct calls are tests/battery's affair
SMOKE = f"""\
{HEAD}{BRIEF}grid:
  variant: [mha, mqa, gqa, mla]
  embed_dim: [32]
  heads: [4]
  kv_heads: [2]
  seq_len: [12]
  mask: [causal]
  phase: [prefill, decode, train]
  batch: [2]
"""
ONE = f"{HEAD}{UNTIMED}grid: {{variant: mha, embed_dim: 16, heads: 2, seq_len: 6, mask: causal}}\n"
SABOTAGE = f"""\
{HEAD}{UNTIMED}grid:
  variant: [mha, mqa, gqa, mla_naive, mla_absorbed]
  embed_dim: [32]
  heads: [4]
  kv_heads: [2]
  seq_len: [12]
  mask: [none, causal]
  phase: [prefill, decode, train]
"""


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, in this python, cases too: torch is imported once for all tests."""

    def cli(*arguments: str | Path) -> Result:
        words = [str(argument) for argument in arguments]
        if words[:1] == ["run"] and "--executor" not in words:
            words += ["--executor", "here"]
        return called(capsys, *words)

    return cli


def write(text: str | bytes, name: str = "c.yaml") -> Path:
    path = Path(name)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def table(folder: str | Path = "results/latest") -> pd.DataFrame:
    return pd.read_parquet(Path(folder) / "results.parquet")


# A run


def test_a_run_writes_prints_and_exits_0(cli: Command):
    result = cli("run", write(SMOKE))
    assert result.code == 0, result
    assert result.out.startswith("EQUAL  12 cells: 12 ok\n")
    latest = Path("results/latest")
    assert latest.is_symlink()
    folder = latest.resolve()
    assert folder.parent == Path("results").resolve()
    assert folder.name.startswith("tiny-")
    assert sorted(path.name for path in folder.iterdir()) == sorted((*FILES, "benchmark.json"))
    # the table on the terminal
    for word in ("variant", "error/N", "params", "KV B/token", "x MHA"):
        assert word in result.out, word
    # the speeds, unless this machine disturbed them all
    is_disturbed = "12 cells were disturbed" in result.out
    assert is_disturbed or "How fast is it?" in result.out or "x ref" in result.out
    for variant in ("mha", "mqa", "gqa", "mla"):
        assert re.search(rf"^ *{variant} .* 3/3 ", result.out, re.MULTILINE), variant
    assert re.search(r"^\d+ % of \d+ s inside measured or compared calls$", result.out, re.MULTILINE)
    assert f"results/{folder.name}/  report.html summary.md results.csv results.parquet records.jsonl" in result.out
    # the files
    lines = map(json.loads, (folder / "records.jsonl").read_text().splitlines())
    records = [*{record["case_id"]: record for record in lines}.values()]  # what was disturbed is there twice
    frame, csv = table(), pd.read_csv(folder / "results.csv")
    assert len(records) == len(frame) == len(csv) == 12
    assert list(frame.columns) == list(csv.columns) == list(COLUMNS)
    assert [record["case_id"] for record in records] == list(frame["case_id"]) == list(csv["case_id"])
    assert set(frame["status"]) == {"ok"}
    assert frame["latency_ratio"].notna().all()
    assert frame.loc[frame["phase"] == "train", "kv_cache_bytes"].isna().all()
    assert frame.loc[frame["phase"] != "train", "kv_cache_bytes"].gt(0).all()
    assert frame.loc[frame["phase"] != "train", "grad_max_abs_err"].isna().all()
    assert all(len(record["samples_s"]["candidate"]) == 3 for record in records)
    assert (folder / "config.yaml").read_text() == SMOKE
    assert json.loads((folder / "environment.json").read_text())["threads"] == 1
    assert "12 ok" in (folder / "summary.md").read_text()


def test_two_runs_have_two_folders_and_latest_is_the_last(cli: Command):
    config = write(ONE)
    assert cli("run", config).code == 0
    first = Path("results/latest").resolve()
    assert cli("run", config).code == 0
    second = Path("results/latest").resolve()
    assert first != second
    assert first.is_dir()


def test_out_names_the_folder_and_leaves_latest_alone(cli: Command):
    config = write(ONE)
    assert cli("run", config, "--out", "here/and/there").code == 0
    assert sorted(path.name for path in Path("here/and/there").iterdir()) == sorted(FILES)
    assert not Path("results").exists()
    again = cli("run", config, "--out", "here/and/there")
    assert again.code == 2
    assert "here/and/there already holds records.jsonl of another run" in again.err
    Path("file").touch()
    assert "file is a file" in (refused := cli("run", config, "--out", "file")).err
    assert refused.code == 2


def test_a_folder_that_cannot_be_made_is_bad_input(cli: Command):
    result = cli("run", write(ONE), "--out", "/dev/null/below")
    assert result.code == 2
    assert result.err.startswith("harness: ")
    assert "/dev/null/below" in result.err
    assert "Traceback" not in result.err


def test_quiet_prints_nothing(cli: Command):
    result = cli("run", write(ONE), "--quiet")
    assert result == Result(0, "", "")
    assert len(table()) == 1
    failed = cli("run", "c.yaml", "--quiet", "--kernel", f"{WRONG}:zeros")
    assert failed == Result(1, "", "")


def test_verbose_logs_every_case_in_the_agreed_form(cli: Command):
    result = cli("run", write(ONE), "--verbose", "--kernel", f"{WRONG}:raises", "--kernel", "eager")
    assert result.code == 1
    lines = [line for line in result.err.splitlines() if line.startswith("[")]
    assert all(re.match(r"\[(DEBUG|INFO|WARNING|ERROR)\]\[\w+\]\[\w+\] \S", line) for line in lines)
    frame = table()
    for number, case_id in enumerate(frame["case_id"], start=1):
        assert any(line.startswith(f"[INFO][runner][measure_all] {number}/2 {case_id}") for line in lines), lines
    assert any("no such tile" in line for line in lines)
    assert any(f"{WRONG}" in line and "sha256:" in line for line in lines)


def test_by_default_nothing_is_logged(cli: Command):
    assert cli("run", write(ONE)).err == ""


def test_a_dictionary_gives_the_data_frame():
    grid = {"variant": ["mha", "gqa"], "embed_dim": 16, "heads": 4, "kv_heads": 2, "seq_len": 6}
    config = {"name": "own", "threads": 1, "regimes": ["plain"], "timing": {"enabled": False}, "grid": grid}
    frame = harness.run(config, executor="here")
    assert isinstance(frame, pd.DataFrame)
    assert list(frame["variant"]) == ["mha", "gqa"]
    assert list(frame["status"]) == ["ok", "ok"]
    assert list(frame.columns) == list(COLUMNS)
    folder = Path(frame.attrs["folder"])
    assert folder.resolve() == Path("results/latest").resolve()
    assert 0 < frame.attrs["measured_share"] < 1
    assert frame.attrs["elapsed"] > 0
    pd.testing.assert_frame_equal(harness.load(folder), frame, check_flags=False)
    ours = harness.run(config, "mine", kernels=[f"{WRONG}:zeros"], shard=(2, 2), executor="here")
    assert list(ours["variant"]) == ["gqa"]
    assert list(ours["status"]) == ["mismatch"]
    with pytest.raises(ValueError, match="shard 3/2"):
        harness.run(config, "other", shard=(3, 2), executor="here")
    assert not Path("other").exists()


# Kernels of a user's own


def never(row: Any) -> bool:
    return False


@pytest.mark.parametrize(
    ("kernel", "shows"),
    [
        ("plain", never),
        ("textbook", never),
        ("scale_off", lambda row: True),
        ("zeros", lambda row: True),
        ("causal_off_by_one", lambda row: row.mask == "causal"),
        ("mask_ignored", lambda row: row.mask == "causal"),
        ("swapped_groups", lambda row: row.variant == "gqa"),
        ("scale_ignored", lambda row: row.variant == "mla_absorbed"),
    ],
)
def test_a_kernel_is_a_mismatch_exactly_where_its_bug_can_show(cli: Command, kernel: str, shows: Callable[[Any], bool]):
    result = cli("run", write(SABOTAGE), "--kernel", f"{WRONG}:{kernel}")
    frame = table()
    assert len(frame) == 30
    assert set(frame["kernel"]) == {f"{WRONG}:{kernel}"}
    found = {row.case_id: row.status for row in frame.itertuples()}
    assert found == {row.case_id: "mismatch" if shows(row) else "ok" for row in frame.itertuples()}
    wrong = sum(status == "mismatch" for status in found.values())
    assert result.code == (1 if wrong else 0)
    assert result.out.startswith("NOT EQUAL  30 cells" if wrong else "EQUAL  30 cells: 30 ok\n")
    if wrong:
        assert f"{wrong} mismatch" in result.out.splitlines()[0]
        assert frame.loc[frame["status"] == "mismatch", "err_ratio"].gt(32).all()
        assert frame.loc[frame["status"] == "mismatch", "error"].str.contains("regime").all()


def test_a_kernel_that_fails_is_a_row_and_the_run_goes_on(cli: Command):
    names = ["raises", "wrong_shape", "writes_q", "gives_nan", "refuses", "out_of_memory", "leaves", "plain"]
    result = cli("run", write(ONE), *(part for name in names for part in ("--kernel", f"{WRONG}:{name}")))
    assert result.code == 1
    statuses = {kernel.rpartition(":")[2]: status for kernel, status in table()[["kernel", "status"]].to_numpy()}
    assert statuses == {
        "raises": "error", "wrong_shape": "mismatch", "writes_q": "mismatch", "gives_nan": "mismatch",
        "refuses": "unsupported", "out_of_memory": "oom", "leaves": "error", "plain": "ok",
    }  # fmt: skip
    assert "no such tile" in result.out
    assert f"{WRONG}:" in result.out
    assert "Traceback" not in result.out + result.err


def test_degraded_fails_only_a_strict_run(cli: Command):
    config = write(ONE.replace("mask: causal", "mask: none").replace("poison", "tiny"))
    kernel = ("--kernel", f"{WRONG}:fast_softmax")
    lax, strict = cli("run", config, *kernel), cli("run", config, *kernel, "--strict")
    assert list(table()["status"]) == ["degraded"]
    assert (lax.code, strict.code) == (0, 1)
    assert "1 degraded" in lax.out and "ROUNDED WORSE" in lax.out and "EQUAL" not in lax.out
    assert cli("run", config, "--strict").code == 0


def test_a_kernel_named_in_the_config_is_found_beside_it(cli: Command):
    Path("deep").mkdir()
    Path("deep/mine.py").write_text(WRONG.read_text())
    write(ONE.replace("mask: causal", 'mask: causal, kernel: [eager, "mine.py:zeros"]'), "deep/c.yaml")
    assert cli("run", "deep/c.yaml").code == 1
    assert list(table()["status"]) == ["ok", "mismatch"]


@pytest.mark.parametrize(
    ("source", "kernel", "told"),
    [
        ("import nowhere_at_all", "bad.py:f", ["bad.py", "importing it raised ModuleNotFoundError", "nowhere_at_all"]),
        ("def f(:\n", "bad.py:f", ["bad.py", "SyntaxError"]),
        ("raise SystemExit(0)", "bad.py:f", ["bad.py", "SystemExit"]),
        ("def g(): ...\nf = 3", "bad.py:f", ["bad.py:f", "no function 'f'", "callables there: g"]),
        ("", "bad.py:f", ["bad.py:f", "callables there: none"]),
        ("", "absent.py:f", ["absent.py", "--kernel"]),
        ("", "no_such_package.module:f", ["no_such_package.module", "ModuleNotFoundError"]),
        ("", "egaer", ["--kernel", "'egaer'", "unknown kernel", "did you mean 'eager'?", "sdpa"]),
        ("", "bad.py", ["--kernel", "which function of it? 'bad.py:NAME'"]),
        ("", "bad.py:not a name", ["--kernel", "not the name of a function"]),
    ],
)
def test_a_kernel_that_cannot_be_loaded_is_bad_input(cli: Command, source: str, kernel: str, told: list[str]):
    Path("bad.py").write_text(source)
    result = cli("run", write(ONE), "--kernel", kernel)
    assert result.code == 2
    assert result.out == ""
    for word in told:
        assert word in result.err, (word, result.err)
    assert "Traceback" not in result.err
    assert not Path("results").exists()


# Bad input

GRID = "name: x\ngrid:\n  variant: [mha]\n  embed_dim: 64\n  heads:\n    - 4\n  seq_len: [16]\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param(GRID + "gird: 1\n", ["c.yaml:8", "gird", "1", "unknown key", "'grid'"], id="unknown key"),
        pytest.param(GRID + "  head: 1\n", ["c.yaml:8", "grid.head", "unknown key", "'heads'"], id="unknown axis"),
        pytest.param(GRID.replace("64", "'64'"), ["c.yaml:4", "grid.embed_dim", "'64'", "whole number"], id="type"),
        pytest.param(GRID.replace("64", "8.0"), ["c.yaml:4", "embed_dim", "8.0", "whole number"], id="float"),
        pytest.param(GRID.replace("- 4", "- true"), ["c.yaml:6", "grid.heads", "true", "whole number"], id="bool"),
        pytest.param(GRID.replace("- 4", "- -4"), ["c.yaml:6", "grid.heads", "-4", "positive"], id="negative"),
        pytest.param(GRID + "name: y\n", ["c.yaml:8", "name", "duplicate", "line 1"], id="duplicate key"),
        pytest.param(GRID.replace("mha", "mah"), ["c.yaml:3", "variant", "'mah'", "gqa, ", "mla"], id="variant"),
        pytest.param(GRID + "  mask: casual\n", ["c.yaml:8", "grid.mask", "'casual'", "'causal'", "alibi"], id="mask"),
        pytest.param(
            GRID + "  kernel: fast\n", ["c.yaml:8", "kernel", "'fast'", "known: auto, compiled, ", "sdpa"], id="kernel"
        ),
        pytest.param(GRID + "  phase: eval\n", ["c.yaml:8", "phase", "'eval'", "prefill, decode, train"], id="phase"),
        pytest.param(GRID + "  dtype: int8\n", ["c.yaml:8", "dtype", "'int8'", "float64, float32"], id="dtype"),
        pytest.param(GRID.replace("- 4", "- 5"), ["c.yaml:6", "heads", "5", "divide embed_dim (64)"], id="heads"),
        pytest.param(
            GRID.replace("mha", "gqa") + "  kv_heads: [2, 3]\n",
            ["c.yaml:8", "grid.kv_heads", "3", "must divide heads (4)"],
            id="kv_heads",
        ),
        pytest.param(GRID.replace("mha", "gqa"), ["c.yaml:", "kv_heads", "gqa needs"], id="no kv_heads"),
        pytest.param("name: x\ngrid: {}\n", ["c.yaml:2", "grid.variant", "required key is missing"], id="empty grid"),
        pytest.param("name: x\ngrid:\n", ["c.yaml:2", "grid", "mapping of axes"], id="null grid"),
        pytest.param("name: x\n", ["c.yaml", "grid", "required key is missing"], id="no grid"),
        pytest.param(GRID.replace("[mha]", "[]"), ["c.yaml:3", "grid.variant", "empty list"], id="empty axis"),
        pytest.param(
            GRID + "exclude:\n- {variant: mha}\n", ["c.yaml:", "exclude", "nothing is left to run"], id="all excluded"
        ),
        pytest.param("", ["c.yaml", "is empty"], id="empty file"),
        pytest.param("- 1\n", ["c.yaml", "mapping"], id="a list"),
        pytest.param(GRID.encode() + b"# \xff\n", ["c.yaml:8", "UTF-8"], id="not UTF-8"),
        pytest.param(GRID + "seed: !!python/object:os.system x\n", ["c.yaml:8", "seed", "tag"], id="python tag"),
        pytest.param(GRID + "seed: !own 3\n", ["c.yaml:8", "seed", "tag"], id="own tag"),
        pytest.param(GRID + "seed: [1\n", ["c.yaml:"], id="no YAML"),
        pytest.param(GRID + "timing: {budget_s: -1}\n", ["c.yaml:8", "timing.budget_s", "-1", "seconds"], id="budget"),
        pytest.param(GRID + "regimes: [hard]\n", ["c.yaml:8", "regimes", "'hard'", "plain, peaked"], id="regime"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=["run", "dry-run"])
def test_bad_input_is_one_message_and_exit_2(cli: Command, text: str | bytes, told: list[str], options: list[str]):
    result = cli("run", write(text), *options)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("harness: c.yaml")
    for word in told:
        assert word in result.err, (word, result.err)
    assert "Traceback" not in result.err
    assert "pydantic" not in result.err
    assert all(line.removeprefix("harness: ").startswith("c.yaml") for line in result.err.splitlines())
    assert not Path("results").exists()


@pytest.mark.parametrize("place", ["absent.yaml", ".", "absent/c.yaml"])
def test_a_config_that_cannot_be_read(cli: Command, place: str):
    result = cli("run", place)
    assert result.code == 2
    assert result.err.startswith(f"harness: {place}")
    assert result.err.count("\n") == 1
    assert not Path("results").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["run"],
        ["run", "c.yaml", "--fly"],
        *(["run", "c.yaml", "--shard", shard] for shard in ("0/2", "3/2", "a/b", "2", "1/0", "-1/2", "1/2/3", "")),
    ],
    ids=" ".join,
)
def test_a_bad_command_line_is_exit_2(cli: Command, arguments: list[str]):
    write(ONE)
    result = cli(*arguments)
    assert result.code == 2
    assert result.err.startswith("usage: harness")
    assert result.out == ""
    assert not Path("results").exists()


# Plans and shards


def planned(out: str) -> list[str]:
    return [line.strip() for line in out.splitlines() if line.startswith("  ") and not line.startswith("  ...")]


def test_a_dry_run_says_what_would_run_and_runs_nothing(cli: Command):
    Path("mine.py").write_text("open('trace', 'w').close()\ndef f(*a, **k): ...\n")
    result = cli("run", write(SABOTAGE), "--dry-run", "--kernel", "mine.py:f")
    assert result.code == 0
    assert result.out.startswith("tiny: 30 cells would run\n")
    assert "mla_absorbed (6)" in result.out
    assert "mine.py:f (30)" in result.out
    assert "... and 20 more (--verbose lists all)" in result.out
    assert len(planned(result.out)) == 10
    assert sorted(path.name for path in Path().iterdir()) == ["c.yaml", "mine.py"]  # not even the kernel's file ran


def test_shards_partition_the_grid_exactly(cli: Command):
    config = write(SABOTAGE)
    whole = planned(cli("run", config, "--dry-run", "--verbose").out)
    assert len(whole) == len(set(whole)) == 30
    for count in (1, 4, 7, 30):
        shards = [
            planned(cli("run", config, "--dry-run", "--verbose", "--shard", f"{at}/{count}").out)
            for at in range(1, count + 1)
        ]
        assert sorted(case for shard in shards for case in shard) == sorted(whole)
        assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_sharded_run_gives_the_same_numbers_as_a_whole_one(cli: Command):
    config = write(ONE.replace("variant: mha", "variant: [mha, mqa], batch: [1, 2]"))
    cli("run", config, "--out", "whole")
    for at in (1, 2):
        assert cli("run", config, "--out", f"part{at}", "--shard", f"{at}/2").code == 0
    parts = pd.concat([table("part1"), table("part2")]).sort_values("case_id", ignore_index=True)
    whole = table("whole").sort_values("case_id", ignore_index=True)
    assert len(whole) == 4
    pd.testing.assert_frame_equal(parts, whole)


# Listing and help


def test_list_names_everything_there_is(cli: Command):
    result = cli("list")
    assert result.code == 0
    for name in (*VARIANTS, *MASKS, *kernel_names(), *PHASES, *DTYPES, *REGIMES, "FILE.py:FUNCTION"):
        assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", result.out), name


def test_help_explains_commands_and_exit_codes(cli: Command):
    result = cli("--help")
    assert result.code == 0
    for word in (
        "run",
        "merge",
        "gate",
        "report",
        "list",
        "exit codes:",
        "0 all equal",
        "1 a mismatch",
        "2 bad input",
        "143",
    ):
        assert word in result.out
    run = cli("run", "--help")
    for word in ("--out", "--kernel", "--shard", "--strict", "--dry-run", "--quiet", "--verbose", "--resume", "--retry",
                 "--even-if-changed", "--executor", "--jobs"):  # fmt: skip
        assert word in run.out


HEAVY = ("torch", "pandas", "numpy", "pydantic", "yaml", "rich", "scipy", "pyarrow")
PROBE = """\
import sys
from harness.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("loaded:", *(name for name in {heavy} if name in sys.modules))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["run"]], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]):
    result = python("-c", PROBE.format(heavy=HEAVY), *arguments)
    assert result.out.splitlines()[-1] == "loaded:", result


def test_plans_and_reports_never_import_torch(cli: Command):
    config = write(ONE)
    assert cli("run", config, "--out", "done").code == 0
    assert cli("gate", "done", "--accept").code == 0
    probe = PROBE.format(heavy=("torch",)).replace("main(sys.argv[1:])", "[main(a.split()) for a in sys.argv[1:]]")
    result = python("-c", probe, "list", "run c.yaml --dry-run", "report done", "gate done")
    assert result.out.splitlines()[-1] == "loaded:", result
    assert "gate tiny: PASS" in result.out


# Report and gate


def test_report_rebuilds_what_was_derived(cli: Command):
    cli("run", write(ONE), "--out", "done")
    derived = ("results.csv", "results.parquet", "summary.md")
    before = {name: (Path("done") / name).read_bytes() for name in derived[:2]}
    for name in derived:
        (Path("done") / name).unlink()
    result = cli("report", "done")
    assert result.code == 0
    assert result.out.startswith("EQUAL  1 cell: 1 ok")
    assert {name: (Path("done") / name).read_bytes() for name in before} == before
    assert (Path("done") / "summary.md").exists()
    nothing = cli("report", "nowhere")
    assert nothing.code == 2
    assert "nowhere is not a run's folder" in nothing.err


def test_a_run_passes_the_gate_that_accepted_it_and_fails_a_tampered_one(cli: Command):
    cli("run", write(ONE.replace("variant: mha", "variant: [mha, mqa]")))
    missing = cli("gate")
    assert missing.code == 2
    assert "harness gate --accept" in missing.err
    accepted = cli("gate", "--accept")
    assert accepted.code == 0
    assert "2 cells" in accepted.out
    assert "2 new" in accepted.out
    passed = cli("gate")
    assert passed.code == 0
    assert passed.out.startswith("gate tiny: PASS")
    baseline = Path("results/baseline/tiny.csv")
    honest = baseline.read_text()
    frame = table()
    params = int(frame["params"].iloc[0])
    assert f",{params}," in honest
    baseline.write_text(honest.replace(f",{params},", f",{params - 1},"))
    failed = cli("gate")
    assert failed.code == 1
    assert failed.out.startswith("gate tiny: FAIL")
    assert f"params: {params - 1} -> {params}" in failed.out
    assert frame["case_id"].iloc[0] in failed.out
    assert cli("gate", "--quiet") == Result(1, "", "")
    baseline.write_text("".join(honest.splitlines(keepends=True)[:-1]))
    edited = cli("gate")  # a new cell that is ok would be a note
    assert edited.code == 1
    assert "tiny.csv is not what was accepted" in edited.out
    baseline.write_text(honest + honest.splitlines()[-1].replace("mqa", "gqa") + "\n")
    assert "removed or renamed" in (gone := cli("gate")).out
    assert gone.code == 1
    baseline.write_text("case_id\n")
    assert cli("gate").code == 2


def test_a_run_that_got_worse_fails_the_gate(cli: Command):
    Path("mine.py").write_text(WRONG.read_text())
    write(ONE.replace("mask: causal", 'mask: causal, kernel: "mine.py:plain"'))
    assert cli("run", "c.yaml").code == 0
    assert cli("gate", "--accept").code == 0
    Path("mine.py").write_text(WRONG.read_text() + "\n\nplain = scale_off\n")
    assert cli("run", "c.yaml").code == 1
    result = cli("gate")
    assert result.code == 1
    assert "status: ok -> mismatch" in result.out


# Processes of their own


def test_python_m_harness_from_end_to_end():
    Path("mine.py").write_text(WRONG.read_text())
    write(ONE)
    good = python("-m", "harness", "run", "c.yaml", "--kernel", "mine.py:textbook")
    assert good.code == 0, good
    assert good.out.startswith("EQUAL  1 cell: 1 ok")
    assert good.err == ""
    assert list(table()["kernel"]) == ["mine.py:textbook"]
    bad = python("-m", "harness", "run", "c.yaml", "--kernel", "mine.py:causal_off_by_one")
    assert bad.code == 1, bad
    assert bad.out.startswith("NOT EQUAL  1 cell: 1 mismatch")
    broken = python("-m", "harness", "run", "c.yaml", "--shard", "0/1")
    assert broken.code == 2


def test_the_console_script_is_the_same_command():
    script = Path(sys.executable).with_name("harness")
    done = subprocess.run([script, "run", "absent.yaml"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("harness: absent.yaml")


def with_no_reader(*arguments: str) -> Result:
    """The command with its standard output closed at the other end, as by `| head`."""
    command = [sys.executable, "-m", "harness", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, env=environment)
    finally:
        os.close(writer)
    return Result(done.returncode, "", done.stderr)


def test_a_reader_that_leaves_early_changes_no_exit_code():
    assert with_no_reader("list") == Result(0, "", "")
    write(ONE)
    assert with_no_reader("run", "c.yaml", "--kernel", f"{WRONG}:zeros") == Result(1, "", "")
    assert list(table()["status"]) == ["mismatch"]


def test_an_interrupt_says_how_to_go_on_and_that_works(cli: Command, monkeypatch: pytest.MonkeyPatch):
    from harness.cell import measure

    monkeypatch.setattr(store, "code_sha256", lambda: "c0de")
    honest = measure.measure
    measured: list[int] = []

    def interrupted(*args: Any, **options: Any) -> Any:
        if measured:
            raise KeyboardInterrupt
        measured.append(1)
        return honest(*args, **options)

    monkeypatch.setattr(measure, "measure", interrupted)
    config = write(ONE.replace("variant: mha", "variant: [mha, mqa]"))
    result = cli("run", config)
    assert result.code == 130
    folder = Path("results") / Path("results/latest").readlink()
    before, _, hint = result.err.strip().partition("; go on with: ")
    assert before == "harness: interrupted after 1 of 2 cells"
    assert hint.endswith(f"run c.yaml --executor here --resume --out {folder}")
    assert len((folder / "records.jsonl").read_text().splitlines()) == 1
    assert len(table(folder)) == 1
    monkeypatch.setattr(measure, "measure", honest)
    words = shlex.split(hint)
    resumed = cli(*words[words.index("run") :])
    assert resumed.code == 0, resumed
    assert resumed.out.startswith("EQUAL  2 cells: 2 ok")
    cli("run", config, "--out", "whole")
    pd.testing.assert_frame_equal(table(folder), table("whole"))


def test_a_run_in_workers_is_the_default_and_gives_the_same_table(cli: Command):
    write(ONE.replace("variant: mha", "variant: [mha, mqa]"))
    workers = python("-m", "harness", "run", "c.yaml", "--out", "workers")
    assert workers.code == 0, workers
    assert cli("run", "c.yaml", "--out", "here").code == 0
    pd.testing.assert_frame_equal(table("workers"), table("here"))


@pytest.mark.parametrize("arguments", [["--retry"], ["--even-if-changed"], ["--resume"], ["--jobs", "2"]], ids=" ".join)
def test_options_that_do_not_fit_are_bad_input(cli: Command, arguments: list[str]):
    result = cli("run", write(ONE), *arguments)
    assert result.code == 2
    assert result.err.startswith("harness: ")
    assert result.err.count("\n") == 1
    assert not Path("results").exists()


def test_explain_says_what_would_be_taken_and_runs_nothing(cli: Command):
    axes = "variant: [mha, mla], embed_dim: 64, heads: 4, seq_len: 16, phase: decode, kernel: [auto, tiled]"
    Path("c.yaml").write_text(f"name: x\ngrid: {{{axes}}}\n")
    result = cli("run", "c.yaml", "--explain")
    assert result.code == 0 and not Path("results").exists()
    assert "kernel eager: 1 rows over 16 keys" in result.out and "kernel tiled, as the config says" in result.out
    assert "absorbed: absorbed" in result.out and "FLOPs + 8 x bytes" in result.out
