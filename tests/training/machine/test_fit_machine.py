"""A profile, a scenario and a report from tables with known truth."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from env.errors import InputError
from env.physics.service import SERVICE_FIELDS, service_state
from env.scenario import Job, Scenario, Service, load_scenario
from env.simulator.profile import Parameter, Profile, load_profile
from training.analysis.curves import knee_qps, trusted
from training.analysis.findings import curves, job_times
from training.machine.fit_machine import LOOP_VCPUS, fit_machine, write_profile
from training.machine.job_traits import fit_pairs
from training.machine.local_load import local_load
from training.machine.machine_report import Measured, write_report
from training.measuring.campaign import FULL, GRID, Campaign
from training.measuring.experiment import Factor, factor
from training.measuring.rounds import Store
from training.measuring.samples import LOADED, SERVED, shortened


def true_parameters() -> np.ndarray:
    base = load_profile("cca-2025").service_array()
    truth = dict(zip(SERVICE_FIELDS, base, strict=True))
    truth |= {"core_capacity_qps": 400e3, "idle_us": 80.0, "level_us": 110.0, "rise_qps": 90e3}
    truth |= {"queue_us": 30.0, "outstanding": 250.0, "slice_us": 100.0}
    truth |= {"background_capacity": 0.04, "background_latency": 0.02}
    return np.array([truth[name] for name in SERVICE_FIELDS])


def predicted_p95(profile: Profile | None, load_qps: float) -> float:
    """p95 of two threads on one vCPU, by a profile or in truth."""
    params = true_parameters() if profile is None else profile.service_array()
    nobody = np.zeros(2)
    state = service_state(load_qps, 2, 1, np.array([-1, -1]), nobody, nobody, nobody, 0.0, params)
    return float(state[0])


SERVICE = Service(threads=2, slo_us=800.0, core_choices=((0,), (0, 1)))
NO_SCANS = pd.DataFrame({"target_qps": [], "p95_us": [], "disturbed": []})


def machine_tables(scenario: Scenario) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """What a machine that obeys the physics would be measured to do."""
    params = true_parameters()
    siblings, nobody = np.array([-1, -1]), np.zeros(2)
    rng = np.random.default_rng(0)
    rows = []
    for beside in ("none", "cpu (background)", "cpu (equal)"):
        for cores in (1,) if "equal" in beside else (1, 2):
            own = np.arange(2) < cores
            for target in 400e3 * np.array(GRID):
                used = 0.0 if beside == "none" else max(1.0 - target / cores / 400e3, 0.0)
                equal = max(used, 0.5) * own if "equal" in beside else nobody
                background = used * own if "background" in beside else nobody
                p95, capacity, cpu, _ = service_state(
                    target, 2, (1 << cores) - 1, siblings, background, equal, nobody, 0.0, params
                )
                for rep in range(3):
                    rows.append(
                        {
                            "threads": 2,
                            "cores": cores,
                            "beside": beside,
                            "rep": rep,
                            "target_qps": target,
                            "achieved_qps": min(target, capacity),
                            "p95_us": p95 * np.exp(0.03 * rng.normal()),
                            "avg_us": 0.6 * p95,
                            "p50_us": 0.5 * p95,
                            "p99_us": 1.5 * p95,
                            "cpu_util_pct": 100.0 * cpu,
                            "beside_cores": float((equal + background).sum()),
                            "client_cores": 0.3,
                            "probe_cores": 0.08,
                            "shares_client": 0.0,
                            "disturbed": 0.0,
                        }
                    )
    jobs = pd.DataFrame(
        {
            "what": f"matrix {threads}",
            "job": "matrix",
            "threads": threads,
            "beside": "none",
            "real_s": 0.5 + 30.0 * (0.1 + 0.9 / threads),
            "cpu_s": 30.0,
            "cycles": math.nan,
            "instructions": math.nan,
            "overhead_s": 0.5,
            "sampled": 1.0,
            "disturbed": 0.0,
            "rep": rep,
        }
        for threads in (1, 2)
        for rep in range(2)
    )
    actions = [("process", name) for name in ("set_cores", "start", "gate", "pause", "resume")]
    actions += [("service", name) for name in ("pin_service", "sensor_noise")]
    times = {"median_s": 0.01, "p90_s": 0.02, "p99_s": 0.03, "n": 9}
    actuation = pd.DataFrame([{"of": of, "action": name} | times for of, name in actions])
    return pd.DataFrame(rows), jobs, actuation


def test_the_fit_finds_the_machine_that_made_the_tables(scenario: Scenario) -> None:
    base = load_profile(scenario.profile)
    profile = fit_machine(scenario, base, *machine_tables(scenario), "a machine")
    service = profile.service
    assert service["core_capacity_qps"].value == pytest.approx(400e3, rel=0.03)
    # Slice and plateau stand in for each other where all sweeps have two threads on one vCPU.
    assert predicted_p95(profile, 600e3) == pytest.approx(predicted_p95(None, 600e3), rel=0.1)
    assert predicted_p95(profile, 200e3) == pytest.approx(predicted_p95(None, 200e3), rel=0.1)
    assert service["background_capacity"].value < 0.1  # the prior says 0.18
    assert profile.fit_error["in-sample p95 alone, median"] < 0.05
    assert service["core_capacity_qps"].source == "measured here"
    assert service["smt"].source.startswith("prior")  # no siblings here
    job = profile.jobs["matrix"]
    assert job["work_s"].value == pytest.approx(30.0, rel=0.05)
    serial = job["serial_fraction"].value
    two_threads_s = job["work_s"].value * (serial + (1.0 - serial) / 2.0)
    assert two_threads_s == pytest.approx(30.0 * 0.55, rel=0.05)
    assert job["sensitivity"].source.startswith("prior")
    assert profile.host["fast_latency_s"].value == pytest.approx(0.01)
    # Nothing here tells whether threads wait for the slowest: a rehearsal may move it far.
    assert profile.host["straggling"].spread >= 1.0


def test_a_window_in_which_nothing_was_served_says_nothing_of_costs(scenario: Scenario) -> None:
    base = load_profile(scenario.profile)
    latency, jobs, actuation = machine_tables(scenario)
    without = fit_machine(scenario, base, latency, jobs, actuation, "m").costs
    held_up = latency[(latency["beside"] == "none") & (latency["cores"] == 1)].head(2).copy()
    held_up[["achieved_qps", "cpu_util_pct"]] = [[0.0, 5.0], [100e3, 0.0]]
    table = pd.concat([latency, held_up], ignore_index=True)
    found = fit_machine(scenario, base, table, jobs, actuation, "m").costs
    exponent = without["service_exponent"].value
    assert found["service_exponent"].value == pytest.approx(exponent, rel=1e-3)


def test_a_load_generator_costs_what_a_job_beside_it_does_not_get(scenario: Scenario) -> None:
    base = load_profile(scenario.profile)
    latency, jobs, actuation = machine_tables(scenario)
    shared = latency.assign(shares_client=1.0)
    alone = fit_machine(scenario, base, shared, jobs, actuation, "m").costs
    at_most = alone["client_cpu"].value  # at what one vCPU serves; here the load takes always 0.3
    assert at_most == pytest.approx(0.3, rel=0.01)
    assert alone["agent_cpu"].value == pytest.approx(LOOP_VCPUS + 0.08)
    beside = jobs.head(1).assign(beside=LOADED, real_s=0.5 + 30.0 / 0.8)
    crowded = fit_machine(scenario, base, shared, pd.concat([jobs, beside]), actuation, "m").costs
    assert cost_while_served(crowded) == pytest.approx(0.2, rel=0.01)
    assert crowded["client_exponent"] == alone["client_exponent"]
    assert crowded["agent_cpu"] == alone["agent_cpu"]


def test_how_a_load_generators_cost_goes_with_the_load_is_told_beside_a_job(
    scenario: Scenario,
) -> None:
    """Alone they hardly do: there each of its packets wakes an idle vCPU."""
    base = load_profile(scenario.profile)
    latency, jobs, actuation = machine_tables(scenario)
    beside = latency["beside"] != "none"
    part = latency["achieved_qps"] / 400e3
    told = latency.assign(
        shares_client=1.0,
        client_cores=(0.5 * part**0.05).where(~beside, 0.4 * part**0.3),
        probe_cores=np.where(beside, 0.1, 0.15),
    )
    costs = fit_machine(scenario, base, told, jobs, actuation, "m").costs
    assert costs["client_exponent"].value == pytest.approx(0.3, rel=0.02)
    assert costs["client_cpu"].value == pytest.approx(0.4, rel=0.02)
    assert costs["agent_cpu"].value == pytest.approx(LOOP_VCPUS + 0.1, rel=0.01)
    few = told[~beside | (told["target_qps"] == told["target_qps"].min())]
    full = told.assign(shares_client=(told["achieved_qps"] >= 400e3).astype(float))
    for without in (few, full):  # one load alone, or none below capacity, tells of no power
        costs = fit_machine(scenario, base, without, jobs, actuation, "m").costs
        assert costs["client_exponent"].value == pytest.approx(0.05, rel=0.02)


def cost_while_served(costs: dict[str, Parameter]) -> float:
    """What load generator and probe take of a vCPU while jobs are measured."""
    return costs["client_cpu"].value * SERVED ** costs["client_exponent"].value


def test_container_times_are_those_of_docker_where_jobs_have_images(scenario: Scenario) -> None:
    base = load_profile(scenario.profile)
    latency, jobs, actuation = machine_tables(scenario)
    boxed = scenario.model_copy(
        update={"jobs": tuple(j.model_copy(update={"image": "i"}) for j in scenario.jobs)}
    )
    host = fit_machine(boxed, base, latency, jobs, actuation, "m").host
    assert host["container_start_s"].source.startswith("prior")
    processes = actuation[actuation["of"] == "process"]
    docker = processes.assign(of="docker", median_s=0.4)
    host = fit_machine(boxed, base, latency, jobs, pd.concat([actuation, docker]), "m").host
    assert host["container_start_s"].value == pytest.approx(0.4)
    assert host["gate_latency_s"].value == pytest.approx(0.4)
    assert "docker" in host["api_latency_p99_s"].source


def test_what_changes_cost_work_is_measured_or_assumed(scenario: Scenario) -> None:
    base = load_profile(scenario.profile)
    latency, jobs, actuation = machine_tables(scenario)
    assumed = fit_machine(scenario, base, latency, jobs, actuation, "m").host
    assert assumed["migration_cost_s"].value == base.host["migration_cost_s"].value
    assert assumed["resume_cost_s"].source.startswith("prior")
    costs = {"move": 5e-4, "resume": -1e-5}  # by chance less than nothing
    rows = [{"of": "work", "action": kind, "median_s": cost_s} for kind, cost_s in costs.items()]
    table = pd.concat([actuation, pd.DataFrame(rows)])
    host = fit_machine(scenario, base, latency, jobs, table, "m").host
    assert host["migration_cost_s"].value == pytest.approx(5e-4)
    assert 0.0 < host["resume_cost_s"].value < 1e-5


def test_hiccups_are_as_sure_as_their_number_allows(scenario: Scenario) -> None:
    base = load_profile("local")
    known = {name: it for name, it in base.host.items() if not name.startswith(("stall", "steal"))}
    base = base.model_copy(update={"jobs": load_profile(scenario.profile).jobs, "host": known})
    latency, jobs, actuation = machine_tables(scenario)
    assert "stalls_per_s" not in fit_machine(scenario, base, latency, jobs, actuation, "m").host
    seen = [
        {"of": "hiccups", "action": "stalls", "seen": 16, "mean_s": 0.05, "watched_s": 40.0},
        {"of": "hiccups", "action": "steals", "seen": 0, "mean_s": math.nan, "watched_s": 40.0},
    ]
    table = pd.concat([actuation, pd.DataFrame(seen)])
    host = fit_machine(scenario, base, latency, jobs, table, "m").host
    assert host["stalls_per_s"].value == pytest.approx(16.5 / 40.0)
    assert host["stalls_per_s"].spread == pytest.approx(16.5**-0.5, rel=0.01)
    assert host["stall_s"].value == pytest.approx(0.05)
    assert host["stall_s"].spread == pytest.approx(0.25)
    assert host["stalls_per_s"].source == "measured here: 16 stalls in 40 s"
    assert host["steals_per_s"].value == pytest.approx(0.5 / 40.0)
    assert host["steals_per_s"].spread > 1.0  # none in 40 s says little
    assert host["steal_s"].source.startswith("prior")


def test_a_gate_is_as_sure_as_its_times_agree(scenario: Scenario) -> None:
    host = fit_machine(
        scenario, load_profile(scenario.profile), *machine_tables(scenario), "m"
    ).host
    assert host["gate_latency_s"].source == "measured here: gate of a process job"
    assert host["gate_latency_s"].spread == pytest.approx(math.log(2.0) / 1.2816, rel=0.01)


def test_spreads_are_as_wide_as_the_measurements_scatter(scenario: Scenario) -> None:
    base = load_profile(scenario.profile)
    latency, jobs, actuation = machine_tables(scenario)
    sure = fit_machine(scenario, base, latency, jobs, actuation, "m").service
    factors = np.exp(np.random.default_rng(0).normal(0.0, 0.6, len(latency)))
    drifting = latency.assign(p95_us=latency["p95_us"] * factors)
    unsure = fit_machine(scenario, base, drifting, jobs, actuation, "m").service
    assert unsure["core_capacity_qps"].spread > 2.0 * sure["core_capacity_qps"].spread


def test_everything_measured_has_a_name_of_its_own(tmp_path: Path) -> None:
    campaign = Campaign(load_scenario("local"), FULL, Store(tmp_path, {}))
    tasks = list(campaign.tasks(1e5, 2))
    assert {"sort T1 beside cpu", "sort T1 beside job cpu"} < {task.key for task in tasks}
    assert len({(task.table, task.key) for task in tasks}) == len(tasks)


def test_pairs_tell_who_slows_whom_down(scenario: Scenario) -> None:
    base = load_profile("cca-2025")
    rng = np.random.default_rng(4)
    truth = {name: 0.1 * 2.0**k for k, name in enumerate(sorted(base.jobs))}  # sensitivity
    rows = [
        {"source": "here", "job": job, "threads": 1, "beside": beside, "rep": rep}
        | {"real_s": 10.0 * (1.0 + (0.5 * truth[job] if beside != "none" else 0.0))}
        for job in truth
        for beside in ("none", *(f"job {other}" for other in truth if other != job))
        for rep in range(3)
    ]
    jobs = pd.DataFrame(rows)
    jobs["real_s"] *= 1.0 + 0.005 * rng.normal(size=len(jobs))
    namesake = jobs[jobs["beside"] == "none"].assign(beside="radix", real_s=30.0)  # a source
    fitted = fit_pairs(base, job_times(pd.concat([jobs, namesake]))).jobs
    for job in truth:
        for other in set(truth) - {job}:
            product = fitted[job]["sensitivity"].value * fitted[other]["pressure"].value
            assert product == pytest.approx(0.5 * truth[job], rel=0.15, abs=0.02)
    most = max(truth, key=truth.__getitem__)
    assert fitted[most]["sensitivity"].source == "measured here, in pairs, with its prior"
    assert fit_pairs(base, job_times(jobs[jobs["beside"] == "none"])) == base


def test_disturbed_rounds_make_up_the_number_that_is_needed() -> None:
    table = pd.DataFrame({"point": [1, 1, 1, 1, 2, 2], "disturbed": [0, 1, 2, 1, 2, 2]})
    assert trusted(table, ["point"]).index.tolist() == [0, 4, 5]
    assert trusted(table, ["point"], least=2).index.tolist() == [0, 1, 3, 4, 5]


def test_the_report_names_what_matters_and_how_well_it_is_known(
    scenario: Scenario, tmp_path: Path
) -> None:
    latency, jobs, actuation = machine_tables(scenario)
    rng = np.random.default_rng(3)
    pressed = [
        {"job": "matrix", "threads": 1, "beside": beside, "rep": rep, "disturbed": 0.0}
        | {"real_s": seconds * (1.0 + 0.01 * rng.normal()), "overhead_s": 0.5}
        for beside, seconds in (("cpu", 61.0), ("membw", 36.6))
        for rep in range(3)
    ]
    runs = [
        {"threads": threads, "connections": connections, "target_qps": target}
        | {"disturbed": float(rep > 0 and threads == connections // 4 == 2)}
        | {"p95_us": 100.0 + rng.normal(), "achieved_qps": 1e5 * threads + 100.0 * rng.normal()}
        for threads in (1, 2)
        for connections in (2, 8)
        for target in (2e5, 7e5)
        for rep in range(3)
    ]
    factors = (factor("threads=1,2"), Factor("connections", (2, 8)))
    jobs = pd.concat([jobs, pd.DataFrame(pressed)])
    profile = fit_machine(
        scenario, load_profile(scenario.profile), latency, jobs, actuation, "a machine"
    )
    tables = Measured(latency, jobs, actuation, pd.DataFrame(runs), factors)
    _, summary = write_report(scenario, profile, tables, tmp_path)
    by_name = summary.set_index("measured")
    assert by_name.loc["memcached T2C1 alone, p95", "points"] == len(GRID)
    assert by_name.loc["matrix beside something", "rounds"] == 3
    page = (tmp_path / "report.html").read_text()
    assert "3 rounds each, 2 of these runs disturbed: of the variation threads 100%" in page
    load = pd.read_csv(tmp_path / "breaches.csv")["target_qps"].unique().item()
    alone = curves(latency.assign(source="here")).query("beside == 'none' and cores == 1")
    served = alone.query("achieved_qps >= 0.97 * target_qps")
    within = served.loc[served["p95_us"] <= scenario.service.slo_us, "target_qps"]
    assert alone["target_qps"].min() < load == within.max() < alone["target_qps"].max()
    times = pd.read_csv(tmp_path / "job-times.csv").set_index(["beside", "threads"])
    assert times.loc[("cpu", 1), "ratio"] == pytest.approx(2.0, rel=0.02)
    assert 0.0 < times.loc[("cpu", 1), "ratio_ci"] < 0.2
    assert len(pd.read_csv(tmp_path / "speedups.csv")) == 2


def test_load_and_slo_follow_their_rule(scenario: Scenario) -> None:
    latency, _, _ = machine_tables(scenario)
    most, slo_us, refuge, text = local_load(latency, NO_SCANS, SERVICE)
    medians = latency.groupby(["cores", "beside", "target_qps"])["p95_us"].median()
    one = medians[1, "none"]
    assert most == pytest.approx(1.15 * knee_qps(one.index.to_numpy(), one.to_numpy()))
    assert refuge == 2
    fast, slow = (
        np.interp(most, medians[curve].index, medians[curve])
        for curve in ((2, "none"), (1, "cpu (equal)"))
    )
    assert fast < slo_us < slow
    assert slo_us == pytest.approx((slow * fast) ** 0.5, rel=0.02)
    assert "geometric mean" in text
    no_knee = (latency["beside"] == "none") & (latency["cores"] == 1)
    most, _, _, text = local_load(
        latency.assign(p95_us=latency["p95_us"].mask(no_knee, 900.0)), NO_SCANS, SERVICE
    )
    assert most == pytest.approx(1.15 * 400e3, rel=0.02) and "CAUTION" in text
    below = latency[latency["target_qps"] < 300e3]
    with pytest.raises(InputError, match="has no knee"):
        local_load(below, NO_SCANS, SERVICE)


def test_a_load_at_which_the_probe_saw_no_request_tells_nothing(scenario: Scenario) -> None:
    latency, _, _ = machine_tables(scenario)
    known = local_load(latency, NO_SCANS, SERVICE)
    alone = (latency["cores"] == 1) & (latency["beside"] == "none")
    below = latency.loc[alone & (latency["target_qps"] < known.most_qps), "target_qps"].max()
    there = alone & (latency["target_qps"] == below)
    blind = latency.assign(p95_us=latency["p95_us"].mask(there))
    assert local_load(blind, NO_SCANS, SERVICE) == local_load(latency[~there], NO_SCANS, SERVICE)


def test_of_sweep_and_scans_the_slower_one_sets_load_and_slo(scenario: Scenario) -> None:
    """The host gave memcached half as much again in the minute of the sweep."""
    latency, _, _ = machine_tables(scenario)
    sweep = latency[(latency["beside"] == "none") & (latency["cores"] == 1)]
    slower = sweep.assign(target_qps=sweep["target_qps"] / 1.5, disturbed=0.0)
    most, slo_us, _, _ = local_load(latency, NO_SCANS, SERVICE)
    least, wider_us, _, text = local_load(latency, slower, SERVICE)
    assert least == pytest.approx(most / 1.5, rel=0.01)
    assert slo_us < wider_us
    assert "in the scans for its largest throughput" in text
    for others in (
        slower.assign(disturbed=2.0),  # not memcached's doing
        slower.assign(target_qps=2.0 * sweep["target_qps"]),
    ):
        assert local_load(latency, others, SERVICE)[:2] == (most, slo_us)


def with_held_vcpu(latency: pd.DataFrame, worth: float) -> pd.DataFrame:
    """The tables of a machine whose load generator leaves so much of the second vCPU."""
    one = latency[(latency["cores"] == 1) & ~latency["beside"].str.contains("equal")]
    asked = (1.0 + worth) * one["target_qps"]
    two = one.assign(cores=2, target_qps=asked, achieved_qps=(1.0 + worth) * one["achieved_qps"])
    return pd.concat([latency[latency["cores"] == 1], two])


def test_a_second_vcpu_that_adds_next_to_nothing_is_no_refuge(scenario: Scenario) -> None:
    latency, _, _ = machine_tables(scenario)
    one = latency[latency["cores"] == 1].groupby(["beside", "target_qps"])["p95_us"].median()
    sweeps = (one["none"], one["cpu (background)"])
    knee = min(knee_qps(sweep.index.to_numpy(), sweep.to_numpy()) for sweep in sweeps)
    most, _, refuge, text = local_load(with_held_vcpu(latency, 0.1), NO_SCANS, SERVICE)
    assert refuge == 1 and "vCPUs of memcached's refuge: 1" in text
    assert most == pytest.approx(knee / 1.6, rel=0.02)
    less = local_load(with_held_vcpu(latency, -0.2), NO_SCANS, SERVICE)
    assert (less.most_qps, less.refuge) == (most, 1)
    more = local_load(with_held_vcpu(latency, 0.5), NO_SCANS, SERVICE)
    assert more.refuge == 2
    assert more.most_qps == pytest.approx(1.5 * knee / 1.6, rel=0.02)


def test_only_a_set_that_was_seen_to_serve_more_becomes_the_refuge(scenario: Scenario) -> None:
    """p95 without a knee says that all is well only where all that was asked for was served."""
    latency, _, _ = machine_tables(scenario)
    held = with_held_vcpu(latency, 0.1)
    two = held["cores"] == 2
    flat = held.assign(p95_us=held["p95_us"].mask(two, 900.0))
    assert local_load(flat, NO_SCANS, SERVICE).refuge == 1
    served = flat.assign(achieved_qps=flat["achieved_qps"].mask(two, flat["target_qps"]))
    assert local_load(served, NO_SCANS, SERVICE).refuge == 2
    lost = held.assign(p95_us=held["p95_us"].mask(two & (held["target_qps"] > 500e3)))
    assert local_load(lost, NO_SCANS, SERVICE).refuge == 1
    alone = latency[(latency["cores"] == 1) | (latency["beside"] == "none")]
    assert local_load(alone, NO_SCANS, SERVICE).refuge == 1, "nothing is known beside jobs"


def test_a_refuge_is_one_of_the_scenarios_sets(scenario: Scenario) -> None:
    latency, _, _ = machine_tables(scenario)
    wide = SERVICE.model_copy(update={"core_choices": ((0, 1),)})
    found = local_load(with_held_vcpu(latency, 0.1), NO_SCANS, wide)
    assert found.refuge == 2
    assert found.most_qps > local_load(with_held_vcpu(latency, 0.1), NO_SCANS, SERVICE).most_qps


def test_each_vcpu_more_has_to_add_a_third_of_its_part(scenario: Scenario) -> None:
    latency, _, _ = machine_tables(scenario)
    three = SERVICE.model_copy(update={"threads": 3, "core_choices": ((0,), (0, 1), (0, 1, 2))})
    base = with_held_vcpu(latency, 0.5).assign(threads=3)
    for worth, refuge in ((0.1, 2), (0.25, 3)):  # of what two serve; a third of a half is asked
        wider = base[base["cores"] == 2].assign(cores=3)
        wider = wider.assign(
            target_qps=(1.0 + worth) * wider["target_qps"],
            achieved_qps=(1.0 + worth) * wider["achieved_qps"],
        )
        assert local_load(pd.concat([base, wider]), NO_SCANS, three).refuge == refuge


def test_what_leaves_room_for_a_slower_host_does_so_once(scenario: Scenario) -> None:
    """A host that was seen to be slower has less room left to become so."""
    latency, _, _ = machine_tables(scenario)
    latency = with_held_vcpu(latency, 0.1)
    sweep = latency[(latency["beside"] == "none") & (latency["cores"] == 1)]
    most = local_load(latency, NO_SCANS, SERVICE).most_qps
    for slower, least in ((1.3, most), (2.0, most * 1.6 / 2.0)):
        scans = sweep.assign(target_qps=sweep["target_qps"] / slower, disturbed=0.0)
        assert local_load(latency, scans, SERVICE).most_qps == pytest.approx(least, rel=0.02)


@pytest.mark.parametrize(
    ("service", "refuge", "usual", "overflow"),
    [
        ({"core_choices": [[0], [0, 1]]}, 1, ((0,),), (0, 1)),
        ({"core_choices": [[0], [0, 1]]}, 2, ((0,), (0, 1)), ()),
        ({"core_choices": [[0]], "overflow_cores": [0, 1]}, 1, ((0,),), (0, 1)),
        ({"core_choices": [[0]], "overflow_cores": [0, 1]}, 2, ((0,), (0, 1)), ()),
        # Two threads do not fill three vCPUs, which are not measured.
        ({"core_choices": [[0], [0, 1]], "overflow_cores": [0, 1, 2]}, 1, ((0,),), (0, 1, 2)),
        (
            {"core_choices": [[0], [0, 1]], "overflow_cores": [0, 1, 2]},
            2,
            ((0,), (0, 1)),
            (0, 1, 2),
        ),
    ],
)
def test_what_is_larger_than_the_refuge_is_for_overflowing_it(
    service: dict[str, list[int]],
    refuge: int,
    usual: tuple[tuple[int, ...], ...],
    overflow: tuple[int, ...],
    scenario: Scenario,
    tmp_path: Path,
) -> None:
    content = scenario.model_dump(mode="json", exclude_defaults=True)
    content["service"] = {"threads": 2, "slo_us": 800.0} | service
    content["machine"]["vcpus"] = 4
    given = Scenario.model_validate(content)
    latency, _, _ = machine_tables(scenario)
    measured = with_held_vcpu(latency, 0.1) if refuge == 1 else latency
    write_profile(load_profile("local"), given, measured, NO_SCANS, tmp_path)
    written = load_scenario(tmp_path / "scenario.yaml").service
    assert (written.core_choices, written.overflow_cores) == (usual, overflow)


def test_wild_readings_beside_background_work_raise_no_load_and_leave_capacity(
    scenario: Scenario,
) -> None:
    """A stolen-from machine has served more beside spinning jobs than alone, and the reverse."""
    latency, jobs, actuation = machine_tables(scenario)
    row = (latency["beside"] == "cpu (background)") & (latency["cores"] == 2)
    factor = np.exp(np.random.default_rng(1).normal(0.0, 1.5, len(latency)))
    wild = latency.assign(
        p95_us=latency["p95_us"].where(~row, latency["p95_us"] * factor),
        achieved_qps=latency["achieved_qps"].where(~row, latency["target_qps"]),
    )
    # They may make the load smaller, as a slow minute would, and never larger.
    calm = local_load(latency, NO_SCANS, SERVICE)
    assert 0.5 < local_load(wild, NO_SCANS, SERVICE).most_qps / calm.most_qps <= 1.0
    profile = fit_machine(scenario, load_profile(scenario.profile), wild, jobs, actuation, "m")
    assert profile.service["core_capacity_qps"].value == pytest.approx(400e3, rel=0.05)
    assert predicted_p95(profile, 200e3) == pytest.approx(predicted_p95(None, 200e3), rel=0.2)


def test_what_requests_cost_is_measured(scenario: Scenario) -> None:
    latency, jobs, actuation = machine_tables(scenario)
    part = np.minimum(latency["achieved_qps"] / 400e3, 1.0)
    latency["cpu_util_pct"] = 100.0 * part**0.6
    latency["client_cores"] = 0.7 * part**0.4
    base = load_profile(scenario.profile)
    remote = fit_machine(scenario, base, latency, jobs, actuation, "m").costs
    assert remote["service_exponent"].value == pytest.approx(0.6, rel=0.1)
    assert "client_cpu" not in remote  # it takes none of the scenario's vCPUs
    latency["shares_client"] = (latency["cores"] > 1).astype(float)
    local = fit_machine(scenario, base, latency, jobs, actuation, "m").costs
    assert local["client_cpu"].value == pytest.approx(0.7, rel=0.1)
    assert local["client_exponent"].value == pytest.approx(0.4, rel=0.1)
    assert local["agent_cpu"].value == pytest.approx(0.08 + LOOP_VCPUS)


def test_a_job_that_does_not_scale_is_known_as_badly_as_the_law_fits(scenario: Scenario) -> None:
    latency, jobs, actuation = machine_tables(scenario)
    jobs["real_s"] = 20.0  # with two threads as with one; the law allows 0.75 of it
    profile = fit_machine(scenario, load_profile(scenario.profile), latency, jobs, actuation, "m")
    assert 0.02 < profile.jobs["matrix"]["work_s"].spread < 0.5
    assert profile.jobs["matrix"]["serial_fraction"].spread <= 1.0


def test_disturbed_points_do_not_move_the_fit(scenario: Scenario) -> None:
    latency, jobs, actuation = machine_tables(scenario)
    broken = latency[latency["rep"] == 0].assign(disturbed=2.0, p95_us=9e4, achieved_qps=1e3)
    base = load_profile(scenario.profile)
    mixed = fit_machine(scenario, base, pd.concat([latency, broken]), jobs, actuation, "m")
    clean = fit_machine(scenario, base, latency, jobs, actuation, "m")
    assert mixed.service == clean.service


def test_a_job_that_did_not_end_keeps_its_prior_or_is_longer_than_any(scenario: Scenario) -> None:
    latency, jobs, actuation = machine_tables(scenario)
    jobs["real_s"] = np.nan
    base = load_profile(scenario.profile)
    profile = fit_machine(scenario, base, latency, jobs, actuation, "m")
    assert profile.jobs["matrix"]["work_s"].source.startswith("prior (profile prior)")
    assert profile.jobs["matrix"]["work_s"].value == base.jobs["matrix"]["work_s"].value
    other = base.model_copy(update={"jobs": {}})
    work = fit_machine(scenario, other, latency, jobs, actuation, "m").jobs["matrix"]["work_s"]
    assert work.value > 30.0 and work.source.endswith("30 s of CPU time did not end it")


@pytest.mark.parametrize(
    ("command", "threads", "expected", "part"),
    [
        (("s", "--matrix-ops", "1000"), 1, ("s", "--matrix-ops", "250"), 0.25),
        (("s", "--cpu-ops=8", "-t", "0"), 1, ("s", "--cpu-ops=2", "-t", "0"), 0.25),
        (("s", "--tree-ops", "36"), 2, ("s", "--tree-ops", "8"), 8 / 36),  # four each
        (("s", "--cpu-ops", "1"), 1, ("s", "--cpu-ops", "1"), 1.0),
        (("./run", "-n", "4"), 1, ("./run", "-n", "4"), 1.0),
    ],
)
def test_a_stress_job_is_cut_short_by_its_operations(
    command: tuple[str, ...], threads: int, expected: tuple[str, ...], part: float
) -> None:
    job = Job(name="j", command=command, threads=(1, 2), memory_mib=1)
    cut, really = shortened(job, 0.25, threads)
    assert (cut.command, really) == (expected, pytest.approx(part))
