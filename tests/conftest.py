"""One profile for every property: the same examples on every machine, and no clock.

And what several files need: a place to run commands in, a machine without Numba, and other processors.
"""

import inspect
import os
import platform
import subprocess
import sys
import textwrap
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import settings

# Triton asks when its kernels are defined, and a machine without a GPU can only interpret them.
if find_spec("torch") is None or not import_module("torch").cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def look_once_through_the_language():
    """At every call of a function Triton's interpreter looks for what its language has built in: half of its time."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    built_in = {}

    def members(place):
        if place not in built_in:
            built_in[place] = [name for name, member in inspect.getmembers(place) if is_builtin(member)]
        return [(name, getattr(place, name)) for name in built_in[place]]

    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": members})


if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    look_once_through_the_language()

# What runs kernels as they are compiled needs a process in which Triton does not interpret.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "0" else ["compiled"]


def pytest_report_header():
    return "not here: tests/compiled, which takes TRITON_INTERPRET=0" if collect_ignore else None


settings.register_profile("attemper", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("attemper")


@pytest.fixture
def place(monkeypatch, request, tmp_path):
    """A directory with the module's FACTORY in it; environment, sys.path and sys.modules as they were afterwards."""
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setenv("DISABLE_SAFETENSORS_CONVERSION", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "zoo", raising=False)
    (tmp_path / "zoo.py").write_text(request.module.FACTORY)
    yield
    sys.modules.pop("zoo", None)


@pytest.fixture(params=["cpu", "plain"])
def auto(request, monkeypatch):
    """What backend="auto" takes on a CPU: compiled kernels and, as where there is no Numba, plain operations."""
    monkeypatch.setattr("attemper._attend.HAS_NUMBA", request.param == "cpu")
    # What was remembered of calls before may have taken the other road.
    monkeypatch.setattr("attemper._again._repeats", {})
    return request.param


ELSEWHERE = "ATTEMPER_TESTS_ELSEWHERE"


class Processor(NamedTuple):
    """Another processor than this one, whose code this one can run."""

    name: str
    instructions: str
    bits: int
    pretend: str = ""

    def run(self, code, *arguments, timeout=900):
        """What a program of its own prints."""
        from attemper._backends.cpu._code import cache_folder

        code = f"{self.pretend}\n{textwrap.dedent(code)}"
        folder = cache_folder() / "pretended" if self.pretend else cache_folder()
        env = {**os.environ, "NUMBA_CPU_NAME": self.name, "ATTEMPER_CACHE_DIR": str(folder), ELSEWHERE: "yes"}
        command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-9000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def test(self, *nodes):
        """Run tests that pass on this processor on that one."""
        found = self.run(
            """
            import sys, warnings
            import pytest
            from attemper._backends.cpu._target import target
            assert (target().instructions, target().bits) == (sys.argv[1], int(sys.argv[2])), target()
            warnings.resetwarnings()
            sys.exit(pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[3:]]))
            """,
            self.instructions,
            self.bits,
            *nodes,
        )
        assert " passed" in found


# There is no emulator of ARM here. But vectors of its length and as many registers make the same tiles anywhere.
LIKE_NEON = """
from attemper._backends.cpu import _target
own = _target.target()._replace(instructions="as NEON", bits=128, registers=32)
_target.target = lambda: own
"""
PROCESSORS = {
    "AVX2": Processor("haswell", "AVX2", 256),
    "none": Processor("generic", "no vector extension", 128),
    "as NEON": Processor("haswell", "as NEON", 128, LIKE_NEON),
}


@pytest.fixture(params=PROCESSORS)
def processor(request):
    """Each kind of processor in turn."""
    if ELSEWHERE in os.environ:
        pytest.skip("this is one of them")
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("this is another kind of processor")
    import llvmlite.binding as llvm

    features, chosen = llvm.get_host_cpu_features(), PROCESSORS[request.param]
    if chosen.name == "haswell" and not (features.get("avx2") and features.get("fma")):
        pytest.skip("this processor has no AVX2")
    return chosen
