"""What only a GPU shows: lengths beyond 32-bit places, graphs, streams, compiled calls, the kernels for Hopper."""

import pytest
import torch

from attemper import attend, read, watch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA GPU here", allow_module_level=True)

from attemper._backends.cuda import _cudnn, _form, _moments

FIELDS = (
    "max_logit",
    "logsumexp",
    "expected_score",
    "entropy",
    "largest_weight",
    "collision",
    "score_mean",
    "score_std",
)


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


def in_float64(q, k, v, rows, *, causal, window=None):
    """Output and fields of some rows of one head, by the formula."""
    scores = q[rows].double() @ k.double().T * q.shape[-1] ** -0.5
    key = torch.arange(k.shape[0], device="cuda")
    if causal:
        scores = scores.masked_fill(key > rows[:, None], -torch.inf)
    if window is not None:
        scores = scores.masked_fill(key < rows[:, None] - window, -torch.inf)
    seen = scores.isfinite()
    shown = scores.masked_fill(~seen, 0)
    count = seen.sum(-1)
    logsumexp = scores.logsumexp(-1)
    weights = scores.softmax(-1)
    mean = shown.sum(-1) / count
    spread = ((shown - mean[:, None]).square() * seen).sum(-1) / count
    expected = (weights * shown).sum(-1)
    found = (scores.amax(-1), logsumexp, expected, logsumexp - expected, weights.amax(-1), weights.square().sum(-1))
    return weights @ v.double(), dict(zip(FIELDS, (*found, mean, spread.sqrt()), strict=True))


def rows_agree(result, q, k, v, head, kv_head, rows, **kinds):
    output, fields = in_float64(q[0, head], k[0, kv_head], v[0, kv_head], rows, **kinds)
    torch.testing.assert_close(result.output[0, head, rows].double(), output, rtol=2e-2, atol=2e-3)
    for name, right in fields.items():
        found = getattr(result.reading, name)[0, head, rows].double()
        torch.testing.assert_close(found, right, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_131072_tokens(head_dim):
    q, k, v = (draw(1, 2, 131072, head_dim) for _ in range(3))
    rows = torch.tensor([0, 1, 63, 64, 65537, 100003, 131071], device="cuda")
    result = attend(q, k, v, is_causal=True)
    assert result.reading.backend == "cuda"
    assert not result.reading.nonfinite.any()
    rows_agree(result, q, k, v, 1, 1, rows, causal=True)
    rows_agree(attend(q, k, v, is_causal=True, window=(1000, 0)), q, k, v, 0, 0, rows, causal=True, window=1000)


@pytest.mark.parametrize("head_dim", [128, 80])
def test_more_than_2_to_the_31_elements(head_dim):
    heads = 2**31 // (65536 * head_dim) + 2
    q, k, v = draw(1, heads, 65536, head_dim), draw(1, 1, 65536, head_dim), draw(1, 1, 65536, head_dim)
    assert q.numel() > 2**31
    result = attend(q, k, v, is_causal=True, enable_gqa=True, window=(2047, 0))
    rows = torch.tensor([0, 31, 40000, 65535], device="cuda")
    for head in (0, heads - 1):
        rows_agree(result, q, k, v, head, 0, rows, causal=True, window=2047)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_for_hopper_and_the_other_agree(head_dim, causal, monkeypatch):
    q, k, v = (draw(2, 4, 1000, head_dim) for _ in range(3))
    one = attend(q, k, v, is_causal=causal)
    monkeypatch.setattr(_form, "gluon", lambda _name: None)
    other = attend(q, k, v, is_causal=causal)
    torch.testing.assert_close(one.output, other.output, rtol=2e-2, atol=4e-3)
    for name in FIELDS:
        torch.testing.assert_close(getattr(one.reading, name), getattr(other.reading, name), rtol=1e-4, atol=2e-5)


def gradients(q, k, v, grad, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    result = attend(*leaves, **options)
    found = torch.autograd.grad(result.output, leaves, grad.to(result.output.dtype))
    return [*found, result.reading.pressure, result.reading.gradient_flow]


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_moments_from_sums_over_keys(head_dim, causal, hopper, monkeypatch):
    """Of so many heads that all of the GPU is at it: sums of products once were read while they were overwritten."""
    kinds = dict.fromkeys(((64, causal), (128, causal)), (128, 128))
    monkeypatch.setattr(_moments, "SUMMED_KEYS" if hopper else "PORTABLE_SUMMED_KEYS", kinds)
    if not hopper:
        monkeypatch.setattr(_form, "gluon", lambda _name: None)
    q, k, v = (draw(1, 32, 8000, head_dim) for _ in range(3))
    k += 0.2 * draw(head_dim)
    rows = torch.tensor([0, 1, 63, 64, 511, 512, 600, 4097, 7999], device="cuda")
    for head in (0, 17, 31):
        rows_agree(attend(q, k, v, is_causal=causal), q, k, v, head, head, rows, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("by", ["cuDNN", "our own", "our own, where order matters"])
def test_gradients_by_cudnn_and_by_our_own(head_dim, kv_heads, by, monkeypatch):
    asked = []
    differentiate = _cudnn._differentiate
    monkeypatch.setattr(_cudnn, "_differentiate", lambda *x, **more: asked.append(x) or differentiate(*x, **more))
    q, grad = draw(2, 4, 300, head_dim), draw(2, 4, 300, head_dim)
    k, v = draw(2, kv_heads, 300, head_dim), draw(2, kv_heads, 300, head_dim)
    options = {"is_causal": True, "enable_gqa": kv_heads < 4}
    right = gradients(*(x.double() for x in (q, k, v)), grad, backend="torch", **options)
    options["stats"] = "pressure" if by == "cuDNN" else ("pressure", "gradient_flow")
    torch.use_deterministic_algorithms(by == "our own, where order matters")
    try:
        found = gradients(q, k, v, grad, backend="cuda", **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(asked) == (by == "cuDNN")
    for x, y in zip(found[:4], right[:4], strict=True):
        assert (x.double() - y).abs().max() < 1e-2 * y.abs().max()
    if by != "cuDNN":
        there = right[4].isfinite()
        assert there.float().mean() > 0.9
        torch.testing.assert_close(found[4].double()[there], right[4][there], rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (300, 0)}])
@pytest.mark.parametrize("hopper", [False, True])
def test_our_own_gradients_with_all_of_the_gpu_at_it(head_dim, options, hopper, monkeypatch):
    """Right, and the same every time."""
    if not hopper:
        monkeypatch.setattr(_form, "gluon", lambda _name: None)
    q, grad = draw(2, 16, 1990, head_dim), draw(2, 16, 1990, head_dim)
    k, v = draw(2, 8, 1990, head_dim), draw(2, 8, 1990, head_dim)
    options = {**options, "enable_gqa": True, "stats": ("pressure", "gradient_flow")}
    right = gradients(*(x[:1].double() for x in (q, k, v)), grad[:1], backend="torch", **options)
    torch.use_deterministic_algorithms(True)
    try:
        once, twice = (gradients(q, k, v, grad, backend="cuda", **options) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(once, twice, strict=True))
    for x, y in zip(once[:4], right[:4], strict=True):
        assert (x[:1].double() - y).abs().max() < 1e-2 * y.abs().max()
    there = right[4].isfinite()
    assert there.float().mean() > 0.9
    torch.testing.assert_close(once[4][:1].double()[there], right[4][there], rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_graph_replays_with_new_numbers(head_dim):
    q, k, v = (draw(1, 4, 300, head_dim) for _ in range(3))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            attend(q, k, v, is_causal=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attend(q, k, v, is_causal=True)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    # A spike that the reference of the first tile does not foresee: marked, and mended, in the graph too.
    k[0, 0, 5] = 60.0
    graph.replay()
    expected = attend(q, k, v, is_causal=True)
    torch.testing.assert_close(result.output, expected.output)
    for name in FIELDS:
        torch.testing.assert_close(getattr(result.reading, name), getattr(expected.reading, name))


def test_a_scale_that_a_graph_was_the_first_to_use():
    q, k, v = (draw(1, 4, 300, 64) for _ in range(3))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        attend(q, k, v)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attend(q, k, v, scale=0.0371)
    # Before the graph ran: what it is to write is not there yet.
    alone = attend(q, k, v, scale=0.0371)
    graph.replay()
    right = attend(q.double(), k.double(), v.double(), scale=0.0371, backend="torch")
    for found in (alone, result):
        torch.testing.assert_close(found.output.double(), right.output, rtol=2e-2, atol=4e-3)
        torch.testing.assert_close(found.reading.logsumexp.double(), right.reading.logsumexp, rtol=1e-4, atol=1e-5)


def test_a_graph_with_dropout():
    """Its seed is a number of the host's, which no graph can wait for."""
    q, k, v = (draw(1, 4, 300, 64) for _ in range(3))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        attend(q, k, v, dropout_p=0.5)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attend(q, k, v, dropout_p=0.5)
    graph.replay()
    plain = attend(q, k, v)
    torch.testing.assert_close(result.reading.entropy, plain.reading.entropy, rtol=1e-4, atol=1e-5)
    assert result.output.isfinite().all()
    assert 0.02 < (result.output - plain.output).float().abs().mean() < 1


def test_a_scale_that_lies_on_the_host():
    q, k, v = (draw(1, 4, 300, 64) for _ in range(3))
    torch.testing.assert_close(attend(q, k, v, scale=torch.tensor(0.2)).output, attend(q, k, v, scale=0.2).output)


@pytest.mark.parametrize("stats", ["pressure", "all"])
def test_gradients_of_what_lies_at_any_address(stats):
    """Rows in one piece that begin at no multiple of 16 bytes."""
    operands = [draw(1, 4, 300, 64) for _ in range(4)]
    shifted = [torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x).copy_(x) for x in operands]
    assert all(x.is_contiguous() and x.data_ptr() % 16 for x in shifted)
    right = gradients(*(x.double() for x in operands), backend="torch", stats=stats)
    found = gradients(*shifted, backend="cuda", stats=stats)
    for x, y in zip(found[:4], right[:4], strict=True):
        assert (x.double() - y).abs().max() < 1e-2 * y.abs().max()


def test_doctor(capsys):
    from attemper.cli import main

    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"\ngpu         {torch.cuda.get_device_name()}, compute capability " in out
    assert "cuda for torch CUDA" in out
    assert "right  cuda on torch CUDA, float16: gradients" in out


@pytest.mark.parametrize("case", ["forward 8 × 16 × 2048 × 128 causal", "backward 8 × 32 × 2048 × 64,", "decode"])
def test_the_benchmark(case):
    from attemper import _bench

    (row,) = _bench.run("all", device="cuda", only=case, settings=_bench.SETTINGS["quick"])
    assert row.met, row
    assert row.peer in row.seconds
    # Within what a GPU can do at all: the clock waits for it.
    assert row.share is None or 0.05 < row.share < 1.5
    assert 0.1 < row.ratio < 30
    assert _bench.record_of([row], device="cuda")["device"] == torch.cuda.get_device_name()


def test_compiled_without_a_break_and_on_another_stream():
    q, k, v = (draw(1, 4, 300, 64).requires_grad_() for _ in range(3))

    def loss(q, k, v):
        output, reading = attend(q, k, v, is_causal=True)
        return output.float().square().mean() + 0 * reading.entropy.sum(), reading.entropy

    eager, entropy = loss(q, k, v)
    wanted = torch.autograd.grad(eager, (q, k, v))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        compiled, same = torch.compile(loss, fullgraph=True)(*leaves)
        found = torch.autograd.grad(compiled, leaves)
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(same, entropy)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 16])
def test_decoding_splits_the_keys(batch):
    q, k, v = draw(batch, 8, 1, 128), draw(batch, 2, 32768, 128), draw(batch, 2, 32768, 128)
    result = attend(q, k, v, enable_gqa=True)
    expected = attend(q.double(), k.double(), v.double(), enable_gqa=True, backend="torch")
    torch.testing.assert_close(result.output.double(), expected.output, rtol=2e-2, atol=1e-3)
    for name in FIELDS:
        found, right = getattr(result.reading, name), getattr(expected.reading, name)
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (700, 0)}])
def test_read_with_all_of_the_gpu_at_it(head_dim, options, summed, monkeypatch):
    """Right, and what attend says, item after item of each program."""
    kinds = ((64, False), (64, True), (128, False), (128, True))
    monkeypatch.setattr(_moments, "SUMMED_KEYS", dict.fromkeys(kinds, 2 * (128 if summed else 1 << 30,)))
    q, k, v = (draw(1, 32, 8000, head_dim) for _ in range(3))
    k += 0.2 * draw(head_dim)
    one, other = read(q, k, **options), attend(q, k, v, **options).reading
    for name in FIELDS:
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-4, atol=2e-5)
    rows = torch.tensor([0, 1, 63, 64, 511, 512, 600, 4097, 7999], device="cuda")
    window = options.get("window", (None,))[0]
    for head in (0, 17, 31):
        _, fields = in_float64(q[0, head], k[0, head], v[0, head], rows, causal=bool(options), window=window)
        for name, right in fields.items():
            found = getattr(one, name)[0, head, rows].double()
            torch.testing.assert_close(
                found, right, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


class Attention(torch.nn.Module):
    """Four heads of 64."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(256, 768), torch.nn.Linear(256, 256)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


def test_a_compiled_model_is_read_compiled():
    model = torch.nn.Sequential(Attention(), Attention()).to("cuda", torch.bfloat16)
    x = draw(2, 300, 256)
    with watch(model, every=1) as eager:
        model(x).float().square().mean().backward()
    fast = torch.compile(model)
    with watch(fast, every=1) as compiled:
        for _ in range(2):
            fast(x).float().square().mean().backward()
    assert compiled.uncompiled is None
    assert list(compiled.vitals) == list(eager.vitals) == ["0", "1"]
    for path, wanted in eager.vitals.items():
        for name in ("entropy", "max_logit", "score_std", "gradient_flow", "pressure"):
            one, other = getattr(compiled.vitals[path], name), getattr(wanted, name)
            size = abs(other).max()
            assert size > 0
            assert abs(one - other).max() < 5e-2 * size, name
