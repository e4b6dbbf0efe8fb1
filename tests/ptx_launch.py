"""Kernels of `attemper` on CPU tensors: compiled for Hopper by the Triton that is installed, and run by `ptx_emulator`.

In a process in which TRITON_INTERPRET is not set: Triton asks when kernels are defined.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
import triton
from ptx_emulator import Kernel, Machine, Memory
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from attemper._backends import cuda
from attemper._backends.cuda import (
    _form,
    _hopper,
    _hopper_supply,
    _hopper_to_keys,
    _hopper_to_queries,
    _launch,
    _launch_backward,
    _moments,
)

TARGET = GPUTarget("cuda", 90, 32)

SHARED = {}
"""Bytes of shared memory by the name of a kernel, the most that one took."""


class _Compiled(Exception):  # noqa: N818
    """What the compiler made, on its way past the launch that follows."""


class _Driver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return TARGET


class Launches:
    """What `launch` of the package is replaced by."""

    def __init__(self):
        self.seed = 0
        self.names = []
        """Of the kernels that ran."""
        self._kernels, self._compile = {}, triton.compiler.compile

    def compile(self, source, target=None, options=None, **rest):
        raise _Compiled(source, self._compile(source, target=target, options=options))

    def launch(self, kernel, programs, arguments, *, form=None, **options):
        try:
            kernel.warmup(*arguments, grid=(programs,), **{"enable_fp_fusion": True, **options})
        except _Compiled as found:
            source, compiled = found.args
        ptx = compiled.asm["ptx"]
        if ptx not in self._kernels:
            self._kernels[ptx] = Kernel(ptx)
        translated = self._kernels[ptx]
        SHARED[kernel.__name__] = max(compiled.metadata.shared, SHARED.get(kernel.__name__, 0))
        memory = Memory()
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
        for program in range(programs):
            Machine(
                translated,
                compiled.metadata.shared,
                given,
                memory=memory,
                program=program,
                programs=programs,
                seed=f"{self.seed} {len(self.names)}",
            ).run()
        self.names.append(kernel.__name__)


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


def pretend(processors=1):
    """That tensors lie on a Hopper GPU of so many multiprocessors; what launches kernels from now on."""
    launches = Launches()
    driver.set_active(_Driver())
    triton.compiler.compile = launches.compile
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.cuda.device = lambda device: nullcontext()
    cuda._INTERPRETED = True
    for module in (_launch, _launch_backward, _moments, _hopper, _hopper_to_queries, _hopper_to_keys):
        module.launch = launches.launch
    for module in (_hopper, _hopper_to_queries, _hopper_to_keys, _hopper_supply):
        if hasattr(module, "processors"):
            module.processors = lambda device: processors
    _launch._copy_engine = lambda device: True
    _launch._shared_memory = lambda device: 227 * 1024
    kind_of = _form.kind_of
    # On a CPU the interpreter is to multiply in 32 bits.
    _form.kind_of = lambda *given, **named: kind_of(*given, **named)._replace(widen=False)
    return launches
