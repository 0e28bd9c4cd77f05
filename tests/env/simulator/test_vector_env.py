"""The batch of simulated machines: as many single ones, behind Stable-Baselines3's interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from stable_baselines3.common.vec_env import VecEnv

from env.reward import TERMS
from env.scenario import Scenario
from env.simulator.load import trace_seeds
from env.simulator.machine import SimulatedMachine, Variation
from env.simulator.thread_pool import ThreadPool
from env.simulator.vector_env import ColocationVecEnv

GAMMA = 0.999
HOSTS = 4


@pytest.fixture(scope="module")
def short(scenario: Scenario) -> Scenario:
    """Episodes of half a minute, which the time cap ends."""
    return scenario.with_changes(load={"duration_s": 30.0, "interval_s": 5.0})


def batch(scenario: Scenario, **options: Any) -> Any:
    options = {"n_envs": HOSTS, "gamma": GAMMA, "seed": 3, "staggered": False} | options
    return ColocationVecEnv(scenario, **options)


def choose(
    rng: np.random.Generator, observations: npt.NDArray[np.float32], n_edits: int
) -> npt.NDArray[np.int64]:
    """Keep, or a random legal edit, for each host."""
    return np.array(
        [
            rng.choice(np.flatnonzero(row[-n_edits:] == 1.0)) * (rng.random() < 0.6)
            for row in observations
        ],
        np.int64,
    )


def test_it_is_a_vec_env(scenario: Scenario) -> None:
    env = batch(scenario)
    assert VecEnv in type(env).__mro__
    assert env.num_envs == HOSTS
    observations = env.reset()
    assert env.observation_space.shape is not None
    assert observations.shape == (HOSTS, *env.observation_space.shape)
    assert observations.dtype == np.float32
    after, rewards, dones, infos = env.step(np.zeros(HOSTS, np.int64))
    assert after.shape == observations.shape
    assert (rewards.shape, rewards.dtype) == ((HOSTS,), np.float32)
    assert (dones.shape, dones.dtype) == ((HOSTS,), bool)
    assert len(infos) == HOSTS
    assert env.get_attr("gamma", [0, 1]) == [GAMMA] * 2
    assert env.env_is_wrapped(object) == [False] * HOSTS


def test_hosts_do_what_single_machines_do(short: Scenario) -> None:
    """The same traces, random numbers and edits give the same transitions, ends included."""
    variation = Variation(physics=1.0, interval_s=(3.0, 8.0))
    env = batch(short, variation=variation)
    table, n_edits = env.factory.table, len(env.factory.table)
    observations = env.reset()
    # The batch draws from one generator, host after host; so do the machines.
    shared = np.random.default_rng([3, 0])
    traces = trace_seeds(3, 4096, "training")
    machines = [SimulatedMachine(env.factory) for _ in range(HOSTS)]
    row = np.zeros(env.factory.observation_size, np.float32)
    for index, machine in enumerate(machines):
        machine.begin(traces.pop(), shared)
        machine.observe(row)
        assert row.tobytes() == observations[index].tobytes()
    rng = np.random.default_rng(0)
    ends = 0
    for _ in range(400):
        edits = choose(rng, observations, n_edits)
        observations, rewards, dones, infos = env.step(edits)
        for index, machine in enumerate(machines):
            ended, terms = machine.step(int(edits[index]), GAMMA)
            assert tuple(terms) == TERMS
            assert bool(ended) == dones[index]
            assert rewards[index] == pytest.approx(sum(terms.values()), rel=1e-6)
            if ended:
                machine.observe(row)
                assert row.tobytes() == infos[index]["terminal_observation"].tobytes()
                assert infos[index]["episode_summary"] == machine.summary()
                machine.begin(traces.pop(), shared)
                ends += 1
            machine.observe(row)
            assert row.tobytes() == observations[index].tobytes()
    assert ends >= HOSTS
    assert len(table) == n_edits


def test_the_same_seed_is_the_same_batch(short: Scenario) -> None:
    runs = []
    for _ in range(2):
        env, rng = batch(short, staggered=True), np.random.default_rng(0)
        observations = env.reset()
        seen = [observations.tobytes()]
        for _ in range(100):
            observations, rewards, dones, _ = env.step(
                choose(rng, observations, len(env.factory.table))
            )
            seen += [observations.tobytes(), rewards.tobytes(), dones.tobytes()]
        runs.append(seen)
    assert runs[0] == runs[1]
    assert batch(short, seed=4).reset().tobytes() != batch(short).reset().tobytes()


def test_threads_change_nothing(short: Scenario) -> None:
    batches = [batch(short, n_envs=300, threads=threads) for threads in (1, 2)]
    seen = [env.reset().copy() for env in batches]
    rng = np.random.default_rng(0)
    for _ in range(40):
        np.testing.assert_array_equal(*seen)
        edits = choose(rng, seen[0], int(batches[0].action_space.n))
        (*one, infos), (*two, same) = (env.step(edits) for env in batches)
        for alone, shared in zip(one, two, strict=True):
            np.testing.assert_array_equal(alone, shared)
        assert [info.get("episode") for info in infos] == [info.get("episode") for info in same]
        seen = [one[0].copy(), two[0].copy()]


def test_a_thread_pool_does_every_piece_once_and_passes_errors_on() -> None:
    for size in (1, 2, 3):
        pool, done = ThreadPool(size), []
        pool.share(done.append, range(100))
        assert sorted(done) == list(range(100))
        with pytest.raises(ZeroDivisionError):
            pool.share(lambda piece: 1 // piece, [1, 0, 1])


def test_seeding_again_starts_again(short: Scenario) -> None:
    env = batch(short)
    first = env.reset().copy()
    second = env.reset().copy()
    env.seed(3)
    assert env.reset().tobytes() == first.tobytes() != second.tobytes()


def test_an_observation_outlives_the_next_step(scenario: Scenario) -> None:
    """Stable-Baselines3 stores the last observation after it has the next one."""
    env = batch(scenario)
    observations = env.reset()
    for edit in (3, 7, 0, 12):
        kept = observations.copy()
        after = env.step(np.full(HOSTS, edit))[0]
        assert observations.tobytes() == kept.tobytes()
        assert after.tobytes() != kept.tobytes()
        observations = after


def test_infos_are_empty_but_where_an_episode_ends(short: Scenario) -> None:
    env = batch(short)
    env.reset()
    returns = np.zeros(HOSTS)
    lengths = np.zeros(HOSTS, int)
    ends = 0
    while ends < 2 * HOSTS:
        observations, rewards, dones, infos = env.step(np.zeros(HOSTS, np.int64))
        returns += rewards
        lengths += 1
        for index in range(HOSTS):
            if not dones[index]:
                assert infos[index] == {}
                continue
            info = infos[index]
            assert info["TimeLimit.truncated"] is True
            summary = info["episode_summary"]
            assert (summary["completed"], summary["makespan_s"]) == (False, 30.0)
            assert info["episode"]["r"] == pytest.approx(returns[index], rel=1e-5)
            assert info["episode"]["l"] == lengths[index] == summary["decisions"]
            assert info["episode"]["t"] == 30.0
            # What the episode ended with, not what the next one begins with.
            assert info["terminal_observation"].tobytes() != observations[index].tobytes()
            returns[index] = lengths[index] = 0
            ends += 1


def test_a_completed_episode_is_not_called_truncated(scenario: Scenario) -> None:
    env = batch(scenario)
    env.reset()
    env.hosts["work_left_s"] *= 0.02
    n_edits = len(env.factory.table)
    starts = [e for e in range(n_edits) if env.factory.table.describe(e).startswith("start")]
    ended: dict[int, dict[str, Any]] = {}
    observations = env.reset()
    env.hosts["work_left_s"] *= 0.02
    while len(ended) < HOSTS:
        legal = observations[:, -n_edits:] == 1.0
        edits = [next((e for e in starts if row[e]), 0) for row in legal]
        observations, _, dones, infos = env.step(np.array(edits))
        for index in np.flatnonzero(dones):
            ended.setdefault(int(index), infos[index])
    for info in ended.values():
        assert info["TimeLimit.truncated"] is False
        assert info["episode_summary"]["completed"] is True
        assert 5.0 < info["episode_summary"]["makespan_s"] < 300.0
        assert info["episode"]["t"] == info["episode_summary"]["makespan_s"]


def test_a_head_start_shows_every_phase_and_reports_no_makespan(scenario: Scenario) -> None:
    env = batch(scenario, n_envs=64, staggered=True)
    env.reset()
    done = (env.hosts["state"] == 3).sum(axis=1)
    assert done.min() == 0
    assert done.max() == len(scenario.jobs) - 1
    over = env.hosts["state"] == 3
    assert (env.hosts["work_left_s"][over] == 0.0).all()
    assert (env.hosts["job_cpu_s"][over] == env.hosts["job_work_s"][over]).all()
    env = batch(scenario.with_changes(load={"duration_s": 10.0}), staggered=True)
    env.reset()
    seen: list[dict[str, Any]] = []
    while len(seen) < 2 * HOSTS:
        _, _, _, infos = env.step(np.zeros(HOSTS, np.int64))
        seen += [info for info in infos if info]
    for info in seen[:HOSTS]:
        assert "terminal_observation" in info
        assert "episode_summary" not in info
        assert "episode" not in info
    assert all("episode_summary" in info for info in seen[HOSTS:])


@pytest.mark.parametrize("beyond", [True, False])
def test_an_action_outside_the_space_is_refused(scenario: Scenario, beyond: bool) -> None:
    """Compiled code would read past the table."""
    env = batch(scenario)
    env.reset()
    edits = np.zeros(HOSTS, np.int64)
    edits[2] = len(env.factory.table) if beyond else -1
    with pytest.raises((ValueError, AssertionError), match=r"action|edit"):
        env.step(edits)


def test_training_traces_are_no_report_traces(short: Scenario) -> None:
    env = batch(short, n_envs=16)
    env.reset()
    report = set(trace_seeds(3, 4096, "report")) | set(trace_seeds(3, 4096, "selection"))
    training = trace_seeds(3, 4096, "training")
    assert not report & set(training)
    machine = SimulatedMachine(env.factory)
    for index, seed in enumerate(reversed(training[-16:])):
        machine.begin(seed, np.random.default_rng(0))
        assert env.hosts["load_qps"][index] == machine.host.load_qps
