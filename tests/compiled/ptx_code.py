"""The text of a kernel as Triton compiles it (PTX for sm_90a), turned into functions of Python for `ptx_emulator`.

An instruction is a NumPy operation on the 32 lanes of a warp; what has to do with memory, barriers and other warps is a
method of the `Warp`. What is not known raises a PTXError when it is first met.
"""

from __future__ import annotations

import functools
import re

import numpy as np

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

    def function(self, piece, whole):
        """What a piece of straight code does to a warp: to the lanes of a mask, or quicker where these are all."""
        if (piece, whole) not in self._translated:
            self._translated[piece, whole] = _Translation(self, piece, whole).function()
        return self._translated[piece, whole]


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

    def __init__(self, kernel, piece, whole):
        self.kernel, self.piece, self.whole = kernel, piece, whole
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
        into, lanes = self._array(name, kind), self._lanes(s)
        all_of_them = self.whole and lanes == "m"
        self.lines.append(
            f"{into} = {value}" if all_of_them else f"np.copyto({into}, {value}, where={lanes}, casting='unsafe')"
        )

    def _ufunc(self, s, function, kind=None):
        kind = kind or s.parts[-1]
        sources = ", ".join(self._source(x, kind) for x in s.operands[1:])
        into, lanes = self._array(s.operands[0], kind), self._lanes(s)
        where = "" if self.whole and lanes == "m" else f", where={lanes}"
        self.lines.append(f"np.{function}({sources}, out={into}{where})")

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
    bits = x.view(np.uint32)
    # Beyond 32 bits only NaN gets.
    rounded = (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


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
