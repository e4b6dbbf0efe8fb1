"""The kernels for the CPU: their gradients, on every kind of processor, among threads and processes, and their cache.

What they compute forwards is in test_testing, test_laws and test_reading, beside the other backends; what small
problems can say of gradients is in test_torch_gradients. Here are problems of several tiles, and all that is the
kernels' own.
"""

import copy
import json
import math
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from attemper import BackendError, attend, on_progress, read
from attemper._backends.cpu import _code, _threads
from attemper._backends.cpu._target import PANELS, target
from attemper._reading import AFTER_BACKWARD, DERIVED, FIELDS, MEASURED
from attemper.testing import compare

FORWARD = [name for name in FIELDS if name not in AFTER_BACKWARD]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def threads():
    """Set the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@contextmanager
def at_work(many):
    """As many threads for the kernels; the other roads, with two on two busy cores, would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(many)
    try:
        assert _threads.threads() == many
        yield
    finally:
        torch.set_num_threads(before)


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


PEAK = r"""
def peak():
    # The high-water mark of this process alone; getrusage's would start with that of the one that started it.
    import pathlib, re
    return int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024
"""


def script(code, *arguments, timeout=300, **environment):
    """What a program of its own prints. A process that was killed or hangs fails the test."""
    command = [sys.executable, "-W", "error", "-c", PEAK + textwrap.dedent(code), *arguments]
    env = {**os.environ, **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --- gradients --------------------------------------------------------------------------------------------------------

# Tiles are of 128 keys, panels of up to 48 query rows, blocks of four of those.
BATCH, HEADS, QUERIES, KEYS, DIM = 2, 4, 70, 150, 16
SHOWN = draw(10, BATCH, HEADS, QUERIES, KEYS) > 0
SHOWN[0, 1, 5:9] = False
SHOWN[1, 2, :, :130] = False
LENGTHS = [0, 137]
STARTS = ([0, 30, 30, 70], [0, 20, 90, 150])


class Case:
    """A call: shapes, further leaves by name, options, and views to take of the leaves."""

    def __init__(
        self,
        *,
        batch=BATCH,
        heads=HEADS,
        kv_heads=HEADS,
        queries=QUERIES,
        keys=KEYS,
        dim=DIM,
        value_dim=None,
        more=None,
        views=None,
        **options,
    ):
        own = {"q": (batch, heads, queries, dim), "k": (batch, kv_heads, keys, dim)}
        own["v"] = (batch, kv_heads, keys, dim if value_dim is None else value_dim)
        views = views or {}
        # A view is (the shape of the leaf that it is one of, the view).
        self.leaves = {name: draw(i, *views.get(name, (shape,))[0]) for i, (name, shape) in enumerate(own.items())}
        self.leaves["q"] = self.leaves["q"] * 1.5
        self.leaves |= more or {}
        self.views = {name: view for name, (_, view) in views.items()}
        self.options = {"enable_gqa": heads != kv_heads, **options}

    def gradients(self, backend, dtype, *, differentiable=False):
        """Those of the output and, if wanted, of the fields through which gradients flow; with the output itself."""
        leaves = {name: x.to(dtype).requires_grad_() for name, x in self.leaves.items()}
        given = {name: self.views[name](x) if name in self.views else x for name, x in leaves.items()}
        given |= {
            name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for name, x in self.options.items()
        }
        q, k, v = (given.pop(name) for name in ("q", "k", "v"))
        output, reading = attend(q, k, v, **given, backend=backend, differentiable=differentiable)
        assert reading.backend == backend
        # The same upstream gradient whatever the output, and rounded to the type.
        loss = (output * draw(20, *output.shape).to(dtype)).sum()
        if differentiable:
            seen = reading.visible_keys > 0
            for i, name in enumerate(("logsumexp", "entropy", "expected_score", "collision")):
                loss = loss + (torch.where(seen, getattr(reading, name), 0) * draw(21 + i, *seen.shape)).sum()
        found = torch.autograd.grad(loss, list(leaves.values()))
        return {"output": output.detach(), **dict(zip(leaves, found, strict=True))}, reading


def leaf(seed, *shape):
    return draw(seed, *shape)


CASES = {
    "plain": Case(),
    "grouped heads": Case(kv_heads=2),
    "one key head": Case(kv_heads=1, is_causal=True),
    "causal": Case(is_causal=True),
    "causal, offset 60": Case(is_causal=True, query_offset=60),
    "causal, offset −20: rows that see nothing": Case(is_causal=True, query_offset=-20),
    "causal, an offset per entry": Case(is_causal=True, query_offset=torch.tensor([-3, 100])),
    "causal, bottom-right": Case(is_causal=True, query_offset="bottom-right"),
    "window": Case(window=(9, 3), query_offset=40),
    "window, one side": Case(window=(None, 2)),
    "key lengths": Case(key_lengths=LENGTHS),
    "packed": Case(cu_seqlens=STARTS, is_causal=True, query_offset="bottom-right"),
    "bool mask": Case(attn_mask=SHOWN),
    "bool mask, shared": Case(attn_mask=SHOWN[:1, 1:2], kv_heads=2),
    "bias": Case(more={"attn_mask": leaf(11, BATCH, HEADS, QUERIES, KEYS)}),
    "bias, heads share it": Case(more={"attn_mask": leaf(11, BATCH, 1, QUERIES, KEYS)}, kv_heads=2),
    "bias, entries share it": Case(more={"attn_mask": leaf(11, 1, HEADS, QUERIES, KEYS)}, is_causal=True),
    "bias, queries share it": Case(more={"attn_mask": leaf(11, BATCH, HEADS, 1, KEYS)}),
    # All keys move alike: only a sink can tell.
    "bias, keys share it": Case(more={"attn_mask": leaf(11, BATCH, HEADS, QUERIES, 1), "sinks": leaf(12, HEADS)}),
    "bias, all share it": Case(more={"attn_mask": leaf(11, QUERIES, KEYS)}, window=(100, 20)),
    "bias that hides": Case(attn_mask=torch.where(SHOWN, leaf(11, *SHOWN.shape), -math.inf)),
    "softcap": Case(softcap=1.5, is_causal=True, query_offset=10),
    "sinks": Case(more={"sinks": leaf(12, HEADS)}, is_causal=True),
    "sinks, one of them absent": Case(sinks=torch.tensor([0.5, -math.inf, 3.0, -2.0])),
    "dropout": Case(dropout_p=0.3, seed=5, is_causal=True, query_offset=50),
    "dropout, grouped heads": Case(dropout_p=0.6, seed=6, kv_heads=2),
    "a scale": Case(more={"scale": torch.tensor(0.4, dtype=torch.float64)}),
    "scale per head": Case(more={"scale": torch.tensor([0.1, 0.3, 1.1, -0.2], dtype=torch.float64)}, kv_heads=2),
    "scale 0": Case(more={"scale": torch.tensor([0.0, 0.3, 0.0, -0.2], dtype=torch.float64)}),
    "head_dim 1": Case(dim=1),
    "head_dim 3": Case(dim=3, is_causal=True),
    "head_dim 40": Case(dim=40),
    "head_dim 80": Case(dim=80, heads=2, kv_heads=1),
    "head_dim 96": Case(dim=96, heads=2, kv_heads=2),
    "value_dim 24": Case(value_dim=24, is_causal=True),
    "value_dim 1": Case(value_dim=1),
    "value_dim 150": Case(value_dim=150, dim=8, heads=2, kv_heads=2),
    "q and k seen through a transposition": Case(
        views={
            "q": ((BATCH, QUERIES, HEADS, DIM), lambda x: x.transpose(1, 2)),
            "k": ((BATCH, KEYS, HEADS, DIM), lambda x: x.transpose(1, 2)),
        },
        is_causal=True,
    ),
    "head_dim not last in memory": Case(
        views={
            "q": ((BATCH, HEADS, DIM, QUERIES), lambda x: x.mT),
            "k": ((BATCH, HEADS, DIM, KEYS), lambda x: x.mT),
            "v": ((BATCH, HEADS, DIM, KEYS), lambda x: x.mT),
        }
    ),
    "k and v that entries and heads share": Case(
        views={
            "k": ((1, 1, KEYS, DIM), lambda x: x.expand(BATCH, HEADS, KEYS, DIM)),
            "v": ((1, HEADS, KEYS, DIM), lambda x: x.expand(BATCH, HEADS, KEYS, DIM)),
        }
    ),
    "one query": Case(queries=1),
    "one query, grouped heads": Case(queries=1, heads=8, kv_heads=2, keys=300),
    "six queries": Case(queries=6, is_causal=True, query_offset="bottom-right"),
    "seven queries, grouped heads": Case(queries=7, kv_heads=2, dim=24),
    "one key": Case(keys=1, more={"sinks": leaf(12, HEADS)}),
    "several blocks of rows": Case(batch=1, heads=2, kv_heads=1, queries=210, keys=140, is_causal=True),
    "all at once": Case(
        kv_heads=2,
        more={
            "attn_mask": leaf(11, BATCH, 1, QUERIES, KEYS),
            "sinks": leaf(12, HEADS),
            "scale": torch.tensor([0.2, 0.3, 0.4, 0.1], dtype=torch.float64),
        },
        is_causal=True,
        query_offset=70,
        window=(60, None),
        key_lengths=[150, 99],
        softcap=3.0,
        dropout_p=0.2,
        seed=9,
        dim=40,
        value_dim=24,
    ),
}

# One head: the keys are shared out among threads, forwards and backwards.
SPLIT = {
    "plain": Case(batch=1, heads=1, kv_heads=1, keys=1100),
    "causal": Case(batch=1, heads=1, kv_heads=1, keys=1100, is_causal=True, query_offset="bottom-right"),
    "window": Case(batch=1, heads=1, kv_heads=1, keys=1100, window=(100, 30), query_offset=600),
    "a split of keys that nobody sees": Case(batch=1, heads=1, kv_heads=1, keys=1100, key_lengths=[300]),
    "grouped heads": Case(batch=1, heads=3, kv_heads=1, keys=1100),
    "grouped heads, few queries": Case(batch=1, heads=3, kv_heads=1, queries=20, keys=1500, dim=40),
    "bias": Case(batch=1, heads=1, kv_heads=1, keys=1100, more={"attn_mask": leaf(11, QUERIES, 1100)}),
    "bias, heads share it": Case(batch=1, heads=3, kv_heads=3, keys=1100, more={"attn_mask": leaf(11, QUERIES, 1100)}),
    "bias, keys share it": Case(
        batch=1, heads=1, kv_heads=1, keys=1100, more={"attn_mask": leaf(11, QUERIES, 1), "sinks": leaf(12, 1)}
    ),
    "bool mask, sinks, softcap": Case(
        batch=1,
        heads=1,
        kv_heads=1,
        keys=1100,
        attn_mask=draw(10, QUERIES, 1100) > 0.3,
        more={"sinks": leaf(12, 1)},
        softcap=2.0,
    ),
    "dropout": Case(batch=1, heads=1, kv_heads=1, keys=1100, dropout_p=0.4, seed=3),
    "a scale": Case(batch=1, heads=1, kv_heads=1, keys=1100, more={"scale": torch.tensor(0.4, dtype=torch.float64)}),
    "one query": Case(batch=1, heads=1, kv_heads=1, queries=1, keys=40000, dim=32),
    "three heads on two threads": Case(batch=1, heads=3, kv_heads=3, keys=1100),
}

NARROW = ("plain", "grouped heads", "causal", "bias", "softcap", "sinks", "dropout", "scale per head", "head_dim 40")


def assert_right(case, name, *, differentiable=False, many=1):
    """The gradients of the kernels in one type are those of explicit matrices in float64, as far as the type allows."""
    dtype = getattr(torch, name)
    truth, _ = case.gradients("reference", torch.float64, differentiable=differentiable)
    with at_work(many):
        found, _ = case.gradients("cpu", dtype, differentiable=differentiable)
    plains = [case.gradients(road, dtype, differentiable=differentiable)[0] for road in ("reference", "torch")]
    for leaf_name, wanted in truth.items():
        assert found[leaf_name].dtype == dtype
        peers = [plain[leaf_name] for plain in plains]
        result = compare(found[leaf_name], wanted.numpy(), peers, dtype=name, allowance=ALLOWANCE[name])
        assert result.ok, f"{leaf_name}: {result}"


# Sums over hundreds of keys and rows, in another order than that of either peer. And in bfloat16 the peers compute in
# float32 where kernels for pairs round the weights.
ALLOWANCE = {"float64": 4, "float32": 4, "float16": 2, "bfloat16": 4}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    assert_right(CASES[name], "float32")


@pytest.mark.parametrize("name", CASES)
def test_gradients_in_float64(name):
    assert_right(CASES[name], "float64")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NARROW)
def test_gradients_in_sixteen_bits(name, dtype):
    assert_right(CASES[name], dtype)


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_where_threads_share_the_keys(name, dtype):
    assert_right(SPLIT[name], dtype, many=2)


@pytest.mark.parametrize("name", ["plain", "causal, offset −20: rows that see nothing", "bool mask", "all at once"])
def test_gradients_of_fields(name):
    assert_right(CASES[name], "float32", differentiable=True)


def test_gradients_of_fields_where_threads_share_the_keys():
    assert_right(SPLIT["bool mask, sinks, softcap"], "float32", differentiable=True, many=2)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["plain", "key lengths", "bool mask", "all at once"])
def test_gradients_of_read(name, dtype):
    case = CASES[name]

    def run(backend, dtype):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in case.leaves.items() if name not in ("v", "sinks")}
        given = {**leaves, **case.options}
        reading = read(given.pop("q"), given.pop("k"), **given, backend=backend, differentiable=True)
        assert reading.backend == backend
        seen = reading.visible_keys > 0
        fields = [torch.where(seen, x, 0) for x in (reading.logsumexp, reading.entropy, reading.flow)]
        loss = sum((x * draw(21 + i, *seen.shape)).sum() for i, x in enumerate(fields))
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    own = getattr(torch, dtype)
    truth, found, peer = run("reference", torch.float64), run("cpu", own), run("reference", own)
    for leaf_name, wanted in truth.items():
        result = compare(found[leaf_name], wanted.numpy(), peer[leaf_name], dtype=dtype, allowance=8)
        assert result.ok, f"{leaf_name}: {result}"


@pytest.mark.parametrize("name", CASES)
def test_what_a_backward_pass_measures(name):
    _, found = CASES[name].gradients("cpu", torch.float64)
    _, wanted = CASES[name].gradients("torch", torch.float64)
    for field in AFTER_BACKWARD:
        one, two = getattr(found, field), getattr(wanted, field)
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10, equal_nan=True, msg=lambda m, f=field: f"{f}: {m}")
    assert (wanted.pressure != 0).any() or name == "one key"


@pytest.mark.parametrize("name", SPLIT)
def test_what_a_backward_pass_measures_where_threads_share_the_keys(name):
    with at_work(2):
        _, found = SPLIT[name].gradients("cpu", torch.float64)
    _, wanted = SPLIT[name].gradients("torch", torch.float64)
    for field in AFTER_BACKWARD:
        one, two = getattr(found, field), getattr(wanted, field)
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10, equal_nan=True, msg=lambda m, f=field: f"{f}: {m}")
    assert (wanted.pressure != 0).any()


def test_the_comparison_can_fail():
    case = CASES["plain"]
    truth, _ = case.gradients("reference", torch.float64)
    plain, _ = case.gradients("reference", torch.float32)
    for name, wanted in truth.items():
        for wrong in (wanted * (1 + 1e-4), wanted.roll(1, -2), torch.zeros_like(wanted)):
            assert not compare(wrong.float(), wanted.numpy(), plain[name], dtype="float32", allowance=4).ok


@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 3, 0), (0, 3, 3), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("heads", [0, 2])
def test_gradients_of_nothing(shape, heads):
    batch, queries, keys = shape
    q, k, v = (torch.ones(batch, heads, n, 4, requires_grad=True) for n in (queries, keys, keys))
    output, reading = attend(q, k, v, backend="cpu")
    output.sum().backward()
    assert reading.backend == "cpu"
    for x in (q, k, v):
        assert x.grad.shape == x.shape
        assert not x.grad.any()


# --- one query and many keys ------------------------------------------------------------------------------------------


def assert_same_call(found, wanted, plain, dtype):
    """Output and all fields, within the error budget; `plain` is the call by another road in the same type."""
    calls = (found, wanted, plain)
    fields = {"output": [np.asarray(call.output, dtype=np.float64) for call in calls]}
    fields |= {n: [np.asarray(getattr(call.reading, n), dtype=np.float64) for call in calls] for n in FORWARD}
    # A score is rounded at its own size, and the exponential makes that a relative error.
    score = float(np.abs(fields["max_logit"][1]).max())
    for name, (one, two, peer) in fields.items():
        if not two.any() or name in ("visible_keys", "nonfinite"):
            np.testing.assert_array_equal(one, two, err_msg=name)
            continue
        size = max(1.0, score) * float(np.abs(two).max())
        result = compare(one, two, peer, dtype=dtype, allowance=4, magnitude=size)
        assert result.ok, f"{name}: {result}"


@pytest.mark.parametrize("many", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 2), (8, 1), (6, 6)])
@pytest.mark.parametrize(
    "options", [{}, {"window": (3000, None), "query_offset": "bottom-right"}, {"softcap": 3.0}], ids=str
)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_few_queries_and_many_keys(many, heads, kv_heads, options, queries, dtype):
    rng = np.random.default_rng(0)
    q = 2 * rng.standard_normal((2, heads, queries, 64))
    k, v = rng.standard_normal((2, 2, kv_heads, 5000, 64))
    narrow = [x.astype(dtype) for x in (q, k, v)]
    options = {**options, "enable_gqa": True}
    with at_work(many):
        found = attend(*narrow, **options, backend="cpu")
    assert found.reading.backend == "cpu"
    wanted = attend(*(x.astype(np.float64) for x in narrow), **options, backend="reference")
    assert_same_call(found, wanted, attend(*narrow, **options, backend="numpy"), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("many", [1, 2])
def test_few_queries_and_many_keys_in_sixteen_bits(dtype, many, threads):
    threads(many)
    own = getattr(torch, dtype)
    q, k, v = (draw(i, 1, *shape, 64, dtype=own) for i, shape in enumerate([(8, 1), (2, 5000), (2, 5000)]))
    found = attend(q, k, v, enable_gqa=True, backend="cpu")
    wanted = attend(q.double(), k.double(), v.double(), enable_gqa=True, backend="reference")
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert compare(found.output, wanted.output.numpy(), plain, dtype=dtype).ok
    # Fields are made in float32 from products that are exact in it.
    for name in ("entropy", "logsumexp", "score_std", "collision"):
        one, two = getattr(found.reading, name), getattr(wanted.reading, name)
        torch.testing.assert_close(one.double(), two.double(), rtol=1e-4, atol=0)


def test_more_keys_than_float32_counts():
    # Beyond 2²⁴ not every whole number is a float32.
    keys = 2**24 + 3
    k = np.zeros((keys, 1), dtype=np.float32)
    reading = read(np.ones((1, 1), dtype=np.float32), k, stats=("visible_keys", "logsumexp"), backend="cpu")
    assert reading.visible_keys.tolist() == [keys]
    np.testing.assert_allclose(reading.logsumexp, math.log(keys), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rows_whose_keys_are_split_count_their_own(dtype):
    # Two blocks of rows: whoever merges the splits of one may have computed the other last.
    queries, keys = PANELS * target().panel_rows(8 if dtype == torch.float64 else 4) + 5, 2000
    q, k = draw(0, 1, 1, queries, DIM, dtype=dtype), draw(1, 1, 1, keys, DIM, dtype=dtype)
    with at_work(4):
        reading = attend(q, k, k, is_causal=True, query_offset=1000, backend="cpu").reading
    torch.testing.assert_close(reading.visible_keys.flatten(), torch.arange(1001, 1001 + queries))


# --- what is not finite -----------------------------------------------------------------------------------------------

# Far enough that whole tiles, and one of two splits of the keys, hold nothing else.
SPAN = 1200


def poisoned(place, value, *, keys=SPAN, queries=40, dtype=torch.float32):
    """(clean, dirty): one head; the last 100 keys or values of the dirty one are poison."""
    clean = {
        name: draw(i, 1, 1, n, DIM, dtype=dtype)
        for i, (name, n) in enumerate({"q": queries, "k": keys, "v": keys}.items())
    }
    dirty = {name: x.clone() for name, x in clean.items()}
    for name in place:
        dirty[name][..., -100:, :] = value
    return clean, dirty


HIDING = {
    "key lengths": {"key_lengths": [SPAN - 100]},
    "causality": {"is_causal": True, "query_offset": SPAN - 140},
    "window": {"window": (300, 0), "query_offset": SPAN - 140},
    "bool mask": {"attn_mask": (torch.arange(SPAN) < SPAN - 100).expand(1, SPAN)},
    "bias": {"attn_mask": torch.where(torch.arange(SPAN) < SPAN - 100, 0.0, -math.inf).expand(40, SPAN)},
}


def differentiated(given, options, upstream):
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    output, reading = attend(*leaves.values(), **options, backend="cpu")
    assert reading.backend == "cpu"
    grads = torch.autograd.grad(output, list(leaves.values()), upstream)
    return [output.detach(), *grads], reading


@pytest.mark.parametrize("many", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("poison", [math.nan, -math.inf], ids=str)
@pytest.mark.parametrize("place", ["k", "v"])
@pytest.mark.parametrize("way", HIDING)
def test_what_nobody_sees_reaches_nothing(way, place, poison, dtype, many, threads):
    threads(many)
    clean, dirty = poisoned(place, poison, dtype=dtype)
    upstream = draw(5, 1, 1, 40, DIM, dtype=dtype)
    wanted, wanted_reading = differentiated(clean, HIDING[way], upstream)
    found, reading = differentiated(dirty, HIDING[way], upstream)
    tight = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for one, two in zip(found, wanted, strict=True):
        assert two.abs().max() > 5 * tight
        torch.testing.assert_close(one, two, rtol=tight, atol=tight)
    assert not reading.nonfinite.any()
    for name in (*FORWARD, *AFTER_BACKWARD):
        one, two = getattr(reading, name), getattr(wanted_reading, name)
        torch.testing.assert_close(one, two, rtol=tight, atol=tight, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("place", ["k", "v"])
@pytest.mark.parametrize("many", [1, 2])
def test_a_nan_reaches_the_rows_that_see_it_and_no_other(place, many, threads):
    threads(many)
    clean, dirty = poisoned(place, math.nan)
    # Rows from the 20th on see it.
    options = {"is_causal": True, "query_offset": SPAN - 100 - 20}
    upstream = draw(5, 1, 1, 40, DIM, dtype=torch.float32)
    wanted, _ = differentiated(clean, options, upstream)
    found, reading = differentiated(dirty, options, upstream)
    sees = torch.arange(40) >= 20
    assert torch.equal(reading.nonfinite[0, 0].bool(), sees)
    for one, two in zip(found[:2], wanted[:2], strict=True):  # the output and the gradient of q
        assert one[..., sees, :].isnan().all()
        torch.testing.assert_close(one[..., ~sees, :], two[..., ~sees, :], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_rows_that_see_nothing_pass_nothing_back(dtype, poison):
    # Whatever comes from above for them: their output does not depend on anything.
    clean, _ = poisoned("", 0.0, keys=150, dtype=dtype)
    options = {"is_causal": True, "query_offset": -10}
    upstream = draw(5, 1, 1, 40, DIM, dtype=dtype)
    dirty = upstream.clone()
    dirty[..., :10, :] = poison
    wanted, reading = differentiated(clean, options, upstream)
    assert (reading.visible_keys[..., :10] == 0).all()
    assert (reading.visible_keys[..., 10:] > 0).all()
    found, _ = differentiated(clean, options, dirty)
    assert not found[0][..., :10, :].any()
    assert not found[1][..., :10, :].any()
    tight = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 0.02}[dtype]
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=tight, atol=tight)


def test_a_score_beyond_the_range_of_float32():
    # 1e20 · 1e20 is finite in the float64 of rows that are looked at again, but not in the Reading.
    q, k = torch.full((1, 1, 1), 1e20), torch.tensor([[[1e20], [-1e20], [0.0]]])
    reading = attend(q, k, torch.tensor([[[1.0], [2.0], [3.0]]]), scale=1.0, backend="cpu").reading
    assert reading.max_logit == math.inf
    assert reading.nonfinite == 1


@pytest.mark.parametrize("scale", [1e300, 1e308, -1e308, 5e-324, 1e-300, 0.0])
def test_scales_at_the_ends_of_the_range(scale):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    q = q * (1e-300 if abs(scale) > 1 else 1)
    found, wanted = (attend(q, k, v, scale=scale, backend=backend) for backend in ("cpu", "reference"))
    np.testing.assert_allclose(found.output, wanted.output, rtol=1e-12)
    np.testing.assert_allclose(found.reading.max_logit, wanted.reading.max_logit, rtol=1e-12, atol=1e-320)


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_a_tensor_that_is_negative_only_when_read():
    # Of complex numbers: the memory holds the other sign.
    z = torch.complex(draw(0, 2, 5, 4), draw(1, 2, 5, 4)).conj()
    q = z.imag
    assert q.is_neg()
    for k in (q, draw(2, 2, 5, 4)):
        found = attend(q, k, k, backend="cpu")
        wanted = attend(q.clone(), k.clone(), k.clone(), backend="reference")
        torch.testing.assert_close(found.output, wanted.output)
        mask = z[:, :, :1].imag
        found = attend(k, k, k, attn_mask=mask, sinks=mask[:, 0, 0], scale=mask[:, 1, 0], backend="cpu")
        wanted = attend(k, k, k, attn_mask=mask, sinks=mask[:, 0, 0], scale=mask[:, 1, 0], backend="reference")
        torch.testing.assert_close(found.output, wanted.output)


def test_a_tensor_without_memory():
    # What torch uses for gradients that are 0: there is nothing at its address, and who reads there is killed.
    script("""
        import torch, attemper
        q, k = torch._efficientzerotensor((2, 5, 4)), torch.randn(2, 5, 4)
        output = attemper.attend(q, k, k, backend="cpu").output
        torch.testing.assert_close(output, k.mean(-2, keepdim=True).expand(output.shape))
    """)


@pytest.mark.parametrize("gradients", [False, True])
def test_around_another_default_device(gradients):
    script(
        """
        import sys, torch, attemper
        gradients = sys.argv[1] == "True"
        q, k, v = (torch.randn(2, 5, 4).requires_grad_(gradients) for _ in range(3))
        wanted = attemper.attend(q, k, v, is_causal=True, backend="reference")
        with torch.device("meta"):
            output, reading = attemper.attend(q, k, v, is_causal=True, backend="cpu")
            if gradients:
                output.sum().backward()
        torch.testing.assert_close(output, wanted.output)
        torch.testing.assert_close(reading.entropy, wanted.reading.entropy)
        if gradients:
            torch.testing.assert_close(q.grad, torch.autograd.grad(wanted.output.sum(), q)[0])
            torch.testing.assert_close(reading.pressure, (q * q.grad).sum(-1).detach())
        """,
        str(gradients),
    )


def test_another_device_is_refused():
    q = torch.zeros(2, 5, 4, device="meta")
    with pytest.raises(
        BackendError, match=r"cannot take this call: it computes on the CPU, and q is on meta\.\n  Pass"
    ):
        attend(q, q, q, backend="cpu")


@on_linux
@pytest.mark.parametrize("gradients", [False, True])
def test_operands_are_not_copied(gradients):
    # A key and a value that all of 40 million share, and queries that 4096 entries do: 10 GB each if they were copied.
    code = """
        import sys
        import torch, attemper
        gradients = sys.argv[1] == "True"
        def run(entries, keys):
            k, v = (torch.randn(1, 1, 1, 64, requires_grad=gradients).expand(entries, 1, keys, 64) for _ in range(2))
            q = torch.randn(1, 4, 64, 1, requires_grad=gradients).mT.expand(entries, 4, 1, 64)
            output, reading = attemper.attend(q, k, v, enable_gqa=True, stats="none", backend="cpu")
            torch.testing.assert_close(output, v[:, :, :1].expand(output.shape), rtol=1e-3, atol=1e-3)
            assert reading.backend == "cpu"
        run(1, 64)
        before = peak()
        run(4, 40_000) if gradients else run(256, 40_000)
        print(peak() - before)
    """
    assert float(script(code, str(gradients))) < 100


@on_linux
def test_numpy_operands_are_not_copied():
    code = """
        import numpy as np, attemper
        def run(entries, keys):
            k, v = (np.broadcast_to(np.ones((1, 1, 1, 64), np.float32), (entries, 1, keys, 64)) for _ in range(2))
            q = np.broadcast_to(np.ones((1, 1, 64, 1), np.float32).swapaxes(-1, -2), (entries, 1, 1, 64))
            output, reading = attemper.attend(q, k, v, attn_mask=np.ones((1, keys), bool), backend="cpu")
            assert reading.backend == "cpu" and (reading.visible_keys == keys).all()
            np.testing.assert_allclose(output, 1, rtol=1e-3)
        run(1, 64)
        before = peak()
        run(256, 40_000)
        print(peak() - before)
    """
    assert float(script(code)) < 50


# --- a call that was made before --------------------------------------------------------------------------------------

AGAIN = {
    "plain": {},
    "causal": {"is_causal": True},
    "offset": {"is_causal": True, "query_offset": 3},
    "bottom-right": {"is_causal": True, "query_offset": "bottom-right"},
    "window": {"window": (3, 1)},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": -0.3},
    "named scale": {"scale": "dk"},
    "nothing measured": {"stats": "none"},
    "one field": {"stats": "entropy"},
    "grouped heads": {"enable_gqa": True},
    "a mask": {"attn_mask": np.tri(7, 9, dtype=bool)},
    "dropout": {"dropout_p": 0.4, "seed": 3},
}
SHAPES = {
    "one head": ((7, 4), (9, 4), (9, 5)),
    "rank 3": ((2, 7, 4), (2, 9, 4), (2, 9, 5)),
    "rank 4": ((2, 2, 7, 4), (2, 2, 9, 4), (2, 2, 9, 4)),
    "rank 5": ((2, 1, 2, 7, 4), (2, 1, 2, 9, 4), (2, 1, 2, 9, 3)),
    "broadcast": ((3, 2, 7, 4), (1, 2, 9, 4), (1, 2, 9, 4)),
    "one query": ((2, 2, 1, 4), (2, 2, 9, 4), (2, 2, 9, 4)),
}
LAYOUTS = {
    "as they are": lambda x: x,
    "heads after length": lambda x: np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2) if x.ndim > 2 else x,
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "every second": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "backwards": lambda x: x[..., ::-1, :].copy()[..., ::-1, :],
}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", AGAIN.values(), ids=AGAIN)
def test_every_call_of_a_kind_is_computed(options, shapes, layout, framework):
    if shapes[0][-2] == 1 and "attn_mask" in options:
        options = {"attn_mask": options["attn_mask"][:1]}
    if framework == "torch":
        if layout == "backwards":
            pytest.skip("torch has no negative strides")
        options = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    rng = np.random.default_rng(0)
    kept = []
    for _ in range(3):
        operands = [LAYOUTS[layout](rng.standard_normal(shape)) for shape in shapes]
        if framework == "torch":
            operands = [torch.from_numpy(x) for x in operands]
        found, wanted = (attend(*operands, **options, backend=backend) for backend in ("cpu", "reference"))
        assert (found.reading.backend, tuple(found.output.shape)) == ("cpu", tuple(wanted.output.shape))
        kept.append((found, wanted))
    # All of them at the end: a later call leaves what an earlier one returned alone.
    for found, wanted in kept:
        np.testing.assert_allclose(np.asarray(found.output), np.asarray(wanted.output), rtol=1e-12, atol=1e-13)
        for name in FORWARD:
            one, two = getattr(found.reading, name), getattr(wanted.reading, name)
            assert (one is None) == (two is None), name
            if one is not None:
                np.testing.assert_allclose(np.asarray(one), np.asarray(two), rtol=1e-10, atol=1e-12, err_msg=name)


def test_the_reading_of_a_repeated_call_is_like_any_other():
    q, k, v = (draw(i, 2, 3, 5, 4) for i in range(3))
    readings = [attend(q, k, v, backend="cpu").reading for _ in range(3)]
    first = readings[0]
    for reading in readings[1:]:
        assert repr(reading) == repr(first)
        assert reading.to_dict() == first.to_dict()
        assert reading.shape == first.shape == (2, 3, 5)
        assert copy.deepcopy(reading).to_dict() == first.to_dict()
        leaves, spec = pytree.tree_flatten(reading)
        assert spec == pytree.tree_flatten(first)[1]
        assert pytree.tree_unflatten(leaves, spec).to_dict() == first.to_dict()
        assert (reading.pressure, reading.gradient_flow) == (None, None)
        for name in (*MEASURED, *DERIVED):
            if name not in AFTER_BACKWARD:
                one, two = getattr(reading, name), getattr(first, name)
                assert (one.dtype, one.shape) == (two.dtype, two.shape), name
                assert torch.equal(one, two), name


def test_a_repeated_call_notices_what_changed():
    q, k, v = (draw(i, 2, 3, 5, 4) for i in range(3))
    for _ in range(2):
        attend(q, k, v, backend="cpu")
    # The same shapes and another type, gradient, scale of the same value but another kind, or backend.
    assert attend(q.float(), k.float(), v.float(), backend="cpu").output.dtype == torch.float32
    assert attend(q, k, v.clone().requires_grad_(), backend="cpu").output.requires_grad
    assert attend(q, k, v, backend="torch").reading.backend == "torch"
    with pytest.raises(Exception, match="is_causal"):
        attend(q, k, v, is_causal=0, backend="cpu")
    with forward_ad.dual_level(), pytest.raises(BackendError, match="Forward-mode"):
        attend(forward_ad.make_dual(q, torch.ones_like(q)), k, v, backend="cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(q.float(), k.float(), v.float(), backend="cpu").output.dtype == torch.bfloat16
    assert isinstance(attend(*(x.numpy() for x in (q, k, v)), backend="cpu").output, np.ndarray)
    v[0, 0, 0, 0] = math.nan
    for _ in range(3):
        assert attend(q, k, v, backend="cpu").reading.nonfinite[0, 0].all()
    v[0, 0, 0, 0] = 1.0
    assert not attend(q, k, v, backend="cpu").reading.nonfinite.any()


# --- threads ----------------------------------------------------------------------------------------------------------


def problems(count):
    """Calls of all kinds: (operands, options, the right output)."""
    kinds = [
        {},
        {"is_causal": True},
        {"window": (50, 9)},
        {"softcap": 2.0},
        {"dropout_p": 0.3, "seed": 1},
        {"key_lengths": [77]},
        {"scale": 0.7},
    ]
    for i in range(count):
        dtype = (torch.float32, torch.float64, torch.bfloat16)[i % 3]
        queries, keys = (1, 33, 130, 700)[i % 4], (90, 700, 1300)[i % 3]
        operands = [draw(10 * i + j, 1, 2, n, 32, dtype=dtype) for j, n in enumerate((queries, keys, keys))]
        yield operands, kinds[i % len(kinds)]


def close(dtype):
    return {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]


@pytest.mark.parametrize("many", [1, 2])
def test_many_threads_at_once(many, threads):
    threads(many)
    calls = list(problems(24))
    wanted = [attend(*(x.double() for x in operands), **options, backend="reference") for operands, options in calls]
    stop = threading.Event()

    def spin():
        # Torch's own workers are busy meanwhile.
        x = torch.randn(300, 300)
        while not stop.is_set():
            x @ x

    def work(seed):
        order = np.random.default_rng(seed).permutation(len(calls))
        for i in order:
            operands, options = calls[i]
            leaves = [x.clone().requires_grad_(seed % 2 == 0) for x in operands]
            output, reading = attend(*leaves, **options, backend="cpu")
            tight = close(output.dtype)
            torch.testing.assert_close(output.double(), wanted[i].output, rtol=tight, atol=tight)
            torch.testing.assert_close(reading.entropy.double(), wanted[i].reading.entropy, rtol=tight, atol=tight)
            if seed % 2 == 0:
                output.sum().backward()
                assert all(x.grad.isfinite().all() for x in leaves)
        return len(order)

    with ThreadPoolExecutor(9) as pool:
        spinning = pool.submit(spin)
        try:
            assert sum(pool.map(work, range(8))) == 8 * len(calls)
        finally:
            stop.set()
        spinning.result()


@pytest.mark.parametrize("gradients", [False, True])
def test_the_number_of_threads_changes_no_digit_that_counts(gradients, threads):
    for operands, options in problems(12):
        outcomes = []
        for many in (1, 2):
            threads(many)
            assert _threads.threads() == many
            leaves = [x.clone().requires_grad_(gradients) for x in operands]
            output, reading = attend(*leaves, **options, backend="cpu")
            found = [output.detach(), reading.logsumexp, reading.score_std]
            if gradients:
                found += torch.autograd.grad(output.sum(), leaves)
            outcomes.append(found)
        for one, two in zip(*outcomes, strict=True):
            # Where keys are split, sums come in another order.
            tight = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[one.dtype]
            torch.testing.assert_close(one, two, rtol=tight, atol=tight * float(two.abs().max()))


FORKED = """
    import multiprocessing, sys
    if sys.argv[1] == "torch":
        import torch
        torch.manual_seed(0)
        torch.set_num_threads(2)
        q, k, v = (torch.randn(1, 4, 300, 64, requires_grad=True) for _ in range(3))
    else:
        sys.modules["torch"] = None
        import numpy as np
        q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, 300, 64), dtype=np.float32)
    import attemper
    from attemper._backends.cpu import _threads

    def forward():
        # Several times: what was done before may be done otherwise.
        for _ in range(3):
            output, reading = attemper.attend(*operands, is_causal=True)
            assert reading.backend == "cpu"
        return output, reading.entropy

    def backward():
        output, _ = attemper.attend(q, k, v, is_causal=True)
        return output.detach(), *torch.autograd.grad(output, (q, k, v), q.detach())

    def once():
        found = forward()
        if sys.argv[1] == "torch":
            # Torch's own operations on large tensors would wait for threads that are not there.
            if _threads.runner() == "one thread, after a fork":
                torch.set_num_threads(1)
            found += backward()
        return found

    def child(queue, wanted):
        assert _threads.threads() == 1
        assert _threads.runner() == "one thread, after a fork"
        queue.put([float(abs(one - two).max()) for one, two in zip(once(), wanted, strict=True)])

    operands = [x.detach() for x in (q, k, v)] if sys.argv[1] == "torch" else (q, k, v)
    wanted = once()
    assert _threads.threads() == 2
    assert min(float(abs(x).max()) for x in wanted) > 0.1
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue, wanted), daemon=True)
    process.start()
    print(max(queue.get(timeout=60)))
    process.join(60)
    assert process.exitcode == 0
    once()  # and the parent goes on
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_forked_child_computes(framework):
    off = float(script(FORKED, framework, timeout=150, OMP_NUM_THREADS="2"))
    assert off < 1e-4


WITHOUT_TORCH = """
    import sys
    sys.modules["torch"] = None
    import numpy as np, attemper
    from attemper._backends.cpu import _threads
    q, k, v = np.random.default_rng(0).standard_normal((3, 3, 200, 64))
    for _ in range(2):
        found, wanted = (attemper.attend(q, k, v, backend=backend) for backend in ("cpu", "reference"))
        np.testing.assert_allclose(found.output, wanted.output, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(found.reading.entropy, wanted.reading.entropy, rtol=1e-10)
    # One head: two threads share the keys.
    q, k, v = q[:1, :1], *(np.random.default_rng(1).standard_normal((2, 1, 20_000, 64)))
    found, wanted = (attemper.attend(q, k, v, backend=backend) for backend in ("cpu", "reference"))
    np.testing.assert_allclose(found.output, wanted.output, rtol=1e-10, atol=1e-12)
    print(_threads.threads(), _threads.runner())
"""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"ATTEMPER_NUM_THREADS": "2", "OMP_NUM_THREADS": "1"}, 2),
        ({"ATTEMPER_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}, 1),
        ({"ATTEMPER_NUM_THREADS": "", "OMP_NUM_THREADS": "3,1"}, 3),
        ({"ATTEMPER_NUM_THREADS": "many", "OMP_NUM_THREADS": "0"}, None),
    ],
    ids=str,
)
def test_threads_without_torch(environment, expected):
    found, _, runner = script(WITHOUT_TORCH, **environment).strip().partition(" ")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert (int(found), runner) == (expected or cores, "threads of its own")


def test_threads_with_torch(threads):
    threads(2)
    assert _threads.threads() == 2
    threads(1)
    assert _threads.threads() == 1
    if sys.platform == "linux":
        assert _threads.runner() == "torch's OpenMP threads"


# --- the cache --------------------------------------------------------------------------------------------------------

KERNELS = [kernel for kernels in _code.KERNELS.values() for kernel in kernels]

FIRST_CALL = """
    import json, sys
    import numpy as np, attemper
    told = []
    attemper.on_progress(lambda *news: told.append(news))
    x = np.random.default_rng(0).standard_normal((2, 50, 4))
    output, reading = attemper.attend(x, x, x)
    assert reading.backend == "cpu", reading.backend
    wanted = attemper.attend(x, x, x, backend="reference").output
    assert abs(output - wanted).max() < 1e-13 < abs(wanted).max()
    print(json.dumps({"told": told, "numba": "numba" in sys.modules, "torch": "torch" in sys.modules}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A cache with the one kernel that FIRST_CALL needs, and what that call said."""
    folder = tmp_path_factory.mktemp("compiled") / "not" / "there"
    return folder, json.loads(script(FIRST_CALL, ATTEMPER_CACHE_DIR=str(folder)))


def test_a_kernel_is_compiled_and_kept(compiled):
    folder, said = compiled
    (file,) = folder.iterdir()  # and nothing unfinished beside it
    kernel = file.name.partition("-")[0]
    assert kernel in KERNELS
    assert file.stat().st_size > 10_000
    stage = f"Compiling {kernel} for {target().instructions}, once on this machine"
    assert said["told"] == [[stage, 0, 1], [stage, 1, 1]]
    assert said["numba"]
    assert not said["torch"]


def test_the_second_process_needs_no_numba(compiled):
    folder, _ = compiled
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert json.loads(script(FIRST_CALL, ATTEMPER_CACHE_DIR=str(folder))) == {
        "told": [],
        "numba": False,
        "torch": False,
    }
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_another_processor_has_its_own_code(compiled):
    folder, _ = compiled
    (file,) = folder.iterdir()
    code = "import sys; from attemper._backends.cpu import _code; print(_code.cache_file(sys.argv[1]))"
    kernel, here = file.name.partition("-")[0], {"ATTEMPER_CACHE_DIR": str(folder)}
    assert script(code, kernel, **here).strip() == str(file)
    elsewhere = Path(script(code, kernel, **here, NUMBA_CPU_NAME="generic").strip())
    assert elsewhere.name.startswith(f"{kernel}-")
    assert not elsewhere.exists()


def test_where_the_cache_is():
    code = "from attemper._backends.cpu import _code; print(_code.cache_folder())"
    assert script(code, ATTEMPER_CACHE_DIR="/nowhere/at/all").strip() == "/nowhere/at/all"
    if sys.platform == "linux":
        assert script(code, ATTEMPER_CACHE_DIR="", XDG_CACHE_HOME="/somewhere").strip() == "/somewhere/attemper"
        assert script(code, ATTEMPER_CACHE_DIR="", XDG_CACHE_HOME="", HOME="/me").strip() == "/me/.cache/attemper"


# The smallest kernel: it takes a third of a second to compile.
SMALLEST = """
    import sys
    from attemper._backends.cpu import _code
    assert _code.address("gather_f64") == _code.address("gather_f64") > 0
    print("numba" in sys.modules)
"""


def test_a_cache_that_cannot_be_written(tmp_path):
    # Not by its permissions, which mean nothing to root: where the folder should be there is a file.
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert script(SMALLEST, ATTEMPER_CACHE_DIR=str(tmp_path / "file" / "folder")).strip() == "True"


def spoil(code, how):
    if how == "empty":
        return b""
    if how == "cut short":
        return code[: len(code) // 2]
    if how == "all but the end":
        return code[:-1]
    middle = len(code) // 2
    if how == "a byte in the middle":
        return code[:middle] + bytes([code[middle] ^ 0xFF]) + code[middle + 1 :]
    return b"<html>Not found</html>" * (len(code) // 22)


@pytest.mark.parametrize("how", ["empty", "cut short", "all but the end", "a byte in the middle", "something else"])
def test_a_file_that_is_spoiled_is_made_anew(tmp_path, how):
    folder = {"ATTEMPER_CACHE_DIR": str(tmp_path)}
    assert script(SMALLEST, **folder).strip() == "True"
    (file,) = tmp_path.iterdir()
    sound = file.read_bytes()
    file.write_bytes(spoil(sound, how))
    assert script(SMALLEST, **folder).strip() == "True"
    assert file.read_bytes() == sound
    assert script(SMALLEST, **folder).strip() == "False"


def test_two_processes_at_once(tmp_path):
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(SMALLEST)]
    env = {**os.environ, "ATTEMPER_CACHE_DIR": str(tmp_path)}
    running = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [(process.communicate(timeout=120)[1], process.returncode) for process in running] == [("", 0)] * 3
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("gather_f64-")


def test_several_threads_compile_once(tmp_path):
    code = """
        import threading
        import attemper
        from attemper._backends.cpu import _code
        told = []
        attemper.on_progress(lambda *news: told.append(news))
        found = []
        threads = [threading.Thread(target=lambda: found.append(_code.address("gather_f64"))) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(len(found), len(set(found)), len(told))
    """
    assert script(code, ATTEMPER_CACHE_DIR=str(tmp_path)).split() == ["4", "1", "2"]


def test_progress_goes_to_the_last_who_asked():
    def listener(stage, done, total):
        raise AssertionError

    before = on_progress(listener)
    try:
        assert on_progress(None) is listener
        assert on_progress(None) is not listener
    finally:
        on_progress(before)


# --- memory -----------------------------------------------------------------------------------------------------------

MEASURE = r"""
import sys
import torch, attemper
torch.set_num_threads(2)
def run(n, **options):
    q, k, v = (torch.randn(1, 1, n, 64, requires_grad=True) for _ in range(3))
    output, reading = attemper.attend(q, k, v, backend="cpu", **options)
    output.square().sum().backward()
    assert torch.isfinite(q.grad).all() and reading.pressure.shape == (1, 1, n)
def careful(n):
    # Every row meets a NaN, which it does not see.
    q, k, v = (torch.randn(1, 1, n, 16) for _ in range(3))
    v[..., -1, :] = float("nan")
    output, reading = attemper.attend(q, k, v, key_lengths=[n - 1], backend="cpu")
    assert output.isfinite().all() and not reading.nonfinite.any()
run(600)  # what is loaded and allocated once
careful(600)
case, n = sys.argv[1], int(sys.argv[2])
before = peak()
if case == "matrix":
    torch.ones(n, n)  # what must not be built
elif case == "careful":
    careful(n)
else:
    bias = torch.randn(n, requires_grad=True)
    run(n, **{"plain": {}, "causal": {"is_causal": True}, "bias": {"attn_mask": bias}}[case])
print(peak() - before)
"""


def megabytes(case, n):
    return float(script(MEASURE, case, str(n)))


@on_linux
@pytest.mark.parametrize("case", ["plain", "causal", "bias", "careful"])
def test_memory_grows_with_queries_and_keys(case):
    # 9000 × 9000 numbers would be 309 MB.
    assert megabytes(case, 9000) < 120


@on_linux
def test_the_measurement_sees_a_matrix():
    assert megabytes("matrix", 9000) > 250


# --- other processors -------------------------------------------------------------------------------------------------

# Those that compute what the kernels are for, in several tiles.
ELSEWHERE = (
    "test_gradients",
    "test_gradients_in_float64",
    "test_gradients_in_sixteen_bits",
    "test_gradients_where_threads_share_the_keys",
    "test_gradients_of_fields",
    "test_few_queries_and_many_keys",
    "test_a_nan_reaches_the_rows_that_see_it_and_no_other",
    "test_rows_that_see_nothing_pass_nothing_back",
    "test_the_number_of_threads_changes_no_digit_that_counts",
)


def test_the_battery_on_other_processors(processor):
    processor.run(
        """
        import sys
        from functools import partial
        from attemper import attend
        from attemper._backends.cpu._target import target
        from attemper.testing import check_operator
        assert (target().instructions, target().bits) == (sys.argv[1], int(sys.argv[2])), target()
        report = check_operator(partial(attend, backend="cpu"), framework="numpy", backend="cpu")
        assert len(report.rows) > 400
        if not report.ok:
            print(report)
            sys.exit(1)
        """,
        processor.instructions,
        processor.bits,
    )


def test_gradients_on_other_processors(processor):
    processor.test(*(f"{__file__}::{name}" for name in ELSEWHERE))
