"""What all jobs of a deployment share: who runs them, where they stand written down, the clock."""

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from deploy.jobs.runtimes import Runtime
from deploy.linux.cgroups import JobGroup
from deploy.records.recorder import SCHEDULER, Recorder
from deploy.records.state import State, StateFolder
from env.allocation import JobAllocation
from env.errors import fault


@dataclass
class Call:
    """
    Something that may block, done by another thread.

    :param what: "making", "ending" or "removing" an attempt
    :param future: what comes of it
    :param since_s: when it was handed over, since the run started [s]
    :param reported: whether it was said to take long
    """

    what: str
    future: Future[Any]
    since_s: float
    reported: bool = False

    @property
    def has_result(self) -> bool:
        """Whether it has ended, and well."""
        future = self.future
        return future.done() and not future.cancelled() and future.exception() is None


@dataclass
class JobContext:
    """
    What all jobs of a deployment share.

    :param runtime: who runs them
    :param worker: a single thread, for calls that block: making and removing
    :param attendant: another one for what has ended, which is known while Docker takes seconds
    :param folder: where state and proofs are
    :param state: what is kept there
    :param group_for: makes a job's control group; None where groups cannot be written
    :param recorder: is told what happens
    :param ahead: vCPUs and weight that attempts are made ahead with
    :param unsaved: whether the disk has refused the state as it is now
    """

    runtime: Runtime
    worker: Executor
    attendant: Executor
    folder: StateFolder
    state: State
    group_for: Callable[[str], JobGroup] | None
    recorder: Recorder
    ahead: JobAllocation
    unsaved: bool = False

    @property
    def now_s(self) -> float:
        """Seconds since the run started."""
        return time.monotonic() - self.state.started_s

    def submit(self, what: str, work: Callable[..., Any], now_s: float, *arguments: Any) -> Call:
        """
        Hand over something that may block.

        :param what: see `Call`
        :param work: what is called
        :param now_s: since the run started [s]
        :param arguments: what it is called with
        """
        who = self.attendant if what == "ending" else self.worker
        return Call(what, who.submit(work, *arguments), now_s)

    def note(self, job: str, detail: str) -> None:
        """
        Record something out of the ordinary.

        :param job: a job's name, `MEMCACHED` or `SCHEDULER`
        :param detail: what happened, in words
        """
        self.recorder.event("custom", job, detail=detail)

    def save(self) -> None:
        """Write the state; a full disk is reported once, and does not stop the loop."""
        try:
            self.folder.save(self.state)
            self.unsaved = False
        except OSError as error:
            if not self.unsaved:
                self.note(SCHEDULER, f"state not written, nothing new is begun: {fault(error)}")
            self.unsaved = True
