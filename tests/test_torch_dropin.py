"""scaled_dot_product_attention is torch's: the same numbers and gradients, the same refusals, and every difference."""

import contextlib
import copy
import inspect
import itertools
import math
import pickle
import platform
import random
import re
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from attemper import AttemperError, attend, scaled_dot_product_attention
from attemper.testing import compare
from attemper.testing._budget import EPSILON

fused = torch.nn.functional.scaled_dot_product_attention
DTYPES = {name: getattr(torch, name) for name in EPSILON}
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def plain(*operands, **keywords):
    """Torch's attention written out, whatever the shapes would choose."""
    with sdpa_kernel(SDPBackend.MATH):
        return fused(*operands, **keywords)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def floating(x):
    return x is not None and x.is_floating_point()


def differentiate(fn, operands, mask, keywords, upstream):
    """The output and the gradients to q, k, v and, where it is floating, the mask."""
    leaves = [x.detach().clone().requires_grad_() for x in (*operands, *([mask] if floating(mask) else []))]
    output = fn(*leaves[:3], attn_mask=leaves[3] if floating(mask) else mask, **keywords)
    # What an empty problem does not depend on has no gradient in torch and zeros in ours.
    grads = torch.autograd.grad(output, leaves, upstream.to(output.dtype), materialize_grads=True)
    return [output.detach(), *grads]


# The grid.

RANKS = (2, 3, 4, 5, "mixed")
GROUPS = list(itertools.product(DTYPES, RANKS, (False, True)))
CASES = 55
LENGTHS = {0: 1, 1: 2, 2: 4, 3: 4, 7: 4, 16: 4, 33: 4}  # and how often
DIMS = (1, 3, 8, 16)
MASKS = ("none", "bool", "padding", "rank 1", "float32 bias", "own bias", "bias with −inf", "hidden rows")


def draw(rng, dtype, rank, causal):
    """One problem that torch takes: (q, k, v), mask, keywords."""
    kind = "none" if causal else rng.choice(MASKS)
    queries, keys = rng.choices(list(LENGTHS), list(LENGTHS.values()), k=2)
    ranks = [rank] * 3 if rank != "mixed" else rng.choice(list(itertools.product((2, 3, 4, 5), repeat=3)))
    # Torch lets v broaden neither a mask nor an empty output, so there q is the broadest.
    broadest = 0 if kind != "none" or not (queries and keys) else rng.randrange(3)
    ranks = [max(ranks) if i == broadest else r for i, r in enumerate(ranks)]
    batch = [rng.choice((1, 2, 3)) for _ in range(max(ranks) - 3)]
    grouping = rng.choice(("off", "on", "one")) if min(ranks) > 2 else "off"
    kv_heads = {"off": rng.choice((1, 2, 3)), "on": rng.choice((2, 3)), "one": 1}[grouping]
    heads = kv_heads * (1 if grouping == "off" else rng.choice((2, 3)))

    def operand(i, own_heads, length, dim):
        own = [1 if i != broadest and rng.random() < 0.25 else n for n in batch]
        if grouping == "off" and i != broadest and rng.random() < 0.15:
            own_heads = 1
        return normal(*(*own, own_heads, length, dim)[-ranks[i] :], dtype=dtype)

    dim, value_dim = rng.choice(DIMS), rng.choice(DIMS)
    operands = operand(0, heads, queries, dim), operand(1, kv_heads, keys, dim), operand(2, kv_heads, keys, value_dim)
    mask = draw_mask(rng, kind, dtype, (*batch, heads, queries, keys)[-max(ranks) :])
    return (
        operands,
        mask,
        {
            "is_causal": causal,
            "scale": rng.choice((None, None, None, 0.3, 0.5, -0.4, 0)),
            "enable_gqa": grouping == "on" or (grouping == "one" and rng.random() < 0.5),
        },
    )


def draw_mask(rng, kind, dtype, shape):
    keys = shape[-1]
    if kind == "none":
        return None
    if kind == "rank 1":
        return torch.rand(keys) < 0.7
    if kind == "padding":
        lead = [1 if rng.random() < 0.25 else n for n in shape[:-3]]
        return torch.arange(keys) < torch.randint(1, keys + 2, (*lead, *(1 for _ in shape[-3:])))
    own = [1 if rng.random() < 0.2 else n for n in shape]
    own = own[rng.randrange(len(own) - 1) if rng.random() < 0.4 else 0 :]
    shown = torch.rand(own) < 0.7
    if kind == "hidden rows":
        shown &= torch.rand(*own[:-1], 1) < 0.5
    if kind == "bool" or (kind == "hidden rows" and rng.random() < 0.5):
        return shown
    bias = normal(*own, dtype=dtype)
    if kind == "float32 bias" or (kind != "own bias" and rng.random() < 0.3):
        bias = bias.float()
    return bias if kind.endswith(" bias") else bias.masked_fill(~shown, -INF)


def written_out(operands, mask, upstream, *, is_causal, scale, enable_gqa):
    """Output and gradients in NumPy's widest type, and the magnitudes of the terms that they are sums of."""
    q, k, v, upstream = (x.double().numpy().astype(np.longdouble) for x in (*operands, upstream))
    q_heads = q.shape[-3] if enable_gqa else 1
    wide_k, wide_v = (np.repeat(x, q_heads // x.shape[-3], -3) if enable_gqa else x for x in (k, v))
    scale = q.shape[-1] ** np.longdouble(-0.5) if scale is None else scale
    scores = q @ np.swapaxes(wide_k, -1, -2) * scale
    if mask is not None:
        bias = mask.double().numpy() if floating(mask) else np.where(mask.numpy(), 0, -INF)
        scores = scores + bias
    if is_causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -INF)
    top = scores.max(-1, keepdims=True, initial=-INF)
    weights = np.exp(scores - np.where(top == -INF, 0, top))
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)

    def terms(q, k, v, upstream, scale, sign):
        grad_weights = upstream @ np.swapaxes(v, -1, -2)
        grad_scores = weights * (grad_weights + sign * (weights * grad_weights).sum(-1, keepdims=True))
        turned = np.swapaxes(grad_scores, -1, -2)
        found = (grad_scores @ k * scale, turned @ q * scale, np.swapaxes(weights, -1, -2) @ upstream, grad_scores)
        shapes = [x.shape for x in operands] + ([mask.shape] if floating(mask) else [])
        return [weights @ v, *(_sum_to(x, shape, enable_gqa) for x, shape in zip(found, shapes, strict=False))]

    exact = terms(q, wide_k, wide_v, upstream, scale, -1)
    sizes = terms(*(np.abs(x) for x in (q, wide_k, wide_v, upstream)), abs(scale), 1)
    return exact, [float(x.max(initial=0)) for x in sizes]


def _sum_to(x, shape, grouped):
    if grouped and len(shape) > 2 and 1 < shape[-3] < x.shape[-3]:
        x = x.reshape(*x.shape[:-3], shape[-3], x.shape[-3] // shape[-3], *x.shape[-2:]).sum(-3)
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True).reshape(shape)


def budget(name, dtype, size, mask, auto):
    """(dtype, magnitude, allowance) of a comparison."""
    if name == "output":
        # Of the size of what is added up: with one column and few rows torch's own error may be 0 by luck.
        return dtype, size if dtype in ("float32", "float64") else 0.0, 1
    if name == "mask":
        # The gradient has the mask's dtype, but is made from the operands'.
        dtype = max(dtype, str(mask.dtype).removeprefix("torch."), key=EPSILON.__getitem__)
        if dtype == "bfloat16" and auto == "cpu":
            # ⟨dO, O⟩ is of an output whose weights were rounded to bfloat16, so that less cancels.
            return dtype, size / 4, 1
    if dtype in ("float16", "bfloat16"):
        # What cancels does so in float32, before it is rounded.
        return dtype, size * 4 * EPSILON["float32"] / EPSILON[dtype], 1
    # Sums over up to hundreds of rows, in another order than torch's: twice the budget.
    return dtype, size, 2


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: f"{g[0]}, rank {g[1]}{', causal' if g[2] else ''}")
def test_grid(group, auto):
    """Output and gradients of every case are within the error budget of torch's own."""
    dtype, rank, causal = group
    rng = random.Random(GROUPS.index(group))
    torch.manual_seed(GROUPS.index(group))
    cases = settled = comparisons = 0
    while cases < CASES:
        operands, mask, keywords = draw(rng, DTYPES[dtype], rank, causal)
        wide = [x.double() for x in operands], mask.double() if floating(mask) else mask, keywords
        upstream = normal(*plain(*wide[0], attn_mask=wide[1], **keywords).shape, dtype=DTYPES[dtype])
        exact, sizes = written_out(operands, mask, upstream, **keywords)
        largest = [float(np.abs(x).max(initial=0)) for x in exact]
        if any(1e-12 * size < n < 4 * EPSILON[dtype] * size for n, size in zip(largest, sizes, strict=True)):
            continue  # a gradient that cancels until nothing is left of it in this dtype: any answer would be right
        truth = [x.numpy() for x in differentiate(plain, *wide, upstream)]
        if dtype == "float64":
            truth = exact  # torch's own is no wider than what it would judge
        theirs = differentiate(plain, operands, mask, keywords, upstream)
        ours = differentiate(scaled_dot_product_attention, operands, mask, keywords, upstream)
        names = ("output", "q", "k", "v", "mask")
        for name, actual, reference, peer, size, n in zip(names, ours, truth, theirs, sizes, largest, strict=False):
            what = f"{name} of {[tuple(x.shape) for x in operands]}, mask {mask if mask is None else mask.shape}, "
            what += str(keywords)
            assert actual.dtype == peer.dtype, what
            coarse, magnitude, allowance = budget(name, dtype, size, mask, auto)
            comparison = compare(actual, reference, peer, dtype=coarse, magnitude=magnitude, allowance=allowance)
            if n <= 1e-12 * size:
                # Zeros are right: nothing is seen, or nothing can shift (one key, scale 0). With nothing to cancel
                # (size 0) the bound is 0 too.
                settled += 1
                assert comparison.error <= comparison.budget, f"{what}: {comparison}"
            else:
                assert comparison.ok, f"{what}: {comparison}"
            comparisons += 1
        again = attend(*operands, attn_mask=mask, **keywords, stats="none")
        assert again.reading.backend == ("cpu" if auto == "cpu" else "torch")
        assert torch.equal(again.output, ours[0])
        cases += 1
    assert settled < comparisons / 2, (settled, comparisons)


def test_the_grid_is_large():
    assert len(GROUPS) == 40
    assert len(GROUPS) * CASES >= 2000


# What both refuse.

Q, K, V = normal(1, 2, 3, 4), normal(1, 2, 3, 4), normal(1, 2, 3, 4)
TRIANGLE = torch.ones(3, 3).tril().bool()


def call(*operands, **keywords):
    return operands or (Q, K, V), keywords


BAD = {
    "rank 0": call(*[torch.tensor(1.0)] * 3),
    "rank 1": call(*[normal(4)] * 3),
    "a key of rank 1": call(Q, normal(4), V),
    "head_dim differs": call(Q, normal(1, 2, 3, 5), V),
    "head_dim 1 does not broadcast": call(Q, normal(1, 2, 3, 1), V),
    "more keys than values": call(Q, normal(1, 2, 4, 4), V),
    "one value does not broadcast": call(Q, K, normal(1, 2, 1, 4)),
    "heads differ": call(Q, normal(1, 3, 3, 4), normal(1, 3, 3, 4)),
    "groups without enable_gqa": call(normal(1, 4, 3, 4), K, V),
    "heads that do not divide": call(normal(1, 4, 3, 4), *[normal(1, 3, 3, 4)] * 2, enable_gqa=True),
    "more key heads than query heads": call(Q, *[normal(1, 4, 3, 4)] * 2, enable_gqa=True),
    "batch differs": call(normal(2, 2, 3, 4), *[normal(3, 2, 3, 4)] * 2),
    "integer mask": call(attn_mask=TRIANGLE.long()),
    "uint8 mask": call(attn_mask=TRIANGLE.byte()),
    "complex mask": call(attn_mask=TRIANGLE.to(torch.complex64)),
    "float8 mask": call(attn_mask=TRIANGLE.to(torch.float8_e4m3fn)),
    "mask of other lengths": call(attn_mask=torch.ones(3, 4).bool()),
    "mask of more heads": call(attn_mask=torch.ones(3, 3, 3).bool()),
    "mask of more axes": call(attn_mask=torch.ones(1, 1, 2, 3, 3).bool()),
    "mask that is a list": call(attn_mask=TRIANGLE.tolist()),
    "mask from NumPy": call(attn_mask=TRIANGLE.numpy()),
    "mask that is a bool": call(attn_mask=True),
    "sparse mask": call(attn_mask=TRIANGLE.float().to_sparse()),
    "mask and is_causal": call(attn_mask=TRIANGLE, is_causal=True),
    "k of another dtype": call(Q, K.double(), V),
    "v of another dtype": call(Q, K, V.half()),
    "integers": call(*[Q.long()] * 3),
    "booleans": call(*[Q.bool()] * 3),
    "complex numbers": call(*[Q.to(torch.complex64)] * 3),
    "float8": call(*[Q.to(torch.float8_e4m3fn)] * 3),
    "k on another device": call(Q, K.to("meta"), V),
    "a list": call(Q.tolist(), K, V),
    "q from NumPy": call(Q.numpy(), K, V),
    "no v": call(Q, K, None),
    "sparse q": call(Q.to_sparse(), K, V),
    "dropout_p 1.5": call(dropout_p=1.5),
    "dropout_p None": call(dropout_p=None),
    "is_causal 1": call(is_causal=1),
    "is_causal None": call(is_causal=None),
    "is_causal tensor": call(is_causal=torch.tensor(True)),
    "enable_gqa 1": call(enable_gqa=1),
    "complex scale": call(scale=1j),
    "scale that is no float": call(scale=10**400),
    "scale with an axis": call(scale=torch.tensor([0.5])),
}


@pytest.mark.parametrize("name", BAD)
def test_both_refuse(name):
    operands, keywords = BAD[name]
    with pytest.raises((RuntimeError, TypeError, ValueError, IndexError, OverflowError)):
        plain(*operands, **keywords)
    with pytest.raises(AttemperError):
        scaled_dot_product_attention(*operands, **keywords)


# Where they differ. First what ours takes and torch does not, with a call of torch's that means the same.

VALUES = normal(2, 2, 3, 4)
EVERYWHERE = torch.rand(2, 1, 3, 3) < 0.7
TAKES_MORE = {
    "float64 bias": (plain, call(attn_mask=K[0, 0, :, :3].double()), call(attn_mask=K[0, 0, :, :3])),
    "float16 bias": (plain, call(attn_mask=K[0, 0, :, :3].half()), call(attn_mask=K[0, 0, :, :3].half().float())),
    "bfloat16 bias": (
        plain,
        call(attn_mask=K[0, 0, :, :3].bfloat16()),
        call(attn_mask=K[0, 0, :, :3].bfloat16().float()),
    ),
    "enable_gqa at rank 2": (plain, call(Q[0, 0], K[0, 0], V[0, 0], enable_gqa=True), call(Q[0, 0], K[0, 0], V[0, 0])),
    "enable_gqa with one query head": (plain, call(Q[:, :1], K, V, enable_gqa=True), call(Q[:, :1], K, V)),
    "mask along v's batch": (
        plain,
        call(Q, K, VALUES, attn_mask=EVERYWHERE),
        call(Q.expand(2, 2, 3, 4), K, VALUES, attn_mask=EVERYWHERE),
    ),
    "mask with a heads axis at rank 2": (
        plain,
        call(Q[0, 0], K[0, 0], V[0, 0], attn_mask=TRIANGLE[None]),
        call(Q[0, 0], K[0, 0], V[0, 0], attn_mask=TRIANGLE),
    ),
    "scale that learns": (plain, call(scale=torch.tensor(0.3, requires_grad=True)), call(scale=0.3)),
    "scale by name": (plain, call(scale="unscaled"), call(scale=1.0)),
    "scale per head": (plain, call(scale=[0.3, 0.3]), call(scale=0.3)),
    "scale of rank 0 from NumPy": (plain, call(scale=np.array(0.3)), call(scale=0.3)),
    # Here torch's written-out form agrees with ours.
    "mask of rank 0": (fused, call(attn_mask=torch.tensor(True)), call()),
    "mask of rank 1": (fused, call(attn_mask=TRIANGLE[1]), call(attn_mask=TRIANGLE[1].expand(3, 3))),
}


@pytest.mark.parametrize("name", TAKES_MORE)
def test_ours_takes_what_torch_refuses(name):
    theirs, (operands, keywords), (same, meaning) = TAKES_MORE[name]
    with pytest.raises((RuntimeError, TypeError, IndexError)):
        theirs(*operands, **keywords)
    output = scaled_dot_product_attention(*operands, **keywords)
    wide = {key: x.double() if key == "attn_mask" and floating(x) else x for key, x in meaning.items()}
    truth = plain(*(x.double() for x in same), **wide).numpy()
    assert compare(output, truth, plain(*same, **meaning), dtype="float32").ok


UNRELATED = torch.ones(7, 7).bool()
TAKES_LESS = {
    "mask and is_causal": (fused, call(attn_mask=TRIANGLE.flip(1), is_causal=True)),
    "fewer keys than values": (fused, call(Q, K[:, :, :2], V)),
    "rank 6": (plain, call(Q[None, None], K[None, None], V[None, None])),
    "dropout_p 1": (plain, call(dropout_p=1.0)),
    "dropout_p True": (plain, call(dropout_p=True)),
    "dropout_p False": (plain, call(dropout_p=False)),
    "negative dropout_p": (plain, call(dropout_p=-0.1)),  # torch drops nothing
    "dropout_p NaN": (plain, call(dropout_p=NAN)),  # torch drops nothing
    "scale NaN": (plain, call(scale=NAN)),
    "scale inf": (plain, call(scale=INF)),
    "scale −inf": (plain, call(scale=-INF)),
    "scale True": (plain, call(scale=True)),
    "scale as an integer tensor": (plain, call(scale=torch.tensor(2))),
    "more value heads than key heads": (plain, call(*(normal(1, n, 3, 4) for n in (4, 2, 4)), enable_gqa=True)),
    "more key heads than value heads": (plain, call(*(normal(1, n, 3, 4) for n in (6, 6, 2)), enable_gqa=True)),
    # Of an empty problem torch checks nothing and returns zeros.
    "no keys, another mask": (plain, call(Q, K[:, :, :0], V[:, :, :0], attn_mask=UNRELATED)),
    "no queries, fewer values": (plain, call(Q[:, :, :0], K, V[:, :, :2])),
    "no queries, another head_dim": (plain, call(Q[:, :, :0], normal(1, 2, 3, 9), V)),
    "no queries, heads differ": (plain, call(Q[:, :, :0], *[normal(1, 3, 3, 4)] * 2)),
    "no queries, mask and is_causal": (plain, call(Q[:, :, :0], K, V, attn_mask=TRIANGLE[:0], is_causal=True)),
    "no key heads": (plain, call(Q, K[:, :0], V[:, :0])),
    "an empty batch beside a full one": (plain, call(normal(2, 2, 3, 4), K[:0], V[:0])),
}


# From torch 2.13 on, a problem without queries, keys or batch comes back as zeros before anything is checked.
LOOKS_AT_NOTHING = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def takes_both():
    """Whether this torch applies a mask and is_causal together, as versions did that do not refuse it yet."""
    try:
        fused(Q, K, V, attn_mask=TRIANGLE, is_causal=True)
    except RuntimeError as error:
        assert "is_causal" in str(error)  # noqa: PT017
        return False
    return True


@pytest.mark.parametrize("name", TAKES_LESS)
def test_ours_refuses_what_torch_takes(name):
    theirs, (operands, keywords) = TAKES_LESS[name]
    looks = LOOKS_AT_NOTHING or ("no " not in name and "empty" not in name)
    if looks and ("mask and is_causal" not in name or takes_both()):
        assert theirs(*operands, **keywords).shape[-1] == 4
    with pytest.raises(AttemperError):
        scaled_dot_product_attention(*operands, **keywords)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([normal(3, 2, 4), normal(5, 2, 4)], layout=torch.jagged).transpose(1, 2)
    assert plain(x, x, x).is_nested
    with pytest.raises(AttemperError, match="nested tensor"):
        scaled_dot_product_attention(x, x, x)


def test_fused_torch_applies_both_masks():
    mask = TRIANGLE.flip(0)
    ours = attend(Q, K, V, attn_mask=mask, is_causal=True).output
    if takes_both():
        torch.testing.assert_close(ours, fused(Q, K, V, attn_mask=mask, is_causal=True))
    torch.testing.assert_close(ours, plain(Q, K, V, attn_mask=mask & TRIANGLE))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere a division by zero does not end the process")
def test_torch_dies_of_no_key_heads():
    """Or says so, in later versions."""
    call = "sdpa(torch.ones(1, 2, 3, 4), torch.ones(1, 0, 3, 4), torch.ones(1, 2, 3, 4), enable_gqa=True)"
    code = f"import torch; sdpa = torch.nn.functional.scaled_dot_product_attention; {call}"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGFPE or "must be greater than 0" in done.stderr
    with pytest.raises(AttemperError, match="k has 0 heads"):
        scaled_dot_product_attention(Q, K[:, :0], V, enable_gqa=True)


def poisoned(x, index, value=NAN):
    x = x.clone()
    x[..., index, :] = value
    return x


HIDES = {
    "bool": {"attn_mask": torch.tensor([True, True, False]).expand(3, 3)},
    "bias": {"attn_mask": torch.tensor([0.5, 0.0, -INF]).expand(3, 3)},
    "causal": {"is_causal": True},
}


@pytest.mark.parametrize("value", [NAN, INF], ids=["NaN", "inf"])
@pytest.mark.parametrize("where", ["k", "v", "both"])
@pytest.mark.parametrize("how", HIDES)
def test_what_is_hidden_does_not_leak(how, where, value):
    """Torch's output or gradients are lost; ours are those of the problem without the hidden key."""
    q = Q[:, :, :2] if how == "causal" else Q  # causality hides the last key from two queries
    keywords = {"is_causal": False} | HIDES[how]
    mask = keywords.pop("attn_mask", None)
    operands = (q, poisoned(K, 2, value) if where != "v" else K, poisoned(V, 2, value) if where != "k" else V)
    upstream = normal(1, 2, q.shape[-2], 4)
    theirs = differentiate(plain, operands, mask, keywords, upstream)
    assert not all(x.isfinite().all() for x in theirs)
    ours = differentiate(scaled_dot_product_attention, operands, mask, keywords, upstream)
    short = q, K[:, :, :2], V[:, :, :2]
    shown = None if mask is None else mask[:, :2]
    wanted = differentiate(plain, short, shown, keywords, upstream)
    for actual, expected in zip(ours, wanted, strict=True):
        if actual.shape[-2] > expected.shape[-2]:  # k and v: the hidden one has no gradient
            assert not actual[..., 2, :].any()
            actual = actual[..., :2, :]
        if actual.shape[-1] > expected.shape[-1]:  # the bias
            assert not actual[..., 2].any()
            actual = actual[..., :2]
        torch.testing.assert_close(actual, expected)


def test_a_query_that_sees_nothing_does_not_leak():
    mask = torch.tensor([True, False, True])[:, None].expand(3, 3)
    operands, upstream = (poisoned(Q, 1), K, V), torch.ones(1, 2, 3, 4)
    assert plain(*operands, attn_mask=mask)[..., 1, :].isnan().all()
    ours = differentiate(scaled_dot_product_attention, operands, mask, {}, upstream)
    assert not ours[0][..., 1, :].any()
    assert all(x.isfinite().all() for x in ours)


def test_a_hidden_bias_does_not_leak(auto):
    """In attend, where a bias and causality combine."""
    bias = torch.zeros(3, 3).masked_fill(~TRIANGLE, NAN).requires_grad_()
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    if takes_both():
        assert fused(q, k, v, attn_mask=bias.detach(), is_causal=True).isnan().any()
    output, reading = attend(q, k, v, attn_mask=bias, is_causal=True)
    assert reading.backend == ("cpu" if auto == "cpu" else "torch")
    torch.testing.assert_close(output, plain(Q, K, V, is_causal=True))
    output.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, bias))


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scale_that_turns_minus_infinity_around(scale):
    """Torch's fused kernel multiplies hidden scores too: 0·(−inf) is NaN, and a negative scale makes them +inf."""
    assert fused(Q, K, V, is_causal=True, scale=scale).isnan().any()
    upstream, keywords = normal(1, 2, 3, 4), {"is_causal": True, "scale": scale}
    ours = differentiate(scaled_dot_product_attention, (Q, K, V), None, keywords, upstream)
    wanted = differentiate(plain, (Q, K, V), None, keywords, upstream)
    for actual, expected in zip(ours, wanted, strict=True):
        torch.testing.assert_close(actual, expected)


def test_empty_problems_broadcast():
    """Torch returns zeros of q's shape; ours have the shape that a key would give."""
    k = normal(5, 2, 0, 4)
    if not LOOKS_AT_NOTHING:
        pytest.skip("this torch broadcasts")
    assert plain(Q, k, k).shape == (1, 2, 3, 4)
    assert scaled_dot_product_attention(Q, k, k).shape == plain(Q, normal(5, 2, 1, 4), normal(5, 2, 1, 4)).shape
    assert plain(Q, K[:0], V[:0]).shape == (1, 2, 3, 4)
    assert scaled_dot_product_attention(Q, K[:0], V[:0]).shape == (0, 2, 3, 4)


def test_output_lies_in_memory_as_the_queries_do():
    """As torch's fused kernel has it: what follows attention often undoes the transposition without a copy."""
    for q in (Q, normal(1, 3, 2, 4).transpose(1, 2)):
        assert scaled_dot_product_attention(q, K, V).stride()[1:] == fused(q, K, V).stride()[1:]


def test_higher_derivatives_are_refused():
    def second(fn):
        q = Q.clone().requires_grad_()
        (grad,) = torch.autograd.grad(fn(q, K, V).square().sum(), q, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), q)[0]

    def forward(fn):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(fn(forward_ad.make_dual(Q, torch.ones_like(Q)), K, V)).tangent

    for derivative in (second, forward):
        assert derivative(plain).any()
        with pytest.raises((RuntimeError, NotImplementedError)):
            derivative(fused)
        with pytest.raises(AttemperError, match="backend='reference'"):
            derivative(scaled_dot_product_attention)


def test_vmap_with_dropout_of_its_own_per_entry_is_refused():
    def mapped(fn, randomness):
        return torch.func.vmap(lambda *x: fn(*x, dropout_p=0.5), randomness=randomness)(Q, K, V)

    assert mapped(plain, "different").shape == mapped(scaled_dot_product_attention, "same").shape
    with pytest.raises(AttemperError, match="seed"):
        mapped(scaled_dot_product_attention, "different")


def test_meta_tensors_have_shapes():
    q, k, v = (x.to("meta").requires_grad_() for x in (Q, K, V[..., :1]))
    for keywords in ({}, {"is_causal": True}, {"attn_mask": TRIANGLE.to("meta")}):
        output = scaled_dot_product_attention(q, k, v, **keywords)
        assert (output.device.type, output.shape) == ("meta", plain(q, k, v, **keywords).shape)
        output.sum().backward()
        assert q.grad.shape == q.shape


def test_nothing_else_differs():
    """Thousands of calls at random: where one of the two refuses, or shapes or values differ, it is for a reason above.

    Empty operands aside, of which torch checks nothing.
    """
    rng = random.Random(1)
    refused = (
        "rank 6|dropout_p is|v has \\d heads, but k has \\d heads",
        "Expected attn_mask dtype|Dimension out of range|must divide|output with shape .* doesn't match",
    )
    seen = {"both": 0, "neither": 0, "torch": 0, "ours": 0}

    def attempt(fn, operands, keywords):
        try:
            return fn(*operands, **keywords), None
        except AttemperError as error:
            return None, str(error).splitlines()[0]
        except (RuntimeError, IndexError) as error:
            if fn is not plain:
                raise
            return None, str(error).splitlines()[0]

    for _ in range(4000):
        dtype, rank = rng.choice(list(DTYPES.values())), rng.choice((1, 2, 3, 4, 4, 4, 5, 6))
        batch = [rng.choice((1, 2, 3)) for _ in range(rank - 3)]
        heads, queries, keys, dim = (rng.choice(n) for n in ((1, 2, 4, 6), (1, 2, 5), (1, 2, 5), (1, 3, 8)))
        kv_heads = heads if rng.random() < 0.5 else rng.choice((1, 2, 3))

        def often(value, *others):
            return value if rng.random() < 0.95 else rng.choice(others)

        def operand(*shape):
            own = [1 if rng.random() < 0.2 else often(n, 2, 3) for n in batch]  # noqa: B023
            drawn = rank if rng.random() < 0.85 else max(1, rank - 1)  # noqa: B023
            return normal(*(*own, *shape)[-drawn:], dtype=often(dtype, *DTYPES.values()))  # noqa: B023

        operands = (
            operand(heads, queries, dim),
            operand(kv_heads, keys, often(dim, dim + 1)),
            operand(often(kv_heads, 2, 4), often(keys, keys + 1), 2),
        )
        mask = None
        if rng.random() < 0.6:
            own = [1 if rng.random() < 0.2 else often(n, n + 1) for n in (*batch, heads, queries, keys)]
            kinds = (torch.bool, torch.bool, dtype, dtype, torch.float32, torch.float64, torch.float16, torch.int64)
            mask = normal(*own[-rng.choice((1, 2, 2, 3, 4, 5)) :]).to(rng.choice(kinds))
        keywords = {
            "attn_mask": mask,
            "is_causal": mask is None and rng.random() < 0.5,
            "dropout_p": often(0.0, 1.0, 1.5, -0.1),
            "scale": rng.choice((None, 0.7, 0, -1.0)),
            "enable_gqa": rng.random() < 0.4,
        }
        theirs, their_reason = attempt(plain, operands, keywords)
        ours, our_reason = attempt(scaled_dot_product_attention, operands, keywords)
        what = f"{[(x.shape, x.dtype) for x in operands]} {keywords}: torch {their_reason}, ours {our_reason}"
        if theirs is not None and ours is not None:
            seen["both"] += 1
            assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype), what
            # A weight that is rounded to bfloat16 is off by half a unit, of values of about 2.
            close = {"rtol": 0.016, "atol": 2**-7} if ours.dtype == torch.bfloat16 else {}
            torch.testing.assert_close(ours, theirs, **close, msg=lambda text: f"{what}: {text}")  # noqa: B023
        elif theirs is not None:
            seen["torch"] += 1
            assert re.search(refused[0], our_reason), what
        elif ours is not None:
            seen["ours"] += 1
            assert re.search(refused[1], their_reason), what
        else:
            seen["neither"] += 1
    assert min(seen.values()) > 50, seen


# As a drop-in.


def test_signature():
    """Names, order and defaults of the documented ones, the last two by keyword only."""
    parameters = inspect.signature(scaled_dot_product_attention).parameters
    documented = re.match(r"scaled_dot_product_attention\((.*?)\)", fused.__doc__, re.DOTALL).group(1)
    assert [p.name for p in parameters.values()] == [part.split("=")[0].strip() for part in documented.split(",")]
    defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
    assert defaults == {
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    }
    assert [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY] == ["scale", "enable_gqa"]
    for fn in (fused, scaled_dot_product_attention):
        with pytest.raises(TypeError, match="positional arguments"):
            fn(Q, K, V, None, 0.0, False, 0.5)
        with pytest.raises(TypeError, match="unexpected keyword"):
            fn(Q, K, V, softmax_scale=1.0)
        assert torch.equal(fn(Q, K, V, None, 0.0, True), fn(query=Q, key=K, value=V, is_causal=True))
        assert torch.equal(fn(Q, K, V, TRIANGLE), fn(Q, K, V, attn_mask=TRIANGLE))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numpy_arrays_give_the_same_numbers(dtype):
    bias = normal(3, 3)
    calls = [
        ((Q, K, V), {}),
        ((Q, K, V), {"is_causal": True, "scale": -0.4}),
        ((Q, K, V), {"attn_mask": TRIANGLE}),
        ((Q, K, V), {"attn_mask": bias}),
        ((normal(2, 4, 5, 8), normal(1, 2, 7, 8), normal(2, 2, 7, 3)), {"enable_gqa": True}),
        ((Q[0, 0], K[0, 0], V[0, 0]), {}),
    ]
    for operands, keywords in calls:
        tensors = [x.to(DTYPES[dtype]) for x in operands]
        arrays = {key: x.numpy() if isinstance(x, torch.Tensor) else x for key, x in keywords.items()}
        ours = scaled_dot_product_attention(*(x.numpy() for x in tensors), **arrays)
        assert isinstance(ours, np.ndarray)
        assert ours.dtype.name == dtype
        wide = {key: x.double() if key == "attn_mask" and floating(x) else x for key, x in keywords.items()}
        truth = plain(*(x.double() for x in tensors), **wide).numpy()
        tiled = scaled_dot_product_attention(*tensors, **keywords)
        # In float64 torch's written-out form is the truth itself, so the other road sets the budget.
        for actual, peer in ((ours, tiled), (tiled, ours)):
            assert compare(actual, truth, [plain(*tensors, **keywords), peer], dtype=dtype).ok


def gradients(fn, *operands, upstream=None):
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    output = fn(*leaves)
    output.backward(torch.ones_like(output).cumsum(-1) if upstream is None else upstream)
    return [output.detach(), *(x.grad for x in leaves)]


def assert_identical(ours, wanted):
    assert len(ours) == len(wanted)
    for actual, expected in zip(ours, wanted, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=4)))
def test_gradients_go_where_they_are_asked_for(wanted):
    tensors = [x.clone().requires_grad_(need) for x, need in zip((Q, K, V, K[0, 0, :, :3]), wanted, strict=True)]
    output = scaled_dot_product_attention(*tensors)
    assert output.requires_grad == any(wanted)
    if any(wanted):
        output.square().sum().backward()
    full = [x.clone().requires_grad_() for x in (Q, K, V, K[0, 0, :, :3])]
    scaled_dot_product_attention(*full).square().sum().backward()
    for x, need, everything in zip(tensors, wanted, full, strict=True):
        assert torch.equal(x.grad, everything.grad) if need else x.grad is None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    q = Q.clone().requires_grad_()
    with context():
        output = scaled_dot_product_attention(q, K, V, is_causal=True)
        theirs = fused(q, K, V, is_causal=True)
    assert not output.requires_grad
    assert output.is_inference() == theirs.is_inference()
    torch.testing.assert_close(output, theirs)


def test_inference_tensors_are_taken():
    with torch.inference_mode():
        q, k, v = (x.clone() for x in (Q, K, V))
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v), fused(q, k, v))


LAYOUTS = {
    "transposed heads": lambda: [normal(2, 5, 3, 4).transpose(1, 2) for _ in range(3)],
    "transposed dims": lambda: [normal(2, 3, 4, 5).mT for _ in range(3)],
    "sliced": lambda: [normal(2, 3, 10, 8)[:, :, 1::2, ::2] for _ in range(3)],
    "one projection": lambda: list(normal(2, 5, 36).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)),
    "expanded": lambda: [normal(1, 3, 5, 4).expand(2, 3, 5, 4) for _ in range(3)],
    "stride 0 along the length": lambda: (
        [normal(2, 3, 1, 4).expand(2, 3, 5, 4) for _ in range(2)] + [normal(2, 3, 5, 4)]
    ),
    "stride 0 along the dims": lambda: [normal(2, 3, 5, 1).expand(2, 3, 5, 4) for _ in range(3)],
    "offset": lambda: [normal(4, 3, 5, 4)[2:] for _ in range(3)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    """Strides change nothing, in the inputs or in the gradient that comes in."""
    operands = LAYOUTS[layout]()
    upstreams = [
        torch.ones(()).expand(2, 3, 5, 4),
        normal(2, 5, 3, 4).transpose(1, 2),
        normal(2, 3, 1, 4).expand(2, 3, 5, 4),
    ]
    mask = (torch.rand(5, 2, 1, 5) < 0.7).permute(1, 2, 0, 3)
    for upstream in upstreams:
        for keywords in ({}, {"attn_mask": mask}):
            views = [x.detach().requires_grad_() for x in operands]
            output = scaled_dot_product_attention(*views, **keywords)
            found = torch.autograd.grad(output, views, upstream)
            dense = [x.detach().contiguous().requires_grad_() for x in operands]
            wanted = scaled_dot_product_attention(*dense, **keywords)
            torch.testing.assert_close(output, wanted)
            for actual, expected in zip(found, torch.autograd.grad(wanted, dense, upstream.contiguous()), strict=True):
                torch.testing.assert_close(actual, expected)


def test_gradients_through_views_of_one_leaf():
    """q, k and v cut from one projection, and one tensor as all three: the parts add up as in torch."""

    def cut(fn):
        return lambda x: fn(*x.unflatten(-1, (3, 2, 4)).permute(1, 2, 0, 3))

    def same(fn):
        return lambda x: fn(x, x, x, is_causal=True)

    for use, x in ((cut, normal(5, 24, dtype=torch.float64)), (same, normal(2, 5, 4, dtype=torch.float64))):
        for actual, expected in zip(
            gradients(use(scaled_dot_product_attention), x), gradients(use(plain), x), strict=True
        ):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
@pytest.mark.parametrize("given", ["float32", "float16", "float64", "several"])
def test_autocast(given, narrow):
    dtypes = ("float32", "float16", "bfloat16") if given == "several" else (given,) * 3
    operands = [x.clone().to(DTYPES[name]).requires_grad_() for x, name in zip((Q, K, V), dtypes, strict=True)]
    with torch.autocast("cpu", dtype=DTYPES[narrow]):
        output = scaled_dot_product_attention(*operands, is_causal=True)
        theirs = plain(*operands, is_causal=True)
    assert output.dtype == theirs.dtype == DTYPES["float64" if given == "float64" else narrow]
    rounded = [x.detach().to(output.dtype).double() for x in operands]
    truth = plain(*rounded, is_causal=True).numpy()
    assert compare(output, truth, theirs, dtype=str(output.dtype).removeprefix("torch.")).ok
    output.double().square().sum().backward()
    assert [x.grad.dtype for x in operands] == [x.dtype for x in operands]


def test_autocast_refuses_and_keeps():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for fn, error in ((plain, RuntimeError), (scaled_dot_product_attention, AttemperError)):
            with pytest.raises(error):
                fn(Q, K.double(), V)
        # Torch refuses a float64 bias, and rounds a float32 one; ours stays as it was given.
        with pytest.raises(RuntimeError):
            plain(Q, K, V, attn_mask=torch.zeros(3, 3, dtype=torch.float64))
        bias = torch.tensor([0.0, 1001.0, 1000.0])  # the same number in bfloat16
        v = torch.tensor([[0.0], [1.0], [0.0]])
        zeros = torch.zeros(3, 4)
        half = plain(zeros, zeros, v, attn_mask=bias)
        kept = scaled_dot_product_attention(zeros, zeros, v, attn_mask=bias)
    torch.testing.assert_close(half.float(), torch.full((3, 1), 0.5))
    torch.testing.assert_close(kept.float(), torch.full((3, 1), 1 / (1 + math.exp(-1))), atol=2**-8, rtol=0)


# Dropout.


def test_dropout_repeats_under_a_seed():
    q = normal(1, 4, 32, 8)

    def drawn(seed):
        torch.manual_seed(seed)
        return scaled_dot_product_attention(q, q, q, dropout_p=0.5), torch.rand(())

    first, after = drawn(3)
    again, after_again = drawn(3)
    assert torch.equal(first, again)
    assert torch.equal(after, after_again)
    assert not torch.equal(first, drawn(4)[0])
    # Two calls in a row drop different weights.
    torch.manual_seed(3)
    assert not torch.equal(*(scaled_dot_product_attention(q, q, q, dropout_p=0.5) for _ in range(2)))


def test_dropout_averages_out():
    q, k, v = (normal(2, 16, 8) for _ in range(3))
    undropped = scaled_dot_product_attention(q, k, v)
    draws = torch.stack([scaled_dot_product_attention(q, k, v, dropout_p=0.3) for _ in range(1000)])
    far = (draws.mean(0) - undropped).abs() / (draws.std(0) / math.sqrt(len(draws)))
    assert far.max() < 5  # standard errors, of 256 numbers
    assert draws.std(0).min() > 0.02


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"enable_gqa": True}], ids=str)
@pytest.mark.parametrize("tiled", ["cpu", "torch"])
def test_dropout_gradients(tiled, keywords):
    """Those of the explicit matrices with the same weights dropped."""
    shapes = ((2, 4, 9, 8), (2, 2 if "enable_gqa" in keywords else 4, 9, 8))
    q, k, v = normal(*shapes[0]), normal(*shapes[1]), normal(*shapes[1])

    def run(backend, dtype):
        def fn(*operands):
            output, reading = attend(*operands, dropout_p=0.4, seed=11, backend=backend, stats="none", **keywords)
            assert reading.backend == backend
            return output

        return gradients(fn, *(x.to(dtype) for x in (q, k, v)))

    ours, peer, truth = (run(tiled, torch.float32), run("reference", torch.float32), run("reference", torch.float64))
    for actual, reference, other in zip(ours, truth, peer, strict=True):
        magnitude = 2 * float(reference.abs().max())
        assert compare(actual, reference.numpy(), other, dtype="float32", magnitude=magnitude).ok


# Around autograd.


def transformed(context=contextlib.nullcontext, **keywords):
    def fn(*operands):
        with context():
            return scaled_dot_product_attention(*operands, **keywords)

    return fn


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant, dropout_p):
    """The recomputed pass drops the same weights, because its seed comes from the generator that is put back."""
    fn = transformed(is_causal=True, dropout_p=dropout_p)
    torch.manual_seed(5)
    wanted = gradients(fn, Q, K, V)
    torch.manual_seed(5)
    assert_identical(gradients(lambda *x: checkpoint(fn, *x, use_reentrant=use_reentrant), Q, K, V), wanted)


SAVING = {
    "clones": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x),
    "NumPy": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().numpy(), torch.from_numpy),
    "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(pin_memory=False),
}


@pytest.mark.parametrize("how", SAVING)
def test_saved_tensors_may_be_moved(how):
    for keywords in ({"is_causal": True}, {"attn_mask": TRIANGLE}, {"attn_mask": K[0, 0, :, :3]}):
        wanted = gradients(transformed(**keywords), Q, K, V)
        assert_identical(gradients(transformed(SAVING[how], **keywords), Q, K, V), wanted)


def test_deterministic_algorithms():
    wanted = gradients(transformed(is_causal=True), Q, K, V)
    torch.use_deterministic_algorithms(True)
    try:
        assert_identical(gradients(transformed(is_causal=True), Q, K, V), wanted)
        gradients(transformed(dropout_p=0.5), Q, K, V)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("stats", ["none", "all"])
def test_backward_twice(stats):
    """Also where the backward pass leaves something in the Reading."""
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    output = attend(q, k, v, is_causal=True, stats=stats).output
    first = torch.autograd.grad(output.square().sum(), (q, k, v), retain_graph=True)
    assert_identical(torch.autograd.grad(output.square().sum(), (q, k, v)), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output.square().sum(), (q, k, v))


def test_changing_an_operand_in_place_is_noticed():
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    inner = k * 1
    output = scaled_dot_product_attention(q, inner, v)
    inner.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_gradients_accumulate():
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    for _ in range(2):
        scaled_dot_product_attention(*leaves).square().sum().backward()
    once = [x.clone().requires_grad_() for x in (Q, K, V)]
    scaled_dot_product_attention(*once).square().sum().backward()
    assert_identical([x.grad for x in leaves], [2 * x.grad for x in once])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_readings_of_tensors_copy(how, backward):
    q = Q.clone().requires_grad_()
    output, reading = attend(q, K, V)
    if backward:
        output.square().sum().backward()
    twin = how(reading)
    assert (twin.backend, twin.shape) == (reading.backend, reading.shape)
    assert (twin.pressure is not None) == backward
    assert twin.to_dict() == reading.to_dict()
    assert twin.entropy.data_ptr() != reading.entropy.data_ptr()


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in DTYPES.values():
            gradients(transformed(is_causal=True), *(x.to(dtype) for x in (Q, K, V)))
