"""The kernels in Triton as it compiles them for a Hopper GPU; `tests/test_cuda.py` has them in its interpreter."""

import math

import pytest
import torch

pytest.importorskip("triton")
from hopper_cases import near, three
from ptx_launch import Emulator

from attemper import attend
from attemper._backends.cuda import _form, _launch

DIGITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
MASK = torch.rand(140, 150, generator=torch.Generator().manual_seed(0)) > 0.3


@pytest.fixture(autouse=True)
def emulator(request, monkeypatch):
    """All of the package is on a Hopper GPU, and has no kernels for it alone."""
    emulator = Emulator(seed=request.node.name)
    emulator.pretend(monkeypatch)
    monkeypatch.setattr(_form, "gluon", lambda name: None)
    yield emulator
    assert emulator.launches


def compare(operands, **options):
    """The output and every field are those in float64."""
    found = attend(*operands, backend="cuda", **options)
    right = attend(*(x.double() for x in operands), backend="torch", **options)
    near("output", found.output, right.output, DIGITS[operands[0].dtype])
    for name in vars(right.reading):
        x, y = getattr(found.reading, name), getattr(right.reading, name)
        if isinstance(y, torch.Tensor) and x is not None:
            near(name, x, y, DIGITS[operands[0].dtype] if name == "output_norm" else 2e-5)
    return found


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (90, 30)}], ids=["full", "causal", "window"])
@pytest.mark.parametrize("stats", ["all", "none"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_forward(emulator, head_dim, stats, options, monkeypatch):
    monkeypatch.setattr(_launch, "splits_for", lambda *given: 1)
    compare(three(200, 330, head_dim), stats=stats, **options)
    assert {name for name, _ in emulator.launches} == {"careful_kernel", "forward_kernel"}


@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_a_value_holds_reaches_rows_that_see_it(head_dim, monkeypatch):
    monkeypatch.setattr(_launch, "splits_for", lambda *given: 1)
    q, k, v = three(200, 330, head_dim)
    v[0, 0, 50], v[0, 1, 130] = math.nan, math.inf
    found = attend(q, k, v, backend="cuda", is_causal=True).output
    right = attend(q.double(), k.double(), v.double(), backend="reference", is_causal=True).output
    torch.testing.assert_close(found.double(), right, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert 0 < right.isfinite().all(-1).sum() < 400


@pytest.mark.parametrize("place", range(3))
def test_signs_that_are_still_to_be_turned(place):
    """As those of the imaginary part of a conjugate: memory holds the opposite of what the tensor is."""
    operands = list(three(130, 140))
    operands[place] = torch._neg_view(operands[place])
    assert operands[place].is_neg()
    compare(operands)


def backward(operands, **options):
    found, right = [], []
    for results, backend, dtype in ((found, "cuda", operands[0].dtype), (right, "torch", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in operands]
        output, reading = attend(*leaves, backend=backend, stats=("pressure", "gradient_flow"), **options)
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        results += torch.autograd.grad(output, leaves, upstream)
        # No number where rows see one key or none.
        results += [reading.pressure, reading.gradient_flow.nan_to_num(0.0)]
    for name, x, y in zip(("dq", "dk", "dv", "pressure", "gradient_flow"), found, right, strict=True):
        near(name, x, y, 1e-2)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": MASK}], ids=["causal", "a mask"])
def test_backward(options):
    backward(three(140, 150), **options)


@pytest.mark.parametrize(("queries", "options"), [(1, {}), (2, {"is_causal": True, "query_offset": "bottom-right"})])
def test_few_queries(emulator, queries, options):
    compare(three(queries, 1100, 128, heads=4, kv_heads=2), enable_gqa=True, **options)
    assert {name for name, _ in emulator.launches} == {"careful_kernel", "forward_kernel", "merge_kernel"}


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.zeros(70, 90), "softcap": 2.0}])
def test_in_32_bits(options):
    compare(three(70, 90, dtype=torch.float32), **options)
