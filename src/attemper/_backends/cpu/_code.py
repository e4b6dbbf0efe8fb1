"""The machine code of kernels: compiled once on a machine, then read from a file, without Numba."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..._progress import tell
from ._target import target, target_machine

KERNELS = {
    "_forward": ("forward_f32", "forward_f64", "forward_bf16", "thin_f32", "thin_f64", "merge_f32", "merge_f64"),
    "_backward": ("backward_f32", "backward_f64", "gather_f32", "gather_f64"),
    "_careful": ("careful",),
}
"""Every kernel, by the module that it is written in."""

ENTRY = "attemper_kernel"
"""The symbol of a kernel in its object file: a function of one address."""

_lock = threading.Lock()
_addresses: dict[str, int] = {}
_engines: list[Any] = []  # they own the code that the addresses point to


def address(kernel: str) -> int:
    """Where the machine code of a kernel is; read from the cache, or compiled, when it is first asked for."""
    found = _addresses.get(kernel)
    if found is not None:
        return found
    with _lock:
        if kernel not in _addresses:
            _addresses[kernel] = _load(_object_code(kernel))
        return _addresses[kernel]


def _object_code(kernel: str) -> bytes:
    path = cache_file(kernel)
    with suppress(OSError):
        kept = path.read_bytes()
        # LLVM would take the process down with a file that was cut short.
        if kept[:_SEAL] == _seal(kept[_SEAL:]):
            return kept[_SEAL:]
    stage = f"Compiling {kernel} for {target().instructions}, once on this machine"
    tell(stage, 0, 1)
    from ._compile import object_code

    module = next(name for name, kernels in KERNELS.items() if kernel in kernels)
    code = object_code(getattr(import_module(f".{module}", __package__), kernel))
    # Where nothing can be written every process compiles for itself.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first, so that nobody ever reads half a file.
        unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        unfinished.write_bytes(_seal(code) + code)
        unfinished.replace(path)
    tell(stage, 1, 1)
    return code


_SEAL = 32


def _seal(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


def _load(code: bytes) -> int:
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address(ENTRY))


def cache_file(kernel: str) -> Path:
    """Where a kernel's object file is kept, whether it is there or not."""
    return cache_folder() / f"{kernel}-{_digest()}.o"


def cache_folder() -> Path:
    """ATTEMPER_CACHE_DIR, or the system's place for such files."""
    given = os.environ.get("ATTEMPER_CACHE_DIR")
    if given:
        return Path(given)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "attemper"


@cache
def _digest() -> str:
    """Of all that the code follows from: the sources of this folder, the compiler and the processor."""
    own = target()
    about = (version("numba"), version("llvmlite"), own.name, own.features, sys.platform)
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"\0".join([*sources, *(part.encode() for part in about)])).hexdigest()[:16]
