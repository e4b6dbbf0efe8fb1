"""The CUDA backend against torch's fused attention on a GPU: forward, backward, read, memory.

Everything runs in one process, in turn; a number is the median over rounds of the peer's time over ours, by events on
the device, with the host ahead of it. Writes benchmarks/results/cuda-DEVICE.json. Minutes, most of them compilation.
"""

import argparse
import json
import platform
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path

if __name__ != "__main__":
    # torch asks for a package of this name, and the scripts beside this one would have it find this file.
    raise ImportError(f"{__name__} is a program")

HERE = Path(__file__).resolve().parent
sys.path = [place for place in sys.path if Path(place).resolve() != HERE]

import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from attemper import attend, read  # noqa: E402

RESULTS = HERE / "results"
TOKENS = 16384
SUMS = ("max_logit", "logsumexp", "entropy", "collision")


def peer(backend):
    def call(q, k, v, causal):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


cudnn, flash = peer(SDPBackend.CUDNN_ATTENTION), peer(SDPBackend.FLASH_ATTENTION)


def eager(q, k, v, causal):
    """What people do today: the matrix, and statistics from it."""
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], device=q.device).triu(1).bool(), -torch.inf)
    logsumexp = scores.logsumexp(-1)
    weights = scores.softmax(-1)
    entropy = -(weights * (scores - logsumexp[..., None]).clamp(min=-1e30)).sum(-1)
    return weights.to(v.dtype) @ v, scores.amax(-1), logsumexp, entropy, weights.square().sum(-1)


def ours(stats):
    return lambda q, k, v, causal: attend(q, k, v, is_causal=causal, stats=stats, backend="cuda")


def reading(q, k, _v, causal):
    return read(q, k, is_causal=causal, backend="cuda")


def seconds(functions, rounds, inner=3):
    """The median time of each, in turn; the device sleeps while the host gets ahead."""
    for function in functions:
        function()
        function()
    torch.cuda.synchronize()
    times = [[] for _ in functions]
    for _ in range(rounds):
        for found, function in zip(times, functions, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(10_000_000)  # noqa: SLF001
            start.record()
            for _ in range(inner):
                function()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / inner / 1000)
    return [statistics.median(found) for found in times]


def backward_of(call, q, k, v, causal, grad):
    def run():
        output = call(q, k, v, causal)
        torch.autograd.grad(output[0] if isinstance(output, tuple) else output, (q, k, v), grad)

    return run


def measure(dim, heads, length, causal, rounds):
    shape = (TOKENS // length, heads, length, dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad = torch.randn_like(q)
    plain = [x.detach() for x in (q, k, v)]
    calls = {"cudnn": cudnn, "flash": flash, "none": ours("none"), "sums": ours(SUMS), "all": ours("all")}
    calls["read"] = reading
    functions = {name: (lambda call=call: call(*plain, causal)) for name, call in calls.items()}
    for name in ("cudnn", "all"):
        functions[f"{name}, backward too"] = backward_of(calls[name], q, k, v, causal, grad)
    found = dict(zip(functions, seconds(list(functions.values()), rounds), strict=True))
    if length == 8192:
        found["eager"] = seconds([lambda: eager(*plain, causal)], 3, inner=1)[0]
    return {"head_dim": dim, "heads": heads, "length": length, "causal": causal, "seconds": found}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="2048,8192,16384")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA GPU here.")
    rows = []
    for dim, heads in ((128, 16), (64, 32)):
        for length in map(int, given.lengths.split(",")):
            for causal in (False, True):
                row = measure(dim, heads, length, causal, given.rounds)
                rows.append(row)
                times = row["seconds"]
                ratios = "  ".join(f"{n} {times['cudnn'] / t:.2f}" for n, t in times.items() if "backward" not in n)
                both = times["cudnn, backward too"] / times["all, backward too"]
                kind = "causal" if causal else "full"
                print(f"d {dim} n {length} {kind}: {ratios}  backward too {both:.2f}", file=sys.stderr, flush=True)
    name = torch.cuda.get_device_name()
    import triton

    record = {
        "device": name,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "rows": rows,
    }
    path = RESULTS / f"cuda-{name.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)


main()
