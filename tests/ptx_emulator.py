"""Kernels as Triton compiles them for Hopper (PTX for sm_90a), run on the CPU: what the compiler made, not its speed.

    memory = Memory()
    memory.add(tensor.data_ptr(), bytes_of_it)
    Machine(Kernel(ptx), shared_bytes, parameters, memory=memory, program=0, programs=1, seed=0).run()

What a GPU would not forgive raises a PTXError.

An instruction is a NumPy operation on the 32 lanes of a warp. Warps take turns, and copies arrive, in an order that is
drawn from the seed. What is asynchronous is as late as it may be: registers that a product (wgmma) is to write hold a
number that is none until it was waited for, and what it reads has to be the same then; so does what a copy (TMA,
cp.async) is to bring or to take.

What is read too early or overwritten too soon is found whether or not it happened this time: each warp carries what it
knows of the others' progress (a vector clock), which grows by waiting at barriers alone, and an access to shared memory
demands that all it must follow is known, and that the copy engine and products see it only behind a proxy fence.

Not emulated: how approximations are rounded, what ptxas makes of the PTX, races in global memory and within a warp.
"""

from __future__ import annotations

import functools
import random
import re

import numpy as np

LANES = np.arange(32)
ALL = np.ones(32, bool)
POISON = np.uint32(0x7FC0DEAD)
"""A float32 that is no number: in registers and shared memory that nobody has written."""

MOST_STEPS = 10_000_000
"""Pieces of straight code of one program, after which it is taken to go on for ever."""

ENDED = 1 << 30


class PTXError(Exception):
    """What a GPU would punish, or what is not emulated."""


class RaceError(PTXError):
    """Something is read or written without waiting for who wrote or read it before."""


class DeadlockError(PTXError):
    """Everybody waits."""


# ---------------------------------------------------------------------------------------------------------------------
# Text


class Statement:
    """One instruction: its predicate, its name and its operands."""

    def __init__(self, text, renamed):
        self.text = " ".join(text.split())
        guard = re.match(r"@(!?)(\S+)\s+(.*)", self.text)
        self.negated = bool(guard and guard[1])
        self.predicate = renamed(guard[2]) if guard else None
        self.name, rest = re.match(r"([\w.:]+)\s*(.*)", guard[3] if guard else self.text).groups()
        self.parts = self.name.split(".")
        self.operands = [re.sub(r"[%$]?[A-Za-z_][\w$.]*", lambda x: renamed(x[0]), x) for x in _apart(rest)]


def _apart(text):
    """Operands: at commas that are in no braces."""
    return [x.strip() for x in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)]


def _listed(operand):
    return [x.strip() for x in operand.strip("{}").split(",")]


class Kernel:
    """A kernel's text, translated piece by piece when it is first run."""

    def __init__(self, ptx):
        self.threads = int(re.search(r"\.reqntid\s+(\d+)", ptx)[1])
        header = ptx[ptx.index(".entry") : ptx.index(".reqntid")]
        self.parameters = re.findall(
            r"\.param\s+(?:\.align \d+\s+)?\.(\w+)[^\n]*?(\w+_param_\d+)(?:\[(\d+)\])?", header
        )
        """(type, name, bytes of a descriptor or nothing) of each."""
        self.registers = {}
        """(kind, number) by name."""
        self.counts = {"pred": 0, "b16": 0, "b32": 0, "b64": 0}
        self.labels, self.targets, self.code = {}, {}, []
        body = ptx[ptx.index("{", ptx.index(".reqntid")) + 1 :]
        body = re.sub(r"//[^\n]*", "", body.split("// -- End function")[0])
        self._read(re.sub(r"(?m)^\s*\.(loc|file|section)[^\n]*$", "", body))
        starts = {0, *self.labels.values()}
        for i, statement in enumerate(self.code):
            if re.match(r"bra|brx|ret|exit|bar\.sync|barrier|mbarrier\.try_wait|wgmma|cp\.async", statement.name):
                starts |= {i, i + 1}
        starts = sorted(x for x in starts if x < len(self.code))
        self.piece_at = {x: i for i, x in enumerate(starts)}
        self.pieces = [self.code[x:y] for x, y in zip(starts, [*starts[1:], len(self.code)], strict=True)]
        self._translated = {}

    def _register(self, kind, name):
        kind = kind if kind == "pred" else f"b{kind[1:]}"
        self.registers[name] = kind, self.counts[kind]
        self.counts[kind] += 1

    def _read(self, body):
        """Statements and labels; those of a scope in braces, as in inline assembly, get names of their own."""
        place, scopes = 0, [{}]
        pattern = re.compile(
            r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[A-Za-z_$][\w$]*):(?!:)\s*(?:\.branchtargets(?P<targets>[^;]*);)?"
            r"|(?P<text>(?:[^;{}]|\{[^}]*\})*);)"
        )

        def renamed(name):
            return next((scope[name] for scope in reversed(scopes) if name in scope), name)

        for serial in range(len(body)):
            found = pattern.match(body, place)
            if found is None or (found["close"] and len(scopes) == 1):
                return
            place = found.end()
            if found["open"]:
                inner = body[place : place + re.match(r"(?:[^{}]|\{[^}]*\})*", body[place:]).end()]
                names = re.findall(r"(?m)(?:^|;)\s*([A-Za-z_$][\w$]*):(?!:)", inner)
                scopes.append({name: f"{name}__{serial}" for name in names})
                for kind, listed in re.findall(r"\.reg\s+\.(\w+)\s+([^;]+);", inner):
                    for name in _listed(listed):
                        scopes[-1][name] = f"{name}__{serial}"
                        self._register(kind, scopes[-1][name])
            elif found["close"]:
                scopes.pop()
            elif found["label"]:
                label = renamed(found["label"])
                if found["targets"]:
                    self.targets[label] = _listed(found["targets"])
                elif not label.startswith(("$L__tmp", "$L__func")):  # for debuggers
                    self.labels[label] = len(self.code)
            elif found["text"].startswith(".reg"):
                for kind, name, count in re.findall(r"\.reg\s+\.(\w+)\s+(%\w+)<(\d+)>", found["text"]):
                    for i in range(int(count)):
                        self._register(kind, f"{name}{i}")
            elif found["text"].strip() and not found["text"].startswith(".pragma"):
                self.code.append(Statement(found["text"], renamed))

    @functools.cached_property
    def joins(self):
        """By piece, where lanes that part at its end are together again: its immediate postdominator."""
        after = {}
        for i, piece in enumerate(self.pieces):
            last = piece[-1]
            after[i] = [i + 1] if i + 1 < len(self.pieces) else []
            if last.parts[0] in ("bra", "ret", "exit", "brx"):
                after[i] = after[i] if last.predicate else []
                if last.parts[0] == "bra":
                    after[i] = [self.piece_of(last.operands[0]), *after[i]]
                else:
                    after[i] += (
                        [self.piece_of(x) for x in self.targets[last.operands[1]]]
                        if last.parts[0] == "brx"
                        else [ENDED]
                    )
        before = {}
        for i, pieces in after.items():
            for x in pieces:
                before.setdefault(x, []).append(i)
        order, seen, stack = [], {ENDED}, [(ENDED, iter(before.get(ENDED, ())))]
        while stack:
            i, rest = stack[-1]
            x = next((x for x in rest if x not in seen), None)
            if x is None:
                order.append(i)
                stack.pop()
            else:
                seen.add(x)
                stack.append((x, iter(before.get(x, ()))))
        place = {x: i for i, x in enumerate(order)}
        found, changed = {ENDED: ENDED}, True
        while changed:
            changed = False
            for i in reversed(order[:-1]):
                join = None
                for x in (x for x in after[i] if x in found):
                    while join is not None and join != x:
                        if place[join] < place[x]:
                            join = found[join]
                        else:
                            x = found[x]
                    join = x
                changed |= found.get(i) != join
                found[i] = join
        return found

    def piece_of(self, label):
        return self.piece_at[self.labels[label]]

    def function(self, piece):
        """What a piece of straight code does to a warp, in the lanes of a mask."""
        if piece not in self._translated:
            self._translated[piece] = _Translation(self, piece).function()
        return self._translated[piece]


# ---------------------------------------------------------------------------------------------------------------------
# Instructions as NumPy operations

_ARRAYS = {"pred": "P", "16": "H", "32": "R", "64": "D", "f32": "F", "s32": "I", "s64": "L", "s16": "S"}
_NUMPY = {
    f"{kind}{bits}": f"np.{name}{bits}"
    for kind, name in (("s", "int"), ("u", "uint"), ("b", "uint"))
    for bits in (8, 16, 32, 64)
}
_NUMPY["f32"] = "np.float32"
_PLAIN = {"add": "add", "sub": "subtract", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
_PLAIN |= {"min": "minimum", "max": "maximum", "neg": "negative", "abs": "abs", "not": "invert"}
_COMPARED = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
_COMPARED |= {"lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal"}
_APPROXIMATE = {
    "sqrt": "np.sqrt({})",
    "rcp": "1 / {}",
    "ex2": "np.exp2({})",
    "lg2": "np.log2({})",
    "rsqrt": "1 / np.sqrt({})",
}
_ROUNDED = {"rmi": "np.floor", "rpi": "np.ceil", "rzi": "np.trunc", "rni": "np.rint"}
_WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
_NOTHING_TO_DO = (
    "bar.warp.sync",
    "fence.mbarrier_init",
    "fence.acq",
    "fence.sc",
    "membar",
    "griddepcontrol",
    "mbarrier.inval",
)


class _Translation:
    """A function of Python for one piece of straight code."""

    def __init__(self, kernel, piece):
        self.kernel, self.piece = kernel, piece
        self.lines, self.constants = [], {}

    def function(self):
        for statement in self.kernel.pieces[self.piece]:
            try:
                self._statement(statement)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise PTXError(f"not emulated: {statement.text} ({error!r})") from error
        if not self.lines or not self.lines[-1].startswith("return"):
            self.lines.append(f"return w.go({self.piece + 1}, m)")
        text = "def piece(w, m):\n P, H, R, D, F, I, L, S, given = w.arrays\n " + "\n ".join(self.lines)
        names = {"np": np, **_HELPERS, **self.constants}
        exec(compile(text, f"<piece {self.piece}>", "exec"), names)
        return names["piece"]

    def _statement(self, s):
        method = getattr(self, f"_{s.parts[0]}", None)
        if s.name.startswith(_NOTHING_TO_DO):
            return
        if s.parts[0] in ("abs", "neg") and s.parts[-1] in ("bf16", "f16", "bf16x2", "f16x2"):
            self._sign(s)
        elif s.parts[0] in _PLAIN and s.parts[0] not in ("min", "max"):
            self._ufunc(s, _PLAIN[s.parts[0]] if s.parts[-1] != "pred" or s.parts[0] != "not" else "logical_not")
        elif s.parts[0] in _APPROXIMATE:
            self._put(s, s.operands[0], "f32", _APPROXIMATE[s.parts[0]].format(self._source(s.operands[1], "f32")))
        elif method is None:
            raise PTXError(f"not emulated: {s.text}")
        else:
            method(s)

    # Operands

    def _array(self, name, kind):
        own, number = self.kernel.registers[name]
        if "f" in kind and kind != "f32":
            raise PTXError(f"numbers of kind {kind} are not emulated")
        bits = own if own == "pred" else own[1:]
        return f"{_ARRAYS.get(kind, _ARRAYS[bits]) if kind[1:] == bits else _ARRAYS[bits]}[{number}]"

    def _constant(self, value):
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def _source(self, operand, kind):
        if operand in self.kernel.registers:
            return self._array(operand, kind)
        special = {"%tid.x": "w.thread", "%ctaid.x": "w.program", "%nctaid.x": "w.programs", "%laneid": "w.lane"}
        if operand in special:
            return special[operand]
        if re.match(r"%(ctaid|tid)\.[yz]", operand):
            return self._constant(np.uint32(0))
        if "_param_" in operand:
            return f"given[{operand!r}]"
        bits = 8 if kind == "pred" else int(kind[1:])
        shared = re.fullmatch(r"global_smem(?:\+(\d+))?", operand)
        if shared:
            number = int(shared[1] or 0)
        elif operand.startswith("0f"):
            number = int(operand[2:], 16)
        else:
            number = int(operand.rstrip("U"), 0)
        if kind == "pred":
            return self._constant(np.bool_(number))
        bare = np.array([number & ((1 << bits) - 1)], f"uint{bits}")
        return self._constant(bare.view(_NUMPY[kind].removeprefix("np."))[0])

    def _lanes(self, s):
        if s.predicate is None:
            return "m"
        predicate = self._array(s.predicate, "pred")
        return f"(m & ~{predicate})" if s.negated else f"(m & {predicate})"

    def _put(self, s, name, kind, value):
        self.lines.append(f"np.copyto({self._array(name, kind)}, {value}, where={self._lanes(s)}, casting='unsafe')")

    def _ufunc(self, s, function, kind=None):
        kind = kind or s.parts[-1]
        sources = ", ".join(self._source(x, kind) for x in s.operands[1:])
        self.lines.append(f"np.{function}({sources}, out={self._array(s.operands[0], kind)}, where={self._lanes(s)})")

    def _address(self, operand):
        base, offset = re.fullmatch(r"\[\s*([^\]\s+]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand).groups()
        if base == "global_smem":
            return f"(w.zero + {self._constant(np.uint32(int(offset or 0)))})"
        kind = self.kernel.registers[base][0]
        found = self._array(base, kind)
        if offset is None or not int(offset):
            return found
        unsigned = np.uint64 if kind == "b64" else np.uint32
        return f"({found} + {self._constant(unsigned(int(offset) % 2 ** int(kind[1:])))})"

    def _numbers(self, operand):
        """Of the registers of a list."""
        return [self.kernel.registers[x][1] for x in _listed(operand)]

    def _call(self, method, *arguments):
        self.lines.append(f"w.{method}({', '.join(map(str, arguments))})")

    def _last(self, method, *arguments):
        self.lines.append(f"return w.{method}({', '.join(map(str, arguments))})")

    # Arithmetic

    def _min(self, s):
        kind = s.parts[-1]
        function = _PLAIN[s.parts[0]]
        if kind == "f32" and "NaN" not in s.parts:
            function = f"f{s.parts[0]}"
        if "relu" not in s.parts:
            return self._ufunc(s, function)
        sources = (self._source(x, kind) for x in s.operands[1:])
        return self._put(s, s.operands[0], kind, f"np.maximum(np.{function}({', '.join(sources)}), 0)")

    _max = _min

    def _sign(self, s):
        """Of one half or two."""
        kind, bits = ("b32", 0x80008000) if s.parts[-1].endswith("x2") else ("b16", 0x8000)
        sign = self._constant((np.uint32 if kind == "b32" else np.uint16)(bits))
        value = self._source(s.operands[1], kind)
        self._put(s, s.operands[0], kind, f"{value} & ~{sign}" if s.parts[0] == "abs" else f"{value} ^ {sign}")

    def _mul(self, s):
        kind = s.parts[-1]
        if "wide" in s.parts or "hi" in s.parts:
            left, right = (self._source(x, kind) for x in s.operands[1:])
            wide = _WIDER[kind]
            product = f"np.multiply({left}, {right}, dtype={_NUMPY[wide]})"
            if "hi" in s.parts:
                product, wide = f"({product} >> {kind[1:]})", kind
            self._put(s, s.operands[0], wide, product)
        else:
            self._ufunc(s, "multiply")

    def _mad(self, s):
        kind = s.parts[-1]
        wide = _WIDER[kind] if "wide" in s.parts else kind
        left, right = (self._source(x, kind) for x in s.operands[1:3])
        product = f"np.multiply({left}, {right}, dtype={_NUMPY[wide]})"
        self._put(s, s.operands[0], wide, f"{product} + {self._source(s.operands[3], wide)}")

    def _fma(self, s):
        self._put(s, s.operands[0], "f32", f"fused({', '.join(self._source(x, 'f32') for x in s.operands[1:])})")

    def _div(self, s):
        kind = s.parts[-1]
        if kind == "f32":
            return self._ufunc(s, "divide")
        sources = ", ".join(self._source(x, kind) for x in s.operands[1:])
        return self._put(s, s.operands[0], kind, f"{s.parts[0]}_towards_0({sources})")

    _rem = _div

    def _shl(self, s):
        kind = s.parts[-1]
        sources = f"{self._source(s.operands[1], kind)}, {self._source(s.operands[2], 'u32')}, {kind[1:]}"
        self._put(s, s.operands[0], kind, f"{s.parts[0]}({sources})")

    _shr = _shl

    def _bfe(self, s):
        kind = s.parts[-1]
        place, length = (int(x, 0) for x in s.operands[2:])
        self._put(s, s.operands[0], kind, f"bits_of({self._source(s.operands[1], kind)}, {place}, {length})")

    def _prmt(self, s):
        self._put(s, s.operands[0], "b32", f"permuted({', '.join(self._source(x, 'b32') for x in s.operands[1:4])})")

    def _selp(self, s):
        kind = s.parts[-1]
        one, other = (self._source(x, kind) for x in s.operands[1:3])
        self._put(s, s.operands[0], kind, f"np.where({self._source(s.operands[3], 'pred')}, {one}, {other})")

    def _setp(self, s):
        how, kind = s.parts[1], s.parts[-1]
        if kind in ("bf16x2", "f16x2"):
            for i, name in enumerate(s.operands[0].split("|")):
                halves = (
                    f"number_{kind[:-2]}({self._source(x, 'b32')} >> np.uint32({16 * i}))" for x in s.operands[1:]
                )
                self._put(s, name, "pred", self._comparison(how, *halves, real=True))
            return
        if kind in ("bf16", "f16"):
            sources = [f"number_{kind}({self._source(x, 'b16')})" for x in s.operands[1:]]
        else:
            sources = [self._source(x, kind) for x in s.operands[1:]]
        self._put(s, s.operands[0], "pred", self._comparison(how, *sources, real="f" in kind))

    @staticmethod
    def _comparison(how, left, right, *, real):
        unknown = f"(np.isnan({left}) | np.isnan({right}))"
        if how in ("nan", "num"):
            return unknown if how == "nan" else f"~{unknown}"
        if real and how not in _COMPARED:
            return f"np.{_COMPARED[how[:-1]]}({left}, {right}) | {unknown}"  # "or unordered"
        text = f"np.{_COMPARED[how]}({left}, {right})"
        return f"{text} & ~{unknown}" if real and how == "ne" else text

    def _mov(self, s):
        into, of = s.operands
        if into.startswith("{"):
            parts = _listed(into)
            bits = next(int(self.kernel.registers[part][0][1:]) for part in parts if part != "_")
            whole = self._source(of, f"b{bits * len(parts)}")
            for i, part in enumerate(parts):
                if part != "_":
                    self._put(s, part, f"b{bits}", f"({whole} >> np.uint{bits * len(parts)}({bits * i}))")
        elif of.startswith("{"):
            parts = _listed(of)
            bits = int(self.kernel.registers[parts[0]][0][1:])
            wide = f"np.uint{bits * len(parts)}"
            sources = (
                f"({self._source(x, f'b{bits}')}.astype({wide}) << {wide}({bits * i}))" for i, x in enumerate(parts)
            )
            self._put(s, into, f"b{bits * len(parts)}", " | ".join(sources))
        else:
            kind = self.kernel.registers[into][0]
            if kind == "b32" and of in self.kernel.registers:
                self._call("copied", self.kernel.registers[into][1], self.kernel.registers[of][1])
            self._put(s, into, kind, self._source(of, kind))

    def _cvta(self, s):
        self._put(s, s.operands[0], "b64", self._source(s.operands[1], "b64"))

    def _cvt(self, s):
        into, of = s.operands[:2]
        kinds = [x for x in s.parts[1:] if re.fullmatch(r"(s|u|f|b|bf)\d+(x2)?", x)]
        new, old = kinds[0], kinds[-1]
        if new in ("bf16x2", "f16x2"):
            upper, lower = (f"bits_{new[:-2]}({self._source(x, 'f32')}).astype(np.uint32)" for x in s.operands[1:])
            return self._put(s, into, "b32", f"({upper} << np.uint32(16)) | {lower}")
        if new in ("bf16", "f16"):
            return self._put(s, into, "b16", f"bits_{new}({self._source(of, 'f32')})")
        if old in ("bf16", "f16"):
            return self._put(s, into, "f32", f"number_{old}({self._source(of, 'b16')})")
        value = self._source(of, old)
        if of in self.kernel.registers and self.kernel.registers[of][0][1:] != old[1:]:
            value = f"{value}.astype({_NUMPY[old]})"
        if old == "f32":
            value = f"{next((_ROUNDED[x] for x in s.parts if x in _ROUNDED), 'np.trunc')}({value})"
        width = self.kernel.registers[into][0][1:]
        if width != new[1:]:  # a register may be wider than the number
            value, new = f"{value}.astype({_NUMPY[new]})", ("s" if new[0] == "s" else "u") + width
        return self._put(s, into, new, value)

    # Memory

    def _ld(self, s):
        kind = s.parts[-1]
        if s.parts[1] == "param":
            width = self.kernel.registers[s.operands[0]][0][1:]
            value = f"given[{s.operands[1].strip('[]')!r}]"
            if width != kind[1:]:
                value, kind = f"{value}.astype({_NUMPY[kind]})", ("s" if kind[0] == "s" else "u") + width
            return self._put(s, s.operands[0], kind, value)
        into = [self.kernel.registers[x] for x in _listed(s.operands[0])]
        space = s.parts[1].split("::")[0]
        size, signed = int(kind[1:]) // 8, kind[0] == "s"
        return self._call("load", repr(space), self._address(s.operands[1]), into, size, signed, self._lanes(s))

    def _st(self, s):
        bits = int(s.parts[-1][1:])
        values = ", ".join(self._source(x, f"b{max(bits, 16)}") for x in _listed(s.operands[1]))
        space = s.parts[1].split("::")[0]
        self._call("store", repr(space), self._address(s.operands[0]), f"({values},)", bits // 8, self._lanes(s))

    def _atom(self, s):
        if "add" not in s.parts:
            raise PTXError(f"not emulated: {s.text}")
        into, kind = self.kernel.registers[s.operands[0]][1], s.parts[-1]
        address, value = self._address(s.operands[1]), self._source(s.operands[2], kind)
        self._call("add_to", into, address, value, _NUMPY[kind], self._lanes(s))

    def _ldmatrix(self, s):
        self._call("ldmatrix", self._address(s.operands[1]), self._numbers(s.operands[0]), "m", "trans" in s.parts)

    def _stmatrix(self, s):
        self._call("stmatrix", self._address(s.operands[0]), self._numbers(s.operands[1]), "m", "trans" in s.parts)

    # Between lanes and warps

    def _shfl(self, s):
        value, lane = self._source(s.operands[1], "b32"), self._source(s.operands[2], "u32")
        self._put(s, s.operands[0], "b32", f"w.shuffled({s.parts[2]!r}, {value}, {lane}, m)")

    def _redux(self, s):
        kind = s.parts[-1]
        self._put(s, s.operands[0], kind, f"w.reduced({s.parts[2]!r}, {self._source(s.operands[1], kind)}, m)")

    def _elect(self, s):
        self._put(s, s.operands[0].split("|")[1], "pred", "w.lane == np.flatnonzero(m)[0]")

    def _setmaxnreg(self, s):
        self._call("together", "m")

    def _bar(self, s):
        count = self._source(s.operands[1], "u32") if len(s.operands) > 1 else "None"
        self._last("at_barrier", self._source(s.operands[0], "u32"), count, "m", self.piece)

    _barrier = _bar

    def _fence(self, s):
        if not s.name.startswith("fence.proxy.async"):
            raise PTXError(f"not emulated: {s.text}")
        self._call("fence", self._lanes(s))

    def _mbarrier(self, s):
        if s.parts[1] == "init":
            self._call("begin_barrier", self._address(s.operands[0]), int(s.operands[1]), self._lanes(s))
        elif s.parts[1] == "arrive":
            extra = self._source(s.operands[2], "u32") if "expect_tx" in s.parts else 0
            self._call("arrive", self._address(s.operands[1]), self._lanes(s), extra)
        elif s.name.startswith("mbarrier.try_wait.parity"):
            done = self.kernel.registers[s.operands[0]][1]
            self._last("wait", done, self._address(s.operands[1]), self._source(s.operands[2], "u32"), "m", self.piece)
        else:
            raise PTXError(f"not emulated: {s.text}")

    # Products and copies

    def _mma(self, s):
        into, left, right = (self._numbers(x) for x in s.operands[:3])
        of = _listed(s.operands[3])
        base = [self.kernel.registers[x][1] for x in of] if of[0] in self.kernel.registers else None
        depth, kind = int(re.search(r"m16n8k(\d+)", s.name)[1]), s.parts[-3]
        self._call("small_product", depth, repr(kind), into, left, right, base, "m")

    def _wgmma(self, s):
        if s.parts[1] == "fence":
            self._call("together", "m")
        elif s.parts[1] == "commit_group":
            self._call("commit_products", "m")
        elif s.parts[1] == "wait_group":
            self._call("wait_for_products", int(s.operands[0]), "m")
        else:
            columns, kind = int(re.search(r"m64n(\d+)k", s.name)[1]), s.parts[-1]
            in_registers = s.operands[1].startswith("{")
            left = self._numbers(s.operands[1]) if in_registers else self._source(s.operands[1], "b64")
            added = self._source(s.operands[3], "pred")
            signs, turned = [int(x) for x in s.operands[4:6]], [int(x) for x in s.operands[6:]]
            if signs != [1, 1]:
                raise PTXError(f"not emulated: {s.text}")
            turned = [0, 0, *turned][-2:]
            right = self._source(s.operands[2], "b64")
            self._call("product", columns, repr(kind), self._numbers(s.operands[0]), left, right, added, turned, "m")

    def _cp(self, s):
        if s.name.startswith("cp.async.bulk.tensor"):
            incoming = s.operands[0].count(",") == 0
            smem = s.operands[0] if incoming else s.operands[1]
            tensor = s.operands[1] if incoming else s.operands[0]
            descriptor, coordinates = re.fullmatch(r"\[\s*(\S+?)\s*,\s*\{([^}]*)\}\s*\]", tensor).groups()
            place = ", ".join(self._source(x.strip(), "s32") for x in coordinates.split(","))
            given = [self._address(smem), self._source(descriptor, "b64"), f"({place},)"]
            if incoming:
                given.append(self._address(s.operands[2]))
            self._call("bring" if incoming else "take", *given, self._lanes(s))
        elif s.name.startswith("cp.async.bulk.commit_group"):
            self._call("commit_stores")
        elif s.name.startswith("cp.async.bulk.wait_group"):
            self._call("wait_for_stores", int(s.operands[0]))
        elif s.name.startswith("cp.async.commit_group"):
            self._call("commit_loads")
        elif s.name.startswith("cp.async.wait"):
            self._call("wait_for_loads", int(s.operands[0]) if s.operands else 0)
        elif s.name.startswith(("cp.async.cg", "cp.async.ca")):
            size = int(s.operands[2], 0)
            there = self._source(s.operands[3], "u32") if len(s.operands) > 3 else self._constant(np.uint32(size))
            self._call("load_later", *map(self._address, s.operands[:2]), size, there, self._lanes(s))
        else:
            raise PTXError(f"not emulated: {s.text}")

    def _bra(self, s):
        self._go(s, self.kernel.piece_of(s.operands[0]))

    def _ret(self, s):
        self._go(s, ENDED)

    _exit = _ret

    def _go(self, s, target):
        if s.predicate is None:
            self._last("go", target, "m")
        else:
            predicate = self._array(s.predicate, "pred")
            self._last("branch", f"~{predicate}" if s.negated else predicate, target, self.piece + 1, "m")

    def _brx(self, s):
        targets = [self.kernel.piece_of(x) for x in self.kernel.targets[s.operands[1]]]
        self._last("choose", self._source(s.operands[0], "u32"), targets, "m")


def fused(x, y, z):
    return np.asarray(np.multiply(x, y, dtype=np.float64) + z, np.float32)


def shl(x, count, bits):
    return np.where(count >= bits, 0, np.left_shift(x, np.minimum(count, bits - 1).astype(x.dtype)))


def shr(x, count, bits):
    x = np.asarray(x)
    shifted = np.right_shift(x, np.minimum(count, bits - 1).astype(x.dtype))
    return np.where((count >= bits) & (x.dtype.kind == "u"), 0, shifted)


def bits_of(x, place, length):
    x = np.asarray(x)
    left = 8 * x.itemsize - place - length
    return np.right_shift(np.left_shift(x, x.dtype.type(left)), x.dtype.type(left + place))


def div_towards_0(x, y):
    x, y = (np.asarray(z).astype(np.int64) for z in (x, y))
    return np.abs(x) // np.maximum(np.abs(y), 1) * np.sign(x) * np.sign(y)


def rem_towards_0(x, y):
    return np.asarray(x).astype(np.int64) - div_towards_0(x, y) * np.asarray(y).astype(np.int64)


def permuted(low, high, choice):
    pair = np.stack([np.broadcast_to(x, 32) for x in (low, high)], 1).astype("<u4").view(np.uint8)
    chosen = np.broadcast_to(choice, 32)[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
    if (chosen > 7).any():
        raise PTXError("prmt with signs is not emulated")
    return np.take_along_axis(pair, chosen.astype(np.int64), 1).copy().view("<u4")[:, 0]


def bits_bf16(x):
    x = np.asarray(x, np.float32)
    wide = x.view(np.uint32).astype(np.uint64)
    return np.where(np.isnan(x), np.uint16(0x7FFF), (wide + 0x7FFF + (wide >> 16 & 1) >> 16).astype(np.uint16))


def bits_f16(x):
    return np.asarray(x, np.float32).astype(np.float16).view(np.uint16)


def number_bf16(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def number_f16(bits):
    return np.asarray(bits).astype(np.uint16).view(np.float16).astype(np.float32)


def number_tf32(bits):
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


_HELPERS = {
    function.__name__: function
    for function in (
        fused, shl, shr, bits_of, div_towards_0, rem_towards_0, permuted, bits_bf16, bits_f16, number_bf16, number_f16
    )
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Matrices as products take them


def _numbers_of(raw, kind):
    """Of bytes along the last axis."""
    raw = np.ascontiguousarray(raw)
    if kind == "tf32":
        return number_tf32(raw.view(np.uint32)[..., 0])
    return {"bf16": number_bf16, "f16": number_f16}[kind](raw.view(np.uint16)[..., 0])


def _swizzled(at, width):
    """Where the bytes of rows of a width are, in pieces of 16 that change places."""
    return at ^ ((at >> 7 & width // 16 - 1) << 4) if width else at


@functools.lru_cache(maxsize=4096)
def _places(descriptor, rows, turned, size):
    """Addresses, (rows, 32 // size, size), of what a descriptor says is a matrix with 32 bytes along the sum."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    width = {1: 128, 2: 64, 3: 32}[descriptor >> 62]
    row, column = np.arange(rows)[:, None], np.arange(32 // size)[None]
    if turned:
        across = width // size
        at = start + row % across * size + row // across * leading + column % 8 * width + column // 8 * stride
    else:
        at = start + row // 8 * stride + row % 8 * width + column * size
    return _swizzled(at, width)[..., None] + np.arange(size)


@functools.cache
def _accumulated(columns):
    """Row and column of register i in a lane, of the 16 rows of a warp."""
    i, lane = np.arange(columns // 2)[:, None], LANES[None]
    return lane // 4 + 8 * (i % 4 // 2), lane % 4 * 2 + i % 2 + 8 * (i // 4)


def _fragment(registers, kind, *, right=False):
    """The matrix of which lanes hold pieces, (rows, along the sum)."""
    numbers = {"tf32": number_tf32, "bf16": number_bf16, "f16": number_f16}[kind]
    pieces = numbers(registers if kind == "tf32" else registers.view(np.uint16)).reshape(len(registers), 32, -1)
    together, blocks = pieces.shape[2], 1 if right else 2
    matrix = np.empty((8 * blocks, len(pieces) // blocks * 4 * together), np.float32)
    for i, piece in enumerate(pieces):
        for j in range(together):
            column = LANES % 4 * together + j + 4 * together * (i // blocks)
            matrix[LANES // 4 + 8 * (i % blocks), column] = piece[:, j]
    return matrix


# ---------------------------------------------------------------------------------------------------------------------
# Memory, barriers, warps


class Memory:
    """Global memory: tensors where they are, and their descriptors for the copy engine."""

    def __init__(self):
        self.regions, self.descriptors = [], {}

    def add(self, start, bytes_there):
        if not any(begin == start for begin, _ in self.regions) and len(bytes_there):
            self.regions.append((start, bytes_there))

    def describe(self, *description):
        """An address that stands for a descriptor."""
        address = 0x7000_0000 + 128 * len(self.descriptors)
        self.descriptors[address] = Descriptor(self, *description)
        return address

    def at(self, addresses, size, lanes):
        """The bytes that hold some addresses, and where in them these are."""
        first = int(addresses[np.flatnonzero(lanes)[0]])
        for begin, held in self.regions:
            if begin <= first < begin + len(held):
                places = (addresses - np.uint64(begin)).astype(np.int64)
                if (places[lanes] < 0).any() or (places[lanes] + size > len(held)).any():
                    raise PTXError("an address outside the memory of its tensor")
                if (addresses[lanes] % np.uint64(size)).any():
                    raise PTXError(f"an address that {size} does not divide")
                return held, places
        raise PTXError(f"there is no memory at {first:#x}")


class Descriptor:
    """A tensor for the copy engine: lengths, strides in bytes of all but the first axis, and a box, innermost first."""

    def __init__(self, memory, start, lengths, strides, box, swizzle, size):
        self.held, (offset,) = memory.at(np.array([start], np.uint64), 1, ALL[:1])
        self.start, self.lengths, self.strides, self.box, self.size = int(offset), lengths, strides, box, size
        self.width = {0: 0, 1: 32, 2: 64, 3: 128}[swizzle]
        self.bytes = int(np.prod(box)) * size

    def shared(self, address):
        """Where the bytes of a box go, in order."""
        if address % 128:
            raise PTXError("a box at an address that 128 does not divide")
        return _swizzled(address + np.arange(self.bytes), self.width)

    def places(self, coordinates):
        """Where they are in the tensor, and which are there at all."""
        there, at = np.ones(self.box[::-1], bool), np.zeros(self.box[::-1], np.int64)
        for axis, (begin, length, step) in enumerate(
            zip(coordinates, self.lengths, [self.size, *self.strides], strict=True)
        ):
            along = np.arange(self.box[axis]).reshape(-1, *[1] * axis) + begin
            there &= (along >= 0) & (along < length)
            at += along * step
        at = self.start + at[..., None] + np.arange(self.size)
        return at.ravel(), np.repeat(there.ravel(), self.size)


class _Barrier:
    """An mbarrier, and what who waits for its phases learns of the others' progress."""

    def __init__(self, count, agent, clock):
        self.count = self.left = count
        self.agent, self.born = agent, clock
        self.bytes = self.phase = 0
        self.gathered = clock * 0
        self.told = clock * 0

    def turn(self):
        """Whether a phase is over now."""
        if self.left < 0:
            raise PTXError("more arrive at a barrier than it counts")
        if self.left or self.bytes:
            return False
        self.phase += 1
        self.left = self.count
        self.told = np.maximum(self.told, self.gathered)
        self.told[self.agent] = self.phase
        self.gathered = self.told * 0
        return True


MOST_BARRIERS = 128


class Warp:
    """32 lanes; those that parted at a branch go one way after the other until all are where both ways meet."""

    def __init__(self, machine, index):
        self.machine, self.index = machine, index
        counts = machine.kernel.counts
        self.P = np.zeros((counts["pred"] + 1, 32), bool)
        self.H, self.R, self.D = (np.full((counts[f"b{n}"] + 1, 32), POISON, f"u{n // 8}") for n in (16, 32, 64))
        views = self.R.view(np.float32), self.R.view(np.int32), self.D.view(np.int64), self.H.view(np.int16)
        self.arrays = (self.P, self.H, self.R, self.D, *views, machine.given)
        self.lane = LANES.astype(np.uint32)
        self.thread, self.zero = self.lane + np.uint32(32 * index), self.lane * np.uint32(0)
        self.program, self.programs = np.uint32(machine.program), np.uint32(machine.programs)
        self.ways = [[0, None, ALL]]
        """Where lanes are, where they meet the others, and which they are; the last is who goes on."""
        self.ended, self.waits_for = False, None
        self.clock = np.zeros(machine.agents, np.int64)
        self.clock[index] = 1
        self.under_way = {}
        """(product, number) by register."""
        self.products, self.product_groups = [], []
        self.stores, self.store_groups = [], []
        self.loads, self.load_groups = [], []

    # Where it is

    def step(self):
        piece, _, lanes = self.ways[-1]
        try:
            self.machine.kernel.function(piece)(self, lanes)
        except PTXError as error:
            text = "; ".join(s.text for s in self.machine.kernel.pieces[piece][:3])
            raise type(error)(f"{error} (program {self.machine.program}, warp {self.index}: {text[:300]})") from None
        while len(self.ways) > 1 and self.ways[-1][0] == self.ways[-1][1]:
            self.ways.pop()
        self.ended = self.ways[-1][0] == ENDED
        if self.ended and (self.products or self.product_groups):
            raise RaceError("a program ends before its products are there")

    def go(self, piece, lanes):
        self.ways[-1][0] = piece

    def branch(self, taken, target, other, lanes):
        taken = lanes & taken
        rest = lanes & ~taken
        if not (taken.any() and rest.any()):
            self.ways[-1][0] = target if taken.any() else other
            return
        join = self.machine.kernel.joins[self.ways[-1][0]]
        self.ways[-1][0] = join
        self.ways += [[other, join, rest], [target, join, taken]]

    def choose(self, number, targets, lanes):
        self.go(targets[self._same(np.broadcast_to(number, 32)[lanes])], lanes)

    def together(self, lanes):
        if not lanes.all():
            raise PTXError("not all lanes of a warp are there")

    @staticmethod
    def _same(x):
        x = np.unique(x)
        if len(x) > 1:
            raise PTXError("lanes differ where they must not")
        return int(x[0])

    # Barriers

    def at_barrier(self, number, threads, lanes, piece):
        self.together(lanes)
        number, warps = self._same(number), self.machine.kernel.threads // 32
        if threads is not None:
            warps = self._same(threads) // 32
        there = self.machine.at_barriers.setdefault(number, [])
        there.append(self)
        self.go(piece + 1, lanes)
        if len(there) < warps:
            self.waits_for = f"barrier {number} with {len(there)} of {warps} warps"
            return
        known = np.maximum.reduce([warp.clock for warp in there])
        for warp in there:
            warp.waits_for, warp.clock = None, known.copy()
            warp.clock[warp.index] += 1
        there.clear()

    def begin_barrier(self, addresses, count, lanes):
        for address in np.broadcast_to(addresses, 32)[lanes]:
            agent = len(self.machine.warps) + len(self.machine.barriers_ever)
            self.machine.barriers_ever.append(int(address))
            if agent >= self.machine.agents:
                raise PTXError(f"more than {MOST_BARRIERS} barriers")
            self.machine.barriers[int(address)] = _Barrier(count, agent, self.clock.copy())
            self.machine.begun[int(address)] = self.index, self.clock[self.index]

    def _barrier(self, address):
        barrier = self.machine.barriers.get(address)
        if barrier is None:
            raise PTXError(f"there is no barrier at {address}")
        who, when = self.machine.begun[address]
        if self.clock[who] < when:
            raise RaceError(f"a barrier at {address} of which this warp does not know yet that it is there")
        return barrier

    def arrive(self, addresses, lanes, extra):
        for lane in np.flatnonzero(lanes):
            address = int(np.broadcast_to(addresses, 32)[lane])
            barrier = self._barrier(address)
            barrier.bytes += int(np.broadcast_to(extra, 32)[lane])
            barrier.left -= 1
            barrier.gathered = np.maximum(barrier.gathered, self.clock)
            self.clock[self.index] += 1
            if barrier.turn():
                self.machine.wake(address)

    def wait(self, done, addresses, parities, lanes, piece):
        for lane in np.flatnonzero(lanes):
            address, parity = (int(np.broadcast_to(x, 32)[lane]) for x in (addresses, parities))
            barrier = self._barrier(address)
            if barrier.phase % 2 == parity % 2:
                arrivals = f"{barrier.count - barrier.left} of {barrier.count} arrivals are there"
                self.waits_for = (
                    f"phase {parity} of the barrier at {address}, {arrivals}, {barrier.bytes} bytes to come"
                )
                self.machine.waiting.setdefault(address, []).append(self)
                return
            self.clock = np.maximum(self.clock, barrier.told)
        np.copyto(self.P[done], True, where=lanes)
        self.go(piece + 1, lanes)

    def fence(self, lanes):
        self.machine.fence(self.clock)

    # Memory

    def load(self, space, addresses, into, size, signed, lanes):
        if not lanes.any():
            return
        held, places = self._held(space, addresses, size * len(into), lanes)
        if space == "shared":
            self.machine.read(self, (places[lanes][:, None] + np.arange(size * len(into))).ravel())
        places = np.where(lanes, places, places[np.flatnonzero(lanes)[0]])
        for i, (kind, number) in enumerate(into):
            raw = held[places[:, None] + (np.arange(size) + i * size)].view(f"u{size}")[:, 0]
            if signed:
                raw = raw.view(f"i{size}").astype(f"i{int(kind[1:]) // 8}")
            array = {"b16": self.H, "b32": self.R, "b64": self.D}[kind]
            np.copyto(array[number], raw.astype(array.dtype), where=lanes)

    def store(self, space, addresses, values, size, lanes):
        if not lanes.any():
            return
        held, places = self._held(space, addresses, size * len(values), lanes)
        at = places[lanes][:, None] + np.arange(size * len(values))
        raw = np.stack([np.broadcast_to(value, 32)[lanes] for value in values], 1).astype(f"u{size}").view(np.uint8)
        if space == "shared":
            self.machine.write(self, at.ravel(), raw.ravel())
        held[at] = raw

    def _held(self, space, addresses, size, lanes):
        addresses = np.broadcast_to(addresses, 32)
        if space != "shared":
            return self.machine.memory.at(addresses, size, lanes)
        places = addresses.astype(np.int64)
        if (places[lanes] % size).any():
            raise PTXError(f"an address that {size} does not divide")
        return self.machine.shared, places

    def add_to(self, into, addresses, values, kind, lanes):
        for lane in np.flatnonzero(lanes):
            held, places = self.machine.memory.at(np.broadcast_to(addresses, 32), 4, lane == LANES)
            place = held[int(places[lane]) : int(places[lane]) + 4].view(kind)
            self.R[into][lane] = place.view(np.uint32)[0]
            place += np.broadcast_to(values, 32)[lane]

    def _rows(self, addresses, i):
        rows = np.broadcast_to(addresses, 32)[8 * i : 8 * i + 8].astype(np.int64)
        if (rows % 16).any():
            raise PTXError("a row of a matrix at an address that 16 does not divide")
        return rows[:, None] + np.arange(16)

    def ldmatrix(self, addresses, into, lanes, turned):
        self.together(lanes)
        for i, register in enumerate(into):
            places = self._rows(addresses, i)
            self.machine.read(self, places.ravel())
            matrix = self.machine.shared[places].view(np.uint16)
            self.R[register] = np.ascontiguousarray(matrix.T if turned else matrix).reshape(32, 2).view(np.uint32)[:, 0]

    def stmatrix(self, addresses, of, lanes, turned):
        self.together(lanes)
        for i, register in enumerate(of):
            places = self._rows(addresses, i)
            matrix = self.R[register].copy().view(np.uint16).reshape(8, 8)
            raw = np.ascontiguousarray(matrix.T if turned else matrix).view(np.uint8)
            self.machine.write(self, places.ravel(), raw.ravel())
            self.machine.shared[places] = raw

    # Lanes

    def shuffled(self, how, value, lane, lanes):
        self.together(lanes)
        value, lane = np.broadcast_to(value, 32), np.broadcast_to(lane, 32).astype(np.int64)
        place = {"bfly": LANES ^ lane, "idx": lane % 32, "up": LANES - lane, "down": LANES + lane}[how]
        return value[np.where((place >= 0) & (place < 32), place, LANES)]

    def reduced(self, how, value, lanes):
        self.together(lanes)
        return {"max": np.max, "min": np.min, "add": np.sum}[how](value)

    # Products

    def copied(self, into, of):
        """A register that a product is to write, and its copies, get it at the same time."""
        if of in self.under_way:
            self.under_way[into] = self.under_way[of]
        else:
            self.under_way.pop(into, None)

    def small_product(self, depth, kind, into, left, right, base, lanes):
        self.together(lanes)
        product = _fragment(self.R[left], kind) @ _fragment(self.R[right], kind, right=True).T
        if product.shape != (16, 8) or len(left) * (4 if kind == "tf32" else 8) != 2 * depth:
            raise PTXError(f"a product of {depth} {kind} is not emulated")
        found = product[_accumulated(8)]
        if base is not None:
            found = found + self.R[base].view(np.float32)
        self.R[into] = found.astype(np.float32).view(np.uint32)

    def product(self, columns, kind, into, left, right, added, turned, lanes):
        self.together(lanes)
        size, read = (4 if kind == "tf32" else 2), []
        if isinstance(left, list):
            if any(register in self.under_way for register in left):
                raise RaceError("a product takes registers that another is still to write")
            a = _fragment(self.R[left], kind)
        else:
            read.append(_places(self._same(left), 64, turned[0], size)[16 * (self.index % 4) :][:16])
            a = _numbers_of(self.machine.shared[read[0]], kind)
        read.append(_places(self._same(right), columns, turned[1], size))
        total = a @ _numbers_of(self.machine.shared[read[-1]], kind).T
        if self._same(added):
            known = {id(self.under_way.get(register, (None,))[0]) for register in into}
            if into[0] not in self.under_way:
                before = np.empty((16, columns), np.float32)
                before[_accumulated(columns)] = self.R[into].view(np.float32)
            elif len(known) == 1:
                before = self.under_way[into[0]][0]["total"]
            else:
                raise RaceError("what a product is added to is not that of one product")
            total += before
        for places in read:
            self.machine.read(self, places.ravel(), by_engine=True)
        product = {"total": total, "read": [(places, self.machine.shared[places]) for places in read]}
        for i, register in enumerate(into):
            self.under_way[register] = product, i
        self.R[into] = POISON
        self.products.append(product)

    def commit_products(self, lanes):
        self.together(lanes)
        self.product_groups.append(self.products)
        self.products = []

    def wait_for_products(self, count, lanes):
        self.together(lanes)
        if self.products:
            raise PTXError("a wait for products that are not committed")
        while len(self.product_groups) > count:
            for product in self.product_groups.pop(0):
                for places, found in product["read"]:
                    self.machine.unchanged(self, places, found, "a product")
                values = product["total"][_accumulated(product["total"].shape[1])].view(np.uint32)
                for register in [x for x, (of, _) in self.under_way.items() if of is product]:
                    _, i = self.under_way.pop(register)
                    if (self.R[register] == POISON).all():
                        self.R[register] = values[i]

    # Copies

    def bring(self, places, descriptors, coordinates, barriers, lanes):
        for lane in np.flatnonzero(lanes):
            place, address, barrier = (int(np.broadcast_to(x, 32)[lane]) for x in (places, descriptors, barriers))
            descriptor = self.machine.memory.descriptors[address]
            shared = descriptor.shared(place)
            self._barrier(barrier)
            self.machine.write(self, shared, barrier=barrier)
            self.machine.shared[shared] = 0xFF
            where = [int(np.broadcast_to(x, 32)[lane]) for x in coordinates]
            self.machine.copies.append((descriptor, where, shared, barrier))

    def take(self, places, descriptors, coordinates, lanes):
        for lane in np.flatnonzero(lanes):
            place, address = (int(np.broadcast_to(x, 32)[lane]) for x in (places, descriptors))
            descriptor = self.machine.memory.descriptors[address]
            shared = descriptor.shared(place)
            self.machine.read(self, shared, by_engine=True)
            where = [int(np.broadcast_to(x, 32)[lane]) for x in coordinates]
            self.stores.append((descriptor, where, shared, self.machine.shared[shared]))

    def commit_stores(self):
        self.store_groups.append(self.stores)
        self.stores = []

    def wait_for_stores(self, count):
        while len(self.store_groups) > count:
            for descriptor, where, shared, found in self.store_groups.pop(0):
                self.machine.unchanged(self, shared, found, "a store")
                places, there = descriptor.places(where)
                descriptor.held[places[there]] = found[there]

    def load_later(self, places, addresses, size, there, lanes):
        if not lanes.any():
            return
        wanted = lanes & (np.broadcast_to(there, 32) > 0)
        raw = np.zeros((32, size), np.uint8)
        if wanted.any():
            held, of = self.machine.memory.at(np.broadcast_to(addresses, 32), size, wanted)
            raw[wanted] = held[of[wanted][:, None] + np.arange(size)]
        shared = np.broadcast_to(places, 32)[lanes].astype(np.int64)[:, None] + np.arange(size)
        if (shared[:, 0] % size).any():
            raise PTXError(f"an address that {size} does not divide")
        # Triton puts no fence between these copies and products, and nothing is known of harm.
        self.machine.write(self, shared.ravel(), fenced=True)
        self.machine.shared[shared] = 0xFF
        self.loads.append((shared, raw[lanes]))

    def commit_loads(self):
        self.load_groups.append(self.loads)
        self.loads = []

    def wait_for_loads(self, count):
        while len(self.load_groups) > count:
            for shared, raw in self.load_groups.pop(0):
                self.machine.write(self, shared.ravel(), fenced=True)
                self.machine.shared[shared] = raw


class Machine:
    """One program on a multiprocessor."""

    def __init__(self, kernel, shared_bytes, given, *, memory, program=0, programs=1, seed=0):
        self.kernel, self.given, self.memory = kernel, given, memory
        self.program, self.programs = program, programs
        self.random = random.Random(f"{seed} {program}")
        self.shared = np.full(-(-shared_bytes // 1024) * 1024, 0xFF, np.uint8)
        warps = kernel.threads // 32
        self.agents = warps + MOST_BARRIERS
        # Who wrote each byte of shared memory and when, when each warp read it, and whether it was written past the
        # engines for copies and products. What nobody has written may be read: a wide load takes more than it needs.
        count = len(self.shared)
        self.writer, self.written = np.zeros(count, np.int16), np.zeros(count, np.int32)
        self.when_read = np.zeros((warps, count), np.int32)
        self.unfenced = np.zeros(count, bool)
        self.barriers, self.begun, self.barriers_ever, self.waiting, self.at_barriers = {}, {}, [], {}, {}
        self.copies = []
        self.warps = []
        self.warps += [Warp(self, i) for i in range(warps)]

    def run(self):
        """Everything, until all have ended."""
        steps = 0
        with np.errstate(all="ignore"):
            while not all(warp.ended for warp in self.warps):
                ready = [warp for warp in self.warps if not warp.ended and warp.waits_for is None]
                if self.copies and (not ready or self.random.random() < 0.02):
                    self._arrives(self.copies.pop(self.random.randrange(len(self.copies))))
                elif ready:
                    warp = self.random.choice(ready)
                    for _ in range(self.random.randrange(1, 40)):
                        if not warp.ended and warp.waits_for is None:
                            warp.step()
                            steps += 1
                else:
                    waits = (f"warp {warp.index} waits for {warp.waits_for}" for warp in self.warps if not warp.ended)
                    raise DeadlockError(f"program {self.program}: " + "; ".join(waits))
                if steps > MOST_STEPS:
                    raise DeadlockError(f"program {self.program} goes on for ever")
        if self.copies:
            raise RaceError("a program ends before its copies are there")
        for warp in self.warps:
            warp.wait_for_stores(0)

    def _arrives(self, copy):
        descriptor, where, shared, address = copy
        places, there = descriptor.places(where)
        raw = np.zeros(len(places), np.uint8)
        raw[there] = descriptor.held[places[there]]
        self.shared[shared] = raw
        barrier = self.barriers[address]
        barrier.bytes -= descriptor.bytes
        if barrier.turn():
            self.wake(address)

    def wake(self, address):
        for warp in self.waiting.pop(address, ()):
            warp.waits_for = None

    def _inside(self, places):
        if places.max() >= len(self.shared):
            raise PTXError("an address beyond shared memory")

    def read(self, warp, places, *, by_engine=False):
        self._inside(places)
        if (warp.clock[self.writer[places]] < self.written[places]).any():
            raise RaceError(f"shared memory from {places[0]} on is read before it is known to be written")
        if by_engine and self.unfenced[places].any():
            raise RaceError(f"shared memory from {places[0]} on is read by an engine without a fence")
        self.when_read[warp.index, places] = warp.clock[warp.index]

    def write(self, warp, places, raw=None, *, barrier=None, fenced=False):
        self._inside(places)
        if (warp.clock[self.writer[places]] < self.written[places]).any():
            # The same once more does no harm.
            if raw is None or (self.shared[places] != raw).any():
                raise RaceError(f"shared memory from {places[0]} on is written twice, in no order")
            return
        for other, when in enumerate(self.when_read):
            if other != warp.index and (when[places] > warp.clock[other]).any():
                raise RaceError(f"shared memory from {places[0]} on is overwritten before it is known to be read")
        if barrier is None:
            self.writer[places], self.written[places] = warp.index, warp.clock[warp.index]
            # A place may be used again that a barrier had.
            for address in [x for x in self.barriers if ((places >= x) & (places < x + 8)).any()]:
                del self.barriers[address]
        else:
            self.writer[places], self.written[places] = self.barriers[barrier].agent, self.barriers[barrier].phase + 1
        self.unfenced[places] = barrier is None and not fenced

    def unchanged(self, warp, places, found, who):
        """What was read meanwhile is what was there at first; from now on it is read."""
        if (self.shared[places] != found).any():
            raise RaceError(f"what {who} reads is overwritten before it was waited for")
        self.when_read[warp.index, places] = warp.clock[warp.index]

    def fence(self, clock):
        self.unfenced &= clock[self.writer] < self.written
