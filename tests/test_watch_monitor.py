"""The Monitor: what it samples, hands on and leaves behind; and that no failure of ours ends a run."""

import abc
import copy
import functools
import gc
import io
import json
import pickle
import shutil
import sys
import threading
import types
import warnings
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.overrides import _get_current_function_mode_stack  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from attemper import FrameworkError, Monitor, OptionError, Vitals, diagnose, read, watch  # noqa: E402
from attemper._watch import _mode, _record  # noqa: E402

BATCH, LENGTH, HEADS, WIDTH = 4, 5, 2, 8


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, kind="fused"):
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def see(self, q):
        """For those who want to know."""

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        self.see(q)
        if self.kind == "fused":
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            y = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    """Two layers; `explode` has the second one raise in the midst of its forward."""

    explode = None

    def __init__(self, kind="fused"):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([Attention(kind), Attention(kind)])
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        x = self.norm(x)
        for layer in self.layers:
            x = x + layer(x)
            if self.explode is not None:
                raise self.explode
        return x + self.mha(x, x, x, need_weights=False)[0]


PATHS = ["layers.0", "layers.1", "mha"]


def inputs(seed=1):
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def traces(model):
    """Everything that watching could leave behind."""
    hooks = [len(getattr(m, name)) for m in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")]
    kinds = [type(m) for m in model.modules()]
    attributes = [sorted(m.__dict__) for m in model.modules()]
    registry = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    registered = None if registry is None else (dict(registry._local_mapping), dict(registry._global_mapping))
    return hooks, kinds, attributes, len(_get_current_function_mode_stack()), registered


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_one_step_in_every_and_the_first():
    model = Model()
    with watch(model, every=3) as monitor:
        for seed in range(8):
            model(inputs(seed))
    assert [sample.step for sample in monitor.history] == [0, 3, 6]
    assert monitor.steps == 8
    assert list(monitor.vitals) == PATHS
    # Each sample is of its own call.
    entropies = [sample.vitals["layers.0"].entropy for sample in monitor.history]
    for step, entropy in zip((0, 3, 6), entropies, strict=True):
        with watch(model, every=1) as again:
            model(inputs(step))
        np.testing.assert_array_equal(again.vitals["layers.0"].entropy, entropy)
    assert not np.array_equal(entropies[0], entropies[1])


def test_micro_batches_are_merged():
    model = Model()
    with watch(model, every=2, micro_batches=2) as monitor:
        for seed in range(6):
            model(inputs(seed)).square().mean().backward()
    assert monitor.steps == 3
    assert [sample.step for sample in monitor.history] == [0, 2]
    parts = []
    for seed in (4, 5):
        with watch(model, every=1) as one:
            model(inputs(seed)).square().mean().backward()
        parts.append(one.vitals)
    for path in PATHS:
        whole, merged = monitor.vitals[path], parts[0][path].merge(parts[1][path])
        assert whole.calls == 2
        assert whole.rows.tolist() == [2 * BATCH * LENGTH] * HEADS
        for field in ("entropy", "max_logit", "pressure", "pressure_spread", "gradient_flow"):
            np.testing.assert_allclose(getattr(whole, field), getattr(merged, field), rtol=1e-12)
        assert np.isfinite(whole.pressure).all()


def test_history_keeps_the_newest():
    model = Model()
    with watch(model, every=1, keep=2) as monitor:
        for seed in range(4):
            model(inputs(seed))
    assert [sample.step for sample in monitor.history] == [2, 3]


def test_vitals_are_there_before_the_backward_pass_and_complete_after_it():
    model = Model()
    with watch(model, every=1) as monitor:
        loss = model(inputs()).square().mean()
        before = monitor.vitals["layers.0"]
        assert np.isfinite(before.entropy).all()
        assert np.isnan(before.pressure).all()
        assert not monitor.history
        loss.backward()
        assert np.isfinite(monitor.vitals["layers.0"].pressure).all()
        assert len(monitor.history) == 1


def test_log_gets_scalars_and_step():
    logged = []
    model = Model()
    with watch(model, every=2, log=lambda scalars, step: logged.append((scalars, step))) as monitor:
        for seed in range(4):
            model(inputs(seed)).square().mean().backward()
    assert [step for _, step in logged] == [0, 2]
    assert logged[-1][0] == monitor.to_scalars()
    for path in PATHS:
        scalars = logged[-1][0]
        assert scalars[f"{path}/entropy"] == pytest.approx(monitor.vitals[path].entropy.mean())
        assert scalars[f"{path}/pressure"] == pytest.approx(monitor.vitals[path].pressure.sum())
    assert "layers.0/head_1/entropy" in monitor.to_scalars(per_head=True)


def test_the_log_is_as_complete_as_the_backward_pass():
    pressures = []
    model = Model()
    with watch(model, every=1, log=lambda scalars, step: pressures.append(scalars.get("layers.0/pressure"))):
        for seed in range(2):
            model(inputs(seed)).square().mean().backward()
    assert len(pressures) == 2
    assert None not in pressures


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_log_to_a_file(kind, tmp_path):
    path = tmp_path / "run.jsonl"
    model = Model()
    with watch(model, every=1, log=kind(path)) as monitor:
        for seed in range(2):
            model(inputs(seed)).square().mean().backward()
    with watch(model, every=1, log=kind(path)):
        model(inputs())
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 0]
    back = [Vitals.from_dict(record) for record in lines[1]["vitals"]]
    assert [v.site.path for v in back] == PATHS
    for vitals in back:
        mine = monitor.vitals[vitals.site.path]
        assert vitals.site == mine.site
        np.testing.assert_array_equal(vitals.entropy, mine.entropy)
        np.testing.assert_array_equal(vitals.pressure, mine.pressure)


def test_callbacks_get_the_monitor_after_each_sample():
    seen = []
    model = Model()
    callbacks = [lambda monitor: seen.append(("one", monitor.history[-1].step)), lambda m: seen.append(("two", m))]
    with watch(model, every=2, callbacks=callbacks) as monitor:
        for seed in range(3):
            model(inputs(seed))
    assert seen == [("one", 0), ("two", monitor), ("one", 2), ("two", monitor)]


def test_findings_are_those_of_diagnose():
    model = Model()
    with torch.no_grad():
        model.layers[0].qkv.weight.mul_(100)
    with watch(model, every=1) as monitor:
        model(inputs()).square().mean().backward()
    earlier = [sample.vitals.values() for sample in monitor.history]
    assert monitor.findings == diagnose(monitor.vitals.values(), history=earlier, trained=False, unseen={})


def test_repr_says_how_it_stands():
    model = Model()
    monitor = watch(model, every=1)
    assert isinstance(monitor, Monitor)
    model(inputs())
    model(inputs())
    assert repr(monitor) == "Monitor(Model; watching, steps 2, samples 1)"
    monitor.stop()
    assert repr(monitor) == "Monitor(Model; stopped, steps 2, samples 2)"


def test_stopping_twice_does_nothing_more():
    handed = []
    model = Model()
    before = traces(model)
    monitor = watch(model, every=1, callbacks=[handed.append])
    model(inputs())
    monitor.stop()
    monitor.stop()
    assert handed == [monitor]
    assert traces(model) == before
    model(inputs())
    assert monitor.steps == 1


def test_stopping_in_other_order_than_starting():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    inner = Model()
    outer = Outer(inner)
    plain, before = outer(inputs()), traces(outer)
    one, two = watch(inner, every=1), watch(outer, every=1)
    assert torch.equal(outer(inputs()), plain)
    one.stop()
    assert torch.equal(outer(inputs()), plain)
    two.stop()
    assert traces(outer) == before
    assert list(one.vitals) == PATHS
    assert list(two.vitals) == [f"inner.{path}" for path in PATHS]


# -- what it leaves ----------------------------------------------------------------------------------------------------


def test_unsampled_calls_install_nothing():
    model = Model()
    before = traces(model)
    during = []
    model.norm.register_forward_hook(lambda *_: during.append(traces(model)))
    before = traces(model)
    with watch(model, every=2):
        model(inputs())
        model(inputs())
    sampled, unsampled = during
    assert sum(sampled[0]) > sum(before[0])
    assert unsampled[0] == before[0]
    assert unsampled[1][1:] == before[1][1:]
    assert issubclass(unsampled[1][0], Model)
    assert unsampled[2:] == before[2:]
    assert traces(model) == before


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3), torch.OutOfMemoryError("x")])
def test_what_the_model_raises_comes_through_and_leaves_nothing(error):
    model = Model()
    plain, before = model(inputs()), traces(model)
    monitor = watch(model, every=1)
    watched = traces(model)
    model.explode = error
    with pytest.raises(type(error)) as caught:
        model(inputs())
    assert caught.value is error
    del model.explode
    assert traces(model) == watched
    assert torch.equal(model(inputs()), plain)
    assert list(monitor.vitals) == PATHS
    assert all(vitals.calls == 1 for vitals in monitor.vitals.values())
    monitor.stop()
    assert traces(model) == before


def test_copies_and_pickles_of_a_watched_model_are_plain():
    model = Model()
    plain, before = model(inputs()), traces(model)
    with watch(model, every=1) as monitor:
        model(inputs())
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        shallow = copy.copy(model)
        for other in (copied, pickled, loaded, shallow):
            assert type(other) is Model
            assert torch.equal(other(inputs()), plain)
            assert traces(other) == before
        assert monitor.steps == 1
    assert type(model) is Model


def test_a_watched_model_is_what_it_was_to_everyone_else():
    model = Model()
    keys, shown = list(model.state_dict()), repr(model)
    with watch(model, every=1):
        model(inputs())
        assert list(model.state_dict()) == keys
        assert repr(model) == shown
        assert isinstance(model, Model)
        assert type(model).__name__ == "Model"
        model.load_state_dict(model.state_dict())
        model.double().float().eval().train()


def test_watching_twice_is_refused_until_stopped():
    model = Model()
    monitor = watch(model)
    with pytest.raises(OptionError, match="watched already"):
        watch(model)
    monitor.stop()
    watch(model).stop()


def test_watching_a_compiled_model_twice_is_refused():
    model = Model()
    model.compile(backend="eager")
    monitor = watch(model)
    try:
        with pytest.raises(OptionError, match="watched already"):
            watch(model)
    finally:
        monitor.stop()


@pytest.mark.parametrize(
    "options",
    [
        {"every": 0},
        {"every": True},
        {"every": 1.5},
        {"micro_batches": 0},
        {"keep": -1},
        {"observe": "outside"},
        {"log": 5},
        {"callbacks": 5},
        {"callbacks": [5]},
        {"declared_scale": "half"},
    ],
)
def test_bad_options_are_refused_and_leave_nothing(options):
    model = Model()
    before = traces(model)
    with pytest.raises(OptionError):
        watch(model, **options)
    assert traces(model) == before


@pytest.mark.parametrize("path", [".", "no such directory/log"])
def test_a_log_that_cannot_be_written_is_refused_at_the_start(path, tmp_path):
    model = Model()
    before = traces(model)
    for kind in (str, lambda path: path):
        with pytest.raises(OptionError, match=r"log is (.|\n)*Pass the path of a file"):
            watch(model, log=kind(tmp_path / path))
    assert traces(model) == before
    watch(model).stop()


@pytest.mark.parametrize("thing", [None, lambda x: x, torch.zeros(3), Model])
def test_what_is_no_module_is_refused(thing):
    with pytest.raises(FrameworkError):
        watch(thing)


def test_calls_of_one_module_are_told_apart():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Attention()

        def forward(self, x):
            return self.attn(self.attn(self.attn(x)))

    model = Twice()
    with watch(model, every=1) as monitor:
        model(inputs()).square().mean().backward()
        model(inputs()).square().mean().backward()
    assert list(monitor.vitals) == ["attn", "attn#2", "attn#3"]
    assert len({vitals.entropy[0] for vitals in monitor.vitals.values()}) == 3
    assert all(np.isfinite(vitals.pressure).all() for vitals in monitor.vitals.values())


def test_a_model_whose_forward_was_replaced_on_the_instance():
    model = Model()
    own = model.forward
    model.forward = lambda x: own(x) + 1
    mine = model.forward
    plain = model(inputs())
    with watch(model, every=1) as monitor:
        assert torch.equal(model(inputs()), plain)
    assert list(monitor.vitals) == PATHS
    assert model.forward is mine


class Halved(nn.Module):
    """Of each way to have a forward of one's own on the instance."""

    def __init__(self, way):
        super().__init__()
        self.inner = Model()
        if way == "method":
            self.forward = types.MethodType(halved, self)
        elif way == "partial":  # as accelerate does
            self.forward = functools.update_wrapper(functools.partial(halved, self), self.forward)

    def forward(self, x):
        raise AssertionError


def halved(self, x):
    return self.inner(x) / 2


@pytest.mark.parametrize("way", ["method", "partial"])
def test_copies_and_pickles_of_a_model_whose_forward_is_its_own(way):
    model = Halved(way)
    plain, own = model(inputs()), model.forward
    with watch(model, every=1) as monitor:
        assert torch.equal(model(inputs()), plain)
        copies = [copy.deepcopy(model)]
        if way == "partial":  # a method is pickled by a name that it does not have
            copies.append(pickle.loads(pickle.dumps(model)))
        for other in copies:
            assert type(other) is Halved
            assert torch.equal(other(inputs()), plain)
            for parameter in other.parameters():
                nn.init.zeros_(parameter)
            assert not other(inputs()).any()
        assert monitor.steps == 1
        model.forward = types.MethodType(lambda self, x: self.inner(x), model)
        assert torch.equal(model(inputs()), 2 * plain)
        model.forward = own
    assert [sample.step for sample in monitor.history] == [0, 1]
    assert type(model) is Halved
    assert model.forward is own


@pytest.mark.parametrize("way", ["method", "partial"])
def test_a_forward_on_the_instance_that_is_compiled_around(way):
    model = Halved(way)
    plain = model(inputs())
    with watch(model, every=2) as monitor:
        fast = torch.compile(model, backend="eager")
        for _ in range(3):
            torch.testing.assert_close(fast(inputs()), plain)
    assert [sample.step for sample in monitor.history] == [0, 2]
    assert list(monitor.vitals) == [f"inner.{path}" for path in PATHS]


def test_classes_that_keep_a_list_of_their_kind_do_not_hear_of_ours():
    known = []

    class Listing(type):
        def __new__(cls, *args):
            known.append(super().__new__(cls, *args))
            return known[-1]

    class Titled(nn.MultiheadAttention, abc.ABC):
        def __init_subclass__(cls, *, title, **options):
            super().__init_subclass__(**options)
            known.append(title)

    class Mine(Titled, title="mine"):
        pass

    class Listed(nn.Module, metaclass=Listing):
        def __init_subclass__(cls):
            known.append(cls)

        def __init__(self):
            super().__init__()
            self.mha = Mine(WIDTH, HEADS, batch_first=True)

        def forward(self, x):
            return self.mha(x, x, x)[0]

    known.clear()
    model = Listed()
    plain, before = model(inputs()), traces(model)
    for watched in (model, model.mha):
        with watch(watched, every=1) as monitor:
            assert torch.equal(model(inputs()), plain)
        assert monitor.steps == 1
    assert known == []
    assert traces(model) == before


def test_parametrized_while_it_is_watched():
    def parametrized(watched):
        torch.manual_seed(0)
        model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        monitor = watch(model, every=1) if watched else None
        nn.utils.parametrizations.weight_norm(model, "in_proj_weight")
        output = model(inputs(), inputs(), inputs())[0]
        return model, monitor, output

    plain, _, output = parametrized(watched=False)
    model, monitor, same = parametrized(watched=True)
    assert torch.equal(output, same)
    assert monitor.steps == 1
    monitor.stop()
    model(inputs(), inputs(), inputs())
    assert monitor.steps == 1
    assert [kind.__name__ for kind in type(model).__mro__] == [kind.__name__ for kind in type(plain).__mro__]
    nn.utils.parametrize.remove_parametrizations(model, "in_proj_weight")
    assert type(model) is nn.MultiheadAttention


def test_hooks_of_the_model_itself_are_called_once():
    model = Model()
    calls = []
    model.register_forward_hook(lambda *_: calls.append("after"))
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    with watch(model, every=1):
        model(inputs())
    assert calls == ["before", "after"]


@pytest.mark.parametrize("kind", ["fused", "written"])
def test_inference_mode(kind):
    model = Model(kind).eval()
    with torch.no_grad(), watch(model, every=1) as wanted:
        plain = model(inputs())
    with torch.inference_mode(), watch(model, every=1) as monitor:
        assert torch.equal(model(inputs()), plain)
    assert not monitor.unseen
    for path in PATHS:
        np.testing.assert_array_equal(monitor.vitals[path].entropy, wanted.vitals[path].entropy)
        assert monitor.vitals[path].site == wanted.vitals[path].site


@pytest.mark.parametrize("kind", ["fused", "written"])
def test_autocast(kind):
    model = Model(kind)

    def run():
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(inputs())
        output.float().square().mean().backward()
        return output, [p.grad.clone() for p in model.parameters()]

    plain, wanted = run()
    with watch(model, every=1) as monitor:
        output, mine = run()
    assert torch.equal(output, plain)
    assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))
    with watch(model, every=1) as exact:
        model(inputs()).square().mean().backward()
    for path in PATHS:
        one, two = monitor.vitals[path], exact.vitals[path]
        np.testing.assert_allclose(one.entropy, two.entropy, rtol=0.02)
        np.testing.assert_allclose(one.total_pressure, two.total_pressure, rtol=0.2, atol=1e-3)
        assert one.site.dtype == "bfloat16"
        assert one.site.effective_scale == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("kind", ["fused", "written"])
def test_of_two_losses_of_one_pass_the_first_counts(kind):
    model = Model(kind)

    def pressure(*losses):
        with watch(model, every=1) as monitor:
            output = model(inputs())
            for i, loss in enumerate(losses):
                loss(output).backward(retain_graph=i < len(losses) - 1)
        return monitor.vitals["layers.0"].pressure

    one, two = pressure(lambda y: y.square().mean()), pressure(lambda y: y[..., 0].mean())
    assert np.abs(two).min() > 1e-6
    np.testing.assert_allclose(
        pressure(lambda y: y.square().mean(), lambda y: y[..., 0].mean()), one, rtol=1e-4, atol=1e-8
    )


# -- threads and checkpoints -------------------------------------------------------------------------------------------


def test_calls_of_other_threads_are_not_mixed_in():
    model = Model()
    plain = model(inputs())
    started, done = threading.Event(), threading.Event()
    others = []

    def other():
        started.wait(20)
        with torch.no_grad():
            others.append(model(inputs()))
        done.set()

    def pause(*_):
        if threading.current_thread() is threading.main_thread() and not done.is_set():
            started.set()
            done.wait(20)

    thread = threading.Thread(target=other)
    model.layers[0].register_forward_hook(pause)
    with watch(model, every=100) as monitor:
        thread.start()
        output = model(inputs())
        thread.join(20)
    assert torch.equal(output, plain)
    assert torch.equal(others[0], plain)
    assert list(monitor.vitals) == PATHS
    for vitals in monitor.vitals.values():
        assert vitals.calls == 1
        assert vitals.rows.tolist() == [BATCH * LENGTH] * HEADS


class InThreads(nn.Module):
    """As DataParallel does: replicas of the module, each in a thread of its own."""

    def __init__(self, module, explode=False):
        super().__init__()
        self.module = module
        self.explode = explode

    def forward(self, x):
        replicas = []
        for _ in range(2):
            mine = {m: m._replicate_for_data_parallel() for m in self.module.modules()}
            for module, replica in mine.items():
                for name, child in module._modules.items():
                    replica._modules[name] = mine[child]
                for name, parameter in module._parameters.items():
                    setattr(replica, name, parameter)
            replicas.append(mine[self.module])
        outputs = [None, None]

        def run(i):
            with torch.no_grad():
                outputs[i] = replicas[i](x[2 * i : 2 * i + 2])

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat(outputs)


@pytest.mark.parametrize("kind", ["fused", "written"])
def test_replicas_in_threads_are_merged(kind):
    model = InThreads(Model(kind)).eval()
    with torch.no_grad():
        plain = model(inputs())
        with watch(model, every=1) as monitor:
            assert torch.equal(model(inputs()), plain)
        with watch(model.module, every=1) as alone:
            model.module(inputs())
    assert sorted(monitor.vitals) == [f"module.{path}" for path in PATHS]
    for path in PATHS:
        vitals, whole = monitor.vitals[f"module.{path}"], alone.vitals[path]
        assert vitals.calls == 2
        np.testing.assert_allclose(vitals.entropy, whole.entropy, rtol=1e-5)
        np.testing.assert_array_equal(vitals.rows, whole.rows)


class Checkpointed(nn.Module):
    def __init__(self, kind, reentrant):
        super().__init__()
        self.layers = nn.ModuleList([Attention(kind), Attention(kind)])
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            y = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
            x = x + y
        return x


@pytest.mark.parametrize("kind", ["fused", "written"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, kind):
    found = {}
    gradients = {}
    for how in (None, reentrant):
        torch.manual_seed(3)
        model = Checkpointed(kind, how)
        with watch(model, every=1) as monitor:
            model(inputs().requires_grad_()).square().mean().backward()
        found[how] = monitor.vitals
        gradients[how] = [p.grad for p in model.parameters()]
        assert not monitor.unseen
    for one, two in zip(gradients[None], gradients[reentrant], strict=True):
        torch.testing.assert_close(one, two)
    assert list(found[reentrant]) == ["layers.0", "layers.1"]
    for path, wanted in found[None].items():
        vitals = found[reentrant][path]
        assert vitals.calls == 1
        np.testing.assert_array_equal(vitals.rows, wanted.rows)
        np.testing.assert_allclose(vitals.entropy, wanted.entropy, rtol=1e-6)
        if reentrant:
            # The pass that has a graph is another one, inside the backward pass.
            assert np.isnan(vitals.pressure).all()
        else:
            np.testing.assert_allclose(vitals.pressure, wanted.pressure, rtol=1e-5)
            np.testing.assert_allclose(vitals.gradient_flow, wanted.gradient_flow, rtol=1e-4)


@pytest.mark.parametrize("kind", ["fused", "written", "MultiheadAttention"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_sampled_step_keeps_no_tensor_alive(backward, kind):
    kept = []

    class Noting(Attention):
        def see(self, q):
            kept.append(weakref.ref(q))

        def forward(self, x):
            if kind == "MultiheadAttention":
                y = self.mha(x, x, x)[0]
                kept.append(weakref.ref(y))
                return y
            return super().forward(x)

    model = Noting(kind)
    model.mha = nn.MultiheadAttention(WIDTH, HEADS)
    with watch(model, every=1):
        for seed in range(3):
            output = model(inputs(seed))
            if backward:
                output.sum().backward()
            del output
    gc.collect()
    assert len(kept) == 3
    assert [ref() for ref in kept] == [None] * 3


# -- failures of ours --------------------------------------------------------------------------------------------------


def garbage(*args, **kwargs):
    return "no Reading"


def raising(error):
    def function(*args, **kwargs):
        raise error

    return function


BROKEN = {
    "RuntimeError": raising(RuntimeError("kernel")),
    "OutOfMemoryError": raising(torch.OutOfMemoryError("no memory")),
    "MemoryError": raising(MemoryError("no memory")),
    "garbage": garbage,
}


@pytest.mark.parametrize("kind", ["fused", "written"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_reading_that_fails_is_one_warning(name, kind, monkeypatch):
    model = Model(kind)
    x = inputs()
    plain = model(x)
    plain.square().mean().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    monkeypatch.setattr(_record, "read", BROKEN[name])
    monkeypatch.setattr(_record.Written, "read", BROKEN[name])
    with watch(model, every=1) as monitor, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            output = model(x)
            output.square().mean().backward()
        vitals = monitor.vitals
        monitor.stop()
    assert torch.equal(output, plain)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True))
    assert [w.category for w in caught] == [RuntimeWarning]
    assert "not affected" in str(caught[0].message)
    assert not vitals
    if name != "garbage":
        assert set(monitor.unseen) == set(PATHS)
        assert all(name in why for why in monitor.unseen.values())


@pytest.mark.parametrize("name", BROKEN)
def test_a_failure_in_the_backward_pass_is_one_warning(name, monkeypatch):
    model = Model()
    x = inputs()
    model(x).square().mean().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    monkeypatch.setattr(_record, "attend", BROKEN[name])
    with watch(model, every=1) as monitor, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x).square().mean().backward()
        vitals = monitor.vitals
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True))
    assert [w.category for w in caught] == [RuntimeWarning]
    # What the forward pass measured is there all the same, and the pressure that needs no replay.
    assert np.isfinite(vitals["layers.0"].entropy).all()
    assert np.isfinite(vitals["layers.0"].pressure).all()
    assert np.isnan(vitals["layers.0"].gradient_flow).all()


@pytest.mark.parametrize("name", BROKEN)
def test_inside_failing_falls_back_to_the_models_own_kernel(name, monkeypatch):
    model = Model()
    plain = model(inputs())
    monkeypatch.setattr(_mode, "attend", BROKEN[name])
    with watch(model, every=1, observe="inside") as monitor, pytest.warns(RuntimeWarning, match="not affected"):
        output = model(inputs())
    assert torch.equal(output, plain)
    assert list(monitor.vitals) == PATHS


@pytest.mark.parametrize("what", ["callback", "log", "file"])
def test_a_callback_or_log_that_raises_is_one_warning(what, tmp_path):
    options = {
        "callback": {"callbacks": [raising(RuntimeError("mine"))]},
        "log": {"log": raising(RuntimeError("mine"))},
        "file": {"log": tmp_path / "directory" / "log"},
    }[what]
    model = Model()
    plain = model(inputs())
    (tmp_path / "directory").mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch(model, every=1, **options) as monitor:
            shutil.rmtree(tmp_path / "directory")
            for _ in range(3):
                assert torch.equal(model(inputs()), plain)
    assert [w.category for w in caught] == [RuntimeWarning]
    assert len(monitor.history) == 3


def test_one_callback_that_raises_does_not_keep_the_others_from_it():
    seen = []
    with watch(Model(), every=1, log=raising(RuntimeError("mine")), callbacks=[seen.append]) as monitor:
        monitor.model(inputs())
        with pytest.warns(RuntimeWarning, match="mine"):
            monitor.stop()
    assert seen == [monitor]


@pytest.mark.parametrize("name", BROKEN)
def test_where_warnings_are_errors_the_run_goes_on(name, monkeypatch):
    model = Model()
    plain = model(inputs())
    monkeypatch.setattr(_record, "read", BROKEN[name])
    with watch(model, every=1, log=raising(RuntimeError("mine"))) as monitor, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            output = model(inputs())
            assert torch.equal(output, plain)
            output.square().mean().backward()
        monitor.stop()


def test_a_lineage_that_fails_is_one_warning(monkeypatch):
    from attemper._watch import _lineage

    model = Model()
    plain = model(inputs())
    monkeypatch.setattr(_lineage.Lineage, "follow", raising(RuntimeError("lost")))
    with watch(model, every=1) as monitor, pytest.warns(RuntimeWarning, match="lost") as caught:
        assert torch.equal(model(inputs()), plain)
    assert len(caught) == 1
    # Where the operands come from is not known; what they are is.
    assert np.isfinite(monitor.vitals["layers.0"].entropy).all()


def test_declared_scale_functions_that_raise_are_one_warning():
    model = Model()
    plain = model(inputs())
    with watch(model, every=1, declared_scale=raising(KeyError("mine"))), pytest.warns(RuntimeWarning, match="mine"):
        assert torch.equal(model(inputs()), plain)


def test_nan_in_the_parameters_is_no_failure():
    model = Model()
    with torch.no_grad():
        model.layers[1].qkv.weight[0, 0] = torch.nan
    with watch(model, every=1) as monitor:
        model(inputs()).square().mean().backward()
    assert monitor.vitals["layers.1"].nonfinite.tolist() == [BATCH * LENGTH, 0]
    assert monitor.vitals["layers.0"].nonfinite.tolist() == [0, 0]
    assert not monitor.unseen
    assert any(finding.rule == "nonfinite" for finding in monitor.findings)


def test_the_reading_is_of_a_call_as_it_was_made():
    """In place on its inputs right after the call: what was read is what was there."""

    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            q, k = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k))
            self.kept = q.clone(), k.clone()
            y = functional.scaled_dot_product_attention(q, k, k)
            q.zero_()
            k.zero_()
            return y

    model = Overwriting()
    with torch.no_grad(), watch(model, every=1) as monitor:
        model(inputs())
    wanted = read(*model.kept).entropy.mean((0, 2))
    np.testing.assert_allclose(monitor.vitals["(root)"].entropy, wanted, rtol=1e-5)


@pytest.mark.parametrize("where", ["_look_at_inputs", "_hooks", "__init__"])
def test_a_failure_before_the_pass_is_one_warning_and_leaves_nothing(where, monkeypatch):
    from attemper._watch._session import Session

    def broken(*args, **kwargs):
        raise RuntimeError("set up wrongly")

    model = Model()
    plain = model(inputs())
    before = traces(model)
    monkeypatch.setattr(Session, where, broken)
    monitor = watch(model, every=1)
    with pytest.warns(RuntimeWarning, match="set up wrongly"):
        assert torch.equal(model(inputs()), plain)
    assert torch.equal(model(inputs()), plain)
    monitor.stop()
    assert traces(model) == before
