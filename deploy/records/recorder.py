"""
What a run writes down as it happens: an event log and samples of the telemetry.

`events.log` has the format of the course's scheduler_logger, one event a line:
`timestamp event job [cores] threads`. `samples.csv` has one row of readings each time `sample` is
called; `scenario.json` says what the problem was. Every line is handed to the kernel at once, so
a crash of the loop loses nothing. When the disk refuses a line, it is kept in memory and written
once there is room: the loop goes on.
"""

import contextlib
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import quote_plus, unquote_plus

from deploy.linux.own_folder import OwnFolder, write_own
from deploy.linux.sensors import StolenClock, Yardstick
from deploy.records.lines import Disk, LineFile
from env.allocation import Allocation, JobState
from env.errors import InputError
from env.inputs.text_files import MOST_RECORD_BYTES, each_line, open_regular
from env.scenario import Scenario, load_scenario
from env.telemetry import Stages, Telemetry

EVENTS_FILE, SAMPLES_FILE, SCENARIO_FILE = "events.log", "samples.csv", "scenario.json"
REPORT_FILE, INTERVALS_FILE, PAGE_FILE = "report.json", "intervals.csv", "report.html"
PICTURE_FILE = "run.png"

POLICY_FILE, PREDICTION_FILE = "policy.json", "prediction.json"
"""Who decided, and what the scenario's profile makes of the run."""

CLIENT_FILE = "client.json"
"""What mcperf has measured of the run, where its output was joined."""

PROBE_FILE = "probe.txt"
"""What the probe has measured in windows of `PROBE_LOG_S`, in mcperf's format, where it runs."""

PROBE_LOG_S = 0.5
"""Short enough that windows can be joined to intervals that begin at any moment."""

RUN_FILES = (
    *(EVENTS_FILE, SAMPLES_FILE, PROBE_FILE, SCENARIO_FILE, POLICY_FILE),
    *(REPORT_FILE, INTERVALS_FILE, PAGE_FILE, PICTURE_FILE, CLIENT_FILE, PREDICTION_FILE),
    "events.out.tfevents.*",  # TensorBoard's names
)
"""Patterns of what a run and its report leave; whatever else the folder holds is not theirs."""

LOAD_FILE = "load.txt"
"""The load generator's output, in mcperf's format, where there is one."""

SCHEDULER, MEMCACHED = "scheduler", "memcached"
"""What the course's logs call the loop itself and the service."""

JOB_PREFIX = "job_"
"""Begins the columns of a job, which may be called like one of memcached's: cpu."""

MEMBER_WAIT = re.compile(r"member_\d+_wait_us")
"""A column that there is for each member of a group, beside `member_N_service_us`."""

CPU_SETSIZE = 1024
"""vCPUs that a set of the C library's holds: none in a record has a higher number."""

FAILED_ATTEMPT = re.compile(r"attempt \d+ failed: ")
"""Begins what `failed_attempt` says. The course's log has no event of its own for it."""

GUARD_STEP = re.compile(r"guard (?:up|down) to level ([0-4])")
"""Begins what the scheduler says when the SLO guard has climbed or come down (`env.guard`)."""

RESUMED = "resumed"
"""What the scheduler says when a run goes on; its guard begins anew, at level 0."""

RECENT = 50
"""How many events are kept for the live view."""


def scenario_of(folder: Path) -> Scenario:
    """
    The problem that a run was about.

    :param folder: the run's report folder
    :raises InputError: if it is none
    """
    path = folder / SCENARIO_FILE
    if not path.is_file():
        raise InputError(f"{folder}: no run's report folder (it has no {SCENARIO_FILE})")
    return load_scenario(path, jobless=True)


@dataclass(frozen=True, slots=True)
class Event:
    """
    One thing that happened.

    :param time_s: since the run started [s]
    :param what: `start`, `end`, `update_cores`, `pause`, `unpause` or `custom`
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

    @property
    def fails(self) -> bool:
        """Whether it says that an attempt has failed: the job waits to be started again."""
        return self.what == "custom" and FAILED_ATTEMPT.match(self.detail) is not None

    @property
    def guard_level(self) -> int | None:
        """The level that the SLO guard is at from now on; None where nothing is said of it."""
        if self.what != "custom" or self.job != SCHEDULER:
            return None
        step = GUARD_STEP.match(self.detail)
        return int(step[1]) if step else 0 if self.detail == RESUMED else None

    def arguments(self) -> str:
        """What follows the job's name in a line of the log."""
        cores = f"[{','.join(map(str, self.cores))}]"
        if self.what == "start" and self.job != SCHEDULER:
            return f"{cores} {self.threads}"
        if self.what == "update_cores":
            return cores
        return quote_plus(self.detail, errors="replace") if self.what == "custom" else ""


def failed_attempt(number: int, why: str) -> str:
    """
    What the `custom` event of a failed attempt says, after which the job runs no more for now.

    :param number: which of the job's attempts
    :param why: it failed
    """
    return f"attempt {number} failed: {why}"


class Recorder:
    """
    Writes events and samples of one run; a run that is resumed goes on in the same files.

    The scheduler's own `start` and `end` are written with the first and the last line.

    :param folder: folder of the files; made if it does not exist
    :param scenario: names the columns of the samples
    :param started_s: when the run started, on the monotonic clock [s]
    :param listener: is told every event, after it was written
    :raises InputError: if the folder cannot be written to, or is not ours
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
        self.disk = Disk(str(folder))
        self._listener = listener
        self._job_names = scenario.job_names  # those of a queue are in the events alone
        self._members = scenario.service.told_apart
        try:
            self._events = LineFile.at(folder / EVENTS_FILE, self.disk)
            self._samples = LineFile.at(folder / SAMPLES_FILE, self.disk)
            self._stolen = StolenClock(scenario.machine.vcpus)
            self._yardstick = Yardstick(range(scenario.machine.vcpus))
            resumed = self._events.size > 0
            if not resumed:
                write_own(folder / SCENARIO_FILE, scenario.model_dump_json(indent=2))
        except OSError as error:
            raise InputError(f"{folder}: cannot be written to: {error.strerror}") from error
        # Wall-clock time of the start. Only the monotonic clock counts from here on, so that
        # the log stays in order when somebody sets the clock, be it before a run is resumed.
        self._epoch_s = time.time() - (time.monotonic() - started_s)
        if resumed:
            with contextlib.suppress(ValueError):  # its first line may not be whole
                self._epoch_s = started_at_s(folder)
        if self._samples.size == 0:
            self._samples.append(",".join(_columns(scenario)))
        if resumed:
            self.event("custom", SCHEDULER, detail=RESUMED)
        else:
            self._write(Event(0.0, "start", SCHEDULER))

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

        :param what: see `Event`
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
            f"{service.requests:.0f}",
            f"{service.qps:.0f}",
            f"{service.cpu_cores:.4f}",
            f"{service.run_delay_s:.6f}",
            *(
                "" if part_us is None else f"{part_us:.1f}"
                for part_us in (service.p95_us, service.wait_us, service.service_us)
            ),
            *(
                "" if part_us is None else f"{part_us:.1f}"
                for stages in service.members or (None,) * self._members
                for part_us in stages or (None, None)
            ),
            _listed(allocation.service_cores),
            f"{sum(self._stolen.read()):.2f}",
            f"{self._yardstick.read():.1f}",
            *(f"{busy_s:.4f}" for busy_s in telemetry.vcpu_busy_s),
        ]
        for name in self._job_names:
            job = telemetry.jobs[name]
            placed = allocation.jobs[name]
            state = job.state if job.state == JobState.DONE else placed.state
            row += [state.name.lower(), f"{job.cpu_s:.4f}", _listed(placed.cores)]
            quota = "" if placed.quota is None else f"{placed.quota:.3f}"
            row += [placed.weight.name.lower(), str(placed.threads), quota]
        self._samples.append(",".join(row))

    def close(self) -> None:
        """Write down the end, and close the files."""
        self.event("end", SCHEDULER)
        self._events.close()
        self._samples.close()
        self._stolen.close()
        self.disk.close()

    def _write(self, event: Event) -> None:
        stamp = datetime.fromtimestamp(self._epoch_s + event.time_s)
        words = (stamp.isoformat(timespec="microseconds"), event.what, event.job)
        self._events.append(" ".join((*words, event.arguments())).rstrip())


def set_aside(folder: Path) -> None:
    """
    Make room for a new run: what an earlier one has left goes to a folder named after its start.

    A load that was written since belongs to the new run, and stays, as does what is not ours.

    :param folder: of the records; nothing happens if it holds none
    :raises InputError: if it cannot be written to, or is not ours
    """
    if not (folder / EVENTS_FILE).exists():
        return
    try:
        with OwnFolder(folder) as own:
            with os.fdopen(own.open(EVENTS_FILE, os.O_RDONLY), "rb") as log:
                start, ended_s = log.readline(64), os.fstat(log.fileno()).st_mtime
            load = own.own_file(LOAD_FILE)
            files = [name for name in own.names() if _is_of_run(name) and own.own_file(name)]
            if load is not None and load.st_mtime <= ended_s:
                files.append(LOAD_FILE)
            with own.subfolder(_in_words(start.decode(errors="replace"))) as earlier:
                for name in files:
                    own.move(name, earlier)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written to: {error.strerror}") from error


def _is_of_run(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in RUN_FILES)


def _in_words(start: str) -> str:
    try:
        return datetime.fromtimestamp(_moment_s(start)).strftime("%Y-%m-%dT%H-%M-%S")
    except (ValueError, OverflowError):  # not even its first line is whole
        return "earlier"


def read_events(folder: Path) -> list[Event]:
    """
    The events of a recorded run, in order.

    :param folder: what the recorder wrote to
    """
    return list(parse_events(each_line(folder / EVENTS_FILE, "a run's log", MOST_RECORD_BYTES)))


def started_at_s(folder: Path) -> float:
    """
    When a recorded run started [s of the epoch].

    :param folder: what the recorder wrote to
    :raises InputError: if its first line does not say so
    """
    path = folder / EVENTS_FILE
    with open_regular(path, "a run's log") as log:
        first = log.readline(64)  # of a log that may be of any size: the run goes on
    try:
        return _moment_s(first.decode())
    except (ValueError, OverflowError) as error:
        raise InputError(f"{path}: its first line does not say when the run started") from error


def _moment_s(line: str) -> float:
    """When a line of the log was written [s of the epoch]; :raises ValueError: if it is cut."""
    return datetime.fromisoformat(line.split(" ")[0]).timestamp()


def parse_events(lines: Iterable[str]) -> Iterator[Event]:
    """
    Events from lines of the log; `time_s` counts from the first, the run's start.

    :param lines: what a crash cut short is left out
    """
    origin: datetime | None = None
    for line in lines:
        try:
            stamp, what, job, *rest = line.split(" ")
            moment = datetime.fromisoformat(stamp).replace(tzinfo=None)
            cores = threads = ""
            if what in ("start", "update_cores") and rest:
                cores, threads = rest[0].strip("[]"), "".join(rest[1:])
            origin = origin or moment
            yield Event(
                (moment - origin).total_seconds(),
                what,
                job,
                _cores(cores, ","),
                int(threads or 0),
                unquote_plus("".join(rest)) if what == "custom" else "",
            )
        except ValueError:
            continue


def guard_levels(events: Iterable[Event]) -> list[tuple[float, int]]:
    """
    When the SLO guard's level changed [s], and to which.

    :param events: the log; its guard begins at level 0
    """
    found = [(0.0, 0)]
    for event in events:
        level = event.guard_level
        if level is not None and level != found[-1][1]:
            found.append((event.time_s, level))
    return found


@dataclass(frozen=True)
class JobSample:
    """One job at a moment: state (in lower case), CPU seconds used, vCPUs, weight and quota."""

    state: str
    cpu_s: float
    cores: tuple[int, ...]
    weight: str
    quota: float | None


@dataclass(frozen=True)
class Sample:
    """
    A row of the samples.

    :param time_s: since the run started [s]
    :param requests: memcached's count of them so far
    :param qps: memcached's request rate in the last poll [requests/s]
    :param cpu_cores: memcached's CPU use [vCPUs]
    :param p95_us: probed 95th percentile of the latency [µs]; None without a probe
    :param service_cores: memcached's vCPUs
    :param stolen_s: time of the scenario's vCPUs that the hypervisor gave to others since boot [s]
    :param busy_s: busy time of each vCPU since the run started [s]
    :param jobs: the jobs by name
    :param wait_us: 95th percentile of what requests waited [µs]; None without the latency tap
    :param service_us: 95th percentile of what memcached took for them [µs]; likewise
    :param members: both by member of a group; None where that is not known
    :param yardstick_us: CPU time of a fixed piece of work (`Yardstick`) [µs]; None in old records
    """

    time_s: float
    requests: float
    qps: float
    cpu_cores: float
    p95_us: float | None
    service_cores: tuple[int, ...]
    stolen_s: float
    busy_s: tuple[float, ...]
    jobs: dict[str, JobSample]
    wait_us: float | None = None
    service_us: float | None = None
    members: tuple[Stages | None, ...] = ()
    yardstick_us: float | None = None


def read_samples(folder: Path) -> list[Sample]:
    """
    The samples of a recorded run, in order.

    :param folder: what the recorder wrote to
    """
    return list(each_sample(folder))


def each_sample(folder: Path) -> Iterator[Sample]:
    """
    The same one by one: a queue's run of a week has a million.

    :param folder: what the recorder wrote to
    """
    lines = each_line(folder / SAMPLES_FILE, "a run's samples", MOST_RECORD_BYTES)
    return parse_samples(filter(None, lines))


def parse_samples(lines: Iterable[str]) -> Iterator[Sample]:
    """
    Samples from lines of the file.

    :param lines: the heading first; what a crash cut short, or is no number, is left out
    """
    rows = (line.split(",") for line in lines)
    heading = next(rows, [])
    for row in rows:
        with contextlib.suppress(KeyError, ValueError):
            yield _sample(dict(zip(heading, row, strict=True)))


def _sample(row: dict[str, str]) -> Sample:
    jobs = {
        column.removeprefix(JOB_PREFIX).removesuffix("_state"): JobSample(
            state,
            _finite(row[f"{job}_cpu_s"]),
            _cores(row[f"{job}_cores"], ";"),
            row[f"{job}_weight"],
            _finite(row[f"{job}_quota"]) if row[f"{job}_quota"] else None,
        )
        for column, state in row.items()
        if column.startswith(JOB_PREFIX) and column.endswith("_state")
        for job in [column.removesuffix("_state")]
    }
    return Sample(
        time_s=_finite(row["time_s"]),
        requests=_finite(row["requests"]),
        qps=_finite(row["qps"]),
        cpu_cores=_finite(row["cpu_cores"]),
        p95_us=_measured(row["p95_us"]),
        service_cores=_cores(row["service_cores"], ";"),
        stolen_s=_finite(row["stolen_s"]),
        busy_s=tuple(_finite(value) for name, value in row.items() if name.startswith("busy_s_")),
        jobs=jobs,
        wait_us=_measured(row.get("wait_us", "")),
        service_us=_measured(row.get("service_us", "")),
        yardstick_us=_measured(row.get("yardstick_us", "")),
        members=tuple(
            Stages(_finite(wait_us), _finite(row[column.replace("wait", "service")]))
            if wait_us
            else None
            for column, wait_us in row.items()
            if MEMBER_WAIT.fullmatch(column)
        ),
    )


def _measured(word: str) -> float | None:
    return _finite(word) if word else None


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word} is no reading")
    return value


def _cores(text: str, separator: str) -> tuple[int, ...]:
    """Numbers of vCPUs; :raises ValueError: if one is none that Linux's affinities can hold."""
    found = tuple(int(core) for core in text.split(separator) if core)
    if not all(0 <= core < CPU_SETSIZE for core in found):
        raise ValueError(f"{text} are no vCPUs")
    return found


def _columns(scenario: Scenario) -> Iterator[str]:
    yield from ("time_s", "requests", "qps", "cpu_cores")
    yield from ("run_delay_s", "p95_us", "wait_us", "service_us")
    for number in range(1, scenario.service.told_apart + 1):
        yield from (f"member_{number}_wait_us", f"member_{number}_service_us")
    yield from ("service_cores", "stolen_s", "yardstick_us")
    yield from (f"busy_s_{vcpu}" for vcpu in range(scenario.machine.vcpus))
    for name in scenario.job_names:
        for field in ("state", "cpu_s", "cores", "weight", "threads", "quota"):
            yield f"{JOB_PREFIX}{name}_{field}"


def _listed(cores: tuple[int, ...]) -> str:
    return ";".join(map(str, cores))
