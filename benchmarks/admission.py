"""What one decision of the lane's core costs, and whether the length of the queue shows in it.

    python -m benchmarks.admission [--check] [--json FILE]

Prints nanoseconds an operation with 10, 1,000 and 100,000 waiters, and how much more the longest queue costs than the
shortest.  An operation that went through the queue would be 10,000 times as slow in it; what does show is that 100,000
tickets do not fit into the processor's caches.  ``--check`` fails where that ratio exceeds 8, or where arriving at an
idle lane and leaving it takes more than 3 microseconds.

The figures of single operations are means over short windows, and the best of many windows: the others measured what
else the machine was doing.  What happens too seldom to be in each window, such as rebuilding a long heap, is part of
the last table, which counts processor time over whole lives of queues.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path

from laneway._admission import Admission, Ticket, TicketState

SIZES = (10, 1_000, 100_000)
WINDOWS = 40
ROUNDS = 250
"""Operations of each sort in a window."""
MOST_NS_UNCONTENDED = 3_000
MOST_RATIO = 8.0

Keys = Callable[[int], tuple[Hashable, ...]]

# {what the tickets carry: their keys}.  With a key that all want, its claim queue is as long as the queue itself.
KEYS: dict[str, Keys] = {
    "no keys": lambda _: (),
    "a key of its own": lambda number: (number,),
    "one key for all": lambda _: ("key",),
}


def clock_cost() -> float:
    """Nanoseconds that reading the clock adds to each measurement."""
    began = time.perf_counter_ns()
    for _ in range(100_000):
        time.perf_counter_ns()
    return (time.perf_counter_ns() - began) / 100_000


def uncontended(keys: tuple[Hashable, ...], *, beside_another: bool) -> float:
    """Arrive and finish where nobody waits; nanoseconds for both together."""
    core = Admission(4)
    if beside_another:
        core.arrive("completion")
    best = float("inf")
    for _ in range(5 * WINDOWS):
        began = time.perf_counter_ns()
        for _ in range(ROUNDS):
            ticket, _started = core.arrive("completion", keys=keys)
            core.finish(ticket)
        best = min(best, (time.perf_counter_ns() - began) / ROUNDS)
    return best


def contended(waiters: int, keys: Keys) -> dict[str, float]:
    """Nanoseconds an operation with so many waiters, one of whom leaves for each that arrives."""
    clock, now, rng = clock_cost(), time.perf_counter_ns, random.Random(1)
    core = Admission(1, queue_limit=waiters + 1)
    numbers = itertools.count()

    def arrive() -> tuple[Ticket, int]:
        wanted = keys(next(numbers))
        began = now()
        ticket, _started = core.arrive("completion", keys=wanted)
        return ticket, now() - began

    running, _ = arrive()
    line = [arrive()[0] for _ in range(waiters)]

    def somebody_in_line() -> Ticket:
        """Anybody who waits.  Who has started meanwhile is still in the list, and falls out of it here."""
        while True:
            place = rng.randrange(len(line))
            line[place], line[-1] = line[-1], line[place]
            ticket = line.pop()
            if ticket.state is TicketState.WAITING:
                return ticket

    best = dict.fromkeys(["arrive", "withdraw", "finish"], float("inf"))
    for _ in range(WINDOWS):
        spent = dict.fromkeys(best, 0)
        for _ in range(ROUNDS):
            ticket, cost = arrive()
            line.append(ticket)
            spent["arrive"] += cost

            ticket = somebody_in_line()
            began = now()
            core.withdraw(ticket)
            spent["withdraw"] += now() - began

            line.append(arrive()[0])
            began = now()
            (running,) = core.finish(running)
            spent["finish"] += now() - began
        for name, total in spent.items():
            best[name] = min(best[name], total / ROUNDS - clock)
    return best


def life_of(tickets: int, keys: Keys) -> float:
    """So many arrive, a third of them leaves from anywhere in the queue, the others run; nanoseconds a ticket."""
    rng = random.Random(1)
    times = max(1, 2_000 // tickets)
    best = float("inf")
    for _ in range(3):
        spent = 0
        for _ in range(times):
            core = Admission(4, queue_limit=tickets)
            began = time.process_time_ns()
            line = [core.arrive("completion", keys=keys(number))[0] for number in range(tickets)]
            spent += time.process_time_ns() - began
            leavers = rng.sample(line[4:], tickets // 3)
            began = time.process_time_ns()
            for ticket in leavers:
                core.withdraw(ticket)
            running = list(core.running())
            for ticket in running:
                running += core.finish(ticket)  # the list grows as it is gone through
            spent += time.process_time_ns() - began
            assert core.idle
        best = min(best, spent / times / tickets)
    return best


def main() -> int:
    """Measure, print, and say by the exit status whether the targets are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    missed: list[str] = []

    print("arrive and finish where nobody waits, ns for both")
    alone: dict[str, float] = {}
    for name, keys in [("no keys", ()), ("two keys", ("a", "b"))]:
        for where, beside in [("idle lane", False), ("one other runs", True)]:
            figure = alone[f"{where}, {name}"] = uncontended(keys, beside_another=beside)
            print(f"  {where + ', ' + name:28}{figure:8.0f}")
            if not keys and figure > MOST_NS_UNCONTENDED:
                missed.append(f"{where}, {name}: {figure:.0f} ns, at most {MOST_NS_UNCONTENDED}")

    columns = "".join(f"{size:>10,}" for size in SIZES)
    print(f"\nns an operation with so many waiters\n  {'':28}{columns}     ratio")
    queued: dict[str, dict[int, float]] = {}
    for name, keys_of in KEYS.items():
        rows = {size: contended(size, keys_of) for size in SIZES}
        for operation in ["arrive", "withdraw", "finish"]:
            figures = {size: rows[size][operation] for size in SIZES}
            queued[f"{operation}, {name}"] = figures
            ratio = figures[SIZES[-1]] / figures[SIZES[0]]
            cells = "".join(f"{figure:>10.0f}" for figure in figures.values())
            print(f"  {operation + ', ' + name:28}{cells}{ratio:>9.1f}x")
            if ratio > MOST_RATIO:
                missed.append(f"{operation}, {name}: {ratio:.1f} times as slow with {SIZES[-1]:,} waiters")

    print("\nns a ticket when so many arrive, a third leaves and the others run")
    print(f"  {'':28}{columns}     ratio")
    lives: dict[str, dict[int, float]] = {}
    for name, keys_of in KEYS.items():
        lives[name] = {size: life_of(size, keys_of) for size in SIZES}
        cells = "".join(f"{figure:>10.0f}" for figure in lives[name].values())
        print(f"  {name:28}{cells}{lives[name][SIZES[-1]] / lives[name][SIZES[0]]:>9.1f}x")

    if options.json:
        options.json.write_text(json.dumps({"uncontended": alone, "queued": queued, "lives": lives}, indent=2) + "\n")
    if options.check:
        for line in missed:
            print(f"missed: {line}", file=sys.stderr)
        return 1 if missed else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
