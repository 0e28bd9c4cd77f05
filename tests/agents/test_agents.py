import math
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

import agents
from agents import parameter_files
from agents.parameter_files import PARAMETER_FOLDER, what_fits
from agents.policy import SensorMissingError
from env.allocation import Allocation, JobAllocation, JobState, Weight
from env.errors import InputError
from env.scenario import Scenario, load_scenario
from env.simulator.machine import EpisodeFactory
from env.telemetry import JobTelemetry, ServiceTelemetry, Telemetry
from training.evaluation.episodes import run_episodes, starts_from

PENDING, RUNNING, PAUSED, DONE, _ = JobState
NEED_A_PROBE = ("heracles", "hybrid-prm", "hybrid-prm-tuned", "latency-aware-prm", "parties")
PICKY = (*NEED_A_PROBE, "intel-prm")
JOBS = ("blackscholes", "canneal", "dedup", "ferret", "freqmine", "radix", "vips")


def telemetry(time_s, cpu_s=0.0, requests=0.0, done=(), applied=None) -> Telemetry:
    held = {job: JobAllocation() for job in JOBS}
    if applied is not None:
        held.update(applied.jobs)
    jobs = {job: JobTelemetry(DONE if job in done else held[job].state, cpu_s=0.0) for job in JOBS}
    return Telemetry(
        time_s=time_s,
        service=ServiceTelemetry(requests, cpu_s, 0.0, qps=0.0, cpu_cores=0.0),
        vcpu_busy_s=(0.0,) * 4,
        jobs=jobs,
        applied=Allocation((0, 1), held),
    )


def ready(name: str, scenario: Scenario):
    policy = agents.make(name)
    policy.reset(scenario)
    return policy


def decide_at(policy, used: float, done=(), applied=None) -> Allocation:
    """One decision after a period in which memcached used `used` vCPUs."""
    policy.decide(telemetry(10.0, cpu_s=5.0, done=done, applied=applied))
    return policy.decide(telemetry(11.0, cpu_s=5.0 + used, done=done, applied=applied))


# --- the rules ---


@pytest.mark.parametrize(("used", "service"), [(0.59, (0,)), (0.61, (0, 1)), (1.4, (0, 1))])
@pytest.mark.parametrize("name", ["sequential", "concurrent", "threshold-groups"])
def test_cpu_threshold(scenario, name, used, service):
    assert decide_at(ready(name, scenario), used).service_cores == service


@pytest.mark.parametrize("name", ["sequential", "concurrent", "threshold-groups"])
def test_no_reading_yet_is_the_safe_side(scenario, name):
    assert ready(name, scenario).decide(telemetry(3.0)).service_cores == (0, 1)


def test_sequential_runs_the_first_job_that_is_not_done(scenario):
    policy = ready("sequential", scenario)
    assert decide_at(policy, 0.2, done=JOBS[:5]).jobs == {
        "radix": JobAllocation(RUNNING, (1, 2, 3), threads=2)  # 3 are not allowed
    }


def test_concurrent_runs_all_that_is_left(scenario):
    jobs = decide_at(ready("concurrent", scenario), 0.9, done=("vips",)).jobs
    assert set(jobs) == set(JOBS) - {"vips"}
    assert {job.cores for job in jobs.values()} == {(2, 3)}
    assert {job.threads for name, job in jobs.items() if name != "radix"} == {3}


def test_threshold_groups_follow_each_other(scenario):
    policy = ready("threshold-groups", scenario)
    first = decide_at(policy, 0.2).jobs
    assert {name: (job.cores, job.threads) for name, job in first.items()} == {
        "canneal": ((1, 2, 3), 3),
        "blackscholes": ((2, 3), 2),
        "dedup": ((3,), 1),
    }
    waiting = decide_at(policy, 0.9, done=("blackscholes", "dedup")).jobs
    assert {name: job.cores for name, job in waiting.items()} == {"canneal": (2, 3)}
    second = decide_at(policy, 0.9, done=("blackscholes", "dedup", "canneal")).jobs
    assert set(second) == {"ferret", "vips", "radix"}
    last = decide_at(policy, 0.9, done=tuple(set(JOBS) - {"freqmine"})).jobs
    assert set(last) == {"freqmine"}


def test_hysteresis_pause_takes_and_returns(scenario):
    policy = ready("hysteresis-pause", scenario)
    now = policy.decide(telemetry(0.0))
    assert now.service_cores == (0, 1)
    assert now.jobs["freqmine"] == JobAllocation(RUNNING, (2, 3), threads=2)
    assert now.jobs["blackscholes"].state == PENDING  # not started while memcached is there
    expected = [(0.32, PENDING), (0.29, RUNNING), (0.34, RUNNING), (0.36, PAUSED), (0.31, PAUSED)]
    cpu_s = 0.0
    for second, (used, state) in enumerate(expected, start=1):
        cpu_s += used
        now = policy.decide(telemetry(float(second), cpu_s=cpu_s, applied=now))
        assert now.jobs["blackscholes"].state == state
        assert now.service_cores == ((0,) if state == RUNNING else (0, 1))
        assert now.jobs["freqmine"].state == RUNNING


def test_hysteresis_pause_moves_the_last_light_job(scenario):
    policy = ready("hysteresis-pause", scenario)
    jobs = decide_at(policy, 0.9, done=("freqmine", "ferret", "canneal", "vips")).jobs
    assert jobs == {"blackscholes": JobAllocation(RUNNING, (2, 3), threads=1)}


def poll(policy, now, time_s, requests, done=()):
    return policy.decide(telemetry(time_s, requests=requests, done=done, applied=now))


def test_stats_poll_packed_moves_a_displaced_job(scenario):
    policy = ready("stats-poll-packed", scenario)
    now = policy.decide(telemetry(0.0))
    assert now.service_cores == (0, 1)
    assert {name: job.cores for name, job in now.jobs.items()} == {
        "canneal": (2,),
        "blackscholes": (3,),
    }
    now = poll(policy, now, 0.1, 10_900)  # 109K requests/s
    assert now.service_cores == (0,)
    assert now.jobs["radix"] == JobAllocation(RUNNING, (1,), threads=1)
    now = poll(policy, now, 0.2, 22_000)  # 111K
    assert now.service_cores == (0, 1)
    assert now.jobs["radix"] == JobAllocation(PAUSED, (1,), threads=1)
    now = poll(policy, now, 0.3, 33_100, done=("blackscholes",))
    assert now.jobs["radix"] == JobAllocation(RUNNING, (3,), threads=1)
    assert "dedup" not in now.jobs


def test_stats_poll_packed_widens(scenario):
    policy = ready("stats-poll-packed", scenario)
    done = ("canneal", "blackscholes", "radix", "dedup")
    now = poll(policy, None, 0.0, 0.0, done)
    assert now.jobs == {"freqmine": JobAllocation(RUNNING, (2, 3), threads=3)}
    now = poll(policy, now, 0.1, 1_000, done)
    assert now.jobs == {"freqmine": JobAllocation(RUNNING, (1, 2, 3), threads=3)}


def test_stats_poll_packed_as_run_keeps_memcached_where_it_was(scenario):
    policy = ready("stats-poll-packed-as-run", scenario)
    poll(policy, None, 0.0, 0.0)
    now = poll(policy, None, 0.1, 1_000)
    assert now.service_cores == (0, 1)
    assert now.jobs["radix"].cores == (1,)


def test_shared_background_lanes(scenario):
    policy = ready("shared-background", scenario)
    first = policy.decide(telemetry(0.0))
    assert first.service_cores == (0, 1)
    assert first.jobs == {
        "freqmine": JobAllocation(RUNNING, (0, 1, 2, 3), Weight.BACKGROUND, threads=4)
    }
    pair = policy.decide(telemetry(1.0, done=("freqmine", "canneal"))).jobs
    assert pair == {
        "ferret": JobAllocation(RUNNING, (0, 1), Weight.BACKGROUND, threads=2),
        "blackscholes": JobAllocation(RUNNING, (2, 3), Weight.BACKGROUND, threads=2),
    }
    alone = policy.decide(telemetry(1.0, done=set(JOBS) - {"ferret"})).jobs
    assert alone["ferret"].cores == (0, 1, 2, 3)


def test_static_reads_a_file(scenario, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "rule: static\nperiod_s: 5\nservice_cores: [0]\n"
        "jobs:\n  vips: {cores: [0, 3], threads: 1, background: true}\n"
    )
    policy = ready(str(path), scenario)
    now = policy.decide(telemetry(0.0))
    assert (policy.name, policy.period_s, now.service_cores) == ("mine", 5.0, (0,))
    assert now.jobs["vips"] == JobAllocation(RUNNING, (0, 3), Weight.BACKGROUND, 1)
    assert now.jobs["ferret"] == JobAllocation(RUNNING, (1, 2, 3), threads=3)


def test_random_repeats_itself_and_stays_legal(scenario):
    policy = ready("random", scenario)
    draws = [policy.decide(telemetry(float(i))).validate(scenario) for i in range(200)]
    policy.reset(scenario)
    assert draws == [policy.decide(telemetry(float(i))) for i in range(200)]
    assert len({draw.service_cores for draw in draws}) == 2
    assert len({draw.jobs["ferret"].cores for draw in draws}) == 15


# --- the peers' rules ---

TARGET_US = 800.0


def watched(time_s, p95_us=400.0, qps=50e3, applied=None, busy_s=(0.0,) * 4, **service):
    """Telemetry of a machine with a latency probe."""
    plain = telemetry(time_s, applied=applied)
    return replace(
        plain,
        service=plain.service._replace(p95_us=p95_us, qps=qps, **service),
        vcpu_busy_s=busy_s,
    )


def batch_cores(allocation) -> tuple[int, ...]:
    """The vCPUs that the best-effort jobs run on."""
    cores = {job.cores for job in allocation.jobs.values() if job.state == RUNNING}
    return cores.pop() if cores else ()


def budget(allocation) -> float:
    """The CPU time that the best-effort jobs get together [vCPUs]."""
    quotas = [job.quota for job in allocation.jobs.values() if job.state == RUNNING]
    return math.inf if None in quotas else pytest.approx(sum(quotas))


@pytest.mark.parametrize("name", NEED_A_PROBE)
def test_latency_rules_say_that_they_need_a_probe(scenario, name):
    with pytest.raises(SensorMissingError, match=f"{name} decides by latency"):
        ready(name, scenario).decide(telemetry(0.0))


def test_intel_prm_says_that_it_needs_cpi(scenario):
    with pytest.raises(SensorMissingError, match="decides by CPI"):
        ready("intel-prm", scenario).decide(telemetry(0.0))


def test_latency_aware_prm_climbs_and_falls(scenario):
    policy = ready("latency-aware-prm", scenario)
    assert policy.period_s == 18.5
    budgets = [budget(policy.decide(watched(18.5 * i))) for i in range(60)]
    assert budgets[0] == 4 / 50
    assert budgets[24] == 2.0  # level 25 of 50
    assert budgets[47:] == [3.84] * 13  # level 48 is the highest
    now = policy.decide(watched(2000.0))
    assert {job.weight for job in now.jobs.values()} == {Weight.BACKGROUND}
    assert batch_cores(now) == (0, 1, 2, 3)
    fallen = policy.decide(watched(2018.5, p95_us=TARGET_US, applied=now))
    assert {job.quota for job in fallen.jobs.values()} == {0.01}


def test_a_budget_is_shared_by_the_jobs_that_are_left(scenario):
    policy = ready("latency-aware-prm", scenario)
    for i in range(25):
        now = policy.decide(watched(18.5 * i))
    assert {job.quota for job in now.jobs.values()} == {2.0 / 7}
    seen = watched(500.0)
    left = {job: seen.jobs[job]._replace(state=DONE) for job in JOBS[2:]}
    now = policy.decide(replace(seen, jobs={**seen.jobs, **left}))
    assert {name: job.quota for name, job in now.jobs.items()} == {
        "blackscholes": 1.04,
        "canneal": 1.04,
    }


def test_hybrid_prm_follows_its_listing(scenario):
    policy = ready("hybrid-prm", scenario)
    budgets = [budget(policy.decide(watched(2.0 * i))) for i in range(4)]
    assert budgets == [1.0, 2.0, 3.0, 4.0]
    assert budget(policy.decide(watched(14.0, qps=179e3))) == 4.0  # not looked at yet
    assert batch_cores(policy.decide(watched(16.0, qps=154e3))) == ()  # above 85 %
    assert batch_cores(policy.decide(watched(32.0, qps=150e3))) == ()  # 83 %: stays suspended
    assert budget(policy.decide(watched(48.0, qps=100e3))) == 1.0
    held = policy.decide(watched(64.0, qps=100e3, p95_us=730.0))  # slack below 0.10
    assert budget(held) == 1.0
    assert batch_cores(policy.decide(watched(80.0, p95_us=801.0))) == ()
    assert batch_cores(policy.decide(watched(366.0))) == ()  # cooling down
    assert budget(policy.decide(watched(382.0))) == 1.0


def test_hybrid_prm_tuned_climbs_in_levels(scenario):
    policy = ready("hybrid-prm-tuned", scenario)
    budgets = [budget(policy.decide(watched(2.0 * i))) for i in range(60)]
    assert (budgets[0], budgets[24], budgets[-1]) == (0.08, 2.0, 4.0)


def test_heracles_splits_the_vcpus(scenario):
    policy = ready("heracles", scenario)
    splits = [policy.decide(watched(2.0 * i)) for i in range(4)]
    assert [now.service_cores for now in splits] == [(0, 1, 2), (0, 1), (0,), (0,)]
    assert batch_cores(splits[1]) == (2, 3)
    low = policy.decide(watched(15.0, p95_us=790.0))  # slack below 0.05
    assert low.service_cores == (0, 1)
    assert policy.decide(watched(30.0, p95_us=900.0)).service_cores == (0, 1, 2, 3)
    assert policy.decide(watched(300.0)).service_cores == (0, 1, 2, 3)
    assert policy.decide(watched(331.0)).service_cores == (0, 1, 2)


def test_parties_rolls_back_and_waits(scenario):
    policy = ready("parties", scenario)
    assert policy.decide(watched(0.0, p95_us=700.0)).service_cores == (0, 1)  # 0.125: content
    assert policy.decide(watched(0.5, p95_us=400.0)).service_cores == (0,)
    assert policy.decide(watched(1.0, p95_us=790.0)).service_cores == (0, 1)  # rolled back
    assert policy.decide(watched(1.5, p95_us=300.0)).service_cores == (0, 1)
    assert policy.decide(watched(31.5, p95_us=300.0)).service_cores == (0,)


def test_perfiso_keeps_its_buffer_idle(scenario):
    policy = ready("perfiso", scenario)
    first = watched(0.0, busy_s=(5.0, 9.0, 2.0, 2.0))
    assert policy.decide(first).jobs == first.applied.jobs  # one reading of a counter is no rate
    now = policy.decide(watched(0.1, busy_s=(5.0, 9.0, 2.0, 2.0)))
    assert batch_cores(now) == (1, 2, 3)  # everything idle but the buffer
    now = policy.decide(watched(0.2, busy_s=(5.04, 9.1, 2.1, 2.1)))
    assert now.service_cores == (0, 1)  # 0.6 idle: one vCPU back at once
    now = policy.decide(watched(0.3, busy_s=(5.08, 9.1, 2.2, 2.2)))
    assert now.service_cores == (0, 1)  # 1.6 idle: another one would leave too little
    now = policy.decide(watched(0.4, busy_s=(5.09, 9.1, 2.3, 2.3)))
    assert now.service_cores == (0,)


def test_intel_prm_learns_alone_then_climbs_until_it_sees_contention(scenario):
    policy = ready("intel-prm", scenario)

    def at(time_s, cpi, cpu_s, applied=None):
        return policy.decide(watched(time_s, applied=applied, cpu_s=cpu_s, cpi=cpi))

    cpu_s, time_s = 0.0, 0.0
    while time_s < 120.0:  # alone: up to 1.9 vCPUs, CPI 1.0 +- 0.1
        cpu_s += 3.8 if time_s == 60.0 else 0.4
        assert at(time_s, 1.1 if time_s % 4 else 0.9, cpu_s).jobs == {}
        time_s += 2.0
    budgets = []
    while time_s < 500.0:
        cpu_s += 0.4
        budgets.append(budget(at(time_s, 1.0, cpu_s)))
        time_s += 2.0
    # One level of 1.9 / 20 vCPUs every 7 cycles, the whole machine at level 20.
    assert budgets[5:8] == [0.07, 0.095, 0.095]  # the least is 0.01 a job
    assert budgets[7 * 19 - 1] == 1.9 * 19 / 20
    assert budgets[-1] == math.inf
    cpu_s += 3.0
    assert budget(at(time_s, 1.0, cpu_s)) == 0.07  # above the recorded maximum


@pytest.mark.parametrize("name", [name for name in agents.names() if name not in PICKY])
def test_every_shipped_policy_ends_with_nothing_to_run(scenario, name):
    policy = ready(name, scenario)
    assert policy.name == name
    assert policy.period_s > 0.0
    policy.decide(telemetry(0.0)).validate(scenario)
    assert policy.decide(telemetry(1.0, done=JOBS)).validate(scenario).jobs == {}


# --- the registry ---


@pytest.mark.parametrize("name", [*agents.names(), "checkpoints/best.zip"])
def test_an_episode_does_not_depend_on_the_one_before(factory, name):
    starts = starts_from(5, 2)
    policy = agents.make(name)
    *_, again = run_episodes(policy, factory, starts)
    fresh = run_episodes(agents.make(name), factory, starts[1:])[0]
    assert again.summary == fresh.summary


def test_unknown_names_list_the_known():
    with pytest.raises(InputError, match=r"unknown policy nope; known are .*threshold-groups"):
        agents.make("nope")


def test_a_missing_parameter_file_lists_the_known():
    with pytest.raises(InputError, match=r"none\.yaml: cannot be read .*one of: .*perfiso"):
        agents.make("none.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rule: [", "not valid YAML at line"),
        ("rule: nope", "rule: must be one of sequential"),
        ("5", "rule: must be one of"),
        ("rule: sequential\nperiod_s: 1.0e-9\nthreshold: 1\nthreads: 3", "period_s: .*to 0.001"),
        ("rule: sequential\nperiod_s: 1\nthreshold: 1\nthreads: 3\nx: 1", "x: unknown field; all"),
        ("rule: static\nperiod_s: 1\nservice_cores: [9]", r"memcached: cores \(9,\)"),
        ("rule: static\nperiod_s: 1\njobs: {x: {cores: [1], threads: 1}}", "x: unknown job"),
    ],
)
def test_bad_parameter_files(scenario, tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as fault:
        agents.make(path).reset(scenario)
    assert "\n" not in str(fault.value)


def test_a_plan_for_other_jobs_is_refused(scenario):
    content = scenario.model_dump()
    content["jobs"] = [job for job in content["jobs"] if job["name"] != "radix"]
    other = Scenario.model_validate(content)
    for name in ("threshold-groups", "hysteresis-pause", "stats-poll-packed", "shared-background"):
        with pytest.raises(InputError, match=r"radix.*; concurrent is for any scenario"):
            agents.make(name).reset(other)
    for name in ("sequential", "concurrent", "static", "random", *PICKY):
        agents.make(name).reset(other)


@pytest.mark.parametrize(
    ("name", "job", "fits"),
    [
        ("local", "tree", str(PARAMETER_FOLDER / "local/threshold-groups.yaml")),
        ("cca-2025", "radix", "threshold-groups"),
    ],
)
def test_a_refused_plan_is_told_which_one_fits(tmp_path, monkeypatch, name, job, fits):
    monkeypatch.chdir(tmp_path)  # what it is told is found from anywhere
    scenario = load_scenario(name)
    path = tmp_path / "threshold-groups.yaml"
    group = [{"job": job, "threads": 1, "cores": 1}]
    rule = {"rule": "threshold-groups", "period_s": 1.0, "threshold": 0.6, "groups": [group]}
    path.write_text(yaml.safe_dump(rule))
    with pytest.raises(InputError, match=rf"; {fits} fits \(--policy {fits}\)$"):
        agents.make(path).reset(scenario)
    agents.make(fits).reset(scenario)
    fewer = scenario.with_jobs([one for one in scenario.jobs if one.name != scenario.job_names[0]])
    own = scenario.with_jobs([*fewer.jobs, scenario.jobs[0].model_copy(update={"name": "mine"})])
    with pytest.raises(InputError, match=r"; concurrent is for any scenario \(--policy concurrent"):
        agents.make(fits).reset(own)


def test_a_plan_fits_by_its_jobs_whatever_else_its_file_says(tmp_path, monkeypatch):
    """Jobs may be keys of a plan; other text in a file, or a file of no rule, is no job's name."""
    scenario = load_scenario("cca-2025")
    assert what_fits("hysteresis-pause", scenario).startswith("hysteresis-pause fits ")
    monkeypatch.setattr(parameter_files, "PARAMETER_FOLDER", tmp_path)
    queue = scenario.with_jobs([scenario.jobs[0].model_copy(update={"name": "arrival"})])
    (tmp_path / "no-rule.yaml").write_text("period_s: 1.0\n")
    shutil.copy(PARAMETER_FOLDER / "first-come.yaml", tmp_path)  # its order is "arrival"
    assert what_fits("first-come", queue).startswith("concurrent is for any scenario ")


def test_agents_stay_light():
    code = "import sys, agents; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    heavy = {"torch", "gymnasium", "stable_baselines3", "numba", "matplotlib", "scipy"}
    assert not heavy & set(shown.stdout.split())


# --- the same figures as ever, and any scenario ---

PUBLISHED_S = {
    ("cca-2025", "sequential"): 744.6943253486581,
    ("cca-2025", "concurrent"): 670.7615950506666,
    ("cca-2025", "threshold-groups"): 716.146972364401,
    ("cca-2025", "hysteresis-pause"): 742.8661791610829,
    ("cca-2025", "stats-poll-packed"): 649.5609942523148,
    ("cca-2025", "shared-background"): 599.5281730457764,
    ("cca-2024", "sequential"): 702.6625600961271,
    ("cca-2024", "hysteresis-pause"): 681.2384707309592,
    ("cca-2024", "stats-poll-packed"): 680.7666257369689,
    ("cca-2024", "shared-background"): 541.180534348839,
}
"""Makespans of the first trace of seed 0 [s]; a new fit of a profile or a new guard moves them."""


@pytest.mark.parametrize(("name", "rule"), list(PUBLISHED_S))
def test_shipped_scenarios_keep_their_figures(name, rule):
    factory = EpisodeFactory(load_scenario(name))
    (run,) = run_episodes(agents.make(rule), factory, starts_from(0, 1))
    assert run.makespan_s == pytest.approx(PUBLISHED_S[name, rule], rel=1e-9)


@pytest.mark.parametrize("name", [f"family-report-0-{index}" for index in (1, 3, 4)])
def test_every_rule_runs_any_scenario(name):
    """Jobs all at once on 4 vCPUs, arriving on 16, and on 2 of which memcached may hold both."""
    factory = EpisodeFactory(load_scenario(name))
    for rule in agents.names():
        (run,) = run_episodes(agents.make(rule), factory, starts_from(0, 1))
        assert run.error == "", rule


def test_a_queue_serves_who_came_first_or_has_least_work(scenario):
    first, least = ready("first-come", scenario), ready("shortest-first", scenario)
    assert set(decide_at(first, 0.9).jobs) == {"blackscholes"}
    assert set(decide_at(least, 0.9).jobs) == {"dedup"}
    held = Allocation((0, 1), {"vips": JobAllocation(RUNNING, (2, 3), threads=4)})
    assert set(decide_at(least, 0.9, applied=held).jobs) == {"vips"}  # nobody is sent away
    assert [job.cores for job in decide_at(first, 0.2).jobs.values()] == [(2, 3), (1,)]
