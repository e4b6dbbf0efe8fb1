"""The pressure of a call is what flows back through that call alone, whatever else the model does with its q."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.attention import flex_attention  # noqa: E402

from attemper import attend, check, watch  # noqa: E402

HEADS, DIM = 2, 6
WIDTH = HEADS * DIM


def by_hand(q, k, v, log_scale):
    scores = q @ k.mT * (DIM**-0.5 * log_scale.exp()[:, None, None])
    return scores.softmax(-1) @ v


def flex(q, k, v):
    # Called as on a GPU: on a CPU torch refuses the backward pass of its kernel before it knows that this is none.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_attention, "_validate_device", lambda *_: None)
        return flex_attention.flex_attention(q, k, v)


def sdpa_by_parts(q, k, v):
    """A bias that learns keeps torch from its fused kernels."""
    bias = torch.zeros(q.shape[-2], k.shape[-2], requires_grad=True)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


KERNELS = {
    "sdpa": functional.scaled_dot_product_attention,
    "sdpa by parts": sdpa_by_parts,
    "attend": lambda q, k, v: attend(q, k, v).output,
    "flex": flex,
}
# Each from (attention of a call, its operands) to the output.
USES = {
    "nothing else": lambda call, m, q, k, v, k2, v2: call(0, q, k, v),
    "a second call": lambda call, m, q, k, v, k2, v2: call(0, q, k, v) + call(1, q, k2, v2),
    "a residual": lambda call, m, q, k, v, k2, v2: call(0, q, k, v) + q,
    "its own keys": lambda call, m, q, k, v, k2, v2: call(0, q, q, v),
    "its own values": lambda call, m, q, k, v, k2, v2: call(0, q, k, q),
    "all three": lambda call, m, q, k, v, k2, v2: call(0, q, q, q),
    "a parameter in two calls": lambda call, m, q, k, v, k2, v2: call(0, m.latents, k, v) + call(1, m.latents, k2, v2),
}


class Net(nn.Module):
    def __init__(self, use, kernel):
        super().__init__()
        self.use, self.kernel = use, kernel
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.latents = nn.Parameter(torch.randn(3, HEADS, 5, DIM))
        with torch.no_grad():
            self.projections[0].weight.mul_(4)

    def forward(self, x, log_scales=None):
        q, k, v, k2, v2 = (f(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for f in self.projections)
        calls = [self.kernel] * 2
        if log_scales is not None:
            calls = [lambda q, k, v, t=t: by_hand(q, k, v, t) for t in log_scales]
        y = self.use(lambda i, *operands: calls[i](*operands), self, q, k, v, k2, v2)
        return self.out(y.transpose(1, 2).flatten(2))


def loss_of(output):
    weights = torch.linspace(-1, 1.5, output.numel(), dtype=output.dtype).reshape(output.shape)
    return (output.square() * weights + output).mean()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def wanted_of(model, x):
    """The gradients to the log of each head's scale, of every call that there was."""
    log_scales = torch.zeros(2, HEADS, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss_of(model(x, log_scales)), log_scales)
    assert gradient[0].abs().min() > 1e-5
    return [row.numpy() for row in gradient if row.any()]


def agree(vitals, wanted, rtol=2e-3):
    assert len(vitals) == len(wanted)
    for found, pressure in zip(vitals, wanted, strict=True):
        np.testing.assert_allclose(found.pressure, pressure, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_whatever_else_is_done_with_q(use, kernel):
    model = Net(USES[use], KERNELS[kernel])
    x = torch.randn(3, 5, WIDTH)
    wanted = wanted_of(model, x)
    agree(check(model, x, loss=loss_of).vitals, wanted)

    plain = model(x)
    loss_of(plain).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with watch(model, every=1) as monitor:
        output = model(x)
        loss_of(output).backward()
    agree(list(monitor.vitals.values()), wanted)
    assert not monitor.unseen
    assert torch.equal(output, plain)
    mine = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, mine, gradients))


@pytest.mark.parametrize("use", [name for name in USES if name != "a parameter in two calls"])
def test_in_compiled_graphs(use):
    model = Net(USES[use], functional.scaled_dot_product_attention)
    x = torch.randn(3, 5, WIDTH)
    wanted = wanted_of(model, x)
    compiled = torch.compile(model, backend="eager")
    with watch(compiled, every=1) as monitor:
        loss_of(compiled(x)).backward()
    assert monitor.uncompiled is None
    agree(list(monitor.vitals.values()), wanted)


def test_what_was_dropped_is_left_out_of_it():
    def dropped(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    model = Net(USES["a residual"], dropped)
    x = torch.randn(3, 5, WIDTH)
    with watch(model, every=1) as monitor:
        torch.manual_seed(5)
        loss_of(model(x)).backward()
    model.kernel = lambda q, k, v: dropped(q * scale, k, v)
    scale = torch.ones(HEADS, 1, 1, requires_grad=True)
    torch.manual_seed(5)
    (wanted,) = torch.autograd.grad(loss_of(model(x)), scale)
    agree(list(monitor.vitals.values()), [wanted.flatten().numpy()])


def test_under_autocast_a_parameter_is_cast_once_for_all_calls():
    model = Net(USES["a parameter in two calls"], functional.scaled_dot_product_attention)
    x = torch.randn(3, 5, WIDTH)
    wanted = wanted_of(model, x)
    with watch(model, every=1) as monitor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x).float()
        loss_of(output).backward()
    one, two = monitor.vitals.values()
    for found, pressure in ((one, wanted[0]), (two, wanted[1])):
        np.testing.assert_allclose(found.pressure, pressure, atol=0.1 * max(abs(w).max() for w in wanted))


class Turned(nn.Module):
    """q and k leave a rotary embedding in float32, as in Llama; under autocast v does not."""

    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for f in self.projections[:3])
        y = functional.scaled_dot_product_attention(q.float() * 3.0, k.float(), v, is_causal=True)
        return self.projections[3](y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("error")
def test_operands_that_autocast_brings_to_one_type(compiled):
    model = Turned()
    x = torch.randn(3, 5, WIDTH)

    def vitals_of(model, *, enabled):
        with watch(model, every=1) as monitor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                output = model(x)
            loss_of(output.float()).backward()
        assert not monitor.unseen
        assert monitor.uncompiled is None
        return monitor.vitals["(root)"]

    wanted = vitals_of(model, enabled=False)
    found = vitals_of(torch.compile(model, backend="eager") if compiled else model, enabled=True)
    for name in ("gradient_flow", "pressure", "entropy", "max_logit"):
        value = getattr(wanted, name)
        np.testing.assert_allclose(getattr(found, name), value, atol=0.05 * np.abs(value).max(), err_msg=name)
