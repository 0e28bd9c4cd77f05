"""
A run in the terminal as it goes on: load, p95, who holds which vCPU, the jobs, what was decided.

    python -m deploy.view report

It reads the files that the loop writes, so it can be opened and closed at any time, from any
terminal, and costs the loop nothing. `deploy.py --view` opens one with the run.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deploy.records.mcperf import Row, read_rows
from deploy.records.recorder import (
    EVENTS_FILE,
    LOAD_FILE,
    SAMPLES_FILE,
    SCHEDULER,
    Event,
    Sample,
    parse_events,
    parse_samples,
    scenario_of,
)
from deploy.records.terminal import printable
from env.errors import exit_on_bad_input
from env.guard import LEVELS
from env.inputs.commandline import OneLineParser
from env.inputs.text_files import MOST_RECORD_BYTES, open_regular
from env.scenario import Scenario, profile_work_s
from env.telemetry import Stages

REFRESH_S = 0.5
SHOWN_EVENTS = 10
BAR_WIDTH, SPARK_WIDTH = 24, 40
HISTORY = 500
"""How many samples are kept: the busy share is taken over the last second of them."""

SPARKS = "▁▂▃▄▅▆▇█"


class Tail:
    """
    Follows a text file that grows.

    :param path: it need not exist yet
    """

    def __init__(self, path: Path):
        self._path = path
        self._read = 0

    def lines(self) -> list[str]:
        """
        The whole lines that came since the last call.

        :raises InputError: if there is something that is no file
        """
        if not self._path.exists():
            return []
        with open_regular(self._path, "a run's record") as file:
            file.seek(self._read)
            text = file.read(MOST_RECORD_BYTES)
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").splitlines()


@dataclass
class Picture:
    """
    What the files have shown so far, the latest last.

    :param scenario: the problem
    :param work_s: CPU time that each job needs, by name [s]
    :param guard_level: the SLO guard's
    """

    scenario: Scenario
    work_s: dict[str, float]
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=SHOWN_EVENTS))
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=HISTORY))
    rows: list[Row] = field(default_factory=list)
    guard_level: int = 0


class Reader:
    """
    Keeps a picture up to date with a run's files.

    :param folder: the run's report folder
    :raises InputError: if there is no run
    """

    def __init__(self, folder: Path):
        scenario = scenario_of(folder)
        self.picture = Picture(scenario, profile_work_s(scenario.profile))
        self._events = Tail(folder / EVENTS_FILE)
        self._samples = Tail(folder / SAMPLES_FILE)
        self._load = Tail(folder / LOAD_FILE)
        # What the lines that follow are read by: when the run started, and names of columns.
        self._start: list[str] = []
        self._columns: list[str] = []
        self._heading: list[str] = []

    def update(self) -> None:
        """Read what is new."""
        picture = self.picture
        events, samples, load = self._events.lines(), self._samples.lines(), self._load.lines()
        self._start = self._start or events[:1]
        new = list(parse_events(self._start + events))[1:]
        picture.events.extend(new)
        levels = [event.guard_level for event in new if event.guard_level is not None]
        picture.guard_level = [picture.guard_level, *levels][-1]
        if not self._columns:
            self._columns, samples = samples[:1], samples[1:]
        picture.samples.extend(parse_samples(self._columns + samples))
        self._heading = self._heading or [line for line in load if line.startswith("#type")]
        picture.rows += read_rows(self._heading + load)


def draw(picture: Picture) -> RenderableType:
    """
    The whole view.

    :param picture: what is known
    """
    return Group(
        Panel(_service(picture), title="memcached", title_align="left"),
        Panel(_vcpus(picture), title="vCPUs", title_align="left"),
        Panel(_jobs(picture), title="jobs", title_align="left"),
        Panel(_events(picture), title="log", title_align="left"),
    )


def _service(picture: Picture) -> RenderableType:
    view = Table.grid(padding=(0, 2))
    if not picture.samples:
        return Text("no reading yet")
    now, slo_us = picture.samples[-1], picture.scenario.service.slo_us
    highest = float(picture.scenario.load.qps_max)
    load = "".join(_spark(sample.qps / highest) for sample in list(picture.samples)[-SPARK_WIDTH:])
    view.add_row("load", f"{now.qps:,.0f} requests/s", load)
    view.add_row("CPU", f"{now.cpu_cores:.2f} of {len(now.service_cores)} vCPUs")
    p95_us = now.p95_us
    if p95_us is None and picture.rows:
        p95_us = picture.rows[-1].p95_us
    if p95_us is None:
        view.add_row("p95", "not measured")
    else:
        style = "red" if p95_us > slo_us else "green"
        view.add_row("p95", Text(f"{p95_us:,.0f} µs, SLO {slo_us:g} µs", style))
    if now.wait_us is not None and now.service_us is not None:
        view.add_row("", _in_words(Stages(now.wait_us, now.service_us)))
    for number, stages in enumerate(now.members, 1):
        if stages is not None:
            view.add_row(f"member {number}", _in_words(stages))
    level = picture.guard_level
    said = f"level {level}: {LEVELS[level]}"
    view.add_row("guard", Text(said, "red" if level else "green"))
    if picture.rows:
        late = sum(row.p95_us > slo_us for row in picture.rows)
        spoiled = sum(row.spoiled for row in picture.rows)
        said = f"{late} of {len(picture.rows)} above the SLO"
        view.add_row("intervals", f"{said}, {spoiled} spoiled by a late client")
    return view


def _in_words(stages: Stages) -> str:
    return f"waiting {stages.wait_us:,.0f} µs, being served {stages.service_us:,.0f} µs"


def _vcpus(picture: Picture) -> RenderableType:
    view = Table.grid(padding=(0, 2))
    if not picture.samples:
        return Text("no reading yet")
    now = picture.samples[-1]
    for vcpu, busy in enumerate(_busy(picture)):
        owners = ["memcached"] if vcpu in now.service_cores else []
        owners += [
            name if job.weight == "normal" else f"{name} (background)"
            for name, job in now.jobs.items()
            if job.state == "running" and vcpu in job.cores
        ]
        bar = ProgressBar(total=1.0, completed=busy, width=BAR_WIDTH)
        view.add_row(f"vCPU {vcpu}", bar, f"{100 * busy:3.0f} %", Text(", ".join(owners) or "free"))
    return view


def _busy(picture: Picture) -> list[float]:
    """Busy share of each vCPU over the last second or so."""
    now = picture.samples[-1]
    before = next((one for one in reversed(picture.samples) if now.time_s - one.time_s > 0.9), now)
    length_s = now.time_s - before.time_s
    if length_s <= 0.0:
        return [0.0] * len(now.busy_s)
    pairs = zip(now.busy_s, before.busy_s, strict=True)
    return [min(1.0, max(0.0, (late - early) / length_s)) for late, early in pairs]


def _jobs(picture: Picture) -> RenderableType:
    view = Table.grid(padding=(0, 2))
    jobs = picture.samples[-1].jobs if picture.samples else {}
    for name, job in jobs.items():
        done = job.state == "done"
        part = 1.0 if done else min(0.99, job.cpu_s / picture.work_s.get(name, math.inf))
        bar = ProgressBar(total=1.0, completed=part, width=BAR_WIDTH)
        where = f"vCPU {','.join(map(str, job.cores))}" if job.state == "running" else ""
        view.add_row(Text(name), bar, job.state, where, f"{job.cpu_s:.1f} s CPU")
    return view


def _events(picture: Picture) -> RenderableType:
    view = Table.grid(padding=(0, 2))
    for event in picture.events:
        said = event.detail if event.what == "custom" else f"{event.what} {event.arguments()}"
        view.add_row(f"{event.time_s:8.2f} s", Text(event.job), plain(said))
    return view


def plain(said: str) -> Text:
    """
    Words that may come from a job: shown as they are, without any effect on the terminal.

    :param said: the words
    """
    return Text(printable(said), overflow="ellipsis")


def _spark(share: float) -> str:
    return SPARKS[min(len(SPARKS) - 1, max(0, int(share * len(SPARKS))))]


def over(picture: Picture) -> bool:
    """
    Whether the run has ended.

    :param picture: what is known
    """
    return any((event.job, event.what) == (SCHEDULER, "end") for event in picture.events)


def watch(reader: Reader, console: Console) -> None:
    """
    Show a run until it ends, or nobody is left to show it to.

    :param reader: its files
    :param console: the terminal
    """
    reader.update()
    parent = os.getppid()
    with Live(draw(reader.picture), console=console, auto_refresh=False) as live:
        while not over(reader.picture) and os.getppid() == parent:
            time.sleep(REFRESH_S)
            reader.update()
            live.update(draw(reader.picture), refresh=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = OneLineParser(prog="python -m deploy.view", description="Show a run as it goes on.")
    line.add_argument("folder", type=Path, help="the run's report folder")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Show a run from the command line.

    :param argv: command line, the process's own if none is given
    """
    folder = parser().parse_args(argv).folder
    with exit_on_bad_input(), contextlib.suppress(KeyboardInterrupt):
        watch(Reader(folder), Console())


if __name__ == "__main__":
    main()
