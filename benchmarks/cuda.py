"""The CUDA backend against torch's fused attention on a GPU: forward, backward, read, memory.

What is compared runs in one process, in turn; a number is the median over rounds of the peer's time over ours, by
events on the device, with the host ahead of it. Writes benchmarks/results/cuda-DEVICE.json, in which problems that were
not measured this time stay as they were, each with its date. Minutes, most of them compilation: with `--compile 12`
twelve processes at once do that first, and Triton keeps it on disk.
"""

import argparse
import functools
import itertools
import json
import math
import platform
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

if __name__ != "__main__":
    # torch asks for a package of this name, and the scripts beside this one would have it find this file.
    raise ImportError(f"{__name__} is a program")

HERE = Path(__file__).resolve().parent
sys.path = [place for place in sys.path if Path(place).resolve() != HERE]

import torch  # noqa: E402
import triton  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from attemper import attend, read  # noqa: E402
from attemper._backends.cuda import _form  # noqa: E402
from attemper._bench._cuda import events  # noqa: E402
from attemper._reading import MEASURED  # noqa: E402

RESULTS = HERE / "results"
TOKENS = 16384
SUMS = ("max_logit", "logsumexp", "entropy", "collision")
PRESSURE = tuple(name for name in MEASURED if name != "gradient_flow")


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


def flex(q, k, v, causal):
    """FlexAttention, compiled, with the largest score of each row."""
    return compiled_flex()(q, k, v, block_mask=causal_blocks(q.shape[2]) if causal else None)


@functools.cache
def compiled_flex():
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    aux = AuxRequest(lse=True, max_scores=True)
    return torch.compile(lambda q, k, v, block_mask: flex_attention(q, k, v, block_mask=block_mask, return_aux=aux))


@functools.cache
def causal_blocks(length):
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda _b, _h, i, j: i >= j, None, None, length, length)


def ours(stats):
    return lambda q, k, v, causal: attend(q, k, v, is_causal=causal, stats=stats, backend="cuda")


def portable(call):
    """The kernels that are not for Hopper alone."""

    def run(*operands):
        keep, _form.gluon = _form.gluon, lambda _name: None
        try:
            return call(*operands)
        finally:
            _form.gluon = keep

    return run


def reading(q, k, _v, causal):
    return read(q, k, is_causal=causal, backend="cuda")


def seconds(functions, rounds, inner=3):
    """The median time of each, in turn."""
    for function in functions:
        function()
        function()
    torch.cuda.synchronize()
    if not rounds:
        return [math.nan] * len(functions)
    times = [[] for _ in functions]
    for _ in range(rounds):
        for found, function in zip(times, functions, strict=True):
            found.append(events(function, inner))
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
    calls |= {"read": reading, "portable none": portable(ours("none")), "portable all": portable(ours("all"))}
    if length == 8192:
        calls["flex"] = flex
    functions = {name: (lambda call=call: call(*plain, causal)) for name, call in calls.items()}
    for name, call in {"cudnn": cudnn, "pressure": ours(PRESSURE), "flow": ours("all")}.items():
        functions[f"{name}, backward too"] = backward_of(call, q, k, v, causal, grad)
    functions["flow, backward too, own"] = deterministic(backward_of(ours("all"), q, k, v, causal, grad))
    found = dict(zip(functions, seconds(list(functions.values()), rounds), strict=True))
    row = {"head_dim": dim, "heads": heads, "length": length, "causal": causal, "seconds": found}
    if length == 8192 and rounds:
        torch.cuda.empty_cache()
        found["eager"] = seconds([lambda: eager(*plain, causal)], 3, inner=1)[0]
        row["bytes"] = {name: extra_bytes(lambda call=call: call(*plain, causal)) for name, call in
                        {"eager": eager, "all": ours("all"), "cudnn": cudnn}.items()}  # fmt: skip
    return row


def deterministic(function):
    """With gradients by our own kernels, which add in a fixed order; new memory is not filled, as torch would."""

    def run():
        keep, torch.utils.deterministic.fill_uninitialized_memory = (
            torch.utils.deterministic.fill_uninitialized_memory,
            False,
        )
        torch.use_deterministic_algorithms(True)
        try:
            return function()
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = keep

    return run


def extra_bytes(function):
    """The most memory at once that a call takes beyond what was there, its results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def rand(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def windows_and_groups(dim, heads, rounds):
    q, k, v = (rand(1, heads, TOKENS, dim) for _ in range(3))
    few = [x[:, : heads // 4].contiguous() for x in (k, v)]
    causal = functools.partial(attend, is_causal=True, backend="cuda")
    full, whole, window, grouped = seconds(
        [
            lambda: attend(q, k, v, backend="cuda"),
            lambda: causal(q, k, v),
            lambda: causal(q, k, v, window=(1023, 0)),
            lambda: causal(q, *few, enable_gqa=True),
        ],
        rounds,
    )
    return [
        {"what": "window of 1024 in 16384, beside full", "head_dim": dim, "times as fast": full / window},
        {"what": "window of 1024 in 16384, beside causal", "head_dim": dim, "times as fast": whole / window},
        {"what": "grouped heads, 4 to 1, beside plain, causal", "head_dim": dim, "times as fast": whole / grouped},
    ]


def decoding(rounds):
    q, k, v = rand(16, 32, 1, 128), rand(16, 8, 32768, 128), rand(16, 8, 32768, 128)
    block = torch.empty(2**31, dtype=torch.int8, device="cuda")
    decode, copy = seconds(
        [lambda: attend(q, k, v, enable_gqa=True, backend="cuda"), lambda: block[: 2**30].copy_(block[2**30 :])], rounds
    )
    rate = 2 * k.numel() * k.element_size() / decode
    what = "decode, 1 query and 32768 keys, batch 16, heads 32 / 8"
    return {"what": what, "head_dim": 128, "bytes per second": rate, "of a copy": rate / (2**31 / copy)}


def compile_in_processes(count, *kinds, special):
    """Run everything without timing it, a problem a process, and windows, groups and decoding in one more."""
    problems = list(itertools.product(*kinds))
    options = [["--dims", dim, "--lengths", length, "--seen", seen, "--no-special"] for dim, length, seen in problems]
    if special:
        options.append(["--dims", ""])
    programs = [[sys.executable, __file__, "--rounds", "0", *given] for given in options]
    with ThreadPoolExecutor(count) as pool:
        done = list(pool.map(lambda program: subprocess.run(program, capture_output=True, text=True), programs))
    for given, one in zip(options, done, strict=True):
        if one.returncode:
            raise SystemExit(f"{' '.join(given)}:\n{one.stderr[-4000:]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="2048,8192,16384")
    parser.add_argument("--dims", default="128,64")
    parser.add_argument("--seen", default="full,causal")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-special", dest="special", action="store_false", help="no windows, groups and decoding")
    parser.add_argument("--to", type=Path, help="where to write instead")
    parser.add_argument("--compile", type=int, default=0, metavar="PROCESSES", help="so many compile beforehand")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA GPU here.")
    dims, lengths, seen = (x.split(",") for x in (given.dims, given.lengths, given.seen))
    if not {"full", "causal"}.issuperset(seen):
        parser.error(f"--seen takes full, causal or both, not {given.seen}")
    if given.compile:
        compile_in_processes(given.compile, dims, lengths, seen, special=given.special)
    name = torch.cuda.get_device_name()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    versions["cudnn"] = torch.backends.cudnn.version()
    path = given.to or RESULTS / f"cuda-{name.lower().replace(' ', '-')}.json"
    record = {"device": name, "versions": versions, "rows": [], "special": []}
    if path.exists():
        before = json.loads(path.read_text())
        if before["versions"] == versions:
            record = before

    def keep(part, *names, found):
        # At once: what was measured is not lost with what comes after it.
        measured = {"date": datetime.now(UTC).date().isoformat(), "rounds": given.rounds}
        for row in found:
            known = [i for i, x in enumerate(record[part]) if all(x[name] == row[name] for name in names)]
            place = slice(known[0], known[0] + 1) if known else slice(len(record[part]), None)
            record[part][place] = [row | measured]
        if given.rounds:
            path.write_text(json.dumps(record, indent=1) + "\n")

    for dim, heads in ((128, 16), (64, 32)):
        if str(dim) not in dims:
            continue
        for length in map(int, lengths):
            for kind in seen:
                row = measure(dim, heads, length, kind == "causal", given.rounds)
                keep("rows", "head_dim", "length", "causal", found=[row])
                times = row["seconds"]
                ratios = "  ".join(f"{n} {times['cudnn'] / t:.2f}" for n, t in times.items() if "backward" not in n)
                both = "  ".join(
                    f"{n} {times['cudnn, backward too'] / t:.2f}" for n, t in times.items() if "backward" in n
                )
                print(f"d {dim} n {length} {kind}: {ratios}  | {both}", file=sys.stderr, flush=True)
    if given.special:
        for dim, heads in ((128, 16), (64, 32)):
            keep("special", "what", "head_dim", found=windows_and_groups(dim, heads, given.rounds))
        keep("special", "what", "head_dim", found=[decoding(given.rounds)])
        print(json.dumps(record["special"], indent=1), file=sys.stderr, flush=True)
    if given.rounds:
        print(f"wrote {path}", file=sys.stderr)


main()
