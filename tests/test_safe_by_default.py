"""What somebody sent, or a kernel said, reaches nothing that it should not: each test is an attack that once worked."""

import logging
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from harness import store
from harness.candidate.child import Gauge
from harness.errors import BadInput, StoreError
from harness.gate.baseline import read_gated_run
from harness.store.files import LOCK, Lock
from harness.text import configure, harmless_lines
from harness.yaml_lines import YamlError, parse
from tests.support import ROOT, called
from tests.support.records import folder, record

EVIL = "first\n::error file=a.py::all is lost\r\x1b[2J\n##[group]x"
GOOD = """\
import torch.nn.functional as F


def f(q, k, v, **options):
    {}
    return F.scaled_dot_product_attention(q, k, v, **options)
"""


# ---- a folder that somebody sent -------------------------------------------------------------------------------------


def test_the_gate_runs_no_kernel_that_records_name_unless_it_is_told_to(tmp_path: Path, capsys, monkeypatch) -> None:
    proof = tmp_path / "proof"
    kernel = tmp_path / "theirs.py"
    kernel.write_text(f"open({str(proof)!r}, 'w').close()\n" + GOOD.format("pass"))
    sent = folder(tmp_path / "sent", record("a", kernel=f"{kernel}:f"), record("b"))
    store_baseline = tmp_path / "baseline"
    assert called(capsys, "gate", sent, "--baseline", store_baseline, "--accept").code == 0
    base = ("gate", sent, "--baseline", store_baseline, "--base-dir", ROOT)
    refused = called(capsys, *base)
    assert refused.code == 2
    assert f"its records name code to be run: {kernel}:f" in refused.err and "--trust-kernels" in refused.err
    assert not proof.exists()
    # Told to, or asked for what is no code of theirs, it goes on to timing: here as far as the number of cells.
    monkeypatch.setattr("harness.gate.timing.judge_times", lambda *args, **options: ())
    assert called(capsys, *base, "--trust-kernels").code == 0
    assert called(capsys, *base, "--kernel", "eager").code == 0


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_that_is_a_link_overwrites_nothing(link: Callable[[Path, Path], None], tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    (tmp_path / "run").mkdir()
    link(precious, tmp_path / "run" / LOCK)
    with pytest.raises(StoreError, match=r"run\.lock is .*remove it"):
        Lock(tmp_path / "run")
    assert precious.read_text() == "years of work"


@pytest.mark.parametrize("name", [store.RECORDS, store.MANIFEST, store.CONFIG, store.ENVIRONMENT])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_file_is_refused_at_once(name: str, kind: str, tmp_path: Path) -> None:
    sent = folder(tmp_path / "sent", record("a"))
    (sent / name).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(sent / name)
    else:
        (sent / name).symlink_to("/dev/zero")
    with pytest.raises(BadInput, match=f"{name} is not a regular file"):
        read_gated_run(sent)


def test_a_config_of_a_folder_is_no_bomb(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    sent = folder(tmp_path / "sent", record("a"), config="\n".join(["name: smoke", *lines]))
    with pytest.raises(BadInput, match="holds more than"):
        read_gated_run(sent)


# ---- what a kernel says ----------------------------------------------------------------------------------------------


def no_command(text: str) -> bool:
    lines = [line.lstrip() for line in text.split("\n")]
    return not any(line.startswith(("::", "##[")) for line in lines) and not {"\x1b", "\r"} & set(text)


def test_a_kernels_message_is_no_command_of_a_ci_log(tmp_path: Path, capsys, monkeypatch) -> None:
    assert not no_command(EVIL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(f"raise ValueError({EVIL!r})\n")
    refused = called(capsys, "judge", "broken.py:f")
    assert refused.code == 2 and "all is lost" in refused.err and no_command(refused.err)
    raising = GOOD.format(f"raise ValueError({EVIL!r})")
    (tmp_path / "raises.py").write_text(raising)
    config = "name: x\nbattery: {enabled: false}\ntiming: {enabled: false}\nregimes: plain\n"
    (tmp_path / "x.yaml").write_text(config + "grid: {variant: mha, embed_dim: 8, heads: 2, seq_len: 3}\n")
    ran = called(capsys, "run", "x.yaml", "--kernel", "raises.py:f", "--out", "out", "--verbose")
    assert ran.code == 1 and "all is lost" in ran.out + ran.err and no_command(ran.out) and no_command(ran.err)
    for words in (["show", "out"], ["report", "out", "--format", "md"], ["compare", "out", "out", "--all"]):
        said = called(capsys, *words)
        assert no_command(said.out) and no_command(said.err), words
    csv = (tmp_path / "out" / "results.csv").read_text()
    assert "all is lost" in csv and len(csv.splitlines()) == 2 and no_command(csv)
    (stored,) = store.read_records(tmp_path / "out")
    assert stored.error is not None and EVIL in stored.error  # the truth is kept


def test_what_is_said_in_several_lines_stays_so_and_harmless() -> None:
    assert harmless_lines("two\nlines") == "two\nlines"
    assert harmless_lines("x\n  ::add-mask::y") == "x\n|   ::add-mask::y"
    assert no_command(harmless_lines(EVIL))


def test_a_log_line_is_one_line(capsys) -> None:
    configure(verbose=True)
    logging.getLogger("harness.test").warning("it said %s", EVIL)
    configure()
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and no_command(said)


@pytest.mark.parametrize("text", ["=HYPERLINK(1)", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_cell_of_a_table_is_a_formula(text: str, tmp_path: Path) -> None:
    frame = store.write_tables(tmp_path, [record("a", error=text, err_ratio=-0.5)])
    assert frame["error"][0] == text  # only the file for spreadsheets is changed
    line = (tmp_path / store.CSV).read_text().splitlines()[1]
    assert not any(cell.lstrip('"').startswith(("=", "+", "@", "\t", "\r")) for cell in line.split(","))
    read = pd.read_csv(tmp_path / store.CSV)
    assert read["err_ratio"][0] == -0.5
    assert str(read["error"][0])[0] in "'\\"


# ---- numbers, memory, make -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"), [("017", 15), ("-010", -8), ("12:30:45", 45045), ("1:30", 90), ("1:30.5", 90.5), ("0_7", 7)]
)
def test_numbers_that_yaml_1_1_reads_otherwise_are_refused_with_the_rule(text: str, value: float) -> None:
    with pytest.raises(YamlError, match=rf"{text} would be the number {value} in YAML 1.1.*write {value}, or quotes"):
        parse(f"seed: {text}")
    assert parse(f"seed: '{text}'").plain() == {"seed": text}


def test_plain_numbers_are_still_numbers() -> None:
    assert parse("[0, 7, -3, 0x10, 1.5, 10:99, 0.5]").plain() == [0, 7, -3, 16, 1.5, "10:99", 0.5]


def test_what_forked_workers_share_is_counted_once() -> None:
    megabytes, workers = 400, 3
    context = multiprocessing.get_context("fork")
    channel, theirs = context.Pipe()

    def read(data: bytes) -> None:
        sum(data[::4096])
        theirs.send("read")
        theirs.recv()

    def hold() -> None:
        data = os.urandom(1 << 20) * megabytes
        children = [context.Process(target=read, args=(data,)) for _ in range(workers)]
        for child in children:
            child.start()
        for child in children:
            child.join()

    parent = context.Process(target=hold)
    parent.start()
    try:
        for _ in range(workers):
            assert channel.recv() == "read"
        assert parent.pid is not None
        gauge = Gauge(parent.pid)
        gauge.look()
        apart = gauge.read(limit=1 << 50)
        assert apart > (workers + 1) * megabytes << 20  # each by itself, as far as nobody asks
        assert gauge.read(limit=1) < apart - (
            (workers - 1) * megabytes << 20
        )  # what these tests have loaded is in both
    finally:
        for _ in range(workers):
            channel.send("end")
        parent.join()


def test_make_nightly_gates_the_run_that_it_was_told_to_write(tmp_path: Path) -> None:
    """With a `harness` that only says what it was asked for."""
    program = tmp_path / ".venv" / "bin" / "harness"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "harness $*"\n')
    program.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    words = ["make", "-o", ".venv/.installed", "nightly"]

    def asked(*more: str) -> list[str]:
        done = subprocess.run([*words, *more], cwd=tmp_path, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if line.startswith("harness gate")]

    assert asked() == ["harness gate results/latest"]
    assert asked("ARGS=--out 'my run' --quiet") == ["harness gate my run"]
    assert asked("ARGS=--quiet --out=here") == ["harness gate here"]


@pytest.mark.parametrize("form", ["png", "svg", "html"])
def test_a_picture_without_its_extra_gives_the_hint(form: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("harness.report.page.build.find_spec", lambda name: None)
    run = folder(tmp_path / "run", record("a"))
    refused = called(capsys, "report", run, "--format", form, "--out", tmp_path / f"x.{form}")
    assert refused.code == 2
    assert refused.err.endswith("pip install 'attention-harness[report]'\n") and "altair" in refused.err
