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
import sys
import tempfile
import time
import traceback
import tracemalloc
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from agents.checkpoint import METADATA_ENTRY, WEIGHTS_ENTRY, read_checkpoint
from agents.registry import PARAMETER_FOLDER, make
from deploy.linux.service_process import Program
from deploy.records import live_view, mcperf, run_report
from deploy.records.recorder import (
    EVENTS_FILE,
    LOAD_FILE,
    REPORT_FILE,
    SAMPLES_FILE,
    SCENARIO_FILE,
    Recorder,
    read_events,
    read_samples,
    started_at_s,
)
from deploy.records.state import STATE_FILE, JobRecord, ServiceRecord, State, read_state
from env.allocation import Allocation, JobAllocation
from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, whole_number
from env.inputs.text_files import read_text
from env.scenario import (
    PROFILE_FOLDER,
    SCENARIO_FOLDER,
    Scenario,
    load_scenario,
    scenario_names,
)
from env.simulator.profile import load_profile
from env.telemetry import JobTelemetry, ServiceTelemetry, Telemetry
from training.processes import process_pool
from training.recipe import RECIPE_FOLDER, load_recipe

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

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, 10**400, 0.0, -0.5, 1e-320, 1e308),
    *("", "x", "\x1b[2J", "x" * 5000, "nan", [], [[]], [None], {}, {"": 0}, [0] * 500),
)
"""What is put in place of values."""


@dataclass(frozen=True)
class FileReader:
    """
    Reads one kind of file.

    :param name: what the table calls it
    :param file: the file's name in a folder that holds nothing else of a run, but for `beside`
    :param seeds: valid contents
    :param read: reads the folder's file and does with it what commands do
    :param beside: further files of the folder
    """

    name: str
    file: str
    seeds: Sequence[bytes]
    read: Callable[[Path], object]
    beside: dict[str, bytes]


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
    """A copy with some bytes changed, lost, repeated or written over by words."""
    for _ in range(rng.randint(1, 4)):
        first, last = sorted(rng.randint(0, len(content)) for _ in range(2))
        last = min(last, first + rng.choice((1, 8, 64, 100_000)))
        middle = rng.choice(
            (
                b"",
                content[first:last] * rng.randint(2, 4),
                rng.choice(WORDS).encode(errors="replace"),
                rng.randbytes(rng.choice((1, 4, 64))),
                content[:200],
            )
        )
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
    return _archive(entries)


def _archive(entries: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file.getvalue()


@functools.cache
def readers() -> tuple[FileReader, ...]:
    """Every reader of files that may come from others; their seeds are small, as reading takes."""
    scenario = load_scenario("cca-2025")
    two_jobs = scenario.model_copy(update={"jobs": scenario.jobs[:2]})
    run = _run_files(two_jobs)
    problem = {SCENARIO_FILE: run[SCENARIO_FILE]}
    state = State("0" * 12, "cca-2025", "docker", "unix:///x", 1.0)
    state.service = ServiceRecord(1, 1, {1: (0, 1)}, Program((0, 0, 0, 0), "/usr/bin/memcached"))
    state.jobs = {name: JobRecord(attempts=1, opened=True, key="k") for name in scenario.job_names}
    kinds: list[tuple[str, str, Sequence[bytes], Callable[[Path], object], dict[str, bytes]]] = [
        ("scenario", "mine.yaml", _scenarios(), _of("mine.yaml", load_scenario), {}),
        ("profile", "mine.yaml", _profiles(), _of("mine.yaml", load_profile), {}),
        ("recipe", "mine.yaml", _contents(RECIPE_FOLDER), _of("mine.yaml", load_recipe), {}),
        ("rule", "mine.yaml", _contents(PARAMETER_FOLDER), partial(_rule, scenario), {}),
        ("checkpoint", "mine.zip", [_checkpoint()], _of("mine.zip", read_checkpoint), {}),
        ("state", STATE_FILE, [json.dumps(asdict(state)).encode()], read_state, {}),
        ("mcperf", LOAD_FILE, [run[LOAD_FILE]], _load, {EVENTS_FILE: run[EVENTS_FILE]}),
        ("event log", EVENTS_FILE, [run[EVENTS_FILE]], _events, run),
        ("samples", SAMPLES_FILE, [run[SAMPLES_FILE]], _view, run),
        ("report.json", REPORT_FILE, [run[REPORT_FILE]], partial(_page, two_jobs), run),
        ("scenario.json", SCENARIO_FILE, list(problem.values()), _view, run),
    ]
    return tuple(FileReader(*kind) for kind in kinds)


def _of(name: str, read: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: read(folder / name)


def _contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.yaml"))]


def _scenarios() -> list[bytes]:
    return [(SCENARIO_FOLDER / f"{name}.yaml").read_bytes() for name in scenario_names()]


def _profiles() -> list[bytes]:
    """The shipped ones, with their first two entries of each list, job, VM and error of the fit."""
    profiles = []
    for content in _contents(PROFILE_FOLDER):
        profile = yaml.safe_load(content)
        profile.pop("hash", None)  # with it, whatever is changed would be refused for that alone
        for name in ("sources", "fit_error", "excluded", "jobs", "vms"):
            few = list(profile.get(name, ()))[:2]
            if name in profile:
                named = isinstance(profile[name], dict)
                profile[name] = {key: profile[name][key] for key in few} if named else few
        profiles.append(yaml.safe_dump(profile, sort_keys=False).encode())
    return profiles


def _checkpoint() -> bytes:
    """A small one of the shipped one's form."""
    metadata = read_checkpoint("best.zip").metadata
    n_features, n_actions = metadata["features"], len(metadata["actions"])
    arrays = io.BytesIO()
    np.savez(
        arrays,
        weight_0=np.zeros((4, n_features), np.float32),
        bias_0=np.zeros(4, np.float32),
        weight_1=np.zeros((n_actions, 4), np.float32),
        bias_1=np.zeros(n_actions, np.float32),
    )
    return _archive(
        {METADATA_ENTRY: json.dumps(metadata).encode(), WEIGHTS_ENTRY: arrays.getvalue()}
    )


def _run_files(scenario: Scenario) -> dict[str, bytes]:
    """The files of a small run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorder = Recorder(folder, scenario, time.monotonic())
        jobs = {job: JobAllocation() for job in scenario.job_names}
        allocation = Allocation((0, 1), jobs)
        cores = (0.1,) * scenario.machine.vcpus
        for time_s in (0.1, 1.1, 2.1):
            service = ServiceTelemetry(3e4, 0.2, 0.01, qps=9e4, cpu_cores=0.75, p95_us=800.0)
            done = {job: JobTelemetry(placed.state, 1.0) for job, placed in jobs.items()}
            recorder.sample(Telemetry(time_s, service, cores, done, allocation), allocation)
        recorder.event("start", scenario.job_names[0], (2, 3), 2)
        recorder.event("custom", scenario.job_names[0], detail="attempt 1 failed: why")
        recorder.event("end", scenario.job_names[0])
        recorder.close()
        start_s = started_at_s(folder)
        rows = [
            mcperf.format_row([1e2, 2e2], 9e3, 9e3, start_s + i, start_s + i + 1, 0.0)
            for i in range(3)
        ]
        stamps = ["Timestamp start: 1700000000000", "Timestamp end: 1700000009000"]
        (folder / LOAD_FILE).write_text("\n".join([mcperf.HEADER, *rows, *stamps, ""]))
        jobs_done = {scenario.job_names[0]: run_report.JobOutcome(0, 0.1, 0.1, 0.1, 2.0, 0.0, 0)}
        cost = run_report.LoopCost(25.0, 0, 1.0, 50.0)
        outcome = run_report.Outcome("static", 3.0, jobs_done, 5, 0, cost, True)
        intervals = run_report.load_intervals(folder)
        run_report.write(folder, scenario, outcome, intervals, illustrated=False)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def _rule(scenario: Scenario, folder: Path) -> None:
    make(folder / "mine.yaml").reset(scenario)


def _load(folder: Path) -> None:
    mcperf.read_rows(
        read_text(folder / LOAD_FILE, "a load's output", 1 << 20, "", "replace").splitlines()
    )


def _events(folder: Path) -> None:
    read_events(folder)
    started_at_s(folder)


def _view(folder: Path) -> None:
    reader = live_view.Reader(folder)
    reader.update()
    with (folder / "shown").open("w") as out:
        Console(file=out, width=100).print(live_view.draw(reader.picture))
    read_samples(folder)


def _page(scenario: Scenario, folder: Path) -> None:
    run_report.write_page(folder, scenario, run_report.read_report(folder), "")


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
