"""What this installation can do: versions, processor, compiled kernels, which backend runs, and whether it is right."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ._attend import HAS_TRITON, attend
from ._backends import cpu
from ._errors import OptionError, explain
from ._machine import cores, has_amx, instructions, processor, versions
from ._progress import Progress, on_progress, silent
from .testing import compare, make_inputs
from .testing._battery import Case
from .testing._operator import _judge as judge

SCHEMA = "attemper.doctor/1"
INSTALL = "pip install 'attemper[cpu]'"

ALLOWANCE = 2.0
"""Error budgets that a self-test allows: it looks for kernels that are broken here, and not for a last digit."""


@dataclass(frozen=True)
class SelfTest:
    """One backend on one small problem, held against the float64 reference."""

    backend: str
    operands: str
    """NumPy, torch CPU or torch CUDA."""
    dtype: str
    what: str
    ok: bool
    detail: str = ""


def examine(progress: Progress = silent) -> dict[str, Any]:
    """Everything that is found, as plain lists and numbers."""
    found = versions()
    kernels, fault = _described() if found["numba"] else (None, "")
    threads = [] if kernels is None or "torch" in sys.modules else [_threads("NumPy", kernels)]
    torch = _torch(found)
    if kernels is not None and (torch is not None or not threads):
        # Asked again: now that torch is here they are its threads.
        threads.append(_threads("torch" if torch is not None else "NumPy", cpu.describe()))
    tests = [SelfTest("cpu", "any", "any", "loading", False, fault)] if fault else []
    auto: dict[str, str | None] = {}
    with _told(progress):
        for operands, framework, device in _places(torch):
            auto[operands], test = _auto(operands, framework, device)
            tests += [] if test is None else [test]
            tests += _self_tests(operands, framework, device, found, kernels is not None, progress)
    return {
        "schema": SCHEMA,
        "versions": found,
        "processor": _processor(kernels),
        "gpus": _gpus(torch),
        "threads": threads,
        "cache": None if kernels is None else kernels_on_disk(),
        "auto": auto,
        "self_tests": [asdict(test) for test in tests],
        "ok": all(test.ok for test in tests),
    }


def _described() -> tuple[dict[str, Any] | None, str]:
    """What the backend says of itself, or why it cannot: a Numba that is there may still not load."""
    try:
        return cpu.describe(), ""
    except Exception as error:
        return None, in_a_line(error)


def in_a_line(error: Exception) -> str:
    """An error as a row of a table shows it."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    return f"{type(error).__name__}: {first}"


def _torch(found: dict[str, str | None]) -> Any:
    if not found["torch"]:
        return None
    import torch

    return torch


def _places(torch: Any) -> Iterator[tuple[str, str, str]]:
    yield "NumPy", "numpy", "cpu"
    if torch is not None:
        yield "torch CPU", "torch", "cpu"
        if torch.cuda.is_available():
            yield "torch CUDA", "torch", "cuda"


def _gpus(torch: Any) -> list[dict[str, Any]]:
    if torch is None or not torch.cuda.is_available():
        return []
    from ._backends import cuda

    found = []
    for index in range(torch.cuda.device_count()):
        known = torch.cuda.get_device_properties(index)
        capability = f"{known.major}.{known.minor}"
        size = {"name": known.name, "capability": capability, "bytes": known.total_memory}
        found.append(size | cuda.describe(index))
    return found


def _processor(kernels: dict[str, Any] | None) -> dict[str, Any]:
    record: dict[str, Any] = {"name": processor(), "cores": cores(), "amx": has_amx(), "instructions": instructions()}
    if kernels is not None:
        record |= {
            "instructions": kernels["instructions"],
            "compiled_for": kernels["processor"],
            "vector_bits": kernels["vector_bits"],
        }
    return record


def _threads(used_with: str, kernels: dict[str, Any]) -> dict[str, Any]:
    return {"with": used_with, "count": kernels["threads"], "whose": kernels["runner"]}


@contextmanager
def _told(progress: Progress) -> Iterator[None]:
    """What the library does unasked, as compiling, is told too."""
    before = on_progress(progress)
    try:
        yield
    finally:
        on_progress(before)


# Compiled kernels


def kernels_on_disk() -> dict[str, Any]:
    """The folder, the kernels that this version would use, and what older ones have left there."""
    from ._backends.cpu import _code

    folder = _code.cache_folder()
    sizes = {path.name: path.stat().st_size for path in _ours(folder)}
    files = {kernel: _code.cache_file(kernel).name for kernel in _names()}
    kernels = {kernel: sizes.get(name) for kernel, name in files.items()}
    used = sum(size for size in kernels.values() if size is not None)
    return {
        "folder": str(folder),
        "kernels": kernels,
        "bytes": used,
        "other_files": sum(name not in files.values() for name in sizes),
        "other_bytes": sum(sizes.values()) - used,
    }


def compile_kernels(progress: Progress = silent) -> None:
    """Compile every kernel that is not compiled yet, so that no later call has to."""
    _need_numba("--compile")
    from ._backends.cpu import _code

    names = _names()
    for done, name in enumerate(names):
        if not _code.cache_file(name).exists():
            progress(f"compiling {name}", done, len(names))
            _code.address(name)
    # The library itself goes on without: every process compiles for itself. Who asks for files wants to know.
    missing = [name for name in names if not _code.cache_file(name).exists()]
    if missing:
        fix = "Set ATTEMPER_CACHE_DIR to a folder that can be written."
        raise OptionError(explain(f"Nothing could be written to {_code.cache_folder()}.", fix))


def clear_cache() -> tuple[int, int]:
    """Delete the compiled kernels, of every version: how many files and bytes that were."""
    _need_numba("--clear-cache")
    from ._backends.cpu import _code

    files = size = 0
    for path in _ours(_code.cache_folder()):
        size += path.stat().st_size
        files += 1
        path.unlink()
    return files, size


def _names() -> list[str]:
    from ._backends.cpu import _code

    return [kernel for kernels in _code.KERNELS.values() for kernel in kernels]


def _ours(folder: Path) -> list[Path]:
    """Files with the names that the backend gives, finished or not: the folder may be shared with somebody else."""
    kinds = {name.partition("_")[0] for name in _names()}
    own = re.compile(rf"({'|'.join(sorted(kinds))})(_[a-z0-9]+)*-[0-9a-f]{{16}}\.(o|\d+-\d+)")
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if own.fullmatch(path.name) and path.is_file())


def _need_numba(option: str) -> None:
    if not cpu.available():
        raise OptionError(explain(f"{option} is about kernels of Numba, which is not installed.", INSTALL))


# Self-tests


def _case(backend: str, dtype: str) -> Case:
    # In 16 bits on CUDA what the kernels for Hopper take: they are others than those for float32.
    queries, keys, head_dim = (150, 200, 64) if backend == "cuda" and dtype == "float16" else (37, 45, 16)
    q, k, v = make_inputs(dtype=dtype, batch=(2,), heads=4, queries=queries, keys=keys, head_dim=head_dim)
    return Case("self-test", "", dtype, q, k, v, {"is_causal": True})


def _auto(operands: str, framework: str, device: str) -> tuple[str | None, SelfTest | None]:
    """The backend that ran when none was named, or the fault that kept it from running."""
    case = _case("auto", "float32")
    try:
        given = (_on(x, framework, device) for x in (case.q, case.k, case.v))
        return attend(*given, is_causal=True).reading.backend, None
    except Exception as error:  # a broken installation is what this is here to find
        return None, SelfTest("auto", operands, "float32", "running", False, in_a_line(error))


def _on(x: Any, framework: str, device: str) -> Any:
    if framework == "numpy":
        return x
    import torch

    return torch.from_numpy(x).to(device)


def _self_tests(
    operands: str, framework: str, device: str, found: dict[str, str | None], has_kernels: bool, progress: Progress
) -> list[SelfTest]:
    backends = ["numpy"] if framework == "numpy" else ["torch", "identities"]
    if has_kernels and device == "cpu":
        backends.append("cpu")
    if HAS_TRITON and device == "cuda":
        backends.append("cuda")
    tests = []
    for backend in backends:
        dtypes = _dtypes(backend, framework, device, found)
        for dtype in dtypes:
            progress(f"testing {backend} on {operands}, {dtype}", 0, 1)
            tests.append(_forward(backend, operands, framework, device, dtype))
        if framework == "torch" and backend != "identities" and _gradients_are_quick(backend):
            for dtype in dtypes if backend == "cuda" else ["float32"]:
                progress(f"testing {backend} on {operands}, gradients in {dtype}", 0, 1)
                tests.append(_backward(backend, operands, device, dtype))
    return tests


def _dtypes(backend: str, framework: str, device: str, found: dict[str, str | None]) -> list[str]:
    """float32, and what has other kernels or costs no compilation; identities on CUDA take 16 bits only."""
    if backend == "identities" and device == "cuda":
        return ["float16"]
    dtypes = ["float32"]
    if backend == "cuda":
        dtypes.append("float16")
    if backend == "cpu":
        compiled = cpu.describe()["kernels"]
        # Without the products of pairs bfloat16 goes through float32's kernel, which is compiled by now.
        narrow = "forward_bf16" if "bfloat16" in cpu.describe()["instructions"] else "forward_f32"
        if found["ml_dtypes"] and compiled[narrow] and framework == "torch":
            dtypes.append("bfloat16")
        if compiled["forward_f64"]:
            dtypes.append("float64")
    return dtypes


def _gradients_are_quick(backend: str) -> bool:
    return backend != "cpu" or bool(cpu.describe()["kernels"]["backward_f32"])


def _forward(backend: str, operands: str, framework: str, device: str, dtype: str) -> SelfTest:
    what = "output and statistics"
    run: Callable[..., Any] = partial(attend, backend=backend)
    if backend == "identities":
        what = "output"
        run = partial(_output, backend)
    row = judge(run, _case(backend, dtype), framework, device, None if backend == "identities" else backend, ALLOWANCE)
    return SelfTest(backend, operands, dtype, what, row.status == "right", row.detail)


def _output(backend: str, *operands: Any, **keywords: Any) -> Any:
    return attend(*operands, backend=backend, **keywords).output


def _backward(backend: str, operands: str, device: str, dtype: str) -> SelfTest:
    """The gradients of one loss, against those of explicit matrices in float64."""
    import torch

    case = _case(backend, dtype)
    given = [torch.from_numpy(x).to(device) for x in (case.q, case.k, case.v)]
    upstream = torch.from_numpy(
        make_inputs(dtype=dtype, batch=(2,), heads=4, queries=case.q.shape[-2], head_dim=case.q.shape[-1], seed=1)[0]
    ).to(device)

    def gradients(backend: str, dtype: torch.dtype) -> list[Any]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in given]
        output = attend(*leaves, is_causal=True, backend=backend).output
        return [x.cpu().numpy() for x in torch.autograd.grad(output, leaves, upstream.to(dtype))]

    def test(ok: bool, detail: str = "") -> SelfTest:
        return SelfTest(backend, operands, dtype, "gradients", ok, detail)

    own_dtype = given[0].dtype
    try:
        found = gradients(backend, own_dtype)
    except Exception as error:
        return test(False, in_a_line(error))
    exact, plain = gradients("reference", torch.float64), gradients("reference", own_dtype)
    for name, mine, right, own in zip("qkv", found, exact, plain, strict=True):
        comparison = compare(mine, right, own, dtype=dtype, allowance=ALLOWANCE)
        if not comparison.ok:
            return test(False, f"the gradient of {name}: {comparison}")
    return test(True)
