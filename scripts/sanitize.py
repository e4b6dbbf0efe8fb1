"""Every kernel for CUDA once or twice, on small problems, for compute-sanitizer; from the root of the repository:

    python scripts/sanitize.py hopper warm          # compile all first, in several processes, without the sanitizer
    compute-sanitizer --tool memcheck python scripts/sanitize.py hopper
    compute-sanitizer --tool racecheck --print-limit 400 python scripts/sanitize.py hopper

`portable` in place of `hopper` runs the kernels that are not for Hopper alone; `hopper 3/12` the fourth of every twelve
cases. cuDNN is off, so that what is reported is about these kernels. `control` runs none of them, but a kernel in which
one warp, or two, hand numbers to four others as the producer does its letters, one at a time, with a barrier both ways;
then the same with a number from each thread of a warp. What racecheck reports of that is about Triton's way of starting
warps and about what the tool can see.

Take the newest compute-sanitizer there is (`pip install nvidia-cuda-sanitizer-api`): that of CUDA 13.0, 2025.3, reports
races behind mbarriers that are none, says the list of what 2025.4, 2026.1 and 2026.3 mended. `--num-cuda-barriers 64`
where it does not find out by itself how many there are.
"""

import argparse
import functools
import itertools
import subprocess
import sys
import time

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attemper import attend, read
from attemper._attend import gradient_flow_beside
from attemper._backends.cuda import _cudnn, _form, _moments

TOKENS, HEADS, KEYS = 300, 2, 4096
MASKS = {"full": {}, "causal": {"is_causal": True}, "window": {"window": (40, 0)}}
LEVELS = {"none": "none", "some": ("max_logit", "logsumexp", "entropy", "collision"), "all": "all"}

taking = False  # what _cudnn.takes says
_cudnn.takes = lambda _call: taking


def never(*_args, **_kwargs):
    raise AssertionError("cuDNN was called")


_cudnn.gradients = never
torch.backends.cuda.enable_cudnn_sdp(False)
torch.utils.deterministic.fill_uninitialized_memory = False  # no kernels but ours


@functools.cache
def operands(depth, queries=TOKENS, keys=TOKENS):
    """q, k, v and a gradient, drawn on the host: no kernels of torch's."""
    numbers = torch.Generator().manual_seed(depth)
    shapes = [queries, keys, keys, queries]
    return [torch.randn(1, HEADS, n, depth, generator=numbers).bfloat16().to("cuda") for n in shapes]


def sound(what, reading, *tensors):
    """Ask on the host, so that no other kernel runs."""
    torch.cuda.synchronize()
    for x in tensors:
        assert x.detach().cpu().float().isfinite().all(), what
    for name in ("logsumexp", "entropy", "output_norm", "score_std"):
        x = None if reading is None else getattr(reading, name)
        assert x is None or x.cpu().isfinite().all(), (what, name)


def forward(depth, mask, level):
    q, k, v, _ = operands(depth)
    output, reading = attend(q, k, v, **MASKS[mask], stats=LEVELS[level], backend="cuda")
    sound("forward", reading, output)


def beside(depth, mask):
    q, k, *_ = operands(depth)
    sound("read", read(q, k, **MASKS[mask], backend="cuda"))


def backward(depth, mask, level):
    """Our own gradients: with the gradient flow and the pressure ("all"), or alone and deterministic ("none")."""
    *given, grad = operands(depth)
    q, k, v = (x.detach().requires_grad_() for x in given)
    torch.use_deterministic_algorithms(level == "none")
    try:
        output, reading = attend(q, k, v, **MASKS[mask], stats=LEVELS[level], backend="cuda")
        output.backward(grad)
    finally:
        torch.use_deterministic_algorithms(False)
    sound("backward", None, output, q.grad, k.grad, v.grad)
    if level == "all":
        arrived, *rows = reading.gradients.cpu().split([1, HEADS * TOKENS, HEADS * TOKENS])
        assert arrived == 1, "no gradient arrived"
        assert rows[1].isfinite().all(), "pressure"


def flow(depth, mask):
    """The gradient flow beside cuDNN's gradients, which nobody computes here."""
    global taking
    q, k, v, grad = operands(depth)
    output, reading = attend(q, k, v, **MASKS[mask], stats=("max_logit", "largest_weight", "logsumexp"), backend="cuda")
    taking = True
    try:
        found = gradient_flow_beside(q, k, v, output, grad, reading, **MASKS[mask])
    finally:
        taking = False
    # A row that sees one key has none.
    sound("flow", None, found.cpu()[..., int(mask != "full") :])


def moments(depth, mask):
    """Of the scores from sums over keys, as in long calls."""
    before = _moments.SUMMED_KEYS, _moments.PORTABLE_SUMMED_KEYS
    everywhere = dict.fromkeys(itertools.product((64, 128), (False, True)), (64, 64))
    _moments.SUMMED_KEYS = _moments.PORTABLE_SUMMED_KEYS = everywhere
    try:
        forward(depth, mask, "all")
        beside(depth, mask)
    finally:
        _moments.SUMMED_KEYS, _moments.PORTABLE_SUMMED_KEYS = before


def decoding(depth, level):
    q, k, v, _ = operands(depth, 1, KEYS)
    output, reading = attend(q, k, v, stats=LEVELS[level], backend="cuda")
    sound("decoding", reading, output)


def cases():
    for depth, mask in itertools.product((64, 128), MASKS):
        for level in LEVELS:
            yield forward, depth, mask, level
        yield beside, depth, mask
        yield backward, depth, mask, "all"
        yield backward, depth, mask, "none"
        yield flow, depth, mask
        if mask != "window":
            yield moments, depth, mask
    for depth, level in itertools.product((64, 128), ("none", "all")):
        yield decoding, depth, level


@gluon.jit
def tell(given, WARPS: gl.constexpr, COUNT: gl.constexpr):  # noqa: N803
    box, full, empty, _, times = given
    for i in range(times):
        mbarrier.wait(empty.index(0), (i & 1) ^ 1)
        box.index(0).store(gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [WARPS], [0])) + i)
        mbarrier.arrive(full.index(0))


@gluon.jit
def listen(given, COUNT: gl.constexpr):  # noqa: N803
    box, full, empty, heard, times = given
    for i in range(times):
        mbarrier.wait(full.index(0), i & 1)
        number = gl.max(box.index(0).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
        mbarrier.arrive(empty.index(0))
        gl.store(heard + i, number - (COUNT - 1))


@gluon.jit
def control_kernel(heard, times, WARPS: gl.constexpr, COUNT: gl.constexpr):  # noqa: N803
    box = gl.allocate_shared_memory(gl.int32, [1, COUNT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(empty.index(0), count=1)
    given = (box, full, empty, heard, times)
    gl.warp_specialize([(listen, (given, COUNT)), (tell, (given, WARPS, COUNT))], [WARPS], [24])


def control():
    for warps, count in ((1, 1), (2, 1), (1, 32)):
        heard = torch.full((8,), -1, dtype=torch.int32, device="cuda")
        print(f"numbers from {warps} warp(s), {count} at a time", flush=True)
        control_kernel[(1,)](heard, len(heard), warps, count, num_warps=4)
        assert heard.tolist() == list(range(len(heard))), heard
    return 0


ours = {}
"""How often the kernels for Hopper were called."""


def counted(function):
    def call(*args, **kwargs):
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        ours[name] = ours.get(name, 0) + 1
        return function(*args, **kwargs)

    return call


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", choices=("hopper", "portable", "control"))
    parser.add_argument("part", nargs="?", default="0/1", help="'warm', or which of how many parts of the cases")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA GPU here.")
    kernels, part = given.kernels, given.part
    if kernels == "control":
        return control()
    if part == "warm":
        count = 12
        running = [subprocess.Popen([sys.executable, __file__, kernels, f"{i}/{count}"]) for i in range(count)]
        return max(process.wait() for process in running)
    if kernels == "portable":
        _form.gluon = lambda _name: None
    else:
        for name, function in (("_hopper", "forward"), ("_hopper_to_queries", "run"), ("_hopper_to_keys", "run")):
            module = _form.gluon(name)
            assert module is not None, "there is no Gluon here"
            setattr(module, function, counted(getattr(module, function)))
    place, step = map(int, part.split("/"))
    start, failed = time.perf_counter(), 0
    for case, *arguments in itertools.islice(cases(), place, None, step):
        began = time.perf_counter()
        try:
            case(*arguments)
        except Exception as error:  # go on: what the others do is of interest too
            failed += 1
            print("FAILED", case.__name__, *arguments, f"{type(error).__name__}: {error}"[:300], flush=True)
        else:
            print(case.__name__, *arguments, f"{time.perf_counter() - began:.1f} s", flush=True)
    print(
        f"{kernels} {part}: {failed} failed, {time.perf_counter() - start:.0f} s, kernels for Hopper {ours}", flush=True
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
