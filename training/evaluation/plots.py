"""
Pictures of runs.

Figures are made without pyplot: no window system is asked for, nothing has to be closed.
"""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from env.allocation import JobState
from env.scenario import Scenario
from training.analysis.palette import PALETTE
from training.evaluation.timeline import Recording, Span

MOST_NAMED = 4  # of the jobs that start together: more names would not fit the axes
LOAD_COLOUR, SERVICE_COLOUR, FINE_COLOUR, BAD_COLOUR = "#555555", "#333333", "#56B4E9", "#D55E00"


def plot_run(recording: Recording, scenario: Scenario, title: str, path: Path) -> None:
    """
    Three stacked plots of one run.

    p95 and load with the SLO line; memcached's vCPUs and load; the jobs on their vCPUs.

    :param recording: the run
    :param scenario: the problem
    :param title: of the picture
    :param path: the picture to write (.png)
    """
    figure = Figure(figsize=(13, 10), layout="constrained")
    figure.suptitle(title)
    latency, service, gantt = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": (3, 2, 4)}
    )
    draw_latency(latency, recording, scenario)
    draw_service(service, recording, scenario)
    draw_gantt(gantt, recording, scenario)
    gantt.set_xlabel("time [s]")
    gantt.set_xlim(0.0, max(recording.end_s, scenario.load.interval_s))
    figure.savefig(path, dpi=100)


def draw_latency(axes: Axes, recording: Recording, scenario: Scenario) -> None:
    """
    p95 of each interval as a bar, with the SLO, and the load.

    :param axes: the axes to draw on
    :param recording: the run
    :param scenario: gives the SLO
    """
    slo_us = scenario.service.slo_us
    rows = recording.intervals
    axes.bar(
        [row.start_s for row in rows],
        [row.p95_us / 1e3 for row in rows],
        width=[row.end_s - row.start_s for row in rows],
        align="edge",
        color=[BAD_COLOUR if row.p95_us > slo_us else FINE_COLOUR for row in rows],
        edgecolor="white",
        linewidth=0.5,
    )
    axes.axhline(slo_us / 1e3, color=BAD_COLOUR, linestyle="--", label=f"SLO {slo_us / 1e3:g} ms")
    draw_guard(axes, recording)
    axes.set_ylabel("p95 latency [ms]")
    axes.set_ylim(0.0, 1.1 * max([slo_us / 1e3, *(row.p95_us / 1e3 for row in rows)]))
    axes.legend(loc="lower left", fontsize="small")
    draw_load(axes, recording)
    mark_starts(axes, recording, scenario)


def draw_guard(axes: Axes, recording: Recording) -> None:
    """
    When the SLO guard was above level 0, darker the higher it was.

    :param axes: what it is drawn on
    :param recording: the run
    """
    marks = [*recording.guard, (recording.end_s, 0)]
    label = "SLO guard"
    for (start_s, level), (end_s, _) in pairwise(marks):
        if level and end_s > start_s:
            axes.axvspan(start_s, end_s, color=BAD_COLOUR, alpha=0.06 * level, lw=0.0, label=label)
            label = ""


def draw_load(axes: Axes, recording: Recording) -> None:
    """
    The load, on an axis of its own to the right.

    :param axes: what it is drawn over
    :param recording: the run
    """
    right = axes.twinx()
    rows = recording.intervals
    if rows:
        right.stairs(
            [row.qps / 1e3 for row in rows],
            [row.start_s for row in rows] + [rows[-1].end_s],
            baseline=None,
            color=LOAD_COLOUR,
            linewidth=1.0,
        )
    right.set_ylim(bottom=0.0)
    right.set_ylabel("load [1000 requests/s]", color=LOAD_COLOUR)


def mark_starts(axes: Axes, recording: Recording, scenario: Scenario) -> None:
    """
    A line where each job starts; jobs that start together share a label.

    :param axes: the axes to draw on
    :param recording: the run
    :param scenario: gives the jobs their colours
    """
    colours = _job_colours(scenario)
    starts = sorted((spans[0].start_s, name) for name, spans in recording.jobs.items() if spans)
    together_s = 0.015 * recording.end_s
    label_s, names = -math.inf, list[str]()
    for start_s, name in starts:
        axes.axvline(start_s, color=colours[name], linewidth=1.2)
        if start_s - label_s > together_s:
            _label_start(axes, label_s, names)
            label_s, names = start_s, []
        names.append(name)
    _label_start(axes, label_s, names)


def _label_start(axes: Axes, start_s: float, names: list[str]) -> None:
    if not names:
        return
    more = len(names) - MOST_NAMED
    axes.annotate(
        ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else ""),
        (start_s, 0.98),
        xycoords=axes.get_xaxis_transform(),
        xytext=(4, 0),
        textcoords="offset points",
        rotation=90,
        ha="left",
        va="top",
        fontsize=7,
        bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5},
    )


def draw_service(axes: Axes, recording: Recording, scenario: Scenario) -> None:
    """
    How many vCPUs memcached has, and the load.

    :param axes: the axes to draw on
    :param recording: the run
    :param scenario: gives the number of vCPUs
    """
    changes = recording.service
    if changes:
        edges = [0.0, *(time_s for time_s, _ in changes[1:]), recording.end_s]
        axes.stairs(
            [len(cores) for _, cores in changes],
            edges,
            fill=True,
            color=FINE_COLOUR,
            alpha=0.7,
        )
    axes.set_ylim(0.0, scenario.machine.vcpus)
    axes.set_yticks(range(scenario.machine.vcpus + 1))
    axes.set_ylabel("memcached's vCPUs")
    draw_load(axes, recording)


def gantt_picture(recording: Recording, scenario: Scenario) -> Figure:
    """
    One picture of who holds which vCPU when.

    :param recording: the run
    :param scenario: the problem
    """
    figure = Figure(figsize=(12, 4))
    draw_gantt(figure.subplots(), recording, scenario)
    return figure


def draw_gantt(axes: Axes, recording: Recording, scenario: Scenario) -> None:
    """
    One row a vCPU: who was there when; jobs that share one lie above each other.

    :param axes: the axes to draw on
    :param recording: the run
    :param scenario: gives vCPUs and jobs
    """
    colours = _job_colours(scenario)
    for vcpu in range(scenario.machine.vcpus):
        presence = {name: spans_on(vcpu, spans) for name, spans in recording.jobs.items()}
        lanes = lanes_of({name: spans for name, spans in presence.items() if spans})
        height = 0.72 / max(1, 1 + max(lanes.values(), default=0))
        for name, lane in lanes.items():
            low = vcpu - 0.28 + lane * height
            for span in presence[name]:
                _draw_span(axes, span, low, height, colours[name])
            longest = max(presence[name], key=lambda span: span.end_s - span.start_s)
            axes.text(
                0.5 * (longest.start_s + longest.end_s),
                low + 0.5 * height,
                name,
                ha="center",
                va="center",
                fontsize=7,
                clip_on=True,
                bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5},
            )
    _draw_service_row(axes, recording)
    axes.set_yticks(range(scenario.machine.vcpus))
    axes.set_yticklabels([f"vCPU {vcpu}" for vcpu in range(scenario.machine.vcpus)])
    axes.set_ylim(scenario.machine.vcpus - 0.5, -0.5)
    axes.set_title("jobs by vCPU (hatched: paused; dark edge: memcached)", fontsize="small")


def _draw_span(axes: Axes, span: Span, low: float, height: float, colour: str) -> None:
    paused = span.state == JobState.PAUSED
    axes.broken_barh(
        [(span.start_s, span.end_s - span.start_s)],
        (low, height),
        facecolors="white" if paused else colour,
        edgecolors=colour if paused else "white",
        hatch="////" if paused else None,
        linewidth=0.3,
    )


def _draw_service_row(axes: Axes, recording: Recording) -> None:
    """A thin dark bar at the top of the row of each vCPU that memcached holds."""
    starts = [time_s for time_s, _ in recording.service]
    ends = [*starts, recording.end_s][1:]
    for (_, cores), start_s, end_s in zip(recording.service, starts, ends, strict=True):
        for vcpu in cores:
            axes.broken_barh(
                [(start_s, max(0.0, end_s - start_s))],
                (vcpu - 0.42, 0.12),
                facecolors=SERVICE_COLOUR,
            )


def spans_on(vcpu: int, spans: list[Span]) -> list[Span]:
    """
    When a job was on a vCPU, whatever other vCPUs it had meanwhile.

    :param vcpu: number of the vCPU
    :param spans: the job's spans
    """
    joined: list[Span] = []
    for span in spans:
        if vcpu not in span.cores:
            continue
        last = joined[-1] if joined else None
        if last is not None and (last.end_s, last.state) == (span.start_s, span.state):
            joined[-1] = replace(last, end_s=span.end_s)
        else:
            joined.append(span)
    return joined


def lanes_of(presence: dict[str, list[Span]]) -> dict[str, int]:
    """
    A lane for each job, such that jobs in one lane never overlap.

    :param presence: each job's spans on one vCPU
    """
    lanes: dict[str, int] = {}
    free_at: list[float] = []
    for name in sorted(presence, key=lambda job: presence[job][0].start_s):
        start_s, end_s = presence[name][0].start_s, presence[name][-1].end_s
        lane = next((i for i, free_s in enumerate(free_at) if free_s <= start_s), len(free_at))
        free_at[lane : lane + 1] = [end_s]
        lanes[name] = lane
    return lanes


def _job_colours(scenario: Scenario) -> dict[str, str]:
    """Each job's colour, the same in every picture of a scenario."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(scenario.job_names)}
