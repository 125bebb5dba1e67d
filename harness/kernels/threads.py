"""Independent pieces of work, each done by one thread from beginning to end.

torch spreads every operation over its threads and waits for all of them at its end. Many small operations in a row pay
that many times, and on a busy machine dearly; pieces that a thread does alone pay once.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_MAKING = threading.Lock()  # one crew, not one for each of several first callers


def spread(work: Callable[[Tensor, Iterator[T]], None], rooms: Sequence[Tensor], pieces: Iterable[T]) -> None:
    """`work` in as many threads as there are rooms, each given one of them, and pieces that no other thread gets.

    The rooms are memory to work in, made by the caller: whoever counts allocations counts those of the calling thread.
    """
    if len(rooms) == 1 or _is_watched():
        work(rooms[0], iter(pieces))
        return
    failed, rest, taking = threading.Event(), iter(pieces), threading.Lock()
    inference = torch.is_inference_mode_enabled()

    def one_thread(room: Tensor) -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():  # both are a thread's own
                work(room, _take(rest, taking, failed))
        except BaseException:
            failed.set()
            raise

    with _MAKING:
        crew = _crew(max(len(rooms), torch.get_num_threads()), os.getpid())  # one for all numbers of rooms
    tasks = [crew.start(functools.partial(one_thread, room)) for room in rooms]
    try:
        _finish(tasks)
    except BaseException:
        failed.set()  # interrupted while waiting: the others must not go on with all that is left
        raise


class _Task:
    """A call for another thread. A future of `concurrent.futures` does the same in five times the time."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.failure: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()  # released by whoever has done it

    def run(self) -> None:
        try:
            self.call()
        except BaseException as failure:  # raised where the answer is waited for
            self.failure = failure
        finally:
            self.done.release()


def _finish(tasks: Sequence[_Task]) -> None:
    """All of them first: a caller who is told of a failure must not find the others still at work."""
    for task in tasks:
        task.done.acquire()
    for task in tasks:
        if task.failure is not None:
            raise task.failure


class _Crew:
    """Threads that wait for calls as long as the process lives."""

    def __init__(self, threads: int) -> None:
        self.tasks: SimpleQueue[_Task] = SimpleQueue()
        for number in range(threads):
            threading.Thread(target=self._serve, name=f"tiles-{number}", daemon=True).start()

    def start(self, call: Callable[[], object]) -> _Task:
        task = _Task(call)
        self.tasks.put(task)
        return task

    def _serve(self) -> None:
        while True:
            self.tasks.get().run()


def _is_watched() -> bool:
    """Profilers and modes that count or fake operations belong to the calling thread, and see no other's."""
    is_profiled = torch._C._autograd._profiler_enabled()
    return is_profiled or torch._C._len_torch_dispatch_stack() > 0 or torch.compiler.is_compiling()


def _take(rest: Iterator[T], taking: threading.Lock, failed: threading.Event) -> Iterator[T]:
    """One thread's share of what is left, which ends for all as soon as one has failed.

    An iterator for each thread: Python's own `iter(take, end)`, shared, drops what one thread was just given when
    another meets the end.
    """
    end = object()
    while True:
        with taking:
            piece = end if failed.is_set() else next(rest, end)
        if piece is end:
            return
        yield piece  # type: ignore[misc]


@functools.cache
def _crew(threads: int, pid: int) -> _Crew:
    """Threads in which torch's operations use no further ones. `pid`: a forked process has none of its parent's.

    torch has no setting for one thread alone: for the moment that this takes, once in a process, a new thread of
    someone else's that asks torch for the first time would get 1 too.
    """
    before = torch.get_num_threads()
    crew = _Crew(threads)
    ready = threading.Barrier(threads)  # so that each of them settles, and none of them twice

    def settle() -> None:
        torch.get_num_threads()  # a thread takes over the process's number when it first asks: before, not after
        torch.set_num_threads(1)
        ready.wait()

    _finish([crew.start(settle) for _ in range(threads)])
    torch.set_num_threads(before)  # what other new threads will start with; ours keep theirs
    return crew


def alone(make: Callable[[], T]) -> T:
    """What `make` gives, computed by one thread: for many small operations in a row, at each of which torch's threads
    would wait for each other longer than they work."""
    found: list[T] = []

    def work(_room: Tensor, todo: Iterator[Callable[[], T]]) -> None:
        found.extend(one() for one in todo)

    spread(work, [torch.empty(0)] * torch.get_num_threads(), [make])
    return found[0]
