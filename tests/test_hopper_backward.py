"""The backward pass of the kernels for Hopper, emulated: gradients, gradient flow, what is marked, and no races."""

import math

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from gluon_emulator import Emulator, RaceError
from hopper_cases import call_for, close, draw, in_float64, registers_add_up, seen_in, three

from attemper import attend
from attemper._backends.cuda import _form

HERE = "attemper._backends.cuda."
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
        to_queries = emulator.load(HERE + "_hopper_to_queries")
        self.right, self.right_flow, pull, fields = in_full(call, grad)
        share = fields["largest_weight"] * (1 - fields["sink_mass"])
        given = (fields["max_logit"], fields["largest_weight"], share, pull + shift)
        rows = to_queries.Rows(*(x.float() for x in given))
        assert to_queries.takes(call, grad)
        self.flow = torch.full(call.q.shape[:-1], -7.0) if measured else None
        self.q, self.k, self.v = (torch.full_like(x, 7.0) for x in (call.q, call.k, call.v))
        self.q_flags, self.k_flags = (
            torch.zeros(x.shape[0] * x.shape[1] * -(-x.shape[2] // 64) + 1, dtype=torch.int32) for x in (call.q, call.k)
        )
        to_queries.run(call, grad, rows, self.q if gradient else None, self.flow, self.q_flags)
        if gradient:
            emulator.load(HERE + "_hopper_to_keys").run(call, grad, rows, ranges_of(call), self.k, self.v, self.k_flags)

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
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_flow_alone(emulator, name, head_dim, kv_heads):
    call = call_for(three(200, 330, head_dim, kv_heads=kv_heads, batch=2), enable_gqa=True, **MASKS[name])
    # In use the pull follows from an output that was rounded, and is no more than near the mean.
    Found(emulator, call, arriving(call), shift=0.5, gradient=False).agree_in_flow()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gradients_and_flow(emulator, name, head_dim, kv_heads):
    call = call_for(three(200, 330, head_dim, kv_heads=kv_heads, batch=2), enable_gqa=True, **MASKS[name])
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
    to_queries = emulator.load(HERE + "_hopper_to_queries")
    for gradient in (False, True):
        registers_add_up(to_queries.configuration(head_dim, gradient=gradient))
    registers_add_up(emulator.load(HERE + "_hopper_to_keys").configuration(head_dim))


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
    for seed in range(8):
        Found(Emulator(seed=seed), call, arriving(call)).agree()


@pytest.mark.parametrize("together", [1, 3])
def test_more_heads_than_the_cache_holds(emulator, together, monkeypatch):
    for name in ("_hopper_to_queries", "_hopper_to_keys"):
        monkeypatch.setattr(emulator.load(HERE + name), "together_in_cache", lambda call: together)
    call = call_for(three(200, 260, heads=4), is_causal=True)
    Found(emulator, call, arriving(call)).agree()


def test_operands_as_they_lie(emulator):
    q, k, v = three()
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    call = call_for((q, k, v), is_causal=True)
    Found(emulator, call, arriving(call)).agree()


def test_what_they_take(emulator):
    takes = emulator.load(HERE + "_hopper_to_queries").takes
    call = call_for(three())
    grad = arriving(call)
    assert takes(call, grad)
    assert not takes(call, grad.float())
    assert not takes(call, grad.mT.contiguous().mT)
    for scale in (0.0, -0.1, 2.0**20):
        assert not takes(call_for(three(), scale=scale), grad)
    scales = torch.tensor([0.1, 0.2])
    assert takes(call_for(three(), scale=scales), grad)
    assert not takes(call_for(three(kv_heads=1), scale=scales, enable_gqa=True), grad)
    for options in ({"softcap": 3.0}, {"attn_mask": torch.ones(200, 300)}, {"dropout_p": 0.1, "seed": 1}):
        assert not takes(call_for(three(), **options), grad)


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

    def edit(path, source):
        if path.endswith(module):
            for old, new in zip(changes[::2], changes[1::2], strict=True):
                assert source.count(old) == 1
                source = source.replace(old, new)
        return source

    call = call_for(three(400, 400, heads=1))
    with pytest.raises(RaceError):
        Found(Emulator(seed=1, processors=1, edit=edit), call, arriving(call))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels around it are interpreted on a CPU")
class TestAttend:
    """From end to end, with the kernels that compute marked blocks again."""

    @pytest.fixture(autouse=True)
    def emulated(self, emulator, monkeypatch):
        monkeypatch.setattr(_form, "gluon", lambda name: emulator.load(HERE + name))

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
        assert len(emulator.launches) == 3
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

    def test_an_upstream_gradient_without_places_of_its_own(self, emulator):
        """As that of a sum is: one number for all."""
        self.compare(emulator, three(150, 150), torch.ones(()).expand(1, 2, 150, 64), is_causal=True)

    def test_without_anything_measured(self, emulator):
        operands = three(150, 150)
        grad = draw(7, 1, 2, 150, 64)
        (found, _), (right, _) = self.both(operands, grad, stats="none")
        assert len(emulator.launches) == 3
        for one, other in zip(found, right, strict=True):
            assert (one.double() - other).norm() < 2e-2 * other.norm()

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_what_is_not_finite_stays_where_it_is_seen(self, emulator, value):
        operands = three(150, 150, heads=1)
        for x in operands[1:]:
            x[0, 0, 100, 3] = value
        (found, _), (right, _) = self.both(operands, draw(7, 1, 1, 150, 64), is_causal=True)
        assert len(emulator.launches) == 3
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
        assert len(emulator.launches) == 3
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
        assert len(emulator.launches) == 3
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
        assert not emulator.launches
        for one, other in zip(found, right, strict=True):
            assert (one.double() - other).norm() < 2e-2 * other.norm()
