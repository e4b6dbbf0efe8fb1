"""Which scores are too large for which number type?"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._attend import attend
from .._errors import OptionError, explain
from .._progress import Progress, silent
from .._scale import scale_for
from ._result import Config as Base
from ._result import Estimate, Evidence, Panel, Result, Series, Table, Verdict, judge, knob, near
from ._statistics import generator, mean_of

DTYPES = ("float16", "bfloat16", "float32", "float64")
GAPS = (0.0, -0.125, -0.5, -2.0)
"""How far the scores of four keys lie below the largest: the weights depend on nothing else."""
BASES = {"float16": 2.0**8, "bfloat16": 2.0**10, "float32": 2.0**10, "float64": 2.0**24}
"""Components of q and k whose product, with a gap added, still takes no rounding where it is accumulated."""
TOPS = {"float16": 2.0**15, "bfloat16": 2.0**63, "float32": 2.0**63, "float64": 2.0**511}
"""Components of q and k whose product is about the largest number that the type, or float32, can hold."""


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `overflow`."""

    dtypes: tuple[str, ...] = knob(DTYPES, "number types", choices=DTYPES)
    keys: tuple[int, ...] = knob((1, 16, 128, 1024, 8192), "keys with the same score, whose exponentials add", least=1)
    d_k: tuple[int, ...] = knob((16, 64, 128, 256, 512), "head widths for q·k in float16", least=1)
    rows: int = knob(128, "queries and keys of one matrix of q·k", least=2)
    repeats: int = knob(40, "such matrices", least=2)


QUICK = Config(repeats=12)


def run(config: Config, progress: Progress = silent) -> Result:
    """Search the largest score of the plain formula by bisection, then put larger ones through this library."""
    types = {name: found for name in config.dtypes if (found := _type(name)) is not None}
    absent = [name for name in config.dtypes if name not in types]
    if not types:
        raise OptionError(explain(f"{', '.join(absent)} is not installed.", "pip install ml_dtypes"))
    steps = len(types) + len(config.d_k)
    limits: dict[str, list[float]] = {}
    evidence, shifted = [], []
    for i, (name, dtype) in enumerate(types.items()):
        progress(f"the largest score in {name}", i, steps)
        limits[name] = [_largest(dtype, keys) for keys in config.keys]
        for keys, limit in zip(config.keys, limits[name], strict=True):
            # A type knows no score closer to the limit than the next one that it can write.
            theory = math.log(_most(dtype) / keys)
            step = _spacing(dtype, limit)
            evidence.append(near(f"largest score, {name}, {keys} keys", Estimate.exact(limit), theory, max(step, 1e-3)))
        shifted += _known(name, dtype)
    products = {}
    for i, d_k in enumerate(config.d_k):
        progress(f"q·k in float16 at d_k {d_k}", len(types) + i, steps)
        products[d_k] = _products(config, d_k)
    safe = [
        Evidence(f"error of attend, {name}, largest score {top}", Estimate.exact(error), 0.0, allowed)
        for name, top, _, _, error, allowed in shifted
    ]
    outcome = judge([*evidence, *safe])
    first = {name: _largest(dtype, 1) for name, dtype in types.items()}
    middle = config.d_k[len(config.d_k) // 2]
    return Result(
        question="overflow",
        config=config,
        summary="The exponential of a score leaves a number type where the score passes the logarithm of the type's "
        f"largest number: {', '.join(f'{name} {at:.5g}' for name, at in first.items())}. A row of n equal scores gets "
        "there ln n earlier, since the exponentials are added up. Subtracting the largest score first makes every "
        "exponent 0 or less, and nothing overflows, whatever the scores: what remains is that q·k itself must fit. In "
        f"float16 it ends at 65504, which unscaled q and k of width {middle} reach with components of size "
        f"{products[middle][0]:.3g} where they point the same way, and of standard deviation {products[middle][1]} "
        f"where they are random. This library keeps q·k in float32 and so passes there too.",
        verdicts=(
            Verdict(
                claim=15,
                outcome=outcome,
                conditional=True,
                expected="overflow above ln of the largest number",
                measured=f"largest score of one key: {', '.join(f'{name} {at:.5g}' for name, at in first.items())}; "
                f"attend goes on, up to {shifted[-1][1]} in {shifted[-1][0]}",
                reason="It holds if softmax is computed as it is written, from the exponential of the score itself. "
                "With the largest score subtracted first, as here and in every common library, it does not happen.",
                evidence=(*evidence, *safe),
            ),
        ),
        tables=(
            Table(
                title="Largest score for which the sum of exponentials is finite",
                columns=(
                    "type",
                    "largest number",
                    "keys",
                    "largest score",
                    "ln(largest number / keys)",
                    "spacing there",
                ),
                rows=tuple(
                    (name, f"{_most(dtype):.5g}", keys, at, math.log(_most(dtype) / keys), _spacing(dtype, at))
                    for name, dtype in types.items()
                    for keys, at in zip(config.keys, limits[name], strict=True)
                ),
                note="All keys have the same score. The sum is accumulated in float64 and stored in the type, which "
                "favours it."
                + (f" Not installed, and left out: {', '.join(absent)} (pip install ml_dtypes)." if absent else ""),
            ),
            Table(
                title="Softmax of four large scores, in three ways",
                columns=(
                    "type",
                    "largest score",
                    "as written",
                    "largest subtracted",
                    "attend: largest error",
                    "allowed",
                ),
                rows=tuple(shifted),
                note=f"The scores lie {', '.join(f'{abs(gap):g}' for gap in GAPS)} below the largest, which decides "
                "the weights; the last row of each type has 1, ½, 0 and −1 times the largest. All get the same q and "
                "k in the type, unscaled; the first two store q·k in it, which in 16 bits loses the gaps or is "
                "infinite before softmax begins. Allowed: two spacings of the type at 1.",
            ),
            Table(
                title="Where unscaled q·k itself leaves float16",
                columns=(
                    "d_k",
                    "components of this size, q = k",
                    "standard deviation, random q and k",
                    "the same, divided by √d_k before it is stored",
                ),
                rows=tuple((d_k, *products[d_k]) for d_k in config.d_k),
                note="The sum is accumulated in float32 and stored in float16. Random: normal, the first infinity in "
                f"a matrix of {config.rows} × {config.rows}.",
            ),
        ),
        panels=(
            Panel(
                title="Exponentials that are added up overflow ln n earlier",
                x_label="keys with the same score",
                y_label="largest score",
                x_scale="log2",
                y_scale="symlog",
                series=tuple(Series(name=name, x=config.keys, y=tuple(at)) for name, at in limits.items()),
            ),
            Panel(
                title="Unscaled, wide heads overflow float16 with smaller components",
                x_label="d_k (components)",
                y_label="size of a component at which q·k reaches 65504",
                x_scale="log2",
                y_scale="log2",
                series=(
                    Series(name="q = k, every component", x=config.d_k, y=tuple(p[0] for p in products.values())),
                    Series.of("random, standard deviation", config.d_k, [p[1] for p in products.values()]),
                    Series.of("random, divided by √d_k", config.d_k, [p[2] for p in products.values()]),
                ),
            ),
        ),
    )


def naive_weights(scores: Any) -> Any:
    """Softmax as it is written: e^s over the sum of e^s, each in the type of the scores."""
    with np.errstate(over="ignore", invalid="ignore"):
        powers = np.exp(scores)
        return powers / powers.astype(np.float64).sum(keepdims=True).astype(scores.dtype)


def _type(name: str) -> Any:
    """The type, or None where the package that brings it is not installed."""
    if name != "bfloat16":
        return np.dtype(name)
    return np.dtype(importlib.import_module("ml_dtypes").bfloat16) if importlib.util.find_spec("ml_dtypes") else None


def _finfo(dtype: Any) -> Any:
    return np.finfo(dtype) if dtype.kind == "f" else importlib.import_module("ml_dtypes").finfo(dtype)


def _most(dtype: Any) -> float:
    return float(_finfo(dtype).max)


def _spacing(dtype: Any, at: float) -> float:
    return float(_finfo(dtype).eps) * 2.0 ** math.floor(math.log2(max(abs(at), 1e-3)))


def _largest(dtype: Any, keys: int) -> float:
    """The largest score of the type for which `keys` equal exponentials have a finite sum."""

    def fits(score: float) -> bool:
        with np.errstate(over="ignore"):
            power = np.exp(np.asarray(score).astype(dtype))
            total = (power.astype(np.float64) * keys).astype(dtype)
        return bool(np.isfinite(total.astype(np.float64)))

    return float(np.asarray(_bisect(fits, -1000.0, 1000.0)).astype(dtype).astype(np.float64))


def _bisect(fits: Callable[[float], bool], low: float, high: float) -> float:
    """Where `fits` ends between low, which fits, and high, which does not."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _known(name: str, dtype: Any) -> list[tuple[Any, ...]]:
    """Scores whose weights are known, through softmax as written, with the largest subtracted, and through attend."""
    weights = np.exp(GAPS) / np.exp(GAPS).sum()
    # Scores base² + gap have the weights of the gaps; ± the largest that fits has one weight of 1.
    cases = [([base, 1.0], [[base, gap] for gap in GAPS], weights) for base in (1.0, 32.0, BASES[name])]
    cases.append(([TOPS[name]], [[TOPS[name]], [TOPS[name] / 2], [0.0], [-TOPS[name]]], np.eye(len(GAPS))[0]))
    rows: list[tuple[Any, ...]] = []
    for one, several, expected in cases:
        q, k, v = (np.array(x).astype(dtype) for x in ([one], several, np.eye(len(GAPS))))
        with np.errstate(over="ignore", invalid="ignore"):
            stored = (q.astype(np.float64) @ k.astype(np.float64).T).astype(dtype)
            words = [_words(naive_weights(x), expected) for x in (stored, stored - stored.max())]
        output: Any = attend(q, k, v, scale="unscaled").output
        error = float(np.abs(output.astype(np.float64) - expected).max())
        rows.append((name, f"{one[0] ** 2:.6g}", *words, error, 2 * float(_finfo(dtype).eps)))
    return rows


def _words(weights: Any, expected: Any) -> str:
    weights = weights.astype(np.float64)
    if not np.isfinite(weights).all():
        return "not a number"
    return "right" if np.abs(weights - expected).max() <= 0.01 else "wrong"


def _products(config: Config, d_k: int) -> tuple[float, Estimate, Estimate]:
    """The size of components at which q·k, stored in float16, is infinite: aligned, random, and random over √d_k."""
    half: Any = np.float16

    def fits(size: float) -> bool:
        with np.errstate(over="ignore"):
            return bool(np.isfinite(np.float32(d_k * size**2).astype(half)))

    aligned = _bisect(fits, 0.0, 2.0**8)
    # q·k grows with the square of the components, so one matrix tells at which size its largest entry gets there.
    top = float(np.finfo(half).max)
    sizes = []
    for repeat in range(config.repeats):
        rng = generator(config.seed, "overflow", d_k, repeat)
        q, k = rng.standard_normal((2, config.rows, d_k), dtype=np.float32)
        sizes.append(math.sqrt(top / float(np.abs(np.einsum("id,jd->ij", q, k)).max())))
    random = mean_of(sizes)
    return aligned, random, random.times(1 / math.sqrt(scale_for("sqrt_dk", d_k)))
