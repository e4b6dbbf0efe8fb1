"""Watched models in several threads: a sample is one thread's at a time, and nothing of it reaches the others."""

import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._dynamo import eval_frame  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.overrides import _get_current_function_mode_stack  # noqa: E402

from attemper import check, watch  # noqa: E402

BATCH, LENGTH, HEADS, WIDTH = 4, 5, 2, 8
SOON = 60


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    before = eval_frame._stance
    with torch.no_grad():
        yield
    found, eval_frame._stance = eval_frame._stance, before
    assert type(found) is type(before)
    assert found == before


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.kind == "fused":
            y = functional.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    """Its forward says that it has begun, and goes on when it is told to."""

    def __init__(self, kind="fused", torchs=True):
        super().__init__()
        self.layers = nn.ModuleList([Attention(kind), Attention(kind)])
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) if torchs else None

    def forward(self, x, pause=None):
        x = x + self.layers[0](x)
        if pause is not None:
            pause()
        x = x + self.layers[1](x)
        return x if self.mha is None else x + self.mha(x, x, x, need_weights=False)[0]


class Call(threading.Thread):
    """A call in a thread of its own, which `begin` lets come to its pause and `end` brings to its end."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.begun, self.told = threading.Event(), threading.Event()
        self.result = self.error = None

    @torch.compiler.disable
    def pause(self):
        self.begun.set()
        assert self.told.wait(SOON)

    def run(self):
        try:
            with torch.no_grad():
                self.result = self.function(self.pause)
        except BaseException as error:
            self.error = error
            self.begun.set()

    def begin(self):
        self.start()
        assert self.begun.wait(SOON)
        return self

    def end(self):
        self.told.set()
        self.join(SOON)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def call(model):
    return Call(lambda pause: model(inputs(), pause))


def inputs():
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def traces(model):
    """Everything that watching could leave behind."""
    hooks = [len(getattr(m, name)) for m in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")]
    kinds = [type(m) for m in model.modules()]
    registry = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    registered = None if registry is None else (dict(registry._local_mapping), dict(registry._global_mapping))
    return hooks, kinds, len(_get_current_function_mode_stack()), registered, eval_frame._stance


# -- whatever order they end in ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_overlapping_calls_leave_nothing_and_one_of_them_is_sampled(first):
    pytest.importorskip("transformers.modeling_utils")
    model = Model().eval()
    plain, before = model(inputs()), traces(model)
    monitor = watch(model, every=1)
    calls = [call(model).begin(), call(model).begin()]
    for one in (calls[first], calls[1 - first]):
        assert torch.equal(one.end(), plain)
    assert [list(sample.vitals) for sample in monitor.history] == []
    model(inputs())
    monitor.stop()
    assert [sample.step for sample in monitor.history] == [0, 2]
    for sample in monitor.history:
        assert list(sample.vitals) == ["layers.0", "layers.1", "mha"]
        assert all(vitals.calls == 1 for vitals in sample.vitals.values())
    assert monitor.steps == 3
    assert not monitor.unseen
    assert traces(model) == before


@pytest.mark.parametrize("first", [0, 1])
def test_overlapping_calls_of_two_models(first):
    models = Model().eval(), Model().eval()
    plain, before = [model(inputs()) for model in models], [traces(model) for model in models]
    monitors = [watch(model, every=1) for model in models]
    calls = [call(model).begin() for model in models]
    for i in (first, 1 - first):
        assert torch.equal(calls[i].end(), plain[i])
    for model in models:
        model(inputs())
    for monitor in monitors:
        monitor.stop()
    assert [[sample.step for sample in monitor.history] for monitor in monitors] == [[0, 1], [1]]
    assert [traces(model) for model in models] == before


def test_a_model_and_a_part_of_it_watched_apart():
    model = Model().eval()
    part = model.mha
    before = traces(model)
    whole, inner = watch(model, every=1), watch(part, every=1)
    one = call(model).begin()
    inner.stop()  # below what the sampled call has hung in
    one.end()
    whole.stop()
    assert traces(model) == before
    model(inputs())
    assert (whole.steps, inner.steps) == (1, 0)


def test_stopping_while_a_sampled_call_is_under_way_keeps_the_sample():
    model = Model().eval()
    before = traces(model)
    handed = []
    monitor = watch(model, every=1, callbacks=[lambda monitor: handed.append(sorted(monitor.vitals))])
    one = call(model).begin()
    monitor.stop()
    one.end()
    assert handed == [["layers.0", "layers.1", "mha"]]
    assert traces(model) == before


def test_a_check_waits_for_the_sampled_call_of_another_thread():
    model, other = Model().eval(), Model().eval()
    before = traces(model)
    with watch(model, every=1) as monitor:
        one = call(model).begin()
        checking = Call(lambda _: check(other, inputs()))
        checking.start()
        one.end()
        assert [vitals.site.path for vitals in checking.end().vitals] == ["layers.0", "layers.1", "mha"]
    assert list(monitor.vitals) == ["layers.0", "layers.1", "mha"]
    assert traces(model) == before


def test_a_model_that_calls_itself_is_one_sample():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention("fused")

        def forward(self, x, again=True):
            x = self.attention(x)
            return self(x, again=False) if again else x

    model = Twice()
    with watch(model, every=1) as monitor:
        model(inputs())
        model(inputs())
    assert monitor.steps == 4
    assert [(sample.step, sorted(sample.vitals)) for sample in monitor.history] == [
        (0, ["attention", "attention#2"]),
        (2, ["attention", "attention#2"]),
    ]


# -- other threads meanwhile -------------------------------------------------------------------------------------------


def noted():
    """(what was compiled here, a backend that notes it)."""
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    return compiled, backend


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_what_others_have_compiled_runs_compiled_by_their_own_compiler(how):
    model = Model(torchs=False).eval()
    pausing = Call(None)

    def pauses(graph, _):
        def run(*args):
            pausing.pause()
            return graph.forward(*args)

        return run

    fast = torch.compile(model, backend=pauses) if how == "compiled" else model
    pausing.function = (lambda _: fast(inputs())) if how == "compiled" else (lambda pause: fast(inputs(), pause))
    compiled, backend = noted()
    other = torch.compile(lambda x: x.sin() + 1, backend=backend)
    with watch(fast, every=1) as monitor:
        pausing.begin()
        torch.testing.assert_close(other(inputs()), inputs().sin() + 1)
        assert len(compiled) == 1
        pausing.end()
        other(inputs())
    assert len(compiled) == 1
    assert list(monitor.vitals) == ["layers.0", "layers.1"]
    assert monitor.uncompiled is None


def test_a_stance_that_somebody_takes_meanwhile_is_theirs():
    model = Model().eval()
    with watch(model, every=1):
        one = call(model).begin()
        before = torch.compiler.set_stance("eager_on_recompile")
        assert eval_frame._stance.stance == "eager_on_recompile"
        one.end()
        assert eval_frame._stance.stance == "eager_on_recompile"
        with before:
            two = call(model).begin()
        # What it found is over; it stands for what there was before.
        two.end()
        assert eval_frame._stance.stance == "default"
    model(inputs())
    assert eval_frame._stance.stance == "default"


def test_the_registry_keeps_its_names_and_what_is_registered_meanwhile():
    registry = pytest.importorskip("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    names, own = [set(x) for x in (registry._local_mapping, registry._global_mapping)], registry["sdpa"]
    name = "flash_attention_2"
    before = registry._global_mapping[name]
    model = Model().eval()

    def mine():
        pass

    try:
        with watch(model, every=1):
            one = call(model).begin()
            assert [set(x) for x in (registry._local_mapping, registry._global_mapping)] == names
            assert registry["sdpa"] is own
            registry.register(name, mine)
            one.end()
        assert registry[name] is mine
    finally:
        registry._global_mapping[name] = before


def test_who_comes_while_a_compiled_model_is_sampled_uncompiled_meets_nothing_that_is_hung_in():
    model = Model("written", torchs=False).eval()
    plain = model(inputs())
    compiled, backend = noted()
    fast = torch.compile(model, backend=backend)
    with watch(fast, every=1, observe="inside") as monitor:
        one = call(fast).begin()
        assert torch.equal(fast(inputs()), plain)
        assert not compiled
        assert torch.equal(one.end(), plain)
    assert [sample.step for sample in monitor.history] == [0]
    torch.testing.assert_close(fast(inputs()), plain)
    assert len(compiled) == 1


def test_a_compilation_under_way_meets_nothing_that_is_hung_in():
    model = Model("written", torchs=False).eval()
    plain = model(inputs())
    calls = {}

    @torch.compiler.disable
    def wait(*_):
        if threading.current_thread() is calls.get("other"):
            calls["other"].pause()

    model.register_forward_pre_hook(wait)
    before = traces(model)

    def backend(graph, _):
        # Between dynamo's look at the modules and the guards that it makes for them.
        if traces(model)[0] != before[0]:
            calls["due"].end()
        return graph.forward

    fast = torch.compile(model, backend=backend)
    with watch(fast, every=2, observe="inside") as monitor:
        fast(inputs())
        calls["other"] = Call(lambda _: fast(inputs()))
        calls["other"].begin()
        calls["due"] = call(fast).begin()
        torch.testing.assert_close(calls["other"].end(), plain)
        torch.testing.assert_close(calls["due"].end(), plain)
    assert [sample.step for sample in monitor.history] == [0]
    assert traces(model) == before


def test_nothing_is_hung_into_a_compiled_model_while_others_run_it():
    model = Model("written", torchs=False).eval()
    others = []

    def backend(graph, _):
        def run(*args):
            if others and threading.current_thread() is others[0]:
                others[0].pause()
            return graph.forward(*args)

        return run

    fast = torch.compile(model, backend=backend)
    before = traces(model)
    with watch(fast, every=2) as monitor:
        fast(inputs())  # finds that attention written out cannot be read compiled
        others.append(Call(lambda _: fast(inputs())))
        others[0].begin()
        plain = fast(inputs())
        assert torch.equal(others[0].end(), plain)
        fast(inputs())
        fast(inputs())
    assert [sample.step for sample in monitor.history] == [0, 4]
    assert traces(model) == before


def test_a_compiled_part_that_others_call_is_theirs():
    model = Model(torchs=False).eval()
    runs = []

    def backend(graph, _):
        def run(*args):
            runs.append(threading.current_thread())
            return graph.forward(*args)

        return run

    model.layers[1].compile(backend=backend)
    model(inputs())
    with watch(model, every=1) as monitor:
        one = call(model).begin()
        runs.clear()
        model.layers[1](inputs())
        assert runs == [threading.current_thread()]
        one.end()
    assert {path: vitals.calls for path, vitals in monitor.vitals.items()} == {"layers.0": 1, "layers.1": 1}
