"""What pose remembers from call to call changes nothing but the time that a call takes."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attemper import AttemperError, _problem, attend, read
from attemper._attend import BACKENDS
from attemper._problem import _REMEMBERED, LONGEST, MOST, pose


@pytest.fixture(autouse=True)
def _nothing_remembered():
    _REMEMBERED.clear()


@pytest.fixture(params=["numpy", "torch"])
def operands(request):
    """q, k and v of some shape in either framework, the same numbers at every call."""

    def make(*shapes, dtype="float32"):
        draw = np.random.default_rng(0)
        arrays = [draw.standard_normal(shape).astype(dtype) for shape in shapes or [(1, 2, 5, 4)] * 3]
        return arrays if request.param == "numpy" else [torch.from_numpy(x) for x in arrays]

    return make


def parts(problem):
    """Everything in a Problem, in a form that compares."""

    def plain(x):
        if isinstance(x, (np.ndarray, torch.Tensor)):
            numbers = x.tolist() if isinstance(x, np.ndarray) else x.detach().tolist()
            strides = x.strides if isinstance(x, np.ndarray) else x.stride()
            return type(x), str(x.dtype), tuple(x.shape), strides, repr(numbers)
        return tuple(map(plain, x)) if isinstance(x, tuple) else (type(x), repr(x))

    return {field.name: plain(getattr(problem, field.name)) for field in dataclasses.fields(problem)}


def message(function):
    with pytest.raises(AttemperError) as caught:
        function()
    return type(caught.value), str(caught.value)


# --- the same Problem -------------------------------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "offset": {"is_causal": True, "query_offset": 2},
    "bottom-right": {"is_causal": True, "query_offset": "bottom-right"},
    "window": {"window": (2, None), "query_offset": -1},
    "rule": {"scale": "dk"},
    "number": {"scale": 0.3, "softcap": 20},
    "dropout": {"dropout_p": 0.25, "seed": 3},
}
SHAPES = {
    "all alike": [(1, 2, 5, 4)] * 3,
    "own lengths": [(2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 7, 3)],
    "broadcast": [(1, 6, 5, 4), (3, 1, 7, 4), (3, 1, 7, 4)],
    "ranks": [(5, 4), (2, 7, 4), (3, 1, 7, 4)],
    "one head": [(5, 4), (7, 4), (7, 4)],
    "rank 5": [(2, 3, 2, 5, 4), (1, 3, 2, 7, 4), (2, 1, 2, 7, 4)],
    "no keys": [(1, 2, 5, 4), (1, 2, 0, 4), (1, 2, 0, 4)],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_the_second_problem_is_the_first(operands, shapes, options, monkeypatch):
    first = parts(pose(*operands(*shapes), **options))
    # From memory, that is: nothing is checked again.
    monkeypatch.setattr(_problem, "_checked", None)
    assert parts(pose(*operands(*shapes), **options)) == first


def test_without_values(operands, monkeypatch):
    q, k, v = operands()
    with_values, without = parts(pose(q, k, v)), parts(pose(q, k, None))
    monkeypatch.setattr(_problem, "_checked", None)
    assert parts(pose(q, k, None)) == without
    assert parts(pose(q, k, v)) == with_values
    assert read(q, k).output_norm is None


ARRAYS = {
    "attn_mask": np.tri(5, dtype=bool),
    "query_offset": np.array([1]),
    "window": [1, 0],
    "key_lengths": np.array([3]),
    "cu_seqlens": np.array([0, 2, 5]),
    "scale": np.array([0.1, 0.2]),
    "sinks": np.array([0.5, 1.5], dtype=np.float32),
}


@pytest.mark.parametrize(("name", "value"), ARRAYS.items(), ids=ARRAYS)
def test_arrays_among_the_options_are_looked_at_every_time(operands, name, value):
    q, k, v = operands()
    options = {"is_causal": name == "query_offset"}
    plain = attend(q, k, v, **options).output
    if isinstance(q, torch.Tensor) and isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    _REMEMBERED.clear()
    wanted = parts(pose(q, k, v, **options, **{name: value}))
    assert not _REMEMBERED
    for _ in range(2):
        pose(q, k, v, **options)
        assert parts(pose(q, k, v, **options, **{name: value})) == wanted
        assert abs(attend(q, k, v, **options, **{name: value}).output - plain).max() > 1e-3


def test_grouped_heads(operands):
    shapes = [(1, 6, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4)]
    assert pose(*operands(*shapes), enable_gqa=True).group == 3
    refused = message(lambda: pose(*operands(*shapes)))
    assert pose(*operands(*shapes), enable_gqa=True).group == 3
    assert message(lambda: pose(*operands(*shapes))) == refused


def test_operands_that_lie_otherwise_in_memory(operands):
    q, k, v = operands()
    wanted = attend(q, k, v, is_causal=True).output
    turned = [x.swapaxes(1, 2) for x in operands(*[(1, 5, 2, 4)] * 3)]
    for x, own in zip(turned, (q, k, v), strict=True):
        x[...] = own
    assert pose(*turned, is_causal=True).q is turned[0]
    assert abs(attend(*turned, is_causal=True).output - wanted).max() < 1e-6


def test_a_parameter_is_a_tensor(monkeypatch):
    x = torch.randn(1, 2, 5, 4)
    pose(torch.nn.Parameter(x), x, x)
    monkeypatch.setattr(_problem, "_checked", None)
    weight = torch.nn.Parameter(x)
    assert pose(weight, x, x).q is weight


def test_another_dtype_is_another_problem(operands):
    for dtype in ("float32", "float64", "float16", "float32"):
        result = attend(*operands(dtype=dtype), softcap=1e100, is_causal=True)
        assert str(result.output.dtype).removeprefix("torch.") == dtype
        # A cap that means nothing in float32 means something in float64.
        assert pose(*operands(dtype=dtype), softcap=1e100).softcap == (1e100 if dtype == "float64" else None)


def test_byte_orders_are_dtypes():
    q, k, v = np.ones((3, 1, 2, 5, 4), dtype=">f4")
    native = np.ones((1, 2, 5, 4), dtype="<f4")
    assert pose(q, k, v).q.dtype == np.dtype(">f4")
    assert pose(native, native, native).q.dtype == np.dtype("<f4")


def test_minus_zero_is_another_scale(operands):
    signs = [math.copysign(1, pose(*operands(), scale=scale).scale) for scale in (0.0, -0.0, 0.0)]
    assert signs == [1, -1, 1]


def test_autocast_is_noticed():
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    for _ in range(2):
        assert attend(q, k, v).output.dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert attend(q, k, v).output.dtype == torch.bfloat16


# --- the same errors --------------------------------------------------------------------------------------------------

# An option that is right, and what equals it and is wrong.
CONFUSABLE = [
    ({"is_causal": True}, {"is_causal": 1}),
    ({"is_causal": False}, {"is_causal": 0.0}),
    ({"enable_gqa": False}, {"enable_gqa": 0}),
    ({"scale": 1.0}, {"scale": True}),
    ({"scale": 1}, {"scale": True}),
    ({"softcap": 1.0}, {"softcap": True}),
    ({"dropout_p": 0.0}, {"dropout_p": False}),
    ({"dropout_p": 0}, {"dropout_p": False}),
    ({"is_causal": True, "query_offset": 1}, {"is_causal": True, "query_offset": True}),
    ({"is_causal": True, "query_offset": 1}, {"is_causal": True, "query_offset": 1.0}),
    ({"window": (1, 0)}, {"window": (True, 0)}),
    ({"window": (1, 0)}, {"window": (1, 0.0)}),
    ({"window": (1, None)}, {"window": (1.0, None)}),
    ({"window": None}, {"window": ()}),
    ({"window": None}, {"window": (None,)}),
    ({"window": (None, None)}, {"window": (None, None, None)}),
    ({"window": (1, 1)}, {"window": 1}),
    ({"seed": 0}, {"seed": False}),
    ({"seed": 1}, {"seed": -1}),
    ({"scale": "dk"}, {"scale": "dK"}),
    ({"scale": 1.0}, {"scale": math.nan}),
]


@pytest.mark.parametrize(("right", "wrong"), CONFUSABLE, ids=str)
def test_what_equals_a_right_option_is_still_wrong(operands, right, wrong):
    fresh = message(lambda: attend(*operands(), **wrong))
    for _ in range(2):
        attend(*operands(), **right)
        assert message(lambda: attend(*operands(), **wrong)) == fresh


@pytest.mark.parametrize("kind", [np.bool_, np.float64, np.float32, np.int64, float, int, np.array, np.asarray])
def test_numbers_of_every_kind_stay_what_they_are(operands, kind):
    """Whatever kind of one was passed before, each is taken or refused as it is without a memory."""

    def outcome(options):
        try:
            return parts(pose(*operands(), **options))
        except AttemperError as error:
            return type(error), str(error)

    for name in ("is_causal", "query_offset", "scale", "softcap", "enable_gqa"):
        fresh = outcome({"window": (2, 0), name: kind(1)})
        for other in (True, 1, 1.0, np.int64(1), np.array(1)):
            outcome({"window": (2, 0), name: other})
            assert outcome({"window": (2, 0), name: kind(1)}) == fresh


WRONG = {
    "head_dim": [(1, 2, 5, 4), (1, 2, 5, 3), (1, 2, 5, 4)],
    "keys": [(1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 6, 4)],
    "batch": [(2, 2, 5, 4), (3, 2, 5, 4), (3, 2, 5, 4)],
    "heads": [(1, 4, 5, 4), (1, 3, 5, 4), (1, 3, 5, 4)],
    "rank": [(1, 1, 1, 2, 5, 4)] * 3,
}


@pytest.mark.parametrize("shapes", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_wrong_again(operands, shapes):
    fresh = message(lambda: attend(*operands(*shapes)))
    assert all(message(lambda: attend(*operands(*shapes))) == fresh for _ in range(2))
    assert not _REMEMBERED


def test_operands_that_do_not_go_together(operands):
    q, k, v = operands()
    attend(q, k, v)
    wide = operands(dtype="float64")[1]
    assert "but q is float32" in message(lambda: attend(q, wide, v))[1]
    with pytest.raises(AttemperError, match="v is None"):
        attend(q, k, None)
    with pytest.raises(AttemperError, match="q is a list"):
        attend(q.tolist(), k, None)
    other = torch.from_numpy(k) if isinstance(k, np.ndarray) else k.numpy()
    with pytest.raises(AttemperError, match="from one framework"):
        attend(q, other, v)


def test_arrays_that_only_look_alike():
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    attend(q, k, v)
    with pytest.raises(AttemperError, match="k is on meta"):
        attend(q, k.to("meta"), v)
    with pytest.raises(AttemperError, match="layout sparse_coo"):
        attend(q, k.to_sparse(), v)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a prototype
        nested = torch.nested.nested_tensor([k[0], k[0]])
    with pytest.raises(AttemperError, match="nested tensor"):
        attend(q, nested, v)
    with pytest.raises(AttemperError, match="dtype int32"):
        attend(*(x.to(torch.int32) for x in (q, k, v)))
    x = np.ones((5, 4))
    attend(x, x, x)
    with pytest.raises(AttemperError, match="masked array"):
        attend(x, np.ma.masked_array(x), x)


def test_subclasses_go_the_whole_way():
    class Numbers(np.ndarray):
        pass

    class Tensors(torch.Tensor):
        pass

    for x in (np.ones((5, 4)).view(Numbers), torch.ones(5, 4).as_subclass(Tensors)):
        attend(x, x, x)
        assert not _REMEMBERED


def test_on_a_gpu_positions_are_two_numbers():
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, LONGEST + 1, 8, device="cuda") for _ in range(3))
        problem = pose(q, k, v, is_causal=True)
        assert problem.rows is None
        assert problem.band == (-LONGEST - 1, 1)
        assert {bound.device.type for bound in problem.bounds} == {"cuda"}


# --- what is shared ---------------------------------------------------------------------------------------------------


def test_numpy_bounds_cannot_be_written():
    x = np.ones((1, 2, 5, 4))
    for lengths in (None, [3]):
        for bound in pose(x, x, x, is_causal=True, key_lengths=lengths).bounds:
            with pytest.raises(ValueError, match="read-only"):
                bound[0] = 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_backend_writes_into_tensors_of_bounds(backend):
    q, k, v = (torch.randn(2, 2, 70, 4, requires_grad=True) for _ in range(3))
    bounds = pose(q, k, v, is_causal=True).bounds
    before = [x.clone() for x in bounds]
    output, _ = attend(q, k, v, is_causal=True, backend=backend if backend != "numpy" else "torch")
    output.sum().backward()
    assert pose(q, k, v, is_causal=True).bounds is bounds
    assert all(torch.equal(x, y) and x._version == 0 for x, y in zip(bounds, before, strict=True))


def test_every_call_draws_its_own_seed(operands):
    shapes = [(1, 2, 16, 4)] * 3
    seeds = [int(pose(*operands(*shapes), dropout_p=0.5).seed) for _ in range(4)]
    assert len(set(seeds)) == 4
    outputs = [attend(*operands(*shapes), dropout_p=0.5).output for _ in range(2)]
    assert abs(outputs[0] - outputs[1]).max() > 0
    assert pose(*operands(*shapes), dropout_p=0.5, seed=9).seed == 9
    assert pose(*operands(*shapes), dropout_p=0.5, seed=8).seed == 8


def test_it_does_not_grow_for_ever(operands):
    for length in range(3 * MOST):
        attend(*operands(*[(length, 4)] * 3), stats="none")
        assert len(_REMEMBERED) <= MOST
    assert _REMEMBERED


def test_long_bounds_are_not_kept(operands):
    shapes = [(LONGEST + 1, 1)] * 3
    pose(*operands(*shapes), is_causal=True)
    assert not _REMEMBERED
    pose(*operands(*shapes))
    assert len(_REMEMBERED) == 1


# --- what torch does around a call ------------------------------------------------------------------------------------


def causal(*operands):
    return attend(*operands, is_causal=True).output


def around():
    """Every way to make tensors of bounds that are no good to a later call."""
    yield "inference", torch.inference_mode(), causal
    yield "vmap", None, lambda *x: torch.vmap(causal)(*(y[None] for y in x))
    yield "grad", None, lambda *x: torch.func.grad(lambda *y: causal(*y).sum())(*x)
    yield "default device", torch.device("meta"), causal
    yield "fake", FakeTensorMode(allow_non_fake_inputs=True), causal


@pytest.mark.parametrize(("mode", "function"), [pytest.param(*rest, id=name) for name, *rest in around()])
@pytest.mark.parametrize("known", [False, True])
def test_nothing_of_a_transform_stays(mode, function, known):
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    wanted = causal(q, k, v)
    if not known:
        _REMEMBERED.clear()
    if mode is None:
        function(q, k, v)
    else:
        with mode:
            function(q, k, v)
    for _ in range(2):
        output = causal(q, k, v)
        assert torch.equal(output, wanted)
        output.sum().backward()


def test_a_compiler_sees_the_whole_way():
    function = torch.compile(causal, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (5, 7, 11):
        q, k, v = torch.randn(3, 1, 2, length, 4)
        causal(q, k, v)
        assert torch.equal(function(q, k, v), causal(q, k, v))
