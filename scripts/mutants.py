"""Change the code in one small way at a time and see whether the tests notice.

Copies of src and tests are mutated, never the repository. A mutant that no test kills shows a test that is missing, or
is equivalent to the original, and then docs/mutants.md says why.
"""

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MODULES = ["_state", "_problem", "_bounds", "_reading", "_vitals", "_dropout", "_backends/reference", "_backends/numpy"]
QUICKEST_FIRST = ["state", "reading", "laws", "vitals", "dropout", "errors", "onnx", "testing"]
LEFT_OUT = {
    "test_memory.py",
    "test_docs.py",
    "test_imports.py",
    *map("test_torch_{}.py".format, ("dropin", "gradients", "compile", "operator")),
    *map("test_watch{}.py".format, ("", "_compile", "_lineage", "_models", "_modules", "_monitor", "_own")),
    *map("test_watch_{}.py".format, ("pressure", "shapes")),
    *map("test_{}.py".format, ("check", "cli", "cli_lab", "cli_trace", "diagnose", "models", "nn", "report", "zoo")),
    *map("test_{}.py".format, ("cpu", "simd", "cuda", "gpu", "cli_doctor_bench")),
    *map("test_{}.py".format, ("lab", "lab_a", "lab_claims", "lab_training", "report_lab", "walk")),
}  # slow, or not about what the code computes
WORKERS = 2

# Lines on which any change is equivalent by construction: how rows, keys and heads are cut into tiles decides time and
# memory, but no result.
EQUIVALENT = ("QUERY_TILE, KEY_TILE = ", "TILE_SCORES = ", "tile = min(problem.queries, ", "while cut and math.prod(")

PAIRS = "<:<=;>:>=;==:!=;is:is not;in:not in;and:or;+:-;*:/;&:|;True:False;0:1;0.0:1.0"
PAIRS += ";min:max;minimum:maximum;fmin:fmax;zeros:ones;zeros_like:ones_like"
SWAPS = {old: new for pair in PAIRS.split(";") for old, new in (pair.split(":"), pair.split(":")[::-1])}
SWAPS |= {"//": "*", "**": "*"}
OPERATOR = re.compile(r"is not|not in|is|in|and|or|not|<<|>>|<=|>=|==|!=|\*\*|//|[-+*/%@^<>&|~]")
NEGATED_BY_OPERATOR = (ast.UnaryOp, ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)


class Mutant(NamedTuple):
    module: Path  # from the root of the repository
    number: int
    line: str
    change: str
    mutated: bytes  # the whole file


def mutants_of(module: Path, source: bytes) -> Iterator[Mutant]:
    """Every change to one node of the file."""
    # The columns of nodes count UTF-8 bytes, and in Latin-1 each byte is one character.
    code = source.decode("latin-1")
    line_starts = [0, *(newline.end() for newline in re.finditer("\n", code))]

    def span(node: ast.AST) -> tuple[int, int]:
        return line_starts[node.lineno - 1] + node.col_offset, line_starts[node.end_lineno - 1] + node.end_col_offset

    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        nodes += mutable_children(node)
        for target, new in changes(node, code, span):
            start, end = span(target)
            mutated = (code[:start] + new + code[end:]).encode("latin-1")
            at = next(i for i in range(start, len(source)) if source[i] != mutated[i])
            number, line_start = source.count(b"\n", 0, at), source.rfind(b"\n", 0, at) + 1
            # Of a long line only the surroundings of the change are shown.
            shown = [text[max(line_start, at - 30) : at + 50].partition(b"\n")[0] for text in (source, mutated)]
            change = "  ->  ".join(text.decode(errors="ignore").strip() for text in shown)
            line = source.split(b"\n")[number].decode().strip()
            if not line.startswith(EQUIVALENT):
                yield Mutant(module, number + 1, line, change, mutated)


def mutable_children(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node, less types, decorators and texts for people."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, (ast.Raise, ast.JoinedStr)):
            continue
        block = value if isinstance(value, list) else [value]
        # What a branch assigns before it raises is the wording of the error.
        words_an_error = isinstance(node, (ast.If, ast.ExceptHandler)) and block and isinstance(block[-1], ast.Raise)
        for child in block:
            match child:
                case ast.FunctionDef("__repr__") | ast.If(ast.Name("TYPE_CHECKING")):
                    continue
                case ast.Assign([ast.Name(alias)]) if words_an_error or re.match("_?[A-Z][a-z]", alias):
                    continue
                case ast.AST():
                    yield child


def changes(node: ast.AST, code: str, span: Callable[[ast.AST], tuple[int, int]]) -> Iterator[tuple[ast.AST, str]]:
    """Nodes, and the text to write in their place."""
    start, end = span(node) if hasattr(node, "lineno") else (0, 0)
    match node:
        case ast.UnaryOp(ast.Not() | ast.Invert() | ast.USub(), operand):
            sign_end = span(operand)[0]
            yield node, OPERATOR.sub("", code[start:sign_end], count=1).lstrip() + code[sign_end:end]
        case ast.Constant(bool() | int() | float() as value):
            yield node, SWAPS.get(str(value)) or str(value + 1)
        case ast.Name("min" | "max" as name):
            yield node, SWAPS[name]
        # A State has a maximum, too: only the functions of a namespace are meant.
        case ast.Attribute(ast.Name("np" | "xp"), name) | ast.Attribute(_, "min" | "max" as name) if name in SWAPS:
            yield node, code[start:end].removesuffix(name) + SWAPS[name]
        case ast.Return(ast.expr() as value) if not isinstance(value, (ast.Constant, ast.JoinedStr)):
            yield value, "None"
        case ast.Raise() | ast.AugAssign() | ast.Expr(ast.Call()):
            yield node, "pass"
        case ast.Slice(lower, upper):
            # Numbers, signs and sums are changed as such.
            named = [bound for bound in (lower, upper) if isinstance(bound, (ast.Name, ast.Attribute, ast.Call))]
            yield from ((bound, code[slice(*span(bound))] + " + 1") for bound in named)
        case ast.If(test) | ast.IfExp(test) | ast.While(test) | ast.comprehension(ifs=[test]):
            if not isinstance(getattr(test, "ops", [test])[0], NEGATED_BY_OPERATOR):
                yield test, f"(not ({code[slice(*span(test))]}))"
    if not isinstance(node, (ast.BinOp, ast.AugAssign, ast.Compare, ast.BoolOp)):
        return
    for left, right in pairwise(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)):
        old = OPERATOR.search(code, span(left)[1], span(right)[0])
        if old and old[0] in SWAPS:
            text = code[start : old.start()] + SWAPS[old[0]] + code[old.end() : end]
            # In the place of ** and & stands an operator that binds less tightly.
            yield node, f"({text})" if isinstance(node, ast.BinOp) and old[0] in ("**", "&") else text


def sample(found: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Evenly spaced picks from all files in a row, each shuffled: every file gives in proportion to its mutants."""
    chance = random.Random(seed)
    found = sorted(found, key=lambda mutant: (mutant.module, chance.random()))
    count, offset = min(count, len(found)), chance.random()
    return chance.sample([found[int((pick + offset) * len(found) / count)] for pick in range(count)], count)


started: list[subprocess.Popen[bytes]] = []


def start_python(copy: Path, *arguments: str | Path) -> subprocess.Popen[bytes]:
    """Python that imports the copy, on one core; in a session of its own, so that it is stopped with its children."""
    own = {"PYTHONPATH": copy / "src", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    with (copy / "log").open("wb") as log:
        apart = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        started.append(subprocess.Popen([sys.executable, *arguments], cwd=copy, env=os.environ | own, **apart))
    return started[-1]


def start_tests(copy: Path, module: Path) -> subprocess.Popen[bytes]:
    """The tests of a copy, those of the module first, then the quickest."""
    order = [f"test_{name}.py" for name in (module.stem.strip("_"), *QUICKEST_FIRST)]
    tests = [test.relative_to(copy) for test in (copy / "tests").glob("test_*.py") if test.name not in LEFT_OUT]
    tests.sort(key=lambda test: (order.index(test.name) if test.name in order else len(order), test))
    return start_python(copy, "-m", "pytest", "-x", "-q", "--color=no", "-p", "no:cacheprovider", *tests)


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def make_copies(folder: Path) -> list[Path]:
    first, *others = copies = [folder / str(worker) for worker in range(WORKERS)]
    for part in ("src", "tests"):
        shutil.copytree(ROOT / part, first / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", first)
    for other in others:
        shutil.copytree(first, other)
    for copy in copies:
        start_python(copy, "-c", "import attemper; print(attemper.__file__)").wait()
        imported = (copy / "log").read_text().strip()
        if not Path(imported).is_relative_to(copy):
            sys.exit(f"The tests must import the mutated copy, not: {imported}")
    return copies


def seconds_allowed(copy: Path) -> float:
    """How long the tests of a mutant may take before they count as hung, from how long they take unmutated."""
    began = time.monotonic()
    if start_tests(copy, Path()).wait():
        sys.exit(f"{(copy / 'log').read_text()[-4000:]}\nThe tests fail without any mutation: mend them first.")
    baseline = time.monotonic() - began
    # The workers share the machine, so each is slower than the baseline alone.
    allowed = max(30, 3 * baseline, min(10 * baseline, 300))
    print(f"The unmutated tests pass in {baseline:.0f} s; a mutant may take {allowed:.0f} s.", flush=True)
    return allowed


def outcomes(copies: list[Path], waiting: list[Mutant], allowed: float) -> Iterator[tuple[Mutant, str]]:
    """Each mutant and what became of it, as they end."""
    running: dict[Path, tuple[Mutant, bytes, subprocess.Popen[bytes], float]] = {}
    while waiting or running:
        time.sleep(0.1)
        for copy in copies:
            if copy in running:
                mutant, original, tests, since = running[copy]
                exit_code = tests.poll()
                if exit_code is None and time.monotonic() < since + allowed:
                    continue
                stop(tests)
                (copy / mutant.module).write_bytes(original)
                del running[copy]
                failure = re.search(rb"^(?:FAILED|ERROR) (.+?)(?: - |$)", (copy / "log").read_bytes(), re.MULTILINE)
                killer = failure[1].decode() if failure else f"exit code {exit_code}"
                yield mutant, {None: "timeout", 0: "SURVIVED"}.get(exit_code, f"killed by {killer}")
            if waiting:
                mutant = waiting.pop()
                ast.parse(mutant.mutated)  # a syntax error would be a kill that no test earned
                original = (copy / mutant.module).read_bytes()
                (copy / mutant.module).write_bytes(mutant.mutated)
                running[copy] = mutant, original, start_tests(copy, mutant.module), time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=50, help="how many mutants to make")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--at-least", type=float, default=0.9, help="the share of them that the tests must kill")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    survivors: list[Mutant] = []
    done = interrupted = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        try:
            copies = make_copies(Path(folder).resolve())
            modules = [Path(f"src/attemper/{name}.py") for name in MODULES]
            found = [m for module in modules for m in mutants_of(module, (copies[0] / module).read_bytes())]
            drawn = sample(found, asked.count, asked.seed)
            print(f"{len(drawn)} of {len(found)} possible mutants.", flush=True)
            allowed, began = seconds_allowed(copies[0]), time.monotonic()
            for done, (mutant, outcome) in enumerate(outcomes(copies, drawn.copy(), allowed), 1):
                survivors += [mutant] if outcome == "SURVIVED" else []
                score, left = 1 - len(survivors) / done, (time.monotonic() - began) / done * (len(drawn) - done)
                print(f"{done:>3}/{len(drawn)}  {mutant.module}:{mutant.number}  {mutant.change}")
                print(f"         {outcome}  ({score:.0%} killed so far, {left / 60:.1f} min left)", flush=True)
        except KeyboardInterrupt:
            interrupted = 1
        finally:
            for process in started:
                stop(process)
    print("\nSurvivors:" if survivors else "\nNo survivors.")
    for mutant in sorted(survivors):
        print(f"  {mutant.module}:{mutant.number}  {mutant.line}\n      {mutant.change}")
    score = 1 - len(survivors) / done if done else 0.0
    print(f"{'Interrupted: ' * interrupted}{done - len(survivors)} of {done} killed, {score:.0%}.")
    return 130 if interrupted else int(score < asked.at_least)


if __name__ == "__main__":
    sys.exit(main())
