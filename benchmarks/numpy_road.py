"""The NumPy road against the plain formula with the same statistics: speed and memory, interleaved in one process.

Writes benchmarks/results/numpy_road.json; `make docs` turns it into the table of docs/benchmarks.md.
"""

import json
import os
import platform
import sys
import time
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np

import attemper

ROUNDS = 7
SHAPES = [(8, 128, 64), (8, 512, 64), (8, 2048, 64), (1, 8192, 64)]


def plain(q, k, v, is_causal):
    """What one writes by hand: the matrix, softmax, and the statistics from the weights."""
    s = np.matmul(q, np.swapaxes(k, -1, -2)) * np.float32(q.shape[-1] ** -0.5)
    n = np.full(s.shape[-2], s.shape[-1])
    if is_causal:
        s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf)
        n = np.arange(1, s.shape[-2] + 1)
    m = s.max(axis=-1, keepdims=True)
    e = np.exp(s - m)
    total = e.sum(axis=-1, keepdims=True)
    p = e / total
    shown = np.where(s == -np.inf, 0, s)
    mean = shown.sum(axis=-1) / n
    spread = np.where(s == -np.inf, 0, s - mean[..., None])
    entropy = (m + np.log(total))[..., 0] - (p * shown).sum(axis=-1)
    return p @ v, m, entropy, (p * p).sum(axis=-1), mean, np.sqrt((spread * spread).sum(axis=-1) / n)


def main() -> int:
    # Where Numba is installed its kernels would be taken; benchmarks/cpu.py is about them.
    attend = partial(attemper.attend, backend="numpy")
    rng = np.random.default_rng(0)
    rows = []
    for heads, length, head_dim in SHAPES:
        q, k, v = rng.standard_normal((3, heads, length, head_dim), dtype=np.float32)
        for is_causal in (False, True):
            case = f"{heads} × {length} × {head_dim}{', causal' if is_causal else ''}"
            ways = {
                "ours": lambda q=q, k=k, v=v, c=is_causal: attend(q, k, v, is_causal=c).output,
                "plain": lambda q=q, k=k, v=v, c=is_causal: plain(q, k, v, c)[0],
            }
            assert np.abs(ways["ours"]() - ways["plain"]()).max() < 1e-5
            seconds = {name: [] for name in ways}
            for _ in range(ROUNDS):
                for name, way in ways.items():
                    start = time.perf_counter()
                    way()
                    seconds[name].append(time.perf_counter() - start)
            memory = {name: _peak_mb(way) for name, way in ways.items()}
            # The ratio of each round, so that a disturbance hits both sides or falls out with the median.
            speed = float(np.median(np.divide(seconds["plain"], seconds["ours"])))
            rows.append({"case": case, "speed": speed, "memory_mb": memory["ours"], "plain_memory_mb": memory["plain"]})
            print(
                f"{case:<24} {speed:5.2f}×  {memory['ours']:7.1f} MB  against {memory['plain']:7.1f} MB",
                file=sys.stderr,
            )
    record = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, NumPy {np.__version__}",
        "rounds": ROUNDS,
        "rows": rows,
    }
    path = Path(__file__).parent / "results" / "numpy_road.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _peak_mb(way):
    tracemalloc.start()
    way()
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return peak


if __name__ == "__main__":
    sys.exit(main())
