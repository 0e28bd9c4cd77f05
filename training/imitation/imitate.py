"""
A warm start: before PPO learns from reward, the network imitates one good schedule.

The schedule comes from a search over training traces (`training.evaluation.schedule_search`). An
expert follows it edit by edit on hosts of every kind the recipe asks for, and from states that the
schedule would not have led to, too; the network learns to say what the expert says, and what a
state is worth from what became of it. Then the network plays, and the expert says what it should
have done: so it learns the states that its own slips lead to (DAgger: Ross, Gordon, Bagnell 2011).
PPO then improves on both.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3 import PPO
from torch import nn

from env import action
from env.allocation import mask_of
from env.codes import BACKGROUND, DONE, KEEP, NORMAL, PENDING, PLACE, SERVICE, START
from env.observation import WORST
from env.physics.compiled import compiled
from env.simulator.load import trace_seeds
from env.simulator.machine import EpisodeFactory
from env.simulator.vector_env import ColocationVecEnv
from training.evaluation.episodes import EpisodeStart
from training.evaluation.schedule_search import (
    AFTER,
    CORES,
    LATE_CORES,
    LATE_WEIGHT,
    THREADS,
    WEIGHT,
    Schedule,
    general_schedule,
)

SEARCH_TRACES = 12
SEARCH_EVALUATIONS = 9000

N_ENVS = 256
N_STEPS = 1500
"""Decisions of each environment in one round: somewhat more than an episode."""

ASTRAY = 0.05
"""How often an edit is drawn at random instead, in half of the environments."""

N_EPOCHS = (4, 4, 8)
"""Passes in each round; from the second on the network plays."""

BATCH_SIZE = 4096
LEARNING_RATE = 0.001
"""Adam's step size at the start of a round; falls linearly to 0."""

CALM = 0.93
"""Part of the schedule's threshold below which the expert takes vCPUs from memcached again."""

UNSEEN = 0.65
"""What becomes of the schedule's threshold where no probe shows whether the SLO holds: room for one
vCPU, and for what a second one adds, that both serve 20 % less than the profile says."""


@compiled
def legal_edit(h, rows, kind, job, cores, weight, threads):
    """The edit of that description, or `KEEP` where it is none or cannot be carried out."""
    for edit in range(rows.shape[0]):
        same = rows[edit, action.KIND] == kind and rows[edit, action.JOB] == job
        same &= kind == START or rows[edit, action.CORES] == cores
        same &= kind != PLACE or rows[edit, action.WEIGHT] == weight
        same &= kind != START or rows[edit, action.THREADS] == threads
        if same and action.is_legal(h, rows, edit):
            return edit
    return KEEP


@compiled
def expert_edit(h, rows, jobs, order, late, threshold_qps, least, most, overflow):
    """
    The edit that brings a host nearer to a `Schedule`.

    The schedule was found with the profile's physics. Without a probe memcached gets its vCPUs
    sooner (`UNSEEN`); on a machine whose probe has shown the SLO broken, the threshold falls as the
    worst reading rises, as far as an observation shows it. Where the SLO was broken although
    memcached had its refuge, it gets more than that, and nothing shares its vCPUs.

    :param h: a host row
    :param rows: int64[n_edits, 7], see `env.action.EditTable`
    :param jobs: the schedule's, as the next three
    :param order: in which jobs that may start do so
    :param late: the jobs' last places are for when so many are unfinished, or fewer
    :param threshold_qps: load above which memcached holds its refuge
    :param least: memcached's smallest set, a bit mask as the next two
    :param most: its refuge
    :param overflow: its largest set
    :return: index of the edit
    """
    if h.probed_p95_us <= 0.0:
        threshold_qps *= UNSEEN
    elif h.worst_p95_us > h.slo_us:
        threshold_qps *= max(h.slo_us / h.worst_p95_us, 1.0 / WORST)
    strained = h.refuge_p95_us > h.slo_us
    if strained:
        most = overflow
    service = h.desired_service
    if h.qps > threshold_qps:
        service = most
    elif h.qps < CALM * threshold_qps:
        service = least
    if service != h.desired_service:
        edit = legal_edit(h, rows, SERVICE, 0, service, 0, 0)
        if edit != KEEP:
            return edit
    unfinished = 0
    for job in range(jobs.shape[0]):
        if h.job_state[job] != DONE:
            unfinished += 1
    left = ((1 << h.n_vcpus) - 1) & ~h.service  # a normal job needs some of it, or is held paused
    cores, weight = (LATE_CORES, LATE_WEIGHT) if unfinished <= late else (CORES, WEIGHT)
    for position in range(order.shape[0]):
        job = order[position]
        if h.job_state[job] == DONE:
            continue
        if h.state[job] == PENDING:
            before = jobs[job, AFTER]
            if before < 0 or h.job_state[before] == DONE:
                edit = legal_edit(h, rows, START, job, 0, 0, jobs[job, THREADS])
                if edit != KEEP:
                    return edit
            continue
        where, how = jobs[job, cores], jobs[job, weight]
        if strained and how == BACKGROUND:
            where, how = (1 << h.n_vcpus) - 1, NORMAL
        if left != 0 or how == BACKGROUND:
            edit = legal_edit(h, rows, PLACE, job, where, how, 0)
            if edit != KEEP:
                return edit
    return KEEP


@compiled
def expert_edits(hosts, rows, jobs, order, late, threshold_qps, least, most, overflow, edits):
    """`expert_edit` of each of B hosts, into int64[B]."""
    for b in range(hosts.shape[0]):
        edits[b] = expert_edit(
            hosts[b], rows, jobs, order, late, threshold_qps, least, most, overflow
        )


def find_schedule(factory: EpisodeFactory, seed: int) -> tuple[float, Schedule]:
    """
    The schedule to imitate: good on training traces, with the profile's physics.

    :param factory: the problem as the profile has it
    :param seed: of the training run
    :return: its mean makespan on those traces [s], and the schedule
    """
    starts = [EpisodeStart(trace, seed) for trace in trace_seeds(seed, SEARCH_TRACES, "training")]
    rng = np.random.default_rng([seed, SEARCH_TRACES])
    return general_schedule(factory, starts, SEARCH_EVALUATIONS, rng)


class Demonstrations:
    """
    What the expert has said so far: one row for each decision of B machines.

    :param environments: the B machines, which play on from round to round
    :param rounds: how many rounds of `N_STEPS` decisions there is room for
    """

    def __init__(self, environments: ColocationVecEnv, rounds: int):
        self.environments = environments
        size, count = environments.factory.observation_size, environments.num_envs
        shape = (rounds * N_STEPS, count)
        self.observations = np.empty((*shape, size), np.float32)
        self.edits = np.empty(shape, np.int64)
        self.rewards, self.ended = np.empty(shape, np.float32), np.empty(shape, bool)
        self.taught = 0
        self._looks: Any = environments.reset()

    def teach(
        self, schedule: Schedule, rng: np.random.Generator, student: PPO | None = None
    ) -> None:
        """
        Let the expert speak for a round.

        Half of the machines do what it says, but for an edit at random now and then; the other
        half do so strictly, or play what a student thinks best.

        :param schedule: what the expert follows
        :param rng: says when an edit is drawn at random
        :param student: who plays one half
        """
        environments = self.environments
        factory, half = environments.factory, environments.num_envs // 2
        service = environments.scenario.service
        sets = (service.core_choices[0], service.core_choices[-1], service.sets[-1])
        least, most, overflow = map(mask_of, sets)
        n_features = factory.observation_size - len(factory.table)
        looks = self._looks
        for step in range(self.taught, self.taught + N_STEPS):
            self.observations[step] = looks
            expert_edits(
                environments.hosts, factory.table.rows, schedule.jobs, schedule.order,
                schedule.late, schedule.threshold_qps, least, most, overflow, self.edits[step],
            )  # fmt: skip
            taken = self.edits[step].copy()
            if student is not None:
                taken[half:] = student.predict(looks[half:], deterministic=True)[0]
            astray = np.flatnonzero(rng.random(half) < ASTRAY)
            luck = rng.random((len(astray), len(factory.table))) * looks[astray, n_features:]
            taken[astray] = luck.argmax(axis=1)
            looks, self.rewards[step], self.ended[step], _ = environments.step(taken)
        self.taught += N_STEPS
        self._looks = looks

    def read(
        self,
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """
        All demonstrations so far.

        :return: observations float32[n, size]; the expert's edits int64[n]; the sum of the rewards
            to the episode's end float32[n], NaN where that was not seen
        """
        returns = np.empty((self.taught, self.environments.num_envs), np.float32)
        later = np.full(returns.shape[1], np.nan, np.float32)
        for step in reversed(range(self.taught)):
            later = self.rewards[step] + np.where(self.ended[step], 0.0, later)
            returns[step] = later
        observations = self.observations[: self.taught]
        edits = self.edits[: self.taught]
        return (
            observations.reshape(-1, observations.shape[2]),
            edits.reshape(-1),
            returns.reshape(-1),
        )


def imitate(
    model: PPO,
    environments: ColocationVecEnv,
    schedule: Schedule,
    seed: int,
    epochs: tuple[int, ...] = N_EPOCHS,
) -> None:
    """
    Teach a fresh model a schedule.

    :param model: what learns
    :param environments: where the expert shows it, and the model tries
    :param schedule: what the expert follows
    :param seed: of the expert's slips and the order of the minibatches
    :param epochs: passes over all that was shown so far, in each round
    """
    rng = np.random.default_rng([seed, N_STEPS])
    demonstrations = Demonstrations(environments, len(epochs))
    demonstrations.teach(schedule, rng)
    with torch.no_grad():
        model.policy.value_net.bias.fill_(float(np.nanmean(demonstrations.read()[2])))
    learn(model, demonstrations, epochs[0], rng)
    for passes in epochs[1:]:
        demonstrations.teach(schedule, rng, model)
        learn(model, demonstrations, passes, rng)


def learn(
    model: PPO, demonstrations: Demonstrations, epochs: int, rng: np.random.Generator
) -> None:
    """
    Fit a model to all demonstrations so far.

    :param model: its policy to the edits, its value to the returns
    :param demonstrations: what was shown
    :param epochs: passes over the demonstrations
    :param rng: of the order of the minibatches
    """
    observations, edits, returns = map(torch.from_numpy, demonstrations.read())
    policy = model.policy
    optimiser = torch.optim.Adam(policy.parameters(), LEARNING_RATE)
    batches = list(minibatches(len(edits), epochs, rng))
    decay = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, len(batches))
    policy.set_training_mode(True)
    for rows in batches:
        values, log_prob, _ = policy.evaluate_actions(observations[rows], edits[rows])
        known = ~returns[rows].isnan()
        value_loss = nn.functional.mse_loss(values.flatten()[known], returns[rows][known])
        loss = model.vf_coef * value_loss - log_prob.mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), model.max_grad_norm)
        optimiser.step()
        decay.step()


def minibatches(count: int, epochs: int, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Indices of all minibatches of all epochs."""
    for _ in range(epochs):
        order = torch.from_numpy(rng.permutation(count))
        yield from order.split(BATCH_SIZE)
