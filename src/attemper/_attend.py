"""The operator: a Problem goes to a backend and comes back as output and Reading."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ._again import key_of, remember, remembered
from ._arrays import Array, dtype_name, require_array
from ._errors import BackendError, OptionError, explain, unknown
from ._problem import Problem, flag, pose
from ._reading import AFTER_BACKWARD, Reading, choose, reading_of, reading_together

BACKENDS = ("reference", "numpy", "torch", "cpu", "cuda", "identities")
"""Every backend, by the name of its module."""

HAS_NUMBA = find_spec("numba") is not None
HAS_TRITON = find_spec("triton") is not None
"""Asked once, for a compiler does not follow the question."""

NEED_TORCH = ("torch", "cuda", "identities")

MAY_LACK = (*AFTER_BACKWARD, "output_norm")
"""Fields that may be asked for by name and not come: they need a backward pass, or values."""

ScaleRule: TypeAlias = Literal["sqrt_dk", "unscaled", "dk"]
Scale: TypeAlias = float | Array | ScaleRule | None
Window: TypeAlias = tuple[int | None, int | None] | None
Stats: TypeAlias = str | Sequence[str]


class Attended(NamedTuple):
    """What attention returns: the output, (*batch, heads, queries, value_dim), and its Reading."""

    output: Array
    reading: Reading


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Every step of one call as an explicit matrix, (*batch, heads, queries, keys).

    Matrices are float32 or wider; the output has the operands' dtype.
    """

    scores: Array
    """q·kᵀ"""
    scaled: Array
    """times the scale"""
    capped: Array
    """after softcap"""
    masked: Array
    """after the mask: −inf where a key is hidden"""
    weights: Array
    """softmax, before dropout; rows that see no key are 0, and a sink's share is missing"""
    output: Array
    """weights·v"""

    def __repr__(self) -> str:
        names = ("scores", "scaled", "capped", "masked", "weights", "output")
        return "Trace(" + ", ".join(f"{n} {tuple(getattr(self, n).shape)}" for n in names) + ")"


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    attn_mask: Array | None = None,
    is_causal: bool = False,
    query_offset: int | Array | Literal["bottom-right"] = 0,
    window: Window = None,
    key_lengths: Array | Sequence[int] | None = None,
    cu_seqlens: Array | Sequence[Any] | None = None,
    scale: Scale = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    enable_gqa: bool = False,
    stats: Stats = "all",
    differentiable: bool = False,
    backend: str = "auto",
) -> Attended:
    """softmax(scale · q·kᵀ)·v, and what happened inside the softmax, without the queries × keys matrix.

    Shapes are (*batch, heads, length, head_dim), rank 2 (one head) to 5. Batch axes broadcast; v may have its own
    head_dim; with `enable_gqa` a key head serves a group of query heads.

    Args:
        q: (*batch, heads, queries, head_dim).
        k: (*batch, kv_heads, keys, head_dim).
        v: (*batch, kv_heads, keys, value_dim).
        attn_mask: broadcasts to (*batch, heads, queries, keys): bool (True = attend), or floating and added to the
            scores. Only False and −inf hide a key.
        is_causal: query i sees keys j ≤ i + query_offset. Combines with every other mask.
        query_offset: query i stands at position i + query_offset among the keys: a number, one per batch entry, or
            "bottom-right", which lines the last query up with the last visible key. For 2 queries and 4 keys:

                0 (top-left)    "bottom-right" (2)
                x . . .         x x x .
                x x . .         x x x x
        window: (left, right): query i sees i + offset − left ≤ j ≤ i + offset + right; None leaves a side open.
        key_lengths: keys from here on are padding: one length per batch entry.
        cu_seqlens: sequences packed along the length, as starts and end ([0, 3, 8] packs 3 and 5): one array, or a
            pair (queries, keys). Positions count from each sequence's start.
        scale: None (1/√head_dim), a number, one per head, or "sqrt_dk", "dk", "unscaled".
        softcap: scores become softcap · tanh(score / softcap), before the mask.
        sinks: a logit per head that joins the softmax's denominator only.
        dropout_p: the share of weights to drop; the kept ones grow by 1/(1 − dropout_p). The Reading is of the weights
            before dropout.
        seed: for dropout: the same seed drops the same weights on every backend. None draws one from the framework's
            global generator.
        enable_gqa: let key heads serve groups of query heads.
        stats: "all", "none", or names of Reading fields.
        differentiable: let gradients flow through logsumexp, entropy, expected_score and collision (torch only).
        backend: "auto", or a name; a named backend runs or raises. The Reading records which one ran.

    Returns:
        (output, reading). A row that sees no key outputs 0, and NaN in a key, value or bias that a row does not see
        never reaches it.

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 128, 64), dtype=np.float32)
    >>> output, reading = attend(q, k, v, is_causal=True)
    >>> output.shape, reading.entropy.shape, reading.backend
    ((8, 128, 64), (8, 128), 'cpu')
    """
    key = None
    if attn_mask is None and key_lengths is None and cu_seqlens is None and sinks is None:
        numbers = (scale, softcap, dropout_p, seed, is_causal, query_offset, enable_gqa)
        key = key_of((q, k, v), (*_sides(window), *numbers, stats, differentiable, backend))
        # Asked after key_of, which lets no array through: of that there is no truth.
        key = None if key is not None and dropout_p else key
        repeat = None if key is None else remembered(key)
        again = None if repeat is None else repeat(q, k, v)
        if again is not None:
            return again  # type: ignore[no-any-return]
    q, k, v = _given(q, k, v)
    problem = pose(
        q,
        k,
        v,
        attn_mask=attn_mask,
        is_causal=is_causal,
        query_offset=query_offset,
        window=window,
        key_lengths=key_lengths,
        cu_seqlens=cu_seqlens,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        seed=seed,
        enable_gqa=enable_gqa,
    )
    output, reading = _run(problem, stats, differentiable, backend)
    if key is not None and not differentiable and reading.backend == "cpu" and (stats == "all" or stats == "none"):
        _remember(key, problem, stats)
    return Attended(output, reading)


def read(
    q: Array,
    k: Array,
    *,
    attn_mask: Array | None = None,
    is_causal: bool = False,
    query_offset: int | Array | Literal["bottom-right"] = 0,
    window: Window = None,
    key_lengths: Array | Sequence[int] | None = None,
    cu_seqlens: Array | Sequence[Any] | None = None,
    scale: Scale = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    enable_gqa: bool = False,
    stats: Stats = "all",
    differentiable: bool = False,
    backend: str = "auto",
) -> Reading:
    """The Reading of `attend` without values: half the work, no output and no `output_norm`.

    Takes the keywords of `attend`. Dropout changes nothing here: a Reading is of the weights before it.

    >>> import numpy as np
    >>> q, k = np.random.default_rng(0).standard_normal((2, 8, 128, 64), dtype=np.float32)
    >>> bool((read(q, k).entropy > read(q, k, scale="unscaled").entropy).all())
    True
    """
    key = None
    if attn_mask is None and key_lengths is None and cu_seqlens is None and sinks is None:
        numbers = (scale, softcap, dropout_p, seed, is_causal, query_offset, enable_gqa)
        key = key_of((q, k), (*_sides(window), *numbers, stats, differentiable, backend))
        # Asked after key_of, which lets no array through: of that there is no truth.
        key = None if key is not None and dropout_p else key
        repeat = None if key is None else remembered(key)
        again = None if repeat is None else repeat(q, k)
        if again is not None:
            return again  # type: ignore[no-any-return]
    q, k = _given(q, k)
    problem = pose(
        q,
        k,
        None,
        attn_mask=attn_mask,
        is_causal=is_causal,
        query_offset=query_offset,
        window=window,
        key_lengths=key_lengths,
        cu_seqlens=cu_seqlens,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        seed=seed,
        enable_gqa=enable_gqa,
    )
    reading = _run(problem, stats, differentiable, backend)[1]
    if key is not None and not differentiable and reading.backend == "cpu" and stats == "all":
        _remember(key, problem, stats)
    return reading


def gradient_flow_beside(q: Any, k: Any, v: Any, output: Any, grad: Any, reading: Reading, **options: Any) -> Any:
    """The gradient flow of each row of a call on torch tensors that somebody else computed, when `grad` arrives at it.

    `reading` is that of the call. `output` is what it returned; None has it computed here, as where it drops weights.
    """
    from ._backends._operator import call_of, flow

    q, k, v = _given(q, k, v)
    problem = pose(q, k, v, **options)
    road, _ = _pick(problem, "auto")
    call = call_of(problem, problem.batch, banded=road == "cuda")
    return flow(*call, output, reading.max_logit, reading.largest_weight, reading.logsumexp, grad.to(q.dtype), road)


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """`torch.nn.functional.scaled_dot_product_attention`: its signature and meaning, on torch tensors and NumPy arrays.

    It differs on purpose. It refuses

    - `attn_mask` with `is_causal`, as torch's documentation says; torch's fused kernels apply both;
    - keys and values of different lengths; torch's fused kernel on a CPU reads past the end;
    - what does not fit together in a problem without queries, keys or batch, where torch looks at nothing;
    - a `dropout_p` that is not a number in [0, 1), and a `scale` that is not a finite one;
    - ranks above 5, grouped heads with other numbers of key than value heads (unless one is 1), and nested tensors;
    - forward-mode and second derivatives (`attend` takes them with backend="reference"), and a seed per entry of vmap.

    It takes

    - a floating mask of any floating dtype and of any rank that broadcasts, and keeps a float32 mask under autocast;
    - a `scale` as `attend` does: a tensor that learns, one per head, a name;
    - `enable_gqa` at any rank, and one query head beside several key heads.

    It returns something else where

    - a key, value or mask that a query does not see holds NaN or infinity: that stays out of its output;
    - `is_causal` meets a scale of 0 or less: torch's fused kernel on a CPU gives NaN;
    - a problem without keys broadcasts: the output has the broadcast shape, torch's that of the query;
    - there is dropout: it follows `torch.manual_seed`, but drops other weights than torch.

    >>> import numpy as np
    >>> x = np.eye(2, dtype=np.float32)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).round(2).tolist()
    [[1.0, 0.0], [0.33000001311302185, 0.6700000166893005]]
    """
    if attn_mask is not None and flag("is_causal", is_causal):
        fix = "Put the causal part into attn_mask, or call attemper.attend, which combines them."
        raise OptionError(explain("attn_mask and is_causal were both given.", fix))
    return attend(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        stats="none",
    ).output


def trace(
    q: Array,
    k: Array,
    v: Array,
    *,
    attn_mask: Array | None = None,
    is_causal: bool = False,
    query_offset: int | Array | Literal["bottom-right"] = 0,
    window: Window = None,
    key_lengths: Array | Sequence[int] | None = None,
    cu_seqlens: Array | Sequence[Any] | None = None,
    scale: Scale = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    enable_gqa: bool = False,
) -> Trace:
    """Every step of `attend` as an explicit matrix, to look at; refuses what would not fit in memory.

    >>> import numpy as np
    >>> steps = trace(np.eye(2), np.eye(2), np.eye(2), scale="unscaled")
    >>> steps.scores.tolist(), steps.weights.round(3).tolist()
    ([[1.0, 0.0], [0.0, 1.0]], [[0.731, 0.269], [0.269, 0.731]])
    """
    q, k, v = _given(q, k, v)
    problem = pose(
        q,
        k,
        v,
        attn_mask=attn_mask,
        is_causal=is_causal,
        query_offset=query_offset,
        window=window,
        key_lengths=key_lengths,
        cu_seqlens=cu_seqlens,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        seed=seed,
        enable_gqa=enable_gqa,
    )
    steps = _backend("reference", problem.framework).matrices(problem)
    wide: Any = np.float64 if dtype_name(problem.q) == "float64" else np.float32

    def shaped(x: Array, dtype: Any) -> Array:
        if problem.framework == "numpy":
            with np.errstate(over="ignore"):
                x = x.astype(dtype)
        elif dtype is not wide:
            x = x.to(dtype)
        return x[..., 0, :, :] if problem.one_head else x

    return Trace(
        scores=shaped(steps.scores, wide),
        scaled=shaped(steps.scaled, wide),
        capped=shaped(steps.capped, wide),
        masked=shaped(steps.masked, wide),
        weights=shaped(steps.weights, wide),
        output=shaped(steps.output, problem.q.dtype),
    )


def _given(*operands: Array) -> tuple[Array, ...]:
    """The operands q, k and perhaps v, as autocast would have them."""
    if operands[-1] is None:
        # As v it means "statistics only" further down, so it must not slip through here.
        for name, array in zip(("q", "k", "v"), operands, strict=False):
            require_array(name, array)
    torch = sys.modules.get("torch")
    q = operands[0]
    if torch is None or not isinstance(q, torch.Tensor):
        return operands
    kind = q.device.type
    if not ((kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)):
        return operands
    # As torch's own attention does: narrow what is floating, leave float64 alone.
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in operands
    )


def _run(problem: Problem, stats: Stats, differentiable: bool, backend: str) -> tuple[Array, Reading]:
    wanted = choose(stats)
    if flag("differentiable", differentiable) and problem.framework == "numpy":
        fix = "Pass torch tensors, or leave differentiable=False."
        raise OptionError(explain("differentiable=True, but NumPy arrays carry no gradients.", fix))
    name, module = _pick(problem, backend)
    run = partial(module.run, differentiable=True) if differentiable else module.run
    output, fields = run(problem, wanted)
    missing = [] if stats == "all" else [field for field in wanted if field not in fields and field not in MAY_LACK]
    if missing:
        fix = "Leave it out of stats, or pass backend='auto'."
        raise BackendError(explain(f"backend {name!r} cannot give {', '.join(sorted(missing))}.", fix))
    rows = tuple(problem.q.shape[:-1])
    if problem.one_head:
        output = None if output is None else output[..., 0, :, :]
        fields = {field: value if field == "gradients" else value[..., 0, :] for field, value in fields.items()}
        rows = rows[1:]
    awaited = tuple([field for field in AFTER_BACKWARD if field in wanted])
    return output, reading_of(fields, backend=name, rows=rows, awaited=awaited)


def _sides(window: Any) -> tuple[Any, ...]:
    """A window as two plain values; what is no window makes no key, or one like no other."""
    if window is None:
        return None, None
    return window if type(window) is tuple and len(window) == 2 else (window, window, window)


def _remember(key: Any, problem: Problem, stats: Stats) -> None:
    """Keep how to repeat a call, where the backend can."""
    wanted = choose(stats)
    again = _backend("cpu", problem.framework).again(problem, wanted)
    if again is None:
        return
    awaited = tuple([field for field in AFTER_BACKWARD if field in wanted])
    nothing = reading_of({}, backend="cpu", rows=again.rows, awaited=awaited)
    problem_has_no_values = problem.v is None

    def repeat(*operands: Array) -> Any:
        found = again(*operands)
        if found is None:
            return None
        output, together = found
        reading = nothing if together is None else reading_together(together, backend="cpu", awaited=awaited)
        return reading if problem_has_no_values else Attended(output, reading)

    remember(key, repeat)


def _pick(problem: Problem, backend: str) -> tuple[str, Any]:
    if not (isinstance(backend, str) and (backend == "auto" or backend in BACKENDS)):
        raise unknown("backend", backend, ("auto", *BACKENDS))
    name = _best(problem) if backend == "auto" else backend
    # Said without the import: torch may not even be installed.
    reason = "it computes on torch tensors" if name in NEED_TORCH and problem.framework != "torch" else None
    module: Any = None if reason else _backend(name, problem.framework)
    reason = reason or module.unsupported(problem)
    if reason is not None:
        fix = "Pass backend='auto' to let the operands choose."
        raise BackendError(explain(f"backend {name!r} cannot take this call: {reason}.", fix))
    return name, module


def _best(problem: Problem) -> str:
    """What `backend="auto"` takes: compiled kernels where there are any, for a small problem too; else plain tiles."""
    place = "cpu" if problem.framework == "numpy" else problem.q.device.type
    if place == "cpu" and HAS_NUMBA:
        return "cpu"
    if place == "cuda" and HAS_TRITON and _backend("cuda", problem.framework).unsupported(problem) is None:
        return "cuda"
    return problem.framework


def _backend(name: str, framework: str) -> Any:
    """The module of a backend, imported when it is used and by its name, which a compiler can follow."""
    if name == "torch":
        from ._backends import torch

        return torch
    if name == "cpu":
        from ._backends import cpu

        return cpu
    if name == "cuda":
        from ._backends import cuda

        return cuda
    if name == "numpy":
        from ._backends import numpy

        return numpy
    if name == "identities":
        from ._backends import identities

        return identities
    if framework == "torch":
        from ._backends import torch_reference

        return torch_reference
    from ._backends import reference

    return reference
