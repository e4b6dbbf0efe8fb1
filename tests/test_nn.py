"""The modules say what torch's module, plain formulas and finite differences say; and what they measured."""

import copy
import io
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from attemper import Attended, attend, read, scale_for, trace
from attemper._errors import BackendError, DtypeError, FrameworkError, OptionError, ShapeError
from attemper._reading import FIELDS, MEASURED
from attemper.nn import AdditiveAttention, CosineAttention, MultiheadAttention, _additive_tiles
from attemper.testing import assert_within_budget, compare

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own use of it

WIDE, HEADS, BATCH, QUERIES, KEYS = 12, 3, 2, 5, 7
EVERY = (MultiheadAttention, CosineAttention, AdditiveAttention)
every = pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def agree(one, two, what="", tolerance=1e-12):
    torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}")


def same_reading(one, two, tolerance=1e-12, but=()):
    for name in FIELDS:
        here, there = getattr(one, name), getattr(two, name)
        assert (here is None) == (there is None), name
        if here is not None and name not in but:
            agree(here, there, name, tolerance)


def built(kind, *arguments, seed=0, **options):
    """A module with biases that are not 0, which a forgotten one would be."""
    torch.manual_seed(seed)
    module = kind(*arguments, **options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return module


def pair(dtype=torch.float64, ours=None, **options):
    """Torch's module and ours with its parameters."""
    theirs = built(nn.MultiheadAttention, WIDE, HEADS, dtype=dtype, **options)
    own = MultiheadAttention(WIDE, HEADS, dtype=dtype, **options, **(ours or {}))
    own.load_state_dict(theirs.state_dict())
    return theirs, own


def laid_out(x, batch_first):
    return x if batch_first or x.dim() == 2 else x.transpose(0, 1)


# --- torch's parameters ---------------------------------------------------------------------------------------------

STATES = {
    "packed": {},
    "no bias": {"bias": False},
    "own key width": {"kdim": 8},
    "own widths, no bias": {"kdim": 8, "vdim": 6, "bias": False},
}
states = pytest.mark.parametrize("options", STATES.values(), ids=STATES)


@states
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_start_as_torchs_do(options, dtype):
    made = []
    for kind in (nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(3)
        made.append(kind(WIDE, HEADS, dtype=dtype, **options).state_dict())
    theirs, ours = made
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    # And the generator stands where it would, for what is built next.
    torch.manual_seed(3)
    nn.MultiheadAttention(WIDE, HEADS, **options)
    after = torch.rand(())
    torch.manual_seed(3)
    MultiheadAttention(WIDE, HEADS, **options)
    assert torch.equal(torch.rand(()), after)


@states
def test_state_goes_both_ways(options):
    theirs, ours = built(nn.MultiheadAttention, WIDE, HEADS, **options), MultiheadAttention(WIDE, HEADS, **options)
    ours.load_state_dict(theirs.state_dict())
    again = nn.MultiheadAttention(WIDE, HEADS, **options)
    again.load_state_dict(ours.state_dict())
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in theirs.state_dict().items())


def test_signature_begins_with_torchs():
    import inspect

    for method in ("__init__", "forward"):
        theirs = inspect.signature(getattr(nn.MultiheadAttention, method)).parameters
        ours = inspect.signature(getattr(MultiheadAttention, method)).parameters
        assert list(ours)[: len(theirs)] == list(theirs)
        if method == "__init__":
            assert all(ours[name].default == theirs[name].default for name in theirs)


def test_only_a_learned_scale_adds_state():
    plain = set(nn.MultiheadAttention(WIDE, HEADS).state_dict())
    for scale in ("sqrt_dk", "log_n", 0.3, [0.1, 0.2, 0.3]):
        assert set(MultiheadAttention(WIDE, HEADS, scale=scale, qk_norm="rms").state_dict()) == plain
    learned = MultiheadAttention(WIDE, HEADS, scale="learned")
    assert set(learned.state_dict()) == plain | {"log_scale"}
    agree(learned.scale_value(), torch.full((HEADS,), scale_for("sqrt_dk", WIDE // HEADS)), tolerance=1e-6)


# --- torch's results ------------------------------------------------------------------------------------------------

SEEN = draw(1, QUERIES, KEYS) > -0.3
SEEN[:, 0] = True  # torch says NaN where a row sees nothing; every row here sees something
PADDED = torch.tensor([[False] * KEYS, [False] * 4 + [True] * 3])
STACKED = (draw(2, BATCH * HEADS, QUERIES, KEYS) < -0.3).index_fill(2, torch.tensor([0]), False)


def added(hidden, seed):
    return torch.where(hidden, -math.inf, draw(seed, *hidden.shape))


CALLS = {
    "no mask": {},
    "bool": {"attn_mask": ~SEEN},
    "floating": {"attn_mask": added(~SEEN, 3)},
    "bool, stacked": {"attn_mask": STACKED},
    "floating, stacked": {"attn_mask": added(STACKED, 4)},
    "padding": {"key_padding_mask": PADDED},
    "floating padding": {"key_padding_mask": added(PADDED, 5)},
    "bool and padding": {"attn_mask": ~SEEN, "key_padding_mask": PADDED},
    "stacked and padding": {"attn_mask": STACKED, "key_padding_mask": PADDED},
    "floating and padding": {"attn_mask": added(~SEEN, 6), "key_padding_mask": added(PADDED, 7)},
    "causal": {"attn_mask": torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1), "is_causal": True},
    "causal and padding": {
        "attn_mask": torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1),
        "key_padding_mask": PADDED,
        "is_causal": True,
    },
}
MODULES = {
    "length first": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "own widths": {"kdim": 8, "vdim": 6, "batch_first": True},
}


def operands(options, unbatched, dtype):
    shape = () if unbatched else (BATCH,)
    x = draw(10, *shape, QUERIES, WIDE)
    y, z = draw(11, *shape, KEYS, options.get("kdim", WIDE)), draw(12, *shape, KEYS, options.get("vdim", WIDE))
    return tuple(laid_out(each.to(dtype), options.get("batch_first", False)) for each in (x, y, z))


def unbatch(masks):
    parts = dict(masks)
    if "key_padding_mask" in parts:
        parts["key_padding_mask"] = parts["key_padding_mask"][1]
    if "attn_mask" in parts and parts["attn_mask"].dim() == 3:
        parts["attn_mask"] = parts["attn_mask"][:HEADS]
    return parts


def with_gradients(module, inputs, masks):
    """The output and the gradients of the inputs and of every parameter, of one weighted sum of the output."""
    module.zero_grad()
    inputs = [x.clone().requires_grad_() for x in inputs]
    output = module(*inputs, need_weights=False, **masks)[0]
    # Rounded first, so that the dtype changes nothing.
    output.mul(draw(20, *output.shape).float().to(output.dtype)).sum().backward()
    return [output, *(x.grad for x in inputs), *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("unbatched", [False, True], ids=["batched", "unbatched"])
@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("masks", CALLS.values(), ids=CALLS)
def test_torchs_outputs_and_gradients(masks, options, unbatched):
    masks = unbatch(masks) if unbatched else masks
    theirs, ours = pair(**options)
    inputs = operands(options, unbatched, torch.float64)
    exact = with_gradients(theirs, inputs, masks)
    for one, two in zip(with_gradients(ours, inputs, masks), exact, strict=True):
        agree(one, two)
    for x in exact:
        assert x.abs().max() > 1e-3
    # float32 within twice what torch itself is off by.
    narrow = {
        name: m.float() if isinstance(m, torch.Tensor) and m.is_floating_point() else m for name, m in masks.items()
    }
    # The same numbers on both sides: rounded first.
    theirs, ours = (module.float() for module in (theirs, ours))
    inputs = [x.float() for x in inputs]
    plain = with_gradients(theirs, inputs, narrow)
    found = with_gradients(ours, inputs, narrow)
    wide = {
        name: m.double() if isinstance(m, torch.Tensor) and m.is_floating_point() else m for name, m in narrow.items()
    }
    exact = with_gradients(copy.deepcopy(theirs).double(), [x.double() for x in inputs], wide)
    for one, formula, reference in zip(found, plain, exact, strict=True):
        result = compare(one.detach(), reference.detach().numpy(), formula.detach(), dtype="float32", magnitude=4.0)
        assert result.ok, result


def test_the_comparison_with_torch_can_fail():
    theirs, ours = pair(ours={"scale": 0.50001})
    inputs = operands({}, False, torch.float64)
    with pytest.raises(AssertionError):
        agree(ours(*inputs).output, theirs(*inputs, need_weights=False)[0])


def test_self_attention_needs_one_operand():
    theirs, ours = pair(batch_first=True)
    x = draw(1, BATCH, QUERIES, WIDE)
    expected = theirs(x, x, x, need_weights=False)[0]
    agree(ours(x).output, expected)
    agree(ours(x, x.clone()).output, expected)


def test_causal_needs_no_mask():
    _, ours = pair(batch_first=True)
    x = draw(1, BATCH, QUERIES, WIDE)
    mask = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
    causal = ours(x, is_causal=True)
    agree(causal.output, ours(x, attn_mask=mask).output)
    agree(causal.output, ours(x, attn_mask=mask, is_causal=True).output)
    assert causal.reading.visible_keys[0, 0].tolist() == [1, 2, 3, 4, 5]


def test_causal_drops_no_bias_as_torch_does():
    theirs, ours = pair(batch_first=True)
    x, bias = draw(1, BATCH, QUERIES, WIDE), draw(2, QUERIES, QUERIES)
    both = bias.masked_fill(torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1), -math.inf)
    agree(ours(x, attn_mask=bias, is_causal=True).output, theirs(x, x, x, attn_mask=both, need_weights=False)[0])


@every
def test_masks_of_both_types_combine(kind):
    module = built(kind, WIDE, HEADS, dtype=torch.float64, batch_first=True)
    x, y = draw(1, BATCH, QUERIES, WIDE), draw(2, BATCH, KEYS, WIDE)
    bias = draw(3, QUERIES, KEYS)
    mixed = module(x, y, attn_mask=bias, key_padding_mask=PADDED).output
    padding = torch.zeros(BATCH, KEYS, dtype=torch.float64).masked_fill(PADDED, -math.inf)
    agree(mixed, module(x, y, attn_mask=bias, key_padding_mask=padding).output)
    agree(mixed[1], module(x[1], y[1, :4], attn_mask=bias[:, :4]).output)
    assert (mixed - module(x, y, attn_mask=bias).output)[1].abs().max() > 1e-3


@every
def test_a_row_that_sees_nothing_gives_the_bias(kind):
    module = built(kind, WIDE, HEADS, dtype=torch.float64, batch_first=True)
    x = draw(1, BATCH, QUERIES, WIDE).requires_grad_()
    hidden = torch.zeros(QUERIES, QUERIES, dtype=torch.bool)
    hidden[2] = True
    output, reading = module(x, attn_mask=hidden)
    agree(output[:, 2], module.out_proj.bias.expand(BATCH, WIDE))
    assert (output[:, 1] - module.out_proj.bias).abs().max() > 1e-2
    assert reading.visible_keys[:, :, 2].eq(0).all()
    assert reading.logsumexp[:, :, 2].eq(-math.inf).all()
    output.sum().backward()
    assert x.grad.isfinite().all()


@every
def test_nan_behind_a_mask_stays_there(kind):
    module = built(kind, WIDE, HEADS, dtype=torch.float64, batch_first=True)
    x, y = draw(1, BATCH, QUERIES, WIDE).requires_grad_(), draw(2, BATCH, KEYS, WIDE)
    spoilt = y.clone()
    spoilt[1, 4:] = math.nan
    clean, dirty = module(x, y, key_padding_mask=PADDED), module(x, spoilt, key_padding_mask=PADDED)
    agree(dirty.output, clean.output)
    clean.output.sum().backward()
    expected, x.grad = x.grad, None
    dirty.output.sum().backward()
    agree(x.grad, expected)
    same_reading(dirty.reading, clean.reading)
    assert expected.abs().max() > 1e-3
    assert module(x, spoilt).output.isnan().any()


# --- scale, norm, head_dim ------------------------------------------------------------------------------------------

SCALES = {
    "sqrt_dk": 1 / 2,
    "dk": 1 / 4,
    "sqrt_dmodel": 12**-0.5,
    "unscaled": 1.0,
    "log_n": math.log(KEYS) / 2,
    "learned": 1 / 2,
    0.3: 0.3,
    -1: -1.0,
}


@pytest.mark.parametrize(("scale", "number"), SCALES.items(), ids=map(str, SCALES))
def test_scale_is_what_the_rule_says(scale, number):
    module = built(MultiheadAttention, WIDE, HEADS, batch_first=True, dtype=torch.float64, scale=scale)
    x, y = draw(1, BATCH, QUERIES, WIDE), draw(2, BATCH, KEYS, WIDE)
    output, reading = module(x, y)
    q, k, v = module.project(x, y)
    heads = functional.scaled_dot_product_attention(q, k, v, scale=number)
    agree(output, module.out_proj(heads.transpose(1, 2).flatten(-2)))
    agree(reading.max_qk, (q @ k.mT).mul(number).amax(-1))
    agree(
        torch.as_tensor(module.scale_value(KEYS), dtype=torch.float64).expand(HEADS),
        torch.full_like(v[0, :, 0, 0], number),
    )


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor], ids=lambda f: f.__name__)
def test_a_scale_per_head(form):
    numbers = [0.125, 0.75, -0.25]
    module = built(MultiheadAttention, WIDE, HEADS, batch_first=True, dtype=torch.float64, scale=form(numbers))
    x = draw(1, BATCH, QUERIES, WIDE)
    q, k, v = module.project(x)
    heads = [
        functional.scaled_dot_product_attention(q[:, h], k[:, h], v[:, h], scale=number)
        for h, number in enumerate(numbers)
    ]
    agree(module(x).output, module.out_proj(torch.cat(heads, -1)))


def test_a_module_in_16_bits_does_not_round_its_scale():
    assert MultiheadAttention(WIDE, HEADS, scale=[0.1, 0.2, 0.3]).bfloat16().scale_value() == (0.1, 0.2, 0.3)


def test_a_learned_scale_gets_the_gradient_of_finite_differences():
    module = built(MultiheadAttention, WIDE, HEADS, batch_first=True, dtype=torch.float64, scale="learned")
    x, target = draw(1, BATCH, QUERIES, WIDE), draw(2, BATCH, QUERIES, WIDE)

    def loss(log_scale):
        return torch.func.functional_call(module, {"log_scale": log_scale}, (x,)).output.mul(target).sum()

    assert gradcheck(loss, module.log_scale.detach().clone().requires_grad_())
    output, reading = module(x)
    output.mul(target).sum().backward()
    agree(module.log_scale.grad, reading.pressure.sum((0, 2)))
    assert module.log_scale.grad.abs().min() > 1e-4


@pytest.mark.parametrize("norm", ["rms", "layer", "l2"])
def test_qk_norm(norm):
    module = built(MultiheadAttention, WIDE, HEADS, batch_first=True, dtype=torch.float64, qk_norm=norm)
    x = draw(1, BATCH, QUERIES, WIDE)
    q, k, v = module.project(x)
    raw = functional.linear(x, module.in_proj_weight, module.in_proj_bias).unflatten(-1, (3, HEADS, -1))
    for found, own in ((q, raw[:, :, 0]), (k, raw[:, :, 1])):
        own = own.transpose(1, 2)
        if norm == "layer":
            own = own - own.mean(-1, keepdim=True)
        size = own.square().sum(-1, keepdim=True) if norm == "l2" else own.square().mean(-1, keepdim=True)
        agree(found, own / size.sqrt(), tolerance=1e-5)
    agree(v, raw[:, :, 2].transpose(1, 2))
    heads = functional.scaled_dot_product_attention(q, k, v)
    agree(module(x).output, module.out_proj(heads.transpose(1, 2).flatten(-2)))


@pytest.mark.parametrize("norm", ["rms", "layer", "l2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_qk_norm_of_nothing_is_a_number(norm, dtype):
    module = MultiheadAttention(WIDE, HEADS, batch_first=True, dtype=dtype, qk_norm=norm)
    x = torch.zeros(BATCH, QUERIES, WIDE, dtype=dtype, requires_grad=True)
    module(x).output.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@every
def test_heads_of_another_width(kind):
    module = built(kind, WIDE, 5, head_dim=8, dtype=torch.float64, batch_first=True)
    assert module.in_proj_weight.shape == (3 * 5 * 8, WIDE)
    assert module.out_proj.weight.shape == (WIDE, 5 * 8)
    x = draw(1, BATCH, QUERIES, WIDE)
    q, k, v = module.project(x)
    assert q.shape == k.shape == v.shape == (BATCH, 5, QUERIES, 8)
    output, reading = module(x)
    assert output.shape == x.shape
    assert reading.entropy.shape == (BATCH, 5, QUERIES)


# --- the Reading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"scale": "log_n"}, {"qk_norm": "l2", "scale": 10}], ids=str)
def test_the_reading_is_of_the_projected_heads(options, auto):
    module = built(MultiheadAttention, WIDE, HEADS, batch_first=True, dtype=torch.float64, **options)
    x, y = draw(1, BATCH, QUERIES, WIDE), draw(2, BATCH, KEYS, WIDE)
    _, reading = module(x, y, attn_mask=~SEEN, key_padding_mask=PADDED)
    q, k, v = module.project(x, y)
    shown = SEEN & ~PADDED[:, None, None]
    expected = read(q, k, attn_mask=shown, scale=module.scale_value(KEYS))
    for name in MEASURED:
        if name not in ("output_norm", "gradient_flow", "pressure"):
            agree(getattr(reading, name), getattr(expected, name), name)
    steps = trace(q, k, v, attn_mask=shown, scale=module.scale_value(KEYS))
    agree(reading.output_norm, steps.output.norm(dim=-1))
    assert reading.backend == ("cpu" if auto == "cpu" else "torch")


@every
def test_a_backward_pass_measures(kind):
    module = built(kind, WIDE, HEADS, batch_first=True)
    x = draw(1, BATCH, QUERIES, WIDE, dtype=torch.float32)
    output, reading = module(x)
    assert reading.pressure is None
    output.square().sum().backward()
    assert reading.pressure.shape == reading.gradient_flow.shape == (BATCH, HEADS, QUERIES)
    assert reading.pressure.abs().max() > 0


@every
def test_stats(kind):
    module = kind(WIDE, HEADS, stats=("entropy", "flow"))
    _, reading = module(draw(1, QUERIES, WIDE, dtype=torch.float32))
    measured = [name for name in MEASURED if getattr(reading, name) is not None]
    assert measured == ["entropy", "collision"]
    output, reading = kind(WIDE, HEADS, stats="none")(draw(1, QUERIES, WIDE, dtype=torch.float32))
    assert reading.shape == ()
    output.sum().backward()
    assert reading.pressure is None


@every
def test_unbatched_is_a_batch_of_one_without_its_axis(kind):
    module = built(kind, WIDE, HEADS, batch_first=True, dtype=torch.float64)
    x, y = draw(1, BATCH, QUERIES, WIDE), draw(2, BATCH, KEYS, WIDE)
    mask = STACKED.unflatten(0, (BATCH, HEADS))
    whole = module(x, y, attn_mask=STACKED, key_padding_mask=PADDED)
    for b in range(BATCH):
        alone = module(x[b], y[b], attn_mask=mask[b], key_padding_mask=PADDED[b])
        agree(alone.output, whole.output[b])
        assert alone.reading.entropy.shape == (HEADS, QUERIES)
        agree(alone.reading.entropy, whole.reading.entropy[b])


@every
def test_length_first_is_batch_first_turned(kind):
    module = built(kind, WIDE, HEADS, batch_first=True, dtype=torch.float64)
    turned = kind(WIDE, HEADS, batch_first=False, dtype=torch.float64)
    turned.load_state_dict(module.state_dict())
    x, y = draw(1, BATCH, QUERIES, WIDE), draw(2, BATCH, KEYS, WIDE)
    expected = module(x, y, key_padding_mask=PADDED)
    found = turned(x.transpose(0, 1), y.transpose(0, 1), key_padding_mask=PADDED)
    agree(found.output.transpose(0, 1), expected.output)
    agree(found.reading.entropy, expected.reading.entropy)


# --- as a module ----------------------------------------------------------------------------------------------------


def encoder_layer(kind, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDE, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = kind(WIDE, 2, batch_first=True, dtype=torch.float64, **options)
    return layer


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("masked", ["", "mask", "padding", "causal"])
def test_inside_an_encoder_layer(training, grad, masked):
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(WIDE, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    ours = encoder_layer(MultiheadAttention)
    ours.load_state_dict(theirs.state_dict())
    theirs.train(training), ours.train(training)
    x = draw(1, BATCH, QUERIES, WIDE)
    causal = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
    masks = {
        "": {},
        "mask": {"src_mask": ~(SEEN[:, :QUERIES])},
        "padding": {"src_key_padding_mask": PADDED[:, 2:]},
        "causal": {"src_mask": causal, "is_causal": True},
    }[masked]
    seen = []
    # A pre-hook on a module would itself turn the fused path off; this one does not.
    inner = ours.self_attn._mix
    ours.self_attn._mix = lambda *arguments: seen.append(1) or inner(*arguments)
    with torch.set_grad_enabled(grad):
        expected, found = theirs(x, **masks), ours(x, **masks)
    assert seen, "the fused path went past the module"
    if masked == "padding" and not training and not grad:
        # Torch's fused path pads what it does not compute.
        expected, found = expected[:1], found[:1]
    agree(found, expected)


@every
def test_a_scale_of_its_own_survives_inference(kind):
    """Torch's fused path takes the weights only: at an odd scale it would be wrong without a word."""
    layer = encoder_layer(kind).eval()
    if kind is MultiheadAttention:
        layer.self_attn.scale = 3.0
    x = draw(1, BATCH, QUERIES, WIDE)
    with torch.no_grad():
        inferred = layer(x)
    agree(inferred, layer(x))
    agree(inferred, layer.train()(x))
    assert inferred.abs().max() > 0.1


@every
def test_inside_an_encoder_and_a_decoder(kind):
    encoder = nn.TransformerEncoder(encoder_layer(kind), 2, enable_nested_tensor=False).eval()
    decoder = nn.TransformerDecoderLayer(WIDE, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    decoder.self_attn, decoder.multihead_attn = (kind(WIDE, 2, batch_first=True, dtype=torch.float64) for _ in range(2))
    x, y = draw(1, BATCH, QUERIES, WIDE), draw(2, BATCH, KEYS, WIDE)
    causal = nn.Transformer.generate_square_subsequent_mask(QUERIES, dtype=torch.float64)
    with torch.no_grad():
        memory = encoder(y, src_key_padding_mask=PADDED)
        output = decoder(x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=PADDED)
    assert output.shape == x.shape
    changed = memory.clone()
    changed[1, 4:] = 9
    agree(decoder(x, changed, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=PADDED), output)
    changed[1, 0] = 9
    assert (decoder(x, changed, tgt_mask=causal) - output).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_refused_with_the_way_out():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDE, 2, 16, batch_first=True), 1).eval()
    encoder.layers[0].self_attn = MultiheadAttention(WIDE, 2, batch_first=True)
    with torch.no_grad(), pytest.raises(FrameworkError, match="enable_nested_tensor=False"):
        encoder(draw(1, BATCH, KEYS, WIDE, dtype=torch.float32), src_key_padding_mask=PADDED)


@every
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "state"])
def test_copies(kind, how):
    module = built(kind, WIDE, HEADS, batch_first=True)
    if how == "deepcopy":
        again = copy.deepcopy(module)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(module))
    elif how == "save":
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    else:
        again = kind(WIDE, HEADS, batch_first=True)
        again.load_state_dict(module.state_dict())
    x = draw(1, BATCH, QUERIES, WIDE, dtype=torch.float32)
    assert torch.equal(again(x).output, module(x).output)
    with torch.no_grad():
        again.in_proj_weight.zero_()
    assert not torch.equal(again(x).output, module(x).output)


@every
def test_it_says_what_it_is(kind):
    text = repr(kind(WIDE, HEADS))
    assert text.startswith(f"{kind.__name__}(")
    assert "embed_dim=12, num_heads=3, head_dim=4" in text


@every
def test_compiled(kind):
    torch._dynamo.reset()
    module = built(kind, WIDE, HEADS, batch_first=True)
    compiled = torch.compile(module, backend="aot_eager")
    x = draw(1, BATCH, QUERIES, WIDE, dtype=torch.float32)
    for masks in ({}, {"is_causal": True}, {"key_padding_mask": PADDED[:, 2:]}):
        expected, found = module(x, **masks), compiled(x, **masks)
        agree(found.output, expected.output, tolerance=1e-5)
        agree(found.reading.entropy, expected.reading.entropy, tolerance=1e-5)
        gradients = []
        for output, reading in (expected, found):
            module.zero_grad()
            output.square().sum().backward()
            gradients.append([p.grad.clone() for p in module.parameters()])
            assert reading.pressure is not None
        for one, two in zip(*gradients, strict=True):
            agree(one, two, tolerance=1e-4)
            assert one.abs().max() > 0 or kind is not MultiheadAttention


@every
def test_compiled_into_one_graph(kind):
    torch._dynamo.reset()
    module = built(kind, WIDE, HEADS, batch_first=True, stats=("entropy",))
    x = draw(1, BATCH, QUERIES, WIDE, dtype=torch.float32)
    found = torch.compile(module, backend="aot_eager", fullgraph=True)(x, is_causal=True)
    assert isinstance(found, Attended)
    agree(found.output, module(x, is_causal=True).output, tolerance=1e-5)


@every
def test_autocast(kind):
    module = built(kind, WIDE, HEADS, batch_first=True)
    x = draw(1, BATCH, QUERIES, WIDE, dtype=torch.float32)
    expected = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        output, reading = module(x, key_padding_mask=PADDED[:, 2:])
        whole = module(x)
    assert output.dtype == torch.bfloat16
    assert reading.entropy.dtype == torch.float32
    assert (whole.output - expected.output).abs().max() < 0.05 * expected.output.abs().max()
    output.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
    assert module.in_proj_weight.grad.abs().max() > 0


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(kind, dtype):
    module = built(kind, WIDE, HEADS, batch_first=True, dtype=dtype)
    x = draw(1, BATCH, QUERIES, WIDE, dtype=dtype)
    output, reading = module(x)
    assert output.dtype == dtype
    assert reading.entropy.dtype == torch.float32
    wide = copy.deepcopy(module).double()
    expected = wide(x.double()).output
    assert (output.double() - expected).abs().max() < 8 * torch.finfo(dtype).eps * expected.abs().max()
    output.sum().backward()
    wide(x.double()).output.sum().backward()
    for (name, p), q in zip(module.named_parameters(), wide.parameters(), strict=True):
        size = max(q.grad.abs().max(), 1.0)
        assert (p.grad.double() - q.grad).abs().max() < 16 * torch.finfo(dtype).eps * size, name


@every
def test_dropout_in_training_only(kind):
    module = built(kind, WIDE, HEADS, dropout=0.5, batch_first=True, dtype=torch.float64)
    x = draw(1, BATCH, QUERIES, WIDE)
    torch.manual_seed(1)
    one = module(x)
    torch.manual_seed(1)
    assert torch.equal(module(x).output, one.output)
    two = module(x)
    assert not torch.equal(two.output, one.output)
    still = module.eval()(x)
    assert torch.equal(still.output, module(x).output)
    same_reading(one.reading, still.reading, but=("output_norm", "nonfinite"))
    module.train()
    torch.manual_seed(2)
    mean = torch.stack([module(x).output.detach() for _ in range(400)]).mean(0)
    assert (mean - still.output).abs().max() < 0.25 * still.output.abs().max()


@every
def test_empty(kind):
    module = built(kind, WIDE, HEADS, batch_first=True)
    for shape in ((0, QUERIES, WIDE), (BATCH, 0, WIDE)):
        output, reading = module(torch.zeros(shape))
        assert output.shape == shape
        assert reading.entropy.numel() == 0
    output, _ = module(torch.ones(BATCH, QUERIES, WIDE), torch.ones(BATCH, 0, WIDE))
    agree(output, module.out_proj.bias.expand(BATCH, QUERIES, WIDE))


# --- cosine ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.01, 0.25, 3])
def test_cosine_scores_are_bounded(temperature):
    module = built(CosineAttention, WIDE, HEADS, temperature=temperature, dtype=torch.float64)
    x = 1e3 * draw(1, BATCH, QUERIES, WIDE)
    _, reading = module(x, -x)
    q, k, v = module.project(x, -x)
    scores = trace(q, k, v, scale=module.scale_value()).scaled
    assert scores.abs().max() <= (1 + 1e-12) / temperature
    agree(reading.max_logit, scores.amax(-1))
    agree(scores, functional.cosine_similarity(q[..., None, :], k[..., None, :, :], dim=-1) / temperature)


def test_cosine_reaches_its_bound():
    module = CosineAttention(WIDE, HEADS, temperature=0.1, dtype=torch.float64)
    with torch.no_grad():
        module.in_proj_weight[:WIDE] = module.in_proj_weight[WIDE : 2 * WIDE]
    _, reading = module(draw(1, BATCH, QUERIES, WIDE))
    agree(reading.max_logit, torch.full_like(reading.max_logit, 10))


def test_cosine_sees_directions_only():
    module = CosineAttention(WIDE, HEADS, dtype=torch.float64)
    x, y = draw(1, BATCH, QUERIES, WIDE), draw(2, BATCH, KEYS, WIDE)
    expected = module(x, y)
    with torch.no_grad():
        module.in_proj_weight[:WIDE] *= 7
        module.in_proj_weight[WIDE : 2 * WIDE] *= 0.01
    found = module(x, y)
    agree(found.output, expected.output)
    agree(found.reading.entropy, expected.reading.entropy)
    with torch.no_grad():
        module.in_proj_weight[0] *= 2
    assert (module(x, y).output - expected.output).abs().max() > 1e-3


@pytest.mark.parametrize("per_head", [True, False])
def test_a_learned_temperature_gets_the_gradient_of_finite_differences(per_head):
    module = built(CosineAttention, WIDE, HEADS, per_head=per_head, dtype=torch.float64)
    assert module.log_temperature.shape == ((HEADS,) if per_head else (1,))
    agree(module.scale_value(), torch.full((HEADS,), 10.0, dtype=torch.float64))
    x, target = draw(1, BATCH, QUERIES, WIDE), draw(2, BATCH, QUERIES, WIDE)

    def loss():
        return module(x).output.mul(target).sum()

    loss().backward()
    step = 1e-5
    for h in range(len(module.log_temperature)):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                module.log_temperature[h] += sign * step
                ends.append(loss())
                module.log_temperature[h] -= sign * step
        agree((ends[0] - ends[1]) / (2 * step), module.log_temperature.grad[h], tolerance=1e-7)
    assert module.log_temperature.grad.abs().min() > 1e-3


def test_a_learned_temperature_ends_at_a_hundredth():
    module = CosineAttention(WIDE, HEADS)
    with torch.no_grad():
        module.log_temperature.copy_(torch.tensor([-9.0, -3.0, 0.0]))
    agree(module.scale_value(), torch.tensor([100.0, math.exp(3), 1.0]), tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_cosine_with_nothing(dtype):
    module = CosineAttention(WIDE, HEADS, dtype=dtype)
    x = draw(1, BATCH, QUERIES, WIDE, dtype=dtype)
    x[0, 1] = 0  # projected to 0, since biases start there
    x = x.requires_grad_()
    output, reading = module(x)
    assert output.isfinite().all()
    assert reading.score_std[0, :, 1].eq(0).all(), "a vector of zeros has cosine 0 with every other"
    output.square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


# --- additive -------------------------------------------------------------------------------------------------------


def explicit(q, k, v, weight, mask=None, is_causal=False):
    """Scores, weights and output by the formula; `mask` as attend takes it."""
    plain = (torch.tanh(q[..., :, None, :] + k[..., None, :, :]) * weight[:, None, None, :]).sum(-1)
    scores = plain
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return plain, scores, weights, weights @ v


@pytest.fixture(params=["whole", "tiles"])
def tiling(request, monkeypatch):
    """As it is, and with tiles of some queries and three keys, so that small problems take many."""
    if request.param == "tiles":
        monkeypatch.setattr(_additive_tiles, "KEYS_AT_ONCE", 3)
        monkeypatch.setattr(_additive_tiles, "_room", lambda x: 3 * 2 * x.shape[-1])


SHOWN = {
    "no mask": {},
    "causal": {"is_causal": True},
    "bool": {"mask": SEEN[None, None]},
    "a row sees nothing": {"mask": (SEEN & (torch.arange(QUERIES) != 2)[:, None])[None, None]},
    "padding": {"mask": ~PADDED[:, None, None]},
    "bias": {"mask": added(~SEEN, 3)[None, None]},
    "bias per head, causal": {"mask": added(STACKED, 4).unflatten(0, (BATCH, HEADS)), "is_causal": True},
}
shown = pytest.mark.parametrize("masks", SHOWN.values(), ids=SHOWN)


def additive_operands(hidden=4, wide=6):
    q, k = draw(1, BATCH, HEADS, QUERIES, hidden), draw(2, BATCH, HEADS, KEYS, hidden)
    return q, k, draw(3, BATCH, HEADS, KEYS, wide), 2 * draw(4, HEADS, hidden)


def call_of(q, k, v, weight, mask=None, is_causal=False, seed=None, dropout_p=0.0):
    return _additive_tiles.Call(q, k, v, weight, mask, seed, is_causal, dropout_p)


@shown
def test_additive_is_the_formula(masks, tiling):
    q, k, v, weight = additive_operands()
    found = _additive_tiles.additive(call_of(q, k, v, weight, **masks), frozenset(MEASURED))
    plain, scores, weights, output = explicit(q, k, v, weight, **masks)
    agree(found["output"], output)
    assert output.abs().max() > 0.1
    seen = scores > -math.inf
    some = seen.any(-1)
    count = seen.sum(-1)
    assert torch.equal(found["visible_keys"], count)
    agree(found["max_logit"], scores.amax(-1))
    agree(found["logsumexp"], scores.logsumexp(-1))
    agree(found["expected_score"], (weights * scores.masked_fill(~seen, 0)).sum(-1))
    agree(found["entropy"], -torch.xlogy(weights, weights).sum(-1), tolerance=1e-11)
    agree(found["collision"], weights.square().sum(-1))
    agree(found["largest_weight"], weights.amax(-1))
    mean = scores.masked_fill(~seen, 0).sum(-1) / count.clamp(min=1)
    agree(found["score_mean"], mean)
    spread = (scores - mean[..., None]).masked_fill(~seen, 0).square().sum(-1) / count.clamp(min=1)
    agree(found["score_std"], spread.sqrt())
    agree(found["max_qk"], plain.masked_fill(~seen, -math.inf).amax(-1))
    first = seen.double().argmax(-1, keepdim=True)
    agree(found["first_key_weight"], weights.gather(-1, first)[..., 0] * some)
    agree(found["output_norm"], output.norm(dim=-1))
    assert not found["nonfinite"].any()


@shown
def test_additive_gradients(masks, tiling):
    q, k, v, weight = (x.requires_grad_() for x in additive_operands(2, 3))
    bias = masks.get("mask")
    differentiable = bias is not None and bias.is_floating_point()

    def output(q, k, v, weight, *bias):
        own = {**masks, "mask": bias[0]} if bias else masks
        return _additive_tiles.additive(call_of(q, k, v, weight, **own), frozenset())["output"]

    operands = [q, k, v, weight]
    if not differentiable:
        assert gradcheck(output, operands, fast_mode=True)
    # And a bias, of which finite differences do not reach −inf: by the formula.
    if differentiable:
        operands.append(bias.clone().requires_grad_())
    target = draw(9, BATCH, HEADS, QUERIES, 3)
    ours = torch.autograd.grad(output(*operands).mul(target).sum(), operands)
    mask = operands[4] if differentiable else bias
    formula = explicit(q, k, v, weight, mask, masks.get("is_causal", False))[3]
    if bias is not None and not (explicit(q, k, v, weight, **masks)[1] > -math.inf).any(-1).all():
        return  # the plain formula has NaN gradients where a row sees nothing; gradcheck has not
    theirs = torch.autograd.grad(formula.mul(target).sum(), operands)
    for one, two in zip(ours, theirs, strict=True):
        agree(one, two)
        assert two.abs().max() > 1e-3


def test_additive_pressure_is_the_gradient_along_the_weight(tiling):
    q, k, v, weight = (x.requires_grad_() for x in additive_operands())
    bias = draw(5, 1, HEADS, QUERIES, KEYS)
    found = _additive_tiles.additive(call_of(q, k, v, weight, bias), frozenset(MEASURED))
    target = draw(9, *found["output"].shape)
    found["output"].mul(target).sum().backward()
    waiting = found["gradients"]
    assert waiting[0] == 1
    flow, pressure = waiting[1:].reshape(2, BATCH, HEADS, QUERIES)
    agree(pressure.sum((0, 2)), (weight * weight.grad).sum(-1))
    _, _, weights, _ = explicit(q, k, v, weight, bias)
    upstream = target @ v.mT
    centre = (weights * upstream).sum(-1, keepdim=True)
    agree(flow, (weights * (upstream - centre).square()).sum(-1) / upstream.var(-1, correction=0))


def test_additive_dropout_drops_what_attend_drops(tiling):
    q, k, v, weight = (x.requires_grad_() for x in additive_operands())
    seed = torch.tensor(7)
    found = _additive_tiles.additive(call_of(q, k, v, weight, seed=seed, dropout_p=0.4), frozenset(MEASURED))
    _, scores, _, _ = explicit(q, k, v, weight)
    # attend with the same scores, as a bias.
    nothing = (
        torch.zeros(BATCH, HEADS, QUERIES, 1, dtype=torch.float64),
        torch.zeros(BATCH, HEADS, KEYS, 1, dtype=torch.float64),
    )
    expected = attend(*nothing, v, attn_mask=scores, dropout_p=0.4, seed=7)
    agree(found["output"], expected.output)
    agree(found["entropy"], expected.reading.entropy)
    agree(found["output_norm"], expected.reading.output_norm)
    target = draw(9, *found["output"].shape)
    ours = torch.autograd.grad(found["output"].mul(target).sum(), (q, k, v, weight))
    theirs = torch.autograd.grad(expected.output.mul(target).sum(), (q, k, v, weight))
    for one, two in zip(ours, theirs, strict=True):
        agree(one, two)


@pytest.mark.parametrize(
    "masks", [{}, {"attn_mask": ~SEEN}, {"key_padding_mask": PADDED}, {"is_causal": True}], ids=str
)
def test_additive_module(masks, tiling):
    module = built(AdditiveAttention, WIDE, HEADS, hidden_dim=5, dtype=torch.float64)
    x, y = draw(1, BATCH, QUERIES, WIDE), draw(2, BATCH, KEYS, WIDE)
    q, k, v = module.project(x, y)
    assert q.shape == (BATCH, HEADS, QUERIES, 5)
    assert v.shape == (BATCH, HEADS, KEYS, 4)
    mask = None
    if "attn_mask" in masks:
        mask = SEEN
    if "key_padding_mask" in masks:
        mask = ~PADDED[:, None, None]
    heads = explicit(q, k, v, module.score_weight, mask, "is_causal" in masks)[3]
    output, reading = module(x, y, **masks)
    agree(output, module.out_proj(heads.transpose(1, 2).flatten(-2)))
    assert reading.shape == (BATCH, HEADS, QUERIES)


def test_additive_scores_are_bounded_and_come_close():
    module = built(AdditiveAttention, WIDE, HEADS, dtype=torch.float64)
    bound = module.score_bound()
    agree(bound, module.score_weight.detach().abs().sum(-1))
    _, reading = module(1e3 * draw(1, BATCH, QUERIES, WIDE))
    assert (reading.max_logit <= bound[:, None] * (1 + 1e-12)).all()
    # Queries with the signs of w, large: every tanh is ±1.
    with torch.no_grad():
        module.in_proj_weight[:WIDE] = 0
        module.in_proj_bias[:WIDE] = 1e3 * module.score_weight.sign().flatten()
    _, reading = module(draw(1, BATCH, QUERIES, WIDE))
    agree(reading.max_logit, bound[:, None].expand(BATCH, HEADS, QUERIES))
    assert bound.min() > 0.5


def test_additive_float32_keeps_the_budget():
    q, k, v, weight = (x.float() for x in additive_operands(16, 16))
    found = _additive_tiles.additive(call_of(q, k, v, weight), frozenset(MEASURED))["output"]
    exact = explicit(*(x.double() for x in (q, k, v, weight)))[3]
    mean = v.double().mean(-2, keepdim=True).expand_as(exact)
    assert_within_budget(found, exact.numpy(), explicit(q, k, v, weight)[3], dtype="float32", stand_in=mean.numpy())


class Largest(TorchDispatchMode):
    """The most numbers that any tensor made under it has."""

    numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            # A view of few numbers, such as an expanded one, takes no memory.
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // max(x.element_size(), 1))
        return made


@pytest.mark.parametrize("length", [512, 1024])
def test_no_tile_grows_with_the_length(length):
    hidden = 16
    q, k, v = (draw(i, 1, 1, length, hidden, dtype=torch.float32) for i in range(3))
    call = call_of(q, k, v, draw(4, 1, hidden, dtype=torch.float32), is_causal=True)
    with Largest() as largest:
        found = _additive_tiles._forward(call, frozenset(MEASURED))
        saved = _additive_tiles.Saved(
            *(found[name] for name in ("output", "max_logit", "largest_weight")), q.new_zeros(0)
        )
        _additive_tiles._backward(call, saved, torch.ones_like(q), bias_too=False)
    assert largest.numbers <= _additive_tiles._room(q)
    with Largest() as largest:
        explicit(q, k, v, call.weight)
    assert largest.numbers >= length * length * hidden, "the measurement does not see a matrix"


def test_what_is_kept_for_the_backward_pass_is_linear():
    def kept(length):
        module = AdditiveAttention(WIDE, HEADS)
        x = draw(1, 1, length, WIDE, dtype=torch.float32)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            module(x, is_causal=True)
        return sum(sizes)

    small, large = kept(64), kept(128)
    fixed = 2 * small - large
    assert 0 < fixed < 10_000  # the parameters
    assert kept(256) == fixed + 4 * (small - fixed)


MEASURE = r"""
import re, sys, torch
from attemper.nn import AdditiveAttention
torch.set_num_threads(1)
peak = lambda: int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) / 1024
n = int(sys.argv[1])
layer = AdditiveAttention(16, 1, hidden_dim=4)
# Tiles of the full size, so that they are there before.
layer(torch.randn(1, 1024, 16)).output.sum().backward()
x = torch.randn(1, n, 16)
before = peak()
output, reading = layer(x, is_causal=True)
output.square().sum().backward()
assert reading.pressure is not None and layer.in_proj_weight.grad.abs().max() > 0
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_linear():
    """One matrix of scores at 4,096 is 64 MB, and its tanh 256 MB."""
    run = subprocess.run([sys.executable, "-c", MEASURE, "4096"], check=True, capture_output=True, text=True)
    assert float(run.stdout) < 32


def test_additive_refuses_what_it_cannot_differentiate():
    module = AdditiveAttention(WIDE, HEADS, dtype=torch.float64)
    x = draw(1, QUERIES, WIDE)
    with pytest.raises(BackendError, match=r"torch\.func and forward-mode"):
        torch.func.grad(lambda x: module(x).output.sum())(x)
    with pytest.raises(BackendError, match=r"torch\.func and forward-mode"), torch.autograd.forward_ad.dual_level():
        module(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
    x = x.requires_grad_()
    first = torch.autograd.grad(module(x).output.square().sum(), x, create_graph=True)[0]
    with pytest.raises(BackendError, match="Second derivatives"):
        first.sum().backward()


@pytest.mark.parametrize("masks", SHOWN.values(), ids=SHOWN)
def test_opcheck(masks):
    q, k, v, weight = (x.requires_grad_() for x in additive_operands(2, 3))
    call = call_of(q, k, v, weight, **masks)
    stats = "entropy,largest_weight,max_logit,pressure"
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(_additive_tiles._additive, (*call, stats), test_utils=checks)


# --- errors ---------------------------------------------------------------------------------------------------------

CONSTRUCTIONS = {
    "indivisible": ((MultiheadAttention, 10, 3), {}, "embed_dim 10 cannot be split over 3 heads.\n  Choose num_heads"),
    "no heads": ((CosineAttention, 8, 0), {}, "num_heads is 0.\n  Pass a whole number of at least 1."),
    "no width": ((AdditiveAttention, 0), {}, "embed_dim is 0."),
    "half a head": ((MultiheadAttention, 8, 2), {"head_dim": 2.5}, "head_dim is 2.5."),
    "no hidden": ((AdditiveAttention, 8), {"hidden_dim": 0}, "hidden_dim is 0."),
    "no key width": ((MultiheadAttention, 8, 2), {"kdim": -1}, "kdim is -1."),
    "bias_kv": ((MultiheadAttention, 8, 2), {"add_bias_kv": True}, "add_bias_kv=True, but this module adds no key"),
    "zero_attn": ((MultiheadAttention, 8, 2), {"add_zero_attn": True}, "add_zero_attn=True"),
    "scale rule": (
        (MultiheadAttention, 8, 2),
        {"scale": "sqrt_d"},
        "scale 'sqrt_d' is not known.\n  Did you mean 'sqrt_dk'?",
    ),
    "scale count": ((MultiheadAttention, 8, 2), {"scale": [1, 2, 3]}, "Pass a finite number, 2 of them (one per head)"),
    "scale NaN": ((MultiheadAttention, 8, 2), {"scale": math.nan}, "scale is nan."),
    "scale inf": ((MultiheadAttention, 8, 2), {"scale": [1, -math.inf]}, "scale is -inf."),
    "scale None": ((MultiheadAttention, 8, 2), {"scale": None}, "scale is None."),
    "scale grad": ((MultiheadAttention, 8, 2), {"scale": torch.ones(2, requires_grad=True)}, "Pass scale='learned'"),
    "norm": ((MultiheadAttention, 8, 2), {"qk_norm": "l3"}, "qk_norm 'l3' is not known."),
    "dropout": ((MultiheadAttention, 8, 2), {"dropout": 1.0}, "dropout is 1.0.\n  It is the share"),
    "stats": ((AdditiveAttention, 8), {"stats": "entrop"}, "Did you mean 'entropy'?"),
    "temperature": ((CosineAttention, 8, 2), {"temperature": -0.1}, "temperature is -0.1.\n  Pass a positive number"),
    "temperature 0": ((CosineAttention, 8, 2), {"temperature": 0}, "temperature is 0."),
    "temperature inf": ((CosineAttention, 8, 2), {"temperature": math.inf}, "temperature is inf."),
    "temperature name": ((CosineAttention, 8, 2), {"temperature": "learnt"}, "Did you mean 'learned'?"),
    "bias": ((CosineAttention, 8, 2), {"bias": 1}, "bias is 1.\n  Pass True or False."),
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_errors_of_construction(name):
    (kind, *arguments), options, message = CONSTRUCTIONS[name]
    with pytest.raises(OptionError) as error:
        kind(*arguments, **options)
    assert message in str(error.value)


X, Y = torch.zeros(BATCH, QUERIES, WIDE), torch.zeros(BATCH, KEYS, WIDE)
ODD = {
    "weights": (
        (X,),
        {"need_weights": True},
        OptionError,
        "need_weights=True, but the matrix of weights is never built.",
    ),
    "value alone": ((X, None, Y), {}, OptionError, "value was given without key."),
    "no tensor": (([1.0],), {}, FrameworkError, "query is [1.0], not a torch tensor."),
    "rank 4": ((X[None],), {}, ShapeError, "query has rank 4."),
    "rank 1": ((X[0, 0],), {}, ShapeError, "query has rank 1."),
    "ranks": ((X, Y[0]), {}, ShapeError, "key has rank 2, but query has rank 3."),
    "width": ((X, Y[..., :8]), {}, ShapeError, "key has width 8, but the module was built for 12."),
    "lengths": ((X, Y, X), {}, ShapeError, "value has length 5, but key has length 7."),
    "batches": ((X, Y[:1]), {}, ShapeError, "key has batch 1, but query has batch 2."),
    "mask shape": (
        (X, Y),
        {"attn_mask": torch.zeros(KEYS, QUERIES)},
        ShapeError,
        "Pass (queries, keys) = (5, 7) or (batch · heads, queries, keys) = (6, 5, 7).",
    ),
    "bool mask shape": (
        (X, Y),
        {"attn_mask": torch.zeros(2, 5, 7, dtype=bool)},
        ShapeError,
        "attn_mask has shape (2, 5, 7).",
    ),
    "unbatched mask": (
        (X[0], Y[0]),
        {"attn_mask": torch.zeros(6, 5, 7)},
        ShapeError,
        "(heads, queries, keys) = (3, 5, 7)",
    ),
    "padding shape": ((X, Y), {"key_padding_mask": torch.zeros(KEYS)}, ShapeError, "Pass (batch, keys) = (2, 7)."),
    "unbatched padding": ((X[0], Y[0]), {"key_padding_mask": PADDED}, ShapeError, "Pass (keys,) = (7,)."),
    "mask dtype": ((X, Y), {"attn_mask": torch.zeros(5, 7, dtype=torch.uint8)}, DtypeError, "attn_mask.bool()"),
    "mask list": (
        (X, Y),
        {"key_padding_mask": [True]},
        FrameworkError,
        "key_padding_mask is [True], not a torch tensor.",
    ),
    "dtype": ((X.double(),), {}, DtypeError, "query is float64, but the module is float32."),
    "whole numbers": ((X.long(),), {}, DtypeError, "query is int64, but the module is float32."),
    "device": ((X.to("meta"),), {}, FrameworkError, "query is on meta, but the module is on cpu."),
    "causal": ((X,), {"is_causal": 1}, OptionError, "is_causal is 1.\n  Pass True or False."),
}


@every
@pytest.mark.parametrize("name", ODD)
def test_errors_of_calls(kind, name):
    operands, options, error, message = ODD[name]
    with pytest.raises(error) as raised:
        kind(WIDE, HEADS, batch_first=True)(*operands, **options)
    assert message in str(raised.value)


def test_errors_show_the_operands():
    with pytest.raises(ShapeError) as raised:
        MultiheadAttention(WIDE, HEADS)(Y.transpose(0, 1), X.transpose(0, 1), Y.transpose(0, 1))
    assert str(raised.value) == (
        "value has length 7, but key has length 5.\n"
        "  query  (length 7, batch 2, width 12)  float32 cpu\n"
        "  key    (length 5, batch 2, width 12)  float32 cpu\n"
        "  value  (length 7, batch 2, width 12)  float32 cpu\n"
        "  Each key needs one value."
    )


def test_the_way_to_the_weights():
    module = built(MultiheadAttention, WIDE, HEADS, batch_first=True)
    with pytest.raises(OptionError, match=r"attemper\.trace\(\*module\.project\("):
        module(X, need_weights=True)
    theirs = nn.MultiheadAttention(WIDE, HEADS, batch_first=True)
    theirs.load_state_dict(module.state_dict())
    x = draw(1, BATCH, QUERIES, WIDE, dtype=torch.float32)
    weights = trace(*module.project(x), scale=module.scale_value()).weights
    agree(weights, theirs(x, x, x, average_attn_weights=False)[1], tolerance=1e-5)
    with pytest.raises(OptionError, match="gives them"):
        AdditiveAttention(WIDE, HEADS)(X, need_weights=True)
