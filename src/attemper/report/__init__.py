"""A checkup's record as a web page, Markdown, plain text or a rich renderable; needs no torch."""

from __future__ import annotations

from ._html import to_html
from ._markdown import to_markdown
from ._terminal import to_rich, to_text

__all__ = ["to_html", "to_markdown", "to_rich", "to_text"]
