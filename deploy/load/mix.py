"""
What clients ask for: how many of their requests are SETs, of which sizes, which keys, how many.

The terms are mcperf's and memtier's. By default it is what mcperf asks for: single GETs of 10000
records of 200 bytes, all alike.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deploy.load.keys import ANSWERED, KEY_BYTES, RECORDS, VALUE_BYTES, load_records
from env.errors import InputError
from env.inputs.commandline import number, whole_number

GET, SET = "read", "update"
"""mcperf's names of the operations, which begin the rows of its output."""

STORED = b"STORED\r\n"
"""The answer to a SET."""

REFUSED = re.compile(rb"ERROR[^\n]*\n")
"""How an answer ends that is none: ERROR, or CLIENT_ERROR or SERVER_ERROR with words."""

LARGEST_VALUE = 1 << 19
"""Half of what memcached takes unless it was told otherwise [bytes]."""

MOST_KEYS = 10_000_000
MOST_DRAWN_BYTES = 32 << 20
"""Requests are drawn beforehand, so many bytes of them at most."""

MOST_DRAWN = 10_000

Whole = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """A request as it is sent, and which operation it is."""

    text: bytes
    operation: str


@dataclass(frozen=True)
class Mix:
    """
    What clients ask for.

    :param update: share of SETs, 0 to 1
    :param smallest: size of the smallest values [bytes]
    :param largest: size of the largest; sizes between both are equally likely [bytes]
    :param keys: how many there are
    :param zipf: skew s; the key of rank r is asked for in proportion to r^-s. 0: all alike
    :param multi_get: keys of a GET
    """

    update: float = 0.0
    smallest: int = VALUE_BYTES
    largest: int = VALUE_BYTES
    keys: int = RECORDS
    zipf: float = 0.0
    multi_get: int = 1

    def __post_init__(self) -> None:
        if not 0.0 <= self.update <= 1.0:
            raise InputError(f"--update: a share from 0 to 1, not {self.update:g}")
        if self.multi_get > self.keys:
            raise InputError(f"--multi-get: {self.multi_get} of {self.keys} keys cannot differ")

    def share(self, operation: str) -> float:
        """
        Which part of the requests is of an operation.

        :param operation: `GET` or `SET`
        """
        return self.update if operation == SET else 1.0 - self.update

    def options(self) -> list[str]:
        """The same as options of a command line with `add_mix_options`."""
        sizes = f"{self.smallest}:{self.largest}"
        return [
            *("--update", repr(self.update), "--value-size", sizes, "--keys", str(self.keys)),
            *("--zipf", repr(self.zipf), "--multi-get", str(self.multi_get)),
        ]

    def load(self, host: str, port: int) -> None:
        """
        Store all keys.

        :param host: memcached's address, a name or an IP address
        :param port: memcached's TCP port
        :raises InputError: if nobody answers there, or not as memcached does
        """
        load_records(host, port, self.draw_sizes(np.random.default_rng(0), self.keys))

    def draw_sizes(self, rng: np.random.Generator, count: int) -> Whole:
        """
        Sizes of values [bytes].

        :param rng: random numbers
        :param count: how many
        """
        return rng.integers(self.smallest, self.largest, count, endpoint=True)

    def draw_keys(self, rng: np.random.Generator, count: int) -> Whole:
        """
        Numbers of keys, each 0 to `keys` - 1.

        :param rng: random numbers; which keys are asked for often is the same whatever they are
        :param count: how many
        """
        if self.zipf == 0.0:
            return rng.integers(0, self.keys, count)
        weights = np.cumsum(np.arange(1, self.keys + 1, dtype=np.float64) ** -self.zipf)
        ranks = np.searchsorted(weights, rng.random(count) * weights[-1], side="right")
        return np.random.default_rng(0).permutation(self.keys)[ranks]

    def draw(self, rng: np.random.Generator, count: int = MOST_DRAWN) -> list[Request]:
        """
        Requests in the order in which they are sent; fewer than asked for where they are large.

        :param rng: random numbers
        :param count: how many
        """
        mean_bytes = self.update * (self.smallest + self.largest) / 2.0
        mean_bytes += KEY_BYTES * self.multi_get + 16.0
        count = max(1, min(count, int(MOST_DRAWN_BYTES / mean_bytes)))
        sets = rng.random(count) < self.update
        sizes, keys = self.draw_sizes(rng, count), self.draw_keys(rng, count * self.multi_get)
        asked = keys.reshape(count, self.multi_get)
        return [
            _set(row[0], size) if is_set else _get(row)
            for is_set, size, row in zip(sets, sizes.tolist(), asked.tolist(), strict=True)
        ]


DEFAULT = Mix()


def _get(keys: list[int]) -> Request:
    names = b" ".join(b"%0*d" % (KEY_BYTES, key) for key in keys)
    return Request(b"get %b\r\n" % names, GET)


def _set(key: int, size: int) -> Request:
    return Request(b"set %0*d 0 0 %d\r\n%b\r\n" % (KEY_BYTES, key, size, b"0" * size), SET)


class Answers(NamedTuple):
    """
    What has been answered.

    :param gets: GETs
    :param sets: SETs
    :param failed: requests of either kind that were refused: a group's member may be gone
    :param end: where the last answer ends
    """

    gets: int
    sets: int
    failed: int
    end: int


def answers_in(text: bytes) -> Answers:
    """
    The answers that a text holds whole.

    Values are made of zeros, so no mark is part of one.

    :param text: what has come from memcached
    """
    gets, sets = text.count(ANSWERED), text.count(STORED)
    end = text.rfind(ANSWERED) + len(ANSWERED) if gets else 0
    if sets:
        end = max(end, text.rfind(STORED) + len(STORED))
    refusals = list(REFUSED.finditer(text)) if b"ERROR" in text else []
    if refusals:
        end = max(end, refusals[-1].end())
    return Answers(gets, sets, len(refusals), end)


def value_sizes(text: str) -> tuple[int, int]:
    """
    Convert `BYTES` or `FROM:TO`.

    :param text: what the command line has
    :raises argparse.ArgumentTypeError: if it is neither
    """
    first, _, last = text.partition(":")
    if not (first.isdecimal() and (last or first).isdecimal()):
        raise argparse.ArgumentTypeError(f"must be BYTES or FROM:TO, not {text!r}")
    smallest, largest = int(first), int(last or first)
    if not 1 <= smallest <= largest <= LARGEST_VALUE:
        raise argparse.ArgumentTypeError(
            f"must be from 1 to {LARGEST_VALUE} bytes, rising, not {text!r}"
        )
    return smallest, largest


def add_mix_options(line: argparse._ActionsContainer) -> None:
    """
    Add the options that say what is asked for.

    :param line: a command line
    """
    add, default = line.add_argument, DEFAULT
    add("--update", type=number(0.0), default=default.update, help="share of SETs (%(default)g)")
    add(
        "--value-size",
        type=value_sizes,
        default=(default.smallest, default.largest),
        help=f"BYTES or FROM:TO ({default.smallest})",
    )
    keys = whole_number(1, MOST_KEYS)
    add("--keys", type=keys, default=default.keys, help="how many there are (%(default)s)")
    add("--zipf", type=number(0.0), default=default.zipf, help="skew of the keys (%(default)g)")
    several = whole_number(1, 1000)
    add("--multi-get", type=several, default=default.multi_get, help="keys of a GET (%(default)s)")


def mix_of(arguments: argparse.Namespace) -> Mix:
    """
    What a command line with `add_mix_options` asks for.

    :param arguments: what it read
    :raises InputError: if that makes no sense
    """
    smallest, largest = arguments.value_size
    return Mix(
        update=arguments.update,
        smallest=smallest,
        largest=largest,
        keys=arguments.keys,
        zipf=arguments.zipf,
        multi_get=arguments.multi_get,
    )
