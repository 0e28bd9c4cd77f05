"""What a run on a cluster has come to: the report of one machine, but for latency."""

import json
import resource
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from deploy.cluster.attempts import FAILED, SUCCEEDED
from deploy.cluster.placement_run import MOST_ATTEMPTS, PlacementRun
from deploy.linux.own_folder import write_own
from deploy.records.recorder import EVENTS_FILE, REPORT_FILE, SCHEDULER, Event
from deploy.records.run_report import JobOutcome, LoopCost, Outcome, content
from env.errors import InputError, os_reason


def job_outcomes(run: PlacementRun) -> dict[str, JobOutcome]:
    """
    How each job has ended; times count from the run's first creation, by the cluster's clock [s].

    :param run: the run
    """
    outcomes = {}
    for place in run.plan.jobs:
        tries = run.attempts.get(place.name, [])
        last = tries[-1] if tries else None
        ended = last is not None and (
            last.state == SUCCEEDED or (last.state == FAILED and last.number >= MOST_ATTEMPTS)
        )
        started = [one.started_s - run.began_s for one in tries if one.started_s is not None]
        outcomes[place.name] = JobOutcome(
            exit_code=last.exit_code if last and ended else None,
            decided_s=tries[0].created_s - run.began_s if tries else None,
            start_s=started[0] if started else None,
            begun_s=started[0] if started else None,
            end_s=last.ended_s - run.began_s if last and ended and last.ended_s else None,
            paused_s=0.0,
            retries=max(0, len(tries) - 1),
        )
    return outcomes


def write_cluster_report(
    folder: Path, run: PlacementRun, events: Sequence[Event], restored: bool
) -> None:
    """
    Write `report.json` and `events.log`, in the forms that one machine's have.

    :param folder: where to
    :param run: the run
    :param events: what has happened, oldest first
    :param restored: whether nothing of ours is left on the cluster
    :raises InputError: if they cannot be written
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    lasted_s = max(1.0, time.time() - run.began_s)
    cost = LoopCost(
        period_ms=0.0,
        overruns=0,
        cpu_pct=100.0 * (usage.ru_utime + usage.ru_stime) / lasted_s,
        rss_mib=usage.ru_maxrss / 1024,
    )
    outcome = Outcome(
        policy=run.plan.name,
        lasted_s=lasted_s,
        jobs=job_outcomes(run),
        actuations=sum(map(len, run.attempts.values())),
        overruled=0,
        loop=cost,
        restored=restored,
    )
    report = content(outcome, (), events, run.cluster.service.slo_us)
    own = [Event(0.0, "start", SCHEDULER), *events, Event(lasted_s, "end", SCHEDULER)]
    lines = [_line(event, run.began_s) for event in sorted(own, key=lambda one: one.time_s)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_own(folder / REPORT_FILE, json.dumps(report, indent=1) + "\n")
        write_own(folder / EVENTS_FILE, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise InputError(f"{folder}: no report: {os_reason(error)}") from error


def _line(event: Event, began_s: float) -> str:
    stamp = datetime.fromtimestamp(began_s + event.time_s).isoformat(timespec="microseconds")
    return " ".join((stamp, event.what, event.job, event.arguments())).rstrip()
