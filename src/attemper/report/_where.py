"""Sites as layers, and sets of them said briefly: layers 2–19, heads 1, 2, 5."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._numbers import plural


@dataclass(frozen=True)
class Place:
    """Where a Site stands among the others."""

    index: int
    path: str
    heads: int
    group: int
    layer: tuple[int, ...]
    """The numbers in its path that tell it from its group; () where the path has none."""

    @property
    def short(self) -> str:
        """5, 2.3, or the path."""
        return ".".join(map(str, self.layer)) or self.path or "attention"

    @property
    def label(self) -> str:
        """Layer 5, or the path."""
        return f"layer {self.short}" if self.layer else self.short


@dataclass(frozen=True)
class Group:
    """Sites whose paths differ by numbers alone: one map."""

    template: str
    sites: tuple[int, ...]


def locate(sites: Sequence[Mapping[str, Any]]) -> tuple[list[Place], list[Group]]:
    """Every Site's place, and the groups in order of first call."""
    split = [str(site.get("path") or "").split(".") for site in sites]
    numbered: dict[tuple[str, ...], list[int]] = {}
    for index, parts in enumerate(split):
        shape = tuple("*" if _is_number(part) else part for part in parts)
        # Paths without a number have no layers to line up: they share one map, row by row.
        numbered.setdefault(shape if "*" in shape else (), []).append(index)
    places: dict[int, Place] = {}
    groups = []
    for number, (shape, members) in enumerate(numbered.items()):
        stars = [i for i, part in enumerate(shape) if part == "*"]
        telling = [i for i in stars if len({split[m][i] for m in members}) > 1] or stars
        template = ".".join("*" if i in telling else split[members[0]][i] for i in range(len(shape)))
        groups.append(Group(template, tuple(members)))
        for m in members:
            layer = tuple(int(split[m][i]) for i in telling)
            places[m] = Place(m, ".".join(split[m]), int(sites[m].get("heads") or 0), number, layer)
    return [places[i] for i in range(len(split))], groups


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit()


def ranges(numbers: Iterable[int]) -> str:
    """0–3, 7: runs of three and more as a range."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def layers(places: Sequence[Place]) -> str:
    """Layers 2–19; several numbers per path keep the leading ones: layers 2.0–3, 3.1."""
    named = [p.short for p in places if not p.layer]
    if named:
        return ", ".join(named)
    by_prefix: dict[tuple[int, ...], list[int]] = {}
    for p in places:
        by_prefix.setdefault(p.layer[:-1], []).append(p.layer[-1])
    texts = [
        ", ".join(f"{'.'.join(map(str, prefix))}.{run}" if prefix else run for run in ranges(last).split(", "))
        for prefix, last in by_prefix.items()
    ]
    return ("layer " if len({p.layer for p in places}) == 1 else "layers ") + ", ".join(texts)


def heads(chosen: Sequence[int], count: int) -> str:
    """All heads, head 3, heads 0–4."""
    if not chosen or len(set(chosen)) >= count:
        return "all heads" if count != 1 else "its one head"
    return f"head {chosen[0]}" if len(set(chosen)) == 1 else f"heads {ranges(chosen)}"


def resolve(where: Mapping[str, Sequence[int]], places: Sequence[Place]) -> list[tuple[int, list[int]]]:
    """(Site index, its heads) for every Site that a Finding names."""
    named = []
    for place in places:
        if place.path in where:
            chosen = [h for h in where[place.path] if 0 <= h < place.heads]
            named.append((place.index, sorted(set(chosen)) or list(range(place.heads))))
    return named


def describe(where: Mapping[str, Sequence[int]], places: Sequence[Place], groups: Sequence[Group]) -> list[str]:
    """Where a Finding holds, in as few words as say it: a phrase for each set of layers and heads."""
    known = resolve(where, places)
    read = {place.path for place in places}
    parts: dict[tuple[int, str], list[Place]] = {}
    count: dict[int, int] = {}
    for index, chosen in known:
        place = places[index]
        parts.setdefault((place.group, heads(chosen, place.heads)), []).append(place)
        count[place.group] = count.get(place.group, 0) + len(chosen)
    # Past a handful of different sets the list says less than their number.
    if len(parts) > 4:
        by_group: dict[int, list[Place]] = {}
        for (group, _), members in parts.items():
            by_group.setdefault(group, []).extend(members)
        parts = {(group, plural(count[group], "head")): members for group, members in by_group.items()}
    texts = []
    for (group, which), members in parts.items():
        of = f" of {groups[group].template}" if len(groups) > 1 and groups[group].template else ""
        texts.append(f"{layers(members)}{of}, {which}")
    texts += [path or "attention" for path in where if path not in read]
    return texts or ["the whole model"]
