"""The kernels for CUDA as Triton compiles them for a Hopper GPU, and the emulator that runs them here.

`python tests/test_ptx.py "read, 64" 5` runs some of them in five orders of events. `make test-ptx` takes them from the
oldest Triton that is supported, whose compiler has faults of its own.
"""

import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from attemper import attend, read

pytest.importorskip("triton")
from ptx_emulator import DeadlockError, Kernel, Machine, Memory, PTXError, RaceError

# ---------------------------------------------------------------------------------------------------------------------
# Kernels of ours. They are compiled in a process of their own, for in this one Triton interprets.


def draw(queries, keys, head_dim, *, heads=2, kv_heads=None, batch=1, dtype=torch.bfloat16):
    numbers = torch.Generator().manual_seed(queries + keys + head_dim)
    lengths = ((heads, queries), (kv_heads or heads, keys), (kv_heads or heads, keys))
    return [torch.randn(batch, *x, head_dim, generator=numbers).to(dtype) for x in lengths]


FIELDS = (
    "max_logit", "logsumexp", "entropy", "expected_score", "collision", "largest_weight", "score_mean", "score_std",
    "first_key_weight", "visible_keys", "nonfinite", "sink_mass",
)  # fmt: skip


def near(name, found, right, digits):
    """As near as so many digits of the largest, and nearer than zeros would be."""
    found, right = found.double(), right.double()
    there = right.isfinite()
    assert (found.isfinite() == there).all(), name
    if there.any() and right[there].any():
        size = right[there].abs().max()
        assert (found - right)[there].abs().max() <= digits * size, name


def readings_agree(found, right):
    for name in FIELDS:
        x, y = getattr(found, name), getattr(right, name)
        if x is not None and y is not None:
            near(name, x, y, 2e-5)


def forward(q, k, v, digits=1e-2, **options):
    """The same as in float64."""
    found = attend(q, k, v, backend="cuda", **options)
    right = attend(q.double(), k.double(), v.double(), backend="torch", **options)
    near("output", found.output, right.output, digits)
    readings_agree(found.reading, right.reading)


def statistics(q, k, **options):
    readings_agree(read(q, k, backend="cuda", **options), read(q.double(), k.double(), backend="torch", **options))


def backward(*operands, **options):
    found, right = [], []
    for results, backend, dtype in ((found, "cuda", operands[0].dtype), (right, "torch", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in operands]
        output, reading = attend(*leaves, backend=backend, stats=("pressure", "gradient_flow"), **options)
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        results += torch.autograd.grad(output, leaves, upstream)
        results += [reading.pressure, reading.gradient_flow]
    for name, x, y in zip(("dq", "dk", "dv", "pressure", "gradient_flow"), found, right, strict=True):
        if name == "gradient_flow":  # not a number where rows see one key or none
            x, y = (torch.where(right[-1].isfinite(), z.double(), 0.0) for z in (x, y))
        near(name, x, y, 1e-2)


def reads(head_dim, modules):
    for queries, keys in ((70, 64), (200, 420)):
        q, k, _ = draw(queries, keys, head_dim)
        for options in ({}, {"is_causal": True}, {"window": (90, 30)}, {"is_causal": True, "query_offset": -150}):
            statistics(q, k, **options)
    q, k, _ = draw(140, 300, head_dim, batch=2)
    statistics(q, k, key_lengths=torch.tensor([150, 0]))
    # Two share a processor, each of which takes a kilobyte more.
    assert modules.SHARED["_kernel"] <= (228 // 2 - 1) * 1024


def forwards(head_dim, modules):
    square, (q, k, v) = draw(260, 260, head_dim), draw(200, 420, head_dim)
    for stats in ("all", "none"):
        forward(q, k, v, stats=stats)
        forward(*square, is_causal=True, stats=stats)
    forward(q, k, v, window=(90, 30), sinks=torch.tensor([0.5, 2.0]))
    forward(*draw(200, 300, head_dim, heads=4, kv_heads=2), enable_gqa=True)


def portables(head_dim, modules):
    modules._form.gluon = lambda name: None
    modules._launch.splits_for = lambda *given: 1
    q, k, v = draw(200, 330, head_dim)
    for stats, options in itertools.product(("all", "none"), ({}, {"is_causal": True}, {"window": (90, 30)})):
        forward(q, k, v, stats=stats, **options)
    v[0, 0, 50], v[0, 1, 130] = torch.nan, torch.inf
    options = {"is_causal": True}
    found = attend(q, k, v, backend="cuda", **options).output
    right = attend(q.double(), k.double(), v.double(), backend="reference", **options).output
    torch.testing.assert_close(found.double(), right, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert 0 < right.isfinite().all(-1).sum() < 400


def moments(head_dim, modules):
    everywhere = dict.fromkeys(itertools.product((64, 128), (False, True)), (64, 64))
    modules._moments.SUMMED_KEYS = everywhere
    square, (q, k, v) = draw(260, 260, head_dim), draw(200, 420, head_dim)
    forward(q, k, v)
    statistics(q, k)
    forward(*square, is_causal=True)
    statistics(*square[:2], is_causal=True)


def gradients(head_dim, modules):
    backward(*draw(200, 260, head_dim))
    backward(*draw(200, 200, head_dim), is_causal=True)
    backward(*draw(140, 200, head_dim, heads=4, kv_heads=2), window=(90, 30), sinks=torch.ones(4), enable_gqa=True)


def portable_gradients(head_dim, modules):
    modules._form.gluon = lambda name: None
    mask = torch.rand(140, 150, generator=torch.Generator().manual_seed(0)) > 0.3
    backward(*draw(140, 150, head_dim), is_causal=True)
    backward(*draw(140, 150, head_dim), attn_mask=mask)


def few_queries(head_dim, modules):
    for queries, options in ((1, {}), (2, {"is_causal": True, "query_offset": "bottom-right"})):
        forward(*draw(queries, 1100, head_dim, heads=4, kv_heads=2), enable_gqa=True, **options)


def in_32_bits(head_dim, modules):
    operands = draw(70, 90, head_dim, dtype=torch.float32)
    forward(*operands, digits=1e-5, is_causal=True)
    forward(*operands, digits=1e-5, attn_mask=torch.zeros(70, 90), softcap=2.0)


CASES = {
    f"{name}, {head_dim}": (case, head_dim)
    for name, case, head_dims in (
        ("read", reads, (64, 128)),
        ("forward", forwards, (64, 128)),
        ("portable", portables, (64, 128)),
        ("moments", moments, (64, 128)),
        ("gradients", gradients, (64, 128)),
        ("portable gradients", portable_gradients, (64,)),
        ("few queries", few_queries, (128,)),
        ("float32", in_32_bits, (64,)),
    )
    for head_dim in head_dims
}


def main(name, seeds="1"):
    import ptx_launch

    launches = ptx_launch.pretend()
    case, head_dim = CASES[name]
    for seed in range(int(seeds)):
        launches.seed = seed
        case(head_dim, ptx_launch)
    print(*sorted(set(launches.names)))  # noqa: T201


@pytest.mark.parametrize("name", CASES)
def test_what_the_compiler_makes(name):
    env = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", __file__, name]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    expected = {
        "forward": "_kernel careful_kernel opening_kernel",
        "few queries": "careful_kernel forward_kernel merge_kernel",
        "portable": "careful_kernel forward_kernel",
    }
    assert done.stdout.strip() == expected.get(name.partition(",")[0], done.stdout.strip())


# ---------------------------------------------------------------------------------------------------------------------
# The emulator, on a kernel that one would not have to compile: the first warp hands numbers to the second, which
# doubles them, some at a time, and the copy engine brings them.

PASSED_ON = """
.visible .entry passed_on(
	.param .align 64 .b8 passed_on_param_0[128],
	.param .u64 .ptr .global .align 1 passed_on_param_1,
	.param .u32 passed_on_param_2
)
.reqntid 64
{
	.reg .pred 	%p<9>;
	.reg .b32 	%r<20>;
	.reg .b64 	%rd<9>;
	mov.u32 	%r1, %tid.x;
	setp.eq.b32 	%p1, %r1, 0;
	mov.b32 	%r2, global_smem;
	add.s32 	%r3, %r2, 256;
	add.s32 	%r4, %r2, 264;
	@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
	@%p1 mbarrier.init.shared::cta.b64 [%r4], 1;
	bar.sync 	0;  // all know that the barriers are there
	ld.param.b32 	%r5, [passed_on_param_2];
	mov.b32 	%r6, 0;
	mov.b32 	%r7, 0;
	setp.lt.u32 	%p2, %r1, 32;
	@%p2 bra 	$L__BB0_1;
	bra.uni 	$L__BB0_3;
$L__BB0_1:
	cvta.param.u64 	%rd1, passed_on_param_0;
	xor.b32 	%r8, %r7, 1;
{
	.reg .pred complete;
	waitLoop:
	mbarrier.try_wait.parity.shared.b64 complete, [%r4], %r8;  // until the place is free
	@!complete bra.uni waitLoop;
}
	@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
	shl.b32 	%r9, %r6, 5;
	@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1, {0, %r6}], [%r3];
	add.s32 	%r6, %r6, 1;
	xor.b32 	%r7, %r7, 1;
	setp.lt.s32 	%p3, %r6, %r5;
	@%p3 bra 	$L__BB0_1;
	ret;
$L__BB0_3:
	and.b32 	%r10, %r1, 31;
	shl.b32 	%r11, %r10, 2;
	add.s32 	%r12, %r2, %r11;
{
	.reg .pred complete;
	waitLoop:
	mbarrier.try_wait.parity.shared.b64 complete, [%r3], %r7;  // until numbers are there
	@!complete bra.uni waitLoop;
}
	ld.shared.b32 	%r13, [%r12];
	bar.warp.sync 	-1;
	setp.eq.b32 	%p4, %r10, 0;
	@%p4 mbarrier.arrive.shared::cta.b64 _, [%r4];
	add.f32 	%r14, %r13, %r13;
	ld.param.b64 	%rd2, [passed_on_param_1];
	shl.b32 	%r15, %r6, 5;
	or.b32 	%r16, %r15, %r10;
	mul.wide.s32 	%rd3, %r16, 4;
	add.s64 	%rd4, %rd2, %rd3;
	st.global.b32 	[%rd4], %r14;
	add.s32 	%r6, %r6, 1;
	xor.b32 	%r7, %r7, 1;
	setp.lt.s32 	%p5, %r6, %r5;
	@%p5 bra 	$L__BB0_3;
	ret;
}
	// -- End function
"""

ARRIVE = "	@%p4 mbarrier.arrive.shared::cta.b64 _, [%r4];\n"
FAULTS = {
    "no wait for numbers": (r"\{\s*\.reg[^}]*until numbers[^}]*\}", "", PTXError),
    "no wait for a place": (r"\{\s*\.reg \.pred complete;[^}]*until the place[^}]*\}", "", PTXError),
    "given back too early": (r"(\tld.shared.b32[^\n]*\n)([^@]*)(\t@%p4 mbarrier[^\n]*\n)", r"\2\3\1", RaceError),
    "not given back": (re.escape(ARRIVE), "", DeadlockError),
    "too many bytes": (r"\[%r3\], 128;", "[%r3], 144;", DeadlockError),
    "too few": (r"\[%r3\], 128;", "[%r3], 112;", PTXError),
    "given back by two": (re.escape(ARRIVE), 2 * ARRIVE, PTXError),
    "barriers that nobody knows": (r"\tbar.sync[^\n]*", "", PTXError),
    "the other phase": (r"\[%r3\], %r7;", "[%r3], %r8;", (RaceError, DeadlockError)),
    "an instruction that is not known": (r"add\.f32", "tanh.approx.f32", PTXError),
    "beyond a tensor": (r"shl.b32 	%r15, %r6, 5;", "shl.b32 	%r15, %r6, 9;", PTXError),
    "not aligned": (r"shl.b32 	%r11, %r10, 2;", "shl.b32 	%r11, %r10, 1;", PTXError),
    "a part of a warp at a barrier": (r"\tbar.sync", "	@%p1 ret;\n	bar.sync", PTXError),
}


class TestEmulator:
    def run(self, ptx=PASSED_ON, seed=0, times=4):
        numbers, doubled = np.arange(32 * times, dtype=np.float32), np.zeros(32 * times, np.float32)
        memory = Memory()
        for start, x in ((1 << 20, numbers), (1 << 30, doubled)):
            memory.add(start, x.view(np.uint8))
        tensor = memory.describe(1 << 20, [32, times], [128], [32, 1], 0, 4)
        given = np.uint64(tensor), np.uint64(1 << 30), np.uint32(times)
        kernel = Kernel(ptx)
        given = {name: x for (_, name, _), x in zip(kernel.parameters, given, strict=True)}
        Machine(kernel, 512, given, memory=memory, seed=seed).run()
        np.testing.assert_array_equal(doubled, 2 * numbers)

    @pytest.mark.parametrize("seed", range(5))
    def test_without_a_fault(self, seed):
        self.run(seed=seed)

    @pytest.mark.parametrize("name", FAULTS)
    def test_a_fault(self, name):
        old, new, error = FAULTS[name]
        broken, count = re.subn(old, new, PASSED_ON)
        assert count == 1
        for seed in range(5):
            with pytest.raises(error):
                self.run(broken, seed)

    def test_who_waits_for_what(self):
        with pytest.raises(DeadlockError, match="warp 0 waits for phase 0 of the barrier at 264, 0 of 1 arrivals"):
            self.run(PASSED_ON.replace(ARRIVE, ""))


if __name__ == "__main__":
    main(*sys.argv[1:])
