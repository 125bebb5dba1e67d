"""Independent pieces of work, each done by one thread from beginning to end.

torch spreads every operation over its threads and waits for all of them at its end. Many small operations in a row pay
that many times, and on a busy machine dearly; pieces that a thread does alone pay once.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def spread(work: Callable[[Tensor, Iterator[T]], None], rooms: Sequence[Tensor], pieces: Iterable[T]) -> None:
    """`work` in as many threads as there are rooms, each given one of them, and pieces that no other thread gets.

    The rooms are memory to work in, made by the caller: whoever counts allocations counts those of the calling thread.
    """
    if len(rooms) == 1 or _is_watched():
        work(rooms[0], iter(pieces))
        return
    shared = _shared(pieces)
    inference = torch.is_inference_mode_enabled()

    def one_thread(room: Tensor) -> None:
        with torch.inference_mode(inference), torch.no_grad():  # both are a thread's own
            work(room, shared)

    crew = _crew(len(rooms), os.getpid())
    started = [crew.submit(one_thread, room) for room in rooms]
    for each in started:
        each.result()


def _is_watched() -> bool:
    """Profilers and modes that count or fake operations belong to the calling thread, and see no other's."""
    is_profiled = torch._C._autograd._profiler_enabled()
    return is_profiled or torch._C._len_torch_dispatch_stack() > 0 or torch.compiler.is_compiling()


def _shared(pieces: Iterable[T]) -> Iterator[T]:
    """An iterator for several threads."""
    rest, lock, end = iter(pieces), threading.Lock(), object()

    def take() -> object:
        with lock:
            return next(rest, end)

    return iter(take, end)  # type: ignore[arg-type]


@functools.cache
def _crew(threads: int, pid: int) -> ThreadPoolExecutor:
    """Threads in which torch's operations use no further ones. `pid`: a forked process has none of its parent's."""
    crew = ThreadPoolExecutor(threads, thread_name_prefix="tiles")
    ready = threading.Barrier(threads + 1)

    def settle() -> None:
        torch.get_num_threads()  # a thread takes over the process's number when it first asks: before, not after
        torch.set_num_threads(1)
        ready.wait()

    for _ in range(threads):
        crew.submit(settle)
    ready.wait()
    torch.set_num_threads(threads)  # what other new threads will start with; ours keep theirs
    return crew
