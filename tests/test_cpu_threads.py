"""Who runs a kernel for the CPU: nobody without a room to work in, and nobody any more when a call is over."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from attemper import attend
from attemper._backends.cpu import _code, _sheet, _threads
from attemper._backends.cpu import _slots as slot
from attemper._backends.cpu._target import target


@pytest.mark.parametrize("kernel", [name for kernels in _code.KERNELS.values() for name in kernels])
def test_a_worker_without_a_room_takes_no_task(kernel):
    if kernel == "forward_bf16" and not target().bfloat16:
        pytest.skip("this processor does not multiply pairs of bfloat16")
    words = np.zeros(slot.WORDS, dtype=np.int64)
    words[slot.TASKS], words[slot.ROOMS], words[slot.WORKER] = 3, 2, 2
    _threads.function_at(_code.address(kernel))(words.ctypes.data)
    assert (words[slot.TASK], words[slot.WORKER]) == (0, 3)


def test_rows_that_are_computed_again_share_the_rooms_there_are(monkeypatch):
    # More threads than tasks, but fewer than rows that met a NaN.
    started = []
    start = _sheet._Desk.start

    def noted(desk, kernel, tasks, workers):
        start(desk, kernel, tasks, workers)
        started.append((kernel, tasks, int(desk.words[slot.ROOMS]), workers, int(desk.words[slot.TASK])))

    monkeypatch.setattr(_sheet._Desk, "start", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        q, k, v = (torch.randn(1, 2, n, 64) for n in (64, 900, 900))
        k[0, :, 0] = float("nan")
        output, reading = attend(q, k, v, backend="cpu")
    finally:
        torch.set_num_threads(before)
    assert output.isnan().all()
    assert (reading.nonfinite == 1).all()
    kernel, tasks, rooms, workers, done = started[-1]
    assert (kernel, tasks, rooms, workers) == ("careful", 128, 5, 5)
    assert done >= tasks


@pytest.fixture
def by_ourselves(monkeypatch):
    """Threads of our own, and in place of a kernel a function that is told whether it runs in this thread."""
    monkeypatch.setattr(_threads, "_torch_parallel", lambda: None)
    mine = threading.get_ident()

    def put(function):
        def told(sheet):
            function(threading.get_ident() == mine)

        monkeypatch.setattr(_threads, "function_at", lambda kernel: told)

    return put


def test_an_interrupted_call_waits_for_those_at_work(by_ourselves):
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    def kernel(here):
        if here:
            assert begun.wait(60)
            raise KeyboardInterrupt
        begun.set()
        assert released.wait(60)
        ended.set()

    by_ourselves(kernel)

    def again_and_release():
        assert begun.wait(60)
        # A second time, while it waits or is about to.
        os.kill(os.getpid(), signal.SIGINT)
        released.set()

    helper = threading.Thread(target=again_and_release)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        _threads.run(0, 0, 2)
    over = ended.is_set()
    helper.join()
    assert over


def test_who_comes_late_does_nothing(by_ourselves, monkeypatch):
    waiting = []

    class Pool:
        def submit(self, work):
            waiting.append(work)

    ran = []
    by_ourselves(ran.append)
    monkeypatch.setattr(_threads, "_pool", lambda workers: Pool())
    _threads.run(0, 0, 3)
    for work in waiting:
        work()
    assert (ran, len(waiting)) == ([True], 2)


def test_one_does_it_all_when_no_thread_can_be_had(by_ourselves, monkeypatch):
    # As at the end of a process.
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    ran = []
    by_ourselves(ran.append)
    monkeypatch.setattr(_threads, "_pool", lambda workers: pool)
    _threads.run(0, 0, 2)
    assert ran == [True]
