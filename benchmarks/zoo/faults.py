"""The table of faults: what is planted, which rules count as having found it, how grave they must be, and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .planting import (
    Fault,
    corrupt_head,
    empty_rows,
    folded,
    grown_head,
    half_precision,
    leak,
    padded_width,
    softcap,
    wrong_scale,
)
from .specimen import Place

MISSING = {"scale-missing": "warning"}
WRONG = {"scale-wrong": "warning"}


def scale_faults() -> list[Fault]:
    kinds: tuple[tuple[str, str, Mapping[str, str], Callable[[Place, float], float]], ...] = (
        ("removed", "the scale is 1", MISSING, lambda place, right: 1.0),  # noqa: ARG005
        ("doubled", "twice the right scale", WRONG, lambda place, right: 2 * right),  # noqa: ARG005
        ("1/d_k", "1/d_k for 1/√d_k", WRONG, lambda place, right: 1 / place.head_dim),  # noqa: ARG005
        ("1/√d_model", "the model's width for the head's", WRONG, lambda place, right: place.model_dim**-0.5),  # noqa: ARG005
    )
    return [
        Fault(
            name=f"scale {name}, {'one layer' if one else 'all layers'}",
            meaning=meaning,
            rules=rules,
            where="that layer" if one else "every layer",
            plant=wrong_scale(value, one=one),
            light=name in ("removed", "doubled") or one,
        )
        for name, meaning, rules, value in kinds
        for one in (False, True)
    ]


FAULTS: tuple[Fault, ...] = (
    *scale_faults(),
    Fault(
        name="padded head_dim",
        meaning="q and k padded with zeros, scaled by the padded width",
        rules=WRONG,
        where="every layer",
        plant=padded_width,
        light=False,
    ),
    Fault(
        name="factor 2 folded into W_q, all layers",
        meaning="trained weights at twice their scale, which no scale argument shows: too cold",
        rules={"cold": "warning"},
        where="any layer",
        plant=folded(2.0, one=False),
    ),
    Fault(
        name="factor 1/2 folded into W_q, all layers",
        meaning="trained weights at half their scale: too hot",
        rules={"hot": "warning"},
        where="any layer",
        plant=folded(0.5, one=False),
    ),
    Fault(
        name="factor 1/2 folded into W_q, one layer",
        meaning="trained weights of one layer at half their scale: too hot",
        rules={"hot": "warning"},
        where="that layer",
        plant=folded(0.5, one=True),
    ),
    Fault(
        name="float16 near overflow",
        meaning="q·k between half of the largest float16 and all of it",
        rules={"overflow-risk": "warning"},
        where="that layer",
        plant=half_precision(1),
        light=False,
    ),
    Fault(
        name="float16 overflow",
        meaning="q·k past the largest float16",
        rules={"overflow-risk": "warning", "nonfinite": "error"},
        where="that layer",
        plant=half_precision(0),
        light=False,
    ),
    Fault(
        name="saturating softcap",
        meaning="a cap of a quarter of the scores' standard deviation",
        rules={"softcap-saturated": "warning"},
        where="every layer",
        plant=softcap,
    ),
    Fault(
        name="mask leak",
        meaning="the caller's mask calls keys padding that rows attend to",
        rules={"mask-leak": "warning"},
        where="every layer with padding",
        plant=leak,
    ),
    Fault(
        name="empty rows",
        meaning="a causal mask that hides a row's own key: the first row sees none",
        rules={"mask-empty-rows": "warning"},
        where="every causal layer; the first where all after it is NaN",
        plant=empty_rows,
    ),
    Fault(
        name="NaN in one head",
        meaning="one query weight is NaN",
        rules={"nonfinite": "error"},
        where="that layer and head",
        plant=corrupt_head,
    ),
    Fault(
        name="one head grown 10×",
        meaning="W_q and W_k of one head × 10",
        rules={"outlier-head": "information", "saturated": "warning"},
        where="that layer and head",
        plant=grown_head,
    ),
)
