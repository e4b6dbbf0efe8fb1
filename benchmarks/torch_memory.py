"""Peak memory of the torch road against the length: one causal head of 64, float32, forward, then forward and backward.

Each measurement is a process of its own, whose high-water mark is read before and after. Writes
benchmarks/results/torch_memory.json; `make docs` turns it into the table of docs/attend.md.
"""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

LENGTHS = (2048, 4096, 8192, 16384, 32768)


def measure(length: int, backward: bool) -> float:
    """MB above what was there before the call; run in a process of its own."""
    import torch

    import attemper

    def peak():
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024

    # Warm up, so that libraries and thread pools are there before.
    small = torch.randn(1, 64, 64, requires_grad=True)
    attemper.attend(small, small, small, backend="torch").output.sum().backward()
    q, k, v = (torch.randn(1, length, 64, requires_grad=backward) for _ in range(3))
    before = peak()
    output, reading = attemper.attend(q, k, v, is_causal=True, backend="torch")
    if backward:
        output.backward(torch.ones_like(output))
        assert reading.pressure is not None
    return peak() - before


def main() -> int:
    if len(sys.argv) > 1:
        print(measure(int(sys.argv[1]), sys.argv[2] == "backward"))
        return 0
    import torch

    rows = []
    for length in LENGTHS:
        row = {"length": length, "matrix_mb": length**2 * 4 / 2**20}
        for kind in ("forward", "backward"):
            command = [sys.executable, __file__, str(length), kind]
            row[f"{kind}_mb"] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append(row)
        print(row, file=sys.stderr)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__.partition('+')[0]}"
    path = Path(__file__).parent / "results" / "torch_memory.json"
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
