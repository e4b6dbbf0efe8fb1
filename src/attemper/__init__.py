"""Scaled dot-product attention, softmax(QKᵀ/√d_k)V, with a thermometer in it.

`attend` computes attention and returns a Reading of what happened inside the softmax, without ever building the
queries × keys matrix.
"""

from importlib import import_module
from types import ModuleType

from ._attend import Attended as Attended
from ._attend import Trace as Trace
from ._attend import attend as attend
from ._attend import read as read
from ._attend import scaled_dot_product_attention as scaled_dot_product_attention
from ._attend import trace as trace
from ._errors import AttemperError as AttemperError
from ._errors import BackendError as BackendError
from ._errors import DtypeError as DtypeError
from ._errors import FrameworkError as FrameworkError
from ._errors import OptionError as OptionError
from ._errors import ShapeError as ShapeError
from ._errors import SizeError as SizeError
from ._reading import Reading as Reading
from ._scale import scale_for as scale_for
from ._vitals import Site as Site
from ._vitals import Vitals as Vitals

__version__ = "0.1.0"

_ROOMS = ("testing",)
"""Submodules that `attemper.name` imports when it is first used."""


def __getattr__(name: str) -> ModuleType:
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AttemperError",
    "Attended",
    "BackendError",
    "DtypeError",
    "FrameworkError",
    "OptionError",
    "Reading",
    "ShapeError",
    "Site",
    "SizeError",
    "Trace",
    "Vitals",
    "attend",
    "read",
    "scale_for",
    "scaled_dot_product_attention",
    "testing",
    "trace",
]
