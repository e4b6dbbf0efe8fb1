"""Gradients on torch: the tiles say what finite differences, the explicit matrices and the definitions say.

Laws first; every law on the tiled roads (backends "torch" and "cpu"), and on the explicit one ("reference") where it
applies.
"""

import gc
import itertools
import math
import subprocess
import sys
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from attemper import Attended, attend, read, trace
from attemper._backends.torch import _tiles
from attemper._errors import BackendError, OptionError
from attemper._reading import DERIVED, MEASURED, Reading
from attemper.testing import compare

TILED = ("torch", "cpu")
ROADS = (*TILED, "reference")
tiled, roads = (pytest.mark.parametrize("road", names) for names in (TILED, ROADS))
fast = partial(gradcheck, fast_mode=True)
STATISTICS = ("logsumexp", "entropy", "expected_score", "collision")
INPUTS = ("q", "k", "v", "attn_mask", "scale", "sinks")


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def agree(one, two, what="", tolerance=1e-12):
    torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}")


@pytest.fixture
def small_tiles(monkeypatch):
    """Two queries by three keys, one key head at a time: tiny problems take several tiles, some of them skipped."""
    monkeypatch.setattr(_tiles, "_sizes", lambda q: (2, 3, 12))


# --- calls: every kind of mask, bare and with every optional input --------------------------------------------------

# 2 entries, 3 queries, 5 keys. Rows of the first see all, one and no key.
SHOWN = torch.tensor(
    [
        [[1, 1, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]],
        [[1, 0, 0, 1, 1], [0, 1, 1, 0, 1], [0, 1, 0, 0, 0]],
    ],
    dtype=torch.bool,
)[:, None]
KINDS = {
    "no mask": {},
    "bool": {"attn_mask": SHOWN},
    "causal": {"is_causal": True},
    "causal, offset 1": {"is_causal": True, "query_offset": 1},
    "causal, offset −1: a row sees nothing": {"is_causal": True, "query_offset": -1},
    "causal, an offset per entry": {"is_causal": True, "query_offset": torch.tensor([0, 2])},
    "causal, bottom-right": {"is_causal": True, "query_offset": "bottom-right"},
    "window": {"window": (1, 1), "query_offset": 1},
    "key lengths": {"key_lengths": [0, 4]},
    "packed": {"cu_seqlens": ([0, 1, 3], [0, 1, 5])},
    "packed, causal": {"cu_seqlens": ([0, 1, 3], [0, 1, 5]), "is_causal": True, "query_offset": "bottom-right"},
    "softcap": {"softcap": 1.5},
    "grouped heads": {"enable_gqa": True},
    "dropout": {"dropout_p": 0.4, "seed": 7},
    "all at once": {
        "is_causal": True,
        "query_offset": 1,
        "window": (2, None),
        "key_lengths": [3, 5],
        "softcap": 2.0,
        "enable_gqa": True,
        "dropout_p": 0.3,
        "seed": 11,
    },
}
kinds = pytest.mark.parametrize("kind", KINDS)
ladings = pytest.mark.parametrize("laden", [False, True], ids=["bare", "laden"])


def call(kind, laden, seed=0):
    """(leaves by name, options): bare is q, k and v; laden adds a bias, a scale per head and sinks."""
    options = dict(KINDS[kind])
    kv_heads = 2
    heads = 4 if "enable_gqa" in options else 2
    leaves = {
        "q": 1.5 * draw(seed, 2, heads, 3, 2),
        "k": draw(seed + 1, 2, kv_heads, 5, 2),
        "v": draw(seed + 2, 2, kv_heads, 5, 2),
    }
    if laden:
        if "attn_mask" not in options:
            leaves["attn_mask"] = draw(seed + 3, 2, 1, 3, 5)
        leaves["scale"] = 0.6 + 0.2 * torch.arange(heads, dtype=torch.float64)
        leaves["sinks"] = draw(seed + 4, heads)
    for leaf in leaves.values():
        leaf.requires_grad_()
    return leaves, options


def ran(road, leaves, options, **more):
    """The call, and that it took the road it was told."""
    given = {**leaves, **options, **more}
    attended = attend(given.pop("q"), given.pop("k"), given.pop("v"), **given, backend=road)
    assert attended.reading.backend == road
    return attended


def outcome(road, names, options, *leaves):
    """The output and the differentiable statistics; −inf of a row that sees nothing has no finite difference."""
    output, reading = ran(road, dict(zip(names, leaves, strict=True)), options, differentiable=True)
    return output, *(torch.where(reading.visible_keys > 0, getattr(reading, name), 0) for name in STATISTICS)


def loss_of(output, phase=0):
    """A loss that is no linear function of the output; without random numbers, which vmap would refuse."""
    factors = torch.cos(1.7 * torch.arange(output.numel(), dtype=torch.float64) + phase).reshape(output.shape)
    return (factors * torch.sin(2 * output)).sum() + output.square().sum()


def total_loss(attended):
    """One that the statistics are part of too."""
    output, reading = attended
    seen = reading.visible_keys > 0
    return loss_of(output) + sum(
        loss_of(torch.where(seen, getattr(reading, name), 0), 1 + i) for i, name in enumerate(STATISTICS)
    )


def gradients(road, leaves, options, loss=total_loss, **more):
    attended = ran(road, leaves, options, **{"differentiable": True, **more})
    found = torch.autograd.grad(loss(attended), list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, found, strict=True)), attended.reading


# --- finite differences ---------------------------------------------------------------------------------------------


@roads
@ladings
@kinds
def test_every_input_and_statistic_against_finite_differences(kind, laden, road):
    leaves, options = call(kind, laden)
    # Laden: every entry of every Jacobian. Bare: along random directions, as in all that follow.
    assert gradcheck(lambda *x: outcome(road, leaves, options, *x), tuple(leaves.values()), fast_mode=not laden)


@ladings
@kinds
def test_finite_differences_over_several_tiles(kind, laden, small_tiles):
    leaves, options = call(kind, laden)
    assert fast(lambda *x: outcome("torch", leaves, options, *x), tuple(leaves.values()))


@ladings
@kinds
def test_tiles_change_nothing(kind, laden, request):
    leaves, options = call(kind, laden)
    whole, whole_reading = gradients("torch", leaves, options)
    request.getfixturevalue("small_tiles")
    cut, cut_reading = gradients("torch", leaves, options)
    for name in whole:
        agree(cut[name], whole[name], name)
    for name in MEASURED:
        agree(getattr(cut_reading, name), getattr(whole_reading, name), name)


@tiled
@ladings
@kinds
def test_tiles_agree_with_explicit_matrices(kind, laden, road):
    leaves, options = call(kind, laden)
    explicit, _ = gradients("reference", leaves, options)
    for name, found in gradients(road, leaves, options)[0].items():
        agree(found, explicit[name], name)


@tiled
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "query_offset": "bottom-right"},
        {"window": (20, 3), "query_offset": 200},
        {"cu_seqlens": ([0, 40, 40, 140], [0, 300, 310, 600]), "is_causal": True},
        {"softcap": 3.0, "dropout_p": 0.2, "seed": 5, "is_causal": True, "query_offset": 400},
    ],
    ids=["full", "bottom-right", "window", "packed", "softcap and dropout"],
)
def test_tiles_of_the_real_size_agree_with_explicit_matrices(options, road):
    # 140 queries and 600 keys: more than one tile of 128 × 512 each way.
    leaves = {"q": draw(0, 4, 140, 8), "k": draw(1, 2, 600, 8), "v": draw(2, 2, 600, 5), "sinks": draw(3, 4)}
    leaves |= {"attn_mask": draw(4, 1, 140, 600)}
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    explicit, _ = gradients("reference", leaves, {**options, "enable_gqa": True})
    for name, found in gradients(road, leaves, {**options, "enable_gqa": True})[0].items():
        agree(found, explicit[name], name, 1e-10)


@roads
@pytest.mark.parametrize(
    "shape", [(2, 2, 3, 5), (1, 2, 3, 5), (2, 1, 3, 5), (2, 2, 1, 5), (2, 2, 3, 1), (3, 5), (5,), (1, 1), ()], ids=str
)
def test_a_bias_that_broadcasts(shape, road, small_tiles):
    leaves, _ = call("no mask", laden=False)
    leaves["attn_mask"] = draw(9, *shape).requires_grad_()
    options = {"is_causal": True, "query_offset": 2}
    assert fast(lambda *x: outcome(road, leaves, options, *x), tuple(leaves.values()))


@roads
def test_a_bias_that_hides(road, small_tiles):
    leaves, _ = call("no mask", laden=True)
    bias = torch.where(SHOWN, draw(9, 2, 1, 3, 5), -math.inf).requires_grad_()
    leaves["attn_mask"] = bias
    found, _ = gradients(road, leaves, {})
    assert (found["attn_mask"][~SHOWN] == 0).all()
    assert (found["attn_mask"][SHOWN.sum(-1, keepdim=True).expand(SHOWN.shape) > 1] != 0).any()
    del leaves["attn_mask"]
    explicit, _ = gradients(road, leaves, {"attn_mask": bias.detach()})
    for name, value in explicit.items():
        assert torch.isfinite(value).all()
        agree(found[name], value, name)
    assert fast(lambda *x: outcome(road, leaves, {"attn_mask": bias.detach()}, *x), tuple(leaves.values()))


@roads
@pytest.mark.parametrize("scale", [0.7, -0.7, 0.0, [0.5, -2.0]], ids=str)
def test_a_learned_scale(scale, road, small_tiles):
    leaves, _ = call("no mask", laden=False)
    leaves["scale"] = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    options = {"softcap": 2.0, "is_causal": True, "query_offset": 1}
    assert fast(lambda *x: outcome(road, leaves, options, *x), tuple(leaves.values()))


@roads
@pytest.mark.parametrize("name", INPUTS)
def test_each_input_alone_has_the_gradient_it_has_among_all(name, road):
    leaves, options = call("all at once", laden=True)
    together, together_reading = gradients(road, leaves, options)
    alone = {other: x.detach().requires_grad_(other == name) for other, x in leaves.items()}
    attended = ran(road, alone, options, differentiable=True)
    total_loss(attended).backward()
    agree(alone[name].grad, together[name], name)
    assert all(x.grad is None for other, x in alone.items() if other != name)
    if road != "reference":
        agree(attended.reading.pressure, together_reading.pressure, "pressure")
        agree(attended.reading.gradient_flow, together_reading.gradient_flow, "gradient_flow")


@roads
@pytest.mark.parametrize("kind", ["bool", "all at once"])
@pytest.mark.parametrize("name", ["output", *STATISTICS])
def test_each_output_alone(name, kind, road, small_tiles):
    leaves, options = call(kind, laden=True)
    place = ("output", *STATISTICS).index(name)
    assert fast(lambda *x: outcome(road, leaves, options, *x)[place], tuple(leaves.values()))


@roads
@ladings
@kinds
def test_read_against_finite_differences(kind, laden, road, small_tiles):
    leaves, options = call(kind, laden)
    del leaves["v"]

    def statistics(*x):
        given = {**dict(zip(leaves, x, strict=True)), **options}
        reading = read(given.pop("q"), given.pop("k"), **given, differentiable=True, backend=road)
        return tuple(torch.where(reading.visible_keys > 0, getattr(reading, name), 0) for name in STATISTICS)

    assert fast(statistics, tuple(leaves.values()))


@roads
def test_a_statistic_needs_no_other_to_be_asked_for(road):
    leaves, options = call("all at once", laden=True)
    for name in STATISTICS:
        full, _ = gradients(road, leaves, options, lambda a, n=name: getattr(a.reading, n)[..., 1:].sin().sum())
        own, reading = gradients(
            road, leaves, options, lambda a, n=name: getattr(a.reading, n)[..., 1:].sin().sum(), stats=name
        )
        assert [n for n in MEASURED if getattr(reading, n) is not None] == [name]
        for leaf in leaves:
            agree(own[leaf], full[leaf], f"{name} to {leaf}")


@roads
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_every_rank(rank, road, small_tiles):
    batch = (2, 1, 2)[: rank - 2] if rank > 2 else ()
    leaves = {"q": draw(0, *batch, 3, 2), "k": draw(1, *batch, 4, 2), "v": draw(2, *batch, 4, 1)}
    inputs = tuple(x.requires_grad_() for x in leaves.values())
    assert fast(lambda *x: outcome(road, leaves, {"is_causal": True, "query_offset": 1}, *x), inputs)


@roads
def test_operands_that_broadcast_and_are_not_contiguous(road, small_tiles):
    q, k, v = draw(0, 2, 3, 2, 2).transpose(1, 2), draw(1, 1, 2, 4, 2), draw(2, 2, 1, 1, 4).mT
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert fast(lambda *x: outcome(road, ("q", "k", "v"), {}, *x), inputs)


def test_empty_operands_have_gradients_of_their_shape():
    for road, (queries, keys) in itertools.product(ROADS, [(0, 3), (3, 0), (0, 0)]):
        leaves = {"q": draw(0, 2, queries, 2), "k": draw(1, 2, keys, 2), "v": draw(2, 2, keys, 2), "sinks": draw(3, 2)}
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        ran(road, leaves, {}).output.sum().backward()
        for name, leaf in leaves.items():
            assert leaf.grad is not None, (road, name)
            assert (leaf.grad == 0).all(), (road, name)


# --- derivatives of other kinds -------------------------------------------------------------------------------------


@ladings
@pytest.mark.parametrize("kind", ["no mask", "bool", "causal, offset −1: a row sees nothing", "softcap", "dropout"])
def test_the_explicit_road_takes_forward_mode_and_second_derivatives(kind, laden):
    leaves, options = call(kind, laden)
    inputs = tuple(leaves.values())

    def fn(*x):
        return outcome("reference", leaves, options, *x)

    # Along random directions: whole Hessians would take their time.
    assert fast(fn, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(fn, inputs, fast_mode=True)
    assert gradgradcheck(
        fn, inputs, fast_mode=True, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False
    )


def refused(what):
    return pytest.raises(BackendError, match=rf"(?s){what}.*backend='reference'")


def tensors_of_a_call():
    leaves, _ = call("no mask", laden=True)
    return {name: x.detach() for name, x in leaves.items()}


@tiled
@pytest.mark.parametrize("name", INPUTS)
def test_the_tiles_refuse_forward_mode(name, road):
    given = tensors_of_a_call()
    x = given.pop(name)

    def f(x):
        return ran(road, given, {name: x}).output

    with forward_ad.dual_level(), refused("Forward-mode"):
        f(forward_ad.make_dual(x, torch.ones_like(x)))
    with refused("Forward-mode"):
        jvp(f, (x,), (torch.ones_like(x),))
    with refused("Forward-mode"):
        jacfwd(f)(x)


@tiled
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_call_does_not_lose_a_tangent(backend, road):
    q = draw(0, 2, 3, 2)
    compiled = torch.compile(lambda x: attend(x, x, x, backend=road).output, backend=backend)
    with forward_ad.dual_level():
        agree(compiled(q), attend(q, q, q, backend=road).output)
        with refused("Forward-mode"):
            compiled(forward_ad.make_dual(q, torch.ones_like(q)))


@tiled
def test_the_tiles_refuse_forward_mode_of_read(road):
    q, k = draw(0, 2, 3, 2), draw(1, 2, 4, 2)
    with refused("Forward-mode"):
        jvp(lambda x: read(x, k, backend=road, differentiable=True).entropy, (q,), (q,))


@tiled
def test_forward_mode_around_tensors_without_a_tangent_is_no_concern(road):
    q, x = draw(0, 3, 2), draw(1, 3, 2)
    output = attend(q, q, q, backend=road).output
    agree(jvp(lambda x: x * attend(q, q, q, backend=road).output, (x,), (x,))[1], x * output)


@tiled
@pytest.mark.parametrize("name", INPUTS)
def test_the_tiles_refuse_a_second_derivative(name, road):
    given = tensors_of_a_call()
    x = given.pop(name).requires_grad_()
    (first,) = torch.autograd.grad(ran(road, given, {name: x}).output.square().sum(), x, create_graph=True)
    with refused("Second"):
        first.sum().backward()


NESTED = {
    "grad of grad": lambda f, x: grad(lambda y: grad(f)(y).sum())(x),
    "jacrev of jacrev": lambda f, x: jacrev(jacrev(f))(x),
    "grad of jvp": lambda f, x: grad(lambda y: jvp(f, (y,), (y,))[1])(x),
    "jvp of grad": lambda f, x: jvp(grad(f), (x,), (x,))[1],
    "hessian": lambda f, x: hessian(f)(x),
    "vmap of jvp": lambda f, x: vmap(lambda t: jvp(f, (x,), (t,))[1])(torch.stack([x, x])),
    "jvp of vmap": lambda f, x: jvp(lambda y: vmap(f)(torch.stack([y, y])).sum(), (x,), (x,))[1],
    "autograd's jvp": lambda f, x: torch.autograd.functional.jvp(f, x, x)[1],
    "autograd's hvp": lambda f, x: torch.autograd.functional.hvp(f, x, x)[1],
    "autograd's hessian": lambda f, x: torch.autograd.functional.hessian(f, x),
}


@tiled
@pytest.mark.parametrize("way", NESTED)
def test_the_tiles_refuse_however_it_is_asked(way, road):
    q, k = draw(0, 2, 3, 2), draw(1, 2, 4, 2)

    def f(road):
        return lambda x: attend(x, k, k, backend=road).output.sin().sum()

    with pytest.raises(BackendError, match=r"(?s)derivatives do not pass.*backend='reference'"):
        NESTED[way](f(road), q)
    assert NESTED[way](f("reference"), q).abs().max() > 1e-3


# --- pressure -------------------------------------------------------------------------------------------------------


@tiled
@ladings
@kinds
def test_pressure_is_the_derivative_to_the_log_of_the_scale(kind, laden, road):
    leaves, options = call(kind, laden)
    heads = leaves["q"].shape[1]
    scale = leaves.pop("scale", torch.full((heads,), 0.8, dtype=torch.float64)).detach().requires_grad_()
    attended = ran(road, leaves, options, scale=scale)
    loss_of(attended.output).backward()
    pressure = attended.reading.pressure
    assert pressure.shape == attended.output.shape[:-1]
    per_head = pressure.sum((0, 2))
    agree(per_head, scale.detach() * scale.grad, "scale · dL/dscale")
    step = 1e-5
    with torch.no_grad():
        for head in range(heads):
            apart = step * torch.eye(heads, dtype=torch.float64)[head]
            up, down = (loss_of(ran(road, leaves, options, scale=scale * torch.exp(x)).output) for x in (apart, -apart))
            agree(per_head[head], (up - down) / (2 * step), f"head {head}", 1e-7)
    assert per_head.abs().min() > 1e-4  # zeros would not do


@tiled
@pytest.mark.parametrize("kind", [kind for kind, options in KINDS.items() if "softcap" not in options])
def test_without_softcap_pressure_is_q_times_its_gradient(kind, road):
    leaves, options = call(kind, laden=True)
    attended = ran(road, leaves, options)
    loss_of(attended.output).backward()
    q = leaves["q"]
    agree(attended.reading.pressure, (q * q.grad).sum(-1).detach(), "⟨q, dL/dq⟩")


@tiled
def test_the_statistics_press_too(road):
    leaves, options = call("all at once", laden=True)
    scale = leaves["scale"]
    found, reading = gradients(road, leaves, options)
    agree(reading.pressure.sum((0, 2)), (scale * found["scale"]).detach(), "pressure")


@tiled
def test_pressure_of_read(road):
    q, k = draw(0, 2, 3, 2).requires_grad_(), draw(1, 2, 4, 2)
    reading = read(q, k, differentiable=True, backend=road)
    reading.entropy.square().sum().backward()
    agree(reading.pressure, (q * q.grad).sum(-1).detach(), "pressure")
    assert reading.gradient_flow.isnan().all()  # without values no gradient reached the weights


@tiled
@pytest.mark.parametrize("scale", [0.0, torch.zeros(()), torch.zeros(2)], ids=["number", "scalar tensor", "per head"])
def test_no_scale_no_pressure(scale, road):
    q, k, v = (draw(i, 2, 3, 2).requires_grad_() for i in range(3))
    output, reading = attend(q, k, v, scale=scale, softcap=3.0, backend=road)
    loss_of(output).backward()
    assert (reading.pressure == 0).all()
    agree(reading.gradient_flow, torch.ones(2, 3, dtype=torch.float64), "gradient_flow")
    assert not any(x.grad.isnan().any() for x in (q, k, v))


# --- gradient flow --------------------------------------------------------------------------------------------------


def flow_by_definition(leaves, options):
    """Var_p[dP] / Var[dP] over the visible keys, from explicit matrices and autograd."""
    given = {**leaves, **options}
    steps = trace(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    steps.weights.retain_grad()
    loss_of(steps.output).backward()
    visible = steps.masked > -math.inf
    d = torch.where(visible, steps.weights.grad, 0)
    p = steps.weights / steps.weights.sum(-1, keepdim=True)  # a sink's share is missing from the weights
    uniform = visible.double() / visible.sum(-1, keepdim=True)

    def variance(weights):
        return (weights * (d - (weights * d).sum(-1, keepdim=True)).square()).sum(-1)

    return torch.where(visible.sum(-1) > 1, variance(p) / variance(uniform), math.nan).detach()


@tiled
@ladings
@kinds
def test_gradient_flow_is_what_it_is_defined_as(kind, laden, road, small_tiles):
    leaves, options = call(kind, laden)
    attended = ran(road, leaves, options)
    loss_of(attended.output).backward()
    flow = attended.reading.gradient_flow
    agree(flow, flow_by_definition(leaves, options), "gradient_flow", 1e-9)
    assert torch.equal(flow.isnan(), attended.reading.visible_keys < 2)
    assert (flow[~flow.isnan()] > 0).all()


@tiled
def test_a_value_dropped_everywhere_leaves_nothing_to_share(road):
    # Two keys alike to the loss: no variance, hence no share of it.
    q, k, v = draw(0, 1, 2, 2).requires_grad_(), draw(1, 1, 2, 2), torch.ones(1, 2, 2, dtype=torch.float64)
    output, reading = attend(q, k, v, backend=road)
    output.sum().backward()
    assert reading.gradient_flow.isnan().all()
    assert not q.grad.isnan().any()


@tiled
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"sinks": torch.tensor([0.5, 2.0])}], ids=str)
def test_all_of_it_flows_through_uniform_weights(options, road):
    q, k, v = torch.zeros(2, 6, 3, requires_grad=True), draw(1, 2, 6, 3).float(), draw(2, 2, 6, 3).float()
    output, reading = attend(q, k, v, backend=road, **options)
    (output * draw(3, 2, 6, 3)).sum().backward()
    flow = reading.gradient_flow[reading.visible_keys > 1]
    agree(flow, torch.ones_like(flow), "gradient_flow", 1e-5)


@tiled
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_none_of_it_flows_through_saturated_weights(dtype, road):
    q, k, v = (draw(i, 3, 8, 4, dtype=dtype).requires_grad_() for i in range(3))
    output, reading = attend(q, k, v, scale=1e4, backend=road)
    (output.double() * draw(3, 3, 8, 4)).sum().backward()
    assert reading.gradient_flow.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # The centre of the weighted variance comes from an output that was rounded to the operands' dtype.
    assert reading.gradient_flow.abs().max() < max(1e-6, 4 * torch.finfo(dtype).eps ** 2)


@tiled
@pytest.mark.parametrize("sink", [20.0, 40.0, 1000.0])
def test_a_sink_that_takes_all_hides_no_flow(sink, road):
    # Defined by the weights without the sink, which are as they were.
    q, k, v, upstream = (draw(i, 2, 3, 2) for i in range(4))
    q.requires_grad_()
    flows = []
    for sinks in (torch.full((2,), -math.inf), torch.full((2,), sink)):
        output, reading = attend(q, k, v, sinks=sinks, backend=road)
        # Upstream gradients are the same whatever the output, however small that is.
        (output * upstream).sum().backward()
        flows.append(reading.gradient_flow)
    agree(flows[1], flows[0], "gradient_flow", 1e-6)


@tiled
def test_on_average_it_is_the_flow(road):
    # For normal dP the mean of Var_p/Var is the ratio of the means: (1 − Σp²) / (1 − 1/n).
    n, draws = 6, 4000
    q, k = 2 * draw(0, 1, 1, 3, 2), draw(1, 1, 1, n, 2)
    v = draw(2, draws, 1, n, 1).requires_grad_()
    output, reading = attend(q, k, v, backend=road)
    output.sum().backward()
    flow = reading.gradient_flow[:, 0] * (1 - 1 / n)
    error = (flow.mean(0) - reading.flow[0, 0]) / (flow.std(0) / math.sqrt(draws))
    assert error.abs().max() < 4
    assert reading.flow[0, 0].std() > 0.05  # not three times the same row


# --- what a backward pass leaves in the Reading -----------------------------------------------------------------------


def measured(reading):
    return reading.gradient_flow is not None, reading.pressure is not None


@tiled
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_filled_after_a_backward_pass_and_not_before(rank, road):
    shape = (2, 3, 2, 5, 3)[-rank:]
    q, k, v = (draw(i, *shape).requires_grad_() for i in range(3))
    output, reading = attend(q, k, v, backend=road)
    assert measured(reading) == (False, False)
    assert "pressure" not in repr(reading)
    assert "pressure" not in reading.to_dict()
    loss_of(output).backward()
    assert measured(reading) == (True, True)
    for found in (reading.gradient_flow, reading.pressure):
        assert found.shape == reading.entropy.shape == shape[:-1]
        assert not found.requires_grad
        assert found.isfinite().all()
    assert "pressure" in repr(reading)
    assert np.shape(reading.to_dict()["pressure"]) == shape[:-1]
    agree(reading.pressure, (q * q.grad).sum(-1).detach(), "pressure")


@tiled
@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ("all", (True, True)),
        ("none", (False, False)),
        ("entropy", (False, False)),
        (["entropy", "pressure"], (False, True)),
        ("gradient_flow", (True, False)),
        (["gradient_flow", "pressure"], (True, True)),
    ],
    ids=str,
)
def test_filled_when_asked_for(stats, expected, road):
    q = draw(0, 2, 3, 2).requires_grad_()
    output, reading = attend(q, q, q, stats=stats, backend=road)
    output.sum().backward()
    assert measured(reading) == expected


@tiled
@pytest.mark.parametrize("name", INPUTS)
def test_filled_whichever_input_needs_a_gradient(name, road):
    given = tensors_of_a_call()
    given[name].requires_grad_()
    output, reading = ran(road, given, {})
    loss_of(output).backward()
    assert measured(reading) == (True, True)
    full = tensors_of_a_call()
    full["q"].requires_grad_()
    loss_of(ran(road, full, {}).output).backward()
    agree(reading.pressure, (full["q"] * full["q"].grad).sum(-1).detach(), "pressure")


@tiled
def test_never_filled_without_gradients(road):
    q = draw(0, 2, 3, 2).requires_grad_()
    with torch.no_grad():
        assert measured(attend(q, q, q, backend=road).reading) == (False, False)
    assert measured(attend(q.detach(), q.detach(), q.detach(), backend=road).reading) == (False, False)


@tiled
@pytest.mark.parametrize("backward", [True, False])
def test_the_reading_outlives_the_graph_and_does_not_keep_it(backward, road):
    leaf, k, v = draw(0, 2, 3, 2).requires_grad_(), draw(1, 2, 4, 2), draw(2, 2, 4, 2)
    gc.collect()
    gc.disable()  # freed by count, not by the collector: nothing points in a circle
    try:
        q = 2 * leaf
        output, reading = attend(q, k, v, backend=road)
        inside, result = weakref.ref(q), weakref.ref(output)
        if backward:
            loss_of(output).backward()
        del q, output
        assert inside() is None
        assert result() is None
    finally:
        gc.enable()
    assert measured(reading) == (backward, backward)
    if backward:
        agree(reading.pressure, (leaf * leaf.grad).sum(-1).detach(), "pressure")


@tiled
def test_two_readings_do_not_mix(road):
    q, k, v = (draw(i, 2, 3, 2).requires_grad_() for i in range(3))
    one, two = attend(q, k, v, backend=road), attend(q, k, v, scale=2.0, backend=road)
    loss_of(two.output).backward()
    assert (measured(one.reading), measured(two.reading)) == ((False, False), (True, True))
    kept = two.reading.pressure.clone()
    loss_of(one.output).backward()
    assert torch.equal(two.reading.pressure, kept)
    assert not torch.equal(one.reading.pressure, kept)
    # In one graph, one after the other.
    first = attend(q, k, v, backend=road)
    second = attend(first.output, k, v, backend=road)
    to_q, to_first = torch.autograd.grad(loss_of(second.output), (q, first.output))
    agree(first.reading.pressure, (q * to_q).sum(-1).detach(), "first")
    agree(second.reading.pressure, (first.output * to_first).sum(-1).detach(), "second")


@tiled
def test_a_second_backward_pass_overwrites(road):
    q, k, v = (draw(i, 2, 3, 2).requires_grad_() for i in range(3))
    output, reading = attend(q, k, v, backend=road)
    loss = loss_of(output)
    loss.backward(retain_graph=True)
    once, flow = reading.pressure.clone(), reading.gradient_flow.clone()
    (3 * loss).backward()
    agree(reading.pressure, 3 * once, "pressure")
    agree(reading.gradient_flow, flow, "gradient_flow")


@tiled
def test_a_checkpointed_call_is_measured_too(road):
    # Activation checkpointing runs the call again; the Reading at hand is of the first run.
    q, k, v = (draw(i, 2, 3, 2).requires_grad_() for i in range(3))
    output, reading = checkpoint(lambda q, k, v: attend(q, k, v, backend=road), q, k, v, use_reentrant=False)
    loss_of(output).backward()
    assert measured(reading) == (True, True)
    agree(reading.pressure, (q * q.grad).sum(-1).detach(), "pressure")


@tiled
def test_a_call_whose_tensors_are_kept_elsewhere_is_measured_too(road):
    # As torch.autograd.graph.save_on_cpu does for those of a GPU: the backward pass gets copies.
    q, k, v = (draw(i, 2, 3, 2).requires_grad_() for i in range(3))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        output, reading = attend(q, k, v, backend=road)
    loss_of(output).backward()
    assert measured(reading) == (True, True)


# --- statistics in the loss -------------------------------------------------------------------------------------------


@roads
def test_readings_are_detached_unless_asked(road):
    q, k, v = (draw(i, 2, 3, 2).requires_grad_() for i in range(3))
    flowing = {*STATISTICS, *DERIVED}
    for differentiable in (False, True):
        output, reading = attend(q, k, v, differentiable=differentiable, backend=road)
        assert output.requires_grad
        for name in (*MEASURED, *DERIVED):
            value = getattr(reading, name)
            if value is not None:
                assert value.requires_grad == (differentiable and name in flowing), name
    assert not any(x.requires_grad for x in vars(read(q, k, backend=road)).values() if isinstance(x, torch.Tensor))


@roads
def test_derived_statistics_carry_gradients(road):
    leaves, options = call("bool", laden=True)

    def derived(*x):
        reading = ran(road, dict(zip(leaves, x, strict=True)), options, differentiable=True).reading
        choice = reading.visible_keys > 1
        return tuple(torch.where(choice, getattr(reading, name), 0) for name in DERIVED)

    assert fast(derived, tuple(leaves.values()))


@roads
def test_rows_with_nothing_to_say_add_nothing(road):
    # Upstream gradients that reach the rows that see no key, or one, are no excuse for a NaN.
    leaves, options = call("bool", laden=True)

    def loss(attended):
        return sum(getattr(attended.reading, name).sum() for name in (*STATISTICS, "flow", "effective_keys"))

    found, reading = gradients(road, leaves, options, loss)
    empty = (reading.visible_keys == 0)[..., None].expand(leaves["q"].shape)
    assert empty.any()
    assert (found["q"][empty] == 0).all()
    assert all(x.isfinite().all() for x in found.values())


@roads
def test_an_entropy_regulariser(road):
    leaves = [draw(i, 2, 4, 3).requires_grad_() for i in range(3)]
    output, reading = attend(*leaves, is_causal=True, differentiable=True, backend=road)
    found = torch.autograd.grad(-reading.entropy.mean() + output.sum(), leaves)
    q, k, v = leaves
    scores = (q @ k.mT / math.sqrt(3)).masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -1e300)
    p = scores.softmax(-1)
    entropy = -(p * torch.where(p > 0, p, 1).log()).sum(-1)
    expected = torch.autograd.grad(-entropy.mean() + (p @ v).sum(), leaves)
    for one, two in zip(found, expected, strict=True):
        agree(one, two, "gradient")


# --- narrow types -----------------------------------------------------------------------------------------------------


def textbook(leaves, options, scaled):
    """softmax(scale · q·kᵀ + bias)·v with a sink as one more key, every step in the operands' dtype."""
    q, k, v = (leaves[name] for name in ("q", "k", "v"))
    scale = options.get("scale", 1 / math.sqrt(q.shape[-1]))
    if scaled == "scores":
        s = (q @ k.mT) * scale
    else:
        root = math.sqrt(scale) if scaled == "q and k" else scale
        s = (q * root) @ (k * (scale / root)).mT
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if "attn_mask" in leaves:
        s = s + leaves["attn_mask"]
    if options.get("is_causal"):
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if "sinks" in leaves:
        s = torch.cat([s, leaves["sinks"][:, None, None].expand(*s.shape[:-1], 1)], -1)
    return s.softmax(-1)[..., : k.shape[-2]] @ v


NARROW = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "hot": ({}, {"scale": 4.0}),
    "softcap and bias": ({"attn_mask": draw(4, 2, 40, 40)}, {"softcap": 3.0}),
    "sinks": ({"sinks": torch.tensor([0.5, 3.0], dtype=torch.float64)}, {"is_causal": True}),
    "sinks that take almost all": ({"sinks": torch.tensor([12.0, 16.0], dtype=torch.float64)}, {}),
}


@roads
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", NARROW)
def test_gradients_keep_the_error_budget(case, dtype, road, monkeypatch):
    monkeypatch.setattr(_tiles, "_sizes", lambda q: (16, 16, 2**18))
    more, options = NARROW[case]
    narrow = {"q": draw(0, 2, 40, 16), "k": draw(1, 2, 40, 16), "v": draw(2, 2, 40, 16), **more}
    narrow = {name: x.to(getattr(torch, dtype)) for name, x in narrow.items()}
    upstream = draw(3, 2, 40, 16, dtype=getattr(torch, dtype))

    def derivatives(fn, wide):
        leaves = {name: x.to(wide, copy=True).requires_grad_() for name, x in narrow.items()}
        found = torch.autograd.grad(fn(leaves), list(leaves.values()), upstream.to(wide))
        return dict(zip(leaves, found, strict=True))

    own = getattr(torch, dtype)
    reference = derivatives(lambda x: textbook(x, options, "scores"), torch.float64)
    plains = [derivatives(lambda x, s=s: textbook(x, options, s), own) for s in ("scores", "q", "q and k")]
    # A sink's gradient adds up a rounding of every output of its head, most of which cancels.
    rounded = upstream.double() * textbook({name: x.double() for name, x in narrow.items()}, options, "scores")
    sizes = {"sinks": float(rounded.flatten(1).norm(dim=1).max())}
    for name, found in derivatives(lambda x: ran(road, x, options).output, own).items():
        assert found.dtype == own
        others, size = [plain[name] for plain in plains], sizes.get(name, 0.0)
        result = compare(found, reference[name].numpy(), others, dtype=dtype, magnitude=size)
        assert result.ok, f"{name}: {result}"


@tiled
def test_a_learned_scale_in_a_narrow_type_keeps_its_type(road):
    q = draw(0, 2, 3, 2, dtype=torch.bfloat16)
    for shape, dtype in itertools.product([(), (2,)], [torch.bfloat16, torch.float32, torch.float64]):
        scale = torch.full(shape, 0.5, dtype=dtype, requires_grad=True)
        attend(q, q, q, scale=scale, backend=road).output.float().square().sum().backward()
        assert (scale.grad.dtype, scale.grad.shape) == (dtype, shape)
        assert (scale.grad != 0).all()


# --- what is hidden stays hidden --------------------------------------------------------------------------------------

HIDING = {
    "bool mask": {"attn_mask": torch.arange(5) < 3},
    "bias of −inf": {"attn_mask": torch.where(torch.arange(5) < 3, 0.0, -math.inf).double()},
    "key lengths": {"key_lengths": [3, 3]},
    "causality": {"is_causal": True},
    "window": {"window": (None, 0)},
    "packed": {"cu_seqlens": ([0, 3, 3], [0, 3, 5])},
}


@roads
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("way", HIDING)
def test_nothing_leaks_from_hidden_keys(way, poison, road, small_tiles):
    # Keys 3 and 4 are hidden from all three queries.
    clean, _ = call("no mask", laden=False)
    clean["sinks"] = draw(5, 2).requires_grad_()
    clean["scale"] = torch.tensor(0.7, dtype=torch.float64).requires_grad_()
    dirty = {name: x.detach().clone() for name, x in clean.items()}
    dirty["k"][..., 3:, :] = poison
    dirty["v"][..., 3:, :] = poison
    dirty = {name: x.requires_grad_() for name, x in dirty.items()}
    options = {**HIDING[way], "softcap": 4.0}
    expected, expected_reading = gradients(road, clean, options)
    found, reading = gradients(road, dirty, options)
    for name in clean:
        agree(found[name], expected[name], name)
    for name in ("k", "v"):
        assert (found[name][..., 3:, :] == 0).all()
        assert (found[name][..., :3, :] != 0).any()
    if road != "reference":
        agree(reading.pressure, expected_reading.pressure, "pressure")
        agree(reading.gradient_flow, expected_reading.gradient_flow, "gradient_flow")


@roads
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
def test_nothing_leaks_from_a_hidden_bias(poison, road, small_tiles):
    clean, _ = call("no mask", laden=True)
    bias = clean["attn_mask"].detach().clone()
    bias[torch.ones(3, 5, dtype=torch.bool).triu(1).expand(bias.shape)] = poison
    dirty = {**clean, "attn_mask": bias.requires_grad_()}
    expected, _ = gradients(road, clean, {"is_causal": True})
    found, _ = gradients(road, dirty, {"is_causal": True})
    for name in clean:
        agree(found[name], expected[name], name)


@roads
@pytest.mark.parametrize("place", ["k", "v"])
def test_rows_that_do_not_see_a_nan_have_the_gradients_they_would_have(place, road, small_tiles):
    clean, _ = call("no mask", laden=False)
    dirty = {name: x.detach().clone() for name, x in clean.items()}
    dirty[place][..., 2, :] = math.nan  # the third query sees it
    dirty[place].requires_grad_()
    dirty["q"].requires_grad_()
    results = []
    for leaves in (clean, dirty):
        output = ran(road, leaves, {"is_causal": True}).output
        results.append(torch.autograd.grad(output.sin().sum(), leaves["q"])[0])
    agree(results[1][..., :2, :], results[0][..., :2, :], "q")
    assert results[1][..., 2, :].isnan().all()


@roads
def test_keys_that_no_row_with_a_nan_sees_have_the_gradients_they_would_have(road, small_tiles):
    clean, _ = call("no mask", laden=False)
    clean["sinks"] = draw(5, 2)
    dirty = {name: x.detach().clone() for name, x in clean.items()}
    dirty["k"][..., 3, :] = math.nan  # of the second sequence, which the third query is
    results = []
    for leaves in (clean, dirty):
        leaves["v"].requires_grad_()
        output = ran(road, leaves, {"cu_seqlens": ([0, 2, 3], [0, 3, 5])}).output
        # Explicit matrices add up all rows: they must not be handed a NaN from behind.
        loss = output.sum() if road == "reference" else output.sin().sum()
        results.append(torch.autograd.grad(loss, leaves["v"])[0])
    agree(results[1][..., :3, :], results[0][..., :3, :], "v")
    assert results[1][..., 3, :].isnan().all()


@roads
def test_a_sink_that_is_nan_shows_and_an_infinite_one_takes_all(road, small_tiles):
    for sink in (math.nan, math.inf):
        leaves, _ = call("no mask", laden=False)
        leaves["sinks"] = torch.tensor([0.5, sink], dtype=torch.float64, requires_grad=True)
        output, reading = ran(road, leaves, {})
        to_v, to_sinks = torch.autograd.grad(output.square().sum(), (leaves["v"], leaves["sinks"]))
        wanted = 0.0 if sink == math.inf else math.nan
        agree(output[:, 1], torch.full_like(output[:, 1], wanted))
        agree(reading.sink_mass[:, 1], torch.full_like(reading.sink_mass[:, 1], 1 + wanted))
        agree(reading.nonfinite[:, 1], torch.full_like(reading.nonfinite[:, 1], sink != math.inf))
        assert output[:, 0].isfinite().all()
        assert to_v[:, 0].isfinite().all()
        if sink != math.inf:
            assert to_v[:, 1].isnan().all()
            assert to_sinks[1].isnan()


@roads
def test_scores_far_below_zero_beside_hidden_keys(road):
    # e^(0 − s) of a hidden key would overflow.
    q = torch.tensor([[40.0], [40.0]], requires_grad=True)
    k = torch.tensor([[-10.0], [1.0]])
    reading = read(q, k, scale=1.0, is_causal=True, differentiable=True, backend=road)
    found = torch.autograd.grad((reading.logsumexp + reading.entropy).sum(), q)[0]
    agree(found, torch.tensor([[-10.0], [1.0]]))


@roads
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
def test_a_value_reaches_the_rows_that_see_it_as_what_it_is(poison, road, small_tiles):
    clean, _ = call("no mask", laden=False)
    dirty = {name: x.detach().clone() for name, x in clean.items()}
    dirty["v"][..., 2, 0] = poison  # the third query sees it
    output, expected = (ran(road, leaves, {"is_causal": True}).output for leaves in (dirty, clean))
    agree(output[..., :2, :], expected[..., :2, :])
    agree(output[..., 1:], expected[..., 1:])
    agree(output[..., 2, 0], torch.full_like(output[..., 2, 0], poison))
    dirty["v"][..., 1, 0] = -poison
    output = ran(road, dirty, {"is_causal": True}).output
    assert output[..., 2, 0].isnan().all()
    agree(output[..., 1, 0], torch.full_like(output[..., 1, 0], -poison))


@roads
def test_rows_that_see_nothing_have_no_gradient(road, small_tiles):
    leaves, _ = call("no mask", laden=True)
    shown = SHOWN & (torch.arange(3) > 0)[:, None]
    bias = leaves.pop("attn_mask")
    for mask in (shown, torch.where(shown, bias.detach(), -math.inf)):
        found, reading = gradients(road, leaves, {"attn_mask": mask})
        nothing = (reading.visible_keys == 0)[..., None].expand(found["q"].shape)
        assert nothing.sum() == 12  # 3 rows of 6, 2 heads, head_dim 2
        assert (found["q"][nothing] == 0).all()
        assert all(x.isfinite().all() for x in found.values())
        if road != "reference":
            assert (reading.pressure[reading.visible_keys == 0] == 0).all()
    found, reading = gradients(road, leaves, {"attn_mask": torch.zeros(5, dtype=torch.bool)})
    assert all((x == 0).all() for x in found.values())


# --- torch.func -------------------------------------------------------------------------------------------------------


def entries(reading, i):
    return {name: getattr(reading, name)[i] for name in MEASURED if getattr(reading, name) is not None}


VMAPPED = {  # name: (arguments, their vmapped axes)
    "all operands": ({}, {"q": 0, "k": 0, "v": 0}),
    "queries only": ({}, {"q": 0}),
    "keys and values": ({}, {"k": 0, "v": 0}),
    "other axes": ({}, {"q": 1, "k": 2, "v": 3}),
    "bool mask": ({"attn_mask": draw(5, 4, 3, 5) > -0.5}, {"q": 0, "attn_mask": 0}),
    "bias of each, operands shared": ({"attn_mask": draw(5, 3, 4, 5)}, {"attn_mask": 1}),
    "bias shared": ({"attn_mask": draw(5, 1, 5)}, {"q": 0, "k": 0, "v": 0}),
    "sinks": ({"sinks": draw(6, 4, 2)}, {"q": 0, "sinks": 0}),
    "sinks, other axis": ({"sinks": draw(6, 2, 4)}, {"sinks": 1}),
    "scale": ({"scale": draw(7, 4)}, {"q": 0, "scale": 0}),
    "scale per head": ({"scale": draw(7, 2, 4)}, {"k": 1, "scale": 1}),
    "key lengths": ({"key_lengths": torch.tensor([0, 2, 5, 3])}, {"q": 0, "key_lengths": 0}),
    "offsets": ({"query_offset": torch.tensor([0, 2, -1, 3]), "is_causal": True}, {"query_offset": 0}),
    "causal window": ({"is_causal": True, "window": (1, None), "query_offset": 1}, {"q": 0, "k": 0}),
}


@roads
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("case", VMAPPED)
def test_vmap_is_a_loop(case, rank, road, small_tiles):
    more, axes = VMAPPED[case]
    given = {"q": draw(0, 2, 3, 2), "k": draw(1, 2, 5, 2), "v": draw(2, 2, 5, 2), **more}
    if rank == 4:
        given = {name: torch.stack([x, x + 1]) if name in "qkv" else x for name, x in given.items()}
        if "key_lengths" in more or torch.is_tensor(more.get("query_offset")):
            name = "key_lengths" if "key_lengths" in more else "query_offset"
            given[name] = torch.stack([given[name], given[name].flip(0)], 1)
    for name in set(axes) & {"q", "k", "v"}:
        given[name] = torch.stack([given[name] * (1 + 0.3 * i) for i in range(4)], axes[name])
    names = [name for name, x in given.items() if isinstance(x, torch.Tensor)]
    options = {name: x for name, x in given.items() if name not in names}
    found = vmap(
        lambda *x: ran(road, dict(zip(names, x, strict=True)), options), in_dims=tuple(axes.get(n) for n in names)
    )(*(given[name] for name in names))
    assert isinstance(found, Attended)
    assert isinstance(found.reading, Reading)
    assert found.reading.backend == road
    for i in range(4):
        own = {name: given[name].select(axes[name], i) if name in axes else given[name] for name in names}
        expected = ran(road, own, options)
        agree(found.output[i], expected.output, "output")
        for name, value in entries(found.reading, i).items():
            agree(value, getattr(expected.reading, name), name)


@roads
@pytest.mark.parametrize("axis", range(5))
def test_gradients_of_vmap_where_one_head_of_keys_serves_all(axis, road):
    leaves = [draw(i, 2, heads, n, 2) for i, (heads, n) in enumerate([(2, 3), (1, 5), (1, 5)])]
    leaves = [torch.stack([x, 1.3 * x, x - 1], axis).requires_grad_() for x in leaves]

    def f(q, k, v):
        return attend(q, k, v, backend=road).output

    found = torch.autograd.grad(loss_of(vmap(f, in_dims=axis)(*leaves)), leaves)
    one_by_one = torch.stack([f(*(x.select(axis, i) for x in leaves)) for i in range(3)])
    agree(found, torch.autograd.grad(loss_of(one_by_one), leaves))


@roads
def test_vmap_of_vmap(road):
    q, k = draw(0, 3, 2, 2, 4, 2), draw(1, 3, 2, 5, 2)
    found = vmap(vmap(lambda q, k: ran(road, {"q": q, "k": k, "v": k}, {}), (0, None)))(q, k)
    for i, j in itertools.product(range(3), range(2)):
        expected = ran(road, {"q": q[i, j], "k": k[i], "v": k[i]}, {})
        agree(found.output[i, j], expected.output, "output")
        agree(found.reading.entropy[i, j], expected.reading.entropy, "entropy")


@roads
def test_vmap_over_read(road):
    q, k = draw(0, 3, 2, 4, 2), draw(1, 2, 5, 2)
    found = vmap(lambda q: read(q, k, backend=road))(q)
    agree(found.entropy, read(q, k[None], backend=road).entropy, "entropy")


def per_sample_loss(road, options):
    def loss(leaves, q):
        attended = ran(road, {**leaves, "q": q}, options, differentiable=True)
        return total_loss(attended), attended.reading

    return loss


@roads
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("kind", ["no mask", "causal, offset −1: a row sees nothing", "softcap", "grouped heads"])
def test_per_sample_gradients_are_a_loop(kind, rank, road, small_tiles):
    leaves, options = call(kind, laden=True)
    leaves = {name: x.detach() for name, x in leaves.items()}
    if rank == 3:
        leaves = {name: x[0] if x.dim() == 4 else x for name, x in leaves.items()}
    elif rank == 4:
        leaves["attn_mask"] = leaves["attn_mask"][:1]  # shared along the batch: its gradient is summed there
    q = leaves.pop("q")
    samples = torch.stack([q, -q, 0.5 * q])
    derivative = grad(per_sample_loss(road, options), argnums=(0, 1), has_aux=True)
    (found, found_q), readings = vmap(derivative, (None, 0))(leaves, samples)
    for i, sample in enumerate(samples):
        own = {name: x.clone().requires_grad_() for name, x in {**leaves, "q": sample}.items()}
        expected, reading = gradients(road, own, options)
        agree(found_q[i], expected["q"], "q")
        for name in leaves:
            agree(found[name][i], expected[name], name)
        agree(readings.entropy[i], reading.entropy.detach(), "entropy")
        if road != "reference":
            agree(readings.pressure[i], reading.pressure, "pressure")
            agree(readings.gradient_flow[i], reading.gradient_flow, "gradient_flow")


@roads
@pytest.mark.parametrize("axis", range(5))
def test_a_backward_pass_through_vmap(axis, road):
    # The bias is shared along an entry's own batch axis and comes in along every axis.
    q = draw(0, 3, 2, 1, 3, 2).requires_grad_()
    bias = draw(1, 3, 1, 1, 3, 3).movedim(0, axis).requires_grad_()
    sinks, scale = draw(2, 1, 3).requires_grad_(), draw(3, 3).requires_grad_()

    def entry(q, bias, sinks, scale):
        return ran(road, {"q": q, "k": q, "v": q, "attn_mask": bias, "sinks": sinks, "scale": scale}, {}).output

    inputs = (q, bias, sinks, scale)
    found = torch.autograd.grad(loss_of(vmap(entry, (0, axis, 1, 0))(*inputs)), inputs)
    looped = torch.stack([entry(q[i], bias.select(axis, i), sinks[:, i], scale[i]) for i in range(3)])
    for one, two in zip(found, torch.autograd.grad(loss_of(looped), inputs), strict=True):
        agree(one, two)


@tiled
@pytest.mark.parametrize("kind", ["no mask", "bool", "causal", "grouped heads", "dropout", "all at once"])
def test_jacobians(kind, road):
    # Rows of a Jacobian are gradients with vmap over what comes from above alone.
    leaves, options = call(kind, laden=True)
    names, inputs = list(leaves), tuple(x.detach() for x in leaves.values())
    places = tuple(range(len(names)))

    def fn(road):
        return lambda *x: ran(road, dict(zip(names, x, strict=True)), options).output

    expected = torch.autograd.functional.jacobian(fn("reference"), inputs)
    for found in (
        jacrev(fn(road), places)(*inputs),
        torch.autograd.functional.jacobian(fn(road), inputs, vectorize=True),
        torch.autograd.functional.jacobian(fn(road), inputs),
    ):
        for name, one, two in zip(names, found, expected, strict=True):
            agree(one, two, name)


@tiled
def test_jacobians_of_each_sample(road):
    q, k = draw(0, 3, 2, 3, 2), draw(1, 2, 4, 2)

    def fn(road, **options):
        return lambda q: attend(q, k, k, backend=road, **options).output

    agree(vmap(jacrev(fn(road)))(q), torch.stack([jacrev(fn("reference"))(x) for x in q]))
    # With one seed the entries of vmap drop alike, as a loop over them would.
    own = torch.stack([jacrev(fn("reference", dropout_p=0.4, seed=3))(x) for x in q])
    agree(vmap(jacrev(fn(road, dropout_p=0.4, seed=3)))(q), own)


@roads
def test_vjp(road):
    q, k, v, upstream = (draw(i, 2, 4, 2) for i in range(4))
    output, back = vjp(lambda *x: attend(*x, backend=road).output, q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = attend(*leaves, backend="reference").output
    agree(output, expected.detach())
    for one, two in zip(back(upstream), torch.autograd.grad(expected, leaves, upstream), strict=True):
        agree(one, two)


@tiled
def test_vmap_with_dropout_takes_one_seed(road):
    q = draw(0, 4, 2, 3, 2)
    options = {"dropout_p": 0.4, "seed": 9, "backend": road}
    found = vmap(lambda x: attend(x, x, x, **options).output)(q)
    agree(found, torch.stack([attend(x, x, x, **options).output for x in q]))
    loss = vmap(grad(lambda x: loss_of(attend(x, x, x, **options).output)))(q)
    leaf = q.clone().requires_grad_()
    sum(loss_of(attend(x, x, x, **options).output) for x in leaf).backward()
    agree(loss, leaf.grad)


@tiled
@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_vmap_with_dropout_and_no_seed(randomness, road):
    q = draw(0, 4, 2, 3, 2)
    run = vmap(lambda x: attend(x, x, x, dropout_p=0.4, backend=road).output, randomness=randomness)
    if randomness == "same":
        torch.manual_seed(0)
        first = run(q)
        torch.manual_seed(0)
        assert torch.equal(run(q), first)
        assert not torch.equal(run(q), first)
    elif randomness == "different":
        with pytest.raises(OptionError, match="seed"):
            run(q)
    else:
        with pytest.raises((RuntimeError, OptionError), match="random"):
            run(q)


# --- memory -----------------------------------------------------------------------------------------------------------

MEASURE = r"""
import re, sys
import torch, attemper
torch.set_num_threads(1)
# The high-water mark of this process alone; getrusage's would start with that of the one that started it.
peak = lambda: int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) / 1024
def run(n, **options):
    q, k, v = (torch.randn(1, n, 64, requires_grad=True) for _ in range(3))
    output, reading = attemper.attend(q, k, v, backend=sys.argv[3], **options)
    output.square().sum().backward()
    assert torch.isfinite(q.grad).all() and reading.pressure.shape == (1, n)
run(64)  # what is loaded and allocated once
case, n = sys.argv[1], int(sys.argv[2])
before = peak()
if case == "matrix":
    torch.ones(n, n)  # what must not be built
else:
    run(n, **({"is_causal": True, "window": (256, None)} if case == "window" else {}))
print(peak() - before)
"""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def megabytes(case, n, road="torch"):
    command = [sys.executable, "-c", MEASURE, case, str(n), road]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@on_linux
@tiled
def test_memory_grows_with_n_forward_and_backward(road):
    short, middle, long = (megabytes("full", n, road) for n in (2048, 4096, 8192))
    # Four times as long: a square would take sixteen times as much.
    assert middle < 2 * short + 10
    assert long < 3 * short + 20
    assert long < 120


@on_linux
@tiled
def test_memory_of_a_window_does_too(road):
    # Operands, gradients and output are 8 MB each; the square would be 4 GB.
    assert megabytes("window", 32768, road) < 200


@on_linux
def test_the_measurement_sees_a_matrix():
    assert megabytes("matrix", 8192) > 250
