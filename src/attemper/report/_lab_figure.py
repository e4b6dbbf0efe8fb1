"""The panels of a lab's record as a matplotlib figure, and as SVG that takes its ink from the page around it."""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .._errors import OptionError, explain
from ._lab_svg import INK, inline
from ._lab_view import Record, checked, floats
from ._numbers import clean, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

INSTALL = "pip install 'attemper[lab]'"

# Okabe and Ito's colours that stand out from white and from near-black, and three more of the same lightness. None is
# alone in telling two series apart: each has a line and a marker of its own.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c46a9b", "#7b6bc8", "#a67c00", "#808080", "#c0392b")
LINES: tuple[Any, ...] = (
    "-",
    (0, (6, 2)),
    (0, (1.5, 1.5)),
    (0, (7, 2, 1.5, 2)),
    (0, (3, 1.5)),
    (0, (7, 2, 1.5, 2, 1.5, 2)),
    (0, (10, 3)),
    (0, (1, 3)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
HATCHES = ("", "///", "\\\\\\", "---", "xxx", "|||", "+++", "//")

WIDTH = 5.6
"""Inches of one panel: at 72 points to the inch what a phone and half of a page can show."""
FONT = 11.5
MARKED = 16
"""Up to so many points a series shows each with its interval; beyond that a line in a band."""


def figure(record: Record) -> Figure:
    """Every panel of the record in one figure, two to a row."""
    panels = checked(record)["panels"]
    with _drawing():
        return _figure(panels)


def to_png(record: Record) -> bytes:
    """The figure as a bitmap on white."""
    panels = checked(record)["panels"]
    out = io.BytesIO()
    with _drawing():
        _figure(panels).savefig(out, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def to_svg(record: Record, *, panel: int | None = None, prefix: str | None = None, ground: bool = False) -> str:
    """The figure, or one panel of it, as SVG: the same record gives the same bytes.

    Args:
        record: what `Result.to_dict` wrote.
        panel: draw this one alone.
        prefix: what the ids begin with, so that many figures fit in one page; the question's name by default.
        ground: draw on white, for a file that a dark page may show; without it the ink is that of the page around.
    """
    panels = checked(record)["panels"]
    panels = panels if panel is None else panels[panel : panel + 1]
    out = io.StringIO()
    with _drawing():
        _figure(panels).savefig(out, format="svg", transparent=True, metadata={"Date": None})
    name = prefix or f"{record['question']}-{'figure' if panel is None else panel}"
    drawn = inline(out.getvalue(), re.sub(r"[^\w-]", "-", name), " ".join(_in_words(one) for one in panels))
    if not ground:
        return drawn
    end = drawn.index(">")
    return f'{drawn[:end]} color="{INK}"><rect width="100%" height="100%" fill="#fff"/>{drawn[end + 1 :]}'


def require() -> None:
    """Refuse to draw without matplotlib, and say how to get it."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise OptionError(explain("Figures need matplotlib, which is not installed.", INSTALL))


@contextmanager
def _drawing() -> Iterator[None]:
    """Our settings and no others, for as long as we draw."""
    require()
    from matplotlib import rc_context, rcdefaults, rcParams

    settings = {
        "axes.edgecolor": INK,
        "axes.formatter.useoffset": False,
        "axes.labelcolor": INK,
        "axes.labelsize": FONT,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.unicode_minus": True,
        "figure.dpi": 100,
        "font.family": "DejaVu Sans",
        "font.size": FONT,
        "hatch.linewidth": 0.7,
        "legend.frameon": False,
        "savefig.bbox": None,
        "svg.fonttype": "none",
        "svg.hashsalt": "attemper",
        "text.color": INK,
        # A name with two dollar signs in it is a name, not a formula.
        "text.parse_math": False,
        "text.usetex": False,
        "xtick.color": INK,
        "xtick.labelsize": FONT - 0.5,
        "ytick.color": INK,
        "ytick.labelsize": FONT - 0.5,
    }
    with rc_context(), warnings.catch_warnings():
        # A text that the measuring font cannot show is shown by the reader's own.
        warnings.filterwarnings("ignore", message="Glyph")
        rcdefaults()
        rcParams.update(settings)
        yield


# Layout


def _figure(panels: Sequence[Record]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    across = 2 if len(panels) > 1 else 1
    heights = [_height(panel) for panel in panels]
    rows = [max(heights[i : i + across]) for i in range(0, len(panels), across)] or [1.0]
    drawn = Figure(figsize=(WIDTH * across, sum(rows)), layout=ConstrainedLayoutEngine(w_pad=0.06 * across, h_pad=0.06))
    if across == 1:
        places: list[FigureBase] = [drawn]
    else:
        grid = drawn.subfigures(len(rows), across, height_ratios=rows, squeeze=False)
        places = [grid[i // across][i % across] for i in range(len(panels))]
    for place, panel in zip(places, panels, strict=False):
        _panel(place, panel)
    return drawn


def _balanced(text: str, width: int) -> list[str]:
    """As few lines as `width` allows, of about the same length: no word is left alone on the last."""
    lines = textwrap.wrap(text, width) or [""]
    while width > 1 and len(narrower := textwrap.wrap(text, width - 1)) == len(lines):
        lines, width = narrower, width - 1
    return lines


def _title(panel: Record) -> list[str]:
    return _balanced(clean(panel["title"]), 52)


def _above(label: str) -> list[str]:
    """The name of the upright axis, over it: as one reads, however long it is."""
    return textwrap.wrap(clean(label), 56) or [""]


def _names(panel: Record) -> list[str]:
    return ["\n".join(textwrap.wrap(clean(one["name"]), 46)) for one in panel["series"]]


def _legend_columns(names: Sequence[str]) -> int:
    """As many as fit side by side under the axes."""
    longest = max((len(line) for name in names for line in name.splitlines()), default=0)
    return max(1, min(len(names), 4, int(58 // (longest + 6))))


def _legend_names(panel: Record) -> list[str]:
    names = _names(panel)
    marked = [clean(label) for label, _ in panel["references"]] if panel["kind"] == "bar" else []
    if len(names) == 1 and not marked and names[0].lower() in ("", clean(panel["y_label"]).lower()):
        return []
    return names + marked


def _height(panel: Record) -> float:
    legend = _legend_names(panel)
    lines = sum(name.count("\n") + 1 for name in legend) / (_legend_columns(legend) if legend else 1)
    bars = panel["kind"] == "bar"
    body = 0.45 + len(_words(panel)) * (0.18 + 0.21 * len(panel["series"])) if bars else 2.6
    return round(body + 0.9 + 0.22 * len(_title(panel)) + 0.2 * math.ceil(lines), 3)


def _panel(place: FigureBase, panel: Record) -> None:
    axes = place.subplots()
    # The layout leaves room for one line of the name above the axis; here for the others.
    above = _above(panel["x_label" if panel["kind"] == "bar" else "y_label"])
    title = "\n".join([*_title(panel), *[""] * (len(above) - 1)])
    place.suptitle(title, x=0.012, ha="left", fontsize=FONT + 1, fontweight="bold", linespacing=1.3)
    axes.set_ylabel("\n".join(above), rotation=0, ha="left", va="bottom", y=1.02, alpha=0.8)
    draw = _bars if panel["kind"] == "bar" else _lines
    handles = draw(axes, panel)
    if panel["kind"] != "bar":
        _lower(axes)
    for side in ("left", "bottom"):
        axes.spines[side].set_alpha(0.35)
    axes.tick_params(length=3, width=0.8, pad=4)
    for tick in (*axes.xaxis.get_ticklines(), *axes.yaxis.get_ticklines()):
        tick.set_alpha(0.35)
    axes.set_axisbelow(True)
    names = _legend_names(panel)
    if names:
        place.legend(
            handles,
            names,
            loc="outside lower left",
            ncols=_legend_columns(names),
            fontsize=FONT - 0.5,
            handlelength=3.0,
            handletextpad=0.7,
            columnspacing=1.6,
            borderaxespad=0.2,
            labelspacing=0.35,
        )


# Lines and points


def _words(panel: Record) -> list[Any]:
    """The places on the x axis in the order in which they appear."""
    return list(dict.fromkeys(at for one in panel["series"] for at in one["x"]))


def _lines(axes: Axes, panel: Record) -> list[Any]:
    handles: list[Any] = []
    words = _words(panel)
    named = any(isinstance(at, str) for at in words)
    many = len(panel["series"])
    reach: list[float] = []
    for i, one in enumerate(panel["series"]):
        x = [float(words.index(at)) for at in one["x"]] if named else floats(one["x"])
        y = _drawable(one["y"], panel["y_scale"])
        low, high = _interval(one, y, panel["y_scale"])
        reach += [at for at in (*y, *low, *high) if math.isfinite(at)]
        colour = COLOURS[i % len(COLOURS)]
        single = len(x) <= MARKED
        style: dict[str, Any] = {
            "color": colour,
            "linestyle": "none" if panel["kind"] == "points" else LINES[i % len(LINES)],
            "linewidth": 1.8,
            "marker": MARKERS[i % len(MARKERS)] if single or panel["kind"] == "points" else None,
            "markersize": 6.5 if many <= 4 else 5.5,
            # Filled and hollow by turns: where two lie on each other both are seen.
            "markerfacecolor": colour if i % 2 == 0 else "none",
            "markeredgecolor": colour,
            "markeredgewidth": 1.4,
        }
        if low and (single or panel["kind"] == "points"):
            error = (
                [at - lo for at, lo in zip(y, low, strict=True)],
                [hi - at for at, hi in zip(y, high, strict=True)],
            )
            drawn = axes.errorbar(x, y, yerr=error, elinewidth=1.1, capsize=2.5, capthick=1.1, **style)
            handles.append(drawn.lines[0])
        else:
            handles += axes.plot(x, y, **style)
            if low:
                axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    axes.set_xlabel(clean(panel["x_label"]))
    axes.grid(axis="y", color=INK, alpha=0.1, linewidth=0.8)
    reach += [float(at) for _, at in panel["references"]]
    _scale(axes, "y", panel["y_scale"], reach)
    if named:
        axes.set_xticks(range(len(words)), [clean(str(word)) for word in words])
        axes.set_xlim(-0.5, len(words) - 0.5)
    else:
        _scale(axes, "x", panel["x_scale"], [float(at) for at in words], places=True)
    _references(axes, panel)
    return handles


def _drawable(values: Sequence[Any], scale: str) -> list[float]:
    """NaN where there is no place on the axis."""
    return [at if math.isfinite(at) and (at > 0 or not scale.startswith("log")) else math.nan for at in floats(values)]


def _interval(one: Record, y: Sequence[float], scale: str) -> tuple[list[float], list[float]]:
    """The ends of the intervals, or nothing where there are none to see."""
    low, high = floats(one["low"]), floats(one["high"])
    if not low or low == high:
        return [], []
    # An interval that leaves a logarithmic axis, or that one sample leaves open, is drawn as far as there is paper.
    floor = min((at for at in y if at > 0), default=1.0) / 10 if scale.startswith("log") else -math.inf
    pairs = [(max(lo, floor), hi) for lo, hi in zip(low, high, strict=True)]
    closed = [all(map(math.isfinite, (*pair, at))) for pair, at in zip(pairs, y, strict=True)]
    return (
        [min(lo, at) if ok else at for (lo, _), at, ok in zip(pairs, y, closed, strict=True)],
        [max(hi, at) if ok else at for (_, hi), at, ok in zip(pairs, y, closed, strict=True)],
    )


def _references(axes: Axes, panel: Record) -> None:
    """Horizontal lines with their labels beside the axes, where no point can lie."""
    shown = [(label, at) for label, at in panel["references"] if at > 0 or not panel["y_scale"].startswith("log")]
    if not shown:
        return
    low, high = axes.get_ylim()
    place = axes.transData.transform
    bottom, top = (place((0 if panel["x_scale"] == "linear" else 1, at))[1] for at in (low, high))
    last = -math.inf
    for label, at in sorted(shown, key=lambda pair: pair[1]):
        axes.axhline(at, color=INK, alpha=0.6, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1.5)
        lines = textwrap.wrap(clean(label), 16) or [""]
        # Labels of neighbours are pushed apart by a line's height each.
        share = (place((0 if panel["x_scale"] == "linear" else 1, at))[1] - bottom) / (top - bottom)
        share = max(share, last + 0.075 * len(lines))
        last = share
        axes.text(1.015, share, "\n".join(lines), transform=axes.transAxes, va="center", fontsize=FONT - 1, alpha=0.85)


# Bars


def _bars(axes: Axes, panel: Record) -> list[Any]:
    """Horizontal, so that the words beside them can be read."""
    handles: list[Any] = []
    words, many = _words(panel), len(panel["series"])
    thick = 0.82 / many
    reach = [0.0]
    logarithmic = panel["y_scale"].startswith("log")
    labels: list[tuple[float, float, str]] = []
    for i, one in enumerate(panel["series"]):
        at = [words.index(word) + (i - (many - 1) / 2) * thick for word in one["x"]]
        y = _drawable(one["y"], panel["y_scale"])
        low, high = _interval(one, y, panel["y_scale"])
        reach += [value for value in (*y, *low, *high) if math.isfinite(value)]
        colour = COLOURS[i % len(COLOURS)]
        error = (
            ([v - lo for v, lo in zip(y, low, strict=True)], [hi - v for v, hi in zip(y, high, strict=True)])
            if low
            else None
        )
        drawn = axes.barh(
            at,
            y,
            height=thick * 0.86,
            facecolor=(*_rgb(colour), 0.75 if i % 2 == 0 else 0.3),
            edgecolor=colour,
            hatch=HATCHES[i % len(HATCHES)] if many > 1 else "",
            linewidth=1.1,
            xerr=error,
            error_kw={"ecolor": INK, "elinewidth": 1.1, "capsize": 2.5},
        )
        handles.append(drawn)
        ends = high or y
        labels += [
            (max(end, v), where, number(float(raw), 3))
            for end, v, where, raw in zip(ends, y, at, one["y"], strict=True)
            if math.isfinite(v)
        ]
    for text, where in panel["references"]:
        line = LINES[1 + [label for label, _ in panel["references"]].index(text) % (len(LINES) - 1)]
        handles.append(axes.axvline(float(where), color=INK, alpha=0.6, linewidth=1.2, linestyle=line, zorder=1.5))
        reach.append(float(where))
    axes.set_yticks(range(len(words)), ["\n".join(textwrap.wrap(clean(str(word)), 22)) or "" for word in words])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(clean(panel["y_label"]))
    axes.grid(axis="x", color=INK, alpha=0.1, linewidth=0.8)
    _scale(axes, "x", panel["y_scale"], [at for at in reach if at > 0] if logarithmic else reach)
    if len(labels) <= 40:
        low_end, high_end = axes.get_xlim()
        positive = [at for at in reach if at > 0]
        # Room for the numbers at the ends of the bars.
        if not logarithmic:
            axes.set_xlim(low_end if min(reach) < 0 else 0, high_end + 0.14 * (high_end - min(low_end, 0)))
        elif positive:
            # A bar needs a foot: the power of ten below the shortest.
            foot = 10.0 ** math.floor(math.log10(min(positive) * 0.9))
            axes.set_xlim(foot, high_end * (high_end / foot) ** 0.16)
        for end, where, text in labels:
            axes.annotate(
                text, (max(end, 0.0) if not logarithmic else end, where), (4, 0), textcoords="offset points",
                va="center", fontsize=FONT - 1.5,
            )  # fmt: skip
    return handles


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


# Axes


def _scale(axes: Axes, which: str, scale: str, reach: Sequence[float], *, places: bool = False) -> None:
    """Set the scale of an axis, with ticks that are plain numbers; `places` ticks the measured places themselves."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    set_scale = axes.set_xscale if which == "x" else axes.set_yscale
    finite = sorted({at for at in reach if math.isfinite(at)})
    positive = [at for at in finite if at > 0]
    if scale in ("log2", "log10") and positive:
        base = 2 if scale == "log2" else 10
        set_scale("log", base=base)
        span = math.log(positive[-1] / positive[0], base)
        if places and base == 2 and len(positive) <= 9:
            axis.set_major_locator(FixedLocator(_apart(positive)))
        elif base == 10 and span < 2:
            axis.set_major_locator(
                LogLocator(base=10, subs=(1.0, 2.0, 5.0) if span >= 0.7 else (1, 1.5, 2, 3, 4, 5, 7))
            )
        else:
            axis.set_major_locator(LogLocator(base=base, numticks=7))
    elif scale == "symlog":
        sizes = [abs(at) for at in finite if at]
        near = max(min(sizes, default=1.0), max(sizes, default=1.0) / 1e6)
        threshold = 10 ** math.floor(math.log10(near))
        set_scale("symlog", linthresh=threshold)
        axis.set_major_locator(FixedLocator(_symmetric(finite, threshold)))
    elif places and finite and all(at == int(at) for at in finite) and len(finite) <= 9:
        axis.set_major_locator(FixedLocator(_apart(finite, linear=True)))
    else:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        # From zero, where that does not flatten what is to be seen.
        if not places and finite and 0 <= finite[0] <= finite[-1] / 2 > 0:
            set_limit = axes.set_xlim if which == "x" else axes.set_ylim
            set_limit(-0.03 * finite[-1] if finite[0] < 0.03 * finite[-1] else 0, 1.06 * finite[-1])
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


def _lower(axes: Axes) -> None:
    """Room above the highest number, over which the name of the axis stands."""
    scale = axes.yaxis.get_transform()
    low, high = scale.transform(axes.get_ylim())
    places = [at for at in scale.transform(axes.get_yticks()) if low < at <= high]
    reach = low + (max(places, default=low) - low) / 0.97
    if reach > high:
        axes.set_ylim(top=float(scale.inverted().transform(reach)))


_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def _tick(value: float) -> str:
    """A plain number; powers of ten beyond a few digits as powers."""
    text = number(float(f"{value:.6g}"))
    mantissa, mark, exponent = text.partition("e")
    if not mark:
        return text
    power = f"10{exponent.translate(_RAISED)}"
    return power if mantissa == "1" else f"{mantissa}·{power}"


def _apart(places: Sequence[float], *, linear: bool = False) -> list[float]:
    """Those of the places whose numbers would not run into each other."""
    span = places[-1] - places[0] if linear else math.log(places[-1] / places[0])
    kept: list[float] = []
    for at in places:
        gap = (at - kept[-1] if linear else math.log(at / kept[-1])) if kept else math.inf
        if not kept or gap >= span * 0.018 * (2 + len(number(at))):
            kept.append(at)
    return kept


def _symmetric(finite: Sequence[float], threshold: float) -> list[float]:
    """Zero and powers of ten to either side, seven at the most."""
    if not finite:
        return [0.0]
    ticks = [0.0]
    for sign, edge in ((1, finite[-1]), (-1, -finite[0])):
        if edge > 0:
            decades = list(range(round(math.log10(threshold)), math.floor(math.log10(max(edge, threshold))) + 1))
            ticks += [sign * 10.0**power for power in decades[:: max(1, math.ceil(len(decades) / 4))]]
    return sorted(ticks)


def _in_words(panel: Record) -> str:
    """What someone who cannot see the figure is told."""
    names = ", ".join(clean(one["name"]) for one in panel["series"])
    title = clean(panel["title"]).rstrip(".")
    return f"{title}. Chart of {clean(panel['y_label'])} over {clean(panel['x_label'])}: {names}."
