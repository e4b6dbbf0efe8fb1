"""Their backward pass: gradients, gradient flow, what is marked, and no races."""

import math

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from hopper_cases import call_for, close, draw, in_float64, registers_add_up, seen_in, three
from ptx_emulator import RaceError
from ptx_launch import Emulator

from attemper import _doctor, attend

MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, bottom-right": {"is_causal": True, "query_offset": "bottom-right"},
    "a window": {"window": (140, 20)},
    "a narrow window": {"window": (30, 0)},
    "a scale": {"scale": 0.4},
    "rows without keys": {"window": (3, 40), "query_offset": 250},
    "sinks": {"sinks": torch.tensor([0.5, 3.0]), "is_causal": True},
    "lengths": {"key_lengths": torch.tensor([70, 330])},
    "lengths, causal": {"key_lengths": torch.tensor([100, 150]), "is_causal": True},
}


@pytest.fixture
def emulator(request):
    """The order of events is another in each test, and the same every time."""
    return Emulator(seed=request.node.name)


def in_full(call, grad):
    """Gradients of q, k, v and the flow in float64, with what the kernels are given; and who sees whom."""
    output, fields, _ = in_float64(call)
    leaves = [x.double().requires_grad_() for x in (call.q, call.k, call.v)]
    q, k, v = leaves[0], *(x.repeat_interleave(call.group, 1) for x in leaves[1:])
    seen = seen_in(call)
    scores = (q @ k.mT * call.scale.double()[..., None, None]).masked_fill(~seen, -math.inf)
    weights = torch.where(seen, scores - fields["logsumexp"][..., None], -math.inf).exp()
    passing = (1 - fields["sink_mass"])[..., None]
    # The gradient of the softmax by its formula: of a row that sees nothing autograd has NaN.
    pushed = grad.double() @ v.mT
    pull = (grad.double() * output).sum(-1)
    to_scores = passing * weights * (pushed - pull[..., None]) * call.scale.double()[..., None, None]
    found = to_scores @ k, to_scores.mT @ q, (passing * weights).mT @ grad.double()
    gradients = torch.autograd.grad((q, k, v), leaves, found)
    count = seen.sum(-1)
    mean = pushed.masked_fill(~seen, 0.0).sum(-1) / count
    spread = ((pushed - mean[..., None]).square() * seen).sum(-1) / count
    under = (weights * (pushed - (weights * pushed).sum(-1, keepdim=True)).square()).sum(-1)
    return gradients, torch.where(spread > 0, under / spread, math.nan).detach(), pull, fields


def ranges_of(call):
    """Which keys any and all of 64 rows see, for each entry of the batch."""
    keys = call.k.shape[2]
    seen = seen_in(call)[:, 0].expand(call.q.shape[0], -1, -1)
    count = seen.sum(-1)
    low = seen.int().argmax(-1)
    found = [
        (rows[:, 0][any_].min().item() if any_.any() else keys, (rows.sum(-1)[any_]).max().item() if any_.any() else 0,
         rows[:, 0].max().item(), rows.sum(-1).min().item())
        for entry in torch.stack((low, count), -1)
        for rows in entry.split(64)
        for any_ in [rows[:, 1] > 0]
    ]  # fmt: skip
    return torch.tensor(found, dtype=torch.int32).flatten()


class Found:
    """What the kernels give for a call, and the flags."""

    def __init__(self, emulator, call, grad, *, shift=0.0, measured=True, gradient=True):
        to_queries = emulator.load("_hopper_to_queries")
        self.right, self.right_flow, pull, fields = in_full(call, grad)
        passing = 1 - fields["sink_mass"]
        of_weights = (fields["max_logit"], fields["largest_weight"], fields["largest_weight"] * passing)
        given = (*of_weights, pull + shift, pull / passing + shift)
        rows = to_queries.Rows(*(x.float() for x in given))
        assert to_queries.takes(call, grad.dtype)
        self.flow = torch.full(call.q.shape[:-1], -7.0) if measured else None
        self.q, self.k, self.v = (torch.full_like(x, 7.0) for x in (call.q, call.k, call.v))
        self.q_flags, self.k_flags = (
            torch.zeros(x.shape[0] * x.shape[1] * -(-x.shape[2] // 64) + 1, dtype=torch.int32) for x in (call.q, call.k)
        )
        to_queries.run(call, grad, rows, self.q if gradient else None, self.flow, self.q_flags)
        if gradient:
            emulator.load("_hopper_to_keys").run(call, grad, rows, ranges_of(call), self.k, self.v, self.k_flags)

    @property
    def flagged(self):
        """The last number is a counter."""
        return self.q_flags[:-1].nonzero().flatten().tolist(), self.k_flags[:-1].nonzero().flatten().tolist()

    def agree(self):
        assert self.flagged == ([], [])
        for name, found, right in zip("qkv", (self.q, self.k, self.v), self.right, strict=True):
            size = right.abs().max()
            assert size > 0.05
            # One rounding of each weight, one of the result.
            assert (found.double() - right).norm() < 5e-3 * right.norm(), name
            close(found.double() / size, right / size, rtol=8e-3, atol=8e-3, name=name)

    def agree_in_flow(self):
        assert torch.equal(self.flow.isnan(), self.right_flow.isnan())
        there = self.right_flow.isfinite()
        assert there.any()
        close(self.flow[there], self.right_flow[there], rtol=2e-3, atol=1e-4)


def arriving(call, seed=7):
    """A gradient of the output that lies otherwise than q."""
    batch, heads, queries, dim = call.q.shape
    return draw(seed, batch, queries, heads, dim, dtype=call.q.dtype).transpose(1, 2)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_flow_alone(emulator, name, head_dim):
    call = call_for(three(200, 330, head_dim, kv_heads=1, batch=2), enable_gqa=True, **MASKS[name])
    # In use the pull follows from an output that was rounded, and is no more than near the mean.
    Found(emulator, call, arriving(call), shift=0.5, gradient=False).agree_in_flow()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gradients_and_flow(emulator, name, head_dim, kv_heads):
    batch = 2 if "lengths" in name else 1
    call = call_for(three(200, 330, head_dim, kv_heads=kv_heads, batch=batch), enable_gqa=True, **MASKS[name])
    found = Found(emulator, call, arriving(call))
    found.agree()
    found.agree_in_flow()


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_alone(emulator, causal):
    call = call_for(three(), is_causal=causal)
    Found(emulator, call, arriving(call), measured=False).agree()


@pytest.mark.parametrize(
    ("queries", "keys"), [(64, 64), (65, 64), (64, 129), (191, 193), (400, 70), (70, 400), (1000, 130)]
)
def test_lengths(emulator, queries, keys):
    for options in ({}, {"is_causal": True}):
        call = call_for(three(queries, keys, heads=1), **options)
        Found(emulator, call, arriving(call)).agree()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_registers(emulator, head_dim):
    to_queries = emulator.load("_hopper_to_queries")
    for gradient in (False, True):
        registers_add_up(to_queries.configuration(head_dim, gradient=gradient))
    registers_add_up(emulator.load("_hopper_to_keys").configuration(head_dim))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(emulator, causal):
    starts = torch.tensor([0, 70, 71, 300, 420])
    call = call_for(three(420, 420, heads=2, kv_heads=1), cu_seqlens=starts, is_causal=causal, enable_gqa=True)
    assert call.first is not None
    found = Found(emulator, call, arriving(call))
    found.agree()
    found.agree_in_flow()


def test_rows_of_which_no_run_sees_a_key(emulator):
    """Bounds may be any: rows that see a key need not follow each other."""
    call = call_for(three(300, 300, heads=1), key_lengths=torch.tensor([300]))
    draw_from = torch.Generator().manual_seed(4)
    first = torch.randint(0, 250, (1, 300), generator=draw_from)
    stop = first + torch.randint(0, 60, (1, 300), generator=draw_from)
    first[0, 64:128], stop[0, 64:128] = 0, 300
    call = call._replace(first=first, stop=stop, band=None)
    Found(emulator, call, arriving(call)).agree()


def test_float16(emulator):
    call = call_for(three(dtype=torch.float16), is_causal=True)
    Found(emulator, call, arriving(call)).agree()


@pytest.mark.parametrize("processors", [1, 2, 50])
def test_more_and_fewer_processors_than_items(processors):
    call = call_for(three(300, 300, heads=4, kv_heads=2), enable_gqa=True, is_causal=True)
    Found(Emulator(seed=processors, processors=processors), call, arriving(call)).agree()


@pytest.mark.parametrize("causal", [False, True])
def test_many_orders_of_events(causal):
    call = call_for(three(200, 200, heads=1), is_causal=causal)
    for seed in range(5):
        Found(Emulator(seed=seed), call, arriving(call)).agree()


@pytest.mark.parametrize("together", [1, 3])
def test_more_heads_than_the_cache_holds(emulator, together, monkeypatch):
    for name in ("_hopper_to_queries", "_hopper_to_keys"):
        monkeypatch.setattr(emulator.load(name), "together_in_cache", lambda call: together)
    call = call_for(three(200, 260, heads=4), is_causal=True)
    Found(emulator, call, arriving(call)).agree()


def test_operands_as_they_lie(emulator):
    q, k, v = three()
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    call = call_for((q, k, v), is_causal=True)
    Found(emulator, call, arriving(call)).agree()


@pytest.mark.parametrize("gradient", [False, True])
def test_rows_without_keys_beside_rows_that_see_whole_tiles(emulator, gradient):
    starts = torch.tensor([0, 30, 150]), torch.tensor([0, 200, 200])
    call = call_for(three(150, 200, heads=1), cu_seqlens=starts)
    found = Found(emulator, call, arriving(call), gradient=gradient)
    found.agree_in_flow()
    if gradient:
        found.agree()


@pytest.mark.parametrize("first", [63, 64, 65])
@pytest.mark.parametrize("stop", [191, 192, 193])
def test_bounds_beside_the_edges_of_tiles(emulator, first, stop):
    call = call_for(three(130, 260, heads=1), key_lengths=torch.tensor([260]))
    rows = torch.ones(1, 130, dtype=torch.int64)
    found = Found(emulator, call._replace(first=first * rows, stop=stop * rows, band=None), arriving(call))
    found.agree()
    found.agree_in_flow()
    for x in (found.k, found.v):
        assert not x[:, :, :first].any()
        assert not x[:, :, stop:].any()


def test_an_infinity_alone_is_flagged(emulator):
    """One weight times its gradient is beyond float16: what follows is infinite, and nowhere NaN."""
    q, k, v = three(128, 128, heads=1, dtype=torch.float16)
    grad = torch.zeros_like(q)
    v.zero_()
    k[0, 0, 5], v[0, 0, 5], grad[0, 0, 70] = q[0, 0, 70], 30000.0, 1.0
    found = Found(emulator, call_for((q, k, v)), grad)
    assert not found.q.isnan().any()
    assert not found.k.isnan().any()
    assert found.flagged == ([1], [0])


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_the_flow_of_saturated_rows_is_not_below_0(emulator, shift):
    call = call_for(three(), scale=20.0)
    flow = Found(emulator, call, arriving(call), shift=shift, gradient=False).flow
    assert (flow >= 0).all()


def test_flags_stay_in_their_head(emulator):
    """Consumers beyond the last key of a head, and rows beyond the last query, have no flag."""
    call = call_for(three(150, 200, heads=2, batch=2))
    grad = arriving(call)
    grad[0, 0, 140, 5] = math.nan
    found = Found(emulator, call, grad)
    assert found.flagged == ([2], [0, 1, 2, 3])
    grad = arriving(call)
    grad[1, 1, 140, 5] = math.nan
    found = Found(emulator, call, grad)
    assert found.flagged == ([11], [12, 13, 14, 15])
    assert set(found.k_flags[:12].tolist()) == {0}


def test_tiles_that_see_all_with_others_between(emulator):
    call = call_for(three(330, 200, heads=1), key_lengths=torch.tensor([200]))
    first, stop = torch.zeros(1, 330, dtype=torch.int64), torch.full((1, 330), 200)
    first[0, 64:128], stop[0, 64:128] = 20, 90
    first[0, 200], stop[0, 200] = 130, 131
    Found(emulator, call._replace(first=first, stop=stop, band=None), arriving(call)).agree()


def test_more_tiles_of_rows_than_are_looked_at_together(emulator):
    """The producer reads the ranges of 32 tiles at a time."""
    call = call_for(three(2150, 70, heads=1), is_causal=True)
    Found(emulator, call, arriving(call)).agree()
    call = call_for(three(2150, 130, heads=1), window=(40, 40), query_offset=-2050)
    Found(emulator, call, arriving(call)).agree()


def test_tiles_that_no_consumer_reads(emulator):
    """Between those of one consumer and another's; they must have arrived before others take their place."""
    call = call_for(three(192, 1300, heads=1), key_lengths=torch.tensor([1300]))
    first = torch.tensor([0, 620, 1240]).repeat_interleave(64)[None]
    Found(
        Emulator(seed=3, processors=1), call._replace(first=first, stop=first + 50, band=None), arriving(call)
    ).agree()
    call = call_for(three(1300, 192, heads=1), key_lengths=torch.tensor([192]))
    first, stop = torch.zeros(1, 1300, dtype=torch.int64), torch.zeros(1, 1300, dtype=torch.int64)
    stop[:, :50] = 60
    first[:, 640:700], stop[:, 640:700] = 70, 120
    first[:, 1250:], stop[:, 1250:] = 130, 190
    for seed in range(4):
        Found(
            Emulator(seed=seed, processors=1), call._replace(first=first, stop=stop, band=None), arriving(call)
        ).agree()


def test_what_they_take(emulator):
    takes = emulator.load("_hopper_to_queries").takes
    call = call_for(three())
    grad = call.q.dtype
    assert takes(call, grad)
    assert not takes(call, torch.float32)
    for scale in (0.0, -0.1, 2.0**20):
        assert not takes(call_for(three(), scale=scale), grad)
    scales = torch.tensor([0.1, 0.2])
    assert takes(call_for(three(), scale=scales), grad)
    assert not takes(call_for(three(kv_heads=1), scale=scales, enable_gqa=True), grad)
    for options in ({"softcap": 3.0}, {"attn_mask": torch.ones(200, 300)}, {"dropout_p": 0.1, "seed": 1}):
        assert not takes(call_for(three(), **options), grad)


def test_the_flow_beside_a_strong_sink(emulator):
    """The pull is then far from the mean of dP, about which the sums are to be."""
    q, k, v = three(150, 150)
    call = call_for((q, k, (v.float() + 30).bfloat16()), sinks=torch.tensor([9.0, 12.0]))
    found = Found(emulator, call, arriving(call))
    close(found.flow, found.right_flow, rtol=1e-4, atol=1e-5)
    for one, other in zip((found.q, found.k, found.v), found.right, strict=True):
        assert (one.double() - other).norm() < 5e-3 * other.norm()


class TestFlags:
    """Where a result is not finite, and nowhere else; what is computed again is right whatever it was."""

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_key_that_some_rows_see(self, emulator, value):
        q, k, v = three(256, 256, heads=1)
        k[0, 0, 130, 3] = value
        call = call_for((q, k, v), is_causal=True)
        found = Found(emulator, call, arriving(call))
        queries, keys = found.flagged
        # Rows from 130 on see it. Of the rows before, those in whose tiles it lies are not finite without need.
        assert {2, 3} <= set(queries)
        assert 0 not in queries
        assert 2 in keys

    def test_a_gradient_that_is_not_finite(self, emulator):
        call = call_for(three(256, 256, heads=1), is_causal=True)
        grad = arriving(call)
        grad[0, 0, 70, 5] = math.nan
        queries, keys = Found(emulator, call, grad).flagged
        assert queries == [1]
        assert keys == [0, 1]

    def test_a_value_beyond_the_last_row(self, emulator):
        """Rows that are not there must not be multiplied with what is not finite, unnoticed."""
        q, k, v = three(100, 256, heads=1)
        v[0, 0, 200, 5] = math.inf
        found = Found(emulator, call_for((q, k, v), is_causal=True), draw(7, 1, 1, 100, 64))
        queries, keys = found.flagged
        assert queries == []
        assert set(keys) <= {3}
        for x in (found.k, found.v):
            assert x[0, 0, : 192 if keys else None].isfinite().all()


DONE = "                to_k, to_v = warpgroup_mma_wait(0, deps=(to_k, to_v))\n"
BACK = "                mbarrier.arrive(empty.index(stage))\n"
FAULTS = {
    "a tile given back before its products are done": ("_hopper_to_keys", DONE + BACK, BACK + DONE),
    "numbers of rows that nobody waited for": (
        "_hopper_to_keys",
        "                mbarrier.wait(rows_full.index(stage), phase)\n",
        "",
    ),
    "keys given back while they are read": (
        "_hopper_to_keys",
        "            if member == ratio - 1:\n                mbarrier.arrive(k_empty.index(who))\n",
        "",
        "        v = v_tiles.index(who).reshape([_M, D])\n",
        "        v = v_tiles.index(who).reshape([_M, D])\n        mbarrier.arrive(k_empty.index(who))\n",
    ),
    "a tile of keys given back before its last product": (
        "_hopper_to_queries",
        "            if not GRADIENT:\n",
        "            if True:\n",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    module, *changes = FAULTS[name]

    def edit(name, source):
        if name == module:
            for old, new in zip(changes[::2], changes[1::2], strict=True):
                assert source.count(old) == 1
                source = source.replace(old, new)
        return source

    call = call_for(three(400, 400, heads=1))
    with pytest.raises(RaceError):
        Found(Emulator(seed=1, processors=1, edit=edit), call, arriving(call))


class TestAttend:
    """From end to end, with the kernels that compute marked blocks again."""

    @pytest.fixture(autouse=True)
    def emulated(self, emulator, monkeypatch):
        emulator.pretend(monkeypatch)

    def both(self, operands, grad, **options):
        """Gradients and Reading of the kernels in bfloat16, and the right ones."""
        for backend, dtype in (("cuda", torch.bfloat16), ("torch", torch.float64)):
            leaves = [x.detach().to(dtype).requires_grad_() for x in operands]
            output, reading = attend(*leaves, backend=backend, **options)
            output.backward(grad.to(dtype))
            assert reading.backend == backend
            yield [x.grad for x in leaves], reading

    def compare(self, emulator, operands, grad, **options):
        (found, reading), (right, right_reading) = self.both(operands, grad, **options)
        # Forward, to queries, to keys.
        assert len(emulator.of_hopper) == 3
        for one, other in zip(found, right, strict=True):
            assert (one.double() - other).norm() < 2e-2 * other.norm()
        there = right_reading.gradient_flow.isfinite()
        assert there.double().mean() > 0.9
        close(reading.gradient_flow[there], right_reading.gradient_flow[there], rtol=5e-2, atol=5e-3)
        size = right_reading.pressure.abs().max()
        close(reading.pressure / size, right_reading.pressure / size, rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"is_causal": True},
            {"window": (70, 0), "scale": 0.2},
            {"is_causal": True, "enable_gqa": True},
            {"sinks": torch.tensor([1.0, -2.0])},
            {"key_lengths": torch.tensor([90])},
            {"cu_seqlens": torch.tensor([0, 60, 150]), "is_causal": True},
        ],
    )
    def test_gradients_flow_and_pressure(self, emulator, options):
        operands = three(150, 150, heads=2, kv_heads=1 if "enable_gqa" in options else 2)
        self.compare(emulator, operands, draw(7, 1, 2, 150, 64), **options)

    def test_without_anything_measured(self, emulator):
        operands = three(150, 150)
        grad = draw(7, 1, 2, 150, 64)
        (found, _), (right, _) = self.both(operands, grad, stats="none")
        assert len(emulator.of_hopper) == 3
        for one, other in zip(found, right, strict=True):
            assert (one.double() - other).norm() < 2e-2 * other.norm()

    def test_pressure_alone(self, emulator, monkeypatch):
        kernel = emulator.load("_hopper_to_queries")
        run, asked = kernel.run, []
        monkeypatch.setattr(kernel, "run", lambda *given: asked.append(given[4]) or run(*given))
        results = list(self.both(three(150, 150), draw(7, 1, 2, 150, 64), is_causal=True, stats=("pressure",)))
        assert asked == [None]
        found, right = (reading.pressure for _, reading in results)
        size = right.abs().max()
        close(found / size, right / size, rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_what_is_not_finite_stays_where_it_is_seen(self, emulator, value):
        operands = three(150, 150, heads=1)
        for x in operands[1:]:
            x[0, 0, 100, 3] = value
        (found, _), (right, _) = self.both(operands, draw(7, 1, 1, 150, 64), is_causal=True)
        assert len(emulator.of_hopper) == 3
        before = [x.double()[0, 0, :100] for x in found]
        # Rows before it do not see it; of keys before it the gradients come from rows that do, too.
        assert before[0].isfinite().all()
        torch.testing.assert_close(before[0], right[0][0, 0, :100], rtol=2e-2, atol=2e-2)
        assert not found[0][0, 0, 100:].isfinite().all()

    def test_a_key_that_nobody_sees(self, emulator):
        q, k, v = three(100, 150, heads=1)
        for x in (k, v):
            x[0, 0, 120, 3] = math.nan
        (found, _), (right, _) = self.both((q, k, v), draw(7, 1, 1, 100, 64), is_causal=True)
        assert len(emulator.of_hopper) == 3
        for one, other in zip(found, right, strict=True):
            assert one.isfinite().all()
            assert (one.double() - other).norm() < 2e-2 * other.norm()

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("values", [[0.1, 0.3], 0.2, [0.0, 0.2], [-0.1, 0.2], [0.2, 1e-7]])
    def test_a_scale_that_learns(self, emulator, values, causal):
        """One per head, or one for all; below 0, or near it, blocks are computed again, and so is what flows to it."""
        operands = three(150, 150)
        grad = draw(7, 1, 2, 150, 64)
        results = []
        for backend, dtype in (("cuda", torch.bfloat16), ("torch", torch.float64)):
            q, k, v = (x.detach().to(dtype).requires_grad_() for x in operands)
            scale = torch.tensor(values, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
            output, reading = attend(q, k, v, scale=scale, is_causal=causal, backend=backend)
            output.backward(grad.to(dtype))
            results.append(([x.grad for x in (q, k, v, scale)], reading))
        assert len(emulator.of_hopper) == 3
        (found, reading), (right, right_reading) = results
        for one, other in zip(found[:3], right[:3], strict=True):
            assert (one.double() - other).norm() <= 2e-2 * other.norm()
        # A sum over rows of numbers of either sign, each off by what rounding made of it.
        slack = (right_reading.pressure / torch.tensor(values)[..., None]).nan_to_num(0.0, 0.0, 0.0).norm()
        assert (found[3].double() - right[3]).norm() <= 5e-2 * torch.maximum(slack, right[3].norm())
        assert (found[3].double() - right[3]).norm() < right[3].norm() / 2
        size = right_reading.pressure.abs().max()
        close(reading.pressure / size, right_reading.pressure / size, rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize("options", [{"attn_mask": torch.ones(150, 150).tril().bool()}, {"softcap": 5.0}])
    def test_what_is_for_the_other_kernels(self, emulator, options):
        operands = three(150, 150)
        (found, _), (right, _) = self.both(operands, draw(7, 1, 2, 150, 64), **options)
        assert not emulator.of_hopper
        for one, other in zip(found, right, strict=True):
            assert (one.double() - other).norm() < 2e-2 * other.norm()

    def test_what_is_marked_in_a_later_head(self, emulator):
        """Lengths that 64 does not divide, several heads, several entries of the batch."""
        operands = three(150, 200, heads=2, batch=2)
        for x in operands[1:]:
            x[1, 1, 100, 3] = math.nan
        grad = draw(7, 2, 2, 150, 64)
        (found, reading), (right, right_reading) = self.both(operands, grad, is_causal=True)
        assert len(emulator.of_hopper) == 3
        for one, other in zip(found, right, strict=True):
            for b in range(2):
                for h in range(2):
                    if (b, h) != (1, 1):
                        assert (one[b, h].double() - other[b, h]).norm() < 2e-2 * other[b, h].norm()
        torch.testing.assert_close(found[0][1, 1, :100].double(), right[0][1, 1, :100], rtol=2e-2, atol=2e-2)
        for x in (found[1], found[2]):
            assert x[1, 1, 150:].abs().max() == 0
        assert torch.equal(reading.gradient_flow.isnan(), right_reading.gradient_flow.isnan())

    @pytest.mark.parametrize(
        "options", [{"window": (20, 0)}, {"is_causal": True}, {"cu_seqlens": torch.tensor([0, 60, 130, 200])}]
    )
    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_no_key_gets_what_is_not_finite_from_rows_that_do_not_see_it(self, options, which):
        operands = three(200, 200, heads=1)
        operands[which][0, 0, 100, 5] = math.nan
        seen = seen_in(call_for(operands, **options))[0, 0]
        broken = seen[:, 100] if which else torch.arange(200) == 100
        clean = ~seen[broken].any(0)
        (found, _), (right, _) = self.both(operands, draw(7, 1, 1, 200, 64), **options)
        assert found[0][0, 0, ~broken].isfinite().all()
        for one, other in zip(found[1:], right[1:], strict=True):
            torch.testing.assert_close(one[0, 0, clean].double(), other[0, 0, clean], rtol=2e-2, atol=2e-2)
        if which == 2:
            # What a value holds is no part of the gradients of values.
            torch.testing.assert_close(found[2].double(), right[2], rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("exponent", [12, 24, 40, 100])
    def test_scores_beside_which_the_logarithm_of_a_sum_is_lost(self, exponent, causal):
        q, k, v = three(150, 150, heads=1)
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        q[..., 0], k[..., 0] = 2.0 ** (exponent // 2), -(2.0 ** (exponent - exponent // 2))
        (found, _), (right, _) = self.both((q, k, v), draw(7, 1, 1, 150, 64), scale=0.125, is_causal=causal)
        assert (found[2].double() - right[2]).norm() < 2e-2 * right[2].norm()

    def test_strong_sinks(self, emulator):
        operands = three(150, 150)
        grad = draw(7, 1, 2, 150, 64)
        self.compare(emulator, operands, grad, sinks=torch.tensor([6.0, 4.0]))

    def test_marked_beyond_the_first_span(self, emulator):
        operands = three(150, 150, heads=13)
        grad = draw(7, 1, 13, 150, 64)
        for x in operands[1:]:
            x[0, 12, 140, 3] = math.nan
        (found, _), (right, _) = self.both(operands, grad, is_causal=True)
        torch.testing.assert_close(found[0][0, 12, :140].double(), right[0][0, 12, :140], rtol=2e-2, atol=2e-2)

    def test_the_first_keys_are_computed_again(self, emulator):
        operands = three(150, 150, heads=1)
        grad = draw(7, 1, 1, 150, 64)
        grad[0, 0, 10, 3] = math.nan
        (found, _), (right, _) = self.both(operands, grad, is_causal=True)
        for one, other in zip(found[1:], right[1:], strict=True):
            torch.testing.assert_close(one[0, 0, 11:].double(), other[0, 0, 11:], rtol=2e-2, atol=2e-2)

    def test_a_gradient_that_the_copy_engine_does_not_take(self, emulator):
        grad = torch.zeros(1, 2, 150, 65, dtype=torch.bfloat16)[..., :64].copy_(draw(7, 1, 2, 150, 64))
        (found, _), (right, _) = self.both(three(150, 150), grad)
        assert len(emulator.of_hopper) == 3
        for one, other in zip(found, right, strict=True):
            assert (one.double() - other).norm() < 2e-2 * other.norm()

    def test_gradients_of_what_is_read_are_for_the_other_kernels(self, emulator):
        operands, grad = three(150, 150), draw(7, 1, 2, 150, 64)
        gradients = []
        for backend, dtype in (("cuda", torch.bfloat16), ("torch", torch.float64)):
            leaves = [x.detach().to(dtype).requires_grad_() for x in operands]
            output, reading = attend(*leaves, backend=backend, differentiable=True)
            ((output * grad.to(dtype)).sum() + 30 * reading.entropy.sum()).backward()
            gradients.append([x.grad.double() for x in leaves])
        assert len(emulator.of_hopper) == 1
        for one, other in zip(*gradients, strict=True):
            assert (one - other).norm() < 3e-2 * other.norm()

    def test_what_the_doctor_looks_at(self, emulator):
        """is taken by the kernels for Hopper, forward and backward."""
        assert _doctor._forward("cuda", "torch", "torch", "cpu", "float16").ok
        assert len(emulator.of_hopper) == 1
        assert _doctor._backward("cuda", "torch", "cpu", "float16").ok
        assert len(emulator.of_hopper) == 4

    def test_one_number_for_all(self, emulator):
        """In the dtype that arrives: a conversion would give each its own place."""
        self.compare(
            emulator, three(150, 150), torch.ones((), dtype=torch.bfloat16).expand(1, 2, 150, 64), is_causal=True
        )
