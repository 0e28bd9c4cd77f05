"""
What a run writes down as it happens: an event log and samples of the telemetry.

`events.log` has the format of the course's scheduler_logger, one event a line:
`timestamp event job [cores] threads`. `samples.csv` has one row of readings each time `sample` is
called. Every line is handed to the kernel at once, so a crash of the loop loses nothing. When the
disk refuses a line, it is kept in memory and written once there is room: the loop goes on.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import quote_plus, unquote_plus

from env.allocation import Allocation
from env.errors import InputError
from env.scenario import Scenario
from env.telemetry import Telemetry

EVENTS_FILE, SAMPLES_FILE = "events.log", "samples.csv"

SCHEDULER, MEMCACHED = "scheduler", "memcached"
"""What the course's logs call the loop itself and the service."""

EVENTS = ("start", "end", "update_cores", "pause", "unpause", "custom")

RECENT = 50
"""How many events are kept for the live view."""

KEPT_LINES = 20_000
"""How many lines wait in memory while the disk is full; at 200 bytes a line, 4 MB."""


@dataclass(frozen=True)
class Event:
    """
    One thing that happened.

    :param time_s: seconds since the run started
    :param what: one of `EVENTS`
    :param job: a job's name, `MEMCACHED` or `SCHEDULER`
    :param cores: its vCPUs from now on, for `start` and `update_cores`
    :param threads: its thread count, for `start`
    :param detail: what a `custom` event says
    """

    time_s: float
    what: str
    job: str
    cores: tuple[int, ...] = ()
    threads: int = 0
    detail: str = ""

    def arguments(self) -> str:
        """What follows the job's name in a line of the log."""
        cores = f"[{','.join(map(str, self.cores))}]"
        if self.what == "start" and self.job != SCHEDULER:
            return f"{cores} {self.threads}"
        if self.what == "update_cores":
            return cores
        return quote_plus(self.detail) if self.what == "custom" else ""


class Recorder:
    """
    Writes events and samples of one run; a run that is resumed goes on in the same files.

    :param folder: where the files go; made if it does not exist
    :param scenario: names the columns of the samples
    :param started_s: when the run started, on the monotonic clock
    :param listener: is told every event, after it was written
    :raises InputError: if the folder cannot be written to
    """

    def __init__(
        self,
        folder: Path,
        scenario: Scenario,
        started_s: float,
        listener: Callable[[Event], None] | None = None,
    ):
        self.started_s = started_s
        self.recent: deque[Event] = deque(maxlen=RECENT)
        self._listener = listener
        # Wall-clock time of the start. Only the monotonic clock counts from here on, so that
        # the log stays in order when somebody sets the clock.
        self._epoch_s = time.time() - (time.monotonic() - started_s)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._events = _Lines(folder / EVENTS_FILE)
            self._samples = _Lines(folder / SAMPLES_FILE)
        except OSError as error:
            raise InputError(f"{folder}: cannot be written to: {error.strerror}") from error
        if self._samples.empty:
            self._samples.append(",".join(_columns(scenario)))

    def event(
        self,
        what: str,
        job: str,
        cores: tuple[int, ...] = (),
        threads: int = 0,
        detail: str = "",
    ) -> None:
        """
        Write down what just happened.

        The course's format has room for a detail in `custom` events only; that of any other
        event follows as a `custom` line of its own.

        :param what: one of `EVENTS`
        :param job: a job's name, `MEMCACHED` or `SCHEDULER`
        :param cores: its vCPUs, for `start` and `update_cores`
        :param threads: its thread count, for `start`
        :param detail: anything more, in words
        """
        event = Event(time.monotonic() - self.started_s, what, job, cores, threads, detail)
        self._write(event)
        if detail and what != "custom":
            self._write(Event(event.time_s, "custom", job, detail=detail))
        self.recent.append(event)
        if self._listener is not None:
            self._listener(event)

    def sample(self, telemetry: Telemetry, allocation: Allocation) -> None:
        """
        Write down the readings of a moment.

        :param telemetry: the readings
        :param allocation: who holds what from now on
        """
        service = telemetry.service
        row = [
            f"{telemetry.time_s:.4f}",
            f"{service.qps:.0f}",
            f"{service.cpu_cores:.4f}",
            f"{service.run_delay_s:.6f}",
            "" if service.p95_us is None else f"{service.p95_us:.1f}",
            _listed(allocation.service_cores),
            *(f"{busy_s:.4f}" for busy_s in telemetry.vcpu_busy_s),
        ]
        for name, job in telemetry.jobs.items():
            placed = allocation.jobs[name]
            row += [job.state.name.lower(), f"{job.cpu_s:.4f}", _listed(placed.cores)]
            quota = "" if placed.quota is None else f"{placed.quota:.3f}"
            row += [placed.weight.name.lower(), str(placed.threads), quota]
        self._samples.append(",".join(row))

    def close(self) -> None:
        """Write what still waits, if there is room, and close the files."""
        self._events.close()
        self._samples.close()

    def _write(self, event: Event) -> None:
        stamp = datetime.fromtimestamp(self._epoch_s + event.time_s)
        words = (stamp.isoformat(timespec="microseconds"), event.what, event.job)
        self._events.append(" ".join((*words, event.arguments())).rstrip())


def read_events(folder: Path) -> list[Event]:
    """
    The events of a recorded run, in order; `time_s` counts from the first one.

    :param folder: what the recorder wrote to; a line that a crash cut short is left out
    """
    text = (folder / EVENTS_FILE).read_text(encoding="utf-8")
    return list(_parsed(text.splitlines()))


def _parsed(lines: list[str]) -> Iterator[Event]:
    origin: datetime | None = None
    for line in lines:
        try:
            stamp, what, job, *rest = line.split(" ")
            moment = datetime.fromisoformat(stamp)
            cores = threads = ""
            if what in ("start", "update_cores") and rest:
                cores, threads = rest[0].strip("[]"), "".join(rest[1:])
            origin = origin or moment
            yield Event(
                (moment - origin).total_seconds(),
                what,
                job,
                tuple(int(core) for core in cores.split(",") if core),
                int(threads or 0),
                unquote_plus("".join(rest)) if what == "custom" else "",
            )
        except ValueError:
            continue


def _columns(scenario: Scenario) -> Iterator[str]:
    yield from ("time_s", "qps", "cpu_cores", "run_delay_s", "p95_us", "service_cores")
    yield from (f"busy_s_{vcpu}" for vcpu in range(scenario.machine.vcpus))
    for name in scenario.job_names:
        for field in ("state", "cpu_s", "cores", "weight", "threads", "quota"):
            yield f"{name}_{field}"


def _listed(cores: tuple[int, ...]) -> str:
    return ";".join(map(str, cores))


class _Lines:
    """
    Appends lines to a file, each with a write of its own.

    What the disk refuses waits for the next line; what does not fit into memory is counted.
    """

    def __init__(self, path: Path):
        self._path = path
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._refused = False
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        self.empty = size == 0
        # A killed writer may have left half a line.
        if size > 0 and os.pread(self._file, 1, size - 1) != b"\n":
            self._waiting.append(b"\n")

    def append(self, line: str) -> None:
        """Write a line, or keep it."""
        if len(self._waiting) < KEPT_LINES:
            self._waiting.append(line.encode() + b"\n")
        else:
            self._lost += 1
        try:
            while self._waiting:
                text = self._waiting[0]
                written = os.write(self._file, text)
                if written == len(text):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = text[written:]
        except OSError as error:
            self._refuse(error)

    def close(self) -> None:
        """Close the file, and say what it does not hold."""
        lost = self._lost + len(self._waiting)
        if lost:
            print(f"coretide: {self._path}: {lost} lines could not be written", file=sys.stderr)
        os.close(self._file)

    def _refuse(self, error: OSError) -> None:
        if not self._refused:
            self._refused = True
            print(
                f"coretide: {self._path}: {error.strerror}; lines wait in memory until there is "
                "room",
                file=sys.stderr,
            )
