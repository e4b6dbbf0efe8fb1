"""Importing attemper is quick and pulls in nothing heavy, and the rooms depend on each other one way only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import attemper

SOURCE = Path(attemper.__file__).parent
HEAVY = ("torch", "numba", "llvmlite", "triton", "ml_dtypes", "scipy", "transformers", "matplotlib", "rich")

# Each room, and the rooms it may import.
ARROWS = {
    "_errors": set(),
    "_arrays": {"_errors"},
    "_scale": {"_errors"},
    "_bounds": {"_errors", "_arrays"},
    "_dropout": set(),
    "_problem": {"_errors", "_arrays", "_scale", "_bounds"},
    "_memory": {"_errors", "_problem"},
    "_state": {"_arrays"},
    "_reading": {"_errors", "_arrays"},
    "_vitals": {"_errors", "_arrays", "_reading"},
    "_pytree": {"_reading"},
    "_backends": {
        "_arrays",
        "_bounds",
        "_dropout",
        "_errors",
        "_memory",
        "_problem",
        "_progress",
        "_pytree",
        "_reading",
        "_state",
    },
    "_attend": {"_again", "_errors", "_arrays", "_problem", "_reading", "_backends"},
    "_finding": {"_reading", "_vitals"},
    "_symptoms": {"_finding", "_vitals"},
    "_diagnose": {"_finding", "_symptoms", "_vitals"},
    "report": {"_errors", "_finding"},
    "_checkup": {"_errors", "_finding", "_reading", "_vitals", "report"},
    "_watch": {
        "__version__",
        "_attend",
        "_backends",
        "_checkup",
        "_diagnose",
        "_errors",
        "_finding",
        "_reading",
        "_state",
        "_symptoms",
        "_vitals",
    },
    "_progress": set(),
    "_again": {"_arrays"},
    "_machine": {"__version__"},
    "_doctor": {"_attend", "_backends", "_errors", "_machine", "_progress", "testing"},
    "_bench": {"_attend", "_backends", "_errors", "_machine", "_models", "_progress", "_watch"},
    "_gguf": {"_errors", "_progress"},
    "_models": {"_errors", "_gguf", "_progress"},
    "nn": {
        "_arrays",
        "_attend",
        "_backends",
        "_dropout",
        "_errors",
        "_problem",
        "_pytree",
        "_reading",
        "_scale",
        "_state",
    },
    "_walk": {
        "_arrays",
        "_attend",
        "_errors",
        "_gguf",
        "_models",
        "_progress",
        "_reading",
        "_scale",
        "_vitals",
        "_watch",
        "report",
    },
    "lab": {
        "__version__",
        "_attend",
        "_errors",
        "_progress",
        "_models",
        "_reading",
        "_scale",
        "_vitals",
        "_walk",
        "_watch",
        "nn",
        "report",
    },
    "cli": {
        "__version__",
        "_bench",
        "_doctor",
        "_machine",
        "_checkup",
        "_errors",
        "_finding",
        "_models",
        "_progress",
        "_walk",
        "check",
        "lab",
        "report",
    },
    "__main__": {"cli"},
    "testing": {"_errors", "_arrays", "_problem", "_reading", "_backends"},
    "__init__": {
        "_attend",
        "_checkup",
        "_diagnose",
        "_errors",
        "_finding",
        "_progress",
        "_reading",
        "_scale",
        "_vitals",
        "_watch",
    },
}


# Whoever asks for one of them, to see whether it is there, is told; whoever imports it is not served.
FORBID = f"""
import sys
from importlib.machinery import PathFinder
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            found = PathFinder.find_spec(name, path)
            if found is not None:
                found.loader = self
            return found
    def create_module(self, spec):
        raise AssertionError(spec.name + " was imported")
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, Forbid())
"""


def test_heavy_libraries_stay_out():
    code = f"""{FORBID}
import numpy as np, attemper
x = np.ones((2, 3, 4), dtype=np.float32)
attemper.attend(x, x, x, backend="numpy"), attemper.read(x, x, backend="numpy"), attemper.trace(x, x, x)
attemper.Vitals.of(attemper.read(x, x, backend="numpy")).to_scalars()
assert not set(sys.modules) & set({HEAVY})
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_heavy_libraries_would_have_been_seen():
    done = subprocess.run([sys.executable, "-c", f"{FORBID}import rich"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("AssertionError: rich was imported\n")


WITHOUT_NUMBA = {
    # As where it is not installed, and as some people switch a library off.
    "not found": """
from importlib.machinery import PathFinder
class Elsewhere(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in ("numba", "llvmlite") else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Elsewhere
""",
    "switched off": "sys.modules['numba'] = sys.modules['llvmlite'] = None",
}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("way", WITHOUT_NUMBA)
def test_without_numba_there_is_another_road(way, framework):
    code = f"""
import sys
{WITHOUT_NUMBA[way]}
import {framework} as xp, attemper
x = xp.ones((2, 3, 4))
output, reading = attemper.attend(x, x, x)
assert reading.backend == "{framework}", reading.backend
assert (output == 1).all()
try:
    attemper.attend(x, x, x, backend="cpu")
except attemper.BackendError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "backend 'cpu' cannot take this call: it needs Numba: pip install 'attemper[cpu]'.",
        "  Pass backend='auto' to let the operands choose.",
    ]


def test_the_kernels_come_with_numpy_alone():
    # Numba is there, torch is not.
    code = """
import sys
sys.modules["torch"] = None
import numpy as np, attemper
x = np.random.default_rng(0).standard_normal((2, 5, 4))
output, reading = attemper.attend(x, x, x, is_causal=True)
assert reading.backend == "cpu"
wanted = attemper.attend(x, x, x, is_causal=True, backend="reference").output
assert abs(output - wanted).max() < 1e-14 < abs(wanted).max()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_adds_little_to_numpy():
    # Counted in modules, not seconds: a clock on a busy machine proves nothing.
    code = "import sys, numpy; before = set(sys.modules); import attemper; print(len(set(sys.modules) - before))"
    added = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert added < 60


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_arrows_point_one_way(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    room = parts[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            for module in [node.module] if node.module else [alias.name for alias in node.names]:
                target = (*parts[: len(parts) - node.level], *module.split("."))
                found.add(target[0])
                own = parts[:2] if len(parts) > 2 else ()
                shared = target[1:2] and target[1].startswith("_")
                assert target[0] != "_backends" or room != "_backends" or target[:2] == own or shared, (
                    "one backend imports another"
                )
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(name.partition(".")[0] == "attemper" for name in names), "absolute import of ourselves"
    assert found - {room} <= ARROWS[room]


def test_rooms_open_when_used():
    code = """
import sys, attemper
assert "attemper.testing" not in sys.modules
assert attemper.testing.check_operator is sys.modules["attemper.testing"].check_operator
try:
    attemper.nothing
except AttributeError as error:
    assert str(error) == "module 'attemper' has no attribute 'nothing'"
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_sorted_and_there():
    assert attemper.__all__ == sorted(attemper.__all__)
    assert all(hasattr(attemper, name) for name in attemper.__all__)


def test_a_shell_completes_what_is_public():
    """Also what is imported when it is first used; and not what this module needs for itself."""
    assert {*attemper.__all__, "__version__"} <= set(dir(attemper))
    assert not {"Any", "TYPE_CHECKING", "import_module"} & set(dir(attemper))
    code = "import sys, attemper; assert {'check', 'nn'} <= set(dir(attemper)); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
