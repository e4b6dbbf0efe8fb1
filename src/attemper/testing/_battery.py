"""The cases every attention function should get right, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ._inputs import KINDS, make_inputs


@dataclass(frozen=True, eq=False)
class Case:
    """Operands, keywords of `attend`, and what a right function does with them."""

    group: str
    name: str
    dtype: str
    q: Any
    k: Any
    v: Any
    keywords: Mapping[str, Any] = field(default_factory=dict)
    must_raise: bool = False
    nothing_to_see: bool = False
    """No row sees a key: the right output is all zeros, so zeros are not evidence of a fault."""


def battery(dtypes: list[str], seed: int = 0) -> Iterator[Case]:
    """Every case in every dtype."""
    for dtype in dtypes:
        for number, (group, name, shape, keywords, flags) in enumerate(_cases(dtype)):
            q, k, v = make_inputs(**{"dtype": dtype, "seed": seed + number, **shape})
            edit = flags.pop("edit", None)
            if edit is not None:
                q, k, v = edit(q, k, v)
            yield Case(group, name, dtype, q, k, v, keywords, **flags)


def _cases(dtype: str) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(group, name, shape, keywords, flags)."""
    wide = np.float64 if dtype == "float64" else np.float32
    rng = np.random.default_rng(99)

    def case(
        group: str, name: str, shape: dict[str, Any] | None = None, keywords: dict[str, Any] | None = None, **flags: Any
    ) -> tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]:
        return group, name, shape or {}, keywords or {}, flags

    yield case("shapes", "batch 2, heads 3")
    yield case("shapes", "rank 2", edit=lambda q, k, v: (q[0, 0], k[0, 0], v[0, 0]))
    yield case("shapes", "rank 3", {"batch": ()})
    yield case("shapes", "rank 5", {"batch": (2, 2)})
    yield case("shapes", "value head_dim 24, key head_dim 16", {"value_dim": 24})
    yield case("shapes", "one query", {"queries": 1})
    for head_dim in (1, 40, 80, 96, 256):
        yield case("shapes", f"head_dim {head_dim}", {"batch": (1,), "heads": 2, "head_dim": head_dim})
    for queries, keys in ((127, 129), (128, 128), (130, 513), (257, 1025)):
        yield case(
            "shapes", f"{queries} queries, {keys} keys", {"batch": (1,), "heads": 2, "queries": queries, "keys": keys}
        )
    yield case("shapes", "batch axes that broadcast", {"batch": (3,)}, edit=lambda q, k, v: (q, k[:1], v[:1]))
    yield case("shapes", "query batch axes that broadcast", {"batch": (3,)}, edit=lambda q, k, v: (q[:1], k, v))
    grouped = {"heads": 6, "kv_heads": 2}
    yield case("grouped heads", "6 heads on 2", grouped, {"enable_gqa": True})
    yield case("grouped heads", "6 heads on 1", {"heads": 6, "kv_heads": 1}, {"enable_gqa": True})
    yield case("grouped heads", "6 heads on 2, causal", grouped, {"enable_gqa": True, "is_causal": True})
    yield case("layout", "head_dim not last in memory", edit=lambda *x: tuple(_strided(a, (-1, -2)) for a in x))
    yield case("layout", "heads after length in memory", edit=lambda *x: tuple(_strided(a, (-3, -2)) for a in x))
    yield case(
        "layout",
        "every second key of a longer array",
        {"keys": 58},
        edit=lambda q, k, v: (q, k[..., ::2, :], v[..., ::2, :]),
    )

    full, square = (2, 3, 17, 29), {"queries": 29}
    shown = rng.random(full) < 0.6
    bias = rng.standard_normal(full).astype(wide)
    hiding = np.where(rng.random(full) < 0.4, -np.inf, bias).astype(wide)
    none_shown = shown.copy()
    none_shown[..., 3:6, :] = False
    yield case("masks", "bool, per entry and head", {}, {"attn_mask": shown})
    yield case("masks", "bool, queries × keys", {}, {"attn_mask": shown[0, 0]})
    yield case("masks", "bool, key padding", {}, {"attn_mask": shown[:, :1, :1]})
    yield case("masks", "bool, rank 1", {}, {"attn_mask": shown[0, 0, 0]})
    yield case("masks", "bias", {}, {"attn_mask": bias})
    yield case("masks", "bias that broadcasts over heads", {}, {"attn_mask": bias[:, :1]})
    yield case("masks", "bias with −inf", {}, {"attn_mask": hiding})
    yield case("masks", "rows that see no key (bool)", {}, {"attn_mask": none_shown})
    yield case(
        "masks", "rows that see no key (−inf)", {}, {"attn_mask": np.where(none_shown, bias, -np.inf).astype(wide)}
    )
    yield case("masks", "rows that see one key", {}, {"attn_mask": np.eye(17, 29, 5, dtype=bool)})
    yield case("masks", "no row sees a key", {}, {"attn_mask": np.zeros((17, 29), dtype=bool)}, nothing_to_see=True)
    yield case("masks", "grouped heads, bool", grouped, {"attn_mask": shown[:, :1], "enable_gqa": True})

    yield case("causal", "square", square, {"is_causal": True})
    yield case("causal", "fewer queries than keys: top-left", {}, {"is_causal": True})
    yield case("causal", "more queries than keys", {"queries": 40}, {"is_causal": True})
    yield case("causal", "with a bool mask", {}, {"is_causal": True, "attn_mask": shown})
    yield case("causal", "300 queries, 600 keys", {"batch": (1,), "queries": 300, "keys": 600}, {"is_causal": True})
    yield case("positions", "causal, offset 5", {}, {"is_causal": True, "query_offset": 5})
    yield case("positions", "causal, offset −4: rows that see no key", {}, {"is_causal": True, "query_offset": -4})
    yield case("positions", "causal, one offset per entry", {}, {"is_causal": True, "query_offset": np.array([3, 9])})
    yield case("positions", "causal, bottom-right", {}, {"is_causal": True, "query_offset": "bottom-right"})
    yield case("positions", "window (3, 2)", {}, {"window": (3, 2)})
    yield case("positions", "window (None, 1)", {}, {"window": (None, 1)})
    yield case(
        "positions",
        "causal, window (4, None), bottom-right",
        {},
        {"is_causal": True, "window": (4, None), "query_offset": "bottom-right"},
    )
    yield case(
        "positions", "window (40, 8) in 700 keys", {"batch": (1,), "queries": 700, "keys": 700}, {"window": (40, 8)}
    )
    yield case("positions", "key lengths", {}, {"key_lengths": np.array([11, 26])})
    yield case("positions", "a key length of 0", {}, {"key_lengths": np.array([0, 29])})
    yield case(
        "positions",
        "key lengths, causal, bottom-right",
        {},
        {"key_lengths": np.array([21, 26]), "is_causal": True, "query_offset": "bottom-right"},
    )
    starts, key_starts = np.array([0, 4, 4, 17]), np.array([0, 9, 12, 29])
    yield case("packed", "three sequences, causal", {"keys": 17}, {"cu_seqlens": starts, "is_causal": True})
    yield case("packed", "own key starts", {}, {"cu_seqlens": (starts, key_starts)})
    yield case(
        "packed",
        "own key starts, causal, bottom-right",
        {},
        {"cu_seqlens": (starts, key_starts), "is_causal": True, "query_offset": "bottom-right"},
    )

    yield case("scale", "0.3", {}, {"scale": 0.3})
    yield case("scale", "0, causal", {}, {"scale": 0.0, "is_causal": True})
    yield case("scale", "negative", {}, {"scale": -0.25})
    yield case("scale", "one per head", {}, {"scale": np.array([0.1, 0.25, 0.6])})
    yield case("softcap", "2", {}, {"softcap": 2.0})
    yield case("softcap", "2, saturated, with bias", {"kind": "hot"}, {"softcap": 2.0, "attn_mask": bias})
    sinks = np.array([-1.0, 0.5, 30.0]).astype(wide)
    yield case("sinks", "one logit per head", {}, {"sinks": sinks})
    yield case("sinks", "with rows that see no key", {}, {"sinks": sinks, "attn_mask": none_shown})

    for kind in KINDS:
        if kind == "normal" or (kind == "far_mean" and dtype == "bfloat16"):
            continue  # with 8 bits a mean of a thousand leaves nothing of the spread: any answer would be right
        name = kind.replace("_", " ")
        if kind not in ("almost_equal", "denormal"):  # without a mask these come out as the mean of v
            yield case("hostile", name, {"kind": kind})
        yield case("hostile", f"{name}, causal", {"kind": kind, **square}, {"is_causal": True})

    yield case("empty", "no queries", {"queries": 0}, nothing_to_see=True)
    yield case("empty", "no keys", {"keys": 0}, nothing_to_see=True)
    yield case("empty", "no batch", {"batch": (0,)}, nothing_to_see=True)
    yield case("empty", "value head_dim 0", {"value_dim": 0}, nothing_to_see=True)
    yield case("empty", "head_dim 0: alike over the visible keys", {"head_dim": 0, "value_dim": 8}, {"is_causal": True})

    last = np.ones((17, 29), dtype=bool)
    last[:, 20:] = False
    for what, value in (("NaN", np.nan), ("infinity", np.inf)):
        for which, place in (("key", 1), ("value", 2)):
            poison = _poison(place, slice(20, None), value)
            yield case("hidden", f"{what} in a {which} that a bool mask hides", {}, {"attn_mask": last}, edit=poison)
            yield case(
                "hidden",
                f"{what} in a {which} that −inf hides",
                {},
                {"attn_mask": np.where(last, 0, -np.inf).astype(wide)},
                edit=poison,
            )
            late = _poison(place, slice(14, 15), value)
            yield case(
                "hidden", f"{what} in a {which} that causality hides from some rows", {}, {"is_causal": True}, edit=late
            )
            padded = {"key_lengths": np.array([20, 20])}
            yield case("hidden", f"{what} in a {which} past the key length", {}, padded, edit=poison)
    spoiled = bias.copy()
    spoiled[..., 25:] = np.nan
    yield case("hidden", "NaN in a bias that causality hides", {}, {"attn_mask": spoiled, "is_causal": True})
    yield case(
        "visible",
        "NaN in a key reaches the rows that see it",
        {},
        {"is_causal": True},
        edit=_poison(1, slice(9, 10), np.nan),
    )
    yield case(
        "visible",
        "NaN in a value reaches the rows that see it",
        {},
        {"is_causal": True},
        edit=_poison(2, slice(9, 10), np.nan),
    )

    yield case("refuses", "more keys than values", edit=lambda q, k, v: (q, k, v[..., :-4, :]), must_raise=True)
    yield case("refuses", "more values than keys", edit=lambda q, k, v: (q, k[..., :-4, :], v), must_raise=True)
    yield case(
        "refuses", "key head_dim other than the query's", edit=lambda q, k, v: (q, k[..., :-1], v), must_raise=True
    )
    yield case("refuses", "4 heads on 3", {"heads": 4, "kv_heads": 3}, must_raise=True)
    yield case(
        "refuses", "a mask that does not broadcast", {}, {"attn_mask": np.ones((17, 5), dtype=bool)}, must_raise=True
    )
    yield case("refuses", "a mask of integers", {}, {"attn_mask": np.ones((17, 29), dtype=np.int64)}, must_raise=True)
    yield case("refuses", "dropout_p 1.5", {}, {"dropout_p": 1.5}, must_raise=True)


def _strided(x: Any, swap: tuple[int, int]) -> Any:
    """The same values with two axes exchanged in memory."""
    return np.ascontiguousarray(np.swapaxes(x, *swap)).swapaxes(*swap)


def _poison(place: int, keys: slice, value: float) -> Any:
    def edit(*operands: Any) -> tuple[Any, ...]:
        spoiled = operands[place].copy()
        spoiled[..., keys, :] = value
        return (*operands[:place], spoiled, *operands[place + 1 :])

    return edit
