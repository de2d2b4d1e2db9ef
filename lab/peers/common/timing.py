"""Clocks: the wall clock for the CPU. A turn begins with a call that is not timed."""

from __future__ import annotations

import time
from typing import Callable

#: More samples of one turn than this add nothing to a median.
MAX_PER_TURN = 64
#: Threads of a library spin for some milliseconds after their work, on the cores that the next peer
#: is timed on. The turn ends when they sleep.
SETTLE_SECONDS = 0.010


def sample_wall(call: Callable[[], object], turns: int, budget_us: float) -> list[float]:
    """Microseconds of each call. `call` moves to the next copy of its data by itself.

    The first call of a turn is not timed: it wakes the threads and, where data are hot, brings them
    back into the caches from which another peer's have displaced them.
    """
    samples: list[float] = []
    for _ in range(turns):
        call()
        spent = 0.0
        for _ in range(MAX_PER_TURN):
            start = time.perf_counter_ns()
            call()
            us = (time.perf_counter_ns() - start) / 1e3
            samples.append(us)
            spent += us
            if spent >= budget_us:
                break
    time.sleep(SETTLE_SECONDS)
    return samples
