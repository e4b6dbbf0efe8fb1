"""The Triton kernels: on a GPU where there is one, else in Triton's interpreter."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attemper import Attended, BackendError, _doctor, attend, read
from attemper._reading import choose
from attemper.testing import check_operator, compare
from attemper.testing._battery import battery

pytest.importorskip("triton")
from triton.compiler import CompiledKernel

from attemper._backends import _operator, cuda
from attemper._backends._operator import call_of, empty, empty_output, row_by_row, tiles
from attemper._backends.cuda import _cudnn, _form, _launch, _launch_backward, _moments, _ready
from attemper._problem import pose

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

triton_attend, triton_read = partial(attend, backend="cuda"), partial(read, backend="cuda")


def draw(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def three(queries=70, keys=90, dim=32, *, heads=2, kv_heads=None, value_dim=None, batch=1, dtype=torch.float32):
    kv_heads = heads if kv_heads is None else kv_heads
    return (
        draw(1, batch, heads, queries, dim, dtype=dtype),
        draw(2, batch, kv_heads, keys, dim, dtype=dtype),
        draw(3, batch, kv_heads, keys, dim if value_dim is None else value_dim, dtype=dtype),
    )


# Where kernels are compiled for each of its cases, several processes share it.
PARTS = 6 if DEVICE == "cuda" else 1


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_battery(dtype, part, monkeypatch):
    monkeypatch.setattr("attemper.testing._operator.battery", lambda *given: islice(battery(*given), part, None, PARTS))
    report = check_operator(triton_attend, framework="torch", device=DEVICE, backend="cuda", dtypes=[dtype])
    assert report.ok, str(report)
    assert len(report.rows) > 100 // PARTS


def fields_agree(found, expected, *, tolerance=2e-5):
    for name in choose("all"):
        value, right = getattr(found, name), getattr(expected, name)
        if value is not None and right is not None:
            np.testing.assert_allclose(
                value.double().cpu(), right.double().cpu(), rtol=tolerance, atol=tolerance, err_msg=name
            )


def agree(found, expected, *, tolerance=2e-5):
    torch.testing.assert_close(found.output.double(), expected.output, rtol=tolerance, atol=tolerance)
    fields_agree(found.reading, expected.reading, tolerance=tolerance)


def wide(operands):
    return [x.double() for x in operands]


SPLIT = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": "bottom-right"},
    "window": {"window": (300, None), "query_offset": "bottom-right"},
    "a mask that hides the first parts": {"attn_mask": torch.arange(2000, device=DEVICE) > 1500},
    "softcap, sinks": {"softcap": 2.0, "sinks": draw(9, 4)},
}


class TestSplits:
    """Few rows over many keys: each part of the keys is a program of its own."""

    @pytest.mark.parametrize("case", SPLIT)
    def test_the_parts_merge(self, case, monkeypatch):
        asked = []
        splits_for = _launch.splits_for

        def count(*arguments):
            asked.append(splits_for(*arguments))
            return max(asked[-1], 3)

        monkeypatch.setattr(_launch, "splits_for", count)
        operands = three(2, 2000, heads=4, kv_heads=2)
        options = {**SPLIT[case], "enable_gqa": True}
        found = triton_attend(*operands, **options)
        assert asked
        agree(found, attend(*wide(operands), backend="reference", **options))
        fields_agree(triton_read(*operands[:2], **options), found.reading)

    def test_where_they_pay(self):
        cpu = torch.device("cpu")
        assert _launch.splits_for(1, 4096, 128, cpu) > 1
        assert _launch.splits_for(1, 512, 128, cpu) == 1  # too few keys
        assert _launch.splits_for(4, 4096, 128, cpu) == 1  # enough rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("queries", [1, 40, 140])
def test_tiles_of_every_size(queries, dim, dtype):
    operands = three(queries, 150, dim, dtype=dtype)
    found, right = triton_attend(*operands), attend(*wide(operands), backend="reference")
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.output.double(), right.output, rtol=tolerance, atol=tolerance)
    # The norm is that of an output by rounded weights.
    fields_agree(replace(found.reading, output_norm=None), right.reading)


COPIED = {
    "full": ({}, (330, 300)),
    "causal": ({"is_causal": True}, (300, 300)),
    "causal, rows that see nothing": ({"is_causal": True, "query_offset": -150}, (300, 330)),
    "window": ({"window": (70, 5)}, (300, 300)),
    "key lengths": ({"key_lengths": torch.tensor([190], device=DEVICE)}, (200, 300)),
}


@pytest.mark.parametrize("case", COPIED)
@pytest.mark.parametrize("stats", ["all", ("entropy", "logsumexp"), "none"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_that_the_copy_engine_brings(case, stats, head_dim, monkeypatch):
    """As on a Hopper GPU without its own kernels: of other sizes, and for some one loop takes them all."""
    if DEVICE == "cpu":
        monkeypatch.setattr(_launch, "_copy_engine", lambda device: True)
    monkeypatch.setattr(_launch, "splits_for", lambda *given: 1)
    monkeypatch.setattr(_form, "gluon", lambda name: None)
    kinds = []
    launch = _launch.launch
    monkeypatch.setattr(_launch, "launch", lambda *given, **more: kinds.append(given[2][-1]) or launch(*given, **more))
    options, lengths = COPIED[case]
    operands = three(*lengths, head_dim, dtype=torch.bfloat16)
    found, right = triton_attend(*operands, **options, stats=stats), attend(*wide(operands), **options, backend="torch")
    assert kinds[0].copied
    assert kinds[0].merged == (stats == "all" if head_dim == 64 else stats != "all" and case != "full")
    assert kinds[0].late == (stats == "all" and head_dim == 128)
    torch.testing.assert_close(found.output.double(), right.output, rtol=2e-2, atol=2e-2)
    if stats != "none":
        fields_agree(replace(found.reading, output_norm=None), right.reading)
    if stats == "all":
        fields_agree(triton_read(*operands[:2], **options), right.reading)
        assert kinds[2].copied
        assert not kinds[2].late


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"window": (90, 2)}, {"is_causal": True, "query_offset": -70}]
)
@pytest.mark.parametrize("worst", [math.nan, math.inf])
def test_a_value_whose_weights_come_first(worst, options, monkeypatch):
    """Values that are multiplied a tile late reach the rows that see them, and no others."""
    if DEVICE == "cpu":
        monkeypatch.setattr(_launch, "_copy_engine", lambda device: True)
    monkeypatch.setattr(_launch, "splits_for", lambda *given: 1)
    monkeypatch.setattr(_form, "gluon", lambda name: None)
    q, k, v = three(300, 300, 128, dtype=torch.bfloat16)
    for key in (3, 70, 250):
        v[0, key % 2, key] = worst
    found, right = triton_attend(q, k, v, **options), attend(*wide((q, k, v)), **options, backend="reference")
    assert right.output.isfinite().all(-1).any()
    assert not right.output.isfinite().all()
    torch.testing.assert_close(found.output.double(), right.output, rtol=2e-2, atol=2e-2, equal_nan=True)
    fields_agree(replace(found.reading, output_norm=None), right.reading)


@pytest.mark.parametrize(("head_dim", "stats"), [(64, "all"), (128, "none")])
def test_scores_far_from_0_in_one_loop(head_dim, stats, monkeypatch):
    """The loop's first tile says what they are compared with: no block has to be computed again."""
    if DEVICE == "cpu":
        monkeypatch.setattr(_launch, "_copy_engine", lambda device: True)
    monkeypatch.setattr(_launch, "splits_for", lambda *given: 1)
    monkeypatch.setattr(_form, "gluon", lambda name: None)
    marked = []
    launch = _launch.launch

    def look(kernel, programs, arguments, **more):
        launch(kernel, programs, arguments, **more)
        if kernel is _launch.forward_kernel:
            marked.append((arguments[-1].merged, int(arguments[-3].sum())))

    monkeypatch.setattr(_launch, "launch", look)
    q, k, v = three(300, 300, head_dim, dtype=torch.bfloat16)
    q[..., 0], k[..., 0] = 16, 6.25 * head_dim**0.5
    found, right = triton_attend(q, k, v, is_causal=True, stats=stats), attend(*wide((q, k, v)), is_causal=True)
    assert (q.double() @ k.double().mT).min() * head_dim**-0.5 * math.log2(math.e) > 128
    assert marked == [(True, 0)]
    torch.testing.assert_close(found.output.double(), right.output, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (50, None)}])
def test_deviations_of_rows_with_one_score_far_above(options):
    """In 32 bits: sums of squares about that score would lose digits, though too few for the block to be marked."""
    q, k, v = three(100, 100)
    q[..., 0], k[..., 0] = 4, 0
    k[:, :, 3, 0] = 2000
    found = triton_attend(q, k, v, **options).reading.score_std.double()
    right = attend(*wide((q, k, v)), **options, backend="reference").reading.score_std
    assert right.max() > 100
    torch.testing.assert_close(found, right, rtol=3e-7, atol=1e-6)


class TestReady:
    """Kernels that were launched before are launched without Triton's help."""

    @pytest.fixture
    def kernel(self, monkeypatch):
        monkeypatch.setattr(_ready, "_COMPILED", {})

        class Compiled(CompiledKernel):
            def __init__(self):
                self.launched = []

            def __del__(self):
                """There is nothing to unload."""

            def __getitem__(self, grid):
                return lambda *arguments: self.launched.append((grid, arguments))

        class Kernel:
            pre_run_hooks = ()
            params = tuple(
                SimpleNamespace(is_constexpr=name == "CONSTANT", do_not_specialize=name == "count")
                for name in ("x", "number", "tuple", "count", "CONSTANT")
            )

            def __init__(self):
                self.asked, self.compiled = [], Compiled()

            def __getitem__(self, grid):
                return lambda *arguments, **options: self.asked.append((grid, arguments, options)) or self.compiled

        return Kernel()

    def test_the_second_time(self, kernel):
        x = torch.zeros(4)
        for _ in range(3):
            _ready.launch(kernel, 5, (x, 7, True), num_warps=4)
        assert kernel.asked == [((5,), (x, 7, True), {"enable_fp_fusion": True, "num_warps": 4})]
        assert kernel.compiled.launched == [((5, 1, 1), (x, 7, True))] * 2

    def test_hooks_are_heard(self, kernel):
        kernel.pre_run_hooks = [print]
        for _ in range(2):
            _ready.launch(kernel, 5, (7,))
        assert len(kernel.asked) == 2

    def test_not_too_many(self, kernel, monkeypatch):
        monkeypatch.setattr(_ready, "MOST", 3)
        for i in range(10):
            _ready.launch(kernel, 1, (None, None, None, 0, i))
            assert len(_ready._COMPILED) <= 3

    def test_what_makes_another_version(self, kernel):
        memory = torch.zeros(20)
        forms = [
            (memory, 1, (2, memory), 5, 7),
            (memory[1:], 1, (2, memory), 5, 7),
            (memory.double(), 1, (2, memory), 5, 7),
            (memory, 1, (2, memory[1:]), 5, 7),
            (memory, 1, (1, memory), 5, 7),
            (memory, 1, (16, memory), 5, 7),
            (memory, 2, (2, memory), 5, 7),
            (memory, 16, (2, memory), 5, 7),
            (memory, 2**31 + 1, (2, memory), 5, 7),
            (memory, None, (2, memory), 5, 7),
            (memory, True, (2, memory), 5, 7),
            (memory, 0.5, (2, memory), 5, 7),
            (memory, 1, (2, memory), 2**31, 7),
            (memory, 1, (2, memory), 5, 8),
        ]
        for form in forms * 2:
            _ready.launch(kernel, 1, form)
        _ready.launch(kernel, 1, forms[0], num_warps=8)
        assert len(kernel.asked) == len(forms) + 1
        # What lies at a multiple of 16 bytes is one version, and so is every number with a fraction, every other that
        # is neither 1 nor a multiple of 16, and every count.
        for alike in (
            (memory[4:], 1, (-3, memory[8:]), 5, 7),
            (memory, 3, (2, memory), 16, 7),
            (memory, 48, (2, memory), 1, 7),
            (memory, False, (2, memory), 5, 7),
            (memory, 0.7, (2, memory), 5, 7),
        ):
            _ready.launch(kernel, 1, alike)
        assert len(kernel.asked) == len(forms) + 1

    def test_a_form_of_its_own(self, kernel):
        for i in range(3):
            _ready.launch(kernel, 1, (i,), form="one")
        assert len(kernel.asked) == 1

    @pytest.mark.parametrize("queries", [64, 67])
    def test_fields_in_one_piece_of_memory(self, queries):
        q, k, v = three(queries)
        call = call_of(pose(q, k, v), (1,))
        wanted, _ = _launch._wanted(choose("all"), False)
        found = _launch._together(call, wanted, q.shape[:-1])
        assert tuple(found) == wanted
        assert len({x.data_ptr() for x in found.values()}) == len(wanted)
        for name, x in found.items():
            assert x.data_ptr() % 16 == 0
            expected = empty(call, name, q.shape[:-1])
            assert (x.shape, x.stride(), x.dtype) == (expected.shape, expected.stride(), expected.dtype)


class TestOrdinaryNumbers:
    """Nothing is computed twice for them: what is marked comes out right too, and slow."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("queries", [300, 3])
    @pytest.mark.parametrize(
        "options",
        [{}, {"is_causal": True, "query_offset": "bottom-right"}, {"window": (100, 20)}, {"key_lengths": [256]}],
        ids=["full", "causal", "window", "key lengths"],
    )
    def test_no_block_is_marked(self, options, queries, dtype, monkeypatch):
        marked = []

        def launch(kernel, programs, arguments, **rest):
            if kernel is _launch.careful_kernel:
                marks, blocks = arguments[-4:-2]
                marked.append(int(marks[:blocks].sum()))
            _ready.launch(kernel, programs, arguments, **rest)

        monkeypatch.setattr(_launch, "launch", launch)
        options = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in options.items()}
        triton_attend(*three(queries, 512, 64, dtype=dtype), **options)
        assert marked == [0]


ALL_KINDS = ((64, False), (64, True), (128, False), (128, True))
"""By head_dim, and whether it is causal."""
LONG_FIELDS = (
    "score_mean", "score_std", "first_key_weight", "entropy", "max_logit", "max_qk", "logsumexp", "collision",
    "nonfinite",
)  # fmt: skip


class TestLongCalls:
    """Moments from sums over keys, and tiles by the copy engine, as calls with many keys have them."""

    both = pytest.mark.parametrize("long", [False, True], ids=["loaded", "copied"], indirect=True)

    @pytest.fixture(autouse=True)
    def long(self, request, monkeypatch):
        """What was to be filled in from sums over keys, and how many blocks were marked after all."""
        filled, marked = [], []

        def fill(call, found, marks, marked_rows):
            # Unless they are written, they are wrong.
            for name in _moments.FIELDS & found.keys():
                found[name].fill_(77)
            _moments.fill(call, found, marks, marked_rows)
            filled.append(sorted(_moments.FIELDS & found.keys()))
            marked.append(int(marks.sum()))

        monkeypatch.setattr(_moments, "PORTABLE_SUMMED_KEYS", dict.fromkeys(ALL_KINDS, (128, 128)))
        # 3 chunks of 256 keys where there are 520 and more, 4 of 128 where there are 400.
        monkeypatch.setattr(_moments, "LEAST_KEYS", 128)
        monkeypatch.setattr(_moments, "MOST_CHUNKS", 5)
        monkeypatch.setattr(_launch, "splits_for", lambda *given: 1)
        monkeypatch.setattr(_launch, "_moments", SimpleNamespace(**vars(_moments) | {"fill": fill}))
        if DEVICE == "cpu":
            monkeypatch.setattr(_launch, "_copy_engine", lambda device: getattr(request, "param", True))
        monkeypatch.setattr(_form, "gluon", lambda name: None)
        return filled, marked

    def agrees(self, q, k, v, names=LONG_FIELDS, **options):
        found = triton_attend(q, k, v, **options)
        options.pop("stats", None)
        right = attend(*wide((q, k, v)), backend="reference", **options)
        for name in names:
            value, truth = (getattr(x.reading, name).double() for x in (found, right))
            torch.testing.assert_close(
                value, truth, rtol=2e-4, atol=5e-5, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )
        torch.testing.assert_close(found.output.double(), right.output, rtol=3e-2, atol=3e-2, equal_nan=True)

    @both
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize(
        ("queries", "keys", "options"),
        [
            (300, 520, {}),
            (700, 700, {"is_causal": True}),
            (768, 768, {"is_causal": True, "sinks": draw(9, 2), "scale": torch.tensor([0.2, 0.03], device=DEVICE)}),
        ],
        ids=["full", "causal", "causal, sinks"],
    )
    def test_every_field(self, long, options, queries, keys, head_dim):
        filled, marked = long
        q, k, v = three(queries, keys, head_dim, kv_heads=1, dtype=torch.bfloat16)
        # Off its mean, so that neither sum is small beside the other.
        k = k + (0.2 * draw(4, head_dim)).to(k.dtype)
        self.agrees(q, k, v, **({"scale": 0.1} | options), enable_gqa=True)
        assert (filled, marked) == ([sorted(_moments.FIELDS)], [0])

    @pytest.mark.parametrize("shift", [3.0, 100.0])
    @pytest.mark.parametrize("causal", [False, True])
    def test_a_mean_far_from_0(self, long, causal, shift):
        """Up to a point the matrix about the mean of the keys has the digits; beyond, blocks are computed again."""
        filled, marked = long
        q, k, v = three(400, 400, 64, dtype=torch.bfloat16)
        self.agrees(q, k + shift, v, is_causal=causal, scale=0.1)
        assert len(filled) == 1
        assert (marked[0] > 0) == (shift == 100)

    def test_several_entries_and_heads_as_they_lie_in_memory(self, long):
        """(batch, length, heads, head_dim), in which rows of one head do not follow each other."""
        made = [draw(i, 2, 300, 4, 64).to(torch.bfloat16).transpose(1, 2) for i in range(3)]
        made[1], made[2] = made[1][:, :2], made[2][:, :2]
        self.agrees(*made, is_causal=True, enable_gqa=True)
        assert long == ([sorted(_moments.FIELDS)], [0])

    @pytest.mark.parametrize("which", [0, 1])
    def test_components_that_do_not_follow_each_other(self, long, which):
        made = three(300, 300, 64, dtype=torch.bfloat16)
        turned = made[which].mT.contiguous().mT
        assert turned.stride(-1) != 1
        self.agrees(*made[:which], turned, *made[which + 1 :], is_causal=True)
        assert long == ([sorted(_moments.FIELDS)], [0])

    @both
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    @pytest.mark.parametrize("worst", [math.nan, math.inf, 1e25])
    def test_a_key_reaches_those_who_see_it(self, long, worst):
        """Squares overflow of which the scores do not."""
        q, k, v = three(400, 400, 64, dtype=torch.bfloat16)
        k[0, 1, 200] = worst
        q *= 1e-25 if worst == 1e25 else 1
        self.agrees(q, k, v, is_causal=True)
        assert long[0]

    @pytest.mark.parametrize(
        "options",
        [
            {"is_causal": True, "query_offset": "bottom-right"},
            {"is_causal": True, "window": (100, 0), "keys": 300},
            {"key_lengths": torch.tensor([350])},
            {"softcap": 5.0},
            {"stats": LONG_FIELDS[3:]},
            {"dtype": torch.float16},
        ],
        ids=["offset", "window", "lengths", "softcap", "not asked for", "float16"],
    )
    def test_where_they_do_not_serve(self, long, options):
        options = dict(options)
        q, k, v = three(300, options.pop("keys", 400), 64, dtype=options.pop("dtype", torch.bfloat16))
        self.agrees(q, k, v, LONG_FIELDS[3:] if "stats" in options else LONG_FIELDS, **options)
        assert not long[0]

    @pytest.mark.parametrize("name", sorted(_moments.FIELDS))
    def test_one_field_and_no_other(self, long, name):
        q, k, v = three(300, 300, 64, dtype=torch.bfloat16)
        self.agrees(q, k, v, (name,), is_causal=True, stats=(name,))
        assert long[0] == [[name]]

    def test_without_values_more_keys_have_to_be_there(self, long, monkeypatch):
        monkeypatch.setattr(_launch._moments, "PORTABLE_SUMMED_KEYS", dict.fromkeys(ALL_KINDS, (128, 301)))
        q, k, v = three(300, 300, 64, dtype=torch.bfloat16)
        fields_agree(triton_read(q, k), triton_attend(q, k, v).reading)
        assert long[0] == [sorted(_moments.FIELDS)]
        q, k, _ = three(301, 301, 64, dtype=torch.bfloat16)
        triton_read(q, k)
        assert len(long[0]) == 2

    @both
    def test_without_the_largest_score(self, long):
        q, k, v = three(300, 400, 64, dtype=torch.bfloat16)
        found = triton_attend(q, k, v, stats=("logsumexp",))
        right = attend(*wide((q, k, v)), backend="reference")
        torch.testing.assert_close(found.reading.logsumexp.double(), right.reading.logsumexp, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.output.double(), right.output, rtol=3e-2, atol=1e-2)
        assert not long[0]

    @both
    def test_a_reference_too_small(self, long):
        """A score far above those of the tile that was looked at first."""
        q, k, v = three(300, 400, 64, dtype=torch.bfloat16)
        q[:, :, 130:140] = 6.0
        k[:, :, 7] = 6.0
        for stats in (("logsumexp",), "all"):
            found = triton_attend(q, k, v, stats=stats)
            right = attend(*wide((q, k, v)), backend="reference")
            torch.testing.assert_close(found.reading.logsumexp.double(), right.reading.logsumexp, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found.output.double(), right.output, rtol=3e-2, atol=1e-2)


class TestMarks:
    """What the kernel for Hopper leaves: the weight of first keys that differ, and the rows that it marked."""

    @pytest.mark.parametrize("options", [{}, {"window": (20, 30)}, {"sinks": draw(9, 2)}])
    def test_marked_rows_are_computed_and_others_left(self, options):
        q, k, v = three(200, 150)
        problem = pose(q, k, v, **options)
        call = call_of(problem, problem.batch)
        expected = triton_attend(q, k, v, **options)
        fields = {name: empty(call, name, q.shape[:-1]).fill_(7) for name in _launch.Fields._fields}
        fields["logsumexp"].copy_(expected.reading.logsumexp)
        output = empty_output(call, q.dtype).fill_(7)
        marks = torch.zeros(2 * 4, dtype=torch.int32, device=DEVICE)
        marks[1] = marks[6] = 1
        _launch._after_hopper(call, 2, output, None, _launch.Fields(**fields), marks, opening=True)
        marked = torch.zeros(1, 2, 200, dtype=torch.bool, device=DEVICE)
        marked[0, 0, 64:128] = marked[0, 1, 128:192] = True
        torch.testing.assert_close(output[marked], expected.output[marked])
        assert (output[~marked] == 7).all()
        for name in ("entropy", "score_std", "output_norm"):
            torch.testing.assert_close(fields[name][marked], getattr(expected.reading, name)[marked])
            assert (fields[name][~marked] == 7).all()
        opening, right = fields["first_key_weight"], expected.reading.first_key_weight
        torch.testing.assert_close(opening, right, rtol=1e-5, atol=1e-6)


class TestBands:
    """Where positions alone hide keys, the operator gets two numbers in place of tensors."""

    @pytest.fixture
    def calls(self, monkeypatch):
        seen = []

        def forward(call, stats, *, apart):
            seen.append(call)
            return _launch.forward(call, stats, apart=apart)

        monkeypatch.setattr(cuda, "forward", forward)
        return seen

    @pytest.mark.parametrize("gradients", [False, True])
    @pytest.mark.parametrize(
        ("options", "band"),
        [
            ({}, None),
            ({"is_causal": True}, (-70, 1)),
            ({"is_causal": True, "query_offset": "bottom-right"}, (-70, 21)),
            ({"window": (3, None), "query_offset": 5}, (2, 90)),
            ({"window": (3, 4), "query_offset": -200}, (-70, -70)),
            ({"window": (3, 4), "query_offset": 200}, (90, 90)),
        ],
    )
    def test_numbers_alone(self, calls, options, band, gradients):
        operands = [x.requires_grad_(gradients) for x in three()]
        found = triton_attend(*operands, **options)
        assert [call.band if call.band is None else tuple(call.band) for call in calls] == [band]
        assert calls[0].first is calls[0].stop is None
        assert calls[0].number == pytest.approx(32**-0.5)
        agree(found, attend(*wide(operands), backend="reference", **options))

    @pytest.mark.parametrize(
        "options",
        [{"key_lengths": torch.tensor([40])}, {"query_offset": torch.tensor([3])}, {"cu_seqlens": [0, 30, 90]}],
    )
    def test_tensors_where_it_takes_them(self, calls, options):
        options = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        operands = three(90, 90)
        agree(
            triton_attend(*operands, is_causal=True, **options),
            attend(*wide(operands), is_causal=True, backend="reference", **options),
        )
        assert calls[0].band is None
        assert calls[0].first is not None

    def test_a_scale_that_is_no_number(self, calls):
        triton_attend(*three(), scale=torch.tensor(0.3, device=DEVICE))
        triton_attend(*three(), scale=torch.rand(2, device=DEVICE))
        triton_attend(*three(), scale=0.3)
        assert [call.number for call in calls] == [None, None, 0.3]

    @pytest.mark.parametrize("road", ["torch", "cpu"])
    def test_every_road_takes_them(self, road):
        operands = [x.cpu() if road == "cpu" else x for x in three()]
        problem = pose(*operands, is_causal=True, query_offset=3)
        call = call_of(problem, problem.batch, banded=True)
        assert call.band is not None
        rows = call_of(problem, problem.batch) if operands[0].device.type == "cpu" else row_by_row(call)
        stats = ",".join(sorted(choose("all")))
        for found, expected in zip(tiles(*call, stats, road), tiles(*rows, stats, road), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)

    def test_under_transforms(self):
        q, k, v = three(20, 20, batch=3)

        def loss(q, k, v, backend="cuda"):
            return attend(q, k, v, is_causal=True, backend=backend).output.square().sum()

        found = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
        expected = torch.vmap(torch.func.grad(partial(loss, backend="torch"), argnums=(0, 1, 2)))(q, k, v)
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("dynamic", [None, True])
    def test_compiled(self, calls, dynamic):
        torch._dynamo.reset()

        def loss(q, k, v):
            return triton_attend(q, k, v, is_causal=True, window=(9, None)).output.square().sum()

        operands = [x.requires_grad_() for x in three(20, 30)]
        fast = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for length in (20, 17, 13):
            own = [x[:, :, :length].detach().requires_grad_() for x in operands]
            found, expected = torch.autograd.grad(fast(*own), own), torch.autograd.grad(loss(*own), own)
            torch.testing.assert_close(found, expected)
        assert {tuple(call.band) for call in calls} == {(-9, 1)}


@pytest.mark.parametrize("case", ["a mean far from 0", "a scale below 0", "a late leap"])
def test_tiles_that_all_rows_see(case):
    q, k, v = three(70, 300)
    options = {}
    if case == "a mean far from 0":
        q, k = q + 3, k + 3
    elif case == "a scale below 0":
        options["scale"] = -0.3
    else:
        # Beyond what a sum about the maximum of the first tile holds.
        k[:, :, 250] *= 300
    agree(triton_attend(q, k, v, **options), attend(*wide((q, k, v)), backend="reference", **options), tolerance=1e-4)


GRADIENTS = {
    "plain": (three(), {}),
    "causal, several tiles": (three(150, 150, batch=2), {"is_causal": True}),
    "fewer queries than keys, bottom-right": (three(33, 150), {"is_causal": True, "query_offset": "bottom-right"}),
    "window": (three(150, 150), {"window": (20, 3)}),
    "grouped heads": (three(70, 70, heads=4, kv_heads=2), {"is_causal": True, "enable_gqa": True}),
    "key lengths, one of them 0": (three(batch=3), {"key_lengths": torch.tensor([0, 41, 90], device=DEVICE)}),
    "head_dim 3, value_dim 5": (three(33, 41, 3, value_dim=5), {}),
    "head_dim 80": (three(40, 50, 80), {}),
    "bool mask": (three(), {"attn_mask": (draw(4, 70, 90) > 0)}),
    "bias": (three(batch=2), {"attn_mask": draw(4, 2, 2, 70, 90)}),
    "bias that entries and heads share": (three(batch=2), {"attn_mask": draw(4, 1, 1, 70, 90)}),
    "softcap": (three(), {"softcap": 1.5}),
    "bias and softcap": (three(), {"attn_mask": draw(4, 1, 2, 70, 90), "softcap": 1.5, "is_causal": True}),
    "sinks": (three(), {"sinks": draw(5, 2)}),
    "a scale per head, one of them 0": (three(), {"scale": torch.tensor([0.3, 0.0], device=DEVICE)}),
    "a scale below 0": (three(), {"scale": torch.tensor([-0.2, 0.4], device=DEVICE)}),
    "dropout": (three(), {"dropout_p": 0.3, "seed": 3}),
}


def gradients(operands, options, *, backend, dtype=None, differentiable=False, stats="all"):
    """(gradients by name, Reading)."""
    leaves = dict(zip("qkv", operands, strict=True))
    leaves |= {n: x for n, x in options.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    leaves = {name: (x if dtype is None else x.to(dtype)).detach().requires_grad_() for name, x in leaves.items()}
    rest = {name: leaves.get(name, x) for name, x in options.items()}
    output, reading = attend(
        leaves["q"], leaves["k"], leaves["v"], backend=backend, differentiable=differentiable, stats=stats, **rest
    )
    loss = (output * draw(8, *output.shape).to(output.dtype)).sum()
    if differentiable:
        fields = ("logsumexp", "entropy", "expected_score", "collision")
        loss = loss + sum((getattr(reading, n) * draw(9 + i, *reading.shape)).sum() for i, n in enumerate(fields))
    found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True)), reading


def compared(case, *, dtype="float32", differentiable=False):
    operands, options = case
    operands = [x.to(getattr(torch, dtype)) for x in operands]
    found, reading = gradients(operands, options, backend="cuda", differentiable=differentiable)
    right, expected = gradients(operands, options, backend="torch", dtype=torch.float64, differentiable=differentiable)
    plain, own = gradients(operands, options, backend="torch", differentiable=differentiable)
    for name, value in right.items():
        truth = value.cpu().numpy()
        kind = dtype if name in "qkv" else "float32"
        # Products of many numbers, of which the plain formula adds no fewer.
        result = compare(found[name].cpu(), truth, plain[name].cpu(), dtype=kind, allowance=4)
        assert result.ok, f"{name}: {result}"
    for name in ("gradient_flow", "pressure"):
        truth = getattr(expected, name).cpu().numpy()
        result = compare(
            getattr(reading, name).cpu(), truth, getattr(own, name).cpu(), dtype=dtype, magnitude=1.0, allowance=4
        )
        assert result.ok, f"{name}: {result}"


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name):
    compared(GRADIENTS[name])


@pytest.mark.parametrize("name", ["plain", "causal, several tiles", "bias", "sinks"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_in_sixteen_bits(name, dtype):
    compared(GRADIENTS[name], dtype=dtype)


@pytest.mark.parametrize("name", ["plain", "causal, several tiles", "bias and softcap", "sinks"])
def test_gradients_of_fields(name):
    compared(GRADIENTS[name], differentiable=True)


def plain_call(dtype=torch.bfloat16, lengths=(70, 70), dim=64, **options):
    problem = pose(*three(*lengths, dim, dtype=dtype), **options)
    return call_of(problem, problem.batch, banded=True)


PLAIN = {
    "full": (three(dim=64), {}),
    "causal, several tiles": (three(150, 150, 64, batch=2), {"is_causal": True}),
    "grouped heads": (three(70, 70, 64, heads=4, kv_heads=2), {"is_causal": True, "enable_gqa": True}),
    "a number as scale": (three(dim=64), {"scale": 0.2}),
    "an open window": (three(dim=64), {"window": (500, 500)}),
}


class TestCudnn:
    """Gradients by cuDNN's backward pass, here by the same sums in float64."""

    @pytest.fixture
    def asked(self, monkeypatch):
        calls = []

        def differentiate(q, k, v, output, logsumexp, grad, *, causal, scale):
            calls.append((output.dtype, logsumexp.shape, causal, scale))
            assert output.stride() == grad.stride()
            group = q.shape[1] // k.shape[1]
            wide_q, wide_k, wide_v, wide_grad = (x.double() for x in (q, k, v, grad))
            wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (wide_k, wide_v))
            weights = torch.exp(scale * wide_q @ wide_k.mT - logsumexp.double()[..., None])
            weights = weights.tril() if causal else weights
            pull = (wide_grad * output.double()).sum(-1, keepdim=True)
            to_scores = scale * weights * (wide_grad @ wide_v.mT - pull)
            to_k, to_v = to_scores.mT @ wide_q, weights.mT @ wide_grad
            to_k, to_v = (x.unflatten(1, (-1, group)).sum(2) for x in (to_k, to_v))
            found = (to_scores @ wide_k, to_k, to_v)
            return tuple(torch.empty_like(x).copy_(y) for x, y in zip((q, k, v), found, strict=True))

        monkeypatch.setattr(_cudnn, "usable", lambda device: True)
        monkeypatch.setattr(_cudnn, "_differentiate", differentiate)
        # Those for Hopper would be taken first, where the flow is asked for.
        monkeypatch.setattr(_form, "gluon", lambda _name: None)
        return calls

    @pytest.mark.parametrize("name", PLAIN)
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_gradients(self, asked, name, dtype):
        compared(PLAIN[name], dtype=dtype)
        options = PLAIN[name][1]
        ((output, logsumexp, causal, scale),) = asked
        # As it was rounded: the wide output is not even made.
        assert output == getattr(torch, dtype)
        assert len(logsumexp) == 3
        assert causal == ("is_causal" in options)
        assert scale == pytest.approx(options.get("scale", 64**-0.5))

    @pytest.mark.parametrize("layout", ["transposed", "chunks", "shared", "head_dim not last"])
    def test_operands_as_they_lie(self, asked, layout):
        x = draw(1, 1, 80, 2, 192, dtype=torch.bfloat16)
        operands = {
            "transposed": [draw(i, 1, 80, 2, 64, dtype=torch.bfloat16).transpose(1, 2) for i in range(3)],
            "chunks": x.transpose(1, 2).chunk(3, -1),
            "shared": [draw(i, 1, 1, 80, 64, dtype=torch.bfloat16).expand(2, 2, 80, 64) for i in range(3)],
            "head_dim not last": [draw(i, 1, 2, 64, 80, dtype=torch.bfloat16).transpose(2, 3) for i in range(3)],
        }[layout]
        call = plain_call()._replace(q=operands[0], k=operands[1], v=operands[2])
        grad = torch.ones((), device=DEVICE, dtype=torch.bfloat16).expand(operands[0].shape)
        names = ",".join([*_operator.CONSTANTS, "pressure"])
        found = dict(zip(_operator.RETURNS, tiles(*call, names, "cuda"), strict=True))
        rest = [found[name] for name in _operator.Saved._fields]
        arguments = (*call, *rest, grad, *[None] * 4, False, True, "cuda")
        to = _operator.tiles_backward(*arguments)
        assert asked
        with FakeTensorMode(allow_non_fake_inputs=True):
            expected = _operator.tiles_backward(*arguments)
        assert [(y.shape, y.stride(), y.dtype) for y in to] == [(y.shape, y.stride(), y.dtype) for y in expected]
        own = _operator.tiles_backward(*(*arguments[:-1], "torch"))
        for y, z in zip(to[:3], own, strict=False):
            torch.testing.assert_close(y, z, rtol=2e-2, atol=2e-2)

    def test_what_is_kept_for_it(self, asked, monkeypatch):
        kept = []
        monkeypatch.setattr(
            cuda,
            "forward",
            lambda call, stats, *, apart: kept.append(stats) or _launch.forward(call, stats, apart=apart),
        )
        operands = [x.requires_grad_() for x in three(dim=64, dtype=torch.bfloat16)]
        triton_attend(*operands, stats="none")
        triton_attend(*operands, stats="pressure")
        triton_attend(*operands, stats="gradient_flow")
        triton_attend(*operands, stats="none", differentiable=True)
        torch.use_deterministic_algorithms(True)
        try:
            triton_attend(*operands, stats="none")
        finally:
            torch.use_deterministic_algorithms(False)
        rows = {"logsumexp", "max_logit", "largest_weight"}
        found = [{*rows, "wide_output"} & stats for stats in kept]
        assert found == [{"logsumexp"}, {"logsumexp"}, rows, {*rows, "wide_output"}, {*rows, "wide_output"}]

    def test_pressure_alone(self, asked, monkeypatch):
        monkeypatch.delattr(_launch_backward, "flow_kernel")
        _, reading = gradients(three(dim=64, dtype=torch.bfloat16), {}, backend="cuda", stats="pressure")
        _, expected = gradients(wide(three(dim=64, dtype=torch.bfloat16)), {}, backend="torch")
        torch.testing.assert_close(reading.pressure.double(), expected.pressure, rtol=5e-2, atol=5e-2)
        assert asked
        assert reading.gradient_flow is None

    @pytest.mark.parametrize("how", ["deterministic", "refused"])
    def test_what_was_kept_for_it_will_do_without_it(self, asked, monkeypatch, how):
        operands = [x.requires_grad_() for x in three(dim=64, dtype=torch.bfloat16)]
        output, _ = triton_attend(*operands, stats="none")
        grad = draw(8, *output.shape, dtype=torch.bfloat16)
        expected = torch.autograd.grad(output, operands, grad, retain_graph=True)
        asked.clear()
        if how == "refused":
            monkeypatch.setattr(_cudnn, "gradients", lambda *arguments: None)
        else:
            monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        found = torch.autograd.grad(output, operands, grad)
        assert not asked
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)

    def test_compiled(self, asked):
        torch._dynamo.reset()

        def loss(q, k, v):
            output, reading = triton_attend(q, k, v, is_causal=True)
            return output.float().square().sum(), reading

        operands = [x.requires_grad_() for x in three(20, 20, 64, dtype=torch.bfloat16)]
        fast = torch.compile(loss, backend="aot_eager", fullgraph=True)
        (found, reading), (expected, own) = fast(*operands), loss(*operands)
        torch.testing.assert_close(torch.autograd.grad(found, operands), torch.autograd.grad(expected, operands))
        assert len(asked) == 2
        torch.testing.assert_close(reading.gradient_flow, own.gradient_flow, equal_nan=True)

    @pytest.mark.parametrize(
        "options",
        [
            {"dtype": torch.float32},
            {"lengths": (60, 70), "is_causal": True},
            {"is_causal": True, "query_offset": 1},
            {"window": (5, None)},
            {"softcap": 2.0},
            {"dropout_p": 0.1, "seed": 1},
            {"sinks": draw(1, 2)},
            {"attn_mask": torch.ones(70, 70, dtype=torch.bool, device=DEVICE)},
            {"key_lengths": torch.tensor([7], device=DEVICE)},
            {"scale": 0.0},
            {"scale": -0.2},
            {"scale": torch.tensor(0.2, device=DEVICE)},
            {"dim": 32},
            {"dim": 256},
            {"lengths": (70, 0)},
            {"lengths": (1, 70)},
        ],
    )
    def test_what_it_does_not_take(self, asked, options):
        assert _cudnn.takes(plain_call())
        assert not _cudnn.takes(plain_call(**options))

    def test_what_it_takes(self, asked, monkeypatch):
        assert _cudnn.takes(plain_call(is_causal=True))
        assert _cudnn.takes(plain_call(lengths=(60, 70)))
        assert _cudnn.takes(plain_call(lengths=(60, 70), is_causal=True, query_offset=70))
        assert not _cudnn.takes(plain_call()._replace(v=None))
        monkeypatch.setattr(_cudnn, "usable", lambda device: False)
        assert not _cudnn.takes(plain_call())

    def test_a_gpu_that_is_not_there(self, monkeypatch):
        """Fake tensors are on one, and torch's build for GPUs has cuDNN without one."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
        _cudnn._there.cache_clear()
        try:
            assert not _cudnn.usable(torch.device("cuda", 0))
        finally:
            _cudnn._there.cache_clear()


def test_gradients_of_fields_alone():
    q, k, v = (x.requires_grad_() for x in three())
    triton_attend(q, k, v, differentiable=True).reading.entropy.sum().backward()
    twin = [x.detach().double().requires_grad_() for x in (q, k, v)]
    attend(*twin, differentiable=True, backend="torch").reading.entropy.sum().backward()
    for x, y in ((q, twin[0]), (k, twin[1])):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-6)
    assert not v.grad.any()


def test_a_sink_that_takes_all_hides_no_flow():
    # The output is 0, and says nothing of the mean of dP under the weights.
    _, free = gradients(three(), {}, backend="cuda")
    _, taken = gradients(three(), {"sinks": torch.full((2,), 1000.0, device=DEVICE)}, backend="cuda")
    torch.testing.assert_close(taken.gradient_flow, free.gradient_flow, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", ["k", "v"])
def test_what_a_row_does_not_see_reaches_no_gradient_of_it(place):
    q, k, v = three(70, 70)
    clean, _ = gradients((q, k, v), {"is_causal": True}, backend="cuda")
    dirty = {"k": k.clone(), "v": v.clone()}
    dirty[place][:, :, 40] = float("nan")
    found, _ = gradients((q, dirty["k"], dirty["v"]), {"is_causal": True}, backend="cuda")
    torch.testing.assert_close(found["q"][:, :, :40], clean["q"][:, :, :40])
    assert found["q"][:, :, 40:].isnan().any(-1).all()
    if place == "k":
        assert found["v"].isnan().any()
    else:
        # What a value holds is no part of the gradients of values.
        torch.testing.assert_close(found["v"], clean["v"])


def test_beside_a_sink_a_nan_reaches_no_value_that_its_row_does_not_see():
    q, k, v = three(70, 70)
    options = {"cu_seqlens": [0, 40, 70], "sinks": torch.zeros(2, device=DEVICE)}
    clean, _ = gradients((q, k, v), options, backend="cuda")
    k = k.clone()
    k[:, :, 50] = float("nan")
    found, _ = gradients((q, k, v), options, backend="cuda")
    torch.testing.assert_close(found["v"][:, :, :40], clean["v"][:, :, :40])
    assert found["v"][:, :, 40:].isnan().all()


def test_a_sink_that_is_nan_shows():
    operands = [x.requires_grad_() for x in three()]
    sinks = torch.tensor([0.5, float("nan")], device=DEVICE, requires_grad=True)
    output, reading = triton_attend(*operands, sinks=sinks)
    to_sinks = torch.autograd.grad(output.square().sum(), sinks)[0]
    assert output[:, 1].isnan().all()
    assert output[:, 0].isfinite().all()
    assert (reading.nonfinite[:, 1] == 1).all()
    assert to_sinks.isnan().tolist() == [False, True]


def test_a_broken_row_spoils_what_it_sees_and_nothing_else():
    q, k, v = (x.requires_grad_() for x in three(70, 70))
    output = triton_attend(q, k, v, is_causal=True).output
    grad = draw(8, *output.shape)
    clean = torch.autograd.grad(output, (q, k, v), grad, retain_graph=True)
    grad[:, :, 40] = float("nan")
    for_q, for_k, for_v = torch.autograd.grad(output, (q, k, v), grad)
    others = torch.arange(70, device=DEVICE) != 40
    torch.testing.assert_close(for_q[:, :, others], clean[0][:, :, others])
    for found, right in ((for_k, clean[1]), (for_v, clean[2])):
        assert found[:, :, :41].isnan().any(-1).all()
        torch.testing.assert_close(found[:, :, 41:], right[:, :, 41:])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_nothing_has_gradients_of_nothing(shape):
    leaves = [x.requires_grad_() for x in three(*shape)]
    output, _ = triton_attend(*leaves)
    for leaf, grad in zip(leaves, torch.autograd.grad(output.sum(), leaves), strict=True):
        assert grad.shape == leaf.shape
        assert not grad.any()


@pytest.mark.parametrize("how", ["transposed", "every second", "head_dim not last", "shared"])
def test_operands_as_they_lie(how):
    x = [draw(i, 1, 80, 2, 32) for i in range(3)]
    operands = {
        "transposed": [y.transpose(1, 2) for y in x],
        "every second": [y.transpose(1, 2)[:, :, ::2] for y in x],
        "head_dim not last": [draw(i, 1, 2, 32, 80).transpose(2, 3) for i in range(3)],
        "shared": [draw(i, 1, 1, 80, 32).expand(2, 2, 80, 32) for i in range(3)],
    }[how]
    agree(triton_attend(*operands, is_causal=True), attend(*wide(operands), is_causal=True, backend="reference"))


class TestRefuses:
    def test_what_it_cannot_take(self):
        q, k, v = three(4, 4)
        with pytest.raises(BackendError, match="16 or 32 bits, and q is float64"):
            triton_attend(*wide((q, k, v)))
        deep = draw(1, 1, 2, 4, 257)
        with pytest.raises(BackendError, match="head_dim of 256"):
            triton_attend(deep, deep, deep)
        with pytest.raises(BackendError, match="torch tensors"):
            triton_attend(*(x.cpu().numpy() for x in (q, k, v)))

    def test_a_cpu_without_the_interpreter(self, monkeypatch):
        monkeypatch.setattr(cuda, "_INTERPRETED", False)
        with pytest.raises(BackendError, match="computes on a CUDA GPU, and q is on cpu"):
            triton_attend(*(x.cpu() for x in three(4, 4)))

    def test_another_makers_gpu(self, monkeypatch):
        monkeypatch.setattr(torch.version, "hip", "7.1")
        with pytest.raises(BackendError, match="NVIDIA GPUs, and this torch is for AMD's"):
            triton_attend(*three(4, 4))

    def test_without_triton(self, monkeypatch):
        monkeypatch.setattr(cuda, "_HAS_TRITON", False)
        with pytest.raises(BackendError, match="pip install triton"):
            triton_attend(*three(4, 4))


def test_importing_needs_no_triton():
    code = "import sys, torch, attemper; from attemper._backends import cuda; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_gradient_flow_in_16_bits_is_not_spoilt_by_rounded_weights():
    q, k, v = three(20, 20, 128, heads=4, dtype=torch.bfloat16)
    # Values that have much in common: their differences are what flows.
    v = (v[:, :, :1] + 0.1 * v).to(torch.bfloat16)
    grad = draw(4, 1, 4, 20, 128, dtype=torch.bfloat16)
    flows = []
    for backend, dtype in (("cuda", torch.bfloat16), ("torch", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        result = attend(*leaves, is_causal=True, backend=backend)
        torch.autograd.grad(result.output, leaves, grad.to(dtype))
        flows.append(result.reading.gradient_flow.double()[..., 1:])
    torch.testing.assert_close(*flows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "expected"),
    [
        (torch.bfloat16, 64, "cuda"),
        (torch.float32, 80, "cuda"),
        (torch.float64, 64, "torch"),
        (torch.float16, 300, "torch"),
    ],
)
def test_auto_takes_these_kernels_for_what_they_compute_on_a_gpu(dtype, head_dim, expected):
    with FakeTensorMode():
        x = torch.empty(1, 2, 8, head_dim, dtype=dtype, device="cuda")
        result = attend(x, x, x, is_causal=True)
    assert result.reading.backend == expected
    assert result.output.shape == x.shape
    assert result.reading.entropy.device.type == "cuda"


# ---------------------------------------------------------------------------------------------------------------------

COMPILE = """
import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.driver import driver

target = GPUTarget("cuda", 90, 32)
backend = make_backend(target)

class Done(Exception):
    pass

class Driver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return target

def compile(src, target=None, options=None, **rest):
    options = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    given = [options, backend.get_codegen_implementation(options), backend.get_module_map(), context]
    made = src.make_ir(target, *given)
    assert made.verify()
    raise Done

driver.set_active(Driver())
triton.compiler.compile = compile

from attemper import attend
from attemper._backends import cuda
from attemper._backends._operator import call_of, empty_output
from attemper._backends.cuda import _form, _launch, _launch_backward, _moments
from attemper._problem import pose

cuda.unsupported = lambda problem: None
seen = set()

def launch(kernel, programs, arguments, *, form=None, **options):
    try:
        kernel.warmup(*arguments, grid=(programs,), enable_fp_fusion=True, **options)
    except Done:
        seen.add(kernel.__name__)
    else:
        raise AssertionError(kernel)

kind_of = _form.kind_of
_form.kind_of = lambda *given, **named: kind_of(*given, **named)._replace(widen=False)
_launch.launch = _launch_backward.launch = _moments.launch = launch
_launch._copy_engine = lambda device: COPIED
_launch._shared_memory = lambda device: 227 * 1024
_form.gluon = lambda name: None
_moments.PORTABLE_SUMMED_KEYS = dict.fromkeys(((64, False), (64, True), (128, False), (128, True)), (128, 128))
for COPIED, dtype in ((False, "float32"), (False, "bfloat16"), (True, "bfloat16")):
    head_dim = 128 if COPIED else 64
    q = torch.zeros(1, 2, 300, head_dim, dtype=getattr(torch, dtype), requires_grad=True)
    few = torch.zeros(1, 2, 2, head_dim, dtype=q.dtype)
    many = torch.zeros(1, 2, 4096, head_dim, dtype=q.dtype)
    attend(few, many, many, backend="cuda")
    for options in (
        {},
        {"is_causal": True, "sinks": torch.zeros(2)},
        {"window": (7, 3), "stats": ("logsumexp",)},
        {"attn_mask": torch.ones(300, 300, dtype=torch.bool)},
        {"attn_mask": torch.zeros(300, 300), "softcap": 2.0, "dropout_p": 0.1},
    ):
        attend(q, q, q, backend="cuda", **options)[0].sum().backward()
        assert q.grad is not None
    by_hopper, _launch_backward._by_hopper = _launch_backward._by_hopper, lambda *given: [torch.zeros(20).int()] * 2
    attend(q, q, q, is_causal=True, backend="cuda")[0].sum().backward()
    _launch_backward._by_hopper = by_hopper
    problem = pose(q.detach(), q.detach(), q.detach())
    call = call_of(problem, problem.batch, banded=True)
    rows = torch.zeros(q.shape[:-1])
    fields = _launch._fields(call, {})
    _launch._after_hopper(call, 2, empty_output(call, q.dtype), None, fields, torch.zeros(20).int(), opening=True)
    _launch_backward._dots(call, q.detach(), q.detach(), rows)
    saved = _launch_backward.Saved(rows, rows, rows, rows, rows, rows, rows)
    _launch_backward._flow(call, saved, q.detach(), rows, rows)
print(*sorted(seen))
"""


def test_the_compiler_takes_them():
    """As far as types go, in all branches: it needs no GPU for that, and minds much that the interpreter does not."""
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [
        "before_kernel",
        "careful_kernel",
        "chunk_kernel",
        "dots_kernel",
        "flow_kernel",
        "forward_kernel",
        "marked_to_keys_kernel",
        "marked_to_queries_kernel",
        "merge_kernel",
        "moments_kernel",
        "opening_kernel",
        "pull_kernel",
        "to_keys_kernel",
        "to_queries_kernel",
    ]


class TestDoctor:
    """`attemper doctor` puts these kernels to the test where there is a GPU."""

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_both_ways(self, dtype):
        assert dtype in _doctor._dtypes("cuda", "torch", "cuda", {})
        for found in (
            _doctor._forward("cuda", "torch", "torch", DEVICE, dtype),
            _doctor._backward("cuda", "torch", DEVICE, dtype),
        ):
            assert found.ok, found
            assert (found.backend, found.dtype) == ("cuda", dtype)

    def test_what_is_wrong_is_said(self, monkeypatch):
        def spoiled(*operands, **options):
            output, reading = attend(*operands, **options)
            return (output if options["backend"] == "reference" else 1.02 * output), reading

        monkeypatch.setattr(_doctor, "attend", lambda *given, **options: Attended(*spoiled(*given, **options)))
        assert not _doctor._forward("cuda", "torch", "torch", DEVICE, "float16").ok
        found = _doctor._backward("cuda", "torch", DEVICE, "float16")
        assert not found.ok
        assert "the gradient of q" in found.detail
