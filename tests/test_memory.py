"""Memory grows with queries + keys: 65,536 × 65,536 in one head stays under 300 MB above what was there before.

The whole square, and with a window of 1,024 keys, whose tiles are cut differently.
"""

import subprocess
import sys

import pytest

MEASURE = r"""
import re, sys
import numpy as np, attemper
# The high-water mark of this process alone; getrusage's would start with that of the one that started it.
peak = lambda: int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) / 1024
n = 65536
k, v = np.random.default_rng(0).standard_normal((2, 1, n, 64), dtype=np.float32)
before = peak()
case, backend = sys.argv[1:]
if case == "window":
    output, reading = attemper.attend(k, k, v, is_causal=True, window=(1024, None), backend=backend)
    assert int(reading.visible_keys.sum()) == 1025 * n - 1024 * 1025 // 2
elif case == "whole":
    output, reading = attemper.attend(k, k, v, is_causal=True, backend=backend)
    assert int(reading.visible_keys.sum()) == n * (n + 1) // 2
else:
    np.ones((1536, n), dtype=np.float32)  # the matrix of 1,536 queries: what must not be built
assert case == "matrix" or np.isfinite(output).all()
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize(("case", "limit"), [("window", 300), ("whole", 300)])
def test_memory_is_linear(case, limit, backend):
    assert _megabytes(case, backend) < limit


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_measurement_sees_a_matrix():
    assert _megabytes("matrix", "none") > 300


def _megabytes(case, backend):
    run = subprocess.run([sys.executable, "-c", MEASURE, case, backend], check=True, capture_output=True, text=True)
    return float(run.stdout)
