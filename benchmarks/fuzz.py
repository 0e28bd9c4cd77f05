"""
Files that nobody of ours wrote: each reader takes them or refuses them in one line.

    python -m benchmarks.fuzz [--inputs N] [--seed S] [--reader NAME]

Valid files are cut, spliced, repeated and edited, by bytes and by their values, and read. An
exception but `InputError`, a message of more than one line, more than 2 s of CPU time or 200 MiB
for an input is a failure, of which the first of each reader is shown. The table says how many
were read and how many refused. Every vCPU reads a share; what is read depends on the seed only.
"""

from __future__ import annotations

import argparse
import copy
import functools
import io
import json
import os
import pickle
import random
import re
import sys
import tempfile
import time
import traceback
import tracemalloc
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from agents.checkpoint import METADATA_ENTRY
from benchmarks.fuzz_readers import FileReader, archive_of, readers
from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, whole_number
from training.processes import process_pool

INPUTS = 100_000
LONGEST_S, MOST_MIB = 2.0, 200.0
MEASURED_EVERY = 50
"""How often an input's memory is counted, too, which slows its reading by a factor."""

SHARE = 5000
"""Inputs that one process reads in a row."""

MEMORY = Path("/dev/shm")
"""Some disks take longer to hold an input than its reader to read it."""

WORDS = (
    *("nan", "-nan", "inf", "-inf", "1e999", "-1", "0", "1e308", "0x" + "f" * 9000, "9" * 5000),
    *("9" * 400, "1;2;3", "0001-01-01T00:00:00", "²", "1..2"),
    *("null", "true", "~", "", " ", "\t", "\n", "\r\n", ",", ";", ":", "[", "]", "{", "}", '"'),
    *(
        "&a",
        "*a",
        "!!python/object:os.system",
        "<<",
        "%",
        "#",
        "---",
        "- ",
        "? ",
        "\x00",
        "\x1b[2J",
    ),
    *("9999-12-31T23:59:59", "0001-01-01T00:00:00+14:00", "ä", "\U0001f600", "\u2028", "\ud7ff"),
    *("[" * 500, "{a: " * 500, "x" * 20_000, "read", "#type", "Timestamp start:"),
)
"""What is written into texts."""

A_WORD = re.compile(rb"(?<![^\s,;:])[^\s,;:]+")
"""A cell of a table, a value of a line."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, 10**400, 0.0, -0.5, 1e-320, 1e308),
    *("", "x", "\x1b[2J", "x" * 5000, "nan", [], [[]], [None], {}, {"": 0}, [0] * 500),
)
"""What is put in place of values."""


def mutated(reader: FileReader, rng: random.Random) -> bytes:
    """
    A file that is nearly valid, or not at all.

    :param reader: reads the file
    :param rng: random numbers
    """
    content = rng.choice(reader.seeds)
    suffix = Path(reader.file).suffix
    if suffix == ".zip":
        return _mutated_archive(content, rng)
    if suffix in (".yaml", ".json") and rng.random() < 0.6:
        value = _parsed(content, suffix)
        for _ in range(rng.randint(1, 3)):
            value = _edited(value, rng)
        if suffix == ".json":
            return json.dumps(value).encode(errors="replace")
        return yaml.dump(value, Dumper=FASTEST_DUMPER).encode(errors="replace")
    return _spliced(content, rng)


FASTEST_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def _parsed(content: bytes, suffix: str) -> Any:
    """What a valid file says, to be edited at will."""
    return pickle.loads(_pickled(content, suffix))


@functools.cache
def _pickled(content: bytes, suffix: str) -> bytes:
    """Parsed once: YAML takes a hundred times longer to parse than to be copied."""
    return pickle.dumps(yaml.safe_load(content) if suffix == ".yaml" else json.loads(content))


def _edited(value: Any, rng: random.Random) -> Any:
    """The same with one value somewhere replaced, removed, added or moved."""
    place: Any = value
    parent: Any = None
    key: Any = None
    while isinstance(place, dict | list) and place and (parent is None or rng.random() < 0.8):
        parent = place
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        place = place[key]
    if parent is None:
        return rng.choice(VALUES)
    action = rng.random()
    if action < 0.15:
        del parent[key]
    elif action < 0.3 and isinstance(parent, dict):
        parent[rng.choice(("x", "\x1b[2J", "", key * 2 if isinstance(key, str) else "y"))] = place
    elif action < 0.5 and isinstance(place, int | float) and abs(place) < 1e100:
        parent[key] = place * rng.choice((-1, 0, 1e-12, 2, 1e6, 1e12))
    else:
        parent[key] = copy.deepcopy(rng.choice(VALUES))
    return value


def _spliced(content: bytes, rng: random.Random) -> bytes:
    """A copy with some bytes changed, lost or repeated, or words in place of others."""
    for _ in range(rng.randint(1, 4)):
        word = rng.choice(WORDS).encode(errors="replace")
        if found := rng.random() < 0.3 and A_WORD.search(content, rng.randint(0, len(content))):
            (first, last), middle = found.span(), word
        else:
            first, last = sorted(rng.randint(0, len(content)) for _ in range(2))
            last = min(last, first + rng.choice((1, 8, 64, 100_000)))
            repeated = content[first:last] * rng.randint(2, 4)
            random_bytes = rng.randbytes(rng.choice((1, 4, 64)))
            middle = rng.choice((b"", repeated, word, random_bytes, content[:200]))
        content = (content[:first] + middle + content[last:])[:300_000]
    return content


def _mutated_archive(content: bytes, rng: random.Random) -> bytes:
    """A zip file with one entry mutated, or with its own bytes mutated."""
    if rng.random() < 0.3:
        return _spliced(content, rng)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(list(entries))
    if name == METADATA_ENTRY and rng.random() < 0.7:
        entries[name] = json.dumps(_edited(json.loads(entries[name]), rng)).encode()
    else:
        entries[name] = _spliced(entries[name], rng)
    return archive_of(entries)


def fault_of(reader: FileReader, folder: Path, content: bytes, measured: bool) -> tuple[bool, str]:
    """
    Read one input.

    :param reader: reads the file
    :param folder: of the input, with what lies beside it
    :param content: of the file
    :param measured: whether to count the memory it takes
    :return: whether it was taken, and what went wrong: nothing, if all is well
    """
    (folder / reader.file).write_bytes(content)
    taken, fault = True, ""
    if measured:
        tracemalloc.start()
    began_s = time.process_time()
    try:
        reader.read(folder)
    except InputError as error:
        taken = False
        if len(str(error).splitlines()) != 1:
            fault = f"a message of several lines: {str(error)!r}"
    except Exception:
        fault = traceback.format_exc()
    took_s = time.process_time() - began_s  # others may keep the vCPUs busy
    if measured:
        most_mib = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        if most_mib > MOST_MIB:
            fault = fault or f"{most_mib:.0f} MiB"
    elif took_s > LONGEST_S:
        fault = fault or f"{took_s:.1f} s"
    return taken, fault


@dataclass
class Count:
    """How a reader has done: its inputs, those it took, its failures and the first's file."""

    inputs: int = 0
    taken: int = 0
    failures: int = 0
    first: str = ""
    took_s: float = 0.0

    def add(self, other: Count) -> None:
        """
        Count another share, too.

        :param other: of the same reader
        """
        self.inputs += other.inputs
        self.taken += other.taken
        self.failures += other.failures
        self.first = self.first or other.first
        self.took_s += other.took_s


def fuzz(reader: FileReader, inputs: int, seed: int, share: int = 0) -> Count:
    """
    Give a reader bad files.

    :param reader: reads them
    :param inputs: how many files
    :param seed: of what is drawn; the same for the same files
    :param share: which share of a reader's files it is; each has files of its own
    """
    rng, tally = random.Random(f"{reader.name} {seed} {share}"), Count()
    began_s = time.process_time()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        folder = Path(name)
        for beside, content in reader.beside.items():
            (folder / beside).write_bytes(content)
        for number in range(inputs):
            content = mutated(reader, rng)
            taken, fault = fault_of(reader, folder, content, number % MEASURED_EVERY == 0)
            tally.inputs += 1
            tally.taken += taken and not fault
            if fault:
                tally.failures += 1
                tally.first = tally.first or f"{content[:300]!r}\n{fault}"
    tally.took_s = time.process_time() - began_s
    return tally


def _fuzz_by_name(name: str, inputs: int, seed: int, share: int) -> Count:
    """`fuzz` in another process, where readers go by their names."""
    return fuzz(next(one for one in readers() if one.name == name), inputs, seed, share)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = OneLineParser(prog="python -m benchmarks.fuzz", description=__doc__.splitlines()[1])
    add = line.add_argument
    add("--inputs", type=whole_number(1), default=INPUTS, help="of each reader (%(default)s)")
    add("--seed", type=whole_number(0), default=0, help="of what is drawn (%(default)s)")
    add("--reader", help="only the one of this name")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Fuzz from the command line; the exit code is 1 if a reader has failed.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    table = Table("reader", "inputs", "taken", "refused", "failed", "CPU s")
    failures = 0
    with exit_on_bad_input():
        known = [reader.name for reader in readers()]
        if arguments.reader not in (None, *known):
            raise InputError(f"--reader {arguments.reader}: known are {', '.join(known)}")
        sizes = [
            min(SHARE, arguments.inputs - first) for first in range(0, arguments.inputs, SHARE)
        ]
        with process_pool(len(os.sched_getaffinity(0))) as pool:
            under_way = {
                name: [
                    pool.submit(_fuzz_by_name, name, size, arguments.seed, share)
                    for share, size in enumerate(sizes)
                ]
                for name in ([arguments.reader] if arguments.reader else known)
            }
            for name, shares in under_way.items():
                tally = Count()
                for share in shares:
                    tally.add(share.result())
                failures += tally.failures
                refused = tally.inputs - tally.taken - tally.failures
                figures = (tally.inputs, tally.taken, refused, tally.failures)
                table.add_row(name, *map(str, figures), f"{tally.took_s:.0f}")
                if tally.first:
                    print(f"{name}: {tally.first}", file=sys.stderr)
    Console().print(table)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
