"""Contenders in turn, round after round, so that what disturbs the machine disturbs them all or is seen."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ._row import Settings

TURN = 5e-3
"""Seconds that a contender is called for, at least: with four of them a round takes 20 ms."""

LONG = 0.25
"""Seconds of a call that need no second one to tell that it fills a turn."""

DISTURBED = 1.5
"""A round is left out when a contender takes this many times its median."""


Clock = Callable[[Callable[[], object], int], float]
"""Seconds of one call, of so many."""


class Contender(NamedTuple):
    """One way to do the work; a slow one that is there for comparison takes part in some rounds only."""

    name: str
    call: Callable[[], object]
    every: int = 1


class Timing:
    """The seconds of one call, by round and contender, and which rounds count."""

    def __init__(self, rounds: Sequence[dict[str, float]], seldom: frozenset[str] = frozenset()) -> None:
        medians = {name: statistics.median(r[name] for r in rounds if name in r) for name in rounds[0]}
        # Those who seldom take part are looked at for themselves: a round without them is as good.
        calm = [r for r in rounds if all(r[name] <= DISTURBED * medians[name] for name in r if name not in seldom)]
        self.discarded = len(rounds) - len(calm)
        # Where every round was disturbed, as can be with few, there is nothing better than all of them.
        self.rounds = calm or list(rounds)
        self._aside = {name: medians[name] for name in medians if name in seldom}

    def seconds(self) -> dict[str, float]:
        """The median of each."""
        names = (name for name in self.rounds[0] if name not in self._aside)
        return {name: statistics.median(r[name] for r in self.rounds) for name in names} | self._aside

    def ratio(self, above: str, below: str) -> float:
        """The median over rounds of one over the other: what hit both of them falls out."""
        return statistics.median(r[above] / r[below] for r in self.rounds if above in r and below in r)


def measure(contenders: Sequence[Contender], settings: Settings, clock: Clock | None = None) -> Timing:
    """Time them until there are enough calm rounds, or the time for it is over."""
    clock = clock or wall
    repeats = {contender.name: _repeats(contender.call, clock) for contender in contenders}
    seldom = frozenset(contender.name for contender in contenders if contender.every > 1)
    rounds: list[dict[str, float]] = []
    shuffle = random.Random(0)
    was_collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        while True:
            taking_part = [contender for contender in contenders if len(rounds) % contender.every == 0]
            # Shuffled, so that each comes after each of the others: who follows another's threads finds them spinning,
            # and the caches full of what is not his.
            order = shuffle.sample(taking_part, len(taking_part))
            took = {contender.name: clock(contender.call, repeats[contender.name]) for contender in order}
            # In the order in which they were given.
            rounds.append({contender.name: took[contender.name] for contender in taking_part})
            over = time.perf_counter() - start > settings.seconds
            if len(rounds) < settings.least:
                continue
            timing = Timing(rounds, seldom)
            if over or len(rounds) - timing.discarded >= settings.rounds:
                return timing
    finally:
        if was_collecting:
            gc.enable()


def _repeats(call: Callable[[], object], clock: Clock) -> int:
    """Calls that fill a turn; the first ones, which warm up, do not count."""
    if clock(call, 1) > LONG:
        return 1
    took, calls = clock(call, 1), 1
    while took * calls < TURN / 4:
        calls *= 4
        took = clock(call, calls)
    return max(1, math.ceil(TURN / took))


def wall(call: Callable[[], object], calls: int) -> float:
    """Seconds of one call, of so many, by the clock of the host."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls
