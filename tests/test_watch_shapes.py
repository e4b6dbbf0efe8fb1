"""Calls of three axes: heads folded into the first one, or a loop over them with a call for each."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from attemper import check, watch  # noqa: E402

HEADS, WIDTH, LENGTH = 4, 32, 6


def fused(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v)


def written(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


class Looping(nn.Module):
    """A call for each head."""

    num_heads = HEADS

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        heads = zip(*(f(x).chunk(HEADS, -1) for f in (self.q, self.k, self.v)), strict=True)
        return torch.cat([self.attend(*head) for head in heads], -1)


class Folding(Looping):
    """All heads in one call, on the axis of the batch."""

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1) for f in (self.q, self.k, self.v))
        return self.attend(q, k, v).unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)


class LengthFirst(Looping):
    """The same of (length, batch, width), as fairseq has it."""

    def forward(self, x):
        length, batch, _ = x.shape
        q, k, v = (f(x).reshape(length, batch * HEADS, -1).transpose(0, 1) for f in (self.q, self.k, self.v))
        return self.attend(q, k, v).transpose(0, 1).reshape(length, batch, WIDTH)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("attend", [fused, written])
@pytest.mark.parametrize("batch", [1, 4, 6, 8])
@pytest.mark.parametrize(
    ("kind", "shape", "heads"),
    [(Looping, (7, WIDTH), 1), (Folding, (7, WIDTH), HEADS), (LengthFirst, (2, WIDTH), HEADS)],
)
def test_the_heads_of_three_axes(kind, shape, heads, batch, attend):
    checkup = check(kind(attend), torch.randn(batch, *shape), loss=lambda output: output.square().mean())
    assert [vitals.site.heads for vitals in checkup.vitals] == [heads] * (HEADS if heads == 1 else 1)
    assert not checkup.unseen


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("batch", [4, 6, 8])
def test_of_a_loop_a_fault_is_in_the_head_that_has_it(batch, compiled):
    model = Looping(fused)
    with torch.no_grad():
        model.q.weight[8:16] *= 100
    run = torch.compile(model, backend="eager") if compiled else model
    with watch(run, every=1) as monitor:
        run(torch.randn(batch, 7, WIDTH))
    largest = [float(vitals.max_logit.item()) for vitals in monitor.vitals.values()]
    assert [value > 10 for value in largest] == [False, True, False, False]
    assert monitor.uncompiled is None


@pytest.mark.parametrize("attend", [fused, written])
def test_batches_of_other_sizes(attend):
    model = Looping(attend)
    with watch(model, every=1) as monitor:
        for batch in (8, 8, 8, 8, 6):
            model(torch.randn(batch, LENGTH, WIDTH))
    assert len(monitor.history) == 5
    assert {vitals.site.heads for sample in monitor.history for vitals in sample.vitals.values()} == {1}
    assert isinstance(monitor.findings, list)


class Changing(nn.Module):
    """Uses as many heads as it is told."""

    heads = 2

    def forward(self, x):
        q = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return fused(q, q, q).transpose(1, 2).flatten(2)


def test_a_number_of_heads_that_changes_within_a_step():
    model = Changing()
    x = torch.randn(3, LENGTH, WIDTH)
    with watch(model, every=1, micro_batches=2) as monitor:
        for _ in range(6):
            for model.heads in (2, 4):
                model(x)
            assert sorted(monitor.vitals) == ["(root)", "(root) with 4 heads"]
    assert len(monitor.history) == 6
    assert all(path == vitals.site.path for path, vitals in monitor.vitals.items())
    assert isinstance(monitor.findings, list)
