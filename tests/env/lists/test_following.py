"""Whom a list of jobs lets run: side by side, one before another, and when one makes way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from env.codes import DONE, NOT_ARRIVED, PAUSED, PENDING, RUNNING
from env.control import expected_lengths_s
from env.lists.following import first_jobs, jobs_there
from env.scenario import load_scenario, profile_traits, profile_work_s
from env.simulator.machine import EpisodeFactory

SCENARIO = load_scenario("cca-2025")
WORK_S = (30.0, 20.0, 10.0, 40.0, 50.0, 60.0, 70.0)


@pytest.fixture
def hosts() -> np.ndarray:
    """A machine that has run for a while, on which no job has begun."""
    factory = EpisodeFactory(SCENARIO)
    hosts, targets = factory.new_hosts(1), factory.new_targets(1)
    factory.begin(hosts, targets, 0, 1, np.random.default_rng(1))
    hosts["now_s"], hosts["job_work_s"], hosts["job_length_s"] = 100.0, WORK_S, WORK_S
    return hosts


def chosen(hosts: np.ndarray, at_once: int, interrupts: bool) -> list[int]:
    """Who is to run."""
    mask, _ = first_jobs(hosts.view(np.recarray)[0], len(WORK_S), at_once, 0, interrupts)
    return [job for job in range(len(WORK_S)) if mask >> job & 1]


def put(hosts: np.ndarray, job: int, state: int, **fields: Any) -> None:
    """Have the job be in a state, as everybody sees it."""
    for name in ("state", "desired_state", "job_state"):
        hosts[name][0, job] = state
    for name, value in fields.items():
        hosts[name][0, job] = value


def test_the_longest_start_first_and_who_runs_goes_on(hosts: np.ndarray) -> None:
    assert chosen(hosts, 2, False) == [5, 6]
    put(hosts, 2, RUNNING)
    assert chosen(hosts, 2, False) == [2, 6]
    put(hosts, 1, PAUSED)
    assert chosen(hosts, 2, False) == [1, 2]
    assert chosen(hosts, 3, False) == [1, 2, 6]
    put(hosts, 6, DONE)
    put(hosts, 5, NOT_ARRIVED)
    assert chosen(hosts, 7, False) == [0, 1, 2, 3, 4]
    assert jobs_there(hosts.view(np.recarray)[0], len(WORK_S)) == 0b0011111


def test_what_takes_longest_beside_memcached_starts_first_however_little_it_is(
    hosts: np.ndarray,
) -> None:
    hosts["job_length_s"][0, 2] = 80.0
    assert chosen(hosts, 2, False) == [2, 6]
    assert chosen(hosts, 2, True) == [1, 2]  # where jobs interrupt, work that is left counts


def test_a_job_is_expected_to_take_longer_by_what_memcacheds_company_costs_it() -> None:
    local = load_scenario("local")
    work_s, traits = profile_work_s(local.profile), profile_traits(local.profile)
    lengths_s = dict(zip(local.job_names, expected_lengths_s(local, work_s), strict=True))
    shares = [
        (lengths_s[name] / work_s[name] - 1.0) / traits[name]["interruption"] for name in lengths_s
    ]
    # At its mean load memcached takes a quarter of this machine, and the load generator another.
    assert shares == pytest.approx([shares[0]] * len(shares))
    assert 0.3 < shares[0] < 0.6
    # What a profile does not know costs nothing.
    unknown_s = dict(zip(SCENARIO.job_names, WORK_S, strict=True))
    assert expected_lengths_s(SCENARIO, unknown_s) == list(WORK_S)


def test_the_first_of_those_who_run_are_in_front(hosts: np.ndarray) -> None:
    put(hosts, 2, RUNNING)
    host = hosts.view(np.recarray)[0]
    assert first_jobs(host, len(WORK_S), 3, 2, False) == (0b1100100, 0b1000100)
    assert first_jobs(host, len(WORK_S), 3, 7, False) == (0b1100100, 0b1100100)


def test_work_that_nobody_knows_might_be_long(hosts: np.ndarray) -> None:
    hosts["job_known"][0, 2] = 0
    assert chosen(hosts, 1, False) == [2]


def test_the_least_work_left_comes_first_where_jobs_interrupt(hosts: np.ndarray) -> None:
    assert chosen(hosts, 2, True) == [1, 2]
    put(hosts, 0, RUNNING, job_cpu_s=25.0)  # 5 of its 30 s are left
    assert chosen(hosts, 1, True) == [0]
    put(hosts, 0, RUNNING, job_cpu_s=15.0)  # 15 s count as 10.5
    assert chosen(hosts, 1, True) == [2]
    put(hosts, 0, RUNNING, job_cpu_s=16.0)  # 14 s count as 9.8: not worth an interruption
    assert chosen(hosts, 1, True) == [0]


def test_whom_the_guard_holds_runs_as_far_as_a_list_is_concerned(hosts: np.ndarray) -> None:
    put(hosts, 0, RUNNING, job_cpu_s=16.0)
    hosts["state"][0, 0] = PAUSED
    assert chosen(hosts, 1, True) == [0]
    assert chosen(hosts, 1, False) == [0]
    hosts["desired_state"][0, 0] = PAUSED
    assert chosen(hosts, 1, True) == [2]


def test_who_was_paused_just_before_keeps_its_place(hosts: np.ndarray) -> None:
    put(hosts, 6, RUNNING)
    hosts["paused_at_s"][0, 6] = 100.0 - hosts["pause_dwell_s"][0] / 2.0
    assert chosen(hosts, 1, True) == [6]
    hosts["paused_at_s"][0, 6] = 0.0
    assert chosen(hosts, 1, True) == [2]


def test_work_that_nobody_knows_neither_interrupts_nor_is_interrupted(hosts: np.ndarray) -> None:
    hosts["job_known"][0, 2] = 0
    assert chosen(hosts, 6, True) == [0, 1, 3, 4, 5, 6]
    put(hosts, 2, RUNNING)
    assert chosen(hosts, 1, True) == [2]


def test_nobody_is_chosen_whom_the_memory_cannot_hold(hosts: np.ndarray) -> None:
    """Paused jobs hold theirs, and so do those that were chosen before."""
    hosts["memory_mib"], hosts["job_memory_mib"] = 1000, 400
    assert chosen(hosts, 7, True) == [1, 2]
    put(hosts, 6, PAUSED)
    assert chosen(hosts, 7, True) == [2, 6]
    put(hosts, 5, PAUSED)
    assert chosen(hosts, 1, True) == [5]  # nobody who is pending has room
    assert hosts["state"][0, 0] == PENDING
