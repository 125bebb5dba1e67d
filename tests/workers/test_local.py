"""Worker processes: each failure is one row with its reason, all others are measured, nothing outlives the parent."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness import store
from harness.candidate.channel import BrokenMessage, Inbox, pack
from harness.case import Case
from harness.errors import BadInput
from harness.record import Record
from harness.suite.schema import Limits, Timing
from harness.workers.crew import CannotStart, Outcome, Task
from harness.workers.interrupts import Interrupts
from harness.workers.job import Here, Job, decode_job, failed
from harness.workers.local import Local, read_record
from harness.workers.local import _settle as settle
from harness.workers.process import allowed_bytes
from tests import hostile_kernels
from tests.support import ROOT

FILE = str(Path(ROOT / "tests" / "hostile_kernels.py"))
GIB = 1 << 30
OFF = Timing(enabled=False)
TIMES = ("seconds", "measured_seconds", "parts_s")


def job(kernel: str, *, variant: str = "mha", seq_len: int = 4, mask: str = "causal", phase: str = "prefill") -> Job:
    name = f"{FILE}:{kernel}" if hasattr(hostile_kernels, kernel) else kernel
    case = Case(
        variant=variant,
        kernel=name,
        embed_dim=8,
        heads=2,
        kv_heads=1 if variant == "mqa" else 2,
        head_dim=4,
        seq_len=seq_len,
        batch=1,
        mask=mask,
        dtype="float32",
        phase=phase,
    )
    return Job(case, seed=3, regimes=("plain",), timing=OFF, threads=1)


def measured(executor: Any, *kernels: str) -> dict[str, Record]:
    records = list(executor.run([job(kernel) for kernel in kernels]))
    assert len(records) == len(kernels)
    return {record.kernel.rpartition(":")[2]: record for record in records}


@pytest.fixture(autouse=True)
def _steady_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "code_sha256", lambda: "c0de")  # someone may be editing it


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    """One for all tests that lose no worker, or only one: a start takes seconds."""
    executor = Local(limits=Limits(timeout_s=60, max_memory=GIB))
    yield executor
    executor.close()


def pids(executor: Local) -> list[int]:
    return [worker.pid for worker in executor._crew.workers()]


def gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


# Failures


@pytest.mark.slow
def test_a_grid_with_hostile_kernels_measures_every_other_cell():
    names = ["good", "segfaults", "also_good", "hangs_in_c", "raises", "takes_100_gib", "leaves_at_once", "eager"]
    executor = Local(2, Limits(timeout_s=4, max_memory=GIB))
    found = measured(executor, *names)
    executor.close()
    statuses = {name: record.status for name, record in found.items()}
    assert statuses == {
        "good": "ok",
        "segfaults": "error",
        "also_good": "ok",
        "hangs_in_c": "timeout",
        "raises": "error",
        "takes_100_gib": "oom",
        "leaves_at_once": "error",
        "eager": "ok",
    }
    errors = {name: record.error or "" for name, record in found.items()}
    assert errors["segfaults"].startswith("killed by SIGSEGV; last words: about to read address 0; Fatal Python error")
    assert " in segfaults" in errors["segfaults"]
    assert errors["hangs_in_c"].startswith("no result within timeout_s = 4 s; last words: Fatal Python error: Aborted")
    assert " in hangs_in_c" in errors["hangs_in_c"]
    assert "RuntimeError: no such tile" in errors["raises"]
    assert "allocate memory" in errors["takes_100_gib"]
    assert errors["leaves_at_once"] == "the kernel's process left with exit code 0"
    crashed = found["segfaults"]
    assert crashed.case_id == job("segfaults").case.case_id and crashed.seconds is not None
    for formula in ("params_formula", "kv_cache_bytes_formula", "flops", "reference", "kv_len"):
        assert getattr(crashed, formula) == getattr(found["good"], formula) is not None


@pytest.mark.slow
def test_hangs_of_every_kind_end_in_time():
    names = ["hangs_in_python", "hangs_printing", "ignores_signals"]
    executor = Local(2, Limits(timeout_s=2))
    found = measured(executor, *names)
    executor.close()
    assert {record.status for record in found.values()} == {"timeout"}
    assert all(2 <= (record.seconds or 0) < 6 for record in found.values())
    assert len(found["hangs_printing"].error or "") < 3000


def test_memory_that_is_asked_for_inside_is_an_oom_row_and_the_worker_lives_on(local):
    measured(local, "good")
    before = pids(local)
    for kernel in ("takes_100_gib", "takes_100_gib_by_numpy", "takes_100_gib_in_steps"):
        local._crew.idle[0].served = 0  # as if new: else the case were tried again in another
        assert measured(local, kernel)[kernel].status == "oom"
    assert measured(local, "good")["good"].status == "ok"
    assert pids(local) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("takes_100_gib_by_bytes", "MemoryError"),
        ("takes_100_gib_in_steps", "can't allocate memory"),
        ("takes_shared_memory", "more than max_memory = 1 GiB"),
        ("takes_it_by_a_child", "more than max_memory = 1 GiB"),
    ],
)
@pytest.mark.fresh
def test_memory_beyond_the_limit_is_oom(local, kernel, says):
    record = measured(local, kernel)[kernel]
    assert record.status == "oom" and says in (record.error or "")


def test_whatever_a_kernel_raises_is_its_row_and_the_worker_stays(local):
    measured(local, "good")
    before = pids(local)
    found = measured(local, "raises", "exits", "interrupts", "good")
    assert pids(local) == before
    assert [record.status for record in found.values()] == ["error", "error", "error", "ok"]
    assert (found["interrupts"].error or "").startswith("KeyboardInterrupt")


@pytest.mark.slow
def test_a_crash_is_not_blamed_on_the_case_that_happened_to_run(local):
    found = measured(local, "damages_the_next", "takes_two_seconds", "good")
    assert {record.status for record in found.values()} == {"ok"}


def test_what_kernels_print_stays_out_of_the_terminal(local, capfd):
    assert measured(local, "prints_a_lot")["prints_a_lot"].status == "ok"
    assert capfd.readouterr() == ("", "")
    # What is kept of it is bounded.
    assert max(len(worker._said) for worker in local._crew.workers()) <= 1 << 16


# The same numbers everywhere


def plain(record: Record) -> str:
    return json.dumps({k: v for k, v in sorted(vars(record).items()) if k not in TIMES})


def many_jobs() -> list[Job]:
    return [
        job(kernel, variant=variant, seq_len=seq_len, phase=phase)
        for kernel in ("eager", "good")
        for variant in ("mha", "mqa")
        for seq_len in (3, 5)
        for phase in ("prefill", "decode", "train")
    ][:20]


def by_case(records: Sequence[Record] | Iterator[Record]) -> dict[str, str]:
    return {record.case_id: plain(record) for record in records}


def test_records_are_bitwise_the_same_here_in_a_worker_and_in_reverse(local):
    jobs = many_jobs()
    here = by_case(Here().run(jobs))
    assert len(here) == 20
    assert list(by_case(local.run(jobs))) == list(here)  # one worker keeps the order
    assert by_case(local.run(jobs)) == here
    assert by_case(local.run(jobs[::-1])) == here


@pytest.mark.slow
@pytest.mark.fresh
def test_records_are_bitwise_the_same_in_two_workers():
    jobs, two = many_jobs(), Local(2)
    at_work: set[int] = set()
    records = []
    for record in two.run(jobs):
        at_work |= set(pids(two))
        records.append(record)
    assert by_case(records) == by_case(Here().run(jobs))
    assert len(at_work) == 2  # while it ran: one that is still starting when all is done is sent away
    two.close()


def test_a_case_after_one_that_changes_everything_is_bitwise_the_same(local):
    alone = by_case(Here().run([job("eager")]))
    after = by_case(local.run([job("changes_everything"), job("eager")]))
    assert after[job("eager").case.case_id] == alone[job("eager").case.case_id]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["closes_the_streams", "leaves_a_busy_thread", "stays_in_inference_mode"])
def test_what_cannot_be_put_back_ends_with_the_kernels_process(local, kernel):
    measured(local, "good")
    before = pids(local)
    alone = by_case(Here().run([job("eager", phase="train")]))
    records = list(local.run([job(kernel), job("eager", phase="train")]))
    assert records[0].status == "ok", records[0].error
    assert by_case(records[1:]) == alone
    assert pids(local) == before  # it ends with the kernel's own process, and the worker has not noticed


# Loading


def test_origins_are_found_in_a_worker(local, tmp_path):
    found = local.origins(["eager", f"{FILE}:good"])
    assert found["eager"] == "harness" or found["eager"]
    assert found[f"{FILE}:good"].startswith(f"{FILE} sha256:")


def test_a_plugin_that_cannot_be_loaded_is_bad_input(local, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('not today')")
    with pytest.raises(BadInput, match=r"broken\.py: importing it raised RuntimeError: not today"):
        local.origins([f"{path}:f"])
    path.write_text("raise KeyboardInterrupt")
    with pytest.raises(BadInput, match=r"broken\.py:f: importing it raised KeyboardInterrupt"):
        local.origins([f"{path}:f"])


@pytest.mark.slow
def test_a_plugin_that_kills_the_worker_at_import_is_bad_input_with_its_last_words(local, tmp_path):
    path = tmp_path / "deadly.py"
    path.write_text("import os\nprint('farewell')\nos._exit(7)")
    with pytest.raises(BadInput, match=r"deadly\.py:f: .* exit code 7; last words: farewell"):
        local.origins([f"{path}:f"])


def test_a_plugin_is_executed_once_a_process_and_its_settings_are_undone(local, tmp_path):
    path, log = tmp_path / "noted.py", tmp_path / "log"
    path.write_text(
        f"import torch\nopen({str(log)!r}, 'a').write('x')\ntorch.set_default_dtype(torch.float64)\n"
        "from torch.nn.functional import scaled_dot_product_attention as f\n"
    )
    cases = [dataclasses.replace(job(str(path) + ":f", seq_len=n).case, kernel=f"{path}:f") for n in (2, 3)]
    records = list(local.run([dataclasses.replace(job("eager"), case=case) for case in cases]))
    assert [record.status for record in records] == ["ok", "ok"]
    assert log.read_text() == "x"


@pytest.mark.slow
@pytest.mark.fresh
def test_the_worker_imports_what_its_parent_can_and_not_what_lies_about(tmp_path, monkeypatch):
    """A queue.py in the current directory must not take the place of Python's."""
    (tmp_path / "queue.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.py").write_text("from torch.nn.functional import scaled_dot_product_attention as f")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    executor = Local()
    assert executor.origins(["mine:f"])["mine:f"].startswith(f"{tmp_path / 'lib' / 'mine.py'} sha256:")
    executor.close()


@pytest.mark.slow
@pytest.mark.fresh
def test_a_limit_below_what_torch_needs_is_bad_input():
    executor = Local(limits=Limits(max_memory=64 << 20))
    with pytest.raises(BadInput, match=r"limits\.max_memory: 64 MiB: torch and harness themselves take \d+ MiB"):
        executor.origins(["eager"])
    executor.close()


@pytest.mark.fresh
def test_a_worker_that_cannot_start_is_said_with_its_last_words(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BadInput, match=r"no worker process can start: the worker left with exit code 1"):
        next(Local().run([job("eager")]))


# Ends


def test_closing_the_iterator_kills_the_worker_at_work(local):
    stream = local.run([job("good"), job("hangs_in_c")])
    assert next(stream).status == "ok"
    (pid,) = pids(local)
    stream.close()
    assert gone(pid) and not local._crew.busy


PARENT = """
import json, sys
from harness.suite.schema import Limits
from harness.workers.local import read_record, Local
from harness.workers.job import decode_job
local = Local(limits=Limits(timeout_s=30))
stream = local.run([decode_job(json.loads(text)) for text in sys.argv[1:]])
def tell():
    print("worker", *(worker.pid for worker in local._crew.workers()), flush=True)
hand_out = local._crew.give
def give(worker, task):
    given = hand_out(worker, task)
    tell()
    return given
local._crew.give = give
try:
    for record in stream:
        print(record.status, record.kernel.rpartition(":")[2], flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


class Parent:
    def __init__(self, *kernels: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT, *(json.dumps(dataclasses.asdict(job(kernel))) for kernel in kernels)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        assert line and line[0] == "worker", self.process.communicate()
        self.worker = int(line[1])
        time.sleep(0.5)  # into the kernel

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[str, str]:
        return self.process.communicate(timeout=20)


@pytest.mark.slow
def test_a_killed_parent_takes_its_worker_along_even_one_that_hangs_in_c():
    parent = Parent("hangs_in_c")
    assert not gone(parent.worker, within_s=0.2)
    parent.signal(signal.SIGKILL)
    parent.end()
    assert gone(parent.worker)


def test_the_first_ctrl_c_lets_the_case_finish_and_starts_no_other():
    parent = Parent("takes_two_seconds", "good")
    parent.signal(signal.SIGINT)
    out, err = parent.end()
    assert out.split() == ["ok", "takes_two_seconds", "interrupted"]
    assert "Ctrl-C again stops at once" in err
    assert gone(parent.worker)


@pytest.mark.slow
@pytest.mark.parametrize("signals", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,)])
def test_a_second_ctrl_c_or_sigterm_stops_at_once(signals):
    parent = Parent("hangs_in_c", "good")
    started = time.monotonic()
    for number in signals:
        parent.signal(number)
        time.sleep(0.3)
    out, err = parent.end()
    assert out.split() == ["interrupted"]
    assert ("Ctrl-C again" in err) == (signal.SIGINT in signals)
    assert time.monotonic() - started < 10
    assert gone(parent.worker)


def test_sigterm_is_not_told_as_ctrl_c(capsys):
    struck: list[str] = []
    with Interrupts(lambda: struck.append("struck")) as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        interrupts.announce()
    assert interrupts.is_terminated and struck == ["struck"]
    assert capsys.readouterr().err == "\nstopping at once: SIGTERM\n"


def test_what_a_kernel_starts_in_a_session_of_its_own_ends_with_its_worker(local):
    assert measured(local, "starts_a_session")["starts_a_session"].status == "ok"
    (worker,) = local._crew.idle
    (child,) = psutil.Process(worker.pid).children()
    local._crew.retire(worker)
    assert gone(child.pid)


def test_a_worker_is_not_reaped_before_its_group_is_killed_and_killed_only_once(local, monkeypatch):
    measured(local, "good")
    (worker,) = local._crew.idle
    os.kill(worker.pid, signal.SIGKILL)
    assert gone(worker.pid)
    assert not worker.is_alive
    assert worker._process.returncode is None  # a zombie keeps its number: nobody else can have it
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: killed.append(pid))
    local._crew.retire(worker)
    for again in (worker.kill, worker.strike):
        again()
    assert killed == [worker.pid]


def test_handlers_are_put_back(local):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stream = local.run([job("good"), job("also_good")])
    next(stream)
    assert signal.getsignal(signal.SIGINT) not in before
    list(stream)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_parent_sleeps_while_a_case_runs(local):
    measured(local, "good")
    before = time.process_time()
    assert measured(local, "takes_two_seconds")["takes_two_seconds"].status == "ok"
    assert time.process_time() - before < 0.2  # of two seconds


# Messages


def test_messages_survive_any_cut():
    messages: list[dict[str, Any]] = [{"job": "ä\ud800"}, {}, {"x": [1.5, float("inf")]}]
    data = b"".join(map(pack, messages))
    for size in (1, 3, 7, len(data)):
        inbox = Inbox()
        found: list[dict[str, Any]] = []
        for at in range(0, len(data), size):
            found += inbox.feed(data[at : at + size])
        assert found == messages


@pytest.mark.parametrize("data", [b"\xff" * 8, (3).to_bytes(8, "big") + b"abc", (2).to_bytes(8, "big") + b"[]"])
def test_broken_messages_are_noticed(data):
    with pytest.raises(BrokenMessage):
        list(Inbox().feed(data))
    whole = pack({"x": 1})
    found = Inbox().feed(whole + data)
    assert next(found) == {"x": 1}  # what came before is kept
    with pytest.raises(BrokenMessage):
        next(found)


def test_jobs_and_records_arrive_as_they_were_sent():
    sent = dataclasses.replace(job("eager"), regimes=("plain", "tiny"), timing=Timing(budget_s=0.1))
    (message,) = Inbox().feed(pack({"job": dataclasses.asdict(sent)}))
    assert isinstance(message["job"], dict) and decode_job(message["job"]) == sent
    record = dataclasses.replace(
        failed(sent, "oom", "why", 0.1), max_abs_err=float("inf"), samples_s={"a": [0.1, 1e-9]}
    )
    (message,) = Inbox().feed(pack({"record": record}))
    assert read_record(message["record"]) == record
    with pytest.raises(BrokenMessage, match="unknown"):
        read_record({**vars(record), "unknown": 1})


def test_a_worker_that_answers_nonsense_is_an_error_row(local, monkeypatch):
    measured(local, "good")
    (worker,) = local._crew.idle
    worker.served = 0  # as if new: else the case were tried again
    monkeypatch.setattr(worker._inbox, "feed", lambda data: Inbox().feed(b"\xff" * 8))
    record = measured(local, "good")["good"]
    assert record.status == "error" and "broken message: a message of 18446744073709551615 bytes" in (
        record.error or ""
    )


def test_a_child_that_returns_in_the_place_of_its_worker_answers_nothing(local):
    measured(local, "good")
    before = pids(local)
    found = measured(local, "forks", "also_good", "good")
    assert {record.status for record in found.values()} == {"ok"}
    assert pids(local) == before
    family = psutil.Process(before[0]).children(recursive=True)  # the zygote, and the processes of three kernels
    assert len(family) <= 1 + 3, "a child that the kernel forked lives on, on the same channel"


def test_a_second_answer_costs_the_worker_but_not_the_first(local, monkeypatch):
    measured(local, "good")
    (worker,) = local._crew.idle
    feed = worker._inbox.feed
    monkeypatch.setattr(worker._inbox, "feed", lambda data: [m for m in feed(data) for _ in range(2)])
    assert measured(local, "good")["good"].status == "ok"
    assert worker not in local._crew.workers()


def test_an_answer_to_another_question_is_not_taken(local, monkeypatch):
    measured(local, "good")
    (worker,) = local._crew.idle
    worker.served = 0  # as if new: else the case were tried again
    feed = worker._inbox.feed
    # Of a wrong number are the answer, and the word that it has begun.
    shift = lambda message: {key: n - 1 if key in ("question", "begun") else n for key, n in message.items()}  # noqa: E731
    monkeypatch.setattr(worker._inbox, "feed", lambda data: [shift(message) for message in feed(data)])
    record = measured(local, "good")["good"]
    assert record.status == "error"
    assert "broken message: an answer to" in (record.error or "")


def test_a_record_of_another_case_is_not_taken(local):
    measured(local, "good")
    sent, other = job("good"), failed(job("eager"), "ok", "", 0.0)
    outcome = Outcome(Task(sent, {}), was_fresh=True, seconds=0.0, answer={"record": vars(other)})
    (record,) = settle(outcome, deque())
    assert (record.case_id, record.status) == (sent.case.case_id, "error")
    assert f"a record of {other.case_id}" in (record.error or "")


@pytest.mark.slow
def test_a_worker_whose_pipe_never_falls_silent_is_timed_out(monkeypatch):
    executor = Local(limits=Limits(timeout_s=2))
    # Worker and kernel are there already: on a busy machine they may take longer to start than to be timed out.
    executor.origins([job("hangs_in_python").case.kernel])
    selector, deadline = executor._crew._selector, time.monotonic() + 15

    def always_ready(timeout: float) -> list[tuple[Any, int]]:
        assert time.monotonic() < deadline, "not timed out"
        time.sleep(min(timeout, 0.01))
        return [(key, 1) for key in selector.get_map().values() if key.data[1] == "messages"]

    monkeypatch.setattr(selector, "select", always_ready)
    assert measured(executor, "hangs_in_python")["hangs_in_python"].status == "timeout"
    executor.close()


@pytest.mark.slow
def test_a_worker_that_closes_its_pipe_is_not_waited_for(local):
    record = measured(local, "closes_every_pipe")["closes_every_pipe"]
    assert record.status == "error"
    assert (record.error or "").startswith("the kernel's process closed its pipe")


@pytest.mark.slow
def test_a_worker_that_imports_other_code_than_the_first_stops_the_run(monkeypatch):
    executor = Local()
    monkeypatch.setattr(store, "code_sha256", lambda: "a" * 64)
    assert executor.origins(["eager"])
    executor._crew.retire(executor._crew.idle[0])
    monkeypatch.setattr(store, "code_sha256", lambda: "b" * 64)
    with pytest.raises(CannotStart, match=r"harness's own source changed during the run: a{12} -> b{12}; "):
        list(executor.run([job("eager")]))
    executor.close()


def test_all_workers_share_the_memory_of_the_machine():
    one, four = (allowed_bytes(Limits(), workers) for workers in (1, 4))
    assert one == pytest.approx(4 * four, abs=8) and one <= 0.8 * psutil.virtual_memory().total
    assert allowed_bytes(Limits(max_memory=GIB), 4) == GIB


def test_a_crew_has_at_least_one_worker():
    with pytest.raises(BadInput, match="workers = 0"):
        Local(0)
    assert os.getpid() not in pids(Local())
