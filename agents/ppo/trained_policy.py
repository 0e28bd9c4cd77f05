"""The trained PPO policy, run with NumPy: what the live agent executes."""

import abc
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from agents.checkpoint import Checkpoint, read_checkpoint
from agents.ppo.network import KnownMasks, SingleNetwork
from env.action import CORES, JOB, KIND, WEIGHT, edit_table
from env.allocation import Allocation, JobAllocation, cores_of, mask_of
from env.codes import DONE, PENDING, PLACE
from env.control import PROBE_WINDOW_S, STATES, WEIGHTS, ControlState
from env.decision import decide_edit, regulate_again
from env.errors import InputError
from env.observation import observe, remember, shift_history
from env.scenario import Scenario
from env.telemetry import Telemetry


class TrainedPolicy(abc.ABC):
    """
    What a trained network needs to be a `Policy`.

    It keeps a control row of its own, and observes, edits and regulates it by the same functions as
    the simulator. The network, and what it is shown, are a subclass's.

    :param name: what tables call it
    """

    wakes = True
    regulated = True
    probe_window_s = PROBE_WINDOW_S
    needs_cpi = False

    def __init__(self, name: str):
        self.name = name
        self.period_s = 0.0

    def _begin(self, scenario: Scenario, job_work_s: Mapping[str, float]) -> None:
        """Begin an episode; `job_work_s` scales the jobs' progress."""
        self._scenario = scenario
        self.period_s = scenario.control.period_s
        self._names = scenario.job_names
        # Python's own numbers are faster, one by one.
        self._rows = edit_table(scenario).rows.astype(object)
        self._control = ControlState.initial(scenario, job_work_s)
        self._masks = KnownMasks(self._rows)
        self._first = True
        self._seen: Allocation | None = None
        self._desired: tuple[tuple[int, ...], ...] = ()
        self._desired_value = Allocation(())

    def decide(self, telemetry: Telemetry) -> Allocation:
        """
        Observe, choose an edit and return the allocation that it leads to.

        :param telemetry: what the machine shows now
        """
        control = self._control
        level = control.guard_level
        self._read(telemetry)
        if control.guard_level != level:
            regulate_again(control)  # as the machine did at this poll, before it was read
            control.settled = 0
        elif telemetry.applied is not self._seen:
            control.settled = 0
            self._adopt(telemetry.applied)
        self._seen = telemetry.applied
        if self._first:
            control.settled_qps = control.qps
            self._first = False
        else:
            remember(control)
        edit = self._choose(control)
        if decide_edit(control, self._rows, edit):
            self._note_desired()
        shift_history(control)
        loop = self._scenario.control
        self.period_s = loop.hold_s if control.kept else loop.period_s
        return self._desired_value

    @abc.abstractmethod
    def _choose(self, control: ControlState) -> int:
        """The network's edit for what the control row shows."""

    def _read(self, telemetry: Telemetry) -> None:
        control = self._control
        control.now_s = telemetry.time_s
        control.qps = telemetry.service.qps
        control.cpu_cores = telemetry.service.cpu_cores
        control.peak_qps = telemetry.service.peak_qps
        control.peak_cpu_cores = telemetry.service.peak_cpu_cores
        control.probed_p95_us = telemetry.service.p95_us or 0.0
        control.guard_level = telemetry.guard_level
        states, used = control.job_state, control.job_cpu_s
        for index, name in enumerate(self._names):
            job = telemetry.jobs[name]
            if job.state != states[index]:
                states[index] = job.state
                control.settled = 0
            used[index] = job.cpu_s

    def _adopt(self, applied: Allocation) -> None:
        """
        Take over what is really applied where it is not what this policy desired.

        That happens after somebody else has decided, or when jobs run already at the beginning.
        Under the guard it is applied, but not desired.
        """
        control = self._control
        service = mask_of(applied.service_cores)
        if service != control.service:
            control.service = service
            if control.guard_level == 0:
                control.desired_service = service
        everything = (1 << control.n_vcpus) - 1
        for index, name in enumerate(self._names):
            job = applied.jobs[name]
            state, cores = int(job.state), mask_of(job.cores)
            known = (control.state[index], control.cores[index], control.weight[index])
            if known == (state, cores, job.weight) or state == DONE:
                continue
            control.state[index] = state
            if state != PENDING:
                control.cores[index], control.weight[index] = cores, int(job.weight)
                control.threads[index] = job.threads
            if control.guard_level > 0:
                continue
            control.desired_state[index] = state
            if state == PENDING:
                control.desired_place[index] = -1
                continue
            control.desired_cores[index] = cores
            control.desired_weight[index] = int(job.weight)
            control.desired_threads[index] = job.threads
            control.desired_set[index] = cores or everything
            control.desired_place[index] = self._place_of(index, cores, int(job.weight))

    def _place_of(self, job: int, cores: int, weight: int) -> int:
        """The edit that names a place, or -1."""
        rows = self._rows
        same = (rows[:, KIND] == PLACE) & (rows[:, JOB] == job)
        same &= (rows[:, CORES] == cores) & (rows[:, WEIGHT] == weight)
        found = np.flatnonzero(same)
        return int(found[0]) if len(found) else -1

    def _note_desired(self) -> None:
        """Bring the desired allocation as a value up to date; it stays the same object if equal."""
        control = self._control
        desired = (
            (control.desired_service,),
            tuple(control.desired_state),
            tuple(control.desired_cores),
            tuple(control.desired_weight),
            tuple(control.desired_threads),
        )
        if desired != self._desired:
            self._desired = desired
            # A job whose set memcached holds whole is for the regulator to stop.
            everything = (1 << control.n_vcpus) - 1
            jobs = {
                name: JobAllocation(
                    STATES[state], cores_of(cores or everything), WEIGHTS[weight], threads
                )
                for name, state, cores, weight, threads in zip(
                    self._names, *desired[1:], strict=True
                )
            }
            self._desired_value = Allocation(cores_of(control.desired_service), jobs)


class PPOPolicy(TrainedPolicy):
    """
    A policy trained for one scenario.

    :param checkpoint: what to run
    :param name: what tables call it
    """

    def __init__(self, checkpoint: Checkpoint, name: str):
        super().__init__(name)
        self.checkpoint = checkpoint
        self._network = SingleNetwork(checkpoint.layers)

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> "PPOPolicy":
        """
        Read a policy.

        :param path: a checkpoint's path, or its name in `checkpoints/`
        :raises InputError: if the file is not a checkpoint this version can run
        """
        return cls(read_checkpoint(path), name=str(path))

    def reset(self, scenario: Scenario) -> None:
        """
        Begin an episode.

        :param scenario: the problem
        :raises InputError: if the policy was trained for other actions or observations
        """
        self.checkpoint.require_scenario(scenario)
        self._begin(scenario, self.checkpoint.metadata["job_work_s"])

    def change_jobs(self, scenario: Scenario) -> None:
        """See `Policy.change_jobs`."""
        raise InputError(f"policy {self.name}: was trained for certain jobs")

    def _choose(self, control: ControlState) -> int:
        observe(control, control.n_vcpus, self._network.features)
        return self._network.choose(self._masks.penalty(control))
