"""
mcperf's dynamic load, target by target: the trace that a run with `--qps_seed` serves.

mcperf (the load generator of the ETH Zurich cloud computing course) draws one target per
interval with `std::default_random_engine` and `std::uniform_int_distribution<int>`. In
libstdc++ these are the Lehmer generator `minstd_rand0` and division with rejection, so a few
integer operations give the same targets without the C++ library.

The module stays free of numba: the live agent imports it.

    python -m env.simulator.load --seed 2333 --qps-min 5000 --qps-max 180000 --count 20
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from env.inputs.commandline import OneLineParser, whole_number
from env.scenario import Load

# minstd_rand0 of C++11: x <- 16807 x mod 2^31 - 1 (Park & Miller, 1988).
MULTIPLIER = 16_807
MODULUS = 2**31 - 1

# Seeds that the course and published runs use: a policy must not have trained on them.
PUBLISHED_SEEDS = frozenset({1, 7, 42, 2333, 3274})

Purpose = Literal["training", "selection", "report"]
PURPOSES: tuple[Purpose, ...] = ("training", "selection", "report")


def initial_state(seed: int) -> int:
    """
    State of the generator after seeding, as in libstdc++.

    :param seed: mcperf's `--qps_seed`, 1 to 2^31 - 1
    :return: the state before the first draw
    :raises ValueError: for a seed which mcperf cannot repeat
    """
    if not 1 <= seed <= MODULUS:
        why = " (mcperf seeds 0 from the clock)" if seed == 0 else ""
        raise ValueError(f"seed must be from 1 to {MODULUS}, not {seed}{why}")
    return seed % MODULUS or 1


@cache
def _powers(count: int) -> npt.NDArray[np.int64]:
    """MULTIPLIER to the powers 1 .. count, modulo MODULUS: how far each draw moves the state."""
    return np.array([pow(MULTIPLIER, i, MODULUS) for i in range(1, count + 1)], dtype=np.int64)


def dynamic_targets(seed: int, qps_min: int, qps_max: int, count: int) -> npt.NDArray[np.int64]:
    """
    The first targets of mcperf's dynamic load.

    :param seed: mcperf's `--qps_seed`, 1 to 2^31 - 1
    :param qps_min: smallest target [queries/s]
    :param qps_max: largest target [queries/s]
    :param count: number of intervals
    :return: one target per interval [queries/s]
    :raises ValueError: if a parameter is out of its range
    """
    x = initial_state(seed)
    if qps_min < 1:
        raise ValueError(f"qps_min must be at least 1, not {qps_min}")
    if not qps_min <= qps_max <= MODULUS - 2:
        raise ValueError(f"qps_max must be from qps_min to {MODULUS - 2}, not {qps_max}")
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    span = qps_max - qps_min + 1
    bucket = (MODULUS - 2) // span
    powers = _powers(1 << (count - 1).bit_length())  # few lengths: every one is kept
    accepted: list[npt.NDArray[np.int64]] = []
    missing = count
    while missing > 0:
        states = x * powers % MODULUS  # stays below 2^62
        x = int(states[-1])
        accepted.append(states[states <= bucket * span][:missing])
        missing -= len(accepted[-1])
    return qps_min + (np.concatenate(accepted) - 1) // bucket


def load_targets(
    load: Load, seed: int, count: int, between: tuple[int, int] | None = None
) -> npt.NDArray[np.int64]:
    """
    The first targets of a scenario's load [queries/s].

    :param load: the scenario's load
    :param seed: mcperf's `--qps_seed`; without effect where the scenario lists its targets
    :param count: number of targets
    :param between: smallest and largest target [queries/s] in place of the load's own; without
        effect where the scenario lists its targets
    """
    if not load.targets:
        return dynamic_targets(seed, *(between or (load.qps_min, load.qps_max)), count)
    given = np.repeat(np.array(load.targets, dtype=np.int64), load.target_intervals)
    return np.resize(given, count)


def interval_count(duration_s: float, interval_s: float) -> int:
    """
    Number of intervals in a run: ceil(t / qps_interval), as mcperf announces it.

    :param duration_s: mcperf's `-t` [s]
    :param interval_s: mcperf's `--qps_interval` [s]
    :return: number of intervals; the last one may be cut short
    :raises ValueError: if a length is not positive
    """
    _check_length("duration_s", duration_s)
    _check_length("interval_s", interval_s)
    return math.ceil(duration_s / interval_s)


def _check_length(name: str, seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, not {seconds}")


@dataclass(frozen=True)
class LoadTrace:
    """
    A load that changes in steps of equal length.

    :param targets: offered load of each step [queries/s]
    :param interval_s: length of a step [s]
    """

    targets: tuple[int, ...]
    interval_s: float

    def __post_init__(self) -> None:
        _check_length("interval_s", self.interval_s)
        if not self.targets:
            raise ValueError("targets must name at least one step")
        for qps in self.targets:
            if qps < 1:
                raise ValueError(f"targets must be at least 1 query/s, not {qps}")

    @classmethod
    def dynamic(
        cls, seed: int, interval_s: float, qps_min: int, qps_max: int, duration_s: float
    ) -> LoadTrace:
        """
        Make the trace of `mcperf -t duration_s --qps_interval interval_s --qps_seed seed`.

        :param seed: mcperf's `--qps_seed`, 1 to 2^31 - 1
        :param interval_s: length of a step [s]
        :param qps_min: smallest target [queries/s]
        :param qps_max: largest target [queries/s]
        :param duration_s: length of the run [s]
        """
        count = interval_count(duration_s, interval_s)
        targets = dynamic_targets(seed, qps_min, qps_max, count)
        return cls(tuple(targets.tolist()), interval_s)

    @classmethod
    def explicit(cls, targets: Iterable[int], interval_s: float) -> LoadTrace:
        """
        Make a trace of given targets, as mcperf's repeated `--qps_target`.

        :param targets: offered load of each step, whole numbers [queries/s]
        :param interval_s: length of a step [s]
        """
        given = tuple(targets)
        for qps in given:
            if qps != int(qps):
                raise ValueError(f"targets must be whole numbers of queries/s, not {qps}")
        return cls(tuple(int(qps) for qps in given), interval_s)

    @classmethod
    def scan(cls, start: int, stop: int, step: int, interval_s: float) -> LoadTrace:
        """
        Make the staircase of `mcperf --scan start:stop:step -t interval_s`.

        :param start: first target [queries/s]
        :param stop: largest target allowed, itself a target if a step meets it [queries/s]
        :param step: rise from one target to the next [queries/s]
        :param interval_s: length of a step [s]
        """
        if step < 1:
            raise ValueError(f"step must be at least 1, not {step}")
        if stop < start:
            raise ValueError(f"stop must be at least start, not {stop} < {start}")
        return cls(tuple(range(start, stop + 1, step)), interval_s)


def trace_seeds(entropy: int, count: int, purpose: Purpose) -> list[int]:
    """
    Seeds of load traces for one purpose.

    minstd is linear, so neighbouring seeds begin with nearly the same targets: seeds are
    drawn evenly from the whole range instead of counted up. What a policy trains on must
    never select or judge it: each purpose owns one residue class of the seeds 1 to
    2^31 - 2 modulo 3, so sets for two purposes are disjoint whatever their entropy and
    size. Within a class no seed comes twice, and published seeds come never. A longer list
    begins with the shorter one.

    :param entropy: the experiment's own seed, 0 or more
    :param count: number of seeds
    :param purpose: what the traces are for
    :return: distinct mcperf seeds
    :raises ValueError: if a parameter is out of its range
    """
    if purpose not in PURPOSES:
        raise ValueError(f"purpose must be one of {', '.join(PURPOSES)}, not {purpose!r}")
    if entropy < 0:
        raise ValueError(f"entropy must be at least 0, not {entropy}")
    if count < 0:
        raise ValueError(f"count must be at least 0, not {count}")
    residue = PURPOSES.index(purpose)
    class_size = (MODULUS - 1) // len(PURPOSES)
    # Raw words: numpy promises that these never change between versions.
    words = np.random.PCG64(np.random.SeedSequence(entropy, spawn_key=(residue,)))
    seeds: dict[int, None] = {}
    while len(seeds) < count:
        seed = 1 + residue + len(PURPOSES) * (int(words.random_raw()) % class_size)
        if seed not in PUBLISHED_SEEDS:
            seeds[seed] = None
    return list(seeds)


def main(argv: Sequence[str] | None = None) -> None:
    """
    Print mcperf's targets, one per line.

    :param argv: command line, the process's own if none is given
    """
    parser = OneLineParser(
        prog="python -m env.simulator.load",
        description="Print the targets [queries/s] of mcperf's dynamic load, one per line.",
    )
    add = parser.add_argument
    add("--seed", type=whole_number(0), required=True, help="mcperf's --qps_seed, not 0")
    add("--qps-min", type=whole_number(0), default=5_000, help="smallest target (%(default)s)")
    add("--qps-max", type=whole_number(0), default=180_000, help="largest target (%(default)s)")
    add("--count", type=whole_number(0), default=180, help="number of intervals (%(default)s)")
    args = parser.parse_args(argv)
    try:
        targets = dynamic_targets(args.seed, args.qps_min, args.qps_max, args.count)
    except ValueError as error:
        # The library's messages begin with the parameter's name.
        parser.error("argument --" + str(error).replace("_", "-"))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends us quietly
    print("\n".join(map(str, targets)))


if __name__ == "__main__":
    main()
