"""What all jobs of a deployment share: who runs them, where they stand written down, the clock."""

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from deploy.jobs.runtimes import Runtime
from deploy.linux.cgroups import JobGroup
from deploy.records.recorder import SCHEDULER, Recorder
from deploy.records.state import State, StateFolder
from env.allocation import JobAllocation
from env.errors import fault


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
