"""Watching compiled models: the right Vitals, and no recompilation after the first sampled and unsampled call."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.nn import functional  # noqa: E402

from attemper import watch  # noqa: E402

BATCH, LENGTH, HEADS, WIDTH = 4, 5, 2, 8

pytestmark = [
    # The import of some backends meets a decorator that torch itself has outlived.
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    # dynamo asks every input of a part of a model for its gradient, also those that keep none.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.kind == "fused":
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            y = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self, kind="fused"):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([Attention(kind), Attention(kind)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return x


def inputs(length=LENGTH, seed=1):
    return torch.randn(BATCH, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def graphs():
    return counters["stats"]["unique_graphs"]


def watched(how, model, backend, **options):
    """(what is called, the Monitor)."""
    if how == "watched, then compiled":
        monitor = watch(model, **options)
        return torch.compile(model, backend=backend), monitor
    if how == "compiled, then watched":
        fast = torch.compile(model, backend=backend)
        return fast, watch(fast, **options)
    if how == "compiled, run, then watched":
        fast = torch.compile(model, backend=backend)
        fast(inputs())
        return fast, watch(fast, **options)
    if how == "compiled, then the model within watched":
        fast = torch.compile(model, backend=backend)
        return fast, watch(model, **options)
    if how == "watched, then compiled in place":
        monitor = watch(model, **options)
        model.compile(backend=backend)
        return model, monitor
    if how == "compiled in place, then watched":
        model.compile(backend=backend)
        model(inputs())
        return model, watch(model, **options)
    for layer in model.layers:
        layer.compile(backend=backend)
    return model, watch(model, **options)


HOW = [
    "watched, then compiled",
    "compiled, then watched",
    "compiled, run, then watched",
    "compiled, then the model within watched",
    "watched, then compiled in place",
    "compiled in place, then watched",
    "its layers compiled in place",
]


@pytest.mark.parametrize(("kind", "backend"), [("fused", "eager"), ("written", "aot_eager")])
@pytest.mark.parametrize("how", HOW)
def test_the_same_vitals_and_no_recompilation(how, kind, backend):
    model = Model(kind)
    plain = model(inputs())
    with watch(model, every=1) as eager:
        model(inputs()).square().mean().backward()
    model.zero_grad()
    fast, monitor = watched(how, model, backend, every=3)
    compiled = []
    for _ in range(8):
        output = fast(inputs())
        output.square().mean().backward()
        compiled.append(graphs())
        torch.testing.assert_close(output, plain, rtol=1e-5, atol=1e-6)
    monitor.stop()
    assert compiled[1] >= 1  # something was compiled, or this shows nothing
    assert compiled[1:] == [compiled[1]] * 7
    assert [sample.step for sample in monitor.history] == [0, 3, 6]
    assert list(monitor.vitals) == ["layers.0", "layers.1"]
    assert not monitor.unseen
    for path, wanted in eager.vitals.items():
        vitals = monitor.vitals[path]
        for name in ("rows", "entropy", "max_logit", "visible_keys", "pressure", "gradient_flow"):
            np.testing.assert_allclose(getattr(vitals, name), getattr(wanted, name), rtol=1e-4, err_msg=name)
        assert vitals.site.effective_scale == pytest.approx((WIDTH // HEADS) ** -0.5)
    # Let go of, it runs on what was compiled.
    fast(inputs())
    assert graphs() - compiled[-1] in (0, compiled[1])


@pytest.mark.parametrize("how", ["compiled, then watched", "compiled in place, then watched"])
def test_unsampled_calls_run_what_was_compiled(how):
    runs = []

    def backend(graph, _inputs):
        def run(*args):
            runs.append(1)
            return graph.forward(*args)

        return run

    fast, monitor = watched(how, Model(), backend, every=2)
    runs.clear()
    for wanted in (0, 1, 1, 2):
        fast(inputs())
        assert len(runs) == wanted
    monitor.stop()


@backends
def test_dynamic_shapes(backend):
    model = Model()
    fast = torch.compile(model, backend=backend, dynamic=True)
    compiled = []
    with watch(fast, every=2) as monitor:
        for length in (5, 5, 6, 7, 8, 9, 11, 13):
            torch.testing.assert_close(fast(inputs(length)), model(inputs(length)), rtol=1e-5, atol=1e-6)
            compiled.append(graphs())
            if len(compiled) % 2:
                assert monitor.vitals["layers.1"].rows.tolist() == [BATCH * length] * HEADS
    assert compiled[1:] == [compiled[1]] * 7


@backends
def test_fullgraph_compiled_before(backend):
    model = Model()
    fast = torch.compile(model, backend=backend, fullgraph=True)
    fast(inputs())
    with watch(fast, every=2) as monitor:
        for _ in range(4):
            fast(inputs()).square().mean().backward()
    assert list(monitor.vitals) == ["layers.0", "layers.1"]
    assert graphs() == 1
    assert np.isfinite(monitor.vitals["layers.1"].pressure).all()


def test_torchs_modules_in_a_compiled_model():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    fast = torch.compile(model, backend="eager")
    plain = model(inputs())
    with watch(fast, every=2) as monitor:
        for _ in range(4):
            torch.testing.assert_close(fast(inputs()), plain)
    assert list(monitor.vitals) == ["layers.0.self_attn", "layers.1.self_attn"]


def test_watching_a_part_of_a_compiled_model():
    model = Model()
    plain = model(inputs())
    fast = torch.compile(model, backend="eager")
    compiled = []
    with watch(model.layers[1], every=3) as monitor:
        for _ in range(7):
            torch.testing.assert_close(fast(inputs()), plain)
            compiled.append(graphs())
    assert list(monitor.vitals) == ["(root)"]
    assert [sample.step for sample in monitor.history] == [0, 3, 6]
    assert compiled[1:] == [compiled[1]] * 6
