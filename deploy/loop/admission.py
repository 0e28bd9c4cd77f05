"""
How a queue's jobs come into the loop, and what became of them gets out.

A thread of its own does what touches the queue's folder, one scan at a time: no disk holds up
memcached's vCPUs. The loop's thread picks up what a scan has brought, at most twice a second.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from deploy.jobs.job_run import JobRun
from deploy.loop.actuator import Actuator
from deploy.queue.spool import Ending, Scan, Spool, local_time, outcome_of, settle
from deploy.records.recorder import SCHEDULER, Recorder
from deploy.records.state import State, StateFolder
from env.allocation import JobState
from env.errors import fault
from env.scenario import MAX_JOBS, Job, Scenario

SCAN_EVERY_S = 0.5

SILENT_S = 10.0
"""After a scan of this length somebody should know that the disk hangs."""


class Arrivals(Protocol):
    """What brings jobs one by one."""

    @property
    def over(self) -> bool:
        """Whether it brings no more."""

    def poll(self, now_s: float) -> tuple[Job, ...] | None:
        """
        Let jobs in, and those that are over out.

        :param now_s: since the run started [s]
        :return: the jobs that the loop has from now on; None if they are the same
        """

    def close(self) -> None:
        """Let what is under way end."""

    def settle(self, state: State, folder: StateFolder) -> list[str]:
        """
        Leave its jobs to whoever comes next, once all is undone.

        :param state: of the deployment
        :param folder: the state folder, with the proofs
        :return: what could not be done, one line each
        """


class Admission:
    """
    A queue's jobs on their way in and out.

    :param spool: the queue's folder
    :param scenario: whose machine the jobs must fit
    :param actuator: runs them; has those that ran already
    :param recorder: is told what happens
    """

    def __init__(self, spool: Spool, scenario: Scenario, actuator: Actuator, recorder: Recorder):
        self._spool = spool
        self._scenario = scenario
        self._actuator = actuator
        self._recorder = recorder
        self._containers = actuator.state.runtime == "docker"
        self._clerk = ThreadPoolExecutor(1, thread_name_prefix="clerk")
        self._scan: Future[Scan] | None = None
        self._next_scan_s = 0.0
        self._written: set[str] = set()  # jobs that are over, and whose outcome says so
        self._full = False
        self._complaint = ""
        self.over = False  # a queue never is

    def poll(self, now_s: float) -> tuple[Job, ...] | None:
        """
        Pick up what a scan has brought; have the next one begun when it is due.

        :param now_s: since the run started [s]
        :return: the jobs that the loop has from now on; None if they are the same
        """
        if self._scan is None:
            if now_s >= self._next_scan_s:
                self._next_scan_s = now_s + SCAN_EVERY_S
                self._begin_scan(now_s)
            return None
        if not self._scan.done():
            if now_s > self._next_scan_s + SILENT_S:
                self._complain("the queue's folder: does not answer; its jobs wait")
            return None
        scan, self._scan = self._scan, None
        try:
            found = scan.result()
        except Exception as error:  # a disk that is full or gone; the next scan goes on from there
            self._complain(f"the queue's folder: {fault(error)}; tried again")
            return None
        self._complaint = ""
        before = tuple(self._actuator.jobs)
        self._take(found)
        runs = self._actuator.jobs
        return None if tuple(runs) == before else tuple(run.job for run in runs.values())

    def close(self) -> None:
        """Let the present scan end, and begin none any more."""
        self._clerk.shutdown(wait=True, cancel_futures=True)

    def settle(self, state: State, folder: StateFolder) -> list[str]:
        """
        Leave the queue to the next loop, once nothing of its jobs runs any more.

        :param state: of the deployment
        :param folder: the state folder, with the proofs
        :return: what could not be done, one line each
        """
        self.close()
        return settle(self._spool, state, folder)

    def _begin_scan(self, now_s: float) -> None:
        runs = self._actuator.jobs
        over = [
            _ending(run, now_s)
            for name, run in runs.items()
            if run.state == JobState.DONE and not run.may_still_run and name not in self._written
        ]
        room = MAX_JOBS - len(runs)
        arguments = self._scenario, self._containers, tuple(runs), room, over
        self._scan = self._clerk.submit(self._spool.scan, *arguments)

    def _take(self, scan: Scan) -> None:
        """Do what a scan asks for."""
        for line in scan.said:
            self._recorder.event("custom", SCHEDULER, detail=line)
        full = scan.waiting > 0
        if full and not self._full:
            detail = f"the queue waits: {MAX_JOBS} jobs are the most at once"
            self._recorder.event("custom", SCHEDULER, detail=detail)
        self._full = full
        actuator = self._actuator
        for name in scan.cancelled:
            if name in actuator.jobs:
                actuator.cancel(name)
        self._written.update(scan.finished)
        gone = [name for name in self._written if not actuator.jobs[name].busy]
        self._written -= {name for name in gone if actuator.dismiss(name)}
        for job in scan.begun:
            actuator.admit(job)

    def _complain(self, why: str) -> None:
        if why != self._complaint:
            self._complaint = why
            self._recorder.event("custom", SCHEDULER, detail=why)


def _ending(run: JobRun, now_s: float) -> Ending:
    record, code = run.record, run.record.exit_code
    assert code is not None and record.end_s is not None
    began_s = time.time() - now_s
    return Ending(
        run.job.name,
        outcome_of(code),
        code if code >= 0 else None,
        record.attempts,
        started=None if record.start_s is None else local_time(began_s + record.start_s),
        ended=local_time(began_s + record.end_s),
        paused_s=round(run.paused_s(now_s), 3),
        why=run.why,
    )
