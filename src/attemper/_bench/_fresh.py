"""What only a process of its own shows: the memory of one call, and how long the first one takes.

    python -m attemper._bench._fresh memory attemper forward
    python -m attemper._bench._fresh first numpy

prints one number, megabytes or seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

HEADS, LENGTH, HEAD_DIM = 4, 16384, 64


def ask(*words: str, cache: str | None = None) -> float:
    """The number that a process of its own gives, with the kernels compiled here or in a cache of its own."""
    environment = dict(os.environ) if cache is None else {**os.environ, "ATTEMPER_CACHE_DIR": cache}
    command = [sys.executable, "-m", __name__, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RuntimeError(f"{' '.join(words)} in a process of its own: {last}")
    return float(done.stdout)


def memory(who: str, what: str) -> float:
    """Megabytes that a call adds at its highest."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    from .._attend import attend

    def run(length: int) -> float:
        q, k, v = (x.requires_grad_(what == "backward") for x in torch.randn(3, 1, HEADS, length, HEAD_DIM).unbind())
        upstream = torch.ones_like(q, requires_grad=False)
        before = _start()
        output = attend(q, k, v).output if who == "attemper" else F.scaled_dot_product_attention(q, k, v)
        if what == "backward":
            torch.autograd.grad(output, (q, k, v), upstream)
        return (_highest() - before) / 2**20

    with torch.set_grad_enabled(what == "backward"):
        # Loads the kernels and starts the threads, whose stacks are not the call's.
        run(256)
        return run(LENGTH)


def _start() -> int:
    # Sets the high-water mark, which importing and making operands has left above, back to where we are.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _highest()


def _highest() -> int:
    # Not what getrusage says where there is better: that starts from the size of the process that started this one.
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def first(framework: str) -> float:
    """Seconds that the first call takes, once everything is imported."""
    import numpy as np

    x: Any = np.random.default_rng(0).standard_normal((3, 8, 16, 64), dtype=np.float32)
    if framework == "torch":
        import torch

        x = torch.from_numpy(x)
    from .._attend import attend

    start = time.perf_counter()
    attend(*x)
    return time.perf_counter() - start


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    sys.stdout.write(f"{memory(*rest) if what == 'memory' else first(*rest)}\n")
