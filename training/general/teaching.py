"""
Imitation for many scenarios at once: teachers for each, one network that follows them all.

A scenario's teachers are as good as each other, but what one moves another may move back. So those
are followed that have the fewest edits left to where they want the host, and any of these is right:
it brings the host nearer, and where one of them would keep, all do. In rounds, as in
`training.imitation`: first the teachers play, then the network does on half of the machines, and
its teachers say what it should have done (DAgger). Nine decisions of ten keep; of those only some
are learned from.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from env.codes import KEEP
from env.physics.compiled import compiled
from env.sets.pointers import legal_slots
from env.simulator.thread_pool import ThreadPool
from training.general.attention_policy import AttentionPolicy
from training.general.fitting import Fitting, any_of, fitting_device
from training.general.machines import Machines, stacked
from training.general.mixed_env import MixedVecEnv
from training.imitation.expert import expert_edit
from training.imitation.fit_network import minibatches
from training.recipe import Imitation

KEPT = 0.15
"""Share of the decisions to keep that are learned from."""

KEEPING_COUNTS = 0.4
"""What a decision to keep counts beside an edit. Who keeps where the teacher would have started a
job keeps again at the next poll; who edits where it would have kept loses little."""

VALUE_WEIGHT = 0.05
"""Of the squared error of the value; the policy's loss is a log-probability."""


@compiled
def teach_batch(
    hosts, playing, rows, n_edits, jobs, n_jobs, order, late, threshold_qps, at_once, front,
    interrupts, n_schedules, choices, n_choices, overflow, release, unprobed, edits,
):  # fmt: skip
    """
    What the teachers of each host's scenario would do (`training.imitation.expert.expert_edit`).

    A schedule that has more edits left than another to where it wants the host does as that one.

    :param hosts: structured array[B]
    :param playing: int64[B], the scenario of each host
    :param rows: int64[S, most_edits, 7]
    :param n_edits: int64[S]
    :param jobs: int64[S, K, most_jobs, 6], see `training.evaluation.schedule_search.Schedule`
    :param n_jobs: int64[S]
    :param order: int64[S, K, most_jobs]
    :param late: int64[S, K]
    :param threshold_qps: float64[S, K]
    :param at_once: int64[S, K]
    :param front: int64[S, K]
    :param interrupts: bool[S, K]
    :param n_schedules: int64[S], how many of the K there are
    :param choices: int64[S, most_choices, 2]
    :param n_choices: int64[S]
    :param overflow: int64[S], bit masks
    :param release: see `training.recipe.Imitation`, as the next
    :param unprobed: factor on the threshold while there is no probe
    :param edits: int64[B, K], receives the edits; with fewer schedules the nearest's once more
    """
    for b in range(hosts.shape[0]):
        s, nearest, fewest = playing[b], KEEP, 0
        for k in range(n_schedules[s]):
            edits[b, k], remaining = expert_edit(
                hosts[b], rows[s, : n_edits[s]], jobs[s, k, : n_jobs[s]], order[s, k, : n_jobs[s]],
                late[s, k], threshold_qps[s, k], at_once[s, k], front[s, k], interrupts[s, k],
                choices[s, : n_choices[s]], overflow[s], release, unprobed,
            )  # fmt: skip
            if k == 0 or remaining < fewest:
                nearest, fewest = edits[b, k], remaining
                edits[b, :k] = nearest
            elif remaining > fewest:
                edits[b, k] = nearest
        edits[b, n_schedules[s] :] = nearest


class Teachers:
    """
    The schedules of all setups, followed edit by edit.

    :param machines: that play them
    :param imitation: how they are followed
    :param threads: that ask them
    """

    def __init__(self, machines: Machines, imitation: Imitation, threads: int = 1):
        self._machines, self._imitation = machines, imitation
        count = len(machines.hosts)
        self._pool = ThreadPool(threads)
        piece = -(-count // (2 * threads))
        self._pieces = [slice(start, start + piece) for start in range(0, count, piece)]
        setups = machines.setups
        schedules = [setup.schedules for setup in setups]
        n_jobs = [len(some[0].jobs) for some in schedules]
        shape = (len(setups), max(map(len, schedules)))
        jobs = np.zeros((*shape, max(n_jobs), 6), np.int64)
        orders = np.zeros(jobs.shape[:3], np.int64)
        late, at_once, front = np.zeros((3, *shape), np.int64)
        threshold_qps, interrupts = np.zeros(shape), np.zeros(shape, bool)
        for s, some in enumerate(schedules):
            for k, one in enumerate(some):
                jobs[s, k, : n_jobs[s]], orders[s, k, : n_jobs[s]] = one.jobs, one.order
                late[s, k], at_once[s, k], front[s, k] = one.late, one.at_once, one.front
                threshold_qps[s, k], interrupts[s, k] = one.threshold_qps, one.interrupts
        choices = [setup.choices for setup in setups]
        self._tables = (
            jobs, np.array(n_jobs), orders, late, threshold_qps, at_once, front, interrupts,
            np.array([len(some) for some in schedules]), stacked(choices),
            np.array([len(one) for one in choices]), np.array([setup.overflow for setup in setups]),
        )  # fmt: skip
        self._edits = np.zeros((len(machines.hosts), shape[1]), np.int64)

    def slots(self) -> np.ndarray:
        """What each machine might do now, int64[B, K]: the edits of the nearest schedules."""
        machines, imitation = self._machines, self._imitation

        def teach(some: slice) -> None:
            teach_batch(
                machines.hosts[some], machines.playing[some], machines.rows, machines.n_edits,
                *self._tables, imitation.release, imitation.unprobed, self._edits[some],
            )  # fmt: skip

        self._pool.share(teach, self._pieces)
        return machines.slot_of[machines.playing[:, None], self._edits]


def imitate(
    policy: AttentionPolicy, environments: MixedVecEnv, seed: int, imitation: Imitation
) -> None:
    """
    Fit a fresh policy to the teachers, round by round, from small scenarios to all.

    :param policy: what learns
    :param environments: the machines that teachers and policy play on
    :param seed: of slips and the order of minibatches
    :param imitation: how long, and with which hyperparameters
    """
    rng = np.random.default_rng([seed, imitation.n_steps])
    teachers = Teachers(environments.machines, imitation, torch.get_num_threads())
    chosen: list[list[np.ndarray]] = [[], [], []]
    count, all_of_them = environments.num_envs, environments.reach
    rounds = len(imitation.epochs)
    print(f"imitation: the network is fitted on {fitting_device()}", flush=True)
    students = np.arange(count) < count // 2
    for turn, epochs in enumerate(imitation.epochs):
        # The largest come by the middle, so that the network plays them in some rounds, too.
        environments.reach = min(all_of_them, -(-all_of_them * 2 * (turn + 1) // rounds))
        observations: Any = environments.reset()
        shape = (imitation.n_steps, count)
        rewards, ended = np.empty(shape, np.float32), np.empty(shape, bool)
        picked = np.empty(shape, bool)
        for step in range(imitation.n_steps):
            told = teachers.slots()
            picked[step] = (told[:, 0] != 0) | (rng.random(count) < KEPT)
            chosen[0].append(observations[picked[step]])
            chosen[1].append(told[picked[step]])
            taken = told[:, 0].copy()
            if turn:
                taken[students] = policy.best(observations[students])
            astray = ~students & (rng.random(count) < imitation.random_edits)
            for index in np.flatnonzero(astray).tolist():
                taken[index] = random_slot(environments, observations[index], rng)
            observations, rewards[step], ended[step], _ = environments.step(taken)
        returns, later = np.empty(shape, np.float32), np.full(count, np.nan, np.float32)
        for step in reversed(range(imitation.n_steps)):
            later = rewards[step] + np.where(ended[step], np.float32(0.0), later)
            returns[step] = later
        chosen[2] += [row[some] for row, some in zip(returns, picked, strict=True)]
        data = [np.concatenate(part) for part in chosen]
        chosen = [[part] for part in data]
        seen = data[2][~np.isnan(data[2])]
        if turn == 0 and len(seen):
            with torch.no_grad():
                policy.network.value.bias.fill_(float(seen.mean()))
        agreed = fit(policy, data, epochs, rng, imitation)
        print(
            f"imitation, round {turn + 1}: {len(data[0])} decisions, "
            f"{100 * agreed:.1f} % of the last ones as taught",
            flush=True,
        )


def random_slot(
    environments: MixedVecEnv, tokens: np.ndarray, rng: np.random.Generator
) -> np.int64:
    """
    A legal slot at random.

    :param environments: the machines
    :param tokens: float32[size], what one of them shows
    :param rng: the source
    """
    legal = np.zeros(len(environments.layout.slots), np.float32)
    legal_slots(tokens, environments.layout.offsets, legal)
    return np.int64(rng.choice(np.flatnonzero(legal)))


def fit(
    policy: AttentionPolicy,
    data: list[np.ndarray],
    epochs: int,
    rng: np.random.Generator,
    imitation: Imitation,
) -> float:
    """
    Fit the policy to all demonstrations so far.

    :param policy: what learns
    :param data: tokens float32[n, size], slots int64[n, K], returns float32[n], NaN where unknown
    :param epochs: passes over them
    :param rng: of the order
    :param imitation: its hyperparameters
    :return: the probability of any of what was taught, a geometric mean over the last minibatches
    """
    observations, slots, returns = map(torch.from_numpy, data)
    device = fitting_device()
    fitting = Fitting(policy, observations, device, padded=device.type != "cpu")
    weights = torch.where(slots[:, 0] == 0, KEEPING_COUNTS / KEPT, 1.0)
    weights /= weights.mean()
    # Every known return counts alike: pieces of a minibatch cannot tell how many the others know.
    known = (~returns.isnan()).float()
    returns = returns.nan_to_num(0.0)
    of_value = known * VALUE_WEIGHT / known.mean().clamp(min=1.0 / len(known))
    slots, returns, weights, of_value = (
        one.to(device) for one in (slots, returns, weights, of_value)
    )

    def loss(rows: Tensor, scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = any_of(scores, slots[rows])
        errors = values - returns[rows]
        return of_value[rows] * errors.square() - weights[rows] * log_probs, log_probs

    optimiser = torch.optim.Adam(fitting.trained, imitation.learning_rate)
    batches = list(minibatches(len(slots), epochs, imitation.batch_size, rng))
    decay = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, len(batches))
    policy.set_training_mode(True)
    agreed: list[Tensor] = []
    for rows in batches:
        agreed.append(fitting.differentiate(rows, loss))
        nn.utils.clip_grad_norm_(fitting.trained, 1.0)
        optimiser.step()
        decay.step()
    fitting.hand_back()
    policy.set_training_mode(False)
    return float(torch.stack(agreed[-50:]).mean().exp())
