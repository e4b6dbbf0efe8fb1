"""The sums over rows that a compiled graph hands over, against those of `Vitals.of`."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attemper import Site, Vitals, attend  # noqa: E402
from attemper._vitals import field_table  # noqa: E402
from attemper._watch._sums import PART, sum_flow, sum_pressure, sum_rows, vitals_of  # noqa: E402

BATCH, HEADS, DEPTH = 3, 2, 4
LENGTHS = [1, 5, PART, 3 * PART, PART + 1]

lengths = pytest.mark.parametrize("length", LENGTHS)


def measured(length, dtype=torch.float32):
    """A Reading with rows that see no key or one, and numbers that are not finite."""
    numbers = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, HEADS, length, DEPTH, generator=numbers, dtype=dtype) for _ in range(3))
    seen = torch.rand(BATCH, 1, length, length, generator=numbers) < 0.5
    seen[:, :, ::3] = False
    seen[:, :, ::4, 0] = True
    reading = attend(q, k, v, attn_mask=seen)[1]
    odd = {"output_norm": torch.inf, "max_logit": torch.nan, "entropy": torch.nan, "nonfinite": 1}
    spoiled = {name: getattr(reading, name).clone() for name in odd}
    for name, value in odd.items():
        spoiled[name][1, 0, -1] = value
    return replace(reading, **spoiled)


def assert_same(found, wanted, rtol):
    for name, *_ in field_table():
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol, rtol, err_msg=name)
    for name, value in wanted.weights.items():
        np.testing.assert_array_equal(found.weights[name], value, err_msg=name)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@lengths
def test_rows(length, dtype, rtol):
    reading = measured(length, dtype)
    site = Site(heads=HEADS)
    found = vitals_of(site, sum_rows(reading).numpy())
    assert_same(found, Vitals.of(reading, site), rtol)


@lengths
def test_counts_are_whole(length):
    table = sum_rows(measured(length))
    assert table.dtype == torch.float64
    assert (table[:4] == table[:4].round()).all()
    assert (table[0] == BATCH * length).all()


@lengths
def test_nothing_but_rows_without_keys(length):
    q = torch.ones(BATCH, HEADS, length, DEPTH)
    reading = attend(q, q, q, attn_mask=torch.zeros(length, length, dtype=torch.bool))[1]
    site = Site(heads=HEADS)
    found = vitals_of(site, sum_rows(reading).numpy())
    assert_same(found, Vitals.of(reading, site), 0)
    assert (found.max_logit == -np.inf).all()
    assert (found.least_normalized_entropy == np.inf).all()


@lengths
def test_gradient_flow(length):
    numbers = torch.Generator().manual_seed(0)
    flow = torch.rand(BATCH, HEADS, length, generator=numbers)
    visible = torch.randint(4, flow.shape, generator=numbers)
    flow[0, 0, 0] = torch.nan
    counted = torch.isfinite(flow) & (visible > 1)
    total, number = sum_flow(flow, visible)
    torch.testing.assert_close(total, torch.where(counted, flow, 0).double().sum((0, 2)))
    assert torch.equal(number, counted.double().sum((0, 2)))


@pytest.mark.parametrize("entries", [1, 3])
@lengths
def test_pressure(length, entries):
    numbers = torch.Generator().manual_seed(0)
    # As q is in a model: cut out of a product with k and v.
    q = torch.randn(2 * BATCH, length, HEADS, 3 * DEPTH, generator=numbers).transpose(1, 2)[..., :DEPTH]
    grad = torch.randn(2 * BATCH, HEADS, length, DEPTH, generator=numbers)
    grad[0, 1, 0, 0] = torch.inf
    each = (q.double() * grad.double()).sum((2, 3)).reshape(-1, entries, HEADS).sum(1)
    each = torch.cat([each, each.sum(1, keepdim=True)], 1).numpy() * len(each)
    counted = np.isfinite(each)
    mean, spread, number = sum_pressure(q, grad, entries).numpy()
    np.testing.assert_array_equal(number, counted.sum(0))
    for head, (column, kept) in enumerate(zip(each.T, counted.T, strict=True)):
        np.testing.assert_allclose(mean[head], column[kept].mean(), rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(spread[head], column[kept].var() * kept.sum(), rtol=1e-5, atol=1e-4)
