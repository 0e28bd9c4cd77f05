import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

import agents
from env.allocation import JobState, Weight, mask_of
from env.codes import PLACE
from env.physics.parameters import SENSITIVITY
from env.scenario import SCENARIO_FOLDER, load_scenario
from env.simulator.machine import EpisodeFactory, Variation
from env.simulator.rates import refresh
from training.evaluation import comparison
from training.evaluation.bound import LEVELS, LowerBound, bound_report, lower_bounds
from training.evaluation.episodes import run_episodes, starts_from
from training.evaluation.schedule_search import (
    VIOLATION_COST_S,
    Search,
    best_schedules,
    general_schedule,
    in_turn,
)


@pytest.fixture(scope="module", params=["cca-2025", "cca-2024"])
def problem(request):
    return EpisodeFactory(load_scenario(request.param))


@pytest.fixture(scope="module")
def starts():
    return starts_from(11, 4)


def test_no_policy_beats_the_bound(problem, starts):
    bounds = lower_bounds(problem, starts)
    for name in ("concurrent", "shared-background", "stats-poll-packed", "parties"):
        runs = run_episodes(agents.make(name), problem, starts)
        for run, bound in zip(runs, bounds, strict=True):
            assert run.makespan_s > bound


def test_a_machine_of_any_size_has_a_bound(starts):
    factory = EpisodeFactory(load_scenario("family-report-1-16"))  # 12 vCPUs
    (bound,) = lower_bounds(factory, starts[:1])
    (run,) = run_episodes(agents.make("parties"), factory, starts[:1])
    assert 0.5 * run.makespan_s < bound < run.makespan_s


def test_vcpus_settled_pair_by_pair_earn_what_the_best_of_all_subsets_does(problem):
    hosts, targets = problem.new_hosts(1), problem.new_targets(1)
    problem.begin(hosts, targets, 0, 1, np.random.default_rng(1))
    bound = LowerBound(problem.scenario, hosts[0])
    rng = np.random.default_rng(2)
    price = rng.uniform(0.5, 2.0, len(problem.scenario.jobs)) / bound.worth
    subsets = [np.array(used) for used in itertools.product([False, True], repeat=4)]
    most = np.zeros(LEVELS)
    for mode in bound.modes:
        for used in subsets:
            most = np.maximum(most, bound._earned(price, mode, used & mode.free).sum(axis=1))
    assert bound.earnings(price) == pytest.approx(most, rel=1e-12)


def test_no_random_schedule_beats_the_bound(problem, starts):
    bound = lower_bounds(problem, starts)[0]
    rng = np.random.default_rng(5)
    search = Search(problem, starts[:1], rng)
    schedule = in_turn(problem.scenario, 3)
    for _ in range(300):
        schedule = search.neighbour(schedule)
        makespan_s, _ = search.cost(schedule)
        assert makespan_s > bound


def test_a_schedule_ends_where_rounding_leaves_it_just_before_the_time_cap(problem, starts):
    search = Search(problem, starts[:1], np.random.default_rng(5))
    search.before["now_s"] = search.before["duration_s"] - 5e-10
    seconds, _ = search.cost(in_turn(problem.scenario, 3))  # went on for ever
    assert seconds == math.inf


def test_no_allocation_earns_more_than_the_bound_says(problem):
    """Random ones that the regulator lets through, each bettered for as long as that earns more."""
    hosts, targets = problem.new_hosts(1), problem.new_targets(1)
    start = starts_from(1, 1)[0]
    problem.begin(hosts, targets, 0, start.trace_seed, start.rng())
    host, scenario = hosts[0], problem.scenario
    host["job_params"][:, SENSITIVITY] = 0.0  # the bound forgives memory traffic
    bound = LowerBound(scenario, host)
    rng = np.random.default_rng(7)
    jobs, vcpus = scenario.jobs, scenario.machine.vcpus
    closest = []
    for _ in range(20):
        # Any prices make a bound; with these the jobs earn about the same.
        price = np.exp(rng.normal(0.0, 0.2, len(jobs))) / bound.worth
        most = bound.earnings(price)
        host["true_service"] = held = mask_of(
            scenario.service.sets[rng.integers(len(scenario.service.sets))]
        )
        host["load_qps"] = rng.uniform(0.0, scenario.load.qps_max) * rng.random()
        level = int(host["load_qps"] / scenario.load.qps_max * LEVELS)
        host["true_state"] = JobState.PAUSED
        best = 0.0
        for _ in range(400):
            before = host.copy()
            job = rng.integers(len(jobs))
            cores = rng.integers(1, 2**vcpus)
            weight = Weight.BACKGROUND if cores & held else rng.choice(list(Weight))
            host["true_state"][job] = rng.choice((JobState.RUNNING, JobState.PAUSED))
            host["true_cores"][job], host["true_weight"][job] = cores, weight
            host["threads"][job] = rng.choice(jobs[job].threads)
            refresh(host)
            earned = float(price @ host["speed"])
            assert earned <= most[level] * (1.0 + 1e-9)
            if earned < best:
                hosts[0] = before
            best = max(best, earned)
        closest.append(best / most[level])
    assert max(closest) > 0.9


def test_a_busier_service_and_more_work_raise_the_bound(problem):
    hosts, targets = problem.new_hosts(1), problem.new_targets(1)
    start = starts_from(1, 1)[0]
    problem.begin(hosts, targets, 0, start.trace_seed, start.rng())
    load = problem.scenario.load
    bound = LowerBound(problem.scenario, hosts[0])
    calm = bound.seconds(np.full(500, load.qps_min, float), load.interval_s)
    assert bound.seconds(np.full(500, 0.9 * load.qps_max), load.interval_s) > 1.1 * calm
    hosts["job_params"][:, :, 0] *= 1.5
    longer = LowerBound(problem.scenario, hosts[0])
    assert longer.seconds(np.full(500, load.qps_min, float), load.interval_s) == pytest.approx(
        1.5 * calm, rel=0.01
    )


def test_the_bound_is_the_shortest_stretch_that_earns_enough(problem):
    hosts, targets = problem.new_hosts(1), problem.new_targets(1)
    for start in starts_from(3, 1):
        problem.begin(hosts, targets, 0, start.trace_seed, start.rng())
        bound, interval_s = LowerBound(problem.scenario, hosts[0]), 10.0
        load = targets[0].copy()
        load[:20] = problem.scenario.load.qps_max  # it pays to wait
        level = (load / problem.scenario.load.qps_max * LEVELS).astype(int)
        earned = np.append(0.0, np.cumsum(bound.earned[level.clip(max=LEVELS - 1)]) * interval_s)
        edges = interval_s * np.arange(len(earned))
        begins = np.linspace(0.0, np.interp(earned[-1] - 1.0, earned, edges), 50_001)
        needed = np.interp(np.interp(begins, edges, earned) + 1.0, earned, edges) - begins
        shortest = bound.seconds(load, interval_s)
        assert shortest <= needed.min() + 1e-9
        assert shortest == pytest.approx(needed.min(), abs=0.05)
        assert shortest < needed[0] - 1.0


def test_the_search_improves_and_its_schedule_repeats(problem, starts):
    rng = np.random.default_rng(1)
    search = Search(problem, starts[:1], rng)
    first = in_turn(problem.scenario, 2)
    makespan_s, schedule = search.anneal(first, 400)
    assert makespan_s < search.cost(first)[0]
    assert search.cost(schedule) == (pytest.approx(makespan_s), 0)


def test_a_schedule_is_given_up_once_it_is_sure_to_cost_too_much(problem, starts):
    search, schedule = (
        Search(problem, starts[:2], np.random.default_rng(1)),
        in_turn(problem.scenario, 2),
    )
    makespan_s, violations = search.cost(schedule)
    price_s = makespan_s + VIOLATION_COST_S * violations / 2
    assert search.cost(schedule, price_s + 1e-6) == (makespan_s, violations)
    assert search.cost(schedule, 0.4 * price_s)[0] == math.inf
    assert search.hosts["now_s"].sum() < price_s


def test_a_schedule_of_edits_uses_only_their_places(problem, starts):
    _, schedule = general_schedule(problem, starts[:2], 300, np.random.default_rng(2))
    places = {(edit.cores, edit.weight) for edit in problem.table if edit.kind == PLACE}
    for row in schedule.jobs.tolist():
        assert tuple(row[2:4]) in places and tuple(row[4:6]) in places


def test_violations_to_be_expected_cost_their_price(problem, starts):
    rng, schedule = np.random.default_rng(2), in_turn(problem.scenario, 3)
    free, priced = (Search(problem, starts, rng, violation_weight=one) for one in (0.0, 2.0))
    makespan_s, _ = free.cost(schedule)
    expected = free.hosts["expected_violations"].mean()
    assert 0.0 < expected < free.hosts["intervals"].mean()
    price_s = 2.0 * expected * problem.scenario.load.interval_s
    assert priced.cost(schedule)[0] == pytest.approx(makespan_s + price_s)


def test_the_same_seed_finds_the_same(problem, starts):
    assert best_schedules(problem, starts[:1], 60) == best_schedules(problem, starts[:1], 60)


@pytest.mark.parametrize(("options", "schedules"), [([], 1000), (["7"], 7)])
def test_evaluate_adds_the_bound(monkeypatch, capsys, options, schedules):
    def found(factory, starts, evaluations):
        assert evaluations == schedules
        return [math.inf, 600.0]

    monkeypatch.setattr("training.evaluation.bound.best_schedules", found)
    arguments = comparison.parser().parse_args(
        ["--policy", "shared-background", "--episodes", "2", "--bound", *options]
    )
    content = comparison.evaluate(arguments)
    mean = content["policies"][0]["makespan_s"]["mean"]
    assert content["bound"]["search_s"] == {"mean": 600.0, "found": 1, "tried": 2}
    assert 0.5 * mean < content["bound"]["lower_s"]["mean"] < mean
    comparison.show(content)
    assert "no schedule's makespan is below" in capsys.readouterr().out


def test_where_jobs_arrive_completion_times_are_told_and_searched_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = yaml.safe_load((SCENARIO_FOLDER / "cca-2025.yaml").read_text())
    for number, job in enumerate(content["jobs"]):
        job["arrival_s"] = 60.0 * number
    path, out = tmp_path / "arriving.yaml", tmp_path / "out.json"
    path.write_text(yaml.safe_dump(content))
    line = f"--scenario {path} --policy first-come --policy static --episodes 2 --bound 6"
    comparison.main([*line.split(), "--json", str(out)])
    found = json.loads(out.read_text())
    for entry in found["policies"]:
        jct = entry["jct_s"]
        assert 0.0 < jct["mean"] < jct["p95"] < entry["makespan_s"]["mean"]
        assert entry["slowdown"] >= 1.0
    shown = capsys.readouterr().out
    assert "JCT, s" in shown and "best schedule found, by mean JCT" in shown.replace("\n", " ")
    # A makespan is longer than what its jobs take on average.
    assert found["bound"]["search_s"]["mean"] < found["bound"]["lower_s"]["mean"]


def test_one_bound_does_not_fit_many_physics(problem, starts):
    factory = EpisodeFactory(problem.scenario, problem.profile, Variation(physics=1.0))
    with pytest.raises(ValueError, match="one physics"):
        bound_report(factory, starts)


def test_memcached_may_not_share_more_vcpus_than_can_be_enumerated(starts):
    with pytest.raises(ValueError, match="shares up to 6 vCPUs; here it shares up to 17"):
        lower_bounds(EpisodeFactory(load_scenario("prm-2020")), starts[:1])
