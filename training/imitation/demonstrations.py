"""What the expert demonstrates: its edit in every state that simulated machines come to."""

from typing import Any

import numpy as np
import numpy.typing as npt
from stable_baselines3 import PPO

from env.allocation import mask_of
from env.simulator.vector_env import ColocationVecEnv
from training.evaluation.schedule_search import Schedule, choices_of
from training.imitation.expert import expert_edits
from training.recipe import Imitation


class Demonstrations:
    """
    All demonstrations so far: a row for each decision of B machines.

    :param environments: the B machines, which play on from round to round
    :param imitation: how many rounds there are, and of how many decisions each
    """

    def __init__(self, environments: ColocationVecEnv, imitation: Imitation):
        self.environments, self.imitation = environments, imitation
        size, count = environments.factory.observation_size, environments.num_envs
        shape = (len(imitation.epochs) * imitation.n_steps, count)
        self.observations = np.empty((*shape, size), np.float32)
        self.edits = np.empty(shape, np.int64)
        self.rewards, self.ended = np.empty(shape, np.float32), np.empty(shape, bool)
        self.demonstrated = 0
        self._latest: Any = environments.reset()

    def demonstrate(
        self, schedule: Schedule, rng: np.random.Generator, student: PPO | None = None
    ) -> None:
        """
        Record a round of the expert's edits.

        Half of the machines do what it says, but for an edit at random now and then; the other
        half do so strictly, or play what a student thinks best.

        :param schedule: what the expert follows
        :param rng: says when an edit is drawn at random
        :param student: plays one half
        """
        environments, imitation = self.environments, self.imitation
        factory, half = environments.factory, environments.num_envs // 2
        choices = choices_of(environments.scenario)
        overflow = mask_of(environments.scenario.service.sets[-1])
        n_features = factory.observation_size - len(factory.table)
        observations = self._latest
        for step in range(self.demonstrated, self.demonstrated + imitation.n_steps):
            self.observations[step] = observations
            expert_edits(
                environments.hosts, factory.table.rows, schedule.jobs, schedule.order,
                schedule.late, schedule.threshold_qps, choices, overflow, imitation.release,
                imitation.unprobed, self.edits[step],
            )  # fmt: skip
            taken = self.edits[step].copy()
            if student is not None:
                taken[half:] = student.predict(observations[half:], deterministic=True)[0]
            astray = np.flatnonzero(rng.random(half) < imitation.random_edits)
            luck = rng.random((len(astray), len(factory.table)))
            taken[astray] = (luck * observations[astray, n_features:]).argmax(axis=1)
            observations, self.rewards[step], self.ended[step], _ = environments.step(taken)
        self.demonstrated += imitation.n_steps
        self._latest = observations

    def dataset(
        self,
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """
        All demonstrations so far.

        :return: observations float32[n, size]; the expert's edits int64[n]; the sum of the rewards
            to the episode's end float32[n], NaN where that was not seen
        """
        returns = np.empty((self.demonstrated, self.environments.num_envs), np.float32)
        later = np.full(returns.shape[1], np.nan, np.float32)
        for step in reversed(range(self.demonstrated)):
            later = self.rewards[step] + np.where(self.ended[step], 0.0, later)
            returns[step] = later
        observations = self.observations[: self.demonstrated]
        edits = self.edits[: self.demonstrated]
        return (
            observations.reshape(-1, observations.shape[2]),
            edits.reshape(-1),
            returns.reshape(-1),
        )
