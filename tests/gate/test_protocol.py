"""What passes between two versions of the gate: the messages themselves, and versions that speak otherwise."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest

from harness.__main__ import main
from harness.case import Case
from harness.gate import sampling
from harness.gate.findings import TimingSettings
from harness.gate.process import Process, ProtocolError, Refused
from harness.gate.sampling import Sampler, VersionProcesses
from harness.gate.timing import judge_times
from harness.gate.versions import Version, folder_version
from harness.gate.worker import PROTOCOL, answer_hello
from tests.gate.test_gate_base import PACKAGES
from tests.support import ROOT, git

CASE = Case("gqa", "eager", 32, 4, 2, 8, 24, 1, "none", "float32", "prefill")
HELLO = '{"protocol":1,"threads":1,"allowed":1099511627776,"path":["/packages"]}'
# A new field of Case goes in here with null, which an older worker leaves out; whatever else changes is a new number.
BUILD = (
    '{"do":"build","cell":{"fields":{"variant":"gqa","kernel":"eager","embed_dim":32,"heads":4,"kv_heads":2,'
    '"head_dim":8,"seq_len":24,"batch":1,"mask":"none","dtype":"float32","phase":"prefill","bias":true,'
    '"q_lora_rank":null,"kv_lora_rank":null,"rope_head_dim":null,"v_head_dim":null},"seed":5,"shift":SHIFT}}'
)
TIME = '{"do":"time","sample":{"side":"candidate","calls":3,"warm":1}}'


def frame(text: str) -> bytes:
    return len(text.encode()).to_bytes(8, "big") + text.encode()


def tree_with_worker(where: Path, script: str | None) -> Version:
    """A version that has this script as its worker, or none."""
    (where / "harness" / "gate").mkdir(parents=True)
    (where / "harness" / "__init__.py").write_text("")
    if script is not None:
        (where / "harness" / "gate" / "worker.py").write_text(textwrap.dedent(script))
    return folder_version(where)


# A worker of any version reads a length and JSON. This one keeps what it read, and gives the answers it was made with.
FAKE = """\
    import json, os, sys
    root, requests, answers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for answer in {answers!r}:
        size = os.read(requests, 8)
        message = os.read(requests, int.from_bytes(size, "big"))
        with open(os.path.join(root, "heard"), "ab") as file:
            file.write(message + b"\\n")
        os.write(answers, len(answer.encode()).to_bytes(8, "big") + answer.encode())
    os.read(requests, 1)
"""


def fake_version(where: Path, *answers: str) -> Version:
    return tree_with_worker(where, FAKE.format(answers=answers))


def test_the_number() -> None:
    """Raise it with any change of the messages below but a new field of Case, and say so in worker.py's docstring."""
    assert PROTOCOL == 1


# ---- the messages, to the letter -------------------------------------------------------------------------------------


def test_what_a_version_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = fake_version(tmp_path, '{"ready":7,"protocol":1}', '{"built":true}', '{"seconds":0.25}')
    monkeypatch.setattr(sys, "path", ["/packages", str(tmp_path)])
    monkeypatch.setattr(sampling, "PROCESSES", 1)
    settings = TimingSettings(suite_seed=5, max_memory=1 << 40)
    with contextlib.closing(VersionProcesses(version, version, settings)) as processes:
        sampler = Sampler(processes, CASE, settings, chance=Random(3))
        sampler.build(("base", 0))
        answer = sampler._sample(("base", 0), "candidate", sampling.Plan(calls=3, warm=1, blocks=0))
        assert answer == 0.25
    # The other process is the head's, which has been greeted and no more.
    heard = (tmp_path / "heard").read_text().splitlines()
    shift = Random(3).randrange(1 << 32)
    assert sorted(heard) == sorted([HELLO, HELLO, BUILD.replace("SHIFT", str(shift)), TIME])


class Worker:
    """The real worker of this tree, by its pipes alone."""

    def __init__(self) -> None:
        requests, self.requests = os.pipe()
        self.answers, answers = os.pipe()
        script = ROOT / "harness" / "gate" / "worker.py"
        words = [sys.executable, "-P", str(script), str(ROOT), str(requests), str(answers), str(os.getpid())]
        self.process = subprocess.Popen(words, pass_fds=(requests, answers))
        os.close(requests)
        os.close(answers)

    def say(self, text: str) -> str:
        os.write(self.requests, frame(text))
        header = os.read(self.answers, 8)
        answer = os.read(self.answers, int.from_bytes(header, "big")).decode()
        assert frame(answer)[:8] == header
        return answer

    def end(self) -> None:
        os.close(self.requests)
        assert self.process.wait(30) == 0  # its parent is gone
        os.close(self.answers)


def test_what_this_version_answers() -> None:
    worker = Worker()
    hello = HELLO.replace('["/packages"]', json.dumps(PACKAGES))
    build = BUILD.replace("SHIFT", "7")
    assert worker.say(hello) == f'{{"ready":{worker.process.pid},"protocol":1}}'
    assert worker.say(TIME) == '{"refused":"AssertionError: nothing is built"}'
    assert worker.say(build) == '{"built":true}'
    for side in ("candidate", "reference"):
        seconds = re.fullmatch(r'\{"seconds":([0-9.e-]+)\}', worker.say(TIME.replace("candidate", side)))
        assert seconds is not None and 0 < float(seconds[1]) < 60
    # A field that this version does not know: nothing is no obstacle, something is.
    assert worker.say(build.replace('"bias"', '"axis":null,"bias"')) == '{"built":true}'
    assert worker.say(build.replace('"bias"', '"axis":3,"bias"')) == '{"refused":"LookupError: its cells have no axis"}'
    assert worker.say(build.replace('"eager"', '"nosuch"')).startswith('{"refused":"')
    worker.end()


def test_the_pinned_case_has_all_fields_of_a_case() -> None:
    fields = json.loads(BUILD.replace("SHIFT", "0"))["cell"]["fields"]
    assert fields == asdict(CASE) and list(fields) == list(asdict(CASE))


def test_a_hello_of_another_protocol_is_answered_by_the_own_number() -> None:
    """Nothing else of it is read: a later hello may be of another shape."""
    why = "LookupError: timing protocol {}, where this version speaks 1"
    assert answer_hello(ROOT, {"protocol": 2}) == {"refused": why.format(2), "protocol": 1}
    assert answer_hello(ROOT, {"threads": 1}) == {"refused": why.format(None), "protocol": 1}


# ---- versions that speak otherwise -----------------------------------------------------------------------------------

REMEDY = "name a later commit with --base REV, or accept a baseline of this version (harness gate DIR --accept)"
NONE = f"base speaks no timing protocol; this version speaks 1: {REMEDY}"
NEWER = f"base speaks timing protocol 2; this version speaks 1: {REMEDY}"


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        ((), NONE),  # has no worker at all
        (('{"ready": 4711}',), NONE),  # as those before there was a number
        (('{"refused": "ImportError: too old, or broken: no module harness.cell"}',), NONE),
        (('{"ready": 4711, "protocol": 2}',), NEWER),
        (('{"refused": "LookupError: your number", "protocol": 2, "more": []}',), NEWER),
    ],
)
def test_a_base_that_speaks_otherwise_is_told_in_one_line(
    answers: tuple[str, ...],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if answers:
        fake_version(tmp_path / "base", *answers)
    else:
        tree_with_worker(tmp_path / "base", None)
    config = tmp_path / "tiny.yaml"
    config.write_text("name: tiny\nthreads: 1\ngrid: {variant: [mha], embed_dim: 16, heads: 2, seq_len: 4}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["gate", "--base-dir", "base", "--timing-only", str(config), "--quiet"]) == 2
    assert capsys.readouterr().err.splitlines() == [f"harness: {line}"]


def test_no_process_of_a_version_that_speaks_otherwise_is_left(tmp_path: Path) -> None:
    import psutil

    other = fake_version(tmp_path, '{"ready":1}')
    with pytest.raises(ProtocolError, match="speaks no timing protocol"):
        judge_times(other, other, [CASE], TimingSettings())
    alive = psutil.process_iter(["cmdline", "status"])  # None of what ends meanwhile
    assert not [each for each in alive if str(tmp_path) in (each.info["cmdline"] or ())]


def test_a_version_of_this_protocol_that_cannot_start_says_why(tmp_path: Path) -> None:
    version = fake_version(tmp_path, '{"refused":"ImportError: no torch","protocol":1}')
    process = Process(version, threads=1, allowed=None, path=PACKAGES)
    try:
        with pytest.raises(Refused, match="ImportError: no torch"):
            process.greet()
    finally:
        process.kill()


# ---- two real commits ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_commits_are_timed_though_files_were_moved_between_them(tmp_path: Path) -> None:
    """Each runs its own worker, which knows where the files of its own tree lie."""
    tree = tmp_path / "repository"
    shutil.copytree(ROOT / "harness", tree / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    few = tree / "harness" / "gate" / "sampling.py"
    few.write_text(re.sub(r"^PROCESSES = 3", "PROCESSES = 2", few.read_text(), flags=re.MULTILINE))  # each takes 3 s
    git(tmp_path, "init", "-q", "-b", "main", str(tree))
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "as it is")
    (tree / "harness" / "cell" / "measure.py").rename(tree / "harness" / "cell" / "moved.py")
    (tree / "harness" / "candidate" / "channel.py").rename(tree / "harness" / "workers" / "moved.py")
    for path in (tree / "harness").rglob("*.py"):
        text = path.read_text()
        changed = text.replace("harness.cell.measure", "harness.cell.moved")
        changed = changed.replace("harness.candidate.channel", "harness.workers.moved")
        if changed != text:
            path.write_text(changed)
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "moved")
    config = tree / "tiny.yaml"
    config.write_text("name: tiny\nthreads: 1\ngrid: {variant: [mha], embed_dim: 16, heads: 2, seq_len: 4}\n")
    words = ["gate", "--base", "HEAD~1", "--timing-only", str(config), "--seconds", "1", "--seed", "1"]
    done = subprocess.run([sys.executable, "-m", "harness", *words], cwd=tree, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # which of them, the machine decides
    told = done.stdout + done.stderr
    assert "cannot" not in told and "died" not in told and "speaks" not in told, told
    assert re.search(r"timing: \w+", done.stdout), told
