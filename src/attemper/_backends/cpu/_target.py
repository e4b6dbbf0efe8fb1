"""The processor that kernels are compiled for, and the sizes of tiles that suit it."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple

COLUMNS = 3
"""Vectors of query rows in a panel, at most."""
PANELS = 4
"""Panels in a block: they share the keys and values of a tile while those are in a near cache."""
KEY_TILE = 128
MOST_AT_ONCE = 8
"""Keys whose scores, and components whose sums, are in registers at once, at most."""
THIN_ROWS = 6
"""Query rows up to which most lanes of a panel would be idle."""

_UP_TO_AVX2 = ("haswell", "broadwell", "skylake", "znver1", "znver2", "znver3", "x86-64-v3")


class Target(NamedTuple):
    """What the processor that code is compiled for can do."""

    name: str
    features: str
    """As LLVM takes them."""
    instructions: str
    bits: int
    """Of a vector register."""
    registers: int
    scalef: bool
    """Whether it multiplies by powers of 2 in one instruction."""
    bfloat16: bool
    """Whether it multiplies pairs of bfloat16."""

    @property
    def keys_at_once(self) -> int:
        """Keys whose scores are in registers at once: with three columns they and their operands fill them."""
        return MOST_AT_ONCE if self.registers == 32 else 4

    def lanes(self, item_size: int) -> int:
        """Numbers in a vector."""
        return self.bits // 8 // item_size

    def panel_rows(self, item_size: int) -> int:
        """Query rows in a panel."""
        return COLUMNS * self.lanes(item_size)


@cache
def target() -> Target:
    """This processor, or the one that NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say, as Numba has it."""
    import llvmlite.binding as llvm

    named = os.environ.get("NUMBA_CPU_NAME") or None
    flags = os.environ.get("NUMBA_CPU_FEATURES")
    if flags is None:
        flags = "" if named == "generic" else llvm.get_host_cpu_features().flatten()
    features = {flag[1:] for flag in flags.split(",") if flag.startswith("+")}
    if named in _UP_TO_AVX2:
        features = {feature for feature in features if not feature.startswith("avx512")}
        flags = ",".join(f"+{feature}" for feature in sorted(features))
    name = named or llvm.get_host_cpu_name()
    if {"avx512f", "avx512dq", "avx512vl", "avx512bw"} <= features:
        pairs = "avx512bf16" in features
        return Target(name, flags, "AVX-512" + (" with bfloat16" if pairs else ""), 512, 32, True, pairs)
    if {"avx2", "fma"} <= features:
        return Target(name, flags, "AVX2", 256, 16, False, False)
    arm = llvm.get_default_triple().startswith(("aarch64", "arm64"))
    return Target(name, flags, "NEON" if arm else "no vector extension", 128, 32 if arm else 16, False, False)


def target_machine() -> Any:
    """LLVM's idea of the processor."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    own = target()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=own.name, features=own.features, opt=3, reloc="pic", codemodel="jitdefault"
    )
