"""torch.compile: one graph, one operator each way, no recompilation, and the numbers of the eager call."""

import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

from functorch.compile import make_boxed_func, min_cut_rematerialization_partition  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from attemper import AttemperError, Reading, attend, read, scaled_dot_product_attention  # noqa: E402
from attemper._attend import Attended  # noqa: E402
from attemper._backends._operator import RETURNS, Saved, tiles, tiles_backward  # noqa: E402
from attemper._reading import AFTER_BACKWARD, FIELDS  # noqa: E402

TILES, TILES_BACKWARD = torch.ops.attemper.tiles.default, torch.ops.attemper.tiles_backward.default

# Ten pairs of lengths; no two sizes of the first call are equal, or a compiler would take them for one.
LENGTHS = [(11, 17), (12, 23), (30, 19), (17, 11), (64, 40), (5, 100), (129, 7), (3, 600), (200, 513), (16, 16)]

tiled = pytest.mark.parametrize("road", ["cpu", "torch"])
both_backends = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)


class Graphs:
    """aot_eager that keeps what it is given: the graphs of the forward and of the backward pass."""

    def __init__(self):
        self.forward, self.backward = [], []

    def __call__(self, graph, inputs):
        # The partitioner of inductor, which may prefer computing something twice to keeping it.
        compiler = aot_autograd(
            fw_compiler=self._keep(self.forward),
            bw_compiler=self._keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )
        return compiler(graph, inputs)

    @staticmethod
    def _keep(kept):
        def compiler(graph, _inputs):
            kept.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
            return make_boxed_func(graph.forward)

        return compiler

    def check(self, calls=1, *, backward=True):
        (forward,) = self.forward
        assert forward.count(TILES) == calls
        assert forward.count(TILES_BACKWARD) == 0
        if backward:
            (backward,) = self.backward
            assert backward.count(TILES_BACKWARD) == calls
            assert backward.count(TILES) == 0


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def operands(queries=5, keys=7, *, batch=2, heads=4, kv_heads=None, head_dim=8, dtype=torch.float32):
    shapes = ((heads, queries), (kv_heads or heads, keys), (kv_heads or heads, keys))
    return [torch.randn(batch, *shape, head_dim, dtype=dtype).requires_grad_() for shape in shapes]


def leaf(x):
    """A copy that gathers its own gradient."""
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def same(one, two, *, exact=True, what=""):
    """The same structure with the same numbers: to the bit, or to the rounding of a reordered float32 sum."""
    (one, its), (two, other) = pytree.tree_flatten(one), pytree.tree_flatten(two)
    assert its == other, what
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}
    for a, b in zip(one, two, strict=True):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, equal_nan=True, msg=lambda text: f"{what}: {text}", **tolerance)
        else:
            assert a == b, what


def pull(result):
    """A backward pass through everything that has one, each number with a weight of its own."""
    ends = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
    torch.autograd.backward(ends, [torch.linspace(-1, 1.5, x.numel(), dtype=x.dtype).reshape(x.shape) for x in ends])
    return bool(ends)


def check(function, calls, *, backend=None, dynamic=None, exact=True):
    """One graph for all calls; results, gradients and what the backward pass measures as in eager mode."""
    graphs = Graphs()
    fast = compiled(function, graphs if backend is None else backend, dynamic=dynamic)
    backward = False
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n, arguments in enumerate(calls):
            mine, theirs = (tuple(map(leaf, arguments)) for _ in range(2))
            got, wanted = fast(*mine), function(*theirs)
            same(got, wanted, exact=exact, what=f"call {n}")
            backward = pull(got)
            pull(wanted)
            # Again: now with what the backward pass measured.
            same(got, wanted, exact=exact, what=f"call {n} after backward")
            for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                if isinstance(a, torch.Tensor):
                    same(a.grad, b.grad, exact=exact, what=f"call {n}: gradient of operand {place}")
    # The count of a backend would not do: a float argument that cannot stay symbolic makes dynamo start over once.
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    if backend is None:
        graphs.check(backward=backward)


def test_the_check_can_fail():
    with pytest.raises(AssertionError, match="call 0"):
        check(lambda q, k, v: attend(q, k, v).output * (1 + 1e-6 * torch.compiler.is_compiling()), [operands()])
    with pytest.raises(torch._dynamo.exc.RecompileError):
        check(lambda q, k, v, n: attend(q, k, v, softcap=n).output, [(*operands(), 1.0), (*operands(), 2.0)])
    with pytest.raises(ValueError, match="unpack"):
        Graphs().check()


# --- values change, the graph stays -----------------------------------------------------------------------------------

CALLS = {
    "attend": attend,
    "bottom-right": lambda q, k, v: attend(q, k, v, is_causal=True, query_offset="bottom-right"),
    "read": lambda q, k, v: read(q, k, differentiable=True),
    "sdpa causal": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_for_all_values(name):
    check(CALLS[name], [operands() for _ in range(20)])


def packed(length):
    return torch.tensor([0, *sorted(torch.randint(0, length, (2,)).tolist()), length])


# What may come with q, k and v, and how it is drawn for some lengths.
WITH = {
    "key_lengths": (
        lambda q, k, v, n: attend(q, k, v, key_lengths=n),
        lambda queries, keys: torch.randint(0, keys + 1, (2,)),
    ),
    "query_offset": (
        lambda q, k, v, n: attend(q, k, v, is_causal=True, query_offset=n),
        lambda queries, keys: torch.randint(-queries, keys, (2,)),
    ),
    "bool mask": (
        lambda q, k, v, m: attend(q, k, v, attn_mask=m),
        lambda queries, keys: torch.rand(2, 1, queries, keys) > 0.5,
    ),
    "bias": (
        lambda q, k, v, m: attend(q, k, v, attn_mask=m),
        lambda queries, keys: torch.randn(4, queries, keys).requires_grad_(),
    ),
    "sdpa mask": (
        lambda q, k, v, m: scaled_dot_product_attention(q, k, v, m),
        lambda queries, keys: torch.randn(queries, keys),
    ),
    "cu_seqlens": (
        lambda q, k, v, a, b: attend(q, k, v, is_causal=True, cu_seqlens=(a, b)),
        lambda queries, keys: [packed(queries), packed(keys)],
    ),
    "scale": (
        lambda q, k, v, s: attend(q, k, v, scale=s, differentiable=True),
        lambda queries, keys: torch.rand(()).requires_grad_(),
    ),
    "scale per head": (
        lambda q, k, v, s: attend(q, k, v, scale=s),
        lambda queries, keys: torch.rand(4).requires_grad_(),
    ),
    "sinks": (
        lambda q, k, v, s: attend(q, k, v, sinks=s),
        lambda queries, keys: torch.randn(4).requires_grad_(),
    ),
}


def drawn(name, queries=5, keys=7, **options):
    extra = WITH[name][1](queries, keys)
    return (*operands(queries, keys, **options), *(extra if isinstance(extra, list) else [extra]))


@pytest.mark.parametrize("name", WITH)
def test_one_graph_for_all_values_of(name):
    check(WITH[name][0], [drawn(name) for _ in range(20)])


def test_a_number_as_scale():
    """A first value is baked in, as dynamo does with every float; the second makes it an input for good."""
    fast = compiled(lambda q, k, v, scale: attend(q, k, v, scale=scale).output)
    for i in range(20):
        q, k, v = operands()
        same(fast(q, k, v, 0.1 + 0.05 * i), attend(q, k, v, scale=0.1 + 0.05 * i).output)
    assert counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()
    counters.clear()
    # With dynamic=True it is an input from the start.
    calls = [(*operands(), 0.07 * i) for i in range(20)]
    check(lambda q, k, v, scale: attend(q, k, v, scale=scale), calls, dynamic=True)


# --- lengths change, the graph stays ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bottom-right", "read", "sdpa causal"])
def test_one_graph_for_all_lengths(name):
    check(CALLS[name], [operands(*lengths) for lengths in LENGTHS], dynamic=True)


@pytest.mark.parametrize("name", ["key_lengths", "bias", "cu_seqlens"])
def test_one_graph_for_all_lengths_with(name):
    check(WITH[name][0], [drawn(name, *lengths) for lengths in LENGTHS], dynamic=True)


def test_one_graph_for_all_lengths_of_grouped_heads():
    def grouped(q, k, v, lengths, bias):
        return attend(q, k, v, is_causal=True, enable_gqa=True, key_lengths=lengths, attn_mask=bias, scale="dk")

    calls = [
        (
            *operands(queries, keys, heads=6, kv_heads=2),
            torch.randint(0, keys + 1, (2,)),
            torch.randn(queries, keys).requires_grad_(),
        )
        for queries, keys in LENGTHS
    ]
    check(grouped, calls, dynamic=True)


@pytest.mark.parametrize("rank", [2, 5])
def test_one_graph_for_all_lengths_of_rank(rank):
    def shaped(x):
        return leaf((x[0, 0] if rank == 2 else x[:, None].expand(-1, 3, -1, -1, -1)).detach().requires_grad_())

    calls = [tuple(map(shaped, operands(*lengths))) for lengths in LENGTHS]
    check(lambda q, k, v: attend(q, k, v, is_causal=True), calls, dynamic=True)


def test_one_graph_for_all_batches_and_offsets():
    calls = [(*operands(*n, batch=3 + i), 13 + 7 * i) for i, n in enumerate(LENGTHS)]
    check(lambda q, k, v, offset: attend(q, k, v, is_causal=True, query_offset=offset), calls, dynamic=True)


def test_lengths_become_dynamic_by_themselves():
    """Without dynamic=True the first length is static and the second one makes it symbolic."""
    fast = compiled(lambda q, k, v: attend(q, k, v, is_causal=True).output)
    for length in (11, 17, 23, 40, 129, 600):
        q, k, v = operands(length, length)
        same(fast(q, k, v), attend(q, k, v, is_causal=True).output)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("queries", [8, 300])
@pytest.mark.parametrize("keys", [8, 1200])
def test_one_node_whatever_the_length(queries, keys):
    # Far beyond one tile of 128 queries and 512 keys.
    graphs = Graphs()
    q, k, v = operands(queries, keys, heads=1, batch=1)
    compiled(lambda q, k, v: attend(q, k, v, is_causal=True).output, graphs)(q, k, v).sum().backward()
    graphs.check()
    assert len(graphs.forward[0]) + len(graphs.backward[0]) < 60


# --- every option -----------------------------------------------------------------------------------------------------

OPTIONS = {
    "window": {"window": (2, None), "is_causal": True, "query_offset": 2},
    "key_lengths as a list": {"key_lengths": [3, 7]},
    "query_offset as a list": {"is_causal": True, "query_offset": [3, -1]},
    "cu_seqlens as lists": {"cu_seqlens": ([0, 2, 5], [0, 3, 7])},
    "scale as a list": {"scale": [0.1, 0.2, 0.3, 0.4]},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout_p": 0.3, "seed": 7},
    "differentiable": {"is_causal": True, "differentiable": True},
    "several": {"stats": ("max_logit", "normalized_entropy", "pressure")},
    "no statistics": {"stats": "none"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option(name):
    check(lambda q, k, v: attend(q, k, v, **OPTIONS[name]), [operands() for _ in range(3)])


def test_options_with_symbolic_sizes():
    """Lists have the lengths they have; the sizes that they are held against are symbols."""

    def function(q, k, v):
        return attend(q, k, v, key_lengths=[3, 7], window=(2, 1), query_offset=[1, 0], scale=[0.1, 0.2, 0.3, 0.4])

    check(function, [operands() for _ in range(3)], dynamic=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype(dtype):
    check(lambda q, k, v: attend(q, k, v, is_causal=True), [operands(dtype=dtype) for _ in range(3)])


def test_parameters_of_a_module():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.sinks, self.scale = nn.Parameter(torch.randn(4)), nn.Parameter(torch.rand(4))

        def forward(self, q, k, v):
            return attend(q, k, v, sinks=self.sinks, scale=self.scale, softcap=3.0)

    layer = Layer()
    gradients = []
    for call in (compiled(layer), layer):
        layer.zero_grad()
        torch.manual_seed(1)
        pull(call(*operands()))
        gradients.append([leaf(x.grad) for x in layer.parameters()])
    same(*gradients)


# --- dropout ----------------------------------------------------------------------------------------------------------


@both_backends
def test_dropout_draws_anew_on_every_call(backend):
    q, k, v = operands(16, 16)
    fast = compiled(lambda q, k, v: attend(q, k, v, dropout_p=0.5).output, backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.manual_seed(1)
        first = [fast(q, k, v) for _ in range(5)]
        torch.manual_seed(1)
        again = [fast(q, k, v) for _ in range(5)]
    same(first, again)
    assert not any(torch.equal(a, b) for i, a in enumerate(first) for b in first[:i])
    if backend == "aot_eager":
        # inductor has a generator of its own, unless torch._inductor.config.fallback_random.
        torch.manual_seed(1)
        same(first, [attend(q, k, v, dropout_p=0.5).output for _ in range(5)])


@both_backends
def test_dropout_drops_the_same_weights_backward(backend):
    q, k = (torch.zeros(1, 1, 8, 4) for _ in range(2))
    v = torch.eye(8)[None, None].requires_grad_()
    output = compiled(lambda q, k, v: attend(q, k, v, dropout_p=0.5).output, backend)(q, k, v)
    # With v the identity the output is the weights: row i of dv is the sum over the queries of what they kept of key i.
    output.sum().backward()
    torch.testing.assert_close(v.grad[0, 0, :, 0], output[0, 0].sum(0).detach())


def test_one_graph_for_all_seeds():
    calls = [(*operands(), 5 + i) for i in range(6)]
    check(lambda q, k, v, seed: attend(q, k, v, dropout_p=0.3, seed=seed), calls, dynamic=True)


# --- the Reading inside and outside -----------------------------------------------------------------------------------


@both_backends
def test_the_reading_comes_out_whole(backend):
    q, k, v = operands()
    got = compiled(lambda q, k, v: attend(q, k, v, is_causal=True), backend)(q, k, v)
    assert type(got) is Attended
    assert type(got.reading) is Reading
    wanted = attend(*map(leaf, (q, k, v)), is_causal=True)
    for name in FIELDS:
        same(getattr(got.reading, name), getattr(wanted.reading, name), what=name)
        assert (getattr(got.reading, name) is None) == (name in AFTER_BACKWARD), name
    assert repr(got.reading) == repr(wanted.reading)
    pull(got)
    pull(wanted)
    for name in AFTER_BACKWARD:
        assert getattr(got.reading, name).shape == (2, 4, 5)
        same(getattr(got.reading, name), getattr(wanted.reading, name), what=name)
    assert got.reading.to_dict() == wanted.reading.to_dict()


@both_backends
def test_a_reading_alone(backend):
    check(lambda q, k: read(q, k, is_causal=True), [operands()[:2] for _ in range(3)], backend=backend)


@both_backends
def test_the_reading_in_the_loss(backend):
    def loss(q, k, v):
        output, reading = attend(q, k, v, is_causal=True, differentiable=True)
        regular = reading.entropy.mean() + reading.logsumexp.square().mean() - reading.flow.sum() / 7
        return output.square().sum() + regular + 0.1 * reading.effective_keys.mean(), reading

    check(loss, [operands() for _ in range(3)], backend=backend, exact=False)


def test_the_reading_in_arithmetic():
    def hottest(q, k, v):
        output, reading = attend(q, k, v, is_causal=True, stats=("max_logit", "normalized_entropy", "visible_keys"))
        assert reading.entropy is not None
        assert reading.pressure is None
        assert reading.collision is None
        clip = (3 / reading.max_logit.amax(-1)).clamp(max=1)[..., None, None]
        return output * clip, reading.normalized_entropy.nanmean(-1), reading.visible_keys + 1, reading.shape

    check(hottest, [operands() for _ in range(3)])


def test_nothing_is_differentiable_unless_asked():
    reading = compiled(lambda q, k, v: attend(q, k, v).reading)(*operands())
    assert not any(x.requires_grad for x in pytree.tree_leaves(reading) if x is not None)


class Block(nn.Module):
    """A pre-norm transformer block that returns what its attention measured."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        output, reading = attend(*qkv, is_causal=True, differentiable=True)
        x = x + self.out(output.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x)), reading


class Model(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        readings = []
        for block in self.blocks:
            x, reading = block(x)
            readings.append(reading)
        return x.square().mean() - 0.01 * sum(reading.entropy.mean() for reading in readings), readings


@pytest.mark.parametrize(("backend", "depth"), [(None, 2), ("inductor", 1)])
def test_a_model(backend, depth):
    model = Model(depth)
    graphs = Graphs()
    fast = compiled(model, backend or graphs)
    for _ in range(3):
        x = torch.randn(2, 11, 16)
        found = []
        for call in (fast, model):
            model.zero_grad()
            loss, readings = call(x)
            assert all(reading.pressure is None and reading.gradient_flow is None for reading in readings)
            loss.backward()
            assert all(reading.pressure.shape == (2, 4, 11) for reading in readings)
            found.append((leaf(loss), readings, [leaf(p.grad) for p in model.parameters()]))
        for a, b in zip(*found, strict=True):
            same([leaf(x) for x in pytree.tree_leaves(a)], [leaf(x) for x in pytree.tree_leaves(b)], exact=False)
    assert counters["stats"]["unique_graphs"] == 1
    if backend is None:
        graphs.check(depth)


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    q, k, v = operands()
    with mode():
        got = compiled(lambda q, k, v: attend(q, k, v, is_causal=True))(q, k, v)
        same(got, attend(q, k, v, is_causal=True))
    assert not got.output.requires_grad
    assert got.reading.pressure is None


def test_no_grad_inside():
    def function(q, k, v):
        with torch.no_grad():
            temperature = read(q, k).entropy.mean()
        return attend(q, k, v, scale=temperature).output

    graphs = Graphs()
    q, k, v = operands()
    pull(compiled(function, graphs)(q, k, v))
    assert graphs.forward[0].count(TILES) == 2
    assert graphs.backward[0].count(TILES_BACKWARD) == 1


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside):
    def within(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attend(q, k, v, is_causal=True)

    def plain(q, k, v):
        return attend(q, k, v, is_causal=True)

    if inside:
        check(within, [operands() for _ in range(3)])
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            check(plain, [operands() for _ in range(3)])
    output, reading = within(*operands())
    assert (output.dtype, reading.entropy.dtype) == (torch.bfloat16, torch.float32)


def test_checkpoint():
    def layer(q, k, v):
        output, reading = attend(q.sin(), k, v, is_causal=True, differentiable=True)
        return output.cos(), reading.entropy

    check(
        lambda q, k, v: checkpoint(layer, q, k, v, use_reentrant=False),
        [operands() for _ in range(3)],
        backend="aot_eager",
    )


def test_checkpoint_of_dropout():
    """The recomputed call must drop what the first one dropped."""

    def layer(q, k, v):
        return attend(q.sin(), k, v, dropout_p=0.5).output

    grads = []
    for function in (layer, lambda *x: checkpoint(layer, *x, use_reentrant=False)):
        torch.manual_seed(3)
        q, k, v = operands()
        pull(compiled(function)(q, k, v))
        grads.append([x.grad for x in (q, k, v)])
    same(*grads)


# --- the operators ----------------------------------------------------------------------------------------------------

EVERYTHING = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

# q, k, v with grouped heads; mask, first, stop, scale, sinks, seed, softcap, dropout_p; then the numbers
BAND = {"a band and a number": ((-2, 1), 1.0)}
ARGUMENTS = {
    "plain": (None, None, None, torch.ones(1, 1), None, None, None, 0.0),
    "a band and a number": (None, None, None, torch.ones(1, 1), None, None, None, 0.0),
    "bias": (torch.randn(1, 4, 5, 7), None, None, torch.rand(1, 4), None, None, None, 0.0),
    "everything": (
        torch.rand(2, 1, 5, 7) > 0.2,
        torch.zeros(2, 5, dtype=torch.int64),
        torch.tensor([[1, 2, 3, 4, 5], [7, 7, 7, 7, 0]]),
        torch.rand(1, 1),
        torch.randn(1, 4),
        torch.tensor(5),
        2.0,
        0.3,
    ),
}


def arguments(name, *, gradients):
    def own(x):
        return x.clone().requires_grad_(gradients and x.is_floating_point()) if isinstance(x, torch.Tensor) else x

    q, k, v = operands(kv_heads=2)
    return tuple(
        map(own, (q.detach(), k.detach(), v.detach(), *ARGUMENTS[name], q.shape[0], *BAND.get(name, (None, None))))
    )


@tiled
@pytest.mark.parametrize(("name", "values"), [*((name, True) for name in ARGUMENTS), ("everything", False)])
def test_opcheck_tiles(name, values, road):
    given = arguments(name, gradients=False)
    given = given if values else (*given[:2], None, *given[3:])
    stats = "entropy,logsumexp,output_norm,pressure,visible_keys"
    torch.library.opcheck(tiles, (*given, stats, road), test_utils=EVERYTHING)


# torch 2.15 looks at the gradients of what it has just computed.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@tiled
@pytest.mark.parametrize("name", ARGUMENTS)
def test_opcheck_tiles_with_gradients(name, road):
    given = arguments(name, gradients=True)
    # It differentiates every output, so that all that have a gradient must be there.
    stats = "collision,entropy,expected_score,largest_weight,logsumexp,max_logit"
    torch.library.opcheck(tiles, (*given, stats, road), test_utils=EVERYTHING)


@tiled
@pytest.mark.parametrize("measuring", [True, False])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_opcheck_tiles_backward(name, measuring, road):
    given = arguments(name, gradients=False)
    stats = "collision,expected_score,largest_weight,logsumexp,max_logit" + (",pressure" if measuring else "")
    found = dict(zip(RETURNS, tiles(*given, stats, road), strict=True))
    saved = [found[x] for x in Saved._fields]
    grads = [torch.randn_like(found["output"]), *(torch.randn_like(found["logsumexp"]) for _ in range(4))]
    bias_too = name == "bias"
    # Where it measures, the operator writes into `gradients` behind the back of its schema, as its docstring says.
    which = [x for x in EVERYTHING if x != "test_schema" or not measuring]
    torch.library.opcheck(tiles_backward, (*given, *saved, *grads, bias_too, True, road), test_utils=which)


# --- export -----------------------------------------------------------------------------------------------------------


class Exported(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, q, k, v):
        return attend(q, k, v, is_causal=True, window=(9, None), scale=self.scale)


@pytest.mark.parametrize("dynamic", [False, True])
def test_export(dynamic):
    module = Exported()
    example = tuple(x.detach() for x in operands(11, 17))
    axis = {2: torch.export.Dim.DYNAMIC}
    program = torch.export.export(module, example, strict=False, dynamic_shapes=(axis,) * 3 if dynamic else None)
    assert [node.target for node in program.graph.nodes].count(TILES) == 1
    again = program.module()
    for queries, keys in LENGTHS if dynamic else [(11, 17)] * 3:
        given = [x.detach() for x in operands(queries, keys)]
        got, wanted = again(*given), module(*given)
        assert type(got) is Attended
        assert type(got.reading) is Reading
        same(got.output, wanted.output)
        for name in FIELDS:
            same(getattr(got.reading, name), getattr(wanted.reading, name), what=name)


# --- trees ------------------------------------------------------------------------------------------------------------


def test_a_reading_is_a_tree():
    attended = attend(*operands())
    for after in (False, True):
        if after:
            pull(attended)
        leaves, spec = pytree.tree_flatten(attended)
        for copied in (pytree.tree_unflatten(leaves, spec), pytree.tree_map(lambda x: x, attended)):
            assert (type(copied), type(copied.reading)) == (Attended, Reading)
            assert (copied.reading.backend, copied.reading.rows) == ("cpu", (2, 4, 5))
            same(copied, attended)
            for name in FIELDS:
                same(getattr(copied.reading, name), getattr(attended.reading, name), what=name)
            assert (copied.reading.pressure is not None) == after
    doubled = pytree.tree_map(lambda x: None if x is None else x * 2, attended)
    same(doubled.output, 2 * attended.output)
    for name in ("entropy", "visible_keys", "output_norm", *AFTER_BACKWARD):
        same(getattr(doubled.reading, name), 2 * getattr(attended.reading, name), what=name)
    nothing = pytree.tree_map(lambda x: x, attend(*operands(), stats="none"))
    assert all(getattr(nothing.reading, name) is None for name in FIELDS)


# --- errors -----------------------------------------------------------------------------------------------------------

MISTAKES = {
    "shape": lambda q, k, v: attend(q, k[..., :3], v).output,
    "dtype": lambda q, k, v: attend(q, k, v.double()).output,
    "mask": lambda q, k, v: attend(q, k, v, attn_mask=q).output,
    "stats": lambda q, k, v: attend(q, k, v, stats="entropi").output,
    "both masks": lambda q, k, v: scaled_dot_product_attention(q, k, v, q, is_causal=True),
}


# Where tracing stops, dynamo looks at the gradients of what it hands on.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", MISTAKES)
def test_errors_stay_readable(name):
    given = operands()
    with pytest.raises(AttemperError) as wanted:
        MISTAKES[name](*given)
    # Not fullgraph, which answers every exception raised while tracing with one of its own.
    with pytest.raises(type(wanted.value)) as got:
        torch.compile(MISTAKES[name], backend="aot_eager")(*given)
    assert str(got.value).startswith(str(wanted.value))


# --- the first call ---------------------------------------------------------------------------------------------------


def test_the_first_call_ever_may_be_compiled():
    script = """
        import sys, torch, attemper
        assert "attemper._backends.cpu" not in sys.modules
        q, k, v = (torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3))
        f = torch.compile(lambda *x: attemper.attend(*x, is_causal=True), backend="aot_eager", fullgraph=True)
        output, reading = f(q, k, v)
        output.sum().backward()
        wanted = attemper.attend(q, k, v, is_causal=True)
        assert torch.equal(output, wanted.output) and torch.equal(reading.entropy, wanted.reading.entropy)
        assert reading.pressure.shape == (1, 2, 6)
        print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
