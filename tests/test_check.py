"""`check` finds a planted fault where it is, measures pressure and probe exactly, and leaves the model as it was."""

import copy
import json
import math
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from attemper import Checkup, FrameworkError, OptionError, check, watch  # noqa: E402

DIM, HEADS, WIDTH = 48, 6, 8  # 1/√48 is not half of 1/√8, as 1/√32 would be; an even head count has a fast path
ROOT = WIDTH**-0.5
WAYS = ("sdpa", "matmul", "einsum")
FACTORS = (0.5, 0.5**0.5, 1.0, 2**0.5, 2.0)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The models are too small to share, and the other workers want their cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class Attention(nn.Module):
    """Self-attention in one of three ways; what is wrong with it is set from outside."""

    def __init__(self, way, softcap=None, premultiplied=False):
        super().__init__()
        self.way, self.softcap, self.premultiplied = way, softcap, premultiplied
        self.scale = ROOT
        self.heed = True
        self.blind = ()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def bias(self, x, attention_mask):
        """What is added to the scores: a finite minimum hides, as in Hugging Face's models."""
        lowest = torch.finfo(x.dtype).min
        bias = torch.zeros(x.shape[0], 1, x.shape[1], x.shape[1], dtype=x.dtype)
        if attention_mask is not None and self.heed:
            bias = bias.masked_fill(attention_mask[:, None, None] == 0, lowest)
        for row in self.blind:
            bias[:, :, row] = lowest
        return bias

    def forward(self, x, attention_mask=None):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.bias(x, attention_mask) if attention_mask is not None or self.blind else None
        scale = self.scale
        if self.premultiplied:
            q, scale = q * scale, 1.0
        if self.way == "sdpa":
            output = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        else:
            scores = torch.einsum("bhid,bhjd->bhij", q, k) if self.way == "einsum" else q @ k.transpose(-2, -1)
            scores = scores * scale
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            if bias is not None:
                scores = scores + bias
            weights = scores.softmax(-1)
            output = torch.einsum("bhij,bhjd->bhid", weights, v) if self.way == "einsum" else weights @ v
        return self.out(output.transpose(1, 2).reshape(batch, length, DIM))


class Model(nn.Module):
    """Layers of it, with norms, a buffer that counts the calls, and dropout."""

    def __init__(self, way="sdpa", layers=3, **options):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(layers))
        self.layers = nn.ModuleList(Attention(way, **options) for _ in range(layers))
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x, attention_mask=None):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + self.dropout(layer(norm(x), attention_mask))
        return x

    def heat(self, factor):
        """Really multiply every scale."""
        for layer in self.layers:
            layer.scale = layer.scale * factor


def batch(sequences=5, length=12):
    return torch.randn(sequences, length, DIM, generator=torch.Generator().manual_seed(1))


TARGET = torch.randn(DIM, generator=torch.Generator().manual_seed(2))


def loss_of(output):
    """The mean over the batch of something that no symmetry makes zero."""
    output = output[0] if isinstance(output, tuple) else output
    return (output * TARGET.to(output.dtype)).tanh().square().mean()


def grave(checkup):
    return [(f.rule, f.severity, dict(f.where)) for f in checkup if f.severity != "information"]


def state_of(model):
    """All that a check might have touched."""
    return {
        "parameters": {name: (p.detach().clone(), p.data_ptr()) for name, p in model.named_parameters()},
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "grads": {name: p.grad for name, p in model.named_parameters()},
        "values of grads": {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "training": {name: m.training for name, m in model.named_modules()},
        "classes": {name: type(m) for name, m in model.named_modules()},
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "hooks": {
            name: [len(v) for k, v in sorted(vars(m).items()) if k.endswith("_hooks") and v is not None]
            for name, m in model.named_modules()
        },
        "modes": torch.overrides._get_current_function_mode_stack(),
        "grad": torch.is_grad_enabled(),
        "rng": torch.get_rng_state(),
    }


def same(one, two):
    assert one.keys() == two.keys()
    for part, before in one.items():
        after = two[part]
        if part in ("parameters", "buffers", "values of grads"):
            assert before.keys() == after.keys()
            for name, was in before.items():
                here, there = (x if isinstance(x, tuple) else (x,) for x in (was, after[name]))
                assert torch.equal(here[0], there[0]), (part, name)
                assert here[1:] == there[1:], (part, name)
        elif part == "grads":
            assert all(after[name] is was for name, was in before.items())
        elif part == "rng":
            # `check` draws no random numbers itself, and in evaluation mode neither does a model with dropout.
            assert torch.equal(before, after)
        else:
            assert before == after, part


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, 64, batch_first=True), 2)


class Multihead(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        self.attn = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


MODELS = {
    **{way: lambda way=way: Model(way) for way in WAYS},
    "softcap": lambda: Model("matmul", softcap=1.5),
    "premultiplied": lambda: Model("sdpa", premultiplied=True),
    "multihead": Multihead,
    "encoder": encoder,
    "encoder layer": lambda: nn.TransformerEncoderLayer(DIM, HEADS, 64, batch_first=True, norm_first=True),
}


# -- the model afterwards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"loss": loss_of}, {"loss": loss_of, "probe": True}], ids=["forward", "loss", "probe"]
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_everything_is_as_it_was(name, training, options):
    model, x = MODELS[name]().train(training), batch()
    model.eval()
    with torch.no_grad():
        output = model(x)
    model.train(training)
    before = state_of(model)
    check(model, x, **options)
    same(before, state_of(model))
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), output)
    assert not x.requires_grad


@pytest.mark.parametrize("name", MODELS)
def test_gradients_that_were_there_stay(name):
    model, x = MODELS[name](), batch()
    loss_of(model(x)).backward()
    before = state_of(model)
    assert before["values of grads"]
    check(model, x, loss=loss_of, probe=True)
    same(before, state_of(model))


def test_modes_of_single_modules_and_frozen_parameters_stay():
    model, x = Model(), batch()
    model.train()
    model.layers[1].eval()
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    before = state_of(model)
    frozen = check(model, x, loss=loss_of, probe=True)
    same(before, state_of(model))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    before = state_of(model)
    all_frozen = check(model, x, loss=loss_of)
    same(before, state_of(model))
    model.requires_grad_(True)
    # What is frozen is measured like the rest.
    assert frozen.sequence_pressure == all_frozen.sequence_pressure == check(model, x, loss=loss_of).sequence_pressure


class Raises(Model):
    """Fails in its n-th call."""

    calls, fails_at = 0, 1

    def forward(self, x, attention_mask=None):
        self.calls += 1
        x = super().forward(x, attention_mask)
        if self.calls == self.fails_at:
            raise ArithmeticError("the model's own")
        return x


@pytest.mark.parametrize("fails_at", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_everything_is_as_it_was_when_the_model_raises(way, fails_at):
    """In the reading pass, and at two factors of the probe."""
    model = Raises(way).train()
    model.fails_at, model.calls = fails_at, 0
    before = state_of(model)
    with pytest.raises(ArithmeticError, match="the model's own"):
        check(model, batch(), loss=loss_of, probe=True)
    same(before, state_of(model))


@pytest.mark.parametrize("name", ["multihead", "encoder", "encoder layer"])
def test_weights_that_a_probe_changes_come_back_when_the_model_raises(name):
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = MODELS[name](), 0

        def forward(self, x):
            self.calls += 1
            # From the second pass on the lengths do not fit.
            return self.inner(x if self.calls < 2 else x[..., :-1])

    model = Fragile().train()
    before = state_of(model)
    with pytest.raises((AssertionError, RuntimeError)):
        check(model, batch(), loss=loss_of, probe=True)
    same(before, state_of(model))


def test_everything_is_as_it_was_when_the_loss_raises():
    model = Model().train()
    before = state_of(model)
    with pytest.raises(ZeroDivisionError):
        check(model, batch(), loss=lambda output: 1 / 0)
    with pytest.raises(OptionError, match="no loss"):
        check(model, batch(), probe=True)
    same(before, state_of(model))


def test_random_numbers_of_the_model_itself_are_its_own():
    """A model that draws in evaluation mode draws once per pass; `check` neither adds to it nor puts it back."""

    class Noisy(Model):
        def forward(self, x):
            return super().forward(x + 0.1 * torch.randn(x.shape))

    model, x = Noisy(), batch()
    torch.manual_seed(7)
    check(model, x, loss=loss_of, probe=True)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    for _ in range(1 + len(FACTORS)):
        torch.randn(x.shape)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_model_with_a_train_method_of_its_own():
    """As some adapters merge their weights when they are switched to evaluation."""

    class Merging(nn.Linear):
        merged = False

        def train(self, mode=True):
            super().train(mode)
            if mode == self.merged:
                self.merged = not mode
                with torch.no_grad():
                    self.weight.add_(-1.0 if mode else 1.0)
            return self

    model = nn.Sequential(Merging(DIM, DIM), Model()).train()
    weight = model[0].weight.detach().clone()
    check(model, batch())
    assert model[0].training
    torch.testing.assert_close(model[0].weight.detach(), weight)


def test_under_no_grad_there_is_a_pressure_all_the_same():
    model, x = Model(), batch()
    usual = check(model, x, loss=loss_of)
    with torch.no_grad():
        checkup = check(model, x, loss=loss_of)
        assert not torch.is_grad_enabled()
    assert checkup.sequence_pressure == usual.sequence_pressure


def test_in_inference_mode_there_is_no_graph_to_be_had():
    model, x = Model(), batch()
    with torch.inference_mode():
        checkup = check(model, x, loss=loss_of, probe=True)
        assert torch.is_inference_mode_enabled()
    assert checkup.sequence_pressure == ()
    assert dict(checkup.probe)[1.0] == checkup.loss


# -- the loss --------------------------------------------------------------------------------------------------------


class Returns(nn.Module):
    """A model whose output is made of the usual one and its loss."""

    def __init__(self, make):
        super().__init__()
        self.model, self.make = Model(), make

    def forward(self, x, labels=None):
        output = self.model(x)
        return self.make(output, loss_of(output))


@pytest.mark.parametrize("labels", [{}, {"labels": torch.zeros(5)}], ids=["", "labels"])
@pytest.mark.parametrize(
    "make",
    [
        lambda output, loss: loss,
        lambda output, loss: loss.reshape(1),
        lambda output, loss: {"loss": loss, "logits": output},
        lambda output, loss: SimpleNamespace(loss=loss, logits=output),
    ],
    ids=["scalar", "one element", "dict", "attribute"],
)
def test_a_loss_that_the_model_returns(make, labels):
    model, x = Returns(make), batch()
    expected = check(model.model, x, loss=loss_of, probe=True)
    found = check(model, x, probe=True, **labels)
    assert found.loss == expected.loss
    assert found.sequence_pressure == expected.sequence_pressure
    assert found.probe == expected.probe
    assert len(found.vitals) == 3


def test_the_callers_loss_goes_before_the_models():
    model, x = Returns(lambda output, loss: {"loss": 100 * loss, "logits": output}), batch()
    assert check(model, x, loss=lambda o: loss_of(o["logits"])).loss == check(model.model, x, loss=loss_of).loss


@pytest.mark.parametrize(
    "make",
    [
        lambda output, loss: output,
        lambda output, loss: (loss, output),
        lambda output, loss: {"logits": output},
        lambda output, loss: {"loss": None},
        lambda output, loss: {"loss": output},
        lambda output, loss: SimpleNamespace(loss=3.5),
        lambda output, loss: None,
        lambda output, loss: torch.tensor(3),  # a count is no loss
    ],
)
def test_no_loss(make):
    model, x = Returns(make), batch()
    checkup = check(model, x)
    assert (checkup.loss, checkup.sequence_pressure, checkup.pressure, checkup.probe) == (None, (), None, ())
    assert checkup.pressure_error is None
    assert all(np.isnan(v.pressure).all() and np.isnan(v.gradient_flow).all() for v in checkup.vitals)
    with pytest.raises(OptionError, match="A probe compares losses"):
        check(model, x, probe=True)


@pytest.mark.parametrize("loss", ["mse", 3.5, torch.tensor(1.0), [loss_of]])
def test_a_loss_that_is_no_function(loss):
    with pytest.raises(OptionError, match=r"loss is (.|\n)*Pass a function"):
        check(Model(), batch(), loss=loss)


@pytest.mark.parametrize("value", [None, 1.0, torch.ones(2), torch.ones(0), "low"])
def test_a_loss_that_returns_no_number(value):
    with pytest.raises(OptionError, match=r"loss returned (.|\n)*one number"):
        check(Model(), batch(), loss=lambda output: value)


def test_a_loss_without_a_graph():
    checkup = check(Model(), batch(), loss=lambda output: loss_of(output).detach(), probe=True)
    assert checkup.loss is not None
    assert len(checkup.probe) == 5
    assert checkup.sequence_pressure == ()


@pytest.mark.parametrize("model", [None, "gpt2", 3, lambda x: x, {"a": 1}, nn.Linear])
def test_what_is_no_module(model):
    with pytest.raises(FrameworkError, match="not a torch module"):
        check(model, batch())


# -- pressure --------------------------------------------------------------------------------------------------------


def true_pressure(model, x, **kwargs):
    """The gradient of the loss to the log of every scale at once, by autograd in float64."""
    model = copy.deepcopy(model).double().eval()
    moved = torch.zeros((), dtype=torch.float64, requires_grad=True)
    model.heat(moved.exp())
    loss = loss_of(model(x.double(), **kwargs))
    return float(torch.autograd.grad(loss, moved)[0])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, {"premultiplied": True}, {"softcap": 1.5}], ids=str)
@pytest.mark.parametrize("way", ["matmul", "einsum"])
def test_pressure_is_the_gradient_to_the_log_of_all_scales(way, options, padded):
    model, x = Model(way, **options), batch()
    kwargs = {}
    if padded:
        kwargs["attention_mask"] = torch.ones(x.shape[:2], dtype=torch.int64)
        kwargs["attention_mask"][1, 9:] = kwargs["attention_mask"][3, 5:] = 0
    checkup = check(model, x, loss=loss_of, **kwargs)
    assert checkup.sequences == len(checkup.sequence_pressure) == 5
    assert checkup.pressure == pytest.approx(true_pressure(model, x, **kwargs), rel=1e-4, abs=1e-7)
    # A sequence's is what it would be alone, as the loss is a mean over them.
    for n, found in enumerate(checkup.sequence_pressure):
        alone = {name: value[n : n + 1] for name, value in kwargs.items()}
        assert found == pytest.approx(true_pressure(model, x[n : n + 1], **alone), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("premultiplied", [False, True])
def test_pressure_is_the_same_however_attention_is_written(premultiplied, padded):
    kwargs = {"attention_mask": torch.ones(5, 12)} if padded else {}
    if padded:
        kwargs["attention_mask"][2, 4:] = 0
    model, by_hand = Model("sdpa", premultiplied=premultiplied), Model("matmul")
    by_hand.load_state_dict(model.state_dict())
    one, two = (check(m, batch(), loss=loss_of, **kwargs) for m in (model, by_hand))
    assert one.sequence_pressure == pytest.approx(two.sequence_pressure, rel=1e-4, abs=1e-7)
    for here, there in zip(one.vitals, two.vitals, strict=True):
        np.testing.assert_allclose(here.pressure, there.pressure, rtol=1e-3, atol=1e-7)
        np.testing.assert_allclose(here.gradient_flow, there.gradient_flow, rtol=1e-3)


def heated_weights(model, factor):
    """torch's modules take no scale: multiply what makes q."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            with torch.no_grad():
                module.in_proj_weight[:DIM] *= factor
                module.in_proj_bias[:DIM] *= factor
    return model


@pytest.mark.parametrize("name", ["multihead", "encoder", "encoder layer"])
def test_pressure_of_torchs_modules(name):
    model, x = MODELS[name]().eval(), batch()
    checkup = check(model, x, loss=loss_of)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        up, down = (float(loss_of(heated_weights(exact, math.exp(e))(x.double()))) for e in (1e-4, -1e-4))
    assert checkup.pressure == pytest.approx((up - down) / 2e-4, rel=1e-3, abs=1e-8)


def test_pressure_by_layer_adds_up_to_the_whole():
    checkup = check(Model("matmul"), batch(), loss=loss_of)
    layers = sum(float(v.total_pressure[0]) for v in checkup.vitals)
    heads = sum(float(v.pressure.sum()) for v in checkup.vitals)
    assert checkup.pressure == pytest.approx(layers, rel=1e-5)
    assert checkup.pressure == pytest.approx(heads, rel=1e-5)


def test_the_standard_error_is_that_of_a_mean():
    checkup = check(Model(), batch(), loss=loss_of)
    rows = np.array(checkup.sequence_pressure)
    assert checkup.pressure == pytest.approx(rows.mean())
    assert checkup.pressure_error == pytest.approx(rows.std(ddof=1) / np.sqrt(5))
    alone = check(Model(), batch(1), loss=loss_of)
    assert (alone.sequences, alone.pressure_error) == (1, None)
    assert alone.pressure is not None
    for v in checkup.vitals:
        assert v.weights["total_pressure"].tolist() == [5]
        assert np.isfinite(v.total_pressure_error).all()


def test_batch_first_or_not():
    first, second = Multihead(), Multihead(batch_first=False)
    second.load_state_dict(first.state_dict())
    x = batch()
    one = check(first, x, loss=loss_of, probe=True)
    two = check(second, x.transpose(0, 1), loss=loss_of, probe=True)
    assert one.sequences == two.sequences == 5
    assert one.sequence_pressure == pytest.approx(two.sequence_pressure, rel=1e-4)
    assert dict(one.probe) == pytest.approx(dict(two.probe))


@pytest.mark.parametrize(("length", "sequences"), [(12, 5), (3, 5), (2, 4), (1, 4)])
def test_length_first_by_hand(length, sequences):
    class Transposed(Model):
        def forward(self, x):
            return super().forward(x.transpose(0, 1)).transpose(0, 1)

    model, x = Transposed(), batch(sequences, length)
    plain = Model()
    plain.load_state_dict(model.state_dict())
    one, two = check(plain, x, loss=loss_of), check(model, x.transpose(0, 1), loss=loss_of)
    assert one.pressure == pytest.approx(two.pressure, rel=1e-4)
    if sequences % length:
        assert one.sequence_pressure == pytest.approx(two.sequence_pressure, rel=1e-4, abs=1e-9)
    else:
        # The first axis of the input is taken for the batch wherever it divides the batch of the calls.
        assert two.sequences == length


def test_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = nn.TransformerDecoderLayer(DIM, HEADS, 64, batch_first=True)

        def forward(self, x, memory, *, offset=None):
            return self.decoder(x + (0 if offset is None else offset), memory)

    x, memory = batch(), batch(5, 7)
    checkup = check(Two(), x, memory, offset=torch.ones(DIM), loss=loss_of, probe=True)
    assert [v.site.path for v in checkup.vitals] == ["decoder.self_attn", "decoder.multihead_attn"]
    assert checkup.inputs == "input 0 5 × 12 × 48, input 1 5 × 7 × 48, offset 48"
    assert checkup.vitals[1].visible_keys.tolist() == [7] * HEADS
    assert checkup.pressure is not None
    assert checkup.unseen == {}


def test_pressure_counts_calls_of_another_batch_size():
    """A prompt that all sequences share is encoded once."""

    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(1, 4, DIM))
            self.encoder, self.body = Model("matmul", 1), Model("matmul", 1)
            self.layers = [*self.encoder.layers, *self.body.layers]

        heat = Model.heat

        def forward(self, x):
            shared = self.encoder(self.prompt).expand(x.shape[0], -1, -1)
            return self.body(torch.cat([shared, x], 1))

    model, x = Prompted(), batch()
    moved = [float(v.total_pressure[0]) for v in check(model, x, loss=loss_of).vitals]
    assert sum(moved) == pytest.approx(true_pressure(model, x), rel=1e-4)  # each layer's own is right
    assert check(model, x, loss=loss_of).pressure == pytest.approx(sum(moved), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_other_types(name, dtype):
    model, x = MODELS[name]().to(dtype), batch().to(dtype)
    before = state_of(model)
    checkup = check(model, x, loss=loss_of, probe=True)
    same(before, state_of(model))
    assert grave(checkup) == []
    assert checkup.model["dtype"] == str(dtype).removeprefix("torch.")
    exact = check(model.float(), x.float(), loss=loss_of)
    assert len(checkup.vitals) == len(exact.vitals)
    tolerance = 1e-5 if dtype == torch.float64 else 0.05
    assert checkup.loss == pytest.approx(exact.loss, rel=tolerance)
    size = np.abs(exact.sequence_pressure).max()
    # Gradients of this size are near the least that float16 can hold.
    assert checkup.sequence_pressure == pytest.approx(exact.sequence_pressure, abs=size * (10 * tolerance))
    for v in checkup.vitals:
        assert v.site.effective_scale == pytest.approx(ROOT, rel=1e-2)


def test_parameters_and_tensors_of_inference_mode():
    with torch.inference_mode():
        model, x = Model(), batch()
    assert grave(check(model, x)) == []
    assert len(check(model, batch()).vitals) == 3


@pytest.mark.parametrize("which", ["parameters", "inputs"])
def test_inference_tensors_with_a_loss(which):
    """They have no gradients: the loss and the readings are there, the pressure is not."""
    with torch.inference_mode():
        model, x = Model(), batch()
    if which == "inputs":
        model = Model()
    checkup = check(model, x, loss=loss_of)
    assert checkup.loss is not None
    assert len(checkup.vitals) == 3


# -- the probe -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", [*WAYS, "softcap", "premultiplied"])
def test_the_probe_really_multiplies_the_scale(name, masked):
    model, x = MODELS[name]().eval(), batch()
    kwargs = {}
    if masked:
        kwargs["attention_mask"] = torch.ones(x.shape[:2])
        kwargs["attention_mask"][1, 7:] = 0
    checkup = check(model, x, loss=loss_of, probe=True, **kwargs)
    assert [factor for factor, _ in checkup.probe] == pytest.approx(FACTORS)
    assert dict(checkup.probe)[1.0] == checkup.loss
    for factor, found in checkup.probe:
        heated = copy.deepcopy(model)
        heated.heat(factor)
        with torch.no_grad():
            assert found == pytest.approx(float(loss_of(heated(x, **kwargs))), rel=2e-6)
    assert len({loss for _, loss in checkup.probe}) == 5


@pytest.mark.parametrize("name", ["multihead", "encoder", "encoder layer"])
def test_the_probe_of_torchs_modules(name):
    model, x = MODELS[name]().eval(), 3 * batch()
    checkup = check(model, x, loss=loss_of, probe=True)
    # The pass with a graph leaves torch's fast path, whose rounding is another.
    assert dict(checkup.probe)[1.0] == pytest.approx(checkup.loss, rel=1e-6)
    for factor, found in checkup.probe:
        with torch.no_grad():
            assert found == pytest.approx(float(loss_of(heated_weights(model, factor)(x))), rel=2e-6)
    assert len({loss for _, loss in checkup.probe}) == 5


@pytest.mark.parametrize("name", ["encoder", "encoder layer"])
def test_the_fast_path_stays_fast(name, monkeypatch):
    """What runs in the probe, and without a loss in the reading, is the kernel that runs without `check`."""
    calls, fast = [], torch._transformer_encoder_layer_fwd

    def counted(*args):
        calls.append(args)
        return fast(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    model, x = MODELS[name]().eval(), batch()
    layers = 2 if name == "encoder" else 1
    check(model, x)
    assert len(calls) == layers
    check(model, x, loss=loss_of, probe=True)
    assert len(calls) == layers * (1 + len(FACTORS))


def test_the_slope_of_the_probe_is_the_pressure():
    checkup = check(Model("matmul"), batch(), loss=loss_of, probe=True)
    losses = dict(checkup.probe)
    slope = (losses[2**0.5] - losses[0.5**0.5]) / math.log(2)
    assert checkup.pressure == pytest.approx(slope, rel=0.1)


def test_a_probe_of_operands_by_keyword():
    class Keywords(Model):
        def forward(self, x):
            q = self.layers[0].qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
            return functional.scaled_dot_product_attention(query=q[0], key=q[1], value=q[2]).transpose(1, 2).flatten(2)

    checkup = check(Keywords(), batch(), loss=loss_of, probe=True)
    assert len({loss for _, loss in checkup.probe}) == 5


class ByHand(nn.Module):
    """Attention that is not seen: its softmax is written out too."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        e = (q @ k.mT / DIM**0.5).exp()
        return e / e.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("model", [nn.Linear(DIM, DIM), ByHand()], ids=["no attention", "unseen attention"])
def test_a_probe_that_would_multiply_nothing(model):
    with pytest.raises(OptionError, match="none was read"):
        check(model, batch(), loss=loss_of, probe=True)


# -- progress --------------------------------------------------------------------------------------------------------


def test_progress_counts_upwards():
    seen = []
    check(Model(), batch(), loss=loss_of, probe=True, progress=lambda *step: seen.append(step))
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == ["forward", "backward", "probe"]
    for stage in stages:
        counts = [(done, total) for name, done, total in seen if name == stage]
        done = [d for d, _ in counts]
        assert done == sorted(set(done)), stage
        assert all(0 <= d <= total for d, total in counts), stage
        assert done[-1] == counts[-1][1], stage
    assert [done for stage, done, _ in seen if stage == "forward"] == [1, 2, 3]
    assert [done for stage, done, _ in seen if stage == "probe"] == [0, 1, 2, 3, 4, 5]


# -- the record ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkup():
    torch.manual_seed(0)
    model = Model("matmul")
    model.layers[1].scale = 1.0
    return check(model, batch(), loss=loss_of, probe=True, trained=True, name="three layers")


def test_a_checkup_describes_the_model(checkup):
    assert checkup.model == {
        "name": "three layers",
        "kind": "Model",
        "parameters": 3 * (4 * DIM * DIM + 4 * DIM + 2 * DIM),
        "dtype": "float32",
        "device": "cpu",
        "trained": True,
    }
    assert checkup.inputs == "input 0 5 × 12 × 48"
    assert [v.site.path for v in checkup.vitals] == ["layers.0", "layers.1", "layers.2"]
    assert check(Model(), batch()).model["name"] == "Model"
    assert list(checkup) == list(checkup.findings)
    assert "three layers; 3 sites" in repr(checkup)


def test_a_model_without_parameters():
    class Bare(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x)

    checkup = check(Bare(), batch()[:, None], loss=loss_of, probe=True)
    assert (checkup.model["parameters"], checkup.model["dtype"], checkup.model["device"]) == (0, None, None)
    assert (len(checkup.vitals), checkup.sequence_pressure) == (1, ())
    nothing = check(nn.Identity(), batch())
    assert (nothing.vitals, nothing.findings) == ((), ())
    assert str(nothing)


def test_worst(checkup):
    assert checkup.worst() == checkup.findings[0].severity == "warning"
    assert check(nn.Identity(), batch()).worst() is None


@pytest.mark.parametrize("suffix", [".html", ".json", ".md"])
def test_save(checkup, tmp_path, suffix):
    path = tmp_path / f"report{suffix}"
    assert checkup.save(path) == path
    text = path.read_text(encoding="utf-8")
    assert "scale-missing" in text
    assert checkup.save(str(path)) == path  # over the old one
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.json.gz", ".json", "report.JSON "])
def test_save_as_something_else(checkup, tmp_path, name):
    with pytest.raises(OptionError, match=r"End the path in \.html, \.json, \.md"):
        checkup.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_checkup_survives_json(checkup):
    record = json.loads(json.dumps(checkup.to_dict(), allow_nan=False))
    again = Checkup.from_dict(record)
    assert again.to_dict() == checkup.to_dict()
    assert again.findings == checkup.findings
    assert again.sequence_pressure == checkup.sequence_pressure
    assert again.probe == checkup.probe
    assert (again.pressure, again.pressure_error) == (checkup.pressure, checkup.pressure_error)
    assert str(again) == str(checkup)
    with pytest.raises(OptionError, match="schema"):
        Checkup.from_dict({**record, "schema": "attemper.checkup/0"})


def test_a_checkup_of_a_broken_model_survives_json(tmp_path):
    model = Model("matmul")
    with torch.no_grad():
        model.layers[0].qkv.weight[:] = math.nan
    checkup = check(model, batch(), loss=loss_of, probe=True)
    assert math.isnan(checkup.loss)
    assert re.search(r"loss +not a number", str(checkup))
    record = json.loads(json.dumps(checkup.to_dict(), allow_nan=False))
    assert Checkup.from_dict(record).to_dict() == checkup.to_dict()
    for suffix in (".html", ".json", ".md"):
        checkup.save(tmp_path / f"report{suffix}")
    assert str(checkup)


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0])
def test_a_learnt_scale_that_has_gone_wrong(scale, tmp_path):
    model = Model("matmul")
    model.layers[1].scale = torch.tensor(scale)
    checkup = check(model, batch())
    checkup.save(tmp_path / "report.json")
    assert checkup.worst() in ("warning", "error")


def test_text_has_no_escape_codes(checkup):
    text = str(checkup)
    assert "\x1b" not in text
    assert "scale-missing" in text
    assert "layers.1" in text


def test_a_loss_that_is_no_number_decides_nothing():
    checkup = check(Model(), batch(), loss=lambda output: loss_of(output) * math.nan, trained=True)
    [finding] = [f for f in checkup if f.rule == "cannot-tell"]
    assert (finding.severity, finding.where) == ("information", {})
    assert "no pressure could be measured" in finding.headline
    assert "Not decided" in str(checkup)


@pytest.mark.parametrize("sequences", [1, 2, 3, 4])
def test_few_sequences_decide_nothing(sequences):
    # Small enough to be at rest: what the fifth part of a nat cannot tell is not the question here.
    checkup = check(Model(), batch(sequences), loss=lambda output: loss_of(output) / 1e3, trained=True)
    told = [f.headline for f in checkup if f.rule == "cannot-tell"]
    assert len(told) == (sequences < 4)
    assert ("Not decided" in str(checkup)) == ("Healthy" not in str(checkup)) == (sequences < 4)


# -- what a model says of itself -------------------------------------------------------------------------------------


def test_trained():
    model, x = Model(), batch()
    assert check(model, x).model["trained"] is False
    with torch.no_grad():
        for norm in model.norms:
            norm.weight.fill_(0.7)  # a constant other than 1 is somebody's initialisation
    assert check(model, x).model["trained"] is False
    with torch.no_grad():
        model.norms[2].weight[5] += 0.01
    assert check(model, x).model["trained"] is True
    assert check(model, x, trained=False).model["trained"] is False
    assert check(Multihead(), x).model["trained"] is None
    assert check(Multihead(), x, trained=True).model["trained"] is True


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d])
def test_trained_by_other_norms(norm):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attn = norm(DIM), Multihead()

        def forward(self, x):
            return self.attn(self.norm(x.reshape(-1, DIM)).reshape(x.shape))

    model, x = Normed(), batch()
    assert check(model, x).model["trained"] is False
    nn.init.normal_(model.norm.weight)
    assert check(model, x).model["trained"] is True


def test_a_norm_without_gains_says_nothing():
    model = nn.Sequential(nn.LayerNorm(DIM, elementwise_affine=False), Multihead())
    assert check(model, batch()).model["trained"] is None


@pytest.mark.parametrize(
    "declared", [1.0, {"layers.0": 1.0, "layers.2": 1.0}, lambda path: None if path == "layers.1" else 1.0]
)
def test_a_scale_that_the_caller_declares(declared):
    model = Model()
    model.layers[0].scale = model.layers[2].scale = 1.0
    if declared == 1.0:
        model.layers[1].scale = 1.0
    assert [rule for rule, _, _ in grave(check(model, batch()))] == ["scale-missing"]
    checkup = check(model, batch(), declared_scale=declared)
    assert grave(checkup) == []
    assert checkup.vitals[0].site.declared_by == "the caller"


@pytest.mark.parametrize("declared", ["0.25", [0.25]])
def test_a_declaration_that_is_none(declared):
    with pytest.raises(OptionError, match="declared_scale"):
        check(Model(), batch(), declared_scale=declared)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (0.0, r"declared_scale is 0\.0\.\n  Pass a finite number other than 0\."),
        (math.nan, "declared_scale is nan"),
        (math.inf, "declared_scale is inf"),
        (True, "declared_scale is True"),
        ({"layers.1": "big"}, r"declared_scale\['layers\.1'\] is 'big'"),
        ({"layers.1": 0}, r"declared_scale\['layers\.1'\] is 0"),
        ({"layer.1": 1.0}, r"declared_scale names 'layer\.1', which is no module .*\n  Did you mean 'layers\.1'\?"),
        ({"nope": 1.0}, r"which is no module of the model\.\n  Name a module as named_modules does, or '\(root\)'"),
        ({5: 1.0}, "declared_scale names 5"),
    ],
)
def test_a_declaration_that_cannot_be_meant(declared, message):
    for use in (check, watch):
        with pytest.raises(OptionError, match=message):
            use(Model(), *([batch()] if use is check else []), declared_scale=declared)


@pytest.mark.parametrize("said", ["big", 0.0, math.nan])
def test_a_declaring_function_that_returns_no_scale_is_named(said):
    checkup = check(Model(), batch(), declared_scale=lambda path: said if path == "layers.1" else None)
    assert list(checkup.unseen) == ["layers.1"]
    assert f"declared_scale('layers.1') is {said!r}" in checkup.unseen["layers.1"]
    assert [v.site.path for v in checkup.vitals] == ["layers.0", "layers.2"]


@pytest.mark.parametrize("number", [np.float32(ROOT), np.float64(ROOT)])
def test_a_declaration_by_numpy(number):
    for declared in (number, {"layers.0": number, "layers.1": None}, lambda path: number):
        checkup = check(Model(), batch(), declared_scale=declared)
        assert checkup.vitals[0].site.declared_scale == pytest.approx(ROOT)
        assert checkup.worst() is None


def test_a_declaration_for_the_model_itself_and_for_a_compiled_one():
    attention = Attention("sdpa")
    attention.scale = 1.0
    assert check(attention, batch(), declared_scale={"(root)": 1.0}).worst() is None
    compiled = torch.compile(Model(), backend="eager")
    assert check(compiled, batch(), declared_scale={"layers.0": ROOT}).worst() is None


# -- planted faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_healthy_model_is_left_in_peace(way, layers):
    mask = torch.ones(5, 12)
    mask[2, 6:] = 0
    for kwargs in ({}, {"attention_mask": mask}):
        checkup = check(Model(way, layers), batch(), loss=loss_of, **kwargs)
        assert grave(checkup) == []
        assert checkup.unseen == {}
        assert [v.site.effective_scale for v in checkup.vitals] == pytest.approx([ROOT] * layers)


SCALES = {
    "removed": (1.0, "scale-missing", "no scale at all"),
    "doubled": (2 * ROOT, "scale-wrong", "2 times"),
    "1/d_k": (1 / WIDTH, "scale-wrong", "1/d_k"),
    "1/√d_model": (DIM**-0.5, "scale-wrong", "1/√d_model with d_model 48"),
    "some other": (3.3 * ROOT, "scale-wrong", "3.3 times"),
}


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("premultiplied", [False, True])
@pytest.mark.parametrize("fault", SCALES)
@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_scale_in_one_layer(way, fault, premultiplied, layer):
    model = Model(way, premultiplied=premultiplied)
    model.layers[layer].scale, rule, what = SCALES[fault]
    checkup = check(model, batch())
    assert grave(checkup) == [(rule, "warning", {f"layers.{layer}": ()})]
    assert what in checkup.findings[0].headline
    assert checkup.findings[0].evidence["effective_scale"] == pytest.approx(model.layers[layer].scale, rel=1e-5)


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("part", ["q", "k"])
@pytest.mark.parametrize("way", WAYS)
def test_nan_in_one_head(way, part, layer):
    model = Model(way)
    head = (0 if part == "q" else DIM) + WIDTH
    with torch.no_grad():
        model.layers[layer].qkv.weight[head : head + WIDTH] = math.nan
    [(rule, severity, where), *rest] = grave(check(model, batch()))
    assert (rule, severity, rest) == ("nonfinite", "error", [])
    # The first place is the fault's; NaN spreads to every head of the layers behind (torch's CPU kernel stops it).
    assert next(iter(where.items())) == (f"layers.{layer}", (1,))
    behind = {f"layers.{n}": () for n in range(layer + 1, 3)}
    assert where == {f"layers.{layer}": (1,), **(behind if way != "sdpa" else {})}


@pytest.mark.parametrize("way", WAYS)
def test_nan_in_the_values_of_one_head(way):
    model = Model(way)
    with torch.no_grad():
        model.layers[1].qkv.weight[2 * DIM + WIDTH : 2 * DIM + 2 * WIDTH] = math.nan
    [(rule, severity, where)] = grave(check(model, batch()))
    assert (rule, severity) == ("nonfinite", "error")
    assert where == {"layers.1": (1,), "layers.2": ()}


@pytest.mark.parametrize("name", ["multihead", "encoder", "encoder layer"])
def test_nan_in_the_values_of_torchs_modules(name):
    model = nn.Sequential(Multihead(), MODELS[name]())
    module = next(m for m in model[1].modules() if isinstance(m, nn.MultiheadAttention))
    with torch.no_grad():
        module.in_proj_weight[2 * DIM + WIDTH : 2 * DIM + 2 * WIDTH] = math.nan
    [(rule, _, where)] = grave(check(model, batch()))
    assert rule == "nonfinite"
    assert next(iter(where.items()))[1] == (1,)
    assert "0.attn" not in where


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_does_not_heed_the_mask(way, layer):
    model, mask = Model(way), torch.ones(5, 12)
    mask[1, 8:] = mask[3, 4:] = 0
    model.layers[layer].heed = False
    checkup = check(model, batch(), attention_mask=mask)
    assert grave(checkup) == [("mask-leak", "error", {f"layers.{layer}": ()})]
    assert 0.05 < checkup.findings[0].evidence["padding_weight"] < 0.5


class Masked(Model):
    """Takes its mask as a bias or as what to keep, however it is shaped, unless it is deaf to it."""

    def __init__(self, deaf=False):
        super().__init__()
        self.deaf = deaf

    def forward(self, x, attention_mask):
        for layer in self.layers:
            mask = attention_mask if attention_mask.shape == (x.shape[1],) * 2 else attention_mask[:, None, None]
            q, k, v = layer.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4).unbind(0)
            output = functional.scaled_dot_product_attention(q, k, v, attn_mask=None if self.deaf else mask)
            x = x + layer.out(output.transpose(1, 2).flatten(2))
        return x


def additive(mask, lowest=-1e9):
    return torch.zeros(mask.shape).masked_fill(~mask, lowest)


def padded_to(length, short, sequences=5):
    """Of which the second sequence has `short` tokens, and the last one less."""
    mask = torch.ones(sequences, length, dtype=torch.bool)
    mask[1, short:] = mask[-1, -1:] = False
    return mask


@pytest.mark.parametrize("lowest", [-1e9, -math.inf, torch.finfo(torch.float32).min])
def test_what_an_additive_mask_hides_is_padding(lowest):
    mask = additive(padded_to(12, 8), lowest)
    healthy = check(Masked(), batch(), attention_mask=mask)
    assert grave(healthy) == []
    assert healthy.vitals[0].rows.tolist() == [5 * 12 - 5] * HEADS
    assert (healthy.vitals[0].padding_weight == 0).all()
    assert [rule for rule, _, _ in grave(check(Masked(deaf=True), batch(), attention_mask=mask))] == ["mask-leak"]


@pytest.mark.parametrize("mask", [torch.zeros(5, 12), torch.linspace(-3, 0, 60).reshape(5, 12)])
def test_a_bias_that_hides_nothing_is_about_no_padding(mask):
    checkup = check(Masked(), batch(), attention_mask=mask)
    assert grave(checkup) == []
    assert checkup.vitals[0].rows.tolist() == [5 * 12] * HEADS


CAUSAL = torch.ones(7, 7, dtype=torch.bool).tril()
SQUARES = {
    "causal": CAUSAL,
    "window": CAUSAL.triu(-2),
    "blocks": torch.block_diag(torch.ones(3, 3), torch.ones(4, 4)).bool(),
    "prefix": CAUSAL | (torch.arange(7) < 4),
    "backwards": CAUSAL.mT,
}


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("name", SQUARES)
def test_a_mask_of_queries_and_keys_is_not_about_padding(name, floats):
    """As many sequences as tokens, so that its shape does not tell."""
    mask = SQUARES[name]
    checkup = check(Masked(), batch(7, 7), attention_mask=additive(mask) if floats else mask)
    assert grave(checkup) == []
    assert checkup.vitals[0].rows.tolist() == [7 * 7] * HEADS


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_of_as_many_sequences_as_tokens(side):
    mask = padded_to(7, 4, sequences=7)
    mask = mask.flip(-1) if side == "left" else mask
    heard = check(Model(), batch(7, 7), attention_mask=mask.float())
    assert heard.vitals[0].rows.tolist() == [7 * 7 - 4] * HEADS
    deaf = Model()
    deaf.layers[1].heed = False
    assert [rule for rule, _, _ in grave(check(deaf, batch(7, 7), attention_mask=mask.float()))] == ["mask-leak"]


@pytest.mark.parametrize("name", ["multihead", "encoder", "encoder layer"])
def test_a_mask_that_does_not_reach_torchs_modules(name):
    class Deaf(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = MODELS[name]()

        def forward(self, x, attention_mask):
            return self.inner(x)

    mask = torch.ones(5, 12)
    mask[1, 8:] = 0
    assert [rule for rule, _, _ in grave(check(Deaf(), batch(), attention_mask=mask))] == ["mask-leak"]


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("way", WAYS)
def test_rows_that_see_nothing(way, layer):
    model = Model(way)
    model.layers[layer].blind = (3, 4)
    checkup = check(model, batch())
    assert grave(checkup) == [("mask-empty-rows", "warning", {f"layers.{layer}": ()})]
    assert checkup.findings[0].evidence == {"rows": 2 * 5}


def test_attention_that_cannot_be_read_is_listed():
    class LinearAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(DIM, 3 * DIM)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return q.softmax(-1) @ (k.softmax(-2).mT @ v)

    model = nn.Sequential(Multihead(), LinearAttention())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkup = check(model, batch())
    assert list(checkup.unseen) == ["1"]
    assert [f.rule for f in checkup] == ["unseen-attention"]


def test_a_lazy_model_has_to_run_first():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.LazyLinear(24)

        def forward(self, x):
            return functional.scaled_dot_product_attention(*self.qkv(x)[:, None].chunk(3, -1))

    model, x = Lazy(), torch.randn(2, 5, 8)
    with pytest.raises(OptionError, match=r"qkv.weight has no shape yet(.|\n)*Run the model once"):
        check(model, x)
    assert isinstance(model.qkv, nn.LazyLinear)
    model(x)
    assert len(check(model, x).vitals) == 1
