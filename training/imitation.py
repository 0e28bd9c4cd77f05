"""
A warm start: before PPO learns from reward, the network imitates one good schedule.

The schedule comes from a search over training traces (`training.schedule_search`). An expert
follows it edit by edit on hosts of every kind the recipe asks for, and from states that the
schedule would not have led to, too; the network learns to say what the expert says, and what a
state is worth from what became of it. PPO then improves on both.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3 import PPO
from torch import nn

from env import action
from env.allocation import Weight, mask_of
from env.simulator.compiled import compiled
from env.simulator.load import trace_seeds
from env.simulator.machine import EpisodeFactory
from env.simulator.vector_env import ColocationVecEnv
from training.episodes import Start
from training.schedule_search import (
    AFTER,
    CORES,
    DONE,
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
N_STEPS = 2500
"""Decisions of each environment to learn from: some two episodes."""

ASTRAY = 0.05
"""How often an edit is drawn at random instead, in half of the environments."""

N_EPOCHS = 6
BATCH_SIZE = 4096
LEARNING_RATE = 0.001

CALM = 0.93
"""Part of the schedule's threshold below which the expert takes vCPUs from memcached again."""

CAREFUL = 0.75
"""What becomes of that threshold once the probe has shown that this machine breaks the SLO."""

KEEP, SERVICE, START, PLACE = action.KEEP, action.SERVICE, action.START, action.PLACE
PENDING = action.PENDING
NORMAL, BACKGROUND = int(Weight.NORMAL), int(Weight.BACKGROUND)


@compiled
def legal_edit(h, rows, kind, job, cores, weight, threads):
    """The edit of that description, or `KEEP` where it is none or cannot be carried out."""
    for edit in range(rows.shape[0]):
        same = rows[edit, 0] == kind and rows[edit, 1] == job
        same &= kind == START or rows[edit, 2] == cores
        same &= kind != PLACE or rows[edit, 3] == weight
        same &= kind != START or rows[edit, 4] == threads
        if same and action.is_legal(h, rows, edit):
            return edit
    return KEEP


@compiled
def expert_edit(h, rows, jobs, order, late, threshold_qps, least, most, overflow):
    """
    The edit that brings a host nearer to a schedule; see `training.schedule_search.Schedule`.

    The schedule was found with the profile's physics. On a machine whose probe has shown the SLO
    broken, memcached gets its vCPUs sooner; where it was broken although memcached had its refuge,
    it gets more than that, and nothing shares its vCPUs.

    :param h: a host row
    :param rows: int64[n_edits, 7], see `env.action.EditTable`
    :param least: memcached's smallest set, a bit mask as the next two
    :param most: its refuge
    :param overflow: its largest set
    :return: index of the edit
    """
    if h.worst_p95_us > h.slo_us:
        threshold_qps *= CAREFUL
    strained = h.refuge_p95_us > h.slo_us
    if strained:
        most = overflow
    service = h.wish_service
    if h.qps > threshold_qps:
        service = most
    elif h.qps < CALM * threshold_qps:
        service = least
    if service != h.wish_service:
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
    starts = [Start(trace, seed) for trace in trace_seeds(seed, SEARCH_TRACES, "training")]
    rng = np.random.default_rng([seed, SEARCH_TRACES])
    return general_schedule(factory, starts, SEARCH_EVALUATIONS, rng)


def demonstrate(
    environments: ColocationVecEnv, schedule: Schedule, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """
    Let the expert play.

    :param environments: B machines
    :param schedule: what it follows
    :param rng: says when an edit is drawn at random
    :return: observations float32[n, size]; the expert's edits int64[n]; the sum of the rewards to
        the episode's end float32[n], NaN where that was not seen
    """
    factory, count = environments.factory, environments.num_envs
    service = environments.scenario.service
    sets = (service.core_choices[0], service.core_choices[-1], service.sets[-1])
    least, most, overflow = map(mask_of, sets)
    observations = np.empty((N_STEPS, count, factory.observation_size), np.float32)
    edits = np.empty((N_STEPS, count), np.int64)
    rewards, ended = np.empty((N_STEPS, count), np.float32), np.empty((N_STEPS, count), bool)
    n_features = factory.observation_size - len(factory.table)
    looks: Any = environments.reset()
    for step in range(N_STEPS):
        observations[step] = looks
        expert_edits(
            environments.hosts, factory.table.rows, schedule.jobs, schedule.order, schedule.late,
            schedule.threshold_qps, least, most, overflow, edits[step],
        )  # fmt: skip
        taken = edits[step].copy()
        astray = np.flatnonzero(rng.random(count // 2) < ASTRAY)
        luck = rng.random((len(astray), len(factory.table))) * looks[astray, n_features:]
        taken[astray] = luck.argmax(axis=1)
        looks, rewards[step], ended[step], _ = environments.step(taken)
    returns = np.empty_like(rewards)
    later = np.full(count, np.nan, np.float32)
    for step in reversed(range(N_STEPS)):
        later = rewards[step] + np.where(ended[step], 0.0, later)
        returns[step] = later
    size = factory.observation_size
    return observations.reshape(-1, size), edits.reshape(-1), returns.reshape(-1)


def imitate(model: PPO, environments: ColocationVecEnv, schedule: Schedule, seed: int) -> None:
    """
    Teach a fresh model a schedule.

    :param model: what learns
    :param environments: where the expert plays
    :param schedule: what it follows
    :param seed: of the expert's slips and the order of the minibatches
    """
    rng = np.random.default_rng([seed, N_STEPS])
    observations, edits, returns = map(torch.from_numpy, demonstrate(environments, schedule, rng))
    policy = model.policy
    with torch.no_grad():
        policy.value_net.bias.fill_(returns.nanmean())
    optimiser = torch.optim.Adam(policy.parameters(), LEARNING_RATE)
    policy.set_training_mode(True)
    for rows in minibatches(len(edits), rng):
        values, log_prob, _ = policy.evaluate_actions(observations[rows], edits[rows])
        known = ~returns[rows].isnan()
        value_loss = nn.functional.mse_loss(values.flatten()[known], returns[rows][known])
        loss = model.vf_coef * value_loss - log_prob.mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), model.max_grad_norm)
        optimiser.step()


def minibatches(count: int, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Indices of all minibatches of all epochs."""
    for _ in range(N_EPOCHS):
        order = torch.from_numpy(rng.permutation(count))
        yield from order.split(BATCH_SIZE)
