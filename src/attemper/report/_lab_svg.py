"""The SVG that matplotlib writes, made fit to stand in a page: no styles, no addresses, ids of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring

INK = "#1d1c1a"
"""Text and axes; here it becomes currentColor, which follows the page from light to dark."""

NAMESPACE = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"
_FONTS = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def inline(text: str, prefix: str, label: str) -> str:
    """The SVG with nothing in it that a strict page would refuse, and ids that no other figure has."""
    root = fromstring(text)
    for parent in list(root.iter()):
        # Written once at the root, and not before every name.
        parent.tag = parent.tag.removeprefix(f"{{{NAMESPACE}}}")
        for child in list(parent):
            if child.tag in (f"{{{NAMESPACE}}}metadata", f"{{{NAMESPACE}}}style"):
                parent.remove(child)
    wanted = {found for node in root.iter() for value in node.attrib.values() for found in _targets(value)}
    names: dict[str, str] = {}
    for node in root.iter():
        if (own := node.attrib.pop("id", None)) in wanted:
            node.set("id", names.setdefault(str(own), f"{prefix}-{len(names)}"))
    for node in list(root.iter()):
        _plain_attributes(node, names)
        if node.tag == "text":
            _lower_indices(node)
    _prune(root)
    size = root.attrib["viewBox"].split()
    root.attrib.clear()
    root.attrib.update(
        {
            "xmlns": NAMESPACE,
            "viewBox": " ".join(size),
            "width": size[2],
            "height": size[3],
            "role": "img",
            "aria-label": label,
            "font-family": _FONTS,
            "stroke-linejoin": "round",
            "fill": "currentColor",
        }
    )
    out = tostring(root, encoding="unicode")
    return re.sub(r">\s+<", "><", out).strip() + "\n"


def _lower_indices(node: Element) -> None:
    """d_k with its index below the line."""
    pieces = re.split(r"\b([dW])_(\w+)", node.text or "")
    node.text = pieces[0]
    size = float(node.get("font-size", "10px").removesuffix("px"))
    for letter, index, rest in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        children = list(node)
        if children:
            children[-1].text = (children[-1].text or "") + letter
        else:
            node.text += letter
        # Shifted by hand: not every reader of SVG knows baseline-shift.
        low = SubElement(node, "tspan", {"dy": f"{size / 4:.1f}", "font-size": f"{size * 0.75:.1f}"})
        low.text = index
        SubElement(node, "tspan", {"dy": f"{-size / 4:.1f}"}).text = rest


def _targets(value: str) -> list[str]:
    found = re.findall(r"url\(#([^)]+)\)", value)
    return found + ([value[1:]] if value.startswith("#") else [])


def _plain_attributes(node: Element, names: Mapping[str, str]) -> None:
    """Styles as attributes, which no policy for styles forbids; links and colours as the page wants them."""
    style = node.attrib.pop("style", "")
    for part in filter(None, (piece.strip() for piece in style.split(";"))):
        name, _, value = part.partition(":")
        if name.strip() != "font-family":
            node.set(name.strip(), value.strip())
    if (link := node.attrib.pop(_LINK, None)) is not None:
        node.set("href", link)
    for name, value in list(node.attrib.items()):
        if value == INK:
            node.set(name, "currentColor")
        elif name == "href":
            node.set(name, f"#{names[value[1:]]}")
        elif "url(#" in value:
            node.set(name, re.sub(r"url\(#([^)]+)\)", lambda found: f"url(#{names[found[1]]})", value))
        elif name == "d":
            node.set(name, _short(value))
        elif name == "transform" and value.startswith("rotate(-0 "):
            del node.attrib[name]
        elif name in ("x", "y"):
            node.set(name, f"{float(value):.2f}")


def _short(path: str) -> str:
    """A path to a hundredth of a point."""
    return re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.2f}", " ".join(path.split()))


def _prune(node: Element) -> None:
    """Without the empty patches behind the figure and the groups that hold nothing."""
    for child in list(node):
        _prune(child)
        unseen = child.tag == "path" and child.get("fill") == "none" and "stroke" not in child.attrib
        hollow = child.tag in ("g", "defs") and not len(child)
        if (unseen and "id" not in child.attrib) or hollow:
            node.remove(child)
