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
        "_dropout",
        "_errors",
        "_memory",
        "_problem",
        "_progress",
        "_pytree",
        "_reading",
        "_state",
    },
    "_attend": {"_errors", "_arrays", "_problem", "_reading", "_backends"},
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


def test_heavy_libraries_stay_out():
    code = f"""
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            raise AssertionError(name + " was imported")
sys.meta_path.insert(0, Forbid())
import numpy as np, attemper
x = np.ones((2, 3, 4), dtype=np.float32)
attemper.attend(x, x, x, backend="numpy"), attemper.read(x, x, backend="numpy"), attemper.trace(x, x, x)
attemper.Vitals.of(attemper.read(x, x, backend="numpy")).to_scalars()
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
