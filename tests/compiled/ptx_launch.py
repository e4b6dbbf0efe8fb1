"""Kernels of `attemper` on CPU tensors: compiled for Hopper by the Triton that is installed, and run by `ptx_emulator`.

    emulator = Emulator(seed=0, processors=2)
    hopper = emulator.load("_hopper")
    hopper.forward(call, output, wide, fields, marks)

A module of kernels in Gluon is loaded anew, told that there is a Hopper GPU and that tensors lie on it; what a GPU
would not forgive raises a PTXError. `Emulator.pretend` tells all of the package so, kernels in Triton included.
"""

from __future__ import annotations

import functools
import importlib.util
import linecache
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from ptx_code import Kernel
from ptx_emulator import Machine, Memory, run_together

# Imported to look for examples too, where there may be no Triton.
pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

PACKAGE = "attemper._backends.cuda"
TARGET = GPUTarget("cuda", 90, 32)

TOGETHER = 16
"""Programs of a launch that run at the same time."""


class _Compiled(Exception):  # noqa: N818
    """What the compiler made, on its way past the launch that follows."""


class _Driver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return TARGET


@contextmanager
def _no_gpu():
    """The compiler is asked for Hopper, and what it makes goes no further."""
    compile, active = triton.compiler.compile, driver._active  # noqa: A001

    def passed_on(source, target=None, options=None, **rest):
        raise _Compiled(source, compile(source, target=target, options=options))

    triton.compiler.compile = passed_on
    driver.set_active(_Driver())
    try:
        yield
    finally:
        triton.compiler.compile, driver._active = compile, active


@functools.cache
def _translated(ptx):
    return Kernel(ptx)


class Emulator:
    """Launches on a Hopper GPU of so many processors, each in an order of events of its own, drawn from the seed."""

    def __init__(self, *, seed=0, processors=2, edit=None):
        self.seed, self.processors, self.edit = seed, processors, edit
        self.launches = []
        """(name, programs) of each."""
        self.shared = {}
        """Bytes of shared memory by the name of a kernel, the most that one took."""

    @property
    def of_hopper(self):
        """Launches of kernels that are for Hopper alone."""
        return [launch for launch in self.launches if launch[0] == "_kernel"]

    def load(self, name):
        """A module of kernels, with those of it that it uses; its source as `edit(name, source)` has it."""
        path = importlib.util.find_spec(f"{PACKAGE}.{name}").origin
        source = Path(path).read_text(encoding="utf-8")
        edited = source if self.edit is None else self.edit(name, source)
        module = executed(name, edited, path if edited == source else None)
        # They are shared; who loads one last is who launches.
        module.launch, module.processors = self.launch, lambda device: self.processors
        if hasattr(module, "_hopper"):
            module._hopper = self.load("_hopper")
        return module

    def launch(self, kernel, programs, arguments, *, form=None, **options):
        """What `launch` of the package is replaced by."""
        try:
            with _no_gpu():
                kernel.warmup(*arguments, grid=(programs,), **{"enable_fp_fusion": True, **options})
        except _Compiled as found:
            source, compiled = found.args
        translated, memory = _translated(compiled.asm["ptx"]), Memory()
        boxes = list(compiled.metadata.tensordesc_meta or ())
        numbers = [
            number
            for kind, argument in zip(source.signature.values(), arguments, strict=True)
            for number in _numbers(kind, argument, memory, boxes)
        ]
        # Triton adds addresses of memory that these kernels have none of.
        numbers += [0] * (len(translated.parameters) - len(numbers))
        given = {}
        for (kind, name, _), number in zip(translated.parameters, numbers, strict=True):
            if isinstance(number, float):
                number = int(np.float32(number).view(np.uint32))
            bits = 64 if kind.endswith(("64", "8")) else 32
            given[name] = (np.uint64 if bits == 64 else np.uint32)(number % 2**bits)
        seed = f"{self.seed} {len(self.launches)}"
        for first in range(0, programs, TOGETHER):
            machines = [
                Machine(translated, compiled.metadata.shared, given, memory=memory, program=program, programs=programs)
                for program in range(first, min(first + TOGETHER, programs))
            ]
            run_together(machines, seed=f"{seed} {first}")
        self.launches.append((kernel.__name__, programs))
        self.shared[kernel.__name__] = max(compiled.metadata.shared, self.shared.get(kernel.__name__, 0))

    def pretend(self, monkeypatch):
        """That all of the package, and every tensor, is on a Hopper GPU."""
        from attemper._backends import cuda
        from attemper._backends.cuda import _form, _launch, _launch_backward, _moments

        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(cuda, "_INTERPRETED", True)
        monkeypatch.setattr(_form, "gluon", self.load)
        monkeypatch.setattr(_launch, "_copy_engine", lambda device: True)
        monkeypatch.setattr(_launch, "_shared_memory", lambda device: 227 * 1024)
        for module in (_launch, _launch_backward, _moments):
            monkeypatch.setattr(module, "launch", self.launch)
        kind_of = _form.kind_of
        # On a CPU the interpreter is to multiply in 32 bits.
        monkeypatch.setattr(_form, "kind_of", lambda *given, **named: kind_of(*given, **named)._replace(widen=False))


@functools.cache
def executed(name, source, path=None):
    """A module to which tensors lie on a GPU; Triton reads the sources of kernels where Python's tracebacks do."""
    path = path or f"<{name} {hash(source)}>"
    module = ModuleType(f"{PACKAGE}.{name}")
    module.__package__, module.__file__ = PACKAGE, path
    if path.startswith("<"):
        linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
    exec(compile(source, path, "exec"), module.__dict__)
    module.torch = _But(torch, cuda=_But(torch.cuda, device=lambda device: nullcontext()))
    if "takes" in vars(module):
        takes = module.takes
        module.takes = lambda call, *rest: takes(call._replace(q=_But(call.q, is_cuda=True)), *rest)
    return module


class _But:
    """Something, except for some of its names."""

    def __init__(self, something, **names):
        self.__dict__.update(names)
        self._something = something

    def __getattr__(self, name):
        return getattr(self._something, name)


def _numbers(kind, argument, memory, boxes):
    """What an argument of a kernel is to its PTX."""
    if kind == "constexpr":
        return
    if isinstance(kind, tuple | list):
        for part, x in zip(kind, argument, strict=True):
            yield from _numbers(part, x, memory, boxes)
    elif hasattr(argument, "block_shape"):
        base, box = argument.base, boxes.pop(0)
        _hold(base, memory)
        size = base.element_size()
        strides = [step * size for step in list(argument.strides)[-2::-1]]
        yield memory.describe(
            base.data_ptr(), list(argument.shape)[::-1], strides, list(box["block_size"])[::-1], box["swizzle"], size
        )
        yield from argument.shape
        yield from argument.strides
    elif isinstance(argument, torch.Tensor):
        _hold(argument, memory)
        yield argument.data_ptr()
    else:
        yield argument


def _hold(tensor, memory):
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    memory.add(storage.data_ptr(), whole.numpy())
