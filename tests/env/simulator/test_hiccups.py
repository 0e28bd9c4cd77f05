"""Hiccups: clients that stall and catch up, stolen vCPUs, and what sensors see of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from env.codes import KEEP, STALL, STEAL
from env.guard import ALONE
from env.simulator import kernel
from env.simulator.hiccups import begin_with_spells
from env.simulator.machine import EpisodeFactory, SimulatedMachine, Variation
from env.simulator.profile import Scatter
from env.simulator.rates import refresh
from env.simulator.sensing import sense
from tests.conftest import Rig, with_hiccups
from tests.env.simulator.walks import ANYHOW, CALM, NORMAL, RUNNING, SCENARIO

MOSTLY = {STALL: (1e-9, 0.04, 0.0, 0.0), STEAL: (0.0, 0.0, 1e-9, 0.01)}
"""Hosts on which no hiccup but the one that a test asks for is to be expected."""


def hold_up(rig: Rig, kind: int, begins_s: float, length_s: float) -> None:
    """Let a hiccup of a given length begin at a given time."""
    rig.row["hiccup_turns_s"] = begins_s
    rig.row["quiet_until_s"] = 0.0
    kernel.advance(rig.row, rig.targets, begins_s + 1e-8)
    assert rig.row["hiccup"] == kind
    rig.row["hiccup_s"] = length_s
    rig.row["hiccup_turns_s"] = begins_s + length_s
    refresh(rig.row)


def hosted(kind: int, targets: list[float], cores: tuple[int, ...] = (0,)) -> Rig:
    """A host that serves a load on some vCPUs, and has hiccups of one kind."""
    rig = Rig(EpisodeFactory(SCENARIO, with_hiccups(*MOSTLY[kind])))
    rig.begin(1, targets)
    rig.set_desired(cores)
    rig.row["guarded"] = 0  # or the guard would give memcached another vCPU
    return rig


def read(rig: Rig, name: str) -> float:
    return float(rig.row[name])


@pytest.mark.parametrize("targets", [[60_000.0] * 9, [60_000.0, 20_000.0] * 9])
def test_after_a_stall_the_clients_send_what_they_missed(targets: list[float]) -> None:
    rig = hosted(STALL, targets)
    hold_up(rig, STALL, 9.9, 0.2)  # across a move of the load at 10 s
    served = read(rig, "requests")
    kernel.advance(rig.row, rig.targets, 10.09)
    assert read(rig, "requests") == pytest.approx(served, abs=1.0)
    assert read(rig, "backlog") == read(rig, "service_cpu") == 0.0
    kernel.advance(rig.row, rig.targets, 10.1 + 1e-8)
    missed = 0.1 * (targets[0] + targets[1])
    assert read(rig, "backlog") == pytest.approx(missed, abs=2.0)
    assert read(rig, "load_qps") == targets[1]
    drained_s = 10.1 + missed / (read(rig, "capacity_qps") - targets[1])
    kernel.advance(rig.row, rig.targets, drained_s - 0.005)
    assert read(rig, "backlog") > 0.0
    kernel.advance(rig.row, rig.targets, drained_s + 0.005)
    assert read(rig, "backlog") == read(rig, "held") == 0.0
    due = 10.0 * targets[0] + (drained_s + 0.005 - 10.0) * targets[1]
    assert read(rig, "requests") == pytest.approx(due, rel=1e-6)


def test_clients_that_are_behind_send_nothing_in_a_stall_either() -> None:
    rig = hosted(STALL, [175_000.0])
    kernel.advance(rig.row, rig.targets, 2.0)
    hold_up(rig, STALL, 2.0, 0.1)
    behind, served = read(rig, "held"), read(rig, "requests")
    assert behind > 1000.0
    kernel.advance(rig.row, rig.targets, 2.1 + 1e-8)
    assert read(rig, "requests") == pytest.approx(served, abs=1.0)
    assert read(rig, "backlog") == pytest.approx(behind + 0.1 * 175_000.0, abs=2.0)


def test_who_sends_late_is_not_answered_late() -> None:
    """A probe beside the clients sees the queueing of their burst, and no more of the stall."""
    rig = hosted(STALL, [60_000.0])
    hold_up(rig, STALL, 1.0, 0.1)
    kernel.advance(rig.row, rig.targets, 1.1 + 1e-8)
    before, late = read(rig, "slow_requests"), read(rig, "slow_fraction")
    caught_up_s = 6000.0 / (read(rig, "capacity_qps") - 60_000.0)
    burst = caught_up_s * read(rig, "capacity_qps")
    kernel.advance(rig.row, rig.targets, 1.1 + caught_up_s)
    slow = read(rig, "slow_requests") - before
    assert slow == pytest.approx(late * burst, rel=1e-3)
    assert slow < 6000.0  # who was only sent late is not late
    kernel.advance(rig.row, rig.targets, 2.0)
    assert read(rig, "slow_requests") - before < slow + 0.01 * 60_000.0


@pytest.mark.parametrize("length_s", [0.0002, 0.004, 0.05])
def test_requests_of_a_steal_are_late_if_it_is_longer_than_the_slo(length_s: float) -> None:
    qps = 30_000.0
    rig = hosted(STEAL, [qps], (0, 1))
    hold_up(rig, STEAL, 1.0, length_s)
    counted, served = read(rig, "slow_requests"), read(rig, "requests")
    kernel.advance(rig.row, rig.targets, 1.0 + length_s + 1e-8)
    assert read(rig, "requests") == pytest.approx(served, abs=2.0)
    late = read(rig, "slow_requests") - counted
    slo_s = 1e-6 * SCENARIO.service.slo_us
    share = max(0.0, 1.0 - slo_s / length_s)
    assert late / (qps * length_s) == pytest.approx(share, abs=0.06)
    kernel.advance(rig.row, rig.targets, 2.0)
    assert read(rig, "backlog") == read(rig, "counted") == 0.0
    assert read(rig, "requests") == pytest.approx(2.0 * qps, rel=1e-6)
    assert read(rig, "sent_requests") == pytest.approx(2.0 * qps, rel=1e-6)  # each counted once


def test_an_interval_whose_twentieth_was_stolen_is_violated() -> None:
    violated = {}
    for length_s in (0.3, 0.7):  # of 10 s
        rig = hosted(STEAL, [30_000.0], (0, 1))
        rig.set_desired((0, 1), vips=(RUNNING, (2, 3), NORMAL))
        hold_up(rig, STEAL, 4.0, length_s)
        kernel.advance(rig.row, rig.targets, 10.1)
        violated[length_s] = int(rig.row["violations"])
        p95_us = kernel.interval_p95(rig.row)
        assert (p95_us > SCENARIO.service.slo_us) == bool(violated[length_s])
    assert violated == {0.3: 0, 0.7: 1}


def test_nobody_gets_on_without_vcpus() -> None:
    rig = hosted(STEAL, [30_000.0])
    rig.set_desired((0,), vips=(RUNNING, (1, 2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 20.0)
    hold_up(rig, STEAL, 20.0, 0.05)
    before = rig.row.copy()
    kernel.advance(rig.row, rig.targets, 20.049)
    for name in ("work_left_s", "job_cpu_s", "vcpu_busy_s"):
        assert (rig.row[name] == before[name]).all()
    assert rig.row["service_cpu_s"] == before["service_cpu_s"]
    kernel.advance(rig.row, rig.targets, 20.1)
    job = SCENARIO.job_names.index("vips")
    assert rig.row["work_left_s"][job] < before["work_left_s"][job]


def test_a_sensor_shows_the_means_of_its_window() -> None:
    """Also where a stall begins, ends or has been caught up within it."""
    rig = hosted(STALL, [60_000.0])
    period_s, noise = SCENARIO.control.period_s, 0.03
    seen = []
    hold_up(rig, STALL, 1.0, 0.04)
    kernel.advance(rig.row, rig.targets, 1.01)
    for poll in range(12):
        before = read(rig, "requests")
        kernel.advance(rig.row, rig.targets, 1.01 + (poll + 1) * period_s)
        sense(rig.row)
        mean = (read(rig, "requests") - before) / period_s
        spread = math.sqrt(1.0 / max(mean * period_s, 1e-3) + noise**2)
        assert abs(read(rig, "qps") - mean) <= 2.46 * spread * mean + 1e-6
        seen.append(mean)
    assert min(seen) == pytest.approx(0.0, abs=1.0)
    assert max(seen) > 1.3 * 60_000.0  # as a burst looks live
    assert seen[-1] == pytest.approx(60_000.0, rel=1e-3)


@pytest.mark.parametrize(("length_s", "wakes"), [(100.0, True), (1e-4, False)])
def test_a_stall_of_a_polling_window_wakes_a_sleeping_policy(length_s: float, wakes: bool) -> None:
    machine = SimulatedMachine(EpisodeFactory(SCENARIO, with_hiccups(1e-9, length_s, 0.0, 0.0)))
    machine.begin(1, np.random.default_rng(1))
    machine.follow(np.array([60_000.0]))
    machine.host.hiccup_turns_s, machine.host.quiet_until_s = 1.0, 0.0
    machine.advance(3.0, wake=True)
    period_s = SCENARIO.control.period_s
    if wakes:
        assert 1.0 + period_s <= machine.host.now_s + 1e-9 < 1.0 + 2.0 * period_s
        assert machine.telemetry().service.qps == 0.0
    else:
        assert machine.host.now_s == pytest.approx(3.0)


@pytest.mark.parametrize("rates", [(0.5, 1.0), (2.0, 0.0), (0.0, 2.0)])
def test_hiccups_come_as_often_and_last_as_long_as_the_profile_says(
    rates: tuple[float, float],
) -> None:
    lengths = {STALL: 0.02, STEAL: 0.005}
    profile = with_hiccups(rates[0], lengths[STALL], rates[1], lengths[STEAL])
    rig = Rig(EpisodeFactory(SCENARIO, profile))
    seen: dict[int, list[float]] = {STALL: [], STEAL: []}
    for seed in range(2):
        rig.begin(seed)
        for before, after in rig.events(600.0):
            if before["hiccup"] == 0 and after["hiccup"]:
                seen[int(after["hiccup"])].append(float(after["hiccup_s"]))
    for (kind, drawn), per_s in zip(seen.items(), rates, strict=True):
        expected = 1200.0 * per_s  # less what passes in hiccups
        assert abs(len(drawn) - expected) <= 4.0 * math.sqrt(expected) + 0.05 * expected
        if drawn:
            mean_s = float(np.mean(drawn))
            assert abs(mean_s / lengths[kind] - 1.0) < 4.0 / math.sqrt(len(drawn))


def test_hiccups_are_drawn_in_varied_physics() -> None:
    factory = EpisodeFactory(SCENARIO, with_hiccups(0.5, 0.04, 0.5, 0.01), ANYHOW)
    hosts, targets = factory.new_hosts(30), factory.new_targets(30)
    for index in range(30):
        factory.begin(hosts, targets, index, 1, np.random.default_rng(index))
    drawn = hosts["host_params"][:, -5:-1]
    assert (drawn > 0.0).all()
    assert np.log(drawn).std(axis=0) == pytest.approx([0.3] * 4, rel=0.4)


WITHOUT: Any = {
    Variation(): (
        (177.3445862560481, 16440470.000000004, -6.491730475222647),
        [870673375, 519009010],
    ),
    ANYHOW: (
        (163.7205129215409, 14360629.37489949, -5.192987987928859),
        [916588199, 1073280922],
    ),
}
"""
Episodes of a profile without hiccups: end, requests, reward, random state.

Recorded with the profile of 2026-11-23, once job speeds no longer depended on the order of jobs, to
show what else changes them; `RECORDED` is what has been fitted anew since.
"""

RECORDED = {"scatter": Scatter(mean=0.0052, spread=0.1013), "siblings_unknown": False}


@pytest.mark.parametrize("variation", WITHOUT)
def test_without_hiccups_nothing_is_drawn_and_all_is_as_recorded(variation: Variation) -> None:
    scenario = SCENARIO.with_changes(delays={"starts_ahead": False})
    profile = CALM.profile.model_copy(update=RECORDED)
    rig = Rig(EpisodeFactory(scenario, profile, variation))
    rng, reward, ended = np.random.default_rng(5), 0.0, 0
    rig.begin(7, work=0.2)
    while not ended:
        edit = 0 if rng.random() < 0.6 else int(rng.choice(rig.legal()))
        ended, terms = rig.step(edit)
        reward += terms.sum()
    figures, state = WITHOUT[variation]
    assert rig.row["random"].tolist() == state
    assert (read(rig, "now_s"), read(rig, "requests"), reward) == pytest.approx(figures, rel=1e-12)


def test_who_decided_by_a_short_stall_wakes_when_it_is_over() -> None:
    rig = hosted(STALL, [60_000.0] * 9)
    hold_up(rig, STALL, 5.0, 0.02)
    kernel.advance(rig.row, rig.targets, 5.012)
    sense(rig.row)
    assert read(rig, "qps") < 45_000.0
    rig.step(KEEP)
    assert read(rig, "now_s") < 5.15
    assert read(rig, "qps") == pytest.approx(60_000.0, rel=0.1)


def test_what_is_shown_ends_with_the_last_job() -> None:
    """The last interval is completed after it, which no sensor may show."""
    rig = Rig(EpisodeFactory(SCENARIO, with_hiccups(2.0, 0.1, 2.0, 0.05)))
    for seed in range(8):
        rig.begin(seed, [20_000.0] * 99, work=0.02)
        wanted = dict.fromkeys(SCENARIO.job_names, (RUNNING, (1, 2, 3), NORMAL))
        rig.set_desired((0,), **wanted)
        rig.row["guard_level"], rig.row["guard_back_off"] = 1, 16.0
        kernel.advance(rig.row, rig.targets, 500.0)
        shown = read(rig, "qps"), read(rig, "cpu_cores")
        sense(rig.row)
        assert (read(rig, "qps"), read(rig, "cpu_cores")) == shown
        assert 0.0 <= shown[0] < 300_000.0
        assert read(rig, "guard_s") <= read(rig, "now_s") + 1e-6


def test_the_last_interval_is_completed_through_hiccups() -> None:
    rig = Rig(EpisodeFactory(SCENARIO, with_hiccups(2.0, 0.1, 2.0, 0.05)))
    rig.begin(3, [20_000.0] * 99, work=0.02)
    wanted = dict.fromkeys(SCENARIO.job_names, (RUNNING, (1, 2, 3), NORMAL))
    rig.set_desired((0,), **wanted)
    kernel.advance(rig.row, rig.targets, 500.0)
    assert rig.done
    assert read(rig, "now_s") == pytest.approx(rig.row["end_s"].max())
    waiting = read(rig, "backlog") + read(rig, "held")
    assert read(rig, "requests") + waiting == pytest.approx(
        20_000.0 * read(rig, "interval_ends_s"), rel=0.02
    )


def test_the_clients_schedule_goes_on_while_they_stall() -> None:
    """What a picture of a run shows as the load is what was due."""
    machine = SimulatedMachine(EpisodeFactory(SCENARIO, with_hiccups(50.0, 0.5, 0.0, 0.0)))
    machine.begin(1, np.random.default_rng(1))
    machine.follow(np.array([20_000.0, 60_000.0, 20_000.0]))
    machine.advance(15.0)
    assert machine.host.due_qps == 60_000.0


def test_a_spell_steals_the_share_that_was_drawn() -> None:
    """Requests wait for its steals, and the guard knows whose fault that is."""
    rig = Rig(EpisodeFactory(SCENARIO, CALM.profile))
    rig.begin(1, [30_000.0] * 99)
    begin_with_spells(rig.row, 0.3)
    rig.row["in_spell"], rig.row["spell_turns_s"] = 1, 200.0
    kernel.start_episode(rig.row, rig.targets)
    rig.set_desired((0, 1), vips=(RUNNING, (2, 3), NORMAL))
    stolen = []
    while rig.row["now_s"] < 199.0:
        kernel.advance(rig.row, rig.targets, rig.row["now_s"] + 0.0101)
        stolen.append(rig.row["hiccup"] == STEAL)
        assert rig.row["guard_level"] < ALONE
    assert np.mean(stolen) == pytest.approx(0.3, abs=0.04)
    assert read(rig, "violations") > 10
    kernel.advance(rig.row, rig.targets, 200.5)
    assert rig.row["in_spell"] == 0 and rig.row["hiccup_turns_s"] == rig.row["spell_turns_s"]
