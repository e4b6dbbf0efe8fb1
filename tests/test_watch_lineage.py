"""The effective scale: what multiplies the projections' q·k in all, wherever it is applied; and what is declared."""

import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from attemper import read, watch  # noqa: E402

BATCH, LENGTH, HEADS, DIM = 3, 7, 2, 8
WIDTH = 10
SCALE = DIM**-0.5


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    # Said once per process, torch's warnings would depend on which test came first.
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def fused(q, k, v, scale=1.0):
    return functional.scaled_dot_product_attention(q, k, v, scale=scale)


def written(q, k, v, scale=1.0):
    return (q @ k.mT * scale).softmax(-1) @ v


both = pytest.mark.parametrize("attention", [fused, written])


class Block(nn.Module):
    """Projections, something in between, attention."""

    def __init__(self, between, attention, *, fused_projection=False, kv_heads=HEADS):
        super().__init__()
        self.between, self.attention, self.kv_heads = between, attention, kv_heads
        self.fused_projection = fused_projection
        if fused_projection:
            self.qkv = nn.Linear(WIDTH, 3 * HEADS * DIM)
        else:
            self.q = nn.Linear(WIDTH, HEADS * DIM)
            self.k, self.v = nn.Linear(WIDTH, kv_heads * DIM), nn.Linear(WIDTH, kv_heads * DIM)
        self.q_norm, self.k_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.layer_norm = nn.LayerNorm(DIM)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, HEADS * DIM, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.7))
        self.temperatures = nn.Parameter(torch.tensor([0.7, 1.9]).view(HEADS, 1, 1))

    def forward(self, x):
        b, n, _ = x.shape
        if self.fused_projection:
            q, k, v = self.qkv(x).view(b, n, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (f(x).view(b, n, -1, DIM).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k, v = self.between(self, q, k, v)
        self.kept = q, k
        return self.attention(q, k, v)


def site_of(block, x=None):
    """The Site, with the readings held against the operands that arrived."""
    x = torch.randn(BATCH, LENGTH, WIDTH) if x is None else x
    plain = block(x)
    with watch(block, every=1) as monitor:
        assert torch.equal(block(x), plain)
    assert not monitor.unseen
    (vitals,) = monitor.vitals.values()
    return vitals.site


# -- factors on q and k ------------------------------------------------------------------------------------------------

FACTORS = {}


def factor(value):
    def register(function):
        FACTORS[function.__name__] = (function, value)
        return function

    return register


@factor(1.0)
def nothing(m, q, k, v):
    return q, k, v


@factor(SCALE)
def on_q(m, q, k, v):
    return q * SCALE, k, v


@factor(SCALE)
def on_k_by_division(m, q, k, v):
    return q, k / math.sqrt(DIM), v


@factor(SCALE)
def split_on_both(m, q, k, v):
    return q * DIM**-0.25, torch.mul(k, DIM**-0.25), v


@factor(0.3)
def in_place(m, q, k, v):
    q *= 0.3
    return q, k, v


@factor(0.25)
def in_place_by_method(m, q, k, v):
    return q.mul_(0.5), k.div_(2), v


@factor(0.3)
def number_first(m, q, k, v):
    return 0.3 * q, k, v


@factor(0.3)
def by_a_tensor_of_one_element(m, q, k, v):
    return q * torch.tensor(0.3), k, v


@factor(0.3)
def by_a_tensor_of_shape_one(m, q, k, v):
    return q * torch.tensor([0.3]), k, v


@factor(0.3)
def by_a_constant_tensor_of_its_own_shape(m, q, k, v):
    return q * torch.full_like(q, 0.3), k, v


@factor(1.7)
def by_a_learned_number(m, q, k, v):
    return q * m.temperature, k, v


@factor(0.3)
def before_and_after_contiguous(m, q, k, v):
    return (q.contiguous() * 0.6).clone() * 0.5, k.contiguous(), v


@factor(0.3)
def in_double_and_back(m, q, k, v):
    return (q.double() * 0.3).to(q.dtype), k, v


@factor(-0.3)
def negative(m, q, k, v):
    return q * -0.3, k, v


@factor(0.3)
def after_a_position_was_added(m, q, k, v):
    return (q + torch.linspace(-1, 1, LENGTH * DIM).view(LENGTH, DIM)) * 0.3, k, v


def angles():
    return torch.arange(LENGTH)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])


def rotate_half(x):
    one, two = x.chunk(2, -1)
    return torch.cat((-two, one), -1)


def halves(x, width=DIM):
    angle = torch.cat([angles()[:, : width // 2]] * 2, -1)
    return x * angle.cos() + rotate_half(x) * angle.sin()


@factor(0.3)
def rotary_by_halves(m, q, k, v):
    return halves(q * 0.3), halves(k), v


@factor(0.3)
def rotary_then_factor(m, q, k, v):
    return halves(q) * 0.3, halves(k), v


def interleaved(x):
    one, two = x[..., ::2], x[..., 1::2]
    cos, sin = angles().cos(), angles().sin()
    return torch.stack((one * cos - two * sin, one * sin + two * cos), -1).flatten(-2)


@factor(0.3)
def rotary_interleaved(m, q, k, v):
    return interleaved(q) * 0.3, interleaved(k), v


def by_complex(x):
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones(()), angles())
    return torch.view_as_real(turned).flatten(-2).type_as(x)


@factor(0.3)
def rotary_complex(m, q, k, v):
    return by_complex(q * 0.3), by_complex(k), v


@factor(0.3)
def rotary_partial(m, q, k, v):
    def partly(x):
        turned, rest = x[..., : DIM // 2], x[..., DIM // 2 :]
        return torch.cat((halves(turned, DIM // 2), rest), -1)

    return partly(q) * 0.3, partly(k), v


@factor(0.3)
def rotary_stretched(m, q, k, v):
    """As long-context rotary embeddings do: their cos and sin carry a factor."""
    return halves(q) * 0.6, halves(k) * 0.5, v


@factor(0.3)
def low_rank_addition(m, q, k, v):
    # Not of the same input, but of one as wide: what matters is that it is a second projection.
    more = m.up(m.down(torch.ones(q.shape[0], LENGTH, WIDTH))).view(-1, LENGTH, HEADS, DIM).transpose(1, 2)
    return (q + 0.5 * more) * 0.3, k, v


@both
@pytest.mark.parametrize("projection", ["apart", "one for all"])
@pytest.mark.parametrize("name", FACTORS)
def test_the_effective_scale_is_all_that_multiplies(name, projection, attention):
    between, value = FACTORS[name]
    if name.startswith("in_place") and projection == "one for all":
        pytest.skip("autograd forbids writing into one of several views")
    block = Block(between, lambda q, k, v: attention(q, k, v, 0.8), fused_projection=projection != "apart")
    site = site_of(block)
    assert site.effective_scale == pytest.approx(0.8 * value, rel=1e-3)
    assert site.projection_factor == pytest.approx(value, rel=1e-3)
    assert not site.qk_norm
    assert site.model_dim == WIDTH
    assert site.projected_head_dim == DIM


@both
def test_a_factor_before_the_heads_are_split(attention):
    class Early(Block):
        def forward(self, x):
            q, k, v = (self.q(x) * 0.3, self.k(x), self.v(x))
            return self.attention(*(x.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for x in (q, k, v)))

    assert site_of(Early(nothing, attention)).effective_scale == pytest.approx(0.3)


@both
def test_a_factor_on_the_fused_projection_counts_on_both_sides(attention):
    class Early(Block):
        def forward(self, x):
            qkv = (self.qkv(x) * 0.5).view(*x.shape[:2], 3, HEADS, DIM)
            return self.attention(*(part.transpose(1, 2) for part in qkv.unbind(2)))

    assert site_of(Early(nothing, attention, fused_projection=True)).effective_scale == pytest.approx(0.25)


@both
@pytest.mark.parametrize("how", ["repeat_interleave", "expand", "index"])
def test_grouped_heads(how, attention):
    def between(m, q, k, v):
        def repeat(x):
            if how == "repeat_interleave":
                return x.repeat_interleave(HEADS, 1)
            if how == "expand":
                return x[:, :, None].expand(-1, -1, HEADS, -1, -1).reshape(x.shape[0], HEADS, *x.shape[2:])
            return x[:, torch.zeros(HEADS, dtype=torch.long)]

        return q * 0.6, repeat(halves(k)) * 0.5, repeat(v)

    site = site_of(Block(between, attention, kv_heads=1))
    assert site.effective_scale == pytest.approx(0.3, rel=1e-3)
    assert site.projected_head_dim == DIM


@both
@pytest.mark.parametrize("rotated", [False, True])
def test_padded_heads_are_told_from_their_width(rotated, attention):
    def between(m, q, k, v):
        if rotated:
            q, k = halves(q), halves(k)
        return tuple(functional.pad(x, (0, 8)) for x in (q * 0.3, k, v))

    site = site_of(Block(between, attention))
    assert site.effective_scale == pytest.approx(0.3, rel=1e-3)
    assert (site.head_dim, site.projected_head_dim) == (DIM + 8, DIM)


@both
def test_keys_out_of_a_cache(attention):
    class Cached(Block):
        cache = None

        def forward(self, x):
            q, k, v = (f(x).view(*x.shape[:2], -1, DIM).transpose(1, 2) for f in (self.q, self.k, self.v))
            if self.cache is not None:
                k, v = (torch.cat(pair, 2) for pair in zip(self.cache, (k, v), strict=True))
            return self.attention(q * 0.3, k, v)

    block = Cached(nothing, attention)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    assert site_of(block, x).effective_scale == pytest.approx(0.3)
    # A first call, whose cache is still empty.
    block.cache = tuple(torch.empty(BATCH, HEADS, 0, DIM) for _ in range(2))
    assert site_of(block, x).effective_scale == pytest.approx(0.3)
    block.cache = tuple(torch.randn(BATCH, HEADS, 5, DIM) for _ in range(2))
    assert site_of(block, x[:, :1]).effective_scale == pytest.approx(0.3)


@both
def test_inputs_that_no_projection_made_have_no_effective_scale(attention):
    class Bare(nn.Module):
        def forward(self, x):
            q, k, v = (x[..., i : i + DIM] for i in range(3))
            return attention(q, k, v)

    site = site_of(Bare(), torch.randn(BATCH, HEADS, LENGTH, WIDTH))
    assert site.effective_scale is None
    assert site.projection_factor is None


class Gated(nn.Module):
    """A gated MLP that notes which of its tensors are still there when they have been multiplied."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        gate, up = self.gate(x), self.up(x)
        refs = weakref.ref(gate), weakref.ref(up)
        hidden = functional.silu(gate) * up
        del gate, up
        self.kept = [ref() is not None for ref in refs]
        return self.down(hidden)


def test_what_an_activation_was_made_of_is_not_kept():
    """It cannot reach q or k by linear maps, and it is the widest that a model has."""
    model = nn.Sequential(Gated(), Block(nothing, fused))
    with watch(model, every=1) as monitor, torch.no_grad():
        model(torch.randn(BATCH, LENGTH, WIDTH))
    assert model[0].kept == [False, False]
    (vitals,) = monitor.vitals.values()
    assert vitals.site.effective_scale == 1


@both
def test_q_and_k_behind_an_activation_have_no_effective_scale(attention):
    site = site_of(Block(lambda m, q, k, v: (functional.silu(q), k, v), attention))
    assert site.effective_scale is None


@both
def test_a_factor_of_each_token_is_no_scale(attention):
    """The norms of q and of its source then differ by more than one number; they lie alike, row by row."""
    tokens = torch.linspace(0.4, 2.5, LENGTH)[:, None]
    site = site_of(Block(lambda m, q, k, v: (q * tokens, k, v), attention))
    assert site.effective_scale is None


def test_a_temperature_for_every_head():
    class Tempered(Block):
        def forward(self, x):
            q, k, v = (f(x).view(*x.shape[:2], -1, DIM).transpose(1, 2) for f in (self.q, self.k, self.v))
            self.kept = q, k
            return ((q @ k.mT) * self.temperatures).softmax(-1) @ v

    block = Tempered(nothing, None)
    with watch(block, every=1) as monitor:
        loss = block(torch.randn(BATCH, LENGTH, WIDTH)).square().mean()
        loss.backward()
    vitals = monitor.vitals["(root)"]
    assert vitals.site.effective_scale == pytest.approx((0.7, 1.9))
    q, k = (x.double() for x in block.kept)
    entropy = read(q, k, scale=block.temperatures.detach().flatten()).entropy
    np.testing.assert_allclose(vitals.entropy, entropy.mean((0, 2)).detach(), rtol=1e-4)
    # The pressure is the gradient of a parameter that is the scale, times it.
    wanted = (block.temperatures.grad * block.temperatures).detach().flatten()
    np.testing.assert_allclose(vitals.pressure, wanted, rtol=1e-3)


@both
def test_a_learned_temperature_on_the_scores_or_the_scale(attention):
    class Tempered(Block):
        def forward(self, x):
            q, k, v = (f(x).view(*x.shape[:2], -1, DIM).transpose(1, 2) for f in (self.q, self.k, self.v))
            if attention is fused:
                return fused(q * self.temperature.exp(), k, v)
            return ((q @ k.mT) / self.temperature.exp()).softmax(-1) @ v

    wanted = math.exp(1.7 if attention is fused else -1.7)
    assert site_of(Tempered(nothing, None)).effective_scale == pytest.approx(wanted, rel=1e-4)


# -- norms -------------------------------------------------------------------------------------------------------------


def by_hand(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


NORMS = {
    "RMSNorm": lambda m, q, k, v: (m.q_norm(q), m.k_norm(k), v),
    "LayerNorm": lambda m, q, k, v: (m.layer_norm(q), m.layer_norm(k), v),
    "normalize": lambda m, q, k, v: (functional.normalize(q, dim=-1), functional.normalize(k, dim=-1), v),
    "by hand": lambda m, q, k, v: (by_hand(q), by_hand(k), v),
    "by its norm": lambda m, q, k, v: (q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v),
    "by hand in double": lambda m, q, k, v: (by_hand(q.double()).to(q.dtype), by_hand(k.double()).to(k.dtype), v),
    "only keys": lambda m, q, k, v: (q, m.k_norm(k), v),
    "then scaled": lambda m, q, k, v: (m.q_norm(q) * 0.3, m.k_norm(k), v),
    "then rotated": lambda m, q, k, v: (halves(m.q_norm(q)), halves(m.k_norm(k)), v),
}


@both
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_q_and_k_are_recognised(name, attention):
    site = site_of(Block(NORMS[name], attention))
    assert site.qk_norm
    if name in ("normalize", "by its norm"):
        assert site.effective_scale is None  # cosines, whose temperature is a number of its own
    else:
        # What follows the norm.
        assert site.effective_scale == pytest.approx(0.3 if name == "then scaled" else 1.0, rel=1e-3)


@both
def test_a_norm_before_the_projection_is_none_of_q(attention):
    class Normed(Block):
        def forward(self, x):
            return super().forward(functional.layer_norm(x, x.shape[-1:]))

    site = site_of(Normed(on_q, attention))
    assert not site.qk_norm
    assert site.effective_scale == pytest.approx(SCALE)


# -- declared ----------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.layers = nn.ModuleList([Block(nothing, fused) for _ in range(2)])
        if config is not None:
            self.config = SimpleNamespace(**config)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).transpose(1, 2).flatten(-2)[..., :WIDTH]
        return x


def declared_by(config, **options):
    with watch(Two(config), every=1, **options) as monitor:
        monitor.model(torch.randn(BATCH, LENGTH, WIDTH))
    return [(v.site.declared_scale, v.site.declared_by) for v in monitor.vitals.values()]


YARN = {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 0.7}
STRETCH = 0.1 * 0.7 * math.log(40.0) + 1


@pytest.mark.parametrize(
    ("config", "scales", "by"),
    [
        ({"attention_multiplier": 0.1}, (0.1, 0.1), "attention_multiplier"),
        ({"query_pre_attn_scalar": 25}, (0.2, 0.2), "query_pre_attn_scalar"),
        ({"scale_attn_weights": False}, (1.0, 1.0), "scale_attn_weights"),
        (
            {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": True},
            (SCALE, SCALE / 2),
            "scale_attn_by_inverse_layer_idx",
        ),
        (
            {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
            (1.0, 0.5),
            "scale_attn_by_inverse_layer_idx",
        ),
        ({"mup": True}, (1 / DIM, 1 / DIM), "mup"),
        ({"scale_qk_dot_by_d": True}, (1 / DIM, 1 / DIM), "scale_qk_dot_by_d"),
        ({"model_type": "t5"}, (1.0, 1.0), "model_type t5"),
        ({"model_type": "gpt_neo"}, (1.0, 1.0), "model_type gpt_neo"),
        ({"model_type": "gemma4_text"}, (1.0, 1.0), "model_type gemma4_text"),
        ({"model_type": "inkling_text"}, (1 / DIM, 1 / DIM), "model_type inkling_text"),
        ({"model_type": "zamba2"}, ((DIM / 2) ** -0.5,) * 2, "model_type zamba2"),
        ({"attn_config": SimpleNamespace(softmax_scale=0.2)}, (0.2, 0.2), "softmax_scale"),
        ({"key_multiplier": 0.4}, (0.4 * SCALE, 0.4 * SCALE), "key_multiplier"),
        ({"qk_scale_factor": 4}, (4 * SCALE, 4 * SCALE), "qk_scale_factor"),
        ({"pos_att_type": ["c2p", "p2c"]}, ((3 * DIM) ** -0.5,) * 2, "pos_att_type"),
        ({"pos_att_type": ("c2p",)}, ((2 * DIM) ** -0.5,) * 2, "pos_att_type"),
        ({"kv_lora_rank": 16, "rope_parameters": YARN}, (SCALE * STRETCH**2,) * 2, "mscale_all_dim"),
    ],
)
def test_what_a_configuration_declares(config, scales, by):
    found = declared_by(config)
    assert [scale for scale, _ in found] == pytest.approx(scales)
    assert {said for _, said in found} == {by}


@pytest.mark.parametrize(
    "config",
    [
        *(None, {}, {"model_type": "llama"}, {"mup": False}, {"scale_attn_weights": True}),
        {"attention_multiplier": 0.0},
        {"attn_scale": 0.1},  # Llama 4's, which is a slope over positions
        {"rope_parameters": YARN},  # the rotary embedding's own affair, but for DeepSeek's attention
        {"kv_lora_rank": 16, "rope_parameters": {**YARN, "rope_type": "default"}},
    ],
)
def test_what_declares_nothing(config):
    assert declared_by(config) == [(None, None)] * 2


def test_a_rotary_embedding_that_stretches_declares_it():
    model = Two({"model_type": "llama"})
    model.rotary = nn.Identity()
    model.rotary.attention_scaling = 1.5
    with watch(model, every=1) as monitor:
        model(torch.randn(BATCH, LENGTH, WIDTH))
    site = monitor.vitals["layers.0"].site
    assert site.declared_scale == pytest.approx(SCALE * 1.5**2)
    assert "attention_scaling" in site.declared_by


def test_what_the_caller_declares_comes_first():
    config = {"attention_multiplier": 0.1}
    assert declared_by(config, declared_scale=0.7) == [(0.7, "the caller")] * 2
    by_path = declared_by(config, declared_scale={"layers.1": 0.7})
    assert by_path == [(0.1, "attention_multiplier"), (0.7, "the caller")]
    by_function = declared_by(None, declared_scale=lambda path: 0.7 if path == "layers.0" else None)
    assert by_function == [(0.7, "the caller"), (None, None)]


def test_a_declared_scale_reaches_torchs_modules_too():
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, batch_first=True))
    for training in (False, True):
        model.train(training)
        with torch.no_grad(), watch(model, every=1, declared_scale={"0.self_attn": 0.7}) as monitor:
            model(torch.randn(BATCH, LENGTH, 16))
        assert monitor.vitals["0.self_attn"].site.declared_scale == 0.7
