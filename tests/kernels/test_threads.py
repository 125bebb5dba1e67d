"""Pieces of work over threads: each once, failures told, nothing left changed."""

import functools
import sys
import threading
import time

import pytest
import torch

from harness.kernels import threads
from harness.kernels.threads import spread
from tests.support import python

ROOMS = [torch.empty(1), torch.empty(1)]
AT_THE_END = """
import threading, time, torch, harness
torch.set_num_threads(2)
q = torch.randn(1, 2, 600, 8)
expected = harness.attention(q, q, q, kernel="tiled")
def late():
    time.sleep(0.3)
    print(torch.equal(harness.attention(q, q, q, kernel="tiled"), expected), flush=True)
threading.Thread(target=late).start()
"""


def test_each_piece_is_done_once_by_several_threads():
    done, workers, lock = [], set(), threading.Lock()

    def work(room, pieces):
        for piece in pieces:
            time.sleep(1e-3)
            with lock:
                done.append(piece)
                workers.add(threading.get_ident())
                assert torch.get_num_threads() == 1 and not torch.is_grad_enabled()

    spread(work, ROOMS, range(50))
    assert sorted(done) == [*range(50)]
    assert len(workers) == 2 and threading.get_ident() not in workers


def take(done, room, pieces):
    done.extend(pieces)


def test_no_piece_is_lost_when_another_thread_meets_the_end():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads change places between any two steps
    try:
        for _ in range(3000):
            done: list[int] = []
            spread(functools.partial(take, done), ROOMS, range(3))
            assert sorted(done) == [0, 1, 2]
    finally:
        sys.setswitchinterval(interval)


NUMBER_OF_THREADS = """
import torch
from harness.kernels.threads import spread
torch.set_num_threads(4)
done = []
spread(lambda room, pieces: done.extend(pieces), [torch.empty(1), torch.empty(1)], range(9))
print(sorted(done) == [*range(9)], torch.get_num_threads())
"""


def test_fewer_rooms_than_threads_leave_torchs_threads_as_they_were():
    told = python("-c", NUMBER_OF_THREADS)
    assert (told.code, told.out.split()) == (0, ["True", "4"]), told.err


def test_a_failure_is_told_and_ends_the_work():
    done = []

    def work(room, pieces):
        for piece in pieces:
            if piece == 3:
                raise ArithmeticError("in a thread")
            time.sleep(2e-3)
            done.append(piece)

    with pytest.raises(ArithmeticError, match="in a thread"):
        spread(work, ROOMS, range(1000))
    assert len(done) < 20


def test_new_threads_still_get_the_process_s_number():
    seen, number = [], torch.get_num_threads()
    threads._crew.cache_clear()  # an earlier test may have made one, and set another number since
    torch.set_num_threads(2)
    try:
        spread(lambda room, pieces: [*pieces].clear(), ROOMS, range(4))
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(number)
    assert seen == [2]


def test_a_thread_that_outlives_the_main_one_still_gets_its_attention():
    done = python("-c", AT_THE_END)
    assert done.out == "True\n", done.err


def test_a_failure_is_told_when_nobody_works_any_more():
    working = threading.Event()

    def work(room, pieces):
        if next(pieces) == 0:
            working.wait(10)
            raise ArithmeticError
        working.set()
        time.sleep(0.1)
        working.clear()

    with pytest.raises(ArithmeticError):
        spread(work, ROOMS, range(2))
    assert not working.is_set()
