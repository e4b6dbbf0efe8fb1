"""A record as one HTML file that works from a disk, offline: style, script and data are inside it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from ._numbers import plain
from ._terminal import to_text
from ._view import view

MODULES = ("format", "theme", "colours", "elements", "plots", "map", "detail", "page")
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
<body{kind}>
<div id="page">{body}</div>
{beside}<script type="application/json" id="data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def to_html(record: Mapping[str, Any]) -> str:
    """The record as one HTML file; it asks nothing of any network."""
    shown = view(record)
    return page(
        f"{shown['title']}: attention checkup",
        style=static("report.css"),
        code=script(MODULES),
        data={"record": plain(record), "view": shown},
        beside=f"<noscript><pre>{html.escape(to_text(record))}</pre></noscript>\n",
    )


def page(title: str, *, style: str, code: str, data: Any, body: str = "", beside: str = "", kind: str = "") -> str:
    """One file that works from a disk: style, script and data are inside it, and nothing else may be loaded or run.

    Args:
        title: of the window; escaped here.
        style: the CSS.
        code: the script, as `script` joins it.
        data: what the script finds in the element `data`.
        body: HTML inside the element `page`.
        beside: HTML after it.
        kind: the class of the body.
    """
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src '{digest(style)}'; script-src '{digest(code)}'"
    )
    return _PAGE.format(
        policy=policy,
        title=html.escape(title),
        icon=_ICON,
        style=style,
        kind=f' class="{kind}"' if kind else "",
        body=body,
        beside=beside,
        data=embed(data),
        script=code,
    )


def embed(data: Any) -> str:
    """JSON that no HTML parser can mistake for markup."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate, which a path can hold, has no UTF-8; JSON's own escape carries it.
    text = re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def script(modules: Sequence[str], root: str = 'document.getElementById("page")') -> str:
    """The modules as one, started on `root`: without imports and exports, each name there when it is used."""
    parts = []
    for name in modules:
        code = re.sub(r"^import [^;]*;\n", "", static(f"{name}.js"), flags=re.MULTILINE)
        parts.append(re.sub(r"^export ", "", code, flags=re.MULTILINE))
    parts.append(f'start(JSON.parse(document.getElementById("data").textContent), {root});\n')
    return "\n".join(parts)


def static(name: str) -> str:
    """A file of the front end."""
    return files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """What a Content-Security-Policy knows a text by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
