"""One operator for every road: it finds its implementation by name, and is there for all who look for it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attemper import attend, read, watch
from attemper._attend import gradient_flow_beside
from attemper._backends import _operator
from attemper._backends import torch as tiled
from attemper._backends._operator import _operators, run_on
from attemper._problem import pose
from attemper._reading import choose


@pytest.fixture
def counted(monkeypatch):
    """A road that counts how often each way is taken."""
    module = ModuleType("attemper._backends.counted")
    module.taken = []

    def forward(call, stats, *, apart):
        module.taken.append("forward")
        return tiled.forward(call, stats, apart=apart)

    def backward(call, saved, upstream, *, bias_too, flow_too):
        module.taken.append("backward")
        return tiled.backward(call, saved, upstream, bias_too=bias_too, flow_too=flow_too)

    module.forward, module.backward = forward, backward
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    _operators.implementation.cache_clear()


def operands(*, gradients=False, shape=(2, 3, 5, 4), dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_(gradients) for _ in range(3)]


class Seen(TorchDispatchMode):
    """The names of the operators that are called inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


# --- roads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", [False, True])
def test_a_road_is_found_by_its_name(counted, gradients):
    q, k, v = operands(gradients=gradients)
    output, fields = run_on("counted", pose(q, k, v, is_causal=True), choose("all"))
    assert counted.taken == ["forward"]
    assert torch.equal(output, attend(q, k, v, is_causal=True, backend="torch").output)
    assert set(fields) == {*_operator.FIELDS, "gradients"}
    if gradients:
        output.sum().backward()
        assert counted.taken == ["forward", "backward"]


def test_under_transforms(counted):
    q, k, v = operands()

    def loss(q, k, v):
        return run_on("counted", pose(q, k, v), frozenset())[0].square().sum()

    torch.vmap(torch.func.grad(loss))(q, k, v)
    assert counted.taken == ["forward", "backward"]


def test_compiled(counted):
    def loss(q, k, v):
        return run_on("counted", pose(q, k, v), frozenset())[0].square().sum()

    torch.compile(loss, backend="aot_eager", fullgraph=True)(*operands(gradients=True)).backward()
    assert counted.taken == ["forward", "backward"]


def test_a_watched_call_is_read_on_its_own_road(counted):
    class Layer(nn.Module):
        def forward(self, q, k, v):
            return run_on("counted", pose(q, k, v, is_causal=True), frozenset())[0]

    q, k, v = operands(gradients=True)
    layer = Layer()
    with watch(layer) as monitor:
        layer(q, k, v).sum().backward()
    assert monitor
    # The call and the Reading beside it; then its gradients, and those that measure how they flow.
    assert sorted(counted.taken) == ["backward"] * 2 + ["forward"] * 3


def test_an_unknown_road():
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        run_on("nowhere", pose(*operands()), frozenset())


# --- without the operator ---------------------------------------------------------------------------------------------

CALLS = {
    "plain": {},
    "none": {"stats": "none"},
    "one": {"stats": "entropy"},
    "after backward": {"stats": ("pressure", "output_norm")},
    "causal": {"is_causal": True, "softcap": 2.0},
    "bias": {"attn_mask": torch.randn(5, 5)},
    "lengths": {"key_lengths": [0, 3], "sinks": torch.randn(3)},
    "dropout": {"dropout_p": 0.4, "seed": 3},
    "overflow": {"scale": 1e300},
    "differentiable": {"differentiable": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 5, 4), (2, 2, 3, 5, 4)])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_nobody_sees_is_the_same(name, shape, dtype, auto):
    options = {**CALLS[name]}
    if len(shape) < 4:
        options.pop("key_lengths", None)
    if len(shape) < 3:
        options.pop("sinks", None)
    if len(shape) == 5:
        options["key_lengths"] = torch.tensor([[0, 3], [5, 1]])
    given = operands(shape=shape, dtype=dtype)
    got = attend(*given, **options)
    assert got.reading.backend == ("cpu" if auto == "cpu" else "torch")
    with Seen() as seen:
        wanted = attend(*given, **options)
    assert seen.names.count("attemper::tiles") == 1
    assert got.reading.pressure is None
    (one, its), (two, other) = pytree.tree_flatten(got), pytree.tree_flatten(wanted)
    assert its == other
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        # What waits for a backward pass that cannot come is one zero, many times.
        assert a.stride() == b.stride() or (a is got.reading.gradients and a.stride() == (0,))
        assert not a.requires_grad


class TestNumbersOnAGPU:
    """They are written once; here on the CPU, with a clock of our own."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch):
        gpu = SimpleNamespace(capturing=False, done=True)
        event = SimpleNamespace(query=lambda: gpu.done)
        monkeypatch.setattr(_operator, "_ON_GPU", {})
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=lambda: event))
        return gpu

    def number(self, x=0.125, dtype=torch.float32):
        found = _operator._on_gpu(x, dtype, torch.device("cpu"))
        assert found.shape == (1, 1)
        assert found.dtype == dtype
        assert found.item() == x
        return found

    def test_once(self):
        assert self.number() is self.number() is self.number()
        assert self.number(0.25) is not self.number()
        self.number(dtype=torch.float64)

    def test_when_it_is_there(self, gpu):
        gpu.done = False
        first = self.number()
        assert self.number() is not first
        gpu.done = True
        assert self.number() is first
        # What was there stays, whoever asks.
        gpu.done = False
        gpu.capturing = True
        assert self.number() is first

    def test_for_whoever_comes_later(self):
        with torch.inference_mode():
            self.number()
        assert not self.number().is_inference()

    def test_not_what_a_graph_writes(self, gpu):
        gpu.capturing = True
        captured = self.number()
        gpu.capturing = False
        assert captured is not self.number()
        # Nor may a graph ask whether something is there.
        gpu.capturing = True
        assert self.number() is not self.number()

    def test_not_without_end(self, monkeypatch):
        monkeypatch.setattr(_operator, "MOST_NUMBERS", 2)
        for x in (1.0, 2.0, 3.0):
            self.number(x)
        assert len(_operator._ON_GPU) == 2
        assert self.number(2.0) is self.number(2.0)
        assert self.number(3.0) is not self.number(3.0)


# torch 2.11 says of every profile that the next one will be another.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_whoever_looks_sees_the_operator(monkeypatch, auto):
    calls = []
    monkeypatch.setattr(_operator, "tiles", lambda *arguments: calls.append(None) or _operators.tiles(*arguments))
    q, k, v = operands()

    def seen(*given, **options):
        calls.clear()
        attend(*given, **options)
        return bool(calls)

    assert not seen(q, k, v)
    assert not seen(q, k, v, scale=torch.tensor(0.5), sinks=torch.zeros(3))
    assert seen(q, k, v.requires_grad_())
    with torch.no_grad():
        assert not seen(q, k, v)
    v = v.detach()
    for name, values in {"scale": torch.rand(3), "sinks": torch.rand(3), "attn_mask": torch.rand(5, 5)}.items():
        assert seen(q, k, v, **{name: values.requires_grad_()})
    with Seen():
        assert seen(q, k, v)
    with torch.overrides.BaseTorchFunctionMode():
        assert seen(q, k, v)
    with forward_ad.dual_level():
        assert seen(q, k, v)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert seen(q, k, v)
    assert "attemper::tiles" in {event.name for event in profiled.events()}

    class Own(torch.Tensor):
        pass

    assert seen(q.as_subclass(Own), k, v)
    assert not seen(q, nn.Parameter(k, requires_grad=False), v)


def test_autocast_stays_outside(auto):
    q, k, v = operands()
    wanted = attend(*(x.bfloat16() for x in (q, k, v)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attend(q, k, v)
    assert torch.equal(got.output, wanted.output)
    assert torch.equal(got.reading.logsumexp, wanted.reading.logsumexp)


# --- what is measured beside somebody else's call ---------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.7}], ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["with its output", "without"])
def test_the_gradient_flow_of_a_call_that_torch_computes(options, given):
    q, k, v = operands(gradients=True)
    grad = torch.randn_like(q)
    ours = attend(q, k, v, **options)
    ours.output.backward(grad)
    plain = [x.detach() for x in (q, k, v)]
    output = nn.functional.scaled_dot_product_attention(*plain, **options) if given else None
    found = gradient_flow_beside(*plain, output, grad, read(*plain[:2], **options), **options)
    torch.testing.assert_close(found, ours.reading.gradient_flow, equal_nan=True)
    assert not torch.allclose(found.nan_to_num(), torch.zeros_like(found))


def test_the_operator_of_the_flow_is_one(monkeypatch):
    seen = []
    plain = _operators.flow
    monkeypatch.setattr(_operator, "flow", lambda *arguments: seen.append(arguments) or plain(*arguments))
    q, k, v = operands()
    gradient_flow_beside(q, k, v, None, torch.randn_like(q), read(q, k))
    torch.library.opcheck(torch.ops.attemper.flow.default, seen[0])


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_tensors_without_numbers_have_an_outcome_without_numbers(backend):
    q, k = (torch.empty(2, 3, n, 8, device="meta", dtype=torch.bfloat16) for n in (4, 5))
    output, reading = attend(q, k, k, is_causal=True, backend=backend)
    assert (output.shape, output.dtype, output.device.type) == (q.shape, q.dtype, "meta")
    assert (reading.entropy.shape, reading.entropy.device.type) == (q.shape[:3], "meta")
    assert "entropy" in repr(reading)
    assert reading.pressure is None
