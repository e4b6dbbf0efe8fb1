"""A checkup's record as a web page, Markdown, plain text or a rich renderable, and a lab's; needs no torch."""

from __future__ import annotations

from ._html import to_html
from ._lab_figure import figure as lab_figure
from ._lab_figure import require as require_figures
from ._lab_figure import to_png as lab_png
from ._lab_figure import to_svg as lab_svg
from ._lab_html import lab_html
from ._lab_markdown import lab_markdown
from ._lab_terminal import lab_rich, lab_summary, lab_text
from ._markdown import to_markdown
from ._terminal import to_rich, to_text

__all__ = [
    "lab_figure",
    "lab_html",
    "lab_markdown",
    "lab_png",
    "lab_rich",
    "lab_summary",
    "lab_svg",
    "lab_text",
    "require_figures",
    "to_html",
    "to_markdown",
    "to_rich",
    "to_text",
]
