"""Numbers and names as every rendering shows them; static/format.js follows the same rules, digit for digit."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

MISSING = "not measured"


def plain(value: Any) -> Any:
    """What JSON can carry: NaN as None, infinities as strings, NumPy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def real(value: Any) -> float | None:
    """The number behind a plain value, infinite ones included; None where there is none."""
    if value in ("inf", "-inf"):
        return float(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def finite(value: Any) -> float | None:
    """The finite number behind a plain value, or None."""
    number = real(value)
    return number if number is not None and math.isfinite(number) else None


def _minus(text: str) -> str:
    """With the minus of typography, and none before a zero."""
    return text.replace("-", "−" if any(digit in text for digit in "123456789") else "", 1)


def _stripped(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def number(value: float, digits: int = 4) -> str:
    """`value` to so many significant digits, without trailing zeros."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    # Half up, as JavaScript's toExponential rounds; Python's own format rounds half to even.
    rounded = Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal(Decimal(value))
    exponent = rounded.adjusted()
    if -4 <= exponent < 6:
        return _minus(_stripped(format(rounded, "f")))
    mantissa = _stripped(format(rounded.scaleb(-exponent), "f"))
    return f"{_minus(mantissa)}e{exponent}"


def shown(value: Any, form: str = "number") -> str:
    """A plain value as text. Forms: "number", "share" (three decimals), "count"."""
    if value is None or value == "":
        return MISSING
    if value == "nan":
        return number(math.nan)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(shown(v, form) for v in value)
    x = real(value)
    if x is None:
        return str(value)
    if math.isfinite(x) and x == int(x) and (form == "count" or isinstance(value, int)):
        return _minus(f"{int(x):,}")
    if form == "share" and math.isfinite(x) and (x == 0 or 1e-3 <= abs(x) < 1e3):
        return _minus(format(Decimal(x).quantize(Decimal("0.001"), rounding=ROUND_HALF_UP), "f"))
    return number(x)


def with_error(value: Any, error: Any) -> str:
    """`value ± error`, both to the second digit of the error."""
    x, e = finite(value), finite(error)
    if x is None:
        return shown(value)
    if not e:
        return number(x)
    rounded = Context(prec=2, rounding=ROUND_HALF_UP).create_decimal(Decimal(e))
    # The fine end needs an exponent to stay readable; the coarse end has no decimals to line up.
    if not -5 < rounded.adjusted() < 3:
        return f"{number(x, 3)} ± {number(e, 2)}"
    step = Decimal(1).scaleb(min(0, rounded.adjusted() - 1))
    here, there = (format(Decimal(n).quantize(step, rounding=ROUND_HALF_UP), "f") for n in (x, e))
    return f"{_minus(here)} ± {there}"


def aligned(values: Sequence[Any]) -> list[str]:
    """The values as `shown` writes them, all with the decimals of the finest."""
    texts = [shown(value) for value in values]
    written = [text for text, value in zip(texts, values, strict=True) if finite(value) is not None]
    most = max((len(text.partition(".")[2]) for text in written), default=0)
    if any("e" in text for text in written):
        return texts
    step = Decimal(1).scaleb(-most)
    return [
        text if x is None else _minus(format(Decimal(x).quantize(step, rounding=ROUND_HALF_UP), "f"))
        for text, x in zip(texts, map(finite, values), strict=True)
    ]


def spread(value: Any) -> str:
    """One number, or the ends of several: a scale can differ from head to head."""
    if not isinstance(value, list):
        return shown(value)
    numbers = [x for x in map(finite, value) if x is not None]
    if not numbers:
        return MISSING
    low, high = number(min(numbers)), number(max(numbers))
    return low if low == high else f"{low} … {high}"


def large(count: Any) -> str:
    """A count of parameters in words: 134.5 million."""
    n = finite(count)
    if n is None:
        return shown(count)
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if n >= size:
            return f"{number(n / size)} {word}"
    return shown(int(n), "count")


def plural(count: int, noun: str) -> str:
    """1 head, 2 heads."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


JOINERS = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"


def clean(text: str) -> str:
    """One line without control characters: a name must not move the cursor."""
    spaced = " ".join(text.split())
    # A joiner holds an emoji or a word of some scripts together, and can hide nothing.
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in JOINERS else c
        for c in spaced
    )
