"""
Imitation for many scenarios at once: a teacher for each, one network that follows them all.

In rounds, as in `training.imitation`: first the teachers play, then the network does on half of the
machines, and its teacher says what it should have done (DAgger). Nine decisions of ten keep; of
those only some are learned from, at the weight of all.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from env.allocation import mask_of
from env.sets.pointers import legal_slots
from env.simulator.machine import EpisodeFactory
from training.evaluation.schedule_search import Schedule
from training.general.attention_policy import AttentionPolicy
from training.general.machines import Group, MixedVecEnv
from training.imitation.expert import expert_edits, find_schedule
from training.imitation.fit_network import minibatches
from training.recipe import Imitation

KEPT = 0.15
"""Share of the decisions to keep that are learned from."""

VALUE_WEIGHT = 0.05
"""Of the squared error of the value; the policy's loss is a log-probability."""


class Teacher:
    """
    A schedule, followed edit by edit on the machines of a group (`training.imitation.expert`).

    :param schedule: what it follows
    :param group: the machines
    :param imitation: how it follows
    """

    def __init__(self, schedule: Schedule, group: Group, imitation: Imitation):
        self.group, self._schedule = group, schedule
        service = group.scenario.service
        sets = (service.core_choices[0], service.core_choices[-1], service.sets[-1])
        self._sets = [mask_of(cores) for cores in sets]
        self._imitation = imitation
        self._edits = np.zeros(len(group.hosts), np.int64)

    def slots(self) -> np.ndarray:
        """What each machine should do now, int64[n]."""
        schedule, group, imitation = self._schedule, self.group, self._imitation
        expert_edits(
            group.hosts, group.tokens.edits.rows, schedule.jobs, schedule.order, schedule.late,
            schedule.threshold_qps, *self._sets, imitation.release, imitation.unprobed,
            self._edits,
        )  # fmt: skip
        return group.tokens.slot_of[self._edits]


def find_teachers(
    environments: MixedVecEnv, seed: int, imitation: Imitation
) -> tuple[list[float], list[Teacher]]:
    """
    A teacher for each scenario, by a search without drawn physics.

    :param environments: the machines
    :param seed: of the searches
    :param imitation: how long they are
    :return: the mean makespans of the schedules on the traces of the search [s], and the teachers
    """
    makespans_s, teachers = [], []
    for group in environments.groups:
        factory = EpisodeFactory(group.scenario)
        makespan_s, schedule = find_schedule(factory, seed, imitation)
        makespans_s.append(makespan_s)
        teachers.append(Teacher(schedule, group, imitation))
    return makespans_s, teachers


def imitate(
    policy: AttentionPolicy,
    environments: MixedVecEnv,
    teachers: Sequence[Teacher],
    seed: int,
    imitation: Imitation,
) -> None:
    """
    Fit a fresh policy to the teachers, round by round.

    :param policy: what learns
    :param environments: the machines that they play on
    :param teachers: one for each group of machines
    :param seed: of slips and the order of minibatches
    :param imitation: how long, and with which hyperparameters
    """
    rng = np.random.default_rng([seed, imitation.n_steps])
    observations: Any = environments.reset()
    chosen: list[list[np.ndarray]] = [[], [], [], []]
    count, each = environments.num_envs, environments.each
    students = np.arange(count) % each < each // 2
    for turn, epochs in enumerate(imitation.epochs):
        shape = (imitation.n_steps, count)
        rewards, ended = np.empty(shape, np.float32), np.empty(shape, bool)
        picked = np.empty(shape, bool)
        for step in range(imitation.n_steps):
            told = np.concatenate([teacher.slots() for teacher in teachers])
            picked[step] = (told != 0) | (rng.random(count) < KEPT)
            chosen[0].append(observations[picked[step]])
            chosen[1].append(told[picked[step]])
            taken = told.copy()
            if turn:
                taken[students] = policy.best(observations[students])
            astray = ~students & (rng.random(count) < imitation.random_edits)
            for index in np.flatnonzero(astray).tolist():
                group, own = environments.groups[index // each], index % each
                taken[index] = random_slot(group, own, observations[index], rng)
            observations, rewards[step], ended[step], _ = environments.step(taken)
        returns, later = np.empty(shape, np.float32), np.full(count, np.nan, np.float32)
        for step in reversed(range(imitation.n_steps)):
            later = rewards[step] + np.where(ended[step], np.float32(0.0), later)
            returns[step] = later
        chosen[2] += [row[some] for row, some in zip(returns, picked, strict=True)]
        data = [np.concatenate(part) for part in chosen[:3]]
        seen = data[2][~np.isnan(data[2])]
        if turn == 0 and len(seen):
            with torch.no_grad():
                policy.network.value.bias.fill_(float(seen.mean()))
        fit(policy, data, epochs, rng, imitation)


def random_slot(group: Group, index: int, tokens: np.ndarray, rng: np.random.Generator) -> np.int64:
    """
    A legal slot at random.

    :param group: the machines
    :param index: of the machine
    :param tokens: float32[size], what it shows
    :param rng: the source
    """
    legal = np.zeros(len(group.tokens.layout.slots), np.float32)
    legal_slots(tokens, group.offsets, legal)
    return np.int64(rng.choice(np.flatnonzero(legal)))


def fit(
    policy: AttentionPolicy,
    data: list[np.ndarray],
    epochs: int,
    rng: np.random.Generator,
    imitation: Imitation,
) -> None:
    """
    Fit the policy to all demonstrations so far.

    :param policy: what learns
    :param data: tokens float32[n, size], slots int64[n], returns float32[n], NaN where unknown
    :param epochs: passes over them
    :param rng: of the order
    :param imitation: its hyperparameters
    """
    observations, slots, returns = map(torch.from_numpy, data)
    weights = torch.where(slots == 0, 1.0 / KEPT, 1.0)
    weights /= weights.mean()
    optimiser = torch.optim.Adam(policy.network.parameters(), imitation.learning_rate)
    batches = list(minibatches(len(slots), epochs, imitation.batch_size, rng))
    decay = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, len(batches))
    policy.set_training_mode(True)
    for rows in batches:
        values, log_probs, _ = policy.evaluate_actions(observations[rows], slots[rows])
        assert log_probs is not None
        known = ~returns[rows].isnan()
        errors = (values[:, 0] - returns[rows])[known]
        value_loss = (errors * errors).sum() / max(len(errors), 1)
        loss = VALUE_WEIGHT * value_loss - (weights[rows] * log_probs).mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.network.parameters(), 1.0)
        optimiser.step()
        decay.step()
    policy.set_training_mode(False)
