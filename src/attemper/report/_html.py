"""A record as one HTML file that works from a disk, offline: style, script and data are inside it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from ._numbers import plain
from ._terminal import to_text
from ._view import view

MODULES = ("format", "colours", "elements", "plots", "map", "detail", "page")
"""The front end's modules, each after those that it imports."""

# Served over a network, a page without an icon has the browser ask for one.
_ICON = "data:,"

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<link rel="icon" href="{icon}">
<style>{style}</style>
</head>
<body>
<div id="page"></div>
<noscript><pre>{text}</pre></noscript>
<script type="application/json" id="data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def to_html(record: Mapping[str, Any]) -> str:
    """The record as one HTML file; it asks nothing of any network."""
    shown = view(record)
    style, code = _static("report.css"), script()
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src '{_digest(style)}'; script-src '{_digest(code)}'"
    )
    return _PAGE.format(
        policy=policy,
        title=html.escape(f"{shown['title']}: attention checkup"),
        icon=_ICON,
        style=style,
        text=html.escape(to_text(record)),
        data=embed({"record": plain(record), "view": shown}),
        script=code,
    )


def embed(data: Any) -> str:
    """JSON that no HTML parser can mistake for markup."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate, which a path can hold, has no UTF-8; JSON's own escape carries it.
    text = re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def script() -> str:
    """The modules as one: without their imports and exports, in an order in which every name is there when used."""
    parts = []
    for name in MODULES:
        code = re.sub(r"^import [^;]*;\n", "", _static(f"{name}.js"), flags=re.MULTILINE)
        parts.append(re.sub(r"^export ", "", code, flags=re.MULTILINE))
    parts.append('start(JSON.parse(document.getElementById("data").textContent), document.getElementById("page"));\n')
    return "\n".join(parts)


def _static(name: str) -> str:
    return files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
