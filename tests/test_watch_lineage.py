"""The effective scale: what multiplies the projections' q·k in all, wherever it is applied; and what is declared."""

import json
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from attemper import check, read, watch  # noqa: E402

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


@factor(0.3)
def before_a_bias(m, q, k, v):
    return q * 0.3 + torch.linspace(-1, 1, HEADS * DIM).view(HEADS, 1, DIM), k, v


@factor(0.3)
def before_a_bias_in_place(m, q, k, v):
    q = q * 0.3
    q += torch.linspace(-1, 1, DIM)
    return q, k, v


@factor(-0.3)
def taken_from_a_bias(m, q, k, v):
    return torch.linspace(-1, 1, DIM) - q * 0.3, k, v


@factor(0.3)
def on_the_second_of_a_sum(m, q, k, v):
    return torch.add(torch.linspace(-1, 1, DIM), q, alpha=0.3), k, v


@factor(0.3)
def before_a_bias_and_a_rotation(m, q, k, v):
    return halves(q * 0.3 + torch.linspace(-1, 1, DIM)), halves(k), v


@factor(1.0)
def behind_a_low_rank_addition_with_a_factor(m, q, k, v):
    more = m.up(m.down(torch.ones(q.shape[0], LENGTH, WIDTH))).view(-1, LENGTH, HEADS, DIM).transpose(1, 2)
    return 0.5 * more + q, k, v


@factor(0.3)
def by_a_number_of_numpy(m, q, k, v):
    return q * np.float32(0.6), k * np.float32(0.5), v


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


# -- keys of a cache, and factors that cannot be measured --------------------------------------------------------------


def cached(turn, before, after):
    """Keys behind those of a cache, with a factor before they are joined and one behind it."""

    def between(m, q, k, v):
        old = torch.linspace(-1, 1, 5 * DIM).view(5, DIM).expand(*k.shape[:2], 5, DIM)
        return turn(q) * 0.6, torch.cat([old, turn(k * before)], 2) * after, torch.cat([old, v], 2)

    return between


@both
@pytest.mark.parametrize("turn", [lambda x: x, halves], ids=["plain", "rotated"])
@pytest.mark.parametrize(("before", "after"), [(1, 0.5), (0.5, 1), (0.5, 0.5)])
def test_a_factor_on_keys_that_are_joined_to_a_cache(turn, before, after, attention):
    site = site_of(Block(cached(turn, before, after), attention))
    assert site.effective_scale == pytest.approx(0.6 * before * after, rel=1e-3)


@both
def test_a_factor_on_keys_that_are_copied_into_a_cache(attention):
    def between(m, q, k, v):
        cache = torch.zeros(*k.shape[:2], 2 * LENGTH, DIM)
        places = torch.arange(LENGTH)
        keys = cache.index_copy_(2, places, halves(k) * 0.5)
        return halves(q), keys[:, :, :LENGTH] * 0.6, v

    site = site_of(Block(between, attention))
    assert site.effective_scale == pytest.approx(0.3, rel=1e-3)
    assert not site.qk_norm


@both
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("norm", ["RMSNorm", "normalize"])
def test_norms_of_keys_in_a_cache_that_has_room_left(norm, rotated, attention):
    turn = halves if rotated else lambda x: x

    def between(m, q, k, v):
        q, k, v = NORMS[norm](m, q, k, v)
        cache = torch.zeros(*k.shape[:2], 3 * LENGTH, DIM)
        keys, values = (cache.clone().index_copy_(2, torch.arange(LENGTH), x) for x in (turn(k), v))
        return turn(q), keys, values

    site = site_of(Block(between, attention))
    assert site.qk_norm
    assert site.effective_scale == (None if norm == "normalize" else pytest.approx(1, rel=1e-3))


@both
def test_zeros_joined_to_the_width_are_no_cache(attention):
    """What is known of a head's width would be wrong then."""
    pad = lambda x: torch.cat([x, torch.zeros(*x.shape[:-1], DIM)], -1)  # noqa: E731
    site = site_of(Block(lambda m, q, k, v: (pad(q), pad(k), v), lambda q, k, v: attention(q, k, v, SCALE)))
    assert site.effective_scale is None


@both
@pytest.mark.parametrize("way", ["pooled", "activated"])
def test_a_factor_on_k_that_cannot_be_measured_is_not_taken_for_1(way, attention):
    def between(m, q, k, v):
        if way == "activated":
            return q, functional.silu(k) * 0.3, v
        return q, (k * 0.3)[:, :, :-1].unflatten(2, (-1, 2)).mean(3), v[:, :, ::2][:, :, :-1]

    block = Block(between, attention)
    assert site_of(block).effective_scale is None
    assert [finding.rule for finding in check(block, torch.randn(BATCH, LENGTH, WIDTH))] == ["cannot-tell"]


@both
@pytest.mark.parametrize("way", ["of each token", "mixed tokens"])
def test_a_factor_that_is_no_scale_is_no_norm_either(way, attention):
    """Else nothing would be said of it, for a norm has a scale of its own."""
    tokens = torch.linspace(0.4, 2.5, LENGTH)[:, None]

    def between(m, q, k, v):
        return (q * tokens if way == "of each token" else 0.5 * q + 0.5 * q.roll(1, 2)), k, v

    block = Block(between, attention)
    site = site_of(block)
    assert site.effective_scale is None
    assert not site.qk_norm
    assert [finding.rule for finding in check(block, torch.randn(BATCH, LENGTH, WIDTH))] == ["cannot-tell"]


@torch.library.custom_op("attemper_tests::unit", mutates_args=())
def unit(x: torch.Tensor) -> torch.Tensor:
    return functional.normalize(x, dim=-1)


@both
def test_a_norm_of_other_people_is_told_by_what_it_makes(attention):
    site = site_of(Block(lambda m, q, k, v: (torch.ops.attemper_tests.unit(q), k, v), attention))
    assert site.effective_scale is None
    assert site.qk_norm


@both
@pytest.mark.parametrize("equation", ["bnc,hcd->bhnd", "hcd,bnc->bhnd"])
def test_what_an_einsum_projects_is_as_wide_as_what_it_sums_over(equation, attention):
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(HEADS, WIDTH, DIM))

        def forward(self, x):
            pair = (x, self.weight) if equation.startswith("b") else (self.weight, x)
            q = torch.einsum(equation, *pair)
            return attention(q, q * 1.0, q)

    assert site_of(Summed()).model_dim == WIDTH


# -- scores that are shifted, summed up and joined ---------------------------------------------------------------------


def shifted(scores, by=torch.amax):
    return scores - by(scores, -1, keepdim=True)


def sink(scores):
    return torch.full((*scores.shape[:-1], 1), 0.7)


LOGITS = {
    "divided, shifted, multiplied": (lambda s: shifted(s * SCALE / 32) * 32, SCALE, None),
    "shifted, then multiplied": (lambda s: shifted(s) * SCALE, SCALE, None),
    "shifted, then divided": (lambda s: shifted(s) / 4, 0.25, None),
    "shifted twice": (lambda s: shifted(shifted(s * SCALE, torch.mean)), SCALE, None),
    "shifted twice with a factor between": (lambda s: shifted(shifted(s, torch.mean) * SCALE), SCALE, None),
    "shifted, then with axes of its own": (lambda s: shifted(s * SCALE).flatten(0, 1), SCALE, None),
    "by a factor for each head": (
        lambda s: shifted(s) * torch.tensor([0.5, 0.5]).view(HEADS, 1, 1),
        (0.5, 0.5),
        None,
    ),
    "summed with a factor": (lambda s: torch.add(torch.zeros(1), other=s, alpha=SCALE), SCALE, None),
    "subtracted with a factor": (lambda s: torch.sub(torch.zeros(1), s, alpha=SCALE), -SCALE, None),
    "by a number of NumPy": (lambda s: s * np.float32(SCALE), SCALE, None),
    "sink behind": (lambda s: torch.cat([s * SCALE, sink(s)], -1), SCALE, 0.7),
    "sink in front": (lambda s: torch.cat([sink(s), s * SCALE], -1), SCALE, 0.7),
    "sink in front, then shifted": (lambda s: shifted(torch.cat([sink(s), s * SCALE], -1)), SCALE, 0.7),
    "sink behind, then multiplied": (lambda s: torch.cat([s, sink(s)], -1) * SCALE, SCALE, 0.7 * SCALE),
    "sink with scores that were shifted": (
        lambda s: torch.cat([shifted(s * SCALE), sink(s) - (s * SCALE).amax(-1, keepdim=True)], -1),
        SCALE,
        0.7,
    ),
}


@pytest.mark.parametrize("name", LOGITS)
def test_what_is_read_of_scores_is_what_was_meant(name):
    """A shift of a row changes no softmax; a sink is none of the keys, on whichever side it is joined on."""
    through, scale, logit = LOGITS[name]

    def attention(q, k, v):
        weights = through(q @ k.mT).softmax(-1).reshape(BATCH, HEADS, LENGTH, -1)
        if logit is not None:
            weights = weights[..., 1:] if "front" in name else weights[..., :-1]
        return weights @ v

    block = Block(nothing, attention)
    block.num_heads = HEADS
    x = torch.randn(BATCH, LENGTH, WIDTH)
    plain = block(x)
    with watch(block, every=1) as monitor:
        output = block(x)
        output.square().mean().backward()
    assert torch.equal(output, plain)
    assert not monitor.unseen
    vitals = monitor.vitals["(root)"]
    assert vitals.site.effective_scale == pytest.approx(scale)
    q, k = (x.detach().double() for x in block.kept)
    sinks = None if logit is None else torch.full((HEADS,), logit, dtype=torch.float64)
    wanted = read(q, k, scale=scale if isinstance(scale, float) else torch.tensor(scale).double(), sinks=sinks)
    for field, merge in (
        ("max_logit", "amax"),
        ("logsumexp", "mean"),
        ("entropy", "mean"),
        ("first_key_weight", "mean"),
    ):
        theirs = getattr(getattr(wanted, field), merge)((0, 2))
        np.testing.assert_allclose(getattr(vitals, field), theirs, rtol=1e-4, atol=1e-5, err_msg=field)
    scores = (
        torch.einsum("bhnd,bhmd->bhnm", q, k) * vitals.site.effective_scale[0]
        if isinstance(scale, tuple)
        else (q @ k.mT * scale)
    )
    scores.requires_grad_()
    joined = scores if logit is None else torch.cat([scores, torch.full((*scores.shape[:-1], 1), logit)], -1)
    values = block.v(x).detach().double().view(BATCH, LENGTH, HEADS, DIM).transpose(1, 2)
    (joined.softmax(-1)[..., :LENGTH] @ values).square().mean().backward()
    pressure = (scores.grad * scores.detach()).sum((0, 2, 3))
    np.testing.assert_allclose(vitals.pressure, pressure, rtol=1e-3, atol=1e-6)


def test_a_key_that_is_joined_on_is_no_sink():
    """It is made of q, as no sink is, and has a value of its own."""

    def attention(q, k, v):
        own = (q * q[:, :, :1]).sum(-1, keepdim=True)
        weights = torch.cat([q @ k.mT * SCALE, own], -1).softmax(-1)
        return weights @ torch.cat([v, v[:, :, :1]], 2)

    block = Block(nothing, attention)
    with watch(block, every=1) as monitor:
        block(torch.randn(BATCH, LENGTH, WIDTH))
    assert not monitor.vitals
    assert list(monitor.unseen) == ["(root)"]


# -- queries that no projection made -----------------------------------------------------------------------------------


class Pool(nn.Module):
    """Queries that are learned, and keys and values of the input."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.query = nn.Parameter(torch.randn(2, DIM))
        self.k, self.v, self.to_q = nn.Linear(WIDTH, DIM), nn.Linear(WIDTH, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        k, v = self.k(x), self.v(x)
        self.kept = k
        return self.way(self, k).softmax(-1) @ v


POOLS = {
    "matmul": lambda m, k: m.query @ k.mT * 0.3,
    "masked": lambda m, k: (m.query @ k.mT * 0.3).masked_fill(torch.zeros(LENGTH, dtype=torch.bool), -math.inf),
    "with a batch": lambda m, k: m.query[None] @ k.mT * 0.3,
    "expanded": lambda m, k: m.query.expand(len(k), -1, -1) @ k.mT * 0.3,
    "bmm": lambda m, k: torch.bmm(m.query.expand(len(k), -1, -1), k.mT) * 0.3,
    "einsum": lambda m, k: torch.einsum("qd,bkd->bqk", m.query, k) * 0.3,
    "einsum with dots": lambda m, k: torch.einsum("...qd,...kd->...qk", m.query.expand(len(k), -1, -1), k) * 0.3,
    "no batch at all": lambda m, k: m.query @ k.mT * 0.3,
}


@pytest.mark.parametrize("name", POOLS)
def test_learned_queries_are_read(name):
    pool, x = Pool(POOLS[name]), torch.randn(BATCH, LENGTH, WIDTH)
    if name == "no batch at all":
        x = x[0]
    plain = pool(x)
    with watch(pool, every=1) as monitor:
        output = pool(x)
        output.square().mean().backward()
    assert torch.equal(output, plain)
    assert not monitor.unseen
    vitals = monitor.vitals["(root)"]
    assert vitals.site.head_dim == DIM
    assert vitals.site.effective_scale is None  # no projection to measure it against
    assert vitals.site.scale_argument == pytest.approx(0.3)
    k = pool.kept.detach().double().view(-1, 1, LENGTH, DIM)
    wanted = read(pool.query.detach().double().expand(len(k), 1, -1, -1), k, scale=0.3)
    np.testing.assert_allclose(vitals.entropy, wanted.entropy.mean((0, 2)), rtol=1e-4)
    assert np.isfinite(vitals.pressure).all()


def test_a_learned_query_behind_a_projection_has_an_effective_scale():
    pool = Pool(lambda m, k: m.to_q(m.query) @ k.mT * 0.3)
    with watch(pool, every=1) as monitor:
        pool(torch.randn(BATCH, LENGTH, WIDTH))
    assert monitor.vitals["(root)"].site.effective_scale == pytest.approx(0.3)


def test_a_learned_query_in_a_compiled_model():
    pool = Pool(POOLS["matmul"])
    fast = torch.compile(pool, backend="eager")
    with watch(fast, every=1) as monitor:
        fast(torch.randn(BATCH, LENGTH, WIDTH))
    assert "written out" in monitor.uncompiled
    assert list(monitor.vitals) == ["(root)"]


@both
def test_a_weight_in_front_projects_all_the_same(attention):
    """Features first, as some write it."""

    class First(Block):
        def forward(self, x):
            q, k, v = (f.weight @ x.mT for f in (self.q, self.k, self.v))
            return attention(*(t.unflatten(1, (HEADS, DIM)).mT for t in (q * 0.3, k, v)))

    site = site_of(First(nothing, attention))
    assert site.effective_scale == pytest.approx(0.3)
    assert site.model_dim == WIDTH


# -- softmaxes whose scores are not seen, in modules that are not called attention -------------------------------------


def divided(scores):
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def by_torchs_function(m, q, k, v):
    x = v.transpose(1, 2).flatten(2).transpose(0, 1)
    width = HEADS * DIM
    square = torch.eye(width)
    return functional.multi_head_attention_forward(
        x, x, x, width, HEADS, square.repeat(3, 1), torch.zeros(3 * width), None, None, False, 0.0, square, None
    )[0]


UNSEEN = {
    "by exp": lambda m, q, k, v: divided(q @ k.mT) @ v,
    "two axes": lambda m, q, k, v: torch.tensordot(q[0, 0], k[0, 0], ([1], [1])).softmax(-1) @ v[0, 0],
    "tokens": lambda m, q, k, v: m.score(v).softmax(2).mT @ v,
    "softmin": lambda m, q, k, v: functional.softmin(q @ k.mT, -1) @ v,
    "gumbel": lambda m, q, k, v: functional.gumbel_softmax(q @ k.mT, dim=-1) @ v,
    "torch's function": by_torchs_function,
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", UNSEEN)
def test_a_softmax_that_weighs_values_is_listed(name, compiled):
    block = Block(lambda m, q, k, v: (q, k, v), lambda q, k, v: UNSEEN[name](block, q, k, v))
    block.score = nn.Linear(DIM, 3)
    model = torch.compile(block, backend="eager") if compiled else block
    with watch(model, every=1) as monitor:
        model(torch.randn(BATCH, LENGTH, WIDTH))
    assert not monitor.vitals
    assert list(monitor.unseen) == ["(root)"]


@pytest.mark.parametrize(
    "way",
    [
        lambda m, x: functional.linear(x[:, 0], m.weight).softmax(-1) @ m.values,
        lambda m, x: functional.linear(x, m.weight).mT.softmax(1).mT @ m.values,
        lambda m, x: torch.einsum("bnd,ed->ben", x, m.weight).softmax(1).mT @ m.values,
        lambda m, x: (m.weight @ x.mT).softmax(1).mT @ m.values,
        lambda m, x: functional.conv1d(x.mT, m.weight[:, :, None]).softmax(1).mT @ m.values,
        lambda m, x: torch.exp(-(x @ x.mT)) @ x,
    ],
    ids=["class", "turned", "einsum", "weight in front", "convolution", "no sum"],
)
def test_a_choice_among_outputs_is_not_listed(way):
    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.values = nn.Parameter(torch.randn(4, WIDTH)), nn.Parameter(torch.randn(4, WIDTH))

        def forward(self, x):
            return way(self, x)

    with watch(Choice(), every=1) as monitor:
        monitor.model(torch.randn(BATCH, LENGTH, WIDTH))
    assert not monitor.vitals
    assert not monitor.unseen


# -- numbers of NumPy --------------------------------------------------------------------------------------------------


def test_options_may_be_numbers_of_numpy():
    block = Block(nothing, fused)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with watch(block, every=np.int64(2), declared_scale=np.float32(1.0)) as monitor:
        for _ in range(3):
            block(x)
    assert [sample.step for sample in monitor.history] == [0, 2]
    assert monitor.vitals["(root)"].site.declared_scale == 1.0
    assert check(block, x, declared_scale=np.float32(1.0)).worst() is None
    numbered = check(Block(nothing, lambda q, k, v: fused(q, k, v, np.float64(0.5))), x)
    assert json.loads(json.dumps(numbered.to_dict()))["vitals"]
