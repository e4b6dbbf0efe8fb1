"""Somebody else's tests: the node cases of ONNX's Attention operator, opsets 23 to 25."""

import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
from ml_dtypes import finfo
from onnx import TensorProto
from onnx.backend.test.case.node import collect_testcases
from onnx.helper import get_attribute_value

import attemper

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")
FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE
STEPS = ("scaled", "capped", "masked", "weights")  # of a Trace, by qk_matmul_output_mode


def plain_cases():
    # Collecting runs the generators of every operator; the warnings are those of Cast, ReduceMax and others.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases("Attention")
    # The expanded ones are the same data for the operator written out in smaller operators.
    return [case for case in cases if "_expanded" not in case.name]


CASES = plain_cases()
each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


class Call(NamedTuple):
    operands: tuple[Any, Any, Any]  # keys and values with the cache in front
    options: dict[str, Any]
    step: str  # the matrix of the Trace that qk_matmul_output is
    expected: dict[str, Any]


def adapt(case):
    """An ONNX node in the words of `attend`."""
    (node,) = case.model.graph.node
    ((inputs, outputs),) = case.data_sets
    # The data leave out what the node leaves empty.
    inputs, outputs = iter(inputs), iter(outputs)
    given = {name: next(inputs) for name, used in zip(INPUTS, node.input, strict=False) if used}
    expected = {name: next(outputs) for name, used in zip(OUTPUTS, node.output, strict=False) if used}
    assert not [*inputs, *outputs]
    attributes = {a.name: get_attribute_value(a) for a in node.attribute}

    heads, kv_heads = attributes.pop("q_num_heads", None), attributes.pop("kv_num_heads", None)
    q, k, v = (split_heads(given.pop(name), n) for name, n in (("Q", heads), ("K", kv_heads), ("V", kv_heads)))
    offset = 0
    if "past_key" in given:
        past_key, past_value = given.pop("past_key"), given.pop("past_value")
        k, v = np.concatenate([past_key, k], axis=2), np.concatenate([past_value, v], axis=2)
        offset = past_key.shape[2]
    lengths = given.pop("nonpad_kv_seqlen", None)
    if lengths is not None:
        offset = "bottom-right"  # ONNX spells it nonpad_kv_seqlen − queries, negative ones included
    mask = given.pop("attn_mask", None)
    if mask is not None:
        # A mask may end before the keys do; the rest is hidden.
        missing = [(0, 0)] * (mask.ndim - 1) + [(0, k.shape[2] - mask.shape[-1])]
        mask = np.pad(mask, missing, constant_values=False if mask.dtype == bool else -np.inf)
    window = (attributes.pop(f"{side}_window_size", -1) for side in ("left", "right"))
    options = {
        "attn_mask": mask,
        "is_causal": bool(attributes.pop("is_causal", 0)),
        "query_offset": offset,
        "window": tuple(None if side == -1 else side for side in window),
        "key_lengths": lengths,
        "scale": attributes.pop("scale", None),
        "softcap": attributes.pop("softcap", 0) or None,
        "enable_gqa": True,
    }
    step = STEPS[attributes.pop("qk_matmul_output_mode", 0)]
    # attend has no such option: its softmax is in float32 or wider, and at these tolerances wider looks the same.
    assert attributes.pop("softmax_precision", FLOAT) in (FLOAT, DOUBLE)
    assert not given | attributes
    return Call((q, k, v), options, step, expected)


def split_heads(x, heads):
    return x if heads is None else x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def assert_agrees(case, actual, expected):
    # Zeros would agree with zeros. Rows that see no key are 0 by design, but no case consists of them.
    assert (np.isfinite(expected) & (expected != 0)).any()
    assert actual.dtype == expected.dtype
    if expected.ndim == 3:
        actual = actual.swapaxes(1, 2).reshape(expected.shape)
    # The data of a narrow type were computed in it, rounded at √scale, q·√scale, k·√scale, scores, softmax and output;
    # attend rounds the output only. That sets them one neighbouring number apart, up to 1.1 eps: allow 2.
    rtol = max(case.rtol, 2 * float(finfo(expected.dtype).eps))
    # Infinities must agree in place and sign: ONNX, too, writes −inf where a key is hidden.
    np.testing.assert_allclose(actual.astype(np.float64), expected.astype(np.float64), rtol=rtol, atol=case.atol)


def test_no_case_is_missing():
    assert len(CASES) == len({case.name for case in CASES}) == 93
    assert {case.model.opset_import[0].version for case in CASES} == {23, 24, 25}


@pytest.mark.parametrize("backend", ["numpy", "cpu", "reference"])
@each_case
def test_attend(case, backend):
    call = adapt(case)
    output, reading = attemper.attend(*call.operands, **call.options, backend=backend)
    assert reading.backend == backend
    assert_agrees(case, output, call.expected["Y"])


@each_case
def test_trace(case):
    call = adapt(case)
    _, k, v = call.operands
    steps = attemper.trace(*call.operands, **call.options)
    # The matrices of a Trace are wider than ONNX's, which have the operands' type.
    step = getattr(steps, call.step).astype(k.dtype)
    found = dict(zip(OUTPUTS, (steps.output, k, v, step), strict=True))
    for name, expected in call.expected.items():
        assert_agrees(case, found[name], expected)
