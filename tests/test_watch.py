"""Seeing attention, however it is written: the same bits as unwatched, and the Vitals of the true q and k."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as by_name  # noqa: E402

from attemper import Site, Vitals, attend, read, watch  # noqa: E402
from attemper.testing import assert_within_budget  # noqa: E402

# No two sizes alike, and a head_dim whose root is no round number.
BATCH, LENGTH, HEADS, DIM = 3, 7, 2, 6
WIDTH = HEADS * DIM
SCALE = DIM**-0.5
LOW = torch.finfo(torch.float32).min

FORWARD = (
    "rows",
    "rows_without_keys",
    "rows_with_one_key",
    "nonfinite",
    "max_logit",
    "max_qk",
    "least_normalized_entropy",
    "logsumexp",
    "expected_score",
    "entropy",
    "normalized_entropy",
    "largest_weight",
    "collision",
    "effective_keys",
    "flow",
    "score_mean",
    "score_std",
    "visible_keys",
    "first_key_weight",
    "sink_mass",
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def agree(vitals, reading, *, rows=None, rtol=1e-4, skip=()):
    """Every forward field is that of the Reading."""
    wanted = Vitals.of(reading, Site(heads=vitals.site.heads), rows=rows)
    assert np.isfinite(wanted.entropy).all()
    for name in FORWARD:
        if name not in skip:
            mine, theirs = getattr(vitals, name), getattr(wanted, name)
            np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=1e-5, err_msg=name)


class Attention(nn.Module):
    """Projections around a way of writing attention; keeps what went in and came out of that."""

    def __init__(self, way, *, width=WIDTH, heads=HEADS):
        super().__init__()
        self.way, self.heads = way, heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(heads, LENGTH, LENGTH))
        self.sinks = nn.Parameter(torch.randn(heads))
        self.softmax = nn.Softmax(dim=-1)
        self.drop = nn.Dropout(0.25)
        self.log_scale = None
        with torch.no_grad():
            self.q.weight.mul_(3)  # far from uniform weights, so that no mistake hides

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.log_scale is not None:
            q = q * self.log_scale.exp()[:, None, None]
        y = self.way(q, k, v, self)
        self.kept = q, k, v, y
        if y.requires_grad:
            y.retain_grad()
        return self.out(y.transpose(1, 2).reshape(b, n, -1))


class Net(nn.Module):
    def __init__(self, way, **sizes):
        super().__init__()
        self.attn = Attention(way, **sizes)

    def forward(self, x):
        return x + self.attn(x)


def loss_of(output):
    """A mean over the batch, in which no two numbers weigh the same."""
    weights = torch.linspace(-1, 1.5, output.numel(), dtype=output.dtype).reshape(output.shape)
    return (output.square() * weights + output).mean()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# -- ways to write it --------------------------------------------------------------------------------------------------

WAYS = {}
CAUSAL = {"is_causal": True}


def way(**truth):
    """Register a way of writing attention, and what `read` has to be told of it."""

    def register(function):
        WAYS[function.__name__] = (function, truth)
        return function

    return register


def causal_mask():
    """True where a key is hidden."""
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


@way()
def sdpa(q, k, v, m):
    return functional.scaled_dot_product_attention(q, k, v)


@way(scale=0.3)
def sdpa_by_name_with_scale(q, k, v, m):
    return by_name(q, k, v, scale=0.3)


@way(is_causal=True)
def sdpa_builtin_causal(q, k, v, m):
    return torch._C._nn.scaled_dot_product_attention(q, k, v, None, 0.0, True)


@way(is_causal=True)
def sdpa_all_by_keyword(q, k, v, m):
    return torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True)


@way(is_causal=True)
def sdpa_bool_mask(q, k, v, m):
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=~causal_mask())


@way(is_causal=True)
def sdpa_finite_minimum(q, k, v, m):
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(causal_mask(), LOW)
    return functional.scaled_dot_product_attention(q, k, v, mask[None, None])


@way(is_causal=True)
def sdpa_minus_infinity(q, k, v, m):
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(causal_mask(), -math.inf)
    return functional.scaled_dot_product_attention(q, k, v, mask)


@way(attn_mask="bias")
def sdpa_bias(q, k, v, m):
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=m.bias)


@way(is_causal=True)
def sdpa_folded(q, k, v, m):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    m.num_heads = HEADS
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).unflatten(0, (-1, HEADS))


@way(scale=SCALE)
def matmul_operator(q, k, v, m):
    return ((q @ k.transpose(-2, -1)) * SCALE).softmax(-1) @ v


@way(scale=SCALE)
def matmul_scaled_before(q, k, v, m):
    return torch.matmul(functional.softmax(torch.matmul(q * SCALE, k.mT), dim=-1), v)


@way(scale=SCALE)
def matmul_divided_in_place(q, k, v, m):
    scores = torch.matmul(q, k.permute(0, 1, 3, 2))
    scores /= math.sqrt(DIM)
    return torch.matmul(torch.softmax(scores, -1), v)


@way(scale=SCALE)
def matmul_multiplied_in_place(q, k, v, m):
    scores = torch.matmul(q, k.transpose(2, 3))
    return torch.matmul(torch.softmax(scores.mul_(SCALE), dim=3), v)


@way(scale=SCALE)
def scale_is_a_tensor(q, k, v, m):
    return torch.matmul(torch.softmax(torch.div(q @ k.mT, torch.tensor(float(DIM)).sqrt()), dim=-1), v)


@way(scale=SCALE)
def softmax_module_input_by_keyword(q, k, v, m):
    return m.softmax(input=q @ k.mT * SCALE) @ v


@way(scale=SCALE)
def softmax_in_double(q, k, v, m):
    return functional.softmax(q @ k.mT * SCALE, dim=-1, dtype=torch.float64).to(q.dtype) @ v


@way(scale=SCALE, is_causal=True)
def masked_fill_minus_infinity(q, k, v, m):
    scores = (q @ k.mT * SCALE).masked_fill(causal_mask(), -math.inf)
    return scores.softmax(dim=-1) @ v


@way(scale=SCALE, is_causal=True)
def masked_fill_in_place_finite_minimum(q, k, v, m):
    scores = (q @ k.mT * SCALE).masked_fill_(causal_mask(), LOW)
    return scores.softmax(dim=-1) @ v


@way(scale=SCALE, is_causal=True)
def masked_by_where(q, k, v, m):
    scores = torch.where(causal_mask(), torch.full((), -1e9), q @ k.mT / DIM**0.5)
    return scores.softmax(dim=-1) @ v


@way(scale=SCALE, is_causal=True)
def masked_by_addition(q, k, v, m):
    scores = q @ k.mT * SCALE + torch.zeros(LENGTH, LENGTH).masked_fill(causal_mask(), LOW)
    return scores.softmax(dim=-1) @ v


@way(scale=SCALE, is_causal=True)
def filled_with_ten_thousand(q, k, v, m):
    return (q @ k.mT * SCALE).masked_fill(causal_mask(), -1e4).softmax(dim=-1) @ v


@way(scale=SCALE, is_causal=True)
def ten_thousand_added(q, k, v, m):
    return (q @ k.mT * SCALE - 1e4 * causal_mask()).softmax(dim=-1) @ v


@way(scale=SCALE, is_causal=True)
def masked_before_scaling(q, k, v, m):
    return ((q @ k.mT).masked_fill(causal_mask(), -math.inf) * SCALE).softmax(dim=-1) @ v


@way(scale=SCALE, attn_mask="bias")
def bias_added(q, k, v, m):
    return (q @ k.mT * SCALE + m.bias).softmax(dim=-1) @ v


@way(scale=SCALE, attn_mask="bias")
def bias_added_in_place(q, k, v, m):
    scores = q @ k.mT
    scores *= SCALE
    scores += m.bias
    return scores.softmax(dim=-1) @ v


@way(scale=SCALE)
def largest_taken_away(q, k, v, m):
    scores = q @ k.mT * SCALE
    return (scores - scores.amax(-1, keepdim=True).detach()).softmax(-1) @ v


@way(scale=SCALE)
def bmm(q, k, v, m):
    m.num_heads = HEADS
    q, k, v = (x.reshape(-1, LENGTH, DIM) for x in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) * SCALE, -1), v).view(-1, HEADS, LENGTH, DIM)


@way(scale=SCALE)
def baddbmm_without_bias(q, k, v, m):
    m.num_heads = HEADS
    q, k, v = (x.reshape(-1, LENGTH, DIM) for x in (q, k, v))
    scores = torch.baddbmm(torch.empty(1, 1, 1), q, k.mT, beta=0, alpha=SCALE)
    return torch.bmm(scores.softmax(-1), v).view(-1, HEADS, LENGTH, DIM)


@way(scale=SCALE, attn_mask="bias")
def baddbmm_with_bias(q, k, v, m):
    m.num_heads = HEADS
    b = q.shape[0]
    q, k, v = (x.reshape(-1, LENGTH, DIM) for x in (q, k, v))
    bias = m.bias.repeat(b, 1, 1)
    return bias.baddbmm(q, k.mT, alpha=SCALE).softmax(-1).bmm(v).view(-1, HEADS, LENGTH, DIM)


@way(scale=SCALE)
def einsum(q, k, v, m):
    weights = (torch.einsum("bhid,bhjd->bhij", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


@way(scale=SCALE)
def einsum_heads_inside(q, k, v, m):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (torch.einsum("bqhd, bkhd -> bhqk", q, k) / DIM**0.5).softmax(-1)
    return torch.einsum("bhqk, bkhd -> bqhd", weights, v).transpose(1, 2)


@way(scale=SCALE)
def einsum_dots(q, k, v, m):
    weights = (torch.einsum("...id,...jd->...ij", q * SCALE, k)).softmax(-1)
    return torch.einsum("...ij,...jd->...id", weights, v)


@way(scale=SCALE)
def einsum_keys_first(q, k, v, m):
    weights = (torch.einsum("bhjd,bhid->bhij", k, q) * SCALE).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


@way(scale=SCALE)
def einsum_operands_in_a_list(q, k, v, m):
    weights = (torch.einsum("bhid,bhjd->bhij", [q, k]) * SCALE).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", [weights, v])


@way(scale=SCALE)
def einsum_folded(q, k, v, m):
    m.num_heads = HEADS
    q, k, v = (x.reshape(-1, LENGTH, DIM) for x in (q, k, v))
    weights = (torch.einsum("bid,bjd->bij", q, k) * SCALE).softmax(-1)
    return torch.einsum("bij,bjd->bid", weights, v).view(-1, HEADS, LENGTH, DIM)


@way(scale=SCALE, softcap=1.5)
def softcap(q, k, v, m):
    scores = q @ k.mT * SCALE
    return (torch.tanh(scores / 1.5) * 1.5).softmax(-1) @ v


@way(scale=SCALE, softcap=1.5, is_causal=True)
def softcap_step_by_step(q, k, v, m):
    scores = torch.matmul(q, k.transpose(2, 3)) * SCALE
    scores = scores / 1.5
    scores = torch.tanh(scores)
    scores = scores * 1.5
    scores = scores + torch.zeros(LENGTH, LENGTH).masked_fill(causal_mask(), LOW)
    return functional.softmax(scores, dim=-1, dtype=torch.float32) @ v


@way(scale=SCALE, sinks="sinks", is_causal=True)
def sinks(q, k, v, m):
    scores = (q @ k.mT * SCALE).masked_fill(causal_mask(), LOW)
    joined = torch.cat([scores, m.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    return functional.softmax(joined, dim=-1)[..., :-1] @ v


@way(scale=SCALE)
def keys_times_queries(q, k, v, m):
    return ((k @ q.mT).transpose(-2, -1) * SCALE).softmax(-1) @ v


def truth_of(model, truth):
    """The options of `read` and `attend`, the biases and sinks taken from the model."""
    return {name: getattr(model.attn, value) if isinstance(value, str) else value for name, value in truth.items()}


@pytest.mark.parametrize("name", WAYS)
def test_the_bits_are_those_of_the_unwatched_model(name):
    model = Net(WAYS[name][0])
    x = torch.randn(BATCH, LENGTH, WIDTH)
    for training in (False, True):
        model.train(training).zero_grad()
        plain = model(x)
        loss_of(plain).backward()
        wanted = gradients(model)
        model.zero_grad()
        with watch(model, every=1) as monitor:
            got = model(x)
            loss_of(got).backward()
        assert torch.equal(got, plain)
        mine = gradients(model)
        assert mine.keys() == wanted.keys() >= {"attn.q.weight", "attn.k.bias"}
        for parameter, gradient in wanted.items():
            assert torch.equal(mine[parameter], gradient), parameter
        assert list(monitor.vitals) == ["attn"]
        assert not monitor.unseen
    with torch.no_grad():
        plain = model.eval()(x)
        with watch(model, every=1) as monitor:
            assert torch.equal(model(x), plain)
        assert list(monitor.vitals) == ["attn"]


def ways():
    return pytest.mark.parametrize("name", WAYS)


@ways()
def test_the_vitals_are_those_of_the_true_operands(name):
    function, truth = WAYS[name]
    model = Net(function)
    with watch(model, every=1) as monitor, torch.no_grad():
        model(torch.randn(BATCH, LENGTH, WIDTH))
    q, k, *_ = (x.double() for x in model.attn.kept)
    vitals = monitor.vitals["attn"]
    agree(vitals, read(q, k, **truth_of(model, truth)))
    assert vitals.site.heads == HEADS
    assert vitals.site.head_dim == DIM
    assert vitals.site.model_dim == WIDTH
    assert vitals.site.effective_scale == pytest.approx(truth.get("scale", SCALE), rel=1e-4)
    assert vitals.site.softcap == truth.get("softcap")


@ways()
def test_pressure_is_the_gradient_to_the_log_of_each_heads_scale(name):
    function, truth = WAYS[name]
    model = Net(function)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with watch(model, every=1) as monitor:
        loss_of(model(x)).backward()
    vitals = monitor.vitals["attn"]

    hot = Net(function)
    hot.load_state_dict(model.state_dict())
    hot.attn.log_scale = nn.Parameter(torch.zeros(HEADS))
    loss_of(hot(x)).backward()
    wanted = hot.attn.log_scale.grad.numpy()
    assert np.abs(wanted).min() > 1e-5
    np.testing.assert_allclose(vitals.pressure, wanted, rtol=2e-3, atol=1e-6)
    np.testing.assert_allclose(vitals.total_pressure, wanted.sum(keepdims=True), rtol=2e-3, atol=1e-6)
    assert (vitals.weights["pressure"] == BATCH).all()
    assert np.isfinite(vitals.pressure_error).all()

    q, k, v, y = model.attn.kept
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    output, reading = attend(q, k, v, **truth_of(model, truth))
    output.backward(y.grad.double())
    flow = Vitals.of(reading).gradient_flow
    assert (flow > 0.01).all()
    np.testing.assert_allclose(vitals.gradient_flow, flow, rtol=1e-3)


# -- odd ways: read right, or listed, but never read wrong ----------------------------------------------------------

ODD = {
    "aten operator": lambda q, k, v, m: torch.ops.aten.scaled_dot_product_attention(q, k, v),
    "aten softmax": lambda q, k, v, m: torch.ops.aten.softmax.int(q @ k.mT * SCALE, -1) @ v,
    "special.softmax": lambda q, k, v, m: torch.special.softmax(q @ k.mT * SCALE, -1) @ v,
    "log_softmax": lambda q, k, v, m: torch.log_softmax(q @ k.mT * SCALE, -1).exp() @ v,
    "over the other axis": lambda q, k, v, m: (k @ q.mT * SCALE).softmax(-2).mT @ v,
    "add with alpha": lambda q, k, v, m: torch.add(torch.zeros(()), q @ k.mT, alpha=SCALE).softmax(-1) @ v,
    "taken away": lambda q, k, v, m: (torch.zeros(LENGTH) - q @ k.mT * -SCALE).softmax(-1) @ v,
    "negated": lambda q, k, v, m: (-(q @ k.mT) * -SCALE).softmax(-1) @ v,
    "summed twice": lambda q, k, v, m: ((q @ k.mT + q @ k.mT) * SCALE / 2).softmax(-1) @ v,
    "einsum of three": lambda q, k, v, m: torch.einsum("bhid,bhjd,->bhij", q, k, torch.tensor(SCALE)).softmax(-1) @ v,
    "einsum, heads last": lambda q, k, v, m: (
        (torch.einsum("bhid,bhjd->bijh", q, k) * SCALE).permute(0, 3, 1, 2).softmax(-1) @ v
    ),
    "einsum, heads last to the end": lambda q, k, v, m: torch.einsum(
        "bijh,bhjd->bhid", (torch.einsum("bhid,bhjd->bijh", q, k) * SCALE).softmax(2), v
    ),
    "a sum of products": lambda q, k, v, m: ((q[:, :, :, None] * k[:, :, None]).sum(-1) * SCALE).softmax(-1) @ v,
    "clamped": lambda q, k, v, m: (q @ k.mT * SCALE).clamp(min=-50).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_ways_are_read_right_or_listed(name):
    model = Net(ODD[name])
    x = torch.randn(BATCH, LENGTH, WIDTH)
    plain = model(x)
    with watch(model, every=1) as monitor:
        output = model(x)
        loss_of(output).backward()
    assert torch.equal(output, plain)
    if not monitor.vitals:
        assert list(monitor.unseen) == ["attn"]
        return
    vitals = monitor.vitals["attn"]
    q, k, *_ = model.attn.kept
    agree(vitals, read(q.double(), k.double()))
    assert vitals.site.effective_scale == pytest.approx(SCALE, rel=1e-4)
    q_gradient = (model.attn.q.weight.grad * model.attn.q.weight).sum() + (model.attn.q.bias.grad @ model.attn.q.bias)
    np.testing.assert_allclose(vitals.total_pressure, q_gradient.detach(), rtol=1e-3)


@pytest.mark.parametrize("name", ODD)
def test_odd_ways_are_not_missed_in_a_module_of_any_name(name):
    class Mixer(Net):
        def __init__(self):
            nn.Module.__init__(self)
            self.attn = type("Token", (Attention,), {})(ODD[name])

    model = Mixer()
    with watch(model, every=1) as monitor:
        model(torch.randn(BATCH, LENGTH, WIDTH))
    assert [*monitor.vitals, *monitor.unseen] == ["attn"]


# -- dropout -----------------------------------------------------------------------------------------------------------


def dropped_by_sdpa(q, k, v, m):
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.25 if m.training else 0.0)


def dropped_by_module(q, k, v, m):
    return m.drop((q @ k.mT * SCALE).softmax(-1)) @ v


def dropped_by_function(q, k, v, m):
    weights = functional.softmax(q @ k.mT * SCALE, dim=-1)
    return functional.dropout(weights, p=0.25, training=m.training) @ v


@pytest.mark.parametrize("function", [dropped_by_sdpa, dropped_by_module, dropped_by_function])
def test_dropout_draws_the_same_and_is_not_in_the_reading(function):
    model = Net(function).train()
    x = torch.randn(BATCH, LENGTH, WIDTH)

    def run():
        model.zero_grad()
        torch.manual_seed(5)
        output = model(x)
        loss_of(output).backward()
        # What comes after must draw the same too.
        return output, gradients(model), torch.rand(3)

    output, wanted, after = run()
    with watch(model, every=1) as monitor:
        mine, got, mine_after = run()
    assert torch.equal(mine, output)
    assert torch.equal(mine_after, after)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    agree(monitor.vitals["attn"], read(*(x.double() for x in model.attn.kept[:2])))
    assert monitor.vitals["attn"].site.training is True

    # The pressure is of the loss as it was, what was dropped included.
    model.attn.log_scale = nn.Parameter(torch.zeros(HEADS))
    run()
    pressure = model.attn.log_scale.grad.numpy()
    assert np.abs(pressure).min() > 1e-5
    np.testing.assert_allclose(monitor.vitals["attn"].pressure, pressure, rtol=2e-3, atol=1e-6)


# -- shapes ------------------------------------------------------------------------------------------------------------


class Bare(nn.Module):
    """Attention right on the inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs, **options):
        return self.function(*inputs, **options)


def written(q, k, v, scale=SCALE):
    return (q @ k.mT * scale).softmax(-1) @ v


@pytest.mark.parametrize("function", [functional.scaled_dot_product_attention, written])
@pytest.mark.parametrize(
    ("batch", "heads"), [((), 1), ((HEADS,), 1), ((BATCH, HEADS), HEADS), ((BATCH, 5, HEADS), HEADS)]
)
def test_any_rank(function, batch, heads):
    q, v = (torch.randn(*batch, LENGTH, DIM).requires_grad_() for _ in range(2))
    k = torch.randn(*batch, LENGTH + 2, DIM)
    v = torch.randn(*batch, LENGTH + 2, DIM + 1)
    model = Bare(function)
    plain = model(q, k, v)
    with watch(model, every=1) as monitor:
        output = model(q, k, v)
        output.square().sum().backward()
    assert torch.equal(output, plain)
    (vitals,) = monitor.vitals.values()
    assert vitals.site.path == "(root)"
    assert vitals.site.heads == heads
    folded = (-1, heads, LENGTH, DIM)
    agree(vitals, read(q.double().reshape(folded), k.double().reshape(-1, heads, LENGTH + 2, DIM)))
    assert np.isfinite(vitals.pressure).all()
    assert np.abs(vitals.pressure).min() > 0
    total = (q * q.grad).sum().detach()
    np.testing.assert_allclose(vitals.total_pressure, float(total), rtol=1e-4)


@pytest.mark.parametrize("function", [functional.scaled_dot_product_attention, written])
def test_a_batch_that_broadcasts(function):
    q = torch.randn(BATCH, HEADS, LENGTH, DIM)
    k, v = torch.randn(2, 1, HEADS, LENGTH, DIM)
    model = Bare(function)
    plain = model(q, k, v)
    with watch(model, every=1) as monitor:
        assert torch.equal(model(q, k, v), plain)
    agree(monitor.vitals["(root)"], read(q.double(), k.double().expand(BATCH, -1, -1, -1)))


@pytest.mark.parametrize("function", [functional.scaled_dot_product_attention, written])
def test_one_key_head_for_all(function):
    q = torch.randn(BATCH, HEADS, LENGTH, DIM)
    k, v = torch.randn(2, BATCH, 1, LENGTH, DIM)
    model = Bare(function)
    plain = model(q, k, v)
    with watch(model, every=1) as monitor:
        assert torch.equal(model(q, k, v), plain)
    agree(monitor.vitals["(root)"], read(q.double(), k.double().expand(-1, HEADS, -1, -1)))


def test_grouped_heads_by_option():
    q = torch.randn(BATCH, 6, LENGTH, DIM).requires_grad_()
    k, v = torch.randn(2, BATCH, 2, LENGTH, DIM)
    model = Bare(functional.scaled_dot_product_attention)
    plain = model(q, k, v, enable_gqa=True)
    with watch(model, every=1) as monitor:
        output = model(q, k, v, enable_gqa=True)
        output.square().sum().backward()
    assert torch.equal(output, plain)
    vitals = monitor.vitals["(root)"]
    assert (vitals.site.heads, vitals.site.kv_heads) == (6, 2)
    agree(vitals, read(q.double(), k.double(), enable_gqa=True))
    np.testing.assert_allclose(vitals.pressure, (q * q.grad).sum((0, 2, 3)).detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(LENGTH, LENGTH), (BATCH, 1, 1, LENGTH), (BATCH, 1, LENGTH, LENGTH), (1, LENGTH)])
def test_masks_that_broadcast(shape):
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM)
    mask = torch.rand(shape) > 0.4
    mask[..., 0] = True
    model = Bare(functional.scaled_dot_product_attention)
    with watch(model, every=1) as monitor:
        model(q, k, v, mask)
    agree(monitor.vitals["(root)"], read(q.double(), k.double(), attn_mask=mask))
    assert monitor.vitals["(root)"].site.mask == "bool"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [functional.scaled_dot_product_attention, written])
def test_other_dtypes(function, dtype):
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM).to(dtype)
    model = Bare(function)
    plain = model(q, k, v)
    with watch(model, every=1) as monitor:
        assert torch.equal(model(q, k, v), plain)
    vitals = monitor.vitals["(root)"]
    assert vitals.site.dtype == str(dtype).removeprefix("torch.")
    # Written out, the scores themselves are rounded.
    tolerance = 1e-4 if dtype == torch.float64 or function is not written else 0.05
    agree(vitals, read(q.double(), k.double()), rtol=tolerance)


@pytest.mark.parametrize("function", [functional.scaled_dot_product_attention, written])
@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_lengths_of_zero(function, empty):
    batch, queries, keys = (0 if empty == name else n for name, n in (("batch", 2), ("queries", 3), ("keys", 4)))
    q, k, v = (torch.randn(batch, HEADS, n, DIM) for n in (queries, keys, keys))
    model = Bare(function)
    plain = model(q, k, v)
    with watch(model, every=1) as monitor:
        assert torch.equal(model(q, k, v).nan_to_num(7), plain.nan_to_num(7))
    for vitals in monitor.vitals.values():
        assert vitals.rows.tolist() == [batch * queries] * HEADS
        assert vitals.rows_without_keys.tolist() == [batch * queries if not keys else 0] * HEADS
    assert monitor.vitals or monitor.unseen


@pytest.mark.parametrize("function", [functional.scaled_dot_product_attention, written])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite(function, bad):
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM)
    q[1, 1, 2, 0] = bad
    model = Bare(function)
    plain = model(q, k, v)
    with watch(model, every=1) as monitor:
        assert torch.equal(model(q, k, v).nan_to_num(7), plain.nan_to_num(7))
    vitals = monitor.vitals["(root)"]
    assert vitals.nonfinite.tolist() == [0, 1]
    assert np.isfinite(vitals.entropy).all()
    assert not monitor.unseen


@pytest.mark.parametrize("function", [functional.scaled_dot_product_attention, written])
def test_a_row_of_finite_minima_sees_no_key(function):
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM)
    mask = torch.zeros(LENGTH, LENGTH)
    mask[2] = LOW
    model = Bare(lambda: function(q, k, v, mask) if function is not written else by_hand(q, k, v, mask))
    plain = model()
    with watch(model, every=1) as monitor:
        assert torch.equal(model(), plain)
    vitals = monitor.vitals["(root)"]
    assert vitals.rows_without_keys.tolist() == [BATCH] * HEADS
    agree(vitals, read(q.double(), k.double(), attn_mask=mask.masked_fill(mask == LOW, -math.inf).double()))


TEN_THOUSAND = {
    "filled": lambda scores, mask: scores.masked_fill(mask, -1e4),
    "by where": lambda scores, mask: torch.where(mask, torch.tensor(-1e4, dtype=scores.dtype), scores),
    "added": lambda scores, mask: scores + mask.to(scores.dtype) * -1e4,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [1, 30])
@pytest.mark.parametrize("name", TEN_THOUSAND)
def test_minus_ten_thousand_hides_in_every_type(name, spread, dtype):
    """bfloat16 holds it as -9984, and rounds what it is added to by up to 32 more."""
    mask = causal_mask()
    mask[2] = True  # sees no key
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM).to(dtype)
    q = q * spread
    model = Bare(lambda: TEN_THOUSAND[name](q @ k.mT * SCALE, mask).softmax(-1) @ v)
    with watch(model, every=1) as monitor:
        model()
    vitals = monitor.vitals["(root)"]
    assert vitals.rows_without_keys.tolist() == [BATCH] * HEADS
    seen = [keys for keys in range(2, LENGTH + 1) if keys != 3]  # of the rows that have a choice
    assert vitals.visible_keys.tolist() == pytest.approx([np.mean(seen)] * HEADS)
    assert vitals.score_std.max() < 10 * spread


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_minus_ten_thousand_hides_from_fused_calls(dtype, compiled):
    def added(q, k, v, m):
        return functional.scaled_dot_product_attention(q, k, v, causal_mask().to(dtype) * -1e4)

    model = Net(added).to(dtype)
    model = torch.compile(model, backend="eager") if compiled else model
    with watch(model, every=1) as monitor, torch.no_grad():
        model(torch.randn(BATCH, LENGTH, WIDTH).to(dtype))
    assert monitor.uncompiled is None
    assert monitor.vitals["attn"].visible_keys.tolist() == [np.mean(range(2, LENGTH + 1))] * HEADS


def test_scores_that_are_far_below_zero_by_themselves_are_visible():
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM)
    model = Bare(lambda: (q * 1e5 @ k.mT).softmax(-1) @ v)
    with watch(model, every=1) as monitor:
        model()
    assert monitor.vitals["(root)"].visible_keys.tolist() == [LENGTH] * HEADS


def by_hand(q, k, v, mask):
    return (q @ k.mT * SCALE + mask).softmax(-1) @ v


def test_grouped_heads_on_an_axis_of_their_own():
    class GroupedAttention(nn.Module):
        num_heads = 6

        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 6 * DIM), nn.Linear(8, 2 * DIM), nn.Linear(8, 2 * DIM)

        def forward(self, x):
            b, n, _ = x.shape
            q = self.q(x).view(b, n, 2, 3, DIM).permute(0, 2, 3, 1, 4)
            k, v = (f(x).view(b, n, 2, DIM).transpose(1, 2) for f in (self.k, self.v))
            self.kept = q, k
            weights = (torch.einsum("bkgid,bkjd->bkgij", q, k) * SCALE).softmax(-1)
            return torch.einsum("bkgij,bkjd->bkgid", weights, v)

    model = GroupedAttention()
    x = torch.randn(BATCH, LENGTH, 8)
    plain = model(x)
    with watch(model, every=1) as monitor:
        assert torch.equal(model(x), plain)
    q, k = (x.double() for x in model.kept)
    vitals = monitor.vitals["(root)"]
    assert vitals.site.heads == 6
    agree(vitals, read(q.flatten(1, 2), k, enable_gqa=True))


# -- inside ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in WAYS if name.startswith("sdpa")])
def test_inside_gives_the_same_within_the_budget_and_the_same_readings(name):
    function, _ = WAYS[name]
    model = Net(function)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with watch(model, every=1) as beside:
        plain = model(x)
        loss_of(plain).backward()
    model.zero_grad()
    with watch(model, every=1, observe="inside") as inside:
        output = model(x)
        loss_of(output).backward()
    wide = Net(function).double()
    wide.load_state_dict(model.state_dict())
    with torch.no_grad():
        exact = wide(x.double())
    assert_within_budget(output.detach(), exact.numpy(), plain.detach(), dtype="float32")
    assert not inside.unseen
    one, two = beside.vitals["attn"], inside.vitals["attn"]
    for field in (*FORWARD, "pressure", "gradient_flow"):
        mine, theirs = getattr(two, field), getattr(one, field)
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5, err_msg=field)
    assert one.site == two.site
    assert np.isfinite(two.output_norm).all()


def test_inside_reads_beside_where_a_row_is_all_finite_minima():
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM)
    mask = torch.zeros(LENGTH, LENGTH)
    mask[2] = LOW
    model = Bare(functional.scaled_dot_product_attention)
    plain = model(q, k, v, mask)
    with watch(model, every=1, observe="inside") as monitor, pytest.warns(RuntimeWarning, match="finite minimum"):
        output = model(q, k, v, mask)
    assert torch.equal(output, plain)
    assert monitor.vitals["(root)"].rows_without_keys.tolist() == [BATCH] * HEADS


def test_inside_with_dropout_is_of_the_right_size():
    model = Net(dropped_by_sdpa).train()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with watch(model, every=1, observe="inside") as monitor:
        output = model(x)
    assert not monitor.unseen
    assert output.isfinite().all()
    agree(monitor.vitals["attn"], read(*(x.double() for x in model.attn.kept[:2])))


# -- unseen ------------------------------------------------------------------------------------------------------------


class BahdanauAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.score = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        scores = self.score(torch.tanh(self.q(x)[:, :, None] + self.k(x)[:, None])).squeeze(-1)
        return torch.bmm(torch.softmax(scores, -1), x)


class LinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        q, k = functional.elu(self.q(x)) + 1, functional.elu(self.k(x)) + 1
        return (q @ (k.mT @ self.v(x))) / (q @ k.sum(1)[..., None])


@torch.library.custom_op("attemper_tests::opaque", mutates_args=())
def opaque(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


class OpaqueAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x):
        q = self.q(x)[:, None]
        return torch.ops.attemper_tests.opaque(q, q, q).squeeze(1)


class OwnSoftmaxAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        weights = torch.exp(self.q(x) @ self.k(x).mT)
        return weights / weights.sum(-1, keepdim=True) @ x


@pytest.mark.parametrize("kind", [BahdanauAttention, LinearAttention, OpaqueAttention, OwnSoftmaxAttention])
def test_what_could_not_be_seen_is_listed(kind):
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"mixer": kind()})["mixer"])
    x = torch.randn(BATCH, LENGTH, 8)
    plain = model(x)
    with watch(model, every=1) as monitor:
        assert torch.equal(model(x), plain)
    assert not monitor.vitals
    assert list(monitor.unseen) == ["1"]
    assert any(finding.rule == "unseen-attention" for finding in monitor.findings)


class Router(nn.Module):
    """A mixture of experts: a softmax that weighs, but over experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        weights = functional.softmax(self.gate(x), dim=-1)
        outputs = torch.einsum("bnd,edf->bnef", x, self.experts)
        return (weights[..., None] * outputs).sum(-2)


def test_nothing_is_listed_where_there_is_no_attention():
    classifier = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5), nn.Softmax(dim=-1))
    for model in (classifier, Router(), nn.Sequential(Router(), nn.LayerNorm(8), classifier)):
        with watch(model, every=1) as monitor:
            model(torch.randn(BATCH, LENGTH, 8)).sum().backward()
        assert not monitor.vitals
        assert not monitor.unseen


def test_a_router_whose_experts_are_mixed_by_a_product_is_not_attention():
    class Mixed(Router):
        def forward(self, x):
            weights = functional.softmax(self.gate(x), dim=-1)
            outputs = torch.einsum("bnd,edf->bnef", x, self.experts)
            return torch.einsum("bne,bnef->bnf", weights, outputs)

    with watch(Mixed(), every=1) as monitor:
        monitor.model(torch.randn(BATCH, LENGTH, 8))
    assert not monitor.vitals
    assert not monitor.unseen


# -- other people's kernels --------------------------------------------------------------------------------------------


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """flash-attn's operator, with its arguments and what it does with them."""
    window = (None if window_size_left < 0 else window_size_left, None if window_size_right < 0 else window_size_right)
    output, reading = attend(
        *(x.transpose(1, 2) for x in (q, k, v)),
        scale=softmax_scale,
        is_causal=causal,
        query_offset="bottom-right",
        window=None if window == (None, None) else window,
        softcap=softcap or None,
        enable_gqa=True,
    )
    empty = torch.empty(0)
    return output.transpose(1, 2).contiguous(), reading.logsumexp.clone(), empty, empty.clone()


@pytest.mark.parametrize("by", [torch.ops.flash_attn._flash_attn_forward, flash_forward], ids=["ops", "custom op"])
@pytest.mark.parametrize(
    ("causal", "left", "cap", "queries"), [(False, -1, 0.0, 7), (True, -1, 0.0, 7), (True, 3, 2.0, 4)]
)
def test_flash_attn(by, causal, left, cap, queries):
    class Flash(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(8, 4 * DIM), nn.Linear(8, 2 * DIM)

        def forward(self, x):
            q = self.q(x[:, -queries:]).unflatten(-1, (4, DIM)) * 2
            k = self.k(x).unflatten(-1, (2, DIM))
            self.kept = q, k
            return by(q, k, k, 0.0, 0.3, causal, left, 0 if left > 0 else -1, cap, None, False)[0]

    model = Flash()
    x = torch.randn(BATCH, LENGTH, 8)
    with torch.no_grad():
        plain = model(x)
        with watch(model, every=1) as monitor:
            assert torch.equal(model(x), plain)
    q, k = (x.double().transpose(1, 2) for x in model.kept)
    vitals = monitor.vitals["(root)"]
    options = {"scale": 0.3, "is_causal": causal, "query_offset": "bottom-right", "softcap": cap or None}
    agree(vitals, read(q, k, window=(left, 0) if left > 0 else None, enable_gqa=True, **options))
    assert vitals.site.kind.startswith("flash_attn_forward")
    assert vitals.site.kv_heads == 2
    assert vitals.site.effective_scale == pytest.approx(0.6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("modified", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(masked, modified):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slope = torch.tensor([0.1, 0.4])

    def slanted(score, b, h, i, j):
        return score + slope[h] * (j - i)

    class Flex(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)

        def forward(self, x):
            q, k = (f(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for f in (self.q, self.k))
            self.kept = q, k
            blocks = None
            if masked:
                blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
            return flex_attention(q, k, k, score_mod=slanted if modified else None, block_mask=blocks, scale=0.3)

    model = Flex()
    x = torch.randn(2, 128, 8)
    with torch.no_grad():
        plain = model(x)
        with watch(model, every=1) as monitor:
            assert torch.equal(model(x), plain)
    q, k = (x.double() for x in model.kept)
    index = torch.arange(128)
    bias = slope[:, None, None].double() * (index - index[:, None]) if modified else torch.zeros(128, 128).double()
    vitals = monitor.vitals["(root)"]
    agree(vitals, read(q, k, scale=0.3, is_causal=masked, attn_mask=bias))
    assert vitals.site.effective_scale == pytest.approx(0.3)
    assert vitals.site.kind == "flex_attention"
