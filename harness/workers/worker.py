"""A worker process: jobs in, records out, one after another, until the parent is gone.

Started as `python -m harness.workers.worker JOBS ANSWERS PARENT`: the pipes' handles and the parent's pid.
"""

import ctypes
import faulthandler
import gc
import os
import resource
import signal
import sys
import time
from typing import Any

from harness.case import Case
from harness.errors import BadInput
from harness.suite.schema import Timing
from harness.workers.channel import receive, send
from harness.workers.job import Job, decode_job, failed, load_kernel, perform

PR_SET_PDEATHSIG = 1
# Imports all that torch loads at first use (seconds of it), so that no case's time limit pays for it.
WARM_UP = Job(
    case=Case(
        variant="mha",
        kernel="eager",
        embed_dim=2,
        heads=1,
        kv_heads=1,
        head_dim=2,
        seq_len=2,
        batch=1,
        mask="causal",
        dtype="float32",
        phase="prefill",
    ),
    seed=0,
    regimes=("plain",),
    timing=Timing(budget_s=1e-3, min_blocks=3, max_blocks=3),
    threads=1,
)


def die_with_parent(parent: int) -> None:
    """Also while a kernel hangs in C code, where nothing of ours runs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def limit_memory(allowed: int) -> int:
    """So that one huge allocation fails inside, as an exception of that case alone. Gives what is already in use.

    RLIMIT_DATA and not RLIMIT_AS: it does not count mapped files and reserved addresses, of which torch has plenty.
    """
    import psutil

    used = psutil.Process().memory_info()
    files = getattr(used, "shared", 0)  # resident, but no data: it counts for the parent's look from outside
    if allowed > used.rss:
        resource.setrlimit(resource.RLIMIT_DATA, (allowed - files, resource.RLIM_INFINITY))
    return int(used.rss)


def serve(jobs: int, answers: int) -> None:
    hello = receive(jobs)
    if hello is None:
        return
    _settle(hello)
    output = os.dup(1)
    faulthandler.enable(output, all_threads=False)  # `output` stays, even if a kernel closes the standard streams

    from harness.cell import state

    perform(WARM_UP)
    gc.collect()
    gc.freeze()  # what is imported stays: the collector need not walk it again after each case
    before, me = state.read_all(), os.getpid()
    send(answers, {"ready": limit_memory(hello["allowed"])})
    while (message := receive(jobs)) is not None:
        answer = _load(message["load"]) if "load" in message else _work(message["job"])
        if os.getpid() != me:
            os._exit(1)  # a child that the kernel forked and let return: the answer is its parent's to give
        answer["question"] = message["question"]
        if left := [*state.changed(before, state.IMPORTS), *_mend_streams(output)]:
            send(answers, {**answer, "left": left})
            return  # what cannot be put back ends with the process
        send(answers, answer)
        gc.collect()


def _settle(hello: dict[str, Any]) -> None:
    """Import what the parent can import, from where it would."""
    sys.path[:] = hello["path"]
    os.environ.pop("PYTHONPATH", None)
    if hello["python_path"] is not None:
        os.environ["PYTHONPATH"] = hello["python_path"]
    for stream in (sys.stdout, sys.stderr):
        # Last words must be out before a crash.
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]


def _work(data: dict[str, Any]) -> dict[str, Any]:
    job, started = decode_job(data), time.perf_counter()
    try:
        record = perform(job)
    except BaseException as failure:  # a file that cannot be imported any more, or Ctrl-C raised by the kernel itself
        error = str(failure) if isinstance(failure, BadInput) else _told(failure)
        record = failed(job, "error", error, time.perf_counter() - started)
    return {"record": record}


def _load(kernel: str) -> dict[str, Any]:
    try:
        return {"origin": load_kernel(kernel).origin}
    except BadInput as refusal:
        return {"refused": str(refusal)}
    except BaseException as failure:
        return {"refused": f"{kernel}: importing it raised {_told(failure)}"}


def _told(failure: BaseException) -> str:
    from harness.kernels.plugin import told

    return told(failure)


def _mend_streams(output: int) -> list[str]:
    """Standard output and error as they were, should a kernel have closed or moved them."""
    for handle in (1, 2):
        try:
            is_same = os.path.sameopenfile(handle, output)
        except OSError:
            is_same = False
        if not is_same:
            os.dup2(output, handle)
    closed = sys.stdout.closed or sys.stderr.closed
    return ["closed standard streams"] if closed else []


def main() -> None:
    jobs, answers, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    for handle in (jobs, answers):
        os.set_inheritable(handle, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected, its gigabytes on disk are not
    serve(jobs, answers)
    sys.stdout.flush()
    os._exit(0)  # not held up by threads and exit handlers of others


if __name__ == "__main__":
    main()
