"""The rules about harm, numbers, masks, what is worth knowing, and what shows over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._finding import COLLAPSED, SINK, Finding, found, head_count, head_numbers, mean_of, places_of, working_heads
from ._vitals import Vitals

LARGEST_HALF = 65504.0
"""The largest float16."""


# -- harm ------------------------------------------------------------------------------------------------------------


def saturation(sites: list[Vitals], trained: bool | None) -> Iterator[Finding]:
    """The findings saturated and gradient-starved: many heads that neither rest on a sink nor let anything through."""
    collapsed: dict[str, tuple[int, ...]] = {}
    starved: dict[str, tuple[int, ...]] = {}
    working = closed = hungry = fed = 0
    for v in sites:
        free = working_heads(v)
        shut = free & (v.normalized_entropy < COLLAPSED) & (v.flow < COLLAPSED)
        thin = free & (v.gradient_flow < COLLAPSED / 2)
        working, closed = working + int(free.sum()), closed + int(shut.sum())
        fed, hungry = fed + int((free & np.isfinite(v.gradient_flow)).sum()), hungry + int(thin.sum())
        if shut.sum() >= max(2, free.sum() / 2):
            collapsed[v.site.path] = head_numbers(shut)
        if thin.any():
            starved[v.site.path] = head_numbers(thin)
    if collapsed:
        count = head_count(collapsed, sites)
        yield found(
            "saturated",
            # What training made sharp may well be meant.
            "information" if trained else "warning",
            collapsed,
            f"{count} heads in {len(collapsed)} of {len(sites)} layers put nearly all weight on one key, "
            "and not on the first.",
            evidence={"heads": count, "share_of_working_heads": closed / max(working, 1)},
            cause="Their scores are so far apart that the softmax has committed: q and k have grown, or the scale has.",
            remedy="Look for a missing scale first; then lower it, normalise q and k (QK-norm), or clip their growth.",
        )
    if fed and hungry >= fed / 2:
        yield found(
            "gradient-starved",
            "information" if trained else "warning",
            starved,
            f"{hungry} of {fed} working heads pass on less than {COLLAPSED / 2:.1%} of the gradient's variance.",
            evidence={"heads": hungry, "share_of_working_heads": hungry / fed},
            cause="The softmax is saturated: its Jacobian, diag(p) − ppᵀ, is nearly zero.",
            remedy="What saturates them starves them: lower the scale, or normalise q and k.",
        )


def dilution(sites: list[Vitals], trained: bool | None) -> Iterator[Finding]:
    """attention-diluted: a trained model whose heads hardly tell keys apart."""
    if not trained:
        return
    flat = {v.site.path: head_numbers(level) for v in sites if (level := _flat(v)).sum() > v.site.heads / 2}
    if len(flat) > len(sites) / 2:
        yield found(
            "attention-diluted",
            "warning",
            flat,
            f"Most heads of {len(flat)} of {len(sites)} layers spread their weight evenly over all keys.",
            evidence={
                "normalized_entropy": float(
                    np.mean([mean_of(v.normalized_entropy) for v in sites if v.site.path in flat])
                )
            },
            cause="The scores hardly differ: the scale is too small (1/d_k, 1/√d_model), or q and k have shrunk.",
            remedy="Compare the scale with that of the training; a probe shows where the loss is least.",
        )


def _flat(v: Vitals) -> NDArray[np.bool_]:
    return np.asarray((v.normalized_entropy > 0.99) & (v.score_std < 0.2) & (v.visible_keys > 2))


def numbers(sites: list[Vitals], trained: bool | None) -> Iterator[Finding]:  # noqa: ARG001
    """The findings nonfinite and overflow-risk."""
    broken = {v.site.path: head_numbers(v.nonfinite > 0) for v in sites if (v.nonfinite > 0).any()}
    if broken:
        rows = sum(int(v.nonfinite.sum()) for v in sites)
        yield found(
            "nonfinite",
            "error",
            broken,
            f"{rows} rows have a score or an output that is not finite; the first are in {next(iter(broken))}.",
            evidence={"rows": rows},
            cause="NaN or infinity in q, k or v, or a product that overflowed its type.",
            remedy="Look at the first path: its projections' weights and inputs, and the type q·k is computed in.",
        )
    for v in sites:
        if v.site.dtype != "float16":
            continue
        after = np.abs(np.atleast_1d(v.site.product_scale or 1.0))
        product = v.max_qk / np.where(after > 0, after, 1.0)
        near = product > LARGEST_HALF / 4
        if near.any():
            largest = float(product[near].max())
            over = largest > LARGEST_HALF
            yield found(
                "overflow-risk",
                "error" if over else "warning",
                {v.site.path: head_numbers(near)},
                f"q·k {'overflows' if over else 'comes near the end of'} float16 in {v.site.path}: "
                f"{largest:.4g} of {LARGEST_HALF:.0f}.",
                evidence={"largest_product": largest, "largest_float16": LARGEST_HALF},
                cause="The product is rounded to float16, as it is or scaled, before the softmax sees it.",
                remedy="Scale q before the product, compute it in float32 or bfloat16, or use a fused kernel.",
            )


def softcap(sites: list[Vitals], trained: bool | None) -> Iterator[Finding]:  # noqa: ARG001
    """softcap-saturated: scores so far beyond the cap that they all look alike."""
    for v in sites:
        cap = v.site.softcap
        if not cap:
            continue
        beyond = np.isfinite(v.max_qk) & (v.max_qk > 2 * cap)
        if beyond.any():
            yield found(
                "softcap-saturated",
                "warning",
                {v.site.path: head_numbers(beyond)},
                f"Scores of {v.site.path} reach {float(v.max_qk[beyond].max()):.4g}, far beyond its cap, {cap:.4g}.",
                evidence={"max_qk": float(v.max_qk[beyond].max()), "softcap": float(cap)},
                cause="tanh is flat there: the largest scores become equal and pass no gradient.",
                remedy="Raise the softcap, or lower the scale that makes the scores so large.",
            )


def masks(sites: list[Vitals], trained: bool | None) -> Iterator[Finding]:  # noqa: ARG001
    """mask-empty-rows and mask-leak."""
    empty = {v.site.path: head_numbers(v.rows_without_keys > 0) for v in sites if v.rows_without_keys.any()}
    if empty:
        rows = max(int(v.rows_without_keys.max()) for v in sites)
        hit = [v for v in sites if v.site.path in empty]
        yield found(
            "mask-empty-rows",
            "warning",
            empty,
            f"Some rows see no key at all: up to {rows} of a head, in {places_of(hit)}.",
            evidence={"rows": rows},
            cause="The mask hides every key from them; by finite minima such a row becomes the mean of all values, "
            "by −inf it becomes NaN or zeros.",
            remedy="Let every row see at least one key, or leave those rows out of the loss.",
        )
    leaking = {v.site.path: head_numbers(v.padding_weight > 1e-4) for v in sites if (v.padding_weight > 1e-4).any()}
    if leaking:
        weight = max(float(np.nanmax(v.padding_weight)) for v in sites if np.isfinite(v.padding_weight).any())
        yield found(
            "mask-leak",
            "error" if weight > 0.01 else "warning",
            leaking,
            f"Up to {weight:.2%} of a head's weight falls on keys that the attention mask calls padding.",
            evidence={"padding_weight": weight},
            cause="The padding mask does not reach these layers, or its sign is turned round.",
            remedy="Pass the mask on to the attention call (True = attend; nn.MultiheadAttention wants the opposite).",
        )


# -- worth knowing ---------------------------------------------------------------------------------------------------


def notable(sites: list[Vitals], trained: bool | None) -> Iterator[Finding]:
    """sink, outlier-head and cannot-tell."""
    resting = {
        v.site.path: head_numbers(v.first_key_weight >= SINK)
        for v in sites
        if (v.first_key_weight >= SINK).any() and mean_of(v.visible_keys) > 4
    }
    if resting:
        count = head_count(resting, sites)
        heads = sum(v.site.heads for v in sites)
        yield found(
            "sink",
            "information",
            resting,
            f"{count} of {heads} heads rest on the first key they see.",
            evidence={"heads": count, "share": count / heads},
            cause="A head with nothing to add parks its weight on the first token: usual in trained decoders.",
            remedy="None needed. Keep the first keys when a cache is cut, and leave these heads out of averages.",
        )
    outliers: dict[str, tuple[int, ...]] = {}
    largest = 0.0
    for v in sites:
        spread = np.where(np.isfinite(v.score_std), v.score_std, 0)
        if spread.size < 2:
            continue
        typical = np.array([np.median(np.delete(spread, head)) for head in range(spread.size)])
        ratio = spread / np.maximum(typical, 1e-30)
        odd = (ratio > 5) & (typical > 0) & (spread > 0.5)
        if odd.any():
            outliers[v.site.path] = head_numbers(odd)
            largest = max(largest, float(ratio[odd].max()))
    if outliers:
        yield found(
            "outlier-head",
            "information",
            outliers,
            f"{head_count(outliers, sites)} heads have scores more than five times as spread as their neighbours'.",
            evidence={"largest_ratio": largest},
            cause="The q and k of that head have grown apart from the rest; in trained models some do.",
            remedy="If it is new in a run, watch it: such heads saturate first.",
        )
    measured = any(np.isfinite(v.total_pressure).any() and not v.site.training for v in sites)
    if measured and trained is not True:
        state = "do not look trained" if trained is False else "cannot be told to be trained or not"
        yield found(
            "cannot-tell",
            "information",
            {},
            f"The weights {state}, so the pressure says nothing about the temperature.",
            cause="Only where training has come to rest is the gradient to the scale zero at the right temperature.",
            remedy="Check a trained checkpoint, or pass trained=True.",
        )


def no_pressure() -> Finding:
    """Silence that must not be taken for health."""
    return found(
        "cannot-tell",
        "information",
        {},
        "There is a loss, but no pressure could be measured.",
        cause="No finite gradient reached q: reentrant checkpointing, inference mode, or a loss that is not finite or "
        "does not depend on it.",
        remedy="Run it outside inference mode, with use_reentrant=False, and with a finite loss of the output.",
    )


def unseen(path: str, reason: str) -> Finding:
    return found(
        "unseen-attention",
        "information",
        {path: ()},
        f"{path} could not be read: {reason}.",
        cause="What can be read are fused calls, softmaxes over products, and torch's and Hugging Face's modules.",
        remedy="Its vitals are missing from the other findings; call attemper.read on its q and k to see them.",
    )


# -- over time -------------------------------------------------------------------------------------------------------


def over_time(history: list[list[Vitals]]) -> Iterator[Finding]:
    """logit-growth and entropy-collapse, from five samples on."""
    if len(history) < 5:
        return
    by_path: dict[str, list[Vitals]] = {}
    for sample in history:
        for v in sample:
            by_path.setdefault(v.site.path, []).append(v)
    latest = [samples[-1] for samples in by_path.values()]
    growing: dict[str, tuple[int, ...]] = {}
    falling: dict[str, tuple[int, ...]] = {}
    largest, steepest = 0.0, 0.0
    for path, all_samples in by_path.items():
        samples = [v for v in all_samples if v.site.heads == all_samples[-1].site.heads]
        if len(samples) < 5:
            continue
        part = max(1, len(samples) // 5)
        logits, entropy = (
            np.array([getattr(v, name) for v in samples]) for name in ("max_logit", "normalized_entropy")
        )
        first, last = (_middle(logits[:part]), _middle(logits[-part:]))
        rising = np.array([_rank_trend(logits[:, head]) > 0.8 for head in range(logits.shape[1])])
        grown = rising & (last > 20) & (last > 2 * first)
        if grown.any():
            growing[path] = head_numbers(grown)
            largest = max(largest, float(last[grown].max()))
        before, now = _middle(entropy[:part]), _middle(entropy[-part:])
        sinks = samples[-1].first_key_weight >= SINK
        fallen = (before > 0.2) & (now < 0.1) & (now < before / 3) & ~sinks
        if fallen.any():
            falling[path] = head_numbers(fallen)
            steepest = max(steepest, float((before - now)[fallen].max()))
    if growing:
        yield found(
            "logit-growth",
            "warning",
            growing,
            f"The largest logits of {head_count(growing, latest)} heads keep growing, now up to {largest:.4g}.",
            evidence={"max_logit": largest, "samples": len(history)},
            cause="q and k grow without bound: a large learning rate, no weight decay on them, no QK-norm.",
            remedy="QK-norm, QK-clip, a softcap, or a lower learning rate for W_q and W_k, before the loss spikes.",
        )
    if falling:
        yield found(
            "entropy-collapse",
            "warning",
            falling,
            f"The entropy of {head_count(falling, latest)} heads has collapsed in this run.",
            evidence={"largest_fall": steepest, "samples": len(history)},
            cause="The softmax commits to single keys faster than the rest of the model learns.",
            remedy="Lower the learning rate or warm up longer; normalise q and k; watch max_logit beside it.",
        )


def _middle(rows: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(np.median(rows, axis=0))


def _rank_trend(values: NDArray[Any]) -> float:
    """Spearman's correlation with time; 0 where nothing moves."""
    if not np.isfinite(values).all() or np.ptp(values) == 0:
        return 0.0
    ranks = np.argsort(np.argsort(values))
    return float(np.corrcoef(ranks, np.arange(values.size))[0, 1])
