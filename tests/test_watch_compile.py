"""Watching compiled models: the right Vitals, and no recompilation after the first sampled and unsampled call."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from attemper import Vitals, watch  # noqa: E402

BATCH, LENGTH, HEADS, WIDTH = 4, 5, 2, 8

# dynamo asks every input of a part of a model for its gradient, also those that keep none.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

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
    fused = kind == "fused"
    assert (monitor.uncompiled is None) == fused
    # Let go of, it runs on what was compiled; or is compiled once as if it had never been watched.
    fast(inputs())
    assert graphs() - compiled[-1] in (0, 1)


def counting(runs, compiled):
    """A backend that notes which graphs are compiled and run: for each the names of what is called in it."""

    def backend(graph, _inputs):
        names = [node.target for node in graph.graph.nodes if node.op == "call_module"]
        compiled.append(names)

        def run(*args):
            runs.append(names)
            return graph.forward(*args)

        return run

    return backend


@pytest.mark.parametrize("how", HOW)
def test_sampled_calls_run_compiled_and_the_others_what_was_compiled_unwatched(how):
    runs, compiled = [], []
    fast, monitor = watched(how, Model(), counting(runs, compiled), every=2)
    parts = 2 if how == "its layers compiled in place" else 1
    runs.clear()
    for wanted in (True, False, True, False):
        fast(inputs())
        assert len(runs) == parts
        assert all(bool(names) == wanted for names in runs)
        runs.clear()
    monitor.stop()
    assert monitor.uncompiled is None
    # One more than without watching.
    assert [bool(names) for names in compiled].count(True) <= parts
    assert len(compiled) <= 2 * parts


def test_no_line_of_a_module_runs_uncompiled():
    def forward(self, x):
        self.compiling = torch.compiler.is_compiling()
        return Model.forward(self, x)

    model = type("Asking", (Model,), {"forward": forward})()
    fast = torch.compile(model, backend="eager")
    with watch(fast, every=1):
        fast(inputs())
    assert model.compiling is True


@backends
def test_neither_output_nor_gradients_change_by_a_bit(backend):
    model = Model()
    fast = torch.compile(model, backend=backend)

    def step():
        model.zero_grad()
        output = fast(inputs())
        output.square().mean().backward()
        return [output, *(p.grad for p in model.parameters())]

    plain = step()
    with watch(fast, every=1) as monitor:
        found = step()
    assert list(monitor.vitals) == ["layers.0", "layers.1"]
    assert all(map(torch.equal, plain, found))


def test_watching_again_compiles_nothing():
    fast = torch.compile(Model(), backend="eager")
    for _ in range(12):  # more often than a recompilation limit
        with watch(fast, every=2) as monitor:
            fast(inputs())
            fast(inputs())
        assert list(monitor.vitals) == ["layers.0", "layers.1"]
    assert graphs() == 2


def test_nothing_waits_for_a_number_before_somebody_asks(monkeypatch):
    from attemper._watch import _compiled

    made, vitals_of = [], _compiled.vitals_of
    monkeypatch.setattr(_compiled, "vitals_of", lambda *a, **k: made.append(1) or vitals_of(*a, **k))
    fast = torch.compile(Model(), backend="eager")
    with watch(fast, every=1) as monitor:
        for _ in range(3):
            fast(inputs()).square().mean().backward()
    assert not made
    assert np.isfinite(monitor.history[1].vitals["layers.0"].pressure).all()
    assert len(made) == 2
    assert [len(sample.vitals) for sample in monitor.history] == [2, 2, 2]


@pytest.mark.parametrize("lengths", [(5, 5, 6, 7, 8, 9, 11, 13), (128, 128, 256, 5, 384, 129, 512, 7)])
@backends
def test_dynamic_shapes(backend, lengths):
    model = Model()
    fast = torch.compile(model, backend=backend, dynamic=True)
    compiled = []
    with watch(fast, every=2) as monitor:
        for length in lengths:
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
    assert monitor.uncompiled is None
    assert graphs() == 2
    assert np.isfinite(monitor.vitals["layers.1"].pressure).all()


def test_torchs_modules_in_a_compiled_model_run_uncompiled():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    fast = torch.compile(model, backend="eager")
    plain = model(inputs())
    with watch(fast, every=2) as monitor:
        for _ in range(4):
            torch.testing.assert_close(fast(inputs()), plain)
    assert list(monitor.vitals) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert [len(sample.vitals) for sample in monitor.history] == [2, 2]
    assert monitor.uncompiled == "torch's own attention modules are in it"


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


# -- what may be in a graph -------------------------------------------------------------------------------------------

FIELDS = [f for f in Vitals.__dataclass_fields__ if f not in ("site", "calls", "weights")]


class Kind(nn.Module):
    """Attention by the fused call, with one thing about it that is out of the ordinary."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.num_heads = kind, HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH // HEADS)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        n, options = x.shape[1], {}
        if self.kind == "rotary":
            angle = torch.arange(n)[:, None] * torch.tensor([1.0, 0.1])
            cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
            q, k = (t * cos + torch.cat([-t[..., 2:], t[..., :2]], -1) * sin for t in (q, k))
        elif self.kind == "cache":
            old, k = torch.ones(*k.shape[:2], 3, k.shape[-1]), torch.cat([-k[..., 2:], k[..., :2]], -1) * 0.5
            k, v = torch.cat([old, k], 2) * 0.8, torch.cat([old, v], 2)
        elif self.kind == "bias behind a factor":
            q = q * 0.5 + 0.1
        elif self.kind == "normalised":
            q, k = self.norm(q), self.norm(k)
        elif self.kind == "scaled before":
            q, options["scale"] = q * 0.5, 1.0
        elif self.kind == "mask":
            options["attn_mask"] = torch.ones(n, n, dtype=torch.bool).tril()
        elif self.kind == "finite minima":
            options["attn_mask"] = torch.full((n, n), torch.finfo(q.dtype).min).triu(1)
        elif self.kind == "dropout":
            options["dropout_p"] = 0.3
        elif self.kind == "grouped":
            k, v, options["enable_gqa"] = k[:, :1], v[:, :1], True
        elif self.kind == "folded":
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        if "attn_mask" not in options:
            options["is_causal"] = True
        y = functional.scaled_dot_product_attention(q, k, v, **options)
        if self.kind == "graph break":
            torch._dynamo.graph_break()
        y = y.unflatten(0, (-1, HEADS)) if self.kind == "folded" else y
        return self.out(y.transpose(1, 2).flatten(-2))


class Kinds(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers, self.kind = nn.ModuleList([Kind(kind), Kind(kind)]), kind

    def forward(self, x):
        for layer in self.layers:
            if self.kind.startswith("checkpoint"):
                x = x + checkpoint(layer, x, use_reentrant=self.kind.endswith("reentrant"))
            else:
                x = x + layer(x)
        return x


KINDS = [
    "plain",
    "rotary",
    "normalised",
    "scaled before",
    "mask",
    "finite minima",
    "dropout",
    "grouped",
    "folded",
    "graph break",
    "checkpoint",
    "autocast",
]


def trained(model, call, kind):
    """One step, from the same random numbers every time."""
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        output = call(inputs())
    output.float().square().mean().backward()
    return output.detach()


def assert_same(vitals, wanted, rtol=1e-4):
    assert list(vitals) == list(wanted)
    for path in wanted:
        assert vitals[path].site == wanted[path].site
        for name in FIELDS:
            ours, theirs = (getattr(v[path], name) for v in (vitals, wanted))
            np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=1e-6, err_msg=f"{path} {name}")
        for name, weight in wanted[path].weights.items():
            np.testing.assert_array_equal(vitals[path].weights[name], weight, err_msg=f"{path} {name}")


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_eager_watching_tells(kind):
    model = Kinds(kind)
    with watch(model, every=1) as eager:
        trained(model, model, kind)
    fast = torch.compile(model, backend="aot_eager")
    plain = trained(model, fast, kind)
    with watch(fast, every=1) as monitor:
        for _ in range(2):
            assert torch.equal(trained(model, fast, kind), plain)
    assert monitor.uncompiled is None
    assert not monitor.unseen
    for sample in monitor.history:
        assert_same(sample.vitals, eager.vitals, rtol=2e-2 if kind == "autocast" else 1e-4)


@pytest.mark.parametrize(("kind", "scale"), [("cache", 0.2), ("bias behind a factor", 0.25)])
def test_a_factor_that_is_told_from_what_was_joined_or_added_to(kind, scale):
    with watch(torch.compile(Kinds(kind), backend="eager"), every=1) as monitor:
        monitor.model(inputs())
    assert monitor.uncompiled is None
    for vitals in monitor.vitals.values():
        assert vitals.site.effective_scale == pytest.approx(scale)


@pytest.mark.parametrize("kind", ["rotary", "checkpoint", "autocast"])
def test_inductor(kind):
    model = Kinds(kind)
    with watch(model, every=1) as eager:
        trained(model, model, kind)
    fast = torch.compile(model)
    plain = trained(model, fast, kind)
    with watch(fast, every=2) as monitor:
        for _ in range(4):
            torch.testing.assert_close(trained(model, fast, kind), plain)
    assert monitor.uncompiled is None
    assert graphs() == 2
    assert_same(monitor.vitals, eager.vitals, rtol=5e-2 if kind == "autocast" else 1e-4)


def test_a_graph_that_serves_many_layers():
    model = Kinds("plain")
    for layer in model.layers:
        layer.compile(backend="aot_eager", dynamic=False)
    with watch(model, every=1) as eager, torch.compiler.set_stance("force_eager"):
        trained(model, model, "plain")
    with watch(model, every=1) as monitor:
        trained(model, model, "plain")
    assert_same(monitor.vitals, eager.vitals)


@pytest.mark.parametrize("batch", [BATCH, 9])
def test_windows_of_a_batch_and_several_calls_of_one_module(batch):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x):
            windows = self.qkv(x).unflatten(1, (2, -1)).flatten(0, 1)
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in windows.chunk(3, -1))
            one = functional.scaled_dot_product_attention(q, k, v)
            return functional.scaled_dot_product_attention(one, k, v).square()

    model = Twice()
    x = torch.randn(batch, 6, WIDTH)
    with watch(model, every=1) as eager:
        model(x).mean().backward()
    fast = torch.compile(model, backend="aot_eager")
    with watch(fast, every=1) as monitor:
        fast(x).mean().backward()
    assert list(monitor.vitals) == ["(root)", "(root)#2"]
    assert monitor.vitals["(root)"].weights["pressure"].tolist() == [batch] * HEADS
    assert_same(monitor.vitals, eager.vitals)


@pytest.mark.parametrize(("batch", "step"), [(18, 4), (33, 8), (15, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_flow_of_a_large_batch_is_that_of_some_of_its_entries(batch, step, masked):
    class Shown(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x, shown):
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)

    model = Shown()
    x = torch.randn(batch, LENGTH, WIDTH)
    shown = torch.rand(batch, 1, LENGTH, LENGTH) < 0.7 if masked else None
    with watch(model, every=1) as eager:
        some = model(x[::step], shown if shown is None else shown[::step])
        some.square().mean().backward()
    fast = torch.compile(model, backend="aot_eager")
    with watch(fast, every=1) as monitor:
        fast(x, shown).square().mean().backward()
    assert monitor.uncompiled is None
    found, wanted = monitor.vitals["(root)"], eager.vitals["(root)"]
    np.testing.assert_allclose(found.gradient_flow, wanted.gradient_flow, rtol=1e-4)
    assert found.weights["gradient_flow"].tolist() == wanted.weights["gradient_flow"].tolist()
    assert found.weights["entropy"][0] > wanted.weights["entropy"][0] or step == 1


def test_without_gradients_there_is_no_pressure_and_the_output_has_no_graph():
    model = Model().requires_grad_(False)
    fast = torch.compile(model, backend="aot_eager")
    with watch(fast, every=1) as monitor:
        assert not fast(inputs()).requires_grad
        with torch.no_grad():
            fast(inputs())
    assert monitor.uncompiled is None
    assert np.isnan(monitor.vitals["layers.0"].pressure).all()


def test_rows_without_keys_and_numbers_that_are_not_finite():
    class Hostile(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            shown = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            shown[2] = False
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)

    model, x = Hostile(), inputs()
    x[0, 3, 0], x[1, 4, 1] = torch.nan, torch.inf
    with watch(model, every=1) as eager:
        model(x).nan_to_num(0).square().mean().backward()
    fast = torch.compile(model, backend="aot_eager")
    with watch(fast, every=1) as monitor:
        fast(x).nan_to_num(0).square().mean().backward()
    assert monitor.uncompiled is None
    vitals = monitor.vitals["(root)"]
    assert vitals.rows_without_keys.tolist() == [BATCH] * HEADS
    assert (vitals.nonfinite > 0).all()
    assert_same(monitor.vitals, eager.vitals)


def test_micro_batches_merge():
    model = Model()
    with watch(model, every=1, micro_batches=2) as eager:
        for seed in (1, 2):
            model(inputs(seed=seed)).square().mean().backward()
    fast = torch.compile(model, backend="aot_eager")
    with watch(fast, every=1, micro_batches=2) as monitor:
        losses = [fast(inputs(seed=seed)).square().mean() for seed in (1, 2)]
        sum(losses).backward()
    assert [sample.step for sample in monitor.history] == [0]
    assert_same(monitor.vitals, eager.vitals)


# -- where it is not possible ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["compiled, then watched", "watched, then compiled", "its layers compiled in place"])
def test_attention_written_out_runs_uncompiled_and_says_so(how):
    model = Model("written")
    plain = model(inputs())
    with watch(model, every=1) as eager:
        model(inputs()).square().mean().backward()
    fast, monitor = watched(how, model, "aot_eager", every=1)
    for _ in range(3):
        output = fast(inputs())
        output.square().mean().backward()
        torch.testing.assert_close(output, plain)
    monitor.stop()
    assert monitor.uncompiled == "attention is written out in it"
    for sample in monitor.history:
        assert_same(sample.vitals, eager.vitals)


def test_some_fused_and_some_written_out():
    model = Model()
    model.layers[1] = Attention("written")
    with watch(model, every=1) as eager:
        model(inputs()).square().mean().backward()
    fast = torch.compile(model, backend="aot_eager")
    with watch(fast, every=1) as monitor:
        for _ in range(2):
            fast(inputs()).square().mean().backward()
    assert monitor.uncompiled == "attention is written out in it"
    for sample in monitor.history:
        assert_same(sample.vitals, eager.vitals)


def test_padding_in_a_batch_runs_uncompiled():
    class Padded(Model):
        def forward(self, x, attention_mask):
            return super().forward(x)

    model = Padded()
    fast = torch.compile(model, backend="eager")
    mask = torch.ones(BATCH, LENGTH)
    with watch(fast, every=1) as monitor:
        fast(inputs(), attention_mask=mask)
        assert monitor.uncompiled is None
        mask[0, -2:] = 0
        fast(inputs(), attention_mask=mask)
        assert monitor.uncompiled == "there is padding in the batch"
        assert np.isfinite(monitor.vitals["layers.0"].padding_weight).all()
        fast(inputs(), attention_mask=torch.ones(BATCH, LENGTH))
        assert monitor.uncompiled is None


def test_inside_runs_uncompiled():
    fast = torch.compile(Model(), backend="eager")
    with watch(fast, every=1, observe="inside") as monitor:
        fast(inputs())
    assert monitor.uncompiled == "observe is 'inside'"
    assert list(monitor.vitals) == ["layers.0", "layers.1"]


def test_a_model_that_is_not_compiled_says_nothing():
    model = Model()
    with watch(model, every=1) as monitor:
        model(inputs())
    assert monitor.uncompiled is None


@pytest.mark.parametrize("where", ["sum_rows", "read"])
def test_a_failure_of_ours_while_it_compiles_or_runs_leaves_the_model_alone(where, monkeypatch):
    from attemper._watch import _read_call

    def broken(*_args, **_kwargs):
        raise RuntimeError("out of order")

    model = Model()
    plain = model(inputs())
    fast = torch.compile(model, backend="eager" if where == "read" else "aot_eager")
    monkeypatch.setattr(_read_call, where, broken)
    with watch(fast, every=1) as monitor:
        for _ in range(2):
            output = fast(inputs())
            output.square().mean().backward()
            torch.testing.assert_close(output, plain)
    assert monitor.uncompiled == "RuntimeError: out of order"
    assert list(monitor.vitals) == ["layers.0", "layers.1"]


def test_whoever_turns_the_compiler_off_has_it_off():
    runs, compiled = [], []
    fast = torch.compile(Model(), backend=counting(runs, compiled))
    with watch(fast, every=1) as monitor, torch.compiler.set_stance("force_eager"):
        fast(inputs())
    assert not compiled
    assert list(monitor.vitals) == ["layers.0", "layers.1"]


def test_what_inductor_keeps_on_disk_is_not_taken_for_something_else():
    """Graphs that differ only in how many entries of a batch make a sequence, one compiled after the other."""

    class Windows(Model):
        def forward(self, x, windows):
            return self.layers[0](windows.flatten(0, 1))

    model = Windows()
    for sequences in (BATCH, 2):
        torch._dynamo.reset()
        x, windows = torch.zeros(sequences, 1), inputs().unflatten(0, (sequences, -1))
        with watch(model, every=1) as eager:
            model(x, windows).square().mean().backward()
        fast = torch.compile(model, dynamic=False)
        with watch(fast, every=1) as monitor:
            fast(x, windows).square().mean().backward()
        assert monitor.vitals["layers.0"].weights["pressure"].tolist() == [sequences] * HEADS
        assert_same(monitor.vitals, eager.vitals)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_exporting_a_watched_model(strict, own):
    model = Model().eval()
    if own:
        forward = model.forward
        model.forward = lambda x: forward(x)
    plain = torch.export.export(model, (inputs(),), strict=strict)
    with watch(model, every=1) as monitor:
        exported = torch.export.export(model, (inputs(),), strict=strict)
        assert monitor.steps == 0
        model(inputs())
    assert [node.target for node in exported.graph.nodes] == [node.target for node in plain.graph.nodes]
    assert torch.equal(exported.module()(inputs()), plain.module()(inputs()))
    assert list(monitor.vitals) == ["layers.0", "layers.1"]
