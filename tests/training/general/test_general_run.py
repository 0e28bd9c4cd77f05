"""Training for any scenario: what an episode is worth, and a run from recipe to checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import agents
from env.action import apply_edit
from env.codes import DONE, KEEP, NORMAL, PAUSED, RUNNING
from env.reward import TERMS, UNIT_S
from env.scenario import FAMILY_ROOM, load_scenario
from env.sets.tokens import Layout
from env.simulator.kernel import apply_desired_at
from env.simulator.machine import EpisodeFactory, SimulatedMachine, Variation
from training.evaluation.episodes import EpisodeStart, run_episode
from training.evaluation.schedule_search import AFTER, LATE_WEIGHT, WEIGHT, in_turn
from training.general.general_run import train_general
from training.general.list_schedules import AS_GOOD, MOST_AS_GOOD, QuickSearch
from training.general.machines import Setup
from training.general.mixed_env import BASELINE_RETURN, MixedVecEnv
from training.general.setups import drawn_scenarios, find_setups
from training.general.teaching import Teachers, random_slot
from training.imitation.expert import expert_edit
from training.recipe import Imitation, load_recipe

LAYOUT = Layout(12, 16)
ARRIVING = "family-training-0-21"  # 7 jobs that arrive, on 8 vCPUs
OUTLASTING = "family-training-0-28"  # 5 jobs that arrive; one runs on long after the others


def mixed(names: list[str], count: int, unprofiled: float = 0.0) -> MixedVecEnv:
    """Machines that play some scenarios, measured by plain schedules."""
    setups = [
        Setup(EpisodeFactory(scenario, room=FAMILY_ROOM), [in_turn(scenario, 3)], LAYOUT)
        for scenario in map(load_scenario, names)
    ]
    return MixedVecEnv(setups, count, seed=1, unprofiled=unprofiled)


def imitation() -> Imitation:
    found = load_recipe("general").imitation
    assert found is not None
    return found.model_copy(
        update={"search_traces": 1, "n_envs": 16, "n_steps": 60, "epochs": (1, 1)}
    )


def test_a_return_is_measured_by_the_baseline() -> None:
    """Where the baseline needs twice as long, a second costs half as much."""
    environments = mixed(["cca-2025", "cca-2024"], 8)
    environments.reset()
    before_s = environments.machines.hosts["now_s"].copy()
    _, rewards, _, _ = environments.step(np.zeros(8, np.int64))
    for index, host in enumerate(environments.machines.hosts):
        baseline_s = environments._baselines[index].makespan_s
        assert host["now_s"] > before_s[index]
        expected = host["term_sums"].sum() * UNIT_S * BASELINE_RETURN / baseline_s
        assert rewards[index] == pytest.approx(expected, rel=1e-5)


def test_where_jobs_arrive_the_baseline_itself_would_get_nothing() -> None:
    """Each job costs its completion time and is credited the baseline's when it arrives."""
    environments = mixed([ARRIVING], 1)
    observations = environments.reset()
    environments._begin(0, observations)
    baseline = environments._baselines[0]
    n_jobs = len(baseline.jct_s)
    arrival_s = environments.machines.hosts["arrival_s"][0, :n_jobs].copy()
    credited, weights = environments._credits[0, :n_jobs].copy(), environments._weights[0].copy()
    assert 0 < (arrival_s > 0.0).sum() < n_jobs
    costs = weights[TERMS.index("jct")] * baseline.jct_s / n_jobs / UNIT_S
    assert credited == pytest.approx(costs)
    assert costs.sum() == pytest.approx(BASELINE_RETURN)
    total, earned, ended = 0.0, np.zeros(len(TERMS)), False
    while not ended:
        _, rewards, dones, _ = environments.step(np.zeros(1, np.int64))
        earned += environments._terms[0]
        total, ended = total + float(rewards[0]), bool(dones[0])
    assert total - earned @ weights == pytest.approx(credited[arrival_s > 0.0].sum(), rel=1e-3)


def test_scenarios_of_different_sizes_play_side_by_side() -> None:
    names = ["cca-2025", *(scenario.name for scenario in drawn_scenarios("training", 0, 6))]
    environments = mixed(names, 12, unprofiled=0.5)
    observations = environments.reset()
    vcpus_at, numbers = LAYOUT.offsets[3], LAYOUT.offsets[4]
    shown = observations[:, vcpus_at : vcpus_at + 16 * numbers].reshape(12, 16, numbers)[:, :, 0]
    playing = [environments.machines.setup(index).scenario for index in range(12)]
    assert shown.sum(axis=1).tolist() == [scenario.machine.vcpus for scenario in playing]
    assert len({scenario.machine.vcpus for scenario in playing}) > 2
    jobs_at, numbers = LAYOUT.offsets[6], LAYOUT.offsets[7]
    jobs = observations[:, jobs_at : jobs_at + 12 * numbers].reshape(12, 12, numbers)
    unknown = (jobs[:, :, 3:6].any(axis=2)) & (jobs[:, :, 6] == 0.0)
    assert unknown.any()
    assert not jobs[unknown][:, 23:31].any()  # nothing of a profile is shown
    for _ in range(20):
        observations, rewards, _, _ = environments.step(np.zeros(12, np.int64))
        assert np.isfinite(observations).all()
        assert np.isfinite(rewards).all()


def test_a_short_search_beats_plain_lists_and_its_teacher_follows_it() -> None:
    scenario = load_scenario("family-training-0-4")  # 7 jobs on 3 vCPUs
    found, _ = find_setups([scenario, scenario], LAYOUT, Variation(), 0, imitation())
    plain = Setup(EpisodeFactory(scenario), [in_turn(scenario, 3)], LAYOUT)
    environments = MixedVecEnv([plain, found], 8, seed=2)
    environments.reset()
    quick, plainly = [], []
    for index in range(8):
        for number, times in ((0, plainly), (1, quick)):
            environments.machines.begin(index, number, 100 + index, np.random.default_rng(index))
            times.append(environments.machines.baseline(index).makespan_s)
    assert np.mean(quick) < np.mean(plainly)
    teachers, hosts = Teachers(environments.machines, imitation()), environments.machines.hosts
    followed: list[float] = []
    while len(followed) < 8:
        _, _, dones, infos = environments.step(teachers.slots()[:, 0])
        followed += [infos[index]["episode_summary"]["makespan_s"] for index in dones.nonzero()[0]
                     if "episode_summary" in infos[index]]  # fmt: skip
    assert (hosts["true_state"] <= DONE).all()
    assert np.mean(followed) < 1.2 * np.mean(quick)


def test_teachers_asked_in_threads_say_the_same() -> None:
    environments = mixed(["cca-2025", "family-training-0-4"], 24)
    environments.reset()
    alone, shared = (Teachers(environments.machines, imitation(), n).slots() for n in (1, 5))
    assert (alone[:, 0] != 0).any()
    assert (shared == alone).all()


def test_the_search_is_patient_enough_for_what_it_finds() -> None:
    """A mean completion time may be a small part of the time until the last job is done."""
    search = QuickSearch(EpisodeFactory(load_scenario(OUTLASTING), room=FAMILY_ROOM), 0, 2)
    assert np.isfinite(search.price(search.written(search.best())))


def test_what_is_taught_beside_the_best_list_is_as_good() -> None:
    scenario = load_scenario(ARRIVING)
    search = QuickSearch(EpisodeFactory(scenario, room=FAMILY_ROOM), 0, 2)
    best = search.best()
    schedules = search.as_good(best)
    assert 1 < len(schedules) <= MOST_AS_GOOD
    prices = [search.price(one) for one in schedules]
    assert max(prices) <= AS_GOOD * prices[0]
    assert len(set(prices)) == len(prices)


def test_who_learns_keeps_where_any_teacher_would() -> None:
    scenario = load_scenario("family-training-0-4")  # 7 jobs
    plan = in_turn(scenario, 3)
    plan.jobs[:, AFTER] = -1
    narrow, wide = replace(plan, at_once=1), replace(plan, at_once=3)
    running, told = [], []
    for schedules in ([wide], [narrow], [narrow, wide], [wide, narrow]):
        environments = MixedVecEnv([Setup(EpisodeFactory(scenario), schedules, LAYOUT)], 1, seed=3)
        machines = environments.machines
        machines.begin(0, 0, 5, np.random.default_rng(5))
        teachers = Teachers(machines, imitation())
        for _ in range(6):
            slots = teachers.slots()
            told.append(slots[0].tolist())
            environments.step(slots[:, 0])
        running.append(int((machines.hosts["state"][0] == RUNNING).sum()))
    assert running == [3, 1, 1, 1]
    assert all(0 not in slots or set(slots) == {0} for slots in told)


def test_where_jobs_may_share_each_taught_edit_brings_the_host_nearer_to_a_list() -> None:
    """Several lists do not move back what another of them moved."""
    scenario = load_scenario("family-report-77-34")  # 8 jobs on 4 vCPUs, some of them memcached's
    plan = in_turn(scenario, 3)
    plan.jobs[:, AFTER] = -1
    normal = plan.jobs.copy()
    normal[:, WEIGHT] = normal[:, LATE_WEIGHT] = NORMAL
    schedules = [
        replace(plan, at_once=3),
        replace(plan, jobs=normal, at_once=3, front=1),
        replace(plan, jobs=normal, at_once=3, front=3, threshold_qps=0.6 * plan.threshold_qps),
        replace(plan, at_once=2, order=plan.order[::-1].copy()),
    ]
    setup = Setup(EpisodeFactory(scenario, room=FAMILY_ROOM), schedules, LAYOUT)
    environments = MixedVecEnv([setup], 1, seed=3)
    machines, shown = environments.machines, environments.reset()
    teachers, rng = Teachers(machines, imitation()), np.random.default_rng(7)
    rows, how = machines.rows[0, : machines.n_edits[0]], imitation()

    def edits_left(host: np.ndarray) -> list[int]:
        return [
            expert_edit(
                host, rows, one.jobs, one.order, one.late, one.threshold_qps, one.at_once,
                one.front, one.interrupts, setup.choices, setup.overflow, how.release,
                how.unprobed,
            )[1]
            for one in schedules
        ]  # fmt: skip

    differing = 0
    for _ in range(150):
        slots, before = teachers.slots()[0], edits_left(machines.hosts[0])
        taught = {int(setup.edit_of[slot]) for slot in slots.tolist()}
        assert (taught == {KEEP}) == (min(before) == 0)
        for edit in taught - {KEEP}:
            then = machines.hosts.copy()
            apply_edit(then.view(np.recarray)[0], rows, edit)
            apply_desired_at(then, 0, 1)
            assert min(edits_left(then[0])) < min(before)
        differing += len(taught) > 1
        # Half of the time it goes astray, so that every list has something left to do.
        astray = random_slot(environments, shown[0], rng)
        chosen = astray if rng.random() < 0.5 else rng.choice(slots)
        shown, _, _, _ = environments.step(np.array([chosen]))
    assert differing > 10


def test_who_is_in_front_has_normal_weight_and_the_others_fill_the_background() -> None:
    scenario = load_scenario("family-report-77-34")  # 8 jobs on 4 vCPUs, some of them memcached's
    plan = in_turn(scenario, 3)
    plan.jobs[:, AFTER] = -1
    plan.jobs[:, WEIGHT] = plan.jobs[:, LATE_WEIGHT] = NORMAL
    figures = []
    for front in (0, 1, 3):
        schedule = replace(plan, at_once=3, front=front)
        setup = Setup(EpisodeFactory(scenario, room=FAMILY_ROOM), [schedule], LAYOUT)
        environments = MixedVecEnv([setup], 1, seed=3)
        machines = environments.machines
        machines.begin(0, 0, 5, np.random.default_rng(5))
        figures.append(machines.baseline(0).figure_s(scenario))
        teachers, host = Teachers(machines, imitation()), machines.hosts[0]
        most_running = most_normal = 0
        for _ in range(100):
            running = host["state"] == RUNNING
            most_running = max(most_running, int(running.sum()))
            most_normal = max(most_normal, int((running & (host["weight"] == NORMAL)).sum()))
            environments.step(teachers.slots()[:, 0])
        assert (most_running, most_normal) == (3, front)
    assert len(set(figures)) == 3


def test_a_short_job_interrupts_a_long_one_that_then_goes_on() -> None:
    """And who follows such a schedule pauses what it does not have side by side."""
    scenario = load_scenario("family-training-0-40")  # 2 jobs, the first the longer one
    plan = replace(in_turn(scenario, 3), at_once=1)
    plan.jobs[:, AFTER] = -1
    jct_s = []
    for schedule in (plan, replace(plan, interrupts=True)):
        factory = EpisodeFactory(scenario, room=FAMILY_ROOM)
        environments = MixedVecEnv([Setup(factory, [schedule], LAYOUT)], 1, seed=3)
        machines = environments.machines
        machines.begin(0, 0, 5, np.random.default_rng(5))
        jct_s.append(machines.baseline(0).figure_s(scenario))
        teachers, host = Teachers(machines, imitation()), machines.hosts[0]
        most, paused, dones = 0, False, np.zeros(1, bool)
        while not dones[0]:
            _, _, dones, _ = environments.step(teachers.slots()[:, 0])
            most = max(most, int((host["state"] == RUNNING).sum()))
            paused |= bool((host["state"] == PAUSED).any())
        assert most == 1
        assert paused == schedule.interrupts
    assert jct_s[1] < 0.9 * jct_s[0]


def test_from_recipe_to_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = load_recipe("general").model_copy(
        update={"scenarios": ("cca-2025",), "family": 4, "selection_family": 1,
                "imitation": imitation(), "steps": 512, "n_envs": 16, "n_steps": 32,
                "batch_size": 256, "selection_episodes": 2}
    )  # fmt: skip
    best = train_general(short, 0, tmp_path)
    assert 0.3 < best["over_baseline"] < 5.0
    assert "time over the list schedule's" in capsys.readouterr().out
    policy = agents.make(tmp_path / "best.zip")
    machine = SimulatedMachine(EpisodeFactory(load_scenario("family-report-0-0")))
    run = run_episode(machine, policy, EpisodeStart(5, 5))
    assert not run.error
    alone = short.model_copy(update={"family": 0, "selection_family": 0, "steps": 32})
    again = train_general(alone, 0, tmp_path / "more", tmp_path / "last.zip")
    assert again["over_baseline"] > 0.0
