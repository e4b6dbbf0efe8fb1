"""Kernels as Triton compiles them for Hopper (PTX for sm_90a), run on the CPU: what the compiler made, not its speed.

    memory = Memory()
    memory.add(tensor.data_ptr(), bytes_of_it)
    run_together([Machine(Kernel(ptx), shared_bytes, parameters, memory=memory)], seed=0)

What a GPU would not forgive raises a PTXError.

Warps take turns, and copies arrive, in an order that is drawn from the seed. What is asynchronous is as late as it may
be: registers that a product (wgmma) is to write hold a number that is none until it was waited for, and what it reads
has to be the same then; so does what a copy (TMA, cp.async) is to bring or to take.

What is read too early or overwritten too soon is found whether or not it happened this time: each warp carries what it
knows of the others' progress (a vector clock), which grows by waiting at barriers alone, and an access to shared memory
demands that all it must follow is known, and that the copy engine and products see it only behind a proxy fence.

Not emulated: how approximations are rounded, what ptxas makes of the PTX, races in global memory and within a warp.
"""

from __future__ import annotations

import functools
import random

import numpy as np
from ptx_code import ENDED, DeadlockError, PTXError, RaceError, number_bf16, number_f16, number_tf32

LANES = np.arange(32)
ALL = np.ones(32, bool)
POISON = np.uint32(0x7FC0DEAD)
"""A float32 that is no number: in registers and shared memory that nobody has written."""

MOST_STEPS = 10_000_000
"""Pieces of straight code of one program, after which it is taken to go on for ever."""

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


def _wide(x):
    """A number for each lane."""
    return x if x.__class__ is np.ndarray and x.shape == (32,) else np.broadcast_to(x, 32)


@functools.cache
def _sources(how, lane):
    """Of which lane each gets a number by a shuffle."""
    lane = np.array(lane)
    place = {"bfly": LANES ^ lane, "idx": LANES * 0 + lane % 32, "up": LANES - lane, "down": LANES + lane}[how]
    return np.where((place >= 0) & (place < 32), place, LANES)


class _Total:
    """What products give that are added to each other in some registers."""

    def __init__(self, into, matrix):
        self.into, self.matrix = into, matrix
        self.missing, self.intact = 0, True
        """How many of them were not waited for, and whether nothing else was put into a register meanwhile."""


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
        """(what it is to get, the place in it) by register."""
        self.products, self.product_groups = [], []
        self.stores, self.store_groups = [], []
        self.loads, self.load_groups = [], []

    # Where it is

    def step(self):
        piece, _, lanes = self.ways[-1]
        try:
            self.machine.kernel.function(piece, lanes is ALL)(self, lanes)
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
        self.go(targets[self._same(_wide(number)[lanes])], lanes)

    def together(self, lanes):
        if lanes is not ALL and not lanes.all():
            raise PTXError("not all lanes of a warp are there")

    @staticmethod
    def _same(x):
        x = np.asarray(x)
        one = x.flat[0]
        if (x != one).any():
            raise PTXError("lanes differ where they must not")
        return int(one)

    @staticmethod
    def _of_lanes(lanes, *given):
        """Of each lane that is there, whole numbers."""
        return zip(*(_wide(x)[lanes].tolist() for x in given), strict=True)

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
        for (address,) in self._of_lanes(lanes, addresses):
            agent = len(self.machine.warps) + len(self.machine.barriers_ever)
            self.machine.barriers_ever.append(address)
            if agent >= self.machine.agents:
                raise PTXError(f"more than {MOST_BARRIERS} barriers")
            self.machine.barriers[address] = _Barrier(count, agent, self.clock.copy())
            self.machine.begun[address] = self.index, self.clock[self.index]

    def _barrier(self, address):
        barrier = self.machine.barriers.get(address)
        if barrier is None:
            raise PTXError(f"there is no barrier at {address}")
        who, when = self.machine.begun[address]
        if self.clock[who] < when:
            raise RaceError(f"a barrier at {address} of which this warp does not know yet that it is there")
        return barrier

    def arrive(self, addresses, lanes, extra):
        for address, bytes_to_come in self._of_lanes(lanes, addresses, extra):
            barrier = self._barrier(address)
            barrier.bytes += bytes_to_come
            barrier.left -= 1
            barrier.gathered = np.maximum(barrier.gathered, self.clock)
            self.clock[self.index] += 1
            if barrier.turn():
                self.machine.wake(address)

    def wait(self, done, addresses, parities, lanes, piece):
        for address, parity in set(self._of_lanes(lanes, addresses, parities)):
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
        raw = np.stack([_wide(value)[lanes] for value in values], 1).astype(f"u{size}").view(np.uint8)
        if space == "shared":
            self.machine.write(self, at.ravel(), raw.ravel())
        held[at] = raw

    def _held(self, space, addresses, size, lanes):
        addresses = _wide(addresses)
        if space != "shared":
            return self.machine.memory.at(addresses, size, lanes)
        places = addresses.astype(np.int64)
        if (places[lanes] % size).any():
            raise PTXError(f"an address that {size} does not divide")
        return self.machine.shared, places

    def add_to(self, into, addresses, values, kind, lanes):
        for lane in np.flatnonzero(lanes):
            held, places = self.machine.memory.at(_wide(addresses), 4, lane == LANES)
            place = held[int(places[lane]) : int(places[lane]) + 4].view(kind)
            self.R[into][lane] = place.view(np.uint32)[0]
            place += _wide(values)[lane]

    def _rows(self, addresses, i):
        rows = _wide(addresses)[8 * i : 8 * i + 8].astype(np.int64)
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
        if np.ndim(lane):
            return _wide(value)[_sources(how, tuple(lane.tolist()))]
        return _wide(value)[_sources(how, int(lane))]

    def reduced(self, how, value, lanes):
        self.together(lanes)
        return {"max": np.max, "min": np.min, "add": np.sum}[how](value)

    # Products

    def copied(self, into, of):
        """A register that a product is to write, and its copies, get it at the same time."""
        total, i = self.under_way.pop(into, (None, 0))
        if total is not None and total.into[i] == into:
            total.intact = False
        if of in self.under_way:
            self.under_way[into] = self.under_way[of]

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
        found = a @ _numbers_of(self.machine.shared[read[-1]], kind).T
        total = self.under_way[into[0]][0] if self._same(added) and into[0] in self.under_way else None
        if total is None:
            total = _Total(into, found)
            if self._same(added):
                before = np.empty((16, columns), np.float32)
                before[_accumulated(columns)] = self.R[into].view(np.float32)
                total.matrix += before
            for i, register in enumerate(into):
                self.under_way[register] = total, i
            self.R[into] = POISON
        elif total.into != into or not total.intact:
            raise RaceError("what a product is added to is not that of one product")
        else:
            total.matrix += found
        total.missing += 1
        for places in read:
            self.machine.read(self, places.ravel(), by_engine=True)
        self.products.append((total, [(places, self.machine.shared[places]) for places in read]))

    def commit_products(self, lanes):
        self.together(lanes)
        self.product_groups.append(self.products)
        self.products = []

    def wait_for_products(self, count, lanes):
        self.together(lanes)
        if self.products:
            raise PTXError("a wait for products that are not committed")
        over = max(len(self.product_groups) - count, 0)
        done = [product for group in self.product_groups[:over] for product in group]
        del self.product_groups[:over]
        for total, read in done:
            for places, found in read:
                self.machine.unchanged(self, places, found, "a product")
            total.missing -= 1
        for total in {id(total): total for total, _ in done if not total.missing}.values():
            values = total.matrix[_accumulated(total.matrix.shape[1])].view(np.uint32)
            places = {register: i for register, (of, i) in self.under_way.items() if of is total}
            self.under_way = {x: found for x, found in self.under_way.items() if x not in places}
            registers, places = np.array(list(places), int), np.array(list(places.values()), int)
            free = (self.R[registers] == POISON).all(1)  # nothing else was put there meanwhile
            self.R[registers[free]] = values[places[free]]

    # Copies

    def bring(self, places, descriptors, coordinates, barriers, lanes):
        for place, address, barrier, *where in self._of_lanes(lanes, places, descriptors, barriers, *coordinates):
            descriptor = self.machine.memory.descriptors[address]
            shared = descriptor.shared(place)
            self._barrier(barrier)
            self.machine.write(self, shared, barrier=barrier)
            self.machine.shared[shared] = 0xFF
            self.machine.copies.append((descriptor, where, shared, barrier))
            counted = self.machine.barriers[barrier]
            self.machine.brought[counted.agent] = counted.phase + 1

    def take(self, places, descriptors, coordinates, lanes):
        for place, address, *where in self._of_lanes(lanes, places, descriptors, *coordinates):
            descriptor = self.machine.memory.descriptors[address]
            shared = descriptor.shared(place)
            self.machine.read(self, shared, by_engine=True)
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
        wanted = lanes & (_wide(there) > 0)
        raw = np.zeros((32, size), np.uint8)
        if wanted.any():
            held, of = self.machine.memory.at(_wide(addresses), size, wanted)
            raw[wanted] = held[of[wanted][:, None] + np.arange(size)]
        shared = _wide(places)[lanes].astype(np.int64)[:, None] + np.arange(size)
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

    def __init__(self, kernel, shared_bytes, given, *, memory, program=0, programs=1):
        self.kernel, self.given, self.memory = kernel, given, memory
        self.program, self.programs = program, programs
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
        self.copies, self.steps, self.random = [], 0, None
        self.brought = {}
        """The phase of a barrier that ends with its last copy, by agent."""
        self.warps = []
        self.warps += [Warp(self, i) for i in range(warps)]

    def turn(self):
        """Some of what is left to do; whether there was anything."""
        if all(warp.ended for warp in self.warps):
            for agent, phase in self.brought.items():
                if all(warp.clock[agent] < phase for warp in self.warps):
                    raise RaceError("a program ends, and nobody has waited for a copy")
            if any(warp.stores or warp.store_groups for warp in self.warps):
                raise RaceError("a program ends before its stores have read what they are to take")
            return False
        ready = [warp for warp in self.warps if not warp.ended and warp.waits_for is None]
        if self.copies and (not ready or self.random.random() < 0.02):
            self._arrives(self.copies.pop(self.random.randrange(len(self.copies))))
        elif ready:
            warp = self.random.choice(ready)
            for _ in range(self.random.randrange(1, 40)):
                if not warp.ended and warp.waits_for is None:
                    warp.step()
                    self.steps += 1
        else:
            waits = (f"warp {warp.index} waits for {warp.waits_for}" for warp in self.warps if not warp.ended)
            raise DeadlockError(f"program {self.program}: " + "; ".join(waits))
        if self.steps > MOST_STEPS:
            raise DeadlockError(f"program {self.program} goes on for ever")
        return True

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
        # Of what it has read itself a warp knows.
        if (self.when_read[:, places] > warp.clock[: len(self.warps), None]).any():
            raise RaceError(f"shared memory from {places[0]} on is overwritten before it is known to be read")
        if barrier is None:
            self.writer[places], self.written[places] = warp.index, warp.clock[warp.index]
            # A place may be used again that a barrier had.
            first, last = places.min(), places.max()
            for address in [x for x in self.barriers if first - 8 < x <= last]:
                if ((places >= address) & (places < address + 8)).any():
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


def run_together(machines, seed=0):
    """Programs that share a GPU, until all have ended."""
    order, left = random.Random(seed), list(machines)
    with np.errstate(all="ignore"):
        while left:
            machine = order.choice(left)
            machine.random = order
            if not machine.turn():
                left.remove(machine)
