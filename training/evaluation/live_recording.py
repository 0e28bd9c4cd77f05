"""The recording of a run on a real machine from its records, for pictures and predictions."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.records.recorder import (
    MEMCACHED,
    SCHEDULER,
    Event,
    guard_levels,
    read_events,
    read_samples,
)
from deploy.records.run_report import read_intervals
from env.allocation import JobState
from training.evaluation.timeline import Interval, Recording, Span

STATE_AFTER = {
    "start": JobState.RUNNING,
    "pause": JobState.PAUSED,
    "unpause": JobState.RUNNING,
    "end": JobState.DONE,
}


def recording_of(folder: Path) -> Recording:
    """
    The recording of a run, from its logs.

    :param folder: the run's report folder
    """
    samples, events = read_samples(folder), read_events(folder)
    end_s = max([event.time_s for event in events if event.job != SCHEDULER], default=0.0)
    moves = [(one.time_s, one.cores) for one in events if one.job == MEMCACHED and one.cores]
    names = dict.fromkeys(event.job for event in events)
    return Recording(
        intervals=[
            Interval(
                row.start_s,
                row.end_s,
                row.qps if math.isnan(row.target_qps) else row.target_qps,
                row.p95_us,
            )
            for row in read_intervals(folder)
            if row.end_s > 0.0 and row.start_s < end_s
        ],
        # The log has memcached's moves; where it was at first is in the first sample.
        service=[*((0.0, sample.service_cores) for sample in samples[:1]), *moves],
        jobs={
            name: list(_spans([event for event in events if event.job == name], end_s))
            for name in names
            if name not in (SCHEDULER, MEMCACHED)
        },
        end_s=end_s,
        guard=guard_levels(events),
    )


def _spans(events: Sequence[Event], end_s: float) -> Iterator[Span]:
    """A job's stretches of constant state and vCPUs, from its lines in the log."""
    state, since_s = JobState.PENDING, 0.0
    cores: tuple[int, ...] = ()
    for event in [*events, Event(end_s, "end", "")]:
        if event.what == "custom" and not event.fails:
            continue
        if state in (JobState.RUNNING, JobState.PAUSED) and event.time_s > since_s:
            yield Span(since_s, event.time_s, state, cores)
        state = JobState.PENDING if event.fails else STATE_AFTER.get(event.what, state)
        since_s = event.time_s
        cores = event.cores or cores
