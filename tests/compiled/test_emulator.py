"""What the emulator of compiled kernels finds in kernels that are wrong."""

import re

import numpy as np
import pytest
import torch
from hopper_cases import close, draw
from ptx_code import DeadlockError, Kernel, PTXError, RaceError
from ptx_emulator import Machine, Memory, run_together

# A kernel that one would not have to compile: the first warp hands numbers to the second, which doubles them, some at a
# time, and the copy engine brings them.

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


class TestWritten:
    def run(self, ptx=PASSED_ON, seed=0, times=4):
        numbers, doubled = np.arange(32 * times, dtype=np.float32), np.zeros(32 * times, np.float32)
        memory = Memory()
        for start, x in ((1 << 20, numbers), (1 << 30, doubled)):
            memory.add(start, x.view(np.uint8))
        tensor = memory.describe(1 << 20, [32, times], [128], [32, 1], 0, 4)
        given = np.uint64(tensor), np.uint64(1 << 30), np.uint32(times)
        kernel = Kernel(ptx)
        given = {name: x for (_, name, _), x in zip(kernel.parameters, given, strict=True)}
        run_together([Machine(kernel, 512, given, memory=memory)], seed)
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


# ---------------------------------------------------------------------------------------------------------------------

TOY = """
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait,
)

from attemper._backends.cuda._hopper_supply import _copy_in, _copy_out

@gluon.jit
def _producer(x_desc, tiles, full, empty, count):
    stage = 0
    phase = 1
    for i in range(count):
        mbarrier.wait(empty.index(stage), phase)  # WAIT EMPTY
        mbarrier.expect(full.index(stage), x_desc.block_type.nbytes)
        _copy_in(x_desc, [i * 64, 0], full.index(stage), tiles.index(stage))
        stage += 1
        if stage == 2:
            stage = 0
            phase ^= 1

@gluon.jit
def _consumer(x_desc, y_desc, tiles, out, full, empty, count):
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    stage = 0
    phase = 0
    for i in range(count):
        acc = gl.zeros([64, 64], gl.float32, L)
        mbarrier.wait(full.index(stage), phase)  # WAIT FULL
        tile = tiles.index(stage)
        # EARLY
        acc = warpgroup_mma(tile, tile.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))  # WAIT PRODUCT
        mbarrier.arrive(empty.index(stage))  # GIVE BACK
        tma.store_wait(0)  # WAIT STORE
        out.store(acc.to(gl.bfloat16))
        fence_async_shared()  # FENCE
        _copy_out(y_desc, [i * 64, 0], out)
        stage += 1
        if stage == 2:
            stage = 0
            phase ^= 1
    tma.store_wait(0)  # LAST WAIT

@gluon.jit
def kernel(x_desc, y_desc, count):
    tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], x_desc.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [64, 64], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (_consumer, (x_desc, y_desc, tiles, out, full, empty, count)),
            (_producer, (x_desc, tiles, full, empty, count)),
        ],
        [1],
        [24],
    )
"""

TOY_FAULTS = {
    "no wait for a copy": ("mbarrier.wait(full.index(stage), phase)  # WAIT FULL", "", RaceError),
    "no wait for a free place": ("mbarrier.wait(empty.index(stage), phase)  # WAIT EMPTY", "", PTXError),
    "a wait for the other phase": ("phase)  # WAIT FULL", "phase ^ 1)", (RaceError, DeadlockError)),
    "nobody gives back": ("mbarrier.arrive(empty.index(stage))  # GIVE BACK", "", DeadlockError),
    "given back before the product is there": ("# EARLY", "mbarrier.arrive(empty.index(stage))", PTXError),
    "too short a wait for a product": ("mma_wait(0, deps=(acc,))  # WAIT", "mma_wait(1, deps=(acc,))  #", PTXError),
    "no wait for a store": ("tma.store_wait(0)  # WAIT STORE", "", RaceError),
    "no last wait for a store": ("tma.store_wait(0)  # LAST WAIT", "", RaceError),
    "a copy that nobody waits for": (
        "range(count):\n        mbarrier.wait(empty", "range(count + 1):\n        mbarrier.wait(empty", PTXError
    ),
    "more bytes than come": ("block_type.nbytes", "block_type.nbytes + 16", DeadlockError),
    "a place that is not there": ("tiles.index(stage)\n        # EARLY", "tiles.index(stage + 1)", RaceError),
}  # fmt: skip


class TestCompiled:
    """A kernel that squares tiles of 64 rows."""

    def run(self, source=TOY, seed=0, rows=300):
        gl = pytest.importorskip("triton.experimental.gluon.language")
        from ptx_launch import Emulator, executed
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        x, y = draw(1, rows, 64), torch.full((rows, 64), 7.0, dtype=torch.bfloat16)
        layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
        descriptors = [TensorDescriptor(z, list(z.shape), [64, 1], [64, 64], layout) for z in (x, y)]
        Emulator(seed=seed).launch(executed("toy", source).kernel, 1, [*descriptors, -(-rows // 64)], num_warps=4)
        return x, y

    @pytest.mark.parametrize("seed", range(5))
    def test_without_a_fault(self, seed):
        x, y = self.run(seed=seed)
        tiles = torch.nn.functional.pad(x.double(), (0, 0, 0, 20)).unflatten(0, (5, 64))
        close(y, (tiles @ tiles.mT).flatten(0, 1)[:300], rtol=1e-2, atol=1e-2)

    @pytest.mark.parametrize("name", TOY_FAULTS)
    def test_a_fault(self, name):
        old, new, error = TOY_FAULTS[name]
        assert TOY.count(old) == 1
        for seed in range(5):
            with pytest.raises(error):
                self.run(TOY.replace(old, new), seed)

    def test_no_fence(self, monkeypatch):
        """The compiler sets fences of its own, so they are taken from what it has made."""
        import ptx_launch

        removed = []

        def without(ptx):
            less, count = re.subn(r"\tfence\.proxy\.async[^\n]*\n", "", ptx)
            removed.append(count)
            return Kernel(less)

        monkeypatch.setattr(ptx_launch, "_translated", without)
        with pytest.raises(RaceError, match="without a fence"):
            self.run()
        assert removed[0] > 0
