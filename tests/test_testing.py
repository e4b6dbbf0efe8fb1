"""The battery passes our backends, catches wrong functions, and finds what is wrong with torch's."""

import functools
import json
import sys
import warnings

import numpy as np
import pytest
import torch

from attemper import DtypeError, FrameworkError, OptionError, attend
from attemper.testing import KINDS, assert_within_budget, check_operator, compare, make_inputs


@pytest.mark.parametrize(
    ("framework", "backend"),
    [
        ("numpy", "cpu"),
        ("numpy", "numpy"),
        ("numpy", "reference"),
        ("torch", "cpu"),
        ("torch", "torch"),
        ("torch", "reference"),
    ],
)
def test_backend_passes_the_battery(framework, backend):
    report = check_operator(functools.partial(attend, backend=backend), framework=framework, backend=backend)
    assert report.ok, str(report)
    assert len(report.rows) > 400
    assert report.framework == framework


def naive(q, k, v, attn_mask=None, is_causal=False, scale=None):
    """The textbook, with a large negative number for hidden keys."""
    s = q @ np.swapaxes(k, -1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -1e9)
    if attn_mask is not None:
        s = np.where(attn_mask, s, -1e9) if attn_mask.dtype == bool else s + attn_mask
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return ((p / p.sum(axis=-1, keepdims=True)) @ v).astype(q.dtype)


def causal_from_the_bottom_right(q, k, v, is_causal=False):
    shown = np.tri(q.shape[-2], k.shape[-2], k.shape[-2] - q.shape[-2], dtype=bool)
    return naive(q, k, v, attn_mask=shown if is_causal else None)


def wrong_reading(field, change):
    def fn(q, k, v, **keywords):
        result = attend(q, k, v, **keywords)
        reading = result.reading
        object.__setattr__(reading, field, change(getattr(reading, field)))
        return result

    return fn


FAULTS = {
    "all zeros": (lambda q, k, v: np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), "shapes"),
    "the mean of v": (
        lambda q, k, v: np.broadcast_to(
            v.astype(np.float32).mean(-2, keepdims=True), (*q.shape[:-1], v.shape[-1])
        ).astype(q.dtype),
        "shapes",
    ),
    "no scale": (lambda q, k, v: attend(q, k, v, scale="unscaled").output, "shapes"),
    "1/d": (lambda q, k, v: attend(q, k, v, scale="dk").output, "shapes"),
    "a large negative number as a mask": (naive, "masks"),
    "causal from the bottom right": (causal_from_the_bottom_right, "causal"),
    "a wider output": (lambda q, k, v: attend(q, k, v).output.astype(np.float64), "shapes"),
    "float16 inside": (lambda q, k, v: naive(*(x.astype(np.float16) for x in (q, k, v))).astype(q.dtype), "hostile"),
    "dropout that does not scale": (
        lambda q, k, v, dropout_p=0.0: attend(q, k, v, dropout_p=dropout_p).output * (1 - dropout_p),
        "dropout",
    ),
    "dropout that drops nothing": (lambda q, k, v, dropout_p=0.0: attend(q, k, v).output, "dropout"),
    "entropy in bits": (wrong_reading("entropy", lambda x: x / np.log(2)), "shapes"),
    "max_logit rounded to bfloat16": (wrong_reading("max_logit", lambda x: (x * 4).round() / 4), "shapes"),
    "variance over n − 1": (wrong_reading("score_std", lambda x: x * 1.02), "shapes"),
    "one key miscounted": (wrong_reading("visible_keys", lambda x: x + 1), "shapes"),
    "nothing ever flagged": (wrong_reading("nonfinite", np.zeros_like), "visible"),
    "a field left out": (wrong_reading("collision", lambda _: None), "shapes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_battery_catches(fault):
    fn, group = FAULTS[fault]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the faulty functions divide by zero and overflow
        report = check_operator(fn, framework="numpy", dtypes=["float32"])
    assert group in {row.group for row in report.wrong}, str(report)
    assert not report.ok


def test_a_backend_that_is_not_the_one_asked_for_is_wrong():
    report = check_operator(attend, backend="reference", dtypes=["float32"])
    assert report.wrong[0].detail == "backend cpu ran instead of reference"


@pytest.mark.parametrize("kernel", ["MATH", "FLASH_ATTENTION"])
def test_torch(kernel):
    """What the table in docs/torch.md says of torch stays true of the torch that is installed."""

    def sdpa(*operands, **keywords):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, kernel)):
            return torch.nn.functional.scaled_dot_product_attention(*operands, **keywords)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where it finds no fused kernel
        report = check_operator(sdpa, allowance=2)
    assert report.framework == "torch"
    wrong = {(row.group, row.name) for row in report.wrong}
    assert ("hidden", "NaN in a value that causality hides from some rows") in wrong
    fused = kernel == "FLASH_ATTENTION"
    assert (("refuses", "more keys than values") in wrong) == fused
    assert (("scale", "0, causal") in wrong) == fused
    assert {group for group, _ in wrong} <= {"hidden", "visible", "refuses", "scale"}
    assert {row.group for row in report.not_offered} == {"positions", "packed", "softcap", "sinks", "hidden"}


def test_report_reads_well():
    report = check_operator(naive, dtypes=["float32"])
    lines = str(report).splitlines()
    assert lines[0] == "test_testing.naive on numpy" or lines[0].endswith("naive on numpy")
    assert "  masks: rows that see no key (bool) (float32): error" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["rows"][0] == {
        "group": "shapes",
        "name": "batch 2, heads 3",
        "dtype": "float32",
        "status": "right",
        "detail": "",
    }
    assert sum(sum(counts) for _, *counts in report.groups()) == len(report.rows)


def test_progress_is_reported_to_the_end():
    seen = []
    check_operator(attend, dtypes=["float32"], progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(seen)


def test_a_function_that_takes_nothing_is_refused():
    with pytest.raises(FrameworkError, match="took neither NumPy arrays nor torch tensors"):
        check_operator(lambda q: q)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_what_they_say(kind):
    q, k, v = make_inputs(kind, queries=64, keys=128, seed=3)
    again = make_inputs(kind, queries=64, keys=128, seed=3)
    assert all((a == b).all() for a, b in zip((q, k, v), again, strict=True))
    s = q.astype(np.float64) @ np.swapaxes(k.astype(np.float64), -1, -2) / 4
    claims = {
        "normal": 0.8 < s.std() < 1.2,
        "hot": 25 < s.std() < 35,
        "almost_equal": 0 < s.std() < 2e-3,
        "one_huge": (np.abs(s[..., 64]) > 10 * s.std(axis=-1)).mean() > 0.5 or np.abs(s[..., 64]).max() > 300,
        "denormal": 0 < np.abs(s).max() < 1e-13,
        "far_mean": (s.mean(axis=-1) > 300 * s.std(axis=-1)).all(),
        "negative_zero": np.signbit(q[..., 0]).all() and (q[..., 0] == 0).all(),
        "duplicated_keys": (k[..., :64, :] == k[..., 64:, :]).all(),
    }
    assert claims[kind]


def test_inputs_name_the_nearest_kind():
    with pytest.raises(OptionError, match="Did you mean 'denormal'"):
        make_inputs("denormals")


def test_budget():
    truth = np.array([1.0, 2.0])
    eps = 2.0**-23
    one_off = truth + np.array([0, 3 * eps])
    assert compare(one_off, truth, truth, dtype="float32").ok
    assert not compare(truth + np.array([0, 5 * eps]), truth, truth, dtype="float32").ok
    assert compare(truth + np.array([0, 9 * eps]), truth, one_off, dtype="float32").ok
    assert not compare(np.array([1.0, np.nan]), truth, truth, dtype="float32").ok
    assert not compare(truth, np.array([1.0, np.nan]), truth, dtype="float32").ok
    assert not compare(np.array([1.0, -np.inf]), np.array([1.0, np.inf]), truth, dtype="float32").ok
    assert not compare(np.ones((2, 1)), truth, truth, dtype="float32").ok
    # A 16-bit type is allowed one unit in the last place, not two.
    sixteen = 2.0**-10
    assert compare(truth + 1.9 * sixteen, truth, truth, dtype="float16").ok
    assert not compare(truth + 2.1 * sixteen, truth, truth, dtype="float16").ok
    with pytest.raises(AssertionError, match="error 1, budget"):
        assert_within_budget(truth + 1, truth, truth, dtype="float32")


def test_a_comparison_that_zeros_or_the_mean_would_pass_is_vacuous():
    tiny = np.array([1e-9, -1e-9])
    assert compare(tiny, tiny, tiny + 1, dtype="float32").vacuous
    truth = np.array([0.5, 0.5])
    assert compare(truth, truth, truth, dtype="float32", stand_in=0.5).vacuous
    assert not compare(truth, truth, truth, dtype="float32", stand_in=0.4).vacuous


def test_without_ml_dtypes_there_is_no_bfloat16(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.setattr("attemper.testing._operator.find_spec", lambda _: None)
    with pytest.raises(DtypeError, match=r"pip install 'attemper\[bfloat16\]'"):
        make_inputs(dtype="bfloat16")
    report = check_operator(naive)
    assert {row.dtype for row in report.rows} == {"float16", "float32", "float64"}
