"""Sending: what changes take, in which order they land, and what is not sent again."""

from __future__ import annotations

import math

import numpy as np
import pytest

from env.physics.parameters import HOST_FIELDS
from env.simulator import kernel
from env.simulator.machine import EpisodeFactory
from env.simulator.random import api_latency, two_noises, uniform
from tests.conftest import Rig
from tests.env.simulator.walks import (
    BACKGROUND,
    NORMAL,
    PAUSED,
    RUNNING,
    SCENARIO,
    SLOW_DOCKER,
    host_value,
)


def test_docker_calls_take_what_was_measured(rig: Rig) -> None:
    rig.begin(1)
    quantiles = [host_value(f"api_latency_{name}_s") for name in ("median", "p90", "p99")]
    drawn = np.sort([api_latency(rig.row, *quantiles) for _ in range(20_000)])
    assert np.quantile(drawn, [0.5, 0.9, 0.99]) == pytest.approx(quantiles, rel=0.08)
    assert drawn[0] > 0.2 * quantiles[0]
    assert drawn[-1] < 1.6 * quantiles[2]


def test_the_random_numbers_are_even(rig: Rig) -> None:
    rig.begin(1)
    drawn = np.array([uniform(rig.row) for _ in range(20_000)])
    assert 0.0 < drawn.min() < drawn.max() < 1.0
    assert np.histogram(drawn, 10, (0.0, 1.0))[0] == pytest.approx(2000, rel=0.1)
    readings = np.array([two_noises(rig.row) for _ in range(10_000)]).ravel()
    assert readings.mean() == pytest.approx(0.0, abs=0.03)
    assert readings.std() == pytest.approx(1.0, rel=0.03)


def test_two_noises_are_four_draws_in_a_row(rig: Rig) -> None:
    rig.begin(1)
    for _ in range(1000):
        before = rig.row["random"].copy()
        pair = two_noises(rig.row)
        after = rig.row["random"].copy()
        rig.row["random"] = before
        one, two, three, four = (uniform(rig.row) for _ in range(4))
        assert pair == ((one + two - 1.0) * math.sqrt(6.0), (three + four - 1.0) * math.sqrt(6.0))
        assert rig.row["random"].tolist() == after.tolist()


def test_docker_calls_are_made_one_after_another() -> None:
    rig = Rig(SLOW_DOCKER)
    rig.begin(1, [20_000.0])
    wanted = dict.fromkeys(SCENARIO.job_names, (RUNNING, (2, 3), NORMAL))
    rig.set_desired((0,), **wanted)
    kernel.advance(rig.row, rig.targets, 30.0)
    starts = rig.row["start_s"]
    shortest = 0.25 + host_value("container_start_s")  # a quarter of the median
    assert (np.diff(starts, prepend=0.0) >= shortest - 1e-9).all()
    rig.set_desired((0,), vips=(PAUSED, (2, 3), NORMAL))
    assert 30.25 <= rig.row["lands_s"][SCENARIO.job_names.index("vips")] <= 31.5


def test_vcpus_and_weights_are_written_directly(rig: Rig) -> None:
    rig.begin(1, [20_000.0])
    fast_s = host_value("fast_latency_s")
    job = SCENARIO.job_names.index("vips")
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 10.0)
    before = int(rig.row["actuations"])
    rig.set_desired((0, 1), vips=(RUNNING, (1, 2), BACKGROUND))
    assert rig.row["actuations"] == before + 3  # memcached's vCPUs, the job's, its weight
    kernel.advance(rig.row, rig.targets, 10.0 + 0.5 * fast_s)
    assert (rig.row["true_service"], rig.row["true_cores"][job]) == (0b0001, 0b1100)
    kernel.advance(rig.row, rig.targets, 10.0 + 1.5 * fast_s)
    assert (rig.row["true_service"], rig.row["true_cores"][job]) == (0b0011, 0b0110)
    assert rig.row["true_weight"][job] == BACKGROUND
    rig.set_desired((0, 1))
    assert rig.row["actuations"] == before + 3  # nothing that is already true


def test_published_controllers_move_jobs_by_calls_to_docker() -> None:
    slow = EpisodeFactory(
        SCENARIO.with_changes(
            delays={
                "docker_moves": True,
                "starts_ahead": False,
                **{name: 1.0 for name in HOST_FIELDS if name.startswith("api_latency")},
            }
        )
    )
    rig = Rig(slow)
    rig.begin(1, [20_000.0])
    wanted = dict.fromkeys(("ferret", "vips"), (RUNNING, (1, 2, 3), NORMAL))
    rig.set_desired((0,), **wanted)
    kernel.advance(rig.row, rig.targets, 10.0)
    rig.set_desired((0, 1), **dict.fromkeys(wanted, (RUNNING, (2, 3), NORMAL)))
    kernel.advance(rig.row, rig.targets, 10.1)
    jobs = [SCENARIO.job_names.index(name) for name in wanted]
    assert rig.row["true_service"] == 0b0011  # memcached's own move is direct
    assert (rig.row["true_cores"][jobs] == 0b1110).all()  # and the jobs are still there
    first, second = rig.row["move_lands_s"][jobs]
    assert second - first >= 0.25  # one call after the other, a quarter of the median at least
    kernel.advance(rig.row, rig.targets, 14.0)
    assert (rig.row["true_cores"][jobs] == 0b1100).all()


def test_containers_are_made_before_the_first_decision_and_wait_at_their_gates(rig: Rig) -> None:
    rig.begin(1, [20_000.0])
    api_free_s = float(rig.row["api_free_s"])
    wanted = dict.fromkeys(SCENARIO.job_names, (RUNNING, (2, 3), NORMAL))
    rig.set_desired((0,), **wanted)
    kernel.advance(rig.row, rig.targets, 1.0)
    assert rig.row["start_s"] == pytest.approx(host_value("gate_latency_s"))
    assert rig.row["api_free_s"] == api_free_s  # no call to Docker, which a pause would wait for


def test_a_job_has_one_call_to_docker_at_a_time() -> None:
    """What is decided while a call is under way is sent when that one has landed."""
    rig = Rig(SLOW_DOCKER)
    rig.begin(1, [20_000.0])
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 10.0)
    job, before = SCENARIO.job_names.index("vips"), int(rig.row["actuations"])
    rig.set_desired((0,), vips=(PAUSED, (2, 3), NORMAL))
    lands_s = float(rig.row["lands_s"][job])
    kernel.advance(rig.row, rig.targets, 10.1)
    rig.set_desired((0,), vips=(RUNNING, (1, 2, 3), NORMAL))
    assert rig.row["lands_s"][job] == lands_s  # the pause is not called back
    kernel.advance(rig.row, rig.targets, lands_s + 0.01)
    assert rig.row["true_state"][job] == PAUSED
    assert lands_s < rig.row["lands_s"][job] < math.inf
    kernel.advance(rig.row, rig.targets, lands_s + 20.0)
    assert rig.row["true_state"][job] == RUNNING
    assert rig.row["true_cores"][job] == 0b1110
    assert rig.row["pauses"][job] == 1
    assert rig.row["actuations"] == before + 3


def test_quotas_are_written_directly_and_come_with_the_launch(rig: Rig) -> None:
    rig.begin(1, [20_000.0])
    job = SCENARIO.job_names.index("vips")
    rig.row["desired_quota"][job] = 0.5
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 10.0)
    assert rig.row["used"][job].sum() == pytest.approx(0.5)
    before, cpu_s = int(rig.row["actuations"]), float(rig.row["job_cpu_s"][job])
    rig.row["desired_quota"][job] = 1.5
    rig.set_desired((0,))
    assert rig.row["actuations"] == before + 1
    kernel.advance(rig.row, rig.targets, 20.0)
    assert rig.row["used"][job].sum() == pytest.approx(1.5)
    assert rig.row["job_cpu_s"][job] - cpu_s == pytest.approx(15.0, rel=0.01)
    rig.set_desired((0,), vips=(PAUSED, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 30.0)
    assert not rig.row["used"][job].any()
    rig.row["desired_quota"][job] = np.inf
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 40.0)
    assert rig.row["used"][job].sum() > 1.5


def test_vcpus_do_not_wait_for_a_docker_call_under_way() -> None:
    """memcached takes a vCPU from a job that is about to be paused: it gets it at once."""
    rig = Rig(SLOW_DOCKER)
    rig.begin(1, [20_000.0])
    job = SCENARIO.job_names.index("vips")
    rig.set_desired((0,), vips=(RUNNING, (1, 2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 10.0)
    rig.set_desired((0,), vips=(PAUSED, (1, 2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 10.025)
    rig.set_desired((0, 1), vips=(PAUSED, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 10.05)
    assert rig.row["true_state"][job] == RUNNING  # Docker takes a quarter of a second at least
    assert rig.row["true_service"] == 0b0011
    assert rig.row["true_cores"][job] == 0b1100


def test_threads_are_fixed_at_launch(rig: Rig) -> None:
    rig.begin(1, [20_000.0])
    job = SCENARIO.job_names.index("vips")
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    rig.row["desired_threads"][job] = 1
    kernel.apply_desired(rig.row, True)
    assert rig.row["threads"][job] == 4
