"""
Which factors a 2^k r experiment varies on the live machine, and between which two levels.

    --factors threads=1,2 cores=1,2 connections=2,8

`training.factorial` analyses what was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from deploy.load.generator import OUTSTANDING
from env.errors import InputError
from env.scenario import Scenario
from training.analysis.findings import ALONE, SOURCES

NAMES = ("threads", "cores", "connections", "beside")
Level = int | str


@dataclass(frozen=True)
class Factor:
    """
    One factor of the experiment.

    :param name: `threads` of memcached, its vCPUs (`cores`), the load's `connections`, or what runs
        `beside` memcached at equal weight
    :param levels: the lower and the upper one
    """

    name: str
    levels: tuple[Level, Level]

    def __str__(self) -> str:
        return f"{self.name}={self.levels[0]},{self.levels[1]}"


DEFAULT = (
    Factor("threads", (1, 2)),
    Factor("cores", (1, 2)),
    Factor("connections", (2, 8)),
)


def factor(text: str) -> Factor:
    """
    Convert `NAME=LOW,HIGH`.

    :param text: what the command line has
    :raises argparse.ArgumentTypeError: if it is no factor
    """
    name, _, levels = text.partition("=")
    low, _, high = levels.partition(",")
    if name not in NAMES or not low or not high or low == high:
        raise argparse.ArgumentTypeError(
            f"must be NAME=LOW,HIGH with two levels of {', '.join(NAMES)}, not {text!r}"
        )
    if name == "beside":
        allowed = (ALONE, *SOURCES)
        if not {low, high} <= set(allowed):
            raise argparse.ArgumentTypeError(f"beside is one of {', '.join(allowed)}, not {text!r}")
        return Factor(name, (low, high))
    if not (low.isdigit() and high.isdigit() and 0 < int(low) < int(high) <= OUTSTANDING):
        raise argparse.ArgumentTypeError(
            f"{name} takes two rising whole numbers from 1 to {OUTSTANDING}, not {text!r}"
        )
    return Factor(name, (int(low), int(high)))


def require(factors: Sequence[Factor], scenario: Scenario) -> None:
    """
    Refuse factors that the scenario has no levels for.

    :param factors: what is varied
    :param scenario: gives the vCPU sets that memcached may have
    :raises InputError: one line that says which are allowed
    """
    names = [one.name for one in factors]
    if len(set(names)) < len(names):
        raise InputError(f"--factors: each may be given once, not {', '.join(names)}")
    sizes = {len(cores) for cores in scenario.service.candidates}
    for one in factors:
        if one.name == "cores" and not set(one.levels) <= sizes:
            raise InputError(
                f"--factors {one}: scenario {scenario.name} gives memcached "
                f"{', '.join(map(str, sorted(sizes)))} vCPUs"
            )


def combinations(factors: Sequence[Factor]) -> list[dict[str, Level]]:
    """
    Every combination of levels, the first factor changing fastest; none without factors.

    :param factors: the factors, each with its levels
    """
    if not factors:
        return []
    names = [one.name for one in reversed(factors)]
    return [
        dict(zip(names, levels, strict=True))
        for levels in product(*(one.levels for one in reversed(factors)))
    ]
