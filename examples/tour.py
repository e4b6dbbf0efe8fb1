"""A minute's tour: the temperature of attention, read from inside the softmax.

Attention compares queries with keys by dot products. Their spread grows with the head's width, and the softmax of
widely spread scores puts everything on one key. Dividing by √d_k holds the spread at 1. Run this and see.
"""

import sys
import time

import numpy as np

import attemper

KEYS = 4096
BAR = 30


def bar(share: float) -> str:
    """A share of 1 as a bar."""
    return "█" * round(BAR * share) + "·" * (BAR - round(BAR * share))


def main() -> int:
    """Print the tables."""
    rng = np.random.default_rng(0)
    for scale, title in (("sqrt_dk", "divided by √d_k"), ("unscaled", "not divided")):
        print(f"\n{title}: random q and k, {KEYS} keys")
        print(f"{'d_k':>6}{'score std':>11}{'max logit':>11}{'flow':>7}  entropy, from one key to all alike")
        for head_dim in (4, 16, 64, 256, 1024):
            q = rng.standard_normal((4, 256, head_dim), dtype=np.float32)
            k = rng.standard_normal((4, KEYS, head_dim), dtype=np.float32)
            reading = attemper.read(q, k, scale=scale)
            entropy = float(reading.normalized_entropy.mean())
            print(
                f"{head_dim:>6}{reading.score_std.mean():>11.2f}{reading.max_logit.max():>11.1f}"
                f"{reading.flow.mean():>7.2f}  {bar(entropy)} {entropy:.2f}"
            )
    length = 8192
    print(f"\nAll of that without the matrix: {length} queries × {length} keys, causal", end=" … ", flush=True)
    q, k, v = rng.standard_normal((3, length, 64), dtype=np.float32)
    start = time.perf_counter()
    _, reading = attemper.attend(q, k, v, is_causal=True)
    matrix = length**2 * 4 / 2**30
    print(f"{time.perf_counter() - start:.1f} s; the matrix alone would be {matrix:.2f} GiB.\n\n{reading}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
