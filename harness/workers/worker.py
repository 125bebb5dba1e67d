"""A worker process: jobs in, records out, one after another, until the parent is gone.

Started as `python -m harness.workers.worker JOBS ANSWERS PARENT`: the pipes' handles and the parent's pid.
"""

import faulthandler
import functools
import gc
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from harness.candidate.channel import receive, send
from harness.candidate.child import die_with_parent, limit_memory, mend_streams, settle
from harness.candidate.zygote import Zygote
from harness.case import Case
from harness.errors import BadInput
from harness.suite.schema import Timing
from harness.workers.job import Job, decode_job, failed, perform

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


def serve(jobs: int, answers: int) -> None:
    hello = receive(jobs)
    if hello is None:
        return
    settle(hello["path"], hello["python_path"])
    from harness.candidate.isolated import PROCESSES

    PROCESSES.zygote = Zygote()  # with torch imported, and before the first use of it
    output = os.dup(1)
    faulthandler.enable(output, all_threads=False)  # `output` stays, even if a kernel closes the standard streams

    from harness.candidate import state

    perform(WARM_UP)
    gc.collect()
    gc.freeze()  # what is imported stays: the collector need not walk it again after each case
    used = limit_memory(hello["allowed"])
    before, me = state.read_all(), os.getpid()
    allowed = hello["allowed"] - used  # for a kernel's own process: the two are watched together
    send(answers, {"ready": used})
    while (message := receive(jobs)) is not None:
        question = message["question"]
        if "load" in message:
            answer = _load(message["load"], allowed)
        else:
            answer = _work(message["job"], allowed, functools.partial(send, answers, {"begun": question}))
        if os.getpid() != me:
            os._exit(1)  # a child that the kernel forked and let return: the answer is its parent's to give
        answer["question"] = question
        if left := [*state.changed(before, state.IMPORTS), *mend_streams(output)]:
            send(answers, {**answer, "left": left})
            return  # what cannot be put back ends with the process
        send(answers, answer)
        gc.collect()


def _work(data: dict[str, Any], allowed: int, begun: Callable[[], None]) -> dict[str, Any]:
    job, started = decode_job(data), time.perf_counter()
    try:
        record = perform(job, allowed, begun)
    except BaseException as failure:  # a file that cannot be imported any more, or Ctrl-C raised by the kernel itself
        error = str(failure) if isinstance(failure, BadInput) else _told(failure)
        record = failed(job, "error", error, time.perf_counter() - started)
    return {"record": record}


def _load(name: str, allowed: int) -> dict[str, Any]:
    """Where a kernel comes from, and what its code replaced in the libraries that it shares with nobody."""
    from harness.candidate.isolated import judged_kernel

    try:
        kernel = judged_kernel(name, allowed=allowed)
        return {"origin": kernel.origin, "patched": [] if kernel.process is None else kernel.process.patched()}
    except BadInput as refusal:
        return {"refused": str(refusal)}
    except BaseException as failure:
        return {"refused": f"{name}: importing it raised {_told(failure)}"}


def _told(failure: BaseException) -> str:
    from harness.kernels.plugin import told

    return told(failure)


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
