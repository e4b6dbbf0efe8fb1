"""The machine and the libraries that a speed depends on; torch and Numba are asked about and not imported."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("numpy", "torch", "numba", "llvmlite", "ml_dtypes")


def versions() -> dict[str, str | None]:
    """Of attemper, Python and the packages; None for one that is not installed."""
    from . import __version__

    found: dict[str, str | None] = {"attemper": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        found[package] = None
        # What cannot be imported is not there, whatever the installer remembers.
        with suppress(metadata.PackageNotFoundError, ValueError):
            if find_spec(package) is not None:
                found[package] = metadata.version(package)
    return found


@cache
def processor() -> str:
    """Its name as its maker writes it, or the architecture where the system does not tell."""
    named = next((value for name, value in _cpuinfo() if name == "model name"), "")
    if not named and sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            named = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return named or platform.processor() or platform.machine()


@cache
def flags() -> frozenset[str]:
    """What Linux says of an x86 processor's instructions; empty elsewhere."""
    return frozenset(next((value for name, value in _cpuinfo() if name == "flags"), "").split())


def instructions() -> str | None:
    """The vector instructions, where they can be told without a compiler."""
    for name, needed in (("AVX-512", "avx512f"), ("AVX2", "avx2")):
        if needed in flags():
            return name
    return "NEON" if platform.machine().lower() in ("arm64", "aarch64") else None


def has_amx() -> bool:
    """Whether the processor multiplies whole tiles of bfloat16, as torch then does and our kernels do not."""
    return "amx_bf16" in flags()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpuinfo() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
