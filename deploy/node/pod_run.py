"""
A batch pod as a job of the loop: held until a policy starts it, and never ended by us.

What the kubelet has started cannot wait at a gate of ours. So a pod is frozen, in the background,
from when it is seen; a policy's start lets it go on. It is written down before, with what its
control groups held: the guardian lets it go on, and whatever ends the loop, they are put back.
"""

from pathlib import Path

from deploy.jobs.job_context import JobContext
from deploy.jobs.job_run import JobRun
from deploy.jobs.runtimes import Attempt, Instance
from deploy.linux.cgroups import put_back
from deploy.node.pod_groups import PodGroup, PodPlacement
from deploy.node.pods import BatchPod
from deploy.records.state import JobRecord
from env.allocation import JobState, Weight
from env.errors import fault


class PodRun(JobRun):
    """
    One batch pod, held from now on.

    :param pod: as the API has it
    :param group: its control group
    :param context: what all jobs of a deployment share
    :raises OSError: if it is gone, or cannot be written down
    """

    def __init__(self, pod: BatchPod, group: PodGroup, context: JobContext):
        files = str(group.weight_file), str(group.freezer_file)
        record = JobRecord(weight_file=files[0], freezer_file=files[1], had=group.held())
        super().__init__(pod.job, record, context)
        self._place = PodPlacement(group, record.had)
        jobs = context.state.jobs
        jobs[pod.job.name] = record
        context.save()
        if context.unsaved:
            del jobs[pod.job.name]
            raise OSError("the state cannot be written")
        attempt = Attempt(pod.job, 0, Path(), None)
        self.instance = Instance(attempt, pod.uid, 0, -1, self._place)
        self._hold()

    def tend(self) -> None:
        """Make good what somebody else has written over: the kubelet, systemd, the runtime."""
        if self.instance is None:
            return
        cores, weight = self._written.cores, self._written.weight
        held = self.wanted.state == JobState.PENDING
        try:
            others = self._place.rewritten(cores, Weight.BACKGROUND if weight is None else weight)
            if held and not self._place.paused():
                others = True
            if not others:
                return
            self._context.note(self.job.name, "its control group was written over; ours again")
            self._context.save()  # what is put back in the end
            if held:
                self._hold()
        except OSError as error:
            self._complain(f"cannot be looked at: {fault(error)}")
            return
        self.forget_written()
        self.write()

    def end(self, code: int) -> None:
        """
        Leave the pod as it was found: it is over, or is to be left alone.

        :param code: its exit code, or what stands for one
        """
        for each in put_back(self.record.had):
            self._context.note(self.job.name, each)
        self._note_resumed(self._context.now_s)
        self.close()
        self.instance = None
        self.record.had, self.record.exit_code = {}, code
        self.record.end_s = self._context.now_s
        self._context.recorder.event("end", self.job.name, detail=f"exit code {code}")
        self._context.save()

    @property
    def _to_be_made(self) -> bool:
        """The kubelet has made it."""
        return False

    def _hold(self) -> None:
        """Stop it, in the background; what fails is tried again by `tend`."""
        try:
            self._place.set_weight(Weight.BACKGROUND)
            self._place.set_paused(True)
        except OSError as error:
            self._complain(f"cannot be held: {fault(error)}")

    def _let_through(self, instance: Instance) -> bool:
        """It goes on already: `write` has let it."""
        record, now_s = self.record, self._context.now_s
        record.opened, record.threads, record.key = True, self.wanted.threads, instance.key
        record.decided_s, record.start_s, record.begun_s = self.decided_s, now_s, now_s
        self._passed = True
        self.changes += 1
        self._context.recorder.event("start", self.job.name, self.wanted.cores, record.threads)
        self._context.save()
        return True
