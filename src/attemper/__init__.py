"""Scaled dot-product attention, softmax(QKᵀ/√d_k)V, with a thermometer in it.

`attend` computes attention and returns a Reading of what happened inside the softmax, without ever building the
queries × keys matrix.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._attend import Attended as Attended
from ._attend import Trace as Trace
from ._attend import attend as attend
from ._attend import read as read
from ._attend import scaled_dot_product_attention as scaled_dot_product_attention
from ._attend import trace as trace
from ._checkup import Checkup as Checkup
from ._diagnose import diagnose as diagnose
from ._errors import AttemperError as AttemperError
from ._errors import BackendError as BackendError
from ._errors import DtypeError as DtypeError
from ._errors import FrameworkError as FrameworkError
from ._errors import OptionError as OptionError
from ._errors import ShapeError as ShapeError
from ._errors import SizeError as SizeError
from ._finding import Finding as Finding
from ._progress import on_progress as on_progress
from ._reading import Reading as Reading
from ._scale import scale_for as scale_for
from ._vitals import Site as Site
from ._vitals import Vitals as Vitals

if TYPE_CHECKING:
    from ._watch import Monitor as Monitor
    from ._watch import check as check
    from ._watch import watch as watch

__version__ = "0.1.0"

_ROOMS = ("lab", "nn", "report", "testing")
"""Submodules that `attemper.name` imports when it is first used."""

_WATCHING = ("Monitor", "check", "watch")
"""Names that need torch, imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    if name in _WATCHING:
        return getattr(import_module("._watch", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


__all__ = [
    "AttemperError",
    "Attended",
    "BackendError",
    "Checkup",
    "DtypeError",
    "Finding",
    "FrameworkError",
    "Monitor",
    "OptionError",
    "Reading",
    "ShapeError",
    "Site",
    "SizeError",
    "Trace",
    "Vitals",
    "attend",
    "check",
    "diagnose",
    "lab",
    "nn",
    "on_progress",
    "read",
    "report",
    "scale_for",
    "scaled_dot_product_attention",
    "testing",
    "trace",
    "watch",
]
