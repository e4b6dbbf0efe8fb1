"""Calls for the kernels for Hopper, and what is right for them."""

import math

import torch

from attemper._backends._operator import Call, call_of
from attemper._problem import pose


def draw(seed, *shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def three(queries=200, keys=300, dim=64, *, heads=2, kv_heads=None, batch=1, dtype=torch.bfloat16):
    kv_heads = heads if kv_heads is None else kv_heads
    return (
        draw(1, batch, heads, queries, dim, dtype=dtype),
        draw(2, batch, kv_heads, keys, dim, dtype=dtype),
        draw(3, batch, kv_heads, keys, dim, dtype=dtype),
    )


def call_for(operands, **options):
    """A call as the operator gets it on a GPU; without values for (q, k)."""
    q, k, v = (*operands, None)[:3]
    problem = pose(q, k, v, **options)
    return call_of(problem, problem.batch, banded=True)


def seen_in(call: Call):
    """Which keys each row sees, (batch or 1, 1, queries, keys)."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    row, key = torch.arange(queries)[:, None], torch.arange(keys)
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if call.band is not None:
        seen = seen & (key >= row + call.band[0]) & (key < row + call.band[1])
    if call.first is not None:
        seen = seen & (key >= call.first[:, None, :, None])
    if call.stop is not None:
        seen = seen & (key < call.stop[:, None, :, None])
    return seen


def in_float64(call: Call):
    """Output and fields by the formula, and which rows see a key."""
    k = call.k.double().repeat_interleave(call.group, 1)
    scores = call.q.double() @ k.mT * call.scale.double()[..., None, None]
    seen = seen_in(call).expand(scores.shape)
    there = seen.any(-1)
    hidden = scores.masked_fill(~seen, -math.inf)
    logsumexp = hidden.logsumexp(-1)
    weights = torch.where(there[..., None], hidden.softmax(-1), 0.0)
    shown = scores.masked_fill(~seen, 0.0)
    count = seen.sum(-1).clamp(min=1)
    mean = shown.sum(-1) / count
    std = (((shown - mean[..., None]).square() * seen).sum(-1) / count).sqrt()
    expected = (weights * shown).sum(-1)
    entropy = torch.where(there, logsumexp - expected, 0.0)
    fields = {
        "logsumexp": logsumexp,
        "max_logit": hidden.amax(-1),
        "largest_weight": weights.amax(-1),
        "expected_score": expected,
        "entropy": entropy,
        "collision": weights.square().sum(-1),
        "score_mean": mean,
        "score_std": std,
        "max_qk": hidden.amax(-1),
        "first_key_weight": weights.gather(-1, seen.double().argmax(-1, keepdim=True)).squeeze(-1),
        "sink_mass": torch.zeros_like(mean),
        "visible_keys": seen.sum(-1).double(),
        "nonfinite": torch.zeros_like(mean),
    }
    if call.sinks is not None:
        sinks = call.sinks.double()[..., None]
        fields["sink_mass"] = torch.where(sinks > -math.inf, torch.sigmoid(sinks - logsumexp), 0.0)
    output = None
    if call.v is not None:
        # What is not finite is marked where it is seen, and must not matter elsewhere.
        output = weights @ call.v.double().nan_to_num(0.0, 0.0, 0.0).repeat_interleave(call.group, 1)
        if call.sinks is not None:
            output = output * torch.sigmoid(logsumexp - call.sinks.double()[..., None])[..., None]
        fields["output_norm"] = output.norm(dim=-1)
    return output, fields, there


def close(found, right, *, rtol, atol, name=""):
    """Near, and nearer than zeros would be."""
    assert found.shape == right.shape
    torch.testing.assert_close(found.double(), right, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")
    largest = right[right.isfinite()].abs().max() if right.isfinite().any() else 0.0
    assert not largest or largest > 10 * (atol + rtol * largest), name


def registers_add_up(choice):
    """What a multiprocessor has goes to all its warpgroups; the first consumer gets what the others leave."""
    warpgroups = choice.consumers + 1
    start = choice.launched or 65536 // (128 * warpgroups) // 8 * 8
    assert choice.resident * warpgroups * 128 * start <= 65536
    assert warpgroups * start - (choice.consumers - 1) * choice.registers - choice.others == choice.registers
    assert all(number % 8 == 0 for number in (start, choice.registers, choice.others))


def near(name, found, right, digits):
    """As near as so many digits of the largest, and nearer than zeros would be."""
    found, right = found.double(), right.double()
    there = right.isfinite()
    assert (found.isfinite() == there).all(), name
    if there.any() and right[there].any():
        size = right[there].abs().max()
        assert (found - right)[there].abs().max() <= digits * size, name
