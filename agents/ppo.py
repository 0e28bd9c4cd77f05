"""The trained PPO policy, run with NumPy: what the live agent executes."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from agents.checkpoint import Checkpoint, read_checkpoint
from env.action import (
    MOVE_BIT,
    PAUSE_BIT,
    PLACE,
    RESUME_BIT,
    SERVICE,
    START_BIT,
    apply_edit,
    edit_table,
    job_readiness,
    may_keep,
    resolve_sets,
    strike_out,
)
from env.allocation import Allocation, JobAllocation, JobState, cores_of, mask_of
from env.control import STATES, WEIGHTS, ControlState
from env.observation import observe, remember, shift_history
from env.regulator import regulate_jobs, regulate_service
from env.scenario import Scenario
from env.telemetry import Telemetry


class MaskedNetwork:
    """
    The deterministic policy: the legal action with the largest logit.

    :param layers: (weight float32[out, in], bias float32[out]) of each layer, ReLU between them
    """

    def __init__(self, layers: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]):
        self._layers = layers

    def logits(self, features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """float32[..., n_features] to float32[..., n_actions], not masked."""
        *hidden, (weight, bias) = self._layers
        for inner_weight, inner_bias in hidden:
            features = np.maximum(features @ inner_weight.T + inner_bias, 0.0)
        return features @ weight.T + bias

    def act(self, observation: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """
        The best legal action.

        :param observation: float32[..., n_features + n_actions], the mask at its end
        :raises ValueError: if the network's output is not finite
        """
        n_features = self._layers[0][0].shape[1]
        logits = self.logits(observation[..., :n_features])
        best = np.where(observation[..., n_features:] > 0.5, logits, -np.inf).argmax(axis=-1)
        if not np.isfinite(logits).all():
            raise ValueError("the network's output is not finite")
        return best


class EditMask:
    """
    `env.action.legal_edits` over whole columns at once, which is ten times as fast uncompiled.

    :param rows: int64[n_edits, 10], see `env.action.EditTable`
    """

    def __init__(self, rows: npt.NDArray[np.int64]):
        self._rows = rows.astype(object)
        self._bits = [
            np.ascontiguousarray(rows[:, column])
            for column in (START_BIT, MOVE_BIT, RESUME_BIT, PAUSE_BIT)
        ]
        self._open = rows[:, 0] <= SERVICE

    def write(self, control: ControlState, legal: npt.NDArray[np.float32]) -> None:
        """
        Mark the edits that can be carried out now and change something.

        :param control: a control row
        :param legal: float32[n_edits], receives 1.0 or 0.0
        """
        *can, running = job_readiness(control)
        can_start, can_move, can_resume, _ = can
        gates = self._bits[0] & can_start
        for bits, ready in zip(self._bits[1:], can[1:], strict=True):
            gates |= bits & ready
        np.logical_or(gates, self._open, out=legal, casting="unsafe")
        keep = may_keep(can_start, can_resume, running)
        strike_out(control, self._rows, legal, can_move, keep)


class PPOPolicy:
    """
    A trained policy behind the `Policy` protocol.

    It keeps a control row of its own, run by the same functions as the simulator's: the
    observation, the edits and the regulator's effect on both.

    :param checkpoint: what to run
    """

    wakes = True
    regulated = True
    probe_window_s = 0.0

    def __init__(self, checkpoint: Checkpoint, name: str):
        self.name = name
        self.checkpoint = checkpoint
        self.network = MaskedNetwork(checkpoint.layers)
        self.period_s = 0.0

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

        :raises InputError: if the policy was trained for other actions or observations
        """
        self.checkpoint.require_scenario(scenario)
        self._scenario = scenario
        rows = edit_table(scenario).rows
        self._rows = rows.astype(object)  # of Python's own numbers, which are faster one by one
        self._control = ControlState.initial(scenario, self.checkpoint.metadata["job_work_s"])
        n_features = self.checkpoint.metadata["features"]
        self._row = np.zeros(n_features + len(rows), np.float32)
        self._features, self._legal = self._row[:n_features], self._row[n_features:]
        self._mask = EditMask(rows)
        self._first = True
        self._seen: Allocation | None = None
        self._wished: tuple[tuple[int, ...], ...] = ()
        self._wish_value: Allocation | None = None

    def decide(self, telemetry: Telemetry) -> Allocation:
        """Observe, choose an edit and return the allocation it leads to."""
        control = self._control
        self._read(telemetry)
        if telemetry.applied is not self._seen:
            self._seen = telemetry.applied
            self._adopt(telemetry.applied)
        if self._first:
            control.settled_qps = control.qps
            self._first = False
        else:
            remember(control)
        observe(control, self._features)
        self._mask.write(control, self._legal)
        apply_edit(control, self._rows, int(self.network.act(self._row)))
        wished_service = control.wish_service
        regulate_service(control)
        resolve_sets(control)
        allocation = self._wish(wished_service)
        regulate_jobs(control)
        shift_history(control)
        loop = self._scenario.control
        self.period_s = loop.hold_s if control.kept else loop.period_s
        return allocation

    def _read(self, telemetry: Telemetry) -> None:
        control = self._control
        control.now_s = telemetry.time_s
        control.qps = telemetry.service.qps
        control.cpu_cores = telemetry.service.cpu_cores
        for index, name in enumerate(self._scenario.job_names):
            job = telemetry.jobs[name]
            control.job_state[index] = int(job.state)
            control.job_cpu_s[index] = job.cpu_s

    def _adopt(self, applied: Allocation) -> None:
        """
        Take over what is really applied where it is not what this policy wished.

        That happens after somebody else has decided, or when jobs run already at the beginning.
        """
        control = self._control
        service = mask_of(applied.service_cores)
        if service != control.service:
            control.service = control.wish_service = service
        everything = (1 << control.n_vcpus) - 1
        for index, name in enumerate(self._scenario.job_names):
            job = applied.jobs[name]
            state, cores = int(job.state), mask_of(job.cores)
            known = (control.state[index], control.cores[index], control.weight[index])
            if known == (state, cores, job.weight) or state == JobState.DONE:
                continue
            control.state[index] = control.wish_state[index] = state
            if state == JobState.PENDING:
                control.wish_place[index] = -1
                continue
            control.cores[index] = control.wish_cores[index] = cores
            control.weight[index] = control.wish_weight[index] = int(job.weight)
            control.threads[index] = control.wish_threads[index] = job.threads
            control.wish_set[index] = cores or everything
            control.wish_place[index] = self._place_of(index, cores, int(job.weight))

    def _place_of(self, job: int, cores: int, weight: int) -> int:
        """The edit that names a place, or -1."""
        rows = self._rows
        same = (rows[:, 0] == PLACE) & (rows[:, 1] == job)
        same &= (rows[:, 2] == cores) & (rows[:, 3] == weight)
        found = np.flatnonzero(same)
        return int(found[0]) if len(found) else -1

    def _wish(self, service: int) -> Allocation:
        """The wish as a value; the same object as long as it stays the same."""
        control = self._control
        wished = (
            (service,),
            tuple(control.wish_state),
            tuple(control.wish_cores),
            tuple(control.wish_weight),
            tuple(control.wish_threads),
        )
        if self._wish_value is None or wished != self._wished:
            self._wished = wished
            # A job whose set memcached holds whole is for the regulator to stop.
            everything = (1 << control.n_vcpus) - 1
            jobs = {
                name: JobAllocation(
                    STATES[state], cores_of(cores or everything), WEIGHTS[weight], threads
                )
                for name, state, cores, weight, threads in zip(
                    self._scenario.job_names, *wished[1:], strict=True
                )
            }
            self._wish_value = Allocation(cores_of(service), jobs)
        return self._wish_value
