"""What the identities of the softmax give from torch's fused kernel is what the tiles measure."""

import pytest
import torch

from attemper import BackendError, OptionError, attend, read
from attemper._reading import FIELDS

NOT_GIVEN = {"max_logit", "max_qk", "largest_weight", "pressure", "gradient_flow"}


def operands(dtype, queries=700, keys=700):
    generator = torch.Generator().manual_seed(0)
    # Off centre, so that moments about zero would cancel.
    return [
        (torch.randn(2, 3, n, 16, generator=generator, dtype=torch.float64) + shift).to(dtype)
        for n, shift in ((queries, 1), (keys, 2), (keys, 0))
    ]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(700, 700), (700, 600), (300, 900), (1, 5)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_every_field_it_gives_is_that_of_the_tiles(dtype, tolerance, queries, keys, is_causal):
    q, k, v = operands(dtype, queries, keys)
    found, truth = (attend(q, k, v, is_causal=is_causal, backend=b) for b in ("identities", "torch"))
    assert found.reading.backend == "identities"
    torch.testing.assert_close(found.output, truth.output, rtol=tolerance, atol=tolerance)
    given = {name for name in FIELDS if getattr(found.reading, name) is not None}
    assert given == set(FIELDS) - NOT_GIVEN
    for name in given:
        one, two = getattr(found.reading, name), getattr(truth.reading, name)
        size = max(1.0, float(two[torch.isfinite(two)].abs().max())) if two.isfinite().any() else 1.0
        torch.testing.assert_close(one, two, rtol=0, atol=tolerance * size, equal_nan=True, msg=name)
    alone = read(q, k, is_causal=is_causal, backend="identities")
    torch.testing.assert_close(alone.entropy, truth.reading.entropy, rtol=0, atol=10 * tolerance)


def test_in_sixteen_bits_entropy_is_as_rough_as_the_kernels_output():
    q, k, _ = operands(torch.bfloat16)
    found, truth = (read(q, k, backend=b) for b in ("identities", "torch"))
    error = (found.entropy - truth.entropy).abs().max()
    assert 1e-4 < error < 0.1
    torch.testing.assert_close(found.logsumexp, truth.logsumexp, rtol=0, atol=1e-3)


def test_gradients_are_the_kernels_own():
    grads = []
    for backend in ("identities", "torch"):
        q, k, v = (x.requires_grad_() for x in operands(torch.float64, 40, 30))
        attend(q, k, v, is_causal=True, backend=backend).output.square().sum().backward()
        grads.append((q.grad, k.grad, v.grad))
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"attn_mask": torch.ones(7, 7, dtype=torch.bool)}, "without attn_mask, softcap, sinks and dropout"),
        ({"softcap": 2.0}, "without attn_mask, softcap, sinks and dropout"),
        ({"sinks": torch.zeros(3)}, "without attn_mask, softcap, sinks and dropout"),
        ({"dropout_p": 0.1}, "without attn_mask, softcap, sinks and dropout"),
        ({"window": (2, 2)}, "no mask by position but the causal one"),
        ({"is_causal": True, "query_offset": 1}, "no mask by position but the causal one"),
        ({"key_lengths": [3, 7]}, "no mask by position but the causal one"),
        ({"scale": torch.ones(3)}, "takes one scale, a number other than 0"),
        ({"scale": 0.0}, "takes one scale, a number other than 0"),
    ],
)
def test_what_does_not_fit_is_refused(keywords, reason):
    q, k, v = operands(torch.float32, 7, 7)
    with pytest.raises(BackendError, match=reason):
        attend(q, k, v, **keywords, backend="identities")


def test_more_that_does_not_fit():
    q, k, v = operands(torch.float32, 7, 7)
    for bad, reason in (
        ((q, k[:, :1], v[:, :1]), "no grouped heads"),
        ((q, k, v[..., :8]), "needs v of the head_dim of k"),
        ((q[:, :, :0], k, v), "takes no empty operands"),
        (tuple(x.to("meta") for x in (q, k, v)), "no fused attention that returns its logsumexp on meta"),
    ):
        with pytest.raises(BackendError, match=reason):
            attend(*bad, backend="identities")
    with pytest.raises(OptionError, match="no derivatives of the statistics"):
        attend(q, k, v, differentiable=True, backend="identities")
    with pytest.raises(BackendError, match="cannot give max_logit"):
        read(q, k, stats=("max_logit", "entropy"), backend="identities")
