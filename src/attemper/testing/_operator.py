"""Put anyone's attention function through the battery."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from .._arrays import FLOATING, dtype_name, framework_of, to_numpy
from .._backends import reference
from .._errors import FrameworkError, OptionError, explain
from .._problem import Problem, pose
from .._reading import MEASURED
from ._battery import Case, battery
from ._budget import compare
from ._inputs import make_inputs

Status = Literal["right", "wrong", "refused", "not offered"]

EXACT = ("visible_keys", "nonfinite")
LOGIT_LIKE = ("max_logit", "max_qk", "logsumexp", "expected_score", "score_mean", "score_std")


@dataclass(frozen=True)
class Row:
    """What a function did with one case."""

    group: str
    name: str
    dtype: str
    status: Status
    detail: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class OperatorReport:
    """What a function does right and wrong; prints as a table."""

    operator: str
    framework: str
    rows: list[Row]

    def having(self, status: Status) -> list[Row]:
        """The rows of one status."""
        return [row for row in self.rows if row.status == status]

    @property
    def wrong(self) -> list[Row]:
        """Cases that came back with a wrong answer, or with any answer where none is right."""
        return self.having("wrong")

    @property
    def refused(self) -> list[Row]:
        """Sound cases that raised: inconvenient, not wrong."""
        return self.having("refused")

    @property
    def not_offered(self) -> list[Row]:
        """Cases that need a keyword the function does not have."""
        return self.having("not offered")

    @property
    def ok(self) -> bool:
        """Every case right."""
        return all(row.status == "right" for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers under a schema name, fit for JSON."""
        rows = [asdict(row) for row in self.rows]
        return {"schema": "attemper.operator/1", "operator": self.operator, "framework": self.framework, "rows": rows}

    def groups(self) -> list[tuple[str, int, int, int, int]]:
        """(group, right, wrong, refused, not offered), in the battery's order."""
        counts: dict[str, Counter[str]] = {}
        for row in self.rows:
            counts.setdefault(row.group, Counter())[row.status] += 1
        return [(g, c["right"], c["wrong"], c["refused"], c["not offered"]) for g, c in counts.items()]

    def __str__(self) -> str:
        lines = [f"{self.operator} on {self.framework}", ""]
        lines.append(f"{'':<16}{'right':>8}{'wrong':>8}{'refused':>9}{'not offered':>13}")
        for group, right, wrong, refused, missing in self.groups():
            lines.append(f"{group:<16}{right or '·':>8}{wrong or '·':>8}{refused or '·':>9}{missing or '·':>13}")
        for title, rows in (("Wrong", self.wrong), ("Refused", self.refused)):
            if rows:
                lines += ["", title, *(f"  {line}" for line in _one_line_a_case(rows))]
        return "\n".join(lines)

    __repr__ = __str__


def check_operator(
    fn: Callable[..., Any],
    *,
    framework: Literal["numpy", "torch"] | None = None,
    device: str = "cpu",
    backend: str | None = None,
    dtypes: Sequence[str] | None = None,
    seed: int = 0,
    allowance: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> OperatorReport:
    """Put an attention function through the whole battery and say what it does right and wrong.

    The function is called as fn(q, k, v, **keywords) with the keywords of `attend` (of which torch's
    `scaled_dot_product_attention` has the first few) and only with those it takes. It returns the output, or a tuple
    that starts with it; a Reading beside it is checked field by field.

    Args:
        fn: the function.
        framework: what to pass it; None finds out by trying.
        device: where to put torch tensors.
        backend: the name every Reading must give as its backend.
        dtypes: the element types to try; None for all four, or without bfloat16 where ml_dtypes is not installed.
        seed: of the operands.
        allowance: how many error budgets to allow. One is strict: a sound kernel with a coarser exponential than
            NumPy's may need two.
        progress: called with (cases done, cases in all).
    """
    framework = framework or _framework_for(fn, device)
    known = {}
    if dtypes is None:
        dtypes = [name for name in FLOATING if name != "bfloat16" or find_spec("ml_dtypes")]
    cases = list(battery(list(dtypes), seed))
    rows = []
    for done, case in enumerate(cases):
        for keyword in case.keywords:
            if keyword not in known:
                known[keyword] = _takes(fn, keyword, framework, device)
        missing = [keyword for keyword in case.keywords if not known[keyword]]
        if missing:
            row = Row(case.group, case.name, case.dtype, "not offered", f"no {', '.join(missing)}")
        else:
            row = _judge(fn, case, framework, device, backend, allowance)
        rows.append(row)
        if progress is not None:
            progress(done + 1, len(cases))
    rows.append(_judge_dropout(fn, framework, device))
    return OperatorReport(_name(fn), framework, rows)


def _judge(
    fn: Callable[..., Any], case: Case, framework: str, device: str, backend: str | None, allowance: float
) -> Row:
    def row(status: Status, detail: str = "") -> Row:
        return Row(case.group, case.name, case.dtype, status, detail)

    try:
        result = _call(fn, case, framework, device)
    except Exception as error:  # whatever a stranger's function raises is its answer
        text = str(error).strip().split("\n")[0]
        return row("right" if case.must_raise else "refused", f"{type(error).__name__}: {text}")
    if case.must_raise:
        return row("wrong", "returned an output where it should have raised")
    output = result[0] if isinstance(result, tuple) else result
    problem = pose(case.q, case.k, case.v, **case.keywords)
    # Longer than float64 where there is such a type, so that float64 itself can be judged.
    wider = np.longdouble if case.dtype == "float64" else np.float64
    truth = reference.matrices(problem, wider)
    expected = _unstack(truth.output, problem, 2)
    if dtype_name(output) != case.dtype:
        return row("wrong", f"output has dtype {dtype_name(output)}")
    if tuple(output.shape) != expected.shape:
        return row("wrong", f"output has shape {tuple(output.shape)}, not {expected.shape}")
    found = to_numpy(output)
    if case.nothing_to_see:
        if (found != 0).any():
            return row("wrong", "output is not 0 where no key is visible")
    else:
        plain = [_unstack(_plain(problem, truth, scaled), problem, 2) for scaled in ("scores", "q", "q and k")]
        mean = _unstack(_mean_value(problem), problem, 2)
        comparison = compare(found, expected, plain, dtype=case.dtype, stand_in=mean, allowance=allowance)
        if not comparison.ok:
            return row("wrong", _describe(found, expected) or str(comparison))
    reading = getattr(result, "reading", None)
    if reading is not None:
        fault = _reading_fault(reading, problem, truth, backend, allowance)
        if fault:
            return row("wrong", fault)
    return row("right")


def _judge_dropout(fn: Callable[..., Any], framework: str, device: str, draws: int = 300) -> Row:
    """Over many draws the output with dropout averages to the output without, and is not simply that."""

    def row(status: Status, detail: str = "") -> Row:
        return Row("dropout", "averages to the output without", "float32", status, detail)

    if not _takes(fn, "dropout_p", framework, device):
        return row("not offered", "no dropout_p")
    q, k, v = make_inputs(batch=(1,), heads=2, queries=3, keys=5, head_dim=4)
    expected = reference.matrices(pose(q, k, v)).output
    case = Case("dropout", "", "float32", q, k, v, {"dropout_p": 0.4})
    try:
        results = [_call(fn, case, framework, device) for _ in range(draws)]
    except Exception as error:
        return row("refused", f"{type(error).__name__}: {error}")
    outputs = np.stack([to_numpy(r[0] if isinstance(r, tuple) else r) for r in results])
    spread = outputs.std(axis=0)
    if not spread.all():
        return row("wrong", "nothing was dropped")
    sigmas = float((np.abs(outputs.mean(axis=0) - expected) / (spread / np.sqrt(draws))).max())
    return row("right") if sigmas < 6 else row("wrong", f"the average is off by {sigmas:.1f} standard errors")


def _reading_fault(reading: Any, problem: Problem, truth: Any, backend: str | None, allowance: float) -> str | None:
    """What is wrong with a Reading, or None."""
    if backend is not None and reading.backend != backend:
        return f"backend {reading.backend} ran instead of {backend}"
    wide = "float64" if dtype_name(problem.q) == "float64" else "float32"
    expected = reference.readings(problem, truth)
    plain = reference.readings(problem, reference.matrices(problem, np.dtype(wide).type))
    # A score is rounded by eps times the sum of its absolute products, and the exponential makes that a relative error.
    absolute = pose(abs(problem.q), abs(problem.k), None, scale=np.abs(problem.scale), enable_gqa=True)
    scores = [reference.matrices(absolute).scaled[truth.visible], np.abs(truth.masked[truth.visible])]
    largest_score = max(float(np.max(x, where=np.isfinite(x), initial=0)) for x in scores)
    for name in MEASURED:
        if name not in expected:
            continue
        value = getattr(reading, name)
        if value is None:
            return f"{name} was not measured"
        right, own = (_unstack(fields[name], problem, 1) for fields in (expected, plain))
        found = to_numpy(value)
        if found.shape != right.shape:
            return f"{name} has shape {found.shape}, not {right.shape}"
        if name in EXACT:
            if (found != right).any():
                return f"{name} is wrong in {int((found != right).sum())} of {right.size} rows"
            continue
        if not right.any():  # rightly all 0, as sink_mass without sinks: exactly that
            if found.any():
                return f"{name} is not 0"
            continue
        rounded = wide
        if name == "output_norm" and problem.q.dtype.itemsize == 2:
            # Of an output whose weights were rounded to 16 bits on the way, as those of the plain formula are.
            rounded = dtype_name(problem.q)
            outputs = [_plain(problem, truth, scaled).astype(np.float64) for scaled in ("scores", "q", "q and k")]
            with np.errstate(invalid="ignore"):
                own = [_unstack(np.linalg.norm(x, axis=-1), problem, 1) for x in outputs]
        largest = float(np.abs(right[np.isfinite(right)]).max(initial=0))
        magnitude = largest_score if name in LOGIT_LIKE else largest * max(1.0, largest_score)
        if rounded != wide:
            magnitude = largest  # what was rounded most are the weights
        comparison = compare(found, right, own, dtype=rounded, magnitude=magnitude, allowance=allowance)
        if not comparison.ok:
            return f"{name}: {comparison}"
    return None


def _one_line_a_case(rows: list[Row]) -> list[str]:
    """Cases that failed alike in several dtypes, once."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.group, row.name), []).append(row)
    return [
        f"{group}: {name} ({', '.join(row.dtype for row in alike)}): {alike[0].detail}"
        for (group, name), alike in found.items()
    ]


def _describe(found: Any, expected: Any) -> str | None:
    """The two faults that deserve their own words."""
    leaked = int((~np.isfinite(found) & np.isfinite(expected)).sum())
    if leaked:
        return f"{leaked} of {found.size} outputs are not finite and should be"
    swallowed = int((np.isfinite(found) & ~np.isfinite(expected)).sum())
    if swallowed:
        return f"{swallowed} of {found.size} outputs hide a NaN or infinity they should show"
    return None


def _plain(problem: Problem, truth: Any, scaled: str) -> Any:
    """The formula as one would write it in the operands' dtype, rounding after every step.

    scale·(q·kᵀ), (scale·q)·kᵀ and (√scale·q)·(√scale·k)ᵀ are all ways to write it.
    """
    dtype = problem.q.dtype
    wide = dtype if dtype.name == "float64" else np.dtype(np.float32)

    def rounded(x: Any) -> Any:
        return x.astype(dtype).astype(wide)

    group = problem.group
    q = problem.q.astype(wide)
    k, v = (np.repeat(np.asarray(x).astype(wide), group, axis=-3) for x in (problem.k, problem.v))
    with np.errstate(all="ignore"):
        scale = np.reshape(problem.scale, (-1, 1, 1)).astype(wide)
        if scaled == "q":
            q = rounded(q * scale)
        elif scaled == "q and k":
            root = np.sqrt(np.abs(scale))
            q, k = rounded(q * root * np.sign(scale)), rounded(k * root)
        s = rounded(np.matmul(q, np.swapaxes(k, -1, -2)))
        if scaled == "scores":
            s = rounded(s * scale)
        if problem.softcap is not None:
            s = rounded(problem.softcap * np.tanh(s / problem.softcap))
        if problem.mask is not None and problem.mask.dtype != np.bool_:
            s = rounded(s + problem.mask.astype(wide))
        s = np.where(truth.visible, s, -np.inf)
        highest = s.max(axis=-1, keepdims=True, initial=-np.inf)
        e = np.where(truth.visible, np.exp(s - highest), 0)
        total = e.sum(axis=-1, keepdims=True)
        if problem.sinks is not None:
            total = total + np.exp(problem.sinks.astype(wide)[:, None, None] - highest)
        p = np.where(truth.visible, rounded(e / total), 0)
        sound = np.isfinite(v)
        output = rounded(np.matmul(p, np.where(sound, v, 0)))
    return np.where(np.isfinite(truth.output), output, truth.output)


def _mean_value(problem: Problem) -> Any:
    values = np.repeat(np.asarray(problem.v).astype(np.float64), problem.group, axis=-3)
    with np.errstate(invalid="ignore"):
        mean = values.mean(axis=-2, keepdims=True) if problem.keys else values.sum(axis=-2, keepdims=True)
    return np.broadcast_to(mean, (*problem.batch, problem.heads, problem.queries, values.shape[-1]))


def _unstack(x: Any, problem: Problem, trailing: int) -> Any:
    """Without the heads axis that rank-2 operands were given."""
    return x.squeeze(-1 - trailing) if problem.one_head else x


def _call(fn: Callable[..., Any], case: Case, framework: str, device: str) -> Any:
    keywords = {name: _convert(value, framework, device) for name, value in case.keywords.items()}
    operands = (_convert(x, framework, device) for x in (case.q, case.k, case.v))
    return fn(*operands, **keywords)


def _convert(x: Any, framework: str, device: str) -> Any:
    if isinstance(x, tuple):
        return tuple(_convert(part, framework, device) for part in x)
    if framework == "numpy" or not isinstance(x, np.ndarray):
        return x
    import torch

    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.astype(np.float32)).to(device, torch.bfloat16)
    return torch.from_numpy(x).to(device)


def _framework_for(fn: Callable[..., Any], device: str) -> Literal["numpy", "torch"]:
    """The framework whose arrays the function takes, by trying both on a tiny problem."""
    q, k, v = make_inputs(queries=2, keys=3, head_dim=4)
    answers = []
    for framework in ("numpy", "torch"):
        if framework == "torch" and "torch" not in sys.modules:
            try:
                import torch  # noqa: F401
            except ImportError:
                answers.append("torch: not installed")
                continue
        try:
            result = fn(*(_convert(x, framework, device) for x in (q, k, v)))
        except Exception as error:
            answers.append(f"{framework}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
            continue
        output = result[0] if isinstance(result, tuple) else result
        if framework_of(output) == framework:
            return "numpy" if framework == "numpy" else "torch"
        answers.append(f"{framework}: returned a {type(output).__name__}")
    fix = "It must take q, k and v of one framework and return an array of it. " + "; ".join(answers)
    raise FrameworkError(explain(f"{_name(fn)} took neither NumPy arrays nor torch tensors.", fix))


_HARMLESS = {
    "attn_mask": np.ones((2, 2), dtype=bool),
    "is_causal": True,
    "query_offset": 0,
    "window": (1, 1),
    "key_lengths": np.array([2]),
    "cu_seqlens": np.array([0, 2]),
    "scale": 0.5,
    "softcap": 5.0,
    "sinks": np.zeros(1, dtype=np.float32),
    "dropout_p": 0.0,
    "enable_gqa": True,
}
"""A value of each keyword that any function that has it must take."""


def _takes(fn: Callable[..., Any], keyword: str, framework: str, device: str) -> bool:
    if keyword not in _HARMLESS:
        raise OptionError(explain(f"No harmless value of {keyword} is known.", "Add one to _HARMLESS."))
    q, k, v = make_inputs(batch=(1,), heads=1, queries=2, keys=2, head_dim=4)
    operands = [_convert(x, framework, device) for x in (q, k, v)]
    try:
        fn(*operands, **{keyword: _convert(_HARMLESS[keyword], framework, device)})
    except TypeError:
        return False
    except Exception:
        return True
    return True


def _name(fn: Callable[..., Any]) -> str:
    inner = getattr(fn, "func", fn)
    return f"{getattr(inner, '__module__', None) or ''}.{getattr(inner, '__qualname__', type(inner).__name__)}".strip(
        "."
    )
