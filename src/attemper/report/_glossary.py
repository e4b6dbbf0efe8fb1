"""What each vital is called, how it is coloured and what it means, in one sentence."""

from __future__ import annotations

from typing import NamedTuple


class Term(NamedTuple):
    """One field of Vitals, in words."""

    name: str
    label: str
    form: str
    """"share", "number" or "count": how its values are written."""
    scale: str
    """"sequential", or "diverging" around zero."""
    natural: tuple[float | None, float | None]
    """The ends that the quantity itself has; None where the data set them."""
    meaning: str
    unmeasured: str | None = None
    """What stands for "not measured" beside None: a maximum over nothing is −inf."""
    always: bool = True
    """Whether zeros everywhere are worth a map."""


_SHARE = (0.0, 1.0)
_UP = (0.0, None)
_FREE = (None, None)

TERMS = (
    Term(
        "normalized_entropy",
        "Normalised entropy",
        "share",
        "sequential",
        _SHARE,
        "Entropy of the weights over the most it could be: 1 spreads evenly over the visible keys, 0 rests on one.",
    ),
    Term(
        "flow",
        "Flow",
        "share",
        "sequential",
        _SHARE,
        "1 − Σp², the trace of the softmax's Jacobian: near 0 the softmax is saturated and passes no gradient.",
    ),
    Term(
        "first_key_weight",
        "First-key weight",
        "share",
        "sequential",
        _SHARE,
        "Weight on the first visible key; a head that rests there is a sink.",
    ),
    Term(
        "max_logit",
        "Largest logit",
        "number",
        "sequential",
        _FREE,
        "The largest score that entered the softmax.",
        "-inf",
    ),
    Term(
        "score_std",
        "Score deviation",
        "number",
        "sequential",
        _UP,
        "Standard deviation of the scores of a row: about 1 for random queries and keys at the scale 1/√d_k.",
    ),
    Term(
        "gradient_flow",
        "Gradient flow",
        "share",
        "sequential",
        _UP,
        "Share of the upstream gradient that passes the softmax, as the backward pass measured it.",
    ),
    Term(
        "pressure",
        "Pressure",
        "number",
        "diverging",
        _FREE,
        "Gradient of the loss to the log of the scale: zero at the right temperature, above zero where a smaller scale "
        "would lower the loss, below where a larger one would.",
    ),
    Term(
        "effective_keys",
        "Effective keys",
        "number",
        "sequential",
        (1.0, None),
        "1 / Σp²: how many keys the weight is spread over.",
    ),
    Term("largest_weight", "Largest weight", "share", "sequential", _SHARE, "The largest weight of a row."),
    Term("entropy", "Entropy", "number", "sequential", _UP, "−Σ p ln p of the weights of a row."),
    Term(
        "least_normalized_entropy",
        "Least entropy",
        "share",
        "sequential",
        _SHARE,
        "The lowest normalised entropy of any row.",
        "inf",
    ),
    Term(
        "logsumexp",
        "Log-sum-exp",
        "number",
        "sequential",
        _FREE,
        "ln Σ eˢ, the log of the softmax's denominator.",
    ),
    Term(
        "max_qk",
        "Largest q·k",
        "number",
        "sequential",
        _FREE,
        "The largest scaled q·k, before softcap and bias.",
        "-inf",
    ),
    Term("expected_score", "Expected score", "number", "sequential", _FREE, "Σ p·s: the score as the weights see it."),
    Term("score_mean", "Mean score", "number", "diverging", _FREE, "Mean of the scores of a row."),
    Term("collision", "Collision", "share", "sequential", _SHARE, "Σp²: the chance that two draws hit one key."),
    Term("visible_keys", "Visible keys", "number", "sequential", _UP, "How many keys a row sees."),
    Term("sink_mass", "Sink mass", "share", "sequential", _SHARE, "Weight taken by learned sinks.", None, False),
    Term("output_norm", "Output norm", "number", "sequential", _UP, "Norm of the output row."),
    Term(
        "padding_weight",
        "Padding weight",
        "share",
        "sequential",
        _SHARE,
        "Weight on keys that the mask calls padding; it should be zero.",
    ),
    Term(
        "nonfinite",
        "Rows not finite",
        "count",
        "sequential",
        _UP,
        "Rows with a score or an output that is not finite.",
        None,
        False,
    ),
    Term(
        "rows_without_keys",
        "Rows without keys",
        "count",
        "sequential",
        _UP,
        "Rows that saw no key.",
        None,
        False,
    ),
    Term(
        "rows_with_one_key",
        "Rows with one key",
        "count",
        "sequential",
        _UP,
        "Rows that saw one key, so had nothing to decide.",
        None,
        False,
    ),
    Term("rows", "Rows", "count", "sequential", _UP, "Query rows behind the numbers.", None, False),
)

MAPPED = tuple(term.name for term in TERMS if term.name not in ("rows", "rows_with_one_key"))
"""The fields that are drawn as maps; the counts of rows are the same for every head."""

SITE_TERMS = (
    ("kind", "Written as", "How attention is written in the model."),
    ("heads", "Query heads", "Query heads of the call."),
    ("kv_heads", "Key heads", "Key and value heads of the call."),
    ("head_dim", "Head width", "d_k: what a query or key of one head is wide."),
    ("projected_head_dim", "Projected head width", "What a head is wide where it leaves its projection."),
    ("model_dim", "Model width", "What the model is wide."),
    ("effective_scale", "Effective scale", "What multiplies the projections' q·k in all, wherever it is applied."),
    ("declared_scale", "Declared scale", "What the configuration says the scale should be."),
    ("declared_by", "Declared by", "Who declares it."),
    ("scale_argument", "Scale argument", "What the call passed as scale."),
    ("projection_factor", "Projection factor", "The factor put on q and k before the call."),
    ("product_scale", "Scale after the product", "What multiplies q·k after the product was rounded."),
    ("qk_norm", "Queries or keys normalised", "Whether q or k was normalised after its projection."),
    ("softcap", "Softcap", "The bound that the scores are squashed to."),
    ("dtype", "Element type", "Element type of the queries."),
    ("mask", "Mask", "What mask the call took."),
    ("causal", "Causal", "Whether a row sees only the keys up to its own."),
    ("training", "Training mode", "Whether the module was in training mode."),
)
