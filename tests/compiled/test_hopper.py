"""The kernels for Hopper, compiled and run on the CPU: what they compute and mark, and that nobody reads too early."""

import math

import pytest
import torch

from attemper import attend, read

pytest.importorskip("triton.experimental.gluon")
from hopper_cases import call_for, close, draw, in_float64, registers_add_up, three
from ptx_launch import Emulator

from attemper._attend import gradient_flow_beside
from attemper._backends._operator import COUNTS, empty_output
from attemper._backends.cuda import _cudnn, _launch, _moments

FIELDS = (
    "logsumexp",
    "max_logit",
    "largest_weight",
    "expected_score",
    "entropy",
    "collision",
    "output_norm",
    "score_mean",
    "score_std",
    "max_qk",
    "first_key_weight",
    "sink_mass",
    "visible_keys",
    "nonfinite",
)
LEVELS = {
    0: ("logsumexp",),
    1: ("logsumexp", "max_logit", "largest_weight"),
    2: ("entropy", "expected_score", "collision", "output_norm"),
    3: FIELDS,
}


@pytest.fixture
def emulator(request):
    """The order of events is another in each test, and the same every time."""
    return Emulator(seed=request.node.name)


@pytest.fixture
def hopper(emulator):
    return emulator.load("_hopper")


class Found:
    """What a forward pass leaves; NaN where nobody wrote."""

    def __init__(self, hopper, call, names=FIELDS, *, wide=False, output=None, sums=None):
        rows = call.q.shape[:-1]
        names = [name for name in names if name != "output_norm" or call.v is not None]
        if not _launch._begins_at_first_key(call):
            names = [name for name in names if name != "first_key_weight"]
        self.fields = {
            name: torch.full(rows, -7, dtype=torch.int64) if name in COUNTS else torch.full(rows, math.nan)
            for name in names
        }
        self.output = self.wide = None
        if call.v is not None:
            self.output = empty_output(call, call.q.dtype) if output is None else output
            self.output.fill_(math.nan)
            if wide:
                self.wide = torch.empty_strided(self.output.shape, self.output.stride()).fill_(math.nan)
        blocks = -(-rows[2] // 64)
        marks = torch.zeros(rows[0] * rows[1] * blocks + 1, dtype=torch.int32)
        assert hopper.takes(call)
        hopper.forward(call, self.output, self.wide, self.fields, marks, sums)
        self.flags = marks[:-1].view(rows[0], rows[1], blocks)

    def agree(self, call, *, ordinary=True):
        """All but what is marked is right, and of ordinary numbers nothing is marked."""
        output, fields, there = in_float64(call)
        assert ((self.flags == 0) | (self.flags == 1)).all()
        good = (self.flags == 0).repeat_interleave(64, 2)[..., : call.q.shape[2]]
        assert good.any()
        if ordinary:
            assert good.all()
        # The weights by which values are multiplied have 16 bits.
        digits = 2e-2 if call.q.dtype == torch.bfloat16 else 3e-3
        for name, found in self.fields.items():
            rtol = digits / 2 if name == "output_norm" else 1e-4
            close(found[good], fields[name][good], rtol=rtol, atol=3e-5, name=name)
        if output is not None:
            for found in (self.output, self.wide):
                if found is not None:
                    close(found[good], output[good], rtol=digits, atol=digits / 5, name="output")
                    assert not found[good & ~there].any()
        return self


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("level", LEVELS)
def test_levels(hopper, level, head_dim, options):
    operands = three(200, 420, head_dim)
    for kept in (operands, operands[:2])[: 1 + (level > 1)]:
        call = call_for(kept, **options)
        Found(hopper, call, LEVELS[level], wide=level == 1).agree(call)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_row_that_sees_one_key(hopper, head_dim):
    """Has nothing to decide, and that exactly: approximate logarithms must not show."""
    call = call_for([3 * x for x in three(130, 140, head_dim)], window=(0, 0))
    found = Found(hopper, call).agree(call).fields
    for name, right in {"entropy": 0, "collision": 1, "largest_weight": 1, "score_std": 0, "visible_keys": 1}.items():
        assert (found[name] == right).all(), name


def test_no_field_at_all(hopper):
    call = call_for(three())
    Found(hopper, call, ()).agree(call)


@pytest.mark.parametrize("first", range(3))
def test_some_fields_and_no_other(hopper, first):
    """What nobody asked for has no memory to be written to."""
    call = call_for(three(130, 140), is_causal=True)
    Found(hopper, call, FIELDS[first::3]).agree(call)


LENGTHS = [(64, 64), (65, 127), (191, 128), (192, 129), (193, 383), (128, 640), (385, 64), (129, 700)]


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_lengths(hopper, queries, keys):
    operands = three(queries, keys, 128 if queries % 3 else 64)
    for options in ({}, {"is_causal": True, "query_offset": "bottom-right"}):
        call = call_for(operands, **options)
        # Rows before the first key see none.
        Found(hopper, call).agree(call)


HIDDEN = {
    "a window": {"window": (20, 3)},
    "a window to the left": {"window": (150, None)},
    "a window to the right": {"window": (None, 140)},
    "the own key alone": {"window": (0, 0)},
    "a causal window": {"is_causal": True, "window": (130, 0)},
    "beyond the keys": {"window": (3, 4), "query_offset": 2000},
    "in part beyond the keys": {"window": (30, 4), "query_offset": 200},
    "before the keys": {"is_causal": True, "query_offset": -100},
    "keys end at a tile": {"is_causal": True, "query_offset": 127},
    "key lengths": {"key_lengths": torch.tensor([0, 41, 300])},
    "key lengths that end at tiles": {"key_lengths": torch.tensor([128, 256, 1]), "is_causal": True},
    "offsets": {"query_offset": torch.tensor([-50, 0, 130]), "is_causal": True},
    "offsets and lengths": {
        "query_offset": torch.tensor([5, 100, 60]),
        "window": (40, 10),
        "key_lengths": torch.tensor([300, 150, 0]),
    },
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_keys(hopper, name, head_dim):
    operands = three(280, 300, head_dim, batch=3, heads=1)
    for kept in (operands, operands[:2])[: 1 + (head_dim == 64)]:
        call = call_for(kept, **HIDDEN[name])
        Found(hopper, call).agree(call)


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_keys_in_tiles_for_many(hopper, name, monkeypatch):
    """Which are of 128 keys, and the first is looked at in halves."""
    monkeypatch.setattr(hopper, "MANY_KEYS", 0)
    call = call_for(three(280, 300, 128, batch=3, heads=1), **HIDDEN[name])
    Found(hopper, call).agree(call)


@pytest.mark.parametrize("which", ["first", "stop", "both", "one for all entries"])
def test_bounds_of_each_row(hopper, which):
    """As packed sequences have them: neither end moves evenly, and some rows see nothing."""
    call = call_for(three(200, 400, batch=2))
    first, stop = (torch.randint(-5, 410, (2, 200), generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    stop[0, 64:128] = first[0, 64:128]
    if which == "one for all entries":
        first, stop = first[:1], stop[1:].expand(2, 200)
    call = call._replace(first=None if which == "stop" else first, stop=None if which == "first" else stop)
    Found(hopper, call).agree(call)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_that_nobody_reads(hopper, head_dim):
    """They lie between those of two consumers, and take their places in the rings all the same."""
    operands = three(192, 1000, head_dim, heads=1)
    first = torch.tensor([[0, 900, 300]]).repeat_interleave(64, 1)
    for kept in (operands, operands[:2]):
        call = call_for(kept)._replace(first=first, stop=first + 60)
        Found(hopper, call).agree(call)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("keys", [64, 65, 128, 190, 192, 250, 256, 300, 384])
def test_read_of_any_number_of_tiles(hopper, keys, head_dim):
    """The first and the last are by themselves, the others go in pairs, and one that is left over does not."""
    call = call_for(three(130, keys, head_dim)[:2])
    Found(hopper, call).agree(call)


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("more", range(0, 192, 32))
def test_read_of_pairs_between_ends(hopper, more, level):
    """Tiles that all rows see, in pairs or not, with others above and below them."""
    window = (400 + more, 230)
    call = call_for(three(200, 1300, heads=1)[:2], window=window, query_offset=torch.tensor([560]))
    Found(hopper, call, LEVELS[level]).agree(call)
    call = call_for(three(200, 600 + more, heads=1)[:2], is_causal=True, query_offset="bottom-right")
    Found(hopper, call, LEVELS[level]).agree(call)


@pytest.mark.parametrize(("head_dim", "values"), [(64, False), (64, True), (128, True)])
@pytest.mark.parametrize("keys", [150, 300, 512])
def test_moments_from_a_table(emulator, head_dim, values, keys, monkeypatch):
    """Without a block being marked, which is how they would be right after all."""
    emulator.pretend(monkeypatch)
    hopper = emulator.load("_hopper")
    q, k, v = three(200, keys, head_dim, heads=4, kv_heads=2, batch=2)
    k = k + torch.linspace(-1, 1, head_dim).to(k.dtype)
    call = call_for((q, k, v)[: 2 + values], enable_gqa=True)
    assert hopper.takes_sums(call)
    Found(hopper, call, sums=_moments.sums_of(call)).agree(call)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_read_of_one_tile(hopper, head_dim):
    """It is the first, from which references come, and the last."""
    call = call_for(three(128, 300, head_dim)[:2], key_lengths=[64])
    Found(hopper, call).agree(call)
    first, stop = (torch.full((1, 128), n) for n in (64, 128))
    call = call_for(three(128, 300, head_dim)[:2])._replace(first=first, stop=stop, band=None)
    Found(hopper, call).agree(call)


def test_packed_sequences(hopper):
    call = call_for(three(300, 300), cu_seqlens=[0, 60, 60, 188, 300], is_causal=True)
    Found(hopper, call).agree(call)


OPTIONS = {
    "sinks": {"sinks": torch.tensor([[0.5, -math.inf, 3.0, -2.0]])},
    "sinks of each entry": {"sinks": draw(5, 2, 4, dtype=torch.float32)},
    "sinks, one for each entry": {"sinks": torch.tensor([[1.0], [-1.0]])},
    "a scale per head": {"scale": torch.tensor([[0.3, 0.01, 0.5, 0.1]])},
    "a scale per entry": {"scale": torch.tensor([[0.3], [0.05]])},
    "a scale for each": {"scale": torch.tensor([[0.3, 0.1, 0.2, 0.05], [0.15, 0.02, 0.4, 0.125]])},
    "a scale": {"scale": torch.tensor([[0.7]])},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(hopper, name, causal):
    call = call_for(three(130, 150, heads=4, batch=2), is_causal=causal)._replace(**OPTIONS[name])
    Found(hopper, call).agree(call)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_grouped_heads(hopper, kv_heads, dtype):
    operands = three(70, 200, 128, heads=6, kv_heads=kv_heads, batch=2, dtype=dtype)
    call = call_for(operands, enable_gqa=True, is_causal=True, query_offset=100)
    Found(hopper, call).agree(call)


@pytest.mark.parametrize("together", [1, 2, 5])
def test_more_heads_than_the_cache_holds(hopper, together, monkeypatch):
    """The order of causal items, which begin with the last rows of some heads."""
    monkeypatch.setattr(hopper, "together_in_cache", lambda call: together)
    call = call_for(three(400, 400, heads=5), is_causal=True)
    Found(hopper, call).agree(call)


@pytest.mark.parametrize("processors", [1, 2, 132])
def test_more_and_fewer_processors_than_items(processors):
    emulator = Emulator(processors=processors)
    call = call_for(three(450, 200, heads=2))
    Found(emulator.load("_hopper"), call).agree(call)
    # Three consumers: 192 rows are an item.
    assert [programs for _, programs in emulator.launches] == [min(processors, 6)]


@pytest.mark.parametrize("causal", [False, True])
def test_many_orders_of_events(causal):
    """All but the sums are the same, bit by bit, whoever is first."""
    call = call_for(three(330, 700, heads=1), is_causal=causal, query_offset=300)
    results = []
    for seed in range(5):
        hopper = Emulator(seed=seed, processors=2).load("_hopper")
        results.append(Found(hopper, call))
    results[0].agree(call)
    for other in results[1:]:
        assert torch.equal(other.output, results[0].output)
        assert all(torch.equal(x, results[0].fields[name]) for name, x in other.fields.items())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_operands_as_they_lie(hopper, head_dim):
    whole = draw(1, 2, 150, 3, 3 * head_dim)
    q, k, v = whole.transpose(1, 2).chunk(3, -1)
    call = call_for((q, k, v))
    assert call.q.stride() == q.stride()
    found = Found(hopper, call, wide=True).agree(call)
    assert found.output.stride(1) < found.output.stride(2)
    shared = draw(4, 1, 1, 150, head_dim).expand(2, 3, 150, head_dim)
    # What one entry and one head share has a stride of 0, which the copy engine refuses.
    assert not hopper.takes(call._replace(k=shared, v=shared))
    one = draw(4, 1, 150, head_dim).as_strided((1, 1, 150, head_dim), (7, 3, head_dim, 1))
    call = call._replace(q=call.q[:1, :1], k=one, v=one)
    Found(hopper, call).agree(call)


@pytest.mark.parametrize("wide", [False, True])
def test_an_output_that_the_copy_engine_does_not_take(hopper, wide):
    call = call_for(three(130, 140))
    output = torch.empty(1, 2, 130, 65, dtype=torch.bfloat16)[..., :64]
    assert not hopper.copyable(output)
    found = Found(hopper, call, wide=wide, output=output).agree(call)
    assert found.output is output


def test_rows_of_an_output_that_are_apart(hopper):
    call = call_for(three(130, 140))
    memory = torch.full((1, 2, 140, 192), 7.0, dtype=torch.bfloat16)
    Found(hopper, call, output=memory[:, :, :130, 64:128]).agree(call)
    assert (memory[:, :, 130:] == 7).all()
    assert (memory[..., :64] == 7).all()
    assert (memory[..., 128:] == 7).all()


def test_float16(hopper):
    for options in ({}, {"is_causal": True}):
        call = call_for(three(dtype=torch.float16), **options)
        Found(hopper, call, wide=True).agree(call)


class TestMarks:
    """Where the kernel knows that it cannot be right, and nowhere else."""

    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_query(self, hopper, value, level):
        q, k, v = three(200, 150)
        q[0, 1, 70, 3] = value
        call = call_for((q, k, v))
        found = Found(hopper, call, LEVELS[level])
        assert found.flags.tolist() == [[[0, 0, 0, 0], [0, 1, 0, 0]]]
        found.agree(call, ordinary=False)

    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_key(self, hopper, value, level):
        q, k, v = three(200, 150)
        k[0, 1, 130, 3] = value
        call = call_for((q, k, v), is_causal=True)
        found = Found(hopper, call, LEVELS[level])
        assert found.flags.tolist() == [[[0, 0, 0, 0], [0, 0, 1, 1]]]
        found.agree(call, ordinary=False)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_value(self, hopper, value):
        q, k, v = three(200, 150)
        v[0, 1, 130, 3] = value
        call = call_for((q, k, v), is_causal=True)
        found = Found(hopper, call)
        assert found.flags.tolist() == [[[0, 0, 0, 0], [0, 0, 1, 1]]]
        found.agree(call, ordinary=False)

    @pytest.mark.parametrize("level", LEVELS)
    def test_a_score_of_minus_infinity(self, hopper, level):
        """Its weight is 0: only sums of p·x mind."""
        q, k, v = three(200, 150)
        q = q.abs() + 0.1
        k[0, 1, 10, 3] = -math.inf
        call = call_for((q, k, v))
        found = Found(hopper, call, LEVELS[level])
        marked = level >= 2
        assert found.flags.tolist() == [[[0] * 4, [int(marked)] * 4]]
        found.agree(call, ordinary=False)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("power", "marked"), [(50, False), (59, False), (62, True), (200, True)])
    def test_a_leap_beyond_the_first_tile(self, hopper, power, marked, causal):
        """Tiles are taken from the last on, and the reference is the maximum of the first that is taken."""
        q, k, v = three(300, 300, heads=1)
        q[:, :, 200], k[:, :, 20] = 0, 0
        q[:, :, 200, 0], k[:, :, :, 0], k[:, :, 20, 0] = 8, 0, 8
        q[..., :200, 0] = q[..., 201:, 0] = 0
        # q·k is 64 for this row and key alone; the others are near 0.
        k[:, :, :, 1:] *= 0.01
        scale = power * math.log(2) / 64
        call = call_for((q, k, v), scale=scale, is_causal=causal)
        found = Found(hopper, call, LEVELS[2])
        assert found.flags.tolist() == [[[0, 0, 0, int(marked), 0]]]
        found.agree(call, ordinary=False)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("scale", [0.0, -0.2, 1e-8, 2e6, math.inf, math.nan])
    def test_a_scale(self, hopper, scale, causal):
        call = call_for(three(130, 140), scale=torch.tensor([0.125, scale]), is_causal=causal)
        found = Found(hopper, call)
        assert found.flags.tolist() == [[[0, 0, 0], [1, 1, 1]]]
        found.agree(call, ordinary=False)

    @pytest.mark.parametrize(("power", "marked"), [(28, 0), (38, 1)])
    def test_scores_beyond_what_hides_others(self, hopper, power, marked):
        q, k, v = three(70, 150, heads=1)
        q[:] = k[:] = 2.0**power
        call = call_for((q, k, v), is_causal=True, query_offset=80)
        assert Found(hopper, call, LEVELS[0]).flags.tolist() == [[[marked] * 2]]

    def test_rows_that_see_nothing(self, hopper):
        """have nothing to be marked for, whatever is hidden."""
        q, k, v = three(200, 200, batch=2)
        k[:, :, 100:] = v[:, :, 100:] = math.nan
        q[0] = math.nan
        call = call_for((q, k, v), key_lengths=torch.tensor([0, 50]), scale=torch.tensor([0.1, 1e9]))
        found = Found(hopper, call)
        # What hides keys does so after the product, and a value that is not a number gets through times 0.
        assert found.flags[0].tolist() == [[0] * 4] * 2
        assert not found.output[0].any()
        assert (found.fields["logsumexp"][0] == -math.inf).all()

    @pytest.mark.parametrize("power", [34, 35, 39])
    @pytest.mark.parametrize(("key", "options"), [(190, {}), (100, {}), (10, {"query_offset": 191, "is_causal": True})])
    @pytest.mark.parametrize("values", [False, True])
    def test_a_score_far_below(self, hopper, key, options, power, values):
        """is no hidden one, in whatever tile it is: where its square is no number, that is said."""
        q, k, v = three(64, 192, heads=1)
        q[..., 0], k[..., 0] = 0, 0
        q[0, 0, 5], q[0, 0, 5, 0], k[0, 0, key, 0] = 0, 2.0**power, -(2.0**power)
        found = Found(hopper, call_for((q, k, v)[: 2 + values], **options), ("score_mean", "score_std"))
        assert found.flags.tolist() == [[[1]]]

    @pytest.mark.parametrize(("size", "marked"), [(3e4, 0), (6e4, 1)])
    def test_an_output_near_the_end_of_float16(self, hopper, size, marked):
        q, k, v = three(70, 70, dtype=torch.float16, heads=1)
        v = v.sign() * 1e-3
        v[..., 0] = size
        call = call_for((q, k, v))
        found = Found(hopper, call, ())
        assert found.flags.tolist() == [[[marked] * 2]]

    @pytest.mark.parametrize(("size", "marked"), [(2.0**-45, 0), (2.0**-60, 1), (0.0, 0)])
    def test_an_output_whose_square_is_too_small(self, hopper, size, marked):
        q, k, v = three(70, 70, heads=1)
        call = call_for((q, k, v.sign() * size))
        found = Found(hopper, call, ("output_norm",))
        assert found.flags.tolist() == [[[marked] * 2]]

    @pytest.mark.parametrize(("shift", "marked"), [(0.0, 0), (30.0, 1)])
    def test_scores_far_from_their_reference(self, hopper, shift, marked):
        """Sums about the largest score of the first tile lose the digits of a spread that is small beside it."""
        q, k, v = three(70, 1500, heads=1)
        q[..., 0], k[..., 0] = 4, 0
        # In the half of a tile that is looked at first.
        k[..., 1410, 0] = shift
        q[..., 1:] *= 0.1
        call = call_for((q, k, v))
        found = Found(hopper, call)
        assert found.flags.tolist() == [[[marked] * 2]]
        assert not Found(hopper, call, LEVELS[2]).agree(call).flags.any()

    def test_scores_far_from_0(self, hopper):
        """These do not."""
        q, k, v = three(70, 700, heads=1)
        q[..., 0], k[..., 0] = 4, 30
        q[..., 1:] *= 0.1
        call = call_for((q, k, v))
        assert not Found(hopper, call).agree(call).flags.any()


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_registers_add_up(hopper, head_dim, bounded, values):
    for level in range(4):
        for keys in (64, hopper.MANY_KEYS):
            registers_add_up(hopper.configuration(head_dim, level, keys, bounded=bounded, values=values))


def test_what_it_takes(hopper):
    call = call_for(three())
    assert hopper.takes(call)
    assert hopper.takes(call._replace(v=None))
    assert hopper.takes_sums(call._replace(v=None))
    assert not hopper.takes_sums(call_for(three(dim=128)[:2]))
    assert not hopper.takes_sums(call_for(three(), is_causal=True))
    for other in (
        call_for(three(63, 300)),
        call_for(three(300, 63)),
        call_for(three(dim=32)),
        call_for(three(dim=256)),
        call_for(three(dtype=torch.float32)),
        call_for(three(), softcap=3.0),
        call_for(three(), dropout_p=0.1, seed=1),
        call_for(three(), attn_mask=torch.ones(200, 300, dtype=torch.bool)),
        call._replace(v=call.v[..., :32]),
        call._replace(v=call.v.half()),
        call._replace(q=draw(1, 1, 2, 200, 65)[..., 1:]),
        call._replace(k=call.k.mT.contiguous().mT),
    ):
        assert not hopper.takes(other)


# ---------------------------------------------------------------------------------------------------------------------


class TestAttend:
    """From end to end, with the kernels that compute marked rows again and the weights of first keys that differ."""

    @pytest.fixture(autouse=True)
    def emulated(self, emulator, monkeypatch):
        emulator.pretend(monkeypatch)
        yield
        assert "_kernel" in dict(emulator.launches)

    def compare(self, operands, options):
        found = attend(*operands, backend="cuda", **options)
        right = attend(*(x.double() for x in operands), backend="reference", **options)
        output = right.output
        torch.testing.assert_close(found.output.double(), output, rtol=2e-2, atol=1e-2, equal_nan=True)
        alone = read(*operands[:2], backend="cuda", **{n: x for n, x in options.items() if n != "sinks"})
        for name in FIELDS:
            wanted = getattr(right.reading, name)
            if wanted is None:
                continue
            for reading in (found.reading, alone):
                value = getattr(reading, name)
                if value is not None and not (reading is alone and "sinks" in options):
                    torch.testing.assert_close(
                        value.double(),
                        wanted.double(),
                        rtol=1e-2 if name == "output_norm" else 1e-4,
                        atol=3e-5,
                        equal_nan=True,
                        msg=lambda text, name=name: f"{name}: {text}",
                    )
        return found

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"is_causal": True},
            {"key_lengths": torch.tensor([70, 0])},
            {"window": (9, 30), "sinks": torch.tensor([0.3, -1.0])},
            {"window": (9, 30), "stats": "first_key_weight"},
        ],
        ids=["full", "causal", "key lengths", "window, sinks", "first keys that differ"],
    )
    def test_every_field(self, options):
        self.compare(three(130, 150, batch=2), options)

    @pytest.mark.parametrize("shift", [0.0, 100.0])
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("causal", [False, True])
    def test_moments_from_sums_over_keys(self, emulator, causal, head_dim, shift, monkeypatch):
        """Of several chunks; where these sums lose digits, they are not taken."""
        monkeypatch.setattr(_moments, "SUMMED_KEYS", dict.fromkeys(((64, causal), (128, causal)), (128, 128)))
        monkeypatch.setattr(_moments, "LEAST_KEYS", 128)
        q, k, v = three(400, 400, head_dim)
        self.compare((q, k + shift, v), {"is_causal": causal, "scale": 0.1})
        # Once for a call with values and once for one without, which mostly need no kernel more if all see all.
        launched = [name for name, _ in emulator.launches]
        assert launched.count("before_kernel") == 2
        assert launched.count("moments_kernel") == (2 if causal else 1 if head_dim == 128 else 0)

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_tables_of_grouped_heads(self, head_dim, monkeypatch):
        """Each group of heads has its own, in each entry."""
        monkeypatch.setattr(_moments, "SUMMED_KEYS", {(head_dim, False): (64, 128)})
        q, k, v = three(200, 300, head_dim, heads=4, kv_heads=2, batch=2)
        k = k * torch.tensor([[0.2, 1.0], [2.0, 0.5]], dtype=k.dtype)[..., None, None]
        self.compare((q, k, v), {"enable_gqa": True})

    @pytest.mark.parametrize("causal", [False, True])
    def test_a_leap_is_computed_again(self, causal):
        q, k, v = three(200, 280)
        q[:, 1, 150] = k[:, 1, 5] = 6.0
        self.compare((q, k, v), {"is_causal": causal})

    def test_what_is_not_finite(self):
        q, k, v = three(200, 150)
        q[0, 0, 70, 3] = math.nan
        found = attend(q, k, v, backend="cuda").reading
        right = attend(q.double(), k.double(), v.double(), backend="reference").reading
        assert torch.equal(found.nonfinite, right.nonfinite)
        torch.testing.assert_close(found.entropy.double(), right.entropy, rtol=1e-4, atol=1e-4, equal_nan=True)

    def test_gradients_with_the_flow_are_not_cudnns(self, monkeypatch, emulator):
        def differentiate(*operands, causal, scale):
            raise AssertionError("cuDNN was called")

        monkeypatch.setattr(_cudnn, "usable", lambda device: True)
        monkeypatch.setattr(_cudnn, "_differentiate", differentiate)
        operands = three(150, 150)
        grad = draw(7, 1, 2, 150, 64)
        found = []
        for backend, dtype in (("cuda", torch.bfloat16), ("torch", torch.float64)):
            leaves = [x.detach().to(dtype).requires_grad_() for x in operands]
            output, reading = attend(*leaves, is_causal=True, backend=backend, stats=("gradient_flow", "pressure"))
            output.backward(grad.to(dtype))
            found.append([x.double() for x in (*(x.grad for x in leaves), reading.pressure, reading.gradient_flow)])
        assert len(emulator.of_hopper) == 3
        for one, other in zip(*found, strict=True):
            there = other.isfinite()
            assert there.double().mean() > 0.9
            close(one[there], other[there], rtol=5e-2, atol=5e-2)

    def test_gradient_flow_beside_cudnn(self, monkeypatch, emulator):
        monkeypatch.setattr(_cudnn, "usable", lambda device: True)
        operands = three(150, 150)
        grad = draw(7, 1, 2, 150, 64)
        flows = []
        for backend, dtype in (("cuda", torch.bfloat16), ("torch", torch.float64)):
            given = [x.to(dtype) for x in operands]
            monkeypatch.setattr("attemper._attend._best", lambda problem, backend=backend: backend)
            output, reading = attend(*given, is_causal=True)
            flow = gradient_flow_beside(*given, output, grad.to(dtype), reading, is_causal=True)
            flows.append(flow.double())
        assert len(emulator.of_hopper) == 2
        there = flows[1].isfinite()
        assert there.double().mean() > 0.9
        close(flows[0][there], flows[1][there], rtol=5e-2, atol=5e-3)
