"""The trained PPO policy, run with NumPy: what the live agent executes."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from agents.checkpoint import Checkpoint, read_checkpoint
from env.action import apply_edit, edit_table, legal_edits, resolve_sets
from env.allocation import Allocation, JobAllocation, JobState, Weight, cores_of
from env.control import ControlState
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
        """
        n_features = self._layers[0][0].shape[1]
        logits = self.logits(observation[..., :n_features])
        return np.where(observation[..., n_features:] > 0.5, logits, -np.inf).argmax(axis=-1)


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
        self._rows = edit_table(scenario).rows
        self._control = ControlState.initial(scenario, self.checkpoint.metadata["job_work_s"])
        n_features = self.checkpoint.metadata["features"]
        self._row = np.zeros(n_features + len(self._rows), np.float32)
        self._features, self._legal = self._row[:n_features], self._row[n_features:]
        self._first = True

    def decide(self, telemetry: Telemetry) -> Allocation:
        """Observe, choose an edit and return the allocation it leads to."""
        control = self._control
        self._read(telemetry)
        if self._first:
            control.settled_qps = control.qps
            self._first = False
        else:
            remember(control)
        observe(control, self._features)
        legal_edits(control, self._rows, self._legal)
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

    def _wish(self, service: int) -> Allocation:
        control = self._control
        jobs = {
            name: JobAllocation(
                state=JobState(int(control.wish_state[index])),
                cores=cores_of(int(control.wish_cores[index])),
                weight=Weight(int(control.wish_weight[index])),
                threads=int(control.wish_threads[index]),
            )
            for index, name in enumerate(self._scenario.job_names)
        }
        return Allocation(cores_of(int(service)), jobs)
