"""How large an error may be: a multiple of what the plain formula makes in the same dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._arrays import to_numpy

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


@dataclass(frozen=True)
class Comparison:
    """One result held against a wider reference."""

    error: float
    """The largest absolute error; infinite where one side is finite and the other is not."""
    budget: float
    """What is allowed."""
    vacuous: bool
    """All zeros (or the stand-in) would have passed: the comparison proves nothing."""

    @property
    def ok(self) -> bool:
        """Within the budget, by a comparison that could have failed."""
        return self.error <= self.budget and not self.vacuous

    def __str__(self) -> str:
        share = f"error {self.error:.3g}, budget {self.budget:.3g}"
        return f"{share} (vacuous: zeros or the mean of v would pass)" if self.vacuous else share


def compare(
    actual: Any,
    reference: Any,
    plain: Any,
    *,
    dtype: str,
    stand_in: Any = None,
    magnitude: float = 0.0,
    allowance: float = 1.0,
) -> Comparison:
    """Hold a result against a wider reference under the error budget.

    The budget is 2 × the error of the plain formula in the same dtype + 2·eps·max|reference| (1·eps for 16-bit types,
    whose last rounding alone costs half of it). All zeros must be over it, and so must `stand_in` (the mean of v),
    or the comparison is vacuous.

    Args:
        actual: the result.
        reference: the same in float64 or wider; where it is not finite, so must `actual` be, and only there.
        plain: the result of the plain formula computed in `dtype`, or several, if there are several ways to write it:
            the one furthest off sets the budget, since any of them may be lucky in its roundings.
        dtype: the name of the dtype of `actual`.
        stand_in: a wrong answer that an inattentive function might give.
        magnitude: of the numbers `actual` is made from, where that is more than max|reference|.
        allowance: how many budgets to allow.
    """
    reference = np.asarray(reference)
    finite = np.isfinite(reference)
    largest = float(np.abs(reference[finite]).max(initial=0))
    errors = [_error(to_numpy(x), reference, finite) for x in (plain if isinstance(plain, list) else [plain])]
    # Where the plain formula overflows its dtype its error says nothing; the other term remains.
    own = max((error for error in errors if np.isfinite(error)), default=0.0)
    budget = 2 * own + (1 if dtype in ("float16", "bfloat16") else 2) * EPSILON[dtype] * max(largest, magnitude)
    budget *= allowance
    wrong_answers = [np.zeros_like(reference)]
    if stand_in is not None:
        wrong_answers.append(np.broadcast_to(np.asarray(stand_in), reference.shape))
    vacuous = any(_error(answer, reference, finite) <= budget for answer in wrong_answers)
    return Comparison(_error(to_numpy(actual), reference, finite), budget, vacuous)


def assert_within_budget(actual: Any, reference: Any, plain: Any, *, dtype: str, stand_in: Any = None) -> None:
    """Raise AssertionError when `compare` does not come out ok."""
    comparison = compare(actual, reference, plain, dtype=dtype, stand_in=stand_in)
    if not comparison.ok:
        raise AssertionError(str(comparison))


def _error(actual: Any, reference: Any, finite: Any) -> float:
    if actual.shape != reference.shape or (np.isfinite(actual) != finite).any():
        return float("inf")
    with np.errstate(invalid="ignore"):
        # ±inf must agree in sign, where the reference has one.
        signs = np.isposinf(actual) != np.isposinf(reference)
    if (signs & np.isinf(reference) & np.isinf(actual)).any():
        return float("inf")
    difference = actual[finite].astype(reference.dtype) - reference[finite]
    return float(np.abs(difference).max(initial=0))
