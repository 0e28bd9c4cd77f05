"""How a node's batch pods come into the loop and leave it."""

from collections.abc import Sequence

from deploy.loop.actuator import Actuator
from deploy.node.node_pods import NodePods, SeenPods
from deploy.node.pod_groups import PodGroup
from deploy.node.pod_run import PodRun
from deploy.node.pods import BatchPod
from deploy.records.proof import CANCELLED
from deploy.records.recorder import SCHEDULER, Recorder
from deploy.records.state import State, StateFolder
from env.allocation import JobState
from env.errors import fault
from env.scenario import MAX_JOBS, Job

TEND_EVERY_S = 1.0
"""How often it is looked whether somebody else has written to the pods' control groups."""


class PodAdmission:
    """
    A node's batch pods on their way in and out; see `deploy.loop.admission.Admission`.

    :param pods: the node's
    :param actuator: what the loop acts by
    :param recorder: is told what happens
    """

    def __init__(self, pods: NodePods, actuator: Actuator, recorder: Recorder):
        self._pods = pods
        self._actuator = actuator
        self._recorder = recorder
        self._service = pods.seen.service
        self._seen: SeenPods | None = None
        self._runs: dict[str, PodRun] = {}  # by uid, those that wait for room, too
        self._said: set[str] = set()
        self._tend_at_s = 0.0

    @property
    def over(self) -> bool:
        """Whether the service's pod is gone, or another one has taken its place."""
        return self._pods.seen.service != self._service

    def poll(self, now_s: float) -> tuple[Job, ...] | None:
        """
        Take in what was seen of the pods; look after those that are there.

        :param now_s: since the run started [s]
        :return: the jobs that the loop has from now on; None if they are the same
        """
        actuator = self._actuator
        before = tuple(actuator.jobs)
        if self._pods.seen is not self._seen:
            self._seen = self._pods.seen
            self._take(self._seen)
        if now_s >= self._tend_at_s:
            self._tend_at_s = now_s + TEND_EVERY_S
            actuator.look_after_service()
            for run in self._runs.values():
                run.tend()
        for name, standing in list(actuator.jobs.items()):
            if standing.state == JobState.DONE:
                actuator.dismiss(name)
        for run in self._runs.values():
            if run.job.name not in actuator.jobs and len(actuator.jobs) < MAX_JOBS:
                actuator.adopt(run)
        runs = actuator.jobs
        return None if tuple(runs) == before else tuple(run.job for run in runs.values())

    def close(self) -> None:
        """See `Arrivals.close`: nothing is under way; what is held is put back with all else."""

    def settle(self, state: State, folder: StateFolder) -> list[str]:
        """See `Arrivals.settle`: nothing is kept of pods."""
        return []

    def _take(self, seen: SeenPods) -> None:
        self._tell(seen.said)
        there = {pod.uid: (pod, group) for pod, group in seen.batch}
        for uid, (pod, group) in there.items():
            if uid in self._runs or pod.exit_code is not None or group is None:
                continue
            if pod.job.name in self._actuator.state.jobs:
                self._seen = None  # it was let go, and is not forgotten yet: taken at a later poll
            else:
                self._begin(pod, group)
        for uid in list(self._runs):
            if uid not in there:
                self._end(uid, CANCELLED)
                continue
            pod, group = there[uid]
            if pod.exit_code is not None or group is None:
                self._end(uid, CANCELLED if pod.exit_code is None else pod.exit_code)

    def _begin(self, pod: BatchPod, group: PodGroup) -> None:
        try:
            self._runs[pod.uid] = PodRun(pod, group, self._actuator.context)
        except OSError as error:
            self._tell([f"pod {pod.name}: cannot be held: {fault(error)}"])

    def _end(self, uid: str, code: int) -> None:
        run = self._runs.pop(uid)
        run.end(code)
        if run.job.name not in self._actuator.jobs:
            del self._actuator.state.jobs[run.job.name]

    def _tell(self, lines: Sequence[str]) -> None:
        """Say each thing once."""
        for line in lines:
            if line not in self._said:
                self._said.add(line)
                self._recorder.event("custom", SCHEDULER, detail=line)
