"""From what a caller passed to a Problem that nothing downstream needs to check again."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from ._arrays import (
    FLOATING,
    Array,
    device_name,
    dtype_name,
    framework_of,
    operand,
    require_array,
    require_floating,
    torch_is_plain,
)
from ._bounds import Band, Bounds, bounds_of_band, key_band, key_bounds
from ._errors import DtypeError, FrameworkError, OptionError, ShapeError, brief, explain, unknown
from ._scale import ATTEND_RULES, scale_for

RANKS = (2, 5)

MOST = 128
"""Problems to remember: more than a model has kinds of layers."""

LONGEST = 2**12
"""Queries of a problem whose bounds are worth remembering: those of a longer one take room, and to make them no time
beside the call."""

_PLAIN = frozenset((bool, int, float, str, NoneType))
"""The types of options that are what they say and never change."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """One validated call. Axes are (*batch, heads, length, head_dim); broadcast axes are views."""

    q: Array  # (*batch, heads, queries, head_dim)
    k: Array  # (*batch, kv_heads, keys, head_dim)
    v: Array | None  # (*batch, kv_heads, keys, value_dim); None when only statistics are wanted
    mask: Array | None  # bool, or floating and added; (*batch, heads, queries, keys), where an axis may be 1
    rows: Bounds | None  # the keys each query may see by position; on a GPU only where `band` does not say it
    band: Band | None  # the same in two numbers, where they say it all (torch)
    scale: float | Array  # one number (in torch perhaps a tensor), or shape (heads,)
    number: float | None  # the scale, where it is one number that a compiler may take for a constant
    softcap: float | None
    sinks: Array | None  # shape (heads,)
    dropout_p: float
    seed: int | Array
    one_head: bool  # rank-2 operands: the result has no heads axis either
    framework: str

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.q.shape[:-3])

    @property
    def bounds(self) -> Bounds | None:
        """The keys each query may see by position, row by row."""
        if self.rows is not None or self.band is None:
            return self.rows
        return bounds_of_band(sys.modules["torch"], self.band, self.queries, self.keys, self.q.device)

    @property
    def heads(self) -> int:
        return self.q.shape[-3]  # type: ignore[no-any-return]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[-3]  # type: ignore[no-any-return]

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def queries(self) -> int:
        return self.q.shape[-2]  # type: ignore[no-any-return]

    @property
    def keys(self) -> int:
        return self.k.shape[-2]  # type: ignore[no-any-return]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]  # type: ignore[no-any-return]

    @property
    def value_dim(self) -> int | None:
        return None if self.v is None else self.v.shape[-1]


def pose(
    q: Array,
    k: Array,
    v: Array | None,
    *,
    attn_mask: Array | None = None,
    is_causal: bool = False,
    query_offset: object = 0,
    window: object = None,
    key_lengths: object = None,
    cu_seqlens: object = None,
    scale: object = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    enable_gqa: bool = False,
) -> Problem:
    """Check everything once, line up ranks, broadcast batch and head axes as views."""
    key = None
    if attn_mask is None and key_lengths is None and cu_seqlens is None and sinks is None:
        operands = (q, k) if v is None else (q, k, v)
        key = _key(operands, window, (scale, is_causal, query_offset, softcap, dropout_p, enable_gqa))
    known = None if key is None else _REMEMBERED.get(key)
    if known is not None:
        return known.problem_of(q, k, v, seed)
    problem = _checked(
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
    if key is not None and (problem.rows is None or problem.queries <= LONGEST):
        if len(_REMEMBERED) >= MOST:
            _REMEMBERED.clear()
        _REMEMBERED[key] = _Known.of(problem, q, k, v)
    return problem


def _key(operands: tuple[Array, ...], window: Any, options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """All that a Problem without arrays among its options follows from; None where there may be more to it.

    Checking a small problem takes longer than computing it, and a model poses the same ones again and again.
    """
    torch = sys.modules.get("torch")
    if torch is not None and not torch_is_plain(torch):
        return None  # what is made now is no good to a later call
    sides = window if type(window) is tuple else ()
    # As keys 1, 1.0 and True are the same, but not equally right.
    kinds = tuple(map(type, options + sides))
    if not _PLAIN.issuperset(kinds) or not (window is None or sides):
        return None
    scale = options[0]
    if scale == 0:
        return None  # −0.0 is the same too, but another scale
    # Tensors that are made in inference mode are of no use outside.
    key = [torch is not None and torch.is_inference_mode_enabled(), kinds, window, options]
    for x in operands:
        kind = type(x)
        # Not isinstance: a subclass may do anything.
        if kind is np.ndarray:
            key += (kind, x.shape, x.dtype)
        elif torch is not None and (kind is torch.Tensor or kind is torch.nn.Parameter) and not x.is_nested:
            key += (x.layout, x.shape, x.dtype, x.device)
        else:
            return None
    return tuple(key)


class _Known(NamedTuple):
    """A Problem but for its operands and its seed."""

    fields: dict[str, Any]
    shapes: tuple[tuple[int, ...] | None, ...]
    """Those of q, k and v in the Problem; None for one that goes into it as it is."""

    @classmethod
    def of(cls, problem: Problem, *operands: Array | None) -> _Known:
        found = (problem.q, problem.k, problem.v)
        shapes = [None if x is own else tuple(x.shape) for x, own in zip(found, operands, strict=True)]
        return cls({**vars(problem), "q": None, "k": None, "v": None}, tuple(shapes))

    def problem_of(self, q: Array, k: Array, v: Array | None, seed: int | None) -> Problem:
        q_shape, k_shape, v_shape = self.shapes
        # Without the constructor, which sets frozen fields one by one.
        problem = object.__new__(Problem)
        vars(problem).update(
            self.fields,
            q=q if q_shape is None else _lined_up(q, q_shape),
            k=k if k_shape is None else _lined_up(k, k_shape),
            v=v if v_shape is None else _lined_up(v, v_shape),
            seed=_seed(seed, self.fields["dropout_p"], self.fields["framework"]),
        )
        return problem


_REMEMBERED: dict[Any, _Known] = {}


def _checked(
    q: Array,
    k: Array,
    v: Array | None,
    *,
    attn_mask: Array | None,
    is_causal: bool,
    query_offset: object,
    window: object,
    key_lengths: object,
    cu_seqlens: object,
    scale: object,
    softcap: float | None,
    sinks: Array | None,
    dropout_p: float,
    seed: int | None,
    enable_gqa: bool,
) -> Problem:
    operands = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    framework = _one_framework(operands)
    _one_dtype(operands)
    _lengths_agree(operands)
    aligned, one_head = _align_ranks(operands)
    batch, heads, kv_heads = _broadcast_axes(operands, aligned, enable_gqa=flag("enable_gqa", enable_gqa))

    def spread(name: str, head_count: int) -> Array:
        return _lined_up(aligned[name], (*batch, head_count, *aligned[name].shape[-2:]))

    q4, k4 = spread("q", heads), spread("k", kv_heads)
    queries, keys = q4.shape[-2], k4.shape[-2]
    positions: dict[str, Any] = {
        "is_causal": flag("is_causal", is_causal),
        "query_offset": query_offset,
        "window": window,
        "key_lengths": key_lengths,
        "cu_seqlens": cu_seqlens,
    }
    on_gpu = framework == "torch" and q4.device.type == "cuda"
    band = key_band(queries, keys, **positions) if framework == "torch" else None
    rows = None
    if band is None or not on_gpu:
        rows = key_bounds(
            np if framework == "numpy" else sys.modules["torch"],
            batch,
            queries,
            keys,
            **positions,
            # A loop on the host reads them there; a kernel on a GPU cannot.
            device=q4.device if on_gpu else "cpu",
        )
    own_scale = _scale(scale, q4.shape[-1], heads, operands)
    # A compiler that took a number of the caller's for a constant would compile anew for each.
    constant = framework == "numpy" or scale is None or isinstance(scale, str) or not _compiling()
    return Problem(
        q=q4,
        k=k4,
        v=None if v is None else spread("v", kv_heads),
        mask=_mask(attn_mask, (*batch, heads, queries, keys), operands),
        rows=rows,
        band=band,
        scale=own_scale,
        number=own_scale if constant and isinstance(own_scale, float) else None,
        softcap=_softcap(softcap, dtype_name(q)),
        sinks=_per_head("sinks", sinks, heads, operands),
        dropout_p=_dropout_p(dropout_p),
        seed=_seed(seed, dropout_p, framework),
        one_head=one_head,
        framework=framework,
    )


def flag(name: str, value: object) -> bool:
    """True or False, or an error: what merely counts as true is more often a mistake."""
    if not isinstance(value, (bool, np.bool_)):
        raise OptionError(explain(f"{name} is {brief(value)}.", "Pass True or False."))
    return bool(value)


def _shown(operands: dict[str, Array]) -> list[Any]:
    return [operand(name, array) for name, array in operands.items()]


def _one_framework(operands: dict[str, Array]) -> str:
    frameworks = {name: require_array(name, array) for name, array in operands.items()}
    for name, framework in frameworks.items():
        if framework != frameworks["q"]:
            headline = f"{name} is a {framework} array, but q is a {frameworks['q']} array."
            fix = "Pass all operands from one framework: torch.from_numpy(…) or tensor.numpy()."
            raise FrameworkError(explain(headline, fix, _shown(operands)))
        if device_name(operands[name]) != device_name(operands["q"]):
            headline = f"{name} is on {device_name(operands[name])}, but q is on {device_name(operands['q'])}."
            fix = f"Move it: {name}.to({device_name(operands['q'])!r})."
            raise FrameworkError(explain(headline, fix, _shown(operands)))
    return frameworks["q"]


def _one_dtype(operands: dict[str, Array]) -> None:
    for name, array in operands.items():
        require_floating(name, array)
        if dtype_name(array) != dtype_name(operands["q"]):
            headline = f"{name} is {dtype_name(array)}, but q is {dtype_name(operands['q'])}."
            fix = "Attention runs in one dtype: cast one of them."
            raise DtypeError(explain(headline, fix, _shown(operands)))


def _lengths_agree(operands: dict[str, Array]) -> None:
    low, high = RANKS
    for name, array in operands.items():
        if not low <= len(array.shape) <= high:
            headline = f"{name} has rank {len(array.shape)}."
            fix = f"attemper takes (*batch, heads, length, head_dim) of rank {low} to {high}."
            raise ShapeError(explain(headline, fix, _shown(operands)))
    q, k = operands["q"], operands["k"]
    if q.shape[-1] != k.shape[-1]:
        headline = f"k has head_dim {k.shape[-1]}, but q has head_dim {q.shape[-1]}."
        raise ShapeError(explain(headline, "q·k needs one head_dim.", _shown(operands)))
    if "v" in operands and operands["v"].shape[-2] != k.shape[-2]:
        headline = f"v has {operands['v'].shape[-2]} keys, but k has {k.shape[-2]} keys."
        fix = "Each key needs one value: k and v must have the same length."
        raise ShapeError(explain(headline, fix, _shown(operands)))


def _align_ranks(operands: dict[str, Array]) -> tuple[dict[str, Array], bool]:
    """Leading axes of size 1 until all ranks agree, and at least a heads axis."""
    rank = max(len(array.shape) for array in operands.values())
    aligned = {}
    for name, array in operands.items():
        # An np.matrix would insist on its two axes.
        plain = np.asarray(array) if isinstance(array, np.ndarray) else array
        aligned[name] = _with_axes(plain, max(rank, 3))
    return aligned, rank == 2


def _with_axes(array: Array, rank: int) -> Array:
    missing = rank - len(array.shape)
    return array[(None,) * missing] if missing else array


def _lined_up(array: Array, shape: tuple[int, ...]) -> Array:
    array = _with_axes(array, len(shape))
    if tuple(array.shape) == shape:
        return array
    return np.broadcast_to(array, shape) if isinstance(array, np.ndarray) else array.expand(shape)


def _broadcast_axes(
    operands: dict[str, Array], aligned: dict[str, Array], *, enable_gqa: bool
) -> tuple[tuple[int, ...], int, int]:
    """The common batch shape, the query heads and the key heads."""
    batch = aligned["q"].shape[:-3]
    for i, name in enumerate(operands):
        own = aligned[name].shape[:-3]
        if any(a != b and a != 1 and b != 1 for a, b in zip(own, batch, strict=True)):
            others = "q has" if i == 1 else "q and k have"
            headline = f"{name} has batch {_axes(own)}, but {others} batch {_axes(batch)}."
            fix = "Batch axes must be equal or 1."
            raise ShapeError(explain(headline, fix, _shown(operands)))
        batch = tuple(b if a == 1 else a for a, b in zip(own, batch, strict=True))
    q_heads, k_heads = aligned["q"].shape[-3], aligned["k"].shape[-3]
    v_heads = aligned["v"].shape[-3] if "v" in aligned else k_heads
    if k_heads != v_heads and k_heads != 1 and v_heads != 1:
        headline = f"v has {v_heads} heads, but k has {k_heads} heads."
        fix = "Each key head needs one value head: give k and v the same number of heads."
        raise ShapeError(explain(headline, fix, _shown(operands)))
    kv_heads = k_heads if v_heads == 1 else v_heads
    if q_heads == kv_heads or kv_heads == 1:
        return tuple(batch), q_heads, kv_heads
    if q_heads == 1:
        return tuple(batch), kv_heads, kv_heads
    headline = f"{'k' if k_heads == kv_heads else 'v'} has {kv_heads} heads, but q has {q_heads} heads."
    if kv_heads and q_heads % kv_heads == 0:
        if enable_gqa:
            return tuple(batch), q_heads, kv_heads
        fix = f"For grouped heads ({q_heads // kv_heads} query heads to a key head) pass enable_gqa=True."
    else:
        fix = "The number of key heads must divide the number of query heads."
    raise ShapeError(explain(headline, fix, _shown(operands)))


def _axes(shape: Sequence[int]) -> str:
    return " × ".join(str(int(n)) for n in shape)


def _mask(mask: Array | None, shape: tuple[int, ...], operands: dict[str, Array]) -> Array | None:
    if mask is None:
        return None
    involved = {"q": operands["q"], "k": operands["k"], "attn_mask": mask}
    _one_framework(involved)
    shown = _shown(involved)
    kind = dtype_name(mask)
    if kind != "bool" and kind not in FLOATING:
        fix = "Pass bool (True = attend) or floating values that are added to the scores."
        raise DtypeError(explain(f"attn_mask has dtype {kind}.", fix, shown))
    own = tuple(mask.shape)
    pairs = zip(own[::-1], shape[::-1], strict=False)
    if len(own) > len(shape) or any(n != 1 and n != size for n, size in pairs):
        headline = f"attn_mask has shape {own}, which does not broadcast to {shape}."
        fix = "A mask covers (*batch, heads, queries, keys); axes may be 1 or missing on the left."
        raise ShapeError(explain(headline, fix, shown))
    plain = np.asarray(mask) if isinstance(mask, np.ndarray) else mask
    return _with_axes(plain, len(shape))


def _scale(scale: object, head_dim: int, heads: int, operands: dict[str, Array]) -> float | Array:
    if scale is None:
        scale = "sqrt_dk"
    if isinstance(scale, str):
        if scale in ("sqrt_dmodel", "log_n"):
            needed = {"sqrt_dmodel": "model_dim", "log_n": "keys"}[scale]
            fix = f"Pass its number: scale=attemper.scale_for({scale!r}, {head_dim}, {needed}=…)."
            raise OptionError(explain(f"scale {scale!r} needs {needed}.", fix))
        if scale not in ATTEND_RULES:
            raise unknown("scale", scale, ATTEND_RULES)
        # With no components every score is 0 and any scale gives the same uniform weights.
        return scale_for(scale, head_dim) if head_dim else 1.0
    if isinstance(scale, (list, tuple)) or (framework_of(scale) and len(scale.shape) > 0):  # type: ignore[attr-defined]
        return _per_head("scale", scale, heads, operands)
    if framework_of(scale) == "torch" and framework_of(operands["q"]) == "torch":
        # A learned scale: it must stay in the graph.
        require_floating("scale", scale)
        return scale
    number = _number(scale)
    if number is None:
        fix = "Pass a number, one number per head, or one of " + ", ".join(map(repr, ATTEND_RULES)) + "."
        raise OptionError(explain(f"scale is {brief(scale)}.", fix))
    # Not math.isfinite, which a compiler cannot follow.
    if not -math.inf < number < math.inf:
        raise OptionError(explain(f"scale is {number}.", "Pass a finite number."))
    return number


def _number(value: object) -> float | None:
    """A real number as a float; None for anything else, also for what float() would read as one."""
    if isinstance(value, np.generic) or (framework_of(value) and value.shape == ()):  # type: ignore[attr-defined]
        value = value.item()  # type: ignore[attr-defined]
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _per_head(name: str, value: object, heads: int, operands: dict[str, Array]) -> Array | None:
    if value is None:
        return None
    fix = f"It holds one number per query head: shape ({heads},)."
    array: Array = value
    if isinstance(value, (list, tuple)) and framework_of(operands["q"]) == "torch" and _compiling():
        # A compiler does not follow what NumPy says of an array.
        array = sys.modules["torch"].tensor(value, dtype=sys.modules["torch"].float64, device=operands["q"].device)
    elif isinstance(value, (list, tuple)):
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):  # lists of different lengths
            array = np.asarray(None)
        if array.dtype.kind not in "iuf" and array.dtype.name not in FLOATING:
            raise OptionError(explain(f"{name} is {brief(value)}.", fix))
        array = array.astype(np.float64)
        _require_finite(name, array)
        if framework_of(operands["q"]) == "torch":
            array = sys.modules["torch"].from_numpy(array).to(operands["q"].device)
    else:
        _one_framework({"q": operands["q"], name: value})
    if tuple(array.shape) != (heads,):
        shown = _shown({"q": operands["q"], "k": operands["k"], name: array})
        raise ShapeError(explain(f"{name} has shape {tuple(array.shape)}.", fix, shown))
    require_floating(name, array)
    # What a tensor holds is not looked at, for which a GPU would be waited for: NaN in it comes through, and shows.
    if isinstance(array, np.ndarray):
        _require_finite(name, array.astype(np.float64))
    return array


def _require_finite(name: str, array: Array) -> None:
    if name == "sinks" and not (array < np.inf).all():
        raise OptionError(explain("sinks contains NaN or infinity.", "Pass finite logits, or −inf for no sink."))
    if name == "scale" and not np.isfinite(array).all():
        raise OptionError(explain("scale is not finite in every head.", "Pass finite numbers."))


def _compiling() -> bool:
    return bool(sys.modules["torch"].compiler.is_compiling())


def _softcap(softcap: Any, dtype: str) -> float | None:
    if softcap is None:
        return None
    number = _number(softcap)
    if number is None or not 0 < number < math.inf:
        fix = "Pass a positive number, or None for no cap."
        raise OptionError(explain(f"softcap is {brief(softcap)}.", fix))
    # A cap at the end of the accumulator's range bends no score, but scores divided by it would vanish.
    return None if number > (1e250 if dtype == "float64" else 1e30) else number


def _dropout_p(dropout_p: Any) -> float:
    number = _number(dropout_p)
    if number is None or not 0 <= number < 1:
        fix = "It is the share of weights to drop and lies in [0, 1)."
        raise OptionError(explain(f"dropout_p is {brief(dropout_p)}.", fix))
    return number


def _seed(seed: int | None, dropout_p: float, framework: str) -> int | Array:
    if seed is None and framework == "torch":
        # From torch's generator on the host, as a tensor: a number would be baked into a compiled graph.
        torch = sys.modules["torch"]
        return torch.randint(-(2**63), 2**63 - 1, ()) if dropout_p else 0
    if seed is None:
        # NumPy's global generator, so that np.random.seed makes a run repeatable, as torch.manual_seed does there.
        return int(np.random.randint(0, 2**63, dtype=np.int64)) if dropout_p else 0  # noqa: NPY002
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        fix = "Pass a whole number of at least 0, or None to draw one from np.random."
        raise OptionError(explain(f"seed is {brief(seed)}.", fix))
    return int(seed)
