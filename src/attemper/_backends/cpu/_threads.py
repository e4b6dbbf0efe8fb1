"""Who runs a kernel: torch's own OpenMP threads where torch is there, threads of our own elsewhere.

After an operation torch's workers spin for some milliseconds in wait of the next. Other threads would have to share the
cores with them; so inside a model the fastest threads are those workers themselves, and they are awake. Any number of
workers may turn up, also one alone (inside a parallel region of somebody else): they take tasks from a counter. Those
for whom there is no scratch memory leave.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_forked = False


def _in_child() -> None:
    # Neither OpenMP's threads nor ours are there after a fork, and OpenMP would wait for them for ever.
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def threads() -> int:
    """How many threads a large call uses: torch's number; else ATTEMPER_NUM_THREADS, OMP_NUM_THREADS, or the cores."""
    if _forked:
        return 1
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    return _threads_without_torch()


@cache
def _threads_without_torch() -> int:
    for name in ("ATTEMPER_NUM_THREADS", "OMP_NUM_THREADS"):
        given = os.environ.get(name, "").partition(",")[0].strip()
        if given.isdecimal() and int(given) > 0:
            return int(given)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_Kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def function_at(kernel: int) -> Callable[[int], None]:
    """A kernel as one thread calls it."""
    return _Kernel(kernel)


def run(kernel: int, sheet: int, workers: int) -> None:
    """Run the kernel at one address on the sheet at another; returns when all tasks are done."""
    if workers == 1:
        function_at(kernel)(sheet)
        return
    parallel = _torch_parallel()
    if parallel is not None:
        # All of torch's threads, also those for which there is nothing to do: a team of another size is a new team.
        parallel(kernel, sheet, threads(), 0)
        return
    team = _Team(kernel, sheet)
    try:
        # At the end of a process nobody can be asked any more, and one does it all.
        with suppress(RuntimeError):
            for _ in range(workers - 1):
                _pool(workers).submit(team.join)
        function_at(kernel)(sheet)
    finally:
        team.dismiss()


class _Team:
    """Those of our own threads that work on a sheet. Whoever comes when it was dismissed does nothing."""

    def __init__(self, kernel: int, sheet: int) -> None:
        self.kernel, self.sheet = kernel, sheet
        self.changed = threading.Condition()
        self.at_work, self.over = 0, False

    def join(self) -> None:
        with self.changed:
            if self.over:
                return
            self.at_work += 1
        function_at(self.kernel)(self.sheet)
        with self.changed:
            self.at_work -= 1
            self.changed.notify_all()

    def dismiss(self) -> None:
        """Wait until nobody is at work: the sheet is written anew for the next call, and the output is given away."""
        try:
            with self.changed:
                self.over = True
                self.changed.wait_for(lambda: not self.at_work)
        except KeyboardInterrupt:
            # Not before they are done, which they are in a moment.
            self.dismiss()
            raise


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers - 1, thread_name_prefix="attemper")


def _torch_parallel() -> Any:
    """GOMP_parallel of the OpenMP library that torch computes with; None without torch, or where it has another."""
    torch = sys.modules.get("torch")
    return None if torch is None else _parallel_of(str(torch.__file__))


@cache
def _parallel_of(torch_file: str) -> Any:
    library = Path(torch_file).parent / "lib" / "libtorch_cpu.so"
    try:
        # A symbol is looked for in the library and in those that it was linked with.
        parallel = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def runner() -> str:
    """Whose threads they are, in words."""
    if _forked:
        return "one thread, after a fork"
    if _torch_parallel() is not None:
        return "torch's OpenMP threads"
    return "threads of its own"
